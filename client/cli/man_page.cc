#include "client/cli/man_page.h"

#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cli/command_line.h"

namespace quantd::cli {
namespace {

// Text that means only itself.
std::string Escaped(absl::string_view text) {
  std::string escaped = absl::StrReplaceAll(
      text, {{"\\", "\\e"}, {"-", "\\-"}, {"'", "\\(aq"}, {"`", "\\(ga"}});
  if (absl::StartsWith(escaped, ".")) escaped.insert(0, "\\&");
  return escaped;
}

std::string Bold(absl::string_view text) {
  return absl::StrCat("\\fB", Escaped(text), "\\fR");
}

std::string Italic(absl::string_view text) {
  return absl::StrCat("\\fI", Escaped(text), "\\fR");
}

std::string SynopsisOf(absl::string_view path, const Command& command) {
  std::string synopsis =
      absl::StrCat(Bold(path), " [", Italic("OPTION"), "]...");
  for (const Option& option : command.options()) {
    if (option.IsArgument()) {
      absl::StrAppend(&synopsis, " ", option.IsRequired() ? "" : "[",
                      Italic(option.names()[0]),
                      option.IsRequired() ? "" : "]");
    } else if (option.IsRequired()) {
      absl::StrAppend(&synopsis, " ", Bold(option.names().back()), " ",
                      Italic(option.value_name()));
    }
  }
  if (!command.commands().empty()) {
    absl::StrAppend(&synopsis, " ", Italic("COMMAND"), " ...");
  }
  return absl::StrCat(synopsis, "\n");
}

std::string OptionEntry(const Option& option) {
  std::string entry = ".TP\n";
  if (option.IsArgument()) {
    absl::StrAppend(&entry, Italic(option.names()[0]));
  } else {
    absl::StrAppend(
        &entry, absl::StrJoin(option.names(), ", ",
                              [](std::string* out, const std::string& name) {
                                absl::StrAppend(out, Bold(name));
                              }));
    if (option.TakesValue()) {
      absl::StrAppend(&entry, " ", Italic(option.value_name()));
    }
  }
  absl::StrAppend(&entry, "\n", Escaped(option.help()), ".\n");
  if (option.OtherValuesAreErrors()) {
    absl::StrAppend(&entry, "One of ",
                    Escaped(absl::StrJoin(option.values(), ", ")), ".\n");
  }
  if (!option.DefaultText().empty()) {
    absl::StrAppend(&entry, "Default: ", Escaped(option.DefaultText()), ".\n");
  }
  if (!option.Environment().empty()) {
    absl::StrAppend(&entry, "Environment: ", Bold(option.Environment()), ".\n");
  }
  return entry;
}

void AppendCommand(const std::string& path, const Command& command,
                   std::string* page) {
  absl::StrAppend(page, ".SS ", Escaped(path), "\n", SynopsisOf(path, command),
                  ".PP\n", Escaped(command.help()), ".\n");
  for (const std::string& note : command.notes()) {
    absl::StrAppend(page, ".PP\n", Escaped(note), "\n");
  }
  if (!command.examples().empty()) {
    absl::StrAppend(page, ".PP\nExamples:\n.PP\n.nf\n");
    for (const Example& example : command.examples()) {
      if (!example.what.empty()) {
        absl::StrAppend(page, "  # ", Escaped(example.what), "\n");
      }
      for (const absl::string_view line :
           absl::StrSplit(example.command, '\n')) {
        absl::StrAppend(page, "  ", Escaped(line), "\n");
      }
    }
    absl::StrAppend(page, ".fi\n");
  }
  for (const Option& option : command.options()) {
    absl::StrAppend(page, OptionEntry(option));
  }
  for (const Command& sub : command.commands()) {
    AppendCommand(absl::StrCat(path, " ", sub.name()), sub, page);
  }
}

}  // namespace

std::string ManPage(const CommandLine& command_line) {
  const Command& program = *command_line.program();
  const std::string& name = program.name();
  std::string page = absl::StrCat(
      ".TH ", absl::AsciiStrToUpper(name), " 1 \"\" \"",
      Escaped(command_line.version()), "\" \"User Commands\"\n.SH NAME\n",
      Escaped(name), " \\- ", Escaped(absl::StripSuffix(program.help(), ".")),
      "\n.SH SYNOPSIS\n", SynopsisOf(name, program),
      ".SH OPTIONS\nThey may also stand behind the ", "command.\n");
  for (const Option& option : program.options()) {
    absl::StrAppend(&page, OptionEntry(option));
  }
  absl::StrAppend(&page, ".TP\n", Bold("-h"), ", ", Bold("--help"),
                  "\nPrint help, also of a command.\n.TP\n", Bold("--version"),
                  "\nPrint the version.\n.SH COMMANDS\n");
  for (const Command& command : program.commands()) {
    AppendCommand(absl::StrCat(name, " ", command.name()), command, &page);
  }
  for (const HelpTopic& topic : command_line.topics()) {
    absl::StrAppend(&page, ".SH ", Escaped(absl::AsciiStrToUpper(topic.title)),
                    "\n.nf\n");
    for (const absl::string_view line :
         absl::StrSplit(absl::StripSuffix(topic.text, "\n"), '\n')) {
      absl::StrAppend(&page, line.empty() ? "\\&" : Escaped(line), "\n");
    }
    absl::StrAppend(&page, ".fi\n");
  }
  return page;
}

}  // namespace quantd::cli
