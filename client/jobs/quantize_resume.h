// The results of earlier runs of `quantctl quantize` in the output: this run
// keeps what it would write again, and replaces nothing that is somebody
// else's.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_RESUME_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_RESUME_H_

#include <string>

#include "absl/status/status.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"

namespace quantd::jobs {

// Sets what a shard is known by: `command` and `run`. `server` is the address.
// Requires: the shard's tensors are selected.
void SetKeys(const QuantizeOptions& options, const std::string& server,
             const QuantizePlan& plan, Shard* shard);

// Stands for what the encodings of all shards, and of all parts, are made from.
std::string RunKey(const QuantizePlan& plan);
// The RunKey of a run that writes to `output`: equal runs that write elsewhere
// have another.
std::string OwnRunKey(const QuantizePlan& plan, const std::string& output);

// Finds the shards and the parts that are there. Those that are kept are marked
// so, with their outcomes. With --join all have to be there.
// Requires: the targets of the plan, and SetKeys.
// Errors: FILE_EXISTS, FILE_INCOMPLETE and others of files; ARGUMENT_INVALID.
absl::Status FindEarlier(const QuantizeOptions& options, QuantizePlan* plan);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_RESUME_H_
