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

// Table and rows that a thread has at hand; used by one thread at a time.
class HistogramUpdate::Worker {
 public:
  explicit Worker(HistogramUpdate* update)
      : update_(*update), lease_(update->histograms_[0].mantissa_bits()) {}

  void Add(const StatisticsRange& range);
  void AddColumns(const StatisticsRange& range, int64_t column, int64_t count);
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
  void AddLongBlocks(const StatisticsRange& range, const BlockLayout::Row& row);
  void AddShortBlocks(const StatisticsRange& range,
                      const BlockLayout::Row& row);
  void AddRow(const StatisticsRange& range, const BlockLayout::Row& row);
  void AddRows(const StatisticsRange& range);
  // Calls `change(histogram)` under its lock and keeps the books.
  template <typename Function>
  void ChangeHistogram(int64_t scale_index, const Function& change);
  // Like ChangeHistogram, but the lock is held already.
  template <typename Function>
  void Change(int64_t scale_index, const Function& change);

  HistogramUpdate& update_;
  const BinTableLease lease_;
  // Scale index of what the table holds.
  int64_t scale_index_ = 0;
  int64_t grown_bytes_ = 0;
  Rows rows_;
};

template <typename Function>
void HistogramUpdate::Worker::ChangeHistogram(int64_t scale_index,
                                              const Function& change) {
  absl::MutexLock lock(&update_.MutexOf(scale_index));
  Change(scale_index, change);
}

template <typename Function>
void HistogramUpdate::Worker::Change(int64_t scale_index,
                                     const Function& change) {
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
  BlockLayout::RowCursor cursor(range.layout, range.first, range.count);
  BlockLayout::Row row;
  while (cursor.Next(&row)) {
    if (row.block == 1) {
      AddRow(range, row);
    } else if (row.block <= Histogram::kMaxValues) {
      AddShortBlocks(range, row);
    } else {
      AddLongBlocks(range, row);
    }
  }
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

void HistogramUpdate::Worker::AddLongBlocks(const StatisticsRange& range,
                                            const BlockLayout::Row& row) {
  int64_t done = 0;
  for (int64_t i = 0; done < row.count; ++i) {
    const int64_t count =
        std::min(row.count - done, (i + 1) * row.block - row.offset - done);
    AddLong(range, {row.begin + done, count, row.scale_index + i, 0});
    done += count;
  }
}

void HistogramUpdate::Worker::AddShortBlocks(const StatisticsRange& range,
                                             const BlockLayout::Row& row) {
  Drain();
  const int64_t size = ElementSizeBytes(range.type);
  int64_t done = 0;
  int64_t i = row.scale_index;
  while (done < row.count) {
    // End of the scale indices that are under one lock.
    const int64_t end = (i / kNeighbours + 1) * kNeighbours;
    absl::MutexLock lock(&update_.MutexOf(i));
    for (; i < end && done < row.count; ++i) {
      const int64_t count =
          std::min(row.count - done,
                   (i - row.scale_index + 1) * row.block - row.offset - done);
      float x[Histogram::kMaxValues];
      ToHistogramFloats(range.type,
                        range.in + (row.begin - range.first + done) * size,
                        count, x);
      Change(i, [&](Histogram* histogram) {
        histogram->Add(x, count, lease_.get());
      });
      done += count;
    }
  }
}

void HistogramUpdate::Worker::AddRow(const StatisticsRange& range,
                                     const BlockLayout::Row& row) {
  if (row.scale_index != rows_.scale_index || row.count != rows_.columns ||
      rows_.rows == kTileRows) {
    AddRows(range);
    rows_.scale_index = row.scale_index;
    rows_.columns = row.count;
  }
  rows_.begin[rows_.rows++] = row.begin;
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

void HistogramUpdate::Worker::AddColumns(const StatisticsRange& range,
                                         int64_t column, int64_t count) {
  Drain();
  constexpr int64_t kRows = 256;
  // So that the cache lines of a row of the tile do not share a few sets.
  constexpr int64_t kPadding = 16;
  float tile[kMaxColumns][kRows + kPadding];
  const int64_t columns = range.layout.row_size();
  const int64_t rows = range.count / columns;
  const int64_t size = ElementSizeBytes(range.type);
  for (int64_t first = 0; first < rows; first += kRows) {
    const int64_t height = std::min(kRows, rows - first);
    for (int64_t row = 0; row < height; ++row) {
      float x[kMaxColumns];
      ToHistogramFloats(range.type,
                        range.in + ((first + row) * columns + column) * size,
                        count, x);
      for (int64_t k = 0; k < count; ++k) tile[k][row] = x[k];
    }
    for (int64_t k = 0; k < count; ++k) {
      ChangeHistogram(column + k, [&](Histogram* histogram) {
        histogram->Add(tile[k], height, lease_.get());
      });
    }
  }
}

HistogramUpdate::HistogramUpdate(absl::Span<Histogram> histograms)
    : histograms_(histograms) {}

HistogramUpdate::~HistogramUpdate() = default;

std::unique_ptr<HistogramUpdate::Worker> HistogramUpdate::TakeWorker() {
  {
    absl::MutexLock lock(&mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<Worker> worker = std::move(idle_.back());
      idle_.pop_back();
      return worker;
    }
  }
  return std::make_unique<Worker>(this);
}

void HistogramUpdate::ReturnWorker(std::unique_ptr<Worker> worker) {
  absl::MutexLock lock(&mutex_);
  idle_.push_back(std::move(worker));
}

void HistogramUpdate::Add(const StatisticsRange& range) {
  std::unique_ptr<Worker> worker = TakeWorker();
  worker->Add(range);
  ReturnWorker(std::move(worker));
}

void HistogramUpdate::AddColumns(const StatisticsRange& range, int64_t column,
                                 int64_t count) {
  std::unique_ptr<Worker> worker = TakeWorker();
  worker->AddColumns(range, column, count);
  ReturnWorker(std::move(worker));
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
