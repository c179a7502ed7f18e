#include "server/rpc/tensor_stream.h"

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"
#include "core/parallel/thread_pool.h"
#include "server/rpc/caller.h"
#include "server/rpc/unexpected.h"
#include "server/wire/rpcs.h"

namespace quantd::server {

TensorStream* TensorStream::Start(const RpcEnvironment& env, TensorRpc* rpc,
                                  CallRegistry* registry,
                                  grpc::CallbackServerContext* context) {
  const Credential credential = env.authenticator->CredentialOf(*context);
  const std::shared_ptr<TensorStream> stream(
      new TensorStream(
          env, rpc, registry, context, credential,
          env.shares->Find(env.authenticator->ShareName(*context, credential))),
      [registry](TensorStream* gone) { registry->Leave(gone); });
  stream->self_ = stream;
  absl::StatusOr<Caller> caller =
      env.authenticator->Authenticate(*context, credential, rpc->id());
  if (caller.ok()) stream->tensors_.SetCaller(*caller);
  absl::Status entered = registry->Enter(
      stream.get(), stream->account_.share().group, CallRegistry::Kind::kCall);
  absl::MutexLock lock(&stream->mutex_);
  if (!caller.ok()) {
    stream->EndWith(caller.status());
  } else if (!entered.ok()) {
    stream->EndWith(std::move(entered));
  }
  stream->Advance();
  return stream.get();
}

TensorStream::TensorStream(const RpcEnvironment& env, TensorRpc* rpc,
                           CallRegistry* registry,
                           grpc::CallbackServerContext* context,
                           Credential credential,
                           std::shared_ptr<CallerShare> share)
    : env_(env),
      rpc_(rpc->id()),
      context_(context),
      tells_progress_(context->client_metadata().count("quantd-progress") > 0),
      watchdog_(registry, env.limits.stream_age),
      account_(env, rpc_, std::move(share)),
      tensors_(env, rpc, std::move(credential),
               {&account_, &watchdog_, &stopped_}),
      transport_(this) {
  env_.metrics->RpcStarted(rpc_);
  env_.metrics->StreamOpened();
}

void TensorStream::OnReadDone(bool ok) {
  bool work_here;
  {
    absl::MutexLock lock(&mutex_);
    transport_.ReadDone(ok);
    if (outlook_.has_tensor) account_.Arrived(transport_.message_bytes());
    Count();
    work_here = ClaimLightWork();
    Advance();
  }
  if (work_here) Work(StepKind::kLight);
}

void TensorStream::OnWriteDone(bool ok) {
  bool work_here;
  {
    absl::MutexLock lock(&mutex_);
    transport_.WriteDone(ok);
    Count();
    if (!ok) EndWith(absl::CancelledError());
    work_here = ClaimLightWork();
    Advance();
  }
  if (work_here) Work(StepKind::kLight);
}

void TensorStream::OnCancel() {
  absl::MutexLock lock(&mutex_);
  transport_.Cancelled();
  EndWith(absl::CancelledError());
  Advance();
}

void TensorStream::OnDone() {
  absl::StatusCode code;
  {
    // With the mutex comes what the last task has left, too.
    absl::MutexLock lock(&mutex_);
    account_.Hold(0, /*rests=*/true);
    code = transport_.end().code();
    if (context_->IsCancelled()) code = absl::StatusCode::kCancelled;
    if (transport_.cancelled() &&
        context_->deadline() <= std::chrono::system_clock::now()) {
      code = absl::StatusCode::kDeadlineExceeded;
    }
  }
  tensors_.Abandon();
  env_.metrics->StreamClosed();
  env_.metrics->RpcHandled(rpc_, static_cast<int>(code), watchdog_.age());
  // The server waits for what is left to go.
  self_.reset();
}

void TensorStream::Drain() {
  absl::MutexLock lock(&mutex_);
  Advance();
}

void TensorStream::EndIfOverdue(const Limits& limits) {
  absl::MutexLock lock(&mutex_);
  if (absl::Status s = watchdog_.CheckAge(); !s.ok()) EndWith(std::move(s));
  TellProgress(limits.progress_interval);
  Advance();
  const bool waits =
      outlook_.has_tensor || transport_.ending() || transport_.has_answers();
  if (!waits || working_ || transport_.cancelled() ||
      core::SteadyNow() - transport_.last_progress() < limits.idle_timeout) {
    return;
  }
  // A status can't follow an answer that the client does not read.
  if (transport_.write_start_time().has_value()) {
    context_->TryCancel();
  } else {
    EndWith(core::StreamIdleError(limits.idle_timeout));
    Advance();
  }
}

void TensorStream::TellProgress(absl::Duration interval) {
  const absl::Duration now = core::SteadyNow();
  if (!tells_progress_ || !working_ || !outlook_.has_tensor ||
      transport_.ending() || transport_.has_answers() ||
      now - told_time_ < interval) {
    return;
  }
  told_time_ = now;
  const grpc::Slice nothing;
  std::vector<grpc::ByteBuffer> messages;
  messages.emplace_back(&nothing, 1);
  transport_.Answer(std::move(messages));
}

void TensorStream::EndNow() {
  absl::MutexLock lock(&mutex_);
  EndWith(core::DrainingError());
  Advance();
}

void TensorStream::LookAfterMemory() {
  absl::MutexLock lock(&mutex_);
  outlook_.waits_for_memory = false;
  // How much may be queued depends on the memory that is left.
  Count();
  Advance();
}

void TensorStream::Advance() {
  if (transport_.finished()) return;
  if (!working_) {
    EndIfIdle();
    if (HasWork()) {
      working_ = true;
      const StepKind kind = outlook_.next_step;
      const core::ThreadPool::GroupScope scope(account_.share().group);
      Schedule(env_, kind,
               [self = shared_from_this(), kind] { self->Work(kind); });
    }
  }
  // First what the client waits for.
  transport_.WriteNext();
  // Ahead of the work only while there is memory to spare, and what is dropped
  // only while there is some.
  if (!(outlook_.skips && env_.budget->exceeded())) {
    transport_.ReadNext(/*ahead=*/env_.budget->roomy());
  }
  if (!working_) transport_.Finish();
}

void TensorStream::EndIfIdle() {
  if (transport_.ending() || outlook_.has_more || outlook_.has_tensor ||
      transport_.has_message() || transport_.reads_done()) {
    return;
  }
  // While the server drains, Advance is called again by whoever looks after
  // memory.
  absl::Status status = watchdog_.CheckMayIdle(transport_.last_progress());
  if (!status.ok()) EndWith(std::move(status));
}

bool TensorStream::ClaimLightWork() {
  if (working_ || transport_.finished() || outlook_.has_more || !HasWork() ||
      !transport_.has_message() ||
      (outlook_.has_tensor &&
       transport_.message_bytes() > kLightMessageBytes)) {
    return false;
  }
  working_ = true;
  return true;
}

bool TensorStream::HasWork() const {
  if (transport_.ending() || outlook_.waits_for_memory ||
      !(outlook_.has_more || transport_.has_message() ||
        transport_.reads_done())) {
    return false;
  }
  return !QueueIsFull() || (outlook_.has_tensor && account_.OverShare(0));
}

bool TensorStream::QueueIsFull() const {
  // Dropping chunks makes no answers.
  return transport_.QueueIsFull(outlook_.skips || env_.budget->roomy());
}

void TensorStream::EndWith(absl::Status status) {
  if (transport_.ending()) return;
  env_.metrics->LimitRejected(core::ErrorReason(status));
  transport_.EndWith(std::move(status));
  stopped_.store(true, std::memory_order_relaxed);
  Count();
}

void TensorStream::Count() {
  account_.Hold(transport_.held_bytes(), transport_.ending() || QueueIsFull());
}

void TensorStream::Work(StepKind kind) {
  const core::ThreadPool::GroupScope scope(account_.share().group);
  bool over_share;
  bool end_of_stream = false;
  {
    absl::MutexLock lock(&mutex_);
    // A long step hears of the end by its token.
    if (transport_.ending() && kind != StepKind::kLong) {
      working_ = false;
      return Advance();
    }
    if (kind == StepKind::kLong) account_.BeginLong();
    over_share = account_.OverShare(env_.limits.response_chunk_bytes);
    if (tensors_.needs_message()) {
      if (transport_.has_message()) {
        tensors_.Take(transport_.TakeMessage());
        // The next message may come while this one is worked on, unless that
        // takes no time.
        if (kind != StepKind::kLight) Advance();
      } else {
        end_of_stream = true;
      }
    }
  }
  absl::Status status = Guarded(RpcNameOf(rpc_).method, [&] {
    if (!end_of_stream) return tensors_.Step(kind, over_share);
    tensors_.End();
    return absl::OkStatus();
  });
  if (kind == StepKind::kLong) account_.EndLong();
  if (!IsLowPriority(kind)) return EndWork(std::move(status), end_of_stream);
  Schedule(env_, StepKind::kQuantum, [self = shared_from_this(), status] {
    self->EndWork(status, /*end_of_stream=*/false);
  });
}

void TensorStream::EndWork(absl::Status status, bool end_of_stream) {
  std::vector<grpc::ByteBuffer> answers = tensors_.TakeAnswers();
  absl::MutexLock lock(&mutex_);
  working_ = false;
  outlook_ = tensors_.outlook();
  if (!tensors_.has_message()) transport_.ReleaseMessage();
  account_.WorkLeft(tensors_.PendingWork(), tensors_.finish_time());
  if (outlook_.has_tensor) account_.Arrived(transport_.message_bytes());
  transport_.MadeProgress();
  if (!answers.empty()) told_time_ = core::SteadyNow();
  transport_.Answer(std::move(answers));
  Count();
  // There is no way to tell a client that does not read, and no reason to hold
  // what it does not.
  const absl::optional<absl::Duration>& write = transport_.write_start_time();
  if (tensors_.cut_off() && write.has_value() &&
      core::SteadyNow() - *write >= env_.limits.memory_wait) {
    EndWith(env_.budget->TransitError());
    context_->TryCancel();
  }
  if (end_of_stream || !status.ok()) EndWith(std::move(status));
  Advance();
}

}  // namespace quantd::server
