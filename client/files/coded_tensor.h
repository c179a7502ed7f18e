// Tensors of reals that lie in a file as codes of a few bits under scales, in
// the layouts of many programs.

#ifndef QUANTD_CLIENT_FILES_CODED_TENSOR_H_
#define QUANTD_CLIENT_FILES_CODED_TENSOR_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "client/files/dtype.h"
#include "client/files/lazy_bytes.h"

namespace quantd::files {

// Lines of values of up to 8 bits, in words, the lowest bits first. A value may
// begin in one word and end in the next. Plain value.
struct CodeStream {
  absl::Span<const uint8_t> bytes;
  int bits = 8;
  // 1 or 4.
  int word_bytes = 1;
  // In words: from the beginning of a line to that of the next, and from one
  // word of a line to the next.
  int64_t line_words = 0;
  int64_t stride_words = 1;
  // In values, where lines have no words of their own.
  int64_t line_values = 0;
  // Place in a word of each of its values, which have 4 or 8 bits; null: in
  // their order.
  const uint8_t* places = nullptr;

  // Requires: within `bytes`.
  uint32_t Get(int64_t line, int64_t position) const;
};

// Kind of numbers that codes stand for, before zero points and scales.
enum class CodeValues {
  kUnsigned,
  // Two's complement.
  kSigned,
  kE2M1,
  kE4M3,
  kE5M2,
};

// Scales of blocks of matrices. Plain value.
struct CodeScales {
  // F32, F16, BF16, F8_E4M3, or U8: 2^(byte - 127).
  Dtype dtype = Dtype::kF32;
  absl::Span<const uint8_t> data;
  // Rows and columns of a block.
  int64_t rows = 1;
  int64_t columns = 1;
  // The scale of block (i, j) of matrix m is number m * matrix_step + i *
  // row_step + j * column_step.
  int64_t matrix_step = 0;
  int64_t row_step = 0;
  int64_t column_step = 0;
  // The block of each column, I32, where they are not one after the other.
  absl::Span<const uint8_t> column_blocks;
  // F32: one by which scales are multiplied, or one for each matrix.
  absl::Span<const uint8_t> outer;
  // Scales are divided by it in place of that.
  bool divides_by_outer = false;

  // Number of the scale at the row and the block of columns.
  int64_t IndexOf(int64_t matrix, int64_t row, int64_t block) const {
    return matrix * matrix_step + row / rows * row_step + block * column_step;
  }
  int64_t BlockOf(int64_t column) const;
  float At(int64_t matrix, int64_t index) const;
};

// (code - zero point) * scale, in float32. Points into files. Immutable once
// made, thread-safe.
struct CodedTensor {
  std::string name;
  // Type of the reals: F32, F16, BF16 or F64. Rounded to nearest, ties to even.
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  // Who has that layout, for people.
  std::string layout;
  // The tensors of the file that it is made of, first its codes.
  std::vector<std::string> parts;
  // Note, for people, of what the file does not tell; mostly empty.
  std::string note;

  // The shape as matrices.
  int64_t matrices = 1;
  int64_t rows = 1;
  int64_t columns = 1;
  CodeStream codes;
  // True if a line is a column; otherwise it is a row. Lines of one matrix come
  // after those of the one before.
  bool lines_are_columns = false;
  CodeValues values = CodeValues::kUnsigned;
  CodeScales scales;
  // At most one of these two. Lines of a stream are blocks of columns, and
  // positions are rows; `zero_point_add` comes on top.
  std::optional<CodeStream> zero_point_stream;
  int32_t zero_point_add = 0;
  // One for each scale; empty: 0.
  absl::Span<const int32_t> zero_points;
  // Owner of what spans may point into, beside files.
  std::shared_ptr<const void> owner;
  // Makes the codes on use; null for those of a file.
  std::shared_ptr<LazyBytes> lazy;

  // Keep what this returns where rows are decoded bit by bit: the codes are
  // made once then.
  std::shared_ptr<const void> Hold() const {
    return lazy == nullptr ? nullptr : lazy->Hold();
  }

  int64_t row_count() const { return matrices * rows; }
  int64_t row_bytes() const { return columns * DtypeSizeBytes(dtype); }
  // Rows over all matrices.
  // Requires: 0 <= begin <= end <= row_count(), and `out` of their size.
  void DecodeRows(int64_t begin, int64_t end, absl::Span<uint8_t> out) const;
};

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_CODED_TENSOR_H_
