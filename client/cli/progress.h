// The progress of a command: a bar on stderr, or lines of JSON for a program.

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

// The file descriptor that every Progress writes its steps to, enabled or not:
// each is a line {"done_bytes":1,"total_bytes":2,"tensor":""}, or has
// done_count and total_count. Negative for none. Set by the command line.
int* ProgressFd();

// Draws a bar at most ten times a second, and only when stderr is a terminal.
// Not thread-safe.
class Progress {
 public:
  enum class Unit { kBytes, kTensors };

  // `enabled` false draws no bar in any case.
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
  void WriteLine(absl::string_view what) const;

  const Unit unit_;
  uint64_t total_;
  const bool enabled_;
  const absl::Time start_;
  absl::Time last_drawn_;
  uint64_t done_ = 0;
};

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_PROGRESS_H_
