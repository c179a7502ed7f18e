// Options that say which tensors a command takes, and what they become.

#ifndef QUANTD_CLIENT_CLI_TENSOR_OPTIONS_H_
#define QUANTD_CLIENT_CLI_TENSOR_OPTIONS_H_

#include <string>

#include "client/cli/command_line.h"
#include "client/jobs/revision_name.h"
#include "client/jobs/spec_options.h"
#include "client/jobs/tensor_filter.h"

namespace quantd::cli {

// Adds --include, --exclude, --min-rank and --all.
void AddFilterOptions(Command* command, jobs::TensorFilter* filter);

// Adds --model and --revision.
// `required`  there is no file that names the model.
void AddRevisionOptions(Command* command, bool required,
                        jobs::RevisionName* name);

// Adds the argument that is what TensorInput opens, which is required.
void AddInputArgument(Command* command, std::string* input);

// Adds the argument that names one tensor, which is required.
void AddTensorArgument(Command* command, std::string* tensor);

// Adds --spec.
void AddSpecOptions(Command* command, jobs::SpecOptions* options);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_TENSOR_OPTIONS_H_
