// Files of tensors: #include <quantd/files.h>, link quantd::files.
// proto/README.md says how quantized tensors lie in a safetensors file.

#ifndef QUANTD_CLIENT_FILES_INCLUDE_QUANTD_FILES_H_
#define QUANTD_CLIENT_FILES_INCLUDE_QUANTD_FILES_H_

#include "client/files/atomic_file.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "client/files/gguf.h"
#include "client/files/gguf_builder.h"
#include "client/files/gguf_types.h"
#include "client/files/npy.h"
#include "client/files/onnx_tensors.h"
#include "client/files/safetensors.h"
#include "client/files/safetensors_builder.h"
#include "client/files/shard_index.h"

#endif  // QUANTD_CLIENT_FILES_INCLUDE_QUANTD_FILES_H_
