#include "core/statistics/gram_state.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/simd_internal.h"
#include "core/statistics/bin_table.h"
#include "core/types/element_type.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/statistics/gram_state.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#ifndef QUANTD_CORE_STATISTICS_GRAM_STATE_ONCE
#define QUANTD_CORE_STATISTICS_GRAM_STATE_ONCE
namespace quantd::core {
namespace {

// Features of a panel.
constexpr int64_t kPanel = 32;
constexpr int64_t kTile = kPanel * kPanel;
// Rows that are put aside before they are multiplied: the more, the less often
// the sums pass through the memory.
constexpr int64_t kPendingRows = 512;
constexpr int64_t kPendingPairs = kPendingRows / 2;
// Codes of a panel's rows.
constexpr int64_t kPanelCodes = kPendingRows * kPanel;
// Pairs of rows whose products fit 32 bits.
constexpr int64_t kPairs = 16;
// The largest code of a plane.
constexpr int32_t kPlaneCode = 8191;
static_assert(2 * kPairs * kPlaneCode * kPlaneCode <=
              std::numeric_limits<int32_t>::max());
// The plane of high codes counts multiples of 2^kHighBits.
constexpr int kHighBits = 13;
static_assert(GramState::kMaxCode < kPlaneCode << kHighBits);
// So far from overflowing that the rows that are put aside still fit.
constexpr int64_t kMostSquares = int64_t{1} << 62;
static_assert(int64_t{GramState::kMaxCode} * GramState::kMaxCode <
              kMostSquares / kPendingRows);
// Pairs of rows of two panels that the L1 cache holds.
constexpr int64_t kCachedPairs = 64;
// Panels on both sides of a task, which the L2 cache holds.
constexpr int64_t kTaskPanels = 8;
// An element that one plane does not hold is at least kTooLargeForPlane times
// the step: a tie goes to the even code above. One that is limited is at least
// kTooLarge times the step.
constexpr float kTooLargeForPlane = kPlaneCode + 0.5f;
constexpr float kTooLarge = GramState::kMaxCode + 0.5f;

// Codes of `count` elements of one row, of whole panels that follow each other.
struct CodeRow {
  const float* in;
  const float* inverse_steps;
  const double* inverse_steps_double;
  int64_t count;
  // The place of the row in the first panel.
  int16_t* out;
};

// Returns how many elements are too large for one plane.
int64_t StoreCodesScalar(const CodeRow& row) {
  int64_t large = 0;
  for (int64_t i = 0; i < row.count; ++i) {
    const double y = row.in[i] * row.inverse_steps_double[i];
    large += std::fabs(y) >= kTooLargeForPlane;
    constexpr double kLimit = kPlaneCode;
    row.out[i / kPanel * kPanelCodes + i % kPanel * 2] =
        static_cast<int16_t>(std::nearbyint(std::clamp(y, -kLimit, kLimit)));
  }
  return large;
}

void MultiplyTileScalar(const int16_t* a, const int16_t* b, int64_t pairs,
                        int64_t* sums) {
  for (int64_t pair = 0; pair < pairs;
       ++pair, a += 2 * kPanel, b += 2 * kPanel) {
    for (int64_t i = 0; i < kPanel; ++i) {
      for (int64_t j = 0; j < kPanel; ++j) {
        sums[i * kPanel + j] +=
            a[2 * i] * b[2 * j] + a[2 * i + 1] * b[2 * j + 1];
      }
    }
  }
}

bool IsFiniteScalar(const float* in, int64_t count) {
  return std::all_of(in, in + count, [](float x) { return std::isfinite(x); });
}

}  // namespace
}  // namespace quantd::core
#endif  // QUANTD_CORE_STATISTICS_GRAM_STATE_ONCE

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR

int64_t StoreCodes(const CodeRow& row) { return StoreCodesScalar(row); }
void MultiplyTile(const int16_t* a, const int16_t* b, int64_t pairs,
                  int64_t* sums) {
  MultiplyTileScalar(a, b, pairs, sums);
}
bool IsFinite(const float* in, int64_t count) {
  return IsFiniteScalar(in, count);
}

#else

int64_t StoreCodes(const CodeRow& row) {
  const hn::ScalableTag<float> d;
  const hn::RebindToSigned<decltype(d)> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto limit = hn::Set(d, static_cast<float>(kPlaneCode));
  const auto too_large = hn::Set(d, kTooLargeForPlane);
  HWY_ALIGN int32_t codes[kPanel];
  int64_t large = 0;
  for (int64_t i = 0; i < row.count; i += kPanel) {
    for (int64_t k = 0; k < kPanel; k += lanes) {
      const auto y = hn::Mul(hn::LoadU(d, row.in + i + k),
                             hn::LoadU(d, row.inverse_steps + i + k));
      large += hn::CountTrue(d, hn::Ge(hn::Abs(y), too_large));
      hn::Store(hn::NearestInt(hn::Max(hn::Min(y, limit), hn::Neg(limit))), di,
                codes + k);
    }
    int16_t* out = row.out + i / kPanel * kPanelCodes;
    for (int64_t k = 0; k < kPanel; ++k) {
      out[2 * k] = static_cast<int16_t>(codes[k]);
    }
  }
  return large;
}

bool IsFinite(const float* in, int64_t count) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  // NaN once one is not finite.
  auto sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    sum = hn::MulAdd(hn::LoadU(d, in + i), hn::Zero(d), sum);
  }
  return hn::AllFalse(d, hn::IsNaN(sum)) && IsFiniteScalar(in + i, count - i);
}

// sum + a[0] * b[0] + a[1] * b[1] in each lane, of the two int16 in it.
template <class D, class V = hn::Vec<D>,
          class W = hn::Vec<hn::Repartition<int16_t, D>>>
HWY_INLINE V AddProductsOfPairs(D d, W a, W b, V sum) {
#if HWY_ARCH_X86
  V unused = hn::Zero(d);
  return hn::ReorderWidenMulAccumulate(d, a, b, sum, unused);
#else
  // There it adds the products of other pairs to two sums.
  const auto first = [&](W v) HWY_ATTR {
    return hn::ShiftRight<16>(hn::ShiftLeft<16>(hn::BitCast(d, v)));
  };
  const auto second = [&](W v) HWY_ATTR {
    return hn::ShiftRight<16>(hn::BitCast(d, v));
  };
  return hn::Add(hn::Add(sum, hn::Mul(first(a), first(b))),
                 hn::Mul(second(a), second(b)));
#endif
}

// Adds the products of kRows features from `i` on and two vectors of features
// from `j` on.
template <int64_t kRows, class D>
HWY_INLINE void MultiplyBlock(D d, const int16_t* HWY_RESTRICT a,
                              const int16_t* HWY_RESTRICT b, int64_t pairs,
                              int64_t* HWY_RESTRICT sums) {
  const hn::Repartition<int16_t, D> d16;
  const hn::Half<D> dh;
  const hn::ScalableTag<int64_t> d64;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t wide = lanes / 2;
  for (int64_t first = 0; first < pairs; first += kPairs) {
    hn::Vec<D> sum0[kRows];
    hn::Vec<D> sum1[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      sum0[r] = hn::Zero(d);
      sum1[r] = hn::Zero(d);
    }
    const int64_t end = std::min(first + kPairs, pairs);
    for (int64_t pair = first; pair < end; ++pair) {
      const int16_t* pair_b = b + pair * 2 * kPanel;
      const int16_t* pair_a = a + pair * 2 * kPanel;
      const auto b0 = hn::LoadU(d16, pair_b);
      const auto b1 = hn::LoadU(d16, pair_b + 2 * lanes);
      for (int64_t r = 0; r < kRows; ++r) {
        int32_t two;
        std::memcpy(&two, pair_a + 2 * r, sizeof(two));
        const auto broadcast = hn::BitCast(d16, hn::Set(d, two));
        sum0[r] = AddProductsOfPairs(d, broadcast, b0, sum0[r]);
        sum1[r] = AddProductsOfPairs(d, broadcast, b1, sum1[r]);
      }
    }
    const auto add = [&](hn::Vec<D> sum, int64_t* to) HWY_ATTR {
      hn::StoreU(hn::Add(hn::LoadU(d64, to),
                         hn::PromoteTo(d64, hn::LowerHalf(dh, sum))),
                 d64, to);
      to += wide;
      hn::StoreU(hn::Add(hn::LoadU(d64, to),
                         hn::PromoteTo(d64, hn::UpperHalf(dh, sum))),
                 d64, to);
    };
    for (int64_t r = 0; r < kRows; ++r) {
      add(sum0[r], sums + r * kPanel);
      add(sum1[r], sums + r * kPanel + lanes);
    }
  }
}

// Adds the products of all pairs of features of two panels.
void MultiplyTile(const int16_t* HWY_RESTRICT a, const int16_t* HWY_RESTRICT b,
                  int64_t pairs, int64_t* HWY_RESTRICT sums) {
  const hn::ScalableTag<int32_t> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  // Rows at a time: as many as there are registers for.
  constexpr int64_t kRows = HWY_TARGET == HWY_AVX3 ? 8 : 4;
  for (int64_t first = 0; first < pairs; first += kCachedPairs) {
    const int64_t count = std::min(kCachedPairs, pairs - first);
    const int64_t offset = first * 2 * kPanel;
    for (int64_t i = 0; i < kPanel; i += kRows) {
      for (int64_t j = 0; j < kPanel; j += 2 * lanes) {
        MultiplyBlock<kRows>(d, a + offset + 2 * i, b + offset + 2 * j, count,
                             sums + i * kPanel + j);
      }
    }
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

HWY_EXPORT(StoreCodes);
HWY_EXPORT(MultiplyTile);
HWY_EXPORT(IsFinite);

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tiles of a part.
int64_t TileCount(int64_t panels) { return panels * (panels + 1) / 2; }

// The place of the tile (i, j) in a part.
int64_t TileIndex(int64_t panels, int64_t i, int64_t j) {
  return i * panels - i * (i - 1) / 2 + j - i;
}

absl::Status CheckLayout(absl::Span<const int> exponents, int64_t part_size) {
  const int64_t features = static_cast<int64_t>(exponents.size());
  if (features == 0) {
    return StatisticsInvalidError(
        "the Gram state has no feature, expected at least one");
  }
  const bool is_whole = part_size == features;
  if (!is_whole && (part_size <= 0 || part_size > features ||
                    part_size % GramState::kPartUnit != 0 ||
                    GramState::PartSize(features, part_size) != part_size)) {
    return StatisticsInvalidError(absl::StrCat(
        "the parts of the Gram state have ", part_size, " features, expected ",
        features, ", or parts of equal size that are multiples of ",
        GramState::kPartUnit));
  }
  for (const int exponent : exponents) {
    if (exponent < GramState::kMinExponent ||
        exponent > GramState::kMaxExponent) {
      return StatisticsInvalidError(absl::StrCat(
          "an exponent of the Gram state is ", exponent, ", expected ",
          GramState::kMinExponent, " to ", GramState::kMaxExponent));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<int> GramState::ExponentsFor(absl::Span<const float> largest) {
  // The largest magnitude gets codes of 12 bits.
  constexpr int kCodeBits = 12;
  constexpr float kUsual = 1;
  float overall = 0;
  for (const float x : largest) overall = std::max(overall, x);
  std::vector<int> exponents;
  exponents.reserve(largest.size());
  for (const float x : largest) {
    const float seen = x > 0 ? x : overall > 0 ? overall : kUsual;
    exponents.push_back(std::clamp(std::ilogb(seen) + 1 - kCodeBits,
                                   kMinExponent, kMaxExponent));
  }
  return exponents;
}

std::vector<float> GramState::LargestMagnitudes(ElementType type, int64_t rows,
                                                int64_t features,
                                                const uint8_t* data) {
  std::vector<float> largest(static_cast<size_t>(features));
  std::vector<float> row(static_cast<size_t>(features));
  for (int64_t r = 0; r < rows; ++r) {
    ToHistogramFloats(type, data + r * features * ElementSizeBytes(type),
                      features, row.data());
    for (int64_t k = 0; k < features; ++k) {
      const float x = std::fabs(row[k]);
      if (x > largest[k] && std::isfinite(x)) largest[k] = x;
    }
  }
  return largest;
}

int64_t GramState::PartSize(int64_t features, int64_t max_part) {
  if (features <= max_part) return features;
  const int64_t parts = CeilDivide(features, max_part);
  return CeilDivide(CeilDivide(features, parts), kPartUnit) * kPartUnit;
}

absl::StatusOr<GramState> GramState::Create(std::vector<int> exponents,
                                            int64_t part_size) {
  if (absl::Status s = CheckLayout(exponents, part_size); !s.ok()) return s;
  return GramState(std::move(exponents), part_size);
}

GramState::GramState(std::vector<int> exponents, int64_t part_size)
    : exponents_(std::move(exponents)), part_size_(part_size), panels_(0) {
  int64_t tiles = 0;
  for (int64_t part = 0; part < part_count(); ++part) {
    const int64_t panels = CeilDivide(PartWidth(part), kPanel);
    panels_ += panels;
    tiles += TileCount(panels);
  }
  inverse_steps_.resize(static_cast<size_t>(panels_ * kPanel));
  inverse_steps_double_.resize(inverse_steps_.size());
  for (int64_t part = 0; part < part_count(); ++part) {
    for (int64_t k = 0; k < PartWidth(part); ++k) {
      const int64_t place = part * panels_per_part() * kPanel + k;
      const int exponent = exponents_[part * part_size_ + k];
      inverse_steps_[place] = std::ldexp(1.0f, -exponent);
      inverse_steps_double_[place] = std::ldexp(1.0, -exponent);
      needs_doubles_ |= std::isinf(inverse_steps_[place]);
    }
  }
  sums_.resize(static_cast<size_t>(tiles * kTile));
}

int64_t GramState::panels_per_part() const {
  return CeilDivide(part_size_, kPanel);
}

int64_t GramState::PartWidth(int64_t part) const {
  return std::min(part_size_, feature_count() - part * part_size_);
}

int64_t GramState::MemoryBytes(int64_t features, int64_t part_size) {
  const int64_t whole = features / part_size;
  const int64_t panels = CeilDivide(part_size, kPanel);
  const int64_t rest_panels = CeilDivide(features % part_size, kPanel);
  const int64_t all_panels = whole * panels + rest_panels;
  return static_cast<int64_t>(
      sizeof(GramState) + features * sizeof(int) +
      (whole * TileCount(panels) + TileCount(rest_panels)) * kTile *
          sizeof(int64_t) +
      all_panels * (kPanel * (sizeof(float) + sizeof(double)) +
                    2 * kPanelCodes * sizeof(int16_t)));
}

int64_t GramState::SumCount(int64_t features, int64_t part_size) {
  if (features == 0) return 0;
  const int64_t rest = features % part_size;
  return features / part_size * (part_size * (part_size + 1) / 2) +
         rest * (rest + 1) / 2;
}

int64_t GramState::memory_bytes() const {
  return MemoryBytes(feature_count(), part_size_);
}

void GramState::Update(ElementType type, int64_t rows, const uint8_t* data,
                       ThreadPool* pool, StopToken stop) {
  const int64_t features = feature_count();
  const int64_t row_bytes = features * ElementSizeBytes(type);
  const bool is_scalar = internal::UsesScalarKernels();
  // Rows that a task reads.
  constexpr int64_t kTaskRows = 16;
  int64_t done = 0;
  while (done < rows && !stop.stopped()) {
    if (pending_.empty()) pending_.resize(panels_ * kPanelCodes);
    const int64_t count = std::min(rows - done, kPendingRows - pending_rows_);
    // The place of each row among those pending, or -1.
    std::vector<int64_t> places(static_cast<size_t>(count), -1);
    const auto in_tasks = [&](auto body) {
      ParallelFor(pool, CeilDivide(count, kTaskRows), [&](int64_t task) {
        if (stop.stopped()) return;
        // The features of a part begin at a panel.
        LineVector<float> row(static_cast<size_t>(panels_ * kPanel));
        const int64_t end = std::min((task + 1) * kTaskRows, count);
        for (int64_t r = task * kTaskRows; r < end; ++r) body(r, row);
      });
    };
    const auto load = [&](int64_t r, LineVector<float>& row) {
      const uint8_t* in = data + (done + r) * row_bytes;
      for (int64_t part = 0; part < part_count(); ++part) {
        ToHistogramFloats(type, in + part * part_size_ * ElementSizeBytes(type),
                          PartWidth(part),
                          row.data() + part * panels_per_part() * kPanel);
      }
    };
    in_tasks([&](int64_t r, LineVector<float>& row) {
      load(r, row);
      const int64_t size = static_cast<int64_t>(row.size());
      const bool is_finite =
          is_scalar ? IsFiniteScalar(row.data(), size)
                    : HWY_DYNAMIC_DISPATCH(IsFinite)(row.data(), size);
      if (is_finite) places[r] = 0;
    });
    for (int64_t& place : places) {
      if (place < 0) {
        ++left_out_rows_;
      } else {
        place = pending_rows_++;
        ++rows_;
      }
    }
    std::atomic<bool> has_large{false};
    in_tasks([&](int64_t r, LineVector<float>& row) {
      if (places[r] < 0) return;
      load(r, row);
      const CodeRow codes{
          row.data(), inverse_steps_.data(), inverse_steps_double_.data(),
          panels_ * kPanel,
          pending_.data() + places[r] / 2 * 2 * kPanel + places[r] % 2};
      const int64_t large = is_scalar || needs_doubles_
                                ? StoreCodesScalar(codes)
                                : HWY_DYNAMIC_DISPATCH(StoreCodes)(codes);
      if (large > 0) {
        has_large = true;
      } else {
        places[r] = -1;
      }
    });
    if (has_large) {
      if (pending_high_.empty()) pending_high_.resize(pending_.size());
      std::atomic<int64_t> clipped{0};
      in_tasks([&](int64_t r, LineVector<float>& row) {
        if (places[r] < 0) return;
        load(r, row);
        clipped += StoreLargeCodes(row.data(), places[r]);
      });
      clipped_ += clipped;
    }
    done += count;
    if (pending_rows_ == kPendingRows) Multiply(pool, stop);
  }
}

int64_t GramState::StoreLargeCodes(const float* row, int64_t pending_row) {
  int64_t clipped = 0;
  for (int64_t i = 0; i < panels_ * kPanel; ++i) {
    const double y = row[i] * inverse_steps_double_[i];
    if (std::fabs(y) < kTooLargeForPlane) continue;
    clipped += std::fabs(y) >= kTooLarge;
    constexpr double kLimit = kMaxCode;
    const auto code =
        static_cast<int32_t>(std::nearbyint(std::clamp(y, -kLimit, kLimit)));
    constexpr int32_t kUnit = 1 << kHighBits;
    const int32_t high = (code + (code < 0 ? -kUnit : kUnit) / 2) / kUnit;
    const size_t place = static_cast<size_t>(i / kPanel * kPanelCodes +
                                             pending_row / 2 * 2 * kPanel +
                                             i % kPanel * 2 + pending_row % 2);
    pending_[place] = static_cast<int16_t>(code - high * kUnit);
    pending_high_[place] = static_cast<int16_t>(high);
  }
  return clipped;
}

void GramState::Multiply(ThreadPool* pool, StopToken stop) {
  if (pending_rows_ == 0) return;
  for (int64_t i = 0; i < feature_count(); ++i) {
    has_overflowed_ |= code_sum(i, i) > kMostSquares;
  }
  if (has_overflowed_) {
    pending_rows_ = 0;
    return;
  }
  const bool is_scalar = internal::UsesScalarKernels();
  const int64_t pairs = CeilDivide(pending_rows_, 2);
  if (pending_rows_ % 2 != 0) {
    // The row that is missing from the last pair.
    for (int64_t panel = 0; panel < panels_; ++panel) {
      for (int64_t k = 0; k < kPanel; ++k) {
        pending_[panel * kPanelCodes + (pairs - 1) * 2 * kPanel + 2 * k + 1] =
            0;
      }
    }
  }
  // Panels that have high codes.
  std::vector<uint8_t> is_high(static_cast<size_t>(panels_));
  if (!pending_high_.empty()) {
    ParallelFor(pool, panels_, [&](int64_t panel) {
      const auto begin = pending_high_.begin() + panel * kPanelCodes;
      is_high[panel] = std::any_of(begin, begin + pairs * 2 * kPanel,
                                   [](int16_t code) { return code != 0; });
    });
  }
  struct Task {
    int64_t part;
    int64_t i;
    int64_t j;
  };
  std::vector<Task> tasks;
  for (int64_t part = 0; part < part_count(); ++part) {
    const int64_t panels = CeilDivide(PartWidth(part), kPanel);
    for (int64_t i = 0; i < panels; i += kTaskPanels) {
      for (int64_t j = i; j < panels; j += kTaskPanels) {
        tasks.push_back({part, i, j});
      }
    }
  }
  // All parts before are whole.
  const int64_t part_tiles = TileCount(panels_per_part());
  ParallelFor(pool, static_cast<int64_t>(tasks.size()), [&](int64_t t) {
    if (stop.stopped()) return;
    const Task& task = tasks[t];
    const int64_t panels = CeilDivide(PartWidth(task.part), kPanel);
    const int64_t first = task.part * panels_per_part();
    const int16_t* codes = pending_.data() + first * kPanelCodes;
    int64_t* sums = sums_.data() + task.part * part_tiles * kTile;
    const auto multiply = [&](const int16_t* a, const int16_t* b,
                              int64_t* tile) {
      if (is_scalar) {
        MultiplyTileScalar(a, b, pairs, tile);
      } else {
        HWY_DYNAMIC_DISPATCH(MultiplyTile)(a, b, pairs, tile);
      }
    };
    const auto add_high = [&](const int16_t* a, const int16_t* b, int bits,
                              int64_t* tile) {
      int64_t products[kTile] = {};
      multiply(a, b, products);
      for (int64_t k = 0; k < kTile; ++k) {
        tile[k] += products[k] * (int64_t{1} << bits);
      }
    };
    for (int64_t j = task.j; j < std::min(task.j + kTaskPanels, panels); ++j) {
      for (int64_t i = task.i; i < std::min(task.i + kTaskPanels, j + 1); ++i) {
        const int16_t* a = codes + i * kPanelCodes;
        const int16_t* b = codes + j * kPanelCodes;
        int64_t* tile = sums + TileIndex(panels, i, j) * kTile;
        multiply(a, b, tile);
        const bool is_high_a = is_high[first + i] != 0;
        const bool is_high_b = is_high[first + j] != 0;
        if (!is_high_a && !is_high_b) continue;
        const int16_t* high = pending_high_.data() + first * kPanelCodes;
        const int16_t* high_a = high + i * kPanelCodes;
        const int16_t* high_b = high + j * kPanelCodes;
        if (is_high_a) add_high(high_a, b, kHighBits, tile);
        if (is_high_b) add_high(a, high_b, kHighBits, tile);
        if (is_high_a && is_high_b) {
          add_high(high_a, high_b, 2 * kHighBits, tile);
        }
      }
    }
  });
  pending_rows_ = 0;
  pending_high_ = {};
}

void GramState::Finish(ThreadPool* pool, StopToken stop) {
  Multiply(pool, stop);
  pending_ = {};
}

absl::Status GramState::CheckMergeable(const GramState& other) const {
  if (exponents_ != other.exponents_) {
    return StatisticsMismatchError(
        "the Gram states have different exponents or numbers of features, "
        "expected the same");
  }
  if (part_size_ != other.part_size_) {
    return StatisticsMismatchError(
        absl::StrCat("the parts of the Gram state have ", other.part_size_,
                     " features, expected ", part_size_,
                     ", as those of the state there is"));
  }
  if (other.rows_ > kMaxRows - rows_) {
    return StatisticsMismatchError(
        absl::StrCat("the Gram state is of ", rows_, " rows and ", other.rows_,
                     " more, expected at most ", kMaxRows, " together"));
  }
  for (int64_t i = 0; i < feature_count(); ++i) {
    int64_t sum = code_sum(i, i);
    absl::Status status =
        AddGramSums({other.code_sum(i, i)}, absl::MakeSpan(&sum, 1));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status AddGramSums(absl::Span<const int64_t> more,
                         absl::Span<int64_t> sums) {
  bool overflows = false;
  for (size_t i = 0; i < more.size(); ++i) {
    overflows |= __builtin_add_overflow(sums[i], more[i], &sums[i]);
  }
  return overflows ? StatisticsMismatchError(
                         "the products in the Gram matrix add up to more than "
                         "64 bits hold; begin again, with larger steps")
                   : absl::OkStatus();
}

void GramState::Merge(const GramState& other) {
  rows_ += other.rows_;
  left_out_rows_ += other.left_out_rows_;
  clipped_ += other.clipped_;
  // The products of two features are no larger than both sums of squares.
  AddGramSums(other.sums_, absl::MakeSpan(sums_)).IgnoreError();
}

size_t GramState::SumIndex(int64_t i, int64_t j) const {
  const int64_t part = i / part_size_;
  i -= part * part_size_;
  j -= part * part_size_;
  if (i > j) std::swap(i, j);
  const int64_t tile =
      part * TileCount(panels_per_part()) +
      TileIndex(CeilDivide(PartWidth(part), kPanel), i / kPanel, j / kPanel);
  return static_cast<size_t>(tile * kTile + i % kPanel * kPanel + j % kPanel);
}

int64_t GramState::code_sum(int64_t i, int64_t j) const {
  return i / part_size_ == j / part_size_ ? sums_[SumIndex(i, j)] : 0;
}

std::vector<double> GramState::Dense(int64_t part) const {
  const int64_t width = PartWidth(part);
  const int64_t first = part * part_size_;
  std::vector<double> steps;
  for (int64_t k = 0; k < width; ++k) {
    steps.push_back(std::ldexp(1.0, exponents_[first + k]));
  }
  std::vector<double> dense(static_cast<size_t>(width * width));
  // By tiles, so that both halves of the matrix stay in the cache.
  for (int64_t tile_i = 0; tile_i < width; tile_i += kPanel) {
    for (int64_t tile_j = tile_i; tile_j < width; tile_j += kPanel) {
      const int64_t* tile =
          sums_.data() + SumIndex(first + tile_i, first + tile_j);
      for (int64_t i = tile_i; i < std::min(tile_i + kPanel, width); ++i) {
        for (int64_t j = tile_j; j < std::min(tile_j + kPanel, width); ++j) {
          // Steps are powers of two: only the integer is rounded.
          const double x =
              static_cast<double>(tile[(i - tile_i) * kPanel + j - tile_j]) *
              steps[i] * steps[j];
          dense[i * width + j] = x;
          dense[j * width + i] = x;
        }
      }
    }
  }
  return dense;
}

double GramState::ErrorBound(int64_t i, int64_t j) const {
  const double rows = static_cast<double>(rows_);
  return std::ldexp(std::sqrt(rows * static_cast<double>(code_sum(i, i))) +
                        std::sqrt(rows * static_cast<double>(code_sum(j, j))) +
                        rows / 2,
                    exponents_[i] + exponents_[j] - 1);
}

GramState::Parts GramState::ToParts() const {
  Parts parts{exponents_, part_size_, rows_, left_out_rows_, clipped_, {}};
  parts.code_sums.reserve(static_cast<size_t>(sum_count()));
  for (int64_t i = 0; i < feature_count(); ++i) {
    const int64_t part = i / part_size_;
    const int64_t end = part * part_size_ + PartWidth(part);
    for (int64_t j = i; j < end; ++j) {
      parts.code_sums.push_back(sums_[SumIndex(i, j)]);
    }
  }
  return parts;
}

absl::StatusOr<GramState> GramState::FromParts(const Parts& parts) {
  if (absl::Status s = CheckLayout(parts.exponents, parts.part_size); !s.ok()) {
    return s;
  }
  const int64_t features = static_cast<int64_t>(parts.exponents.size());
  if (static_cast<int64_t>(parts.code_sums.size()) != parts.sum_count()) {
    return StatisticsInvalidError(
        absl::StrCat("the Gram state has ", parts.code_sums.size(),
                     " sums, expected ", parts.sum_count(), " for ", features,
                     " features in parts of ", parts.part_size));
  }
  if (parts.rows < 0 || parts.rows > kMaxRows || parts.left_out_rows < 0 ||
      parts.left_out_rows > kMaxRows || parts.clipped < 0 ||
      parts.clipped / features + (parts.clipped % features != 0) > parts.rows) {
    return StatisticsInvalidError(
        absl::StrCat("the Gram state is of ", parts.rows, " rows, with ",
                     parts.left_out_rows, " left out and ", parts.clipped,
                     " elements limited, expected 0 to ", kMaxRows,
                     " rows and no more elements than they have"));
  }
  GramState state(parts.exponents, parts.part_size);
  state.rows_ = parts.rows;
  state.left_out_rows_ = parts.left_out_rows;
  state.clipped_ = parts.clipped;
  const int64_t* sum = parts.code_sums.data();
  for (int64_t i = 0; i < features; ++i) {
    const int64_t part = i / state.part_size_;
    const int64_t end = part * state.part_size_ + state.PartWidth(part);
    for (int64_t j = i; j < end; ++j, ++sum) {
      state.sums_[state.SumIndex(i, j)] = *sum;
      // The tiles on the diagonal have both halves.
      const int64_t row = i - part * state.part_size_;
      const int64_t column = j - part * state.part_size_;
      if (row / kPanel == column / kPanel) {
        state.sums_[state.SumIndex(i, j) + (column - row) * (kPanel - 1)] =
            *sum;
      }
    }
  }
  for (int64_t i = 0; i < features; ++i) {
    const int64_t part = i / state.part_size_;
    const int64_t end = part * state.part_size_ + state.PartWidth(part);
    __extension__ using Int128 = __int128;
    const int64_t square = state.code_sum(i, i);
    if (square < 0 || square > Int128{parts.rows} * kMaxCode * kMaxCode) {
      return StatisticsInvalidError(absl::StrCat(
          "feature ", i, " of the Gram state has the sum of squares ", square,
          ", which codes of ", parts.rows, " rows do not have"));
    }
    for (int64_t j = i + 1; j < end; ++j) {
      const int64_t product = state.code_sum(i, j);
      if (Int128{product} * product > Int128{square} * state.code_sum(j, j)) {
        return StatisticsInvalidError(absl::StrCat(
            "features ", i, " and ", j, " of the Gram state have the sum ",
            product, ", which exceeds what their squares allow"));
      }
    }
  }
  return state;
}

}  // namespace quantd::core
#endif  // HWY_ONCE
