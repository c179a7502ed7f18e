// A store as one caller sees it.

#ifndef QUANTD_SERVER_GUARD_TENANT_ENCODING_STORE_H_
#define QUANTD_SERVER_GUARD_TENANT_ENCODING_STORE_H_

#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "server/guard/access_list.h"
#include "server/store/encoding_store.h"

namespace quantd::server {

// A model that the caller may not see does not exist for it: reading and
// deleting answer as for a name that was never stored, without asking the
// store, and lists leave it out. A write of the caller counts for it, and keeps
// to the quotas of the access file. Thread-safe.
class TenantEncodingStore : public EncodingStore {
 public:
  // `inner` must outlive this.
  TenantEncodingStore(EncodingStore* inner,
                      std::shared_ptr<const Principal> principal);

  absl::StatusOr<StoredEncoding> Read(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override;
  absl::optional<StoredEncoding> Cached(const EncodingKey& key) override;
  // Errors: SCOPE_MISSING without calibrate, MODEL_DENIED whether or not there
  // is anything, as well.
  absl::StatusOr<StoredEncoding> Put(
      const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
      const Precondition& precondition) override;
  absl::Status Delete(const EncodingKey& key,
                      const Precondition& precondition) override;
  absl::StatusOr<std::unique_ptr<EncodingReader>> OpenReader(
      const EncodingKey& key) override;
  absl::StatusOr<std::unique_ptr<EncodingWriter>> OpenWriter(
      const EncodingKey& key, std::shared_ptr<const core::Encoding> outline,
      bool has_zero_points, const Precondition& precondition) override;
  absl::StatusOr<PublishedRevision> PublishRevision(absl::string_view model,
                                                    absl::string_view source,
                                                    absl::string_view target,
                                                    bool keep_others) override;
  absl::StatusOr<DeletedRows> DeleteRevision(
      absl::string_view model, absl::string_view revision) override;
  absl::StatusOr<DeletedRows> DeleteModel(absl::string_view model) override;
  absl::StatusOr<std::vector<EncodingListEntry>> ListEncodings(
      absl::string_view model, absl::string_view revision,
      absl::string_view after, int limit) override;
  absl::StatusOr<std::vector<ModelListEntry>> ListModels(const NameRange& range,
                                                         int limit) override;
  absl::StatusOr<std::vector<RevisionListEntry>> ListRevisions(
      absl::string_view model, absl::string_view after, int limit) override;
  absl::optional<int64_t> ForeignVersion() override;
  absl::Status Ping() override;

 private:
  EncodingStore* const inner_;
  const std::shared_ptr<const Principal> principal_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_TENANT_ENCODING_STORE_H_
