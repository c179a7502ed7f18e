// The weight of errors in each column of a weight: from a file, or from stored
// statistics.

#ifndef QUANTD_CLIENT_CLI_IMPORTANCE_OPTIONS_H_
#define QUANTD_CLIENT_CLI_IMPORTANCE_OPTIONS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/cli/stored_inputs.h"
#include "client/cpp/client.h"
#include "client/files/safetensors.h"
#include "client/models/model_importance.h"
#include "client/models/spec_syntax.h"

namespace quantd::cli {

// --importance, which sets `file`.
Option* AddImportanceOption(Command* command, std::string* file);

// True if a spec takes importance from stored statistics.
bool HasImportance(const SpecSet& specs);

// The specs of a tensor.
using SpecsOfTensor = absl::FunctionRef<std::vector<const SpecTemplate*>(
    const files::FileTensor& tensor)>;

// The result of FindImportance. Plain value.
struct FoundImportance {
  ModelImportance importance;
  // Tensors without importance, ...
  std::vector<std::string> missing;
  // ... and tensors none of whose specs takes it.
  std::vector<std::string> untaken;
  // Name and state of the stored inputs, by tensor. The state tells the
  // statistics from those of another time.
  std::map<std::string, std::string> states;
};

// The importance of tensors, from the file of --importance if there is one,
// otherwise from `inputs` for specs with importance.
// `inputs`  the model is empty where none is given.
// `client`  null is enough for a file, and where no spec has importance.
// Errors: ARGUMENT_INVALID for a tensor of another number of columns, or that
// has both, and if there is importance of no tensor; those of
// files::ReadImatrix and of StoredInputs::Read.
absl::StatusOr<FoundImportance> FindImportance(
    const std::string& file, const InputsOptions& inputs,
    const std::vector<const files::FileTensor*>& tensors,
    SpecsOfTensor specs_of, Client* client);

// Names the tensors that were treated without.
// `what`  "quantized" or "measured".
std::string MissingImportanceText(const std::string& what,
                                  const std::string& file,
                                  const std::vector<std::string>& missing);
std::string UntakenImportanceText(const std::string& what,
                                  const std::vector<std::string>& untaken);
// Says of tensors that they are measured without. The exit code says so too
// where somebody named them.
void ReportMissingImportance(const std::string& file,
                             const FoundImportance& found, bool is_named,
                             Session* session);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_IMPORTANCE_OPTIONS_H_
