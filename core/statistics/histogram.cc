#include "core/statistics/histogram.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/numeric/int128.h"
#include "absl/types/span.h"
#include "core/statistics/bin_table.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

constexpr int kFloat32MantissaBits = 23;
constexpr uint32_t kSign = 0x80000000;

// The pattern in the order of the elements.
uint32_t Ordered(float x) {
  const uint32_t bits = BitsAs<uint32_t>(x + 0.0f);
  return bits & kSign ? ~bits : bits | kSign;
}

template <typename To>
To Convert(const PackedBin& bin) {
  if constexpr (std::is_same_v<To, PackedBin>) {
    return bin;
  } else {
    return {bin.key, {bin.count, bin.low_sum, bin.low_square_sum}};
  }
}

// Narrowing: the caller knows that the counters fit.
template <typename To>
To Convert(const KeyedBin& bin) {
  if constexpr (std::is_same_v<To, KeyedBin>) {
    return bin;
  } else {
    return {bin.key, static_cast<uint32_t>(bin.bin.count), bin.bin.low_sum,
            absl::Uint128Low64(bin.bin.low_square_sum)};
  }
}

void AddTo(const PackedBin& from, PackedBin* to) {
  to->count += from.count;
  to->low_sum += from.low_sum;
  to->low_square_sum += from.low_square_sum;
}

void AddTo(const KeyedBin& from, KeyedBin* to) { to->bin.Add(from.bin); }

// Moves what `table` has of `bins` there, unless those are too many for it to
// be worth while. Returns the number of elements.
template <typename Bin>
uint64_t TakeKnown(BinTable* table, std::vector<Bin>* bins) {
  constexpr size_t kBinsPerElement = 4;
  uint64_t count = 0;
  if (bins->size() > kBinsPerElement * static_cast<size_t>(table->count())) {
    return count;
  }
  for (Bin& bin : *bins) {
    const PackedBin taken = table->Take(bin.key);
    count += taken.count;
    AddTo(Convert<Bin>(taken), &bin);
  }
  return count;
}

// Adds `bins` to `to`, both in ascending order of key.
template <typename From, typename To>
void MergeSorted(const From* bins, size_t bin_count, std::vector<To>* to) {
  if (to->empty() || to->back().key < bins[0].key) {
    const size_t end = to->size() + bin_count;
    if (end > to->capacity()) to->reserve(end + end / 8);
    for (size_t i = 0; i < bin_count; ++i) {
      to->push_back(Convert<To>(bins[i]));
    }
    return;
  }
  // Mostly all the keys are there.
  size_t missing = 0;
  size_t j = 0;
  for (size_t i = 0; i < bin_count; ++i) {
    const uint32_t key = bins[i].key;
    if (bin_count == 1) {
      j = std::lower_bound(
              to->begin(), to->end(), key,
              [](const To& bin, uint32_t key) { return bin.key < key; }) -
          to->begin();
    }
    while (j < to->size() && (*to)[j].key < key) ++j;
    if (j < to->size() && (*to)[j].key == key) {
      AddTo(Convert<To>(bins[i]), &(*to)[j]);
    } else {
      ++missing;
    }
  }
  if (missing == 0) return;
  size_t from = to->size();
  size_t end = from + missing;
  if (end > to->capacity()) to->reserve(end + end / 8);
  to->resize(end);
  // Makes room from the back.
  for (size_t i = bin_count; from < end;) {
    const From& bin = bins[i - 1];
    if (from > 0 && (*to)[from - 1].key >= bin.key) {
      if ((*to)[from - 1].key == bin.key) --i;
      (*to)[--end] = (*to)[--from];
    } else {
      (*to)[--end] = Convert<To>(bin);
      --i;
    }
  }
}

// So many elements fit the narrow counters, however large their low bits.
uint64_t NarrowCount(int mantissa_bits) {
  return uint64_t{1} << std::min(
             31, 64 - 2 * (kFloat32MantissaBits - mantissa_bits));
}

bool AllFinite(const float* x, int64_t count) {
  constexpr uint32_t kExponent = 0x7F800000;
  uint32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    found |= (BitsAs<uint32_t>(x[i]) & kExponent) == kExponent;
  }
  return found == 0;
}

// A sum with the rounding errors of its additions kept aside.
class TwoSum {
 public:
  void Add(double x) {
    const double sum = sum_ + x;
    const double rest = sum - sum_;
    error_ += (sum_ - (sum - rest)) + (x - rest);
    sum_ = sum;
  }
  double Get() const { return sum_ + error_; }

 private:
  double sum_ = 0;
  double error_ = 0;
};

}  // namespace

int DefaultMantissaBits(int64_t scale_count) {
  return scale_count <= 1 ? 7 : (scale_count <= 256 ? 5 : 3);
}

uint32_t HistogramKey(float x, int mantissa_bits) {
  return Ordered(x) >> (kFloat32MantissaBits - mantissa_bits);
}

BinEdges HistogramBinEdges(uint32_t key, int mantissa_bits) {
  const int shift = kFloat32MantissaBits - mantissa_bits;
  const uint32_t first = key << shift;
  const uint32_t last = first | ((uint32_t{1} << shift) - 1);
  const auto value = [](uint32_t ordered) {
    return BitsAs<float>(ordered & kSign ? ordered ^ kSign : ~ordered);
  };
  BinEdges edges;
  edges.low = value(first);
  edges.high = value(last);
  const bool is_negative = !(first & kSign);
  edges.base = is_negative ? edges.high : edges.low;
  const uint32_t exponent =
      (BitsAs<uint32_t>(edges.high) >> kFloat32MantissaBits) & 0xFF;
  const double unit =
      std::ldexp(1.0, static_cast<int>(std::max<uint32_t>(exponent, 1)) - 150);
  edges.unit = is_negative ? -unit : unit;
  return edges;
}

Histogram::Histogram(int mantissa_bits)
    : mantissa_bits_(static_cast<uint8_t>(mantissa_bits)) {}

Histogram::Histogram(const Histogram& other)
    : bins_(other.bins_ ? std::make_unique<Bins>(*other.bins_) : nullptr),
      count_(other.count_ - other.value_count_),
      mantissa_bits_(other.mantissa_bits_) {
  if (other.value_count_ > 0) {
    AppendValues(other.values_.get(), other.value_count_);
  }
}

Histogram& Histogram::operator=(const Histogram& other) {
  if (this != &other) *this = Histogram(other);
  return *this;
}

void Histogram::Add(const float* x, int64_t count) {
  if (value_count_ + count <= kMaxValues) {
    Add(x, count, nullptr);
  } else {
    const BinTableLease lease(mantissa_bits_);
    Add(x, count, lease.get());
  }
}

void Histogram::Add(const float* x, int64_t count, BinTable* table) {
  if (value_count_ + count <= kMaxValues) {
    if (AllFinite(x, count)) {
      if (count > 0) AppendValues(x, static_cast<int>(count));
      return;
    }
    float finite[kMaxValues];
    int finite_count = 0;
    for (int64_t i = 0; i < count; ++i) {
      finite[finite_count] = x[i];
      finite_count += std::isfinite(x[i]);
    }
    if (finite_count > 0) AppendValues(finite, finite_count);
    return;
  }
  table->Add(reinterpret_cast<const uint8_t*>(values_.get()), value_count_);
  count_ -= value_count_;
  value_count_ = 0;
  for (int64_t i = 0; i < count;) {
    const int64_t part = std::min(count - i, table->room());
    table->Add(reinterpret_cast<const uint8_t*>(x + i), part);
    i += part;
    if (table->room() == 0) Drain(table);
  }
  Drain(table);
}

void Histogram::Drain(BinTable* table) {
  // Mostly all the bins are there, and are soon looked through.
  if (bins_ != nullptr) {
    const uint64_t added = static_cast<uint64_t>(table->count());
    if (!bins_->is_wide && count_ + added <= NarrowCount(mantissa_bits_)) {
      count_ += TakeKnown(table, &bins_->narrow);
    } else if (bins_->is_wide) {
      count_ += TakeKnown(table, &bins_->wide);
    }
  }
  uint64_t count = 0;
  const absl::Span<const PackedBin> bins = table->Drain();
  for (const PackedBin& bin : bins) count += bin.count;
  MergeBins(bins.data(), bins.size(), count);
}

void Histogram::AppendValues(const float* x, int count) {
  const int needed = value_count_ + count;
  if (needed > value_capacity_) {
    const int capacity = std::min(
        kMaxValues, std::max((needed + 3) / 4 * 4, 2 * value_capacity_));
    // Not initialised: that would take as long as the rest.
    std::unique_ptr<float[]> values(new float[capacity]);
    std::copy_n(values_.get(), value_count_, values.get());
    values_ = std::move(values);
    value_capacity_ = static_cast<uint8_t>(capacity);
  }
  std::copy_n(x, count, values_.get() + value_count_);
  value_count_ = static_cast<uint8_t>(needed);
  count_ += count;
}

bool Histogram::AppendBin(uint32_t key, const HistogramBin& bin) {
  if (count_ + bin.count > kMaxValues || bin.count > 2) return false;
  const int shift = kFloat32MantissaBits - mantissa_bits_;
  const uint64_t low_end = uint64_t{1} << shift;
  if (bin.low_sum >= 2 * low_end) return false;
  // With a + b = sum and a^2 + b^2 = square_sum, (b - a)^2 is 2 * square_sum -
  // sum^2: all below 2^44.
  const uint64_t square_sum = absl::Uint128Low64(bin.low_square_sum);
  uint64_t b = bin.low_sum;
  if (bin.count == 2) {
    const double square = static_cast<double>(2 * square_sum) -
                          static_cast<double>(bin.low_sum * bin.low_sum);
    if (!(square >= 0)) return false;
    b = (bin.low_sum + static_cast<uint64_t>(std::sqrt(square))) / 2;
  }
  const uint64_t lows[] = {b, bin.low_sum - b};
  if (b > bin.low_sum || b >= low_end ||
      bin.low_square_sum != lows[0] * lows[0] + lows[1] * lows[1]) {
    return false;
  }
  const uint32_t first = key << shift;
  const uint32_t top = first & kSign ? first ^ kSign : ~first >> shift << shift;
  float x[2];
  for (uint64_t i = 0; i < bin.count; ++i) {
    const uint32_t bits = top | static_cast<uint32_t>(lows[i]);
    if (bits == kSign) return false;
    x[i] = BitsAs<float>(bits);
  }
  AppendValues(x, static_cast<int>(bin.count));
  return true;
}

void Histogram::AddBin(uint32_t key, const HistogramBin& bin) {
  if (AppendBin(key, bin)) return;
  const KeyedBin keyed{key, bin};
  MergeBins(&keyed, 1, bin.count);
}

void Histogram::Merge(const Histogram& other) {
  if (this == &other) {
    Merge(Histogram(other));
    return;
  }
  if (other.bins_ != nullptr) {
    const Bins& bins = *other.bins_;
    const uint64_t count = other.count_ - other.value_count_;
    if (bins.is_wide) {
      MergeBins(bins.wide.data(), bins.wide.size(), count);
    } else {
      MergeBins(bins.narrow.data(), bins.narrow.size(), count);
    }
  }
  if (other.value_count_ > 0) Add(other.values_.get(), other.value_count_);
}

template <typename Bin>
void Histogram::MergeBins(const Bin* bins, size_t bin_count, uint64_t count) {
  if (bin_count == 0) return;
  if (bins_ == nullptr) bins_ = std::make_unique<Bins>();
  count_ += count;
  if (count_ > NarrowCount(mantissa_bits_) && !bins_->is_wide) {
    bins_->is_wide = true;
    bins_->wide.reserve(bins_->narrow.size());
    for (const PackedBin& bin : bins_->narrow) {
      bins_->wide.push_back(Convert<KeyedBin>(bin));
    }
    bins_->narrow = std::vector<PackedBin>();
  }
  if (bins_->is_wide) {
    MergeSorted(bins, bin_count, &bins_->wide);
  } else {
    MergeSorted(bins, bin_count, &bins_->narrow);
  }
}

void Histogram::Visit(
    absl::FunctionRef<void(uint32_t, const HistogramBin&)> visit) const {
  const int shift = kFloat32MantissaBits - mantissa_bits_;
  uint32_t ordered[kMaxValues];
  for (int i = 0; i < value_count_; ++i) ordered[i] = Ordered(values_[i]);
  std::sort(ordered, ordered + value_count_);
  int next_value = 0;
  // Adds the values of `key`, which are next.
  const auto add_values = [&](uint32_t key, HistogramBin* bin) {
    for (; next_value < value_count_ && ordered[next_value] >> shift == key;
         ++next_value) {
      const uint32_t pattern = ordered[next_value];
      const uint64_t low =
          (pattern & kSign ? pattern : ~pattern) & ((uint32_t{1} << shift) - 1);
      bin->Add({1, low, low * low});
    }
  };
  const auto visit_values_below = [&](uint64_t key_end) {
    while (next_value < value_count_ &&
           ordered[next_value] >> shift < key_end) {
      const uint32_t key = ordered[next_value] >> shift;
      HistogramBin bin;
      add_values(key, &bin);
      visit(key, bin);
    }
  };
  const auto visit_bins = [&](const auto& bins) {
    for (const auto& stored : bins) {
      visit_values_below(stored.key);
      HistogramBin bin = Convert<KeyedBin>(stored).bin;
      add_values(stored.key, &bin);
      visit(stored.key, bin);
    }
  };
  if (bins_ != nullptr) {
    visit_bins(bins_->narrow);
    visit_bins(bins_->wide);
  }
  visit_values_below(uint64_t{1} << 32);
}

int64_t Histogram::memory_bytes() const {
  size_t bytes = sizeof(*this) + value_capacity_ * sizeof(float);
  if (bins_ != nullptr) {
    bytes += sizeof(Bins) + bins_->narrow.capacity() * sizeof(PackedBin) +
             bins_->wide.capacity() * sizeof(KeyedBin);
  }
  return static_cast<int64_t>(bytes);
}

bool operator==(const Histogram& a, const Histogram& b) {
  if (a.mantissa_bits_ != b.mantissa_bits_ || a.count_ != b.count_) {
    return false;
  }
  std::vector<KeyedBin> bins;
  a.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
    bins.push_back({key, bin});
  });
  size_t i = 0;
  bool is_equal = true;
  b.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
    is_equal =
        is_equal && i < bins.size() && bins[i].key == key && bins[i].bin == bin;
    ++i;
  });
  return is_equal && i == bins.size();
}

Moments BinMoments(const BinEdges& edges, const HistogramBin& bin) {
  // x = unit * (base + low), all integers: base below 2^24, low below 2^21.
  const uint64_t base = static_cast<uint64_t>(edges.base / edges.unit);
  const absl::uint128 sum = absl::uint128(base) * bin.count + bin.low_sum;
  const absl::uint128 square_sum = absl::uint128(base * base) * bin.count +
                                   absl::uint128(2 * base) * bin.low_sum +
                                   bin.low_square_sum;
  return {static_cast<double>(sum) * edges.unit,
          static_cast<double>(square_sum) * edges.unit * edges.unit};
}

Moments HistogramMoments(const Histogram& histogram) {
  TwoSum sum, square_sum;
  histogram.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
    const Moments moments =
        BinMoments(HistogramBinEdges(key, histogram.mantissa_bits()), bin);
    sum.Add(moments.sum);
    square_sum.Add(moments.square_sum);
  });
  return {sum.Get(), square_sum.Get()};
}

}  // namespace quantd::core
