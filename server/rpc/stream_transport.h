// The messages of a streaming call, up and down, and its end.

#ifndef QUANTD_SERVER_RPC_STREAM_TRANSPORT_H_
#define QUANTD_SERVER_RPC_STREAM_TRANSPORT_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "grpcpp/grpcpp.h"

namespace quantd::server {

// How far a client may send ahead of what the server reads, at most: about one
// chunk.
constexpr int64_t kLookAheadBytes = int64_t{1} << 20;

// Reads and writes the messages of a call. It reads one message ahead of the
// one that is worked on. Answers wait in a queue until the client takes them;
// the call ends after the last one is written. Knows bytes and no tensors.
//
// Not thread-safe: whoever has the reactor guards it. gRPC never runs callbacks
// from within StartRead, StartWrite and Finish here, so those are called with
// the mutex held.
class StreamTransport {
 public:
  using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  // `reactor`  of the call; outlives the object.
  explicit StreamTransport(Reactor* reactor);

  // Called by the reactor when gRPC calls it.
  void ReadDone(bool ok);
  // Errors of gRPC cancel the call.
  void WriteDone(bool ok);
  void Cancelled();

  // A message came that nobody took yet, of so many bytes.
  bool has_message() const { return inbox_.has_value(); }
  int64_t message_bytes() const {
    return inbox_.has_value() ? static_cast<int64_t>(inbox_->Length()) : 0;
  }
  // No further message will come.
  bool reads_done() const { return reads_done_; }
  // Hands the message over. It counts as held until ReleaseMessage.
  // Requires: has_message().
  grpc::ByteBuffer TakeMessage();
  // The message that was taken is used up.
  void ReleaseMessage() { taken_bytes_ = 0; }

  // Queues answers for the client.
  void Answer(std::vector<grpc::ByteBuffer> messages);
  // The client has to take some before there may be more. That is what bounds
  // the memory of a stream whose client does not read; the answer of one more
  // quantum may come on top. Fewer may wait when memory is not `roomy`.
  bool QueueIsFull(bool roomy) const;
  bool has_answers() const { return !writes_.empty(); }
  // The client has not taken an answer since that time, if it has to.
  const absl::optional<absl::Duration>& write_start_time() const {
    return write_start_time_;
  }

  // Messages and answers, with what gRPC may have read ahead of them.
  int64_t held_bytes() const;
  // When something came, went or was worked on for the last time.
  absl::Duration last_progress() const { return last_progress_; }
  void MadeProgress();

  // Sets how the call ends, once.
  void EndWith(absl::Status status);
  bool ending() const { return end_.has_value(); }
  // Requires: ending().
  const absl::Status& end() const { return *end_; }
  bool cancelled() const { return cancelled_; }
  bool finished() const { return finished_; }

  // Each starts what it may start at this moment, if anything.
  void WriteNext();
  // `ahead`: also while a message that was taken is worked on.
  void ReadNext(bool ahead);
  // Ends the call if it is to end and all answers are written.
  void Finish();

 private:
  // A message for the client.
  struct QueuedAnswer {
    grpc::ByteBuffer message;
    // Its share of queued_bytes_.
    int64_t charge_bytes;
  };

  Reactor* const reactor_;
  grpc::ByteBuffer read_buffer_;
  absl::optional<grpc::ByteBuffer> inbox_;
  bool reading_ = false;
  bool reads_done_ = false;
  int64_t taken_bytes_ = 0;
  std::deque<QueuedAnswer> writes_;
  int64_t queued_bytes_ = 0;
  // Start of the write that is under way.
  absl::optional<absl::Duration> write_start_time_;
  // A write has completed.
  bool has_written_ = false;
  absl::Duration last_progress_;
  absl::optional<absl::Status> end_;
  bool cancelled_ = false;
  bool finished_ = false;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_STREAM_TRANSPORT_H_
