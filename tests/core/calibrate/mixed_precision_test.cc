#include "core/calibrate/mixed_precision.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "core/parallel/stop_token.h"
#include "gtest/gtest.h"
#include "tests/support/heap_bytes.h"

namespace quantd::core::mixed_precision_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Mixture Smallest(absl::Span<const TensorOptions> tensors, double min_sqnr_db) {
  return SmallestMixture(tensors, min_sqnr_db).value();
}

Mixture Best(absl::Span<const TensorOptions> tensors, int64_t max_size_bytes) {
  return BestMixture(tensors, max_size_bytes).value();
}

TEST(MixedPrecisionTest, TakesTheSmallestOptionThatIsQuietEnough) {
  const TensorOptions options = {
      {0, 800, 1e-6}, {1, 400, 1e-3}, {2, 400, 1e-4}, {3, 100, 1e-1}};
  const std::vector<TensorOptions> tensors = {options, {{7, 10, 0.01}}};
  const Mixture at_20 = Smallest(tensors, 20);
  EXPECT_EQ(at_20.choice, (std::vector<int>{2, 0}));
  EXPECT_TRUE(at_20.target_met);
  const Mixture at_10 = Smallest({options}, 10);
  EXPECT_EQ(at_10.choice, (std::vector<int>{3}));
  const Mixture at_50 = Smallest(tensors, 50);
  EXPECT_EQ(at_50.choice, (std::vector<int>{0, 0}));
  EXPECT_FALSE(at_50.target_met);
}

TEST(MixedPrecisionTest, TakesTheQuietestWhereNoneIsQuietEnough) {
  const std::vector<TensorOptions> tensors = {
      {{0, 100, kInfinity}, {1, 200, 0.1}, {2, 300, NAN}, {3, 400, 0.1}}};
  const Mixture mixture = Smallest(tensors, 30);
  EXPECT_EQ(mixture.choice, (std::vector<int>{1}));
  EXPECT_FALSE(mixture.target_met);
  const std::vector<TensorOptions> silent = {{{0, 100, 0.1}, {1, 200, 0}}};
  EXPECT_EQ(Smallest(silent, 1e6).choice, (std::vector<int>{1}));
}

TEST(MixedPrecisionTest, SpendsBytesWhereTheySaveMost) {
  const std::vector<TensorOptions> tensors = {
      {{0, 100, 1.0}, {1, 200, 0.1}},
      {{0, 100, 0.5}, {1, 200, 0.4}},
  };
  EXPECT_EQ(Best(tensors, 300).choice, (std::vector<int>{1, 0}));
  EXPECT_EQ(Best(tensors, 400).choice, (std::vector<int>{1, 1}));
  EXPECT_EQ(Best(tensors, 200).choice, (std::vector<int>{0, 0}));
  EXPECT_TRUE(Best(tensors, 200).target_met);
  EXPECT_EQ(Best(tensors, 199).choice, (std::vector<int>{0, 0}));
  EXPECT_FALSE(Best(tensors, 199).target_met);
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

// The least sum of all combinations; infinity where none fits.
double LeastNoise(const std::vector<TensorOptions>& tensors, int64_t limit) {
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
  return least;
}

// The same of tables that are too large to try all: by every size.
double LeastNoiseBySize(const std::vector<TensorOptions>& tensors,
                        int64_t limit) {
  std::vector<double> least(limit + 1, 0);
  for (const TensorOptions& options : tensors) {
    std::vector<double> with(limit + 1, kInfinity);
    for (const PrecisionOption& option : options) {
      for (int64_t size = option.size_bytes; size <= limit; ++size) {
        with[size] = std::min(with[size], least[size - option.size_bytes] +
                                              option.noise_to_signal);
      }
    }
    least.swap(with);
  }
  return least[limit];
}

struct Ends {
  int64_t smallest = 0;
  int64_t largest = 0;
  // The most that one tensor can save.
  double largest_step = 0;
};

Ends EndsOf(const std::vector<TensorOptions>& tensors) {
  Ends ends;
  for (const TensorOptions& options : tensors) {
    int64_t least = options[0].size_bytes, most = options[0].size_bytes;
    double quiet = kInfinity, loud = 0;
    for (const PrecisionOption& option : options) {
      least = std::min(least, option.size_bytes);
      most = std::max(most, option.size_bytes);
      quiet = std::min(quiet, option.noise_to_signal);
      loud = std::max(loud, option.noise_to_signal);
    }
    ends.smallest += least;
    ends.largest += most;
    ends.largest_step = std::max(ends.largest_step, loud - quiet);
  }
  return ends;
}

int64_t RandomLimit(const Ends& ends, std::mt19937* random) {
  return ends.smallest +
         static_cast<int64_t>((*random)() % (ends.largest - ends.smallest + 1));
}

double NoiseWithin(const std::vector<TensorOptions>& tensors, int64_t limit) {
  const Mixture mixture = Best(tensors, limit);
  int64_t size_bytes;
  const double noise = TotalNoise(tensors, mixture.choice, &size_bytes);
  EXPECT_TRUE(mixture.target_met);
  EXPECT_LE(size_bytes, limit);
  return noise;
}

// Scales of small tensors save most for their bytes, but leave no room for the
// large one.
TEST(MixedPrecisionTest, GivesUpCheapStepsForADearOne) {
  const TensorOptions small = {
      {0, 5'000, 0.01}, {1, 10'000, 1e-4}, {2, 10'100, 2e-5}};
  const std::vector<TensorOptions> tensors = {
      small,
      small,
      {{0, 500'000, 0.01}, {1, 1'000'000, 2e-4}, {2, 1'000'920, 1.5e-4}},
      small};
  EXPECT_EQ(Best(tensors, 1'030'000).choice, (std::vector<int>{1, 1, 1, 1}));
  EXPECT_EQ(Best(tensors, 1'030'300).choice, (std::vector<int>{2, 2, 1, 2}));
  EXPECT_EQ(Best(tensors, 1'029'999).choice, (std::vector<int>{2, 2, 0, 2}));
}

TEST(MixedPrecisionTest, FindsTheOptimumOfSmallTables) {
  std::mt19937 random(1);
  for (int round = 0; round < 500; ++round) {
    std::vector<TensorOptions> tensors(1 + random() % 5);
    for (TensorOptions& options : tensors) {
      const int64_t elements = 1 + random() % 1000;
      const double noise = std::exp(-static_cast<double>(random() % 50) / 10);
      for (int i = 0, n = 1 + random() % 5; i < n; ++i) {
        options.push_back(
            {i, elements * (2 + static_cast<int>(random() % 15)),
             noise * std::exp(-static_cast<double>(random() % 100 / 10.0))});
      }
    }
    const int64_t limit = RandomLimit(EndsOf(tensors), &random);
    const double least = LeastNoise(tensors, limit);
    ASSERT_LE(NoiseWithin(tensors, limit), least * (1 + 1e-12)) << round;
  }
}

// As networks have them: every spec for every tensor, and sizes that are
// nearly those of its bits.
std::vector<TensorOptions> NetworkOf(size_t tensor_count, int spec_count,
                                     std::mt19937* random) {
  std::vector<TensorOptions> tensors(tensor_count);
  for (TensorOptions& options : tensors) {
    const int64_t eighths = 1 + static_cast<int64_t>((*random)() % 20);
    const double peakedness = 1 + static_cast<double>((*random)() % 100) / 10;
    for (int i = 0; i < spec_count; ++i) {
      const int bits = 2 + i % 7;
      options.push_back({i, eighths * bits + static_cast<int>((*random)() % 5),
                         peakedness * std::exp2(-2 * bits) *
                             (1 + static_cast<double>((*random)() % 10))});
    }
  }
  return tensors;
}

TEST(MixedPrecisionTest, FindsTheOptimumOfWholeNetworks) {
  std::mt19937 random(3);
  for (const size_t tensor_count : {8, 40, 150}) {
    for (int round = 0; round < 10; ++round) {
      const std::vector<TensorOptions> tensors =
          NetworkOf(tensor_count, 3 + 5 * (round % 4), &random);
      const int64_t limit = RandomLimit(EndsOf(tensors), &random);
      const double least = LeastNoiseBySize(tensors, limit);
      ASSERT_LE(NoiseWithin(tensors, limit), least * (1 + 1e-9))
          << tensor_count << " " << round;
    }
  }
}

// Where the search meets its bounds: options lie so near a line that all are in
// question, and sizes are far apart.
TEST(MixedPrecisionTest, IsWithinOneStepOfTheOptimumOfHardTables) {
  std::mt19937 random(4);
  for (const size_t tensor_count : {20, 300}) {
    for (int round = 0; round < 3; ++round) {
      std::vector<TensorOptions> tensors(tensor_count);
      for (TensorOptions& options : tensors) {
        for (int i = 0; i < 6; ++i) {
          const int64_t size = static_cast<int64_t>(random() % 400);
          options.push_back({i, size,
                             2 - static_cast<double>(size) / 400 +
                                 static_cast<double>(random() % 1000) * 1e-9});
        }
      }
      const Ends ends = EndsOf(tensors);
      const int64_t limit = RandomLimit(ends, &random);
      const double least = LeastNoiseBySize(tensors, limit);
      ASSERT_LE(NoiseWithin(tensors, limit), least + ends.largest_step)
          << tensor_count << " " << round;
    }
  }
}

void ExpectAsGoodAsAnySpec(const std::vector<TensorOptions>& tensors) {
  for (size_t spec = 0; spec < tensors[0].size(); ++spec) {
    int64_t limit;
    const double noise = TotalNoise(
        tensors, std::vector<int>(tensors.size(), static_cast<int>(spec)),
        &limit);
    ASSERT_LE(NoiseWithin(tensors, limit), noise) << spec;
    ASSERT_LE(NoiseWithin(tensors, limit + 1), noise) << spec;
  }
}

// To the last bit, as their sums are rounded.
TEST(MixedPrecisionTest, IsNeverAboveOneSpecForAll) {
  std::mt19937 random(5);
  for (const size_t tensor_count : {1, 2, 3, 5, 10, 50, 400}) {
    for (int round = 0; round < 10; ++round) {
      std::vector<TensorOptions> tensors = NetworkOf(tensor_count, 6, &random);
      ExpectAsGoodAsAnySpec(tensors);
      tensors[random() % tensor_count][random() % 6].noise_to_signal =
          kInfinity;
      ExpectAsGoodAsAnySpec(tensors);
    }
  }
  // Sizes fit together in one way only, which asks for more exchanges than are
  // searched.
  const std::vector<TensorOptions> tensors(
      1082, {{0, 0, 601}, {1, 300, 301.01}, {2, 601, 0}});
  ExpectAsGoodAsAnySpec(tensors);
}

TEST(MixedPrecisionTest, LeavesOutASpecThatATensorLacks) {
  const std::vector<TensorOptions> tensors = {
      {{4, 10, 1}, {5, 20, 0.5}, {6, 30, 0.1}},
      {{6, 25, 0.2}, {4, 10, 1}},
  };
  EXPECT_EQ(Best(tensors, 55).choice, (std::vector<int>{2, 0}));
  EXPECT_EQ(Best(tensors, 54).choice, (std::vector<int>{1, 0}));
  EXPECT_EQ(Best(tensors, 40).choice, (std::vector<int>{2, 1}));
}

// It looks at the stop token for every so many tensors, and goes no further
// once that says so.
TEST(MixedPrecisionTest, ReturnsAtTheLookThatFindsItStopped) {
  constexpr size_t kTensors = 100'000;
  std::mt19937 random(2);
  const std::vector<TensorOptions> tensors = NetworkOf(kTensors, 16, &random);
  const int64_t limit = RandomLimit(EndsOf(tensors), &random);
  std::atomic<int64_t> looks_left{0};
  const StopToken stop = StopToken::AfterLooks(&looks_left);
  const auto expect_stops_anywhere = [&](auto search) {
    constexpr int64_t kNever = int64_t{1} << 40;
    looks_left = kNever;
    EXPECT_TRUE(search().ok());
    const int64_t all_looks = kNever - looks_left;
    EXPECT_GE(all_looks, int64_t{kTensors} / 100);
    for (int64_t looks = all_looks - 1; looks > 0; looks /= 4) {
      looks_left = looks;
      EXPECT_TRUE(absl::IsCancelled(search().status())) << looks;
      EXPECT_EQ(looks_left, -1) << looks;
    }
    looks_left = 0;
    EXPECT_TRUE(absl::IsCancelled(search().status()));
    EXPECT_EQ(looks_left, -1);
  };
  expect_stops_anywhere([&] { return SmallestMixture(tensors, 20, stop); });
  expect_stops_anywhere([&] { return BestMixture(tensors, limit, stop); });
}

// Nearly that much where there are many options.
TEST(MixedPrecisionTest, TakesNoMoreMemoryThanItSays) {
  for (const int spec_count : {1, 4, 5, 64}) {
    constexpr size_t kTensors = 20'000;
    std::mt19937 random(6);
    const std::vector<TensorOptions> tensors =
        NetworkOf(kTensors, spec_count, &random);
    const int64_t limit = RandomLimit(EndsOf(tensors), &random);
    const int64_t before = testing::live_bytes;
    testing::peak_bytes = before;
    EXPECT_TRUE(Best(tensors, limit).target_met);
    const int64_t most =
        MixtureBytes(spec_count) +
        static_cast<int64_t>(kTensors) *
            (kMixtureTensorBytes + spec_count * kMixtureOptionBytes);
    EXPECT_LE(testing::peak_bytes - before, most) << spec_count;
    if (spec_count == 64) {
      EXPECT_GT(testing::peak_bytes - before, most / 10 * 8);
    }
  }
}

TEST(MixedPrecisionTest, TakesWhateverFigures) {
  const int64_t huge = std::numeric_limits<int64_t>::max() / 2;
  const std::vector<TensorOptions> tensors = {
      {{0, huge, kInfinity}, {1, huge, NAN}, {2, huge + 1, 0}},
      {{0, huge, 1}, {1, huge + 5, 0}},
      {{0, huge, 1}},
  };
  const Mixture mixture = Best(tensors, std::numeric_limits<int64_t>::max());
  EXPECT_FALSE(mixture.target_met);
  EXPECT_EQ(mixture.choice.size(), 3u);
  EXPECT_TRUE(Best({}, 0).target_met);
}

}  // namespace
}  // namespace quantd::core::mixed_precision_test
