#include "client/models/element_counter.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/types/span.h"

namespace quantd {

ElementCounter::ElementCounter(size_t element_bytes, CountIn count_in)
    : element_bytes_(element_bytes), count_in_(std::move(count_in)) {}

void ElementCounter::Add(uint64_t offset_bytes,
                         absl::Span<const uint8_t> bytes) {
  const uint64_t end_bytes = offset_bytes + bytes.size();
  if (end_bytes <= end_bytes_) return;
  bytes.remove_prefix(static_cast<size_t>(end_bytes_ - offset_bytes));
  end_bytes_ = end_bytes;
  if (!begun_.empty()) {
    const size_t missing =
        std::min(element_bytes_ - begun_.size(), bytes.size());
    begun_.insert(begun_.end(), bytes.begin(), bytes.begin() + missing);
    bytes.remove_prefix(missing);
    if (begun_.size() < element_bytes_) return;
    count_ += count_in_(begun_);
  }
  const absl::Span<const uint8_t> rest =
      bytes.last(bytes.size() % element_bytes_);
  bytes.remove_suffix(rest.size());
  count_ += count_in_(bytes);
  begun_.assign(rest.begin(), rest.end());
}

}  // namespace quantd
