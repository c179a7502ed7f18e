// How quantized tensors lie in the safetensors of compressed-tensors models.
// X is a module, whose tensor "X.weight" is quantized:
//
//   int-quantized    X.weight (I8 in the tensor's shape), X.weight_scale,
//                    X.weight_zero_point (I8)
//   float-quantized  X.weight (F8_E4M3), X.weight_scale
//   pack-quantized   X.weight_packed (I32: each row a dense stream of value +
//                    2^(bits - 1), lowest bits first), X.weight_shape (I64),
//                    X.weight_scale, X.weight_zero_point (I32, packed likewise
//                    along columns)
//   nvfp4-pack-quantized  X.weight_packed (U8), X.weight_scale (F8_E4M3),
//                    X.weight_global_scale (F32 of [1], the inverse of the
//                    outer scale, rounded)
//   mxfp4-pack-quantized  X.weight_packed (U8), X.weight_scale (U8, E8M0)
//   mxfp8-quantized  X.weight (F8_E4M3), X.weight_scale (U8, E8M0)
//   naive-quantized  as int-quantized or float-quantized
//
// Scales of E8M0 may be F8_E8M0 in files of others, and theirs may have
// X.weight_g_idx (I32, the group of each column).
//
// How X's inputs are quantized: X.input_scale (F32), X.input_zero_point (I8),
// or X.input_global_scale (F32) of NVFP4, each of [1].
//
// Scales are of [1], of [rows, 1], or as many as groups or blocks. The folder's
// config.json says which module has what, in "quantization_config".

#ifndef QUANTD_CLIENT_MODELS_COMPRESSED_TENSORS_H_
#define QUANTD_CLIENT_MODELS_COMPRESSED_TENSORS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/tensor.h"
#include "client/files/dtype.h"
#include "client/files/json.h"
#include "nlohmann/json.hpp"

namespace quantd {

// Elements of a group of NVFP4, and of the MX formats.
constexpr int64_t kNvfp4Group = 16;
constexpr int64_t kMxGroup = 32;

// Number of int32 that hold so many codes of `bits` bits, one behind the other.
inline int64_t PackedWords(int64_t codes, int64_t bits) {
  return codes * bits / 32 + (codes * bits % 32 != 0);
}

// The file of a model's folder that says how the model is quantized.
constexpr char kModelConfigName[] = "config.json";

// Metadata of a file that quantctl wrote: the element type that each tensor
// came from, by this and the tensor's name.
constexpr absl::string_view kElementTypeKeyPrefix = "quantctl.element_type.";

constexpr absl::string_view kCompressedWeight = ".weight";
constexpr int kMostCompressedBits = 8;

// A tensor of the file. Plain value.
struct CompressedPart {
  std::string name;
  files::Dtype dtype;
  std::vector<int64_t> shape;
};

// A tensor of the file with its bytes.
struct CompressedData {
  CompressedPart part;
  std::vector<uint8_t> data;
};

// How a quantized tensor lies in the file. Plain value.
struct CompressedLayout {
  FormatInfo format;
  bool is_nvfp4 = false;
  bool is_mxfp4 = false;
  // With scales of powers of two.
  bool is_mxfp8 = false;
  bool is_float8 = false;
  bool is_packed = false;
  // Symmetric as others mean it: without zero points, codes lie around 0. Codes
  // of unsigned formats do not once they are signed.
  bool is_symmetric = true;
  // Scales along each dimension, and in all.
  std::vector<int64_t> blocks;
  int64_t count = 0;
  // The scheme of the module in config.json.
  files::Json module;
  std::vector<CompressedPart> parts;
};

// The layout of a tensor whose encoding is `encoding`, which may lack its
// scales.
// Errors: ARGUMENT_INVALID for what the layout does not hold.
absl::StatusOr<CompressedLayout> CompressedLayoutOf(
    const std::string& name, const std::vector<int64_t>& shape,
    const Encoding& encoding, bool has_zero_points, bool packs_all);

// True if zero points are packed: those of a matrix with a scale for each group
// or row.
bool PacksZeroPoints(const CompressedLayout& layout);

// The module of "MODULE.weight"; empty for another name.
absl::string_view ModuleOf(absl::string_view tensor);

// Checks that the groups that share a scale divide the rows of a matrix, as
// readers of these models take them.
// Errors: ARGUMENT_INVALID.
absl::Status CheckGroups(const EncodingSpec& spec,
                         const std::vector<int64_t>& shape);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_COMPRESSED_TENSORS_H_
