#include "client/models/model_config.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/tensor.h"
#include "client/cpp/text_file.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/files/shard_index.h"
#include "nlohmann/json.hpp"

namespace quantd {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kSections[] = {"quantization_config",
                                     "compression_config"};

// The document and the objects in it that may be a language model's. `Value` is
// Json or const Json.
template <typename Value>
std::vector<Value*> PlacesIn(Value& document) {
  std::vector<Value*> places;
  if (!document.is_object()) return places;
  places.push_back(&document);
  for (const char* name : {"text_config", "llm_config", "language_config"}) {
    const auto found = document.find(name);
    if (found != document.end() && found->is_object()) {
      places.push_back(&*found);
    }
  }
  return places;
}

// 0 for what is no number of heads or elements.
int64_t NumberIn(const Json& place, const char* name) {
  const auto found = place.find(name);
  if (found == place.end() || !found->is_number_integer()) return 0;
  const int64_t number = found->get<int64_t>();
  return number > 0 && number <= INT32_MAX ? number : 0;
}

}  // namespace

std::string ConfigPath(const std::string& path, absl::string_view name) {
  if (files::IsFolder(path)) return files::PathIn(path, name);
  const size_t slash = path.rfind('/');
  return slash == std::string::npos
             ? std::string(name)
             : files::PathIn(path.substr(0, slash + 1), name);
}

absl::StatusOr<Json> ReadConfig(const std::string& path,
                                absl::string_view name) {
  const std::string config_path = ConfigPath(path, name);
  const absl::StatusOr<std::string> text = internal::ReadTextFile(config_path);
  if (absl::IsNotFound(text.status())) return Json::object();
  if (!text.ok()) return text.status();
  Json config = files::ParsePythonJson(*text);
  if (!config.is_object()) {
    return files::FileMalformedError(config_path,
                                     files::ExpectedObjectText(*text));
  }
  return config;
}

const Json* FindQuantization(const Json& document, std::string* key) {
  for (const Json* const place : PlacesIn(document)) {
    for (const char* name : kSections) {
      const auto found = place->find(name);
      if (found == place->end() || !found->is_object()) continue;
      if (key != nullptr) *key = name;
      return &*found;
    }
  }
  return nullptr;
}

void RemoveQuantization(Json* document) {
  for (Json* const place : PlacesIn(*document)) {
    for (const char* name : kSections) place->erase(name);
  }
}

absl::StatusOr<ElementType> ElementTypeOfModel(const Json& document) {
  for (const Json* const place : PlacesIn(document)) {
    for (const char* name : {"dtype", "torch_dtype"}) {
      const auto found = place->find(name);
      if (found == place->end() || !found->is_string()) continue;
      return ParseElementType(found->get<std::string>());
    }
  }
  return absl::NotFoundError("no dtype");
}

std::string ModelTypeOf(const Json& document) {
  if (!document.is_object()) return "";
  const auto found = document.find("model_type");
  return found != document.end() && found->is_string()
             ? found->get<std::string>()
             : "";
}

std::optional<AttentionRows> AttentionRowsOf(const Json& document) {
  for (const Json* const place : PlacesIn(document)) {
    const int64_t heads = NumberIn(*place, "num_attention_heads");
    if (heads == 0) continue;
    int64_t size = NumberIn(*place, "head_dim");
    if (size == 0) size = NumberIn(*place, "hidden_size") / heads;
    if (size == 0) continue;
    const int64_t keys = NumberIn(*place, "num_key_value_heads");
    return AttentionRows{heads * size, (keys == 0 ? heads : keys) * size};
  }
  return std::nullopt;
}

}  // namespace quantd
