#include "server/wire/statistics_proto.h"

#include <cstdint>
#include <limits>

#include "absl/status/statusor.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "gtest/gtest.h"

namespace quantd::server {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(StatisticsToProtoTest, GivesCountsAndExtremes) {
  const float data[] = {1.5f, -2, 0, kNan, kInfinity, -kInfinity, -0.0f};
  absl::StatusOr<core::BlockLayout> layout = core::BlockLayout::Create({7}, {});
  ASSERT_TRUE(layout.ok());
  core::TensorStatistics statistics(1);
  statistics.Update(*layout, core::ElementType::kFloat32, 0, 7,
                    reinterpret_cast<const uint8_t*>(data), nullptr);
  v1::TensorStatistics proto;
  StatisticsToProto(statistics, &proto);
  EXPECT_EQ(proto.count(), 7u);
  EXPECT_EQ(proto.min(), -2);
  EXPECT_EQ(proto.max(), 1.5);
  EXPECT_EQ(proto.nan_count(), 1u);
  EXPECT_EQ(proto.positive_infinity_count(), 1u);
  EXPECT_EQ(proto.negative_infinity_count(), 1u);
  EXPECT_EQ(proto.zero_count(), 2u);
}

TEST(StatisticsToProtoTest, NothingFiniteHasNoExtremes) {
  v1::TensorStatistics proto;
  StatisticsToProto(core::TensorStatistics(3), &proto);
  EXPECT_EQ(proto.min(), 0);
  EXPECT_EQ(proto.max(), 0);
  EXPECT_EQ(proto.count(), 0u);
}

}  // namespace
}  // namespace quantd::server
