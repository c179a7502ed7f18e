#include "client/cli/spec_syntax.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "client/cpp/tensor.h"

namespace quantd::cli {

absl::StatusOr<Granularity> ParseGranularity(absl::string_view text) {
  Granularity granularity;
  absl::string_view rest = text;
  if (text == "per-tensor") return granularity;
  if (absl::ConsumePrefix(&rest, "per-channel")) {
    granularity.kind = Granularity::Kind::kPerChannel;
    if (rest.empty()) return granularity;
    if (absl::ConsumePrefix(&rest, ":") &&
        absl::SimpleAtoi(rest, &granularity.axis) && granularity.axis >= 0) {
      return granularity;
    }
  } else if (absl::ConsumePrefix(&rest, "group:")) {
    granularity.kind = Granularity::Kind::kGroup;
    if (absl::SimpleAtoi(rest, &granularity.group) && granularity.group > 0) {
      return granularity;
    }
  }
  return ArgumentInvalidError(
      absl::StrCat("expected per-tensor, per-channel, per-channel:AXIS or "
                   "group:N, got \"",
                   text, "\""));
}

absl::StatusOr<Granularity> ParseBlockSize(absl::string_view text) {
  Granularity granularity;
  granularity.kind = Granularity::Kind::kBlockSize;
  for (const absl::string_view entry : absl::StrSplit(text, ',')) {
    int64_t value = 0;
    if (!absl::SimpleAtoi(entry, &value) || value < 0) {
      return ArgumentInvalidError(absl::StrCat(
          "expected a block size such as 1,0,32, got \"", text, "\""));
    }
    granularity.block_size.push_back(value);
  }
  return granularity;
}

absl::StatusOr<std::vector<int64_t>> BlockSizeOf(
    const Granularity& granularity, absl::Span<const int64_t> shape) {
  const int64_t rank = static_cast<int64_t>(shape.size());
  switch (granularity.kind) {
    case Granularity::Kind::kPerTensor:
      return std::vector<int64_t>();
    case Granularity::Kind::kPerChannel: {
      if (rank < 2) return std::vector<int64_t>();
      if (granularity.axis >= rank) {
        return ArgumentInvalidError(
            absl::StrCat("expected an axis below the rank ", rank, ", got ",
                         granularity.axis));
      }
      std::vector<int64_t> block_size(shape.size(), 0);
      block_size[static_cast<size_t>(granularity.axis)] = 1;
      return block_size;
    }
    case Granularity::Kind::kGroup: {
      if (rank < 2) return std::vector<int64_t>();
      std::vector<int64_t> block_size(shape.size(), 1);
      block_size.back() = granularity.group;
      return block_size;
    }
    case Granularity::Kind::kBlockSize:
      break;
  }
  if (static_cast<int64_t>(granularity.block_size.size()) != rank) {
    return ArgumentInvalidError(absl::StrCat(
        "expected a tensor of rank ", granularity.block_size.size(),
        " for the block size, got rank ", rank));
  }
  return granularity.block_size;
}

absl::StatusOr<v1::Symmetry> ParseSymmetry(absl::string_view text) {
  if (text == "default") return v1::SYMMETRY_UNSPECIFIED;
  if (text == "asymmetric") return v1::SYMMETRY_ASYMMETRIC;
  if (text == "strict" || text == "symmetric") return v1::SYMMETRY_STRICT;
  if (text == "full-range") return v1::SYMMETRY_FULL_RANGE;
  if (text == "half-step") return v1::SYMMETRY_HALF_STEP;
  return ArgumentInvalidError(
      absl::StrCat("expected default, asymmetric, strict, full-range or "
                   "half-step, got \"",
                   text, "\""));
}

absl::StatusOr<EncodingSpec> SpecTemplate::SpecOf(
    absl::Span<const int64_t> shape) const {
  const absl::StatusOr<std::vector<int64_t>> block_size =
      BlockSizeOf(granularity, shape);
  if (!block_size.ok()) return block_size.status();
  EncodingSpec spec;
  spec.set_format(format);
  spec.set_symmetry(symmetry);
  for (const int64_t size : *block_size) spec.add_block_size(size);
  return spec;
}

absl::StatusOr<Candidate> ParseCandidate(absl::string_view text) {
  Candidate candidate;
  candidate.label = std::string(text);
  if (text == "stored") {
    candidate.is_stored = true;
    return candidate;
  }
  absl::string_view rest = text;
  const size_t colon = text.find(':');
  const absl::StatusOr<v1::NumberFormat> format =
      ParseFormat(text.substr(0, colon));
  if (!format.ok()) return format.status();
  candidate.spec.format = *format;
  if (colon == absl::string_view::npos) return candidate;
  rest.remove_prefix(colon + 1);
  // The symmetry comes last, and no granularity has the name of one.
  const size_t last = rest.rfind(':');
  const absl::string_view tail =
      last == absl::string_view::npos ? rest : rest.substr(last + 1);
  const absl::StatusOr<v1::Symmetry> symmetry = ParseSymmetry(tail);
  if (symmetry.ok()) {
    candidate.spec.symmetry = *symmetry;
    if (last == absl::string_view::npos) return candidate;
    rest = rest.substr(0, last);
  }
  const absl::StatusOr<Granularity> granularity = ParseGranularity(rest);
  if (!granularity.ok()) return granularity.status();
  candidate.spec.granularity = *granularity;
  return candidate;
}

bool MatchesGlob(absl::string_view pattern, absl::string_view text) {
  // On a mismatch the last "*" takes one more byte: no earlier one can help,
  // so this is O(pattern * text) at worst.
  size_t p = 0;
  size_t t = 0;
  size_t star = absl::string_view::npos;
  size_t star_text = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      star_text = t;
    } else if (p < pattern.size() &&
               (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != absl::string_view::npos) {
      p = star + 1;
      t = ++star_text;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace quantd::cli
