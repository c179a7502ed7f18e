#include "client/models/model_sweep.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/cpp/tensor.h"
#include "client/files/gguf_types.h"
#include "client/files/safetensors.h"
#include "client/models/gguf_blocks.h"
#include "client/models/model_importance.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_engine.h"
#include "client/models/tensor_input.h"
#include "client/models/tie_groups.h"
#include "client/models/two_passes.h"

namespace quantd {
namespace {

using internal::EvaluateEngine;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Enough to keep the workers of a server busy while answers travel.
constexpr size_t kStreams = 4;
// A server holds a tensor whose scales are not found as it comes.
constexpr uint64_t kMostBytesUnderWay = uint64_t{128} << 20;

double NoiseToSignal(const v1::ErrorMetrics& metrics,
                     const v1::TensorStatistics& statistics) {
  if (metrics.non_finite_count() > NonFiniteCount(statistics)) return kInfinity;
  if (metrics.count() == 0) return 0;
  // NaN where squares overflow, or underflow to 0.
  return std::isnan(metrics.sqnr_db()) ? kInfinity
                                       : std::pow(10, -metrics.sqnr_db() / 10);
}

// True if an error is not that of a tensor but of all.
bool EndsTheRun(const absl::Status& status) {
  return IsServerUnreachable(status) || ErrorReason(status) == "TIMEOUT";
}

// Size in bytes of the codes and scales of a tensor with that encoding.
uint64_t EncodedSizeBytes(const Encoding& encoding, uint64_t element_count) {
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  if (!format.ok()) return 0;
  const int64_t bytes =
      format->SizeBytes(static_cast<int64_t>(element_count)) +
      encoding.scale_size() * ScaleSizeBytes(ScaleTypeOf(encoding)) +
      encoding.outer_scale_size() * static_cast<int64_t>(sizeof(float)) +
      format->SizeBytes(encoding.zero_point_size()) +
      encoding.real_zero_point_size() * static_cast<int64_t>(sizeof(float));
  return static_cast<uint64_t>(bytes);
}

// One run over the tensors.
class Measurer {
 public:
  Measurer(const std::vector<const files::FileTensor*>& tensors,
           const std::vector<SpecTemplate>& specs, const SweepOptions& options)
      : specs_(specs), options_(options), measured_(tensors.size()) {
    for (const SpecTemplate& spec : specs) {
      maxima_.emplace_back(
          tied_.emplace_back(GroupsThatShare(spec, options.ties)));
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      MeasuredTensor& measured = measured_[i];
      measured.tensor = tensors[i];
      for (const SpecTemplate& spec : specs) {
        MeasuredCandidate& candidate = measured.candidates.emplace_back();
        if (BlockTypeFor(spec, tensors[i]->shape) == nullptr) {
          candidate.status = spec.SpecOf(tensors[i]->shape).status();
        }
      }
    }
  }

  absl::StatusOr<std::vector<MeasuredTensor>> Run(Client* client) {
    // Tensors of which the server can measure something.
    std::vector<MeasuredTensor*> tasks;
    for (MeasuredTensor& measured : measured_) {
      if (!Candidates(measured).empty()) {
        tasks.push_back(&measured);
      } else if (!HasBlocks(measured)) {
        Tell(measured);
      }
    }
    EvaluateEngine::Work work;
    work.count = tasks.size();
    work.most_bytes = kMostBytesUnderWay;
    work.size_bytes = [&tasks](size_t i) {
      return tasks[i]->tensor->data.size();
    };
    work.make_job = [this, &tasks](size_t i) {
      return MakeJob(*tasks[i], Candidates(*tasks[i]));
    };
    work.take = [this, &tasks](size_t i, absl::StatusOr<EvaluateResult> result,
                               EvaluateStream* evaluate) {
      if (internal::CannotHold(result.status())) {
        absl::MutexLock lock(&mutex_);
        large_.push_back(tasks[i]);
        return absl::OkStatus();
      }
      absl::Status status = Take(result, evaluate, tasks[i]);
      if (!HasBlocks(*tasks[i])) Tell(*tasks[i]);
      return status;
    };
    EvaluateEngine engine(std::vector<Client*>(kStreams, client));
    absl::Status status = engine.Run(work);
    if (!status.ok()) return status;
    // While no stream is open: it would wait too long.
    std::vector<MeasuredTensor*> large;
    {
      absl::MutexLock lock(&mutex_);
      large = large_;
    }
    for (MeasuredTensor* const measured : large) {
      status = MeasureLarge(client, measured);
      if (!status.ok()) return status;
      if (!HasBlocks(*measured)) Tell(*measured);
    }
    for (MeasuredTensor& measured : measured_) {
      if (!HasBlocks(measured)) continue;
      MeasureBlocks(&measured);
      Tell(measured);
    }
    return std::move(measured_);
  }

 private:
  void Tell(const MeasuredTensor& measured) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (options_.on_tensor) options_.on_tensor(*measured.tensor);
  }

  // Null for a candidate that the server measures.
  const files::GgufType* BlockType(const MeasuredTensor& measured,
                                   size_t candidate) const {
    return BlockTypeFor(specs_[candidate], measured.tensor->shape);
  }

  bool HasBlocks(const MeasuredTensor& measured) const {
    for (size_t i = 0; i < specs_.size(); ++i) {
      if (BlockType(measured, i) != nullptr) return true;
    }
    return false;
  }

  void MeasureBlocks(MeasuredTensor* measured) const {
    for (size_t i = 0; i < specs_.size(); ++i) {
      const files::GgufType* const type = BlockType(*measured, i);
      if (type == nullptr) continue;
      MeasuredCandidate& candidate = measured->candidates[i];
      const absl::StatusOr<std::vector<uint8_t>> blocks =
          MakeGgufBlocks(*measured->tensor, *type, &candidate.metrics,
                         options_.importance.WeightsOf(measured->tensor->name));
      candidate.is_weighed =
          !options_.importance.WeightsOf(measured->tensor->name).empty();
      candidate.status = blocks.status();
      if (!blocks.ok()) continue;
      candidate.size_bytes = blocks->size();
      // All elements are finite.
      candidate.noise_to_signal =
          NoiseToSignal(candidate.metrics, v1::TensorStatistics());
    }
  }

  // One spec after the other, of a tensor that the server cannot hold. Only
  // what ends the run is an error.
  absl::Status MeasureLarge(Client* client, MeasuredTensor* measured) {
    for (const size_t i : Candidates(*measured)) {
      const absl::StatusOr<EvaluateResult> result =
          internal::EvaluateInTwoPasses(MakeJob(*measured, {i}), client);
      if (EndsTheRun(result.status())) return result.status();
      measured->candidates[i].status =
          result.ok() ? Fill(*result, {i}, measured) : result.status();
    }
    return absl::OkStatus();
  }

  // Indices of the candidates of the server that have not failed.
  std::vector<size_t> Candidates(const MeasuredTensor& measured) const {
    std::vector<size_t> candidates;
    for (size_t i = 0; i < measured.candidates.size(); ++i) {
      if (measured.candidates[i].status.ok() &&
          BlockType(measured, i) == nullptr) {
        candidates.push_back(i);
      }
    }
    return candidates;
  }

  EvaluateJob MakeJob(const MeasuredTensor& measured,
                      const std::vector<size_t>& candidates) {
    const files::FileTensor& tensor = *measured.tensor;
    EvaluateJob job;
    job.tensor = MakeTensor(tensor, TensorName());
    job.omit_encodings = true;
    job.metrics = SweepMetrics();
    const auto inputs = options_.inputs.find(tensor.name);
    if (inputs != options_.inputs.end()) job.inputs = inputs->second;
    for (const size_t i : candidates) {
      EncodingSpec spec = *specs_[i].SpecOf(tensor.shape);
      options_.importance.Apply(tensor.name, &spec);
      EvaluateCandidate& candidate = job.candidates.emplace_back();
      maxima_[i].Tie(tensor, &spec, &candidate.outer_maximum);
      candidate.source = std::move(spec);
    }
    return job;
  }

  // Only what ends the run is an error.
  absl::Status Take(const absl::StatusOr<EvaluateResult>& result,
                    EvaluateStream* evaluate, MeasuredTensor* measured) {
    const std::vector<size_t> candidates = Candidates(*measured);
    if (result.ok()) return Fill(*result, candidates, measured);
    if (EndsTheRun(result.status())) return result.status();
    if (candidates.size() == 1) {
      measured->candidates[candidates[0]].status = result.status();
      return absl::OkStatus();
    }
    // One fails all: each by itself.
    for (const size_t i : candidates) {
      evaluate->Send(MakeJob(*measured, {i}));
      const absl::StatusOr<EvaluateResult> one = evaluate->Receive();
      absl::Status status = one.ok() ? Fill(*one, {i}, measured) : one.status();
      if (EndsTheRun(status)) return status;
      measured->candidates[i].status = std::move(status);
    }
    return absl::OkStatus();
  }

  absl::Status Fill(const EvaluateResult& result,
                    const std::vector<size_t>& candidates,
                    MeasuredTensor* measured) const {
    measured->statistics = result.statistics();
    for (size_t k = 0; k < candidates.size(); ++k) {
      const v1::CandidateMetrics& answer =
          result.candidates(static_cast<int>(k));
      MeasuredCandidate& candidate = measured->candidates[candidates[k]];
      candidate.metrics = answer.overall();
      candidate.size_bytes =
          answer.size_bytes() > 0
              ? answer.size_bytes()
              : EncodedSizeBytes(answer.encoding(), measured->element_count());
      candidate.noise_to_signal =
          NoiseToSignal(answer.overall(), result.statistics());
      if (answer.has_output_noise()) {
        candidate.output_noise = answer.output_noise();
      }
      EncodingSpec spec = specs_[candidates[k]].spec;
      options_.importance.Apply(measured->tensor->name, &spec);
      candidate.is_weighed = spec.has_importance();
    }
    return absl::OkStatus();
  }

  const std::vector<SpecTemplate>& specs_;
  const SweepOptions& options_;
  // By spec; neither moves.
  std::deque<std::vector<TieGroup>> tied_;
  std::deque<TiedMaxima> maxima_;
  absl::Mutex mutex_;
  // Tensors that the server cannot hold.
  std::vector<MeasuredTensor*> large_ ABSL_GUARDED_BY(mutex_);
  // Different ones may change at once.
  std::vector<MeasuredTensor> measured_;
};

using OutputWeights = std::map<std::string, double>;

// Tensors that get one spec.
using Unit = std::vector<const MeasuredTensor*>;

std::vector<Unit> UnitsOf(const std::vector<MeasuredTensor>& tensors,
                          const std::vector<TieGroup>& ties) {
  absl::flat_hash_map<const files::FileTensor*, size_t> group_of;
  // Groups that have a tensor in common are one: of each another one of them,
  // or itself.
  std::vector<size_t> same_as(ties.size());
  std::iota(same_as.begin(), same_as.end(), size_t{0});
  const auto first_of = [&same_as](size_t group) {
    while (same_as[group] != group) group = same_as[group];
    return group;
  };
  for (size_t i = 0; i < ties.size(); ++i) {
    for (const auto* const tensor : ties[i].tensors) {
      const auto [other, is_new] = group_of.try_emplace(tensor, i);
      if (!is_new) same_as[first_of(other->second)] = first_of(i);
    }
  }
  std::vector<Unit> units;
  absl::flat_hash_map<size_t, size_t> unit_of;
  for (const MeasuredTensor& tensor : tensors) {
    const auto group = group_of.find(tensor.tensor);
    const auto [unit, is_new] =
        group == group_of.end()
            ? std::make_pair(unit_of.end(), true)
            : unit_of.try_emplace(first_of(group->second), units.size());
    if (is_new) {
      units.push_back({&tensor});
    } else {
      units[unit->second].push_back(&tensor);
    }
  }
  return units;
}

// The noise of a spec on a tensor that a mixture keeps small: with `weights`
// that at the output of the layer, without its weight.
double NoiseOf(const MeasuredCandidate& candidate,
               const OutputWeights& weights) {
  return weights.empty() || !candidate.output_noise.has_value() ||
                 candidate.noise_to_signal == kInfinity
             ? candidate.noise_to_signal
             : candidate.output_noise->noise_to_signal();
}

double WeightOf(const MeasuredTensor& tensor, const OutputWeights& weights) {
  const auto found = weights.find(tensor.tensor->name);
  return found == weights.end() ? 1 : found->second;
}

// The option of a spec for all tensors of a unit. Nothing where it failed on
// one. Where the worst tensor counts, weights do not.
std::optional<v1::MixtureOption> OptionOf(const Unit& unit, size_t spec_index,
                                          bool worst_counts,
                                          const OutputWeights& weights) {
  v1::MixtureOption option;
  option.set_spec_index(static_cast<uint32_t>(spec_index));
  for (const MeasuredTensor* const tensor : unit) {
    const MeasuredCandidate& candidate = tensor->candidates[spec_index];
    if (!candidate.status.ok()) return std::nullopt;
    option.set_size_bytes(option.size_bytes() + candidate.size_bytes);
    const double noise = NoiseOf(candidate, weights);
    option.set_noise_to_signal(worst_counts
                                   ? std::max(option.noise_to_signal(), noise)
                                   : option.noise_to_signal() +
                                         noise * WeightOf(*tensor, weights));
  }
  return option;
}

// The choices of the units as those of their tensors, with the figures of
// these.
v1::SweepMixture Spread(const v1::SweepMixture& mixture,
                        const std::map<std::string, const Unit*>& units,
                        const OutputWeights& weights) {
  v1::SweepMixture spread = mixture;
  spread.clear_choices();
  spread.set_noise_to_signal_sum(0);
  spread.set_min_sqnr_db(kInfinity);
  for (const auto& choice : mixture.choices()) {
    for (const MeasuredTensor* const tensor : *units.at(choice.tensor())) {
      const MeasuredCandidate& candidate =
          tensor->candidates[choice.spec_index()];
      auto* const added = spread.add_choices();
      *added = choice;
      added->set_tensor(tensor->tensor->name);
      const double noise = NoiseOf(candidate, weights);
      spread.set_noise_to_signal_sum(spread.noise_to_signal_sum() +
                                     noise * WeightOf(*tensor, weights));
      spread.set_min_sqnr_db(std::min(
          spread.min_sqnr_db(), noise == kInfinity ? -kInfinity
                                : weights.empty()  ? candidate.metrics.sqnr_db()
                                                   : -10 * std::log10(noise)));
    }
  }
  return spread;
}

// Mixtures for budgets of one kind: where the worst tensor of a unit counts,
// its noise is another than where all are added up.
// Errors: of ChooseMixture.
absl::StatusOr<std::vector<v1::SweepMixture>> ChooseAlike(
    const std::vector<Unit>& units, const std::vector<Budget>& budgets,
    size_t spec_count, bool worst_counts, const OutputWeights& weights,
    Client* client) {
  v1::ChooseMixtureRequest request;
  uint64_t element_count = 0;
  std::map<std::string, const Unit*> by_name;
  bool has_groups = false;
  for (const Unit& unit : units) {
    v1::MixtureTensor added;
    added.set_tensor(unit[0]->tensor->name);
    for (size_t i = 0; i < spec_count; ++i) {
      std::optional<v1::MixtureOption> option =
          OptionOf(unit, i, worst_counts, weights);
      if (option.has_value()) *added.add_options() = *std::move(option);
    }
    if (added.options().empty()) continue;
    has_groups |= unit.size() > 1;
    by_name[added.tensor()] = &unit;
    for (const MeasuredTensor* const tensor : unit) {
      element_count += tensor->element_count();
    }
    *request.add_tensors() = std::move(added);
  }
  if (budgets.empty() || request.tensors().empty()) {
    return std::vector<v1::SweepMixture>(budgets.size());
  }
  for (const Budget& budget : budgets) {
    *request.add_targets() = budget.TargetFor(element_count);
  }
  const absl::StatusOr<v1::ChooseMixtureResponse> response =
      client->ChooseMixture(request);
  if (!response.ok()) return response.status();
  std::vector<v1::SweepMixture> mixtures(response->mixtures().begin(),
                                         response->mixtures().end());
  if (has_groups || !weights.empty()) {
    for (v1::SweepMixture& mixture : mixtures) {
      mixture = Spread(mixture, by_name, weights);
    }
  }
  return mixtures;
}

}  // namespace

std::vector<v1::ErrorMetric> SweepMetrics() {
  return {v1::ERROR_METRIC_SUM_SQUARED_ERROR,
          v1::ERROR_METRIC_MEAN_SQUARED_ERROR,
          v1::ERROR_METRIC_MAX_ABSOLUTE_ERROR, v1::ERROR_METRIC_SQNR_DB};
}

uint64_t NonFiniteCount(const v1::TensorStatistics& statistics) {
  return statistics.nan_count() + statistics.positive_infinity_count() +
         statistics.negative_infinity_count();
}

uint64_t MeasuredTensor::element_count() const {
  return static_cast<uint64_t>(ElementCount(tensor->shape).value_or(0));
}

v1::MixtureTarget Budget::TargetFor(uint64_t element_count) const {
  v1::MixtureTarget target;
  switch (kind) {
    case Kind::kMinSqnr:
      target.set_min_sqnr_db(value);
      break;
    case Kind::kMaxBytes:
      target.set_max_size_bytes(static_cast<uint64_t>(value));
      break;
    case Kind::kMaxBitsPerElement:
      target.set_max_size_bytes(static_cast<uint64_t>(
          value * static_cast<double>(element_count) / 8));
      break;
  }
  return target;
}

std::vector<const files::FileTensor*> WeightsOf(const TensorInput& input) {
  std::vector<const files::FileTensor*> weights;
  for (const files::FileTensor& tensor : input.tensors()) {
    if (tensor.shape.size() >= 2 && ElementTypeOf(tensor.dtype).has_value()) {
      weights.push_back(&tensor);
    }
  }
  return weights;
}

absl::StatusOr<std::vector<v1::SweepMixture>> ChooseMixtures(
    const std::vector<MeasuredTensor>& tensors,
    const std::vector<Budget>& budgets, size_t spec_count,
    const SweepOptions& options, Client* client) {
  const std::vector<Unit> units = UnitsOf(tensors, options.ties);
  std::vector<v1::SweepMixture> mixtures(budgets.size());
  for (const bool worst_counts : {true, false}) {
    std::vector<Budget> alike;
    std::vector<size_t> places;
    for (size_t i = 0; i < budgets.size(); ++i) {
      if ((budgets[i].kind == Budget::Kind::kMinSqnr) != worst_counts) continue;
      alike.push_back(budgets[i]);
      places.push_back(i);
    }
    absl::StatusOr<std::vector<v1::SweepMixture>> chosen = ChooseAlike(
        units, alike, spec_count, worst_counts, options.output_weights, client);
    if (!chosen.ok()) return chosen.status();
    for (size_t i = 0; i < places.size(); ++i) {
      mixtures[places[i]] = std::move((*chosen)[i]);
    }
  }
  return mixtures;
}

absl::StatusOr<ModelSweep> SweepTensors(
    const std::vector<const files::FileTensor*>& tensors,
    const std::vector<SpecTemplate>& specs, const std::vector<Budget>& budgets,
    Client* client, const SweepOptions& options) {
  absl::StatusOr<std::vector<MeasuredTensor>> measured =
      Measurer(tensors, specs, options).Run(client);
  if (!measured.ok()) return measured.status();
  absl::StatusOr<std::vector<v1::SweepMixture>> mixtures =
      ChooseMixtures(*measured, budgets, specs.size(), options, client);
  if (!mixtures.ok()) return mixtures.status();
  return ModelSweep{*std::move(measured), *std::move(mixtures)};
}

}  // namespace quantd
