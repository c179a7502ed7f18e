// The commands of quantctl. Each adds itself to the command line and runs when
// it was chosen.

#ifndef QUANTD_CLIENT_CLI_COMMANDS_H_
#define QUANTD_CLIENT_CLI_COMMANDS_H_

#include "CLI/CLI.hpp"
#include "client/cli/session.h"

namespace quantd::cli {

// `session` must outlive `app`.
void AddQuantizeCommand(CLI::App* app, Session* session);
void AddDequantizeCommand(CLI::App* app, Session* session);
void AddCalibrateCommand(CLI::App* app, Session* session);
void AddEvaluateCommand(CLI::App* app, Session* session);
void AddEncodingsCommand(CLI::App* app, Session* session);
void AddExportCommand(CLI::App* app, Session* session);
void AddImportCommand(CLI::App* app, Session* session);
void AddSweepCommand(CLI::App* app, Session* session);
void AddStatisticsCommand(CLI::App* app, Session* session);
void AddModelsCommand(CLI::App* app, Session* session);
void AddHealthCommand(CLI::App* app, Session* session);
void AddBenchCommand(CLI::App* app, Session* session);

// Takes a number of seconds, also as 200ms, 30s, 5m.
CLI::Validator SecondsWithUnit();

// Parses the command line and runs the command. Returns the exit code.
int RunQuantctl(int argc, const char* const* argv);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_COMMANDS_H_
