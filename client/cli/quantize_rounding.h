// Which tensors `quantctl quantize` rounds for the output of their layer.

#ifndef QUANTD_CLIENT_CLI_QUANTIZE_ROUNDING_H_
#define QUANTD_CLIENT_CLI_QUANTIZE_ROUNDING_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "client/cli/command_line.h"
#include "client/cli/quantize_options.h"
#include "client/cli/quantize_plan.h"
#include "client/cpp/client.h"

namespace quantd::cli {

// --rounding and what goes with it.
void AddRoundingOptions(Command* command, RoundingOptions* options);

// Refuses what does not go together, and sets where the inputs are.
// `has_model`  --model is given.
// Errors: ARGUMENT_INVALID.
absl::Status CheckRounding(bool has_model, QuantizeOptions* options);

// Sets the plan's roundings by the statistics of inputs that are stored, and
// what is said of tensors that have none.
// `client`  null where the rounding is not compensated.
// `is_named`  whether somebody asked for a tensor and not only for all.
// Errors: ARGUMENT_INVALID, also if no tensor has inputs; those of the client
// and of files.
absl::Status FindRoundings(
    const QuantizeOptions& options, Client* client,
    absl::FunctionRef<bool(const std::string& tensor)> is_named,
    QuantizePlan* plan);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_QUANTIZE_ROUNDING_H_
