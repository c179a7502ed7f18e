// Quantizing with scales that are found in the same pass through memory.

#ifndef QUANTD_CORE_CALIBRATE_BLOCK_QUANTIZER_H_
#define QUANTD_CORE_CALIBRATE_BLOCK_QUANTIZER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/calibrate/block_search.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/importance.h"
#include "core/calibrate/range_finder.h"
#include "core/calibrate/range_scaler.h"
#include "core/parallel/stop_token.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/quantize.h"
#include "core/statistics/statistics_kernel.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

// Turns one tensor into codes, one range of elements at a time. Finds the same
// scales, codes, counts and errors, bit for bit, as TensorStatistics, Calibrate
// and Quantize do one after the other. Each scale must depend on its own block
// alone, and on outer scales that are known before. Holds the scales of one
// range only. Not thread-safe.
class BlockQuantizer {
 public:
  // True if this class can quantize under the spec:
  // - The method is any but the moving average. If it needs more than extremes,
  //   blocks are searched directly. Long blocks are searched within
  //   milliseconds: each, and all of a granule.
  // - The format does not depend on the data.
  // - The maxima of outer scales are known, if the format has outer scales.
  // `spec`  valid and resolved for the layout's shape.
  static bool Takes(const EncodingSpec& spec, const BlockLayout& layout,
                    bool has_outer_maximum);

  // `spec` and `layout` outlive this; the layout is that of the tensor with
  // spec.block_size.
  // `outer_maximum`  see Calibrate; empty without outer scales.
  // `importance`     see Calibrate; may be null, otherwise outlives this.
  // Errors: those of OuterScales and CheckTakesImportance.
  // Requires: Takes.
  static absl::StatusOr<std::unique_ptr<BlockQuantizer>> Create(
      const EncodingSpec& spec, const BlockLayout& layout, ElementType type,
      NanPolicy nan_policy, std::vector<float> outer_maximum,
      const Importance* importance = nullptr);

  // Elements that the beginning of a range is a multiple of, and its end unless
  // that is the tensor's: whole blocks and whole bytes of codes.
  int64_t granule() const { return granule_; }

  // Elements [first, first + count), which no other range has.
  // `in`    [count] elements of the type, any alignment.
  // `out`   [FormatInfo::SizeBytes(count)], must not overlap `in`; unspecified
  //         after an error. Null: scales are found, and no codes made.
  // `pool`  spreads a large range over its threads; may be null.
  // Errors: CANCELLED. Of the smallest scale index that has one, SCALE_OVERFLOW
  // and ZERO_POINT_RANGE as of Calibrate, OUTER_MAXIMUM; otherwise
  // NON_FINITE_REJECTED, naming the smallest index of the tensor, only with
  // NanPolicy::kReject and `out`. After an error the scales and counts below
  // are not complete, and nothing more may be added.
  absl::Status Add(int64_t first, int64_t count, const uint8_t* in,
                   uint8_t* out, ThreadPool* pool,
                   StopToken stop = StopToken());

  // The encoding with all its outer scales, and the scales of the latest range
  // only.
  const Encoding& encoding() const { return encoding_; }
  // Index of the first of these scales.
  int64_t first_scale() const { return layout_.first_scale(); }
  // Each scale has a zero point.
  bool has_zero_points() const { return !scaler_.is_symmetric(); }

  // Counts of all ranges that were added.
  const QuantizeCounts& counts() const { return outcome_.counts; }
  int64_t degenerate_count() const { return outcome_.degenerate_count; }

 private:
  // Results of a task, and its first failures.
  struct Outcome {
    QuantizeCounts counts;
    int64_t degenerate_count = 0;
    // Index of the first scale that could not be found.
    int64_t failed_scale = -1;
    absl::Status scale_error;
    // First element of the first range with a refused element.
    int64_t refused_first = -1;
    absl::Status refusal;

    void Merge(Outcome other);
  };

  BlockQuantizer(const EncodingSpec& spec, const BlockLayout& layout,
                 BlockLayout outer_layout, ElementType type,
                 NanPolicy nan_policy, std::vector<float> outer_maximum,
                 const Importance* importance);

  // Facts about a block before its scale is found.
  struct Block {
    Extremes extremes = kNoExtremes;
    bool has_non_finite = false;
  };

  // Adds blocks whose elements follow each other.
  void AddTask(int64_t first, int64_t count, const uint8_t* in, uint8_t* out,
               Outcome* outcome);
  // Works in two steps, both while the elements are in the cache.
  void AddTile(int64_t first, int64_t count, const uint8_t* in, uint8_t* out,
               Outcome* outcome);
  // Adds blocks that have elements of several rows.
  void AddBands(int64_t first, int64_t count, const uint8_t* in, uint8_t* out,
                ThreadPool* pool, Outcome* outcome);
  // Finds and sets the index-th scale of the range.
  // `elements`  of the block, where the method looks at them.
  void FindScale(int64_t index, const Block& block, BlockElements* elements,
                 Outcome* outcome);
  // Sets the scales of blocks that follow each other, where the magnitudes of
  // their elements give E4M3 scales.
  void FindE4m3Scales(int64_t index, absl::Span<const Block> blocks,
                      Outcome* outcome);
  // Sets the scales of blocks whose least and greatest element give scales
  // without an outer one. Small blocks have many scales: this is a loop without
  // searches.
  void FindMinMaxScales(int64_t index, absl::Span<const Block> blocks,
                        Outcome* outcome);
  absl::StatusOr<BlockScale> ScaleOf(int64_t index, const Block& block,
                                     BlockElements* elements,
                                     Outcome* outcome) const;
  void SetScale(int64_t index, const BlockScale& scale);
  // Sets the scale, or records that there is none.
  void SetScaleOr(int64_t index, const absl::StatusOr<BlockScale>& scale,
                  Outcome* outcome);
  // Adds the statistics of a part to its blocks; the first block has the scale
  // index `first` of the range.
  void Collect(const PartialStatistics& partial, int64_t first,
               absl::Span<Block> blocks) const;

  const BlockLayout& whole_layout_;
  // Layout of the scales as elements; only with outer scales.
  const BlockLayout outer_layout_;
  const std::vector<float> outer_maximum_;
  const Importance* const importance_;
  const ElementType type_;
  const NanPolicy nan_policy_;
  // These three belong to the latest range.
  BlockLayout layout_;
  Encoding encoding_;
  StopToken stop_;
  const FormatInfo& format_;
  const RangeScaler scaler_;
  const RangeFinder finder_;
  // The method takes the whole range of each block.
  const bool is_min_max_;
  // The method looks at the elements of each block.
  const bool is_searched_;
  // Scales are E4M3 times an outer scale, and there is nothing to search.
  const bool finds_e4m3_;
  // No block has elements of two rows.
  const bool has_row_blocks_;
  // The kernel for many groups at a time takes the spec.
  bool is_grouped_;
  int64_t granule_;
  Outcome outcome_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_BLOCK_QUANTIZER_H_
