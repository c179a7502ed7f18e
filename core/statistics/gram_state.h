// The Gram matrix of a layer's inputs: the sum of x x^T over rows x, in
// integers.

#ifndef QUANTD_CORE_STATISTICS_GRAM_STATE_H_
#define QUANTD_CORE_STATISTICS_GRAM_STATE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/statistics/line_allocator.h"
#include "core/types/element_type.h"

namespace quantd::core {

// The sum over rows x of [rows, n] inputs of x_i * x_j, for each pair of
// features i, j. The same rows give the same state in any order, chunking and
// number of threads, on every SIMD target. Not thread-safe.
//
// Each feature has a step 2^exponent, which never changes. An element x becomes
// the code q = x / step, rounded to nearest even and limited to +-kMaxCode; the
// state is the sum of q_i * q_j. clipped() counts the elements that were
// limited. Elements of float64 are rounded to float32 first. A row with an
// element that is not finite is left out as a whole: a part of it would weigh
// some features more than others. left_out_rows() counts these rows.
//
// Codes up to +-8191 are the fast ones. Panels of 32 features in which 512 rows
// have larger ones are multiplied in two planes, which takes up to 4 times as
// long.
//
// If no element is limited, an entry G = q_ij * step_i * step_j is off by at
// most
//
//   step_i * step_j / 2 * (sqrt(r * q_ii) + sqrt(r * q_jj) + r / 2)
//
// for r rows, since |x / step - q| <= 1/2 and sum |q_i| <= sqrt(r * q_ii).
//
// Many features take much memory: 4 n^2 bytes. Above a limit the state has only
// the blocks along the diagonal, its parts: features of two parts are taken as
// uncorrelated.
class GramState {
 public:
  // The largest code: 256 times the largest of the elements that ExponentsFor
  // saw, at least.
  static constexpr int32_t kMaxCode = (1 << 20) - 1;
  static constexpr int64_t kMaxRows = int64_t{1} << 37;
  // Exponent of the smallest float32.
  static constexpr int kMinExponent = -149;
  static constexpr int kMaxExponent = 116;
  // Unit of part sizes where there are several parts.
  static constexpr int64_t kPartUnit = 128;
  static constexpr int64_t kMaxPart = 8192;

  // Exponents for features of which magnitudes up to `largest` were seen: the
  // step is between 1/4096 and 1/2048 of that. A feature that was always 0 gets
  // the largest exponent of all; if all were, 1 is taken as seen.
  // Requires: all are finite.
  static std::vector<int> ExponentsFor(absl::Span<const float> largest);
  // The largest finite magnitude of each feature of [rows, features].
  static std::vector<float> LargestMagnitudes(ElementType type, int64_t rows,
                                              int64_t features,
                                              const uint8_t* data);

  // Features of each part but the last: all if they are at most `max_part`,
  // otherwise as few parts as that allows, of equal size up to a multiple of
  // kPartUnit.
  // Requires: max_part is at least kPartUnit, and a multiple of it.
  static int64_t PartSize(int64_t features, int64_t max_part = kMaxPart);

  // `exponents`  of each feature.
  // `part_size`  of PartSize.
  // Errors: STATISTICS_INVALID for no feature, another exponent than between
  //         kMinExponent and kMaxExponent, or a part size that PartSize does
  //         not give for any limit.
  static absl::StatusOr<GramState> Create(std::vector<int> exponents,
                                          int64_t part_size);

  // Takes in rows.
  // `data`  [rows, feature_count()] elements of `type`, any alignment.
  // `pool`  spreads the work over its threads; may be null.
  // `stop`  ends it early; the state is of no use then.
  // Requires: rows() and `rows` together are at most kMaxRows.
  void Update(ElementType type, int64_t rows, const uint8_t* data,
              ThreadPool* pool, StopToken stop = StopToken());

  // Takes in what Update put aside, up to 512 rows. What reads the sums, and
  // Merge of both sides, requires it after the last Update.
  // `stop`  as of Update.
  void Finish(ThreadPool* pool, StopToken stop = StopToken());

  // Errors: STATISTICS_MISMATCH for other exponents or parts, or more rows
  // together than kMaxRows or larger sums than AddGramSums takes.
  absl::Status CheckMergeable(const GramState& other) const;
  // Requires: CheckMergeable.
  void Merge(const GramState& other);

  int64_t feature_count() const {
    return static_cast<int64_t>(exponents_.size());
  }
  absl::Span<const int> exponents() const { return exponents_; }
  int64_t part_size() const { return part_size_; }
  int64_t part_count() const {
    return (feature_count() + part_size_ - 1) / part_size_;
  }
  // Features of that part.
  int64_t PartWidth(int64_t part) const;

  // Rows that were taken in; those left out are not among them.
  int64_t rows() const { return rows_; }
  int64_t left_out_rows() const { return left_out_rows_; }
  // Elements of these rows that were limited.
  int64_t clipped() const { return clipped_; }
  // True if rows were dropped, since the squares of a feature had added up to
  // more than 2^62: the state is of no use then. That takes 2^22 rows of the
  // largest codes.
  bool has_overflowed() const { return has_overflowed_; }

  // Sum of q_i * q_j; 0 for features of two parts.
  int64_t code_sum(int64_t i, int64_t j) const;
  // The Gram matrix of a part, [width, width] for features from part *
  // part_size() on; of all features if there is one part. Each entry is
  // rounded once, to nearest.
  std::vector<double> Dense(int64_t part = 0) const;
  // How far an entry is off at most, if no element was limited; see above.
  double ErrorBound(int64_t i, int64_t j) const;

  // Bytes of memory that the state takes at most, between calls.
  int64_t memory_bytes() const;
  static int64_t MemoryBytes(int64_t features, int64_t part_size);

  // How many sums Parts has: the entries of the upper triangles of all parts.
  int64_t sum_count() const { return SumCount(feature_count(), part_size_); }
  static int64_t SumCount(int64_t features, int64_t part_size);

  // The state as it is stored.
  struct Parts {
    std::vector<int> exponents;
    int64_t part_size = 0;
    int64_t rows = 0;
    int64_t left_out_rows = 0;
    int64_t clipped = 0;
    // Upper triangle of each part, row by row: i <= j.
    std::vector<int64_t> code_sums;

    // How many sums there are, also where code_sums is left out.
    int64_t sum_count() const {
      return SumCount(static_cast<int64_t>(exponents.size()), part_size);
    }
  };
  Parts ToParts() const;
  // Errors: STATISTICS_INVALID for parts that no rows have.
  static absl::StatusOr<GramState> FromParts(const Parts& parts);

 private:
  GramState(std::vector<int> exponents, int64_t part_size);

  int64_t panels_per_part() const;
  // The larger codes of a row, which stand in both planes.
  // Returns how many elements were limited.
  int64_t StoreLargeCodes(const float* row, int64_t pending_row);
  // Place in sums_ of two features of one part.
  size_t SumIndex(int64_t i, int64_t j) const;
  void Multiply(ThreadPool* pool, StopToken stop);

  std::vector<int> exponents_;
  int64_t part_size_;
  int64_t rows_ = 0;
  int64_t left_out_rows_ = 0;
  int64_t clipped_ = 0;
  // A panel is 32 features that follow each other within a part, the last of a
  // part with fewer; a tile is the products of two panels.
  int64_t panels_;
  // 1 / step, [panels * 32]; infinite where that is no float32, of which
  // needs_doubles_ tells.
  std::vector<float> inverse_steps_;
  std::vector<double> inverse_steps_double_;
  bool needs_doubles_ = false;
  bool has_overflowed_ = false;
  // Tiles (I, J) with I <= J of each part, [32, 32] each.
  LineVector<int64_t> sums_;
  // Codes of rows that are not in the sums yet, [panels, pairs of rows, 32
  // features, 2 rows]; empty if there are none. Codes beyond +-8191 are there
  // but for a multiple of 2^13, which the same place of pending_high_ has; it
  // is empty if there are none of them.
  LineVector<int16_t> pending_;
  LineVector<int16_t> pending_high_;
  int64_t pending_rows_ = 0;
};

// Adds the sums of one Gram matrix to those of another.
// Errors: STATISTICS_MISMATCH where a sum is larger than 64 bits hold.
absl::Status AddGramSums(absl::Span<const int64_t> more,
                         absl::Span<int64_t> sums);

}  // namespace quantd::core

#endif  // QUANTD_CORE_STATISTICS_GRAM_STATE_H_
