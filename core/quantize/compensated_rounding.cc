#include "core/quantize/compensated_rounding.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "core/formats/grid.h"
#include "core/formats/number_format.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/compensated_rounding_kernel.h"
#include "core/quantize/quantize_kernel.h"
#include "core/simd_internal.h"
#include "core/types/float_convert.h"
#include "hwy/aligned_allocator.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/quantize/compensated_rounding.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/formats/float_codec-inl.h"
#include "core/formats/packing-inl.h"
#include "core/quantize/panel_product-inl.h"

#ifndef QUANTD_CORE_QUANTIZE_COMPENSATED_ROUNDING_ONCE
#define QUANTD_CORE_QUANTIZE_COMPENSATED_ROUNDING_ONCE
namespace quantd::core {
namespace {

// Columns of the input that are transposed at a time: a cache line of them.
constexpr int64_t kTransposed = 16;
// Between rows of codes, so that those of a column do not share a cache set.
constexpr int64_t kCodePadding = 64;

// Rows of a task.
int64_t TaskRows(ElementType type) {
  return type == ElementType::kFloat64 ? kPanelWidth<double>
                                       : kPanelWidth<float>;
}

int64_t LargestBlock(const CompensationFactor& factor) {
  int64_t size = 0;
  for (const CompensationFactor::Block& block : factor.blocks()) {
    size = std::max(size, block.size);
  }
  return size;
}

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_QUANTIZE_COMPENSATED_ROUNDING_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void QuantizeTask(const CompensatedRange& rows, QuantizeCounts* counts) {
  QuantizeCompensatedScalar(rows, counts);
}

#else

// One column of a task's rows, a lane for each. T is float or double.
template <typename T>
struct Column {
  static constexpr int64_t kWidth = kPanelWidth<T>;

  // Behind the last row the scales are 1, and the zero points 0.
  HWY_ALIGN T scale[kWidth];
  // Zero points of either kind, exact.
  HWY_ALIGN T zero_point[kWidth];
  HWY_ALIGN int32_t code[kWidth];
  // Index of the column, and of its scale above that of the row's first.
  int64_t index;
  int64_t scale_index = -1;
};

// Result of a rounder for a vector. NaN is left to RoundTask.
template <class D>
struct RoundedLanes {
  hn::Vec<hn::Rebind<int32_t, D>> code;
  // Number that Dequantize makes of each code.
  hn::Vec<D> value;
  hn::Mask<D> below;
  hn::Mask<D> above;
};

template <class D>
HWY_INLINE hn::Vec<hn::Rebind<int32_t, D>> ToCode(D d, hn::Vec<D> number) {
  const hn::Rebind<int32_t, D> di;
  if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
    return hn::DemoteTo(di, number);
  } else {
    return hn::ConvertTo(di, number);
  }
}

// By the definitions in quantize_scalar.cc and dequantize_scalar.cc. Zero
// points and codes less those are exact in T.
template <bool kIsReal>
struct IntegerRounder {
  template <class D>
  HWY_INLINE RoundedLanes<D> Round(D d, hn::Vec<D> x, hn::Vec<D> scale,
                                   hn::Vec<D> zero_point) const {
    using T = hn::TFromD<D>;
    auto low = hn::Set(d, static_cast<T>(qmin));
    auto high = hn::Set(d, static_cast<T>(qmax));
    auto quotient = hn::Div(x, scale);
    if constexpr (kIsReal) {
      quotient = hn::Add(quotient, zero_point);
    } else {
      low = hn::Sub(low, zero_point);
      high = hn::Sub(high, zero_point);
    }
    const auto rounded = hn::Round(quotient);
    auto code = hn::Min(hn::Max(rounded, low), high);
    auto number = code;
    if constexpr (kIsReal) {
      number = hn::Sub(code, zero_point);
    } else {
      code = hn::Add(code, zero_point);
    }
    return {ToCode(d, code), hn::Mul(number, scale), hn::Lt(rounded, low),
            hn::Gt(rounded, high)};
  }

  int32_t qmin;
  int32_t qmax;
};

template <class Grid>
struct GridRounder {
  template <class D>
  HWY_INLINE RoundedLanes<D> Round(D d, hn::Vec<D> x, hn::Vec<D> scale,
                                   hn::Vec<D> zero_point) const {
    // The zero point: it makes +0 of -0.
    const auto quotient = hn::Add(hn::Div(x, scale), hn::Zero(d));
    return {Encode(d, grid, quotient),
            hn::Mul(HWY_NAMESPACE::Round(d, grid, quotient), scale),
            IsBelow(d, grid, quotient), IsAbove(d, grid, quotient)};
  }

  const Grid& grid;
};

// Integers that vectors of T do not hold.
struct WideRounder {};

// Up to TaskRows rows, a lane for each, with all that a task holds.
template <typename T, class Rounder>
class TaskQuantizer {
 public:
  TaskQuantizer(const CompensatedRange& rows, const Rounder& rounder,
                QuantizeCounts* counts)
      : rows_(rows),
        range_(rows.range),
        rounder_(rounder),
        counts_(counts),
        row_count_(rows.rows()),
        code_bytes_(std::max(range_.format.storage_bits, 8) / 8),
        code_stride_(rows.factor.columns() * code_bytes_ + kCodePadding),
        tile_(hwy::AllocateAligned<T>(LargestBlock(rows.factor) * kWidth)),
        codes_(
            hwy::AllocateAligned<uint8_t>(row_count_ * code_stride_ + kWidth)) {
    std::fill(column_.scale, column_.scale + kWidth, T{1});
    std::fill(column_.zero_point, column_.zero_point + kWidth, T{0});
    for (int64_t row = 0; row < row_count_; ++row) {
      range_.layout.ForEachRun(range_.first + row * rows.factor.columns(), 1,
                               [&](const BlockLayout::Run& run) {
                                 row_scale_[row] = run.scale_index;
                               });
    }
  }

  void Quantize() {
    for (const CompensationFactor::Block& block : rows_.factor.blocks()) {
      LoadBlock(block);
      for (int64_t k = 0; k < block.size; k += kPanelRows) {
        if (rows_.stop.stopped()) return;
        RoundPanel(block, k);
      }
    }
    StoreCodes();
  }

 private:
  static constexpr int64_t kWidth = kPanelWidth<T>;
  using D = hn::ScalableTag<T>;

  // Elements of the block by position, for all rows.
  void LoadBlock(const CompensationFactor::Block& block) {
    const int64_t columns = rows_.factor.columns();
    const int32_t* position = rows_.factor.position().data();
    HWY_ALIGN T lines[kTransposed][kWidth] = {};
    const int64_t end = block.first + block.size;
    for (int64_t begin = block.first; begin < end; begin += kTransposed) {
      const int64_t count = std::min(kTransposed, end - begin);
      for (int64_t row = 0; row < row_count_; ++row) {
        for (int64_t c = 0; c < count; ++c) {
          lines[c][row] =
              LoadElement<T>(range_.type, range_.in, row * columns + begin + c);
        }
      }
      for (int64_t c = 0; c < count; ++c) {
        std::memcpy(tile_.get() + (position[begin + c] - block.first) * kWidth,
                    lines[c], sizeof(lines[c]));
      }
    }
  }

  // The positions [first, first + kPanelRows) of a block, as far as there are.
  // In the tile q - w takes the place of w.
  void RoundPanel(const CompensationFactor::Block& block, int64_t first) {
    const D d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    const int64_t count = std::min(kPanelRows, block.size - first);
    T* const elements = tile_.get() + first * kWidth;
    HWY_ALIGN T corrected[kPanelRows * kWidth];
    std::memcpy(corrected, elements, count * kWidth * sizeof(T));
    std::fill(corrected + count * kWidth, corrected + kPanelRows * kWidth,
              T{0});
    const bool is_live = first < block.live;
    const float* const panel = is_live ? rows_.factor.panels() + block.offset +
                                             PanelOffset(first / kPanelRows)
                                       : nullptr;
    if (is_live) {
      SubtractPanelProduct(first, panel, kPanelRows, tile_.get(), corrected,
                           kWidth);
    }
    for (int64_t k = 0; k < count; ++k) {
      T* const x = corrected + k * kWidth;
      if (is_live) {
        for (int64_t j = 0; j < k; ++j) {
          const auto factor =
              hn::Set(d, static_cast<T>(panel[(first + j) * kPanelRows + k]));
          for (int64_t i = 0; i < kWidth; i += lanes) {
            hn::Store(SubtractProduct(d, factor,
                                      hn::Load(d, elements + j * kWidth + i),
                                      hn::Load(d, x + i)),
                      d, x + i);
          }
        }
      }
      LoadScales(rows_.factor.order()[block.first + first + k]);
      RoundColumn(x, elements + k * kWidth);
      StoreColumn();
      if (first + k < block.live) {
        AddOutputErrors(rows_.factor.pivots()[block.first + first + k],
                        block.damping, x, elements + k * kWidth);
      }
    }
  }

  // Loads the scales and zero points of a column, for all rows.
  void LoadScales(int64_t index) {
    column_.index = index;
    const int64_t scale_index = rows_.column_scale[index];
    if (scale_index == column_.scale_index) return;
    column_.scale_index = scale_index;
    const Encoding& encoding = range_.encoding;
    for (int64_t row = 0; row < row_count_; ++row) {
      const int64_t at = row_scale_[row] + scale_index;
      column_.scale[row] = encoding.scale[at];
      if (!encoding.real_zero_point.empty()) {
        column_.zero_point[row] = encoding.real_zero_point[at];
      } else if (!encoding.zero_point.empty()) {
        column_.zero_point[row] = static_cast<T>(encoding.zero_point[at]);
      }
    }
  }

  void AddOutputErrors(double pivot, double damping, const T* corrected,
                       const T* errors) {
    for (int64_t row = 0; row < row_count_; ++row) {
      const double x = corrected[row];
      const double e = errors[row];
      rows_.output_errors[row] += pivot * (x * x) - damping * (e * e);
    }
  }

  // Codes of x [kWidth], which gets x - q. `elements` has w and gets q - w.
  void RoundColumn(T* x, T* elements) {
    if constexpr (std::is_same_v<Rounder, WideRounder>) {
      for (int64_t row = 0; row < row_count_; ++row) {
        const T w = elements[row];
        const T corrected = std::isfinite(x[row]) ? x[row] : w;
        const RoundedElement<T> rounded = RoundElement<T>(
            range_, range_.first + row * rows_.factor.columns() + column_.index,
            corrected, counts_);
        column_.code[row] = rounded.code;
        const T error = rounded.value - w;
        const bool is_finite = std::isfinite(error);
        elements[row] = is_finite ? error : T{0};
        x[row] = is_finite ? corrected - rounded.value : T{0};
      }
    } else {
      const D d;
      const hn::Rebind<int32_t, D> di;
      const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
      counts_->total += row_count_;
      for (int64_t i = 0; i < row_count_; i += lanes) {
        const auto rows = hn::FirstN(d, row_count_ - i);
        const auto w = hn::Load(d, elements + i);
        auto corrected = hn::Load(d, x + i);
        corrected = hn::IfThenElse(hn::IsFinite(corrected), corrected, w);
        const auto scale = hn::Load(d, column_.scale + i);
        const RoundedLanes<D> rounded = rounder_.Round(
            d, corrected, scale, hn::Load(d, column_.zero_point + i));
        hn::Store(rounded.code, di, column_.code + i);
        const auto error = hn::Sub(rounded.value, w);
        const auto is_finite = hn::IsFinite(error);
        hn::Store(hn::IfThenElseZero(is_finite, error), d, elements + i);
        hn::Store(
            hn::IfThenElseZero(is_finite, hn::Sub(corrected, rounded.value)), d,
            x + i);
        const auto clipped = hn::Or(rounded.below, rounded.above);
        // Errors of NaN and infinities are not finite, nor are those under a
        // scale of NaN.
        if (HWY_LIKELY(hn::AllTrue(d, hn::AndNot(clipped, is_finite)))) {
          continue;
        }
        counts_->clipped_low += hn::CountTrue(d, hn::And(rows, rounded.below));
        counts_->clipped_high += hn::CountTrue(d, hn::And(rows, rounded.above));
        const auto infinity = hn::Set(d, std::numeric_limits<T>::infinity());
        const auto nan = hn::And(rows, hn::IsNaN(w));
        counts_->nan += hn::CountTrue(d, nan);
        counts_->positive_infinity +=
            hn::CountTrue(d, hn::And(rows, hn::Eq(w, infinity)));
        counts_->negative_infinity +=
            hn::CountTrue(d, hn::And(rows, hn::Eq(w, hn::Neg(infinity))));
        const auto special = hn::Or(nan, hn::And(rows, hn::IsNaN(scale)));
        if (hn::AllFalse(d, special)) continue;
        HWY_ALIGN T is_nan[hn::MaxLanes(D())];
        hn::Store(hn::IfThenElseZero(nan, hn::Set(d, T{1})), d, is_nan);
        for (int64_t row = i; row < std::min(i + lanes, row_count_); ++row) {
          SetSpecialCode(row, is_nan[row - i] != 0);
        }
      }
    }
  }

  // Sets the code of an element that is NaN or has a NaN scale.
  void SetSpecialCode(int64_t row, bool is_nan) {
    const T zero_point = column_.zero_point[row];
    if (std::isnan(column_.scale[row])) {
      // The rounders encode a quotient of NaN where the format has codes for
      // it.
      if (range_.format.kind == CodeKind::kInteger) column_.code[row] = 0;
    } else if (is_nan) {
      column_.code[row] =
          range_.NanCode(static_cast<int32_t>(std::nearbyint(zero_point)));
    }
  }

  void StoreColumn() {
    uint8_t* out = codes_.get() + column_.index * code_bytes_;
    for (int64_t row = 0; row < row_count_; ++row) {
      const int32_t code = column_.code[row];
      switch (code_bytes_) {
        case 1:
          *out = static_cast<uint8_t>(code);
          break;
        case 2:
          StoreUnaligned(static_cast<uint16_t>(code), out);
          break;
        default:
          StoreUnaligned(code, out);
      }
      out += code_stride_;
    }
  }

  void StoreCodes() {
    const int64_t columns = rows_.factor.columns();
    const int bits = range_.format.storage_bits;
    uint8_t* const codes = codes_.get();
    // Without the padding: from here on rows follow each other.
    for (int64_t row = 1; row < row_count_; ++row) {
      std::memmove(codes + row * columns * code_bytes_,
                   codes + row * code_stride_, columns * code_bytes_);
    }
    if (bits < 8) {
      PackCodes(bits, codes, range_.count, range_.out);
    } else {
      std::memcpy(range_.out, codes, range_.count * code_bytes_);
    }
  }

  const CompensatedRange& rows_;
  const QuantizeRange& range_;
  const Rounder rounder_;
  QuantizeCounts* const counts_;
  const int64_t row_count_;
  const int64_t code_bytes_;
  const int64_t code_stride_;
  // [positions of a block, kWidth]
  const hwy::AlignedFreeUniquePtr<T[]> tile_;
  // [rows, columns] bytes of codes, rows code_stride_ apart.
  const hwy::AlignedFreeUniquePtr<uint8_t[]> codes_;
  // Scale index of each row's first element.
  int64_t row_scale_[kWidth] = {};
  Column<T> column_;
};

template <typename T, class Rounder>
void QuantizeWith(const CompensatedRange& rows, const Rounder& rounder,
                  QuantizeCounts* counts) {
  TaskQuantizer<T, Rounder>(rows, rounder, counts).Quantize();
}

template <typename T>
void QuantizeTyped(const CompensatedRange& rows, QuantizeCounts* counts) {
  const Encoding& encoding = rows.range.encoding;
  const FormatInfo& format = rows.range.format;
  switch (format.kind) {
    case CodeKind::kInteger:
      if (IsWideInteger(format)) {
        QuantizeWith<T>(rows, WideRounder(), counts);
      } else if (encoding.zero_points_are_real) {
        QuantizeWith<T>(
            rows, IntegerRounder<true>{encoding.qmin, encoding.qmax}, counts);
      } else {
        QuantizeWith<T>(
            rows, IntegerRounder<false>{encoding.qmin, encoding.qmax}, counts);
      }
      return;
    case CodeKind::kFloat: {
      const FloatGrid grid(format.float_layout, encoding.no_saturation);
      QuantizeWith<T>(rows, GridRounder<FloatGrid>{grid}, counts);
      return;
    }
    case CodeKind::kCodebook: {
      const CodebookGrid grid(CodebookOf(encoding));
      QuantizeWith<T>(rows, GridRounder<CodebookGrid>{grid}, counts);
      return;
    }
  }
}

void QuantizeTask(const CompensatedRange& rows, QuantizeCounts* counts) {
  if (rows.range.type == ElementType::kFloat64) {
    QuantizeTyped<double>(rows, counts);
  } else {
    QuantizeTyped<float>(rows, counts);
  }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quantd::core {
namespace {

HWY_EXPORT(QuantizeTask);

// Returns the part of an element's scale index that comes from its column
// alone, for each column. The part of the row is the same for all columns.
std::vector<int64_t> ColumnScales(const BlockLayout& layout, int64_t first,
                                  int64_t columns) {
  std::vector<int64_t> scales(columns);
  layout.ForEachRun(first, columns, [&](const BlockLayout::Run& run) {
    for (int64_t i = 0; i < run.count; ++i) {
      scales[run.begin - first + i] = run.scale_index + i * run.scale_step;
    }
  });
  const int64_t base = scales[0];
  for (int64_t& scale : scales) scale -= base;
  return scales;
}

}  // namespace

absl::Status QuantizeCompensated(const CompensationFactor& factor,
                                 const Encoding& encoding,
                                 const BlockLayout& layout, ElementType type,
                                 NanPolicy nan_policy, int64_t first_row,
                                 int64_t rows, const uint8_t* in, uint8_t* out,
                                 double* output_errors, QuantizeCounts* counts,
                                 ThreadPool* pool, StopToken stop) {
  const int64_t columns = factor.columns();
  std::fill(output_errors, output_errors + rows, 0.0);
  if (rows == 0 || columns == 0) return absl::OkStatus();
  const FormatInfo& format = *FindFormat(encoding.format);
  const std::vector<int64_t> column_scale =
      ColumnScales(layout, first_row * columns, columns);
  const int64_t task_rows = TaskRows(type);
  const int64_t tasks = (rows + task_rows - 1) / task_rows;
  const auto task_range = [&](int64_t task) {
    const int64_t begin = task * task_rows;
    return QuantizeRange{encoding,
                         format,
                         layout,
                         type,
                         nan_policy,
                         (first_row + begin) * columns,
                         std::min(task_rows, rows - begin) * columns,
                         in + begin * columns * ElementSizeBytes(type),
                         out + format.SizeBytes(begin * columns)};
  };
  std::vector<QuantizeCounts> task_counts(tasks);
  ParallelFor(pool, tasks, [&](int64_t task) {
    if (stop.stopped()) return;
    const QuantizeRange range = task_range(task);
    const CompensatedRange of_task{factor, range, column_scale.data(),
                                   output_errors + task * task_rows, stop};
    if (internal::UsesScalarKernels()) {
      QuantizeCompensatedScalar(of_task, &task_counts[task]);
    } else {
      HWY_DYNAMIC_DISPATCH(QuantizeTask)(of_task, &task_counts[task]);
    }
  });
  if (stop.stopped()) return StoppedError();
  return AddTaskCounts(task_counts, task_range, nan_policy, counts);
}

int64_t CompensatedTaskBytes(int64_t columns, int64_t largest_block) {
  // Codes of 4 bytes at the most, beside elements.
  const int64_t codes =
      kPanelWidth<float> * (columns * int64_t{sizeof(int32_t)} + kCodePadding);
  return largest_block * kPanelWidth<float> * int64_t{sizeof(float)} + codes;
}

}  // namespace quantd::core
#endif  // HWY_ONCE
