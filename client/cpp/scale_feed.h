// Scales of an encoding in chunks: all of them, or beside the elements that use
// them.

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

// Cuts scales into chunks. Not thread-safe.
class ScalePieces {
 public:
  // `encoding` without its scales. `scales` must stay.
  ScalePieces(const Encoding& encoding, const Scales& scales);

  // Begins anew.
  void Rewind();
  // The next of the first `end` scales, at most 512 KiB of them, and before
  // them all outer scales; none when these were given out.
  std::optional<v1::ScaleChunk> Next(uint64_t end);

 private:
  // Its format and what says how wide zero points are.
  Encoding encoding_;
  Scales scales_;
  uint64_t scale_bytes_;
  uint64_t sent_ = 0;
  uint64_t sent_outer_ = 0;
};

// Not thread-safe.
class ScaleFeed {
 public:
  // Makes the feed of a tensor whose payload has that many bits for each
  // element. `scales` must stay.
  // Errors: ARGUMENT_INVALID where there are not as many scales as the encoding
  // has blocks.
  static absl::StatusOr<ScaleFeed> Create(absl::Span<const int64_t> shape,
                                          const Encoding& encoding,
                                          const Scales& scales,
                                          int64_t payload_bits);

  // Begins anew.
  void Rewind() { pieces_.Rewind(); }
  // The next scales that the first `end_bytes` of the payload use; none when
  // all these were given out.
  std::optional<v1::ScaleChunk> Next(uint64_t end_bytes);

 private:
  ScaleFeed(const Encoding& encoding, const Scales& scales)
      : pieces_(encoding, scales) {}

  ScalePieces pieces_;
  std::vector<int64_t> shape_;
  std::vector<int64_t> block_size_;
  uint64_t payload_bits_ = 0;
  uint64_t element_count_ = 0;
};

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_SCALE_FEED_H_
