// Callbacks of a job while it runs.

#ifndef QUANTD_CLIENT_JOBS_JOB_EVENTS_H_
#define QUANTD_CLIENT_JOBS_JOB_EVENTS_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/files/safetensors.h"

namespace quantd::jobs {

// Each may be empty. No two of those with a name on_... run at once.
struct JobEvents {
  // A line for people on what the output does not have, and need not have.
  std::function<void(absl::string_view text)> on_note = {};
  // A line for people on what the output may lack.
  std::function<void(absl::string_view text)> on_warning = {};
  // A tensor of the input that is not read, so that the output lacks it.
  std::function<void(const files::UnreadTensor& tensor)> on_unread = {};
  // A tensor is done or has failed: `done_bytes` out of the `total_bytes` that
  // this run quantizes. The first call, with an empty name, is before them all.
  std::function<void(uint64_t done_bytes, uint64_t total_bytes,
                     absl::string_view tensor)>
      on_progress = {};
  // The output begins, has another file, or has its encodings published or not.
  std::function<void()> on_step = {};
  // True ends the job as soon as no tensor is under way, without the file that
  // is being written: its error is CANCELLED. Called from several threads at
  // once.
  std::function<bool()> is_stopped = {};

  void Note(absl::string_view text) const {
    if (on_note) on_note(text);
  }
  void Warn(absl::string_view text) const {
    if (on_warning) on_warning(text);
  }
  void Step() const {
    if (on_step) on_step();
  }
  bool stopped() const { return is_stopped && is_stopped(); }
  // Errors: CANCELLED if the job is to end.
  absl::Status CheckStopped() const {
    return stopped() ? absl::CancelledError("stopped") : absl::OkStatus();
  }
};

// Counts the bytes that are done, for on_progress. Not thread-safe.
class JobProgress {
 public:
  // `events` must stay.
  JobProgress(uint64_t total_bytes, const JobEvents& events)
      : total_bytes_(total_bytes), events_(events) {
    if (total_bytes > 0) Add(0, "");
  }

  // Notes that `bytes` of a tensor are done.
  void Add(uint64_t bytes, absl::string_view tensor) {
    done_bytes_ += bytes;
    if (events_.on_progress) {
      events_.on_progress(done_bytes_, total_bytes_, tensor);
    }
  }

 private:
  const uint64_t total_bytes_;
  const JobEvents& events_;
  uint64_t done_bytes_ = 0;
};

}  // namespace quantd::jobs

#endif  // QUANTD_CLIENT_JOBS_JOB_EVENTS_H_
