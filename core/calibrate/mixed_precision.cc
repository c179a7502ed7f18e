#include "core/calibrate/mixed_precision.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/types/span.h"
#include "core/calibrate/entropy.h"
#include "core/calibrate/mixture_search.h"
#include "core/calibrate/precision_option.h"
#include "core/parallel/time_slice.h"

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

}  // namespace

MixtureChooser::MixtureChooser(absl::Span<const TensorOptions> tensors,
                               Stage stage)
    : tensors_(tensors), stage_(stage) {
  mixture_.choice.reserve(tensors.size());
}

MixtureChooser MixtureChooser::Smallest(absl::Span<const TensorOptions> tensors,
                                        double min_sqnr_db) {
  MixtureChooser chooser(tensors, Stage::kSmallest);
  chooser.min_sqnr_db_ = min_sqnr_db;
  return chooser;
}

MixtureChooser MixtureChooser::Best(absl::Span<const TensorOptions> tensors,
                                    int64_t max_size_bytes) {
  MixtureChooser chooser(tensors, Stage::kHulls);
  chooser.max_size_bytes_ = max_size_bytes;
  chooser.left_ = max_size_bytes;
  // At most one of each tensor is in a queue.
  std::vector<Step> steps;
  steps.reserve(tensors.size());
  chooser.steps_ = decltype(steps_)({}, std::move(steps));
  std::vector<Saving> savings;
  savings.reserve(tensors.size());
  chooser.savings_ = decltype(savings_)({}, std::move(savings));
  chooser.hulls_.reserve(tensors.size());
  chooser.choice_.reserve(tensors.size());
  if (!tensors.empty()) {
    chooser.uniforms_.reserve(tensors[0].size());
    for (const PrecisionOption& option : tensors[0]) {
      chooser.uniforms_.push_back({option.spec_index, 0, 0});
    }
  }
  return chooser;
}

int64_t MixtureChooser::MemoryBytes(int64_t options) {
  return MixtureSearch::MaxMemoryBytes() +
         options * static_cast<int64_t>(sizeof(Uniform));
}

bool MixtureChooser::Run(const TimeSlice& slice) {
  while (stage_ != Stage::kDone) {
    RunOne();
    if (slice.over()) break;
  }
  return stage_ == Stage::kDone;
}

void MixtureChooser::Begin(Stage stage) {
  stage_ = stage;
  next_ = 0;
}

void MixtureChooser::RunOne() {
  const bool is_last = next_ == tensors_.size();
  switch (stage_) {
    case Stage::kSmallest:
      if (!is_last) return ChooseSmallest(tensors_[next_++]);
      return Begin(Stage::kDone);
    case Stage::kHulls:
      if (!is_last) return BeginHull(next_++);
      return EndHulls();
    // Along the hulls, steepest first: the optimum of the relaxed problem at
    // each price of a byte, as long as all steps fit.
    case Stage::kSteps:
      if (!steps_.empty()) return TakeStep();
      return EndSteps();
    // What is left goes to the options that save most, on a hull or not. Room
    // only shrinks and an option is never taken back for a noisier one, so that
    // what an option saves only falls: the most that each tensor saved when it
    // was last looked at is a bound.
    case Stage::kLook:
      if (!is_last) return LookAt(next_++);
      return Begin(Stage::kFill);
    case Stage::kFill:
      if (!savings_.empty()) return TakeSaving();
      noise_ = 0;
      return Begin(Stage::kSum);
    // In order of tensors, as others add it up too: the mixture is never above
    // one spec for all by how sums are rounded.
    case Stage::kSum:
      if (is_last) return EndSum();
      noise_ += tensors_[next_][choice_[next_]].noise();
      ++next_;
      return;
    case Stage::kUniform:
      if (is_last) return Begin(Stage::kLook);
      Choose(next_, OptionOf(tensors_[next_], uniform_spec_));
      ++next_;
      return;
    case Stage::kCompare:
      if (is_last) return Begin(Stage::kOffer);
      search_->Compare(next_, mixture_.choice[next_]);
      ++next_;
      return;
    case Stage::kOffer:
      if (!is_last) return search_->Offer(next_++);
      return Begin(Stage::kSearch);
    case Stage::kSearch:
      if (!search_->Step()) EndSearch();
      return;
    case Stage::kDone:
      return;
  }
}

void MixtureChooser::EndHulls() {
  mixture_.target_met = left_ >= 0;
  if (mixture_.target_met) return Begin(Stage::kSteps);
  mixture_.choice.swap(choice_);
  Begin(Stage::kDone);
}

void MixtureChooser::EndSteps() {
  if (price_ >= 0) return Begin(Stage::kLook);
  // Everything is as quiet as can be.
  mixture_.choice.swap(choice_);
  Begin(Stage::kDone);
}

void MixtureChooser::EndSum() {
  if (start_ == Start::kRelaxed || noise_ < best_noise_) {
    mixture_.choice = choice_;
    best_noise_ = noise_;
  }
  switch (start_) {
    case Start::kRelaxed:
      start_ = Start::kUniform;
      if (PickUniform()) return Begin(Stage::kUniform);
      ABSL_FALLTHROUGH_INTENDED;
    case Start::kUniform:
      start_ = Start::kSearched;
      search_ = std::make_unique<MixtureSearch>(tensors_, bases_, price_,
                                                bases_left_);
      return Begin(Stage::kCompare);
    case Start::kSearched:
      return Begin(Stage::kDone);
  }
}

void MixtureChooser::EndSearch() {
  if (!search_->found()) return Begin(Stage::kDone);
  choice_ = bases_;
  left_ = bases_left_;
  for (const MixtureSearch::Change& change : search_->Changes()) {
    Choose(change.tensor, change.option);
  }
  Begin(Stage::kLook);
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
  choice_.push_back(smallest);
  left_ -= options[smallest].size_bytes;
  PushStep(tensor, 1);
  AddToUniforms(options);
}

void MixtureChooser::AddToUniforms(const TensorOptions& options) {
  size_t kept = 0;
  for (Uniform& uniform : uniforms_) {
    const int i = OptionOf(options, uniform.spec_index);
    if (i < 0) continue;
    uniform.size_bytes += options[i].size_bytes;
    uniform.noise += options[i].noise();
    uniforms_[kept++] = uniform;
  }
  uniforms_.resize(kept);
}

// The best that fits into uniform_spec_; answers whether there is one.
bool MixtureChooser::PickUniform() {
  const Uniform* best = nullptr;
  for (const Uniform& uniform : uniforms_) {
    if (uniform.size_bytes <= max_size_bytes_ &&
        (best == nullptr || uniform.noise < best->noise)) {
      best = &uniform;
    }
  }
  if (best != nullptr) uniform_spec_ = best->spec_index;
  return best != nullptr;
}

void MixtureChooser::PushStep(size_t tensor, size_t next) {
  const std::vector<int>& hull = hulls_[tensor];
  if (next == hull.size()) return;
  const PrecisionOption& from = tensors_[tensor][hull[next - 1]];
  const PrecisionOption& to = tensors_[tensor][hull[next]];
  steps_.push({(from.noise() - to.noise()) /
                   static_cast<double>(to.size_bytes - from.size_bytes),
               tensor, next});
}

void MixtureChooser::TakeStep() {
  const Step step = steps_.top();
  steps_.pop();
  const int to = hulls_[step.tensor][step.next];
  // One that does not fit blocks those after it on the same hull.
  if (!Fits(MoreBytes(step.tensor, to))) {
    if (price_ < 0) {
      price_ = step.slope;
      bases_ = choice_;
      bases_left_ = left_;
    }
    return;
  }
  Choose(step.tensor, to);
  // Along a hull steps become less steep.
  PushStep(step.tensor, step.next + 1);
}

// Of the options that fit, the first of those that save most.
void MixtureChooser::LookAt(size_t tensor) {
  const TensorOptions& options = tensors_[tensor];
  Saving best = {0, tensor, -1};
  for (int i = 0; i < static_cast<int>(options.size()); ++i) {
    const double saved = options[choice_[tensor]].noise() - options[i].noise();
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
  if (Fits(MoreBytes(saving.tensor, saving.option))) {
    Choose(saving.tensor, saving.option);
  }
  LookAt(saving.tensor);
}

void MixtureChooser::Choose(size_t tensor, int option) {
  left_ -= MoreBytes(tensor, option);
  choice_[tensor] = option;
}

int64_t MixtureChooser::MoreBytes(size_t tensor, int to) const {
  const TensorOptions& options = tensors_[tensor];
  return options[to].size_bytes - options[choice_[tensor]].size_bytes;
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
