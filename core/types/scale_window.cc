#include "core/types/scale_window.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/formats/scale_type.h"
#include "core/types/encoding_memory.h"
#include "core/types/scale_bytes.h"

namespace quantd::core {
namespace {

absl::Status CountError(absl::string_view field, absl::string_view what) {
  return WithField(ScaleShapeError(what), field);
}

}  // namespace

ScaleWindow::ScaleWindow(Encoding encoding, BlockLayout layout,
                         BlockLayout outer_layout, bool has_zero_points,
                         int64_t begin, int64_t end)
    : element_end_(end),
      has_zero_points_(has_zero_points),
      encoding_(std::move(encoding)),
      layout_(std::move(layout)),
      outer_layout_(std::move(outer_layout)),
      needed_(begin < end ? layout_.ScaleBounds(begin, end - begin)
                          : BlockLayout::ScaleRange{0, 0}) {}

void ScaleWindow::Begin(int64_t first) {
  has_begun_ = true;
  layout_ = layout_.Window(first);
}

absl::Status ScaleWindow::AppendOuter(const Bytes& bytes) {
  if (bytes.outer_scale.empty()) return absl::OkStatus();
  constexpr absl::string_view kField = "outer_scale";
  if (!has_outer_scales()) {
    return CountError(kField,
                      absl::StrCat("outer scales came, expected none "
                                   "with scales that are ",
                                   ScaleTypeName(encoding_.scale_type)));
  }
  const auto count = static_cast<int64_t>(encoding_.outer_scale.size());
  if (count == 0) {
    const int64_t needed =
        needed_.first < needed_.end
            ? outer_layout_
                  .ScaleBounds(needed_.first, needed_.end - needed_.first)
                  .first
            : 0;
    if (bytes.first_outer > static_cast<uint64_t>(needed)) {
      return CountError(
          "first_outer",
          absl::StrCat("the first outer scale is ", bytes.first_outer,
                       ", expected at most ", needed));
    }
    first_outer_ = static_cast<int64_t>(bytes.first_outer);
  } else if (bytes.first_outer != static_cast<uint64_t>(first_outer_ + count)) {
    return CountError(
        "first_outer",
        absl::StrCat("outer scales begin at ", bytes.first_outer, ", expected ",
                     first_outer_ + count, ", where the last ones end"));
  }
  if (bytes.outer_scale.size() % sizeof(float) != 0) {
    return CountError(kField,
                      absl::StrCat("outer_scale has ", bytes.outer_scale.size(),
                                   " bytes, expected a multiple of 4"));
  }
  const int64_t end =
      first_outer_ + count +
      static_cast<int64_t>(bytes.outer_scale.size() / sizeof(float));
  if (end > outer_layout_.scale_count()) {
    return WithField(OuterScaleCountError(outer_layout_.scale_count(), end),
                     kField);
  }
  AppendOuterScales(bytes.outer_scale, &encoding_);
  for (auto i = static_cast<size_t>(count); i < encoding_.outer_scale.size();
       ++i) {
    absl::Status status = CheckOuterScale(
        first_outer_ + static_cast<int64_t>(i), encoding_.outer_scale[i]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ScaleWindow::Append(const Bytes& bytes) {
  if (absl::Status s = AppendOuter(bytes); !s.ok()) return s;
  const int64_t scale_bytes = ScaleSizeBytes(encoding_.scale_type);
  if (bytes.scale.size() % static_cast<size_t>(scale_bytes) != 0) {
    return CountError(
        "scale", absl::StrCat("scale has ", bytes.scale.size(),
                              " bytes, expected a multiple of ", scale_bytes));
  }
  const int64_t count = static_cast<int64_t>(bytes.scale.size()) / scale_bytes;
  const size_t zero_point_bytes =
      has_zero_points_
          ? static_cast<size_t>(count * ZeroPointSizeBytes(encoding_))
          : 0;
  if (bytes.zero_point.size() != zero_point_bytes) {
    return CountError("zero_point",
                      absl::StrCat("zero_point has ", bytes.zero_point.size(),
                                   " bytes, expected ", zero_point_bytes,
                                   " beside ", count, " scales"));
  }
  if (count == 0) return absl::OkStatus();
  const uint64_t expected =
      static_cast<uint64_t>(has_begun_ ? end() : needed_.first);
  if (has_begun_ ? bytes.first != expected : bytes.first > expected) {
    return CountError(
        "first", has_begun_ ? absl::StrCat("scales begin at ", bytes.first,
                                           ", expected ", expected,
                                           ", where the last ones end")
                            : absl::StrCat("the first scale is ", bytes.first,
                                           ", expected at most ", expected));
  }
  const int64_t first = static_cast<int64_t>(bytes.first);
  if (count > layout_.scale_count() - first) {
    return WithField(ScaleCountError(layout_.scale_count(), first + count),
                     "scale");
  }
  if (!has_begun_) Begin(first);

  const size_t held = encoding_.scale.size();
  AppendScales(bytes.scale, &encoding_);
  if (encoding_.scale_type == ScaleType::kE8m0) {
    for (const uint8_t code : bytes.scale) {
      encoding_.scale.push_back(ScaleOfCode(encoding_, code, 0));
    }
  } else if (has_outer_scales()) {
    const auto outer_count = static_cast<int64_t>(encoding_.outer_scale.size());
    BlockLayout::RunCursor cursor(outer_layout_, first, count);
    BlockLayout::Run run;
    while (cursor.Next(&run)) {
      for (int64_t k = 0; k < run.count; ++k) {
        const int64_t outer =
            run.scale_index + k * run.scale_step - first_outer_;
        if (outer < 0 || outer >= outer_count) {
          return CountError(
              "outer_scale",
              absl::StrCat("scale ", run.begin + k, " came before outer scale ",
                           outer + first_outer_, ", expected it after that"));
        }
        encoding_.scale.push_back(
            ScaleOfCode(encoding_, bytes.scale[run.begin + k - first],
                        encoding_.outer_scale[outer]));
      }
    }
  }
  const bool has_codes = HasScaleCodes(encoding_.scale_type);
  for (int64_t i = 0; i < count; ++i) {
    absl::Status status =
        CheckScale(encoding_, first + i, encoding_.scale[held + i],
                   has_codes ? bytes.scale[i] : 0);
    if (!status.ok()) return status;
  }
  if (!has_zero_points_) return absl::OkStatus();
  AppendZeroPoints(bytes.zero_point, &encoding_);
  for (int64_t i = 0; i < count; ++i) {
    absl::Status status =
        encoding_.zero_points_are_real
            ? CheckRealZeroPoint(encoding_, first + i,
                                 encoding_.real_zero_point[held + i])
            : CheckZeroPoint(encoding_, first + i,
                             encoding_.zero_point[held + i]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void ScaleWindow::Append(const Encoding& scales) {
  if (!has_begun_) Begin(needed_.first);
  AppendScales(scales, &encoding_);
}

void ScaleWindow::Reserve() {
  ReserveScales(needed_.end - needed_.first, has_zero_points_, &encoding_);
}

absl::Status ScaleWindow::CheckCovers(int64_t first, int64_t count) const {
  if (count == 0) return absl::OkStatus();
  const BlockLayout::ScaleRange bounds = layout_.ScaleBounds(first, count);
  if (bounds.end <= end()) return absl::OkStatus();
  return CountError(
      "scale", absl::StrCat("elements up to ", first + count - 1, " use scale ",
                            bounds.end - 1, ", but only ", end(),
                            " came; expected it no later"));
}

void ScaleWindow::Drop(int64_t first, int64_t keep) {
  if (first >= element_end_) return;
  const int64_t begin = std::min(
      {layout_.ScaleBounds(first, element_end_ - first).first, keep, end()});
  const int64_t count = begin - layout_.first_scale();
  // Drops scales only if they are at least as many as those that have to be
  // moved.
  if (count <= 0 || count * 2 < static_cast<int64_t>(encoding_.scale.size())) {
    return;
  }
  const auto drop = [&](auto* values) {
    if (!values->empty()) {
      values->erase(values->begin(), values->begin() + count);
    }
  };
  drop(&encoding_.scale);
  drop(&encoding_.zero_point);
  drop(&encoding_.real_zero_point);
  drop(&encoding_.scale_code);
  layout_ = layout_.Window(begin);
}

int64_t ScaleWindow::MemoryBytes(int64_t scale_count) const {
  return (static_cast<int64_t>(encoding_.scale.size()) + scale_count) *
             MemoryPerScale(encoding_.scale_type, has_zero_points_) +
         static_cast<int64_t>(encoding_.outer_scale.size() * sizeof(float));
}

}  // namespace quantd::core
