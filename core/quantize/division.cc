// Quantizes by dividing, as quantize.h defines it: any type, scale and layout.
// The other kernels leave to it what their reciprocals do not fit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/formats/grid.h"
#include "core/formats/number_format.h"
#include "core/formats/packing.h"
#include "core/quantize/quantize_kernel.h"
#include "core/types/float_convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/quantize/division.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/formats/float_codec-inl.h"
#include "core/formats/packing-inl.h"
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_QUANTIZE_DIVISION_ONCE
#define QUANTD_CORE_QUANTIZE_DIVISION_ONCE
namespace quantd::core {
namespace {

// Elements that go through the L1 buffers at a time.
constexpr int64_t kBlockElements = 2048;
// Elements that are looked at again when one of them is clipped or NaN.
constexpr int64_t kPieceElements = 512;

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_QUANTIZE_DIVISION_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

// The kernel that would call it is the plain definition here.
void DivideSimd(const QuantizeRange&, const RangePart&, QuantizeCounts*) {
  HWY_ABORT("no division without SIMD");
}

#else

// Elements and their quotients, with a scale and zero point each or the same in
// all lanes.
template <class D>
struct Quotients {
  HWY_INLINE Quotients() {}

  hn::Vec<D> x;
  hn::Vec<D> rounded;
  // Codes less the zero point.
  hn::Vec<D> low;
  hn::Vec<D> high;
  // A real one is in the quotient already, and 0 here.
  hn::Vec<hn::Rebind<int32_t, D>> zero_point;
};

// The run's scales and zero points [count], or [1] if they do not step.
struct RunScales {
  const float* scale;
  // Null: all zero.
  const int32_t* zero_point;
  // In place of those, where zero points are real.
  const float* real_zero_point;
  int32_t qmin;
  int32_t qmax;
};

// Lanes(d) elements from the i-th of a run on, at `in`.
template <int kStep, bool kIsReal, class D>
HWY_INLINE Quotients<D> Divide(D d, const uint8_t* HWY_RESTRICT in,
                               const RunScales& run, int64_t i) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<float, D> df;
  Quotients<D> q;
  q.x = LoadBytes(d, in);
  if constexpr (kIsReal) {
    const auto each = [&](const float* values) HWY_ATTR {
      const auto v =
          kStep == 1 ? hn::LoadU(df, values + i) : hn::Set(df, *values);
      if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
        return hn::PromoteTo(d, v);
      } else {
        return v;
      }
    };
    q.zero_point = hn::Zero(di);
    q.rounded = hn::Round(
        hn::Add(hn::Div(q.x, each(run.scale)), each(run.real_zero_point)));
    q.low = hn::Set(d, static_cast<hn::TFromD<D>>(run.qmin));
    q.high = hn::Set(d, static_cast<hn::TFromD<D>>(run.qmax));
    return q;
  }
  if (run.zero_point == nullptr) {
    q.zero_point = hn::Zero(di);
  } else {
    q.zero_point = kStep == 1 ? hn::LoadU(di, run.zero_point + i)
                              : hn::Set(di, *run.zero_point);
  }
  const auto scale =
      kStep == 1 ? hn::LoadU(df, run.scale + i) : hn::Set(df, *run.scale);
  const auto low = hn::Sub(hn::Set(di, run.qmin), q.zero_point);
  const auto high = hn::Sub(hn::Set(di, run.qmax), q.zero_point);
  if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
    q.rounded = hn::Round(hn::Div(q.x, hn::PromoteTo(d, scale)));
    q.low = hn::PromoteTo(d, low);
    q.high = hn::PromoteTo(d, high);
  } else {
    q.rounded = hn::Round(hn::Div(q.x, scale));
    q.low = hn::ConvertTo(d, low);
    q.high = hn::ConvertTo(d, high);
  }
  return q;
}

// Stores codes. Takes lanes out of `good` that are clipped or NaN: a clipped
// code is right, that of a NaN is not. `Code` is unsigned for signed codes too,
// whose lowest bits these are: each type costs a second to compile.
template <typename Code, class D>
HWY_INLINE void StoreQuotients(D d, const Quotients<D>& q,
                               uint8_t* HWY_RESTRICT out, hn::Mask<D>& good) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<Code, D> dc;
  const auto clamped = hn::Min(hn::Max(q.rounded, q.low), q.high);
  good = hn::And(good, hn::Eq(q.rounded, clamped));
  hn::Vec<decltype(di)> code;
  if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
    code = hn::DemoteTo(di, clamped);
  } else {
    code = hn::ConvertTo(di, clamped);
  }
  const auto bits = hn::And(hn::Add(code, q.zero_point),
                            hn::Set(di, std::numeric_limits<Code>::max()));
  StoreBytes(hn::DemoteTo(dc, bits), dc, out);
}

// Counts elements that are not finite.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void CountNonFinite(D d, V x, QuantizeCounts* counts) {
  using T = hn::TFromD<D>;
  const auto infinity = hn::Set(d, std::numeric_limits<T>::infinity());
  counts->nan += hn::CountTrue(d, hn::IsNaN(x));
  counts->positive_infinity += hn::CountTrue(d, hn::Eq(x, infinity));
  counts->negative_infinity += hn::CountTrue(d, hn::Eq(x, hn::Neg(infinity)));
}

// Counts the clipped and the non-finite elements. Returns true if a quotient is
// NaN: that of a NaN, or of any element by a NaN scale.
template <class D>
HWY_INLINE bool CountQuotients(D d, const Quotients<D>& q,
                               QuantizeCounts* counts) {
  counts->clipped_low += hn::CountTrue(d, hn::Lt(q.rounded, q.low));
  counts->clipped_high += hn::CountTrue(d, hn::Gt(q.rounded, q.high));
  CountNonFinite(d, q.x, counts);
  return !hn::AllFalse(d, hn::IsNaN(q.rounded));
}

// Elements of one run. `T` is float or double. `kIsReal`: zero points are.
template <int kStep, bool kIsReal, typename T, typename Code>
void QuantizeRun(const QuantizeRange& range, int64_t scale_index,
                 const uint8_t* HWY_RESTRICT in, int64_t count,
                 uint8_t* HWY_RESTRICT out, QuantizeCounts* counts) {
  using D = hn::ScalableTag<T>;
  using D1 = hn::CappedTag<T, 1>;
  const D d;
  const D1 d1;
  constexpr int64_t kSize = sizeof(T);
  constexpr int64_t kCodeSize = sizeof(Code);
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const Encoding& encoding = range.encoding;
  const RunScales run{
      encoding.scale.data() + scale_index,
      encoding.zero_point.empty() ? nullptr
                                  : encoding.zero_point.data() + scale_index,
      kIsReal ? encoding.real_zero_point.data() + scale_index : nullptr,
      encoding.qmin, encoding.qmax};
  for (int64_t begin = 0; begin < count; begin += kPieceElements) {
    const int64_t end = std::min(begin + kPieceElements, count);
    auto good = hn::Eq(hn::Zero(d), hn::Zero(d));
    auto good1 = hn::Eq(hn::Zero(d1), hn::Zero(d1));
    int64_t i = begin;
    for (; i + lanes <= end; i += lanes) {
      StoreQuotients<Code>(d, Divide<kStep, kIsReal>(d, in + i * kSize, run, i),
                           out + i * kCodeSize, good);
    }
    for (; i < end; ++i) {
      StoreQuotients<Code>(d1,
                           Divide<kStep, kIsReal>(d1, in + i * kSize, run, i),
                           out + i * kCodeSize, good1);
    }
    if (HWY_LIKELY(hn::AllTrue(d, good) && hn::AllTrue(d1, good1))) continue;
    bool has_nan = false;
    for (i = begin; i + lanes <= end; i += lanes) {
      has_nan |= CountQuotients(
          d, Divide<kStep, kIsReal>(d, in + i * kSize, run, i), counts);
    }
    for (; i < end; ++i) {
      has_nan |= CountQuotients(
          d1, Divide<kStep, kIsReal>(d1, in + i * kSize, run, i), counts);
    }
    if (!has_nan) continue;
    for (i = begin; i < end; ++i) {
      int32_t code;
      if (std::isnan(run.scale[i * kStep])) {
        code = 0;
      } else if (std::isnan(LoadUnaligned<T>(in + i * kSize))) {
        code = range.NanCode(kIsReal ? static_cast<int32_t>(std::nearbyint(
                                           run.real_zero_point[i * kStep]))
                             : run.zero_point == nullptr
                                 ? 0
                                 : run.zero_point[i * kStep]);
      } else {
        continue;
      }
      StoreUnaligned(static_cast<Code>(code), out + i * kCodeSize);
    }
  }
}

// Lanes(d) elements from the i-th of a run on and their quotients.
template <class D>
struct GridQuotients {
  hn::Vec<D> x;
  hn::Vec<D> quotient;
};

template <int kStep, class D>
HWY_INLINE GridQuotients<D> DivideForGrid(D d, const uint8_t* HWY_RESTRICT in,
                                          const float* HWY_RESTRICT scale,
                                          int64_t i) {
  using T = hn::TFromD<D>;
  const hn::Rebind<float, D> df;
  const auto x = LoadBytes(d, in + i * static_cast<int64_t>(sizeof(T)));
  const auto s = kStep == 1 ? hn::LoadU(df, scale + i) : hn::Set(df, *scale);
  // The zero point: it makes +0 of -0.
  const auto zero = hn::Zero(d);
  if constexpr (std::is_same_v<T, double>) {
    return {x, hn::Add(hn::Div(x, hn::PromoteTo(d, s)), zero)};
  } else {
    return {x, hn::Add(hn::Div(x, s), zero)};
  }
}

// Elements of one run, codes on a FloatGrid or CodebookGrid.
template <int kStep, typename T, class Grid>
void QuantizeRunOnGrid(const QuantizeRange& range, const Grid& grid,
                       int64_t scale_index, const uint8_t* HWY_RESTRICT in,
                       int64_t count, uint8_t* HWY_RESTRICT out,
                       QuantizeCounts* counts) {
  using D = hn::ScalableTag<T>;
  using D1 = hn::CappedTag<T, 1>;
  const D d;
  const D1 d1;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const float* scale = range.encoding.scale.data() + scale_index;
  const auto encode = [&](auto tag, int64_t i, auto& good) HWY_ATTR {
    const auto q = DivideForGrid<kStep>(tag, in, scale, i).quotient;
    good = hn::And(good, InRange(tag, grid, q));
    return EncodeInRange(tag, grid, q);
  };
  // Counts, and makes all codes but those of NaN under other policies than the
  // default.
  const auto encode_special = [&](auto tag, int64_t i) HWY_ATTR {
    const hn::Rebind<uint8_t, decltype(tag)> du8;
    const auto q = DivideForGrid<kStep>(tag, in, scale, i);
    counts->clipped_low += hn::CountTrue(tag, IsBelow(tag, grid, q.quotient));
    counts->clipped_high += hn::CountTrue(tag, IsAbove(tag, grid, q.quotient));
    CountNonFinite(tag, q.x, counts);
    StoreBytes(hn::DemoteTo(du8, Encode(tag, grid, q.quotient)), du8, out + i);
  };
  for (int64_t begin = 0; begin < count; begin += kPieceElements) {
    const int64_t end = std::min(begin + kPieceElements, count);
    auto good = hn::Eq(hn::Zero(d), hn::Zero(d));
    auto good1 = hn::Eq(hn::Zero(d1), hn::Zero(d1));
    int64_t i = begin;
    for (; i + lanes <= end; i += lanes) {
      const hn::Rebind<uint8_t, D> du8;
      StoreBytes(hn::DemoteTo(du8, encode(d, i, good)), du8, out + i);
    }
    for (; i < end; ++i) {
      const hn::Rebind<uint8_t, D1> du8;
      StoreBytes(hn::DemoteTo(du8, encode(d1, i, good1)), du8, out + i);
    }
    if (HWY_LIKELY(hn::AllTrue(d, good) && hn::AllTrue(d1, good1))) continue;
    const int64_t nan_before = counts->nan;
    for (i = begin; i + lanes <= end; i += lanes) encode_special(d, i);
    for (; i < end; ++i) encode_special(d1, i);
    if (counts->nan == nan_before) continue;
    for (i = begin; i < end; ++i) {
      if (std::isnan(
              LoadUnaligned<T>(in + i * static_cast<int64_t>(sizeof(T)))) &&
          !std::isnan(scale[i * kStep])) {
        out[i] = static_cast<uint8_t>(range.NanCode(0));
      }
    }
  }
}

// Calls `quantize_part(run, in, count, codes)` for the parts of the runs,
// widened to T and with codes of that size each.
template <typename T, typename Code, class Function>
HWY_INLINE void ForEachRunOf(const QuantizeRange& range, const RangePart& part,
                             const Function& quantize_part) {
  const bool is_packed = part.bits < 8;
  const bool widens = sizeof(T) == 4 && range.type != ElementType::kFloat32;
  const int64_t element_bytes = ElementSizeBytes(range.type);
  HWY_ALIGN float wide[kBlockElements];
  HWY_ALIGN uint8_t codes[kBlockElements];

  BlockLayout::RunCursor cursor(range.layout, range.first + part.begin,
                                part.count);
  BlockLayout::Run run{};
  for (int64_t begin = 0; begin < part.count; begin += kBlockElements) {
    const int64_t count = std::min(part.count - begin, kBlockElements);
    const uint8_t* in = range.in + (part.begin + begin) * element_bytes;
    uint8_t* out = part.out + begin * part.bits / 8;
    if (widens) {
      Widen(range.type, in, count, wide);
      in = reinterpret_cast<const uint8_t*>(wide);
    }
    uint8_t* block_codes = is_packed ? codes : out;
    for (int64_t i = 0; i < count;) {
      if (run.count == 0) cursor.Next(&run);
      const int64_t n = std::min(run.count, count - i);
      quantize_part(run, in + i * static_cast<int64_t>(sizeof(T)), n,
                    block_codes + i * static_cast<int64_t>(sizeof(Code)));
      run.count -= n;
      run.scale_index += n * run.scale_step;
      i += n;
    }
    if (is_packed) PackCodes(part.bits, codes, count, out);
  }
}

template <bool kIsReal, typename T, typename Code>
void DivideIntegers(const QuantizeRange& range, const RangePart& part,
                    QuantizeCounts* counts) {
  ForEachRunOf<T, Code>(
      range, part,
      [&](const BlockLayout::Run& run, const uint8_t* in, int64_t count,
          uint8_t* codes) HWY_ATTR {
        if (run.scale_step == 1) {
          QuantizeRun<1, kIsReal, T, Code>(range, run.scale_index, in, count,
                                           codes, counts);
        } else {
          QuantizeRun<0, kIsReal, T, Code>(range, run.scale_index, in, count,
                                           codes, counts);
        }
      });
}

template <typename T, class Grid>
void DivideToGrid(const QuantizeRange& range, const Grid& grid,
                  const RangePart& part, QuantizeCounts* counts) {
  ForEachRunOf<T, uint8_t>(
      range, part,
      [&](const BlockLayout::Run& run, const uint8_t* in, int64_t count,
          uint8_t* codes) HWY_ATTR {
        if (run.scale_step == 1) {
          QuantizeRunOnGrid<1, T>(range, grid, run.scale_index, in, count,
                                  codes, counts);
        } else {
          QuantizeRunOnGrid<0, T>(range, grid, run.scale_index, in, count,
                                  codes, counts);
        }
      });
}

template <bool kIsReal, typename T>
void DivideIntegersOfFormat(const QuantizeRange& range, const RangePart& part,
                            QuantizeCounts* counts) {
  if (range.format.storage_bits == 16) {
    DivideIntegers<kIsReal, T, uint16_t>(range, part, counts);
  } else {
    DivideIntegers<kIsReal, T, uint8_t>(range, part, counts);
  }
}

template <typename T>
void QuantizePart(const QuantizeRange& range, const RangePart& part,
                  QuantizeCounts* counts) {
  const FormatInfo& format = range.format;
  switch (format.kind) {
    case CodeKind::kInteger:
      if (range.encoding.zero_points_are_real) {
        DivideIntegersOfFormat<true, T>(range, part, counts);
      } else {
        DivideIntegersOfFormat<false, T>(range, part, counts);
      }
      return;
    case CodeKind::kFloat:
      DivideToGrid<T>(
          range, FloatGrid(format.float_layout, range.encoding.no_saturation),
          part, counts);
      return;
    case CodeKind::kCodebook:
      DivideToGrid<T>(range, CodebookGrid(CodebookOf(range.encoding)), part,
                      counts);
      return;
  }
}

void DivideSimd(const QuantizeRange& range, const RangePart& part,
                QuantizeCounts* counts) {
  if (range.type == ElementType::kFloat64) {
    QuantizePart<double>(range, part, counts);
  } else {
    QuantizePart<float>(range, part, counts);
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

HWY_EXPORT(DivideSimd);

}  // namespace

void QuantizeByDivision(const QuantizeRange& range, const RangePart& part,
                        QuantizeCounts* counts) {
  HWY_DYNAMIC_DISPATCH(DivideSimd)(range, part, counts);
}

}  // namespace quantd::core
#endif  // HWY_ONCE
