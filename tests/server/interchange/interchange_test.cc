#include "server/interchange/interchange.h"

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/parallel/stop_token.h"
#include "core/types/encoding.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/interchange/layout.h"

namespace quantd::server::interchange_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

core::Encoding MakeEncoding(absl::string_view format,
                            std::vector<float> scale) {
  const core::FormatInfo& info = *core::FindFormatByName(format);
  core::Encoding encoding;
  encoding.format = info.format;
  encoding.qmin = info.qmin;
  encoding.qmax = info.qmax;
  encoding.scale = std::move(scale);
  return encoding;
}

// Scales that few decimal digits do not give back.
std::vector<float> Scales(size_t count) {
  std::vector<float> scales;
  for (size_t i = 0; i < count; ++i) {
    scales.push_back(0.1f / (3.0f + static_cast<float>(i)));
  }
  return scales;
}

core::Encoding PerChannel(absl::string_view format, size_t rank, size_t axis,
                          size_t count) {
  core::Encoding encoding = MakeEncoding(format, Scales(count));
  encoding.block_size.assign(rank, 0);
  encoding.block_size[axis] = 1;
  encoding.scale_shape.assign(rank, 1);
  encoding.scale_shape[axis] = static_cast<int64_t>(count);
  return encoding;
}

// Blocks of 32 of a matrix with 4 rows.
core::Encoding Grouped(absl::string_view format) {
  core::Encoding encoding = MakeEncoding(format, Scales(12));
  encoding.block_size = {1, 32};
  encoding.scale_shape = {4, 3};
  return encoding;
}

core::Encoding Lpbq() {
  core::Encoding encoding = MakeEncoding("lpbq", {});
  encoding.scale_type = core::ScaleType::kInteger;
  encoding.block_size = {1, 64};
  encoding.scale_shape = {2, 3};
  encoding.scale_code = {1, 16, 3, 4, 5, 16};
  encoding.outer_block_size = {1, 0};
  encoding.outer_scale = Scales(2);
  EXPECT_TRUE(core::DeriveScales(&encoding).ok());
  return encoding;
}

// Encodings by name.
using Encodings = std::vector<std::pair<std::string, core::Encoding>>;

struct Written {
  std::string text;
  std::vector<InterchangeLoss> losses;
  int64_t count = 0;
  // What the writer had kept of them before the end.
  int64_t kept_bytes = 0;
  // And what the end has.
  int64_t end_bytes = 0;
};

Written Write(InterchangeFormat format, const Encodings& encodings) {
  ExportOptions options;
  options.model = "acme/net";
  options.revision = "main";
  options.is_parameter = [](absl::string_view tensor, const core::Encoding&) {
    return absl::EndsWith(tensor, "weight");
  };
  absl::StatusOr<std::unique_ptr<EncodingsWriter>> writer =
      EncodingsWriter::Create(format, std::move(options));
  Written written;
  EXPECT_TRUE(writer.ok()) << writer.status();
  if (!writer.ok()) return written;
  for (int pass = 0; pass < (*writer)->pass_count(); ++pass) {
    (*writer)->Begin(pass, &written.text);
    for (const auto& [name, encoding] : encodings) {
      EXPECT_TRUE(core::ValidateEncoding(encoding).ok())
          << name << ": " << core::ValidateEncoding(encoding);
      const absl::Status status =
          (*writer)->Add(pass, name, encoding, core::StopToken(), &written.text,
                         &written.losses);
      EXPECT_TRUE(status.ok()) << status;
    }
  }
  written.kept_bytes = (*writer)->memory_bytes();
  const size_t size = written.text.size();
  EXPECT_TRUE((*writer)->Finish(core::StopToken(), &written.text).ok());
  written.end_bytes = static_cast<int64_t>(written.text.size() - size);
  written.count = (*writer)->encoding_count();
  return written;
}

// Of a file whole.
absl::StatusOr<int64_t> ParseMemoryBytes(absl::string_view text) {
  int64_t charged = 0;
  absl::Status status =
      ChargeParseMemory({text}, [&charged](int64_t bytes) -> absl::Status {
        charged = bytes;
        return absl::OkStatus();
      });
  if (!status.ok()) return status;
  return charged;
}

absl::StatusOr<ParsedEncodings> Parse(
    absl::string_view text,
    InterchangeFormat format = InterchangeFormat::kUnspecified) {
  const absl::StatusOr<int64_t> bytes = ParseMemoryBytes(text);
  if (!bytes.ok()) return bytes.status();
  // However it is cut into pieces.
  const size_t cut = text.size() / 3;
  const absl::string_view pieces[] = {
      text.substr(0, cut), "", text.substr(cut, 1),
      text.substr(std::min(cut + 1, text.size()))};
  return ParseEncodings(pieces, format);
}

LayoutHint Shape(std::vector<int64_t> shape) {
  LayoutHint hint;
  hint.shape_known = true;
  hint.shape = std::move(shape);
  return hint;
}

// The only encoding of a file.
absl::StatusOr<core::Encoding> ParseOne(absl::string_view text,
                                        const LayoutHint& hint = {}) {
  absl::StatusOr<ParsedEncodings> parsed = Parse(text);
  if (!parsed.ok()) return parsed.status();
  if (parsed->encodings.size() != 1) {
    return absl::InternalError(
        absl::StrCat(parsed->encodings.size(), " encodings"));
  }
  absl::Status status = ResolveLayout(hint, &parsed->encodings[0]);
  if (!status.ok()) return status;
  return std::move(parsed->encodings[0].encoding);
}

std::string Losses(const std::vector<InterchangeLoss>& losses) {
  std::string text;
  for (const InterchangeLoss& loss : losses) {
    absl::StrAppend(&text, loss.tensor, loss.left_out ? " left out: " : ": ",
                    loss.what, "\n");
  }
  return text;
}

// Every kind of encoding that there is.
Encodings AllKinds() {
  Encodings all;
  all.emplace_back("plain", MakeEncoding("int8", {0.1f}));
  core::Encoding strict = PerChannel("int8", 4, 0, 5);
  strict.qmin = -127;
  strict.degenerate_count = 2;
  all.emplace_back("strict.weight", strict);
  core::Encoding asymmetric = MakeEncoding("uint8", {3.14159274e-5f});
  asymmetric.zero_point = {131};
  all.emplace_back("activation", asymmetric);
  core::Encoding outside = MakeEncoding("uint8", {1.17549435e-38f});
  outside.zero_point = {-300};
  outside.exclude_zero = true;
  all.emplace_back("outside", outside);
  core::Encoding wide = Grouped("int12");
  wide.zero_point.assign(12, -7);
  all.emplace_back("wide.weight", wide);
  core::Encoding half = Grouped("uint4");
  half.scale_type = core::ScaleType::kFloat16;
  for (float& scale : half.scale) scale = 0.25f;
  all.emplace_back("half.weight", half);
  core::Encoding blocks = MakeEncoding("int4", Scales(4));
  blocks.block_size = {128, 64};
  blocks.scale_shape = {2, 2};
  all.emplace_back("blocks.weight", blocks);
  core::Encoding mx = MakeEncoding("mxfp4_e2m1", {});
  mx.scale_type = core::ScaleType::kE8m0;
  mx.block_size = {1, 32};
  mx.scale_shape = {2, 2};
  mx.scale_code = {120, 0, 255, 254};
  EXPECT_TRUE(core::DeriveScales(&mx).ok());
  all.emplace_back("mx.weight", mx);
  core::Encoding nvfp4 = MakeEncoding("nvfp4", {});
  nvfp4.scale_type = core::ScaleType::kE4m3;
  nvfp4.block_size = {1, 16};
  nvfp4.scale_code = {0x38, 0x01, 0x7E};
  nvfp4.outer_scale = {0.0123f};
  EXPECT_TRUE(core::DeriveScales(&nvfp4).ok());
  all.emplace_back("nvfp4.weight", nvfp4);
  all.emplace_back("lpbq.weight", Lpbq());
  core::Encoding codebook = MakeEncoding("codebook4", {0.3f});
  codebook.codebook = {-1, -0.1f, 0.1f, 1};
  codebook.qmax = 3;
  all.emplace_back("codebook", codebook);
  all.emplace_back("nf4", MakeEncoding("nf4", {0.7f}));
  core::Encoding fp8 = PerChannel("float8_e4m3fn", 2, 1, 3);
  fp8.no_saturation = true;
  all.emplace_back("fp8.weight", fp8);
  all.emplace_back("bias", PerChannel("int32", 1, 0, 3));
  core::Encoding real = PerChannel("uint8", 2, 0, 3);
  real.zero_points_are_real = true;
  real.real_zero_point = {0.5f, 127.1f, 255};
  all.emplace_back("real.weight", real);
  core::Encoding beyond = MakeEncoding("int2", {2});
  beyond.zero_points_are_real = true;
  beyond.real_zero_point = {-162.7016f};
  beyond.exclude_zero = true;
  all.emplace_back("beyond", beyond);
  return all;
}

TEST(InterchangeTest, OurJsonHoldsEverything) {
  const Encodings all = AllKinds();
  const Written written = Write(InterchangeFormat::kJson, all);
  EXPECT_EQ(Losses(written.losses), "");
  absl::StatusOr<ParsedEncodings> parsed = Parse(written.text);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->format, InterchangeFormat::kJson);
  EXPECT_THAT(parsed->losses, IsEmpty());
  ASSERT_EQ(parsed->encodings.size(), all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    PendingEncoding& pending = parsed->encodings[i];
    EXPECT_EQ(pending.tensor, all[i].first);
    const absl::Status status = ResolveLayout({}, &pending);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(pending.encoding == all[i].second) << all[i].first;
  }
}

// What is not told as a loss comes back.
TEST(InterchangeTest, EveryFormatGivesBackWhatItDoesNotTellAsLost) {
  const Encodings all = AllKinds();
  for (const InterchangeFormat format :
       {InterchangeFormat::kAimet061, InterchangeFormat::kAimet100,
        InterchangeFormat::kAimet200, InterchangeFormat::kOnnxQdq}) {
    for (const auto& [name, encoding] : all) {
      SCOPED_TRACE(absl::StrCat(static_cast<int>(format), " ", name));
      const Written written = Write(format, {{name, encoding}});
      absl::StatusOr<ParsedEncodings> parsed = Parse(written.text);
      ASSERT_TRUE(parsed.ok()) << parsed.status() << "\n" << written.text;
      EXPECT_EQ(parsed->format, format);
      if (!written.losses.empty() && written.losses[0].left_out) {
        EXPECT_EQ(written.count, 0);
        EXPECT_THAT(parsed->encodings, IsEmpty());
        continue;
      }
      ASSERT_EQ(parsed->encodings.size(), 1);
      LayoutHint hint;
      hint.block_size = encoding.block_size;
      const absl::Status status = ResolveLayout(hint, &parsed->encodings[0]);
      ASSERT_TRUE(status.ok()) << status;
      core::Encoding back = std::move(parsed->encodings[0].encoding);
      EXPECT_EQ(parsed->encodings[0].tensor, name);
      // Where the layout had to be told, and where it may differ in form.
      if (back.block_size.empty() || encoding.scale.size() == 1) {
        back.block_size = encoding.block_size;
      }
      back.scale_shape = encoding.scale_shape;
      const std::string losses = Losses(written.losses);
      const bool is_told =
          absl::StrContains(losses, ": ") &&
          losses != absl::StrCat(name,
                                 ": block_size: importing takes the tensor's "
                                 "shape\n") &&
          losses != absl::StrCat(name,
                                 ": block_size: only the axis; importing takes "
                                 "the tensor's shape\n");
      EXPECT_EQ(back == encoding, !is_told) << losses << written.text;
    }
  }
}

TEST(InterchangeTest, Aimet061CountsOffsetsFromUnsignedCodes) {
  core::Encoding symmetric = PerChannel("int8", 4, 0, 2);
  symmetric.scale = {0.5f, 0.25f};
  core::Encoding activation = MakeEncoding("uint8", {0.5f});
  activation.zero_point = {10};
  const Written written = Write(InterchangeFormat::kAimet061,
                                {{"input", activation}, {"weight", symmetric}});
  const auto json = nlohmann::json::parse(written.text);
  EXPECT_EQ(json["version"], "0.6.1");
  EXPECT_EQ(json["activation_encodings"]["input"],
            nlohmann::json::parse(
                R"([{"bitwidth":8,"dtype":"int","is_symmetric":"False",
                     "min":-5.0,"max":122.5,"scale":0.5,"offset":-10}])"));
  EXPECT_EQ(json["param_encodings"]["weight"],
            nlohmann::json::parse(
                R"([{"bitwidth":8,"dtype":"int","is_symmetric":"True",
                     "min":-64.0,"max":63.5,"scale":0.5,"offset":-128},
                    {"bitwidth":8,"dtype":"int","is_symmetric":"True",
                     "min":-32.0,"max":31.75,"scale":0.25,"offset":-128}])"));
  EXPECT_EQ(json["quantizer_args"]["param_bitwidth"], 8);
  EXPECT_EQ(Losses(written.losses),
            "weight: block_size: importing takes the tensor's shape\n");
}

// AIMET's reader takes no other scale.
TEST(InterchangeTest, Aimet061HasTheScaleInItsRange) {
  Encodings all;
  for (const char* format : {"int4", "int8", "int16", "uint4", "uint8"}) {
    for (const int narrower : {0, 1}) {
      core::Encoding encoding = PerChannel(format, 2, 0, 3);
      encoding.qmin += narrower;
      if (encoding.qmin >= 0) encoding.zero_point = {1, 2, 3};
      all.emplace_back(absl::StrCat(format, narrower, ".weight"), encoding);
    }
  }
  const Written written = Write(InterchangeFormat::kAimet061, all);
  const auto json = nlohmann::json::parse(written.text);
  for (const auto& [name, encoding] : all) {
    SCOPED_TRACE(name);
    const auto& entries = json["param_encodings"][name];
    ASSERT_EQ(entries.size(), 3);
    for (size_t i = 0; i < entries.size(); ++i) {
      const auto& entry = entries[i];
      const double levels = (1 << entry["bitwidth"].get<int>()) - 1;
      const double range =
          entry["max"].get<double>() - entry["min"].get<double>();
      EXPECT_NEAR(range / levels, encoding.scale[i], 1e-6 * encoding.scale[i]);
      // The grid begins where the offset says, in float32 as AIMET has it.
      EXPECT_EQ(entry["min"].get<double>(),
                entry["offset"].get<float>() * encoding.scale[i]);
    }
  }
  const std::string losses = Losses(written.losses);
  EXPECT_THAT(losses, HasSubstr("int41.weight: qmin: -7 becomes -8"));
  EXPECT_THAT(losses, HasSubstr("int81.weight: qmin: -127 becomes -128"));
  EXPECT_THAT(losses, HasSubstr("uint81.weight: qmin: 1 becomes 0"));
  EXPECT_THAT(losses, Not(HasSubstr("int80.weight: qmin")));
}

TEST(InterchangeTest, SignedCodesWithAZeroPointBecomeUnsignedOnesInAimet) {
  core::Encoding encoding = MakeEncoding("int8", {0.5f});
  encoding.zero_point = {-28};
  const Written written =
      Write(InterchangeFormat::kAimet100, {{"a", encoding}});
  EXPECT_EQ(Losses(written.losses),
            "a: format: int8 becomes uint8, codes and zero points move by "
            "128\n");
  const absl::StatusOr<core::Encoding> back = ParseOne(written.text);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->zero_point, std::vector<int32_t>{100});
}

constexpr char kAimet061[] = R"({
  "version": "0.6.1",
  "activation_encodings": {},
  "param_encodings": {
    "conv.weight": [
      {"bitwidth": 8, "dtype": "int", "is_symmetric": "True", "max": 1.27,
       "min": -1.28, "offset": -128, "scale": 0.01},
      {"bitwidth": 8, "dtype": "int", "is_symmetric": "True", "max": 2.54,
       "min": -2.56, "offset": -128, "scale": 0.02}]},
  "quantizer_args": {"activation_bitwidth": 8, "param_bitwidth": 8,
    "dtype": "int", "is_symmetric": true, "per_channel_quantization": true,
    "quant_scheme": "post_training_tf"}})";

TEST(InterchangeTest, ReadsAimet061ByTheShape) {
  const absl::StatusOr<core::Encoding> encoding =
      ParseOne(kAimet061, Shape({2, 3, 3, 3}));
  ASSERT_TRUE(encoding.ok()) << encoding.status();
  EXPECT_EQ(encoding->format, core::FindFormatByName("int8")->format);
  EXPECT_EQ(encoding->block_size, (std::vector<int64_t>{1, 0, 0, 0}));
  EXPECT_EQ(encoding->scale_shape, (std::vector<int64_t>{2, 1, 1, 1}));
  EXPECT_EQ(encoding->scale, (std::vector<float>{0.01f, 0.02f}));
  EXPECT_THAT(encoding->zero_point, IsEmpty());
  EXPECT_EQ(encoding->qmin, -128);
  const absl::StatusOr<ParsedEncodings> parsed = Parse(kAimet061);
  EXPECT_EQ(Losses(parsed->losses),
            "conv.weight: scale: 2 rounded to the nearest float32\n");
}

// As AIMET's own tests write and load them: without a version, with names of
// Keras, offsets that are floats, entries of float16, ranges that scale and
// offset do not have, and keys that say nothing of a tensor.
TEST(InterchangeTest, TakesFilesAsThoseOfAimetsTests) {
  const absl::StatusOr<ParsedEncodings> parsed = Parse(R"({
      "activation_encodings":{
        "conv_1/Tanh:0":[{"bitwidth":8,"dtype":"int","is_symmetric":"False",
          "max":6.0,"min":-7.5,"offset":-15,"scale":0.5}],
        "half:0":[{"bitwidth":16,"dtype":"float"}]},
      "param_encodings":{
        "conv_1/kernel:0":[
          {"bitwidth":4,"dtype":"int","is_symmetric":"False","max":2.0,
           "min":-1.75,"offset":-7.0,"scale":0.25},
          {"bitwidth":4,"dtype":"int","is_symmetric":"False","max":2.0,
           "min":-1.75,"offset":-7.0,"scale":0.25}],
        "conv_2.weight":[{"bitwidth":4,"is_symmetric":"False","max":0.3,
          "min":-0.2,"offset":-7.0,"scale":0.03125,"dtype":"int"}],
        "half.weight":[{"bitwidth":16,"dtype":"float"}]},
      "excluded_layers":["conv_3"],"producer":"somebody",
      "quantizer_args":{"activation_bitwidth":8}})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->format, InterchangeFormat::kAimet061);
  ASSERT_EQ(parsed->encodings.size(), 3);
  EXPECT_EQ(parsed->encodings[0].tensor, "conv_1/Tanh:0");
  EXPECT_EQ(parsed->encodings[0].encoding.zero_point, std::vector<int32_t>{15});
  EXPECT_EQ(parsed->encodings[1].tensor, "conv_1/kernel:0");
  PendingEncoding kernel = parsed->encodings[1];
  LayoutHint hint = Shape({3, 3, 8, 2});
  ASSERT_TRUE(ResolveLayout(hint, &kernel).ok());
  EXPECT_EQ(kernel.encoding.block_size, (std::vector<int64_t>{0, 0, 0, 1}));
  EXPECT_EQ(kernel.encoding.zero_point, (std::vector<int32_t>{7, 7}));
  EXPECT_EQ(parsed->encodings[2].encoding.scale, std::vector<float>{0.03125f});
  EXPECT_EQ(Losses(parsed->losses),
            ": excluded_layers: which layers are not to be quantized\n"
            "half:0 left out: activation_encodings[\"half:0\"][0]: a float of "
            "16 bits without scale, nothing to keep\n"
            "conv_2.weight: min and max: not those of codes under scale and "
            "offset; the codes are all of the type\n"
            "half.weight left out: param_encodings[\"half.weight\"][0]: a "
            "float of 16 bits without scale, nothing to keep\n");
}

TEST(InterchangeTest, SaysWhenTheAxisIsOpen) {
  const auto error = [](const LayoutHint& hint) {
    return std::string(ParseOne(kAimet061, hint).status().message());
  };
  EXPECT_EQ(error({}),
            "AXIS_UNKNOWN: param_encodings[\"conv.weight\"]: 2 scales, and the "
            "file does not say along which dimension; give the tensor's shape "
            "or block size");
  EXPECT_EQ(error(Shape({2, 2, 3, 3})),
            "AXIS_UNKNOWN: param_encodings[\"conv.weight\"]: 2 scales fit axis "
            "0 and axis 1; give the axis");
  EXPECT_EQ(error(Shape({4, 3, 3, 3})),
            "INTERCHANGE_INVALID: param_encodings[\"conv.weight\"]: 2 scales "
            "do not fit a tensor of shape [4,3,3,3]");
  LayoutHint hint = Shape({2, 2, 3, 3});
  hint.axis = -3;
  const absl::StatusOr<core::Encoding> encoding = ParseOne(kAimet061, hint);
  ASSERT_TRUE(encoding.ok()) << encoding.status();
  EXPECT_EQ(encoding->block_size, (std::vector<int64_t>{0, 1, 0, 0}));
  hint = {};
  hint.block_size = {0, 0, 1};
  EXPECT_EQ(ParseOne(kAimet061, hint)->scale_shape,
            (std::vector<int64_t>{1, 1, 2}));
  hint.block_size = {0, 2, 1};
  EXPECT_THAT(error(hint), HasSubstr("do not fit a block size of [0,2,1]"));
}

TEST(InterchangeTest, Aimet100SplitsZeroPointsBetweenCodes) {
  core::Encoding grid = MakeEncoding("int2", {0.5f});
  grid.zero_points_are_real = true;
  grid.real_zero_point = {-0.5f};
  grid.exclude_zero = true;
  core::Encoding channels = PerChannel("uint8", 2, 0, 3);
  channels.zero_points_are_real = true;
  channels.real_zero_point = {0.25f, 3, 254.75f};
  const Written written =
      Write(InterchangeFormat::kAimet100,
            {{"grid.weight", grid}, {"channels.weight", channels}});
  const auto entries = nlohmann::json::parse(written.text)["param_encodings"];
  EXPECT_EQ(entries[0]["offset"], nlohmann::json::parse("[-2]"));
  EXPECT_EQ(entries[0]["zero_point_shift"], nlohmann::json::parse("[0.5]"));
  EXPECT_EQ(entries[1]["offset"], nlohmann::json::parse("[-1,-3,-255]"));
  EXPECT_EQ(entries[1]["zero_point_shift"],
            nlohmann::json::parse("[0.75,0.0,0.25]"));
  for (const auto& offset : entries[1]["offset"]) {
    EXPECT_TRUE(offset.is_number_integer()) << offset;
  }
}

TEST(InterchangeTest, ReadsStrictSymmetryOfAimet) {
  const absl::StatusOr<core::Encoding> encoding = ParseOne(
      R"({"version":"0.6.1","param_encodings":{},"activation_encodings":{"a":
          [{"bitwidth":8,"dtype":"int","is_symmetric":"True","min":-63.5,
            "max":63.5,"offset":-127,"scale":0.5}]}})");
  ASSERT_TRUE(encoding.ok()) << encoding.status();
  EXPECT_EQ(encoding->qmin, -127);
  EXPECT_EQ(encoding->qmax, 127);
  EXPECT_THAT(encoding->zero_point, IsEmpty());
}

TEST(InterchangeTest, ReadsAimet100) {
  const absl::StatusOr<ParsedEncodings> parsed = Parse(
      R"({"version":"1.0.0",
          "activation_encodings":[
            {"name":"a","dtype":"INT","bw":8,"enc_type":"PER_TENSOR",
             "is_sym":false,"scale":[0.5],"offset":[-3]},
            {"name":"f","dtype":"FLOAT","bw":16,"enc_type":"PER_TENSOR"},
            {"name":"v","dtype":"INT","bw":8,"enc_type":"VECTOR"},
            {"name":"s","dtype":"INT","bw":8,"enc_type":"PER_TENSOR",
             "is_sym":true,"scale":[0.5],"offset":[-128],
             "zero_point_shift":[0.5]}],
          "param_encodings":[
            {"name":"w","dtype":"INT","bw":4,"enc_type":"PER_BLOCK",
             "is_sym":true,"block_size":2,"scale":[1,2,3,4,5,6],
             "offset":[-8,-8,-8,-8,-8,-8]}]})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->encodings.size(), 3);
  EXPECT_EQ(parsed->encodings[0].encoding.zero_point, std::vector<int32_t>{3});
  EXPECT_EQ(parsed->encodings[1].encoding.real_zero_point,
            std::vector<float>{-0.5f});
  EXPECT_EQ(Losses(parsed->losses),
            "f left out: activation_encodings[1]: a float of 16 bits without "
            "scale, nothing to keep\n"
            "v left out: activation_encodings[2]: no vector quantization\n");
  PendingEncoding rows = parsed->encodings[2];
  ASSERT_TRUE(ResolveLayout(Shape({3, 4}), &rows).ok());
  EXPECT_EQ(rows.encoding.block_size, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(rows.encoding.scale, (std::vector<float>{1, 2, 3, 4, 5, 6}));
  // Channels behind the blocks: the file has [channels, blocks] all the same.
  PendingEncoding columns = parsed->encodings[2];
  ASSERT_TRUE(ResolveLayout(Shape({4, 3}), &columns).ok());
  EXPECT_EQ(columns.encoding.block_size, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(columns.encoding.scale, (std::vector<float>{1, 3, 5, 2, 4, 6}));
  PendingEncoding kernel = parsed->encodings[2];
  ASSERT_TRUE(ResolveLayout(Shape({3, 4, 5, 5}), &kernel).ok());
  EXPECT_EQ(kernel.encoding.block_size, (std::vector<int64_t>{1, 2, 0, 0}));
}

TEST(InterchangeTest, WritesLpbqOfAimetBothWays) {
  const Written written =
      Write(InterchangeFormat::kAimet100, {{"w.weight", Lpbq()}});
  const auto entry = nlohmann::json::parse(written.text)["param_encodings"][0];
  EXPECT_EQ(entry["enc_type"], "LPBQ");
  EXPECT_EQ(entry["bw"], 8);
  EXPECT_EQ(entry["compressed_bw"], 4);
  EXPECT_EQ(entry["offset"], nlohmann::json({-128, -128}));
  EXPECT_EQ(entry["per_block_int_scale"], nlohmann::json({1, 16, 3, 4, 5, 16}));
  const Written nested =
      Write(InterchangeFormat::kAimet200, {{"w.weight", Lpbq()}});
  const auto other = nlohmann::json::parse(nested.text)["encodings"][0];
  EXPECT_EQ(other["output_dtype"], "int4");
  EXPECT_EQ(other["axis"], 1);
  EXPECT_EQ(other["block_size"], 64);
  EXPECT_EQ(other["per_block_int_scale"],
            nlohmann::json({{1, 16, 3}, {4, 5, 16}}));
  EXPECT_EQ(other["per_channel_float_scale"].size(), 2);
  EXPECT_EQ(Losses(nested.losses), "");
}

// One channel, and channels of one block: what is left of the layout is enough.
TEST(InterchangeTest, BlocksOfOneChannelComeBack) {
  for (const std::vector<int64_t>& scale_shape :
       {std::vector<int64_t>{1, 6}, std::vector<int64_t>{6, 1}}) {
    core::Encoding lpbq = Lpbq();
    lpbq.scale_shape = scale_shape;
    lpbq.outer_scale = Scales(scale_shape[0]);
    EXPECT_TRUE(core::DeriveScales(&lpbq).ok());
    core::Encoding integers = MakeEncoding("int4", Scales(6));
    integers.block_size = {1, 64};
    integers.scale_shape = scale_shape;
    for (const core::Encoding& encoding : {lpbq, integers}) {
      const Written written =
          Write(InterchangeFormat::kAimet100, {{"w.weight", encoding}});
      EXPECT_EQ(written.count, 1) << Losses(written.losses);
      const absl::StatusOr<core::Encoding> back =
          ParseOne(written.text, Shape({scale_shape[0], 64 * scale_shape[1]}));
      ASSERT_TRUE(back.ok()) << back.status();
      EXPECT_EQ(back->scale, encoding.scale);
    }
  }
}

TEST(InterchangeTest, TellsOfLayersThatAreNotToBeQuantized) {
  for (const char* text :
       {R"({"version":"0.6.1","excluded_layers":["a"],"param_encodings":{},
            "activation_encodings":{}})",
        R"({"version":"1.0.0","excluded_layers":["a"],"param_encodings":[],
            "activation_encodings":[]})",
        R"({"version":"2.0.0","excluded_layers":["a"],"encodings":[]})"}) {
    const absl::StatusOr<ParsedEncodings> parsed = Parse(text);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_THAT(Losses(parsed->losses), HasSubstr("excluded_layers"));
  }
}

TEST(InterchangeTest, ReadsAimet200) {
  const absl::StatusOr<ParsedEncodings> parsed = Parse(
      R"({"version":"2.0.0","encodings":[
          {"name":"a","output_dtype":"uint8","y_scale":0.5,"y_zero_point":3},
          {"name":"c","output_dtype":"int8","y_scale":[0.5,0.25],"axis":0},
          {"name":"b","output_dtype":"int4","axis":1,"block_size":2,
           "y_scale":[[1,2],[3,4],[5,6]]},
          {"name":"f","output_dtype":"float16"}]})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->encodings.size(), 3);
  EXPECT_EQ(parsed->encodings[0].encoding.zero_point, std::vector<int32_t>{3});
  PendingEncoding channels = parsed->encodings[1];
  ASSERT_TRUE(ResolveLayout(Shape({2, 2}), &channels).ok());
  EXPECT_EQ(channels.encoding.block_size, (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(parsed->encodings[2].encoding.block_size,
            (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(parsed->encodings[2].encoding.scale_shape,
            (std::vector<int64_t>{3, 2}));
  EXPECT_THAT(Losses(parsed->losses), HasSubstr("f left out"));
}

TEST(InterchangeTest, TellsWhatCompressedTensorsHaveNoWordFor) {
  core::Encoding strict = PerChannel("int8", 2, 0, 3);
  strict.qmin = -127;
  core::Encoding floats = MakeEncoding("float8_e4m3fn", {1});
  floats.no_saturation = true;
  core::Encoding row = MakeEncoding("mxfp4_e2m1", {});
  row.scale_type = core::ScaleType::kE8m0;
  row.block_size = {1, 32};
  row.scale_code = {120};
  EXPECT_TRUE(core::DeriveScales(&row).ok());
  const Written written =
      Write(InterchangeFormat::kCompressedTensors,
            {{"a.weight", strict}, {"b.weight", floats}, {"c.weight", row}});
  EXPECT_THAT(Losses(written.losses), HasSubstr("a.weight: qmin and qmax"));
  EXPECT_THAT(Losses(written.losses), HasSubstr("b.weight: no_saturation"));
  const auto groups = nlohmann::json::parse(
      written.text)["quantization_config"]["config_groups"];
  // Of a single group, too.
  EXPECT_EQ(groups["group_2"]["weights"]["strategy"], "group");
  EXPECT_EQ(groups["group_2"]["weights"]["group_size"], 32);
}

TEST(InterchangeTest, AStoredLayoutTellsBlocksThatComeBeforeChannels) {
  core::Encoding blocks = MakeEncoding("int4", Scales(6));
  blocks.block_size = {32, 1};
  blocks.scale_shape = {2, 3};
  const Written written =
      Write(InterchangeFormat::kAimet100, {{"a.weight", blocks}});
  LayoutHint hint;
  hint.block_size = blocks.block_size;
  EXPECT_THAT(std::string(ParseOne(written.text, hint).status().message()),
              HasSubstr("AXIS_UNKNOWN"));
  hint = HintOf(blocks, PendingEncoding::Open::kChannelBlocks);
  const absl::StatusOr<core::Encoding> back = ParseOne(written.text, hint);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->scale, blocks.scale);
  EXPECT_EQ(back->scale_shape, blocks.scale_shape);
  // Whoever stored it may have made it up.
  blocks.block_size = {std::numeric_limits<int64_t>::max(), 1};
  EXPECT_FALSE(
      HintOf(blocks, PendingEncoding::Open::kChannelBlocks).shape_known);
}

struct Malformed {
  const char* text;
  const char* message;
};

TEST(InterchangeTest, ReadsParametersOfOnnx) {
  const absl::StatusOr<ParsedEncodings> parsed = Parse(
      R"({"format":"onnx-qdq","version":1,"encodings":[
          {"name":"t","output_dtype":"uint8","y_scale":0.5,"y_zero_point":3},
          {"name":"c","output_dtype":"int8","y_scale":[0.5,0.25]},
          {"name":"b","output_dtype":"uint4","axis":-1,"block_size":2,
           "y_scale":[[1,2],[3,4]],"y_zero_point":[[8,7],[0,15]]},
          {"name":"f","output_dtype":"float8_e4m3fn","y_scale":0.5,
           "saturate":false,"scale_dtype":"float16"},
          {"name":"h","output_dtype":"float16"}]})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->encodings.size(), 4);
  EXPECT_EQ(parsed->encodings[0].encoding.zero_point, std::vector<int32_t>{3});
  // ONNX's default axis is 1.
  PendingEncoding channels = parsed->encodings[1];
  ASSERT_TRUE(ResolveLayout(Shape({2, 2}), &channels).ok());
  EXPECT_EQ(channels.encoding.block_size, (std::vector<int64_t>{0, 1}));
  const core::Encoding& blocks = parsed->encodings[2].encoding;
  EXPECT_EQ(blocks.block_size, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(blocks.scale, (std::vector<float>{1, 2, 3, 4}));
  EXPECT_EQ(blocks.zero_point, (std::vector<int32_t>{8, 7, 0, 15}));
  const core::Encoding& floats = parsed->encodings[3].encoding;
  EXPECT_TRUE(floats.no_saturation);
  EXPECT_EQ(floats.scale_type, core::ScaleType::kFloat16);
  EXPECT_EQ(Losses(parsed->losses),
            "h left out: encodings[4].output_dtype: a float of 16 bits without "
            "scale, nothing to keep\n");
}

TEST(InterchangeTest, NamesThePlaceOfWhatIsWrongInParametersOfOnnx) {
  const Malformed entries[] = {
      {R"("output_dtype":"int8")", "encodings[0].y_scale: is missing"},
      {R"("y_scale":1)", "encodings[0].output_dtype: is missing"},
      {R"("output_dtype":"int7","y_scale":1)",
       "encodings[0].output_dtype: no type \"int7\""},
      {R"("output_dtype":"float8_e4m3fn","y_scale":1,"y_zero_point":1)",
       "encodings[0].y_zero_point: entry 0 is 1, expected an integer of 0 to "
       "0"},
      {R"("output_dtype":"int8","y_scale":[1,2],"y_zero_point":0)",
       "encodings[0].y_zero_point: expected lists of the lengths of y_scale"},
      {R"("output_dtype":"int8","y_scale":[[1,2]],"axis":2,"block_size":2)",
       "encodings[0].axis[0]: expected an integer of -2 to 1"},
      {R"("output_dtype":"int8","y_scale":[1],"axis":1e9)",
       "encodings[0].axis[0]: expected an integer of"},
      {R"("output_dtype":"int8","y_scale":[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]])",
       "encodings[0].y_scale: lists of 17 dimensions"},
      {R"("output_dtype":"int8","y_scale":1,"scale_dtype":"float31")",
       "encodings[0].scale_dtype: expected float32, float16 or bfloat16"},
      {R"("output_dtype":"float8_e5m2","y_scale":1,"saturate":0)",
       "encodings[0].saturate: expected"},
  };
  for (const Malformed& entry : entries) {
    const std::string text = absl::StrCat(
        R"({"format":"onnx-qdq","version":1,"encodings":[{"name":"w",)",
        entry.text, "}]}");
    const absl::StatusOr<ParsedEncodings> parsed = Parse(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(core::ErrorReason(parsed.status()), "INTERCHANGE_INVALID");
    EXPECT_THAT(std::string(parsed.status().message()),
                HasSubstr(entry.message))
        << text;
  }
}

TEST(InterchangeTest, WritesTheSchemesOfCompressedTensors) {
  core::Encoding input = MakeEncoding("uint8", {0.5f});
  input.zero_point = {3};
  const Written written =
      Write(InterchangeFormat::kCompressedTensors,
            {{"a.input", input},
             {"a.weight", PerChannel("int8", 2, 0, 3)},
             {"b.weight", Grouped("int4")},
             {"c.weight", Grouped("int4")},
             {"d.weight", PerChannel("float8_e4m3fn", 2, 0, 3)},
             {"d.input", MakeEncoding("uint8", {0.5f})},
             {"odd", MakeEncoding("int8", {1})},
             {"e.weight", PerChannel("int12", 2, 0, 3)}});
  const auto config =
      nlohmann::json::parse(written.text)["quantization_config"];
  EXPECT_EQ(config["quant_method"], "compressed-tensors");
  EXPECT_EQ(config["format"], "mixed-precision");
  const auto& groups = config["config_groups"];
  ASSERT_EQ(groups.size(), 3);
  EXPECT_EQ(groups["group_0"]["targets"], nlohmann::json({"a"}));
  EXPECT_EQ(groups["group_0"]["format"], "int-quantized");
  EXPECT_EQ(groups["group_0"]["weights"]["strategy"], "channel");
  EXPECT_EQ(groups["group_0"]["input_activations"]["symmetric"], false);
  EXPECT_EQ(groups["group_1"]["targets"], nlohmann::json({"b", "c"}));
  EXPECT_EQ(groups["group_1"]["format"], "pack-quantized");
  EXPECT_EQ(groups["group_1"]["weights"]["group_size"], 32);
  EXPECT_EQ(groups["group_2"]["format"], "float-quantized");
  // Its zero point of 0 is -128 where the codes are signed.
  EXPECT_EQ(groups["group_2"]["input_activations"]["symmetric"], false);
  EXPECT_THAT(Losses(written.losses), HasSubstr("odd left out"));
  EXPECT_THAT(Losses(written.losses), HasSubstr("e.weight left out"));
  EXPECT_THAT(Losses(written.losses), HasSubstr("b.weight: scale"));
}

TEST(InterchangeTest, WritesLongListsAsOthersDoAndStops) {
  constexpr int kChannels = 8192;
  core::Encoding large = PerChannel("uint8", 2, 0, kChannels);
  for (int i = 0; i < kChannels; ++i) large.zero_point.push_back(i % 200);
  core::Encoding blocks = PerChannel("int4", 2, 0, kChannels);
  blocks.block_size = {1, 32};
  blocks.scale_shape = {kChannels / 4, 4};
  const Encodings encodings = {{"\xff/a.weight", large},
                               {"b\n.weight", blocks},
                               {"c.weight", Lpbq()},
                               {"d", large},
                               {"e.input", MakeEncoding("int8", {0.5f})}};
  for (int format = 1; format <= 8; ++format) {
    SCOPED_TRACE(format);
    const auto as = static_cast<InterchangeFormat>(format);
    const Written whole = Write(as, encodings);
    EXPECT_TRUE(nlohmann::json::accept(whole.text));
    const std::atomic<bool> stopped{true};
    ExportOptions options;
    options.is_parameter = [](absl::string_view, const core::Encoding&) {
      return false;
    };
    const auto writer = EncodingsWriter::Create(as, std::move(options));
    ASSERT_TRUE(writer.ok()) << writer.status();
    std::string text;
    std::vector<InterchangeLoss> losses;
    (*writer)->Begin(0, &text);
    // Activations come in its second pass.
    const bool is_torch = as == InterchangeFormat::kAimetTorch;
    const absl::Status status =
        (*writer)->Add(is_torch ? 1 : 0, is_torch ? "a.input" : "a.weight",
                       large, core::StopToken(&stopped), &text, &losses);
    // That one keeps a name and a scheme.
    if (as == InterchangeFormat::kCompressedTensors) {
      EXPECT_TRUE(absl::IsCancelled(
          (*writer)->Finish(core::StopToken(&stopped), &text)));
    } else {
      EXPECT_TRUE(absl::IsCancelled(status)) << status;
      EXPECT_TRUE(losses.empty());
    }
    EXPECT_TRUE(absl::IsCancelled(
                    ParseEncodings({whole.text}, as, core::StopToken(&stopped))
                        .status()) ||
                as == InterchangeFormat::kCompressedTensors);
  }
  EXPECT_THAT(Write(InterchangeFormat::kJson, encodings).text,
              HasSubstr(nlohmann::json(large.zero_point).dump()));
}

TEST(InterchangeTest, TellsWhatIsKeptOfCompressedTensors) {
  constexpr int kCount = 2000;
  const std::string prefix(1000, 'n');
  Encodings encodings;
  for (int i = 0; i < kCount; ++i) {
    encodings.push_back({absl::StrCat(prefix, i, ".weight"), Grouped("int4")});
  }
  const Written written =
      Write(InterchangeFormat::kCompressedTensors, encodings);
  EXPECT_GE(written.kept_bytes, kCount * static_cast<int>(prefix.size()));
  EXPECT_LE(written.kept_bytes, 2 * kCount * static_cast<int>(prefix.size()));
  EXPECT_LE(written.end_bytes, written.kept_bytes + 4096);
  const auto config =
      nlohmann::json::parse(written.text)["quantization_config"];
  EXPECT_EQ(config["format"], "pack-quantized");
  EXPECT_EQ(config["config_groups"]["group_0"]["targets"].size(), kCount);
}

TEST(InterchangeTest, NamesThePlaceOfWhatIsWrong) {
  const std::string deep = std::string(40, '[') + "1" + std::string(40, ']');
  const Malformed files[] = {
      {"", "the file: not valid JSON at byte"},
      {"{\"a\":1", "the file: not valid JSON at byte"},
      {"[1]", "the file: expected a JSON object"},
      {"{}", "the file: expected one of our own JSON"},
      {"{\"version\":1,\"version\":2}", "the key \"version\" stands twice"},
      {deep.c_str(), "nested deeper than 32"},
      {R"({"format":"quantd-encodings","version":2,"encodings":[]})",
       "version \"2\", expected 1"},
      {R"({"format":"quantd-encodings","version":1})",
       "encodings: is missing, expected a list"},
      {R"({"format":"quantd-encodings","version":1,"encodings":{}})",
       "encodings: expected a list"},
      {R"({"format":"quantd-encodings","version":1,"encodings":[7]})",
       "encodings[0]: expected an object, got a number"},
      {R"({"format":"quantd-encodings","version":1,
           "encodings":[{"name":"a","format":"int99"}]})",
       "encodings[0].format: no format \"int99\""},
      {R"({"format":"quantd-encodings","version":1,
           "encodings":[{"name":"a","format":"int8","scale":[1,"x"]}]})",
       "encodings[0].scale[1]: expected a number, got a string"},
      {R"({"format":"quantd-encodings","version":1,
           "encodings":[{"name":"a","format":"int8","scale":[1],
                         "scale_type":"float31"}]})",
       "encodings[0].scale_type: no scale type \"float31\""},
      {R"({"format":"quantd-encodings","version":1,
           "encodings":[{"name":"a","format":"int8","scale":[1],
                         "block_size":[-1]}]})",
       "encodings[0].block_size[0]: expected an integer of 0 to"},
      {R"({"format":"quantd-encodings","version":1,
           "encodings":[{"name":"a","format":"int8","scale":[1]},
                        {"name":"a","format":"int8","scale":[1]}]})",
       "encodings[1]: tensor \"a\" stands twice in the file"},
      {R"({"quantization_config":{"config_groups":{}}})",
       "a compressed-tensors configuration has no scales"},
      {R"({"version":"1.0.0","encodings":[]})",
       "the file: expected activation_encodings or param_encodings"},
      {R"({"version":"0.6.1","encodings":[]})",
       "the file: expected activation_encodings or param_encodings"},
  };
  for (const Malformed& file : files) {
    const absl::StatusOr<ParsedEncodings> parsed = Parse(file.text);
    ASSERT_FALSE(parsed.ok()) << file.text;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(file.message))
        << file.text;
  }
}

// In files of others one entry that is wrong does not spoil the rest.
TEST(InterchangeTest, LeavesOutAndTellsWhatIsWrongInAimet) {
  const Malformed files[] = {
      {R"({"version":"0.6.1","param_encodings":{"w":[]}})",
       "param_encodings[\"w\"]: expected a list of at least one encoding"},
      {R"({"version":"0.6.1","param_encodings":{"w":[
           {"bitwidth":8,"scale":1,"offset":-128},
           {"bitwidth":4,"scale":1,"offset":-8}]}})",
       "param_encodings[\"w\"][1]: another bitwidth or symmetry"},
      {R"({"version":"0.6.1","param_encodings":{"w":[
           {"bitwidth":1,"scale":1,"offset":-128}]}})",
       "param_encodings[\"w\"][0]: an integer of 1 bits, expected 2 to 16"},
      {R"({"version":"0.6.1","param_encodings":{"w":[
           {"bitwidth":8,"scale":1,"offset":-0.5}]}})",
       "param_encodings[\"w\"][0].offset[0]: expected an integer"},
      {R"({"version":"1.0.0","param_encodings":[
           {"name":"w","dtype":"INT","bw":8,"enc_type":"PER_TENSOR",
            "scale":[1,2],"offset":[0,0]}]})",
       "param_encodings[0].scale: 2 scales, expected 1 per tensor"},
      {R"({"version":"1.0.0","param_encodings":[
           {"name":"w","dtype":"INT","bw":8,"enc_type":"PER_CHANNEL",
            "scale":[1,2],"offset":[0]}]})",
       "param_encodings[0]: 1 offsets for 2 scales"},
      {R"({"version":"1.0.0","param_encodings":[
           {"name":"w","dtype":"INT","bw":8,"enc_type":"PER_PIXEL",
            "scale":[1],"offset":[0]}]})",
       "param_encodings[0].enc_type: expected PER_TENSOR"},
      {R"({"version":"2.0.0","encodings":[
           {"name":"w","output_dtype":"uint8","y_scale":1,
            "y_zero_point":-128}]})",
       "encodings[0].y_zero_point: entry 0 is -128, expected an integer of 0 "
       "to 255; it is the zero point, not the offset"},
      {R"({"version":"2.0.0","encodings":[
           {"name":"w","output_dtype":"int4","axis":1,"block_size":2,
            "y_scale":[[1,2],[3]]}]})",
       "encodings[0].y_scale[1]: expected a list of 2 as its neighbours are"},
      {R"({"version":"2.0.0","encodings":[
           {"name":"w","output_dtype":"int4","axis":5,"block_size":2,
            "y_scale":[[1,2],[3,4]]}]})",
       "encodings[0].axis[0]: expected an integer of -2 to 1"},
      {R"({"version":"2.0.0","encodings":[
           {"name":"w","output_dtype":"int4","axis":1,"block_size":2,
            "per_block_int_scale":[[1,200]],
            "per_channel_float_scale":[[1]]}]})",
       "encodings[0].per_block_int_scale: entry 1 is 200"},
      {R"({"version":"0.6.1","param_encodings":{"w":[
           {"bitwidth":32,"scale":1,"offset":0}]}})",
       "param_encodings[\"w\"]: an integer of 32 bits with a zero point"},
      {R"({"version":"0.6.1","activation_encodings":{"m":{"inputs":{}}}})",
       "activation_encodings[\"m\"].\"inputs\": expected an object called "},
      {R"({"version":"0.6.1","activation_encodings":{"m":{"input":{"x":{}}}}})",
       "activation_encodings[\"m\"].\"input\"[\"x\"]: expected a number"},
      {R"({"version":"0.6.1","activation_encodings":{"m":{"input":{"01":{}}}}})",
       "activation_encodings[\"m\"].\"input\"[\"01\"]: expected a number"},
      {R"({"version":"0.6.1","activation_encodings":{"m":{"input":{"+1":{}}}}})",
       "activation_encodings[\"m\"].\"input\"[\"+1\"]: expected a number"},
      {R"({"version":"0.6.1","activation_encodings":{"m":{"input":{" 1":{}}}}})",
       "activation_encodings[\"m\"].\"input\"[\" 1\"]: expected a number"},
      {R"({"version":"0.6.1","activation_encodings":{"m\n":{"a":1,"b":2}}})",
       "expected UTF-8 without control characters"},
      {R"({"version":"0.6.1","param_encodings":{"w":
           {"bitwidth":8,"dtype":"int","scale":1,"offset":-128}}})",
       "param_encodings[\"w\"]: expected a list of at least one encoding"},
      {R"({"version":"2.0.0","encodings":[
           {"name":"w","output_dtype":"","y_scale":1}]})",
       "encodings[0].output_dtype: no type \"\""},
      {R"({"version":"2.0.0","encodings":[
           {"name":"w","output_dtype":"uint32","y_scale":1}]})",
       "encodings[0].output_dtype: uint32, expected integers of 2 to 16 bits"},
      {R"({"version":"2.0.0","encodings":[
           {"name":"w","output_dtype":"int32","y_scale":1,
            "y_zero_point":1}]})",
       "encodings[0].y_zero_point: entry 0 is 1, expected an integer of 0 to"},
      {R"({"version":"2.0.0","encodings":[
           {"name":"w","output_dtype":"int2","y_scale":1,
            "y_zero_point":-2.5}]})",
       "encodings[0].y_zero_point: entry 0 is -2.5, expected a number of -2 to "
       "1"},
      {R"({"version":"2.1.0","encodings":[
           {"name":"w","output_dtype":"int4","axis":1,"block_size":2,
            "y_scale":{"x":[[1,0]],"x_scale":1}}]})",
       "encodings[0].y_scale.x: entry 1 is 0, expected an integer of 1 to 128"},
      {R"({"version":"2.1.0","encodings":[
           {"name":"w","output_dtype":"float4e2m1","axis":1,"block_size":2,
            "y_scale":{"x":[[1,1.1]],"x_scale":1,
                       "input_dtype":"float8e4m3fn"}}]})",
       "encodings[0].y_scale.x: entry 1 is 1.1, expected a number of float8"},
      {R"({"version":"2.1.0","encodings":[
           {"name":"w","output_dtype":"int4","axis":1,"block_size":2,
            "y_scale":{"x":[[1,2]],"x_scale":1,"x_zero_point":1}}]})",
       "encodings[0].y_scale.x_zero_point: a zero point of 1"},
      {R"({"version":"2.1.0","encodings":[
           {"name":"w","output_dtype":"int4","axis":1,"block_size":2,
            "y_scale":{"x":[[1,2]],"x_scale":[1,2,3],"axis":0}}]})",
       "encodings[0].y_scale.x_scale: dimension 0 has 3 entries, expected 1"},
      {R"({"version":"2.0.0","encodings":[
           {"name":"g","output_dtype":"int8","y_scale":1},
           {"name":"g","output_dtype":"int8","y_scale":2}]})",
       "encodings[1]: tensor \"g\" stands twice in the file"},
  };
  for (const Malformed& file : files) {
    const absl::StatusOr<ParsedEncodings> parsed = Parse(file.text);
    ASSERT_TRUE(parsed.ok()) << file.text << parsed.status();
    EXPECT_TRUE(parsed->leaves_out_unsound);
    ASSERT_EQ(parsed->losses.size(), 1) << file.text;
    EXPECT_TRUE(parsed->losses[0].left_out);
    EXPECT_THAT(parsed->losses[0].what, HasSubstr(file.message)) << file.text;
  }
}

// Of a file of that version with these entries, what is written again.
nlohmann::json Again(InterchangeFormat format, absl::string_view version,
                     const nlohmann::json& entries, LayoutHint hint) {
  const nlohmann::json file = {{"version", version}, {"encodings", entries}};
  const absl::StatusOr<ParsedEncodings> parsed = Parse(file.dump());
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  if (!parsed.ok()) return nullptr;
  EXPECT_EQ(parsed->format, format);
  EXPECT_EQ(Losses(parsed->losses), "");
  Encodings encodings;
  for (PendingEncoding pending : parsed->encodings) {
    const absl::Status status = ResolveLayout(hint, &pending);
    EXPECT_TRUE(status.ok()) << status;
    encodings.push_back({pending.tensor, pending.encoding});
  }
  const Written written = Write(format, encodings);
  EXPECT_EQ(nlohmann::json::parse(written.text)["version"],
            std::string(version));
  return nlohmann::json::parse(written.text)["encodings"];
}

// AIMET 1.0.0 counts real offsets from 0 as whole ones.
TEST(InterchangeTest, RealOffsetsOfAimet100ComeBackAsTheSameJson) {
  const auto entries = nlohmann::json::parse(R"([
      {"name":"grid","dtype":"INT","bw":2,"enc_type":"PER_TENSOR",
       "is_sym":true,"scale":[2.0],"offset":[-2],"zero_point_shift":[0.5]},
      {"name":"affine","dtype":"INT","bw":8,"enc_type":"PER_TENSOR",
       "is_sym":false,"scale":[0.5],"offset":[-4],"zero_point_shift":[0.75]},
      {"name":"bias","dtype":"INT","bw":32,"enc_type":"PER_TENSOR",
       "is_sym":true,"scale":[0.5],"offset":[-2147483648]}])");
  const absl::StatusOr<ParsedEncodings> parsed = Parse(nlohmann::json{
      {"version", "1.0.0"},
      {"activation_encodings", entries},
      {"param_encodings", nlohmann::json::array()}}.dump());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(Losses(parsed->losses), "");
  ASSERT_EQ(parsed->encodings.size(), 3);
  Encodings all;
  for (PendingEncoding pending : parsed->encodings) {
    ASSERT_TRUE(ResolveLayout({}, &pending).ok());
    all.emplace_back(pending.tensor, pending.encoding);
  }
  EXPECT_EQ(all[0].second.real_zero_point, std::vector<float>{-0.5f});
  EXPECT_EQ(all[1].second.real_zero_point, std::vector<float>{3.25f});
  EXPECT_EQ(all[2].second.qmin, std::numeric_limits<int32_t>::min());
  const Written written = Write(InterchangeFormat::kAimet100, all);
  EXPECT_EQ(Losses(written.losses), "");
  EXPECT_EQ(nlohmann::json::parse(written.text)["activation_encodings"],
            entries);
}

// What AIMET 1.0.0 has of it, read; the losses if there are any.
std::string Aimet100Losses(const std::string& entry) {
  const absl::StatusOr<ParsedEncodings> parsed =
      Parse(R"({"version":"1.0.0","param_encodings":[],
                "activation_encodings":[)" +
            entry + "]}");
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.ok() ? Losses(parsed->losses) : "";
}

TEST(InterchangeTest, LeavesOutOffsetsBetweenCodesOfAimetThatNothingHolds) {
  EXPECT_THAT(Aimet100Losses(R"({"name":"bias","dtype":"INT","bw":32,
                  "enc_type":"PER_TENSOR","is_sym":true,
                  "scale":[0.5],"offset":[0.5]})"),
              HasSubstr("bias left out: activation_encodings[0]: an integer "
                        "of 32 bits with a zero point between codes"));
  const auto lpbq = [](const std::string& shift) {
    return Aimet100Losses(R"({"name":"w","dtype":"INT","bw":8,
        "enc_type":"LPBQ","compressed_bw":4,"is_sym":true,"block_size":2,
        "per_block_int_scale":[1,2],"scale":[0.5],"offset":[-128],
        "zero_point_shift":[)" +
                          shift + "]}");
  };
  EXPECT_THAT(lpbq("0.5"),
              HasSubstr("zero_point_shift: a zero point between codes"));
  EXPECT_EQ(lpbq("0"), "");
}

TEST(InterchangeTest, TellsOfOffsetsThatFloat32DoesNotHold) {
  EXPECT_THAT(Aimet100Losses(R"({"name":"a","dtype":"INT","bw":8,
                  "enc_type":"PER_TENSOR","is_sym":false,
                  "scale":[0.5],"offset":[-3.1]})"),
              HasSubstr("offset: 1 rounded to the nearest float32"));
}

TEST(InterchangeTest, TellsWhoHasNoZeroPointsBetweenCodes) {
  core::Encoding encoding = MakeEncoding("uint8", {0.5f});
  encoding.zero_points_are_real = true;
  encoding.real_zero_point = {3.5f};
  for (const InterchangeFormat format :
       {InterchangeFormat::kAimet061, InterchangeFormat::kOnnxQdq,
        InterchangeFormat::kCompressedTensors}) {
    const Written written = Write(format, {{"m.weight", encoding}});
    EXPECT_EQ(written.count, 0);
    EXPECT_THAT(Losses(written.losses),
                HasSubstr("has no zero points between codes"));
  }
}

// Each kind of entry of AIMET's specification that quantd can hold.
TEST(InterchangeTest, EntriesOfAimetComeBackAsTheSameJson) {
  const auto entries = nlohmann::json::parse(R"([
      {"name":"tensor","output_dtype":"uint8","y_scale":0.01,
       "y_zero_point":41},
      {"name":"channels","output_dtype":"int8","y_scale":[0.01,0.02,0.03],
       "axis":0},
      {"name":"two_bits","output_dtype":"int2","y_scale":[0.01,0.02,0.03],
       "axis":0},
      {"name":"blocks","output_dtype":"int4","axis":1,"block_size":32,
       "y_scale":[[0.01,0.02],[0.03,0.04],[0.05,0.06]]},
      {"name":"e4m3","output_dtype":"float8e4m3fn","y_scale":0.5},
      {"name":"e4m3_channels","output_dtype":"float8e4m3fn",
       "y_scale":[0.5,0.25,0.1],"axis":0},
      {"name":"e5m2_blocks","output_dtype":"float8e5m2","axis":1,
       "block_size":4,"y_scale":[[0.125,0.25],[0.375,0.5],[0.625,0.75]]},
      {"name":"fnuz","output_dtype":"float8e4m3fnuz","y_scale":0.3},
      {"name":"e5m2_fnuz","output_dtype":"float8e5m2fnuz","y_scale":0.3},
      {"name":"float4","output_dtype":"float4e2m1","y_scale":0.7},
      {"name":"bias","output_dtype":"int32","y_scale":[0.0001,0.0002,0.0003],
       "axis":0},
      {"name":"bias_tensor","output_dtype":"int32","y_scale":0.0001},
      {"name":"grid","output_dtype":"int2","y_scale":2.0,
       "y_zero_point":-0.5},
      {"name":"grid_channels","output_dtype":"int2","y_scale":[2.0,0.1,0.3],
       "y_zero_point":[-0.5,-0.5,-0.5],"axis":0},
      {"name":"grid_blocks","output_dtype":"uint4","axis":1,"block_size":32,
       "y_scale":[[0.01,0.02],[0.03,0.04],[0.05,0.06]],
       "y_zero_point":[[7.5,7.1],[0.3,14.9],[3.0,0.5]]}])");
  EXPECT_EQ(
      Again(InterchangeFormat::kAimet200, "2.0.0", entries, Shape({3, 64})),
      entries);
  EXPECT_EQ(
      Again(InterchangeFormat::kAimet210, "2.1.0", entries, Shape({3, 64})),
      entries);
  const auto lpbq = nlohmann::json::parse(R"([
      {"name":"weight","output_dtype":"int4","axis":1,"block_size":32,
       "per_block_int_scale":[[3,5],[11,9],[7,16]],
       "per_channel_float_scale":[[0.001],[0.002],[0.003]]}])");
  EXPECT_EQ(Again(InterchangeFormat::kAimet200, "2.0.0", lpbq, LayoutHint()),
            lpbq);
  const auto meta = nlohmann::json::parse(R"([
      {"name":"lpbq","output_dtype":"int4","axis":1,"block_size":32,
       "y_scale":{"x":[[3,5],[11,9],[7,16]],"x_scale":[0.001,0.002,0.003],
                  "axis":0}},
      {"name":"nvfp4","output_dtype":"float4e2m1","axis":1,"block_size":16,
       "y_scale":{"x":[[0.5,1.0],[2.0,1.5],[1.0,0.5]],"x_scale":0.0009,
                  "input_dtype":"float8e4m3fn"}},
      {"name":"blocks_of_blocks","output_dtype":"int8","axis":1,"block_size":16,
       "y_scale":{"x":[[1,2,3],[4,5,6]],"x_scale":[[0.5,0.25],[0.1,0.2]],
                  "axis":1,"block_size":2}}])");
  EXPECT_EQ(Again(InterchangeFormat::kAimet210, "2.1.0", meta, LayoutHint()),
            meta);
  // Zeros need not be there, axes may count from the end, and what 2.0.0 has
  // in two lists is one entry of 2.1.0.
  const auto zeros = nlohmann::json::parse(R"([
      {"name":"channels","output_dtype":"int8","y_scale":[0.01,0.02,0.03],
       "y_zero_point":[0,0.0,0],"axis":-2}])");
  EXPECT_EQ(Again(InterchangeFormat::kAimet200, "2.0.0", zeros, Shape({3, 64})),
            nlohmann::json::array({entries[1]}));
  EXPECT_EQ(Again(InterchangeFormat::kAimet210, "2.1.0", lpbq, LayoutHint())
                .at(0)["y_scale"],
            meta[0]["y_scale"]);
}

TEST(InterchangeTest, TellsThatOnlyAimet210HasScalesOfFloat8) {
  core::Encoding nvfp4 = MakeEncoding("nvfp4", {});
  nvfp4.scale_type = core::ScaleType::kE4m3;
  nvfp4.block_size = {1, 16};
  nvfp4.scale_shape = {1, 2};
  nvfp4.scale_code = {56, 57};
  nvfp4.outer_scale = {0.5f};
  EXPECT_TRUE(core::DeriveScales(&nvfp4).ok());
  EXPECT_THAT(
      Losses(Write(InterchangeFormat::kAimet200, {{"w", nvfp4}}).losses),
      HasSubstr("w left out: AIMET 2.0.0 has no scales of float8"));
  EXPECT_EQ(Losses(Write(InterchangeFormat::kAimet210, {{"w", nvfp4}}).losses),
            "");
}

// Their codes are integers whatever they are multiplied with.
TEST(InterchangeTest, IntegerScalesOfFloatsComeBackFromAimet) {
  for (const char* const format : {"float8_e4m3fn", "float4_e2m1"}) {
    core::Encoding encoding = MakeEncoding(format, {});
    encoding.scale_type = core::ScaleType::kInteger;
    encoding.block_size = {1, 16};
    encoding.scale_shape = {1, 3};
    encoding.scale_code = {1, 16, 7};
    encoding.outer_scale = {0.5f};
    ASSERT_TRUE(core::DeriveScales(&encoding).ok());
    for (const InterchangeFormat target :
         {InterchangeFormat::kAimet200, InterchangeFormat::kAimet210}) {
      const Written written = Write(target, {{"w", encoding}});
      EXPECT_EQ(Losses(written.losses), "");
      const absl::StatusOr<core::Encoding> back = ParseOne(written.text);
      ASSERT_TRUE(back.ok()) << back.status() << written.text;
      EXPECT_EQ(back->scale_code, encoding.scale_code) << written.text;
      EXPECT_EQ(back->scale, encoding.scale);
    }
  }
}

TEST(InterchangeTest, TellsThatAimetHasNoIntegerScalesOfWholeRows) {
  core::Encoding encoding = MakeEncoding("lpbq", {});
  encoding.scale_type = core::ScaleType::kInteger;
  encoding.block_size = {1, 0};
  encoding.scale_shape = {3, 1};
  encoding.scale_code = {1, 16, 7};
  encoding.outer_scale = {0.5f};
  ASSERT_TRUE(core::DeriveScales(&encoding).ok());
  for (const InterchangeFormat format :
       {InterchangeFormat::kAimet200, InterchangeFormat::kAimet210}) {
    EXPECT_THAT(Losses(Write(format, {{"w", encoding}}).losses),
                ::testing::AllOf(::testing::StartsWith("w left out: AIMET 2."),
                                 HasSubstr("has scales under other scales for "
                                           "blocks along a dimension")));
  }
}

// As AIMET's torch files have activations: by module, input or output, place.
TEST(InterchangeTest, ModulesOfAimetsTorchFilesComeBack) {
  const auto file = nlohmann::json::parse(R"({
      "version":"0.6.1",
      "excluded_layers":[],
      "activation_encodings":{
        "conv1":{"input":{"0":
          {"bitwidth":8,"dtype":"int","is_symmetric":"False","min":0.0,
           "max":127.5,"offset":0,"scale":0.5}}},
        "cat":{"input":{"0":
          {"bitwidth":8,"dtype":"int","is_symmetric":"False","min":-60.0,
           "max":67.5,"offset":-120,"scale":0.5},"2":
          {"bitwidth":8,"dtype":"int","is_symmetric":"False","min":0.0,
           "max":127.5,"offset":0,"scale":0.5}},
               "output":{"0":
          {"bitwidth":8,"dtype":"int","is_symmetric":"True","min":-64.0,
           "max":63.5,"offset":-128,"scale":0.5}}},
        "half":{"output":{"0":{"bitwidth":16,"dtype":"float"}}}},
      "param_encodings":{
        "conv1.weight":[
          {"bitwidth":4,"dtype":"int","is_symmetric":"True","min":-2.0,
           "max":1.75,"offset":-8,"scale":0.25}]}})");
  const absl::StatusOr<ParsedEncodings> parsed = Parse(file.dump());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->format, InterchangeFormat::kAimetTorch);
  EXPECT_EQ(Losses(parsed->losses),
            "half.output left out: activation_encodings[\"half\"].\"output\""
            "[\"0\"][0]: a float of 16 bits without scale, nothing to keep\n");
  Encodings encodings;
  std::vector<std::string> names;
  for (PendingEncoding pending : parsed->encodings) {
    ASSERT_TRUE(ResolveLayout(LayoutHint(), &pending).ok());
    names.push_back(pending.tensor);
    encodings.push_back({pending.tensor, pending.encoding});
  }
  EXPECT_THAT(names,
              ::testing::ElementsAre("cat.input", "cat.input.2", "cat.output",
                                     "conv1.input", "conv1.weight"));
  encodings.push_back({"stray", MakeEncoding("int8", {1})});
  const Written written = Write(InterchangeFormat::kAimetTorch, encodings);
  EXPECT_EQ(written.count, 5);
  EXPECT_GE(written.kept_bytes, 4 * 100);
  EXPECT_THAT(Losses(written.losses), HasSubstr("stray left out: AIMET's"));
  const auto again = nlohmann::json::parse(written.text);
  nlohmann::json expected = file["activation_encodings"];
  expected.erase("half");
  EXPECT_EQ(again["activation_encodings"], expected);
  EXPECT_EQ(again["param_encodings"], file["param_encodings"]);
}

TEST(InterchangeTest, PlacesOfModulesAreNumbersAsWeWriteThem) {
  const core::Encoding one = MakeEncoding("uint8", {1});
  const core::Encoding two = MakeEncoding("uint8", {2});
  const Written written =
      Write(InterchangeFormat::kAimetTorch,
            {{"a.input.01", two}, {"a.input.1", one}, {"a.input.+1", two}});
  EXPECT_EQ(written.count, 1);
  EXPECT_THAT(Losses(written.losses),
              ::testing::AllOf(HasSubstr("a.input.01 left out: AIMET's"),
                               HasSubstr("a.input.+1 left out: AIMET's")));
  const auto file = nlohmann::json::parse(written.text);
  EXPECT_EQ(file["activation_encodings"]["a"]["input"]["1"]["scale"], 1);
}

// Parameters have lists, also where they are wrong.
TEST(InterchangeTest, OnlyActivationsHaveModules) {
  const absl::StatusOr<ParsedEncodings> parsed = Parse(
      R"({"version":"0.6.1","param_encodings":{"m":{"input":{"0":[
           {"bitwidth":8,"scale":1,"offset":-128}]}}}})");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->format, InterchangeFormat::kAimet061);
  EXPECT_THAT(parsed->encodings, IsEmpty());
  EXPECT_EQ(parsed->losses.size(), 1u);
}

TEST(InterchangeTest, AnEntryWithoutScalesIsNotSound) {
  const char* const files[] = {
      R"({"version":"2.0.0","encodings":[
          {"name":"w","output_dtype":"int8","axis":0,"y_scale":[]}]})",
      R"({"version":"1.0.0","param_encodings":[
          {"name":"w","dtype":"INT","bw":8,"enc_type":"PER_CHANNEL",
           "is_sym":true,"scale":[],"offset":[]}]})",
      R"({"version":"1.0.0","param_encodings":[
          {"name":"w","dtype":"INT","bw":8,"enc_type":"PER_BLOCK",
           "block_size":4,"is_sym":true,"scale":[],"offset":[]}]})"};
  for (const char* const file : files) {
    for (const LayoutHint& hint : {LayoutHint(), Shape({3, 8})}) {
      const absl::Status status = ParseOne(file, hint).status();
      EXPECT_EQ(core::ErrorReason(status), "INTERCHANGE_INVALID") << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("has no scales"))
          << file;
    }
  }
}

TEST(InterchangeTest, RefusesEncodingsThatAreNotValid) {
  const char* const entries[] = {
      R"({"name":"a","format":"int8","scale":[0]})",
      R"({"name":"a","format":"int8","scale":[-1]})",
      R"({"name":"a","format":"int8","scale":[1e39]})",
      R"({"name":"a","format":"int8","scale":[1e-39]})",
      R"({"name":"a","format":"int8","scale":[]})",
      R"({"name":"a","format":"int8","scale":[1],"zero_point":[200]})",
      R"({"name":"a","format":"int8","scale":[1],"qmin":5,"qmax":4})",
      R"({"name":"a","format":"nf4","scale":[1],"codebook":[1,2]})",
      R"({"name":"a","format":"mxfp8_e4m3","scale_code":[]})",
      R"({"name":"a","format":"nvfp4","scale_code":[56],"outer_scale":[]})",
      R"({"name":"a","format":"int8","scale":[1,2],"block_size":[1],
          "scale_shape":[3]})",
  };
  for (const char* const entry : entries) {
    const absl::StatusOr<core::Encoding> encoding = ParseOne(absl::StrCat(
        R"({"format":"quantd-encodings","version":1,"encodings":[)", entry,
        "]}"));
    EXPECT_EQ(core::ErrorReason(encoding.status()), "INTERCHANGE_INVALID")
        << entry << " " << encoding.status();
    EXPECT_THAT(std::string(encoding.status().message()),
                HasSubstr("encodings[0]: "));
  }
}

TEST(InterchangeTest, CountsWhatAFileWouldTake) {
  const std::string flat = "{\"a\":[" + std::string(200000, '0') + "]}";
  EXPECT_FALSE(ParseMemoryBytes(flat).ok());
  std::string list = "{\"a\":[[0";
  for (int i = 0; i < 100000; ++i) list += ",0";
  list += "]]}";
  const absl::StatusOr<int64_t> bytes = ParseMemoryBytes(list);
  ASSERT_TRUE(bytes.ok());
  EXPECT_GE(*bytes, 100000 * int64_t{sizeof(nlohmann::json)});
  EXPECT_EQ(
      core::ErrorReason(ParseMemoryBytes(std::string("{}\0{}", 5)).status()),
      "INTERCHANGE_INVALID");
}

// A tree is there of one entry at a time.
TEST(InterchangeTest, ManyEntriesTakeLittleMoreThanTheLargest) {
  const auto file = [](int entries) {
    std::string text =
        "{\"format\":\"quantd-encodings\",\"version\":1,"
        "\"encodings\":[";
    for (int i = 0; i < entries; ++i) {
      absl::StrAppend(&text, i == 0 ? "" : ",", "{\"name\":\"t", i,
                      "\",\"format\":\"int8\",\"block_size\":[1],\"scale\":[1");
      for (int j = 1; j < 5000; ++j) absl::StrAppend(&text, ",0.", 1000 + j);
      text += "]}";
    }
    return text + "]}";
  };
  const absl::StatusOr<int64_t> one = ParseMemoryBytes(file(1));
  const std::string text = file(40);
  const absl::StatusOr<int64_t> many = ParseMemoryBytes(text);
  ASSERT_TRUE(one.ok() && many.ok());
  // Sixteen bytes of a scale of about seven, and no tree.
  EXPECT_LT(*many, *one + 40 * 5000 * 17);
  const absl::StatusOr<ParsedEncodings> parsed = Parse(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->encodings.size(), 40u);
  EXPECT_EQ(parsed->encodings[39].tensor, "t39");
  EXPECT_EQ(parsed->encodings[39].encoding.scale.size(), 5000u);
  EXPECT_EQ(parsed->encodings[39].encoding.scale[4999], 0.5999f);
}

// Of a module each place leaves an encoding or a loss, which has its name.
TEST(InterchangeTest, CountsWhatEachPlaceOfAModuleLeaves) {
  constexpr int kCount = 400;
  constexpr int64_t kNameBytes = 20'000;
  const std::string name(kNameBytes, 'x');
  std::string places = "\"0\":0";
  for (int i = 1; i < kCount; ++i) absl::StrAppend(&places, ",\"", i, "\":0");
  for (const std::string& module : {absl::StrCat("{\"input\":{", places, "}}"),
                                    absl::StrCat("{", places, "}")}) {
    const std::string file =
        absl::StrCat("{\"version\":\"0.6.1\",\"activation_encodings\":{\"",
                     name, "\":", module, "}}");
    const absl::StatusOr<int64_t> bytes = ParseMemoryBytes(file);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_GE(*bytes, kCount * (kNameBytes + int64_t{sizeof(PendingEncoding)}));
    const absl::StatusOr<ParsedEncodings> parsed = Parse(file);
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_THAT(parsed->encodings, IsEmpty());
    // A name that no tensor can have is told once.
    EXPECT_EQ(parsed->losses.size(), 1u);
  }
  // The scales of a parameter are one encoding.
  std::string scale = "{\"bitwidth\":8,\"scale\":1,\"offset\":0}";
  const auto list = [&scale](int count) {
    std::string text = "{\"param_encodings\":{\"w\":[" + scale;
    for (int i = 1; i < count; ++i) absl::StrAppend(&text, ",", scale);
    return *ParseMemoryBytes(text + "]}}");
  };
  EXPECT_LT(list(401) - list(1), 400 * 1500);
}

TEST(InterchangeTest, ChargesWhileItCounts) {
  constexpr int64_t kLimitBytes = 8 << 20;
  std::string object = "{\"0\":0";
  std::string list = "{\"a\":[0";
  for (int i = 1; i < 100000; ++i) {
    absl::StrAppend(&object, ",\"", i, "\":0");
    absl::StrAppend(&list, ",[]");
  }
  for (const std::string& text : {object + "}", list + "]}"}) {
    const absl::StatusOr<int64_t> whole = ParseMemoryBytes(text);
    ASSERT_TRUE(whole.ok());
    ASSERT_GT(*whole, 2 * kLimitBytes);
    int64_t most = 0;
    const absl::Status status =
        ChargeParseMemory({text}, [&most](int64_t bytes) -> absl::Status {
          most = bytes;
          if (bytes < kLimitBytes) return absl::OkStatus();
          return core::DrainingError();
        });
    EXPECT_EQ(core::ErrorReason(status), "DRAINING");
    EXPECT_LT(most, kLimitBytes + (4 << 20));
  }
}

}  // namespace
}  // namespace quantd::server::interchange_test
