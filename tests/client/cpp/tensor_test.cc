#include "client/cpp/tensor.h"

#include <cstdint>
#include <vector>

#include "client/cpp/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding.pb.h"

namespace quantd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(ElementTypeTest, HasItsNameAndSize) {
  const struct {
    ElementType type;
    const char* name;
    int64_t size_bytes;
  } rows[] = {{ElementType::kFloat32, "float32", 4},
              {ElementType::kFloat64, "float64", 8},
              {ElementType::kFloat16, "float16", 2},
              {ElementType::kBfloat16, "bfloat16", 2}};
  for (const auto& row : rows) {
    EXPECT_EQ(ElementTypeName(row.type), row.name);
    EXPECT_EQ(*ParseElementType(row.name), row.type);
    EXPECT_EQ(ElementSizeBytes(row.type), row.size_bytes);
  }
  EXPECT_EQ(ErrorReason(ParseElementType("float8").status()),
            "ARGUMENT_INVALID");
}

TEST(ElementCountTest, NeverOverflows) {
  EXPECT_EQ(*ElementCount({}), 1);
  EXPECT_EQ(*ElementCount({3, 4, 5}), 60);
  EXPECT_EQ(*ElementCount({int64_t{1} << 56}), int64_t{1} << 56);
  EXPECT_FALSE(ElementCount({(int64_t{1} << 56) + 1}).ok());
  EXPECT_FALSE(ElementCount({int64_t{1} << 32, int64_t{1} << 32}).ok());
  EXPECT_FALSE(ElementCount({-1}).ok());
  EXPECT_FALSE(ElementCount({0, -1}).ok());
  EXPECT_EQ(*ElementCount({0, int64_t{1} << 40}), 0);
  // What is beside a 0 is bounded all the same.
  EXPECT_FALSE(ElementCount({0, int64_t{1} << 40, int64_t{1} << 40}).ok());
}

TEST(FormatInfoTest, CountsWholeBytes) {
  const auto size = [](const char* name, int64_t count) {
    return GetFormatInfo(*ParseFormat(name))->SizeBytes(count);
  };
  EXPECT_EQ(size("int8", 7), 7);
  EXPECT_EQ(size("int16", 7), 14);
  EXPECT_EQ(size("int4", 7), 4);
  EXPECT_EQ(size("uint2", 8), 2);
  EXPECT_EQ(size("uint2", 9), 3);
  EXPECT_EQ(size("int4", 0), 0);
  EXPECT_EQ(size("mxfp4_e2m1", 33), 17);
}

TEST(FormatInfoTest, NamesLeadBackToTheirFormats) {
  EXPECT_EQ(FormatName(v1::NUMBER_FORMAT_FLOAT8_E4M3FN), "float8_e4m3fn");
  EXPECT_EQ(*ParseFormat("MXFP4_e2m1"), v1::NUMBER_FORMAT_MXFP4_E2M1);
  for (const char* name : {"", "unspecified", "int1", "int8 "}) {
    EXPECT_EQ(ErrorReason(ParseFormat(name).status()), "ARGUMENT_INVALID")
        << name;
  }
  EXPECT_EQ(FormatName(static_cast<v1::NumberFormat>(9999)), "format 9999");
  EXPECT_FALSE(GetFormatInfo(static_cast<v1::NumberFormat>(9999)).ok());
}

TEST(FormatInfoTest, FindsIntegersByWidth) {
  for (int bits = 2; bits <= 16; ++bits) {
    for (const bool is_signed : {false, true}) {
      const auto format = IntegerFormat(bits, is_signed);
      ASSERT_TRUE(format.ok()) << format.status();
      const FormatInfo info = *GetFormatInfo(*format);
      EXPECT_EQ(info.qmin, is_signed ? -(1 << (bits - 1)) : 0);
      EXPECT_EQ(info.qmax, info.qmin + (1 << bits) - 1);
    }
  }
  EXPECT_FALSE(IntegerFormat(1, true).ok());
  EXPECT_FALSE(IntegerFormat(17, false).ok());
  EXPECT_EQ(*IntegerFormat(32, true), v1::NUMBER_FORMAT_INT32);
  EXPECT_FALSE(IntegerFormat(32, false).ok());
  EXPECT_EQ(GetFormatInfo(v1::NUMBER_FORMAT_INT32)->SizeBytes(3), 12);
}

TEST(ScaleTypeOfTest, IsWhatTheFormatPrescribes) {
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  EXPECT_EQ(ScaleTypeOf(encoding), v1::SCALE_TYPE_FLOAT32);
  encoding.set_format(v1::NUMBER_FORMAT_MXFP8_E4M3);
  EXPECT_EQ(ScaleTypeOf(encoding), v1::SCALE_TYPE_E8M0);
  encoding.set_scale_type(v1::SCALE_TYPE_BFLOAT16);
  EXPECT_EQ(ScaleTypeOf(encoding), v1::SCALE_TYPE_BFLOAT16);
}

TEST(ScaleShapeTest, RoundsUp) {
  EXPECT_THAT(*ScaleShape({8, 33}, {1, 32}), ElementsAre(8, 2));
  EXPECT_THAT(*ScaleShape({8, 32}, {0, 32}), ElementsAre(1, 1));
  EXPECT_THAT(*ScaleShape({8, 33}, {}), ElementsAre(1, 1));
  EXPECT_THAT(*ScaleShape({}, {}), IsEmpty());
  EXPECT_THAT(*ScaleShape({0, 4}, {1, 0}), ElementsAre(0, 1));
  EXPECT_FALSE(ScaleShape({8}, {1, 1}).ok());
  EXPECT_FALSE(ScaleShape({8}, {-1}).ok());
}

}  // namespace
}  // namespace quantd
