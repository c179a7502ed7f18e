#include "server/rpc/held_quantize.h"

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/held_tensor.h"
#include "core/types/element_type.h"
#include "server/rpc/code_producer.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_accumulator.h"
#include "server/rpc/tensor_calibration.h"
#include "server/wire/chunk_writer.h"

namespace quantd::server {

absl::StatusOr<std::unique_ptr<TensorAccumulator>> MakeHeldAccumulator(
    const RpcEnvironment& env, core::ElementType element_type,
    const ResolvedSpec* spec) {
  if (spec == nullptr) return std::unique_ptr<TensorAccumulator>();
  return TensorAccumulator::Create(env, element_type, spec->layout,
                                   MantissaBitsWhereHeld(*spec),
                                   SearchBytes(env, *spec));
}

HeldQuantizeJob::HeldQuantizeJob(const RpcEnvironment& env, QuantizeTask task,
                                 std::shared_ptr<const ResolvedSpec> spec,
                                 std::unique_ptr<TensorAccumulator> accumulator)
    : BufferedQuantizeJob(
          env, task,
          task.description.element_count *
              core::ElementSizeBytes(task.description.element_type),
          accumulator == nullptr ? 0 : accumulator->leased_bytes()),
      spec_(std::move(spec)),
      accumulator_(std::move(accumulator)) {
  frame_.granule_bytes = frame_.unit_bytes;
  frame_.quantum_bytes = accumulator_ != nullptr
                             ? QuantumBytes(env, *accumulator_)
                             : env.limits.chunk_bytes;
}

absl::Status HeldQuantizeJob::Resolve(ChunkWriter* out) {
  return spec_ == nullptr
             ? absl::OkStatus()
             : ReadImportance(env(), *spec_, "header.spec.importance", stop());
}

absl::Status HeldQuantizeJob::Reserve(int64_t bytes) {
  if (accumulator_ != nullptr) {
    if (absl::Status s = accumulator_->Reserve(); !s.ok()) return s;
  }
  return buffer().Reserve(bytes);
}

absl::Status HeldQuantizeJob::Feed(int64_t offset_bytes,
                                   absl::Span<const uint8_t> data) {
  if (accumulator_ != nullptr) accumulator_->Update(offset_bytes, data);
  buffer().Append(data);
  return absl::OkStatus();
}

absl::StatusOr<ResolvedEncoding> HeldQuantizeJob::Calibrate(
    core::ThreadPool* pool) {
  const core::HeldTensor held =
      buffer().Held(*spec_->layout, task().description.element_type);
  absl::StatusOr<CalibratedEncoding> calibrated = CalibrateTensor(
      env(), *spec_, accumulator_->statistics(), {}, pool, stop(), &held);
  if (!calibrated.ok()) return calibrated.status();
  SetMantissaBits(calibrated->mantissa_bits);
  return std::move(calibrated->resolved);
}

}  // namespace quantd::server
