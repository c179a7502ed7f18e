// Writes the output of `quantctl quantize` as GGUF.

#ifndef QUANTD_CLIENT_CLI_QUANTIZE_GGUF_H_
#define QUANTD_CLIENT_CLI_QUANTIZE_GGUF_H_

#include "absl/status/status.h"
#include "client/cli/progress.h"
#include "client/cli/quantize_options.h"
#include "client/cli/quantize_plan.h"
#include "client/cli/quantize_server.h"
#include "client/cli/session.h"
#include "client/models/spec_syntax.h"

namespace quantd::cli {

// Refuses options that GGUF has no place for, and options for GGUF alone with
// another output.
// Errors: ARGUMENT_INVALID.
absl::Status CheckGgufOptions(const QuantizeOptions& options,
                              const SpecSet& specs);

// Writes the only target of the plan. `server` is null where all tensors become
// blocks without it. If a tensor fails, there is no file, and its shard is not
// marked as written.
// Errors: of files; those that end the run.
absl::Status WriteGguf(const QuantizeOptions& options, const Session& session,
                       QuantizeServer* server, QuantizePlan* plan,
                       Progress* progress);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_QUANTIZE_GGUF_H_
