// Messages of a stream to whole granules of a tensor, cut into slices two ways:
// the result is the same, what protobuf makes of each message, and what a plain
// concatenation makes of the chunks.

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/wire/chunk_reader.h"
#include "server/wire/envelope.h"
#include "tests/fuzz/fuzz_target.h"

namespace quantd::fuzz {
namespace chunks_target {
namespace {

// How the input lays out the tensor; a byte each.
struct Geometry {
  explicit Geometry(ByteSource& source)
      : unit(int64_t{1} << source.Byte() % 4),
        granule(unit * (1 + source.Byte() % 20)),
        begin(granule * (source.Byte() % 4)),
        end(begin + unit * (source.Byte() + 2 * source.Byte())),
        chunk_limit(unit * (1 + source.Byte())) {}

  int64_t unit;
  int64_t granule;
  int64_t begin;
  int64_t end;
  int64_t chunk_limit;
};

grpc::ByteBuffer OneSlice(absl::string_view message) {
  const grpc::Slice slice(message.data(), message.size());
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer ManySlices(absl::string_view message,
                            std::mt19937_64& random) {
  std::vector<grpc::Slice> slices;
  const size_t most = 1 + random() % 40;
  while (!message.empty()) {
    // Empty slices among them.
    const absl::string_view part = message.substr(0, random() % (most + 1));
    slices.emplace_back(part.data(), part.size());
    message.remove_prefix(part.size());
  }
  if (slices.empty()) slices.emplace_back();
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string Joined(const server::RequestEnvelope& envelope) {
  std::string data;
  for (const absl::Span<const uint8_t> piece : envelope.data) {
    data.append(piece.begin(), piece.end());
  }
  return data;
}

void RequireProtobufAgrees(absl::string_view message,
                           const absl::Status& status,
                           const server::RequestEnvelope& envelope) {
  v1::QuantizeRequest request;
  const bool parses =
      request.ParseFromArray(message.data(), static_cast<int>(message.size()));
  v1::QuantizeHeader header;
  // A header is parsed when its tensor is opened.
  // So are scales when they are taken.
  v1::ScaleChunk scales;
  bool ok = status.ok() && header.ParseFromString(envelope.header);
  for (const std::string& part : envelope.scales) {
    ok = ok && scales.MergeFromString(part);
  }
  Require(ok == parses, "messages are taken as protobuf takes them");
  if (!ok) return;
  Require(
      envelope.has_header == request.has_header() &&
          header.SerializeAsString() == request.header().SerializeAsString() &&
          scales.SerializeAsString() == request.scales().SerializeAsString() &&
          envelope.offset_bytes == request.offset() &&
          Joined(envelope) == request.data(),
      "messages mean what they mean to protobuf");
}

// A reader and what came out of it.
class Reading {
 public:
  Reading(const Geometry& geometry, int64_t quantum)
      : geometry_(geometry),
        quantum_(quantum),
        reader_(geometry.begin, geometry.end, geometry.unit, geometry.granule,
                geometry.chunk_limit) {}

  absl::Status Push(const server::RequestEnvelope& chunk) {
    absl::Status status = reader_.Push(chunk);
    while (status.ok() && reader_.ready_bytes() > 0) {
      const int64_t offset = reader_.position_bytes();
      const absl::Span<const uint8_t> piece =
          reader_.Next(std::min(quantum_, reader_.ready_bytes()));
      const auto stop = offset + static_cast<int64_t>(piece.size());
      Require(offset == geometry_.begin + static_cast<int64_t>(out_.size()),
              "pieces are given in order");
      Require(!piece.empty() &&
                  (stop % geometry_.granule == 0 || stop == geometry_.end),
              "pieces are whole granules");
      out_.append(piece.begin(), piece.end());
    }
    if (status.ok()) reader_.Retain();
    return status;
  }

  const std::string& out() const { return out_; }
  const server::ChunkReader& reader() const { return reader_; }

 private:
  const Geometry geometry_;
  const int64_t quantum_;
  server::ChunkReader reader_;
  std::string out_;
};

// The next message: raw bytes, or a chunk of a few units where it belongs.
std::string NextMessage(ByteSource& source, const Geometry& geometry,
                        size_t have_bytes) {
  const uint8_t size = source.Byte();
  if (size % 2 == 0) {
    const absl::Span<const uint8_t> raw = source.Take(size / 2);
    return std::string(raw.begin(), raw.end());
  }
  v1::QuantizeRequest chunk;
  chunk.set_offset(geometry.begin + have_bytes);
  std::string data(size / 2 * geometry.unit, '\0');
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<char>(have_bytes + i);
  }
  chunk.set_data(data);
  return chunk.SerializeAsString();
}

void Run(absl::Span<const uint8_t> input) {
  std::mt19937_64 random(Fingerprint(input));
  ByteSource source(input);
  const Geometry geometry(source);
  Reading whole(geometry, geometry.granule * 1000);
  Reading cut(geometry, geometry.granule * (1 + random() % 3));
  // All that was pushed.
  std::string model;
  while (!source.empty()) {
    const std::string message = NextMessage(source, geometry, model.size());
    grpc::ByteBuffer one = OneSlice(message);
    grpc::ByteBuffer many = ManySlices(message, random);
    server::RequestEnvelope envelope;
    server::RequestEnvelope envelope_cut;
    const absl::Status parsed = ParseRequestEnvelope(&one, &envelope);
    const absl::Status parsed_cut = ParseRequestEnvelope(&many, &envelope_cut);
    Require(parsed == parsed_cut, "slices do not matter to the parser");
    RequireProtobufAgrees(message, parsed, envelope);
    RequireProtobufAgrees(message, parsed_cut, envelope_cut);
    if (!parsed.ok()) return;

    const absl::Status pushed = whole.Push(envelope);
    Require(pushed == cut.Push(envelope_cut), "slices do not matter");
    const std::string data = Joined(envelope);
    const bool fits =
        data.empty() ||
        (static_cast<int64_t>(data.size()) <= geometry.chunk_limit &&
         envelope.offset_bytes == geometry.begin + model.size() &&
         model.size() + data.size() <=
             static_cast<size_t>(geometry.end - geometry.begin) &&
         data.size() % geometry.unit == 0);
    Require(pushed.ok() == fits, "chunks are taken when they are contiguous");
    if (!pushed.ok()) {
      Require(!core::ErrorReason(pushed).empty(), "errors have a reason");
      return;
    }
    model += data;
    const auto end = static_cast<size_t>(geometry.end - geometry.begin);
    const size_t granules = model.size() - model.size() % geometry.granule;
    Require(
        whole.out() == model.substr(0, model.size() == end ? end : granules),
        "the bytes fed are those of the chunks");
    Require(whole.out() == cut.out(), "slices do not matter to the bytes");
    Require(whole.reader().complete() == (model.size() == end) &&
                whole.reader().CheckComplete().ok() == (model.size() == end),
            "a tensor is complete with its last byte");
  }
}

std::string Raw(const v1::QuantizeRequest& request) {
  const std::string message = request.SerializeAsString();
  return std::string(1, static_cast<char>(message.size() * 2)) + message;
}

std::vector<std::string> Seeds() {
  v1::QuantizeRequest first;
  first.mutable_header()->mutable_tensor()->mutable_name()->set_tensor("w");
  first.mutable_header()->mutable_tensor()->add_shape(7);
  first.set_data(std::string(8, 'x'));
  v1::QuantizeRequest next;
  next.set_offset(8);
  next.set_data(std::string(12, 'y'));
  // Units of 4 bytes, granules of 3 units, 10 units.
  const std::string geometry("\x02\x02\x00\x0a\x00\x20", 6);
  // Later granules of bytes.
  const std::string later("\x00\x04\x03\x30\x00\xff", 6);
  return {"", geometry, geometry + "\x05\x07\x09",
          geometry + "\x01\x03\x05\x0d\x03",
          geometry + Raw(first) + Raw(next) + "\x0b",
          geometry + Raw(first) + Raw(first), geometry + Raw(next),
          later + "\x07\x09\x0b\x0d\x0f\x11\x13",
          later + std::string("\x08\x1a\x02zz", 5),
          // A group, a header twice, a length behind the end.
          geometry + std::string("\x08\x4b\x10\x01\x4c", 5) +
              std::string("\x08\x0a\x00\x0a\x00", 5) + "\x04\x1a\x7f"};
}

}  // namespace
}  // namespace chunks_target

FuzzTarget ChunksTarget() {
  return {"chunks", chunks_target::Run, chunks_target::Seeds};
}

}  // namespace quantd::fuzz
