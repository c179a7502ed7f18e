#include "core/quantize/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
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
  void Quantize(const RangePart& part) {
    const BlockLayout& layout = range_.layout;
    if (layout.row_block() == 1 && layout.row_size() > 1) {
      if (!layout.rows_share_scales() || !QuantizeTiles(part)) {
        QuantizeByDivision(range_, part, counts_);
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

  // True if the coder works with the index-th of the prepared scales.
  bool Accepts(int64_t scale_index) const {
    const FloatTag d;
    const int32_t* zero_point = ZeroPoints(scale_index);
    return hn::AllTrue(
        d, coder_.Accepts(d, hn::Set(d, range_.encoding.scale[scale_index]),
                          hn::Set(IntTag(), zero_point ? *zero_point : 0)));
  }

  void QuantizeRow(const BlockLayout::Row& row, const RangePart& part) {
    const int64_t block = row.block;
    const int shift = static_cast<int>(
        hwy::Num0BitsBelowLS1Bit_Nonzero64(static_cast<uint64_t>(block)));
    const bool is_group = block == int64_t{1} << shift &&
                          block >= kSmallestGroup && block <= kLargestGroup;
    int64_t done = 0;
    int64_t scale_index = row.scale_index;
    int64_t offset = row.offset;
    while (done < row.count) {
      // Number of scales of the elements that remain.
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
          QuantizeByDivision(range_, part.Sub(done, count), counts_);
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
  bool QuantizeTiles(const RangePart& part) {
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
    // Within one row there may be no scales but those of the part's elements.
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
            QuantizeByDivision(range_, part.Sub(begin - first, n), counts_);
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
  void QuantizeSpan(const Scales& scales, const RangePart& part,
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

// True if all groups and rows of a range begin bytes of packed codes.
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
  // Only integers have real zero points.
  if (range.type == ElementType::kFloat64 ||
      range.encoding.zero_points_are_real) {
    QuantizeByDivision(range, {0, range.count, range.out, format.storage_bits},
                       counts);
    return;
  }
  switch (format.kind) {
    case CodeKind::kInteger:
      if (format.storage_bits == 16) {
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

// NON_FINITE_REJECTED, naming the first element that is NaN or infinite.
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

absl::Status AddTaskCounts(absl::Span<const QuantizeCounts> tasks,
                           absl::FunctionRef<QuantizeRange(int64_t)> range_of,
                           NanPolicy nan_policy, QuantizeCounts* counts) {
  for (size_t task = 0; task < tasks.size(); ++task) {
    const QuantizeCounts& c = tasks[task];
    if (nan_policy == NanPolicy::kReject &&
        c.nan + c.positive_infinity + c.negative_infinity > 0) {
      return FirstNonFinite(range_of(static_cast<int64_t>(task)));
    }
    counts->Merge(c);
  }
  return absl::OkStatus();
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
  return AddTaskCounts(task_counts, task_range, nan_policy, counts);
}

}  // namespace quantd::core
#endif  // HWY_ONCE
