// The limit of gRPC for small tensors: a stream of messages without content,
// on both sides with the callback API and raw bytes.
//
//   grpc_echo serve DOWN_BYTES
//   grpc_echo drive PORT UP_BYTES IN_FLIGHT SECONDS
//
// A message up is answered by one down of DOWN_BYTES. `serve` prints its port
// and runs until it is ended; `drive` keeps IN_FLIGHT messages on one stream
// and prints how many were answered and how long that took. Messages that wait
// for the one before go out together.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "tests/bench/peers/drive.h"

namespace quantd::bench {
namespace {

constexpr char kMethod[] = "/quantd.bench.Echo/Stream";

grpc::ByteBuffer MessageOf(size_t size) {
  const grpc::Slice slice(std::string(size, 'x'));
  return grpc::ByteBuffer(&slice, 1);
}

grpc::WriteOptions Options(bool more_follow) {
  grpc::WriteOptions options;
  if (more_follow) options.set_buffer_hint();
  return options;
}

// Answers one stream. Thread-safe.
class EchoReactor final : public grpc::ServerGenericBidiReactor {
 public:
  explicit EchoReactor(size_t down_bytes) : answer_(MessageOf(down_bytes)) {
    StartRead(&request_);
  }

  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      if (ok) {
        ++unanswered_;
      } else {
        reads_done_ = true;
      }
      Advance();
    }
    if (ok) StartRead(&request_);
  }

  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) unanswered_ = 0;
    Advance();
  }

  void OnDone() override { delete this; }

 private:
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_) return;
    if (unanswered_ > 0) {
      writing_ = true;
      --unanswered_;
      StartWrite(&answer_, Options(unanswered_ > 0));
    } else if (reads_done_) {
      Finish(grpc::Status::OK);
    }
  }

  const grpc::ByteBuffer answer_;
  grpc::ByteBuffer request_;
  absl::Mutex mutex_;
  int unanswered_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool reads_done_ ABSL_GUARDED_BY(mutex_) = false;
};

class EchoService final : public grpc::CallbackGenericService {
 public:
  explicit EchoService(size_t down_bytes) : down_bytes_(down_bytes) {}

  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext*) override {
    return new EchoReactor(down_bytes_);
  }

 private:
  const size_t down_bytes_;
};

int Serve(size_t down_bytes) {
  EchoService service(down_bytes);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(),
                           &port);
  builder.RegisterCallbackGenericService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  std::printf("%d\n", port);
  std::fflush(stdout);
  server->Wait();
  return 0;
}

// Drives one stream until the window is over. Thread-safe.
class EchoDriver final
    : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  EchoDriver(size_t up_bytes, size_t in_flight, const Window& window)
      : message_(MessageOf(up_bytes)), in_flight_(in_flight), window_(window) {}

  // Returns when the stream has ended.
  void Run(const std::shared_ptr<grpc::Channel>& channel) {
    grpc::GenericStub stub(channel);
    stub.PrepareBidiStreamingCall(&context_, kMethod, grpc::StubOptions(),
                                  this);
    StartRead(&answer_);
    StartCall();
    {
      absl::MutexLock lock(&mutex_);
      Advance();
    }
    done_.WaitForNotification();
  }

  std::vector<Clock::duration> TakeLatencies() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return std::move(latencies_);
  }

  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_) {
    if (!ok) return;
    {
      absl::MutexLock lock(&mutex_);
      const Clock::time_point now = Clock::now();
      if (window_.Counts(now)) latencies_.push_back(now - starts_.front());
      starts_.pop_front();
      over_ = window_.Over(now);
      Advance();
    }
    StartRead(&answer_);
  }

  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_) {
    if (!ok) return;
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    Advance();
  }

  void OnDone(const grpc::Status&) override { done_.Notify(); }

 private:
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_) return;
    if (over_) {
      finished_ = true;
      StartWritesDone();
    } else if (starts_.size() < in_flight_) {
      writing_ = true;
      starts_.push_back(Clock::now());
      StartWrite(&message_, Options(starts_.size() < in_flight_));
    }
  }

  const grpc::ByteBuffer message_;
  const size_t in_flight_;
  const Window& window_;
  grpc::ClientContext context_;
  grpc::ByteBuffer answer_;
  absl::Notification done_;
  absl::Mutex mutex_;
  // Of the messages that are not answered.
  std::deque<Clock::time_point> starts_ ABSL_GUARDED_BY(mutex_);
  std::vector<Clock::duration> latencies_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

int Drive(int port, size_t up_bytes, size_t in_flight, double seconds) {
  const auto channel = grpc::CreateChannel(absl::StrCat("127.0.0.1:", port),
                                           grpc::InsecureChannelCredentials());
  const Window window(seconds);
  EchoDriver driver(up_bytes, in_flight, window);
  driver.Run(channel);
  PrintRoundTrips(driver.TakeLatencies(), window);
  return 0;
}

int Main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "serve") == 0) {
    return Serve(std::strtoul(argv[2], nullptr, 10));
  }
  if (argc == 6 && std::strcmp(argv[1], "drive") == 0) {
    return Drive(std::atoi(argv[2]), std::strtoul(argv[3], nullptr, 10),
                 std::max(1ul, std::strtoul(argv[4], nullptr, 10)),
                 std::atof(argv[5]));
  }
  std::fprintf(stderr,
               "usage: grpc_echo serve DOWN_BYTES\n"
               "       grpc_echo drive PORT UP_BYTES IN_FLIGHT SECONDS\n");
  return 2;
}

}  // namespace
}  // namespace quantd::bench

int main(int argc, char** argv) { return quantd::bench::Main(argc, argv); }
