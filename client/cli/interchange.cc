#include "client/cli/interchange.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/cpp/errors.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct InterchangeFormat {
  v1::InterchangeFormat format;
  const char* name;
};

constexpr InterchangeFormat kFormats[] = {
    {v1::INTERCHANGE_FORMAT_JSON, "json"},
    {v1::INTERCHANGE_FORMAT_AIMET_0_6_1, "aimet-0.6.1"},
    {v1::INTERCHANGE_FORMAT_AIMET_1_0_0, "aimet-1.0.0"},
    {v1::INTERCHANGE_FORMAT_AIMET_2_0_0, "aimet-2.0.0"},
    {v1::INTERCHANGE_FORMAT_AIMET_2_1_0, "aimet-2.1.0"},
    {v1::INTERCHANGE_FORMAT_AIMET_TORCH, "aimet-torch"},
    {v1::INTERCHANGE_FORMAT_ONNX_QDQ, "onnx-qdq"},
    {v1::INTERCHANGE_FORMAT_COMPRESSED_TENSORS, "compressed-tensors"},
};

}  // namespace

std::string InterchangeFormatName(v1::InterchangeFormat format) {
  for (const InterchangeFormat& known : kFormats) {
    if (known.format == format) return known.name;
  }
  return "auto";
}

absl::StatusOr<v1::InterchangeFormat> ParseInterchangeFormat(
    absl::string_view name) {
  if (name == "auto") return v1::INTERCHANGE_FORMAT_UNSPECIFIED;
  for (const InterchangeFormat& known : kFormats) {
    if (known.name == name) return known.format;
  }
  return ArgumentInvalidError(absl::StrCat(
      "expected one of ", absl::StrJoin(InterchangeFormatNames(), ", "),
      ", got \"", name, "\""));
}

std::vector<std::string> InterchangeFormatNames() {
  std::vector<std::string> names;
  for (const InterchangeFormat& known : kFormats)
    names.emplace_back(known.name);
  return names;
}

Json LossesJson(const std::vector<v1::InterchangeLoss>& losses) {
  Json list = Json::array();
  for (const v1::InterchangeLoss& loss : losses) {
    list.push_back({{"tensor", loss.tensor()},
                    {"what", loss.what()},
                    {"left_out", loss.left_out()}});
  }
  return list;
}

void PrintLosses(const std::vector<v1::InterchangeLoss>& losses,
                 const Session& session) {
  for (const v1::InterchangeLoss& loss : losses) {
    if (session.quiet && !loss.left_out()) continue;
    session.PrintError(absl::StrCat(
        "quantctl: tensor ", loss.tensor(),
        loss.left_out() ? ": left out: " : ": not kept: ", loss.what()));
  }
}

bool AnyLeftOut(const std::vector<v1::InterchangeLoss>& losses) {
  return std::any_of(
      losses.begin(), losses.end(),
      [](const v1::InterchangeLoss& loss) { return loss.left_out(); });
}

}  // namespace quantd::cli
