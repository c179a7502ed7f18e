#include "server/guard/free_memory.h"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <utility>

namespace quantd::server {
namespace {

// Less is not worth the page faults of getting it again.
constexpr int64_t kLeastBytes = int64_t{64} << 20;
constexpr int kLooks = 2;

void TrimHeap() { malloc_trim(0); }

}  // namespace

int64_t PrivateBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size_pages = 0;
  int64_t resident_pages = 0;
  int64_t shared_pages = 0;
  if (!(file >> size_pages >> resident_pages >> shared_pages)) return 0;
  return (resident_pages - shared_pages) * sysconf(_SC_PAGESIZE);
}

FreeMemory::FreeMemory() : FreeMemory(Options{&PrivateBytes, &TrimHeap}) {}

FreeMemory::FreeMemory(Options options)
    : options_(std::move(options)), base_bytes_(options_.private_bytes()) {}

void FreeMemory::Look(int64_t used_bytes) {
  const int64_t kept_bytes =
      options_.private_bytes() - base_bytes_ - used_bytes;
  look_count_ = kept_bytes < kLeastBytes ? 0 : look_count_ + 1;
  if (look_count_ < kLooks) return;
  options_.give_back();
  // Memory that stays is of use, such as the cache.
  base_bytes_ = std::max<int64_t>(0, options_.private_bytes() - used_bytes);
  look_count_ = 0;
}

}  // namespace quantd::server
