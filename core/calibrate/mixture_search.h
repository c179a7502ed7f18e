// The best choice of options near that at a price.

#ifndef QUANTD_CORE_CALIBRATE_MIXTURE_SEARCH_H_
#define QUANTD_CORE_CALIBRATE_MIXTURE_SEARCH_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/types/span.h"
#include "core/calibrate/precision_option.h"

namespace quantd::core {

// Looks for less noise within a size than a choice that is known has, by
// dynamic programming about the relaxed optimum.
//
// At a price of noise for each byte every tensor has an option that costs least
// (noise + price * bytes), its base. What another option costs above that is no
// more than what choosing it adds to the relaxed optimum, whatever the others
// do: options that cost more than what is known lies above the relaxed optimum
// are out of question. Over the tensors where others are left, those with the
// cheapest first, it keeps the choices of which none is better in both bytes
// and noise than another and which can still come to less than what is known.
//
// Finds the optimum, to rounding, unless there were more than kMaxTensors such
// tensors or at some tensor more than kMaxChoices such choices; then those that
// cost least are searched.
//
// Takes, in this order: Compare() for each tensor, Offer() for each, then
// Step(). Not thread-safe.
class MixtureSearch {
 public:
  static constexpr size_t kMaxTensors = 256;
  static constexpr size_t kMaxChoices = 512;

  // `tensors`   must outlive the search.
  // `bases`     [tensor count] option of each that costs least; the same.
  // `price`     >= 0.
  // `left`      bytes that the bases leave of the size.
  MixtureSearch(absl::Span<const TensorOptions> tensors,
                absl::Span<const int> bases, double price, absl::int128 left);

  // Bytes of memory that a search takes at most, however large the tables.
  static int64_t MaxMemoryBytes();

  // `known_option`  the tensor's in a choice that fits.
  void Compare(size_t tensor, int known_option);
  void Offer(size_t tensor);
  // One option of one tensor; answers false when that is over.
  bool Step();

  // Whether there is less noise than what was known; then the choice is the
  // bases but for the changes.
  bool found() const { return found_; }
  struct Change {
    size_t tensor;
    int option;
  };
  std::vector<Change> Changes() const;

 private:
  // Where more options than one are in question.
  struct Tensor {
    size_t tensor;
    // What the cheapest other option costs above the base.
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
  struct Choice {
    absl::int128 bytes;
    double noise;
    double cost;
    // Those of the tensors before: an index in links_, or -1 for the bases.
    int before;
    // That of the last; -1 for the base.
    int option;
  };

  // Of lists of options that choices share: a tensor of searched_, and what
  // comes before it.
  struct Link {
    int before;
    int searched;
    int option;
  };

  const PrecisionOption& Base(size_t tensor) const {
    return tensors_[tensor][bases_[tensor]];
  }
  double CostAboveBase(size_t tensor, int option) const;
  bool IsInQuestion(const Choice& choice) const;
  void BeginSearch();
  void BeginTensor();
  void TryOption(int option);
  void EndTensor();
  // Of merged_ into tried_.
  void KeepCheapest();

  const absl::Span<const TensorOptions> tensors_;
  const absl::Span<const int> bases_;
  const double price_;
  const absl::int128 left_;
  // What is known, above the noise of the bases.
  double best_noise_ = 0;
  // What may be added to the cost of the bases.
  double gap_;
  double rounding_;
  // A heap by cost until the search begins.
  std::vector<Tensor> searched_;
  bool begun_ = false;
  size_t at_ = 0;
  int option_ = 0;
  // In order of bytes, ascending; noise descends.
  std::vector<Choice> choices_;
  // Those with the options of the tensor that were tried.
  std::vector<Choice> tried_;
  std::vector<Choice> merged_;
  std::vector<double> costs_;
  std::vector<Link> links_;
  bool found_ = false;
  // As Choice::before.
  int best_ = -1;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_MIXTURE_SEARCH_H_
