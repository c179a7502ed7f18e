// Writes the output of `quantctl quantize` as GGUF.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_GGUF_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_GGUF_H_

#include "absl/status/status.h"
#include "client/jobs/job_events.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"
#include "client/jobs/quantize_server.h"
#include "client/models/spec_syntax.h"

namespace quantd::jobs {

// Refuses options that GGUF has no place for, and options for GGUF alone with
// another output.
// Errors: ARGUMENT_INVALID.
absl::Status CheckGgufOptions(const QuantizeOptions& options,
                              const SpecSet& specs);

// Writes the only target of the plan. `server` is null where all tensors become
// blocks without it. If a tensor fails, there is no file, and its shard is not
// marked as written.
// Errors: of files; those that end the run.
absl::Status WriteGguf(const QuantizeOptions& options, const JobEvents& events,
                       QuantizeServer* server, QuantizePlan* plan,
                       JobProgress* progress);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_GGUF_H_
