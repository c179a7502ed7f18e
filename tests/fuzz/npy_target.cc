#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/npy.h"
#include "tests/fuzz/fuzz_target.h"

namespace quantd::fuzz {
namespace npy_target {
namespace {

void Run(absl::Span<const uint8_t> input) {
  const MemoryFile file(input);
  const absl::StatusOr<files::NpyReader> reader =
      files::NpyReader::Open(file.path());
  if (!reader.ok()) return;
  const absl::Span<const uint8_t> data = reader->data();
  Require(files::TensorSizeBytes(reader->dtype(), reader->shape()) ==
              static_cast<int64_t>(data.size()),
          "an array has the bytes of its shape");
  Require(data.size() <= input.size() && data == input.last(data.size()),
          "an array's data are the end of the file");
}

// `length_bytes` is 2 in version 1 and 4 in the later ones.
std::string File(int version, const std::string& header, size_t data_bytes) {
  std::string file = "\x93NUMPY";
  file.push_back(static_cast<char>(version));
  file.push_back('\0');
  const size_t length_bytes = version == 1 ? 2 : 4;
  for (size_t i = 0; i < length_bytes; ++i) {
    file.push_back(static_cast<char>(header.size() >> (8 * i)));
  }
  file += header;
  file.append(data_bytes, '\x3c');
  return file;
}

std::vector<std::string> Seeds() {
  const std::string order = "'fortran_order': False, ";
  std::vector<std::string> seeds = {
      "",
      File(1, "{'descr': '<f4', " + order + "'shape': (2, 3), }    \n", 24),
      File(2, "{'descr': '<f8', " + order + "'shape': (), }\n", 8),
      File(3, "{'shape': (3,), " + order + "\"descr\": \"|u1\"}\n", 3),
      File(1, "{'descr': '<f2', " + order + "'shape': (0, 7)}\n", 0),
      File(1, "{'descr': '<i8', " + order + "'shape': (1L,), }\n", 8),
      // What is to be refused.
      File(1, "{'descr': '>f4', " + order + "'shape': (1,), }\n", 4),
      File(1, "{'descr': '<f4', 'fortran_order': True, 'shape': (1, 2), }\n",
           8),
      File(1, "{'descr': [('a', '<f4')], " + order + "'shape': (1,), }\n", 4),
      File(1,
           "{'descr': '<f8', " + order +
               "'shape': (4294967296, 4294967296), }\n",
           8),
      File(1, "{'descr': '|O', " + order + "'shape': (-1,), }\n", 8),
      File(9, "{}\n", 0),
  };
  for (const char* descr : {"|b1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8"}) {
    seeds.push_back(File(1,
                         std::string("{'descr': '") + descr + "', " + order +
                             "'shape': (8,), }\n",
                         8));
  }
  return seeds;
}

}  // namespace
}  // namespace npy_target

FuzzTarget NpyTarget() { return {"npy", npy_target::Run, npy_target::Seeds}; }

}  // namespace quantd::fuzz
