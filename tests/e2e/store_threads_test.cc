// What many calls of one caller at the store leave to the others.

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "server/metrics/metrics.h"
#include "server/quantd_server.h"
#include "server/store/metering_encoding_store.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sql_statistics_store.h"
#include "server/store/sqlite_database.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/test_server.h"

namespace quantd::store_threads_test {
namespace {

// Reads of the tensor "slow" end when they are released.
class SlowStore final : public server::MeteringEncodingStore {
 public:
  using MeteringEncodingStore::MeteringEncodingStore;

  absl::StatusOr<server::StoredEncoding> Read(
      const server::EncodingKey& key,
      absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) override {
    if (key.tensor == "slow") {
      {
        absl::MutexLock lock(&mutex_);
        ++begun_;
      }
      released_.WaitForNotification();
    }
    return MeteringEncodingStore::Read(key, proceed);
  }

  // Waits for so many reads of "slow".
  bool AwaitBegun(int count) {
    absl::MutexLock lock(&mutex_);
    const auto are_begun = [this, count]() { return begun_ >= count; };
    return mutex_.AwaitWithTimeout(absl::Condition(&are_begun),
                                   absl::Minutes(1));
  }
  int begun() const {
    absl::MutexLock lock(&mutex_);
    return begun_;
  }
  void Release() { released_.Notify(); }

 private:
  mutable absl::Mutex mutex_;
  int begun_ = 0;
  absl::Notification released_;
};

grpc::StatusCode Get(const std::shared_ptr<grpc::Channel>& channel,
                     const std::string& tensor) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::minutes(1));
  v1::GetEncodingRequest request;
  request.mutable_name()->set_model("m");
  request.mutable_name()->set_tensor(tensor);
  v1::GetEncodingResponse response;
  return v1::EncodingService::NewStub(channel)
      ->GetEncoding(&context, request, &response)
      .error_code();
}

TEST(StoreThreadsTest, OneCallerHasHalfOfThem) {
  const testing::TemporaryDirectory directory;
  const std::string socket = "unix:" + directory.File("quantd.sock");
  server::Metrics metrics;
  const std::shared_ptr<server::SqliteDatabase> database =
      *server::SqliteDatabase::Open(directory.File("encodings.db"));
  SlowStore store(std::make_unique<server::SqlEncodingStore>(database),
                  &metrics);
  server::ServerOptions options;
  server::SqlStatisticsStore statistics(database,
                                        options.limits.statistics_bytes);
  options.listen = {"127.0.0.1:0", socket};
  const testing::TestServer server(options, &store, &statistics);
  const auto connect = [](const std::string& address) {
    return grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  };
  // Callers are told apart by their addresses.
  const auto greedy = connect(server.address());
  const auto other = connect(socket);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back(
        [&] { EXPECT_EQ(Get(greedy, "slow"), grpc::StatusCode::NOT_FOUND); });
  }
  EXPECT_TRUE(store.AwaitBegun(2));
  for (int i = 0; i < 20 && !HasFailure(); ++i) {
    EXPECT_EQ(Get(other, "w"), grpc::StatusCode::NOT_FOUND);
  }
  EXPECT_EQ(store.begun(), 2);
  store.Release();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store.begun(), 8);
}

}  // namespace
}  // namespace quantd::store_threads_test
