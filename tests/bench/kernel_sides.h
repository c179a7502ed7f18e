// What the sides of a comparison of kernels have in common: the cell of the
// table that they are to fill, the data and the buffers.

#ifndef QUANTD_TESTS_BENCH_KERNEL_SIDES_H_
#define QUANTD_TESTS_BENCH_KERNEL_SIDES_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "core/parallel/thread_pool.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::bench {

constexpr int64_t kColumns = 4096;

// The work of one cell: an operation on a tensor [count / 4096, 4096].
struct Cell {
  // quantize, dequantize, min_max, statistics, evaluate, or quantize_spec,
  // which finds the scales as well.
  std::string operation;
  core::ElementType type = core::ElementType::kFloat32;
  std::string format;
  std::vector<int64_t> block_size;
  // normal: N(0, 1); equal: one value; relu: max(N(0, 1), 0).
  std::string data = "normal";
  // All zero points; the scales begin with this one.
  float scale = 1;
  int32_t zero_point = 0;
  // Of the histograms of statistics.
  int mantissa_bits = 0;
  // Elements, whatever their type.
  int64_t count = 0;
  int threads = 1;
};

// What bodies read and write, kept from cell to cell: fresh pages cost more
// than kernels. Not thread-safe.
class Buffers {
 public:
  // [count] elements of the type.
  const uint8_t* Reals(core::ElementType type, const std::string& data,
                       int64_t count);
  // Written before, so that no body pays for fresh pages. The same memory for
  // every call with that `which`, 0 or 1.
  uint8_t* Output(int64_t size, int which = 0);

 private:
  std::map<std::tuple<core::ElementType, std::string>, std::vector<uint8_t>>
      reals_;
  std::array<std::vector<uint8_t>, 2> outputs_;
};

// Does the work of the cell once; empty where the side does not have it.
using Body = std::function<void()>;

// The encoding that all sides quantize with.
core::Encoding EncodingOf(const Cell& cell);

// The peers. Codes to dequantize are those of the cell's encoding.
Body XnnpackBody(const Cell& cell, Buffers* buffers);
Body OnednnBody(const Cell& cell, Buffers* buffers);

}  // namespace quantd::bench

#endif  // QUANTD_TESTS_BENCH_KERNEL_SIDES_H_
