#include "core/calibrate/mixed_precision.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "absl/time/time.h"
#include "core/parallel/time_slice.h"
#include "gtest/gtest.h"

namespace quantd::core {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(MixedPrecisionTest, TakesTheSmallestOptionThatIsQuietEnough) {
  const TensorOptions options = {
      {0, 800, 1e-6}, {1, 400, 1e-3}, {2, 400, 1e-4}, {3, 100, 1e-1}};
  const std::vector<TensorOptions> tensors = {options, {{7, 10, 0.01}}};
  const Mixture at_20 = SmallestMixture(tensors, 20);
  EXPECT_EQ(at_20.choice, (std::vector<int>{2, 0}));
  EXPECT_TRUE(at_20.target_met);
  const Mixture at_10 = SmallestMixture({options}, 10);
  EXPECT_EQ(at_10.choice, (std::vector<int>{3}));
  const Mixture at_50 = SmallestMixture(tensors, 50);
  EXPECT_EQ(at_50.choice, (std::vector<int>{0, 0}));
  EXPECT_FALSE(at_50.target_met);
}

TEST(MixedPrecisionTest, TakesTheQuietestWhereNoneIsQuietEnough) {
  const std::vector<TensorOptions> tensors = {
      {{0, 100, kInfinity}, {1, 200, 0.1}, {2, 300, NAN}, {3, 400, 0.1}}};
  const Mixture mixture = SmallestMixture(tensors, 30);
  EXPECT_EQ(mixture.choice, (std::vector<int>{1}));
  EXPECT_FALSE(mixture.target_met);
  const std::vector<TensorOptions> silent = {{{0, 100, 0.1}, {1, 200, 0}}};
  EXPECT_EQ(SmallestMixture(silent, 1e6).choice, (std::vector<int>{1}));
}

TEST(MixedPrecisionTest, SpendsBytesWhereTheySaveMost) {
  const std::vector<TensorOptions> tensors = {
      {{0, 100, 1.0}, {1, 200, 0.1}},
      {{0, 100, 0.5}, {1, 200, 0.4}},
  };
  EXPECT_EQ(BestMixture(tensors, 300).choice, (std::vector<int>{1, 0}));
  EXPECT_EQ(BestMixture(tensors, 400).choice, (std::vector<int>{1, 1}));
  EXPECT_EQ(BestMixture(tensors, 200).choice, (std::vector<int>{0, 0}));
  EXPECT_TRUE(BestMixture(tensors, 200).target_met);
  EXPECT_EQ(BestMixture(tensors, 199).choice, (std::vector<int>{0, 0}));
  EXPECT_FALSE(BestMixture(tensors, 199).target_met);
}

double TotalNoise(const std::vector<TensorOptions>& tensors,
                  const std::vector<int>& choice, int64_t* size_bytes) {
  double noise = 0;
  *size_bytes = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    noise += tensors[t][choice[t]].noise_to_signal;
    *size_bytes += tensors[t][choice[t]].size_bytes;
  }
  return noise;
}

// Compares with all combinations.
TEST(MixedPrecisionTest, IsWithinOneStepOfTheOptimum) {
  std::mt19937 random(1);
  int optimal = 0;
  constexpr int kRounds = 500;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<TensorOptions> tensors(1 + random() % 5);
    int64_t smallest = 0, largest = 0;
    double largest_step = 0;
    for (TensorOptions& options : tensors) {
      const int64_t elements = 1 + random() % 1000;
      const double noise = std::exp(-static_cast<double>(random() % 50) / 10);
      for (int i = 0, n = 1 + random() % 5; i < n; ++i) {
        options.push_back(
            {i, elements * (2 + static_cast<int>(random() % 15)),
             noise * std::exp(-static_cast<double>(random() % 100 / 10.0))});
      }
      int64_t least = options[0].size_bytes, most = options[0].size_bytes;
      double quiet = kInfinity, loud = 0;
      for (const PrecisionOption& option : options) {
        least = std::min(least, option.size_bytes);
        most = std::max(most, option.size_bytes);
        quiet = std::min(quiet, option.noise_to_signal);
        loud = std::max(loud, option.noise_to_signal);
      }
      smallest += least;
      largest += most;
      largest_step = std::max(largest_step, loud - quiet);
    }
    const int64_t limit =
        smallest + static_cast<int64_t>(random() % (largest - smallest + 1));
    const Mixture mixture = BestMixture(tensors, limit);
    int64_t size_bytes;
    const double noise = TotalNoise(tensors, mixture.choice, &size_bytes);
    ASSERT_TRUE(mixture.target_met);
    ASSERT_LE(size_bytes, limit);

    double least = kInfinity;
    std::vector<int> choice(tensors.size(), 0);
    for (bool more = true; more;) {
      int64_t bytes;
      const double total = TotalNoise(tensors, choice, &bytes);
      if (bytes <= limit) least = std::min(least, total);
      more = false;
      for (size_t t = 0; t < tensors.size() && !more; ++t) {
        if (++choice[t] < static_cast<int>(tensors[t].size())) {
          more = true;
        } else {
          choice[t] = 0;
        }
      }
    }
    ASSERT_LE(noise, least + largest_step + 1e-12);
    optimal += noise <= least * (1 + 1e-12);
  }
  EXPECT_GT(optimal, kRounds / 2);
}

TEST(MixedPrecisionTest, ChoosesTheSameInSlices) {
  std::mt19937 random(2);
  std::vector<TensorOptions> tensors(200);
  for (TensorOptions& options : tensors) {
    for (int i = 0; i < 8; ++i) {
      options.push_back({i, 1 + static_cast<int64_t>(random() % 1000),
                         1.0 / (1 + static_cast<double>(random() % 100))});
    }
  }
  const auto choose = [](MixtureChooser chooser) {
    size_t steps = 1;
    while (!chooser.Run(TimeSlice(absl::ZeroDuration()))) ++steps;
    EXPECT_GE(steps, 200u);
    return chooser.Take().choice;
  };
  EXPECT_EQ(choose(MixtureChooser::Smallest(tensors, 15)),
            SmallestMixture(tensors, 15).choice);
  for (const int64_t limit : {40'000, 80'000, 120'000}) {
    EXPECT_EQ(choose(MixtureChooser::Best(tensors, limit)),
              BestMixture(tensors, limit).choice);
  }
}

TEST(MixedPrecisionTest, TakesWhateverFigures) {
  const int64_t huge = std::numeric_limits<int64_t>::max() / 2;
  const std::vector<TensorOptions> tensors = {
      {{0, huge, kInfinity}, {1, huge, NAN}, {2, huge + 1, 0}},
      {{0, huge, 1}, {1, huge + 5, 0}},
      {{0, huge, 1}},
  };
  const Mixture mixture =
      BestMixture(tensors, std::numeric_limits<int64_t>::max());
  EXPECT_FALSE(mixture.target_met);
  EXPECT_EQ(mixture.choice.size(), 3u);
  EXPECT_TRUE(BestMixture({}, 0).target_met);
}

}  // namespace
}  // namespace quantd::core
