#include "client/cli/report_data.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace quantd::cli {
namespace {

constexpr int kMantissaBits = 23;
constexpr size_t kBins = 120;
constexpr double kTail = 0.001;
constexpr double kSmallestNormal =
    static_cast<double>(std::numeric_limits<float>::min());

// Elements between two numbers.
struct Bin {
  double low;
  double high;
  double count;
};

// The number whose bits these are in the order of numbers: those of negatives
// are all flipped, and the sign of the others.
double NumberOf(uint32_t bits) {
  const bool is_negative = bits < 0x80000000U;
  const uint32_t pattern = is_negative ? ~bits : bits ^ 0x80000000U;
  float number = 0;
  std::memcpy(&number, &pattern, sizeof(number));
  if (std::isfinite(number)) return static_cast<double>(number);
  const double largest = static_cast<double>(std::numeric_limits<float>::max());
  return is_negative ? -largest : largest;
}

// In ascending order.
std::vector<Bin> BinsOf(const v1::StatisticsState& state) {
  std::vector<Bin> bins;
  if (state.mantissa_bits() > kMantissaBits) return bins;
  const int low_bits = kMantissaBits - static_cast<int>(state.mantissa_bits());
  const uint64_t key_count = uint64_t{1} << (32 - low_bits);
  std::map<uint64_t, double> counts;
  for (const v1::Histogram& histogram : state.histograms()) {
    const int size =
        std::min(histogram.key_delta_size(), histogram.count_size());
    uint64_t key = 0;
    for (int i = 0; i < size; ++i) {
      key += histogram.key_delta(i);
      if (key >= key_count) break;
      counts[key] += static_cast<double>(histogram.count(i));
    }
  }
  const double min = state.statistics().min();
  const double max = state.statistics().max();
  for (const auto& [key, count] : counts) {
    const uint64_t first = key << low_bits;
    const uint64_t last = ((key + 1) << low_bits) - 1;
    const double low = NumberOf(static_cast<uint32_t>(first));
    const double high = NumberOf(static_cast<uint32_t>(last));
    bins.push_back({std::min(std::max(low, min), max),
                    std::min(std::max(high, min), max), count});
  }
  return bins;
}

// Below which that fraction of the elements lies.
double Quantile(const std::vector<Bin>& bins, double total, double fraction) {
  const double wanted = fraction * total;
  double before = 0;
  for (const Bin& bin : bins) {
    if (before + bin.count >= wanted) {
      return bin.low + (wanted - before) / bin.count * (bin.high - bin.low);
    }
    before += bin.count;
  }
  return bins.back().high;
}

}  // namespace

Distribution DistributionOf(const v1::StatisticsState& state) {
  Distribution result;
  const std::vector<Bin> bins = BinsOf(state);
  const double min = state.statistics().min();
  const double max = state.statistics().max();
  if (!std::isfinite(min) || !std::isfinite(max)) return result;
  result.counts.resize(kBins);
  result.first_edge = min < max ? min : min - 0.5;
  result.last_edge = min < max ? max : min + 0.5;
  const double width =
      (result.last_edge - result.first_edge) / static_cast<double>(kBins);
  const auto index_of = [&](double number) -> size_t {
    // The ends are next to each other, or too far apart for their distance.
    if (width <= 0 || !std::isfinite(width)) return 0;
    const double index = std::floor((number - result.first_edge) / width);
    return static_cast<size_t>(
        std::min(std::max(index, 0.0), static_cast<double>(kBins - 1)));
  };
  double total = 0;
  for (const Bin& bin : bins) {
    total += bin.count;
    const size_t first = index_of(bin.low);
    const size_t last = index_of(bin.high);
    for (size_t i = first; i <= last; ++i) {
      const double begin =
          std::max(bin.low, result.first_edge + width * static_cast<double>(i));
      const double end =
          i == last ? bin.high
                    : result.first_edge + width * static_cast<double>(i + 1);
      result.counts[i] +=
          first == last
              ? bin.count
              : bin.count * std::max(end - begin, 0.0) / (bin.high - bin.low);
    }
  }
  if (total > 0) {
    result.low = Quantile(bins, total, kTail / 2);
    result.high = Quantile(bins, total, 1 - kTail / 2);
  }
  return result;
}

Summary SummaryOf(const v1::StatisticsState& state,
                  absl::Span<const double> fractions) {
  Summary summary;
  const int low_bits = kMantissaBits - static_cast<int>(state.mantissa_bits());
  double count = 0;
  double sum = 0;
  double square_sum = 0;
  if (low_bits < 0) return summary;
  for (const v1::Histogram& histogram : state.histograms()) {
    const int size =
        std::min({histogram.key_delta_size(), histogram.count_size(),
                  histogram.low_sum_size(), histogram.low_square_sum_size()});
    uint32_t key = 0;
    for (int i = 0; i < size; ++i) {
      key += histogram.key_delta(i);
      // x = sign * unit * (base + low), of which the bin has the sums.
      uint32_t first = key << low_bits;
      const bool is_negative = first < 0x80000000U;
      first = (is_negative ? ~(first | ((1U << low_bits) - 1)) : first) &
              0x7FFFFFFFU;
      const int exponent = static_cast<int>(first >> kMantissaBits);
      const double unit = std::ldexp(1.0, std::max(exponent, 1) - 150);
      const double base =
          static_cast<double>((first & ((1U << kMantissaBits) - 1)) |
                              (exponent > 0 ? 1U << kMantissaBits : 0U));
      const double n = static_cast<double>(histogram.count(i));
      const double low_sum = static_cast<double>(histogram.low_sum(i));
      double low_square_sum = static_cast<double>(histogram.low_square_sum(i));
      if (i < histogram.low_square_sum_high_size()) {
        low_square_sum += std::ldexp(
            static_cast<double>(histogram.low_square_sum_high(i)), 64);
      }
      count += n;
      sum += (is_negative ? -unit : unit) * (base * n + low_sum);
      square_sum +=
          unit * unit * (base * base * n + 2 * base * low_sum + low_square_sum);
    }
  }
  summary.mean = sum / count;
  summary.deviation = std::sqrt(
      std::max(0.0, square_sum / count - summary.mean * summary.mean));
  const std::vector<Bin> bins = BinsOf(state);
  if (bins.empty() || !(count > 0)) return summary;
  for (const double fraction : fractions) {
    // The bin of zeros has all that is smaller than the normal numbers of
    // float32 too.
    const double quantile = Quantile(bins, count, fraction);
    const bool is_normal = std::abs(quantile) >= kSmallestNormal;
    summary.quantiles.push_back(is_normal ? quantile : 0);
  }
  return summary;
}

}  // namespace quantd::cli
