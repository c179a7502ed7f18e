// A server in this process, on loopback, over its own SQLite file.

#ifndef QUANTD_TESTS_SUPPORT_TEST_SERVER_H_
#define QUANTD_TESTS_SUPPORT_TEST_SERVER_H_

#include <memory>
#include <string>

#include "grpcpp/grpcpp.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "server/metrics/metrics.h"
#include "server/quantd_server.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"
#include "tests/support/temporary_directory.h"

namespace quantd::testing {

class TestServer {
 public:
  // Listens on 127.0.0.1:0; aborts the test program if that fails.
  explicit TestServer(server::ServerOptions options = {});
  // The same over stores of the caller, which outlive it; null for none.
  TestServer(server::ServerOptions options, server::EncodingStore* encodings,
             server::StatisticsStore* statistics);
  ~TestServer();

  const std::string& address() const { return server_->addresses()[0]; }
  std::shared_ptr<grpc::Channel> NewChannel() const;
  v1::QuantizationService::Stub& quantization() { return *quantization_; }
  v1::EncodingService::Stub& encodings() { return *encodings_; }
  server::QuantdServer& server() { return *server_; }
  server::Metrics& metrics() { return metrics_; }
  // Requires: over its own file.
  server::EncodingStore& store() { return *store_; }
  server::StatisticsStore& statistics() { return *statistics_; }

 private:
  void Start(server::ServerOptions options, server::EncodingStore* encodings,
             server::StatisticsStore* statistics);

  TemporaryDirectory directory_;
  server::Metrics metrics_;
  std::unique_ptr<server::EncodingStore> store_;
  std::unique_ptr<server::StatisticsStore> statistics_;
  std::unique_ptr<server::QuantdServer> server_;
  std::unique_ptr<v1::QuantizationService::Stub> quantization_;
  std::unique_ptr<v1::EncodingService::Stub> encodings_;
};

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_TEST_SERVER_H_
