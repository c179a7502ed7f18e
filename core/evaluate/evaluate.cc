#include "core/evaluate/evaluate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/evaluate/evaluate_kernel.h"
#include "core/simd_internal.h"
#include "core/types/float_convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/evaluate/evaluate.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/evaluate/pair_sums-inl.h"
#include "core/formats/float_codec-inl.h"
#include "core/types/float_convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void EvaluateSimd(const EvaluateRange& range, ErrorSums* leaves,
                  std::vector<ScalePortion>* portions,
                  DistributionCounts* distribution) {
  EvaluateScalar(range, leaves, portions, distribution);
}

#else

constexpr int64_t kLeaf = Evaluator::kLeafElements;

template <CodeKind kKind>
HWY_INLINE const auto& GridOf(const CodeValues& values) {
  if constexpr (kKind == CodeKind::kFloat) {
    return *values.float_grid;
  } else {
    return *values.codebook_grid;
  }
}

// Lanes(d) elements: x to `real` and x' to `restored`, both 0 where either is
// not finite, so that it adds nothing to any sum. `scale` and `zero_point` are
// those of the first element; zero_point is null for none.
template <CodeKind kKind, int kStep, class D, typename T = hn::TFromD<D>>
HWY_INLINE void RestoreVector(D d, const uint8_t* HWY_RESTRICT in,
                              const float* HWY_RESTRICT scale,
                              const int32_t* HWY_RESTRICT zero_point,
                              const EvaluateRange& range, T* HWY_RESTRICT real,
                              T* HWY_RESTRICT restored, PairCounts* counts) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<float, D> df;
  const auto scale_f = kStep == 1 ? hn::LoadU(df, scale) : hn::Set(df, *scale);
  hn::Vec<D> scale_v;
  if constexpr (std::is_same_v<T, double>) {
    scale_v = hn::PromoteTo(d, scale_f);
  } else {
    scale_v = scale_f;
  }
  const auto x = LoadBytes(d, in);
  const auto quotient = hn::Div(x, scale_v);
  hn::Vec<D> value;
  hn::Mask<D> is_low, is_high;
  if constexpr (kKind == CodeKind::kInteger) {
    const auto zero =
        kStep == 1 && zero_point != nullptr
            ? hn::LoadU(di, zero_point)
            : hn::Set(di, zero_point == nullptr ? 0 : *zero_point);
    const auto low_i = hn::Sub(hn::Set(di, range.encoding.qmin), zero);
    const auto high_i = hn::Sub(hn::Set(di, range.encoding.qmax), zero);
    hn::Vec<D> low, high;
    if constexpr (std::is_same_v<T, double>) {
      low = hn::PromoteTo(d, low_i);
      high = hn::PromoteTo(d, high_i);
    } else {
      low = hn::ConvertTo(d, low_i);
      high = hn::ConvertTo(d, high_i);
    }
    const auto rounded = hn::Round(quotient);
    value = hn::Min(hn::Max(rounded, low), high);
    is_low = hn::Lt(rounded, low);
    is_high = hn::Gt(rounded, high);
  } else {
    const auto& grid = GridOf<kKind>(range.values);
    value = Round(d, grid, quotient);
    is_low = IsBelow(d, grid, quotient);
    is_high = IsAbove(d, grid, quotient);
  }
  const auto approximation = hn::Mul(value, scale_v);
  const auto finite = hn::And(hn::IsFinite(x), hn::IsFinite(approximation));
  hn::StoreU(hn::IfThenElseZero(finite, x), d, real);
  hn::StoreU(hn::IfThenElseZero(finite, approximation), d, restored);
  counts->non_finite +=
      static_cast<int64_t>(hn::Lanes(d)) - hn::CountTrue(d, finite);
  counts->clipped_low += hn::CountTrue(d, hn::And(finite, is_low));
  counts->clipped_high += hn::CountTrue(d, hn::And(finite, is_high));
}

template <CodeKind kKind, int kStep, typename T>
PairCounts RestoreKind(const EvaluateRange& range, int64_t scale_index,
                       const uint8_t* HWY_RESTRICT in, int64_t count,
                       T* HWY_RESTRICT real, T* HWY_RESTRICT restored) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 1> d1;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const Encoding& encoding = range.encoding;
  const float* scale = encoding.scale.data() + scale_index;
  const int32_t* zero_point = encoding.zero_point.empty()
                                  ? nullptr
                                  : encoding.zero_point.data() + scale_index;
  PairCounts counts;
  const auto vector = [&](auto tag, int64_t i) HWY_ATTR {
    RestoreVector<kKind, kStep>(
        tag, in + i * static_cast<int64_t>(sizeof(T)), scale + i * kStep,
        zero_point == nullptr ? nullptr : zero_point + i * kStep, range,
        real + i, restored + i, &counts);
  };
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) vector(d, i);
  for (; i < count; ++i) vector(d1, i);
  return counts;
}

template <int kStep, typename T>
PairCounts RestoreRun(const EvaluateRange& range, int64_t scale_index,
                      const uint8_t* HWY_RESTRICT in, int64_t count,
                      T* HWY_RESTRICT real, T* HWY_RESTRICT restored) {
  switch (range.values.kind) {
    case CodeKind::kInteger:
      return RestoreKind<CodeKind::kInteger, kStep, T>(range, scale_index, in,
                                                       count, real, restored);
    case CodeKind::kFloat:
      return RestoreKind<CodeKind::kFloat, kStep, T>(range, scale_index, in,
                                                     count, real, restored);
    case CodeKind::kCodebook:
      break;
  }
  return RestoreKind<CodeKind::kCodebook, kStep, T>(range, scale_index, in,
                                                    count, real, restored);
}

template <typename T>
void EvaluateTyped(const EvaluateRange& range, ErrorSums* leaves,
                   std::vector<ScalePortion>* portions,
                   DistributionCounts* distribution) {
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
    PairCounts leaf_counts;
    range.layout.ForEachRun(
        first, count, [&](const BlockLayout::Run& run) HWY_ATTR {
          const int64_t i = run.begin - first;
          const uint8_t* run_in = in + i * static_cast<int64_t>(sizeof(T));
          PairCounts counts;
          if (run.scale_step == 1 && portions != nullptr) {
            for (int64_t k = 0; k < run.count; ++k) {
              const PairCounts element =
                  RestoreRun<0, T>(range, run.scale_index + k,
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
            counts = RestoreRun<1, T>(range, run.scale_index, run_in, run.count,
                                      real + i, restored + i);
          } else {
            counts = RestoreRun<0, T>(range, run.scale_index, run_in, run.count,
                                      real + i, restored + i);
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
    if (distribution != nullptr) {
      distribution->Add(real, restored, count, leaf_counts.non_finite);
    }
  }
}

void EvaluateSimd(const EvaluateRange& range, ErrorSums* leaves,
                  std::vector<ScalePortion>* portions,
                  DistributionCounts* distribution) {
  if (range.type == ElementType::kFloat64) {
    EvaluateTyped<double>(range, leaves, portions, distribution);
  } else {
    EvaluateTyped<float>(range, leaves, portions, distribution);
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

CodeValues::CodeValues(const Encoding& encoding)
    : kind(FindFormat(encoding.format)->kind) {
  if (kind == CodeKind::kFloat) {
    float_grid.emplace(FindFormat(encoding.format)->float_layout,
                       encoding.no_saturation);
  } else if (kind == CodeKind::kCodebook) {
    codebook_grid.emplace(CodebookOf(encoding));
  }
}

void SumLeaves(
    int64_t count, int64_t wave_tasks, ThreadPool* pool,
    absl::FunctionRef<void(int64_t, int64_t, int64_t, ErrorSums*)> task,
    absl::FunctionRef<void(int64_t)> after_wave, ErrorSums* overall) {
  constexpr int64_t kTaskElements = kTaskLeaves * Evaluator::kLeafElements;
  const int64_t leaf_count =
      (count + Evaluator::kLeafElements - 1) / Evaluator::kLeafElements;
  const int64_t task_count = (leaf_count + kTaskLeaves - 1) / kTaskLeaves;
  wave_tasks = std::min(wave_tasks, task_count);
  std::vector<ErrorSums> leaves(wave_tasks * kTaskLeaves);
  for (int64_t wave = 0; wave < task_count; wave += wave_tasks) {
    const int64_t tasks = std::min(wave_tasks, task_count - wave);
    ParallelFor(pool, tasks, [&](int64_t i) {
      const int64_t begin = (wave + i) * kTaskElements;
      task(i, begin, std::min(kTaskElements, count - begin),
           &leaves[i * kTaskLeaves]);
    });
    const int64_t wave_leaves =
        std::min(tasks * kTaskLeaves, leaf_count - wave * kTaskLeaves);
    for (int64_t leaf = 0; leaf < wave_leaves; ++leaf) {
      overall->Add(leaves[leaf]);
    }
    after_wave(tasks);
  }
}

Evaluator::Evaluator(const Encoding& encoding, const BlockLayout& layout,
                     ElementType type, const EvaluateOptions& options)
    : encoding_(encoding),
      layout_(layout),
      type_(type),
      values_(std::make_unique<const CodeValues>(encoding)) {
  if (options.per_scale_index) per_scale_index_.resize(layout.scale_count());
  if (options.with_distribution) {
    distribution_ = std::make_unique<DistributionCounts>();
  }
}

Evaluator::~Evaluator() = default;

void Evaluator::Update(int64_t first, int64_t count, const uint8_t* data,
                       ThreadPool* pool) {
  const bool per_scale_index = !per_scale_index_.empty();
  const bool is_scalar = internal::UsesScalarKernels();
  // Sums per scale index can be one per element: no more than the threads work
  // on are kept.
  const int64_t threads = pool == nullptr ? 1 : pool->thread_count() + 1;
  const int64_t wave_tasks = per_scale_index ? threads : kWaveTasks;
  std::vector<std::vector<ScalePortion>> portions(per_scale_index ? wave_tasks
                                                                  : 0);
  DistributionScratch scratch;
  const auto task = [&](int64_t i, int64_t begin, int64_t task_count,
                        ErrorSums* leaves) {
    const EvaluateRange range{encoding_,
                              *values_,
                              layout_,
                              type_,
                              first + begin,
                              task_count,
                              data + begin * ElementSizeBytes(type_)};
    std::vector<ScalePortion>* task_portions = nullptr;
    if (per_scale_index) {
      task_portions = &portions[i];
      task_portions->clear();
    }
    std::unique_ptr<DistributionCounts> counts;
    if (distribution_ != nullptr) counts = scratch.Take();
    if (is_scalar) {
      EvaluateScalar(range, leaves, task_portions, counts.get());
    } else {
      HWY_DYNAMIC_DISPATCH(EvaluateSimd)
      (range, leaves, task_portions, counts.get());
    }
    if (counts != nullptr) scratch.Return(std::move(counts));
  };
  const auto after_wave = [&](int64_t tasks) {
    if (!per_scale_index) return;
    for (int64_t i = 0; i < tasks; ++i) {
      for (const ScalePortion& portion : portions[i]) {
        per_scale_index_[portion.scale_index].Add(portion.sums);
      }
    }
  };
  SumLeaves(count, wave_tasks, pool, task, after_wave, &overall_);
  if (distribution_ != nullptr) scratch.MergeInto(distribution_.get());
}

}  // namespace quantd::core
#endif  // HWY_ONCE
