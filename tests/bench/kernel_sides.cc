// The sides of the kernel benchmarks that live in one process: quantd's
// kernels, the limit loops, XNNPACK and oneDNN. Measures what it is asked to,
// so that its caller can interleave these and other processes within
// milliseconds.
//
//   request   {"side": "quantd", "operation": "quantize", "type": "float32",
//              "format": "int8", "block_size": [], "data": "normal",
//              "scale": 0.0247, "zero_point": 3, "mantissa_bits": 0,
//              "bytes": 65536, "seconds": 0.05}
//   answer    {"gb_per_s": 35.1}, or {} when the side does not have it
//
// A line each. `bytes` are those of as many float32; gb_per_s counts those of
// the type. Zero seconds warm up. Sides: quantd, quantd@<SIMD target>,
// read_and_sum, read_ahead_and_sum, memcpy, four_in_one_out, one_in_four_out,
// xnnpack, onednn.
//
//   kernel_sides --threads 2

#include "tests/bench/kernel_sides.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/calibrate/block_quantizer.h"
#include "core/calibrate/encoding_spec.h"
#include "core/cpu.h"
#include "core/dequantize/dequantize.h"
#include "core/evaluate/evaluate.h"
#include "core/formats/number_format.h"
#include "core/quantize/quantize.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/float_convert.h"
#include "tests/bench/limit_loops.h"

namespace quantd::bench {

const uint8_t* Buffers::Reals(core::ElementType type, const std::string& data,
                              int64_t count) {
  std::vector<uint8_t>& reals = reals_[{type, data}];
  const int64_t element_bytes = core::ElementSizeBytes(type);
  if (static_cast<int64_t>(reals.size()) != count * element_bytes) {
    // A period beyond the caches' wits, drawn once.
    const int64_t period = std::min<int64_t>(count, 1 << 20);
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 1);
    reals.resize(count * element_bytes);
    for (int64_t i = 0; i < period; ++i) {
      const float x = normal(random);
      core::StoreElement<float>(type,
                                data == "equal"  ? 0.3f
                                : data == "relu" ? std::max(x, 0.0f)
                                                 : x,
                                reals.data(), i);
    }
    for (int64_t i = period; i < count; i += period) {
      std::memcpy(reals.data() + i * element_bytes, reals.data(),
                  std::min(period, count - i) * element_bytes);
    }
  }
  return reals.data();
}

uint8_t* Buffers::Output(int64_t size, int which) {
  std::vector<uint8_t>& buffer = outputs_[which];
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  return buffer.data();
}

core::Encoding EncodingOf(const Cell& cell) {
  const std::vector<int64_t> shape = {cell.count / kColumns, kColumns};
  core::Encoding encoding;
  const core::FormatInfo& format = *core::FindFormatByName(cell.format);
  encoding.format = format.format;
  encoding.block_size = cell.block_size;
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  const auto scale_count = static_cast<size_t>(
      core::BlockLayout::Create(shape, cell.block_size)->scale_count());
  for (size_t i = 0; i < scale_count; ++i) {
    encoding.scale.push_back(cell.scale *
                             (1 + 0.01f * static_cast<float>(i % 7)));
  }
  if (cell.zero_point != 0) {
    encoding.zero_point.assign(scale_count, cell.zero_point);
  }
  return encoding;
}

namespace {

using core::BlockLayout;
using core::Encoding;
using core::TensorStatistics;
using core::ThreadPool;

// What quantd's bodies keep between calls.
struct Work {
  Cell cell;
  BlockLayout layout;
  Encoding encoding;
  core::EncodingSpec spec;
  const uint8_t* reals;
  uint8_t* codes;
  uint8_t* restored;
  ThreadPool* pool;

  void Quantize(const Encoding& with) const {
    core::QuantizeCounts counts;
    core::Quantize(with, layout, cell.type, core::NanPolicy::kDefault, 0,
                   cell.count, reals, codes, &counts, pool)
        .IgnoreError();
  }
  TensorStatistics Statistics(int mantissa_bits) const {
    TensorStatistics statistics(layout.scale_count(), mantissa_bits);
    statistics.Update(layout, cell.type, 0, cell.count, reals, pool);
    return statistics;
  }
};

Body QuantdBody(const Cell& cell, ThreadPool* pool, Buffers* buffers) {
  const std::vector<int64_t> shape = {cell.count / kColumns, kColumns};
  auto work = std::make_shared<Work>(
      Work{cell,
           *BlockLayout::Create(shape, cell.block_size),
           {},
           {},
           buffers->Reals(cell.type, cell.data, cell.count),
           buffers->Output(cell.count * 4),
           buffers->Output(cell.count * 4, 1),
           pool});
  if (cell.operation == "min_max") return [work] { work->Statistics(0); };
  if (cell.operation == "statistics") {
    return [work] { work->Statistics(work->cell.mantissa_bits); };
  }
  if (cell.operation == "quantize_spec") {
    core::EncodingSpec spec;
    spec.format = core::FindFormatByName(cell.format)->format;
    spec.block_size = cell.block_size;
    work->spec = *core::ResolveSpec(spec, shape);
    return [work] {
      const auto quantizer = *core::BlockQuantizer::Create(
          work->spec, work->layout, work->cell.type, core::NanPolicy::kDefault,
          {});
      quantizer->Add(0, work->cell.count, work->reals, work->codes, work->pool)
          .IgnoreError();
    };
  }
  work->encoding = EncodingOf(cell);
  if (cell.operation == "quantize") {
    return [work] { work->Quantize(work->encoding); };
  }
  if (cell.operation == "dequantize") {
    return [work] {
      core::Dequantize(work->encoding, work->layout, work->cell.type, 0,
                       work->cell.count, work->codes, work->restored,
                       work->pool);
    };
  }
  if (cell.operation == "evaluate") {
    return [work] {
      core::Evaluator evaluator(work->encoding, work->layout, work->cell.type,
                                {});
      evaluator.Update(0, work->cell.count, work->reals, work->pool);
    };
  }
  return nullptr;
}

// `loop(begin, size)` over the whole, or a half for each thread.
template <typename Loop>
Body OnThreads(int64_t size_bytes, int threads, ThreadPool* pool, Loop loop) {
  return [size_bytes, threads, pool, loop] {
    const int64_t part_bytes = size_bytes / threads;
    core::ParallelFor(pool, threads,
                      [&](int64_t i) { loop(i * part_bytes, part_bytes); });
  };
}

Body LimitBody(const std::string& side, const Cell& cell, ThreadPool* pool,
               Buffers* buffers) {
  const uint8_t* reals = buffers->Reals(cell.type, cell.data, cell.count);
  const int64_t size_bytes = cell.count * core::ElementSizeBytes(cell.type);
  uint8_t* codes = buffers->Output(size_bytes);
  uint8_t* restored = buffers->Output(size_bytes, 1);
  if (side == "read_and_sum") {
    return OnThreads(size_bytes, cell.threads, pool,
                     [reals](int64_t begin, int64_t size) {
                       static std::atomic<uint64_t> sink;
                       sink = ReadAndSum(reals + begin, size);
                     });
  }
  if (side == "read_ahead_and_sum") {
    return OnThreads(size_bytes, cell.threads, pool,
                     [reals](int64_t begin, int64_t size) {
                       static std::atomic<uint64_t> sink;
                       sink = ReadAheadAndSum(reals + begin, size);
                     });
  }
  if (side == "memcpy") {
    return OnThreads(size_bytes, cell.threads, pool,
                     [reals, restored](int64_t begin, int64_t size) {
                       std::memcpy(restored + begin, reals + begin,
                                   static_cast<size_t>(size));
                     });
  }
  if (side == "four_in_one_out") {
    return OnThreads(size_bytes, cell.threads, pool,
                     [reals, codes](int64_t begin, int64_t size) {
                       FourInOneOut(reals + begin, size, codes + begin / 4);
                     });
  }
  if (side == "one_in_four_out") {
    return OnThreads(size_bytes, cell.threads, pool,
                     [codes, restored](int64_t begin, int64_t size) {
                       OneInFourOut(codes + begin / 4, size, restored + begin);
                     });
  }
  return nullptr;
}

Body PeerBody(const std::string& side, const Cell& cell, Buffers* buffers) {
#ifdef QUANTD_BENCH_XNNPACK
  if (side == "xnnpack") return XnnpackBody(cell, buffers);
#endif
#ifdef QUANTD_BENCH_ONEDNN
  if (side == "onednn") return OnednnBody(cell, buffers);
#endif
  return nullptr;
}

// Not thread-safe.
class Sides {
 public:
  explicit Sides(int threads)
      : threads_(threads),
        // The calling thread works too.
        pool_(threads > 1 ? std::make_unique<ThreadPool>(threads - 1)
                          : nullptr) {}

  nlohmann::json Answer(const nlohmann::json& request) {
    StartCell(request);
    const std::string side = request["side"];
    auto known = bodies_.find(side);
    if (known == bodies_.end()) {
      known = bodies_.emplace(side, MakeBody(side)).first;
    }
    const Body& body = known->second;
    if (body == nullptr) return nlohmann::json::object();
    const std::string target =
        side.rfind("quantd@", 0) == 0 ? side.substr(7) : "auto";
    if (!core::SetSimdTarget(target).ok()) return nlohmann::json::object();
    const double gigabytes =
        static_cast<double>(cell_.count) *
        static_cast<double>(core::ElementSizeBytes(cell_.type)) * 1e-9;
    return {{"gb_per_s", gigabytes / SecondsPerCall(body, request["seconds"])}};
  }

 private:
  void StartCell(nlohmann::json request) {
    nlohmann::json key = request;
    key.erase("side");
    key.erase("seconds");
    if (key == key_) return;
    key_ = std::move(key);
    bodies_.clear();
    cell_ = Cell();
    cell_.operation = request["operation"];
    for (const core::ElementType type :
         {core::ElementType::kFloat32, core::ElementType::kFloat16,
          core::ElementType::kBfloat16}) {
      if (request["type"] == std::string(core::ElementTypeName(type))) {
        cell_.type = type;
      }
    }
    cell_.format = request["format"];
    cell_.block_size = request["block_size"].get<std::vector<int64_t>>();
    cell_.data = request["data"];
    cell_.mantissa_bits = request["mantissa_bits"];
    cell_.scale = request["scale"];
    cell_.zero_point = request["zero_point"];
    cell_.count = request["bytes"].get<int64_t>() / 4;
    cell_.threads = threads_;
    // Now, so that no side's memory moves when another wants more.
    uint8_t* codes = buffers_.Output(cell_.count * 4);
    buffers_.Output(cell_.count * 4, 1);
    if (cell_.operation == "dequantize") {
      const BlockLayout layout = *BlockLayout::Create(
          {cell_.count / kColumns, kColumns}, cell_.block_size);
      core::QuantizeCounts counts;
      core::Quantize(EncodingOf(cell_), layout, cell_.type,
                     core::NanPolicy::kDefault, 0, cell_.count,
                     buffers_.Reals(cell_.type, cell_.data, cell_.count), codes,
                     &counts, nullptr)
          .IgnoreError();
    }
  }

  Body MakeBody(const std::string& side) {
    if (side.rfind("quantd", 0) == 0) {
      return QuantdBody(cell_, pool_.get(), &buffers_);
    }
    Body body = LimitBody(side, cell_, pool_.get(), &buffers_);
    return body != nullptr ? body : PeerBody(side, cell_, &buffers_);
  }

  static double SecondsPerCall(const Body& body, double seconds) {
    using Clock = std::chrono::steady_clock;
    const auto since = [](Clock::time_point begin) {
      return std::chrono::duration<double>(Clock::now() - begin).count();
    };
    // The side before it left its own data in the caches.
    body();
    const Clock::time_point begin = Clock::now();
    int64_t calls = 0;
    double elapsed = 0;
    do {
      body();
      ++calls;
      elapsed = since(begin);
    } while (elapsed < seconds);
    return elapsed / static_cast<double>(calls);
  }

  const int threads_;
  const std::unique_ptr<ThreadPool> pool_;
  Buffers buffers_;
  nlohmann::json key_;
  Cell cell_;
  std::map<std::string, Body> bodies_;
};

int Run(int threads) {
  Sides sides(threads);
  std::string line;
  while (std::getline(std::cin, line)) {
    const nlohmann::json request =
        nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (request.is_discarded()) {
      std::cerr << "not JSON: " << line << "\n";
      return 1;
    }
    std::cout << sides.Answer(request) << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace quantd::bench

int main(int argc, char** argv) {
  const bool with_threads = argc == 3 && std::string(argv[1]) == "--threads";
  const int threads = with_threads ? std::atoi(argv[2]) : 1;
  if ((argc != 1 && !with_threads) || threads < 1) {
    std::cerr << "usage: kernel_sides [--threads N]\n";
    return 1;
  }
  return quantd::bench::Run(threads);
}
