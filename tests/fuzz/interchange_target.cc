// Files of encodings: whatever is taken is an encoding that is valid, and comes
// back the same from our own JSON.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "core/types/encoding.h"
#include "server/interchange/interchange.h"
#include "server/interchange/layout.h"
#include "tests/fuzz/fuzz_target.h"

namespace quantd::fuzz {
namespace interchange_target {
namespace {

using server::EncodingsWriter;
using server::InterchangeFormat;

void RequireSpoken(const absl::Status& status) {
  const absl::string_view reason = core::ErrorReason(status);
  Require(reason == "INTERCHANGE_INVALID" ||
              reason == "INTERCHANGE_UNSUPPORTED" || reason == "AXIS_UNKNOWN",
          "a file is refused for what it has wrong");
}

// Writes the encoding in every format; our own gives it back.
void WriteEverywhere(const std::string& tensor,
                     const core::Encoding& encoding) {
  for (int format = 1; format <= 8; ++format) {
    server::ExportOptions options;
    options.is_parameter = [](absl::string_view, const core::Encoding&) {
      return true;
    };
    absl::StatusOr<std::unique_ptr<EncodingsWriter>> writer =
        EncodingsWriter::Create(static_cast<InterchangeFormat>(format),
                                std::move(options));
    Require(writer.ok(), "every format can be written");
    std::string text;
    std::vector<server::InterchangeLoss> losses;
    for (int pass = 0; pass < (*writer)->pass_count(); ++pass) {
      (*writer)->Begin(pass, &text);
      Require(
          (*writer)
              ->Add(pass, tensor, encoding, core::StopToken(), &text, &losses)
              .ok(),
          "what is not stopped is written or left out");
    }
    Require((*writer)->Finish(core::StopToken(), &text).ok(), "a file ends");
    if (format != static_cast<int>(InterchangeFormat::kJson)) continue;
    Require(losses.empty(), "our own JSON holds everything");
    absl::StatusOr<server::ParsedEncodings> back =
        server::ParseEncodings({text}, InterchangeFormat::kUnspecified);
    Require(back.ok() && back->encodings.size() == 1 &&
                server::ResolveLayout({}, &back->encodings[0]).ok() &&
                back->encodings[0].encoding == encoding,
            "our own JSON gives back what it was given");
  }
}

// The first byte chooses the format, the second the shape that is known.
void Run(absl::Span<const uint8_t> input) {
  ByteSource source(input);
  const auto format = static_cast<InterchangeFormat>(source.Byte() % 7);
  const uint8_t shape = source.Byte();
  const absl::string_view text(
      reinterpret_cast<const char*>(source.rest().data()),
      source.rest().size());
  const absl::Status charged = server::ChargeParseMemory(
      {text}, [](int64_t) { return absl::OkStatus(); });
  if (!charged.ok()) return RequireSpoken(charged);
  absl::StatusOr<server::ParsedEncodings> parsed =
      server::ParseEncodings({text}, format);
  if (!parsed.ok()) return RequireSpoken(parsed.status());
  server::LayoutHint hint;
  hint.shape_known = shape % 2 != 0;
  if (hint.shape_known) hint.shape = {shape / 2 % 8, shape / 16 % 8, 3};
  if (shape >= 128) hint.axis = shape % 5 - 2;
  for (server::PendingEncoding& pending : parsed->encodings) {
    const absl::Status status = server::ResolveLayout(hint, &pending);
    if (!status.ok()) {
      RequireSpoken(status);
      continue;
    }
    Require(core::ValidateEncoding(pending.encoding).ok(),
            "what is taken is valid");
    WriteEverywhere(pending.tensor, pending.encoding);
  }
}

std::vector<std::string> Seeds() {
  const std::string own = R"({"format":"quantd-encodings","version":1,)";
  const std::vector<std::string> files = {
      own + R"("encodings":[{"name":"a","format":"int8","scale":[0.5,2],)"
            R"("block_size":[1,0],"scale_shape":[2,1],"zero_point":[1,-3],)"
            R"("qmin":-127,"qmax":127,"degenerate_count":1}]})",
      own + R"("encodings":[{"name":"m","format":"mxfp4_e2m1",)"
            R"("scale_code":[127,255],"block_size":[1,32]},)"
            R"({"name":"c","format":"codebook2","scale":[1],)"
            R"("codebook":[-1,1]}]})",
      own + R"("encodings":[{"name":"l","format":"lpbq",)"
            R"("scale_code":[1,16],"outer_scale":[0.5],"block_size":[1,64],)"
            R"("scale_shape":[1,2]},{"name":"f","format":"float8_e4m3fn",)"
            R"("scale":[1],"no_saturation":true,"scale_type":"bfloat16"}]})",
      R"({"version":"0.6.1","activation_encodings":{"a":[{"bitwidth":8,)"
      R"("dtype":"int","is_symmetric":"False","min":-1.5,"max":126,)"
      R"("scale":0.5,"offset":-3}]},"param_encodings":{"w":[{"bitwidth":4,)"
      R"("is_symmetric":"True","scale":1,"offset":-8},{"bitwidth":4,)"
      R"("is_symmetric":"True","scale":2,"offset":-8}]}})",
      R"({"version":"1.0.0","param_encodings":[{"name":"w","dtype":"INT",)"
      R"("bw":8,"enc_type":"PER_CHANNEL","is_sym":true,"scale":[1,2],)"
      R"("offset":[-128,-128]},{"name":"l","dtype":"INT","bw":8,)"
      R"("enc_type":"LPBQ","compressed_bw":4,"is_sym":true,"block_size":2,)"
      R"("scale":[1,2,3],"offset":[-128,-128,-128],)"
      R"("per_block_int_scale":[1,2,3,4,5,16]},{"name":"b","dtype":"INT",)"
      R"("bw":4,"enc_type":"PER_BLOCK","is_sym":false,"block_size":2,)"
      R"("scale":[1,2],"offset":[0,-15]}]})",
      R"({"version":"2.0.0","encodings":[{"name":"a","output_dtype":"int4",)"
      R"("y_scale":[[1,2],[3,4]],"y_zero_point":[[1,2],[3,-4]],"axis":1,)"
      R"("block_size":2},{"name":"l","output_dtype":"int4","axis":-1,)"
      R"("block_size":2,"per_block_int_scale":[[1,16]],)"
      R"("per_channel_float_scale":[[0.5]]}]})",
      R"({"format":"onnx-qdq","version":1,"encodings":[{"name":"a",)"
      R"("output_dtype":"float8_e5m2","y_scale":[1,2,3],"axis":0,)"
      R"("saturate":false,"scale_dtype":"float16"}]})",
  };
  std::vector<std::string> seeds = {""};
  for (const std::string& file : files) {
    seeds.push_back(std::string(2, '\0') + file);
    // Shapes of [2, 3, 3] and [3, 2, 3].
    seeds.push_back(std::string({'\0', 1 + 2 * 2 + 3 * 16}) + file);
    seeds.push_back(std::string({'\0', 1 + 3 * 2 + 2 * 16}) + file);
  }
  return seeds;
}

}  // namespace
}  // namespace interchange_target

FuzzTarget InterchangeTarget() {
  return {"interchange", interchange_target::Run, interchange_target::Seeds};
}

}  // namespace quantd::fuzz
