#include "client/jobs/tensor_filter.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "client/files/dtype.h"
#include "client/files/safetensors.h"
#include "gtest/gtest.h"

namespace quantd::jobs {
namespace {

files::FileTensor Tensor(const std::string& name, std::vector<int64_t> shape,
                         files::Dtype dtype = files::Dtype::kF32) {
  files::FileTensor tensor;
  tensor.name = name;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return tensor;
}

TEST(TensorFilterTest, TakesRealsOfARankAndAName) {
  TensorFilter filter;
  EXPECT_TRUE(filter.Takes(Tensor("w", {2, 2})));
  EXPECT_FALSE(filter.Takes(Tensor("b", {2})));
  EXPECT_FALSE(filter.Takes(Tensor("i", {2, 2}, files::Dtype::kI32)));
  filter.include = {"*.weight", "head*"};
  filter.exclude = {"head.bias*"};
  EXPECT_TRUE(filter.Takes(Tensor("a.weight", {2, 2})));
  EXPECT_TRUE(filter.Takes(Tensor("head", {2, 2})));
  EXPECT_FALSE(filter.Takes(Tensor("a.scale", {2, 2})));
  EXPECT_FALSE(filter.Takes(Tensor("head.bias.weight", {2, 2})));
  filter.all = true;
  EXPECT_TRUE(filter.Takes(Tensor("a.weight", {})));
  EXPECT_FALSE(filter.Takes(Tensor("a.weight", {}, files::Dtype::kU8)));
  filter.all = false;
  filter.min_rank = 3;
  EXPECT_FALSE(filter.Takes(Tensor("a.weight", {2, 2})));
}

}  // namespace
}  // namespace quantd::jobs
