// Checks that an answer is one to what was asked.

#ifndef QUANTD_CLIENT_CPP_ANSWER_CHECK_H_
#define QUANTD_CLIENT_CPP_ANSWER_CHECK_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::internal {

// The request that an answer has to fit. Plain value.
struct Question {
  Question() = default;
  Question(const Tensor& tensor, const EncodingSource& source);

  v1::TensorDescription tensor;
  // Format of the encoding or of the spec; unspecified under a reference, which
  // may have any.
  v1::NumberFormat format = v1::NUMBER_FORMAT_UNSPECIFIED;
  // The unsigned format of that width will do as well.
  bool may_be_unsigned = false;
  // Block size of the encoding, or the one that the spec comes to for the
  // tensor; none under a reference, which may have any.
  std::optional<std::vector<int64_t>> block_size;
};

// Checks that the header has
// - the tensor's name and shape, and the size in bytes that these give,
// - the bytes that belong to `range` of what went up,
// - a sound encoding or, without `wants_encoding`, perhaps none.
// Requires: the shape has an ElementCount, and `range` is within the tensor.
// Errors: RESPONSE_MALFORMED.
absl::Status CheckHeader(const Question& question, const ByteRange& range,
                         bool wants_encoding,
                         const v1::QuantizeResponseHeader& header);
absl::Status CheckHeader(const Question& question, const ByteRange& range,
                         bool wants_encoding,
                         const v1::DequantizeResponseHeader& header);

// Errors: RESPONSE_MALFORMED.
absl::Status CheckName(const TensorName& expected, const TensorName& got);
// CheckName for what is stored: an expected name without a revision, which is
// of "main", fits any revision.
absl::Status CheckStoredName(const TensorName& expected, const TensorName& got);

// The encoding is of the format and the blocks that were asked for, and has as
// many scales as the tensor has blocks.
// Errors: RESPONSE_MALFORMED.
absl::Status CheckEncoding(const Question& question, const Encoding& encoding);

}  // namespace quantd::internal

#endif  // QUANTD_CLIENT_CPP_ANSWER_CHECK_H_
