#include "core/calibrate/mixed_precision.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <queue>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/types/span.h"
#include "core/calibrate/entropy.h"

namespace quantd::core {
namespace {

// Noise that can be subtracted: what is not finite is worse than anything.
double Noise(const PrecisionOption& option) {
  constexpr double kMost = 1e300;
  return option.noise_to_signal < kMost ? option.noise_to_signal : kMost;
}

bool IsSmaller(const PrecisionOption& a, const PrecisionOption& b) {
  if (a.size_bytes != b.size_bytes) return a.size_bytes < b.size_bytes;
  if (Noise(a) != Noise(b)) return Noise(a) < Noise(b);
  return a.spec_index < b.spec_index;
}

bool IsQuieter(const PrecisionOption& a, const PrecisionOption& b) {
  if (Noise(a) != Noise(b)) return Noise(a) < Noise(b);
  return IsSmaller(a, b);
}

bool HasAtLeast(const PrecisionOption& option, double min_sqnr_db) {
  const double noise = option.noise_to_signal;
  if (!(noise <= std::numeric_limits<double>::max())) return false;
  if (noise < std::numeric_limits<double>::min()) return true;
  constexpr double kLn10 = 2.302585092994046;
  // Of the logarithms, so that a round figure of decibels is met by its noise.
  constexpr double kRounding = 1e-12;
  return PortableLog(noise) <= -min_sqnr_db * kLn10 / 10 + kRounding;
}

// The indices of the options on the lower convex hull of noise over size,
// smallest first.
std::vector<int> Hull(const TensorOptions& options) {
  std::vector<int> order(options.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return IsSmaller(options[a], options[b]); });
  // Noise that is saved for each byte more.
  const auto slope = [&](int from, int to) {
    return (Noise(options[from]) - Noise(options[to])) /
           static_cast<double>(options[to].size_bytes -
                               options[from].size_bytes);
  };
  std::vector<int> hull;
  for (const int i : order) {
    if (!hull.empty() && !(Noise(options[i]) < Noise(options[hull.back()]))) {
      continue;
    }
    while (hull.size() >= 2 &&
           slope(hull[hull.size() - 2], hull.back()) <= slope(hull.back(), i)) {
      hull.pop_back();
    }
    hull.push_back(i);
  }
  return hull;
}

// From one option on the hull of a tensor to the next.
struct Step {
  size_t tensor;
  int from;
  int to;
  double slope;
};

}  // namespace

Mixture SmallestMixture(absl::Span<const TensorOptions> tensors,
                        double min_sqnr_db) {
  Mixture mixture;
  for (const TensorOptions& options : tensors) {
    int best = -1;
    int quietest = 0;
    for (int i = 0; i < static_cast<int>(options.size()); ++i) {
      if (IsQuieter(options[i], options[quietest])) quietest = i;
      if (HasAtLeast(options[i], min_sqnr_db) &&
          (best < 0 || IsSmaller(options[i], options[best]))) {
        best = i;
      }
    }
    if (best < 0) mixture.target_met = false;
    mixture.choice.push_back(best < 0 ? quietest : best);
  }
  return mixture;
}

Mixture BestMixture(absl::Span<const TensorOptions> tensors,
                    int64_t max_size_bytes) {
  Mixture mixture;
  absl::int128 left = max_size_bytes;
  std::vector<Step> steps;
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const TensorOptions& options = tensors[tensor];
    const std::vector<int> hull = Hull(options);
    mixture.choice.push_back(hull.front());
    left -= options[hull.front()].size_bytes;
    for (size_t i = 1; i < hull.size(); ++i) {
      const PrecisionOption& from = options[hull[i - 1]];
      const PrecisionOption& to = options[hull[i]];
      steps.push_back(
          {tensor, hull[i - 1], hull[i],
           (Noise(from) - Noise(to)) /
               static_cast<double>(to.size_bytes - from.size_bytes)});
    }
  }
  if (left < 0) {
    mixture.target_met = false;
    return mixture;
  }

  // Along the hulls, steepest first: the optimum of the relaxed problem at each
  // price of a byte, as long as all steps fit.
  std::stable_sort(
      steps.begin(), steps.end(),
      [](const Step& a, const Step& b) { return a.slope > b.slope; });
  const auto more_bytes = [&](size_t tensor, int to) {
    const TensorOptions& options = tensors[tensor];
    return options[to].size_bytes - options[mixture.choice[tensor]].size_bytes;
  };
  for (const Step& step : steps) {
    // A step that did not fit blocks those after it on the same hull.
    if (mixture.choice[step.tensor] != step.from) continue;
    const int64_t bytes = more_bytes(step.tensor, step.to);
    if (bytes > left) continue;
    left -= bytes;
    mixture.choice[step.tensor] = step.to;
  }

  // What is left goes to the options that save most, on a hull or not. Room
  // only shrinks and an option is never taken back for a noisier one, so that
  // what an option saves only falls: the most that each tensor saved when it
  // was last looked at is a bound.
  struct Saving {
    double noise;
    size_t tensor;
    int option;

    bool operator<(const Saving& other) const {
      if (noise != other.noise) return noise < other.noise;
      return tensor > other.tensor;
    }
  };
  std::priority_queue<Saving> savings;
  // Of the options that fit, the first of those that save most.
  const auto look_at = [&](size_t tensor) {
    const TensorOptions& options = tensors[tensor];
    Saving best = {0, tensor, -1};
    for (int i = 0; i < static_cast<int>(options.size()); ++i) {
      const double saved =
          Noise(options[mixture.choice[tensor]]) - Noise(options[i]);
      if (saved > best.noise && more_bytes(tensor, i) <= left) {
        best.noise = saved;
        best.option = i;
      }
    }
    if (best.option >= 0) savings.push(best);
  };
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) look_at(tensor);
  while (!savings.empty()) {
    const Saving saving = savings.top();
    savings.pop();
    const int64_t bytes = more_bytes(saving.tensor, saving.option);
    if (bytes <= left) {
      left -= bytes;
      mixture.choice[saving.tensor] = saving.option;
    }
    look_at(saving.tensor);
  }
  return mixture;
}

}  // namespace quantd::core
