#include "core/calibrate/distribution.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/numeric/int128.h"
#include "core/statistics/histogram.h"
#include "core/statistics/tensor_statistics.h"

namespace quantd::core {
namespace {

// The float32 that a histogram keeps in place of x.
double AsHistogramKeeps(double x) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(x, -kLargest, kLargest));
}

// count * square_sum - sum^2 of low bits, at least 0.
double ScaledVariance(const HistogramBin& bin) {
  const double count = static_cast<double>(bin.count);
  // Past this the products no longer fit 128 bits.
  constexpr uint64_t kMaxExactCount = uint64_t{1} << 40;
  if (bin.count > kMaxExactCount) {
    const double sum = static_cast<double>(bin.low_sum);
    return std::max(
        0.0, count * static_cast<double>(bin.low_square_sum) - sum * sum);
  }
  const absl::uint128 squares = absl::uint128(bin.count) * bin.low_square_sum;
  const absl::uint128 square = absl::uint128(bin.low_sum) * bin.low_sum;
  return squares > square ? static_cast<double>(squares - square) : 0;
}

}  // namespace

void CompensatedSum::Add(double x) {
  const double sum = sum_ + x;
  carry_ +=
      std::fabs(sum_) >= std::fabs(x) ? (sum_ - sum) + x : (x - sum) + sum_;
  sum_ = sum;
}

Distribution::Distribution(const Histogram& histogram, const Extremes& extremes)
    : Distribution(
          [&] {
            std::vector<Piece> pieces;
            histogram.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
              const BinEdges edges =
                  HistogramBinEdges(key, histogram.mantissa_bits());
              pieces.push_back(
                  {edges.low, edges.high, edges.base, edges.unit, bin});
            });
            return pieces;
          }(),
          extremes) {}

Distribution Distribution::OfMagnitudes(const Histogram& histogram,
                                        const Extremes& extremes) {
  // The bins on either side of zero are mirror images: only the base and the
  // unit of negative ones have another sign.
  std::vector<Piece> pieces;
  histogram.ForEachBin([&](uint32_t key, const HistogramBin& bin) {
    const BinEdges edges = HistogramBinEdges(key, histogram.mantissa_bits());
    pieces.push_back({std::min(std::fabs(edges.low), std::fabs(edges.high)),
                      std::max(std::fabs(edges.low), std::fabs(edges.high)),
                      std::fabs(edges.base), std::fabs(edges.unit), bin});
  });
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.low < b.low; });
  std::vector<Piece> merged;
  for (const Piece& piece : pieces) {
    if (!merged.empty() && merged.back().low == piece.low) {
      merged.back().bin.Add(piece.bin);
    } else {
      merged.push_back(piece);
    }
  }
  Extremes magnitudes = extremes;
  if (!extremes.empty()) {
    magnitudes.max = std::max(std::fabs(extremes.min), std::fabs(extremes.max));
    // If both signs occur, the element nearest to zero is unknown: a value
    // below all magnitudes narrows nothing down.
    constexpr double kUnknown = -1;
    magnitudes.min = extremes.min > 0   ? extremes.min
                     : extremes.max < 0 ? -extremes.max
                                        : kUnknown;
  }
  return Distribution(std::move(merged), magnitudes);
}

Distribution::Distribution(std::vector<Piece> pieces,
                           const Extremes& extremes) {
  masses_.reserve(pieces.size() + 2);
  bool has_max = false;
  // False for NaN, which a state from outside may have.
  const bool has_extremes = extremes.min <= extremes.max;
  const double max = has_extremes ? AsHistogramKeeps(extremes.max) : 0;
  if (has_extremes && !pieces.empty()) {
    const double min = AsHistogramKeeps(extremes.min);
    Piece& first = pieces.front();
    if (TakeOut(min, &first)) AddPoint(min, 1);
    first.low = std::clamp(min, first.low, first.high);
    Piece& last = pieces.back();
    has_max = TakeOut(max, &last);
    last.high = std::clamp(max, last.low, last.high);
  }
  for (const Piece& piece : pieces) AddPiece(piece);
  if (has_max) AddPoint(max, 1);
  AddSums();
}

bool Distribution::TakeOut(double x, Piece* piece) {
  HistogramBin& bin = piece->bin;
  if (bin.count <= 2 || x < piece->low || x > piece->high) return false;
  const uint64_t low = static_cast<uint64_t>((x - piece->base) / piece->unit);
  if (bin.low_sum < low || bin.low_square_sum < absl::uint128(low) * low) {
    return false;
  }
  --bin.count;
  bin.low_sum -= low;
  bin.low_square_sum -= absl::uint128(low) * low;
  return true;
}

void Distribution::AddPoint(double x, uint64_t count) {
  masses_.push_back({x, x, static_cast<double>(count), x, 0, 0, 0});
  rank_.push_back(rank_.back() + count);
}

void Distribution::AddPiece(const Piece& piece) {
  const HistogramBin& bin = piece.bin;
  if (bin.count == 0) return;
  const auto value = [&](uint64_t low) {
    return std::clamp(piece.base + static_cast<double>(low) * piece.unit,
                      piece.low, piece.high);
  };
  if (bin.count == 1) return AddPoint(value(bin.low_sum), 1);
  const double scaled_variance = ScaledVariance(bin);
  if (scaled_variance == 0 && bin.low_sum % bin.count == 0) {
    AddPoint(value(bin.low_sum / bin.count), bin.count);
    return;
  }
  if (bin.count == 2) {
    // With a sum s and a difference d the two are (s - d) / 2 and (s + d) / 2;
    // 2 * (sum of squares) - s^2 is d^2.
    const double root = std::sqrt(scaled_variance);
    const uint64_t difference =
        root <= static_cast<double>(bin.low_sum) && root < 0x1p32
            ? static_cast<uint64_t>(std::llround(root))
            : 0;
    if (static_cast<double>(difference) * static_cast<double>(difference) ==
            scaled_variance &&
        (bin.low_sum - difference) % 2 == 0) {
      const double a = value((bin.low_sum - difference) / 2);
      const double b = value((bin.low_sum + difference) / 2);
      AddPoint(std::min(a, b), 1);
      AddPoint(std::max(a, b), 1);
      return;
    }
  }
  constexpr double kSqrt3 = 1.7320508075688772;
  const double count = static_cast<double>(bin.count);
  const double mean = std::clamp(
      piece.base + piece.unit * (static_cast<double>(bin.low_sum) / count),
      piece.low, piece.high);
  const double spread = scaled_variance / count * piece.unit * piece.unit;
  // No distribution on [low, high] has more.
  const double variance =
      std::min(spread / count, (mean - piece.low) * (piece.high - mean));
  masses_.push_back({piece.low, piece.high, count, mean, spread, variance,
                     kSqrt3 * std::sqrt(variance)});
  rank_.push_back(rank_.back() + bin.count);
}

void Distribution::AddSums() {
  const size_t size = masses_.size();
  high_.reserve(size);
  for (const Mass& mass : masses_) high_.push_back(mass.high);
  moments_.resize(size + 1);
  const size_t zero = static_cast<size_t>(
      std::lower_bound(high_.begin(), high_.end(), 0.0) - high_.begin());
  CompensatedSum total;
  CompensatedSum signal;
  const auto run = [&](size_t from, size_t to, double sign) {
    CompensatedSum sum;
    CompensatedSum square_sum;
    double count = 0;
    for (size_t i = from; i != to;) {
      const Mass& mass = masses_[sign > 0 ? i : i - 1];
      count += mass.count;
      sum.Add(mass.count * mass.mean);
      const double squares = mass.spread + mass.count * mass.mean * mass.mean;
      square_sum.Add(squares);
      total.Add(mass.count * mass.mean);
      signal.Add(squares);
      sign > 0 ? ++i : --i;
      moments_[i] = {sign * count, sign * sum.value(),
                     sign * square_sum.value()};
    }
  };
  run(zero, size, 1);
  run(zero, 0, -1);
  sum_ = total.value();
  signal_ = signal.value();
}

int64_t Distribution::memory_bytes() const {
  return static_cast<int64_t>(masses_.capacity() * sizeof(Mass) +
                              high_.capacity() * sizeof(double) +
                              rank_.capacity() * sizeof(uint64_t) +
                              moments_.capacity() * sizeof(Moments));
}

size_t Distribution::FirstAbove(size_t first, double x) const {
  const size_t size = high_.size();
  size_t step = 1;
  size_t low = first;
  // high_[low - 1] <= x from here on, and high_[high] > x at the end.
  size_t high = first;
  while (high < size && high_[high] <= x) {
    low = high + 1;
    high += step;
    step *= 2;
  }
  high = std::min(high, size);
  return static_cast<size_t>(
      std::upper_bound(high_.begin() + static_cast<ptrdiff_t>(low),
                       high_.begin() + static_cast<ptrdiff_t>(high), x) -
      high_.begin());
}

double Distribution::SquaredDistance(size_t first, size_t last,
                                     double value) const {
  // A few masses are better summed than subtracted.
  constexpr size_t kShort = 6;
  if (last - first <= kShort) {
    double sum = 0;
    for (size_t i = first; i < last; ++i) {
      const double distance = masses_[i].mean - value;
      sum += masses_[i].spread + masses_[i].count * distance * distance;
    }
    return sum;
  }
  const Moments& a = moments_[first];
  const Moments& b = moments_[last];
  const double squares = (b.square_sum - a.square_sum) -
                         2 * value * (b.sum - a.sum) +
                         value * value * (b.count - a.count);
  return std::max(0.0, squares);
}

}  // namespace quantd::core
