#include "core/statistics/held_tensor.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/types/optional.h"
#include "core/statistics/bin_table.h"
#include "core/statistics/histogram.h"

namespace quantd::core {
namespace {

// Elements that are brought together at a time.
constexpr int64_t kAtOnce = 2048;

// Copies `count` elements; mostly one, or many.
void CopyElements(const uint8_t* from, int64_t count, int64_t element_bytes,
                  uint8_t* to) {
  if (count > 1) {
    std::memcpy(to, from, static_cast<size_t>(count * element_bytes));
  } else if (element_bytes == sizeof(uint32_t)) {
    std::memcpy(to, from, sizeof(uint32_t));
  } else if (element_bytes == sizeof(uint16_t)) {
    std::memcpy(to, from, sizeof(uint16_t));
  } else {
    std::memcpy(to, from, static_cast<size_t>(element_bytes));
  }
}

}  // namespace

HeldTensor::HeldTensor(const BlockLayout& layout, ElementType type,
                       int64_t piece_elements,
                       std::vector<const uint8_t*> pieces)
    : layout_(layout),
      type_(type),
      piece_elements_(piece_elements),
      pieces_(std::move(pieces)) {}

template <typename Visitor>
void HeldTensor::ForEachStretch(BlockLayout::BlockCursor* cursor,
                                Visitor&& visit) const {
  const int64_t element_bytes = ElementSizeBytes(type_);
  // The piece that the latest elements are in.
  int64_t piece = -1;
  int64_t piece_begin = 0;
  int64_t begin = 0;
  int64_t count = 0;
  while (cursor->Next(&begin, &count)) {
    while (count > 0) {
      if (piece < 0 || begin < piece_begin ||
          begin >= piece_begin + piece_elements_) {
        piece = begin / piece_elements_;
        piece_begin = piece * piece_elements_;
      }
      const int64_t part =
          std::min(count, piece_begin + piece_elements_ - begin);
      visit(pieces_[static_cast<size_t>(piece)] +
                (begin - piece_begin) * element_bytes,
            part);
      begin += part;
      count -= part;
    }
  }
}

Histogram HeldTensor::HistogramOf(int64_t scale_index,
                                  int mantissa_bits) const {
  Histogram histogram(mantissa_bits);
  if (layout_.element_count() == 0) return histogram;
  BlockLayout::BlockCursor cursor(layout_, scale_index);
  absl::optional<BinTableLease> lease;
  if (cursor.count() > Histogram::kMaxValues) lease.emplace(mantissa_bits);
  const int64_t element_bytes = ElementSizeBytes(type_);
  alignas(8) uint8_t bytes[kAtOnce * sizeof(double)];
  float values[kAtOnce];
  int64_t filled = 0;
  const auto add = [&] {
    ToHistogramFloats(type_, bytes, filled, values);
    if (lease.has_value()) {
      if (lease->get()->room() < filled) histogram.Drain(lease->get());
      lease->get()->Add(reinterpret_cast<const uint8_t*>(values), filled);
    } else {
      histogram.Add(values, filled);
    }
    filled = 0;
  };
  ForEachStretch(&cursor, [&](const uint8_t* from, int64_t count) {
    while (count > 0) {
      const int64_t part = std::min(count, kAtOnce - filled);
      CopyElements(from, part, element_bytes, bytes + filled * element_bytes);
      filled += part;
      from += part * element_bytes;
      count -= part;
      if (filled == kAtOnce) add();
    }
  });
  add();
  if (lease.has_value()) histogram.Drain(lease->get());
  return histogram;
}

int64_t HeldTensor::CopyBlock(int64_t scale_index, uint8_t* out) const {
  if (layout_.element_count() == 0) return 0;
  BlockLayout::BlockCursor cursor(layout_, scale_index);
  const int64_t element_bytes = ElementSizeBytes(type_);
  ForEachStretch(&cursor, [&](const uint8_t* from, int64_t count) {
    CopyElements(from, count, element_bytes, out);
    out += count * element_bytes;
  });
  return cursor.count();
}

int64_t HeldTensor::TableBytes(const BlockLayout& layout, int mantissa_bits) {
  return layout.largest_block() > Histogram::kMaxValues
             ? int64_t{1} << (13 + mantissa_bits)
             : 0;
}

}  // namespace quantd::core
