// Quantize with a spec that needs the whole tensor.

#ifndef QUANTD_SERVER_RPC_BUFFERED_QUANTIZE_H_
#define QUANTD_SERVER_RPC_BUFFERED_QUANTIZE_H_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/types/element_type.h"
#include "quantd/v1/tensor.pb.h"
#include "server/rpc/code_producer.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_buffer.h"
#include "server/rpc/tensor_job.h"
#include "server/store/encoding_store.h"
#include "server/wire/chunk_writer.h"

namespace quantd::server {

// With a spec, which needs the whole tensor: it is held in one form or another,
// and answered block by block when its encoding is known.
class BufferedQuantizeJob : public TensorJob {
 public:
  StoreUse FinishUse() const final {
    if (step_ == Step::kRead) return StoreUse::kReadStatistics;
    return step_ == Step::kPut ? StoreUse::kWrite : StoreUse::kNone;
  }
  bool FinishIsLong() const final {
    return step_ == Step::kEncode && EncodeIsLong();
  }

  absl::StatusOr<bool> Finish(ChunkWriter* out) final {
    switch (step_) {
      case Step::kRead:
        if (absl::Status s = Read(); !s.ok()) return s;
        step_ = Step::kEncode;
        return false;
      case Step::kEncode: {
        const bool was_long = EncodeIsLong();
        absl::StatusOr<ResolvedEncoding> encoded = Encode();
        if (!encoded.ok()) return encoded.status();
        resolved_ = *std::move(encoded);
        if (task_.store_key.has_value() && !WillReject()) {
          step_ = Step::kPut;
          return false;
        }
        OpenAnswer(out);
        // Blocks are answered by workers.
        if (was_long) return false;
        break;
      }
      case Step::kPut: {
        absl::StatusOr<StoredEncoding> stored =
            task_.store->Put(*task_.store_key, resolved_.encoding, task_.put);
        if (!stored.ok()) return stored.status();
        resolved_.etag = stored->etag;
        OpenAnswer(out);
        return false;
      }
      case Step::kAnswer:
        break;
    }
    if (next_block_ < buffer_.block_count()) {
      const int64_t begin = RealsOffset(next_block_);
      const int64_t end = std::min(RealsOffset(next_block_ + 1), SizeBytes());
      producer_->Begin(begin, end - begin, out);
      absl::Status status =
          Answer(begin, buffer_.block(next_block_), &*producer_);
      if (!status.ok()) return status;
      producer_->End();
      ++next_block_;
    }
    if (next_block_ < buffer_.block_count()) return false;
    producer_->WriteSummary(out);
    return true;
  }

 protected:
  // `buffered_bytes`  of the tensor in the form that is held.
  // `leased_bytes`    what is leased for the tensor besides.
  BufferedQuantizeJob(const RpcEnvironment& env, QuantizeTask task,
                      int64_t buffered_bytes, int64_t leased_bytes)
      : env_(env),
        task_(std::move(task)),
        buffer_(env, buffered_bytes, leased_bytes) {
    frame_.end_bytes = SizeBytes();
    frame_.unit_bytes = core::ElementSizeBytes(task_.description.element_type);
  }

  const RpcEnvironment& env() const { return env_; }
  const QuantizeTask& task() const { return task_; }
  TensorBuffer& buffer() { return buffer_; }
  // Size of the reals.
  int64_t SizeBytes() const {
    return task_.description.element_count *
           core::ElementSizeBytes(task_.description.element_type);
  }

  // Read is to be called.
  void ReadFirst() { step_ = Step::kRead; }
  // Reads what Encode needs from a store, once all is held.
  virtual absl::Status Read() { return absl::OkStatus(); }
  // The encoding, once all is held.
  virtual absl::StatusOr<ResolvedEncoding> Encode() = 0;
  // True if Encode may take more than kShortWork.
  virtual bool EncodeIsLong() const { return false; }
  // Sets the mantissa bits of the histograms that the encoding comes from.
  void SetMantissaBits(int bits) { mantissa_bits_ = bits; }
  // Quantizing is going to fail: the tensor must leave nothing behind.
  virtual bool WillReject() const { return false; }
  // Offset of the real that begins that block of what is held.
  virtual int64_t RealsOffset(int64_t block) const = 0;
  // Gives `out` the codes of a block that begins with the real at
  // `offset_bytes`.
  virtual absl::Status Answer(int64_t offset_bytes,
                              absl::Span<const uint8_t> block,
                              CodeProducer* out) = 0;

 private:
  enum class Step { kRead, kEncode, kPut, kAnswer };

  void OpenAnswer(ChunkWriter* out) {
    v1::ByteRange whole;
    whole.set_end_bytes(SizeBytes());
    producer_.emplace(env_, task_, std::move(resolved_), whole);
    producer_->WriteHeader(out, mantissa_bits_);
    step_ = Step::kAnswer;
  }

  const RpcEnvironment& env_;
  const QuantizeTask task_;
  TensorBuffer buffer_;
  Step step_ = Step::kEncode;
  ResolvedEncoding resolved_;
  int mantissa_bits_ = 0;
  absl::optional<CodeProducer> producer_;
  int64_t next_block_ = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_BUFFERED_QUANTIZE_H_
