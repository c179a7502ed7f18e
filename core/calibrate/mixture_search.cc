#include "core/calibrate/mixture_search.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/types/span.h"

namespace quantd::core {
namespace {

// Of a sum, relative to what was added.
constexpr double kRounding = 1e-13;

// An option makes at most another choice of each.
constexpr size_t kMaxMerged = 2 * MixtureSearch::kMaxChoices;

}  // namespace

MixtureSearch::MixtureSearch(absl::Span<const TensorOptions> tensors,
                             absl::Span<const int> bases, double price,
                             absl::int128 left)
    : tensors_(tensors),
      bases_(bases),
      price_(price),
      left_(left),
      gap_(price * static_cast<double>(left)),
      rounding_(kRounding * gap_) {
  gap_ += rounding_;
  searched_.reserve(kMaxTensors);
}

int64_t MixtureSearch::MaxMemoryBytes() {
  // In choices_, tried_, merged_ and costs_.
  constexpr size_t kChoiceBytes =
      kMaxMerged * (3 * sizeof(Choice) + sizeof(double));
  return static_cast<int64_t>(kMaxTensors * (sizeof(Tensor) + sizeof(Change)) +
                              kChoiceBytes +
                              kMaxTensors * kMaxChoices * sizeof(Link));
}

// Of differences, since noise may be small beside what all bytes cost.
double MixtureSearch::CostAboveBase(size_t tensor, int option) const {
  const PrecisionOption& base = Base(tensor);
  const PrecisionOption& other = tensors_[tensor][option];
  return other.noise() - base.noise() +
         price_ * (static_cast<double>(other.size_bytes) -
                   static_cast<double>(base.size_bytes));
}

void MixtureSearch::Compare(size_t tensor, int known_option) {
  const double more =
      tensors_[tensor][known_option].noise() - Base(tensor).noise();
  const double rounding = kRounding * std::abs(more);
  best_noise_ += more;
  rounding_ += rounding;
  gap_ += more + rounding;
}

void MixtureSearch::Offer(size_t tensor) {
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < static_cast<int>(tensors_[tensor].size()); ++i) {
    if (i != bases_[tensor]) least = std::min(least, CostAboveBase(tensor, i));
  }
  if (!(least <= gap_)) return;
  const Tensor offered{tensor, least, 0, 0};
  if (searched_.size() == kMaxTensors) {
    if (searched_.front() < offered) return;
    std::pop_heap(searched_.begin(), searched_.end());
    searched_.pop_back();
  }
  searched_.push_back(offered);
  std::push_heap(searched_.begin(), searched_.end());
}

bool MixtureSearch::Step() {
  if (!begun_) {
    BeginSearch();
  } else if (at_ == searched_.size()) {
    return false;
  } else if (option_ <
             static_cast<int>(tensors_[searched_[at_].tensor].size())) {
    TryOption(option_++);
  } else {
    EndTensor();
  }
  return true;
}

void MixtureSearch::BeginSearch() {
  begun_ = true;
  std::sort_heap(searched_.begin(), searched_.end());
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
  choices_.reserve(kMaxMerged);
  tried_.reserve(kMaxMerged);
  merged_.reserve(kMaxMerged);
  costs_.reserve(kMaxMerged);
  links_.reserve(searched_.size() * kMaxChoices);
  choices_.push_back({0, 0, 0, -1, -1});
  if (!searched_.empty()) BeginTensor();
}

// Whether it can still come to less than what is known.
bool MixtureSearch::IsInQuestion(const Choice& choice) const {
  const absl::int128 left = left_ - choice.bytes;
  if (left + searched_[at_].less_bytes < 0) return false;
  const double unspent = static_cast<double>(left - searched_[at_].more_bytes);
  return choice.cost + price_ * std::max(unspent, 0.0) <= gap_;
}

void MixtureSearch::BeginTensor() {
  option_ = 0;
  tried_.clear();
  for (const Choice& choice : choices_) {
    if (IsInQuestion(choice)) tried_.push_back(choice);
  }
}

void MixtureSearch::TryOption(int option) {
  const size_t tensor = searched_[at_].tensor;
  if (option == bases_[tensor]) return;
  const double cost = CostAboveBase(tensor, option);
  if (!(cost <= gap_)) return;
  const PrecisionOption& base = Base(tensor);
  const PrecisionOption& other = tensors_[tensor][option];
  const absl::int128 bytes = absl::int128(other.size_bytes) - base.size_bytes;
  const double noise = other.noise() - base.noise();

  merged_.clear();
  const auto merge = [this](const Choice& choice) {
    if (merged_.empty() || choice.noise < merged_.back().noise) {
      merged_.push_back(choice);
    }
  };
  auto tried = tried_.begin();
  for (const Choice& choice : choices_) {
    const Choice changed{choice.bytes + bytes, choice.noise + noise,
                         choice.cost + cost, choice.before, option};
    if (!IsInQuestion(changed)) continue;
    while (tried != tried_.end() &&
           (tried->bytes < changed.bytes ||
            (tried->bytes == changed.bytes && tried->noise <= changed.noise))) {
      merge(*tried++);
    }
    merge(changed);
  }
  while (tried != tried_.end()) merge(*tried++);
  KeepCheapest();
}

void MixtureSearch::KeepCheapest() {
  if (merged_.size() <= kMaxChoices) return tried_.swap(merged_);
  costs_.clear();
  for (const Choice& choice : merged_) costs_.push_back(choice.cost);
  const auto last = costs_.begin() + (kMaxChoices - 1);
  std::nth_element(costs_.begin(), last, costs_.end());
  size_t equal = kMaxChoices - static_cast<size_t>(std::count_if(
                                   costs_.begin(), last,
                                   [&](double cost) { return cost < *last; }));
  tried_.clear();
  for (const Choice& choice : merged_) {
    if (choice.cost > *last || (choice.cost == *last && equal == 0)) continue;
    if (choice.cost == *last) --equal;
    tried_.push_back(choice);
  }
}

void MixtureSearch::EndTensor() {
  tried_.swap(choices_);
  const Choice* fits = nullptr;
  for (Choice& choice : choices_) {
    if (choice.option >= 0) {
      links_.push_back({choice.before, static_cast<int>(at_), choice.option});
      choice.before = static_cast<int>(links_.size()) - 1;
      choice.option = -1;
    }
    if (choice.bytes <= left_) fits = &choice;
  }
  // The last that fits has the least noise.
  if (fits != nullptr && fits->noise < best_noise_) {
    found_ = true;
    best_noise_ = fits->noise;
    best_ = fits->before;
    gap_ = std::min(
        gap_, fits->cost + price_ * static_cast<double>(left_ - fits->bytes) +
                  rounding_);
  }
  if (++at_ < searched_.size()) BeginTensor();
}

std::vector<MixtureSearch::Change> MixtureSearch::Changes() const {
  std::vector<Change> changes;
  changes.reserve(searched_.size());
  for (int i = best_; i >= 0; i = links_[i].before) {
    const Link& link = links_[i];
    changes.push_back({searched_[link.searched].tensor, link.option});
  }
  return changes;
}

}  // namespace quantd::core
