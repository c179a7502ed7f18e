// The product that Cholesky's factorization and error-compensated rounding
// spend their time in.

#if defined(QUANTD_CORE_QUANTIZE_PANEL_PRODUCT_INL_H_) == \
    defined(HWY_TARGET_TOGGLE)
#ifdef QUANTD_CORE_QUANTIZE_PANEL_PRODUCT_INL_H_
#undef QUANTD_CORE_QUANTIZE_PANEL_PRODUCT_INL_H_
#else
#define QUANTD_CORE_QUANTIZE_PANEL_PRODUCT_INL_H_
#endif

#include <cmath>
#include <cstdint>

#include "core/quantize/compensated_rounding_kernel.h"
#include "hwy/highway.h"

// The targets without vectors run the scalar definitions.
#if HWY_TARGET != HWY_EMU128 && HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// c - a * b, rounded once on every target.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V SubtractProduct(D d, V a, V b, V c) {
#if HWY_NATIVE_FMA
  return hn::NegMulAdd(a, b, c);
#else
  using T = hn::TFromD<D>;
  HWY_ALIGN T a_lanes[hn::MaxLanes(D())];
  HWY_ALIGN T b_lanes[hn::MaxLanes(D())];
  HWY_ALIGN T c_lanes[hn::MaxLanes(D())];
  hn::Store(a, d, a_lanes);
  hn::Store(b, d, b_lanes);
  hn::Store(c, d, c_lanes);
  for (size_t i = 0; i < hn::Lanes(d); ++i) {
    c_lanes[i] = std::fma(-a_lanes[i], b_lanes[i], c_lanes[i]);
  }
  return hn::Load(d, c_lanes);
#endif
}

// kRows rows of three vectors: all of them stay in registers.
template <int kRows, typename T, typename Factor>
HWY_INLINE void SubtractProducts(int64_t count, const Factor* HWY_RESTRICT a,
                                 int64_t a_stride, const T* HWY_RESTRICT b,
                                 T* HWY_RESTRICT c, int64_t c_stride) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  V c0[kRows];
  V c1[kRows];
  V c2[kRows];
  HWY_UNROLL(8)
  for (int i = 0; i < kRows; ++i) {
    c0[i] = hn::LoadU(d, c + i * c_stride);
    c1[i] = hn::LoadU(d, c + i * c_stride + lanes);
    c2[i] = hn::LoadU(d, c + i * c_stride + 2 * lanes);
  }
  for (int64_t k = 0; k < count; ++k) {
    const V b0 = hn::Load(d, b);
    const V b1 = hn::Load(d, b + lanes);
    const V b2 = hn::Load(d, b + 2 * lanes);
    HWY_UNROLL(8)
    for (int i = 0; i < kRows; ++i) {
      const V factor = hn::Set(d, static_cast<T>(a[i]));
      c0[i] = SubtractProduct(d, factor, b0, c0[i]);
      c1[i] = SubtractProduct(d, factor, b1, c1[i]);
      c2[i] = SubtractProduct(d, factor, b2, c2[i]);
    }
    a += a_stride;
    b += kPanelWidth<T>;
  }
  HWY_UNROLL(8)
  for (int i = 0; i < kRows; ++i) {
    hn::StoreU(c0[i], d, c + i * c_stride);
    hn::StoreU(c1[i], d, c + i * c_stride + lanes);
    hn::StoreU(c2[i], d, c + i * c_stride + 2 * lanes);
  }
}

// c[i][x] -= a[k][i] * b[k][x] for k = 0 ... count - 1, in this order, each
// rounded once.
//
// `a`  [count][kPanelRows], rows `a_stride` apart.
// `b`  [count][kPanelWidth<T>], aligned to 64 bytes.
// `c`  [kPanelRows][kPanelWidth<T>], rows `c_stride` apart.
template <typename T, typename Factor>
HWY_INLINE void SubtractPanelProduct(int64_t count, const Factor* a,
                                     int64_t a_stride, const T* b, T* c,
                                     int64_t c_stride) {
  const hn::ScalableTag<T> d;
  // Registers for the sums, three vectors, and a factor.
  constexpr int kRows =
      hn::MaxLanes(hn::ScalableTag<T>()) * sizeof(T) == 64 ? 8 : 4;
  const int64_t width = 3 * static_cast<int64_t>(hn::Lanes(d));
  for (int64_t x = 0; x < kPanelWidth<T>; x += width) {
    for (int64_t i = 0; i < kPanelRows; i += kRows) {
      SubtractProducts<kRows>(count, a + i, a_stride, b + x,
                              c + i * c_stride + x, c_stride);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();
#endif

#endif  // QUANTD_CORE_QUANTIZE_PANEL_PRODUCT_INL_H_
