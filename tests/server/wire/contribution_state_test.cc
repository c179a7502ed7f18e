#include "server/wire/contribution_state.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/statistics_state.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quantd/v1/statistics.pb.h"
#include "server/wire/statistics_proto.h"
#include "tests/support/case_name.h"

namespace quantd::server {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 5;
constexpr int64_t kFeatures = 3;

// Of [kRows, kFeatures] float32, the last row with a NaN.
v1::ContributionState MakeState() {
  std::vector<float> elements(kRows * kFeatures);
  for (size_t i = 0; i < elements.size(); ++i) {
    elements[i] = 0.25f * static_cast<float>(i) - 1;
  }
  elements.back() = std::numeric_limits<float>::quiet_NaN();
  const auto* const data = reinterpret_cast<const uint8_t*>(elements.data());
  core::StatisticsState state;
  state.shape = {kRows, kFeatures};
  state.statistics = core::TensorStatistics(1, /*mantissa_bits=*/6);
  const core::BlockLayout layout = *core::BlockLayout::Create(state.shape, {});
  state.statistics.Update(layout, core::ElementType::kFloat32, 0,
                          layout.element_count(), data, nullptr);
  core::GramState gram = *core::GramState::Create({-8, -8, -8}, kFeatures);
  gram.Update(core::ElementType::kFloat32, kRows, data, nullptr);
  gram.Finish(nullptr);
  v1::ContributionState proto;
  StateToProto(state, proto.mutable_statistics());
  const core::GramState::Parts parts = gram.ToParts();
  v1::GramState* const sums = proto.mutable_gram();
  sums->mutable_step_exponent()->Assign(parts.exponents.begin(),
                                        parts.exponents.end());
  sums->set_part_size(static_cast<uint64_t>(parts.part_size));
  sums->set_rows(static_cast<uint64_t>(parts.rows));
  sums->set_left_out_rows(static_cast<uint64_t>(parts.left_out_rows));
  sums->set_clipped_count(static_cast<uint64_t>(parts.clipped));
  sums->mutable_code_sum()->Assign(parts.code_sums.begin(),
                                   parts.code_sums.end());
  return proto;
}

absl::Status StatusOf(absl::string_view bytes) {
  return SplitContributionState(bytes).status();
}

TEST(ContributionStateTest, PointsIntoTheBytes) {
  const v1::ContributionState proto = MakeState();
  const std::string bytes = proto.SerializeAsString();
  const absl::StatusOr<ContributionStateBytes> split =
      SplitContributionState(bytes);
  ASSERT_TRUE(split.ok()) << split.status();
  EXPECT_EQ(split->statistics, proto.statistics().SerializeAsString());
  EXPECT_GT(split->statistics_memory_bytes, 0);
  ASSERT_TRUE(split->gram.has_value());
  EXPECT_EQ(split->gram->rows, kRows - 1);
  EXPECT_EQ(split->gram->left_out_rows, 1);
  EXPECT_TRUE(split->gram->code_sums.empty());
  ASSERT_EQ(split->gram_sums.size(), 1u);
  for (const absl::string_view part :
       {split->statistics, split->gram_sums[0]}) {
    EXPECT_GE(part.data(), bytes.data());
    EXPECT_LE(part.data() + part.size(), bytes.data() + bytes.size());
  }
  EXPECT_TRUE(ReadContributedStatistics(*split, {kRows, kFeatures},
                                        /*slice=*/nullptr)
                  .ok());
}

TEST(ContributionStateTest, NeedsNoGramMatrix) {
  v1::ContributionState proto = MakeState();
  proto.clear_gram();
  const std::string bytes = proto.SerializeAsString();
  const absl::StatusOr<ContributionStateBytes> split =
      SplitContributionState(bytes);
  ASSERT_TRUE(split.ok());
  EXPECT_FALSE(split->gram.has_value());
}

TEST(ContributionStateTest, SumsMayComeInSeveralRuns) {
  // A union of messages: their packed sums follow one another.
  v1::ContributionState proto = MakeState();
  const std::vector<int64_t> sums(proto.gram().code_sum().begin(),
                                  proto.gram().code_sum().end());
  ASSERT_EQ(sums.size(), 6u);
  std::string gram;
  for (const int64_t sum : sums) {
    v1::GramState one;
    one.add_code_sum(sum);
    gram += one.SerializeAsString();
  }
  proto.mutable_gram()->clear_code_sum();
  gram += proto.gram().SerializeAsString();
  v1::ContributionState statistics;
  *statistics.mutable_statistics() = proto.statistics();
  const std::string bytes = statistics.SerializeAsString() + "\x12" +
                            static_cast<char>(gram.size()) + gram;
  ASSERT_LT(gram.size(), 128u);
  const absl::StatusOr<ContributionStateBytes> split =
      SplitContributionState(bytes);
  ASSERT_TRUE(split.ok()) << split.status();
  EXPECT_EQ(split->gram_sums.size(), sums.size());
  EXPECT_EQ(ReadContributedGram(*split).code_sums, sums);
}

struct BadBytes {
  std::string name;
  std::function<std::string()> make;
};
void PrintTo(const BadBytes& bad, std::ostream* out) { *out << bad.name; }

class BadContributionStateTest : public ::testing::TestWithParam<BadBytes> {};

TEST_P(BadContributionStateTest, IsRefused) {
  const absl::Status status = StatusOf(GetParam().make());
  EXPECT_EQ(core::ErrorReason(status), "STATISTICS_INVALID") << status;
}

std::string WithGram(const std::function<void(v1::GramState*)>& change) {
  v1::ContributionState proto = MakeState();
  change(proto.mutable_gram());
  return proto.SerializeAsString();
}

INSTANTIATE_TEST_SUITE_P(
    Bytes, BadContributionStateTest,
    ::testing::ValuesIn(std::vector<BadBytes>{
        {"nothing", [] { return std::string(); }},
        {"no statistics",
         [] {
           v1::ContributionState proto = MakeState();
           proto.clear_statistics();
           return proto.SerializeAsString();
         }},
        {"statistics twice",
         [] {
           v1::ContributionState proto;
           *proto.mutable_statistics() = MakeState().statistics();
           return proto.SerializeAsString() + proto.SerializeAsString();
         }},
        {"a field that is not known",
         [] { return MakeState().SerializeAsString() + "\x1A\x01x"; }},
        {"a number in place of a message",
         [] { return MakeState().SerializeAsString() + "\x10\x01"; }},
        {"bytes after the end",
         [] { return MakeState().SerializeAsString() + "\x04"; }},
        {"statistics that are not protobuf",
         [] { return std::string("\x0A\x01\xFF"); }},
        {"a field of the Gram matrix that is not known",
         [] {
           const std::string gram =
               MakeState().gram().SerializeAsString() + "\x50\x01";
           v1::ContributionState proto;
           *proto.mutable_statistics() = MakeState().statistics();
           return proto.SerializeAsString() + "\x12" +
                  static_cast<char>(gram.size()) + gram;
         }},
        {"rows above what a sum takes",
         [] {
           return WithGram(
               [](v1::GramState* gram) { gram->set_rows(uint64_t{1} << 63); });
         }},
        {"clipped elements above what a count takes",
         [] {
           return WithGram([](v1::GramState* gram) {
             gram->set_clipped_count(std::numeric_limits<uint64_t>::max());
           });
         }},
        {"sums that are not whole",
         [] {
           const std::string gram(
               "\x32\x07"
               "1234567",
               9);
           v1::ContributionState proto;
           *proto.mutable_statistics() = MakeState().statistics();
           return proto.SerializeAsString() + "\x12" +
                  static_cast<char>(gram.size()) + gram;
         }},
        {"sums that are not packed",
         [] {
           const std::string gram(
               "\x31"
               "12345678",
               9);
           v1::ContributionState proto;
           *proto.mutable_statistics() = MakeState().statistics();
           return proto.SerializeAsString() + "\x12" +
                  static_cast<char>(gram.size()) + gram;
         }},
    }),
    testing::NameOfCase());

TEST(ContributionStateTest, AnyCutIsRefusedOrHasAllStatistics) {
  const v1::ContributionState proto = MakeState();
  const std::string bytes = proto.SerializeAsString();
  const std::string statistics = proto.statistics().SerializeAsString();
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::string cut = bytes.substr(0, size);
    const absl::StatusOr<ContributionStateBytes> split =
        SplitContributionState(cut);
    if (split.ok()) {
      EXPECT_EQ(split->statistics, statistics) << size;
    }
  }
}

// Zeros, and so many that are not finite, with a Gram state of so many rows of
// three.
absl::Status CheckRows(int64_t rows, int64_t left_out, int64_t total,
                       int64_t non_finite) {
  std::vector<float> elements(static_cast<size_t>(total));
  std::fill_n(elements.begin(), non_finite, std::nanf(""));
  core::TensorStatistics statistics(1, 3);
  statistics.Update(*core::BlockLayout::Create({total}, {}),
                    core::ElementType::kFloat32, 0, total,
                    reinterpret_cast<const uint8_t*>(elements.data()), nullptr);
  core::GramState::Parts parts;
  parts.exponents = {0, 0, 0};
  parts.part_size = 3;
  parts.rows = rows;
  parts.left_out_rows = left_out;
  parts.code_sums.assign(6, 0);
  return CheckGramFits(*core::GramState::FromParts(parts), statistics);
}

TEST(CheckGramFitsTest, RowsAreThoseOfTheElements) {
  EXPECT_EQ(CheckRows(10, 0, 30, 0), absl::OkStatus());
  for (const int64_t rows : {9, 11}) {
    EXPECT_EQ(core::ErrorReason(CheckRows(rows, 0, 30, 0)),
              "STATISTICS_INVALID");
  }
  // Nothing is left out without an element that is not finite.
  EXPECT_FALSE(CheckRows(9, 1, 30, 0).ok());
  // Four of them are in two to four rows of three.
  EXPECT_FALSE(CheckRows(9, 1, 30, 4).ok());
  EXPECT_EQ(CheckRows(8, 2, 30, 4), absl::OkStatus());
  EXPECT_EQ(CheckRows(6, 4, 30, 4), absl::OkStatus());
  EXPECT_FALSE(CheckRows(5, 5, 30, 4).ok());
  EXPECT_FALSE(CheckRows(8, 2, 31, 4).ok());
}

// Rows whose Gram state has its sums of squares multiplied.
absl::Status CheckSquares(const std::vector<float>& elements, int64_t factor) {
  constexpr int64_t kFeatures = 4;
  const auto count = static_cast<int64_t>(elements.size());
  const auto* data = reinterpret_cast<const uint8_t*>(elements.data());
  core::TensorStatistics statistics(1, 3);
  statistics.Update(*core::BlockLayout::Create({count}, {}),
                    core::ElementType::kFloat32, 0, count, data, nullptr);
  absl::StatusOr<core::GramState> gram =
      core::GramState::Create(std::vector<int>(kFeatures, -6), kFeatures);
  gram->Update(core::ElementType::kFloat32, count / kFeatures, data, nullptr);
  gram->Finish(nullptr);
  core::GramState::Parts parts = gram->ToParts();
  for (int64_t& sum : parts.code_sums) sum *= factor;
  return CheckGramFits(*core::GramState::FromParts(parts), statistics);
}

TEST(CheckGramFitsTest, SquaresAreThoseOfTheElements) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> elements(400);
  for (float& x : elements) x = normal(random);
  EXPECT_EQ(CheckSquares(elements, 1), absl::OkStatus());
  EXPECT_EQ(core::ErrorReason(CheckSquares(elements, 2)), "STATISTICS_INVALID");
  EXPECT_EQ(core::ErrorReason(CheckSquares(elements, 0)), "STATISTICS_INVALID");
  // Where elements were limited, only more squares are too many.
  elements[5] = 1e5;
  EXPECT_EQ(CheckSquares(elements, 1), absl::OkStatus());
  // What all steps round away may be there.
  EXPECT_EQ(CheckSquares(std::vector<float>(400, 0.007f), 1), absl::OkStatus());
}

}  // namespace
}  // namespace quantd::server
