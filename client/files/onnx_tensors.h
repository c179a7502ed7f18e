// The weights of an ONNX model as tensors; onnx_model.h has whole models.

#ifndef QUANTD_CLIENT_FILES_ONNX_TENSORS_H_
#define QUANTD_CLIENT_FILES_ONNX_TENSORS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/files/mapped_file.h"
#include "client/files/safetensors.h"

namespace quantd::files {

// A checked model, mapped, and the files beside it that hold its data.
// Immutable, thread-safe.
class OnnxTensors {
 public:
  // The choice for data that are in other files.
  enum class OtherFiles {
    kOpen,
    // Such tensors have their shapes and no data.
    kLeave,
  };

  // Errors: FILE_UNREADABLE, FILE_UNSUPPORTED, FILE_MALFORMED. Files of data
  // must be in the model's folder or in folders of that.
  static absl::StatusOr<OnnxTensors> Open(
      const std::string& path, OtherFiles other_files = OtherFiles::kOpen);

  // Initializers of the main graph and the tensors of its Constant nodes, which
  // have the names of what these give, in the order of the file. Data point
  // into the files. Data of fewer than 32 bits that the model keeps as integers
  // of 32 bits are copied.
  const std::vector<FileTensor>& tensors() const { return tensors_; }
  // Tensors that are not read: their type is not known, or they are sparse.
  const std::vector<UnreadTensor>& unread() const { return unread_; }
  // Floats, more than one, that are elsewhere: in graphs within nodes, in
  // functions, in attributes of other nodes.
  const std::vector<UnreadTensor>& elsewhere() const { return elsewhere_; }
  // An initializer or Constant that a node takes as codes, as it is or in
  // another form; empty where there is none.
  const std::string& codes() const { return codes_; }
  // Integers that a Cast and a Mul make floats of: codes, it may be, and what
  // would be their scales.
  struct CastCodes {
    std::string codes;
    std::string scales;
  };
  const std::vector<CastCodes>& cast_codes() const { return cast_codes_; }
  // The files of data that the model names, opened or not: tensors that are
  // not read may have theirs there too. Those that were not opened need not be
  // there.
  const std::vector<std::string>& data_paths() const { return data_paths_; }

 private:
  class Parser;

  OnnxTensors() = default;

  // The model first.
  std::vector<MappedFile> files_;
  // Copied data.
  std::vector<std::vector<uint8_t>> copies_;
  std::vector<FileTensor> tensors_;
  std::vector<UnreadTensor> unread_;
  std::vector<UnreadTensor> elsewhere_;
  std::string codes_;
  std::vector<CastCodes> cast_codes_;
  std::vector<std::string> data_paths_;
};

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_ONNX_TENSORS_H_
