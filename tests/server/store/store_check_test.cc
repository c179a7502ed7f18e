// What is damaged in a store is told, and never read as something else.

#include "server/store/store_check.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/statistics/statistics_state.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"
#include "quantd/v1/statistics.pb.h"
#include "server/store/encoding_store.h"
#include "server/store/sql_database.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sql_statistics_store.h"
#include "server/store/statistics_store.h"
#include "server/wire/statistics_proto.h"
#include "tests/server/store/test_database.h"
#include "tests/support/sanitizers.h"

namespace quantd::server::store_check_test {
namespace {

using testing::Backend;
using testing::BackendName;
using testing::Backends;

constexpr char kModel[] = "model";
constexpr char kRevision[] = "main";
constexpr int kTensors = 3;

// A column of a table, the key of which are `keys`.
struct Column {
  std::string table;
  std::vector<std::string> keys;
  std::string name;
  enum Kind { kText, kBytes, kInt } kind;
};

std::vector<Column> Columns() {
  std::vector<Column> columns;
  const auto add = [&](const std::string& table,
                       const std::vector<std::string>& texts,
                       const std::vector<std::string>& key_integers,
                       const std::vector<std::string>& integers,
                       const std::vector<std::string>& bytes) {
    std::vector<std::string> keys = texts;
    keys.insert(keys.end(), key_integers.begin(), key_integers.end());
    for (const std::string& name : texts) {
      columns.push_back({table, keys, name, Column::kText});
    }
    for (const std::string& name : key_integers) {
      columns.push_back({table, keys, name, Column::kInt});
    }
    for (const std::string& name : integers) {
      columns.push_back({table, keys, name, Column::kInt});
    }
    for (const std::string& name : bytes) {
      columns.push_back({table, keys, name, Column::kBytes});
    }
  };
  add("row_sets", {"model", "revision"}, {"kind"},
      {"set_id", "generation", "update_time_us", "checksum"}, {});
  add("encodings", {"tensor"}, {"set_id"},
      {"generation", "update_time_us", "format", "scale_count", "checksum",
       "head_checksum", "charged_bytes"},
      {"body"});
  add("statistics", {"tensor", "source"}, {"set_id"},
      {"sequence", "update_time_us", "size_bytes", "mantissa_bits",
       "body_checksum", "checksum", "incarnation"},
      {"block_size", "shape", "averages", "body"});
  add("statistics_pieces", {"tensor", "source"},
      {"set_id", "sequence", "piece"}, {"checksum"}, {"bytes"});
  return columns;
}

std::string Bytes(const core::StatisticsState& state) {
  v1::StatisticsState message;
  StateToProto(state, &message);
  return message.SerializeAsString();
}

// All that an entry of a list says.
std::string Text(const EncodingListEntry& entry) {
  return absl::StrCat(entry.tensor, " ", entry.stored.etag, " ",
                      entry.stored.generation, " ",
                      absl::ToUnixMicros(entry.stored.update_time), " ",
                      static_cast<int>(entry.format), " ", entry.scale_count);
}

std::string Text(const StatisticsListEntry& entry) {
  return absl::StrCat(entry.tensor, " ", entry.source_count, " ",
                      entry.size_bytes, " ",
                      absl::ToUnixMicros(entry.update_time));
}

class StoreCheckTest : public ::testing::TestWithParam<Backend> {
 protected:
  StoreCheckTest() {
    for (int i = 0; i < kTensors; ++i) {
      const EncodingKey key = KeyOf(i);
      core::Encoding encoding;
      encoding.format = static_cast<core::NumberFormat>(8);
      encoding.block_size = {1};
      encoding.scale.assign(20 + i, 0.5f);
      encoding.qmin = -128;
      encoding.qmax = 127;
      const absl::StatusOr<StoredEncoding> stored = encodings_.Put(
          key, std::make_shared<const core::Encoding>(std::move(encoding)), {});
      EXPECT_TRUE(stored.ok()) << stored.status();
      for (const char* source : {"a", "b"}) {
        EXPECT_TRUE(
            statistics_.Contribute({key, source, 1}, MakeState(), 0.1).ok());
      }
    }
  }

  static EncodingKey KeyOf(int i) {
    return {kModel, kRevision, absl::StrCat("layers.", i)};
  }

  static core::StatisticsState MakeState() {
    const std::vector<float> elements = {1, 2, -3, 4, 5, 6};
    core::StatisticsState state;
    state.shape = {2, 3};
    state.block_size = {1, 0};
    const auto layout =
        core::BlockLayout::Create(state.shape, state.block_size);
    state.statistics = core::TensorStatistics(2, 7);
    state.statistics.Update(*layout, core::ElementType::kFloat32, 0, 6,
                            reinterpret_cast<const uint8_t*>(elements.data()),
                            nullptr);
    return state;
  }

  // Statements live as long as their connections.
  const char* Keep(std::string sql) {
    return statements_.emplace_back(std::move(sql)).c_str();
  }

  StoreCheck Check(std::vector<std::string>* lines = nullptr) {
    const absl::StatusOr<StoreCheck> check =
        CheckStore(database_, [&](absl::string_view line) {
          if (lines != nullptr) lines->emplace_back(line);
        });
    EXPECT_TRUE(check.ok()) << check.status();
    return check.value_or(StoreCheck());
  }

  // What can be read, by who asks; with "" what is told to be damaged.
  std::map<std::string, std::string> ReadAll() {
    std::map<std::string, std::string> all;
    const auto add = [&](const std::string& name, const absl::Status& status,
                         const std::string& text) {
      if (status.ok()) {
        all[name] = text;
      } else if (!absl::IsNotFound(status)) {
        EXPECT_EQ(core::ErrorReason(status), "STORE_CORRUPT") << status;
        all[name] = "";
      }
    };
    const auto encodings = encodings_.ListEncodings(kModel, kRevision, "", 10);
    // All at once where it is not known which ones there are.
    for (int i = 0; i < kTensors && !encodings.ok(); ++i) {
      add("list encoding " + KeyOf(i).tensor, encodings.status(), "");
    }
    for (const EncodingListEntry& entry :
         encodings.value_or(std::vector<EncodingListEntry>())) {
      add("list encoding " + entry.tensor, entry.error, Text(entry));
    }
    const auto statistics =
        statistics_.ListStatistics(kModel, kRevision, "", 10);
    for (int i = 0; i < kTensors && !statistics.ok(); ++i) {
      add("list statistics " + KeyOf(i).tensor, statistics.status(), "");
    }
    for (const StatisticsListEntry& entry :
         statistics.value_or(std::vector<StatisticsListEntry>())) {
      add("list statistics " + entry.tensor, entry.error, Text(entry));
    }
    for (int i = 0; i < kTensors; ++i) {
      const auto encoding = encodings_.Get(KeyOf(i));
      add(absl::StrCat("encoding ", i), encoding.status(),
          encoding.ok() ? absl::StrCat(encoding->etag, " ",
                                       encoding->encoding->scale.size())
                        : "");
      const auto stored = statistics_.GetStatistics(KeyOf(i));
      add(absl::StrCat("statistics ", i), stored.status(),
          stored.ok() ? Bytes(stored->state) : "");
    }
    return all;
  }

  const testing::TestDatabase files_{GetParam()};
  // Before the database, whose connections know them.
  std::deque<std::string> statements_;
  const std::shared_ptr<SqlDatabase> database_ = files_.Open();
  SqlEncodingStore encodings_{database_};
  SqlStatisticsStore statistics_{database_, 1 << 20};
};

TEST_P(StoreCheckTest, NoFlippedBitIsReadAsSomethingElse) {
  const std::map<std::string, std::string> before = ReadAll();
  ASSERT_EQ(before.size(), 4u * kTensors);
  ASSERT_EQ(Check().damaged, 0);
  const std::vector<Column> columns = Columns();
  constexpr int kFlips = testing::kSanitized ? 60 : 300;
  const std::set<std::string> integers = {"set_id", "kind", "sequence",
                                          "piece"};
  std::mt19937 random(1);
  int told_count = 0, refused_count = 0;
  for (int flip = 0; flip < kFlips; ++flip) {
    const Column& column = columns[flip % columns.size()];
    // One of the rows.
    std::vector<std::string> key_values;
    std::string value;
    int64_t integer = 0;
    std::string names;
    for (const std::string& key : column.keys) {
      absl::StrAppend(&names, key, ", ");
    }
    const int rows = column.table == "row_sets" ? 2 : kTensors;
    const char* select = Keep(
        absl::StrCat("SELECT ", names, column.name, " FROM ", column.table,
                     " ORDER BY ", column.keys.front(), ", ",
                     column.keys.back(), " LIMIT 1 OFFSET ", random() % rows));
    const size_t last = column.keys.size();
    const auto read = [&](SqlConnection& connection) -> absl::Status {
      const std::unique_ptr<SqlStatement> row = connection.Prepare(select);
      EXPECT_TRUE(row->Step("select").value());
      for (size_t k = 0; k < last; ++k) {
        const bool is_int = integers.count(column.keys[k]) > 0;
        key_values.push_back(is_int ? absl::StrCat(row->Int(k))
                                    : absl::StrCat("'", row->Bytes(k), "'"));
      }
      value = std::string(row->Bytes(last));
      if (column.kind == Column::kInt) integer = row->Int(last);
      return absl::OkStatus();
    };
    ASSERT_TRUE(database_->Read(read).ok());
    // The row is found by the value that it has in its key by then.
    const auto write = [&](const std::string& from, int64_t from_integer,
                           const std::string& to, int64_t to_integer) {
      std::string where;
      for (size_t k = 0; k < last; ++k) {
        const bool is_flipped = column.keys[k] == column.name;
        absl::StrAppend(&where, k == 0 ? "" : " AND ", column.keys[k], " = ",
                        is_flipped ? "$2" : key_values[k]);
      }
      const char* sql = Keep(absl::StrCat("UPDATE ", column.table, " SET ",
                                          column.name, " = $1 WHERE ", where));
      const bool is_key = absl::StrContains(where, "$2");
      return database_->Write([&](SqlConnection& connection) -> absl::Status {
        const std::unique_ptr<SqlStatement> row = connection.Prepare(sql);
        switch (column.kind) {
          case Column::kText:
            row->BindText(1, to);
            if (is_key) row->BindText(2, from);
            break;
          case Column::kBytes:
            row->BindBytes(1, to);
            break;
          case Column::kInt:
            row->BindInt(1, to_integer);
            if (is_key) row->BindInt(2, from_integer);
            break;
        }
        return row->Step("update").status();
      });
    };
    std::string flipped = value;
    int64_t flipped_integer = integer;
    if (column.kind == Column::kInt) {
      flipped_integer = static_cast<int64_t>(static_cast<uint64_t>(integer) ^
                                             (uint64_t{1} << (random() % 64)));
    } else if (!flipped.empty()) {
      flipped[random() % flipped.size()] ^=
          static_cast<char>(1 << (random() % 8));
    }
    if (!write(value, integer, flipped, flipped_integer).ok()) {
      // PostgreSQL takes no text that is none.
      ++refused_count;
      continue;
    }
    const std::string what =
        absl::StrCat("flip ", flip, " of ", column.table, ".", column.name);
    const bool is_name = column.name == "tensor" || column.name == "set_id";
    int wrong_count = 0;
    for (const auto& [name, text] : ReadAll()) {
      // Told in its place, or under the name that it has now.
      if (text.empty()) {
        ++told_count;
        continue;
      }
      const auto it = before.find(name);
      ASSERT_NE(it, before.end()) << what << ": " << name;
      // A source that has another name is not one of the tensor any more.
      if (is_name && column.table == "statistics") continue;
      wrong_count += it->second != text;
    }
    EXPECT_EQ(wrong_count, 0) << what;
    EXPECT_GT(Check().damaged, 0) << what;
    ASSERT_TRUE(write(flipped, flipped_integer, value, integer).ok()) << what;
  }
  EXPECT_EQ(ReadAll(), before);
  EXPECT_EQ(Check().damaged, 0);
  EXPECT_GT(told_count, kFlips / 2);
  EXPECT_LT(refused_count, kFlips / 10);
}

// A revision that is damaged stands in its place, and the others are there.
TEST_P(StoreCheckTest, ListsTellARevisionThatIsDamaged) {
  const auto run = [&](const std::string& sql) {
    const char* const kept = Keep(sql);
    const absl::Status status =
        database_->Write([&](SqlConnection& connection) {
          return connection.Prepare(kept)->Step("update").status();
        });
    ASSERT_TRUE(status.ok()) << status;
  };
  core::Encoding encoding;
  encoding.format = static_cast<core::NumberFormat>(8);
  encoding.scale = {0.5f};
  encoding.qmin = -128;
  encoding.qmax = 127;
  const auto small = std::make_shared<const core::Encoding>(encoding);
  for (const EncodingKey& key :
       {EncodingKey{kModel, "a", "t"}, EncodingKey{"other", "a", "t"}}) {
    ASSERT_TRUE(encodings_.Put(key, small, {}).ok());
  }
  const std::string of_set =
      absl::StrCat(" WHERE model = '", kModel, "' AND revision = '", kRevision,
                   "' AND kind = 0");
  const std::string set =
      absl::StrCat("(SELECT set_id FROM row_sets", of_set, ")");
  const std::vector<std::pair<std::string, std::string>> changes = {
      {"UPDATE row_sets SET set_id = set_id + 1000" + of_set,
       "UPDATE row_sets SET set_id = set_id - 1000" + of_set},
      {"UPDATE row_sets SET update_time_us = update_time_us + 1" + of_set,
       "UPDATE row_sets SET update_time_us = update_time_us - 1" + of_set},
      {"UPDATE row_sets SET checksum = checksum - 1" + of_set,
       "UPDATE row_sets SET checksum = checksum + 1" + of_set},
      {"UPDATE set_counts SET row_count = -row_count WHERE set_id = " + set,
       "UPDATE set_counts SET row_count = -row_count WHERE set_id = " + set},
  };
  for (const auto& [damage, repair] : changes) {
    run(damage);
    const auto revisions = encodings_.ListRevisions(kModel, "", 10);
    ASSERT_TRUE(revisions.ok()) << damage << ": " << revisions.status();
    ASSERT_EQ(revisions->size(), 2u) << damage;
    EXPECT_EQ((*revisions)[0].revision, "a");
    EXPECT_TRUE((*revisions)[0].error.ok()) << (*revisions)[0].error;
    EXPECT_EQ((*revisions)[0].encoding_count, 1);
    EXPECT_EQ((*revisions)[1].revision, kRevision);
    EXPECT_EQ(core::ErrorReason((*revisions)[1].error), "STORE_CORRUPT")
        << damage;
    EXPECT_EQ((*revisions)[1].encoding_count, 0);
    EXPECT_EQ((*revisions)[1].statistics_count, 2 * kTensors);
    const auto models = encodings_.ListModels({}, 10);
    ASSERT_TRUE(models.ok()) << damage << ": " << models.status();
    ASSERT_EQ(models->size(), 2u) << damage;
    for (const ModelListEntry& entry : *models) {
      EXPECT_EQ(entry.error.ok(), entry.model == "other") << damage;
      EXPECT_EQ(entry.encoding_count, 1) << damage;
      EXPECT_EQ(entry.revision_count, entry.model == "other" ? 1 : 2);
    }
    run(repair);
    const auto repaired = encodings_.ListRevisions(kModel, "", 10);
    ASSERT_TRUE(repaired.ok()) << repaired.status();
    for (const RevisionListEntry& entry : *repaired) {
      EXPECT_TRUE(entry.error.ok()) << entry.error;
    }
  }
  // What is known of statistics is told with it.
  const std::string of_statistics =
      absl::StrCat(" WHERE revision = '", kRevision, "' AND kind = 1");
  run("UPDATE row_sets SET generation = generation + 1" + of_statistics);
  const auto list = statistics_.ListStatistics(kModel, kRevision, "", 10);
  ASSERT_TRUE(list.ok()) << list.status();
  ASSERT_EQ(list->size(), static_cast<size_t>(kTensors));
  for (const StatisticsListEntry& entry : *list) {
    EXPECT_EQ(core::ErrorReason(entry.error), "STORE_CORRUPT");
    EXPECT_EQ(entry.source_count, 2);
  }
}

TEST_P(StoreCheckTest, CountsRowsAndComparesCounts) {
  StoreCheck check = Check();
  EXPECT_EQ(check.encodings, kTensors);
  EXPECT_EQ(check.statistics, 2 * kTensors);
  EXPECT_EQ(check.damaged, 0);
  ASSERT_TRUE(database_
                  ->Write([](SqlConnection& connection) {
                    return connection
                        .Prepare(
                            "UPDATE set_counts SET set_id = set_id + 1000 "
                            "WHERE set_id = (SELECT MIN(set_id) "
                            "FROM set_counts)")
                        ->Step("update")
                        .status();
                  })
                  .ok());
  std::vector<std::string> lines;
  check = Check(&lines);
  ASSERT_EQ(check.damaged, 2);
  EXPECT_TRUE(absl::StrContains(lines[0], "model \"model\"")) << lines[0];
  EXPECT_TRUE(absl::StrContains(lines[0], "by -3")) << lines[0];
  EXPECT_TRUE(absl::StrContains(lines[1], "model \"\"")) << lines[1];
  EXPECT_TRUE(absl::StrContains(lines[1], "by 3")) << lines[1];
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreCheckTest,
                         ::testing::ValuesIn(Backends()), BackendName);

}  // namespace
}  // namespace quantd::server::store_check_test
