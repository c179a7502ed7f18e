// A stream of exchanges that outlives the calls it takes.

#ifndef QUANTD_CLIENT_CPP_RETRYING_STREAM_H_
#define QUANTD_CLIENT_CPP_RETRYING_STREAM_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "client/cpp/exchange.h"
#include "client/cpp/retry_policy.h"
#include "client/cpp/shared_buffers.h"
#include "client/cpp/stream_call.h"
#include "grpcpp/channel.h"

namespace quantd::internal {

// Opens a call when there is something to send, opens another one when that
// breaks with UNAVAILABLE, and sends what was not answered. An exchange whose
// order_key() another one before it has, and all behind it, wait until that one
// was received. Not thread-safe; retries go on while Receive waits.
class RetryingStream {
 public:
  RetryingStream(std::shared_ptr<grpc::Channel> channel, std::string method,
                 ClientOptions options,
                 std::shared_ptr<const SharedBuffers> shared_buffers);
  // Cancels what was not received.
  ~RetryingStream();
  RetryingStream(const RetryingStream&) = delete;
  RetryingStream& operator=(const RetryingStream&) = delete;

  // Queues an exchange and starts to send, unless it has failed already or has
  // to wait for another. With `is_last` nothing may follow, which saves a round
  // trip.
  void Send(std::unique_ptr<Exchange> exchange, bool is_last);

  // The oldest exchange, answered or failed: see its status(). gRPC has let go
  // of its payload.
  // Requires: pending_count() > 0.
  std::unique_ptr<Exchange> Receive();

  const ClientOptions& options() const { return options_; }
  // The buffers whose contents may go by name.
  const SharedBuffers& shared_buffers() const { return *shared_buffers_; }

  // Sent and not received.
  int64_t pending_count() const {
    return static_cast<int64_t>(pending_.size());
  }

 private:
  struct Pending {
    std::unique_ptr<Exchange> exchange;
    bool is_last;
    // Answered, or failed: not part of call_ any more.
    bool is_over;
    absl::Time sent;
    // True for a part of call_, with this number there.
    bool is_on_call = false;
    uint64_t number = 0;
    // resume_bytes() when it was put on call_.
    uint64_t resumed_bytes = 0;
  };

  // Puts it on the call.
  void Enqueue(Pending& pending);
  // Puts on the call what is not there yet and need not wait for another.
  void EnqueueReady();
  // Starts a call and sends what is not over.
  void Open();
  // Lets go of the call; what is not over goes on the next one.
  void DropCall();
  // Sends the front, which was answered, once more.
  void SendAgain(absl::Time deadline);
  // Waits before a retry of the oldest exchange after its call broke with
  // `status`, or ends it, and all others where no retry may help.
  void FailOrPause(const absl::Status& status, absl::Time deadline);
  // Ends the call; takes note of what it answered. Returns why it ended.
  absl::Status CloseBroken(bool timed_out);
  // Waits until gRPC has let go of the payload of an answered exchange; closes
  // a call that never will.
  void Release(Exchange& exchange);
  // Ends all that is not over.
  void FailAll(const absl::Status& status);
  // Takes note of how it ended, which may be well.
  void End(Pending& pending, const absl::Status& status);

  const std::shared_ptr<grpc::Channel> channel_;
  const std::string method_;
  const ClientOptions options_;
  const std::shared_ptr<const SharedBuffers> shared_buffers_;
  absl::BitGen random_;
  RetryPolicy retry_policy_{options_, &random_};
  std::unique_ptr<StreamCall> call_;
  // The number in call_ of the exchange after which it takes no other.
  std::optional<uint64_t> last_number_;
  std::deque<Pending> pending_;
  // Keys of those that are on call_ and not over.
  absl::flat_hash_set<std::string> keys_on_call_;
  absl::Time last_received_ = absl::InfinitePast();
  // For calls that broke one after another without any answer.
  Retries broken_;
};

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_RETRYING_STREAM_H_
