#include "client/models/compressed_reader.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cpp/errors.h"
#include "client/cpp/tensor.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/files/safetensors.h"
#include "client/models/compressed_module.h"
#include "client/models/compressed_targets.h"
#include "client/models/compressed_tensors.h"
#include "client/models/model_config.h"
#include "nlohmann/json.hpp"

namespace quantd {
namespace {

constexpr absl::string_view kScale = ".weight_scale";
constexpr absl::string_view kPacked = ".weight_packed";

// Gives what says how the cache is quantized to the projections that fill
// it. Where these are not quantized it goes to any tensor: it must leave the
// model with the codes.
void AddCacheParts(const TensorInput& input,
                   std::vector<QuantizedTensor>* tensors) {
  if (tensors->empty()) return;
  for (const files::FileTensor& tensor : input.tensors()) {
    absl::string_view cache = tensor.name;
    if (!absl::ConsumeSuffix(&cache, "_scale") &&
        !absl::ConsumeSuffix(&cache, "_zero_point")) {
      continue;
    }
    if (!absl::EndsWith(cache, ".k") && !absl::EndsWith(cache, ".v")) {
      continue;
    }
    const std::string weight = absl::StrCat(cache, "_proj", kCompressedWeight);
    const auto found =
        std::find_if(tensors->begin(), tensors->end(),
                     [&weight](const QuantizedTensor& quantized) {
                       return quantized.name == weight;
                     });
    if (found != tensors->end()) {
      found->parts.push_back(tensor.name);
    } else if (input.Find(weight) != nullptr) {
      tensors->front().parts.push_back(tensor.name);
    }
  }
}

// Checks that the codes stand for the weights as they were. Codes of rotated
// weights do not, nor do codes of only those weights that are not zero. Both
// sections may be there all the same.
absl::Status CheckRead(const files::Json& config,
                       const std::string& config_path) {
  const files::Json transforms =
      config.value("transform_config", files::Json());
  const bool has_transforms =
      transforms.is_object()
          ? !transforms.value("config_groups", files::Json()).empty()
          : !transforms.is_null();
  if (has_transforms) {
    return files::FileUnsupportedError(
        config_path,
        "transform_config: weights that were transformed are not read");
  }
  const files::Json sparsity = config.value("sparsity_config", files::Json());
  if (sparsity.is_object() &&
      sparsity.value("format", files::Json("dense")) != "dense") {
    return files::FileUnsupportedError(
        config_path,
        "sparsity_config: weights that are stored sparsely are "
        "not read");
  }
  return absl::OkStatus();
}

// `config` is of `config_path`.
absl::StatusOr<std::vector<QuantizedTensor>> ReadCompressedModules(
    const TensorInput& input, const std::string& path,
    const std::string& config_path, const files::Json& config) {
  CompressedSchemes schemes;
  for (const files::FileTensor& tensor : input.tensors()) {
    absl::string_view module = tensor.name;
    if (absl::ConsumeSuffix(&module, kScale)) schemes[module] = nullptr;
  }
  for (const files::FileTensor& tensor : input.tensors()) {
    absl::string_view module = tensor.name;
    if (absl::ConsumeSuffix(&module, kPacked) &&
        schemes.find(module) == schemes.end()) {
      return files::FileUnsupportedError(
          path, absl::StrCat("tensor ", files::QuotedName(tensor.name),
                             " is quantized in a way that is not read"));
    }
  }
  const absl::Status status = MatchTargets(config, config_path, &schemes);
  if (!status.ok()) return status;
  std::vector<QuantizedTensor> tensors;
  for (const files::FileTensor& tensor : input.tensors()) {
    absl::string_view module = tensor.name;
    if (!absl::ConsumeSuffix(&module, kScale)) continue;
    absl::StatusOr<QuantizedTensor> read =
        ReadCompressedModule(input, path, std::string(module), schemes[module]);
    if (!read.ok()) return read.status();
    tensors.push_back(*std::move(read));
  }
  if (config.value("kv_cache_scheme", files::Json()).is_object()) {
    AddCacheParts(input, &tensors);
  }
  return tensors;
}

}  // namespace

absl::StatusOr<std::vector<QuantizedTensor>> ReadCompressed(
    const TensorInput& input, const std::string& path) {
  const absl::StatusOr<files::Json> document =
      ReadConfig(path, kModelConfigName);
  if (!document.ok()) return document.status();
  std::string key;
  const files::Json* const config = FindQuantization(*document, &key);
  if (config == nullptr) return std::vector<QuantizedTensor>();
  const std::string config_path = ConfigPath(path, kModelConfigName);
  // The second one of its names is its own.
  const auto method = config->find("quant_method");
  if (method == config->end() ? key != "compression_config"
                              : *method != "compressed-tensors") {
    return files::FileUnsupportedError(
        config_path, "a quantization that is not of compressed-tensors");
  }
  const absl::Status is_read = CheckRead(*config, config_path);
  if (!is_read.ok()) return is_read;
  absl::StatusOr<std::vector<QuantizedTensor>> tensors =
      ReadCompressedModules(input, path, config_path, *config);
  if (!tensors.ok()) return tensors.status();
  const absl::StatusOr<ElementType> of_model = ElementTypeOfModel(*document);
  for (QuantizedTensor& tensor : *tensors) {
    const auto told =
        input.metadata().find(absl::StrCat(kElementTypeKeyPrefix, tensor.name));
    if (told != input.metadata().end()) {
      const absl::StatusOr<ElementType> type = ParseElementType(told->second);
      if (!type.ok()) {
        return files::FileMalformedError(path, ErrorText(type.status()));
      }
      tensor.element_type = *type;
    } else if (tensor.element_type == ElementType::kFloat32 && of_model.ok()) {
      // Scales are often wider than what they came from.
      tensor.element_type = *of_model;
    }
  }
  return tensors;
}

}  // namespace quantd
