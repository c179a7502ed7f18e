// When a call is tried again.

#ifndef QUANTD_CLIENT_CPP_RETRY_POLICY_H_
#define QUANTD_CLIENT_CPP_RETRY_POLICY_H_

#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"

namespace quantd::internal {

// The retries since something was answered. Plain value.
struct Retries {
  int count = 0;
  // When the first was decided upon; of no meaning where there is none.
  absl::Time since;
  // Error that the server seems to want a certificate, once that was seen: what
  // gRPC says of the next connections is not always that.
  absl::Status certificate_error;

  void Add();
  // The error to report for retries that end with `status`.
  absl::Status Explained(const absl::Status& status) const;
};

// Decides about the retries of one call. Not thread-safe.
class RetryPolicy {
 public:
  // Both must outlive it.
  RetryPolicy(const ClientOptions& options, absl::BitGen* random)
      : options_(options), random_(*random) {}

  // True when another retry may help after those.
  bool Wants(const absl::Status& status, const Retries& retries) const;
  // Waits for the retry if Wants is true; false also when that would take until
  // `deadline`.
  bool Pause(const absl::Status& status, Retries* retries, absl::Time deadline);

 private:
  // How long retries may still go on.
  absl::Duration Left(const absl::Status& status, const Retries& retries) const;

  const ClientOptions& options_;
  absl::BitGen& random_;
};

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_RETRY_POLICY_H_
