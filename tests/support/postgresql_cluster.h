// A private PostgreSQL server on a unix socket.

#ifndef QUANTD_TESTS_SUPPORT_POSTGRESQL_CLUSTER_H_
#define QUANTD_TESTS_SUPPORT_POSTGRESQL_CLUSTER_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "tests/support/temporary_directory.h"

namespace quantd::testing {

// Runs as the user "postgres" when the test runs as root, because PostgreSQL
// does not run as root. Ends with the object, or with the test program. Not
// thread-safe.
class PostgresqlCluster {
 public:
  // Whether this machine has PostgreSQL.
  static bool IsInstalled();

  // Starts; aborts the test program if that fails.
  PostgresqlCluster();
  ~PostgresqlCluster();
  PostgresqlCluster(const PostgresqlCluster&) = delete;
  PostgresqlCluster& operator=(const PostgresqlCluster&) = delete;

  // A connection string for a schema of that name, which is made.
  std::string NewSchema(const std::string& name);

  // Ends sessions and the server, as its own "fast" mode does.
  void Stop();
  // Continues on the same data and the same socket.
  void Start();
  pid_t pid() const { return pid_; }

 private:
  // The connection string of the database.
  std::string Url() const;
  // Starts a program of PostgreSQL.
  pid_t Spawn(const std::string& program,
              const std::vector<std::string>& arguments) const;

  const TemporaryDirectory directory_;
  pid_t pid_ = -1;
};

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_POSTGRESQL_CLUSTER_H_
