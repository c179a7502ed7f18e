// The sums over pairs (x, x') of a leaf or portion: what the kernels of
// evaluate.cc and comparison.cc share.

#if defined(QUANTD_CORE_EVALUATE_PAIR_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUANTD_CORE_EVALUATE_PAIR_SUMS_INL_H_
#undef QUANTD_CORE_EVALUATE_PAIR_SUMS_INL_H_
#else
#define QUANTD_CORE_EVALUATE_PAIR_SUMS_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/evaluate/evaluate_kernel.h"
#include "hwy/highway.h"

// The targets without vectors run the scalar definitions.
#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Counts of pairs; the rest of ErrorSums comes from the pairs (x, x').
struct PairCounts {
  int64_t non_finite = 0;
  int64_t clipped_low = 0;
  int64_t clipped_high = 0;
};

// Loads Lanes(d) elements as float64.
template <class D, typename T>
HWY_INLINE hn::Vec<D> LoadDouble(D d, const T* HWY_RESTRICT in) {
  if constexpr (std::is_same_v<T, double>) {
    return hn::LoadU(d, in);
  } else {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, D>(), in));
  }
}

// The sums over pairs (x, x') of a leaf or portion; (0, 0) stands for an
// element that is left out and counted in `counts`.
template <typename T>
HWY_INLINE ErrorSums SumPairs(const T* HWY_RESTRICT real,
                              const T* HWY_RESTRICT restored, int64_t count,
                              const PairCounts& counts) {
  const hn::CappedTag<double, kSumLanes> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t whole = count - count % kSumLanes;
  HWY_ALIGN double squared_error[kSumLanes];
  HWY_ALIGN double absolute_error[kSumLanes];
  HWY_ALIGN double relative_error[kSumLanes];
  HWY_ALIGN double signal[kSumLanes];
  HWY_ALIGN double reconstructed[kSumLanes];
  HWY_ALIGN double product[kSumLanes];
  auto max_absolute = hn::Zero(d);
  auto max_relative = hn::Zero(d);
  int64_t zero_flushed = 0;
  // One vector's width of the lanes at a time, so that all sums fit registers.
  for (int64_t lane = 0; lane < kSumLanes; lane += lanes) {
    auto sum_squared = hn::Zero(d);
    auto sum_absolute = hn::Zero(d);
    auto sum_relative = hn::Zero(d);
    auto sum_signal = hn::Zero(d);
    auto sum_reconstructed = hn::Zero(d);
    auto sum_product = hn::Zero(d);
    for (int64_t i = lane; i < whole; i += kSumLanes) {
      const auto x = LoadDouble(d, real + i);
      const auto y = LoadDouble(d, restored + i);
      const auto error = hn::Abs(hn::Sub(y, x));
      const auto is_zero = hn::Eq(x, hn::Zero(d));
      const auto relative =
          hn::IfThenZeroElse(is_zero, hn::Div(error, hn::Abs(x)));
      zero_flushed +=
          hn::CountTrue(d, hn::AndNot(is_zero, hn::Eq(y, hn::Zero(d))));
      sum_squared = hn::Add(sum_squared, hn::Mul(error, error));
      sum_absolute = hn::Add(sum_absolute, error);
      sum_relative = hn::Add(sum_relative, relative);
      sum_signal = hn::Add(sum_signal, hn::Mul(x, x));
      sum_reconstructed = hn::Add(sum_reconstructed, hn::Mul(y, y));
      sum_product = hn::Add(sum_product, hn::Mul(x, y));
      max_absolute = hn::Max(max_absolute, error);
      max_relative = hn::Max(max_relative, relative);
    }
    hn::Store(sum_squared, d, squared_error + lane);
    hn::Store(sum_absolute, d, absolute_error + lane);
    hn::Store(sum_relative, d, relative_error + lane);
    hn::Store(sum_signal, d, signal + lane);
    hn::Store(sum_reconstructed, d, reconstructed + lane);
    hn::Store(sum_product, d, product + lane);
  }
  ErrorSums sums;
  sums.max_absolute_error = hn::GetLane(hn::MaxOfLanes(d, max_absolute));
  sums.max_relative_error = hn::GetLane(hn::MaxOfLanes(d, max_relative));
  for (int64_t i = whole; i < count; ++i) {
    const double x = real[i];
    const double y = restored[i];
    const double error = std::fabs(y - x);
    const double relative = x == 0 ? 0 : error / std::fabs(x);
    const int64_t lane = i - whole;
    zero_flushed += x != 0 && y == 0;
    squared_error[lane] += error * error;
    absolute_error[lane] += error;
    relative_error[lane] += relative;
    signal[lane] += x * x;
    reconstructed[lane] += y * y;
    product[lane] += x * y;
    sums.max_absolute_error = std::max(sums.max_absolute_error, error);
    sums.max_relative_error = std::max(sums.max_relative_error, relative);
  }
  sums.count = count - counts.non_finite;
  sums.non_finite = counts.non_finite;
  sums.clipped_low = counts.clipped_low;
  sums.clipped_high = counts.clipped_high;
  sums.zero_flushed = zero_flushed;
  sums.squared_error = AddLanes(squared_error);
  sums.absolute_error = AddLanes(absolute_error);
  sums.relative_error = AddLanes(relative_error);
  sums.signal = AddLanes(signal);
  sums.reconstructed = AddLanes(reconstructed);
  sums.product = AddLanes(product);
  return sums;
}

// SumPairs of a single pair.
HWY_INLINE ErrorSums SumPair(double x, double y, const PairCounts& counts) {
  const double error = std::fabs(y - x);
  ErrorSums sums;
  sums.count = 1 - counts.non_finite;
  sums.non_finite = counts.non_finite;
  sums.clipped_low = counts.clipped_low;
  sums.clipped_high = counts.clipped_high;
  sums.zero_flushed = x != 0 && y == 0;
  sums.squared_error = error * error;
  sums.absolute_error = error;
  sums.relative_error = x == 0 ? 0 : error / std::fabs(x);
  sums.signal = x * x;
  sums.reconstructed = y * y;
  // A lane starts at +0, to which -0 adds nothing.
  sums.product = 0.0 + x * y;
  sums.max_absolute_error = sums.absolute_error;
  sums.max_relative_error = sums.relative_error;
  return sums;
}

}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();
#endif

#endif  // QUANTD_CORE_EVALUATE_PAIR_SUMS_INL_H_
