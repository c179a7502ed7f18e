#include "core/statistics/histogram_update.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "core/statistics/bin_table.h"
#include "core/statistics/histogram.h"
#include "core/statistics/statistics_kernel.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"

namespace quantd::core {
namespace {

// Elements that are converted at a time.
constexpr int64_t kBlockElements = 2048;
// Rows that are transposed at a time, and columns: a cache line of each row.
constexpr int64_t kTileRows = 128;
constexpr int64_t kTileColumns = 16;

}  // namespace

// What a thread has at hand; used by one at a time.
class HistogramUpdate::Worker {
 public:
  explicit Worker(HistogramUpdate* update)
      : update_(*update), lease_(update->histograms_[0].mantissa_bits()) {}

  void Add(const StatisticsRange& range);
  // Adds what the table holds to its histogram.
  void Drain();

  int64_t grown_bytes() const { return grown_bytes_; }

 private:
  // Rows of elements that step through the same scale indices.
  struct Rows {
    int64_t scale_index = 0;
    int64_t columns = 0;
    int64_t rows = 0;
    int64_t begin[kTileRows];
  };

  void AddLong(const StatisticsRange& range, const BlockLayout::Run& run);
  void AddShort(const StatisticsRange& range, const BlockLayout::Run& run);
  void AddRow(const StatisticsRange& range, const BlockLayout::Run& run);
  void AddRows(const StatisticsRange& range);
  // Calls `change(histogram)` under its lock and keeps the books.
  template <typename Change>
  void ChangeHistogram(int64_t scale_index, const Change& change);

  HistogramUpdate& update_;
  const BinTableLease lease_;
  // Of what the table holds.
  int64_t scale_index_ = 0;
  int64_t grown_bytes_ = 0;
  Rows rows_;
};

template <typename Change>
void HistogramUpdate::Worker::ChangeHistogram(int64_t scale_index,
                                              const Change& change) {
  absl::MutexLock lock(&update_.MutexOf(scale_index));
  Histogram& histogram = update_.histograms_[scale_index];
  const int64_t before = histogram.memory_bytes();
  change(&histogram);
  grown_bytes_ += histogram.memory_bytes() - before;
}

void HistogramUpdate::Worker::Drain() {
  if (lease_.get()->empty()) return;
  ChangeHistogram(scale_index_, [&](Histogram* histogram) {
    histogram->Drain(lease_.get());
  });
}

void HistogramUpdate::Worker::Add(const StatisticsRange& range) {
  range.layout.ForEachRun(range.first, range.count,
                          [&](const BlockLayout::Run& run) {
                            if (run.scale_step == 1) {
                              AddRow(range, run);
                            } else if (run.count > Histogram::kMaxValues) {
                              AddLong(range, run);
                            } else {
                              AddShort(range, run);
                            }
                          });
  AddRows(range);
}

void HistogramUpdate::Worker::AddLong(const StatisticsRange& range,
                                      const BlockLayout::Run& run) {
  if (run.scale_index != scale_index_) Drain();
  scale_index_ = run.scale_index;
  BinTable* table = lease_.get();
  const bool converts = range.type != ElementType::kFloat32;
  float converted[kBlockElements];
  int64_t done = 0;
  while (done < run.count) {
    if (table->room() == 0) Drain();
    const uint8_t* in = range.in + (run.begin - range.first + done) *
                                       ElementSizeBytes(range.type);
    int64_t part = std::min(run.count - done, table->room());
    if (converts) {
      part = std::min(part, kBlockElements);
      ToHistogramFloats(range.type, in, part, converted);
      in = reinterpret_cast<const uint8_t*>(converted);
    }
    table->Add(in, part);
    done += part;
  }
}

void HistogramUpdate::Worker::AddShort(const StatisticsRange& range,
                                       const BlockLayout::Run& run) {
  Drain();
  float x[Histogram::kMaxValues];
  ToHistogramFloats(
      range.type,
      range.in + (run.begin - range.first) * ElementSizeBytes(range.type),
      run.count, x);
  ChangeHistogram(run.scale_index, [&](Histogram* histogram) {
    histogram->Add(x, run.count, lease_.get());
  });
}

void HistogramUpdate::Worker::AddRow(const StatisticsRange& range,
                                     const BlockLayout::Run& run) {
  if (run.scale_index != rows_.scale_index || run.count != rows_.columns ||
      rows_.rows == kTileRows) {
    AddRows(range);
    rows_.scale_index = run.scale_index;
    rows_.columns = run.count;
  }
  rows_.begin[rows_.rows++] = run.begin;
}

void HistogramUpdate::Worker::AddRows(const StatisticsRange& range) {
  if (rows_.rows == 0) return;
  Drain();
  float tile[kTileColumns][kTileRows];
  for (int64_t column = 0; column < rows_.columns; column += kTileColumns) {
    const int64_t width = std::min(kTileColumns, rows_.columns - column);
    for (int64_t row = 0; row < rows_.rows; ++row) {
      float x[kTileColumns];
      ToHistogramFloats(range.type,
                        range.in + (rows_.begin[row] - range.first + column) *
                                       ElementSizeBytes(range.type),
                        width, x);
      for (int64_t k = 0; k < width; ++k) tile[k][row] = x[k];
    }
    for (int64_t k = 0; k < width; ++k) {
      ChangeHistogram(rows_.scale_index + column + k,
                      [&](Histogram* histogram) {
                        histogram->Add(tile[k], rows_.rows, lease_.get());
                      });
    }
  }
  rows_.rows = 0;
}

HistogramUpdate::HistogramUpdate(absl::Span<Histogram> histograms)
    : histograms_(histograms) {}

HistogramUpdate::~HistogramUpdate() = default;

void HistogramUpdate::Add(const StatisticsRange& range) {
  std::unique_ptr<Worker> worker;
  {
    absl::MutexLock lock(&mutex_);
    if (!idle_.empty()) {
      worker = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (worker == nullptr) worker = std::make_unique<Worker>(this);
  worker->Add(range);
  absl::MutexLock lock(&mutex_);
  idle_.push_back(std::move(worker));
}

int64_t HistogramUpdate::Finish() {
  absl::MutexLock lock(&mutex_);
  int64_t grown_bytes = 0;
  for (const std::unique_ptr<Worker>& worker : idle_) {
    worker->Drain();
    grown_bytes += worker->grown_bytes();
  }
  return grown_bytes;
}

}  // namespace quantd::core
