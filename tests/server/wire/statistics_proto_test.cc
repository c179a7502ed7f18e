#include "server/wire/statistics_proto.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "core/errors.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/statistics_state.h"
#include "core/types/block_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/core/kernel_test_util.h"
#include "tests/support/case_name.h"
#include "tests/support/sanitizers.h"

namespace quantd::server::statistics_proto_test {
namespace {

using core::ElementType;
using core::LayoutCase;
using core::StatisticsState;
using ::testing::HasSubstr;

StatisticsState EmptyState(const LayoutCase& layout_case, int mantissa_bits) {
  StatisticsState state;
  state.block_size = layout_case.block;
  state.shape = layout_case.shape;
  state.statistics =
      core::TensorStatistics(layout_case.Layout().scale_count(), mantissa_bits);
  return state;
}

StatisticsState MakeState(const LayoutCase& layout_case, ElementType type,
                          int mantissa_bits) {
  const core::BlockLayout layout = layout_case.Layout();
  const auto reals =
      core::MakeReals(type, layout.element_count(), 0.1, true, 1);
  StatisticsState state = EmptyState(layout_case, mantissa_bits);
  state.statistics.Update(layout, type, 0, layout.element_count(), reals.data(),
                          nullptr);
  return state;
}

std::string Bytes(const StatisticsState& state) {
  v1::StatisticsState proto;
  StateToProto(state, &proto);
  return proto.SerializeAsString();
}

TEST(StatisticsProtoTest, KeepsStatesExactly) {
  for (const LayoutCase& layout_case : core::AllLayoutCases()) {
    for (const ElementType type : core::kAllElementTypes) {
      for (const int m : {2, 3, 7, 10}) {
        SCOPED_TRACE(absl::StrCat(layout_case.Name(), " m ", m));
        const StatisticsState want = MakeState(layout_case, type, m);
        v1::StatisticsState proto;
        StateToProto(want, &proto);
        const auto got = StateFromProto(proto);
        ASSERT_TRUE(got.ok()) << got.status();
        EXPECT_EQ(got->shape, want.shape);
        EXPECT_EQ(got->block_size, core::CanonicalBlockSize(want.block_size));
        ASSERT_EQ(got->statistics.scale_count(), want.statistics.scale_count());
        for (int64_t i = 0; i < got->statistics.scale_count(); ++i) {
          ASSERT_TRUE(got->statistics.histograms()[i] ==
                      want.statistics.histograms()[i]);
        }
        EXPECT_EQ(Bytes(*got), proto.SerializeAsString());
      }
    }
  }
}

TEST(StatisticsProtoTest, ZerosAsBlockSizeGiveTheBytesOfPerTensor) {
  EXPECT_EQ(Bytes(MakeState({{3, 50}, {}}, ElementType::kFloat32, 5)),
            Bytes(MakeState({{3, 50}, {0, 0}}, ElementType::kFloat32, 5)));
}

// The elements come in pieces, on some threads and SIMD target, into several
// states that are then merged in some order.
TEST(StatisticsProtoTest, GivesTheSameBytesHoweverTheElementsWereSplit) {
  std::mt19937 random(7);
  core::ThreadPool pool(3);
  const std::vector<std::string> targets = core::AvailableSimdTargets();
  for (const LayoutCase& layout_case :
       {LayoutCase{{150, 1000}, {}}, LayoutCase{{150, 1000}, {1, 0}},
        LayoutCase{{150, 1000}, {0, 1}}, LayoutCase{{150, 1000}, {1, 32}},
        LayoutCase{{15, 10, 1000}, {2, 3, 300}}}) {
    SCOPED_TRACE(layout_case.Name());
    const core::BlockLayout layout = layout_case.Layout();
    const int64_t count = layout.element_count();
    const int m = core::DefaultMantissaBits(layout.scale_count());
    for (const ElementType type : core::kAllElementTypes) {
      if (testing::kSanitized && type != ElementType::kFloat32) continue;
      const int64_t element_bytes = core::ElementSizeBytes(type);
      const auto reals = core::MakeReals(type, count, 0.1, true, 5);
      StatisticsState whole = EmptyState(layout_case, m);
      whole.statistics.Update(layout, type, 0, count, reals.data(), nullptr);
      const std::string want = Bytes(whole);
      const std::vector<int> part_counts = testing::kSanitized
                                               ? std::vector<int>{7}
                                               : std::vector<int>{1, 2, 7, 64};
      for (const int parts : part_counts) {
        SCOPED_TRACE(absl::StrCat(core::ElementTypeName(type), " in ", parts));
        std::vector<StatisticsState> states(parts, EmptyState(layout_case, m));
        for (int64_t first = 0; first < count;) {
          ASSERT_TRUE(
              core::SetSimdTarget(targets[random() % targets.size()]).ok());
          const int64_t size =
              std::min<int64_t>(count - first, 1 + random() % 70000);
          states[random() % parts].statistics.Update(
              layout, type, first, size, reals.data() + first * element_bytes,
              random() % 2 ? &pool : nullptr);
          first += size;
        }
        while (states.size() > 1) {
          std::shuffle(states.begin(), states.end(), random);
          const StatisticsState part = std::move(states.back());
          states.pop_back();
          ASSERT_TRUE(core::MergeState(part, &states.front()).ok());
        }
        ASSERT_TRUE(Bytes(states.front()) == want);
      }
      ASSERT_TRUE(core::SetSimdTarget("auto").ok());
    }
  }
}

TEST(StatisticsProtoTest, MergesWhatWasStored) {
  const LayoutCase layout_case{{4, 300}, {1, 0}};
  StatisticsState once = MakeState(layout_case, ElementType::kFloat32, 5);
  v1::StatisticsState proto;
  StateToProto(once, &proto);
  auto stored = StateFromProto(proto);
  ASSERT_TRUE(stored.ok());
  ASSERT_TRUE(core::MergeState(once, &*stored).ok());
  ASSERT_TRUE(core::MergeState(StatisticsState(once), &once).ok());
  EXPECT_EQ(Bytes(*stored), Bytes(once));
}

// Four channels: some values and a NaN; from 2 to 3; only NaN; an infinity.
v1::StatisticsState SmallProto() {
  const double values[] = {-1.5, 0,   NAN, 1.25, 2, 3,        2.5, 2.000001,
                           NAN,  NAN, NAN, NAN,  1, INFINITY, 1,   -0.0};
  std::vector<uint8_t> reals(sizeof(values));
  for (size_t i = 0; i < std::size(values); ++i) {
    core::StoreReal(ElementType::kFloat64, values[i], reals.data(),
                    static_cast<int64_t>(i));
  }
  StatisticsState state = EmptyState({{4, 4}, {1, 0}}, 3);
  state.statistics.Update(*core::BlockLayout::Create({4, 4}, {1, 0}),
                          ElementType::kFloat64, 0, 16, reals.data(), nullptr);
  v1::StatisticsState proto;
  StateToProto(state, &proto);
  return proto;
}

struct ErrorCase {
  std::string name;
  std::function<void(v1::StatisticsState*)> change;
  // Part of the message.
  std::string expected;

  friend std::ostream& operator<<(std::ostream& os, const ErrorCase& c) {
    return os << c.name;
  }
};

std::vector<ErrorCase> StatesThatCannotBe() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
  using Proto = v1::StatisticsState;
  return {
      {"version", [](Proto* p) { p->set_version(2); }, "version is 2"},
      {"no version", [](Proto* p) { p->clear_version(); }, "expected 1"},
      {"few bits", [](Proto* p) { p->set_mantissa_bits(1); }, "2 to 10"},
      {"many bits", [](Proto* p) { p->set_mantissa_bits(11); }, "2 to 10"},
      {"huge bits", [](Proto* p) { p->set_mantissa_bits(1u << 31); }, "2 to"},
      {"other bits", [](Proto* p) { p->set_mantissa_bits(2); }, ""},
      {"negative shape", [](Proto* p) { p->set_shape(0, -4); }, "at least 0"},
      {"huge shape", [](Proto* p) { p->set_shape(1, int64_t{1} << 60); },
       "2^56"},
      {"rank of the block size", [](Proto* p) { p->add_block_size(1); },
       "per dimension"},
      {"negative block", [](Proto* p) { p->set_block_size(0, -1); },
       "at least 0"},
      {"scale count", [](Proto* p) { p->set_shape(0, int64_t{1} << 40); },
       "expected 1099511627776"},
      {"a minimum more", [](Proto* p) { p->add_min(1); }, "5 minima"},
      {"a maximum less", [](Proto* p) { p->mutable_max()->RemoveLast(); },
       "3 maxima"},
      {"a histogram more", [](Proto* p) { p->add_histograms(); },
       "5 histograms"},
      {"count", [](Proto* p) { p->mutable_statistics()->set_count(17); },
       "lack 1 of the 11"},
      {"small count", [](Proto* p) { p->mutable_statistics()->set_count(15); },
       "finite ones that are left"},
      {"huge count",
       [](Proto* p) { p->mutable_statistics()->set_count(kHuge); },
       "at most 17592186044416"},
      {"huge NaN",
       [](Proto* p) { p->mutable_statistics()->set_nan_count(kHuge); },
       "more than the 16"},
      {"NaN", [](Proto* p) { p->mutable_statistics()->set_nan_count(3); },
       "lack"},
      {"zeros", [](Proto* p) { p->mutable_statistics()->set_zero_count(3); },
       "bins of zero"},
      {"minimum", [](Proto* p) { p->mutable_statistics()->set_min(-1); },
       "over all"},
      {"maximum", [](Proto* p) { p->mutable_statistics()->set_max(NAN); },
       "over all"},
      {"mark beyond", [](Proto* p) { p->set_non_finite_scale_index(2, 4); },
       "out of place"},
      {"huge mark", [](Proto* p) { p->set_non_finite_scale_index(2, kHuge); },
       "out of place"},
      {"marks not in order",
       [](Proto* p) { p->set_non_finite_scale_index(1, 0); }, "out of place"},
      {"no mark", [](Proto* p) { p->clear_non_finite_scale_index(); },
       "non-finite elements"},
      {"extremes of none", [](Proto* p) { p->set_min(2, 0); }, "of no element"},
      {"order of extremes", [](Proto* p) { p->set_min(1, 4); }, "in order"},
      {"NaN as minimum", [](Proto* p) { p->set_min(1, NAN); }, "finite"},
      {"infinite maximum", [](Proto* p) { p->set_max(1, kInfinity); },
       "finite"},
      {"minimum in another bin", [](Proto* p) { p->set_min(1, 1.9); },
       "first and the last bin"},
      {"maximum in another bin", [](Proto* p) { p->set_max(1, 2.9); },
       "first and the last bin"},
      {"list sizes", [](Proto* p) { p->mutable_histograms(1)->add_count(1); },
       "3 keys"},
      {"high halves",
       [](Proto* p) { p->mutable_histograms(1)->add_low_square_sum_high(0); },
       "high halves"},
      {"descending keys",
       [](Proto* p) { p->mutable_histograms(1)->set_key_delta(1, 0); },
       "ascending"},
      {"key beyond",
       [](Proto* p) { p->mutable_histograms(1)->set_key_delta(1, 1 << 12); },
       "12 bits"},
      {"keys that overflow",
       [](Proto* p) { p->mutable_histograms(1)->set_key_delta(1, 0xFFFFFFFF); },
       "12 bits"},
      {"key of NaN",
       [](Proto* p) { p->mutable_histograms(1)->set_key_delta(0, 0); },
       "no finite element"},
      {"key of Inf",
       [](Proto* p) { p->mutable_histograms(1)->set_key_delta(0, 0xFF8); },
       "no finite element"},
      {"empty bin", [](Proto* p) { p->mutable_histograms(1)->set_count(0, 0); },
       "has 0 elements"},
      {"huge bin",
       [](Proto* p) { p->mutable_histograms(1)->set_count(0, kHuge); },
       "finite ones that are left"},
      {"low sum",
       [](Proto* p) {
         p->mutable_histograms(1)->set_low_sum(0, 2 * ((1 << 20) - 1) + 1);
       },
       "expected 0 to 2097150"},
      {"small squares",
       [](Proto* p) {
         p->mutable_histograms(1)->set_low_sum(0, 6);
         p->mutable_histograms(1)->set_low_square_sum(0, 16);
       },
       "cannot sum up"},
      {"large squares",
       [](Proto* p) {
         p->mutable_histograms(1)->set_low_sum(0, 6);
         p->mutable_histograms(1)->set_low_square_sum(0, 38);
       },
       "cannot sum up"},
      {"odd squares",
       [](Proto* p) {
         p->mutable_histograms(1)->set_low_sum(0, 6);
         p->mutable_histograms(1)->set_low_square_sum(0, 19);
       },
       "cannot sum up"},
      {"high squares",
       [](Proto* p) {
         for (int i = 0; i < 3; ++i) {
           p->mutable_histograms(1)->add_low_square_sum_high(1);
         }
       },
       "cannot sum up"},
  };
}

class StatisticsProtoErrorTest : public ::testing::TestWithParam<ErrorCase> {};

TEST_P(StatisticsProtoErrorTest, RefusesAStateThatCannotBe) {
  v1::StatisticsState proto = SmallProto();
  ASSERT_TRUE(StateFromProto(proto).ok());
  GetParam().change(&proto);
  const auto got = StateFromProto(proto);
  ASSERT_FALSE(got.ok());
  EXPECT_EQ(core::ErrorReason(got.status()), "STATISTICS_INVALID");
  EXPECT_THAT(std::string(got.status().message()),
              HasSubstr(GetParam().expected));
}

INSTANTIATE_TEST_SUITE_P(Table, StatisticsProtoErrorTest,
                         ::testing::ValuesIn(StatesThatCannotBe()),
                         testing::NameOfCase());

TEST(StatisticsProtoTest, RefusesTheBitsOfMinusZero) {
  v1::StatisticsState proto = SmallProto();
  proto.mutable_statistics()->set_zero_count(0);
  v1::Histogram* histogram = proto.mutable_histograms(1);
  histogram->Clear();
  // The bin just below that of +0, all four elements with low bits 0.
  histogram->add_key_delta((1 << 11) - 1);
  histogram->add_count(4);
  histogram->add_low_sum(0);
  histogram->add_low_square_sum(0);
  proto.set_min(1, -1e-45);
  proto.set_max(1, -1e-45);
  const auto got = StateFromProto(proto);
  EXPECT_THAT(std::string(got.status().message()), HasSubstr("expected 4 to"));
}

TEST(StatisticsProtoTest, TakesSumsOfSquaresBeyond64Bits) {
  const uint64_t low = (1 << 20) - 1;
  const uint64_t count = uint64_t{1} << 40;
  v1::StatisticsState proto;
  proto.set_version(1);
  proto.set_mantissa_bits(3);
  proto.add_shape(int64_t{1} << 40);
  proto.mutable_statistics()->set_count(count);
  proto.mutable_statistics()->set_min(1);
  proto.mutable_statistics()->set_max(1.0625);
  proto.add_min(1);
  proto.add_max(1.0625);
  v1::Histogram* histogram = proto.add_histograms();
  histogram->add_key_delta(core::HistogramKey(1.0f, 3));
  histogram->add_count(count);
  histogram->add_low_sum(count * low);
  const absl::uint128 square_sum = absl::uint128(count) * low * low;
  histogram->add_low_square_sum(absl::Uint128Low64(square_sum));
  histogram->add_low_square_sum_high(absl::Uint128High64(square_sum));
  const auto got = StateFromProto(proto);
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(Bytes(*got), proto.SerializeAsString());
  histogram->set_low_square_sum(0, histogram->low_square_sum(0) + 2);
  EXPECT_FALSE(StateFromProto(proto).ok());
}

// Whatever is taken of random changes is a state: it comes out as it went in.
TEST(StatisticsProtoTest, KeepsWhateverItTakesOfDamagedBytes) {
  std::mt19937 random(1);
  const std::string bytes = SmallProto().SerializeAsString();
  const int rounds = testing::kSanitized ? 20000 : 200000;
  int parsed = 0;
  for (int round = 0; round < rounds; ++round) {
    std::string damaged = bytes;
    for (uint32_t i = 0; i <= random() % 3; ++i) {
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    v1::StatisticsState proto;
    if (!proto.ParseFromString(damaged)) continue;
    ++parsed;
    const auto state = StateFromProto(proto);
    if (!state.ok()) {
      ASSERT_EQ(core::ErrorReason(state.status()), "STATISTICS_INVALID");
      continue;
    }
    const std::string kept = Bytes(*state);
    v1::StatisticsState again;
    ASSERT_TRUE(again.ParseFromString(kept));
    const auto restored = StateFromProto(again);
    ASSERT_TRUE(restored.ok()) << restored.status();
    ASSERT_EQ(Bytes(*restored), kept);
  }
  EXPECT_GT(parsed, rounds / 200);
}

v1::FeatureMoments SomeMoments() {
  const std::vector<float> rows = {1, -2, 0.5F, 3, 0, 1e30F};
  core::AxisMoments moments{1, core::FeatureMoments(3)};
  moments.moments.Update({3, 1}, ElementType::kFloat32, 0, 6,
                         reinterpret_cast<const uint8_t*>(rows.data()),
                         nullptr);
  v1::FeatureMoments proto;
  MomentsToProto(moments, &proto);
  return proto;
}

TEST(StatisticsProtoTest, MomentsGoThereAndBack) {
  const v1::FeatureMoments proto = SomeMoments();
  const absl::StatusOr<core::AxisMoments> moments = MomentsFromProto(proto);
  ASSERT_TRUE(moments.ok()) << moments.status();
  EXPECT_EQ(moments->axis, 1);
  EXPECT_EQ(moments->moments.count(0), 2);
  EXPECT_EQ(moments->moments.square_sum(1), 4);
  v1::FeatureMoments again;
  MomentsToProto(*moments, &again);
  EXPECT_EQ(again.SerializeAsString(), proto.SerializeAsString());
}

TEST(StatisticsProtoTest, RefusesMomentsThatNoElementsHave) {
  using Proto = v1::FeatureMoments;
  const std::vector<std::function<void(Proto*)>> changes = {
      [](Proto* p) { p->add_count(1); },
      [](Proto* p) { p->set_count(0, ~uint64_t{0}); },
      [](Proto* p) { p->set_count(0, 0); },
      [](Proto* p) { p->set_left_out(0, uint64_t{1} << 63); },
      [](Proto* p) { p->mutable_sum()->set_width(~uint32_t{0}); },
      [](Proto* p) { p->mutable_square_sum()->set_width(1000); },
      [](Proto* p) { p->mutable_sum()->set_exponent(-2147483647); },
      [](Proto* p) { p->mutable_square_sum()->set_exponent(2147483647); },
      [](Proto* p) { p->mutable_sum()->mutable_integers()->pop_back(); },
      [](Proto* p) { p->clear_square_sum(); },
      [](Proto* p) {
        p->mutable_square_sum()->set_integers(
            std::string(p->square_sum().integers().size(), '\xFF'));
      },
  };
  for (size_t i = 0; i < changes.size(); ++i) {
    v1::FeatureMoments proto = SomeMoments();
    changes[i](&proto);
    EXPECT_EQ(core::ErrorReason(MomentsFromProto(proto).status()),
              "STATISTICS_INVALID")
        << i;
  }
}

}  // namespace
}  // namespace quantd::server::statistics_proto_test
