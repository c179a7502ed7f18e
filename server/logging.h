// The program's log: one line per event, on stderr.

#ifndef QUANTD_SERVER_LOGGING_H_
#define QUANTD_SERVER_LOGGING_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/string_view.h"
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

// Sets the log up, and sends gRPC's own log the same way: its errors, and at
// the level debug everything. Until it is called, lines of info and above go
// out as text. Thread-safe.
void StartLogging(LogLevel level, LogFormat format);

// Writes one line if `level` is on. Thread-safe.
void Log(LogLevel level, absl::string_view message,
         std::initializer_list<LogField> fields = {});

// One line without its end; what Log writes. Bytes that are not UTF-8 are
// replaced.
std::string FormatLogLine(LogFormat format, absl::Time time, LogLevel level,
                          absl::string_view message,
                          std::initializer_list<LogField> fields);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_LOGGING_H_
