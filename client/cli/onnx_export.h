// Encodings put into an ONNX model.

#ifndef QUANTD_CLIENT_CLI_ONNX_EXPORT_H_
#define QUANTD_CLIENT_CLI_ONNX_EXPORT_H_

#include <string>
#include <vector>

#include "client/cli/session.h"
#include "client/jobs/output.h"
#include "client/jobs/revision_name.h"

namespace quantd::cli {

struct OnnxExport {
  jobs::RevisionName name;
  std::string model_path;
  jobs::OutputOptions output;
  // Patterns of the tensors to quantize; empty for all.
  std::vector<std::string> include;
  // "TORCH=ONNX": where a tensor is in the model.
  std::vector<std::string> map;
  // Leave biases as they are.
  bool keeps_biases = false;
  // Print where each tensor was found, and what stays as it was.
  bool prints_names = false;
};

// Writes the model with each weight that has an encoding as its codes under a
// DequantizeLinear, and QuantizeLinear and DequantizeLinear behind each
// activation that has one. Biases of layers whose weight and input become
// integers become int32. What the model does not have under its name is
// looked for as the tensor of a torch module. Reports to `session`.
void ExportOnnx(const OnnxExport& job, Session* session);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_ONNX_EXPORT_H_
