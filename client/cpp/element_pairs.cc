#include "client/cpp/element_pairs.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/base/casts.h"
#include "absl/types/span.h"
#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"
#include "client/files/half.h"

namespace quantd::internal {
namespace {

// How elements lie in memory, and what they are worth.
struct HalfElement {
  uint16_t bits;
  float Value() const { return files::HalfValue(bits); }
};
struct BrainElement {
  uint16_t bits;
  float Value() const {
    return absl::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};
struct SingleElement {
  float value;
  float Value() const { return value; }
};
struct DoubleElement {
  double value;
  double Value() const { return value; }
};

template <typename Visitor>
void VisitElement(ElementType type, Visitor&& visit) {
  switch (type) {
    case ElementType::kFloat16:
      return visit(HalfElement());
    case ElementType::kBfloat16:
      return visit(BrainElement());
    case ElementType::kFloat32:
      return visit(SingleElement());
    case ElementType::kFloat64:
      return visit(DoubleElement());
  }
}

// None of the bytes need be aligned.
template <typename From, typename To>
void Put(const uint8_t* from, size_t at, uint8_t* to) {
  From element;
  std::memcpy(&element, from + at * sizeof(From), sizeof(From));
  const To value = static_cast<To>(element.Value());
  std::memcpy(to, &value, sizeof(To));
}

template <typename OfReference, typename OfTest, typename To>
void ConvertPairs(const uint8_t* reference, const uint8_t* test, size_t count,
                  uint8_t* pairs) {
  for (size_t i = 0; i < count; ++i) {
    Put<OfReference, To>(reference, i, pairs + 2 * i * sizeof(To));
    Put<OfTest, To>(test, i, pairs + (2 * i + 1) * sizeof(To));
  }
}

// Elements as they are.
template <typename Bits>
void CopyPairs(const uint8_t* reference, const uint8_t* test, size_t count,
               uint8_t* pairs) {
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(pairs + 2 * i * sizeof(Bits), reference + i * sizeof(Bits),
                sizeof(Bits));
    std::memcpy(pairs + (2 * i + 1) * sizeof(Bits), test + i * sizeof(Bits),
                sizeof(Bits));
  }
}

}  // namespace

ElementType PairType(ElementType reference, ElementType test) {
  if (reference == test) return test;
  return reference == ElementType::kFloat64 || test == ElementType::kFloat64
             ? ElementType::kFloat64
             : ElementType::kFloat32;
}

void WritePairs(const Reference& reference, const Reference& test,
                uint64_t first, uint64_t count, absl::Span<uint8_t> pairs) {
  const auto begin_of = [first](const Reference& elements) {
    return elements.data.data() +
           first *
               static_cast<uint64_t>(ElementSizeBytes(elements.element_type));
  };
  const uint8_t* const a = begin_of(reference);
  const uint8_t* const b = begin_of(test);
  uint8_t* const to = pairs.data();
  if (reference.element_type == test.element_type) {
    switch (ElementSizeBytes(test.element_type)) {
      case 2:
        return CopyPairs<uint16_t>(a, b, count, to);
      case 4:
        return CopyPairs<uint32_t>(a, b, count, to);
      default:
        return CopyPairs<uint64_t>(a, b, count, to);
    }
  }
  const bool is_double = PairType(reference.element_type, test.element_type) ==
                         ElementType::kFloat64;
  VisitElement(reference.element_type, [&](auto of_reference) {
    VisitElement(test.element_type, [&](auto of_test) {
      using OfReference = decltype(of_reference);
      using OfTest = decltype(of_test);
      if (is_double) {
        ConvertPairs<OfReference, OfTest, double>(a, b, count, to);
      } else {
        ConvertPairs<OfReference, OfTest, float>(a, b, count, to);
      }
    });
  });
}

}  // namespace quantd::internal
