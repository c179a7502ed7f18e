#include "client/jobs/draft_revision.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/jobs/revision_name.h"

namespace quantd::jobs {
namespace {

absl::StatusOr<absl::flat_hash_set<std::string>> TensorsOf(
    const RevisionName& name, Client* client) {
  const absl::StatusOr<std::vector<v1::StoredEncoding>> list =
      client->ListEncodings(name.model, name.revision);
  if (!list.ok()) return list.status();
  absl::flat_hash_set<std::string> tensors;
  for (const v1::StoredEncoding& stored : *list) {
    tensors.insert(stored.name().tensor());
  }
  return tensors;
}

}  // namespace

DraftRevision::DraftRevision(RevisionName target, absl::string_view key)
    : target_(std::move(target)),
      draft_{target_.model, absl::StrCat(target_.revision, ".draft-", key)} {}

absl::StatusOr<absl::flat_hash_set<std::string>> DraftRevision::Tensors(
    Client* client) const {
  return TensorsOf(draft_, client);
}

absl::StatusOr<absl::flat_hash_set<std::string>> DraftRevision::TargetTensors(
    Client* client) const {
  return TensorsOf(target_, client);
}

absl::Status DraftRevision::Publish(Client* client) const {
  const absl::Status status =
      client
          ->PublishRevision(target_.model, draft_.revision, target_.revision,
                            /*keep_others=*/true)
          .status();
  // Also where its answer was lost.
  if (ErrorReason(status) == "REVISION_NOT_FOUND") return absl::OkStatus();
  return status;
}

absl::Status DraftRevision::Delete(Client* client) const {
  const absl::Status status =
      client->DeleteRevision(draft_.model, draft_.revision).status();
  return ErrorReason(status) == "REVISION_NOT_FOUND" ? absl::OkStatus()
                                                     : status;
}

}  // namespace quantd::jobs
