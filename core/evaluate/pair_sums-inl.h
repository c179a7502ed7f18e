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
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/evaluate/evaluate_kernel.h"
#include "hwy/cache_control.h"
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

  void Add(const PairCounts& other) {
    non_finite += other.non_finite;
    clipped_low += other.clipped_low;
    clipped_high += other.clipped_high;
  }
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

// Makes the compiler load what was stored to `values`, because loads convert
// halves of vectors for less than registers do.
template <class Array>
HWY_INLINE void KeepInMemory(Array& values) {
  asm volatile("" : "+m"(values));
}

// Errors of Lanes(d) pairs, in the type of D.
template <class D>
struct PairErrors {
  HWY_INLINE PairErrors() {}

  // RelativeError where it is finite, otherwise infinite.
  hn::Vec<D> relative;
  // x != 0, x' == 0.
  hn::Mask<D> flushed;
};

template <class D, class V = hn::Vec<D>>
HWY_INLINE PairErrors<D> ErrorsOf(D d, V x, V y) {
  PairErrors<D> errors;
  const V zero = hn::Zero(d);
  const V error = hn::Sub(y, x);
#if HWY_TARGET == HWY_AVX3
  // Masks of comparisons and divisions cost nothing of their own.
  if constexpr (sizeof(V) == 64) {
    if constexpr (std::is_same_v<hn::TFromD<D>, float>) {
      const __mmask16 nonzero =
          _mm512_cmp_ps_mask(x.raw, zero.raw, _CMP_NEQ_UQ);
      errors.relative.raw = _mm512_maskz_div_ps(nonzero, error.raw, x.raw);
      errors.flushed.raw =
          _mm512_mask_cmp_ps_mask(nonzero, y.raw, zero.raw, _CMP_EQ_OQ);
    } else {
      const __mmask8 nonzero = _mm512_cmp_pd_mask(x.raw, zero.raw, _CMP_NEQ_UQ);
      errors.relative.raw = _mm512_maskz_div_pd(nonzero, error.raw, x.raw);
      errors.flushed.raw =
          _mm512_mask_cmp_pd_mask(nonzero, y.raw, zero.raw, _CMP_EQ_OQ);
    }
    errors.relative = hn::Abs(errors.relative);
    return errors;
  }
#endif
  const auto is_zero = hn::Eq(x, zero);
  errors.relative = hn::IfThenZeroElse(is_zero, hn::Abs(hn::Div(error, x)));
  errors.flushed = hn::AndNot(is_zero, hn::Eq(y, zero));
  return errors;
}

// sum + a * b, of float32 values in float64 if kFromFloat: their products are
// exact, so that a fused step rounds as the product and the sum do. Not every
// target has a fused step.
template <bool kFromFloat, class V>
HWY_INLINE V AddProduct(V sum, V a, V b) {
  if constexpr (kFromFloat) {
    return hn::MulAdd(a, b, sum);
  } else {
    return hn::Add(sum, hn::Mul(a, b));
  }
}

// Sums of the terms of ErrorSumSet::kNoise of Lanes(d) lanes in float64.
template <class D>
struct NoiseSums {
  HWY_INLINE explicit NoiseSums(D d)
      : squared(hn::Zero(d)), signal(hn::Zero(d)), max_absolute(hn::Zero(d)) {}

  // kFromFloat: x and y are float32 values. Returns |y - x|.
  template <bool kFromFloat, class V = hn::Vec<D>>
  HWY_INLINE V Add(V x, V y) {
    const V error = hn::Abs(hn::Sub(y, x));
    // The square of an error is not exact.
    squared = AddProduct<false>(squared, error, error);
    signal = AddProduct<kFromFloat>(signal, x, x);
    max_absolute = hn::Max(max_absolute, error);
    return error;
  }

  hn::Vec<D> squared;
  hn::Vec<D> signal;
  hn::Vec<D> max_absolute;
};

// Sums of all terms.
template <class D>
struct TermSums : NoiseSums<D> {
  HWY_INLINE explicit TermSums(D d)
      : NoiseSums<D>(d),
        absolute(hn::Zero(d)),
        relative(hn::Zero(d)),
        reconstructed(hn::Zero(d)),
        product(hn::Zero(d)) {}

  template <bool kFromFloat, class V = hn::Vec<D>>
  HWY_INLINE void Add(V x, V y, V ratio) {
    const V error = NoiseSums<D>::template Add<kFromFloat>(x, y);
    reconstructed = AddProduct<kFromFloat>(reconstructed, y, y);
    product = AddProduct<kFromFloat>(product, x, y);
    absolute = hn::Add(absolute, error);
    relative = hn::Add(relative, ratio);
  }

  hn::Vec<D> absolute;
  hn::Vec<D> relative;
  hn::Vec<D> reconstructed;
  hn::Vec<D> product;
};

// The lanes of a leaf in memory.
struct LaneArrays {
  HWY_ALIGN double squared[kSumLanes] = {};
  HWY_ALIGN double absolute[kSumLanes] = {};
  HWY_ALIGN double relative[kSumLanes] = {};
  HWY_ALIGN double signal[kSumLanes] = {};
  HWY_ALIGN double reconstructed[kSumLanes] = {};
  HWY_ALIGN double product[kSumLanes] = {};
  HWY_ALIGN double max_absolute[kSumLanes] = {};

  template <class D>
  HWY_INLINE TermSums<D> Load(D d, int64_t lane) const {
    TermSums<D> sums(d);
    sums.squared = hn::Load(d, squared + lane);
    sums.absolute = hn::Load(d, absolute + lane);
    sums.relative = hn::Load(d, relative + lane);
    sums.signal = hn::Load(d, signal + lane);
    sums.reconstructed = hn::Load(d, reconstructed + lane);
    sums.product = hn::Load(d, product + lane);
    sums.max_absolute = hn::Load(d, max_absolute + lane);
    return sums;
  }

  template <class D>
  HWY_INLINE void Store(D d, const TermSums<D>& sums, int64_t lane) {
    hn::Store(sums.squared, d, squared + lane);
    hn::Store(sums.absolute, d, absolute + lane);
    hn::Store(sums.relative, d, relative + lane);
    hn::Store(sums.signal, d, signal + lane);
    hn::Store(sums.reconstructed, d, reconstructed + lane);
    hn::Store(sums.product, d, product + lane);
    hn::Store(sums.max_absolute, d, max_absolute + lane);
  }
};

// The sum of all lanes, lane i with lane i + Lanes(d) / 2 and so on: the rest
// of the tree of AddLanes.
template <class D, class V = hn::Vec<D>>
HWY_INLINE double SumTree(D d, V v) {
  if constexpr (hn::MaxLanes(D()) == 1) {
    return hn::GetLane(v);
  } else {
    const hn::Half<D> half;
    return SumTree(half,
                   hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// Sums the float64 lanes in memory in the same tree.
HWY_INLINE double SumTree(const double* HWY_RESTRICT lanes) {
  const hn::CappedTag<double, kSumLanes> d;
  constexpr int64_t kLanes = hn::MaxLanes(decltype(d)());
  hn::Vec<decltype(d)> sums[kSumLanes / kLanes];
  for (int64_t i = 0; i < kSumLanes / kLanes; ++i) {
    sums[i] = hn::Load(d, lanes + i * kLanes);
  }
  for (int64_t half = kSumLanes / kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i)
      sums[i] = hn::Add(sums[i], sums[i + half]);
  }
  return SumTree(d, sums[0]);
}

HWY_INLINE void SetSums(const LaneArrays& lanes, ErrorSums* sums) {
  sums->squared_error = SumTree(lanes.squared);
  sums->absolute_error = SumTree(lanes.absolute);
  sums->relative_error = SumTree(lanes.relative);
  sums->signal = SumTree(lanes.signal);
  sums->reconstructed = SumTree(lanes.reconstructed);
  sums->product = SumTree(lanes.product);
  sums->max_absolute_error =
      *std::max_element(lanes.max_absolute, lanes.max_absolute + kSumLanes);
}

// The input that comes after a leaf, asked for while the leaf is summed:
// there is time for it then, unlike when it is read.
struct Ahead {
  HWY_INLINE void Fetch(int64_t element) const {
    hwy::Prefetch(in + element * element_bytes);
  }

  const uint8_t* in;
  int64_t element_bytes;
};

class DoubleSums {
 public:
  // Adds `count` pairs, a multiple of kSumLanes.
  HWY_INLINE void Add(const double* HWY_RESTRICT real,
                      const double* HWY_RESTRICT restored, int64_t count,
                      const Ahead& ahead) {
    const hn::CappedTag<double, kSumLanes> d;
    const int64_t vector_lanes = static_cast<int64_t>(hn::Lanes(d));
    auto max_relative = hn::Zero(d);
    // One vector's width of the lanes at a time, so that all sums fit
    // registers.
    for (int64_t lane = 0; lane < kSumLanes; lane += vector_lanes) {
      auto terms = lanes_.Load(d, lane);
      for (int64_t i = lane; i < count; i += kSumLanes) {
        ahead.Fetch(i);
        const auto x = hn::LoadU(d, real + i);
        const auto y = hn::LoadU(d, restored + i);
        const auto errors = ErrorsOf(d, x, y);
        terms.template Add<false>(x, y, errors.relative);
        sums_.zero_flushed +=
            static_cast<int64_t>(hn::CountTrue(d, errors.flushed));
        max_relative = hn::Max(max_relative, errors.relative);
      }
      lanes_.Store(d, terms, lane);
    }
    sums_.max_relative_error = std::max(
        sums_.max_relative_error, hn::GetLane(hn::MaxOfLanes(d, max_relative)));
  }

  HWY_INLINE void Finish(ErrorSums* sums) {
    *sums = sums_;
    SetSums(lanes_, sums);
  }

 private:
  LaneArrays lanes_;
  ErrorSums sums_;
};

#if HWY_TARGET == HWY_AVX3

// The sums of the lanes of six vectors, by SumTree, several at a time to save
// shuffles, and the largest of the lanes of two others.
HWY_INLINE void SetSums(const TermSums<hn::Full512<double>>& terms,
                        hn::Vec<hn::Full512<float>> max_relative,
                        ErrorSums* sums) {
  // Lane i with i + 4, of two vectors.
  const auto fold = [](hn::Vec<hn::Full512<double>> a,
                       hn::Vec<hn::Full512<double>> b) HWY_ATTR {
    return _mm512_add_pd(_mm512_shuffle_f64x2(a.raw, b.raw, 0x44),
                         _mm512_shuffle_f64x2(a.raw, b.raw, 0xEE));
  };
  const __m512d fold0 = fold(terms.squared, terms.absolute);
  const __m512d fold1 = fold(terms.relative, terms.signal);
  const __m512d fold2 = fold(terms.reconstructed, terms.product);
  // Lane i with i + 2.
  const __m512d pair0 = _mm512_add_pd(_mm512_shuffle_f64x2(fold0, fold1, 0x88),
                                      _mm512_shuffle_f64x2(fold0, fold1, 0xDD));
  const __m512d pair1 = _mm512_add_pd(_mm512_shuffle_f64x2(fold2, fold2, 0x88),
                                      _mm512_shuffle_f64x2(fold2, fold2, 0xDD));
  const __m512d total = _mm512_add_pd(_mm512_unpacklo_pd(pair0, pair1),
                                      _mm512_unpackhi_pd(pair0, pair1));
  HWY_ALIGN double totals[8];
  _mm512_store_pd(totals, total);
  sums->squared_error = totals[0];
  sums->reconstructed = totals[1];
  sums->absolute_error = totals[2];
  sums->product = totals[3];
  sums->relative_error = totals[4];
  sums->signal = totals[6];

  const hn::Full512<double> d;
  sums->max_absolute_error = hn::GetLane(hn::MaxOfLanes(d, terms.max_absolute));
  const hn::Full512<float> df;
  sums->max_relative_error = hn::GetLane(hn::MaxOfLanes(df, max_relative));
}

// All sums fit the registers.
class FloatSums {
 public:
  HWY_INLINE FloatSums()
      : low_(hn::Full512<double>()),
        high_(hn::Full512<double>()),
        max_relative_(hn::Zero(hn::Full512<float>())) {}

  // Adds `count` pairs, a multiple of kSumLanes.
  HWY_INLINE void Add(const float* HWY_RESTRICT real,
                      const float* HWY_RESTRICT restored, int64_t count,
                      const Ahead& ahead) {
    const hn::Full512<float> df;
    const hn::Full512<double> d;
    constexpr int64_t kHalf = kSumLanes / 2;
    HWY_ALIGN float relative[kSumLanes];
    for (int64_t i = 0; i < count; i += kSumLanes) {
      ahead.Fetch(i);
      const auto e =
          ErrorsOf(df, hn::LoadU(df, real + i), hn::LoadU(df, restored + i));
      flushed_ += static_cast<int64_t>(hn::CountTrue(df, e.flushed));
      max_relative_ = hn::Max(max_relative_, e.relative);
      hn::Store(e.relative, df, relative);
      KeepInMemory(relative);
      low_.template Add<true>(LoadDouble(d, real + i),
                              LoadDouble(d, restored + i),
                              LoadDouble(d, relative));
      high_.template Add<true>(LoadDouble(d, real + i + kHalf),
                               LoadDouble(d, restored + i + kHalf),
                               LoadDouble(d, relative + kHalf));
    }
  }

  HWY_INLINE void Finish(ErrorSums* sums) {
    low_.squared = hn::Add(low_.squared, high_.squared);
    low_.absolute = hn::Add(low_.absolute, high_.absolute);
    low_.relative = hn::Add(low_.relative, high_.relative);
    low_.signal = hn::Add(low_.signal, high_.signal);
    low_.reconstructed = hn::Add(low_.reconstructed, high_.reconstructed);
    low_.product = hn::Add(low_.product, high_.product);
    low_.max_absolute = hn::Max(low_.max_absolute, high_.max_absolute);
    SetSums(low_, max_relative_, sums);
    sums->zero_flushed = flushed_;
  }

 private:
  TermSums<hn::Full512<double>> low_;
  TermSums<hn::Full512<double>> high_;
  hn::Vec<hn::Full512<float>> max_relative_;
  int64_t flushed_ = 0;
};

#else

// In two steps: relative errors as float32 into L1, then everything from there
// as float64; see KeepInMemory.
class FloatSums {
 public:
  // Adds `count` pairs, a multiple of kSumLanes.
  HWY_INLINE void Add(const float* HWY_RESTRICT real,
                      const float* HWY_RESTRICT restored, int64_t count,
                      const Ahead& ahead) {
    const hn::CappedTag<float, kSumLanes> df;
    const hn::CappedTag<double, kSumLanes> d;
    const int64_t float_lanes = static_cast<int64_t>(hn::Lanes(df));
    const int64_t vector_lanes = static_cast<int64_t>(hn::Lanes(d));
    // Short enough for the divisions of one block to overlap the sums of the
    // one before.
    constexpr int64_t kBlock = 8 * kSumLanes;
    HWY_ALIGN float relative[kBlock];
    auto max_relative = hn::Zero(df);
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t block = std::min(kBlock, count - begin);
      const float* x = real + begin;
      const float* y = restored + begin;
      for (int64_t i = 0; i < block; i += float_lanes) {
        ahead.Fetch(begin + i);
        const auto e = ErrorsOf(df, hn::LoadU(df, x + i), hn::LoadU(df, y + i));
        sums_.zero_flushed +=
            static_cast<int64_t>(hn::CountTrue(df, e.flushed));
        max_relative = hn::Max(max_relative, e.relative);
        hn::Store(e.relative, df, relative + i);
      }
      // One vector's width of the lanes at a time, so that all sums fit
      // registers.
      for (int64_t lane = 0; lane < kSumLanes; lane += vector_lanes) {
        auto terms = lanes_.Load(d, lane);
        for (int64_t i = lane; i < block; i += kSumLanes) {
          terms.template Add<true>(LoadDouble(d, x + i), LoadDouble(d, y + i),
                                   LoadDouble(d, relative + i));
        }
        lanes_.Store(d, terms, lane);
      }
    }
    sums_.max_relative_error =
        std::max<double>(sums_.max_relative_error,
                         hn::GetLane(hn::MaxOfLanes(df, max_relative)));
  }

  HWY_INLINE void Finish(ErrorSums* sums) {
    *sums = sums_;
    SetSums(lanes_, sums);
  }

 private:
  LaneArrays lanes_;
  ErrorSums sums_;
};

#endif

// The lanes of ErrorSumSet::kNoise, of `T` float or double.
template <typename T>
class NoiseLanes {
 public:
  // Adds `count` pairs, a multiple of kSumLanes.
  HWY_INLINE void Add(const T* HWY_RESTRICT real,
                      const T* HWY_RESTRICT restored, int64_t count,
                      const Ahead& ahead) {
    constexpr bool kFromFloat = std::is_same_v<T, float>;
    const hn::CappedTag<double, kSumLanes> d;
    const int64_t vector_lanes = static_cast<int64_t>(hn::Lanes(d));
    // Two vectors' width of the lanes at a time: the sums fit registers, and
    // one need not wait for the last addition of the other.
    for (int64_t lane = 0; lane < kSumLanes; lane += 2 * vector_lanes) {
      auto low = Load(d, lane);
      auto high = Load(d, lane + vector_lanes);
      for (int64_t i = lane; i < count; i += kSumLanes) {
        if (lane == 0) ahead.Fetch(i);
        low.template Add<kFromFloat>(LoadDouble(d, real + i),
                                     LoadDouble(d, restored + i));
        high.template Add<kFromFloat>(
            LoadDouble(d, real + i + vector_lanes),
            LoadDouble(d, restored + i + vector_lanes));
      }
      Store(d, low, lane);
      Store(d, high, lane + vector_lanes);
    }
  }

  HWY_INLINE void Finish(ErrorSums* sums) const {
    sums->squared_error = SumTree(squared_);
    sums->signal = SumTree(signal_);
    sums->max_absolute_error =
        *std::max_element(max_absolute_, max_absolute_ + kSumLanes);
  }

 private:
  template <class D>
  HWY_INLINE NoiseSums<D> Load(D d, int64_t lane) const {
    NoiseSums<D> sums(d);
    sums.squared = hn::Load(d, squared_ + lane);
    sums.signal = hn::Load(d, signal_ + lane);
    sums.max_absolute = hn::Load(d, max_absolute_ + lane);
    return sums;
  }
  template <class D>
  HWY_INLINE void Store(D d, const NoiseSums<D>& sums, int64_t lane) {
    hn::Store(sums.squared, d, squared_ + lane);
    hn::Store(sums.signal, d, signal_ + lane);
    hn::Store(sums.max_absolute, d, max_absolute_ + lane);
  }

  HWY_ALIGN double squared_[kSumLanes] = {};
  HWY_ALIGN double signal_[kSumLanes] = {};
  HWY_ALIGN double max_absolute_[kSumLanes] = {};
};

// Adds `count` pairs to `Lanes`, which take multiples of kSumLanes.
template <class Lanes, typename T>
HWY_INLINE ErrorSums SumWith(const T* HWY_RESTRICT real,
                             const T* HWY_RESTRICT restored, int64_t count,
                             const Ahead& ahead) {
  Lanes lanes;
  const int64_t whole = count - count % kSumLanes;
  lanes.Add(real, restored, whole, ahead);
  if (whole < count) {
    HWY_ALIGN T last_real[kSumLanes] = {};
    HWY_ALIGN T last_restored[kSumLanes] = {};
    const size_t bytes = (count - whole) * sizeof(T);
    std::memcpy(last_real, real + whole, bytes);
    std::memcpy(last_restored, restored + whole, bytes);
    lanes.Add(last_real, last_restored, kSumLanes, ahead);
  }
  ErrorSums sums;
  lanes.Finish(&sums);
  return sums;
}

// All sums over pairs (x, x').
template <typename T>
HWY_INLINE ErrorSums SumAll(const T* HWY_RESTRICT real,
                            const T* HWY_RESTRICT restored, int64_t count,
                            const Ahead& ahead) {
  if constexpr (std::is_same_v<T, double>) {
    return SumWith<DoubleSums>(real, restored, count, ahead);
  } else {
    ErrorSums sums = SumWith<FloatSums>(real, restored, count, ahead);
    constexpr double kLargest = std::numeric_limits<float>::max();
    if (HWY_UNLIKELY(sums.max_relative_error > kLargest)) {
      LaneSums wide;
      for (int64_t k = 0; k < count; ++k) wide.Add(k, real[k], restored[k]);
      sums = wide.Total();
    }
    return sums;
  }
}

// The sums over pairs (x, x') of a leaf or portion; (0, 0) stands for an
// element that is left out and counted in `counts`.
template <typename T>
HWY_INLINE ErrorSums SumPairs(const T* HWY_RESTRICT real,
                              const T* HWY_RESTRICT restored, int64_t count,
                              const PairCounts& counts, ErrorSumSet set,
                              const Ahead& ahead) {
  ErrorSums sums = set == ErrorSumSet::kNoise
                       ? SumWith<NoiseLanes<T>>(real, restored, count, ahead)
                       : SumAll(real, restored, count, ahead);
  sums.count = count - counts.non_finite;
  sums.non_finite = counts.non_finite;
  sums.clipped_low = counts.clipped_low;
  sums.clipped_high = counts.clipped_high;
  return sums;
}

}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();
#endif

#endif  // QUANTD_CORE_EVALUATE_PAIR_SUMS_INL_H_
