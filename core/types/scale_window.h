// Encodings whose scales pass by in pieces.

#ifndef QUANTD_CORE_TYPES_SCALE_WINDOW_H_
#define QUANTD_CORE_TYPES_SCALE_WINDOW_H_

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"

namespace quantd::core {

// Consecutive scales of an encoding, of which the first ones go as others come.
// encoding() has no others, and layout() counts from the first of them, so that
// kernels work with both as with those of a whole tensor. Not thread-safe.
class ScaleWindow {
 public:
  // Consecutive scales as they are stored; see core/types/scale_bytes.h.
  struct Bytes {
    uint64_t first = 0;
    absl::Span<const uint8_t> scale;
    absl::Span<const uint8_t> zero_point;
    uint64_t first_outer = 0;
    absl::Span<const uint8_t> outer_scale;
  };

  // `encoding`         without scales, by ValidateWithoutScales.
  // `layout`           of the tensor; `outer_layout` that of OuterLayout, only
  //                    with outer scales.
  // `has_zero_points`  each scale has one.
  // `begin`, `end`     elements that will be worked on.
  ScaleWindow(Encoding encoding, BlockLayout layout, BlockLayout outer_layout,
              bool has_zero_points, int64_t begin, int64_t end);

  // Takes the next scales. The first ones may begin anywhere up to the first
  // that is needed.
  // Errors: SCALE_COUNT (gaps, too many, parts of a scale, another number of
  // zero points, no outer scale), SCALE_INVALID, ZERO_POINT_RANGE.
  absl::Status Append(const Bytes& bytes);
  // Takes all of `scales` as the next scales, without a check. `scales` has no
  // outer scales but those that are here.
  void Append(const Encoding& scales);

  // Makes room for all scales that are needed.
  void Reserve();

  // Errors: SCALE_COUNT unless all scales of elements [first, first + count)
  // are here.
  absl::Status CheckCovers(int64_t first, int64_t count) const;
  // Lets go of scales that no element from `first` on uses, but not of those
  // from `keep` on.
  void Drop(int64_t first, int64_t keep);

  // Scale indices that are here.
  int64_t begin() const { return layout_.first_scale(); }
  int64_t end() const {
    return begin() + static_cast<int64_t>(encoding_.scale.size());
  }
  // Index of the first outer scale that encoding() has.
  int64_t first_outer() const { return first_outer_; }
  // Scale indices that the elements to work on use, the bounds of them.
  const BlockLayout::ScaleRange& needed() const { return needed_; }
  // Bytes of memory that the scales take with `scale_count` more of them.
  int64_t MemoryBytes(int64_t scale_count) const;

  const Encoding& encoding() const { return encoding_; }
  // Moves it out; nothing else is called then.
  Encoding TakeEncoding() { return std::move(encoding_); }
  const BlockLayout& layout() const { return layout_; }
  const BlockLayout& outer_layout() const { return outer_layout_; }
  bool has_zero_points() const { return has_zero_points_; }

 private:
  absl::Status AppendOuter(const Bytes& bytes);
  // The scales are those from `first` on.
  void Begin(int64_t first);
  bool has_outer_scales() const { return HasOuterScales(encoding_.scale_type); }

  const int64_t element_end_;
  const bool has_zero_points_;
  Encoding encoding_;
  BlockLayout layout_;
  const BlockLayout outer_layout_;
  const BlockLayout::ScaleRange needed_;
  // Something was appended.
  bool has_begun_ = false;
  // Index of the first outer scale, and how many there are.
  int64_t first_outer_ = 0;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_TYPES_SCALE_WINDOW_H_
