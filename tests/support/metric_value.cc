#include "tests/support/metric_value.h"

#include <cmath>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "prometheus/metric_family.h"

namespace quantd::testing {

double MetricValue(const server::Metrics& metrics, const std::string& name) {
  double value = std::nan("");
  for (const prometheus::MetricFamily& family : metrics.Collect()) {
    if (family.name != name) continue;
    value = 0;
    for (const prometheus::ClientMetric& metric : family.metric) {
      value += metric.gauge.value + metric.counter.value;
    }
  }
  return value;
}

bool PollUntil(absl::Duration timeout, absl::FunctionRef<bool()> ask) {
  const absl::Duration deadline = core::SteadyNow() + timeout;
  while (!ask()) {
    if (core::SteadyNow() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

}  // namespace quantd::testing
