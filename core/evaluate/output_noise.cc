#include "core/evaluate/output_noise.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/evaluate/output_noise_kernel.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/simd_internal.h"
#include "core/statistics/gram_state.h"
#include "core/types/element_type.h"
#include "hwy/aligned_allocator.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/evaluate/output_noise.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/quantize/panel_product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void MeasureOutput(const OutputRows& rows, OutputPower* power) {
  MeasureOutputScalar(rows, power);
}

#else

void MeasureOutput(const OutputRows& rows, OutputPower* power) {
  int64_t largest = 0;
  for (const OutputGram::Block& block : rows.gram.blocks()) {
    largest = std::max(largest, block.size);
  }
  const auto scaled = hwy::AllocateAligned<float>(largest * kOutputRows);
  for (const OutputGram::Block& block : rows.gram.blocks()) {
    int exponent[kOutputRows];
    LoadOutputRows(rows, block, scaled.get(), exponent, power);
    double sum[kOutputRows] = {};
    // A chain's part of the rows stays in the cache.
    for (int64_t begin = 0; begin < block.size; begin += kChainFeatures) {
      for (int64_t k = begin; k < block.size; k += kPanelRows) {
        if (rows.stop.stopped()) return;
        const float* const panel = rows.gram.panels() + block.offset +
                                   PanelOffset(k / kPanelRows) +
                                   begin * kPanelRows;
        const int64_t width = std::min(kPanelRows, block.size - k);
        const int64_t end = std::min(begin + kChainFeatures, k + width);
        HWY_ALIGN float y[kPanelRows * kOutputRows] = {};
        SubtractPanelProduct(end - begin, panel, kPanelRows,
                             scaled.get() + begin * kOutputRows, y,
                             kOutputRows);
        for (int64_t i = 0; i < width; ++i) {
          const float* const v = scaled.get() + (k + i) * kOutputRows;
          for (int64_t row = 0; row < kOutputRows; ++row) {
            sum[row] -= double{v[row]} * double{y[i * kOutputRows + row]};
          }
        }
      }
    }
    for (int64_t row = 0; row < rows.count; ++row) {
      AddExactPower(rows.gram, sum[row], exponent[row], &power[row]);
    }
  }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quantd::core {
namespace {

HWY_EXPORT(MeasureOutput);

}  // namespace

absl::StatusOr<OutputGram> OutputGram::Create(const GramState& gram,
                                              ThreadPool* pool,
                                              StopToken stop) {
  OutputGram output;
  const int64_t features = gram.feature_count();
  const double rows = static_cast<double>(gram.rows());
  const auto element = [&](int64_t i, int64_t j) {
    return std::ldexp(static_cast<double>(gram.code_sum(i, j)),
                      gram.exponents()[i] + gram.exponents()[j]);
  };
  double largest = 0;
  output.diagonal_.reserve(features);
  for (int64_t k = 0; k < features; ++k) {
    const double power = element(k, k);
    largest = std::max(largest, power);
    output.diagonal_.push_back(power / rows);
  }
  int exponent = 0;
  std::frexp(largest, &exponent);
  output.unit_ = std::ldexp(1.0, exponent) / rows;
  int64_t floats = 0;
  for (int64_t part = 0; part < gram.part_count(); ++part) {
    const int64_t size = gram.PartWidth(part);
    output.blocks_.push_back({part * gram.part_size(), size, floats});
    floats += PanelOffset(PanelCount(size));
  }
  output.panels_.resize(floats);
  for (const Block& block : output.blocks_) {
    ParallelFor(pool, PanelCount(block.size), [&](int64_t panel) {
      float* const out =
          output.panels_.data() + block.offset + PanelOffset(panel);
      for (int64_t j = 0; j < std::min((panel + 1) * kPanelRows, block.size);
           ++j) {
        if (stop.stopped()) return;
        for (int64_t i = 0; i < kPanelRows; ++i) {
          const int64_t k = panel * kPanelRows + i;
          if (j > k || k >= block.size) continue;
          const double value =
              std::ldexp(element(block.first + j, block.first + k),
                         j < k ? 1 - exponent : -exponent);
          out[j * kPanelRows + i] = static_cast<float>(value);
        }
      }
    });
  }
  if (stop.stopped()) return StoppedError();
  return output;
}

int64_t OutputGram::MemoryBytes(int64_t features, int64_t part_size) {
  const int64_t parts = (features + part_size - 1) / part_size;
  const int64_t last = features - (parts - 1) * part_size;
  const int64_t floats = (parts - 1) * PanelOffset(PanelCount(part_size)) +
                         PanelOffset(PanelCount(last));
  return static_cast<int64_t>(sizeof(OutputGram)) +
         floats * static_cast<int64_t>(sizeof(float)) +
         features * static_cast<int64_t>(sizeof(double)) +
         parts * 2 * static_cast<int64_t>(sizeof(Block));
}

absl::Status AddOutputPower(const OutputGram& gram, ElementType type,
                            int64_t rows, const uint8_t* real,
                            const uint8_t* restored, OutputPower* power,
                            ThreadPool* pool, StopToken stop) {
  const int64_t tasks = (rows + kOutputRows - 1) / kOutputRows;
  std::vector<OutputPower> of_row(rows);
  ParallelFor(pool, tasks, [&](int64_t task) {
    if (stop.stopped()) return;
    const int64_t first = task * kOutputRows;
    const int64_t offset = first * gram.columns();
    const OutputRows range{
        gram,
        type,
        std::min(kOutputRows, rows - first),
        real + offset * ElementSizeBytes(type),
        restored == nullptr
            ? nullptr
            : restored + offset * ElementSizeBytes(ArithmeticType(type)),
        stop};
    if (internal::UsesScalarKernels()) {
      MeasureOutputScalar(range, &of_row[first]);
    } else {
      HWY_DYNAMIC_DISPATCH(MeasureOutput)(range, &of_row[first]);
    }
  });
  if (stop.stopped()) return StoppedError();
  for (const OutputPower& row : of_row) {
    power->exact += row.exact;
    power->diagonal += row.diagonal;
  }
  return absl::OkStatus();
}

int64_t OutputTaskBytes(int64_t columns) {
  // Scaled rows, and one row before it is scaled.
  return columns * (kOutputRows * static_cast<int64_t>(sizeof(float)) +
                    static_cast<int64_t>(sizeof(double)));
}

ElementType ArithmeticType(ElementType type) {
  return type == ElementType::kFloat64 ? type : ElementType::kFloat32;
}

double NoiseToSignal(double noise, double signal) {
  return noise == 0 ? 0 : noise / signal;
}

}  // namespace quantd::core
#endif  // HWY_ONCE
