// The encodings that one run stores: readers see none of them, or all.

#ifndef QUANTD_CLIENT_JOBS_DRAFT_REVISION_H_
#define QUANTD_CLIENT_JOBS_DRAFT_REVISION_H_

#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/client.h"
#include "client/jobs/revision_name.h"

namespace quantd::jobs {

// A revision of its own until it is published; see "Drafts" in
// client/README.md. Immutable, thread-safe.
class DraftRevision {
 public:
  // `target` is the model and the revision that get the encodings in the end.
  // Runs with the same key, such as the parts of one, share the draft.
  DraftRevision(RevisionName target, absl::string_view key);

  // The name under which the run stores the encoding of a tensor.
  TensorName NameOf(const std::string& tensor) const {
    return draft_.NameOf(tensor);
  }
  // The name of the revision.
  const std::string& revision() const { return draft_.revision; }

  // The tensors that it has.
  // Errors: of the client.
  absl::StatusOr<absl::flat_hash_set<std::string>> Tensors(
      Client* client) const;
  // The tensors that the target has.
  // Errors: of the client.
  absl::StatusOr<absl::flat_hash_set<std::string>> TargetTensors(
      Client* client) const;

  // Makes the encodings of the draft those of the target, all at once; the
  // target keeps those of other tensors. Nothing happens where the draft has
  // none: another process with the same key has published them.
  // Errors: of the client.
  absl::Status Publish(Client* client) const;

  // Deletes the draft, if there is one.
  // Errors: of the client.
  absl::Status Delete(Client* client) const;

 private:
  const RevisionName target_;
  const RevisionName draft_;
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_DRAFT_REVISION_H_
