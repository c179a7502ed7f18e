// ONNX models, and QuantizeLinear and DequantizeLinear put into them.

#ifndef QUANTD_CLIENT_FILES_ONNX_MODEL_H_
#define QUANTD_CLIENT_FILES_ONNX_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/atomic_file.h"
#include "client/files/dtype.h"

namespace quantd::files {

// One model in memory. Not thread-safe.
class OnnxModel {
 public:
  // An initializer of the main graph, or the tensor of one of its Constant
  // nodes, which becomes one.
  struct Weight {
    std::string name;
    // Nothing for types that are not floats.
    std::optional<Dtype> dtype;
    std::vector<int64_t> shape;
    // Row-major, little-endian. Stays until the weight is quantized.
    absl::Span<const uint8_t> data;
  };

  // A value of the main graph that is not an initializer.
  struct Activation {
    // Nothing where the model does not tell the type, or it is no float.
    std::optional<Dtype> dtype;
    bool has_type = false;
    // Set where the model tells it.
    std::optional<int64_t> rank;
  };

  // A node of the main graph.
  struct Node {
    std::string name;
    std::string op_type;
    std::vector<std::string> inputs;
    std::vector<std::string> outputs;
    // For a Gemm: true if it takes the transpose of its first, or second,
    // input.
    bool transposes_a = false;
    bool transposes_b = false;
    // For a Gemm: factors of its product and of its bias.
    float alpha = 1;
    float beta = 1;
    // For a Transpose: the dimension of its input that each of its output is;
    // empty for the reverse order.
    std::vector<int64_t> permutation = {};
  };

  // Parameters of QuantizeLinear and DequantizeLinear.
  struct Quantizer {
    // Type of the codes, as quantd calls it: "int8", "uint4", "float8_e4m3fn".
    std::string type;
    std::vector<float> scale;
    // One for each scale; none for floats.
    std::vector<int32_t> zero_point;
    // Shape of the scales: empty per tensor, [n] per axis, otherwise in blocks.
    std::vector<int64_t> scale_shape;
    int64_t axis = 0;
    // 0 without blocks.
    int64_t block_size = 0;
    // Scales that are codes themselves: the codes, packed as ONNX has them, and
    // what they stand for, one Quantizer. `scale` and `zero_point` are empty
    // then.
    std::vector<uint8_t> scale_code;
    std::vector<Quantizer> of_scales;
    // For float8: true if what is out of range becomes the largest code.
    bool saturates = true;
  };

  // Takes in the data that initializers of the main graph have in other files.
  // Errors: FILE_UNREADABLE, FILE_UNSUPPORTED, FILE_MALFORMED.
  static absl::StatusOr<OnnxModel> Open(const std::string& path);

  OnnxModel(OnnxModel&& other) noexcept;
  OnnxModel& operator=(OnnxModel&& other) noexcept;
  ~OnnxModel();

  const std::vector<Weight>& weights() const { return weights_; }
  const Weight* FindWeight(absl::string_view name) const;
  std::vector<Node> nodes() const;
  // An input or a node's output of the main graph; nothing for any other name.
  // One whose type the model does not tell is float32 if nothing in the model
  // is of another type of floats.
  std::optional<Activation> FindActivation(absl::string_view name) const;

  // True if ONNX has that type of codes.
  static bool HasType(absl::string_view type);

  // Replaces a weight by its codes, packed as ONNX has them, and a
  // DequantizeLinear that gives the weight its name; for a type other than
  // float32 with a Cast behind it. Scales that are codes have a
  // DequantizeLinear of their own. Requires: FindWeight(name), of float32,
  // float16 or bfloat16; HasType.
  void QuantizeWeight(absl::string_view name, const Quantizer& quantizer,
                      absl::Span<const uint8_t> codes);
  // Gives a node, as one input, codes of int32 under a DequantizeLinear, with
  // one scale or one for each code, in place of an initializer. Other nodes
  // keep that.
  // Requires: indices into nodes() and its inputs.
  void QuantizeBias(size_t node, size_t input, absl::Span<const float> scales,
                    absl::Span<const int32_t> codes);
  // Puts QuantizeLinear and DequantizeLinear behind an activation, between
  // Casts where it is not float32: scales stay float32.
  // Requires: FindActivation(name), of float32, float16 or bfloat16; HasType;
  // no codes of scales.
  void QuantizeActivation(absl::string_view name, const Quantizer& quantizer);

  // The version of the operators.
  int64_t opset() const;

  // Raises the version of the operators as far as is needed and writes the
  // model.
  // Errors: FILE_UNSUPPORTED (an operator of the model means something else in
  // the version that is needed; a version before 7; data in other files that
  // were not taken in; over 2 GiB); FILE_EXISTS, FILE_UNWRITABLE.
  absl::Status Write(const std::string& path, IfExists if_exists);

 private:
  struct Graph;

  explicit OnnxModel(std::unique_ptr<Graph> graph);

  // Adds scale and zero point; returns the inputs behind the first.
  std::vector<std::string> AddParameters(const std::string& name,
                                         const Quantizer& quantizer);
  // Takes out initializers of biases that nothing takes any more.
  void DropReplaced();
  // Notes the version that a Cast from and to that type takes.
  void NeedCast(Dtype dtype);
  absl::Status RaiseOpset(const std::string& path);

  std::unique_ptr<Graph> graph_;
  std::vector<Weight> weights_;
  int64_t needed_opset_ = 0;
};

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_ONNX_MODEL_H_
