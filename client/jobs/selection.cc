#include "client/jobs/selection.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/safetensors.h"
#include "client/jobs/revision_name.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"
#include "client/models/text.h"

namespace quantd::jobs {

namespace {

using Tensors = std::vector<const files::FileTensor*>;

std::vector<std::string> TensorNamesOf(const Tensors& tensors) {
  std::vector<std::string> names;
  for (const files::FileTensor* const tensor : tensors) {
    names.push_back(tensor->name);
  }
  return names;
}

size_t CountMatches(const std::string& pattern,
                    const std::vector<std::string>& names) {
  return static_cast<size_t>(std::count_if(
      names.begin(), names.end(),
      [&](const std::string& name) { return MatchesGlob(pattern, name); }));
}

absl::Status NoMatchError(absl::string_view option, absl::string_view pattern,
                          const std::vector<std::string>& names) {
  return ArgumentInvalidError(absl::StrCat(
      "expected tensors for ", option, " \"", pattern, "\", got none among ",
      names.size(),
      names.empty() ? "" : absl::StrCat(", such as \"", names[0], "\"")));
}

// `option` has the pattern; it must match one of `candidates`, which are those
// of `all` that can be taken.
absl::Status CheckPattern(absl::string_view option, const std::string& pattern,
                          const Tensors& candidates, const Tensors& all,
                          absl::string_view why_not) {
  if (CountMatches(pattern, TensorNamesOf(candidates)) > 0)
    return absl::OkStatus();
  const std::vector<std::string> names = TensorNamesOf(all);
  const size_t count = CountMatches(pattern, names);
  if (count == 0) return NoMatchError(option, pattern, names);
  return ArgumentInvalidError(absl::StrCat("expected tensors to take for ",
                                           option, " \"", pattern, "\", got ",
                                           count, why_not));
}

// Checks that each of `patterns` takes a name: the first that matches a name
// takes it. One that takes none would be dropped without a word.
absl::Status CheckEachTakes(absl::string_view option,
                            const std::vector<std::string>& patterns,
                            const std::vector<std::string>& names) {
  std::vector<bool> takes(patterns.size(), false);
  for (const std::string& name : names) {
    const auto first = std::find_if(
        patterns.begin(), patterns.end(),
        [&](const std::string& pattern) { return MatchesGlob(pattern, name); });
    if (first != patterns.end()) {
      takes[static_cast<size_t>(first - patterns.begin())] = true;
    }
  }
  const auto idle = std::find(takes.begin(), takes.end(), false);
  if (idle == takes.end()) return absl::OkStatus();
  const std::string& pattern =
      patterns[static_cast<size_t>(idle - takes.begin())];
  return ArgumentInvalidError(absl::StrCat(
      "expected tensors to take for ", option, " \"", pattern,
      "\", got none: earlier patterns take all ", CountMatches(pattern, names),
      " that it matches; the first pattern that matches counts, so put the "
      "narrower one first"));
}

}  // namespace

absl::StatusOr<Tensors> SelectTensors(
    const std::vector<const TensorInput*>& inputs, const TensorFilter& filter,
    const SpecSet* specs) {
  // The type and the rank are right, whatever the name.
  TensorFilter any_name = filter;
  any_name.include.clear();
  any_name.exclude.clear();
  Tensors all;
  Tensors candidates;
  Tensors taken;
  for (const TensorInput* const input : inputs) {
    for (const files::FileTensor& tensor : input->tensors()) {
      all.push_back(&tensor);
      if (any_name.Takes(tensor)) candidates.push_back(&tensor);
      if (filter.Takes(tensor)) taken.push_back(&tensor);
    }
  }
  const std::string kind = absl::StrCat(
      "of floats", filter.all ? ""
                              : absl::StrCat(" with at least ", filter.min_rank,
                                             " dimensions"));
  const absl::string_view hint =
      filter.all ? "" : "; --all takes floats of any rank";
  for (const std::string& pattern : filter.include) {
    if (absl::Status s =
            CheckPattern("--include", pattern, candidates, all,
                         absl::StrCat(", none of them ", kind, hint));
        !s.ok()) {
      return s;
    }
  }
  for (const std::string& pattern : filter.exclude) {
    if (absl::Status s = CheckPattern("--exclude", pattern, all, all, "");
        !s.ok()) {
      return s;
    }
  }
  if (specs != nullptr) {
    std::vector<std::string> patterns;
    for (const SpecSet::Override& entry : specs->overrides) {
      // The command may replace a line of a mixture.
      const bool is_replaced =
          entry.is_from_file &&
          std::any_of(specs->overrides.data(), &entry,
                      [&entry](const SpecSet::Override& earlier) {
                        return !earlier.is_from_file &&
                               MatchesGlob(earlier.pattern, entry.pattern);
                      });
      if (!is_replaced) patterns.push_back(entry.pattern);
      if (absl::Status s = CheckPattern(
              "--spec", entry.pattern, taken, all,
              absl::StrCat(", which other options leave out, or none of them ",
                           kind, hint));
          !s.ok()) {
        return s;
      }
    }
    if (absl::Status s =
            CheckEachTakes("--spec", patterns, TensorNamesOf(taken));
        !s.ok()) {
      return s;
    }
    taken.erase(std::remove_if(taken.begin(), taken.end(),
                               [&](const files::FileTensor* tensor) {
                                 return specs->For(tensor->name) == nullptr;
                               }),
                taken.end());
  }
  if (taken.empty()) {
    return ArgumentInvalidError(absl::StrCat(
        "expected tensors ", kind, ", got none among ", all.size(), hint));
  }
  return taken;
}

absl::StatusOr<Tensors> SelectMeasurable(const TensorInput& input,
                                         const TensorFilter& filter,
                                         const SpecSet* specs,
                                         std::vector<std::string>* left_out) {
  absl::StatusOr<Tensors> taken = SelectTensors({&input}, filter, specs);
  if (!taken.ok()) return taken;
  Tensors measurable;
  for (const files::FileTensor* const tensor : *taken) {
    if (absl::c_linear_search(tensor->shape, 0)) {
      left_out->push_back(tensor->name);
    } else {
      measurable.push_back(tensor);
    }
  }
  if (measurable.empty()) {
    return ArgumentInvalidError(
        absl::StrCat("expected tensors with elements, got none among ",
                     taken->size(), ", such as ", taken->front()->name));
  }
  return measurable;
}

absl::Status CheckStoredPatterns(const char* option,
                                 const std::vector<std::string>& patterns,
                                 Stored stored, const RevisionName& name,
                                 Client* client, PatternRule rule) {
  if (patterns.empty()) return absl::OkStatus();
  std::vector<std::string> names;
  absl::Status status;
  if (stored == Stored::kStatistics) {
    const absl::StatusOr<std::vector<v1::StatisticsEntry>> entries =
        client->ListStatistics(name.model, name.revision);
    status = entries.status();
    if (status.ok()) {
      for (const auto& entry : *entries) names.push_back(entry.tensor());
    }
  } else {
    const absl::StatusOr<std::vector<v1::StoredEncoding>> encodings =
        client->ListEncodings(name.model, name.revision);
    status = encodings.status();
    if (status.ok()) {
      for (const auto& entry : *encodings) {
        names.push_back(entry.name().tensor());
      }
    }
  }
  // The command itself says what is wrong with an empty revision.
  if (absl::IsPermissionDenied(status) || (status.ok() && names.empty())) {
    return absl::OkStatus();
  }
  if (!status.ok()) return status;
  for (const std::string& pattern : patterns) {
    if (CountMatches(pattern, names) == 0) {
      return NoMatchError(option, pattern, names);
    }
  }
  return rule == PatternRule::kFirstTakes
             ? CheckEachTakes(option, patterns, names)
             : absl::OkStatus();
}

std::string OneScaleText(const SpecTemplate& spec,
                         const files::FileTensor& tensor) {
  const Granularity& granularity = spec.granularity;
  const bool is_group = granularity.kind == Granularity::Kind::kGroup;
  if (tensor.shape.size() != 1 || tensor.shape[0] < 2 ||
      (!is_group && granularity.kind != Granularity::Kind::kPerChannel)) {
    return "";
  }
  return absl::StrCat("tensor ", tensor.name,
                      ": one scale for all of it, not one for each ",
                      is_group ? absl::StrCat("group of ", granularity.group,
                                              "; block=", granularity.group,
                                              " makes such of one dimension")
                               : "channel, as it has one dimension");
}

std::string CastCodesText(const TensorInput& input) {
  const auto& found = input.onnx_cast_codes();
  if (found.empty()) return "";
  return absl::StrCat(
      "the model makes floats of the integers ", found[0].codes,
      " by a Cast and a Mul with ", found[0].scales,
      found.size() == 1
          ? ""
          : absl::StrCat(", and of ", CountText(found.size() - 1), " more"),
      ": if they are codes, these weights are quantized already, and are left "
      "as they are");
}

}  // namespace quantd::jobs
