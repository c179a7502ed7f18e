#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/safetensors.h"
#include "tests/fuzz/fuzz_target.h"

namespace quantd::fuzz {
namespace safetensors_target {
namespace {

constexpr size_t kLengthBytes = 8;

void Run(absl::Span<const uint8_t> input) {
  const MemoryFile file(input);
  const absl::StatusOr<files::SafetensorsReader> reader =
      files::SafetensorsReader::Open(file.path());
  if (!reader.ok()) return;
  Require(input.size() >= kLengthBytes, "a file has the length of its header");
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    header_bytes |= static_cast<uint64_t>(input[i]) << (8 * i);
  }
  // The tensors are the rest of the file, one after the other.
  absl::Span<const uint8_t> rest = input.subspan(kLengthBytes + header_bytes);
  for (const files::FileTensor& tensor : reader->tensors()) {
    Require(files::TensorSizeBytes(tensor.dtype, tensor.shape) ==
                static_cast<int64_t>(tensor.data.size()),
            "a tensor has the bytes of its shape");
    Require(tensor.data.size() <= rest.size() &&
                tensor.data == rest.first(tensor.data.size()),
            "a tensor's data are those of the file");
    rest.remove_prefix(tensor.data.size());
    const files::FileTensor* const found = reader->Find(tensor.name);
    Require(found == &tensor, "a tensor is found by its name");
  }
  Require(rest.empty(), "all data belong to tensors");
}

std::string File(const std::string& header, size_t data_bytes) {
  std::string file;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    file.push_back(static_cast<char>(header.size() >> (8 * i)));
  }
  file += header;
  for (size_t i = 0; i < data_bytes; ++i) {
    file.push_back(static_cast<char>(i * 37));
  }
  return file;
}

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds = {
      "",
      File("{}", 0),
      File(R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", 24),
      File(R"({"__metadata__":{"format":"pt","k":""},)"
           R"("w":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}   )",
           2),
      File(R"({"b":{"dtype":"I64","shape":[1],"data_offsets":[5,13]},)"
           R"("a\u00e9\n":{"dtype":"BOOL","shape":[5],"data_offsets":[0,5]},)"
           R"("e":{"dtype":"F8_E4M3","shape":[0,9],"data_offsets":[5,5]}})",
           13),
      // What is to be refused: overlaps, products past 2^63, negative and
      // fractional numbers, nesting, a name twice.
      File(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
           R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
           3),
      File(R"({"a":{"dtype":"F64","shape":[4294967296,4294967296],)"
           R"("data_offsets":[0,0]}})",
           0),
      File(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1.5]}})", 1),
      File(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
           R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
           1),
      File(std::string(300, '['), 0),
  };
  for (const char* dtype : {"U8", "I8", "F8_E5M2", "I16", "U16", "F16", "I32",
                            "U32", "F64", "U64"}) {
    seeds.push_back(
        File(absl::StrCat(R"({"t":{"dtype":")", dtype,
                          R"(","shape":[1],"data_offsets":[0,1]}})"),
             1));
  }
  return seeds;
}

}  // namespace
}  // namespace safetensors_target

FuzzTarget SafetensorsTarget() {
  return {"safetensors", safetensors_target::Run, safetensors_target::Seeds};
}

}  // namespace quantd::fuzz
