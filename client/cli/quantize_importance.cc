#include "client/cli/quantize_importance.h"

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/llama_names.h"
#include "client/cli/printable.h"
#include "client/cli/quantize_outcome.h"
#include "client/cli/session.h"
#include "client/cpp/errors.h"
#include "client/cpp/tensor.h"
#include "client/files/imatrix.h"
#include "client/files/safetensors.h"

namespace quantd::cli {
namespace {

bool Searches(const EncodingSpec& spec) {
  return spec.method() == v1::CALIBRATION_METHOD_MSE ||
         spec.method() == v1::CALIBRATION_METHOD_SQNR ||
         spec.method() == v1::CALIBRATION_METHOD_BEST_OF;
}

// By its own name, or by llama.cpp's; null where there is none.
const files::InputSquares* Find(const files::Imatrix& imatrix,
                                const std::string& tensor) {
  auto found = imatrix.find(tensor);
  if (found == imatrix.end()) found = imatrix.find(LlamaName(tensor));
  return found == imatrix.end() ? nullptr : &found->second;
}

// Errors: ARGUMENT_INVALID.
absl::Status CheckTakes(const files::FileTensor& tensor,
                        const EncodingSpec& spec, int64_t columns) {
  const int64_t expected = tensor.shape.empty() ? 1 : tensor.shape.back();
  if (columns != expected) {
    return ArgumentInvalidError(
        absl::StrCat("expected importance for the ", expected, " columns of ",
                     tensor.name, ", got that of ", columns));
  }
  if (spec.has_importance()) {
    return ArgumentInvalidError(
        absl::StrCat("expected --importance or a spec with importance for ",
                     tensor.name, ", got both"));
  }
  if (!Searches(spec)) {
    return ArgumentInvalidError(absl::StrCat(
        "expected mse, sqnr or best-of in the spec of ", tensor.name,
        ": --importance says how much errors count in a search"));
  }
  return absl::OkStatus();
}

}  // namespace

void AddImportanceOption(Command* command, QuantizeOptions* options) {
  command->AddOption(
      "--importance", &options->importance, "FILE",
      "Importance matrix of llama.cpp (imatrix.gguf or .dat): errors in a "
      "column of a weight count as the mean square of its inputs. Specs need "
      "mse, sqnr or best-of. Tensors that are not in it, by their own name or "
      "by llama.cpp's, are quantized without, and are told");
}

absl::Status FindImportance(
    const QuantizeOptions& options,
    absl::FunctionRef<bool(const std::string& tensor)> is_named,
    QuantizePlan* plan) {
  if (options.importance.empty()) return absl::OkStatus();
  const absl::StatusOr<files::Imatrix> imatrix =
      files::ReadImatrix(options.importance);
  if (!imatrix.ok()) return imatrix.status();
  for (const std::unique_ptr<Shard>& shard : plan->shards) {
    for (const files::FileTensor* const tensor : shard->selected) {
      const files::InputSquares* const squares = Find(*imatrix, tensor->name);
      if (squares == nullptr) {
        (is_named(tensor->name) ? plan->named_unweighted : plan->unweighted)
            .push_back(tensor->name);
        continue;
      }
      absl::Status status =
          CheckTakes(*tensor, plan->SpecOf(*tensor), squares->columns);
      if (!status.ok()) return status;
      plan->importance[tensor->name] = squares->MeanSquares();
    }
  }
  if (!plan->importance.empty()) return absl::OkStatus();
  return ArgumentInvalidError(
      absl::StrCat("expected weights to quantize in ", options.importance,
                   ", got none of them; it has ",
                   Printable(imatrix->begin()->first), " and the like"));
}

}  // namespace quantd::cli
