#include "client/cli/man_page.h"

#include <string>
#include <vector>

#include "client/cli/command_line.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quantd::cli {
namespace {

using ::testing::HasSubstr;

class ManPageTest : public ::testing::Test {
 protected:
  ManPageTest()
      : line_("prog", "Does things.", "prog 1-2",
              {{"files", "What's in a file", "  .npy \\ x\n\n'quoted'\n"}}) {
    line_.program()->AddOption("-s,--server", &text_, "TARGET", "Where");
    Command* const run = line_.program()->AddCommand("run", ".hidden start");
    run->AddArgument("file", &text_, "FILE", "File to read")->Required();
    run->AddOption("--kind", &text_, "", "Which")->OneOf({"a-b", "c"});
    run->AddExample("prog run x \\\n  --kind c", "why not");
    run->OnRun([] {});
    page_ = ManPage(line_);
  }

  std::string text_;
  CommandLine line_;
  std::string page_;
};

TEST_F(ManPageTest, HasWhatTheCommandLineTakes) {
  EXPECT_THAT(page_, HasSubstr(".TH PROG 1 \"\" \"prog 1\\-2\""));
  EXPECT_THAT(page_, HasSubstr("prog \\- Does things\n"));
  EXPECT_THAT(page_,
              HasSubstr("\\fB\\-s\\fR, \\fB\\-\\-server\\fR \\fITARGET\\fR\n"));
  EXPECT_THAT(page_, HasSubstr(".SS prog run\n"));
  EXPECT_THAT(page_, HasSubstr("One of a\\-b, c.\n"));
  EXPECT_THAT(page_, HasSubstr("  # why not\n  prog run x \\e\n"));
}

TEST_F(ManPageTest, TextMeansOnlyItself) {
  // A line that begins with a dot or a quote is a request.
  EXPECT_THAT(page_, HasSubstr("\n\\&.hidden start.\n"));
  EXPECT_THAT(page_, HasSubstr("\n  .npy \\e x\n\\&\n\\(aqquoted\\(aq\n"));
  // Names of characters are in lower case, also in titles.
  EXPECT_THAT(page_, HasSubstr(".SH WHAT\\(aqS IN A FILE\n"));
}

}  // namespace
}  // namespace quantd::cli
