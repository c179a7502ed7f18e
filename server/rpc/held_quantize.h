// Quantize of a tensor that is held as it came.

#ifndef QUANTD_SERVER_RPC_HELD_QUANTIZE_H_
#define QUANTD_SERVER_RPC_HELD_QUANTIZE_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/parallel/thread_pool.h"
#include "core/types/element_type.h"
#include "server/rpc/buffered_quantize.h"
#include "server/rpc/code_producer.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_accumulator.h"
#include "server/rpc/tensor_buffer.h"
#include "server/rpc/tensor_job.h"
#include "server/wire/chunk_writer.h"

namespace quantd::server {

// The accumulator for the tensor of a HeldQuantizeJob; null if `spec` is null.
// Errors: those of TensorAccumulator::Create.
absl::StatusOr<std::unique_ptr<TensorAccumulator>> MakeHeldAccumulator(
    const RpcEnvironment& env, core::ElementType element_type,
    const ResolvedSpec* spec);

// Holds the reals, with the statistics that its spec needs.
class HeldQuantizeJob : public BufferedQuantizeJob {
 public:
  StoreUse ResolveUse() const override {
    return spec_ != nullptr ? ImportanceUse(*spec_) : StoreUse::kNone;
  }
  absl::Status Resolve(ChunkWriter* out) override;

  absl::Status Reserve(int64_t bytes) override;
  absl::Status Feed(int64_t offset_bytes, absl::Span<const uint8_t> data) final;

 protected:
  // `spec`  that the encoding is found by; null where that is given.
  // `accumulator`  of MakeHeldAccumulator.
  HeldQuantizeJob(const RpcEnvironment& env, QuantizeTask task,
                  std::shared_ptr<const ResolvedSpec> spec,
                  std::unique_ptr<TensorAccumulator> accumulator);

  const ResolvedSpec* spec() const { return spec_.get(); }
  // Requires: a spec.
  const TensorAccumulator& accumulator() const { return *accumulator_; }

  // The encoding of the spec, once all is held.
  // `pool`  helps; null where it does not take long.
  // Errors: those of CalibrateTensor.
  absl::StatusOr<ResolvedEncoding> Calibrate(core::ThreadPool* pool);

  int64_t RealsOffset(int64_t block) const final {
    return block * TensorBuffer::kBlockBytes;
  }

 private:
  const std::shared_ptr<const ResolvedSpec> spec_;
  const std::unique_ptr<TensorAccumulator> accumulator_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_HELD_QUANTIZE_H_
