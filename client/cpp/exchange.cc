#include "client/cpp/exchange.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/cpp/envelope.h"
#include "client/cpp/errors.h"
#include "quantd/v1/tensor.pb.h"

#if defined(__x86_64__)
// The same functions, for the widest vectors that the machine has.
#include "xxh_x86dispatch.h"
#endif

namespace quantd::internal {

Exchange::Exchange() : hash_(XXH3_createState()) {
  XXH3_64bits_reset(hash_.get());
}

uint64_t Exchange::PartEnd(uint64_t begin_bytes) const {
  if (!HasParts()) return payload_bytes_;
  return begin_bytes +
         std::min<uint64_t>(part_bytes_, payload_bytes_ - begin_bytes);
}

absl::StatusOr<bool> Exchange::Accept(const Response& response) {
  if (response.has_error) {
    v1::TensorError error;
    if (!error.ParseFromString(response.error)) {
      return ResponseMalformedError("the error is not a TensorError");
    }
    status_ = FromTensorError(error);
    return true;
  }
  if (response.has_header && HasOutput()) {
    if (has_header_) {
      return ResponseMalformedError("a second header for one tensor");
    }
    has_header_ = true;
    const absl::Status status = OnHeader(response.header);
    if (!status.ok()) return status;
  }
  absl::Status status;
  if (response.has_scales && HasOutput()) {
    if (!has_header_) {
      return ResponseMalformedError("scales before the header");
    }
    if (status_.ok()) status = OnScales(response.scales);
  }
  status.Update(AcceptData(response));
  if (!status.ok()) return status;
  if (!response.has_summary) return false;
  if (HasOutput() && !has_header_) {
    return ResponseMalformedError("a summary before the header");
  }
  if (status_.ok() && !shares_output_ &&
      received_bytes_ != output_.size_bytes) {
    return ResponseMalformedError(absl::StrCat(
        "expected ", output_.size_bytes, " bytes, got ", received_bytes_));
  }
  const absl::Status summary_status =
      OnSummary(response.summary, XXH3_64bits_digest(hash_.get()));
  if (!summary_status.ok()) return summary_status;
  if (!status_.ok()) return true;
  answered_bytes_ = PartEnd(answered_bytes_);
  if (HasParts()) XXH3_copyState(answered_hash_.get(), joined_hash_.get());
  BeginPart();
  return answered_bytes_ == payload_bytes_;
}

absl::Status Exchange::AcceptData(const Response& response) {
  if (response.data_size_bytes == 0) return absl::OkStatus();
  if (!has_header_) {
    return ResponseMalformedError("data before the header");
  }
  // The caller's mistake was noted; the stream goes on behind the tensor.
  if (!status_.ok()) return absl::OkStatus();
  const uint64_t expected_offset = output_.offset_bytes + received_bytes_;
  if (response.offset_bytes != expected_offset) {
    return ResponseMalformedError(absl::StrCat("expected data at byte ",
                                               expected_offset, ", got ",
                                               response.offset_bytes));
  }
  if (response.data_size_bytes > output_.size_bytes - received_bytes_) {
    return ResponseMalformedError(
        absl::StrCat("expected ", output_.size_bytes, " bytes, got more"));
  }
  for (const absl::Span<const uint8_t> piece : response.data) {
    if (output_.sink == nullptr) {
      std::memcpy(output_.bytes.data() + received_bytes_, piece.data(),
                  piece.size());
    } else {
      const absl::Status status =
          (*output_.sink)(output_.offset_bytes + received_bytes_, piece);
      if (!status.ok()) {
        Fail(status);
        return absl::OkStatus();
      }
    }
    // Hashed where it was just read: the bytes are still in cache.
    XXH3_64bits_update(hash_.get(), piece.data(), piece.size());
    if (HasParts()) {
      XXH3_64bits_update(joined_hash_.get(), piece.data(), piece.size());
    }
    received_bytes_ += piece.size();
  }
  return absl::OkStatus();
}

void Exchange::SetPayload(absl::Span<const uint8_t> payload,
                          const SharedBuffers* shared_buffers) {
  payload_ = payload;
  payload_bytes_ = payload.size();
  if (shared_buffers == nullptr) return;
  const std::optional<v1::SharedSpan> span = shared_buffers->Name(payload);
  if (span.has_value()) shared_payload_ = span->SerializeAsString();
}

void Exchange::SetPartBytes(uint64_t part_bytes) {
  part_bytes_ = part_bytes;
  if (answered_hash_ != nullptr) return;
  answered_hash_.reset(XXH3_createState());
  joined_hash_.reset(XXH3_createState());
  XXH3_64bits_reset(answered_hash_.get());
  XXH3_64bits_reset(joined_hash_.get());
}

uint64_t Exchange::JoinedChecksum() const {
  return XXH3_64bits_digest(joined_hash_.get());
}

void Exchange::BeginPart() {
  has_header_ = false;
  received_bytes_ = 0;
  output_ = Output();
  XXH3_64bits_reset(hash_.get());
}

void Exchange::Resume() {
  status_ = absl::OkStatus();
  BeginPart();
  OnResume();
  if (!HasParts()) return;
  if (answered_bytes_ == 0) XXH3_64bits_reset(answered_hash_.get());
  XXH3_copyState(joined_hash_.get(), answered_hash_.get());
}

}  // namespace quantd::internal
