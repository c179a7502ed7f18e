// Steps of a Gram matrix; see v1::FeatureStatistics.

#ifndef QUANTD_CLIENT_MODELS_GRAM_STEPS_H_
#define QUANTD_CLIENT_MODELS_GRAM_STEPS_H_

#include <vector>

#include "client/files/safetensors.h"

namespace quantd {

// Exponents for the features of the last dimension: each step is between
// 1/4096 and 1/2048 of the largest finite magnitude of its feature, so that 256
// times as much fits. A feature that is always 0 gets the largest exponent of
// all; if all are, 1 is taken as seen. The same as the Python client's
// gram_steps.
// Requires: ElementTypeOf(tensor.dtype) has a value, and the last dimension is
// at least 1.
std::vector<int> GramSteps(const files::FileTensor& tensor);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_GRAM_STEPS_H_
