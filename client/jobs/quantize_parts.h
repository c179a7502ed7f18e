// Shares of one `quantctl quantize` that different processes do.
//
// If the shards can be shared out evenly, a part has whole ones and writes
// them where they belong. Otherwise it has a range of the tensors; of a shard
// that is not all its own it leaves SHARD.part-I-of-N, a safetensors file that
// --join puts together with the others.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_PARTS_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_PARTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/files/safetensors.h"
#include "client/jobs/quantize_outcome.h"

namespace quantd::jobs {

// Metadata of a part's file: "I/N".
constexpr char kPartKey[] = "quantctl.part";

// Part `index` of `count`, from 0 on.
struct Part {
  int64_t index = 0;
  int64_t count = 1;
};

// Reads "I/N", with I below N, and N at most 100,000.
// Errors: ARGUMENT_INVALID.
absl::StatusOr<Part> ParsePart(absl::string_view text);

// "I/N".
std::string PartText(const Part& part);

// The tensors of one shard that one part does.
struct Share {
  int64_t part = 0;
  std::vector<const files::FileTensor*> tensors;
};

// For each shard, the parts that do its selected tensors, in order. A shard
// without any belongs to a part all the same. The same wherever it is asked.
std::vector<std::vector<Share>> ShareOut(
    const std::vector<std::unique_ptr<Shard>>& shards, int64_t part_count);

// The file of a part of a shard.
std::string PartPath(const Shard& shard, const Part& part);

// The parts of a shard for which there are files, whatever is in them.
std::vector<Part> FindParts(const Shard& shard);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_PARTS_H_
