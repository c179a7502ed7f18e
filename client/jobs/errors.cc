#include "client/jobs/errors.h"

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "client/cpp/errors.h"

namespace quantd::jobs {

bool EndsJob(const absl::Status& status) {
  return IsServerUnreachable(status) || ErrorReason(status) == "TIMEOUT" ||
         absl::StartsWith(ErrorReason(status), "FILE_");
}

}  // namespace quantd::jobs
