#include "core/statistics/bin_table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "core/simd_internal.h"
#include "core/statistics/histogram.h"
#include "core/types/float_convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/statistics/bin_table.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_STATISTICS_BIN_TABLE_ONCE
#define QUANTD_CORE_STATISTICS_BIN_TABLE_ONCE
namespace quantd::core {
namespace {

constexpr uint32_t kSignBit = 0x80000000;
constexpr uint64_t kOneElement = uint64_t{1} << BinCell::kCountShift;

// Cells beyond those of patterns, a lane of a vector each: elements of one cell
// that many elements fall into are spread over them, because additions to one
// place in memory wait for each other. For two such cells, as data of few
// values may have.
constexpr size_t kSpareCells = 16;
constexpr size_t kHotCells = 2;

// Table that the kernels add to. Cell i is that of the patterns with bits >>
// shift = i; is_touched[i >> group_shift] is its group's.
struct TableView {
  int shift;
  int group_shift;
  BinCell* cells;
  uint8_t* is_touched;

  uint32_t cell_count() const { return uint32_t{1} << (32 - shift); }
  // Marks the groups of the patterns from `first` to `last`.
  void Mark(uint32_t first, uint32_t last) const {
    const int group_bits = shift + group_shift;
    std::memset(is_touched + (first >> group_bits), 1,
                (last >> group_bits) - (first >> group_bits) + 1);
  }
};

// The truth: one element after the other.
void AddToTableScalar(const uint8_t* in, int64_t count,
                      const TableView& table) {
  const uint32_t mask = (uint32_t{1} << table.shift) - 1;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = LoadUnaligned<uint32_t>(in + i * 4);
    if (bits == kSignBit) bits = 0;
    const uint64_t low = bits & mask;
    const uint32_t index = bits >> table.shift;
    table.cells[index].count_and_low_sum += kOneElement | low;
    table.cells[index].low_square_sum += low * low;
    table.is_touched[index >> table.group_shift] = 1;
  }
}

float ToHistogramFloat(double x) {
  const float rounded = static_cast<float>(x);
  return std::isinf(rounded) && std::isfinite(x)
             ? std::copysign(std::numeric_limits<float>::max(), rounded)
             : rounded;
}

void ToHistogramFloatsScalar(ElementType type, const uint8_t* in, int64_t count,
                             float* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = type == ElementType::kFloat64
                 ? ToHistogramFloat(LoadElement<double>(type, in, i))
                 : LoadElement<float>(type, in, i);
  }
}

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_STATISTICS_BIN_TABLE_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void AddToTable(const uint8_t* in, int64_t count, const TableView& table,
                bool is_sparse) {
  AddToTableScalar(in, count, table);
}

void ToFloats(ElementType type, const uint8_t* in, int64_t count, float* out) {
  ToHistogramFloatsScalar(type, in, count, out);
}

#else

// The cell that many of the latest elements fell into, if there is one.
class HotCell {
 public:
  // The index-th of them.
  HotCell(const TableView& table, size_t index)
      : cells_(table.cells),
        spare_(table.cells + table.cell_count() + index * kSpareCells),
        cells_end_(table.cell_count() * sizeof(BinCell)),
        spare_offset_(static_cast<uint32_t>(
            cells_end_ + index * kSpareCells * sizeof(BinCell))) {}

  // Place of the cell, in bytes from the first one; beyond the table for none.
  uint32_t offset() const { return offset_; }
  uint32_t spare_offset() const { return spare_offset_; }

  // After `count` more elements, one of which fell into `sample`: takes that
  // cell if few fell into this one.
  void Review(int64_t count, uint32_t sample) {
    const int64_t found = Collect();
    if (found * 8 < count && sample < cells_end_) offset_ = sample;
  }

  // Empties the spare cells. Returns how many elements they held.
  int64_t Collect() {
    const hn::Full128<uint64_t> d_cell;
    auto sum = hn::Zero(d_cell);
    for (size_t i = 0; i < kSpareCells; ++i) {
      sum = hn::Add(sum, hn::Load(d_cell, &spare_[i].count_and_low_sum));
      hn::Store(hn::Zero(d_cell), d_cell, &spare_[i].count_and_low_sum);
    }
    const int64_t count =
        static_cast<int64_t>(hn::GetLane(sum) >> BinCell::kCountShift);
    if (count > 0) {
      uint64_t* to = &cells_[offset_ / sizeof(BinCell)].count_and_low_sum;
      hn::Store(hn::Add(hn::Load(d_cell, to), sum), d_cell, to);
    }
    return count;
  }

 private:
  BinCell* const cells_;
  BinCell* const spare_;
  const uint32_t cells_end_;
  const uint32_t spare_offset_;
  uint32_t offset_ = ~uint32_t{0};
};

// The vector computes and stores what is added to each cell. Each element then
// adds it, as one load, addition and store of 16 bytes. `kIsSparse`: marks the
// group of each element; otherwise all groups between the smallest and the
// largest magnitude, which takes less for each element and more for Drain.
template <bool kIsSparse>
HWY_INLINE void AddVectorsToTable(const uint8_t* HWY_RESTRICT in, int64_t count,
                                  const TableView& table) {
  const hn::ScalableTag<uint32_t> d32;
  const hn::RebindToFloat<decltype(d32)> df;
  const hn::RepartitionToWide<decltype(d32)> d64;
  const hn::Full128<uint64_t> d_cell;
  constexpr int64_t kBatch = 64;
  constexpr int64_t kReviewBatches = 16;
  constexpr int kCellShift = 4;
  static_assert(sizeof(BinCell) == 1 << kCellShift);
  static_assert(hn::MaxLanes(d32) <= kSpareCells);
  HWY_ALIGN uint32_t offset[kBatch];
  HWY_ALIGN uint64_t addend[kBatch * 2];
  uint8_t* const cells = reinterpret_cast<uint8_t*>(table.cells);
  uint8_t* const is_touched = table.is_touched;
  const int mark_shift = table.group_shift + kCellShift;
  const int offset_shift = table.shift - kCellShift;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d32));
  const int64_t blocks = lanes / 4;
  const auto offset_mask = hn::Set(d32, (table.cell_count() - 1) << kCellShift);
  const auto low_mask = hn::Set(d64, (uint64_t{1} << table.shift) - 1);
  const auto one = hn::Set(d64, kOneElement);

  HotCell hot_cells[kHotCells] = {{table, 0}, {table, 1}};
  const auto lane_offset = hn::ShiftLeft<kCellShift>(hn::Iota(d32, 0));
  const auto spare0 =
      hn::Add(hn::Set(d32, hot_cells[0].spare_offset()), lane_offset);
  const auto spare1 =
      hn::Add(hn::Set(d32, hot_cells[1].spare_offset()), lane_offset);
  auto hot0 = hn::Set(d32, hot_cells[0].offset());
  auto hot1 = hn::Set(d32, hot_cells[1].offset());
  int64_t review_at = kBatch;
  int64_t reviewed = 0;
  uint32_t sample = 0;
  // Least of twice the magnitudes, less one: zero is the largest of these.
  auto least = hn::Set(d32, ~uint32_t{0});
  auto most = hn::Zero(d32);
  auto all = hn::Zero(d32);

  for (int64_t i = 0; i < count;) {
    const int64_t batch = std::min(kBatch, count - i);
    for (int64_t k = 0; k < batch; k += lanes) {
      // Adding zero makes +0 of -0.
      const auto bits = hn::BitCast(
          d32, hn::Add(LoadBytes(df, in + (i + k) * 4), hn::Zero(df)));
      if constexpr (!kIsSparse) {
        const auto twice = hn::Add(bits, bits);
        most = hn::Max(most, twice);
        least = hn::Min(least, hn::Sub(twice, hn::Set(d32, 1)));
        all = hn::Or(all, bits);
      }
      const auto at =
          hn::And(hn::ShiftRightSame(bits, offset_shift), offset_mask);
      const auto to =
          hn::IfThenElse(hn::Eq(at, hot0), spare0,
                         hn::IfThenElse(hn::Eq(at, hot1), spare1, at));
      hn::Store(to, d32, offset + k);
      // The count and low bits; the product is of their low halves.
      const auto bits64 = hn::BitCast(d64, bits);
      const auto even = hn::OrAnd(one, bits64, low_mask);
      const auto odd = hn::OrAnd(one, hn::ShiftRight<32>(bits64), low_mask);
      const auto even_square =
          hn::MulEven(hn::BitCast(d32, even), hn::BitCast(d32, even));
      const auto odd_square =
          hn::MulEven(hn::BitCast(d32, odd), hn::BitCast(d32, odd));
      // The parts are the first, second, third and fourth of every block of
      // four elements.
      uint64_t* out = addend + k * 2;
      hn::Store(hn::InterleaveLower(d64, even, even_square), d64, out);
      hn::Store(hn::InterleaveLower(d64, odd, odd_square), d64,
                out + blocks * 2);
      hn::Store(hn::InterleaveUpper(d64, even, even_square), d64,
                out + blocks * 4);
      hn::Store(hn::InterleaveUpper(d64, odd, odd_square), d64,
                out + blocks * 6);
    }
    for (int64_t k = 0; k < batch; k += lanes) {
      for (int64_t part = 0; part < 4; ++part) {
        const uint64_t* from = addend + (k + part * blocks) * 2;
        for (int64_t block = 0; block < blocks; ++block) {
          const uint32_t at = offset[k + block * 4 + part];
          uint64_t* to = reinterpret_cast<uint64_t*>(cells + at);
          hn::Store(
              hn::Add(hn::Load(d_cell, to), hn::Load(d_cell, from + block * 2)),
              d_cell, to);
          if constexpr (kIsSparse) is_touched[at >> mark_shift] = 1;
        }
      }
    }
    i += batch;
    if (i >= review_at) {
      // Not always from the same places: data may repeat.
      for (HotCell& hot_cell : hot_cells) {
        sample = (sample + 29) % static_cast<uint32_t>(batch);
        hot_cell.Review(i - reviewed, offset[sample]);
      }
      hot0 = hn::Set(d32, hot_cells[0].offset());
      hot1 = hn::Set(d32, hot_cells[1].offset());
      reviewed = i;
      review_at = i + kReviewBatches * kBatch;
    }
  }
  for (HotCell& hot_cell : hot_cells) hot_cell.Collect();

  if constexpr (!kIsSparse) {
    table.Mark(0, 0);
    const uint32_t last = hn::GetLane(hn::MaxOfLanes(d32, most)) / 2;
    if (last == 0) return;
    const uint32_t first = hn::GetLane(hn::MinOfLanes(d32, least)) / 2;
    table.Mark(first, last);
    if (!hn::AllTrue(
            d32, hn::Eq(hn::And(all, hn::Set(d32, kSignBit)), hn::Zero(d32)))) {
      table.Mark(first | kSignBit, last | kSignBit);
    }
  }
}

void AddToTable(const uint8_t* HWY_RESTRICT in, int64_t count,
                const TableView& view, bool is_sparse) {
  // By value, as the stores into cells may alias `view`.
  const TableView table = view;
  const hn::ScalableTag<uint32_t> d32;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d32));
  const int64_t whole = count / lanes * lanes;
  if (is_sparse) {
    AddVectorsToTable<true>(in, whole, table);
  } else {
    AddVectorsToTable<false>(in, whole, table);
  }
  AddToTableScalar(in + whole * 4, count - whole, table);
}

void ToFloats(ElementType type, const uint8_t* HWY_RESTRICT in, int64_t count,
              float* HWY_RESTRICT out) {
  if (type != ElementType::kFloat64) {
    Widen(type, in, count, out);
    return;
  }
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto largest = hn::Set(d, double{std::numeric_limits<float>::max()});
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto x = LoadBytes(d, in + i * 8);
    const auto clamped = hn::Min(hn::Max(x, hn::Neg(largest)), largest);
    StoreBytes(hn::DemoteTo(df, hn::IfThenElse(hn::IsFinite(x), clamped, x)),
               df, reinterpret_cast<uint8_t*>(out + i));
  }
  ToHistogramFloatsScalar(type, in + i * 8, count - i, out + i);
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quantd::core {
namespace {

HWY_EXPORT(AddToTable);
HWY_EXPORT(ToFloats);

// Cells of a group: few enough that a group with a single element costs little.
int GroupShift(int mantissa_bits) { return std::min(mantissa_bits, 5); }

// Tables that are not in use, by mantissa bits.
class Stock {
 public:
  std::unique_ptr<BinTable> Take(int mantissa_bits)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      auto& tables = tables_[mantissa_bits];
      if (!tables.empty()) {
        std::unique_ptr<BinTable> table = std::move(tables.back());
        tables.pop_back();
        return table;
      }
    }
    return std::make_unique<BinTable>(mantissa_bits);
  }

  void Return(std::unique_ptr<BinTable> table) ABSL_LOCKS_EXCLUDED(mutex_) {
    constexpr size_t kKeptBytes = 64 << 20;
    absl::MutexLock lock(&mutex_);
    auto& tables = tables_[table->mantissa_bits()];
    const size_t table_bytes = sizeof(BinCell) << (9 + table->mantissa_bits());
    if (tables.size() < kKeptBytes / table_bytes) {
      tables.push_back(std::move(table));
    }
  }

 private:
  absl::Mutex mutex_;
  std::array<std::vector<std::unique_ptr<BinTable>>, kMaxMantissaBits + 1>
      tables_ ABSL_GUARDED_BY(mutex_);
};

Stock& TheStock() {
  static Stock& stock = *new Stock();
  return stock;
}

}  // namespace

BinTable::BinTable(int mantissa_bits)
    : mantissa_bits_(mantissa_bits),
      cell_count_(size_t{1} << (9 + mantissa_bits)),
      cells_(cell_count_ + kHotCells * kSpareCells),
      is_touched_(cells_.size() >> GroupShift(mantissa_bits)) {}

void BinTable::Add(const uint8_t* in, int64_t count) {
  const TableView view{23 - mantissa_bits_, GroupShift(mantissa_bits_),
                       cells_.data(), is_touched_.data()};
  room_ -= count;
  if (internal::UsesScalarKernels()) {
    AddToTableScalar(in, count, view);
    return;
  }
  // So many elements pay for looking at a large part of the table.
  const bool is_sparse =
      kCapacity - room_ < static_cast<int64_t>(cell_count_ / 2);
  HWY_DYNAMIC_DISPATCH(AddToTable)(in, count, view, is_sparse);
}

absl::Span<const PackedBin> BinTable::Drain() {
  const uint32_t groups =
      static_cast<uint32_t>(cell_count_ >> GroupShift(mantissa_bits_));
  constexpr uint32_t kWord = 8;
  drained_count_ = 0;
  // In order of key, a word of marks at a time: of the negatives, which are the
  // second half, from the end.
  for (uint32_t k = 0; k < groups; k += kWord) {
    const bool is_negative = k < groups / 2;
    const uint32_t first = is_negative ? groups - kWord - k : k - groups / 2;
    if (LoadUnaligned<uint64_t>(&is_touched_[first]) == 0) continue;
    for (uint32_t i = 0; i < kWord; ++i) {
      const uint32_t group = first + (is_negative ? kWord - 1 - i : i);
      if (is_touched_[group] != 0) DrainGroup(group, is_negative);
      is_touched_[group] = 0;
    }
  }
  room_ = kCapacity;
  return absl::MakeConstSpan(drained_.data(), drained_count_);
}

void BinTable::DrainGroup(uint32_t group, bool is_negative) {
  const int group_shift = GroupShift(mantissa_bits_);
  const uint32_t size = uint32_t{1} << group_shift;
  const uint32_t first = group << group_shift;
  const uint32_t half = uint32_t{1} << (8 + mantissa_bits_);
  const bool is_finite = (first >> mantissa_bits_ & 0xFF) != 0xFF;
  uint64_t any = 0;
  for (uint32_t i = 0; i < size; ++i) {
    any |= cells_[first + i].count_and_low_sum;
  }
  if (any == 0) return;
  if (is_finite) {
    if (drained_.size() < drained_count_ + size) {
      drained_.resize(2 * drained_count_ + size);
    }
    PackedBin* out = drained_.data() + drained_count_;
    for (uint32_t i = 0; i < size; ++i) {
      const uint32_t index = first + (is_negative ? size - 1 - i : i);
      const BinCell& cell = cells_[index];
      // Written even if empty: a branch would be a guess.
      *out = {
          is_negative ? 2 * half - 1 - index : half + index,
          static_cast<uint32_t>(cell.count_and_low_sum >> BinCell::kCountShift),
          cell.count_and_low_sum & (kOneElement - 1), cell.low_square_sum};
      out += cell.count_and_low_sum != 0;
    }
    drained_count_ = out - drained_.data();
  }
  std::fill_n(cells_.begin() + first, size, BinCell{0, 0});
}

BinTableLease::BinTableLease(int mantissa_bits)
    : table_(TheStock().Take(mantissa_bits)) {}

BinTableLease::~BinTableLease() { TheStock().Return(std::move(table_)); }

void ToHistogramFloats(ElementType type, const uint8_t* in, int64_t count,
                       float* out) {
  if (type == ElementType::kFloat32) {
    std::memcpy(out, in, count * sizeof(float));
  } else if (internal::UsesScalarKernels()) {
    ToHistogramFloatsScalar(type, in, count, out);
  } else {
    HWY_DYNAMIC_DISPATCH(ToFloats)(type, in, count, out);
  }
}

}  // namespace quantd::core
#endif  // HWY_ONCE
