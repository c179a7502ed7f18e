// Metrics of this process that the operating system knows.

#ifndef QUANTD_SERVER_METRICS_PROCESS_METRICS_H_
#define QUANTD_SERVER_METRICS_PROCESS_METRICS_H_

#include <vector>

#include "prometheus/metric_family.h"

namespace quantd::server {

// The conventional process_* families: CPU seconds, resident and virtual
// bytes, open and allowed file descriptors, start time. A family that /proc
// does not give is left out. Thread-safe.
std::vector<prometheus::MetricFamily> CollectProcessMetrics();

}  // namespace quantd::server

#endif  // QUANTD_SERVER_METRICS_PROCESS_METRICS_H_
