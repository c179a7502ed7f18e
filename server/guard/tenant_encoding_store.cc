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

absl::Status EncodingNotFound(const EncodingKey& key) {
  return core::EncodingNotFoundError(key.model, key.revision, key.tensor);
}

}  // namespace

TenantEncodingStore::TenantEncodingStore(
    EncodingStore* inner, std::shared_ptr<const Principal> principal)
    : inner_(inner), principal_(std::move(principal)) {}

absl::StatusOr<StoredEncoding> TenantEncodingStore::Read(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  return principal_->MaySee(key.model) ? inner_->Read(key, proceed)
                                       : EncodingNotFound(key);
}

absl::optional<StoredEncoding> TenantEncodingStore::Cached(
    const EncodingKey& key) {
  return principal_->MaySee(key.model) ? inner_->Cached(key) : absl::nullopt;
}

absl::StatusOr<StoredEncoding> TenantEncodingStore::Put(
    const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
    const Precondition& precondition) {
  if (absl::Status s = principal_->CheckWrite(key.model); !s.ok()) return s;
  return inner_->Put(key, std::move(encoding),
                     {precondition.if_match, principal_->AccountFor(key.model),
                      precondition.provenance});
}

absl::Status TenantEncodingStore::Delete(const EncodingKey& key,
                                         const Precondition& precondition) {
  return principal_->MaySee(key.model) ? inner_->Delete(key, precondition)
                                       : EncodingNotFound(key);
}

absl::StatusOr<std::unique_ptr<EncodingReader>> TenantEncodingStore::OpenReader(
    const EncodingKey& key) {
  if (!principal_->MaySee(key.model)) return EncodingNotFound(key);
  return inner_->OpenReader(key);
}

absl::StatusOr<std::unique_ptr<EncodingWriter>> TenantEncodingStore::OpenWriter(
    const EncodingKey& key, std::shared_ptr<const core::Encoding> outline,
    bool has_zero_points, const Precondition& precondition) {
  if (absl::Status s = principal_->CheckWrite(key.model); !s.ok()) return s;
  return inner_->OpenWriter(
      key, std::move(outline), has_zero_points,
      {precondition.if_match, principal_->AccountFor(key.model),
       precondition.provenance});
}

absl::StatusOr<PublishedRevision> TenantEncodingStore::PublishRevision(
    absl::string_view model, absl::string_view source, absl::string_view target,
    bool keep_others) {
  if (absl::Status s = principal_->CheckWrite(model); !s.ok()) return s;
  return inner_->PublishRevision(model, source, target, keep_others);
}

absl::StatusOr<DeletedRows> TenantEncodingStore::DeleteRevision(
    absl::string_view model, absl::string_view revision) {
  if (!principal_->MaySee(model)) {
    return core::RevisionNotFoundError(model, revision,
                                       "encodings and no statistics");
  }
  return inner_->DeleteRevision(model, revision);
}

absl::StatusOr<DeletedRows> TenantEncodingStore::DeleteModel(
    absl::string_view model) {
  if (!principal_->MaySee(model)) return core::ModelNotFoundError(model);
  return inner_->DeleteModel(model);
}

absl::StatusOr<std::vector<EncodingListEntry>>
TenantEncodingStore::ListEncodings(absl::string_view model,
                                   absl::string_view revision,
                                   absl::string_view after, int limit) {
  if (!principal_->MaySee(model)) return std::vector<EncodingListEntry>();
  return inner_->ListEncodings(model, revision, after, limit);
}

absl::StatusOr<std::vector<ModelListEntry>> TenantEncodingStore::ListModels(
    const NameRange& range, int limit) {
  // Models that the caller may see lie together in the order of names, and
  // nothing else is read: neither the answer nor the time it takes tells how
  // many others there are.
  const std::string first = principal_->BeforeModels();
  const std::string last = principal_->AfterModels();
  NameRange seen{std::max<absl::string_view>(range.after, first),
                 range.before.empty() ? last : range.before};
  if (!last.empty())
    seen.before = std::min<absl::string_view>(seen.before, last);
  if (!seen.before.empty() && seen.after >= seen.before) {
    return std::vector<ModelListEntry>();
  }
  absl::StatusOr<std::vector<ModelListEntry>> models =
      inner_->ListModels(seen, limit);
  if (!models.ok()) return models;
  // Names that are damaged may lie there, too.
  const auto hidden = std::remove_if(models->begin(), models->end(),
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
