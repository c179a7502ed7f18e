#include "core/statistics/gram_state.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "core/parallel/stop_token.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core::gram_state_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// [rows, features] with features of different sizes.
std::vector<uint8_t> MakeRows(ElementType type, int64_t rows, int64_t features,
                              bool specials, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<uint8_t> reals(rows * features * ElementSizeBytes(type));
  for (int64_t r = 0; r < rows; ++r) {
    const double common = normal(random);
    for (int64_t k = 0; k < features; ++k) {
      double x = (normal(random) + common) * std::ldexp(1.0, k % 7 - 3);
      if (specials && random() % 2000 == 0) x = std::nan("");
      if (specials && random() % 2000 == 0) x = -INFINITY;
      if (random() % 100 == 0) x = 0;
      StoreReal(type, x, reals.data(), r * features + k);
    }
  }
  return reals;
}

// The definition, one product after the other.
struct NaiveGram {
  int64_t rows = 0;
  int64_t left_out = 0;
  int64_t clipped = 0;
  // [features, features]
  std::vector<int64_t> sums;
};

NaiveGram Naive(const std::vector<int>& exponents, ElementType type,
                int64_t rows, const std::vector<uint8_t>& reals) {
  const int64_t features = static_cast<int64_t>(exponents.size());
  NaiveGram gram;
  gram.sums.resize(features * features);
  std::vector<int64_t> codes(features);
  for (int64_t r = 0; r < rows; ++r) {
    bool is_finite = true;
    int64_t clipped = 0;
    for (int64_t k = 0; k < features; ++k) {
      const double real = NaiveReal(type, reals.data(), r * features + k);
      is_finite &= std::isfinite(real);
      if (!is_finite) break;
      const double code =
          std::nearbyint(std::ldexp(static_cast<float>(real), -exponents[k]));
      constexpr double kMost = (1 << 20) - 1;
      clipped += std::fabs(code) > kMost;
      codes[k] = static_cast<int64_t>(std::min(std::max(code, -kMost), kMost));
    }
    if (!is_finite) {
      ++gram.left_out;
      continue;
    }
    ++gram.rows;
    gram.clipped += clipped;
    for (int64_t i = 0; i < features; ++i) {
      for (int64_t j = 0; j < features; ++j) {
        gram.sums[i * features + j] += codes[i] * codes[j];
      }
    }
  }
  return gram;
}

void ExpectGram(const GramState& got, const NaiveGram& want) {
  EXPECT_EQ(got.rows(), want.rows);
  EXPECT_EQ(got.left_out_rows(), want.left_out);
  EXPECT_EQ(got.clipped(), want.clipped);
  const int64_t features = got.feature_count();
  for (int64_t i = 0; i < features; ++i) {
    for (int64_t j = 0; j < features; ++j) {
      const bool is_kept = i / got.part_size() == j / got.part_size();
      ASSERT_EQ(got.code_sum(i, j), is_kept ? want.sums[i * features + j] : 0)
          << i << ", " << j;
    }
  }
}

void ExpectSame(const GramState& got, const GramState& want) {
  const GramState::Parts a = got.ToParts();
  const GramState::Parts b = want.ToParts();
  EXPECT_EQ(a.exponents, b.exponents);
  EXPECT_EQ(a.part_size, b.part_size);
  EXPECT_EQ(a.rows, b.rows);
  EXPECT_EQ(a.left_out_rows, b.left_out_rows);
  EXPECT_EQ(a.clipped, b.clipped);
  ASSERT_TRUE(a.code_sums == b.code_sums);
  EXPECT_EQ(got.sum_count(), static_cast<int64_t>(a.code_sums.size()));
  EXPECT_EQ(a.sum_count(), got.sum_count());
}

TEST(GramStateTest, EqualsTheDefinitionForEveryTypeAndTarget) {
  struct Case {
    int64_t features;
    int64_t part_size;
    int64_t rows;
  };
  for (const Case& c : {Case{1, 1, 3}, Case{31, 31, 64}, Case{33, 33, 515},
                        Case{65, 65, 37}, Case{300, 128, 41}}) {
    SCOPED_TRACE(c.features);
    for (const ElementType type : kAllElementTypes) {
      SCOPED_TRACE(ElementTypeName(type));
      for (const bool specials : {false, true}) {
        const auto reals = MakeRows(type, c.rows, c.features, specials, 3);
        // With codes beyond 8191, few and many, and elements that do not fit.
        for (const int exponent : {-10, -13, -18}) {
          SCOPED_TRACE(exponent);
          const std::vector<int> exponents(c.features, exponent);
          const NaiveGram want = Naive(exponents, type, c.rows, reals);
          ForEachSimdTarget([&] {
            GramState got = *GramState::Create(exponents, c.part_size);
            got.Update(type, c.rows, reals.data(), nullptr);
            got.Finish(nullptr);
            ExpectGram(got, want);
          });
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Sums of 32 products are at their largest, and so is the code.
TEST(GramStateTest, HoldsTheLargestCodes) {
  constexpr int64_t kFeatures = 40;
  constexpr int64_t kRows = 1030;
  std::vector<float> reals(kRows * kFeatures);
  for (int64_t i = 0; i < kRows * kFeatures; ++i) {
    const int64_t feature = i % kFeatures;
    // The last that fits, one that is limited, and infinity's neighbour.
    const float x = feature % 3 == 0   ? 1048575.25f
                    : feature % 3 == 1 ? 1048575.5f
                                       : std::numeric_limits<float>::max();
    reals[i] = feature % 2 ? -x : x;
  }
  ForEachSimdTarget([&] {
    GramState got = *GramState::Create(std::vector<int>(kFeatures), kFeatures);
    got.Update(ElementType::kFloat32, kRows,
               reinterpret_cast<const uint8_t*>(reals.data()), nullptr);
    got.Finish(nullptr);
    EXPECT_EQ(got.clipped(), kRows * 26);
    for (int64_t i = 0; i < kFeatures; ++i) {
      for (int64_t j = 0; j < kFeatures; ++j) {
        ASSERT_EQ(got.code_sum(i, j),
                  kRows * 1048575 * 1048575 * ((i + j) % 2 ? -1 : 1));
      }
    }
  });
}

TEST(GramStateTest, DoesNotDependOnThreadsChunkingOrOrder) {
  constexpr int64_t kFeatures = 333;
  constexpr int64_t kRows = 1500;
  ThreadPool pool(2);
  auto reals = MakeRows(ElementType::kFloat32, kRows, kFeatures, true, 5);
  // Some rows have larger elements than the first 100.
  for (int64_t i = 700 * kFeatures; i < kRows * kFeatures; i += 1001) {
    StoreReal(ElementType::kFloat32, 200 * std::sin(i), reals.data(), i);
  }
  const std::vector<int> exponents =
      GramState::ExponentsFor(GramState::LargestMagnitudes(
          ElementType::kFloat32, 100, kFeatures, reals.data()));
  for (const int64_t part_size : {kFeatures, int64_t{256}}) {
    GramState want = *GramState::Create(exponents, part_size);
    want.Update(ElementType::kFloat32, kRows, reals.data(), nullptr);
    want.Finish(nullptr);
    std::mt19937 random(7);
    struct Chunk {
      int64_t first;
      int64_t rows;
    };
    std::vector<Chunk> chunks;
    for (int64_t row = 0; row < kRows;) {
      const int64_t rows = std::min<int64_t>(kRows - row, random() % 301);
      chunks.push_back({row, rows});
      row += rows;
    }
    std::shuffle(chunks.begin(), chunks.end(), random);
    GramState sources[] = {*GramState::Create(exponents, part_size),
                           *GramState::Create(exponents, part_size)};
    for (const Chunk& chunk : chunks) {
      sources[random() % 2].Update(
          ElementType::kFloat32, chunk.rows,
          reals.data() + chunk.first * kFeatures * sizeof(float),
          random() % 2 ? &pool : nullptr);
    }
    for (GramState& source : sources) source.Finish(&pool);
    ASSERT_TRUE(sources[0].CheckMergeable(sources[1]).ok());
    sources[0].Merge(sources[1]);
    ExpectSame(sources[0], want);
  }
}

GramState GramOf(std::vector<int> exponents, const std::vector<float>& rows) {
  const auto features = static_cast<int64_t>(exponents.size());
  GramState gram = *GramState::Create(std::move(exponents), features);
  gram.Update(ElementType::kFloat32,
              static_cast<int64_t>(rows.size()) / features,
              reinterpret_cast<const uint8_t*>(rows.data()), nullptr);
  gram.Finish(nullptr);
  return gram;
}

// Steps that a first batch set are good for larger ones.
TEST(GramStateTest, HoldsInputsThatBecomeLarger) {
  constexpr int64_t kRows = 400;
  constexpr int64_t kFeatures = 40;
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<float> rows(kRows * kFeatures);
  for (float& x : rows) x = normal(random);
  const std::vector<int> exponents =
      GramState::ExponentsFor(GramState::LargestMagnitudes(
          ElementType::kFloat32, kRows, kFeatures,
          reinterpret_cast<const uint8_t*>(rows.data())));
  for (const int64_t last : {int64_t{1}, kFeatures}) {
    SCOPED_TRACE(last);
    std::vector<float> later = rows;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (static_cast<int64_t>(i) % kFeatures < last) later[i] *= 100;
    }
    const GramState gram = GramOf(exponents, later);
    EXPECT_EQ(gram.clipped(), 0);
    const std::vector<double> dense = gram.Dense();
    for (int64_t i = 0; i < kFeatures; ++i) {
      for (int64_t j = 0; j < kFeatures; ++j) {
        double want = 0;
        for (int64_t r = 0; r < kRows; ++r) {
          want += double{later[r * kFeatures + i]} * later[r * kFeatures + j];
        }
        ASSERT_NEAR(dense[i * kFeatures + j], want, gram.ErrorBound(i, j));
        ASSERT_LT(gram.ErrorBound(i, j),
                  2e-3 * std::sqrt(dense[i * (kFeatures + 1)] *
                                   dense[j * (kFeatures + 1)]));
      }
    }
  }
}

TEST(GramStateTest, HoldsTheSmallestFloats) {
  for (const float tiny : {1e-45f, 1e-40f, 1e-37f}) {
    SCOPED_TRACE(tiny);
    const std::vector<int> exponents = GramState::ExponentsFor({tiny, 1});
    const GramState gram = GramOf(exponents, {tiny, 1, -tiny, 3, 0, -500});
    EXPECT_EQ(gram.clipped(), 0);
    EXPECT_NEAR(gram.Dense()[0] / (2 * std::pow(double{tiny}, 2)), 1, 1e-3);
    EXPECT_NEAR(gram.Dense()[1] / (-2 * double{tiny}), 1, 1e-3);
    EXPECT_EQ(gram.Dense()[3], 250010);
  }
}

TEST(GramStateTest, TellsSumsThatOverflow) {
  GramState::Parts parts = GramOf({0}, {1}).ToParts();
  parts.rows = int64_t{1} << 23;
  parts.code_sums = {int64_t{1} << 62};
  GramState gram = *GramState::FromParts(parts);
  EXPECT_THAT(gram.CheckMergeable(gram).message(),
              HasSubstr("STATISTICS_MISMATCH"));
  EXPECT_FALSE(gram.has_overflowed());
  const std::vector<float> rows(600, 1e6f);
  gram.Update(ElementType::kFloat32, 600,
              reinterpret_cast<const uint8_t*>(rows.data()), nullptr);
  gram.Finish(nullptr);
  EXPECT_TRUE(gram.has_overflowed());
  EXPECT_GT(gram.code_sum(0, 0), 0);
}

TEST(GramStateTest, KeepsItsErrorBound) {
  constexpr int64_t kFeatures = 70;
  constexpr int64_t kRows = 900;
  const auto reals =
      MakeRows(ElementType::kFloat32, kRows, kFeatures, false, 5);
  // Finer and coarser than what fits.
  for (const int finer : {0, -3, -9}) {
    std::vector<int> exponents =
        GramState::ExponentsFor(GramState::LargestMagnitudes(
            ElementType::kFloat32, kRows, kFeatures, reals.data()));
    for (int& exponent : exponents) exponent -= finer;
    GramState gram = *GramState::Create(exponents, kFeatures);
    gram.Update(ElementType::kFloat32, kRows, reals.data(), nullptr);
    gram.Finish(nullptr);
    ASSERT_EQ(gram.clipped(), 0);
    const std::vector<double> dense = gram.Dense();
    double largest = 0;
    for (int64_t i = 0; i < kFeatures; ++i) {
      for (int64_t j = 0; j < kFeatures; ++j) {
        long double want = 0;
        for (int64_t r = 0; r < kRows; ++r) {
          want +=
              static_cast<long double>(NaiveReal(
                  ElementType::kFloat32, reals.data(), r * kFeatures + i)) *
              NaiveReal(ElementType::kFloat32, reals.data(), r * kFeatures + j);
        }
        const double error =
            static_cast<double>(std::fabs(dense[i * kFeatures + j] - want));
        ASSERT_LE(error, gram.ErrorBound(i, j)) << i << ", " << j;
        largest = std::max(largest, error / gram.ErrorBound(i, j));
        ASSERT_EQ(dense[i * kFeatures + j], dense[j * kFeatures + i]);
      }
    }
    // The bound is of the error's order.
    EXPECT_GT(largest, 0.01);
    if (finer == 0) {
      EXPECT_LT(gram.ErrorBound(0, 0), 0.002 * dense[0]);
    }
  }
}

TEST(GramStateTest, GivesThePartsOfManyFeatures) {
  EXPECT_EQ(GramState::PartSize(4096), 4096);
  EXPECT_EQ(GramState::PartSize(8192), 8192);
  EXPECT_EQ(GramState::PartSize(11008), 5504);
  EXPECT_EQ(GramState::PartSize(28672), 7168);
  EXPECT_EQ(GramState::PartSize(300, 128), 128);
  constexpr int64_t kFeatures = 300;
  const auto reals = MakeRows(ElementType::kFloat32, 50, kFeatures, false, 5);
  const std::vector<int> exponents(kFeatures, -9);
  GramState whole = *GramState::Create(exponents, kFeatures);
  GramState parts = *GramState::Create(exponents, 128);
  for (GramState* gram : {&whole, &parts}) {
    gram->Update(ElementType::kFloat32, 50, reals.data(), nullptr);
    gram->Finish(nullptr);
  }
  const std::vector<double> all = whole.Dense();
  ASSERT_EQ(parts.part_count(), 3);
  for (int64_t part = 0; part < 3; ++part) {
    const int64_t width = part < 2 ? 128 : 44;
    ASSERT_EQ(parts.PartWidth(part), width);
    const std::vector<double> dense = parts.Dense(part);
    ASSERT_EQ(static_cast<int64_t>(dense.size()), width * width);
    for (int64_t i = 0; i < width; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        ASSERT_EQ(dense[i * width + j],
                  all[(part * 128 + i) * kFeatures + part * 128 + j]);
      }
    }
  }
}

TEST(GramStateTest, DerivesExponents) {
  // 256 times the largest still fits.
  EXPECT_THAT(GramState::ExponentsFor({1.0f, 0.0f, 1.99f, 2.0f, 1e-45f, 3e38f}),
              ElementsAre(-11, 116, -11, -10, -149, 116));
  EXPECT_THAT(GramState::ExponentsFor({0.0f, 0.25f}), ElementsAre(-13, -13));
  EXPECT_THAT(GramState::ExponentsFor({0.0f}), ElementsAre(-11));
}

TEST(GramStateTest, ComesBackFromItsParts) {
  for (const int64_t part_size : {int64_t{200}, int64_t{128}}) {
    const auto reals = MakeRows(ElementType::kFloat32, 50, 200, true, 5);
    GramState want = *GramState::Create(std::vector<int>(200, -10), part_size);
    want.Update(ElementType::kFloat32, 50, reals.data(), nullptr);
    want.Finish(nullptr);
    auto got = GramState::FromParts(want.ToParts());
    ASSERT_TRUE(got.ok()) << got.status();
    ExpectSame(*got, want);
    for (int64_t part = 0; part < want.part_count(); ++part) {
      EXPECT_TRUE(got->Dense(part) == want.Dense(part));
    }
    for (GramState* gram : {&*got, &want}) {
      gram->Update(ElementType::kFloat32, 50, reals.data(), nullptr);
      gram->Finish(nullptr);
    }
    ExpectSame(*got, want);
  }
}

TEST(GramStateTest, HasNoSumsWithoutFeatures) {
  EXPECT_EQ(GramState::Parts().sum_count(), 0);
}

TEST(GramStateTest, RefusesPartsThatContradictThemselves) {
  const auto reals = MakeRows(ElementType::kFloat32, 50, 3, false, 5);
  GramState gram = *GramState::Create({-10, -10, -10}, 3);
  gram.Update(ElementType::kFloat32, 50, reals.data(), nullptr);
  gram.Finish(nullptr);
  using Parts = GramState::Parts;
  const Parts good = gram.ToParts();
  ASSERT_TRUE(GramState::FromParts(good).ok());
  const auto expect_refused = [&](const char* what, auto change) {
    Parts parts = good;
    change(parts);
    const absl::Status status = GramState::FromParts(parts).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("STATISTICS_INVALID"));
    EXPECT_THAT(status.message(), HasSubstr(what));
  };
  expect_refused("no feature", [](Parts& p) { p = Parts(); });
  expect_refused("parts", [](Parts& p) { p.part_size = 0; });
  expect_refused("parts", [](Parts& p) { p.part_size = 4; });
  expect_refused("parts", [](Parts& p) { p.part_size = 2; });
  expect_refused("exponent", [](Parts& p) { p.exponents[1] = 117; });
  expect_refused("exponent", [](Parts& p) { p.exponents[1] = -150; });
  expect_refused("6 for 3", [](Parts& p) { p.code_sums.pop_back(); });
  expect_refused("rows", [](Parts& p) { p.rows = -1; });
  expect_refused("rows", [](Parts& p) { p.rows = GramState::kMaxRows + 1; });
  expect_refused("left out", [](Parts& p) { p.left_out_rows = -1; });
  expect_refused("limited", [](Parts& p) { p.clipped = 1000; });
  expect_refused("squares", [](Parts& p) { p.code_sums[0] = -1; });
  expect_refused("squares", [](Parts& p) { p.rows = 0; });
  expect_refused("exceeds",
                 [](Parts& p) { p.code_sums[1] = p.code_sums[0] * 4; });
  expect_refused("exceeds", [](Parts& p) {
    p.code_sums[1] = std::numeric_limits<int64_t>::min();
  });
}

TEST(GramStateTest, AddsNothingOnceItIsStopped) {
  // So many rows that Update multiplies some.
  constexpr int64_t kRows = 600;
  const auto reals = MakeRows(ElementType::kFloat32, kRows, 3, false, 6);
  std::atomic<bool> stopped{false};
  const StopToken stop(&stopped);
  for (const bool at_the_end : {false, true}) {
    stopped = !at_the_end;
    GramState gram = *GramState::Create({-10, -10, -10}, 3);
    gram.Update(ElementType::kFloat32, kRows, reals.data(), nullptr, stop);
    const int64_t before = gram.code_sum(0, 0);
    EXPECT_EQ(before > 0, at_the_end);
    stopped = true;
    gram.Finish(nullptr, stop);
    EXPECT_EQ(gram.code_sum(0, 0), before);
  }
}

TEST(GramStateTest, RefusesToMergeOthers) {
  const GramState gram = *GramState::Create({-10, -10, -10}, 3);
  const auto expect_refused = [&](const GramState& other) {
    EXPECT_THAT(gram.CheckMergeable(other).message(),
                HasSubstr("STATISTICS_MISMATCH"));
  };
  expect_refused(*GramState::Create({-10, -10, -9}, 3));
  expect_refused(*GramState::Create({-10, -10}, 2));
  const std::vector<int> many(200, -10);
  EXPECT_FALSE(GramState::Create(many, 200)
                   ->CheckMergeable(*GramState::Create(many, 128))
                   .ok());
  GramState::Parts parts = gram.ToParts();
  parts.rows = GramState::kMaxRows;
  const GramState full = *GramState::FromParts(parts);
  EXPECT_TRUE(gram.CheckMergeable(full).ok());
  parts.rows = 1;
  EXPECT_FALSE(full.CheckMergeable(*GramState::FromParts(parts)).ok());
}

}  // namespace
}  // namespace quantd::core::gram_state_test
