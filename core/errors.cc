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

absl::Status Error(absl::StatusCode code, absl::string_view reason,
                   absl::string_view text) {
  return absl::Status(code, absl::StrCat(reason, ": ", text));
}

absl::Status Invalid(absl::string_view reason, absl::string_view text) {
  return Error(absl::StatusCode::kInvalidArgument, reason, text);
}

absl::Status Exhausted(absl::string_view reason, absl::string_view text) {
  return Error(absl::StatusCode::kResourceExhausted, reason, text);
}

absl::Status WithRetryAfter(absl::Status status, absl::Duration retry_after) {
  status.SetPayload(
      kRetryPayload,
      absl::Cord(absl::StrCat(absl::ToInt64Milliseconds(retry_after))));
  return status;
}

absl::Status Unimplemented(absl::string_view reason, absl::string_view text) {
  return Error(absl::StatusCode::kUnimplemented, reason, text);
}

absl::Status WithDetail(absl::Status status, absl::string_view detail) {
  if (!detail.empty()) status.SetPayload(kDetailPayload, absl::Cord(detail));
  return status;
}

}  // namespace

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
  return Invalid("ELEMENT_TYPE_UNKNOWN",
                 absl::StrCat("element type ", value,
                              "; expected FLOAT32, FLOAT16, BFLOAT16 or "
                              "FLOAT64"));
}

absl::Status ShapeInvalidError(absl::string_view what) {
  return Invalid("SHAPE_INVALID", what);
}

absl::Status NameInvalidError(absl::string_view what) {
  return Invalid("NAME_INVALID", what);
}

absl::Status HeaderInvalidError(absl::string_view what) {
  return Invalid("HEADER_INVALID", what);
}

absl::Status EnumUnknownError(absl::string_view enum_name, int value) {
  return Invalid("ENUM_UNKNOWN", absl::StrCat(enum_name, " has no value ",
                                              value, " in this version"));
}

absl::Status TensorTooLargeError(int64_t size_bytes, int64_t limit_bytes) {
  return Exhausted("TENSOR_TOO_LARGE",
                   absl::StrCat("tensor has ", size_bytes,
                                " bytes; the limit is ", limit_bytes));
}
absl::Status RankLimitError(int64_t limit, int64_t got) {
  return Exhausted("RANK_LIMIT",
                   absl::StrCat("the tensor has ", got,
                                " dimensions, expected at most ", limit));
}

absl::Status MessageMalformedError(absl::string_view what) {
  return Invalid("MESSAGE_MALFORMED", what);
}

absl::Status HeaderMissingError() {
  return Invalid("HEADER_MISSING",
                 "a chunk came where no tensor is open; expected a message "
                 "with a header");
}

absl::Status ChunkOffsetError(uint64_t expected_bytes, uint64_t got_bytes) {
  return Invalid("CHUNK_OFFSET",
                 absl::StrCat("chunk starts at byte ", got_bytes, ", expected ",
                              expected_bytes));
}

absl::Status ChunkAlignmentError(int64_t element_size_bytes,
                                 int64_t got_bytes) {
  return Invalid("CHUNK_ALIGNMENT",
                 absl::StrCat("chunk has ", got_bytes,
                              " bytes, expected a multiple of the element's ",
                              element_size_bytes));
}

absl::Status ChunkTooLargeError(int64_t limit_bytes, int64_t got_bytes) {
  return Invalid("CHUNK_TOO_LARGE", absl::StrCat("chunk has ", got_bytes,
                                                 " bytes, expected at "
                                                 "most ",
                                                 limit_bytes));
}

absl::Status TensorTooLongError(int64_t expected_bytes, int64_t got_bytes) {
  return Invalid(
      "TENSOR_TOO_LONG",
      absl::StrCat("chunk ends at byte ", got_bytes,
                   ", expected the tensor to end at ", expected_bytes));
}

absl::Status TensorIncompleteError(int64_t expected_bytes, int64_t got_bytes) {
  return Invalid("TENSOR_INCOMPLETE",
                 absl::StrCat("tensor ended at byte ", got_bytes, ", expected ",
                              expected_bytes));
}

absl::Status RangeInvalidError(absl::string_view what) {
  return Invalid("RANGE_INVALID", what);
}

absl::Status FormatUnknownError(int value) {
  return Invalid("FORMAT_UNKNOWN",
                 absl::StrCat("number format ", value,
                              "; expected a value of quantd.v1.NumberFormat"));
}

absl::Status BlockSizeInvalidError(absl::string_view what) {
  return Invalid("BLOCK_SIZE_INVALID", what);
}

absl::Status ScaleInvalidError(int64_t index, double value) {
  return Invalid("SCALE_INVALID",
                 absl::StrCat("scale ", index, " is ", value,
                              "; expected a finite number of at least "
                              "1.17549435e-38"));
}

absl::Status ScaleValueError(int64_t index, double value,
                             absl::string_view expected) {
  return Invalid("SCALE_INVALID", absl::StrCat("scale ", index, " is ", value,
                                               "; expected ", expected));
}

absl::Status ScaleCountError(int64_t expected, int64_t got) {
  return Invalid("SCALE_COUNT", absl::StrCat("encoding has ", got,
                                             " scales, expected ", expected));
}

absl::Status ScaleCodeCountError(int64_t expected, int64_t got) {
  return Invalid(
      "SCALE_COUNT",
      absl::StrCat("encoding has ", got, " scale codes, expected ", expected));
}

absl::Status OuterScaleCountError(int64_t expected, int64_t got) {
  return Invalid(
      "SCALE_COUNT",
      absl::StrCat("encoding has ", got, " outer scales, expected ", expected));
}

absl::Status ScaleShapeError(absl::string_view what) {
  return Invalid("SCALE_COUNT", what);
}

absl::Status ZeroPointCountError(int64_t scale_count, int64_t got) {
  return Invalid(
      "SCALE_COUNT",
      absl::StrCat("encoding has ", got, " zero points, expected none or ",
                   scale_count, ", as many as scales"));
}

absl::Status ScaleCountLimitError(int64_t limit, int64_t got) {
  return Exhausted("SCALE_COUNT_LIMIT",
                   absl::StrCat(got, " scales; the limit is ", limit));
}

absl::Status ZeroPointRangeError(absl::string_view what) {
  return Invalid("ZERO_POINT_RANGE", what);
}

absl::Status CodeRangeInvalidError(absl::string_view what) {
  return Invalid("CODE_RANGE_INVALID", what);
}

absl::Status SymmetryInvalidError(absl::string_view what) {
  return Invalid("SYMMETRY_INVALID", what);
}

absl::Status ScaleTypeInvalidError(absl::string_view what) {
  return Invalid("SCALE_TYPE_INVALID", what);
}

absl::Status CodebookInvalidError(absl::string_view what) {
  return Invalid("CODEBOOK_INVALID", what);
}

absl::Status MethodInvalidError(absl::string_view what) {
  return Invalid("METHOD_INVALID", what);
}

absl::Status ScaleOverflowError(int64_t scale_index, double scale) {
  return Invalid("SCALE_OVERFLOW",
                 absl::StrCat("scale ", scale_index, " would be ", scale,
                              "; expected one that fits float32"));
}

absl::Status EncodingMissingError() {
  return Invalid("ENCODING_MISSING",
                 "no encoding was named; expected a reference, an encoding, or "
                 "a spec where the call takes one");
}

absl::Status CandidatesInvalidError(absl::string_view what) {
  return Invalid("CANDIDATES_INVALID", what);
}

absl::Status NonFiniteRejectedError(int64_t element_index, double value) {
  return Invalid("NON_FINITE_REJECTED",
                 absl::StrCat("element ", element_index, " is ", value,
                              "; expected finite elements only"));
}

absl::Status InterchangeInvalidError(absl::string_view what) {
  return Invalid("INTERCHANGE_INVALID", what);
}

absl::Status InterchangeUnsupportedError(absl::string_view what) {
  return Unimplemented("INTERCHANGE_UNSUPPORTED", what);
}

absl::Status InterchangeTooLargeError(int64_t limit_bytes) {
  return Exhausted("INTERCHANGE_TOO_LARGE",
                   absl::StrCat("the file has more than ", limit_bytes,
                                " bytes, send it in parts of fewer tensors"));
}

absl::Status AxisUnknownError(absl::string_view what) {
  return Invalid("AXIS_UNKNOWN", what);
}

absl::Status ContributionInvalidError(absl::string_view what) {
  return Invalid("CONTRIBUTION_INVALID", what);
}

absl::Status StatisticsMismatchError(absl::string_view what) {
  return Error(absl::StatusCode::kFailedPrecondition, "STATISTICS_MISMATCH",
               what);
}

absl::Status GranularityTooFineError(absl::string_view what) {
  return Error(absl::StatusCode::kFailedPrecondition, "GRANULARITY_TOO_FINE",
               what);
}

absl::Status StatisticsTooLargeError(int64_t limit_bytes, int64_t got_bytes,
                                     absl::string_view way_out) {
  return Exhausted(
      "STATISTICS_TOO_LARGE",
      absl::StrCat("the statistics take ", got_bytes, " bytes; the limit is ",
                   limit_bytes, "; ", way_out));
}

absl::Status StatisticsInvalidError(absl::string_view what) {
  return Invalid("STATISTICS_INVALID", what);
}

absl::Status SpecMissingError() {
  return Invalid("SPEC_MISSING",
                 "no spec was given; expected a default spec or an override");
}

absl::Status PatternInvalidError(absl::string_view what) {
  return Invalid("PATTERN_INVALID", what);
}

absl::Status TargetInvalidError(absl::string_view what) {
  return Invalid("TARGET_INVALID", what);
}

absl::Status StatisticsNotFoundError(absl::string_view model,
                                     absl::string_view revision,
                                     absl::string_view tensor) {
  const std::string whose = tensor.empty()
                                ? std::string("any tensor")
                                : absl::StrCat("tensor \"", tensor, "\"");
  return Error(absl::StatusCode::kNotFound, "STATISTICS_NOT_FOUND",
               absl::StrCat("no statistics for ", whose, " of model \"", model,
                            "\", revision \"", revision, "\""));
}

absl::Status EncodingNotFoundError(absl::string_view model,
                                   absl::string_view revision,
                                   absl::string_view tensor) {
  return Error(
      absl::StatusCode::kNotFound, "ENCODING_NOT_FOUND",
      absl::StrCat(tensor.empty() ? "no encodings"
                                  : absl::StrCat("no encoding for tensor \"",
                                                 tensor, "\""),
                   " of model \"", model, "\", revision \"", revision, "\""));
}

absl::Status EtagMismatchError(absl::string_view expected,
                               absl::string_view got) {
  return Error(absl::StatusCode::kFailedPrecondition, "ETAG_MISMATCH",
               absl::StrCat("the encoding has etag \"", got, "\", expected \"",
                            expected, "\""));
}

absl::Status StoreUnavailableError(absl::string_view what,
                                   absl::string_view detail) {
  return WithDetail(
      Error(absl::StatusCode::kUnavailable, "STORE_UNAVAILABLE", what), detail);
}

absl::Status StoreCorruptError(absl::string_view what,
                               absl::string_view detail) {
  return WithDetail(Error(absl::StatusCode::kDataLoss, "STORE_CORRUPT", what),
                    detail);
}

absl::Status StoreSchemaError(int got_version, int known_version) {
  return Error(absl::StatusCode::kFailedPrecondition, "STORE_SCHEMA",
               absl::StrCat("the store has schema version ", got_version,
                            ", this quantd knows versions up to ",
                            known_version, "; run a newer quantd"));
}

absl::Status QuotaExceededError(absl::string_view scope, int64_t limit,
                                absl::string_view what) {
  return Exhausted(
      "QUOTA_EXCEEDED",
      absl::StrCat("the store would hold more than the ", limit, " ", what,
                   " of the quota of ", scope,
                   "; delete what is not needed, or ask the operator"));
}

absl::Status PageInvalidError(absl::string_view what) {
  return Invalid("PAGE_INVALID", what);
}

absl::Status RequestTooLargeError(int64_t limit_bytes) {
  return Exhausted("REQUEST_TOO_LARGE",
                   absl::StrCat("the request takes more than ", limit_bytes,
                                " bytes of memory, send less at once"));
}

absl::Status MemoryBudgetError(int64_t budget_bytes, absl::string_view way_out,
                               absl::Duration retry_after) {
  return WithRetryAfter(
      Exhausted("MEMORY_BUDGET",
                absl::StrCat("the memory budget of ", budget_bytes,
                             " bytes is used up; ", way_out)),
      retry_after);
}

absl::Status RegionInvalidError(absl::string_view what) {
  return Invalid("REGION_INVALID", what);
}

absl::Status RegionNotFoundError() {
  return Error(absl::StatusCode::kNotFound, "REGION_NOT_FOUND",
               "this process has no such region of shared memory here; "
               "regions go with the connection that asked for them");
}

absl::Status RegionLimitError(absl::string_view what) {
  return Exhausted("REGION_LIMIT", what);
}

absl::Status TokenMissingError() {
  return Error(absl::StatusCode::kUnauthenticated, "TOKEN_MISSING",
               "no credential; expected \"authorization: Bearer TOKEN\" or a "
               "client certificate");
}

absl::Status TokenInvalidError() {
  return Error(absl::StatusCode::kUnauthenticated, "TOKEN_INVALID",
               "the credential is unknown or has expired");
}

absl::Status ScopeMissingError(absl::string_view scope) {
  return Error(absl::StatusCode::kPermissionDenied, "SCOPE_MISSING",
               absl::StrCat("the caller lacks the scope \"", scope, "\""));
}

absl::Status ModelDeniedError(absl::string_view model) {
  return Error(
      absl::StatusCode::kPermissionDenied, "MODEL_DENIED",
      absl::StrCat("the caller may not write to model \"", model, "\""));
}

absl::Status OverloadedError(absl::Duration delay, absl::Duration limit,
                             absl::Duration retry_after) {
  const auto in_ms = [](absl::Duration duration) {
    return absl::FormatDuration(absl::Trunc(duration, absl::Milliseconds(1)));
  };
  return WithRetryAfter(
      Exhausted("OVERLOADED",
                absl::StrCat("the workers are ", in_ms(delay),
                             " behind, expected at most ", in_ms(limit))),
      retry_after);
}
absl::Status TensorCountError(int64_t limit, absl::Duration retry_after) {
  return WithRetryAfter(
      Exhausted("OVERLOADED", absl::StrCat(limit,
                                           " tensors are open, which is the "
                                           "limit")),
      retry_after);
}
absl::Status StreamAgeError(absl::Duration limit) {
  return Error(
      absl::StatusCode::kUnavailable, "STREAM_AGE",
      absl::StrCat("the stream was open for ", absl::FormatDuration(limit),
                   ", which is the limit; open another"));
}
absl::Status DrainingError() {
  return Error(absl::StatusCode::kUnavailable, "DRAINING",
               "the server is about to stop; try another");
}

absl::Status StreamIdleError(absl::Duration timeout) {
  return Error(absl::StatusCode::kDeadlineExceeded, "STREAM_IDLE",
               absl::StrCat("nothing came or was read for ",
                            absl::FormatDuration(timeout)));
}

absl::Status ListenError(absl::string_view address) {
  return Error(absl::StatusCode::kUnavailable, "LISTEN",
               absl::StrCat("cannot listen on ", address,
                            "; expected a free host:port or unix:path"));
}

absl::Status ConfigInvalidError(absl::string_view what) {
  return Invalid("CONFIG_INVALID", what);
}

absl::Status SimdTargetError(absl::string_view got,
                             absl::string_view available) {
  return Invalid("SIMD_TARGET",
                 absl::StrCat("no SIMD target \"", got, "\"; expected one of ",
                              available));
}

absl::Status UnexpectedError(absl::string_view request_id) {
  return Error(absl::StatusCode::kInternal, "INTERNAL",
               absl::StrCat("something that should not happen did; the "
                            "server's log has more under the request id ",
                            request_id));
}

}  // namespace quantd::core
