// The options of QuantizeModel, which are those of `quantctl quantize`.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_OPTIONS_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_OPTIONS_H_

#include <optional>
#include <string>
#include <vector>

#include "client/jobs/file_ties.h"
#include "client/jobs/inputs_options.h"
#include "client/jobs/output.h"
#include "client/jobs/revision_name.h"
#include "client/jobs/spec_options.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/tensor_input.h"

namespace quantd::jobs {

// --rounding and what goes with it.
struct RoundingOptions {
  std::string method = "nearest";
  std::optional<double> damping;
  std::string column_order;

  bool IsCompensated() const { return method == "compensated"; }
};

// Each does what the option of the same name does: see `quantctl help
// quantize`.
struct QuantizeOptions {
  std::string input;
  // -o and --force. With "-" the file goes to standard output.
  OutputOptions output;
  // --model, by default the name of the input, and --revision.
  RevisionName name;
  // May have types of GGUF, such as q4_K.
  SpecOptions spec;
  TensorFilter filter;
  // Empty for that of the scheme, or "quantd".
  std::string layout;
  std::string scheme;
  // Empty for those of the scheme, or "none".
  std::string activations;
  std::string kv_cache;
  // Nothing for the default.
  std::optional<std::vector<std::string>> ignore;
  std::string metadata;
  // Keeps the encodings on the server, under `name`; false even with a model.
  bool store = false;
  std::string nan_policy;
  TieFlags ties;
  RoundingOptions rounding;
  // The place of the statistics of layers' inputs, for rounding and for specs
  // with importance; by default `name`, if that has a model.
  InputsOptions inputs;
  // The file of --importance.
  std::string importance;
  bool evaluate = false;
  bool requantize = false;
  bool restart = false;
  bool keep_going = false;
  // "I/N" for one share of the work.
  std::optional<std::string> part;
  bool join = false;

  // The functions are for QuantizeRun::options(), where the scheme has set the
  // layout.
  // True if the output is a compressed-tensors model.
  bool IsCompressed() const { return !layout.empty() && layout != "quantd"; }
  // The `packs_all` of CompressedModel.
  bool PacksAll() const { return layout == "pack-quantized"; }
  // True if the output is a GGUF file.
  bool IsGguf() const { return !IsCompressed() && IsGgufPath(output.path); }
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_OPTIONS_H_
