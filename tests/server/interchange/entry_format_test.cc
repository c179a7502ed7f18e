#include "server/interchange/entry_format.h"

#include <cstdint>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/types/encoding.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quantd::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

core::Encoding Of(const char* format) {
  const core::FormatInfo& info = *core::FindFormatByName(format);
  core::Encoding encoding;
  encoding.format = info.format;
  encoding.qmin = info.qmin;
  encoding.qmax = info.qmax;
  encoding.scale = {0.5f};
  return encoding;
}

TEST(ChannelAxisTest, IsTheOnlyDimensionWithScales) {
  core::Encoding encoding = Of("int8");
  EXPECT_EQ(ChannelAxis(encoding), -1);
  encoding.block_size = {0, 1, 0};
  EXPECT_EQ(ChannelAxis(encoding), 1);
  encoding.block_size = {1, 1, 0};
  EXPECT_EQ(ChannelAxis(encoding), -1);
  encoding.scale_shape = {1, 7, 1};
  EXPECT_EQ(ChannelAxis(encoding), 1);
  encoding.scale_shape.clear();
  encoding.block_size = {0, 32};
  EXPECT_EQ(ChannelAxis(encoding), -1);
}

TEST(ZeroPointsTest, AreAsManyAsScales) {
  core::Encoding encoding = Of("int8");
  encoding.scale = {1, 2, 3};
  EXPECT_THAT(ZeroPoints(encoding), ElementsAre(0, 0, 0));
  encoding.zero_point = {4, 5, 6};
  EXPECT_THAT(ZeroPoints(encoding), ElementsAre(4, 5, 6));
}

TEST(NormalizeZeroPointsTest, LeavesZerosOutAndMarksThoseOutside) {
  core::Encoding encoding = Of("int8");
  encoding.zero_point = {0, 0};
  NormalizeZeroPoints(&encoding);
  EXPECT_THAT(encoding.zero_point, IsEmpty());
  EXPECT_FALSE(encoding.exclude_zero);
  encoding.zero_point = {-128, 127};
  NormalizeZeroPoints(&encoding);
  EXPECT_THAT(encoding.zero_point, ElementsAre(-128, 127));
  EXPECT_FALSE(encoding.exclude_zero);
  for (const int32_t outside : {-129, 128}) {
    encoding.zero_point = {0, outside};
    NormalizeZeroPoints(&encoding);
    EXPECT_TRUE(encoding.exclude_zero) << outside;
  }
}

TEST(IsSymmetricTest, IsNotForUnsignedCodes) {
  EXPECT_TRUE(IsSymmetric(Of("int8")));
  EXPECT_FALSE(IsSymmetric(Of("uint8")));
  EXPECT_TRUE(IsSymmetric(Of("float8_e4m3fn")));
  core::Encoding encoding = Of("int8");
  encoding.zero_point = {1};
  EXPECT_FALSE(IsSymmetric(encoding));
}

TEST(CheckIsIntegerTest, RefusesFloatsAndOuterScales) {
  EXPECT_TRUE(CheckIsInteger(Of("int4"), "ONNX").ok());
  EXPECT_TRUE(CheckIsInteger(Of("uint16"), "ONNX").ok());
  for (const char* format : {"float8_e5m2", "nf4", "lpbq", "mxint8"}) {
    EXPECT_EQ(core::ErrorReason(CheckIsInteger(Of(format), "ONNX")),
              "INTERCHANGE_UNSUPPORTED")
        << format;
  }
}

TEST(SetIntegerFormatTest, SetsTheCodesThatFollow) {
  core::Encoding encoding;
  SetIntegerFormat(4, false, &encoding);
  EXPECT_EQ(encoding.format, core::FindFormatByName("uint4")->format);
  EXPECT_EQ(encoding.qmin, 0);
  EXPECT_EQ(encoding.qmax, 15);
  SetIntegerFormat(12, true, &encoding);
  EXPECT_EQ(encoding.qmin, -2048);
  EXPECT_EQ(encoding.qmax, 2047);
}

TEST(SetLpbqTest, MakesScalesOfCodes) {
  core::Encoding encoding;
  SetLpbq(4, {1, 128}, {0.25f}, &encoding);
  EXPECT_EQ(encoding.format, core::FindFormatByName("lpbq")->format);
  EXPECT_TRUE(HasIntegerScales(encoding));
  EXPECT_THAT(encoding.scale_code, ElementsAre(1, 128));
  encoding.block_size = {1};
  encoding.scale_shape = {2};
  ASSERT_TRUE(core::DeriveScales(&encoding).ok());
  EXPECT_THAT(encoding.scale, ElementsAre(0.25f, 32.0f));
  core::Encoding narrow;
  SetLpbq(2, {1}, {0.25f}, &narrow);
  EXPECT_EQ(narrow.format, core::FindFormatByName("int2")->format);
  EXPECT_TRUE(HasIntegerScales(narrow));
}

TEST(WriteEntryTest, TellsWhatTheFileDoesNotKeep) {
  core::Encoding encoding = Of("int8");
  std::string out;
  std::vector<InterchangeLoss> losses;
  const auto written = WriteEntry(QuantdEntryFormat(), "t", encoding,
                                  "head:", core::StopToken(), &out, &losses);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_TRUE(*written);
  EXPECT_EQ(out.substr(0, 6), "head:{");
  EXPECT_THAT(losses, IsEmpty());
  // ONNX has nothing for it: left out, with a reason.
  out.clear();
  const auto left_out = WriteEntry(OnnxQdqEntryFormat(), "t", Of("nf4"),
                                   "head:", core::StopToken(), &out, &losses);
  ASSERT_TRUE(left_out.ok()) << left_out.status();
  EXPECT_FALSE(*left_out);
  EXPECT_EQ(out, "");
  ASSERT_EQ(losses.size(), 1u);
  EXPECT_TRUE(losses[0].left_out);
}

}  // namespace
}  // namespace quantd::server
