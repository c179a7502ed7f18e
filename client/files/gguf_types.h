// The types of ggml's tensors, one row each.

#ifndef QUANTD_CLIENT_FILES_GGUF_TYPES_H_
#define QUANTD_CLIENT_FILES_GGUF_TYPES_H_

#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/files/dtype.h"

namespace quantd::files {

// Elements lie in blocks along the innermost dimension. Plain value.
struct GgufType {
  // Number of the type in files.
  uint32_t number;
  // Name that ggml uses, e.g. "q4_K".
  absl::string_view name;
  int64_t block_elements;
  int64_t block_bytes;
  // Writes the elements of one block, the same bits as ggml does. Null for
  // plain types.
  void (*decode)(const uint8_t* block, float* elements);
  // Type of the elements of plain types, whose blocks are single elements.
  std::optional<Dtype> dtype;

  bool IsPlain() const { return dtype.has_value(); }
};

// All types, in the order of their numbers.
absl::Span<const GgufType> GgufTypes();

// Null for a number, a name or a plain type that no type has.
const GgufType* FindGgufType(uint32_t number);
const GgufType* FindGgufType(absl::string_view name);
const GgufType* FindGgufType(Dtype dtype);

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_GGUF_TYPES_H_
