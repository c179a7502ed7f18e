// What `quantctl quantize` works on: shards, and what becomes of their tensors.

#ifndef QUANTD_CLIENT_CLI_QUANTIZE_OUTCOME_H_
#define QUANTD_CLIENT_CLI_QUANTIZE_OUTCOME_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "client/cli/session.h"
#include "client/files/atomic_file.h"
#include "client/files/safetensors.h"
#include "client/models/tensor_input.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::cli {

// What became of one tensor.
struct Outcome {
  // A tensor that failed is copied, like one that was not selected.
  absl::Status status;
  bool is_quantized = false;
  // Of the codes; an encoding may have turned to the unsigned format.
  std::string format;
  uint64_t output_bytes = 0;
  uint64_t clipped_low_count = 0;
  uint64_t clipped_high_count = 0;
  uint64_t nan_count = 0;
  uint64_t infinity_count = 0;
  // See v1::QuantizeResponseHeader.
  uint64_t mantissa_bits = 0;
  std::optional<v1::ErrorMetrics> metrics;
};

// By name.
using Outcomes = absl::flat_hash_map<std::string, Outcome>;

// What a shard tells of a quantized tensor to the runs after this one.
Json RecordOf(const Outcome& outcome);
// Nothing where the record is not sound.
std::optional<Outcome> ParseRecord(const Json& record);

// One file of the input and what it becomes.
struct Shard {
  Shard(std::string from, TensorInput tensors)
      : input_path(std::move(from)), input(std::move(tensors)) {}

  std::string input_path;
  TensorInput input;
  // In a folder.
  std::string name;
  std::string output_path;
  std::vector<const files::FileTensor*> selected;
  // As the metadata have them.
  std::string command;
  std::string run;
  // Of the output.
  files::IfExists if_exists = files::IfExists::kRefuse;
  // Of another part.
  bool is_skipped = false;
  // An earlier run has done it.
  bool is_kept = false;
  // It is in its place, kept or new.
  bool is_written = false;
};

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_QUANTIZE_OUTCOME_H_
