// Tensors of files that share a scale.

#ifndef QUANTD_CLIENT_JOBS_FILE_TIES_H_
#define QUANTD_CLIENT_JOBS_FILE_TIES_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/files/safetensors.h"
#include "client/models/tie_groups.h"

namespace quantd::jobs {

// --tie, --no-ties.
struct TieFlags {
  std::vector<std::string> patterns;
  bool no_defaults = false;

  bool IsGiven() const { return no_defaults || !patterns.empty(); }
  // Errors: ARGUMENT_INVALID.
  absl::StatusOr<TieOptions> Parse() const;
};

// The groups of `flags` among tensors of files.
// `matters`  true if there is something that they share.
// Errors: ARGUMENT_INVALID; also for patterns where nothing is shared.
absl::StatusOr<std::vector<TieGroup>> FindFileTies(
    const TieFlags& flags, bool matters,
    const std::vector<const files::FileTensor*>& tensors);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_FILE_TIES_H_
