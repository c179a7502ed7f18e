#include "core/calibrate/mixed_precision.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/mixture_search.h"
#include "core/calibrate/precision_option.h"
#include "core/parallel/stop_token.h"
#include "core/types/portable_log.h"

namespace quantd::core {
namespace {

bool IsSmaller(const PrecisionOption& a, const PrecisionOption& b) {
  if (a.size_bytes != b.size_bytes) return a.size_bytes < b.size_bytes;
  if (a.noise() != b.noise()) return a.noise() < b.noise();
  return a.spec_index < b.spec_index;
}

bool IsQuieter(const PrecisionOption& a, const PrecisionOption& b) {
  if (a.noise() != b.noise()) return a.noise() < b.noise();
  return IsSmaller(a, b);
}

bool HasAtLeast(const PrecisionOption& option, double min_sqnr_db) {
  const double noise = option.noise_to_signal;
  if (!(noise <= std::numeric_limits<double>::max())) return false;
  if (noise < std::numeric_limits<double>::min()) return true;
  constexpr double kLn10 = 2.302585092994046;
  // Tolerance of the logarithms: the noise of a round number of decibels meets
  // it.
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
    return (options[from].noise() - options[to].noise()) /
           static_cast<double>(options[to].size_bytes -
                               options[from].size_bytes);
  };
  std::vector<int> hull;
  hull.reserve(order.size());
  for (const int i : order) {
    if (!hull.empty() && !(options[i].noise() < options[hull.back()].noise())) {
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

// The first with that spec, or -1.
int OptionOf(const TensorOptions& options, int spec_index) {
  for (int i = 0; i < static_cast<int>(options.size()); ++i) {
    if (options[i].spec_index == spec_index) return i;
  }
  return -1;
}

// Looks at the stop token once in so many tensors: options are at most some
// dozens, and a hull of them takes microseconds.
constexpr size_t kTensorsAtOnce = 64;

bool IsStopped(StopToken stop, size_t tensor) {
  return tensor % kTensorsAtOnce == 0 && stop.stopped();
}

// An option of each tensor, and the bytes that they leave.
class BudgetedChoice {
 public:
  BudgetedChoice(absl::Span<const TensorOptions> tensors,
                 int64_t max_size_bytes)
      : tensors_(tensors), left_(max_size_bytes) {
    options_.reserve(tensors.size());
  }

  const std::vector<int>& options() const { return options_; }
  absl::int128 left() const { return left_; }

  // The option of the next tensor.
  void Add(int option) {
    left_ -= tensors_[options_.size()][option].size_bytes;
    options_.push_back(option);
  }
  void Change(size_t tensor, int option) {
    left_ -= MoreBytes(tensor, option);
    options_[tensor] = option;
  }
  bool Fits(size_t tensor, int option) const {
    return MoreBytes(tensor, option) <= left_;
  }

  // In order of tensors, as others add it up too: the mixture is never above
  // one spec for all by how sums are rounded.
  double Noise() const {
    double noise = 0;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      noise += tensors_[i][options_[i]].noise();
    }
    return noise;
  }

 private:
  int64_t MoreBytes(size_t tensor, int to) const {
    const TensorOptions& options = tensors_[tensor];
    return options[to].size_bytes - options[options_[tensor]].size_bytes;
  }

  absl::Span<const TensorOptions> tensors_;
  std::vector<int> options_;
  absl::int128 left_;
};

// One spec for all tensors so far.
struct UniformMixture {
  int spec_index;
  absl::int128 size_bytes;
  double noise;
};

// Leaves those that the tensor has too.
void AddTensor(const TensorOptions& options,
               std::vector<UniformMixture>* uniforms) {
  size_t kept = 0;
  for (UniformMixture& uniform : *uniforms) {
    const int i = OptionOf(options, uniform.spec_index);
    if (i < 0) continue;
    uniform.size_bytes += options[i].size_bytes;
    uniform.noise += options[i].noise();
    (*uniforms)[kept++] = uniform;
  }
  uniforms->resize(kept);
}

// The best that fits, or null.
const UniformMixture* BestOf(absl::Span<const UniformMixture> uniforms,
                             int64_t max_size_bytes) {
  const UniformMixture* best = nullptr;
  for (const UniformMixture& uniform : uniforms) {
    if (uniform.size_bytes <= max_size_bytes &&
        (best == nullptr || uniform.noise < best->noise)) {
      best = &uniform;
    }
  }
  return best;
}

// From one option on the hull of a tensor to the next.
struct Step {
  double slope;
  size_t tensor;
  // The index in the hull of where it leads.
  size_t next;

  // Steepest first, then in order of tensors.
  bool operator<(const Step& other) const {
    if (slope != other.slope) return slope < other.slope;
    return tensor > other.tensor;
  }
};

// Noise that an option of a tensor would save.
struct Saving {
  double noise;
  size_t tensor;
  int option;

  bool operator<(const Saving& other) const {
    if (noise != other.noise) return noise < other.noise;
    return tensor > other.tensor;
  }
};

// With room for `size`: at most one of each tensor is in a queue.
template <typename T>
std::priority_queue<T> QueueOf(size_t size) {
  std::vector<T> room;
  room.reserve(size);
  return std::priority_queue<T>({}, std::move(room));
}

// The choice that costs least at a price.
struct Relaxed {
  // Noise for each byte.
  double price;
  BudgetedChoice bases;
};

// Goes from the smallest options along the hulls, steepest first: the optimum
// of the relaxed problem at each price of a byte, as long as all steps fit.
// `relaxed` is where the first does not, and stays empty if all do; `choice`
// goes on with those that do.
absl::Status TakeSteps(absl::Span<const TensorOptions> tensors,
                       absl::Span<const std::vector<int>> hulls, StopToken stop,
                       BudgetedChoice* choice,
                       absl::optional<Relaxed>* relaxed) {
  auto steps = QueueOf<Step>(tensors.size());
  const auto push = [&](size_t tensor, size_t next) {
    const std::vector<int>& hull = hulls[tensor];
    if (next == hull.size()) return;
    const PrecisionOption& from = tensors[tensor][hull[next - 1]];
    const PrecisionOption& to = tensors[tensor][hull[next]];
    steps.push({(from.noise() - to.noise()) /
                    static_cast<double>(to.size_bytes - from.size_bytes),
                tensor, next});
  };
  for (size_t i = 0; i < tensors.size(); ++i) push(i, 1);
  for (size_t taken = 0; !steps.empty(); ++taken) {
    if (IsStopped(stop, taken)) return StoppedError();
    const Step step = steps.top();
    steps.pop();
    const int to = hulls[step.tensor][step.next];
    if (choice->Fits(step.tensor, to)) {
      choice->Change(step.tensor, to);
      // Along a hull steps become less steep.
      push(step.tensor, step.next + 1);
    } else if (!relaxed->has_value()) {
      // It blocks those after it on the same hull.
      *relaxed = Relaxed{step.slope, *choice};
    }
  }
  return absl::OkStatus();
}

// Gives what is left to the options that save most, on a hull or not. Room only
// shrinks and an option is never taken back for a noisier one, so that what an
// option saves only falls: the most that each tensor saved when it was last
// looked at is a bound.
absl::Status Fill(absl::Span<const TensorOptions> tensors, StopToken stop,
                  BudgetedChoice* choice) {
  auto savings = QueueOf<Saving>(tensors.size());
  // Finds the option that saves most among those that fit; the first wins ties.
  const auto look_at = [&](size_t tensor) {
    const TensorOptions& options = tensors[tensor];
    const double noise = options[choice->options()[tensor]].noise();
    Saving best = {0, tensor, -1};
    for (int i = 0; i < static_cast<int>(options.size()); ++i) {
      const double saved = noise - options[i].noise();
      if (saved > best.noise && choice->Fits(tensor, i)) {
        best.noise = saved;
        best.option = i;
      }
    }
    if (best.option >= 0) savings.push(best);
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (IsStopped(stop, i)) return StoppedError();
    look_at(i);
  }
  for (size_t taken = 0; !savings.empty(); ++taken) {
    if (IsStopped(stop, taken)) return StoppedError();
    const Saving saving = savings.top();
    savings.pop();
    if (choice->Fits(saving.tensor, saving.option)) {
      choice->Change(saving.tensor, saving.option);
    }
    look_at(saving.tensor);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Mixture> SmallestMixture(absl::Span<const TensorOptions> tensors,
                                        double min_sqnr_db, StopToken stop) {
  Mixture mixture;
  mixture.choice.reserve(tensors.size());
  for (const TensorOptions& options : tensors) {
    if (IsStopped(stop, mixture.choice.size())) return StoppedError();
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

absl::StatusOr<Mixture> BestMixture(absl::Span<const TensorOptions> tensors,
                                    int64_t max_size_bytes, StopToken stop) {
  std::vector<std::vector<int>> hulls;
  hulls.reserve(tensors.size());
  std::vector<UniformMixture> uniforms;
  if (!tensors.empty()) {
    uniforms.reserve(tensors[0].size());
    for (const PrecisionOption& option : tensors[0]) {
      uniforms.push_back({option.spec_index, 0, 0});
    }
  }
  // The smallest options first.
  BudgetedChoice choice(tensors, max_size_bytes);
  for (const TensorOptions& options : tensors) {
    if (IsStopped(stop, hulls.size())) return StoppedError();
    hulls.push_back(Hull(options));
    choice.Add(hulls.back().front());
    AddTensor(options, &uniforms);
  }
  if (choice.left() < 0) return Mixture{choice.options(), false};

  absl::optional<Relaxed> relaxed;
  absl::Status status = TakeSteps(tensors, hulls, stop, &choice, &relaxed);
  if (!status.ok()) return status;
  // Everything may be as quiet as can be.
  if (!relaxed.has_value()) return Mixture{choice.options(), true};
  if (status = Fill(tensors, stop, &choice); !status.ok()) return status;
  Mixture best{choice.options(), true};
  double best_noise = choice.Noise();
  const auto compare = [&] {
    const double noise = choice.Noise();
    if (!(noise < best_noise)) return;
    best.choice = choice.options();
    best_noise = noise;
  };

  if (const UniformMixture* uniform = BestOf(uniforms, max_size_bytes)) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (IsStopped(stop, i)) return StoppedError();
      choice.Change(i, OptionOf(tensors[i], uniform->spec_index));
    }
    if (status = Fill(tensors, stop, &choice); !status.ok()) return status;
    compare();
  }

  const absl::StatusOr<absl::optional<std::vector<MixtureChange>>> changes =
      SearchMixture(tensors, relaxed->bases.options(), relaxed->price,
                    relaxed->bases.left(), best.choice, stop);
  if (!changes.ok()) return changes.status();
  if (!changes->has_value()) return best;
  choice = relaxed->bases;
  for (const MixtureChange& change : **changes) {
    choice.Change(change.tensor, change.option);
  }
  if (status = Fill(tensors, stop, &choice); !status.ok()) return status;
  compare();
  return best;
}

int64_t MixtureBytes(int64_t options) {
  return MixtureSearchBytes() +
         options * static_cast<int64_t>(sizeof(UniformMixture));
}

}  // namespace quantd::core
