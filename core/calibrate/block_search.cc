#include "core/calibrate/block_search.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/calibrate/block_entropy.h"
#include "core/calibrate/block_errors.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/range_scaler.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/bin_table.h"
#include "core/types/element_type.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

// Steps between the two neighbours of the best range, for each end.
constexpr int kFineSteps = 16;
constexpr int kFineStepsOfTwoEnds = 16;
// Steps for many elements to either side of the best of the fine steps, for
// each end.
constexpr int kFinerSteps = 4;
constexpr double kFinerStep = 2.0 / kFineStepsOfTwoEnds / (kFinerSteps + 1);
// Ranges that are tried before all others where both ends move.
constexpr int kSampleEnds = 16;
// Ranges that are tried before all others, in parts of the whole one: dense
// where what is clipped begins to be more than the least error, for most data.
constexpr int64_t kSamples = kTrialLanes;
constexpr int kSampleParts = 128;
constexpr int kSampleAt[kSamples] = {128, 120, 112, 106, 100, 95, 90, 85,
                                     80,  75,  70,  64,  54,  40, 26, 12};
// Least number of ranges with two moving ends that are tried at once.
constexpr int64_t kTrialsAtOnce = 64;
// Errors are sums in float32.
constexpr double kSlack = 1 - 0x1p-10;
// Thresholds are rounded to float32.
constexpr double kThresholdSlack = 0x1p-22;

// Magnitudes whose squares and scales are far from the ends of float32.
constexpr double kLeastFloat = 0x1p-40;
constexpr double kMostFloat = 0x1p40;
constexpr double kLeastScale = std::numeric_limits<float>::min();
// Wider codes than this are too fine for quotients in float32.
constexpr int kMostFloatBits = 8;

// Ends of a block that are kept in order while its elements pass by.
constexpr size_t kMostSelected = 16;
// Blocks of more elements first select those near a rank.
constexpr size_t kMostSorted = 1024;

using TwoRanks = std::pair<double, double>;

// The elements of ranks `rank` and, where there is one, `rank` + 1, of the
// elements in `room`.
TwoRanks SelectTwoOf(size_t rank, std::vector<double>* room) {
  const auto nth = room->begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(room->begin(), nth, room->end());
  return {*nth, nth + 1 == room->end()
                    ? *nth
                    : *std::min_element(nth + 1, room->end())};
}

// Both from the last `from_top` of the elements.
template <typename T, typename At>
TwoRanks SelectFromTop(size_t from_top, size_t count, const At& at) {
  // Descending.
  T top[kMostSelected];
  std::fill(top, top + from_top, -std::numeric_limits<T>::infinity());
  for (size_t i = 0; i < count; ++i) {
    const T x = at(i);
    if (!(x > top[from_top - 1])) continue;
    size_t k = from_top - 1;
    for (; k > 0 && top[k - 1] < x; --k) top[k] = top[k - 1];
    top[k] = x;
  }
  return {top[from_top - 1], top[from_top > 1 ? from_top - 2 : 0]};
}

// Both from the elements between two that some of the elements put on either
// side of the rank.
template <typename T, typename At>
TwoRanks SelectBetween(size_t rank, size_t count, std::vector<double>* room,
                       const At& at) {
  constexpr size_t kSome = 512;
  double some[kSome];
  for (size_t i = 0; i < kSome; ++i) some[i] = at(i * count / kSome);
  std::sort(some, some + kSome);
  const double fraction =
      static_cast<double>(rank) / static_cast<double>(count);
  const double middle = fraction * kSome;
  // Wider than nearly all counts of some elements are off by.
  const double margin = 4 * std::sqrt(kSome * fraction * (1 - fraction)) + 2;
  const T low =
      middle < margin
          ? -std::numeric_limits<T>::infinity()
          : static_cast<T>(some[static_cast<size_t>(middle - margin)]);
  const T high =
      middle + margin >= kSome
          ? std::numeric_limits<T>::infinity()
          : static_cast<T>(some[static_cast<size_t>(middle + margin)]);
  MakeRoom(count, room);
  double* const between = room->data();
  size_t below = 0;
  size_t kept = 0;
  for (size_t i = 0; i < count; ++i) {
    const T x = at(i);
    between[kept] = x;
    below += x < low;
    kept += x >= low && x <= high;
  }
  if (below <= rank && rank + 1 < below + kept) {
    room->resize(kept);
    return SelectTwoOf(rank - below, room);
  }
  for (size_t i = 0; i < count; ++i) between[i] = at(i);
  return SelectTwoOf(rank, room);
}

// The elements of ranks `rank` and, where there is one, `rank` + 1, of `count`.
template <typename T, typename At>
TwoRanks SelectTwo(size_t rank, size_t count, std::vector<double>* room,
                   const At& at) {
  const size_t from_top = count - rank;
  if (from_top <= kMostSelected) return SelectFromTop<T>(from_top, count, at);
  if (count > kMostSorted) return SelectBetween<T>(rank, count, room, at);
  MakeRoom(count, room);
  for (size_t i = 0; i < count; ++i) (*room)[i] = at(i);
  return SelectTwoOf(rank, room);
}

// Histograms are searched faster where there are fewer numbers, elements are
// not. As measured.
int64_t MostElements(const EncodingSpec& spec, CalibrationMethod method) {
  const FormatInfo& format = *FindFormat(spec.format);
  const bool has_two_ends = EffectiveSymmetry(spec) == Symmetry::kAsymmetric;
  switch (method) {
    case CalibrationMethod::kMse:
    case CalibrationMethod::kSqnr:
      if (format.kind == CodeKind::kCodebook) return kFewDirectElements;
      if (format.bits >= 8) return kMaxDirectElements;
      if (format.bits >= 4) {
        return kMaxDirectElements / (has_two_ends ? 8 : 2);
      }
      return has_two_ends ? kFewDirectElements : kMaxDirectElements / 4;
    case CalibrationMethod::kEntropy: {
      // More levels are searched where there are elements only.
      constexpr int kMostLevelBits = 8;
      const int level_bits = format.bits - (has_two_ends ? 0 : 1);
      return format.kind == CodeKind::kInteger && level_bits > kMostLevelBits
                 ? kFewDirectElements
                 : kMaxDirectElements;
    }
    default:
      return kMaxDirectElements;
  }
}

}  // namespace

int64_t MostDirectElements(const EncodingSpec& spec) {
  if (spec.method != CalibrationMethod::kBestOf) {
    return MostElements(spec, spec.method);
  }
  int64_t most = kMaxDirectElements;
  for (const CalibrationMethod method : spec.methods) {
    most = std::min(most, MostElements(spec, method));
  }
  return most;
}

bool IsSearchedDirectly(const EncodingSpec& spec, const BlockLayout& layout) {
  return NeedsHistograms(spec) &&
         layout.largest_block() <= MostDirectElements(spec);
}

int64_t BlockElements::MemoryBytes(const EncodingSpec& spec,
                                   int64_t largest_block, bool has_importance) {
  if (largest_block <= kFewDirectElements) return 0;
  const bool is_best_of = spec.method == CalibrationMethod::kBestOf;
  const auto uses = [&](CalibrationMethod method) {
    return spec.method == method ||
           (is_best_of && absl::c_linear_search(spec.methods, method));
  };
  // Float64 elements take the most: the input, and the kept elements.
  int64_t per_element = 2 * sizeof(double);
  // Copy of the elements that errors are measured on.
  if (is_best_of || uses(CalibrationMethod::kMse) ||
      uses(CalibrationMethod::kSqnr)) {
    per_element += sizeof(double);
  }
  // Weights three times: copied, kept, and as errors are weighed by them.
  if (has_importance) per_element += 3 * sizeof(double);
  // Sorted copy.
  if (uses(CalibrationMethod::kPercentile)) per_element += sizeof(double);
  if (uses(CalibrationMethod::kEntropy)) per_element += kEntropyElementBytes;
  return std::min(largest_block, kMaxDirectElements) * per_element;
}

void BlockElements::Assign(ElementType type, const uint8_t* in, int64_t count,
                           const double* weights) {
  const auto size = static_cast<size_t>(count);
  is_double_ = type == ElementType::kFloat64;
  if (is_double_) {
    if (doubles_.size() < size) MakeRoom(size, &doubles_);
    std::copy_n(in, size * sizeof(double),
                reinterpret_cast<uint8_t*>(doubles_.data()));
    KeepWeights(count, doubles_.data(), weights);
    KeepFinite<int64_t>(count, &doubles_);
    return;
  }
  if (floats_.size() < size) MakeRoom(size, &floats_);
  if (type == ElementType::kFloat32) {
    std::copy_n(in, size * sizeof(float),
                reinterpret_cast<uint8_t*>(floats_.data()));
  } else {
    ToHistogramFloats(type, in, count, floats_.data());
  }
  KeepWeights(count, floats_.data(), weights);
  KeepFinite<int32_t>(count, &floats_);
}

void BlockElements::Assign(const HeldTensor& held, const BlockLayout& layout,
                           int64_t scale_index, const Importance* importance) {
  bytes_.resize(static_cast<size_t>(held.LargestBlockBytes()));
  const int64_t count = held.CopyBlock(scale_index, bytes_.data());
  const double* weights = nullptr;
  if (importance != nullptr) {
    MakeRoom(static_cast<size_t>(layout.largest_block()), &copied_weights_);
    importance->CopyBlock(layout, scale_index, copied_weights_.data());
    weights = copied_weights_.data();
  }
  Assign(held.type(), bytes_.data(), count, weights);
}

template <typename T>
void BlockElements::KeepWeights(int64_t count, const T* elements,
                                const double* weights) {
  has_weights_ = false;
  if (weights == nullptr) return;
  const auto size = static_cast<size_t>(count);
  if (weights_.size() < size) MakeRoom(size, &weights_);
  double most = 0;
  size_t kept = 0;
  for (size_t i = 0; i < size; ++i) {
    if (!std::isfinite(elements[i])) continue;
    weights_[kept++] = weights[i];
    most = std::max(most, weights[i]);
  }
  if (most == 0) return;
  has_weights_ = true;
  weight_exponent_ = -std::ilogb(most);
}

template <typename Bits, typename T>
void BlockElements::KeepFinite(int64_t count, std::vector<T>* elements) {
  // Magnitudes are in the order of their bits, and what is not finite above
  // them.
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
  const Bits infinity = BitsAs<Bits>(std::numeric_limits<T>::infinity());
  const auto largest = [this, x = elements->data()] {
    Bits most = 0;
    for (int64_t i = 0; i < count_; ++i) {
      most = std::max(most, BitsAs<Bits>(x[i]) & kMagnitude);
    }
    return most;
  };
  count_ = count;
  Bits most = largest();
  if (most >= infinity) {
    const auto end =
        std::remove_if(elements->begin(), elements->begin() + count,
                       [](T x) { return !std::isfinite(x); });
    count_ = end - elements->begin();
    most = largest();
  }
  abs_max_ = BitsAs<T>(most);
}

template <>
BlockElements::Room<float>& BlockElements::room() {
  return float_room_;
}

template <>
BlockElements::Room<double>& BlockElements::room() {
  return double_room_;
}

template <typename T>
class BlockSearch::Run {
 public:
  using Way = BlockElements::Way;

  Run(const BlockSearch& search, int64_t index, float outer, double gamma,
      BlockElements* elements, StopToken stop)
      : scaler_(search.scaler_),
        grid_(search.grid_),
        index_(index),
        outer_(outer),
        gamma_(gamma),
        all_(*elements),
        room_(elements->room<T>()),
        trials_(elements->trials_),
        stop_(stop) {
    trials_.count = 0;
    const auto count = static_cast<size_t>(all_.count());
    if (room_.elements.size() < count) MakeRoom(count, &room_.elements);
    const auto take = [&, to = room_.elements.data()](const auto* from) {
      if (grid_.is_mirrored) {
        for (size_t i = 0; i < count; ++i) {
          to[i] = static_cast<T>(std::fabs(from[i]));
        }
      } else {
        for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
      }
    };
    if (all_.is_double()) {
      take(all_.doubles());
    } else {
      take(all_.floats());
    }
    if (!all_.has_weights_) return;
    if (room_.weights.size() < count) MakeRoom(count, &room_.weights);
    for (size_t i = 0; i < count; ++i) {
      room_.weights[i] =
          static_cast<T>(std::ldexp(all_.weights_[i], all_.weight_exponent_));
    }
    weights_ = room_.weights.data();
  }

  absl::StatusOr<double> Error(const Range& range) {
    whole_ = range;
    if (scaler_.is_symmetric()) {
      const double all = 1;
      JudgeFractions(&all, 1);
    } else {
      AddTrial(range, 0);
      JudgeTrials();
    }
    if (!has_best_) return status_;
    return best_.error;
  }

  absl::StatusOr<Range> Search(const Range& whole, int steps) {
    whole_ = whole;
    if (scaler_.is_symmetric()) {
      SearchOneEnd(steps != 0 ? steps : kDefaultSteps);
    } else {
      SearchTwoEnds(steps != 0 ? steps : kDefaultStepsOfEachEnd);
    }
    if (stop_.stopped()) return StoppedError();
    if (!has_best_) return status_;
    return best_.range;
  }

 private:
  struct Best {
    Range range;
    double error;
    // Breaks ties: the range with the least order wins.
    double order;
  };

  // Makes room for at least `count` trials, in whole vectors. Returns that
  // number.
  int64_t Reserve(int64_t count) {
    const int64_t padded =
        (count + kTrialLanes - 1) / kTrialLanes * kTrialLanes;
    const auto size = static_cast<size_t>(padded);
    if (room_.scale.size() >= size) return padded;
    for (auto* array : {&room_.scale, &room_.low, &room_.high}) {
      array->resize(size);
    }
    for (auto* array : {&room_.errors, &room_.clipped}) array->resize(size);
    return padded;
  }

  // Least error of the ranges that were tried.
  double least() const {
    return has_best_ ? best_.error : std::numeric_limits<double>::infinity();
  }

  void Take(const Range& range, double error, double order) {
    if (has_best_ && !(error < best_.error) &&
        !(error == best_.error && order < best_.order)) {
      return;
    }
    has_best_ = true;
    best_ = {range, error, order};
  }

  // Scales fall with the fraction of the whole range that is tried. What is
  // clipped rises as they do, if no number at an end comes nearer: where that
  // alone is more than the least error, smaller fractions need not be looked
  // at.
  void SearchOneEnd(int count) {
    Way& way = all_.way_;
    Divide(count, &way);
    const bool is_sampled = !way.between.empty();
    const bool rises = EndsEncloseZero();
    JudgeSamples(way.samples.data(), static_cast<int64_t>(way.samples.size()),
                 is_sampled && rises);
    // Stopped, there are no scales of the samples.
    if (stop_.stopped()) return;
    if (is_sampled) {
      double* const tried = way.tried.data();
      double* end = tried;
      const T* const scales = room_.scale.data();
      const double* const clipped = room_.clipped.data();
      const int64_t* const before = way.before.data();
      for (int64_t i = 0; i < kSamples; ++i) {
        if (rises && gamma_ * clipped[i] * kSlack > least()) break;
        // Scales that are rounded coarsely repeat themselves.
        if (i + 1 < kSamples && scales[i + 1] == scales[i]) continue;
        end = std::copy(way.between.data() + before[i],
                        way.between.data() + before[i + 1], end);
      }
      JudgeFractions(tried, end - tried);
    }
    JudgeFractions(way.beyond.data(), static_cast<int64_t>(way.beyond.size()));
    if (!has_best_) return;
    const double step = 1.0 / count;
    JudgeAround(-best_.order, step);
    if (is_long()) JudgeAround(-best_.order, 2 * step / kFineSteps);
  }

  void JudgeAround(double fraction, double step) {
    const double first = fraction - step;
    const double last = std::min(fraction + step, scaler_.widest());
    double fine[kFineSteps - 1];
    for (int k = 1; k < kFineSteps; ++k) {
      fine[kFineSteps - 1 - k] = first + k * ((last - first) / kFineSteps);
    }
    JudgeFractions(fine, kFineSteps - 1);
  }

  // Errors of many elements hardly jump from range to range: one closer look
  // pays, as far as histograms are searched.
  bool is_long() const { return all_.count() > kErrorPiece; }

  // A smaller scale clips less of the elements that lie below a lowest number
  // above zero, or above a highest one below zero.
  bool EndsEncloseZero() const {
    if (!grid_.codebook.has_value()) return true;
    const CodebookGrid& codebook = *grid_.codebook;
    return codebook.entry[0] <= 0 && codebook.entry[codebook.count - 1] >= 0;
  }

  // Sets the fractions that are tried, unless they are set already.
  void Divide(int count, Way* way) const {
    const int coarse_steps = scaler_.CoarseSteps(outer_);
    if (way->steps == count && way->widest == scaler_.widest() &&
        way->coarse_steps == coarse_steps) {
      return;
    }
    *way = Way();
    way->steps = count;
    way->widest = scaler_.widest();
    way->coarse_steps = coarse_steps;
    const double step = 1.0 / count;
    const int most = static_cast<int>(count * way->widest);
    // Few ranges have all the scales beyond, and around the best of them the
    // others have all there are.
    if (coarse_steps > 0 && count >= 2 * coarse_steps) {
      for (int k = most > count ? coarse_steps : 0; k >= 1; --k) {
        way->beyond.push_back(1 + k * (most * step - 1) / coarse_steps);
      }
    } else {
      for (int k = most; k > count; --k) way->beyond.push_back(k * step);
    }
    const bool is_sampled = count > 2 * kSamples;
    for (int k = count, i = 0; k >= 1; --k) {
      if (!is_sampled) {
        way->samples.push_back(k * step);
      } else if (i < kSamples && k == kSampleAt[i] * count / kSampleParts) {
        way->samples.push_back(k * step);
        way->before.push_back(static_cast<int64_t>(way->between.size()));
        ++i;
      } else {
        way->between.push_back(k * step);
      }
    }
    way->before.push_back(static_cast<int64_t>(way->between.size()));
    way->tried.resize(way->between.size());
  }

  // Takes the best of the fractions of whole_, which descend.
  void JudgeFractions(const double* fractions, int64_t count) {
    if (count == 0 || stop_.stopped()) return;
    Reserve(count);
    SetScales(fractions, count, room_.scale.data());
    if (!scaler_.has_plain_scales()) {
      count = KeepDifferentScales(fractions, count);
      fractions = all_.way_.different.data();
    }
    JudgeScales(fractions, count, /*needs_clipped=*/false);
  }

  // Like JudgeFractions, but leaves in room_ the scale of each fraction and, if
  // `needs_clipped`, its clipped error.
  void JudgeSamples(const double* fractions, int64_t count,
                    bool needs_clipped) {
    if (stop_.stopped()) return;
    Reserve(count);
    SetScales(fractions, count, room_.scale.data());
    JudgeScales(fractions, count, needs_clipped);
  }

  // Scales that are rounded coarsely repeat: the first fraction of each scale
  // stays.
  int64_t KeepDifferentScales(const double* fractions, int64_t count) {
    T* const scales = room_.scale.data();
    std::vector<double>& different = all_.way_.different;
    if (different.size() < static_cast<size_t>(count)) different.resize(count);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (kept > 0 && scales[kept - 1] == scales[i]) continue;
      scales[kept] = scales[i];
      different[kept] = fractions[i];
      ++kept;
    }
    return kept;
  }

  // Takes the best of the fractions whose scales are in room_.
  void JudgeScales(const double* fractions, int64_t count, bool needs_clipped) {
    T* const scales = room_.scale.data();
    const int64_t padded = Reserve(count);
    std::fill(scales + count, scales + padded, scales[count - 1]);
    int64_t best = SumBlockErrors<T>(
        grid_, room_.elements.data(), all_.count(),
        {padded, scales, nullptr, nullptr, gamma_, room_.errors.data(),
         needs_clipped ? room_.clipped.data() : nullptr, least(), weights_});
    // If all are beyond float64, the first is as good as any.
    while (scales[best] == 0) {
      if (++best == count) return;
    }
    const double fraction = fractions[best];
    // The widest wins ties.
    Take({whole_.low * fraction, whole_.high * fraction}, room_.errors[best],
         -fraction);
  }

  // Sets the scales of fractions of whole_; 0, which is no scale, where none
  // exists.
  void SetScales(const double* fractions, int64_t count, T* scales) {
    const double unit = scaler_.Magnitude(whole_) / scaler_.largest();
    if (outer_ == 0 && scaler_.has_plain_scales() && unit < kMostFloat) {
      for (int64_t i = 0; i < count; ++i) {
        scales[i] =
            static_cast<float>(std::max(unit * fractions[i], kLeastScale));
      }
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      const absl::StatusOr<BlockScale> scale = scaler_.Scale(
          index_, {whole_.low * fractions[i], whole_.high * fractions[i]},
          outer_);
      if (!scale.ok() && status_.ok()) status_ = scale.status();
      scales[i] = scale.ok() ? scale->scale : 0;
    }
  }

  // The error of elements clipped below rises as the lower end comes nearer,
  // for any upper end, and the other way round: if both parts alone exceed the
  // least error, the range need not be tried.
  void SearchTwoEnds(int count) {
    // Ranges start here. An end that lies at the start stays there.
    const bool contains_zero = whole_.low <= 0 && whole_.high >= 0;
    const double from =
        contains_zero ? 0 : std::clamp(Mean(), whole_.low, whole_.high);
    const int least_low = whole_.low != from ? 1 : count;
    const int least_high = whole_.high != from ? 1 : count;
    const auto range_of = [&](double low, double high) {
      return Range{from + (whole_.low - from) * low / count,
                   from + (whole_.high - from) * high / count};
    };
    for (int i = 0; i < kSampleEnds; ++i) {
      const int k = count - i * count / kSampleEnds;
      const int low = std::max(k, least_low);
      const int high = std::max(k, least_high);
      AddTrial(range_of(low, high), (count - low) * count + (count - high));
    }
    JudgeTrials();
    const Bounds bounds = contains_zero && ScalesAreExact(count)
                              ? BoundsOf(count, range_of)
                              : Bounds();
    for (int low = count; low >= least_low; --low) {
      if (stop_.stopped()) return;
      for (int high = count; high >= least_high; --high) {
        if (has_best_ && bounds.Of(low, high) > best_.error) break;
        AddTrial(range_of(low, high), (count - low) * count + (count - high));
      }
      if (trials_.count >= kTrialsAtOnce) JudgeTrials();
    }
    JudgeTrials();
    if (!has_best_) return;
    const int best_low = count - static_cast<int>(best_.order) / count;
    const int best_high = count - static_cast<int>(best_.order) % count;
    const auto fine = [&](int step, int k) {
      const double first = step - 1;
      const double last = std::min(step + 1, count);
      return first + k * (last - first) / kFineStepsOfTwoEnds;
    };
    constexpr int kMost = kFineStepsOfTwoEnds;
    const int least_low_step = least_low < count ? 0 : kMost;
    const int least_high_step = least_high < count ? 0 : kMost;
    for (int low = kMost; low >= least_low_step; --low) {
      for (int high = kMost; high >= least_high_step; --high) {
        const double low_step =
            least_low < count ? fine(best_low, low) : best_low;
        const double high_step =
            least_high < count ? fine(best_high, high) : best_high;
        if (low_step <= 0 || high_step <= 0) continue;
        AddTrial(range_of(low_step, high_step),
                 std::numeric_limits<double>::infinity());
      }
    }
    JudgeTrials();
    if (!is_long()) return;
    const auto step_of = [&](double whole, double end) {
      return whole == from ? count : (end - from) / (whole - from) * count;
    };
    const double low_at = step_of(whole_.low, best_.range.low);
    const double high_at = step_of(whole_.high, best_.range.high);
    const int lows = least_low < count ? kFinerSteps : 0;
    const int highs = least_high < count ? kFinerSteps : 0;
    for (int low = lows; low >= -lows; --low) {
      for (int high = highs; high >= -highs; --high) {
        const double low_step =
            std::min<double>(count, low_at + low * kFinerStep);
        const double high_step =
            std::min<double>(count, high_at + high * kFinerStep);
        if (low_step <= 0 || high_step <= 0) continue;
        AddTrial(range_of(low_step, high_step),
                 std::numeric_limits<double>::infinity());
      }
    }
    JudgeTrials();
  }

  // Least clipped errors of the ranges of SearchTwoEnds.
  class Bounds {
   public:
    Bounds() = default;
    Bounds(const T* below, const T* above, double factor)
        : below_(below), above_(above), factor_(factor) {}

    double Of(int low, int high) const {
      if (below_ == nullptr) return 0;
      return factor_ * (double{below_[low - 1]} + double{above_[high - 1]});
    }

   private:
    const T* below_ = nullptr;
    const T* above_ = nullptr;
    double factor_ = 0;
  };

  // True if the scales of SearchTwoEnds are (high - low) / (qmax - qmin),
  // rounded to float32 only. All ranges are at least 1 / count as wide as the
  // whole one.
  bool ScalesAreExact(int count) const {
    const double codes = static_cast<double>(grid_.qmax) - grid_.qmin;
    return scaler_.has_plain_scales() &&
           (whole_.high - whole_.low) / count >= 2 * kLeastScale * codes;
  }

  // The number of the lowest code is round(low / scale) scales: within half a
  // scale of the lower end. That of the highest lies qmax - qmin scales above.
  // These are high - low where scales are exact. Rounding moves that by 2^-24
  // at most: with 16 bits by 2^-8 scales. So the number lies within 1/2 + 2^-8
  // scales of the upper end; larger scales may take it far above. No scale of a
  // range with an end is above that of the widest one with that end. What lies
  // beyond an end by more than all this is further still from the number.
  // Requires: ScalesAreExact.
  template <typename RangeOf>
  Bounds BoundsOf(int count, const RangeOf& range_of) {
    const int64_t padded = Reserve(count);
    T* const low = room_.low.data();
    T* const high = room_.high.data();
    // Further from the number than kClippedDistance, if clipped elements count
    // more than others.
    const double margin = (gamma_ > 1 ? 1 : 0.5) + 0x1p-7;
    for (int64_t i = 0; i < padded; ++i) {
      const int k = static_cast<int>(std::min<int64_t>(i + 1, count));
      const Range lower = range_of(k, count);
      const Range upper = range_of(count, k);
      const absl::StatusOr<BlockScale> lower_scale =
          scaler_.Scale(index_, lower, outer_);
      const absl::StatusOr<BlockScale> upper_scale =
          scaler_.Scale(index_, upper, outer_);
      if (!lower_scale.ok() || !upper_scale.ok()) return Bounds();
      const double below = lower.low - margin * lower_scale->scale;
      const double above = upper.high + margin * upper_scale->scale;
      low[i] = static_cast<T>(below - kThresholdSlack * std::fabs(below));
      high[i] = static_cast<T>(above + kThresholdSlack * std::fabs(above));
    }
    room_.below.resize(std::max<size_t>(room_.below.size(), padded));
    room_.above.resize(std::max<size_t>(room_.above.size(), padded));
    SumBeyondEnds<T>(
        room_.elements.data(), all_.count(),
        {padded, low, high, room_.below.data(), room_.above.data(), weights_});
    return Bounds(room_.below.data(), room_.above.data(), gamma_ * kSlack);
  }

  double Mean() const {
    double sum = 0;
    for (int64_t i = 0; i < all_.count(); ++i) sum += all_.at(i);
    return sum / static_cast<double>(all_.count());
  }

  void AddTrial(const Range& range, double order) {
    const auto i = static_cast<size_t>(trials_.count++);
    if (trials_.low.size() <= i) {
      for (auto* array : {&trials_.low, &trials_.high, &trials_.order}) {
        array->resize(2 * i + kTrialsAtOnce);
      }
    }
    trials_.low[i] = range.low;
    trials_.high[i] = range.high;
    trials_.order[i] = order;
  }

  // Takes the best of the trials, and takes them away.
  void JudgeTrials() {
    const int64_t padded = Reserve(trials_.count);
    SetZeroPoints();
    const int64_t count = trials_.count;
    trials_.count = 0;
    if (count == 0 || stop_.stopped()) return;
    for (auto* array : {&room_.scale, &room_.low, &room_.high}) {
      T* const numbers = array->data();
      std::fill(numbers + count, numbers + padded, numbers[count - 1]);
    }
    const int64_t best = SumBlockErrors<T>(
        grid_, room_.elements.data(), all_.count(),
        {(count + kTrialLanes - 1) / kTrialLanes * kTrialLanes,
         room_.scale.data(), room_.low.data(), room_.high.data(), gamma_,
         room_.errors.data(), nullptr, least(), weights_});
    // If all are beyond float64, the first is as good as any.
    Take({trials_.low[best], trials_.high[best]}, room_.errors[best],
         trials_.order[best]);
  }

  // Sets the scales of the trials, and qmin and qmax under their zero points.
  // Removes trials that have no scale, or that of the trial before.
  void SetZeroPoints() {
    const int64_t count = trials_.count;
    double* const low = trials_.low.data();
    double* const high = trials_.high.data();
    T* const scales = room_.scale.data();
    T* const lowest = room_.low.data();
    T* const highest = room_.high.data();
    const double qmin = grid_.qmin;
    const double qmax = grid_.qmax;
    if (scaler_.has_plain_scales() && whole_.low <= 0 && whole_.high >= 0 &&
        (whole_.high - whole_.low) / (qmax - qmin) < kMostFloat) {
      // Adding and taking it away rounds magnitudes up to 2^51 to integers.
      constexpr double kMagic = 0x1.8p52;
      for (int64_t i = 0; i < count; ++i) {
        const double scale = static_cast<float>(
            std::max((high[i] - low[i]) / (qmax - qmin), kLeastScale));
        const double steps = (low[i] / scale + kMagic) - kMagic;
        const double zero_point = std::min(std::max(qmin - steps, qmin), qmax);
        scales[i] = static_cast<T>(scale);
        lowest[i] = static_cast<T>(qmin - zero_point);
        highest[i] = static_cast<T>(qmax - zero_point);
      }
      return;
    }
    int64_t kept = 0;
    BlockScale last = {0, 0, 0};
    for (int64_t i = 0; i < count; ++i) {
      const absl::StatusOr<BlockScale> scale =
          scaler_.Scale(index_, {low[i], high[i]}, outer_);
      if (!scale.ok()) {
        if (status_.ok()) status_ = scale.status();
        continue;
      }
      // Scales that are rounded coarsely repeat themselves.
      if (*scale == last) continue;
      last = *scale;
      low[kept] = low[i];
      high[kept] = high[i];
      trials_.order[kept] = trials_.order[i];
      scales[kept] = static_cast<T>(scale->scale);
      lowest[kept] = static_cast<T>(grid_.qmin - scale->zero_point);
      highest[kept] = static_cast<T>(grid_.qmax - scale->zero_point);
      ++kept;
    }
    trials_.count = kept;
  }

  const RangeScaler& scaler_;
  const BlockGrid& grid_;
  const int64_t index_;
  const float outer_;
  const double gamma_;
  BlockElements& all_;
  BlockElements::Room<T>& room_;
  // [count] or null.
  const T* weights_ = nullptr;
  BlockElements::Trials& trials_;
  const StopToken stop_;
  absl::Status status_;
  bool has_best_ = false;
  Best best_{};
  Range whole_{};
};

BlockSearch::BlockSearch(const EncodingSpec& spec, const Encoding& encoding,
                         const RangeScaler& scaler)
    : scaler_(scaler),
      grid_(encoding, !scaler.is_symmetric()),
      is_wide_(grid_.format.bits > kMostFloatBits || spec.exclude_zero) {}

bool BlockSearch::NeedsDouble(const BlockElements& elements) const {
  return is_wide_ || elements.is_double() || elements.abs_max() < kLeastFloat ||
         elements.abs_max() > kMostFloat;
}

absl::StatusOr<double> BlockSearch::Error(int64_t index, float outer,
                                          const Range& range, double gamma,
                                          BlockElements* elements) const {
  if (NeedsDouble(*elements)) {
    return Run<double>(*this, index, outer, gamma, elements, StopToken())
        .Error(range);
  }
  return Run<float>(*this, index, outer, gamma, elements, StopToken())
      .Error(range);
}

absl::StatusOr<Range> BlockSearch::Search(int64_t index, float outer,
                                          const Range& whole, double gamma,
                                          int steps, BlockElements* elements,
                                          StopToken stop) const {
  if (NeedsDouble(*elements)) {
    return Run<double>(*this, index, outer, gamma, elements, stop)
        .Search(whole, steps);
  }
  return Run<float>(*this, index, outer, gamma, elements, stop)
      .Search(whole, steps);
}

double BlockSearch::Quantile(double fraction, bool of_magnitudes,
                             BlockElements* elements) {
  const auto last = static_cast<size_t>(elements->count() - 1);
  const double position = fraction * static_cast<double>(last);
  const size_t rank = std::min(static_cast<size_t>(std::floor(position)), last);
  const double t = position - static_cast<double>(rank);
  const auto select = [&](const auto* x) {
    using T = std::decay_t<decltype(*x)>;
    return of_magnitudes
               ? SelectTwo<T>(rank, last + 1, &elements->sorted_,
                              [x](size_t i) { return std::fabs(x[i]); })
               : SelectTwo<T>(rank, last + 1, &elements->sorted_,
                              [x](size_t i) { return x[i]; });
  };
  const auto [a, b] = elements->is_double() ? select(elements->doubles())
                                            : select(elements->floats());
  if (t <= 0 || rank == last) return a;
  // numpy counts from the nearer end.
  return t < 0.5 ? a + (b - a) * t : b - (b - a) * (1 - t);
}

}  // namespace quantd::core
