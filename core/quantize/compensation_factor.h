// Facts about a layer's inputs that error-compensated rounding needs.

#ifndef QUANTD_CORE_QUANTIZE_COMPENSATION_FACTOR_H_
#define QUANTD_CORE_QUANTIZE_COMPENSATION_FACTOR_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/gram_state.h"

namespace quantd::core {

// The order in which the columns of a weight are rounded.
enum class ColumnOrder : int {
  // By falling diagonal of the Gram matrix, which is the power of the feature;
  // equal ones by index. More columns are left to make up for the errors of
  // those that matter most.
  kFallingDiagonal = 0,
  // By index.
  kNatural = 1
};

struct CompensationOptions {
  // Added to the diagonal, as a fraction of its mean over the features that are
  // not dead. Finite, at least 0.
  double damping = 0.01;
  ColumnOrder order = ColumnOrder::kFallingDiagonal;
};

// X^T X of consecutive input features of a layer.
struct GramBlock {
  // Features, at least 1.
  int64_t size;
  // [size, size], symmetric. Overwritten.
  absl::Span<double> matrix;
};

// A factor of a Gram matrix H, for QuantizeCompensated. With the columns in
// their order, and damping in H,
//
//   H = (U + I) D (U + I)^T
//
// D is diagonal and U strictly upper triangular. Rounding W to Q with errors
// E = W - Q then costs tr(E H E^T) = |E (U + I) D^(1/2)|^2 at the layer's
// output.
//
// This is LDLQ of QuIP (Chee et al., arXiv 2307.13304), which proves it equal
// to OPTQ, known as GPTQ (Frantar et al., arXiv 2210.17323). It takes one
// factorization and no inverse.
//
// A feature whose diagonal is 0 is dead: it was 0 in all inputs. It is left
// out. Features of different blocks are taken to be uncorrelated. Each block
// has its own order and damping.
//
// Computed in float64, by Cholesky's factorization of H in reversed order. Each
// element is a chain of fused multiply-adds in the order of the columns. U is
// kept in float32. Immutable, thread-safe; the same bits on every SIMD target
// and for any number of threads.
class CompensationFactor {
 public:
  // Bytes that Create holds at most for each column, beside the matrix and the
  // factor.
  static constexpr int64_t kCreateColumnBytes = 1200;

  // `columns`  of the weight: the sizes of the blocks add up to it.
  // `gram`     from the first features to the last.
  // `pool`     spreads the work over its threads; may be null.
  // Takes Time; many times as long on processors without fused multiply-adds.
  // Meanwhile it holds 1.1 KB for each column of the largest block, and 130 KB.
  // Errors: GRAM_INVALID (another width, NaN or infinity, not symmetric to the
  // last bit, a negative diagonal, not positive definite with the damping),
  // METHOD_INVALID (damping). CANCELLED.
  static absl::StatusOr<CompensationFactor> Create(
      int64_t columns, absl::Span<const GramBlock> gram,
      const CompensationOptions& options, ThreadPool* pool,
      StopToken stop = StopToken());

  // About how long one thread takes for such blocks: size^3 / 6 fused
  // multiply-adds for each, those of a triangular factorization.
  static absl::Duration Time(absl::Span<const int64_t> block_sizes);

  // Size in bytes of the factor of such blocks, at the most. About 2 bytes for
  // each element of the matrices.
  static int64_t MemoryBytes(absl::Span<const int64_t> block_sizes);

  int64_t columns() const { return static_cast<int64_t>(order_.size()); }
  int64_t memory_bytes() const;

  // A GramBlock. Positions count columns in the order in which they are
  // rounded; dead ones are the last of their block.
  struct Block {
    // Both the first position and the first column.
    int64_t first;
    int64_t size;
    // Positions that are not dead.
    int64_t live;
    // Offset of the block's first panel in panels().
    int64_t offset;
    // Amount that was added to the diagonal of the live ones.
    double damping = 0;
  };
  absl::Span<const Block> blocks() const { return blocks_; }
  // [columns] the column of each position, and back.
  absl::Span<const int32_t> order() const { return order_; }
  absl::Span<const int32_t> position() const { return position_; }
  // [columns] D by position; 0 for dead ones.
  absl::Span<const double> pivots() const { return pivots_; }
  // U of all blocks, kPanelRows columns k together: U_jk is at
  // PanelOffset(k / kPanelRows) + j * kPanelRows + k % kPanelRows of its block.
  // 0 from j = k on.
  const float* panels() const { return panels_.data(); }

 private:
  CompensationFactor() = default;

  std::vector<Block> blocks_;
  std::vector<int32_t> order_;
  std::vector<int32_t> position_;
  std::vector<double> pivots_;
  std::vector<float> panels_;
};

// Checks that a Gram matrix is positive semidefinite, as X^T X is, and so are
// sums of such: with 1e-6 of its mean diagonal added it has a factor.
// Holds as much as CompensationFactor::Create for a part, and the part in
// float64.
// Errors: STATISTICS_INVALID; CANCELLED.
absl::Status CheckSemidefinite(const GramState& gram, ThreadPool* pool,
                               StopToken stop = StopToken());
// About how long one thread takes for that: as long as CompensationFactor.
absl::Duration SemidefiniteCheckTime(int64_t features, int64_t part_size);
// Bytes that CheckSemidefinite holds at most beside the matrix.
int64_t SemidefiniteCheckBytes(int64_t features, int64_t part_size);

}  // namespace quantd::core

#endif  // QUANTD_CORE_QUANTIZE_COMPENSATION_FACTOR_H_
