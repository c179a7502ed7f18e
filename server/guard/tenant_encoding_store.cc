#include "server/guard/tenant_encoding_store.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

absl::Status NotFound(const EncodingKey& key) {
  return core::EncodingNotFoundError(key.model, key.revision, key.tensor);
}

}  // namespace

TenantEncodingStore::TenantEncodingStore(
    EncodingStore* inner, std::shared_ptr<const Principal> principal)
    : inner_(inner), principal_(std::move(principal)) {}

absl::StatusOr<StoredEncoding> TenantEncodingStore::Get(
    const EncodingKey& key) {
  return principal_->MaySee(key.model) ? inner_->Get(key) : NotFound(key);
}

absl::optional<StoredEncoding> TenantEncodingStore::Cached(
    const EncodingKey& key) {
  return principal_->MaySee(key.model) ? inner_->Cached(key) : absl::nullopt;
}

absl::StatusOr<StoredEncoding> TenantEncodingStore::Put(
    const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
    const Precondition& precondition) {
  if (absl::Status s = principal_->CheckWrite(key.model); !s.ok()) return s;
  return inner_->Put(key, std::move(encoding), precondition);
}

absl::Status TenantEncodingStore::Delete(const EncodingKey& key,
                                         const Precondition& precondition) {
  return principal_->MaySee(key.model) ? inner_->Delete(key, precondition)
                                       : NotFound(key);
}

absl::StatusOr<std::vector<EncodingListEntry>>
TenantEncodingStore::ListEncodings(absl::string_view model,
                                   absl::string_view revision,
                                   absl::string_view after, int limit) {
  if (!principal_->MaySee(model)) return std::vector<EncodingListEntry>();
  return inner_->ListEncodings(model, revision, after, limit);
}

absl::StatusOr<std::vector<ModelListEntry>> TenantEncodingStore::ListModels(
    absl::string_view after, int limit) {
  // What the caller may see lies together in the order of names, so that a
  // page ends where that does: how many others there are cannot be told.
  const std::string before = principal_->BeforeModels();
  absl::StatusOr<std::vector<ModelListEntry>> models =
      inner_->ListModels(std::max<absl::string_view>(after, before), limit);
  if (!models.ok()) return models;
  const auto hidden = std::find_if(models->begin(), models->end(),
                                   [this](const ModelListEntry& entry) {
                                     return !principal_->MaySee(entry.model);
                                   });
  models->erase(hidden, models->end());
  return models;
}

absl::StatusOr<std::vector<RevisionListEntry>>
TenantEncodingStore::ListRevisions(absl::string_view model,
                                   absl::string_view after, int limit) {
  if (!principal_->MaySee(model)) return std::vector<RevisionListEntry>();
  return inner_->ListRevisions(model, after, limit);
}

absl::optional<int64_t> TenantEncodingStore::ForeignVersion() {
  return inner_->ForeignVersion();
}

absl::Status TenantEncodingStore::Ping() { return inner_->Ping(); }

}  // namespace quantd::server
