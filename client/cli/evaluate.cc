#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/input_options.h"
#include "client/cli/progress.h"
#include "client/cli/session.h"
#include "client/cli/streams.h"
#include "client/cli/table.h"
#include "client/cli/tensor_notes.h"
#include "client/cli/tensor_options.h"
#include "client/cli/tie_options.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/dtype.h"
#include "client/files/gguf.h"
#include "client/files/gguf_types.h"
#include "client/files/safetensors.h"
#include "client/jobs/connections.h"
#include "client/jobs/file_ties.h"
#include "client/jobs/importance.h"
#include "client/jobs/revision_name.h"
#include "client/jobs/selection.h"
#include "client/jobs/spec_options.h"
#include "client/jobs/stored_inputs.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/coded_input.h"
#include "client/models/gguf_blocks.h"
#include "client/models/model_importance.h"
#include "client/models/plain_input.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_engine.h"
#include "client/models/tensor_input.h"
#include "client/models/text.h"
#include "client/models/tie_groups.h"
#include "client/models/two_passes.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct EvaluateOptions {
  std::string input;
  jobs::RevisionName name;
  jobs::TensorFilter filter;
  std::vector<std::string> candidates;
  bool with_distribution = false;
  // A file to compare with; empty for candidates.
  std::string reference;
  jobs::TieFlags ties;
  jobs::InputsOptions inputs;
  // The file of --importance.
  std::string importance;
  StreamsOption streams;
};

// The stored inputs that weights have, by weight.
using InputNames = std::map<std::string, v1::TensorName>;

// With a label unless that is empty.
Json MetricsJson(const std::string& label, const v1::ErrorMetrics& metrics) {
  Json json = Json::object();
  if (!label.empty()) json["label"] = label;
  json.update(Json{{"sqnr_db", metrics.sqnr_db()},
                   {"max_absolute_error", metrics.max_absolute_error()},
                   {"mean_absolute_error", metrics.mean_absolute_error()},
                   {"mean_squared_error", metrics.mean_squared_error()},
                   {"max_relative_error", metrics.max_relative_error()},
                   {"mean_relative_error", metrics.mean_relative_error()},
                   {"cosine_similarity", metrics.cosine_similarity()},
                   {"count", metrics.count()},
                   {"non_finite_count", metrics.non_finite_count()},
                   {"clipped_low_count", metrics.clipped_low_count()},
                   {"clipped_high_count", metrics.clipped_high_count()},
                   {"zero_flushed_count", metrics.zero_flushed_count()}});
  if (metrics.has_kl_divergence()) {
    const v1::ErrorHistogram& histogram = metrics.error_histogram();
    json["kl_divergence"] = metrics.kl_divergence();
    json["error_histogram"] = {
        {"zero_count", histogram.zero_count()},
        {"first_exponent", histogram.first_exponent()},
        {"count", std::vector<uint64_t>(histogram.count().begin(),
                                        histogram.count().end())}};
  }
  return json;
}

// The noise at the output of the layer; NaN without finite elements.
v1::OutputNoise OutputNoiseOf(const v1::CandidateMetrics& candidate) {
  v1::OutputNoise noise = candidate.output_noise();
  if (candidate.overall().count() == 0) {
    noise.set_noise_to_signal(std::numeric_limits<double>::quiet_NaN());
  }
  return noise;
}

// The metrics of a candidate, with those at the output of the layer.
Json CandidateJson(const v1::CandidateMetrics& candidate) {
  Json json = MetricsJson(candidate.label(), candidate.overall());
  json["mantissa_bits"] = candidate.mantissa_bits();
  if (candidate.has_output_noise()) {
    json["output_noise"] = OutputNoiseJson(OutputNoiseOf(candidate));
  }
  return json;
}

// The candidates of the command line, by default kDefaultSpec.
absl::StatusOr<std::vector<Candidate>> ParseCandidates(
    const EvaluateOptions& options) {
  std::vector<Candidate> candidates;
  if (!options.reference.empty()) return candidates;
  std::vector<std::string> texts = options.candidates;
  if (texts.empty()) texts = {jobs::kDefaultSpec};
  for (const std::string& text : texts) {
    absl::StatusOr<Candidate> candidate = ParseCandidate(text);
    if (!candidate.ok()) return candidate.status();
    if (candidate->is_stored && options.name.model.empty()) {
      return ArgumentInvalidError(
          "expected --model for the candidate \"stored\"");
    }
    candidates.push_back(*std::move(candidate));
  }
  return candidates;
}

// The candidates that become blocks, which the server does not know.
bool IsBlocks(const Candidate& candidate, const files::FileTensor& tensor) {
  return !candidate.is_stored &&
         BlockTypeFor(candidate.spec, tensor.shape) != nullptr;
}

absl::StatusOr<EvaluateJob> MakeJob(const EvaluateOptions& options,
                                    const std::vector<Candidate>& candidates,
                                    const InputNames& inputs,
                                    const ModelImportance& importance,
                                    const files::FileTensor& tensor) {
  EvaluateJob job;
  // A name is for what is stored alone.
  job.tensor = MakeTensor(tensor, options.name.model.empty()
                                      ? TensorName()
                                      : options.name.NameOf(tensor.name));
  job.with_distribution = options.with_distribution;
  // Nobody looks at them, and they may be large.
  job.omit_encodings = true;
  if (const auto found = inputs.find(tensor.name); found != inputs.end()) {
    job.inputs = found->second;
  }
  for (const Candidate& candidate : candidates) {
    if (IsBlocks(candidate, tensor)) continue;
    if (candidate.is_stored) {
      job.candidates.push_back({v1::EncodingReference(), candidate.label});
      continue;
    }
    absl::StatusOr<EncodingSpec> spec = candidate.spec.SpecOf(tensor.shape);
    if (!spec.ok()) return spec.status();
    importance.Apply(tensor.name, &*spec);
    job.candidates.push_back({*spec, candidate.label});
  }
  return job;
}

// Takes away the tensors whose rows have no whole blocks of a candidate, and
// says which, whose blocks are of another type, and which have one scale. Those
// that --include names stay, and fail.
// Errors: ARGUMENT_INVALID if none is left.
absl::Status LeaveOutNoBlocks(const EvaluateOptions& options,
                              const std::vector<Candidate>& candidates,
                              Session* session,
                              std::vector<const files::FileTensor*>* tensors,
                              std::vector<std::string>* left_out) {
  std::vector<const files::FileTensor*> measured;
  std::vector<std::string> notes;
  for (const files::FileTensor* const tensor : *tensors) {
    const bool is_named = MatchesAny(options.filter.include, tensor->name);
    bool is_left_out = false;
    for (const Candidate& candidate : candidates) {
      if (candidate.is_stored) continue;
      const std::string one_scale = jobs::OneScaleText(candidate.spec, *tensor);
      if (!one_scale.empty()) {
        notes.push_back(absl::StrCat("quantctl: ", one_scale));
      }
      const files::GgufType* const type =
          BlockTypeFor(candidate.spec, tensor->shape);
      const std::string text =
          NoWholeBlocksText(candidate.spec, *tensor, type, "left out");
      if (text.empty()) continue;
      const bool is_without = type == nullptr;
      if (is_without && is_named) continue;
      is_left_out = is_left_out || is_without;
      notes.push_back(absl::StrCat("quantctl: ", text));
    }
    if (is_left_out) {
      left_out->push_back(tensor->name);
    } else {
      measured.push_back(tensor);
    }
  }
  if (measured.empty()) {
    return ArgumentInvalidError(absl::StrCat(
        "expected tensors whose rows have whole blocks, got none among ",
        tensors->size(), ", such as ", left_out->front()));
  }
  *tensors = std::move(measured);
  if (!session->quiet) PrintNotes(notes, session);
  return absl::OkStatus();
}

// Checks that the reference has the tensor, of reals and in the same shape.
absl::Status CheckReference(const TensorInput& reference,
                            const files::FileTensor& tensor) {
  const files::FileTensor* const found = reference.Find(tensor.name);
  if (found == nullptr) {
    return ArgumentInvalidError("the reference has no such tensor");
  }
  if (!ElementTypeOf(found->dtype).has_value() ||
      found->shape != tensor.shape) {
    return ArgumentInvalidError(
        absl::StrCat("expected ", DtypeName(found->dtype), " ",
                     ShapeText(found->shape), " as in the reference, got ",
                     DtypeName(tensor.dtype), " ", ShapeText(tensor.shape)));
  }
  return absl::OkStatus();
}

Reference ReferenceOf(const files::FileTensor& tensor) {
  return {*ElementTypeOf(tensor.dtype), tensor.data};
}

// Says what of the reference is not compared because it is not in the file.
void NoteMissing(const TensorInput& input, const TensorInput& reference,
                 const EvaluateOptions& options, Session* session) {
  size_t count = 0;
  for (const files::FileTensor& tensor : reference.tensors()) {
    if (!options.filter.Takes(tensor)) continue;
    count += input.Find(tensor.name) == nullptr ? 1 : 0;
  }
  if (count == 0) return;
  session->PrintError(absl::StrCat("quantctl: ", CountText(count),
                                   " tensors of ", options.reference,
                                   " are not in ", options.input));
}

// The error of the blocks that a tensor becomes: the server compares what they
// stand for with the tensor.
absl::StatusOr<v1::ErrorMetrics> EvaluateBlocks(
    const EvaluateOptions& options, const SpecTemplate& spec,
    const ModelImportance& importance, const files::FileTensor& tensor,
    Client* client) {
  const files::GgufType& type = *BlockTypeFor(spec, tensor.shape);
  v1::ErrorMetrics metrics;
  const absl::StatusOr<std::vector<uint8_t>> blocks =
      MakeGgufBlocks(tensor, type, &metrics, importance.WeightsOf(tensor.name));
  if (!blocks.ok()) return blocks.status();
  files::GgufTensor coded;
  coded.type = &type;
  coded.data = *blocks;
  const std::vector<float> reals = files::DequantizeGguf(coded);
  const files::FileTensor decoded = {
      tensor.name,
      files::Dtype::kF32,
      tensor.shape,
      {reinterpret_cast<const uint8_t*>(reals.data()),
       reals.size() * sizeof(float)}};
  const std::shared_ptr<const void> hold = tensor.Hold();
  EvaluateJob job;
  job.tensor = MakeTensor(decoded, TensorName());
  job.reference = ReferenceOf(tensor);
  job.with_distribution = options.with_distribution;
  const absl::StatusOr<EvaluateResult> result = client->Evaluate(job);
  if (!result.ok()) return result.status();
  return result->comparison();
}

bool HasImportance(const std::vector<Candidate>& candidates) {
  return std::any_of(candidates.begin(), candidates.end(),
                     [](const Candidate& candidate) {
                       return candidate.spec.spec.has_importance();
                     });
}

// Puts what EvaluateBlocks finds among the candidates of the server.
absl::Status AddBlocks(const EvaluateOptions& options,
                       const std::vector<Candidate>& candidates,
                       const ModelImportance& importance,
                       const files::FileTensor& tensor, Client* client,
                       EvaluateResult* result) {
  EvaluateResult merged = *result;
  merged.clear_candidates();
  int next = 0;
  for (const Candidate& candidate : candidates) {
    if (!IsBlocks(candidate, tensor)) {
      *merged.add_candidates() = result->candidates(next++);
      continue;
    }
    const absl::StatusOr<v1::ErrorMetrics> metrics =
        EvaluateBlocks(options, candidate.spec, importance, tensor, client);
    if (!metrics.ok()) return metrics.status();
    v1::CandidateMetrics* const added = merged.add_candidates();
    added->set_label(candidate.label);
    *added->mutable_overall() = *metrics;
  }
  *result = std::move(merged);
  return absl::OkStatus();
}

// How much errors count, for the candidates. Says which tensors go without.
// Errors: those of FindImportance.
absl::StatusOr<ModelImportance> FindCandidatesImportance(
    const EvaluateOptions& options, const std::vector<Candidate>& candidates,
    const std::vector<const files::FileTensor*>& tensors, Client* client,
    Session* session) {
  jobs::InputsOptions inputs = options.inputs;
  if (!inputs.IsGiven()) {
    inputs.model = options.name.model;
    inputs.revision = options.name.revision;
  }
  const absl::StatusOr<jobs::FoundImportance> found = jobs::FindImportance(
      options.importance, inputs, tensors,
      [&candidates](const files::FileTensor& /*tensor*/) {
        std::vector<const SpecTemplate*> specs;
        for (const Candidate& candidate : candidates) {
          if (!candidate.is_stored) specs.push_back(&candidate.spec);
        }
        return specs;
      },
      client);
  if (!found.ok()) return found.status();
  ReportMissingImportance(options.importance, *found,
                          !options.filter.include.empty(), session);
  return found->importance;
}

// Gives each tensor its result. Against a reference unless that is null. With
// `wants_all` all metrics, otherwise those of the table.
// `ties`  groups of tensors that share outer scales.
// Errors: what ends the run.
absl::Status EvaluateAll(
    const EvaluateOptions& options, const std::vector<Candidate>& candidates,
    const InputNames& inputs, const ModelImportance& importance,
    const std::vector<const files::FileTensor*>& tensors,
    const std::vector<TieGroup>& ties, const TensorInput* reference,
    const jobs::Connections& connections, bool wants_all, bool shows_progress,
    std::vector<absl::StatusOr<EvaluateResult>>* results) {
  uint64_t total_bytes = 0;
  for (const files::FileTensor* const tensor : tensors) {
    total_bytes += tensor->data.size();
  }
  // Tensors that the server has to see, and tensors that become blocks.
  std::vector<size_t> tasks;
  std::vector<size_t> with_blocks;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto count = static_cast<size_t>(
        std::count_if(candidates.begin(), candidates.end(),
                      [&tensor = *tensors[i]](const Candidate& candidate) {
                        return IsBlocks(candidate, tensor);
                      }));
    if (count > 0) with_blocks.push_back(i);
    if (count < candidates.size() || reference != nullptr) {
      tasks.push_back(i);
    } else {
      (*results)[i] = EvaluateResult();
    }
  }
  // Ties and maxima of each candidate that the server quantizes.
  std::deque<std::vector<TieGroup>> tied;
  std::deque<TiedMaxima> maxima;
  for (const Candidate& candidate : candidates) {
    maxima.emplace_back(tied.emplace_back(
        candidate.is_stored ? std::vector<TieGroup>()
                            : GroupsThatShare(candidate.spec, ties)));
  }
  // Holds the data that a comparison reads, until its tensor is answered.
  using Holds = std::vector<std::shared_ptr<const void>>;
  std::vector<Holds> holds(reference == nullptr ? 0 : tensors.size());
  Progress progress(total_bytes, shows_progress);
  absl::Mutex mutex;
  internal::EvaluateEngine::Work work;
  work.count = tasks.size();
  work.size_bytes = [&](size_t k) { return tensors[tasks[k]]->data.size(); };
  work.make_job = [&](size_t k) {
    const size_t i = tasks[k];
    const files::FileTensor& tensor = *tensors[i];
    EvaluateJob job = *MakeJob(options, candidates, inputs, importance, tensor);
    if (!wants_all) {
      job.metrics = {v1::ERROR_METRIC_SQNR_DB,
                     v1::ERROR_METRIC_MAX_ABSOLUTE_ERROR};
    }
    auto next = job.candidates.begin();
    for (size_t c = 0; c < candidates.size(); ++c) {
      if (IsBlocks(candidates[c], tensor)) continue;
      if (auto* const spec = std::get_if<EncodingSpec>(&next->source)) {
        maxima[c].Tie(tensor, spec, &next->outer_maximum);
      }
      ++next;
    }
    if (reference != nullptr) {
      const files::FileTensor& other = *reference->Find(tensor.name);
      holds[i] = {other.Hold(), tensor.Hold()};
      job.reference = ReferenceOf(other);
    }
    return job;
  };
  // Only what ends the run is an error.
  const auto check = [](const absl::Status& status) {
    return ExitCodeOf(status) == kUnreachable ? status : absl::OkStatus();
  };
  work.take = [&](size_t k, absl::StatusOr<EvaluateResult> result,
                  EvaluateStream*) {
    const size_t i = tasks[k];
    if (reference != nullptr) holds[i].clear();
    absl::Status status = check(result.status());
    (*results)[i] = std::move(result);
    absl::MutexLock lock(&mutex);
    progress.Add(tensors[i]->data.size(), tensors[i]->name);
    return status;
  };
  absl::Status status =
      internal::EvaluateEngine(connections.clients()).Run(work);
  // While no stream is open: it would wait too long.
  for (size_t k = 0; k < tasks.size() && status.ok(); ++k) {
    absl::StatusOr<EvaluateResult>& result = (*results)[tasks[k]];
    if (!internal::CannotHold(result.status())) continue;
    result = internal::EvaluateInTwoPasses(work.make_job(k),
                                           connections.clients()[0]);
    status = check(result.status());
  }
  for (const size_t i : with_blocks) {
    absl::StatusOr<EvaluateResult>& result = (*results)[i];
    if (!status.ok()) break;
    if (!result.ok()) continue;
    const absl::Status added =
        AddBlocks(options, candidates, importance, *tensors[i],
                  connections.clients()[0], &*result);
    status = check(added);
    if (!added.ok()) result = added;
  }
  return status;
}

// A file of plain tensors; with `decodes` also of what other programs
// quantized, as floats, on which there may be notes.
absl::StatusOr<TensorInput> OpenInput(const std::string& path, bool decodes,
                                      std::vector<std::string>* notes) {
  absl::StatusOr<TensorInput> input = TensorInput::Open(path);
  if (!input.ok()) return input;
  const absl::Status plain = CheckPlain(*input, path);
  if (plain.ok() || !decodes) {
    return plain.ok() ? std::move(input) : absl::StatusOr<TensorInput>(plain);
  }
  const absl::StatusOr<CodedInput> coded = OpenCoded(path);
  if (!coded.ok()) return coded.status();
  if (coded->tensors.empty()) return plain;
  TensorInput decoded = Decoded(*std::move(input), *coded);
  const absl::Status status = CheckNoCodes(decoded, path);
  if (!status.ok()) return status;
  for (const std::string& note : NotesOf(*coded)) {
    notes->push_back(absl::StrCat(path, ": ", note));
  }
  return decoded;
}

void RunEvaluate(const EvaluateOptions& options, Session* session) {
  const absl::StatusOr<std::vector<Candidate>> candidates =
      ParseCandidates(options);
  if (!candidates.ok()) return session->FailUsage(candidates.status());
  const bool compares = !options.reference.empty();
  if (compares && options.ties.IsGiven()) {
    return session->FailUsage(ArgumentInvalidError(
        "expected --tie and --no-ties with specs, got --reference"));
  }
  std::vector<std::string> input_notes;
  const absl::StatusOr<TensorInput> input =
      OpenInput(options.input, /*decodes=*/compares, &input_notes);
  if (!input.ok()) return session->Fail(input.status());
  ReportUnread(*input, options.filter, session);

  std::optional<TensorInput> reference;
  if (compares) {
    absl::StatusOr<TensorInput> opened =
        OpenInput(options.reference, /*decodes=*/true, &input_notes);
    if (!opened.ok()) return session->Fail(opened.status());
    reference.emplace(*std::move(opened));
  }
  absl::StatusOr<std::vector<const files::FileTensor*>> taken =
      SelectMeasurable(*input, options.filter, nullptr, session);
  if (!taken.ok()) return session->FailUsage(taken.status());
  std::vector<std::string> left_out;
  const absl::Status measured =
      LeaveOutNoBlocks(options, *candidates, session, &*taken, &left_out);
  if (!measured.ok()) return session->FailUsage(measured);
  const absl::StatusOr<jobs::Connections> connections =
      options.streams.Connect(*session);
  if (!connections.ok()) return session->FailUsage(connections.status());
  if (compares) NoteMissing(*input, *reference, options, session);
  const absl::StatusOr<InputNames> inputs = FindOutputInputs(
      options.inputs, *taken,
      /*is_needed=*/!HasImportance(*candidates),
      !options.filter.include.empty(), connections->first(), session);
  if (!inputs.ok()) return FailEarly(inputs.status(), session);
  const absl::StatusOr<ModelImportance> importance = FindCandidatesImportance(
      options, *candidates, *taken, connections->first(), session);
  if (!importance.ok()) return FailEarly(importance.status(), session);
  const bool has_inputs = !inputs->empty();

  Json list = Json::array();
  Table table;
  table.AddColumn("TENSOR", Table::Align::kLeft);
  table.AddColumn("SHAPE", Table::Align::kLeft);
  table.AddColumn("DTYPE", Table::Align::kLeft);
  const auto add_columns = [&](const std::string& label) {
    table.AddColumn(absl::StrCat(label, " DB"), Table::Align::kRight);
    if (has_inputs) table.AddColumn("OUTPUT DB", Table::Align::kRight);
    table.AddColumn("MAX ERROR", Table::Align::kRight);
    if (options.with_distribution) {
      table.AddColumn("KL", Table::Align::kRight);
    }
  };
  for (const Candidate& candidate : *candidates) add_columns(candidate.label);
  if (compares) add_columns("SQNR");
  // `candidate` has noise at the output of the layer; null for none.
  const auto add_cells = [&](const v1::ErrorMetrics& metrics,
                             const v1::CandidateMetrics* candidate,
                             std::vector<std::string>* row) {
    row->push_back(DecibelText(metrics.sqnr_db()));
    if (has_inputs) {
      row->push_back(candidate == nullptr ? ""
                                          : DecibelText(jobs::OutputSqnrDb(
                                                OutputNoiseOf(*candidate))));
    }
    const auto add_error = [&](double error) {
      row->push_back(metrics.count() == 0 ? kNotMeasured : NumberText(error));
    };
    add_error(metrics.max_absolute_error());
    if (options.with_distribution) add_error(metrics.kl_divergence());
  };
  std::vector<TensorError> errors;
  std::vector<std::string> notes;
  for (const std::string& note : input_notes) {
    notes.push_back(absl::StrCat("quantctl: ", note));
  }
  const auto note_not_finite = [&](const files::FileTensor& tensor,
                                   const v1::ErrorMetrics& metrics) {
    if (metrics.non_finite_count() == 0) return;
    notes.push_back(absl::StrCat("quantctl: tensor ", tensor.name, ": ",
                                 CountText(metrics.non_finite_count()),
                                 " elements are not finite, and not measured"));
  };
  const auto fail = [&](const files::FileTensor& tensor,
                        const absl::Status& status) {
    session->Note(kServerError);
    errors.push_back({tensor.name, status});
    list.push_back({{"name", tensor.name},
                    {"shape", tensor.shape},
                    {"dtype", std::string(DtypeName(tensor.dtype))},
                    {"error", ErrorJson(status)}});
    table.AddRow({tensor.name, ShapeText(tensor.shape),
                  std::string(DtypeName(tensor.dtype)), "failed"});
  };
  std::vector<const files::FileTensor*> selected;
  absl::Status status;
  for (const files::FileTensor* const one : *taken) {
    const files::FileTensor& tensor = *one;
    status =
        MakeJob(options, *candidates, *inputs, *importance, tensor).status();
    if (status.ok() && compares) status = CheckReference(*reference, tensor);
    if (!status.ok()) {
      fail(tensor, status);
      continue;
    }
    selected.push_back(&tensor);
  }
  const absl::StatusOr<std::vector<TieGroup>> ties = jobs::FindFileTies(
      options.ties,
      std::any_of(candidates->begin(), candidates->end(),
                  [](const Candidate& candidate) {
                    return MayShareScale(candidate.spec.spec);
                  }),
      selected);
  if (!ties.ok()) return session->FailUsage(ties.status());
  std::vector<absl::StatusOr<EvaluateResult>> results(selected.size());
  status = EvaluateAll(options, *candidates, *inputs, *importance, selected,
                       *ties, compares ? &*reference : nullptr, *connections,
                       /*wants_all=*/session->json, !session->quiet, &results);
  if (!status.ok()) {
    // Not a tensor's but everybody's error.
    session->exit_code = kSuccess;
    return session->Fail(status);
  }
  for (size_t i = 0; i < selected.size(); ++i) {
    const files::FileTensor& tensor = *selected[i];
    const absl::StatusOr<EvaluateResult>& result = results[i];
    if (!result.ok()) {
      fail(tensor, result.status());
      continue;
    }
    Json metrics = Json::array();
    std::vector<std::string> row = {tensor.name, ShapeText(tensor.shape),
                                    std::string(DtypeName(tensor.dtype))};
    for (const v1::CandidateMetrics& candidate : result->candidates()) {
      metrics.push_back(CandidateJson(candidate));
      add_cells(candidate.overall(),
                candidate.has_output_noise() ? &candidate : nullptr, &row);
    }
    Json json = {{"name", tensor.name},
                 {"shape", tensor.shape},
                 {"dtype", std::string(DtypeName(tensor.dtype))}};
    if (result->candidates_size() > 0) {
      const std::string clipped = jobs::ClippedInputsText(
          tensor.name, result->candidates(0).output_noise());
      if (!clipped.empty()) {
        notes.push_back(absl::StrCat("quantctl: ", clipped));
      }
    }
    if (compares) {
      note_not_finite(tensor, result->comparison());
      json["comparison"] = MetricsJson("", result->comparison());
      add_cells(result->comparison(), nullptr, &row);
    } else {
      if (result->candidates_size() > 0) {
        note_not_finite(tensor, result->candidates(0).overall());
      }
      json["candidates"] = std::move(metrics);
    }
    list.push_back(std::move(json));
    table.AddRow(std::move(row));
  }
  if (session->json) {
    return session->PrintJson({{"input", options.input},
                               {"retries", session->retries()},
                               {"left_out", left_out},
                               {"notes", input_notes},
                               {"tensors", list}});
  }
  session->Print(table.Render(StdoutHasStyle()));
  PrintNotes(notes, session);
  PrintTensorErrors(errors, session);
}

}  // namespace

void AddEvaluateCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "evaluate",
      "Measure the error of candidate encodings on a file's tensors, or of "
      "the file against another one");
  const auto options = std::make_shared<EvaluateOptions>();
  AddInputArgument(command, &options->input);
  command
      ->AddOption("--spec", &options->candidates, "SPEC",
                  "What to measure, such as int4:group:32:mse, or stored for "
                  "the encoding that the server has of the tensor in --model; "
                  "may be repeated. Default int8. See quantctl help specs")
      ->Suggest(FormatNames());
  command->AddFlag("--distribution", &options->with_distribution,
                   "Kullback-Leibler divergence and, with --json, a histogram "
                   "of errors as well");
  Option* const reference =
      command->AddOption("--reference", &options->reference, "FILE",
                         "Compare the tensors with those of this file instead, "
                         "which are taken to be exact");
  Option* const inputs = AddInputsOptions(
      command,
      "Also tell the error at the output of the layer, for the inputs whose "
      "Gram matrices are stored there: those of MODULE.weight under "
      "MODULE.input, or under that of a layer that runtimes fuse with it. "
      "Specs with importance take the moments there; by default of --model",
      &options->inputs);
  inputs->Excludes(reference);
  AddImportanceOption(command, &options->importance)->Excludes(reference);
  command->AddExample(
      "quantctl evaluate model.safetensors \\\n"
      "  --spec int8:per-channel --spec nf4");
  command->AddExample(
      "quantctl evaluate restored.safetensors --reference model.safetensors");
  command->AddExample(
      "quantctl evaluate model.safetensors --spec int4:group:128 \\\n"
      "  --spec int4:group:128:mse --inputs acme/net",
      "what the layers lose, too; quantctl calibrate --gram stores their "
      "inputs");
  AddRevisionOptions(command, /*required=*/false, &options->name);
  AddFilterOptions(command, &options->filter);
  AddTieOptions(command, "Tensors that share one outer scale", &options->ties);
  options->streams.AddOption(command);
  command->OnRun([options, session] {
    if (options->inputs.text.empty() && !options->inputs.map.empty()) {
      return session->FailUsage(
          ArgumentInvalidError("expected --inputs with --inputs-map"));
    }
    options->inputs.Resolve();
    RunEvaluate(*options, session);
  });
}

}  // namespace quantd::cli
