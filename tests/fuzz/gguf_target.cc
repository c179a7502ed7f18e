#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/gguf.h"
#include "client/files/gguf_types.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/support/gguf_bytes.h"

namespace quantd::fuzz {
namespace gguf_target {
namespace {

using testing::GgufText;
using testing::LittleEndian;

void Run(absl::Span<const uint8_t> input) {
  const MemoryFile file(input);
  const absl::StatusOr<files::GgufReader> reader =
      files::GgufReader::Open(file.path());
  if (!reader.ok()) return;
  size_t data_bytes = 0;
  for (const files::GgufTensor& tensor : reader->tensors()) {
    data_bytes += tensor.data.size();
    Require(data_bytes <= input.size(),
            "the tensors' data are parts of the file, each of its own");
    if (tensor.type == nullptr) {
      Require(tensor.data.empty(), "what is not known has no data");
    } else if (tensor.type->IsPlain()) {
      Require(files::TensorSizeBytes(*tensor.type->dtype, tensor.shape) ==
                  static_cast<int64_t>(tensor.data.size()),
              "a tensor has the bytes of its shape");
    } else {
      Require(files::TensorSizeBytes(files::Dtype::kF32, tensor.shape) ==
                  static_cast<int64_t>(files::DequantizeGguf(tensor).size() *
                                       sizeof(float)),
              "a tensor has the elements of its shape");
    }
  }
}

// A file with one tensor of two dimensions.
std::string File(uint32_t version, const std::string& pairs,
                 uint64_t pair_count, uint32_t type, uint64_t inner,
                 size_t data_bytes) {
  std::string file = absl::StrCat(
      "GGUF", LittleEndian(version), LittleEndian(uint64_t{1}),
      LittleEndian(pair_count), pairs, GgufText("weight"),
      LittleEndian(uint32_t{2}), LittleEndian(inner), LittleEndian(uint64_t{2}),
      LittleEndian(type), LittleEndian(uint64_t{0}));
  file.resize((file.size() + 31) / 32 * 32);
  for (size_t i = 0; i < data_bytes; ++i) {
    file.push_back(static_cast<char>(i * 37));
  }
  return file;
}

std::vector<std::string> Seeds() {
  const std::string alignment =
      absl::StrCat(GgufText("general.alignment"), LittleEndian(uint32_t{4}),
                   LittleEndian(uint32_t{32}));
  const std::string list = absl::StrCat(
      GgufText("tokens"), LittleEndian(uint32_t{9}), LittleEndian(uint32_t{8}),
      LittleEndian(uint64_t{2}), GgufText("a"), GgufText("bc"));
  std::vector<std::string> seeds = {
      "",
      File(3, "", 0, 0, 3, 24),
      File(2, "", 0, 1, 3, 12),
      File(3, alignment, 1, 30, 3, 12),
      File(3, alignment + list, 2, 8, 32, 68),
      File(3, list, 1, 2, 64, 72),
      // What is to be refused: data that are missing, shapes past 2^63, half a
      // block, a type that is none any more, an alignment of 0, one that
      // is said twice, an endless list.
      File(3, "", 0, 8, 32, 67),
      File(3, "", 0, 14, 256, 100),
      File(3, "", 0, 2, uint64_t{1} << 62, 8),
      File(3, "", 0, 19, uint64_t{1} << 55, 100),
      File(3, "", 0, 12, 128, 144),
      File(3, "", 0, 4, 32, 100),
      File(1, "", 0, 0, 1, 8),
      File(3,
           absl::StrCat(GgufText("general.alignment"),
                        LittleEndian(uint32_t{4}), LittleEndian(uint32_t{0})),
           1, 0, 1, 8),
      File(3, alignment + alignment, 2, 30, 3, 12),
      File(3,
           absl::StrCat(GgufText("k"), LittleEndian(uint32_t{9}),
                        LittleEndian(uint32_t{8}), LittleEndian(~uint64_t{0})),
           1, 0, 1, 8),
  };
  // Two blocks of every type.
  for (const files::GgufType& type : files::GgufTypes()) {
    seeds.push_back(File(3, "", 0, type.number,
                         static_cast<uint64_t>(type.block_elements),
                         static_cast<size_t>(2 * type.block_bytes)));
  }
  return seeds;
}

}  // namespace
}  // namespace gguf_target

FuzzTarget GgufTarget() {
  return {"gguf", gguf_target::Run, gguf_target::Seeds};
}

}  // namespace quantd::fuzz
