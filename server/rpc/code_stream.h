// What Quantize and Dequantize share: bytes up become bytes down in place.

#ifndef QUANTD_SERVER_RPC_CODE_STREAM_H_
#define QUANTD_SERVER_RPC_CODE_STREAM_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quantd/v1/tensor.pb.h"
#include "xxhash.h"

namespace quantd::server {

// XXH3 (64 bits, seed 0) of bytes that come in pieces. Not thread-safe.
class Checksum {
 public:
  Checksum();
  void Update(absl::Span<const uint8_t> data);
  uint64_t Digest() const;

 private:
  struct Deleter {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Deleter> state_;
};

// How a tensor's reals and its codes lie beside each other.
struct CodeGeometry {
  int64_t element_count = 0;
  // Bytes of one real.
  int64_t real_bytes = 0;
  // Smallest run of codes that fills whole bytes.
  int64_t codes_per_granule = 1;
  // Bytes of that run: 1, or 2 for codes of 9 to 16 bits.
  int64_t granule_code_bytes = 1;

  int64_t granule_real_bytes() const { return codes_per_granule * real_bytes; }
  int64_t reals_size_bytes() const { return element_count * real_bytes; }
  int64_t codes_size_bytes() const { return CodesOffset(element_count); }
  // Offset in bytes of the codes of element `index`, which starts a granule or
  // is the tensor's end.
  int64_t CodesOffset(int64_t index) const {
    return (index + codes_per_granule - 1) / codes_per_granule *
           granule_code_bytes;
  }
  // Index of the element whose codes start at `offset_bytes`, at most
  // element_count.
  int64_t CodesIndex(int64_t offset_bytes) const;
};

// The range of a header, or [0, size_bytes) when there is none.
// Errors: RANGE_INVALID: empty, beyond `size_bytes`, or a bound that is neither
// a multiple of granule_bytes nor the end.
absl::StatusOr<v1::ByteRange> CheckRange(const v1::ByteRange* range,
                                         int64_t size_bytes,
                                         int64_t granule_bytes);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_CODE_STREAM_H_
