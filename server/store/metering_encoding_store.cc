#include "server/store/metering_encoding_store.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "server/store/metering.h"

namespace quantd::server {
MeteringEncodingStore::MeteringEncodingStore(
    std::unique_ptr<EncodingStore> inner, Metrics* metrics)
    : inner_(std::move(inner)), metrics_(metrics) {}

MeteringEncodingStore::~MeteringEncodingStore() = default;

absl::StatusOr<StoredEncoding> MeteringEncodingStore::Get(
    const EncodingKey& key) {
  return Measure(metrics_, StoreOperation::kGet,
                 [&] { return inner_->Get(key); });
}

absl::StatusOr<StoredEncoding> MeteringEncodingStore::Put(
    const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
    const Precondition& precondition) {
  return Measure(metrics_, StoreOperation::kPut, [&] {
    return inner_->Put(key, std::move(encoding), precondition);
  });
}

absl::Status MeteringEncodingStore::Delete(const EncodingKey& key,
                                           const Precondition& precondition) {
  return Measure(metrics_, StoreOperation::kDelete,
                 [&] { return inner_->Delete(key, precondition); });
}

absl::StatusOr<std::vector<EncodingListEntry>>
MeteringEncodingStore::ListEncodings(absl::string_view model,
                                     absl::string_view revision,
                                     absl::string_view after, int limit) {
  return Measure(metrics_, StoreOperation::kList, [&] {
    return inner_->ListEncodings(model, revision, after, limit);
  });
}

absl::StatusOr<std::vector<ModelListEntry>> MeteringEncodingStore::ListModels(
    const NameRange& range, int limit) {
  return Measure(metrics_, StoreOperation::kList,
                 [&] { return inner_->ListModels(range, limit); });
}

absl::StatusOr<std::vector<RevisionListEntry>>
MeteringEncodingStore::ListRevisions(absl::string_view model,
                                     absl::string_view after, int limit) {
  return Measure(metrics_, StoreOperation::kList,
                 [&] { return inner_->ListRevisions(model, after, limit); });
}

absl::optional<int64_t> MeteringEncodingStore::ForeignVersion() {
  return inner_->ForeignVersion();
}

absl::Status MeteringEncodingStore::Ping() {
  return Measure(metrics_, StoreOperation::kPing,
                 [&] { return inner_->Ping(); });
}

}  // namespace quantd::server
