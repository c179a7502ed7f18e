// The elements of two tensors by turns: the data of a comparison.

#ifndef QUANTD_CLIENT_CPP_ELEMENT_PAIRS_H_
#define QUANTD_CLIENT_CPP_ELEMENT_PAIRS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"

namespace quantd::internal {

// The type of the elements of pairs, which holds those of both exactly.
ElementType PairType(ElementType reference, ElementType test);

// Writes pairs [first, first + count) of PairType: an element of `reference`,
// then the one of `test` at its place.
// Requires: both have that many elements, and `pairs` has room for exactly
// these.
void WritePairs(const Reference& reference, const Reference& test,
                uint64_t first, uint64_t count, absl::Span<uint8_t> pairs);

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_ELEMENT_PAIRS_H_
