#include "client/cli/command_line.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cli/help_page.h"

namespace quantd::cli {
namespace {

std::string Quoted(absl::string_view text) {
  return absl::StrCat("\"", text, "\"");
}

// The numbers that a check lets through, with an error that can be read.
CLI::Validator Above(double min, bool or_equal) {
  return CLI::Validator(
      [min, or_equal](std::string& text) {
        double number = 0;
        if (absl::SimpleAtod(text, &number) &&
            (number > min || (or_equal && number == min))) {
          return std::string();
        }
        return absl::StrCat("expected a number ",
                            or_equal ? "of at least " : "above ", min, ", got ",
                            text);
      },
      "");
}

// A number with one of the units behind it, or none, becomes a number.
CLI::Validator Scaled(std::map<std::string, double> units,
                      const char* expected) {
  return CLI::Validator(
      [units = std::move(units), expected](std::string& text) {
        const size_t end =
            std::min(text.find_first_not_of("0123456789.+-eE"), text.size());
        std::string unit = absl::AsciiStrToLower(
            absl::StripAsciiWhitespace(absl::string_view(text).substr(end)));
        const auto found = units.find(unit);
        double number = 0;
        if (found == units.end() ||
            !absl::SimpleAtod(absl::string_view(text).substr(0, end),
                              &number)) {
          return absl::StrCat("expected ", expected, ", got ", text);
        }
        number *= found->second;
        // Whole numbers without an exponent, for variables that take no other.
        text = number == std::floor(number) && std::abs(number) < 1e15
                   ? absl::StrCat(static_cast<int64_t>(number))
                   : absl::StrFormat("%.17g", number);
        return std::string();
      },
      "");
}

// Letters to insert, remove or replace, and neighbours to swap, to make one
// word the other.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  // [i][j] of the first i and j letters.
  std::vector<std::vector<size_t>> distance(a.size() + 1,
                                            std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) distance[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) distance[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      size_t& least = distance[i][j];
      least = distance[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      least = std::min({least, distance[i - 1][j] + 1, distance[i][j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        least = std::min(least, distance[i - 2][j - 2] + 1);
      }
    }
  }
  return distance[a.size()][b.size()];
}

// The word that is meant, or an empty string where none is near.
std::string Nearest(absl::string_view word,
                    const std::vector<std::string>& known) {
  std::string nearest;
  size_t least = std::max<size_t>(2, word.size() / 4) + 1;
  for (const std::string& name : known) {
    const size_t distance = EditDistance(word, name);
    if (distance < least) {
      least = distance;
      nearest = name;
    }
  }
  return nearest;
}

std::string DidYouMean(absl::string_view word,
                       const std::vector<std::string>& known) {
  const std::string nearest = Nearest(word, known);
  return nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?");
}

// The command that these words lead to; `words` keeps those behind it.
const Command* Find(const Command& program, std::vector<std::string>* words,
                    std::string* path) {
  const Command* command = &program;
  *path = program.name();
  while (!words->empty()) {
    const Command* next = nullptr;
    for (const Command& sub : command->commands()) {
      if (sub.name() == words->front()) next = &sub;
    }
    if (next == nullptr) break;
    command = next;
    absl::StrAppend(path, " ", next->name());
    words->erase(words->begin());
  }
  return command;
}

// The command that was parsed.
const Command* Parsed(const CLI::App* app, const Command& program,
                      std::string* path) {
  std::vector<std::string> words;
  while (!app->get_subcommands().empty()) {
    app = app->get_subcommands().back();
    words.push_back(app->get_name());
  }
  return Find(program, &words, path);
}

std::vector<std::string> OptionNames(const Command& program,
                                     const Command& command) {
  std::vector<std::string> names = {"--help", "--version"};
  for (const Command* const one : {&command, &program}) {
    for (const Option& option : one->options()) {
      if (option.IsArgument()) continue;
      names.insert(names.end(), option.names().begin(), option.names().end());
    }
  }
  return names;
}

// The message of the library, in our words.
std::string Reworded(const CLI::Error& error) {
  const std::string text = error.what();
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "Could not convert: ")) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(rest, absl::MaxSplits(" = ", 1));
    return absl::StrCat(parts.first, ": expected a number, got ", parts.second);
  }
  const size_t missing = rest.find(": 1 required ");
  if (missing != absl::string_view::npos) {
    return absl::StrCat(rest.substr(0, missing), ": expected a value");
  }
  const size_t needs = rest.find(" requires ");
  if (needs != absl::string_view::npos) {
    return absl::StrCat(rest.substr(0, needs), " is to be given with ",
                        rest.substr(needs + 10));
  }
  const size_t excludes = rest.find(" excludes ");
  if (excludes != absl::string_view::npos) {
    return absl::StrCat("expected ", rest.substr(0, excludes), " or ",
                        rest.substr(excludes + 10), ", got both");
  }
  return text;
}

// Says what is wrong with a command line, and what to do about it.
std::string FailureMessage(const CLI::App* app, const Command& program,
                           const CLI::Error& error) {
  std::string path;
  const Command& command = *Parsed(app, program, &path);
  std::string what = Reworded(error);
  const std::vector<std::string> rest = app->remaining(/*recurse=*/true);
  const auto option =
      std::find_if(rest.begin(), rest.end(), [](const std::string& word) {
        return word.size() > 1 && word[0] == '-';
      });
  const std::vector<std::string> known = CommandNames(command);
  if (option != rest.end()) {
    const std::string name = option->substr(0, option->find('='));
    what = absl::StrCat("there is no option ", name,
                        DidYouMean(name, OptionNames(program, command)));
  } else if (!known.empty() && !rest.empty()) {
    what = absl::StrCat("there is no command ", Quoted(rest[0]),
                        DidYouMean(rest[0], known));
  } else if (!known.empty()) {
    what = absl::StrCat("a command is required: ", absl::StrJoin(known, ", "));
  } else if (!rest.empty()) {
    what = absl::StrCat("there is one argument too many: ", Quoted(rest[0]));
  }
  return absl::StrCat(program.name(), ": ", what, "\nRun ", path,
                      " --help for more information.\n");
}

}  // namespace

std::vector<std::string> CommandNames(const Command& command) {
  std::vector<std::string> names;
  for (const Command& sub : command.commands()) names.push_back(sub.name());
  return names;
}

Option::Option(CLI::Option* option, absl::string_view names,
               std::string value_name, std::string help)
    : option_(option),
      value_name_(std::move(value_name)),
      help_(std::move(help)) {
  for (absl::string_view name : absl::StrSplit(names, ',')) {
    absl::ConsumePrefix(&name, "!");
    names_.emplace_back(name);
  }
  if (!value_name_.empty()) option_->type_name(value_name_);
}

Option* Option::Required() {
  option_->required();
  return this;
}

Option* Option::ShowDefault() {
  option_->capture_default_str();
  return this;
}

Option* Option::FromEnvironment(const char* variable) {
  option_->envname(variable);
  return this;
}

Option* Option::NotNegative() {
  option_->check(Above(0, /*or_equal=*/true));
  return this;
}

Option* Option::Positive() {
  option_->check(Above(0, /*or_equal=*/false));
  return this;
}

Option* Option::Between(int64_t min, int64_t max) {
  option_->check(CLI::Validator(
      [min, max](std::string& text) {
        double number = 0;
        if (absl::SimpleAtod(text, &number) &&
            number >= static_cast<double>(min) &&
            number <= static_cast<double>(max)) {
          return std::string();
        }
        return absl::StrCat("expected a number from ", min, " to ", max,
                            ", got ", text);
      },
      ""));
  return this;
}

Option* Option::OneOf(std::vector<std::string> values) {
  option_->check(CLI::Validator(
      [values](std::string& text) {
        if (std::find(values.begin(), values.end(), text) != values.end()) {
          return std::string();
        }
        return absl::StrCat("expected ", absl::StrJoin(values, " or "),
                            ", got ", text, DidYouMean(text, values));
      },
      ""));
  values_ = std::move(values);
  other_values_are_errors_ = true;
  return this;
}

Option* Option::Suggest(std::vector<std::string> values) {
  values_ = std::move(values);
  return this;
}

Option* Option::Seconds() {
  option_->transform(Scaled(
      {{"", 1}, {"ms", 1e-3}, {"s", 1}, {"m", 60}, {"min", 60}, {"h", 3600}},
      "a time such as 500ms, 30s or 5m"));
  return this;
}

Option* Option::Bytes() {
  std::map<std::string, double> units = {{"", 1}, {"b", 1}};
  double unit = 1;
  for (const char* const prefix : {"k", "m", "g", "t"}) {
    unit *= 1024;
    for (const char* const suffix : {"", "b", "ib"}) {
      units[absl::StrCat(prefix, suffix)] = unit;
    }
  }
  option_->transform(
      Scaled(std::move(units), "a size such as 4096, 256KiB or 4MiB"));
  return this;
}

Option* Option::Needs(Option* other) {
  option_->needs(other->option_);
  return this;
}

Option* Option::Excludes(Option* other) {
  option_->excludes(other->option_);
  return this;
}

bool Option::IsGiven() const { return option_->count() > 0; }

bool Option::IsRequired() const { return option_->get_required(); }

bool Option::TakesValue() const { return option_->get_expected_min() > 0; }

bool Option::TakesFile() const { return absl::StartsWith(value_name_, "FILE"); }

bool Option::MayBeRepeated() const {
  return TakesValue() && option_->get_expected_max() > 1;
}

std::string Option::value_name() const {
  return value_name_.empty() ? "VALUE" : value_name_;
}

std::string Option::DefaultText() const { return option_->get_default_str(); }

std::string Option::Environment() const { return option_->get_envname(); }

Command::Command(CLI::App* app, std::string name, std::string help)
    : app_(app), name_(std::move(name)), help_(std::move(help)) {}

Command::~Command() = default;

Command* Command::AddCommand(const char* name, const char* help) {
  app_->require_subcommand(1);
  return &commands_.emplace_back(app_->add_subcommand(name, help), name, help);
}

template <typename T>
Option* Command::AddOption(const char* names, T* value, const char* value_name,
                           const char* help) {
  return Add(app_->add_option(names, *value, help), names, value_name, help);
}

// One value each time, so that an argument may follow.
template <typename T>
Option* Command::AddOption(const char* names, std::vector<T>* value,
                           const char* value_name, const char* help) {
  return Add(app_->add_option(names, *value, help)->allow_extra_args(false),
             names, value_name, help);
}

template Option* Command::AddOption(const char*, std::vector<std::string>*,
                                    const char*, const char*);
template Option* Command::AddOption(const char*, std::vector<uint64_t>*,
                                    const char*, const char*);
template Option* Command::AddOption(const char*, std::vector<double>*,
                                    const char*, const char*);

template Option* Command::AddOption(const char*, std::string*, const char*,
                                    const char*);
template Option* Command::AddOption(const char*, int*, const char*,
                                    const char*);
template Option* Command::AddOption(const char*, int64_t*, const char*,
                                    const char*);
template Option* Command::AddOption(const char*, uint32_t*, const char*,
                                    const char*);
template Option* Command::AddOption(const char*, uint64_t*, const char*,
                                    const char*);
template Option* Command::AddOption(const char*, double*, const char*,
                                    const char*);
template Option* Command::AddOption(const char*, std::optional<int>*,
                                    const char*, const char*);
template Option* Command::AddOption(const char*, std::optional<uint64_t>*,
                                    const char*, const char*);
template Option* Command::AddOption(const char*, std::optional<double>*,
                                    const char*, const char*);

Option* Command::AddArgument(const char* name, std::string* value,
                             const char* value_name, const char* help) {
  return AddOption(name, value, value_name, help);
}

Option* Command::AddFlag(const char* names, bool* value, const char* help) {
  return Add(app_->add_flag(names, *value, help), names, "", help);
}

void Command::AddExample(std::string command, std::string what) {
  examples_.push_back({std::move(command), std::move(what)});
}

void Command::AddNote(std::string text) { notes_.push_back(std::move(text)); }

void Command::OnRun(std::function<void()> run) {
  app_->callback(std::move(run));
}

Option* Command::Add(CLI::Option* option, const char* names,
                     const char* value_name, const char* help) {
  return &options_.emplace_back(option, names, value_name, help);
}

CommandLine::CommandLine(const char* name, const char* help,
                         const char* version, std::vector<HelpTopic> topics)
    : version_(version),
      topics_(std::move(topics)),
      app_(std::make_unique<CLI::App>(help, name)),
      program_(std::make_unique<Command>(app_.get(), name, help)) {
  app_->set_version_flag("--version", version);
  app_->fallthrough();
}

CommandLine::~CommandLine() = default;

std::string CommandLine::Help(const std::vector<std::string>& words,
                              std::string* error) const {
  if (words.size() == 1) {
    for (const HelpTopic& topic : topics_) {
      if (topic.name == words[0]) return HelpPage(topic);
    }
  }
  std::vector<std::string> rest = words;
  std::string path;
  const Command* const command = Find(*program_, &rest, &path);
  if (rest.empty()) return HelpPage(*this, path, *command);
  std::vector<std::string> known = CommandNames(*command);
  if (command == program_.get()) {
    for (const HelpTopic& topic : topics_) known.push_back(topic.name);
  }
  *error = absl::StrCat("there is no help about ", Quoted(rest[0]),
                        DidYouMean(rest[0], known));
  return "";
}

CommandLine::Outcome CommandLine::Run(std::vector<std::string> words) {
  // The parser would take the next word for the value of "--name=".
  std::vector<std::string> parsed;
  for (std::string& word : words) {
    const bool is_empty =
        absl::StartsWith(word, "--") && word.find('=') == word.size() - 1;
    if (is_empty) word.pop_back();
    parsed.push_back(std::move(word));
    if (is_empty) parsed.emplace_back();
  }
  // It wants the last one first.
  std::reverse(parsed.begin(), parsed.end());
  // CLI11 reports by exception; none leaves this function.
  try {
    app_->parse(std::move(parsed));
    return Outcome::kRan;
  } catch (const CLI::CallForHelp&) {
    std::string path;
    const Command* const command = Parsed(app_.get(), *program_, &path);
    std::fputs(HelpPage(*this, path, *command).c_str(), stdout);
    return Outcome::kHelped;
  } catch (const CLI::CallForVersion&) {
    std::printf("%s\n", version_.c_str());
    return Outcome::kHelped;
  } catch (const CLI::ParseError& error) {
    std::fputs(FailureMessage(app_.get(), *program_, error).c_str(), stderr);
    return Outcome::kWrong;
  }
}

}  // namespace quantd::cli
