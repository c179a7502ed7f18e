// Every metric that the server exports, by name.

#ifndef QUANTD_SERVER_METRICS_METRICS_H_
#define QUANTD_SERVER_METRICS_METRICS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/formats/number_format.h"
#include "core/parallel/steady_clock.h"
#include "server/wire/rpcs.h"

namespace prometheus {
struct MetricFamily;
}

namespace quantd::server {

enum class StoreOperation {
  kGet,
  kPut,
  kDelete,
  kList,
  kPing,
  kContribute,
  kGetStatistics,
  kListStatistics,
  kDeleteStatistics,
};
constexpr int kStoreOperationCount = 9;
// True if the operation changes what is stored.
constexpr bool IsWrite(StoreOperation operation) {
  return operation == StoreOperation::kPut ||
         operation == StoreOperation::kDelete ||
         operation == StoreOperation::kContribute ||
         operation == StoreOperation::kDeleteStatistics;
}

// Files that may change while the server runs.
enum class ReloadedFile { kAccess, kCertificate };
constexpr int kReloadedFileCount = 2;

// Every call adds to sharded atomics, without a mutex: cheap enough for a chunk
// path. Labels are bounded sets: never a model or tensor name. Thread-safe.
class Metrics {
 public:
  // A write to the store that failed.
  struct FailedWrite {
    absl::Status status;
    absl::Duration age;
  };

  // The time since some moment; never goes back.
  using Clock = std::function<absl::Duration()>;

  explicit Metrics(Clock clock = &core::SteadyNow);
  ~Metrics();

  // Metrics of the service that /metrics shows; from any thread.
  std::vector<prometheus::MetricFamily> Collect() const;

  // grpc_server_started_total, grpc_server_handled_total,
  // grpc_server_handling_seconds; `grpc_code` is 0 to 16.
  void RpcStarted(Rpc rpc);
  void RpcHandled(Rpc rpc, int grpc_code, absl::Duration latency);

  // quantd_tensor_seconds: from a tensor's header to its summary or error.
  void TensorDone(Rpc rpc, bool ok, absl::Duration latency);
  // quantd_tensor_errors_total{rpc,grpc_code}: tensors that were answered with
  // an error; `grpc_code` is 1 to 16.
  void TensorFailed(Rpc rpc, int grpc_code);
  // quantd_payload_bytes_total{direction}: `data` of the streams, and what is
  // in shared memory in its place.
  void PayloadIn(int64_t bytes);
  void PayloadOut(int64_t bytes);
  // quantd_elements_total{rpc,format}: elements quantized, dequantized,
  // evaluated or (format "none") calibrated.
  void Elements(Rpc rpc, const core::FormatInfo* format, int64_t count);
  // quantd_non_finite_elements_total, quantd_clipped_elements_total.
  void NonFinite(int64_t count);
  void Clipped(int64_t count);
  // quantd_active_streams.
  void StreamOpened();
  void StreamClosed();
  // quantd_active_tensors, quantd_active_tensors_limit.
  void TensorOpened();
  void TensorClosed();
  void ActiveTensorsLimit(int64_t count);

  // quantd_connections, quantd_connections_limit; the first is a second old.
  void Connections(int64_t count, int64_t limit);

  // quantd_cache_{hits,misses,evictions}_total: of encodings.
  void CacheHit();
  void CacheMiss();
  void CacheEvicted(int64_t count);
  // quantd_cache_resident_bytes, quantd_cache_entries: what is cached now, of
  // whatever kind, grows by that much.
  void CacheResident(int64_t bytes, int64_t entries);
  // quantd_store_seconds{operation}, quantd_store_errors_total{operation}.
  void StoreDone(StoreOperation operation, bool ok, absl::Duration latency);
  // quantd_store_write_failed: how the latest write to the store ended.
  void StoreWritten(const absl::Status& status);
  // The latest write if it failed.
  absl::optional<FailedWrite> failed_write() const;
  // quantd_calibration_merges_total{result}: contributions to a calibration,
  // "counted", or "duplicate": acknowledged and not counted again.
  void Contribution(bool duplicate);
  // quantd_store_bytes, quantd_store_rows: what the store holds.
  void StoreUsage(int64_t bytes, int64_t rows);
  // quantd_store_size_bytes, quantd_store_free_bytes: what it takes on disk.
  void StoreSize(int64_t size_bytes, int64_t free_bytes);
  // quantd_quota_used_ratio: of the quota that is used up most.
  void QuotaUsed(double ratio);
  // quantd_retention_deleted_revisions_total.
  void RevisionDeleted();
  // quantd_memory_budget_bytes, quantd_memory_budget_used_bytes.
  void MemoryBudget(int64_t total_bytes, int64_t used_bytes);
  // quantd_shared_memory_regions, quantd_shared_memory_bytes: what is there now
  // grows by that much.
  void SharedMemory(int64_t regions, int64_t bytes);
  // quantd_queue_delay_seconds: how long the workers need for what has arrived.
  void QueueDelay(absl::Duration delay);
  // quantd_limit_rejections_total{reason}: what was turned away or ended
  // because of a limit. Reasons that core::kErrors has not as limits do not
  // count.
  void LimitRejected(absl::string_view reason);
  // quantd_access_denied_total{reason}: calls turned away because of who makes
  // them. Reasons that core::kErrors has not as denials do not count.
  void AccessDenied(absl::string_view reason);
  // quantd_draining: 1 from now on.
  void Draining();
  // quantd_reloads_total{file,result}: a changed file was taken, or not;
  // quantd_reload_successful{file}: 0 from the one until the other.
  void Reloaded(ReloadedFile file, bool ok);
  // quantd_tls_certificate_expiry_timestamp_seconds; absent before the call.
  void CertificateExpiry(absl::Time time);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_METRICS_METRICS_H_
