// Costs of quantizing the elements of a block under many scales: the contract
// of the kernels in block_errors.cc, and their scalar definition.

#ifndef QUANTD_CORE_CALIBRATE_BLOCK_ERRORS_H_
#define QUANTD_CORE_CALIBRATE_BLOCK_ERRORS_H_

#include <cstdint>
#include <limits>

#include "absl/types/optional.h"
#include "core/formats/grid.h"
#include "core/formats/number_format.h"
#include "core/types/encoding.h"

namespace quantd::core {

// The numbers that quotients x / scale are rounded to. Immutable, thread-safe.
struct BlockGrid {
  // `has_zero_points`  integers lie about a zero point.
  // Requires: a valid format, qmin and qmax, and codebook.
  BlockGrid(const Encoding& encoding, bool has_zero_points);

  const FormatInfo& format;
  // The numbers lie the same on both sides of zero: elements are given as their
  // magnitudes.
  bool is_mirrored;
  // Integers: the ends without a zero point.
  int32_t qmin;
  int32_t qmax;
  // One of them unless integer.
  absl::optional<FloatGrid> floats;
  absl::optional<CodebookGrid> codebook;
};

// Trials come in multiples of this: the lanes of any vector.
constexpr int64_t kTrialLanes = 16;

// Scales that a block is tried with. T is float or double.
template <typename T>
struct BlockTrials {
  // A multiple of kTrialLanes.
  int64_t count;
  const T* scale;
  // Integers: [count] qmin and qmax less the zero point. Null: those of the
  // grid.
  const T* low;
  const T* high;
  // How many times clipped elements count.
  double gamma;
  // Out: [count] sums of (x - scale x')^2, where x' is the nearest of the
  // numbers.
  double* errors;
  // Out: [count] what clipped elements add to them, counted once. Null: not
  // wanted.
  double* clipped;
  // Errors above it may be given as anything above it.
  double limit = std::numeric_limits<double>::infinity();
  // [elements] how many times each square counts. Null: once.
  const T* weight = nullptr;
};

// Ends of ranges. T is float or double.
template <typename T>
struct BlockEnds {
  // A multiple of kTrialLanes.
  int64_t count;
  // [count].
  const T* low;
  const T* high;
  // Out: [count] sums of (low - x)^2 over x < low, and of (x - high)^2 over
  // x > high.
  T* below;
  T* above;
  // [elements] weights, as in BlockTrials.
  const T* weight = nullptr;
};

// Quotients x / scale are products with 1 / scale. Both and the sums of the
// squares of their distances, times the weights of the elements, are of type T;
// what is made of a sum is float64.
// Elements are added up in kErrorSums sums, element i in sum i % kErrorSums,
// which are put together pair by pair after each kErrorChunk elements. Errors
// of each kErrorPiece elements are added up in float64. Floats lose less than
// 2^-18 of a sum so.
constexpr int64_t kErrorSums = 4;
constexpr int64_t kErrorChunk = 64;
// Fits the cache next to the processor.
constexpr int64_t kErrorPiece = 4096;

// Integers further from their number than this are clipped. The end of a range
// may lie just half a step beyond the last number: how quotients are rounded
// does not decide over it.
constexpr double kClippedDistance = 0.5 + 0x1p-14;

// Returns the index of the least error: the first of several, and 0 where none
// is below infinity.
// `x`  [count] finite elements; of their magnitudes if the grid is mirrored.
// The same bits on every machine.
template <typename T>
int64_t SumBlockErrors(const BlockGrid& grid, const T* x, int64_t count,
                       const BlockTrials<T>& trials);
template <typename T>
void SumBeyondEnds(const T* x, int64_t count, const BlockEnds<T>& ends);

// The truth: one scale and one element after the other.
// Requires: at most kErrorPiece elements, for errors.
template <typename T>
int64_t SumBlockErrorsScalar(const BlockGrid& grid, const T* x, int64_t count,
                             const BlockTrials<T>& trials);
template <typename T>
void SumBeyondEndsScalar(const T* x, int64_t count, const BlockEnds<T>& ends);

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_BLOCK_ERRORS_H_
