// The quantization configuration of compressed-tensors models. It names the
// modules and their schemes; the scales are in the model's safetensors.

#ifndef QUANTD_SERVER_INTERCHANGE_COMPRESSED_TENSORS_H_
#define QUANTD_SERVER_INTERCHANGE_COMPRESSED_TENSORS_H_

#include <memory>

#include "server/interchange/interchange.h"

namespace quantd::server {

// Tensors "<module>.weight" are weights, "<module>.input" and
// "<module>.output" the activations of a module; all others are left out.
std::unique_ptr<EncodingsWriter> NewCompressedTensorsWriter();

}  // namespace quantd::server

#endif  // QUANTD_SERVER_INTERCHANGE_COMPRESSED_TENSORS_H_
