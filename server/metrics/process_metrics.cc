#include "server/metrics/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "prometheus/metric_family.h"
#include "prometheus/metric_type.h"

namespace quantd::server {
namespace {

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void AddGauge(std::string name, std::string help, double value,
              std::vector<prometheus::MetricFamily>* families) {
  prometheus::MetricFamily& family = families->emplace_back();
  family.name = std::move(name);
  family.help = std::move(help);
  family.type = prometheus::MetricType::Gauge;
  family.metric.emplace_back().gauge.value = value;
}

// When the machine was started, in seconds since the epoch; 0 if unknown.
double BootTimeSeconds() {
  for (const absl::string_view line :
       absl::StrSplit(ReadFile("/proc/stat"), '\n')) {
    double seconds = 0;
    if (line.substr(0, 6) == "btime " &&
        absl::SimpleAtod(line.substr(6), &seconds)) {
      return seconds;
    }
  }
  return 0;
}

}  // namespace

std::vector<prometheus::MetricFamily> CollectProcessMetrics() {
  std::vector<prometheus::MetricFamily> families;

  rusage usage;
  if (getrusage(RUSAGE_SELF, &usage) == 0) {
    prometheus::MetricFamily& family = families.emplace_back();
    family.name = "process_cpu_seconds_total";
    family.help = "Total user and system CPU time spent in seconds.";
    family.type = prometheus::MetricType::Counter;
    family.metric.emplace_back().counter.value =
        static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
        1e-6 * static_cast<double>(usage.ru_utime.tv_usec +
                                   usage.ru_stime.tv_usec);
  }

  // The second field, the program's name, may hold spaces and parentheses.
  const std::string stat = ReadFile("/proc/self/stat");
  const size_t name_end = stat.rfind(") ");
  if (name_end != std::string::npos) {
    const std::vector<absl::string_view> fields =
        absl::StrSplit(absl::string_view(stat).substr(name_end + 2), ' ');
    // Fields 22 to 24 of proc(5); the first of `fields` is field 3.
    int64_t start_ticks = 0;
    int64_t virtual_bytes = 0;
    int64_t resident_pages = 0;
    if (fields.size() > 21 && absl::SimpleAtoi(fields[19], &start_ticks) &&
        absl::SimpleAtoi(fields[20], &virtual_bytes) &&
        absl::SimpleAtoi(fields[21], &resident_pages)) {
      AddGauge("process_virtual_memory_bytes", "Virtual memory size in bytes.",
               static_cast<double>(virtual_bytes), &families);
      AddGauge("process_resident_memory_bytes",
               "Resident memory size in bytes.",
               static_cast<double>(resident_pages * sysconf(_SC_PAGESIZE)),
               &families);
      if (const double boot_seconds = BootTimeSeconds(); boot_seconds > 0) {
        AddGauge("process_start_time_seconds",
                 "Start time of the process since unix epoch in seconds.",
                 boot_seconds + static_cast<double>(start_ticks) /
                                    static_cast<double>(sysconf(_SC_CLK_TCK)),
                 &families);
      }
    }
  }

  std::error_code error;
  std::filesystem::directory_iterator descriptors("/proc/self/fd", error);
  if (!error) {
    int64_t count = 0;
    while (descriptors != std::filesystem::directory_iterator()) {
      ++count;
      descriptors.increment(error);
      if (error) break;
    }
    // One of them is the listing's own.
    AddGauge("process_open_fds", "Number of open file descriptors.",
             static_cast<double>(count - 1), &families);
  }
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    AddGauge("process_max_fds", "Maximum number of open file descriptors.",
             static_cast<double>(limit.rlim_cur), &families);
  }
  return families;
}

}  // namespace quantd::server
