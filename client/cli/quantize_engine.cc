#include "client/cli/quantize_engine.h"

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
#include "client/cli/session.h"
#include "client/cpp/client.h"
#include "client/cpp/tensor_stream.h"

namespace quantd::cli {
namespace {

// Of one stream: what it sends before it has the first result.
constexpr uint64_t kMostBytesAhead = uint64_t{32} << 20;
constexpr size_t kMostTensorsAhead = 64;

}  // namespace

absl::StatusOr<std::unique_ptr<QuantizeEngine>> QuantizeEngine::Create(
    const Session& session, int stream_count) {
  std::unique_ptr<QuantizeEngine> engine(new QuantizeEngine());
  for (int i = 0; i < stream_count; ++i) {
    absl::StatusOr<std::unique_ptr<Client>> client = session.Connect();
    if (!client.ok()) return client.status();
    engine->lanes_.push_back({*std::move(client), nullptr, nullptr});
  }
  return engine;
}

absl::Status QuantizeEngine::Run(const EngineWork& work) {
  {
    absl::MutexLock lock(&mutex_);
    next_ = 0;
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

bool QuantizeEngine::Claim(const EngineWork& work, uint64_t ahead_bytes,
                           size_t* index) {
  absl::MutexLock lock(&mutex_);
  if (!status_.ok() || next_ == work.count) return false;
  if (ahead_bytes > 0 &&
      ahead_bytes + work.size_bytes(next_) > kMostBytesAhead) {
    return false;
  }
  *index = next_++;
  return true;
}

void QuantizeEngine::Drive(const EngineWork& work, Lane* lane) {
  if (lane->quantize == nullptr) {
    lane->quantize = lane->client->OpenQuantize();
    lane->evaluate = lane->client->OpenEvaluate();
  }
  std::deque<size_t> pending;
  uint64_t ahead_bytes = 0;
  while (true) {
    size_t index = 0;
    while (pending.size() < kMostTensorsAhead &&
           Claim(work, ahead_bytes, &index)) {
      // 1, so that an empty tensor counts as something that is ahead.
      ahead_bytes += std::max<uint64_t>(1, work.size_bytes(index));
      lane->quantize->Send(work.make_job(index));
      pending.push_back(index);
    }
    if (pending.empty()) return;
    index = pending.front();
    pending.pop_front();
    ahead_bytes -= std::max<uint64_t>(1, work.size_bytes(index));
    absl::Status status =
        work.take(index, lane->quantize->Receive(), lane->evaluate.get());
    absl::MutexLock lock(&mutex_);
    status_.Update(status);
    if (status_.ok()) continue;
    // Nothing of the work may be used any more.
    lane->quantize.reset();
    lane->evaluate.reset();
    return;
  }
}

}  // namespace quantd::cli
