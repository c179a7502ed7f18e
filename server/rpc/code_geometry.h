// Places in a tensor: of its reals, of its codes, and ranges of them.

#ifndef QUANTD_SERVER_RPC_CODE_GEOMETRY_H_
#define QUANTD_SERVER_RPC_CODE_GEOMETRY_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd::server {

// How a tensor's reals and its codes lie beside each other.
struct CodeGeometry {
  int64_t element_count = 0;
  // Bytes of one real.
  int64_t real_bytes = 0;
  // Smallest run of codes that fills whole bytes.
  int64_t codes_per_granule = 1;
  // Bytes of that run: 1, 2 for codes of 9 to 16 bits, 4 of 32.
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
  // Offset of the codes of the real at `real_offset_bytes`.
  int64_t CodesOffsetOfReal(int64_t real_offset_bytes) const {
    return CodesOffset(real_offset_bytes / real_bytes);
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

#endif  // QUANTD_SERVER_RPC_CODE_GEOMETRY_H_
