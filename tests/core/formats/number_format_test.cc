#include "core/formats/number_format.h"

#include <set>
#include <string>

#include "gtest/gtest.h"

namespace quantd::core {
namespace {

TEST(NumberFormatTest, HasTheIntegersOfEveryWidthByValueAndName) {
  for (int bits = 2; bits <= 16; ++bits) {
    for (const bool is_signed : {true, false}) {
      const FormatInfo& row = IntegerFormat(bits, is_signed);
      EXPECT_EQ(static_cast<int>(row.format), is_signed ? bits : 20 + bits);
      EXPECT_EQ(row.name, (is_signed ? "int" : "uint") + std::to_string(bits));
      EXPECT_EQ(row.kind, FormatKind::kInteger);
      EXPECT_EQ(row.bits, bits);
      EXPECT_EQ(row.is_signed, is_signed);
      EXPECT_TRUE(row.implemented);
      EXPECT_EQ(row.storage_bits,
                bits == 2 || bits == 4 ? bits : (bits <= 8 ? 8 : 16));
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

TEST(NumberFormatTest, ReservesTheOtherFormatsByName) {
  const struct {
    int value;
    const char* name;
    FormatKind kind;
    int bits;
  } kReserved[] = {{40, "float8_e4m3fn", FormatKind::kFloat, 8},
                   {41, "float8_e5m2", FormatKind::kFloat, 8},
                   {42, "float8_e4m3fnuz", FormatKind::kFloat, 8},
                   {43, "float8_e5m2fnuz", FormatKind::kFloat, 8},
                   {44, "float6_e2m3", FormatKind::kFloat, 6},
                   {45, "float6_e3m2", FormatKind::kFloat, 6},
                   {46, "float4_e2m1", FormatKind::kFloat, 4},
                   {50, "mxfp8_e4m3", FormatKind::kMicroscaling, 8},
                   {51, "mxfp8_e5m2", FormatKind::kMicroscaling, 8},
                   {52, "mxfp6_e2m3", FormatKind::kMicroscaling, 6},
                   {53, "mxfp6_e3m2", FormatKind::kMicroscaling, 6},
                   {54, "mxfp4_e2m1", FormatKind::kMicroscaling, 4},
                   {55, "mxint8", FormatKind::kMicroscaling, 8},
                   {56, "nvfp4", FormatKind::kMicroscaling, 4},
                   {60, "nf4", FormatKind::kCodebook, 4},
                   {61, "codebook", FormatKind::kCodebook, 8},
                   {62, "lpbq", FormatKind::kLpbq, 4}};
  EXPECT_EQ(AllFormats().size(), 30 + std::size(kReserved));
  for (const auto& reserved : kReserved) {
    const FormatInfo* row = FindFormatByName(reserved.name);
    ASSERT_NE(row, nullptr) << reserved.name;
    EXPECT_EQ(static_cast<int>(row->format), reserved.value);
    EXPECT_EQ(row->kind, reserved.kind);
    EXPECT_EQ(row->bits, reserved.bits);
    EXPECT_EQ(row->storage_bits, reserved.bits == 4 ? 4 : 8);
    EXPECT_FALSE(row->implemented);
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
