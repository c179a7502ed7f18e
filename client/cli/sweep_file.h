// `quantctl sweep FILE`: all specs measured in one pass over a file.

#ifndef QUANTD_CLIENT_CLI_SWEEP_FILE_H_
#define QUANTD_CLIENT_CLI_SWEEP_FILE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/session.h"
#include "client/cli/sweep_options.h"
#include "client/cpp/client.h"
#include "client/files/safetensors.h"
#include "client/jobs/file_ties.h"
#include "client/jobs/output.h"
#include "client/jobs/spec_options.h"
#include "client/jobs/stored_inputs.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/model_importance.h"
#include "client/models/model_sweep.h"
#include "client/models/spec_syntax.h"

namespace quantd::cli {

struct FileSweepOptions {
  std::string input;
  jobs::SpecOptions spec;
  jobs::TensorFilter filter;
  BudgetOptions budgets;
  // The file of --importance; where the stored inputs of weights are.
  std::string importance;
  jobs::InputsOptions inputs;
  // The file of --output-weights.
  std::string output_weights;
  jobs::TieFlags ties;
  // A mixture has one spec for the tensors of a group.
  // With several budgets "{}" in the path stands for the figure of each.
  jobs::OutputOptions output;
};

// SweepTensors with a bar.
absl::StatusOr<ModelSweep> SweepWithProgress(
    const std::vector<const files::FileTensor*>& tensors,
    const std::vector<SpecTemplate>& specs, const std::vector<Budget>& budgets,
    SweepOptions options, Client* client, bool shows_progress);

void SweepFile(const FileSweepOptions& options, Session* session);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_SWEEP_FILE_H_
