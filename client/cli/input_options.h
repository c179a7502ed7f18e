// --inputs, --inputs-map and --importance.

#ifndef QUANTD_CLIENT_CLI_INPUT_OPTIONS_H_
#define QUANTD_CLIENT_CLI_INPUT_OPTIONS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/cpp/client.h"
#include "client/files/safetensors.h"
#include "client/jobs/importance.h"
#include "client/jobs/stored_inputs.h"
#include "quantd/v1/quantization_service.pb.h"
#include "quantd/v1/tensor.pb.h"

namespace quantd::cli {

// Adds --inputs and --inputs-map. Returns --inputs.
// `help`  of --inputs.
Option* AddInputsOptions(Command* command, const char* help,
                         jobs::InputsOptions* inputs);

// Adds --importance, which sets `file`.
Option* AddImportanceOption(Command* command, std::string* file);

// Says of tensors that they are measured without. The exit code says so too
// where somebody named them.
void ReportMissingImportance(const std::string& file,
                             const jobs::FoundImportance& found, bool is_named,
                             Session* session);

// The stored inputs that have a Gram matrix, by weight, where --inputs asks for
// them. Says which tensors have none; the exit code says so too where they are
// needed and somebody named them.
// `is_needed`  --inputs is for nothing else.
// Errors: ARGUMENT_INVALID if none of them has and it is needed; those of
// StoredInputs::Read.
absl::StatusOr<std::map<std::string, v1::TensorName>> FindOutputInputs(
    const jobs::InputsOptions& options,
    const std::vector<const files::FileTensor*>& tensors, bool is_needed,
    bool is_named, Client* client, Session* session);

Json OutputNoiseJson(const v1::OutputNoise& noise);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_INPUT_OPTIONS_H_
