#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/onnx_tensors.h"
#include "client/files/safetensors.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/support/onnx_bytes.h"

namespace quantd::fuzz {
namespace onnx_target {
namespace {

using testing::BytesField;
using testing::NumberField;
using testing::OnnxExternal;
using testing::OnnxInitializer;
using testing::OnnxModelOf;
using testing::OnnxNode;
using testing::Varint;

void Run(absl::Span<const uint8_t> input) {
  const MemoryFile file(input);
  const absl::StatusOr<files::OnnxTensors> model =
      files::OnnxTensors::Open(file.path());
  if (!model.ok()) return;
  uint64_t sum = 0;
  for (const files::FileTensor& tensor : model->tensors()) {
    Require(files::TensorSizeBytes(tensor.dtype, tensor.shape) ==
                static_cast<int64_t>(tensor.data.size()),
            "a tensor has the bytes of its shape");
    Require(!tensor.name.empty(), "a tensor has a name");
    // Reads them all.
    for (const uint8_t byte : tensor.data) sum += byte;
  }
  Require(sum < ~uint64_t{0}, "the data can be read");
}

std::vector<std::string> Seeds() {
  const std::string raw = BytesField(9, "abcdefgh");
  return {
      "",
      OnnxModelOf(OnnxInitializer("w", 1, {2, 1}, raw)),
      OnnxModelOf(
          absl::StrCat(OnnxNode("DequantizeLinear", {"c", "s"}, "w"),
                       OnnxInitializer("c", 3, {8}, raw),
                       OnnxInitializer("s", 1, {}, BytesField(4, "abcd")),
                       BytesField(15, BytesField(1, BytesField(8, "sparse"))))),
      OnnxModelOf(OnnxInitializer("h", 10, {2},
                                  BytesField(5, Varint(0x3c00) + Varint(7)))),
      OnnxModelOf(OnnxInitializer(
          "i", 7, {3}, NumberField(7, ~uint64_t{0}) + BytesField(7, "ab"))),
      OnnxModelOf(OnnxInitializer("d", 11, {1}, BytesField(10, "abcdefgh"))),
      OnnxModelOf(OnnxInitializer("e", 1, {2}, OnnxExternal("x", "0", "8"))),
      OnnxModelOf(OnnxInitializer("e", 1, {2}, OnnxExternal("../x", "0", "8"))),
      OnnxModelOf(OnnxInitializer("w", 8, {1}, raw)),
      OnnxModelOf(OnnxInitializer("w", 1, {-2}, raw)),
  };
}

}  // namespace
}  // namespace onnx_target

FuzzTarget OnnxTarget() {
  return {"onnx", onnx_target::Run, onnx_target::Seeds};
}

}  // namespace quantd::fuzz
