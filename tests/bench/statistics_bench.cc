// Statistics by mantissa bits, data, granularity and element type, and
// quantizing with the scales found in the same pass, next to a read-and-sum row
// of the same size.
//
// `in` counts the bytes of reals. Rows are named
// statistics/m<mantissa bits>_<data>_<granularity>[_<type>]/<bytes>/<threads>
// (m0: without histograms), quantize_spec/<format>_<granularity>/... and, in
// two steps through memory, quantize_spec_in_two/...; <bytes> is that of
// float32: a row of another type has as many elements. Statistics begin empty
// and take the tensor in chunks, as a server does.
//
//   statistics_bench --benchmark_filter=/4194304/1
//   statistics_bench --large                       also 256 MiB
//   QUANTD_SIMD=avx2 statistics_bench              on another target

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "benchmark/benchmark.h"
#include "core/calibrate/block_quantizer.h"
#include "core/calibrate/calibrate.h"
#include "core/formats/number_format.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/quantize.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/float_convert.h"
#include "tests/bench/bench_main.h"
#include "tests/bench/limit_loops.h"

namespace quantd::core {
namespace {

constexpr int64_t kColumns = 4096;
// What a server's chunk has.
constexpr int64_t kChunkElements = 256 << 10;

using Random = std::mt19937;

float Normal(Random& random) {
  return std::normal_distribution<float>()(random);
}

// Element `i` of some data.
struct Data {
  const char* name;
  float (*element)(int64_t i, Random& random);
};

// What histograms find easy and hard: bins that wait for each other, many bins,
// bins that follow one another.
constexpr Data kData[] = {
    {"normal", [](int64_t, Random& random) { return Normal(random); }},
    {"equal", [](int64_t, Random&) { return 0.3f; }},
    {"relu",
     [](int64_t, Random& random) { return std::max(0.0f, Normal(random)); }},
    {"alternating", [](int64_t i, Random&) { return i % 2 ? 0.3f : 7.5f; }},
    {"few",
     [](int64_t, Random& random) {
       return 0.3f * static_cast<float>(random() % 4);
     }},
    {"spiky",
     [](int64_t, Random& random) {
       return random() % 64 ? 0.5f : 1e6f * Normal(random);
     }},
    {"sorted",
     [](int64_t i, Random&) {
       return static_cast<float>(i) / (1 << 17) - 4.0f;
     }},
    {"denormal",
     [](int64_t, Random& random) {
       return BitsAs<float>(static_cast<uint32_t>(random() & 0x807FFFFF));
     }},
    {"zeros",
     [](int64_t, Random& random) { return random() % 2 ? 0.0f : -0.0f; }},
    {"bits",
     [](int64_t, Random& random) {
       return BitsAs<float>(static_cast<uint32_t>(random()));
     }},
};

struct Granularity {
  const char* name;
  std::vector<int64_t> block_size;
};

const std::vector<Granularity>& Granularities() {
  static const auto& all = *new std::vector<Granularity>{
      {"tensor", {}},        {"axis0", {1, 0}},    {"last_axis", {0, 1}},
      {"group16", {1, 16}},  {"group32", {1, 32}}, {"group64", {1, 64}},
      {"group128", {1, 128}}};
  return all;
}

const Granularity& Find(absl::string_view name) {
  return *std::find_if(Granularities().begin(), Granularities().end(),
                       [&](const Granularity& g) { return g.name == name; });
}

// Kept for all rows of the same data.
const std::vector<uint8_t>& Reals(const Data& data, ElementType type,
                                  int64_t count) {
  static auto& kept = *new std::tuple<const Data*, ElementType, int64_t>();
  static auto& reals = *new std::vector<uint8_t>();
  const auto wanted = std::make_tuple(&data, type, count);
  if (kept == wanted) return reals;
  kept = wanted;
  Random random(1);
  std::vector<float> period(
      static_cast<size_t>(std::min<int64_t>(count, 1 << 20)));
  for (size_t i = 0; i < period.size(); ++i) {
    period[i] = data.element(static_cast<int64_t>(i), random);
  }
  reals.resize(static_cast<size_t>(count * ElementSizeBytes(type)));
  for (int64_t i = 0; i < count; ++i) {
    const float x = period[static_cast<size_t>(i) % period.size()];
    if (type == ElementType::kFloat64) {
      StoreElement<double>(type, x, reals.data(), i);
    } else {
      StoreElement<float>(type, x, reals.data(), i);
    }
  }
  return reals;
}

void Report(benchmark::State& state, size_t bytes) {
  const int64_t all = state.iterations() * static_cast<int64_t>(bytes);
  state.SetBytesProcessed(all);
  state.counters["in"] =
      benchmark::Counter(static_cast<double>(all), benchmark::Counter::kIsRate);
}

std::unique_ptr<ThreadPool> Pool(const benchmark::State& state) {
  // The calling thread works too.
  const int threads = static_cast<int>(state.range(1));
  return threads > 1 ? std::make_unique<ThreadPool>(threads - 1) : nullptr;
}

std::vector<int64_t> Shape(int64_t count) {
  return {count / kColumns, kColumns};
}

struct StatisticsRow {
  int mantissa_bits;
  const Data& data;
  const Granularity& granularity;
  ElementType type = ElementType::kFloat32;
};

void BenchStatistics(benchmark::State& state, const StatisticsRow& row) {
  const int64_t count = state.range(0) / 4;
  const BlockLayout layout =
      *BlockLayout::Create(Shape(count), row.granularity.block_size);
  const std::vector<uint8_t>& reals = Reals(row.data, row.type, count);
  const std::unique_ptr<ThreadPool> pool = Pool(state);
  int64_t state_bytes = 0;
  for (auto _ : state) {
    TensorStatistics statistics(layout.scale_count(), row.mantissa_bits);
    for (int64_t first = 0; first < count; first += kChunkElements) {
      statistics.Update(
          layout, row.type, first, std::min(kChunkElements, count - first),
          reals.data() + first * ElementSizeBytes(row.type), pool.get());
    }
    benchmark::DoNotOptimize(statistics.extremes().data());
    state_bytes = statistics.memory_bytes();
  }
  Report(state, reals.size());
  state.counters["state_bytes"] = static_cast<double>(state_bytes);
}

struct SpecRow {
  const char* format;
  const Granularity& granularity;
  bool in_two;
};

void BenchQuantizeSpec(benchmark::State& state, const SpecRow& row) {
  constexpr ElementType kType = ElementType::kFloat32;
  const int64_t count = state.range(0) / 4;
  EncodingSpec spec;
  spec.format = FindFormatByName(row.format)->format;
  spec.block_size = row.granularity.block_size;
  spec = *ResolveSpec(spec, Shape(count));
  const BlockLayout layout =
      *BlockLayout::Create(Shape(count), spec.block_size);
  const std::vector<uint8_t>& reals = Reals(kData[0], kType, count);
  static auto& codes = *new std::vector<uint8_t>();
  codes.resize(std::max(codes.size(), static_cast<size_t>(count)));
  const std::unique_ptr<ThreadPool> pool = Pool(state);
  for (auto _ : state) {
    if (row.in_two) {
      TensorStatistics statistics(layout.scale_count());
      statistics.Update(layout, kType, 0, count, reals.data(), pool.get());
      const auto calibration =
          Calibrate(spec, layout, statistics, {}, pool.get());
      QuantizeCounts counts;
      benchmark::DoNotOptimize(
          Quantize(calibration->encoding, layout, kType, NanPolicy::kDefault, 0,
                   count, reals.data(), codes.data(), &counts, pool.get()));
    } else {
      const auto quantizer =
          *BlockQuantizer::Create(spec, layout, kType, NanPolicy::kDefault, {});
      benchmark::DoNotOptimize(
          quantizer->Add(0, count, reals.data(), codes.data(), pool.get()));
    }
  }
  Report(state, reals.size());
}

void BenchReadAndSum(benchmark::State& state) {
  const int64_t count = state.range(0) / 4;
  const std::vector<uint8_t>& in =
      Reals(kData[0], ElementType::kFloat32, count);
  const int64_t threads = state.range(1);
  const std::unique_ptr<ThreadPool> pool = Pool(state);
  const int64_t part_bytes = state.range(0) / threads;
  for (auto _ : state) {
    ParallelFor(pool.get(), threads, [&](int64_t i) {
      benchmark::DoNotOptimize(
          bench::ReadAndSum(in.data() + i * part_bytes, part_bytes));
    });
  }
  Report(state, in.size());
}

using Body = std::function<void(benchmark::State&)>;

std::vector<std::pair<std::string, Body>> AllRows() {
  std::vector<std::pair<std::string, Body>> rows;
  rows.emplace_back("read_and_sum", BenchReadAndSum);
  const auto add = [&](int mantissa_bits, const Data& data,
                       const char* granularity,
                       ElementType type = ElementType::kFloat32) {
    const StatisticsRow row{mantissa_bits, data, Find(granularity), type};
    std::string name = absl::StrCat("statistics/m", mantissa_bits, "_",
                                    data.name, "_", granularity);
    if (type != ElementType::kFloat32) {
      absl::StrAppend(&name, "_", ElementTypeName(type));
    }
    rows.emplace_back(
        name, [row](benchmark::State& state) { BenchStatistics(state, row); });
  };
  const auto add_spec = [&](const char* format, const char* granularity) {
    for (const bool in_two : {false, true}) {
      const SpecRow row{format, Find(granularity), in_two};
      rows.emplace_back(
          absl::StrCat(in_two ? "quantize_spec_in_two/" : "quantize_spec/",
                       format, "_", granularity),
          [row](benchmark::State& state) { BenchQuantizeSpec(state, row); });
    }
  };
  for (const Granularity& granularity : Granularities()) {
    add(0, kData[0], granularity.name);
  }
  for (const int mantissa_bits : {0, 2, 7}) {
    for (const Data& data : kData) {
      if (mantissa_bits != 0 || &data != kData) {
        add(mantissa_bits, data, "tensor");
      }
    }
  }
  for (const ElementType type :
       {ElementType::kFloat16, ElementType::kBfloat16, ElementType::kFloat64}) {
    for (const Data* data : {&kData[0], &kData[3], &kData[5]}) {
      add(7, *data, "tensor", type);
    }
    add(0, kData[0], "tensor", type);
  }
  add(5, kData[0], "axis0");
  for (const char* granularity : {"last_axis", "group32", "group128"}) {
    add(3, kData[0], granularity);
  }
  for (const char* granularity : {"group32", "group128"}) {
    add_spec("int4", granularity);
  }
  add_spec("uint4", "group32");
  add_spec("int8", "group32");
  for (const char* format : {"mxfp4_e2m1", "mxfp8_e4m3", "mxint8"}) {
    add_spec(format, "group32");
  }
  add_spec("nf4", "group64");
  return rows;
}

void RegisterAll(bool is_large) {
  std::vector<int64_t> sizes = {64 << 10, 4 << 20};
  if (is_large) sizes.push_back(256 << 20);
  // By size and data, so that data are made once.
  for (const int64_t size : sizes) {
    for (const auto& [name, body] : AllRows()) {
      for (const int64_t threads : {1, 2}) {
        benchmark::RegisterBenchmark(name.c_str(), body)
            ->Args({size, threads})
            ->UseRealTime();
      }
    }
  }
}

}  // namespace
}  // namespace quantd::core

int main(int argc, char** argv) {
  return quantd::bench::RunBenchmarks(argc, argv, quantd::core::RegisterAll);
}
