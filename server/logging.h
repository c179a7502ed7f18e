// The program's log: one line per event, on stderr.

#ifndef QUANTD_SERVER_LOGGING_H_
#define QUANTD_SERVER_LOGGING_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/variant.h"

namespace quantd::server {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat {
  // 2026-01-31T12:00:00.000Z info message key=value key="two words"
  kText,
  // {"time":"...","level":"info","message":"...","key":"value"}
  kJson,
};

// A key and a value of a log line. Keys are snake_case literals.
struct LogField {
  template <typename T>
  LogField(absl::string_view k, const T& v) : key(k), value(Wrap(v)) {}

  absl::string_view key;
  absl::variant<bool, int64_t, double, std::string> value;

 private:
  template <typename T>
  static decltype(value) Wrap(const T& v) {
    if constexpr (std::is_same_v<T, bool>) {
      return v;
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<int64_t>(v);
    } else if constexpr (std::is_floating_point_v<T>) {
      return static_cast<double>(v);
    } else {
      return std::string(absl::string_view(v));
    }
  }
};

// Lets so many lines of a kind through in each window of time, and counts those
// it does not. Thread-safe.
class LineLimiter {
 public:
  struct LeftOut {
    std::string kind;
    int64_t lines = 0;
  };

  LineLimiter(int lines, absl::Duration window)
      : lines_(lines), window_(window) {}

  // True if a line of that kind may be written at `now`, of a clock that never
  // jumps. Kinds are few: more than a thousand are one.
  bool Admit(absl::string_view kind, absl::Duration now)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Lines that were left out in windows that are over, each told once.
  std::vector<LeftOut> TakeLeftOut(absl::Duration now)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Window {
    absl::Duration begin;
    int64_t lines = 0;
  };

  const int lines_;
  const absl::Duration window_;
  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Window> windows_ ABSL_GUARDED_BY(mutex_);
};

// Sets the log up, and sends gRPC's own log the same way: its errors, and at
// the level debug everything. Until it is called, lines of info and above go
// out as text. Thread-safe.
void StartLogging(LogLevel level, LogFormat format);

// Writes one line if `level` is on. Of warnings and errors with one message,
// and of those from one place in gRPC, ten in a minute: strangers may cause as
// many as they like. How many were left out is a line of its own. Thread-safe.
void Log(LogLevel level, absl::string_view message,
         std::initializer_list<LogField> fields = {});

// Writes how many lines were left out of minutes that are over. To be called
// every now and then. Thread-safe.
void LogLeftOut();

// One line without its end; what Log writes. Bytes that are not UTF-8 are
// replaced.
std::string FormatLogLine(LogFormat format, absl::Time time, LogLevel level,
                          absl::string_view message,
                          std::initializer_list<LogField> fields);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_LOGGING_H_
