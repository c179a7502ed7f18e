// The options of `quantctl quantize`.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_OPTIONS_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_OPTIONS_H_

#include <optional>
#include <string>
#include <vector>

#include "client/jobs/file_ties.h"
#include "client/jobs/output.h"
#include "client/jobs/revision_name.h"
#include "client/jobs/spec_options.h"
#include "client/jobs/stored_inputs.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/tensor_input.h"

namespace quantd::jobs {

// --part and --join.
struct PartOptions {
  bool has_part = false;
  std::string part;
  bool join = false;
};

// --rounding and what goes with it.
struct RoundingOptions {
  std::string method = "nearest";
  std::optional<double> damping;
  std::string column_order;

  bool IsCompensated() const { return method == "compensated"; }
};

// Each is explained in the help.
struct QuantizeOptions {
  std::string input;
  OutputOptions output;
  RevisionName name;
  SpecOptions spec;
  TensorFilter filter;
  std::string layout = "quantd";
  // True if the command line has --layout.
  bool has_layout = false;
  std::string scheme;
  // Empty until ApplyScheme.
  std::string activations;
  std::string kv_cache;
  std::vector<std::string> ignore;
  bool has_ignore = false;
  std::string metadata;
  bool store = false;
  std::string nan_policy;
  TieFlags ties;
  RoundingOptions rounding;
  // The place of the statistics of layers' inputs, for rounding and for specs
  // with
  // importance. Resolved after ResolveInputs; without a model if none is given.
  InputsOptions inputs;
  // The file of --importance.
  std::string importance;
  bool evaluate = false;
  bool requantize = false;
  bool restart = false;
  bool keep_going = false;
  PartOptions parts;

  // True if the output is a compressed-tensors model.
  bool IsCompressed() const { return layout != "quantd"; }
  // The `packs_all` of CompressedModel.
  bool PacksAll() const { return layout == "pack-quantized"; }
  // True if the output is a GGUF file.
  bool IsGguf() const { return !IsCompressed() && IsGgufPath(output.path); }
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_OPTIONS_H_
