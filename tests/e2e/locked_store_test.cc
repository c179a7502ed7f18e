// Another process holds the lock of the store's writers: what is read is
// answered all the same.

#include <gtest/gtest.h>
#include <sqlite3.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "tests/support/paths.h"
#include "tests/support/server_process.h"
#include "tests/support/temporary_directory.h"

namespace quantd::testing {
namespace {

// More than threads of any kind.
constexpr int kWriters = 16;

grpc::Status Put(v1::EncodingService::Stub& stub, const std::string& tensor,
                 grpc::ClientContext* context) {
  v1::PutEncodingRequest request;
  request.mutable_name()->set_model("net");
  request.mutable_name()->set_tensor(tensor);
  v1::Encoding& encoding = *request.mutable_encoding();
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  encoding.set_qmin(-127);
  encoding.set_qmax(127);
  v1::PutEncodingResponse response;
  return stub.PutEncoding(context, request, &response);
}

TEST(LockedStoreTest, ReadsDoNotWaitForWrites) {
  const TemporaryDirectory directory;
  const std::string store = directory.File("store.db");
  ServerProcess server(
      QuantdBinary(), store,
      {"--metrics-listen", "off", "--drain-delay", "0s", "--cache-bytes", "0"});
  const auto stub = v1::EncodingService::NewStub(server.NewChannel());
  {
    grpc::ClientContext context;
    const grpc::Status status = Put(*stub, "a", &context);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  sqlite3* other = nullptr;
  ASSERT_EQ(sqlite3_open(store.c_str(), &other), SQLITE_OK);
  sqlite3_busy_timeout(other, 1000);
  ASSERT_EQ(sqlite3_exec(other, "BEGIN IMMEDIATE", nullptr, nullptr, nullptr),
            SQLITE_OK);
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::thread> writers;
  for (int i = 0; i < kWriters; ++i) {
    grpc::ClientContext* const context =
        contexts.emplace_back(std::make_unique<grpc::ClientContext>()).get();
    writers.emplace_back([&, context, i] {
      EXPECT_FALSE(Put(*stub, absl::StrCat("w", i), context).ok());
    });
  }
  // None of them ends before this one has the lock for seconds.
  absl::Duration slowest;
  const absl::Duration begin = core::SteadyNow();
  while (core::SteadyNow() - begin < absl::Seconds(2)) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::seconds(30));
    v1::GetEncodingRequest request;
    request.mutable_name()->set_model("net");
    request.mutable_name()->set_tensor("a");
    v1::GetEncodingResponse response;
    const absl::Duration start = core::SteadyNow();
    const grpc::Status status = stub->GetEncoding(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    slowest = std::max(slowest, core::SteadyNow() - start);
  }
  EXPECT_LT(slowest, absl::Seconds(1));
  std::printf("the slowest read took %.1f ms\n",
              absl::ToDoubleMilliseconds(slowest));
  for (const auto& context : contexts) context->TryCancel();
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(sqlite3_exec(other, "ROLLBACK", nullptr, nullptr, nullptr),
            SQLITE_OK);
  sqlite3_close(other);
  server.Kill();
}

}  // namespace
}  // namespace quantd::testing
