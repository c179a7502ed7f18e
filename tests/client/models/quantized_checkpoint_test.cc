#include "client/models/quantized_checkpoint.h"

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/tensor_stream.h"
#include "client/files/coded_tensor.h"
#include "client/models/quantized_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quantd {
namespace {

using ::testing::HasSubstr;

TEST(CodedTensorOfTest, RefusesZeroPointsBetweenCodes) {
  const std::vector<uint8_t> codes = {1, 2};
  QuantizedTensor tensor;
  tensor.name = "w";
  tensor.element_type = ElementType::kFloat32;
  tensor.shape = {2};
  tensor.codes = codes;
  tensor.encoding.set_format(v1::NUMBER_FORMAT_UINT8);
  tensor.encoding.add_scale(0.5f);
  tensor.encoding.add_zero_point(3);
  EXPECT_EQ(CodedTensorOf(tensor, "f")->zero_points.size(), 1);
  tensor.encoding.clear_zero_point();
  tensor.encoding.add_real_zero_point(3.5f);
  EXPECT_THAT(CodedTensorOf(tensor, "f").status().message(),
              HasSubstr("zero points between codes"));
}

}  // namespace
}  // namespace quantd
