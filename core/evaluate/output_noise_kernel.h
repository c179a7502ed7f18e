// The power of a layer's output on one thread: the contract between
// output_noise.cc and its kernels, and their scalar definition.

#ifndef QUANTD_CORE_EVALUATE_OUTPUT_NOISE_KERNEL_H_
#define QUANTD_CORE_EVALUATE_OUTPUT_NOISE_KERNEL_H_

#include <cstdint>

#include "core/evaluate/output_noise.h"
#include "core/parallel/stop_token.h"
#include "core/quantize/compensated_rounding_kernel.h"
#include "core/types/element_type.h"

namespace quantd::core {

// Rows of a task.
constexpr int64_t kOutputRows = kPanelWidth<float>;
// Features of a chain of fused multiply-adds; a multiple of kPanelRows.
constexpr int64_t kChainFeatures = 512;

struct OutputRows {
  const OutputGram& gram;
  ElementType type;
  // At most kOutputRows.
  int64_t count;
  const uint8_t* real;
  // Or null.
  const uint8_t* restored;
  StopToken stop;
};

// Rows of a block: `scaled` [size][kOutputRows], 0 past the last row, each row
// below 1 and times 2^exponent[row]. Adds the diagonal's part to `power`.
void LoadOutputRows(const OutputRows& rows, const OutputGram::Block& block,
                    float* scaled, int* exponent, OutputPower* power);

// Adds the exact part of one row: `sum` of v S v^T, of scaled elements.
void AddExactPower(const OutputGram& gram, double sum, int exponent,
                   OutputPower* power);

// The truth: one row and one feature after the other. Adds to power [count].
// Ends early when stopped.
void MeasureOutputScalar(const OutputRows& rows, OutputPower* power);

}  // namespace quantd::core

#endif  // QUANTD_CORE_EVALUATE_OUTPUT_NOISE_KERNEL_H_
