// Finds the tensors that `quantctl quantize` rounds for the output of their
// layer.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_ROUNDING_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_ROUNDING_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "client/cpp/client.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"
#include "client/models/spec_syntax.h"

namespace quantd::jobs {

// Refuses what does not go together.
// Errors: ARGUMENT_INVALID.
absl::Status CheckRounding(const QuantizeOptions& options,
                           const SpecSet& specs);

// True if the statistics of inputs are read.
bool NeedsInputs(const QuantizeOptions& options, const SpecSet& specs);

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

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_ROUNDING_H_
