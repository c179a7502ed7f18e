// A tensor's task of Quantize, and the answer that it makes.

#ifndef QUANTD_SERVER_RPC_CODE_PRODUCER_H_
#define QUANTD_SERVER_RPC_CODE_PRODUCER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/formats/number_format.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/quantize.h"
#include "core/types/encoding.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/rpc/answer_bytes.h"
#include "server/rpc/caller.h"
#include "server/rpc/code_geometry.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/scale_stream.h"
#include "server/rpc/tensor_header.h"
#include "server/store/encoding_store.h"
#include "server/wire/chunk_writer.h"

namespace quantd::server {

// The request of a header, checked.
struct QuantizeTask {
  v1::TensorName name;
  TensorDescription description;
  core::NanPolicy nan_policy = core::NanPolicy::kDefault;
  bool omit_encoding = false;
  bool scales_in_chunks = false;
  // Key to store the encoding under, if it is to be stored.
  absl::optional<EncodingKey> store_key;
  // Precondition and provenance for storing it.
  Precondition put;
  // The store of the caller.
  std::shared_ptr<EncodingStore> store;
  // Shared memory for the codes, if they do not go into messages.
  absl::optional<SharedBytes> output;

  ScaleTransport transport() const {
    return scales_in_chunks || omit_encoding ? ScaleTransport::kChunks
                                             : ScaleTransport::kOneMessage;
  }
};

// Errors are at fields of the header.
absl::StatusOr<QuantizeTask> CheckQuantizeTask(const RpcEnvironment& env,
                                               const v1::QuantizeHeader& header,
                                               const Caller& caller);

CodeGeometry QuantizeGeometry(const TensorDescription& description,
                              const core::FormatInfo& format);

// Reals of a quantum: their codes fill at most one message, if they go there.
int64_t QuantumRealBytes(const RpcEnvironment& env, const QuantizeTask& task,
                         const CodeGeometry& geometry);

// Turns reals into codes where they go out. Not thread-safe.
class CodeProducer {
 public:
  // The answer is the codes of the reals [range). `env` and `task` outlive
  // this.
  CodeProducer(const RpcEnvironment& env, const QuantizeTask& task,
               ResolvedEncoding resolved, const v1::ByteRange& range);

  // The answer's header. `mantissa_bits` of the histograms that the encoding
  // comes from; 0 for none.
  void WriteHeader(ChunkWriter* out, int mantissa_bits = 0) const;

  // Makes room for the codes of `bytes` of reals at `offset_bytes`.
  void Begin(int64_t offset_bytes, int64_t bytes, ChunkWriter* out);

  // `counts`  what is added to; the answer's are counts().
  absl::Status Quantize(int64_t offset_bytes, absl::Span<const uint8_t> data,
                        core::QuantizeCounts* counts, core::ThreadPool* pool);
  core::QuantizeCounts* counts() { return &counts_; }

  // Makes ready for reals whose scales come in chunks.
  // Errors: SCALE_COUNT.
  absl::Status Advance(int64_t offset_bytes, int64_t bytes);

  // Quantizes data that may change meanwhile, which core::Quantize allows for.
  absl::Status QuantizeShared(int64_t offset_bytes,
                              absl::Span<const uint8_t> shared);

  // Takes codes that were made before, `counts` in all, instead.
  void Take(int64_t offset_bytes, absl::Span<const uint8_t> codes);
  void Take(const core::QuantizeCounts& counts) { counts_ = counts; }
  void Take(const v1::OutputNoise& noise) { output_noise_ = noise; }

  void End() { answer_.End(env_.metrics); }

  // Sends the scales before `end`, which `encoding` has from index `first` on,
  // and all outer scales.
  void SendScales(int64_t end, const core::Encoding& encoding, int64_t first,
                  ChunkWriter* out);

  // `etag`  of what was stored after the header was written.
  void WriteSummary(ChunkWriter* out, absl::string_view etag = "") const {
    WriteSummary(out, etag, resolved_.encoding->degenerate_count);
  }
  void WriteSummary(ChunkWriter* out, absl::string_view etag,
                    int64_t degenerate_count) const;

 private:
  int64_t ElementOf(int64_t offset_bytes) const {
    return offset_bytes / geometry_.real_bytes;
  }
  void SetEncoding(v1::Encoding* proto) const;
  // Sends the scales that the elements use, if they are there: otherwise the
  // tensor is about to fail.
  void SendScales(int64_t first, int64_t count, ChunkWriter* out);

  const RpcEnvironment& env_;
  const QuantizeTask& task_;
  const ResolvedEncoding resolved_;
  const core::FormatInfo& format_;
  const CodeGeometry geometry_;
  const v1::ByteRange range_;
  core::QuantizeCounts counts_;
  absl::optional<v1::OutputNoise> output_noise_;
  AnswerBytes answer_;
  // Only with scales_in_chunks.
  absl::optional<ScaleAnswer> scale_answer_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_CODE_PRODUCER_H_
