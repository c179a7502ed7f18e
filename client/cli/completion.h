// Scripts by which shells complete command lines, written from the tree of
// commands, so that they know whatever it knows.

#ifndef QUANTD_CLIENT_CLI_COMPLETION_H_
#define QUANTD_CLIENT_CLI_COMPLETION_H_

#include <string>

#include "client/cli/command_line.h"

namespace quantd::cli {

// To be sourced, or to be put where the shell looks for the program's
// completion: commands, options, the values of those that have a few, and
// files. They run no program.
std::string BashCompletion(const Command& program);
std::string ZshCompletion(const Command& program);
std::string FishCompletion(const Command& program);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_COMPLETION_H_
