#include "core/calibrate/mixture_search.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/precision_option.h"
#include "core/parallel/stop_token.h"

namespace quantd::core {
namespace {

// Rounding error of a sum, relative to what was added.
constexpr double kRounding = 1e-13;

// An option makes at most another choice of each.
constexpr size_t kMaxMerged = 2 * kMaxKeptChoices;

// A tensor with more than one option in question.
struct Tensor {
  size_t tensor;
  // Cost of the cheapest other option above the base.
  double cost;
  // The most that the tensors after this one may add and take away.
  absl::int128 more_bytes;
  absl::int128 less_bytes;

  // In the order of the search.
  bool operator<(const Tensor& other) const {
    if (cost != other.cost) return cost < other.cost;
    return tensor < other.tensor;
  }
};

// Options for the tensors so far, all relative to the bases.
struct PartialMixture {
  absl::int128 bytes;
  double noise;
  double cost;
  // Options of the tensors before: an index in links, or -1 for the bases.
  int before;
  // Option of the last tensor; -1 for the base.
  int option;
};

// Link of a list of options that choices share: a searched tensor with its
// option, and the link before it.
struct Link {
  int before;
  int searched;
  int option;
};

class Search {
 public:
  Search(absl::Span<const TensorOptions> tensors, absl::Span<const int> bases,
         double price, absl::int128 left)
      : tensors_(tensors), bases_(bases), price_(price), left_(left) {}

  absl::StatusOr<absl::optional<std::vector<MixtureChange>>> Run(
      absl::Span<const int> known, StopToken stop) {
    gap_ = price_ * static_cast<double>(left_);
    rounding_ = kRounding * gap_;
    gap_ += rounding_;
    for (size_t i = 0; i < tensors_.size(); ++i) Compare(i, known[i]);
    searched_.reserve(kMaxSearchedTensors);
    constexpr size_t kTensorsAtOnce = 256;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (i % kTensorsAtOnce == 0 && stop.stopped()) return StoppedError();
      Offer(i);
    }
    std::sort_heap(searched_.begin(), searched_.end());
    SetBounds();

    choices_.reserve(kMaxMerged);
    tried_.reserve(kMaxMerged);
    merged_.reserve(kMaxMerged);
    costs_.reserve(kMaxMerged);
    links_.reserve(searched_.size() * kMaxKeptChoices);
    choices_.push_back({0, 0, 0, -1, -1});
    for (at_ = 0; at_ < searched_.size(); ++at_) {
      if (stop.stopped()) return StoppedError();
      tried_.clear();
      for (const PartialMixture& choice : choices_) {
        if (IsInQuestion(choice)) tried_.push_back(choice);
      }
      const auto options =
          static_cast<int>(tensors_[searched_[at_].tensor].size());
      for (int option = 0; option < options; ++option) TryOption(option);
      tried_.swap(choices_);
      TakeBest();
    }
    if (!found_) return absl::optional<std::vector<MixtureChange>>();
    std::vector<MixtureChange> changes;
    changes.reserve(searched_.size());
    for (int i = best_; i >= 0; i = links_[i].before) {
      const Link& link = links_[i];
      changes.push_back({searched_[link.searched].tensor, link.option});
    }
    return absl::make_optional(std::move(changes));
  }

 private:
  const PrecisionOption& Base(size_t tensor) const {
    return tensors_[tensor][bases_[tensor]];
  }

  // Subtracts first, since noise may be small beside the cost of all bytes.
  double CostAboveBase(size_t tensor, int option) const {
    const PrecisionOption& base = Base(tensor);
    const PrecisionOption& other = tensors_[tensor][option];
    return other.noise() - base.noise() +
           price_ * (static_cast<double>(other.size_bytes) -
                     static_cast<double>(base.size_bytes));
  }

  // Adds the tensor to what is known.
  void Compare(size_t tensor, int known_option) {
    const double more =
        tensors_[tensor][known_option].noise() - Base(tensor).noise();
    const double rounding = kRounding * std::abs(more);
    best_noise_ += more;
    rounding_ += rounding;
    gap_ += more + rounding;
  }

  // Takes the tensor into the heap of those that are searched, unless there are
  // enough that cost less.
  void Offer(size_t tensor) {
    double least = std::numeric_limits<double>::infinity();
    for (int i = 0; i < static_cast<int>(tensors_[tensor].size()); ++i) {
      if (i != bases_[tensor])
        least = std::min(least, CostAboveBase(tensor, i));
    }
    if (!(least <= gap_)) return;
    const Tensor offered{tensor, least, 0, 0};
    if (searched_.size() == kMaxSearchedTensors) {
      if (searched_.front() < offered) return;
      std::pop_heap(searched_.begin(), searched_.end());
      searched_.pop_back();
    }
    searched_.push_back(offered);
    std::push_heap(searched_.begin(), searched_.end());
  }

  // Sets how much the tensors after each may add and take away.
  void SetBounds() {
    absl::int128 more = 0;
    absl::int128 less = 0;
    for (size_t i = searched_.size(); i-- > 0;) {
      Tensor& searched = searched_[i];
      searched.more_bytes = more;
      searched.less_bytes = less;
      const TensorOptions& options = tensors_[searched.tensor];
      const int64_t base = Base(searched.tensor).size_bytes;
      int64_t least = base;
      int64_t most = base;
      for (int j = 0; j < static_cast<int>(options.size()); ++j) {
        if (!(CostAboveBase(searched.tensor, j) <= gap_)) continue;
        least = std::min(least, options[j].size_bytes);
        most = std::max(most, options[j].size_bytes);
      }
      more += absl::int128(most) - base;
      less += absl::int128(base) - least;
    }
  }

  // True if the choice can still fit, and come to less noise than the known
  // one.
  bool IsInQuestion(const PartialMixture& choice) const {
    const absl::int128 left = left_ - choice.bytes;
    if (left + searched_[at_].less_bytes < 0) return false;
    const double unspent =
        static_cast<double>(left - searched_[at_].more_bytes);
    return choice.cost + price_ * std::max(unspent, 0.0) <= gap_;
  }

  // Merges the choices with an option of the tensor into tried_.
  void TryOption(int option) {
    const size_t tensor = searched_[at_].tensor;
    if (option == bases_[tensor]) return;
    const double cost = CostAboveBase(tensor, option);
    if (!(cost <= gap_)) return;
    const PrecisionOption& base = Base(tensor);
    const PrecisionOption& other = tensors_[tensor][option];
    const absl::int128 bytes = absl::int128(other.size_bytes) - base.size_bytes;
    const double noise = other.noise() - base.noise();

    merged_.clear();
    const auto merge = [this](const PartialMixture& choice) {
      if (merged_.empty() || choice.noise < merged_.back().noise) {
        merged_.push_back(choice);
      }
    };
    auto tried = tried_.begin();
    for (const PartialMixture& choice : choices_) {
      const PartialMixture changed{choice.bytes + bytes, choice.noise + noise,
                                   choice.cost + cost, choice.before, option};
      if (!IsInQuestion(changed)) continue;
      while (tried != tried_.end() && (tried->bytes < changed.bytes ||
                                       (tried->bytes == changed.bytes &&
                                        tried->noise <= changed.noise))) {
        merge(*tried++);
      }
      merge(changed);
    }
    while (tried != tried_.end()) merge(*tried++);
    KeepCheapest();
  }

  // Moves merged_ into tried_: of too many, the cheapest.
  void KeepCheapest() {
    if (merged_.size() <= kMaxKeptChoices) return tried_.swap(merged_);
    costs_.clear();
    for (const PartialMixture& choice : merged_) costs_.push_back(choice.cost);
    const auto last = costs_.begin() + (kMaxKeptChoices - 1);
    std::nth_element(costs_.begin(), last, costs_.end());
    size_t equal =
        kMaxKeptChoices -
        static_cast<size_t>(std::count_if(
            costs_.begin(), last, [&](double cost) { return cost < *last; }));
    tried_.clear();
    for (const PartialMixture& choice : merged_) {
      if (choice.cost > *last || (choice.cost == *last && equal == 0)) continue;
      if (choice.cost == *last) --equal;
      tried_.push_back(choice);
    }
  }

  // Notes the options of the tensor in links_, and the best choice that fits.
  void TakeBest() {
    const PartialMixture* fits = nullptr;
    for (PartialMixture& choice : choices_) {
      if (choice.option >= 0) {
        links_.push_back({choice.before, static_cast<int>(at_), choice.option});
        choice.before = static_cast<int>(links_.size()) - 1;
        choice.option = -1;
      }
      if (choice.bytes <= left_) fits = &choice;
    }
    // The last that fits has the least noise.
    if (fits == nullptr || !(fits->noise < best_noise_)) return;
    found_ = true;
    best_noise_ = fits->noise;
    best_ = fits->before;
    gap_ = std::min(
        gap_, fits->cost + price_ * static_cast<double>(left_ - fits->bytes) +
                  rounding_);
  }

  const absl::Span<const TensorOptions> tensors_;
  const absl::Span<const int> bases_;
  const double price_;
  const absl::int128 left_;
  // Noise of the best known choice above that of the bases.
  double best_noise_ = 0;
  // Most that a choice may add to the cost of the bases.
  double gap_ = 0;
  double rounding_ = 0;
  // A heap by cost, then in order of the search; the one under way.
  std::vector<Tensor> searched_;
  size_t at_ = 0;
  // In order of bytes, ascending; noise descends.
  std::vector<PartialMixture> choices_;
  // Choices with the options of the tensor that were tried.
  std::vector<PartialMixture> tried_;
  std::vector<PartialMixture> merged_;
  std::vector<double> costs_;
  std::vector<Link> links_;
  bool found_ = false;
  // An index in links_ or -1, like PartialMixture::before.
  int best_ = -1;
};

}  // namespace

absl::StatusOr<absl::optional<std::vector<MixtureChange>>> SearchMixture(
    absl::Span<const TensorOptions> tensors, absl::Span<const int> bases,
    double price, absl::int128 left, absl::Span<const int> known,
    StopToken stop) {
  return Search(tensors, bases, price, left).Run(known, stop);
}

int64_t MixtureSearchBytes() {
  // In choices_, tried_, merged_ and costs_.
  constexpr size_t kChoiceBytes =
      kMaxMerged * (3 * sizeof(PartialMixture) + sizeof(double));
  return static_cast<int64_t>(
      kMaxSearchedTensors * (sizeof(Tensor) + sizeof(MixtureChange)) +
      kChoiceBytes + kMaxSearchedTensors * kMaxKeptChoices * sizeof(Link));
}

}  // namespace quantd::core
