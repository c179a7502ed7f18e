// How the decorators that measure a store do it.
//
// They also log what the store's errors keep from callers.

#ifndef QUANTD_SERVER_STORE_METERING_H_
#define QUANTD_SERVER_STORE_METERING_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "server/metrics/metrics.h"

namespace quantd::server {

// True for a status that tells what the store found, or that nobody waits for
// it any more, rather than a failure of the store.
inline bool IsAnswer(const absl::Status& status) {
  return status.ok() || absl::IsNotFound(status) ||
         absl::IsInvalidArgument(status) ||
         absl::IsFailedPrecondition(status) ||
         absl::IsResourceExhausted(status) || absl::IsCancelled(status);
}
template <typename T>
bool IsAnswer(const absl::StatusOr<T>& result) {
  return IsAnswer(result.status());
}

inline const absl::Status& StatusOf(const absl::Status& status) {
  return status;
}
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

// At most a line a second, which tells how many were left out.
void LogStoreError(const absl::Status& status);

// Makes a call of a store and tells its latency and outcome.
template <typename Call>
auto Measure(Metrics* metrics, StoreOperation operation, Call call) {
  const absl::Duration start = core::SteadyNow();
  auto result = call();
  if (!IsAnswer(result)) LogStoreError(StatusOf(result));
  metrics->StoreDone(operation, IsAnswer(result), core::SteadyNow() - start);
  // An answer other than OK may have kept the operation from writing.
  if (IsWrite(operation) && (result.ok() || !IsAnswer(result))) {
    metrics->StoreWritten(StatusOf(result));
  }
  return result;
}

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_METERING_H_
