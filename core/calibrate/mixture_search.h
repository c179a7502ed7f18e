// The best choice of options near that at a price.

#ifndef QUANTD_CORE_CALIBRATE_MIXTURE_SEARCH_H_
#define QUANTD_CORE_CALIBRATE_MIXTURE_SEARCH_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/precision_option.h"
#include "core/parallel/stop_token.h"

namespace quantd::core {

// The most tensors that are searched, and choices that are kept.
constexpr size_t kMaxSearchedTensors = 256;
constexpr size_t kMaxKeptChoices = 512;

// Another option than the base of a tensor.
struct MixtureChange {
  size_t tensor;
  int option;
};

// Looks for less noise within a size than a choice that is known has, by
// dynamic programming about the relaxed optimum: the bases but for some
// changes, or nothing where there is no less.
//
// At a price of noise for each byte every tensor has an option that costs least
// (noise + price * bytes), its base. What another option costs above that is no
// more than what choosing it adds to the relaxed optimum, whatever the others
// do: options that cost more than what is known lies above the relaxed optimum
// are out of question. Over the tensors where others are left, those with the
// cheapest first, it keeps the choices of which none is better in both bytes
// and noise than another and which can still come to less than what is known.
//
// Finds the optimum, to rounding, unless there were more than
// kMaxSearchedTensors such tensors or at some tensor more than kMaxKeptChoices
// such choices; then those that cost least are searched.
//
// `bases`  [tensor count] option of each that costs least.
// `price`  >= 0.
// `left`   bytes that the bases leave of the size.
// `known`  [tensor count] options that fit.
// Errors: CANCELLED.
absl::StatusOr<absl::optional<std::vector<MixtureChange>>> SearchMixture(
    absl::Span<const TensorOptions> tensors, absl::Span<const int> bases,
    double price, absl::int128 left, absl::Span<const int> known,
    StopToken stop = StopToken());

// Bytes of memory that a search takes at most, however large the tables.
int64_t MixtureSearchBytes();

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_MIXTURE_SEARCH_H_
