// A progress bar on stderr.

#ifndef QUANTD_CLIENT_CLI_PROGRESS_H_
#define QUANTD_CLIENT_CLI_PROGRESS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace quantd::cli {

// True where control characters do what they say.
bool StderrIsTerminal();

// Columns of the terminal, or 80 where there is none.
size_t StderrWidth();

// Draws at most ten times a second, and only when stderr is a terminal. Not
// thread-safe.
class Progress {
 public:
  enum class Unit { kBytes, kTensors };

  // `enabled` false draws nothing in any case.
  Progress(uint64_t total_bytes, bool enabled);
  // The total comes with Set.
  Progress(Unit unit, bool enabled);
  // Removes the bar.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Notes that `bytes` more are done; `what` is shown beside the bar.
  void Add(uint64_t bytes, absl::string_view what);
  // Notes that `done` of `total` are done.
  void Set(uint64_t done, uint64_t total, absl::string_view what);

 private:
  void Draw(absl::string_view what);

  const Unit unit_;
  uint64_t total_;
  const bool enabled_;
  const absl::Time start_;
  absl::Time last_drawn_;
  uint64_t done_ = 0;
};

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_PROGRESS_H_
