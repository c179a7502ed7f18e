// How the decorators that measure a store do it.

#ifndef QUANTD_SERVER_STORE_METERING_H_
#define QUANTD_SERVER_STORE_METERING_H_

#include <chrono>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/metrics/metrics.h"

namespace quantd::server {

// What the store found, rather than a failure of it.
inline bool IsAnswer(const absl::Status& status) {
  return status.ok() || absl::IsNotFound(status) ||
         absl::IsFailedPrecondition(status) ||
         absl::IsResourceExhausted(status);
}
template <typename T>
bool IsAnswer(const absl::StatusOr<T>& result) {
  return IsAnswer(result.status());
}

// Makes a call of a store and tells its latency and outcome.
template <typename Call>
auto Measure(Metrics* metrics, StoreOperation operation, Call call) {
  const auto start = std::chrono::steady_clock::now();
  auto result = call();
  metrics->StoreDone(
      operation, IsAnswer(result),
      absl::FromChrono(std::chrono::steady_clock::now() - start));
  return result;
}

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_METERING_H_
