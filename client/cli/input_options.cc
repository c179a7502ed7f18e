#include "client/cli/input_options.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/jobs/importance.h"
#include "client/jobs/stored_inputs.h"
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

Json OutputNoiseJson(const v1::OutputNoise& noise) {
  return {{"noise_to_signal", noise.noise_to_signal()},
          {"sqnr_db", jobs::OutputSqnrDb(noise)},
          {"source", "gram"},
          {"clipped_input_count", noise.clipped_input_count()}};
}

}  // namespace quantd::cli
