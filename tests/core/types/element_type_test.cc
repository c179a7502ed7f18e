#include "core/types/element_type.h"

#include "gtest/gtest.h"

namespace quantd::core {
namespace {

TEST(ElementTypeTest, HasTheValuesSizesAndNamesOfTheProtocol) {
  EXPECT_EQ(static_cast<int>(ElementType::kFloat32), 1);
  EXPECT_EQ(static_cast<int>(ElementType::kFloat16), 2);
  EXPECT_EQ(static_cast<int>(ElementType::kBfloat16), 3);
  EXPECT_EQ(static_cast<int>(ElementType::kFloat64), 4);
  EXPECT_EQ(ElementSizeBytes(ElementType::kFloat32), 4);
  EXPECT_EQ(ElementSizeBytes(ElementType::kFloat16), 2);
  EXPECT_EQ(ElementSizeBytes(ElementType::kBfloat16), 2);
  EXPECT_EQ(ElementSizeBytes(ElementType::kFloat64), 8);
  EXPECT_EQ(ElementTypeName(ElementType::kFloat32), "float32");
  EXPECT_EQ(ElementTypeName(ElementType::kFloat16), "float16");
  EXPECT_EQ(ElementTypeName(ElementType::kBfloat16), "bfloat16");
  EXPECT_EQ(ElementTypeName(ElementType::kFloat64), "float64");
}

}  // namespace
}  // namespace quantd::core
