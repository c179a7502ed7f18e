// The message and the end of a command that a user or a supervisor stops.

#ifndef QUANTD_CLIENT_CLI_INTERRUPT_H_
#define QUANTD_CLIENT_CLI_INTERRUPT_H_

#include <memory>
#include <string>
#include <vector>

namespace quantd::cli {

// While it lives, SIGINT and SIGTERM print a text on stderr and then end the
// process as they do by themselves. A signal that is ignored stays so. At most
// one at a time; for one thread.
class InterruptNote {
 public:
  InterruptNote();
  ~InterruptNote();
  InterruptNote(const InterruptNote&) = delete;
  InterruptNote& operator=(const InterruptNote&) = delete;

  // One line; until then nothing is printed.
  void Set(const std::string& text);

  // From now on the first signal does not end the process: the command looks at
  // stopped(), and has ten seconds to tidy up and call End. A second one ends
  // it.
  void Defer();
  // True once that signal came. Thread-safe.
  static bool stopped();
  // Ends the process by the signal that came.
  // Requires: stopped().
  static void End();

 private:
  // All of them: a signal may be at any.
  std::vector<std::unique_ptr<const std::string>> texts_;
};

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_INTERRUPT_H_
