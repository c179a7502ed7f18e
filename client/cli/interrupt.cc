#include "client/cli/interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cli/printable.h"
#include "client/cli/progress.h"
#include "client/cli/session.h"

namespace quantd::cli {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};

std::atomic<const std::string*> g_text{nullptr};

// Calls only what a signal handler may. SA_RESETHAND has taken it away, so the
// signal that it sends ends the process.
void PrintOnSignal(int signal_number) {
  const std::string* const text = g_text.load();
  if (text != nullptr) {
    [[maybe_unused]] const ssize_t written =
        write(STDERR_FILENO, text->data(), text->size());
  }
  raise(signal_number);
}

}  // namespace

InterruptNote::InterruptNote() {
  for (const int number : kSignals) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) != 0 ||
        action.sa_handler != SIG_DFL) {
      continue;
    }
    action.sa_handler = &PrintOnSignal;
    action.sa_flags = SA_RESETHAND;
    sigaction(number, &action, nullptr);
  }
}

InterruptNote::~InterruptNote() {
  for (const int number : kSignals) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) != 0 ||
        action.sa_handler != &PrintOnSignal) {
      continue;
    }
    action.sa_handler = SIG_DFL;
    sigaction(number, &action, nullptr);
  }
  g_text = nullptr;
}

void InterruptNote::Set(const std::string& text) {
  // In place of the progress bar.
  texts_.push_back(std::make_unique<const std::string>(absl::StrCat(
      StderrIsTerminal() ? "\r\x1b[K" : "", Printable(text), "\n")));
  g_text = texts_.back().get();
}

}  // namespace quantd::cli
