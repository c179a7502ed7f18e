#include "core/evaluate/distribution.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "core/statistics/histogram.h"
#include "core/types/float_convert.h"
#include "core/types/portable_log.h"

namespace quantd::core {
namespace {

constexpr int kLinearBins = 256;

float ToFloat(float x) { return x; }

float ToFloat(double x) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(x, -kLargest, kLargest));
}

// HistogramKey of 7 mantissa bits, in line.
uint32_t KeyOf(float x) {
  const auto bits = BitsAs<uint32_t>(x);
  const uint32_t flip = bits >> 31 != 0 ? 0xFFFFFFFF : 0x80000000;
  return (bits ^ flip) >> 16;
}

// Bias of the exponent in the bits of float64.
constexpr int kExponentBias = 1023;

}  // namespace

void DistributionCounts::KeyCounts::Merge(const KeyCounts& other) {
  for (int p = 0; p < kPages; ++p) {
    if (other.pages_[p] == nullptr) continue;
    for (int k = 0; k < kPageKeys; ++k) {
      const int64_t count = (*other.pages_[p])[k];
      if (count != 0) Add(static_cast<uint32_t>(p * kPageKeys + k), count);
    }
  }
}

template <typename Visitor>
void DistributionCounts::KeyCounts::ForEachValue(Visitor&& visit) const {
  for (int p = 0; p < kPages; ++p) {
    if (pages_[p] == nullptr) continue;
    for (int k = 0; k < kPageKeys; ++k) {
      const int64_t count = (*pages_[p])[k];
      if (count == 0) continue;
      const auto key = static_cast<uint32_t>(p * kPageKeys + k);
      visit(HistogramBinEdges(key, kMantissaBits).base, count);
    }
  }
}

template <typename T>
void DistributionCounts::AddPairs(const T* real, const T* restored,
                                  int64_t count, int64_t left_out) {
  // Keys and exponents are computed in loops of their own, which compilers
  // vectorise.
  constexpr int64_t kBlock = 256;
  uint32_t real_key[kBlock];
  uint32_t restored_key[kBlock];
  int32_t exponent[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t block = std::min(kBlock, count - begin);
    const T* x = real + begin;
    const T* y = restored + begin;
    for (int64_t i = 0; i < block; ++i) real_key[i] = KeyOf(ToFloat(x[i]));
    for (int64_t i = 0; i < block; ++i) restored_key[i] = KeyOf(ToFloat(y[i]));
    for (int64_t i = 0; i < block; ++i) {
      const double error = double{y[i]} - double{x[i]};
      exponent[i] = static_cast<int32_t>(BitsAs<uint64_t>(error) >> 52 & 0x7FF);
    }
    for (int64_t i = 0; i < block; ++i) {
      real_.Add(real_key[i], 1);
      restored_.Add(restored_key[i], 1);
      if (exponent[i] != 0) {
        ++errors_[exponent[i] - kExponentBias - kFirstExponent];
        continue;
      }
      const double error = std::fabs(double{y[i]} - double{x[i]});
      if (error == 0) {
        ++zero_errors_;
      } else {
        ++errors_[std::ilogb(error) - kFirstExponent];
      }
    }
  }
  if (left_out == 0) return;
  const uint32_t zero = KeyOf(0);
  real_.Add(zero, -left_out);
  restored_.Add(zero, -left_out);
  zero_errors_ -= left_out;
}

void DistributionCounts::Add(const float* real, const float* restored,
                             int64_t count, int64_t left_out) {
  AddPairs(real, restored, count, left_out);
}

void DistributionCounts::Add(const double* real, const double* restored,
                             int64_t count, int64_t left_out) {
  AddPairs(real, restored, count, left_out);
}

void DistributionCounts::Merge(const DistributionCounts& other) {
  real_.Merge(other.real_);
  restored_.Merge(other.restored_);
  zero_errors_ += other.zero_errors_;
  for (int e = 0; e < kExponents; ++e) errors_[e] += other.errors_[e];
}

ErrorDistribution DistributionCounts::Distribution() const {
  ErrorDistribution distribution;
  distribution.zero = zero_errors_;
  const auto is_not_zero = [](int64_t count) { return count != 0; };
  const auto first = std::find_if(errors_.begin(), errors_.end(), is_not_zero);
  if (first != errors_.end()) {
    const auto last =
        std::find_if(errors_.rbegin(), errors_.rend(), is_not_zero).base();
    distribution.first_exponent =
        kFirstExponent + static_cast<int>(first - errors_.begin());
    distribution.count.assign(first, last);
  }

  int64_t total = 0;
  double min = 0;
  double max = 0;
  real_.ForEachValue([&](double value, int64_t count) {
    if (total == 0) min = value;
    max = value;
    total += count;
  });
  if (total == 0) return distribution;
  const double bins_per_unit = max > min ? kLinearBins / (max - min) : 0;
  const auto bins_of = [&](const KeyCounts& values) {
    std::array<int64_t, kLinearBins> bins = {};
    values.ForEachValue([&](double value, int64_t count) {
      const double bin = std::floor((value - min) * bins_per_unit);
      bins[static_cast<int>(std::clamp(bin, 0.0, kLinearBins - 1.0))] += count;
    });
    return bins;
  };
  const std::array<int64_t, kLinearBins> real = bins_of(real_);
  const std::array<int64_t, kLinearBins> restored = bins_of(restored_);
  const double sum = static_cast<double>(total) + 0.5 * kLinearBins;
  for (int i = 0; i < kLinearBins; ++i) {
    const double p = static_cast<double>(real[i]) + 0.5;
    const double q = static_cast<double>(restored[i]) + 0.5;
    distribution.kl_divergence += p / sum * PortableLog(p / q);
  }
  return distribution;
}

std::unique_ptr<DistributionCounts> DistributionScratch::Take() {
  {
    absl::MutexLock lock(&mutex_);
    if (!free_.empty()) {
      std::unique_ptr<DistributionCounts> counts = std::move(free_.back());
      free_.pop_back();
      return counts;
    }
  }
  return std::make_unique<DistributionCounts>();
}

void DistributionScratch::Return(std::unique_ptr<DistributionCounts> counts) {
  absl::MutexLock lock(&mutex_);
  free_.push_back(std::move(counts));
}

void DistributionScratch::MergeInto(DistributionCounts* counts) {
  absl::MutexLock lock(&mutex_);
  for (const auto& part : free_) counts->Merge(*part);
}

}  // namespace quantd::core
