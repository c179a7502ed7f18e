// The kernels, a row per operation, element type, format and granularity, next
// to memcpy and read-and-sum rows of the same size.
//
// `bytes_per_second` counts bytes read plus written; `in` counts the bytes of
// reals (float32, or the row's type) alone, which is what rows are compared by.
// Rows are named operation/variant/<bytes of float32>/<threads>: a row of
// another type has as many elements. Buffers are reused, as the server does.
//
//   kernels_bench --benchmark_filter=/65536/ --benchmark_repetitions=9
//   kernels_bench --large                       also 256 MiB
//   QUANTD_SIMD=avx2 kernels_bench              on another target

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "core/calibrate/calibrate.h"
#include "core/dequantize/dequantize.h"
#include "core/formats/number_format.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/quantize.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"
#include "core/types/float_convert.h"
#include "tests/bench/bench_main.h"

namespace quantd::core {
namespace {

constexpr int64_t kColumns = 4096;

enum class Blocks {
  kPerTensor,
  kAxis0,
  kLastAxis,
  kGroup16,
  kGroup32,
  kGroup64,
  kGroup128
};

struct Row {
  const char* operation;
  absl::string_view format;
  ElementType type;
  Blocks blocks;
  // With a scale that clips one element in 600 of int8 and fewer of coarser
  // formats, as calibration by percentiles or errors does. Those of MX formats
  // clip anyway.
  bool clips = false;
};

std::string Name(const Row& row) {
  static const char* const kBlocks[] = {"tensor",  "axis0",   "last_axis",
                                        "group16", "group32", "group64",
                                        "group128"};
  return std::string(row.operation) + "/" +
         std::string(ElementTypeName(row.type)) + "_" +
         std::string(row.format) + "_" + kBlocks[static_cast<int>(row.blocks)] +
         (row.clips ? "_clipped" : "");
}

std::vector<int64_t> BlockSize(Blocks blocks) {
  switch (blocks) {
    case Blocks::kPerTensor:
      return {0, 0};
    case Blocks::kAxis0:
      return {1, 0};
    case Blocks::kLastAxis:
      return {0, 1};
    case Blocks::kGroup16:
      return {1, 16};
    case Blocks::kGroup32:
      return {1, 32};
    case Blocks::kGroup64:
      return {1, 64};
    case Blocks::kGroup128:
      return {1, 128};
  }
  return {};
}

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

// An output that is kept, so that no row pays for fresh pages.
uint8_t* Output(int64_t size, int which = 0) {
  static auto& buffers = *new std::array<std::vector<uint8_t>, 2>();
  std::vector<uint8_t>& buffer = buffers[which];
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  return buffer.data();
}

void Report(benchmark::State& state, int64_t real_bytes, int64_t other_bytes) {
  state.SetBytesProcessed(state.iterations() * (real_bytes + other_bytes));
  state.counters["in"] =
      benchmark::Counter(static_cast<double>(state.iterations() * real_bytes),
                         benchmark::Counter::kIsRate);
}

std::unique_ptr<ThreadPool> Pool(const benchmark::State& state) {
  // The calling thread works too.
  const int threads = static_cast<int>(state.range(1));
  return threads > 1 ? std::make_unique<ThreadPool>(threads - 1) : nullptr;
}

void RunRow(benchmark::State& state, const Row& row) {
  const int64_t count = state.range(0) / 4;
  const std::vector<int64_t> shape = {count / kColumns, kColumns};
  const BlockLayout layout = *BlockLayout::Create(shape, BlockSize(row.blocks));
  const std::vector<uint8_t>& reals = Reals(row.type, count);
  const int64_t real_bytes = static_cast<int64_t>(reals.size());
  const std::unique_ptr<ThreadPool> pool = Pool(state);
  const std::string operation = row.operation;

  TensorStatistics statistics(layout.scale_count());
  statistics.Update(layout, row.type, 0, count, reals.data(), nullptr);
  if (operation == "statistics") {
    for (auto _ : state) {
      statistics.Update(layout, row.type, 0, count, reals.data(), pool.get());
      benchmark::DoNotOptimize(statistics.extremes().data());
    }
    Report(state, real_bytes, 0);
    return;
  }

  EncodingSpec spec;
  spec.format = FindFormatByName(row.format)->format;
  spec.block_size = BlockSize(row.blocks);
  const FormatInfo& format = *FindFormat(spec.format);
  if (format.kind == CodeKind::kInteger &&
      format.scale_type == ScaleType::kDefault) {
    spec.symmetry = Symmetry::kAsymmetric;
  }
  if (format.kind == CodeKind::kCodebook && format.codebook.empty()) {
    // Even steps, which are as hard to search as any.
    for (int32_t k = 0; k <= format.qmax; ++k) {
      spec.codebook.push_back(
          2.0f * static_cast<float>(k) / static_cast<float>(format.qmax) - 1);
    }
  }
  spec = *ResolveSpec(spec, shape);
  Encoding encoding =
      Calibrate(spec, layout, statistics, {}, nullptr)->encoding;
  if (row.clips && format.scale_type == ScaleType::kDefault) {
    // N(0, 1) is beyond 3.14 as often as that.
    const double scale = 3.14 / format.max_value;
    encoding.scale.assign(encoding.scale.size(), static_cast<float>(scale));
    encoding.zero_point.clear();
  }
  const int64_t code_bytes = FindFormat(encoding.format)->SizeBytes(count);
  if (operation == "quantize") {
    uint8_t* codes = Output(code_bytes);
    for (auto _ : state) {
      QuantizeCounts counts;
      benchmark::DoNotOptimize(
          Quantize(encoding, layout, row.type, NanPolicy::kDefault, 0, count,
                   reals.data(), codes, &counts, pool.get()));
    }
    Report(state, real_bytes, code_bytes);
  } else {
    uint8_t* codes = Output(code_bytes);
    uint8_t* restored = Output(real_bytes, 1);
    QuantizeCounts counts;
    benchmark::DoNotOptimize(Quantize(encoding, layout, row.type,
                                      NanPolicy::kDefault, 0, count,
                                      reals.data(), codes, &counts, nullptr));
    for (auto _ : state) {
      Dequantize(encoding, layout, row.type, 0, count, codes, restored,
                 pool.get());
      benchmark::DoNotOptimize(restored);
      benchmark::ClobberMemory();
    }
    Report(state, real_bytes, code_bytes);
  }
}

void BenchMemcpy(benchmark::State& state) {
  const std::vector<uint8_t>& in =
      Reals(ElementType::kFloat32, state.range(0) / 4);
  uint8_t* out = Output(state.range(0), 1);
  for (auto _ : state) {
    std::memcpy(out, in.data(), in.size());
    benchmark::DoNotOptimize(out);
    benchmark::ClobberMemory();
  }
  Report(state, state.range(0), state.range(0));
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
  Report(state, state.range(0), 0);
}

// Quantizing and dequantizing of all formats that `rows` do not name.
std::vector<Row> OtherFormats(absl::Span<const Row> rows) {
  std::vector<Row> others;
  for (const FormatInfo& format : AllFormats()) {
    const auto names_it = [&](const Row& row) {
      return row.format == format.name;
    };
    if (std::any_of(rows.begin(), rows.end(), names_it)) continue;
    const Blocks blocks = format.default_group == 16   ? Blocks::kGroup16
                          : format.default_group == 32 ? Blocks::kGroup32
                          : format.default_group == 64 ? Blocks::kGroup64
                                                       : Blocks::kPerTensor;
    for (const char* operation : {"quantize", "dequantize"}) {
      others.push_back({operation, format.name, ElementType::kFloat32, blocks});
    }
  }
  return others;
}

void RegisterRow(const Row& row, int64_t size) {
  for (const int64_t threads : {1, 2}) {
    benchmark::internal::Benchmark* bench = benchmark::RegisterBenchmark(
        Name(row).c_str(),
        [&row](benchmark::State& state) { RunRow(state, row); });
    bench->Args({size, threads});
    // Otherwise CPU time, which a busy machine disturbs less.
    if (threads > 1) bench->UseRealTime();
  }
}

void RegisterAll(bool large) {
  constexpr ElementType kF32 = ElementType::kFloat32;
  constexpr ElementType kF16 = ElementType::kFloat16;
  constexpr ElementType kBf16 = ElementType::kBfloat16;
  constexpr ElementType kF64 = ElementType::kFloat64;
  constexpr Blocks kPerTensor = Blocks::kPerTensor;
  static const Row kRows[] = {
      {"quantize", "int8", kF32, kPerTensor},
      {"quantize", "uint8", kF32, kPerTensor},
      {"quantize", "int8", kF16, kPerTensor},
      {"quantize", "int8", kBf16, kPerTensor},
      {"quantize", "int8", kF64, kPerTensor},
      {"quantize", "int8", kF32, Blocks::kAxis0},
      {"quantize", "int8", kF32, Blocks::kLastAxis},
      {"quantize", "int8", kF32, Blocks::kGroup64},
      {"quantize", "int4", kF32, kPerTensor},
      {"quantize", "int4", kF32, Blocks::kGroup32},
      {"quantize", "int4", kF32, Blocks::kGroup128},
      {"quantize", "int2", kF32, Blocks::kGroup128},
      {"quantize", "int16", kF32, kPerTensor},
      {"quantize", "int8", kF32, kPerTensor, true},
      {"quantize", "int4", kF32, kPerTensor, true},
      {"quantize", "int16", kF32, kPerTensor, true},
      {"quantize", "float8_e4m3fn", kF32, kPerTensor, true},
      {"quantize", "float4_e2m1", kF32, kPerTensor, true},
      {"dequantize", "int8", kF32, kPerTensor},
      {"dequantize", "int8", kF16, kPerTensor},
      {"dequantize", "int8", kBf16, kPerTensor},
      {"dequantize", "int8", kF64, kPerTensor},
      {"dequantize", "int8", kF32, Blocks::kAxis0},
      {"dequantize", "int8", kF32, Blocks::kLastAxis},
      {"dequantize", "int4", kF32, Blocks::kGroup32},
      {"dequantize", "int4", kF32, Blocks::kGroup128},
      {"dequantize", "int16", kF32, kPerTensor},
      {"quantize", "float8_e4m3fn", kF32, kPerTensor},
      {"quantize", "float8_e4m3fn", kBf16, kPerTensor},
      {"quantize", "float8_e4m3fn", kF32, Blocks::kLastAxis},
      {"quantize", "float8_e5m2", kF32, kPerTensor},
      {"quantize", "float4_e2m1", kF32, kPerTensor},
      {"quantize", "mxfp8_e4m3", kF32, Blocks::kGroup32},
      {"quantize", "mxfp4_e2m1", kF32, Blocks::kGroup32},
      {"quantize", "nvfp4", kF32, Blocks::kGroup16},
      {"quantize", "nf4", kF32, Blocks::kGroup64},
      {"quantize", "codebook8", kF32, kPerTensor},
      {"dequantize", "float8_e4m3fn", kF32, kPerTensor},
      {"dequantize", "float8_e4m3fn", kBf16, kPerTensor},
      {"dequantize", "float4_e2m1", kF32, kPerTensor},
      {"dequantize", "mxfp8_e4m3", kF32, Blocks::kGroup32},
      {"dequantize", "mxfp4_e2m1", kF32, Blocks::kGroup32},
      {"dequantize", "nvfp4", kF32, Blocks::kGroup16},
      {"dequantize", "nf4", kF32, Blocks::kGroup64},
      {"dequantize", "codebook8", kF32, kPerTensor},
      {"statistics", "int8", kF32, kPerTensor},
      {"statistics", "int8", kF16, kPerTensor},
      {"statistics", "int8", kBf16, kPerTensor},
      {"statistics", "int8", kF64, kPerTensor},
      {"statistics", "int8", kF32, Blocks::kAxis0},
      {"statistics", "int8", kF32, Blocks::kLastAxis},
      {"statistics", "int8", kF32, Blocks::kGroup32},
  };
  // The formats that have no row above, as their specs have them by default.
  static const std::vector<Row> kOtherRows = OtherFormats(kRows);
  std::vector<int64_t> sizes = {64 << 10, 4 << 20};
  if (large) sizes.push_back(256 << 20);
  for (const int64_t size : sizes) {
    benchmark::RegisterBenchmark("memcpy", BenchMemcpy)->Args({size, 1});
    benchmark::RegisterBenchmark("read_and_sum", BenchReadAndSum)
        ->Args({size, 1});
    for (const Row& row : kRows) RegisterRow(row, size);
    for (const Row& row : kOtherRows) RegisterRow(row, size);
  }
}

}  // namespace
}  // namespace quantd::core

int main(int argc, char** argv) {
  return quantd::bench::RunBenchmarks(argc, argv, quantd::core::RegisterAll);
}
