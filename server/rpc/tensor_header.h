// The headers of the streaming RPCs: parsed, charged and checked.

#ifndef QUANTD_SERVER_RPC_TENSOR_HEADER_H_
#define QUANTD_SERVER_RPC_TENSOR_HEADER_H_

#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/descriptor.h"
#include "quantd/v1/tensor.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/rpc_environment.h"
#include "server/wire/encoding_proto.h"

namespace quantd::server {

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

// Checks that a slice has whole rows, as anything that depends on a layer's
// inputs needs.
// Errors: SHAPE_INVALID.
absl::Status CheckWholeRows(const TensorDescription& description);

// HEADER_INVALID for bytes that are not protobuf.
absl::Status HeaderBrokenError();

// Lease of a header while it is parsed, and of the `bytes` that it is parsed
// from; empty for a small one.
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

#endif  // QUANTD_SERVER_RPC_TENSOR_HEADER_H_
