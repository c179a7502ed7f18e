// How the command line spells formats, granularities, methods and candidates.

#ifndef QUANTD_CLIENT_MODELS_SPEC_SYNTAX_H_
#define QUANTD_CLIENT_MODELS_SPEC_SYNTAX_H_

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/tensor.h"

namespace quantd {

// How a tensor is divided among scales, whatever its rank. Plain value.
struct Granularity {
  // The default leaves it to the format: per tensor, or its blocks.
  enum class Kind { kDefault, kPerTensor, kPerChannel, kGroup, kBlockSize };
  Kind kind = Kind::kDefault;
  // Axis of kPerChannel and of kGroup; negative ones count from the end.
  int64_t axis = 0;
  // Elements of a group along the axis.
  int64_t group = 0;
  // An entry per dimension.
  std::vector<int64_t> block_size;
};

// "default", "per-tensor", "per-channel", "per-channel:AXIS", "group:N",
// "group:N:AXIS"; without AXIS channels are of the first axis and groups of the
// last one.
// Errors: ARGUMENT_INVALID.
absl::StatusOr<Granularity> ParseGranularity(absl::string_view text);

// "1,0,0": an entry per dimension, 0 for the whole dimension.
// Errors: ARGUMENT_INVALID.
absl::StatusOr<Granularity> ParseBlockSize(absl::string_view text);

// The block size for a tensor; empty for per tensor or the default. Tensors of
// rank below 2 are per tensor unless the granularity is a block size. Errors:
// ARGUMENT_INVALID for an axis or block size that does not fit.
absl::StatusOr<std::vector<int64_t>> BlockSizeOf(
    const Granularity& granularity, absl::Span<const int64_t> shape);

// Sets what a message for tensors of any shape, an EncodingSpec or a
// Contribution, says of the granularity; nothing for per tensor or the default.
template <typename Message>
void SetGranularity(const Granularity& granularity, Message* message) {
  switch (granularity.kind) {
    case Granularity::Kind::kDefault:
    case Granularity::Kind::kPerTensor:
      break;
    case Granularity::Kind::kPerChannel:
      message->mutable_granularity()->set_axis(
          static_cast<int32_t>(granularity.axis));
      break;
    case Granularity::Kind::kGroup:
      message->mutable_granularity()->set_axis(
          static_cast<int32_t>(granularity.axis));
      message->mutable_granularity()->set_group_size(granularity.group);
      break;
    case Granularity::Kind::kBlockSize:
      for (const int64_t size : granularity.block_size) {
        message->add_block_size(size);
      }
  }
}

// Names to offer for what the functions take.
std::vector<std::string> FormatNames();
// FormatNames in one line, with plain integers put together: "int2 to int16,
// int32, ...".
std::string FormatList();
std::vector<std::string> GranularityNames();
// The name that ParseSpec takes; empty for a method that is not known.
std::string MethodName(v1::CalibrationMethod method);

// "default", "float32", "float16", "bfloat16", "e8m0", "e4m3", "integer", and
// back.
// Errors: ARGUMENT_INVALID.
absl::StatusOr<v1::ScaleType> ParseScaleType(absl::string_view text);
std::string ScaleTypeName(v1::ScaleType type);

// A spec but for the shape of the tensor. Plain value.
struct SpecTemplate {
  // Without a block size.
  EncodingSpec spec;
  Granularity granularity;
  // "q4_0", "q4_K" and others for what becomes blocks of GGUF that quantctl
  // makes itself; then it says all, and BlockTypeFor what rows become. Empty
  // for what the server quantizes.
  std::string gguf_type;

  // Errors: as BlockSizeOf; ARGUMENT_INVALID with a gguf_type: rows for which
  // BlockTypeFor has none become nothing else.
  absl::StatusOr<EncodingSpec> SpecOf(absl::Span<const int64_t> shape) const;
  // The spec for tensors of any shape.
  // Errors: ARGUMENT_INVALID for per-tensor with a format of blocks.
  absl::StatusOr<EncodingSpec> SpecOfAny() const;
};

// "FORMAT[:GRANULARITY][:SYMMETRY][:METHOD][:OPTION...]" with the parts behind
// the format in any order.
//   GRANULARITY  what ParseGranularity takes, or "block=" with what
//                ParseBlockSize takes
//   SYMMETRY     "asymmetric", "strict" or "symmetric", "full-range",
//                "half-step", "aimet"
//   METHOD       "minmax", "percentile[=KEPT]" (0.999: all but a thousandth),
//                "mse[=STEPS]", "sqnr[=GAMMA]", "entropy[=STEPS]",
//                "fixed=MIN,MAX", "moving-average", "best-of=METHOD,METHOD,..."
//   OPTION       "power-of-two", "no-saturation", "real-zero-point",
//                "scale=TYPE", "rule=RULE" ("floor", "ceil", "even", "rceil"),
//                "mantissa-bits=N", "steps=N", "bins=N", "tail=SIDE"
//                ("magnitude", "both", "upper", "lower"),
//                "importance[=INPUTS]", "importance-axis=N", and "entries="
//                with numbers, or a file that has them
// In INPUTS, the name of a tensor, "%3A" stands for ":" and "%25" for "%";
// without it the service takes MODULE.input for a tensor MODULE.weight. E.g.
// "int4:group:32:asymmetric", "uint8:percentile=0.999", "mxfp4_e2m1:rule=even".
// Or a JSON object, which says all that a spec may have: "spec" is the protobuf
// JSON of an EncodingSpec without block_size and granularity, "granularity" is
// GRANULARITY as above; without it "default". Or "spec" is words as above.
// Errors: ARGUMENT_INVALID, FILE_UNREADABLE.
absl::StatusOr<SpecTemplate> ParseSpec(absl::string_view text);

// Parses what ParseSpec takes, or a SpecTemplate::gguf_type in any case.
// Errors: ARGUMENT_INVALID, FILE_UNREADABLE.
absl::StatusOr<SpecTemplate> ParseSpecOrGgufType(absl::string_view text);

// The specs of `--spec`: for a tensor the first override whose pattern matches,
// otherwise the base, if there is one. Plain value.
struct SpecSet {
  struct Override {
    std::string pattern;
    SpecTemplate spec;
    // A line of a file, which may list all tensors, as those of a sweep do.
    bool is_from_file = false;
  };

  // False when only overrides were given.
  bool has_base = true;
  SpecTemplate base;
  std::vector<Override> overrides;

  // Null for a tensor that no pattern matches where there is no base: it is
  // left as it is.
  const SpecTemplate* For(absl::string_view tensor) const;
};

// Adds one value of `--spec`: "SPEC" sets the base, "PATTERN=SPEC" adds an
// override, "@FILE" has either on each of its lines. SPEC is what
// ParseSpecOrGgufType takes. JSON with "pattern" is an override too, whatever
// bytes the pattern has.
// Errors: ARGUMENT_INVALID, FILE_UNREADABLE.
absl::Status AddSpec(const std::string& text, SpecSet* set, bool* has_base);

// Checks that "TENSOR=SPEC" on a line of a file is of this tensor and no other:
// it is not with characters of patterns, a "=" or a line break, for instance.
// Errors: ARGUMENT_INVALID.
absl::Status CheckNameForSpecFile(const std::string& tensor);

// One candidate of `evaluate`. Plain value.
struct Candidate {
  // The text that the user wrote.
  std::string label;
  // The encoding that the server has, instead of `spec`.
  bool is_stored = false;
  SpecTemplate spec;
};

// Parses what ParseSpecOrGgufType takes, or "stored".
// Errors: ARGUMENT_INVALID.
absl::StatusOr<Candidate> ParseCandidate(absl::string_view text);

// True if `text` matches a pattern in which "*" stands for any characters and
// "?" for one byte.
bool MatchesGlob(absl::string_view pattern, absl::string_view text);
// True if `text` matches one of the patterns.
template <typename Patterns>
bool MatchesAny(const Patterns& patterns, absl::string_view text) {
  return std::any_of(
      std::begin(patterns), std::end(patterns),
      [text](absl::string_view pattern) { return MatchesGlob(pattern, text); });
}

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_SPEC_SYNTAX_H_
