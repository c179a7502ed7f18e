// One tensor on its way up and its answer on its way down.

#ifndef QUANTD_CLIENT_CPP_EXCHANGE_H_
#define QUANTD_CLIENT_CPP_EXCHANGE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/envelope.h"
#include "client/cpp/retry_policy.h"
#include "client/cpp/shared_buffers.h"
#include "client/cpp/tensor_stream.h"
#include "grpcpp/support/slice.h"
#include "xxhash.h"

namespace quantd::internal {

struct FreeHash {
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};
using Hash = std::unique_ptr<XXH3_state_t, FreeHash>;

// The request is fixed at birth. Accept gathers the answer; a stream calls it
// for one message after another. Not thread-safe: an exchange belongs to the
// stream's reader until the stream says that the tensor is answered. The
// members that tell how to send it change only in Resume.
//
// A large tensor with a fixed encoding goes up in parts. To the server each
// part is a range, with an answer and a checksum of its own. A retry goes on
// after the last part that was answered.
class Exchange {
 public:
  Exchange();
  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Offset in the payload of the first byte that is not answered: where a
  // stream begins to send.
  uint64_t resume_bytes() const { return answered_bytes_; }
  // End in the payload of the part that begins there.
  uint64_t PartEnd(uint64_t begin_bytes) const;
  // Serialized request header of the part that begins there.
  virtual std::string PartHeader(uint64_t begin_bytes) const {
    return request_header_;
  }
  // Size of the payload, the offset of its first byte in the whole tensor, and
  // its bytes from `begin_bytes` on. The last belongs to the writing side.
  uint64_t payload_bytes() const { return payload_bytes_; }
  uint64_t payload_offset_bytes() const { return payload_offset_bytes_; }
  virtual grpc::Slice PayloadSlice(uint64_t begin_bytes,
                                   uint64_t size_bytes) const {
    return SliceOf(payload_.subspan(begin_bytes, size_bytes), references_);
  }
  // The serialized quantd.v1.SharedSpan that goes up in place of the payload;
  // empty for none.
  const std::string& shared_payload() const { return shared_payload_; }
  // The scales that go up no later than the bytes before `end_bytes` of the
  // payload: adds what goes into one message to `pieces`, each one field of it.
  // False when there are more, which go before those bytes. Belongs to the
  // writing side.
  virtual bool NextScales(uint64_t end_bytes,
                          std::vector<std::string>* pieces) {
    return true;
  }
  // Lets the scales begin anew.
  virtual void RewindScales() {}
  const std::shared_ptr<PayloadReferences>& references() const {
    return references_;
  }

  // Two exchanges with the same one, unless it is empty, must not be on their
  // way at once.
  const std::string& order_key() const { return order_key_; }

  // Takes one response; true when it was the tensor's last, of the last part or
  // of one that failed.
  // Errors: RESPONSE_MALFORMED, which ends the stream.
  absl::StatusOr<bool> Accept(const Response& response);

  // How the tensor ended, once Accept has said true or Fail was called.
  const absl::Status& status() const { return status_; }
  void Fail(absl::Status status) { status_ = std::move(status); }

  // Forgets what is not complete of the answer, for a retry.
  void Resume();
  // Retries that the server asked for, for this tensor.
  Retries retries;
  // How often it was put on a call.
  int sendings = 0;

 protected:
  // Destination of the payload of the answer.
  struct Output {
    absl::Span<uint8_t> bytes;
    // Offset of the first byte in the whole output.
    uint64_t offset_bytes = 0;
    // Takes size_bytes in place of `bytes`, unless it is null.
    const Sink* sink = nullptr;
    uint64_t size_bytes = 0;
  };

  // Null for `shared_buffers`: not by name.
  void SetPayload(absl::Span<const uint8_t> payload,
                  const SharedBuffers* shared_buffers);
  // One that PayloadSlice makes.
  void SetPayloadBytes(uint64_t size_bytes) { payload_bytes_ = size_bytes; }
  // Sends it in parts of that size. Requires: a multiple of 64, once at birth
  // and then in OnResume.
  void SetPartBytes(uint64_t part_bytes);
  bool HasParts() const { return part_bytes_ > 0; }
  bool IsLastPart() const { return PartEnd(answered_bytes_) == payload_bytes_; }
  // XXH3 of the answer's payload up to here, over all parts.
  // Requires: HasParts().
  uint64_t JoinedChecksum() const;

  // Reads the response header of a part and prepares output_. An error that is
  // only the caller's goes to Fail; the rest of the part is then skipped.
  // Errors: RESPONSE_MALFORMED.
  virtual absl::Status OnHeader(absl::string_view header) = 0;
  // Reads the summary of a part. `checksum_xxh3` is that of its payload.
  // Errors: RESPONSE_MALFORMED. A wrong checksum goes to Fail.
  virtual absl::Status OnSummary(absl::string_view summary,
                                 uint64_t checksum_xxh3) = 0;
  // Takes scales, which come behind the header. An error that is only the
  // caller's goes to Fail.
  // Errors: RESPONSE_MALFORMED.
  virtual absl::Status OnScales(absl::string_view scales) {
    return absl::OkStatus();
  }
  // True when the answer must have a header.
  virtual bool HasOutput() const = 0;
  // Forgets the answer from resume_bytes() on.
  virtual void OnResume() = 0;
  // For OnResume: forgets also what was complete.
  void Restart() { answered_bytes_ = 0; }

  std::string request_header_;
  std::string order_key_;
  uint64_t payload_offset_bytes_ = 0;
  // Output of the part that is being answered.
  Output output_;
  // The server writes the answer's payload, and nothing of it comes down.
  bool shares_output_ = false;

 private:
  absl::Status AcceptData(const Response& response);
  // Makes ready for the header of the part at answered_bytes_.
  void BeginPart();

  absl::Span<const uint8_t> payload_;
  uint64_t payload_bytes_ = 0;
  std::string shared_payload_;

  const std::shared_ptr<PayloadReferences> references_ =
      std::make_shared<PayloadReferences>();
  absl::Status status_;
  // 0: in one.
  uint64_t part_bytes_ = 0;
  // Size of the payload that is answered, up to the end of a part.
  uint64_t answered_bytes_ = 0;
  // State of the part that is being answered.
  bool has_header_ = false;
  uint64_t received_bytes_ = 0;
  Hash hash_;
  // With parts: hash of the answer up to answered_bytes_, and up to here.
  Hash answered_hash_;
  Hash joined_hash_;
};

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_EXCHANGE_H_
