#include "core/dequantize/dequantize.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <type_traits>

#include "absl/types/span.h"
#include "core/dequantize/dequantize_kernel.h"
#include "core/formats/codec.h"
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

// What the codes of a float format or a codebook stand for.
class ValueTable {
 public:
  // [256]; valid as long as the table.
  const float* Of(const Encoding& encoding, const FormatInfo& format) {
    if (format.kind == CodeKind::kFloat) return FloatValues(format);
    const absl::Span<const float> codebook = CodebookOf(encoding);
    std::fill(std::copy(codebook.begin(), codebook.end(), entries_),
              std::end(entries_), std::numeric_limits<float>::quiet_NaN());
    return entries_;
  }

 private:
  float entries_[256];
};

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

// The values of codes of at most 4 bits.
template <class D>
HWY_INLINE hn::Vec<D> LookUp16(D d, const float* HWY_RESTRICT values,
                               hn::Vec<hn::RebindToSigned<D>> code) {
  if constexpr (hn::MaxLanes(D()) >= 16) {
    return hn::TableLookupLanes(hn::LoadU(d, values),
                                hn::IndicesFromVec(d, code));
  } else {
    return hn::GatherIndex(d, values, code);
  }
}

// As DequantizeVector, of formats whose codes stand for `values` [256], or [16]
// if kIsSmall.
template <int kStep, bool kIsSmall, class D>
HWY_INLINE void LookUpVector(D d, const uint8_t* HWY_RESTRICT in,
                             const float* HWY_RESTRICT values,
                             const float* HWY_RESTRICT scale,
                             uint8_t* HWY_RESTRICT out) {
  const hn::Rebind<int32_t, D> di;
  const hn::Rebind<float, D> df;
  const hn::Rebind<uint8_t, D> du8;
  const auto code = hn::PromoteTo(di, LoadBytes(du8, in));
  const auto scale_f = kStep == 1 ? hn::LoadU(df, scale) : hn::Set(df, *scale);
  const auto value =
      kIsSmall ? LookUp16(df, values, code) : hn::GatherIndex(df, values, code);
  if constexpr (std::is_same_v<hn::TFromD<D>, double>) {
    StoreBytes(hn::Mul(hn::PromoteTo(d, value), hn::PromoteTo(d, scale_f)), d,
               out);
  } else {
    StoreBytes(hn::Mul(value, scale_f), d, out);
  }
}

template <int kStep, bool kIsSmall, typename T>
void LookUpRun(const float* HWY_RESTRICT values,
               const float* HWY_RESTRICT scale, const uint8_t* HWY_RESTRICT in,
               int64_t count, uint8_t* HWY_RESTRICT out) {
  const hn::ScalableTag<T> d;
  const hn::CappedTag<T, 1> d1;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto vector = [&](auto tag, int64_t i) HWY_ATTR {
    LookUpVector<kStep, kIsSmall>(tag, in + i, values, scale + i * kStep,
                                  out + i * static_cast<int64_t>(sizeof(T)));
  };
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) vector(d, i);
  for (; i < count; ++i) vector(d1, i);
}

// Calls `dequantize_part(run, in, count, out)` for the parts of the runs, with
// codes unpacked to that size each and outputs of T.
template <typename T, typename Code, class Function>
HWY_INLINE void ForEachPart(const DequantizeRange& range,
                            const Function& dequantize_part) {
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
      dequantize_part(run, in + i * static_cast<int64_t>(sizeof(Code)), part,
                      block_out + i * static_cast<int64_t>(sizeof(T)));
      run.count -= part;
      run.scale_index += part * run.scale_step;
      i += part;
    }
    if (narrows) Narrow(range.type, wide, count, out);
  }
}

template <typename T, typename Code>
void DequantizeIntegers(const DequantizeRange& range) {
  ForEachPart<T, Code>(
      range, [&](const BlockLayout::Run& run, const uint8_t* in, int64_t count,
                 uint8_t* out) HWY_ATTR {
        if (run.scale_step == 1) {
          DequantizeRun<1, T, Code>(range.encoding, run.scale_index, in, count,
                                    out);
        } else {
          DequantizeRun<0, T, Code>(range.encoding, run.scale_index, in, count,
                                    out);
        }
      });
}

template <typename T, bool kIsSmall>
void LookUpAll(const DequantizeRange& range, const float* values) {
  ForEachPart<T, uint8_t>(
      range, [&](const BlockLayout::Run& run, const uint8_t* in, int64_t count,
                 uint8_t* out) HWY_ATTR {
        const float* scale = range.encoding.scale.data() + run.scale_index;
        if (run.scale_step == 1) {
          LookUpRun<1, kIsSmall, T>(values, scale, in, count, out);
        } else {
          LookUpRun<0, kIsSmall, T>(values, scale, in, count, out);
        }
      });
}

template <typename T>
void DequantizeTyped(const DequantizeRange& range) {
  const FormatInfo& format = range.format;
  if (format.kind != CodeKind::kInteger) {
    ValueTable table;
    const float* values = table.Of(range.encoding, format);
    if (format.bits <= 4) {
      LookUpAll<T, true>(range, values);
    } else {
      LookUpAll<T, false>(range, values);
    }
  } else if (format.storage_bits == 16) {
    if (format.is_signed) {
      DequantizeIntegers<T, int16_t>(range);
    } else {
      DequantizeIntegers<T, uint16_t>(range);
    }
  } else {
    if (format.is_signed) {
      DequantizeIntegers<T, int8_t>(range);
    } else {
      DequantizeIntegers<T, uint8_t>(range);
    }
  }
}

void DequantizeSimd(const DequantizeRange& range) {
  if (range.type == ElementType::kFloat64) {
    DequantizeTyped<double>(range);
  } else {
    DequantizeTyped<float>(range);
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
