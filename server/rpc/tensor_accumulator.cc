#include "server/rpc/tensor_accumulator.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/statistics/histogram.h"

namespace quantd::server {

absl::StatusOr<std::unique_ptr<TensorAccumulator>> TensorAccumulator::Create(
    const RpcEnvironment& env, core::ElementType element_type,
    std::shared_ptr<const core::BlockLayout> layout, int mantissa_bits,
    int64_t more_bytes) {
  const int64_t scale_count = layout->scale_count();
  int64_t bytes_per_scale =
      sizeof(core::Extremes) + sizeof(float) + sizeof(int32_t);
  if (mantissa_bits != kNoHistograms) {
    bytes_per_scale += sizeof(core::Histogram);
  }
  if (mantissa_bits == kDefaultMantissaBits) {
    mantissa_bits = core::DefaultMantissaBits(scale_count);
  }
  absl::StatusOr<MemoryBudget::Lease> lease =
      env.budget->Acquire(scale_count * bytes_per_scale + more_bytes,
                          "take fewer scales, or send fewer tensors at once");
  if (!lease.ok()) return lease.status();
  return std::unique_ptr<TensorAccumulator>(new TensorAccumulator(
      env, element_type, std::move(layout), mantissa_bits, *std::move(lease)));
}

TensorAccumulator::TensorAccumulator(
    const RpcEnvironment& env, core::ElementType element_type,
    std::shared_ptr<const core::BlockLayout> layout, int mantissa_bits,
    MemoryBudget::Lease lease)
    : env_(env),
      element_type_(element_type),
      layout_(std::move(layout)),
      lease_(std::move(lease)),
      statistics_(layout_->scale_count(), mantissa_bits) {}

absl::Status TensorAccumulator::Reserve(int copies) {
  if (statistics_.mantissa_bits() == kNoHistograms) return absl::OkStatus();
  unasked_lease_.Release();
  absl::Status status = env_.budget->Grow(
      &lease_, copies * statistics_.memory_bytes(),
      "take a coarser granularity, fewer mantissa bits or min-max");
  if (!status.ok()) CountUnasked();
  return status;
}

void TensorAccumulator::CountUnasked() {
  env_.budget->Count(&unasked_lease_,
                     statistics_.memory_bytes() - lease_.bytes());
}

void TensorAccumulator::Update(int64_t offset_bytes,
                               absl::Span<const uint8_t> data) {
  const int64_t element_bytes = core::ElementSizeBytes(element_type_);
  statistics_.Update(*layout_, element_type_, offset_bytes / element_bytes,
                     static_cast<int64_t>(data.size()) / element_bytes,
                     data.data(), env_.pool);
  if (statistics_.mantissa_bits() != kNoHistograms) CountUnasked();
}

int64_t QuantumBytes(const RpcEnvironment& env,
                     const TensorAccumulator& accumulator) {
  constexpr int64_t kHistogramQuantumBytes = int64_t{1} << 20;
  return accumulator.statistics().mantissa_bits() == 0
             ? env.limits.chunk_bytes
             : std::min(env.limits.chunk_bytes, kHistogramQuantumBytes);
}

}  // namespace quantd::server
