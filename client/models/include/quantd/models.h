// The library over the client and files: #include <quantd/models.h>, link
// quantd::models.

#ifndef QUANTD_CLIENT_MODELS_INCLUDE_QUANTD_MODELS_H_
#define QUANTD_CLIENT_MODELS_INCLUDE_QUANTD_MODELS_H_

#include "client/models/model_sweep.h"
#include "client/models/quantized_layout.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"

#endif  // QUANTD_CLIENT_MODELS_INCLUDE_QUANTD_MODELS_H_
