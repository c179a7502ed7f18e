// The help of a program and its commands, made from what it accepts.

#ifndef QUANTD_CLIENT_CLI_HELP_PAGE_H_
#define QUANTD_CLIENT_CLI_HELP_PAGE_H_

#include <string>

#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"

namespace quantd::cli {

// Lines of at most 80 columns. `path` is how the command is called: "quantctl
// encodings list".
std::string HelpPage(const CommandLine& command_line, absl::string_view path,
                     const Command& command);

// A topic of `help TOPIC`.
std::string HelpPage(const HelpTopic& topic);

// The first clause of a help text.
absl::string_view Brief(absl::string_view help);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_HELP_PAGE_H_
