#include "server/store/sql_statistics_store.h"

#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "quantd/v1/statistics.pb.h"
#include "server/store/sql_usage.h"
#include "server/wire/statistics_proto.h"

namespace quantd::server {
namespace {

// What Row is read from.
#define QUANTD_ROW_COLUMNS                                                    \
  "source, sequence, update_time_us, size_bytes, mantissa_bits, block_size, " \
  "shape, body_checksum, checksum"

constexpr char kSelect[] = "SELECT " QUANTD_ROW_COLUMNS
                           ", averages, body FROM statistics "
                           "WHERE model = $1 AND revision = $2 AND tensor = $3 "
                           "AND source = $4";
constexpr char kSelectAll[] =
    "SELECT " QUANTD_ROW_COLUMNS
    ", averages, body FROM statistics "
    "WHERE model = $1 AND revision = $2 AND tensor = $3 ORDER BY source";
// Another source's row, without the large columns.
constexpr char kSelectOther[] =
    "SELECT " QUANTD_ROW_COLUMNS
    " FROM statistics "
    "WHERE model = $1 AND revision = $2 AND tensor = $3 AND source <> $4 "
    "LIMIT 1";
constexpr char kSelectReplaced[] =
    "SELECT principal, size_bytes FROM statistics "
    "WHERE model = $1 AND revision = $2 AND tensor = $3 AND source = $4";
constexpr char kSelectChecksum[] =
    "SELECT checksum FROM statistics "
    "WHERE model = $1 AND revision = $2 AND tensor = $3 AND source = $4";
constexpr char kUpsert[] =
    "INSERT INTO statistics (model, revision, tensor, source, "
    "sequence, update_time_us, size_bytes, mantissa_bits, block_size, shape, "
    "body_checksum, checksum, averages, body, principal) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15) "
    "ON CONFLICT (model, revision, tensor, source) DO UPDATE SET "
    "sequence = excluded.sequence, update_time_us = excluded.update_time_us, "
    "size_bytes = excluded.size_bytes, "
    "mantissa_bits = excluded.mantissa_bits, "
    "block_size = excluded.block_size, shape = excluded.shape, "
    "body_checksum = excluded.body_checksum, checksum = excluded.checksum, "
    "averages = excluded.averages, body = excluded.body, "
    "principal = excluded.principal";
constexpr char kList[] =
    "SELECT tensor, COUNT(*), CAST(SUM(size_bytes) AS BIGINT), "
    "MAX(update_time_us) "
    "FROM statistics WHERE model = $1 AND revision = $2 AND tensor > $3 "
    "GROUP BY tensor ORDER BY tensor LIMIT $4";
constexpr char kSelectNewer[] =
    "SELECT sequence FROM statistics WHERE model = $1 AND revision = $2 "
    "AND tensor = $3 AND update_time_us > $4 LIMIT 1";
constexpr char kDelete[] =
    "DELETE FROM statistics WHERE model = $1 AND revision = $2 AND tensor = $3 "
    "AND ($4 = '' OR source = $4) RETURNING sequence";

#undef QUANTD_ROW_COLUMNS

// The columns of a row that are small.
struct RowHead {
  std::string source;
  int64_t sequence = 0;
  int64_t update_time_us = 0;
  // Of averages and body.
  int64_t size_bytes = 0;
  int64_t mantissa_bits = 0;
  std::vector<int64_t> block_size;
  std::vector<int64_t> shape;
  // Of averages and body.
  uint64_t body_checksum = 0;
};

// What a source has contributed.
struct SourceState {
  RowHead head;
  uint64_t checksum = 0;
  core::StatisticsState state;
  std::vector<core::Extremes> averages;
};

// Plain numbers in the order of this machine's bytes, which is that of all
// machines that quantd runs on.
template <typename T>
std::string Pack(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

template <typename T>
std::vector<T> Unpack(absl::string_view bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) {
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  }
  return values;
}

// XXH3-64 of pieces; their sizes are hashed with them, so that no two run
// together.
uint64_t Hash(std::initializer_list<absl::string_view> pieces) {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(
      XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(state.get());
  for (const absl::string_view piece : pieces) {
    const uint64_t size = piece.size();
    XXH3_64bits_update(state.get(), &size, sizeof(size));
    XXH3_64bits_update(state.get(), piece.data(), piece.size());
  }
  return XXH3_64bits_digest(state.get());
}

uint64_t HeadChecksum(const EncodingKey& key, const RowHead& head) {
  const std::vector<int64_t> numbers = {
      head.sequence, head.update_time_us, head.size_bytes, head.mantissa_bits,
      static_cast<int64_t>(head.body_checksum)};
  return Hash({key.model, key.revision, key.tensor, head.source, Pack(numbers),
               Pack(head.block_size), Pack(head.shape)});
}

absl::Status NotFound(const EncodingKey& key) {
  return core::StatisticsNotFoundError(key.model, key.revision, key.tensor);
}

absl::Status Corrupt(const EncodingKey& key, absl::string_view source,
                     absl::string_view what) {
  return core::StoreCorruptError(absl::StrCat(
      "the statistics of source \"", source, "\" for tensor \"", key.tensor,
      "\" of model \"", key.model, "\", revision \"", key.revision, "\" ", what,
      "; delete them and contribute again"));
}

// The small columns of a row.
// Errors: STORE_CORRUPT.
absl::StatusOr<RowHead> ReadHead(const EncodingKey& key,
                                 const SqlStatement& row, uint64_t* checksum) {
  RowHead head;
  head.source = std::string(row.Bytes(0));
  head.sequence = row.Int(1);
  head.update_time_us = row.Int(2);
  head.size_bytes = row.Int(3);
  head.mantissa_bits = row.Int(4);
  head.block_size = Unpack<int64_t>(row.Bytes(5));
  head.shape = Unpack<int64_t>(row.Bytes(6));
  head.body_checksum = static_cast<uint64_t>(row.Int(7));
  *checksum = static_cast<uint64_t>(row.Int(8));
  if (*checksum != HeadChecksum(key, head)) {
    return Corrupt(key, head.source, "fail their checksum");
  }
  return head;
}

// A row of kSelect or kSelectAll.
// Errors: STORE_CORRUPT.
absl::StatusOr<SourceState> ReadSource(const EncodingKey& key,
                                       const SqlStatement& row) {
  SourceState source;
  absl::StatusOr<RowHead> head = ReadHead(key, row, &source.checksum);
  if (!head.ok()) return head.status();
  source.head = *std::move(head);
  const absl::string_view averages = row.Bytes(9);
  const absl::string_view body = row.Bytes(10);
  if (source.head.body_checksum != Hash({averages, body})) {
    return Corrupt(key, source.head.source, "fail their checksum");
  }
  v1::StatisticsState message;
  if (!message.ParseFromArray(body.data(), static_cast<int>(body.size()))) {
    return Corrupt(key, source.head.source, "do not decode");
  }
  absl::StatusOr<core::StatisticsState> state = StateFromProto(message);
  if (!state.ok()) {
    return Corrupt(key, source.head.source,
                   absl::StrCat("are invalid: ", state.status().message()));
  }
  source.state = *std::move(state);
  source.averages = Unpack<core::Extremes>(averages);
  if (static_cast<int64_t>(source.averages.size()) !=
      source.state.statistics.scale_count()) {
    return Corrupt(key, source.head.source, "lack their averages");
  }
  return source;
}

// Moves by `constant` of the difference to the extremes of a contribution.
void MoveAverages(absl::Span<const core::Extremes> part, double constant,
                  std::vector<core::Extremes>* averages) {
  for (size_t i = 0; i < part.size(); ++i) {
    if (part[i].empty()) continue;
    core::Extremes& average = (*averages)[i];
    if (average.empty()) {
      average = part[i];
    } else {
      average.min += constant * (part[i].min - average.min);
      average.max += constant * (part[i].max - average.max);
    }
  }
}

// What CheckMergeable looks at, from the columns of a row.
core::StatisticsState Outline(const RowHead& head) {
  core::StatisticsState outline;
  outline.block_size = head.block_size;
  outline.shape = head.shape;
  outline.statistics =
      core::TensorStatistics(1, static_cast<int>(head.mantissa_bits));
  return outline;
}

}  // namespace

SqlStatisticsStore::SqlStatisticsStore(std::shared_ptr<SqlDatabase> database,
                                       int64_t limit_bytes)
    : database_(std::move(database)), limit_bytes_(limit_bytes) {}

absl::StatusOr<ContributionOutcome> SqlStatisticsStore::Contribute(
    const ContributionKey& key, const core::StatisticsState& part,
    double averaging_constant) {
  constexpr absl::string_view kWhat = "cannot contribute statistics";
  const auto sequence = static_cast<int64_t>(key.sequence);
  while (true) {
    absl::optional<SourceState> before;
    ContributionOutcome outcome{key.sequence, false};
    const auto read = [&](SqlConnection& connection) -> absl::Status {
      const std::unique_ptr<SqlStatement> row = connection.Prepare(kSelect);
      row->BindKey(key.tensor);
      row->BindText(4, key.source);
      absl::StatusOr<bool> found = row->Step(kWhat);
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      uint64_t checksum;
      absl::StatusOr<RowHead> head = ReadHead(key.tensor, *row, &checksum);
      if (!head.ok()) return head.status();
      if (sequence <= head->sequence) {
        outcome = {static_cast<uint64_t>(head->sequence), true};
        return absl::OkStatus();
      }
      absl::StatusOr<SourceState> source = ReadSource(key.tensor, *row);
      if (!source.ok()) return source.status();
      before = *std::move(source);
      return absl::OkStatus();
    };
    if (absl::Status s = database_->Read(read); !s.ok()) return s;
    if (outcome.duplicate) return outcome;

    const uint64_t before_checksum = before ? before->checksum : 0;
    std::vector<core::Extremes> averages;
    v1::StatisticsState message;
    RowHead head;
    head.source = key.source;
    head.sequence = sequence;
    head.mantissa_bits = part.statistics.mantissa_bits();
    head.block_size = part.block_size;
    head.shape = part.shape;
    if (before.has_value()) {
      absl::Status status = core::MergeState(part, &before->state);
      if (!status.ok()) return status;
      averages = std::move(before->averages);
      MoveAverages(part.statistics.extremes(), averaging_constant, &averages);
      head.shape = before->state.shape;
      StateToProto(before->state, &message);
    } else {
      averages.assign(part.statistics.extremes().begin(),
                      part.statistics.extremes().end());
      StateToProto(part, &message);
    }
    const std::string packed_averages = Pack(averages);
    head.size_bytes =
        static_cast<int64_t>(packed_averages.size() + message.ByteSizeLong());
    if (head.size_bytes > limit_bytes_) {
      return core::StatisticsTooLargeError(
          limit_bytes_, head.size_bytes,
          "contribute with a coarser granularity or fewer mantissa bits");
    }
    const std::string body = message.SerializeAsString();
    const std::string block_size = Pack(head.block_size);
    const std::string shape = Pack(head.shape);
    head.body_checksum = Hash({packed_averages, body});

    bool overtaken = false;
    const auto write = [&](SqlConnection& connection) -> absl::Status {
      absl::Status locked = connection.LockTensor(key.tensor);
      if (!locked.ok()) return locked;
      {
        const std::unique_ptr<SqlStatement> row =
            connection.Prepare(kSelectChecksum);
        row->BindKey(key.tensor);
        row->BindText(4, key.source);
        absl::StatusOr<bool> found = row->Step(kWhat);
        if (!found.ok()) return found.status();
        // The checksum covers the sequence, and tells a row from one that came
        // after it was deleted.
        overtaken =
            *found != before.has_value() ||
            (*found && static_cast<uint64_t>(row->Int(0)) != before_checksum);
        if (overtaken) return absl::OkStatus();
      }
      {
        const std::unique_ptr<SqlStatement> row =
            connection.Prepare(kSelectOther);
        row->BindKey(key.tensor);
        row->BindText(4, key.source);
        absl::StatusOr<bool> found = row->Step(kWhat);
        if (!found.ok()) return found.status();
        // Any one will do: all that are there go together.
        if (*found) {
          uint64_t checksum;
          absl::StatusOr<RowHead> other = ReadHead(key.tensor, *row, &checksum);
          if (!other.ok()) return other.status();
          absl::Status status = core::CheckMergeable(Outline(*other), part);
          if (!status.ok()) return status;
        }
      }
      const WriteAccount& account = key.account;
      ReplacedRow replaced;
      if (!account.quotas.empty()) {
        const std::unique_ptr<SqlStatement> row =
            connection.Prepare(kSelectReplaced);
        row->BindKey(key.tensor);
        row->BindText(4, key.source);
        absl::StatusOr<bool> found = row->Step(kWhat);
        if (!found.ok()) return found.status();
        if (*found) replaced = {true, std::string(row->Bytes(0)), row->Int(1)};
      }
      head.update_time_us = absl::ToUnixMicros(absl::Now());
      absl::Status status;
      {
        const std::unique_ptr<SqlStatement> row = connection.Prepare(kUpsert);
        row->BindKey(key.tensor);
        row->BindText(4, head.source);
        row->BindInt(5, head.sequence);
        row->BindInt(6, head.update_time_us);
        row->BindInt(7, head.size_bytes);
        row->BindInt(8, head.mantissa_bits);
        row->BindBytes(9, block_size);
        row->BindBytes(10, shape);
        row->BindInt(11, static_cast<int64_t>(head.body_checksum));
        row->BindInt(12, static_cast<int64_t>(HeadChecksum(key.tensor, head)));
        row->BindBytes(13, packed_averages);
        row->BindBytes(14, body);
        row->BindText(15, account.principal);
        status = row->Step(kWhat).status();
      }
      if (!status.ok()) return status;
      return CheckQuotas(connection, account, replaced, head.size_bytes);
    };
    if (absl::Status s = database_->Write(write); !s.ok()) return s;
    if (!overtaken) return outcome;
  }
}

absl::StatusOr<StoredStatistics> SqlStatisticsStore::ReadStatistics(
    const EncodingKey& key,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  // A bin takes about four times as much as its varints: in the state of the
  // source, and in the merged one, which may not have had it.
  constexpr int64_t kMemoryPerStoredByte = 8;
  StoredStatistics stored;
  const auto read = [&](SqlConnection& connection) -> absl::Status {
    uint64_t checksum;
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kSelectAll);
    row->BindKey(key);
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot read statistics");
      if (!found.ok()) return found.status();
      if (!*found) break;
      absl::StatusOr<RowHead> head = ReadHead(key, *row, &checksum);
      if (!head.ok()) return head.status();
      absl::Status proceeds = proceed(stored.state.statistics.memory_bytes() +
                                      kMemoryPerStoredByte * head->size_bytes);
      if (!proceeds.ok()) return proceeds;
      absl::StatusOr<SourceState> source = ReadSource(key, *row);
      if (!source.ok()) return source.status();
      if (stored.sources.empty()) {
        stored.state = std::move(source->state);
        stored.moving_average = std::move(source->averages);
      } else {
        absl::Status status = core::MergeState(source->state, &stored.state);
        // They were checked when they were written.
        if (!status.ok()) {
          return Corrupt(key, source->head.source, status.message());
        }
        stored.moving_average.clear();
      }
      stored.sources.push_back(
          {source->head.source, static_cast<uint64_t>(source->head.sequence),
           absl::FromUnixMicros(source->head.update_time_us)});
    }
    return stored.sources.empty() ? NotFound(key) : absl::OkStatus();
  };
  if (absl::Status s = database_->Read(read); !s.ok()) return s;
  return stored;
}

absl::StatusOr<std::vector<StatisticsListEntry>>
SqlStatisticsStore::ListStatistics(absl::string_view model,
                                   absl::string_view revision,
                                   absl::string_view after, int limit) {
  std::vector<StatisticsListEntry> entries;
  if (limit <= 0) return entries;
  const auto list = [&](SqlConnection& connection) -> absl::Status {
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kList);
    row->BindText(1, model);
    row->BindText(2, revision);
    row->BindText(3, after);
    row->BindInt(4, limit);
    while (true) {
      absl::StatusOr<bool> found = row->Step("cannot list statistics");
      if (!found.ok()) return found.status();
      if (!*found) return absl::OkStatus();
      entries.push_back({std::string(row->Bytes(0)), row->Int(1), row->Int(2),
                         absl::FromUnixMicros(row->Int(3))});
    }
  };
  if (absl::Status s = database_->Read(list); !s.ok()) return s;
  return entries;
}

absl::Status SqlStatisticsStore::DeleteStatisticsUpTo(const EncodingKey& key,
                                                      absl::Time update_time) {
  return database_->Write([&](SqlConnection& connection) -> absl::Status {
    if (absl::Status s = connection.LockTensor(key); !s.ok()) return s;
    {
      const std::unique_ptr<SqlStatement> row =
          connection.Prepare(kSelectNewer);
      row->BindKey(key);
      row->BindInt(4, absl::ToUnixMicros(update_time));
      absl::StatusOr<bool> found = row->Step("cannot delete statistics");
      if (!found.ok()) return found.status();
      if (*found) return NotFound(key);
    }
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kDelete);
    row->BindKey(key);
    row->BindText(4, "");
    absl::StatusOr<bool> found = row->Step("cannot delete statistics");
    if (!found.ok()) return found.status();
    return *found ? absl::OkStatus() : NotFound(key);
  });
}

absl::Status SqlStatisticsStore::DeleteStatistics(const EncodingKey& key,
                                                  absl::string_view source) {
  return database_->Write([&](SqlConnection& connection) -> absl::Status {
    if (absl::Status s = connection.LockTensor(key); !s.ok()) return s;
    const std::unique_ptr<SqlStatement> row = connection.Prepare(kDelete);
    row->BindKey(key);
    row->BindText(4, source);
    // All rows are deleted before the first one is answered.
    absl::StatusOr<bool> found = row->Step("cannot delete statistics");
    if (!found.ok()) return found.status();
    return *found ? absl::OkStatus() : NotFound(key);
  });
}

}  // namespace quantd::server
