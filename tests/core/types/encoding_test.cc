#include "core/types/encoding.h"

#include <cmath>
#include <limits>
#include <string>

#include "core/errors.h"
#include "core/formats/number_format.h"
#include "gtest/gtest.h"

namespace quantd::core {
namespace {

Encoding ValidEncoding() {
  Encoding encoding;
  encoding.format = FindFormatByName("int8")->format;
  encoding.scale = {0.5f, 0.25f};
  encoding.zero_point = {0, -3};
  encoding.qmin = -128;
  encoding.qmax = 127;
  return encoding;
}

std::string Reason(const Encoding& encoding) {
  return std::string(ErrorReason(ValidateEncoding(encoding)));
}

TEST(EncodingTest, AcceptsAValidOne) {
  EXPECT_TRUE(ValidateEncoding(ValidEncoding()).ok());
}

TEST(EncodingTest, RefusesScalesThatAreNotPositiveNormalNumbers) {
  for (const float scale : {0.0f, -0.0f, -1.0f, NAN, INFINITY, -INFINITY,
                            1.17549421e-38f, 1e-45f}) {
    Encoding encoding = ValidEncoding();
    encoding.scale[1] = scale;
    const absl::Status status = ValidateEncoding(encoding);
    EXPECT_EQ(ErrorReason(status), "SCALE_INVALID") << scale;
    EXPECT_NE(status.message().find("scale 1 "), absl::string_view::npos);
  }
  Encoding encoding = ValidEncoding();
  encoding.scale[1] = std::numeric_limits<float>::min();
  EXPECT_TRUE(ValidateEncoding(encoding).ok());
  encoding.scale[1] = std::numeric_limits<float>::max();
  EXPECT_TRUE(ValidateEncoding(encoding).ok());
}

TEST(EncodingTest, RefusesWrongCounts) {
  Encoding encoding = ValidEncoding();
  encoding.zero_point.pop_back();
  EXPECT_EQ(Reason(encoding), "SCALE_COUNT");
  encoding.zero_point.clear();
  EXPECT_EQ(Reason(encoding), "");
  encoding.scale.clear();
  EXPECT_EQ(Reason(encoding), "SCALE_COUNT");
}

TEST(EncodingTest, RefusesZeroPointsOutsideOfTheCodes) {
  Encoding encoding = ValidEncoding();
  encoding.qmin = -127;
  encoding.zero_point[1] = -128;
  EXPECT_EQ(Reason(encoding), "ZERO_POINT_RANGE");
  encoding.exclude_zero = true;
  EXPECT_EQ(Reason(encoding), "");
  encoding.zero_point[1] = kMaxZeroPoint;
  EXPECT_EQ(Reason(encoding), "");
  encoding.zero_point[1] = -kMaxZeroPoint - 1;
  EXPECT_EQ(Reason(encoding), "ZERO_POINT_RANGE");
}

TEST(EncodingTest, RefusesAMissingZeroPointThatWouldBeOutside) {
  Encoding encoding = ValidEncoding();
  encoding.zero_point.clear();
  encoding.qmin = 1;
  EXPECT_EQ(Reason(encoding), "ZERO_POINT_RANGE");
}

TEST(EncodingTest, RefusesCodeRangesOutsideOfTheFormat) {
  for (const auto& [qmin, qmax] :
       {std::pair{-129, 127}, {-128, 128}, {5, 5}, {6, 5}}) {
    Encoding encoding = ValidEncoding();
    encoding.qmin = qmin;
    encoding.qmax = qmax;
    EXPECT_EQ(Reason(encoding), "CODE_RANGE_INVALID") << qmin << " " << qmax;
  }
}

TEST(EncodingTest, RefusesUnknownAndReservedFormatsAndNegativeBlocks) {
  Encoding encoding = ValidEncoding();
  encoding.block_size = {1, -1};
  EXPECT_EQ(Reason(encoding), "BLOCK_SIZE_INVALID");
  encoding.format = FindFormatByName("nf4")->format;
  EXPECT_EQ(Reason(encoding), "FORMAT_NOT_IMPLEMENTED");
  encoding.format = static_cast<NumberFormat>(21);
  EXPECT_EQ(Reason(encoding), "FORMAT_UNKNOWN");
  encoding.format = NumberFormat{};
  EXPECT_EQ(Reason(encoding), "FORMAT_UNKNOWN");
}

TEST(EncodingTest, FitsALayoutWithAsManyScales) {
  const Encoding encoding = ValidEncoding();
  EXPECT_TRUE(
      CheckEncodingFits(encoding, *BlockLayout::Create({2, 5}, {1, 0})).ok());
  EXPECT_EQ(ErrorReason(
                CheckEncodingFits(encoding, *BlockLayout::Create({2, 5}, {}))),
            "SCALE_COUNT");
}

TEST(EncodingTest, ComparesEveryField) {
  const Encoding one = ValidEncoding();
  const auto differs = [&](auto change) {
    Encoding other = one;
    change(&other);
    return !(one == other);
  };
  EXPECT_TRUE(one == ValidEncoding());
  EXPECT_TRUE(differs([](Encoding* e) { e->format = NumberFormat{4}; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->block_size = {1}; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->scale[0] = 3; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->zero_point[0] = 3; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->qmin = 3; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->qmax = 3; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->exclude_zero = true; }));
  EXPECT_TRUE(differs([](Encoding* e) { e->degenerate_count = 1; }));
}

}  // namespace
}  // namespace quantd::core
