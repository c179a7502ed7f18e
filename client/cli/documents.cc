#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/completion.h"
#include "client/cli/man_page.h"
#include "client/cli/session.h"
#include "client/cpp/errors.h"

namespace quantd::cli {
namespace {

void Write(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
}

}  // namespace

void AddCompletionCommand(Command* quantctl) {
  Command* const command = quantctl->AddCommand(
      "completion", "Print a script that completes command lines");
  command->AddExample("source <(quantctl completion bash)");
  command->AddExample("quantctl completion fish | source");
  const auto shell = std::make_shared<std::string>();
  command->AddArgument("shell", shell.get(), "", "Shell to complete in")
      ->OneOf({"bash", "zsh", "fish"})
      ->Required();
  command->OnRun([quantctl, shell] {
    if (*shell == "bash") Write(BashCompletion(*quantctl));
    if (*shell == "zsh") Write(ZshCompletion(*quantctl));
    if (*shell == "fish") Write(FishCompletion(*quantctl));
  });
}

void AddHelpCommand(CommandLine* quantctl, Session* session) {
  Command* const command =
      quantctl->program()->AddCommand("help", "Explain a command or a topic");
  // A command may have a command below it.
  const auto words = std::make_shared<std::vector<std::string>>(2);
  std::vector<std::string> known;
  for (const HelpTopic& topic : quantctl->topics()) known.push_back(topic.name);
  for (const Command& other : quantctl->program()->commands()) {
    if (&other != command) known.push_back(other.name());
  }
  command
      ->AddArgument("topic", &(*words)[0], "NAME",
                    "A command, or one of the topics that quantctl --help "
                    "lists")
      ->Suggest(known);
  command->AddArgument("command", &(*words)[1], "NAME",
                       "A command below that one");
  command->AddExample("quantctl help specs");
  command->AddExample("quantctl help encodings compute");
  command->OnRun([quantctl, session, words] {
    while (!words->empty() && words->back().empty()) words->pop_back();
    std::string error;
    const std::string text = quantctl->Help(*words, &error);
    if (text.empty()) return session->FailUsage(ArgumentInvalidError(error));
    Write(text);
  });
}

void AddManCommand(CommandLine* quantctl) {
  Command* const command =
      quantctl->program()->AddCommand("man", "Print the manual page");
  command->AddExample("quantctl man | man -l -");
  command->OnRun([quantctl] { Write(ManPage(*quantctl)); });
}

}  // namespace quantd::cli
