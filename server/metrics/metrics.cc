#include "server/metrics/metrics.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/cpu.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "prometheus/client_metric.h"
#include "prometheus/metric_family.h"
#include "prometheus/metric_type.h"
#include "server/metrics/process_metrics.h"
#include "server/metrics/sharded_counters.h"

namespace quantd::server {
namespace {

using Labels = std::vector<prometheus::ClientMetric::Label>;
using prometheus::MetricFamily;
using prometheus::MetricType;

constexpr int kGrpcCodeCount = 17;
constexpr std::array<const char*, kGrpcCodeCount> kGrpcCodes = {
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated"};

constexpr std::array<const char*, kStoreOperationCount> kStoreOperations = {
    "get",
    "put",
    "delete",
    "list",
    "ping",
    "contribute",
    "get_statistics",
    "list_statistics",
    "delete_statistics"};

constexpr int CountErrors(core::ErrorKind kind) {
  int count = 0;
  for (const core::ErrorInfo& row : core::kErrors) {
    if (row.kind == kind) ++count;
  }
  return count;
}

// Its place among the rows of that kind; -1 when it is not one of them.
int ErrorIndex(core::ErrorKind kind, absl::string_view reason) {
  int index = 0;
  for (const core::ErrorInfo& row : core::kErrors) {
    if (row.kind != kind) continue;
    if (row.reason == reason) return index;
    ++index;
  }
  return -1;
}

constexpr std::array<const char*, kReloadedFileCount> kReloadedFiles = {
    "access", "certificate"};

// Upper bounds of the buckets of every histogram, in seconds.
constexpr std::array<double, 17> kBucketSeconds = {
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1,    0.25,    0.5,    1,     2.5,    5,     10,   60};
// A counter per bucket, one for what is above all, one for the sum in
// nanoseconds.
constexpr int kHistogramSize = static_cast<int>(kBucketSeconds.size()) + 2;

// Places of the counters in ShardedCounters, one after another.
enum Counter : int {
  kPayloadIn,
  kPayloadOut,
  kNonFinite,
  kClipped,
  kActiveStreams,
  kActiveTensors,
  kSharedRegions,
  kSharedBytes,
  kCacheHits,
  kCacheMisses,
  kCacheEvictions,
  kContributionsCounted,
  kContributionsDuplicate,
  kRevisionsDeleted,
  kLimitRejections,
  kAccessDenied = kLimitRejections + CountErrors(core::ErrorKind::kLimit),
  // Per file: taken, then not.
  kReloads = kAccessDenied + CountErrors(core::ErrorKind::kDenial),
  kStoreErrors = kReloads + kReloadedFileCount * 2,
  kStoreSeconds = kStoreErrors + kStoreOperationCount,
  kRpcStarted = kStoreSeconds + kStoreOperationCount * kHistogramSize,
  kRpcHandled = kRpcStarted + kRpcCount,
  kRpcSeconds = kRpcHandled + kRpcCount * kGrpcCodeCount,
  // Per RPC: done well, then failed.
  kTensorSeconds = kRpcSeconds + kRpcCount * kHistogramSize,
  kTensorErrors = kTensorSeconds + kTensorRpcCount * 2 * kHistogramSize,
  // Per RPC: none, then the rows of the table of formats.
  kElements = kTensorErrors + kTensorRpcCount * kGrpcCodeCount,
};

int FormatCount() { return static_cast<int>(core::AllFormats().size()); }

MetricFamily& AddFamily(const char* name, const char* help, MetricType type,
                        std::vector<MetricFamily>* families) {
  MetricFamily& family = families->emplace_back();
  family.name = name;
  family.help = help;
  family.type = type;
  return family;
}

void AddSample(int64_t value, Labels labels, MetricFamily* family) {
  prometheus::ClientMetric& metric = family->metric.emplace_back();
  metric.label = std::move(labels);
  if (family->type == MetricType::Counter) {
    metric.counter.value = static_cast<double>(value);
  } else {
    metric.gauge.value = static_cast<double>(value);
  }
}

// The place of a code among kGrpcCodes: that of Unknown for any that is none.
int CodeIndex(int grpc_code) {
  constexpr int kUnknown = 2;
  return grpc_code >= 0 && grpc_code < kGrpcCodeCount ? grpc_code : kUnknown;
}

Labels RpcLabels(int rpc) {
  const RpcName& name = RpcNameOf(static_cast<Rpc>(rpc));
  return {{"grpc_type", name.type},
          {"grpc_service", name.service},
          {"grpc_method", name.method}};
}

}  // namespace

struct Metrics::State {
  explicit State(Clock clock)
      : counters(kElements + kTensorRpcCount * (FormatCount() + 1)),
        clock(std::move(clock)) {}

  void Observe(int first, absl::Duration latency) {
    const double seconds = absl::ToDoubleSeconds(latency);
    const auto bucket =
        std::lower_bound(kBucketSeconds.begin(), kBucketSeconds.end(), seconds);
    counters.Add(first + static_cast<int>(bucket - kBucketSeconds.begin()), 1);
    counters.Add(first + kHistogramSize - 1, absl::ToInt64Nanoseconds(latency));
  }

  void AddHistogram(int first, Labels labels, MetricFamily* family) const {
    prometheus::ClientMetric& metric = family->metric.emplace_back();
    metric.label = std::move(labels);
    uint64_t count = 0;
    for (size_t i = 0; i < kBucketSeconds.size(); ++i) {
      count += static_cast<uint64_t>(counters.Sum(first + static_cast<int>(i)));
      metric.histogram.bucket.push_back({count, kBucketSeconds[i]});
    }
    count += static_cast<uint64_t>(counters.Sum(first + kHistogramSize - 2));
    metric.histogram.sample_count = count;
    metric.histogram.sample_sum =
        1e-9 * static_cast<double>(counters.Sum(first + kHistogramSize - 1));
  }

  // A family with one sample and no labels.
  void AddSingle(const char* name, const char* help, MetricType type,
                 int counter, std::vector<MetricFamily>* families) const {
    AddSample(counters.Sum(counter), {},
              &AddFamily(name, help, type, families));
  }

  // One sample per reason of that kind; `counter` is that of the first.
  void AddErrors(core::ErrorKind kind, int counter,
                 MetricFamily* family) const {
    for (const core::ErrorInfo& row : core::kErrors) {
      if (row.kind != kind) continue;
      AddSample(counters.Sum(counter++), {{"reason", std::string(row.reason)}},
                family);
    }
  }

  void CollectRpcs(std::vector<MetricFamily>* families) const;
  void CollectTensors(std::vector<MetricFamily>* families) const;
  void CollectStore(std::vector<MetricFamily>* families) const;
  void CollectCalibration(std::vector<MetricFamily>* families) const;
  void CollectGuard(std::vector<MetricFamily>* families) const;

  ShardedCounters counters;
  // Levels that are set, not added to.
  std::atomic<int64_t> cache_resident_bytes{0};
  std::atomic<int64_t> cache_entries{0};
  std::atomic<int64_t> store_bytes{0};
  std::atomic<int64_t> store_rows{0};
  std::atomic<int64_t> store_size_bytes{0};
  std::atomic<int64_t> store_free_bytes{0};
  std::atomic<double> quota_used_ratio{0};
  std::atomic<int64_t> memory_budget_bytes{0};
  std::atomic<int64_t> memory_budget_used_bytes{0};
  // 0 for none.
  std::atomic<int64_t> certificate_expiry_seconds{0};
  std::atomic<int64_t> queue_delay_ns{0};
  std::atomic<int64_t> active_tensors_limit{0};
  std::atomic<int64_t> connections{0};
  std::atomic<int64_t> connections_limit{0};
  std::atomic<bool> is_draining{false};
  std::array<std::atomic<bool>, kReloadedFileCount> reload_failed{};
  const Clock clock;
  // The latest write to the store.
  std::atomic<bool> write_failed{false};
  mutable absl::Mutex write_mutex;
  absl::Status write_status ABSL_GUARDED_BY(write_mutex);
  absl::Duration write_time ABSL_GUARDED_BY(write_mutex);
};

void Metrics::State::CollectRpcs(std::vector<MetricFamily>* families) const {
  MetricFamily& started =
      AddFamily("grpc_server_started_total",
                "Total number of RPCs started on the server.",
                MetricType::Counter, families);
  for (int i = 0; i < kRpcCount; ++i) {
    AddSample(counters.Sum(kRpcStarted + i), RpcLabels(i), &started);
  }
  MetricFamily& handled = AddFamily(
      "grpc_server_handled_total",
      "Total number of RPCs completed on the server, regardless of success or "
      "failure.",
      MetricType::Counter, families);
  for (int i = 0; i < kRpcCount; ++i) {
    for (int code = 0; code < kGrpcCodeCount; ++code) {
      const int64_t count =
          counters.Sum(kRpcHandled + i * kGrpcCodeCount + code);
      // Codes that never came would make hundreds of series of zeros.
      if (count == 0 && code != 0) continue;
      Labels labels = RpcLabels(i);
      labels.push_back({"grpc_code", kGrpcCodes[code]});
      AddSample(count, std::move(labels), &handled);
    }
  }
  MetricFamily& seconds =
      AddFamily("grpc_server_handling_seconds",
                "Histogram of response latency (seconds) of gRPC that had been "
                "application-level handled by the server.",
                MetricType::Histogram, families);
  for (int i = 0; i < kRpcCount; ++i) {
    AddHistogram(kRpcSeconds + i * kHistogramSize, RpcLabels(i), &seconds);
  }
}

void Metrics::State::CollectTensors(std::vector<MetricFamily>* families) const {
  MetricFamily& seconds = AddFamily(
      "quantd_tensor_seconds",
      "Time from a tensor's header to its summary or error, in seconds.",
      MetricType::Histogram, families);
  for (int i = 0; i < kTensorRpcCount; ++i) {
    for (int failed = 0; failed < 2; ++failed) {
      AddHistogram(kTensorSeconds + (2 * i + failed) * kHistogramSize,
                   {{"rpc", RpcNameOf(static_cast<Rpc>(i)).method},
                    {"result", failed == 0 ? "ok" : "error"}},
                   &seconds);
    }
  }
  MetricFamily& errors = AddFamily(
      "quantd_tensor_errors_total",
      "Tensors that were answered with an error, by the code of the error.",
      MetricType::Counter, families);
  for (int i = 0; i < kTensorRpcCount; ++i) {
    for (int code = 0; code < kGrpcCodeCount; ++code) {
      const int64_t count =
          counters.Sum(kTensorErrors + i * kGrpcCodeCount + code);
      if (count == 0) continue;
      AddSample(count,
                {{"rpc", RpcNameOf(static_cast<Rpc>(i)).method},
                 {"grpc_code", kGrpcCodes[code]}},
                &errors);
    }
  }
  MetricFamily& payload = AddFamily(
      "quantd_payload_bytes_total",
      "Bytes of tensor data on streams and in shared memory, by direction.",
      MetricType::Counter, families);
  AddSample(counters.Sum(kPayloadIn), {{"direction", "in"}}, &payload);
  AddSample(counters.Sum(kPayloadOut), {{"direction", "out"}}, &payload);
  MetricFamily& elements = AddFamily(
      "quantd_elements_total",
      "Elements quantized, dequantized, evaluated or calibrated, by number "
      "format.",
      MetricType::Counter, families);
  const int format_count = FormatCount();
  for (int i = 0; i < kTensorRpcCount; ++i) {
    for (int f = 0; f <= format_count; ++f) {
      const int64_t count =
          counters.Sum(kElements + i * (format_count + 1) + f);
      if (count == 0) continue;
      AddSample(
          count,
          {{"rpc", RpcNameOf(static_cast<Rpc>(i)).method},
           {"format",
            f == 0 ? "none" : std::string(core::AllFormats()[f - 1].name)}},
          &elements);
    }
  }
  AddSingle("quantd_non_finite_elements_total",
            "Elements that were NaN or infinite.", MetricType::Counter,
            kNonFinite, families);
  AddSingle("quantd_clipped_elements_total",
            "Finite elements outside the encoding's range.",
            MetricType::Counter, kClipped, families);
  AddSingle("quantd_active_streams", "Streams that are open.",
            MetricType::Gauge, kActiveStreams, families);
  AddSingle("quantd_active_tensors", "Tensors that are being worked on.",
            MetricType::Gauge, kActiveTensors, families);
  AddSample(active_tensors_limit.load(std::memory_order_relaxed), {},
            &AddFamily("quantd_active_tensors_limit",
                       "Tensors that may be worked on at once.",
                       MetricType::Gauge, families));
  AddSample(connections.load(std::memory_order_relaxed), {},
            &AddFamily("quantd_connections", "Connections that are open.",
                       MetricType::Gauge, families));
  AddSample(connections_limit.load(std::memory_order_relaxed), {},
            &AddFamily("quantd_connections_limit",
                       "Connections that may be open at once.",
                       MetricType::Gauge, families));
}

void Metrics::State::CollectStore(std::vector<MetricFamily>* families) const {
  AddSingle("quantd_cache_hits_total", "Encodings answered from memory.",
            MetricType::Counter, kCacheHits, families);
  AddSingle("quantd_cache_misses_total", "Encodings read from the store.",
            MetricType::Counter, kCacheMisses, families);
  AddSingle("quantd_cache_evictions_total",
            "Encodings dropped from memory to make room.", MetricType::Counter,
            kCacheEvictions, families);
  AddSample(cache_resident_bytes.load(std::memory_order_relaxed), {},
            &AddFamily("quantd_cache_resident_bytes",
                       "Bytes of the encodings and statistics kept in memory.",
                       MetricType::Gauge, families));
  AddSample(cache_entries.load(std::memory_order_relaxed), {},
            &AddFamily("quantd_cache_entries",
                       "Number of encodings and statistics kept in memory.",
                       MetricType::Gauge, families));
  MetricFamily& seconds = AddFamily(
      "quantd_store_seconds", "Latency of the store's operations, in seconds.",
      MetricType::Histogram, families);
  for (int i = 0; i < kStoreOperationCount; ++i) {
    AddHistogram(kStoreSeconds + i * kHistogramSize,
                 {{"operation", kStoreOperations[i]}}, &seconds);
  }
  MetricFamily& errors =
      AddFamily("quantd_store_errors_total",
                "Operations of the store that failed. Not finding something "
                "is no failure.",
                MetricType::Counter, families);
  for (int i = 0; i < kStoreOperationCount; ++i) {
    AddSample(counters.Sum(kStoreErrors + i),
              {{"operation", kStoreOperations[i]}}, &errors);
  }
  AddSample(write_failed.load(std::memory_order_relaxed) ? 1 : 0, {},
            &AddFamily("quantd_store_write_failed",
                       "1 if the latest write to the store failed, else 0.",
                       MetricType::Gauge, families));
  AddSample(store_bytes.load(std::memory_order_relaxed), {},
            &AddFamily("quantd_store_bytes",
                       "Bytes of the names and contents in the store.",
                       MetricType::Gauge, families));
  AddSample(
      store_rows.load(std::memory_order_relaxed), {},
      &AddFamily("quantd_store_rows",
                 "Rows in the store: encodings, and statistics by source.",
                 MetricType::Gauge, families));
  AddSample(store_size_bytes.load(std::memory_order_relaxed), {},
            &AddFamily("quantd_store_size_bytes",
                       "Bytes that the store takes on disk.", MetricType::Gauge,
                       families));
  AddSample(store_free_bytes.load(std::memory_order_relaxed), {},
            &AddFamily("quantd_store_free_bytes",
                       "Bytes of the store's file that hold nothing now.",
                       MetricType::Gauge, families));
  AddFamily("quantd_quota_used_ratio",
            "Used part of the quota that is closest to its limit.",
            MetricType::Gauge, families)
      .metric.emplace_back()
      .gauge.value = quota_used_ratio.load(std::memory_order_relaxed);
  AddSingle("quantd_retention_deleted_revisions_total",
            "Revisions deleted because the access file no longer keeps them.",
            MetricType::Counter, kRevisionsDeleted, families);
}

void Metrics::State::CollectCalibration(
    std::vector<MetricFamily>* families) const {
  MetricFamily& merges = AddFamily(
      "quantd_calibration_merges_total",
      "Contributions to calibrations: counted, or duplicates, which are not "
      "counted again.",
      MetricType::Counter, families);
  AddSample(counters.Sum(kContributionsCounted), {{"result", "counted"}},
            &merges);
  AddSample(counters.Sum(kContributionsDuplicate), {{"result", "duplicate"}},
            &merges);
}

void Metrics::State::CollectGuard(std::vector<MetricFamily>* families) const {
  AddSample(memory_budget_bytes.load(std::memory_order_relaxed), {},
            &AddFamily("quantd_memory_budget_bytes",
                       "Memory budget of all requests, in bytes.",
                       MetricType::Gauge, families));
  AddSample(memory_budget_used_bytes.load(std::memory_order_relaxed), {},
            &AddFamily("quantd_memory_budget_used_bytes",
                       "Part of the memory budget in use, in bytes.",
                       MetricType::Gauge, families));
  AddFamily("quantd_queue_delay_seconds",
            "Estimated time that the workers need for the data that arrived.",
            MetricType::Gauge, families)
      .metric.emplace_back()
      .gauge.value = 1e-9 * static_cast<double>(
                                queue_delay_ns.load(std::memory_order_relaxed));
  AddSingle("quantd_shared_memory_regions",
            "Regions of memory shared with clients.", MetricType::Gauge,
            kSharedRegions, families);
  AddSingle("quantd_shared_memory_bytes",
            "Bytes of the regions shared with clients.", MetricType::Gauge,
            kSharedBytes, families);
  MetricFamily& rejections =
      AddFamily("quantd_limit_rejections_total",
                "Requests and tensors that a limit refused, by reason.",
                MetricType::Counter, families);
  AddErrors(core::ErrorKind::kLimit, kLimitRejections, &rejections);
  MetricFamily& denied =
      AddFamily("quantd_access_denied_total",
                "Calls refused because of who made them, by reason.",
                MetricType::Counter, families);
  AddErrors(core::ErrorKind::kDenial, kAccessDenied, &denied);
  MetricFamily& reloads =
      AddFamily("quantd_reloads_total",
                "Changed files that were loaded (ok), or refused (error).",
                MetricType::Counter, families);
  for (int i = 0; i < kReloadedFileCount; ++i) {
    for (int failed = 0; failed < 2; ++failed) {
      AddSample(counters.Sum(kReloads + 2 * i + failed),
                {{"file", kReloadedFiles[i]},
                 {"result", failed == 0 ? "ok" : "error"}},
                &reloads);
    }
  }
  MetricFamily& successful = AddFamily(
      "quantd_reload_successful",
      "0 while the latest change of a file could not be loaded, else 1.",
      MetricType::Gauge, families);
  for (int i = 0; i < kReloadedFileCount; ++i) {
    AddSample(reload_failed[i].load(std::memory_order_relaxed) ? 0 : 1,
              {{"file", kReloadedFiles[i]}}, &successful);
  }
  AddSample(is_draining.load(std::memory_order_relaxed) ? 1 : 0, {},
            &AddFamily("quantd_draining",
                       "1 while the server drains before it stops, else 0.",
                       MetricType::Gauge, families));
  const int64_t expiry =
      certificate_expiry_seconds.load(std::memory_order_relaxed);
  if (expiry != 0) {
    AddSample(expiry, {},
              &AddFamily("quantd_tls_certificate_expiry_timestamp_seconds",
                         "When the server's certificate expires, in seconds "
                         "since 1970.",
                         MetricType::Gauge, families));
  }
}

Metrics::Metrics(Clock clock)
    : state_(std::make_unique<State>(std::move(clock))) {}
Metrics::~Metrics() = default;

std::vector<MetricFamily> Metrics::Collect() const {
  std::vector<MetricFamily> families = CollectProcessMetrics();
  MetricFamily& build = AddFamily(
      "quantd_build_info",
      "Always 1; the version and the SIMD target in use are in the labels.",
      MetricType::Gauge, &families);
  AddSample(1, {{"version", QUANTD_VERSION}, {"simd", core::SimdTarget()}},
            &build);
  state_->CollectRpcs(&families);
  state_->CollectTensors(&families);
  state_->CollectStore(&families);
  state_->CollectCalibration(&families);
  state_->CollectGuard(&families);
  return families;
}

void Metrics::RpcStarted(Rpc rpc) {
  state_->counters.Add(kRpcStarted + static_cast<int>(rpc), 1);
}

void Metrics::RpcHandled(Rpc rpc, int grpc_code, absl::Duration latency) {
  const int index = static_cast<int>(rpc);
  state_->counters.Add(
      kRpcHandled + index * kGrpcCodeCount + CodeIndex(grpc_code), 1);
  state_->Observe(kRpcSeconds + index * kHistogramSize, latency);
}

void Metrics::TensorDone(Rpc rpc, bool ok, absl::Duration latency) {
  const int index = static_cast<int>(rpc);
  if (index >= kTensorRpcCount) return;
  state_->Observe(kTensorSeconds + (2 * index + (ok ? 0 : 1)) * kHistogramSize,
                  latency);
}

void Metrics::TensorFailed(Rpc rpc, int grpc_code) {
  const int index = static_cast<int>(rpc);
  if (index >= kTensorRpcCount) return;
  state_->counters.Add(
      kTensorErrors + index * kGrpcCodeCount + CodeIndex(grpc_code), 1);
}

void Metrics::PayloadIn(int64_t bytes) {
  state_->counters.Add(kPayloadIn, bytes);
}

void Metrics::PayloadOut(int64_t bytes) {
  state_->counters.Add(kPayloadOut, bytes);
}

void Metrics::Elements(Rpc rpc, const core::FormatInfo* format, int64_t count) {
  const int index = static_cast<int>(rpc);
  if (index >= kTensorRpcCount) return;
  const absl::Span<const core::FormatInfo> formats = core::AllFormats();
  int place = 0;
  // A copy of a row has its place found by the format.
  if (format != nullptr) {
    const core::FormatInfo* row = core::FindFormat(format->format);
    if (row != nullptr) place = static_cast<int>(row - formats.data()) + 1;
  }
  state_->counters.Add(kElements + index * (FormatCount() + 1) + place, count);
}

void Metrics::NonFinite(int64_t count) {
  if (count != 0) state_->counters.Add(kNonFinite, count);
}

void Metrics::Clipped(int64_t count) {
  if (count != 0) state_->counters.Add(kClipped, count);
}

void Metrics::StreamOpened() { state_->counters.Add(kActiveStreams, 1); }
void Metrics::StreamClosed() { state_->counters.Add(kActiveStreams, -1); }
void Metrics::TensorOpened() { state_->counters.Add(kActiveTensors, 1); }
void Metrics::TensorClosed() { state_->counters.Add(kActiveTensors, -1); }
void Metrics::ActiveTensorsLimit(int64_t count) {
  state_->active_tensors_limit.store(count, std::memory_order_relaxed);
}

void Metrics::Connections(int64_t count, int64_t limit) {
  state_->connections.store(count, std::memory_order_relaxed);
  state_->connections_limit.store(limit, std::memory_order_relaxed);
}

void Metrics::CacheHit() { state_->counters.Add(kCacheHits, 1); }
void Metrics::CacheMiss() { state_->counters.Add(kCacheMisses, 1); }
void Metrics::CacheEvicted(int64_t count) {
  state_->counters.Add(kCacheEvictions, count);
}

void Metrics::CacheResident(int64_t bytes, int64_t entries) {
  state_->cache_resident_bytes.fetch_add(bytes, std::memory_order_relaxed);
  state_->cache_entries.fetch_add(entries, std::memory_order_relaxed);
}

void Metrics::StoreDone(StoreOperation operation, bool ok,
                        absl::Duration latency) {
  const int index = static_cast<int>(operation);
  if (!ok) state_->counters.Add(kStoreErrors + index, 1);
  state_->Observe(kStoreSeconds + index * kHistogramSize, latency);
}

void Metrics::StoreWritten(const absl::Status& status) {
  if (status.ok() && !state_->write_failed.load(std::memory_order_relaxed)) {
    return;
  }
  absl::MutexLock lock(&state_->write_mutex);
  state_->write_status = status;
  state_->write_time = state_->clock();
  state_->write_failed.store(!status.ok(), std::memory_order_relaxed);
}

absl::optional<Metrics::FailedWrite> Metrics::failed_write() const {
  absl::MutexLock lock(&state_->write_mutex);
  if (state_->write_status.ok()) return absl::nullopt;
  return FailedWrite{state_->write_status,
                     state_->clock() - state_->write_time};
}

void Metrics::Contribution(bool duplicate) {
  state_->counters.Add(
      duplicate ? kContributionsDuplicate : kContributionsCounted, 1);
}

void Metrics::StoreSize(int64_t size_bytes, int64_t free_bytes) {
  state_->store_size_bytes.store(size_bytes, std::memory_order_relaxed);
  state_->store_free_bytes.store(free_bytes, std::memory_order_relaxed);
}

void Metrics::StoreUsage(int64_t bytes, int64_t rows) {
  state_->store_bytes.store(bytes, std::memory_order_relaxed);
  state_->store_rows.store(rows, std::memory_order_relaxed);
}

void Metrics::QuotaUsed(double ratio) {
  state_->quota_used_ratio.store(ratio, std::memory_order_relaxed);
}

void Metrics::RevisionDeleted() { state_->counters.Add(kRevisionsDeleted, 1); }

void Metrics::MemoryBudget(int64_t total_bytes, int64_t used_bytes) {
  state_->memory_budget_bytes.store(total_bytes, std::memory_order_relaxed);
  state_->memory_budget_used_bytes.store(used_bytes, std::memory_order_relaxed);
}

void Metrics::SharedMemory(int64_t regions, int64_t bytes) {
  state_->counters.Add(kSharedRegions, regions);
  state_->counters.Add(kSharedBytes, bytes);
}

void Metrics::QueueDelay(absl::Duration delay) {
  state_->queue_delay_ns.store(absl::ToInt64Nanoseconds(delay),
                               std::memory_order_relaxed);
}

void Metrics::LimitRejected(absl::string_view reason) {
  const int index = ErrorIndex(core::ErrorKind::kLimit, reason);
  if (index >= 0) state_->counters.Add(kLimitRejections + index, 1);
}

void Metrics::AccessDenied(absl::string_view reason) {
  const int index = ErrorIndex(core::ErrorKind::kDenial, reason);
  if (index >= 0) state_->counters.Add(kAccessDenied + index, 1);
}

void Metrics::Draining() {
  state_->is_draining.store(true, std::memory_order_relaxed);
}

void Metrics::Reloaded(ReloadedFile file, bool ok) {
  const int index = static_cast<int>(file);
  state_->counters.Add(kReloads + 2 * index + (ok ? 0 : 1), 1);
  state_->reload_failed[index].store(!ok, std::memory_order_relaxed);
}

void Metrics::CertificateExpiry(absl::Time time) {
  state_->certificate_expiry_seconds.store(absl::ToUnixSeconds(time),
                                           std::memory_order_relaxed);
}

}  // namespace quantd::server
