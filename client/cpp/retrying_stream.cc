#include "client/cpp/retrying_stream.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "client/cpp/errors.h"
#include "client/cpp/exchange.h"
#include "client/cpp/stream_call.h"

namespace quantd::internal {
namespace {

// A server that has answered everything needs no longer to say goodbye.
constexpr absl::Duration kFinishTimeout = absl::Seconds(1);

// How often to look whether a call that still refers to an answered tensor has
// broken.
constexpr absl::Duration kReleasePoll = absl::Milliseconds(10);

bool IsRetryable(const Exchange& exchange, const ClientOptions& options) {
  return (absl::IsUnavailable(exchange.status()) ||
          exchange.retry_after() > absl::ZeroDuration()) &&
         exchange.attempts < options.max_retries;
}

}  // namespace

absl::Duration Backoff(const ClientOptions& options, int attempt,
                       absl::BitGen* random) {
  absl::Duration pause = options.initial_backoff;
  for (int i = 1; i < attempt && pause < options.max_backoff; ++i) pause *= 2;
  return std::min(pause, options.max_backoff) *
         absl::Uniform(*random, 0.5, 1.5);
}

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
  pending_.push_back({std::move(exchange), is_last, 0, is_over});
  Pending& added = pending_.back();
  if (is_over) return;
  if (call_ == nullptr) {
    Open();
  } else {
    added.number = call_->Enqueue(added.exchange.get(), is_last);
  }
}

void RetryingStream::Open() {
  call_ = StreamCall::Start(channel_, method_, options_.chunk_bytes);
  for (Pending& pending : pending_) {
    if (pending.is_over) continue;
    pending.number = call_->Enqueue(pending.exchange.get(), pending.is_last);
  }
}

absl::Status RetryingStream::CloseBroken(bool timed_out) {
  call_->Cancel();
  for (Pending& pending : pending_) {
    if (pending.is_over) continue;
    if (call_->IsAnswered(pending.number) &&
        !IsRetryable(*pending.exchange, options_)) {
      pending.is_over = true;
    } else {
      pending.exchange->Reset();
    }
  }
  absl::Status status = call_->protocol_status();
  if (status.ok() && timed_out) {
    status = TimeoutError(options_.target, options_.timeout);
  }
  if (status.ok()) {
    status =
        FromGrpcStatus(call_->grpc_status(), options_.target, options_.timeout);
  }
  if (status.ok()) {
    status = ResponseMalformedError(
        "the server ended the stream before it had answered");
  }
  // The call goes first: until then it may refer to what it last sent.
  call_ = nullptr;
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

void RetryingStream::FailAll(const absl::Status& status) {
  for (Pending& pending : pending_) {
    if (pending.is_over) continue;
    pending.exchange->Fail(status);
    pending.is_over = true;
  }
}

std::unique_ptr<Exchange> RetryingStream::Receive() {
  Pending& front = pending_.front();
  while (!front.is_over) {
    if (call_ == nullptr) Open();
    const StreamCall::Outcome outcome =
        call_->Await(front.number, options_.timeout);
    if (outcome != StreamCall::Outcome::kAnswered) {
      const absl::Status status =
          CloseBroken(outcome == StreamCall::Outcome::kTimeout);
      // What this very call answered before it broke needs no other.
      if (front.is_over) continue;
      if (!absl::IsUnavailable(status) ||
          broken_count_ >= options_.max_retries) {
        broken_count_ = 0;
        FailAll(status);
        continue;
      }
      ++broken_count_;
      absl::SleepFor(Backoff(options_, broken_count_, &random_));
      continue;
    }
    broken_count_ = 0;
    Exchange& exchange = *front.exchange;
    Release(exchange);
    if (call_ == nullptr) continue;
    if (!IsRetryable(exchange, options_)) {
      front.is_over = true;
      continue;
    }
    ++exchange.attempts;
    absl::SleepFor(std::max(exchange.retry_after(),
                            Backoff(options_, exchange.attempts, &random_)));
    exchange.Reset();
    if (front.is_last) {
      // That call took its end with it.
      call_->Finish(kFinishTimeout);
      call_ = nullptr;
    } else {
      front.number = call_->Enqueue(&exchange, front.is_last);
    }
  }
  std::unique_ptr<Exchange> exchange = std::move(front.exchange);
  pending_.pop_front();
  return exchange;
}

}  // namespace quantd::internal
