// Elements as the bytes that they lie in, and back.

#ifndef QUANTD_CLIENT_CPP_ELEMENT_BYTES_H_
#define QUANTD_CLIENT_CPP_ELEMENT_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "absl/types/span.h"

namespace quantd {

// The bytes of a vector, a text or a repeated field, which must stay.
template <typename Values>
absl::Span<const uint8_t> BytesOf(const Values& values) {
  return absl::MakeConstSpan(
      reinterpret_cast<const uint8_t*>(values.data()),
      static_cast<size_t>(values.size()) * sizeof(*values.data()));
}

// Elements of a file or a message, which need not be aligned. Bytes after the
// last whole element are left out.
template <typename T>
std::vector<T> CopyElements(absl::Span<const uint8_t> bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) {
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  }
  return values;
}

}  // namespace quantd

#endif  // QUANTD_CLIENT_CPP_ELEMENT_BYTES_H_
