#include "core/dequantize/dequantize.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "absl/types/span.h"
#include "core/dequantize/dequantize_kernel.h"
#include "core/formats/codec.h"
#include "core/formats/number_format.h"
#include "core/simd_internal.h"
#include "core/types/float_convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/dequantize/dequantize.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/formats/packing-inl.h"
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_DEQUANTIZE_DEQUANTIZE_ONCE
#define QUANTD_CORE_DEQUANTIZE_DEQUANTIZE_ONCE
namespace quantd::core {
namespace {

// Elements that go through the L1 buffers at a time.
constexpr int64_t kBlockElements = 2048;
// Elements of a task; a multiple of kBlockElements.
constexpr int64_t kTaskElements = 64 * 1024;
// The sizes of groups that share a call with their neighbours.
constexpr int64_t kSmallestGroup = 16;
constexpr int64_t kLargestGroup = 256;

// Outputs are fetched so far ahead, in tensors that the L2 does not hold.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kPrefetchFromBytes = 2 << 20;

constexpr int kTableEntries = 256;

// Returns the values that the codes of a float format or a codebook stand for
// [kTableEntries]; `entries` may hold them.
const float* ValuesOf(const Encoding& encoding, const FormatInfo& format,
                      float* entries) {
  if (format.kind == CodeKind::kFloat) return FloatValues(format);
  const absl::Span<const float> codebook = CodebookOf(encoding);
  std::fill(std::copy(codebook.begin(), codebook.end(), entries),
            entries + kTableEntries, std::numeric_limits<float>::quiet_NaN());
  return entries;
}

// Fills in the values that the codes of an integer format of at most 4 bits
// stand for [16].
void FillIntegers(const FormatInfo& format, float* entries) {
  const int sign = format.is_signed ? 1 << (format.bits - 1) : 0;
  const int mask = (1 << format.bits) - 1;
  for (int code = 0; code < 16; ++code) {
    entries[code] = static_cast<float>(((code & mask) ^ sign) - sign);
  }
}

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_DEQUANTIZE_DEQUANTIZE_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void DequantizeSimd(const DequantizeRange& range) { DequantizeScalar(range); }

#else

// --- What codes stand for ---------------------------------------------------
// Value(d, in): the values of Lanes(d) codes, as float32.

template <typename Code>
struct IntegerValues {
  static constexpr int kCodeBytes = sizeof(Code);

  template <class D>
  HWY_INLINE hn::Vec<D> Value(D d, const uint8_t* HWY_RESTRICT in) const {
    const hn::RebindToSigned<D> di;
    const hn::Rebind<Code, D> dc;
    return hn::ConvertTo(d, hn::PromoteTo(di, LoadBytes(dc, in)));
  }
};

// Codes that are decoded already.
struct DecodedValues {
  static constexpr int kCodeBytes = sizeof(float);

  template <class D>
  HWY_INLINE hn::Vec<D> Value(D d, const uint8_t* HWY_RESTRICT in) const {
    return LoadBytes(d, in);
  }
};

// Codes that index a table of 16 values.
struct SmallTable {
  static constexpr int kCodeBytes = 1;

  template <class D>
  HWY_INLINE hn::Vec<D> Value(D d, const uint8_t* HWY_RESTRICT in) const {
    const hn::RebindToSigned<D> di;
    const hn::Rebind<uint8_t, D> du8;
    const auto code = hn::PromoteTo(di, LoadBytes(du8, in));
    if constexpr (hn::MaxLanes(D()) >= 16) {
      return hn::TableLookupLanes(hn::LoadU(d, values),
                                  hn::IndicesFromVec(d, code));
    } else if constexpr (hn::MaxLanes(D()) == 8) {
      const auto index = hn::IndicesFromVec(d, hn::And(code, hn::Set(di, 7)));
      return hn::IfThenElse(
          hn::RebindMask(d, hn::Gt(code, hn::Set(di, 7))),
          hn::TableLookupLanes(hn::LoadU(d, values + 8), index),
          hn::TableLookupLanes(hn::LoadU(d, values), index));
    } else {
      return hn::GatherIndex(d, values, code);
    }
  }

  const float* HWY_RESTRICT values;
};

// Codes that index a table of 256 values.
struct LargeTable {
  static constexpr int kCodeBytes = 1;

  template <class D>
  HWY_INLINE hn::Vec<D> Value(D d, const uint8_t* HWY_RESTRICT in) const {
    const hn::RebindToSigned<D> di;
    const hn::Rebind<uint8_t, D> du8;
    return hn::GatherIndex(d, values, hn::PromoteTo(di, LoadBytes(du8, in)));
  }

  const float* HWY_RESTRICT values;
};

#if QUANTD_HAS_F16
// Small floats by way of float16, which has as many exponent bits or more: with
// the fields at their places there the value is 2^(bias - 15) times too large,
// exactly, subnormals included. Codes of infinity and NaN are the caller's.
struct HalfValues {
  static constexpr int kCodeBytes = 1;

  static bool Supports(const FloatLayout& layout) {
    // The largest exponent is infinity and NaN in float16.
    return layout.exponent_bits < 5 || layout.specials == FloatSpecials::kIeee;
  }

  explicit HalfValues(const FloatLayout& layout)
      : left(15 - layout.exponent_bits - layout.mantissa_bits),
        right(5 - layout.exponent_bits),
        mask(static_cast<int16_t>(0x8000 | (0x7FFF >> right))),
        factor(std::ldexp(1.0f, 15 - layout.bias)) {
    const int rest_bits = layout.exponent_bits + layout.mantissa_bits;
    switch (layout.specials) {
      case FloatSpecials::kNan:
        special_mask = special = (1 << rest_bits) - 1;
        break;
      case FloatSpecials::kIeee:
        special_mask = special = (1 << rest_bits) - (1 << layout.mantissa_bits);
        break;
      case FloatSpecials::kFnuz:
        special_mask = 0xFF;
        special = 1 << rest_bits;
        break;
      case FloatSpecials::kNone:
        // No code has it.
        special_mask = 0;
        special = 1;
        break;
    }
  }

  template <class D>
  HWY_INLINE hn::Vec<D> Value(D d, const uint8_t* HWY_RESTRICT in) const {
    const hn::Rebind<uint8_t, D> du8;
    const hn::Rebind<uint16_t, D> du16;
    const hn::Rebind<int16_t, D> di16;
    const hn::Rebind<hwy::float16_t, D> df16;
    const auto code = hn::PromoteTo(du16, LoadBytes(du8, in));
    const auto high = hn::BitCast(di16, hn::ShiftLeftSame(code, left));
    const auto half =
        hn::And(hn::ShiftRightSame(high, right), hn::Set(di16, mask));
    return hn::Mul(hn::PromoteTo(d, hn::BitCast(df16, half)),
                   hn::Set(d, factor));
  }

  // True if one of the codes is infinity or NaN.
  bool HasSpecial(const uint8_t* in, int64_t count) const {
    const hn::ScalableTag<uint8_t> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    const auto mask_v = hn::Set(d, special_mask);
    const auto special_v = hn::Set(d, special);
    int64_t i = 0;
    auto found = hn::Ne(special_v, special_v);
    for (; i + lanes <= count; i += lanes) {
      found = hn::Or(found,
                     hn::Eq(hn::And(hn::LoadU(d, in + i), mask_v), special_v));
    }
    bool rest = false;
    for (; i < count; ++i) rest |= (in[i] & special_mask) == special;
    return rest || !hn::AllFalse(d, found);
  }

  int left;
  int right;
  int16_t mask;
  float factor;
  uint8_t special_mask;
  uint8_t special;
};
#endif

// --- What scales them -------------------------------------------------------
// Get(d, i): scales and zero points, as float32, of Lanes(d) elements from the
// i-th on. The zero points are exact: those that are codes are below 2^24.

enum class ZeroPoints { kNone, kCodes, kReal };

template <ZeroPoints kKind>
using ZeroPointOf =
    std::conditional_t<kKind == ZeroPoints::kReal, float, int32_t>;

template <class D>
struct ScaleLanes {
  hn::Vec<D> scale;
  hn::Vec<D> zero_point;
};

// One for each 2^shift elements; all of them with a shift of 63.
template <ZeroPoints kZeroPoints>
struct GroupScales {
  static constexpr ZeroPoints kKind = kZeroPoints;

  template <class D>
  HWY_INLINE ScaleLanes<D> Get(D d, int64_t i) const {
    const int64_t group = i >> shift;
    return {hn::Set(d, scale[group]),
            kZeroPoints == ZeroPoints::kNone
                ? hn::Zero(d)
                : hn::Set(d, static_cast<float>(zero_point[group]))};
  }

  const float* HWY_RESTRICT scale;
  const ZeroPointOf<kZeroPoints>* HWY_RESTRICT zero_point;
  int shift;
};

template <ZeroPoints kZeroPoints>
struct ElementScales {
  static constexpr ZeroPoints kKind = kZeroPoints;

  template <class D>
  HWY_INLINE ScaleLanes<D> Get(D d, int64_t i) const {
    const hn::RebindToSigned<D> di;
    if constexpr (kZeroPoints == ZeroPoints::kReal) {
      return {hn::LoadU(d, scale + i), hn::LoadU(d, zero_point + i)};
    } else if constexpr (kZeroPoints == ZeroPoints::kCodes) {
      return {hn::LoadU(d, scale + i),
              hn::ConvertTo(d, hn::LoadU(di, zero_point + i))};
    } else {
      return {hn::LoadU(d, scale + i), hn::Zero(d)};
    }
  }

  const float* HWY_RESTRICT scale;
  const ZeroPointOf<kZeroPoints>* HWY_RESTRICT zero_point;
};

// --- Runs -------------------------------------------------------------------

// Destination of elements: `type` is double's, or one that float32 vectors are
// stored as.
struct Sink {
  ElementType type;
  int64_t size_bytes;
  // Bytes that are fetched ahead.
  int64_t ahead;
};

// Lanes(d) elements.
template <ZeroPoints kKind, class Values, class D>
HWY_INLINE void DequantizeVector(D d, const Values& values,
                                 const ScaleLanes<hn::Rebind<float, D>>& s,
                                 const uint8_t* HWY_RESTRICT in,
                                 ElementType type, uint8_t* HWY_RESTRICT out) {
  const hn::Rebind<float, D> df;
  constexpr bool kIsDouble = std::is_same_v<hn::TFromD<D>, double>;
  if constexpr (kIsDouble && kKind == ZeroPoints::kReal) {
    // In float32 the difference would be rounded.
    const auto exact = hn::Sub(hn::PromoteTo(d, values.Value(df, in)),
                               hn::PromoteTo(d, s.zero_point));
    StoreBytes(hn::Mul(exact, hn::PromoteTo(d, s.scale)), d, out);
    return;
  }
  // -0 less +0 is -0.
  const auto value = hn::Sub(values.Value(df, in), s.zero_point);
  if constexpr (kIsDouble) {
    StoreBytes(hn::Mul(hn::PromoteTo(d, value), hn::PromoteTo(d, s.scale)), d,
               out);
  } else if (type == ElementType::kFloat32) {
    StoreBytes(hn::Mul(value, s.scale), d, out);
  } else {
    StoreNarrow(type, d, hn::Mul(value, s.scale), out);
  }
}

// The i-th to the last element of a span, one by one.
template <typename T, class Values, class Scales>
HWY_NOINLINE void DequantizeRest(const Values& values, const Scales& scales,
                                 const uint8_t* HWY_RESTRICT in, int64_t i,
                                 int64_t count, const Sink& sink,
                                 uint8_t* HWY_RESTRICT out) {
  const hn::CappedTag<T, 1> d;
  const hn::Rebind<float, decltype(d)> df;
  for (; i < count; ++i) {
    DequantizeVector<Scales::kKind>(d, values, scales.Get(df, i),
                                    in + i * Values::kCodeBytes, sink.type,
                                    out + i * sink.size_bytes);
  }
}

template <typename T, class Values, class Scales>
void DequantizeSpan(const Values& values_in, const Scales& scales_in,
                    const uint8_t* HWY_RESTRICT in, int64_t count,
                    const Sink& sink_in, uint8_t* HWY_RESTRICT out) {
  constexpr int64_t kCodeBytes = Values::kCodeBytes;
  const hn::ScalableTag<T> d;
  const hn::Rebind<float, decltype(d)> df;
  constexpr int64_t kLanes = hn::MaxLanes(hn::ScalableTag<T>());
  // Copies: what they hold stays in registers whatever `out` points at.
  const Values values = values_in;
  const Scales scales = scales_in;
  const Sink sink = sink_in;
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    uint8_t* to = out + i * sink.size_bytes;
    for (int64_t at = 0; at < 4 * kLanes * sink.size_bytes; at += kLineBytes) {
      PrefetchWrite(to + at + sink.ahead);
    }
    for (int64_t k = 0; k < 4 * kLanes; k += kLanes) {
      DequantizeVector<Scales::kKind>(d, values, scales.Get(df, i + k),
                                      in + (i + k) * kCodeBytes, sink.type,
                                      to + k * sink.size_bytes);
    }
  }
  for (; i + kLanes <= count; i += kLanes) {
    DequantizeVector<Scales::kKind>(d, values, scales.Get(df, i),
                                    in + i * kCodeBytes, sink.type,
                                    out + i * sink.size_bytes);
  }
  if (i < count) {
    DequantizeRest<T>(values_in, scales_in, in, i, count, sink_in, out);
  }
}

// Without scales.
template <class Values>
HWY_NOINLINE void Decode(const Values& values_in,
                         const uint8_t* HWY_RESTRICT in, int64_t count,
                         float* HWY_RESTRICT out) {
  const hn::ScalableTag<float> d;
  constexpr int64_t kLanes = hn::MaxLanes(hn::ScalableTag<float>());
  const Values values = values_in;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    hn::StoreU(values.Value(d, in + i * Values::kCodeBytes), d, out + i);
  }
  const hn::CappedTag<float, 1> one;
  for (; i < count; ++i) {
    hn::StoreU(values.Value(one, in + i * Values::kCodeBytes), one, out + i);
  }
}

// `count` elements of a row; `row` is where they begin.
template <typename T, ZeroPoints kZeroPoints, class Values>
void DequantizeRow(const Encoding& encoding, const BlockLayout::Row& row,
                   const Values& values, const uint8_t* in, int64_t count,
                   const Sink& sink, uint8_t* out) {
  const float* scale = encoding.scale.data() + row.scale_index;
  const ZeroPointOf<kZeroPoints>* zero_point = nullptr;
  if constexpr (kZeroPoints == ZeroPoints::kReal) {
    zero_point = encoding.real_zero_point.data() + row.scale_index;
  } else if constexpr (kZeroPoints == ZeroPoints::kCodes) {
    zero_point = encoding.zero_point.data() + row.scale_index;
  }
  if (row.block == 1) {
    DequantizeSpan<T>(values, ElementScales<kZeroPoints>{scale, zero_point}, in,
                      count, sink, out);
    return;
  }
  const int shift = static_cast<int>(
      hwy::Num0BitsBelowLS1Bit_Nonzero64(static_cast<uint64_t>(row.block)));
  const bool is_group = row.block == int64_t{1} << shift &&
                        row.block >= kSmallestGroup &&
                        row.block <= kLargestGroup;
  int64_t offset = row.offset;
  for (int64_t done = 0; done < count;) {
    int64_t groups = 1;
    int64_t n = std::min(row.block - offset, count - done);
    GroupScales<kZeroPoints> scales{scale, zero_point, 63};
    if (is_group && offset == 0 && n == row.block) {
      groups = (count - done) >> shift;
      n = groups << shift;
      scales.shift = shift;
    }
    DequantizeSpan<T>(values, scales, in + done * Values::kCodeBytes, n, sink,
                      out + done * sink.size_bytes);
    done += n;
    offset = 0;
    scale += groups;
    if (kZeroPoints != ZeroPoints::kNone) zero_point += groups;
  }
}

// A range in blocks, with codes unpacked to a byte each. `fallback` takes the
// blocks that have codes that `values` cannot take. Doubles are rare, so that
// not each kind of values has loops for them: their codes are decoded first.
template <ZeroPoints kZeroPoints, class Values, class Fallback>
void DequantizeBlocks(const DequantizeRange& range, bool unpacks_sign,
                      const Values& values, const Fallback& fallback) {
  const bool is_packed = range.format.storage_bits < 8;
  const int64_t element_bytes = ElementSizeBytes(range.type);
  Sink sink{range.type, element_bytes, range.is_large ? kPrefetchBytes : 0};
  const bool is_double = range.type == ElementType::kFloat64;
  const bool narrows = !is_double && range.type != ElementType::kFloat32 &&
                       !CanStoreNarrow(range.type);
  if (narrows) sink = {ElementType::kFloat32, 4, 0};
  HWY_ALIGN float wide[kBlockElements];
  HWY_ALIGN uint8_t codes[kBlockElements + 3];
  HWY_ALIGN uint8_t scratch[kBlockElements + 3];

  BlockLayout::RowCursor cursor(range.layout, range.first, range.count);
  BlockLayout::Row row{};
  for (int64_t begin = 0; begin < range.count; begin += kBlockElements) {
    const int64_t count = std::min(range.count - begin, kBlockElements);
    const uint8_t* in = range.in + range.format.SizeBytes(begin);
    if (is_packed) {
      UnpackCodes(range.format.storage_bits, unpacks_sign, in, count, scratch,
                  codes);
      in = codes;
    }
    uint8_t* out = range.out + begin * element_bytes;
    uint8_t* block_out = narrows ? reinterpret_cast<uint8_t*>(wide) : out;
    bool falls_back = false;
#if QUANTD_HAS_F16
    if constexpr (std::is_same_v<Values, HalfValues>) {
      falls_back = values.HasSpecial(in, count);
    }
#endif
    if (is_double && falls_back) {
      Decode(fallback, in, count, wide);
    } else if (is_double) {
      Decode(values, in, count, wide);
    }
    for (int64_t i = 0; i < count;) {
      if (row.count == 0) cursor.Next(&row);
      const int64_t n = std::min(row.count, count - i);
      const uint8_t* from = in + i * Values::kCodeBytes;
      uint8_t* to = block_out + i * sink.size_bytes;
      if (is_double) {
        DequantizeRow<double, kZeroPoints>(
            range.encoding, row, DecodedValues(),
            reinterpret_cast<const uint8_t*>(wide + i), n, sink, to);
      } else if (HWY_UNLIKELY(falls_back)) {
        DequantizeRow<float, kZeroPoints>(range.encoding, row, fallback, from,
                                          n, sink, to);
      } else {
        DequantizeRow<float, kZeroPoints>(range.encoding, row, values, from, n,
                                          sink, to);
      }
      const int64_t past = row.offset + n;
      row.count -= n;
      row.scale_index += past / row.block;
      row.offset = past % row.block;
      i += n;
    }
    if (narrows) Narrow(range.type, wide, count, out);
  }
}

template <class Values>
void DequantizeIntegers(const DequantizeRange& range, const Values& values) {
  // Unpacked codes are negative where a table does not take them as they are.
  const bool unpacks_sign =
      range.format.is_signed && !std::is_same_v<Values, SmallTable>;
  if (range.encoding.zero_points_are_real) {
    DequantizeBlocks<ZeroPoints::kReal>(range, unpacks_sign, values, values);
  } else if (range.encoding.zero_point.empty()) {
    DequantizeBlocks<ZeroPoints::kNone>(range, unpacks_sign, values, values);
  } else {
    DequantizeBlocks<ZeroPoints::kCodes>(range, unpacks_sign, values, values);
  }
}

void DequantizeSimd(const DequantizeRange& range) {
  const FormatInfo& format = range.format;
  HWY_ALIGN float entries[kTableEntries];
  if (format.kind != CodeKind::kInteger) {
    const float* values = ValuesOf(range.encoding, format, entries);
    const LargeTable table{values};
    if (format.bits <= 4) {
      const SmallTable small_table{values};
      DequantizeBlocks<ZeroPoints::kNone>(range, false, small_table,
                                          small_table);
      return;
    }
#if QUANTD_HAS_F16
    if (format.kind == CodeKind::kFloat &&
        HalfValues::Supports(format.float_layout)) {
      DequantizeBlocks<ZeroPoints::kNone>(
          range, false, HalfValues(format.float_layout), table);
      return;
    }
#endif
    DequantizeBlocks<ZeroPoints::kNone>(range, false, table, table);
  } else if (format.storage_bits == 16) {
    if (format.is_signed) {
      DequantizeIntegers(range, IntegerValues<int16_t>());
    } else {
      DequantizeIntegers(range, IntegerValues<uint16_t>());
    }
  } else if (format.storage_bits < 8 &&
             hn::MaxLanes(hn::ScalableTag<float>()) >= 8) {
    FillIntegers(format, entries);
    DequantizeIntegers(range, SmallTable{entries});
  } else if (format.is_signed) {
    DequantizeIntegers(range, IntegerValues<int8_t>());
  } else {
    DequantizeIntegers(range, IntegerValues<uint8_t>());
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

HWY_EXPORT(DequantizeSimd);

}  // namespace

void Dequantize(const Encoding& encoding, const BlockLayout& layout,
                ElementType type, int64_t first, int64_t count,
                const uint8_t* in, uint8_t* out, ThreadPool* pool) {
  if (count == 0) return;
  const FormatInfo& format = *FindFormat(encoding.format);
  const int64_t tasks = (count + kTaskElements - 1) / kTaskElements;
  const bool is_large = count * ElementSizeBytes(type) >= kPrefetchFromBytes;
  const bool is_scalar = internal::UsesScalarKernels() || IsWideInteger(format);
  const auto run_task = [&](int64_t task) {
    const int64_t begin = task * kTaskElements;
    const DequantizeRange range{encoding,
                                format,
                                layout,
                                type,
                                first + begin,
                                std::min(kTaskElements, count - begin),
                                in + format.SizeBytes(begin),
                                out + begin * ElementSizeBytes(type),
                                is_large};
    if (is_scalar) {
      DequantizeScalar(range);
    } else {
      HWY_DYNAMIC_DISPATCH(DequantizeSimd)(range);
    }
  };
  ParallelFor(pool, tasks, run_task);
}

}  // namespace quantd::core
#endif  // HWY_ONCE
