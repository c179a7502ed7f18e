// Notes and errors on the tensors of a run.

#ifndef QUANTD_CLIENT_CLI_TENSOR_NOTES_H_
#define QUANTD_CLIENT_CLI_TENSOR_NOTES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/session.h"
#include "client/files/safetensors.h"
#include "client/jobs/selection.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"

namespace quantd::cli {

// A tensor that failed.
struct TensorError {
  std::string tensor;
  absl::Status status;
};

// Prints the first notes, and how many more there are.
void PrintNotes(const std::vector<std::string>& notes, Session* session);

// Prints the first ones, a line each, and how many more there are.
void PrintTensorErrors(const std::vector<TensorError>& errors,
                       Session* session);

// Reports an error that ends the run before anything is sent, as one of usage
// where the command line is wrong.
void FailEarly(const absl::Status& status, Session* session);

// Prints that a tensor, or those of unread() whose names the filter takes, are
// left out, and why. The exit code becomes kServerError.
void ReportUnread(const files::UnreadTensor& tensor, Session* session);
// And what of an ONNX model may be quantized already.
void ReportUnread(const TensorInput& input, const jobs::TensorFilter& filter,
                  Session* session);

// jobs::SelectMeasurable; names the tensors that have no elements.
absl::StatusOr<std::vector<const files::FileTensor*>> SelectMeasurable(
    const TensorInput& input, const jobs::TensorFilter& filter,
    const SpecSet* specs, Session* session);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_TENSOR_NOTES_H_
