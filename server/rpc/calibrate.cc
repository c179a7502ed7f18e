// Calibrate: chunks > statistics > encoding > store, by itself or together with
// what other sources contributed.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/search_time.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/compensation_factor.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/histogram.h"
#include "core/statistics/statistics_state.h"
#include "core/statistics/tensor_statistics.h"
#include "core/types/block_layout.h"
#include "core/types/tensor_slice.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/guard/limits.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/caller.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/provenance.h"
#include "server/rpc/state_receiver.h"
#include "server/rpc/stored_calibration.h"
#include "server/rpc/stored_encoding_proto.h"
#include "server/rpc/stream_rpcs.h"
#include "server/rpc/tensor_accumulator.h"
#include "server/rpc/tensor_calibration.h"
#include "server/rpc/tensor_header.h"
#include "server/rpc/tensor_job.h"
#include "server/store/gram_pieces.h"
#include "server/store/statistics_store.h"
#include "server/wire/encoding_proto.h"
#include "server/wire/names.h"
#include "server/wire/statistics_proto.h"

namespace quantd::server {
namespace {

constexpr double kDefaultAveragingConstant = 0.01;
// All contributions, and the same at the granularity of a spec.
constexpr int kCalibrationCopies = 2;

// Properties that a Gram matrix is to have.
struct GramTask {
  int64_t feature_count = 0;
  // Exponents that the header gives; [feature_count] or empty.
  std::vector<int> exponents;
  int64_t part_size = 0;
};

// Properties that moments of features are to have.
struct MomentsTask {
  // From 0 on.
  int64_t axis = 0;
  // Features of the elements that come.
  core::FeatureAxis features{};
  // Number of features of the whole tensor, and the place of those features
  // among them.
  int64_t global_count = 0;
  int64_t first = 0;
};

// Statistics of features to keep.
struct FeatureTask {
  absl::optional<GramTask> gram;
  absl::optional<MomentsTask> moments;
};

// A contribution of a header, checked.
struct CheckedContribution {
  ContributionKey key;
  FeatureTask features;
  std::vector<int64_t> block_size;
  int mantissa_bits = TensorAccumulator::kDefaultMantissaBits;
  double averaging_constant = kDefaultAveragingConstant;
  // Size of the state that comes in place of elements; 0 if they come.
  int64_t state_bytes = 0;
};

// The request of a header, checked.
struct CalibrateTask {
  v1::TensorName name;
  // Something is kept under the name.
  bool stores = false;
  TensorDescription description;
  // Key of the encoding; with a spec or a contribution.
  EncodingKey key;
  // Stores of the caller.
  std::shared_ptr<EncodingStore> encodings;
  std::shared_ptr<StatisticsStore> statistics;
  // Resolved for the shape only without a contribution, with which the
  // statistics have a shape of their own.
  absl::optional<core::EncodingSpec> spec;
  // Lease of the ranges in the spec.
  std::shared_ptr<const MemoryBudget::Lease> spec_lease;
  // The spec as it was asked for.
  v1::EncodingSpec told_spec;
  absl::optional<CheckedContribution> contribution;
  // Layout of the statistics that are gathered: of a slice, of its own blocks.
  std::shared_ptr<const core::BlockLayout> layout;
  int mantissa_bits = TensorAccumulator::kNoHistograms;
  // Number of scales of the whole tensor; with a contribution.
  int64_t scale_count = 0;

  // Memory of the statistics of the whole tensor beside those of a slice,
  // except for the elements.
  int64_t WholeStatisticsBytes() const {
    constexpr int64_t kBytesPerScale =
        sizeof(core::Extremes) + sizeof(core::Histogram);
    return description.slice.has_value() ? scale_count * kBytesPerScale : 0;
  }

  // Null if no moments are kept.
  const MomentsTask* moments() const {
    return contribution.has_value() &&
                   contribution->features.moments.has_value()
               ? &*contribution->features.moments
               : nullptr;
  }
};

absl::Status ContributionInvalid(absl::string_view what,
                                 absl::string_view field) {
  return core::WithField(core::ContributionInvalidError(what), field);
}

// Errors are at the fields of a FeatureStatistics.
absl::StatusOr<absl::optional<MomentsTask>> ParseMomentsTask(
    const v1::FeatureStatistics& proto, const TensorDescription& description) {
  if (!proto.moments()) return absl::optional<MomentsTask>();
  const int64_t axis = proto.has_axis() ? proto.axis() : -1;
  absl::StatusOr<core::FeatureAxis> features =
      core::FeatureAxis::Create(description.shape, axis);
  if (!features.ok()) {
    return ContributionInvalid(core::ErrorText(features.status()), "axis");
  }
  MomentsTask task;
  task.axis =
      axis < 0 ? axis + static_cast<int64_t>(description.shape.size()) : axis;
  task.features = *features;
  task.global_count = description.global_shape()[task.axis];
  if (description.slice.has_value()) {
    task.first = description.slice->offset[task.axis];
  }
  constexpr int64_t kMaxFeatures = int64_t{1} << 16;
  if (task.global_count == 0 || task.global_count > kMaxFeatures) {
    return ContributionInvalid(
        absl::StrCat("moments of ", task.global_count,
                     " features, expected 1 to ", kMaxFeatures),
        "moments");
  }
  // There is no element to add.
  if (description.element_count == 0) return absl::optional<MomentsTask>();
  return absl::optional<MomentsTask>(task);
}

// Errors are at the fields of a FeatureStatistics.
absl::StatusOr<absl::optional<GramTask>> CheckGram(
    const Limits& limits, const v1::FeatureStatistics& proto,
    const TensorDescription& description) {
  const std::vector<int64_t>& shape = description.shape;
  if (!proto.gram()) {
    if (proto.step_exponent_size() > 0 || proto.max_part() != 0) {
      return ContributionInvalid("step_exponent or max_part without gram",
                                 "gram");
    }
    return absl::optional<GramTask>();
  }
  const auto last = static_cast<int64_t>(shape.size()) - 1;
  if (proto.has_axis() && proto.axis() != -1 && proto.axis() != last) {
    return ContributionInvalid(
        absl::StrCat("a Gram matrix along axis ", proto.axis(),
                     ", expected the last one"),
        "axis");
  }
  GramTask task;
  task.feature_count = shape.empty() ? 0 : shape.back();
  if (task.feature_count == 0) {
    return ContributionInvalid(
        "a Gram matrix of a tensor without features, expected a "
        "last dimension of at least 1",
        "gram");
  }
  // Exponents are held before memory is charged. No layer has as many inputs.
  constexpr int64_t kMaxFeatures = int64_t{1} << 18;
  if (task.feature_count > kMaxFeatures) {
    return ContributionInvalid(
        absl::StrCat("a Gram matrix of ", task.feature_count,
                     " features, expected at most ", kMaxFeatures),
        "gram");
  }
  if (description.slice.has_value() &&
      !description.slice->HasWhole(static_cast<size_t>(last))) {
    return ContributionInvalid(
        absl::StrCat("a Gram matrix of a slice with ", task.feature_count,
                     " of ", description.slice->global_shape.back(),
                     " features, expected whole rows: the products with the "
                     "features of other slices would be missing. Gather the "
                     "rows, keep moments, or contribute each slice as a "
                     "tensor of its own"),
        "gram");
  }
  // There is no row to add.
  if (description.element_count == 0) return absl::optional<GramTask>();
  if (proto.step_exponent_size() != 0 &&
      proto.step_exponent_size() != task.feature_count) {
    return ContributionInvalid(
        absl::StrCat(proto.step_exponent_size(), " exponents, expected ",
                     task.feature_count, ", one for each feature, or none"),
        "step_exponent");
  }
  for (const int exponent : proto.step_exponent()) {
    if (exponent < core::GramState::kMinExponent ||
        exponent > core::GramState::kMaxExponent) {
      return ContributionInvalid(
          absl::StrCat("the exponent ", exponent, ", expected ",
                       core::GramState::kMinExponent, " to ",
                       core::GramState::kMaxExponent),
          "step_exponent");
    }
  }
  const int64_t max_part =
      proto.max_part() == 0 ? limits.gram_features : int64_t{proto.max_part()};
  if (max_part % core::GramState::kPartUnit != 0 ||
      max_part > limits.gram_features) {
    return ContributionInvalid(
        absl::StrCat("max_part is ", max_part, ", expected a multiple of ",
                     core::GramState::kPartUnit, ", at most ",
                     limits.gram_features, ", this server's --gram-features"),
        "max_part");
  }
  task.exponents.assign(proto.step_exponent().begin(),
                        proto.step_exponent().end());
  task.part_size = core::GramState::PartSize(task.feature_count, max_part);
  return absl::optional<GramTask>(std::move(task));
}

// Errors are at the fields of a FeatureStatistics.
absl::StatusOr<FeatureTask> CheckFeatures(
    const Limits& limits, const v1::FeatureStatistics& proto,
    const TensorDescription& description) {
  if (proto.has_axis() && !proto.gram() && !proto.moments()) {
    return ContributionInvalid("an axis without gram or moments", "axis");
  }
  absl::StatusOr<absl::optional<GramTask>> gram =
      CheckGram(limits, proto, description);
  if (!gram.ok()) return gram.status();
  absl::StatusOr<absl::optional<MomentsTask>> moments =
      ParseMomentsTask(proto, description);
  if (!moments.ok()) return moments.status();
  return FeatureTask{*std::move(gram), *std::move(moments)};
}

// Errors are at the fields of a Contribution.
absl::StatusOr<CheckedContribution> CheckContribution(
    const Limits& limits, const v1::Contribution& proto,
    const TensorDescription& description) {
  CheckedContribution checked;
  if (absl::Status s = CheckPathName("source", proto.source()); !s.ok()) {
    return ContributionInvalid(core::ErrorText(s), "source");
  }
  constexpr uint64_t kMaxSequence = std::numeric_limits<int64_t>::max();
  if (proto.sequence() == 0 || proto.sequence() > kMaxSequence) {
    return ContributionInvalid(absl::StrCat("sequence is ", proto.sequence(),
                                            ", expected 1 to ", kMaxSequence),
                               "sequence");
  }
  const uint32_t mantissa_bits = proto.mantissa_bits();
  if (mantissa_bits != 0 && (mantissa_bits < core::kMinMantissaBits ||
                             mantissa_bits > core::kMaxMantissaBits)) {
    return ContributionInvalid(
        absl::StrCat("mantissa_bits is ", mantissa_bits, ", expected 0 or ",
                     core::kMinMantissaBits, " to ", core::kMaxMantissaBits),
        "mantissa_bits");
  }
  if (proto.has_averaging_constant()) {
    const double constant = proto.averaging_constant();
    if (!(constant > 0 && constant <= 1)) {
      return ContributionInvalid(
          absl::StrCat("averaging_constant is ", constant,
                       ", expected above 0 and at most 1"),
          "averaging_constant");
    }
    checked.averaging_constant = constant;
  }
  // Most bytes that protobuf parses.
  constexpr uint64_t kMaxStateBytes = std::numeric_limits<int32_t>::max();
  if (proto.state_bytes() > kMaxStateBytes) {
    return ContributionInvalid(
        absl::StrCat("state_bytes is ", proto.state_bytes(),
                     ", expected at most ", kMaxStateBytes),
        "state_bytes");
  }
  checked.state_bytes = static_cast<int64_t>(proto.state_bytes());
  absl::StatusOr<FeatureTask> features =
      CheckFeatures(limits, proto.features(), description);
  if (!features.ok()) return core::WithField(features.status(), "features");
  if (checked.state_bytes > 0 && features->gram.has_value() &&
      features->gram->exponents.empty()) {
    return ContributionInvalid("no step_exponent, expected those of the state",
                               "features.step_exponent");
  }
  checked.features = *std::move(features);
  checked.key.source = proto.source();
  checked.key.sequence = proto.sequence();
  if (mantissa_bits != 0) {
    checked.mantissa_bits = static_cast<int>(mantissa_bits);
  }
  if (!proto.has_granularity()) {
    checked.block_size.assign(proto.block_size().begin(),
                              proto.block_size().end());
  } else if (!proto.block_size().empty()) {
    return core::WithField(
        core::BlockSizeInvalidError(
            "both block_size and granularity are given, expected one"),
        "granularity");
  } else {
    absl::StatusOr<std::vector<int64_t>> block_size = core::ResolveGranularity(
        GranularityFromProto(proto.granularity()), description.global_shape());
    if (!block_size.ok()) {
      return core::WithField(block_size.status(), "granularity");
    }
    checked.block_size = *std::move(block_size);
  }
  return checked;
}

absl::Status SetLayout(absl::Span<const int64_t> block_size,
                       CalibrateTask* task) {
  const TensorDescription& description = task->description;
  absl::StatusOr<core::BlockLayout> layout =
      CheckedLayout(description.global_shape(), block_size);
  if (!layout.ok()) return layout.status();
  task->scale_count = layout->scale_count();
  if (description.slice.has_value()) {
    absl::Status status =
        core::CheckCutsNoBlock(*description.slice, block_size);
    if (!status.ok()) return status;
    // One without elements may have no block.
    if (description.element_count == 0) block_size = {};
    layout = CheckedLayout(description.shape, block_size);
    if (!layout.ok()) return layout.status();
  }
  task->layout = std::make_shared<const core::BlockLayout>(*std::move(layout));
  return absl::OkStatus();
}

absl::Status SetContribution(const RpcEnvironment& env,
                             const v1::CalibrateHeader& header,
                             CalibrateTask* task) {
  const v1::Contribution& proto = header.contribution();
  absl::StatusOr<CheckedContribution> contribution =
      CheckContribution(env.limits, proto, task->description);
  if (!contribution.ok()) {
    return core::WithField(contribution.status(), "header.contribution");
  }
  contribution->key.tensor = task->key;
  if (absl::Status s = SetLayout(contribution->block_size, task); !s.ok()) {
    return core::WithField(s, proto.has_granularity()
                                  ? "header.contribution.granularity"
                                  : "header.contribution.block_size");
  }
  if (header.has_spec()) {
    // Checked before any data comes; the statistics decide later.
    MemoryBudget::Lease lease;
    absl::StatusOr<core::EncodingSpec> spec =
        ParseSpec(env, header.spec(), &lease);
    if (!spec.ok()) return core::WithField(spec.status(), "header.spec");
    task->spec_lease =
        std::make_shared<const MemoryBudget::Lease>(std::move(lease));
    // Their encoding has no fewer scales than that of this part. If those are
    // too many, nothing is to be counted. Parts differ only along dimensions
    // that are not split: ranges for another number of scales never fit.
    const absl::Status status =
        ResolveSpec(env, *spec, task->description.global_shape()).status();
    const absl::string_view reason = core::ErrorReason(status);
    if (reason == "SCALE_COUNT_LIMIT" || reason == "METHOD_INVALID") {
      return core::WithField(status, "header.spec");
    }
    task->spec = *std::move(spec);
  }
  if (contribution->mantissa_bits == TensorAccumulator::kDefaultMantissaBits) {
    contribution->mantissa_bits = core::DefaultMantissaBits(task->scale_count);
  }
  // One way to say per tensor, so that both go together.
  if (absl::c_all_of(contribution->block_size,
                     [](int64_t size) { return size == 0; })) {
    contribution->block_size.clear();
  }
  task->contribution = *std::move(contribution);
  return absl::OkStatus();
}

// Errors are at fields of the header.
absl::StatusOr<CalibrateTask> CheckTask(const RpcEnvironment& env,
                                        const v1::CalibrateHeader& header,
                                        const Caller& caller) {
  absl::StatusOr<TensorDescription> description =
      CheckDescription(env, header.tensor());
  if (!description.ok()) return description.status();
  CalibrateTask task;
  task.name = header.tensor().name();
  task.description = *std::move(description);
  task.stores = header.has_contribution() ||
                (header.has_spec() && task.name.ByteSizeLong() > 0);
  if (task.stores) {
    absl::StatusOr<EncodingKey> key = KeyFromProto(task.name);
    if (!key.ok()) {
      return core::WithField(key.status(), "header.tensor.name");
    }
    absl::Status status = env.authenticator->CheckWrite(caller, key->model);
    if (!status.ok()) return core::WithField(status, "header.tensor.name");
    task.key = *std::move(key);
    task.encodings = caller.encodings;
    task.statistics = caller.statistics;
  }
  if (header.has_spec()) task.told_spec = ToldSpec(header.spec());
  if (header.has_contribution()) {
    if (absl::Status s = SetContribution(env, header, &task); !s.ok()) return s;
    task.mantissa_bits = task.contribution->mantissa_bits;
  } else if (header.has_spec()) {
    if (task.description.slice.has_value()) {
      return core::WithField(
          core::ShapeInvalidError(
              "a slice with a spec, expected a contribution as well: its "
              "encoding is not that of the tensor"),
          "header.tensor.global_shape");
    }
    absl::StatusOr<ResolvedSpec> spec =
        ResolveSpec(env, header.spec(), task.description.shape);
    if (!spec.ok()) return core::WithField(spec.status(), "header.spec");
    task.mantissa_bits = MantissaBitsFor(spec->spec);
    task.spec = std::move(spec->spec);
    task.spec_lease = std::move(spec->lease);
    task.layout = std::move(spec->layout);
  } else {
    absl::Status status = SetLayout({}, &task);
    if (!status.ok()) return status;
  }
  return task;
}

// About how long one worker adds rows to a Gram matrix in such parts.
absl::Duration GramTime(int64_t element_count, int64_t part_size) {
  // Products of two codes.
  constexpr double kPerSecond = 2e10;
  return absl::Seconds(static_cast<double>(element_count) *
                       static_cast<double>(part_size) / 2 / kPerSecond);
}

class CalibrateJob final : public TensorJob {
 public:
  // `accumulator`    null where a state comes in place of elements.
  // `moments_lease`  of the moments of features.
  CalibrateJob(const RpcEnvironment& env, CalibrateTask task,
               std::unique_ptr<TensorAccumulator> accumulator,
               MemoryBudget::Lease moments_lease)
      : env_(env),
        task_(std::move(task)),
        accumulator_(std::move(accumulator)),
        moments_lease_(std::move(moments_lease)) {
    if (brings_state()) {
      frame_.end_bytes = task_.contribution->state_bytes;
      frame_.quantum_bytes = env_.limits.chunk_bytes;
      step_ = Step::kSplitState;
      if (has_gram()) {
        const GramTask& gram = *task_.contribution->features.gram;
        search_time_ =
            core::SemidefiniteCheckTime(gram.feature_count, gram.part_size);
      }
      return;
    }
    const int64_t element_bytes =
        core::ElementSizeBytes(task_.description.element_type);
    frame_.end_bytes = task_.description.element_count * element_bytes;
    frame_.unit_bytes = element_bytes;
    frame_.granule_bytes = element_bytes;
    frame_.quantum_bytes = QuantumBytes(env_, *accumulator_);
    if (task_.contribution.has_value()) step_ = Step::kContribute;
    if (const MomentsTask* moments = task_.moments(); moments != nullptr) {
      moments_ = core::AxisMoments{
          moments->axis, core::FeatureMoments(moments->features.count)};
    }
    if (has_gram()) {
      step_ = Step::kFinishGram;
      // Whole rows.
      const int64_t row_bytes =
          task_.contribution->features.gram->feature_count * element_bytes;
      frame_.granule_bytes = row_bytes;
      frame_.quantum_bytes =
          std::max<int64_t>(1, frame_.quantum_bytes / row_bytes) * row_bytes;
      // The longest time that it can take: the parts that are stored count, and
      // not those of the header. Resolve finds them.
      feed_search_time_ =
          GramTime(task_.description.element_count,
                   core::GramState::PartSize(
                       task_.contribution->features.gram->feature_count,
                       env_.limits.gram_features));
      feed_only_searches_ = false;
    }
    if (task_.spec.has_value()) {
      search_time_ = core::SearchTime(*task_.spec, task_.layout->scale_count(),
                                      task_.description.element_count);
      takes_long_ = TakesLong(*task_.spec, task_.layout->scale_count(),
                              task_.description.element_count);
    }
  }

  // The steps of a Gram matrix may be stored.
  StoreUse ResolveUse() const override {
    return has_gram() ? StoreUse::kReadStatistics : StoreUse::kNone;
  }
  absl::Status Resolve(ChunkWriter* out) override {
    if (has_gram()) {
      absl::Status status = OpenGram();
      if (!status.ok()) {
        return core::WithField(status, "header.contribution.features");
      }
    }
    if (brings_state()) receiver_.emplace(env_, ExpectedState());
    return absl::OkStatus();
  }
  StoreUse FinishUse() const override {
    switch (step_) {
      case Step::kReadStored:
        return StoreUse::kReadStatistics;
      case Step::kContribute:
        return ContributesInSteps() ? StoreUse::kLongWrite : StoreUse::kWrite;
      case Step::kPut:
        return StoreUse::kWrite;
      default:
        return StoreUse::kNone;
    }
  }
  bool FinishIsLong() const override {
    return step_ == Step::kFinishGram || step_ == Step::kSplitState ||
           step_ == Step::kReadState ||
           (step_ == Step::kCalibrate && takes_long_);
  }

  // Its messages have no such field.
  absl::Status PushScales(absl::Span<const std::string> scales) override {
    return absl::OkStatus();
  }

  absl::Status Reserve(int64_t bytes) override {
    if (step_ == Step::kSplitState || step_ == Step::kReadState) {
      return receiver_->Reserve();
    }
    // Statistics that were taken out are charged already.
    if (step_ != Step::kContribute) {
      return contributed_ ? absl::OkStatus() : accumulator_->Reserve();
    }
    if (part_.has_value()) return ReserveMerge();
    // Statistics of a slice are copied.
    return accumulator_->Reserve(task_.description.slice.has_value() ? 2 : 1);
  }

  absl::Status Feed(int64_t offset_bytes,
                    absl::Span<const uint8_t> data) override {
    if (receiver_.has_value()) {
      receiver_->Append(data);
      return absl::OkStatus();
    }
    accumulator_->Update(offset_bytes, data);
    if (moments_.has_value()) {
      const int64_t element_bytes =
          core::ElementSizeBytes(task_.description.element_type);
      moments_->moments.Update(
          task_.moments()->features, task_.description.element_type,
          offset_bytes / element_bytes,
          static_cast<int64_t>(data.size()) / element_bytes, data.data(),
          env_.pool);
    }
    if (gram_.has_value()) {
      gram_->Update(task_.description.element_type,
                    static_cast<int64_t>(data.size()) / frame_.granule_bytes,
                    data.data(), env_.pool, stop());
      if (stop().stopped()) return core::StoppedError();
    }
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Finish(ChunkWriter* out) override {
    absl::Status status;
    switch (step_) {
      case Step::kSplitState:
        status = core::WithField(receiver_->Split(), "data");
        step_ = Step::kReadState;
        break;
      case Step::kReadState:
        status = core::WithField(ReadState(), "data");
        break;
      case Step::kFinishGram:
        gram_->Finish(env_.helper_pool, stop());
        if (stop().stopped()) return core::StoppedError();
        if (gram_->has_overflowed()) {
          return core::WithField(
              core::StatisticsMismatchError(
                  "the squares of a feature add up to more than 2^62 steps "
                  "squared; contribute fewer rows at once, or begin again with "
                  "larger steps"),
              "header.contribution.features");
        }
        step_ = Step::kContribute;
        break;
      case Step::kContribute:
        status = Contribute();
        break;
      case Step::kReadStored:
        status = ReadStored();
        break;
      case Step::kCalibrate:
        status = Calibrate();
        break;
      case Step::kPut:
        status = Put();
        break;
    }
    if (!status.ok()) return status;
    if (!done_) return false;
    if (!contributed_) TakeCounts(accumulator_->statistics());
    *summary_.mutable_name() = task_.name;
    out->SetSummary(summary_);
    return true;
  }

 private:
  enum class Step {
    kSplitState,
    kReadState,
    kFinishGram,
    kContribute,
    kReadStored,
    kCalibrate,
    kPut
  };

  bool brings_state() const { return accumulator_ == nullptr; }
  bool has_gram() const {
    return task_.contribution.has_value() &&
           task_.contribution->features.gram.has_value();
  }

  bool ContributesInSteps() const {
    const absl::optional<core::GramState>& gram =
        part_.has_value() ? part_->gram : gram_;
    return gram.has_value() && TakesSteps(gram->sum_count());
  }

  // Errors: CONTRIBUTION_INVALID, STATISTICS_MISMATCH, MEMORY_BUDGET, of the
  // store.
  absl::Status OpenGram() {
    const GramTask& task = *task_.contribution->features.gram;
    absl::StatusOr<absl::optional<core::GramState::Parts>> stored =
        task_.statistics->FindGram(task_.key);
    if (!stored.ok()) return stored.status();
    if (brings_state()) return CheckStoredSteps(*stored);
    std::vector<int> exponents = task.exponents;
    int64_t part_size = task.part_size;
    if (stored->has_value()) {
      exponents = std::move((*stored)->exponents);
      part_size = (*stored)->part_size;
      if (static_cast<int64_t>(exponents.size()) != task.feature_count) {
        return core::StatisticsMismatchError(
            absl::StrCat(task.feature_count, " features, expected ",
                         exponents.size(), " as in other contributions"));
      }
    } else if (exponents.empty()) {
      return ContributionInvalid(
          "no step_exponent, expected one for each feature: no "
          "contribution has set them yet",
          "step_exponent");
    }
    // Rows that are put together from chunks, too.
    constexpr int64_t kRows = 3;
    absl::Status status = env_.budget->Grow(
        &gram_lease_,
        core::GramState::MemoryBytes(task.feature_count, part_size) +
            kRows * frame_.granule_bytes,
        "contribute to fewer tensors at once");
    if (!status.ok()) return status;
    absl::StatusOr<core::GramState> gram =
        core::GramState::Create(std::move(exponents), part_size);
    if (!gram.ok()) return gram.status();
    gram_ = *std::move(gram);
    feed_search_time_ = GramTime(task_.description.element_count, part_size);
    return absl::OkStatus();
  }

  // Before a state comes up that cannot be added.
  // Errors: STATISTICS_MISMATCH.
  absl::Status CheckStoredSteps(
      const absl::optional<core::GramState::Parts>& stored) const {
    if (!stored.has_value()) return absl::OkStatus();
    const GramTask& task = *task_.contribution->features.gram;
    constexpr absl::string_view kAnswered =
        "; GetStatistics answers the steps and parts";
    if (stored->exponents.size() != task.exponents.size() ||
        stored->part_size != task.part_size) {
      return core::StatisticsMismatchError(absl::StrCat(
          "a Gram matrix of ", task.exponents.size(), " features in parts of ",
          task.part_size, ", expected ", stored->exponents.size(), " in ",
          stored->part_size, " as in other contributions", kAnswered));
    }
    for (size_t i = 0; i < task.exponents.size(); ++i) {
      if (stored->exponents[i] != task.exponents[i]) {
        return core::StatisticsMismatchError(
            absl::StrCat("feature ", i, " has the step 2^", task.exponents[i],
                         ", expected 2^", stored->exponents[i],
                         " as in other contributions", kAnswered));
      }
    }
    return absl::OkStatus();
  }

  StateReceiver::Expected ExpectedState() const {
    const CheckedContribution& contribution = *task_.contribution;
    StateReceiver::Expected expected;
    expected.size_bytes = contribution.state_bytes;
    expected.shape = task_.description.global_shape();
    expected.slice = task_.description.slice;
    expected.block_size = contribution.block_size;
    expected.mantissa_bits = contribution.mantissa_bits;
    if (contribution.features.gram.has_value()) {
      expected.gram.emplace();
      expected.gram->exponents = contribution.features.gram->exponents;
      expected.gram->part_size = contribution.features.gram->part_size;
    }
    if (const MomentsTask* moments = task_.moments(); moments != nullptr) {
      expected.moments_axis = moments->axis;
      expected.moments_feature_count = moments->global_count;
    }
    return expected;
  }

  absl::Status ReadState() {
    absl::StatusOr<core::StatisticsState> state = receiver_->Read(stop());
    if (!state.ok()) return state.status();
    SetPart(*std::move(state));
    step_ = Step::kContribute;
    return absl::OkStatus();
  }

  // From here on `part` is what is contributed.
  void SetPart(core::StatisticsState part) {
    part_ = std::move(part);
    contributed_ = true;
    TakeCounts(part_->statistics);
    if (part_->gram.has_value()) {
      v1::GramResult* const result =
          summary_.mutable_contribution()->mutable_gram();
      result->set_rows(static_cast<uint64_t>(part_->gram->rows()));
      result->set_left_out_rows(
          static_cast<uint64_t>(part_->gram->left_out_rows()));
      result->set_clipped_count(static_cast<uint64_t>(part_->gram->clipped()));
      result->set_part_size(static_cast<uint64_t>(part_->gram->part_size()));
    }
    if (part_->moments.has_value()) {
      TellMoments(part_->moments->moments,
                  summary_.mutable_contribution()->mutable_moments());
    }
  }

  void TakeCounts(const core::TensorStatistics& statistics) {
    StatisticsToProto(statistics, summary_.mutable_statistics());
    const core::ElementCounts& counts = statistics.counts();
    env_.metrics->Elements(Rpc::kCalibrate, nullptr, counts.total);
    env_.metrics->NonFinite(counts.nan + counts.positive_infinity +
                            counts.negative_infinity);
  }

  static void TellMoments(const core::FeatureMoments& moments,
                          v1::MomentsResult* result) {
    int64_t count = 0;
    int64_t left_out = 0;
    for (int64_t i = 0; i < moments.feature_count(); ++i) {
      count += moments.count(i);
      left_out += moments.left_out(i);
    }
    result->set_feature_count(static_cast<uint64_t>(moments.feature_count()));
    result->set_count(static_cast<uint64_t>(count));
    result->set_left_out(static_cast<uint64_t>(left_out));
  }

  // At the scale indices of the whole tensor.
  core::TensorStatistics WholeStatistics() {
    core::TensorStatistics statistics = accumulator_->Take();
    const core::TensorSlice* const slice = task_.description.slice_or_null();
    if (slice == nullptr) return statistics;
    core::TensorStatistics whole = statistics.Outline(task_.scale_count);
    if (task_.description.element_count == 0) return whole;
    int64_t from = 0;
    const core::TensorSlice blocks =
        core::BlocksOf(*slice, task_.contribution->block_size);
    blocks.ForEachRange(
        0, statistics.scale_count(), [&](int64_t first, int64_t count) {
          for (int64_t i = 0; i < count; ++i) {
            whole.MergeScaleIndex(statistics, from++, first + i);
          }
        });
    return whole;
  }

  // Moments of all features of the tensor.
  absl::optional<core::AxisMoments> WholeMoments() {
    const MomentsTask* const task = task_.moments();
    if (task == nullptr || task->features.count == task->global_count) {
      return std::move(moments_);
    }
    core::AxisMoments whole{task->axis,
                            core::FeatureMoments(task->global_count)};
    whole.moments.Merge(moments_->moments, task->first);
    return whole;
  }

  absl::Status ReserveMerge() {
    return env_.budget->Grow(&merge_lease_, merge_bytes_,
                             "send it again, which counts it once");
  }

  absl::Status Contribute() {
    const CheckedContribution& contribution = *task_.contribution;
    if (!part_.has_value()) {
      SetPart({contribution.block_size, task_.description.global_shape(),
               WholeStatistics(), std::move(gram_), WholeMoments()});
    }
    bool is_refused = false;
    absl::StatusOr<ContributionOutcome> outcome = task_.statistics->Merge(
        contribution.key, *part_, contribution.averaging_constant,
        [&](int64_t memory_bytes) -> absl::Status {
          if (stop().stopped()) return core::StoppedError();
          merge_bytes_ = memory_bytes;
          absl::Status status = ReserveMerge();
          is_refused = !status.ok();
          return status;
        });
    // Reserve waits for it, and then this is tried again.
    if (is_refused &&
        core::ErrorRetryAfter(outcome.status()) > absl::ZeroDuration()) {
      return absl::OkStatus();
    }
    merge_lease_.Release();
    part_.reset();
    gram_lease_.Release();
    moments_lease_.Release();
    if (receiver_.has_value()) receiver_->Release();
    if (!outcome.ok()) {
      // Neither an unavailable store nor a corrupt row is the request's fault.
      const bool at_fault = absl::IsFailedPrecondition(outcome.status()) ||
                            absl::IsResourceExhausted(outcome.status());
      return at_fault ? core::WithField(outcome.status(), "header.contribution")
                      : outcome.status();
    }
    summary_.mutable_contribution()->set_sequence(outcome->sequence);
    summary_.mutable_contribution()->set_duplicate(outcome->duplicate);
    done_ = !task_.spec.has_value();
    step_ = Step::kReadStored;
    return absl::OkStatus();
  }

  absl::Status ReadStored() {
    const auto charge = [this](int64_t memory_bytes) {
      return stop().stopped()
                 ? core::StoppedError()
                 : env_.budget->Grow(&stored_lease_, memory_bytes,
                                     "send it again, which counts it "
                                     "once, or compute the encoding "
                                     "later");
    };
    absl::StatusOr<StoredStatistics> stored = task_.statistics->ReadStatistics(
        task_.key, /*with_moments=*/false, charge);
    if (!stored.ok()) return stored.status();
    absl::Status status =
        charge(kCalibrationCopies * stored->state.statistics.memory_bytes());
    if (!status.ok()) return status;
    stored_ = *std::move(stored);
    const core::TensorStatistics& statistics = stored_.state.statistics;
    takes_long_ = TakesLong(*task_.spec, statistics.scale_count(),
                            statistics.counts().total);
    step_ = Step::kCalibrate;
    return absl::OkStatus();
  }

  absl::Status Calibrate() {
    if (!task_.spec.has_value()) {
      done_ = true;
      return absl::OkStatus();
    }
    core::ThreadPool* const pool = takes_long_ ? env_.helper_pool : nullptr;
    absl::StatusOr<CalibratedEncoding> calibrated =
        contributed_
            ? StoredCalibrator(env_, stored_)
                  .Calibrate(*task_.spec, ScaleTransport::kOneMessage, pool,
                             stop())
            : CalibrateTensor(env_, {*task_.spec, task_.layout},
                              accumulator_->statistics(), {}, pool, stop());
    if (!calibrated.ok()) {
      return contributed_ ? core::WithField(calibrated.status(), "header.spec")
                          : calibrated.status();
    }
    encoding_ = std::move(calibrated->resolved.encoding);
    if (calibrated->prediction.has_value()) {
      PredictionToProto(*calibrated->prediction, summary_.mutable_prediction());
    }
    const v1::Prediction* const prediction =
        summary_.has_prediction() ? &summary_.prediction() : nullptr;
    put_ = contributed_
               ? MadeOfStatistics(env_, task_.told_spec, stored_, prediction)
               : MadeOfElements(env_, task_.told_spec, prediction);
    step_ = Step::kPut;
    return absl::OkStatus();
  }

  absl::Status Put() {
    done_ = true;
    if (!task_.stores) {
      EncodingToProto(*encoding_,
                      summary_.mutable_stored_encoding()->mutable_encoding());
      return absl::OkStatus();
    }
    absl::StatusOr<StoredEncoding> stored =
        task_.encodings->Put(task_.key, std::move(encoding_), put_);
    if (!stored.ok()) return stored.status();
    StoredEncodingToProto(task_.key, *stored, /*with_encoding=*/true,
                          summary_.mutable_stored_encoding());
    return absl::OkStatus();
  }

  const RpcEnvironment& env_;
  const CalibrateTask task_;
  const std::unique_ptr<TensorAccumulator> accumulator_;
  // Receiver of the state that comes in place of elements.
  absl::optional<StateReceiver> receiver_;
  Step step_ = Step::kCalibrate;
  bool done_ = false;
  // The statistics were handed to the store.
  bool contributed_ = false;
  // To calibrate may take more than kShortWork.
  bool takes_long_ = false;
  v1::CalibrateSummary summary_;
  // Statistics that are contributed, and the memory that merging them takes,
  // once that is known.
  absl::optional<core::StatisticsState> part_;
  absl::optional<core::GramState> gram_;
  MemoryBudget::Lease gram_lease_;
  absl::optional<core::AxisMoments> moments_;
  MemoryBudget::Lease moments_lease_;
  int64_t merge_bytes_ = 0;
  MemoryBudget::Lease merge_lease_;
  // Statistics of all contributions, with a spec.
  StoredStatistics stored_;
  MemoryBudget::Lease stored_lease_;
  std::shared_ptr<const core::Encoding> encoding_;
  // Precondition and provenance for storing encoding_.
  Precondition put_;
};

class CalibrateRpc final : public TensorRpc {
 public:
  explicit CalibrateRpc(const RpcEnvironment& env) : env_(env) {}

  Rpc id() const override { return Rpc::kCalibrate; }

  absl::StatusOr<std::unique_ptr<TensorJob>> Check(
      const std::string& bytes, const Caller& caller) override {
    absl::StatusOr<ParsedHeader<v1::CalibrateHeader>> parsed =
        ParseHeader<v1::CalibrateHeader>(env_, bytes);
    if (!parsed.ok()) return parsed.status();
    const v1::CalibrateHeader& header = parsed->header;
    absl::StatusOr<CalibrateTask> task = CheckTask(env_, header, caller);
    if (!task.ok()) return task.status();
    if (task->contribution.has_value() && task->contribution->state_bytes > 0) {
      return std::make_unique<CalibrateJob>(env_, *std::move(task),
                                            /*accumulator=*/nullptr,
                                            MemoryBudget::Lease());
    }
    absl::StatusOr<std::unique_ptr<TensorAccumulator>> accumulator =
        TensorAccumulator::Create(env_, task->description.element_type,
                                  task->layout, task->mantissa_bits,
                                  task->WholeStatisticsBytes());
    if (!accumulator.ok()) return accumulator.status();
    MemoryBudget::Lease moments_lease;
    if (const MomentsTask* moments = task->moments(); moments != nullptr) {
      absl::Status status = env_.budget->Grow(
          &moments_lease,
          core::FeatureMoments::MemoryBytes(moments->features.count) +
              (moments->features.count == moments->global_count
                   ? 0
                   : core::FeatureMoments::MemoryBytes(moments->global_count)),
          "contribute to fewer tensors at once");
      if (!status.ok()) return status;
    }
    return std::make_unique<CalibrateJob>(env_, *std::move(task),
                                          *std::move(accumulator),
                                          std::move(moments_lease));
  }

 private:
  const RpcEnvironment& env_;
};

}  // namespace

std::unique_ptr<TensorRpc> MakeCalibrateRpc(const RpcEnvironment& env) {
  return std::make_unique<CalibrateRpc>(env);
}

}  // namespace quantd::server
