// What the drivers of the service's peers share.

#ifndef QUANTD_TESTS_BENCH_PEERS_DRIVE_H_
#define QUANTD_TESTS_BENCH_PEERS_DRIVE_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace quantd::bench {

using Clock = std::chrono::steady_clock;

inline constexpr std::chrono::milliseconds kWarmup{200};

// The time in which a driver counts: after a warm-up, `seconds` long.
// Thread-safe.
class Window {
 public:
  explicit Window(double seconds)
      : begin_(Clock::now() + kWarmup),
        end_(begin_ + std::chrono::duration_cast<Clock::duration>(
                          std::chrono::duration<double>(seconds))) {}

  bool Counts(Clock::time_point time) const {
    return time >= begin_ && time < end_;
  }
  bool Over(Clock::time_point time) const { return time >= end_; }
  double seconds() const {
    return std::chrono::duration<double>(end_ - begin_).count();
  }

 private:
  const Clock::time_point begin_;
  const Clock::time_point end_;
};

// One JSON object on stdout: of `bytes` float32 that went in the window.
inline void PrintThroughput(int64_t bytes, const Window& window) {
  std::printf("{\"gigabytes_per_second\": %.4f}\n",
              static_cast<double>(bytes) * 1e-9 / window.seconds());
}

// The same of messages, each with its round trip.
inline void PrintRoundTrips(std::vector<Clock::duration> latencies,
                            const Window& window) {
  std::sort(latencies.begin(), latencies.end());
  const auto microseconds = [&latencies](double share) {
    if (latencies.empty()) return 0.0;
    const size_t last = latencies.size() - 1;
    return std::chrono::duration<double, std::micro>(
               latencies[static_cast<size_t>(share *
                                             static_cast<double>(last))])
        .count();
  };
  std::printf(
      "{\"tensors_per_second\": %.1f, \"p50_us\": %.2f, \"p99_us\": %.2f}\n",
      static_cast<double>(latencies.size()) / window.seconds(),
      microseconds(0.5), microseconds(0.99));
}

}  // namespace quantd::bench

#endif  // QUANTD_TESTS_BENCH_PEERS_DRIVE_H_
