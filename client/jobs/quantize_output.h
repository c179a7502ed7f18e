// Writes the safetensors files of `quantctl quantize`: shards, and parts of
// them.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_OUTPUT_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_OUTPUT_H_

#include "absl/status/status.h"
#include "client/jobs/job_events.h"
#include "client/jobs/quantize_folder.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"
#include "client/jobs/quantize_server.h"

namespace quantd::jobs {

// Writes a target: with --join from the files of its parts, otherwise with what
// `server` answers. A shard that is not a part clears the folder right before
// it is in its place. If a tensor fails, without --keep-going, there is no
// file, and the shard is not marked as written. Errors: of files; those that
// end the run.
absl::Status WriteSafetensors(const QuantizeOptions& options,
                              const JobEvents& events, const Target& target,
                              QuantizeServer* server, QuantizeFolder* folder,
                              QuantizePlan* plan, JobProgress* progress);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_OUTPUT_H_
