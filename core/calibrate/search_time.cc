#include "core/calibrate/search_time.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/time/time.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/encoding_spec.h"
#include "core/formats/number_format.h"

namespace quantd::core {
namespace {

// Most bins of the histogram of one scale; equal elements share one.
constexpr double kMostBins = 1024;

// For one scale whose histogram has so many bins.
double Nanoseconds(const EncodingSpec& spec, CalibrationMethod method,
                   double bins) {
  const bool both_ends = EffectiveSymmetry(spec) == Symmetry::kAsymmetric;
  double steps = spec.search_steps;
  switch (method) {
    case CalibrationMethod::kMse:
    case CalibrationMethod::kSqnr:
      if (steps == 0) {
        steps = both_ends ? kDefaultStepsOfEachEnd : kDefaultSteps;
      }
      // On the whole way, and about the best of it.
      return (both_ends ? 2 * steps * steps : (1 + WidestRange(spec)) * steps) *
             (25 + bins);
    case CalibrationMethod::kEntropy:
      if (steps == 0) steps = kDefaultSteps;
      return steps * (80 + 2 * bins);
    default:
      return 0;
  }
}

// For one scale that is searched on so many elements.
double DirectNanoseconds(const EncodingSpec& spec, CalibrationMethod method,
                         double elements) {
  const bool both_ends = EffectiveSymmetry(spec) == Symmetry::kAsymmetric;
  // Entropy: of more levels than elements, only those with elements are looked
  // at.
  constexpr double kFewLevels = 32;
  constexpr double kManyLevels = 256;
  double steps = spec.search_steps;
  switch (method) {
    case CalibrationMethod::kMse:
    case CalibrationMethod::kSqnr:
      if (steps == 0) {
        steps = both_ends ? kDefaultStepsOfEachEnd : kDefaultSteps;
      }
      return both_ends ? steps * steps * (5 + 0.06 * elements)
                       : WidestRange(spec) * steps * (4 + 0.05 * elements);
    case CalibrationMethod::kEntropy: {
      if (steps == 0) steps = kDefaultSteps;
      const FormatInfo& format = *FindFormat(spec.format);
      const bool of_magnitudes =
          format.kind == CodeKind::kInteger && !both_ends;
      const double levels = std::ldexp(1, format.bits - of_magnitudes);
      return 2000 + 4 * elements +
             steps * (levels <= std::clamp(elements, kFewLevels, kManyLevels)
                          ? 10 + 3 * levels
                          : 50 + 9 * elements);
    }
    default:
      return 0;
  }
}

}  // namespace

absl::Duration SearchTime(const EncodingSpec& spec, int64_t scale_count,
                          int64_t element_count, bool at_hand) {
  if (scale_count == 0 || !ValidateSpec(spec).ok()) return absl::ZeroDuration();
  const double scales = static_cast<double>(scale_count);
  const double elements = static_cast<double>(element_count) / scales;
  const bool is_direct =
      at_hand && elements <= static_cast<double>(MostDirectElements(spec));
  const auto time_of = [&](CalibrationMethod method) {
    return is_direct ? DirectNanoseconds(spec, method, elements)
                     : Nanoseconds(spec, method, std::min(elements, kMostBins));
  };
  double nanoseconds = 0;
  if (spec.method == CalibrationMethod::kBestOf) {
    for (const CalibrationMethod method : spec.methods) {
      nanoseconds += time_of(method);
    }
  } else {
    nanoseconds = time_of(spec.method);
  }
  // Under outer scales searches run once more, to find those.
  const int runs = spec.outer_block_size.empty() ? 1 : 2;
  return absl::Nanoseconds(nanoseconds * scales * runs);
}

}  // namespace quantd::core
