#include "server/metrics/process_metrics.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <map>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "prometheus/metric_family.h"
#include "server/net/file_descriptor.h"

namespace quantd::server {
namespace {

std::map<std::string, double> Collect() {
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : CollectProcessMetrics()) {
    EXPECT_EQ(family.metric.size(), 1u) << family.name;
    EXPECT_FALSE(family.help.empty()) << family.name;
    values[family.name] =
        family.metric[0].gauge.value + family.metric[0].counter.value;
  }
  return values;
}

TEST(ProcessMetricsTest, AreThoseOfThisProcess) {
  auto values = Collect();
  EXPECT_EQ(values.size(), 6u);
  EXPECT_GT(values["process_cpu_seconds_total"], 0);
  EXPECT_GT(values["process_resident_memory_bytes"], 1 << 20);
  EXPECT_GT(values["process_virtual_memory_bytes"],
            values["process_resident_memory_bytes"]);
  // Boot time has whole seconds.
  const double now = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  EXPECT_LT(values["process_start_time_seconds"], now + 2);
  EXPECT_GT(values["process_start_time_seconds"], now - 3600);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(values["process_max_fds"], static_cast<double>(limit.rlim_cur));
}

TEST(ProcessMetricsTest, CountOpenDescriptors) {
  const double before = Collect()["process_open_fds"];
  const FileDescriptor one(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const FileDescriptor two(open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(Collect()["process_open_fds"], before + 2);
}

}  // namespace
}  // namespace quantd::server
