#include "server/rpc/tensor_calibration.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/scale_indices.h"
#include "core/calibrate/search_time.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/held_tensor.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/steps.h"
#include "server/rpc/tensor_accumulator.h"

namespace quantd::server {
namespace {

int64_t CeilDiv(int64_t count, int64_t unit) {
  return (count + unit - 1) / unit;
}

// With importance all blocks are.
bool IsSearchedOnElements(const ResolvedSpec& spec) {
  return spec.importance != nullptr ||
         core::IsSearchedDirectly(spec.spec, *spec.layout);
}

}  // namespace

absl::Duration ElementSearchTime(const ResolvedSpec& spec) {
  const int64_t elements = spec.layout->element_count();
  int64_t scale_count = spec.layout->scale_count();
  if (spec.importance == nullptr) {
    return core::SearchTime(spec.spec, scale_count, elements,
                            /*at_hand=*/true);
  }
  // Long blocks count as short ones, whose search grows with elements.
  scale_count =
      std::max(scale_count, CeilDiv(elements, core::kFewDirectElements));
  // Weighing takes about as long as searching.
  constexpr double kWeighing = 2;
  return kWeighing *
         core::SearchTime(spec.spec, scale_count, elements, /*at_hand=*/true);
}

int MantissaBitsFor(const core::EncodingSpec& spec) {
  if (!core::NeedsHistograms(spec)) return TensorAccumulator::kNoHistograms;
  return spec.mantissa_bits != 0 ? spec.mantissa_bits
                                 : TensorAccumulator::kDefaultMantissaBits;
}

int MantissaBitsWhereHeld(const ResolvedSpec& spec) {
  constexpr int64_t kMostElements = int64_t{1} << 18;
  if (spec.layout->largest_block() <= kMostElements) {
    return TensorAccumulator::kNoHistograms;
  }
  return core::MantissaBitsAtHand(spec.spec);
}

int64_t SearchBytes(const RpcEnvironment& env, const ResolvedSpec& spec) {
  int64_t bytes_per_lane = 0;
  if (IsSearchedOnElements(spec)) {
    bytes_per_lane = core::BlockElements::MemoryBytes(
        spec.spec, spec.layout->largest_block(), spec.importance != nullptr);
  } else if (core::NeedsHistograms(spec.spec) &&
             MantissaBitsWhereHeld(spec) == TensorAccumulator::kNoHistograms) {
    bytes_per_lane = core::HeldTensor::TableBytes(
        *spec.layout, core::MantissaBitsAtHand(spec.spec));
  }
  const int64_t batches =
      CeilDiv(spec.layout->scale_count(), core::kScaleIndicesAtOnce);
  return std::min(core::LaneCount(env.helper_pool), batches) * bytes_per_lane;
}

int64_t LocalSearchBytes(const RpcEnvironment& env, const ResolvedSpec& spec,
                         int64_t elements_at_once) {
  if (!IsSearchedOnElements(spec)) return 0;
  const int64_t largest_block = spec.layout->largest_block();
  // Threads that search the blocks of so many elements.
  const int64_t lanes = std::min(core::LaneCount(env.pool),
                                 CeilDiv(elements_at_once, largest_block));
  return lanes * core::BlockElements::MemoryBytes(spec.spec, largest_block,
                                                  spec.importance != nullptr);
}

bool TakesLong(const core::EncodingSpec& spec, int64_t scale_count,
               int64_t element_count) {
  // Calibration without a search takes some nanoseconds for each scale and,
  // where it needs their histograms, for each element.
  constexpr int64_t kScales = int64_t{1} << 15;
  constexpr int64_t kElements = int64_t{1} << 17;
  return scale_count > kScales ||
         (core::NeedsHistograms(spec) && element_count > kElements) ||
         core::SearchTime(spec, scale_count, element_count) > kShortWork;
}

int64_t SearchQuantumElements(const ResolvedSpec& spec) {
  constexpr int64_t kMost = int64_t{1} << 17;
  const int64_t elements = spec.layout->element_count();
  const absl::Duration search = ElementSearchTime(spec);
  if (search <= absl::ZeroDuration()) return kMost;
  const double in_time = static_cast<double>(elements) *
                         absl::FDivDuration(2 * kShortWork, search);
  return in_time < kMost ? std::max<int64_t>(1, static_cast<int64_t>(in_time))
                         : kMost;
}

absl::StatusOr<CalibratedEncoding> CalibrateTensor(
    const RpcEnvironment& env, const ResolvedSpec& spec,
    const core::TensorStatistics& statistics,
    absl::Span<const core::Extremes> moving_average, core::ThreadPool* pool,
    core::StopToken stop, const core::HeldTensor* held,
    absl::optional<double> outer_magnitude) {
  MemoryBudget::Lease lease;
  env.budget->Count(&lease, core::CalibrationBytes(spec.spec, *spec.layout,
                                                   statistics, pool));
  absl::StatusOr<core::Calibration> calibration = core::Calibrate(
      spec.spec, *spec.layout, statistics, moving_average, pool, stop, held,
      spec.outer_maximum, ImportanceOf(spec),
      outer_magnitude.has_value() ? absl::MakeConstSpan(&*outer_magnitude, 1)
                                  : absl::Span<const double>());
  if (!calibration.ok()) return calibration.status();
  return CalibratedEncoding{
      {std::make_shared<const core::Encoding>(std::move(calibration->encoding)),
       spec.layout, ""},
      calibration->prediction,
      calibration->mantissa_bits};
}

}  // namespace quantd::server
