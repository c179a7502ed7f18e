#include "core/statistics/histogram.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

constexpr int kFloatMantissaBits = 23;
constexpr uint32_t kSign = 0x80000000;

}  // namespace

int DefaultMantissaBits(int64_t scale_count) {
  return scale_count <= 1 ? 7 : (scale_count <= 256 ? 5 : 3);
}

uint32_t HistogramKey(float x, int mantissa_bits) {
  const uint32_t bits = BitsAs<uint32_t>(x + 0.0f);
  const uint32_t ordered = bits & kSign ? ~bits : bits | kSign;
  return ordered >> (kFloatMantissaBits - mantissa_bits);
}

BinEdges HistogramBinEdges(uint32_t key, int mantissa_bits) {
  const int shift = kFloatMantissaBits - mantissa_bits;
  const uint32_t first = key << shift;
  const uint32_t last = first | ((uint32_t{1} << shift) - 1);
  const auto value = [](uint32_t ordered) {
    return BitsAs<float>(ordered & kSign ? ordered ^ kSign : ~ordered);
  };
  BinEdges edges;
  edges.low = value(first);
  edges.high = value(last);
  const bool is_negative = !(first & kSign);
  edges.base = is_negative ? edges.high : edges.low;
  const uint32_t exponent =
      (BitsAs<uint32_t>(edges.high) >> kFloatMantissaBits) & 0xFF;
  const double unit =
      std::ldexp(1.0, static_cast<int>(std::max<uint32_t>(exponent, 1)) - 150);
  edges.unit = is_negative ? -unit : unit;
  return edges;
}

Histogram::Histogram(int mantissa_bits) : mantissa_bits_(mantissa_bits) {}

void Histogram::Add(const float* x, int64_t count) {
  const uint32_t mask =
      (uint32_t{1} << (kFloatMantissaBits - mantissa_bits_)) - 1;
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(x[i])) continue;
    const uint64_t low = BitsAs<uint32_t>(x[i]) & mask;
    AddBin(HistogramKey(x[i], mantissa_bits_), {1, low, low * low});
  }
}

void Histogram::AddBin(uint32_t key, const HistogramBin& bin) {
  bins_[key].Add(bin);
  count_ += bin.count;
}

void Histogram::Merge(const Histogram& other) {
  other.ForEachBin(
      [&](uint32_t key, const HistogramBin& bin) { AddBin(key, bin); });
}

int64_t Histogram::memory_bytes() const {
  return static_cast<int64_t>(sizeof(*this) + bins_.size() * 96);
}

bool operator==(const Histogram& a, const Histogram& b) {
  return a.mantissa_bits_ == b.mantissa_bits_ && a.bins_ == b.bins_;
}

}  // namespace quantd::core
