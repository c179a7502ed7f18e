// The plan of one `quantctl quantize`: which tensors of the input it takes, and
// which files of the output it writes.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_PLAN_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_PLAN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/cpp/tensor.h"
#include "client/files/atomic_file.h"
#include "client/files/json.h"
#include "client/files/safetensors.h"
#include "client/jobs/importance.h"
#include "client/jobs/job_events.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_outcome.h"
#include "client/jobs/quantize_parts.h"
#include "client/models/compressed_model.h"
#include "client/models/fused_experts.h"
#include "client/models/spec_syntax.h"
#include "client/models/tie_groups.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::jobs {

// Why some tensors are left as they are, for people.
constexpr char kConv1dText[] =
    "weights of Conv1D, as GPT-2 has them, lie [in, out]; runtimes of "
    "compressed-tensors read [out, in]";

// One file that a run writes: a shard, or a part of one.
struct Target {
  Shard* shard;
  // Tensors that are quantized.
  std::vector<const files::FileTensor*> tensors;
  std::string path;
  // For the file of a part.
  files::IfExists if_exists = files::IfExists::kRefuse;
  // Nothing for the whole shard.
  std::optional<Part> part = std::nullopt;
  // An earlier run has written that part.
  bool is_kept = false;

  // True if nothing is to be done.
  bool IsDone() const { return is_kept || shard->is_kept; }
};

// How a tensor is rounded for the output of its layer.
struct PlannedRounding {
  v1::Rounding rounding;
  // Tells the statistics of the inputs from those of another time.
  std::string state;
};

// The plan of a run, and its outcomes so far.
struct QuantizePlan {
  // True if the output is a folder.
  bool is_folder = false;
  SpecSet specs;
  // Tensors of float16 and bfloat16 with the base have scales of their type;
  // see SchemePreset.
  bool has_model_scales = false;
  // Nothing for all.
  std::optional<Part> part;
  std::vector<std::unique_ptr<Shard>> shards;
  // Shard by tensor, from the index of the input; empty where it has no index.
  std::map<std::string, std::string> weight_map;
  // What else that index has; see ShardIndex.
  std::optional<uint64_t> total_parameters;
  std::vector<std::string> index_fields;
  std::vector<Target> targets;
  // Groups of all shards, whatever the part.
  std::vector<TieGroup> ties;
  // Compensated ones, by tensor.
  std::map<std::string, PlannedRounding> roundings;
  // Tensors that are quantized and have no inputs for that; those that somebody
  // asked for by themselves.
  std::vector<std::string> nearest;
  std::vector<std::string> named_nearest;
  // How much errors in each column count; of the tensors that it is missing of
  // those that somebody asked for by themselves are apart.
  FoundImportance importance;
  std::vector<std::string> named_unweighted;
  // Tensors of the input that became one for each expert.
  std::vector<FusedExperts> experts;
  // For compressed-tensors: config.json of the input's folder, an empty object
  // without one, ...
  files::Json config = files::Json::object();
  // ... the inputs of the modules, by their tensors, ...
  absl::flat_hash_map<std::string, ModuleInputs> inputs;
  // ... "kv_cache_scheme", ...
  files::Json kv_cache;
  // ... modules that are left as they are unless somebody asks for them, ...
  std::vector<std::string> ignored;
  // ... tensors that are, as no Linear has them, ...
  std::vector<std::string> no_linear;
  // ... those that are, as they lie [in, out], ...
  std::vector<std::string> conv1d;
  // ... and how many have weights and inputs that no runtime has kernels for,
  // ...
  uint64_t no_kernels_count = 0;
  // ... unless all that can be is packed.
  uint64_t packable_count = 0;
  // TieGroup::label of fused tensors whose rows are no whole blocks, and names
  // of tensors that have such matrices in one.
  std::vector<std::string> ragged;
  // Tensors, or TieGroup::label of fused ones, that do not keep limits of the
  // kernels, by LimitsText, and heads and embeddings, by what vLLM has for
  // them.
  std::map<std::string, std::vector<std::string>> beyond_limits;
  // Layers of experts whose schemes are not that of the first one.
  std::vector<std::string> unlike_experts;
  // With `part`, the tensors of this part.
  absl::flat_hash_set<const files::FileTensor*> scope;
  // Has all tensors from the beginning; different ones may change at once.
  Outcomes outcomes;
  // Notes on tensors that other programs quantized; see NotesOf.
  std::vector<std::string> input_notes;
  // Notes on tensors that are not quantized as it was asked for: without
  // elements, or without whole blocks of the GGUF type.
  std::vector<std::string> notes;
  // Tensors with one scale in the place of several, and files of earlier runs
  // that are damaged.
  std::vector<std::string> warnings;
  // Notes on tensors that --include or a pattern of --spec names, and that are
  // copied all the same.
  std::vector<std::string> left_out_notes;
  // Everything is in its place.
  bool is_complete = false;
  // The draft is known not to have all encodings.
  bool is_lacking = false;
  // Readers see the encodings.
  bool is_published = false;

  // True if this run has to do with the tensor.
  bool IsInScope(const files::FileTensor& tensor) const {
    return !part.has_value() || scope.contains(&tensor);
  }
  // A tensor of any shard; null where there is none.
  const files::FileTensor* Find(const std::string& name) const;
  // True if one of the shards has that name in its folder.
  bool HasShard(const std::string& name) const;
  bool AnyFailed() const;
  bool AnyFailed(const Shard& shard) const;
  // True once the output is complete and has no codes.
  bool QuantizedNothing() const;
  // Tensors whose numbers the layout rounds.
  int64_t RoundedCount() const;
  // Requires: a tensor that is quantized.
  EncodingSpec SpecOf(const files::FileTensor& tensor) const;
  // True if importance weighs its errors.
  // Requires: as SpecOf.
  bool IsWeighed(const files::FileTensor& tensor) const;
};

// The part of --part; nothing without one.
// Errors: ARGUMENT_INVALID, also for options that do not go with --part and
// --join.
absl::StatusOr<std::optional<Part>> ParsePartOptions(
    const QuantizeOptions& options);

// Opens all inputs and decides what is to be done with each, and what is there
// already. Writes nothing. A tensor that cannot be quantized has its error in
// `outcomes`. `server` is the address. `client` reads stored encodings of
// activations and finds stored inputs; null where NeedsActivations and
// NeedsInputs are false.
// Errors: ARGUMENT_INVALID and those of files and of the client.
absl::StatusOr<QuantizePlan> MakePlan(const QuantizeOptions& options,
                                      const SpecSet& specs,
                                      const std::optional<Part>& part,
                                      const std::string& server, Client* client,
                                      const JobEvents& events);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_PLAN_H_
