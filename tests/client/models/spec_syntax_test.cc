#include "client/models/spec_syntax.h"

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "client/cpp/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temporary_directory.h"

namespace quantd {
namespace {

using Shape = std::vector<int64_t>;

Shape BlockSize(const std::string& granularity, const Shape& shape) {
  return BlockSizeOf(ParseGranularity(granularity).value(), shape).value();
}

TEST(SpecSyntaxTest, GranularityBecomesABlockSize) {
  EXPECT_EQ(BlockSize("per-tensor", {4, 3, 2}), Shape());
  EXPECT_EQ(BlockSize("per-channel", {4, 3, 2}), (Shape{1, 0, 0}));
  EXPECT_EQ(BlockSize("per-channel:2", {4, 3, 2}), (Shape{0, 0, 1}));
  EXPECT_EQ(BlockSize("per-channel:-1", {4, 3, 2}), (Shape{0, 0, 1}));
  EXPECT_EQ(BlockSize("group:32", {4, 3, 64}), (Shape{1, 1, 32}));
  EXPECT_EQ(BlockSize("group:2:0", {4, 3, 64}), (Shape{2, 1, 1}));
  EXPECT_EQ(BlockSize("group:3:-2", {4, 3, 64}), (Shape{1, 3, 1}));
  const Granularity block = ParseBlockSize("1,0,16").value();
  EXPECT_EQ(BlockSizeOf(block, Shape{4, 3, 64}).value(), (Shape{1, 0, 16}));
}

TEST(SpecSyntaxTest, VectorsAndScalarsArePerTensor) {
  EXPECT_EQ(BlockSize("per-channel", {4}), Shape());
  EXPECT_EQ(BlockSize("group:32", {64}), Shape());
  EXPECT_EQ(BlockSize("per-channel", {}), Shape());
}

TEST(SpecSyntaxTest, RefusesWhatDoesNotFitTheTensor) {
  for (const char* text :
       {"per-channel:2", "per-channel:-3", "group:2:2", "group:2:-3"}) {
    EXPECT_FALSE(BlockSizeOf(ParseGranularity(text).value(), Shape{4, 3}).ok())
        << text;
  }
  EXPECT_FALSE(BlockSizeOf(ParseBlockSize("1,0").value(), Shape{4, 3, 2}).ok());
}

TEST(SpecSyntaxTest, RefusesGranularitiesThatMakeNoSense) {
  for (const char* text :
       {"", "tensor", "per-tensor:1", "per-channel:", "per-channel:x",
        "per-channels", "group", "group:", "group:0", "group:-4", "group:4x",
        "group:4:", "group:4:x", "group:4:1:1", "group:99999999999999999999"}) {
    EXPECT_FALSE(ParseGranularity(text).ok()) << text;
  }
  for (const char* text : {"", "1,", ",", "a", "-1", "1;2"}) {
    EXPECT_FALSE(ParseBlockSize(text).ok()) << text;
  }
}

TEST(SpecSyntaxTest, CandidatesHaveGranularityAndSymmetryInTheirOrder) {
  Candidate candidate = ParseCandidate("int8").value();
  EXPECT_EQ(candidate.spec.spec.format(), v1::NUMBER_FORMAT_INT8);
  EXPECT_EQ(candidate.spec.granularity.kind, Granularity::Kind::kDefault);
  candidate = ParseCandidate("uint4:group:32").value();
  EXPECT_EQ(candidate.spec.spec.format(), v1::NUMBER_FORMAT_UINT4);
  EXPECT_EQ(candidate.spec.granularity.group, 32);
  EXPECT_EQ(candidate.spec.spec.symmetry(), v1::SYMMETRY_UNSPECIFIED);
  candidate = ParseCandidate("int4:group:64:asymmetric").value();
  EXPECT_EQ(candidate.spec.granularity.group, 64);
  EXPECT_EQ(candidate.spec.spec.symmetry(), v1::SYMMETRY_ASYMMETRIC);
  EXPECT_EQ(candidate.label, "int4:group:64:asymmetric");
  candidate = ParseCandidate("int8:full-range").value();
  EXPECT_EQ(candidate.spec.spec.symmetry(), v1::SYMMETRY_FULL_RANGE);
  candidate = ParseCandidate("int8:mse:mantissa-bits=9").value();
  EXPECT_EQ(candidate.spec.spec.mantissa_bits(), 9);
  candidate = ParseCandidate("lpbq:aimet").value();
  EXPECT_EQ(candidate.spec.spec.symmetry(), v1::SYMMETRY_AIMET);
  EXPECT_TRUE(ParseCandidate("stored").value().is_stored);
  for (const char* text :
       {"", "int", "int8:", "int8:group", "int99", "int8:strict:full-range",
        "unspecified", "int8:mse:mantissa-bits=x"}) {
    EXPECT_FALSE(ParseCandidate(text).ok()) << text;
  }
}

TEST(SpecSyntaxTest, OptionsHaveValues) {
  absl::StatusOr<SpecTemplate> spec =
      ParseSpec("int8:entropy:bins=4096:steps=9:block=1,0,32");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->spec.entropy_bins(), 4096);
  EXPECT_EQ(spec->spec.search_steps(), 9);
  EXPECT_THAT(spec->granularity.block_size, ::testing::ElementsAre(1, 0, 32));
  spec = ParseSpec("codebook2:entries=-1,-0.25,0.25,1:percentile:tail=upper");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->spec.codebook_size(), 4);
  EXPECT_EQ(spec->spec.tail(), v1::TAIL_UPPER);
  for (const char* text :
       {"int8:block=", "int8:block=1:group:2", "int8:tail=left",
        "int8:steps=few", "int8:bins=-1", "codebook2:entries=/no/file"}) {
    EXPECT_FALSE(ParseSpec(text).ok()) << text;
  }
}

EncodingSpec Spec(const std::string& text) {
  const absl::StatusOr<SpecTemplate> spec = ParseSpec(text);
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.ok() ? spec->spec : EncodingSpec();
}

TEST(SpecSyntaxTest, MethodsCarryTheirParameters) {
  EXPECT_EQ(Spec("int8").method(), v1::CALIBRATION_METHOD_UNSPECIFIED);
  EXPECT_EQ(Spec("int8:minmax").method(), v1::CALIBRATION_METHOD_MIN_MAX);
  EncodingSpec spec = Spec("uint8:percentile=0.999");
  EXPECT_EQ(spec.method(), v1::CALIBRATION_METHOD_PERCENTILE);
  EXPECT_EQ(spec.tail_fraction(), 0.001);
  EXPECT_FALSE(Spec("uint8:percentile").has_tail_fraction());
  EXPECT_EQ(Spec("uint8:percentile=1").tail_fraction(), 0);
  EXPECT_EQ(Spec("uint8:percentile=99.9%").tail_fraction(), 0.001);
  EXPECT_EQ(Spec("int8:mse=256").search_steps(), 256);
  EXPECT_EQ(Spec("int8:sqnr=2.5").gamma(), 2.5);
  EXPECT_EQ(Spec("int8:entropy").method(), v1::CALIBRATION_METHOD_ENTROPY);
  EXPECT_EQ(Spec("int8:moving-average").method(),
            v1::CALIBRATION_METHOD_MOVING_AVERAGE);
  spec = Spec("int8:fixed=-1,2.5");
  EXPECT_EQ(spec.method(), v1::CALIBRATION_METHOD_FIXED_RANGE);
  EXPECT_EQ(spec.range_min(), -1);
  EXPECT_EQ(spec.range_max(), 2.5);
  for (const char* text : {"int8:best-of:mse,percentile:per-channel",
                           "int8:per-channel:best-of=mse,percentile"}) {
    spec = Spec(text);
    EXPECT_EQ(spec.method(), v1::CALIBRATION_METHOD_BEST_OF) << text;
    ASSERT_EQ(spec.methods_size(), 2) << text;
    EXPECT_EQ(spec.methods(0), v1::CALIBRATION_METHOD_MSE) << text;
    EXPECT_EQ(spec.methods(1), v1::CALIBRATION_METHOD_PERCENTILE) << text;
    EXPECT_EQ(ParseSpec(text)->granularity.kind,
              Granularity::Kind::kPerChannel);
  }
  for (const char* text :
       {"int8:percentile=0", "int8:percentile=1.1", "int8:percentile=99.9",
        "int8:percentile=x%", "int8:percentile=x", "int8:mse=x",
        "int8:minmax=1", "int8:fixed=1,-1", "int8:fixed=1", "int8:best-of",
        "int8:best-of=mse,x", "int8:best-of=", "int8:mse:sqnr",
        "int8:group:4:per-channel", "int8:what"}) {
    EXPECT_FALSE(ParseSpec(text).ok()) << text;
  }
}

TEST(SpecSyntaxTest, OptionsOfScalesStandAnywhereBehindTheFormat) {
  const EncodingSpec spec =
      Spec("mxfp4_e2m1:rule=even:mse:scale=e8m0:power-of-two:no-saturation");
  EXPECT_EQ(spec.format(), v1::NUMBER_FORMAT_MXFP4_E2M1);
  EXPECT_EQ(spec.mx_scale_rule(), v1::MX_SCALE_RULE_EVEN);
  EXPECT_EQ(spec.scale_type(), v1::SCALE_TYPE_E8M0);
  EXPECT_TRUE(spec.power_of_two_scale());
  EXPECT_TRUE(spec.no_saturation());
  EXPECT_FALSE(ParseSpec("nf4:scale=int").ok());
  EXPECT_FALSE(ParseSpec("nf4:rule=up").ok());
  EXPECT_EQ(ScaleTypeName(v1::SCALE_TYPE_BFLOAT16), "bfloat16");
}

TEST(SpecSyntaxTest, TakesEveryName) {
  for (const char* text :
       {"int8:default",        "int8:asymmetric",       "int8:strict",
        "int8:full-range",     "int8:half-step",        "int8:aimet",
        "int8:minmax",         "int8:percentile",       "int8:mse",
        "int8:sqnr",           "int8:entropy",          "int8:fixed",
        "int8:moving-average", "int8:best-of=mse,sqnr", "int8:tail=default",
        "int8:tail=magnitude", "int8:tail=both",        "int8:tail=upper",
        "int8:tail=lower",     "int8:scale=default",    "int8:scale=float32",
        "int8:scale=float16",  "int8:scale=bfloat16",   "int8:scale=e8m0",
        "int8:scale=e4m3",     "int8:scale=integer",    "int8:rule=default",
        "int8:rule=floor",     "int8:rule=ceil",        "int8:rule=even",
        "int8:rule=rceil"}) {
    EXPECT_TRUE(ParseSpec(text).ok()) << text;
  }
}

TEST(SpecSyntaxTest, EveryFormatHasItsName) {
  const auto* formats = v1::NumberFormat_descriptor();
  for (int i = 1; i < formats->value_count(); ++i) {
    const auto format =
        static_cast<v1::NumberFormat>(formats->value(i)->number());
    EXPECT_EQ(ParseFormat(FormatName(format)).value(), format);
    const absl::StatusOr<FormatInfo> info = GetFormatInfo(format);
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(info->format, format);
    EXPECT_GT(info->bits, 0) << FormatName(format);
    EXPECT_EQ(Spec(FormatName(format)).format(), format);
  }
}

TEST(SpecSyntaxTest, SpecsWithoutAShapeNameTheirGranularity) {
  EncodingSpec spec = ParseSpec("int8:per-channel:1")->SpecOfAny().value();
  EXPECT_EQ(spec.granularity().axis(), 1);
  EXPECT_EQ(spec.granularity().group_size(), 0);
  spec = ParseSpec("int4:group:32")->SpecOfAny().value();
  EXPECT_EQ(spec.granularity().axis(), -1);
  EXPECT_EQ(spec.granularity().group_size(), 32);
  EXPECT_FALSE(ParseSpec("int8")->SpecOfAny()->has_granularity());
  EXPECT_FALSE(ParseSpec("nf4:per-tensor")->SpecOfAny().ok());
  // With the shape it is said by zeros.
  EXPECT_EQ(ParseSpec("nf4:per-tensor")->SpecOf({2, 64})->block_size_size(), 2);
  EXPECT_EQ(ParseSpec("nf4")->SpecOf({2, 64})->block_size_size(), 0);
}

TEST(SpecSyntaxTest, TheFirstPatternThatMatchesCounts) {
  SpecSet set;
  bool has_base = false;
  for (const char* text :
       {"conv*.weight=int8:per-channel", "*.input=uint8:percentile=0.99",
        "*.weight=int4", "uint8:percentile=0.999"}) {
    const absl::Status status = AddSpec(text, &set, &has_base);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_TRUE(has_base);
  ASSERT_EQ(set.overrides.size(), 3u);
  EXPECT_EQ(set.For("conv1.weight")->spec.format(), v1::NUMBER_FORMAT_INT8);
  EXPECT_EQ(set.For("fc.weight")->spec.format(), v1::NUMBER_FORMAT_INT4);
  EXPECT_EQ(set.For("fc.input")->spec.tail_fraction(), 0.01);
  EXPECT_EQ(set.For("fc.bias")->spec.tail_fraction(), 0.001);
  EXPECT_FALSE(AddSpec("int8", &set, &has_base).ok());
  // The format is known, so that it is the rest that is wrong.
  const absl::Status status = AddSpec("int8:percentile=2", &set, &has_base);
  EXPECT_NE(status.message().find("percentile=2"), std::string::npos) << status;
  EXPECT_FALSE(AddSpec("a*=int99", &set, &has_base).ok());
  EXPECT_FALSE(AddSpec("a*", &set, &has_base).ok());
  EXPECT_FALSE(AddSpec("@/nowhere", &set, &has_base).ok());
}

TEST(SpecSyntaxTest, SpecsOfATensorMayBeTypesOfGguf) {
  SpecSet set;
  bool has_base = false;
  for (const char* const text : {"a*=q6_K", "b*=int8", "Q4_k"}) {
    const absl::Status status = AddSpec(text, &set, &has_base);
    ASSERT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(set.For("a")->gguf_type, "q6_K");
  EXPECT_EQ(set.For("b")->gguf_type, "");
  EXPECT_EQ(set.For("c")->gguf_type, "q4_K");
  const absl::Status status = AddSpec("d*=q4_K:mse", &set, &has_base);
  EXPECT_NE(status.message().find("q4_K alone"), std::string::npos) << status;
  // The server's formats are others.
  EXPECT_FALSE(ParseSpec("q4_K").ok());
  const absl::StatusOr<Candidate> candidate = ParseCandidate("q5_k");
  ASSERT_TRUE(candidate.ok()) << candidate.status();
  EXPECT_EQ(candidate->spec.gguf_type, "q5_K");
  for (const char* const text : {"q4_0", "Q4_1", "q5_0", "q5_1", "q8_0"}) {
    const absl::StatusOr<SpecTemplate> spec = ParseSpecOrGgufType(text);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->gguf_type, absl::AsciiStrToLower(text));
  }
  EXPECT_FALSE(ParseSpecOrGgufType("q2_K").ok());
  // GGUF has other rows as they are.
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{2, 40}, {97}, {}}) {
    const absl::Status refused = candidate->spec.SpecOf(shape).status();
    EXPECT_NE(refused.message().find("a multiple of 32 elements for q5_K"),
              std::string::npos)
        << refused;
  }
}

TEST(SpecSyntaxTest, SpecsComeFromAFile) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.File("specs.txt");
  std::ofstream(path) << "a.weight=int4:group:32\n\n  b*=nf4 \n";
  SpecSet set;
  bool has_base = false;
  const absl::Status status = AddSpec("@" + path, &set, &has_base);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_FALSE(has_base);
  ASSERT_EQ(set.overrides.size(), 2u);
  EXPECT_EQ(set.overrides[0].spec.granularity.group, 32);
  EXPECT_EQ(set.overrides[1].pattern, "b*");
  EXPECT_EQ(set.overrides[1].spec.spec.format(), v1::NUMBER_FORMAT_NF4);
  EXPECT_NE(set.For("b.weight"), nullptr);
  // What no pattern matches has no spec without a base.
  set.has_base = has_base;
  EXPECT_EQ(set.For("c"), nullptr);
  // An empty file would leave everything to the default.
  std::ofstream(path) << "\n \n";
  EXPECT_FALSE(AddSpec("@" + path, &set, &has_base).ok());
  // A file of files could go on for ever.
  std::ofstream(path) << "@" << path << "\n";
  EXPECT_FALSE(AddSpec("@" + path, &set, &has_base).ok());
}

TEST(SpecSyntaxTest, NamesForFilesAreThoseThatAreReadBack) {
  for (const char* const name :
       {"", "a.weight", "a b ", "[a]", "int", "int8.weight", "q4_0:x", "a:b"}) {
    EXPECT_EQ(CheckNameForSpecFile(name), absl::OkStatus()) << name;
  }
  for (const char* const name : {" a", "a=b", "a*", "a?", "a\nb", "a\rb", "\ta",
                                 "@a", "int8", "int8:a", "INT8:a"}) {
    const absl::Status status = CheckNameForSpecFile(name);
    EXPECT_EQ(ErrorReason(status), "ARGUMENT_INVALID") << name;
    EXPECT_NE(status.message().find("the name of the tensor"),
              std::string::npos)
        << status;
  }
}

TEST(SpecSyntaxTest, CodebooksAreListsOrFiles) {
  EXPECT_THAT(Spec("codebook2:entries=-1,0,0.5,1").codebook(),
              ::testing::ElementsAre(-1, 0, 0.5f, 1));
  const testing::TemporaryDirectory directory;
  const std::string path = directory.File("codebook.json");
  std::ofstream(path) << "[-1,\n 0.25,\n 1]\n";
  EXPECT_THAT(Spec("codebook2:entries=" + path).codebook(),
              ::testing::ElementsAre(-1, 0.25f, 1));
  std::ofstream(path) << "[]";
  for (const std::string& file : {path, std::string("/nowhere")}) {
    EXPECT_FALSE(ParseSpec("codebook2:entries=" + file).ok()) << file;
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

TEST(SpecSyntaxTest, TakesWhatCompletionOffers) {
  EXPECT_GE(FormatNames().size(), 47U);
  for (const std::string& name : FormatNames()) {
    EXPECT_TRUE(ParseFormat(name).ok()) << name;
  }
  for (const std::string& name : GranularityNames()) {
    EXPECT_TRUE(ParseGranularity(name).ok()) << name;
  }
}

TEST(SpecSyntaxTest, JsonSaysAllOfASpec) {
  const SpecTemplate spec = ParseSpec(R"({"granularity": "group:16:0", "spec": {
          "format": "NUMBER_FORMAT_INT4", "outer_block_size": ["0", "0"],
          "importance": {"weight": [1, 2.5], "axis": 0}}})")
                                .value();
  EXPECT_EQ(spec.spec.format(), v1::NUMBER_FORMAT_INT4);
  EXPECT_EQ(spec.spec.outer_block_size_size(), 2);
  EXPECT_EQ(spec.spec.importance().weight(1), 2.5);
  EXPECT_EQ(BlockSizeOf(spec.granularity, Shape{32, 8}).value(),
            (Shape{16, 1}));
  EXPECT_EQ(ParseSpec(R"({"spec": {"format": 8}, "granularity": "block=1,0"})")
                ->granularity.block_size,
            (Shape{1, 0}));
  SpecSet set;
  bool has_base = false;
  ASSERT_TRUE(AddSpec(R"({"spec": {"codebook": [1]}})", &set, &has_base).ok());
  EXPECT_TRUE(has_base);
  ASSERT_TRUE(
      AddSpec(R"(a*={"spec": {"codebook": [2]}})", &set, &has_base).ok());
  EXPECT_EQ(set.For("ab")->spec.codebook(0), 2);
  ASSERT_TRUE(
      AddSpec(R"({"pattern": "c=d\n*", "spec": "q4_K"})", &set, &has_base)
          .ok());
  EXPECT_EQ(set.For("c=d\nx")->gguf_type, "q4_K");
  EXPECT_FALSE(ParseSpec(R"({"pattern": "a", "spec": "int8"})").ok());
  EXPECT_EQ(ParseSpec(R"({"spec": "int8:group:4"})")->granularity.group, 4);
  for (const char* text :
       {"{", "{}", R"({"spec": 1})", R"({"spec": "int99"})",
        R"({"spec": "int8", "granularity": "group:4"})",
        R"({"spec": {"form": 1}})", R"({"spec": {}, "more": ""})",
        R"({"spec": {}, "granularity": "x"})",
        R"({"spec": {"block_size": [1]}})",
        R"({"spec": {"granularity": {"axis": 1}}})",
        R"({"spec": {"a=b": 1}})"}) {
    EXPECT_FALSE(ParseSpec(text).ok()) << text;
    EXPECT_FALSE(AddSpec(text, &set, &has_base).ok()) << text;
  }
}

TEST(SpecSyntaxTest, ImportanceNamesInputs) {
  const v1::Importance named =
      ParseSpec("int4:group:32:mse:importance=a.b%3Ac%253A:importance-axis=1")
          ->spec.importance();
  EXPECT_EQ(named.inputs().tensor(), "a.b:c%3A");
  EXPECT_EQ(named.axis(), 1);
  const EncodingSpec spec = ParseSpec("int4:mse:importance")->spec;
  EXPECT_TRUE(spec.importance().has_inputs());
  EXPECT_EQ(spec.importance().inputs().tensor(), "");
  EXPECT_FALSE(spec.importance().has_axis());
  EXPECT_FALSE(ParseSpec("int4:mse")->spec.has_importance());
  for (const char* text : {"int4:importance=", "int4:importance:importance=a",
                           "int4:importance-axis=", "int4:importance-axis=x",
                           "int4:importances"}) {
    EXPECT_FALSE(ParseSpec(text).ok()) << text;
  }
}

}  // namespace
}  // namespace quantd
