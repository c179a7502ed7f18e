#include "server/guard/size_text.h"

#include <cstdint>
#include <limits>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace quantd::server {
namespace {

constexpr struct {
  absl::string_view suffix;
  int64_t factor;
} kUnits[] = {{"TiB", int64_t{1} << 40},
              {"GiB", int64_t{1} << 30},
              {"MiB", int64_t{1} << 20},
              {"KiB", int64_t{1} << 10}};

}  // namespace

std::string FormatSize(int64_t bytes) {
  for (const auto& unit : kUnits) {
    if (bytes != 0 && bytes % unit.factor == 0) {
      return absl::StrCat(bytes / unit.factor, unit.suffix);
    }
  }
  return absl::StrCat(bytes);
}

bool ParseSize(absl::string_view text, int64_t* bytes) {
  int64_t factor = 1;
  for (const auto& unit : kUnits) {
    if (absl::ConsumeSuffix(&text, unit.suffix)) {
      factor = unit.factor;
      break;
    }
  }
  text = absl::StripTrailingAsciiWhitespace(text);
  int64_t count = 0;
  if (!absl::SimpleAtoi(text, &count) || count < 0 ||
      count > std::numeric_limits<int64_t>::max() / factor) {
    return false;
  }
  *bytes = count * factor;
  return true;
}

}  // namespace quantd::server
