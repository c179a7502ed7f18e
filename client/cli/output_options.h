// -o and --force.

#ifndef QUANTD_CLIENT_CLI_OUTPUT_OPTIONS_H_
#define QUANTD_CLIENT_CLI_OUTPUT_OPTIONS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/jobs/output.h"

namespace quantd::cli {

// Adds -o and --force. Returns -o, which is not required.
Option* AddOutputOptions(Command* command, const char* help,
                         jobs::OutputOptions* output);

// OutputOptions::CheckFile. From then on `session` keeps off standard output
// where the data go there.
absl::Status CheckOutputFile(const jobs::OutputOptions& output,
                             const std::vector<std::string>& inputs,
                             absl::string_view extension, Session* session);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_OUTPUT_OPTIONS_H_
