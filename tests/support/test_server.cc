#include "tests/support/test_server.h"

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "server/store/metering_statistics_store.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sql_statistics_store.h"
#include "server/store/sqlite_database.h"

namespace quantd::testing {
namespace {

// The value, or the end of the test program.
template <typename T>
T ValueOrDie(absl::StatusOr<T> value) {
  if (!value.ok()) {
    std::fprintf(stderr, "%s\n", value.status().ToString().c_str());
    std::abort();
  }
  return *std::move(value);
}

}  // namespace

TestServer::TestServer(server::ServerOptions options) {
  const std::shared_ptr<server::SqliteDatabase> database =
      ValueOrDie(server::SqliteDatabase::Open(directory_.File("encodings.db")));
  store_ = std::make_unique<server::SqlEncodingStore>(database);
  statistics_ = std::make_unique<server::MeteringStatisticsStore>(
      std::make_unique<server::SqlStatisticsStore>(
          database, options.limits.statistics_bytes),
      &metrics_);
  Start(std::move(options), store_.get(), statistics_.get());
}

TestServer::TestServer(server::ServerOptions options,
                       server::EncodingStore* encodings,
                       server::StatisticsStore* statistics) {
  Start(std::move(options), encodings, statistics);
}

void TestServer::Start(server::ServerOptions options,
                       server::EncodingStore* encodings,
                       server::StatisticsStore* statistics) {
  if (options.listen.empty()) options.listen = {"127.0.0.1:0"};
  options.drain_delay = absl::ZeroDuration();
  server_ = ValueOrDie(
      server::QuantdServer::Start(options, encodings, statistics, &metrics_));
  const std::shared_ptr<grpc::Channel> channel = NewChannel();
  quantization_ = v1::QuantizationService::NewStub(channel);
  encodings_ = v1::EncodingService::NewStub(channel);
}

TestServer::~TestServer() = default;

std::shared_ptr<grpc::Channel> TestServer::NewChannel() const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  // A connection of its own, not one shared with other tests' channels.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Before it reads, a client takes the first 64 KiB of an answer. With a
  // window that grows with the measured bandwidth it may take all of it.
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  return grpc::CreateCustomChannel(
      address(), grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace quantd::testing
