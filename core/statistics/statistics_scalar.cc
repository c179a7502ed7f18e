#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/statistics/statistics_kernel.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

template <typename T>
void AddAll(const StatisticsRange& range, PartialStatistics* partial) {
  ElementCounts& counts = partial->counts;
  auto& singles = partial->singles;
  range.layout.ForEachRun(
      range.first, range.count, [&](const BlockLayout::Run& run) {
        for (int64_t k = 0; k < run.count; ++k) {
          const int64_t scale_index = run.scale_index + k * run.scale_step;
          const T x =
              LoadElement<T>(range.type, range.in, run.begin + k - range.first);
          ++counts.total;
          counts.zero += x == 0;
          if (!std::isfinite(x)) {
            ++(std::isnan(x) ? counts.nan
               : x > 0       ? counts.positive_infinity
                             : counts.negative_infinity);
            partial->MarkNonFinite(scale_index);
          } else {
            if (singles.empty() || singles.back().scale_index != scale_index) {
              singles.push_back({scale_index, kNoExtremes});
            }
            singles.back().extremes.Merge({x, x});
          }
        }
      });
}

}  // namespace

void StatisticsScalar(const StatisticsRange& range,
                      PartialStatistics* partial) {
  if (range.type == ElementType::kFloat64) {
    AddAll<double>(range, partial);
  } else {
    AddAll<float>(range, partial);
  }
}

}  // namespace quantd::core
