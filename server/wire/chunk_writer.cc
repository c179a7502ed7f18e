#include "server/wire/chunk_writer.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/message_lite.h"
#include "google/protobuf/wire_format_lite.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/wire/status.h"

namespace quantd::server {
namespace {

using ::google::protobuf::internal::WireFormatLite;
using ::google::protobuf::io::CodedOutputStream;

constexpr int kHeaderOut = v1::QuantizeResponse::kHeaderFieldNumber;
constexpr int kOffsetOut = v1::QuantizeResponse::kOffsetFieldNumber;
constexpr int kDataOut = v1::QuantizeResponse::kDataFieldNumber;
constexpr int kSummaryOut = v1::QuantizeResponse::kSummaryFieldNumber;
constexpr int kError = v1::QuantizeResponse::kErrorFieldNumber;
constexpr int kScalesOut = v1::QuantizeResponse::kScalesFieldNumber;

static_assert(v1::DequantizeResponse::kHeaderFieldNumber == kHeaderOut);
static_assert(v1::DequantizeResponse::kOffsetFieldNumber == kOffsetOut);
static_assert(v1::DequantizeResponse::kDataFieldNumber == kDataOut);

template <typename Response>
constexpr bool EndsAlike() {
  return Response::kSummaryFieldNumber == kSummaryOut &&
         Response::kErrorFieldNumber == kError;
}
static_assert(EndsAlike<v1::CalibrateResponse>());
static_assert(EndsAlike<v1::DequantizeResponse>());
static_assert(EndsAlike<v1::EvaluateResponse>());

// Two tags and two varints of 64 bits.
constexpr int kMaxPrefixBytes = 32;
// The largest header that data follow in one message. Clients often take no
// more than a few MiB at once, and a header may have as much as data.
constexpr size_t kMostHeaderBytes = 64 << 10;

// `message` as a length-delimited field.
std::string Field(int number, const google::protobuf::MessageLite& message) {
  const size_t size = message.ByteSizeLong();
  uint8_t prefix[kMaxPrefixBytes];
  uint8_t* end = WireFormatLite::WriteTagToArray(
      number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED, prefix);
  end = CodedOutputStream::WriteVarint64ToArray(size, end);
  std::string field;
  field.reserve(static_cast<size_t>(end - prefix) + size);
  field.assign(prefix, end);
  message.AppendToString(&field);
  return field;
}

uint8_t* MutableBegin(grpc::Slice& slice) {
  return const_cast<uint8_t*>(slice.begin());
}

}  // namespace

void ChunkWriter::SetHeader(const google::protobuf::MessageLite& header) {
  header_ = Field(kHeaderOut, header);
}

void ChunkWriter::AddScales(const google::protobuf::MessageLite& scales) {
  if (has_data_ || !scales_.empty()) Flush();
  scales_ = Field(kScalesOut, scales);
}

uint8_t* ChunkWriter::AddData(int64_t offset_bytes, int64_t size) {
  if (has_data_ || header_.size() > kMostHeaderBytes) Flush();
  uint8_t prefix[kMaxPrefixBytes];
  uint8_t* end = prefix;
  if (offset_bytes != 0) {
    end = WireFormatLite::WriteUInt64ToArray(kOffsetOut, offset_bytes, end);
  }
  end = WireFormatLite::WriteTagToArray(
      kDataOut, WireFormatLite::WIRETYPE_LENGTH_DELIMITED, end);
  end = CodedOutputStream::WriteVarint64ToArray(size, end);
  const size_t prefix_bytes = end - prefix;
  data_ = grpc::Slice(header_.size() + prefix_bytes + size);
  uint8_t* out = MutableBegin(data_);
  std::memcpy(out, header_.data(), header_.size());
  std::memcpy(out + header_.size(), prefix, prefix_bytes);
  out += header_.size() + prefix_bytes;
  header_.clear();
  has_data_ = true;
  return out;
}

void ChunkWriter::SetSummary(const google::protobuf::MessageLite& summary) {
  trailer_ = Field(kSummaryOut, summary);
  Flush();
  closed_ = finished_.size();
}

void ChunkWriter::SetError(const absl::Status& status) {
  finished_.resize(closed_);
  header_.clear();
  scales_.clear();
  has_data_ = false;
  trailer_ = Field(kError, ToTensorError(status));
  Flush();
  closed_ = finished_.size();
}

std::vector<grpc::ByteBuffer> ChunkWriter::Take() {
  Flush();
  closed_ = 0;
  return std::exchange(finished_, {});
}

void ChunkWriter::Flush() {
  if (header_.empty() && scales_.empty() && !has_data_ && trailer_.empty()) {
    return;
  }
  std::vector<grpc::Slice> slices;
  if (!header_.empty()) slices.emplace_back(header_);
  if (!scales_.empty()) slices.emplace_back(scales_);
  if (has_data_) slices.push_back(std::move(data_));
  if (!trailer_.empty()) slices.emplace_back(trailer_);
  finished_.emplace_back(slices.data(), slices.size());
  header_.clear();
  scales_.clear();
  trailer_.clear();
  has_data_ = false;
  data_ = grpc::Slice();
}

}  // namespace quantd::server
