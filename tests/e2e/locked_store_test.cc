// Another process holds the lock of the store's writers: what is read is
// answered all the same.

#include <gtest/gtest.h>
#include <sqlite3.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "tests/support/http_get.h"
#include "tests/support/metric_value.h"
#include "tests/support/paths.h"
#include "tests/support/server_process.h"
#include "tests/support/temporary_directory.h"

namespace quantd::testing::locked_store_test {
namespace {

// More than threads of any kind.
constexpr int kWriters = 16;

grpc::Status Put(v1::EncodingService::Stub& stub, const std::string& tensor) {
  grpc::ClientContext context;
  v1::PutEncodingRequest request;
  request.mutable_name()->set_model("net");
  request.mutable_name()->set_tensor(tensor);
  v1::Encoding& encoding = *request.mutable_encoding();
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  encoding.set_qmin(-127);
  encoding.set_qmax(127);
  v1::PutEncodingResponse response;
  return stub.PutEncoding(&context, request, &response);
}

grpc::Status Get(v1::EncodingService::Stub& stub, const std::string& tensor) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kLongEnough));
  v1::GetEncodingRequest request;
  request.mutable_name()->set_model("net");
  request.mutable_name()->set_tensor(tensor);
  v1::GetEncodingResponse response;
  return stub.GetEncoding(&context, request, &response);
}

// How many have come to the server.
double CountPuts(const ServerProcess& server) {
  const std::string series =
      "\ngrpc_server_started_total{grpc_type=\"unary\","
      "grpc_service=\"quantd.v1.EncodingService\","
      "grpc_method=\"PutEncoding\"} ";
  const std::string metrics = HttpGet(server.metrics_address(), "/metrics");
  const size_t begin = metrics.find(series);
  return begin == std::string::npos
             ? 0
             : std::strtod(&metrics[begin + series.size()], nullptr);
}

TEST(LockedStoreTest, ReadsDoNotWaitForWrites) {
  const TemporaryDirectory directory;
  const std::string store = directory.File("store.db");
  ServerProcess server(QuantdBinary(), store,
                       {"--drain-delay", "0s", "--cache-bytes", "0"});
  const auto stub = v1::EncodingService::NewStub(server.NewChannel());
  EXPECT_EQ(Put(*stub, "a").error_message(), "");
  sqlite3* other = nullptr;
  ASSERT_EQ(sqlite3_open(store.c_str(), &other), SQLITE_OK);
  sqlite3_busy_timeout(other, 60'000);
  ASSERT_EQ(sqlite3_exec(other, "BEGIN IMMEDIATE", nullptr, nullptr, nullptr),
            SQLITE_OK);
  std::atomic<bool> is_free{false};
  std::atomic<int> ended{0};
  std::vector<std::thread> writers;
  for (int i = 0; i < kWriters; ++i) {
    writers.emplace_back([&, i] {
      // The server gives up after it has waited for the lock for seconds.
      while (!is_free) {
        const grpc::Status status = Put(*stub, absl::StrCat("w", i));
        EXPECT_TRUE(!status.ok() || is_free);
        ++ended;
      }
    });
  }
  EXPECT_TRUE(
      PollUntil(kLongEnough, [&] { return CountPuts(server) > kWriters; }));
  // A read that waits for a write is answered after one has ended. That may
  // happen to some of them by chance.
  constexpr int kReads = 50;
  constexpr int kMostHeldUp = 10;
  int held_up = 0;
  for (int i = 0; i < kReads && held_up < kMostHeldUp; ++i) {
    const int before = ended;
    EXPECT_EQ(Get(*stub, "a").error_message(), "");
    if (ended != before) ++held_up;
  }
  EXPECT_LT(held_up, kMostHeldUp);
  is_free = true;
  EXPECT_EQ(sqlite3_exec(other, "ROLLBACK", nullptr, nullptr, nullptr),
            SQLITE_OK);
  for (std::thread& writer : writers) writer.join();
  sqlite3_close(other);
  server.Kill();
}

}  // namespace
}  // namespace quantd::testing::locked_store_test
