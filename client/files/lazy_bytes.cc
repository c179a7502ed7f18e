#include "client/files/lazy_bytes.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "absl/synchronization/mutex.h"

namespace quantd::files {

LazyBytes::LazyBytes(size_t size_bytes, Fill fill)
    : size_bytes_(size_bytes), fill_(std::move(fill)) {
  void* const mapped =
      mmap(nullptr, size_bytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, /*fd=*/-1,
           /*offset=*/0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  bytes_ = static_cast<uint8_t*>(mapped);
}

LazyBytes::~LazyBytes() { munmap(bytes_, size_bytes_); }

std::shared_ptr<const void> LazyBytes::Hold() {
  {
    absl::MutexLock lock(&mutex_);
    if (holder_count_ == 0) {
      if (mprotect(bytes_, size_bytes_, PROT_READ | PROT_WRITE) != 0) {
        throw std::bad_alloc();
      }
      fill_({bytes_, size_bytes_});
    }
    ++holder_count_;
  }
  return {bytes_,
          [self = shared_from_this()](const uint8_t*) { self->Release(); }};
}

void LazyBytes::Release() {
  absl::MutexLock lock(&mutex_);
  if (--holder_count_ > 0) return;
  madvise(bytes_, size_bytes_, MADV_DONTNEED);
  // Who reads without holding is to notice.
  mprotect(bytes_, size_bytes_, PROT_NONE);
}

}  // namespace quantd::files
