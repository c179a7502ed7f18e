#include "client/models/tensor_engine.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/client.h"
#include "client/cpp/tensor_stream.h"

namespace quantd::internal {
namespace {

// Limits of one stream: what it sends before it has the first result. It takes
// no more than is left for each of the others, so that all end together.
constexpr uint64_t kMostBytesAhead = uint64_t{32} << 20;
constexpr size_t kMostTensorsAhead = 64;

void Open(Client* client, std::unique_ptr<QuantizeStream>* stream) {
  *stream = client->OpenQuantize();
}
void Open(Client* client, std::unique_ptr<DequantizeStream>* stream) {
  *stream = client->OpenDequantize();
}
void Open(Client* client, std::unique_ptr<EvaluateStream>* stream) {
  *stream = client->OpenEvaluate();
}

// At least 1, so that an empty tensor counts as something that is under way.
template <typename Work>
uint64_t SizeOf(const Work& work, size_t i) {
  return std::max<uint64_t>(1, work.size_bytes(i));
}

}  // namespace

template <typename Job, typename Result>
TensorEngine<Job, Result>::TensorEngine(const std::vector<Client*>& clients) {
  for (Client* const client : clients) lanes_.push_back({client});
}

template <typename Job, typename Result>
absl::Status TensorEngine<Job, Result>::Run(const Work& work) {
  {
    absl::MutexLock lock(&mutex_);
    next_ = 0;
    under_way_bytes_ = 0;
    left_bytes_ = 0;
    for (size_t i = 0; i < work.count; ++i) left_bytes_ += SizeOf(work, i);
    status_ = absl::OkStatus();
  }
  std::vector<std::thread> threads;
  const size_t count = std::min(lanes_.size(), work.count);
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back(
        [this, &work, lane = &lanes_[i]] { Drive(work, lane); });
  }
  for (std::thread& thread : threads) thread.join();
  absl::MutexLock lock(&mutex_);
  return status_;
}

template <typename Job, typename Result>
bool TensorEngine<Job, Result>::Claim(const Work& work, uint64_t ahead_bytes,
                                      size_t* index) {
  absl::MutexLock lock(&mutex_);
  const auto has_room = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !status_.ok() || next_ == work.count || under_way_bytes_ == 0 ||
           (under_way_bytes_ < work.most_bytes &&
            SizeOf(work, next_) <= work.most_bytes - under_way_bytes_);
  };
  // A lane that has something under way makes room itself.
  if (ahead_bytes == 0) mutex_.Await(absl::Condition(&has_room));
  const uint64_t most_ahead =
      lanes_.size() == 1
          ? kMostBytesAhead
          : std::min(kMostBytesAhead, left_bytes_ / (lanes_.size() - 1));
  if (!status_.ok() || next_ == work.count || !has_room() ||
      (ahead_bytes > 0 && ahead_bytes + SizeOf(work, next_) > most_ahead)) {
    return false;
  }
  under_way_bytes_ += SizeOf(work, next_);
  left_bytes_ -= SizeOf(work, next_);
  *index = next_++;
  return true;
}

template <typename Job, typename Result>
void TensorEngine<Job, Result>::Drive(const Work& work, Lane* lane) {
  if (lane->stream == nullptr) {
    Open(lane->client, &lane->stream);
    lane->evaluate = lane->client->OpenEvaluate();
  }
  std::deque<size_t> pending;
  uint64_t ahead_bytes = 0;
  while (true) {
    size_t index = 0;
    while (pending.size() < kMostTensorsAhead &&
           Claim(work, ahead_bytes, &index)) {
      ahead_bytes += SizeOf(work, index);
      lane->stream->Send(work.make_job(index));
      pending.push_back(index);
    }
    if (pending.empty()) return;
    index = pending.front();
    pending.pop_front();
    ahead_bytes -= SizeOf(work, index);
    absl::Status status =
        work.take(index, lane->stream->Receive(), lane->evaluate.get());
    absl::MutexLock lock(&mutex_);
    under_way_bytes_ -= SizeOf(work, index);
    status_.Update(status);
    if (status_.ok() || work.takes_all_under_way) continue;
    // Nothing of the work may be used any more.
    lane->stream.reset();
    lane->evaluate.reset();
    return;
  }
}

template class TensorEngine<QuantizeJob, QuantizeResult>;
template class TensorEngine<DequantizeJob, DequantizeResult>;
template class TensorEngine<EvaluateJob, EvaluateResult>;

}  // namespace quantd::internal
