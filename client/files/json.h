// JSON of files that somebody else wrote.

#ifndef QUANTD_CLIENT_FILES_JSON_H_
#define QUANTD_CLIENT_FILES_JSON_H_

#include <string>

#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace quantd::files {

// Keeps the order of keys.
using Json = nlohmann::ordered_json;

// Arrays and objects may be nested as deep as this: code that walks through
// them calls itself.
constexpr int kMostJsonDepth = 128;

// True if arrays and objects of a JSON text are nested deeper than that.
bool IsTooDeep(absl::string_view text);

// The value of a JSON text; is_discarded() for one that is none, or is nested
// too deep.
template <typename Value = Json>
Value ParseJson(absl::string_view text) {
  if (IsTooDeep(text)) return Value(Value::value_t::discarded);
  return Value::parse(text.begin(), text.end(), nullptr,
                      /*allow_exceptions=*/false);
}

// JSON as Python's json writes and reads it, such as config.json of
// transformers, may have NaN, Infinity and -Infinity in the place of numbers,
// integers of more than 64 bits, and floats that a double cannot hold. They
// become strings that no other program writes; PythonJsonText makes them what
// they were.
std::string MarkPythonNumbers(absl::string_view text);

// ParseJson of a text that may have Python's numbers.
template <typename Value = Json>
Value ParsePythonJson(absl::string_view text) {
  return ParseJson<Value>(MarkPythonNumbers(text));
}

// The text of a value of ParsePythonJson, indented by 2.
std::string PythonJsonText(const Json& value);

// What an error says of a text that is no JSON object of ParsePythonJson.
std::string ExpectedObjectText(absl::string_view text);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_JSON_H_
