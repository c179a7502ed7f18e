// The envelope of a message, cut into slices in many ways, by hand and by
// protobuf: both take the same messages, and make the same of them.

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/wire/envelope.h"
#include "tests/fuzz/fuzz_target.h"

namespace quantd::fuzz {
namespace envelope_target {
namespace {

// Slices of up to `most` bytes, empty ones among them; all of it with 0.
grpc::ByteBuffer Sliced(absl::string_view message, size_t most,
                        std::mt19937_64& random) {
  std::vector<grpc::Slice> slices;
  while (most > 0 && !message.empty()) {
    const absl::string_view part = message.substr(0, random() % (most + 1));
    slices.emplace_back(part.data(), part.size());
    message.remove_prefix(part.size());
  }
  slices.emplace_back(message.data(), message.size());
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string Joined(const server::RequestEnvelope& envelope) {
  std::string data;
  for (const absl::Span<const uint8_t> piece : envelope.data) {
    data.append(piece.begin(), piece.end());
  }
  return data;
}

// Puts the scales of an envelope into `request`; false if they are no message.
// So they are taken when their tensor has been opened.
template <typename Request>
bool SetScales(const server::RequestEnvelope& envelope, Request* request) {
  return absl::c_all_of(envelope.scales, [&](const std::string& part) {
    return request->mutable_scales()->MergeFromString(part);
  });
}
bool SetScales(const server::RequestEnvelope& envelope,
               v1::EvaluateRequest* request) {
  return absl::c_all_of(envelope.scales, [&](const std::string& part) {
    return request->add_scales()->ParseFromString(part);
  });
}
// Unknown to it.
bool SetScales(const server::RequestEnvelope& /*envelope*/,
               v1::CalibrateRequest* /*request*/) {
  return true;
}

template <typename Request>
void RequireAgreement(absl::string_view message, size_t most,
                      std::mt19937_64& random) {
  Request request;
  const bool parses =
      request.ParseFromArray(message.data(), static_cast<int>(message.size()));
  grpc::ByteBuffer buffer = Sliced(message, most, random);
  server::RequestEnvelope envelope;
  const absl::Status status = ParseRequestEnvelope(&buffer, &envelope);
  Require(status.ok() || core::ErrorReason(status) == "MESSAGE_MALFORMED",
          "what is not a message is malformed");
  // A header is a message of its own, parsed when its tensor is opened.
  Request by_hand;
  const bool ok = status.ok() &&
                  by_hand.mutable_header()->ParseFromString(envelope.header) &&
                  SetScales(envelope, &by_hand);
  Require(ok == parses, "messages are taken as protobuf takes them");
  if (!ok) return;
  if (!envelope.has_header) by_hand.clear_header();
  by_hand.set_offset(envelope.offset_bytes);
  by_hand.set_data(Joined(envelope));
  Require(by_hand.data().size() == static_cast<size_t>(envelope.data_bytes),
          "the pieces are the data");
  if (envelope.shared.has_value()) {
    *by_hand.mutable_shared() = *envelope.shared;
  }
  request.DiscardUnknownFields();
  by_hand.DiscardUnknownFields();
  Require(by_hand.SerializeAsString() == request.SerializeAsString(),
          "messages mean what they mean to protobuf");
}

// Two bytes, which request it is and how it is cut; then the message.
constexpr size_t kMessageAt = 2;

void Run(absl::Span<const uint8_t> input) {
  std::mt19937_64 random(Fingerprint(input));
  ByteSource source(input);
  const int request = source.Byte() % 4;
  const size_t most = source.Byte() % 64;
  const absl::string_view message(
      reinterpret_cast<const char*>(source.rest().data()),
      source.rest().size());
  switch (request) {
    case 0:
      return RequireAgreement<v1::QuantizeRequest>(message, most, random);
    case 1:
      return RequireAgreement<v1::DequantizeRequest>(message, most, random);
    case 2:
      return RequireAgreement<v1::CalibrateRequest>(message, most, random);
    default:
      return RequireAgreement<v1::EvaluateRequest>(message, most, random);
  }
}

size_t MessageAt(absl::Span<const uint8_t> input) {
  return std::min(input.size(), kMessageAt);
}

std::vector<std::string> Seeds() {
  v1::QuantizeRequest small;
  small.mutable_header()->mutable_tensor()->mutable_name()->set_tensor("w");
  small.mutable_header()->mutable_tensor()->add_shape(7);
  small.mutable_header()->mutable_encoding()->add_scale(0.5f);
  small.set_data(std::string(8, 'x'));
  v1::QuantizeRequest later;
  later.set_offset(1 << 20);
  later.set_data(std::string(200, 'y'));
  v1::QuantizeRequest shared;
  shared.mutable_header()->mutable_output()->set_region_id("0123456789abcdef");
  shared.mutable_shared()->set_region_id("0123456789abcdef");
  shared.mutable_shared()->set_size_bytes(4096);
  v1::QuantizeRequest scales;
  scales.mutable_scales()->set_first(3);
  scales.mutable_scales()->set_scale(std::string(64, 'z'));
  scales.mutable_scales()->set_outer_scale(std::string(8, 'o'));
  v1::EvaluateRequest candidates;
  candidates.add_scales()->mutable_scales()->set_scale("abcd");
  candidates.add_scales()->set_candidate(1);
  const std::vector<std::string> messages = {
      "", small.SerializeAsString(), later.SerializeAsString(),
      shared.SerializeAsString(), scales.SerializeAsString(),
      candidates.SerializeAsString(),
      // Fields twice.
      small.SerializeAsString() + later.SerializeAsString(),
      shared.SerializeAsString() + shared.SerializeAsString(),
      // A group around a field, unknown fields, a length behind the end.
      std::string("\x4b\x10\x01\x4c", 4),
      std::string("\x98\x06\x07\xa2\x06\x02hi", 8), "\x1a\x7f"};
  std::vector<std::string> seeds;
  for (const std::string& message : messages) {
    const auto n = static_cast<char>(seeds.size());
    seeds.push_back(std::string{n, static_cast<char>(5 * n)} + message);
  }
  return seeds;
}

}  // namespace
}  // namespace envelope_target

FuzzTarget EnvelopeTarget() {
  return {"envelope", envelope_target::Run, envelope_target::Seeds,
          envelope_target::MessageAt, &v1::QuantizeRequest::default_instance()};
}

}  // namespace quantd::fuzz
