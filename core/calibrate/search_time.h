// Time of a search, estimated from the spec alone.

#ifndef QUANTD_CORE_CALIBRATE_SEARCH_TIME_H_
#define QUANTD_CORE_CALIBRATE_SEARCH_TIME_H_

#include <cstdint>

#include "absl/time/time.h"
#include "core/calibrate/encoding_spec.h"

namespace quantd::core {

// About how long one core needs to find the ranges of `scale_count` scales for
// `element_count` elements. It grows with the number of scales, of ranges that
// are tried for each, and of bins; or of elements, where blocks are searched
// directly. Zero for methods that try none, and for specs that are not valid.
// Good to a factor of two or three, which tells milliseconds from minutes.
// `at_hand`  ranges come from the elements, not from statistics.
absl::Duration SearchTime(const EncodingSpec& spec, int64_t scale_count,
                          int64_t element_count, bool at_hand = false);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_SEARCH_TIME_H_
