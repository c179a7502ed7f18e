// Where tests find their files and the server. The only place that knows, so
// that the compiler's cache serves a clone in any folder.
#ifndef QUANTD_TESTS_SUPPORT_PATHS_H_
#define QUANTD_TESTS_SUPPORT_PATHS_H_

#include <string>

namespace quantd {

// tests/data.
std::string TestDataFolder();

// tests/oracles.
std::string OraclesFolder();

// The program quantd of this build.
std::string QuantdBinary();

}  // namespace quantd

#endif  // QUANTD_TESTS_SUPPORT_PATHS_H_
