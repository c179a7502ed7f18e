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

// Where the kernels add. Cell i is that of the patterns with bits >> shift = i;
// is_touched[i >> group_shift] is its group's.
struct TableView {
  int shift;
  int group_shift;
  BinCell* cells;
  uint8_t* is_touched;
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

void AddToTable(const uint8_t* in, int64_t count, const TableView& table) {
  AddToTableScalar(in, count, table);
}

void ToFloats(ElementType type, const uint8_t* in, int64_t count, float* out) {
  ToHistogramFloatsScalar(type, in, count, out);
}

#else

// What is added to each cell is computed by the vector and stored, and then
// added by the element, as one load, addition and store of 16 bytes each.
void AddToTable(const uint8_t* HWY_RESTRICT in, int64_t count,
                const TableView& view) {
  const hn::ScalableTag<uint32_t> d32;
  const hn::RepartitionToWide<decltype(d32)> d64;
  const hn::Full128<uint64_t> d_cell;
  constexpr int64_t kBatch = 64;
  HWY_ALIGN uint32_t index[kBatch];
  HWY_ALIGN uint64_t addend[kBatch * 2];
  // By value, as the stores into cells may alias `view`.
  const TableView table = view;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d32));
  const int64_t blocks = lanes / 4;
  const auto mask = hn::Set(d32, (uint32_t{1} << table.shift) - 1);
  const auto sign = hn::Set(d32, kSignBit);
  const auto one = hn::Set(d64, kOneElement);

  int64_t i = 0;
  while (count - i >= lanes) {
    const int64_t batch = std::min(kBatch, (count - i) / lanes * lanes);
    const uint32_t first_bits = LoadUnaligned<uint32_t>(in + i * 4);
    const uint32_t first_cell =
        (first_bits == kSignBit ? 0 : first_bits) >> table.shift;
    const auto first = hn::Set(d32, first_cell);
    auto differs = hn::Zero(d32);
    for (int64_t k = 0; k < batch; k += lanes) {
      auto bits = LoadBytes(d32, in + (i + k) * 4);
      bits = hn::IfThenZeroElse(hn::Eq(bits, sign), bits);
      const auto cells = hn::ShiftRightSame(bits, table.shift);
      hn::Store(cells, d32, index + k);
      differs = hn::Or(differs, hn::Xor(cells, first));
      const auto low = hn::And(bits, mask);
      const auto even =
          hn::ShiftRight<32>(hn::ShiftLeft<32>(hn::BitCast(d64, low)));
      const auto odd = hn::ShiftRight<32>(hn::BitCast(d64, low));
      const auto even_square = hn::MulEven(low, low);
      const auto odd_square =
          hn::MulEven(hn::BitCast(d32, odd), hn::BitCast(d32, odd));
      const auto even_sum = hn::Or(even, one);
      const auto odd_sum = hn::Or(odd, one);
      // Of every block of four elements the first, second, third and fourth.
      uint64_t* out = addend + k * 2;
      hn::Store(hn::InterleaveLower(d64, even_sum, even_square), d64, out);
      hn::Store(hn::InterleaveLower(d64, odd_sum, odd_square), d64,
                out + blocks * 2);
      hn::Store(hn::InterleaveUpper(d64, even_sum, even_square), d64,
                out + blocks * 4);
      hn::Store(hn::InterleaveUpper(d64, odd_sum, odd_square), d64,
                out + blocks * 6);
    }
    i += batch;
    if (hn::AllTrue(d32, hn::Eq(differs, hn::Zero(d32)))) {
      // One cell: additions to memory would wait for each other.
      auto even = hn::Zero(d_cell);
      auto odd = hn::Zero(d_cell);
      for (int64_t k = 0; k < batch * 2; k += 4) {
        even = hn::Add(even, hn::Load(d_cell, addend + k));
        odd = hn::Add(odd, hn::Load(d_cell, addend + k + 2));
      }
      uint64_t* to = &table.cells[first_cell].count_and_low_sum;
      hn::Store(hn::Add(hn::Load(d_cell, to), hn::Add(even, odd)), d_cell, to);
      table.is_touched[first_cell >> table.group_shift] = 1;
      continue;
    }
    for (int64_t k = 0; k < batch; k += lanes) {
      for (int64_t part = 0; part < 4; ++part) {
        const uint64_t* from = addend + (k + part * blocks) * 2;
        for (int64_t block = 0; block < blocks; ++block) {
          const uint32_t cell = index[k + block * 4 + part];
          uint64_t* to = &table.cells[cell].count_and_low_sum;
          hn::Store(
              hn::Add(hn::Load(d_cell, to), hn::Load(d_cell, from + block * 2)),
              d_cell, to);
          table.is_touched[cell >> table.group_shift] = 1;
        }
      }
    }
  }
  AddToTableScalar(in + i * 4, count - i, table);
}

void ToFloats(ElementType type, const uint8_t* in, int64_t count, float* out) {
  if (type == ElementType::kFloat64) {
    ToHistogramFloatsScalar(type, in, count, out);
  } else {
    Widen(type, in, count, out);
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
      cells_(size_t{1} << (9 + mantissa_bits)),
      is_touched_(cells_.size() >> GroupShift(mantissa_bits)) {}

void BinTable::Add(const uint8_t* in, int64_t count) {
  const TableView view{23 - mantissa_bits_, GroupShift(mantissa_bits_),
                       cells_.data(), is_touched_.data()};
  room_ -= count;
  if (internal::UsesScalarKernels()) {
    AddToTableScalar(in, count, view);
  } else {
    HWY_DYNAMIC_DISPATCH(AddToTable)(in, count, view);
  }
}

absl::Span<const PackedBin> BinTable::Drain() {
  const uint32_t groups = static_cast<uint32_t>(is_touched_.size());
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
