// The grids that ggml's i-quants take their elements from.

#ifndef QUANTD_CLIENT_FILES_GGUF_GRIDS_H_
#define QUANTD_CLIENT_FILES_GGUF_GRIDS_H_

#include <cstddef>
#include <cstdint>

namespace quantd::files {

// A point of a grid is a number: 8 indices of 2 bits, or 4 of 3 bits in iq3,
// the first in the lowest bits. What they index is in gguf_types.cc. The
// numbers are those of ggml; the Python package has them in gguf_grids.txt.
constexpr size_t kIq1Grid = 0;
constexpr size_t kIq2XxsGrid = kIq1Grid + 2048;
constexpr size_t kIq2XsGrid = kIq2XxsGrid + 256;
constexpr size_t kIq2SGrid = kIq2XsGrid + 512;
constexpr size_t kIq3XxsGrid = kIq2SGrid + 1024;
constexpr size_t kIq3SGrid = kIq3XxsGrid + 256;
constexpr size_t kGgufGridPoints = kIq3SGrid + 512;

// The grids one after another, each from its constant above on.
extern const uint16_t kGgufGrids[kGgufGridPoints];

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_GGUF_GRIDS_H_
