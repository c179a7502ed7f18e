#include "client/jobs/file_ties.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/errors.h"
#include "client/files/safetensors.h"
#include "client/models/tie_groups.h"

namespace quantd::jobs {

absl::StatusOr<TieOptions> TieFlags::Parse() const {
  TieOptions options;
  options.has_defaults = !no_defaults;
  for (const std::string& text : patterns) {
    absl::StatusOr<TiePattern> pattern = TiePattern::Parse(text);
    if (!pattern.ok()) return pattern.status();
    options.patterns.push_back(*std::move(pattern));
  }
  return options;
}

absl::StatusOr<std::vector<TieGroup>> FindFileTies(
    const TieFlags& flags, bool matters,
    const std::vector<const files::FileTensor*>& tensors) {
  const absl::StatusOr<TieOptions> options = flags.Parse();
  if (!options.ok()) return options.status();
  if (!options->patterns.empty() && !matters) {
    return ArgumentInvalidError(
        "expected a spec with one outer scale, such as nvfp4, or with one "
        "scale from the extremes, such as float8_e4m3fn, with --tie");
  }
  return FindTiedTensors(*options, tensors);
}

}  // namespace quantd::jobs
