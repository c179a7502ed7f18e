// oneDNN's reorder with output scales, which multiplies.

#include <omp.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "oneapi/dnnl/dnnl.hpp"
#include "tests/bench/kernel_sides.h"

namespace quantd::bench {

Body OnednnBody(const Cell& cell, Buffers* buffers) {
  const bool per_tensor = cell.block_size.empty();
  const bool last_axis = cell.block_size == std::vector<int64_t>{0, 1};
  const bool float32 = cell.type == core::ElementType::kFloat32;
  if (cell.operation != "quantize" || cell.format != "int8" ||
      !(per_tensor || last_axis) ||
      !(float32 || cell.type == core::ElementType::kBfloat16)) {
    return nullptr;
  }
  const core::Encoding encoding = EncodingOf(cell);
  std::vector<float> factors;
  for (const float scale : encoding.scale) factors.push_back(1 / scale);
  dnnl::primitive_attr attributes;
  attributes.set_output_scales(last_axis ? 1 << 1 : 0, factors);
  if (cell.zero_point != 0) {
    attributes.set_zero_points(DNNL_ARG_DST, 0, {cell.zero_point});
  }

  using Memory = dnnl::memory;
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  const Memory::dims shape = {cell.count / kColumns, kColumns};
  const auto reals = std::make_shared<Memory>(
      Memory::desc(shape,
                   float32 ? Memory::data_type::f32 : Memory::data_type::bf16,
                   Memory::format_tag::ab),
      engine,
      const_cast<uint8_t*>(buffers->Reals(cell.type, cell.data, cell.count)));
  const auto codes = std::make_shared<Memory>(
      Memory::desc(shape, Memory::data_type::s8, Memory::format_tag::ab),
      engine, buffers->Output(cell.count));
  const auto reorder =
      std::make_shared<dnnl::reorder>(*reals, *codes, attributes);
  const auto stream = std::make_shared<dnnl::stream>(engine);
  return [threads = cell.threads, reals, codes, reorder, stream] {
    omp_set_num_threads(threads);
    reorder->execute(*stream, *reals, *codes);
    stream->wait();
  };
}

}  // namespace quantd::bench
