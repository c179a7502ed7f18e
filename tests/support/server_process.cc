#include "tests/support/server_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "nlohmann/json.hpp"

namespace quantd::testing {
namespace {

constexpr absl::Duration kStartTimeout = absl::Minutes(2);

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

}  // namespace

ServerProcess::ServerProcess(const std::string& binary,
                             const std::string& store_path,
                             const std::vector<std::string>& flags) {
  const std::string ready_path = directory_.path() + "/ready.json";
  const std::string log_path = directory_.path() + "/quantd.log";
  std::vector<std::string> arguments = {
      binary,        "--listen", "127.0.0.1:0",          "--metrics-listen",
      "127.0.0.1:0", "--store",  "sqlite:" + store_path, "--ready-file",
      ready_path};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const int log = open(log_path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    // A test program that dies takes its server with it.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(log);
  const absl::Time deadline = absl::Now() + kStartTimeout;
  while (access(ready_path.c_str(), F_OK) != 0) {
    int state = 0;
    if (pid_ < 0 || waitpid(pid_, &state, WNOHANG) != 0 ||
        absl::Now() > deadline) {
      std::fprintf(stderr, "quantd did not start (state %d):\n%s", state,
                   Log().c_str());
      std::abort();
    }
    absl::SleepFor(absl::Milliseconds(1));
  }
  const auto ready = nlohmann::json::parse(ReadFile(ready_path));
  address_ = ready.at("grpc").at(0).get<std::string>();
  metrics_address_ = ready.at("metrics").get<std::string>();
}

ServerProcess::~ServerProcess() {
  if (pid_ > 0) Kill();
}

std::shared_ptr<grpc::Channel> ServerProcess::NewChannel() const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(),
                                   arguments);
}

void ServerProcess::Signal(int signal) { kill(pid_, signal); }

void ServerProcess::Kill() {
  Signal(SIGKILL);
  Wait();
}

int ServerProcess::Terminate() {
  Signal(SIGTERM);
  const int code = Wait();
  if (code != 0) std::fprintf(stderr, "%s", Log().c_str());
  return code;
}

int ServerProcess::Wait() {
  int state = 0;
  while (waitpid(pid_, &state, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  return WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
}

std::string ServerProcess::Log() const {
  return ReadFile(directory_.path() + "/quantd.log");
}

}  // namespace quantd::testing
