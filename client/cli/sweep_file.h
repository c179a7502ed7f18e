// `quantctl sweep FILE`: all specs measured in one pass over a file.

#ifndef QUANTD_CLIENT_CLI_SWEEP_FILE_H_
#define QUANTD_CLIENT_CLI_SWEEP_FILE_H_

#include <string>
#include <vector>

#include "client/cli/measurement.h"
#include "client/cli/output.h"
#include "client/cli/session.h"
#include "client/cli/tensor_input.h"

namespace quantd::cli {

struct FileSweepOptions {
  std::string input;
  SpecOptions spec;
  TensorFilter filter;
  BudgetOptions budgets;
  // With several budgets "{}" in the path stands for the figure of each.
  OutputOptions output;
};

void SweepFile(const FileSweepOptions& options, Session* session);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_SWEEP_FILE_H_
