#include "core/dequantize/dequantize.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/dequantize/dequantize_kernel.h"
#include "core/formats/number_format.h"
#include "core/simd_internal.h"
#include "core/types/float_convert.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/dequantize/dequantize.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After foreach_target.h, once per target.
#include "core/formats/packing-inl.h"
#include "core/types/float_convert-inl.h"

#ifndef QUANTD_CORE_DEQUANTIZE_DEQUANTIZE_ONCE
#define QUANTD_CORE_DEQUANTIZE_DEQUANTIZE_ONCE
namespace quantd::core {
namespace {

// Elements that go through the L1 buffers at a time.
constexpr int64_t kBlockElements = 2048;
// Elements of a task; a multiple of kBlockElements.
constexpr int64_t kTaskElements = 64 * 1024;

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_DEQUANTIZE_DEQUANTIZE_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

void DequantizeSimd(const DequantizeRange& range) { DequantizeScalar(range); }

#else

// Lanes(d) elements with a scale and zero point each (kStep 1) or one for all
// (kStep 0).
template <int kStep, typename Code, class D>
HWY_INLINE void DequantizeVector(D d, const uint8_t* HWY_RESTRICT in,
                                 const float* HWY_RESTRICT scale,
                                 const int32_t* HWY_RESTRICT zero_point,
                                 uint8_t* HWY_RESTRICT out) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<float, D> df;
  const hn::Rebind<Code, D> dc;
  const auto zero = kStep == 1 && zero_point != nullptr
                        ? hn::LoadU(di, zero_point)
                        : hn::Set(di, zero_point == nullptr ? 0 : *zero_point);
  const auto scale_f = kStep == 1 ? hn::LoadU(df, scale) : hn::Set(df, *scale);
  const auto difference = hn::Sub(hn::PromoteTo(di, LoadBytes(dc, in)), zero);
  if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
    StoreBytes(hn::Mul(hn::PromoteTo(d, difference), hn::PromoteTo(d, scale_f)),
               d, out);
  } else {
    StoreBytes(hn::Mul(hn::ConvertTo(d, difference), scale_f), d, out);
  }
}

template <int kStep, typename T, typename Code>
void DequantizeRun(const Encoding& encoding, int64_t scale_index,
                   const uint8_t* HWY_RESTRICT in, int64_t count,
                   uint8_t* HWY_RESTRICT out) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 1> d1;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const float* scale = encoding.scale.data() + scale_index;
  const int32_t* zero_point = encoding.zero_point.empty()
                                  ? nullptr
                                  : encoding.zero_point.data() + scale_index;
  const auto vector = [&](auto tag, int64_t i) HWY_ATTR {
    DequantizeVector<kStep, Code>(
        tag, in + i * static_cast<int64_t>(sizeof(Code)), scale + i * kStep,
        zero_point == nullptr ? nullptr : zero_point + i * kStep,
        out + i * static_cast<int64_t>(sizeof(T)));
  };
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) vector(d, i);
  for (; i < count; ++i) vector(d1, i);
}

template <typename T, typename Code>
void DequantizeTyped(const DequantizeRange& range) {
  const bool is_packed = range.format.storage_bits < 8;
  const bool narrows = sizeof(T) == 4 && range.type != ElementType::kFloat32;
  const int64_t element_bytes = ElementSizeBytes(range.type);
  HWY_ALIGN float wide[kBlockElements];
  HWY_ALIGN uint8_t codes[kBlockElements + 3];
  HWY_ALIGN uint8_t scratch[kBlockElements + 3];

  BlockLayout::RunCursor cursor(range.layout, range.first, range.count);
  BlockLayout::Run run{};
  for (int64_t begin = 0; begin < range.count; begin += kBlockElements) {
    const int64_t count = std::min(range.count - begin, kBlockElements);
    const uint8_t* in = range.in + range.format.SizeBytes(begin);
    if (is_packed) {
      UnpackCodes(range.format.storage_bits, range.format.is_signed, in, count,
                  scratch, codes);
      in = codes;
    }
    uint8_t* out = range.out + begin * element_bytes;
    uint8_t* block_out = narrows ? reinterpret_cast<uint8_t*>(wide) : out;
    for (int64_t i = 0; i < count;) {
      if (run.count == 0) cursor.Next(&run);
      const int64_t part = std::min(run.count, count - i);
      const uint8_t* part_in = in + i * static_cast<int64_t>(sizeof(Code));
      uint8_t* part_out = block_out + i * static_cast<int64_t>(sizeof(T));
      if (run.scale_step == 1) {
        DequantizeRun<1, T, Code>(range.encoding, run.scale_index, part_in,
                                  part, part_out);
      } else {
        DequantizeRun<0, T, Code>(range.encoding, run.scale_index, part_in,
                                  part, part_out);
      }
      run.count -= part;
      run.scale_index += part * run.scale_step;
      i += part;
    }
    if (narrows) Narrow(range.type, wide, count, out);
  }
}

template <typename Code>
void DequantizeAs(const DequantizeRange& range) {
  if (range.type == ElementType::kFloat64) {
    DequantizeTyped<double, Code>(range);
  } else {
    DequantizeTyped<float, Code>(range);
  }
}

void DequantizeSimd(const DequantizeRange& range) {
  if (range.format.storage_bits == 16) {
    if (range.format.is_signed) {
      DequantizeAs<int16_t>(range);
    } else {
      DequantizeAs<uint16_t>(range);
    }
  } else {
    if (range.format.is_signed) {
      DequantizeAs<int8_t>(range);
    } else {
      DequantizeAs<uint8_t>(range);
    }
  }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace quantd::core
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace quantd::core {
namespace {

HWY_EXPORT(DequantizeSimd);

}  // namespace

void Dequantize(const Encoding& encoding, const BlockLayout& layout,
                ElementType type, int64_t first, int64_t count,
                const uint8_t* in, uint8_t* out, ThreadPool* pool) {
  if (count == 0) return;
  const FormatInfo& format = *FindFormat(encoding.format);
  const int64_t tasks = (count + kTaskElements - 1) / kTaskElements;
  const bool is_scalar = internal::UsesScalarKernels();
  const auto run_task = [&](int64_t task) {
    const int64_t begin = task * kTaskElements;
    const DequantizeRange range{encoding,
                                format,
                                layout,
                                type,
                                first + begin,
                                std::min(kTaskElements, count - begin),
                                in + format.SizeBytes(begin),
                                out + begin * ElementSizeBytes(type)};
    if (is_scalar) {
      DequantizeScalar(range);
    } else {
      HWY_DYNAMIC_DISPATCH(DequantizeSimd)(range);
    }
  };
  ParallelFor(pool, tasks, run_task);
}

}  // namespace quantd::core
#endif  // HWY_ONCE
