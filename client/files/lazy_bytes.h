// Bytes that are made when somebody uses them, and are gone afterwards.

#ifndef QUANTD_CLIENT_FILES_LAZY_BYTES_H_
#define QUANTD_CLIENT_FILES_LAZY_BYTES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

namespace quantd::files {

// Addresses without memory. Thread-safe.
class LazyBytes : public std::enable_shared_from_this<LazyBytes> {
 public:
  // Writes all bytes.
  using Fill = std::function<void(absl::Span<uint8_t>)>;

  // Requires: size_bytes > 0. Throws std::bad_alloc.
  LazyBytes(size_t size_bytes, Fill fill);
  LazyBytes(const LazyBytes&) = delete;
  LazyBytes& operator=(const LazyBytes&) = delete;
  ~LazyBytes();

  // May be read only while somebody holds them.
  absl::Span<const uint8_t> span() const { return {bytes_, size_bytes_}; }

  // Makes the bytes, unless somebody holds them already. They stay until all
  // who hold them have let go.
  // Throws std::bad_alloc.
  std::shared_ptr<const void> Hold() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Release() ABSL_LOCKS_EXCLUDED(mutex_);

  const size_t size_bytes_;
  const Fill fill_;
  uint8_t* bytes_ = nullptr;
  absl::Mutex mutex_;
  int64_t holder_count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace quantd::files

#endif  // QUANTD_CLIENT_FILES_LAZY_BYTES_H_
