// The sides of feature_bench.py that are C++: statistics of features of
// [rows, columns] in float32.
//
//   feature_bench ROWS COLUMNS THREADS
//
// Each line on stdin names a side, which runs once; the answer is the seconds
// that it took. The data come in chunks of 1 MiB, as to a server.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/cpu.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/gram_state.h"
#include "core/types/element_type.h"
#include "tests/bench/limit_loops.h"

namespace quantd::core {
namespace {

using Random = std::mt19937;

float Normal(Random& random) {
  return std::normal_distribution<float>()(random);
}

// Activations as layers make them.
struct Data {
  const char* name;
  float (*element)(int64_t column, Random& random);
};

constexpr Data kData[] = {
    {"normal", [](int64_t, Random& random) { return Normal(random); }},
    {"relu",
     [](int64_t, Random& random) { return std::max(0.0f, Normal(random)); }},
    {"outliers",
     [](int64_t column, Random& random) {
       return Normal(random) * (column % 97 == 0 ? 3000.0f : 1.0f);
     }},
    // Exponents all over.
    {"softmax",
     [](int64_t, Random& random) { return std::exp(6 * Normal(random)); }},
};

class Bench {
 public:
  Bench(int64_t rows, int64_t columns, int threads)
      : rows_(rows),
        columns_(columns),
        threads_(threads),
        // The calling thread works too.
        pool_(threads > 1 ? std::make_unique<ThreadPool>(threads - 1)
                          : nullptr) {
    for (const Data& data : kData) {
      sides_[std::string("moments ") + data.name] = [this, &data] {
        Moments(Reals(data));
      };
    }
    sides_["gram"] = [this] { Gram(Reals(kData[0])); };
    sides_["read"] = [this] { Read(Reals(kData[0])); };
    sides_["squares"] = [this] { Squares(Reals(kData[0])); };
  }

  // Seconds of the side, or -1 if there is none of that name.
  double Run(const std::string& side) {
    const auto it = sides_.find(side);
    if (it == sides_.end()) return -1;
    it->second();  // makes the data
    const auto begin = std::chrono::steady_clock::now();
    it->second();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         begin)
        .count();
  }

 private:
  const std::vector<float>& Reals(const Data& data) {
    std::vector<float>& reals = reals_[data.name];
    if (!reals.empty()) return reals;
    Random random(1);
    constexpr int64_t kPeriod = 64;
    reals.resize(static_cast<size_t>(rows_ * columns_));
    for (int64_t i = 0; i < rows_ * columns_; ++i) {
      reals[i] = i < kPeriod * columns_ ? data.element(i % columns_, random)
                                        : reals[i - kPeriod * columns_];
    }
    return reals;
  }

  int64_t ChunkRows() const {
    return std::max<int64_t>(4, (256 << 10) / columns_);
  }

  void Moments(const std::vector<float>& x) {
    FeatureMoments moments(columns_);
    ForEachChunk(x, [&](const float* in, int64_t rows) {
      moments.Update({columns_, 1}, ElementType::kFloat32, 0, rows * columns_,
                     reinterpret_cast<const uint8_t*>(in), pool_.get());
    });
    sink_ += moments.square_sum(0);
  }

  void Gram(const std::vector<float>& x) {
    GramState gram =
        *GramState::Create(std::vector<int>(static_cast<size_t>(columns_), -10),
                           GramState::PartSize(columns_));
    ForEachChunk(x, [&](const float* in, int64_t rows) {
      gram.Update(ElementType::kFloat32, rows,
                  reinterpret_cast<const uint8_t*>(in), pool_.get());
    });
    gram.Finish(pool_.get());
    sink_ += static_cast<double>(gram.code_sum(0, 0));
  }

  void Read(const std::vector<float>& x) {
    const int64_t part = rows_ / threads_ * columns_;
    ParallelFor(pool_.get(), threads_, [&](int64_t i) {
      const uint64_t sum = bench::ReadAheadAndSum(
          reinterpret_cast<const uint8_t*>(x.data() + i * part), part * 4);
      if (i == 0) sink_ += static_cast<double>(sum);
    });
  }

  void Squares(const std::vector<float>& x) {
    const int64_t rows = rows_ / threads_;
    ParallelFor(pool_.get(), threads_, [&](int64_t i) {
      std::vector<float> sums(static_cast<size_t>(columns_));
      bench::SquareSums(x.data() + i * rows * columns_, rows, columns_,
                        sums.data());
      if (i == 0) sink_ += sums[0];
    });
  }

  void ForEachChunk(const std::vector<float>& x,
                    const std::function<void(const float*, int64_t)>& body) {
    for (int64_t row = 0; row < rows_; row += ChunkRows()) {
      body(x.data() + row * columns_, std::min(ChunkRows(), rows_ - row));
    }
  }

  const int64_t rows_;
  const int64_t columns_;
  const int threads_;
  const std::unique_ptr<ThreadPool> pool_;
  std::map<std::string, std::vector<float>> reals_;
  std::map<std::string, std::function<void()>> sides_;
  // Keeps the compiler from leaving anything out.
  volatile double sink_ = 0;
};

}  // namespace
}  // namespace quantd::core

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: feature_bench ROWS COLUMNS THREADS\n";
    return 2;
  }
  if (const char* target = std::getenv("QUANTD_SIMD")) {
    if (!quantd::core::SetSimdTarget(target).ok()) return 2;
  }
  quantd::core::Bench bench(std::atoll(argv[1]), std::atoll(argv[2]),
                            std::atoi(argv[3]));
  for (std::string side; std::getline(std::cin, side);) {
    std::cout << bench.Run(side) << std::endl;
  }
}
