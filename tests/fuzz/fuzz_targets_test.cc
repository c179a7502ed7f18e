// What fuzzers begin with, and what they found, as ordinary tests.

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "google/protobuf/stubs/logging.h"
#include "gtest/gtest.h"
#include "tests/fuzz/fuzz_target.h"

namespace quantd::fuzz {
namespace {

// Inputs of every target beside its seeds.
constexpr int kMutations = 10000;

class FuzzTargetsTest : public ::testing::TestWithParam<FuzzTarget> {
 protected:
  // protobuf logs what it refuses.
  static void SetUpTestSuite() { google::protobuf::SetLogHandler(nullptr); }

  // From memory of its own size, so that a read behind it is seen.
  void Run(const std::string& input) {
    const std::vector<uint8_t> bytes(input.begin(), input.end());
    GetParam().run(bytes);
  }
};

TEST_P(FuzzTargetsTest, TakesItsSeedsWhereverTheyAreCutOff) {
  for (const std::string& seed : GetParam().seeds()) {
    for (size_t size = 0; size < seed.size(); ++size) Run(seed.substr(0, size));
    Run(seed);
  }
}

TEST_P(FuzzTargetsTest, TakesMutationsOfItsSeeds) {
  const std::vector<std::string> seeds = GetParam().seeds();
  std::mt19937 random(7);
  for (int i = 0; i < kMutations; ++i) {
    std::string input = seeds[random() % seeds.size()];
    for (int n = 1 + static_cast<int>(random() % 4); n > 0; --n) {
      if (input.empty()) break;
      const size_t at = random() % input.size();
      switch (random() % 4) {
        case 0:
          input[at] = static_cast<char>(random());
          break;
        case 1:
          input[at] = static_cast<char>(input[at] ^ (1 << random() % 8));
          break;
        case 2:
          input.erase(at, 1 + random() % 4);
          break;
        default:
          input.insert(at, input, random() % input.size(), random() % 8);
      }
    }
    Run(input);
  }
}

// Of the targets whose inputs end with a message.
class FuzzMessagesTest : public FuzzTargetsTest {};

TEST_P(FuzzMessagesTest, TakesMutationsOfItsMessages) {
  const std::vector<std::string> seeds = GetParam().seeds();
  std::mt19937_64 random(8);
  for (int i = 0; i < kMutations; ++i) {
    std::string input = seeds[random() % seeds.size()];
    for (int n = 1 + static_cast<int>(random() % 4); n > 0; --n) {
      const std::vector<uint8_t> bytes(input.begin(), input.end());
      input = MutateMessageOf(GetParam(), bytes, random);
    }
    Run(input);
  }
}

// What fuzzers found.
struct Regression {
  const char* what;
  const char* target;
  const char* input_hex;
};

constexpr Regression kRegressions[] = {
    {"a weight of clipped elements that makes every error infinite", "spec",
     "03021303a3083220048101ffffffffffffef7f990100000000000000c0a10100000000"
     "00000840"},
};

TEST(FuzzRegressionsTest, StayFixed) {
  for (const Regression& regression : kRegressions) {
    SCOPED_TRACE(regression.what);
    const std::string input = absl::HexStringToBytes(regression.input_hex);
    bool found = false;
    for (const FuzzTarget& target : AllFuzzTargets()) {
      if (target.name != regression.target) continue;
      found = true;
      target.run(
          {reinterpret_cast<const uint8_t*>(input.data()), input.size()});
    }
    EXPECT_TRUE(found) << regression.target;
  }
}

std::string NameOf(const ::testing::TestParamInfo<FuzzTarget>& info) {
  return std::string(info.param.name);
}

std::vector<FuzzTarget> TargetsWithMessages() {
  std::vector<FuzzTarget> targets;
  for (const FuzzTarget& target : AllFuzzTargets()) {
    if (target.prototype != nullptr) targets.push_back(target);
  }
  return targets;
}

INSTANTIATE_TEST_SUITE_P(All, FuzzTargetsTest,
                         ::testing::ValuesIn(AllFuzzTargets()), NameOf);
INSTANTIATE_TEST_SUITE_P(All, FuzzMessagesTest,
                         ::testing::ValuesIn(TargetsWithMessages()), NameOf);

}  // namespace
}  // namespace quantd::fuzz
