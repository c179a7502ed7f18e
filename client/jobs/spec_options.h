// Specs of the tensors of a job: --spec.

#ifndef QUANTD_CLIENT_JOBS_SPEC_OPTIONS_H_
#define QUANTD_CLIENT_JOBS_SPEC_OPTIONS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/models/spec_syntax.h"

namespace quantd::jobs {

// Errors: ARGUMENT_INVALID for a spec with a gguf_type.
absl::Status CheckNoGgufType(const SpecTemplate& spec);

// Spec of tensors without a --spec.
inline constexpr char kDefaultSpec[] = "int8";

// --spec.
struct SpecOptions {
  std::vector<std::string> specs;
  // True if the job takes blocks of GGUF; see SpecTemplate::gguf_type.
  bool takes_gguf_types = false;

  // Without a --spec that of kDefaultSpec.
  // Errors: ARGUMENT_INVALID, FILE_UNREADABLE.
  absl::StatusOr<SpecSet> ParseSet() const;
  // The files that the options read: @FILE, and those of codebooks.
  std::vector<std::string> Files() const;
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_SPEC_OPTIONS_H_
