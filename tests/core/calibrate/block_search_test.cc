#include "core/calibrate/block_search.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "core/calibrate/block_errors.h"
#include "core/calibrate/calibrate.h"
#include "core/calibrate/range_scaler.h"
#include "core/calibrate/squared_error.h"
#include "core/errors.h"
#include "core/formats/codec.h"
#include "core/formats/number_format.h"
#include "core/parallel/stop_token.h"
#include "gtest/gtest.h"
#include "tests/core/calibrate/calibrate_test_util.h"
#include "tests/core/kernel_test_util.h"

namespace quantd::core::block_search_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A spec with what searches need of it.
struct Search {
  explicit Search(const EncodingSpec& spec_in, int64_t count)
      : layout(*BlockLayout::Create({count}, {})),
        spec(*ResolveSpec(spec_in, {count})),
        encoding(EncodingWithoutScales(spec, layout, false)),
        scaler(spec, encoding),
        search(spec, encoding, scaler) {}

  const BlockLayout layout;
  const EncodingSpec spec;
  const Encoding encoding;
  const RangeScaler scaler;
  const BlockSearch search;
};

BlockElements ElementsOf(ElementType type, const std::vector<uint8_t>& reals) {
  BlockElements elements;
  elements.Assign(type, reals.data(),
                  static_cast<int64_t>(reals.size()) / ElementSizeBytes(type));
  return elements;
}

BlockElements ElementsOf(const std::vector<double>& values) {
  std::vector<float> floats(values.begin(), values.end());
  BlockElements elements;
  elements.Assign(ElementType::kFloat32,
                  reinterpret_cast<const uint8_t*>(floats.data()),
                  static_cast<int64_t>(floats.size()));
  return elements;
}

// By the numbers of the format, in float64.
double NaiveError(const CodeNumbers& numbers, const BlockScale& scale,
                  const BlockElements& elements, double gamma) {
  double sum = 0;
  for (int64_t i = 0; i < elements.count(); ++i) {
    const double quotient = elements.at(i) / scale.scale;
    double number = 0;
    bool is_clipped = false;
    if (numbers.is_integer) {
      const double low = numbers.qmin - scale.zero_point;
      const double high = numbers.qmax - scale.zero_point;
      number = std::clamp(std::nearbyint(quotient), low, high);
      is_clipped = quotient < low - kClippedDistance ||
                   quotient > high + kClippedDistance;
    } else {
      auto above = std::lower_bound(numbers.levels.begin(),
                                    numbers.levels.end(), quotient);
      if (above == numbers.levels.end() ||
          (above != numbers.levels.begin() &&
           quotient - above[-1] <= *above - quotient)) {
        --above;
      }
      number = *above;
      is_clipped = quotient < numbers.clip_low || quotient > numbers.clip_high;
    }
    const double distance = (quotient - number) * scale.scale;
    sum += distance * distance * (is_clipped ? gamma : 1);
  }
  return sum;
}

// The ranges k / steps of the whole one, of each end if it has two; otherwise
// the wider ones too.
std::vector<Range> GridOf(const Search& search, const Range& whole, int steps) {
  std::vector<Range> ranges;
  const auto at = [&](int low, int high) {
    return Range{whole.low * low / steps, whole.high * high / steps};
  };
  const int most = static_cast<int>(steps * NaiveWidest(search.spec));
  for (int high = most; high >= 1; --high) {
    if (search.scaler.is_symmetric()) {
      ranges.push_back(at(high, high));
      continue;
    }
    for (int low = steps; low >= 1; --low) ranges.push_back(at(low, high));
  }
  return ranges;
}

// The same with scales that are rounded up.
void AddRoundedScales(EncodingSpec spec, std::vector<EncodingSpec>* specs) {
  for (const ScaleType type : {ScaleType::kFloat16, ScaleType::kBfloat16}) {
    spec.scale_type = type;
    specs->push_back(spec);
  }
  spec.scale_type = ScaleType::kDefault;
  spec.power_of_two_scale = true;
  specs->push_back(spec);
}

std::vector<EncodingSpec> AllSpecs() {
  std::vector<EncodingSpec> specs;
  for (const FormatInfo& format : AllFormats()) {
    // Nothing searches for its range.
    if (IsWideInteger(format)) continue;
    EncodingSpec spec;
    spec.format = format.format;
    if (format.kind == CodeKind::kCodebook && format.codebook.empty()) {
      spec.codebook = {-1, -0.25f, 0.5f};
    }
    specs.push_back(spec);
    if (format.kind != CodeKind::kInteger ||
        format.scale_type != ScaleType::kDefault) {
      continue;
    }
    const bool is_rounded = format.bits == 4 || format.bits == 8;
    spec.symmetry = Symmetry::kAsymmetric;
    specs.push_back(spec);
    if (is_rounded) AddRoundedScales(spec, &specs);
    if (!format.is_signed) continue;
    for (const Symmetry symmetry :
         {Symmetry::kFullRange, Symmetry::kHalfStep, Symmetry::kAimet}) {
      spec.symmetry = symmetry;
      specs.push_back(spec);
    }
    spec.symmetry = Symmetry::kDefault;
    if (is_rounded) AddRoundedScales(spec, &specs);
  }
  return specs;
}

std::string Name(const EncodingSpec& spec) {
  return absl::StrCat(FindFormat(spec.format)->name, " symmetry ",
                      static_cast<int>(spec.symmetry), " scale type ",
                      static_cast<int>(spec.scale_type),
                      spec.power_of_two_scale ? " power of two" : "");
}

TEST(BlockSearchTest, EverySimdTargetSumsTheSame) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal(0, 1);
  for (const EncodingSpec& spec : AllSpecs()) {
    SCOPED_TRACE(Name(spec));
    const Search search(spec, 16);
    const BlockGrid grid(search.encoding, !search.scaler.is_symmetric());
    const auto compare = [&](auto zero) {
      using T = decltype(zero);
      for (const int64_t count : {0, 1, 3, 16, 63, 65, 300}) {
        for (const int64_t trial_count : {16, 80}) {
          // Begins where no vector does.
          std::vector<T> x(count + 1);
          for (T& value : x) {
            value =
                static_cast<T>(normal(random) * (random() % 9 == 0 ? 9 : 1));
            if (random() % 11 == 0) value = 0;
            if (random() % 50 == 0)
              value = std::numeric_limits<T>::denorm_min();
            if (grid.is_mirrored) value = std::fabs(value);
          }
          std::vector<T> scale, low, high;
          for (int64_t k = 0; k < trial_count; ++k) {
            scale.push_back(static_cast<T>(
                1 / ((grid.qmax + 1.0) * std::fabs(normal(random)) + 1e-3)));
            // Ties, and several that are the best.
            if (k % 7 == 0) scale.back() = 0.5;
            const int zero_point =
                search.scaler.is_symmetric()
                    ? 0
                    : grid.qmin + static_cast<int>(random() %
                                                   (grid.qmax - grid.qmin + 1));
            low.push_back(static_cast<T>(grid.qmin - zero_point));
            high.push_back(static_cast<T>(grid.qmax - zero_point));
          }
          std::vector<T> weights;
          for (int64_t i = 0; i < count; ++i) {
            weights.push_back(static_cast<T>(random() % 5 * 0.375));
          }
          // The errors, the parts of them, and the best of them.
          const auto sum = [&](bool clips, bool has_ends, double gamma,
                               bool is_weighed) {
            std::vector<double> sums(2 * trial_count + 1, -1);
            const BlockTrials<T> trials{
                trial_count,
                scale.data(),
                has_ends ? low.data() : nullptr,
                has_ends ? high.data() : nullptr,
                gamma,
                sums.data(),
                clips ? sums.data() + trial_count : nullptr,
                kInfinity,
                is_weighed ? weights.data() : nullptr};
            sums.back() = static_cast<double>(
                SumBlockErrors<T>(grid, x.data() + 1, count, trials));
            return sums;
          };
          const auto sum_beyond = [&](bool is_weighed) {
            std::vector<T> sums(2 * trial_count + 1, -1);
            SumBeyondEnds<T>(x.data() + 1, count,
                             {trial_count, low.data(), high.data(), sums.data(),
                              sums.data() + trial_count,
                              is_weighed ? weights.data() : nullptr});
            return sums;
          };
          for (const auto& [clips, has_ends, gamma, is_weighed] :
               {std::tuple(false, true, 1.0, false),
                std::tuple(false, false, 3.0, false),
                std::tuple(true, false, 1.0, false),
                std::tuple(true, true, 0.5, true),
                std::tuple(false, false, 1.0, true)}) {
            ASSERT_TRUE(SetSimdTarget("scalar").ok());
            const std::vector<double> want =
                sum(clips, has_ends, gamma, is_weighed);
            const auto best =
                std::min_element(want.begin(), want.begin() + trial_count);
            ASSERT_EQ(want.back(), best - want.begin());
            ForEachSimdTarget([&, clips = clips, has_ends = has_ends,
                               gamma = gamma, is_weighed = is_weighed] {
              ASSERT_EQ(sum(clips, has_ends, gamma, is_weighed), want)
                  << trial_count << " trials, count " << count;
            });
            if (HasFailure()) return;
          }
          for (const bool is_weighed : {false, true}) {
            ASSERT_TRUE(SetSimdTarget("scalar").ok());
            const std::vector<T> want = sum_beyond(is_weighed);
            ForEachSimdTarget([&] {
              ASSERT_EQ(sum_beyond(is_weighed), want)
                  << trial_count << " ends, count " << count;
            });
            if (HasFailure()) return;
          }
        }
      }
    };
    compare(float{0});
    compare(double{0});
    if (HasFailure()) return;
  }
}

TEST(BlockSearchTest, JudgesByTheErrorOfTheCodes) {
  std::mt19937 random(5);
  for (const EncodingSpec& spec : AllSpecs()) {
    SCOPED_TRACE(Name(spec));
    const Search search(spec, 128);
    const CodeNumbers numbers(search.encoding);
    for (const Shape shape : kAllShapes) {
      SCOPED_TRACE(static_cast<int>(shape));
      const auto values = Draw(shape, 128, &random);
      BlockElements elements = ElementsOf(values);
      const auto [low, high] =
          std::minmax_element(values.begin(), values.end());
      const Range whole = search.scaler.Extend(
          {static_cast<float>(*low), static_cast<float>(*high)});
      for (const double fraction : {1.0, 0.7, 0.2}) {
        const Range range = {whole.low * fraction, whole.high * fraction};
        const auto scale = search.scaler.Scale(0, range, 0);
        if (!scale.ok()) continue;
        for (const double gamma : {1.0, 3.0, 0.5}) {
          const auto error = search.search.Error(0, 0, range, gamma, &elements);
          ASSERT_TRUE(error.ok()) << error.status();
          const double want = NaiveError(numbers, *scale, elements, gamma);
          // Quotients of 8 bits in float32 are off by up to 2^-15 each.
          const double off = std::sqrt(128.0) * scale->scale * 0x1p-15;
          EXPECT_NEAR(*error, want,
                      1e-4 * want + off * (2 * std::sqrt(want) + off));
        }
      }
    }
  }
}

// The best of the grid that the method describes, and of 1,000 ranges where
// codes are coarse.
TEST(BlockSearchTest, IsAsGoodAsTryingAllRanges) {
  std::mt19937 random(7);
  for (const EncodingSpec& spec : AllSpecs()) {
    SCOPED_TRACE(Name(spec));
    const Search search(spec, 128);
    const CodeNumbers numbers(search.encoding);
    const bool is_symmetric = search.scaler.is_symmetric();
    for (const Shape shape : kAllShapes) {
      SCOPED_TRACE(static_cast<int>(shape));
      for (const int64_t count : {16, 33, 128}) {
        const auto values = Draw(shape, count, &random);
        BlockElements elements = ElementsOf(values);
        const auto [low, high] =
            std::minmax_element(values.begin(), values.end());
        if (*low == 0 && *high == 0) continue;
        const Range whole = search.scaler.Extend(
            {static_cast<float>(*low), static_cast<float>(*high)});
        // As of a block whose largest element is larger; not so that any is at
        // the end of what is not clipped.
        float outer = 0;
        if (search.scaler.has_outer_scales()) {
          const auto scale =
              search.scaler.OuterScale(0, 1.37 * whole.abs_max());
          if (!scale.ok()) continue;
          outer = *scale;
        }
        for (const double gamma : {1.0, 3.0, 0.5}) {
          for (const int steps : {0, 20}) {
            const auto range = search.search.Search(
                0, outer, whole, gamma, steps, &elements, StopToken());
            if (!range.ok()) continue;
            const double got =
                NaiveError(numbers, *search.scaler.Scale(0, *range, outer),
                           elements, gamma);
            double least = kInfinity;
            const int grid = steps != 0 ? steps : is_symmetric ? 128 : 32;
            for (const Range& other : GridOf(search, whole, grid)) {
              const auto scale = search.scaler.Scale(0, other, outer);
              if (!scale.ok()) continue;
              least =
                  std::min(least, NaiveError(numbers, *scale, elements, gamma));
            }
            const double unit = whole.abs_max() / search.scaler.largest();
            // Quotients of 8 bits in float32 are off by up to 2^-16 each.
            const double off = std::sqrt(count) * unit * 0x1p-16;
            EXPECT_LE(got, 1.0002 * least + off * (std::sqrt(least) + off));
          }
        }
      }
    }
  }
}

// All of the ranges that may be tried, one after the other. `steps` not 0.
absl::StatusOr<Range> SearchAll(const Search& search, float outer,
                                const Range& whole, double gamma, int steps,
                                BlockElements* elements) {
  absl::StatusOr<Range> best = StoppedError();
  double least = kInfinity;
  int best_low = 0, best_high = 0;
  const auto attempt = [&](const Range& range, int low, int high) {
    const auto error = search.search.Error(0, outer, range, gamma, elements);
    // Of equally good ones the widest, if both ends are one.
    const bool is_wider = best.ok() && search.scaler.is_symmetric() &&
                          range.high - range.low > best->high - best->low;
    if (!error.ok() ||
        (best.ok() && !(*error < least) && !(*error == least && is_wider))) {
      return false;
    }
    best = range;
    least = *error;
    best_low = low;
    best_high = high;
    return true;
  };
  if (search.scaler.is_symmetric()) {
    const auto of = [&](double fraction) {
      return Range{whole.low * fraction, whole.high * fraction};
    };
    const double widest = NaiveWidest(search.spec);
    for (int k = static_cast<int>(steps * widest); k >= 1; --k) {
      attempt(of(k * (1.0 / steps)), k, k);
    }
    if (!best.ok()) return best;
    double center = best_low * (1.0 / steps);
    const auto attempt_around = [&](double step) {
      const double first = center - step;
      const double last = std::min(center + step, widest);
      for (int k = 15; k >= 1; --k) {
        const double fraction = first + k * ((last - first) / 16);
        if (attempt(of(fraction), 0, 0)) center = fraction;
      }
    };
    attempt_around(1.0 / steps);
    if (elements->count() > kErrorPiece) attempt_around(0.125 / steps);
    return best;
  }
  double from = 0;
  if (whole.low > 0 || whole.high < 0) {
    for (int64_t i = 0; i < elements->count(); ++i) from += elements->at(i);
    from = std::clamp(from / static_cast<double>(elements->count()), whole.low,
                      whole.high);
  }
  const auto of = [&](double low, double high) {
    return Range{from + (whole.low - from) * low / steps,
                 from + (whole.high - from) * high / steps};
  };
  const int least_low = whole.low == from ? steps : 1;
  const int least_high = whole.high == from ? steps : 1;
  for (int low = steps; low >= least_low; --low) {
    for (int high = steps; high >= least_high; --high) {
      attempt(of(low, high), low, high);
    }
  }
  if (!best.ok()) return best;
  const auto fine = [&](int step, int k) {
    return step - 1 + k * (std::min(step + 1, steps) - (step - 1.0)) / 16;
  };
  const int low_step = best_low, high_step = best_high;
  for (int i = 16; i >= (least_low < steps ? 0 : 16); --i) {
    for (int k = 16; k >= (least_high < steps ? 0 : 16); --k) {
      const double low = least_low < steps ? fine(low_step, i) : low_step;
      const double high = least_high < steps ? fine(high_step, k) : high_step;
      if (low > 0 && high > 0) attempt(of(low, high), 0, 0);
    }
  }
  if (elements->count() <= kErrorPiece) return best;
  const Range center = *best;
  for (int i = 4; i >= -4; --i) {
    for (int k = 4; k >= -4; --k) {
      const auto at = [&](double end, double most, int least_step, int n) {
        if (least_step == steps) return 1.0 * steps;
        return std::min(1.0 * steps,
                        (end - from) / (most - from) * steps + n * 0.025);
      };
      const double low = at(center.low, whole.low, least_low, i);
      const double high = at(center.high, whole.high, least_high, k);
      if (low > 0 && high > 0) attempt(of(low, high), 0, 0);
    }
  }
  return best;
}

TEST(BlockSearchTest, LeavesOutNoRangeThatIsBetter) {
  std::mt19937 random(17);
  for (const EncodingSpec& spec : AllSpecs()) {
    SCOPED_TRACE(Name(spec));
    const Search search(spec, 96);
    if (search.scaler.has_outer_scales()) continue;
    for (const Shape shape : kAllShapes) {
      SCOPED_TRACE(static_cast<int>(shape));
      for (const double shift : {0.0, 1.5, 30.0}) {
        auto values = Draw(shape, 96, &random);
        for (double& x : values) x += shift;
        BlockElements elements = ElementsOf(values);
        const auto [low, high] =
            std::minmax_element(values.begin(), values.end());
        if (*low == 0 && *high == 0) continue;
        const Range whole = search.scaler.Extend(
            {static_cast<float>(*low), static_cast<float>(*high)});
        for (const double gamma : {1.0, 3.0, 0.5}) {
          const int steps = search.scaler.is_symmetric() ? 128 : 32;
          const auto want =
              SearchAll(search, 0, whole, gamma, steps, &elements);
          const auto got = search.search.Search(0, 0, whole, gamma, 0,
                                                &elements, StopToken());
          ASSERT_EQ(got.ok(), want.ok());
          if (!got.ok()) continue;
          // Scales that are rounded coarsely repeat themselves.
          EXPECT_EQ(*search.scaler.Scale(0, *got, 0),
                    *search.scaler.Scale(0, *want, 0))
              << "gamma " << gamma << ": " << got->low << " to " << got->high
              << ", expected " << want->low << " to " << want->high;
        }
      }
    }
  }
}

// Small blocks of many kinds: some where most of a range is clipped, and where
// scales cannot be as small as the range.
std::vector<double> DrawSmall(std::mt19937* random) {
  std::normal_distribution<double> normal(0, 1);
  std::student_t_distribution<double> student(1);
  std::uniform_real_distribution<double> uniform(0, 1);
  const double codes = (*random)() % 2 == 0 ? 15 : 255;
  const double lowest = (*random)() % 2 == 0 ? 0 : -codes * uniform(*random);
  const double spread = 0.5 * uniform(*random);
  const auto draw = [&](int kind) {
    switch (kind) {
      case 0:
        return normal(*random);
      case 1:
        return student(*random);
      case 2:
        return 30 + normal(*random);
      case 3:
        return -2.5;
      case 4:
        return ((*random)() % 2 == 0 ? -1 : 7) + 0.1 * normal(*random);
      case 5:
        // Near the number of the highest code of scale 1; one is beyond it.
        return lowest + codes * (1 - spread * uniform(*random));
      default:
        // Most of them far below the largest.
        return std::pow(10, 3 * normal(*random)) *
               ((*random)() % 4 == 0 ? -1 : 1);
    }
  };
  const int kind = static_cast<int>((*random)() % 7);
  const int exponents[] = {0, 0, 20, -20, -45, -122, -130};
  const double size =
      std::ldexp(1.0, exponents[(*random)() % std::size(exponents)]);
  std::vector<double> x(1 + (*random)() % ((*random)() % 4 == 0 ? 200 : 24));
  for (double& value : x) value = size * draw(kind);
  if (kind == 5) {
    x.front() = size * lowest;
    x.back() = size * (lowest + codes * (1 + spread));
  }
  return x;
}

EncodingSpec DrawSpec(const std::vector<EncodingSpec>& all,
                      std::mt19937* random) {
  EncodingSpec spec = all[(*random)() % all.size()];
  spec.exclude_zero =
      EffectiveSymmetry(spec) == Symmetry::kAsymmetric && (*random)() % 4 == 0;
  if (EffectiveScaleType(spec) == ScaleType::kE8m0) {
    spec.mx_scale_rule = static_cast<MxScaleRule>((*random)() % 5);
  }
  if (!spec.codebook.empty()) {
    // Some without a number on one side of zero.
    std::uniform_real_distribution<float> uniform(
        (*random)() % 2 == 0 ? -1 : 0.1f, (*random)() % 2 == 0 ? 0.3f : 2);
    for (float& entry : spec.codebook) entry = uniform(*random);
    std::sort(spec.codebook.begin(), spec.codebook.end());
    if ((*random)() % 4 == 0) {
      for (float& entry : spec.codebook) entry = -entry;
      std::reverse(spec.codebook.begin(), spec.codebook.end());
    }
  }
  return spec;
}

TEST(BlockSearchTest, FindsTheLeastErrorOfAllRangesOfSmallBlocks) {
  std::mt19937 random(23);
  const std::vector<EncodingSpec> specs = AllSpecs();
  int narrower = 0;
  for (int round = 0; round < Rounds(6000); ++round) {
    const EncodingSpec spec = DrawSpec(specs, &random);
    SCOPED_TRACE(absl::StrCat(Name(spec), " round ", round));
    ASSERT_TRUE(ValidateSpec(spec).ok()) << ValidateSpec(spec);
    const std::vector<double> values = DrawSmall(&random);
    const Search search(spec, static_cast<int64_t>(values.size()));
    BlockElements elements = ElementsOf(values);
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    const Range whole = search.scaler.Extend(
        {static_cast<float>(*low), static_cast<float>(*high)});
    if (whole.low == 0 && whole.high == 0) continue;
    float outer = 0;
    if (search.scaler.has_outer_scales() && random() % 2 == 0) {
      const auto scale = search.scaler.OuterScale(0, 1.37 * whole.abs_max());
      if (scale.ok()) outer = *scale;
    }
    const double gammas[] = {1, 1, 3, 0.5, 0.05, 50};
    const double gamma = gammas[random() % std::size(gammas)];
    const bool is_symmetric = search.scaler.is_symmetric();
    const int most = is_symmetric ? 200 : random() % 2 == 0 ? 6 : 20;
    const int steps =
        random() % 5 == 0 ? 0 : 2 + static_cast<int>(random() % most);
    const auto want = SearchAll(search, outer, whole, gamma,
                                steps != 0     ? steps
                                : is_symmetric ? 128
                                               : 32,
                                &elements);
    const auto error = [&](const Range& range) {
      return *search.search.Error(0, outer, range, gamma, &elements);
    };
    ForEachSimdTarget([&] {
      const auto got = search.search.Search(0, outer, whole, gamma, steps,
                                            &elements, StopToken());
      ASSERT_EQ(got.ok(), want.ok());
      if (!got.ok()) return;
      ASSERT_EQ(error(*got), error(*want))
          << "gamma " << gamma << ": " << got->low << " to " << got->high
          << ", expected " << want->low << " to " << want->high;
    });
    if (HasFatalFailure()) return;
    narrower += want.ok() && want->high - want->low < whole.high - whole.low;
  }
  EXPECT_GT(narrower, Rounds(12000) / 10);
}

// Errors of long blocks are added up piece by piece, and given up where they
// are too large.
TEST(BlockSearchTest, FindsTheLeastErrorOfAllRangesOfLongBlocks) {
  std::mt19937 random(31);
  const std::vector<EncodingSpec> specs = AllSpecs();
  for (int round = 0; round < Rounds(60); ++round) {
    const EncodingSpec spec = DrawSpec(specs, &random);
    SCOPED_TRACE(absl::StrCat(Name(spec), " round ", round));
    const int64_t count = kErrorPiece + 1 + random() % kErrorPiece;
    std::vector<double> values =
        Draw(kAllShapes[random() % std::size(kAllShapes)], count, &random);
    const double shift = random() % 3 == 0 ? 1.5 : 0;
    for (double& x : values) x += shift;
    const Search search(spec, count);
    BlockElements elements = ElementsOf(values);
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    const Range whole = search.scaler.Extend(
        {static_cast<float>(*low), static_cast<float>(*high)});
    if (whole.low == 0 && whole.high == 0) continue;
    const double gammas[] = {1, 3, 0.5};
    const double gamma = gammas[random() % std::size(gammas)];
    const bool is_symmetric = search.scaler.is_symmetric();
    const int steps = 2 + static_cast<int>(random() % (is_symmetric ? 60 : 6));
    ASSERT_TRUE(SetSimdTarget("auto").ok());
    const auto want = SearchAll(search, 0, whole, gamma, steps, &elements);
    absl::optional<Range> first;
    ForEachSimdTarget([&] {
      const auto got = search.search.Search(0, 0, whole, gamma, steps,
                                            &elements, StopToken());
      ASSERT_EQ(got.ok(), want.ok());
      if (!got.ok()) return;
      EXPECT_EQ(*search.search.Error(0, 0, *got, gamma, &elements),
                *search.search.Error(0, 0, *want, gamma, &elements))
          << got->low << " to " << got->high << ", expected " << want->low
          << " to " << want->high;
      if (!first.has_value()) first = *got;
      EXPECT_EQ(got->low, first->low);
      EXPECT_EQ(got->high, first->high);
    });
    if (HasFailure()) return;
  }
}

TEST(BlockSearchTest, GivesErrorsAboveTheLimitUpOnly) {
  std::mt19937 random(37);
  for (const char* format : {"int4", "uint8", "nf4", "float8_e4m3fn"}) {
    SCOPED_TRACE(format);
    const int64_t count = 3 * kErrorPiece + 77;
    const Search search(Spec(format), count);
    const BlockGrid grid(search.encoding, !search.scaler.is_symmetric());
    std::vector<float> x;
    for (const double value : Draw(Shape::kNormal, count, &random)) {
      x.push_back(static_cast<float>(std::fabs(value)));
    }
    const double unit =
        *std::max_element(x.begin(), x.end()) / search.scaler.largest();
    std::vector<float> scale;
    for (int k = 0; k < 48; ++k) {
      scale.push_back(static_cast<float>(unit * std::exp2(4 - k / 4.0)));
    }
    const auto sum = [&](double limit, int64_t* best) {
      std::vector<double> errors(scale.size());
      *best = SumBlockErrors<float>(
          grid, x.data(), count,
          {static_cast<int64_t>(scale.size()), scale.data(), nullptr, nullptr,
           1, errors.data(), nullptr, limit});
      return errors;
    };
    // The errors of pieces by themselves.
    std::vector<double> all(scale.size());
    ASSERT_TRUE(SetSimdTarget("scalar").ok());
    for (int64_t begin = 0; begin < count; begin += kErrorPiece) {
      std::vector<double> piece(scale.size());
      SumBlockErrorsScalar<float>(
          grid, x.data() + begin, std::min(kErrorPiece, count - begin),
          {static_cast<int64_t>(scale.size()), scale.data(), nullptr, nullptr,
           1, piece.data(), nullptr});
      for (size_t k = 0; k < all.size(); ++k) all[k] += piece[k];
    }
    const auto least = std::min_element(all.begin(), all.end());
    const double limit = 2 * *least;
    int given_up = 0;
    ForEachSimdTarget([&] {
      int64_t best = 0;
      std::vector<double> errors = sum(limit, &best);
      EXPECT_EQ(best, least - all.begin());
      for (size_t k = 0; k < all.size(); ++k) {
        if (errors[k] == all[k]) continue;
        ++given_up;
        EXPECT_LT(errors[k], all[k]) << k;
        EXPECT_GT(errors[k], *least) << k;
      }
    });
    EXPECT_GT(given_up, 0);
  }
}

// A range that is narrower than what its codes reach, as its scale is rounded
// up, is the best: the next wider one has twice the scale.
TEST(BlockSearchTest, FindsRangesWhoseCodesReachBeyondThem) {
  std::mt19937 random(29);
  for (const char* format : {"uint8", "int8"}) {
    SCOPED_TRACE(format);
    EncodingSpec spec = Spec(format, Symmetry::kAsymmetric);
    spec.power_of_two_scale = true;
    // A scale of 1 reaches from -85 to 170.
    const Range whole = {-85, 176};
    std::uniform_real_distribution<double> most(167, 170);
    std::vector<double> values(600, whole.low);
    for (int i = 0; i < 500; ++i) values[i] = most(random);
    values[7] = whole.high;
    const Search search(spec, 600);
    BlockElements elements = ElementsOf(values);
    const auto got =
        search.search.Search(0, 0, whole, 1, 0, &elements, StopToken());
    ASSERT_TRUE(got.ok()) << got.status();
    const auto want = SearchAll(search, 0, whole, 1, 32, &elements);
    EXPECT_EQ(*search.search.Error(0, 0, *got, 1, &elements),
              *search.search.Error(0, 0, *want, 1, &elements));
    EXPECT_EQ(*search.scaler.Scale(0, *got, 0),
              *search.scaler.Scale(0, *want, 0));
    EXPECT_EQ(search.scaler.Scale(0, *want, 0)->scale, 1);
    EXPECT_EQ(search.scaler.Scale(0, whole, 0)->scale, 2);
  }
}

// Before anything was searched, too.
TEST(BlockSearchTest, GivesNothingWhenStopped) {
  const std::atomic<bool> stopped = true;
  std::vector<double> values(600);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(static_cast<double>(i));
  }
  for (const EncodingSpec& spec : AllSpecs()) {
    SCOPED_TRACE(Name(spec));
    const Search search(spec, 600);
    for (const int steps : {0, 1, 8, 256}) {
      BlockElements elements = ElementsOf(values);
      EXPECT_TRUE(absl::IsCancelled(
          search.search
              .Search(0, 0, {-1, 1}, 1, steps, &elements, StopToken(&stopped))
              .status()));
    }
  }
}

// Adds the error of the range that is found for a block to `got`, and the least
// of a thousand ranges to `want`.
void AddErrors(const Search& search, const CodeNumbers& numbers,
               BlockElements* elements, double* got, double* want) {
  if (elements->abs_max() == 0) return;
  const Range whole = {-elements->abs_max(), elements->abs_max()};
  const auto range =
      search.search.Search(0, 0, whole, 1, 0, elements, StopToken());
  ASSERT_TRUE(range.ok()) << range.status();
  *got += NaiveError(numbers, *search.scaler.Scale(0, *range, 0), *elements, 1);
  double least = kInfinity;
  for (const Range& other : GridOf(search, whole, 1000)) {
    least = std::min(
        least,
        NaiveError(numbers, *search.scaler.Scale(0, other, 0), *elements, 1));
  }
  *want += least;
}

TEST(BlockSearchTest, LosesNothingBesideAThousandRanges) {
  std::mt19937 random(11);
  for (const char* format : {"int2", "int3", "int4", "nf4", "float4_e2m1"}) {
    SCOPED_TRACE(format);
    const Search search(Spec(format), 128);
    const CodeNumbers numbers(search.encoding);
    for (const Shape shape : kAllShapes) {
      SCOPED_TRACE(static_cast<int>(shape));
      double got = 0, want = 0;
      for (int block = 0; block < 20; ++block) {
        BlockElements elements = ElementsOf(Draw(shape, 128, &random));
        ASSERT_NO_FATAL_FAILURE(
            AddErrors(search, numbers, &elements, &got, &want));
      }
      EXPECT_LE(got, 1.0005 * want);
    }
  }
}

// Blocks of one magnitude, so that none decides alone.
TEST(BlockSearchTest, LosesNothingOnDataThatWeightsHave) {
  std::mt19937 random(17);
  std::normal_distribution<double> normal(0, 1);
  std::uniform_real_distribution<double> uniform(-1, 1);
  struct Data {
    const char* name;
    std::function<double(int64_t i)> draw;
  };
  const Data kinds[] = {
      {"uniform", [&](int64_t) { return uniform(random); }},
      {"nine of ten are zero",
       [&](int64_t) { return random() % 10 == 0 ? normal(random) : 0; }},
      {"a channel of outliers",
       [&](int64_t i) { return normal(random) * (i % 64 == 5 ? 30 : 1); }},
  };
  for (const char* format : {"int2", "int3", "int4", "nf4", "float4_e2m1"}) {
    const Search search(Spec(format), 128);
    const CodeNumbers numbers(search.encoding);
    for (const Data& data : kinds) {
      double got = 0, want = 0;
      for (int block = 0; block < 25; ++block) {
        std::vector<double> values;
        for (int64_t i = 0; i < 128; ++i) values.push_back(data.draw(i));
        BlockElements elements = ElementsOf(values);
        ASSERT_NO_FATAL_FAILURE(
            AddErrors(search, numbers, &elements, &got, &want));
      }
      EXPECT_LE(got, 1.0005 * want)
          << format << ", " << data.name << ": " << got / want;
    }
  }
}

// Scales with codes: the best of all of them is found.
TEST(BlockSearchTest, TriesTheExponentsNextToThatOfTheRule) {
  std::mt19937 random(37);
  std::normal_distribution<double> normal(0, 1);
  for (const char* format :
       {"mxfp4_e2m1", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"}) {
    int moved = 0;
    for (const MxScaleRule rule : {MxScaleRule::kFloor, MxScaleRule::kCeil,
                                   MxScaleRule::kEven, MxScaleRule::kRceil}) {
      SCOPED_TRACE(absl::StrCat(format, " rule ", static_cast<int>(rule)));
      EncodingSpec spec = Spec(format);
      spec.mx_scale_rule = rule;
      const Search search(spec, 32);
      const CodeNumbers numbers(search.encoding);
      for (int block = 0; block < 200; ++block) {
        std::vector<double> values;
        for (int i = 0; i < 32; ++i) values.push_back(normal(random));
        BlockElements elements = ElementsOf(values);
        const Range whole = {-elements.abs_max(), elements.abs_max()};
        const auto range =
            search.search.Search(0, 0, whole, 1, 0, &elements, StopToken());
        ASSERT_TRUE(range.ok()) << range.status();
        const BlockScale own = *search.scaler.Scale(0, whole, 0);
        const BlockScale got = *search.scaler.Scale(0, *range, 0);
        double least = kInfinity;
        for (int exponent = -3; exponent <= 1; ++exponent) {
          BlockScale scale = own;
          scale.scale = std::ldexp(own.scale, exponent);
          least = std::min(least, NaiveError(numbers, scale, elements, 1));
        }
        EXPECT_LE(NaiveError(numbers, got, elements, 1), least * (1 + 1e-6));
        moved += got.code != own.code;
      }
    }
    EXPECT_GT(moved, 40) << format;
  }
}

TEST(BlockSearchTest, TriesAllE4m3ScalesUpToTwiceTheWholeOne) {
  std::mt19937 random(41);
  std::normal_distribution<double> normal(0, 1);
  const Search search(Spec("nvfp4"), 16);
  const CodeNumbers numbers(search.encoding);
  int larger = 0;
  for (int block = 0; block < 2000; ++block) {
    SCOPED_TRACE(block);
    std::vector<double> values;
    for (int i = 0; i < 16; ++i) values.push_back(normal(random));
    BlockElements elements = ElementsOf(values);
    const Range whole = {-elements.abs_max(), elements.abs_max()};
    // In the first of four the block has the largest element of all: then it
    // has no larger scale than its own.
    const double share = std::ldexp(1.0, -static_cast<int>(block % 4));
    const float outer =
        *search.scaler.OuterScale(0, elements.abs_max() / share * 1.01);
    const auto range =
        search.search.Search(0, outer, whole, 1, 0, &elements, StopToken());
    ASSERT_TRUE(range.ok()) << range.status();
    const BlockScale got = *search.scaler.Scale(0, *range, outer);
    ASSERT_LE(got.code, 0x7e);
    const float own = search.scaler.Scale(0, whole, outer)->scale;
    double least = kInfinity;
    for (uint32_t code = 8; code <= 0x7e; ++code) {
      BlockScale scale = got;
      scale.scale = static_cast<float>(
          DecodeFloat(FindFormatByName("float8_e4m3fn")->float_layout, code) *
          double{outer});
      if (scale.scale > 2 * own) break;
      least = std::min(least, NaiveError(numbers, scale, elements, 1));
    }
    EXPECT_LE(NaiveError(numbers, got, elements, 1), least * (1 + 1e-6));
    larger += got.scale > own;
  }
  EXPECT_GT(larger, 200);
}

TEST(BlockSearchTest, TakesBlocksUpToItsBound) {
  EncodingSpec spec = Spec("int4");
  spec.method = CalibrationMethod::kMse;
  const auto takes = [&](std::vector<int64_t> shape,
                         std::vector<int64_t> block_size) {
    return IsSearchedDirectly(spec, *BlockLayout::Create(shape, block_size));
  };
  const int64_t most = MostDirectElements(spec);
  EXPECT_TRUE(takes({most}, {}));
  EXPECT_FALSE(takes({most + 1}, {}));
  EXPECT_TRUE(takes({1 << 20}, {128}));
  EXPECT_TRUE(takes({most, 9}, {0, 1}));
  EXPECT_FALSE(takes({most, 9}, {0, 2}));
  spec.method = CalibrationMethod::kMinMax;
  EXPECT_FALSE(takes({1 << 20}, {128}));
}

TEST(BlockSearchTest, BoundsBlocksByWhatHistogramsTake) {
  const auto most = [](const char* format, CalibrationMethod method,
                       Symmetry symmetry = Symmetry::kDefault) {
    EncodingSpec spec = Spec(format, symmetry);
    spec.method = method;
    return MostDirectElements(spec);
  };
  constexpr auto kMse = CalibrationMethod::kMse;
  constexpr auto kEntropy = CalibrationMethod::kEntropy;
  constexpr auto kAsymmetric = Symmetry::kAsymmetric;
  EXPECT_EQ(most("int8", kMse), kMaxDirectElements);
  EXPECT_EQ(most("int8", kMse, kAsymmetric), kMaxDirectElements);
  EXPECT_LT(most("int4", kMse), most("int8", kMse));
  EXPECT_LT(most("int4", kMse, kAsymmetric), most("int4", kMse));
  EXPECT_LT(most("int2", kMse), most("int4", kMse));
  EXPECT_EQ(most("nf4", kMse), kFewDirectElements);
  EXPECT_EQ(most("nf4", kEntropy), kMaxDirectElements);
  EXPECT_EQ(most("int8", kEntropy, kAsymmetric), kMaxDirectElements);
  EXPECT_EQ(most("int16", kEntropy), kFewDirectElements);
  EXPECT_EQ(most("int2", CalibrationMethod::kPercentile), kMaxDirectElements);
  // The least of all methods.
  EncodingSpec spec = Spec("int16");
  spec.method = CalibrationMethod::kBestOf;
  spec.methods = {CalibrationMethod::kMse, CalibrationMethod::kPercentile};
  EXPECT_EQ(MostDirectElements(spec), kMaxDirectElements);
  spec.methods.push_back(CalibrationMethod::kEntropy);
  EXPECT_EQ(MostDirectElements(spec), kFewDirectElements);
}

TEST(BlockSearchTest, QuantilesAreThoseOfSortedElements) {
  std::mt19937 random(13);
  struct Case {
    int64_t count;
    Shape shape;
    // Many are equal.
    bool is_coarse = false;
  };
  const Case cases[] = {
      {1, Shape::kStudent2},    {2, Shape::kStudent2},
      {3, Shape::kStudent2},    {17, Shape::kStudent2},
      {128, Shape::kStudent2},  {1025, Shape::kNormal},
      {9001, Shape::kStudent2}, {9001, Shape::kStudent2, true},
      {40000, Shape::kNormal},  {2048, Shape::kNormal, true}};
  for (const auto& [count, shape, is_coarse] : cases) {
    auto values = Draw(shape, count, &random);
    if (is_coarse) {
      for (double& x : values) x = std::trunc(64 * x) / 64;
    }
    // Those that a search looks at first tell nothing of the others.
    for (int64_t i = 0; count == 2048 && i < count; i += 4) values[i] = 0;
    BlockElements elements = ElementsOf(values);
    for (const bool of_magnitudes : {false, true}) {
      std::vector<double> sorted;
      for (int64_t i = 0; i < count; ++i) {
        const double x = elements.at(i);
        sorted.push_back(of_magnitudes ? std::fabs(x) : x);
      }
      std::sort(sorted.begin(), sorted.end());
      std::vector<double> fractions = {0.0,  0.001, 0.1,   0.3, 0.5,
                                       0.88, 0.99,  0.999, 1.0};
      // Between the last of equal elements and the next.
      for (int64_t i = 0; i + 1 < count && is_coarse; ++i) {
        if (sorted[i] == sorted[i + 1]) continue;
        fractions.push_back((static_cast<double>(i) + 0.5) /
                            static_cast<double>(count - 1));
      }
      for (const double fraction : fractions) {
        const double position = fraction * static_cast<double>(count - 1);
        const auto rank = static_cast<size_t>(position);
        const double next = sorted[std::min<size_t>(rank + 1, count - 1)];
        const double want =
            sorted[rank] +
            (next - sorted[rank]) * (position - static_cast<double>(rank));
        EXPECT_NEAR(BlockSearch::Quantile(fraction, of_magnitudes, &elements),
                    want, 1e-12 * std::fabs(want));
      }
    }
  }
}

TEST(BlockSearchTest, LeavesOutWhatIsNotFinite) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const ElementType type : kAllElementTypes) {
    SCOPED_TRACE(ElementTypeName(type));
    std::vector<uint8_t> reals(7 * ElementSizeBytes(type));
    const double values[] = {1, nan, -3, infinity, -infinity, 0, 2};
    for (int64_t i = 0; i < 7; ++i) StoreReal(type, values[i], reals.data(), i);
    const BlockElements elements = ElementsOf(type, reals);
    ASSERT_EQ(elements.count(), 4);
    EXPECT_EQ(elements.abs_max(), 3);
    EXPECT_EQ(elements.at(1), -3);
    EXPECT_EQ(elements.at(3), 2);
    EXPECT_EQ(elements.is_double(), type == ElementType::kFloat64);
  }
}

// Far from one, and where only some ranges have a scale.
TEST(BlockSearchTest, TakesElementsOfAnyMagnitude) {
  const std::vector<double> base = {1, -0.5, 0.3, 0.7, -0.9, 0.2, 0.1, -0.6};
  const Search search(Spec("int4"), 8);
  BlockElements elements = ElementsOf(base);
  const Range whole = {-1, 1};
  const auto want =
      search.search.Search(0, 0, whole, 1, 0, &elements, StopToken());
  ASSERT_TRUE(want.ok());
  for (const int exponent : {-100, -60, 60, 120}) {
    const double factor = std::ldexp(1.0, exponent);
    std::vector<double> values;
    for (const double x : base) values.push_back(x * factor);
    elements = ElementsOf(values);
    const auto got = search.search.Search(0, 0, {-factor, factor}, 1, 0,
                                          &elements, StopToken());
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_NEAR(got->high / factor, want->high, 1e-6) << exponent;
  }
  EncodingSpec half = Spec("int4");
  half.scale_type = ScaleType::kFloat16;
  const Search small(half, 8);
  std::vector<double> values;
  for (const double x : base) values.push_back(x * 500000);
  elements = ElementsOf(values);
  const auto some = small.search.Search(0, 0, {-500000, 500000}, 1, 0,
                                        &elements, StopToken());
  ASSERT_TRUE(some.ok()) << some.status();
  EXPECT_LT(some->high, 65520.0 * 7);
  for (double& x : values) x *= 1e6;
  elements = ElementsOf(values);
  const auto none =
      small.search.Search(0, 0, {-5e11, 5e11}, 1, 0, &elements, StopToken());
  EXPECT_EQ(ErrorReason(none.status()), "SCALE_OVERFLOW");
}

}  // namespace
}  // namespace quantd::core::block_search_test
