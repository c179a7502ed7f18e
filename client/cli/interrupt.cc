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
std::atomic<bool> g_is_deferred{false};
// 0 as long as none came that is deferred.
std::atomic<int> g_signal{0};

void EndBySignal(int /*alarm*/) { raise(g_signal); }

// Calls only what a signal handler may. SA_RESETHAND has taken it away, so the
// signal that it sends, or one that comes after it, ends the process.
void PrintOnSignal(int signal_number) {
  const std::string* const text = g_text.load();
  if (text != nullptr) {
    [[maybe_unused]] const ssize_t written =
        write(STDERR_FILENO, text->data(), text->size());
  }
  if (!g_is_deferred) {
    raise(signal_number);
    return;
  }
  constexpr unsigned kTidySeconds = 10;
  g_signal = signal_number;
  for (const int other : kSignals) signal(other, SIG_DFL);
  signal(SIGALRM, &EndBySignal);
  alarm(kTidySeconds);
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
  g_is_deferred = false;
}

void InterruptNote::Set(const std::string& text) {
  // In place of the progress bar.
  texts_.push_back(std::make_unique<const std::string>(absl::StrCat(
      StderrIsTerminal() ? "\r\x1b[K" : "", Printable(text), "\n")));
  g_text = texts_.back().get();
}

void InterruptNote::Defer() { g_is_deferred = true; }

bool InterruptNote::stopped() { return g_signal != 0; }

void InterruptNote::End() {
  signal(g_signal, SIG_DFL);
  raise(g_signal);
}

}  // namespace quantd::cli
