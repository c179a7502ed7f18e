#include "client/cli/draft_revision.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cli/tensor_options.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"

namespace quantd::cli {

DraftRevision::DraftRevision(NameOptions target, absl::string_view key)
    : target_(std::move(target)),
      draft_{target_.model, absl::StrCat(target_.revision, ".draft-", key)} {}

absl::Status DraftRevision::Check(Client* client) const {
  return client->ListEncodings(target_.model, target_.revision).status();
}

absl::StatusOr<absl::flat_hash_set<std::string>> DraftRevision::Tensors(
    Client* client) const {
  const absl::StatusOr<std::vector<v1::StoredEncoding>> list =
      client->ListEncodings(draft_.model, draft_.revision);
  if (!list.ok()) return list.status();
  absl::flat_hash_set<std::string> tensors;
  for (const v1::StoredEncoding& stored : *list) {
    tensors.insert(stored.name().tensor());
  }
  return tensors;
}

absl::Status DraftRevision::Publish(
    const absl::flat_hash_set<std::string>& tensors, Client* client) const {
  if (tensors.empty()) return absl::OkStatus();
  const absl::StatusOr<std::vector<v1::StoredEncoding>> there =
      client->ListEncodings(target_.model, target_.revision);
  if (!there.ok()) return there.status();
  for (const v1::StoredEncoding& stored : *there) {
    const std::string& tensor = stored.name().tensor();
    if (tensors.contains(tensor)) continue;
    const absl::StatusOr<v1::StoredEncoding> read =
        client->GetEncoding(target_.NameOf(tensor));
    // One that was deleted meanwhile is not to come back.
    if (absl::IsNotFound(read.status())) continue;
    if (!read.ok()) return read.status();
    const absl::Status put =
        client->PutEncoding(draft_.NameOf(tensor), read->encoding(), "")
            .status();
    if (!put.ok()) return put;
  }
  const absl::Status status =
      client->PublishRevision(target_.model, draft_.revision, target_.revision)
          .status();
  // Its answer was lost, or another process published it meanwhile.
  if (ErrorReason(status) == "REVISION_NOT_FOUND") return absl::OkStatus();
  return status;
}

}  // namespace quantd::cli
