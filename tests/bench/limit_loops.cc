#include "tests/bench/limit_loops.h"

#include <cstddef>
#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/limit_loops.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quantd::bench {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

const hn::ScalableTag<uint64_t> kWords;

// As far ahead as the kernels of large tensors look.
constexpr int64_t kAheadBytes = 4096;
// Below this prefetching only takes issue slots.
constexpr int64_t kLargeBytes = 1 << 20;

template <bool kPrefetches>
uint64_t SumLoop(const uint8_t* in, int64_t size_bytes) {
  const auto* words = reinterpret_cast<const uint64_t*>(in);
  const size_t lanes = hn::Lanes(kWords);
  const size_t count = static_cast<size_t>(size_bytes) / sizeof(uint64_t);
  auto a = hn::Zero(kWords);
  auto b = a, c = a, d = a;
  for (size_t i = 0; i < count; i += 4 * lanes) {
    if (kPrefetches) {
      for (size_t k = 0; k < 4 * lanes * 8; k += 64) {
        __builtin_prefetch(in + i * 8 + kAheadBytes + k);
      }
    }
    a = hn::Add(a, hn::LoadU(kWords, words + i));
    b = hn::Add(b, hn::LoadU(kWords, words + i + lanes));
    c = hn::Add(c, hn::LoadU(kWords, words + i + 2 * lanes));
    d = hn::Add(d, hn::LoadU(kWords, words + i + 3 * lanes));
  }
  return hn::GetLane(
      hn::SumOfLanes(kWords, hn::Add(hn::Add(a, b), hn::Add(c, d))));
}

uint64_t Sum(const uint8_t* in, int64_t size_bytes) {
  return SumLoop<false>(in, size_bytes);
}

uint64_t SumAhead(const uint8_t* in, int64_t size_bytes) {
  return SumLoop<true>(in, size_bytes);
}

void Narrow(const uint8_t* in, int64_t size_bytes, uint8_t* out) {
  const auto* from = reinterpret_cast<const uint64_t*>(in);
  auto* to = reinterpret_cast<uint64_t*>(out);
  const size_t lanes = hn::Lanes(kWords);
  const size_t count = static_cast<size_t>(size_bytes) / sizeof(uint64_t);
  for (size_t i = 0; i < count; i += 4 * lanes) {
    if (size_bytes >= kLargeBytes) {
      for (size_t k = 0; k < 4 * lanes * 8; k += 64) {
        __builtin_prefetch(in + i * 8 + kAheadBytes + k);
      }
      __builtin_prefetch(out + i * 2 + kAheadBytes, /*rw=*/1);
    }
    const auto ab = hn::Or(hn::LoadU(kWords, from + i),
                           hn::LoadU(kWords, from + i + lanes));
    const auto cd = hn::Or(hn::LoadU(kWords, from + i + 2 * lanes),
                           hn::LoadU(kWords, from + i + 3 * lanes));
    hn::StoreU(hn::Or(ab, cd), kWords, to + i / 4);
  }
}

void Widen(const uint8_t* in, int64_t size_bytes, uint8_t* out) {
  const auto* from = reinterpret_cast<const uint64_t*>(in);
  auto* to = reinterpret_cast<uint64_t*>(out);
  const size_t lanes = hn::Lanes(kWords);
  const size_t count = static_cast<size_t>(size_bytes) / sizeof(uint64_t);
  for (size_t i = 0; i < count; i += 4 * lanes) {
    if (size_bytes >= kLargeBytes) {
      __builtin_prefetch(in + i * 2 + kAheadBytes);
      for (size_t k = 0; k < 4 * lanes * 8; k += 64) {
        __builtin_prefetch(out + i * 8 + kAheadBytes + k, /*rw=*/1);
      }
    }
    const auto v = hn::LoadU(kWords, from + i / 4);
    hn::StoreU(v, kWords, to + i);
    hn::StoreU(v, kWords, to + i + lanes);
    hn::StoreU(v, kWords, to + i + 2 * lanes);
    hn::StoreU(v, kWords, to + i + 3 * lanes);
  }
}

void Squares(const float* in, int64_t rows, int64_t columns, float* out) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t row = 0; row < rows; row += 4, in += 4 * columns) {
    for (int64_t k = 0; k < columns; k += lanes) {
      auto sum = hn::LoadU(d, out + k);
      for (int64_t r = 0; r < 4; ++r) {
        const auto x = hn::LoadU(d, in + r * columns + k);
        sum = hn::MulAdd(x, x, sum);
      }
      hn::StoreU(sum, d, out + k);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace quantd::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quantd::bench {

HWY_EXPORT(Sum);
HWY_EXPORT(SumAhead);
HWY_EXPORT(Narrow);
HWY_EXPORT(Widen);
HWY_EXPORT(Squares);

uint64_t ReadAndSum(const uint8_t* in, int64_t size_bytes) {
  return HWY_DYNAMIC_DISPATCH(Sum)(in, size_bytes);
}

uint64_t ReadAheadAndSum(const uint8_t* in, int64_t size_bytes) {
  return HWY_DYNAMIC_DISPATCH(SumAhead)(in, size_bytes);
}

void FourInOneOut(const uint8_t* in, int64_t size_bytes, uint8_t* out) {
  HWY_DYNAMIC_DISPATCH(Narrow)(in, size_bytes, out);
}

void OneInFourOut(const uint8_t* in, int64_t size_bytes, uint8_t* out) {
  HWY_DYNAMIC_DISPATCH(Widen)(in, size_bytes, out);
}

void SquareSums(const float* in, int64_t rows, int64_t columns, float* out) {
  HWY_DYNAMIC_DISPATCH(Squares)(in, rows, columns, out);
}

}  // namespace quantd::bench
#endif  // HWY_ONCE
