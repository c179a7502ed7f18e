#include "client/cli/help_page.h"

#include <string>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quantd::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(BriefTest, IsTheFirstClause) {
  EXPECT_EQ(Brief("Where it is; more about that"), "Where it is");
  EXPECT_EQ(Brief("One. Two."), "One");
  EXPECT_EQ(Brief("One."), "One");
  EXPECT_EQ(Brief("At 1.5 or a;b"), "At 1.5 or a;b");
  EXPECT_EQ(Brief(""), "");
}

class HelpPageTest : public ::testing::Test {
 protected:
  HelpPageTest() : line_("prog", "Does things", "1", {{"files", "Files", ""}}) {
    line_.program()->AddOption("--server", &text_, "TARGET",
                               "Where it is; more about that");
    command_ = line_.program()->AddCommand("run", "Run it");
    command_->AddArgument("file", &text_, "FILE", "File to read")->Required();
    command_->AddArgument("more", &text_, "", "Another one");
    command_->AddOption("-o,--output", &text_, "FILE", "File to write")
        ->Required();
    command_->AddOption("--an-option-with-a-long-name", &text_, "VALUE",
                        std::string(30, 'w').c_str());
    std::string words;
    for (int i = 0; i < 60; ++i) words += "x ";
    command_->AddNote(words);
    command_->OnRun([] {});
  }

  std::string Page() { return HelpPage(line_, "prog run", *command_); }

  std::string text_;
  CommandLine line_;
  Command* command_;
};

TEST_F(HelpPageTest, NoLineIsWiderThanATerminal) {
  for (const absl::string_view line : absl::StrSplit(Page(), '\n')) {
    EXPECT_LE(line.size(), 80u) << line;
  }
}

TEST_F(HelpPageTest, UsageShowsWhatIsRequired) {
  EXPECT_THAT(Page(), HasSubstr("Usage: prog run FILE [MORE] -o FILE "
                                "[OPTION]...\n\nRun it.\n"));
}

TEST_F(HelpPageTest, TextStandsInOneColumn) {
  EXPECT_THAT(Page(), HasSubstr("  -o, --output FILE       File to write. "
                                "Required.\n"));
  // Below a name that is too long for it.
  EXPECT_THAT(Page(), HasSubstr("--an-option-with-a-long-name VALUE\n" +
                                std::string(26, ' ') + "www"));
}

TEST_F(HelpPageTest, OptionsOfTheProgramAreBrief) {
  EXPECT_THAT(Page(), HasSubstr("Options of every command:\n"));
  EXPECT_THAT(Page(), HasSubstr("Where it is.\n"));
  EXPECT_THAT(Page(), Not(HasSubstr("more about that")));
  EXPECT_THAT(HelpPage(line_, "prog", *line_.program()),
              HasSubstr("Where it is; more about that."));
}

}  // namespace
}  // namespace quantd::cli
