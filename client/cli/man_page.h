// The manual page, written from the tree of commands.

#ifndef QUANTD_CLIENT_CLI_MAN_PAGE_H_
#define QUANTD_CLIENT_CLI_MAN_PAGE_H_

#include <string>

#include "client/cli/command_line.h"

namespace quantd::cli {

// In the language of man(7), for section 1. The paragraphs of the help's
// footer that begin with "Title:" become sections.
std::string ManPage(const CommandLine& command_line);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_MAN_PAGE_H_
