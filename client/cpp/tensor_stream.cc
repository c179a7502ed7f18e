#include "client/cpp/tensor_stream.h"

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
#include "client/cpp/errors.h"
#include "client/cpp/exchange.h"
#include "client/cpp/retrying_stream.h"
#include "client/cpp/shared_memory.h"
#include "client/cpp/tensor.h"
#include "client/cpp/utf8.h"

namespace quantd {
namespace {

using internal::Exchange;
using internal::SharedBuffers;

void DescribeTensor(const Tensor& tensor, v1::TensorDescription* out) {
  *out->mutable_name() = tensor.name;
  out->set_element_type(static_cast<v1::ElementType>(tensor.element_type));
  for (const int64_t size : tensor.shape) out->add_shape(size);
}

// Invalid UTF-8 would break the message and with it the stream.
absl::Status CheckName(const TensorName& name) {
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

// Checks a tensor of reals, or several of one shape whose data come together.
absl::Status CheckReals(const Tensor& tensor,
                        const std::optional<ByteRange>& range,
                        int64_t tensor_count = 1) {
  const absl::Status name_status = CheckName(tensor.name);
  if (!name_status.ok()) return name_status;
  const absl::StatusOr<int64_t> count = ElementCount(tensor.shape);
  if (!count.ok()) return count.status();
  return CheckDataSize(
      tensor, range,
      static_cast<uint64_t>(tensor_count * *count *
                            ElementSizeBytes(tensor.element_type)));
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

// What Quantize and Dequantize share: an output in the caller's memory or in
// a buffer of its own.
template <typename Result>
class OutputExchange : public Exchange {
 public:
  explicit OutputExchange(absl::Span<uint8_t> output,
                          uint64_t most_output_bytes)
      : caller_output_(output), most_output_bytes_(most_output_bytes) {}

  Result TakeResult() { return std::move(result_); }

 protected:
  absl::Status OnHeader(absl::string_view header) override {
    if (!result_.header.ParseFromArray(header.data(),
                                       static_cast<int>(header.size()))) {
      return ResponseMalformedError("the header is not of this RPC");
    }
    uint64_t begin = 0;
    uint64_t end = result_.header.size_bytes();
    if (result_.header.has_range()) {
      begin = result_.header.range().begin_bytes();
      end = result_.header.range().end_bytes();
    }
    if (begin > end || end - begin > most_output_bytes_) {
      return ResponseMalformedError(
          absl::StrCat("expected an output of at most ", most_output_bytes_,
                       " bytes, got [", begin, ", ", end, ")"));
    }
    const size_t size = end - begin;
    output_.offset_bytes = begin;
    if (caller_output_.empty()) {
      result_.buffer.bytes.reset(new uint8_t[size]);
      result_.buffer.size_bytes = size;
      output_.bytes = absl::MakeSpan(result_.buffer.bytes.get(), size);
    } else if (caller_output_.size() < size) {
      Fail(OutputTooSmallError(size, caller_output_.size()));
    } else {
      output_.bytes = caller_output_.subspan(0, size);
    }
    return absl::OkStatus();
  }

  absl::Status OnSummary(absl::string_view summary,
                         uint64_t checksum_xxh3) override {
    if (!result_.summary.ParseFromArray(summary.data(),
                                        static_cast<int>(summary.size()))) {
      return ResponseMalformedError("the summary is not of this RPC");
    }
    if (!status().ok()) return absl::OkStatus();
    if (!shares_output_ && result_.summary.checksum_xxh3() != checksum_xxh3) {
      Fail(ChecksumMismatchError(result_.summary.checksum_xxh3(),
                                 checksum_xxh3));
    }
    SetBytes(&result_, output_.bytes);
    return absl::OkStatus();
  }

  bool HasOutput() const override { return true; }
  void OnReset() override { result_ = Result(); }

  // Lets the server write an output that is shared.
  template <typename Header>
  void NameOutput(const SharedBuffers& shared_buffers, Header* header) {
    std::optional<v1::SharedSpan> span = shared_buffers.Name(caller_output_);
    if (!span.has_value()) return;
    *header->mutable_output() = *std::move(span);
    shares_output_ = true;
  }

 private:
  static void SetBytes(QuantizeResult* result, absl::Span<uint8_t> bytes) {
    result->codes = bytes;
  }
  static void SetBytes(DequantizeResult* result, absl::Span<uint8_t> bytes) {
    result->elements = bytes;
  }

  const absl::Span<uint8_t> caller_output_;
  const uint64_t most_output_bytes_;
  Result result_;
};

class QuantizeExchange final : public OutputExchange<QuantizeResult> {
 public:
  // Codes are of at most 16 bits, and as many as elements.
  QuantizeExchange(const QuantizeJob& job, const SharedBuffers& shared_buffers)
      : OutputExchange(job.output,
                       job.tensor.data.size() /
                           ElementSizeBytes(job.tensor.element_type) * 2) {
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
    header.set_omit_encoding(job.omit_encoding);
    if (job.range.has_value()) {
      header.mutable_range()->set_begin_bytes(job.range->begin_bytes);
      header.mutable_range()->set_end_bytes(job.range->end_bytes);
      payload_offset_bytes_ = job.range->begin_bytes;
    }
    NameOutput(shared_buffers, &header);
    request_header_ = header.SerializeAsString();
    SetPayload(job.tensor.data, shared_buffers);
  }
};

class DequantizeExchange final : public OutputExchange<DequantizeResult> {
 public:
  // A byte holds at most four codes, an element takes at most 8 bytes.
  DequantizeExchange(const DequantizeJob& job,
                     const SharedBuffers& shared_buffers)
      : OutputExchange(job.output, job.tensor.data.size() * 4 * 8) {
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
    header.set_omit_encoding(job.omit_encoding);
    if (job.range.has_value()) {
      header.mutable_range()->set_begin_bytes(job.range->begin_bytes);
      header.mutable_range()->set_end_bytes(job.range->end_bytes);
      payload_offset_bytes_ = job.range->begin_bytes;
    }
    NameOutput(shared_buffers, &header);
    request_header_ = header.SerializeAsString();
    SetPayload(job.tensor.data, shared_buffers);
  }

 private:
  static absl::Status Check(const DequantizeJob& job) {
    const absl::Status name_status = CheckName(job.tensor.name);
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

// What Calibrate and Evaluate share: an answer of nothing but a summary.
template <typename Summary>
class SummaryExchange : public Exchange {
 public:
  Summary TakeResult() { return std::move(summary_); }

 protected:
  absl::Status OnHeader(absl::string_view) override { return absl::OkStatus(); }
  absl::Status OnSummary(absl::string_view summary, uint64_t) override {
    if (!summary_.ParseFromArray(summary.data(),
                                 static_cast<int>(summary.size()))) {
      return ResponseMalformedError("the summary is not of this RPC");
    }
    return absl::OkStatus();
  }
  bool HasOutput() const override { return false; }
  void OnReset() override { summary_.Clear(); }

 private:
  Summary summary_;
};

class CalibrateExchange final : public SummaryExchange<CalibrateResult> {
 public:
  CalibrateExchange(const CalibrateJob& job,
                    const SharedBuffers& shared_buffers) {
    const absl::Status status = CheckReals(job.tensor, std::nullopt);
    if (!status.ok()) {
      Fail(status);
      return;
    }
    v1::CalibrateHeader header;
    DescribeTensor(job.tensor, header.mutable_tensor());
    if (job.spec.has_value()) *header.mutable_spec() = *job.spec;
    if (job.contribution.has_value()) {
      *header.mutable_contribution() = *job.contribution;
    }
    request_header_ = header.SerializeAsString();
    SetPayload(job.tensor.data, shared_buffers);
  }
};

class EvaluateExchange final : public SummaryExchange<EvaluateResult> {
 public:
  EvaluateExchange(const EvaluateJob& job,
                   const SharedBuffers& shared_buffers) {
    const absl::Status status =
        CheckReals(job.tensor, std::nullopt, job.comparison ? 2 : 1);
    if (!status.ok()) {
      Fail(status);
      return;
    }
    v1::EvaluateHeader header;
    DescribeTensor(job.tensor, header.mutable_tensor());
    for (const EvaluateCandidate& candidate : job.candidates) {
      v1::EvaluateCandidate* const added = header.add_candidates();
      SetSource(candidate.source, added);
      added->set_label(candidate.label);
    }
    header.set_per_scale_index(job.per_scale_index);
    header.set_with_distribution(job.with_distribution);
    header.set_comparison(job.comparison);
    request_header_ = header.SerializeAsString();
    SetPayload(job.tensor.data, shared_buffers);
  }
};

std::unique_ptr<QuantizeExchange> MakeExchange(
    const QuantizeJob& job, const SharedBuffers& shared_buffers) {
  return std::make_unique<QuantizeExchange>(job, shared_buffers);
}
std::unique_ptr<DequantizeExchange> MakeExchange(
    const DequantizeJob& job, const SharedBuffers& shared_buffers) {
  return std::make_unique<DequantizeExchange>(job, shared_buffers);
}
std::unique_ptr<CalibrateExchange> MakeExchange(
    const CalibrateJob& job, const SharedBuffers& shared_buffers) {
  return std::make_unique<CalibrateExchange>(job, shared_buffers);
}
std::unique_ptr<EvaluateExchange> MakeExchange(
    const EvaluateJob& job, const SharedBuffers& shared_buffers) {
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
  stream_->Send(MakeExchange(job, stream_->shared_buffers()), is_last);
}

template <typename Job, typename Result>
absl::StatusOr<Result> TensorStream<Job, Result>::Receive() {
  if (stream_->pending_count() == 0) {
    return ArgumentInvalidError("no tensor was sent");
  }
  const std::unique_ptr<Exchange> exchange = stream_->Receive();
  if (!exchange->status().ok()) return exchange->status();
  using ExchangeOfJob = typename decltype(MakeExchange(
      std::declval<Job>(), std::declval<SharedBuffers>()))::element_type;
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
