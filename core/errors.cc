#include "core/errors.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"

namespace quantd::core {
namespace {

constexpr absl::string_view kFieldPayload = "quantd.dev/field";
constexpr absl::string_view kRetryPayload = "quantd.dev/retry-after-ms";
constexpr absl::string_view kDetailPayload = "quantd.dev/detail";

// Row of a reason in kErrors; does not compile without such a row.
constexpr size_t Row(absl::string_view reason) {
  size_t row = 0;
  while (kErrors[row].reason != reason) ++row;
  return row;
}

template <size_t kRow>
absl::Status Error(absl::string_view text) {
  return absl::Status(kErrors[kRow].code,
                      absl::StrCat(kErrors[kRow].reason, ": ", text));
}

// Like Error, with how long to wait.
template <size_t kRow>
absl::Status RetryableError(absl::string_view text,
                            absl::Duration retry_after) {
  static_assert(kErrors[kRow].retry_helps, "not by the table");
  absl::Status status = Error<kRow>(text);
  status.SetPayload(
      kRetryPayload,
      absl::Cord(absl::StrCat(absl::ToInt64Milliseconds(retry_after))));
  return status;
}

absl::Status WithDetail(absl::Status status, absl::string_view detail) {
  if (!detail.empty()) status.SetPayload(kDetailPayload, absl::Cord(detail));
  return status;
}

}  // namespace

const ErrorInfo* FindError(absl::string_view reason) {
  for (const ErrorInfo& row : kErrors) {
    if (row.reason == reason) return &row;
  }
  return nullptr;
}

absl::string_view ErrorReason(const absl::Status& status) {
  const absl::string_view message = status.message();
  const size_t colon = message.find(": ");
  if (colon == absl::string_view::npos || colon == 0) return "";
  const absl::string_view reason = message.substr(0, colon);
  for (const char c : reason) {
    if (!absl::ascii_isupper(c) && c != '_') return "";
  }
  return reason;
}

absl::string_view ErrorText(const absl::Status& status) {
  const absl::string_view reason = ErrorReason(status);
  return reason.empty() ? status.message()
                        : status.message().substr(reason.size() + 2);
}

absl::Status WithField(absl::Status status, absl::string_view field) {
  if (status.ok()) return status;
  const std::string inner = ErrorField(status);
  status.SetPayload(
      kFieldPayload,
      absl::Cord(inner.empty() ? std::string(field)
                               : absl::StrCat(field, ".", inner)));
  return status;
}

std::string ErrorField(const absl::Status& status) {
  const absl::optional<absl::Cord> field = status.GetPayload(kFieldPayload);
  return field.has_value() ? std::string(*field) : "";
}

absl::Duration ErrorRetryAfter(const absl::Status& status) {
  const absl::optional<absl::Cord> retry = status.GetPayload(kRetryPayload);
  int64_t ms = 0;
  if (!retry.has_value() || !absl::SimpleAtoi(std::string(*retry), &ms)) {
    return absl::ZeroDuration();
  }
  return absl::Milliseconds(ms);
}

std::string ErrorDetail(const absl::Status& status) {
  const absl::optional<absl::Cord> detail = status.GetPayload(kDetailPayload);
  return detail.has_value() ? std::string(*detail) : "";
}

absl::Status ElementTypeUnknownError(int value) {
  return Error<Row("ELEMENT_TYPE_UNKNOWN")>(
      absl::StrCat("element type ", value,
                   "; expected FLOAT32, FLOAT16, BFLOAT16 or FLOAT64"));
}

absl::Status ShapeInvalidError(absl::string_view what) {
  return Error<Row("SHAPE_INVALID")>(what);
}

absl::Status NameInvalidError(absl::string_view what) {
  return Error<Row("NAME_INVALID")>(what);
}

absl::Status HeaderInvalidError(absl::string_view what) {
  return Error<Row("HEADER_INVALID")>(what);
}

absl::Status EnumUnknownError(absl::string_view enum_name, int value) {
  return Error<Row("ENUM_UNKNOWN")>(
      absl::StrCat(enum_name, " has no value ", value, " in this version"));
}

absl::Status TensorTooLargeError(int64_t size_bytes, int64_t limit_bytes) {
  return Error<Row("TENSOR_TOO_LARGE")>(absl::StrCat(
      "tensor has ", size_bytes, " bytes; the limit is ", limit_bytes));
}

absl::Status RankLimitError(int64_t limit, int64_t got) {
  return Error<Row("RANK_LIMIT")>(absl::StrCat(
      "the tensor has ", got, " dimensions, expected at most ", limit));
}

absl::Status MessageMalformedError(absl::string_view what) {
  return Error<Row("MESSAGE_MALFORMED")>(what);
}

absl::Status HeaderMissingError() {
  return Error<Row("HEADER_MISSING")>(
      "a chunk came where no tensor is open; expected a message "
      "with a header");
}

absl::Status ChunkOffsetError(uint64_t expected_bytes, uint64_t got_bytes) {
  return Error<Row("CHUNK_OFFSET")>(absl::StrCat(
      "chunk starts at byte ", got_bytes, ", expected ", expected_bytes));
}

absl::Status ChunkAlignmentError(int64_t element_size_bytes,
                                 int64_t got_bytes) {
  return Error<Row("CHUNK_ALIGNMENT")>(absl::StrCat(
      "chunk has ", got_bytes, " bytes, expected a multiple of the element's ",
      element_size_bytes));
}

absl::Status ChunkTooLargeError(int64_t limit_bytes, int64_t got_bytes) {
  return Error<Row("CHUNK_TOO_LARGE")>(absl::StrCat(
      "chunk has ", got_bytes, " bytes, expected at most ", limit_bytes));
}

absl::Status TensorTooLongError(int64_t expected_bytes, int64_t got_bytes) {
  return Error<Row("TENSOR_TOO_LONG")>(
      absl::StrCat("chunk ends at byte ", got_bytes,
                   ", expected the tensor to end at ", expected_bytes));
}

absl::Status TensorIncompleteError(int64_t expected_bytes, int64_t got_bytes) {
  return Error<Row("TENSOR_INCOMPLETE")>(absl::StrCat(
      "tensor ended at byte ", got_bytes, ", expected ", expected_bytes));
}

absl::Status RangeInvalidError(absl::string_view what) {
  return Error<Row("RANGE_INVALID")>(what);
}

absl::Status FormatUnknownError(int value) {
  return Error<Row("FORMAT_UNKNOWN")>(absl::StrCat(
      "number format ", value, "; expected a value of quantd.v1.NumberFormat"));
}

absl::Status BlockSizeInvalidError(absl::string_view what) {
  return Error<Row("BLOCK_SIZE_INVALID")>(what);
}

absl::Status ScaleInvalidError(int64_t index, double value) {
  return Error<Row("SCALE_INVALID")>(
      absl::StrCat("scale ", index, " is ", value,
                   "; expected a finite number of at least "
                   "1.17549435e-38"));
}

absl::Status ScaleValueError(int64_t index, double value,
                             absl::string_view expected) {
  return Error<Row("SCALE_INVALID")>(
      absl::StrCat("scale ", index, " is ", value, "; expected ", expected));
}

absl::Status ScaleCountError(int64_t expected, int64_t got) {
  return Error<Row("SCALE_COUNT")>(
      absl::StrCat("encoding has ", got, " scales, expected ", expected));
}

absl::Status ScaleCodeCountError(int64_t expected, int64_t got) {
  return Error<Row("SCALE_COUNT")>(
      absl::StrCat("encoding has ", got, " scale codes, expected ", expected));
}

absl::Status OuterScaleCountError(int64_t expected, int64_t got) {
  return Error<Row("SCALE_COUNT")>(
      absl::StrCat("encoding has ", got, " outer scales, expected ", expected));
}

absl::Status ScaleShapeError(absl::string_view what) {
  return Error<Row("SCALE_COUNT")>(what);
}

absl::Status ZeroPointCountError(int64_t scale_count, int64_t got) {
  return Error<Row("SCALE_COUNT")>(
      absl::StrCat("encoding has ", got, " zero points, expected none or ",
                   scale_count, ", as many as scales"));
}

absl::Status ScaleCountLimitError(int64_t limit, int64_t got) {
  return Error<Row("SCALE_COUNT_LIMIT")>(
      absl::StrCat(got, " scales; the limit is ", limit));
}

absl::Status MessageScaleLimitError(int64_t limit_bytes, int64_t got_bytes) {
  return Error<Row("SCALE_COUNT_LIMIT")>(absl::StrCat(
      "the encoding takes ", got_bytes, " bytes; the limit of one message is ",
      limit_bytes,
      ": ask for scales_in_chunks in Quantize, for omit_encoding in "
      "Dequantize, for omit_encodings in Evaluate, or for fewer scales"));
}

absl::Status AnswerScaleLimitError(int64_t limit_bytes, int64_t got_bytes) {
  return Error<Row("SCALE_COUNT_LIMIT")>(absl::StrCat(
      "the encoding takes ", got_bytes, " bytes; the limit of one answer is ",
      limit_bytes, ": call ReadEncoding"));
}

absl::Status ZeroPointRangeError(absl::string_view what) {
  return Error<Row("ZERO_POINT_RANGE")>(what);
}

absl::Status OuterMaximumError(absl::string_view what) {
  return Error<Row("OUTER_MAXIMUM")>(what);
}

absl::Status CodeRangeInvalidError(absl::string_view what) {
  return Error<Row("CODE_RANGE_INVALID")>(what);
}

absl::Status SymmetryInvalidError(absl::string_view what) {
  return Error<Row("SYMMETRY_INVALID")>(what);
}

absl::Status ScaleTypeInvalidError(absl::string_view what) {
  return Error<Row("SCALE_TYPE_INVALID")>(what);
}

absl::Status CodebookInvalidError(absl::string_view what) {
  return Error<Row("CODEBOOK_INVALID")>(what);
}

absl::Status MethodInvalidError(absl::string_view what) {
  return Error<Row("METHOD_INVALID")>(what);
}

absl::Status ScaleOverflowError(int64_t scale_index, double scale,
                                absl::string_view type) {
  return Error<Row("SCALE_OVERFLOW")>(
      absl::StrCat("scale ", scale_index, " would be ", scale,
                   "; expected one that fits ", type));
}

absl::Status EncodingMissingError() {
  return Error<Row("ENCODING_MISSING")>(
      "no encoding was named; expected a reference, an encoding, or "
      "a spec where the call takes one");
}

absl::Status CandidatesInvalidError(absl::string_view what) {
  return Error<Row("CANDIDATES_INVALID")>(what);
}

absl::Status NonFiniteRejectedError(int64_t element_index, double value) {
  return Error<Row("NON_FINITE_REJECTED")>(
      absl::StrCat("element ", element_index, " is ", value,
                   "; expected finite elements only"));
}

absl::Status GramInvalidError(absl::string_view what) {
  return Error<Row("GRAM_INVALID")>(what);
}

absl::Status InterchangeInvalidError(absl::string_view what) {
  return Error<Row("INTERCHANGE_INVALID")>(what);
}

absl::Status InterchangeUnsupportedError(absl::string_view what) {
  return Error<Row("INTERCHANGE_UNSUPPORTED")>(what);
}

absl::Status InterchangeTooLargeError(int64_t limit_bytes) {
  return Error<Row("INTERCHANGE_TOO_LARGE")>(
      absl::StrCat("the file has more than ", limit_bytes,
                   " bytes, send it in parts of fewer tensors"));
}

absl::Status AxisUnknownError(absl::string_view what) {
  return Error<Row("AXIS_UNKNOWN")>(what);
}

absl::Status ContributionInvalidError(absl::string_view what) {
  return Error<Row("CONTRIBUTION_INVALID")>(what);
}

absl::Status StatisticsMismatchError(absl::string_view what) {
  return Error<Row("STATISTICS_MISMATCH")>(what);
}

absl::Status StatisticsIncompleteError(absl::string_view what) {
  return Error<Row("STATISTICS_INCOMPLETE")>(what);
}

absl::Status GranularityTooFineError(absl::string_view what) {
  return Error<Row("GRANULARITY_TOO_FINE")>(what);
}

absl::Status StatisticsTooLargeError(int64_t limit_bytes, int64_t got_bytes,
                                     absl::string_view way_out) {
  return Error<Row("STATISTICS_TOO_LARGE")>(
      absl::StrCat("the statistics take ", got_bytes, " bytes; the limit is ",
                   limit_bytes, "; ", way_out));
}

absl::Status StatisticsInvalidError(absl::string_view what) {
  return Error<Row("STATISTICS_INVALID")>(what);
}

absl::Status SpecMissingError() {
  return Error<Row("SPEC_MISSING")>(
      "no spec was given; expected a default spec or an override");
}

absl::Status PatternInvalidError(absl::string_view what) {
  return Error<Row("PATTERN_INVALID")>(what);
}

absl::Status TieInvalidError(absl::string_view what) {
  return Error<Row("TIE_INVALID")>(what);
}

absl::Status TargetInvalidError(absl::string_view what) {
  return Error<Row("TARGET_INVALID")>(what);
}

absl::Status StatisticsNotFoundError(absl::string_view model,
                                     absl::string_view revision,
                                     absl::string_view tensor) {
  const std::string whose = tensor.empty()
                                ? std::string("any tensor")
                                : absl::StrCat("tensor \"", tensor, "\"");
  return Error<Row("STATISTICS_NOT_FOUND")>(
      absl::StrCat("no statistics for ", whose, " of model \"", model,
                   "\", revision \"", revision, "\""));
}

absl::Status EncodingNotFoundError(absl::string_view model,
                                   absl::string_view revision,
                                   absl::string_view tensor) {
  return Error<Row("ENCODING_NOT_FOUND")>(absl::StrCat(
      tensor.empty() ? "no encodings"
                     : absl::StrCat("no encoding for tensor \"", tensor, "\""),
      " of model \"", model, "\", revision \"", revision, "\""));
}

absl::Status RevisionNotFoundError(absl::string_view model,
                                   absl::string_view revision,
                                   absl::string_view what) {
  return Error<Row("REVISION_NOT_FOUND")>(absl::StrCat(
      "no ", what, " in revision \"", revision, "\" of model \"", model, "\""));
}

absl::Status RevisionInvalidError(absl::string_view what) {
  return Error<Row("REVISION_INVALID")>(what);
}

absl::Status ModelNotFoundError(absl::string_view model) {
  return Error<Row("MODEL_NOT_FOUND")>(
      absl::StrCat("no encodings and no statistics of model \"", model, "\""));
}

absl::Status EtagMismatchError(absl::string_view expected,
                               absl::string_view got) {
  return Error<Row("ETAG_MISMATCH")>(absl::StrCat(
      "the encoding has etag \"", got, "\", expected \"", expected, "\""));
}

absl::Status StoreUnavailableError(absl::string_view what,
                                   absl::string_view detail) {
  return WithDetail(Error<Row("STORE_UNAVAILABLE")>(what), detail);
}

absl::Status StoreCorruptError(absl::string_view what,
                               absl::string_view detail) {
  return WithDetail(Error<Row("STORE_CORRUPT")>(what), detail);
}

absl::Status StoreSchemaError(int64_t got_version, int64_t expected_version) {
  return Error<Row("STORE_SCHEMA")>(
      absl::StrCat("the store has schema version ", got_version,
                   ", this quantd needs version ", expected_version,
                   "; run the quantd that wrote it, or start with a new "
                   "store"));
}

absl::Status QuotaExceededError(absl::string_view scope, int64_t limit,
                                absl::string_view what) {
  return Error<Row("QUOTA_EXCEEDED")>(
      absl::StrCat("the store would hold more than the ", limit, " ", what,
                   " of the quota of ", scope,
                   "; delete what is not needed, or ask the operator"));
}

absl::Status PageInvalidError(absl::string_view what) {
  return Error<Row("PAGE_INVALID")>(what);
}

absl::Status RequestTooLargeError(int64_t limit_bytes) {
  return Error<Row("REQUEST_TOO_LARGE")>(
      absl::StrCat("the request takes more than ", limit_bytes,
                   " bytes of memory, send less at once"));
}

absl::Status MemoryBudgetError(int64_t budget_bytes, absl::string_view way_out,
                               absl::Duration retry_after) {
  return RetryableError<Row("MEMORY_BUDGET")>(
      absl::StrCat("the memory budget of ", budget_bytes, " bytes is ",
                   retry_after > absl::ZeroDuration() ? "used up" : "too small",
                   "; ", way_out),
      retry_after);
}

absl::Status RegionInvalidError(absl::string_view what) {
  return Error<Row("REGION_INVALID")>(what);
}

absl::Status RegionNotFoundError() {
  return Error<Row("REGION_NOT_FOUND")>(
      "this process has no such region of shared memory here; "
      "regions go with the connection that asked for them");
}

absl::Status RegionLimitError(absl::string_view what) {
  return Error<Row("REGION_LIMIT")>(what);
}

absl::Status CallLimitError(int64_t limit, absl::string_view whose) {
  return RetryableError<Row("CALL_LIMIT")>(
      absl::StrCat(limit, " calls", whose,
                   " are open, which is the limit; end those that you do not "
                   "use, or try again when others have ended"),
      absl::Seconds(1));
}

absl::Status TokenMissingError() {
  return Error<Row("TOKEN_MISSING")>(
      "no credential; expected \"authorization: Bearer TOKEN\" or a "
      "client certificate");
}

absl::Status TokenInvalidError() {
  return Error<Row("TOKEN_INVALID")>(
      "the credential is unknown or has expired");
}

absl::Status ScopeMissingError(absl::string_view scope) {
  return Error<Row("SCOPE_MISSING")>(
      absl::StrCat("the caller lacks the scope \"", scope, "\""));
}

absl::Status ModelDeniedError(absl::string_view model) {
  return Error<Row("MODEL_DENIED")>(
      absl::StrCat("the caller may not write to model \"", model, "\""));
}

absl::Status OverloadedError(absl::Duration delay, absl::Duration limit,
                             absl::Duration retry_after) {
  const auto in_ms = [](absl::Duration duration) {
    return absl::FormatDuration(absl::Trunc(duration, absl::Milliseconds(1)));
  };
  return RetryableError<Row("OVERLOADED")>(
      absl::StrCat("the workers are ", in_ms(delay),
                   " behind, expected at most ", in_ms(limit)),
      retry_after);
}

absl::Status TensorCountError(int64_t limit, absl::Duration retry_after) {
  return RetryableError<Row("OVERLOADED")>(
      absl::StrCat(limit, " tensors are open, which is the limit"),
      retry_after);
}

absl::Status StreamAgeError(absl::Duration limit) {
  return Error<Row("STREAM_AGE")>(
      absl::StrCat("the stream was open for ", absl::FormatDuration(limit),
                   ", which is the limit; open another"));
}

absl::Status DrainingError() {
  return Error<Row("DRAINING")>("the server is about to stop; try another");
}

absl::Status StreamIdleError(absl::Duration timeout) {
  return Error<Row("STREAM_IDLE")>(absl::StrCat("nothing came or was read for ",
                                                absl::FormatDuration(timeout)));
}

absl::Status ListenError(absl::string_view address, absl::string_view why) {
  return Error<Row("LISTEN")>(
      absl::StrCat("cannot listen on ", address, ": ", why,
                   "; expected a free host:port or unix:path"));
}

absl::Status ConfigInvalidError(absl::string_view what) {
  return Error<Row("CONFIG_INVALID")>(what);
}

absl::Status SimdTargetError(absl::string_view got,
                             absl::string_view available) {
  return Error<Row("SIMD_TARGET")>(absl::StrCat(
      "no SIMD target \"", got, "\"; expected one of ", available));
}

absl::Status UnexpectedError(absl::string_view request_id) {
  return Error<Row("INTERNAL")>(
      absl::StrCat("something that should not happen did; the "
                   "server's log has more under the request id ",
                   request_id));
}

}  // namespace quantd::core
