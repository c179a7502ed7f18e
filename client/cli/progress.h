// A progress bar on stderr.

#ifndef QUANTD_CLIENT_CLI_PROGRESS_H_
#define QUANTD_CLIENT_CLI_PROGRESS_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace quantd::cli {

// Draws at most ten times a second, and only when stderr is a terminal. Not
// thread-safe.
class Progress {
 public:
  // `enabled` false draws nothing in any case.
  Progress(uint64_t total_bytes, bool enabled);
  // Removes the bar.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Notes that `bytes` more are done; `what` is shown beside the bar.
  void Add(uint64_t bytes, absl::string_view what);

 private:
  const uint64_t total_bytes_;
  const bool enabled_;
  const absl::Time start_;
  absl::Time last_drawn_;
  uint64_t done_bytes_ = 0;
};

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_PROGRESS_H_
