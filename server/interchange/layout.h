// Along which dimensions the scales of an encoding lie, for files that do not
// say it.

#ifndef QUANTD_SERVER_INTERCHANGE_LAYOUT_H_
#define QUANTD_SERVER_INTERCHANGE_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/optional.h"
#include "core/types/encoding.h"

namespace quantd::server {

// Facts about a tensor that are known beside the file.
struct LayoutHint {
  // Its dimensions, unless `shape_known` is false.
  std::vector<int64_t> shape;
  bool shape_known = false;
  // Block size of the tensor's encoding; empty where it is not known.
  std::vector<int64_t> block_size;
  // The axis of the channels, from the end where negative.
  absl::optional<int64_t> axis;
};

// An encoding that was read from a file.
struct PendingEncoding {
  // The part of the layout that the file leaves open.
  enum class Open {
    // Nothing: block_size is there.
    kNothing,
    // A scale per index of one dimension; the others are whole.
    kChannels,
    // Scales of [channels, blocks]: blocks of `block` elements along a second
    // dimension; the others are whole.
    kChannelBlocks,
  };

  std::string tensor;
  core::Encoding encoding;
  // Place of the encoding in the file, for errors.
  std::string place;
  Open open = Open::kNothing;
  // The axis of the channels, where the file has it.
  absl::optional<int64_t> axis;
  // kChannelBlocks.
  int64_t block = 0;
};

// True if dimension `d` is one block.
bool IsWhole(const core::Encoding& encoding, size_t d);

// The hint that an encoding of the same layout needs if a file leaves `open`.
LayoutHint HintOf(const core::Encoding& encoding, PendingEncoding::Open open);

// Fills in what the file leaves open: block_size, scale_shape, and the order of
// the scales. Then derives scales from codes and checks the encoding.
// Errors: AXIS_UNKNOWN (the hint does not decide it), INTERCHANGE_INVALID (the
// scales do not fit the hint, or the encoding is not valid), both of which name
// the place.
absl::Status ResolveLayout(const LayoutHint& hint, PendingEncoding* pending);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_INTERCHANGE_LAYOUT_H_
