// What the headers of the streaming RPCs have in common.

#ifndef QUANTD_SERVER_RPC_TENSOR_INPUT_H_
#define QUANTD_SERVER_RPC_TENSOR_INPUT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/calibrate.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/held_tensor.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/timestamp.pb.h"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/tensor.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/rpc_environment.h"
#include "server/store/encoding_store.h"
#include "server/wire/encoding_proto.h"

namespace quantd::server {

// What a tensor may have without asking: there is a limit to their number.
constexpr int64_t kSmallBytes = int64_t{8} << 10;
// A header whose unknown fields are not worth looking for.
constexpr size_t kShortHeaderBytes = 256;

// A header, and what it takes of the memory budget.
template <typename Header>
struct ParsedHeader {
  MemoryBudget::Lease lease;
  Header header;
};

// Parses a serialized header, without fields that nobody knows; a large one is
// charged before.
// Errors: HEADER_INVALID: not protobuf, or a string that is not UTF-8;
// MEMORY_BUDGET.
template <typename Header>
absl::StatusOr<ParsedHeader<Header>> ParseHeader(const RpcEnvironment& env,
                                                 const std::string& bytes);

// The checked description of a header's tensor, within the limits.
// Errors: those of DescriptionFromProto, TENSOR_TOO_LARGE, RANK_LIMIT.
absl::StatusOr<TensorDescription> CheckDescription(
    const RpcEnvironment& env, const v1::TensorDescription& proto);

// Errors: those of BlockLayout::Create, BLOCK_SIZE_INVALID where it leaves no
// scale at all, SCALE_COUNT_LIMIT; at no field.
absl::StatusOr<core::BlockLayout> CheckedLayout(
    const RpcEnvironment& env, absl::Span<const int64_t> shape,
    absl::Span<const int64_t> block_size);

// An encoding that fits its tensor, and where it came from.
struct ResolvedEncoding {
  std::shared_ptr<const core::Encoding> encoding;
  std::shared_ptr<const core::BlockLayout> layout;
  // Empty for inline encodings that were not stored.
  std::string etag;
  // Of an encoding that came by reference, with all that use the same one; what
  // one that came inline takes is charged to its source.
  std::shared_ptr<const MemoryBudget::Lease> lease = nullptr;
};

// The encoding that a header names: inline, or by reference. Movable. What it
// takes beyond a few KiB, which every tensor may, is charged to the memory
// budget.
class EncodingSource {
 public:
  // A reference to what the caller's store has; without waiting.
  // Errors: those of KeyFromProto.
  static absl::StatusOr<EncodingSource> Open(
      const Caller& caller, const v1::EncodingReference& reference,
      const v1::TensorName& tensor_name);
  // What only quantd sets in an encoding is ignored.
  // Errors: those of EncodingFromProto, SCALE_COUNT_LIMIT, MEMORY_BUDGET.
  static absl::StatusOr<EncodingSource> Open(const RpcEnvironment& env,
                                             const v1::Encoding& proto);

  // Resolve asks the store.
  bool waits() const { return encoding_ == nullptr; }
  // Writing the encoding into an answer takes long.
  bool is_large() const;

  // The encoding, for a tensor of that shape.
  // Errors: of the store, ETAG_MISMATCH, SCALE_COUNT, SCALE_COUNT_LIMIT,
  // BLOCK_SIZE_INVALID, MEMORY_BUDGET.
  absl::StatusOr<ResolvedEncoding> Resolve(
      const RpcEnvironment& env, absl::Span<const int64_t> shape) const;

 private:
  bool is_reference_ = false;
  EncodingKey key_;
  // Of a reference.
  std::shared_ptr<EncodingStore> store_;
  // That the reference asks for; empty for any.
  std::string if_match_;
  std::shared_ptr<const core::Encoding> encoding_;
  std::string etag_;
  // Of an inline encoding.
  MemoryBudget::Lease lease_;
};

// A spec of a request, resolved for a tensor of that shape, and its layout.
struct ResolvedSpec {
  core::EncodingSpec spec;
  std::shared_ptr<const core::BlockLayout> layout;
};

// Errors: those of core::ResolveSpec and CheckedLayout, at the fields of an
// EncodingSpec.
absl::StatusOr<ResolvedSpec> ResolveSpec(const RpcEnvironment& env,
                                         const core::EncodingSpec& spec,
                                         absl::Span<const int64_t> shape);
// Errors: those of SpecFromProto as well.
absl::StatusOr<ResolvedSpec> ResolveSpec(const RpcEnvironment& env,
                                         const v1::EncodingSpec& proto,
                                         absl::Span<const int64_t> shape);

// Statistics of a tensor as it arrives, charged to the memory budget as they
// grow: at once, and refused afterwards if there was no room. Not thread-safe.
class TensorAccumulator {
 public:
  static constexpr int kNoHistograms = 0;
  // Those of core::DefaultMantissaBits.
  static constexpr int kDefaultMantissaBits = -1;

  // Charges the memory budget with what the scale count needs, and
  // `more_bytes`.
  // Errors: MEMORY_BUDGET.
  static absl::StatusOr<std::unique_ptr<TensorAccumulator>> Create(
      const RpcEnvironment& env, core::ElementType element_type,
      std::shared_ptr<const core::BlockLayout> layout, int mantissa_bits,
      int64_t more_bytes = 0);

  // Makes sure that the memory budget has room for what the statistics take by
  // now, `copies` times. May be tried again.
  // Errors: MEMORY_BUDGET.
  absl::Status Reserve(int copies = 1);

  // Takes in the elements at `offset_bytes`, and counts what they add.
  void Update(int64_t offset_bytes, absl::Span<const uint8_t> data);

  const std::shared_ptr<const core::BlockLayout>& layout() const {
    return layout_;
  }
  const core::TensorStatistics& statistics() const { return statistics_; }
  // Moves the statistics out; what they take stays charged.
  core::TensorStatistics Take() { return std::move(statistics_); }

 private:
  TensorAccumulator(const RpcEnvironment& env, core::ElementType element_type,
                    std::shared_ptr<const core::BlockLayout> layout,
                    int mantissa_bits, MemoryBudget::Lease lease);
  // Charges what the statistics take beyond lease_.
  void CountUnasked();

  const RpcEnvironment& env_;
  const core::ElementType element_type_;
  const std::shared_ptr<const core::BlockLayout> layout_;
  // What there was room for, and what the latest elements took without asking.
  MemoryBudget::Lease lease_;
  MemoryBudget::Lease unasked_lease_;
  core::TensorStatistics statistics_;
};

// How much of a tensor an accumulator takes at a time: less where histograms
// grow, which are charged only afterwards.
int64_t QuantumBytes(const RpcEnvironment& env,
                     const TensorAccumulator& accumulator);

// The mantissa bits that an accumulator for the spec takes.
int MantissaBitsFor(const core::EncodingSpec& spec);
// The same where the tensor is held: none for blocks that a calibrator may look
// at by themselves. Large ones get histograms as they arrive, which take less
// than the tensor then.
int MantissaBitsWhereHeld(const ResolvedSpec& spec);
// What the threads need beside that to calibrate a spec on a held tensor: to be
// leased when its header comes.
int64_t SearchBytes(const RpcEnvironment& env, const ResolvedSpec& spec);

// An encoding that was calibrated, and what to expect of it.
struct CalibratedEncoding {
  ResolvedEncoding resolved;
  absl::optional<core::Prediction> prediction;
  // See core::Calibration.
  int mantissa_bits = 0;
};

// Whether it may take more than kShortWork to calibrate that spec on
// statistics of `scale_count` scales and `element_count` elements, or on a held
// tensor with so many.
bool TakesLong(const core::EncodingSpec& spec, int64_t scale_count,
               int64_t element_count);

// The encoding that comes of a tensor's statistics at the spec's granularity.
// `pool`  helps where it takes long; null where it does not.
// `held`  the tensor, where the statistics have no histograms.
// Errors: those of core::Calibrate, which see also for the others.
absl::StatusOr<CalibratedEncoding> CalibrateTensor(
    const RpcEnvironment& env, const ResolvedSpec& spec,
    const core::TensorStatistics& statistics,
    absl::Span<const core::Extremes> moving_average, core::ThreadPool* pool,
    core::StopToken stop, const core::HeldTensor* held = nullptr);

google::protobuf::Timestamp ToTimestamp(absl::Time time);

// What StoredEncoding says of a stored encoding.
void StoredEncodingToProto(const EncodingKey& key, const StoredEncoding& stored,
                           bool with_encoding, v1::StoredEncoding* proto);

// HEADER_INVALID of what is not protobuf.
absl::Status HeaderBrokenError();

// What a header takes that is being parsed, and `bytes` again, which it came
// out of; nothing for a small one.
// Errors: HEADER_INVALID: a large one that is not protobuf; MEMORY_BUDGET.
absl::StatusOr<MemoryBudget::Lease> ChargeHeader(
    const RpcEnvironment& env, const google::protobuf::Descriptor& type,
    const std::string& bytes);

template <typename Header>
absl::StatusOr<ParsedHeader<Header>> ParseHeader(const RpcEnvironment& env,
                                                 const std::string& bytes) {
  absl::StatusOr<MemoryBudget::Lease> lease =
      ChargeHeader(env, *Header::descriptor(), bytes);
  if (!lease.ok()) return lease.status();
  ParsedHeader<Header> parsed{*std::move(lease), {}};
  if (!parsed.header.ParseFromString(bytes)) return HeaderBrokenError();
  // Some of it is kept as long as the tensor, without the lease; of a short one
  // that is no more than the tensor takes anyway, and the search for it costs.
  if (bytes.size() > kShortHeaderBytes) {
    parsed.header.DiscardUnknownFields();
  } else if (parsed.header.tensor().has_name()) {
    // Answers repeat it.
    parsed.header.mutable_tensor()->mutable_name()->DiscardUnknownFields();
  }
  return parsed;
}

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_TENSOR_INPUT_H_
