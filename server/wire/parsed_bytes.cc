#include "server/wire/parsed_bytes.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/errors.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace quantd::server {
namespace {

using ::google::protobuf::Descriptor;
using ::google::protobuf::FieldDescriptor;
using ::google::protobuf::internal::WireFormatLite;
using ::google::protobuf::io::CodedInputStream;

// Memory of a message, a string, a number and an unknown field beside its
// bytes, with what the allocator adds. Messages of ours have less than twenty
// fields.
constexpr int64_t kMessageBytes = 384;
constexpr int64_t kParsedStringBytes = 96;
constexpr int64_t kNumberBytes = 16;
constexpr int64_t kUnknownBytes = 160;
// Arrays double while they grow.
constexpr int64_t kGrowth = 2;
// Most levels that protobuf parses.
constexpr int kMostLevels = 100;

// Sums up one message. Not thread-safe.
class Scanner {
 public:
  Scanner(CodedInputStream* in, int64_t limit_bytes)
      : in_(in), left_bytes_(limit_bytes) {}

  // Scans to the limit or the end of the stream. False when the message is
  // malformed, and once there is nothing left.
  bool ScanMessage(const Descriptor& type, int level) {
    if (!Take(kMessageBytes)) return false;
    while (const uint32_t tag = in_->ReadTag()) {
      const FieldDescriptor* const field =
          type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
      if (!ScanField(field, tag, level)) return false;
    }
    return in_->ConsumedEntireMessage();
  }

  int64_t left_bytes() const { return left_bytes_; }

 private:
  bool Take(int64_t bytes) {
    left_bytes_ -= bytes;
    return left_bytes_ >= 0;
  }

  // `field`  null for one that is not known.
  bool ScanField(const FieldDescriptor* field, uint32_t tag, int level) {
    const WireFormatLite::WireType type = WireFormatLite::GetTagWireType(tag);
    if (field != nullptr && !IsOfType(*field, type)) field = nullptr;
    const int64_t bytes = field == nullptr ? kUnknownBytes : kNumberBytes;
    uint64_t value = 0;
    switch (type) {
      case WireFormatLite::WIRETYPE_VARINT:
        return Take(bytes) && in_->ReadVarint64(&value);
      case WireFormatLite::WIRETYPE_FIXED64:
        return Take(bytes) && in_->Skip(8);
      case WireFormatLite::WIRETYPE_FIXED32:
        return Take(bytes) && in_->Skip(4);
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
        return ScanDelimited(field, level);
      case WireFormatLite::WIRETYPE_START_GROUP:
        return ScanGroup(tag, level);
      default:
        return false;
    }
  }

  // Otherwise protobuf takes the field for one that it does not know.
  static bool IsOfType(const FieldDescriptor& field,
                       WireFormatLite::WireType type) {
    return type == WireFormatLite::WireTypeForFieldType(
                       static_cast<WireFormatLite::FieldType>(field.type())) ||
           (type == WireFormatLite::WIRETYPE_LENGTH_DELIMITED &&
            field.is_packable());
  }

  bool ScanDelimited(const FieldDescriptor* field, int level) {
    int size = 0;
    if (!in_->ReadVarintSizeAsInt(&size)) return false;
    if (field == nullptr) return Take(kUnknownBytes + size) && in_->Skip(size);
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE: {
        if (level == kMostLevels) return false;
        const CodedInputStream::Limit outer = in_->PushLimit(size);
        if (!ScanMessage(*field->message_type(), level + 1)) return false;
        // A message that ends there may also have broken off.
        if (in_->BytesUntilLimit() != 0) return false;
        in_->PopLimit(outer);
        return true;
      }
      case FieldDescriptor::CPPTYPE_STRING:
        return Take(kParsedStringBytes + size) && in_->Skip(size);
      default:
        return Take(kNumberBytes + kGrowth * MostArrayBytes(*field, size)) &&
               in_->Skip(size);
    }
  }

  // Most bytes of an array of packed numbers in `size` bytes.
  static int64_t MostArrayBytes(const FieldDescriptor& field, int64_t size) {
    switch (field.type()) {
      case FieldDescriptor::TYPE_FLOAT:
      case FieldDescriptor::TYPE_DOUBLE:
      case FieldDescriptor::TYPE_FIXED32:
      case FieldDescriptor::TYPE_FIXED64:
      case FieldDescriptor::TYPE_SFIXED32:
      case FieldDescriptor::TYPE_SFIXED64:
      case FieldDescriptor::TYPE_BOOL:
        return size;
      case FieldDescriptor::TYPE_INT32:
      case FieldDescriptor::TYPE_SINT32:
      case FieldDescriptor::TYPE_UINT32:
      case FieldDescriptor::TYPE_ENUM:
        return size * static_cast<int64_t>(sizeof(int32_t));
      default:
        return size * static_cast<int64_t>(sizeof(int64_t));
    }
  }

  // Everything in a group is unknown.
  bool ScanGroup(uint32_t begin, int level) {
    if (level == kMostLevels || !Take(kUnknownBytes)) return false;
    const uint32_t end =
        WireFormatLite::MakeTag(WireFormatLite::GetTagFieldNumber(begin),
                                WireFormatLite::WIRETYPE_END_GROUP);
    for (;;) {
      const uint32_t tag = in_->ReadTag();
      if (tag == end) return true;
      if (tag == 0 || !ScanField(nullptr, tag, level + 1)) return false;
    }
  }

  CodedInputStream* const in_;
  int64_t left_bytes_;
};

}  // namespace

absl::StatusOr<int64_t> ParsedBytes(grpc::ByteBuffer* buffer,
                                    const Descriptor& type,
                                    int64_t limit_bytes) {
  // Every byte takes one at least, but for tags.
  if (static_cast<int64_t>(buffer->Length()) > limit_bytes) {
    return core::RequestTooLargeError(limit_bytes);
  }
  grpc::ProtoBufferReader reader(buffer);
  CodedInputStream in(&reader);
  Scanner scanner(&in, limit_bytes);
  const bool sound = reader.status().ok() && scanner.ScanMessage(type, 0);
  if (scanner.left_bytes() < 0) return core::RequestTooLargeError(limit_bytes);
  if (!sound) {
    return core::MessageMalformedError(
        "the request is not protobuf; expected a message of its RPC");
  }
  return limit_bytes - scanner.left_bytes();
}

}  // namespace quantd::server
