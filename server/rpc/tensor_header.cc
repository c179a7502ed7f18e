#include "server/rpc/tensor_header.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "core/types/tensor_slice.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "server/rpc/encoding_source.h"
#include "server/wire/parsed_bytes.h"

namespace quantd::server {

absl::Status HeaderBrokenError() {
  return core::HeaderInvalidError(
      "the header is not a valid message; expected protobuf with UTF-8 "
      "strings");
}

absl::StatusOr<MemoryBudget::Lease> ChargeHeader(
    const RpcEnvironment& env, const google::protobuf::Descriptor& type,
    const std::string& bytes) {
  // Takes a few MiB at most, of as many threads as there are workers.
  constexpr size_t kSmallHeaderBytes = 128 << 10;
  if (bytes.size() <= kSmallHeaderBytes) return MemoryBudget::Lease();
  // Encodings grow less than that when they are parsed.
  constexpr int64_t kMostGrowth = 8;
  const grpc::Slice slice(bytes.data(), bytes.size(),
                          grpc::Slice::STATIC_SLICE);
  grpc::ByteBuffer buffer(&slice, 1);
  const absl::StatusOr<int64_t> parsed_bytes =
      ParsedBytes(&buffer, type,
                  std::min(env.budget->total_bytes(),
                           kMostGrowth * env.limits.message_bytes));
  // Parsing it would make everything before the place where it breaks.
  if (absl::IsInvalidArgument(parsed_bytes.status())) {
    return HeaderBrokenError();
  }
  return env.budget->Acquire(
      parsed_bytes.ok() ? *parsed_bytes + static_cast<int64_t>(bytes.size())
                        : std::numeric_limits<int64_t>::max(),
      kEncodingWayOut);
}

absl::Status CheckWholeRows(const TensorDescription& description) {
  if (!description.slice.has_value()) return absl::OkStatus();
  const core::TensorSlice& slice = *description.slice;
  for (size_t d = 1; d < slice.shape.size(); ++d) {
    if (slice.HasWhole(d)) continue;
    return core::ShapeInvalidError(
        absl::StrCat("the slice has ", slice.shape[d], " of ",
                     slice.global_shape[d], " in dimension ", d,
                     ", expected whole rows: each of them meets all features "
                     "of the inputs"));
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorDescription> CheckDescription(
    const RpcEnvironment& env, const v1::TensorDescription& proto) {
  absl::StatusOr<TensorDescription> description = DescriptionFromProto(proto);
  if (!description.ok()) {
    return core::WithField(description.status(), "header.tensor");
  }
  const int64_t size_bytes = description->element_count *
                             core::ElementSizeBytes(description->element_type);
  if (size_bytes > env.limits.tensor_bytes) {
    return core::WithField(
        core::TensorTooLargeError(size_bytes, env.limits.tensor_bytes),
        "header.tensor.shape");
  }
  const auto rank = static_cast<int64_t>(description->shape.size());
  if (rank > env.limits.tensor_rank) {
    return core::WithField(core::RankLimitError(env.limits.tensor_rank, rank),
                           "header.tensor.shape");
  }
  return description;
}

}  // namespace quantd::server
