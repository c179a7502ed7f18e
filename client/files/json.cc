#include "client/files/json.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "nlohmann/json.hpp"

namespace quantd::files {
namespace {

constexpr absl::string_view kPythonNumbers[] = {"NaN", "Infinity", "-Infinity"};

// Begins the string that stands for a number, as JSON writes it.
constexpr absl::string_view kMark = "\"\\u0000";

// How many digits a text begins with.
size_t CountDigits(absl::string_view text) {
  const size_t count = text.find_first_not_of("0123456789");
  return count == absl::string_view::npos ? text.size() : count;
}

// The number of JSON that a text begins with; empty where it begins with none.
absl::string_view NumberAt(absl::string_view text) {
  const absl::string_view whole = text;
  absl::ConsumePrefix(&text, "-");
  size_t digits = CountDigits(text);
  if (digits == 0) return "";
  text.remove_prefix(text[0] == '0' ? 1 : digits);
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, ".")) {
    digits = CountDigits(rest);
    if (digits > 0) text = rest.substr(digits);
  }
  rest = text;
  if (absl::ConsumePrefix(&rest, "e") || absl::ConsumePrefix(&rest, "E")) {
    if (!absl::ConsumePrefix(&rest, "+")) absl::ConsumePrefix(&rest, "-");
    digits = CountDigits(rest);
    if (digits > 0) text = rest.substr(digits);
  }
  return whole.substr(0, whole.size() - text.size());
}

// True if a value holds a number of JSON as Python does.
bool IsHeld(absl::string_view number) {
  if (number.find_first_of(".eE") == absl::string_view::npos) {
    int64_t with_sign = 0;
    uint64_t without = 0;
    return absl::SimpleAtoi(number, &with_sign) ||
           absl::SimpleAtoi(number, &without);
  }
  double value = 0;
  return absl::SimpleAtod(number, &value) && std::isfinite(value);
}

// What stands in the place of a number at the beginning of a text that JSON
// does not have or a value does not hold; empty where there is none.
// `number`  the number of JSON there
absl::string_view PythonNumberAt(absl::string_view text,
                                 absl::string_view number) {
  for (const absl::string_view word : kPythonNumbers) {
    if (absl::StartsWith(text, word)) return word;
  }
  return IsHeld(number) ? "" : number;
}

// True if that stands in the place of a number that PythonNumberAt finds.
bool IsPythonNumber(absl::string_view text) {
  return !text.empty() && PythonNumberAt(text, NumberAt(text)) == text;
}

// The code of "\\uXXXX" at the beginning of a text; -1 where there is none.
int EscapedCodeAt(absl::string_view text) {
  int code = 0;
  return absl::ConsumePrefix(&text, "\\u") && text.size() >= 4 &&
                 absl::SimpleHexAtoi(text.substr(0, 4), &code)
             ? code
             : -1;
}

bool IsHighSurrogate(int code) { return code >= 0xD800 && code < 0xDC00; }
bool IsLowSurrogate(int code) { return code >= 0xDC00 && code < 0xE000; }

// An escaped half of a surrogate pair that is without the other; empty where
// there is none.
absl::string_view FindLoneSurrogate(absl::string_view text) {
  constexpr size_t kEscape = 6;
  for (size_t i = text.find('\\'); i != absl::string_view::npos;
       i = text.find('\\', i)) {
    const int code = EscapedCodeAt(text.substr(i));
    if (IsHighSurrogate(code) &&
        IsLowSurrogate(EscapedCodeAt(text.substr(i + kEscape)))) {
      i += 2 * kEscape;
    } else if (IsHighSurrogate(code) || IsLowSurrogate(code)) {
      return text.substr(i, kEscape);
    } else {
      i += 2;
    }
  }
  return "";
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
    const absl::string_view number = is_in_string ? "" : NumberAt(text);
    const absl::string_view python =
        is_in_string ? "" : PythonNumberAt(text, number);
    if (!python.empty()) {
      size = python.size();
      absl::StrAppend(&marked, kMark, python, "\"");
    } else if (!number.empty()) {
      size = number.size();
      absl::StrAppend(&marked, number);
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
  const std::string text =
      value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
  std::string result;
  absl::string_view rest = text;
  for (size_t at = rest.find(kMark); at != absl::string_view::npos;
       at = rest.find(kMark)) {
    absl::StrAppend(&result, rest.substr(0, at));
    rest.remove_prefix(at);
    const absl::string_view number =
        rest.substr(kMark.size(), rest.find('"', kMark.size()) - kMark.size());
    const bool is_number = IsPythonNumber(number);
    absl::StrAppend(&result, is_number ? number : kMark);
    rest.remove_prefix(is_number ? kMark.size() + number.size() + 1
                                 : kMark.size());
  }
  return absl::StrCat(result, rest);
}

std::string ExpectedObjectText(absl::string_view text) {
  const absl::string_view surrogate = FindLoneSurrogate(text);
  return absl::StrCat(
      "expected a JSON object in UTF-8",
      surrogate.empty()
          ? ""
          : absl::StrCat(", got ", surrogate,
                         ", half of a surrogate pair, which UTF-8 does not "
                         "have"));
}

}  // namespace quantd::files
