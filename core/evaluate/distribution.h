// How values and errors spread: exact counts, and what is derived from them.

#ifndef QUANTD_CORE_EVALUATE_DISTRIBUTION_H_
#define QUANTD_CORE_EVALUATE_DISTRIBUTION_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace quantd::core {

// How errors and values spread.
struct ErrorDistribution {
  // Kullback-Leibler divergence of x' from x in nats: sum p log(p / q) over 256
  // linear bins from the smallest to the largest finite x, with half a count
  // added to each bin; x' outside goes to the outer bins. All values are cut to
  // 7 mantissa bits first, those beyond float32 to its largest. 0 when there is
  // no finite x.
  double kl_divergence = 0;
  // Finite elements without an error.
  int64_t zero = 0;
  // Bin k counts 2^(first_exponent + k) <= |e| < 2^(first_exponent + k + 1);
  // neither the first nor the last bin is 0. An infinite |e|, which only
  // float64 can have, counts as 2^1024.
  int first_exponent = 0;
  std::vector<int64_t> count;
};

// The counts that an ErrorDistribution is made of. Integers: the same for any
// order and any split of the elements. About 17 KB and 1 KB for each power of
// two that x or x' have. Not thread-safe.
class DistributionCounts {
 public:
  // Counts pairs (x, x').
  // `left_out`  of them are (0, 0) and stand for elements that do not count.
  // Requires: finite.
  void Add(const float* real, const float* restored, int64_t count,
           int64_t left_out);
  void Add(const double* real, const double* restored, int64_t count,
           int64_t left_out);
  void Merge(const DistributionCounts& other);

  // In float64 and in a fixed order.
  ErrorDistribution Distribution() const;

 private:
  static constexpr int kMantissaBits = 7;
  static constexpr int kPageKeys = 1 << kMantissaBits;
  static constexpr int kPages = 1 << 9;
  // |e| of 2^-1074 to 2^1024.
  static constexpr int kFirstExponent = -1074;
  static constexpr int kExponents = 1024 - kFirstExponent + 1;

  // Counts of values by the top 16 bits of their order-preserving pattern, a
  // page for each sign and exponent.
  class KeyCounts {
   public:
    void Add(uint32_t key, int64_t count) {
      std::unique_ptr<Page>& page = pages_[key / kPageKeys];
      if (page == nullptr) page = std::make_unique<Page>();
      (*page)[key % kPageKeys] += count;
    }
    void Merge(const KeyCounts& other);
    // Calls `visit(double value, int64_t count)` in ascending order.
    template <typename Visitor>
    void ForEachValue(Visitor&& visit) const;

   private:
    using Page = std::array<int64_t, kPageKeys>;
    std::array<std::unique_ptr<Page>, kPages> pages_;
  };

  template <typename T>
  void AddPairs(const T* real, const T* restored, int64_t count,
                int64_t left_out);

  KeyCounts real_;
  KeyCounts restored_;
  int64_t zero_errors_ = 0;
  std::array<int64_t, kExponents> errors_ = {};
};

// Counts that the tasks of one range take in turns. Thread-safe.
class DistributionScratch {
 public:
  // One that nobody else has.
  std::unique_ptr<DistributionCounts> Take() ABSL_LOCKS_EXCLUDED(mutex_);
  void Return(std::unique_ptr<DistributionCounts> counts)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Adds up all that were returned.
  void MergeInto(DistributionCounts* counts) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<DistributionCounts>> free_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_EVALUATE_DISTRIBUTION_H_
