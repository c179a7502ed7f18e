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

// Starts from a choice that is known, and looks for one of less noise within
// the size, by dynamic programming about the relaxed optimum. The answer is the
// bases with some changes, or nothing where there is no better choice.
//
// At a price of noise for each byte every tensor has an option that costs least
// (noise + price * bytes), its base. Choosing another option adds at least the
// difference of their costs to the relaxed optimum, whatever other tensors do.
// So options are left out whose difference exceeds the distance from the
// relaxed optimum to the known choice. The search goes over the tensors that
// have options left, those with the cheapest first. After each it keeps the
// choices that no other beats in both bytes and noise, and that can still beat
// the known one.
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
