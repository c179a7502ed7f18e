// The GGUF files of quantctl quantize: which type a spec has there, and how
// codes become blocks.

#ifndef QUANTD_CLIENT_JOBS_GGUF_OUTPUT_H_
#define QUANTD_CLIENT_JOBS_GGUF_OUTPUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/files/gguf_builder.h"
#include "client/files/gguf_types.h"
#include "client/files/safetensors.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/tensor_input.h"

namespace quantd::jobs {

// The type that the spec has in GGUF; null for one that has none.
const files::GgufType* GgufTypeOf(const EncodingSpec& spec,
                                  const std::vector<int64_t>& shape);

// The entry of a tensor of the input in a GGUF file, quantized or, without a
// spec, as it is. `path` is that of the file. Errors: ARGUMENT_INVALID for a
// spec
// that has no type; FILE_UNSUPPORTED.
absl::StatusOr<files::GgufEntry> GgufEntryOf(const std::string& path,
                                             const TensorInput& input,
                                             const files::FileTensor& tensor,
                                             const EncodingSpec* spec);

// True if llama.cpp leaves a tensor as it is: one that is no weight, a norm, a
// router, a small matrix or what its kernels take as floats, or a vector,
// unless the filter takes all ranks. It does not count leading dimensions of 1.
bool IsLeftInGguf(const TensorFilter& filter, const files::FileTensor& tensor);

// The types that quantctl makes itself, and the specs that have one.
std::string GgufSpecs();

// The number that llama.cpp has for a file most of whose bytes are of the type;
// 0 for a type that is not written.
uint32_t GgufFileType(const files::GgufType& type);

// Makes blocks of codes as Quantize answers them. A minimum is a float16 in
// GGUF; *is_rounded is set where one is not minus zero point times scale.
// Requires: `type` is GgufTypeOf of the spec that `encoding` has come of.
// Errors: ARGUMENT_INVALID for an encoding that blocks cannot hold.
absl::StatusOr<std::vector<uint8_t>> PackGguf(const files::GgufType& type,
                                              const Encoding& encoding,
                                              const Scales& scales,
                                              absl::Span<const uint8_t> codes,
                                              bool* is_rounded);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_GGUF_OUTPUT_H_
