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

// What lies beside codes in the layouts of others.
constexpr absl::string_view kBeside[] = {
    "_scale",     "_scale_inv",  "_scale_2",     ".scale",  ".scales",
    "_scales",    "_zero_point", "_absmax",      ".absmax", "_quant_map",
    ".quant_map", ".SCB",        "_global_scale"};
// Names that only codes have, and what lies beside them where they may be in
// another file.
constexpr absl::string_view kOfCodes[] = {
    ".qweight",          ".qzeros",         ".weight_packed",
    ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale",
    ".weight.absmax"};

bool HasCodes(const files::FileTensor* tensor) {
  return tensor != nullptr && !ElementTypeOf(tensor->dtype).has_value();
}

// The tensor that holds codes, or what lies beside codes, in the layouts of
// others; null where there is none.
const files::FileTensor* FindCodes(const TensorInput& input) {
  for (const files::FileTensor& tensor : input.tensors()) {
    for (const absl::string_view suffix : kBeside) {
      absl::string_view stem = tensor.name;
      if (!absl::ConsumeSuffix(&stem, suffix)) continue;
      for (const char* end : {"", "_packed", ".weight", "_blocks", ".blocks"}) {
        const files::FileTensor* const codes =
            input.Find(absl::StrCat(stem, end));
        if (HasCodes(codes)) return codes;
      }
    }
  }
  // The codes, or their scales, may be in another file.
  for (const files::FileTensor& tensor : input.tensors()) {
    for (const absl::string_view suffix : kOfCodes) {
      if (absl::EndsWith(tensor.name, suffix)) return &tensor;
    }
    absl::string_view stem = tensor.name;
    if (absl::ConsumeSuffix(&stem, "_scale") &&
        absl::EndsWith(stem, ".weight") && input.Find(stem) == nullptr) {
      return &tensor;
    }
  }
  return nullptr;
}

absl::Status QuantizedError(const std::string& path, absl::string_view what,
                            absl::string_view why, absl::string_view more) {
  return files::FileUnsupportedError(
      path, absl::StrCat("expected plain tensors, but ", what,
                         " is quantized already", why,
                         "; begin with the model that it was made from, or "
                         "with what `quantctl dequantize ",
                         path, " -o FILE` makes of it", more));
}

}  // namespace

std::string QuantizationMethod(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = files::IsFolder(path) ? path
                             : slash == std::string::npos
                                 ? "."
                                 : path.substr(0, slash + 1);
  const auto read = [&folder](const char* name) {
    const std::string text =
        internal::ReadTextFile(files::PathIn(folder, name)).value_or("");
    return Json::parse(text, nullptr, /*allow_exceptions=*/false);
  };
  const Json document = read("config.json");
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

absl::Status CheckPlain(const TensorInput& input, const std::string& path,
                        absl::string_view more) {
  for (const auto& [key, value] : input.metadata()) {
    absl::string_view name = key;
    if (absl::ConsumePrefix(&name, kQuantizedKeyPrefix)) {
      return QuantizedError(path, files::QuotedName(name), "", "");
    }
  }
  const std::string method =
      files::IsFolder(path) ? QuantizationMethod(path) : "";
  if (!method.empty()) {
    return QuantizedError(
        path, "a tensor",
        absl::StrCat(": config.json says by ", files::QuotedName(method)),
        more);
  }
  return CheckNoCodes(input, path, more);
}

absl::Status CheckNoCodes(const TensorInput& input, const std::string& path,
                          absl::string_view more) {
  const files::FileTensor* const codes = FindCodes(input);
  if (codes == nullptr) return absl::OkStatus();
  return QuantizedError(
      path, files::QuotedName(codes->name),
      absl::StrCat(": it is ", DtypeName(codes->dtype),
                   ElementTypeOf(codes->dtype).has_value()
                       ? ", and scales of codes have such a name"
                       : ", and codes and their scales have such names"),
      more);
}

}  // namespace quantd::cli
