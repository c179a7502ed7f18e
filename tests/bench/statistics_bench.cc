// Statistics with histograms, by mantissa bits, data and granularity, next to a
// read-and-sum row of the same size and statistics without histograms (m0).
//
// `in` counts the bytes of float32. Rows are named
// statistics/<m>_<data>_<granularity>/<bytes>/<threads>.
//
//   statistics_bench --benchmark_enable_random_interleaving=true
//   QUANTD_SIMD=avx2 statistics_bench              on another target

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "core/cpu.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

constexpr int64_t kColumns = 4096;
constexpr int64_t kElements = 1 << 20;
// What a server's chunk has.
constexpr int64_t kChunkElements = 256 << 10;

enum class Data { kNormal, kAllEqual, kRelu };

struct Row {
  std::string name;
  int mantissa_bits;
  Data data;
  std::vector<int64_t> block_size;
};

const std::vector<uint8_t>& Reals(Data data) {
  static auto& tensors = *new std::array<std::vector<uint8_t>, 3>();
  std::vector<uint8_t>& reals = tensors[static_cast<int>(data)];
  if (reals.empty()) {
    reals.resize(kElements * sizeof(float));
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 1);
    for (int64_t i = 0; i < kElements; ++i) {
      const float x = normal(random);
      StoreUnaligned(data == Data::kNormal ? x
                     : data == Data::kRelu ? std::max(x, 0.0f)
                                           : 0.3f,
                     reals.data() + i * sizeof(float));
    }
  }
  return reals;
}

void Report(benchmark::State& state) {
  const int64_t bytes = kElements * static_cast<int64_t>(sizeof(float));
  state.SetBytesProcessed(state.iterations() * bytes);
  state.counters["in"] =
      benchmark::Counter(static_cast<double>(state.iterations() * bytes),
                         benchmark::Counter::kIsRate);
}

void BenchStatistics(benchmark::State& state, const Row& row) {
  const BlockLayout layout =
      *BlockLayout::Create({kElements / kColumns, kColumns}, row.block_size);
  const std::vector<uint8_t>& reals = Reals(row.data);
  const int threads = static_cast<int>(state.range(1));
  const std::unique_ptr<ThreadPool> pool =
      threads > 1 ? std::make_unique<ThreadPool>(threads - 1) : nullptr;
  TensorStatistics statistics(layout.scale_count(), row.mantissa_bits);
  for (auto _ : state) {
    for (int64_t first = 0; first < kElements; first += kChunkElements) {
      statistics.Update(layout, ElementType::kFloat32, first, kChunkElements,
                        reals.data() + first * sizeof(float), pool.get());
    }
    benchmark::DoNotOptimize(statistics.extremes().data());
  }
  Report(state);
  state.counters["state_bytes"] =
      static_cast<double>(statistics.memory_bytes());
}

void BenchReadAndSum(benchmark::State& state) {
  const std::vector<uint8_t>& in = Reals(Data::kNormal);
  for (auto _ : state) {
    // Integers: the compiler may order and vectorise their sum as it likes.
    uint64_t sum = 0;
    for (size_t i = 0; i < in.size(); i += 8) {
      sum += LoadUnaligned<uint64_t>(in.data() + i);
    }
    benchmark::DoNotOptimize(sum);
  }
  Report(state);
}

void RegisterAll() {
  static const char* const kDataNames[] = {"normal", "equal", "relu"};
  const std::vector<int64_t> per_tensor, axis0 = {1, 0}, last_axis = {0, 1},
                                         group32 = {1, 32};
  std::vector<Row>& rows = *new std::vector<Row>();
  const auto add = [&rows](int mantissa_bits, Data data, const char* name,
                           const std::vector<int64_t>& block_size) {
    rows.push_back({absl::StrCat("statistics/m", mantissa_bits, "_",
                                 kDataNames[static_cast<int>(data)], "_", name),
                    mantissa_bits, data, block_size});
  };
  add(0, Data::kNormal, "tensor", per_tensor);
  for (const int mantissa_bits : {7, 5, 3}) {
    for (const Data data : {Data::kNormal, Data::kAllEqual, Data::kRelu}) {
      add(mantissa_bits, data, "tensor", per_tensor);
      add(mantissa_bits, data, "axis0", axis0);
    }
  }
  add(3, Data::kNormal, "last_axis", last_axis);
  add(3, Data::kNormal, "group32", group32);
  const int64_t bytes = kElements * static_cast<int64_t>(sizeof(float));
  benchmark::RegisterBenchmark("read_and_sum", BenchReadAndSum)
      ->Args({bytes, 1});
  for (const Row& row : rows) {
    for (const int64_t threads : {1, 2}) {
      benchmark::internal::Benchmark* bench = benchmark::RegisterBenchmark(
          row.name.c_str(),
          [&row](benchmark::State& state) { BenchStatistics(state, row); });
      bench->Args({bytes, threads});
      // Otherwise CPU time, which a busy machine disturbs less.
      if (threads > 1) bench->UseRealTime();
    }
  }
}

}  // namespace
}  // namespace quantd::core

int main(int argc, char** argv) {
  if (const char* target = std::getenv("QUANTD_SIMD"); target != nullptr) {
    const absl::Status status = quantd::core::SetSimdTarget(target);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
      return 1;
    }
  }
  benchmark::AddCustomContext("simd_target", quantd::core::SimdTarget());
  quantd::core::RegisterAll();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
