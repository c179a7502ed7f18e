// What the headers of the streaming RPCs have in common.

#ifndef QUANTD_SERVER_RPC_TENSOR_INPUT_H_
#define QUANTD_SERVER_RPC_TENSOR_INPUT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/calibrate/calibrate.h"
#include "core/errors.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/tensor.pb.h"
#include "server/rpc/rpc_environment.h"
#include "server/store/encoding_store.h"
#include "server/wire/encoding_proto.h"

namespace quantd::server {

// Parses a serialized header.
// Errors: HEADER_INVALID: not protobuf, or a string that is not UTF-8.
template <typename Header>
absl::StatusOr<Header> ParseHeader(const std::string& bytes);

// The checked description of a header's tensor, within the limits.
// Errors: those of DescriptionFromProto, TENSOR_TOO_LARGE.
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
};

// Errors: those of KeyFromProto, of the store, ETAG_MISMATCH, SCALE_COUNT,
// SCALE_COUNT_LIMIT, BLOCK_SIZE_INVALID.
absl::StatusOr<ResolvedEncoding> ResolveReference(
    const RpcEnvironment& env, const v1::EncodingReference& reference,
    const v1::TensorName& tensor_name, absl::Span<const int64_t> shape);

// What only quantd sets in an encoding is ignored.
// Errors: those of EncodingFromProto and CheckedLayout, SCALE_COUNT.
absl::StatusOr<ResolvedEncoding> ResolveInline(const RpcEnvironment& env,
                                               const v1::Encoding& proto,
                                               absl::Span<const int64_t> shape);

// Statistics of a tensor at the granularity of a spec, and the encoding that
// comes of them. Not thread-safe.
class SpecCalibration {
 public:
  // Charges the memory budget with what the scale count needs.
  // Errors: those of SpecFromProto and CheckedLayout, MEMORY_BUDGET.
  static absl::StatusOr<std::unique_ptr<SpecCalibration>> Create(
      const RpcEnvironment& env, const v1::EncodingSpec& proto,
      const TensorDescription& description);

  // Takes in the elements at `offset_bytes`.
  void Update(int64_t offset_bytes, absl::Span<const uint8_t> data);

  int64_t scale_count() const { return layout_->scale_count(); }
  const core::TensorStatistics& statistics() const { return statistics_; }
  // Errors: those of core::CalibrateEncoding.
  absl::StatusOr<ResolvedEncoding> Calibrate() const;

 private:
  SpecCalibration(const RpcEnvironment& env, core::EncodingSpec spec,
                  core::BlockLayout layout, core::ElementType element_type,
                  MemoryBudget::Lease lease);

  const RpcEnvironment& env_;
  const core::EncodingSpec spec_;
  const std::shared_ptr<const core::BlockLayout> layout_;
  const core::ElementType element_type_;
  MemoryBudget::Lease lease_;
  core::TensorStatistics statistics_;
};

// What StoredEncoding says of a stored encoding.
void StoredEncodingToProto(const EncodingKey& key, const StoredEncoding& stored,
                           bool with_encoding, v1::StoredEncoding* proto);

template <typename Header>
absl::StatusOr<Header> ParseHeader(const std::string& bytes) {
  Header header;
  if (!header.ParseFromString(bytes)) {
    return core::HeaderInvalidError(
        "the header is not a valid message; expected protobuf with UTF-8 "
        "strings");
  }
  return header;
}

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_TENSOR_INPUT_H_
