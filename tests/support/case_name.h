// Names of the cases of tests that have a table of them.

#ifndef QUANTD_TESTS_SUPPORT_CASE_NAME_H_
#define QUANTD_TESTS_SUPPORT_CASE_NAME_H_

#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace quantd::testing {

// `words` as --gtest_filter takes them: "half-close in a tensor" is
// HalfCloseInATensor. Requires: letters and digits of ASCII tell the cases of a
// table apart.
inline std::string CaseName(absl::string_view words) {
  std::string name;
  bool begins = true;
  for (const char c : words) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c))) {
      name.push_back(begins ? absl::ascii_toupper(c) : c);
      begins = false;
    } else {
      begins = true;
    }
  }
  return name;
}

// For INSTANTIATE_TEST_SUITE_P: the name of a case whose member `name` says in
// words what it is.
struct NameOfCase {
  template <typename Case>
  std::string operator()(const ::testing::TestParamInfo<Case>& info) const {
    return CaseName(info.param.name);
  }
};

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_CASE_NAME_H_
