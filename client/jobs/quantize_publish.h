// How the encodings of `quantctl quantize` become visible.

#ifndef QUANTD_CLIENT_JOBS_QUANTIZE_PUBLISH_H_
#define QUANTD_CLIENT_JOBS_QUANTIZE_PUBLISH_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/jobs/draft_revision.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"

namespace quantd::jobs {

// The key of the draft of a run. Parts of one run share theirs; any other run
// has its own, so that equal runs at once are not in each other's way. One that
// goes on where parts stopped goes on with their draft.
// Errors: of the client.
absl::StatusOr<std::string> DraftKeyOf(const QuantizeOptions& options,
                                       const QuantizePlan& plan,
                                       Client* client);

// Before a run costs anything: whether the caller may do what PublishDraft
// does, and whether the encodings of what is kept can be published. Errors: of
// the client, FILE_INCOMPLETE.
absl::Status CheckDraft(const QuantizeOptions& options,
                        const QuantizePlan& plan, const DraftRevision& draft,
                        Client* client);

// Makes the encodings of all shards visible. Those that the draft lacks come
// from the files, where these have them. Sets `is_lacking` and `is_published`.
// Requires: the shards are in their places.
// Errors: of files and of the client, FILE_INCOMPLETE.
absl::Status PublishDraft(const QuantizeOptions& options,
                          const DraftRevision& draft, Client* client,
                          QuantizePlan* plan);

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_QUANTIZE_PUBLISH_H_
