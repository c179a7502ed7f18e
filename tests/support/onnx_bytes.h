// The parts that ONNX models are made of, for tests.

#ifndef QUANTD_TESTS_SUPPORT_ONNX_BYTES_H_
#define QUANTD_TESTS_SUPPORT_ONNX_BYTES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace quantd::testing {

// A number as protobuf writes it.
inline std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 128; value >>= 7) {
    bytes.push_back(static_cast<char>((value & 127) | 128));
  }
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

// A field that is a number.
inline std::string NumberField(uint32_t field, uint64_t value) {
  return absl::StrCat(Varint(field << 3), Varint(value));
}

// A field that is a string, a message, or numbers all together.
inline std::string BytesField(uint32_t field, const std::string& bytes) {
  return absl::StrCat(Varint(field << 3 | 2), Varint(bytes.size()), bytes);
}

// An initializer, as a field of a graph. `data` are fields, too.
inline std::string OnnxInitializer(const std::string& name, uint64_t data_type,
                                   const std::vector<int64_t>& dims,
                                   const std::string& data) {
  std::string tensor;
  for (const int64_t size : dims) {
    tensor += NumberField(1, static_cast<uint64_t>(size));
  }
  return BytesField(5, absl::StrCat(tensor, NumberField(2, data_type), data,
                                    BytesField(8, name)));
}

// Data that are in another file; empty texts are left out.
inline std::string OnnxExternal(const std::string& location,
                                const std::string& offset,
                                const std::string& length) {
  std::string data = NumberField(14, 1);
  const auto add = [&data](const char* key, const std::string& value) {
    if (value.empty()) return;
    data += BytesField(13, BytesField(1, key) + BytesField(2, value));
  };
  add("location", location);
  add("offset", offset);
  add("length", length);
  return data;
}

// A node, as a field of a graph.
inline std::string OnnxNode(const std::string& op_type,
                            const std::vector<std::string>& inputs,
                            const std::string& output) {
  std::string node;
  for (const std::string& input : inputs) node += BytesField(1, input);
  return BytesField(
      1, absl::StrCat(node, BytesField(2, output), BytesField(4, op_type)));
}

// A model of the fields of its graph.
inline std::string OnnxModelOf(const std::string& graph) {
  return absl::StrCat(NumberField(1, 8), BytesField(7, graph),
                      BytesField(8, NumberField(2, 17)));
}

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_ONNX_BYTES_H_
