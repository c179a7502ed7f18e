// Memory that the allocator keeps when nobody uses it any more.

#ifndef QUANTD_SERVER_GUARD_FREE_MEMORY_H_
#define QUANTD_SERVER_GUARD_FREE_MEMORY_H_

#include <cstdint>
#include <functional>

namespace quantd::server {

// Bytes of this process in memory that no other process has; 0 if the system
// does not tell.
int64_t PrivateBytes();

// Gives what the allocator keeps back to the system once much of it has been
// free for a while; until then the next tensor finds it. Not thread-safe.
class FreeMemory {
 public:
  struct Options {
    std::function<int64_t()> private_bytes = &PrivateBytes;
    std::function<void()> give_back;
  };

  FreeMemory();
  explicit FreeMemory(Options options);

  // To be called about every second, with what requests hold now.
  void Look(int64_t used_bytes);

 private:
  const Options options_;
  // Private bytes when all had been given back, without those that requests
  // held.
  int64_t base_bytes_;
  // So many looks found that much is free.
  int look_count_ = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_FREE_MEMORY_H_
