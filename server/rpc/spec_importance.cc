#include "server/rpc/spec_importance.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/calibrate/importance.h"
#include "core/errors.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/statistics_state.h"
#include "server/rpc/layer_inputs.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr int64_t kMaxWeights = int64_t{1} << 16;
constexpr char kWayOutOfImportance[] = "send fewer tensors at once";

// The tensor that an importance names, or by default the inputs of the layer
// that has the weight.
absl::StatusOr<EncodingKey> InputsOf(const v1::Importance& proto,
                                     const v1::TensorName& tensor) {
  v1::TensorName inputs = WithDefaults(proto.inputs(), tensor);
  if (inputs.tensor().empty()) {
    constexpr absl::string_view kWeight = ".weight";
    if (!absl::EndsWith(tensor.tensor(), kWeight)) {
      return core::MethodInvalidError(absl::StrCat(
          "importance without inputs for tensor \"", ShownName(tensor.tensor()),
          "\", expected inputs or weights, or a tensor MODULE.weight, whose "
          "inputs are MODULE.input"));
    }
    inputs.set_tensor(absl::StrCat(
        tensor.tensor().substr(0, tensor.tensor().size() - kWeight.size()),
        ".input"));
  }
  return KeyFromProto(inputs);
}

// The mean square of each feature; 0 where there is no element.
std::vector<double> MeanSquares(const core::FeatureMoments& moments) {
  std::vector<double> means;
  means.reserve(static_cast<size_t>(moments.feature_count()));
  for (int64_t i = 0; i < moments.feature_count(); ++i) {
    const auto count = static_cast<double>(moments.count(i));
    means.push_back(count == 0 ? 0 : moments.square_sum(i) / count);
  }
  return means;
}

// The mean square of each feature but for a factor, from the diagonal.
std::vector<double> MeanSquares(const core::GramState& gram) {
  std::vector<double> means;
  means.reserve(static_cast<size_t>(gram.feature_count()));
  for (int64_t i = 0; i < gram.feature_count(); ++i) {
    means.push_back(std::ldexp(static_cast<double>(gram.code_sum(i, i)),
                               2 * gram.exponents()[i]));
  }
  return means;
}

// Errors: METHOD_INVALID.
absl::Status CheckCount(int64_t count) {
  if (count <= kMaxWeights) return absl::OkStatus();
  return core::MethodInvalidError(absl::StrCat(
      "importance of ", count, " weights, expected at most ", kMaxWeights));
}

// The weights of the slice, taken from those of a row of the whole.
std::vector<double> CutRow(const core::TensorSlice& slice,
                           absl::Span<const double> weights) {
  std::vector<double> cut;
  const auto row = static_cast<int64_t>(weights.size());
  slice.ForEachRange(0, core::Importance::RowSize(slice.shape),
                     [&](int64_t first, int64_t count) {
                       const auto* const from = &weights[first % row];
                       cut.insert(cut.end(), from, from + count);
                     });
  return cut;
}

// The importance of the tensor, from the weights of the whole.
// Errors: METHOD_INVALID.
absl::StatusOr<core::Importance> OfSlice(const TensorDescription& description,
                                         int64_t dimension,
                                         absl::Span<const double> weights) {
  if (!description.slice.has_value()) {
    return core::Importance::Create(description.shape, dimension, weights);
  }
  const core::TensorSlice& slice = *description.slice;
  absl::StatusOr<core::Importance> whole =
      core::Importance::Create(slice.global_shape, dimension, weights);
  if (!whole.ok()) return whole;
  const auto at = static_cast<size_t>(dimension);
  const bool is_row =
      static_cast<int64_t>(weights.size()) != slice.global_shape[at];
  return core::Importance::Create(
      slice.shape, dimension,
      is_row ? absl::MakeConstSpan(CutRow(slice, weights))
             : weights.subspan(static_cast<size_t>(slice.offset[at]),
                               static_cast<size_t>(slice.shape[at])));
}

// Errors: STATISTICS_INCOMPLETE where a feature has no element and others do.
absl::Status CheckComplete(const core::FeatureMoments& moments) {
  int64_t missing = -1;
  bool has_some = false;
  for (int64_t i = 0; i < moments.feature_count(); ++i) {
    if (moments.count(i) + moments.left_out(i) > 0) {
      has_some = true;
    } else if (missing < 0) {
      missing = i;
    }
  }
  if (missing < 0 || !has_some) return absl::OkStatus();
  return core::StatisticsIncompleteError(absl::StrCat(
      "the moments have no element of feature ", missing, " of ",
      moments.feature_count(), ", expected all slices of the tensor"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<SpecImportance>> SpecImportance::Create(
    const RpcEnvironment& env, const Caller& caller,
    const v1::Importance& proto, const v1::TensorName& tensor,
    const core::EncodingSpec& spec, const core::BlockLayout& layout,
    const TensorDescription& description) {
  absl::Status status = core::CheckTakesImportance(spec, layout);
  if (!status.ok()) return status;
  const int64_t axis = proto.has_axis() ? proto.axis() : -1;
  const auto rank = static_cast<int64_t>(description.shape.size());
  if (axis < -rank || axis >= rank) {
    return core::WithField(core::MethodInvalidError(absl::StrCat(
                               "the axis of the importance is ", axis,
                               ", expected one of a tensor of rank ", rank)),
                           "axis");
  }
  const int64_t dimension = axis < 0 ? axis + rank : axis;
  const int64_t count = description.global_shape()[dimension];
  const bool is_inline = !proto.weight().empty();
  if (is_inline && proto.has_inputs()) {
    return core::WithField(
        core::MethodInvalidError("both inputs and weights, expected one"),
        "weight");
  }
  status = CheckCount(std::max<int64_t>(count, proto.weight_size()));
  if (!status.ok()) return status;
  // Weights that are read take room beside those that are there. A row may have
  // more than the dimension.
  constexpr int64_t kCopies = 2;
  const int64_t most = std::min(
      kMaxWeights,
      std::max(count, core::Importance::RowSize(description.global_shape())));
  MemoryBudget::Lease lease;
  status = env.budget->Grow(
      &lease, kCopies * most * static_cast<int64_t>(sizeof(double)),
      kWayOutOfImportance);
  if (!status.ok()) return status;
  const std::vector<double> weights =
      is_inline
          ? std::vector<double>(proto.weight().begin(), proto.weight().end())
          : std::vector<double>(static_cast<size_t>(count), 1);
  absl::StatusOr<core::Importance> importance =
      OfSlice(description, dimension, weights);
  if (!importance.ok()) return core::WithField(importance.status(), "weight");
  std::shared_ptr<SpecImportance> created(new SpecImportance(
      *std::move(importance), description, dimension, std::move(lease)));
  if (!is_inline) {
    absl::StatusOr<EncodingKey> inputs = InputsOf(proto, tensor);
    if (!inputs.ok()) return core::WithField(inputs.status(), "inputs");
    created->inputs_ = *std::move(inputs);
    created->statistics_ = caller.statistics;
  }
  return created;
}

absl::Status SpecImportance::Read(const RpcEnvironment& env,
                                  core::StopToken stop) {
  if (!inputs_.has_value()) return absl::OkStatus();
  const absl::StatusOr<std::vector<double>> weights = ReadWeights(env, stop);
  if (!weights.ok()) return core::WithField(weights.status(), "inputs");
  absl::StatusOr<core::Importance> importance =
      OfSlice(description_, axis_, *weights);
  if (!importance.ok()) return core::WithField(importance.status(), "inputs");
  importance_ = *std::move(importance);
  inputs_.reset();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> SpecImportance::ReadWeights(
    const RpcEnvironment& env, core::StopToken stop) const {
  MemoryBudget::Lease lease;
  const auto charge = [&](int64_t bytes) -> absl::Status {
    if (stop.stopped()) return core::StoppedError();
    return env.budget->Grow(&lease, bytes, kWayOutOfImportance);
  };
  const absl::StatusOr<StoredMoments> stored =
      statistics_->ReadMoments(*inputs_, charge);
  if (!stored.ok()) return stored.status();
  if (stored->moments.has_value()) {
    const core::FeatureMoments& moments = stored->moments->moments;
    absl::Status status = CheckComplete(moments);
    if (!status.ok()) return status;
    return MeanSquares(moments);
  }
  const absl::StatusOr<absl::optional<core::GramState>> gram =
      statistics_->ReadGram(*inputs_, charge);
  if (!gram.ok()) return gram.status();
  if (gram->has_value()) {
    // Moments have no more features than that.
    absl::Status status = CheckCount((*gram)->feature_count());
    if (!status.ok()) return status;
    return MeanSquares(**gram);
  }
  return core::MethodInvalidError(absl::StrCat(
      "the statistics of \"", ShownName(inputs_->tensor),
      "\" have neither moments nor a Gram matrix, expected contributions with "
      "features.moments"));
}

}  // namespace quantd::server
