// Dequantizing one range on one thread: the contract between dequantize.cc and
// its kernels, and their scalar definition.

#ifndef QUANTD_CORE_DEQUANTIZE_DEQUANTIZE_KERNEL_H_
#define QUANTD_CORE_DEQUANTIZE_DEQUANTIZE_KERNEL_H_

#include <cstdint>

#include "core/formats/number_format.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

// The arguments of Dequantize, less the threads.
struct DequantizeRange {
  const Encoding& encoding;
  const FormatInfo& format;
  const BlockLayout& layout;
  ElementType type;
  int64_t first;
  int64_t count;
  const uint8_t* in;
  uint8_t* out;
  // Part of so much that caches do not hold it.
  bool is_large = false;
};

// The truth: one element after the other, as dequantize.h says it.
void DequantizeScalar(const DequantizeRange& range);

}  // namespace quantd::core

#endif  // QUANTD_CORE_DEQUANTIZE_DEQUANTIZE_KERNEL_H_
