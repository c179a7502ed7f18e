#include "server/wire/encoding_proto.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/errors.h"
#include "core/types/encoding.h"
#include "gtest/gtest.h"
#include "tests/support/case_name.h"

namespace quantd::server::encoding_proto_test {
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

TEST(EncodingFromProtoTest, TakesOverRealZeroPoints) {
  v1::Encoding proto = Int8();
  proto.clear_scale();
  proto.clear_zero_point();
  proto.add_scale(0.5f);
  proto.add_scale(2);
  proto.add_real_zero_point(-0.5f);
  proto.add_real_zero_point(3);
  const absl::StatusOr<core::Encoding> encoding = EncodingFromProto(proto);
  ASSERT_TRUE(encoding.ok()) << encoding.status();
  EXPECT_TRUE(encoding->zero_points_are_real);
  EXPECT_EQ(encoding->real_zero_point, (std::vector<float>{-0.5f, 3}));
  v1::Encoding again;
  EncodingToProto(*encoding, &again);
  EXPECT_TRUE(again.zero_points_are_real());
  EXPECT_EQ(*EncodingFromProto(again), *encoding);
  proto.set_real_zero_point(0, 200);
  EXPECT_EQ(core::ErrorReason(EncodingFromProto(proto).status()),
            "ZERO_POINT_RANGE");
  v1::Encoding outline;
  EncodingWithoutScalesToProto(*encoding, true, &outline);
  EXPECT_TRUE(outline.chunks_have_zero_points());
  EXPECT_TRUE(EncodingWithoutScalesFromProto(outline)->zero_points_are_real);
  outline.set_chunks_have_zero_points(false);
  EXPECT_FALSE(EncodingWithoutScalesFromProto(outline).ok());
}

TEST(EncodingFromProtoTest, TakesOverScaleCodesCodebooksAndShapes) {
  core::Encoding nvfp4;
  nvfp4.format = core::NumberFormat{v1::NUMBER_FORMAT_NVFP4};
  nvfp4.block_size = {1, 16};
  nvfp4.qmax = 15;
  nvfp4.scale_type = core::ScaleType::kE4m3;
  nvfp4.scale_code = {0x38, 0x7E, 0x30, 0x01};
  nvfp4.outer_scale = {0.5f, 3};
  nvfp4.outer_block_size = {1, 0};
  nvfp4.scale_shape = {2, 2};
  nvfp4.scale = {0.5f, 224, 1.5f, 0x1.8p-8f};
  core::Encoding codebook;
  codebook.format = core::NumberFormat{v1::NUMBER_FORMAT_CODEBOOK8};
  codebook.scale_type = core::ScaleType::kBfloat16;
  codebook.scale = {2};
  codebook.codebook = {-1, 0, 0.3f};
  codebook.qmax = 2;
  core::Encoding float8;
  float8.format = core::NumberFormat{v1::NUMBER_FORMAT_MXFP8_E5M2};
  float8.qmax = 255;
  float8.no_saturation = true;
  float8.scale_type = core::ScaleType::kE8m0;
  float8.scale_code = {0, 0xFF, 127};
  float8.scale = {0x1p-127f, kNan, 1};
  for (const core::Encoding& encoding : {nvfp4, codebook, float8}) {
    v1::Encoding proto;
    EncodingToProto(encoding, &proto);
    absl::StatusOr<core::Encoding> back = EncodingFromProto(proto);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_TRUE(*back == encoding);

    // The defaults, and scales that follow from others, may be left out.
    if (encoding.scale_type != core::ScaleType::kBfloat16) {
      proto.clear_scale_type();
      proto.clear_scale();
    }
    proto.clear_qmin();
    proto.clear_qmax();
    back = EncodingFromProto(proto);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_TRUE(*back == encoding);
  }
}

TEST(EncodingFromProtoTest, IgnoresScalesThatFollowFromCodes) {
  v1::Encoding proto;
  proto.set_format(v1::NUMBER_FORMAT_MXINT8);
  proto.set_scale_code("\x7f\x80");
  proto.add_scale(-7);
  const absl::StatusOr<core::Encoding> encoding = EncodingFromProto(proto);
  ASSERT_TRUE(encoding.ok()) << encoding.status();
  EXPECT_EQ(encoding->scale, (std::vector<float>{0x1p-6f, 0x1p-5f}));
  EXPECT_EQ(encoding->qmin, -127);
}

template <typename Message>
struct ErrorCase {
  std::string name;
  std::function<void(Message&)> change;
  std::string reason;
  std::string field;

  friend std::ostream& operator<<(std::ostream& os, const ErrorCase& c) {
    return os << c.name;
  }
};

std::vector<ErrorCase<v1::Encoding>> EncodingFromProtoErrors() {
  using E = v1::Encoding;
  return {
      {"format unset", [](E& e) { e.clear_format(); }, "FORMAT_UNKNOWN",
       "format"},
      {"format 9999",
       [](E& e) { e.set_format(static_cast<v1::NumberFormat>(9999)); },
       "FORMAT_UNKNOWN", "format"},
      {"negative format",
       [](E& e) { e.set_format(static_cast<v1::NumberFormat>(-1)); },
       "FORMAT_UNKNOWN", "format"},
      {"format 17",
       [](E& e) { e.set_format(static_cast<v1::NumberFormat>(17)); },
       "FORMAT_UNKNOWN", "format"},
      {"scale type 99",
       [](E& e) { e.set_scale_type(static_cast<v1::ScaleType>(99)); },
       "ENUM_UNKNOWN", "scale_type"},
      {"negative scale type",
       [](E& e) { e.set_scale_type(static_cast<v1::ScaleType>(-1)); },
       "ENUM_UNKNOWN", "scale_type"},
      {"scale type of another format",
       [](E& e) {
         e.set_format(v1::NUMBER_FORMAT_MXFP8_E4M3);
         e.set_scale_type(v1::SCALE_TYPE_FLOAT32);
       },
       "SCALE_TYPE_INVALID", "scale_type"},
      {"no scale code",
       [](E& e) { e.set_format(v1::NUMBER_FORMAT_MXFP8_E4M3); }, "SCALE_COUNT",
       "scale_code"},
      {"no outer scale",
       [](E& e) {
         e.set_format(v1::NUMBER_FORMAT_NVFP4);
         e.set_scale_code("8");
       },
       "SCALE_COUNT", "outer_scale"},
      {"NaN of E4M3",
       [](E& e) {
         e.set_format(v1::NUMBER_FORMAT_NVFP4);
         e.set_scale_code("8\x7f");
         e.add_outer_scale(1);
       },
       "SCALE_INVALID", "scale_code"},
      {"scale code of float scales", [](E& e) { e.set_scale_code("8"); },
       "SCALE_TYPE_INVALID", "scale_code"},
      {"scale that is no float16",
       [](E& e) {
         e.set_scale_type(v1::SCALE_TYPE_FLOAT16);
         e.set_scale(0, 1e6f);
       },
       "SCALE_INVALID", "scale"},
      {"two outer scales without a shape",
       [](E& e) {
         e.set_format(v1::NUMBER_FORMAT_LPBQ);
         e.set_scale_code("\x01\x02");
         e.add_outer_scale(1);
         e.add_outer_scale(1);
       },
       "BLOCK_SIZE_INVALID", "scale_shape"},
      {"outer block that cuts a block",
       [](E& e) {
         e.set_format(v1::NUMBER_FORMAT_LPBQ);
         e.set_scale_code("\x01\x02");
         e.add_block_size(4);
         e.add_outer_block_size(6);
         e.add_outer_scale(1);
       },
       "BLOCK_SIZE_INVALID", "outer_block_size"},
      {"no codebook", [](E& e) { e.set_format(v1::NUMBER_FORMAT_CODEBOOK4); },
       "CODEBOOK_INVALID", "codebook"},
      {"codebook too long",
       [](E& e) {
         e.set_format(v1::NUMBER_FORMAT_CODEBOOK2);
         for (int k = 0; k < 5; ++k) e.add_codebook(static_cast<float>(k));
       },
       "CODEBOOK_INVALID", "codebook"},
      {"codes past the codebook",
       [](E& e) {
         e.set_format(v1::NUMBER_FORMAT_CODEBOOK2);
         for (int k = 0; k < 3; ++k) e.add_codebook(static_cast<float>(k));
         e.set_qmax(3);
       },
       "CODE_RANGE_INVALID", "qmax"},
      {"zero point of a float",
       [](E& e) {
         e.set_format(v1::NUMBER_FORMAT_FLOAT8_E5M2);
         e.add_zero_point(0);
       },
       "ZERO_POINT_RANGE", "zero_point"},
      {"no_saturation of an integer", [](E& e) { e.set_no_saturation(true); },
       "CODE_RANGE_INVALID", "no_saturation"},
      {"negative block", [](E& e) { e.add_block_size(-1); },
       "BLOCK_SIZE_INVALID", "block_size"},
      {"17 blocks",
       [](E& e) {
         for (int i = 0; i < 17; ++i) e.add_block_size(0);
       },
       "BLOCK_SIZE_INVALID", "block_size"},
      {"no scale", [](E& e) { e.clear_scale(); }, "SCALE_COUNT", "scale"},
      {"scale 0", [](E& e) { e.set_scale(0, 0); }, "SCALE_INVALID", "scale"},
      {"scale minus 0", [](E& e) { e.set_scale(0, -0.0f); }, "SCALE_INVALID",
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
}

class EncodingFromProtoErrorTest
    : public ::testing::TestWithParam<ErrorCase<v1::Encoding>> {};

TEST_P(EncodingFromProtoErrorTest, NamesTheFieldAtFault) {
  v1::Encoding proto = Int8();
  GetParam().change(proto);
  const absl::Status status = EncodingFromProto(proto).status();
  EXPECT_EQ(core::ErrorReason(status), GetParam().reason) << status;
  EXPECT_EQ(core::ErrorField(status), GetParam().field);
}

INSTANTIATE_TEST_SUITE_P(Table, EncodingFromProtoErrorTest,
                         ::testing::ValuesIn(EncodingFromProtoErrors()),
                         testing::NameOfCase());

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

TEST(SpecFromProtoTest, IsTheInverseOfSpecToProto) {
  core::EncodingSpec lpbq;
  lpbq.format = core::NumberFormat{v1::NUMBER_FORMAT_LPBQ};
  lpbq.granularity = core::Granularity{-2, 64};
  lpbq.method = core::CalibrationMethod::kBestOf;
  lpbq.methods = {core::CalibrationMethod::kMse,
                  core::CalibrationMethod::kPercentile};
  lpbq.objective = core::Objective::kSqnr;
  lpbq.scale_type = core::ScaleType::kInteger;
  lpbq.outer_block_size = {1, 0};
  lpbq.integer_scale_max = 100;
  lpbq.tail_fraction = 0;
  lpbq.tail = core::Tail::kLower;
  lpbq.gamma = 1.5;
  lpbq.search_steps = 2048;
  lpbq.entropy_bins = 77;
  core::EncodingSpec float8;
  float8.format = core::NumberFormat{v1::NUMBER_FORMAT_MXFP8_E4M3};
  float8.block_size = {1, 32};
  float8.mx_scale_rule = core::MxScaleRule::kRceil;
  float8.no_saturation = true;
  core::EncodingSpec codebook;
  codebook.format = core::NumberFormat{v1::NUMBER_FORMAT_CODEBOOK2};
  codebook.codebook = {-1, 0, 2};
  codebook.method = core::CalibrationMethod::kFixedRange;
  codebook.range_min = -3;
  codebook.range_max = 5;
  codebook.power_of_two_scale = true;
  for (const core::EncodingSpec& spec : {lpbq, float8, codebook}) {
    v1::EncodingSpec proto;
    SpecToProto(spec, &proto);
    const absl::StatusOr<core::EncodingSpec> back = SpecFromProto(proto);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->format, spec.format);
    EXPECT_EQ(back->block_size, spec.block_size);
    EXPECT_EQ(back->symmetry, spec.symmetry);
    EXPECT_EQ(back->method, spec.method);
    EXPECT_EQ(back->granularity.has_value(), spec.granularity.has_value());
    if (spec.granularity.has_value() && back->granularity.has_value()) {
      EXPECT_EQ(back->granularity->axis, spec.granularity->axis);
      EXPECT_EQ(back->granularity->group_size, spec.granularity->group_size);
    }
    EXPECT_EQ(back->scale_type, spec.scale_type);
    EXPECT_EQ(back->mx_scale_rule, spec.mx_scale_rule);
    EXPECT_EQ(back->power_of_two_scale, spec.power_of_two_scale);
    EXPECT_EQ(back->outer_block_size, spec.outer_block_size);
    EXPECT_EQ(back->integer_scale_max, spec.integer_scale_max);
    EXPECT_EQ(back->codebook, spec.codebook);
    EXPECT_EQ(back->tail_fraction, spec.tail_fraction);
    EXPECT_EQ(back->tail, spec.tail);
    EXPECT_EQ(back->gamma, spec.gamma);
    EXPECT_EQ(back->search_steps, spec.search_steps);
    EXPECT_EQ(back->entropy_bins, spec.entropy_bins);
    EXPECT_EQ(back->range_min, spec.range_min);
    EXPECT_EQ(back->range_max, spec.range_max);
    EXPECT_EQ(back->methods, spec.methods);
    EXPECT_EQ(back->objective, spec.objective);
    EXPECT_EQ(back->no_saturation, spec.no_saturation);
  }
}

TEST(SpecFromProtoTest, HasTheDefaultsOfTheMessage) {
  const absl::StatusOr<core::EncodingSpec> spec = SpecFromProto(Int8Spec());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->tail_fraction, 0.001);
  EXPECT_EQ(spec->gamma, 3);
  EXPECT_FALSE(spec->granularity.has_value());
}

std::vector<ErrorCase<v1::EncodingSpec>> SpecFromProtoErrors() {
  using S = v1::EncodingSpec;
  return {
      {"format unset", [](S& s) { s.clear_format(); }, "FORMAT_UNKNOWN",
       "format"},
      {"symmetry 99",
       [](S& s) { s.set_symmetry(static_cast<v1::Symmetry>(99)); },
       "ENUM_UNKNOWN", "symmetry"},
      {"method 99",
       [](S& s) { s.set_method(static_cast<v1::CalibrationMethod>(99)); },
       "ENUM_UNKNOWN", "method"},
      {"scale type 99",
       [](S& s) { s.set_scale_type(static_cast<v1::ScaleType>(99)); },
       "ENUM_UNKNOWN", "scale_type"},
      {"mx_scale_rule 99",
       [](S& s) { s.set_mx_scale_rule(static_cast<v1::MxScaleRule>(99)); },
       "ENUM_UNKNOWN", "mx_scale_rule"},
      {"tail 99", [](S& s) { s.set_tail(static_cast<v1::Tail>(99)); },
       "ENUM_UNKNOWN", "tail"},
      {"objective 99",
       [](S& s) { s.set_objective(static_cast<v1::Objective>(99)); },
       "ENUM_UNKNOWN", "objective"},
      {"methods 99",
       [](S& s) {
         s.set_method(v1::CALIBRATION_METHOD_BEST_OF);
         s.add_methods(static_cast<v1::CalibrationMethod>(99));
       },
       "ENUM_UNKNOWN", "methods"},
      {"best-of of nothing",
       [](S& s) { s.set_method(v1::CALIBRATION_METHOD_BEST_OF); },
       "METHOD_INVALID", "method"},
      {"best-of of best-of",
       [](S& s) {
         s.set_method(v1::CALIBRATION_METHOD_BEST_OF);
         s.add_methods(v1::CALIBRATION_METHOD_BEST_OF);
       },
       "METHOD_INVALID", "methods"},
      {"tail_fraction NaN", [](S& s) { s.set_tail_fraction(kNan); },
       "METHOD_INVALID", "tail_fraction"},
      {"gamma 0", [](S& s) { s.set_gamma(0); }, "METHOD_INVALID", "gamma"},
      {"search_steps 1", [](S& s) { s.set_search_steps(1); }, "METHOD_INVALID",
       "search_steps"},
      {"most search_steps", [](S& s) { s.set_search_steps(0xFFFFFFFF); },
       "METHOD_INVALID", "search_steps"},
      {"2 to the 31 entropy_bins", [](S& s) { s.set_entropy_bins(0x80000000); },
       "METHOD_INVALID", "entropy_bins"},
      {"scale codes with asymmetric",
       [](S& s) {
         s.set_symmetry(v1::SYMMETRY_ASYMMETRIC);
         s.set_scale_type(v1::SCALE_TYPE_E8M0);
       },
       "SCALE_TYPE_INVALID", "scale_type"},
      {"mx_scale_rule of float scales",
       [](S& s) { s.set_mx_scale_rule(v1::MX_SCALE_RULE_CEIL); },
       "SCALE_TYPE_INVALID", "mx_scale_rule"},
      {"integer_scale_max of float scales",
       [](S& s) { s.set_integer_scale_max(4); }, "SCALE_TYPE_INVALID",
       "integer_scale_max"},
      {"codebook of an integer",
       [](S& s) {
         s.add_codebook(0);
         s.add_codebook(1);
       },
       "CODEBOOK_INVALID", "codebook"},
      {"no_saturation of an integer", [](S& s) { s.set_no_saturation(true); },
       "CODE_RANGE_INVALID", "no_saturation"},
      {"granularity and block_size",
       [](S& s) {
         s.mutable_granularity();
         s.add_block_size(1);
       },
       "BLOCK_SIZE_INVALID", "granularity"},
      {"negative group",
       [](S& s) { s.mutable_granularity()->set_group_size(-1); },
       "BLOCK_SIZE_INVALID", "granularity"},
      {"negative outer block",
       [](S& s) {
         s.set_scale_type(v1::SCALE_TYPE_INTEGER);
         s.add_outer_block_size(-1);
       },
       "BLOCK_SIZE_INVALID", "outer_block_size"},
      {"symmetric unsigned",
       [](S& s) {
         s.set_format(v1::NUMBER_FORMAT_UINT8);
         s.set_symmetry(v1::SYMMETRY_STRICT);
       },
       "SYMMETRY_INVALID", "symmetry"},
      {"exclude_zero with symmetric", [](S& s) { s.set_exclude_zero(true); },
       "SYMMETRY_INVALID", "exclude_zero"},
      {"negative block", [](S& s) { s.add_block_size(-2); },
       "BLOCK_SIZE_INVALID", "block_size"},
  };
}

class SpecFromProtoErrorTest
    : public ::testing::TestWithParam<ErrorCase<v1::EncodingSpec>> {};

TEST_P(SpecFromProtoErrorTest, NamesTheFieldAtFault) {
  v1::EncodingSpec proto = Int8Spec();
  GetParam().change(proto);
  const absl::Status status = SpecFromProto(proto).status();
  EXPECT_EQ(core::ErrorReason(status), GetParam().reason) << status;
  EXPECT_EQ(core::ErrorField(status), GetParam().field);
}

INSTANTIATE_TEST_SUITE_P(Table, SpecFromProtoErrorTest,
                         ::testing::ValuesIn(SpecFromProtoErrors()),
                         testing::NameOfCase());

TEST(ScaleTypeTest, HasTheNamesOfTheMessage) {
  for (int value = v1::ScaleType_MIN; value <= v1::ScaleType_MAX; ++value) {
    EXPECT_EQ("SCALE_TYPE_" + std::string(core::ScaleTypeName(
                                  static_cast<core::ScaleType>(value))),
              v1::ScaleType_Name(value));
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

std::vector<ErrorCase<v1::TensorDescription>> DescriptionFromProtoErrors() {
  using D = v1::TensorDescription;
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const auto shape = [](const std::vector<int64_t>& dimensions) {
    return [dimensions](D& d) { d = Float16(dimensions); };
  };
  return {
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
      {"largest dimension", shape({kMax}), "SHAPE_INVALID", "shape"},
      {"more than 2 to the 56 elements", shape({(int64_t{1} << 56) + 1}),
       "SHAPE_INVALID", "shape"},
      {"2 to the 64 elements", shape({int64_t{1} << 32, int64_t{1} << 32}),
       "SHAPE_INVALID", "shape"},
      {"2 to the 64 elements and a 0",
       shape({int64_t{1} << 32, int64_t{1} << 32, 0}), "SHAPE_INVALID",
       "shape"},
      {"bad model", [](D& d) { d.mutable_name()->set_model("../x"); },
       "NAME_INVALID", "name.model"},
      {"bad revision", [](D& d) { d.mutable_name()->set_revision("a b"); },
       "NAME_INVALID", "name.revision"},
      {"bad tensor", [](D& d) { d.mutable_name()->set_tensor("\x01"); },
       "NAME_INVALID", "name.tensor"},
  };
}

class DescriptionFromProtoErrorTest
    : public ::testing::TestWithParam<ErrorCase<v1::TensorDescription>> {};

TEST_P(DescriptionFromProtoErrorTest, NamesTheFieldAtFault) {
  v1::TensorDescription proto = Float16({2});
  GetParam().change(proto);
  const absl::Status status = DescriptionFromProto(proto).status();
  EXPECT_EQ(core::ErrorReason(status), GetParam().reason) << status;
  EXPECT_EQ(core::ErrorField(status), GetParam().field);
}

INSTANTIATE_TEST_SUITE_P(Table, DescriptionFromProtoErrorTest,
                         ::testing::ValuesIn(DescriptionFromProtoErrors()),
                         testing::NameOfCase());

}  // namespace
}  // namespace quantd::server::encoding_proto_test
