// Ranges of blocks, from the elements themselves.
//
// The search measures the cost of quantizing the elements for each range that
// it tries. Histograms are for blocks of more elements, and for statistics.

#ifndef QUANTD_CORE_CALIBRATE_BLOCK_SEARCH_H_
#define QUANTD_CORE_CALIBRATE_BLOCK_SEARCH_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/calibrate/block_entropy.h"
#include "core/calibrate/block_errors.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/importance.h"
#include "core/calibrate/range_scaler.h"
#include "core/parallel/stop_token.h"
#include "core/statistics/held_tensor.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

// The most elements of a block that is searched directly under any spec; and
// the most that are under every spec.
constexpr int64_t kMaxDirectElements = int64_t{1} << 16;
constexpr int64_t kFewDirectElements = int64_t{1} << 12;

// The most elements of a block that is searched directly under the spec: so
// many that its histogram would not be faster.
int64_t MostDirectElements(const EncodingSpec& spec);

// True if the method looks at more than extremes and no block is too large to
// be searched directly.
// Requires: a valid spec, resolved for the layout's shape.
bool IsSearchedDirectly(const EncodingSpec& spec, const BlockLayout& layout);

// The finite elements of one block, and room to work in: used again from block
// to block. Not thread-safe.
class BlockElements {
 public:
  // Elements in place of those that were there. NaN and infinities are left
  // out.
  // `in`       [count] elements of the type, any alignment.
  // `weights`  [count] of Importance; null: all count the same. So they do
  //            where all weights of finite elements are 0.
  void Assign(ElementType type, const uint8_t* in, int64_t count,
              const double* weights = nullptr);
  // Assigns the elements of one scale index, of a layout without larger blocks
  // than kMaxDirectElements.
  // `layout`      that of `held`.
  // `importance`  may be null.
  void Assign(const HeldTensor& held, const BlockLayout& layout,
              int64_t scale_index, const Importance* importance);

  // The most memory that a search of blocks of so many elements holds. A few
  // hundred KiB may come on top.
  static int64_t MemoryBytes(const EncodingSpec& spec, int64_t largest_block,
                             bool has_importance = false);

  int64_t count() const { return count_; }
  // Float64 elements are kept as such, all others as float32.
  bool is_double() const { return is_double_; }
  // [count], in order; only the array of the kept type is valid.
  const float* floats() const { return floats_.data(); }
  const double* doubles() const { return doubles_.data(); }
  double at(int64_t i) const { return is_double_ ? doubles_[i] : floats_[i]; }
  // The largest magnitude; 0 without elements.
  double abs_max() const { return abs_max_; }
  EntropyRoom& entropy_room() { return entropy_room_; }

 private:
  friend class BlockSearch;

  // Arrays of a search, in either type.
  template <typename T>
  struct Room {
    std::vector<T> elements;
    std::vector<T> weights;
    // Scales and ends of trials, and their results.
    std::vector<T> scale;
    std::vector<T> low;
    std::vector<T> high;
    std::vector<double> errors;
    std::vector<double> clipped;
    // Errors below low ends and above high ends.
    std::vector<T> below;
    std::vector<T> above;
  };
  // The fractions of a range that are tried, descending.
  struct Way {
    int steps = 0;
    // Ranges that are wider than the whole one.
    double widest = 0;
    int coarse_steps = 0;
    std::vector<double> beyond;
    // Fractions that are tried before all others; before[i] of the others lie
    // above samples[i].
    std::vector<double> samples;
    std::vector<double> between;
    std::vector<int64_t> before;
    std::vector<double> tried;
    // Fractions with different scales.
    std::vector<double> different;
  };
  // Ranges of two ends that are tried.
  struct Trials {
    int64_t count = 0;
    std::vector<double> low;
    std::vector<double> high;
    std::vector<double> order;
  };

  template <typename T>
  Room<T>& room();
  template <typename Bits, typename T>
  void KeepFinite(int64_t count, std::vector<T>* elements);
  // Before that.
  template <typename T>
  void KeepWeights(int64_t count, const T* elements, const double* weights);

  int64_t count_ = 0;
  bool is_double_ = false;
  double abs_max_ = 0;
  bool has_weights_ = false;
  // The weights, and the exponent that takes the largest of them to 1 or just
  // above: float32 holds what counts then.
  std::vector<double> weights_;
  int weight_exponent_ = 0;
  std::vector<double> copied_weights_;
  std::vector<uint8_t> bytes_;
  std::vector<float> floats_;
  std::vector<double> doubles_;
  Room<float> float_room_;
  Room<double> double_room_;
  Way way_;
  Trials trials_;
  EntropyRoom entropy_room_;
  std::vector<double> sorted_;
};

// Searches blocks under one spec. Immutable, thread-safe.
class BlockSearch {
 public:
  // `encoding`  has the format, qmin, qmax and codebook; read here only.
  // `scaler`    outlives this.
  // Requires: a valid spec.
  BlockSearch(const EncodingSpec& spec, const Encoding& encoding,
              const RangeScaler& scaler);

  // The cost of a range: the squared error of the elements' codes under the
  // scale as it is stored, where clipped elements count `gamma` times. The unit
  // of weighed errors depends on the weights of the block.
  // `outer`  as for RangeScaler::Scale.
  // Errors: those of RangeScaler::Scale.
  absl::StatusOr<double> Error(int64_t index, float outer, const Range& range,
                               double gamma, BlockElements* elements) const;

  // The best of the ranges that range_search.h describes, and of some between
  // the two neighbours of the best. Of ranges that have the same scale not all
  // are tried.
  // Errors: those of SearchRange.
  absl::StatusOr<Range> Search(int64_t index, float outer, const Range& whole,
                               double gamma, int steps, BlockElements* elements,
                               StopToken stop) const;

  // numpy's default quantile, of the elements or of their magnitudes.
  // Requires: 0 <= fraction <= 1; elements.
  static double Quantile(double fraction, bool of_magnitudes,
                         BlockElements* elements);

 private:
  // One search for one block.
  template <typename T>
  class Run;

  bool NeedsDouble(const BlockElements& elements) const;

  const RangeScaler& scaler_;
  const BlockGrid grid_;
  const bool is_wide_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_BLOCK_SEARCH_H_
