// What imports hold, and that they wait for each other.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "server/rpc/import_queue.h"
#include "tests/support/metric_value.h"
#include "tests/support/sanitizers.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/test_server.h"

namespace quantd::testing {
namespace {

using ::testing::StartsWith;

// AIMET 0.6.1, which has an object for each scale.
std::string AimetFile(int tensors, int scales) {
  std::string text = R"({"version":"0.6.1","activation_encodings":{},)"
                     R"("param_encodings":{)";
  for (int i = 0; i < tensors; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ",", "\"t", i, "\":[");
    for (int j = 0; j < scales; ++j) {
      absl::StrAppend(
          &text, j == 0 ? "" : ",",
          R"({"bitwidth":8,"dtype":"int","is_symmetric":"True",)"
          R"("max":0.9921875,"min":-1.0,"offset":-128,"scale":0.0078125})");
    }
    text += "]";
  }
  return text + "}}";
}

// Stores nothing where `dry_run` takes the answer.
grpc::Status Import(v1::EncodingService::Stub& service,
                    const std::string& model, absl::string_view file,
                    size_t piece_bytes = 1 << 20,
                    v1::ImportEncodingsResponse* dry_run = nullptr) {
  grpc::ClientContext context;
  context.AddMetadata("authorization", "Bearer abc");
  v1::ImportEncodingsResponse response;
  const auto stream = service.ImportEncodings(
      &context, dry_run == nullptr ? &response : dry_run);
  v1::ImportEncodingsRequest request;
  request.set_model(model);
  request.set_dry_run(dry_run != nullptr);
  v1::TensorHint* const hint = request.add_hints();
  hint->set_pattern("*");
  hint->add_block_size(1);
  while (!file.empty()) {
    const size_t size = std::min(piece_bytes, file.size());
    request.set_data(std::string(file.substr(0, size)));
    file.remove_prefix(size);
    if (!stream->Write(request)) break;
    request.clear_hints();
  }
  stream->WritesDone();
  return stream->Finish();
}

server::ServerOptions WithBudget(int64_t bytes) {
  server::ServerOptions options;
  options.threads = 2;
  options.limits.memory_budget_bytes = bytes;
  options.limits.message_bytes = std::min<int64_t>(bytes / 4, 4 << 20);
  options.limits.chunk_bytes = options.limits.message_bytes / 2;
  return options;
}

TEST(ImportEncodingsTest, TakesLittleMoreThanTheFileAndOneEntry) {
  TestServer server(WithBudget(48 << 20));
  constexpr int kCount = kSanitized ? 20 : 60;
  const std::string file = AimetFile(kCount, 700);
  ASSERT_GT(file.size(), size_t{kSanitized ? 1 : 4} << 20);
  grpc::Status status = Import(server.encodings(), "m", file);
  EXPECT_TRUE(status.ok()) << status.error_message();
  // Also in crumbs.
  status = Import(server.encodings(), "m", file, 3001);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(server.store().ListEncodings("m", "main", "", 100)->size(),
            size_t{kCount});
  EXPECT_TRUE(PollUntil(
      kLongEnough, [&] { return server.server().memory_used_bytes() == 0; }));
}

TEST(ImportEncodingsTest, StoresAllOrNothing) {
  const TemporaryDirectory directory;
  std::ofstream(directory.File("access"))
      << "ci sha256:"
         "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad "
         "read,calibrate *\n"
         "quota models:m/ rows=60\n";
  server::ServerOptions options = WithBudget(48 << 20);
  options.access_file = directory.File("access");
  TestServer server(std::move(options));
  grpc::Status status = Import(server.encodings(), "m/x", AimetFile(20, 1));
  EXPECT_TRUE(status.ok()) << status.error_message();
  const auto before = server.store().ListEncodings("m/x", "main", "", 100);
  ASSERT_EQ(before->size(), 20u);
  status = Import(server.encodings(), "m/x", AimetFile(50, 1));
  EXPECT_THAT(status.error_message(), StartsWith("QUOTA_EXCEEDED"));
  const auto after = server.store().ListEncodings("m/x", "main", "", 100);
  ASSERT_EQ(after->size(), 20u);
  for (size_t i = 0; i < after->size(); ++i) {
    EXPECT_EQ((*after)[i].stored.etag, (*before)[i].stored.etag);
  }
  EXPECT_EQ(server.store().ListRevisions("m/x", "", 10)->size(), 1u);
  status = Import(server.encodings(), "m/x", AimetFile(40, 1));
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(server.store().ListEncodings("m/x", "main", "", 100)->size(), 40u);
  EXPECT_EQ(server.store().ListRevisions("m/x", "", 10)->size(), 1u);
}

TEST(ImportEncodingsTest, SeveralAtOnceAllGetDone) {
  TestServer server(WithBudget(32 << 20));
  const std::string file = AimetFile(15, 700);
  ASSERT_GT(file.size(), size_t{1} << 20);
  std::vector<std::thread> callers;
  std::vector<grpc::Status> ends(kSanitized ? 3 : 6);
  for (size_t i = 0; i < ends.size(); ++i) {
    callers.emplace_back([&, i] {
      ends[i] = Import(server.encodings(), absl::StrCat("m", i), file);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const grpc::Status& end : ends) {
    EXPECT_TRUE(end.ok()) << end.error_message();
  }
}

TEST(ImportEncodingsTest, WaitsForMemoryThatOthersHold) {
  TestServer server(WithBudget(16 << 20));
  grpc::ClientContext context;
  v1::ImportEncodingsResponse response;
  const auto other = server.encodings().ImportEncodings(&context, &response);
  v1::ImportEncodingsRequest request;
  request.set_model("other");
  request.set_data(std::string(1 << 20, ' '));
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(other->Write(request));
  ASSERT_TRUE(PollUntil(kLongEnough, [&] {
    return server.server().memory_used_bytes() >= 10 << 20;
  }));
  const std::string file = AimetFile(15, 700);
  grpc::Status end;
  std::atomic<bool> is_done{false};
  std::thread caller([&] {
    end = Import(server.encodings(), "m", file);
    is_done.store(true);
  });
  // Longer than a turn of who looks after those that wait.
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_FALSE(is_done.load());
  context.TryCancel();
  caller.join();
  EXPECT_TRUE(end.ok()) << end.error_message();
}

TEST(ImportEncodingsTest, EndsWithItsReasonWhereItNeverFits) {
  TestServer server(WithBudget(8 << 20));
  const grpc::Status end =
      Import(server.encodings(), "m", AimetFile(1, 20'000), 256 << 10);
  EXPECT_EQ(end.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(end.error_message(), StartsWith("MEMORY_BUDGET"));
}

// A loss of more than 1 MiB of others is among those that are told.
TEST(ImportEncodingsTest, TellsFirstWhatIsLeftOut) {
  TestServer server;
  const std::string tail(1000, 'x');
  std::string file = R"({"version":"0.6.1","param_encodings":{)";
  constexpr int kCount = 1500;
  for (int i = 0; i < kCount; ++i) {
    // The scale is not float32.
    absl::StrAppend(&file, "\"t", i, tail,
                    R"(":[{"bitwidth":8,"scale":0.1,"offset":-8}],)");
  }
  file += R"("bad":[{"bitwidth":32,"scale":1,"offset":0}]}})";
  v1::ImportEncodingsResponse answer;
  const grpc::Status status =
      Import(server.encodings(), "m", file, 1 << 20, &answer);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(answer.encoding_count(), uint64_t{kCount});
  EXPECT_EQ(answer.loss_count(), uint64_t{kCount + 1});
  EXPECT_LE(answer.ByteSizeLong(), size_t{1} << 20);
  ASSERT_GT(answer.losses_size(), kCount / 2);
  ASSERT_LT(answer.losses_size(), kCount);
  EXPECT_EQ(answer.losses(0).tensor(), "t0" + tail);
  const v1::InterchangeLoss& last = answer.losses(answer.losses_size() - 1);
  EXPECT_EQ(last.tensor(), "bad");
  EXPECT_TRUE(last.left_out());
}

TEST(ImportQueueTest, TakesThoseOfACallerInTurn) {
  server::ImportQueue queue(1000);
  const int a = 0, b = 0;
  EXPECT_TRUE(queue.MayTry(&a, 1));
  EXPECT_TRUE(queue.MayTry(&b, 1));
  queue.LineUp(&a, 1);
  queue.LineUp(&b, 1);
  queue.LineUp(&a, 1);
  EXPECT_TRUE(queue.MayTry(&a, 1));
  EXPECT_FALSE(queue.MayTry(&b, 1));
  queue.Leave(&a, 1);
  EXPECT_TRUE(queue.MayTry(&b, 1));
  queue.Leave(&b, 1);
  EXPECT_TRUE(queue.MayTry(&a, 1));
}

TEST(ImportQueueTest, CallersDoNotWaitForEachOther) {
  server::ImportQueue queue(1000);
  const int a = 0, b = 0;
  queue.LineUp(&a, 1);
  EXPECT_TRUE(queue.MayTry(&b, 2));
  queue.LineUp(&b, 2);
  EXPECT_TRUE(queue.MayTry(&a, 1));
  EXPECT_TRUE(queue.MayTry(&b, 2));
  queue.Leave(&b, 2);
  EXPECT_TRUE(queue.MayTry(&a, 1));
}

TEST(ImportQueueTest, FilesHaveAShareOfTheMemoryAndTheFirstOneMore) {
  server::ImportQueue queue(1000);
  const int first = 0, second = 0;
  int64_t a = 0, b = 0;
  EXPECT_TRUE(queue.GrowText(&first, &a, 700));
  EXPECT_TRUE(queue.GrowText(&second, &b, 300));
  EXPECT_FALSE(queue.GrowText(&second, &b, 301));
  EXPECT_EQ(b, 300);
  EXPECT_TRUE(queue.GrowText(&first, &a, 5000));
  queue.ReturnText(&first, &a);
  EXPECT_TRUE(queue.GrowText(&second, &b, 2000));
  EXPECT_FALSE(queue.GrowText(&first, &a, 1));
  queue.ReturnText(&second, &b);
  EXPECT_TRUE(queue.GrowText(&first, &a, 1));
}

}  // namespace
}  // namespace quantd::testing
