// The command line: a tree of commands and what they take. It hides the library
// that parses it, which would be compiled into every command.

#ifndef QUANTD_CLIENT_CLI_COMMAND_LINE_H_
#define QUANTD_CLIENT_CLI_COMMAND_LINE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace quantd::cli {

// An option, a flag, or an argument that has its meaning by its position. All
// calls but the queries say more about it and return it. Not thread-safe.
class Option {
 public:
  // `names` as in Command::AddOption.
  Option(CLI::Option* option, absl::string_view names, std::string value_name,
         std::string help);

  // There is no going without it.
  Option* Required();
  // The help shows what the variable has now.
  Option* ShowDefault();
  // The variable of the environment counts where the option is not given.
  Option* FromEnvironment(const char* variable);
  Option* NotNegative();
  Option* Positive();
  Option* Between(int64_t min, int64_t max);
  // Other values are errors.
  Option* OneOf(std::vector<std::string> values);
  // Values that completion offers, among all that the option takes.
  Option* Suggest(std::vector<std::string> values);
  // Seconds, also as 200ms, 30s or 5m.
  Option* Seconds();
  // Bytes, also as 256KiB or 4m.
  Option* Bytes();
  Option* Needs(Option* other);
  Option* Excludes(Option* other);

  // True if the command line or the environment has it.
  bool IsGiven() const;

  // "-n", "--name"; of an argument its name.
  const std::vector<std::string>& names() const { return names_; }
  bool IsArgument() const { return names_[0][0] != '-'; }
  bool IsRequired() const;
  // False for a flag.
  bool TakesValue() const;
  bool TakesFile() const;
  bool MayBeRepeated() const;
  // "VALUE" where it has no name.
  std::string value_name() const;
  const std::string& help() const { return help_; }
  // The only values, or those to offer; may be empty.
  const std::vector<std::string>& values() const { return values_; }
  bool OtherValuesAreErrors() const { return other_values_are_errors_; }
  // The default that ShowDefault shows; may be empty.
  std::string DefaultText() const;
  // The variable of the environment; may be empty.
  std::string Environment() const;

 private:
  friend class Command;

  CLI::Option* option_;
  std::vector<std::string> names_;
  std::string value_name_;
  std::string help_;
  std::vector<std::string> values_;
  bool other_values_are_errors_ = false;
};

// A command line to try. Plain value.
struct Example {
  // Several lines where one would be wider than 78 columns.
  std::string command;
  // A short line about it, may be empty.
  std::string what;
};

// A text that `help NAME` shows. Plain value.
struct HelpTopic {
  std::string name;
  std::string title;
  // Lines of at most 80 columns; those that begin with two spaces are shown as
  // they are.
  std::string text;
};

// A command, or a group of commands. Not thread-safe.
class Command {
 public:
  Command(CLI::App* app, std::string name, std::string help);
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  // Adds a command below this one, of which one must then be given.
  Command* AddCommand(const char* name, const char* help);
  // `names` is "--name" or "-n,--name". `value` receives the value and must
  // outlive the command; a vector receives that of each time that the option
  // is given. `value_name` stands for the value in the help; one that begins
  // with FILE says that files and folders are meant. Empty for OneOf.
  // T: std::string, int, int64_t, uint32_t, uint64_t, double, std::optional of
  // int, uint64_t or double; below std::string, uint64_t or double.
  template <typename T>
  Option* AddOption(const char* names, T* value, const char* value_name,
                    const char* help);
  template <typename T>
  Option* AddOption(const char* names, std::vector<T>* value,
                    const char* value_name, const char* help);
  // AddOption for an argument that has its meaning by its position.
  Option* AddArgument(const char* name, std::string* value,
                      const char* value_name, const char* help);
  // "--name" sets `value`; in "--name,!--no-name" the second clears it.
  Option* AddFlag(const char* names, bool* value, const char* help);
  // Shown in the help and the manual page; the order is that of the calls.
  void AddExample(std::string command, std::string what = "");
  // A paragraph below what the command is for.
  void AddNote(std::string text);
  // Sets what the command does once its options have their values.
  void OnRun(std::function<void()> run);

  const std::string& name() const { return name_; }
  const std::string& help() const { return help_; }
  const std::vector<Example>& examples() const { return examples_; }
  const std::vector<std::string>& notes() const { return notes_; }
  // In the order in which they were added.
  const std::deque<Option>& options() const { return options_; }
  const std::deque<Command>& commands() const { return commands_; }

 private:
  Option* Add(CLI::Option* option, const char* names, const char* value_name,
              const char* help);

  CLI::App* app_;
  std::string name_;
  std::string help_;
  std::vector<Example> examples_;
  std::vector<std::string> notes_;
  // Their addresses are stable.
  std::deque<Option> options_;
  std::deque<Command> commands_;
};

// Names of the commands below `command`.
std::vector<std::string> CommandNames(const Command& command);

// The whole command line of a program. Not thread-safe.
class CommandLine {
 public:
  enum class Outcome {
    // The command ran.
    kRan,
    // The help or the version was asked for and is on stdout.
    kHelped,
    // A message on stderr says what is wrong.
    kWrong,
  };

  // `version` is what --version prints.
  CommandLine(const char* name, const char* help, const char* version,
              std::vector<HelpTopic> topics);
  ~CommandLine();

  // The program as a command: its own options belong to it; they may also stand
  // behind the command.
  Command* program() { return program_.get(); }
  const Command* program() const { return program_.get(); }
  const std::string& version() const { return version_; }
  const std::vector<HelpTopic>& topics() const { return topics_; }

  // The text of `help WORD...`: about a topic, a command, or without a word
  // the program. For other words nothing, and `error` tells which word is not
  // known.
  std::string Help(const std::vector<std::string>& words,
                   std::string* error) const;

  // Parses the arguments behind the program's name and runs the command.
  Outcome Run(std::vector<std::string> words);

 private:
  const std::string version_;
  const std::vector<HelpTopic> topics_;
  std::unique_ptr<CLI::App> app_;
  std::unique_ptr<Command> program_;
};

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_COMMAND_LINE_H_
