#include "client/jobs/quantize_rounding.h"

#include <cmath>
#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cpp/errors.h"
#include "client/files/safetensors.h"
#include "client/jobs/importance.h"
#include "client/jobs/quantize_outcome.h"
#include "client/jobs/stored_inputs.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::jobs {
namespace {

v1::ColumnOrder ColumnOrderOf(absl::string_view text) {
  v1::ColumnOrder order = v1::COLUMN_ORDER_UNSPECIFIED;
  v1::ColumnOrder_Parse(
      absl::StrCat("COLUMN_ORDER_", absl::AsciiStrToUpper(text)), &order);
  return order;
}

v1::Rounding MakeRounding(const QuantizeOptions& all,
                          const std::string& inputs) {
  const RoundingOptions& options = all.rounding;
  v1::Rounding rounding;
  rounding.set_method(v1::ROUNDING_METHOD_COMPENSATED);
  rounding.mutable_inputs()->set_model(all.inputs.model);
  rounding.mutable_inputs()->set_revision(all.inputs.revision);
  rounding.mutable_inputs()->set_tensor(inputs);
  if (options.damping.has_value()) rounding.set_damping(*options.damping);
  rounding.set_column_order(ColumnOrderOf(options.column_order));
  rounding.set_measure_output(true);
  return rounding;
}

}  // namespace

bool NeedsInputs(const QuantizeOptions& options, const SpecSet& specs) {
  return options.rounding.IsCompensated() || HasImportance(specs);
}

absl::Status CheckRounding(const QuantizeOptions& options,
                           const SpecSet& specs) {
  const RoundingOptions& rounding = options.rounding;
  if (options.inputs.IsGiven() && !NeedsInputs(options, specs)) {
    return ArgumentInvalidError(
        "expected --inputs and --inputs-map with --rounding compensated or a "
        "spec with importance");
  }
  if (!rounding.IsCompensated()) {
    if (!rounding.damping.has_value() && rounding.column_order.empty()) {
      return absl::OkStatus();
    }
    return ArgumentInvalidError(
        "expected --damping and --column-order with --rounding compensated");
  }
  if (rounding.damping.has_value() &&
      !(*rounding.damping >= 0 && std::isfinite(*rounding.damping))) {
    return ArgumentInvalidError("expected --damping of at least 0");
  }
  if (options.evaluate) {
    return ArgumentInvalidError(
        "expected --rounding compensated without --evaluate, which measures "
        "rounding to the nearest; `quantctl dequantize` and `quantctl evaluate "
        "--reference` measure the output");
  }
  if (options.inputs.model.empty()) {
    return ArgumentInvalidError(
        "expected --inputs or --model with --rounding compensated: where the "
        "Gram matrices are");
  }
  return absl::OkStatus();
}

absl::Status FindRoundings(
    const QuantizeOptions& options, Client* client,
    absl::FunctionRef<bool(const std::string& tensor)> is_named,
    QuantizePlan* plan) {
  if (!options.rounding.IsCompensated()) return absl::OkStatus();
  const absl::StatusOr<StoredInputs> stored =
      StoredInputs::Read(options.inputs, StoredInputs::Need::kGram, client);
  if (!stored.ok()) return stored.status();
  for (const std::unique_ptr<Shard>& shard : plan->shards) {
    for (const files::FileTensor* const tensor : shard->selected) {
      const std::string inputs = stored->Of(tensor->name);
      if (!inputs.empty()) {
        plan->roundings[tensor->name] = {MakeRounding(options, inputs),
                                         stored->StateOf(inputs)};
      } else if (is_named(tensor->name)) {
        plan->named_nearest.push_back(tensor->name);
      } else {
        plan->nearest.push_back(tensor->name);
      }
    }
  }
  if (!plan->roundings.empty()) return absl::OkStatus();
  return NoInputsError(options.inputs, StoredInputs::Need::kGram);
}

}  // namespace quantd::jobs
