#include "core/calibrate/mixed_precision.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

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

}  // namespace

MixtureChooser MixtureChooser::Smallest(absl::Span<const TensorOptions> tensors,
                                        double min_sqnr_db) {
  MixtureChooser chooser(tensors, Stage::kSmallest);
  chooser.min_sqnr_db_ = min_sqnr_db;
  return chooser;
}

MixtureChooser MixtureChooser::Best(absl::Span<const TensorOptions> tensors,
                                    int64_t max_size_bytes) {
  MixtureChooser chooser(tensors, Stage::kHulls);
  chooser.left_ = max_size_bytes;
  return chooser;
}

bool MixtureChooser::Run(const TimeSlice& slice) {
  while (stage_ != Stage::kDone) {
    RunOne();
    if (slice.over()) break;
  }
  return stage_ == Stage::kDone;
}

void MixtureChooser::RunOne() {
  const bool is_last = next_ == tensors_.size();
  switch (stage_) {
    case Stage::kSmallest:
      if (is_last) {
        stage_ = Stage::kDone;
      } else {
        ChooseSmallest(tensors_[next_++]);
      }
      return;
    case Stage::kHulls:
      if (!is_last) return BeginHull(next_++);
      mixture_.target_met = left_ >= 0;
      stage_ = mixture_.target_met ? Stage::kSteps : Stage::kDone;
      return;
    // Along the hulls, steepest first: the optimum of the relaxed problem at
    // each price of a byte, as long as all steps fit.
    case Stage::kSteps:
      if (!steps_.empty()) return TakeStep();
      stage_ = Stage::kLook;
      next_ = 0;
      return;
    // What is left goes to the options that save most, on a hull or not. Room
    // only shrinks and an option is never taken back for a noisier one, so that
    // what an option saves only falls: the most that each tensor saved when it
    // was last looked at is a bound.
    case Stage::kLook:
      if (!is_last) return LookAt(next_++);
      stage_ = Stage::kFill;
      return;
    case Stage::kFill:
      if (!savings_.empty()) return TakeSaving();
      stage_ = Stage::kDone;
      return;
    case Stage::kDone:
      return;
  }
}

void MixtureChooser::ChooseSmallest(const TensorOptions& options) {
  int best = -1;
  int quietest = 0;
  for (int i = 0; i < static_cast<int>(options.size()); ++i) {
    if (IsQuieter(options[i], options[quietest])) quietest = i;
    if (HasAtLeast(options[i], min_sqnr_db_) &&
        (best < 0 || IsSmaller(options[i], options[best]))) {
      best = i;
    }
  }
  if (best < 0) mixture_.target_met = false;
  mixture_.choice.push_back(best < 0 ? quietest : best);
}

void MixtureChooser::BeginHull(size_t tensor) {
  const TensorOptions& options = tensors_[tensor];
  hulls_.push_back(Hull(options));
  const int smallest = hulls_.back().front();
  mixture_.choice.push_back(smallest);
  left_ -= options[smallest].size_bytes;
  PushStep(tensor, 1);
}

void MixtureChooser::PushStep(size_t tensor, size_t next) {
  const std::vector<int>& hull = hulls_[tensor];
  if (next == hull.size()) return;
  const PrecisionOption& from = tensors_[tensor][hull[next - 1]];
  const PrecisionOption& to = tensors_[tensor][hull[next]];
  steps_.push({(Noise(from) - Noise(to)) /
                   static_cast<double>(to.size_bytes - from.size_bytes),
               tensor, next});
}

void MixtureChooser::TakeStep() {
  const Step step = steps_.top();
  steps_.pop();
  const int to = hulls_[step.tensor][step.next];
  const int64_t bytes = MoreBytes(step.tensor, to);
  // One that does not fit blocks those after it on the same hull.
  if (!Fits(bytes)) return;
  left_ -= bytes;
  mixture_.choice[step.tensor] = to;
  // Along a hull steps become less steep.
  PushStep(step.tensor, step.next + 1);
}

// Of the options that fit, the first of those that save most.
void MixtureChooser::LookAt(size_t tensor) {
  const TensorOptions& options = tensors_[tensor];
  Saving best = {0, tensor, -1};
  for (int i = 0; i < static_cast<int>(options.size()); ++i) {
    const double saved =
        Noise(options[mixture_.choice[tensor]]) - Noise(options[i]);
    if (saved > best.noise && Fits(MoreBytes(tensor, i))) {
      best.noise = saved;
      best.option = i;
    }
  }
  if (best.option >= 0) savings_.push(best);
}

void MixtureChooser::TakeSaving() {
  const Saving saving = savings_.top();
  savings_.pop();
  const int64_t bytes = MoreBytes(saving.tensor, saving.option);
  if (Fits(bytes)) {
    left_ -= bytes;
    mixture_.choice[saving.tensor] = saving.option;
  }
  LookAt(saving.tensor);
}

int64_t MixtureChooser::MoreBytes(size_t tensor, int to) const {
  const TensorOptions& options = tensors_[tensor];
  return options[to].size_bytes - options[mixture_.choice[tensor]].size_bytes;
}

Mixture SmallestMixture(absl::Span<const TensorOptions> tensors,
                        double min_sqnr_db) {
  MixtureChooser chooser = MixtureChooser::Smallest(tensors, min_sqnr_db);
  chooser.Run(TimeSlice::Endless());
  return chooser.Take();
}

Mixture BestMixture(absl::Span<const TensorOptions> tensors,
                    int64_t max_size_bytes) {
  MixtureChooser chooser = MixtureChooser::Best(tensors, max_size_bytes);
  chooser.Run(TimeSlice::Endless());
  return chooser.Take();
}

}  // namespace quantd::core
