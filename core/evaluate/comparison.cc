#include "core/evaluate/comparison.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/evaluate/evaluate_kernel.h"
#include "core/simd_internal.h"
#include "core/types/float_convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/evaluate/comparison.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/evaluate/pair_sums-inl.h"
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_EVALUATE_COMPARISON_CC_
#define QUANTD_CORE_EVALUATE_COMPARISON_CC_
namespace quantd::core {
namespace {

// Leaves of pairs: x, x', x, x', ...
struct PairRange {
  ElementType type;
  int64_t count;
  const uint8_t* in;
  // Sums that kernels have to add up; they may add up more.
  ErrorSumSet sums;
};

template <typename T>
void CompareLeaf(const PairRange& range, int64_t begin, int64_t count,
                 ErrorSums* leaf, DistributionCounts* distribution) {
  LaneSums sums;
  for (int64_t k = 0; k < count; ++k) {
    const T real = LoadElement<T>(range.type, range.in, 2 * (begin + k));
    const T test = LoadElement<T>(range.type, range.in, 2 * (begin + k) + 1);
    if (!std::isfinite(real) || !std::isfinite(test)) {
      sums.AddNonFinite();
      continue;
    }
    sums.Add(k, real, test);
    if (distribution != nullptr) distribution->Add(&real, &test, 1, 0);
  }
  *leaf = sums.Total();
}

// The truth, one pair after the other.
void CompareScalar(const PairRange& range, ErrorSums* leaves,
                   DistributionCounts* distribution) {
  for (int64_t begin = 0; begin < range.count;
       begin += Evaluator::kLeafElements) {
    const int64_t count =
        std::min(Evaluator::kLeafElements, range.count - begin);
    if (range.type == ElementType::kFloat64) {
      CompareLeaf<double>(range, begin, count, leaves++, distribution);
    } else {
      CompareLeaf<float>(range, begin, count, leaves++, distribution);
    }
  }
}

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_EVALUATE_COMPARISON_CC_

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void CompareSimd(const PairRange& range, ErrorSums* leaves,
                 DistributionCounts* distribution) {
  CompareScalar(range, leaves, distribution);
}

#else

constexpr int64_t kLeaf = Evaluator::kLeafElements;

// Pairs `in` [2 * count], any alignment, to `real` and `test` [count] each,
// both 0 where either is not finite. Returns how many those are.
template <typename T>
int64_t Deinterleave(const uint8_t* HWY_RESTRICT in, int64_t count,
                     T* HWY_RESTRICT real, T* HWY_RESTRICT test) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int64_t kSize = sizeof(T);
  int64_t finite_count = 0;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const uint8_t* pairs = in + 2 * i * kSize;
    const auto low = LoadBytes(d, pairs);
    const auto high = LoadBytes(d, pairs + lanes * kSize);
    const auto x = hn::ConcatEven(d, high, low);
    const auto y = hn::ConcatOdd(d, high, low);
    const auto finite = hn::And(hn::IsFinite(x), hn::IsFinite(y));
    hn::StoreU(hn::IfThenElseZero(finite, x), d, real + i);
    hn::StoreU(hn::IfThenElseZero(finite, y), d, test + i);
    finite_count += static_cast<int64_t>(hn::CountTrue(d, finite));
  }
  for (; i < count; ++i) {
    const T x = LoadUnaligned<T>(in + 2 * i * kSize);
    const T y = LoadUnaligned<T>(in + (2 * i + 1) * kSize);
    const bool finite = std::isfinite(x) && std::isfinite(y);
    real[i] = finite ? x : 0;
    test[i] = finite ? y : 0;
    finite_count += finite;
  }
  return count - finite_count;
}

template <typename T>
void CompareTyped(const PairRange& range, ErrorSums* leaves,
                  DistributionCounts* distribution) {
  const int64_t pair_bytes = 2 * ElementSizeBytes(range.type);
  const bool widens = pair_bytes < 2 * static_cast<int64_t>(sizeof(T));
  HWY_ALIGN float wide[2 * kLeaf];
  HWY_ALIGN T real[kLeaf];
  HWY_ALIGN T test[kLeaf];
  for (int64_t begin = 0; begin < range.count; begin += kLeaf) {
    const int64_t count = std::min(range.count - begin, kLeaf);
    const uint8_t* in = range.in + begin * pair_bytes;
    if (widens) {
      Widen(range.type, in, 2 * count, wide);
      in = reinterpret_cast<const uint8_t*>(wide);
    }
    PairCounts counts;
    counts.non_finite = Deinterleave(in, count, real, test);
    const Ahead ahead = {range.in + (begin + kLeaf) * pair_bytes, pair_bytes};
    *leaves++ = SumPairs(real, test, count, counts, range.sums, ahead);
    if (distribution != nullptr) {
      distribution->Add(real, test, count, counts.non_finite);
    }
  }
}

void CompareSimd(const PairRange& range, ErrorSums* leaves,
                 DistributionCounts* distribution) {
  if (range.type == ElementType::kFloat64) {
    CompareTyped<double>(range, leaves, distribution);
  } else {
    CompareTyped<float>(range, leaves, distribution);
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

HWY_EXPORT(CompareSimd);

// Tasks of a thread whose references are copied before their statistics are
// taken, which are then in the cache.
constexpr int64_t kThreadTasks = 4;

// out[i] = in[2 * i], elements as wide as T.
template <typename T>
void CopyReferences(const uint8_t* in, int64_t count, uint8_t* out) {
  constexpr int64_t kBytes = sizeof(T);
  for (int64_t i = 0; i < count; ++i) {
    StoreUnaligned(LoadUnaligned<T>(in + 2 * i * kBytes), out + i * kBytes);
  }
}

void CopyReferences(ElementType type, const uint8_t* in, int64_t count,
                    uint8_t* out) {
  switch (ElementSizeBytes(type)) {
    case 2:
      return CopyReferences<uint16_t>(in, count, out);
    case 4:
      return CopyReferences<uint32_t>(in, count, out);
    default:
      return CopyReferences<uint64_t>(in, count, out);
  }
}

}  // namespace

Comparison::Comparison(ElementType type, bool with_distribution,
                       ErrorSumSet sums)
    : type_(type), sums_(sums), reference_(1) {
  if (with_distribution) distribution_ = std::make_unique<DistributionCounts>();
}

void Comparison::Update(int64_t first, int64_t count, const uint8_t* data,
                        ThreadPool* pool) {
  const bool is_scalar = internal::UsesScalarKernels();
  const int64_t element_bytes = ElementSizeBytes(type_);
  const int64_t threads = pool == nullptr ? 1 : pool->thread_count() + 1;
  const int64_t wave_tasks = kThreadTasks * threads;
  const int64_t wave_elements =
      wave_tasks * kTaskLeaves * Evaluator::kLeafElements;
  // The references by themselves, of a wave.
  const std::unique_ptr<uint8_t[]> references(
      new uint8_t[std::min(count, wave_elements) * element_bytes]);
  DistributionScratch scratch;
  for (int64_t wave = 0; wave < count; wave += wave_elements) {
    const int64_t wave_count = std::min(wave_elements, count - wave);
    const uint8_t* wave_data = data + 2 * wave * element_bytes;
    const auto task = [&](int64_t, int64_t begin, int64_t task_count,
                          ErrorSums* leaves) {
      const uint8_t* in = wave_data + 2 * begin * element_bytes;
      CopyReferences(type_, in, task_count,
                     references.get() + begin * element_bytes);
      const PairRange range{type_, task_count, in, sums_};
      std::unique_ptr<DistributionCounts> counts;
      if (distribution_ != nullptr) counts = scratch.Take();
      if (is_scalar) {
        CompareScalar(range, leaves, counts.get());
      } else {
        HWY_DYNAMIC_DISPATCH(CompareSimd)(range, leaves, counts.get());
      }
      if (counts != nullptr) scratch.Return(std::move(counts));
    };
    SumLeaves(
        wave_count, wave_tasks, pool, task, [](int64_t) {}, &overall_);
    const absl::StatusOr<BlockLayout> layout =
        BlockLayout::Create({wave_count}, {});
    reference_.Update(*layout, type_, 0, wave_count, references.get(), pool);
  }
  if (distribution_ != nullptr) scratch.MergeInto(distribution_.get());
}

}  // namespace quantd::core
#endif  // HWY_ONCE
