// How a quantized tensor lies in a safetensors file:
//
//   <name>              the codes. Packed formats: U8, one dimension of bytes.
//                       Others in the tensor's shape: I8, U8, I16 or U16;
//                       F8_E4M3 and F8_E5M2 for these two formats
//   <name>.scale        the scales, in their own shape and as they are stored:
//                       F32, F16, BF16, F8_E4M3 (e4m3), or U8 (e8m0, integer)
//   <name>.zero_point   I32, in the shape of the scales; only if one is not 0
//   <name>.outer_scale  F32, in the shape of the outer scales; only with e4m3
//                       and integer scales
//   <name>.codebook     F32; only of formats whose encoding has one of its own
//
// Metadata "quantd.<name>":
//
//   {"version": 1, "format": "int8", "shape": [..], "block_size": [..],
//    "qmin": .., "qmax": .., "exclude_zero": false, "element_type": "float32"}
//
// and, if they are not the default, "scale_type": "e8m0",
// "outer_block_size": [..], "no_saturation": true.

#ifndef QUANTD_CLIENT_MODELS_QUANTIZED_LAYOUT_H_
#define QUANTD_CLIENT_MODELS_QUANTIZED_LAYOUT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"
#include "client/files/lazy_bytes.h"
#include "client/files/safetensors.h"
#include "client/files/safetensors_builder.h"
#include "client/models/tensor_input.h"

namespace quantd {

constexpr absl::string_view kQuantizedKeyPrefix = "quantd.";
constexpr absl::string_view kScaleSuffix = ".scale";
constexpr absl::string_view kZeroPointSuffix = ".zero_point";
constexpr absl::string_view kOuterScaleSuffix = ".outer_scale";
constexpr absl::string_view kCodebookSuffix = ".codebook";
// Suffixes of all tensors that may lie beside the codes.
constexpr absl::string_view kSuffixes[] = {kScaleSuffix, kZeroPointSuffix,
                                           kOuterScaleSuffix, kCodebookSuffix};

// The type that scales have in a file.
files::Dtype ScaleDtype(v1::ScaleType type);

// Sets the scales of a tensor of F32, F16 or BF16, and their type; false for
// any other.
bool ReadScales(const files::FileTensor& tensor, Encoding* encoding);

// Metadata "quantd.<name>" of a tensor.
std::string QuantizedMetadata(ElementType element_type,
                              const std::vector<int64_t>& shape,
                              const Encoding& encoding);

// The place of one quantized tensor in a file that is being built. Thread-safe.
class QuantizedPlace {
 public:
  // Reserves the tensors of one whose encoding will be `expected`; `builder`
  // must stay.
  // Errors: of files::SafetensorsBuilder; ARGUMENT_INVALID for an encoding that
  // does not fit the shape.
  static absl::StatusOr<std::unique_ptr<QuantizedPlace>> Reserve(
      uint64_t order, const std::string& name, ElementType element_type,
      const std::vector<int64_t>& shape, const Encoding& expected,
      files::SafetensorsBuilder* builder);

  // Lets codes and scales go to their places; this must stay.
  void SetSinks(QuantizeJob* job);
  // Writes the rest of a tensor that came with that encoding, which is of the
  // size that was expected. Returns its size in bytes with all that lies beside
  // the codes.
  // Errors: FILE_UNWRITABLE, FILE_MALFORMED.
  absl::StatusOr<uint64_t> Finish(const Encoding& encoding);
  // Takes all of it from another file.
  // Errors: FILE_UNWRITABLE; FILE_MALFORMED where that has something else.
  absl::Status CopyFrom(const files::SafetensorsReader& reader);
  // Leaves the tensor out.
  void Drop();

 private:
  QuantizedPlace(std::string name, ElementType element_type,
                 std::vector<int64_t> shape, files::SafetensorsBuilder* builder)
      : name_(std::move(name)),
        element_type_(element_type),
        shape_(std::move(shape)),
        builder_(builder) {}

  const std::string name_;
  const ElementType element_type_;
  const std::vector<int64_t> shape_;
  files::SafetensorsBuilder* const builder_;
  // Index in the builder and size, by suffix; "" are the codes.
  struct Entry {
    absl::string_view suffix;
    size_t index;
    uint64_t size_bytes;
  };
  std::vector<Entry> entries_;
  std::atomic<bool> has_zero_point_{false};
};

// One quantized tensor that was read. `codes` points into the file, or to
// `lazy` where the file packs them otherwise.
struct QuantizedTensor {
  std::string name;
  ElementType element_type;
  std::vector<int64_t> shape;
  // With `scales`, these are not in it; they point into the file.
  Encoding encoding;
  std::optional<Scales> scales;
  absl::Span<const uint8_t> codes;
  // Makes `codes` on use; null for those of the file.
  std::shared_ptr<files::LazyBytes> lazy;
  // The group of each column, I32, where groups are not one after the other. An
  // encoding does not say that.
  absl::Span<const uint8_t> column_groups;
  // By what other readers divide the scale codes, where the outer scale, its
  // inverse, is rounded: an encoding does not say that.
  std::optional<float> divisor;
  // The tensors of the file that it is made of.
  std::vector<std::string> parts;

  // The encoding with its scales.
  Encoding Whole() const;
  // Keep what this returns for as long as `codes` are read.
  std::shared_ptr<const void> Hold() const {
    return lazy == nullptr ? nullptr : lazy->Hold();
  }
};

// Reads the tensor that `json`, the metadata of "quantd.<name>", describes.
// Errors: FILE_MALFORMED.
absl::StatusOr<QuantizedTensor> ReadQuantized(const TensorInput& input,
                                              const std::string& path,
                                              const std::string& name,
                                              absl::string_view json);

// All tensors of the input that are quantized so; `path` is what it was opened
// as.
// Errors: FILE_MALFORMED.
absl::StatusOr<std::vector<QuantizedTensor>> ReadAllQuantized(
    const TensorInput& input, const std::string& path);

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_QUANTIZED_LAYOUT_H_
