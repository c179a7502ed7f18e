// The store of encodings, as callers see it.

#ifndef QUANTD_SERVER_STORE_ENCODING_STORE_H_
#define QUANTD_SERVER_STORE_ENCODING_STORE_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/types/encoding.h"
#include "server/wire/encoding_key.h"

namespace quantd::server {

// Limit on what a scope may hold. A scope is all models ("models:*"), those of
// a prefix ("models:acme/"), or what a caller wrote last
// ("principal:acme-train").
struct Quota {
  std::string scope;
  // Bytes are those of names of models and tensors and of contents. Rows are
  // encodings, and statistics of one source each.
  int64_t max_bytes = std::numeric_limits<int64_t>::max();
  int64_t max_rows = std::numeric_limits<int64_t>::max();
};

// Bytes and rows that a scope holds; see Quota.
struct Usage {
  int64_t bytes = 0;
  int64_t rows = 0;
};

// Whom a write is counted for.
struct WriteAccount {
  // Empty for nobody in particular.
  std::string principal;
  // Quotas that the write has to keep to, by scope, bytewise. A write that
  // makes a scope neither larger nor longer is let through.
  std::vector<Quota> quotas;
};

// An encoding as it is kept.
struct StoredEncoding {
  // Never null; shared with the cache. Null only in lists.
  std::shared_ptr<const core::Encoding> encoding;
  // Opaque; changes with every put.
  std::string etag;
  // Grows with every put to the store, and for all of a revision when that is
  // published; never comes back for a key.
  int64_t generation = 0;
  absl::Time update_time;
  // Origin of the encoding: a serialized v1::EncodingProvenance; empty where
  // that is not known, and in lists.
  std::string provenance{};
};

// Requirements of a put or delete on what is there, and facts about a put.
struct Precondition {
  // Required etag. Empty: none is required. "absent": no encoding is there.
  std::string if_match;
  // Account that a put is counted for.
  WriteAccount account{};
  // StoredEncoding::provenance of a put.
  std::string provenance{};
  // For a delete: the encoding was neither put nor published after this.
  absl::Time not_updated_after = absl::InfiniteFuture();
};

// A row of a list.
struct EncodingListEntry {
  // Any bytes where the row is damaged.
  std::string tensor;
  // STORE_CORRUPT where it is; nothing else of the entry is to be trusted then.
  absl::Status error;
  StoredEncoding stored;  // without the encoding
  core::NumberFormat format{};
  int64_t scale_count = 0;
};

// Names after `after` and, unless that is empty, before `before`, bytewise.
struct NameRange {
  absl::string_view after;
  absl::string_view before;
};

struct ModelListEntry {
  // Any bytes where a row is damaged.
  std::string model;
  // STORE_CORRUPT where one is; counts are of the others then.
  absl::Status error{};
  int64_t revision_count = 0;
  int64_t encoding_count = 0;
  // A source of a tensor each.
  int64_t statistics_count = 0;
};

struct RevisionListEntry {
  // `revision` and `error` are as `model` and `error` of ModelListEntry.
  std::string revision;
  absl::Status error{};
  int64_t encoding_count = 0;
  int64_t statistics_count = 0;
};

// Consecutive scales of an encoding as raw bytes; see
// core/types/scale_window.h.
struct ScalePiece {
  // Index of the first scale here.
  int64_t first = 0;
  std::string scale;
  // Zero points: as many as scales, or none.
  std::string zero_point;
  // Index of the first outer scale here.
  int64_t first_outer = 0;
  // float32.
  std::string outer_scale;
};

// Reads an encoding of any size. What was opened is read to its end or not at
// all, whatever is written meanwhile. Not thread-safe.
class EncodingReader {
 public:
  virtual ~EncodingReader() = default;

  // `encoding` is without scales, zero points and outer scales.
  virtual const StoredEncoding& stored() const = 0;
  virtual int64_t scale_count() const = 0;
  virtual bool has_zero_points() const = 0;
  // The next scales, at most 1 MiB; none after the last.
  // Errors: ETAG_MISMATCH (the encoding was replaced or deleted, and what is
  // left of it is not whole), STORE_CORRUPT.
  virtual absl::StatusOr<absl::optional<ScalePiece>> Next() = 0;
};

// Writes an encoding of any size. Nobody sees it before Finish; one that is
// not finished leaves nothing. Not thread-safe.
class EncodingWriter {
 public:
  virtual ~EncodingWriter() = default;

  // The next scales and outer scales, which were checked: as many as they may
  // be at a time. Positions are not looked at.
  // Errors: QUOTA_EXCEEDED.
  virtual absl::Status Add(const ScalePiece& piece) = 0;
  // Puts the encoding; durable when it returns. The answer carries no
  // `encoding`.
  // Errors: those of Put.
  virtual absl::StatusOr<StoredEncoding> Finish() = 0;
};

// Counts of what publishing did.
struct PublishedRevision {
  // Encodings that the revision has now, and those that it had before and does
  // not have any more.
  int64_t encoding_count = 0;
  int64_t replaced_count = 0;
};

// Counts of what deleting a revision or a model did; statistics of a source
// each.
struct DeletedRows {
  int64_t encoding_count = 0;
  int64_t statistics_count = 0;
};

// Thread-safe. Calls may block on a disk: never call with a lock held.
// Errors of every call: STORE_UNAVAILABLE; STORE_CORRUPT where a row that
// failed its checksum would have been answered, but not in lists.
class EncodingStore {
 public:
  virtual ~EncodingStore() = default;

  // Before it loads scales, calls `proceed` with what the encoding will take in
  // memory: again if it is replaced meanwhile, never for one that is cached. It
  // must not wait, because others do.
  // Errors: ENCODING_NOT_FOUND; that of `proceed`, which ends the reading.
  virtual absl::StatusOr<StoredEncoding> Read(
      const EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) = 0;
  // Reads like Read, whatever memory the encoding takes.
  absl::StatusOr<StoredEncoding> Get(const EncodingKey& key) {
    return Read(key, [](int64_t /*memory*/) { return absl::OkStatus(); });
  }

  // Returns the encoding that Read would answer without waiting, if there is
  // one. Never blocks.
  virtual absl::optional<StoredEncoding> Cached(const EncodingKey& key) {
    return absl::nullopt;
  }

  // Durable when it returns: survives kill -9 and power loss. The answer
  // carries `encoding`.
  // Errors: ETAG_MISMATCH, QUOTA_EXCEEDED.
  virtual absl::StatusOr<StoredEncoding> Put(
      const EncodingKey& key, std::shared_ptr<const core::Encoding> encoding,
      const Precondition& precondition) = 0;

  // Durable when it returns.
  // Errors: ENCODING_NOT_FOUND, ETAG_MISMATCH.
  virtual absl::Status Delete(const EncodingKey& key,
                              const Precondition& precondition) = 0;

  // Opens an encoding of any size, which is read a piece at a time.
  // Errors: ENCODING_NOT_FOUND.
  virtual absl::StatusOr<std::unique_ptr<EncodingReader>> OpenReader(
      const EncodingKey& key) = 0;
  // `outline` is the encoding without scales, zero points and outer scales,
  // and otherwise valid. The writer must not outlive the store.
  virtual absl::StatusOr<std::unique_ptr<EncodingWriter>> OpenWriter(
      const EncodingKey& key, std::shared_ptr<const core::Encoding> outline,
      bool has_zero_points, const Precondition& precondition) = 0;

  // Makes the encodings of one revision those of another, all at once. Each
  // keeps its etag, and gets a new generation and time, also one that stays.
  // With `keep_others`, encodings of the target stay where the source has none
  // of that tensor; otherwise they are deleted. Durable when it returns. Takes
  // the same time however many there are; with `keep_others`, time for those of
  // both revisions, in steps between which others write.
  // Requires: `source` and `target` differ.
  // Errors: REVISION_NOT_FOUND.
  virtual absl::StatusOr<PublishedRevision> PublishRevision(
      absl::string_view model, absl::string_view source,
      absl::string_view target, bool keep_others) = 0;
  // Deletes encodings and statistics, all at once. Durable when it returns. The
  // space is freed later, in steps.
  // Errors: REVISION_NOT_FOUND.
  virtual absl::StatusOr<DeletedRows> DeleteRevision(
      absl::string_view model, absl::string_view revision) = 0;
  // Deletes all revisions of the model, like DeleteRevision.
  // Errors: MODEL_NOT_FOUND.
  virtual absl::StatusOr<DeletedRows> DeleteModel(absl::string_view model) = 0;

  // At most `limit` entries in order of name, bytewise, after `after`. What is
  // read of a row is verified, and one that is damaged told in its place.
  // Errors: PAGE_INVALID where `after` is not what the store takes.
  virtual absl::StatusOr<std::vector<EncodingListEntry>> ListEncodings(
      absl::string_view model, absl::string_view revision,
      absl::string_view after, int limit) = 0;
  // Models that have encodings or statistics, or had them until a row was
  // damaged. Takes time for what those that it answers have, not for what
  // others have.
  virtual absl::StatusOr<std::vector<ModelListEntry>> ListModels(
      const NameRange& range, int limit) = 0;
  virtual absl::StatusOr<std::vector<RevisionListEntry>> ListRevisions(
      absl::string_view model, absl::string_view after, int limit) = 0;

  // A number that changes when anybody but this store changes an encoding, and
  // perhaps at other times, never back to one that it had; none where that
  // cannot be told now. Takes microseconds.
  virtual absl::optional<int64_t> ForeignVersion() { return absl::nullopt; }

  // OK if the store answers now; for /readyz.
  virtual absl::Status Ping() = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_ENCODING_STORE_H_
