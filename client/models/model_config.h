// Reads config.json and its like, as Hugging Face has them beside a model: how
// the model is quantized, its kind and its attention.

#ifndef QUANTD_CLIENT_MODELS_MODEL_CONFIG_H_
#define QUANTD_CLIENT_MODELS_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/tensor.h"
#include "nlohmann/json.hpp"

namespace quantd {

// The path of the file of that name, for what `path` was opened as: in a
// model's folder, or beside a file.
std::string ConfigPath(const std::string& path, absl::string_view name);

// The object in that file, of files::ParsePythonJson; an empty one where there
// is no such file.
// Errors: FILE_UNREADABLE, FILE_UNSUPPORTED, FILE_MALFORMED.
absl::StatusOr<nlohmann::ordered_json> ReadConfig(const std::string& path,
                                                  absl::string_view name);

// The section of a config.json that says how the model is quantized, as an
// object: "quantization_config" or "compression_config" of the document, or
// else of the language model in it ("text_config", "llm_config",
// "language_config"). Null if there is none. Sets `key`, if it is not null, to
// its name.
const nlohmann::ordered_json* FindQuantization(
    const nlohmann::ordered_json& document, std::string* key = nullptr);

// Removes all such sections.
void RemoveQuantization(nlohmann::ordered_json* document);

// The type that the model had before it was quantized, from the document or the
// language model in it. Errors: NOT_FOUND, ARGUMENT_INVALID for another word.
absl::StatusOr<ElementType> ElementTypeOfModel(
    const nlohmann::ordered_json& document);

// "model_type" of the document; empty where there is none.
std::string ModelTypeOf(const nlohmann::ordered_json& document);

// Rows of the matrices that make queries, keys and values. Plain value.
struct AttentionRows {
  int64_t queries = 0;
  // Rows of keys, and as many of values.
  int64_t keys = 0;
};

// By the numbers of heads and their size, of the document or the language model
// in it; nothing where these are not there.
std::optional<AttentionRows> AttentionRowsOf(
    const nlohmann::ordered_json& document);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_MODEL_CONFIG_H_
