// What a search costs, told from the spec alone.

#ifndef QUANTD_CORE_CALIBRATE_SEARCH_TIME_H_
#define QUANTD_CORE_CALIBRATE_SEARCH_TIME_H_

#include <cstdint>

#include "absl/time/time.h"
#include "core/calibrate/encoding_spec.h"

namespace quantd::core {

// About how long one core needs to find the ranges of `scale_count` scales for
// `element_count` elements: scales x ranges that are tried x bins of each. Zero
// for methods that try none, and for specs that are not valid. Good to a factor
// of two or three, which tells milliseconds from minutes.
absl::Duration SearchTime(const EncodingSpec& spec, int64_t scale_count,
                          int64_t element_count);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_SEARCH_TIME_H_
