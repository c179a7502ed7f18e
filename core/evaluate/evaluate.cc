#include "core/evaluate/evaluate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/evaluate/evaluate_kernel.h"
#include "core/simd_internal.h"
#include "core/types/float_convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/evaluate/evaluate.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/types/float_convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void EvaluateSimd(const EvaluateRange& range, ErrorSums* leaves,
                  std::vector<ScalePortion>* portions) {
  EvaluateScalar(range, leaves, portions);
}

#else

constexpr int64_t kLeaf = Evaluator::kLeafElements;

// Counts of a run; the rest of ErrorSums comes from the pairs (x, x').
struct RunCounts {
  int64_t non_finite = 0;
  int64_t clipped_low = 0;
  int64_t clipped_high = 0;
};

// Lanes(d) elements: x to `real` and x' to `restored`, both 0 for a non-finite
// x, so that it adds nothing to any sum.
template <int kStep, class D, typename T = hn::TFromD<D>>
HWY_INLINE void RestoreVector(D d, const uint8_t* HWY_RESTRICT in,
                              const float* HWY_RESTRICT scale,
                              const int32_t* HWY_RESTRICT zero_point,
                              int32_t qmin, int32_t qmax, T* HWY_RESTRICT real,
                              T* HWY_RESTRICT restored, RunCounts* counts) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<float, D> df;
  const auto zero = kStep == 1 && zero_point != nullptr
                        ? hn::LoadU(di, zero_point)
                        : hn::Set(di, zero_point == nullptr ? 0 : *zero_point);
  const auto scale_f = kStep == 1 ? hn::LoadU(df, scale) : hn::Set(df, *scale);
  const auto low_i = hn::Sub(hn::Set(di, qmin), zero);
  const auto high_i = hn::Sub(hn::Set(di, qmax), zero);
  hn::Vec<D> low, high, scale_v;
  if constexpr (std::is_same_v<T, double>) {
    low = hn::PromoteTo(d, low_i);
    high = hn::PromoteTo(d, high_i);
    scale_v = hn::PromoteTo(d, scale_f);
  } else {
    low = hn::ConvertTo(d, low_i);
    high = hn::ConvertTo(d, high_i);
    scale_v = scale_f;
  }
  const auto x = LoadBytes(d, in);
  const auto finite = hn::IsFinite(x);
  const auto clean = hn::IfThenElseZero(finite, x);
  const auto rounded = hn::Round(hn::Div(x, scale_v));
  const auto clamped = hn::Min(hn::Max(rounded, low), high);
  hn::StoreU(clean, d, real);
  hn::StoreU(hn::IfThenElseZero(finite, hn::Mul(clamped, scale_v)), d,
             restored);
  counts->non_finite +=
      static_cast<int64_t>(hn::Lanes(d)) - hn::CountTrue(d, finite);
  counts->clipped_low +=
      hn::CountTrue(d, hn::And(finite, hn::Lt(rounded, low)));
  counts->clipped_high +=
      hn::CountTrue(d, hn::And(finite, hn::Gt(rounded, high)));
}

template <int kStep, typename T>
RunCounts RestoreRun(const Encoding& encoding, int64_t scale_index,
                     const uint8_t* HWY_RESTRICT in, int64_t count,
                     T* HWY_RESTRICT real, T* HWY_RESTRICT restored) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 1> d1;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const float* scale = encoding.scale.data() + scale_index;
  const int32_t* zero_point = encoding.zero_point.empty()
                                  ? nullptr
                                  : encoding.zero_point.data() + scale_index;
  RunCounts counts;
  const auto vector = [&](auto tag, int64_t i) HWY_ATTR {
    RestoreVector<kStep>(
        tag, in + i * static_cast<int64_t>(sizeof(T)), scale + i * kStep,
        zero_point == nullptr ? nullptr : zero_point + i * kStep, encoding.qmin,
        encoding.qmax, real + i, restored + i, &counts);
  };
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) vector(d, i);
  for (; i < count; ++i) vector(d1, i);
  return counts;
}

// Loads Lanes(d) elements as float64.
template <class D, typename T>
HWY_INLINE hn::Vec<D> LoadDouble(D d, const T* HWY_RESTRICT in) {
  if constexpr (std::is_same_v<T, double>) {
    return hn::LoadU(d, in);
  } else {
    return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, D>(), in));
  }
}

// The sums over pairs (x, x') of a leaf or portion.
template <typename T>
ErrorSums SumPairs(const T* HWY_RESTRICT real, const T* HWY_RESTRICT restored,
                   int64_t count, const RunCounts& counts) {
  const hn::CappedTag<double, kSumLanes> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t whole = count - count % kSumLanes;
  HWY_ALIGN double squared_error[kSumLanes];
  HWY_ALIGN double absolute_error[kSumLanes];
  HWY_ALIGN double relative_error[kSumLanes];
  HWY_ALIGN double signal[kSumLanes];
  HWY_ALIGN double reconstructed[kSumLanes];
  HWY_ALIGN double product[kSumLanes];
  auto max_absolute = hn::Zero(d);
  auto max_relative = hn::Zero(d);
  int64_t zero_flushed = 0;
  // One vector's width of the lanes at a time, so that all sums fit registers.
  for (int64_t lane = 0; lane < kSumLanes; lane += lanes) {
    auto sum_squared = hn::Zero(d);
    auto sum_absolute = hn::Zero(d);
    auto sum_relative = hn::Zero(d);
    auto sum_signal = hn::Zero(d);
    auto sum_reconstructed = hn::Zero(d);
    auto sum_product = hn::Zero(d);
    for (int64_t i = lane; i < whole; i += kSumLanes) {
      const auto x = LoadDouble(d, real + i);
      const auto y = LoadDouble(d, restored + i);
      const auto error = hn::Abs(hn::Sub(y, x));
      const auto is_zero = hn::Eq(x, hn::Zero(d));
      const auto relative =
          hn::IfThenZeroElse(is_zero, hn::Div(error, hn::Abs(x)));
      zero_flushed +=
          hn::CountTrue(d, hn::AndNot(is_zero, hn::Eq(y, hn::Zero(d))));
      sum_squared = hn::Add(sum_squared, hn::Mul(error, error));
      sum_absolute = hn::Add(sum_absolute, error);
      sum_relative = hn::Add(sum_relative, relative);
      sum_signal = hn::Add(sum_signal, hn::Mul(x, x));
      sum_reconstructed = hn::Add(sum_reconstructed, hn::Mul(y, y));
      sum_product = hn::Add(sum_product, hn::Mul(x, y));
      max_absolute = hn::Max(max_absolute, error);
      max_relative = hn::Max(max_relative, relative);
    }
    hn::Store(sum_squared, d, squared_error + lane);
    hn::Store(sum_absolute, d, absolute_error + lane);
    hn::Store(sum_relative, d, relative_error + lane);
    hn::Store(sum_signal, d, signal + lane);
    hn::Store(sum_reconstructed, d, reconstructed + lane);
    hn::Store(sum_product, d, product + lane);
  }
  ErrorSums sums;
  sums.max_absolute_error = hn::GetLane(hn::MaxOfLanes(d, max_absolute));
  sums.max_relative_error = hn::GetLane(hn::MaxOfLanes(d, max_relative));
  for (int64_t i = whole; i < count; ++i) {
    const double x = real[i];
    const double y = restored[i];
    const double error = std::fabs(y - x);
    const double relative = x == 0 ? 0 : error / std::fabs(x);
    const int64_t lane = i - whole;
    zero_flushed += x != 0 && y == 0;
    squared_error[lane] += error * error;
    absolute_error[lane] += error;
    relative_error[lane] += relative;
    signal[lane] += x * x;
    reconstructed[lane] += y * y;
    product[lane] += x * y;
    sums.max_absolute_error = std::max(sums.max_absolute_error, error);
    sums.max_relative_error = std::max(sums.max_relative_error, relative);
  }
  sums.count = count - counts.non_finite;
  sums.non_finite = counts.non_finite;
  sums.clipped_low = counts.clipped_low;
  sums.clipped_high = counts.clipped_high;
  sums.zero_flushed = zero_flushed;
  sums.squared_error = AddLanes(squared_error);
  sums.absolute_error = AddLanes(absolute_error);
  sums.relative_error = AddLanes(relative_error);
  sums.signal = AddLanes(signal);
  sums.reconstructed = AddLanes(reconstructed);
  sums.product = AddLanes(product);
  return sums;
}

// SumPairs of a single pair.
ErrorSums SumPair(double x, double y, const RunCounts& counts) {
  const double error = std::fabs(y - x);
  ErrorSums sums;
  sums.count = 1 - counts.non_finite;
  sums.non_finite = counts.non_finite;
  sums.clipped_low = counts.clipped_low;
  sums.clipped_high = counts.clipped_high;
  sums.zero_flushed = x != 0 && y == 0;
  sums.squared_error = error * error;
  sums.absolute_error = error;
  sums.relative_error = x == 0 ? 0 : error / std::fabs(x);
  sums.signal = x * x;
  sums.reconstructed = y * y;
  // A lane starts at +0, to which -0 adds nothing.
  sums.product = 0.0 + x * y;
  sums.max_absolute_error = sums.absolute_error;
  sums.max_relative_error = sums.relative_error;
  return sums;
}

template <typename T>
void EvaluateTyped(const EvaluateRange& range, ErrorSums* leaves,
                   std::vector<ScalePortion>* portions) {
  const bool widens = sizeof(T) == 4 && range.type != ElementType::kFloat32;
  const int64_t element_bytes = ElementSizeBytes(range.type);
  HWY_ALIGN float wide[kLeaf];
  HWY_ALIGN T real[kLeaf];
  HWY_ALIGN T restored[kLeaf];
  for (int64_t begin = 0; begin < range.count; begin += kLeaf) {
    const int64_t count = std::min(range.count - begin, kLeaf);
    const int64_t first = range.first + begin;
    const uint8_t* in = range.in + begin * element_bytes;
    if (widens) {
      Widen(range.type, in, count, wide);
      in = reinterpret_cast<const uint8_t*>(wide);
    }
    RunCounts leaf_counts;
    range.layout.ForEachRun(
        first, count, [&](const BlockLayout::Run& run) HWY_ATTR {
          const int64_t i = run.begin - first;
          const uint8_t* run_in = in + i * static_cast<int64_t>(sizeof(T));
          RunCounts counts;
          if (run.scale_step == 1 && portions != nullptr) {
            for (int64_t k = 0; k < run.count; ++k) {
              const RunCounts element =
                  RestoreRun<0, T>(range.encoding, run.scale_index + k,
                                   run_in + k * static_cast<int64_t>(sizeof(T)),
                                   1, real + i + k, restored + i + k);
              portions->push_back(
                  {run.scale_index + k,
                   SumPair(real[i + k], restored[i + k], element)});
              counts.non_finite += element.non_finite;
              counts.clipped_low += element.clipped_low;
              counts.clipped_high += element.clipped_high;
            }
          } else if (run.scale_step == 1) {
            counts = RestoreRun<1, T>(range.encoding, run.scale_index, run_in,
                                      run.count, real + i, restored + i);
          } else {
            counts = RestoreRun<0, T>(range.encoding, run.scale_index, run_in,
                                      run.count, real + i, restored + i);
            if (portions != nullptr) {
              portions->push_back(
                  {run.scale_index,
                   SumPairs(real + i, restored + i, run.count, counts)});
            }
          }
          leaf_counts.non_finite += counts.non_finite;
          leaf_counts.clipped_low += counts.clipped_low;
          leaf_counts.clipped_high += counts.clipped_high;
        });
    *leaves++ = SumPairs(real, restored, count, leaf_counts);
  }
}

void EvaluateSimd(const EvaluateRange& range, ErrorSums* leaves,
                  std::vector<ScalePortion>* portions) {
  if (range.type == ElementType::kFloat64) {
    EvaluateTyped<double>(range, leaves, portions);
  } else {
    EvaluateTyped<float>(range, leaves, portions);
  }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quantd::core {
namespace {

HWY_EXPORT(EvaluateSimd);

// Leaves of a task.
constexpr int64_t kTaskLeaves = 64;
// Tasks whose sums are kept before they are added up in order.
constexpr int64_t kWaveTasks = 256;

}  // namespace

void ErrorSums::Add(const ErrorSums& other) {
  count += other.count;
  non_finite += other.non_finite;
  clipped_low += other.clipped_low;
  clipped_high += other.clipped_high;
  zero_flushed += other.zero_flushed;
  squared_error += other.squared_error;
  absolute_error += other.absolute_error;
  relative_error += other.relative_error;
  signal += other.signal;
  reconstructed += other.reconstructed;
  product += other.product;
  max_absolute_error = std::max(max_absolute_error, other.max_absolute_error);
  max_relative_error = std::max(max_relative_error, other.max_relative_error);
}

double ErrorSums::MeanSquaredError() const {
  return count == 0 ? 0 : squared_error / static_cast<double>(count);
}

double ErrorSums::MeanAbsoluteError() const {
  return count == 0 ? 0 : absolute_error / static_cast<double>(count);
}

double ErrorSums::MeanRelativeError() const {
  return count == 0 ? 0 : relative_error / static_cast<double>(count);
}

double ErrorSums::SqnrDb() const {
  if (squared_error == 0) return std::numeric_limits<double>::infinity();
  return 10 * std::log10(signal / squared_error);
}

double ErrorSums::CosineSimilarity() const {
  if (signal == 0 && reconstructed == 0) return 1;
  if (signal == 0 || reconstructed == 0) return 0;
  // The roots apart: the product of the sums could overflow.
  return product / (std::sqrt(signal) * std::sqrt(reconstructed));
}

Evaluator::Evaluator(const Encoding& encoding, const BlockLayout& layout,
                     ElementType type, const EvaluateOptions& options)
    : encoding_(encoding), layout_(layout), type_(type) {
  if (options.per_scale_index) per_scale_index_.resize(layout.scale_count());
}

ErrorDistribution Evaluator::distribution() const { return {}; }

void Evaluator::Update(int64_t first, int64_t count, const uint8_t* data,
                       ThreadPool* pool) {
  const int64_t leaf_count = (count + kLeafElements - 1) / kLeafElements;
  const int64_t task_count = (leaf_count + kTaskLeaves - 1) / kTaskLeaves;
  const bool per_scale_index = !per_scale_index_.empty();
  const bool is_scalar = internal::UsesScalarKernels();
  // Sums per scale index can be one per element: no more than the threads work
  // on are kept.
  const int64_t threads = pool == nullptr ? 1 : pool->thread_count() + 1;
  const int64_t wave_tasks =
      std::min(per_scale_index ? threads : kWaveTasks, task_count);
  std::vector<ErrorSums> leaves(wave_tasks * kTaskLeaves);
  std::vector<std::vector<ScalePortion>> portions(per_scale_index ? wave_tasks
                                                                  : 0);

  for (int64_t wave = 0; wave < task_count; wave += wave_tasks) {
    const int64_t tasks = std::min(wave_tasks, task_count - wave);
    const auto run_task = [&](int64_t task) {
      constexpr int64_t kTaskElements = kTaskLeaves * kLeafElements;
      const int64_t begin = (wave + task) * kTaskElements;
      const EvaluateRange range{encoding_,
                                layout_,
                                type_,
                                first + begin,
                                std::min(kTaskElements, count - begin),
                                data + begin * ElementSizeBytes(type_)};
      std::vector<ScalePortion>* task_portions = nullptr;
      if (per_scale_index) {
        task_portions = &portions[task];
        task_portions->clear();
      }
      ErrorSums* task_leaves = &leaves[task * kTaskLeaves];
      if (is_scalar) {
        EvaluateScalar(range, task_leaves, task_portions);
      } else {
        HWY_DYNAMIC_DISPATCH(EvaluateSimd)(range, task_leaves, task_portions);
      }
    };
    ParallelFor(pool, tasks, run_task);
    const int64_t wave_leaves =
        std::min(tasks * kTaskLeaves, leaf_count - wave * kTaskLeaves);
    for (int64_t leaf = 0; leaf < wave_leaves; ++leaf) {
      overall_.Add(leaves[leaf]);
    }
    if (!per_scale_index) continue;
    for (int64_t task = 0; task < tasks; ++task) {
      for (const ScalePortion& portion : portions[task]) {
        per_scale_index_[portion.scale_index].Add(portion.sums);
      }
    }
  }
}

}  // namespace quantd::core
#endif  // HWY_ONCE
