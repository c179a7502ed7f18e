// The requests of one `quantctl quantize` to the server: the codes of its
// tensors, and a draft for their encodings.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_SERVER_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_SERVER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/client.h"
#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"
#include "client/files/safetensors.h"
#include "client/jobs/connections.h"
#include "client/jobs/draft_revision.h"
#include "client/jobs/job_events.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_outcome.h"
#include "client/jobs/quantize_plan.h"
#include "client/models/tensor_engine.h"
#include "client/models/tie_groups.h"

namespace quantd::jobs {

// One tensor on its way to the server and into a file.
struct TensorTask {
  const files::FileTensor* tensor;
  EncodingSpec spec;
  Outcome* outcome;
  // TiedMaxima::Tie; the job points to it.
  std::vector<float> outer_maximum = {};
  // See files::FileTensor; the job points to what it keeps.
  std::shared_ptr<const void> hold = nullptr;
};

// How a file takes tensors. Called for different ones at once.
struct TensorSink {
  // Lets what arrives of task number i go to its place at once; may be empty.
  std::function<void(size_t i, QuantizeJob* job)> set_sinks;
  // Writes the rest. Returns the size in bytes of all that the file has of it.
  // ARGUMENT_INVALID is an error of that tensor; others end the run.
  std::function<absl::StatusOr<uint64_t>(size_t i,
                                         const QuantizeResult& result)>
      write;
};

// The connections of one run. Not thread-safe.
class QuantizeServer {
 public:
  // `options`, `plan` and `events` must stay. `run_key` is that of the draft.
  QuantizeServer(const QuantizeOptions& options, Connections connections,
                 absl::string_view run_key, const QuantizePlan& plan,
                 const JobEvents& events);

  // Quantizes all tensors. What became of each goes to its outcome; errors are
  // those that end the run.
  absl::Status Quantize(const TensorSink& sink, std::vector<TensorTask>* tasks,
                        JobProgress* progress) ABSL_LOCKS_EXCLUDED(mutex_);

  Client* client() const { return connections_.first(); }
  // The draft where encodings are stored; null where they are not stored.
  const DraftRevision* draft() const {
    return draft_.has_value() ? &*draft_ : nullptr;
  }
  // Deletes the draft and what this run has stored in it.
  // Requires: draft() is not null.
  // Errors: of the client.
  absl::Status DeleteDraft() ABSL_LOCKS_EXCLUDED(mutex_);
  // Tensors whose encodings this run has stored.
  uint64_t stored_count() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  QuantizeJob MakeJob(TensorTask* task);
  // Sets the sinks of `sink`; scales are counted on their way.
  static void SetSinks(const TensorSink& sink, size_t i, const TensorTask& task,
                       QuantizeJob* job);
  // True if an error says that the server cannot hold the tensor, which it need
  // not where it is given the encoding.
  bool IsTooLarge(const absl::Status& status, const TensorTask& task) const;
  // Calibrates the tensor first, from histograms where the method needs them,
  // and then quantizes it.
  absl::StatusOr<QuantizeResult> QuantizeInTwoPasses(const TensorSink& sink,
                                                     size_t i,
                                                     TensorTask* task);
  // Errors end the run; those of the tensor alone go to its outcome.
  absl::Status TakeResult(const TensorSink& sink, size_t i,
                          const absl::StatusOr<QuantizeResult>& result,
                          EvaluateStream* evaluate, TensorTask* task) const;
  // Measures the same encoding.
  void Evaluate(EvaluateStream* stream, TensorTask* task) const;
  // A tensor has a name on the server where its encoding is kept.
  TensorName NameOf(const files::FileTensor& tensor) const;

  const QuantizeOptions& options_;
  const JobEvents& events_;
  const Connections connections_;
  internal::QuantizeEngine engine_;
  TiedMaxima maxima_;
  const std::map<std::string, PlannedRounding>& roundings_;
  std::optional<DraftRevision> draft_;
  mutable absl::Mutex mutex_;
  uint64_t stored_count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_SERVER_H_
