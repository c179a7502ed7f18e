#include "server/wire/envelope.h"

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "google/protobuf/stubs/logging.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "gtest/gtest.h"
#include "quantd/v1/quantization_service.pb.h"
#include "tests/support/sanitizers.h"

namespace quantd::server::envelope_test {
namespace {

using ::google::protobuf::internal::WireFormatLite;

// What a parser made of a message.
struct Parsed {
  bool ok = false;
  bool has_header = false;
  std::string header;  // as the message it is, serialized again
  uint64_t offset = 0;
  std::string data;
  bool has_shared = false;
  std::string shared;  // serialized again
  std::string scales;  // serialized again

  friend bool operator==(const Parsed& a, const Parsed& b) {
    if (!a.ok || !b.ok) return a.ok == b.ok;
    return a.has_header == b.has_header && a.header == b.header &&
           a.offset == b.offset && a.data == b.data &&
           a.has_shared == b.has_shared && a.shared == b.shared &&
           a.scales == b.scales;
  }
};

std::ostream& operator<<(std::ostream& os, const Parsed& p) {
  if (!p.ok) return os << "malformed";
  return os << "header " << (p.has_header ? absl::CHexEscape(p.header) : "none")
            << " offset " << p.offset << " data " << absl::CHexEscape(p.data)
            << " shared "
            << (p.has_shared ? absl::CHexEscape(p.shared) : "none")
            << " scales " << absl::CHexEscape(p.scales);
}

// Adds what an envelope has of scales. False if a part is malformed.
bool AddScales(const std::vector<std::string>& parts, v1::CalibrateRequest*) {
  return true;
}
template <typename Request>
bool AddScales(const std::vector<std::string>& parts, Request* request) {
  for (const std::string& part : parts) {
    if (!request->mutable_scales()->MergeFromString(part)) return false;
  }
  return true;
}
bool AddScales(const std::vector<std::string>& parts,
               v1::EvaluateRequest* request) {
  for (const std::string& part : parts) {
    if (!request->add_scales()->ParseFromString(part)) return false;
  }
  return true;
}

std::string Scales(const v1::CalibrateRequest& request) { return ""; }
template <typename Request>
std::string Scales(const Request& request) {
  return request.scales().SerializeAsString();
}
std::string Scales(const v1::EvaluateRequest& request) {
  v1::EvaluateRequest scales;
  *scales.mutable_scales() = request.scales();
  return scales.SerializeAsString();
}

template <typename Request>
Parsed ByProtobuf(const std::string& bytes) {
  Request request;
  Parsed parsed;
  parsed.ok = request.ParseFromString(bytes);
  parsed.has_header = request.has_header();
  parsed.header = request.header().SerializeAsString();
  parsed.offset = request.offset();
  parsed.data = request.data();
  parsed.has_shared = request.has_shared();
  parsed.shared = request.shared().SerializeAsString();
  parsed.scales = Scales(request);
  return parsed;
}

template <typename Request>
Parsed ByHand(grpc::ByteBuffer* buffer) {
  RequestEnvelope envelope;
  Parsed parsed;
  const absl::Status status = ParseRequestEnvelope(buffer, &envelope);
  if (!status.ok()) {
    EXPECT_EQ(core::ErrorReason(status), "MESSAGE_MALFORMED") << status;
    return parsed;
  }
  // The header and scales are messages of their own, parsed where they are
  // used.
  Request request;
  parsed.ok = request.mutable_header()->ParseFromString(envelope.header) &&
              AddScales(envelope.scales, &request);
  parsed.scales = Scales(request);
  parsed.has_header = envelope.has_header;
  parsed.header = request.header().SerializeAsString();
  parsed.offset = envelope.offset_bytes;
  for (const absl::Span<const uint8_t> piece : envelope.data) {
    parsed.data.append(piece.begin(), piece.end());
  }
  EXPECT_EQ(static_cast<int64_t>(parsed.data.size()), envelope.data_bytes);
  parsed.has_shared = envelope.shared.has_value();
  if (parsed.has_shared) parsed.shared = envelope.shared->SerializeAsString();
  return parsed;
}

grpc::ByteBuffer OneSlice(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// Slices of `least` to `most` bytes.
grpc::ByteBuffer Sliced(const std::string& bytes, size_t least, size_t most,
                        std::mt19937_64& random) {
  std::vector<grpc::Slice> slices;
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t size =
        std::min(bytes.size() - begin, least + random() % (most - least + 1));
    slices.emplace_back(bytes.data() + begin, size);
    begin += size;
  }
  if (slices.empty()) slices.emplace_back(std::string());
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// Both parsers agree, however the bytes are sliced. False if they do not.
template <typename Request>
bool Agrees(const std::string& bytes, std::mt19937_64& random) {
  const Parsed expected = ByProtobuf<Request>(bytes);
  grpc::ByteBuffer whole = OneSlice(bytes);
  grpc::ByteBuffer tiny = Sliced(bytes, 1, 3, random);
  grpc::ByteBuffer mixed = Sliced(bytes, 0, 64, random);
  bool agrees = true;
  for (grpc::ByteBuffer* buffer : {&whole, &tiny, &mixed}) {
    const Parsed got = ByHand<Request>(buffer);
    EXPECT_EQ(got, expected) << absl::CHexEscape(bytes);
    agrees = agrees && got == expected;
  }
  return agrees;
}

template <typename... Requests>
struct All {
  static bool Agree(const std::string& bytes, std::mt19937_64& random) {
    return (Agrees<Requests>(bytes, random) && ...);
  }
};
using Requests = All<v1::CalibrateRequest, v1::QuantizeRequest,
                     v1::DequantizeRequest, v1::EvaluateRequest>;

std::string Varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) {
    out.push_back(static_cast<char>(value | 0x80));
  }
  out.push_back(static_cast<char>(value));
  return out;
}

// `value` in `size` bytes, more than it needs.
std::string Overlong(uint64_t value, size_t size) {
  std::string out;
  for (size_t i = 0; i + 1 < size; ++i, value >>= 7) {
    out.push_back(static_cast<char>(value | 0x80));
  }
  out.push_back(static_cast<char>(value & 0x7F));
  return out;
}

std::string Tag(uint32_t field, int wire_type) {
  return Varint(field << 3 | static_cast<uint32_t>(wire_type));
}

std::string Bytes(uint32_t field, const std::string& value) {
  return Tag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED) +
         Varint(value.size()) + value;
}

std::string Offset(uint64_t value) {
  return Tag(2, WireFormatLite::WIRETYPE_VARINT) + Varint(value);
}

std::string Nested(int depth) {
  std::string out;
  for (int i = 0; i < depth; ++i) {
    out += Tag(9, WireFormatLite::WIRETYPE_START_GROUP);
  }
  for (int i = 0; i < depth; ++i) {
    out += Tag(9, WireFormatLite::WIRETYPE_END_GROUP);
  }
  return out;
}

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) {}

  std::string Message() {
    std::string out;
    const size_t count = random_() % 6;
    for (size_t i = 0; i < count; ++i) out += Field();
    return out;
  }
  std::mt19937_64& random() { return random_; }

 private:
  std::string RandomBytes(size_t most) {
    std::string out(random_() % (most + 1), '\0');
    for (char& c : out) c = static_cast<char>(random_());
    return out;
  }

  std::string Header() {
    v1::QuantizeHeader header;
    v1::TensorDescription& tensor = *header.mutable_tensor();
    if (random_() % 2) tensor.mutable_name()->set_model("acme/net");
    if (random_() % 2) tensor.mutable_name()->set_tensor("conv.weight");
    if (random_() % 2) tensor.set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    for (size_t i = random_() % 4; i > 0; --i) tensor.add_shape(random_() % 99);
    if (random_() % 2) header.mutable_encoding()->add_scale(0.5f);
    if (random_() % 4 == 0) header.mutable_reference()->set_etag("e");
    if (random_() % 4 == 0) header.set_store(true);
    return header.SerializeAsString();
  }

  std::string Shared() {
    v1::SharedSpan span;
    if (random_() % 2) span.set_region_id(RandomBytes(16));
    if (random_() % 2) span.set_offset_bytes(random_() >> random_() % 64);
    if (random_() % 2) span.set_size_bytes(random_() >> random_() % 64);
    return span.SerializeAsString();
  }

  // Those of Evaluate have other fields of the same types.
  std::string Scales() {
    v1::ScaleChunk chunk;
    if (random_() % 2) chunk.set_first(random_() >> random_() % 64);
    if (random_() % 2) chunk.set_scale(RandomBytes(8));
    return chunk.SerializeAsString();
  }

  std::string Unknown(int depth) {
    const uint32_t field = 1 + random_() % (random_() % 2 ? 30 : 1u << 29);
    switch (random_() % 5) {
      case 0:
        return Tag(field, WireFormatLite::WIRETYPE_VARINT) +
               Varint(random_() >> random_() % 64);
      case 1:
        return Tag(field, WireFormatLite::WIRETYPE_FIXED64) + "01234567";
      case 2:
        return Tag(field, WireFormatLite::WIRETYPE_FIXED32) + "0123";
      case 3:
        return Bytes(field, RandomBytes(40));
      default: {
        std::string group = Tag(field, WireFormatLite::WIRETYPE_START_GROUP);
        if (depth < 3) group += Unknown(depth + 1);
        // A group that ends as another one is malformed.
        const uint32_t end = random_() % 16 ? field : field + 1;
        return group + Tag(end, WireFormatLite::WIRETYPE_END_GROUP);
      }
    }
  }

  std::string Field() {
    switch (random_() % 10) {
      case 9:
        return Bytes(5, random_() % 8 ? Scales() : RandomBytes(12));
      case 8:
        return Bytes(4, random_() % 8 ? Shared() : RandomBytes(12));
      case 0:
        return Bytes(1, random_() % 8 ? Header() : RandomBytes(12));
      case 1:
        return Offset(random_() >> random_() % 64);
      case 2:
      case 3:
        return Bytes(3, RandomBytes(random_() % 4 ? 30 : 400));
      case 4:
        // A known field with any wire type, or field 0.
        return Tag(random_() % 6, static_cast<int>(random_() % 8)) +
               RandomBytes(12);
      case 5:
        // Lengths and tags in more bytes than they need.
        return Overlong(3 << 3 | 2, 1 + random_() % 6) +
               Overlong(4, 1 + random_() % 6) + "data";
      default:
        return Unknown(0);
    }
  }

  std::mt19937_64 random_;
};

constexpr int kMessages = testing::kSanitized ? 5000 : 20000;

class EnvelopeTest : public ::testing::Test {
 protected:
  // protobuf logs strings that are not UTF-8.
  static void SetUpTestSuite() { google::protobuf::SetLogHandler(nullptr); }
};

TEST_F(EnvelopeTest, AgreesWithProtobufOnRandomMessages) {
  Generator generator(1);
  for (int i = 0; i < kMessages; ++i) {
    ASSERT_TRUE(Requests::Agree(generator.Message(), generator.random()));
  }
}

TEST_F(EnvelopeTest, AgreesWithProtobufOnMessagesWithFlippedBytes) {
  Generator generator(2);
  for (int i = 0; i < kMessages; ++i) {
    std::string bytes = generator.Message();
    if (bytes.empty()) continue;
    for (size_t n = 1 + generator.random()() % 3; n > 0; --n) {
      bytes[generator.random()() % bytes.size()] =
          static_cast<char>(generator.random()());
    }
    ASSERT_TRUE(Requests::Agree(bytes, generator.random()));
  }
}

TEST_F(EnvelopeTest, AgreesWithProtobufWhereverTheMessageIsCutOff) {
  Generator generator(3);
  for (int i = 0; i < kMessages / 100; ++i) {
    const std::string bytes = generator.Message();
    for (size_t size = 0; size < bytes.size(); ++size) {
      ASSERT_TRUE(Requests::Agree(bytes.substr(0, size), generator.random()));
    }
  }
}

TEST_F(EnvelopeTest, AgreesWithProtobufOnCornersOfTheWireFormat) {
  v1::QuantizeHeader named;
  named.mutable_tensor()->mutable_name()->set_model("m");
  named.mutable_tensor()->add_shape(3);
  v1::QuantizeHeader typed;
  typed.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT16);
  typed.mutable_tensor()->add_shape(5);
  const std::string group = Tag(7, WireFormatLite::WIRETYPE_START_GROUP);
  const std::string group_end = Tag(7, WireFormatLite::WIRETYPE_END_GROUP);

  const std::vector<std::string> messages = {
      "",
      Bytes(1, ""),
      Bytes(1, "") + Bytes(1, ""),
      // Headers that occur twice are merged, data and offset are the last.
      Bytes(1, named.SerializeAsString()) + Bytes(1, typed.SerializeAsString()),
      Bytes(1, named.SerializeAsString()) + Offset(4) + Bytes(3, "abc") +
          Bytes(1, typed.SerializeAsString()) + Offset(8) + Bytes(3, "de"),
      Bytes(3, "abc") + Bytes(3, ""),
      Offset(7) + Offset(0),
      Offset(~uint64_t{0}),
      // Two broken headers whose concatenation is a message.
      Bytes(1, std::string("\x28", 1)) + Bytes(1, std::string("\x01", 1)),
      Bytes(1, std::string("\x0a\x02", 2)) + Bytes(1, std::string("\x12", 1)) +
          Bytes(1, std::string("\x00", 1)),
      Bytes(1, group) + Bytes(1, group_end),
      // Known fields with other wire types are unknown fields.
      Tag(1, 0) + Varint(5),
      Tag(1, 1) + "01234567",
      Tag(1, 5) + "0123",
      Tag(1, 3) + Tag(1, 4),
      Bytes(2, "xy"),
      Tag(2, 1) + "01234567",
      Tag(2, 3) + Tag(2, 4),
      Tag(3, 0) + Varint(9),
      Tag(3, 5) + "0123",
      Tag(3, 3) + Offset(3) + Tag(3, 4),
      // Wire types that do not exist, field number 0.
      Tag(3, 6) + "a",
      Tag(3, 7) + "a",
      Tag(9, 6),
      std::string("\x00", 1),
      std::string("\x00", 1) + Bytes(3, "a"),
      Bytes(3, "a") + std::string("\x00", 1),
      Tag(0, 2) + std::string("\x01x", 2),
      Tag(0, 3) + Tag(0, 4),
      // Groups: one that does not end, one that did not begin, crossed ones.
      group,
      group_end,
      Tag(1, 4),
      group + Bytes(3, "in the group") + group_end,
      group + Tag(8, 3) + group_end + Tag(8, 4),
      Nested(1),
      Nested(50),
      Nested(98),
      Nested(99),
      Nested(100),
      Nested(101),
      Nested(5000),
      // Lengths beyond the end, beyond 2^31, beyond 2^63.
      Tag(3, 2) + Varint(4) + "abc",
      Tag(3, 2) + Varint(0x7FFFFFFF) + "abc",
      Tag(3, 2) + Varint(0x80000000) + "abc",
      Tag(3, 2) + Varint(0xFFFFFFFF) + "abc",
      Tag(3, 2) + Varint(0x100000003) + "abc",
      Tag(3, 2) + Varint(~uint64_t{0}) + "abc",
      Tag(1, 2) + Varint(0x7FFFFFFF),
      Tag(1, 2) + Varint(0x80000000),
      Tag(9, 2) + Varint(0x7FFFFFFF) + "abc",
      Tag(9, 2) + Varint(0x80000000) + "abc",
      // Varints of more bytes than their value needs, and than there are.
      Tag(2, 0) + Overlong(5, 9),
      Tag(2, 0) + Overlong(5, 10),
      Tag(2, 0) + Overlong(5, 11),
      Tag(2, 0) + std::string(9, '\xff') + "\x7f",
      Tag(2, 0) + std::string(10, '\xff') + "\x01",
      Tag(9, 0) + Overlong(5, 10),
      Tag(9, 0) + Overlong(5, 11),
      Overlong(2 << 3, 5) + Varint(5),
      Overlong(2 << 3, 6) + Varint(5),
      Overlong(2 << 3, 10) + Varint(5),
      Overlong(9 << 3, 5) + Varint(5),
      Overlong(9 << 3, 6) + Varint(5),
      std::string("\x90\x80\x80\x80\x7f", 5) + Varint(5),
      Tag(3, 2) + Overlong(3, 4) + "abc",
      Tag(3, 2) + Overlong(3, 5) + "abc",
      Tag(3, 2) + Overlong(3, 6) + "abc",
      Tag(3, 2) + Overlong(3, 10) + "abc",
      Tag(1, 2) + Overlong(0, 5),
      Tag(1, 2) + Overlong(0, 6),
      Tag(9, 2) + Overlong(0, 6),
      // Spans that occur twice are merged; broken ones are malformed.
      Bytes(4, "") + Bytes(4, ""),
      Bytes(4, Bytes(1, "id")) + Bytes(4, Offset(8)),
      Bytes(4, Bytes(1, "id")) + Bytes(4, Bytes(1, "")),
      Bytes(4, Bytes(3, "xy")),
      Bytes(4, "garbage"),
      Bytes(4, group) + Bytes(4, group_end),
      Bytes(4, Nested(98)),
      Bytes(4, Nested(99)),
      Bytes(4, Nested(100)),
      Bytes(4, Bytes(1, "id") + Nested(1)),
      // A header that is not one.
      Bytes(1, "garbage"),
      Bytes(1, std::string(200, '\xff')),
      Bytes(1, Bytes(1, Bytes(1, Bytes(1, "\xff\xfe")))),
  };
  std::mt19937_64 random(4);
  for (const std::string& message : messages) {
    Requests::Agree(message, random);
  }
}

TEST_F(EnvelopeTest, LeavesTheDataWhereItIs) {
  const std::string payload(100000, 'x');
  const grpc::Slice slice(Offset(12) + Bytes(3, payload));
  grpc::ByteBuffer buffer(&slice, 1);
  RequestEnvelope envelope;
  ASSERT_TRUE(ParseRequestEnvelope(&buffer, &envelope).ok());
  ASSERT_EQ(envelope.data.size(), 1u);
  EXPECT_EQ(envelope.data[0].data() + payload.size(), slice.end());
}

TEST_F(EnvelopeTest, ForgetsWhatWasInTheEnvelopeBefore) {
  grpc::ByteBuffer full =
      OneSlice(Bytes(1, "") + Offset(4) + Bytes(3, "abc") + Bytes(4, ""));
  grpc::ByteBuffer empty = OneSlice("");
  RequestEnvelope envelope;
  ASSERT_TRUE(ParseRequestEnvelope(&full, &envelope).ok());
  ASSERT_TRUE(ParseRequestEnvelope(&empty, &envelope).ok());
  EXPECT_FALSE(envelope.has_header);
  EXPECT_EQ(envelope.offset_bytes, 0u);
  EXPECT_TRUE(envelope.data.empty());
  EXPECT_EQ(envelope.data_bytes, 0);
  EXPECT_FALSE(envelope.shared.has_value());
}

TEST_F(EnvelopeTest, AnUnreadableBufferIsMalformed) {
  grpc::ByteBuffer invalid;
  RequestEnvelope envelope;
  EXPECT_EQ(core::ErrorReason(ParseRequestEnvelope(&invalid, &envelope)),
            "MESSAGE_MALFORMED");
}

}  // namespace
}  // namespace quantd::server::envelope_test
