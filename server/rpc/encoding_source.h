// The source of a tensor's encoding in a request: an encoding, by name or in
// full, or a spec.

#ifndef QUANTD_SERVER_RPC_ENCODING_SOURCE_H_
#define QUANTD_SERVER_RPC_ENCODING_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/importance.h"
#include "core/parallel/stop_token.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/tensor.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/caller.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/scale_stream.h"
#include "server/rpc/spec_importance.h"
#include "server/rpc/tensor_job.h"
#include "server/store/encoding_store.h"
#include "server/wire/encoding_proto.h"

namespace quantd::server {

// Memory that a tensor may have without asking: there is a limit to the number
// of tensors.
constexpr int64_t kSmallBytes = int64_t{8} << 10;
// Advice to the client when there is no memory for an encoding.
constexpr char kEncodingWayOut[] =
    "put encodings with PutEncoding and name them by reference, or send fewer "
    "tensors at once";

// How the scales of an encoding are sent: all in one message, or in chunks. One
// message takes at most Limits::chunk_bytes with all that is beside the scales.
enum class ScaleTransport { kOneMessage, kChunks };

// Errors: those of BlockLayout::Create, BLOCK_SIZE_INVALID where it leaves no
// scale at all; at no field.
absl::StatusOr<core::BlockLayout> CheckedLayout(
    absl::Span<const int64_t> shape, absl::Span<const int64_t> block_size);

// An encoding that fits its tensor, and where it came from.
struct ResolvedEncoding {
  std::shared_ptr<const core::Encoding> encoding;
  std::shared_ptr<const core::BlockLayout> layout;
  // Empty for inline encodings that were not stored.
  std::string etag;
  // Lease of an encoding that came by reference, shared by all that use the
  // same one. The memory of an inline encoding is charged to its source.
  std::shared_ptr<const MemoryBudget::Lease> lease = nullptr;
  // The scales come in chunks, each with a zero point or none; see
  // OpenIncoming.
  bool in_chunks = false;
  bool chunks_have_zero_points = false;
  std::shared_ptr<IncomingScales> incoming = nullptr;
};

// For an encoding whose scales come in chunks: makes `encoding` and `layout`
// those of a core::ScaleWindow for elements [begin, end).
// Errors: those of IncomingScales::Create.
absl::Status OpenIncoming(const RpcEnvironment& env, int64_t begin, int64_t end,
                          bool keep_all, ResolvedEncoding* resolved);

// The encoding that a header names: inline, or by reference. Movable. Memory
// beyond a few KiB, which every tensor may have, is charged to the budget.
class EncodingSource {
 public:
  // A reference to what the caller's store has; without waiting.
  // Errors: those of KeyFromProto.
  static absl::StatusOr<EncodingSource> Open(
      const Caller& caller, const v1::EncodingReference& reference,
      const v1::TensorName& tensor_name);
  // An inline encoding. Fields that only quantd sets are ignored.
  // Errors: those of EncodingFromProto, MEMORY_BUDGET.
  static absl::StatusOr<EncodingSource> Open(const RpcEnvironment& env,
                                             const v1::Encoding& proto);

  // Resolve asks the store.
  bool waits() const { return encoding_ == nullptr; }
  // Writing the encoding into an answer takes long.
  bool is_large() const;

  // The encoding, for that tensor; of a slice the part that is the slice's.
  // `transport`  of its scales in the answer; kChunks also where they are not
  //              in it.
  // Errors: of the store, ETAG_MISMATCH, SCALE_COUNT, SCALE_COUNT_LIMIT,
  // BLOCK_SIZE_INVALID, MEMORY_BUDGET; SHAPE_INVALID for a slice and an inline
  // encoding without scales.
  absl::StatusOr<ResolvedEncoding> Resolve(const RpcEnvironment& env,
                                           const TensorDescription& description,
                                           ScaleTransport transport) const;

 private:
  bool is_reference_ = false;
  EncodingKey key_;
  // The store of a reference.
  std::shared_ptr<EncodingStore> store_;
  // The etag that the reference asks for; empty for any.
  std::string if_match_;
  std::shared_ptr<const core::Encoding> encoding_;
  // True for an inline encoding without scales.
  bool in_chunks_ = false;
  bool chunks_have_zero_points_ = false;
  std::string etag_;
  // Lease of an inline encoding.
  MemoryBudget::Lease lease_;
};

// A spec of a request, resolved for a tensor of that shape, and its layout.
struct ResolvedSpec {
  core::EncodingSpec spec;
  std::shared_ptr<const core::BlockLayout> layout;
  // See core::Calibrate; empty unless the request gave some.
  std::vector<float> outer_maximum = {};
  // Lease of the ranges of its scales; null when a caller has charged them.
  std::shared_ptr<const MemoryBudget::Lease> lease = nullptr;
  // Weights of its elements; null if all count the same.
  std::shared_ptr<SpecImportance> importance = nullptr;
};

// The weights of a spec's elements, for the core; null if there are none.
inline const core::Importance* ImportanceOf(const ResolvedSpec& spec) {
  return spec.importance == nullptr ? nullptr : spec.importance->get();
}
// The use that ReadImportance makes of a store.
StoreUse ImportanceUse(const ResolvedSpec& spec);
// Reads the weights of a spec's elements, if it has some; once.
// `field`  of the importance in the request.
// Errors: those of SpecImportance::Read, at fields of `field`.
absl::Status ReadImportance(const RpcEnvironment& env, const ResolvedSpec& spec,
                            absl::string_view field, core::StopToken stop);

// Parses a spec, and adds what its fixed ranges take to `lease`, which has to
// live as long as the spec. Each scale may have a range. They are charged as
// they came, and as they are resolved. Those of a few scales are not charged.
// Takes no importance, which needs the elements; see ResolveElementSpec.
// Errors: those of SpecFromProto, METHOD_INVALID, MEMORY_BUDGET.
absl::StatusOr<core::EncodingSpec> ParseSpec(const RpcEnvironment& env,
                                             const v1::EncodingSpec& proto,
                                             MemoryBudget::Lease* lease);

// `spec`  as ParseSpec gives it.
// Errors: those of core::ResolveSpec and CheckedLayout, SCALE_COUNT_LIMIT with
// kOneMessage; at the fields of an EncodingSpec.
absl::StatusOr<ResolvedSpec> ResolveSpec(
    const RpcEnvironment& env, const core::EncodingSpec& spec,
    absl::Span<const int64_t> shape,
    ScaleTransport transport = ScaleTransport::kOneMessage);
// Errors: those of ParseSpec as well.
absl::StatusOr<ResolvedSpec> ResolveSpec(
    const RpcEnvironment& env, const v1::EncodingSpec& proto,
    absl::Span<const int64_t> shape,
    ScaleTransport transport = ScaleTransport::kOneMessage);
// Like ResolveSpec, where the elements are searched, so that the spec may have
// an importance. Its weights may have to be read yet. For a slice, the
// arguments describe the whole tensor, and the result is for the slice.
// `name`           of the tensor.
// `outer_maximum`  that comes with the spec; see core::Calibrate.
// Errors: those of SpecImportance::Create as well; OUTER_MAXIMUM at no field;
// BLOCK_SIZE_INVALID or SYMMETRY_INVALID for a slice whose scales would depend
// on others.
absl::StatusOr<ResolvedSpec> ResolveElementSpec(
    const RpcEnvironment& env, const Caller& caller, const v1::TensorName& name,
    const v1::EncodingSpec& proto, absl::Span<const float> outer_maximum,
    const TensorDescription& description,
    ScaleTransport transport = ScaleTransport::kOneMessage);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_ENCODING_SOURCE_H_
