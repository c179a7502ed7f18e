#include "server/wire/contribution_state.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/statistics/histogram.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/message.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/byte_buffer.h"
#include "quantd/v1/statistics.pb.h"
#include "server/wire/parsed_bytes.h"
#include "server/wire/statistics_proto.h"

namespace quantd::server {
namespace {

using ::google::protobuf::internal::WireFormatLite;
using ::google::protobuf::io::CodedInputStream;

constexpr auto kDelimited = WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
// Most bytes of the fields beside the sums: the exponents of the most features
// there are, in the longest form.
constexpr size_t kMaxHeadBytes = size_t{4} << 20;
// The message, and the state that it becomes.
constexpr int64_t kStatisticsCopies = 2;

template <typename... Parts>
absl::Status AddedStateInvalid(const Parts&... what) {
  return core::StatisticsInvalidError(absl::StrCat(what...));
}

absl::Status Malformed() {
  return AddedStateInvalid("the bytes are not a ContributionState");
}

uint32_t TagOf(int field) { return WireFormatLite::MakeTag(field, kDelimited); }

// Reads what a length stands in front of.
bool ReadDelimited(CodedInputStream* in, absl::string_view bytes,
                   absl::string_view* value) {
  int size = 0;
  if (!in->ReadVarintSizeAsInt(&size)) return false;
  const int begin = in->CurrentPosition();
  if (!in->Skip(size)) return false;
  *value = bytes.substr(begin, size);
  return true;
}

CodedInputStream StreamOf(absl::string_view bytes) {
  return CodedInputStream(reinterpret_cast<const uint8_t*>(bytes.data()),
                          static_cast<int>(bytes.size()));
}

bool HasUnknownFields(const google::protobuf::Message& message) {
  return !message.GetReflection()->GetUnknownFields(message).empty();
}

absl::Status SplitGram(absl::string_view bytes,
                       ContributionStateBytes* contribution) {
  const uint32_t sums_tag = TagOf(v1::GramState::kCodeSumFieldNumber);
  CodedInputStream in = StreamOf(bytes);
  std::string head_bytes;
  for (;;) {
    const int begin = in.CurrentPosition();
    const uint32_t tag = in.ReadTag();
    if (tag == 0) break;
    if (tag == sums_tag) {
      absl::string_view sums;
      if (!ReadDelimited(&in, bytes, &sums)) return Malformed();
      if (sums.size() % sizeof(int64_t) != 0) {
        return AddedStateInvalid("the sums of the Gram state take ",
                                 sums.size(), " bytes, expected 8 for each");
      }
      contribution->gram_sums.push_back(sums);
      continue;
    }
    if (!WireFormatLite::SkipField(&in, tag)) return Malformed();
    const int end = in.CurrentPosition();
    absl::StrAppend(&head_bytes, bytes.substr(begin, end - begin));
    if (head_bytes.size() > kMaxHeadBytes) {
      return AddedStateInvalid("the Gram state has more than ", kMaxHeadBytes,
                               " bytes beside its sums, which it packs");
    }
  }
  v1::GramState head;
  if (!in.ConsumedEntireMessage() || !head.ParseFromString(head_bytes)) {
    return Malformed();
  }
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  if (head.code_sum_size() != 0 || head.part_size() > kMax ||
      head.rows() > kMax || head.left_out_rows() > kMax ||
      head.clipped_count() > kMax || HasUnknownFields(head)) {
    return AddedStateInvalid(
        "the Gram state has sums that are not packed, a count above ", kMax,
        ", or a field that is not known");
  }
  core::GramState::Parts& parts = contribution->gram.emplace();
  parts.exponents.assign(head.step_exponent().begin(),
                         head.step_exponent().end());
  parts.part_size = static_cast<int64_t>(head.part_size());
  parts.rows = static_cast<int64_t>(head.rows());
  parts.left_out_rows = static_cast<int64_t>(head.left_out_rows());
  parts.clipped = static_cast<int64_t>(head.clipped_count());
  return absl::OkStatus();
}

// Memory of `bytes` as a message of that type.
absl::StatusOr<int64_t> MessageBytes(absl::string_view bytes,
                                     const google::protobuf::Descriptor& type) {
  grpc::Slice slice(bytes.data(), bytes.size(), grpc::Slice::STATIC_SLICE);
  grpc::ByteBuffer buffer(&slice, 1);
  constexpr int64_t kNoLimit = int64_t{1} << 60;
  const absl::StatusOr<int64_t> parsed = ParsedBytes(&buffer, type, kNoLimit);
  if (!parsed.ok()) return Malformed();
  return *parsed;
}

}  // namespace

absl::StatusOr<ContributionStateBytes> SplitContributionState(
    absl::string_view bytes) {
  const uint32_t statistics_tag =
      TagOf(v1::ContributionState::kStatisticsFieldNumber);
  const uint32_t gram_tag = TagOf(v1::ContributionState::kGramFieldNumber);
  const uint32_t moments_tag =
      TagOf(v1::ContributionState::kMomentsFieldNumber);
  ContributionStateBytes contribution;
  bool has_statistics = false;
  CodedInputStream in = StreamOf(bytes);
  while (const uint32_t tag = in.ReadTag()) {
    absl::string_view value;
    if ((tag != statistics_tag && tag != gram_tag && tag != moments_tag) ||
        !ReadDelimited(&in, bytes, &value)) {
      return Malformed();
    }
    const bool has_it = tag == statistics_tag ? has_statistics
                        : tag == gram_tag     ? contribution.gram.has_value()
                                          : contribution.moments.has_value();
    if (has_it)
      return AddedStateInvalid("a part of the ContributionState comes twice");
    if (tag == statistics_tag) {
      has_statistics = true;
      contribution.statistics = value;
    } else if (tag == moments_tag) {
      contribution.moments = value;
    } else if (absl::Status s = SplitGram(value, &contribution); !s.ok()) {
      return s;
    }
  }
  if (!in.ConsumedEntireMessage()) return Malformed();
  if (!has_statistics)
    return AddedStateInvalid("the ContributionState has no statistics");
  absl::StatusOr<int64_t> parsed =
      MessageBytes(contribution.statistics, *v1::StatisticsState::descriptor());
  if (!parsed.ok()) return parsed.status();
  contribution.statistics_memory_bytes = kStatisticsCopies * *parsed;
  if (contribution.moments.has_value()) {
    parsed =
        MessageBytes(*contribution.moments, *v1::FeatureMoments::descriptor());
    if (!parsed.ok()) return parsed.status();
    contribution.moments_memory_bytes = *parsed;
  }
  return contribution;
}

absl::StatusOr<core::StatisticsState> ReadContributedStatistics(
    const ContributionStateBytes& bytes, absl::Span<const int64_t> shape,
    const core::TensorSlice* slice) {
  v1::StatisticsState proto;
  if (!proto.ParseFromArray(bytes.statistics.data(),
                            static_cast<int>(bytes.statistics.size()))) {
    return Malformed();
  }
  absl::StatusOr<core::StatisticsState> state = StateFromProto(proto);
  if (!state.ok()) return state;
  if (state->shape != shape) {
    return AddedStateInvalid(
        "the state has the shape [", absl::StrJoin(state->shape, ", "),
        "], expected [", absl::StrJoin(shape, ", "), "], that of the header");
  }
  if (absl::Status s = core::CheckElementCounts(*state, slice); !s.ok()) {
    return s;
  }
  return state;
}

absl::StatusOr<core::AxisMoments> ReadContributedMoments(
    const ContributionStateBytes& bytes, int64_t axis, int64_t feature_count) {
  v1::FeatureMoments message;
  if (!message.ParseFromArray(bytes.moments->data(),
                              static_cast<int>(bytes.moments->size()))) {
    return Malformed();
  }
  if (int64_t{message.axis()} != axis ||
      int64_t{message.count_size()} != feature_count) {
    return AddedStateInvalid("the moments are of ", message.count_size(),
                             " features along axis ", message.axis(),
                             ", expected ", feature_count, " along axis ", axis,
                             ", those of the header");
  }
  if (HasUnknownFields(message) || HasUnknownFields(message.sum()) ||
      HasUnknownFields(message.square_sum())) {
    return AddedStateInvalid("the moments have a field that is not known");
  }
  return MomentsFromProto(message);
}

core::GramState::Parts ReadContributedGram(
    const ContributionStateBytes& bytes) {
  core::GramState::Parts parts = *bytes.gram;
  size_t sum_count = 0;
  for (const absl::string_view sums : bytes.gram_sums) {
    sum_count += sums.size() / sizeof(int64_t);
  }
  parts.code_sums.resize(sum_count);
  int64_t* to = parts.code_sums.data();
  for (const absl::string_view sums : bytes.gram_sums) {
    if (sums.empty()) continue;
    std::memcpy(to, sums.data(), sums.size());
    to += sums.size() / sizeof(int64_t);
  }
  return parts;
}

absl::Status CheckGramFits(const core::GramState& gram,
                           const core::TensorStatistics& statistics) {
  const core::ElementCounts& counts = statistics.counts();
  const int64_t features = gram.feature_count();
  const int64_t all_rows = gram.rows() + gram.left_out_rows();
  // Each row that is left out has an element that is not finite, and every such
  // element is in one of them.
  const int64_t non_finite =
      counts.nan + counts.positive_infinity + counts.negative_infinity;
  if (counts.total % features != 0 || all_rows != counts.total / features ||
      gram.left_out_rows() > non_finite ||
      (non_finite + features - 1) / features > gram.left_out_rows()) {
    return AddedStateInvalid("the Gram state is of ", gram.rows(), " rows and ",
                             gram.left_out_rows(), " left out, with ", features,
                             " features each, which ", counts.total,
                             " elements, ", non_finite,
                             " of them not finite, do not give");
  }
  double gram_squares = 0;
  double step_squares = 0;
  for (int64_t i = 0; i < features; ++i) {
    const int exponent = 2 * gram.exponents()[i];
    gram_squares +=
        std::ldexp(static_cast<double>(gram.code_sum(i, i)), exponent);
    step_squares += std::ldexp(1.0, exponent);
  }
  double squares = 0;
  for (const core::Histogram& histogram : statistics.histograms()) {
    squares += core::HistogramMoments(histogram).square_sum;
  }
  // The codes of an element that is not limited are off by half a step at most,
  // so that the roots of both sums are apart by no more than the root of the
  // sum of these errors squared.
  constexpr double kRounding = 1e-9;
  const double root = std::sqrt(squares);
  const double apart =
      std::sqrt(static_cast<double>(gram.rows()) * step_squares) / 2 +
      kRounding * root;
  const bool has_all = gram.clipped() == 0 && gram.left_out_rows() == 0;
  const double gram_root = std::sqrt(gram_squares);
  if (gram_root > root + apart || (has_all && gram_root < root - apart)) {
    return AddedStateInvalid(
        "the squares in the Gram state add up to ", gram_squares,
        ", and those of the elements to ", squares,
        ", expected the same but for what the steps round");
  }
  return absl::OkStatus();
}

}  // namespace quantd::server
