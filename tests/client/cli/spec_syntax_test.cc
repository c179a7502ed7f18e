#include "client/cli/spec_syntax.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"

namespace quantd::cli {
namespace {

using Shape = std::vector<int64_t>;

Shape BlockSize(const std::string& granularity, const Shape& shape) {
  return BlockSizeOf(ParseGranularity(granularity).value(), shape).value();
}

TEST(SpecSyntaxTest, GranularityBecomesABlockSize) {
  EXPECT_EQ(BlockSize("per-tensor", {4, 3, 2}), Shape());
  EXPECT_EQ(BlockSize("per-channel", {4, 3, 2}), (Shape{1, 0, 0}));
  EXPECT_EQ(BlockSize("per-channel:2", {4, 3, 2}), (Shape{0, 0, 1}));
  EXPECT_EQ(BlockSize("group:32", {4, 3, 64}), (Shape{1, 1, 32}));
  const Granularity block = ParseBlockSize("1,0,16").value();
  EXPECT_EQ(BlockSizeOf(block, Shape{4, 3, 64}).value(), (Shape{1, 0, 16}));
}

TEST(SpecSyntaxTest, VectorsAndScalarsArePerTensor) {
  EXPECT_EQ(BlockSize("per-channel", {4}), Shape());
  EXPECT_EQ(BlockSize("group:32", {64}), Shape());
  EXPECT_EQ(BlockSize("per-channel", {}), Shape());
}

TEST(SpecSyntaxTest, RefusesWhatDoesNotFitTheTensor) {
  EXPECT_FALSE(
      BlockSizeOf(ParseGranularity("per-channel:2").value(), Shape{4, 3}).ok());
  EXPECT_FALSE(BlockSizeOf(ParseBlockSize("1,0").value(), Shape{4, 3, 2}).ok());
}

TEST(SpecSyntaxTest, RefusesGranularitiesThatMakeNoSense) {
  for (const char* text :
       {"", "tensor", "per-tensor:1", "per-channel:", "per-channel:-1",
        "per-channels", "group", "group:", "group:0", "group:-4", "group:4x",
        "group:99999999999999999999"}) {
    EXPECT_FALSE(ParseGranularity(text).ok()) << text;
  }
  for (const char* text : {"", "1,", ",", "a", "-1", "1;2"}) {
    EXPECT_FALSE(ParseBlockSize(text).ok()) << text;
  }
}

TEST(SpecSyntaxTest, CandidatesHaveGranularityAndSymmetryInTheirOrder) {
  Candidate candidate = ParseCandidate("int8").value();
  EXPECT_EQ(candidate.spec.format, v1::NUMBER_FORMAT_INT8);
  EXPECT_EQ(candidate.spec.granularity.kind, Granularity::Kind::kPerTensor);
  candidate = ParseCandidate("uint4:group:32").value();
  EXPECT_EQ(candidate.spec.format, v1::NUMBER_FORMAT_UINT4);
  EXPECT_EQ(candidate.spec.granularity.group, 32);
  EXPECT_EQ(candidate.spec.symmetry, v1::SYMMETRY_UNSPECIFIED);
  candidate = ParseCandidate("int4:group:64:asymmetric").value();
  EXPECT_EQ(candidate.spec.granularity.group, 64);
  EXPECT_EQ(candidate.spec.symmetry, v1::SYMMETRY_ASYMMETRIC);
  EXPECT_EQ(candidate.label, "int4:group:64:asymmetric");
  candidate = ParseCandidate("int8:full-range").value();
  EXPECT_EQ(candidate.spec.symmetry, v1::SYMMETRY_FULL_RANGE);
  EXPECT_TRUE(ParseCandidate("stored").value().is_stored);
  for (const char* text : {"", "int", "int8:", "int8:group", "int99",
                           "int8:strict:per-tensor", "unspecified"}) {
    EXPECT_FALSE(ParseCandidate(text).ok()) << text;
  }
}

TEST(SpecSyntaxTest, PatternsMatchWholeNames) {
  EXPECT_TRUE(MatchesGlob("*", ""));
  EXPECT_TRUE(MatchesGlob("conv*.weight", "conv1.weight"));
  EXPECT_TRUE(MatchesGlob("*.weight", "a.weight.weight"));
  EXPECT_TRUE(MatchesGlob("layer?.*", "layer1."));
  EXPECT_TRUE(MatchesGlob("a*b*c", "a-b-b-c"));
  EXPECT_FALSE(MatchesGlob("conv*.weight", "conv1.weight.scale"));
  EXPECT_FALSE(MatchesGlob("layer?", "layer"));
  EXPECT_FALSE(MatchesGlob("", "a"));
  EXPECT_FALSE(MatchesGlob(std::string(50, '*') + "b", std::string(5000, 'a')));
}

TEST(SpecSyntaxTest, SpecsCarryFormatBlockSizeAndSymmetry) {
  const EncodingSpec spec = ParseCandidate("int8:per-channel:half-step")
                                .value()
                                .spec.SpecOf({8, 4})
                                .value();
  EXPECT_EQ(spec.format(), v1::NUMBER_FORMAT_INT8);
  EXPECT_EQ(spec.symmetry(), v1::SYMMETRY_HALF_STEP);
  EXPECT_EQ(Shape(spec.block_size().begin(), spec.block_size().end()),
            (Shape{1, 0}));
}

}  // namespace
}  // namespace quantd::cli
