// Counts that a variable of the environment makes larger; tests/README.md lists
// them.

#ifndef QUANTD_TESTS_SUPPORT_COUNT_H_
#define QUANTD_TESTS_SUPPORT_COUNT_H_

#include <cstdint>
#include <cstdlib>

#include "absl/strings/numbers.h"

namespace quantd::testing {

// What `variable` says, or `default_count` where it is not set or no number.
inline int64_t Count(const char* variable, int64_t default_count) {
  const char* const text = std::getenv(variable);
  int64_t count = 0;
  return text != nullptr && absl::SimpleAtoi(text, &count) ? count
                                                           : default_count;
}

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_COUNT_H_
