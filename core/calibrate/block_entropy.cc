#include "core/calibrate/block_entropy.h"

#include <cstdint>

#include "core/simd_internal.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/calibrate/block_entropy.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace quantd::core {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR || HWY_HAVE_SCALABLE

bool HasKernels() { return false; }

void FindBinsOfFloats(const BinGrid&, const float*, int64_t, int32_t*) {}

void FindBinsOfDoubles(const BinGrid&, const double*, int64_t, int32_t*) {}

void FindAll(const LevelCuts&, const BlockRanges&) {}

#else

bool HasKernels() { return true; }

template <class D>
HWY_INLINE hn::Vec<D> LoadDoubles(D d, const float* from) {
  const hn::Rebind<float, D> df;
  return hn::PromoteTo(d, hn::LoadU(df, from));
}
template <class D>
HWY_INLINE hn::Vec<D> LoadDoubles(D d, const double* from) {
  return hn::LoadU(d, from);
}

template <class D, typename T>
HWY_INLINE void FindBinsOfLanes(D d, const BinGrid& grid, const T* x,
                                int32_t* bin) {
  const hn::Rebind<int32_t, D> di;
  const auto element = LoadDoubles(d, x);
  const auto from = grid.of_magnitudes ? hn::Abs(element) : element;
  const auto bins = static_cast<double>(grid.bins);
  const auto position =
      hn::Div(hn::Mul(hn::Sub(from, hn::Set(d, grid.low)), hn::Set(d, bins)),
              hn::Set(d, grid.width));
  // NaN, of a width of infinity, is the first bin too.
  const auto clamped = hn::IfThenElseZero(
      hn::Gt(position, hn::Zero(d)), hn::Min(position, hn::Set(d, bins - 1)));
  const auto is_zero = hn::Eq(element, hn::Zero(d));
  hn::StoreU(
      hn::DemoteTo(di, hn::IfThenElse(is_zero, hn::Set(d, bins), clamped)), di,
      bin);
}

template <typename T>
void FindBinsOf(const BinGrid& grid, const T* x, int64_t count, int32_t* bin) {
  const hn::CappedTag<double, kRangeLanes> d;
  const hn::CappedTag<double, 1> d1;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes)
    FindBinsOfLanes(d, grid, x + i, bin + i);
  for (; i < count; ++i) FindBinsOfLanes(d1, grid, x + i, bin + i);
}

void FindBinsOfFloats(const BinGrid& grid, const float* x, int64_t count,
                      int32_t* bin) {
  FindBinsOf(grid, x, count, bin);
}

void FindBinsOfDoubles(const BinGrid& grid, const double* x, int64_t count,
                       int32_t* bin) {
  FindBinsOf(grid, x, count, bin);
}

// Lanes(D) ranges. The sums are those of LinearBins::Divergence, in its order.
template <class D>
class Ranges {
 public:
  using DI = hn::Rebind<int32_t, D>;
  using V = hn::Vec<D>;
  using VI = hn::Vec<DI>;

  Ranges(const BlockRanges& ranges, int64_t k)
      : before_(reinterpret_cast<const int32_t*>(ranges.before)),
        x_log_x_(ranges.x_log_x),
        half_log_(ranges.half_log),
        first_(hn::LoadU(DI(), ranges.first + k)),
        last_(hn::LoadU(DI(), ranges.last + k)),
        all_(static_cast<int32_t>(ranges.before[ranges.bins])) {}

  HWY_INLINE V Divergence(const LevelCuts& cuts) const {
    const D d;
    const DI di;
    const auto one = hn::Set(di, 1);
    const auto zero = hn::Zero(di);
    const auto size = hn::Sub(last_, first_);
    const auto size_of = hn::PromoteTo(d, size);
    const auto at_first = Before(first_);
    const auto at_last = Before(last_);
    const auto below = Elements(at_first);
    const auto above = Elements(hn::Sub(hn::Set(di, all_), at_last));
    const auto in_first =
        Elements(hn::Sub(Before(hn::Add(first_, one)), at_first));
    const auto in_last =
        Elements(hn::Sub(at_last, Before(hn::Sub(last_, one))));
    const auto has_below = hn::Gt(below, zero);
    const auto has_above = hn::Gt(above, zero);
    const auto is_single = hn::Eq(size, one);

    auto p_log_p = hn::Sub(XLogXBefore(at_last), XLogXBefore(at_first));
    p_log_p = hn::Add(
        p_log_p, hn::IfThenElseZero(Wide(has_below),
                                    hn::Sub(XLogX(hn::Add(in_first, below)),
                                            XLogX(in_first))));
    p_log_p = hn::Add(
        p_log_p, hn::IfThenElseZero(
                     Wide(has_above),
                     hn::Sub(XLogX(hn::Add(in_last, above)), XLogX(in_last))));
    p_log_p = hn::IfThenElse(Wide(is_single),
                             XLogX(hn::Add(hn::Add(in_first, below), above)),
                             p_log_p);

    // Bins at the ends that only have what lies outside.
    const auto more_first =
        hn::IfThenElseZero(hn::And(has_below, hn::Eq(in_first, zero)), one);
    const auto more_last = hn::IfThenZeroElse(
        hn::And(is_single, has_below),
        hn::IfThenElseZero(hn::And(has_above, hn::Eq(in_last, zero)), one));

    auto p_log_q = hn::Zero(d);
    auto q_halves = zero;
    auto from = zero;
    auto at_from = at_first;
    const size_t last_level = cuts.end.size();
    for (size_t level = 0; level <= last_level; ++level) {
      auto to = size;
      auto at_to = at_last;
      if (level < last_level) {
        to = hn::DemoteTo(di, End(cuts, level, size_of));
        at_to = Before(hn::Add(first_, to));
      }
      const auto inside = hn::Sub(at_to, at_from);
      auto p = Elements(inside);
      auto filled = hn::ShiftRight<16>(inside);
      const auto q = hn::IfThenElse(hn::Gt(filled, zero), hn::Add(p, p), one);
      const auto has_first = hn::And(hn::Eq(from, zero), hn::Gt(to, zero));
      const auto has_last = hn::And(hn::Lt(from, size), hn::Eq(to, size));
      p = hn::Add(p, hn::Add(hn::IfThenElseZero(has_first, below),
                             hn::IfThenElseZero(has_last, above)));
      filled =
          hn::Add(filled, hn::Add(hn::IfThenElseZero(has_first, more_first),
                                  hn::IfThenElseZero(has_last, more_last)));
      // Levels without any have p = 0.
      q_halves = hn::Add(q_halves, hn::IfThenElseZero(hn::Gt(filled, zero), q));
      p_log_q = hn::Add(
          p_log_q,
          hn::Mul(hn::PromoteTo(d, p),
                  hn::Sub(HalfLog(q), HalfLog(hn::Add(filled, filled)))));
      from = to;
      at_from = at_to;
    }
    const int32_t total = all_ & kElementBits;
    return hn::Add(
        hn::Div(hn::Sub(p_log_p, p_log_q),
                hn::Set(d, static_cast<double>(total))),
        hn::Sub(HalfLog(q_halves), hn::Set(d, half_log_[2 * total])));
  }

 private:
  static constexpr int32_t kElementBits = 0xFFFF;

  HWY_INLINE static V End(const LevelCuts& cuts, size_t level, V size) {
    const D d;
    auto end = hn::Mul(hn::Set(d, cuts.end[level]), size);
    if (cuts.divisor != 1) end = hn::Div(end, hn::Set(d, cuts.divisor));
    end = hn::Ceil(hn::Sub(end, hn::Set(d, cuts.offset)));
    return hn::Min(hn::Max(end, hn::Zero(d)), size);
  }
  HWY_INLINE VI Before(VI t) const { return hn::GatherIndex(DI(), before_, t); }
  HWY_INLINE static VI Elements(VI packed) {
    const DI di;
    return hn::And(packed, hn::Set(di, kElementBits));
  }
  HWY_INLINE static hn::Mask<D> Wide(hn::Mask<DI> mask) {
    const DI di;
    const hn::Rebind<int64_t, D> dl;
    const auto lanes = hn::PromoteTo(dl, hn::VecFromMask(di, mask));
    return hn::RebindMask(D(), hn::MaskFromVec(lanes));
  }
  HWY_INLINE static V Gather(const double* from, VI index) {
    const hn::Rebind<int64_t, D> dl;
    return hn::GatherIndex(D(), from, hn::PromoteTo(dl, index));
  }
  HWY_INLINE V HalfLog(VI halves) const { return Gather(half_log_, halves); }
  HWY_INLINE V XLogX(VI n) const {
    return hn::Mul(hn::PromoteTo(D(), n), HalfLog(hn::Add(n, n)));
  }
  HWY_INLINE V XLogXBefore(VI packed) const {
    return Gather(x_log_x_, hn::ShiftRight<16>(packed));
  }

  // Counts in it are small: the sign is never set.
  const int32_t* before_;
  const double* x_log_x_;
  const double* half_log_;
  const VI first_;
  const VI last_;
  const int32_t all_;
};

void FindAll(const LevelCuts& cuts, const BlockRanges& ranges) {
  const hn::CappedTag<double, kRangeLanes> d;
  for (int64_t k = 0; k < ranges.count; k += hn::Lanes(d)) {
    const Ranges<decltype(d)> lanes(ranges, k);
    hn::StoreU(lanes.Divergence(cuts), d, ranges.divergence + k);
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

HWY_EXPORT(HasKernels);
HWY_EXPORT(FindBinsOfFloats);
HWY_EXPORT(FindBinsOfDoubles);
HWY_EXPORT(FindAll);

}  // namespace

template <>
void FindBins(const BinGrid& grid, const float* x, int64_t count,
              int32_t* bin) {
  HWY_DYNAMIC_DISPATCH(FindBinsOfFloats)(grid, x, count, bin);
}

template <>
void FindBins(const BinGrid& grid, const double* x, int64_t count,
              int32_t* bin) {
  HWY_DYNAMIC_DISPATCH(FindBinsOfDoubles)(grid, x, count, bin);
}

void FindDivergences(const LevelCuts& cuts, const BlockRanges& ranges) {
  HWY_DYNAMIC_DISPATCH(FindAll)(cuts, ranges);
}

bool AreDivergencesVectorized() {
  return !internal::UsesScalarKernels() && HWY_DYNAMIC_DISPATCH(HasKernels)();
}

}  // namespace quantd::core
#endif  // HWY_ONCE
