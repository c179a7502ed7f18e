// Writes the tensors and the configuration of a compressed-tensors model.

#ifndef QUANTD_CLIENT_MODELS_COMPRESSED_MODEL_H_
#define QUANTD_CLIENT_MODELS_COMPRESSED_MODEL_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/files/dtype.h"
#include "client/files/json.h"
#include "client/models/compressed_tensors.h"
#include "nlohmann/json.hpp"

namespace quantd {

// How the inputs of a module are quantized. Plain value.
struct ModuleInputs {
  // "input_activations" of config.json; null where inputs are not quantized.
  files::Json arguments;
  // Tensors that the file has beside the weights.
  std::vector<CompressedData> parts;
};

// How a tensor will lie in the file. Plain value.
struct CompressedPlan {
  std::vector<CompressedPart> parts;
  // The scheme of the module in config.json.
  files::Json module;
};

// Writes the tensors of one model. Not thread-safe.
class CompressedModel {
 public:
  // `packs_all`: pack-quantized for 8 bits too, which otherwise are
  // int-quantized. `input_arguments`: ModuleInputs::arguments of all modules.
  explicit CompressedModel(bool packs_all,
                           files::Json input_arguments = nullptr)
      : packs_all_(packs_all), input_arguments_(std::move(input_arguments)) {}

  // Adds a tensor to the file.
  using Add = absl::FunctionRef<absl::Status(
      const std::string& name, files::Dtype dtype,
      const std::vector<int64_t>& shape, absl::Span<const uint8_t> data)>;

  // The parts that Write will add for a tensor whose encoding will be
  // `expected`.
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
  void Restore(const files::Json& modules) { modules_.update(modules); }
  // Scheme by module.
  const files::Json& modules() const { return modules_; }

  // The "quantization_config" of what was written. Readers take no module of a
  // matrix that is neither in it nor ignored: `ignored` are those that were
  // left as they are. ModulesOfLayer are in it for all experts. `cache` is the
  // "kv_cache_scheme".
  files::Json Config(const std::vector<std::string>& ignored,
                     const files::Json& cache) const;

 private:
  // The scheme of a module in config.json.
  files::Json ModuleOfLayout(files::Json module) const;

  const bool packs_all_;
  const files::Json input_arguments_;
  files::Json modules_ = files::Json::object();
  int64_t rounded_count_ = 0;
};

// True if dividing the E4M3 scales by `global` gives the same floats as
// multiplying them with `outer`.
bool IsExactInverse(float global, float outer);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_COMPRESSED_MODEL_H_
