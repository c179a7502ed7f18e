#include "client/models/plain_input.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/files/coded_tensor.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/files/safetensors.h"
#include "client/files/shard_index.h"
#include "client/models/coded_input.h"
#include "client/models/model_config.h"
#include "client/models/quantized_layout.h"
#include "client/models/tensor_input.h"
#include "nlohmann/json.hpp"

namespace quantd {
namespace {

// Ends of the names of tensors that lie beside codes in the layouts of others.
constexpr absl::string_view kBeside[] = {
    "_scale",        "_scale_inv",        "_scale_2",        ".scale",
    ".scales",       "_scales",           "_zero_point",     "_absmax",
    ".absmax",       "_quant_map",        ".quant_map",      ".SCB",
    "_global_scale", "_weight_scale",     ".codebooks",      ".scale_weight",
    ".zero",         "_weight_scale_inv", "_weight_scale_2", ".s"};
// How the name of codes goes on where that of what lies beside them ends.
constexpr absl::string_view kCodeEnds[] = {
    "",        "_packed", ".weight",     "_blocks",
    ".blocks", "_data",   "_data._data", "_qdata",
    ".W_q",    ".codes",  ".B"};
// Names that only codes have, and what lies beside them where they may be in
// another file.
constexpr absl::string_view kOfCodes[] = {".qweight",
                                          ".qzeros",
                                          ".weight_packed",
                                          ".weight_scale_inv",
                                          ".weight_scale_2",
                                          ".weight_global_scale",
                                          ".weight.absmax",
                                          "_weight_scale_inv",
                                          "_weight_scale_2",
                                          "_proj_weight_scale",
                                          "._weight_qdata",
                                          "._weight_scale",
                                          "._weight_zero_point",
                                          ".W_q",
                                          ".comfy_quant",
                                          ".Qidxs",
                                          ".q_weight",
                                          ".trellis",
                                          ".suh",
                                          ".svh"};
// Files in which AutoGPTQ and AutoAWQ keep their configuration.
constexpr const char* kPlainConfigFiles[] = {"quantize_config.json",
                                             "quant_config.json"};

bool HasCodes(const files::FileTensor* tensor) {
  return tensor != nullptr && !ElementTypeOf(tensor->dtype).has_value();
}

// True if a tensor is a matrix of a type that codes have.
bool IsCodeMatrix(const files::FileTensor& tensor) {
  switch (tensor.dtype) {
    case files::Dtype::kU8:
    case files::Dtype::kI8:
    case files::Dtype::kF8E4M3:
    case files::Dtype::kF8E5M2:
    case files::Dtype::kI16:
    case files::Dtype::kI32:
      return tensor.shape.size() >= 2;
    default:
      return false;
  }
}

bool HasCodeMatrix(const TensorInput& input) {
  return std::any_of(input.tensors().begin(), input.tensors().end(),
                     IsCodeMatrix);
}

std::string MethodIn(const files::Json& config, const std::string& otherwise) {
  const auto method = config.find("quant_method");
  return method != config.end() && method->is_string()
             ? method->get<std::string>()
             : otherwise;
}

// `is_read`  whether `quantctl dequantize` reads it.
absl::Status QuantizedError(const std::string& path, absl::string_view what,
                            absl::string_view why, bool is_read,
                            absl::string_view more) {
  const std::string quantized = absl::StrCat(
      "expected plain tensors, but ", what, " is quantized already", why,
      "; begin with the model that it was made from");
  if (IsOnnxPath(path)) return files::FileUnsupportedError(path, quantized);
  return files::FileUnsupportedError(
      path,
      is_read ? absl::StrCat(quantized, ", or with what `quantctl dequantize ",
                             path, " -o FILE` makes of it", more)
              : absl::StrCat(quantized,
                             ", or with floats that the program that quantized "
                             "it makes of it; quantctl does not read such "
                             "codes"));
}

// True if quantctl reads the codes of other programs in the input.
bool IsRead(const TensorInput& input, const std::string& path) {
  const absl::StatusOr<std::vector<files::CodedTensor>> coded =
      ReadCoded(input, path);
  return coded.ok() && !coded->empty();
}

}  // namespace

const files::FileTensor* FindCodes(const TensorInput& input) {
  for (const files::FileTensor& tensor : input.tensors()) {
    for (const absl::string_view suffix : kBeside) {
      absl::string_view stem = tensor.name;
      if (!absl::ConsumeSuffix(&stem, suffix)) continue;
      for (const absl::string_view end : kCodeEnds) {
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
    // Without scales, or with scales of other names, as SmoothQuant's. Of 32
    // bits it may be a table.
    if (absl::EndsWith(tensor.name, ".weight") && IsCodeMatrix(tensor) &&
        tensor.dtype != files::Dtype::kI32) {
      return &tensor;
    }
  }
  return nullptr;
}

absl::StatusOr<std::string> QuantizationMethod(const std::string& path) {
  const absl::StatusOr<files::Json> document = ReadConfig(path, "config.json");
  if (!document.ok()) return document.status();
  std::string key;
  const files::Json* const found = FindQuantization(*document, &key);
  if (found != nullptr) return MethodIn(*found, key);
  for (const char* name : kPlainConfigFiles) {
    const absl::StatusOr<files::Json> config = ReadConfig(path, name);
    if (!config.ok()) return config.status();
    if (config->contains("bits") || config->contains("w_bit")) {
      return MethodIn(*config, name);
    }
  }
  const absl::StatusOr<files::Json> modelopt =
      ReadConfig(path, "hf_quant_config.json");
  if (!modelopt.ok()) return modelopt.status();
  const files::Json config = modelopt->value("quantization", files::Json());
  // Without an algorithm it has the cache alone.
  return config.is_object() &&
                 !config.value("quant_algo", files::Json()).is_null()
             ? "modelopt"
             : "";
}

absl::Status CheckPlain(const TensorInput& input, const std::string& path,
                        absl::string_view more) {
  for (const auto& [key, value] : input.metadata()) {
    absl::string_view name = key;
    if (absl::ConsumePrefix(&name, kQuantizedKeyPrefix)) {
      // --requantize is for what others have quantized.
      return QuantizedError(path, files::QuotedName(name), "",
                            /*is_read=*/true, "");
    }
  }
  if (files::IsFolder(path) || HasCodeMatrix(input)) {
    const absl::StatusOr<std::string> method = QuantizationMethod(path);
    if (!method.ok()) return method.status();
    if (!method->empty()) {
      return QuantizedError(path, "a tensor",
                            absl::StrCat(": its configuration says by ",
                                         files::QuotedName(*method)),
                            IsRead(input, path), more);
    }
  }
  return CheckNoCodes(input, path, more);
}

absl::Status CheckNoCodes(const TensorInput& input, const std::string& path,
                          absl::string_view more) {
  if (!input.onnx_codes().empty()) {
    return QuantizedError(path, files::QuotedName(input.onnx_codes()),
                          ": the model takes it as codes", /*is_read=*/false,
                          more);
  }
  const files::FileTensor* const codes = FindCodes(input);
  if (codes == nullptr) return absl::OkStatus();
  return QuantizedError(
      path, files::QuotedName(codes->name),
      absl::StrCat(": it is ", DtypeName(codes->dtype),
                   ElementTypeOf(codes->dtype).has_value()
                       ? ", and scales of codes have such a name"
                       : ", and codes have such names"),
      IsRead(input, path), more);
}

}  // namespace quantd
