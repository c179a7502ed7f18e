#include "client/cpp/retry_policy.h"

#include <algorithm>

#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "client/cpp/errors.h"

namespace quantd::internal {
namespace {

// A server that closes connections behind TLS mostly wants a certificate, which
// no retry brings; but a proxy without a server behind it does so too.
constexpr absl::Duration kCertificatePatience = absl::Seconds(5);

// True for causes that only a person can mend.
bool IsLasting(UnreachableCause cause) {
  switch (cause) {
    case UnreachableCause::kNotQuantd:
    case UnreachableCause::kWantsTls:
    case UnreachableCause::kNoTls:
    case UnreachableCause::kUntrusted:
    case UnreachableCause::kTlsFilesUnusable:
      return true;
    default:
      return false;
  }
}

}  // namespace

void Retries::Add() {
  if (count++ == 0) since = absl::Now();
}

absl::Status Retries::Explained(const absl::Status& status) const {
  return certificate_error.ok() || !IsServerUnreachable(status)
             ? status
             : certificate_error;
}

absl::Duration RetryPolicy::Left(const absl::Status& status,
                                 const Retries& retries) const {
  const absl::Duration whole =
      UnreachableCauseOf(retries.Explained(status)) ==
              UnreachableCause::kWantsCertificate
          ? std::min(options_.retry_for, kCertificatePatience)
          : options_.retry_for;
  return retries.count == 0 ? whole : retries.since + whole - absl::Now();
}

bool RetryPolicy::Wants(const absl::Status& status,
                        const Retries& retries) const {
  const absl::Duration asked = RetryAfter(status);
  return retries.count < options_.max_retries && asked <= options_.timeout &&
         asked < Left(status, retries) &&
         (absl::IsUnavailable(status) || absl::IsAborted(status) ||
          asked > absl::ZeroDuration()) &&
         !IsLasting(UnreachableCauseOf(status));
}

bool RetryPolicy::Pause(const absl::Status& status, Retries* retries,
                        absl::Time deadline) {
  if (UnreachableCauseOf(status) == UnreachableCause::kWantsCertificate) {
    retries->certificate_error = status;
  }
  if (!Wants(status, *retries)) return false;
  const absl::Duration left = Left(status, *retries);
  absl::Duration pause = options_.initial_backoff;
  for (int i = 0; i < retries->count && pause < options_.max_backoff; ++i) {
    pause *= 2;
  }
  pause =
      std::min(pause, options_.max_backoff) * absl::Uniform(random_, 0.5, 1.5);
  pause = std::max(std::min(pause, left), RetryAfter(status));
  if (absl::Now() + pause >= deadline) return false;
  if (options_.on_retry != nullptr) {
    options_.on_retry(
        {retries->Explained(status), retries->count + 1, pause, left});
  }
  absl::SleepFor(pause);
  return true;
}

}  // namespace quantd::internal
