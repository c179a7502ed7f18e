// A gRPC call whose messages are any bytes.

#ifndef QUANTD_TESTS_SUPPORT_RAW_STREAM_H_
#define QUANTD_TESTS_SUPPORT_RAW_STREAM_H_

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"

namespace quantd::testing {

// Every operation waits until it is done. Not thread-safe.
class RawStream {
 public:
  // Starts a call of e.g. "/quantd.v1.QuantizationService/Quantize".
  RawStream(const std::shared_ptr<grpc::Channel>& channel,
            const std::string& method,
            absl::Duration timeout = absl::Minutes(2));
  // Cancels what has not ended.
  ~RawStream();

  // False when the call has ended.
  bool Write(const std::string& message);
  void WritesDone();
  // False when there is no further message.
  bool Read(std::string* message);
  grpc::Status Finish();

  void Cancel() { context_.TryCancel(); }

 private:
  // Waits for the operation that was started; whether it succeeded.
  bool Wait();

  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  bool finished_ = false;
};

// A channel over a TCP connection that can be cut.
class CuttableChannel {
 public:
  // `address` is "127.0.0.1:port".
  explicit CuttableChannel(const std::string& address);

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  // The peer sees the connection end, with no word to any of its calls.
  void Cut();

 private:
  int socket_ = -1;  // gRPC's, which closes it
  std::shared_ptr<grpc::Channel> channel_;
};

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_RAW_STREAM_H_
