// Imports of a caller wait for memory in turn, so that those that began first
// get done.

#ifndef QUANTD_SERVER_RPC_IMPORT_QUEUE_H_
#define QUANTD_SERVER_RPC_IMPORT_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <deque>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "core/parallel/thread_pool.h"

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

  // True if no import of its caller waits, or none for longer than `import`.
  // Callers do not wait for each other: one may wait for what never comes.
  bool MayTry(const void* import, core::ThreadPool::Group caller)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto line = lines_.find(caller);
    return line == lines_.end() || line->second.front() == import;
  }
  // At the end, unless it waits already.
  void LineUp(const void* import, core::ThreadPool::Group caller)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    std::deque<const void*>& line = lines_[caller];
    if (std::find(line.begin(), line.end(), import) == line.end()) {
      line.push_back(import);
    }
  }
  void Leave(const void* import, core::ThreadPool::Group caller)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto line = lines_.find(caller);
    if (line == lines_.end()) return;
    std::deque<const void*>& imports = line->second;
    imports.erase(std::remove(imports.begin(), imports.end(), import),
                  imports.end());
    if (imports.empty()) lines_.erase(line);
  }

 private:
  const int64_t most_text_bytes_;
  absl::Mutex mutex_;
  int64_t text_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Imports that have files.
  std::deque<const void*> files_ ABSL_GUARDED_BY(mutex_);
  // Imports that wait to parse their files, by caller; no line is empty.
  absl::flat_hash_map<core::ThreadPool::Group, std::deque<const void*>> lines_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_IMPORT_QUEUE_H_
