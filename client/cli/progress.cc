#include "client/cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cli/session.h"
#include "client/cli/table.h"

namespace quantd::cli {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(100);
constexpr size_t kBarWidth = 30;
constexpr size_t kNameBytes = 32;

bool StderrIsTerminal() {
  const char* const term = std::getenv("TERM");
  return isatty(STDERR_FILENO) == 1 && term != nullptr &&
         absl::string_view(term) != "dumb";
}

}  // namespace

Progress::Progress(uint64_t total_bytes, bool enabled)
    : total_bytes_(total_bytes),
      enabled_(enabled && StderrIsTerminal()),
      start_(absl::Now()),
      last_drawn_(start_) {}

Progress::~Progress() {
  if (enabled_) std::fputs("\r\x1b[K", stderr);
}

void Progress::Add(uint64_t bytes, absl::string_view what) {
  done_bytes_ += bytes;
  if (!enabled_) return;
  const absl::Time now = absl::Now();
  if (now - last_drawn_ < kInterval) return;
  last_drawn_ = now;
  const double share =
      total_bytes_ == 0 ? 1.0
                        : std::min(1.0, static_cast<double>(done_bytes_) /
                                            static_cast<double>(total_bytes_));
  const size_t filled = static_cast<size_t>(share * kBarWidth);
  const std::string bar =
      std::string(filled, '#') + std::string(kBarWidth - filled, '-');
  const double rate = static_cast<double>(done_bytes_) / 1e9 /
                      absl::ToDoubleSeconds(now - start_);
  const std::string name = Printable(what.substr(0, kNameBytes));
  const std::string line = absl::StrFormat(
      "\r[%s] %3.0f%%  %s of %s  %.2f GB/s  %s\x1b[K", bar, share * 100,
      BytesText(done_bytes_), BytesText(total_bytes_), rate, name);
  std::fputs(line.c_str(), stderr);
}

}  // namespace quantd::cli
