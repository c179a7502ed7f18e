// Keeps several streams busy with the tensors of one file.

#ifndef QUANTD_CLIENT_CLI_QUANTIZE_ENGINE_H_
#define QUANTD_CLIENT_CLI_QUANTIZE_ENGINE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/cli/session.h"
#include "client/cpp/client.h"
#include "client/cpp/tensor_stream.h"

namespace quantd::cli {

// What to do with tensor number i. All but `size_bytes` are called on the
// threads of several streams at once, for different tensors.
struct EngineWork {
  size_t count = 0;
  // Of what goes up.
  std::function<uint64_t(size_t i)> size_bytes;
  std::function<QuantizeJob(size_t i)> make_job;
  // Takes the result. An error ends the run. `evaluate` is a stream of the same
  // connection.
  std::function<absl::Status(size_t i, absl::StatusOr<QuantizeResult> result,
                             EvaluateStream* evaluate)>
      take;
};

// Every stream has a connection of its own, so that several replicas behind one
// name are busy too. The order of the results is not that of the tensors. Not
// thread-safe.
class QuantizeEngine {
 public:
  // Errors: of Session::Connect.
  static absl::StatusOr<std::unique_ptr<QuantizeEngine>> Create(
      const Session& session, int stream_count);

  // Returns when all is done, or at the first error, when nothing is under way
  // any more.
  absl::Status Run(const EngineWork& work);

 private:
  struct Lane {
    std::unique_ptr<Client> client;
    std::unique_ptr<QuantizeStream> quantize;
    std::unique_ptr<EvaluateStream> evaluate;
  };

  QuantizeEngine() = default;
  void Drive(const EngineWork& work, Lane* lane);
  // Takes the next tensor that fits beside `ahead_bytes`; none when there is
  // none, or it does not fit.
  bool Claim(const EngineWork& work, uint64_t ahead_bytes, size_t* index)
      ABSL_LOCKS_EXCLUDED(mutex_);

  std::vector<Lane> lanes_;
  absl::Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_QUANTIZE_ENGINE_H_
