// Tensors that a server cannot hold: their encodings are found first, and then
// they are sent again.

#ifndef QUANTD_CLIENT_MODELS_TWO_PASSES_H_
#define QUANTD_CLIENT_MODELS_TWO_PASSES_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"

namespace quantd::internal {

// Whether that is why a tensor failed.
bool CannotHold(const absl::Status& status);

// The encoding of a tensor, from histograms where the method needs them.
// Errors: those of Client::Calibrate.
absl::StatusOr<Encoding> FindEncoding(const Tensor& tensor,
                                      const EncodingSpec& spec, Client* client);

// Measures the encodings of specs in place of the specs. Specs that come with
// an outer maximum, or with importance, stay.
// Errors: those of Client::Calibrate and Client::Evaluate.
absl::StatusOr<EvaluateResult> EvaluateInTwoPasses(EvaluateJob job,
                                                   Client* client);

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_MODELS_TWO_PASSES_H_
