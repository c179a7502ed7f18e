// The range that keeps the most of what a histogram tells.

#ifndef QUANTD_CORE_CALIBRATE_ENTROPY_H_
#define QUANTD_CORE_CALIBRATE_ENTROPY_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/histogram.h"

namespace quantd::core {

// How a range is split into what codes tell apart.
struct EntropyLevels {
  // Levels of one width, if not 0.
  int64_t count = 0;
  // Otherwise where one ends and the next begins, ascending within (0, 1) of
  // the range.
  std::vector<double> boundaries;
  // Levels of |x| from 0 on rather than of x.
  bool of_magnitudes = false;

  int64_t size() const {
    return count != 0 ? count : static_cast<int64_t>(boundaries.size()) + 1;
  }
};

// Integers: 2^(b-1) levels of |x| for symmetric signed ones, as many as codes
// otherwise. Floats and codebooks: the cells of x about their numbers.
EntropyLevels LevelsOf(const CodeNumbers& numbers, bool is_symmetric);

// Finds the range with the least Kullback-Leibler divergence sum p log(p / q).
// The ranges that are tried are k / steps of the whole one, 1 <= k <= steps,
// measured from zero or from the end that is nearest to it.
//
// Elements are cut to the 9 + m bits of their key and counted in linear bins
// over the whole range. Elements that are then zero are left out: every range
// keeps them, and as many as a ReLU makes would outweigh all others. From these
// bins
//
//   p  has the bins that begin within the range. What lies outside of it is
//      added to the bin at its end.
//   q  has the same bins without what was added: the bins of each level share
//      their sum evenly, except those that are empty in p. Half a count stands
//      in a level that has none where p has some.
//
// Bin t of n is of level floor(t * levels / n). Where levels have boundaries,
// it is of the level that its middle lies in. Ranges with fewer bins than
// levels are left out; the whole range never is. Of equally good ranges the
// widest wins. (Migacz, 8-bit inference with TensorRT, 2017)
//
// `whole`  contains the elements and is not [0, 0]; of |x| all up to its
//          abs_max.
// `steps`  0 for 128.
// `bins`   over the whole range; 0 for 2,048, or 4 times the levels.
// Errors: CANCELLED.
absl::StatusOr<Range> SearchEntropy(const Histogram& histogram,
                                    const EntropyLevels& levels,
                                    const Range& whole, int steps, int bins,
                                    StopToken stop = StopToken());

// Like SearchEntropy above, but over elements that are not cut.
// `elements`  at most kMaxDirectElements.
absl::StatusOr<Range> SearchEntropy(BlockElements* elements,
                                    const EntropyLevels& levels,
                                    const Range& whole, int steps, int bins,
                                    StopToken stop = StopToken());

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_ENTROPY_H_
