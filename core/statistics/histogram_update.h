// How the elements of a tensor find their histograms, on several threads.

#ifndef QUANTD_CORE_STATISTICS_HISTOGRAM_UPDATE_H_
#define QUANTD_CORE_STATISTICS_HISTOGRAM_UPDATE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "core/statistics/histogram.h"
#include "core/statistics/statistics_kernel.h"

namespace quantd::core {

// One update of the histograms of a tensor. Thread-safe but for Finish.
//
// Long runs of one scale index are added up in a table per thread, which goes
// into the histogram when the scale index changes; short ones go there at
// once, and rows that step through scale indices after a transposition. A lock
// covers every kStripes-th histogram. Sums of integers: the order is nothing.
class HistogramUpdate {
 public:
  // `histograms`  one per scale index, touched by nobody else until Finish.
  explicit HistogramUpdate(absl::Span<Histogram> histograms);
  ~HistogramUpdate();

  HistogramUpdate(const HistogramUpdate&) = delete;
  HistogramUpdate& operator=(const HistogramUpdate&) = delete;

  // Takes in the elements of `range`.
  void Add(const StatisticsRange& range) ABSL_LOCKS_EXCLUDED(mutex_);

  // Adds what the tables still hold. Once, after all else.
  // Returns by how many bytes the histograms grew.
  int64_t Finish() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr int64_t kStripes = 64;

  class Worker;

  absl::Mutex& MutexOf(int64_t scale_index) {
    return stripes_[scale_index % kStripes];
  }

  // Each under MutexOf its index.
  const absl::Span<Histogram> histograms_;
  std::array<absl::Mutex, kStripes> stripes_;
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<Worker>> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_HISTOGRAM_UPDATE_H_
