// Vectors that begin at a cache line: SIMD loads from them then lie in one.

#ifndef QUANTD_CORE_STATISTICS_LINE_ALLOCATOR_H_
#define QUANTD_CORE_STATISTICS_LINE_ALLOCATOR_H_

#include <cstddef>
#include <new>
#include <vector>

namespace quantd::core {

template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <typename U>
  explicit LineAllocator(const LineAllocator<U>& /*other*/) {}

  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), kLine));
  }
  void deallocate(T* data, size_t) { ::operator delete(data, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};

template <typename T>
using LineVector = std::vector<T, LineAllocator<T>>;

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_LINE_ALLOCATOR_H_
