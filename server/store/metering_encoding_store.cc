#include "server/store/metering_encoding_store.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "server/store/metering.h"

namespace quantd::server {
namespace {

// Each piece is a get.
class MeteringReader final : public EncodingReader {
 public:
  MeteringReader(std::unique_ptr<EncodingReader> inner, Metrics* metrics)
      : inner_(std::move(inner)), metrics_(metrics) {}

  const StoredEncoding& stored() const override { return inner_->stored(); }
  int64_t scale_count() const override { return inner_->scale_count(); }
  bool has_zero_points() const override { return inner_->has_zero_points(); }
  absl::StatusOr<absl::optional<ScalePiece>> Next() override {
    return Measure(metrics_, StoreOperation::kGet,
                   [&] { return inner_->Next(); });
  }

 private:
  const std::unique_ptr<EncodingReader> inner_;
  Metrics* const metrics_;
};

// Each piece is a put.
class MeteringWriter final : public EncodingWriter {
 public:
  MeteringWriter(std::unique_ptr<EncodingWriter> inner, Metrics* metrics)
      : inner_(std::move(inner)), metrics_(metrics) {}

  absl::Status Add(const ScalePiece& piece) override {
    return Measure(metrics_, StoreOperation::kPut,
                   [&] { return inner_->Add(piece); });
  }
  absl::StatusOr<StoredEncoding> Finish() override {
    return Measure(metrics_, StoreOperation::kPut,
                   [&] { return inner_->Finish(); });
  }

 private:
  const std::unique_ptr<EncodingWriter> inner_;
  Metrics* const metrics_;
};

}  // namespace

MeteringEncodingStore::MeteringEncodingStore(
    std::unique_ptr<EncodingStore> inner, Metrics* metrics)
    : inner_(std::move(inner)), metrics_(metrics) {}

MeteringEncodingStore::~MeteringEncodingStore() = default;

absl::StatusOr<StoredEncoding> MeteringEncodingStore::Read(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  return Measure(metrics_, StoreOperation::kGet,
                 [&] { return inner_->Read(key, proceed); });
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

absl::StatusOr<std::unique_ptr<EncodingReader>>
MeteringEncodingStore::OpenReader(const EncodingKey& key) {
  absl::StatusOr<std::unique_ptr<EncodingReader>> reader = Measure(
      metrics_, StoreOperation::kGet, [&] { return inner_->OpenReader(key); });
  if (!reader.ok()) return reader;
  return std::make_unique<MeteringReader>(*std::move(reader), metrics_);
}

absl::StatusOr<std::unique_ptr<EncodingWriter>>
MeteringEncodingStore::OpenWriter(const EncodingKey& key,
                                  std::shared_ptr<const core::Encoding> outline,
                                  bool has_zero_points,
                                  const Precondition& precondition) {
  absl::StatusOr<std::unique_ptr<EncodingWriter>> writer = inner_->OpenWriter(
      key, std::move(outline), has_zero_points, precondition);
  if (!writer.ok()) return writer;
  return std::make_unique<MeteringWriter>(*std::move(writer), metrics_);
}

absl::StatusOr<PublishedRevision> MeteringEncodingStore::PublishRevision(
    absl::string_view model, absl::string_view source, absl::string_view target,
    bool keep_others) {
  return Measure(metrics_, StoreOperation::kPut, [&] {
    return inner_->PublishRevision(model, source, target, keep_others);
  });
}

absl::StatusOr<DeletedRows> MeteringEncodingStore::DeleteRevision(
    absl::string_view model, absl::string_view revision) {
  return Measure(metrics_, StoreOperation::kDelete,
                 [&] { return inner_->DeleteRevision(model, revision); });
}

absl::StatusOr<DeletedRows> MeteringEncodingStore::DeleteModel(
    absl::string_view model) {
  return Measure(metrics_, StoreOperation::kDelete,
                 [&] { return inner_->DeleteModel(model); });
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
