// The quantd binary, as a process of its own.

#ifndef QUANTD_TESTS_SUPPORT_SERVER_PROCESS_H_
#define QUANTD_TESTS_SUPPORT_SERVER_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "tests/support/test_server.h"

namespace quantd::testing {

// Not thread-safe.
class ServerProcess {
 public:
  // Runs `binary` on free loopback ports over the SQLite file `store_path`,
  // with more `flags`, and waits until it serves. Aborts the test program if
  // it does not.
  ServerProcess(const std::string& binary, const std::string& store_path,
                const std::vector<std::string>& flags);
  // Kills the process if it still runs.
  ~ServerProcess();

  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  // host:port of gRPC and of the metrics.
  const std::string& address() const { return address_; }
  const std::string& metrics_address() const { return metrics_address_; }
  pid_t pid() const { return pid_; }
  // A connection of its own.
  std::shared_ptr<grpc::Channel> NewChannel() const;

  void Signal(int signal);
  // kill -9, and waits until the process is gone.
  void Kill();
  // SIGTERM, and waits for the end. The exit code, or 128 and the signal that
  // ended it.
  int Terminate();

 private:
  int Wait();
  // What the process wrote.
  std::string Log() const;

  TemporaryDirectory directory_;
  pid_t pid_ = -1;
  std::string address_;
  std::string metrics_address_;
};

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_SERVER_PROCESS_H_
