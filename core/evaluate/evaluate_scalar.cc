#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/evaluate/evaluate_kernel.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

// Sums of the elements of a leaf or portion, the k-th in lane k mod kSumLanes.
class LaneSums {
 public:
  template <typename T>
  void Add(int64_t k, T x, T scale, int32_t zero_point,
           const Encoding& encoding) {
    if (!std::isfinite(x)) {
      ++sums_.non_finite;
      return;
    }
    const T low = static_cast<T>(encoding.qmin - zero_point);
    const T high = static_cast<T>(encoding.qmax - zero_point);
    const T rounded = std::nearbyint(x / scale);
    const T restored = std::clamp(rounded, low, high) * scale;
    ++sums_.count;
    sums_.clipped_low += rounded < low;
    sums_.clipped_high += rounded > high;
    sums_.zero_flushed += x != 0 && restored == 0;

    const double real = x;
    const double approximation = restored;
    const double error = std::fabs(approximation - real);
    const double relative = real == 0 ? 0 : error / std::fabs(real);
    const int64_t lane = k % kSumLanes;
    squared_error_[lane] += error * error;
    absolute_error_[lane] += error;
    relative_error_[lane] += relative;
    signal_[lane] += real * real;
    reconstructed_[lane] += approximation * approximation;
    product_[lane] += real * approximation;
    sums_.max_absolute_error = std::max(sums_.max_absolute_error, error);
    sums_.max_relative_error = std::max(sums_.max_relative_error, relative);
  }

  ErrorSums Total() const {
    ErrorSums sums = sums_;
    sums.squared_error = AddLanes(squared_error_);
    sums.absolute_error = AddLanes(absolute_error_);
    sums.relative_error = AddLanes(relative_error_);
    sums.signal = AddLanes(signal_);
    sums.reconstructed = AddLanes(reconstructed_);
    sums.product = AddLanes(product_);
    return sums;
  }

 private:
  // The counts and maxima.
  ErrorSums sums_;
  double squared_error_[kSumLanes] = {};
  double absolute_error_[kSumLanes] = {};
  double relative_error_[kSumLanes] = {};
  double signal_[kSumLanes] = {};
  double reconstructed_[kSumLanes] = {};
  double product_[kSumLanes] = {};
};

template <typename T>
void EvaluateLeaf(const EvaluateRange& range, int64_t begin, int64_t count,
                  ErrorSums* leaf, std::vector<ScalePortion>* portions) {
  const Encoding& encoding = range.encoding;
  LaneSums leaf_sums;
  range.layout.ForEachRun(begin, count, [&](const BlockLayout::Run& run) {
    LaneSums run_sums;
    for (int64_t k = 0; k < run.count; ++k) {
      const int64_t scale_index = run.scale_index + k * run.scale_step;
      const int64_t i = run.begin + k;
      const T x = LoadElement<T>(range.type, range.in, i - range.first);
      const T scale = encoding.scale[scale_index];
      const int32_t zero_point =
          encoding.zero_point.empty() ? 0 : encoding.zero_point[scale_index];
      leaf_sums.Add(i - begin, x, scale, zero_point, encoding);
      if (portions == nullptr) continue;
      if (run.scale_step == 1) {
        LaneSums element_sums;
        element_sums.Add(0, x, scale, zero_point, encoding);
        portions->push_back({scale_index, element_sums.Total()});
      } else {
        run_sums.Add(k, x, scale, zero_point, encoding);
      }
    }
    if (portions != nullptr && run.scale_step == 0) {
      portions->push_back({run.scale_index, run_sums.Total()});
    }
  });
  *leaf = leaf_sums.Total();
}

}  // namespace

void EvaluateScalar(const EvaluateRange& range, ErrorSums* leaves,
                    std::vector<ScalePortion>* portions) {
  for (int64_t begin = 0; begin < range.count;
       begin += Evaluator::kLeafElements) {
    const int64_t count =
        std::min(Evaluator::kLeafElements, range.count - begin);
    if (range.type == ElementType::kFloat64) {
      EvaluateLeaf<double>(range, range.first + begin, count, leaves++,
                           portions);
    } else {
      EvaluateLeaf<float>(range, range.first + begin, count, leaves++,
                          portions);
    }
  }
}

}  // namespace quantd::core
