// The numbers that the codes of a format stand for, laid out for kernels; see
// float_codec-inl.h. codec.h has the definitions.

#ifndef QUANTD_CORE_FORMATS_GRID_H_
#define QUANTD_CORE_FORMATS_GRID_H_

#include <cstdint>
#include <type_traits>

#include "absl/types/span.h"
#include "core/formats/number_format.h"

namespace quantd::core {

// Codes of floats and codebooks fit a byte.
constexpr int kMaxLevels = 256;

// The numbers of a small float. Immutable, thread-safe.
struct FloatGrid {
  FloatGrid(const FloatLayout& layout, bool no_saturation);

  // Limits that depend on the type of the quotients, float or double.
  template <typename T>
  struct Limits {
    T overflow;  // the smallest magnitude that rounds beyond the largest
    T largest;
    T smallest_normal;
    // Added to the bits of 2^e, it makes the power of two whose unit in the
    // last place is that of the format's numbers from 2^e on.
    std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t> magic_offset;
  };
  template <typename T>
  const Limits<T>& limits() const {
    if constexpr (std::is_same_v<T, double>) {
      return for_double;
    } else {
      return for_float;
    }
  }

  Limits<float> for_float;
  Limits<double> for_double;
  // Shifts and offsets of the parts that a code and the bits of a float32 have
  // at different places.
  int mantissa_shift;
  int sign_shift;
  int32_t exponent_offset;
  int32_t sign_bit;
  bool has_negative_zero;
  // Overflow as a number and as a code, either without its sign.
  float overflow_value;
  int32_t overflow_code;
  // False where overflow is the one NaN there is.
  bool overflow_has_sign;
  // NaN as a number and as a code: +0 where the format has none.
  float nan_value;
  int32_t nan_code;
};

// The entries of a codebook. Immutable, thread-safe.
struct CodebookGrid {
  // Requires: ascending, finite, 1 to kMaxLevels entries.
  explicit CodebookGrid(absl::Span<const float> codebook);

  // threshold<T>()[k] is the largest T that is nearer to entry k than to the
  // next or as near, so that the index of x is the number of thresholds below
  // x. Infinity past the last.
  template <typename T>
  const T* threshold() const {
    if constexpr (std::is_same_v<T, double>) {
      return threshold_double;
    } else {
      return threshold_float;
    }
  }

  int count;
  // Smallest with count <= 2^search_steps.
  int search_steps;
  alignas(64) float entry[kMaxLevels];
  alignas(64) float threshold_float[kMaxLevels];
  // threshold_float[16 k + 15]: what a search begins with. Infinity behind.
  alignas(64) float coarse_threshold[32];
  // Thresholds that each step of a binary search among 16 entries compares
  // with, by the bits of the index that it knows.
  alignas(64) float level_threshold[4][8];
  alignas(64) double threshold_double[kMaxLevels];
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_FORMATS_GRID_H_
