#include "server/rpc/open_tensor.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/parallel/steady_clock.h"
#include "core/parallel/thread_clock.h"
#include "server/shared_memory/shared_blocks.h"

namespace quantd::server {
namespace {

// The time on the clock that tells what a step takes of the processors: one
// that is long shares them with others.
absl::Duration TimeOf(bool is_long) {
  return is_long ? core::ThreadClock::OfThisThread().Now() : core::SteadyNow();
}

int64_t PartsSizeBytes(absl::Span<const std::string> parts) {
  int64_t bytes = 0;
  for (const std::string& part : parts) {
    bytes += static_cast<int64_t>(part.size());
  }
  return bytes;
}

}  // namespace

OpenTensor::OpenTensor(const RpcEnvironment& env, TensorRpc* rpc,
                       StreamAccount* account, const std::atomic<bool>* stopped)
    : env_(env),
      rpc_(rpc),
      account_(account),
      stopped_(stopped),
      start_time_(core::SteadyNow()) {
  env_.metrics->TensorOpened();
}

absl::Status OpenTensor::Admit(int64_t data_bytes, int64_t message_bytes) {
  light_only_ = account_->Admit(PendingWork(data_bytes));
  account_->TensorOpened();
  return message_bytes > kLightMessageBytes ? light_only_ : absl::OkStatus();
}

absl::Status OpenTensor::Check(const std::string& header, const Caller& caller,
                               int64_t data_bytes) {
  absl::StatusOr<std::unique_ptr<TensorJob>> job = rpc_->Check(header, caller);
  if (!job.ok()) return job.status();
  job_ = *std::move(job);
  job_->StopWhen(stopped_);
  // Now it is known what was asked for. What takes long has to be told before
  // it begins: when it is known how long it took, it is too late.
  absl::Duration search_time = job_->search_time();
  if (searches_as_fed()) {
    account_->SearchedAsFed(size_bytes(), job_->feed_search_time());
    search_time += account_->FeedTime(data_bytes);
  }
  if (light_only_.ok() && search_time > Admission::kUnknownWork) {
    light_only_ = account_->Admit(PendingWork(data_bytes));
  }
  return job_->light() ? absl::OkStatus() : light_only_;
}

absl::Status OpenTensor::Resolve(const RequestEnvelope& message,
                                 ChunkWriter* out) {
  if (absl::Status s = job_->Resolve(out); !s.ok()) return s;
  // Resolve may have corrected the time by what is stored.
  if (searches_as_fed()) {
    account_->SearchedAsFed(size_bytes(), job_->feed_search_time());
  }
  if (!light_only_.ok() && size_bytes() > kLightMessageBytes) {
    return light_only_;
  }
  const TensorFrame& frame = job_->frame();
  reader_.emplace(frame.begin_bytes, frame.end_bytes, frame.unit_bytes,
                  frame.granule_bytes, env_.limits.chunk_bytes);
  return Push(message);
}

absl::Status OpenTensor::Push(const RequestEnvelope& message) {
  if (!message.scales.empty()) {
    const int64_t bytes = PartsSizeBytes(message.scales);
    if (bytes > env_.limits.chunk_bytes) {
      return core::WithField(
          core::ChunkTooLargeError(env_.limits.chunk_bytes, bytes), "scales");
    }
    scales_ = message.scales;
    absl::Status status = PushScales().status();
    if (!status.ok()) return status;
  }
  return reader_->Push(message);
}

absl::Status OpenTensor::Feed(const std::shared_ptr<const Region>& region,
                              bool over_share, ChunkWriter* out) {
  if (!scales_.empty()) {
    const absl::StatusOr<bool> pushed = PushScales();
    if (core::ErrorReason(pushed.status()) == "MEMORY_BUDGET") {
      cut_off_ = over_share;
    }
    if (!pushed.ok() || !*pushed) return pushed.status();
  }
  const int64_t ready = ready_bytes();
  if (ready == 0) return absl::OkStatus();
  const int64_t bytes = std::min(ready, job_->frame().quantum_bytes);
  const absl::StatusOr<bool> reserved = Reserve(bytes, over_share);
  if (!reserved.ok() || !*reserved) return reserved.status();
  const absl::Duration start = core::SteadyNow();
  job_->BeginQuantum(reader_->position_bytes(), bytes, out);
  // Not kept: there are as many as workers, and not as streams.
  PrivateCopy copy;
  std::vector<uint8_t> joined;
  const int64_t end_bytes = reader_->position_bytes() + bytes;
  while (reader_->position_bytes() < end_bytes) {
    int64_t offset_bytes = reader_->position_bytes();
    absl::Span<const uint8_t> data = reader_->Next(end_bytes - offset_bytes);
    if (job_->frame().joins_quantum &&
        static_cast<int64_t>(data.size()) < bytes) {
      joined.reserve(static_cast<size_t>(bytes));
      joined.insert(joined.end(), data.begin(), data.end());
      if (static_cast<int64_t>(joined.size()) < bytes) continue;
      offset_bytes = end_bytes - bytes;
      data = joined;
    }
    absl::Status status =
        region == nullptr
            ? job_->Feed(offset_bytes, data)
            : job_->FeedShared(offset_bytes, region, data, env_.pool, &copy);
    if (!status.ok()) return status;
  }
  job_->EndQuantum();
  const absl::Duration time = core::SteadyNow() - start;
  if (searches_as_fed()) {
    feed_search_time_ += time;
  } else {
    account_->Fed(bytes, time);
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> OpenTensor::Finish(bool over_share, ChunkWriter* out) {
  const absl::StatusOr<bool> reserved = Reserve(0, over_share);
  if (!reserved.ok() || !*reserved) return reserved;
  const bool waited = waits();
  const bool is_long = job_->FinishIsLong();
  const absl::Duration start = TimeOf(is_long);
  absl::StatusOr<bool> done = job_->Finish(out);
  if (!waited) finish_time_ += TimeOf(is_long) - start;
  // Nobody is told any more.
  if (!done.ok() && stopped_->load(std::memory_order_relaxed)) return false;
  return done;
}

void OpenTensor::Close(bool ok) {
  if (ok) {
    account_->Finished(size_bytes(), finish_time_);
    account_->Searched(job_->search_time(), finish_time_);
    if (searches_as_fed() && job_->feed_only_searches()) {
      account_->Searched(job_->feed_search_time(), feed_search_time_);
    }
  }
  account_->TensorClosed();
  env_.metrics->TensorClosed();
  env_.metrics->TensorDone(rpc_->id(), ok, core::SteadyNow() - start_time_);
}

StepKind OpenTensor::next_step() const {
  switch (store_use()) {
    case StoreUse::kRead:
      return StepKind::kStore;
    case StoreUse::kReadStatistics:
      return StepKind::kStatistics;
    case StoreUse::kWrite:
      return StepKind::kWrite;
    case StoreUse::kLongWrite:
      return StepKind::kLongWrite;
    case StoreUse::kNone:
      break;
  }
  if (finishing() && job_->FinishIsLong()) return StepKind::kLong;
  return job_->light() ? StepKind::kLight : StepKind::kQuantum;
}

absl::Duration OpenTensor::PendingWork(int64_t data_bytes) const {
  if (waits()) return absl::ZeroDuration();
  if (!resolved()) {
    // The bytes that came with the header may be all of the tensor.
    const absl::Duration finish = FinishTime(data_bytes);
    return account_->FeedTime(data_bytes) +
           (finish > absl::ZeroDuration() ? finish : Admission::kUnknownWork);
  }
  absl::Duration work = account_->FeedTime(ready_bytes());
  if (reader_->position_bytes() + ready_bytes() == job_->frame().end_bytes) {
    // When it takes longer than others did, nobody knows for how long.
    work += std::max(FinishTime(size_bytes()) - finish_time_, finish_time_ / 4);
  }
  return work;
}

absl::Duration OpenTensor::FinishTime(int64_t bytes) const {
  if (checked() && job_->search_time() > absl::ZeroDuration()) {
    return account_->SearchTime(job_->search_time());
  }
  return account_->FinishTime(bytes);
}

absl::StatusOr<bool> OpenTensor::Reserve(int64_t bytes, bool over_share) {
  absl::Status status = job_->Reserve(bytes);
  if (status.ok() && over_share) status = env_.budget->TransitError();
  absl::StatusOr<bool> reserved = HasMemory(std::move(status));
  if (!reserved.ok()) cut_off_ = over_share;
  return reserved;
}

absl::StatusOr<bool> OpenTensor::PushScales() {
  // They must not keep themselves out.
  scales_lease_.Release();
  absl::StatusOr<bool> pushed = HasMemory(job_->PushScales(scales_));
  if (!pushed.ok()) return core::WithField(pushed.status(), "scales");
  if (*pushed) {
    scales_ = {};
  } else {
    env_.budget->Count(&scales_lease_, PartsSizeBytes(scales_));
  }
  return pushed;
}

absl::StatusOr<bool> OpenTensor::HasMemory(absl::Status status) {
  if (!status.ok() && core::ErrorRetryAfter(status) > absl::ZeroDuration()) {
    const absl::Duration now = core::SteadyNow();
    if (!waits_for_memory()) memory_wait_start_ = now;
    if (now - memory_wait_start_ < env_.limits.memory_wait) return false;
  }
  memory_wait_start_ = -absl::InfiniteDuration();
  if (status.ok()) return true;
  return status;
}

}  // namespace quantd::server
