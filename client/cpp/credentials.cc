#include "client/cpp/credentials.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "client/cpp/errors.h"
#include "client/cpp/text_file.h"
#include "grpcpp/grpcpp.h"

namespace quantd::internal {
namespace {

using ::grpc::experimental::InterceptionHookPoints;

// Errors: ARGUMENT_INVALID for a file that can't be read, or is empty.
absl::StatusOr<std::string> ReadFile(const std::string& path) {
  absl::StatusOr<std::string> text = ReadTextFile(path);
  if (!text.ok()) {
    return ArgumentInvalidError(absl::StrCat(
        "expected a file that can be read, got ", ErrorText(text.status())));
  }
  if (text->empty()) {
    return ArgumentInvalidError(
        absl::StrCat("expected text in the file \"", path, "\", got none"));
  }
  return text;
}

// Errors: ARGUMENT_INVALID; never tells what is in the file.
absl::StatusOr<std::string> ReadToken(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok()) return text.status();
  const absl::string_view token = absl::StripAsciiWhitespace(*text);
  if (token.empty() ||
      !std::all_of(token.begin(), token.end(), absl::ascii_isgraph)) {
    return ArgumentInvalidError(absl::StrCat(
        "expected one token of printable characters in \"", path, "\""));
  }
  return std::string(token);
}

// The token of a file, as it is now. Thread-safe.
class TokenFile {
 public:
  TokenFile(std::string path, std::string token)
      : path_(std::move(path)), token_(std::move(token)), read_(absl::Now()) {}

  std::string Get() ABSL_LOCKS_EXCLUDED(mutex_) {
    constexpr absl::Duration kInterval = absl::Seconds(1);
    absl::MutexLock lock(&mutex_);
    const absl::Time now = absl::Now();
    if (now - read_ >= kInterval) {
      read_ = now;
      absl::StatusOr<std::string> token = ReadToken(path_);
      if (token.ok()) token_ = *std::move(token);
    }
    return token_;
  }

 private:
  const std::string path_;
  absl::Mutex mutex_;
  std::string token_ ABSL_GUARDED_BY(mutex_);
  absl::Time read_ ABSL_GUARDED_BY(mutex_);
};

class TokenSender final : public grpc::experimental::Interceptor {
 public:
  explicit TokenSender(TokenFile* file) : file_(file) {}

  void Intercept(
      grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->emplace(
          "authorization", absl::StrCat("Bearer ", file_->Get()));
    }
    methods->Proceed();
  }

 private:
  TokenFile* const file_;
};

class TokenSenderFactory final : public InterceptorFactory {
 public:
  TokenSenderFactory(std::string path, std::string token)
      : file_(std::move(path), std::move(token)) {}

  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo*) override {
    return new TokenSender(&file_);
  }

 private:
  TokenFile file_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> TlsCredentials(
    const TlsPaths& paths) {
  if (paths.certificate.empty() != paths.key.empty()) {
    return ArgumentInvalidError(
        "expected a client's certificate together with its key, got one of "
        "them");
  }
  grpc::SslCredentialsOptions options;
  const struct {
    const std::string& path;
    std::string* text;
  } kFiles[] = {{paths.ca, &options.pem_root_certs},
                {paths.certificate, &options.pem_cert_chain},
                {paths.key, &options.pem_private_key}};
  for (const auto& file : kFiles) {
    if (file.path.empty()) continue;
    absl::StatusOr<std::string> text = ReadFile(file.path);
    if (!text.ok()) return text.status();
    if (!absl::StrContains(*text, "-----BEGIN ")) {
      return ArgumentInvalidError(
          absl::StrCat("expected a PEM file, got \"", file.path, "\""));
    }
    *file.text = *std::move(text);
  }
  std::shared_ptr<grpc::ChannelCredentials> credentials =
      grpc::SslCredentials(options);
  if (credentials == nullptr) {
    return ArgumentInvalidError("expected PEM files that TLS can use");
  }
  return credentials;
}

absl::StatusOr<std::unique_ptr<InterceptorFactory>> SendTokenOf(
    const std::string& path) {
  absl::StatusOr<std::string> token = ReadToken(path);
  if (!token.ok()) return token.status();
  return std::make_unique<TokenSenderFactory>(path, *std::move(token));
}

bool IsLocalTarget(absl::string_view target) {
  for (const absl::string_view scheme : {"unix:", "unix-abstract:"}) {
    if (absl::StartsWith(target, scheme)) return true;
  }
  for (const absl::string_view scheme : {"dns:///", "dns:", "ipv4:", "ipv6:"}) {
    if (absl::ConsumePrefix(&target, scheme)) break;
  }
  for (const absl::string_view address : absl::StrSplit(target, ',')) {
    const absl::string_view host = address.substr(0, address.rfind(':'));
    const bool is_loopback =
        absl::StartsWith(host, "127.") &&
        host.find_first_not_of("0123456789.") == absl::string_view::npos;
    if (!is_loopback && host != "localhost" && host != "[::1]") return false;
  }
  return true;
}

}  // namespace quantd::internal
