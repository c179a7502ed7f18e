#include "client/models/compressed_tensors.h"

#include <cstdint>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/files/json.h"
#include "client/models/compressed_model.h"
#include "client/models/compressed_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd {
namespace {

// A model of the one module "m".
class CompressedTensorsTest : public ::testing::Test {
 protected:
  QuantizedTensor RoundTrip(bool packs_all, const Encoding& encoding,
                            const std::vector<uint8_t>& codes) {
    CompressedModel model(packs_all);
    auto writer =
        files::SafetensorsWriter::Create(path_, files::IfExists::kReplace)
            .value();
    const ScaleBuffers scales = TakeScales(encoding);
    const absl::StatusOr<uint64_t> size =
        model.Write("m.weight", {2, 3}, encoding, scales.view(), codes,
                    [&writer](const std::string& name, files::Dtype dtype,
                              const std::vector<int64_t>& shape,
                              absl::Span<const uint8_t> data) {
                      return writer.Add(name, dtype, shape, data);
                    });
    EXPECT_TRUE(size.ok()) << size.status();
    EXPECT_TRUE(writer.Finish().ok());
    config_ = model.Config({"head"}, nullptr);
    std::ofstream(directory_.File("config.json"))
        << files::Json({{"quantization_config", config_}});
    input_.emplace(TensorInput::Open(path_).value());
    const absl::StatusOr<std::vector<QuantizedTensor>> tensors =
        ReadCompressed(*input_, path_);
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    return tensors.ok() && tensors->size() == 1 ? tensors->front()
                                                : QuantizedTensor();
  }

  // Reads a folder whose quantized modules are those, with such groups: each
  // one's bits and targets.
  absl::StatusOr<std::vector<QuantizedTensor>> ReadModules(
      const std::vector<std::string>& modules,
      const std::vector<std::pair<int, std::vector<std::string>>>& groups) {
    auto writer =
        files::SafetensorsWriter::Create(path_, files::IfExists::kReplace)
            .value();
    const std::vector<uint8_t> codes = {1, 0};
    const float scale = 0.5f;
    for (const std::string& module : modules) {
      EXPECT_TRUE(
          writer.Add(module + ".weight", files::Dtype::kI8, {2}, codes).ok());
      EXPECT_TRUE(
          writer
              .Add(module + ".weight_scale", files::Dtype::kF32, {1},
                   absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(&scale),
                                       sizeof(scale)))
              .ok());
    }
    EXPECT_TRUE(writer.Finish().ok());
    files::Json config_groups = files::Json::object();
    for (const auto& [bits, targets] : groups) {
      config_groups["group_" + std::to_string(config_groups.size())] = {
          {"targets", targets},
          {"weights",
           {{"num_bits", bits}, {"type", "int"}, {"strategy", "tensor"}}}};
    }
    std::ofstream(directory_.File("config.json"))
        << files::Json({{"quantization_config",
                         {{"quant_method", "compressed-tensors"},
                          {"config_groups", config_groups}}}});
    input_.emplace(TensorInput::Open(path_).value());
    return ReadCompressed(*input_, path_);
  }

  const testing::TemporaryDirectory directory_;
  const std::string path_ = directory_.File("model.safetensors");
  std::optional<TensorInput> input_;
  files::Json config_;
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
      const files::Json& weights =
          config_["config_groups"]["group_0"]["weights"];
      EXPECT_EQ(weights["symmetric"], false);
      ASSERT_EQ(tensor.encoding.format(), v1::NUMBER_FORMAT_INT8);
      ASSERT_EQ(tensor.encoding.zero_point_size(), count);
      ASSERT_EQ(tensor.codes.size(), codes.size());
      // What is packed takes no memory before it is used.
      EXPECT_EQ(tensor.lazy != nullptr, packs_all);
      const std::shared_ptr<const void> hold = tensor.Hold();
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
  const files::Json& weights = config_["config_groups"]["group_0"]["weights"];
  EXPECT_EQ(weights["symmetric"], true);
  EXPECT_TRUE(tensor.encoding.zero_point().empty());
}

TEST_F(CompressedTensorsTest, ConfigurationNamesWhatIsLeftAsItIs) {
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  RoundTrip(/*packs_all=*/false, encoding, {0, 1, 127, 128, 254, 255});
  EXPECT_EQ(config_["ignore"], files::Json::array({"head"}));
  EXPECT_EQ(ModuleOf("layers.0.q.weight"), "layers.0.q");
  EXPECT_EQ(ModuleOf("layers.0.q.bias"), "");
}

TEST_F(CompressedTensorsTest, GroupsMustDivideTheColumns) {
  const auto check = [](v1::NumberFormat format, std::vector<int64_t> block,
                        const std::vector<int64_t>& shape) {
    EncodingSpec spec;
    spec.set_format(format);
    for (const int64_t size : block) spec.add_block_size(size);
    return CheckGroups(spec, shape);
  };
  const auto int4 = v1::NUMBER_FORMAT_INT4;
  EXPECT_TRUE(check(int4, {1, 128}, {8, 2048}).ok());
  EXPECT_TRUE(check(int4, {1, 0}, {8, 37}).ok());
  EXPECT_TRUE(check(int4, {}, {8, 37}).ok());
  // Those are channels, or no matrices.
  EXPECT_TRUE(check(int4, {1, 128}, {8, 37}).ok());
  EXPECT_TRUE(check(int4, {1, 100}, {2048}).ok());
  const absl::Status status = check(int4, {1, 100}, {8, 2048});
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(
                  ::testing::HasSubstr("ARGUMENT_INVALID"),
                  ::testing::HasSubstr("got 2048 columns and groups of 100")));
  EXPECT_TRUE(check(v1::NUMBER_FORMAT_NVFP4, {}, {8, 48}).ok());
  EXPECT_FALSE(check(v1::NUMBER_FORMAT_NVFP4, {}, {8, 40}).ok());
  EXPECT_TRUE(check(v1::NUMBER_FORMAT_MXFP4_E2M1, {}, {8, 64}).ok());
  EXPECT_FALSE(check(v1::NUMBER_FORMAT_MXFP4_E2M1, {}, {8, 48}).ok());
}

TEST_F(CompressedTensorsTest, TargetsMatchAsPythonsReMatch) {
  const auto formats = [](const std::vector<QuantizedTensor>& tensors) {
    std::map<std::string, std::string> found;
    for (const QuantizedTensor& tensor : tensors) {
      found[tensor.name] = FormatName(tensor.encoding.format());
    }
    return found;
  };
  // From the beginning of a name on, every alternative; not to its end. The
  // first group that targets a module has it.
  const auto tensors =
      ReadModules({"layers.0.q_proj", "layers.1.up_proj", "xq_proj", "head"},
                  {{2, {"re:q_proj|up_proj", "re:.*\\.q_pro"}},
                   {3, {"head"}},
                   {4, {"re:(?P<any>\\w+)\\.\\d+\\.up_proj$"}},
                   {5, {"re:.*q_proj", "re:head"}},
                   {6, {"Linear"}}});
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_EQ(formats(*tensors), (std::map<std::string, std::string>{
                                   {"layers.0.q_proj.weight", "int2"},
                                   {"layers.1.up_proj.weight", "int4"},
                                   {"xq_proj.weight", "int5"},
                                   {"head.weight", "int3"}}));
}

// By backtracking some of them would never come to an end.
TEST_F(CompressedTensorsTest, RefusesHostileRegularExpressions) {
  const auto repeat = [](const std::string& text, int count) {
    std::string repeated;
    for (int i = 0; i < count; ++i) repeated += text;
    return repeated;
  };
  for (const std::string& pattern :
       {repeat("(", 400) + "a" + repeat(")", 400) + "\\1",
        repeat("(", 500000) + "a" + repeat(")", 500000),
        std::string("((((((a{1,255}){1,255}){1,255}){1,255}){1,255}){1,255})"),
        std::string("(?!lm_head).*"), std::string("(a)\\1"),
        std::string("(")}) {
    const auto tensors = ReadModules({"m"}, {{8, {"re:" + pattern}}});
    EXPECT_EQ(tensors.status().code(), absl::StatusCode::kUnimplemented)
        << pattern.substr(0, 80);
    EXPECT_THAT(std::string(tensors.status().message()),
                ::testing::AllOf(::testing::HasSubstr("config.json"),
                                 ::testing::HasSubstr("regular expression")));
    EXPECT_LT(tensors.status().message().size(), 2000);
  }
  // Those that are long to match for others, and too many.
  std::vector<std::string> many(256, "re:(a*)*(a|aa)+b");
  EXPECT_FALSE(ReadModules({repeat("a", 2000)}, {{8, many}}).ok());
  many.push_back("re:m");
  EXPECT_EQ(ReadModules({"m"}, {{8, many}}).status().code(),
            absl::StatusCode::kUnimplemented);
  // None that is not needed is looked at.
  EXPECT_TRUE(ReadModules({"m"}, {{8, {"m", "re:("}}}).ok());
}

}  // namespace
}  // namespace quantd
