// Numbers and names for people.

#ifndef QUANTD_CLIENT_MODELS_TEXT_H_
#define QUANTD_CLIENT_MODELS_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace quantd {

// True if `a` comes before `b` as people count: digits by their number, so that
// layers.2 comes before layers.10, and all else by its bytes.
bool NaturalLess(absl::string_view a, absl::string_view b);

// "1,234,567".
std::string CountText(uint64_t count);

// A note on numbers that the codes do not show: "has 2 NaN and 1 infinities".
std::string NotFiniteText(uint64_t nan_count, uint64_t infinity_count);

// The first names, and how many more there are.
std::string NamesText(std::vector<std::string> names);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_TEXT_H_
