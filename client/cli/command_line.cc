#include "client/cli/command_line.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace quantd::cli {
namespace {

// The numbers that a check lets through, with an error that can be read.
CLI::Validator Above(double min, bool or_equal, const char* description) {
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
      description);
}

// Letters to insert, remove or replace to make one word the other.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

// What is wrong with a command line, and what to do about it.
std::string FailureMessage(const CLI::App* app, const CLI::Error& error) {
  const CLI::App* command = app;
  std::string path = app->get_name();
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().back();
    absl::StrAppend(&path, " ", command->get_name());
  }
  std::string what = error.what();
  const std::vector<std::string> rest = app->remaining(/*recurse=*/true);
  const auto is_named = [](const CLI::App* sub) {
    return !sub->get_name().empty();
  };
  const std::vector<const CLI::App*> known = command->get_subcommands(is_named);
  if (!known.empty() && !rest.empty() && rest[0][0] != '-') {
    what = absl::StrCat("there is no command \"", rest[0], "\"");
    const CLI::App* const nearest = *std::min_element(
        known.begin(), known.end(), [&](const CLI::App* a, const CLI::App* b) {
          return EditDistance(rest[0], a->get_name()) <
                 EditDistance(rest[0], b->get_name());
        });
    if (EditDistance(rest[0], nearest->get_name()) <= 2) {
      absl::StrAppend(&what, "; did you mean ", nearest->get_name(), "?");
    }
  } else if (!known.empty() && rest.empty()) {
    what = "a command is required";
  }
  return absl::StrCat(app->get_name(), ": ", what, "\nRun ", path,
                      " --help for more information.\n");
}

}  // namespace

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
  option_->check(Above(0, /*or_equal=*/true, "NONNEGATIVE"));
  return this;
}

Option* Option::Positive() {
  option_->check(Above(0, /*or_equal=*/false, "POSITIVE"));
  return this;
}

Option* Option::Between(int64_t min, int64_t max) {
  option_->check(CLI::Range(min, max));
  return this;
}

Option* Option::OneOf(std::vector<std::string> values) {
  option_->check(CLI::IsMember(values));
  values_ = std::move(values);
  other_values_are_errors_ = true;
  return this;
}

Option* Option::Suggest(std::vector<std::string> values) {
  values_ = std::move(values);
  return this;
}

Option* Option::Seconds() {
  option_->transform(CLI::AsNumberWithUnit(
      std::map<std::string, double>{{"ms", 1e-3}, {"s", 1}, {"m", 60}},
      CLI::AsNumberWithUnit::CASE_SENSITIVE, "SECONDS"));
  return this;
}

Option* Option::Bytes() {
  option_->transform(CLI::AsSizeValue(/*kb_is_1000=*/false));
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

template <>
Option* Command::AddOption(const char* names, std::vector<std::string>* value,
                           const char* value_name, const char* help) {
  // One value each time, so that an argument may follow.
  return Add(app_->add_option(names, *value, help)->allow_extra_args(false),
             names, value_name, help);
}

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

void Command::AddAlternatives(const char* title,
                              const std::vector<Option*>& options) {
  CLI::Option_group* const group = app_->add_option_group(title);
  for (const Option* const option : options) group->add_option(option->option_);
  group->require_option(0, 1);
}

void Command::OnRun(std::function<void()> run) {
  app_->callback(std::move(run));
}

Option* Command::Add(CLI::Option* option, const char* names,
                     const char* value_name, const char* help) {
  return &options_.emplace_back(option, names, value_name, help);
}

CommandLine::CommandLine(const char* name, const char* help,
                         const char* version, const char* footer)
    : version_(version),
      footer_(footer),
      app_(std::make_unique<CLI::App>(help, name)),
      program_(std::make_unique<Command>(app_.get(), name, help)) {
  app_->set_version_flag("--version", version);
  app_->footer(footer);
  app_->fallthrough();
  app_->failure_message(&FailureMessage);
}

CommandLine::~CommandLine() = default;

CommandLine::Outcome CommandLine::Run(int argc, const char* const* argv) {
  // CLI11 reports by exception; none leaves this function.
  try {
    app_->parse(argc, argv);
    return Outcome::kRan;
  } catch (const CLI::ParseError& error) {
    return app_->exit(error) == 0 ? Outcome::kHelped : Outcome::kWrong;
  }
}

}  // namespace quantd::cli
