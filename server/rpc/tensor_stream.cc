#include "server/rpc/tensor_stream.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "server/wire/status.h"

namespace quantd::server {

void StreamRegistry::Drain() {
  draining_.store(true);
  absl::MutexLock lock(&mutex_);
  for (TensorStream* stream : streams_) stream->Drain();
}

void StreamRegistry::EndIdle(absl::Duration idle_timeout) {
  absl::MutexLock lock(&mutex_);
  for (TensorStream* stream : streams_) stream->EndIfIdle(idle_timeout);
  for (WatchedCall* call : calls_) call->EndIfIdle(idle_timeout);
}

void StreamRegistry::WakeParked() {
  absl::MutexLock lock(&mutex_);
  for (TensorStream* stream : streams_) stream->Wake();
}

void StreamRegistry::EndAll() {
  absl::MutexLock lock(&mutex_);
  for (TensorStream* stream : streams_) stream->EndNow(core::DrainingError());
  for (WatchedCall* call : calls_) call->EndNow();
}

bool StreamRegistry::WaitUntilEmpty(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  const auto empty = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return streams_.empty() && calls_.empty();
  };
  return mutex_.AwaitWithTimeout(absl::Condition(&empty), timeout);
}

void StreamRegistry::Enter(WatchedCall* call) {
  absl::MutexLock lock(&mutex_);
  calls_.insert(call);
}

void StreamRegistry::Leave(WatchedCall* call) {
  absl::MutexLock lock(&mutex_);
  calls_.erase(call);
}

void StreamRegistry::Add(TensorStream* stream) {
  absl::MutexLock lock(&mutex_);
  streams_.insert(stream);
}

void StreamRegistry::Remove(TensorStream* stream) {
  absl::MutexLock lock(&mutex_);
  streams_.erase(stream);
}

TensorStream* TensorStream::Start(const RpcEnvironment& env, TensorRpc* rpc,
                                  StreamRegistry* registry,
                                  grpc::CallbackServerContext* context) {
  auto stream = std::make_shared<TensorStream>(env, rpc, registry, context);
  stream->self_ = stream;
  absl::StatusOr<Caller> caller =
      env.authenticator->Authenticate(*context, stream->credential_, rpc->id());
  if (caller.ok()) stream->caller_ = *caller;
  registry->Add(stream.get());
  absl::MutexLock lock(&stream->mutex_);
  if (!caller.ok()) stream->EndWith(caller.status());
  stream->Advance();
  return stream.get();
}

TensorStream::TensorStream(const RpcEnvironment& env, TensorRpc* rpc,
                           StreamRegistry* registry,
                           grpc::CallbackServerContext* context)
    : env_(env),
      rpc_(rpc),
      registry_(registry),
      context_(context),
      start_time_(absl::Now()),
      credential_(env.authenticator->CredentialOf(*context)),
      last_progress_(start_time_) {
  env_.metrics->RpcStarted(rpc_->id());
  env_.metrics->StreamOpened();
}

void TensorStream::OnReadDone(bool ok) {
  bool work_here;
  {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    last_progress_ = absl::Now();
    if (ok) {
      inbox_.emplace(std::move(read_buffer_));
      read_buffer_.Clear();
    } else {
      reads_done_ = true;
    }
    work_here = ClaimLightWork();
    Advance();
  }
  if (work_here) Work(Place::kTransport);
}

void TensorStream::OnWriteDone(bool ok) {
  bool work_here;
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    has_written_ = true;
    last_progress_ = absl::Now();
    queued_bytes_ -= writes_.front().charge_bytes;
    writes_.pop_front();
    if (!ok) {
      cancelled_ = true;
      EndWith(absl::CancelledError());
    }
    work_here = ClaimLightWork();
    Advance();
  }
  if (work_here) Work(Place::kTransport);
}

void TensorStream::OnCancel() {
  absl::MutexLock lock(&mutex_);
  cancelled_ = true;
  EndWith(absl::CancelledError());
  Advance();
}

void TensorStream::OnDone() {
  if (job_ != nullptr) CloseTensor(/*ok=*/false);
  absl::StatusCode code;
  {
    absl::MutexLock lock(&mutex_);
    code = end_->code();
    if (context_->IsCancelled()) code = absl::StatusCode::kCancelled;
    if (cancelled_ &&
        context_->deadline() <= std::chrono::system_clock::now()) {
      code = absl::StatusCode::kDeadlineExceeded;
    }
  }
  env_.metrics->StreamClosed();
  env_.metrics->RpcHandled(rpc_->id(), static_cast<int>(code),
                           absl::Now() - start_time_);
  // It may hold a region of shared memory, and with it a part of the budget.
  message_.reset();
  // The server waits for this, and may go away from here on.
  registry_->Remove(this);
  self_.reset();
}

bool TensorStream::HasWork() const {
  return !end_.has_value() && !parked_ && queued_bytes_ < kMaxQueuedBytes &&
         (has_more_ || inbox_.has_value() || reads_done_);
}

bool TensorStream::ClaimLightWork() {
  if (working_ || finished_ || has_more_ || !HasWork() || !inbox_.has_value() ||
      inbox_->Length() > kLightMessageBytes) {
    return false;
  }
  working_ = true;
  return true;
}

void TensorStream::Advance() {
  if (finished_) return;
  if (!working_) {
    if (!end_.has_value() && registry_->draining() && !has_more_ &&
        !has_tensor_ && !inbox_.has_value() && !reads_done_) {
      EndWith(core::DrainingError());
    }
    if (HasWork()) {
      working_ = true;
      core::ThreadPool* const pool = waits_ ? env_.store_pool : env_.pool;
      const Place place = waits_ ? Place::kStore : Place::kWorker;
      pool->Schedule([self = shared_from_this(), place] { self->Work(place); });
    }
  }
  // First what the client waits for.
  if (!writing_ && !writes_.empty() && !cancelled_) {
    writing_ = true;
    // Answers that are ready go out together. Not with the first, which brings
    // the initial metadata: gRPC completes such a write only when it is sent,
    // and the hint says not to send it yet.
    grpc::WriteOptions options;
    if (writes_.size() > 1 && has_written_) options.set_buffer_hint();
    StartWrite(&writes_.front().message, options);
  }
  if (!reading_ && !reads_done_ && !inbox_.has_value() && !end_.has_value()) {
    reading_ = true;
    StartRead(&read_buffer_);
  }
  if (end_.has_value() && !working_ && !writing_ &&
      (writes_.empty() || cancelled_)) {
    finished_ = true;
    Finish(ToGrpcStatus(*end_));
  }
}

void TensorStream::EndWith(absl::Status status) {
  if (!end_.has_value()) end_ = std::move(status);
}

void TensorStream::Drain() {
  absl::MutexLock lock(&mutex_);
  Advance();
}

void TensorStream::EndIfIdle(absl::Duration idle_timeout) {
  absl::MutexLock lock(&mutex_);
  const bool waiting = has_tensor_ || end_.has_value() || !writes_.empty();
  if (!waiting || working_ || cancelled_ ||
      absl::Now() - last_progress_ < idle_timeout) {
    return;
  }
  // What the client does not read can't be followed by a status.
  if (writing_) {
    context_->TryCancel();
  } else {
    EndWith(core::StreamIdleError(idle_timeout));
    Advance();
  }
}

void TensorStream::EndNow(absl::Status status) {
  absl::MutexLock lock(&mutex_);
  EndWith(std::move(status));
  Advance();
}

void TensorStream::Wake() {
  absl::MutexLock lock(&mutex_);
  if (!parked_) return;
  parked_ = false;
  Advance();
}

void TensorStream::Work(Place place) {
  bool end_of_stream = false;
  {
    absl::MutexLock lock(&mutex_);
    if (end_.has_value()) {
      working_ = false;
      return Advance();
    }
    if (!message_.has_value() && !finishing()) {
      if (inbox_.has_value()) {
        message_.emplace();
        message_->buffer = *std::move(inbox_);
        inbox_.reset();
        // The next message may come while this one is worked on, unless that
        // takes no time.
        if (place != Place::kTransport) Advance();
      } else {
        end_of_stream = true;
      }
    }
  }
  absl::Status status;
  if (end_of_stream) {
    if (job_ != nullptr) FailTensor(reader_->CheckComplete());
  } else {
    status = DoQuantum(place);
  }
  std::vector<grpc::ByteBuffer> messages = writer_.Take();
  absl::MutexLock lock(&mutex_);
  working_ = false;
  has_more_ = message_.has_value() || finishing();
  has_tensor_ = job_ != nullptr;
  waits_ = waits();
  parked_ = memory_wait_start_ != absl::InfinitePast();
  last_progress_ = absl::Now();
  for (grpc::ByteBuffer& message : messages) {
    const int64_t charge_bytes =
        static_cast<int64_t>(message.Length()) + kQueuedMessageBytes;
    queued_bytes_ += charge_bytes;
    writes_.push_back({std::move(message), charge_bytes});
  }
  if (end_of_stream || !status.ok()) EndWith(std::move(status));
  Advance();
}

absl::Status TensorStream::DoQuantum(Place place) {
  if (message_.has_value() && !message_->opened) {
    if (absl::Status s = OpenMessage(); !s.ok()) return s;
  }
  // A step that waits is a task of its own, so that no kernel runs beside it.
  if (job_ != nullptr && MayRun(place)) {
    const bool may_feed = place != Place::kStore;
    if (finishing()) {
      FinishTensor();
    } else {
      if (!started()) StartTensor();
      if (job_ != nullptr && may_feed) FeedTensor();
      if (finishing() && may_feed && !waits()) FinishTensor();
    }
  }
  // The chunk is used up, dropped, or the tensor has all its bytes.
  if (message_.has_value() &&
      (job_ == nullptr || (started() && reader_->ready_bytes() == 0))) {
    if (job_ != nullptr) reader_->Retain();
    message_.reset();
  }
  return absl::OkStatus();
}

absl::Status TensorStream::OpenMessage() {
  RequestEnvelope& envelope = message_->envelope;
  absl::Status status = ParseRequestEnvelope(&message_->buffer, &envelope);
  if (!status.ok()) return status;
  message_->opened = true;
  if (envelope.has_header) {
    if (job_ != nullptr) FailTensor(reader_->CheckComplete());
    if (registry_->draining()) return core::DrainingError();
    status = env_.authenticator->Renew(credential_, rpc_->id(), &caller_);
    if (!status.ok()) return status;
    OpenTensor(envelope.header);
  } else if (job_ == nullptr && !skipping_) {
    return core::HeaderMissingError();
  }
  if (job_ != nullptr && envelope.shared.has_value()) {
    if (absl::Status s = FindShared(); !s.ok()) {
      FailTensor(core::WithField(s, "shared"));
    }
  }
  env_.metrics->PayloadIn(envelope.data_bytes);
  if (job_ != nullptr && !envelope.has_header) {
    if (absl::Status s = reader_->Push(envelope); !s.ok()) FailTensor(s);
  }
  return absl::OkStatus();
}

absl::Status TensorStream::FindShared() {
  RequestEnvelope& envelope = message_->envelope;
  if (envelope.data_bytes > 0) {
    return core::RegionInvalidError(
        "both data and shared in one message, expected one of them");
  }
  absl::StatusOr<SharedBytes> found =
      caller_.shared_memory.Find(*envelope.shared);
  if (!found.ok()) return found.status();
  message_->region = std::move(found->region);
  envelope.data.assign(1, found->bytes);
  envelope.data_bytes = static_cast<int64_t>(found->bytes.size());
  return absl::OkStatus();
}

void TensorStream::OpenTensor(const std::string& header) {
  skipping_ = false;
  tensor_start_time_ = absl::Now();
  env_.metrics->TensorOpened();
  absl::StatusOr<std::unique_ptr<TensorJob>> job = rpc_->Open(header, caller_);
  if (!job.ok()) {
    FailTensor(job.status());
    return;
  }
  job_ = *std::move(job);
}

void TensorStream::StartTensor() {
  if (absl::Status s = job_->Start(&writer_); !s.ok()) return FailTensor(s);
  const TensorFrame& frame = job_->frame();
  reader_.emplace(frame.begin_bytes, frame.end_bytes, frame.unit_bytes,
                  frame.granule_bytes, env_.limits.chunk_bytes);
  if (absl::Status s = reader_->Push(message_->envelope); !s.ok()) {
    FailTensor(s);
  }
}

void TensorStream::FeedTensor() {
  const int64_t ready = reader_->ready_bytes();
  if (ready == 0) return;
  const int64_t bytes = std::min(ready, job_->frame().quantum_bytes);
  if (!ReserveMemory(bytes)) return;
  job_->BeginQuantum(reader_->position_bytes(), bytes, &writer_);
  const std::shared_ptr<const Region>& region = message_->region;
  absl::Status status = reader_->Feed(
      bytes, [&](int64_t offset_bytes, absl::Span<const uint8_t> data) {
        return region == nullptr ? job_->Consume(offset_bytes, data)
                                 : job_->ConsumeShared(offset_bytes, region,
                                                       data, env_.pool, &copy_);
      });
  if (!status.ok()) return FailTensor(status);
  job_->EndQuantum();
}

void TensorStream::FinishTensor() {
  if (!ReserveMemory(0)) return;
  absl::StatusOr<bool> done = job_->Finish(&writer_);
  if (!done.ok()) return FailTensor(done.status());
  if (*done) CloseTensor(/*ok=*/true);
}

bool TensorStream::ReserveMemory(int64_t bytes) {
  const absl::Status status = job_->Reserve(bytes);
  if (!status.ok() && core::ErrorRetryAfter(status) > absl::ZeroDuration()) {
    const absl::Time now = absl::Now();
    if (memory_wait_start_ == absl::InfinitePast()) memory_wait_start_ = now;
    if (now - memory_wait_start_ < env_.limits.memory_wait) return false;
  }
  memory_wait_start_ = absl::InfinitePast();
  if (status.ok()) return true;
  FailTensor(status);
  return false;
}

void TensorStream::FailTensor(const absl::Status& status) {
  env_.metrics->LimitRejected(core::ErrorReason(status));
  writer_.SetError(status);
  skipping_ = true;
  CloseTensor(/*ok=*/false);
}

void TensorStream::CloseTensor(bool ok) {
  env_.metrics->TensorClosed();
  env_.metrics->TensorDone(rpc_->id(), ok, absl::Now() - tensor_start_time_);
  job_.reset();
  reader_.reset();
}

}  // namespace quantd::server
