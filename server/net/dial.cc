#include "server/net/dial.h"

#include <openssl/bio.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/parallel/steady_clock.h"
#include "server/net/file_descriptor.h"
#include "server/net/wait_for_events.h"

namespace quantd::server {
namespace {

// The connection preface and an empty SETTINGS frame.
constexpr char kHttp2Hello[] =
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0";

absl::Status DialFailure(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

// The first message of a TLS handshake; empty when it can't be made.
std::string TlsHello() {
  const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(
      SSL_CTX_new(TLS_client_method()), &SSL_CTX_free);
  if (context == nullptr) return "";
  const std::unique_ptr<SSL, void (*)(SSL*)> session(SSL_new(context.get()),
                                                     &SSL_free);
  BIO* const in = BIO_new(BIO_s_mem());
  BIO* const out = BIO_new(BIO_s_mem());
  if (session == nullptr || in == nullptr || out == nullptr) {
    BIO_free(in);
    BIO_free(out);
    return "";
  }
  // The session owns them from here.
  SSL_set_bio(session.get(), in, out);
  SSL_connect(session.get());
  char* data = nullptr;
  const long size = BIO_get_mem_data(out, &data);
  return std::string(data, static_cast<size_t>(std::max(size, 0L)));
}

}  // namespace

absl::Status Dial(const PeerAddress& address, bool secure,
                  absl::Duration timeout) {
  const absl::Duration end = core::SteadyNow() + timeout;
  const FileDescriptor connection(
      socket(address.address.ss_family,
             SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int fd = connection.get();
  if (fd < 0) return DialFailure("no socket to call it with");
  const auto* const to = reinterpret_cast<const sockaddr*>(&address.address);
  if (connect(fd, to, address.size) != 0) {
    if (errno != EINPROGRESS) return DialFailure("cannot connect");
    if (!WaitForEvents(fd, POLLOUT, end)) return DialFailure("cannot connect");
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    errno = error;
    if (error != 0) return DialFailure("cannot connect");
  }
  const std::string hello =
      secure ? TlsHello() : std::string(kHttp2Hello, sizeof(kHttp2Hello) - 1);
  if (send(fd, hello.data(), hello.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(hello.size())) {
    return DialFailure("cannot send");
  }
  if (!WaitForEvents(fd, POLLIN, end)) return DialFailure("no answer");
  std::array<char, 16> answer;
  const ssize_t size = recv(fd, answer.data(), answer.size(), 0);
  if (size < 0) return DialFailure("no answer");
  if (size == 0) return absl::UnavailableError("it hangs up");
  return absl::OkStatus();
}

}  // namespace quantd::server
