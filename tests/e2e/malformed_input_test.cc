// Whatever a client sends, it gets the documented error, the stream goes on
// where the contract says so, and nobody else notices.
//
// A case alone: --gtest_filter='*HalfCloseInATensor'.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.pb.h"
#include "quantd/v1/quantization_service.pb.h"
#include "tests/support/case_name.h"
#include "tests/support/metric_value.h"
#include "tests/support/raw_stream.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::testing::malformed_input_test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr char kCalibrate[] = "/quantd.v1.QuantizationService/Calibrate";
constexpr char kQuantize[] = "/quantd.v1.QuantizationService/Quantize";
constexpr char kDequantize[] = "/quantd.v1.QuantizationService/Dequantize";
constexpr char kEvaluate[] = "/quantd.v1.QuantizationService/Evaluate";

// Limits that small messages pass.
constexpr int64_t kMessageBytes = 1 << 20;
constexpr int64_t kChunkBytes = 64 << 10;
constexpr int64_t kTensorBytes = 8 << 20;
// Of an encoding in one message.
constexpr int64_t kScaleCount = kChunkBytes / 4;
constexpr int64_t kMetricsCount = 16;
constexpr int64_t kBudgetBytes = 1 << 20;
constexpr int64_t kStatisticsBytes = 4 << 10;

server::ServerOptions Options() {
  server::ServerOptions options;
  options.threads = 2;
  options.limits.message_bytes = kMessageBytes;
  options.limits.chunk_bytes = kChunkBytes;
  options.limits.tensor_bytes = kTensorBytes;
  options.limits.metrics_count = kMetricsCount;
  options.limits.memory_budget_bytes = kBudgetBytes;
  options.limits.statistics_bytes = kStatisticsBytes;
  options.limits.memory_wait = absl::Milliseconds(10);
  options.limits.response_chunk_bytes = 16 << 10;
  // Streams wait for this program, however busy the machine is.
  options.limits.idle_timeout = absl::Hours(1);
  return options;
}

template <typename T>
std::string Elements(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

// `count` float32 elements.
std::string Floats(int64_t count) {
  return Elements(std::vector<float>(count, 1.5f));
}

v1::Encoding Int8() {
  v1::Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  return encoding;
}

// A float32 tensor of `count` elements.
template <typename Header>
Header Described(int64_t count) {
  Header header;
  header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  header.mutable_tensor()->add_shape(count);
  return header;
}

v1::QuantizeHeader QuantizeHeader(int64_t count) {
  auto header = Described<v1::QuantizeHeader>(count);
  *header.mutable_encoding() = Int8();
  return header;
}

// A message up; all four calls have the same fields.
std::string Message(const google::protobuf::MessageLite& header,
                    const std::string& data = "", uint64_t offset = 0) {
  v1::QuantizeRequest chunk;
  chunk.set_offset(offset);
  chunk.set_data(data);
  const std::string bytes = header.SerializeAsString();
  std::string out = "\x0a";
  for (size_t size = bytes.size();; size >>= 7) {
    out.push_back(static_cast<char>(size < 0x80 ? size : size | 0x80));
    if (size < 0x80) break;
  }
  return out + bytes + chunk.SerializeAsString();
}

std::string Chunk(uint64_t offset, const std::string& data) {
  v1::QuantizeRequest chunk;
  chunk.set_offset(offset);
  chunk.set_data(data);
  return chunk.SerializeAsString();
}

// A whole tensor of four elements whose header was changed.
std::string Quantize(const std::function<void(v1::QuantizeHeader&)>& change) {
  v1::QuantizeHeader header = QuantizeHeader(4);
  change(header);
  return Message(header, Floats(4));
}
std::string WithEncoding(const std::function<void(v1::Encoding&)>& change) {
  return Quantize(
      [&](v1::QuantizeHeader& h) { change(*h.mutable_encoding()); });
}
std::string WithSpec(const std::function<void(v1::EncodingSpec&)>& change) {
  return Quantize([&](v1::QuantizeHeader& h) {
    h.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
    change(*h.mutable_spec());
  });
}
std::string WithShape(const std::vector<int64_t>& shape) {
  return Quantize([&](v1::QuantizeHeader& h) {
    h.mutable_tensor()->mutable_shape()->Assign(shape.begin(), shape.end());
  });
}
std::string WithName(const std::string& model, const std::string& revision,
                     const std::string& tensor) {
  return Quantize([&](v1::QuantizeHeader& h) {
    v1::TensorName& name = *h.mutable_tensor()->mutable_name();
    name.set_model(model);
    name.set_revision(revision);
    name.set_tensor(tensor);
  });
}
std::string WithRange(uint64_t begin, uint64_t end) {
  return Quantize([&](v1::QuantizeHeader& h) {
    h.mutable_range()->set_begin_bytes(begin);
    h.mutable_range()->set_end_bytes(end);
  });
}
std::string Referring(const std::string& model, const std::string& tensor,
                      const std::string& etag = "") {
  return Quantize([&](v1::QuantizeHeader& h) {
    v1::EncodingReference& reference = *h.mutable_reference();
    reference.mutable_name()->set_model(model);
    reference.mutable_name()->set_tensor(tensor);
    reference.set_etag(etag);
  });
}
std::string Calibrate(const std::function<void(v1::CalibrateHeader&)>& change) {
  auto header = Described<v1::CalibrateHeader>(4);
  change(header);
  return Message(header, Floats(4));
}
std::string Dequantize(
    const std::function<void(v1::DequantizeHeader&)>& change) {
  auto header = Described<v1::DequantizeHeader>(4);
  *header.mutable_encoding() = Int8();
  change(header);
  return Message(header, "\x01\x02\x03\x04");
}
std::string Evaluate(const std::function<void(v1::EvaluateHeader&)>& change) {
  auto header = Described<v1::EvaluateHeader>(4);
  *header.add_candidates()->mutable_encoding() = Int8();
  change(header);
  return Message(header, Floats(4));
}

// Eight elements under four scales that come in chunks.
v1::QuantizeHeader ScaleHeader(bool has_zero_points = false) {
  v1::QuantizeHeader header = QuantizeHeader(8);
  v1::Encoding& encoding = *header.mutable_encoding();
  encoding.clear_scale();
  encoding.add_block_size(2);
  encoding.set_scales_in_chunks(true);
  encoding.set_chunks_have_zero_points(has_zero_points);
  return header;
}
// A message with scales beside `count` elements.
std::string WithScales(uint64_t first, const std::string& scale,
                       uint64_t offset = 0, int64_t count = 0,
                       const std::string& zero_point = "") {
  v1::QuantizeRequest request;
  request.set_offset(offset);
  request.set_data(Floats(count));
  request.mutable_scales()->set_first(first);
  request.mutable_scales()->set_scale(scale);
  request.mutable_scales()->set_zero_point(zero_point);
  return request.SerializeAsString();
}

// A tensor that every server has to be able to serve.
std::string Good(const std::string& method) {
  if (method == kCalibrate) return Calibrate([](v1::CalibrateHeader&) {});
  if (method == kDequantize) return Dequantize([](v1::DequantizeHeader&) {});
  if (method == kEvaluate) return Evaluate([](v1::EvaluateHeader&) {});
  return Message(QuantizeHeader(4),
                 Elements<float>({0.5f, -1, 100, kInfinity}));
}
constexpr char kGoodCodes[] = "\x01\xfe\x7f\x7f";

// "INVALID_ARGUMENT/CHUNK_OFFSET", "OK" without a reason.
std::string CodeAndReason(int code, absl::string_view reason) {
  const std::string name =
      absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
  return reason.empty() ? name : absl::StrCat(name, "/", reason);
}

std::string Verdict(const grpc::Status& status) {
  const absl::Status message(static_cast<absl::StatusCode>(status.error_code()),
                             status.error_message());
  return CodeAndReason(status.error_code(), core::ErrorReason(message));
}

constexpr char kServed[] = "OK";

// What a client sends on one stream, and what comes of it.
struct StreamCase {
  std::string name;
  std::string method;
  std::vector<std::string> messages;
  // How each of the tensors ends: kServed or code and reason.
  std::vector<std::string> answers;
  // Path of the field in the last answer that is an error, where it matters.
  std::string field = "";
  // How the stream ends. With "OK" a good tensor follows the messages, and is
  // served.
  std::string status = "OK";
  // Part of the message of the last error.
  std::string text = "";
  // The messages end in the middle of a tensor, so that nothing can follow.
  bool half_closes = false;

  friend std::ostream& operator<<(std::ostream& os, const StreamCase& c) {
    return os << c.name;
  }
};

// Short for what most cases have: one tensor that fails, and the next one is
// served.
StreamCase Fails(const std::string& name, const std::string& message,
                 const std::string& answer, const std::string& field = "",
                 const std::string& text = "") {
  return {name, kQuantize, {message}, {answer}, field, "OK", text};
}
StreamCase FailsOn(const std::string& name, const std::string& method,
                   const std::string& message, const std::string& answer,
                   const std::string& field) {
  return {name, method, {message}, {answer}, field};
}
StreamCase Serves(const std::string& name, const std::string& message) {
  return {name, kQuantize, {message}, {kServed}};
}
StreamCase EndsStream(const std::string& name,
                      const std::vector<std::string>& messages,
                      const std::string& status,
                      const std::vector<std::string>& answers = {}) {
  return {name, kQuantize, messages, answers, "", status};
}

std::string Invalid(const std::string& reason) {
  return "INVALID_ARGUMENT/" + reason;
}

std::vector<StreamCase> ScaleCases() {
  const std::string open = Message(ScaleHeader());
  const std::string zero_points = Message(ScaleHeader(true));
  const auto fails = [](const std::string& name,
                        const std::vector<std::string>& messages,
                        const std::string& answer, const std::string& field) {
    return StreamCase{name, kQuantize, messages, {answer}, field};
  };
  const std::string count = Invalid("SCALE_COUNT");
  return {
      StreamCase{"scales beside their elements",
                 kQuantize,
                 {open, WithScales(0, Floats(2), 0, 4),
                  WithScales(2, Floats(2), 16, 4)},
                 {kServed}},
      fails("the first scale is not the first",
            {open, WithScales(1, Floats(3), 0, 8)}, count, "scales.first"),
      fails("scales with a gap",
            {open, WithScales(0, Floats(1)), WithScales(2, Floats(2), 0, 8)},
            count, "scales.first"),
      fails("scales that came before",
            {open, WithScales(0, Floats(2)), WithScales(1, Floats(3), 0, 8)},
            count, "scales.first"),
      fails("largest index of a scale",
            {open, WithScales(~uint64_t{0}, Floats(4), 0, 8)}, count,
            "scales.first"),
      fails("half a scale", {open, WithScales(0, "abcdef", 0, 8)}, count,
            "scales.scale"),
      fails("more scales than the encoding has",
            {open, WithScales(0, Floats(5), 0, 8)}, count, "scales.scale"),
      fails("scales after the last",
            {open, WithScales(0, Floats(4), 0, 4),
             WithScales(4, Floats(1), 16, 4)},
            count, "scales.scale"),
      fails("fewer scales than the elements use",
            {open, WithScales(0, Floats(3), 0, 8)}, count, "scales.scale"),
      fails("elements before their scales", {open, Chunk(0, Floats(8))}, count,
            "scales.scale"),
      fails("a scale that is none",
            {open, WithScales(0, Elements<float>({1, 1, kNan, 1}), 0, 8)},
            Invalid("SCALE_INVALID"), "scales.scale"),
      fails("zero points that are missing",
            {zero_points, WithScales(0, Floats(4), 0, 8)}, count,
            "scales.zero_point"),
      fails("zero points for some of the scales",
            {zero_points, WithScales(0, Floats(4), 0, 8, "\x01\x02")}, count,
            "scales.zero_point"),
      fails("zero points that nobody expects",
            {open, WithScales(0, Floats(4), 0, 8, "\x01\x02\x03\x04")}, count,
            "scales.zero_point"),
      fails("scales that are no message",
            {open, std::string("\x2a\x03\x12\x7fx", 5)},
            Invalid("MESSAGE_MALFORMED"), "scales"),
      fails("scales beside an encoding that has its own",
            {Message(QuantizeHeader(8)), WithScales(0, Floats(1), 0, 8)}, count,
            "scales"),
      fails("more scales in a message than a chunk",
            {open, WithScales(0, Floats(kChunkBytes / 4 + 1))},
            Invalid("CHUNK_TOO_LARGE"), "scales"),
      // The tensor is over, and scales open none.
      EndsStream(
          "scales after the end",
          {open, WithScales(0, Floats(4), 0, 8), WithScales(4, Floats(1))},
          Invalid("HEADER_MISSING"), {kServed}),
  };
}

std::vector<StreamCase> FramingCases() {
  const std::string open = Message(QuantizeHeader(8));
  const std::string half = Message(QuantizeHeader(8), Floats(4));
  const std::string good = Good(kQuantize);
  const auto in_stream = [](const std::string& name,
                            const std::vector<std::string>& messages,
                            const std::vector<std::string>& answers) {
    return StreamCase{name, kQuantize, messages, answers};
  };
  return {
      in_stream("wrong offset", {open, Chunk(4, Floats(8))},
                {Invalid("CHUNK_OFFSET")}),
      in_stream("gap", {half, Chunk(20, Floats(3))}, {Invalid("CHUNK_OFFSET")}),
      in_stream("overlap", {half, Chunk(12, Floats(4))},
                {Invalid("CHUNK_OFFSET")}),
      in_stream("largest offset", {half, Chunk(~uint64_t{0}, Floats(4))},
                {Invalid("CHUNK_OFFSET")}),
      in_stream("offset beside the header",
                {Message(QuantizeHeader(8), Floats(8), 4)},
                {Invalid("CHUNK_OFFSET")}),
      in_stream("early header", {half, good},
                {Invalid("TENSOR_INCOMPLETE"), kServed}),
      in_stream("early header right after a header", {open, open, good},
                {Invalid("TENSOR_INCOMPLETE"), Invalid("TENSOR_INCOMPLETE"),
                 kServed}),
      in_stream("too many bytes in the last chunk",
                {half, Chunk(16, Floats(5))}, {Invalid("TENSOR_TOO_LONG")}),
      in_stream("too many bytes in the only chunk",
                {Message(QuantizeHeader(8), Floats(9))},
                {Invalid("TENSOR_TOO_LONG")}),
      in_stream("data for an empty tensor",
                {Message(QuantizeHeader(0), Floats(1))},
                {Invalid("TENSOR_TOO_LONG")}),
      in_stream("half an element", {half, Chunk(16, "ab")},
                {Invalid("CHUNK_ALIGNMENT")}),
      in_stream("chunk too large",
                {Message(QuantizeHeader(kChunkBytes), Floats(4)),
                 Chunk(16, Floats(kChunkBytes / 4 + 1))},
                {Invalid("CHUNK_TOO_LARGE")}),
      in_stream("chunks that follow an error",
                {half, Chunk(4, Floats(1)), Chunk(16, Floats(4)),
                 Chunk(0, Floats(1)), "", Chunk(7, "x")},
                {Invalid("CHUNK_OFFSET")}),
      in_stream("chunks of nothing",
                {open, "", Chunk(99, ""), Chunk(0, Floats(8))}, {kServed}),
      {"half-close in a tensor",
       kQuantize,
       {half},
       {Invalid("TENSOR_INCOMPLETE")},
       "",
       "OK",
       "",
       true},
      {"half-close after a header",
       kQuantize,
       {open},
       {Invalid("TENSOR_INCOMPLETE")},
       "",
       "OK",
       "",
       true},
      {"half-close after a granule that is not whole",
       kQuantize,
       {Message(QuantizeHeader(8)), Chunk(0, Floats(1))},
       {Invalid("TENSOR_INCOMPLETE")},
       "",
       "OK",
       "",
       true},
      {"half-close at once", kQuantize, {}, {}, "", "OK", "", true},
      EndsStream("missing header", {Chunk(0, Floats(4))},
                 Invalid("HEADER_MISSING")),
      EndsStream("empty message", {""}, Invalid("HEADER_MISSING")),
      EndsStream("another chunk after the end", {good, Chunk(16, Floats(1))},
                 Invalid("HEADER_MISSING"), {kServed}),
  };
}

std::vector<StreamCase> ProtobufCases() {
  const std::string good = Good(kQuantize);
  v1::QuantizeHeader named = QuantizeHeader(4);
  named.mutable_tensor()->mutable_name()->set_model("acme");
  std::string bad_utf8 = Message(named, Floats(4));
  bad_utf8.replace(bad_utf8.find("acme"), 4, "ac\xff\xfe");
  return {
      EndsStream("truncated message", {good.substr(0, good.size() - 1)},
                 Invalid("MESSAGE_MALFORMED")),
      EndsStream("truncated in the header", {good.substr(0, 5)},
                 Invalid("MESSAGE_MALFORMED")),
      EndsStream("garbage", {"GET / HTTP/1.1\r\n\r\n"},
                 Invalid("MESSAGE_MALFORMED")),
      EndsStream("all bits set", {std::string(1000, '\xff')},
                 Invalid("MESSAGE_MALFORMED")),
      EndsStream("length beyond 2 to the 31", {"\x1a\xff\xff\xff\xff\x0f"},
                 Invalid("MESSAGE_MALFORMED")),
      EndsStream("groups without end", {std::string(100000, '\x4b')},
                 Invalid("MESSAGE_MALFORMED")),
      EndsStream("garbage in an open tensor",
                 {good, Message(QuantizeHeader(8), Floats(4)), "\xff\xff"},
                 Invalid("MESSAGE_MALFORMED"), {kServed}),
      // Fields 1, 2 and 3 as varint, bytes and fixed32 are unknown fields.
      EndsStream("wrong wire types",
                 {std::string("\x08\x01\x12\x01x\x1d\x01\x02\x03\x04", 10)},
                 Invalid("HEADER_MISSING")),
      // 32 fields of garbage.
      Fails("header that is not protobuf",
            "\x0a\x20" + std::string(32, '\xff') + Chunk(0, Floats(4)),
            Invalid("HEADER_INVALID")),
      Fails("text that is not UTF-8", bad_utf8, Invalid("HEADER_INVALID")),
      Fails("empty header", std::string("\x0a\x00", 2),
            Invalid("ELEMENT_TYPE_UNKNOWN"), "header.tensor.element_type"),
      Serves("unknown fields", good + "\x98\x06\x07\xa2\x06\x02hi"),
      // Two headers in one message are their merge.
      Serves("header in two halves",
             Message(Described<v1::QuantizeHeader>(4)) +
                 Quantize([](v1::QuantizeHeader& h) { h.clear_tensor(); })),
      EndsStream("message too large", {std::string(kMessageBytes + 1, 'x')},
                 "RESOURCE_EXHAUSTED"),
      {"unknown method",
       "/quantd.v1.QuantizationService/Transmogrify",
       {good},
       {},
       "",
       "UNIMPLEMENTED"},
      {"unknown service",
       "/quantd.v2.QuantizationService/Quantize",
       {good},
       {},
       "",
       "UNIMPLEMENTED"},
  };
}

std::vector<StreamCase> DescriptionCases() {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  const auto bad_shape = [](const std::string& name,
                            const std::vector<int64_t>& shape) {
    return Fails(name, WithShape(shape), Invalid("SHAPE_INVALID"),
                 "header.tensor.shape");
  };
  const auto bad_name = [](const std::string& name, const std::string& model,
                           const std::string& revision,
                           const std::string& tensor,
                           const std::string& field) {
    return Fails(name, WithName(model, revision, tensor),
                 Invalid("NAME_INVALID"), "header.tensor.name." + field);
  };
  const auto type = [](int value) {
    return Quantize([value](v1::QuantizeHeader& h) {
      h.mutable_tensor()->set_element_type(static_cast<v1::ElementType>(value));
    });
  };
  const int64_t two_32 = int64_t{1} << 32;
  v1::QuantizeHeader scalar = QuantizeHeader(1);
  scalar.mutable_tensor()->clear_shape();
  return {
      bad_shape("negative dimension", {2, -2}),
      bad_shape("two negative dimensions", {-2, -2}),
      bad_shape("smallest dimension", {kMin}),
      bad_shape("largest dimension", {kMax}),
      bad_shape("more than 2 to the 56 elements", {(int64_t{1} << 56) + 1}),
      bad_shape("product above 2 to the 56",
                {int64_t{1} << 28, int64_t{1} << 29}),
      bad_shape("product of 2 to the 63", {two_32, int64_t{1} << 31}),
      bad_shape("product of 2 to the 64", {two_32, two_32}),
      bad_shape("product of 2 to the 64 and 4", {4, two_32, two_32}),
      bad_shape("product wraps to 4",
                {int64_t{1} << 21, int64_t{1} << 21, int64_t{1} << 22, 4}),
      bad_shape("huge dimensions and a zero", {kMax, kMax, 0}),
      bad_shape("17 dimensions", std::vector<int64_t>(17, 1)),
      bad_shape("100,000 dimensions", std::vector<int64_t>(100000, 1)),
      Fails("2 to the 56 elements", WithShape({int64_t{1} << 56}),
            "RESOURCE_EXHAUSTED/TENSOR_TOO_LARGE", "header.tensor.shape"),
      Fails("tensor over the limit", WithShape({kTensorBytes / 4 + 1}),
            "RESOURCE_EXHAUSTED/TENSOR_TOO_LARGE", "header.tensor.shape"),
      Serves("scalar", Message(scalar, Floats(1))),
      Serves("16 dimensions",
             [] {
               std::vector<int64_t> shape(16, 1);
               shape[7] = 4;
               return WithShape(shape);
             }()),
      Serves("empty tensor", Message(QuantizeHeader(0))),
      Fails("element type unset", type(0), Invalid("ELEMENT_TYPE_UNKNOWN"),
            "header.tensor.element_type"),
      Fails("element type 5", type(5), Invalid("ELEMENT_TYPE_UNKNOWN"),
            "header.tensor.element_type"),
      Fails("element type minus 1", type(-1), Invalid("ELEMENT_TYPE_UNKNOWN"),
            "header.tensor.element_type"),
      bad_name("parent folder", "../x", "", "t", "model"),
      bad_name("absolute path", "/x", "", "t", "model"),
      bad_name("parent folder inside", "a//../b", "", "t", "model"),
      bad_name("model of 257 bytes", std::string(257, 'm'), "", "t", "model"),
      bad_name("model with a space", "a b", "", "t", "model"),
      bad_name("model with NUL", std::string("a\0b", 3), "", "t", "model"),
      bad_name("model beyond ASCII", "caf\xc3\xa9", "", "t", "model"),
      bad_name("revision that leads out", "m", "r/../..", "t", "revision"),
      bad_name("tensor of 1,025 bytes", "m", "", std::string(1025, 't'),
               "tensor"),
      bad_name("tensor with a line feed", "m", "", "a\nb", "tensor"),
      bad_name("tensor with NUL", "m", "", std::string("a\0b", 3), "tensor"),
      bad_name("tensor with a C1 control", "m", "", "a\xc2\x85", "tensor"),
      Serves("tensor that looks like a path",
             WithName("m", "r", "/../caf\xc3\xa9 \xe6\xbc\xa2")),
  };
}

std::vector<StreamCase> EncodingCases() {
  using E = v1::Encoding;
  const auto bad = [](const std::string& name,
                      const std::function<void(E&)>& change,
                      const std::string& answer, const std::string& field) {
    return Fails(name, WithEncoding(change), answer,
                 "header.encoding." + field);
  };
  const auto bad_scale = [&](const std::string& name, float scale) {
    return bad(
        name, [scale](E& e) { e.set_scale(0, scale); },
        Invalid("SCALE_INVALID"), "scale");
  };
  const auto format = [](int value) {
    return
        [value](E& e) { e.set_format(static_cast<v1::NumberFormat>(value)); };
  };
  return {
      bad(
          "block size of wrong rank",
          [](E& e) {
            e.add_block_size(1);
            e.add_block_size(0);
          },
          Invalid("BLOCK_SIZE_INVALID"), "block_size"),
      bad(
          "negative block size", [](E& e) { e.add_block_size(-1); },
          Invalid("BLOCK_SIZE_INVALID"), "block_size"),
      bad_scale("scale 0", 0),
      bad_scale("negative scale", -0.5f),
      bad_scale("scale NaN", kNan),
      bad_scale("scale Inf", kInfinity),
      bad_scale("subnormal scale", 1e-40f),
      bad(
          "no scale", [](E& e) { e.clear_scale(); }, Invalid("SCALE_COUNT"),
          "scale"),
      bad(
          "too many scales", [](E& e) { e.add_scale(1); },
          Invalid("SCALE_COUNT"), "scale"),
      bad(
          "too few scales", [](E& e) { e.add_block_size(1); },
          Invalid("SCALE_COUNT"), "scale"),
      bad(
          "wrong number of zero points",
          [](E& e) {
            e.add_zero_point(0);
            e.add_zero_point(0);
          },
          Invalid("SCALE_COUNT"), "zero_point"),
      bad(
          "zero point out of range", [](E& e) { e.add_zero_point(128); },
          Invalid("ZERO_POINT_RANGE"), "zero_point"),
      bad(
          "qmin is qmax",
          [](E& e) {
            e.set_qmin(3);
            e.set_qmax(3);
          },
          Invalid("CODE_RANGE_INVALID"), "qmin"),
      bad(
          "qmin above qmax",
          [](E& e) {
            e.set_qmin(3);
            e.set_qmax(-3);
          },
          Invalid("CODE_RANGE_INVALID"), "qmin"),
      bad(
          "qmin outside of the format", [](E& e) { e.set_qmin(-129); },
          Invalid("CODE_RANGE_INVALID"), "qmin"),
      bad(
          "qmax outside of the format", [](E& e) { e.set_qmax(1 << 30); },
          Invalid("CODE_RANGE_INVALID"), "qmax"),
      bad("format unset", format(0), Invalid("FORMAT_UNKNOWN"), "format"),
      bad("unknown format", format(1000), Invalid("FORMAT_UNKNOWN"), "format"),
      bad("negative format", format(-8), Invalid("FORMAT_UNKNOWN"), "format"),
      bad(
          "scale type that is not the format's",
          [](E& e) {
            e.set_format(v1::NUMBER_FORMAT_MXFP4_E2M1);
            e.set_scale_type(v1::SCALE_TYPE_FLOAT32);
          },
          Invalid("SCALE_TYPE_INVALID"), "scale_type"),
      bad(
          "unknown scale type",
          [](E& e) { e.set_scale_type(static_cast<v1::ScaleType>(7)); },
          Invalid("ENUM_UNKNOWN"), "scale_type"),
      bad(
          "scale that is no bfloat16",
          [](E& e) {
            e.set_scale_type(v1::SCALE_TYPE_BFLOAT16);
            e.set_scale(0, 0.1f);
          },
          Invalid("SCALE_INVALID"), "scale"),
      bad(
          "scale codes where there are none",
          [](E& e) { e.set_scale_code("x"); }, Invalid("SCALE_TYPE_INVALID"),
          "scale_code"),
      bad(
          "too many scale codes",
          [](E& e) {
            e.set_format(v1::NUMBER_FORMAT_MXFP8_E4M3);
            e.clear_scale();
            e.set_scale_code("xx");
          },
          Invalid("SCALE_COUNT"), "scale_code"),
      bad(
          "no scale codes",
          [](E& e) {
            e.set_format(v1::NUMBER_FORMAT_MXFP4_E2M1);
            e.clear_scale();
          },
          Invalid("SCALE_COUNT"), "scale_code"),
      bad(
          "no outer scale",
          [](E& e) {
            e.set_format(v1::NUMBER_FORMAT_NVFP4);
            e.clear_scale();
            e.set_scale_code("x");
          },
          Invalid("SCALE_COUNT"), "outer_scale"),
      bad(
          "outer scale 0",
          [](E& e) {
            e.set_format(v1::NUMBER_FORMAT_NVFP4);
            e.clear_scale();
            e.set_scale_code("x");
            e.add_outer_scale(0);
          },
          Invalid("SCALE_INVALID"), "outer_scale"),
      bad(
          "integer scale 0",
          [](E& e) {
            e.set_format(v1::NUMBER_FORMAT_LPBQ);
            e.clear_scale();
            e.set_scale_code(std::string(1, '\0'));
            e.add_outer_scale(1);
          },
          Invalid("SCALE_INVALID"), "scale_code"),
      bad(
          "no codebook",
          [](E& e) { e.set_format(v1::NUMBER_FORMAT_CODEBOOK4); },
          Invalid("CODEBOOK_INVALID"), "codebook"),
      bad(
          "codebook of one entry",
          [](E& e) {
            e.set_format(v1::NUMBER_FORMAT_CODEBOOK4);
            e.add_codebook(1);
          },
          Invalid("CODEBOOK_INVALID"), "codebook"),
      bad(
          "codebook of 17 entries for 4 bits",
          [](E& e) {
            e.set_format(v1::NUMBER_FORMAT_CODEBOOK4);
            for (int i = 0; i < 17; ++i) e.add_codebook(i);
          },
          Invalid("CODEBOOK_INVALID"), "codebook"),
      bad(
          "codebook that descends",
          [](E& e) {
            e.set_format(v1::NUMBER_FORMAT_CODEBOOK8);
            e.add_codebook(1);
            e.add_codebook(0);
          },
          Invalid("CODEBOOK_INVALID"), "codebook"),
      bad(
          "codebook with NaN",
          [](E& e) {
            e.set_format(v1::NUMBER_FORMAT_CODEBOOK8);
            e.add_codebook(1);
            e.add_codebook(kNan);
          },
          Invalid("CODEBOOK_INVALID"), "codebook"),
      bad(
          "codebook of a format that has none",
          [](E& e) {
            e.add_codebook(0);
            e.add_codebook(1);
          },
          Invalid("CODEBOOK_INVALID"), "codebook"),
      Fails("more scales than the limit",
            Message(
                [] {
                  auto header = Described<v1::QuantizeHeader>(kScaleCount + 1);
                  *header.mutable_encoding() = Int8();
                  header.mutable_encoding()->add_block_size(1);
                  for (int i = 0; i < kScaleCount; ++i) {
                    header.mutable_encoding()->add_scale(1);
                  }
                  return header;
                }(),
                Floats(4)),
            "RESOURCE_EXHAUSTED/SCALE_COUNT_LIMIT",
            "header.encoding.block_size"),
      Fails("no source of an encoding",
            Quantize([](v1::QuantizeHeader& h) { h.clear_encoding(); }),
            Invalid("ENCODING_MISSING"), "header"),
      Fails("unknown NaN policy", Quantize([](v1::QuantizeHeader& h) {
              h.set_nan_policy(static_cast<v1::NanPolicy>(4));
            }),
            Invalid("ENUM_UNKNOWN"), "header.nan_policy"),
      Fails("NaN where it is refused",
            Message(
                [] {
                  v1::QuantizeHeader header = QuantizeHeader(4);
                  header.set_nan_policy(v1::NAN_POLICY_REJECT);
                  return header;
                }(),
                Elements<float>({1, 2, kNan, kInfinity})),
            Invalid("NON_FINITE_REJECTED"), "", "element 2 is nan"),
      {"infinity where it is refused, in the second chunk",
       kQuantize,
       {Message(
            [] {
              v1::QuantizeHeader header = QuantizeHeader(8);
              header.set_nan_policy(v1::NAN_POLICY_REJECT);
              return header;
            }(),
            Floats(4)),
        Chunk(16, Elements<float>({1, -kInfinity, kNan, 1}))},
       {Invalid("NON_FINITE_REJECTED")},
       "",
       "OK",
       "element 5 is -inf"},
      Fails("storing without a name",
            Quantize([](v1::QuantizeHeader& h) { h.set_store(true); }),
            Invalid("NAME_INVALID"), "header.tensor.name.model"),
  };
}

std::vector<StreamCase> SpecCases() {
  using S = v1::EncodingSpec;
  const auto bad = [](const std::string& name,
                      const std::function<void(S&)>& change,
                      const std::string& answer, const std::string& field) {
    return Fails(name, WithSpec(change), answer, "header.spec." + field);
  };
  const auto spec_of = [](v1::ElementType type, bool exclude_zero) {
    v1::QuantizeHeader header = QuantizeHeader(2);
    header.mutable_tensor()->set_element_type(type);
    header.mutable_spec()->set_format(v1::NUMBER_FORMAT_UINT8);
    header.mutable_spec()->set_exclude_zero(exclude_zero);
    return header;
  };
  return {
      bad(
          "spec without format", [](S& s) { s.clear_format(); },
          Invalid("FORMAT_UNKNOWN"), "format"),
      bad(
          "unknown symmetry",
          [](S& s) { s.set_symmetry(static_cast<v1::Symmetry>(6)); },
          Invalid("ENUM_UNKNOWN"), "symmetry"),
      bad(
          "unknown method",
          [](S& s) { s.set_method(static_cast<v1::CalibrationMethod>(9)); },
          Invalid("ENUM_UNKNOWN"), "method"),
      bad(
          "unknown scale type in a spec",
          [](S& s) { s.set_scale_type(static_cast<v1::ScaleType>(-1)); },
          Invalid("ENUM_UNKNOWN"), "scale_type"),
      bad(
          "unknown scale rule",
          [](S& s) {
            s.set_format(v1::NUMBER_FORMAT_MXINT8);
            s.set_mx_scale_rule(static_cast<v1::MxScaleRule>(5));
          },
          Invalid("ENUM_UNKNOWN"), "mx_scale_rule"),
      bad(
          "unknown tail",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_PERCENTILE);
            s.set_tail(static_cast<v1::Tail>(5));
          },
          Invalid("ENUM_UNKNOWN"), "tail"),
      bad(
          "unknown objective",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_BEST_OF);
            s.add_methods(v1::CALIBRATION_METHOD_MSE);
            s.set_objective(static_cast<v1::Objective>(3));
          },
          Invalid("ENUM_UNKNOWN"), "objective"),
      bad(
          "tail fraction of all elements",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_PERCENTILE);
            s.set_tail_fraction(1);
          },
          Invalid("METHOD_INVALID"), "tail_fraction"),
      bad(
          "negative tail fraction",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_PERCENTILE);
            s.set_tail_fraction(-0.1);
          },
          Invalid("METHOD_INVALID"), "tail_fraction"),
      bad(
          "tail fraction NaN",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_PERCENTILE);
            s.set_tail_fraction(kNan);
          },
          Invalid("METHOD_INVALID"), "tail_fraction"),
      bad(
          "one search step",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_MSE);
            s.set_search_steps(1);
          },
          Invalid("METHOD_INVALID"), "search_steps"),
      bad(
          "most search steps",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_MSE);
            s.set_search_steps(~uint32_t{0});
          },
          Invalid("METHOD_INVALID"), "search_steps"),
      bad(
          "gamma 0",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_SQNR);
            s.set_gamma(0);
          },
          Invalid("METHOD_INVALID"), "gamma"),
      bad(
          "infinite gamma",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_SQNR);
            s.set_gamma(kInfinity);
          },
          Invalid("METHOD_INVALID"), "gamma"),
      bad(
          "too many entropy bins",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_ENTROPY);
            s.set_entropy_bins(~uint32_t{0});
          },
          Invalid("METHOD_INVALID"), "entropy_bins"),
      bad(
          "one mantissa bit", [](S& s) { s.set_mantissa_bits(1); },
          Invalid("METHOD_INVALID"), "mantissa_bits"),
      bad(
          "most mantissa bits", [](S& s) { s.set_mantissa_bits(~uint32_t{0}); },
          Invalid("METHOD_INVALID"), "mantissa_bits"),
      bad(
          "fixed range of nothing",
          [](S& s) { s.set_method(v1::CALIBRATION_METHOD_FIXED_RANGE); },
          Invalid("METHOD_INVALID"), "method"),
      bad(
          "fixed range that is not finite",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_FIXED_RANGE);
            s.set_range_max(kInfinity);
          },
          Invalid("METHOD_INVALID"), "method"),
      bad(
          "best of nothing",
          [](S& s) { s.set_method(v1::CALIBRATION_METHOD_BEST_OF); },
          Invalid("METHOD_INVALID"), "method"),
      bad(
          "best of itself",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_BEST_OF);
            s.add_methods(v1::CALIBRATION_METHOD_BEST_OF);
          },
          Invalid("METHOD_INVALID"), "methods"),
      bad(
          "best of 100,000 methods",
          [](S& s) {
            s.set_method(v1::CALIBRATION_METHOD_BEST_OF);
            for (int i = 0; i < 100000; ++i) {
              s.add_methods(v1::CALIBRATION_METHOD_MSE);
            }
          },
          Invalid("METHOD_INVALID"), "methods"),
      bad(
          "methods without best-of",
          [](S& s) { s.add_methods(v1::CALIBRATION_METHOD_MSE); },
          Invalid("METHOD_INVALID"), "methods"),
      bad(
          "asymmetric floats",
          [](S& s) {
            s.set_format(v1::NUMBER_FORMAT_FLOAT8_E5M2);
            s.set_symmetry(v1::SYMMETRY_ASYMMETRIC);
          },
          Invalid("SYMMETRY_INVALID"), "symmetry"),
      bad(
          "scale type of another format",
          [](S& s) {
            s.set_format(v1::NUMBER_FORMAT_MXINT8);
            s.set_scale_type(v1::SCALE_TYPE_E4M3);
          },
          Invalid("SCALE_TYPE_INVALID"), "scale_type"),
      bad(
          "scale rule without E8M0",
          [](S& s) { s.set_mx_scale_rule(v1::MX_SCALE_RULE_CEIL); },
          Invalid("SCALE_TYPE_INVALID"), "mx_scale_rule"),
      bad(
          "power of two without a float scale",
          [](S& s) {
            s.set_format(v1::NUMBER_FORMAT_MXFP8_E4M3);
            s.set_power_of_two_scale(true);
          },
          Invalid("SCALE_TYPE_INVALID"), "power_of_two_scale"),
      bad(
          "integer scale of 129",
          [](S& s) {
            s.set_format(v1::NUMBER_FORMAT_LPBQ);
            s.set_integer_scale_max(129);
          },
          Invalid("SCALE_TYPE_INVALID"), "integer_scale_max"),
      bad(
          "outer blocks without outer scales",
          [](S& s) { s.add_outer_block_size(0); },
          Invalid("SCALE_TYPE_INVALID"), "outer_block_size"),
      bad(
          "spec without its codebook",
          [](S& s) { s.set_format(v1::NUMBER_FORMAT_CODEBOOK2); },
          Invalid("CODEBOOK_INVALID"), "codebook"),
      bad(
          "spec with a codebook of infinities",
          [](S& s) {
            s.set_format(v1::NUMBER_FORMAT_CODEBOOK2);
            s.add_codebook(-kInfinity);
            s.add_codebook(kInfinity);
          },
          Invalid("CODEBOOK_INVALID"), "codebook"),
      bad(
          "axis beyond the rank",
          [](S& s) {
            s.add_block_size(0);
            s.mutable_granularity()->set_axis(2);
          },
          Invalid("BLOCK_SIZE_INVALID"), "granularity"),
      bad(
          "negative group",
          [](S& s) { s.mutable_granularity()->set_group_size(-1); },
          Invalid("BLOCK_SIZE_INVALID"), "granularity"),
      bad(
          "symmetric on an unsigned format",
          [](S& s) {
            s.set_format(v1::NUMBER_FORMAT_UINT8);
            s.set_symmetry(v1::SYMMETRY_FULL_RANGE);
          },
          Invalid("SYMMETRY_INVALID"), "symmetry"),
      bad(
          "zero left out of a symmetric range",
          [](S& s) { s.set_exclude_zero(true); }, Invalid("SYMMETRY_INVALID"),
          "exclude_zero"),
      bad(
          "block size of wrong rank in a spec",
          [](S& s) {
            s.add_block_size(1);
            s.add_block_size(1);
          },
          Invalid("BLOCK_SIZE_INVALID"), "block_size"),
      bad(
          "negative block size in a spec", [](S& s) { s.add_block_size(-7); },
          Invalid("BLOCK_SIZE_INVALID"), "block_size"),
      Fails("more scales than the limit in a spec", Message([] {
              auto header = Described<v1::QuantizeHeader>(kScaleCount + 1);
              header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
              header.mutable_spec()->add_block_size(1);
              return header;
            }()),
            "RESOURCE_EXHAUSTED/SCALE_COUNT_LIMIT", "header.spec.block_size"),
      Fails("range that needs a scale beyond float32",
            Message(spec_of(v1::ELEMENT_TYPE_FLOAT64, false),
                    Elements<double>({-1e300, 1e300})),
            Invalid("SCALE_OVERFLOW")),
      Fails("range too far from zero for its width",
            Message(spec_of(v1::ELEMENT_TYPE_FLOAT32, true),
                    Elements<float>({1e7f, 1e7f + 1})),
            Invalid("ZERO_POINT_RANGE")),
      Fails("spec and range", Quantize([](v1::QuantizeHeader& h) {
              h.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
              h.mutable_range()->set_end_bytes(8);
            }),
            Invalid("RANGE_INVALID"), "header.range", "or omit_encoding"),
      // No element, so no scale, and an encoding has at least one.
      FailsOn("blocks of an empty dimension", kCalibrate, Message([] {
                auto header = Described<v1::CalibrateHeader>(0);
                v1::TensorName& name = *header.mutable_tensor()->mutable_name();
                name.set_model("m");
                name.set_tensor("none");
                header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
                header.mutable_spec()->add_block_size(1);
                return header;
              }()),
              Invalid("BLOCK_SIZE_INVALID"), "header.spec.block_size"),
      FailsOn("calibration without a model", kCalibrate,
              Calibrate([](v1::CalibrateHeader& h) {
                h.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
                h.mutable_tensor()->mutable_name()->set_tensor("t");
              }),
              Invalid("NAME_INVALID"), "header.tensor.name.model"),
      Fails("tensor that can never fit the memory budget",
            Message(
                [] {
                  auto header =
                      Described<v1::QuantizeHeader>(kBudgetBytes / 4 + 1);
                  header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
                  return header;
                }(),
                Floats(4)),
            "RESOURCE_EXHAUSTED/MEMORY_BUDGET", "",
            "is too small; calibrate the tensor first"),
      FailsOn("candidate that can never fit the memory budget", kEvaluate,
              Message(
                  [] {
                    auto header =
                        Described<v1::EvaluateHeader>(kBudgetBytes / 4 + 1);
                    header.add_candidates()->mutable_spec()->set_format(
                        v1::NUMBER_FORMAT_INT8);
                    return header;
                  }(),
                  Floats(2048)),
              "RESOURCE_EXHAUSTED/MEMORY_BUDGET", ""),
  };
}

// "acme" has statistics of four elements for "fc", two blocks of 2 with 4
// mantissa bits, of source "rank-0", whose last sequence is 9.
std::vector<StreamCase> ContributionCases() {
  using C = v1::Contribution;
  const auto contribution = [](const std::function<void(C&)>& change) {
    return Calibrate([&](v1::CalibrateHeader& h) {
      v1::TensorName& name = *h.mutable_tensor()->mutable_name();
      name.set_model("acme");
      name.set_tensor("fc");
      C& c = *h.mutable_contribution();
      c.set_source("rank-3");
      c.set_sequence(1);
      c.add_block_size(2);
      c.set_mantissa_bits(4);
      change(c);
    });
  };
  const auto bad = [&](const std::string& name,
                       const std::function<void(C&)>& change,
                       const std::string& answer, const std::string& field) {
    return FailsOn(name, kCalibrate, contribution(change), answer,
                   "header.contribution" + field);
  };
  const std::string invalid = Invalid("CONTRIBUTION_INVALID");
  const std::string mismatch = "FAILED_PRECONDITION/STATISTICS_MISMATCH";
  return {
      {"contribution",
       kCalibrate,
       {contribution([](C& c) { c.set_source("rank-0"), c.set_sequence(9); })},
       {kServed}},
      bad(
          "contribution without a source", [](C& c) { c.clear_source(); },
          invalid, ".source"),
      bad(
          "source out of the folder", [](C& c) { c.set_source("../x"); },
          invalid, ".source"),
      bad(
          "source of 257 bytes",
          [](C& c) { c.set_source(std::string(257, 's')); }, invalid,
          ".source"),
      bad(
          "sequence 0", [](C& c) { c.clear_sequence(); }, invalid, ".sequence"),
      bad(
          "largest sequence", [](C& c) { c.set_sequence(~uint64_t{0}); },
          invalid, ".sequence"),
      bad(
          "one mantissa bit", [](C& c) { c.set_mantissa_bits(1); }, invalid,
          ".mantissa_bits"),
      bad(
          "11 mantissa bits", [](C& c) { c.set_mantissa_bits(11); }, invalid,
          ".mantissa_bits"),
      bad(
          "most mantissa bits", [](C& c) { c.set_mantissa_bits(~uint32_t{0}); },
          invalid, ".mantissa_bits"),
      bad(
          "averaging constant 0", [](C& c) { c.set_averaging_constant(0); },
          invalid, ".averaging_constant"),
      bad(
          "averaging constant above 1",
          [](C& c) { c.set_averaging_constant(1.5); }, invalid,
          ".averaging_constant"),
      bad(
          "averaging constant NaN",
          [](C& c) { c.set_averaging_constant(kNan); }, invalid,
          ".averaging_constant"),
      bad(
          "contribution with blocks of wrong rank",
          [](C& c) { c.add_block_size(1); }, Invalid("BLOCK_SIZE_INVALID"),
          ".block_size"),
      bad(
          "contribution with negative blocks",
          [](C& c) { c.set_block_size(0, -1); }, Invalid("BLOCK_SIZE_INVALID"),
          ".block_size"),
      bad(
          "contribution with two granularities",
          [](C& c) { c.mutable_granularity(); }, Invalid("BLOCK_SIZE_INVALID"),
          ".granularity"),
      bad(
          "contribution of other blocks", [](C& c) { c.set_block_size(0, 1); },
          mismatch, ""),
      bad(
          "contribution of other mantissa bits",
          [](C& c) { c.set_mantissa_bits(5); }, mismatch, ""),
      FailsOn("contribution without a model", kCalibrate,
              Calibrate([](v1::CalibrateHeader& h) {
                h.mutable_contribution()->set_source("rank-3");
                h.mutable_contribution()->set_sequence(1);
              }),
              Invalid("NAME_INVALID"), "header.tensor.name.model"),
      FailsOn("contribution with a bad spec", kCalibrate,
              Calibrate([](v1::CalibrateHeader& h) {
                v1::TensorName& name = *h.mutable_tensor()->mutable_name();
                name.set_model("acme");
                name.set_tensor("other");
                h.mutable_contribution()->set_source("rank-3");
                h.mutable_contribution()->set_sequence(1);
                h.mutable_spec();
              }),
              Invalid("FORMAT_UNKNOWN"), "header.spec.format"),
      FailsOn("contribution with a spec that is too fine", kCalibrate,
              Calibrate([](v1::CalibrateHeader& h) {
                v1::TensorName& name = *h.mutable_tensor()->mutable_name();
                name.set_model("acme");
                name.set_tensor("coarse");
                h.mutable_contribution()->set_source("rank-3");
                h.mutable_contribution()->set_sequence(1);
                h.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
                h.mutable_spec()->add_block_size(1);
              }),
              "FAILED_PRECONDITION/GRANULARITY_TOO_FINE",
              "header.spec.block_size"),
      FailsOn("contribution of more blocks than there is memory for",
              kCalibrate, Message([] {
                auto header = Described<v1::CalibrateHeader>(kBudgetBytes);
                v1::TensorName& name = *header.mutable_tensor()->mutable_name();
                name.set_model("acme");
                name.set_tensor("many");
                C& c = *header.mutable_contribution();
                c.set_source("rank-3");
                c.set_sequence(1);
                c.add_block_size(1);
                return header;
              }()),
              "RESOURCE_EXHAUSTED/MEMORY_BUDGET", ""),
      FailsOn("contribution of more than the store keeps", kCalibrate,
              Message(
                  [] {
                    auto header = Described<v1::CalibrateHeader>(1024);
                    v1::TensorName& name =
                        *header.mutable_tensor()->mutable_name();
                    name.set_model("acme");
                    name.set_tensor("many");
                    C& c = *header.mutable_contribution();
                    c.set_source("rank-3");
                    c.set_sequence(1);
                    c.set_mantissa_bits(10);
                    return header;
                  }(),
                  Elements([] {
                    std::vector<float> values;
                    for (int i = 0; i < 1024; ++i) {
                      values.push_back(1 + std::ldexp(i, -10));
                    }
                    return values;
                  }())),
              "RESOURCE_EXHAUSTED/STATISTICS_TOO_LARGE", "header.contribution"),
  };
}

std::vector<StreamCase> RangeCases() {
  const auto bad = [](const std::string& name, uint64_t begin, uint64_t end) {
    return Fails(name, WithRange(begin, end), Invalid("RANGE_INVALID"),
                 "header.range");
  };
  const auto bad_codes = [](const std::string& name, uint64_t begin,
                            uint64_t end) {
    return FailsOn(name, kDequantize, Dequantize([&](v1::DequantizeHeader& h) {
                     h.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT16);
                     h.mutable_range()->set_begin_bytes(begin);
                     h.mutable_range()->set_end_bytes(end);
                   }),
                   Invalid("RANGE_INVALID"), "header.range");
  };
  return {
      bad("empty range", 8, 8),
      bad("range without an end", 0, 0),
      bad("reversed range", 12, 4),
      bad("range that begins in an element", 2, 8),
      bad("range that ends in an element", 4, 10),
      bad("range beyond the end", 0, 20),
      bad("largest range", 0, ~uint64_t{0}),
      bad("range at the top", ~uint64_t{0} - 3, ~uint64_t{0}),
      Fails("range that cuts a byte of codes", Quantize([](auto& h) {
              h.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT4);
              h.mutable_range()->set_begin_bytes(4);
              h.mutable_range()->set_end_bytes(16);
            }),
            Invalid("RANGE_INVALID"), "header.range"),
      Fails("chunk before the range", Quantize([](auto& h) {
              h.mutable_range()->set_begin_bytes(8);
              h.mutable_range()->set_end_bytes(16);
            }),
            Invalid("CHUNK_OFFSET")),
      bad_codes("empty range of codes", 4, 4),
      bad_codes("range that cuts a code", 1, 4),
      bad_codes("range beyond the codes", 0, 10),
      FailsOn("half a code", kDequantize,
              Dequantize([](v1::DequantizeHeader& h) {
                h.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT16);
                h.mutable_tensor()->set_shape(0, 2);
              }) + Chunk(0, "abc"),
              Invalid("CHUNK_ALIGNMENT"), ""),
      FailsOn("no source to dequantize with", kDequantize,
              Dequantize([](v1::DequantizeHeader& h) { h.clear_encoding(); }),
              Invalid("ENCODING_MISSING"), "header"),
  };
}

// "acme" has an int8 encoding of two scales for "conv", blocks [2].
std::vector<StreamCase> ReferenceCases() {
  const auto reference = [](const std::string& name, const std::string& message,
                            const std::string& answer,
                            const std::string& field) {
    return Fails(name, message, answer, "header.reference" + field);
  };
  const std::string not_found = "NOT_FOUND/ENCODING_NOT_FOUND";
  return {
      Serves("reference", Referring("acme", "conv")),
      reference("unknown model", Referring("nobody", "conv"), not_found,
                ".name"),
      reference("unknown tensor", Referring("acme", "fc"), not_found, ".name"),
      reference("etag mismatch", Referring("acme", "conv", "0-0"),
                "FAILED_PRECONDITION/ETAG_MISMATCH", ".etag"),
      reference("etag of 100,000 bytes",
                Referring("acme", "conv", std::string(100000, 'e')),
                "FAILED_PRECONDITION/ETAG_MISMATCH", ".etag"),
      reference("reference without a model", Referring("", "conv"),
                Invalid("NAME_INVALID"), ".name.model"),
      reference("reference out of the folder", Referring("../acme", "conv"),
                Invalid("NAME_INVALID"), ".name.model"),
      reference("reference to what does not fit",
                Quantize([](v1::QuantizeHeader& h) {
                  h.mutable_tensor()->set_shape(0, 8);
                  v1::TensorName& name = *h.mutable_reference()->mutable_name();
                  name.set_model("acme");
                  name.set_tensor("conv");
                }),
                Invalid("SCALE_COUNT"), ""),
      reference("reference to blocks of another rank",
                Quantize([](v1::QuantizeHeader& h) {
                  h.mutable_tensor()->add_shape(1);
                  v1::TensorName& name = *h.mutable_reference()->mutable_name();
                  name.set_model("acme");
                  name.set_tensor("conv");
                }),
                Invalid("BLOCK_SIZE_INVALID"), ""),
  };
}

std::vector<StreamCase> EvaluateCases() {
  using H = v1::EvaluateHeader;
  const auto bad = [](const std::string& name,
                      const std::function<void(H&)>& change,
                      const std::string& answer, const std::string& field) {
    return FailsOn(name, kEvaluate, Evaluate(change), answer, field);
  };
  return {
      bad(
          "no candidates", [](H& h) { h.clear_candidates(); },
          Invalid("CANDIDATES_INVALID"), "header.candidates"),
      bad(
          "65 candidates",
          [](H& h) {
            while (h.candidates_size() < 65) {
              *h.add_candidates() = h.candidates(0);
            }
          },
          Invalid("CANDIDATES_INVALID"), "header.candidates"),
      bad(
          "candidate without a source", [](H& h) { h.add_candidates(); },
          Invalid("ENCODING_MISSING"), "header.candidates[1]"),
      bad(
          "candidate with a bad scale",
          [](H& h) {
            *h.add_candidates() = h.candidates(0);
            h.mutable_candidates(1)->mutable_encoding()->set_scale(0, -1);
          },
          Invalid("SCALE_INVALID"), "header.candidates[1].encoding.scale"),
      bad(
          "candidate with a bad parameter",
          [](H& h) {
            v1::EncodingSpec& spec = *h.add_candidates()->mutable_spec();
            spec.set_format(v1::NUMBER_FORMAT_INT8);
            spec.set_method(v1::CALIBRATION_METHOD_SQNR);
            spec.set_gamma(-1);
          },
          Invalid("METHOD_INVALID"), "header.candidates[1].spec.gamma"),
      bad(
          "a metric that there is not",
          [](H& h) {
            h.add_metrics(v1::ERROR_METRIC_SQNR_DB);
            h.add_metrics(static_cast<v1::ErrorMetric>(1));
          },
          Invalid("ENUM_UNKNOWN"), "header.metrics[1]"),
      bad(
          "comparison with candidates", [](H& h) { h.set_comparison(true); },
          Invalid("CANDIDATES_INVALID"), "header.candidates"),
      {"comparison of half of the pairs",
       kEvaluate,
       {Evaluate([](H& h) {
          h.clear_candidates();
          h.set_comparison(true);
        }),
        Good(kEvaluate)},
       {Invalid("TENSOR_INCOMPLETE"), kServed}},
      FailsOn("comparison over the limit", kEvaluate, Message([] {
                auto header = Described<H>(kTensorBytes / 8 + 1);
                header.set_comparison(true);
                return header;
              }()),
              "RESOURCE_EXHAUSTED/TENSOR_TOO_LARGE", "header.tensor.shape"),
      bad(
          "distribution that can never fit the memory budget",
          [](H& h) { h.set_with_distribution(true); },
          "RESOURCE_EXHAUSTED/MEMORY_BUDGET", ""),
      bad(
          "candidate that nobody stored",
          [](H& h) {
            v1::TensorName& name =
                *h.add_candidates()->mutable_reference()->mutable_name();
            name.set_model("nobody");
            name.set_tensor("t");
          },
          "NOT_FOUND/ENCODING_NOT_FOUND",
          "header.candidates[1].reference.name"),
      bad(
          "more metrics than the limit",
          [](H& h) {
            h.set_per_scale_index(true);
            h.mutable_tensor()->set_shape(0, kMetricsCount + 1);
            v1::Encoding& e = *h.mutable_candidates(0)->mutable_encoding();
            e.add_block_size(1);
            while (e.scale_size() <= kMetricsCount) e.add_scale(1);
          },
          "RESOURCE_EXHAUSTED/SCALE_COUNT_LIMIT", "header.per_scale_index"),
  };
}

// A unary or one-sided call whose request is any bytes.
struct CallCase {
  std::string name;
  std::string method;
  std::string request;
  std::string status;

  friend std::ostream& operator<<(std::ostream& os, const CallCase& c) {
    return os << c.name;
  }
};

template <typename Request>
std::string Built(const std::function<void(Request&)>& change) {
  Request request;
  change(request);
  return request.SerializeAsString();
}

CallCase ServiceCall(const std::string& name, const std::string& method,
                     const std::string& request, const std::string& status) {
  return {name, "/quantd.v1.EncodingService/" + method, request, status};
}

// See ContributionCases for what "acme" has.
std::vector<CallCase> StatisticsCases() {
  using Compute = v1::ComputeEncodingsRequest;
  using Sweep = v1::SweepRequest;
  const auto compute = [](const std::string& name,
                          const std::function<void(Compute&)>& change,
                          const std::string& status) {
    Compute request;
    request.set_model("acme");
    request.mutable_default_spec()->set_format(v1::NUMBER_FORMAT_INT8);
    change(request);
    return ServiceCall(name, "ComputeEncodings", request.SerializeAsString(),
                       status);
  };
  const auto sweep = [](const std::string& name,
                        const std::function<void(Sweep&)>& change,
                        const std::string& status) {
    Sweep request;
    request.set_model("acme");
    request.add_specs()->set_format(v1::NUMBER_FORMAT_INT8);
    change(request);
    return ServiceCall(name, "Sweep", request.SerializeAsString(), status);
  };
  const auto overridden = [](const std::string& pattern) {
    return [pattern](Compute& r) {
      v1::SpecOverride& o = *r.add_overrides();
      o.set_pattern(pattern);
      *o.mutable_spec() = r.default_spec();
    };
  };
  const std::string not_found = "NOT_FOUND/STATISTICS_NOT_FOUND";
  return {
      ServiceCall("compute nothing", "ComputeEncodings", "",
                  Invalid("SPEC_MISSING")),
      compute(
          "compute without a model", [](Compute& r) { r.clear_model(); },
          Invalid("NAME_INVALID")),
      compute(
          "compute for a bad revision", [](Compute& r) { r.set_revision("/"); },
          Invalid("NAME_INVALID")),
      compute(
          "compute without statistics", [](Compute& r) { r.set_model("m"); },
          not_found),
      compute(
          "compute with a bad spec",
          [](Compute& r) { r.mutable_default_spec()->set_gamma(kNan); },
          Invalid("METHOD_INVALID")),
      compute("compute with an empty pattern", overridden(""),
              Invalid("PATTERN_INVALID")),
      compute("compute with a pattern of 1,025 bytes",
              overridden(std::string(1025, '*')), Invalid("PATTERN_INVALID")),
      compute(
          "compute with an override without a spec",
          [](Compute& r) { r.add_overrides()->set_pattern("x"); },
          Invalid("SPEC_MISSING")),
      compute(
          "compute with an override with a bad spec",
          [](Compute& r) {
            r.add_overrides()->set_pattern("x");
            r.mutable_overrides(0)->mutable_spec();
          },
          Invalid("FORMAT_UNKNOWN")),
      sweep(
          "sweep of nothing", [](Sweep& r) { r.clear_specs(); },
          Invalid("SPEC_MISSING")),
      sweep(
          "sweep of 65 specs",
          [](Sweep& r) {
            while (r.specs_size() < 65) *r.add_specs() = r.specs(0);
          },
          Invalid("CANDIDATES_INVALID")),
      sweep(
          "sweep of a bad spec", [](Sweep& r) { r.add_specs(); },
          Invalid("FORMAT_UNKNOWN")),
      sweep(
          "sweep without statistics", [](Sweep& r) { r.set_model("m"); },
          not_found),
      sweep(
          "sweep with an empty pattern", [](Sweep& r) { r.add_patterns(""); },
          Invalid("PATTERN_INVALID")),
      sweep(
          "sweep with 1,001 patterns",
          [](Sweep& r) {
            for (int i = 0; i < 1001; ++i) r.add_patterns("x");
          },
          Invalid("PATTERN_INVALID")),
      sweep(
          "target NaN", [](Sweep& r) { r.set_min_sqnr_db(kNan); },
          Invalid("TARGET_INVALID")),
      sweep(
          "infinite target", [](Sweep& r) { r.set_min_sqnr_db(kInfinity); },
          Invalid("TARGET_INVALID")),
      sweep(
          "target of no bytes", [](Sweep& r) { r.set_max_size_bytes(0); },
          Invalid("TARGET_INVALID")),
      sweep(
          "largest target",
          [](Sweep& r) { r.set_max_size_bytes(~uint64_t{0}); },
          Invalid("TARGET_INVALID")),
      ServiceCall("sweep garbage", "Sweep", "\xff\xff\xff",
                  Invalid("MESSAGE_MALFORMED")),
      ServiceCall("statistics without a name", "GetStatistics", "",
                  Invalid("NAME_INVALID")),
      ServiceCall("statistics that nobody contributed", "GetStatistics",
                  Built<v1::GetStatisticsRequest>([](auto& r) {
                    r.mutable_name()->set_model("acme");
                    r.mutable_name()->set_tensor("none");
                  }),
                  not_found),
      ServiceCall("statistics listed without a model", "ListStatistics", "",
                  Invalid("NAME_INVALID")),
      ServiceCall("statistics listed by a bad page", "ListStatistics",
                  Built<v1::ListStatisticsRequest>([](auto& r) {
                    r.set_model("acme");
                    r.set_page_size(1001);
                  }),
                  Invalid("PAGE_INVALID")),
      ServiceCall("delete statistics without a name", "DeleteStatistics", "",
                  Invalid("NAME_INVALID")),
      ServiceCall("delete statistics of a bad source", "DeleteStatistics",
                  Built<v1::DeleteStatisticsRequest>([](auto& r) {
                    r.mutable_name()->set_model("acme");
                    r.mutable_name()->set_tensor("fc");
                    r.set_source("../x");
                  }),
                  Invalid("NAME_INVALID")),
      ServiceCall("delete statistics of a source that is not there",
                  "DeleteStatistics",
                  Built<v1::DeleteStatisticsRequest>([](auto& r) {
                    r.mutable_name()->set_model("acme");
                    r.mutable_name()->set_tensor("fc");
                    r.set_source("rank-77");
                  }),
                  not_found),
  };
}

std::vector<CallCase> EncodingServiceCases() {
  const auto& call = ServiceCall;
  const auto put = [&](const std::string& name,
                       const std::function<void(v1::PutEncodingRequest&)>& f,
                       const std::string& status) {
    v1::PutEncodingRequest request;
    request.mutable_name()->set_model("acme");
    request.mutable_name()->set_tensor("bad");
    *request.mutable_encoding() = Int8();
    f(request);
    return call(name, "PutEncoding", request.SerializeAsString(), status);
  };
  const auto page = [&](const std::string& name, int size,
                        const std::string& token) {
    v1::ListModelsRequest request;
    request.set_page_size(size);
    request.set_page_token(token);
    return call(name, "ListModels", request.SerializeAsString(),
                Invalid("PAGE_INVALID"));
  };
  const auto named = [](const std::string& model, const std::string& tensor) {
    return Built<v1::GetEncodingRequest>([&](auto& r) {
      r.mutable_name()->set_model(model);
      r.mutable_name()->set_tensor(tensor);
    });
  };
  const auto deleted = [](const std::string& tensor, const std::string& etag) {
    return Built<v1::DeleteEncodingRequest>([&](auto& r) {
      r.mutable_name()->set_model("acme");
      r.mutable_name()->set_tensor(tensor);
      r.set_if_match(etag);
    });
  };
  const std::string mismatch = "FAILED_PRECONDITION/ETAG_MISMATCH";
  const std::string not_found = "NOT_FOUND/ENCODING_NOT_FOUND";
  return {
      put(
          "put without an encoding", [](auto& r) { r.clear_encoding(); },
          Invalid("ENCODING_MISSING")),
      put(
          "put without a model",
          [](auto& r) { r.mutable_name()->clear_model(); },
          Invalid("NAME_INVALID")),
      put(
          "put without a name", [](auto& r) { r.clear_name(); },
          Invalid("NAME_INVALID")),
      put(
          "put out of the folder",
          [](auto& r) { r.mutable_name()->set_model("../../etc"); },
          Invalid("NAME_INVALID")),
      put(
          "put with a bad scale",
          [](auto& r) { r.mutable_encoding()->set_scale(0, kNan); },
          Invalid("SCALE_INVALID")),
      put(
          "put with more scales than there is memory for",
          [](auto& r) {
            for (int i = 0; i < kBudgetBytes / 5; ++i) {
              r.mutable_encoding()->add_scale(1);
            }
          },
          "RESOURCE_EXHAUSTED/MEMORY_BUDGET"),
      put(
          "put over another etag", [](auto& r) { r.set_if_match("0-0"); },
          mismatch),
      put(
          "put over an etag of 100,000 bytes",
          [](auto& r) { r.set_if_match(std::string(100000, '\x01')); },
          mismatch),
      put(
          "put only where there is none",
          [](auto& r) {
            r.mutable_name()->set_tensor("conv");
            r.set_if_match("absent");
          },
          mismatch),
      call("get what nobody stored", "GetEncoding", named("acme", "fc"),
           not_found),
      call("get what nobody stored, with the longest names", "GetEncoding",
           named(std::string(256, 'm'),
                 [] {
                   std::string tensor;
                   while (tensor.size() < 1022) tensor += "\xc3\xa9";
                   return tensor;
                 }()),
           not_found),
      call("get without a name", "GetEncoding", "", Invalid("NAME_INVALID")),
      call("delete what nobody stored", "DeleteEncoding", deleted("fc", ""),
           not_found),
      call("delete over another etag", "DeleteEncoding", deleted("conv", "0-0"),
           mismatch),
      page("page size minus 1", -1, ""),
      page("page size 1,001", 1001, ""),
      page("bad page token", 0, "!!!"),
      // Bytes ff fe, and a line break.
      page("page token that is not UTF-8", 0, "__4"),
      page("page token that is no name", 0, "YQpi"),
      call("list without a model", "ListEncodings", "",
           Invalid("NAME_INVALID")),
      call("list of a bad revision", "ListEncodings",
           Built<v1::ListEncodingsRequest>([](auto& r) {
             r.set_model("m");
             r.set_revision("..");
           }),
           Invalid("NAME_INVALID")),
      call("revisions of a bad model", "ListRevisions",
           Built<v1::ListRevisionsRequest>([](auto& r) { r.set_model("/"); }),
           Invalid("NAME_INVALID")),
      call("export without a model", "ExportEncodings", "",
           Invalid("NAME_INVALID")),
      call("import without a model", "ImportEncodings", "",
           Invalid("NAME_INVALID")),
      call("unary garbage", "GetEncoding", "\xff\xff\xff",
           Invalid("MESSAGE_MALFORMED")),
      call("unary text that is not UTF-8", "GetEncoding",
           "\x0a\x03\x0a\x01\xff", Invalid("MESSAGE_MALFORMED")),
      call("unary message too large", "GetEncoding",
           std::string(kMessageBytes + 1, 'x'), "RESOURCE_EXHAUSTED"),
  };
}

// One server for all cases of a suite; after each it is idle and serves.
class MalformedInputTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = new TestServer(Options());
    v1::PutEncodingRequest request;
    request.mutable_name()->set_model("acme");
    request.mutable_name()->set_tensor("conv");
    *request.mutable_encoding() = Int8();
    request.mutable_encoding()->add_scale(1);
    request.mutable_encoding()->add_block_size(2);
    grpc::ClientContext context;
    v1::PutEncodingResponse response;
    const grpc::Status status =
        server_->encodings().PutEncoding(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();

    v1::CalibrateHeader header;
    header.mutable_tensor()->mutable_name()->set_model("acme");
    header.mutable_tensor()->mutable_name()->set_tensor("fc");
    header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    header.mutable_tensor()->add_shape(4);
    header.mutable_contribution()->set_source("rank-0");
    header.mutable_contribution()->set_sequence(9);
    header.mutable_contribution()->add_block_size(2);
    header.mutable_contribution()->set_mantissa_bits(4);
    const absl::StatusOr<v1::CalibrateSummary> summary =
        testing::Calibrate(server_->quantization(), header, Floats(4));
    EXPECT_TRUE(summary.ok()) << summary.status();
  }

  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }

  void TearDown() override {
    EXPECT_EQ(WrongInServing(), "");
    ExpectAtRest();
  }

  static void ExpectAtRest() {
    for (const char* gauge : {"quantd_active_streams", "quantd_active_tensors",
                              "quantd_memory_budget_used_bytes"}) {
      EXPECT_TRUE(GaugeBecomes(gauge, 0)) << gauge;
    }
  }

  // The answers of tensors up to the end of the stream; of the last error also
  // what it says.
  static std::vector<std::string> ReadAnswers(RawStream& stream,
                                              v1::TensorError* last_error) {
    std::vector<std::string> answers;
    std::string bytes;
    while (stream.Read(&bytes)) {
      // Header, data, summary and error have the same numbers in all four.
      v1::QuantizeResponse response;
      EXPECT_TRUE(response.ParseFromString(bytes));
      if (response.has_summary()) answers.push_back(kServed);
      if (response.has_error()) {
        *last_error = response.error();
        answers.push_back(
            CodeAndReason(last_error->code(), last_error->reason()));
      }
    }
    return answers;
  }

  // A good tensor on a stream of its own is served, to the byte. Says what is
  // wrong with it, or nothing.
  std::string WrongInServing() {
    RawStream stream(channel_, kQuantize);
    stream.Write(Good(kQuantize));
    stream.WritesDone();
    std::string bytes;
    if (!stream.Read(&bytes)) {
      return absl::StrCat("no answer: ", stream.Finish().error_message());
    }
    v1::QuantizeResponse response;
    if (!response.ParseFromString(bytes) || !response.has_summary() ||
        response.data() != kGoodCodes) {
      return absl::StrCat("another answer: ", response.ShortDebugString());
    }
    if (stream.Read(&bytes)) return "a second answer";
    const grpc::Status status = stream.Finish();
    return status.ok() ? "" : absl::StrCat("its end: ", Verdict(status));
  }

  static double Gauge(const std::string& name) {
    return MetricValue(server_->metrics(), name);
  }
  static bool GaugeBecomes(const std::string& name, double value) {
    return PollUntil(kLongEnough, [&] { return Gauge(name) == value; });
  }

  static inline TestServer* server_ = nullptr;
  const std::shared_ptr<grpc::Channel> channel_ = server_->NewChannel();
};

class MalformedStreamTest : public MalformedInputTest,
                            public ::testing::WithParamInterface<StreamCase> {};

TEST_P(MalformedStreamTest, GetsItsErrorAndHarmsNobodyElse) {
  const StreamCase& c = GetParam();
  const bool goes_on = c.status == "OK" && !c.half_closes;
  std::vector<std::string> expected = c.answers;
  RawStream stream(channel_, c.method);
  for (const std::string& message : c.messages) stream.Write(message);
  if (goes_on) {
    stream.Write(Good(c.method));
    expected.push_back(kServed);
  }
  stream.WritesDone();
  v1::TensorError error;
  EXPECT_EQ(ReadAnswers(stream, &error), expected) << error.message();
  const grpc::Status status = stream.Finish();
  EXPECT_EQ(Verdict(status), c.status) << status.error_message();
  EXPECT_EQ(error.field(), c.field) << error.message();
  EXPECT_TRUE(absl::StrContains(error.message(), c.text)) << error.message();
}

INSTANTIATE_TEST_SUITE_P(Framing, MalformedStreamTest,
                         ::testing::ValuesIn(FramingCases()), NameOfCase());
INSTANTIATE_TEST_SUITE_P(Scales, MalformedStreamTest,
                         ::testing::ValuesIn(ScaleCases()), NameOfCase());
INSTANTIATE_TEST_SUITE_P(Protobuf, MalformedStreamTest,
                         ::testing::ValuesIn(ProtobufCases()), NameOfCase());
INSTANTIATE_TEST_SUITE_P(Description, MalformedStreamTest,
                         ::testing::ValuesIn(DescriptionCases()), NameOfCase());
INSTANTIATE_TEST_SUITE_P(Encoding, MalformedStreamTest,
                         ::testing::ValuesIn(EncodingCases()), NameOfCase());
INSTANTIATE_TEST_SUITE_P(Spec, MalformedStreamTest,
                         ::testing::ValuesIn(SpecCases()), NameOfCase());
INSTANTIATE_TEST_SUITE_P(Contribution, MalformedStreamTest,
                         ::testing::ValuesIn(ContributionCases()),
                         NameOfCase());
INSTANTIATE_TEST_SUITE_P(Range, MalformedStreamTest,
                         ::testing::ValuesIn(RangeCases()), NameOfCase());
INSTANTIATE_TEST_SUITE_P(Reference, MalformedStreamTest,
                         ::testing::ValuesIn(ReferenceCases()), NameOfCase());
INSTANTIATE_TEST_SUITE_P(Evaluate, MalformedStreamTest,
                         ::testing::ValuesIn(EvaluateCases()), NameOfCase());

class MalformedCallTest : public MalformedInputTest,
                          public ::testing::WithParamInterface<CallCase> {};

TEST_P(MalformedCallTest, GetsItsErrorAndHarmsNobodyElse) {
  const CallCase& c = GetParam();
  RawStream call(channel_, c.method);
  call.Write(c.request);
  call.WritesDone();
  std::string response;
  EXPECT_FALSE(call.Read(&response));
  const grpc::Status status = call.Finish();
  EXPECT_EQ(Verdict(status), c.status) << status.error_message();
}

INSTANTIATE_TEST_SUITE_P(Encodings, MalformedCallTest,
                         ::testing::ValuesIn(EncodingServiceCases()),
                         NameOfCase());
INSTANTIATE_TEST_SUITE_P(Statistics, MalformedCallTest,
                         ::testing::ValuesIn(StatisticsCases()), NameOfCase());

// Streams that a client leaves in the middle.
class AbandonedStreamTest : public MalformedInputTest {
 protected:
  static bool IsOpen() { return Gauge("quantd_active_tensors") == 1; }

  // Opens a tensor and waits until the server has it.
  static void OpenTensor(RawStream& stream, const std::string& message) {
    ASSERT_TRUE(stream.Write(message));
    ASSERT_TRUE(PollUntil(kLongEnough, IsOpen));
  }

  // Codes of 4 MiB, which no window holds.
  static void Flood(RawStream& stream) {
    const int64_t count = kTensorBytes / 8;
    auto header = Described<v1::DequantizeHeader>(count);
    header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT64);
    *header.mutable_encoding() = Int8();
    stream.Write(Message(header));
    for (int64_t at = 0; at < 4 * kChunkBytes; at += kChunkBytes) {
      stream.Write(Chunk(at, std::string(kChunkBytes, '\x01')));
    }
  }

  const std::string half_ = Message(QuantizeHeader(8), Floats(4));
};

TEST_F(AbandonedStreamTest, CancelledInATensor) {
  RawStream stream(channel_, kQuantize);
  OpenTensor(stream, half_);
  stream.Cancel();
  EXPECT_EQ(Verdict(stream.Finish()), "CANCELLED");
}

TEST_F(AbandonedStreamTest, CancelledBeforeTheFirstMessage) {
  RawStream stream(channel_, kQuantize);
  stream.Cancel();
  EXPECT_EQ(Verdict(stream.Finish()), "CANCELLED");
}

TEST_F(AbandonedStreamTest, CancelledInATensorThatIsHeld) {
  RawStream stream(channel_, kQuantize);
  v1::QuantizeHeader header = QuantizeHeader(4096);
  header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  OpenTensor(stream, Message(header, Floats(2048)));
  stream.Cancel();
}

TEST_F(AbandonedStreamTest, CancelledWithoutHavingRead) {
  RawStream stream(channel_, kDequantize);
  Flood(stream);
  ASSERT_TRUE(PollUntil(kLongEnough, IsOpen));
  stream.Cancel();
}

// On a busy machine the deadline may pass before the tensor is open: nobody
// waits for that.
TEST_F(AbandonedStreamTest, DeadlineInATensor) {
  RawStream stream(channel_, kQuantize, absl::Milliseconds(300));
  stream.Write(half_);
  std::string bytes;
  while (stream.Read(&bytes)) {
  }
  EXPECT_EQ(Verdict(stream.Finish()), "DEADLINE_EXCEEDED");
}

TEST_F(AbandonedStreamTest, DeadlineWithoutHavingRead) {
  RawStream stream(channel_, kDequantize, absl::Milliseconds(300));
  Flood(stream);
  EXPECT_EQ(Verdict(stream.Finish()), "DEADLINE_EXCEEDED");
  EXPECT_TRUE(GaugeBecomes("quantd_active_streams", 0));
}

TEST_F(AbandonedStreamTest, ConnectionCutInATensor) {
  CuttableChannel cuttable(server_->address());
  RawStream stream(cuttable.channel(), kQuantize);
  OpenTensor(stream, half_);
  cuttable.Cut();
  EXPECT_TRUE(GaugeBecomes("quantd_active_streams", 0));
}

TEST_F(AbandonedStreamTest, ConnectionCutWithoutHavingRead) {
  CuttableChannel cuttable(server_->address());
  RawStream stream(cuttable.channel(), kDequantize);
  Flood(stream);
  ASSERT_TRUE(PollUntil(kLongEnough, IsOpen));
  cuttable.Cut();
  EXPECT_TRUE(GaugeBecomes("quantd_active_streams", 0));
}

TEST_F(AbandonedStreamTest, ChannelDestroyedInATensor) {
  auto stream = std::make_unique<RawStream>(server_->NewChannel(), kQuantize);
  OpenTensor(*stream, half_);
}

TEST_F(AbandonedStreamTest, UnaryCallCancelled) {
  RawStream call(channel_, "/quantd.v1.EncodingService/ListModels");
  call.Write("");
  call.Cancel();
}

class IdleStreamTest : public AbandonedStreamTest {
 protected:
  static void SetUpTestSuite() {
    server::ServerOptions options = Options();
    options.limits.idle_timeout = absl::Milliseconds(300);
    server_ = new TestServer(options);
  }
  // On a busy machine a good stream may be ended, too.
  void TearDown() override {
    EXPECT_TRUE(PollUntil(kLongEnough, [this] {
      return WrongInServing().empty();
    })) << WrongInServing();
    ExpectAtRest();
  }
};

// On a busy machine it may end before the tensor is open.
TEST_F(IdleStreamTest, EndsInATensor) {
  RawStream stream(channel_, kQuantize);
  stream.Write(half_);
  std::string bytes;
  while (stream.Read(&bytes)) {
  }
  EXPECT_EQ(Verdict(stream.Finish()), "DEADLINE_EXCEEDED/STREAM_IDLE");
}

TEST_F(IdleStreamTest, EndsWithoutHavingRead) {
  const double started = Gauge("grpc_server_started_total");
  RawStream stream(channel_, kDequantize);
  Flood(stream);
  EXPECT_TRUE(PollUntil(kLongEnough, [&] {
    return Gauge("grpc_server_started_total") > started;
  }));
  EXPECT_TRUE(GaugeBecomes("quantd_active_streams", 0));
}

TEST_F(MalformedInputTest, MemoryBudgetTakenByAnotherStreamIsRefused) {
  // Holds more than half of the budget.
  const int64_t count = kBudgetBytes / 4 * 3 / 5;
  auto header = Described<v1::QuantizeHeader>(count);
  header.mutable_spec()->set_format(v1::NUMBER_FORMAT_INT8);
  RawStream holder(channel_, kQuantize);
  holder.Write(Message(header, Floats(1)));
  ASSERT_TRUE(PollUntil(kLongEnough, [&] {
    return Gauge("quantd_memory_budget_used_bytes") > kBudgetBytes / 2;
  }));

  const double rejections = Gauge("quantd_limit_rejections_total");
  RawStream other(channel_, kQuantize);
  other.Write(Message(header, Floats(1)));
  other.Write(Good(kQuantize));
  other.WritesDone();
  v1::TensorError error;
  EXPECT_EQ(
      ReadAnswers(other, &error),
      (std::vector<std::string>{"RESOURCE_EXHAUSTED/MEMORY_BUDGET", kServed}));
  EXPECT_GT(error.retry_after_ms(), 0u);
  EXPECT_EQ(Gauge("quantd_limit_rejections_total"), rejections + 1);
  EXPECT_TRUE(other.Finish().ok());
}

// All rows use the same scales, far more than there is memory for.
TEST_F(MalformedInputTest, ScalesBeforeARangeTakeNoMemory) {
  constexpr uint64_t kColumns = uint64_t{1} << 36;
  constexpr uint64_t kCount = 64;
  TestServer server;
  const auto describe = [&](auto header, uint64_t element_bytes) {
    header.mutable_tensor()->clear_shape();
    header.mutable_tensor()->add_shape(2);
    header.mutable_tensor()->add_shape(kColumns);
    v1::Encoding& encoding = *header.mutable_encoding();
    encoding = Int8();
    encoding.clear_scale();
    encoding.add_block_size(0);
    encoding.add_block_size(1);
    encoding.set_scales_in_chunks(true);
    header.mutable_range()->set_begin_bytes((2 * kColumns - kCount) *
                                            element_bytes);
    header.mutable_range()->set_end_bytes(2 * kColumns * element_bytes);
    return header;
  };
  const auto serve = [&](const std::string& method, const std::string& open,
                         uint64_t offset, const std::string& data) {
    SCOPED_TRACE(method);
    RawStream stream(server.NewChannel(), method);
    v1::QuantizeRequest request;
    request.set_offset(offset);
    request.set_data(data);
    request.mutable_scales()->set_first(kColumns - kCount);
    request.mutable_scales()->set_scale(Floats(kCount));
    stream.Write(open);
    stream.Write(request.SerializeAsString());
    stream.WritesDone();
    v1::TensorError error;
    EXPECT_EQ(ReadAnswers(stream, &error), std::vector<std::string>{kServed})
        << error.message();
    EXPECT_TRUE(stream.Finish().ok());
  };
  serve(kQuantize, Message(describe(Described<v1::QuantizeHeader>(1), 4)),
        (2 * kColumns - kCount) * 4, Floats(kCount));
  serve(kDequantize, Message(describe(Described<v1::DequantizeHeader>(1), 1)),
        2 * kColumns - kCount, std::string(kCount, '\1'));
}

TEST_F(MalformedInputTest, WhatOnlyTheServerSetsIsIgnored) {
  v1::PutEncodingRequest put;
  put.mutable_name()->set_model("acme");
  put.mutable_name()->set_tensor("fc");
  *put.mutable_encoding() = Int8();
  put.mutable_encoding()->set_degenerate_count(~uint64_t{0});
  v1::GetEncodingRequest get;
  *get.mutable_name() = put.name();
  v1::GetEncodingResponse response;
  {
    grpc::ClientContext context;
    v1::PutEncodingResponse ignored;
    ASSERT_TRUE(server_->encodings().PutEncoding(&context, put, &ignored).ok());
  }
  grpc::ClientContext context;
  ASSERT_TRUE(server_->encodings().GetEncoding(&context, get, &response).ok());
  EXPECT_EQ(response.stored_encoding().encoding().degenerate_count(), 0u);

  RawStream stream(channel_, kQuantize);
  stream.Write(WithEncoding(
      [](v1::Encoding& e) { e.set_degenerate_count(~uint64_t{0}); }));
  stream.WritesDone();
  std::string bytes;
  v1::QuantizeResponse quantized;
  ASSERT_TRUE(stream.Read(&bytes));
  ASSERT_TRUE(quantized.ParseFromString(bytes));
  EXPECT_EQ(quantized.header().encoding().degenerate_count(), 0u);
  EXPECT_FALSE(stream.Read(&bytes));
  EXPECT_TRUE(stream.Finish().ok());
}

}  // namespace
}  // namespace quantd::testing::malformed_input_test
