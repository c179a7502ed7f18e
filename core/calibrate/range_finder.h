// The range of one scale index after the other, by any method.

#ifndef QUANTD_CORE_CALIBRATE_RANGE_FINDER_H_
#define QUANTD_CORE_CALIBRATE_RANGE_FINDER_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/distribution.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/entropy.h"
#include "core/calibrate/importance.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/held_tensor.h"
#include "core/statistics/histogram.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"

namespace quantd::core {

// The formulas are those of calibrate.h. Immutable, thread-safe.
class RangeFinder {
 public:
  // `encoding`        has the format, qmin, qmax and codebook.
  // `statistics`      what Find looks at; may be null where only FindAmong is
  //                   asked.
  // `moving_average`  [scale_count] averaged extremes, or empty.
  // `held`            the tensor, or null.
  // `importance`      of the tensor, or null. Then all blocks are searched
  //                   directly; requires CheckTakesImportance.
  // `encoding` is read here only. Everything else that is passed by reference
  // outlives this, and so does what `moving_average` points at.
  // Requires: a valid spec, resolved for the layout's shape, and where it needs
  // histograms those or the tensor.
  RangeFinder(const EncodingSpec& spec, const Encoding& encoding,
              const RangeScaler& scaler, const BlockLayout& layout,
              const TensorStatistics* statistics,
              absl::Span<const Extremes> moving_average, const HeldTensor* held,
              const Importance* importance = nullptr);

  // Mantissa bits of the histograms that ranges come from; 0 without
  // histograms.
  int mantissa_bits() const;

  // True if ranges depend on how their scales are stored.
  bool searches() const;

  // The range of a scale index, as RangeScaler::Extend gives it; none where
  // there is nothing but zeros.
  // `outer`     as for RangeScaler::Scale.
  // `elements`  room for those of a block.
  // Errors: those of RangeScaler::Scale, where no range has a scale; CANCELLED.
  absl::StatusOr<absl::optional<Range>> Find(int64_t index, float outer,
                                             BlockElements* elements,
                                             StopToken stop) const;

  // Finds the range of a block that is at hand, for methods that need no
  // histogram and blocks that are searched directly.
  // `extremes`  of its finite elements.
  // `elements`  of the block, with their weights; looked at only where
  //             IsSearchedDirectly.
  absl::StatusOr<absl::optional<Range>> FindAmong(int64_t index, float outer,
                                                  const Extremes& extremes,
                                                  BlockElements* elements,
                                                  StopToken stop) const;

 private:
  // Data that is searched: the histogram of a block, or its elements.
  class Bins;
  class Elements;

  // Facts about the codes for searches.
  struct Searched {
    Searched(const EncodingSpec& spec, const Encoding& encoding,
             const RangeScaler& scaler)
        : numbers(encoding),
          levels(LevelsOf(numbers, scaler.is_symmetric())),
          search(spec, encoding, scaler) {}

    const CodeNumbers numbers;
    const EntropyLevels levels;
    const BlockSearch search;
  };

  // The range that needs no search; none where one is needed.
  absl::optional<absl::optional<Range>> FindAtOnce(
      int64_t index, const Extremes& extremes) const;
  template <typename Block>
  absl::StatusOr<absl::optional<Range>> FindIn(Block& block,
                                               StopToken stop) const;
  template <typename Block>
  absl::StatusOr<Range> FindBy(CalibrationMethod method, Block& block,
                               StopToken stop) const;
  // Uses the method of spec.methods whose range errs least. Methods whose range
  // has no scale do not count, unless none has.
  template <typename Block>
  absl::StatusOr<Range> FindBest(Block& block, StopToken stop) const;
  template <typename Block>
  Range Percentile(Block& block) const;
  absl::optional<Range> Whole(const Extremes& extremes) const;
  Range FixedRange(int64_t index) const;
  // Null where there is none.
  const Extremes* Averaged(int64_t index) const;

  const EncodingSpec& spec_;
  const RangeScaler& scaler_;
  const BlockLayout& layout_;
  // Only where the method searches: to make it takes longer than to find the
  // scales of a small tensor without.
  absl::optional<Searched> searched_;
  const bool is_direct_;
  const TensorStatistics* const statistics_;
  const absl::Span<const Extremes> moving_average_;
  const HeldTensor* const held_;
  const Importance* const importance_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_RANGE_FINDER_H_
