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

// True if a tensor failed because the server cannot hold it.
bool CannotHold(const absl::Status& status);

// True if FindEncoding may be asked: a spec without importance, and scales that
// fit a message.
bool CanFindEncoding(const EncodingSpec& spec, const Tensor& tensor);

// The encoding of a tensor, from histograms where the method needs them.
// Errors: those of Client::Calibrate.
absl::StatusOr<Encoding> FindEncoding(const Tensor& tensor,
                                      const EncodingSpec& spec, Client* client);

// Measures the encodings of specs in place of the specs. Specs that come with
// an outer maximum stay, and those whose encoding can't be found.
// Errors: those of Client::Calibrate and Client::Evaluate.
absl::StatusOr<EvaluateResult> EvaluateInTwoPasses(EvaluateJob job,
                                                   Client* client);

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_MODELS_TWO_PASSES_H_
