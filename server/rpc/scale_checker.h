// Checks an encoding whose scales come in chunks, as they come.

#ifndef QUANTD_SERVER_RPC_SCALE_CHECKER_H_
#define QUANTD_SERVER_RPC_SCALE_CHECKER_H_

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "core/types/encoding.h"
#include "core/types/scale_window.h"
#include "quantd/v1/encoding.pb.h"

namespace quantd::server {

// Not thread-safe. Holds the outer scales and the scales of one chunk.
class ScaleChecker {
 public:
  // `proto` is the encoding without its scales.
  // Errors: those of core::ValidateEncoding, at the message's fields.
  static absl::StatusOr<ScaleChecker> Create(const v1::Encoding& proto);

  // The encoding; what it has of scales is some that came.
  const core::Encoding& outline() const { return window_.encoding(); }
  bool has_zero_points() const { return window_.has_zero_points(); }
  // Scales that came.
  int64_t scale_count() const { return window_.end(); }
  // Outer scales that are held, in bytes.
  int64_t memory_bytes() const;

  // Errors: those of core::ScaleWindow, which name a scale by its index in the
  // encoding, at the chunk's fields.
  absl::Status Check(const v1::ScaleChunk& chunk);
  // Checks that all scales have come.
  // Errors: SCALE_COUNT.
  absl::Status Finish() const;

 private:
  ScaleChecker(core::ScaleWindow window, absl::optional<int64_t> expected_count)
      : window_(std::move(window)), expected_count_(expected_count) {}

  core::ScaleWindow window_;
  // Number of scales by scale_shape; none where that is not known.
  absl::optional<int64_t> expected_count_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_SCALE_CHECKER_H_
