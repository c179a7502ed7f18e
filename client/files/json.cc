#include "client/files/json.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace quantd::files {
namespace {

constexpr absl::string_view kPythonNumbers[] = {"NaN", "Infinity", "-Infinity"};

// The string that stands for a number, as JSON writes it: it begins with a zero
// character.
std::string Mark(absl::string_view number) {
  return absl::StrCat("\"\\u0000", number, "\"");
}

}  // namespace

bool IsTooDeep(absl::string_view text) {
  int depth = 0;
  bool is_in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (is_in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        is_in_string = false;
      }
    } else if (c == '"') {
      is_in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMostJsonDepth) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

std::string MarkPythonNumbers(absl::string_view text) {
  std::string marked;
  marked.reserve(text.size());
  bool is_in_string = false;
  while (!text.empty()) {
    size_t size = 1;
    const auto* const number =
        is_in_string
            ? std::end(kPythonNumbers)
            : std::find_if(std::begin(kPythonNumbers), std::end(kPythonNumbers),
                           [text](absl::string_view word) {
                             return absl::StartsWith(text, word);
                           });
    if (number != std::end(kPythonNumbers)) {
      size = number->size();
      absl::StrAppend(&marked, Mark(*number));
    } else {
      if (text[0] == '"') is_in_string = !is_in_string;
      // A character that is escaped ends no string.
      if (is_in_string && text[0] == '\\') {
        size = std::min<size_t>(2, text.size());
      }
      absl::StrAppend(&marked, text.substr(0, size));
    }
    text.remove_prefix(size);
  }
  return marked;
}

std::string PythonJsonText(const Json& value) {
  std::vector<std::pair<std::string, absl::string_view>> numbers;
  for (const absl::string_view number : kPythonNumbers) {
    numbers.emplace_back(Mark(number), number);
  }
  return absl::StrReplaceAll(
      value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace),
      numbers);
}

}  // namespace quantd::files
