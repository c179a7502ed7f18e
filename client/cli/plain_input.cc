#include "client/cli/plain_input.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cli/session.h"
#include "client/cpp/text_file.h"
#include "client/files/errors.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"
#include "client/models/quantized_layout.h"
#include "client/models/tensor_input.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

// The tensor that holds codes, or their scales, in the layouts of others; null
// where there is none.
const files::FileTensor* FindCodes(const TensorInput& input) {
  constexpr absl::string_view kScales[] = {"_scale", ".scale", "_scale_inv",
                                           ".scales"};
  for (const files::FileTensor& tensor : input.tensors()) {
    if (absl::EndsWith(tensor.name, ".qweight")) return &tensor;
    for (const absl::string_view suffix : kScales) {
      absl::string_view stem = tensor.name;
      if (!absl::ConsumeSuffix(&stem, suffix)) continue;
      const files::FileTensor* codes = input.Find(stem);
      if (codes == nullptr) codes = input.Find(absl::StrCat(stem, "_packed"));
      if (codes != nullptr && !ElementTypeOf(codes->dtype).has_value()) {
        return codes;
      }
    }
  }
  return nullptr;
}

// What a folder's config.json says of how the model is quantized; empty where
// it says nothing.
std::string QuantizationMethod(const std::string& folder) {
  const std::string text =
      internal::ReadTextFile(files::PathIn(folder, "config.json")).value_or("");
  const Json document = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!document.is_object()) return "";
  for (const char* key : {"quantization_config", "compression_config"}) {
    const auto config = document.find(key);
    if (config == document.end() || !config->is_object()) continue;
    const auto method = config->find("quant_method");
    return method != config->end() && method->is_string()
               ? method->get<std::string>()
               : key;
  }
  return "";
}

}  // namespace

absl::Status CheckPlain(const TensorInput& input, const std::string& path) {
  constexpr absl::string_view kCompressed = "compressed-tensors";
  const std::string method =
      files::IsFolder(path) ? QuantizationMethod(path) : "";
  const std::string take_back =
      absl::StrCat("; begin with `quantctl dequantize ", path,
                   " -o FILE`, or with the ", "model that it was made from");
  for (const auto& [key, value] : input.metadata()) {
    absl::string_view name = key;
    if (absl::ConsumePrefix(&name, kQuantizedKeyPrefix)) {
      return files::FileUnsupportedError(
          path, absl::StrCat("expected plain tensors, but \"", name,
                             "\" is quantized already", take_back));
    }
  }
  if (method == kCompressed) {
    return files::FileUnsupportedError(
        path, absl::StrCat("expected plain tensors, but config.json says that "
                           "they are quantized already, by ",
                           kCompressed, take_back));
  }
  if (!method.empty()) {
    return files::FileUnsupportedError(
        path,
        absl::StrCat("expected plain tensors, but config.json says that "
                     "they are quantized already, by \"",
                     method, "\"; begin with the model that it was made from"));
  }
  const files::FileTensor* const codes = FindCodes(input);
  if (codes != nullptr) {
    return files::FileUnsupportedError(
        path,
        absl::StrCat("expected plain tensors, but \"", codes->name,
                     "\" is quantized already: it is ", DtypeName(codes->dtype),
                     " and has scales beside it", take_back));
  }
  return absl::OkStatus();
}

}  // namespace quantd::cli
