#include "client/cli/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cli/printable.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(100);
constexpr size_t kBarWidth = 20;
constexpr size_t kNameBytes = 32;

}  // namespace

bool StderrIsTerminal() {
  const char* const term = std::getenv("TERM");
  return isatty(STDERR_FILENO) == 1 && term != nullptr &&
         absl::string_view(term) != "dumb";
}

size_t StderrWidth() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) {
    return 80;
  }
  return size.ws_col;
}

int* ProgressFd() {
  static int fd = -1;
  return &fd;
}

Progress::Progress(uint64_t total_bytes, bool enabled)
    : Progress(Unit::kBytes, enabled) {
  total_ = total_bytes;
}

Progress::Progress(Unit unit, bool enabled)
    : unit_(unit),
      total_(0),
      enabled_(enabled && StderrIsTerminal()),
      start_(absl::Now()),
      last_drawn_(start_) {}

Progress::~Progress() {
  if (enabled_) std::fputs("\r\x1b[K", stderr);
}

void Progress::Add(uint64_t bytes, absl::string_view what) {
  done_ += bytes;
  Draw(what);
}

void Progress::Set(uint64_t done, uint64_t total, absl::string_view what) {
  done_ = done;
  total_ = total;
  Draw(what);
}

void Progress::WriteLine(absl::string_view what) const {
  const char* const unit = unit_ == Unit::kBytes ? "bytes" : "count";
  const Json step = {{absl::StrCat("done_", unit), done_},
                     {absl::StrCat("total_", unit), total_},
                     {"tensor", std::string(what)}};
  const std::string line = absl::StrCat(
      step.dump(-1, ' ', false, Json::error_handler_t::replace), "\n");
  // A program that does not read them is no error of the command; SIGPIPE ends
  // it where nobody can.
  size_t written = 0;
  while (written < line.size()) {
    const ssize_t count =
        write(*ProgressFd(), line.data() + written, line.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    written += static_cast<size_t>(count);
  }
}

void Progress::Draw(absl::string_view what) {
  if (*ProgressFd() >= 0) WriteLine(what);
  if (!enabled_) return;
  const absl::Time now = absl::Now();
  if (now - last_drawn_ < kInterval) return;
  last_drawn_ = now;
  const double share = total_ == 0
                           ? 1.0
                           : std::min(1.0, static_cast<double>(done_) /
                                               static_cast<double>(total_));
  const size_t filled = static_cast<size_t>(share * kBarWidth);
  const std::string bar =
      std::string(filled, '#') + std::string(kBarWidth - filled, '-');
  std::string amount;
  if (unit_ == Unit::kBytes) {
    const double rate =
        static_cast<double>(done_) / 1e9 / absl::ToDoubleSeconds(now - start_);
    amount = absl::StrFormat("%s of %s  %.2f GB/s", BytesText(done_),
                             BytesText(total_), rate);
  } else {
    amount = absl::StrFormat("%d of %d tensors", done_, total_);
  }
  std::string line =
      absl::StrFormat("[%s] %3.0f%%  %s", bar, share * 100, amount);
  // At the speed so far, once there is one to speak of.
  const double seconds = absl::ToDoubleSeconds(now - start_);
  if (seconds >= 1 && share > 0 && share < 1) {
    absl::StrAppend(&line, "  ", DurationText(seconds / share * (1 - share)),
                    " left");
  }
  // The name gets the rest of the line; a line end would leave the bar behind.
  const size_t width = StderrWidth();
  if (line.size() + 3 < width) {
    absl::StrAppend(&line, "  ",
                    Printable(what).substr(
                        0, std::min(kNameBytes, width - line.size() - 3)));
  }
  std::fprintf(stderr, "\r%s\x1b[K", line.substr(0, width - 1).c_str());
}

}  // namespace quantd::cli
