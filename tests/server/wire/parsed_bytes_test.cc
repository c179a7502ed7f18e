#include "server/wire/parsed_bytes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/slice.h"
#include "quantd/v1/encoding_service.pb.h"

namespace quantd::server::parsed_bytes_test {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

std::string Repeated(const std::string& bytes, int count) {
  std::string repeated;
  for (int i = 0; i < count; ++i) repeated += bytes;
  return repeated;
}

template <typename Message>
absl::StatusOr<int64_t> Bytes(const std::string& bytes,
                              int64_t limit_bytes = kNoLimit) {
  // In two slices, as messages come.
  const size_t half = bytes.size() / 2;
  const grpc::Slice slices[] = {grpc::Slice(bytes.substr(0, half)),
                                grpc::Slice(bytes.substr(half))};
  grpc::ByteBuffer buffer(slices, 2);
  return ParsedBytes(&buffer, *Message::descriptor(), limit_bytes);
}

template <typename Message>
void ExpectAtLeastWhatItTakes(const std::string& bytes) {
  Message message;
  ASSERT_TRUE(message.ParseFromString(bytes));
  const absl::StatusOr<int64_t> counted = Bytes<Message>(bytes);
  ASSERT_TRUE(counted.ok()) << counted.status();
  EXPECT_GE(*counted, static_cast<int64_t>(message.SpaceUsedLong()));
  // Of what is small there is room for a thousand more.
  EXPECT_LT(*counted, static_cast<int64_t>(20 * message.SpaceUsedLong()));
}

TEST(ParsedBytesTest, CountsAtLeastWhatAMessageTakes) {
  // Specs, patterns, hints and overrides of no bytes.
  ExpectAtLeastWhatItTakes<v1::SweepRequest>(Repeated({"\x1a\0", 2}, 10'000));
  ExpectAtLeastWhatItTakes<v1::SweepRequest>(Repeated({"\x22\0", 2}, 10'000));
  ExpectAtLeastWhatItTakes<v1::ImportEncodingsRequest>(
      Repeated({"\x2a\0", 2}, 10'000));
  ExpectAtLeastWhatItTakes<v1::ComputeEncodingsRequest>(
      Repeated({"\x22\x02\x12\0", 4}, 10'000));
  // Fields that nobody knows: numbers, text, groups in groups.
  ExpectAtLeastWhatItTakes<v1::SweepRequest>(Repeated("\x78\x01", 10'000));
  ExpectAtLeastWhatItTakes<v1::SweepRequest>(Repeated({"\x7a\0", 2}, 10'000));
  ExpectAtLeastWhatItTakes<v1::SweepRequest>(Repeated("\x7b\x7c", 10'000));
  ExpectAtLeastWhatItTakes<v1::SweepRequest>(
      Repeated(Repeated("\x7b", 50) + Repeated("\x7c", 50), 200));
  // A field of another type than it should be is one that nobody knows.
  ExpectAtLeastWhatItTakes<v1::SweepRequest>(Repeated("\x18\x01", 10'000));
}

TEST(ParsedBytesTest, CountsAtLeastWhatArraysTake) {
  v1::PutEncodingRequest request;
  request.mutable_name()->set_model(std::string(1000, 'm'));
  for (int i = 0; i < 100'000; ++i) {
    request.mutable_encoding()->add_scale(1);
    request.mutable_encoding()->add_zero_point(0);
    request.mutable_encoding()->add_scale_shape(0);
  }
  ExpectAtLeastWhatItTakes<v1::PutEncodingRequest>(request.SerializeAsString());
  // The same numbers, each with its tag.
  ExpectAtLeastWhatItTakes<v1::Encoding>(Repeated({"\x20\0", 2}, 10'000));
  ExpectAtLeastWhatItTakes<v1::Encoding>(Repeated({"\x1d\0\0\0\0", 5}, 10'000));
}

TEST(ParsedBytesTest, StopsAtTheLimit) {
  const std::string specs = Repeated({"\x1a\0", 2}, 1000);
  const absl::StatusOr<int64_t> bytes = Bytes<v1::SweepRequest>(specs);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_TRUE(Bytes<v1::SweepRequest>(specs, *bytes).ok());
  EXPECT_EQ(
      core::ErrorReason(Bytes<v1::SweepRequest>(specs, *bytes - 1).status()),
      "REQUEST_TOO_LARGE");
  // What comes after that is not looked at.
  EXPECT_EQ(
      core::ErrorReason(Bytes<v1::SweepRequest>(specs + "\xff", 1000).status()),
      "REQUEST_TOO_LARGE");
}

TEST(ParsedBytesTest, RefusesWhatIsNotProtobuf) {
  for (const std::string& bytes :
       {std::string("\xff\xff\xff"), std::string("\x1a\x05"),
        std::string("\x1a\x02\x0a\x05"), std::string("\x7b"),
        std::string("\x7c"),
        // Deeper than protobuf parses.
        Repeated("\x7b", 200) + Repeated("\x7c", 200)}) {
    EXPECT_EQ(core::ErrorReason(Bytes<v1::SweepRequest>(bytes).status()),
              "MESSAGE_MALFORMED");
  }
}

}  // namespace
}  // namespace quantd::server::parsed_bytes_test
