// What the errors of each column of a weight count, from a file.

#ifndef QUANTD_CLIENT_CLI_QUANTIZE_IMPORTANCE_H_
#define QUANTD_CLIENT_CLI_QUANTIZE_IMPORTANCE_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "client/cli/command_line.h"
#include "client/cli/quantize_options.h"
#include "client/cli/quantize_plan.h"

namespace quantd::cli {

// --importance.
void AddImportanceOption(Command* command, QuantizeOptions* options);

// Sets the plan's importance from the file, and what is said of tensors that
// are not in it.
// `is_named`  whether somebody asked for a tensor and not only for all.
// Errors: ARGUMENT_INVALID for a tensor whose spec does not search, or has
// another number of columns, and if the file has none of the tensors; those of
// files::ReadImatrix.
absl::Status FindImportance(
    const QuantizeOptions& options,
    absl::FunctionRef<bool(const std::string& tensor)> is_named,
    QuantizePlan* plan);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_QUANTIZE_IMPORTANCE_H_
