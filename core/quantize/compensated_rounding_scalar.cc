#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/dequantize/dequantize_kernel.h"
#include "core/formats/packing.h"
#include "core/quantize/compensated_rounding_kernel.h"
#include "core/types/element_type.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

template <typename T>
void QuantizeRows(const CompensatedRange& rows, QuantizeCounts* counts) {
  const CompensationFactor& factor = rows.factor;
  const QuantizeRange& range = rows.range;
  const int64_t columns = factor.columns();
  // w - q by position.
  std::vector<T> errors(columns);
  for (int64_t row = 0; row < rows.rows(); ++row) {
    for (const CompensationFactor::Block& block : factor.blocks()) {
      for (int64_t k = 0; k < block.size; ++k) {
        if (rows.stop.stopped()) return;
        const int64_t i = row * columns + factor.order()[block.first + k];
        const T w = LoadElement<T>(range.type, range.in, i);
        T x = w;
        if (k < block.live) {
          const float* panel = factor.panels() + block.offset +
                               PanelOffset(k / kPanelRows) + k % kPanelRows;
          for (int64_t j = 0; j < k; ++j) {
            x = std::fma(errors[block.first + j], T{panel[j * kPanelRows]}, x);
          }
          if (!std::isfinite(x)) x = w;
        }
        const RoundedElement<T> rounded =
            RoundElement<T>(range, range.first + i, x, counts);
        StoreCode(range.format, rounded.code, i, range.out);
        const T error = w - rounded.value;
        if (std::isfinite(error)) {
          errors[block.first + k] = error;
          if (k < block.live) {
            const double corrected = x - rounded.value;
            rows.output_errors[row] +=
                factor.pivots()[block.first + k] * (corrected * corrected) -
                block.damping * (double{error} * double{error});
          }
        } else {
          errors[block.first + k] = 0;
        }
      }
    }
  }
}

}  // namespace

int64_t CholeskyScalar(const UpperTriangle& a, const double* least_pivot,
                       StopToken stop) {
  for (int64_t k = 0; k < a.size; ++k) {
    double* const row = a.row(k);
    if (!(row[k] > least_pivot[k])) return k;
    row[k] = std::sqrt(row[k]);
    for (int64_t i = k + 1; i < a.size; ++i) row[i] /= row[k];
    for (int64_t j = k + 1; j < a.size; ++j) {
      if (stop.stopped()) return a.size;
      double* const other = a.row(j);
      for (int64_t i = j; i < a.size; ++i) {
        other[i] = std::fma(-row[j], row[i], other[i]);
      }
    }
  }
  return a.size;
}

template <typename T>
RoundedElement<T> RoundElement(const QuantizeRange& range, int64_t index, T x,
                               QuantizeCounts* counts) {
  constexpr ElementType kType =
      std::is_same_v<T, double> ? ElementType::kFloat64 : ElementType::kFloat32;
  uint8_t in[sizeof(T)];
  uint8_t code[sizeof(int32_t)] = {};
  uint8_t value[sizeof(T)];
  StoreUnaligned(x, in);
  QuantizeScalar({range.encoding, range.format, range.layout, kType,
                  range.nan_policy, index, 1, in, code},
                 counts);
  DequantizeScalar({range.encoding, range.format, range.layout, kType, index, 1,
                    code, value});
  return {LoadCode(range.format, code, 0), LoadUnaligned<T>(value)};
}

template RoundedElement<float> RoundElement(const QuantizeRange&, int64_t,
                                            float, QuantizeCounts*);
template RoundedElement<double> RoundElement(const QuantizeRange&, int64_t,
                                             double, QuantizeCounts*);

void QuantizeCompensatedScalar(const CompensatedRange& rows,
                               QuantizeCounts* counts) {
  std::memset(rows.range.out, 0, rows.range.format.SizeBytes(rows.range.count));
  if (rows.range.type == ElementType::kFloat64) {
    QuantizeRows<double>(rows, counts);
  } else {
    QuantizeRows<float>(rows, counts);
  }
}

}  // namespace quantd::core
