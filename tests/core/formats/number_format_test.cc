#include "core/formats/number_format.h"

#include <cstdint>
#include <limits>
#include <set>
#include <string>

#include "gtest/gtest.h"

namespace quantd::core {
namespace {

int StorageBits(int bits) {
  if (bits == 2 || bits == 4) return bits;
  return bits <= 8 ? 8 : bits <= 16 ? 16 : 32;
}

TEST(NumberFormatTest, HasTheIntegersOfEveryWidthByValueAndName) {
  for (int bits = 2; bits <= 16; ++bits) {
    for (const bool is_signed : {true, false}) {
      const FormatInfo& row = IntegerFormat(bits, is_signed);
      EXPECT_EQ(static_cast<int>(row.format), is_signed ? bits : 20 + bits);
      EXPECT_EQ(row.name, (is_signed ? "int" : "uint") + std::to_string(bits));
      EXPECT_EQ(row.kind, CodeKind::kInteger);
      EXPECT_EQ(row.bits, bits);
      EXPECT_EQ(row.is_signed, is_signed);
      EXPECT_EQ(row.scale_type, ScaleType::kDefault);
      EXPECT_EQ(row.default_group, 0);
      EXPECT_EQ(row.storage_bits, StorageBits(bits));
      EXPECT_EQ(row.qmin, is_signed ? -(1 << (bits - 1)) : 0);
      EXPECT_EQ(row.qmax - row.qmin, (1 << bits) - 1);
    }
  }
}

TEST(NumberFormatTest, FindsEveryRowByItsUniqueValueAndName) {
  std::set<int> values;
  std::set<absl::string_view> names;
  for (const FormatInfo& row : AllFormats()) {
    EXPECT_TRUE(values.insert(static_cast<int>(row.format)).second);
    EXPECT_TRUE(names.insert(row.name).second);
    EXPECT_EQ(FindFormat(row.format), &row);
    EXPECT_EQ(FindFormatByName(row.name), &row);
  }
  EXPECT_EQ(FindFormat(NumberFormat{}), nullptr);
  EXPECT_EQ(FindFormat(static_cast<NumberFormat>(17)), nullptr);
  EXPECT_EQ(FindFormatByName("int1"), nullptr);
  EXPECT_EQ(FindFormatByName(""), nullptr);
  EXPECT_EQ(FindFormatByName("INT8"), nullptr);
}

TEST(NumberFormatTest, HasTheOtherFormatsByValueAndName) {
  const struct {
    int value;
    const char* name;
    CodeKind kind;
    int bits;
    ScaleType scale_type;
    int64_t default_group;
  } kOthers[] = {
      {40, "float8_e4m3fn", CodeKind::kFloat, 8, ScaleType::kDefault, 0},
      {41, "float8_e5m2", CodeKind::kFloat, 8, ScaleType::kDefault, 0},
      {42, "float8_e4m3fnuz", CodeKind::kFloat, 8, ScaleType::kDefault, 0},
      {43, "float8_e5m2fnuz", CodeKind::kFloat, 8, ScaleType::kDefault, 0},
      {44, "float6_e2m3", CodeKind::kFloat, 6, ScaleType::kDefault, 0},
      {45, "float6_e3m2", CodeKind::kFloat, 6, ScaleType::kDefault, 0},
      {46, "float4_e2m1", CodeKind::kFloat, 4, ScaleType::kDefault, 0},
      {50, "mxfp8_e4m3", CodeKind::kFloat, 8, ScaleType::kE8m0, 32},
      {51, "mxfp8_e5m2", CodeKind::kFloat, 8, ScaleType::kE8m0, 32},
      {52, "mxfp6_e2m3", CodeKind::kFloat, 6, ScaleType::kE8m0, 32},
      {53, "mxfp6_e3m2", CodeKind::kFloat, 6, ScaleType::kE8m0, 32},
      {54, "mxfp4_e2m1", CodeKind::kFloat, 4, ScaleType::kE8m0, 32},
      {55, "mxint8", CodeKind::kInteger, 8, ScaleType::kE8m0, 32},
      {56, "nvfp4", CodeKind::kFloat, 4, ScaleType::kE4m3, 16},
      {60, "nf4", CodeKind::kCodebook, 4, ScaleType::kDefault, 64},
      {61, "codebook2", CodeKind::kCodebook, 2, ScaleType::kDefault, 0},
      {62, "codebook4", CodeKind::kCodebook, 4, ScaleType::kDefault, 0},
      {63, "codebook8", CodeKind::kCodebook, 8, ScaleType::kDefault, 0},
      {64, "lpbq", CodeKind::kInteger, 4, ScaleType::kInteger, 64},
      {65, "int32", CodeKind::kInteger, 32, ScaleType::kDefault, 0}};
  constexpr size_t kIntegers = 30;
  EXPECT_EQ(AllFormats().size(), kIntegers + std::size(kOthers));
  for (const auto& other : kOthers) {
    const FormatInfo* row = FindFormatByName(other.name);
    ASSERT_NE(row, nullptr) << other.name;
    SCOPED_TRACE(other.name);
    EXPECT_EQ(static_cast<int>(row->format), other.value);
    EXPECT_EQ(row->kind, other.kind);
    EXPECT_EQ(row->bits, other.bits);
    EXPECT_EQ(row->storage_bits, StorageBits(other.bits));
    EXPECT_EQ(row->scale_type, other.scale_type);
    EXPECT_EQ(row->default_group, other.default_group);
    if (row->kind != CodeKind::kInteger) {
      EXPECT_FALSE(row->is_signed);
      EXPECT_EQ(row->qmin, 0);
      EXPECT_EQ(row->qmax, (1 << row->bits) - 1);
    }
  }
  const FormatInfo& mxint8 = *FindFormatByName("mxint8");
  EXPECT_EQ(mxint8.qmin, -127);
  EXPECT_EQ(mxint8.qmax, 127);
  EXPECT_EQ(mxint8.step_exponent, -6);
}

TEST(NumberFormatTest, HasSignedIntegersOf32Bits) {
  const FormatInfo& int32 = IntegerFormat(32, true);
  EXPECT_EQ(int32.name, "int32");
  EXPECT_TRUE(IsWideInteger(int32));
  EXPECT_FALSE(IsWideInteger(IntegerFormat(16, true)));
  EXPECT_TRUE(int32.is_signed);
  EXPECT_EQ(int32.qmin, std::numeric_limits<int32_t>::min());
  EXPECT_EQ(int32.qmax, std::numeric_limits<int32_t>::max());
  EXPECT_EQ(int32.max_value, 2147483647.0);
  EXPECT_EQ(int32.SizeBytes(3), 12);
}

TEST(NumberFormatTest, NothingButFloatsHasNanAndInfinity) {
  for (const FormatInfo& row : AllFormats()) {
    if (row.kind == CodeKind::kFloat) continue;
    EXPECT_FALSE(row.has_nan()) << row.name;
    EXPECT_FALSE(row.has_infinity()) << row.name;
  }
}

TEST(NumberFormatTest, HasTheNormalFloatsOfQlora) {
  const FormatInfo& nf4 = *FindFormatByName("nf4");
  ASSERT_EQ(nf4.codebook.size(), 16u);
  EXPECT_EQ(nf4.codebook.front(), -1.0f);
  EXPECT_EQ(nf4.codebook[7], 0.0f);
  EXPECT_EQ(nf4.codebook.back(), 1.0f);
  for (size_t k = 1; k < nf4.codebook.size(); ++k) {
    EXPECT_LT(nf4.codebook[k - 1], nf4.codebook[k]);
  }
}

TEST(NumberFormatTest, RoundsPackedSizesUpToWholeBytes) {
  const FormatInfo& int2 = IntegerFormat(2, true);
  const FormatInfo& int4 = IntegerFormat(4, true);
  EXPECT_EQ(int2.codes_per_byte(), 4);
  EXPECT_EQ(int4.codes_per_byte(), 2);
  EXPECT_EQ(IntegerFormat(3, true).codes_per_byte(), 1);
  EXPECT_EQ(int2.SizeBytes(0), 0);
  EXPECT_EQ(int2.SizeBytes(1), 1);
  EXPECT_EQ(int2.SizeBytes(4), 1);
  EXPECT_EQ(int2.SizeBytes(5), 2);
  EXPECT_EQ(int4.SizeBytes(5), 3);
  EXPECT_EQ(IntegerFormat(7, false).SizeBytes(5), 5);
  EXPECT_EQ(IntegerFormat(9, false).SizeBytes(5), 10);
}

}  // namespace
}  // namespace quantd::core
