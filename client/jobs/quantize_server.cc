#include "client/jobs/quantize_server.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "client/jobs/errors.h"
#include "client/jobs/job_events.h"
#include "client/models/element_counter.h"
#include "client/models/tensor_input.h"
#include "client/models/tie_groups.h"
#include "client/models/two_passes.h"

namespace quantd::jobs {
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

// How many float16 scales are so small, below 2^-20, that rounding them up to
// the next one makes them larger by a sixteenth or more: reals of their blocks
// may be lost. Blocks of zeros have scale 1.
// Requires: whole scales.
uint64_t CountCoarse(absl::Span<const uint8_t> scales) {
  // Bits are in units of 2^-24 up to 2^-14.
  constexpr uint16_t kFinerFrom = 16;
  uint64_t count = 0;
  for (size_t i = 0; i < scales.size(); i += sizeof(uint16_t)) {
    uint16_t bits;
    std::memcpy(&bits, scales.data() + i, sizeof(bits));
    count += bits < kFinerFrom ? 1 : 0;
  }
  return count;
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
  // Others went to a sink.
  if (result.header.encoding().scale_type() == v1::SCALE_TYPE_FLOAT16) {
    outcome->coarse_scale_count += CountCoarse(result.scales.scale.span());
  }
  if (summary.has_output_noise()) {
    outcome->output_noise = summary.output_noise();
  }
}

}  // namespace

QuantizeServer::QuantizeServer(const QuantizeOptions& options,
                               Connections connections,
                               absl::string_view run_key,
                               const QuantizePlan& plan,
                               const JobEvents& events)
    : options_(options),
      events_(events),
      connections_(std::move(connections)),
      engine_(connections_.clients()),
      maxima_(plan.ties),
      roundings_(plan.roundings) {
  if (options.store) draft_.emplace(options.name, run_key);
}

absl::Status QuantizeServer::Quantize(const TensorSink& sink,
                                      std::vector<TensorTask>* tasks,
                                      JobProgress* progress) {
  internal::QuantizeEngine::Work work;
  work.count = tasks->size();
  // In a run that fails, no encoding may come after its draft is deleted.
  work.takes_all_under_way =
      options_.store && options_.output.IsStandardOutput();
  work.size_bytes = [tasks](size_t i) {
    return (*tasks)[i].tensor->data.size();
  };
  work.make_job = [this, &sink, tasks](size_t i) {
    (*tasks)[i].hold = (*tasks)[i].tensor->Hold();
    QuantizeJob job = MakeJob(&(*tasks)[i]);
    SetSinks(sink, i, (*tasks)[i], &job);
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
    return status.ok() ? events_.CheckStopped() : status;
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
  // Other data that the server would hold are not in an encoding.
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
  SetSinks(sink, i, *task, &job);
  return client()->Quantize(job);
}

void QuantizeServer::SetSinks(const TensorSink& sink, size_t i,
                              const TensorTask& task, QuantizeJob* job) {
  if (sink.set_sinks) sink.set_sinks(i, job);
  Sink& scale = job->scale_sinks.scale;
  if (!scale || task.spec.scale_type() != v1::SCALE_TYPE_FLOAT16) return;
  scale = [write = std::move(scale), outcome = task.outcome,
           counter = ElementCounter(sizeof(uint16_t), CountCoarse)](
              uint64_t offset_bytes, absl::Span<const uint8_t> bytes) mutable {
    counter.Add(offset_bytes, bytes);
    outcome->coarse_scale_count = counter.count();
    return write(offset_bytes, bytes);
  };
}

absl::Status QuantizeServer::TakeResult(
    const TensorSink& sink, size_t i,
    const absl::StatusOr<QuantizeResult>& result, EvaluateStream* evaluate,
    TensorTask* task) const {
  if (!result.ok()) {
    task->outcome->status = result.status();
    return EndsJob(result.status()) ? result.status() : absl::OkStatus();
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
  // Metrics that reports have.
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

}  // namespace quantd::jobs
