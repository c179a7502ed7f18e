// What a metric shows.

#ifndef QUANTD_TESTS_SUPPORT_METRIC_VALUE_H_
#define QUANTD_TESTS_SUPPORT_METRIC_VALUE_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "server/metrics/metrics.h"

namespace quantd::testing {

// The sum over all series of the gauge or counter, NaN if there is none.
double MetricValue(const server::Metrics& metrics, const std::string& name);

// To wait on a busy machine for what comes at once on another.
constexpr absl::Duration kLongEnough = absl::Minutes(2);

// Asks until the answer is yes, at most for `timeout`; the last answer.
bool PollUntil(absl::Duration timeout, absl::FunctionRef<bool()> ask);

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_METRIC_VALUE_H_
