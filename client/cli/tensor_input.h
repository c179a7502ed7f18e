// The tensors of an input file, and which of them a command takes.

#ifndef QUANTD_CLIENT_CLI_TENSOR_INPUT_H_
#define QUANTD_CLIENT_CLI_TENSOR_INPUT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/cli/spec_syntax.h"
#include "client/cpp/tensor.h"
#include "client/files/gguf.h"
#include "client/files/npy.h"
#include "client/files/safetensors.h"

namespace quantd::cli {

// True for a path that ends with ".npy".
bool IsNpyPath(absl::string_view path);

// True for a path that ends with ".gguf".
bool IsGgufPath(absl::string_view path);

// The file's name without folders and extension.
std::string FileStem(absl::string_view path);

// A safetensors file, a .npy file as one tensor named by its stem, a .gguf file
// whose blocks are float32 in memory, or a folder of safetensors files that
// make one model. Immutable, thread-safe.
class TensorInput {
 public:
  // Errors: of files::SafetensorsReader, files::NpyReader, files::GgufReader
  // and files::ReadShardIndex.
  static absl::StatusOr<TensorInput> Open(const std::string& path);

  // In order of their data; valid while this lives.
  const std::vector<files::FileTensor>& tensors() const { return tensors_; }
  const files::FileTensor* Find(absl::string_view name) const;
  // Names of the tensors whose type is not read, which tensors() leaves out.
  const std::vector<std::string>& unread() const { return unread_; }
  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }
  // The files that were opened, and their folder where one was.
  const std::vector<std::string>& paths() const { return paths_; }

 private:
  TensorInput() = default;

  // Adds the tensors of a safetensors file.
  absl::Status Add(const std::string& path);
  absl::Status AddGguf(const std::string& path);

  // What tensors_ point into.
  std::vector<std::variant<files::SafetensorsReader, files::NpyReader,
                           files::GgufReader>>
      files_;
  std::vector<std::vector<float>> dequantized_;
  std::vector<files::FileTensor> tensors_;
  std::vector<std::string> unread_;
  std::vector<std::string> paths_;
  absl::flat_hash_map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// Says that the tensors of unread() are left out, and why.
void ReportUnread(const TensorInput& input, Session* session);

// The element type of a file's type; nothing when quantd does not quantize it.
std::optional<ElementType> ElementTypeOf(files::Dtype dtype);
files::Dtype DtypeOf(ElementType type);

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
};

// --model, --revision.
struct NameOptions {
  std::string model;
  std::string revision = "main";

  // `required` when there is no file to take the model from.
  void AddOptions(Command* command, bool required);
  TensorName NameOf(const std::string& tensor) const;
};

// Adds the argument that names one tensor, which is required.
void AddTensorArgument(Command* command, std::string* tensor);

// --spec, and what earlier versions had in its place: --format, --granularity,
// --method and all else that makes a spec. Those are hidden.
struct SpecOptions {
  std::string format = "int8";
  std::string granularity = "default";
  std::string block_size;
  std::string symmetry = "default";
  std::string method = "minmax";
  std::optional<double> tail_fraction;
  std::string tail_side = "default";
  std::optional<double> gamma;
  uint32_t search_steps = 0;
  uint32_t entropy_bins = 0;
  std::string range;
  bool power_of_two = false;
  bool no_saturation = false;
  std::string scale_type = "default";
  std::string mx_rule = "default";
  std::string codebook;
  std::vector<std::string> specs;

  void AddOptions(Command* command);
  // The same and --spec.
  void AddOptionsWithPatterns(Command* command);
  // Shows --granularity and --block-size, as those of statistics.
  void ShowGranularity();
  // --codebook alone.
  void AddCodebookOption(Command* command);

  // Whether one of the options but --granularity, --codebook and --spec was on
  // the command line.
  bool IsGiven() const;
  // The spec of the options.
  // Errors: ARGUMENT_INVALID, FILE_UNREADABLE.
  absl::StatusOr<SpecTemplate> Parse() const;
  // That and those of --spec. `granularity_is_apart` says that --granularity
  // may stand beside a --spec without a pattern, for something else.
  absl::StatusOr<SpecSet> ParseSet(bool granularity_is_apart = false) const;
  // Gives the codebook to a spec whose format needs one.
  absl::Status AddCodebook(SpecTemplate* spec) const;
  absl::StatusOr<Granularity> ParseGranularityOptions() const;

 private:
  // The options that IsGiven counts.
  std::vector<Option*> given_;
  // --granularity and --block-size.
  std::vector<Option*> granularity_given_;
};

// The tensor as the client takes it.
// Requires: ElementTypeOf(tensor.dtype) has a value.
Tensor MakeTensor(const files::FileTensor& tensor, TensorName name);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_TENSOR_INPUT_H_
