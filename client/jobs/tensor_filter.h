// Filter of the tensors that a job takes.

#ifndef QUANTD_CLIENT_JOBS_TENSOR_FILTER_H_
#define QUANTD_CLIENT_JOBS_TENSOR_FILTER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/files/safetensors.h"

namespace quantd::jobs {

// --include, --exclude, --min-rank, --all.
struct TensorFilter {
  std::vector<std::string> include;
  std::vector<std::string> exclude;
  int64_t min_rank = 2;
  bool all = false;

  // True if a field differs from its default.
  bool IsGiven() const;
  // True for a tensor of reals that the filter takes.
  bool Takes(const files::FileTensor& tensor) const;
  // True if --include and --exclude take a tensor of that name.
  bool TakesName(absl::string_view name) const;
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_TENSOR_FILTER_H_
