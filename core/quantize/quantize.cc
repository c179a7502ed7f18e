#include "core/quantize/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "core/errors.h"
#include "core/formats/grid.h"
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
#include "core/formats/float_codec-inl.h"
#include "core/formats/packing-inl.h"
#include "core/quantize/coders-inl.h"
#include "core/quantize/scales-inl.h"
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_QUANTIZE_QUANTIZE_ONCE
#define QUANTD_CORE_QUANTIZE_QUANTIZE_ONCE
namespace quantd::core {
namespace {

// Elements that go through the L1 buffers at a time.
constexpr int64_t kBlockElements = 2048;
// Elements that are looked at again when one of them is clipped or NaN.
constexpr int64_t kPieceElements = 512;
// The loop that counts clipped elements costs about a quarter of what looking
// at a piece again does, and is worth it if more than one piece in 4 has some:
// those add to a score and the others subtract from it.
constexpr int kClippedPieceScore = 3;
constexpr int kCleanPieceScore = -1;
constexpr int kMostScore = 12;
// Above it pieces are counted.
constexpr int kCountingScore = 4;
// Elements of a task; a multiple of kBlockElements.
constexpr int64_t kTaskElements = 64 * 1024;
// Groups whose scales are prepared at a time.
constexpr int64_t kBatchGroups = 256;
// The sizes of groups that share vectors or calls with their neighbours.
constexpr int64_t kSmallestGroup = 16;
constexpr int64_t kLargestGroup = 256;
// Elements that share prepared scales in each row, where rows share scales.
constexpr int64_t kTileElements = 1024;

// Inputs are prefetched so far ahead: from memory, in tensors of that size on,
// and from the L2.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kPrefetchFromBytes = 2 << 20;
constexpr int64_t kNearPrefetchBytes = 1024;

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

// Elements and their quotients, with a scale and zero point each or the same in
// all lanes.
template <class D>
struct Quotients {
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

// Whether a quotient is NaN: that of a NaN, or of any element by a NaN scale.
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
void QuantizeByDivision(const QuantizeRange& range, int64_t scale_index,
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
void QuantizeOnGrid(const QuantizeRange& range, const Grid& grid,
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

// A part of a range, and where its codes go.
struct Part {
  // Of the range, not of the tensor.
  int64_t begin;
  int64_t count;
  uint8_t* out;
  // Bits that a code takes at `out`: those of the format, or 8 where the caller
  // packs them.
  int bits;

  // [offset, offset + n) of it; `offset` begins a byte.
  HWY_INLINE Part Sub(int64_t offset, int64_t n) const {
    return {begin + offset, n, out + offset * bits / 8, bits};
  }
};

// --- By division ------------------------------------------------------------
// Of any type, scale and layout.

// Calls `quantize_part(run, in, count, codes)` for the parts of the runs,
// widened to T and with codes of that size each.
template <typename T, typename Code, class Function>
HWY_INLINE void ForEachRunOf(const QuantizeRange& range, const Part& part,
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
void DivideIntegers(const QuantizeRange& range, const Part& part,
                    QuantizeCounts* counts) {
  ForEachRunOf<T, Code>(
      range, part,
      [&](const BlockLayout::Run& run, const uint8_t* in, int64_t count,
          uint8_t* codes) HWY_ATTR {
        if (run.scale_step == 1) {
          QuantizeByDivision<1, kIsReal, T, Code>(range, run.scale_index, in,
                                                  count, codes, counts);
        } else {
          QuantizeByDivision<0, kIsReal, T, Code>(range, run.scale_index, in,
                                                  count, codes, counts);
        }
      });
}

template <typename T, class Grid>
void DivideToGrid(const QuantizeRange& range, const Grid& grid,
                  const Part& part, QuantizeCounts* counts) {
  ForEachRunOf<T, uint8_t>(
      range, part,
      [&](const BlockLayout::Run& run, const uint8_t* in, int64_t count,
          uint8_t* codes) HWY_ATTR {
        if (run.scale_step == 1) {
          QuantizeOnGrid<1, T>(range, grid, run.scale_index, in, count, codes,
                               counts);
        } else {
          QuantizeOnGrid<0, T>(range, grid, run.scale_index, in, count, codes,
                               counts);
        }
      });
}

template <bool kIsReal, typename T>
void DivideIntegersOfFormat(const QuantizeRange& range, const Part& part,
                            QuantizeCounts* counts) {
  if (range.format.storage_bits == 16) {
    DivideIntegers<kIsReal, T, uint16_t>(range, part, counts);
  } else {
    DivideIntegers<kIsReal, T, uint8_t>(range, part, counts);
  }
}

template <typename T>
void QuantizePartByDivision(const QuantizeRange& range, const Part& part,
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

// --- By reciprocals ---------------------------------------------------------
// Of types that are computed in float32, with a Coder of coders-inl.h. Scales
// that it does not accept go by division.

template <class Coder>
class PartQuantizer {
 public:
  PartQuantizer(const QuantizeRange& range, const Coder& coder,
                QuantizeCounts* counts)
      : range_(range), coder_(coder), counts_(counts) {}

  // Requires: groups and rows begin bytes, unless part.bits is 8 or more.
  void Quantize(const Part& part) {
    const BlockLayout& layout = range_.layout;
    if (layout.row_block() == 1 && layout.row_size() > 1) {
      if (!layout.rows_share_scales() || !QuantizeTiles(part)) {
        QuantizePartByDivision<float>(range_, part, counts_);
      }
      return;
    }
    const int64_t first = range_.first + part.begin;
    BlockLayout::RowCursor cursor(layout, first, part.count);
    BlockLayout::Row row;
    while (cursor.Next(&row)) {
      QuantizeRow(row, part.Sub(row.begin - first, row.count));
    }
  }

 private:
  const int32_t* ZeroPoints(int64_t scale_index) const {
    return range_.encoding.zero_point.empty()
               ? nullptr
               : range_.encoding.zero_point.data() + scale_index;
  }

  // Whether the coder works with the index-th of the prepared scales.
  bool Accepts(int64_t scale_index) const {
    const FloatTag d;
    const int32_t* zero_point = ZeroPoints(scale_index);
    return hn::AllTrue(
        d, coder_.Accepts(d, hn::Set(d, range_.encoding.scale[scale_index]),
                          hn::Set(IntTag(), zero_point ? *zero_point : 0)));
  }

  void QuantizeRow(const BlockLayout::Row& row, const Part& part) {
    const int64_t block = row.block;
    const int shift = static_cast<int>(
        hwy::Num0BitsBelowLS1Bit_Nonzero64(static_cast<uint64_t>(block)));
    const bool is_group = block == int64_t{1} << shift &&
                          block >= kSmallestGroup && block <= kLargestGroup;
    int64_t done = 0;
    int64_t scale_index = row.scale_index;
    int64_t offset = row.offset;
    while (done < row.count) {
      // What remains, in scales.
      const int64_t scales = (offset + row.count - done + block - 1) / block;
      const int64_t batch = std::min(scales, kBatchGroups);
      const bool all_good =
          arrays_.Fill(coder_, range_.encoding.scale.data() + scale_index,
                       ZeroPoints(scale_index), batch, 1);
      for (int64_t k = 0; k < batch;) {
        const int64_t rest = row.count - done;
        int64_t groups = 1;
        int64_t count = std::min(block - offset, rest);
        if (is_group && all_good && offset == 0 && rest >= block) {
          groups = std::min(batch - k, rest >> shift);
          count = groups << shift;
          QuantizeSpan(GroupScales{&arrays_, k, shift}, part.Sub(done, count),
                       kPrefetchBytes);
        } else if (all_good || Accepts(scale_index + k)) {
          QuantizeSpan(UniformScale{&arrays_, k}, part.Sub(done, count),
                       kPrefetchBytes);
        } else {
          QuantizePartByDivision<float>(range_, part.Sub(done, count), counts_);
        }
        done += count;
        offset = 0;
        k += groups;
      }
      scale_index += batch;
    }
  }

  // A scale per column, the same in all rows: a tile of columns after the
  // other, so that its scales are prepared once. Short rows are taken several
  // at a time. False if the coder does not work with the scales.
  bool QuantizeTiles(const Part& part) {
    const int64_t columns = range_.layout.row_size();
    const int64_t first = range_.first + part.begin;
    const int64_t end = first + part.count;
    const bool is_one_row = first / columns == (end - 1) / columns;
    // A multiple of 4, so that rows begin bytes.
    const int64_t times = columns * 4 <= kTileElements && !is_one_row
                              ? kTileElements / columns / 4 * 4
                              : 1;
    const int64_t width = columns * times;
    const int64_t first_row = first / width;
    const int64_t end_row = (end + width - 1) / width;
    // Of one row there may be no scales but those of its elements.
    const int64_t tiles_begin = is_one_row ? first - first_row * width : 0;
    const int64_t tiles_end = is_one_row ? end - first_row * width : width;
    for (int64_t tile = tiles_begin; tile < tiles_end; tile += kTileElements) {
      const int64_t count = std::min(tiles_end - tile, kTileElements);
      const int64_t scale_index = tile - range_.layout.first_scale();
      if (!arrays_.Fill(coder_, range_.encoding.scale.data() + scale_index,
                        ZeroPoints(scale_index), count / times, times)) {
        if (tile == tiles_begin) return false;
        for (int64_t row = first_row; row < end_row; ++row) {
          const int64_t begin = std::max(row * width + tile, first);
          const int64_t n = std::min(row * width + tile + count, end) - begin;
          if (n > 0) {
            QuantizePartByDivision<float>(range_, part.Sub(begin - first, n),
                                          counts_);
          }
        }
        continue;
      }
      for (int64_t row = first_row; row < end_row; ++row) {
        const int64_t row_tile = row * width + tile;
        const int64_t begin = std::max(row_tile, first);
        const int64_t n = std::min(row_tile + count, end) - begin;
        if (n > 0) {
          QuantizeSpan(ElementScales{&arrays_, begin - row_tile},
                       part.Sub(begin - first, n),
                       width * ElementSizeBytes(range_.type));
        }
      }
    }
    return true;
  }

  template <class Scales>
  void QuantizeSpan(const Scales& scales, const Part& part,
                    int64_t prefetch_bytes) {
    const FloatTag d;
    constexpr int64_t kLanes = hn::MaxLanes(FloatTag());
    const bool widens = range_.type != ElementType::kFloat32;
    const int64_t element_bytes = ElementSizeBytes(range_.type);
    const int64_t ahead = range_.is_large ? prefetch_bytes : kNearPrefetchBytes;
    const int64_t ahead_out = ahead / element_bytes * part.bits / 8;
    // Copies: what they hold stays in registers whatever `out` points at.
    const Coder coder = coder_;
    const auto bound = scales.Bind(d);
    const int bits = part.bits;
    HWY_ALIGN float wide[kPieceElements];
    int score = score_;
    auto low = hn::Zero(IntTag());
    auto high = hn::Zero(IntTag());
    bool counted = false;

    for (int64_t begin = 0; begin < part.count; begin += kPieceElements) {
      const int64_t count = std::min(part.count - begin, kPieceElements);
      const uint8_t* HWY_RESTRICT in =
          range_.in + (part.begin + begin) * element_bytes;
      uint8_t* HWY_RESTRICT out = part.out + begin * bits / 8;
      int64_t ahead_in = ahead;
      if (widens) {
        for (int64_t at = 0; at < count * 2; at += kLineBytes) {
          Prefetch(in + at + ahead);
        }
        Widen(range_.type, in, count, wide);
        in = reinterpret_cast<const uint8_t*>(wide);
        ahead_in = 0;
      }
      const auto quad = [&](const uint8_t* HWY_RESTRICT from, int64_t i,
                            int code_bits, uint8_t* HWY_RESTRICT to,
                            auto& state) HWY_ATTR {
        Quad<Scales::kVaries>(coder, bound, from, begin + i, code_bits, to,
                              state);
      };
      const int64_t whole = count / (4 * kLanes) * (4 * kLanes);
      const auto quads = [&](auto& state) HWY_ATTR {
        for (int64_t i = 0; i < whole; i += 4 * kLanes) {
          const uint8_t* from = in + i * 4;
          uint8_t* to = out + i * bits / 8;
          for (int64_t at = 0; at < kLanes * 16; at += kLineBytes) {
            Prefetch(from + at + ahead_in);
          }
          PrefetchWrite(to + ahead_out);
          quad(from, i, bits, to, state);
        }
      };
      bool has_clipped = false;
      if (HWY_LIKELY(score <= kCountingScore)) {
        typename Coder::template State<false> state;
        quads(state);
        if (HWY_UNLIKELY(!coder.AllGood(state))) {
          QuantizeSpecial(scales, begin, in, whole, bits, out);
          has_clipped = coder.CanCount();
        }
      } else {
        typename Coder::template State<true> state;
        quads(state);
        if (HWY_UNLIKELY(!coder.AllOrdinary(state))) {
          QuantizeSpecial(scales, begin, in, whole, bits, out);
          has_clipped = true;
        } else if (coder.SawClipped(state)) {
          coder.AddCounts(state, low, high);
          has_clipped = true;
          counted = true;
        }
      }
      score += has_clipped ? kClippedPieceScore : kCleanPieceScore;
      score = std::min(std::max(score, 0), kMostScore);
      if (whole < count) {
        // Never counted: what is padded may be clipped.
        typename Coder::template State<false> state;
        HWY_ALIGN float rest[4 * kLanes] = {};
        HWY_ALIGN uint8_t codes[4 * kLanes * Coder::kCodeBytes];
        std::memcpy(rest, in + whole * 4, (count - whole) * 4);
        quad(reinterpret_cast<const uint8_t*>(rest), whole, std::max(bits, 8),
             codes, state);
        uint8_t* to = out + whole * bits / 8;
        CopyCodes(codes, count - whole, bits, to);
        if (HWY_UNLIKELY(!coder.AllGood(state))) {
          QuantizeSpecial(scales, begin + whole, in + whole * 4, count - whole,
                          bits, to);
        }
      }
    }
    if (counted) {
      const IntTag di;
      counts_->clipped_low += hn::GetLane(hn::SumOfLanes(di, low));
      counts_->clipped_high += hn::GetLane(hn::SumOfLanes(di, high));
    }
    score_ = score;
  }

  // The codes of four vectors of elements, from the i-th of the scales on.
  template <bool kVaries, class Bound, class State>
  HWY_INLINE static void Quad(const Coder& coder, const Bound& bound,
                              const uint8_t* HWY_RESTRICT from, int64_t i,
                              int bits, uint8_t* HWY_RESTRICT to,
                              State& state) {
    const FloatTag d;
    constexpr int64_t kLanes = hn::MaxLanes(FloatTag());
    const auto code = [&](int64_t at) HWY_ATTR {
      return coder.template Code<kVaries>(
          d, InRegister(LoadBytes(d, from + at * 4)), bound.Get(d, i + at),
          state);
    };
    const auto v0 = code(0);
    const auto v1 = code(kLanes);
    const auto v2 = code(kLanes * 2);
    const auto v3 = code(kLanes * 3);
    coder.template Store<kVaries>(v0, v1, v2, v3, bound.Get(d, i), state, bits,
                                  to);
  }

  // Calls `visit(i, x, mask)` for the vectors of a piece, with zeros where
  // `mask` is false: past the end.
  template <class Visitor>
  HWY_INLINE static void ForEachVector(const uint8_t* HWY_RESTRICT in,
                                       int64_t count, const Visitor& visit) {
    const FloatTag d;
    constexpr int64_t kLanes = hn::MaxLanes(FloatTag());
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      visit(i, InRegister(LoadBytes(d, in + i * 4)), hn::FirstN(d, kLanes));
    }
    if (i == count) return;
    HWY_ALIGN float x[kLanes] = {};
    std::memcpy(x, in + i * 4, (count - i) * 4);
    visit(i, hn::Load(d, x), hn::FirstN(d, count - i));
  }

  // The counts of a piece that has clipped elements or NaN and begins at that
  // offset of the scales; and its codes, unless they are right already.
  template <class Scales>
  HWY_NOINLINE void QuantizeSpecial(const Scales& scales, int64_t begin,
                                    const uint8_t* in, int64_t count, int bits,
                                    uint8_t* out) {
    using Code = std::conditional_t<Coder::kCodeBytes == 1, uint8_t, uint16_t>;
    const FloatTag d;
    const hn::Rebind<Code, FloatTag> dcode;
    const Coder coder = coder_;
    const auto bound = scales.Bind(d);
    if (coder.Saturates()) {
      auto ordinary = hn::FirstN(d, hn::Lanes(d));
      int64_t low = 0;
      int64_t high = 0;
      ForEachVector(
          in, count, [&](int64_t i, FloatVector x, FloatMask mask) HWY_ATTR {
            ordinary = coder.CountClipped(d, x, bound.Get(d, begin + i), mask,
                                          ordinary, &low, &high);
          });
      if (HWY_LIKELY(hn::AllTrue(d, ordinary))) {
        counts_->clipped_low += low;
        counts_->clipped_high += high;
        return;
      }
    }
    HWY_ALIGN Code codes[kPieceElements];
    ForEachVector(
        in, count, [&](int64_t i, FloatVector x, FloatMask mask) HWY_ATTR {
          const auto code =
              coder.SpecialCode(d, x, bound.Get(d, begin + i), mask, counts_);
          // The low bits alone: negative codes as well.
          const auto low_bits = hn::And(
              code, hn::Set(IntTag(), std::numeric_limits<Code>::max()));
          hn::StoreU(hn::DemoteTo(dcode, low_bits), dcode, codes + i);
        });
    CopyCodes(reinterpret_cast<uint8_t*>(codes), count, bits, out);
  }

  // Codes of kCodeBytes each to codes of `bits` each.
  static void CopyCodes(uint8_t* codes, int64_t count, int bits, uint8_t* out) {
    if (bits >= 8) {
      std::memcpy(out, codes, count * Coder::kCodeBytes);
    } else {
      PackCodes(bits, codes, count, out);
    }
  }

  const QuantizeRange& range_;
  const Coder coder_;
  QuantizeCounts* const counts_;
  // The first piece that has clipped elements begins counting.
  int score_ = kCountingScore;
  ScaleArrays arrays_;
};

// Whether all groups and rows of a range begin bytes of packed codes.
bool BeginBytes(const QuantizeRange& range) {
  const int64_t per_byte = range.format.codes_per_byte();
  const BlockLayout& layout = range.layout;
  const int64_t row_size = layout.row_size();
  const bool is_one_row =
      range.first / row_size == (range.first + range.count - 1) / row_size;
  // Groups and tiles begin where their row does, which may be before the range.
  const int64_t row_begin = range.first / row_size * row_size;
  const int64_t block = layout.row_block();
  return (is_one_row || row_size % per_byte == 0) &&
         (block == row_size ||
          (row_begin % per_byte == 0 && (block == 1 || block % per_byte == 0)));
}

template <class Coder>
void QuantizeWith(const QuantizeRange& range, const Coder& coder,
                  QuantizeCounts* counts) {
  PartQuantizer<Coder> quantizer(range, coder, counts);
  const int bits = range.format.storage_bits;
  if (bits >= 8 || BeginBytes(range)) {
    quantizer.Quantize({0, range.count, range.out, bits});
    return;
  }
  HWY_ALIGN uint8_t codes[kBlockElements];
  for (int64_t begin = 0; begin < range.count; begin += kBlockElements) {
    const int64_t count = std::min(range.count - begin, kBlockElements);
    quantizer.Quantize({begin, count, codes, 8});
    PackCodes(bits, codes, count, range.out + begin * bits / 8);
  }
}

void QuantizeSimd(const QuantizeRange& range, QuantizeCounts* counts) {
  counts->total += range.count;
  const FormatInfo& format = range.format;
  if (range.type == ElementType::kFloat64) {
    QuantizePartByDivision<double>(
        range, {0, range.count, range.out, format.storage_bits}, counts);
    return;
  }
  switch (format.kind) {
    case CodeKind::kInteger:
      if (range.encoding.zero_points_are_real) {
        QuantizePartByDivision<float>(
            range, {0, range.count, range.out, format.storage_bits}, counts);
      } else if (format.storage_bits == 16) {
        QuantizeWith(range, IntegerCoder<2>(range), counts);
      } else {
        QuantizeWith(range, IntegerCoder<1>(range), counts);
      }
      return;
    case CodeKind::kFloat: {
      const FloatGrid grid(format.float_layout, range.encoding.no_saturation);
      QuantizeWith(range, FloatCoder(range, grid), counts);
      return;
    }
    case CodeKind::kCodebook: {
      const CodebookGrid grid(CodebookOf(range.encoding));
      QuantizeWith(range, CodebookCoder(range, grid), counts);
      return;
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

}  // namespace

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
  const bool is_large = count * element_bytes >= kPrefetchFromBytes;
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
                         out + format.SizeBytes(begin),
                         is_large};
  };
  std::vector<QuantizeCounts> task_counts(tasks);
  const bool is_scalar = internal::UsesScalarKernels() || IsWideInteger(format);
  const auto run_task = [&](int64_t task) {
    if (is_scalar) {
      QuantizeScalar(task_range(task), &task_counts[task]);
    } else {
      HWY_DYNAMIC_DISPATCH(QuantizeSimd)(task_range(task), &task_counts[task]);
    }
  };
  ParallelFor(pool, tasks, run_task);
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
