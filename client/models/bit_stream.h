// Values of a few bits, packed into words and bytes.

#ifndef QUANTD_CLIENT_MODELS_BIT_STREAM_H_
#define QUANTD_CLIENT_MODELS_BIT_STREAM_H_

#include <cstddef>
#include <cstdint>

#include "client/cpp/tensor.h"

namespace quantd {

// Values of `bits` bits one behind the other in the words of a row, the lowest
// bits first. `stride` is in words. Not thread-safe.
class BitStream {
 public:
  BitStream(int bits, uint32_t* words, size_t stride)
      : bits_(bits), words_(words), stride_(stride) {}

  void Put(uint32_t value) {
    const uint64_t shifted = static_cast<uint64_t>(value) << (position_ % 32);
    const size_t word = position_ / 32;
    words_[word * stride_] |= static_cast<uint32_t>(shifted);
    if (shifted >> 32 != 0) {
      words_[(word + 1) * stride_] |= static_cast<uint32_t>(shifted >> 32);
    }
    position_ += static_cast<size_t>(bits_);
  }

  uint32_t Get() {
    const size_t word = position_ / 32;
    const size_t shift = position_ % 32;
    uint64_t value = words_[word * stride_];
    if (shift + static_cast<size_t>(bits_) > 32) {
      value |= static_cast<uint64_t>(words_[(word + 1) * stride_]) << 32;
    }
    position_ += static_cast<size_t>(bits_);
    return static_cast<uint32_t>(value >> shift) & ((1U << bits_) - 1);
  }

 private:
  const int bits_;
  uint32_t* const words_;
  const size_t stride_;
  size_t position_ = 0;
};

// Writes codes as the server takes them. Not thread-safe.
class CodeWriter {
 public:
  CodeWriter(const FormatInfo& format, uint8_t* out)
      : bits_(format.storage_bits), mask_((1U << format.bits) - 1), out_(out) {}

  // The value, in two's complement.
  void Put(uint32_t value) {
    if (bits_ == 8) {
      *out_++ = static_cast<uint8_t>(value);
      return;
    }
    byte_ |= (value & mask_) << used_;
    used_ += bits_;
    if (used_ == 8) Finish();
  }

  // Writes the last byte.
  void Finish() {
    if (used_ == 0) return;
    *out_++ = static_cast<uint8_t>(byte_);
    byte_ = 0;
    used_ = 0;
  }

 private:
  const int bits_;
  const uint32_t mask_;
  uint8_t* out_;
  uint32_t byte_ = 0;
  int used_ = 0;
};

}  // namespace quantd

#endif  // QUANTD_CLIENT_MODELS_BIT_STREAM_H_
