#include "server/rpc/tensor_stream.h"

#include <time.h>

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
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"
#include "server/rpc/unexpected.h"
#include "server/shared_memory/shared_blocks.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

// How long a stream that has nothing open stays, while the server drains.
constexpr absl::Duration kLastWordTime = absl::Milliseconds(100);

// What the calling thread has had of the processors.
absl::Duration ThreadTime() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return absl::DurationFromTimespec(time);
}

}  // namespace

TensorStream* TensorStream::Start(const RpcEnvironment& env, TensorRpc* rpc,
                                  CallRegistry* registry,
                                  grpc::CallbackServerContext* context) {
  const std::shared_ptr<TensorStream> stream(
      new TensorStream(env, rpc, registry, context),
      [registry](TensorStream* gone) { registry->Leave(gone); });
  stream->self_ = stream;
  absl::StatusOr<Caller> caller =
      env.authenticator->Authenticate(*context, stream->credential_, rpc->id());
  if (caller.ok()) stream->caller_ = *caller;
  absl::Status entered = registry->Enter(stream.get(), stream->share_->group,
                                         CallRegistry::Kind::kCall);
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
                           grpc::CallbackServerContext* context)
    : env_(env),
      rpc_(rpc),
      registry_(registry),
      context_(context),
      start_time_(core::SteadyNow()),
      credential_(env.authenticator->CredentialOf(*context)),
      share_(env.shares->Find(
          env.authenticator->ShareName(*context, credential_))),
      load_(&share_->admission),
      transit_(env.budget),
      last_progress_(start_time_) {
  env_.metrics->RpcStarted(rpc_->id());
  env_.metrics->StreamOpened();
}

void TensorStream::OnReadDone(bool ok) {
  bool work_here;
  {
    absl::MutexLock lock(&mutex_);
    reading_ = false;
    last_progress_ = core::SteadyNow();
    if (ok) {
      inbox_.emplace(std::move(read_buffer_));
      read_buffer_.Clear();
      const auto bytes = static_cast<int64_t>(inbox_->Length());
      if (has_tensor_) {
        pending_work_ += admission().FeedTime(rpc_->id(), bytes);
        CountLoad();
      }
      CountTransit();
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
    last_progress_ = core::SteadyNow();
    queued_bytes_ -= writes_.front().charge_bytes;
    writes_.pop_front();
    CountTransit();
    CountLoad();
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
  absl::StatusCode code;
  {
    // With the mutex comes what the last task has left, too.
    absl::MutexLock lock(&mutex_);
    transit_.Set(0);
    code = end_->code();
    if (context_->IsCancelled()) code = absl::StatusCode::kCancelled;
    if (cancelled_ &&
        context_->deadline() <= std::chrono::system_clock::now()) {
      code = absl::StatusCode::kDeadlineExceeded;
    }
  }
  if (tensor_open_) CloseTensor(/*ok=*/false);
  env_.metrics->StreamClosed();
  env_.metrics->RpcHandled(rpc_->id(), static_cast<int>(code),
                           core::SteadyNow() - start_time_);
  // The server waits for what is left to go.
  self_.reset();
}

bool TensorStream::HasWork() const {
  if (end_.has_value() || parked_ ||
      !(has_more_ || inbox_.has_value() || reads_done_)) {
    return false;
  }
  return !QueueIsFull() || (has_tensor_ && transit_.excessive(0));
}

bool TensorStream::QueueIsFull() const {
  // Dropping chunks makes no answers.
  const int64_t limit_bytes =
      skips_ || env_.budget->roomy() ? kMaxQueuedBytes : kShortQueuedBytes;
  return queued_bytes_ >= limit_bytes;
}

bool TensorStream::ClaimLightWork() {
  if (working_ || finished_ || has_more_ || !HasWork() || !inbox_.has_value() ||
      (has_tensor_ && inbox_->Length() > kLightMessageBytes)) {
    return false;
  }
  working_ = true;
  return true;
}

void TensorStream::Advance() {
  if (finished_) return;
  if (!working_) {
    if (!end_.has_value() && !has_more_ && !has_tensor_ &&
        !inbox_.has_value() && !reads_done_) {
      if (registry_->draining()) {
        // The client may be about to end it by itself; Advance is called again
        // by whoever looks after memory.
        if (core::SteadyNow() - last_progress_ >= kLastWordTime) {
          EndWith(core::DrainingError());
        }
      } else if (old_.load()) {
        EndWith(core::StreamAgeError(env_.limits.stream_age));
      }
    }
    if (HasWork()) {
      working_ = true;
      const Place place = next_place_;
      core::ThreadPool* const pool = place == Place::kStore  ? env_.store_pool
                                     : place == Place::kLong ? env_.long_pool
                                                             : env_.pool;
      const core::ThreadPool::GroupScope scope(share_->group);
      pool->Schedule([self = shared_from_this(), place] { self->Work(place); });
    }
  }
  // First what the client waits for.
  if (!writing_ && !writes_.empty() && !cancelled_) {
    writing_ = true;
    write_start_time_ = core::SteadyNow();
    // Answers that are ready go out together. Not with the first, which brings
    // the initial metadata: gRPC completes such a write only when it is sent,
    // and the hint says not to send it yet.
    grpc::WriteOptions options;
    if (writes_.size() > 1 && has_written_) options.set_buffer_hint();
    StartWrite(&writes_.front().message, options);
  }
  // Ahead of the work only while there is memory to spare, and what is dropped
  // only while there is some.
  if (!reading_ && !reads_done_ && !inbox_.has_value() && !end_.has_value() &&
      (message_bytes_ == 0 || env_.budget->roomy()) &&
      !(skips_ && env_.budget->exceeded())) {
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
  if (end_.has_value()) return;
  env_.metrics->LimitRejected(core::ErrorReason(status));
  end_ = std::move(status);
  stopped_.store(true, std::memory_order_relaxed);
  CountLoad();
}

void TensorStream::CountLoad() {
  if (end_.has_value() || QueueIsFull()) {
    load_.Set(absl::ZeroDuration());
  } else {
    // When it takes longer than others did, nobody knows for how long.
    const absl::Duration done = LongTime();
    load_.Set(std::max(pending_work_ - done, done / 4), spent_work_ + done);
  }
}

absl::Duration TensorStream::LongTime() const {
  if (!long_start_.has_value()) return absl::ZeroDuration();
  // Those of one caller share the processors evenly.
  const int others = std::max(1, env_.long_pool->BusyThreads(share_->group));
  return (core::SteadyNow() - *long_start_) *
         std::min(1.0, static_cast<double>(env_.pool->thread_count()) / others);
}

void TensorStream::CountTransit() {
  int64_t bytes = queued_bytes_ + message_bytes_;
  if (inbox_.has_value()) bytes += static_cast<int64_t>(inbox_->Length());
  // What is worth counting has more behind it.
  if (bytes > kShortQueuedBytes) bytes += kLookAheadBytes;
  transit_.Set(bytes);
}

void TensorStream::Drain() {
  absl::MutexLock lock(&mutex_);
  Advance();
}

void TensorStream::EndIfOverdue(const Limits& limits) {
  absl::MutexLock lock(&mutex_);
  const absl::Duration now = core::SteadyNow();
  const absl::Duration age = now - start_time_;
  if (age >= limits.stream_age && !end_.has_value()) {
    old_.store(true);
    if (age >= 2 * limits.stream_age) {
      EndWith(core::StreamAgeError(limits.stream_age));
    }
    Advance();
  }
  const bool waiting = has_tensor_ || end_.has_value() || !writes_.empty();
  if (!waiting || working_ || cancelled_ ||
      now - last_progress_ < limits.idle_timeout) {
    return;
  }
  // What the client does not read can't be followed by a status.
  if (writing_) {
    context_->TryCancel();
  } else {
    EndWith(core::StreamIdleError(limits.idle_timeout));
    Advance();
  }
}

void TensorStream::EndNow() {
  absl::MutexLock lock(&mutex_);
  EndWith(core::DrainingError());
  Advance();
}

void TensorStream::LookAfterMemory() {
  absl::MutexLock lock(&mutex_);
  parked_ = false;
  // How much may be queued depends on the memory that is left.
  CountLoad();
  Advance();
}

void TensorStream::Work(Place place) {
  const core::ThreadPool::GroupScope scope(share_->group);
  bool end_of_stream = false;
  {
    absl::MutexLock lock(&mutex_);
    // What is long hears of it by its token.
    if (end_.has_value() && place != Place::kLong) {
      working_ = false;
      return Advance();
    }
    if (place == Place::kLong) long_start_ = core::SteadyNow();
    excessive_ = transit_.excessive(env_.limits.response_chunk_bytes);
    if (!message_.has_value() && !finishing()) {
      if (inbox_.has_value()) {
        message_.emplace();
        message_->buffer = *std::move(inbox_);
        message_bytes_ = static_cast<int64_t>(message_->buffer.Length());
        inbox_.reset();
        // The next message may come while this one is worked on, unless that
        // takes no time.
        if (place != Place::kTransport) Advance();
      } else {
        end_of_stream = true;
      }
    }
  }
  absl::Status status = Guarded(RpcNameOf(rpc_->id()).method, [&] {
    if (!end_of_stream) return DoQuantum(place);
    if (tensor_open_) FailTensor(reader_->CheckComplete());
    return absl::OkStatus();
  });
  if (place != Place::kLong) return EndWork(std::move(status), end_of_stream);
  env_.pool->Schedule([self = shared_from_this(), status] {
    self->EndWork(status, /*end_of_stream=*/false);
  });
}

void TensorStream::EndWork(absl::Status status, bool end_of_stream) {
  std::vector<grpc::ByteBuffer> messages = writer_.Take();
  absl::MutexLock lock(&mutex_);
  working_ = false;
  has_more_ = message_.has_value() || finishing();
  has_tensor_ = tensor_open_;
  skips_ = skipping_;
  next_place_ = NextPlace();
  long_start_.reset();
  if (!message_.has_value()) message_bytes_ = 0;
  pending_work_ = PendingWork();
  spent_work_ = finish_time_;
  if (has_tensor_ && inbox_.has_value()) {
    pending_work_ += admission().FeedTime(
        rpc_->id(), static_cast<int64_t>(inbox_->Length()));
  }
  parked_ = memory_wait_start_ != -absl::InfiniteDuration();
  last_progress_ = core::SteadyNow();
  for (grpc::ByteBuffer& message : messages) {
    const int64_t charge_bytes =
        static_cast<int64_t>(message.Length()) + kQueuedMessageBytes;
    queued_bytes_ += charge_bytes;
    writes_.push_back({std::move(message), charge_bytes});
  }
  CountTransit();
  CountLoad();
  // There is no way to tell a client that does not read, and no reason to hold
  // what it does not.
  if (cut_off_ && writing_ &&
      core::SteadyNow() - write_start_time_ >= env_.limits.memory_wait) {
    EndWith(env_.budget->TransitError());
    context_->TryCancel();
  }
  if (end_of_stream || !status.ok()) EndWith(std::move(status));
  Advance();
}

absl::Status TensorStream::DoQuantum(Place place) {
  if (message_.has_value() && !message_->opened) {
    if (absl::Status s = OpenMessage(place); !s.ok()) return s;
    if (!message_->opened) return absl::OkStatus();
  }
  // A step that waits is a task of its own, so that no kernel runs beside it.
  if (job_ != nullptr && MayRun(place)) {
    const bool may_feed = place == Place::kWorker || place == Place::kTransport;
    if (finishing()) {
      FinishTensor();
    } else {
      if (!started()) StartTensor();
      if (job_ != nullptr && may_feed) FeedTensor();
      if (finishing() && may_feed && MayRun(place)) FinishTensor();
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

absl::Status TensorStream::OpenMessage(Place place) {
  RequestEnvelope& envelope = message_->envelope;
  if (!message_->parsed) {
    absl::Status status = ParseRequestEnvelope(&message_->buffer, &envelope);
    if (!status.ok()) return status;
    message_->parsed = true;
  }
  if (envelope.has_header && !message_->admitted) {
    if (tensor_open_) FailTensor(reader_->CheckComplete());
    if (registry_->draining()) return core::DrainingError();
    if (old_.load()) return core::StreamAgeError(env_.limits.stream_age);
    absl::Status status =
        env_.authenticator->Renew(credential_, rpc_->id(), &caller_);
    if (!status.ok()) return status;
    message_->admitted = AdmitTensor();
  }
  if (message_->admitted && place == Place::kTransport &&
      message_->buffer.Length() > kLightMessageBytes) {
    return absl::OkStatus();
  }
  message_->opened = true;
  if (message_->admitted) {
    OpenTensor(std::exchange(envelope.header, {}));
  } else if (!envelope.has_header && job_ == nullptr && !skipping_) {
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

bool TensorStream::AdmitTensor() {
  skipping_ = false;
  cut_off_ = false;
  tensor_open_ = true;
  tensor_start_time_ = core::SteadyNow();
  finish_time_ = absl::ZeroDuration();
  env_.metrics->TensorOpened();
  light_only_ = AskAdmission();
  admission().TensorOpened();
  if (!light_only_.ok() && message_->buffer.Length() > kLightMessageBytes) {
    FailTensor(light_only_);
    return false;
  }
  return true;
}

absl::Status TensorStream::AskAdmission() {
  {
    // What was counted of the same tensor is no reason to turn it away.
    absl::MutexLock lock(&mutex_);
    load_.Set(absl::ZeroDuration());
  }
  const absl::Duration work = PendingWork();
  // Long computations share the processors with the workers.
  const int busy = env_.pool->BusyThreads(share_->group) +
                   env_.long_pool->BusyThreads(share_->group);
  absl::Status status =
      admission().Admit(busy < env_.pool->thread_count(), work);
  absl::MutexLock lock(&mutex_);
  pending_work_ = status.ok() ? work : absl::ZeroDuration();
  spent_work_ = absl::ZeroDuration();
  CountLoad();
  return status;
}

absl::Duration TensorStream::PendingWork() const {
  if (!tensor_open_ || waits()) return absl::ZeroDuration();
  if (!started()) {
    // What came with the header may be all of it.
    const int64_t bytes =
        message_.has_value() ? message_->envelope.data_bytes : 0;
    const absl::Duration finish = FinishTime(bytes);
    return admission().FeedTime(rpc_->id(), bytes) +
           (finish > absl::ZeroDuration() ? finish : Admission::kUnknownWork);
  }
  absl::Duration work =
      admission().FeedTime(rpc_->id(), reader_->ready_bytes());
  if (arrived()) {
    // When it takes longer than others did, nobody knows for how long.
    work += std::max(FinishTime(size_bytes()) - finish_time_, finish_time_ / 4);
  }
  return work;
}

absl::Duration TensorStream::FinishTime(int64_t bytes) const {
  if (job_ != nullptr && job_->search_time() > absl::ZeroDuration()) {
    return job_->search_time();
  }
  return admission().FinishTime(rpc_->id(), bytes);
}

void TensorStream::OpenTensor(const std::string& header) {
  absl::StatusOr<std::unique_ptr<TensorJob>> job = rpc_->Open(header, caller_);
  if (!job.ok()) {
    FailTensor(job.status());
    return;
  }
  job_ = *std::move(job);
  job_->StopWhen(&stopped_);
  // Now it is known what was asked for. What takes long has to be told before
  // it begins: when it is known how long it took, it is too late.
  if (light_only_.ok() && job_->search_time() > Admission::kUnknownWork) {
    light_only_ = AskAdmission();
  }
  if (!light_only_.ok() && !job_->light()) FailTensor(light_only_);
}

void TensorStream::StartTensor() {
  if (absl::Status s = job_->Start(&writer_); !s.ok()) return FailTensor(s);
  const TensorFrame& frame = job_->frame();
  if (!light_only_.ok() &&
      size_bytes() > static_cast<int64_t>(kLightMessageBytes)) {
    return FailTensor(light_only_);
  }
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
  const absl::Duration start = core::SteadyNow();
  job_->BeginQuantum(reader_->position_bytes(), bytes, &writer_);
  const std::shared_ptr<const Region>& region = message_->region;
  // Not kept: there are as many as workers, and not as streams.
  PrivateCopy copy;
  absl::Status status = reader_->Feed(
      bytes, [&](int64_t offset_bytes, absl::Span<const uint8_t> data) {
        return region == nullptr ? job_->Consume(offset_bytes, data)
                                 : job_->ConsumeShared(offset_bytes, region,
                                                       data, env_.pool, &copy);
      });
  if (!status.ok()) return FailTensor(status);
  job_->EndQuantum();
  admission().Fed(rpc_->id(), bytes, core::SteadyNow() - start);
}

void TensorStream::FinishTensor() {
  if (!ReserveMemory(0)) return;
  const bool waited = waits();
  // What is long shares its processor with others.
  const bool is_long = job_->FinishIsLong();
  const absl::Duration start = is_long ? ThreadTime() : core::SteadyNow();
  absl::StatusOr<bool> done = job_->Finish(&writer_);
  if (!waited) {
    finish_time_ += (is_long ? ThreadTime() : core::SteadyNow()) - start;
  }
  if (!done.ok()) {
    // Nobody is told any more.
    if (!stopped_.load(std::memory_order_relaxed)) FailTensor(done.status());
    return;
  }
  if (*done) CloseTensor(/*ok=*/true);
}

bool TensorStream::ReserveMemory(int64_t bytes) {
  absl::Status status = job_->Reserve(bytes);
  if (status.ok() && excessive_) status = env_.budget->TransitError();
  if (!status.ok() && core::ErrorRetryAfter(status) > absl::ZeroDuration()) {
    const absl::Duration now = core::SteadyNow();
    if (memory_wait_start_ == -absl::InfiniteDuration())
      memory_wait_start_ = now;
    if (now - memory_wait_start_ < env_.limits.memory_wait) return false;
  }
  memory_wait_start_ = -absl::InfiniteDuration();
  if (status.ok()) return true;
  cut_off_ = excessive_;
  FailTensor(status);
  return false;
}

void TensorStream::FailTensor(const absl::Status& status) {
  env_.metrics->LimitRejected(core::ErrorReason(status));
  env_.metrics->TensorFailed(rpc_->id(), status.raw_code());
  writer_.SetError(status);
  skipping_ = true;
  CloseTensor(/*ok=*/false);
}

void TensorStream::CloseTensor(bool ok) {
  if (ok) admission().Finished(rpc_->id(), size_bytes(), finish_time_);
  admission().TensorClosed();
  env_.metrics->TensorClosed();
  env_.metrics->TensorDone(rpc_->id(), ok,
                           core::SteadyNow() - tensor_start_time_);
  tensor_open_ = false;
  job_.reset();
  reader_.reset();
}

}  // namespace quantd::server
