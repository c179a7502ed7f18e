// Tensors that other programs quantized, by the names, types and shapes that
// they have in safetensors files. T is a tensor, X a module of weight X.weight.
//
//   FP8         T (F8_E4M3, F8_E5M2), T_scale_inv or T_scale. One scale, one
//               for each row, one for each block of 128 x 128 or what
//               config.json says, one for each output of a convolution
//               ([outputs] or [outputs, 1, ..]), or one for each column of
//               experts ([experts, 1, columns]). Or E8M0 bytes (U8) for groups
//               of 32. Or numbers without a scale, if nothing that may be one
//               is beside them
//   INT8        T (I8), T_scale likewise, T_zero_point (I8)
//   NVFP4       T (U8, two codes a byte), T_scale (F8_E4M3), T_scale_2 (F32)
//   MXFP4       T (U8), T_scale (U8)
//   GPT-OSS     T_blocks (U8, [.., rows, groups, 16]), T_scales (U8). The
//               tensor is [.., 32 * groups, rows], as transformers has it. Or
//               T.blocks and T.scales, of [.., rows, 32 * groups]
//
//   GPTQ        X.qweight (I32, [inputs * bits / 32, outputs], packed along the
//               inputs), X.qzeros (I32, [groups, outputs * bits / 32], each
//               less 1 unless the checkpoint_format is gptq_v2), X.scales,
//               X.g_idx (I32, the group of each input)
//   AWQ         X.qweight (I32, [inputs, outputs * bits / 32], packed along the
//               outputs, in the order 0 2 4 6 1 3 5 7), X.qzeros likewise,
//               X.scales ([groups, outputs]). With "zero_point": false there
//               may be no X.qzeros: the zero point is 2^(bits - 1)
//
// X.weight of GPTQ and AWQ is [outputs, inputs]. Where the configuration has
// other bits for some modules ("dynamic", "extra_config"), the shapes tell
// them. Bytes of E8M0 may be F8_E8M0 in place of U8; those may be of blocks,
// too.

#ifndef QUANTD_CLIENT_MODELS_QUANTIZED_CHECKPOINT_H_
#define QUANTD_CLIENT_MODELS_QUANTIZED_CHECKPOINT_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/tensor.h"
#include "client/files/coded_tensor.h"
#include "client/models/quantized_layout.h"
#include "client/models/tensor_input.h"

namespace quantd {

// All tensors of the input in these layouts, which are float32; empty where
// there are none. `path` is what it was opened as: its config.json,
// quantize_config.json and hf_quant_config.json tell what tensors do not.
// Errors: FILE_MALFORMED, with the tensor that is wrong or missing;
// FILE_UNSUPPORTED; those of ReadConfig.
absl::StatusOr<std::vector<files::CodedTensor>> ReadCheckpoint(
    const TensorInput& input, const std::string& path);

// The coded form of a tensor of a compressed-tensors model.
// Errors: FILE_UNSUPPORTED.
absl::StatusOr<files::CodedTensor> CodedTensorOf(const QuantizedTensor& tensor,
                                                 const std::string& path);

// Errors: FILE_UNSUPPORTED for what no encoding says.
absl::StatusOr<Encoding> EncodingOf(const files::CodedTensor& tensor,
                                    const std::string& path);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_QUANTIZED_CHECKPOINT_H_
