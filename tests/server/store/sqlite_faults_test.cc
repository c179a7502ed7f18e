// What the SQLite store does when the disk fails: a layer between SQLite and
// the file system lets the n-th write or sync fail, for n from 1 on, or has
// room for so many bytes.
//
// QUANTD_STORE_FAULT_STEP is the distance from one n to the next; 1 tries all.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sql_statistics_store.h"
#include "server/store/sqlite_database.h"
#include "server/store/store_keeper.h"
#include "tests/support/count.h"
#include "tests/support/temporary_directory.h"

namespace quantd::server::sqlite_faults_test {
namespace {

// Writes and syncs that may fail, one in each life of a store.
constexpr int kFaults = 200;

// What fails, and how.
struct Fault {
  int write_code;
  int sync_code;
  // Every call from the n-th on, until it is lifted, or only the n-th.
  bool lasts;
};

// Counts calls down to the one that fails. SQLite calls it on one thread here.
class FaultPlan {
 public:
  void Arm(const Fault& fault, int n) {
    fault_ = fault;
    left_ = n;
    hit_ = false;
  }
  void Lift() { left_ = 0; }
  bool hit() const { return hit_; }
  bool is_full() const { return fault_.write_code == SQLITE_FULL; }

  // From now on the disk has that much room, and as much more while the file is
  // not there.
  void SetRoom(int64_t bytes, const std::string& reserve) {
    room_ = bytes;
    reserve_ = reserve;
    reserve_bytes_ = static_cast<int64_t>(std::filesystem::file_size(reserve));
  }
  void EndRoom() { reserve_.clear(); }

  // The code that a call ends with; SQLITE_OK for none of ours.
  int OnWrite() { return Next() ? fault_.write_code : SQLITE_OK; }
  // A file grows by that, or shrinks.
  int OnGrowth(int64_t bytes) {
    if (reserve_.empty()) return SQLITE_OK;
    const int64_t more = std::filesystem::exists(reserve_) ? 0 : reserve_bytes_;
    if (bytes > 0 && bytes > room_ + more) return SQLITE_FULL;
    room_ -= bytes;
    return SQLITE_OK;
  }
  int OnSync() { return Next() ? fault_.sync_code : SQLITE_OK; }

 private:
  bool Next() {
    if (left_ <= 0) return false;
    if (left_ > 1) {
      --left_;
      return false;
    }
    if (!fault_.lasts) left_ = 0;
    hit_ = true;
    return true;
  }

  Fault fault_{};
  int left_ = 0;
  bool hit_ = false;
  int64_t room_ = 0;
  int64_t reserve_bytes_ = 0;
  std::string reserve_;
};

FaultPlan& plan() {
  static FaultPlan plan;
  return plan;
}

// A file of the layer; the real one lies behind it in memory.
struct FaultyFile {
  sqlite3_file base;
  sqlite3_file* real;
};

sqlite3_file* Real(sqlite3_file* file) {
  return reinterpret_cast<FaultyFile*>(file)->real;
}

// Calls the same method of the real file.
#define QUANTD_FORWARD(method, ...) \
  Real(file)->pMethods->method(Real(file), ##__VA_ARGS__)

// What the file grows by if it ends there.
int64_t GrowthTo(sqlite3_file* file, int64_t end) {
  sqlite3_int64 size = 0;
  QUANTD_FORWARD(xFileSize, &size);
  return end - size;
}

const sqlite3_io_methods kMethods = {
    2,
    [](sqlite3_file* file) { return QUANTD_FORWARD(xClose); },
    [](sqlite3_file* file, void* out, int size, sqlite3_int64 offset) {
      return QUANTD_FORWARD(xRead, out, size, offset);
    },
    [](sqlite3_file* file, const void* in, int size, sqlite3_int64 offset) {
      int code = plan().OnWrite();
      if (code == SQLITE_OK) {
        code = plan().OnGrowth(
            std::max<int64_t>(0, GrowthTo(file, offset + size)));
        if (code != SQLITE_OK) return code;
        return QUANTD_FORWARD(xWrite, in, size, offset);
      }
      // A part of it may have got there.
      QUANTD_FORWARD(xWrite, in, size / 2, offset);
      return code;
    },
    [](sqlite3_file* file, sqlite3_int64 size) {
      plan().OnGrowth(GrowthTo(file, size));
      return QUANTD_FORWARD(xTruncate, size);
    },
    [](sqlite3_file* file, int flags) {
      const int code = plan().OnSync();
      return code == SQLITE_OK ? QUANTD_FORWARD(xSync, flags) : code;
    },
    [](sqlite3_file* file, sqlite3_int64* size) {
      return QUANTD_FORWARD(xFileSize, size);
    },
    [](sqlite3_file* file, int lock) { return QUANTD_FORWARD(xLock, lock); },
    [](sqlite3_file* file, int lock) { return QUANTD_FORWARD(xUnlock, lock); },
    [](sqlite3_file* file, int* out) {
      return QUANTD_FORWARD(xCheckReservedLock, out);
    },
    [](sqlite3_file* file, int op, void* argument) {
      return QUANTD_FORWARD(xFileControl, op, argument);
    },
    [](sqlite3_file* file) { return QUANTD_FORWARD(xSectorSize); },
    [](sqlite3_file* file) { return QUANTD_FORWARD(xDeviceCharacteristics); },
    [](sqlite3_file* file, int page, int size, int extend,
       void volatile** out) {
      return QUANTD_FORWARD(xShmMap, page, size, extend, out);
    },
    [](sqlite3_file* file, int offset, int n, int flags) {
      return QUANTD_FORWARD(xShmLock, offset, n, flags);
    },
    [](sqlite3_file* file) { QUANTD_FORWARD(xShmBarrier); },
    [](sqlite3_file* file, int remove) {
      return QUANTD_FORWARD(xShmUnmap, remove);
    },
    nullptr,
    nullptr,
};

#undef QUANTD_FORWARD

sqlite3_vfs* real_vfs = nullptr;

int OpenFaulty(sqlite3_vfs*, const char* name, sqlite3_file* file, int flags,
               int* out_flags) {
  auto* const faulty = reinterpret_cast<FaultyFile*>(file);
  faulty->real = reinterpret_cast<sqlite3_file*>(faulty + 1);
  faulty->base.pMethods = nullptr;
  const int code =
      real_vfs->xOpen(real_vfs, name, faulty->real, flags, out_flags);
  if (faulty->real->pMethods != nullptr) faulty->base.pMethods = &kMethods;
  return code;
}

// Puts the layer in front of what SQLite takes by default.
void InstallLayer() {
  static sqlite3_vfs layer;
  if (real_vfs != nullptr) return;
  sqlite3_initialize();
  real_vfs = sqlite3_vfs_find(nullptr);
  layer = *real_vfs;
  layer.zName = "quantd-faulty";
  layer.szOsFile = static_cast<int>(sizeof(FaultyFile)) + real_vfs->szOsFile;
  layer.xOpen = &OpenFaulty;
  sqlite3_vfs_register(&layer, 1);
}

// Of enough scales for several pages.
std::shared_ptr<const core::Encoding> MakeEncoding(float value) {
  core::Encoding encoding;
  encoding.format = static_cast<core::NumberFormat>(8);
  encoding.block_size = {1};
  encoding.scale.assign(3000, value);
  encoding.qmin = -128;
  encoding.qmax = 127;
  return std::make_shared<const core::Encoding>(std::move(encoding));
}

core::StatisticsState MakeState() {
  const auto layout = core::BlockLayout::Create({1}, {});
  core::StatisticsState state;
  state.shape = {1};
  state.statistics = core::TensorStatistics(1, 7);
  const float element = 1;
  state.statistics.Update(*layout, core::ElementType::kFloat32, 0, 1,
                          reinterpret_cast<const uint8_t*>(&element), nullptr);
  return state;
}

class SqliteFaultsTest : public ::testing::TestWithParam<Fault> {
 protected:
  static void SetUpTestSuite() { InstallLayer(); }
  void TearDown() override { plan().Lift(); }
};

// One life of a store in which one call of the disk fails.
class Life {
 public:
  // Works until something fails, or all is done.
  void Work() {
    for (int i = 0; i < 40; ++i) {
      if (database_ == nullptr && !Open()) return;
      const EncodingKey key{"model", "revision", absl::StrCat(i % 3)};
      const float value = static_cast<float>(i + 1);
      attempted_[key.tensor] = value;
      const absl::Status put = SqlEncodingStore(database_)
                                   .Put(key, MakeEncoding(value), {})
                                   .status();
      if (!Expect(put)) return;
      acknowledged_[key.tensor] = value;
      const absl::Status contributed =
          SqlStatisticsStore(database_, 1 << 20)
              .Contribute({key_, "source", static_cast<uint64_t>(i + 1)},
                          MakeState(), 1)
              .status();
      if (!Expect(contributed)) return;
      ++contributed_;
    }
  }

  // The handle that saw the fault goes on, and another one finds everything.
  void Check() {
    if (database_ != nullptr) {
      const absl::Status put =
          SqlEncodingStore(database_)
              .Put({"model", "revision", "after"}, MakeEncoding(1), {})
              .status();
      EXPECT_TRUE(put.ok()) << put;
    }
    database_.reset();
    ASSERT_TRUE(Open());
    SqlEncodingStore encodings(database_);
    for (const auto& [tensor, value] : acknowledged_) {
      const auto got = encodings.Get({"model", "revision", tensor});
      ASSERT_TRUE(got.ok()) << got.status();
      // What was under way may be there as a whole.
      const float found = got->encoding->scale[0];
      EXPECT_TRUE(found == value || found == attempted_[tensor]) << found;
      EXPECT_EQ(got->encoding->scale, std::vector<float>(3000, found));
    }
    if (contributed_ > 0) {
      const auto got =
          SqlStatisticsStore(database_, 1 << 20).GetStatistics(key_);
      ASSERT_TRUE(got.ok()) << got.status();
      const uint64_t count = got->state.statistics.counts().total;
      EXPECT_TRUE(count == contributed_ || count == contributed_ + 1) << count;
      EXPECT_EQ(got->sources[0].sequence, count);
    }
    database_.reset();
    EXPECT_EQ(IntegrityCheck(), "ok");
  }

 private:
  bool Open() {
    absl::StatusOr<std::shared_ptr<SqliteDatabase>> database =
        SqliteDatabase::Open(path_);
    if (!Expect(database.status())) return false;
    database_ = *std::move(database);
    return true;
  }

  // Success, or the one error that the fault may cause.
  static bool Expect(const absl::Status& status) {
    if (status.ok()) return true;
    EXPECT_EQ(core::ErrorReason(status), "STORE_UNAVAILABLE") << status;
    EXPECT_TRUE(plan().hit()) << status;
    if (plan().is_full()) {
      EXPECT_THAT(std::string(status.message()),
                  ::testing::HasSubstr("free space on it"));
    }
    return false;
  }

  std::string IntegrityCheck() const {
    sqlite3* db = nullptr;
    sqlite3_open(path_.c_str(), &db);
    std::string answer;
    sqlite3_exec(
        db, "PRAGMA integrity_check",
        [](void* out, int, char** values, char**) {
          *static_cast<std::string*>(out) += values[0];
          return 0;
        },
        &answer, nullptr);
    sqlite3_close(db);
    return answer;
  }

  const testing::TemporaryDirectory directory_;
  const std::string path_ = directory_.File("encodings.db");
  const EncodingKey key_{"model", "revision", "statistics"};
  std::shared_ptr<SqliteDatabase> database_;
  // By tensor: what Put said yes to last, and what was tried last.
  std::map<std::string, float> acknowledged_;
  std::map<std::string, float> attempted_;
  uint64_t contributed_ = 0;
};

TEST_P(SqliteFaultsTest, ErrorsSurfaceAndNothingAcknowledgedIsLost) {
  for (int n = 1; n <= kFaults;
       n += testing::Count("QUANTD_STORE_FAULT_STEP", 9)) {
    SCOPED_TRACE(absl::StrCat("call ", n));
    Life life;
    plan().Arm(GetParam(), n);
    life.Work();
    // The work is long enough for all of them.
    EXPECT_TRUE(plan().hit());
    plan().Lift();
    life.Check();
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

TEST(SqliteFullDiskTest, DeletingMakesRoom) {
  InstallLayer();
  const testing::TemporaryDirectory directory;
  const std::string path = directory.File("encodings.db");
  auto database = SqliteDatabase::Open(path);
  ASSERT_TRUE(database.ok()) << database.status();
  SqlEncodingStore store(*database);
  StoreKeeper keeper(*database);
  const auto put = [&](int i) {
    return store
        .Put({"model", i < 20 ? "kept" : "revision", absl::StrCat(i)},
             MakeEncoding(1), {})
        .status();
  };
  const auto free = [&] {
    while (keeper.FreeStep(absl::Hours(1)).value_or(false)) continue;
    while (keeper.Shrink().value_or(false)) continue;
  };
  plan().SetRoom(int64_t{6} << 20, path + "-reserve");
  // Again and again: what was used is there again.
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(absl::StrCat("round ", round));
    absl::Status status;
    int i = 0;
    while (status.ok() && i < 10'000) status = put(i++);
    EXPECT_EQ(core::ErrorReason(status), "STORE_UNAVAILABLE") << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::HasSubstr("the disk of the store is full"));
    EXPECT_TRUE(std::filesystem::exists(path + "-reserve"));
    EXPECT_TRUE(store.Delete({"model", "revision", "20"}, {}).ok());
    const absl::StatusOr<DeletedRows> deleted =
        store.DeleteRevision("model", "revision");
    ASSERT_TRUE(deleted.ok()) << deleted.status();
    EXPECT_GT(deleted->encoding_count, 10);
    free();
    EXPECT_TRUE(std::filesystem::exists(path + "-reserve"));
    status = put(30);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(store.Get({"model", "kept", "7"}).ok());
  }
  plan().EndRoom();
}

INSTANTIATE_TEST_SUITE_P(
    Faults, SqliteFaultsTest,
    ::testing::Values(Fault{SQLITE_IOERR_WRITE, SQLITE_IOERR_FSYNC, false},
                      Fault{SQLITE_IOERR_WRITE, SQLITE_IOERR_FSYNC, true},
                      Fault{SQLITE_FULL, SQLITE_FULL, false},
                      Fault{SQLITE_FULL, SQLITE_FULL, true}),
    [](const ::testing::TestParamInfo<Fault>& info) {
      return absl::StrCat(
          info.param.write_code == SQLITE_FULL ? "NoSpace" : "IoError",
          info.param.lasts ? "Lasting" : "Once");
    });

}  // namespace
}  // namespace quantd::server::sqlite_faults_test
