#include "core/quantize/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/formats/packing.h"
#include "core/quantize/quantize_kernel.h"
#include "core/simd_internal.h"
#include "core/types/float_convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/quantize/quantize.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/formats/packing-inl.h"
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_QUANTIZE_QUANTIZE_ONCE
#define QUANTD_CORE_QUANTIZE_QUANTIZE_ONCE
namespace quantd::core {
namespace {

// Elements that go through the L1 buffers at a time.
constexpr int64_t kBlockElements = 2048;
// Elements that are done over when one of them is clipped or not a number.
constexpr int64_t kPieceElements = 256;
// Elements of a task; a multiple of kBlockElements.
constexpr int64_t kTaskElements = 64 * 1024;

// Adding 1.5 * 2^23 rounds a float of magnitude up to 2^22 to the nearest even
// integer, which the low bits of the sum then hold.
constexpr float kMagic = 12582912.0f;
constexpr int32_t kMagicBits = 0x4B400000;
constexpr int32_t kMagicLimit = 1 << 22;

// Scales whose parameters are made at a time.
constexpr int64_t kBatchScales = 16;

// What the elements of one scale index have in common.
struct ScaleParameters {
  float scale;
  float reciprocal;
  // The smallest and the largest x that are not clipped.
  float low;
  float high;
  int32_t zero_point;
  // The division may be replaced; see ExactQuotient.
  bool has_reciprocal;
};

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_QUANTIZE_QUANTIZE_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void QuantizeSimd(const QuantizeRange& range, QuantizeCounts* counts) {
  QuantizeScalar(range, counts);
}

#else

#undef QUANTD_HAS_FMA
#if HWY_TARGET == HWY_SSSE3 || HWY_TARGET == HWY_SSE4
#define QUANTD_HAS_FMA 0
#else
#define QUANTD_HAS_FMA 1
#endif

// x / scale, correctly rounded. With y the correctly rounded reciprocal and q
// within one unit in the last place of the quotient, fma(x - q * scale, y, q)
// is the correctly rounded quotient (Markstein); a product x * y can be 1.5
// units off, so one such step makes it good enough for the other. Quotients
// below a quarter may come out different, but round to zero all the same.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExactQuotient(D d, V x, V scale, V y) {
#if QUANTD_HAS_FMA
  const V product = hn::Mul(x, y);
  const V near = hn::MulAdd(hn::NegMulAdd(product, scale, x), y, product);
  return hn::MulAdd(hn::NegMulAdd(near, scale, x), y, near);
#else
  return hn::Div(x, scale);
#endif
}

// The neighbours of floats other than zero.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V NextAbove(D d, V x) {
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(di, x);
  // 1 for positive numbers, -1 for negative ones.
  const auto step = hn::Or(hn::BroadcastSignBit(bits), hn::Set(di, 1));
  return hn::BitCast(d, hn::Add(bits, step));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V NextBelow(D d, V x) {
  return hn::Neg(NextAbove(d, hn::Neg(x)));
}

// The largest x with rint(x / scale) <= high, in exact IEEE terms: x / scale
// rounds to at most `last`, the largest float that rint takes to `high`, while
// it is below the middle between `last` and its successor. It is never equal:
// that middle has 25 significant bits, and a product with it at least as many,
// more than x has. The product with a float's 24 bits is exact in float64.
template <class DF, class VF = hn::Vec<DF>,
          class VI = hn::Vec<hn::RebindToSigned<DF>>>
HWY_INLINE VF LargestUnclipped(DF df, VF scale, VI high) {
  const hn::RebindToSigned<DF> di;
  const hn::Rebind<double, DF> dd;
  const auto tie = hn::Add(hn::ConvertTo(df, high), hn::Set(df, 0.5f));
  const auto is_even = hn::Eq(hn::And(high, hn::Set(di, 1)), hn::Zero(di));
  const auto last =
      hn::IfThenElse(hn::RebindMask(df, is_even), tie, NextBelow(df, tie));
  const auto middle = hn::Mul(
      hn::Add(hn::PromoteTo(dd, last), hn::PromoteTo(dd, NextAbove(df, last))),
      hn::Set(dd, 0.5));
  const auto bound = hn::Mul(hn::PromoteTo(dd, scale), middle);
  const auto rounded = hn::DemoteTo(df, bound);
  // One float64 unit of slack in the other direction has the sign of the
  // excess, so that a mask of the narrow type is made from numbers.
  const auto excess = hn::DemoteTo(
      df, hn::IfThenElseZero(hn::Gt(hn::PromoteTo(dd, rounded), bound),
                             hn::Set(dd, 1.0)));
  return hn::IfThenElse(hn::Gt(excess, hn::Zero(df)), NextBelow(df, rounded),
                        rounded);
}

// Parameters of up to kBatchScales consecutive scale indices.
class ScaleBatch {
 public:
  explicit ScaleBatch(const QuantizeRange& range) : range_(range) {}

  // Makes those from `scale_index` on where it has them not.
  HWY_INLINE const ScaleParameters& Get(int64_t scale_index) {
    if (HWY_UNLIKELY(scale_index < first_ || scale_index >= first_ + count_)) {
      Make(scale_index);
    }
    return parameters_[scale_index - first_];
  }

 private:
  HWY_NOINLINE void Make(int64_t first) {
    const Encoding& encoding = range_.encoding;
    first_ = first;
    count_ = std::min<int64_t>(
        kBatchScales, static_cast<int64_t>(encoding.scale.size()) - first);
    HWY_ALIGN float scale[kBatchScales];
    HWY_ALIGN int32_t zero_point[kBatchScales];
    for (int64_t i = 0; i < kBatchScales; ++i) {
      scale[i] = i < count_ ? encoding.scale[first + i] : 1.0f;
      zero_point[i] = i < count_ ? range_.zero_point(first + i) : 0;
    }
    HWY_ALIGN float reciprocal[kBatchScales];
    HWY_ALIGN float low[kBatchScales];
    HWY_ALIGN float high[kBatchScales];
    const hn::CappedTag<double, kBatchScales> dd;
    const hn::Rebind<float, decltype(dd)> df;
    const hn::Rebind<int32_t, decltype(dd)> di;
    for (size_t i = 0; i < kBatchScales; i += hn::Lanes(dd)) {
      const auto s = hn::LoadU(df, scale + i);
      const auto zero = hn::LoadU(di, zero_point + i);
      const auto qmin = hn::Set(di, encoding.qmin);
      const auto qmax = hn::Set(di, encoding.qmax);
      hn::StoreU(hn::Div(hn::Set(df, 1.0f), s), df, reciprocal + i);
      hn::StoreU(LargestUnclipped(df, s, hn::Sub(qmax, zero)), df, high + i);
      hn::StoreU(hn::Neg(LargestUnclipped(df, s, hn::Sub(zero, qmin))), df,
                 low + i);
    }
    for (int64_t i = 0; i < count_; ++i) {
      // Far from the ends of the exponents no step of ExactQuotient underflows
      // or overflows; the magic sum has its own limit.
      const bool has_reciprocal =
          scale[i] >= 0x1p-100f && scale[i] <= 0x1p100f &&
          encoding.qmin - zero_point[i] >= -kMagicLimit &&
          encoding.qmax - zero_point[i] <= kMagicLimit;
      parameters_[i] = {scale[i], reciprocal[i], low[i],
                        high[i],  zero_point[i], has_reciprocal};
    }
  }

  const QuantizeRange& range_;
  int64_t first_ = 0;
  int64_t count_ = 0;
  ScaleParameters parameters_[kBatchScales];
};

// Quantizes Lanes(d) elements of one scale index. False if one is clipped or
// NaN: a clipped code is right, that of a NaN is not.
template <class D, typename Code>
HWY_INLINE hn::Mask<D> QuantizeVector(D d, const uint8_t* HWY_RESTRICT in,
                                      const ScaleParameters& p,
                                      Code* HWY_RESTRICT out) {
  const hn::RebindToSigned<D> di;
  const hn::Rebind<Code, D> dc;
  const auto x = LoadBytes(d, in);
  const auto clamped =
      hn::Min(hn::Max(x, hn::Set(d, p.low)), hn::Set(d, p.high));
  const auto quotient =
      ExactQuotient(d, clamped, hn::Set(d, p.scale), hn::Set(d, p.reciprocal));
  const auto sum = hn::BitCast(di, hn::Add(quotient, hn::Set(d, kMagic)));
  const auto code = hn::Sub(sum, hn::Set(di, kMagicBits - p.zero_point));
  hn::StoreU(hn::DemoteTo(dc, code), dc, out);
  return hn::Eq(x, clamped);
}

// Counts what QuantizeVector found clipped or NaN, and gives NaN its code.
template <typename Code>
void CountSpecial(const uint8_t* HWY_RESTRICT in, int64_t count,
                  const ScaleParameters& p, Code nan_code,
                  Code* HWY_RESTRICT out, QuantizeCounts* counts) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const float infinity = std::numeric_limits<float>::infinity();
  int64_t low = 0, high = 0, nan = 0, positive = 0, negative = 0;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto x = LoadBytes(d, in + i * 4);
    low += hn::CountTrue(d, hn::Lt(x, hn::Set(d, p.low)));
    high += hn::CountTrue(d, hn::Gt(x, hn::Set(d, p.high)));
    nan += hn::CountTrue(d, hn::IsNaN(x));
    positive += hn::CountTrue(d, hn::Eq(x, hn::Set(d, infinity)));
    negative += hn::CountTrue(d, hn::Eq(x, hn::Set(d, -infinity)));
  }
  for (; i < count; ++i) {
    const float x = LoadUnaligned<float>(in + i * 4);
    low += x < p.low;
    high += x > p.high;
    nan += std::isnan(x);
    positive += x == infinity;
    negative += x == -infinity;
  }
  counts->clipped_low += low;
  counts->clipped_high += high;
  counts->nan += nan;
  counts->positive_infinity += positive;
  counts->negative_infinity += negative;
  if (nan == 0) return;
  for (i = 0; i < count; ++i) {
    if (std::isnan(LoadUnaligned<float>(in + i * 4))) out[i] = nan_code;
  }
}

// Elements of one scale index that has a reciprocal.
template <typename Code>
void QuantizeUniform(const uint8_t* HWY_RESTRICT in, int64_t count,
                     const ScaleParameters& p, Code nan_code,
                     Code* HWY_RESTRICT out, QuantizeCounts* counts) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> d1;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  while (count > 0) {
    const int64_t piece = std::min(count, kPieceElements);
    int64_t i = 0;
    auto good = hn::Eq(hn::Zero(d), hn::Zero(d));
    for (; i + lanes <= piece; i += lanes) {
      good = hn::And(good, QuantizeVector(d, in + i * 4, p, out + i));
    }
    bool all_good = hn::AllTrue(d, good);
    for (; i < piece; ++i) {
      all_good &= hn::AllTrue(d1, QuantizeVector(d1, in + i * 4, p, out + i));
    }
    if (HWY_UNLIKELY(!all_good)) {
      CountSpecial(in, piece, p, nan_code, out, counts);
    }
    in += piece * 4;
    out += piece;
    count -= piece;
  }
}

// Quantizes Lanes(d) elements by division, with a scale and zero point each
// (kStep 1) or one for all (kStep 0). False if one is clipped or NaN; its code
// is then unspecified.
template <int kStep, class D, typename Code>
HWY_INLINE hn::Mask<D> DivideVector(D d, const uint8_t* HWY_RESTRICT in,
                                    const float* HWY_RESTRICT scale,
                                    const int32_t* HWY_RESTRICT zero_point,
                                    int32_t qmin, int32_t qmax,
                                    Code* HWY_RESTRICT out) {
  using T = hn::TFromD<D>;
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<float, D> df;
  const hn::Rebind<Code, D> dc;
  const auto zero = kStep == 1 && zero_point != nullptr
                        ? hn::LoadU(di, zero_point)
                        : hn::Set(di, zero_point == nullptr ? 0 : *zero_point);
  const auto scale_f = kStep == 1 ? hn::LoadU(df, scale) : hn::Set(df, *scale);
  const auto low_i = hn::Sub(hn::Set(di, qmin), zero);
  const auto high_i = hn::Sub(hn::Set(di, qmax), zero);
  const auto x = LoadBytes(d, in);
  if constexpr (std::is_same_v<T, double>) {
    const auto rounded = hn::Round(hn::Div(x, hn::PromoteTo(d, scale_f)));
    const auto clamped = hn::Min(hn::Max(rounded, hn::PromoteTo(d, low_i)),
                                 hn::PromoteTo(d, high_i));
    const auto code = hn::Add(hn::DemoteTo(di, clamped), zero);
    hn::StoreU(hn::DemoteTo(dc, code), dc, out);
    return hn::Eq(rounded, clamped);
  } else {
    const auto rounded = hn::Round(hn::Div(x, scale_f));
    const auto clamped = hn::Min(hn::Max(rounded, hn::ConvertTo(d, low_i)),
                                 hn::ConvertTo(d, high_i));
    const auto code = hn::Add(hn::ConvertTo(di, clamped), zero);
    hn::StoreU(hn::DemoteTo(dc, code), dc, out);
    return hn::Eq(rounded, clamped);
  }
}

// Elements [begin, begin + count) of `whole`, whose codes are not packed, at
// in and out: one run. `T` is float or double.
template <int kStep, typename T, typename Code>
void QuantizeByDivision(const QuantizeRange& whole, const FormatInfo& container,
                        int64_t begin, int64_t scale_index,
                        const uint8_t* HWY_RESTRICT in, int64_t count,
                        Code* HWY_RESTRICT out, QuantizeCounts* counts) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 1> d1;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const Encoding& encoding = whole.encoding;
  const float* scale = encoding.scale.data() + scale_index;
  const int32_t* zero_point = encoding.zero_point.empty()
                                  ? nullptr
                                  : encoding.zero_point.data() + scale_index;
  for (int64_t piece_begin = 0; piece_begin < count;
       piece_begin += kPieceElements) {
    const int64_t end = std::min(piece_begin + kPieceElements, count);
    const auto vector = [&](auto tag, int64_t i) HWY_ATTR {
      return DivideVector<kStep>(
          tag, in + i * static_cast<int64_t>(sizeof(T)), scale + i * kStep,
          zero_point == nullptr ? nullptr : zero_point + i * kStep,
          encoding.qmin, encoding.qmax, out + i);
    };
    auto good = hn::Eq(hn::Zero(d), hn::Zero(d));
    int64_t i = piece_begin;
    for (; i + lanes <= end; i += lanes) good = hn::And(good, vector(d, i));
    bool all_good = hn::AllTrue(d, good);
    for (; i < end; ++i) all_good &= hn::AllTrue(d1, vector(d1, i));
    if (HWY_UNLIKELY(!all_good)) {
      QuantizeCounts piece;
      QuantizeScalar({encoding, container, whole.layout,
                      std::is_same_v<T, double> ? ElementType::kFloat64
                                                : ElementType::kFloat32,
                      whole.nan_policy, begin + piece_begin, end - piece_begin,
                      in + piece_begin * static_cast<int64_t>(sizeof(T)),
                      reinterpret_cast<uint8_t*>(out + piece_begin)},
                     &piece);
      piece.total = 0;
      counts->Merge(piece);
    }
  }
}

template <typename T, typename Code>
void QuantizeTyped(const QuantizeRange& range, QuantizeCounts* counts) {
  const bool is_packed = range.format.storage_bits < 8;
  const bool widens = sizeof(T) == 4 && range.type != ElementType::kFloat32;
  const int64_t element_bytes = ElementSizeBytes(range.type);
  const FormatInfo& container =
      is_packed ? IntegerFormat(8, range.format.is_signed) : range.format;
  HWY_ALIGN float wide[kBlockElements];
  HWY_ALIGN Code codes[kBlockElements];

  BlockLayout::RunCursor cursor(range.layout, range.first, range.count);
  BlockLayout::Run run{};
  ScaleBatch batch(range);
  for (int64_t begin = 0; begin < range.count; begin += kBlockElements) {
    const int64_t count = std::min(range.count - begin, kBlockElements);
    const uint8_t* in = range.in + begin * element_bytes;
    uint8_t* out = range.out + range.format.SizeBytes(begin);
    if (widens) {
      Widen(range.type, in, count, wide);
      in = reinterpret_cast<const uint8_t*>(wide);
    }
    Code* block_codes = is_packed ? codes : reinterpret_cast<Code*>(out);
    for (int64_t i = 0; i < count;) {
      if (run.count == 0) cursor.Next(&run);
      const int64_t part = std::min(run.count, count - i);
      const uint8_t* part_in = in + i * static_cast<int64_t>(sizeof(T));
      if (run.scale_step == 1) {
        QuantizeByDivision<1, T>(range, container, run.begin, run.scale_index,
                                 part_in, part, block_codes + i, counts);
      } else {
        const ScaleParameters* parameters =
            std::is_same_v<T, float> ? &batch.Get(run.scale_index) : nullptr;
        if (parameters != nullptr && parameters->has_reciprocal) {
          QuantizeUniform(
              part_in, part, *parameters,
              static_cast<Code>(range.NanCode(parameters->zero_point)),
              block_codes + i, counts);
        } else {
          QuantizeByDivision<0, T>(range, container, run.begin, run.scale_index,
                                   part_in, part, block_codes + i, counts);
        }
      }
      run.begin += part;
      run.count -= part;
      run.scale_index += part * run.scale_step;
      i += part;
    }
    if constexpr (sizeof(Code) == 1) {
      if (is_packed) {
        PackCodes(range.format.storage_bits, reinterpret_cast<uint8_t*>(codes),
                  count, out);
      }
    }
  }
}

template <typename Code>
void QuantizeAs(const QuantizeRange& range, QuantizeCounts* counts) {
  if (range.type == ElementType::kFloat64) {
    QuantizeTyped<double, Code>(range, counts);
  } else {
    QuantizeTyped<float, Code>(range, counts);
  }
}

void QuantizeSimd(const QuantizeRange& range, QuantizeCounts* counts) {
  counts->total += range.count;
  if (range.format.storage_bits == 16) {
    if (range.format.is_signed) {
      QuantizeAs<int16_t>(range, counts);
    } else {
      QuantizeAs<uint16_t>(range, counts);
    }
  } else {
    if (range.format.is_signed) {
      QuantizeAs<int8_t>(range, counts);
    } else {
      QuantizeAs<uint8_t>(range, counts);
    }
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

HWY_EXPORT(QuantizeSimd);

// Requires: there is one.
absl::Status FirstNonFinite(const QuantizeRange& range) {
  int64_t i = 0;
  double value = 0;
  for (; i < range.count; ++i) {
    value = range.type == ElementType::kFloat64
                ? LoadElement<double>(range.type, range.in, i)
                : LoadElement<float>(range.type, range.in, i);
    if (!std::isfinite(value)) break;
  }
  return NonFiniteRejectedError(range.first + i, value);
}

}  // namespace

void QuantizeCounts::Merge(const QuantizeCounts& other) {
  total += other.total;
  clipped_low += other.clipped_low;
  clipped_high += other.clipped_high;
  nan += other.nan;
  positive_infinity += other.positive_infinity;
  negative_infinity += other.negative_infinity;
}

absl::Status Quantize(const Encoding& encoding, const BlockLayout& layout,
                      ElementType type, NanPolicy nan_policy, int64_t first,
                      int64_t count, const uint8_t* in, uint8_t* out,
                      QuantizeCounts* counts, ThreadPool* pool) {
  if (count == 0) return absl::OkStatus();
  const FormatInfo& format = *FindFormat(encoding.format);
  const int64_t element_bytes = ElementSizeBytes(type);
  const int64_t tasks = (count + kTaskElements - 1) / kTaskElements;
  const auto task_range = [&](int64_t task) {
    const int64_t begin = task * kTaskElements;
    return QuantizeRange{encoding,
                         format,
                         layout,
                         type,
                         nan_policy,
                         first + begin,
                         std::min(kTaskElements, count - begin),
                         in + begin * element_bytes,
                         out + format.SizeBytes(begin)};
  };
  std::vector<QuantizeCounts> task_counts(tasks);
  const bool is_scalar = internal::UsesScalarKernels();
  const auto run_task = [&](int64_t task) {
    if (is_scalar) {
      QuantizeScalar(task_range(task), &task_counts[task]);
    } else {
      HWY_DYNAMIC_DISPATCH(QuantizeSimd)(task_range(task), &task_counts[task]);
    }
  };
  if (pool != nullptr) {
    pool->ParallelFor(tasks, run_task);
  } else {
    for (int64_t task = 0; task < tasks; ++task) run_task(task);
  }
  for (int64_t task = 0; task < tasks; ++task) {
    const QuantizeCounts& c = task_counts[task];
    if (nan_policy == NanPolicy::kReject &&
        c.nan + c.positive_infinity + c.negative_infinity > 0) {
      return FirstNonFinite(task_range(task));
    }
    counts->Merge(c);
  }
  return absl::OkStatus();
}

}  // namespace quantd::core
#endif  // HWY_ONCE
