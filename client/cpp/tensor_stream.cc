#include "client/cpp/tensor_stream.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/answer_check.h"
#include "client/cpp/element_pairs.h"
#include "client/cpp/errors.h"
#include "client/cpp/exchange.h"
#include "client/cpp/retrying_stream.h"
#include "client/cpp/scale_feed.h"
#include "client/cpp/scale_receiver.h"
#include "client/cpp/shared_buffers.h"
#include "client/cpp/tensor.h"
#include "client/cpp/utf8.h"
#include "grpcpp/support/slice.h"

namespace quantd {
namespace {

using internal::Exchange;
using internal::Question;
using internal::ScaleFeed;
using internal::ScaleReceiver;
using internal::SharedBuffers;

void DescribeTensor(const Tensor& tensor, v1::TensorDescription* out) {
  *out->mutable_name() = tensor.name;
  out->set_element_type(static_cast<v1::ElementType>(tensor.element_type));
  for (const int64_t size : tensor.shape) out->add_shape(size);
}

// Invalid UTF-8 would break the message and with it the stream.
absl::Status CheckUtf8(const TensorName& name) {
  for (const std::string* part :
       {&name.model(), &name.revision(), &name.tensor()}) {
    if (!internal::IsValidUtf8(*part)) {
      return ArgumentInvalidError("expected names of valid UTF-8");
    }
  }
  return absl::OkStatus();
}

// The server would wait for the rest of a tensor that is shorter than its
// shape says.
absl::Status CheckDataSize(const Tensor& tensor,
                           const std::optional<ByteRange>& range,
                           uint64_t size_bytes) {
  uint64_t expected = size_bytes;
  if (range.has_value()) {
    if (range->begin_bytes > range->end_bytes ||
        range->end_bytes > size_bytes) {
      return ArgumentInvalidError(
          absl::StrCat("expected a range within ", size_bytes, " bytes, got [",
                       range->begin_bytes, ", ", range->end_bytes, ")"));
    }
    expected = range->end_bytes - range->begin_bytes;
  }
  if (tensor.data.size() != expected) {
    return ArgumentInvalidError(absl::StrCat(
        "expected ", expected, " bytes of data, got ", tensor.data.size()));
  }
  return absl::OkStatus();
}

// Checks a tensor of reals.
absl::Status CheckReals(const Tensor& tensor,
                        const std::optional<ByteRange>& range) {
  const absl::Status name_status = CheckUtf8(tensor.name);
  if (!name_status.ok()) return name_status;
  const absl::StatusOr<int64_t> count = ElementCount(tensor.shape);
  if (!count.ok()) return count.status();
  return CheckDataSize(
      tensor, range,
      static_cast<uint64_t>(*count * ElementSizeBytes(tensor.element_type)));
}

// Fills the alternative of a header's or candidate's oneof.
template <typename Message>
void SetSource(const EncodingSource& source, Message* message) {
  if (const auto* reference = std::get_if<v1::EncodingReference>(&source)) {
    *message->mutable_reference() = *reference;
  } else if (const auto* encoding = std::get_if<Encoding>(&source)) {
    *message->mutable_encoding() = *encoding;
  } else {
    *message->mutable_spec() = std::get<EncodingSpec>(source);
  }
}

// Leaves the scales out of an encoding that goes up, because they go beside it.
// `encoding` is null where there is none.
// Errors: ARGUMENT_INVALID.
absl::StatusOr<ScaleFeed> FeedScales(const Tensor& tensor, const Scales& scales,
                                     int64_t payload_bits, Encoding* encoding) {
  if (encoding == nullptr) {
    return ArgumentInvalidError("expected scales of an encoding alone");
  }
  *encoding = WithoutScales(*encoding, !scales.zero_point.empty());
  return ScaleFeed::Create(tensor.shape, *encoding, scales, payload_bits);
}

// Headers of parts are at most this part of what goes up.
constexpr uint64_t kHeaderShare = 32;
constexpr uint64_t kPartUnitBytes = 64;

// The size of parts that `wanted_bytes` becomes under headers of that size.
uint64_t PartBytes(int64_t wanted_bytes, size_t header_bytes) {
  const uint64_t size = std::max(static_cast<uint64_t>(wanted_bytes),
                                 kHeaderShare * header_bytes);
  return (size + kPartUnitBytes - 1) / kPartUnitBytes * kPartUnitBytes;
}

// Leaves storing the encoding to the first part.
void MoveStore(v1::QuantizeHeader* from, v1::QuantizeHeader* first_part) {
  first_part->set_store(from->store());
  from->clear_store();
}
void MoveStore(v1::DequantizeHeader*, v1::DequantizeHeader*) {}

// Sums the counts.
void AddSummary(const v1::QuantizeSummary& part, v1::QuantizeSummary* sum) {
  sum->set_count(sum->count() + part.count());
  sum->set_clipped_low_count(sum->clipped_low_count() +
                             part.clipped_low_count());
  sum->set_clipped_high_count(sum->clipped_high_count() +
                              part.clipped_high_count());
  sum->set_nan_count(sum->nan_count() + part.nan_count());
  sum->set_positive_infinity_count(sum->positive_infinity_count() +
                                   part.positive_infinity_count());
  sum->set_negative_infinity_count(sum->negative_infinity_count() +
                                   part.negative_infinity_count());
}
void AddSummary(const v1::DequantizeSummary& part, v1::DequantizeSummary* sum) {
  sum->set_count(sum->count() + part.count());
}

// The common part of Quantize and Dequantize: an output in the caller's memory
// or in a buffer of its own.
template <typename Header, typename Result>
class OutputExchange : public Exchange {
 public:
  template <typename Job>
  explicit OutputExchange(const Job& job)
      : question_(job.tensor, job.source),
        wants_encoding_(!job.omit_encoding),
        sink_(job.sink),
        caller_output_(job.output) {}

  std::string PartHeader(uint64_t begin_bytes) const override {
    if (!HasParts()) return request_header_;
    Header part = begin_bytes == 0 ? first_part_ : Header();
    // It is that of the first.
    if (begin_bytes > 0) part.set_omit_encoding(true);
    part.mutable_range()->set_begin_bytes(begin_bytes);
    part.mutable_range()->set_end_bytes(PartEnd(begin_bytes));
    // Messages one after another are their union.
    return absl::StrCat(request_header_, part.SerializeAsString());
  }

  bool NextScales(uint64_t end_bytes,
                  std::vector<std::string>* pieces) override {
    if (!scale_feed_.has_value()) return true;
    const std::optional<v1::ScaleChunk> chunk = scale_feed_->Next(end_bytes);
    if (!chunk.has_value()) return true;
    pieces->push_back(chunk->SerializeAsString());
    return false;
  }

  void RewindScales() override {
    if (scale_feed_.has_value()) scale_feed_->Rewind();
  }

  Result TakeResult() { return std::move(result_); }

 protected:
  // Lets the scales of the header's encoding go up beside the payload. False
  // when the job has failed.
  template <typename Job>
  bool SetScales(const Job& job, int64_t payload_bits, Header* header) {
    if (!job.scales.has_value()) return true;
    absl::StatusOr<ScaleFeed> feed = FeedScales(
        job.tensor, *job.scales, payload_bits,
        header->has_encoding() ? header->mutable_encoding() : nullptr);
    if (!feed.ok()) {
      Fail(feed.status());
      return false;
    }
    scale_feed_ = *std::move(feed);
    return true;
  }

  // Completes the header of a job without a spec, or of one that goes in one.
  template <typename Job>
  void SetRequest(const Job& job, bool may_split, int64_t part_bytes,
                  const SharedBuffers& shared_buffers, Header* header) {
    // By name all of the payload goes at once, and no scales before it.
    SetPayload(job.tensor.data,
               scale_feed_.has_value() ? nullptr : &shared_buffers);
    NameOutput(shared_buffers, header);
    may_split = may_split && !scale_feed_.has_value() &&
                !job.range.has_value() && !shares_output_ &&
                shared_payload().empty();
    if (may_split && payload_bytes() > static_cast<uint64_t>(part_bytes)) {
      part_bytes_wanted_ = part_bytes;
      first_part_.set_omit_encoding(job.omit_encoding);
      MoveStore(header, &first_part_);
      request_header_ = header->SerializeAsString();
      is_by_reference_ = header->has_reference();
      if (is_by_reference_) header_ = *header;
      SetPartBytes(PartBytes(part_bytes, request_header_.size()));
      return;
    }
    header->set_omit_encoding(job.omit_encoding);
    if (job.range.has_value()) {
      header->mutable_range()->set_begin_bytes(job.range->begin_bytes);
      header->mutable_range()->set_end_bytes(job.range->end_bytes);
      payload_offset_bytes_ = job.range->begin_bytes;
    }
    request_header_ = header->SerializeAsString();
  }

  absl::Status OnHeader(absl::string_view bytes) override {
    decltype(Result::header) header;
    if (!header.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return ResponseMalformedError("the header is not of this RPC");
    }
    const absl::Status status =
        internal::CheckHeader(question_,
                              {payload_offset_bytes_ + resume_bytes(),
                               payload_offset_bytes_ + PartEnd(resume_bytes())},
                              wants_encoding_ && resume_bytes() == 0, header);
    if (!status.ok()) return status;
    uint64_t begin = 0;
    uint64_t end = header.size_bytes();
    if (header.has_range()) {
      begin = header.range().begin_bytes();
      end = header.range().end_bytes();
    }
    const uint64_t size = HasParts() ? header.size_bytes() : end - begin;
    if (resume_bytes() == 0) {
      result_.header = std::move(header);
      if (!MakeRoom(size)) return absl::OkStatus();
      const absl::Status scales_status = OnEncoding(&result_.header);
      if (!scales_status.ok()) return scales_status;
    } else if (is_by_reference_ && header.etag() != result_.header.etag()) {
      is_replaced_ = true;
      Fail(EncodingReplacedError(result_.header.etag(), header.etag()));
      return absl::OkStatus();
    } else if (size != size_bytes_) {
      return ResponseMalformedError(absl::StrCat(
          "expected an output of ", size_bytes_, " bytes, got ", size));
    }
    output_.offset_bytes = begin;
    output_.bytes = room_;
    output_.size_bytes = size_bytes_;
    output_.sink = sink_ ? &sink_ : nullptr;
    if (HasParts()) {
      if (begin != joined_bytes_ || end > size ||
          (IsLastPart() && end != size)) {
        return ResponseMalformedError(
            absl::StrCat("expected bytes from ", joined_bytes_, " on of ", size,
                         ", got [", begin, ", ", end, ")"));
      }
      if (!sink_) output_.bytes = room_.subspan(begin, end - begin);
      output_.size_bytes = end - begin;
    }
    return absl::OkStatus();
  }

  absl::Status OnSummary(absl::string_view bytes,
                         uint64_t checksum_xxh3) override {
    decltype(Result::summary) summary;
    if (!summary.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      return ResponseMalformedError("the summary is not of this RPC");
    }
    if (!status().ok()) return absl::OkStatus();
    if (!shares_output_ && summary.checksum_xxh3() != checksum_xxh3) {
      Fail(ChecksumMismatchError(summary.checksum_xxh3(), checksum_xxh3));
      return absl::OkStatus();
    }
    const absl::Status scales_status = OnScaleSummary(summary, &result_);
    if (ErrorReason(scales_status) == "RESPONSE_MALFORMED") {
      return scales_status;
    }
    if (!scales_status.ok()) {
      Fail(scales_status);
      return absl::OkStatus();
    }
    if (!HasParts()) {
      result_.summary = std::move(summary);
    } else {
      AddSummary(summary, &result_.summary);
      joined_bytes_ += output_.size_bytes;
      if (!IsLastPart()) return absl::OkStatus();
      result_.summary.set_checksum_xxh3(JoinedChecksum());
      result_.header.mutable_range()->set_begin_bytes(0);
      result_.header.mutable_range()->set_end_bytes(joined_bytes_);
    }
    SetBytes(&result_, room_);
    return absl::OkStatus();
  }

  bool HasOutput() const override { return true; }

  // Takes over the encoding of the first header, before any scales.
  // Errors: RESPONSE_MALFORMED.
  virtual absl::Status OnEncoding(decltype(Result::header)*) {
    return absl::OkStatus();
  }
  // Errors: RESPONSE_MALFORMED, which ends the stream; those of the tensor.
  virtual absl::Status OnScaleSummary(const decltype(Result::summary)&,
                                      Result*) {
    return absl::OkStatus();
  }

  const Question& question() const { return question_; }

  void OnResume() override {
    if (resume_bytes() == 0 || is_replaced_) {
      Restart();
      is_replaced_ = false;
      result_ = Result();
      room_ = {};
      size_bytes_ = 0;
      joined_bytes_ = 0;
    } else if (is_by_reference_ && result_.header.has_encoding()) {
      // By now another one may go by that name, or not yet at the next server.
      is_by_reference_ = false;
      *header_.mutable_encoding() = result_.header.encoding();
      request_header_ = header_.SerializeAsString();
      SetPartBytes(PartBytes(part_bytes_wanted_, request_header_.size()));
    }
  }

 private:
  // Lets the server write an output that is shared.
  void NameOutput(const SharedBuffers& shared_buffers, Header* header) {
    std::optional<v1::SharedSpan> span = shared_buffers.Name(caller_output_);
    if (!span.has_value()) return;
    *header->mutable_output() = *std::move(span);
    shares_output_ = true;
  }

  // False when the caller's is too small.
  bool MakeRoom(size_t size) {
    size_bytes_ = size;
    if (sink_) return true;
    if (caller_output_.empty()) {
      result_.buffer.bytes.reset(new uint8_t[size]);
      result_.buffer.size_bytes = size;
      room_ = absl::MakeSpan(result_.buffer.bytes.get(), size);
    } else if (caller_output_.size() < size) {
      Fail(OutputTooSmallError(size, caller_output_.size()));
      return false;
    } else {
      room_ = caller_output_.subspan(0, size);
    }
    return true;
  }

  static void SetBytes(QuantizeResult* result, absl::Span<uint8_t> bytes) {
    result->codes = bytes;
  }
  static void SetBytes(DequantizeResult* result, absl::Span<uint8_t> bytes) {
    result->elements = bytes;
  }

  const Question question_;
  const bool wants_encoding_;
  // Empty where the output goes into memory.
  const Sink sink_;
  const absl::Span<uint8_t> caller_output_;
  // Set where scales go up beside the payload.
  std::optional<ScaleFeed> scale_feed_;
  Result result_;
  // For the whole output, unless there is a sink.
  absl::Span<uint8_t> room_;
  // Size of the whole output.
  uint64_t size_bytes_ = 0;

  // With parts: what only the first one's header says.
  Header first_part_;
  int64_t part_bytes_wanted_ = 0;
  // Header of all parts, where it has a reference.
  Header header_;
  bool is_by_reference_ = false;
  // The reference has become another encoding's.
  bool is_replaced_ = false;
  // Output of the parts that are answered.
  uint64_t joined_bytes_ = 0;
};

class QuantizeExchange final
    : public OutputExchange<v1::QuantizeHeader, QuantizeResult> {
 public:
  QuantizeExchange(const QuantizeJob& job, int64_t part_bytes,
                   const SharedBuffers& shared_buffers)
      : OutputExchange(job), scale_sinks_(job.scale_sinks) {
    const absl::Status status = CheckReals(job.tensor, job.range);
    if (!status.ok()) {
      Fail(status);
      return;
    }
    v1::QuantizeHeader header;
    DescribeTensor(job.tensor, header.mutable_tensor());
    SetSource(job.source, &header);
    header.set_store(job.store);
    header.set_nan_policy(job.nan_policy);
    // Chunks have the scales of elements, so without these there are none.
    const absl::Span<const int64_t> shape = job.tensor.shape;
    header.set_scales_in_chunks(job.scales_in_chunks &&
                                std::find(shape.begin(), shape.end(), 0) ==
                                    shape.end());
    header.mutable_outer_maximum()->Add(job.outer_maximum.begin(),
                                        job.outer_maximum.end());
    if (job.rounding.has_value()) *header.mutable_rounding() = *job.rounding;
    if (job.scales_in_chunks) scale_receiver_.emplace(scale_sinks_);
    if (!SetScales(job, 8 * ElementSizeBytes(job.tensor.element_type),
                   &header)) {
      return;
    }
    SetRequest(job,
               !std::holds_alternative<EncodingSpec>(job.source) &&
                   !job.scales_in_chunks && !job.rounding.has_value(),
               part_bytes, shared_buffers, &header);
  }

 protected:
  absl::Status OnEncoding(v1::QuantizeResponseHeader* header) override {
    if (!scale_receiver_.has_value()) return absl::OkStatus();
    const auto& sizes = question().tensor.shape();
    const std::vector<int64_t> shape(sizes.begin(), sizes.end());
    return scale_receiver_->Begin(shape, header->mutable_encoding());
  }

  absl::Status OnScales(absl::string_view scales) override {
    if (scale_receiver_.has_value()) return scale_receiver_->Accept(scales);
    return ResponseMalformedError("scales that were not asked for");
  }

  absl::Status OnScaleSummary(const v1::QuantizeSummary& summary,
                              QuantizeResult* result) override {
    if (!scale_receiver_.has_value()) return absl::OkStatus();
    const absl::Status status = scale_receiver_->Finish(summary);
    if (!status.ok()) return status;
    result->scales = scale_receiver_->TakeBuffers();
    if (!summary.etag().empty()) result->header.set_etag(summary.etag());
    return absl::OkStatus();
  }

 private:
  const ScaleSinks scale_sinks_;
  // With scales_in_chunks.
  std::optional<ScaleReceiver> scale_receiver_;
};

class DequantizeExchange final
    : public OutputExchange<v1::DequantizeHeader, DequantizeResult> {
 public:
  DequantizeExchange(const DequantizeJob& job, int64_t part_bytes,
                     const SharedBuffers& shared_buffers)
      : OutputExchange(job) {
    const absl::Status status = Check(job);
    if (!status.ok()) {
      Fail(status);
      return;
    }
    v1::DequantizeHeader header;
    DescribeTensor(job.tensor, header.mutable_tensor());
    if (const auto* encoding = std::get_if<Encoding>(&job.source)) {
      *header.mutable_encoding() = *encoding;
    } else {
      *header.mutable_reference() = std::get<v1::EncodingReference>(job.source);
    }
    const absl::StatusOr<FormatInfo> format =
        GetFormatInfo(header.encoding().format());
    if (!SetScales(job, format.ok() ? format->storage_bits : 8, &header)) {
      return;
    }
    SetRequest(job, /*may_split=*/true, part_bytes, shared_buffers, &header);
  }

 private:
  static absl::Status Check(const DequantizeJob& job) {
    const absl::Status name_status = CheckUtf8(job.tensor.name);
    if (!name_status.ok()) return name_status;
    const absl::StatusOr<int64_t> count = ElementCount(job.tensor.shape);
    if (!count.ok()) return count.status();
    if (std::holds_alternative<EncodingSpec>(job.source)) {
      return ArgumentInvalidError("expected an encoding, got a spec");
    }
    const auto* encoding = std::get_if<Encoding>(&job.source);
    if (encoding == nullptr) return absl::OkStatus();
    // The server words it better when it does not know the format.
    const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding->format());
    if (!format.ok()) return absl::OkStatus();
    return CheckDataSize(job.tensor, job.range,
                         static_cast<uint64_t>(format->SizeBytes(*count)));
  }
};

// The common part of Calibrate and Evaluate: an answer of nothing but a
// summary.
template <typename Summary>
class SummaryExchange : public Exchange {
 public:
  explicit SummaryExchange(const TensorName& name) : name_(name) {}

  Summary TakeResult() { return std::move(summary_); }

 protected:
  absl::Status OnHeader(absl::string_view) override { return absl::OkStatus(); }
  absl::Status OnSummary(absl::string_view summary, uint64_t) override {
    if (!summary_.ParseFromArray(summary.data(),
                                 static_cast<int>(summary.size()))) {
      return ResponseMalformedError("the summary is not of this RPC");
    }
    const absl::Status status = internal::CheckName(name_, summary_.name());
    return status.ok() ? CheckSummary(summary_) : status;
  }
  // Errors: RESPONSE_MALFORMED.
  virtual absl::Status CheckSummary(const Summary& summary) const = 0;
  bool HasOutput() const override { return false; }
  void OnResume() override { summary_.Clear(); }

 private:
  const TensorName name_;
  Summary summary_;
};

// Key of contributions that go one after another: one that arrived behind a
// later one would not be counted.
std::string OrderKey(const TensorName& name, const std::string& source) {
  v1::TensorName key = name;
  if (key.revision().empty()) key.set_revision("main");
  return absl::StrCat(key.SerializeAsString(), source);
}

class CalibrateExchange final : public SummaryExchange<CalibrateResult> {
 public:
  CalibrateExchange(const CalibrateJob& job,
                    const SharedBuffers& shared_buffers)
      : SummaryExchange(job.tensor.name) {
    const absl::Status status = CheckReals(job.tensor, std::nullopt);
    if (!status.ok()) {
      Fail(status);
      return;
    }
    v1::CalibrateHeader header;
    DescribeTensor(job.tensor, header.mutable_tensor());
    if (job.spec.has_value()) {
      *header.mutable_spec() = *job.spec;
      question_ = Question(job.tensor, *job.spec);
    }
    if (job.contribution.has_value()) {
      *header.mutable_contribution() = *job.contribution;
      order_key_ = OrderKey(job.tensor.name, job.contribution->source());
    }
    request_header_ = header.SerializeAsString();
    SetPayload(job.tensor.data, &shared_buffers);
  }

 protected:
  absl::Status CheckSummary(const CalibrateResult& summary) const override {
    if (!question_.has_value()) return absl::OkStatus();
    return internal::CheckEncoding(*question_,
                                   summary.stored_encoding().encoding());
  }

 private:
  // Set where there is a spec.
  std::optional<Question> question_;
};

class EvaluateExchange final : public SummaryExchange<EvaluateResult> {
 public:
  EvaluateExchange(const EvaluateJob& job, const SharedBuffers& shared_buffers)
      : SummaryExchange(job.tensor.name) {
    absl::Status status = CheckReals(job.tensor, std::nullopt);
    Tensor described = job.tensor;
    if (status.ok() && job.reference.has_value()) {
      described.element_type = job.reference->element_type;
      described.data = job.reference->data;
      status = CheckReals(described, std::nullopt);
      described.element_type = internal::PairType(job.reference->element_type,
                                                  job.tensor.element_type);
    }
    if (!status.ok()) {
      Fail(status);
      return;
    }
    v1::EvaluateHeader header;
    DescribeTensor(described, header.mutable_tensor());
    for (const EvaluateCandidate& candidate : job.candidates) {
      v1::EvaluateCandidate* const added = header.add_candidates();
      SetSource(candidate.source, added);
      added->set_label(candidate.label);
      added->mutable_outer_maximum()->Add(candidate.outer_maximum.begin(),
                                          candidate.outer_maximum.end());
      if (candidate.scales.has_value()) {
        absl::StatusOr<ScaleFeed> feed = FeedScales(
            job.tensor, *candidate.scales,
            8 * ElementSizeBytes(job.tensor.element_type),
            added->has_encoding() ? added->mutable_encoding() : nullptr);
        if (!feed.ok()) {
          Fail(feed.status());
          return;
        }
        scale_feeds_.push_back(
            {static_cast<uint32_t>(candidates_.size()), *std::move(feed)});
      }
      candidates_.push_back(
          {candidate.label, Question(job.tensor, candidate.source),
           std::holds_alternative<EncodingSpec>(candidate.source)});
    }
    header.set_per_scale_index(job.per_scale_index);
    header.set_with_distribution(job.with_distribution);
    header.set_comparison(job.reference.has_value());
    if (job.inputs.has_value()) *header.mutable_inputs() = *job.inputs;
    header.set_omit_encodings(job.omit_encodings);
    header.mutable_metrics()->Add(job.metrics.begin(), job.metrics.end());
    omits_encodings_ = job.omit_encodings;
    request_header_ = header.SerializeAsString();
    if (!job.reference.has_value()) {
      SetPayload(job.tensor.data,
                 scale_feeds_.empty() ? &shared_buffers : nullptr);
      return;
    }
    pair_bytes_ =
        2 * static_cast<uint64_t>(ElementSizeBytes(described.element_type));
    reference_ = *job.reference;
    test_ = {job.tensor.element_type, job.tensor.data};
    SetPayloadBytes(pair_bytes_ *
                    (test_.data.size() / static_cast<uint64_t>(ElementSizeBytes(
                                             test_.element_type))));
  }

  // Pairs are made as they go up, so that they never are in memory all at once.
  grpc::Slice PayloadSlice(uint64_t begin_bytes,
                           uint64_t size_bytes) const override {
    if (pair_bytes_ == 0) {
      return Exchange::PayloadSlice(begin_bytes, size_bytes);
    }
    // Chunks are whole pairs.
    grpc::Slice slice(size_bytes);
    internal::WritePairs(reference_, test_, begin_bytes / pair_bytes_,
                         size_bytes / pair_bytes_,
                         {const_cast<uint8_t*>(slice.begin()), slice.size()});
    return slice;
  }

  bool NextScales(uint64_t end_bytes,
                  std::vector<std::string>* pieces) override {
    for (auto& [candidate, feed] : scale_feeds_) {
      std::optional<v1::ScaleChunk> chunk = feed.Next(end_bytes);
      if (!chunk.has_value()) continue;
      v1::CandidateScales scales;
      scales.set_candidate(candidate);
      *scales.mutable_scales() = *std::move(chunk);
      pieces->push_back(scales.SerializeAsString());
      return false;
    }
    return true;
  }

  void RewindScales() override {
    for (auto& entry : scale_feeds_) entry.second.Rewind();
  }

 protected:
  absl::Status CheckSummary(const EvaluateResult& summary) const override {
    if (static_cast<size_t>(summary.candidates_size()) != candidates_.size()) {
      return ResponseMalformedError(
          absl::StrCat("expected metrics of ", candidates_.size(),
                       " candidates, got ", summary.candidates_size()));
    }
    for (size_t i = 0; i < candidates_.size(); ++i) {
      const Candidate& candidate = candidates_[i];
      const v1::CandidateMetrics& metrics =
          summary.candidates(static_cast<int>(i));
      if (metrics.label() != candidate.label) {
        return ResponseMalformedError(
            absl::StrCat("expected label \"", candidate.label, "\", got \"",
                         metrics.label(), "\""));
      }
      const bool is_left_out = omits_encodings_ && !metrics.has_encoding();
      if (!candidate.is_spec || is_left_out) continue;
      const absl::Status status =
          internal::CheckEncoding(candidate.question, metrics.encoding());
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  struct Candidate {
    std::string label;
    Question question;
    // Whose encoding comes back.
    bool is_spec;
  };
  std::vector<Candidate> candidates_;
  bool omits_encodings_ = false;
  // Candidates, by number, whose scales go up beside the elements.
  std::vector<std::pair<uint32_t, ScaleFeed>> scale_feeds_;
  // Size of a pair of elements in a comparison; 0 without one.
  uint64_t pair_bytes_ = 0;
  Reference reference_;
  Reference test_;
};

std::unique_ptr<QuantizeExchange> MakeExchange(
    const QuantizeJob& job, int64_t part_bytes,
    const SharedBuffers& shared_buffers) {
  return std::make_unique<QuantizeExchange>(job, part_bytes, shared_buffers);
}
std::unique_ptr<DequantizeExchange> MakeExchange(
    const DequantizeJob& job, int64_t part_bytes,
    const SharedBuffers& shared_buffers) {
  return std::make_unique<DequantizeExchange>(job, part_bytes, shared_buffers);
}
std::unique_ptr<CalibrateExchange> MakeExchange(
    const CalibrateJob& job, int64_t, const SharedBuffers& shared_buffers) {
  return std::make_unique<CalibrateExchange>(job, shared_buffers);
}
std::unique_ptr<EvaluateExchange> MakeExchange(
    const EvaluateJob& job, int64_t, const SharedBuffers& shared_buffers) {
  return std::make_unique<EvaluateExchange>(job, shared_buffers);
}

}  // namespace

template <typename Job, typename Result>
TensorStream<Job, Result>::TensorStream(
    std::unique_ptr<internal::RetryingStream> stream)
    : stream_(std::move(stream)) {}

template <typename Job, typename Result>
TensorStream<Job, Result>::~TensorStream() = default;

template <typename Job, typename Result>
void TensorStream<Job, Result>::Send(const Job& job, bool is_last) {
  stream_->Send(MakeExchange(job, stream_->options().part_bytes,
                             stream_->shared_buffers()),
                is_last);
}

template <typename Job, typename Result>
absl::StatusOr<Result> TensorStream<Job, Result>::Receive() {
  if (stream_->pending_count() == 0) {
    return ArgumentInvalidError("no tensor was sent");
  }
  const std::unique_ptr<Exchange> exchange = stream_->Receive();
  if (!exchange->status().ok()) return exchange->status();
  using ExchangeOfJob = typename decltype(MakeExchange(
      std::declval<Job>(), int64_t{},
      std::declval<SharedBuffers>()))::element_type;
  return static_cast<ExchangeOfJob*>(exchange.get())->TakeResult();
}

template <typename Job, typename Result>
int64_t TensorStream<Job, Result>::pending_count() const {
  return stream_->pending_count();
}

template class TensorStream<QuantizeJob, QuantizeResult>;
template class TensorStream<DequantizeJob, DequantizeResult>;
template class TensorStream<CalibrateJob, CalibrateResult>;
template class TensorStream<EvaluateJob, EvaluateResult>;

}  // namespace quantd
