#include "client/cli/input_options.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/jobs/importance.h"
#include "client/jobs/stored_inputs.h"
#include "client/models/text.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::cli {

Option* AddInputsOptions(Command* command, const char* help,
                         jobs::InputsOptions* inputs) {
  Option* const option =
      command->AddOption("--inputs", &inputs->text, "MODEL[@REVISION]", help);
  command->AddOption("--inputs-map", &inputs->map, "FILE",
                     "JSON object that says of weights under which name their "
                     "inputs are");
  return option;
}

Option* AddImportanceOption(Command* command, std::string* file) {
  return command->AddOption(
      "--importance", file, "FILE",
      "Importance matrix of llama.cpp (imatrix.gguf or .dat): errors in a "
      "column of a weight count as the mean square of its inputs. For specs "
      "with mse, sqnr or best-of, and for q4_K and other types of GGUF. "
      "Tensors that are not in it, by their own name or by llama.cpp's, go "
      "without, and are told");
}

void ReportMissingImportance(const std::string& file,
                             const jobs::FoundImportance& found, bool is_named,
                             Session* session) {
  if (!found.missing.empty()) {
    session->PrintError(absl::StrCat(
        "quantctl: ",
        jobs::MissingImportanceText("measured", file, found.missing)));
    if (is_named) session->Note(kServerError);
  }
  if (!found.untaken.empty()) {
    session->PrintError(absl::StrCat(
        "quantctl: ", jobs::UntakenImportanceText("measured", found.untaken)));
  }
}

absl::StatusOr<std::map<std::string, v1::TensorName>> FindOutputInputs(
    const jobs::InputsOptions& options,
    const std::vector<const files::FileTensor*>& tensors, bool is_needed,
    bool is_named, Client* client, Session* session) {
  std::map<std::string, v1::TensorName> inputs;
  if (!options.IsGiven()) return inputs;
  const absl::StatusOr<jobs::StoredInputs> stored = jobs::StoredInputs::Read(
      options, jobs::StoredInputs::Need::kGram, client);
  if (!stored.ok()) return stored.status();
  std::vector<std::string> without;
  for (const files::FileTensor* const tensor : tensors) {
    v1::TensorName name;
    name.set_model(options.model);
    name.set_revision(options.revision);
    name.set_tensor(stored->Of(tensor->name));
    if (name.tensor().empty()) {
      without.push_back(tensor->name);
    } else {
      inputs[tensor->name] = std::move(name);
    }
  }
  if (inputs.empty() && is_needed) {
    return jobs::NoInputsError(options, jobs::StoredInputs::Need::kGram);
  }
  if (!without.empty()) {
    session->PrintError(absl::StrCat(
        "quantctl: without the error at the output of the layer, as no Gram "
        "matrix of their inputs is stored: ",
        NamesText(without)));
    if (is_needed && is_named) session->Note(kServerError);
  }
  return inputs;
}

Json OutputNoiseJson(const v1::OutputNoise& noise) {
  return {{"noise_to_signal", noise.noise_to_signal()},
          {"sqnr_db", jobs::OutputSqnrDb(noise)},
          {"source", "gram"},
          {"clipped_input_count", noise.clipped_input_count()}};
}

}  // namespace quantd::cli
