#include "server/wire/envelope.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "core/errors.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::server {
namespace {

using ::google::protobuf::internal::WireFormatLite;
using ::google::protobuf::io::CodedInputStream;

constexpr int kHeader = v1::QuantizeRequest::kHeaderFieldNumber;
constexpr int kOffset = v1::QuantizeRequest::kOffsetFieldNumber;
constexpr int kData = v1::QuantizeRequest::kDataFieldNumber;
constexpr int kShared = v1::QuantizeRequest::kSharedFieldNumber;
constexpr int kScales = v1::QuantizeRequest::kScalesFieldNumber;

template <typename Request>
constexpr bool HasEnvelope() {
  return Request::kHeaderFieldNumber == kHeader &&
         Request::kOffsetFieldNumber == kOffset &&
         Request::kDataFieldNumber == kData &&
         Request::kSharedFieldNumber == kShared;
}
static_assert(HasEnvelope<v1::CalibrateRequest>());
static_assert(HasEnvelope<v1::DequantizeRequest>());
static_assert(HasEnvelope<v1::EvaluateRequest>());
static_assert(v1::DequantizeRequest::kScalesFieldNumber == kScales);
static_assert(v1::EvaluateRequest::kScalesFieldNumber == kScales);

constexpr uint32_t Tag(int field, WireFormatLite::WireType type) {
  return WireFormatLite::MakeTag(field, type);
}

// protobuf takes tags and lengths of at most this many bytes.
constexpr int kMaxTagBytes = 5;
constexpr int kMaxGroupDepth = 100;

// 0 at the end of the message, and for a tag that is malformed.
uint32_t ReadTag(CodedInputStream* in) {
  const int begin = in->CurrentPosition();
  const uint32_t tag = in->ReadTag();
  return in->CurrentPosition() - begin <= kMaxTagBytes ? tag : 0;
}

bool ReadLength(CodedInputStream* in, int* size) {
  const int begin = in->CurrentPosition();
  return in->ReadVarintSizeAsInt(size) &&
         in->CurrentPosition() - begin <= kMaxTagBytes;
}

// Skips the value of an unknown field.
bool SkipValue(CodedInputStream* in, uint32_t tag, int group_depth) {
  const int number = WireFormatLite::GetTagFieldNumber(tag);
  if (number == 0) return false;
  uint64_t value = 0;
  int size = 0;
  switch (WireFormatLite::GetTagWireType(tag)) {
    case WireFormatLite::WIRETYPE_VARINT:
      return in->ReadVarint64(&value);
    case WireFormatLite::WIRETYPE_FIXED64:
      return in->Skip(8);
    case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
      return ReadLength(in, &size) && in->Skip(size);
    case WireFormatLite::WIRETYPE_FIXED32:
      return in->Skip(4);
    case WireFormatLite::WIRETYPE_START_GROUP: {
      if (group_depth == kMaxGroupDepth) return false;
      const uint32_t end =
          WireFormatLite::MakeTag(number, WireFormatLite::WIRETYPE_END_GROUP);
      for (;;) {
        const uint32_t inner = ReadTag(in);
        if (inner == end) return true;
        if (inner == 0 || !SkipValue(in, inner, group_depth + 1)) return false;
      }
    }
    default:
      // Among them a group that ends without having begun.
      return false;
  }
}

// True if `bytes` is a sequence of whole fields.
bool IsMessage(const std::string& bytes) {
  CodedInputStream in(reinterpret_cast<const uint8_t*>(bytes.data()),
                      static_cast<int>(bytes.size()));
  while (const uint32_t tag = ReadTag(&in)) {
    if (!SkipValue(&in, tag, 0)) return false;
  }
  return in.ConsumedEntireMessage();
}

bool ReadHeader(CodedInputStream* in, RequestEnvelope* envelope,
                int* header_count) {
  int size = 0;
  if (!ReadLength(in, &size)) return false;
  std::string header;
  if (!in->ReadString(&header, size)) return false;
  envelope->has_header = true;
  // Concatenated messages parse as their merge, unless the end of a broken one
  // completes another.
  ++*header_count;
  if (*header_count == 2 && !IsMessage(envelope->header)) return false;
  if (*header_count >= 2 && !IsMessage(header)) return false;
  envelope->header += header;
  return true;
}

bool ReadData(CodedInputStream* in, RequestEnvelope* envelope) {
  int size = 0;
  if (!ReadLength(in, &size)) return false;
  envelope->data.clear();
  envelope->data_bytes = size;
  while (size > 0) {
    const void* piece = nullptr;
    int piece_bytes = 0;
    if (!in->GetDirectBufferPointer(&piece, &piece_bytes)) return false;
    piece_bytes = std::min(piece_bytes, size);
    envelope->data.emplace_back(static_cast<const uint8_t*>(piece),
                                piece_bytes);
    if (!in->Skip(piece_bytes)) return false;
    size -= piece_bytes;
  }
  return true;
}

bool ReadShared(CodedInputStream* in, RequestEnvelope* envelope) {
  int size = 0;
  if (!ReadLength(in, &size)) return false;
  std::string shared;
  if (!in->ReadString(&shared, size)) return false;
  if (!envelope->shared.has_value()) envelope->shared.emplace();
  CodedInputStream fields(reinterpret_cast<const uint8_t*>(shared.data()),
                          size);
  // Groups in it are one level deeper than those of the message.
  fields.SetRecursionLimit(kMaxGroupDepth - 1);
  return envelope->shared->MergePartialFromCodedStream(&fields) &&
         fields.ConsumedEntireMessage();
}

bool ReadScales(CodedInputStream* in, RequestEnvelope* envelope) {
  int size = 0;
  return ReadLength(in, &size) &&
         in->ReadString(&envelope->scales.emplace_back(), size);
}

bool ReadFields(CodedInputStream* in, RequestEnvelope* envelope) {
  int header_count = 0;
  while (const uint32_t tag = ReadTag(in)) {
    bool read = false;
    switch (tag) {
      case Tag(kHeader, WireFormatLite::WIRETYPE_LENGTH_DELIMITED):
        read = ReadHeader(in, envelope, &header_count);
        break;
      case Tag(kOffset, WireFormatLite::WIRETYPE_VARINT):
        read = in->ReadVarint64(&envelope->offset_bytes);
        break;
      case Tag(kData, WireFormatLite::WIRETYPE_LENGTH_DELIMITED):
        read = ReadData(in, envelope);
        break;
      case Tag(kShared, WireFormatLite::WIRETYPE_LENGTH_DELIMITED):
        read = ReadShared(in, envelope);
        break;
      case Tag(kScales, WireFormatLite::WIRETYPE_LENGTH_DELIMITED):
        read = ReadScales(in, envelope);
        break;
      default:
        read = SkipValue(in, tag, 0);
    }
    if (!read) return false;
  }
  return in->ConsumedEntireMessage();
}

}  // namespace

absl::Status ParseRequestEnvelope(grpc::ByteBuffer* buffer,
                                  RequestEnvelope* envelope) {
  *envelope = RequestEnvelope();
  grpc::ProtoBufferReader reader(buffer);
  if (!reader.status().ok()) {
    return core::MessageMalformedError("the message could not be read");
  }
  CodedInputStream in(&reader);
  if (!ReadFields(&in, envelope)) {
    return core::MessageMalformedError(
        "the message is not protobuf; expected fields 1 (header), 2 (offset), "
        "3 (data), 4 (shared) and 5 (scales)");
  }
  return absl::OkStatus();
}

}  // namespace quantd::server
