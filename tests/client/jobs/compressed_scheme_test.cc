#include "client/jobs/compressed_scheme.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/models/compressed_tensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "quantd/v1/encoding.pb.h"

namespace quantd::jobs {
namespace {

using ::testing::HasSubstr;

v1::Encoding EncodingOf(v1::NumberFormat format, int32_t zero_point) {
  v1::Encoding encoding;
  encoding.set_format(format);
  encoding.add_scale(0.5f);
  encoding.add_zero_point(zero_point);
  return encoding;
}

absl::StatusOr<std::vector<CompressedData>> PartsOf(
    const v1::Encoding& encoding, const std::string& activations) {
  const files::Json weights = {
      {"num_bits", 8}, {"type", "int"}, {"strategy", "channel"}};
  files::Json arguments =
      InputArguments(ParseActivations(activations).value(), weights).value();
  return RangeParts("m.input", encoding, &arguments);
}

TEST(RangePartsTest, ZeroPointsAreThoseOfInt8) {
  for (const auto& [format, least] : {std::pair(v1::NUMBER_FORMAT_INT8, -128),
                                      std::pair(v1::NUMBER_FORMAT_UINT8, 0)}) {
    for (const int zero_point : {least, least + 255}) {
      const auto parts = PartsOf(EncodingOf(format, zero_point), "static=int8");
      ASSERT_TRUE(parts.ok()) << parts.status();
      ASSERT_EQ(parts->size(), 2);
      EXPECT_EQ(static_cast<int8_t>((*parts)[1].data[0]),
                zero_point - least - 128);
    }
    for (const int zero_point :
         {least - 1, least + 256, -25518, INT32_MIN, INT32_MAX}) {
      const auto parts = PartsOf(EncodingOf(format, zero_point), "static=int8");
      EXPECT_THAT(std::string(parts.status().message()),
                  HasSubstr("has the zero point"))
          << zero_point;
    }
  }
}

TEST(RangePartsTest, ZeroPointsBetweenCodesAreRefused) {
  v1::Encoding encoding = EncodingOf(v1::NUMBER_FORMAT_UINT8, 0);
  encoding.clear_zero_point();
  EXPECT_TRUE(PartsOf(encoding, "static=int8").ok());
  encoding.add_real_zero_point(3.5f);
  EXPECT_THAT(std::string(PartsOf(encoding, "static=int8").status().message()),
              HasSubstr("has a zero point between codes"));
}

TEST(RangePartsTest, OuterScalesAreThoseOfNvfp4) {
  v1::Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_NVFP4);
  encoding.add_outer_scale(0.25f);
  const auto parts = PartsOf(encoding, "static=nvfp4");
  ASSERT_TRUE(parts.ok()) << parts.status();
  EXPECT_EQ((*parts)[0].part.name, "m.input_global_scale");

  for (const char* activations : {"static=nvfp4", "static=int8"}) {
    v1::Encoding other = EncodingOf(v1::NUMBER_FORMAT_INT8, 0);
    EXPECT_TRUE(PartsOf(other, activations).ok());
    other.add_outer_scale(0.25f);
    EXPECT_THAT(std::string(PartsOf(other, activations).status().message()),
                HasSubstr("outer scales"));
  }
}

}  // namespace
}  // namespace quantd::jobs
