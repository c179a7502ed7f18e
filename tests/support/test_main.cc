// main of the test programs, each of which has the tests of a folder.
//
//   PROGRAM [FLAG OF GOOGLETEST]... [--source=FILE]
//
// With --source only the tests of that file run, e.g.
// --source=tests/core/quantize/quantize_test.cc. It fails if there are none.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace {

// GoogleTest's filter that takes the tests of this file and no others.
std::string FilterOfSource(const std::string& source) {
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  std::string filter;
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int j = 0; j < suite.total_test_count(); ++j) {
      const ::testing::TestInfo& test = *suite.GetTestInfo(j);
      if (absl::EndsWith(test.file(), absl::StrCat("/", source))) {
        absl::StrAppend(&filter, suite.name(), ".", test.name(), ":");
      }
    }
  }
  return filter;
}

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    absl::string_view source = argv[i];
    if (!absl::ConsumePrefix(&source, "--source=")) {
      std::fprintf(stderr, "expected --source=FILE, got %s\n", argv[i]);
      return 2;
    }
    const std::string filter = FilterOfSource(std::string(source));
    if (filter.empty()) {
      std::fprintf(stderr, "no test of this program is in %s\n", argv[i]);
      return 2;
    }
    GTEST_FLAG_SET(filter, filter);
  }
  return RUN_ALL_TESTS();
}
