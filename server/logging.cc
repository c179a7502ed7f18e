#include "server/logging.h"

#include <grpc/support/log.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/variant.h"
#include "core/parallel/steady_clock.h"

namespace quantd::server {
namespace {

std::atomic<LogFormat> g_format{LogFormat::kText};

absl::string_view LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "error";
}

spdlog::level::level_enum SpdlogLevel(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

// Lines are made by FormatLogLine; the logger only filters and writes them.
// Never destroyed: threads may log while the program ends.
spdlog::logger& Logger() {
  static spdlog::logger* const logger = [] {
    auto* made = new spdlog::logger(
        "quantd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%v");
    made->flush_on(spdlog::level::debug);
    return made;
  }();
  return *logger;
}

// Quoted and escaped as in JSON.
std::string Quote(absl::string_view text) {
  return nlohmann::json(std::string(text))
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

bool IsPlain(absl::string_view text) {
  if (text.empty()) return false;
  for (const char c : text) {
    if (!absl::ascii_isgraph(c) || c == '"' || c == '=' || c == '\\') {
      return false;
    }
  }
  return true;
}

void AppendValue(const LogField& field, bool quote_always, std::string* line) {
  if (const auto* text = absl::get_if<std::string>(&field.value)) {
    absl::StrAppend(line,
                    quote_always || !IsPlain(*text) ? Quote(*text) : *text);
  } else if (const auto* flag = absl::get_if<bool>(&field.value)) {
    absl::StrAppend(line, *flag ? "true" : "false");
  } else if (const auto* integer = absl::get_if<int64_t>(&field.value)) {
    absl::StrAppend(line, *integer);
  } else {
    // Not absl::StrCat, which writes NaN and infinity in a way JSON lacks.
    *line += nlohmann::json(absl::get<double>(field.value)).dump();
  }
}

constexpr int kLinesOfAKind = 10;
constexpr absl::Duration kLimitWindow = absl::Minutes(1);

LineLimiter& Limiter() {
  static auto* const limiter = new LineLimiter(kLinesOfAKind, kLimitWindow);
  return *limiter;
}

void Write(LogLevel level, absl::string_view message,
           std::initializer_list<LogField> fields) {
  const std::string line =
      FormatLogLine(g_format, absl::Now(), level, message, fields);
  Logger().log(SpdlogLevel(level),
               spdlog::string_view_t(line.data(), line.size()));
}

// True if a line of that level and kind is to be written.
bool Admits(LogLevel level, absl::string_view kind) {
  return Logger().should_log(SpdlogLevel(level)) &&
         (level < LogLevel::kWarning ||
          Limiter().Admit(kind, core::SteadyNow()));
}

void LogFromGrpc(gpr_log_func_args* args) {
  LogLevel level = LogLevel::kDebug;
  if (args->severity == GPR_LOG_SEVERITY_ERROR) level = LogLevel::kError;
  if (args->severity == GPR_LOG_SEVERITY_INFO) level = LogLevel::kInfo;
  const absl::string_view file = args->file;
  const size_t slash = file.rfind('/');
  const std::string source = absl::StrCat(
      "grpc/", slash == absl::string_view::npos ? file : file.substr(slash + 1),
      ":", args->line);
  if (Admits(level, source)) {
    Write(level, args->message, {{"source", source}});
  }
}

}  // namespace

void StartLogging(LogLevel level, LogFormat format) {
  g_format = format;
  Logger().set_level(SpdlogLevel(level));
  gpr_set_log_function(&LogFromGrpc);
  // gRPC's information lines are about its own inside.
  gpr_set_log_verbosity(level == LogLevel::kDebug ? GPR_LOG_SEVERITY_DEBUG
                                                  : GPR_LOG_SEVERITY_ERROR);
}

void Log(LogLevel level, absl::string_view message,
         std::initializer_list<LogField> fields) {
  if (Admits(level, message)) Write(level, message, fields);
}

void LogLeftOut() {
  for (const LineLimiter::LeftOut& left_out :
       Limiter().TakeLeftOut(core::SteadyNow())) {
    Write(LogLevel::kWarning, "lines were left out",
          {{"like", left_out.kind}, {"lines", left_out.lines}});
  }
}

bool LineLimiter::Admit(absl::string_view kind, absl::Duration now) {
  constexpr size_t kMostKinds = 1000;
  absl::MutexLock lock(&mutex_);
  auto found = windows_.find(kind);
  if (found == windows_.end()) {
    if (windows_.size() >= kMostKinds) kind = "others";
    found = windows_.emplace(kind, Window{now}).first;
  }
  Window& window = found->second;
  // One with lines to tell of goes on until they are told.
  if (now - window.begin >= window_ && window.lines <= lines_) {
    window = {now};
  }
  return ++window.lines <= lines_;
}

std::vector<LineLimiter::LeftOut> LineLimiter::TakeLeftOut(absl::Duration now) {
  std::vector<LeftOut> left_out;
  absl::MutexLock lock(&mutex_);
  for (auto it = windows_.begin(); it != windows_.end();) {
    const auto window = it++;
    if (now - window->second.begin < window_) continue;
    if (window->second.lines > lines_) {
      left_out.push_back({window->first, window->second.lines - lines_});
    }
    windows_.erase(window);
  }
  return left_out;
}

std::string FormatLogLine(LogFormat format, absl::Time time, LogLevel level,
                          absl::string_view message,
                          std::initializer_list<LogField> fields) {
  const std::string stamp =
      absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time, absl::UTCTimeZone());
  std::string line;
  if (format == LogFormat::kJson) {
    line = absl::StrCat("{\"time\":\"", stamp, "\",\"level\":\"",
                        LevelName(level), "\",\"message\":", Quote(message));
    for (const LogField& field : fields) {
      absl::StrAppend(&line, ",", Quote(field.key), ":");
      AppendValue(field, /*quote_always=*/true, &line);
    }
    line += "}";
    return line;
  }
  // A line break in a message would look like a second line.
  const std::string quoted = Quote(message);
  line = absl::StrCat(stamp, " ", LevelName(level), " ",
                      quoted.substr(1, quoted.size() - 2));
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=");
    AppendValue(field, /*quote_always=*/false, &line);
  }
  return line;
}

}  // namespace quantd::server
