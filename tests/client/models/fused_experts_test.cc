#include "client/models/fused_experts.h"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/safetensors.h"
#include "client/models/tensor_input.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kExperts = 3;
constexpr int64_t kInner = 2;
constexpr int64_t kOuter = 5;

class SplitExpertsTest : public ::testing::Test {
 protected:
  using Stack = std::pair<std::string, std::vector<int64_t>>;

  // A file whose tensors have elements 0, 1, 2, ... of two bytes.
  TensorInput Write(const std::string& name, const std::vector<Stack>& stacks) {
    auto writer = files::SafetensorsWriter::Create(directory_.File(name),
                                                   files::IfExists::kReplace);
    for (const auto& [tensor, shape] : stacks) {
      std::vector<uint16_t> elements(static_cast<size_t>(std::accumulate(
          shape.begin(), shape.end(), int64_t{1}, std::multiplies<>())));
      std::iota(elements.begin(), elements.end(), uint16_t{0});
      EXPECT_TRUE(writer
                      ->Add(tensor, files::Dtype::kBF16, shape,
                            {reinterpret_cast<const uint8_t*>(elements.data()),
                             elements.size() * sizeof(uint16_t)})
                      .ok());
    }
    EXPECT_TRUE(writer->Finish().ok());
    return *TensorInput::Open(directory_.File(name));
  }

  static std::vector<uint16_t> ElementsOf(const TensorInput& input,
                                          const std::string& name) {
    const files::FileTensor* const tensor = input.Find(name);
    EXPECT_NE(tensor, nullptr) << name;
    if (tensor == nullptr) return {};
    const std::shared_ptr<const void> hold = tensor->Hold();
    const auto* begin = reinterpret_cast<const uint16_t*>(tensor->data.data());
    return {begin, begin + tensor->data.size() / sizeof(uint16_t)};
  }

  const testing::TemporaryDirectory directory_;
};

TEST_F(SplitExpertsTest, GivesEachExpertItsRows) {
  TensorInput input =
      Write("m.safetensors",
            {{"l.0.experts.gate_up_proj", {kExperts, 2 * kInner, kOuter}},
             {"l.0.experts.down_proj", {kExperts, kOuter, kInner}},
             {"norm", {1, 1}}});
  const std::vector<FusedExperts> replaced = SplitExperts({&input}, "");
  ASSERT_THAT(replaced, SizeIs(2));
  for (const FusedExperts& one : replaced) {
    EXPECT_EQ(one.expert_count, kExperts);
    EXPECT_FALSE(one.is_transposed);
  }
  EXPECT_THAT(replaced[0].patterns,
              ElementsAre("l.0.experts.*.gate_proj.weight",
                          "l.0.experts.*.up_proj.weight"));
  EXPECT_THAT(replaced[1].patterns,
              ElementsAre("l.0.experts.*.down_proj.weight"));
  EXPECT_THAT(input.tensors(), SizeIs(3 * kExperts + 1));
  EXPECT_EQ(input.Find("l.0.experts.gate_up_proj"), nullptr);
  for (int64_t expert = 0; expert < kExperts; ++expert) {
    const std::string prefix = "l.0.experts." + std::to_string(expert) + ".";
    const auto of = [&](const char* name, int64_t first, int64_t count) {
      const std::vector<uint16_t> got = ElementsOf(input, prefix + name);
      ASSERT_EQ(static_cast<int64_t>(got.size()), count) << prefix << name;
      for (int64_t i = 0; i < count; ++i) {
        EXPECT_EQ(got[static_cast<size_t>(i)], first + i) << prefix << name;
      }
    };
    const int64_t half = kInner * kOuter;
    of("gate_proj.weight", expert * 2 * half, half);
    of("up_proj.weight", expert * 2 * half + half, half);
    of("down_proj.weight", expert * half, half);
  }
  EXPECT_THAT(input.Find("l.0.experts.1.up_proj.weight")->shape,
              ElementsAre(kInner, kOuter));
}

TEST_F(SplitExpertsTest, TransposesThoseThatLieTheOtherWayRound) {
  TensorInput input =
      Write("m.safetensors",
            {{"experts.gate_up_proj.weight", {kExperts, kOuter, 2 * kInner}},
             {"experts.down_proj.weight", {kExperts, kInner, kOuter}}});
  const std::vector<FusedExperts> replaced = SplitExperts({&input}, "");
  ASSERT_THAT(replaced, SizeIs(2));
  EXPECT_TRUE(replaced[0].is_transposed);
  EXPECT_THAT(input.Find("experts.0.gate_proj.weight")->shape,
              ElementsAre(kInner, kOuter));
  // Row r of expert 1 is column r, or kInner + r of the ups, of [kOuter, 4].
  const uint16_t begin = kOuter * 2 * kInner;
  EXPECT_THAT(
      ElementsOf(input, "experts.1.gate_proj.weight"),
      ElementsAre(begin, begin + 4, begin + 8, begin + 12, begin + 16,
                  begin + 1, begin + 5, begin + 9, begin + 13, begin + 17));
  EXPECT_THAT(
      ElementsOf(input, "experts.1.up_proj.weight"),
      ElementsAre(begin + 2, begin + 6, begin + 10, begin + 14, begin + 18,
                  begin + 3, begin + 7, begin + 11, begin + 15, begin + 19));
  // [kInner, kOuter] for each expert; the weight is [kOuter, kInner].
  EXPECT_THAT(ElementsOf(input, "experts.2.down_proj.weight"),
              ElementsAre(20, 25, 21, 26, 22, 27, 23, 28, 24, 29));
}

TEST_F(SplitExpertsTest, FindsTheTensorsOfALayerInTwoFiles) {
  TensorInput first =
      Write("1.safetensors",
            {{"x.experts.gate_up_proj", {kExperts, 2 * kInner, kOuter}}});
  TensorInput second = Write(
      "2.safetensors", {{"x.experts.down_proj", {kExperts, kOuter, kInner}}});
  EXPECT_THAT(SplitExperts({&first, &second}, ""), SizeIs(2));
  EXPECT_THAT(first.tensors(), SizeIs(2 * kExperts));
  EXPECT_THAT(second.tensors(), SizeIs(kExperts));
}

TEST_F(SplitExpertsTest, LeavesOthersAsTheyAre) {
  const Stack gate_up = {"x.experts.gate_up_proj",
                         {kExperts, 2 * kInner, kOuter}};
  const Stack down = {"x.experts.down_proj", {kExperts, kOuter, kInner}};
  for (const std::vector<Stack>& stacks : std::vector<std::vector<Stack>>{
           {gate_up},
           {down},
           // With biases gates and ups take turns.
           {gate_up, down, {"x.experts.gate_up_proj_bias", {kExperts, 4}}},
           {gate_up, down, {"x.experts.down_proj.bias", {kExperts, kOuter}}},
           // Other numbers of experts; shapes that do not go together.
           {gate_up, {down.first, {kExperts + 1, kOuter, kInner}}},
           {gate_up, {down.first, {kExperts, kOuter, kInner + 1}}},
           {{gate_up.first, {2 * kInner, kOuter}}, down},
           // Of no experts.
           {{"x.gate_up_proj", gate_up.second}, {"x.down_proj", down.second}},
           {{"x.myexperts.gate_up_proj", gate_up.second},
            {"x.myexperts.down_proj", down.second}}}) {
    TensorInput input = Write("m.safetensors", stacks);
    EXPECT_THAT(SplitExperts({&input}, ""), IsEmpty());
    EXPECT_THAT(input.tensors(), SizeIs(stacks.size()));
  }
}

TEST_F(SplitExpertsTest, NamesThoseOfGraniteAsVllmReadsThem) {
  const std::string layer = "l.0.block_sparse_moe.";
  const std::vector<Stack> stacks = {
      {layer + "input_linear.weight", {kExperts, 2 * kInner, kOuter}},
      {layer + "output_linear.weight", {kExperts, kOuter, kInner}},
      {"l.0.shared_mlp.input_linear.weight", {2 * kInner, kOuter}}};
  for (const auto& [model_type, names] :
       std::map<std::string, std::vector<std::string>>{
           {"granitemoe", {"w1", "w3", "w2"}},
           {"granitemoehybrid", {"gate_proj", "up_proj", "down_proj"}}}) {
    TensorInput input = Write("m.safetensors", stacks);
    const std::vector<FusedExperts> replaced =
        SplitExperts({&input}, model_type);
    ASSERT_THAT(replaced, SizeIs(2));
    const std::string experts = layer + "experts.";
    EXPECT_THAT(replaced[0].patterns,
                ElementsAre(experts + "*." + names[0] + ".weight",
                            experts + "*." + names[1] + ".weight"));
    EXPECT_THAT(replaced[1].patterns,
                ElementsAre(experts + "*." + names[2] + ".weight"));
    EXPECT_THAT(input.tensors(), SizeIs(3 * kExperts + 1));
    const int64_t half = kInner * kOuter;
    for (const auto& [name, first] : std::map<std::string, int64_t>{
             {names[0], 2 * half}, {names[1], 3 * half}, {names[2], half}}) {
      EXPECT_EQ(ElementsOf(input, experts + "1." + name + ".weight")[0], first)
          << name;
    }
  }
}

TEST(LayerOfExpertsTest, IsThatOfAllNames) {
  const auto of = [](const char* name, const std::vector<int64_t>& shape) {
    files::FileTensor tensor;
    tensor.name = name;
    tensor.shape = shape;
    return LayerOfExperts(tensor);
  };
  EXPECT_EQ(of("m.experts.3.w1.weight", {2, 2}), "m.experts");
  EXPECT_EQ(of("experts.gate_up_proj", {3, 2, 2}), "experts");
  EXPECT_EQ(of("m.block_sparse_moe.output_linear.weight", {3, 2, 2}),
            "m.block_sparse_moe.experts");
  EXPECT_EQ(of("m.ffn.experts.mlp.w1", {6, 2}), "m.ffn.experts");
  EXPECT_EQ(of("m.moe.up_proj.weight", {3, 2, 2}), "m.moe.experts");
  EXPECT_EQ(of("m.mlp.up_proj.weight", {2, 2}), "");
  EXPECT_EQ(of("m.shared_mlp.input_linear.weight", {2, 2}), "");
}

}  // namespace
}  // namespace quantd
