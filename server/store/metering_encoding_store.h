// Measures another store.

#ifndef QUANTD_SERVER_STORE_METERING_ENCODING_STORE_H_
#define QUANTD_SERVER_STORE_METERING_ENCODING_STORE_H_

#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "server/metrics/metrics.h"
#include "server/store/encoding_store.h"

namespace quantd::server {

// Passes every call on, and its latency and outcome to Metrics. An encoding
// that is not there and an etag that does not match are answers, not errors.
// Thread-safe.
class MeteringEncodingStore : public EncodingStore {
 public:
  // `metrics` must outlive this.
  MeteringEncodingStore(std::unique_ptr<EncodingStore> inner, Metrics* metrics);
  ~MeteringEncodingStore() override;

  absl::StatusOr<StoredEncoding> Read(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override;
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
  const std::unique_ptr<EncodingStore> inner_;
  Metrics* const metrics_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_METERING_ENCODING_STORE_H_
