#include "client/jobs/importance.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/errors.h"
#include "client/files/imatrix.h"
#include "client/models/llama_names.h"
#include "client/models/text.h"

namespace quantd::jobs {
namespace {

using Specs = std::vector<const SpecTemplate*>;

// By its own name, or by llama.cpp's; null where there is none.
const files::InputSquares* FindSquares(const files::Imatrix& imatrix,
                                       const std::string& tensor) {
  auto found = imatrix.find(tensor);
  if (found == imatrix.end()) found = imatrix.find(LlamaName(tensor));
  return found == imatrix.end() ? nullptr : &found->second;
}

bool AnyHasImportance(const Specs& specs) {
  return std::any_of(specs.begin(), specs.end(), [](const SpecTemplate* spec) {
    return spec->spec.has_importance();
  });
}

bool AnyNeedsInputs(const Specs& specs) {
  return std::any_of(specs.begin(), specs.end(), [](const SpecTemplate* spec) {
    return NeedsInputs(spec->spec);
  });
}

// Blocks of GGUF are always searched.
bool TakesImportance(const Specs& specs) {
  return std::any_of(specs.begin(), specs.end(), [](const SpecTemplate* spec) {
    return !spec->gguf_type.empty() || SearchesErrors(spec->spec);
  });
}

// Errors: ARGUMENT_INVALID.
absl::Status CheckColumns(const files::FileTensor& tensor, int64_t columns) {
  const int64_t expected = tensor.shape.empty() ? 1 : tensor.shape.back();
  if (columns != expected) {
    return ArgumentInvalidError(
        absl::StrCat("expected importance for the ", expected, " columns of ",
                     tensor.name, ", got that of ", columns));
  }
  return absl::OkStatus();
}

absl::StatusOr<FoundImportance> FindInFile(
    const std::string& file,
    const std::vector<const files::FileTensor*>& tensors,
    SpecsOfTensor specs_of) {
  const absl::StatusOr<files::Imatrix> imatrix = files::ReadImatrix(file);
  if (!imatrix.ok()) return imatrix.status();
  FoundImportance found;
  for (const files::FileTensor* const tensor : tensors) {
    const Specs specs = specs_of(*tensor);
    if (AnyHasImportance(specs)) {
      return ArgumentInvalidError(
          absl::StrCat("expected --importance or a spec with importance for ",
                       tensor->name, ", got both"));
    }
    if (!TakesImportance(specs)) {
      found.untaken.push_back(tensor->name);
      continue;
    }
    const files::InputSquares* const squares =
        FindSquares(*imatrix, tensor->name);
    if (squares == nullptr) {
      found.missing.push_back(tensor->name);
      continue;
    }
    const absl::Status status = CheckColumns(*tensor, squares->columns);
    if (!status.ok()) return status;
    found.importance.SetWeights(tensor->name, squares->MeanSquares());
  }
  const size_t without = found.missing.size() + found.untaken.size();
  if (without < tensors.size() || tensors.empty()) return found;
  if (!found.missing.empty()) {
    return ArgumentInvalidError(absl::StrCat(
        "expected weights to quantize in ", file, ", got none of them; it has ",
        imatrix->begin()->first, " and the like"));
  }
  return ArgumentInvalidError(absl::StrCat(
      "expected mse, sqnr or best-of in the spec of ", found.untaken[0],
      ": --importance says how much errors count in a search"));
}

absl::StatusOr<FoundImportance> FindStored(
    const InputsOptions& inputs,
    const std::vector<const files::FileTensor*>& tensors,
    SpecsOfTensor specs_of, Client* client) {
  FoundImportance found;
  std::vector<const files::FileTensor*> wanted;
  for (const files::FileTensor* const tensor : tensors) {
    if (AnyNeedsInputs(specs_of(*tensor))) wanted.push_back(tensor);
  }
  if (wanted.empty()) return found;
  if (inputs.model.empty()) {
    return ArgumentInvalidError(
        "expected --inputs, or --model of quantize and evaluate, with a spec "
        "with importance: where the moments of inputs are");
  }
  const absl::StatusOr<StoredInputs> stored =
      StoredInputs::Read(inputs, StoredInputs::Need::kMoments, client);
  if (!stored.ok()) return stored.status();
  found.importance.SetSource(inputs.model, inputs.revision);
  for (const files::FileTensor* const tensor : wanted) {
    const std::string own = stored->Of(tensor->name);
    if (!own.empty()) found.importance.SetInputs(tensor->name, own);
    bool has_some = false;
    for (const SpecTemplate* const spec : specs_of(*tensor)) {
      if (!NeedsInputs(spec->spec)) continue;
      const std::string& named = spec->spec.importance().inputs().tensor();
      const std::string& name = named.empty() ? own : named;
      if (name.empty()) continue;
      has_some = true;
      found.states[tensor->name] =
          absl::StrCat(name, " ", stored->StateOf(name));
    }
    if (!has_some) found.missing.push_back(tensor->name);
  }
  if (found.missing.size() == wanted.size()) {
    return NoInputsError(inputs, StoredInputs::Need::kMoments);
  }
  return found;
}

}  // namespace

bool HasImportance(const SpecSet& specs) {
  return (specs.has_base && NeedsInputs(specs.base.spec)) ||
         std::any_of(specs.overrides.begin(), specs.overrides.end(),
                     [](const SpecSet::Override& entry) {
                       return NeedsInputs(entry.spec.spec);
                     });
}

absl::StatusOr<FoundImportance> FindImportance(
    const std::string& file, const InputsOptions& inputs,
    const std::vector<const files::FileTensor*>& tensors,
    SpecsOfTensor specs_of, Client* client) {
  return file.empty() ? FindStored(inputs, tensors, specs_of, client)
                      : FindInFile(file, tensors, specs_of);
}

std::string MissingImportanceText(const std::string& what,
                                  const std::string& file,
                                  const std::vector<std::string>& missing) {
  return absl::StrCat(
      what, " without importance, as ",
      file.empty() ? "no moments or Gram matrix of their inputs are stored"
                   : absl::StrCat(file, " does not have them"),
      ": ", NamesText(missing));
}

std::string UntakenImportanceText(const std::string& what,
                                  const std::vector<std::string>& untaken) {
  return absl::StrCat(what,
                      " without importance, as their specs compare no errors "
                      "(mse, sqnr, best-of): ",
                      NamesText(untaken));
}

}  // namespace quantd::jobs
