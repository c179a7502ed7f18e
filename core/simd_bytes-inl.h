// Loads, stores and prefetches of unaligned bytes.

#if defined(QUANTD_CORE_SIMD_BYTES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QUANTD_CORE_SIMD_BYTES_INL_H_
#undef QUANTD_CORE_SIMD_BYTES_INL_H_
#else
#define QUANTD_CORE_SIMD_BYTES_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

// The targets without vectors run the scalar definitions.
#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Loads and stores of any alignment. Those of Highway for less than 16 bytes
// may go through a lane's type, which may not be misaligned.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> LoadBytes(D d, const uint8_t* in) {
  if constexpr (hn::MaxLanes(D()) * sizeof(T) >= 16) {
    return hn::LoadU(d, reinterpret_cast<const T*>(in));
  } else {
    HWY_ALIGN T lanes[hn::MaxLanes(D())];
    std::memcpy(lanes, in, sizeof(lanes));
    return hn::Load(d, lanes);
  }
}

template <class D, typename T = hn::TFromD<D>>
HWY_INLINE void StoreBytes(hn::Vec<D> v, D d, uint8_t* out) {
  if constexpr (hn::MaxLanes(D()) * sizeof(T) >= 16) {
    hn::StoreU(v, d, reinterpret_cast<T*>(out));
  } else {
    HWY_ALIGN T lanes[hn::MaxLanes(D())];
    hn::Store(v, d, lanes);
    std::memcpy(out, lanes, sizeof(lanes));
  }
}

constexpr int64_t kLineBytes = 64;

// Fetch a cache line that will be read, or written to. The address may lie
// anywhere.
HWY_INLINE void Prefetch(const uint8_t* address) {
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
  __builtin_prefetch(address, 0, 3);
#endif
}
HWY_INLINE void PrefetchWrite(const uint8_t* address) {
#if HWY_ARCH_X86 && (HWY_COMPILER_GCC || HWY_COMPILER_CLANG)
  // The builtin gives it only where the compiler's target has it; processors
  // that do not take it for a no-op.
  asm volatile("prefetchw %0" : : "m"(*address));
#elif HWY_COMPILER_GCC || HWY_COMPILER_CLANG
  __builtin_prefetch(address, 1, 3);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();
#endif

#endif  // QUANTD_CORE_SIMD_BYTES_INL_H_
