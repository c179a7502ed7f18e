#include "client/jobs/spec_options.h"

#include <cstddef>
#include <iterator>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/errors.h"
#include "client/models/spec_syntax.h"

namespace quantd::jobs {
namespace {

// The option of a spec that may name a file.
constexpr char kEntries[] = ":entries=";

}  // namespace

absl::Status CheckNoGgufType(const SpecTemplate& spec) {
  if (spec.gguf_type.empty()) return absl::OkStatus();
  return ArgumentInvalidError(absl::StrCat(
      "expected a spec of the server's formats, got ", spec.gguf_type,
      ", which quantize -o OUT.gguf, sweep FILE and evaluate alone take"));
}

absl::StatusOr<SpecSet> SpecOptions::ParseSet() const {
  SpecSet set;
  bool has_base = false;
  std::vector<std::string> texts = specs;
  if (texts.empty()) texts = {kDefaultSpec};
  for (const std::string& text : texts) {
    const absl::Status status = AddSpec(text, &set, &has_base);
    if (!status.ok()) return status;
  }
  if (!takes_gguf_types) {
    absl::Status status = CheckNoGgufType(set.base);
    for (const SpecSet::Override& entry : set.overrides) {
      status.Update(CheckNoGgufType(entry.spec));
    }
    if (!status.ok()) return status;
  }
  set.has_base = has_base;
  return set;
}

std::vector<std::string> SpecOptions::Files() const {
  // Numbers in the place of a file are no file's name, as a rule, and do no
  // harm.
  std::vector<std::string> names;
  for (const std::string& spec : specs) {
    if (absl::StartsWith(spec, "@")) {
      names.push_back(spec.substr(1));
      continue;
    }
    const size_t entries = spec.find(kEntries);
    if (entries == std::string::npos) continue;
    const size_t begin = entries + std::size(kEntries) - 1;
    names.push_back(spec.substr(begin, spec.find(':', begin) - begin));
  }
  return names;
}

}  // namespace quantd::jobs
