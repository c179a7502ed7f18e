// Quantizing with scales that are found in the same pass through memory.

#ifndef QUANTD_CORE_CALIBRATE_BLOCK_QUANTIZER_H_
#define QUANTD_CORE_CALIBRATE_BLOCK_QUANTIZER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/calibrate/encoding_spec.h"
#include "core/calibrate/range_scaler.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/quantize.h"
#include "core/types/block_layout.h"
#include "core/types/element_type.h"
#include "core/types/encoding.h"

namespace quantd::core {

// One tensor to codes, a range after the other, in any order: the encoding,
// codes, counts and errors are those of TensorStatistics, Calibrate and
// Quantize one after the other, to the last bit. For specs whose scales depend
// on nothing but the extremes of their own block. Not thread-safe.
class BlockQuantizer {
 public:
  // Whether it takes the spec: min-max, no outer scales, a format that does not
  // depend on the data, and blocks of elements that follow each other.
  // `spec`  valid and resolved for the layout's shape.
  static bool Takes(const EncodingSpec& spec, const BlockLayout& layout);

  // `layout`  of the tensor with spec.block_size; outlives this.
  // Requires: Takes(spec, layout).
  BlockQuantizer(const EncodingSpec& spec, const BlockLayout& layout,
                 ElementType type, NanPolicy nan_policy);

  // Elements that the beginning of a range is a multiple of, and its end unless
  // that is the tensor's: whole blocks and whole bytes of codes.
  int64_t granule() const { return granule_; }

  // Elements [first, first + count), which no other range has.
  // `in`    [count] elements of the type, any alignment.
  // `out`   [FormatInfo::SizeBytes(count)], must not overlap `in`; unspecified
  //         after an error that Finish tells.
  // `pool`  spreads a large range over its threads; may be null.
  void Add(int64_t first, int64_t count, const uint8_t* in, uint8_t* out,
           ThreadPool* pool);

  // Of what was added.
  const QuantizeCounts& counts() const { return counts_; }

  // The encoding, after all elements were added; leaves this without one.
  // Errors: SCALE_OVERFLOW and ZERO_POINT_RANGE as of Calibrate;
  // NON_FINITE_REJECTED, naming the smallest index of the tensor, only with
  // NanPolicy::kReject.
  absl::StatusOr<Encoding> Finish();

 private:
  // What a task finds, and the first that fails.
  struct Outcome {
    QuantizeCounts counts;
    int64_t degenerate_count = 0;
    // Scale index of the first scale that there is none of.
    int64_t failed_scale = -1;
    absl::Status scale_error;
    // Element of the first range with one that is refused.
    int64_t refused_first = -1;
    absl::Status refusal;

    void Merge(Outcome other);
  };

  void AddTask(int64_t first, int64_t count, const uint8_t* in, uint8_t* out,
               Outcome* outcome);
  // In two steps, both while the elements are in the cache.
  void AddTile(int64_t first, int64_t count, const uint8_t* in, uint8_t* out,
               Outcome* outcome);
  void SetScale(int64_t scale_index, const BlockScale& scale);

  const BlockLayout& layout_;
  const ElementType type_;
  const NanPolicy nan_policy_;
  Encoding encoding_;
  const FormatInfo& format_;
  const RangeScaler scaler_;
  // The kernel for many groups at a time takes the spec.
  bool is_grouped_;
  int64_t granule_;
  QuantizeCounts counts_;
  Outcome outcome_;
};

}  // namespace quantd::core

#endif  // QUANTD_CORE_CALIBRATE_BLOCK_QUANTIZER_H_
