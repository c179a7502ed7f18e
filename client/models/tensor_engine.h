// Keeps several streams busy with the tensors of a file.

#ifndef QUANTD_CLIENT_MODELS_TENSOR_ENGINE_H_
#define QUANTD_CLIENT_MODELS_TENSOR_ENGINE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/client.h"
#include "client/cpp/tensor_stream.h"

namespace quantd::internal {

// The work on tensor number i. All functions but `size_bytes` are called on the
// threads of several streams at once, for different tensors.
template <typename Job, typename Result>
struct EngineWork {
  size_t count = 0;
  // Size of what goes up.
  std::function<uint64_t(size_t i)> size_bytes;
  // Makes the job. The data that it points to must stay until its result is
  // taken.
  std::function<Job(size_t i)> make_job;
  // Takes the result. An error ends the run. `evaluate` is another stream of
  // the same connection, without tensors under way.
  std::function<absl::Status(size_t i, absl::StatusOr<Result> result,
                             EvaluateStream* evaluate)>
      take;
  // Most bytes of the tensors under way over all streams; a tensor that is
  // larger goes alone.
  uint64_t most_bytes = std::numeric_limits<uint64_t>::max();
  // After an error, takes also the results of what is under way instead of
  // cancelling it: what the server is told to undo then, it does not do later.
  bool takes_all_under_way = false;
};

// Every stream has a thread. The order of the results is not that of the
// tensors. Not thread-safe.
template <typename Job, typename Result>
class TensorEngine {
 public:
  using Work = EngineWork<Job, Result>;

  // A stream for each client, which may be one several times, and which must
  // stay. Several connections keep several replicas behind one name busy.
  explicit TensorEngine(const std::vector<Client*>& clients);

  // Returns when all is done, or at the first error, when nothing is under way
  // any more.
  absl::Status Run(const Work& work);

 private:
  struct Lane {
    Client* client;
    std::unique_ptr<TensorStream<Job, Result>> stream = nullptr;
    std::unique_ptr<EvaluateStream> evaluate = nullptr;
  };

  void Drive(const Work& work, Lane* lane);
  // Takes the next tensor that fits beside `ahead_bytes` of the lane; none when
  // there is none, or it does not fit.
  bool Claim(const Work& work, uint64_t ahead_bytes, size_t* index)
      ABSL_LOCKS_EXCLUDED(mutex_);

  std::vector<Lane> lanes_;
  absl::Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  // Bytes under way in all lanes.
  uint64_t under_way_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Bytes of the tensors that no lane has taken.
  uint64_t left_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

using QuantizeEngine = TensorEngine<QuantizeJob, QuantizeResult>;
using DequantizeEngine = TensorEngine<DequantizeJob, DequantizeResult>;
using EvaluateEngine = TensorEngine<EvaluateJob, EvaluateResult>;

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_MODELS_TENSOR_ENGINE_H_
