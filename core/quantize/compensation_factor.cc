#include "core/quantize/compensation_factor.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/compensated_rounding_kernel.h"
#include "core/simd_internal.h"
#include "hwy/aligned_allocator.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/quantize/compensation_factor.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/quantize/panel_product-inl.h"

#ifndef QUANTD_CORE_QUANTIZE_COMPENSATION_FACTOR_ONCE
#define QUANTD_CORE_QUANTIZE_COMPENSATION_FACTOR_ONCE
namespace quantd::core {
namespace {

// Rows of R that are computed before the rest of A is brought up to date. A
// packed panel of them fits the L1. Results do not depend on it.
constexpr int64_t kBlockRows = 128;
constexpr int64_t kPackedWidth = kPanelWidth<double>;
// Panels of a task.
constexpr int64_t kTaskPanels = 8;
static_assert(kBlockRows % kPanelRows == 0 && kPackedWidth % kPanelRows == 0);

// The rows [first, first + count) of R, and their columns behind them as the
// kernels need them.
struct BlockRows {
  int64_t end() const { return first + count; }
  // Panels behind the rows.
  int64_t panels() const {
    return (a.size - end() + kPackedWidth - 1) / kPackedWidth;
  }
  double* panel(int64_t index) const {
    return packed + index * kBlockRows * kPackedWidth;
  }

  UpperTriangle a;
  int64_t first;
  int64_t count;
  // [count, kBlockRows] the columns of the rows themselves; 0 below.
  double* diagonal;
  // [panels, kBlockRows, kPackedWidth] the others; 0 behind the last.
  double* packed;
};

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_QUANTIZE_COMPENSATION_FACTOR_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

// Nobody calls these: the scalar definition takes their place.
int64_t FactorDiagonal(const BlockRows& rows, const double* least_pivot) {
  return rows.a.size;
}
void SolvePanel(const BlockRows& rows, int64_t panel) {}
void UpdateTile(const BlockRows& rows, int64_t j_task, int64_t i_task) {}

#else

// CholeskyScalar of the rows' own columns. Returns the index in A of the first
// pivot that is too small, or A's size.
int64_t FactorDiagonal(const BlockRows& rows, const double* least_pivot) {
  const hn::ScalableTag<double> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  double* const r = rows.diagonal;
  for (int64_t k = 0; k < rows.count; ++k) {
    std::fill(r + k * kBlockRows, r + (k + 1) * kBlockRows, 0.0);
    std::memcpy(r + k * kBlockRows + k,
                rows.a.row(rows.first + k) + rows.first + k,
                (rows.count - k) * sizeof(double));
  }
  for (int64_t k = 0; k < rows.count; ++k) {
    double* const row = r + k * kBlockRows;
    if (!(row[k] > least_pivot[rows.first + k])) return rows.first + k;
    row[k] = std::sqrt(row[k]);
    for (int64_t i = k + 1; i < rows.count; ++i) row[i] /= row[k];
    for (int64_t j = k + 1; j < rows.count; ++j) {
      double* const other = r + j * kBlockRows;
      const auto factor = hn::Set(d, row[j]);
      // From the beginning of a vector: what is below the diagonal is not used.
      for (int64_t i = j & -lanes; i < rows.count; i += lanes) {
        hn::Store(SubtractProduct(d, factor, hn::Load(d, row + i),
                                  hn::Load(d, other + i)),
                  d, other + i);
      }
    }
  }
  for (int64_t k = 0; k < rows.count; ++k) {
    std::memcpy(rows.a.row(rows.first + k) + rows.first + k,
                r + k * kBlockRows + k, (rows.count - k) * sizeof(double));
  }
  return rows.a.size;
}

// The rows' elements of a panel behind them.
void SolvePanel(const BlockRows& rows, int64_t panel) {
  const hn::ScalableTag<double> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  double* const packed = rows.panel(panel);
  const int64_t begin = rows.end() + panel * kPackedWidth;
  const int64_t width = std::min(kPackedWidth, rows.a.size - begin);
  for (int64_t k = 0; k < rows.count; ++k) {
    double* const row = packed + k * kPackedWidth;
    std::memcpy(row, rows.a.row(rows.first + k) + begin,
                width * sizeof(double));
    std::fill(row + width, row + kPackedWidth, 0.0);
  }
  // The last rows of R are few.
  const int64_t padded = PanelCount(rows.count) * kPanelRows;
  std::fill(packed + rows.count * kPackedWidth, packed + padded * kPackedWidth,
            0.0);
  for (int64_t k = 0; k < rows.count; k += kPanelRows) {
    SubtractPanelProduct(k, rows.diagonal + k, kBlockRows, packed,
                         packed + k * kPackedWidth, kPackedWidth);
    for (int64_t i = k; i < std::min(k + kPanelRows, rows.count); ++i) {
      double* const row = packed + i * kPackedWidth;
      const auto root = hn::Set(d, rows.diagonal[i * kBlockRows + i]);
      for (int64_t x = 0; x < kPackedWidth; x += lanes) {
        auto sum = hn::Load(d, row + x);
        for (int64_t l = k; l < i; ++l) {
          const auto factor = hn::Set(d, rows.diagonal[l * kBlockRows + i]);
          sum = SubtractProduct(
              d, factor, hn::Load(d, packed + l * kPackedWidth + x), sum);
        }
        hn::Store(hn::Div(sum, root), d, row + x);
      }
    }
  }
  for (int64_t k = 0; k < rows.count; ++k) {
    std::memcpy(rows.a.row(rows.first + k) + begin, packed + k * kPackedWidth,
                width * sizeof(double));
  }
}

// A_ji for the panels of two tasks.
void UpdateTile(const BlockRows& rows, int64_t j_task, int64_t i_task) {
  const int64_t panels = rows.panels();
  const int64_t size = rows.a.size;
  const auto end_panel = [&](int64_t task) {
    return std::min((task + 1) * kTaskPanels, panels);
  };
  for (int64_t pi = i_task * kTaskPanels; pi < end_panel(i_task); ++pi) {
    const int64_t i = rows.end() + pi * kPackedWidth;
    const double* const b = rows.panel(pi);
    for (int64_t pj = j_task * kTaskPanels;
         pj < std::min(end_panel(j_task), pi + 1); ++pj) {
      for (int64_t sub = 0; sub < kPackedWidth; sub += kPanelRows) {
        const int64_t j = rows.end() + pj * kPackedWidth + sub;
        if (j >= size) break;
        const double* const a = rows.panel(pj) + sub;
        double* const c = rows.a.row(j) + i;
        if (HWY_LIKELY(i + kPackedWidth <= size && j + kPanelRows <= size)) {
          SubtractPanelProduct(rows.count, a, kPackedWidth, b, c,
                               rows.a.stride);
          continue;
        }
        HWY_ALIGN double edge[kPanelRows * kPackedWidth] = {};
        const int64_t height = std::min(kPanelRows, size - j);
        const int64_t bytes = std::min(kPackedWidth, size - i) *
                              static_cast<int64_t>(sizeof(double));
        for (int64_t y = 0; y < height; ++y) {
          std::memcpy(edge + y * kPackedWidth, c + y * rows.a.stride, bytes);
        }
        SubtractPanelProduct(rows.count, a, kPackedWidth, b, edge,
                             kPackedWidth);
        for (int64_t y = 0; y < height; ++y) {
          std::memcpy(c + y * rows.a.stride, edge + y * kPackedWidth, bytes);
        }
      }
    }
  }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quantd::core {
namespace {

HWY_EXPORT(FactorDiagonal);
HWY_EXPORT(SolvePanel);
HWY_EXPORT(UpdateTile);

// Rows and columns of the squares that matrices are read by: lines of the
// cache.
constexpr int64_t kSquare = 8;
// Elements of a row, and rows, that a task permutes.
constexpr int64_t kTaskColumns = 64;
constexpr int64_t kTaskRows = 16;

// CholeskyScalar, in blocks of rows.
int64_t Cholesky(const UpperTriangle& a, const double* least_pivot,
                 ThreadPool* pool, StopToken stop) {
  if (internal::UsesScalarKernels()) {
    return CholeskyScalar(a, least_pivot, stop);
  }
  const auto diagonal = hwy::AllocateAligned<double>(kBlockRows * kBlockRows);
  const auto packed =
      hwy::AllocateAligned<double>(kBlockRows * (a.size + kPackedWidth));
  for (int64_t first = 0; first < a.size; first += kBlockRows) {
    if (stop.stopped()) break;
    const BlockRows rows{a, first, std::min(kBlockRows, a.size - first),
                         diagonal.get(), packed.get()};
    const int64_t bad = HWY_DYNAMIC_DISPATCH(FactorDiagonal)(rows, least_pivot);
    if (bad < a.size) return bad;
    const int64_t panels = rows.panels();
    const int64_t tasks = (panels + kTaskPanels - 1) / kTaskPanels;
    ParallelFor(pool, tasks, [&](int64_t task) {
      const int64_t end = std::min((task + 1) * kTaskPanels, panels);
      for (int64_t panel = task * kTaskPanels; panel < end; ++panel) {
        if (stop.stopped()) return;
        HWY_DYNAMIC_DISPATCH(SolvePanel)(rows, panel);
      }
    });
    // Tasks of the upper triangle, row after row.
    std::vector<std::pair<int32_t, int32_t>> tiles;
    for (int32_t j = 0; j < tasks; ++j) {
      for (int32_t i = j; i < tasks; ++i) tiles.emplace_back(j, i);
    }
    ParallelFor(pool, static_cast<int64_t>(tiles.size()), [&](int64_t tile) {
      if (stop.stopped()) return;
      HWY_DYNAMIC_DISPATCH(UpdateTile)
      (rows, tiles[tile].first, tiles[tile].second);
    });
  }
  return a.size;
}

// The place of an element that may not be there, or none.
struct Place {
  friend bool operator<(const Place& a, const Place& b) {
    return std::make_pair(a.row, a.column) < std::make_pair(b.row, b.column);
  }
  bool is_somewhere() const {
    return row < std::numeric_limits<int64_t>::max();
  }

  int64_t row = std::numeric_limits<int64_t>::max();
  int64_t column = 0;
};

// True if the elements [j][i] and [i][j] may be those of a Gram matrix.
bool AreSound(const double* a, int64_t size, int64_t j, int64_t i) {
  const double upper = a[j * size + i];
  if (!std::isfinite(upper) || upper != a[i * size + j]) return false;
  if (i == j) return upper >= 0;
  // The row of a dead feature.
  return upper == 0 || (a[j * size + j] != 0 && a[i * size + i] != 0);
}

absl::Status PlaceError(const double* a, int64_t size, int64_t first_column,
                        Place place) {
  const double value = a[place.row * size + place.column];
  const double mirrored = a[place.column * size + place.row];
  const auto name = [&](int64_t row, int64_t column) {
    return absl::StrCat("element [", first_column + row, ", ",
                        first_column + column, "]");
  };
  const std::string is =
      absl::StrCat(name(place.row, place.column), " is ", value);
  if (!std::isfinite(value)) {
    return GramInvalidError(absl::StrCat(is, "; expected finite elements"));
  }
  if (value != mirrored) {
    return GramInvalidError(
        absl::StrCat(is, ", but ", name(place.column, place.row), " is ",
                     mirrored, "; expected a symmetric matrix"));
  }
  return GramInvalidError(absl::StrCat(
      is, place.row == place.column
              ? "; expected a diagonal of at least 0"
              : ", but one of the two features has 0 on the diagonal"));
}

absl::Status CheckGram(const double* a, int64_t size, int64_t first_column,
                       ThreadPool* pool, StopToken stop) {
  const int64_t squares = (size + kSquare - 1) / kSquare;
  std::vector<Place> bad(squares);
  ParallelFor(pool, squares, [&](int64_t task) {
    Place& first = bad[task];
    const int64_t j_begin = task * kSquare;
    const int64_t j_end = std::min(j_begin + kSquare, size);
    for (int64_t i_begin = j_begin; i_begin < size; i_begin += kSquare) {
      if (stop.stopped()) return;
      const int64_t i_end = std::min(i_begin + kSquare, size);
      for (int64_t j = j_begin; j < j_end; ++j) {
        for (int64_t i = std::max(i_begin, j); i < i_end; ++i) {
          if (!AreSound(a, size, j, i)) first = std::min(first, Place{j, i});
        }
      }
    }
  });
  if (stop.stopped()) return StoppedError();
  const Place first = *std::min_element(bad.begin(), bad.end());
  return first.is_somewhere() ? PlaceError(a, size, first_column, first)
                              : absl::OkStatus();
}

// Element [j][i] becomes what element [from[j]][from[i]] was.
void Permute(double* a, int64_t size, absl::Span<const int32_t> from,
             ThreadPool* pool, StopToken stop) {
  ParallelFor(pool, (size + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
    std::vector<double> row(size);
    const int64_t end = std::min((task + 1) * kTaskRows, size);
    for (int64_t j = task * kTaskRows; j < end; ++j) {
      if (stop.stopped()) return;
      double* const elements = a + j * size;
      for (int64_t i = 0; i < size; ++i) row[i] = elements[from[i]];
      std::copy(row.begin(), row.end(), elements);
    }
  });
  // First index of each cycle of the permutation.
  std::vector<int32_t> starts;
  std::vector<bool> is_seen(size);
  for (int32_t start = 0; start < size; ++start) {
    if (is_seen[start] || from[start] == start) continue;
    starts.push_back(start);
    for (int32_t j = start; !is_seen[j]; j = from[j]) is_seen[j] = true;
  }
  ParallelFor(
      pool, (size + kTaskColumns - 1) / kTaskColumns, [&](int64_t task) {
        const int64_t begin = task * kTaskColumns;
        const size_t bytes =
            std::min(kTaskColumns, size - begin) * sizeof(double);
        const auto part = [&](int64_t j) { return a + j * size + begin; };
        double saved[kTaskColumns];
        for (const int32_t start : starts) {
          if (stop.stopped()) return;
          std::memcpy(saved, part(start), bytes);
          int32_t j = start;
          for (; from[j] != start; j = from[j]) {
            std::memcpy(part(j), part(from[j]), bytes);
          }
          std::memcpy(part(j), saved, bytes);
        }
      });
}

// The columns of a block in order, dead ones last. Returns how many are not.
int64_t OrderColumns(const double* a, int64_t size, ColumnOrder order,
                     absl::Span<int32_t> columns) {
  std::iota(columns.begin(), columns.end(), 0);
  const auto diagonal = [&](int32_t column) {
    return a[column * size + column];
  };
  const auto dead =
      std::stable_partition(columns.begin(), columns.end(),
                            [&](int32_t c) { return diagonal(c) != 0; });
  if (order == ColumnOrder::kFallingDiagonal) {
    std::stable_sort(columns.begin(), dead, [&](int32_t x, int32_t y) {
      return diagonal(x) > diagonal(y);
    });
  }
  return dead - columns.begin();
}

// Adds to the diagonal of the columns. Returns how much.
double Damp(double* a, int64_t size, double damping,
            absl::Span<const int32_t> columns) {
  double mean = 0;
  for (const int32_t c : columns) {
    mean += a[c * size + c] / static_cast<double>(columns.size());
  }
  for (const int32_t c : columns) a[c * size + c] += damping * mean;
  return damping * mean;
}

// U of the columns [first, first + kPanelRows) from R of the reversed order.
void StorePanel(const UpperTriangle& r, int64_t panel, float* out) {
  const int64_t last = r.size - 1;
  for (int64_t j = 0; j < (panel + 1) * kPanelRows; ++j) {
    for (int64_t c = 0; c < kPanelRows; ++c) {
      const int64_t k = panel * kPanelRows + c;
      const bool is_above = j < k && k <= last;
      out[j * kPanelRows + c] =
          is_above ? static_cast<float>(r.row(last - k)[last - j] /
                                        r.row(last - k)[last - k])
                   : 0.0f;
    }
  }
}

absl::Status CheckSizes(int64_t columns, absl::Span<const GramBlock> gram) {
  int64_t width = 0;
  for (const GramBlock& block : gram) {
    // A matrix of more columns does not fit memory.
    const bool is_square =
        block.size > 0 && block.size < (int64_t{1} << 31) &&
        block.size * block.size == static_cast<int64_t>(block.matrix.size());
    if (!is_square) {
      return GramInvalidError(absl::StrCat(
          "a matrix of ", block.size, " features has ", block.matrix.size(),
          " elements; expected the square of at least 1 feature"));
    }
    width += block.size;
  }
  if (width != columns) {
    return GramInvalidError(absl::StrCat("the matrix has ", width,
                                         " features, expected ", columns,
                                         ", one per column of the weight"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CompensationFactor> CompensationFactor::Create(
    int64_t columns, absl::Span<const GramBlock> gram,
    const CompensationOptions& options, ThreadPool* pool, StopToken stop) {
  if (!std::isfinite(options.damping) || options.damping < 0) {
    return MethodInvalidError(absl::StrCat(
        "damping is ", options.damping, ", expected a number of at least 0"));
  }
  if (absl::Status status = CheckSizes(columns, gram); !status.ok()) {
    return status;
  }
  CompensationFactor factor;
  factor.order_.resize(columns);
  factor.position_.resize(columns);
  factor.pivots_.resize(columns);
  factor.blocks_.reserve(gram.size());
  int64_t first = 0;
  int64_t floats = 0;
  for (const GramBlock& block : gram) {
    double* const a = block.matrix.data();
    absl::Status status = CheckGram(a, block.size, first, pool, stop);
    if (!status.ok()) return status;
    const absl::Span<int32_t> order =
        absl::MakeSpan(factor.order_).subspan(first, block.size);
    const int64_t live = OrderColumns(a, block.size, options.order, order);
    factor.blocks_.push_back({first, block.size, live, floats});
    floats += PanelOffset(PanelCount(live));
    first += block.size;
  }
  factor.panels_.resize(floats);
  for (size_t b = 0; b < gram.size(); ++b) {
    Block& block = factor.blocks_[b];
    const absl::Span<int32_t> order =
        absl::MakeSpan(factor.order_).subspan(block.first, block.size);
    double* const a = gram[b].matrix.data();
    block.damping =
        Damp(a, block.size, options.damping, order.first(block.live));
    std::vector<int32_t> from(order.begin(), order.end());
    std::reverse(from.begin(), from.begin() + block.live);
    Permute(a, block.size, from, pool, stop);
    if (stop.stopped()) return StoppedError();
    const UpperTriangle triangle{a, block.live, block.size};
    // Most that rounding may leave of a pivot that is 0.
    std::vector<double> least_pivot(block.live);
    for (int64_t k = 0; k < block.live; ++k) {
      least_pivot[k] =
          triangle.row(k)[k] * static_cast<double>(block.live) * 0x1p-53;
    }
    const int64_t bad = Cholesky(triangle, least_pivot.data(), pool, stop);
    if (stop.stopped()) return StoppedError();
    if (bad < block.live) {
      return GramInvalidError(absl::StrCat(
          "the matrix is not positive definite at feature ",
          block.first + from[bad], " with ", block.damping,
          " added to its diagonal; expected X^T X of inputs X, or more "
          "damping"));
    }
    ParallelFor(pool, PanelCount(block.live), [&](int64_t panel) {
      if (stop.stopped()) return;
      StorePanel(triangle, panel,
                 factor.panels_.data() + block.offset + PanelOffset(panel));
    });
    for (int64_t k = 0; k < block.live; ++k) {
      const int64_t reversed = block.live - 1 - k;
      const double root = triangle.row(reversed)[reversed];
      factor.pivots_[block.first + k] = root * root;
    }
    for (int64_t k = 0; k < block.size; ++k) {
      factor.position_[block.first + order[k]] =
          static_cast<int32_t>(block.first + k);
      order[k] += static_cast<int32_t>(block.first);
    }
  }
  if (stop.stopped()) return StoppedError();
  return factor;
}

absl::Duration CompensationFactor::Time(absl::Span<const int64_t> block_sizes) {
  // Fused multiply-adds.
  constexpr double kPerSecond = 5e9;
  double products = 0;
  for (const int64_t size : block_sizes) {
    const double n = static_cast<double>(size);
    products += n * n * n / 6;
  }
  return absl::Seconds(products / kPerSecond);
}

int64_t CompensationFactor::MemoryBytes(absl::Span<const int64_t> block_sizes) {
  int64_t bytes = sizeof(CompensationFactor);
  for (const int64_t size : block_sizes) {
    bytes +=
        static_cast<int64_t>(sizeof(Block)) +
        size * static_cast<int64_t>(2 * sizeof(int32_t) + sizeof(double)) +
        PanelOffset(PanelCount(size)) * static_cast<int64_t>(sizeof(float));
  }
  return bytes;
}

absl::Status CheckSemidefinite(const GramState& gram, ThreadPool* pool,
                               StopToken stop) {
  CompensationOptions options;
  options.damping = 1e-6;
  options.order = ColumnOrder::kNatural;
  for (int64_t part = 0; part < gram.part_count(); ++part) {
    const int64_t width = gram.PartWidth(part);
    std::vector<double> dense = gram.Dense(part);
    const absl::Status status =
        CompensationFactor::Create(width,
                                   {GramBlock{width, absl::MakeSpan(dense)}},
                                   options, pool, stop)
            .status();
    if (stop.stopped()) return StoppedError();
    if (status.ok()) continue;
    const int64_t first = part * gram.part_size();
    return StatisticsInvalidError(absl::StrCat(
        "the Gram state of features ", first, " to ", first + width - 1,
        " is not positive semidefinite, expected the sum of x x^T over rows "
        "x"));
  }
  return absl::OkStatus();
}

absl::Duration SemidefiniteCheckTime(int64_t features, int64_t part_size) {
  return features / part_size * CompensationFactor::Time({part_size}) +
         CompensationFactor::Time({features % part_size});
}

int64_t SemidefiniteCheckBytes(int64_t features, int64_t part_size) {
  const int64_t width = std::min(features, part_size);
  return width * width * static_cast<int64_t>(sizeof(double)) +
         CompensationFactor::MemoryBytes({width}) +
         width * CompensationFactor::kCreateColumnBytes;
}

int64_t CompensationFactor::memory_bytes() const {
  return static_cast<int64_t>(
      sizeof(CompensationFactor) + blocks_.capacity() * sizeof(Block) +
      (order_.capacity() + position_.capacity()) * sizeof(int32_t) +
      pivots_.capacity() * sizeof(double) + panels_.capacity() * sizeof(float));
}

}  // namespace quantd::core
#endif  // HWY_ONCE
