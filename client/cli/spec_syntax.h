// How the command line spells formats, granularities and candidates.

#ifndef QUANTD_CLIENT_CLI_SPEC_SYNTAX_H_
#define QUANTD_CLIENT_CLI_SPEC_SYNTAX_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/tensor.h"

namespace quantd::cli {

// How a tensor is divided among scales, whatever its rank. Plain value.
struct Granularity {
  enum class Kind { kPerTensor, kPerChannel, kGroup, kBlockSize };
  Kind kind = Kind::kPerTensor;
  // Of per-channel.
  int64_t axis = 0;
  // Elements of a group along the last axis.
  int64_t group = 0;
  // An entry per dimension.
  std::vector<int64_t> block_size;
};

// "per-tensor", "per-channel", "per-channel:AXIS", "group:N".
// Errors: ARGUMENT_INVALID.
absl::StatusOr<Granularity> ParseGranularity(absl::string_view text);

// "1,0,0": an entry per dimension, 0 for the whole dimension.
// Errors: ARGUMENT_INVALID.
absl::StatusOr<Granularity> ParseBlockSize(absl::string_view text);

// The block size for a tensor; empty for per tensor. Tensors of rank below 2
// are per tensor unless the granularity is a block size.
// Errors: ARGUMENT_INVALID for an axis or block size that does not fit.
absl::StatusOr<std::vector<int64_t>> BlockSizeOf(
    const Granularity& granularity, absl::Span<const int64_t> shape);

// "default", "asymmetric", "strict" or "symmetric", "full-range", "half-step".
// Errors: ARGUMENT_INVALID.
absl::StatusOr<v1::Symmetry> ParseSymmetry(absl::string_view text);

// A spec but for the shape of the tensor. Plain value.
struct SpecTemplate {
  v1::NumberFormat format = v1::NUMBER_FORMAT_INT8;
  Granularity granularity;
  v1::Symmetry symmetry = v1::SYMMETRY_UNSPECIFIED;

  // Errors: as BlockSizeOf.
  absl::StatusOr<EncodingSpec> SpecOf(absl::Span<const int64_t> shape) const;
};

// One candidate of `evaluate`. Plain value.
struct Candidate {
  // As the user wrote it.
  std::string label;
  // The encoding that the server has, instead of `spec`.
  bool is_stored = false;
  SpecTemplate spec;
};

// "FORMAT[:GRANULARITY][:SYMMETRY]", e.g. "int4:group:32:asymmetric", or
// "stored".
// Errors: ARGUMENT_INVALID.
absl::StatusOr<Candidate> ParseCandidate(absl::string_view text);

// Whether `text` matches a pattern in which "*" stands for any characters and
// "?" for one byte.
bool MatchesGlob(absl::string_view pattern, absl::string_view text);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_SPEC_SYNTAX_H_
