// The evaluators, a row per element type, format and granularity, next to a
// read-and-sum row of the same size.
//
// `in` counts the bytes of elements (for `compare` those of one of the two
// tensors), which is what rows are compared by. Rows are named operation/
// variant/<bytes of float32>/<threads>: a row of another type has as many
// elements. The data are N(0, 1), the scale of integers that of the largest
// element unless a row clips.
//
//   evaluate_bench --benchmark_filter=/65536/ --benchmark_repetitions=9
//   evaluate_bench --large                      also 256 MiB
//   QUANTD_SIMD=avx2 evaluate_bench             on another target

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "core/calibrate/calibrate.h"
#include "core/evaluate/comparison.h"
#include "core/evaluate/evaluate.h"
#include "core/formats/number_format.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"
#include "core/types/float_convert.h"
#include "tests/bench/bench_main.h"

namespace quantd::core {
namespace {

constexpr int64_t kColumns = 4096;

enum class Operation { kEvaluate, kEach, kDistribution, kClipped, kCompare };

struct Row {
  const char* name;
  Operation operation;
  const char* format;
  ElementType type;
  std::vector<int64_t> block_size;
};

// N(0, 1) of a type, kept for all rows of the same size.
const std::vector<uint8_t>& Reals(ElementType type, int64_t count) {
  static std::pair<ElementType, int64_t> kept = {ElementType::kFloat32, -1};
  static auto& reals = *new std::vector<uint8_t>();
  if (kept != std::make_pair(type, count)) {
    kept = {type, count};
    reals.resize(count * ElementSizeBytes(type));
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 1);
    // A period beyond the caches' wits, drawn once.
    std::vector<float> period(1 << 20);
    for (float& x : period) x = normal(random);
    for (int64_t i = 0; i < count; ++i) {
      const float x = period[i % period.size()];
      if (type == ElementType::kFloat64) {
        StoreElement<double>(type, x, reals.data(), i);
      } else {
        StoreElement<float>(type, x, reals.data(), i);
      }
    }
  }
  return reals;
}

void Report(benchmark::State& state, int64_t bytes) {
  state.counters["in"] =
      benchmark::Counter(static_cast<double>(state.iterations() * bytes),
                         benchmark::Counter::kIsRate);
}

std::unique_ptr<ThreadPool> Pool(const benchmark::State& state) {
  // The calling thread works too.
  const int threads = static_cast<int>(state.range(1));
  return threads > 1 ? std::make_unique<ThreadPool>(threads - 1) : nullptr;
}

Encoding Calibrated(const Row& row, const std::vector<int64_t>& shape,
                    const BlockLayout& layout,
                    const std::vector<uint8_t>& reals) {
  TensorStatistics statistics(layout.scale_count());
  statistics.Update(layout, row.type, 0, layout.element_count(), reals.data(),
                    nullptr);
  EncodingSpec spec;
  spec.format = FindFormatByName(row.format)->format;
  spec.block_size = row.block_size;
  const FormatInfo& format = *FindFormat(spec.format);
  if (format.kind == CodeKind::kInteger &&
      format.scale_type == ScaleType::kDefault) {
    spec.symmetry = Symmetry::kAsymmetric;
  }
  spec = *ResolveSpec(spec, shape);
  Encoding encoding =
      Calibrate(spec, layout, statistics, {}, nullptr)->encoding;
  // 0.3% of N(0, 1) are beyond 3, and some 5 are the largest.
  if (row.operation == Operation::kClipped) {
    for (float& scale : encoding.scale) scale *= 0.6f;
  }
  return encoding;
}

void RunRow(benchmark::State& state, const Row& row) {
  const int64_t count = state.range(0) / 4;
  const std::vector<int64_t> shape = {count / kColumns, kColumns};
  const std::vector<uint8_t>& reals = Reals(row.type, count);
  const int64_t bytes = static_cast<int64_t>(reals.size());
  const std::unique_ptr<ThreadPool> pool = Pool(state);
  if (row.operation == Operation::kCompare) {
    for (auto _ : state) {
      Comparison comparison(row.type, false);
      comparison.Update(0, count / 2, reals.data(), pool.get());
      benchmark::DoNotOptimize(comparison.overall());
    }
    Report(state, bytes / 2);
    return;
  }
  const BlockLayout layout = *BlockLayout::Create(shape, row.block_size);
  const Encoding encoding = Calibrated(row, shape, layout, reals);
  EvaluateOptions options;
  options.per_scale_index = row.operation == Operation::kEach;
  options.with_distribution = row.operation == Operation::kDistribution;
  for (auto _ : state) {
    Evaluator evaluator(encoding, layout, row.type, options);
    evaluator.Update(0, count, reals.data(), pool.get());
    benchmark::DoNotOptimize(evaluator.overall());
  }
  Report(state, bytes);
}

void BenchReadAndSum(benchmark::State& state) {
  const std::vector<uint8_t>& in =
      Reals(ElementType::kFloat32, state.range(0) / 4);
  const int64_t words = state.range(0) / 8;
  for (auto _ : state) {
    // Integers: the compiler may order and vectorise their sum as it likes.
    uint64_t sum = 0;
    for (int64_t i = 0; i < words; ++i) {
      sum += LoadUnaligned<uint64_t>(in.data() + i * 8);
    }
    benchmark::DoNotOptimize(sum);
  }
  Report(state, state.range(0));
}

void RegisterAll(bool large) {
  constexpr ElementType kF32 = ElementType::kFloat32;
  constexpr ElementType kF16 = ElementType::kFloat16;
  constexpr ElementType kBf16 = ElementType::kBfloat16;
  constexpr ElementType kF64 = ElementType::kFloat64;
  static const auto& rows = *new std::vector<Row>{
      {"evaluate/float32_int8_tensor", Operation::kEvaluate, "int8", kF32, {}},
      {"evaluate/float32_int4_tensor", Operation::kEvaluate, "int4", kF32, {}},
      {"evaluate/float32_int16_tensor",
       Operation::kEvaluate,
       "int16",
       kF32,
       {}},
      {"evaluate/bfloat16_int8_tensor",
       Operation::kEvaluate,
       "int8",
       kBf16,
       {}},
      {"evaluate/float16_int8_tensor", Operation::kEvaluate, "int8", kF16, {}},
      {"evaluate/float64_int8_tensor", Operation::kEvaluate, "int8", kF64, {}},
      {"evaluate/float32_int8_axis0",
       Operation::kEvaluate,
       "int8",
       kF32,
       {1, 0}},
      {"evaluate/float32_int8_last_axis",
       Operation::kEvaluate,
       "int8",
       kF32,
       {0, 1}},
      {"evaluate/float32_int4_group32",
       Operation::kEvaluate,
       "int4",
       kF32,
       {1, 32}},
      {"evaluate/float32_float8_e4m3fn_tensor",
       Operation::kEvaluate,
       "float8_e4m3fn",
       kF32,
       {}},
      {"evaluate/float32_mxfp4_e2m1_group32",
       Operation::kEvaluate,
       "mxfp4_e2m1",
       kF32,
       {1, 32}},
      {"evaluate/float32_nf4_group64",
       Operation::kEvaluate,
       "nf4",
       kF32,
       {1, 64}},
      {"evaluate_clipped/float32_int8_tensor",
       Operation::kClipped,
       "int8",
       kF32,
       {}},
      {"evaluate_each/float32_int8_axis0",
       Operation::kEach,
       "int8",
       kF32,
       {1, 0}},
      {"evaluate_each/float32_int4_group32",
       Operation::kEach,
       "int4",
       kF32,
       {1, 32}},
      {"evaluate_each/float32_int8_last_axis",
       Operation::kEach,
       "int8",
       kF32,
       {0, 1}},
      {"evaluate_distribution/float32_int8_tensor",
       Operation::kDistribution,
       "int8",
       kF32,
       {}},
      {"compare/float32", Operation::kCompare, "", kF32, {}},
      {"compare/bfloat16", Operation::kCompare, "", kBf16, {}},
  };
  std::vector<int64_t> sizes = {64 << 10, 4 << 20};
  if (large) sizes.push_back(256 << 20);
  for (const int64_t size : sizes) {
    benchmark::RegisterBenchmark("read_and_sum", BenchReadAndSum)
        ->Args({size, 1});
    for (const Row& row : rows) {
      for (const int64_t threads : {1, 2}) {
        benchmark::internal::Benchmark* bench = benchmark::RegisterBenchmark(
            row.name, [&row](benchmark::State& state) { RunRow(state, row); });
        bench->Args({size, threads});
        // Otherwise CPU time, which a busy machine disturbs less.
        if (threads > 1) bench->UseRealTime();
      }
    }
  }
}

}  // namespace
}  // namespace quantd::core

int main(int argc, char** argv) {
  return quantd::bench::RunBenchmarks(argc, argv, quantd::core::RegisterAll);
}
