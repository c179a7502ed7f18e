#include "client/cli/command_line.h"

#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "client/cli/help_page.h"
#include "client/cli/help_topics.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quantd::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// A program with one command of each kind.
class CommandLineTest : public ::testing::Test {
 protected:
  CommandLineTest() : line_("prog", "Does things.", "prog 1", HelpTopics()) {
    line_.program()->AddOption("--server", &text_, "TARGET",
                               "Where it is; more about that");
    Command* const quantize =
        line_.program()->AddCommand("quantize", "Quantize a file");
    quantize->AddArgument("file", &file_, "FILE", "File to read")->Required();
    // As near to --fromat as --format is, but for the letters that are swapped.
    quantize->AddOption("--frost", &text_, "", "How cold it is");
    quantize->AddOption("--format", &text_, "FORMAT",
                        "What comes out, in words that are so many that they "
                        "need more than one line of the help");
    quantize->AddOption("--layout", &layout_, "", "How it lies there")
        ->OneOf({"plain", "packed"})
        ->ShowDefault();
    quantize->AddOption("--bytes", &number_, "BYTES", "How many")->Bytes();
    quantize->AddOption("--time", &seconds_, "SECONDS", "How long")->Seconds();
    quantize->AddExample("prog quantize x", "try it");
    quantize->OnRun([] {});
    Command* const lists = line_.program()->AddCommand("lists", "More");
    lists->AddCommand("show", "Show one")->OnRun([] {});
  }

  CommandLine::Outcome Run(const std::vector<const char*>& words) {
    ::testing::internal::CaptureStderr();
    ::testing::internal::CaptureStdout();
    const CommandLine::Outcome outcome =
        line_.Run(std::vector<std::string>(words.begin(), words.end()));
    error_ = ::testing::internal::GetCapturedStderr();
    output_ = ::testing::internal::GetCapturedStdout();
    return outcome;
  }

  void ExpectWrong(const std::vector<const char*>& words,
                   const std::string& error) {
    EXPECT_EQ(Run(words), CommandLine::Outcome::kWrong);
    EXPECT_THAT(error_, HasSubstr(error));
  }

  CommandLine line_;
  std::string text_;
  std::string file_;
  std::string layout_ = "plain";
  int64_t number_ = 0;
  double seconds_ = 0;
  std::string error_;
  std::string output_;
};

TEST_F(CommandLineTest, AnOptionMayBeEmpty) {
  EXPECT_EQ(Run({"quantize", "x", "--format=", "--bytes=4k"}),
            CommandLine::Outcome::kRan);
  EXPECT_EQ(text_, "");
  EXPECT_EQ(number_, 4096);
  EXPECT_EQ(Run({"quantize", "x", "--format=a="}), CommandLine::Outcome::kRan);
  EXPECT_EQ(text_, "a=");
}

TEST_F(CommandLineTest, MistypedWordsAreNamedWithWhatIsNear) {
  ExpectWrong({"quantize", "x", "--fromat", "int8"},
              "there is no option --fromat; did you mean --format?");
  ExpectWrong({"quantize", "--fromat=int8"},
              "there is no option --fromat; did you mean --format?");
  ExpectWrong({"quantize", "x", "--sever", "y"}, "did you mean --server?");
  ExpectWrong({"quantize", "x", "--zzzzzzzz"},
              "there is no option --zzzzzzzz\n");
  ExpectWrong({"quantise", "x"},
              "there is no command \"quantise\"; did you mean quantize?");
  ExpectWrong({"lists", "shwo"}, "did you mean show?");
  ExpectWrong({"lists"}, "a command is required: show");
  ExpectWrong({"quantize", "x", "y"}, "there is one argument too many: \"y\"");
  ExpectWrong({"quantize", "x", "--layout", "paked"},
              "--layout: expected plain or packed, got paked; did you mean "
              "packed?");
}

TEST_F(CommandLineTest, ValuesThatMakeNoSenseAreToldInWords) {
  ExpectWrong({"quantize", "x", "--bytes", "12 bananas"},
              "--bytes: expected a size such as 4096, 256KiB or 4MiB, got 12 "
              "bananas");
  ExpectWrong({"quantize", "x", "--time", "soon"},
              "--time: expected a time such as 500ms, 30s or 5m, got soon");
  ExpectWrong({"quantize", "x", "--time"}, "--time: expected a value");
  ExpectWrong({"quantize"}, "file is required");
}

TEST_F(CommandLineTest, SizesAndTimesHaveUnits) {
  EXPECT_EQ(Run({"quantize", "x", "--bytes", "256KiB", "--time", "200ms"}),
            CommandLine::Outcome::kRan)
      << error_;
  EXPECT_EQ(number_, 256 << 10);
  EXPECT_EQ(seconds_, 0.2);
  Run({"quantize", "x", "--bytes", "4m", "--time", "5m"});
  EXPECT_EQ(number_, 4 << 20);
  EXPECT_EQ(seconds_, 300);
  Run({"quantize", "x", "--bytes", "7", "--time", "1.5"});
  EXPECT_EQ(number_, 7);
  EXPECT_EQ(seconds_, 1.5);
}

TEST_F(CommandLineTest, TheHelpOfACommandHasAllThatItTakes) {
  EXPECT_EQ(Run({"quantize", "--help"}), CommandLine::Outcome::kHelped);
  EXPECT_EQ(output_,
            R"(Usage: prog quantize FILE [OPTION]...

Quantize a file.

Examples:
  # try it
  prog quantize x

Arguments:
  FILE                    File to read.

Options:
      --frost VALUE       How cold it is.
      --format FORMAT     What comes out, in words that are so many that they
                          need more than one line of the help.
      --layout VALUE      How it lies there. One of plain, packed. Default:
                          plain.
      --bytes BYTES       How many.
      --time SECONDS      How long.

Options of every command:
      --server TARGET     Where it is.

More: prog help specs | servers | json | exit-codes | environment, prog --help
)");
  std::string error;
  EXPECT_EQ(line_.Help({"quantize"}, &error), output_);
  EXPECT_THAT(line_.Help({"lists", "show"}, &error), HasSubstr("Show one."));
  EXPECT_EQ(line_.Help({"qantize"}, &error), "");
  EXPECT_EQ(error,
            "there is no help about \"qantize\"; did you mean quantize?");
  EXPECT_EQ(line_.Help({"quantize", "x"}, &error), "");
  EXPECT_THAT(line_.Help({}, &error), HasSubstr("\n  specs "));
}

TEST_F(CommandLineTest, NoTopicIsWiderThanATerminal) {
  std::string error;
  for (const HelpTopic& topic : line_.topics()) {
    const std::string text = line_.Help({topic.name}, &error);
    EXPECT_THAT(text, HasSubstr(topic.title));
    for (const absl::string_view row : absl::StrSplit(text, '\n')) {
      EXPECT_LE(row.size(), 80u) << row;
    }
  }
}

}  // namespace
}  // namespace quantd::cli
