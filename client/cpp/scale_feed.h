// Sends the scales of an encoding beside the elements that use them.

#ifndef QUANTD_CLIENT_CPP_SCALE_FEED_H_
#define QUANTD_CLIENT_CPP_SCALE_FEED_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/scales.h"
#include "quantd/v1/encoding.pb.h"

namespace quantd::internal {

// Not thread-safe.
class ScaleFeed {
 public:
  // Of a tensor whose payload has that many bits for each element. `scales`
  // must stay.
  // Errors: ARGUMENT_INVALID where there are not as many scales as the encoding
  // has blocks.
  static absl::StatusOr<ScaleFeed> Create(absl::Span<const int64_t> shape,
                                          const Encoding& encoding,
                                          const Scales& scales,
                                          int64_t payload_bits);

  // Begins anew.
  void Rewind();
  // The next scales that the first `end_bytes` of the payload use, at most 512
  // KiB of them; none when all these were given out.
  std::optional<v1::ScaleChunk> Next(uint64_t end_bytes);

 private:
  ScaleFeed() = default;

  std::vector<int64_t> shape_;
  std::vector<int64_t> block_size_;
  // Its format and what says how wide zero points are.
  Encoding encoding_;
  Scales scales_;
  uint64_t payload_bits_ = 0;
  uint64_t element_count_ = 0;
  uint64_t scale_bytes_ = 0;
  uint64_t sent_ = 0;
  uint64_t sent_outer_ = 0;
};

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_SCALE_FEED_H_
