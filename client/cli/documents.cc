#include <cstdio>
#include <memory>
#include <string>

#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/completion.h"
#include "client/cli/man_page.h"

namespace quantd::cli {
namespace {

void Write(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
}

}  // namespace

void AddCompletionCommand(Command* quantctl) {
  Command* const command = quantctl->AddCommand(
      "completion",
      "Print a script that completes command lines, such as for: source "
      "<(quantctl completion bash)");
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

void AddManCommand(CommandLine* quantctl) {
  quantctl->program()
      ->AddCommand(
          "man", "Print the manual page, such as for: quantctl man | man -l -")
      ->OnRun([quantctl] { Write(ManPage(*quantctl)); });
}

}  // namespace quantd::cli
