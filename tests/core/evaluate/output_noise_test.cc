#include "core/evaluate/output_noise.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/gram_state.h"
#include "core/types/element_type.h"
#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core::output_noise_test {
namespace {

// Inputs [rows, features], mixtures of a few signals, so that features are
// correlated; each has a power of its own.
GramState MakeGram(int64_t rows, int64_t features, int64_t part_size) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 1);
  constexpr int64_t kSignals = 7;
  std::vector<float> mix(kSignals * features);
  for (float& m : mix) m = normal(random);
  std::vector<float> power(features);
  for (float& p : power) p = std::exp2(2 * normal(random));
  std::vector<float> inputs(rows * features);
  for (int64_t row = 0; row < rows; ++row) {
    float signal[kSignals];
    for (float& s : signal) s = normal(random);
    for (int64_t k = 0; k < features; ++k) {
      float x = normal(random);
      for (int64_t s = 0; s < kSignals; ++s) {
        x += signal[s] * mix[s * features + k];
      }
      inputs[row * features + k] = x * power[k];
    }
  }
  const auto* const data = reinterpret_cast<const uint8_t*>(inputs.data());
  auto gram =
      GramState::Create(GramState::ExponentsFor(GramState::LargestMagnitudes(
                            ElementType::kFloat32, rows, features, data)),
                        part_size);
  gram->Update(ElementType::kFloat32, rows, data, nullptr);
  gram->Finish(nullptr);
  return *std::move(gram);
}

// Reals, and what they might be restored to.
struct Pairs {
  Pairs(ElementType type, int64_t rows, int64_t columns)
      : type(type), rows(rows), columns(columns) {
    std::mt19937 random(9);
    std::normal_distribution<double> normal(0, 1);
    const int64_t count = rows * columns;
    real.resize(count * ElementSizeBytes(type));
    restored.resize(count * ElementSizeBytes(ArithmeticType(type)));
    for (int64_t i = 0; i < count; ++i) {
      Set(i, normal(random) * std::exp2(static_cast<double>(i / columns % 5)),
          normal(random) / 32);
    }
  }
  void Set(int64_t i, double value, double error) {
    const auto value_f = static_cast<float>(value);
    const auto restored_f = static_cast<float>(value + error);
    switch (type) {
      case ElementType::kFloat64: {
        const double restored_d = value + error;
        std::memcpy(real.data() + 8 * i, &value, 8);
        std::memcpy(restored.data() + 8 * i, &restored_d, 8);
        return;
      }
      case ElementType::kFloat32:
        std::memcpy(real.data() + 4 * i, &value_f, 4);
        break;
      default: {
        // The upper half of a float: a bfloat16.
        uint32_t bits;
        std::memcpy(&bits, &value_f, 4);
        const auto half = static_cast<uint16_t>(bits >> 16);
        std::memcpy(real.data() + 2 * i, &half, 2);
      }
    }
    std::memcpy(restored.data() + 4 * i, &restored_f, 4);
  }
  double Error(int64_t i) const {
    return NaiveReal(ArithmeticType(type), restored.data(), i) -
           NaiveReal(type, real.data(), i);
  }

  ElementType type;
  int64_t rows;
  int64_t columns;
  std::vector<uint8_t> real;
  std::vector<uint8_t> restored;
};

// The formulas, in float64.
OutputPower Naive(const GramState& gram, const Pairs& pairs, bool of_errors) {
  OutputPower power;
  for (int64_t row = 0; row < pairs.rows; ++row) {
    std::vector<double> v(pairs.columns);
    for (int64_t k = 0; k < pairs.columns; ++k) {
      const int64_t i = row * pairs.columns + k;
      v[k] = of_errors ? pairs.Error(i)
                       : NaiveReal(pairs.type, pairs.real.data(), i);
      if (!std::isfinite(v[k])) v[k] = 0;
    }
    for (int64_t j = 0; j < pairs.columns; ++j) {
      for (int64_t k = 0; k < pairs.columns; ++k) {
        const double g = std::ldexp(static_cast<double>(gram.code_sum(j, k)),
                                    gram.exponents()[j] + gram.exponents()[k]) /
                         static_cast<double>(gram.rows());
        power.exact += v[j] * v[k] * g;
        if (j == k) power.diagonal += v[j] * v[k] * g;
      }
    }
  }
  return power;
}

// In bands of so many rows.
OutputPower Measure(const OutputGram& gram, const Pairs& pairs, bool of_errors,
                    int64_t band, ThreadPool* pool) {
  OutputPower power;
  const int64_t row_bytes = pairs.columns * ElementSizeBytes(pairs.type);
  const int64_t restored_bytes =
      pairs.columns * ElementSizeBytes(ArithmeticType(pairs.type));
  for (int64_t row = 0; row < pairs.rows; row += band) {
    const int64_t rows = std::min(band, pairs.rows - row);
    EXPECT_TRUE(
        AddOutputPower(
            gram, pairs.type, rows, pairs.real.data() + row * row_bytes,
            of_errors ? pairs.restored.data() + row * restored_bytes : nullptr,
            &power, pool)
            .ok());
  }
  return power;
}

TEST(OutputNoiseTest, IsThatOfTheFormula) {
  for (const int64_t columns : {1, 7, 8, 65, 600, 1030}) {
    // The last in parts.
    const int64_t part_size = GramState::PartSize(
        columns, columns == 1030 ? 512 : GramState::kMaxPart);
    const GramState state = MakeGram(90, columns, part_size);
    const auto gram = OutputGram::Create(state, nullptr);
    for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat64,
                                   ElementType::kBfloat16}) {
      const Pairs pairs(type, 3, columns);
      for (const bool of_errors : {false, true}) {
        const OutputPower expected = Naive(state, pairs, of_errors);
        const OutputPower found = Measure(*gram, pairs, of_errors, 3, nullptr);
        EXPECT_NEAR(found.exact, expected.exact, 1e-5 * expected.exact)
            << columns;
        EXPECT_NEAR(found.diagonal, expected.diagonal, 1e-6 * expected.diagonal)
            << columns;
      }
    }
  }
}

TEST(OutputNoiseTest, HasTheSameBitsForAnyTargetThreadsAndBands) {
  ThreadPool pool(3);
  for (const int64_t columns : {5, 77, 530}) {
    const GramState state = MakeGram(64, columns, GramState::PartSize(columns));
    const auto gram = OutputGram::Create(state, &pool);
    for (const ElementType type :
         {ElementType::kFloat32, ElementType::kFloat64}) {
      const Pairs pairs(type, 50, columns);
      const OutputPower expected = Measure(*gram, pairs, true, 50, nullptr);
      const std::vector<int64_t> bands = columns < 100
                                             ? std::vector<int64_t>{7, 48, 50}
                                             : std::vector<int64_t>{50};
      ForEachSimdTarget([&] {
        for (const int64_t band : bands) {
          const OutputPower found = Measure(*gram, pairs, true, band, &pool);
          EXPECT_EQ(found.exact, expected.exact);
          EXPECT_EQ(found.diagonal, expected.diagonal);
        }
      });
    }
  }
}

TEST(OutputNoiseTest, LeavesOutWhatIsNotFiniteAndTakesAnyMagnitude) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const GramState state = MakeGram(64, 40, GramState::PartSize(40));
  const auto gram = OutputGram::Create(state, nullptr);
  Pairs pairs(ElementType::kFloat32, 4, 40);
  pairs.Set(3, kNan, 0);
  pairs.Set(50, kInfinity, 0);
  pairs.Set(51, 1, kInfinity);
  for (int64_t k = 80; k < 120; ++k) pairs.Set(k, 0, 3e38);
  for (int64_t k = 120; k < 160; ++k) pairs.Set(k, 0, 3e-38);
  const OutputPower expected = Naive(state, pairs, true);
  ForEachSimdTarget([&] {
    const OutputPower found = Measure(*gram, pairs, true, 4, nullptr);
    EXPECT_NEAR(found.exact, expected.exact, 1e-5 * expected.exact);
    EXPECT_NEAR(found.diagonal, expected.diagonal, 1e-6 * expected.diagonal);
  });
  Pairs tiny(ElementType::kFloat64, 1, 40);
  for (int64_t k = 0; k < 40; ++k) tiny.Set(k, 0, 1e-140);
  const OutputPower of_tiny = Naive(state, tiny, true);
  EXPECT_NEAR(Measure(*gram, tiny, true, 1, nullptr).exact, of_tiny.exact,
              1e-5 * of_tiny.exact);
}

TEST(OutputNoiseTest, RelatesNoiseToSignal) {
  EXPECT_EQ(NoiseToSignal(1, 4), 0.25);
  EXPECT_EQ(NoiseToSignal(0, 0), 0);
  EXPECT_EQ(NoiseToSignal(1, 0), std::numeric_limits<double>::infinity());
}

TEST(OutputNoiseTest, EndsWhenStopped) {
  const std::atomic<bool> stopped(true);
  const GramState state = MakeGram(8, 8, GramState::PartSize(8));
  EXPECT_EQ(
      OutputGram::Create(state, nullptr, StopToken(&stopped)).status().code(),
      absl::StatusCode::kCancelled);
  const auto gram = OutputGram::Create(state, nullptr);
  const Pairs pairs(ElementType::kFloat32, 2, 8);
  OutputPower power;
  EXPECT_EQ(AddOutputPower(*gram, pairs.type, 2, pairs.real.data(), nullptr,
                           &power, nullptr, StopToken(&stopped))
                .code(),
            absl::StatusCode::kCancelled);
}

TEST(OutputNoiseTest, CountsItsMemory) {
  for (const int64_t columns : {1, 9, 300}) {
    const int64_t part = GramState::PartSize(columns, 128);
    const auto gram = OutputGram::Create(MakeGram(4, columns, part), nullptr);
    EXPECT_GE(OutputGram::MemoryBytes(columns, part),
              gram->blocks().back().offset * 4 + columns * 8);
  }
  EXPECT_LT(OutputGram::MemoryBytes(4096, 4096), int64_t{2} * 4096 * 4112);
}

}  // namespace
}  // namespace quantd::core::output_noise_test
