// The catalogue of errors: one row per reason, one function per error.
//
// A status from here has the message "REASON: what was expected and what came".
// REASON is stable; programs may depend on it. Two optional payloads ride
// along: the path of the request field at fault, and how long to wait before a
// retry. A third one is for the log alone: what callers must not see.

#ifndef QUANTD_CORE_ERRORS_H_
#define QUANTD_CORE_ERRORS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace quantd::core {

using ErrorCode = absl::StatusCode;

// How errors are counted.
enum class ErrorKind {
  kFault,    // of the request, the store or the server
  kLimit,    // something is as large or as many as may be
  kDenial,   // who calls may not
  kStartup,  // ends the server before there are callers
};

// One row per reason.
struct ErrorInfo {
  absl::string_view reason;
  ErrorCode code;
  ErrorKind kind = ErrorKind::kFault;
  // True if the same request may succeed later. ErrorRetryAfter then is how
  // long to wait, if that is known.
  bool retry_helps = false;
};

inline constexpr ErrorInfo kErrors[] = {
    // Tensors and names.
    {"ELEMENT_TYPE_UNKNOWN", ErrorCode::kInvalidArgument},
    {"SHAPE_INVALID", ErrorCode::kInvalidArgument},
    {"NAME_INVALID", ErrorCode::kInvalidArgument},
    {"HEADER_INVALID", ErrorCode::kInvalidArgument},
    {"ENUM_UNKNOWN", ErrorCode::kInvalidArgument},
    {"TENSOR_TOO_LARGE", ErrorCode::kResourceExhausted, ErrorKind::kLimit},
    {"RANK_LIMIT", ErrorCode::kResourceExhausted, ErrorKind::kLimit},
    // Framing.
    {"MESSAGE_MALFORMED", ErrorCode::kInvalidArgument},
    {"HEADER_MISSING", ErrorCode::kInvalidArgument},
    {"CHUNK_OFFSET", ErrorCode::kInvalidArgument},
    {"CHUNK_ALIGNMENT", ErrorCode::kInvalidArgument},
    {"CHUNK_TOO_LARGE", ErrorCode::kInvalidArgument, ErrorKind::kLimit},
    {"TENSOR_TOO_LONG", ErrorCode::kInvalidArgument},
    {"TENSOR_INCOMPLETE", ErrorCode::kInvalidArgument},
    {"RANGE_INVALID", ErrorCode::kInvalidArgument},
    // Encodings and specs.
    {"FORMAT_UNKNOWN", ErrorCode::kInvalidArgument},
    {"BLOCK_SIZE_INVALID", ErrorCode::kInvalidArgument},
    {"SCALE_INVALID", ErrorCode::kInvalidArgument},
    {"SCALE_COUNT", ErrorCode::kInvalidArgument},
    {"SCALE_COUNT_LIMIT", ErrorCode::kResourceExhausted, ErrorKind::kLimit},
    {"ZERO_POINT_RANGE", ErrorCode::kInvalidArgument},
    {"CODE_RANGE_INVALID", ErrorCode::kInvalidArgument},
    {"SYMMETRY_INVALID", ErrorCode::kInvalidArgument},
    {"SCALE_TYPE_INVALID", ErrorCode::kInvalidArgument},
    {"CODEBOOK_INVALID", ErrorCode::kInvalidArgument},
    {"METHOD_INVALID", ErrorCode::kInvalidArgument},
    {"SCALE_OVERFLOW", ErrorCode::kInvalidArgument},
    {"OUTER_MAXIMUM", ErrorCode::kInvalidArgument},
    {"ENCODING_MISSING", ErrorCode::kInvalidArgument},
    {"CANDIDATES_INVALID", ErrorCode::kInvalidArgument},
    {"NON_FINITE_REJECTED", ErrorCode::kInvalidArgument},
    {"GRAM_INVALID", ErrorCode::kInvalidArgument},
    // Files of encodings.
    {"INTERCHANGE_INVALID", ErrorCode::kInvalidArgument},
    {"INTERCHANGE_UNSUPPORTED", ErrorCode::kUnimplemented},
    {"INTERCHANGE_TOO_LARGE", ErrorCode::kResourceExhausted, ErrorKind::kLimit},
    {"AXIS_UNKNOWN", ErrorCode::kInvalidArgument},
    // Statistics.
    {"CONTRIBUTION_INVALID", ErrorCode::kInvalidArgument},
    {"STATISTICS_MISMATCH", ErrorCode::kFailedPrecondition},
    {"STATISTICS_INCOMPLETE", ErrorCode::kFailedPrecondition},
    {"GRANULARITY_TOO_FINE", ErrorCode::kFailedPrecondition},
    {"STATISTICS_TOO_LARGE", ErrorCode::kResourceExhausted, ErrorKind::kLimit},
    {"STATISTICS_INVALID", ErrorCode::kInvalidArgument},
    {"SPEC_MISSING", ErrorCode::kInvalidArgument},
    {"PATTERN_INVALID", ErrorCode::kInvalidArgument},
    {"TIE_INVALID", ErrorCode::kInvalidArgument},
    {"TARGET_INVALID", ErrorCode::kInvalidArgument},
    // Store.
    {"STATISTICS_NOT_FOUND", ErrorCode::kNotFound},
    {"ENCODING_NOT_FOUND", ErrorCode::kNotFound},
    {"REVISION_NOT_FOUND", ErrorCode::kNotFound},
    {"REVISION_INVALID", ErrorCode::kInvalidArgument},
    {"MODEL_NOT_FOUND", ErrorCode::kNotFound},
    {"ETAG_MISMATCH", ErrorCode::kFailedPrecondition},
    {"STORE_UNAVAILABLE", ErrorCode::kUnavailable, ErrorKind::kFault, true},
    {"STORE_CORRUPT", ErrorCode::kDataLoss},
    {"STORE_SCHEMA", ErrorCode::kFailedPrecondition, ErrorKind::kStartup},
    {"QUOTA_EXCEEDED", ErrorCode::kResourceExhausted, ErrorKind::kLimit},
    {"PAGE_INVALID", ErrorCode::kInvalidArgument},
    // Server.
    {"MEMORY_BUDGET", ErrorCode::kResourceExhausted, ErrorKind::kLimit, true},
    {"REQUEST_TOO_LARGE", ErrorCode::kResourceExhausted, ErrorKind::kLimit},
    {"REGION_INVALID", ErrorCode::kInvalidArgument},
    {"REGION_NOT_FOUND", ErrorCode::kNotFound},
    {"REGION_LIMIT", ErrorCode::kResourceExhausted, ErrorKind::kLimit},
    {"CALL_LIMIT", ErrorCode::kResourceExhausted, ErrorKind::kLimit, true},
    {"OVERLOADED", ErrorCode::kResourceExhausted, ErrorKind::kLimit, true},
    {"DRAINING", ErrorCode::kUnavailable, ErrorKind::kFault, true},
    {"STREAM_AGE", ErrorCode::kUnavailable, ErrorKind::kLimit, true},
    {"STREAM_IDLE", ErrorCode::kDeadlineExceeded, ErrorKind::kLimit},
    {"TOKEN_MISSING", ErrorCode::kUnauthenticated, ErrorKind::kDenial},
    {"TOKEN_INVALID", ErrorCode::kUnauthenticated, ErrorKind::kDenial},
    {"SCOPE_MISSING", ErrorCode::kPermissionDenied, ErrorKind::kDenial},
    {"MODEL_DENIED", ErrorCode::kPermissionDenied, ErrorKind::kDenial},
    // Connections that are closed at once: nobody gets these as an answer.
    {"CONNECTION_LIMIT", ErrorCode::kUnavailable, ErrorKind::kLimit, true},
    {"ADDRESS_LIMIT", ErrorCode::kUnavailable, ErrorKind::kLimit, true},
    {"LISTEN", ErrorCode::kUnavailable, ErrorKind::kStartup},
    {"CONFIG_INVALID", ErrorCode::kInvalidArgument, ErrorKind::kStartup},
    {"SIMD_TARGET", ErrorCode::kInvalidArgument, ErrorKind::kStartup},
    {"INTERNAL", ErrorCode::kInternal},
};

// The row of a reason; null when there is none.
const ErrorInfo* FindError(absl::string_view reason);

// The reason of a status from this catalogue; empty for any other status.
absl::string_view ErrorReason(const absl::Status& status);

// The message without "REASON: ".
absl::string_view ErrorText(const absl::Status& status);

// Returns the same error at this field, e.g. "header.tensor.shape". A field
// that was set before becomes a suffix: WithField(WithField(s, "scale"),
// "encoding") is at "encoding.scale". OK stays OK.
absl::Status WithField(absl::Status status, absl::string_view field);
// Empty when no field is at fault.
std::string ErrorField(const absl::Status& status);

// Zero when a retry does not help, or nobody knows when it will.
absl::Duration ErrorRetryAfter(const absl::Status& status);

// Detail of an error for the log, which answers leave out, such as the words of
// the database. Empty when there is none.
std::string ErrorDetail(const absl::Status& status);

// --- Tensors and names -----------------------------------------------------

absl::Status ElementTypeUnknownError(int value);
// A negative dimension, too many dimensions, or too large a product.
absl::Status ShapeInvalidError(absl::string_view what);
// `what` opens with the kind of name: "model \"../x\": ...".
absl::Status NameInvalidError(absl::string_view what);
// A header that lacks a field or contradicts itself.
absl::Status HeaderInvalidError(absl::string_view what);
// An enum field with a value that this version does not know.
absl::Status EnumUnknownError(absl::string_view enum_name, int value);
absl::Status TensorTooLargeError(int64_t size_bytes, int64_t limit_bytes);
// More dimensions than this server takes.
absl::Status RankLimitError(int64_t limit, int64_t got);

// --- Framing ---------------------------------------------------------------

// The message is not protobuf. Ends the stream.
absl::Status MessageMalformedError(absl::string_view what);
// A chunk where no tensor is open. Ends the stream.
absl::Status HeaderMissingError();
// A chunk did not start where the last one ended. Send the tensor again.
absl::Status ChunkOffsetError(uint64_t expected_bytes, uint64_t got_bytes);
// A chunk that is not a whole number of elements.
absl::Status ChunkAlignmentError(int64_t element_size_bytes, int64_t got_bytes);
absl::Status ChunkTooLargeError(int64_t limit_bytes, int64_t got_bytes);
// More bytes came than the shape has.
absl::Status TensorTooLongError(int64_t expected_bytes, int64_t got_bytes);
// The next header or the end of the stream came before the last byte.
absl::Status TensorIncompleteError(int64_t expected_bytes, int64_t got_bytes);
// A byte range that is empty, off the tensor, or not on elements or bytes.
absl::Status RangeInvalidError(absl::string_view what);

// --- Encodings and specs ---------------------------------------------------

absl::Status FormatUnknownError(int value);
absl::Status BlockSizeInvalidError(absl::string_view what);
absl::Status ScaleInvalidError(int64_t index, double value);
// A valid scale that contradicts its scale code.
absl::Status ScaleValueError(int64_t index, double value,
                             absl::string_view expected);
absl::Status ScaleCountError(int64_t expected, int64_t got);
absl::Status ScaleCodeCountError(int64_t expected, int64_t got);
absl::Status OuterScaleCountError(int64_t expected, int64_t got);
// Scales of the expected number, but along other dimensions.
absl::Status ScaleShapeError(absl::string_view what);
absl::Status ZeroPointCountError(int64_t scale_count, int64_t got);
absl::Status ScaleCountLimitError(int64_t limit, int64_t got);
// An encoding that does not go into one message of a stream.
absl::Status MessageScaleLimitError(int64_t limit_bytes, int64_t got_bytes);
// An encoding that does not go into the answer of a call.
absl::Status AnswerScaleLimitError(int64_t limit_bytes, int64_t got_bytes);
absl::Status ZeroPointRangeError(absl::string_view what);
absl::Status OuterMaximumError(absl::string_view what);
absl::Status CodeRangeInvalidError(absl::string_view what);
absl::Status SymmetryInvalidError(absl::string_view what);
// A scale type that the format or the symmetry does not go with.
absl::Status ScaleTypeInvalidError(absl::string_view what);
absl::Status CodebookInvalidError(absl::string_view what);
// A parameter of a calibration method.
absl::Status MethodInvalidError(absl::string_view what);
// `type`  what the scale is stored as.
absl::Status ScaleOverflowError(int64_t scale_index, double scale,
                                absl::string_view type = "float32");
// Neither reference, encoding nor spec was given.
absl::Status EncodingMissingError();
absl::Status CandidatesInvalidError(absl::string_view what);
absl::Status NonFiniteRejectedError(int64_t element_index, double value);
// A Gram matrix that is none, or that of another number of features.
absl::Status GramInvalidError(absl::string_view what);

// --- Files of encodings ----------------------------------------------------

// `what` opens with the place in the file: "encodings[3].scale: ...".
absl::Status InterchangeInvalidError(absl::string_view what);
// A file or an encoding that is sound, but has no counterpart on the other
// side.
absl::Status InterchangeUnsupportedError(absl::string_view what);
absl::Status InterchangeTooLargeError(int64_t limit_bytes);
// A file does not say along which dimension scales lie, nor does anything else.
absl::Status AxisUnknownError(absl::string_view what);

// --- Statistics ------------------------------------------------------------

// A contribution without a source, with sequence 0 or a parameter out of range.
absl::Status ContributionInvalidError(absl::string_view what);
// Statistics that do not go together with those that are there.
absl::Status StatisticsMismatchError(absl::string_view what);
// Statistics of a tensor of which a slice is missing.
absl::Status StatisticsIncompleteError(absl::string_view what);
// Statistics for larger blocks than those asked for.
absl::Status GranularityTooFineError(absl::string_view what);
absl::Status StatisticsTooLargeError(int64_t limit_bytes, int64_t got_bytes,
                                     absl::string_view way_out);
// Serialized statistics that are not a state.
absl::Status StatisticsInvalidError(absl::string_view what);
absl::Status SpecMissingError();
absl::Status PatternInvalidError(absl::string_view what);
absl::Status TieInvalidError(absl::string_view what);
absl::Status TargetInvalidError(absl::string_view what);

// --- Store -----------------------------------------------------------------

// A tensor, or with an empty `tensor` a revision, without statistics.
absl::Status StatisticsNotFoundError(absl::string_view model,
                                     absl::string_view revision,
                                     absl::string_view tensor);

// No encoding for a tensor, or with an empty `tensor` none in a revision.
absl::Status EncodingNotFoundError(absl::string_view model,
                                   absl::string_view revision,
                                   absl::string_view tensor);
// `what` is what the revision lacks: "encodings".
absl::Status RevisionNotFoundError(absl::string_view model,
                                   absl::string_view revision,
                                   absl::string_view what);
absl::Status RevisionInvalidError(absl::string_view what);
absl::Status ModelNotFoundError(absl::string_view model);
absl::Status EtagMismatchError(absl::string_view expected,
                               absl::string_view got);
// `what` is for callers. `detail`, which may name hosts, users and SQL, is for
// the log: see ErrorDetail.
absl::Status StoreUnavailableError(absl::string_view what,
                                   absl::string_view detail = "");
absl::Status StoreCorruptError(absl::string_view what,
                               absl::string_view detail = "");
// The store was written by another version of quantd.
absl::Status StoreSchemaError(int64_t got_version, int64_t expected_version);
// The write would make more of what `scope` counts ("models:acme/") than it may
// hold. Says nothing of how much others have. `what` is "bytes" or "rows".
absl::Status QuotaExceededError(absl::string_view scope, int64_t limit,
                                absl::string_view what);
absl::Status PageInvalidError(absl::string_view what);

// --- Server ----------------------------------------------------------------

absl::Status MemoryBudgetError(int64_t budget_bytes, absl::string_view way_out,
                               absl::Duration retry_after);
// A request that would take more memory than its RPC may, once it is parsed.
absl::Status RequestTooLargeError(int64_t limit_bytes);
// A span of shared memory, or a request for some, that contradicts itself or
// does not fit.
absl::Status RegionInvalidError(absl::string_view what);
// No shared memory by that name, or it is not the caller's, or there is none at
// all: one text for all of them.
absl::Status RegionNotFoundError();
// No more regions for this connection, no more connections, or no more memory.
absl::Status RegionLimitError(absl::string_view what);
// The limit of open calls is reached; `whose` is empty for the calls of all
// callers.
absl::Status CallLimitError(int64_t limit, absl::string_view whose);
// The workers are that far behind with what has arrived.
absl::Status OverloadedError(absl::Duration delay, absl::Duration limit,
                             absl::Duration retry_after);
// The limit of open tensors is reached.
absl::Status TensorCountError(int64_t limit, absl::Duration retry_after);
absl::Status DrainingError();
// The stream has been open for that long; another goes on. Ends the stream.
absl::Status StreamAgeError(absl::Duration limit);
// No credential came with the call.
absl::Status TokenMissingError();
// A credential that is unknown or has expired; never says which.
absl::Status TokenInvalidError();
// The caller is known but may not do this. `scope` is what it lacks.
absl::Status ScopeMissingError(absl::string_view scope);
// The caller may not write under the names of that model. Says nothing of what
// is there.
absl::Status ModelDeniedError(absl::string_view model);
// An open tensor made no progress for that long. Ends the stream.
absl::Status StreamIdleError(absl::Duration timeout);
// An address that could not be listened on.
// `why` is such as "address already in use".
absl::Status ListenError(absl::string_view address, absl::string_view why);
absl::Status ConfigInvalidError(absl::string_view what);
absl::Status SimdTargetError(absl::string_view got,
                             absl::string_view available);
// A defect of the server. The log has more under `request_id`.
absl::Status UnexpectedError(absl::string_view request_id);

}  // namespace quantd::core

#endif  // QUANTD_CORE_ERRORS_H_
