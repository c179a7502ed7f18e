#include "core/statistics/feature_moments.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/simd_internal.h"
#include "core/statistics/bin_table.h"
#include "core/statistics/exact_sum.h"
#include "core/statistics/histogram.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/float_convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/statistics/feature_moments.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/statistics/extremes-inl.h"
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_STATISTICS_FEATURE_MOMENTS_ONCE
#define QUANTD_CORE_STATISTICS_FEATURE_MOMENTS_ONCE
namespace quantd::core {
namespace {

// Features that are added at a time: few enough for the L1 cache.
constexpr int64_t kStripFeatures = 256;
// A multiple of the floats of any vector.
constexpr int64_t kPadding = 16;
// Ranges with more elements are spread over threads.
constexpr int64_t kTaskElements = 64 * 1024;

// Why no sum of doubles below is rounded. Let 2^E be the end of the window, W
// its exponents and 2^K the most elements that are added.
// - x is below 2^E and a multiple of 2^(E - W - 23), so that sums of x need
//   W + 23 + K bits.
// - The divider is 1.5 * 2^(2E + K). Then high = (x^2 + divider) - divider is a
//   multiple of 2^(2E + K - 52). It is at most 2^2E: sums of it need 52 bits.
// - low = x^2 - high is at most 2^(2E + K - 53) and a multiple of
//   2^(2(E - W - 23)): sums of it need 2K + 2W - 7 bits.
constexpr int kWindow = 20;
constexpr int kPendingBits = 10;
constexpr int32_t kMaxPending = 1 << kPendingBits;
// Rows that are added at a time: few enough for the L2 cache.
constexpr int64_t kTileRows = 128;
static_assert(kWindow + 23 + kPendingBits <= 53);
static_assert(2 * kPendingBits + 2 * kWindow - 7 <= 53);
// No window begins below the smallest normal number, 2^-126.
constexpr int kMinWindowEnd = -126 + kWindow;
constexpr int kMaxWindowEnd = 128;
// In the bits of a float.
constexpr int32_t kWindowBits = kWindow << 23;
constexpr int32_t kMagnitude = 0x7FFFFFFF;

// Columns [0, columns) of some rows, and what their sums go to.
struct MomentColumns {
  const uint8_t* in;
  int64_t stride_bytes;
  int64_t rows;
  int64_t columns;
  // [columns]
  const int32_t* window;
  const double* divider;
  double* sum;
  double* high;
  double* low;
  // Becomes other than 0 where a column has an element outside of its window
  // that is not 0.
  int32_t* outside;
};

// Consecutive elements of one feature.
struct MomentRun {
  const uint8_t* in;
  int64_t count;
  int32_t window;
  double divider;
  double sum = 0;
  double high = 0;
  double low = 0;
  bool outside = false;
};

// Loads an element as a float32, to nearest even; finite elements stay finite.
float LoadFloat(ElementType type, const uint8_t* in, int64_t index) {
  if (type != ElementType::kFloat64) return LoadElement<float>(type, in, index);
  const double x = LoadElement<double>(type, in, index);
  constexpr double kLargest = std::numeric_limits<float>::max();
  if (!std::isfinite(x)) return static_cast<float>(x);
  return static_cast<float>(std::clamp(x, -kLargest, kLargest));
}

// The larger magnitude of two, the second one only if it is finite.
float LargerFinite(float largest, float x) {
  const float magnitude = std::fabs(x);
  return magnitude > largest && std::isfinite(x) ? magnitude : largest;
}

bool IsOutside(float x, int32_t window) {
  const int32_t magnitude = BitsAs<int32_t>(x) & kMagnitude;
  return magnitude != 0 &&
         (magnitude < window || magnitude - window >= kWindowBits);
}

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_STATISTICS_FEATURE_MOMENTS_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

bool AddColumns(ElementType, const MomentColumns&) { return false; }
bool AddRun(ElementType, MomentRun*) { return false; }

#else

// Pending sums of the columns in a vector of doubles.
template <class D>
struct Pending {
  hn::Vec<D> sum;
  hn::Vec<D> high;
  hn::Vec<D> low;

  HWY_INLINE void Add(hn::Vec<D> x, hn::Vec<D> divider) {
    sum = hn::Add(sum, x);
    // The square is exact, and therefore fused or not the same.
    const auto part = hn::Sub(hn::MulAdd(x, x, divider), divider);
    high = hn::Add(high, part);
    low = hn::Add(low, hn::MulSub(x, x, part));
  }
};

// Adds those elements of `x` that are in the window.
template <class D, class DD, class VI>
HWY_INLINE void AddVector(D d, DD dd, hn::Vec<D> x, VI window,
                          hn::Vec<DD> divider0, hn::Vec<DD> divider1,
                          Pending<DD>& pending0, Pending<DD>& pending1,
                          VI& outside) {
  const hn::RebindToSigned<D> di;
  const hn::RebindToUnsigned<D> du;
  const hn::Half<D> dh;
  const auto magnitude = hn::And(hn::BitCast(di, x), hn::Set(di, kMagnitude));
  // Below the window the difference wraps.
  const auto above = hn::BitCast(du, hn::Sub(magnitude, window));
  const auto inside =
      hn::Lt(above, hn::Set(du, static_cast<uint32_t>(kWindowBits)));
  outside = hn::Or(outside,
                   hn::IfThenZeroElse(hn::RebindMask(di, inside), magnitude));
  const auto kept = hn::IfThenElseZero(hn::RebindMask(d, inside), x);
  pending0.Add(hn::PromoteTo(dd, hn::LowerHalf(dh, kept)), divider0);
  pending1.Add(hn::PromoteTo(dd, hn::UpperHalf(dh, kept)), divider1);
}

template <ElementType kType>
HWY_INLINE void AddRows(const MomentColumns& tile, const uint8_t* in,
                        int64_t rows) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::ScalableTag<double> dd;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t half = lanes / 2;
  const int64_t size = ElementSizeBytes(kType);
  for (int64_t k = 0; k < tile.columns; k += lanes) {
    const auto window = hn::LoadU(di, tile.window + k);
    auto outside = hn::LoadU(di, tile.outside + k);
    const auto divider0 = hn::LoadU(dd, tile.divider + k);
    const auto divider1 = hn::LoadU(dd, tile.divider + k + half);
    Pending<hn::ScalableTag<double>> pending0{hn::LoadU(dd, tile.sum + k),
                                              hn::LoadU(dd, tile.high + k),
                                              hn::LoadU(dd, tile.low + k)};
    Pending<hn::ScalableTag<double>> pending1{
        hn::LoadU(dd, tile.sum + k + half), hn::LoadU(dd, tile.high + k + half),
        hn::LoadU(dd, tile.low + k + half)};
    const uint8_t* from = in + k * size;
    for (int64_t row = 0; row < rows; ++row) {
      AddVector(d, dd, LoadReals<kType>(d, from), window, divider0, divider1,
                pending0, pending1, outside);
      // Prefetches the rows that come next, wherever they lie.
      Prefetch(from + rows * tile.stride_bytes);
      from += tile.stride_bytes;
    }
    hn::StoreU(outside, di, tile.outside + k);
    hn::StoreU(pending0.sum, dd, tile.sum + k);
    hn::StoreU(pending0.high, dd, tile.high + k);
    hn::StoreU(pending0.low, dd, tile.low + k);
    hn::StoreU(pending1.sum, dd, tile.sum + k + half);
    hn::StoreU(pending1.high, dd, tile.high + k + half);
    hn::StoreU(pending1.low, dd, tile.low + k + half);
  }
}

template <ElementType kType>
void AddColumnsTyped(const MomentColumns& tile) {
  // With the rows that come next they fit the L1 cache.
  constexpr int64_t kRows = 8;
  for (int64_t row = 0; row < tile.rows; row += kRows) {
    AddRows<kType>(tile, tile.in + row * tile.stride_bytes,
                   std::min(kRows, tile.rows - row));
  }
}

// The columns are a multiple of kPadding, the type is not float64. Returns
// whether anything was done: some targets cannot.
bool AddColumns(ElementType type, const MomentColumns& tile) {
  switch (type) {
    case ElementType::kFloat16:
      AddColumnsTyped<ElementType::kFloat16>(tile);
      return true;
    case ElementType::kBfloat16:
      AddColumnsTyped<ElementType::kBfloat16>(tile);
      return true;
    default:
      AddColumnsTyped<ElementType::kFloat32>(tile);
      return true;
  }
}

template <ElementType kType>
void AddRunTyped(MomentRun* run) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::ScalableTag<double> dd;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t size = ElementSizeBytes(kType);
  const auto window = hn::Set(di, run->window);
  const auto divider = hn::Set(dd, run->divider);
  auto outside = hn::Zero(di);
  const auto zero = hn::Zero(dd);
  Pending<hn::ScalableTag<double>> pending0{zero, zero, zero};
  Pending<hn::ScalableTag<double>> pending1 = pending0;
  int64_t i = 0;
  for (; i + lanes <= run->count; i += lanes) {
    AddVector(d, dd, LoadReals<kType>(d, run->in + i * size), window, divider,
              divider, pending0, pending1, outside);
  }
  if (i < run->count) {
    HWY_ALIGN float rest[hn::MaxLanes(hn::ScalableTag<float>())] = {};
    for (int64_t k = i; k < run->count; ++k) {
      rest[k - i] = LoadElement<float>(kType, run->in, k);
    }
    AddVector(d, dd, hn::Load(d, rest), window, divider, divider, pending0,
              pending1, outside);
  }
  run->sum =
      hn::GetLane(hn::SumOfLanes(dd, hn::Add(pending0.sum, pending1.sum)));
  run->high =
      hn::GetLane(hn::SumOfLanes(dd, hn::Add(pending0.high, pending1.high)));
  run->low =
      hn::GetLane(hn::SumOfLanes(dd, hn::Add(pending0.low, pending1.low)));
  run->outside = !hn::AllTrue(di, hn::Eq(outside, hn::Zero(di)));
}

// The type is not float64. Returns whether anything was done.
bool AddRun(ElementType type, MomentRun* run) {
  switch (type) {
    case ElementType::kFloat16:
      AddRunTyped<ElementType::kFloat16>(run);
      return true;
    case ElementType::kBfloat16:
      AddRunTyped<ElementType::kBfloat16>(run);
      return true;
    default:
      AddRunTyped<ElementType::kFloat32>(run);
      return true;
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

HWY_EXPORT(AddColumns);
HWY_EXPORT(AddRun);

// Vectors may begin at any feature and reach beyond the last.
int64_t Padded(int64_t feature_count) { return feature_count + kPadding; }

constexpr int kNoExponent = std::numeric_limits<int>::max();

// The sums as they are stored.
template <typename SumT, typename At>
ExactSums ToExactSums(int64_t count, int unit, At at) {
  int zeros = kNoExponent;
  int bits = 0;
  for (int64_t i = 0; i < count; ++i) {
    const SumT sum = at(i);
    if (sum.is_zero()) continue;
    zeros = std::min(zeros, sum.TrailingZeros());
    bits = std::max(bits, sum.BitWidth());
  }
  ExactSums result;
  if (zeros == kNoExponent) return result;
  result.exponent = unit + zeros;
  result.width = (bits - zeros + 7) / 8;
  result.integers.resize(static_cast<size_t>(count * result.width));
  for (int64_t i = 0; i < count; ++i) {
    at(i).ToBytes(zeros, result.width,
                  result.integers.data() + i * result.width);
  }
  return result;
}

// Requires of an ExactSums that FromParts has checked its size.
template <typename SumT, typename At>
absl::Status FromExactSums(absl::string_view what, const ExactSums& sums,
                           int64_t count, int unit, At at) {
  const int64_t shift = int64_t{sums.exponent} - unit;
  if (sums.width < 0 || sums.width > SumT::kMaxBytes ||
      static_cast<int64_t>(sums.integers.size()) != count * sums.width) {
    return StatisticsInvalidError(
        absl::StrCat("the ", what, " have ", sums.integers.size(),
                     " bytes of width ", sums.width, ", expected ", count,
                     " integers of at most ", SumT::kMaxBytes, " bytes"));
  }
  if (sums.width > 0 && (shift < 0 || shift > 8 * SumT::kMaxBytes)) {
    return StatisticsInvalidError(absl::StrCat("the exponent of the ", what,
                                               " is ", sums.exponent,
                                               ", expected at least ", unit));
  }
  for (int64_t i = 0; i < count; ++i) {
    if (!at(i)->FromBytes(static_cast<int>(shift), sums.width,
                          sums.integers.data() + i * sums.width)) {
      return StatisticsInvalidError(
          absl::StrCat("one of the ", what, ", of feature ", i,
                       ", is beyond what elements can sum up to"));
    }
  }
  return absl::OkStatus();
}

// Adds an integer times 2^exponent, and carries.
template <typename SumT>
void AddWide(absl::uint128 integer, bool is_negative, int exponent, SumT* sum) {
  constexpr int kBits = 32;
  for (; integer != 0; integer >>= kBits, exponent += kBits) {
    const auto part =
        static_cast<double>(absl::Uint128Low64(integer) & 0xFFFFFFFF);
    sum->Add(std::ldexp(is_negative ? -part : part, exponent));
  }
  sum->Carry();
}

bool SameSums(const ExactSums& a, const ExactSums& b) {
  return a.exponent == b.exponent && a.width == b.width &&
         a.integers == b.integers;
}

}  // namespace

absl::StatusOr<FeatureAxis> FeatureAxis::Create(absl::Span<const int64_t> shape,
                                                int64_t axis) {
  const absl::StatusOr<int64_t> count = ElementCount(shape);
  if (!count.ok()) return count.status();
  const int64_t rank = static_cast<int64_t>(shape.size());
  const int64_t index = axis < 0 ? axis + rank : axis;
  if (index < 0 || index >= rank) {
    return AxisUnknownError(absl::StrCat("axis is ", axis,
                                         ", expected a dimension of [",
                                         absl::StrJoin(shape, ", "), "]"));
  }
  FeatureAxis result{shape[index], 1};
  for (int64_t d = index + 1; d < rank; ++d) result.inner *= shape[d];
  return result;
}

// Rows of features that follow each other, or, if `axis.inner` is not 1, runs.
struct FeatureMoments::Strip {
  const FeatureAxis& axis;
  ElementType type;
  // Features [begin, end).
  int64_t begin;
  int64_t end;
  // Address of the first element of the first feature.
  const uint8_t* in;
  int64_t rows;
  // For AddRuns: elements [first, first + count) of the tensor.
  int64_t first;
  int64_t count;
};

FeatureMoments::FeatureMoments(int64_t feature_count)
    : feature_count_(feature_count) {
  const size_t padded = static_cast<size_t>(Padded(feature_count));
  seen_.resize(padded);
  left_out_.resize(padded);
  window_.resize(padded);
  divider_.resize(padded);
  pending_.resize(padded);
  pending_sum_.resize(padded);
  pending_high_.resize(padded);
  pending_low_.resize(padded);
  totals_.resize(static_cast<size_t>(feature_count));
  adds_.resize(static_cast<size_t>(feature_count));
}

int64_t FeatureMoments::MemoryBytes(int64_t feature_count) {
  constexpr int64_t kPadded = 6 * sizeof(int64_t) + 2 * sizeof(int32_t);
  constexpr int64_t kPlain = sizeof(Totals) + sizeof(int32_t);
  return static_cast<int64_t>(sizeof(FeatureMoments)) +
         Padded(feature_count) * kPadded + feature_count * kPlain;
}

void FeatureMoments::ChooseWindow(int64_t feature, float largest) {
  // Room for elements that are eight times as large.
  constexpr int kRoom = 3;
  // End of the window of features that are 0 so far.
  constexpr int kUsualEnd = 6;
  const int end =
      std::clamp(largest > 0 ? std::ilogb(largest) + 1 + kRoom : kUsualEnd,
                 kMinWindowEnd, kMaxWindowEnd);
  const int32_t window = (end - kWindow + 127) << 23;
  if (window_[feature] == window) return;
  Settle(feature);
  window_[feature] = window;
  divider_[feature] = std::ldexp(1.5, 2 * end + kPendingBits);
}

void FeatureMoments::Settle(int64_t feature) {
  Totals& totals = totals_[feature];
  // At most three adds for each limb.
  constexpr int32_t kAdds = 3;
  if (adds_[feature] > Sum::kMaxAdds - kAdds) {
    totals.sum.Carry();
    totals.square_sum.Carry();
    adds_[feature] = 0;
  }
  adds_[feature] += kAdds;
  totals.sum.Add(pending_sum_[feature]);
  totals.square_sum.Add(pending_high_[feature]);
  totals.square_sum.Add(pending_low_[feature]);
  pending_[feature] = 0;
  pending_sum_[feature] = 0;
  pending_high_[feature] = 0;
  pending_low_[feature] = 0;
}

FeatureMoments::Totals FeatureMoments::SettledTotals(int64_t feature) const {
  Totals totals = totals_[feature];
  totals.sum.Carry();
  totals.square_sum.Carry();
  totals.sum.Add(pending_sum_[feature]);
  totals.square_sum.Add(pending_high_[feature]);
  totals.square_sum.Add(pending_low_[feature]);
  totals.sum.Carry();
  totals.square_sum.Carry();
  return totals;
}

void FeatureMoments::AddOutside(int64_t feature, float value) {
  const int32_t magnitude = BitsAs<int32_t>(value) & kMagnitude;
  int exponent = magnitude >> 23;
  if (exponent == 0xFF) {
    ++left_out_[feature];
    return;
  }
  int64_t mantissa = magnitude & 0x7FFFFF;
  if (exponent == 0) {
    exponent = 1;
  } else {
    mantissa |= 0x800000;
  }
  Totals& totals = totals_[feature];
  if (adds_[feature] >= Sum::kMaxAdds) {
    totals.sum.Carry();
    totals.square_sum.Carry();
    adds_[feature] = 0;
  }
  ++adds_[feature];
  // Power of two above the sum's unit, 2^-149.
  const int shift = exponent - 1;
  totals.sum.Add(value < 0 ? -mantissa : mantissa, shift);
  totals.square_sum.Add(mantissa * mantissa, 2 * shift);
}

void FeatureMoments::AddStrip(const Strip& strip) {
  const int64_t size = ElementSizeBytes(strip.type);
  const int64_t stride_bytes = strip.axis.count * size;
  const int64_t columns = strip.end - strip.begin;
  // Columns that fill vectors; the rest, and float64, goes through a buffer.
  const int64_t direct =
      strip.type == ElementType::kFloat64 ? 0 : columns / kPadding * kPadding;
  std::vector<float> buffer;
  int32_t outside[kStripFeatures + kPadding];
  const bool is_scalar = internal::UsesScalarKernels();
  for (int64_t row = 0; row < strip.rows; row += kTileRows) {
    const uint8_t* in = strip.in + row * stride_bytes;
    const int64_t rows = std::min(strip.rows - row, kTileRows);
    const auto choose_window = [&](int64_t k) {
      constexpr int64_t kSome = 8;
      float largest = 0;
      for (int64_t r = 0; r < std::min(rows, kSome); ++r) {
        largest = LargerFinite(largest,
                               LoadFloat(strip.type, in + r * stride_bytes, k));
      }
      ChooseWindow(strip.begin + k, largest);
    };
    // Loops without branches, as this is done for each chunk.
    bool has_new = false;
    bool has_full = false;
    for (int64_t feature = strip.begin; feature < strip.end; ++feature) {
      has_new |= window_[feature] == 0;
      has_full |= pending_[feature] > kMaxPending - rows;
    }
    for (int64_t k = 0; (has_new || has_full) && k < columns; ++k) {
      const int64_t feature = strip.begin + k;
      if (window_[feature] == 0) choose_window(k);
      if (pending_[feature] > kMaxPending - rows) Settle(feature);
    }
    for (int64_t feature = strip.begin; feature < strip.end; ++feature) {
      pending_[feature] += static_cast<int32_t>(rows);
      seen_[feature] += rows;
    }
    std::fill_n(outside, kStripFeatures + kPadding, 0);
    const auto add = [&](ElementType type, const uint8_t* from, int64_t stride,
                         int64_t k, int64_t width) {
      const int64_t feature = strip.begin + k;
      const MomentColumns tile{from,
                               stride,
                               rows,
                               width,
                               window_.data() + feature,
                               divider_.data() + feature,
                               pending_sum_.data() + feature,
                               pending_high_.data() + feature,
                               pending_low_.data() + feature,
                               outside + k};
      return !is_scalar && HWY_DYNAMIC_DISPATCH(AddColumns)(type, tile);
    };
    bool has_vectors = !is_scalar;
    if (direct > 0) has_vectors = add(strip.type, in, stride_bytes, 0, direct);
    if (direct < columns && has_vectors) {
      const int64_t width =
          (columns - direct + kPadding - 1) / kPadding * kPadding;
      buffer.assign(static_cast<size_t>(rows * width), 0);
      for (int64_t r = 0; r < rows; ++r) {
        ToHistogramFloats(strip.type, in + r * stride_bytes + direct * size,
                          columns - direct, buffer.data() + r * width);
      }
      has_vectors =
          add(ElementType::kFloat32,
              reinterpret_cast<const uint8_t*>(buffer.data()),
              width * static_cast<int64_t>(sizeof(float)), direct, width);
    }
    int32_t any_outside = 0;
    for (int64_t k = 0; k < columns; ++k) any_outside |= outside[k];
    if (has_vectors && any_outside == 0) continue;
    // Row by row, as the data lie.
    int32_t special[kStripFeatures];
    int64_t specials = 0;
    for (int64_t k = 0; k < columns; ++k) {
      if (!has_vectors || outside[k] != 0) {
        special[specials++] = static_cast<int32_t>(k);
      }
    }
    int32_t added[kStripFeatures] = {};
    float largest[kStripFeatures] = {};
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < specials; ++i) {
        const float x =
            LoadFloat(strip.type, in + r * stride_bytes, special[i]);
        const int64_t feature = strip.begin + special[i];
        largest[i] = LargerFinite(largest[i], x);
        if (has_vectors ? IsOutside(x, window_[feature]) : x != 0) {
          AddOutside(feature, x);
          ++added[i];
        }
      }
    }
    for (int64_t i = 0; has_vectors && i < specials; ++i) {
      constexpr int64_t kFew = 16;
      if (added[i] > rows / kFew) {
        ChooseWindow(strip.begin + special[i], largest[i]);
      }
    }
  }
}

void FeatureMoments::AddRuns(const Strip& strip) {
  const int64_t size = ElementSizeBytes(strip.type);
  const int64_t inner = strip.axis.inner;
  const int64_t end = strip.first + strip.count;
  const bool is_scalar = internal::UsesScalarKernels();
  float buffer[kMaxPending];
  const int64_t row_size = strip.axis.count * inner;
  for (int64_t row = strip.first / row_size; row * row_size < end; ++row) {
    for (int64_t feature = strip.begin; feature < strip.end; ++feature) {
      const int64_t run = row * row_size + feature * inner;
      int64_t position = std::max(run, strip.first);
      const int64_t run_end = std::min(run + inner, end);
      while (position < run_end) {
        const int64_t count =
            std::min<int64_t>(run_end - position, kMaxPending);
        const uint8_t* in = strip.in + (position - strip.first) * size;
        position += count;
        const auto largest = [&] {
          float result = 0;
          for (int64_t i = 0; i < count; ++i) {
            result = LargerFinite(result, LoadFloat(strip.type, in, i));
          }
          return result;
        };
        if (window_[feature] == 0) ChooseWindow(feature, largest());
        if (pending_[feature] + count > kMaxPending) Settle(feature);
        pending_[feature] += static_cast<int32_t>(count);
        seen_[feature] += count;
        MomentRun sums{in, count, window_[feature], divider_[feature]};
        ElementType type = strip.type;
        if (type == ElementType::kFloat64) {
          ToHistogramFloats(type, in, count, buffer);
          sums.in = reinterpret_cast<const uint8_t*>(buffer);
          type = ElementType::kFloat32;
        }
        const bool has_vectors =
            !is_scalar && HWY_DYNAMIC_DISPATCH(AddRun)(type, &sums);
        pending_sum_[feature] += sums.sum;
        pending_high_[feature] += sums.high;
        pending_low_[feature] += sums.low;
        if (has_vectors && !sums.outside) continue;
        int64_t added = 0;
        for (int64_t i = 0; i < count; ++i) {
          const float x = LoadFloat(strip.type, in, i);
          if (has_vectors ? IsOutside(x, window_[feature]) : x != 0) {
            AddOutside(feature, x);
            ++added;
          }
        }
        constexpr int64_t kFew = 16;
        if (has_vectors && added > count / kFew) {
          ChooseWindow(feature, largest());
        }
      }
    }
  }
}

void FeatureMoments::Update(const FeatureAxis& axis, ElementType type,
                            int64_t first, int64_t count, const uint8_t* data,
                            ThreadPool* pool) {
  if (count == 0) return;
  if (count < kTaskElements) pool = nullptr;
  const int64_t size = ElementSizeBytes(type);
  if (axis.inner != 1) {
    const int64_t width =
        std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, axis.inner));
    ParallelFor(pool, (axis.count + width - 1) / width, [&](int64_t task) {
      const int64_t begin = task * width;
      AddRuns({axis, type, begin, std::min(begin + width, axis.count), data, 0,
               first, count});
    });
    return;
  }
  // Rows of the same columns.
  const auto add_rows = [&](int64_t position, int64_t rows, int64_t width) {
    const int64_t column = position % axis.count;
    const uint8_t* in = data + (position - first) * size;
    ParallelFor(pool, (width + kStripFeatures - 1) / kStripFeatures,
                [&](int64_t task) {
                  const int64_t k = task * kStripFeatures;
                  AddStrip({axis, type, column + k,
                            column + std::min(k + kStripFeatures, width),
                            in + k * size, rows, 0, 0});
                });
  };
  int64_t position = first;
  const int64_t end = first + count;
  if (const int64_t column = first % axis.count; column != 0) {
    const int64_t width = std::min(axis.count - column, count);
    add_rows(position, 1, width);
    position += width;
  }
  if (const int64_t rows = (end - position) / axis.count; rows > 0) {
    add_rows(position, rows, axis.count);
    position += rows * axis.count;
  }
  if (position < end) add_rows(position, 1, end - position);
}

void FeatureMoments::Merge(const FeatureMoments& other, int64_t first) {
  for (int64_t k = 0; k < other.feature_count_; ++k) {
    const int64_t i = first + k;
    Settle(i);
    Totals totals = SettledTotals(i);
    const Totals more = other.SettledTotals(k);
    totals.sum.Add(more.sum);
    totals.square_sum.Add(more.square_sum);
    totals.sum.Carry();
    totals.square_sum.Carry();
    totals_[i] = totals;
    adds_[i] = 0;
    seen_[i] += other.seen_[k];
    left_out_[i] += other.left_out_[k];
  }
}

double FeatureMoments::sum(int64_t feature) const {
  return SettledTotals(feature).sum.ToDouble();
}

double FeatureMoments::square_sum(int64_t feature) const {
  return SettledTotals(feature).square_sum.ToDouble();
}

bool FeatureMoments::AddUpTo(absl::Span<const Histogram> histograms) const {
  Totals features;
  for (int64_t i = 0; i < feature_count_; ++i) {
    const Totals totals = SettledTotals(i);
    features.sum.Add(totals.sum);
    features.square_sum.Add(totals.square_sum);
    features.sum.Carry();
    features.square_sum.Carry();
  }
  Totals elements;
  for (const Histogram& histogram : histograms) {
    histogram.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
      const BinEdges edges = HistogramBinEdges(key, histogram.mantissa_bits());
      // x = (lowest + low) * unit, with an integer below 2^24.
      const absl::uint128 lowest =
          static_cast<uint64_t>(std::llround(edges.base / edges.unit));
      const int exponent = std::ilogb(edges.unit);
      const absl::uint128 low_sum = bin.low_sum;
      AddWide(bin.count * lowest + low_sum, edges.unit < 0, exponent,
              &elements.sum);
      AddWide(bin.count * lowest * lowest + 2 * lowest * low_sum +
                  bin.low_square_sum,
              false, 2 * exponent, &elements.square_sum);
    });
  }
  return features.sum == elements.sum &&
         features.square_sum == elements.square_sum;
}

FeatureMoments::Parts FeatureMoments::ToParts() const {
  Parts parts;
  std::vector<Totals> totals;
  for (int64_t i = 0; i < feature_count_; ++i) {
    parts.count.push_back(count(i));
    parts.left_out.push_back(left_out(i));
    totals.push_back(SettledTotals(i));
  }
  parts.sum = ToExactSums<Sum>(feature_count_, Sum::kUnit,
                               [&](int64_t i) { return totals[i].sum; });
  parts.square_sum =
      ToExactSums<SquareSum>(feature_count_, SquareSum::kUnit,
                             [&](int64_t i) { return totals[i].square_sum; });
  return parts;
}

absl::StatusOr<FeatureMoments> FeatureMoments::FromParts(const Parts& parts) {
  const int64_t features = static_cast<int64_t>(parts.count.size());
  if (parts.left_out.size() != parts.count.size()) {
    return StatisticsInvalidError(absl::StrCat(
        "the moments have ", features, " counts and ", parts.left_out.size(),
        " counts of what is left out, expected as many"));
  }
  FeatureMoments moments(features);
  if (absl::Status s = FromExactSums<Sum>(
          "sums", parts.sum, features, Sum::kUnit,
          [&](int64_t i) { return &moments.totals_[i].sum; });
      !s.ok()) {
    return s;
  }
  if (absl::Status s = FromExactSums<SquareSum>(
          "sums of squares", parts.square_sum, features, SquareSum::kUnit,
          [&](int64_t i) { return &moments.totals_[i].square_sum; });
      !s.ok()) {
    return s;
  }
  for (int64_t i = 0; i < features; ++i) {
    const int64_t count = parts.count[i];
    const int64_t left_out = parts.left_out[i];
    if (count < 0 || left_out < 0 || count > kMaxCount ||
        left_out > kMaxCount - count) {
      return StatisticsInvalidError(absl::StrCat(
          "feature ", i, " has ", count, " elements and ", left_out,
          " left out, expected at least 0 and at most ", kMaxCount));
    }
    moments.seen_[i] = count + left_out;
    moments.left_out_[i] = left_out;
    const double sum = moments.sum(i);
    const double square_sum = moments.square_sum(i);
    const double elements = static_cast<double>(count);
    constexpr double kLargest = std::numeric_limits<float>::max();
    // Rounding of the doubles, with much to spare.
    constexpr double kSlack = 1 + 1e-12;
    if (moments.totals_[i].square_sum.is_negative() ||
        sum * sum > elements * square_sum * kSlack ||
        square_sum > elements * kLargest * kLargest * kSlack) {
      return StatisticsInvalidError(absl::StrCat(
          "feature ", i, " has the sum ", sum, " and the sum of squares ",
          square_sum, ", which no ", count, " elements have"));
    }
  }
  const Parts canonical = moments.ToParts();
  if (!SameSums(canonical.sum, parts.sum) ||
      !SameSums(canonical.square_sum, parts.square_sum)) {
    return StatisticsInvalidError(
        "the moments are not in their one form, expected the largest exponent "
        "and the smallest width of their sums");
  }
  return moments;
}

}  // namespace quantd::core
#endif  // HWY_ONCE
