// The place of a tensor of a compressed-tensors model in a file that is being
// built.

#ifndef QUANTD_CLIENT_MODELS_COMPRESSED_PLACE_H_
#define QUANTD_CLIENT_MODELS_COMPRESSED_PLACE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"
#include "client/files/json.h"
#include "client/files/safetensors.h"
#include "client/files/safetensors_builder.h"
#include "client/models/compressed_model.h"

namespace quantd {

// The counterpart of QuantizedPlace, which is for quantd's own layout. Not
// thread-safe.
class CompressedPlace {
 public:
  // Reserves the parts of a tensor whose encoding will be `expected`, and those
  // of the inputs of its module; `inputs` and `builder` must stay. One that the
  // layout does not hold fails in Finish.
  // Errors: of files::SafetensorsBuilder.
  static absl::StatusOr<std::unique_ptr<CompressedPlace>> Reserve(
      uint64_t order, const files::FileTensor& tensor, const Encoding& expected,
      bool packs_all, const ModuleInputs& inputs,
      files::SafetensorsBuilder* builder);

  // Writes the tensor. Returns its size in bytes with all that lies beside the
  // codes.
  // Errors: ARGUMENT_INVALID for what the layout does not hold;
  // FILE_UNWRITABLE, FILE_MALFORMED.
  absl::StatusOr<uint64_t> Finish(const QuantizeResult& result);
  // Takes all of it from another file, which has its scheme in `modules`.
  // `path` is for errors.
  // Errors: FILE_UNWRITABLE; FILE_MALFORMED where that has something else.
  absl::Status CopyFrom(const files::SafetensorsReader& reader,
                        const std::string& path, const files::Json& modules);
  // Leaves out what is reserved and not written.
  void Drop();

  // The scheme of the module in config.json, as far as it is known before.
  const files::Json& expected_module() const { return plan_.module; }
  // The model with what was written.
  const CompressedModel& model() const { return model_; }

 private:
  CompressedPlace(uint64_t order, const files::FileTensor& tensor,
                  bool packs_all, const ModuleInputs& inputs,
                  files::SafetensorsBuilder* builder)
      : order_(order),
        tensor_(tensor),
        inputs_(inputs),
        builder_(builder),
        model_(packs_all, inputs.arguments) {}

  // Writes a part to its place. An encoding may have turned to the unsigned
  // format, whose parts are others.
  absl::Status AddPart(const std::string& name, files::Dtype dtype,
                       const std::vector<int64_t>& shape,
                       absl::Span<const uint8_t> data);

  const uint64_t order_;
  const files::FileTensor& tensor_;
  const ModuleInputs& inputs_;
  files::SafetensorsBuilder* const builder_;
  CompressedModel model_;
  // The parts that are reserved and not written, and their indices.
  CompressedPlan plan_;
  std::vector<size_t> indices_;
};

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_COMPRESSED_PLACE_H_
