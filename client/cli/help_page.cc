#include "client/cli/help_page.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cli/command_line.h"

namespace quantd::cli {
namespace {

constexpr size_t kWidth = 80;
// Columns where the text about options begins, and about commands.
constexpr size_t kOptionColumn = 26;
constexpr size_t kCommandColumn = 15;

// The words with as few line ends as fit, each line but the first behind
// `indent` spaces; the first begins at column `first`.
std::string Wrapped(absl::string_view text, size_t first, size_t indent) {
  std::string lines;
  size_t column = first;
  for (const absl::string_view word :
       absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    if (!lines.empty() && column + 1 + word.size() > kWidth) {
      absl::StrAppend(&lines, "\n", std::string(indent, ' '));
      column = indent;
    } else if (!lines.empty()) {
      lines.push_back(' ');
      ++column;
    }
    lines.append(word.data(), word.size());
    column += word.size();
  }
  return lines;
}

// "  NAME   TEXT", with the text in a column of its own.
std::string Entry(absl::string_view name, absl::string_view text,
                  size_t column) {
  std::string entry = absl::StrCat("  ", name);
  if (entry.size() + 2 > column) {
    entry.push_back('\n');
    entry.append(column, ' ');
  } else {
    entry.append(column - entry.size(), ' ');
  }
  return absl::StrCat(entry, Wrapped(text, column, column), "\n");
}

std::string Sentence(absl::string_view text) {
  return absl::StrCat(absl::StripSuffix(text, "."), ".");
}

std::string OptionNamesOf(const Option& option) {
  std::string names = absl::StrJoin(option.names(), ", ");
  // Long names stand below each other.
  if (!option.IsArgument() && option.names()[0][1] == '-') {
    names.insert(0, "    ");
  }
  if (option.TakesValue() && !option.IsArgument()) {
    absl::StrAppend(&names, " ", option.value_name());
  }
  return names;
}

// Says what an option is, which values it takes, and what it is without it.
std::string TextOf(const Option& option, bool is_brief) {
  std::string text = Sentence(is_brief ? Brief(option.help()) : option.help());
  if (is_brief) return text;
  if (option.OtherValuesAreErrors()) {
    absl::StrAppend(&text, " One of ", absl::StrJoin(option.values(), ", "),
                    ".");
  }
  if (option.IsRequired() && !option.IsArgument()) {
    absl::StrAppend(&text, " Required.");
  }
  if (!option.DefaultText().empty()) {
    absl::StrAppend(&text, " Default: ", option.DefaultText(), ".");
  }
  if (!option.Environment().empty()) {
    absl::StrAppend(&text, " Environment: ", option.Environment(), ".");
  }
  return text;
}

std::string Usage(absl::string_view path, const Command& command) {
  std::string usage(path);
  std::string arguments;
  for (const Option& option : command.options()) {
    if (option.IsArgument()) {
      const std::string name = absl::AsciiStrToUpper(option.names()[0]);
      absl::StrAppend(&arguments, " ", option.IsRequired() ? "" : "[", name,
                      option.IsRequired() ? "" : "]");
    } else if (option.IsRequired()) {
      absl::StrAppend(&arguments, " ", option.names()[0], " ",
                      option.value_name());
    }
  }
  absl::StrAppend(&usage, arguments, " [OPTION]...");
  if (!command.commands().empty()) absl::StrAppend(&usage, " COMMAND ...");
  return absl::StrCat("Usage: ", Wrapped(usage, 7, 9), "\n");
}

void AppendOptions(absl::string_view title, const Command& command,
                   bool arguments, bool is_brief, std::string* page) {
  std::string entries;
  for (const Option& option : command.options()) {
    if (option.IsArgument() != arguments) continue;
    std::string names = OptionNamesOf(option);
    if (arguments) names = absl::AsciiStrToUpper(names);
    absl::StrAppend(&entries,
                    Entry(names, TextOf(option, is_brief), kOptionColumn));
  }
  if (!entries.empty()) absl::StrAppend(page, "\n", title, ":\n", entries);
}

}  // namespace

absl::string_view Brief(absl::string_view help) {
  for (const char* const end : {"; ", ". "}) {
    help = help.substr(0, help.find(end));
  }
  return absl::StripSuffix(help, ".");
}

std::string HelpPage(const CommandLine& command_line, absl::string_view path,
                     const Command& command) {
  const Command& program = *command_line.program();
  const bool is_program = &command == &program;
  std::string page =
      absl::StrCat(Usage(path, command), "\n",
                   Wrapped(Sentence(command.help()), 0, 0), "\n");
  for (const std::string& note : command.notes()) {
    absl::StrAppend(&page, "\n", Wrapped(note, 0, 0), "\n");
  }
  if (!command.examples().empty()) {
    absl::StrAppend(&page, "\nExamples:\n");
    for (const Example& example : command.examples()) {
      if (!example.what.empty()) {
        absl::StrAppend(&page, "  # ", example.what, "\n");
      }
      absl::StrAppend(
          &page, "  ",
          absl::StrJoin(absl::StrSplit(example.command, '\n'), "\n  "), "\n");
    }
  }
  if (!command.commands().empty()) {
    absl::StrAppend(&page, "\nCommands:\n");
    for (const Command& sub : command.commands()) {
      absl::StrAppend(&page, Entry(sub.name(), Sentence(Brief(sub.help())),
                                   kCommandColumn));
    }
  }
  AppendOptions("Arguments", command, /*arguments=*/true, false, &page);
  AppendOptions("Options", command, /*arguments=*/false, false, &page);
  std::string& rest = page;
  if (is_program) {
    absl::StrAppend(
        &rest,
        Entry("-h, --help",
              "Print this, or the help of a "
              "command.",
              kOptionColumn),
        Entry("    --version", "Print the version.", kOptionColumn));
    absl::StrAppend(&rest, "\nMore, with ", program.name(), " help TOPIC:\n");
    for (const HelpTopic& topic : command_line.topics()) {
      absl::StrAppend(&rest,
                      Entry(topic.name, Sentence(topic.title), kCommandColumn));
    }
    return page;
  }
  AppendOptions("Options of every command", program, false, /*is_brief=*/true,
                &page);
  std::vector<std::string> topics;
  for (const HelpTopic& topic : command_line.topics()) {
    topics.push_back(topic.name);
  }
  absl::StrAppend(&page, "\n",
                  Wrapped(absl::StrCat("More: ", program.name(), " help ",
                                       absl::StrJoin(topics, " | "), ", ",
                                       program.name(), " --help"),
                          0, 6),
                  "\n");
  return page;
}

std::string HelpPage(const HelpTopic& topic) {
  return absl::StrCat(Sentence(topic.title), "\n\n", topic.text);
}

}  // namespace quantd::cli
