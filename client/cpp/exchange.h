// One tensor on its way up and its answer on its way down.

#ifndef QUANTD_CLIENT_CPP_EXCHANGE_H_
#define QUANTD_CLIENT_CPP_EXCHANGE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/envelope.h"
#include "client/cpp/shared_memory.h"
#include "xxhash.h"

namespace quantd::internal {

// What goes up is fixed at birth. What comes down is gathered by Accept, which
// a stream calls for one message after another. Not thread-safe: it belongs to
// the stream's reader until the stream says that the tensor is answered.
class Exchange {
 public:
  Exchange();
  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Serialized request header.
  const std::string& request_header() const { return request_header_; }
  // Payload, and the offset of its first byte in the whole tensor.
  absl::Span<const uint8_t> payload() const { return payload_; }
  // The serialized quantd.v1.SharedSpan that goes up in place of the payload;
  // empty for none.
  const std::string& shared_payload() const { return shared_payload_; }
  uint64_t payload_offset_bytes() const { return payload_offset_bytes_; }
  const std::shared_ptr<PayloadReferences>& references() const {
    return references_;
  }

  // Takes one response; true when it was the tensor's last.
  // Errors: RESPONSE_MALFORMED, which ends the stream.
  absl::StatusOr<bool> Accept(const Response& response);

  // How the tensor ended, once Accept has said true or Fail was called.
  const absl::Status& status() const { return status_; }
  // How long the server asked to wait before a retry; zero for not at all.
  absl::Duration retry_after() const { return retry_after_; }
  void Fail(absl::Status status) { status_ = std::move(status); }

  // Forgets the answer, for a retry.
  void Reset();
  int attempts = 0;

 protected:
  // Where the payload of the answer goes.
  struct Output {
    absl::Span<uint8_t> bytes;
    // Of the first byte, in the whole output.
    uint64_t offset_bytes = 0;
  };

  void SetPayload(absl::Span<const uint8_t> payload,
                  const SharedBuffers& shared_buffers);

  // Reads the response header and prepares output_. An error that is only the
  // caller's goes to Fail; the rest of the tensor is then skipped.
  // Errors: RESPONSE_MALFORMED.
  virtual absl::Status OnHeader(absl::string_view header) = 0;
  // Reads the summary. `checksum_xxh3` is that of the payload received.
  // Errors: RESPONSE_MALFORMED. A wrong checksum goes to Fail.
  virtual absl::Status OnSummary(absl::string_view summary,
                                 uint64_t checksum_xxh3) = 0;
  // True when the answer must have a header.
  virtual bool HasOutput() const = 0;
  virtual void OnReset() = 0;

  std::string request_header_;
  absl::Span<const uint8_t> payload_;
  uint64_t payload_offset_bytes_ = 0;
  Output output_;
  // The server writes the answer's payload, and nothing of it comes down.
  bool shares_output_ = false;

 private:
  struct FreeHash {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };

  absl::Status AcceptData(const Response& response);

  std::string shared_payload_;

  const std::shared_ptr<PayloadReferences> references_ =
      std::make_shared<PayloadReferences>();
  absl::Status status_;
  absl::Duration retry_after_ = absl::ZeroDuration();
  bool has_header_ = false;
  uint64_t received_bytes_ = 0;
  std::unique_ptr<XXH3_state_t, FreeHash> hash_;
};

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_EXCHANGE_H_
