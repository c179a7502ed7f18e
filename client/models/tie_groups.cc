#include "client/models/tie_groups.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "client/cpp/scales.h"
#include "client/models/outer_maximum.h"
#include "client/models/tensor_input.h"

namespace quantd {
namespace {

absl::Status PatternError(absl::string_view text, absl::string_view what) {
  return ArgumentInvalidError(
      absl::StrCat("tie \"", text, "\": expected ", what));
}

// Tensors of one label, before it is known whether they can share a scale.
struct Found {
  std::string label;
  // Indices of the tensors.
  std::vector<size_t> members;
  bool is_default;
};

std::string DifferentSpecs(const std::string& name, const EncodingSpec& spec,
                           const std::string& other,
                           const EncodingSpec& other_spec) {
  return absl::StrCat("one spec for all, got different ones for \"", name,
                      "\" (", FormatName(spec.format()), ") and \"", other,
                      "\" (", FormatName(other_spec.format()), ")");
}

std::string NoSharedScale(const std::string& name, const EncodingSpec& spec) {
  return absl::StrCat(
      "a spec with one outer scale, such as nvfp4, or with one scale from the "
      "extremes, such as float8_e4m3fn, got ",
      FormatName(spec.format()), " for \"", name, "\"");
}

// True if tensors of this spec, which has so many scales, can share one.
bool CanShare(const EncodingSpec& spec, const ScaleCounts& counts) {
  return MayShareScale(spec) &&
         (HasOuterScales(spec) ? counts.outer_scale : counts.scale) == 1;
}

// The reason why a group cannot share a scale. Empty for one that can.
std::string Obstacle(const Found& found,
                     const std::vector<TieCandidate>& candidates) {
  const TieCandidate& first = candidates[found.members[0]];
  const std::string spec = first.spec.SerializeAsString();
  for (const size_t index : found.members) {
    const TieCandidate& member = candidates[index];
    const files::FileTensor& tensor = *member.tensor;
    if (member.spec.SerializeAsString() != spec) {
      return DifferentSpecs(first.tensor->name, first.spec, tensor.name,
                            member.spec);
    }
    const absl::StatusOr<ScaleCounts> counts =
        CountScales(tensor.shape, ExpectedEncoding(member.spec, tensor.shape));
    if (!counts.ok() || !CanShare(member.spec, *counts)) {
      return NoSharedScale(tensor.name, member.spec);
    }
    if (tensor.dtype == files::Dtype::kF64) {
      return absl::StrCat("F32, F16 or BF16, got F64 for \"", tensor.name,
                          "\"");
    }
  }
  return "";
}

bool HasOuterScale(const Found& found,
                   const std::vector<TieCandidate>& candidates) {
  return std::any_of(found.members.begin(), found.members.end(),
                     [&candidates](size_t index) {
                       return HasOuterScales(candidates[index].spec);
                     });
}

absl::Status TieError(const Found& found, absl::string_view obstacle) {
  return ArgumentInvalidError(absl::StrCat(
      found.label,
      found.is_default ? ": runtimes fuse these tensors and read one scale "
                         "for all; expected "
                       : ": tied tensors share one scale; expected ",
      obstacle,
      found.is_default ? "; without ties (--no-ties) each has its own" : ""));
}

// The groups of two tensors or more, in the order of their first tensors. A
// tensor is in the group of the first pattern that matches it.
// Errors: ARGUMENT_INVALID for a pattern of `options` that ties no tensors.
absl::StatusOr<std::vector<Found>> FindGroups(
    const TieOptions& options, size_t count,
    absl::FunctionRef<const std::string&(size_t index)> name_of) {
  std::vector<TiePattern> patterns = options.patterns;
  const size_t given = patterns.size();
  if (options.has_defaults) {
    for (const std::string& text : DefaultTies()) {
      patterns.push_back(*TiePattern::Parse(text));
    }
  }
  std::vector<Found> found;
  std::map<std::pair<size_t, std::string>, size_t> index;
  for (size_t tensor = 0; tensor < count; ++tensor) {
    for (size_t i = 0; i < patterns.size(); ++i) {
      std::optional<std::string> label = patterns[i].LabelOf(name_of(tensor));
      if (!label.has_value()) continue;
      const auto [entry, is_new] = index.try_emplace({i, *label}, found.size());
      if (is_new) found.push_back({*std::move(label), {}, i >= given});
      found[entry->second].members.push_back(tensor);
      break;
    }
  }
  std::vector<bool> ties(given, false);
  for (const auto& [key, at] : index) {
    if (key.first < given && found[at].members.size() > 1) {
      ties[key.first] = true;
    }
  }
  for (size_t i = 0; i < given; ++i) {
    if (ties[i]) continue;
    return ArgumentInvalidError(
        absl::StrCat("expected two tensors or more to tie by \"",
                     patterns[i].text(), "\", got none that are quantized"));
  }
  found.erase(
      std::remove_if(found.begin(), found.end(),
                     [](const Found& one) { return one.members.size() < 2; }),
      found.end());
  return found;
}

// Adds the groups of the experts of each layer.
void AddExperts(const std::vector<const files::FileTensor*>& tensors,
                std::vector<TieGroup>* groups) {
  std::map<absl::string_view, size_t> index;
  std::vector<TieGroup> layers;
  for (const files::FileTensor* const tensor : tensors) {
    const absl::string_view experts = ExpertsOf(tensor->name);
    if (experts.empty() || tensor->shape.size() < 2) continue;
    const auto [entry, is_new] = index.try_emplace(experts, layers.size());
    if (is_new) {
      layers.push_back({absl::StrCat(experts, ".*"), {}, false});
    }
    layers[entry->second].tensors.push_back(tensor);
  }
  for (TieGroup& layer : layers) {
    if (layer.tensors.size() > 1) groups->push_back(std::move(layer));
  }
}

}  // namespace

absl::StatusOr<TiePattern> TiePattern::Parse(absl::string_view text) {
  TiePattern pattern;
  pattern.text_ = std::string(text);
  bool ties = false;
  absl::string_view rest = text;
  while (!rest.empty()) {
    if (absl::ConsumePrefix(&rest, "*")) {
      pattern.pieces_.push_back({Kind::kAny, "*"});
      ties = true;
      continue;
    }
    if (rest[0] == '}') return PatternError(text, "{ before }");
    if (rest[0] != '{') {
      const size_t end = std::min(rest.find_first_of("*{}"), rest.size());
      pattern.pieces_.push_back(
          {Kind::kText, std::string(rest.substr(0, end))});
      rest.remove_prefix(end);
      continue;
    }
    const size_t end = rest.find('}');
    if (end == absl::string_view::npos) return PatternError(text, "} after {");
    const absl::string_view inner = rest.substr(1, end - 1);
    if (inner.empty() || absl::StrContains(inner, '{')) {
      return PatternError(text, "{A,B} or {NAME} in braces");
    }
    Piece piece = {Kind::kCapture, std::string(rest.substr(0, end + 1))};
    if (absl::StrContains(inner, ',')) {
      piece.kind = Kind::kChoice;
      piece.choices = absl::StrSplit(inner, ',');
      ties = true;
    }
    pattern.pieces_.push_back(std::move(piece));
    rest.remove_prefix(end + 1);
  }
  if (!ties) {
    return PatternError(text,
                        "{A,B,...} or * in it, such as "
                        "{layer}.self_attn.{q,k,v}_proj.weight");
  }
  return pattern;
}

std::optional<std::string> TiePattern::LabelOf(absl::string_view name) const {
  std::vector<absl::string_view> captures;
  if (!Match(0, name, &captures)) return std::nullopt;
  std::string label;
  size_t next = 0;
  for (const Piece& piece : pieces_) {
    absl::StrAppend(&label, piece.kind == Kind::kCapture
                                ? captures[next++]
                                : absl::string_view(piece.text));
  }
  return label;
}

bool TiePattern::Match(size_t piece, absl::string_view rest,
                       std::vector<absl::string_view>* captures) const {
  if (piece == pieces_.size()) return rest.empty();
  const Piece& own = pieces_[piece];
  if (own.kind == Kind::kText) {
    return absl::ConsumePrefix(&rest, own.text) &&
           Match(piece + 1, rest, captures);
  }
  if (own.kind == Kind::kChoice) {
    return std::any_of(own.choices.begin(), own.choices.end(),
                       [&](const std::string& choice) {
                         absl::string_view after = rest;
                         return absl::ConsumePrefix(&after, choice) &&
                                Match(piece + 1, after, captures);
                       });
  }
  const bool is_capture = own.kind == Kind::kCapture;
  // The longest first.
  for (size_t size = rest.size() + 1; size-- > (is_capture ? 1 : 0);) {
    if (is_capture) captures->push_back(rest.substr(0, size));
    if (Match(piece + 1, rest.substr(size), captures)) return true;
    if (is_capture) captures->pop_back();
  }
  return false;
}

const std::vector<std::string>& DefaultTies() {
  static const auto* const kPatterns = new std::vector<std::string>{
      "{module}.{q,k,v}_proj.weight",
      "{module}.{q_a_proj,kv_a_proj_with_mqa}.weight",
      "{module}.{query,key,value}.weight",
      "{module}.{wq,wk,wv}.weight",
      "{module}.{gate,up}_proj.weight",
      "{module}.{w1,w3}.weight"};
  return *kPatterns;
}

absl::string_view ExpertsOf(absl::string_view name) {
  absl::string_view rest = name;
  const bool is_weight = absl::ConsumeSuffix(&rest, ".weight");
  for (const absl::string_view stack : {".gate_up_proj", ".down_proj"}) {
    absl::string_view experts = rest;
    if (absl::ConsumeSuffix(&experts, stack) &&
        (experts == "experts" || absl::EndsWith(experts, ".experts"))) {
      return experts;
    }
  }
  constexpr absl::string_view kMark = "experts.";
  for (size_t at = rest.find(kMark); is_weight && at != absl::string_view::npos;
       at = rest.find(kMark, at + 1)) {
    if (at > 0 && rest[at - 1] != '.') continue;
    // The number of an expert, and one of its modules.
    const size_t number = at + kMark.size();
    size_t end = number;
    while (end < rest.size() &&
           absl::ascii_isdigit(static_cast<unsigned char>(rest[end]))) {
      ++end;
    }
    if (end > number && end + 1 < rest.size() && rest[end] == '.') {
      return rest.substr(0, number - 1);
    }
  }
  return "";
}

bool HasOuterScales(const EncodingSpec& spec) {
  Encoding encoding;
  encoding.set_format(spec.format());
  encoding.set_scale_type(spec.scale_type());
  return HasOuterScales(ScaleTypeOf(encoding));
}

bool MayShareScale(const EncodingSpec& spec) {
  if (HasOuterScales(spec)) return true;
  // A block that happens to be the whole tensor is not meant to be that.
  if (spec.has_granularity() ||
      std::any_of(spec.block_size().begin(), spec.block_size().end(),
                  [](int64_t size) { return size != 0; })) {
    return false;
  }
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(spec.format());
  return format.ok() && format->kind == CodeKind::kFloat &&
         spec.method() <= v1::CALIBRATION_METHOD_MIN_MAX;
}

absl::StatusOr<std::vector<TieGroup>> FindTies(
    const TieOptions& options, const std::vector<TieCandidate>& candidates) {
  const absl::StatusOr<std::vector<Found>> found =
      FindGroups(options, candidates.size(),
                 [&candidates](size_t index) -> const std::string& {
                   return candidates[index].tensor->name;
                 });
  if (!found.ok()) return found.status();
  std::vector<TieGroup> groups;
  for (const Found& one : *found) {
    const std::string obstacle = Obstacle(one, candidates);
    if (obstacle.empty()) {
      TieGroup group = {one.label, {}};
      for (const size_t member : one.members) {
        group.tensors.push_back(candidates[member].tensor);
      }
      groups.push_back(std::move(group));
    } else if (!one.is_default ||
               (options.is_strict && HasOuterScale(one, candidates))) {
      return TieError(one, obstacle);
    }
  }
  return groups;
}

absl::StatusOr<std::vector<TieGroup>> FindTiedTensors(
    const TieOptions& options,
    const std::vector<const files::FileTensor*>& tensors) {
  const absl::StatusOr<std::vector<Found>> found = FindGroups(
      options, tensors.size(), [&tensors](size_t index) -> const std::string& {
        return tensors[index]->name;
      });
  if (!found.ok()) return found.status();
  std::vector<TieGroup> groups;
  for (const Found& one : *found) {
    TieGroup& group = groups.emplace_back();
    group.label = one.label;
    for (const size_t member : one.members) {
      group.tensors.push_back(tensors[member]);
    }
  }
  if (options.has_defaults) AddExperts(tensors, &groups);
  return groups;
}

std::vector<TieGroup> GroupsThatShare(const SpecTemplate& spec,
                                      const std::vector<TieGroup>& groups) {
  std::vector<TieGroup> sharing;
  for (const TieGroup& group : groups) {
    if (!group.shares_scale) continue;
    Found all = {group.label, {}, false};
    std::vector<TieCandidate> candidates;
    for (const files::FileTensor* const tensor : group.tensors) {
      const absl::StatusOr<EncodingSpec> of_tensor = spec.SpecOf(tensor->shape);
      if (!of_tensor.ok()) break;
      all.members.push_back(candidates.size());
      candidates.push_back({tensor, *of_tensor});
    }
    if (candidates.size() == group.tensors.size() &&
        Obstacle(all, candidates).empty()) {
      sharing.push_back(group);
    }
  }
  return sharing;
}

absl::StatusOr<std::vector<NamedTies>> FindNamedTies(
    const TieOptions& options, const std::vector<std::string>& names,
    absl::FunctionRef<const EncodingSpec*(const std::string& name)> spec_of) {
  std::vector<const std::string*> taken;
  std::vector<const EncodingSpec*> specs;
  for (const std::string& name : names) {
    const EncodingSpec* const spec = spec_of(name);
    if (spec == nullptr) continue;
    taken.push_back(&name);
    specs.push_back(spec);
  }
  const absl::StatusOr<std::vector<Found>> found = FindGroups(
      options, taken.size(),
      [&taken](size_t index) -> const std::string& { return *taken[index]; });
  if (!found.ok()) return found.status();
  std::vector<NamedTies> groups;
  for (const Found& one : *found) {
    const size_t first = one.members[0];
    const std::string spec = specs[first]->SerializeAsString();
    std::string obstacle;
    NamedTies group = {one.label, {}, !one.is_default};
    for (const size_t member : one.members) {
      group.tensors.push_back(*taken[member]);
      if (obstacle.empty() && specs[member] != specs[first] &&
          specs[member]->SerializeAsString() != spec) {
        obstacle = DifferentSpecs(*taken[first], *specs[first], *taken[member],
                                  *specs[member]);
      }
    }
    if (!one.is_default && !obstacle.empty()) {
      return ArgumentInvalidError(absl::StrCat(
          one.label, ": tied tensors share a scale; expected ", obstacle));
    }
    if (obstacle.empty() &&
        (!one.is_default || HasOuterScales(*specs[first]))) {
      groups.push_back(std::move(group));
    }
  }
  return groups;
}

TiedMaxima::TiedMaxima(const std::vector<TieGroup>& groups) {
  for (const TieGroup& group : groups) {
    Shared& shared = shared_.emplace_back();
    shared.group = &group;
    for (const files::FileTensor* const tensor : group.tensors) {
      by_tensor_[tensor] = &shared;
    }
  }
}

void TiedMaxima::Tie(const files::FileTensor& tensor, EncodingSpec* spec,
                     std::vector<float>* outer_maximum) {
  const auto found = by_tensor_.find(&tensor);
  if (found == by_tensor_.end()) {
    *outer_maximum = OuterMaximumFor(*spec, tensor);
    return;
  }
  Shared& shared = *found->second;
  std::call_once(shared.once, [&shared] {
    for (const files::FileTensor* const member : shared.group->tensors) {
      const std::shared_ptr<const void> hold = member->Hold();
      shared.maximum =
          std::max(shared.maximum,
                   OuterMaximum(*ElementTypeOf(member->dtype), member->shape,
                                /*block_size=*/{}, member->data)[0]);
    }
  });
  if (HasOuterScales(*spec)) {
    *outer_maximum = {shared.maximum};
  } else if (shared.maximum > 0) {
    spec->set_method(v1::CALIBRATION_METHOD_FIXED_RANGE);
    spec->set_range_min(-shared.maximum);
    spec->set_range_max(shared.maximum);
  }
}

}  // namespace quantd
