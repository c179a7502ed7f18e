#include "server/rpc/scale_checker.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "core/formats/scale_type.h"
#include "core/types/block_layout.h"
#include "core/types/scale_window.h"
#include "server/wire/encoding_proto.h"

namespace quantd::server {
namespace {

// Number of scales that is assumed where scale_shape is not known.
constexpr int64_t kMostScales = int64_t{1} << 56;

// The scale code of 1.0.
uint8_t CodeOfOne(core::ScaleType type) {
  switch (type) {
    case core::ScaleType::kE8m0:
      return 127;
    case core::ScaleType::kE4m3:
      return 0x38;
    default:
      return 1;
  }
}

absl::Status CountError(absl::string_view field, absl::string_view what) {
  return core::WithField(core::ScaleShapeError(what), field);
}

// The outline by itself, whatever its scales are.
absl::Status CheckOutline(const core::Encoding& outline) {
  core::Encoding sample = outline;
  std::fill(sample.scale_shape.begin(), sample.scale_shape.end(), 1);
  if (core::HasScaleCodes(sample.scale_type)) {
    sample.scale_code = {CodeOfOne(sample.scale_type)};
  } else {
    sample.scale = {1};
  }
  if (core::HasOuterScales(sample.scale_type)) sample.outer_scale = {1};
  if (sample.zero_points_are_real) {
    sample.real_zero_point = {static_cast<float>(sample.qmin)};
  }
  if (absl::Status s = core::DeriveScales(&sample); !s.ok()) return s;
  return core::ValidateEncoding(sample);
}

}  // namespace

absl::StatusOr<ScaleChecker> ScaleChecker::Create(const v1::Encoding& proto) {
  if (proto.scale_size() > 0 || proto.zero_point_size() > 0 ||
      proto.real_zero_point_size() > 0 || !proto.scale_code().empty() ||
      proto.outer_scale_size() > 0) {
    return CountError("scales_in_chunks",
                      "the encoding has scales in its message, expected them "
                      "in chunks");
  }
  absl::StatusOr<core::Encoding> outline = EncodingOutlineFromProto(proto);
  if (!outline.ok()) return outline.status();
  absl::Status status =
      core::ValidateWithoutScales(*outline, proto.chunks_have_zero_points());
  if (status.ok()) status = CheckOutline(*outline);
  if (!status.ok()) return status;
  absl::optional<int64_t> expected_count;
  if (!outline->scale_shape.empty()) {
    const absl::StatusOr<int64_t> count =
        core::ElementCount(outline->scale_shape);
    if (!count.ok()) {
      return core::WithField(
          core::BlockSizeInvalidError(core::ErrorText(count.status())),
          "scale_shape");
    }
    expected_count = *count;
    // Every stored encoding has a scale.
    if (*count == 0) {
      return core::WithField(
          core::BlockSizeInvalidError("an entry is 0, expected at least 1"),
          "scale_shape");
    }
    for (size_t d = 0; d < outline->scale_shape.size(); ++d) {
      const bool is_whole =
          outline->block_size.empty() || outline->block_size[d] == 0;
      if (is_whole && outline->scale_shape[d] != 1) {
        return core::WithField(
            core::BlockSizeInvalidError(absl::StrCat(
                "entry ", d, " is ", outline->scale_shape[d],
                ", expected 1 where one block takes the whole dimension")),
            "scale_shape");
      }
    }
  }
  // The scales are the elements of the window, one to a block.
  const int64_t count = expected_count.value_or(kMostScales);
  absl::StatusOr<core::BlockLayout> layout =
      core::BlockLayout::Create({count}, {1});
  if (!layout.ok()) return layout.status();
  absl::StatusOr<core::BlockLayout> outer_layout =
      expected_count.has_value()
          ? core::OuterLayout(*outline, outline->scale_shape)
          : core::BlockLayout::Create({count}, {});
  if (!outer_layout.ok()) return outer_layout.status();
  return ScaleChecker(
      core::ScaleWindow(*std::move(outline), *std::move(layout),
                        *std::move(outer_layout),
                        proto.chunks_have_zero_points(), 0, count),
      expected_count);
}

int64_t ScaleChecker::memory_bytes() const { return window_.MemoryBytes(0); }

absl::Status ScaleChecker::Check(const v1::ScaleChunk& chunk) {
  absl::Status status = window_.Append(ScaleBytesOf(chunk));
  if (status.ok()) window_.Drop(window_.end(), window_.end());
  return status;
}

absl::Status ScaleChecker::Finish() const {
  const int64_t count = window_.end();
  const int64_t expected =
      expected_count_.value_or(std::max<int64_t>(count, 1));
  if (count != expected) {
    return core::WithField(core::ScaleCountError(expected, count), "scales");
  }
  if (!core::HasOuterScales(outline().scale_type)) return absl::OkStatus();
  const auto outer_count =
      static_cast<int64_t>(window_.encoding().outer_scale.size());
  const int64_t expected_outer_count = window_.outer_layout().scale_count();
  if (outer_count != expected_outer_count) {
    return core::WithField(
        core::OuterScaleCountError(expected_outer_count, outer_count),
        "scales");
  }
  return absl::OkStatus();
}

}  // namespace quantd::server
