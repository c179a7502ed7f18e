// Errors of one tensor that end a job.

#ifndef QUANTD_CLIENT_JOBS_ERRORS_H_
#define QUANTD_CLIENT_JOBS_ERRORS_H_

#include "absl/status/status.h"

namespace quantd::jobs {

// True if the next tensor would fail as well: the server cannot be reached or
// did not go on in time, or a file cannot be read or written.
bool EndsJob(const absl::Status& status);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_ERRORS_H_
