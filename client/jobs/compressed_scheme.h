// How runtimes of compressed-tensors models quantize what is not a weight: the
// inputs of modules and the cache of keys and values.

#ifndef QUANTD_CLIENT_JOBS_COMPRESSED_SCHEME_H_
#define QUANTD_CLIENT_JOBS_COMPRESSED_SCHEME_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/tensor.h"
#include "client/models/compressed_tensors.h"
#include "nlohmann/json.hpp"
#include "quantd/v1/encoding.pb.h"

namespace quantd::jobs {

// The options that --scheme stands for, by the names that users of vLLM know.
struct SchemePreset {
  std::string name;
  // Values of --spec, --layout and --activations.
  std::string spec;
  std::string layout;
  std::string activations;
  // Runtimes hold the scales in the type of the model.
  bool has_model_scales = false;
};
const std::vector<SchemePreset>& SchemePresets();
// Null for another name.
const SchemePreset* FindPreset(absl::string_view name);

// --activations.
struct ActivationsChoice {
  enum class Kind { kNone, kDynamic, kStatic };
  Kind kind = Kind::kNone;
  // Empty for what goes with the weights.
  std::string spec;
};
// "none", "dynamic[=SPEC]" or "static[=SPEC]".
// Errors: ARGUMENT_INVALID.
absl::StatusOr<ActivationsChoice> ParseActivations(absl::string_view text);

// The "input_activations" of config.json for a module whose weights have the
// arguments `weights`; null for none.
// Errors: ARGUMENT_INVALID for what the configuration has no words for.
absl::StatusOr<files::Json> InputArguments(const ActivationsChoice& choice,
                                           const files::Json& weights);
// True if a module has to have numbers of its inputs in the file.
bool TakesStored(const files::Json& input_arguments);

// "kv_cache_scheme" for --kv-cache SPEC.
// Errors: ARGUMENT_INVALID.
absl::StatusOr<files::Json> CacheArguments(absl::string_view spec);

// The parts that say how inputs, or a cache, with the arguments `arguments` are
// quantized, from a stored encoding. `arguments` becomes asymmetric where that
// has a
// zero point. "PREFIX_scale" and "PREFIX_zero_point" of a static range,
// "PREFIX_global_scale" of NVFP4.
// Errors: ARGUMENT_INVALID for an encoding that does not fit.
absl::StatusOr<std::vector<CompressedData>> RangeParts(
    const std::string& prefix, const v1::Encoding& encoding,
    files::Json* arguments);

// True if vLLM has kernels for a module (CompressedPlan::module) whose inputs
// have these arguments.
bool HasKernels(const files::Json& module, const files::Json& input_arguments);
// The limits of its kernels that a matrix of such a module does not keep, for
// people; empty where it keeps all. Where vLLM fuses matrices, `rows` are those
// of all. Requires: HasKernels.
std::string LimitsText(const files::Json& module,
                       const files::Json& input_arguments, int64_t rows,
                       int64_t columns);
// True if it has them for an expert as well, of a module for which HasKernels.
bool HasExpertKernels(const files::Json& module,
                      const files::Json& input_arguments);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_COMPRESSED_SCHEME_H_
