#include "client/cpp/stream_call.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/errors.h"
#include "grpcpp/generic/generic_stub.h"

namespace quantd::internal {
namespace {

// Payload of a message that may wait for the next one.
constexpr uint64_t kTogetherBelowBytes = 16 << 10;

// A server answers a small tensor that nothing goes before sooner than a thread
// that sleeps would wake up.
constexpr size_t kPollBelowBytes = 16 << 10;
constexpr absl::Duration kPollTime = absl::Microseconds(200);

// Threads that poll. They leave at least half of the processors alone.
std::atomic<int> polling_count{0};

int MaxPollingCount() {
  static const int count =
      static_cast<int>(std::thread::hardware_concurrency() / 2);
  return count;
}

}  // namespace

std::unique_ptr<StreamCall> StreamCall::Start(
    const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
    int64_t chunk_bytes) {
  std::unique_ptr<StreamCall> call(new StreamCall(chunk_bytes));
  {
    absl::MutexLock lock(&call->mutex_);
    call->last_progress_ = absl::Now();
  }
  // A search may take longer than the server may be silent.
  call->context_.AddMetadata("quantd-progress", "1");
  grpc::GenericStub stub(channel);
  stub.PrepareBidiStreamingCall(&call->context_, method, grpc::StubOptions(),
                                call.get());
  call->AddHold();
  call->StartRead(&call->read_buffer_);
  call->StartCall();
  return call;
}

StreamCall::~StreamCall() { Cancel(); }

uint64_t StreamCall::Enqueue(Exchange* exchange, bool is_last) {
  Step step;
  uint64_t number;
  {
    absl::MutexLock lock(&mutex_);
    // A silence before there was anything to say is not the server's.
    if (answered_count_ == enqueued_count_) last_progress_ = absl::Now();
    unsent_.push_back(exchange);
    number = enqueued_count_++;
    no_more_ = no_more_ || is_last;
    step = NextStep();
  }
  Run(step);
  return number;
}

void StreamCall::Poll(uint64_t number) const {
  if (answered_count_ > number) return;
  if (polling_count.fetch_add(1) < MaxPollingCount()) {
    const absl::Time end = absl::Now() + kPollTime;
    while (answered_count_ <= number && absl::Now() < end) sched_yield();
  }
  polling_count.fetch_sub(1);
}

bool StreamCall::IsLoneSmall(uint64_t number) const {
  absl::MutexLock lock(&mutex_);
  if (answered_count_ != number || enqueued_count_ != number + 1) return false;
  const Exchange* const exchange =
      unanswered_.empty() ? unsent_.front() : unanswered_.front().exchange;
  return exchange->payload_bytes() < kPollBelowBytes;
}

StreamCall::Outcome StreamCall::Await(uint64_t number, absl::Duration timeout,
                                      absl::Time deadline) {
  if (IsLoneSmall(number)) Poll(number);
  absl::MutexLock lock(&mutex_);
  const auto is_over = [this, number]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return answered_count_ > number || finished_;
  };
  while (!is_over()) {
    const absl::Time end = std::min(last_progress_ + timeout, deadline);
    if (!mutex_.AwaitWithDeadline(absl::Condition(&is_over), end) &&
        absl::Now() >= std::min(last_progress_ + timeout, deadline)) {
      return Outcome::kTimeout;
    }
  }
  return answered_count_ > number ? Outcome::kAnswered : Outcome::kFinished;
}

bool StreamCall::IsAnswered(uint64_t number) const {
  absl::MutexLock lock(&mutex_);
  return answered_count_ > number;
}

bool StreamCall::IsFinished() const {
  absl::MutexLock lock(&mutex_);
  return finished_;
}

void StreamCall::Finish(absl::Duration timeout) {
  Step step;
  {
    absl::MutexLock lock(&mutex_);
    no_more_ = true;
    step = NextStep();
  }
  Run(step);
  {
    absl::MutexLock lock(&mutex_);
    if (mutex_.AwaitWithTimeout(absl::Condition(&finished_), timeout)) return;
  }
  Cancel();
}

void StreamCall::Cancel() {
  context_.TryCancel();
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&finished_));
}

grpc::Status StreamCall::grpc_status() const {
  absl::MutexLock lock(&mutex_);
  return grpc_status_;
}

absl::Status StreamCall::protocol_status() const {
  absl::MutexLock lock(&mutex_);
  return protocol_status_;
}

void StreamCall::OnReadDone(bool ok) {
  if (ok) {
    const absl::Status status = HandleResponse();
    if (status.ok()) {
      StartRead(&read_buffer_);
      return;
    }
    {
      absl::MutexLock lock(&mutex_);
      protocol_status_ = status;
    }
    context_.TryCancel();
  }
  Step step;
  {
    absl::MutexLock lock(&mutex_);
    broken_ = true;
    step = NextStep();
  }
  Run(step);
}

void StreamCall::OnWriteDone(bool ok) { OnWriteSideDone(ok); }

void StreamCall::OnWritesDoneDone(bool ok) { OnWriteSideDone(ok); }

void StreamCall::OnWriteSideDone(bool ok) {
  Step step;
  {
    absl::MutexLock lock(&mutex_);
    // gRPC's reference to the payload is dropped here, not at the next write.
    write_buffer_.Clear();
    writing_ = false;
    last_progress_ = absl::Now();
    if (!ok) broken_ = true;
    step = NextStep();
  }
  Run(step);
}

void StreamCall::OnDone(const grpc::Status& status) {
  absl::MutexLock lock(&mutex_);
  grpc_status_ = status;
  finished_ = true;
}

StreamCall::Step StreamCall::NextStep() {
  if (writing_) return Step::kNone;
  if (!broken_ && !writes_done_) {
    if (!unsent_.empty()) {
      Exchange* const exchange = unsent_.front();
      const uint64_t payload_bytes = exchange->payload_bytes();
      std::string header;
      if (!header_sent_) {
        if (!begun_) {
          sent_bytes_ = exchange->resume_bytes();
          exchange->RewindScales();
        }
        begun_ = true;
        header = exchange->PartHeader(sent_bytes_);
        part_end_bytes_ = exchange->PartEnd(sent_bytes_);
        unanswered_.push_back({exchange, part_end_bytes_ == payload_bytes,
                               /*is_void=*/false});
      }
      uint64_t size = payload_bytes;
      if (exchange->shared_payload().empty()) {
        size = std::min<uint64_t>(part_end_bytes_ - sent_bytes_,
                                  static_cast<uint64_t>(chunk_bytes_));
        std::vector<std::string> scales;
        if (!exchange->NextScales(sent_bytes_ + size, &scales)) size = 0;
        write_buffer_ = EncodeRequest(
            header, scales, exchange->payload_offset_bytes() + sent_bytes_,
            exchange->PayloadSlice(sent_bytes_, size));
      } else {
        write_buffer_ =
            EncodeSharedRequest(header, exchange->payload_offset_bytes(),
                                exchange->shared_payload());
      }
      sent_bytes_ += size;
      header_sent_ = sent_bytes_ != part_end_bytes_;
      if (!header_sent_ &&
          (stops_after_part_ || sent_bytes_ == payload_bytes)) {
        PopUnsent();
      }
      writing_ = true;
      writes_done_ = unsent_.empty() && no_more_;
      if (writes_done_) return Step::kWriteLast;
      // Small messages that are ready go out together.
      return !unsent_.empty() && size < kTogetherBelowBytes
                 ? Step::kWriteAndFollow
                 : Step::kWrite;
    }
    if (no_more_) {
      writing_ = true;
      writes_done_ = true;
      return Step::kWritesDone;
    }
    return Step::kNone;
  }
  if (held_) {
    held_ = false;
    return Step::kRelease;
  }
  return Step::kNone;
}

void StreamCall::Run(Step step) {
  switch (step) {
    case Step::kNone:
      break;
    case Step::kWrite:
      StartWrite(&write_buffer_);
      break;
    case Step::kWriteAndFollow:
      StartWrite(&write_buffer_, grpc::WriteOptions().set_buffer_hint());
      break;
    case Step::kWriteLast:
      StartWriteLast(&write_buffer_, grpc::WriteOptions());
      break;
    case Step::kWritesDone:
      StartWritesDone();
      break;
    case Step::kRelease:
      RemoveHold();
      break;
  }
}

void StreamCall::PopUnsent() {
  unsent_.pop_front();
  begun_ = false;
  header_sent_ = false;
  stops_after_part_ = false;
}

void StreamCall::DropRest(Exchange* exchange) {
  Part* last = nullptr;
  for (Part& part : unanswered_) {
    if (part.exchange != exchange) break;
    part.is_void = true;
    last = &part;
  }
  const bool is_unsent = !unsent_.empty() && unsent_.front() == exchange;
  if (last == nullptr) {
    // The rest of the very part that failed is not waited for.
    if (is_unsent && begun_) PopUnsent();
    ++answered_count_;
    return;
  }
  last->is_last = true;
  if (!is_unsent) return;
  if (header_sent_) {
    stops_after_part_ = true;
  } else {
    PopUnsent();
  }
}

absl::Status StreamCall::HandleResponse() {
  Part part;
  {
    absl::MutexLock lock(&mutex_);
    last_progress_ = absl::Now();
    // The server tells that it is at work.
    if (read_buffer_.Length() == 0) return absl::OkStatus();
    if (unanswered_.empty()) {
      return ResponseMalformedError("an answer to no tensor");
    }
    part = unanswered_.front();
  }
  absl::Status status = DecodeResponse(read_buffer_, &response_);
  if (!status.ok()) return status;
  const bool ends_part = response_.has_summary || response_.has_error;
  absl::StatusOr<bool> ends_tensor = false;
  if (!part.is_void) ends_tensor = part.exchange->Accept(response_);
  response_ = Response();
  read_buffer_.Clear();
  if (!ends_tensor.ok()) return ends_tensor.status();
  // The next response, on whatever thread of gRPC's, comes after this one.
  absl::MutexLock lock(&mutex_);
  if (!ends_part) return absl::OkStatus();
  unanswered_.pop_front();
  if (*ends_tensor) {
    DropRest(part.exchange);
  } else if (part.is_last) {
    ++answered_count_;
  }
  return absl::OkStatus();
}

}  // namespace quantd::internal
