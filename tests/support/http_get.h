// What the metrics port answers.

#ifndef QUANTD_TESTS_SUPPORT_HTTP_GET_H_
#define QUANTD_TESTS_SUPPORT_HTTP_GET_H_

#include <string>

namespace quantd::testing {

// The whole response to GET `path` at host:port, an IPv4 address.
std::string HttpGet(const std::string& host_port, const std::string& path);

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_HTTP_GET_H_
