#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/evaluate/output_noise_kernel.h"
#include "core/types/element_type.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

template <typename T>
void LoadRows(const OutputRows& rows, const OutputGram::Block& block,
              float* scaled, int* exponent, OutputPower* power) {
  const int64_t columns = rows.gram.columns();
  const ElementType restored_type = ArithmeticType(rows.type);
  std::vector<double> values(block.size);
  std::fill_n(scaled, block.size * kOutputRows, 0.0f);
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t first = row * columns + block.first;
    double largest = 0;
    for (int64_t k = 0; k < block.size; ++k) {
      double value = LoadElement<T>(rows.type, rows.real, first + k);
      if (rows.restored != nullptr) {
        value =
            double{LoadElement<T>(restored_type, rows.restored, first + k)} -
            value;
      }
      values[k] = std::isfinite(value) ? value : 0;
      largest = std::max(largest, std::fabs(values[k]));
    }
    exponent[row] = 0;
    if (largest == 0) continue;
    std::frexp(largest, &exponent[row]);
    // In two steps: one of them may be beyond float64.
    const double half = std::ldexp(1.0, -exponent[row] / 2);
    const double rest = std::ldexp(1.0, -exponent[row] - -exponent[row] / 2);
    double diagonal = 0;
    for (int64_t k = 0; k < block.size; ++k) {
      const double value = values[k] * half * rest;
      scaled[k * kOutputRows + row] = static_cast<float>(value);
      diagonal += value * value * rows.gram.diagonal()[block.first + k];
    }
    power[row].diagonal += std::ldexp(diagonal, 2 * exponent[row]);
  }
}

}  // namespace

void LoadOutputRows(const OutputRows& rows, const OutputGram::Block& block,
                    float* scaled, int* exponent, OutputPower* power) {
  if (rows.type == ElementType::kFloat64) {
    LoadRows<double>(rows, block, scaled, exponent, power);
  } else {
    LoadRows<float>(rows, block, scaled, exponent, power);
  }
}

void AddExactPower(const OutputGram& gram, double sum, int exponent,
                   OutputPower* power) {
  // Rounding may leave less than nothing.
  power->exact += std::ldexp(std::max(sum, 0.0) * gram.unit(), 2 * exponent);
}

void MeasureOutputScalar(const OutputRows& rows, OutputPower* power) {
  for (const OutputGram::Block& block : rows.gram.blocks()) {
    std::vector<float> scaled(block.size * kOutputRows);
    int exponent[kOutputRows];
    LoadOutputRows(rows, block, scaled.data(), exponent, power);
    for (int64_t row = 0; row < rows.count; ++row) {
      double sum = 0;
      for (int64_t begin = 0; begin < block.size; begin += kChainFeatures) {
        for (int64_t k = begin; k < block.size; ++k) {
          if (rows.stop.stopped()) return;
          const float* const panel = rows.gram.panels() + block.offset +
                                     PanelOffset(k / kPanelRows) +
                                     k % kPanelRows;
          const int64_t end = std::min(begin + kChainFeatures, k + 1);
          float y = 0;
          for (int64_t j = begin; j < end; ++j) {
            y = std::fma(scaled[j * kOutputRows + row], panel[j * kPanelRows],
                         y);
          }
          sum += double{scaled[k * kOutputRows + row]} * double{y};
        }
      }
      AddExactPower(rows.gram, sum, exponent[row], &power[row]);
    }
  }
}

}  // namespace quantd::core
