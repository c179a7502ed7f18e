// Encodings in a table of a SQL database.

#ifndef QUANTD_SERVER_STORE_SQL_ENCODING_STORE_H_
#define QUANTD_SERVER_STORE_SQL_ENCODING_STORE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "server/store/encoding_store.h"
#include "server/store/sql_database.h"

namespace quantd::server {

// A row carries a checksum over all of it; one that fails is STORE_CORRUPT, and
// putting or deleting it repairs the store. Large encodings have their scales
// in encoding_pieces.h. Thread-safe.
class SqlEncodingStore : public EncodingStore {
 public:
  explicit SqlEncodingStore(std::shared_ptr<SqlDatabase> database);

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

  // Reads every row whole, and tells of those that are damaged, STORE_CORRUPT
  // each. Answers how many rows there are.
  // Errors: STORE_UNAVAILABLE; STORE_CORRUPT where the database can't go on.
  absl::StatusOr<int64_t> Check(
      absl::FunctionRef<void(const absl::Status&)> damaged);

 private:
  const std::shared_ptr<SqlDatabase> database_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_SQL_ENCODING_STORE_H_
