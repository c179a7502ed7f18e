// The commands of quantctl. Each adds itself to the command line and runs when
// it was chosen.

#ifndef QUANTD_CLIENT_CLI_COMMANDS_H_
#define QUANTD_CLIENT_CLI_COMMANDS_H_

#include "client/cli/command_line.h"
#include "client/cli/session.h"

namespace quantd::cli {

// `session` must outlive `quantctl`.
void AddQuantizeCommand(Command* quantctl, Session* session);
void AddDequantizeCommand(Command* quantctl, Session* session);
void AddCalibrateCommand(Command* quantctl, Session* session);
void AddEvaluateCommand(Command* quantctl, Session* session);
void AddEncodingsCommand(Command* quantctl, Session* session);
void AddExportCommand(Command* quantctl, Session* session);
void AddImportCommand(Command* quantctl, Session* session);
void AddSweepCommand(Command* quantctl, Session* session);
void AddStatisticsCommand(Command* quantctl, Session* session);
void AddModelsCommand(Command* quantctl, Session* session);
void AddRevisionsCommand(Command* quantctl, Session* session);
void AddHealthCommand(Command* quantctl, Session* session);
void AddReportCommand(Command* quantctl, Session* session);
void AddSelftestCommand(Command* quantctl, Session* session);
void AddBenchCommand(Command* quantctl, Session* session);
void AddCompletionCommand(Command* quantctl);
// These two belong behind the others, which they know.
void AddHelpCommand(CommandLine* quantctl, Session* session);
void AddManCommand(CommandLine* quantctl);

// Parses the command line and runs the command. Returns the exit code.
int RunQuantctl(int argc, const char* const* argv);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_COMMANDS_H_
