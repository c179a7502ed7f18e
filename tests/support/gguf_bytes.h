// The parts that GGUF files are made of, for tests.

#ifndef QUANTD_TESTS_SUPPORT_GGUF_BYTES_H_
#define QUANTD_TESTS_SUPPORT_GGUF_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"

namespace quantd::testing {

// An integer, its lowest byte first.
template <typename T>
std::string LittleEndian(T value) {
  std::string bytes;
  for (size_t i = 0; i < sizeof(T); ++i) {
    bytes.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
  }
  return bytes;
}

// A string, its size before it.
inline std::string GgufText(const std::string& text) {
  return absl::StrCat(LittleEndian(uint64_t{text.size()}), text);
}

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_GGUF_BYTES_H_
