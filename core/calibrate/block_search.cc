#include "core/calibrate/block_search.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/calibrate/block_errors.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/range_scaler.h"
#include "core/errors.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/bin_table.h"
#include "core/types/element_type.h"
#include "core/types/float_convert.h"

namespace quantd::core {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kDefaultSteps = 128;
constexpr int kDefaultStepsOfTwoEnds = 32;
// Steps between the two neighbours of the best range, for each end.
constexpr int kFineSteps = 16;
constexpr int kFineStepsOfTwoEnds = 16;
// Few trials are made at once, many after some of them.
constexpr int64_t kSamples = kTrialLanes;
constexpr int64_t kTrialsAtOnce = 256;
// Errors are sums in float32.
constexpr double kSlack = 1 - 0x1p-10;

// Magnitudes whose squares and scales are far from the ends of float32.
constexpr double kLeastFloat = 0x1p-40;
constexpr double kMostFloat = 0x1p40;
// Wider codes than this are too fine for quotients in float32.
constexpr int kMostFloatBits = 8;

// Ends of a block that are kept in order while its elements pass by.
constexpr size_t kMostSelected = 16;

// The elements of ranks `rank` and, where there is one, `rank` + 1, of `count`.
template <typename At>
std::pair<double, double> SelectTwo(size_t rank, size_t count,
                                    std::vector<double>* room, const At& at) {
  const size_t from_top = count - rank;
  if (from_top <= kMostSelected) {
    // Descending.
    double top[kMostSelected];
    std::fill(top, top + from_top, -kInfinity);
    for (size_t i = 0; i < count; ++i) {
      const double x = at(i);
      if (!(x > top[from_top - 1])) continue;
      size_t k = from_top - 1;
      for (; k > 0 && top[k - 1] < x; --k) top[k] = top[k - 1];
      top[k] = x;
    }
    return {top[from_top - 1], top[from_top > 1 ? from_top - 2 : 0]};
  }
  room->resize(count);
  for (size_t i = 0; i < count; ++i) (*room)[i] = at(i);
  const auto nth = room->begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(room->begin(), nth, room->end());
  return {*nth, *std::min_element(nth + 1, room->end())};
}

}  // namespace

bool IsSearchedDirectly(const EncodingSpec& spec, const BlockLayout& layout) {
  return NeedsHistograms(spec) && layout.largest_block() <= kMaxDirectElements;
}

void BlockElements::Assign(ElementType type, const uint8_t* in, int64_t count) {
  const auto size = static_cast<size_t>(count);
  is_double_ = type == ElementType::kFloat64;
  if (is_double_) {
    if (doubles_.size() < size) doubles_.resize(size);
    std::copy_n(in, size * sizeof(double),
                reinterpret_cast<uint8_t*>(doubles_.data()));
    KeepFinite<uint64_t>(count, &doubles_);
    return;
  }
  if (floats_.size() < size) floats_.resize(size);
  if (type == ElementType::kFloat32) {
    std::copy_n(in, size * sizeof(float),
                reinterpret_cast<uint8_t*>(floats_.data()));
  } else {
    ToHistogramFloats(type, in, count, floats_.data());
  }
  KeepFinite<uint32_t>(count, &floats_);
}

void BlockElements::Assign(const HeldTensor& held, int64_t scale_index) {
  bytes_.resize(kMaxDirectElements * sizeof(double));
  const int64_t count = held.CopyBlock(scale_index, bytes_.data());
  Assign(held.type(), bytes_.data(), count);
}

template <typename Bits, typename T>
void BlockElements::KeepFinite(int64_t count, std::vector<T>* elements) {
  // Magnitudes are in the order of their bits, and what is not finite above
  // them.
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max() / 2;
  const Bits infinity = BitsAs<Bits>(std::numeric_limits<T>::infinity());
  const auto largest = [&] {
    Bits most = 0;
    for (int64_t i = 0; i < count_; ++i) {
      most = std::max(most, BitsAs<Bits>((*elements)[i]) & kMagnitude);
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
  using Trial = BlockElements::Trial;

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
    const auto count = static_cast<size_t>(all_.count());
    if (room_.elements.size() < count) room_.elements.resize(count);
    const auto take = [&](const auto* from) {
      if (grid_.is_mirrored) {
        for (size_t i = 0; i < count; ++i) {
          room_.elements[i] = static_cast<T>(std::fabs(from[i]));
        }
      } else {
        for (size_t i = 0; i < count; ++i) {
          room_.elements[i] = static_cast<T>(from[i]);
        }
      }
    };
    if (all_.is_double()) {
      take(all_.doubles());
    } else {
      take(all_.floats());
    }
  }

  absl::StatusOr<double> Error(const Range& range) {
    trials_.clear();
    if (!Add(range, 0, 0)) return status_;
    Judge();
    return trials_.front().error;
  }

  absl::StatusOr<Range> Search(const Range& whole, int steps) {
    if (scaler_.is_symmetric()) {
      SearchOneEnd(whole, steps != 0 ? steps : kDefaultSteps);
    } else {
      SearchTwoEnds(whole, steps != 0 ? steps : kDefaultStepsOfTwoEnds);
    }
    if (stop_.stopped()) return StoppedError();
    if (!has_best_) return status_;
    return best_.range;
  }

 private:
  // Scales fall with the fraction of the whole range that is tried. What is
  // clipped rises as they do: where that alone is more than the least error,
  // smaller fractions need not be looked at.
  void SearchOneEnd(const Range& whole, int count) {
    whole_ = whole;
    const double step = 1.0 / count;
    std::vector<double>& fractions = all_.fractions_;
    fractions.clear();
    if (count <= 2 * kSamples) {
      for (int k = count; k >= 1; --k) fractions.push_back(k * step);
      JudgeFractions(gamma_ != 1);
    } else {
      const auto sample = [&](int64_t i) {
        return static_cast<int>(count - i * count / kSamples);
      };
      for (int64_t i = 0; i < kSamples; ++i) {
        fractions.push_back(sample(i) * step);
      }
      JudgeFractions(/*needs_clipped=*/true);
      fractions.clear();
      for (int64_t i = 0; i < kSamples; ++i) {
        const double scale = room_.scale[i];
        const double clipped = scale * scale * double{room_.clipped[i]};
        if (gamma_ * clipped * kSlack > best_.error) break;
        // Scales that are rounded coarsely repeat themselves.
        const bool is_last = i + 1 == kSamples;
        if (!is_last && room_.scale[i + 1] == room_.scale[i]) continue;
        const int end = is_last ? 0 : sample(i + 1);
        for (int k = sample(i) - 1; k > end; --k) fractions.push_back(k * step);
      }
      JudgeFractions(gamma_ != 1);
    }
    if (!has_best_) return;
    const double first = best_fraction_ - step;
    const double last = std::min(best_fraction_ + step, 1.0);
    fractions.clear();
    for (int k = kFineSteps - 1; k >= 1; --k) {
      fractions.push_back(first + k * ((last - first) / kFineSteps));
    }
    JudgeFractions(gamma_ != 1);
  }

  // Takes the best of all_.fractions_, which are of whole_.
  void JudgeFractions(bool needs_clipped) {
    const std::vector<double>& fractions = all_.fractions_;
    const auto count = static_cast<int64_t>(fractions.size());
    if (count == 0 || stop_.stopped()) return;
    const int64_t padded = Reserve(count);
    if (room_.scale.size() < room_.inverse.size()) {
      room_.scale.resize(room_.inverse.size());
    }
    const double unit = scaler_.Magnitude(whole_) / scaler_.largest();
    if (outer_ == 0 && scaler_.has_plain_scales() && unit < kMostFloat) {
      constexpr double kLeast = std::numeric_limits<float>::min();
      for (int64_t i = 0; i < count; ++i) {
        room_.scale[i] =
            static_cast<float>(std::max(unit * fractions[i], kLeast));
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const absl::StatusOr<BlockScale> scale = scaler_.Scale(
            index_, {whole_.low * fractions[i], whole_.high * fractions[i]},
            outer_);
        if (!scale.ok() && status_.ok()) status_ = scale.status();
        // No scale is 0.
        room_.scale[i] = scale.ok() ? scale->scale : 0;
      }
    }
    std::fill(room_.scale.begin() + count, room_.scale.begin() + padded, T{1});
    for (int64_t i = 0; i < padded; ++i) {
      room_.inverse[i] = T{1} / room_.scale[i];
    }
    std::fill(room_.low.begin(), room_.low.begin() + padded,
              static_cast<T>(grid_.qmin));
    std::fill(room_.high.begin(), room_.high.begin() + padded,
              static_cast<T>(grid_.qmax));
    Sum(padded, needs_clipped);
    int64_t best = -1;
    double least = kInfinity;
    for (int64_t i = 0; i < count; ++i) {
      const double scale = room_.scale[i];
      double error = double{room_.squares[i]};
      if (gamma_ != 1) error += (gamma_ - 1) * double{room_.clipped[i]};
      error *= scale * scale;
      // All of them may be beyond float64: then the first is as good as any.
      if (best >= 0 ? error < least : scale != 0) {
        best = i;
        least = error;
      }
    }
    if (best < 0) return;
    // Of equally good ones the widest.
    if (has_best_ && !(least < best_.error) &&
        !(least == best_.error && fractions[best] > best_fraction_)) {
      return;
    }
    has_best_ = true;
    best_.error = least;
    best_fraction_ = fractions[best];
    best_.range = {whole_.low * best_fraction_, whole_.high * best_fraction_};
  }

  void SearchTwoEnds(const Range& whole, int count) {
    // Where ranges start. An end where the range starts stays there.
    const bool contains_zero = whole.low <= 0 && whole.high >= 0;
    const double from =
        contains_zero ? 0 : std::clamp(Mean(), whole.low, whole.high);
    const bool low_moves = whole.low != from;
    const bool high_moves = whole.high != from;
    const auto range_of = [&](double low, double high) {
      return Range{from + (whole.low - from) * low / count,
                   from + (whole.high - from) * high / count};
    };
    trials_.clear();
    for (int low = count; low >= (low_moves ? 1 : count); --low) {
      for (int high = count; high >= (high_moves ? 1 : count); --high) {
        Add(range_of(low, high), low, high);
      }
      JudgeWhereMany();
    }
    JudgeRest();
    if (!has_best_) return;
    const Trial coarse = best_;
    const auto fine = [&](int step, int k) {
      const double first = step - 1;
      const double last = std::min(step + 1, count);
      return first + k * (last - first) / kFineStepsOfTwoEnds;
    };
    constexpr int kMost = kFineStepsOfTwoEnds;
    for (int low = kMost; low >= (low_moves ? 0 : kMost); --low) {
      for (int high = kMost; high >= (high_moves ? 0 : kMost); --high) {
        const double low_step =
            low_moves ? fine(coarse.low_step, low) : coarse.low_step;
        const double high_step =
            high_moves ? fine(coarse.high_step, high) : coarse.high_step;
        if (low_step <= 0 || high_step <= 0) continue;
        Add(range_of(low_step, high_step), coarse.low_step, coarse.high_step);
      }
      JudgeWhereMany();
    }
    JudgeRest();
  }

  double Mean() const {
    double sum = 0;
    for (int64_t i = 0; i < all_.count(); ++i) sum += all_.at(i);
    return sum / static_cast<double>(all_.count());
  }

  // Whether there is a scale of the range, which is to be tried then. Scales
  // that are rounded coarsely repeat themselves.
  bool Add(const Range& range, int low_step, int high_step) {
    const absl::StatusOr<BlockScale> scale =
        scaler_.Scale(index_, range, outer_);
    if (!scale.ok()) {
      if (status_.ok()) status_ = scale.status();
      return false;
    }
    if (trials_.empty() || !(trials_.back().scale == *scale)) {
      trials_.push_back({range, *scale, low_step, high_step, kInfinity});
    }
    return true;
  }

  void JudgeWhereMany() {
    if (static_cast<int64_t>(trials_.size()) >= kTrialsAtOnce) JudgeRest();
  }

  void JudgeRest() {
    Judge();
    TakeBest();
    trials_.clear();
  }

  // Room for as many trials, in whole vectors, which it gives.
  int64_t Reserve(int64_t count) {
    const int64_t padded =
        (count + kTrialLanes - 1) / kTrialLanes * kTrialLanes;
    const auto size = static_cast<size_t>(padded);
    for (auto* array : {&room_.inverse, &room_.low, &room_.high, &room_.squares,
                        &room_.clipped}) {
      if (array->size() < size) array->resize(size);
    }
    return padded;
  }

  void Sum(int64_t padded, bool needs_clipped) {
    SumBlockErrors<T>(
        grid_, room_.elements.data(), all_.count(),
        {padded, room_.inverse.data(), room_.low.data(), room_.high.data(),
         room_.squares.data(), needs_clipped ? room_.clipped.data() : nullptr});
  }

  // Sets the errors of the trials.
  void Judge() {
    const auto count = static_cast<int64_t>(trials_.size());
    if (count == 0 || stop_.stopped()) return;
    const int64_t padded = Reserve(count);
    for (int64_t i = 0; i < padded; ++i) {
      const BlockScale& scale = trials_[std::min(i, count - 1)].scale;
      room_.inverse[i] = T{1} / static_cast<T>(scale.scale);
      room_.low[i] = static_cast<T>(grid_.qmin - scale.zero_point);
      room_.high[i] = static_cast<T>(grid_.qmax - scale.zero_point);
    }
    Sum(padded, gamma_ != 1);
    for (int64_t i = 0; i < count; ++i) {
      Trial& trial = trials_[i];
      const double scale = trial.scale.scale;
      trial.error = double{room_.squares[i]};
      if (gamma_ != 1) {
        trial.error += (gamma_ - 1) * double{room_.clipped[i]};
      }
      trial.error *= scale * scale;
    }
  }

  void TakeBest() {
    for (const Trial& trial : trials_) {
      // All of them may be beyond float64: then the first is as good as any.
      if (has_best_ && !(trial.error < best_.error)) continue;
      has_best_ = true;
      best_ = trial;
    }
  }

  const RangeScaler& scaler_;
  const BlockGrid& grid_;
  const int64_t index_;
  const float outer_;
  const double gamma_;
  BlockElements& all_;
  BlockElements::Room<T>& room_;
  std::vector<Trial>& trials_;
  const StopToken stop_;
  absl::Status status_;
  bool has_best_ = false;
  Trial best_{};
  Range whole_{};
  double best_fraction_ = 0;
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
    return of_magnitudes
               ? SelectTwo(rank, last + 1, &elements->sorted_,
                           [x](size_t i) { return std::fabs(double{x[i]}); })
               : SelectTwo(rank, last + 1, &elements->sorted_,
                           [x](size_t i) { return double{x[i]}; });
  };
  const auto [a, b] = elements->is_double() ? select(elements->doubles())
                                            : select(elements->floats());
  if (t <= 0 || rank == last) return a;
  // numpy counts from the nearer end.
  return t < 0.5 ? a + (b - a) * t : b - (b - a) * (1 - t);
}

}  // namespace quantd::core
