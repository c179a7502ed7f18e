#include "client/cli/output_options.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/jobs/output.h"

namespace quantd::cli {

Option* AddOutputOptions(Command* command, const char* help,
                         jobs::OutputOptions* output) {
  Option* const option =
      command->AddOption("-o,--output", &output->path, "FILE", help);
  command->AddFlag("--force", &output->force, "Replace what is there already");
  return option;
}

absl::Status CheckOutputFile(const jobs::OutputOptions& output,
                             const std::vector<std::string>& inputs,
                             absl::string_view extension, Session* session) {
  const absl::Status status = output.CheckFile(inputs, extension);
  if (status.ok() && output.IsStandardOutput()) session->stdout_is_data = true;
  return status;
}

}  // namespace quantd::cli
