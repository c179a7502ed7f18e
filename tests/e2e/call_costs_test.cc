// What calls of EncodingService may cost: before their caller is known, while
// they wait for a client, and once nobody wants them any more.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "core/formats/number_format.h"
#include "core/statistics/statistics_state.h"
#include "core/types/encoding.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "server/guard/limits.h"
#include "server/store/encoding_store.h"
#include "tests/support/metric_value.h"
#include "tests/support/raw_stream.h"
#include "tests/support/sanitizers.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/test_server.h"

namespace quantd::testing::call_costs_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kService[] = "/quantd.v1.EncodingService/";
// The digest of "abc".
constexpr char kAccess[] =
    "ci sha256:"
    "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad "
    "read,calibrate *\n";

// Requires: `count` is a power of two.
std::string Repeated(const std::string& bytes, size_t count) {
  std::string repeated = bytes;
  while (repeated.size() < count * bytes.size()) repeated += repeated;
  return repeated;
}

// The end of a call that sends one message, or none.
grpc::Status Ask(const std::shared_ptr<grpc::Channel>& channel,
                 const std::string& method, const std::string* request) {
  RawStream stream(channel, kService + method);
  if (request != nullptr) {
    stream.Write(*request);
    stream.WritesDone();
    std::string answer;
    while (stream.Read(&answer)) {
    }
  }
  return stream.Finish();
}

server::ServerOptions Impatient(absl::Duration idle_timeout) {
  server::ServerOptions options;
  options.limits.idle_timeout = idle_timeout;
  return options;
}

TEST(CallCostsTest, ServesEveryMethodOfTheProto) {
  TestServer server;
  const auto channel = server.NewChannel();
  const std::string nothing;
  const google::protobuf::ServiceDescriptor* const service =
      google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(
          v1::EncodingService::service_full_name());
  ASSERT_NE(service, nullptr);
  for (int i = 0; i < service->method_count(); ++i) {
    const std::string& name = service->method(i)->name();
    const grpc::Status status = Ask(channel, name, &nothing);
    EXPECT_NE(status.error_code(), grpc::StatusCode::UNIMPLEMENTED) << name;
  }
}

TEST(CallCostsTest, RefusesRequestsThatWouldGrowTooLarge) {
  server::ServerOptions options;
  options.limits.message_bytes = 4 << 20;
  TestServer server(std::move(options));
  const auto channel = server.NewChannel();
  constexpr size_t kCount = 1 << 20;
  const std::vector<std::pair<std::string, std::string>> requests = {
      {"Sweep", Repeated({"\x1a\0", 2}, kCount)},
      {"ComputeEncodings", Repeated({"\x22\0", 2}, kCount)},
      {"ExportEncodings", Repeated({"\x22\0", 2}, kCount)},
      {"ImportEncodings", Repeated({"\x2a\0", 2}, kCount)},
      {"PutEncoding", Repeated("\x78\x01", kCount)},
      {"GetEncoding", Repeated("\x78\x01", 64 << 10)}};
  for (const auto& [method, request] : requests) {
    const grpc::Status status = Ask(channel, method, &request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED)
        << method;
    EXPECT_THAT(status.error_message(), StartsWith("REQUEST_TOO_LARGE"))
        << method;
  }
  EXPECT_TRUE(PollUntil(
      kLongEnough, [&] { return server.server().memory_used_bytes() == 0; }));
}

TEST(CallCostsTest, RefusesMorePatternsThanItTries) {
  TestServer server;
  const auto channel = server.NewChannel();
  v1::SweepRequest sweep;
  sweep.set_model("m");
  sweep.add_specs()->set_format(v1::NUMBER_FORMAT_INT8);
  v1::ComputeEncodingsRequest compute;
  compute.set_model("m");
  v1::ExportEncodingsRequest exported;
  exported.set_model("m");
  for (int i = 0; i < 1001; ++i) {
    sweep.add_patterns("*");
    compute.add_overrides()->set_pattern("*");
    exported.add_parameter_patterns("*");
  }
  const std::vector<std::pair<std::string, std::string>> requests = {
      {"Sweep", sweep.SerializeAsString()},
      {"ComputeEncodings", compute.SerializeAsString()},
      {"ExportEncodings", exported.SerializeAsString()}};
  for (const auto& [method, request] : requests) {
    EXPECT_THAT(Ask(channel, method, &request).error_message(),
                StartsWith("PATTERN_INVALID: 1001 patterns"))
        << method;
  }
}

TEST(CallCostsTest, ChargesRequestsToTheMemoryBudget) {
  server::ServerOptions options;
  options.limits.memory_budget_bytes = 4 << 20;
  TestServer server(std::move(options));
  v1::PutEncodingRequest request;
  request.mutable_name()->set_model("m");
  request.mutable_name()->set_tensor("t");
  for (int i = 0; i < 1 << 20; ++i) {
    request.mutable_encoding()->add_zero_point(0);
  }
  grpc::ClientContext context;
  v1::PutEncodingResponse response;
  const grpc::Status status =
      server.encodings().PutEncoding(&context, request, &response);
  EXPECT_THAT(status.error_message(), StartsWith("MEMORY_BUDGET"));
}

TEST(CallCostsTest, ChargesScaleCodesForTheScalesThatTheyStandFor) {
  server::ServerOptions options;
  options.limits.memory_budget_bytes = int64_t{8} << 20;
  TestServer server(std::move(options));
  v1::PutEncodingRequest request;
  request.mutable_name()->set_model("m");
  request.mutable_name()->set_tensor("t");
  v1::Encoding* const encoding = request.mutable_encoding();
  encoding->set_format(v1::NUMBER_FORMAT_MXINT8);
  encoding->set_scale_type(v1::SCALE_TYPE_E8M0);
  encoding->set_scale_code(std::string(2 << 20, '\x7f'));
  grpc::ClientContext context;
  v1::PutEncodingResponse response;
  const grpc::Status status =
      server.encodings().PutEncoding(&context, request, &response);
  EXPECT_THAT(status.error_message(), StartsWith("MEMORY_BUDGET"));
}

TEST(CallCostsTest, KnowsTheCallerBeforeTheRequestComes) {
  TemporaryDirectory directory;
  std::ofstream(directory.File("access")) << kAccess;
  server::ServerOptions options;
  options.access_file = directory.File("access");
  TestServer server(std::move(options));
  const auto channel = server.NewChannel();
  for (const char* method : {"PutEncoding", "Sweep", "ImportEncodings"}) {
    EXPECT_EQ(Ask(channel, method, nullptr).error_code(),
              grpc::StatusCode::UNAUTHENTICATED)
        << method;
  }
}

TEST(CallCostsTest, EndsWhenItsTokenIsTakenAway) {
  TemporaryDirectory directory;
  std::ofstream(directory.File("access")) << kAccess;
  server::ServerOptions options;
  options.access_file = directory.File("access");
  TestServer server(std::move(options));
  grpc::ClientContext context;
  context.AddMetadata("authorization", "Bearer abc");
  v1::ImportEncodingsResponse response;
  const auto stream = server.encodings().ImportEncodings(&context, &response);
  v1::ImportEncodingsRequest request;
  request.set_model("m");
  request.set_data("{");
  ASSERT_TRUE(stream->Write(request));
  std::ofstream(directory.File("access")) << "# nobody\n";
  EXPECT_TRUE(PollUntil(kLongEnough, [&] { return !stream->Write(request); }));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

TEST(CallCostsTest, EndsWithoutARequest) {
  TestServer server(Impatient(absl::Milliseconds(100)));
  const auto channel = server.NewChannel();
  for (const char* method : {"GetEncoding", "Sweep", "ImportEncodings"}) {
    EXPECT_THAT(Ask(channel, method, nullptr).error_message(),
                StartsWith("STREAM_IDLE"))
        << method;
  }
}

TEST(CallCostsTest, EndsAnImportThatGoesOnForTooLong) {
  server::ServerOptions options;
  options.limits.stream_age = absl::Milliseconds(200);
  TestServer server(std::move(options));
  grpc::ClientContext context;
  v1::ImportEncodingsResponse response;
  const auto stream = server.encodings().ImportEncodings(&context, &response);
  v1::ImportEncodingsRequest request;
  request.set_model("m");
  request.set_data(" ");
  EXPECT_TRUE(PollUntil(kLongEnough, [&] { return !stream->Write(request); }));
  EXPECT_THAT(stream->Finish().error_message(), StartsWith("STREAM_AGE"));
}

// One of so many scales.
core::Encoding ManyScales(int64_t count) {
  const core::FormatInfo& info = *core::FindFormatByName("int8");
  core::Encoding encoding;
  encoding.format = info.format;
  encoding.qmin = info.qmin;
  encoding.qmax = info.qmax;
  encoding.block_size = {1};
  encoding.scale_shape = {count};
  encoding.scale.assign(static_cast<size_t>(count), 1.0f / 3);
  return encoding;
}

TEST(CallCostsTest, HoldsAnAnswerThatIsNotReadOnlyForSoLong) {
  TestServer server(Impatient(absl::Milliseconds(200)));
  const auto stored = server.store().Put(
      {"m", "main", "t"},
      std::make_shared<const core::Encoding>(ManyScales(512 << 10)), {});
  ASSERT_TRUE(stored.ok()) << stored.status();
  v1::GetEncodingRequest get;
  get.mutable_name()->set_model("m");
  get.mutable_name()->set_tensor("t");
  // On a busy machine a request may come later than the server waits for it.
  std::unique_ptr<RawStream> stream;
  const auto is_held = [&] {
    return server.server().memory_used_bytes() >= 2 << 20;
  };
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    stream = std::make_unique<RawStream>(server.NewChannel(),
                                         absl::StrCat(kService, "GetEncoding"));
    return stream->Write(get.SerializeAsString()) &&
           PollUntil(absl::Seconds(1), is_held);
  }));
  // Well before the client gives up.
  EXPECT_TRUE(PollUntil(kLongEnough / 2, [&] {
    return server.server().memory_used_bytes() == 0;
  }));
}

TEST(CallCostsTest, WritesThatHaveJustBegunHoldLittle) {
  constexpr int kCount = 100;
  server::ServerOptions options = Impatient(absl::Hours(1));
  options.limits.memory_budget_bytes = kCount * (64 << 10);
  TestServer server(std::move(options));
  v1::WriteEncodingRequest request;
  request.mutable_name()->set_model("m");
  v1::Encoding* const encoding = request.mutable_encoding();
  encoding->set_format(v1::NUMBER_FORMAT_INT8);
  encoding->set_scales_in_chunks(true);
  encoding->add_block_size(1);
  encoding->add_scale_shape(1 << 20);
  const auto channel = server.NewChannel();
  std::vector<std::unique_ptr<RawStream>> streams;
  for (int i = 0; i < kCount; ++i) {
    request.mutable_name()->set_tensor(absl::StrCat("t", i));
    streams.push_back(std::make_unique<RawStream>(
        channel, absl::StrCat(kService, "WriteEncoding")));
    ASSERT_TRUE(streams.back()->Write(request.SerializeAsString()));
  }
  // There is room for all of them at once.
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    return server.server().memory_used_bytes() >= kCount * (16 << 10);
  }));
  for (const std::unique_ptr<RawStream>& stream : streams) {
    stream->WritesDone();
    EXPECT_THAT(stream->Finish().error_message(), StartsWith("SCALE_COUNT"));
  }
  EXPECT_TRUE(PollUntil(
      kLongEnough, [&] { return server.server().memory_used_bytes() == 0; }));
}

TEST(CallCostsTest, DoesNotKeepAServerThatDrains) {
  server::ServerOptions options;
  // Longer than the client waits.
  options.drain_grace = absl::Hours(1);
  TestServer server(std::move(options));
  const auto channel = server.NewChannel();
  RawStream unary(channel, absl::StrCat(kService, "GetEncoding"));
  RawStream import(channel, absl::StrCat(kService, "ImportEncodings"));
  v1::ImportEncodingsRequest request;
  request.set_model("m");
  ASSERT_TRUE(import.Write(request.SerializeAsString()));
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    return MetricValue(server.metrics(), "grpc_server_started_total") == 2;
  }));
  std::thread drain([&server] { server.server().Drain(); });
  EXPECT_THAT(unary.Finish().error_message(), StartsWith("DRAINING"));
  EXPECT_THAT(import.Finish().error_message(), StartsWith("DRAINING"));
  drain.join();
}

// Makes calls that take long, with `run`, which tells when all of them have
// been sent; and others from then on until those have ended. They take turns
// when many others are answered meanwhile. Without turns the first that comes
// behind the long ones waits for them; a few may come before.
void ExpectTurns(
    TestServer* server, const std::string& what,
    absl::FunctionRef<void(absl::FunctionRef<void()> are_sent)> run) {
  // A hiccup of a busy machine spoils an attempt, and hardly all of them.
  constexpr int kAttempts = 6;
  constexpr int kLeastAnswers = 10;
  // A request that is not light takes a turn of the only worker, then of the
  // store's threads. A field that nobody knows makes it large.
  v1::ListModelsRequest other;
  other.GetReflection()->MutableUnknownFields(&other)->AddLengthDelimited(
      1000, std::string(size_t{16} << 10, '~'));
  int answer_count = 0;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    absl::Notification sent;
    std::atomic<bool> done = false;
    std::thread runner([&] {
      run([&] { sent.Notify(); });
      done.store(true);
    });
    sent.WaitForNotification();
    answer_count = 0;
    while (!done.load()) {
      grpc::ClientContext context;
      v1::ListModelsResponse response;
      const grpc::Status status =
          server->encodings().ListModels(&context, other, &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
      if (!done.load()) ++answer_count;
    }
    runner.join();
    if (answer_count >= kLeastAnswers) return;
  }
  ADD_FAILURE() << what << ": " << answer_count
                << " others were answered during the last attempt";
}

// A client that exports, and reads when it is told to.
class ExportTest : public ::testing::Test {
 protected:
  static server::EncodingKey Key(const std::string& tensor) {
    return {"m", "main", tensor};
  }

  void Serve(const server::Limits& limits) {
    server::ServerOptions options;
    options.limits = limits;
    server_ = std::make_unique<TestServer>(std::move(options));
  }

  void Put(const std::string& tensor, int64_t scale_count) {
    const absl::StatusOr<server::StoredEncoding> stored = server_->store().Put(
        Key(tensor),
        std::make_shared<const core::Encoding>(ManyScales(scale_count)), {});
    ASSERT_TRUE(stored.ok()) << stored.status();
  }

  void Export(v1::InterchangeFormat format = v1::INTERCHANGE_FORMAT_JSON) {
    stream_ = std::make_unique<RawStream>(
        server_->NewChannel(), absl::StrCat(kService, "ExportEncodings"));
    v1::ExportEncodingsRequest request;
    request.set_model("m");
    request.set_format(format);
    ASSERT_TRUE(stream_->Write(request.SerializeAsString()));
    stream_->WritesDone();
  }

  // The messages that are left.
  int ReadAll() {
    int count = 0;
    std::string message;
    while (stream_->Read(&message)) ++count;
    return count;
  }

  int64_t used_bytes() const { return server_->server().memory_used_bytes(); }

  std::unique_ptr<TestServer> server_;
  std::unique_ptr<RawStream> stream_;
};

// 50 MB while it was written, 3 MB of text.
constexpr int64_t kLongText = 256 << 10;

TEST_F(ExportTest, HoldsNoMoreThanItsTextWhileTheClientDoesNotRead) {
  Serve({});
  Put("a", kLongText);
  Export();
  // What comes has been written, and the rest waits for the client.
  std::string message;
  ASSERT_TRUE(stream_->Read(&message));
  EXPECT_TRUE(PollUntil(kLongEnough, [&] { return used_bytes() < 16 << 20; }));
  EXPECT_GE(ReadAll(), 2);
  EXPECT_EQ(stream_->Finish().error_message(), "");
}

TEST_F(ExportTest, EndsAtTwiceTheAgeForAClientThatDoesNotRead) {
  server::Limits limits;
  limits.idle_timeout = absl::Hours(1);
  bool is_held = false;
  // On a busy machine it may come to that age before there is an answer.
  for (limits.stream_age = absl::Milliseconds(500);
       !is_held && limits.stream_age < kLongEnough / 4;
       limits.stream_age *= 2) {
    stream_.reset();
    Serve(limits);
    Put("a", kLongText);
    Export();
    EXPECT_TRUE(PollUntil(kLongEnough, [&] {
      is_held = used_bytes() >= 2 << 20;
      return is_held ||
             MetricValue(server_->metrics(), "grpc_server_handled_total") == 1;
    }));
  }
  EXPECT_TRUE(is_held);
  // Well before the client gives up.
  EXPECT_TRUE(PollUntil(kLongEnough / 2, [&] { return used_bytes() == 0; }));
}

TEST_F(ExportTest, EndsAtItsAgeBetweenTwoMessages) {
  server::Limits limits;
  limits.stream_age = absl::Seconds(1);
  Serve(limits);
  Put("a", kLongText);
  Export();
  const absl::Time end = absl::Now() + limits.stream_age;
  EXPECT_TRUE(PollUntil(kLongEnough, [&] { return absl::Now() >= end; }));
  ReadAll();
  const grpc::Status status = stream_->Finish();
  // Where all of this takes long, it is twice the age by now.
  if (status.error_code() != grpc::StatusCode::CANCELLED) {
    EXPECT_THAT(status.error_message(), StartsWith("STREAM_AGE"));
  }
}

TEST_F(ExportTest, ChargesWhatTheStoreHasNotWhatTheListSaid) {
  server::Limits limits;
  limits.memory_budget_bytes = 96 << 20;
  Serve(limits);
  Put("a", kLongText);
  Put("b", 1);
  Export();
  // The first message waits for the client.
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    return used_bytes() >= 2 << 20 && used_bytes() < 16 << 20;
  }));
  Put("b", 1 << 20);
  ReadAll();
  EXPECT_THAT(stream_->Finish().error_message(), StartsWith("MEMORY_BUDGET"));
}

TEST(CallCostsTest, ChargesPagesOfTensorsWithStatistics) {
  server::ServerOptions options;
  options.limits.memory_budget_bytes = 128 << 10;
  TestServer server(std::move(options));
  core::StatisticsState state;
  state.shape = {1};
  state.statistics = core::TensorStatistics(1, 7);
  const std::string prefix(1000, 'n');
  for (int i = 0; i < 150; ++i) {
    ASSERT_TRUE(
        server.statistics()
            .Contribute({{"m", "main", absl::StrCat(prefix, i)}, "a", 1}, state,
                        0)
            .ok());
  }
  v1::SweepRequest request;
  request.set_model("m");
  request.add_specs()->set_format(v1::NUMBER_FORMAT_INT8);
  // They are read, and none is kept.
  request.add_patterns("other");
  const std::string bytes = request.SerializeAsString();
  EXPECT_THAT(Ask(server.NewChannel(), "Sweep", &bytes).error_message(),
              StartsWith("MEMORY_BUDGET"));
}

// 150 names of a KiB take 180 KB as a page, and as text in an answer.
TEST_F(ExportTest, ChargesPagesOfNames) {
  server::Limits limits;
  limits.memory_budget_bytes = 300 << 10;
  Serve(limits);
  const std::string prefix(1000, 'n');
  for (int i = 0; i < 150; ++i) Put(absl::StrCat(prefix, i), 1);
  grpc::ClientContext context;
  v1::ListEncodingsRequest request;
  request.set_model("m");
  request.set_page_size(1000);
  v1::ListEncodingsResponse response;
  EXPECT_THAT(server_->encodings()
                  .ListEncodings(&context, request, &response)
                  .error_message(),
              StartsWith("MEMORY_BUDGET"));
}

// 520 names of a KiB take 620 KB as a page; at the second batch of encodings,
// which takes 1060 KB, a writer keeps 360 KB of the first.
TEST_F(ExportTest, ChargesPagesOfNamesAndWhatWritersKeepOfThem) {
  server::Limits limits;
  limits.memory_budget_bytes = 1800 << 10;
  Serve(limits);
  const std::string prefix(1000, 'n');
  for (int i = 0; i < 520; ++i) Put(absl::StrCat(prefix, i, ".weight"), 1);
  // Neither the page nor what is kept is too much by itself.
  Export(v1::INTERCHANGE_FORMAT_COMPRESSED_TENSORS);
  ReadAll();
  EXPECT_THAT(stream_->Finish().error_message(), StartsWith("MEMORY_BUDGET"));
  EXPECT_TRUE(PollUntil(kLongEnough, [&] { return used_bytes() == 0; }));
}

TEST_F(ExportTest, LetsOthersHaveTheirTurnWithinAnEncoding) {
  Serve({});
  // Long enough for many others.
  Put("a", 4 * kLongText);
  ExpectTurns(server_.get(), "ExportEncodings", [this](auto are_sent) {
    Export();
    are_sent();
    ReadAll();
    EXPECT_EQ(stream_->Finish().error_message(), "");
  });
}

// Names and patterns that it takes long to tell apart.
class LongMatchingTest : public ::testing::Test {
 protected:
  // As many calls as there are threads for the store.
  static constexpr int kCalls = 4;
  static constexpr int kTensors = 20;
  static constexpr int kPatterns = kThreadSanitized ? 100
                                   : kSanitized     ? 400
                                                    : 500;

  static std::string Name(int i) {
    return absl::StrCat(std::string(1000, 'a'), i);
  }
  static std::string Pattern() {
    return absl::StrCat("*", std::string(1000, 'a'), "b");
  }

  void ContributeToAll() {
    for (int i = 0; i < kTensors; ++i) {
      core::StatisticsState state;
      state.shape = {1};
      state.statistics = core::TensorStatistics(1, 7);
      ASSERT_TRUE(server_.statistics()
                      .Contribute({{"m", "main", Name(i)}, "a", 1}, state, 0)
                      .ok());
    }
  }

  void StoreAll() {
    for (int i = 0; i < kTensors; ++i) {
      ASSERT_TRUE(
          server_.store()
              .Put({"m", "main", Name(i)},
                   std::make_shared<const core::Encoding>(ManyScales(1)), {})
              .ok());
    }
  }

  // Makes calls at once, each to its end, and others meanwhile.
  void ExpectTurnsDuring(const std::string& method, const std::string& request,
                         int call_count) {
    ExpectTurns(&server_, method, [&](auto are_sent) {
      std::vector<std::unique_ptr<RawStream>> streams;
      const auto channel = server_.NewChannel();
      for (int i = 0; i < call_count; ++i) {
        streams.push_back(
            std::make_unique<RawStream>(channel, kService + method));
        EXPECT_TRUE(streams.back()->Write(request));
        streams.back()->WritesDone();
      }
      are_sent();
      for (const auto& stream : streams) {
        std::string answer;
        while (stream->Read(&answer)) {
        }
        EXPECT_NE(stream->Finish().error_code(),
                  grpc::StatusCode::RESOURCE_EXHAUSTED);
      }
    });
  }

  TestServer server_;
};

TEST_F(LongMatchingTest, LetsOthersHaveTheirTurnInComputing) {
  ContributeToAll();
  v1::SweepRequest sweep;
  sweep.set_model("m");
  sweep.add_specs()->set_format(v1::NUMBER_FORMAT_INT8);
  v1::ComputeEncodingsRequest compute;
  compute.set_model("m");
  for (int i = 0; i < kPatterns; ++i) {
    sweep.add_patterns(Pattern());
    compute.add_overrides()->set_pattern(Pattern());
    compute.mutable_overrides(i)->mutable_spec()->set_format(
        v1::NUMBER_FORMAT_INT8);
  }
  ExpectTurnsDuring("Sweep", sweep.SerializeAsString(), kCalls);
  ExpectTurnsDuring("ComputeEncodings", compute.SerializeAsString(), kCalls);
}

TEST_F(LongMatchingTest, FillsItsMessages) {
  StoreAll();
  v1::ExportEncodingsRequest request;
  request.set_model("m");
  request.set_format(v1::INTERCHANGE_FORMAT_JSON);
  for (int i = 1; i < kPatterns; ++i) request.add_patterns(Pattern());
  request.add_patterns("*");
  RawStream stream(server_.NewChannel(),
                   absl::StrCat(kService, "ExportEncodings"));
  ASSERT_TRUE(stream.Write(request.SerializeAsString()));
  stream.WritesDone();
  int messages = 0;
  std::string message;
  while (stream.Read(&message)) ++messages;
  EXPECT_EQ(messages, 1);
  EXPECT_EQ(stream.Finish().error_message(), "");
}

TEST_F(LongMatchingTest, LetsOthersHaveTheirTurnInWriting) {
  StoreAll();
  v1::ExportEncodingsRequest request;
  request.set_model("m");
  request.set_format(v1::INTERCHANGE_FORMAT_AIMET_1_0_0);
  // Long enough for the others, which AddressSanitizer does not slow down so.
  const int patterns = kThreadSanitized ? 250 : 1000;
  for (int i = 0; i < patterns; ++i) {
    request.add_parameter_patterns(Pattern());
  }
  ExpectTurnsDuring("ExportEncodings", request.SerializeAsString(), 1);
}

TEST_F(LongMatchingTest, LetsOthersHaveTheirTurnInImportAndExport) {
  v1::ImportEncodingsRequest import;
  import.set_model("m");
  std::string file =
      R"({"format": "quantd-encodings", "version": 1, "encodings": [)";
  for (int i = 0; i < kTensors; ++i) {
    absl::StrAppend(&file, i == 0 ? "" : ",", R"({"name": ")", Name(i),
                    R"(", "format": "int8", "scale": [1]})");
  }
  import.set_data(file + "]}");
  {
    grpc::ClientContext context;
    v1::ImportEncodingsResponse response;
    const auto stream =
        server_.encodings().ImportEncodings(&context, &response);
    ASSERT_TRUE(stream->Write(import));
    ASSERT_TRUE(stream->WritesDone());
    const grpc::Status status = stream->Finish();
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  import.set_dry_run(true);
  v1::ExportEncodingsRequest exported;
  exported.set_model("m");
  exported.set_format(v1::INTERCHANGE_FORMAT_JSON);
  for (int i = 0; i < kPatterns; ++i) {
    import.add_hints()->set_pattern(Pattern());
    exported.add_patterns(Pattern());
  }
  ExpectTurnsDuring("ImportEncodings", import.SerializeAsString(), kCalls);
  ExpectTurnsDuring("ExportEncodings", exported.SerializeAsString(), kCalls);
}

}  // namespace
}  // namespace quantd::testing::call_costs_test
