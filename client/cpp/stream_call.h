// One attempt of one bidirectional call: exchanges go up one after another,
// answers come down in the same order.

#ifndef QUANTD_CLIENT_CPP_STREAM_CALL_H_
#define QUANTD_CLIENT_CPP_STREAM_CALL_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/cpp/envelope.h"
#include "client/cpp/exchange.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/client_callback.h"

namespace quantd::internal {

// Reads and writes at once on gRPC's threads, with one message of at most
// chunk_bytes of payload in flight each way, so that neither side can block
// the other. A call that failed may refer to its last payload until it is
// destroyed. Destroying it waits until gRPC is done: one of gRPC's threads must
// not drop the last reference to a channel, because it would wait for itself.
// Thread-safe.
class StreamCall final
    : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Starts the call of e.g. "/quantd.v1.QuantizationService/Quantize".
  static std::unique_ptr<StreamCall> Start(
      const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
      int64_t chunk_bytes);

  // Cancels the call unless it has finished.
  ~StreamCall() override;

  // Queues an exchange, which must live until it is answered or the call has
  // finished. Returns its number. With `is_last` no other may follow.
  uint64_t Enqueue(Exchange* exchange, bool is_last)
      ABSL_LOCKS_EXCLUDED(mutex_);

  enum class Outcome { kAnswered, kFinished, kTimeout };
  // Returns when exchange `number` is answered, when the call has finished
  // without answering it, or when nothing has moved for `timeout` or it is
  // `deadline`.
  Outcome Await(uint64_t number, absl::Duration timeout, absl::Time deadline)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // True when exchange `number` was answered.
  bool IsAnswered(uint64_t number) const ABSL_LOCKS_EXCLUDED(mutex_);

  // True when gRPC is done with the call.
  bool IsFinished() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Says that nothing more will be sent, and waits for the server to finish;
  // after `timeout` cancels.
  void Finish(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends the call at once and returns when gRPC is done with it.
  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_);

  // Requires: the call has finished.
  grpc::Status grpc_status() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The error in the answer, if that is why the call was cancelled.
  absl::Status protocol_status() const ABSL_LOCKS_EXCLUDED(mutex_);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnWritesDoneDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  explicit StreamCall(int64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {}

  enum class Step {
    kNone,
    kWrite,
    kWriteAndFollow,
    kWriteLast,
    kWritesDone,
    kRelease
  };
  // Decides what the writing side does next and prepares write_buffer_; the
  // caller runs it after unlocking.
  Step NextStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run(Step step);
  // A part of a tensor that is on its way.
  struct Part {
    Exchange* exchange;
    // With its answer the tensor is answered.
    bool is_last;
    // An earlier part has failed: the answer is of no interest.
    bool is_void;
  };
  // Takes note that the tensor at the front of unanswered_, whose part has just
  // been answered, has failed, and that nothing more of it need be sent.
  void DropRest(Exchange* exchange) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The tensor is small, and all that is under way.
  bool IsLoneSmall(uint64_t number) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns when the tensor is answered, or soon.
  void Poll(uint64_t number) const;
  void OnWriteSideDone(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  // The front of unsent_ is done with.
  void PopUnsent() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Handles read_buffer_. Errors: RESPONSE_MALFORMED.
  absl::Status HandleResponse() ABSL_LOCKS_EXCLUDED(mutex_);

  const int64_t chunk_bytes_;
  grpc::ClientContext context_;
  // Used by the one read and the one write that are in flight.
  grpc::ByteBuffer read_buffer_;
  grpc::ByteBuffer write_buffer_;
  Response response_;

  mutable absl::Mutex mutex_;
  // Not completely sent, oldest first; the front one up to sent_bytes_ once
  // begun_, which is within its part when header_sent_.
  std::deque<Exchange*> unsent_ ABSL_GUARDED_BY(mutex_);
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t sent_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t part_end_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool header_sent_ ABSL_GUARDED_BY(mutex_) = false;
  // The front one has failed, but the server waits for the rest of this part.
  bool stops_after_part_ ABSL_GUARDED_BY(mutex_) = false;
  // Begun and not answered, oldest first.
  std::deque<Part> unanswered_ ABSL_GUARDED_BY(mutex_);
  uint64_t enqueued_count_ ABSL_GUARDED_BY(mutex_) = 0;
  // Changes under mutex_.
  std::atomic<uint64_t> answered_count_{0};
  // A write is in flight, or is about to start.
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  // No exchange follows those in unsent_.
  bool no_more_ ABSL_GUARDED_BY(mutex_) = false;
  // The end of the writes went up.
  bool writes_done_ ABSL_GUARDED_BY(mutex_) = false;
  // The stream is over for reading or writing: start no write any more.
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  // The hold that lets other threads start writes is still there.
  bool held_ ABSL_GUARDED_BY(mutex_) = true;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time last_progress_ ABSL_GUARDED_BY(mutex_);
  grpc::Status grpc_status_ ABSL_GUARDED_BY(mutex_);
  absl::Status protocol_status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_STREAM_CALL_H_
