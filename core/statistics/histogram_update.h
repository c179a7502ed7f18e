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

// One update of the histograms of a tensor. Thread-safe, except Finish.
//
// Each thread adds up a long run of one scale index in a table, which goes into
// the histogram when the scale index changes. Short runs go there at once. Rows
// that step through scale indices do so after a transposition. A lock covers
// every kStripes-th lot of kNeighbours histograms. Sums are of integers, so
// their order does not matter.
class HistogramUpdate {
 public:
  // `histograms`  one per scale index, touched by nobody else until Finish.
  explicit HistogramUpdate(absl::Span<Histogram> histograms);
  ~HistogramUpdate();

  HistogramUpdate(const HistogramUpdate&) = delete;
  HistogramUpdate& operator=(const HistogramUpdate&) = delete;

  // Takes in the elements of `range`.
  void Add(const StatisticsRange& range) ABSL_LOCKS_EXCLUDED(mutex_);

  // Takes in columns [column, column + count) of `range`: the more rows, the
  // less each element of a column takes.
  // Requires: `range` is whole rows of the layout, whose elements have a scale
  // index each, the same in all rows; count <= kMaxColumns.
  void AddColumns(const StatisticsRange& range, int64_t column, int64_t count)
      ABSL_LOCKS_EXCLUDED(mutex_);
  static constexpr int64_t kMaxColumns = 64;

  // Adds what the tables still hold. Once, after all else.
  // Returns by how many bytes the histograms grew.
  int64_t Finish() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static constexpr int64_t kStripes = 64;
  // Histograms that follow each other and share a lock, so that short runs do
  // not take one each.
  static constexpr int64_t kNeighbours = 16;

  class Worker;

  std::unique_ptr<Worker> TakeWorker() ABSL_LOCKS_EXCLUDED(mutex_);
  void ReturnWorker(std::unique_ptr<Worker> worker) ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Mutex& MutexOf(int64_t scale_index) {
    return stripes_[scale_index / kNeighbours % kStripes];
  }

  // Each under MutexOf its index.
  const absl::Span<Histogram> histograms_;
  std::array<absl::Mutex, kStripes> stripes_;
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<Worker>> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_HISTOGRAM_UPDATE_H_
