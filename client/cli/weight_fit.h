// Checks that a stored encoding is one of this weight.

#ifndef QUANTD_CLIENT_CLI_WEIGHT_FIT_H_
#define QUANTD_CLIENT_CLI_WEIGHT_FIT_H_

#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "quantd/v1/encoding.pb.h"

namespace quantd::cli {

struct FittedWeight {
  // The stored encoding, or the one that was computed from the weight.
  Encoding encoding;
  // The codes of the weight under it.
  QuantizeResult result;
  // A note for the user. Empty: the stored encoding fits.
  std::string note;
};

// Quantizes `weight`, which is to have the stored encoding. Exporters change
// weights: they fold a BatchNorm into the convolution before it, or drop what
// has no effect. The scales of the weight before would clip it, or leave most
// codes unused. An encoding from extremes is then computed from `weight`; one
// of another method is compared with what that gives for `weight`; one that a
// client made may clip a hundredth of the elements.
// Errors: ARGUMENT_INVALID: the encoding was computed from another weight.
absl::StatusOr<FittedWeight> QuantizeFitted(const Tensor& weight,
                                            const v1::StoredEncoding& stored,
                                            Client* client);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_WEIGHT_FIT_H_
