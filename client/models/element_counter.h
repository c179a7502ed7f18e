// Counts elements of an output that a Sink takes.

#ifndef QUANTD_CLIENT_MODELS_ELEMENT_COUNTER_H_
#define QUANTD_CLIENT_MODELS_ELEMENT_COUNTER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"

namespace quantd {

// Counts each element once, wherever the pieces are cut, also within an
// element, and however often they come. Not thread-safe.
class ElementCounter {
 public:
  // Says how many of these elements count.
  using CountIn = std::function<uint64_t(absl::Span<const uint8_t> elements)>;

  // `count_in` gets whole elements of `element_bytes`.
  ElementCounter(size_t element_bytes, CountIn count_in);

  // Takes a piece; see Sink.
  void Add(uint64_t offset_bytes, absl::Span<const uint8_t> bytes);

  uint64_t count() const { return count_; }

 private:
  const size_t element_bytes_;
  const CountIn count_in_;
  uint64_t end_bytes_ = 0;
  // The first bytes of an element whose others did not come yet.
  std::vector<uint8_t> begun_;
  uint64_t count_ = 0;
};

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_ELEMENT_COUNTER_H_
