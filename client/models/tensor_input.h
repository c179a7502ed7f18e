// The tensors of an input file or folder.

#ifndef QUANTD_CLIENT_MODELS_TENSOR_INPUT_H_
#define QUANTD_CLIENT_MODELS_TENSOR_INPUT_H_

#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/tensor.h"
#include "client/files/gguf.h"
#include "client/files/npy.h"
#include "client/files/onnx_tensors.h"
#include "client/files/safetensors.h"

namespace quantd {

// True for a path that ends with ".npy".
bool IsNpyPath(absl::string_view path);

// True for a path that ends with ".gguf".
bool IsGgufPath(absl::string_view path);

// True for a path that ends with ".onnx".
bool IsOnnxPath(absl::string_view path);

// The file's name without folders and extension.
std::string FileStem(absl::string_view path);

// The tensors of a file or folder. Thread-safe while nobody calls Replace.
//
//   safetensors  its tensors; of a folder, those of all files of the model
//   .npy         one tensor, named by the file's stem
//   .gguf        its tensors; blocks are float32 in memory
//   .onnx        initializers and Constants of the main graph
class TensorInput {
 public:
  // Errors: of files::SafetensorsReader, files::NpyReader, files::GgufReader,
  // files::OnnxTensors and files::ReadShardIndex.
  static absl::StatusOr<TensorInput> Open(const std::string& path);

  // In order of their data; valid while this lives.
  const std::vector<files::FileTensor>& tensors() const { return tensors_; }
  const files::FileTensor* Find(absl::string_view name) const;
  // Tensors that are blocks of GGUF in the file, by their names.
  const std::map<std::string, files::GgufTensor>& blocks() const {
    return blocks_;
  }
  // Null for anything but a GGUF file.
  const files::GgufReader* gguf() const;
  // Initializer that an ONNX model takes as codes; empty where there is none.
  const std::string& onnx_codes() const { return onnx_codes_; }
  // Tensors of an ONNX model that may be codes and that it multiplies by their
  // scales.
  const std::vector<files::OnnxTensors::CastCodes>& onnx_cast_codes() const {
    return onnx_cast_codes_;
  }
  // Tensors that tensors() leaves out: types that are not known, and weights of
  // an ONNX model that are elsewhere than in its main graph.
  const std::vector<files::UnreadTensor>& unread() const { return unread_; }
  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }
  // Puts other tensors in the place of those of these names, which need not all
  // be there, and other metadata. They lie as a file that has the new ones
  // first has them.
  void Replace(const std::vector<std::string>& names,
               std::vector<files::FileTensor> tensors,
               std::map<std::string, std::string> metadata);
  // The files that hold the input, with the data of an ONNX model and the index
  // of a folder, and that folder. Not all of them need be there.
  const std::vector<std::string>& paths() const { return paths_; }

 private:
  TensorInput() = default;

  // Adds the tensors of a safetensors file.
  absl::Status Add(const std::string& path);
  absl::Status AddGguf(const std::string& path);
  absl::Status AddOnnx(const std::string& path);
  // Puts tensors of wider elements first; makes the index.
  void Sort();

  // The files that tensors_ point into.
  std::vector<std::variant<files::SafetensorsReader, files::NpyReader,
                           files::GgufReader, files::OnnxTensors>>
      files_;
  std::vector<std::vector<float>> dequantized_;
  std::map<std::string, files::GgufTensor> blocks_;
  std::vector<files::FileTensor> tensors_;
  std::string onnx_codes_;
  std::vector<files::OnnxTensors::CastCodes> onnx_cast_codes_;
  std::vector<files::UnreadTensor> unread_;
  std::vector<std::string> paths_;
  absl::flat_hash_map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// The element type of a file's type; nothing when quantd does not quantize it.
std::optional<ElementType> ElementTypeOf(files::Dtype dtype);
files::Dtype DtypeOf(ElementType type);

// The tensor as the client takes it.
// Requires: ElementTypeOf(tensor.dtype) has a value.
Tensor MakeTensor(const files::FileTensor& tensor, TensorName name);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_TENSOR_INPUT_H_
