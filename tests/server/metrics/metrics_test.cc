#include "server/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "prometheus/metric_family.h"
#include "prometheus/text_serializer.h"
#include "server/metrics/sharded_counters.h"

namespace quantd::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Scrape(const Metrics& metrics) {
  return prometheus::TextSerializer().Serialize(metrics.Collect());
}

// Calls everything, with values that sit outside the bounded sets too.
void TouchEverything(Metrics* metrics) {
  for (int i = 0; i < kRpcCount; ++i) {
    const Rpc rpc = static_cast<Rpc>(i);
    metrics->RpcStarted(rpc);
    for (int code = -1; code <= 17; ++code) {
      metrics->RpcHandled(rpc, code, absl::Milliseconds(3));
      metrics->TensorFailed(rpc, code);
    }
    metrics->TensorDone(rpc, true, absl::Milliseconds(3));
    metrics->TensorDone(rpc, false, absl::Hours(3));
    metrics->Elements(rpc, nullptr, 5);
    for (const core::FormatInfo& format : core::AllFormats()) {
      metrics->Elements(rpc, &format, 7);
    }
  }
  metrics->PayloadIn(1000);
  metrics->PayloadOut(250);
  metrics->NonFinite(2);
  metrics->Clipped(3);
  metrics->StreamOpened();
  metrics->StreamOpened();
  metrics->StreamClosed();
  metrics->TensorOpened();
  metrics->ActiveTensorsLimit(40);
  metrics->Connections(7, 50);
  metrics->CacheHit();
  metrics->CacheMiss();
  metrics->CacheEvicted(4);
  metrics->CacheResident(12345, 6);
  for (int i = 0; i < kStoreOperationCount; ++i) {
    metrics->StoreDone(static_cast<StoreOperation>(i), i % 2 == 0,
                       absl::Microseconds(150));
  }
  metrics->StoreUsage(123456, 78);
  metrics->StoreSize(987654, 3210);
  metrics->QuotaUsed(0.5);
  metrics->RevisionDeleted();
  metrics->LimitRejected("QUOTA_EXCEEDED");
  metrics->Contribution(/*duplicate=*/false);
  metrics->Contribution(/*duplicate=*/true);
  metrics->Contribution(/*duplicate=*/true);
  metrics->MemoryBudget(1 << 30, 77);
  metrics->Reloaded(ReloadedFile::kAccess, /*ok=*/false);
  metrics->Reloaded(ReloadedFile::kCertificate, /*ok=*/false);
  metrics->Reloaded(ReloadedFile::kCertificate, /*ok=*/true);
  metrics->LimitRejected("MEMORY_BUDGET");
  metrics->LimitRejected("model \"secret\"");
}

TEST(MetricsTest, ScrapeShowsEveryFamilyThatWasTouched) {
  Metrics metrics;
  TouchEverything(&metrics);
  const std::string text = Scrape(metrics);
  for (const char* line : {
           "grpc_server_started_total{grpc_type=\"bidi_stream\","
           "grpc_service=\"quantd.v1.QuantizationService\","
           "grpc_method=\"Quantize\"} 1",
           "grpc_server_handled_total{grpc_type=\"unary\","
           "grpc_service=\"quantd.v1.EncodingService\","
           "grpc_method=\"GetEncoding\",grpc_code=\"NotFound\"} 1",
           "grpc_server_handling_seconds_bucket{grpc_type=\"client_stream\","
           "grpc_service=\"quantd.v1.EncodingService\","
           "grpc_method=\"ImportEncodings\",le=\"0.005\"} 19",
           "quantd_tensor_seconds_count{rpc=\"Calibrate\",result=\"ok\"} 1",
           "quantd_tensor_seconds_bucket{rpc=\"Evaluate\",result=\"error\","
           "le=\"60\"} 0",
           "quantd_tensor_seconds_bucket{rpc=\"Evaluate\",result=\"error\","
           "le=\"+Inf\"} 1",
           "quantd_tensor_errors_total{rpc=\"Quantize\","
           "grpc_code=\"Unavailable\"} 1",
           // And the two that are no codes.
           "quantd_tensor_errors_total{rpc=\"Evaluate\","
           "grpc_code=\"Unknown\"} 3",
           "quantd_active_tensors_limit 40",
           "quantd_connections 7",
           "quantd_connections_limit 50",
           "quantd_draining 0",
           "quantd_reload_successful{file=\"access\"} 0",
           "quantd_reload_successful{file=\"certificate\"} 1",
           "quantd_payload_bytes_total{direction=\"in\"} 1000",
           "quantd_payload_bytes_total{direction=\"out\"} 250",
           "quantd_elements_total{rpc=\"Quantize\",format=\"int8\"} 7",
           "quantd_elements_total{rpc=\"Calibrate\",format=\"none\"} 5",
           "quantd_non_finite_elements_total 2",
           "quantd_clipped_elements_total 3",
           "quantd_active_streams 1",
           "quantd_active_tensors 1",
           "quantd_cache_hits_total 1",
           "quantd_cache_misses_total 1",
           "quantd_cache_evictions_total 4",
           "quantd_cache_resident_bytes 12345",
           "quantd_cache_entries 6",
           "quantd_store_seconds_bucket{operation=\"put\",le=\"0.00025\"} 1",
           "quantd_store_errors_total{operation=\"put\"} 1",
           "quantd_store_errors_total{operation=\"get\"} 0",
           "quantd_store_seconds_count{operation=\"contribute\"} 1",
           "quantd_store_seconds_count{operation=\"delete_statistics\"} 1",
           "quantd_store_bytes 123456",
           "quantd_store_rows 78",
           "quantd_store_size_bytes 987654",
           "quantd_store_free_bytes 3210",
           "quantd_quota_used_ratio 0.5",
           "quantd_retention_deleted_revisions_total 1",
           "quantd_limit_rejections_total{reason=\"QUOTA_EXCEEDED\"} 1",
           "quantd_calibration_merges_total{result=\"counted\"} 1",
           "quantd_calibration_merges_total{result=\"duplicate\"} 2",
           "quantd_limit_rejections_total{reason=\"STATISTICS_TOO_LARGE\"} 0",
           "quantd_memory_budget_bytes 1073741824",
           "quantd_memory_budget_used_bytes 77",
           "quantd_limit_rejections_total{reason=\"MEMORY_BUDGET\"} 1",
           "quantd_build_info{version=",
           "process_cpu_seconds_total",
           "process_resident_memory_bytes",
           "process_open_fds",
           "process_start_time_seconds",
       }) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST(MetricsTest, LabelSetsAreBounded) {
  Metrics metrics;
  TouchEverything(&metrics);
  const auto series_count = [&metrics] {
    size_t count = 0;
    for (const prometheus::MetricFamily& family : metrics.Collect()) {
      count += family.metric.size();
    }
    return count;
  };
  const size_t after_one = series_count();
  TouchEverything(&metrics);
  EXPECT_EQ(series_count(), after_one);
  EXPECT_LT(after_one, 2000u);
  EXPECT_THAT(Scrape(metrics), Not(HasSubstr("secret")));
}

TEST(MetricsTest, EveryFamilyHasHelpAndAppearsOnce) {
  Metrics metrics;
  TouchEverything(&metrics);
  std::set<std::string> names;
  for (const prometheus::MetricFamily& family : metrics.Collect()) {
    EXPECT_TRUE(names.insert(family.name).second) << family.name;
    EXPECT_NE(family.help, "") << family.name;
    EXPECT_FALSE(family.metric.empty()) << family.name;
    std::set<std::vector<prometheus::ClientMetric::Label>> labels;
    for (const prometheus::ClientMetric& metric : family.metric) {
      EXPECT_TRUE(labels.insert(metric.label).second) << family.name;
    }
  }
}

TEST(MetricsTest, BucketsIncludeTheirUpperBound) {
  Metrics metrics;
  metrics.StoreDone(StoreOperation::kGet, true, absl::Milliseconds(1));
  const std::string text = Scrape(metrics);
  EXPECT_THAT(
      text,
      HasSubstr("quantd_store_seconds_bucket{operation=\"get\",le=\"0.001\"} "
                "1"));
  EXPECT_THAT(
      text,
      HasSubstr("quantd_store_seconds_bucket{operation=\"get\",le=\"0.0005\"} "
                "0"));
  EXPECT_THAT(text,
              HasSubstr("quantd_store_seconds_sum{operation=\"get\"} 0.001"));
}

TEST(ShardedCountersTest, LosesNothingAndMixesNothingUp) {
  constexpr int kCount = 19;
  ShardedCounters counters(kCount);
  std::vector<std::thread> threads;
  for (int t = 0; t < 20; ++t) {
    threads.emplace_back([&counters] {
      for (int i = 0; i < 1900; ++i) counters.Add(i % kCount, i % kCount);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(counters.Sum(i), 20 * 100 * i);
}

TEST(MetricsTest, CountsEveryLimitAndEveryDenialOfTheTable) {
  Metrics metrics;
  int64_t count = 0;
  for (const core::ErrorInfo& row : core::kErrors) {
    ++count;
    for (int64_t i = 0; i < count; ++i) {
      metrics.LimitRejected(row.reason);
      metrics.AccessDenied(row.reason);
    }
  }
  const std::string text = Scrape(metrics);
  count = 0;
  for (const core::ErrorInfo& row : core::kErrors) {
    ++count;
    const std::string sample = absl::StrCat(
        "_total{reason=\"", std::string(row.reason), "\"} ", count, "\n");
    const std::string limit = "quantd_limit_rejections" + sample;
    const std::string denial = "quantd_access_denied" + sample;
    EXPECT_EQ(text.find(limit) != std::string::npos,
              row.kind == core::ErrorKind::kLimit)
        << row.reason;
    EXPECT_EQ(text.find(denial) != std::string::npos,
              row.kind == core::ErrorKind::kDenial)
        << row.reason;
  }
}

}  // namespace
}  // namespace quantd::server
