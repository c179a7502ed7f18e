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

template <typename Request>
constexpr bool HasEnvelope() {
  return Request::kHeaderFieldNumber == kHeader &&
         Request::kOffsetFieldNumber == kOffset &&
         Request::kDataFieldNumber == kData;
}
static_assert(HasEnvelope<v1::CalibrateRequest>());
static_assert(HasEnvelope<v1::DequantizeRequest>());
static_assert(HasEnvelope<v1::EvaluateRequest>());

constexpr uint32_t Tag(int field, WireFormatLite::WireType type) {
  return WireFormatLite::MakeTag(field, type);
}

bool ReadHeader(CodedInputStream* in, RequestEnvelope* envelope) {
  int size = 0;
  if (!in->ReadVarintSizeAsInt(&size)) return false;
  std::string header;
  if (!in->ReadString(&header, size)) return false;
  envelope->has_header = true;
  // Concatenated messages parse as their merge.
  envelope->header += header;
  return true;
}

bool ReadData(CodedInputStream* in, RequestEnvelope* envelope) {
  int size = 0;
  if (!in->ReadVarintSizeAsInt(&size)) return false;
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

bool ReadFields(CodedInputStream* in, RequestEnvelope* envelope) {
  while (const uint32_t tag = in->ReadTag()) {
    bool read = false;
    switch (tag) {
      case Tag(kHeader, WireFormatLite::WIRETYPE_LENGTH_DELIMITED):
        read = ReadHeader(in, envelope);
        break;
      case Tag(kOffset, WireFormatLite::WIRETYPE_VARINT):
        read = in->ReadVarint64(&envelope->offset_bytes);
        break;
      case Tag(kData, WireFormatLite::WIRETYPE_LENGTH_DELIMITED):
        read = ReadData(in, envelope);
        break;
      default:
        // A group that ends without having begun is malformed.
        read = WireFormatLite::GetTagWireType(tag) !=
                   WireFormatLite::WIRETYPE_END_GROUP &&
               WireFormatLite::SkipField(in, tag);
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
        "the message is not protobuf; expected fields 1 (header), 2 (offset) "
        "and 3 (data)");
  }
  return absl::OkStatus();
}

}  // namespace quantd::server
