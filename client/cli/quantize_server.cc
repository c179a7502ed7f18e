#include "client/cli/quantize_server.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "client/cli/interrupt.h"
#include "client/cli/session.h"
#include "client/cpp/errors.h"
#include "client/models/tensor_input.h"
#include "client/models/tie_groups.h"
#include "client/models/two_passes.h"

namespace quantd::cli {
namespace {

// The proto's name of a --nan-policy; empty is the default.
v1::NanPolicy NanPolicyOf(absl::string_view text) {
  v1::NanPolicy policy = v1::NAN_POLICY_UNSPECIFIED;
  v1::NanPolicy_Parse(
      absl::StrCat("NAN_POLICY_", absl::AsciiStrToUpper(
                                      absl::StrReplaceAll(text, {{"-", "_"}}))),
      &policy);
  return policy;
}

void SetOutcome(const QuantizeResult& result, uint64_t output_bytes,
                Outcome* outcome) {
  const v1::QuantizeSummary& summary = result.summary;
  outcome->is_quantized = true;
  outcome->format = FormatName(result.header.encoding().format());
  outcome->output_bytes = output_bytes;
  outcome->clipped_low_count = summary.clipped_low_count();
  outcome->clipped_high_count = summary.clipped_high_count();
  outcome->nan_count = summary.nan_count();
  outcome->infinity_count =
      summary.positive_infinity_count() + summary.negative_infinity_count();
  outcome->mantissa_bits = result.header.mantissa_bits();
  if (summary.has_output_noise()) {
    outcome->output_noise = summary.output_noise();
  }
}

}  // namespace

QuantizeServer::QuantizeServer(const QuantizeOptions& options,
                               Connections connections,
                               absl::string_view run_key,
                               const QuantizePlan& plan)
    : options_(options),
      connections_(std::move(connections)),
      engine_(connections_.clients()),
      maxima_(plan.ties),
      roundings_(plan.roundings) {
  if (options.store) draft_.emplace(options.name, run_key);
}

absl::Status QuantizeServer::Quantize(const TensorSink& sink,
                                      std::vector<TensorTask>* tasks,
                                      Progress* progress) {
  internal::QuantizeEngine::Work work;
  work.count = tasks->size();
  // Of a run that fails no encoding may come after its draft is deleted.
  work.takes_all_under_way =
      options_.store && options_.output.IsStandardOutput();
  work.size_bytes = [tasks](size_t i) {
    return (*tasks)[i].tensor->data.size();
  };
  work.make_job = [this, &sink, tasks](size_t i) {
    (*tasks)[i].hold = (*tasks)[i].tensor->Hold();
    QuantizeJob job = MakeJob(&(*tasks)[i]);
    if (sink.set_sinks) sink.set_sinks(i, &job);
    return job;
  };
  work.take = [this, &sink, tasks, progress](
                  size_t i, absl::StatusOr<QuantizeResult> result,
                  EvaluateStream* evaluate) {
    TensorTask& task = (*tasks)[i];
    if (IsTooLarge(result.status(), task)) {
      result = QuantizeInTwoPasses(sink, i, &task);
    }
    const absl::Status status = TakeResult(sink, i, result, evaluate, &task);
    task.hold = nullptr;
    absl::MutexLock lock(&mutex_);
    stored_count_ += result.ok() && options_.store ? 1 : 0;
    progress->Add(task.tensor->data.size(), task.tensor->name);
    return InterruptNote::stopped() ? absl::CancelledError("stopped") : status;
  };
  return engine_.Run(work);
}

absl::Status QuantizeServer::DeleteDraft() {
  const absl::Status status = draft_->Delete(client());
  absl::MutexLock lock(&mutex_);
  if (status.ok()) stored_count_ = 0;
  return status;
}

uint64_t QuantizeServer::stored_count() const {
  absl::MutexLock lock(&mutex_);
  return stored_count_;
}

QuantizeJob QuantizeServer::MakeJob(TensorTask* task) {
  maxima_.Tie(*task->tensor, &task->spec, &task->outer_maximum);
  QuantizeJob job;
  job.tensor = MakeTensor(*task->tensor, NameOf(*task->tensor));
  job.source = task->spec;
  job.store = options_.store;
  job.nan_policy = NanPolicyOf(options_.nan_policy);
  job.scales_in_chunks = true;
  job.outer_maximum = task->outer_maximum;
  const auto rounding = roundings_.find(task->tensor->name);
  if (rounding != roundings_.end()) job.rounding = rounding->second.rounding;
  return job;
}

bool QuantizeServer::IsTooLarge(const absl::Status& status,
                                const TensorTask& task) const {
  // What else the server would hold is not in an encoding.
  return internal::CannotHold(status) && task.outer_maximum.empty() &&
         internal::CanFindEncoding(task.spec,
                                   MakeTensor(*task.tensor, TensorName())) &&
         roundings_.find(task.tensor->name) == roundings_.end();
}

absl::StatusOr<QuantizeResult> QuantizeServer::QuantizeInTwoPasses(
    const TensorSink& sink, size_t i, TensorTask* task) {
  QuantizeJob job = MakeJob(task);
  absl::StatusOr<Encoding> encoding =
      internal::FindEncoding(job.tensor, task->spec, client());
  if (!encoding.ok()) return encoding.status();
  job.source = *std::move(encoding);
  if (sink.set_sinks) sink.set_sinks(i, &job);
  return client()->Quantize(job);
}

absl::Status QuantizeServer::TakeResult(
    const TensorSink& sink, size_t i,
    const absl::StatusOr<QuantizeResult>& result, EvaluateStream* evaluate,
    TensorTask* task) const {
  if (!result.ok()) {
    task->outcome->status = result.status();
    const int code = ExitCodeOf(result.status());
    return code == kUnreachable || code == kFileError ? result.status()
                                                      : absl::OkStatus();
  }
  const absl::StatusOr<uint64_t> size = sink.write(i, *result);
  if (ErrorReason(size.status()) == "ARGUMENT_INVALID") {
    task->outcome->status = size.status();
    return absl::OkStatus();
  }
  if (!size.ok()) return size.status();
  SetOutcome(*result, *size, task->outcome);
  task->outcome->is_compensated =
      roundings_.find(task->tensor->name) != roundings_.end();
  if (options_.evaluate) Evaluate(evaluate, task);
  return absl::OkStatus();
}

void QuantizeServer::Evaluate(EvaluateStream* stream, TensorTask* task) const {
  EvaluateJob job;
  job.tensor = MakeTensor(*task->tensor, NameOf(*task->tensor));
  job.candidates.push_back({task->spec, "", task->outer_maximum, {}});
  // It would be much to send.
  job.omit_encodings = true;
  // What reports have.
  job.metrics = {v1::ERROR_METRIC_MEAN_SQUARED_ERROR,
                 v1::ERROR_METRIC_MAX_ABSOLUTE_ERROR, v1::ERROR_METRIC_SQNR_DB};
  stream->Send(job);
  const absl::StatusOr<EvaluateResult> evaluation = stream->Receive();
  if (!evaluation.ok()) {
    task->outcome->status = evaluation.status();
  } else if (evaluation->candidates_size() == 1) {
    task->outcome->metrics = evaluation->candidates(0).overall();
  }
}

TensorName QuantizeServer::NameOf(const files::FileTensor& tensor) const {
  return draft_.has_value() ? draft_->NameOf(tensor.name) : TensorName();
}

}  // namespace quantd::cli
