#include "client/cpp/retrying_stream.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "client/cpp/errors.h"
#include "client/cpp/exchange.h"
#include "client/cpp/probe.h"
#include "client/cpp/retry_policy.h"
#include "client/cpp/stream_call.h"

namespace quantd::internal {
namespace {

// A server that has answered everything needs no longer to say goodbye.
constexpr absl::Duration kFinishTimeout = absl::Seconds(1);

// How often to look whether a call that still refers to an answered tensor has
// broken.
constexpr absl::Duration kReleasePoll = absl::Milliseconds(10);

}  // namespace

RetryingStream::RetryingStream(
    std::shared_ptr<grpc::Channel> channel, std::string method,
    ClientOptions options, std::shared_ptr<const SharedBuffers> shared_buffers)
    : channel_(std::move(channel)),
      method_(std::move(method)),
      options_(std::move(options)),
      shared_buffers_(std::move(shared_buffers)) {}

RetryingStream::~RetryingStream() {
  if (call_ != nullptr) {
    if (pending_.empty()) {
      call_->Finish(kFinishTimeout);
    } else {
      call_->Cancel();
    }
    call_ = nullptr;
  }
  for (const Pending& pending : pending_) {
    pending.exchange->references()->AwaitNone(absl::InfiniteDuration());
  }
}

void RetryingStream::Send(std::unique_ptr<Exchange> exchange, bool is_last) {
  const bool is_over = !exchange->status().ok();
  pending_.push_back({std::move(exchange), is_last, is_over, absl::Now()});
  if (is_over) return;
  if (call_ == nullptr) {
    Open();
  } else {
    EnqueueReady();
  }
}

void RetryingStream::Enqueue(Pending& pending) {
  ++pending.exchange->sendings;
  pending.resumed_bytes = pending.exchange->resume_bytes();
  pending.is_on_call = true;
  pending.number = call_->Enqueue(pending.exchange.get(), pending.is_last);
  if (pending.is_last) last_number_ = pending.number;
}

void RetryingStream::EnqueueReady() {
  // They go in order, so that those that wait are at the back.
  size_t first = pending_.size();
  while (first > 0 && !pending_[first - 1].is_on_call) --first;
  for (size_t i = first; i < pending_.size(); ++i) {
    Pending& pending = pending_[i];
    if (pending.is_over) continue;
    const std::string& key = pending.exchange->order_key();
    if (!key.empty() && !keys_on_call_.insert(key).second) return;
    Enqueue(pending);
  }
}

void RetryingStream::Open() {
  call_ = StreamCall::Start(channel_, method_, options_.chunk_bytes);
  EnqueueReady();
}

void RetryingStream::DropCall() {
  call_ = nullptr;
  last_number_.reset();
  keys_on_call_.clear();
  for (Pending& pending : pending_) pending.is_on_call = false;
}

absl::Status RetryingStream::CloseBroken(bool timed_out) {
  call_->Cancel();
  for (Pending& pending : pending_) {
    if (pending.is_over || !pending.is_on_call) continue;
    Exchange& exchange = *pending.exchange;
    const bool is_answered = call_->IsAnswered(pending.number);
    if (is_answered &&
        !retry_policy_.Wants(exchange.status(), exchange.retries)) {
      End(pending, exchange.status());
      continue;
    }
    if (is_answered) exchange.retries.Add();
    exchange.Resume();
  }
  absl::Status status = call_->protocol_status();
  if (status.ok() && timed_out) {
    status = TimeoutError(options_.target, options_.timeout);
  }
  if (status.ok()) {
    status = StatusOf(call_->grpc_status(), options_, options_.timeout);
  }
  if (status.ok()) {
    status = ResponseMalformedError(
        "the server ended the stream before it had answered");
  }
  // The call goes first: until then it may refer to what it last sent.
  DropCall();
  for (Pending& pending : pending_) {
    pending.exchange->references()->AwaitNone(absl::InfiniteDuration());
  }
  return status;
}

void RetryingStream::Release(Exchange& exchange) {
  const absl::Time deadline = absl::Now() + options_.timeout;
  while (!exchange.references()->AwaitNone(kReleasePoll)) {
    const bool timed_out = absl::Now() > deadline;
    if (!timed_out && !call_->IsFinished()) continue;
    CloseBroken(timed_out).IgnoreError();
    return;
  }
}

void RetryingStream::End(Pending& pending, const absl::Status& status) {
  pending.exchange->Fail(WithAttempts(status, pending.exchange->sendings));
  pending.is_over = true;
  if (pending.is_on_call) keys_on_call_.erase(pending.exchange->order_key());
}

void RetryingStream::FailAll(const absl::Status& status) {
  for (Pending& pending : pending_) {
    if (!pending.is_over) End(pending, status);
  }
}

void RetryingStream::FailOrPause(const absl::Status& status,
                                 absl::Time deadline) {
  Pending& front = pending_.front();
  if (front.exchange->resume_bytes() > front.resumed_bytes) broken_ = Retries();
  if (absl::Now() >= deadline) {
    return End(front, absl::IsDeadlineExceeded(status)
                          ? TimeoutError(options_.target, options_.deadline)
                          : status);
  }
  if (retry_policy_.Pause(status, &broken_, deadline)) {
    broken_.Add();
  } else if (retry_policy_.Wants(status, broken_)) {
    // Only this one has no more time.
    End(front, status);
  } else {
    const absl::Status explained = broken_.Explained(status);
    broken_ = Retries();
    FailAll(explained);
  }
}

void RetryingStream::SendAgain(absl::Time deadline) {
  Pending& front = pending_.front();
  if (last_number_.has_value()) {
    // This call has seen its end and takes nothing more, but the answers to
    // the rest still come.
    const bool timed_out =
        call_->Await(*last_number_, options_.timeout, deadline) ==
        StreamCall::Outcome::kTimeout;
    if (!timed_out) call_->Finish(kFinishTimeout);
    CloseBroken(timed_out).IgnoreError();
    return;
  }
  front.exchange->retries.Add();
  front.exchange->Resume();
  Enqueue(front);
}

std::unique_ptr<Exchange> RetryingStream::Receive() {
  Pending& front = pending_.front();
  const absl::Time deadline =
      std::max(front.sent, last_received_) + options_.deadline;
  // A tensor that was refused behind another one has its time from now on.
  front.exchange->retries.since = absl::Now();
  while (!front.is_over) {
    if (call_ == nullptr) Open();
    const StreamCall::Outcome outcome =
        call_->Await(front.number, options_.timeout, deadline);
    if (outcome != StreamCall::Outcome::kAnswered) {
      const absl::Status status =
          CloseBroken(outcome == StreamCall::Outcome::kTimeout);
      // A tensor that this very call answered before it broke needs no other.
      if (!front.is_over) FailOrPause(status, deadline);
      continue;
    }
    broken_ = Retries();
    Exchange& exchange = *front.exchange;
    Release(exchange);
    if (call_ == nullptr) continue;
    if (retry_policy_.Pause(exchange.status(), &exchange.retries, deadline)) {
      SendAgain(deadline);
    } else {
      End(front, exchange.status());
    }
  }
  std::unique_ptr<Exchange> exchange = std::move(front.exchange);
  pending_.pop_front();
  last_received_ = absl::Now();
  // Sends the tensors that waited for this one.
  if (call_ != nullptr) EnqueueReady();
  return exchange;
}

}  // namespace quantd::internal
