#include "server/wire/statistics_proto.h"

#include <xxhash.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/numeric/int128.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "core/statistics/bin_table.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/histogram.h"
#include "core/statistics/statistics_state.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"

namespace quantd::server {
namespace {

constexpr uint32_t kStateVersion = 1;

template <typename... Parts>
absl::Status StateInvalid(const Parts&... what) {
  return core::StatisticsInvalidError(absl::StrCat(what...));
}

absl::StatusOr<core::ElementCounts> CountsFromProto(
    const v1::TensorStatistics& proto, int mantissa_bits) {
  const uint64_t limit = core::MaxElementCount(mantissa_bits);
  if (proto.count() > limit) {
    return StateInvalid("the statistics are of ", proto.count(),
                        " elements, expected at most ", limit);
  }
  uint64_t room = proto.count();
  for (const uint64_t count :
       {proto.nan_count(), proto.positive_infinity_count(),
        proto.negative_infinity_count(), proto.zero_count()}) {
    if (count > room) {
      return StateInvalid("NaN, infinities and zeros are more than the ",
                          proto.count(), " elements");
    }
    room -= count;
  }
  core::ElementCounts counts;
  counts.total = static_cast<int64_t>(proto.count());
  counts.nan = static_cast<int64_t>(proto.nan_count());
  counts.positive_infinity =
      static_cast<int64_t>(proto.positive_infinity_count());
  counts.negative_infinity =
      static_cast<int64_t>(proto.negative_infinity_count());
  counts.zero = static_cast<int64_t>(proto.zero_count());
  return counts;
}

void SumsToProto(const core::ExactSums& sums, v1::ExactSums* proto) {
  proto->set_exponent(sums.exponent);
  proto->set_width(static_cast<uint32_t>(sums.width));
  proto->set_integers(sums.integers.data(), sums.integers.size());
}

core::ExactSums SumsFromProto(const v1::ExactSums& proto) {
  core::ExactSums sums;
  sums.exponent = proto.exponent();
  sums.width = static_cast<int>(proto.width());
  sums.integers.assign(proto.integers().begin(), proto.integers().end());
  return sums;
}

// Checks that some bin.count elements with low bits from `lowest` to `highest`
// could have the sums of `bin`.
// Requires: bin.count > 0, and not above MaxElementCount.
absl::Status CheckBinMoments(const core::HistogramBin& bin, uint64_t lowest,
                             uint64_t highest) {
  const uint64_t count = bin.count;
  const uint64_t sum = bin.low_sum;
  if (sum < count * lowest || sum > count * highest) {
    return StateInvalid("the low bits of ", count, " elements sum up to ", sum,
                        ", expected ", count * lowest, " to ", count * highest);
  }
  // The sum of squares is smallest when all are as equal as integers can be,
  // and largest when all but one are at an end.
  const absl::uint128 mean = sum / count;
  const absl::uint128 larger = sum % count;
  const absl::uint128 smallest =
      (count - larger) * mean * mean + larger * (mean + 1) * (mean + 1);
  const uint64_t above = sum - count * lowest;
  const absl::uint128 at_highest = above / (highest - lowest);
  absl::uint128 largest = at_highest * highest * highest;
  if (at_highest < count) {
    const absl::uint128 between = lowest + above % (highest - lowest);
    largest += between * between + (count - at_highest - 1) * lowest * lowest;
  }
  // x and x^2 are odd or even together.
  if (bin.low_square_sum < smallest || bin.low_square_sum > largest ||
      (absl::Uint128Low64(bin.low_square_sum) ^ sum) & 1) {
    return StateInvalid("the squares of the low bits of ", count,
                        " elements with the sum ", sum,
                        " cannot sum up to what they do");
  }
  return absl::OkStatus();
}

absl::StatusOr<core::Extremes> ExtremesFromProto(
    double min, double max, const core::Histogram& histogram) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (histogram.count() == 0) {
    if (min != kInfinity || max != -kInfinity) {
      return StateInvalid("the extremes of no element are ", min, " and ", max,
                          ", expected +Inf and -Inf");
    }
    return core::Extremes{min, max};
  }
  if (!std::isfinite(min) || !std::isfinite(max) || min > max) {
    return StateInvalid("the extremes are ", min, " and ", max,
                        ", expected finite ones in order");
  }
  uint32_t first_key = 0, last_key = 0;
  bool is_first = true;
  histogram.ForEachBin([&](uint32_t key, const core::HistogramBin& bin) {
    if (is_first) first_key = key;
    is_first = false;
    last_key = key;
  });
  // Rounding to float32 keeps the order, so that the extremes, rounded, are
  // those of the histogram.
  const auto key = [&](double x) {
    float rounded;
    core::ToHistogramFloats(core::ElementType::kFloat64,
                            reinterpret_cast<const uint8_t*>(&x), 1, &rounded);
    return core::HistogramKey(rounded, histogram.mantissa_bits());
  };
  if (key(min) != first_key || key(max) != last_key) {
    return StateInvalid("the extremes are ", min, " and ", max,
                        ", which are not in the first and the last bin");
  }
  // -0 counts as +0.
  return core::Extremes{min + 0.0, max + 0.0};
}

}  // namespace

void StatisticsToProto(const core::TensorStatistics& statistics,
                       v1::TensorStatistics* proto) {
  const core::ElementCounts& counts = statistics.counts();
  proto->set_count(counts.total);
  const core::Extremes extremes = statistics.overall();
  if (!extremes.empty()) {
    proto->set_min(extremes.min);
    proto->set_max(extremes.max);
  }
  proto->set_nan_count(counts.nan);
  proto->set_positive_infinity_count(counts.positive_infinity);
  proto->set_negative_infinity_count(counts.negative_infinity);
  proto->set_zero_count(counts.zero);
}

void OutlineToProto(const core::StatisticsState& state, int mantissa_bits,
                    v1::StatisticsState* proto) {
  const core::TensorStatistics& statistics = state.statistics;
  proto->Clear();
  proto->set_version(kStateVersion);
  proto->set_mantissa_bits(mantissa_bits);
  for (const int64_t size : core::CanonicalBlockSize(state.block_size)) {
    proto->add_block_size(size);
  }
  for (const int64_t size : state.shape) proto->add_shape(size);
  StatisticsToProto(statistics, proto->mutable_statistics());
  proto->mutable_min()->Reserve(static_cast<int>(statistics.scale_count()));
  proto->mutable_max()->Reserve(static_cast<int>(statistics.scale_count()));
  for (int64_t i = 0; i < statistics.scale_count(); ++i) {
    const core::Extremes& extremes = statistics.extremes()[i];
    proto->add_min(extremes.min);
    proto->add_max(extremes.max);
    if (statistics.has_non_finite(i)) proto->add_non_finite_scale_index(i);
  }
}

void HistogramToProto(const core::Histogram& histogram, v1::Histogram* proto) {
  uint32_t last_key = 0;
  bool has_high = false;
  histogram.ForEachBin([&](uint32_t key, const core::HistogramBin& bin) {
    proto->add_key_delta(key - last_key);
    last_key = key;
    proto->add_count(bin.count);
    proto->add_low_sum(bin.low_sum);
    proto->add_low_square_sum(absl::Uint128Low64(bin.low_square_sum));
    has_high |= absl::Uint128High64(bin.low_square_sum) != 0;
  });
  if (!has_high) return;
  histogram.ForEachBin([&](uint32_t key, const core::HistogramBin& bin) {
    proto->add_low_square_sum_high(absl::Uint128High64(bin.low_square_sum));
  });
}

void StateToProto(const core::StatisticsState& state,
                  v1::StatisticsState* proto) {
  OutlineToProto(state, state.statistics.mantissa_bits(), proto);
  for (const core::Histogram& histogram : state.statistics.histograms()) {
    HistogramToProto(histogram, proto->add_histograms());
  }
}

uint64_t StateDigest(const core::StatisticsState& state) {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> digest(
      XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(digest.get());
  std::string bytes;
  const auto add = [&](const v1::StatisticsState& message) {
    message.SerializeToString(&bytes);
    XXH3_64bits_update(digest.get(), bytes.data(), bytes.size());
  };
  v1::StatisticsState outline;
  OutlineToProto(state, state.statistics.mantissa_bits(), &outline);
  add(outline);
  // A message that has one histogram is the bytes of that histogram.
  v1::StatisticsState one;
  for (const core::Histogram& histogram : state.statistics.histograms()) {
    one.clear_histograms();
    HistogramToProto(histogram, one.add_histograms());
    add(one);
  }
  return XXH3_64bits_digest(digest.get());
}

absl::StatusOr<core::Histogram> HistogramFromProto(const v1::Histogram& proto,
                                                   int mantissa_bits,
                                                   uint64_t count_limit) {
  const int size = proto.key_delta_size();
  if (proto.count_size() != size || proto.low_sum_size() != size ||
      proto.low_square_sum_size() != size ||
      (proto.low_square_sum_high_size() != 0 &&
       proto.low_square_sum_high_size() != size)) {
    return StateInvalid(
        "there are ", size, " keys, ", proto.count_size(), " counts, ",
        proto.low_sum_size(), " sums, ", proto.low_square_sum_size(), " and ",
        proto.low_square_sum_high_size(),
        " halves of sums of squares, expected as many of each, or "
        "no high halves");
  }
  const uint64_t highest = (uint64_t{1} << (23 - mantissa_bits)) - 1;
  core::Histogram histogram(mantissa_bits);
  uint64_t key = 0;
  for (int i = 0; i < size; ++i) {
    key += proto.key_delta(i);
    if (i > 0 && proto.key_delta(i) == 0) {
      return StateInvalid("key ", i,
                          " is the one before, expected ascending keys");
    }
    if (key >> (9 + mantissa_bits) != 0) {
      return StateInvalid("key ", i, " is ", key, ", expected at most ",
                          9 + mantissa_bits, " bits");
    }
    const core::BinEdges edges =
        core::HistogramBinEdges(static_cast<uint32_t>(key), mantissa_bits);
    if (!std::isfinite(edges.low) || !std::isfinite(edges.high)) {
      return StateInvalid("key ", i, " is ", key,
                          ", which no finite element has");
    }
    const core::HistogramBin bin{
        proto.count(i), proto.low_sum(i),
        absl::MakeUint128(proto.low_square_sum_high_size() > 0
                              ? proto.low_square_sum_high(i)
                              : 0,
                          proto.low_square_sum(i))};
    if (bin.count == 0 || bin.count > count_limit) {
      return StateInvalid("bin ", i, " has ", bin.count,
                          " elements, expected 1 to ", count_limit,
                          ", the finite ones that are left");
    }
    count_limit -= bin.count;
    // -0 would be the first of its bin, but counts as +0.
    const uint64_t lowest = edges.high == 0 && std::signbit(edges.high) ? 1 : 0;
    if (absl::Status s = CheckBinMoments(bin, lowest, highest); !s.ok()) {
      return StateInvalid("bin ", i, ": ", core::ErrorText(s));
    }
    histogram.AddBin(static_cast<uint32_t>(key), bin);
  }
  return histogram;
}

absl::StatusOr<core::StatisticsState> OutlineFromProto(
    const v1::StatisticsState& proto) {
  if (proto.version() != kStateVersion) {
    return StateInvalid("the version is ", proto.version(), ", expected ",
                        kStateVersion);
  }
  if (proto.mantissa_bits() < core::kMinMantissaBits ||
      proto.mantissa_bits() > core::kMaxMantissaBits) {
    return StateInvalid("there are ", proto.mantissa_bits(),
                        " mantissa bits, expected ", core::kMinMantissaBits,
                        " to ", core::kMaxMantissaBits);
  }
  const int mantissa_bits = static_cast<int>(proto.mantissa_bits());

  core::StatisticsState state;
  state.block_size = core::CanonicalBlockSize(proto.block_size());
  state.shape.assign(proto.shape().begin(), proto.shape().end());
  const absl::StatusOr<core::BlockLayout> layout =
      core::BlockLayout::Create(state.shape, proto.block_size());
  if (!layout.ok()) return StateInvalid(core::ErrorText(layout.status()));
  // Memory that is allocated from here on follows these lists, which are there.
  const int64_t scale_count = layout->scale_count();
  if (proto.min_size() != scale_count || proto.max_size() != scale_count) {
    return StateInvalid("there are ", proto.min_size(), " minima and ",
                        proto.max_size(), " maxima, expected ", scale_count,
                        " of each, one per scale index");
  }

  const absl::StatusOr<core::ElementCounts> counts =
      CountsFromProto(proto.statistics(), mantissa_bits);
  if (!counts.ok()) return counts.status();
  const int64_t non_finite_count =
      counts->nan + counts->positive_infinity + counts->negative_infinity;
  std::vector<int64_t> non_finite;
  for (const uint64_t index : proto.non_finite_scale_index()) {
    if (index >= static_cast<uint64_t>(scale_count) ||
        (!non_finite.empty() &&
         static_cast<int64_t>(index) <= non_finite.back())) {
      return StateInvalid("non-finite scale index ", index,
                          " is out of place, expected ascending ones below ",
                          scale_count);
    }
    non_finite.push_back(static_cast<int64_t>(index));
  }
  if (static_cast<int64_t>(non_finite.size()) > non_finite_count ||
      (non_finite.empty() && non_finite_count > 0)) {
    return StateInvalid(non_finite.size(), " scale indices have the ",
                        non_finite_count,
                        " non-finite elements, expected no more indices than "
                        "elements, and some if there are any");
  }

  std::vector<core::Extremes> extremes;
  extremes.reserve(scale_count);
  for (int i = 0; i < proto.min_size(); ++i) {
    extremes.push_back({proto.min(i), proto.max(i)});
  }
  state.statistics = core::TensorStatistics::FromParts(
      *counts, std::move(extremes), non_finite, /*mantissa_bits=*/0, {});
  return state;
}

absl::StatusOr<core::StatisticsState> StateFromProto(
    const v1::StatisticsState& proto) {
  absl::StatusOr<core::StatisticsState> state = OutlineFromProto(proto);
  if (!state.ok()) return state;
  const core::TensorStatistics outline = std::move(state->statistics);
  if (proto.histograms_size() != outline.scale_count()) {
    return StateInvalid("there are ", proto.histograms_size(),
                        " histograms, expected ", outline.scale_count(),
                        ", one per scale index");
  }
  const int mantissa_bits = static_cast<int>(proto.mantissa_bits());
  const core::ElementCounts& counts = outline.counts();
  const int64_t non_finite_count =
      counts.nan + counts.positive_infinity + counts.negative_infinity;
  std::vector<core::Extremes> extremes;
  std::vector<core::Histogram> histograms;
  extremes.reserve(outline.scale_count());
  histograms.reserve(outline.scale_count());
  const uint32_t zero_key = core::HistogramKey(0, mantissa_bits);
  uint64_t zero_bin_count = 0;
  uint64_t room = counts.total - non_finite_count;
  for (int i = 0; i < proto.histograms_size(); ++i) {
    absl::StatusOr<core::Histogram> histogram =
        HistogramFromProto(proto.histograms(i), mantissa_bits, room);
    if (!histogram.ok()) {
      return StateInvalid("histogram ", i, ": ",
                          core::ErrorText(histogram.status()));
    }
    room -= histogram->count();
    const absl::StatusOr<core::Extremes> checked =
        ExtremesFromProto(proto.min(i), proto.max(i), *histogram);
    if (!checked.ok()) {
      return StateInvalid("scale index ", i, ": ",
                          core::ErrorText(checked.status()));
    }
    extremes.push_back(*checked);
    histogram->ForEachBin([&](uint32_t key, const core::HistogramBin& bin) {
      if (key == zero_key) zero_bin_count += bin.count;
    });
    histograms.push_back(*std::move(histogram));
  }
  if (room != 0) {
    return StateInvalid("the histograms lack ", room, " of the ",
                        counts.total - non_finite_count, " finite elements");
  }
  if (static_cast<uint64_t>(counts.zero) > zero_bin_count) {
    return StateInvalid(counts.zero, " elements are zero, expected at most ",
                        zero_bin_count, ", those of the bins of zero");
  }
  const std::vector<int64_t> non_finite(proto.non_finite_scale_index().begin(),
                                        proto.non_finite_scale_index().end());
  state->statistics =
      core::TensorStatistics::FromParts(counts, std::move(extremes), non_finite,
                                        mantissa_bits, std::move(histograms));
  const core::Extremes overall = state->statistics.overall();
  const double min = overall.empty() ? 0 : overall.min;
  const double max = overall.empty() ? 0 : overall.max;
  if (proto.statistics().min() != min || proto.statistics().max() != max) {
    return StateInvalid("the extremes are ", proto.statistics().min(), " and ",
                        proto.statistics().max(), ", expected ", min, " and ",
                        max, ", those over all scale indices");
  }
  return state;
}

void MomentsToProto(const core::AxisMoments& moments,
                    v1::FeatureMoments* proto) {
  const core::FeatureMoments::Parts parts = moments.moments.ToParts();
  proto->set_axis(static_cast<uint32_t>(moments.axis));
  proto->mutable_count()->Assign(parts.count.begin(), parts.count.end());
  proto->mutable_left_out()->Assign(parts.left_out.begin(),
                                    parts.left_out.end());
  SumsToProto(parts.sum, proto->mutable_sum());
  SumsToProto(parts.square_sum, proto->mutable_square_sum());
}

absl::StatusOr<core::AxisMoments> MomentsFromProto(
    const v1::FeatureMoments& proto) {
  core::FeatureMoments::Parts parts;
  // Counts beyond 63 bits become negative, which no moments have.
  parts.count.assign(proto.count().begin(), proto.count().end());
  parts.left_out.assign(proto.left_out().begin(), proto.left_out().end());
  parts.sum = SumsFromProto(proto.sum());
  parts.square_sum = SumsFromProto(proto.square_sum());
  absl::StatusOr<core::FeatureMoments> moments =
      core::FeatureMoments::FromParts(parts);
  if (!moments.ok()) return moments.status();
  return core::AxisMoments{int64_t{proto.axis()}, *std::move(moments)};
}

}  // namespace quantd::server
