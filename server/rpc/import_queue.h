// Imports wait for memory in turn, so that those that began first get done.

#ifndef QUANTD_SERVER_RPC_IMPORT_QUEUE_H_
#define QUANTD_SERVER_RPC_IMPORT_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <deque>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace quantd::server {

// Files that are not parsed yet have a share of the memory for themselves, so
// that they never take what parsing the first of them needs. The one that began
// first may have more: it gets done whatever the others do. Thread-safe.
class ImportQueue {
 public:
  // `text_bytes`: for all files together.
  explicit ImportQueue(int64_t text_bytes) : most_text_bytes_(text_bytes) {}

  // Grows what an import has of its file; false if there is no room.
  bool GrowText(const void* import, int64_t* text_bytes, int64_t to_bytes)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (std::find(files_.begin(), files_.end(), import) == files_.end()) {
      files_.push_back(import);
    }
    const int64_t others = text_bytes_ - *text_bytes;
    if (files_.front() != import && others + to_bytes > most_text_bytes_) {
      return false;
    }
    text_bytes_ = others + to_bytes;
    *text_bytes = to_bytes;
    return true;
  }
  void ReturnText(const void* import, int64_t* text_bytes)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    files_.erase(std::remove(files_.begin(), files_.end(), import),
                 files_.end());
    text_bytes_ -= *text_bytes;
    *text_bytes = 0;
  }

  // Whether nobody waits, or nobody for longer than `import`.
  bool MayTry(const void* import) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return line_.empty() || line_.front() == import;
  }
  // At the end, unless it waits already.
  void LineUp(const void* import) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (std::find(line_.begin(), line_.end(), import) == line_.end()) {
      line_.push_back(import);
    }
  }
  void Leave(const void* import) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    line_.erase(std::remove(line_.begin(), line_.end(), import), line_.end());
  }

 private:
  const int64_t most_text_bytes_;
  absl::Mutex mutex_;
  int64_t text_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Imports that have files, and those that wait to parse theirs.
  std::deque<const void*> files_ ABSL_GUARDED_BY(mutex_);
  std::deque<const void*> line_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_IMPORT_QUEUE_H_
