// Options that say which tensors a command takes, and what they become.

#ifndef QUANTD_CLIENT_CLI_TENSOR_OPTIONS_H_
#define QUANTD_CLIENT_CLI_TENSOR_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/cpp/tensor.h"
#include "client/files/safetensors.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"

namespace quantd::cli {

// --include, --exclude, --min-rank, --all.
struct TensorFilter {
  std::vector<std::string> include;
  std::vector<std::string> exclude;
  int64_t min_rank = 2;
  bool all = false;

  void AddOptions(Command* command);
  // Whether one of them says anything else than by default.
  bool IsGiven() const;
  // True for a tensor of reals that the options take.
  bool Takes(const files::FileTensor& tensor) const;
  // Whether --include and --exclude take a tensor of that name.
  bool TakesName(absl::string_view name) const;
};

// Says that a tensor, or those of unread() whose names the filter takes, are
// left out, and why. The exit code becomes kServerError.
void ReportUnread(const files::UnreadTensor& tensor, Session* session);
// And what of an ONNX model may be quantized already.
void ReportUnread(const TensorInput& input, const TensorFilter& filter,
                  Session* session);
void ReportCastCodes(const TensorInput& input, Session* session);

// --model, --revision.
struct NameOptions {
  std::string model;
  std::string revision = "main";

  // `required` when there is no file to take the model from.
  void AddOptions(Command* command, bool required);
  TensorName NameOf(const std::string& tensor) const;
};

// Adds the argument that is what TensorInput opens, which is required.
void AddInputArgument(Command* command, std::string* input);

// Adds the argument that names one tensor, which is required.
void AddTensorArgument(Command* command, std::string* tensor);

// Errors: ARGUMENT_INVALID for a spec with a gguf_type.
absl::Status CheckNoGgufType(const SpecTemplate& spec);

// What tensors become without a --spec.
inline constexpr char kDefaultSpec[] = "int8";

// --spec.
struct SpecOptions {
  std::vector<std::string> specs;
  // Whether the command takes blocks of GGUF; see SpecTemplate::gguf_type.
  bool takes_gguf_types = false;

  void AddOptions(Command* command);
  // Without a --spec that of kDefaultSpec.
  // Errors: ARGUMENT_INVALID, FILE_UNREADABLE.
  absl::StatusOr<SpecSet> ParseSet() const;
  // The files that the options read: @FILE, and those of codebooks.
  std::vector<std::string> Files() const;
};

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_TENSOR_OPTIONS_H_
