#include "client/cli/completion.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cli/command_line.h"
#include "client/cli/help_page.h"

namespace quantd::cli {
namespace {

constexpr char kHelpNames[] = "-h --help";

// A command and how it is called: "quantctl encodings list".
struct CompletionPlace {
  std::string path;
  const Command* command;
  // Null for the program.
  const Command* parent;
};

void AddPlaces(const std::string& path, const Command& command,
               const Command* parent, std::vector<CompletionPlace>* places) {
  places->push_back({path, &command, parent});
  for (const Command& sub : command.commands()) {
    AddPlaces(absl::StrCat(path, " ", sub.name()), sub, &command, places);
  }
}

// The program first.
std::vector<CompletionPlace> AllPlaces(const Command& program) {
  std::vector<CompletionPlace> places;
  AddPlaces(program.name(), program, nullptr, &places);
  return places;
}

bool TakesFileArgument(const Command& command) {
  return std::any_of(command.options().begin(), command.options().end(),
                     [](const Option& option) {
                       return option.IsArgument() && option.TakesFile();
                     });
}

std::string SingleQuoted(absl::string_view text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"'", "'\\''"}}), "'");
}

// Names of the options of a command that begin with a dash.
std::vector<std::string> DashedNames(const Command& command) {
  std::vector<std::string> names;
  for (const Option& option : command.options()) {
    if (option.IsArgument()) continue;
    names.insert(names.end(), option.names().begin(), option.names().end());
  }
  return names;
}

// Patterns of a `case` over "PATH OPTION": an option of the program has its
// meaning behind every command.
std::string BashPatterns(const CompletionPlace& place, const Option& option) {
  return absl::StrJoin(
      option.names(), "|", [&](std::string* out, const std::string& name) {
        if (place.parent == nullptr) {
          absl::StrAppend(out, "*\" ", name, "\"");
        } else {
          absl::StrAppend(out, "\"", place.path, " ", name, "\"");
        }
      });
}

std::string BashCase(absl::string_view patterns, absl::string_view action) {
  return absl::StrCat("      ", patterns, ") ", action, " ;;\n");
}

// Escapes what stands in brackets or behind a colon in a specification.
std::string ZshEscaped(absl::string_view text) {
  return absl::StrReplaceAll(
      text, {{"\\", "\\\\"}, {"[", "\\["}, {"]", "\\]"}, {":", "\\:"}});
}

std::string ZshFunction(absl::string_view path) {
  return absl::StrCat("_", absl::StrReplaceAll(path, {{" ", "_"}, {"-", "_"}}));
}

// How _arguments completes the value: ":NAME:ACTION".
std::string ZshValue(const Option& option) {
  std::string action = " ";
  if (!option.values().empty()) {
    action = absl::StrCat("(", absl::StrJoin(option.values(), " "), ")");
  } else if (option.TakesFile()) {
    action = "_files";
  }
  return absl::StrCat(":", ZshEscaped(option.value_name()), ":",
                      ZshEscaped(action));
}

std::vector<std::string> ZshSpecifications(const Command& command) {
  std::vector<std::string> result;
  int position = 0;
  for (const Option& option : command.options()) {
    if (option.IsArgument()) {
      result.push_back(
          SingleQuoted(absl::StrCat(++position, ZshValue(option))));
      continue;
    }
    for (const std::string& name : option.names()) {
      result.push_back(SingleQuoted(absl::StrCat(
          option.MayBeRepeated()
              ? "*"
              : absl::StrCat("(", absl::StrJoin(option.names(), " "), ")"),
          name, option.TakesValue() && absl::StartsWith(name, "--") ? "=" : "",
          "[", ZshEscaped(Brief(option.help())), "]",
          option.TakesValue() ? ZshValue(option) : "")));
    }
  }
  result.push_back("'(- *)'{-h,--help}'[Print help]'");
  return result;
}

// The condition under which the shell is behind this command.
std::string FishCondition(const CompletionPlace& place) {
  std::vector<std::string> parts;
  const std::vector<std::string> words = absl::StrSplit(place.path, ' ');
  for (size_t i = 1; i < words.size(); ++i) {
    parts.push_back(absl::StrCat("__fish_seen_subcommand_from ", words[i]));
  }
  return absl::StrJoin(parts, "; and ");
}

}  // namespace

std::string BashCompletion(const Command& program) {
  const std::string& name = program.name();
  std::string commands;
  std::string takes_value;
  std::string values;
  std::string options;
  std::string words;
  for (const CompletionPlace& place : AllPlaces(program)) {
    const std::string quoted = absl::StrCat("\"", place.path, "\"");
    if (place.parent != nullptr) {
      absl::StrAppend(&commands, commands.empty() ? "" : "|", quoted);
    }
    for (const Option& option : place.command->options()) {
      if (option.IsArgument() || !option.TakesValue()) continue;
      const std::string patterns = BashPatterns(place, option);
      absl::StrAppend(&takes_value, BashCase(patterns, "option=$word"));
      if (!option.values().empty()) {
        absl::StrAppend(
            &values,
            BashCase(patterns,
                     absl::StrCat("words=\"",
                                  absl::StrJoin(option.values(), " "), "\"")));
      } else if (option.TakesFile()) {
        absl::StrAppend(&values, BashCase(patterns, "files=1"));
      }
    }
    absl::StrAppend(
        &options,
        BashCase(
            quoted,
            absl::StrCat("words=\"",
                         absl::StrJoin(DashedNames(*place.command), " "),
                         place.parent == nullptr ? " --version" : "", "\"")));
    if (!place.command->commands().empty()) {
      absl::StrAppend(
          &words,
          BashCase(quoted, absl::StrCat(
                               "words=\"",
                               absl::StrJoin(CommandNames(*place.command), " "),
                               "\"")));
    } else if (TakesFileArgument(*place.command)) {
      absl::StrAppend(&words, BashCase(quoted, "files=1"));
    } else {
      for (const Option& option : place.command->options()) {
        if (!option.IsArgument() || option.values().empty()) continue;
        absl::StrAppend(
            &words,
            BashCase(quoted,
                     absl::StrCat("words=\"",
                                  absl::StrJoin(option.values(), " "), "\"")));
      }
    }
  }
  return absl::StrCat(
      "# Completes ", name, " in bash; written by: ", name,
      " completion bash\n", ZshFunction(name), "() {\n",
      "  local current=${COMP_WORDS[COMP_CWORD]} command=", name,
      " option= words= files= word i\n"
      "  # The command, and the option whose value comes next; bash makes the\n"
      "  # equals sign between them a word.\n"
      "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
      "    word=${COMP_WORDS[i]}\n"
      "    if [[ -n $option ]]; then\n"
      "      [[ $word == = ]] || option=\n"
      "      continue\n"
      "    fi\n"
      "    case \"$command $word\" in\n",
      BashCase(commands, "command+=\" $word\""), takes_value,
      "    esac\n"
      "  done\n"
      "  [[ $current == = ]] && current=\n"
      "  if [[ -n $option ]]; then\n"
      "    case \"$command $option\" in\n",
      values,
      "    esac\n"
      "  elif [[ $current == -* ]]; then\n"
      "    case \"$command\" in\n",
      options,
      "    esac\n"
      "    words+=\" ",
      absl::StrJoin(DashedNames(program), " "), " ", kHelpNames,
      "\"\n"
      "  else\n"
      "    case \"$command\" in\n",
      words,
      "    esac\n"
      "  fi\n"
      "  if [[ -n $files ]]; then\n"
      "    compopt -o filenames 2> /dev/null\n"
      "    mapfile -t COMPREPLY < <(compgen -f -- \"$current\")\n"
      "  else\n"
      "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$current\")\n"
      "  fi\n"
      "}\n"
      "complete -F ",
      ZshFunction(name), " ", name, "\n");
}

std::string ZshCompletion(const Command& program) {
  const std::string& name = program.name();
  const std::string main_function = ZshFunction(name);
  const std::string globals = absl::StrCat(main_function, "_global_options");
  std::string script = absl::StrCat(
      "#compdef ", name, "\n# Completes ", name, " in zsh; written by: ", name,
      " completion zsh\n", "typeset -ga ", globals, "\n", globals, "=(\n  ",
      absl::StrJoin(ZshSpecifications(program), "\n  "), "\n)\n");
  for (const CompletionPlace& place : AllPlaces(program)) {
    const std::string function = ZshFunction(place.path);
    std::vector<std::string> specifications;
    if (place.parent != nullptr) {
      specifications = ZshSpecifications(*place.command);
    }
    specifications.push_back(absl::StrCat("\"${", globals, "[@]}\""));
    if (place.command->commands().empty()) {
      absl::StrAppend(&script, function, "() {\n  _arguments -s \\\n    ",
                      absl::StrJoin(specifications, " \\\n    "), "\n}\n");
      continue;
    }
    std::vector<std::string> names;
    std::string cases;
    for (const Command& sub : place.command->commands()) {
      names.push_back(SingleQuoted(
          absl::StrCat(sub.name(), ":", ZshEscaped(Brief(sub.help())))));
      absl::StrAppend(&cases, "      ", sub.name(), ") ",
                      ZshFunction(absl::StrCat(place.path, " ", sub.name())),
                      " ;;\n");
    }
    absl::StrAppend(
        &script, function,
        "_commands() {\n  local -a commands\n  commands=(\n    ",
        absl::StrJoin(names, "\n    "),
        "\n  )\n  _describe -t commands command commands\n}\n", function,
        "() {\n  local curcontext=$curcontext state line\n  _arguments -s -C "
        "\\\n    ",
        absl::StrJoin(specifications, " \\\n    "),
        " \\\n    '1:command:", function,
        "_commands' \\\n    '*::argument:->argument'\n"
        "  if [[ $state == argument ]]; then\n    case $line[1] in\n",
        cases, "    esac\n  fi\n}\n");
  }
  // The first when zsh loads the file by its name, else it was sourced.
  absl::StrAppend(&script, "if [[ $funcstack[1] == ", main_function,
                  " ]]; then\n  ", main_function, " \"$@\"\nelse\n  compdef ",
                  main_function, " ", name, "\nfi\n");
  return script;
}

std::string FishCompletion(const Command& program) {
  const std::string& name = program.name();
  std::string script =
      absl::StrCat("# Completes ", name, " in fish; written by: ", name,
                   " completion fish\ncomplete -c ", name, " -f\n");
  for (const CompletionPlace& place : AllPlaces(program)) {
    const std::string condition = FishCondition(place);
    std::string begin = absl::StrCat("complete -c ", name);
    if (!condition.empty()) {
      absl::StrAppend(&begin, " -n ", SingleQuoted(condition));
    }
    for (const Option& option : place.command->options()) {
      std::string value;
      if (!option.values().empty()) {
        value = absl::StrCat(" -x -a ",
                             SingleQuoted(absl::StrJoin(option.values(), " ")));
      } else if (option.TakesFile()) {
        value = " -r -F";
      } else if (option.TakesValue()) {
        value = " -x";
      }
      std::string names;
      for (absl::string_view text : option.names()) {
        if (absl::ConsumePrefix(&text, "--")) {
          absl::StrAppend(&names, " -l ", text);
        } else if (absl::ConsumePrefix(&text, "-")) {
          absl::StrAppend(&names, " -s ", text);
        }
      }
      // An argument without anything to offer.
      if (names.empty() && value == " -x") continue;
      absl::StrAppend(&script, begin, names, value, " -d ",
                      SingleQuoted(Brief(option.help())), "\n");
    }
    const std::vector<std::string> subs = CommandNames(*place.command);
    const std::string none = absl::StrCat(
        condition, condition.empty() ? "" : "; and ",
        "not __fish_seen_subcommand_from ", absl::StrJoin(subs, " "));
    for (const Command& sub : place.command->commands()) {
      absl::StrAppend(&script, "complete -c ", name, " -n ", SingleQuoted(none),
                      " -a ", sub.name(), " -d ",
                      SingleQuoted(Brief(sub.help())), "\n");
    }
  }
  absl::StrAppend(&script, "complete -c ", name,
                  " -s h -l help -d 'Print help'\n");
  return script;
}

}  // namespace quantd::cli
