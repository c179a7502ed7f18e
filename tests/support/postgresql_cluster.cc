#include "tests/support/postgresql_cluster.h"

#include <fcntl.h>
#include <libpq-fe.h>
#include <pwd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace quantd::testing {
namespace {

constexpr absl::Duration kClusterStartTimeout = absl::Minutes(2);

// The programs of the newest version there is; empty for none. They are not on
// the PATH of Debian.
std::string ProgramDirectory() {
  std::vector<int> versions;
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator("/usr/lib/postgresql", ignored)) {
    if (std::filesystem::exists(entry.path() / "bin/postgres")) {
      versions.push_back(std::atoi(entry.path().filename().c_str()));
    }
  }
  if (versions.empty()) return "";
  return absl::StrCat("/usr/lib/postgresql/",
                      *std::max_element(versions.begin(), versions.end()),
                      "/bin");
}

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "PostgreSQL: %s\n", what.c_str());
  std::abort();
}

// Null unless the test runs as root.
const passwd* OtherUser() {
  if (geteuid() != 0) return nullptr;
  const passwd* user = getpwnam("postgres");
  if (user == nullptr) Die("there is no user \"postgres\"");
  return user;
}

}  // namespace

bool PostgresqlCluster::IsInstalled() { return !ProgramDirectory().empty(); }

PostgresqlCluster::PostgresqlCluster() {
  if (const passwd* user = OtherUser(); user != nullptr) {
    if (chown(directory_.path().c_str(), user->pw_uid, user->pw_gid) != 0) {
      Die("cannot give the directory away");
    }
  }
  const pid_t pid =
      Spawn("initdb", {"-D", directory_.File("data"), "-U", "postgres",
                       "--auth=trust", "--encoding=UTF8", "--locale=C",
                       "--no-sync", "--no-instructions"});
  int status = 0;
  if (waitpid(pid, &status, 0) != pid || status != 0) {
    Die("initdb failed");
  }
  Start();
}

PostgresqlCluster::~PostgresqlCluster() { Stop(); }

std::string PostgresqlCluster::NewSchema(const std::string& name) {
  const std::unique_ptr<PGconn, void (*)(PGconn*)> connection(
      PQconnectdb(Url().c_str()), &PQfinish);
  const std::unique_ptr<PGresult, void (*)(PGresult*)> result(
      PQexec(connection.get(), absl::StrCat("CREATE SCHEMA ", name).c_str()),
      &PQclear);
  if (PQresultStatus(result.get()) != PGRES_COMMAND_OK) {
    Die(PQerrorMessage(connection.get()));
  }
  return absl::StrCat(Url(), " options='-c search_path=", name, "'");
}

void PostgresqlCluster::Stop() {
  if (pid_ < 0) return;
  kill(pid_, SIGINT);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void PostgresqlCluster::Start() {
  pid_ = Spawn("postgres", {"-D", directory_.File("data"), "-k",
                            directory_.path(), "-c", "listen_addresses=", "-c",
                            "fsync=off", "-c", "max_connections=100"});
  const absl::Time deadline = absl::Now() + kClusterStartTimeout;
  while (PQping(Url().c_str()) != PQPING_OK) {
    if (waitpid(pid_, nullptr, WNOHANG) == pid_) Die("it ended");
    if (absl::Now() > deadline) Die("it does not answer");
    absl::SleepFor(absl::Milliseconds(10));
  }
}

std::string PostgresqlCluster::Url() const {
  return absl::StrCat("host=", directory_.path(),
                      " user=postgres dbname=postgres");
}

pid_t PostgresqlCluster::Spawn(
    const std::string& program,
    const std::vector<std::string>& arguments) const {
  const std::string path = ProgramDirectory() + "/" + program;
  std::vector<char*> argv = {const_cast<char*>(path.c_str())};
  for (const std::string& argument : arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  const std::string log = directory_.File("log");
  const passwd* const user = OtherUser();
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid != 0) return pid;
  if (user != nullptr &&
      (setgid(user->pw_gid) != 0 || setuid(user->pw_uid) != 0)) {
    _exit(127);
  }
  // After setuid, which clears it. Its own way to end at once.
  prctl(PR_SET_PDEATHSIG, SIGQUIT);
  if (getppid() != parent) _exit(127);
  const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  dup2(file, STDOUT_FILENO);
  dup2(file, STDERR_FILENO);
  execv(path.c_str(), argv.data());
  _exit(127);
}

}  // namespace quantd::testing
