// The tensors of one stream, one after the other.

#ifndef QUANTD_SERVER_RPC_TENSOR_SEQUENCE_H_
#define QUANTD_SERVER_RPC_TENSOR_SEQUENCE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/guard/access_list.h"
#include "server/rpc/caller.h"
#include "server/rpc/open_tensor.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/steps.h"
#include "server/rpc/stream_account.h"
#include "server/rpc/stream_watchdog.h"
#include "server/rpc/tensor_job.h"
#include "server/shared_memory/region.h"
#include "server/wire/chunk_writer.h"
#include "server/wire/envelope.h"

namespace quantd::server {

// Knows what order messages come in: a header opens a tensor, chunks feed it,
// its last byte finishes it. A tensor that fails is answered with its error,
// and what comes of it up to the next header is dropped. Calls come one at a
// time, on any thread.
class TensorSequence {
 public:
  // Who calls, and who looks after the stream; all outlive the object.
  struct Stream {
    StreamAccount* account;
    const StreamWatchdog* watchdog;
    // Nobody waits for what is computed any more.
    const std::atomic<bool>* stopped;
  };

  // The state between two steps, for the stream.
  struct Outlook {
    // A message or the end of a tensor is not done with.
    bool has_more = false;
    // A tensor began and has not ended.
    bool has_tensor = false;
    // The last tensor failed: chunks are dropped until the next header.
    bool skips = false;
    bool waits_for_memory = false;
    // The kind of thread that goes on; one for quanta also does light steps.
    StepKind next_step = StepKind::kQuantum;
  };

  TensorSequence(const RpcEnvironment& env, TensorRpc* rpc,
                 Credential credential, const Stream& stream);

  // Who makes the call, as long as no header tells otherwise.
  void SetCaller(Caller caller) { caller_ = std::move(caller); }

  // There is nothing to work on.
  bool needs_message() const { return !message_.has_value() && !finishing(); }
  // Requires: needs_message().
  void Take(grpc::ByteBuffer message);
  // One step of the message, or of the open tensor's end: what of it a thread
  // for steps of that kind may do. `over_share`  the stream has more memory
  // than it may have.
  // Errors: those that end the stream.
  absl::Status Step(StepKind kind, bool over_share);
  // No message will come any more.
  void End();
  // Closes the open tensor, if any, without an answer.
  void Abandon();

  // The answers that are ready, in order.
  std::vector<grpc::ByteBuffer> TakeAnswers() { return writer_.Take(); }
  bool has_message() const { return message_.has_value(); }
  Outlook outlook() const;
  // How long a worker needs for what has arrived of the open tensor, and what
  // it took for its end until now.
  absl::Duration PendingWork() const;
  absl::Duration finish_time() const;
  // The last tensor was lost because the stream had too much memory.
  bool cut_off() const { return cut_off_; }

 private:
  // A message being worked on; the envelope points into the buffer.
  struct Message {
    int64_t size_bytes() const { return static_cast<int64_t>(buffer.Length()); }

    grpc::ByteBuffer buffer;
    RequestEnvelope envelope;
    bool parsed = false;
    // Its tensor was admitted, but not opened yet.
    bool admitted = false;
    bool opened = false;
    // The region of `shared`, which the envelope's data then points into.
    std::shared_ptr<const Region> region;
  };

  // Takes message_ apart, and admits and opens the tensor of its header, if
  // any; a large one is not opened in a light step. Errors end the stream.
  absl::Status OpenMessage(StepKind kind);
  // A tensor begins. False when it was turned away.
  bool AdmitTensor();
  // Makes the data of message_ those of its `shared`.
  // Errors: REGION_NOT_FOUND, REGION_INVALID.
  absl::Status FindShared();
  // The next step of the open tensor. Errors are its own.
  absl::Status WorkOnTensor(StepKind kind, bool over_share);
  void FailTensor(const absl::Status& status);
  void CloseTensor(bool ok);

  // There is a tensor with a job.
  bool has_job() const { return tensor_.has_value() && tensor_->checked(); }
  bool finishing() const { return tensor_.has_value() && tensor_->finishing(); }
  // The kind of the open tensor's next step.
  StepKind next_step() const;

  const RpcEnvironment& env_;
  TensorRpc* const rpc_;
  const Credential credential_;
  const Stream stream_;
  Caller caller_;
  absl::optional<Message> message_;
  // From the admission of its header on.
  absl::optional<OpenTensor> tensor_;
  ChunkWriter writer_;
  bool skips_ = false;
  bool cut_off_ = false;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_TENSOR_SEQUENCE_H_
