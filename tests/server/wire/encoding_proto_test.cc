#include "server/wire/encoding_proto.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/errors.h"
#include "core/types/encoding.h"
#include "gtest/gtest.h"

namespace quantd::server {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

v1::Encoding Int8() {
  v1::Encoding proto;
  proto.set_format(v1::NUMBER_FORMAT_INT8);
  proto.add_scale(0.5f);
  return proto;
}

TEST(EncodingFromProtoTest, IsTheInverseOfEncodingToProto) {
  core::Encoding encoding;
  encoding.format = core::NumberFormat{v1::NUMBER_FORMAT_UINT4};
  encoding.block_size = {1, 0, 128};
  encoding.scale = {0.25f, 1e-30f, 3e38f};
  encoding.zero_point = {1, 14, 7};
  encoding.qmin = 1;
  encoding.qmax = 14;
  encoding.degenerate_count = 2;
  v1::Encoding proto;
  EncodingToProto(encoding, &proto);
  absl::StatusOr<core::Encoding> back = EncodingFromProto(proto);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, encoding);

  encoding.exclude_zero = true;
  encoding.zero_point = {-4000000, 4000000, 0};
  EncodingToProto(encoding, &proto);
  back = EncodingFromProto(proto);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, encoding);
}

TEST(EncodingFromProtoTest, OverwritesWhatWasInTheMessage) {
  v1::Encoding proto = Int8();
  proto.add_scale(7);
  proto.add_zero_point(3);
  core::Encoding encoding;
  encoding.format = core::NumberFormat{v1::NUMBER_FORMAT_INT8};
  encoding.scale = {0.5f};
  EncodingToProto(encoding, &proto);
  EXPECT_EQ(proto.scale_size(), 1);
  EXPECT_EQ(proto.zero_point_size(), 0);
}

TEST(EncodingFromProtoTest, CodesAreThoseOfTheFormatUnlessGiven) {
  absl::StatusOr<core::Encoding> encoding = EncodingFromProto(Int8());
  ASSERT_TRUE(encoding.ok()) << encoding.status();
  EXPECT_EQ(encoding->qmin, -128);
  EXPECT_EQ(encoding->qmax, 127);

  v1::Encoding proto = Int8();
  proto.set_format(v1::NUMBER_FORMAT_UINT16);
  encoding = EncodingFromProto(proto);
  ASSERT_TRUE(encoding.ok()) << encoding.status();
  EXPECT_EQ(encoding->qmin, 0);
  EXPECT_EQ(encoding->qmax, 65535);

  // A given 0 is not the same as nothing.
  proto = Int8();
  proto.set_qmin(0);
  encoding = EncodingFromProto(proto);
  ASSERT_TRUE(encoding.ok()) << encoding.status();
  EXPECT_EQ(encoding->qmin, 0);
  EXPECT_EQ(encoding->qmax, 127);
  proto = Int8();
  proto.set_qmax(0);
  encoding = EncodingFromProto(proto);
  ASSERT_TRUE(encoding.ok()) << encoding.status();
  EXPECT_EQ(encoding->qmin, -128);
  EXPECT_EQ(encoding->qmax, 0);
}

template <typename Message>
struct ErrorCase {
  std::string name;
  std::function<void(Message&)> change;
  std::string reason;
  std::string field;
};

TEST(EncodingFromProtoTest, NamesTheFieldAtFault) {
  using E = v1::Encoding;
  const std::vector<ErrorCase<E>> cases = {
      {"format unset", [](E& e) { e.clear_format(); }, "FORMAT_UNKNOWN",
       "format"},
      {"format 9999",
       [](E& e) { e.set_format(static_cast<v1::NumberFormat>(9999)); },
       "FORMAT_UNKNOWN", "format"},
      {"format -1",
       [](E& e) { e.set_format(static_cast<v1::NumberFormat>(-1)); },
       "FORMAT_UNKNOWN", "format"},
      {"format 17",
       [](E& e) { e.set_format(static_cast<v1::NumberFormat>(17)); },
       "FORMAT_UNKNOWN", "format"},
      {"reserved format",
       [](E& e) { e.set_format(v1::NUMBER_FORMAT_FLOAT8_E5M2); },
       "FORMAT_NOT_IMPLEMENTED", "format"},
      {"negative block", [](E& e) { e.add_block_size(-1); },
       "BLOCK_SIZE_INVALID", "block_size"},
      {"17 blocks",
       [](E& e) {
         for (int i = 0; i < 17; ++i) e.add_block_size(0);
       },
       "BLOCK_SIZE_INVALID", "block_size"},
      {"no scale", [](E& e) { e.clear_scale(); }, "SCALE_COUNT", "scale"},
      {"scale 0", [](E& e) { e.set_scale(0, 0); }, "SCALE_INVALID", "scale"},
      {"scale -0", [](E& e) { e.set_scale(0, -0.0f); }, "SCALE_INVALID",
       "scale"},
      {"scale negative", [](E& e) { e.set_scale(0, -1); }, "SCALE_INVALID",
       "scale"},
      {"scale NaN", [](E& e) { e.set_scale(0, kNan); }, "SCALE_INVALID",
       "scale"},
      {"scale Inf", [](E& e) { e.add_scale(kInfinity); }, "SCALE_INVALID",
       "scale"},
      {"scale subnormal", [](E& e) { e.set_scale(0, 1e-39f); }, "SCALE_INVALID",
       "scale"},
      {"too many zero points",
       [](E& e) {
         e.add_zero_point(0);
         e.add_zero_point(0);
       },
       "SCALE_COUNT", "zero_point"},
      {"too few zero points",
       [](E& e) {
         e.add_scale(1);
         e.add_zero_point(0);
       },
       "SCALE_COUNT", "zero_point"},
      {"zero point too large", [](E& e) { e.add_zero_point(128); },
       "ZERO_POINT_RANGE", "zero_point"},
      {"zero point too small", [](E& e) { e.add_zero_point(-129); },
       "ZERO_POINT_RANGE", "zero_point"},
      {"zero point outside of qmin",
       [](E& e) {
         e.set_qmin(1);
         e.add_zero_point(0);
       },
       "ZERO_POINT_RANGE", "zero_point"},
      {"no zero point where 0 is outside", [](E& e) { e.set_qmin(1); },
       "ZERO_POINT_RANGE", "zero_point"},
      {"zero point far outside",
       [](E& e) {
         e.set_exclude_zero(true);
         e.add_zero_point((1 << 22) + 1);
       },
       "ZERO_POINT_RANGE", "zero_point"},
      {"smallest zero point there is",
       [](E& e) {
         e.set_exclude_zero(true);
         e.add_zero_point(std::numeric_limits<int32_t>::min());
       },
       "ZERO_POINT_RANGE", "zero_point"},
      {"qmin outside", [](E& e) { e.set_qmin(-129); }, "CODE_RANGE_INVALID",
       "qmin"},
      {"qmax outside", [](E& e) { e.set_qmax(128); }, "CODE_RANGE_INVALID",
       "qmax"},
      {"qmin is qmax",
       [](E& e) {
         e.set_qmin(5);
         e.set_qmax(5);
       },
       "CODE_RANGE_INVALID", "qmin"},
      {"qmin above qmax",
       [](E& e) {
         e.set_qmin(5);
         e.set_qmax(-5);
       },
       "CODE_RANGE_INVALID", "qmin"},
  };
  for (const ErrorCase<E>& c : cases) {
    v1::Encoding proto = Int8();
    c.change(proto);
    const absl::Status status = EncodingFromProto(proto).status();
    EXPECT_EQ(core::ErrorReason(status), c.reason) << c.name << status;
    EXPECT_EQ(core::ErrorField(status), c.field) << c.name;
  }
}

v1::EncodingSpec Int8Spec() {
  v1::EncodingSpec proto;
  proto.set_format(v1::NUMBER_FORMAT_INT8);
  return proto;
}

TEST(SpecFromProtoTest, TakesOverEveryField) {
  v1::EncodingSpec proto;
  proto.set_format(v1::NUMBER_FORMAT_UINT4);
  proto.add_block_size(1);
  proto.add_block_size(32);
  proto.set_symmetry(v1::SYMMETRY_ASYMMETRIC);
  proto.set_method(v1::CALIBRATION_METHOD_MIN_MAX);
  proto.set_exclude_zero(true);
  absl::StatusOr<core::EncodingSpec> spec = SpecFromProto(proto);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(static_cast<int>(spec->format), v1::NUMBER_FORMAT_UINT4);
  EXPECT_EQ(spec->block_size, (std::vector<int64_t>{1, 32}));
  EXPECT_EQ(spec->symmetry, core::Symmetry::kAsymmetric);
  EXPECT_EQ(spec->method, core::CalibrationMethod::kMinMax);
  EXPECT_TRUE(spec->exclude_zero);
  EXPECT_FALSE(spec->unsigned_if_non_negative);

  proto = Int8Spec();
  proto.set_unsigned_if_non_negative(true);
  spec = SpecFromProto(proto);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->symmetry, core::Symmetry::kDefault);
  EXPECT_EQ(spec->method, core::CalibrationMethod::kDefault);
  EXPECT_TRUE(spec->unsigned_if_non_negative);
}

TEST(SpecFromProtoTest, NamesTheFieldAtFault) {
  using S = v1::EncodingSpec;
  const std::vector<ErrorCase<S>> cases = {
      {"format unset", [](S& s) { s.clear_format(); }, "FORMAT_UNKNOWN",
       "format"},
      {"reserved format", [](S& s) { s.set_format(v1::NUMBER_FORMAT_NF4); },
       "FORMAT_NOT_IMPLEMENTED", "format"},
      {"symmetry 99",
       [](S& s) { s.set_symmetry(static_cast<v1::Symmetry>(99)); },
       "ENUM_UNKNOWN", "symmetry"},
      {"method 99",
       [](S& s) { s.set_method(static_cast<v1::CalibrationMethod>(99)); },
       "ENUM_UNKNOWN", "method"},
      {"reserved method",
       [](S& s) { s.set_method(v1::CALIBRATION_METHOD_ENTROPY); },
       "METHOD_NOT_IMPLEMENTED", "method"},
      {"symmetric unsigned",
       [](S& s) {
         s.set_format(v1::NUMBER_FORMAT_UINT8);
         s.set_symmetry(v1::SYMMETRY_STRICT);
       },
       "SYMMETRY_INVALID", "symmetry"},
      {"exclude_zero with symmetric", [](S& s) { s.set_exclude_zero(true); },
       "SYMMETRY_INVALID", "symmetry"},
      {"negative block", [](S& s) { s.add_block_size(-2); },
       "BLOCK_SIZE_INVALID", "block_size"},
  };
  for (const ErrorCase<S>& c : cases) {
    v1::EncodingSpec proto = Int8Spec();
    c.change(proto);
    const absl::Status status = SpecFromProto(proto).status();
    EXPECT_EQ(core::ErrorReason(status), c.reason) << c.name << status;
    EXPECT_EQ(core::ErrorField(status), c.field) << c.name;
  }
}

v1::TensorDescription Float16(const std::vector<int64_t>& shape) {
  v1::TensorDescription proto;
  proto.set_element_type(v1::ELEMENT_TYPE_FLOAT16);
  for (const int64_t size : shape) proto.add_shape(size);
  return proto;
}

TEST(DescriptionFromProtoTest, CountsElements) {
  absl::StatusOr<TensorDescription> description =
      DescriptionFromProto(Float16({3, 4, 5}));
  ASSERT_TRUE(description.ok()) << description.status();
  EXPECT_EQ(description->element_type, core::ElementType::kFloat16);
  EXPECT_EQ(description->shape, (std::vector<int64_t>{3, 4, 5}));
  EXPECT_EQ(description->element_count, 60);
  EXPECT_EQ(DescriptionFromProto(Float16({}))->element_count, 1);
  EXPECT_EQ(DescriptionFromProto(Float16({7, 0, 9}))->element_count, 0);
}

TEST(DescriptionFromProtoTest, NamesTheFieldAtFault) {
  using D = v1::TensorDescription;
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const auto shape = [](const std::vector<int64_t>& dimensions) {
    return [dimensions](D& d) { d = Float16(dimensions); };
  };
  const std::vector<ErrorCase<D>> cases = {
      {"type unset", [](D& d) { d.clear_element_type(); },
       "ELEMENT_TYPE_UNKNOWN", "element_type"},
      {"type 77",
       [](D& d) { d.set_element_type(static_cast<v1::ElementType>(77)); },
       "ELEMENT_TYPE_UNKNOWN", "element_type"},
      {"negative dimension", shape({2, -1}), "SHAPE_INVALID", "shape"},
      {"smallest dimension", shape({std::numeric_limits<int64_t>::min()}),
       "SHAPE_INVALID", "shape"},
      {"17 dimensions", shape(std::vector<int64_t>(17, 1)), "SHAPE_INVALID",
       "shape"},
      {"2^63 - 1", shape({kMax}), "SHAPE_INVALID", "shape"},
      {"2^56 + 1", shape({(int64_t{1} << 56) + 1}), "SHAPE_INVALID", "shape"},
      {"2^64", shape({int64_t{1} << 32, int64_t{1} << 32}), "SHAPE_INVALID",
       "shape"},
      {"2^64 and a 0", shape({int64_t{1} << 32, int64_t{1} << 32, 0}),
       "SHAPE_INVALID", "shape"},
      {"bad model", [](D& d) { d.mutable_name()->set_model("../x"); },
       "NAME_INVALID", "name.model"},
      {"bad revision", [](D& d) { d.mutable_name()->set_revision("a b"); },
       "NAME_INVALID", "name.revision"},
      {"bad tensor", [](D& d) { d.mutable_name()->set_tensor("\x01"); },
       "NAME_INVALID", "name.tensor"},
  };
  for (const ErrorCase<D>& c : cases) {
    D proto = Float16({2});
    c.change(proto);
    const absl::Status status = DescriptionFromProto(proto).status();
    EXPECT_EQ(core::ErrorReason(status), c.reason) << c.name << status;
    EXPECT_EQ(core::ErrorField(status), c.field) << c.name;
  }
}

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
