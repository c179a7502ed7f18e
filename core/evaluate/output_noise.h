// Effect of the error of a weight on the output of its layer.

#ifndef QUANTD_CORE_EVALUATE_OUTPUT_NOISE_H_
#define QUANTD_CORE_EVALUATE_OUTPUT_NOISE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/gram_state.h"
#include "core/types/element_type.h"

namespace quantd::core {

// The Gram matrix of a layer's inputs, made ready to measure with: in float32,
// scaled by a power of two. Immutable, thread-safe; the same bits for any
// number of threads.
class OutputGram {
 public:
  // `gram`  finished; features of different parts count as uncorrelated.
  // `pool`  spreads the work over its threads; may be null.
  // Requires: at least one row.
  // Errors: CANCELLED.
  static absl::StatusOr<OutputGram> Create(const GramState& gram,
                                           ThreadPool* pool,
                                           StopToken stop = StopToken());
  // Bytes of memory that an OutputGram takes: about 2 for each element of the
  // matrix.
  static int64_t MemoryBytes(int64_t features, int64_t part_size);

  int64_t columns() const { return static_cast<int64_t>(diagonal_.size()); }
  // Mean square of each feature.
  absl::Span<const double> diagonal() const { return diagonal_; }

  // A part of the Gram matrix.
  struct Block {
    int64_t first;  // feature
    int64_t size;
    // Offset of its first panel in panels().
    int64_t offset;
  };
  absl::Span<const Block> blocks() const { return blocks_; }
  // S of all blocks, upper triangular with e S e^T = e G e^T: twice the
  // elements of G above the diagonal, laid out as CompensationFactor::panels().
  const float* panels() const { return panels_.data(); }
  // Factor of S that gives the mean over the rows of inputs.
  double unit() const { return unit_; }

 private:
  OutputGram() = default;

  std::vector<Block> blocks_;
  std::vector<float> panels_;
  std::vector<double> diagonal_;
  double unit_ = 1;
};

// The expected power of a layer's output, summed over its outputs: the mean
// over inputs x of |V x|^2 for rows v of V.
struct OutputPower {
  // sum of v G v^T, with G = X^T X / rows of X.
  double exact = 0;
  // sum of m_k v_k^2, with m_k the diagonal of G: exact for inputs without
  // correlation.
  double diagonal = 0;
};

// Adds the power of rows of reals, or of the errors restored - real.
//
//   rows v are scaled by a power of two, so that they fit float32
//   y_k is the sum of v_j S_jk over j <= k, as chains of fused multiply-adds in
//   float32 over 512 features each
//   v G v^T is the sum of v_k y_k, in float64
//
// An element counts as 0 if it or what it is restored to is not finite. It
// makes no difference how rows are spread over calls.
//
// `rows`      a task takes 48 of them: so many for each thread are best.
// `real`      [rows, columns] elements of `type`, any alignment.
// `restored`  the same elements of ArithmeticType(type), any alignment; null
//             for the power of the reals.
// `pool`      spreads tasks over its threads; may be null.
// Takes columns^2 / 2 fused multiply-adds for each row.
// Holds OutputTaskBytes for each thread, and 16 bytes a row.
// Errors: CANCELLED. `power` is then unspecified.
// Thread-safe; the same bits on every SIMD target.
absl::Status AddOutputPower(const OutputGram& gram, ElementType type,
                            int64_t rows, const uint8_t* real,
                            const uint8_t* restored, OutputPower* power,
                            ThreadPool* pool, StopToken stop = StopToken());
int64_t OutputTaskBytes(int64_t columns);

// Type that elements of `type` are computed in: float32 or float64.
ElementType ArithmeticType(ElementType type);

// noise / signal; 0 if there is no noise.
double NoiseToSignal(double noise, double signal);

}  // namespace quantd::core

#endif  // QUANTD_CORE_EVALUATE_OUTPUT_NOISE_H_
