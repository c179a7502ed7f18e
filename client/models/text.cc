#include "client/models/text.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace quantd {
namespace {

constexpr size_t kMostNames = 10;

}  // namespace

bool NaturalLess(absl::string_view a, absl::string_view b) {
  const auto number_at = [](absl::string_view text, size_t begin) {
    size_t end = begin;
    while (end < text.size() && absl::ascii_isdigit(text[end])) ++end;
    return text.substr(begin, end - begin);
  };
  size_t i = 0;
  size_t j = 0;
  while (i < a.size() && j < b.size()) {
    if (!absl::ascii_isdigit(a[i]) || !absl::ascii_isdigit(b[j])) {
      if (a[i] != b[j]) {
        return static_cast<unsigned char>(a[i]) <
               static_cast<unsigned char>(b[j]);
      }
      ++i;
      ++j;
      continue;
    }
    absl::string_view number_a = number_at(a, i);
    absl::string_view number_b = number_at(b, j);
    i += number_a.size();
    j += number_b.size();
    while (absl::ConsumePrefix(&number_a, "0")) {
    }
    while (absl::ConsumePrefix(&number_b, "0")) {
    }
    if (number_a.size() != number_b.size()) {
      return number_a.size() < number_b.size();
    }
    if (number_a != number_b) return number_a < number_b;
  }
  if (i < a.size() || j < b.size()) return j < b.size();
  // 01 and 1 are two names.
  return a < b;
}
std::string CountText(uint64_t count) {
  std::string digits = absl::StrCat(count);
  for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<size_t>(at), 1, ',');
  }
  return digits;
}

std::string NotFiniteText(uint64_t nan_count, uint64_t infinity_count) {
  return absl::StrCat("has ", CountText(nan_count), " NaN and ",
                      CountText(infinity_count), " infinities");
}

std::string NamesText(std::vector<std::string> names) {
  const size_t count = names.size();
  if (count > kMostNames) names.resize(kMostNames);
  return absl::StrCat(
      absl::StrJoin(names, ", "),
      count > kMostNames
          ? absl::StrCat(" and ", CountText(count - kMostNames), " more")
          : "");
}

}  // namespace quantd
