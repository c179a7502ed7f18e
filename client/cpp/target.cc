#include "client/cpp/target.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cpp/errors.h"

namespace quantd {
namespace {

constexpr char kDefaultPort[] = "8430";

absl::Status Invalid(absl::string_view expected, absl::string_view text) {
  return ArgumentInvalidError(absl::StrCat(
      "expected ", expected, " as the server, got \"", text, "\""));
}

// A host with its port. Errors: ARGUMENT_INVALID, with the whole `text`.
absl::StatusOr<std::string> HostAndPort(absl::string_view address,
                                        absl::string_view text) {
  absl::string_view host = address;
  absl::string_view port = kDefaultPort;
  const size_t bracket = address.rfind(']');
  const size_t colon = address.rfind(':');
  // Two colons without brackets are those of an IPv6 address.
  const bool is_bare_ipv6 =
      bracket == absl::string_view::npos && address.find(':') != colon;
  if (colon != absl::string_view::npos && !is_bare_ipv6 &&
      (bracket == absl::string_view::npos || colon > bracket)) {
    host = address.substr(0, colon);
    port = address.substr(colon + 1);
  }
  const bool is_bracketed =
      absl::StartsWith(host, "[") && absl::EndsWith(host, "]");
  if (host.empty() || (absl::StrContains(host, '[') && !is_bracketed) ||
      (absl::StrContains(host, ']') && !is_bracketed)) {
    return Invalid("HOST or HOST:PORT", text);
  }
  uint32_t number = 0;
  if (!std::all_of(port.begin(), port.end(), absl::ascii_isdigit) ||
      !absl::SimpleAtoi(port, &number) || number == 0 || number > 65535) {
    return Invalid("HOST:PORT with a port of 1 to 65535", text);
  }
  if (is_bare_ipv6) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

}  // namespace

absl::StatusOr<std::string> ParseTarget(absl::string_view text) {
  constexpr absl::string_view kExpected = "HOST, HOST:PORT or unix:PATH";
  if (text.empty() || std::any_of(text.begin(), text.end(), [](char c) {
        return absl::ascii_isspace(c) || absl::ascii_iscntrl(c);
      })) {
    return Invalid(kExpected, text);
  }
  if (text[0] == '/') return absl::StrCat("unix:", text);
  for (const absl::string_view scheme :
       {"unix:", "unix-abstract:", "vsock:", "xds:"}) {
    if (!absl::StartsWith(text, scheme)) continue;
    if (text == scheme) return Invalid(kExpected, text);
    return std::string(text);
  }
  absl::string_view rest = text;
  absl::string_view scheme;
  for (const absl::string_view known : {"ipv4:", "ipv6:", "dns:"}) {
    if (absl::ConsumePrefix(&rest, known)) scheme = known;
  }
  std::string begin(scheme);
  if (scheme == "dns:" && absl::ConsumePrefix(&rest, "//")) {
    // dns://RESOLVER/HOST, where the resolver may be missing.
    const size_t slash = rest.find('/');
    if (slash == absl::string_view::npos) {
      return Invalid("dns:///HOST:PORT", text);
    }
    absl::StrAppend(&begin, "//", rest.substr(0, slash + 1));
    rest = rest.substr(slash + 1);
  }
  const size_t slashes = rest.find("://");
  if (slashes != absl::string_view::npos) {
    absl::string_view address = rest.substr(slashes + 3);
    address = address.substr(0, address.find('/'));
    return ArgumentInvalidError(absl::StrCat(
        "expected ", kExpected, " as the server, got the URL \"", text,
        "\"; leave out \"", rest.substr(0, slashes + 3), "\": ", address,
        absl::EndsWith(rest.substr(0, slashes), "s") ? ", with TLS" : ""));
  }
  if (absl::StrContains(rest, '/')) return Invalid(kExpected, text);
  const std::vector<absl::string_view> addresses = absl::StrSplit(rest, ',');
  if (addresses.size() > 1 && scheme != "ipv4:" && scheme != "ipv6:") {
    return Invalid("one server, or several as ipv4:HOST:PORT,HOST:PORT", text);
  }
  std::vector<std::string> whole;
  for (const absl::string_view address : addresses) {
    absl::StatusOr<std::string> added = HostAndPort(address, text);
    if (!added.ok()) return added.status();
    whole.push_back(*std::move(added));
  }
  return absl::StrCat(begin, absl::StrJoin(whole, ","));
}

}  // namespace quantd
