#include "core/statistics/statistics_state.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/errors.h"
#include "core/statistics/feature_moments.h"
#include "core/types/block_layout.h"
#include "core/types/tensor_slice.h"

namespace quantd::core {

int64_t MaxElementCount(int mantissa_bits) {
  // The sum of low bits, each below 2^(23 - m), is the first to overflow 64
  // bits.
  return mantissa_bits == 0 ? int64_t{1} << 62
                            : int64_t{1} << (41 + mantissa_bits);
}

std::vector<int64_t> CanonicalBlockSize(absl::Span<const int64_t> block_size) {
  for (const int64_t size : block_size) {
    if (size != 0) return {block_size.begin(), block_size.end()};
  }
  return {};
}

absl::Status CheckElementCounts(const StatisticsState& state,
                                const TensorSlice* slice) {
  const TensorStatistics& statistics = state.statistics;
  const int64_t total = statistics.counts().total;
  if (total == 0) return absl::OkStatus();
  const absl::Span<const int64_t> extents =
      slice == nullptr ? state.shape : slice->shape;
  if (absl::c_linear_search(extents, 0)) {
    return StatisticsInvalidError(
        absl::StrCat("the statistics are of ", total,
                     " elements, expected none in a dimension of 0"));
  }
  const BlockLayout layout =
      *BlockLayout::Create(state.shape, state.block_size);
  // Elements with the same place in the dimensions that are not split.
  int64_t split_size = 1;
  for (size_t d = 0; d < state.block_size.size(); ++d) {
    if (state.block_size[d] != 0) split_size *= extents[d];
  }
  if (total % split_size != 0) {
    return StatisticsInvalidError(absl::StrCat(
        "the statistics are of ", total, " elements, expected a multiple of ",
        split_size, ", those of the dimensions that are split into blocks"));
  }
  // Place of the scale index, by dimension.
  std::vector<int64_t> at(state.shape.size());
  for (int64_t i = 0; i < statistics.scale_count(); ++i) {
    int64_t expected = total / split_size;
    for (size_t d = 0; d < state.block_size.size(); ++d) {
      const int64_t block = state.block_size[d];
      if (block == 0) continue;
      const int64_t first = slice == nullptr ? 0 : slice->offset[d];
      const int64_t begin = std::max(at[d] * block, first);
      const int64_t end = std::min((at[d] + 1) * block, first + extents[d]);
      expected *= std::max<int64_t>(0, end - begin);
    }
    const auto finite =
        static_cast<int64_t>(statistics.histograms()[i].count());
    if (finite > expected ||
        (finite < expected) != statistics.has_non_finite(i)) {
      return StatisticsInvalidError(absl::StrCat(
          "scale index ", i, " has ", finite, " finite elements, expected ",
          statistics.has_non_finite(i) ? "fewer than " : "", expected));
    }
    for (size_t d = at.size(); d-- > 0;) {
      if (++at[d] < layout.scale_shape()[d]) break;
      at[d] = 0;
    }
  }
  return absl::OkStatus();
}

absl::Status CheckMoments(const StatisticsState& state,
                          const TensorSlice* slice) {
  const FeatureMoments& moments = state.moments->moments;
  const auto axis = static_cast<size_t>(state.moments->axis);
  const int64_t first = slice == nullptr ? 0 : slice->offset[axis];
  const int64_t count =
      slice == nullptr ? moments.feature_count() : slice->shape[axis];
  const ElementCounts& counts = state.statistics.counts();
  int64_t left_out = 0;
  for (int64_t i = 0; i < moments.feature_count(); ++i) {
    const int64_t expected =
        i >= first && i < first + count ? counts.total / count : 0;
    const int64_t got = moments.count(i) + moments.left_out(i);
    if (got != expected) {
      return StatisticsInvalidError(
          absl::StrCat("feature ", i, " has moments of ", got,
                       " elements, expected ", expected));
    }
    left_out += moments.left_out(i);
  }
  const int64_t non_finite =
      counts.nan + counts.positive_infinity + counts.negative_infinity;
  if (counts.total % std::max<int64_t>(1, count) != 0 ||
      left_out != non_finite) {
    return StatisticsInvalidError(absl::StrCat(
        "the moments leave ", left_out, " elements out, expected the ",
        non_finite, " of ", counts.total, " that are not finite"));
  }
  if (!moments.AddUpTo(state.statistics.histograms())) {
    return StatisticsInvalidError(
        "the moments of all features do not add up to the sums of the "
        "histograms");
  }
  return absl::OkStatus();
}

absl::Status CheckComplete(const StatisticsState& state) {
  const TensorStatistics& statistics = state.statistics;
  const ElementCounts& counts = statistics.counts();
  const int64_t non_finite =
      counts.nan + counts.positive_infinity + counts.negative_infinity;
  if (counts.total == non_finite) {
    return StatisticsIncompleteError(
        absl::StrCat(counts.total,
                     " elements were contributed and none of them is finite, "
                     "expected some to compute an encoding from"));
  }
  for (int64_t i = 0; i < statistics.scale_count(); ++i) {
    if (statistics.extremes()[i].empty() && !statistics.has_non_finite(i)) {
      return StatisticsIncompleteError(absl::StrCat(
          "no element of scale index ", i, " of ", statistics.scale_count(),
          " was contributed, expected all slices of the tensor"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckMergeable(const StatisticsState& whole,
                            const StatisticsState& part) {
  if (CanonicalBlockSize(whole.block_size) !=
      CanonicalBlockSize(part.block_size)) {
    return StatisticsMismatchError(absl::StrCat(
        "the block size is [", absl::StrJoin(part.block_size, ", "),
        "], expected [", absl::StrJoin(whole.block_size, ", "),
        "], that of the statistics there are"));
  }
  if (whole.statistics.mantissa_bits() != part.statistics.mantissa_bits()) {
    return StatisticsMismatchError(absl::StrCat(
        "the histograms have ", part.statistics.mantissa_bits(),
        " mantissa bits, expected ", whole.statistics.mantissa_bits(),
        ", those of the statistics there are"));
  }
  if (whole.shape.size() != part.shape.size()) {
    return StatisticsMismatchError(absl::StrCat(
        "the tensor has ", part.shape.size(), " dimensions, expected ",
        whole.shape.size(), ", those of the statistics there are"));
  }
  for (size_t d = 0; d < whole.block_size.size(); ++d) {
    if (whole.block_size[d] != 0 && whole.shape[d] != part.shape[d]) {
      return StatisticsMismatchError(absl::StrCat(
          "dimension ", d, " is ", part.shape[d], ", expected ", whole.shape[d],
          ": the statistics are kept in blocks of it"));
    }
  }
  const int64_t limit = MaxElementCount(whole.statistics.mantissa_bits());
  const int64_t there = whole.statistics.counts().total;
  const int64_t more = part.statistics.counts().total;
  if (more > limit - there) {
    return StatisticsMismatchError(
        absl::StrCat("the statistics are of ", there, " elements and ", more,
                     " more, expected at most ", limit, " together"));
  }
  return absl::OkStatus();
}

absl::Status CheckMomentsMergeable(int64_t axis, int64_t feature_count,
                                   const AxisMoments& part) {
  if (part.axis == axis && part.moments.feature_count() == feature_count) {
    return absl::OkStatus();
  }
  return StatisticsMismatchError(absl::StrCat(
      "moments of ", part.moments.feature_count(), " features along axis ",
      part.axis, ", expected ", feature_count, " along axis ", axis,
      " as in other contributions"));
}

absl::Status MergeMoments(const AxisMoments& part, AxisMoments* whole) {
  const int64_t features = whole->moments.feature_count();
  absl::Status status = CheckMomentsMergeable(whole->axis, features, part);
  if (!status.ok()) return status;
  const auto total = [](const FeatureMoments& moments, int64_t feature) {
    return moments.count(feature) + moments.left_out(feature);
  };
  for (int64_t i = 0; i < features; ++i) {
    if (total(part.moments, i) >
        FeatureMoments::kMaxCount - total(whole->moments, i)) {
      return StatisticsMismatchError(
          absl::StrCat("feature ", i, " would have more than ",
                       FeatureMoments::kMaxCount, " elements"));
    }
  }
  whole->moments.Merge(part.moments);
  return absl::OkStatus();
}

absl::Status MergeState(const StatisticsState& part, StatisticsState* whole) {
  if (absl::Status s = CheckMergeable(*whole, part); !s.ok()) return s;
  for (size_t d = 0; d < part.shape.size(); ++d) {
    whole->shape[d] = std::max(whole->shape[d], part.shape[d]);
  }
  whole->statistics.Merge(part.statistics);
  return absl::OkStatus();
}

absl::StatusOr<TensorStatistics> StatisticsAt(
    const StatisticsState& state, absl::Span<const int64_t> block_size,
    StopToken stop) {
  const absl::StatusOr<BlockLayout> coarse =
      BlockLayout::Create(state.shape, block_size);
  if (!coarse.ok()) return coarse.status();
  const absl::StatusOr<BlockLayout> fine =
      BlockLayout::Create(state.shape, state.block_size);
  if (!fine.ok()) return fine.status();
  const size_t rank = state.shape.size();
  const auto block = [&](absl::Span<const int64_t> sizes, size_t d) {
    const int64_t size =
        sizes.empty() || sizes[d] == 0 ? state.shape[d] : sizes[d];
    return std::max<int64_t>(1, std::min(size, state.shape[d]));
  };
  // [rank] extents of a block of both granularities.
  std::vector<int64_t> fine_block;
  std::vector<int64_t> coarse_block;
  for (size_t d = 0; d < rank; ++d) {
    const int64_t from = block(state.block_size, d);
    const int64_t to = block(block_size, d);
    if (to < state.shape[d] && to % from != 0) {
      return GranularityTooFineError(
          absl::StrCat("dimension ", d, " is asked for in blocks of ", to,
                       ", expected a multiple of ", from,
                       ", the blocks that the statistics are kept in"));
    }
    fine_block.push_back(from);
    coarse_block.push_back(to);
  }
  TensorStatistics result = state.statistics.Outline(coarse->scale_count());
  // An empty tensor may have no block left, of a dimension that is 0.
  const int64_t count =
      result.scale_count() == 0 ? 0 : state.statistics.scale_count();
  // Place of the scale index, by dimension.
  std::vector<int64_t> at(rank);
  constexpr int64_t kAtOnce = 8;
  for (int64_t i = 0; i < count; ++i) {
    if (i % kAtOnce == 0 && stop.stopped()) return StoppedError();
    int64_t to = 0;
    for (size_t d = 0; d < rank; ++d) {
      to = to * coarse->scale_shape()[d] +
           at[d] * fine_block[d] / coarse_block[d];
    }
    result.MergeScaleIndex(state.statistics, i, to);
    for (size_t d = rank; d-- > 0;) {
      if (++at[d] < fine->scale_shape()[d]) break;
      at[d] = 0;
    }
  }
  return result;
}

}  // namespace quantd::core
