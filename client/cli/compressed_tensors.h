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
// How X's inputs are quantized: X.input_scale (F32), X.input_zero_point (I8),
// or X.input_global_scale (F32) of NVFP4, each of [1].
//
// Scales are of [1], of [rows, 1], or as many as groups or blocks. The folder's
// config.json says which module has what, in "quantization_config".

#ifndef QUANTD_CLIENT_CLI_COMPRESSED_TENSORS_H_
#define QUANTD_CLIENT_CLI_COMPRESSED_TENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cli/session.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/files/safetensors.h"
#include "client/models/quantized_layout.h"
#include "client/models/tensor_input.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {

// Of a model's folder; says how it is quantized.
constexpr char kModelConfigName[] = "config.json";

// Metadata of a file that quantctl wrote: the element type that each tensor
// came from, by this and the tensor's name.
constexpr absl::string_view kElementTypeKeyPrefix = "quantctl.element_type.";

// A tensor of the file. Plain value.
struct CompressedPart {
  std::string name;
  files::Dtype dtype;
  std::vector<int64_t> shape;
};

// The same with what it holds.
struct CompressedData {
  CompressedPart part;
  std::vector<uint8_t> data;
};

// How the inputs of a module are quantized. Plain value.
struct ModuleInputs {
  // As in config.json; null where they are not.
  Json arguments;
  // What the file has beside the weights.
  std::vector<CompressedData> parts;
};

// How a tensor will lie in the file. Plain value.
struct CompressedPlan {
  std::vector<CompressedPart> parts;
  // What config.json says of the module.
  Json module;
};

// Writes the tensors of one model. Not thread-safe.
class CompressedModel {
 public:
  // `packs_all`: pack-quantized for 8 bits too, which otherwise are
  // int-quantized. `input_arguments`: ModuleInputs::arguments of all modules.
  explicit CompressedModel(bool packs_all, Json input_arguments = nullptr)
      : packs_all_(packs_all), input_arguments_(std::move(input_arguments)) {}

  // Adds a tensor to the file.
  using Add = absl::FunctionRef<absl::Status(
      const std::string& name, files::Dtype dtype,
      const std::vector<int64_t>& shape, absl::Span<const uint8_t> data)>;

  // What Write will add for a tensor whose encoding will be `expected`.
  // Errors: ARGUMENT_INVALID for what the layout does not hold.
  absl::StatusOr<CompressedPlan> PlanOf(const std::string& name,
                                        const std::vector<int64_t>& shape,
                                        const Encoding& expected) const;

  // Writes one quantized tensor. The scales are not looked for in the encoding.
  // Returns its size in bytes with all that lies beside the codes.
  // Errors: of `add`; ARGUMENT_INVALID for what the layout does not hold.
  absl::StatusOr<uint64_t> Write(const std::string& name,
                                 const std::vector<int64_t>& shape,
                                 const Encoding& encoding, const Scales& scales,
                                 absl::Span<const uint8_t> codes, Add add);

  // How many of them are NVFP4 that other readers take for slightly other
  // reals: they divide by weight_global_scale, the inverse of the outer scale.
  int64_t rounded_count() const { return rounded_count_; }

  // Takes over what an earlier run wrote of a model.
  void Restore(const Json& modules) { modules_.update(modules); }
  // Scheme by module.
  const Json& modules() const { return modules_; }

  // The "quantization_config" of what was written. Readers take no module of a
  // matrix that is neither in it nor ignored: `ignored` are those that were
  // left as they are. `cache` is the "kv_cache_scheme".
  Json Config(const std::vector<std::string>& ignored, const Json& cache) const;

 private:
  // What config.json says of a module.
  Json ModuleOfLayout(Json module) const;

  const bool packs_all_;
  const Json input_arguments_;
  Json modules_ = Json::object();
  int64_t rounded_count_ = 0;
};

// The module of "MODULE.weight"; empty for another name.
absl::string_view ModuleOf(absl::string_view tensor);

// Whether the groups that share a scale divide the rows of a matrix, as readers
// of these models take them.
// Errors: ARGUMENT_INVALID.
absl::Status CheckGroups(const EncodingSpec& spec,
                         const std::vector<int64_t>& shape);

// Whether dividing the E4M3 scales by `global` gives the same floats as
// multiplying them with `outer`.
bool IsExactInverse(float global, float outer);

// Reads all quantized tensors of a model. Empty where the folder has no
// config.json of compressed-tensors. A tensor has the element type that it came
// from, as the file, its scales or config.json tell it; otherwise float32.
// Errors: FILE_MALFORMED, FILE_UNSUPPORTED.
absl::StatusOr<std::vector<QuantizedTensor>> ReadCompressed(
    const TensorInput& input, const std::string& path);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_COMPRESSED_TENSORS_H_
