// XNNPACK's convert operators. They multiply by the reciprocal of the scale.

#include <pthreadpool.h>
#include <xnnpack.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "tests/bench/kernel_sides.h"

namespace quantd::bench {
namespace {

struct Convert {
  xnn_operator_t op = nullptr;
  pthreadpool_t pool = nullptr;

  ~Convert() {
    xnn_delete_operator(op);
    if (pool != nullptr) pthreadpool_destroy(pool);
  }
};

void Check(xnn_status status) {
  if (status == xnn_status_success) return;
  std::fprintf(stderr, "XNNPACK fails with status %d\n", status);
  std::exit(1);
}

}  // namespace

Body XnnpackBody(const Cell& cell, Buffers* buffers) {
  const bool quantizes = cell.operation == "quantize";
  if ((!quantizes && cell.operation != "dequantize") ||
      cell.type != core::ElementType::kFloat32 || cell.format != "int8" ||
      !cell.block_size.empty()) {
    return nullptr;
  }
  Check(xnn_initialize(nullptr));
  const core::Encoding encoding = EncodingOf(cell);
  const float scale = encoding.scale[0];
  const auto zero_point = static_cast<int8_t>(cell.zero_point);
  auto convert = std::make_shared<Convert>();
  if (cell.threads > 1) {
    convert->pool = pthreadpool_create(static_cast<size_t>(cell.threads));
  }
  const size_t rows = static_cast<size_t>(cell.count / kColumns);
  if (quantizes) {
    Check(xnn_create_convert_nc_f32_qs8(kColumns, kColumns, kColumns, scale,
                                        zero_point, -128, 127, 0,
                                        &convert->op));
    Check(xnn_setup_convert_nc_f32_qs8(
        convert->op, rows,
        reinterpret_cast<const float*>(
            buffers->Reals(cell.type, cell.data, cell.count)),
        reinterpret_cast<int8_t*>(buffers->Output(cell.count)), convert->pool));
  } else {
    Check(xnn_create_convert_nc_qs8_f32(kColumns, kColumns, kColumns, scale,
                                        zero_point, 0, &convert->op));
    Check(xnn_setup_convert_nc_qs8_f32(
        convert->op, rows,
        reinterpret_cast<const int8_t*>(buffers->Output(cell.count)),
        reinterpret_cast<float*>(buffers->Output(cell.count * 4, 1)),
        convert->pool));
  }
  return [convert] { Check(xnn_run_operator(convert->op, convert->pool)); };
}

}  // namespace quantd::bench
