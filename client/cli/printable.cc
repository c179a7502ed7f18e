#include "client/cli/printable.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "client/cpp/utf8.h"

namespace quantd::cli {
namespace {

// Size of the control character that the text begins with, 0 for none: C0 and
// DEL, C1 (U+0080 to U+009F), and what turns the direction of writing (U+202A
// to U+202E, U+2066 to U+2069). Requires: UTF-8, or not beyond ASCII here.
size_t ControlSizeBytes(absl::string_view text) {
  const auto at = [text](size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
  };
  if (at(0) < 0x20 || at(0) == 0x7F) return 1;
  if (at(0) == 0xC2 && at(1) < 0xA0) return 2;
  if (at(0) != 0xE2) return 0;
  const bool is_embedding = at(1) == 0x80 && at(2) >= 0xAA && at(2) <= 0xAE;
  const bool is_isolate = at(1) == 0x81 && at(2) >= 0xA6 && at(2) <= 0xA9;
  return is_embedding || is_isolate ? 3 : 0;
}

// The code point of one character of UTF-8, of at most 3 bytes.
unsigned CodePoint(absl::string_view bytes) {
  unsigned value = static_cast<unsigned char>(bytes[0]);
  if (bytes.size() > 1) value &= 0x1F;
  for (const char byte : bytes.substr(1)) {
    value = value << 6 | (static_cast<unsigned char>(byte) & 0x3F);
  }
  return value & 0xFFFF;
}

}  // namespace

std::string Printable(absl::string_view text) {
  const bool is_utf8 = internal::IsValidUtf8(text);
  std::string printable;
  while (!text.empty()) {
    const bool is_unknown =
        !is_utf8 && static_cast<unsigned char>(text[0]) >= 0x80;
    const size_t size = is_unknown ? 1 : ControlSizeBytes(text);
    if (size == 0) printable.push_back(text[0]);
    for (const char byte : text.substr(0, size)) {
      absl::StrAppendFormat(&printable, "\\x%02x",
                            static_cast<unsigned char>(byte));
    }
    text.remove_prefix(std::max<size_t>(1, size));
  }
  return printable;
}

std::string PrintableJson(absl::string_view text) {
  std::string printable;
  while (!text.empty()) {
    // Line ends are those between values.
    const size_t size = text[0] == '\n' ? 0 : ControlSizeBytes(text);
    if (size == 0) {
      printable.push_back(text[0]);
    } else {
      absl::StrAppendFormat(&printable, "\\u%04x",
                            CodePoint(text.substr(0, size)));
    }
    text.remove_prefix(std::max<size_t>(1, size));
  }
  return printable;
}

}  // namespace quantd::cli
