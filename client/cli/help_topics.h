// The texts of `quantctl help TOPIC`.

#ifndef QUANTD_CLIENT_CLI_HELP_TOPICS_H_
#define QUANTD_CLIENT_CLI_HELP_TOPICS_H_

#include <vector>

#include "client/cli/command_line.h"

namespace quantd::cli {

std::vector<HelpTopic> HelpTopics();

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_HELP_TOPICS_H_
