// The weight of errors in each column of a weight: from a file, or from stored
// statistics.

#ifndef QUANTD_CLIENT_JOBS_IMPORTANCE_H_
#define QUANTD_CLIENT_JOBS_IMPORTANCE_H_

#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/files/safetensors.h"
#include "client/jobs/stored_inputs.h"
#include "client/models/model_importance.h"
#include "client/models/spec_syntax.h"

namespace quantd::jobs {

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
}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_IMPORTANCE_H_
