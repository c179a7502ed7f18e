#include "client/cli/tie_options.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cpp/errors.h"
#include "client/jobs/file_ties.h"
#include "client/jobs/revision_name.h"
#include "client/models/text.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {

void AddTieOptions(Command* command, absl::string_view what,
                   jobs::TieFlags* flags) {
  const std::string help = absl::StrCat(
      what,
      ", such as '{layer}.self_attn.{q,k,v}_proj.weight': {A,B} is one of "
      "these "
      "texts, {NAME} what a group has in common, * anything; of several "
      "options "
      "the first that matches counts. Before the defaults: q/k/v, gate/up and "
      "w1/w3, which runtimes fuse");
  command->AddOption("--tie", &flags->patterns, "PATTERN", help.c_str());
  command->AddFlag("--no-ties", &flags->no_defaults,
                   "Leave out the defaults of --tie");
}

absl::StatusOr<std::vector<NamedTies>> AddStoredTies(
    const jobs::TieFlags& flags, const std::vector<EncodingSpec>& specs,
    const jobs::RevisionName& name, Client* client,
    absl::FunctionRef<const EncodingSpec*(const std::string& name)> spec_of,
    google::protobuf::RepeatedPtrField<v1::TiedTensors>* ties) {
  const absl::StatusOr<TieOptions> options = flags.Parse();
  if (!options.ok()) return options.status();
  const bool matters =
      !options->patterns.empty() ||
      (options->has_defaults &&
       std::any_of(specs.begin(), specs.end(), [](const EncodingSpec& spec) {
         return HasOuterScales(spec);
       }));
  if (!matters) return std::vector<NamedTies>();
  const absl::StatusOr<std::vector<v1::StatisticsEntry>> entries =
      client->ListStatistics(name.model, name.revision);
  if (absl::IsPermissionDenied(entries.status()) && options->patterns.empty()) {
    return std::vector<NamedTies>();
  }
  if (!entries.ok()) return entries.status();
  std::vector<std::string> names;
  names.reserve(entries->size());
  for (const v1::StatisticsEntry& entry : *entries) {
    names.push_back(entry.tensor());
  }
  absl::StatusOr<std::vector<NamedTies>> groups =
      FindNamedTies(*options, names, spec_of);
  if (!groups.ok()) return groups;
  for (const NamedTies& group : *groups) {
    v1::TiedTensors* const added = ties->Add();
    added->mutable_tensors()->Add(group.tensors.begin(), group.tensors.end());
    added->set_one_encoding(group.one_encoding);
  }
  return groups;
}

void PrintTies(const std::vector<NamedTies>& ties, const Session& session) {
  if (ties.empty() || session.quiet) return;
  session.PrintError(absl::StrCat(
      "quantctl: tensors that share a scale: ", ties[0].label,
      ties.size() > 1
          ? absl::StrCat(" and ", CountText(ties.size() - 1), " more groups")
          : "",
      "; see --tie and --no-ties"));
}

Json TiesJson(const std::vector<NamedTies>& ties) {
  Json list = Json::array();
  for (const NamedTies& group : ties) {
    list.push_back({{"label", group.label}, {"tied_tensors", group.tensors}});
  }
  return list;
}

}  // namespace quantd::cli
