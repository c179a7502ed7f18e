// --inputs, --inputs-map and --importance.

#ifndef QUANTD_CLIENT_CLI_INPUT_OPTIONS_H_
#define QUANTD_CLIENT_CLI_INPUT_OPTIONS_H_

#include <string>

#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/jobs/importance.h"
#include "client/jobs/stored_inputs.h"
#include "quantd/v1/quantization_service.pb.h"

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

Json OutputNoiseJson(const v1::OutputNoise& noise);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_INPUT_OPTIONS_H_
