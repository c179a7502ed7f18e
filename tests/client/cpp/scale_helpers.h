// What the tests of scales share.

#ifndef QUANTD_TESTS_CLIENT_CPP_SCALE_HELPERS_H_
#define QUANTD_TESTS_CLIENT_CPP_SCALE_HELPERS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "client/cpp/tensor.h"

namespace quantd {

template <typename T>
absl::Span<const uint8_t> BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()),
          values.size() * sizeof(T)};
}

// Without scales.
inline Encoding MakeEncoding(v1::NumberFormat format,
                             const std::vector<int64_t>& block_size) {
  Encoding encoding;
  encoding.set_format(format);
  encoding.mutable_block_size()->Assign(block_size.begin(), block_size.end());
  return encoding;
}

}  // namespace quantd

#endif  // QUANTD_TESTS_CLIENT_CPP_SCALE_HELPERS_H_
