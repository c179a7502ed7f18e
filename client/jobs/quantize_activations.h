// The quantization of inputs of modules, and of the cache of keys and values,
// in a compressed-tensors model.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_ACTIVATIONS_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_ACTIVATIONS_H_

#include "absl/status/status.h"
#include "client/cpp/client.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"

namespace quantd::jobs {

// Sets the options that are not given to those that --scheme stands for, and
// refuses options that do not go together.
// Errors: ARGUMENT_INVALID.
absl::Status ApplyScheme(QuantizeOptions* options);

// True if stored encodings of activations may be needed.
bool NeedsActivations(const QuantizeOptions& options);

// Sets what the plan says of inputs and of the cache. Numbers come from stored
// encodings of MODULE.input, and of what goes to the cache: X.k_proj.output and
// X.v_proj.output, or the output of a norm behind them. Null where these are
// not needed. Errors: ARGUMENT_INVALID, also for encodings that are not there;
// those of the client.
absl::Status FindActivations(const QuantizeOptions& options, Client* client,
                             QuantizePlan* plan);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_ACTIVATIONS_H_
