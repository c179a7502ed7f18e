#include "client/cli/compressed_tensors.h"

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/support/temporary_directory.h"

namespace quantd::cli {
namespace {

// A model of the one module "m".
class CompressedTensorsTest : public ::testing::Test {
 protected:
  QuantizedTensor RoundTrip(bool packs_all, const Encoding& encoding,
                            const std::vector<uint8_t>& codes) {
    CompressedModel model(packs_all);
    auto writer = files::SafetensorsWriter::Create(path_).value();
    const absl::StatusOr<uint64_t> size =
        model.Write("m.weight", {2, 3}, encoding, codes, &writer);
    EXPECT_TRUE(size.ok()) << size.status();
    EXPECT_TRUE(writer.Finish().ok());
    config_ = model.Config();
    std::ofstream(directory_.File("config.json"))
        << Json({{"quantization_config", config_}});
    input_.emplace(TensorInput::Open(path_).value());
    const absl::StatusOr<std::vector<QuantizedTensor>> tensors =
        ReadCompressed(*input_, path_);
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    return tensors.ok() && tensors->size() == 1 ? tensors->front()
                                                : QuantizedTensor();
  }

  const testing::TemporaryDirectory directory_;
  const std::string path_ = directory_.File("model.safetensors");
  std::optional<TensorInput> input_;
  Json config_;
};

TEST_F(CompressedTensorsTest, UnsignedCodesWithoutZeroPointsKeepTheirValues) {
  const std::vector<uint8_t> codes = {0, 1, 127, 128, 254, 255};
  for (const bool packs_all : {false, true}) {
    for (const std::vector<int64_t>& block_size :
         {std::vector<int64_t>{0, 0}, {1, 0}, {1, 2}}) {
      Encoding encoding;
      encoding.set_format(v1::NUMBER_FORMAT_UINT8);
      for (const int64_t size : block_size) encoding.add_block_size(size);
      const int count = block_size[0] == 0 ? 1 : block_size[1] == 0 ? 2 : 4;
      for (int i = 0; i < count; ++i) encoding.add_scale(0.5f);
      const QuantizedTensor tensor = RoundTrip(packs_all, encoding, codes);
      const Json& weights = config_["config_groups"]["group_0"]["weights"];
      EXPECT_EQ(weights["symmetric"], false);
      ASSERT_EQ(tensor.encoding.format(), v1::NUMBER_FORMAT_INT8);
      ASSERT_EQ(tensor.encoding.zero_point_size(), count);
      ASSERT_EQ(tensor.codes.size(), codes.size());
      for (size_t i = 0; i < codes.size(); ++i) {
        EXPECT_EQ(static_cast<int8_t>(tensor.codes[i]) -
                      tensor.encoding.zero_point(0),
                  codes[i]);
      }
    }
  }
}

TEST_F(CompressedTensorsTest, SignedCodesWithoutZeroPointsAreSymmetric) {
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  const QuantizedTensor tensor =
      RoundTrip(/*packs_all=*/false, encoding, {0, 1, 127, 128, 254, 255});
  const Json& weights = config_["config_groups"]["group_0"]["weights"];
  EXPECT_EQ(weights["symmetric"], true);
  EXPECT_TRUE(tensor.encoding.zero_point().empty());
}

}  // namespace
}  // namespace quantd::cli
