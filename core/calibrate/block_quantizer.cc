#include "core/calibrate/block_quantizer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/range_finder.h"
#include "core/calibrate/scale_indices.h"
#include "core/calibrate/search_time.h"
#include "core/formats/number_format.h"
#include "core/parallel/stop_token.h"
#include "core/simd_internal.h"
#include "core/statistics/statistics_kernel.h"
#include "core/types/float_convert.h"
#include "hwy/cache_control.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/calibrate/block_quantizer.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/formats/packing-inl.h"
#include "core/statistics/extremes-inl.h"
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_CALIBRATE_BLOCK_QUANTIZER_ONCE
#define QUANTD_CORE_CALIBRATE_BLOCK_QUANTIZER_ONCE
namespace quantd::core {
namespace {

// Adding 1.5 * 2^23 rounds a float of magnitude up to 2^22 to the nearest even
// integer, which the low bits of the sum then hold.
constexpr float kMagic = 12582912.0f;
constexpr int32_t kMagicBits = 0x4B400000;

// Scales between these have a reciprocal that is good for ExactQuotient: no
// step of it underflows or overflows.
constexpr float kLeastScale = 0x1p-90f;
constexpr float kMostScale = 0x1p90f;

// Elements that are done at a time, at most.
constexpr int64_t kMaxVectorElements = 16 * kMaxGroup;

// Groups of float32 to integers of at most 8 bits, over the range from the
// smallest to the largest element.
struct GroupRange {
  int64_t group;
  int64_t groups;
  const uint8_t* in;
  bool is_symmetric;
  // Symmetric: what the absolute maximum is divided by.
  double largest;
  int32_t qmin;
  int32_t qmax;
  bool is_signed;
  int storage_bits;
  // Part of more than a cache holds: what comes next is fetched ahead.
  bool is_far;
  // [groups * group] codes.
  uint8_t* out;
  // [groups].
  float* scale;
  // [groups], or null where symmetric.
  int32_t* zero_point;
};

struct GroupCounts {
  int64_t clipped_low = 0;
  int64_t clipped_high = 0;
  int64_t degenerate = 0;
};

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_CALIBRATE_BLOCK_QUANTIZER_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE

int64_t GroupLanes() { return 0; }

int64_t QuantizeGroups(const GroupRange& range, GroupCounts* counts) {
  return 0;
}

#else

// Numbers that the elements of a group are quantized with, in all lanes or in
// the lane of the group.
template <class D>
struct Divisor {
  HWY_INLINE Divisor() {}
  HWY_INLINE Divisor(hn::Vec<D> scale, hn::Vec<D> reciprocal, hn::Vec<D> rest)
      : scale(scale), reciprocal(reciprocal), rest(rest) {}

  hn::Vec<D> scale;
  // Their sum is 1 / scale to more than 40 bits.
  hn::Vec<D> reciprocal;
  hn::Vec<D> rest;
};

// x / scale, correctly rounded: with more of the reciprocal than a float holds
// the first quotient is within one unit in the last place, from where a step
// with the rounded reciprocal gives the rounded quotient (Markstein). Quotients
// below a quarter may come out different, but round to zero all the same.
template <class D>
HWY_INLINE hn::Vec<D> ExactQuotient(D d, hn::Vec<D> x, const Divisor<D>& by) {
#if HWY_NATIVE_FMA
  const auto near = hn::MulAdd(x, by.reciprocal, hn::Mul(x, by.rest));
  return hn::MulAdd(hn::NegMulAdd(near, by.scale, x), by.reciprocal, near);
#else
  return hn::Div(x, by.scale);
#endif
}

// rint(x / scale) + zero_point; `offset` is kMagicBits less the zero point.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> Code(
    D d, hn::Vec<D> x, const Divisor<D>& by,
    hn::Vec<hn::RebindToSigned<D>> offset) {
  const hn::RebindToSigned<D> di;
  const auto sum = hn::Add(ExactQuotient(d, x, by), hn::Set(d, kMagic));
  return hn::Sub(hn::BitCast(di, sum), offset);
}

// Calls `function(vector)` for the halves of `v`, and puts the results, halves
// of vectors of `out`, together.
template <class DOut, class D, class Function>
HWY_INLINE hn::Vec<DOut> ByHalves(DOut out, D d, hn::Vec<D> v,
                                  const Function& function) {
  const hn::Half<D> dh;
  return hn::Combine(out, function(hn::UpperHalf(dh, v)),
                     function(hn::LowerHalf(dh, v)));
}

// The scale of each lane's group: the formulas of calibrate.h, in the
// arithmetic that RangeScaler has.
template <class D>
HWY_INLINE hn::Vec<D> FindScales(D d, const GroupRange& range, hn::Vec<D> low,
                                 hn::Vec<D> high) {
  const hn::Half<D> dh;
  const hn::Rebind<double, decltype(dh)> dd;
  const auto least = hn::Set(d, std::numeric_limits<float>::min());
  if (range.is_symmetric) {
    const auto abs_max = hn::Max(hn::Abs(low), hn::Abs(high));
    const auto largest = hn::Set(dd, range.largest);
    return hn::Max(ByHalves(d, d, abs_max,
                            [&](hn::Vec<decltype(dh)> half) HWY_ATTR {
                              return hn::DemoteTo(
                                  dh,
                                  hn::Div(hn::PromoteTo(dd, half), largest));
                            }),
                   least);
  }
  const auto steps = hn::Set(dd, static_cast<double>(range.qmax - range.qmin));
  const auto scale = [&](hn::Vec<decltype(dh)> half_low,
                         hn::Vec<decltype(dh)> half_high) HWY_ATTR {
    return hn::DemoteTo(dh, hn::Div(hn::Sub(hn::PromoteTo(dd, half_high),
                                            hn::PromoteTo(dd, half_low)),
                                    steps));
  };
  return hn::Max(
      hn::Combine(d, scale(hn::UpperHalf(dh, low), hn::UpperHalf(dh, high)),
                  scale(hn::LowerHalf(dh, low), hn::LowerHalf(dh, high))),
      least);
}

// The zero point of each lane's group, whose range begins at `low`.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> FindZeroPoints(
    D d, const GroupRange& range, hn::Vec<D> low, hn::Vec<D> scale) {
  const hn::RebindToSigned<D> di;
  const hn::Half<D> dh;
  const hn::Half<decltype(di)> dih;
  const hn::Rebind<double, decltype(dh)> dd;
  const auto qmin = hn::Set(dd, static_cast<double>(range.qmin));
  const auto qmax = hn::Set(dd, static_cast<double>(range.qmax));
  const auto zero_point = [&](hn::Vec<decltype(dh)> half_low,
                              hn::Vec<decltype(dh)> half_scale) HWY_ATTR {
    const auto steps = hn::Round(
        hn::Div(hn::PromoteTo(dd, half_low), hn::PromoteTo(dd, half_scale)));
    return hn::DemoteTo(dih,
                        hn::Min(hn::Max(hn::Sub(qmin, steps), qmin), qmax));
  };
  return hn::Combine(
      di, zero_point(hn::UpperHalf(dh, low), hn::UpperHalf(dh, scale)),
      zero_point(hn::LowerHalf(dh, low), hn::LowerHalf(dh, scale)));
}

// Stores 4 * Lanes(d) codes of at most 8 bits.
template <bool kIsSigned, class DI, class V = hn::Vec<DI>>
HWY_INLINE void StoreFour(DI di, V v0, V v1, V v2, V v3,
                          uint8_t* HWY_RESTRICT out) {
#if HWY_TARGET == HWY_AVX3
  // Packs work within blocks of 16 bytes; the permutation puts those back in
  // order.
  const __m512i low = _mm512_packs_epi32(v0.raw, v1.raw);
  const __m512i high = _mm512_packs_epi32(v2.raw, v3.raw);
  const __m512i packed = kIsSigned ? _mm512_packs_epi16(low, high)
                                   : _mm512_packus_epi16(low, high);
  const __m512i order =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, packed));
#elif HWY_TARGET == HWY_AVX2
  // The same, with half as many blocks.
  const __m256i low = _mm256_packs_epi32(v0.raw, v1.raw);
  const __m256i high = _mm256_packs_epi32(v2.raw, v3.raw);
  const __m256i packed = kIsSigned ? _mm256_packs_epi16(low, high)
                                   : _mm256_packus_epi16(low, high);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_permutevar8x32_epi32(packed, order));
#else
  using Code = std::conditional_t<kIsSigned, int8_t, uint8_t>;
  const hn::Rebind<Code, DI> dc;
  const size_t stride = hn::Lanes(di);
  StoreBytes(hn::DemoteTo(dc, v0), dc, out);
  StoreBytes(hn::DemoteTo(dc, v1), dc, out + stride);
  StoreBytes(hn::DemoteTo(dc, v2), dc, out + 2 * stride);
  StoreBytes(hn::DemoteTo(dc, v3), dc, out + 3 * stride);
#endif
}

// The parameters of Lanes groups, one after the other.
struct GroupParameters {
  HWY_ALIGN float scale[16];
  HWY_ALIGN float reciprocal[16];
  HWY_ALIGN float rest[16];
  HWY_ALIGN int32_t offset[16];
};

// Codes of Lanes(d) groups, a byte each. `kIsClipped`: some lie outside.
template <bool kIsSigned, bool kIsClipped>
HWY_INLINE void QuantizeVectors(const GroupRange& range,
                                const uint8_t* HWY_RESTRICT in,
                                const GroupParameters& parameters,
                                uint8_t* HWY_RESTRICT codes,
                                GroupCounts* counts) {
  using D = hn::ScalableTag<float>;
  const D d;
  const hn::RebindToSigned<D> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto qmin = hn::Set(di, range.qmin);
  const auto qmax = hn::Set(di, range.qmax);
  const auto quantize = [&](int64_t group, const uint8_t* at) HWY_ATTR {
    const Divisor<D> by = {hn::Set(d, parameters.scale[group]),
                           hn::Set(d, parameters.reciprocal[group]),
                           hn::Set(d, parameters.rest[group])};
    auto code =
        Code(d, LoadBytes(d, at), by, hn::Set(di, parameters.offset[group]));
    if constexpr (kIsClipped) {
      counts->clipped_low += hn::CountTrue(di, hn::Lt(code, qmin));
      counts->clipped_high += hn::CountTrue(di, hn::Gt(code, qmax));
      code = hn::Min(hn::Max(code, qmin), qmax);
    }
    return code;
  };
  // Fetches data that comes kAheadBytes later: between groups the processor's
  // own prefetching rests.
  constexpr int64_t kAheadBytes = 4096;
  constexpr int64_t kLineBytes = 64;
  const auto fetch = [&]() HWY_ATTR {
    if (!range.is_far) return;
    for (int64_t k = 0; k < 4 * lanes * 4; k += kLineBytes) {
      hwy::Prefetch(in + kAheadBytes + k);
    }
  };
  const int64_t vectors = range.group / lanes;
  // Group of the next vector, and the vector's index in it.
  int64_t group = 0, vector = 0;
  const auto next = [&]() HWY_ATTR {
    const auto code = quantize(group, in);
    in += lanes * 4;
    if (++vector == vectors) {
      vector = 0;
      ++group;
    }
    return code;
  };
  const int64_t step = 4 * lanes;
  if (vectors == 1) {
    for (; group < lanes; group += 4, in += step * 4, codes += step) {
      fetch();
      StoreFour<kIsSigned>(di, quantize(group, in),
                           quantize(group + 1, in + step),
                           quantize(group + 2, in + 2 * step),
                           quantize(group + 3, in + 3 * step), codes);
    }
  } else if (vectors == 2) {
    for (; group < lanes; group += 2, in += step * 4, codes += step) {
      fetch();
      StoreFour<kIsSigned>(di, quantize(group, in), quantize(group, in + step),
                           quantize(group + 1, in + 2 * step),
                           quantize(group + 1, in + 3 * step), codes);
    }
  } else if (vectors % 4 == 0) {
    for (; group < lanes; ++group) {
      for (int64_t k = 0; k < vectors; k += 4, in += step * 4, codes += step) {
        fetch();
        StoreFour<kIsSigned>(di, quantize(group, in),
                             quantize(group, in + step),
                             quantize(group, in + 2 * step),
                             quantize(group, in + 3 * step), codes);
      }
    }
  } else {
    // All groups together have as many vectors as one group has elements: a
    // multiple of four.
    while (group < lanes) {
      const auto v0 = next();
      const auto v1 = next();
      const auto v2 = next();
      StoreFour<kIsSigned>(di, v0, v1, v2, next(), codes);
      codes += step;
    }
  }
}

// Groups that are done at a time.
int64_t GroupLanes() {
  return static_cast<int64_t>(hn::Lanes(hn::ScalableTag<float>()));
}

// Returns how many groups it did: a multiple of GroupLanes(), up to where that
// many are left, or some are not finite or have a scale that is not usual.
template <bool kIsSigned>
int64_t QuantizeSignedGroups(const GroupRange& range, GroupCounts* counts) {
  using D = hn::ScalableTag<float>;
  const D d;
  const hn::RebindToSigned<D> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const bool is_packed = range.storage_bits < 8;
  const int64_t step = lanes * range.group;
  HWY_ALIGN uint8_t codes[kMaxVectorElements + 64];
  GroupParameters parameters;
  const auto qmin = hn::Set(di, range.qmin);
  const auto qmax = hn::Set(di, range.qmax);
  const auto zero_code = hn::Min(hn::Max(hn::Zero(di), qmin), qmax);
  int64_t group = 0;
  for (; group + lanes <= range.groups; group += lanes) {
    const uint8_t* in = range.in + group * range.group * 4;
    Tally<D> tally;
    const auto found =
        ReduceGroups<ElementType::kFloat32>(d, in, range.group, tally);
    if (HWY_UNLIKELY(!tally.AllFinite(d))) break;
    const auto low = hn::Min(found.min, hn::Zero(d));
    const auto high = hn::Max(found.max, hn::Zero(d));
    const auto is_zero =
        hn::And(hn::Eq(low, hn::Zero(d)), hn::Eq(high, hn::Zero(d)));
    const auto one = hn::Set(d, 1.0f);
    const auto scale =
        hn::IfThenElse(is_zero, one, FindScales(d, range, low, high));
    if (HWY_UNLIKELY(
            !hn::AllTrue(d, hn::And(hn::Ge(scale, hn::Set(d, kLeastScale)),
                                    hn::Le(scale, hn::Set(d, kMostScale)))))) {
      break;
    }
    auto zero_point = hn::Zero(di);
    if (!range.is_symmetric) {
      zero_point = hn::IfThenElse(hn::RebindMask(di, is_zero), zero_code,
                                  FindZeroPoints(d, range, low, scale));
      hn::StoreU(zero_point, di, range.zero_point + group);
    }
    hn::StoreU(scale, d, range.scale + group);
    counts->degenerate += hn::CountTrue(d, is_zero);

    Divisor<D> by;
    by.scale = scale;
    by.reciprocal = hn::Div(one, scale);
    by.rest = hn::Mul(hn::NegMulAdd(by.reciprocal, scale, one), by.reciprocal);
    const auto offset = hn::Sub(hn::Set(di, kMagicBits), zero_point);
    hn::Store(by.scale, d, parameters.scale);
    hn::Store(by.reciprocal, d, parameters.reciprocal);
    hn::Store(by.rest, d, parameters.rest);
    hn::Store(offset, di, parameters.offset);
    // Codes are in the order of the elements.
    const bool is_clipped =
        !hn::AllFalse(di, hn::Or(hn::Lt(Code(d, found.min, by, offset), qmin),
                                 hn::Gt(Code(d, found.max, by, offset), qmax)));
    uint8_t* out = range.out + group * range.group * range.storage_bits / 8;
    uint8_t* to = is_packed ? codes : out;
    if (HWY_UNLIKELY(is_clipped)) {
      QuantizeVectors<kIsSigned, true>(range, in, parameters, to, counts);
    } else {
      QuantizeVectors<kIsSigned, false>(range, in, parameters, to, counts);
    }
    if (is_packed) PackCodes(range.storage_bits, codes, step, out);
  }
  return group;
}

int64_t QuantizeGroups(const GroupRange& range, GroupCounts* counts) {
  return range.is_signed ? QuantizeSignedGroups<true>(range, counts)
                         : QuantizeSignedGroups<false>(range, counts);
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quantd::core {
namespace {

HWY_EXPORT(GroupLanes);
HWY_EXPORT(QuantizeGroups);

// Elements of tensors that no cache near the processor holds.
constexpr int64_t kFarElements = 128 * 1024;
// Elements of a task, about; and of a part of one that fits the L1 cache.
constexpr int64_t kTaskElements = 64 * 1024;
constexpr int64_t kLeastTaskElements = 16 * 1024;
constexpr int64_t kTileElements = 8 * 1024;

// The smallest multiple of `unit` that is at least `count`.
int64_t RoundUp(int64_t count, int64_t unit) {
  return (count + unit - 1) / unit * unit;
}

// True if the tensor has as many scales as its rows have blocks: then no block
// has elements of two rows.
bool HasRowBlocks(const BlockLayout& layout) {
  const int64_t rows = layout.element_count() / layout.row_size();
  const int64_t row_blocks =
      (layout.row_size() + layout.row_block() - 1) / layout.row_block();
  return layout.scale_count() == rows * row_blocks;
}

// Whole blocks and whole bytes of codes.
int64_t Granule(const BlockLayout& layout, const FormatInfo& format) {
  return std::lcm(layout.band_size(), format.codes_per_byte());
}

// Searches run on the worker that feeds the elements, which others wait for:
// none of long blocks may take long, nor may all of a granule.
// Requires: elements.
bool IsSearchedAtOnce(const EncodingSpec& spec, const BlockLayout& layout) {
  constexpr absl::Duration kMostOfBlock = absl::Milliseconds(5);
  constexpr absl::Duration kMostOfGranule = absl::Milliseconds(20);
  if (!IsSearchedDirectly(spec, layout)) return false;
  const int64_t block = layout.largest_block();
  if (block <= kFewDirectElements) return true;
  const int64_t granule = std::min(Granule(layout, *FindFormat(spec.format)),
                                   layout.element_count());
  const int64_t blocks = layout.ScaleBounds(0, granule).end;
  return SearchTime(spec, 1, block, /*at_hand=*/true) <= kMostOfBlock &&
         SearchTime(spec, blocks, granule, /*at_hand=*/true) <= kMostOfGranule;
}

}  // namespace

bool BlockQuantizer::Takes(const EncodingSpec& spec, const BlockLayout& layout,
                           bool has_outer_maximum) {
  return spec.method != CalibrationMethod::kMovingAverage &&
         !spec.unsigned_if_non_negative && layout.element_count() > 0 &&
         (!NeedsHistograms(spec) || IsSearchedAtOnce(spec, layout)) &&
         (has_outer_maximum || !HasOuterScales(EffectiveScaleType(spec)));
}

absl::StatusOr<std::unique_ptr<BlockQuantizer>> BlockQuantizer::Create(
    const EncodingSpec& spec, const BlockLayout& layout, ElementType type,
    NanPolicy nan_policy, std::vector<float> outer_maximum,
    const Importance* importance) {
  if (importance != nullptr) {
    absl::Status status = CheckTakesImportance(spec, layout);
    if (!status.ok()) return status;
  }
  const Encoding encoding = EncodingWithoutScales(spec, layout, false);
  absl::StatusOr<BlockLayout> outer_layout = BlockLayout::Create({}, {});
  if (HasOuterScales(encoding.scale_type)) {
    outer_layout = OuterLayout(encoding, layout.scale_shape());
  }
  if (!outer_layout.ok()) return outer_layout.status();
  std::unique_ptr<BlockQuantizer> quantizer(
      new BlockQuantizer(spec, layout, *std::move(outer_layout), type,
                         nan_policy, std::move(outer_maximum), importance));
  if (HasOuterScales(encoding.scale_type)) {
    absl::StatusOr<std::vector<float>> outer_scale =
        OuterScales(quantizer->scaler_, quantizer->outer_layout_,
                    quantizer->outer_maximum_);
    if (!outer_scale.ok()) return outer_scale.status();
    quantizer->encoding_.outer_scale = *std::move(outer_scale);
  }
  return quantizer;
}

BlockQuantizer::BlockQuantizer(const EncodingSpec& spec,
                               const BlockLayout& layout,
                               BlockLayout outer_layout, ElementType type,
                               NanPolicy nan_policy,
                               std::vector<float> outer_maximum,
                               const Importance* importance)
    : whole_layout_(layout),
      outer_layout_(std::move(outer_layout)),
      outer_maximum_(std::move(outer_maximum)),
      importance_(importance),
      type_(type),
      nan_policy_(nan_policy),
      layout_(layout),
      encoding_(EncodingWithoutScales(spec, layout, /*is_unsigned=*/false)),
      format_(*FindFormat(encoding_.format)),
      scaler_(spec, encoding_),
      finder_(spec, encoding_, scaler_, layout, /*statistics=*/nullptr,
              /*moving_average=*/{}, /*held=*/nullptr, importance),
      is_min_max_(spec.method == CalibrationMethod::kDefault ||
                  spec.method == CalibrationMethod::kMinMax),
      is_searched_(NeedsHistograms(spec)),
      finds_e4m3_(is_min_max_ && scaler_.has_e4m3_scales() &&
                  !spec.exclude_zero),
      has_row_blocks_(HasRowBlocks(layout)) {
  const bool has_one_row = layout.row_size() == layout.element_count();
  granule_ = Granule(layout, format_);
  is_grouped_ =
      is_min_max_ && has_one_row && type == ElementType::kFloat32 &&
      format_.kind == CodeKind::kInteger && format_.storage_bits <= 8 &&
      encoding_.scale_type == ScaleType::kFloat32 && !spec.power_of_two_scale &&
      spec.symmetry != Symmetry::kAimet && !encoding_.exclude_zero &&
      !encoding_.zero_points_are_real && layout.row_block() <= kMaxGroup;
}

void BlockQuantizer::Outcome::Merge(Outcome other) {
  counts.Merge(other.counts);
  degenerate_count += other.degenerate_count;
  if (!other.scale_error.ok() &&
      (scale_error.ok() || other.failed_scale < failed_scale)) {
    failed_scale = other.failed_scale;
    scale_error = std::move(other.scale_error);
  }
  if (!other.refusal.ok() &&
      (refusal.ok() || other.refused_first < refused_first)) {
    refused_first = other.refused_first;
    refusal = std::move(other.refusal);
  }
}

absl::Status BlockQuantizer::Add(int64_t first, int64_t count,
                                 const uint8_t* in, uint8_t* out,
                                 ThreadPool* pool, StopToken stop) {
  if (count == 0) return absl::OkStatus();
  stop_ = stop;
  const BlockLayout::ScaleRange scales =
      whole_layout_.ScaleBounds(first, count);
  layout_ = whole_layout_.Window(scales.first);
  const auto scale_count = static_cast<size_t>(scales.end - scales.first);
  encoding_.scale.resize(scale_count);
  if (has_zero_points()) ResizeZeroPoints(scale_count, &encoding_);
  if (HasScaleCodes(encoding_.scale_type)) {
    encoding_.scale_code.resize(scale_count);
  }
  if (has_row_blocks_) {
    const int64_t task_elements =
        RoundUp(std::clamp(count / (2 * LaneCount(pool)), kLeastTaskElements,
                           kTaskElements),
                granule_);
    const int64_t tasks = (count + task_elements - 1) / task_elements;
    std::vector<Outcome> outcomes(static_cast<size_t>(tasks));
    const auto run_task = [&](int64_t task) {
      const int64_t begin = task * task_elements;
      AddTask(first + begin, std::min(task_elements, count - begin),
              in + begin * ElementSizeBytes(type_),
              out == nullptr ? nullptr : out + format_.SizeBytes(begin),
              &outcomes[static_cast<size_t>(task)]);
    };
    ParallelFor(pool, tasks, run_task);
    for (Outcome& outcome : outcomes) outcome_.Merge(std::move(outcome));
  } else {
    AddBands(first, count, in, out, pool, &outcome_);
  }
  // Some scales may not have been found.
  if (stop_.stopped()) return StoppedError();
  return outcome_.scale_error.ok() ? outcome_.refusal : outcome_.scale_error;
}

void BlockQuantizer::AddTask(int64_t first, int64_t count, const uint8_t* in,
                             uint8_t* out, Outcome* outcome) {
  if (stop_.stopped()) return;
  const int64_t end = first + count;
  const int64_t element_bytes = ElementSizeBytes(type_);
  const auto in_at = [&](int64_t i) {
    return in + (i - first) * element_bytes;
  };
  const auto out_at = [&](int64_t i) {
    return out == nullptr ? nullptr : out + format_.SizeBytes(i - first);
  };
  const int64_t block = layout_.row_block();
  const int64_t lanes = HWY_DYNAMIC_DISPATCH(GroupLanes)();
  const bool is_grouped = is_grouped_ && out != nullptr &&
                          !internal::UsesScalarKernels() && lanes > 0 &&
                          block % lanes == 0;
  int64_t i = first;
  while (is_grouped && end - i >= lanes * block) {
    const int64_t group = i / block - first_scale();
    const GroupRange range{
        block,
        (end - i) / block,
        in_at(i),
        scaler_.is_symmetric(),
        scaler_.largest(),
        encoding_.qmin,
        encoding_.qmax,
        format_.is_signed,
        format_.storage_bits,
        layout_.element_count() > kFarElements,
        out_at(i),
        encoding_.scale.data() + group,
        scaler_.is_symmetric() ? nullptr : encoding_.zero_point.data() + group};
    GroupCounts counts;
    const int64_t done = HWY_DYNAMIC_DISPATCH(QuantizeGroups)(range, &counts);
    outcome->counts.total += done * block;
    outcome->counts.clipped_low += counts.clipped_low;
    outcome->counts.clipped_high += counts.clipped_high;
    outcome->degenerate_count += counts.degenerate;
    i += done * block;
    // Handles the group that stopped the kernel.
    if (end - i < lanes * block) break;
    AddTile(i, lanes * block, in_at(i), out_at(i), outcome);
    i += lanes * block;
  }
  const int64_t tile = RoundUp(kTileElements, granule_);
  for (; i < end && !stop_.stopped(); i += tile) {
    AddTile(i, std::min(tile, end - i), in_at(i), out_at(i), outcome);
  }
}

void BlockQuantizer::SetScale(int64_t index, const BlockScale& scale) {
  encoding_.scale[index] = scale.scale;
  SetZeroPoint(index, scale, &encoding_);
  if (HasScaleCodes(encoding_.scale_type)) {
    encoding_.scale_code[index] = scale.code;
  }
}

void BlockQuantizer::Collect(const PartialStatistics& partial, int64_t first,
                             absl::Span<Block> blocks) const {
  for (const PartialStatistics::Single& single : partial.singles) {
    blocks[single.scale_index - first].extremes.Merge(single.extremes);
  }
  for (const PartialStatistics::Segment& segment : partial.segments) {
    for (size_t k = 0; k < segment.extremes.size(); ++k) {
      blocks[segment.scale_index - first + k].extremes.Merge(
          segment.extremes[k]);
    }
  }
  for (const int64_t i : partial.non_finite) {
    blocks[i - first].has_non_finite = true;
  }
}

void BlockQuantizer::AddTile(int64_t first, int64_t count, const uint8_t* in,
                             uint8_t* out, Outcome* outcome) {
  PartialStatistics partial;
  ComputeStatistics({layout_, type_, first, count, in}, &partial);
  // The blocks of the tile follow each other.
  const BlockLayout::ScaleRange scales = layout_.ScaleBounds(first, count);
  const int64_t begin = scales.first - first_scale();
  std::vector<Block> blocks(static_cast<size_t>(scales.end - scales.first));
  Collect(partial, begin, absl::MakeSpan(blocks));
  BlockElements elements;
  std::vector<double> weights;
  const auto find_scales = [&](const BlockLayout::Run& run) {
    // Either one block or elements that are blocks by themselves.
    const int64_t run_blocks = run.scale_step == 0 ? 1 : run.count;
    const int64_t block_count = run.count / run_blocks;
    const uint8_t* block_in =
        in + (run.begin - first) * ElementSizeBytes(type_);
    for (int64_t k = 0; k < run_blocks; ++k) {
      if (is_searched_ && stop_.stopped()) return;
      const int64_t i = run.scale_index + k;
      if (is_searched_) {
        if (importance_ != nullptr) {
          weights.resize(static_cast<size_t>(block_count));
          importance_->Copy(run.begin + k * block_count, block_count,
                            weights.data());
        }
        elements.Assign(type_, block_in, block_count,
                        importance_ == nullptr ? nullptr : weights.data());
      }
      FindScale(i, blocks[i - begin], &elements, outcome);
      block_in += block_count * ElementSizeBytes(type_);
    }
  };
  if (finds_e4m3_) {
    FindE4m3Scales(begin, blocks, outcome);
  } else if (is_min_max_ && outer_maximum_.empty()) {
    FindMinMaxScales(begin, blocks, outcome);
  } else {
    layout_.ForEachRun(first, count, find_scales);
  }
  if (out == nullptr || stop_.stopped()) return;
  Outcome quantized;
  quantized.refusal =
      core::Quantize(encoding_, layout_, type_, nan_policy_, first, count, in,
                     out, &quantized.counts, nullptr);
  quantized.refused_first = first;
  outcome->Merge(std::move(quantized));
}

void BlockQuantizer::AddBands(int64_t first, int64_t count, const uint8_t* in,
                              uint8_t* out, ThreadPool* pool,
                              Outcome* outcome) {
  const int64_t element_bytes = ElementSizeBytes(type_);
  const int64_t parts = (count + kTaskElements - 1) / kTaskElements;
  std::vector<PartialStatistics> partials(static_cast<size_t>(parts));
  ParallelFor(pool, parts, [&](int64_t part) {
    if (stop_.stopped()) return;
    const int64_t begin = part * kTaskElements;
    ComputeStatistics(
        {layout_, type_, first + begin, std::min(kTaskElements, count - begin),
         in + begin * element_bytes},
        &partials[static_cast<size_t>(part)]);
  });
  if (stop_.stopped()) return;
  std::vector<Block> blocks(encoding_.scale.size());
  for (const PartialStatistics& partial : partials) {
    Collect(partial, 0, absl::MakeSpan(blocks));
  }

  // Fewer where they are long, for all threads to have some.
  constexpr int64_t kElementsAtOnce = int64_t{1} << 18;
  constexpr int64_t kMostBlocksAtOnce = 64;
  const int64_t blocks_at_once = std::clamp<int64_t>(
      kElementsAtOnce / whole_layout_.largest_block(), 1, kMostBlocksAtOnce);
  const auto block_count = static_cast<int64_t>(blocks.size());
  const int64_t tasks = (block_count + blocks_at_once - 1) / blocks_at_once;
  std::vector<Outcome> outcomes(static_cast<size_t>(tasks));
  ParallelFor(pool, tasks, [&](int64_t task) {
    BlockElements elements;
    std::vector<uint8_t> gathered;
    std::vector<double> weights;
    if (is_searched_) {
      gathered.reserve(
          static_cast<size_t>(whole_layout_.largest_block() * element_bytes));
    }
    const int64_t end = std::min(block_count, (task + 1) * blocks_at_once);
    for (int64_t i = task * blocks_at_once; i < end; ++i) {
      if (stop_.stopped()) return;
      if (is_searched_) {
        BlockLayout::BlockCursor cursor(whole_layout_, first_scale() + i);
        gathered.clear();
        int64_t begin = 0, size = 0;
        while (cursor.Next(&begin, &size)) {
          const uint8_t* from = in + (begin - first) * element_bytes;
          gathered.insert(gathered.end(), from, from + size * element_bytes);
        }
        if (importance_ != nullptr) {
          weights.resize(static_cast<size_t>(whole_layout_.largest_block()));
          importance_->CopyBlock(whole_layout_, first_scale() + i,
                                 weights.data());
        }
        elements.Assign(type_, gathered.data(), cursor.count(),
                        importance_ == nullptr ? nullptr : weights.data());
      }
      FindScale(i, blocks[i], &elements, &outcomes[static_cast<size_t>(task)]);
    }
  });
  for (Outcome& found : outcomes) outcome->Merge(std::move(found));
  if (out == nullptr || stop_.stopped()) return;
  Outcome quantized;
  quantized.refusal =
      core::Quantize(encoding_, layout_, type_, nan_policy_, first, count, in,
                     out, &quantized.counts, pool);
  quantized.refused_first = first;
  outcome->Merge(std::move(quantized));
}

void BlockQuantizer::FindScale(int64_t index, const Block& block,
                               BlockElements* elements, Outcome* outcome) {
  SetScaleOr(index, ScaleOf(index, block, elements, outcome), outcome);
}

void BlockQuantizer::SetScaleOr(int64_t index,
                                const absl::StatusOr<BlockScale>& scale,
                                Outcome* outcome) {
  if (scale.ok()) return SetScale(index, *scale);
  // Something that can be computed with, for codes that nobody sees.
  SetScale(index, {1, 0, 0});
  Outcome failed;
  failed.failed_scale = first_scale() + index;
  failed.scale_error = scale.status();
  outcome->Merge(std::move(failed));
}

void BlockQuantizer::FindE4m3Scales(int64_t index,
                                    absl::Span<const Block> blocks,
                                    Outcome* outcome) {
  const bool has_one_outer = outer_maximum_.size() == 1;
  for (const Block& block : blocks) {
    const int64_t outer =
        has_one_outer
            ? 0
            : outer_layout_.ScaleBounds(first_scale() + index, 1).first;
    const double magnitude = std::max(-block.extremes.min, block.extremes.max);
    if (magnitude > 0 && magnitude <= outer_maximum_[outer]) {
      const BlockScale scale =
          scaler_.E4m3Scale(magnitude, encoding_.outer_scale[outer]);
      encoding_.scale[index] = scale.scale;
      encoding_.scale_code[index] = scale.code;
    } else {
      // Nothing but zeros, nothing at all, or too much.
      FindScale(index, block, nullptr, outcome);
    }
    ++index;
  }
}

void BlockQuantizer::FindMinMaxScales(int64_t index,
                                      absl::Span<const Block> blocks,
                                      Outcome* outcome) {
  // In float64 more is needed: it may be beyond float32.
  const bool floors =
      scaler_.floors_powers_of_two() && type_ != ElementType::kFloat64;
  for (const Block& block : blocks) {
    const Extremes& extremes = block.extremes;
    const bool has_range = !block.has_non_finite && !extremes.empty() &&
                           (extremes.min != 0 || extremes.max != 0);
    if (!has_range) {
      FindScale(index, block, nullptr, outcome);
    } else if (floors) {
      SetScale(index, scaler_.FlooredPowerOfTwo(static_cast<float>(
                          std::max(-extremes.min, extremes.max))));
    } else {
      SetScaleOr(index,
                 scaler_.Scale(first_scale() + index,
                               scaler_.Extend({extremes.min, extremes.max}), 0),
                 outcome);
    }
    ++index;
  }
}

absl::StatusOr<BlockScale> BlockQuantizer::ScaleOf(int64_t index,
                                                   const Block& block,
                                                   BlockElements* elements,
                                                   Outcome* outcome) const {
  if (encoding_.scale_type == ScaleType::kE8m0 && block.has_non_finite) {
    return scaler_.NanScale();
  }
  const Extremes& extremes = block.extremes;
  const int64_t scale_index = first_scale() + index;
  float outer = 0;
  bool outer_is_zero = true;
  if (!outer_maximum_.empty()) {
    const int64_t outer_index = outer_layout_.ScaleBounds(scale_index, 1).first;
    const float maximum = outer_maximum_[outer_index];
    absl::Status status = CheckOuterMaximum(scale_index, extremes, maximum);
    if (!status.ok()) return status;
    outer = encoding_.outer_scale[outer_index];
    outer_is_zero = maximum == 0;
  }
  const absl::StatusOr<absl::optional<Range>> range =
      finder_.FindAmong(scale_index, outer, extremes, elements, stop_);
  if (!range.ok()) return range.status();
  if (!range->has_value()) {
    ++outcome->degenerate_count;
    return scaler_.DegenerateScale(outer, outer_is_zero);
  }
  return scaler_.Scale(scale_index, **range, outer);
}

}  // namespace quantd::core
#endif  // HWY_ONCE
