#include "client/models/tie_groups.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/models/spec_syntax.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quantd {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string LabelOf(const std::string& pattern, const std::string& name) {
  const absl::StatusOr<TiePattern> parsed = TiePattern::Parse(pattern);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  if (!parsed.ok()) return "";
  return parsed->LabelOf(name).value_or("none");
}

TEST(TiePatternTest, ALabelHasWhatAGroupHasInCommon) {
  const std::string pattern = "{layer}.attn.{q,k,v}_proj.weight";
  EXPECT_EQ(LabelOf(pattern, "layers.7.attn.k_proj.weight"),
            "layers.7.attn.{q,k,v}_proj.weight");
  EXPECT_EQ(LabelOf(pattern, "layers.7.attn.o_proj.weight"), "none");
  EXPECT_EQ(LabelOf(pattern, ".attn.q_proj.weight"), "none");
  EXPECT_EQ(LabelOf(pattern, "x.attn.q_proj.weights"), "none");
  // The longest first.
  EXPECT_EQ(LabelOf("{a}.{b}.{w1,w3}", "x.y.z.w3"), "x.y.z.{w1,w3}");
  EXPECT_EQ(LabelOf("*.{w1,w}*.x", "a.w1.x"), "*.{w1,w}*.x");
}

TEST(TiePatternTest, AStarMayDifferWithinAGroup) {
  const std::string pattern = "{layer}.experts.*.{w1,w3}.weight";
  EXPECT_EQ(LabelOf(pattern, "a.experts.0.w1.weight"),
            LabelOf(pattern, "a.experts.17.w3.weight"));
}

TEST(TiePatternTest, TellsWhatIsWrongWithAPattern) {
  const auto error = [](const std::string& text) {
    return std::string(TiePattern::Parse(text).status().message());
  };
  EXPECT_THAT(error("{a,b"), HasSubstr("} after {"));
  EXPECT_THAT(error("a,b}"), HasSubstr("{ before }"));
  EXPECT_THAT(error("{}{a,b}"), HasSubstr("in braces"));
  EXPECT_THAT(error("{{a,b}}"), HasSubstr("in braces"));
  // No two names have a label in common.
  EXPECT_THAT(error("{layer}.weight"), HasSubstr("{A,B,...} or *"));
  EXPECT_THAT(error(""), HasSubstr("{A,B,...} or *"));
}

TEST(TiePatternTest, AllDefaultsAreSound) {
  for (const std::string& text : DefaultTies()) {
    EXPECT_TRUE(TiePattern::Parse(text).ok()) << text;
  }
}

class FindTiesTest : public ::testing::Test {
 protected:
  // Tensors of 4 rows of 32.
  void Add(const std::string& name, const std::string& spec,
           files::Dtype dtype = files::Dtype::kF32) {
    tensors_.push_back({name, dtype, {4, 32}, {}});
    specs_.push_back(spec);
  }

  absl::StatusOr<std::vector<TieGroup>> Find(const TieOptions& options) {
    std::vector<TieCandidate> candidates;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      candidates.push_back(
          {&tensors_[i], *ParseSpec(specs_[i])->SpecOf(tensors_[i].shape)});
    }
    return FindTies(options, candidates);
  }

  std::vector<std::string> Labels(const TieOptions& options = {}) {
    const absl::StatusOr<std::vector<TieGroup>> groups = Find(options);
    if (!groups.ok()) return {std::string(groups.status().message())};
    std::vector<std::string> labels;
    for (const TieGroup& group : *groups) labels.push_back(group.label);
    return labels;
  }

 private:
  std::vector<files::FileTensor> tensors_;
  std::vector<std::string> specs_;
};

TEST_F(FindTiesTest, TiesWhatRuntimesFuse) {
  for (const char* name :
       {"0.q_proj.weight", "0.k_proj.weight", "0.v_proj.weight",
        "0.o_proj.weight", "0.gate_proj.weight", "0.up_proj.weight",
        "0.experts.1.w1.weight", "0.experts.1.w2.weight",
        "0.experts.1.w3.weight", "0.experts.2.w1.weight",
        "0.experts.2.w3.weight", "1.q_proj.weight", "2.qkv_proj.weight"}) {
    Add(name, "nvfp4");
  }
  EXPECT_THAT(
      Labels(),
      ElementsAre("0.{q,k,v}_proj.weight", "0.{gate,up}_proj.weight",
                  "0.experts.1.{w1,w3}.weight", "0.experts.2.{w1,w3}.weight"));
  TieOptions none;
  none.has_defaults = false;
  EXPECT_THAT(Labels(none), IsEmpty());
  // The first pattern takes a tensor.
  TieOptions more;
  more.patterns.push_back(
      *TiePattern::Parse("{layer}.experts.*.{w1,w3}.weight"));
  EXPECT_THAT(Labels(more),
              ElementsAre("0.{q,k,v}_proj.weight", "0.{gate,up}_proj.weight",
                          "0.experts.*.{w1,w3}.weight"));
}

TEST_F(FindTiesTest, LeavesOutWhatHasNoOuterScale) {
  Add("0.q_proj.weight", "int8");
  Add("0.k_proj.weight", "int8");
  Add("0.w1.weight", "lpbq:group:16");
  Add("0.w3.weight", "lpbq:group:16");
  EXPECT_THAT(Labels(), IsEmpty());
  TieOptions options;
  options.patterns.push_back(*TiePattern::Parse("0.{q,k}_proj.weight"));
  EXPECT_THAT(Labels(options),
              ElementsAre(HasSubstr("such as float8_e4m3fn, got int8")));
}

TEST_F(FindTiesTest, RefusesDifferentSpecs) {
  Add("0.q_proj.weight", "nvfp4");
  Add("0.k_proj.weight", "nvfp4:mse");
  EXPECT_THAT(Labels(), IsEmpty());
  TieOptions strict;
  strict.is_strict = true;
  EXPECT_THAT(Labels(strict), ElementsAre(HasSubstr("one spec for all")));
  TieOptions given;
  given.patterns.push_back(*TiePattern::Parse("{n}.{q,k}_proj.weight"));
  EXPECT_THAT(Labels(given), ElementsAre(HasSubstr("one spec for all")));
}

TEST_F(FindTiesTest, APatternThatTiesNothingIsAnError) {
  Add("0.q_proj.weight", "nvfp4");
  Add("0.k_proj.weight", "nvfp4");
  TieOptions options;
  options.patterns.push_back(*TiePattern::Parse("{n}.{q,v}_proj.weight"));
  EXPECT_THAT(Labels(options), ElementsAre(HasSubstr("{n}.{q,v}_proj.weight")));
}

TEST(ExpertsOfTest, AreThoseOfALayer) {
  EXPECT_EQ(ExpertsOf("m.experts.12.up_proj.weight"), "m.experts");
  EXPECT_EQ(ExpertsOf("experts.0.w1.weight"), "experts");
  EXPECT_EQ(ExpertsOf("my_experts.0.experts.3.w1.weight"),
            "my_experts.0.experts");
  EXPECT_EQ(ExpertsOf("m.experts.gate_up_proj"), "m.experts");
  EXPECT_EQ(ExpertsOf("m.experts.down_proj.weight"), "m.experts");
  for (const char* name :
       {"m.shared_experts.0.x.weight", "experts", "experts.", "",
        "m.experts.x0.weight", "m.experts.0.w1.bias", "m.experts.0.weight",
        "m.experts.down_proj_bias", "m.shared_experts.down_proj.weight"}) {
    EXPECT_EQ(ExpertsOf(name), "") << name;
  }
}

TEST(FindTiedTensorsTest, ExpertsOfALayerHaveOneSpecAndScalesOfTheirOwn) {
  std::vector<files::FileTensor> tensors;
  for (const char* name : {"0.experts.0.w1.weight", "0.experts.0.w3.weight",
                           "0.experts.1.w2.weight", "1.experts.0.w2.weight",
                           "1.experts.5.w2.weight", "0.experts.0.norm.weight",
                           "0.shared_experts.w2.weight"}) {
    tensors.push_back({name, files::Dtype::kF32, {4, 32}, {}});
  }
  tensors[5].shape = {4};
  std::vector<const files::FileTensor*> all;
  for (const files::FileTensor& tensor : tensors) all.push_back(&tensor);
  const absl::StatusOr<std::vector<TieGroup>> groups =
      FindTiedTensors(TieOptions(), all);
  ASSERT_TRUE(groups.ok());
  ASSERT_EQ(groups->size(), 3);
  EXPECT_EQ((*groups)[0].label, "0.experts.0.{w1,w3}.weight");
  EXPECT_TRUE((*groups)[0].shares_scale);
  EXPECT_EQ((*groups)[1].label, "0.experts.*");
  EXPECT_THAT((*groups)[1].tensors,
              ElementsAre(&tensors[0], &tensors[1], &tensors[2]));
  EXPECT_THAT((*groups)[2].tensors, ElementsAre(&tensors[3], &tensors[4]));
  const std::vector<TieGroup> sharing =
      GroupsThatShare(*ParseSpec("nvfp4"), *groups);
  ASSERT_EQ(sharing.size(), 1);
  EXPECT_EQ(sharing[0].label, "0.experts.0.{w1,w3}.weight");
  TieOptions none;
  none.has_defaults = false;
  EXPECT_THAT(*FindTiedTensors(none, all), IsEmpty());
}

TEST(TiedMaximaTest, AreThoseOfTheGroup) {
  const std::vector<float> a = {1, -3, std::numeric_limits<float>::infinity(),
                                2};
  const std::vector<float> b = {4, 0, 1, 1};
  const std::vector<float> c = {9, 9, 9, 9};
  const auto tensor = [](const char* name, const std::vector<float>& values) {
    return files::FileTensor{
        name,
        files::Dtype::kF32,
        {1, 4},
        {reinterpret_cast<const uint8_t*>(values.data()), 4 * values.size()}};
  };
  const std::vector<files::FileTensor> tensors = {
      tensor("a", a), tensor("b", b), tensor("c", c)};
  const std::vector<TieGroup> groups = {{"g", {&tensors[0], &tensors[1]}}};
  TiedMaxima maxima(groups);
  const auto tie = [&](const char* text, int i) {
    EncodingSpec spec = *ParseSpec(text)->SpecOf({1, 4});
    const EncodingSpec before = spec;
    std::vector<float> maximum;
    maxima.Tie(tensors[static_cast<size_t>(i)], &spec, &maximum);
    if (spec.SerializeAsString() != before.SerializeAsString()) {
      EXPECT_EQ(spec.method(), v1::CALIBRATION_METHOD_FIXED_RANGE);
      EXPECT_EQ(spec.range_min(), -spec.range_max());
      EXPECT_THAT(maximum, IsEmpty());
      maximum = {static_cast<float>(spec.range_max()), 0};
    }
    return maximum;
  };
  EXPECT_THAT(tie("nvfp4", 0), ElementsAre(FloatEq(4)));
  EXPECT_THAT(tie("nvfp4", 1), ElementsAre(FloatEq(4)));
  EXPECT_THAT(tie("nvfp4", 2), ElementsAre(FloatEq(9)));
  // With a search too, where a tensor alone has none.
  EXPECT_THAT(tie("nvfp4:mse", 0), ElementsAre(FloatEq(4)));
  EXPECT_THAT(tie("nvfp4:mse", 2), IsEmpty());
  // One scale becomes one range.
  EXPECT_THAT(tie("float8_e4m3fn:per-tensor", 0), ElementsAre(FloatEq(4), 0));
  EXPECT_THAT(tie("float8_e4m3fn:per-tensor", 1), ElementsAre(FloatEq(4), 0));
  EXPECT_THAT(tie("float8_e4m3fn:per-tensor", 2), IsEmpty());
}

}  // namespace
}  // namespace quantd
