// Streams made from a grammar: valid tensors, then changed at random, in their
// headers, in the order of their chunks or in the bytes of their messages. A
// model of the protocol, which knows nothing of the server, says beforehand how
// every tensor and the stream end.
//
// QUANTD_MALFORMED_STREAMS is the number of streams, 200 by default, 2,000 for
// the full count; QUANTD_MALFORMED_SEED starts other ones. Stream 17 alone:
// --gtest_filter='*/Stream17'. Of one that fails the messages are printed.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <ostream>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "google/protobuf/empty.pb.h"
#include "google/protobuf/stubs/logging.h"
#include "google/protobuf/unknown_field_set.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.pb.h"
#include "tests/support/count.h"
#include "tests/support/http_get.h"
#include "tests/support/metric_value.h"
#include "tests/support/paths.h"
#include "tests/support/raw_stream.h"
#include "tests/support/sanitizers.h"
#include "tests/support/server_process.h"
#include "tests/support/temporary_directory.h"

namespace quantd::testing::malformed_streams_test {
namespace {

using google::protobuf::Message;
using Random = std::mt19937_64;

constexpr int64_t kChunkBytes = 64 << 10;
constexpr int64_t kTensorBytes = 8 << 20;
// Of an encoding in one message.
constexpr int64_t kScaleCount = kChunkBytes / 4;
// Of the server, while it serves most of the streams. The sanitizers' own
// allocators take longer to come to rest.
constexpr int64_t kMostGrownBytes = int64_t{kSanitized ? 64 : 16} << 20;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// --- What is expected ------------------------------------------------------

constexpr char kServed[] = "OK";

// How a tensor ends: kServed, or code and reason and the field at fault.
struct Answer {
  std::string verdict = kServed;
  std::string field = {};

  bool served() const { return verdict == kServed; }
  friend bool operator==(const Answer& a, const Answer& b) {
    return a.verdict == b.verdict && a.field == b.field;
  }
  friend std::ostream& operator<<(std::ostream& os, const Answer& a) {
    return os << a.verdict << (a.field.empty() ? "" : " at ") << a.field;
  }
};

Answer Invalid(const std::string& reason, const std::string& field = "") {
  return {"INVALID_ARGUMENT/" + reason, field};
}

// What the contract says of a tensor by its header.
struct Plan {
  std::string header;
  // How it is opened.
  Answer opening;
  // The bytes that have to come, cut at multiples of `unit`.
  int64_t begin = 0;
  int64_t end = 0;
  int64_t unit = 1;
  // How it ends when they have.
  Answer completion;
};

// A message up; all four calls have the same fields.
struct Envelope {
  bool has_header = false;
  std::string header;
  uint64_t offset = 0;
  std::string data;
  bool has_shared = false;
};

// As protobuf takes it; nullopt for what is not a message. By way of protobuf's
// unknown fields, so that it shares no code with the server's parser.
absl::optional<Envelope> Parse(const std::string& bytes) {
  google::protobuf::Empty message;
  if (!message.ParseFromString(bytes)) return absl::nullopt;
  const google::protobuf::UnknownFieldSet& fields =
      message.GetReflection()->GetUnknownFields(message);
  Envelope envelope;
  std::string shared;
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    const bool is_bytes =
        field.type() == google::protobuf::UnknownField::TYPE_LENGTH_DELIMITED;
    if (field.number() == 1 && is_bytes) {
      envelope.has_header = true;
      envelope.header += field.length_delimited();
    } else if (field.number() == 2 &&
               field.type() == google::protobuf::UnknownField::TYPE_VARINT) {
      envelope.offset = field.varint();
    } else if (field.number() == 3 && is_bytes) {
      envelope.data = field.length_delimited();
    } else if (field.number() == 4 && is_bytes) {
      envelope.has_shared = true;
      shared += field.length_delimited();
    }
  }
  if (!v1::SharedSpan().ParseFromString(shared)) return absl::nullopt;
  return envelope;
}

struct Expectation {
  std::vector<Answer> answers;
  // How the stream ends: kServed or code and reason.
  std::string status = kServed;
  // The messages end within a tensor.
  bool open_at_end = false;
};

// The protocol of the four streams, from its description in
// quantization_service.proto.
class Model {
 public:
  // `prototype` of the header of the call; `plans` of every header that is
  // sent and is a message.
  Model(const Message& prototype, const std::map<std::string, Plan>& plans)
      : prototype_(prototype), plans_(plans) {}

  // Nullopt where a header means something that no plan is for.
  absl::optional<Expectation> Expect(const std::vector<std::string>& messages) {
    for (const std::string& message : messages) {
      if (!Take(message)) return absl::nullopt;
      if (expected_.status != kServed) break;
    }
    expected_.open_at_end = plan_ != nullptr;
    return expected_;
  }

 private:
  void End(const Answer& answer) {
    expected_.answers.push_back(answer);
    skipping_ = !answer.served();
    plan_ = nullptr;
  }

  bool Take(const std::string& message) {
    const absl::optional<Envelope> envelope = Parse(message);
    if (!envelope.has_value()) {
      expected_.status = "INVALID_ARGUMENT/MESSAGE_MALFORMED";
      return true;
    }
    if (envelope->has_header) {
      if (plan_ != nullptr) End(Invalid("TENSOR_INCOMPLETE"));
      if (!Open(envelope->header)) return false;
    } else if (plan_ == nullptr && !skipping_) {
      expected_.status = "INVALID_ARGUMENT/HEADER_MISSING";
      return true;
    }
    if (plan_ != nullptr) Push(*envelope);
    if (plan_ != nullptr && pushed_ == plan_->end) End(plan_->completion);
    return true;
  }

  bool Open(const std::string& header) {
    skipping_ = false;
    const std::unique_ptr<Message> parsed(prototype_.New());
    if (!parsed->ParseFromString(header)) {
      End(Invalid("HEADER_INVALID"));
      return true;
    }
    const auto it = plans_.find(header);
    if (it == plans_.end()) return false;
    if (!it->second.opening.served()) {
      End(it->second.opening);
      return true;
    }
    plan_ = &it->second;
    pushed_ = plan_->begin;
    return true;
  }

  void Push(const Envelope& envelope) {
    const auto size = static_cast<int64_t>(envelope.data.size());
    if (envelope.has_shared) {
      return End(
          size > 0 ? Invalid("REGION_INVALID", "shared")
                   : Answer{"NOT_FOUND/REGION_NOT_FOUND", "shared.region_id"});
    }
    if (size > kChunkBytes) return End(Invalid("CHUNK_TOO_LARGE"));
    if (size == 0) return;
    if (envelope.offset != static_cast<uint64_t>(pushed_)) {
      return End(Invalid("CHUNK_OFFSET"));
    }
    if (size > plan_->end - pushed_) return End(Invalid("TENSOR_TOO_LONG"));
    if (size % plan_->unit != 0) return End(Invalid("CHUNK_ALIGNMENT"));
    pushed_ += size;
  }

  const Message& prototype_;
  const std::map<std::string, Plan>& plans_;
  Expectation expected_;
  const Plan* plan_ = nullptr;
  int64_t pushed_ = 0;
  bool skipping_ = false;
};

// --- What is sent ----------------------------------------------------------

enum class Method { kCalibrate, kQuantize, kDequantize, kEvaluate };
constexpr const char* kMethodNames[] = {
    "/quantd.v1.QuantizationService/Calibrate",
    "/quantd.v1.QuantizationService/Quantize",
    "/quantd.v1.QuantizationService/Dequantize",
    "/quantd.v1.QuantizationService/Evaluate"};

const Message& HeaderPrototype(Method method) {
  switch (method) {
    case Method::kCalibrate:
      return v1::CalibrateHeader::default_instance();
    case Method::kQuantize:
      return v1::QuantizeHeader::default_instance();
    case Method::kDequantize:
      return v1::DequantizeHeader::default_instance();
    case Method::kEvaluate:
      break;
  }
  return v1::EvaluateHeader::default_instance();
}

std::string Varint(uint64_t value, int padding = 0) {
  std::string out;
  for (; value >= 0x80; value >>= 7) {
    out.push_back(static_cast<char>(value | 0x80));
  }
  out.push_back(static_cast<char>(value));
  for (; padding > 0; --padding) {
    out.back() = static_cast<char>(out.back() | 0x80);
    out.push_back('\0');
  }
  return out;
}

std::string Tag(int field, int wire_type) {
  return Varint(static_cast<uint64_t>(field) << 3 | wire_type);
}
std::string BytesField(int field, const std::string& bytes) {
  return Tag(field, 2) + Varint(bytes.size()) + bytes;
}
std::string VarintField(int field, uint64_t value) {
  return Tag(field, 0) + Varint(value);
}

// A message before it is written down.
struct Piece {
  absl::optional<std::string> header = {};
  uint64_t offset = 0;
  std::string data = {};
  // Anything behind the fields.
  std::string more = {};

  std::string Bytes() const {
    return (header.has_value() ? BytesField(1, *header) : "") +
           (offset > 0 ? VarintField(2, offset) : "") +
           (data.empty() ? "" : BytesField(3, data)) + more;
  }
};

// A tensor of a stream, valid until it is changed.
struct Tensor {
  enum class Source { kNone, kEncoding, kSpec, kReference };

  template <typename Header>
  Header* As() {
    return static_cast<Header*>(header.get());
  }
  template <typename Part>
  Part* Sub(Message* message, const char* field) {
    return static_cast<Part*>(message->GetReflection()->MutableMessage(
        message, message->GetDescriptor()->FindFieldByName(field)));
  }
  v1::TensorDescription* description() {
    return Sub<v1::TensorDescription>(header.get(), "tensor");
  }
  // Where a source of an encoding is: the header or its first candidate.
  Message* source_parent() {
    return method == Method::kEvaluate
               ? As<v1::EvaluateHeader>()->mutable_candidates(0)
               : header.get();
  }
  v1::Encoding* encoding() {
    return Sub<v1::Encoding>(source_parent(), "encoding");
  }
  v1::EncodingSpec* spec() {
    return Sub<v1::EncodingSpec>(source_parent(), "spec");
  }
  v1::EncodingReference* reference() {
    return Sub<v1::EncodingReference>(source_parent(), "reference");
  }
  v1::ByteRange* range() { return Sub<v1::ByteRange>(header.get(), "range"); }
  v1::Contribution* contribution() {
    return As<v1::CalibrateHeader>()->mutable_contribution();
  }
  // Path of the source's parent.
  std::string prefix() const {
    return method == Method::kEvaluate ? "header.candidates[0]." : "header.";
  }
  bool takes_codes() const { return method == Method::kDequantize; }
  bool has_fixed_encoding() const {
    return source == Source::kEncoding || source == Source::kReference;
  }
  bool has_range() const {
    return (method == Method::kQuantize || takes_codes()) &&
           has_fixed_encoding();
  }
  int rank() { return description()->shape_size(); }

  Method method = Method::kQuantize;
  Source source = Source::kNone;
  bool contributes = false;
  std::shared_ptr<Message> header;
  int64_t element_bytes = 4;
  // Of the codes, with a fixed encoding.
  bool integer_codes = true;
  Plan plan;
  // The bytes of [plan.begin, plan.end).
  std::string data;
  // What was done to it, for people.
  std::vector<std::string> changes;
};

// A change of a header and what it makes of the tensor; "@" in the field stands
// for Tensor::prefix.
struct HeaderChange {
  std::string name;
  std::function<bool(Tensor&)> applies;
  std::function<void(Tensor&, Random&)> apply;
  Answer answer;
  // The answer comes when all bytes have, not at once.
  bool late = false;
};

class Generator {
 public:
  explicit Generator(uint64_t seed)
      : seed_(seed), random_(seed), changes_(Changes()) {}

  struct Stream {
    enum class End { kGoesOn, kHalfCloses, kCancels, kCuts };

    Method method;
    std::vector<std::string> messages;
    Expectation expected;
    End end = End::kGoesOn;
    std::string description;
  };

  Stream Make() {
    for (;;) {
      Stream stream;
      stream.method = static_cast<Method>(random_() % 4);
      if (TryMake(&stream)) return stream;
    }
  }

 private:
  bool Chance(int percent) {
    return static_cast<int>(random_() % 100) < percent;
  }
  int64_t Between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() %
                                      static_cast<uint64_t>(high - low + 1));
  }

  bool TryMake(Stream* stream);
  Tensor MakeTensor(Method method);
  void SetSource(Tensor* tensor);
  void SetEncoding(v1::Encoding* encoding, Tensor* tensor);
  std::string MakeData(const Tensor& tensor, int64_t bytes);
  void ChangeHeader(Tensor* tensor);
  std::vector<Piece> Cut(const Tensor& tensor);
  void ChangePieces(const Tensor& tensor, std::vector<Piece>* pieces,
                    std::vector<std::string>* changes);
  void ChangeBytes(std::vector<std::string>* messages,
                   std::vector<std::string>* changes);

  static std::vector<HeaderChange> Changes();

  const uint64_t seed_;
  Random random_;
  const std::vector<HeaderChange> changes_;
  int tensor_count_ = 0;
};

void Generator::SetEncoding(v1::Encoding* encoding, Tensor* tensor) {
  struct Format {
    v1::NumberFormat format;
    int codes_per_byte;
    int bytes_per_code;
    bool integer;
  };
  static constexpr Format kFormats[] = {
      {v1::NUMBER_FORMAT_INT8, 1, 1, true},
      {v1::NUMBER_FORMAT_UINT8, 1, 1, true},
      {v1::NUMBER_FORMAT_INT4, 2, 1, true},
      {v1::NUMBER_FORMAT_UINT2, 4, 1, true},
      {v1::NUMBER_FORMAT_INT16, 1, 2, true},
      {v1::NUMBER_FORMAT_FLOAT8_E4M3FN, 1, 1, false}};
  const Format& format = kFormats[random_() % std::size(kFormats)];
  encoding->set_format(format.format);
  int64_t scales = 1;
  if (tensor->rank() > 0 && Chance(40)) {
    scales = tensor->description()->shape(0);
    encoding->add_block_size(1);
    for (int d = 1; d < tensor->rank(); ++d) encoding->add_block_size(0);
  }
  for (int64_t i = 0; i < scales; ++i) encoding->add_scale(0.25f);
  tensor->integer_codes = format.integer;
  if (tensor->takes_codes()) {
    tensor->plan.unit = format.bytes_per_code;
    const int64_t count = tensor->plan.end;
    tensor->plan.end = (count + format.codes_per_byte - 1) /
                       format.codes_per_byte * format.bytes_per_code;
  }
}

void Generator::SetSource(Tensor* tensor) {
  using Source = Tensor::Source;
  const auto set_spec = [&](v1::EncodingSpec* spec) {
    spec->set_format(v1::NUMBER_FORMAT_INT8);
    if (tensor->rank() > 0 && Chance(40)) {
      spec->add_block_size(1);
      for (int d = 1; d < tensor->rank(); ++d) spec->add_block_size(0);
    }
  };
  switch (tensor->method) {
    case Method::kCalibrate:
      if (Chance(30)) {
        tensor->source = Source::kSpec;
        set_spec(tensor->spec());
      } else if (Chance(50)) {
        tensor->contributes = true;
        tensor->contribution()->set_source("rank-0");
        tensor->contribution()->set_sequence(1);
      }
      return;
    case Method::kEvaluate:
      if (Chance(20)) {
        tensor->As<v1::EvaluateHeader>()->set_comparison(true);
        tensor->plan.end *= 2;
        return;
      }
      for (int64_t n = Between(1, 3); n > 0; --n) {
        v1::Encoding& encoding = *tensor->As<v1::EvaluateHeader>()
                                      ->add_candidates()
                                      ->mutable_encoding();
        encoding.set_format(v1::NUMBER_FORMAT_UINT4);
        encoding.add_scale(0.5f);
      }
      break;
    default:
      break;
  }
  const int64_t kind = Between(0, tensor->takes_codes() ? 2 : 3);
  if (kind == 3) {
    tensor->source = Source::kSpec;
    tensor->spec()->Clear();
    set_spec(tensor->spec());
  } else if (kind == 2) {
    tensor->source = Source::kReference;
    v1::TensorName& name = *tensor->reference()->mutable_name();
    name.set_model("acme");
    name.set_tensor("any");
  } else {
    tensor->source = Source::kEncoding;
    tensor->encoding()->Clear();
    SetEncoding(tensor->encoding(), tensor);
  }
}

Tensor Generator::MakeTensor(Method method) {
  Tensor tensor;
  tensor.method = method;
  tensor.header.reset(HeaderPrototype(method).New());
  v1::TensorDescription& description = *tensor.description();
  description.set_element_type(static_cast<v1::ElementType>(Between(1, 4)));
  constexpr int64_t kElementBytes[] = {0, 4, 2, 2, 8};
  tensor.element_bytes = kElementBytes[description.element_type()];
  int64_t count = 1;
  for (int64_t rank = Between(0, 3); rank > 0; --rank) {
    const int64_t size = Between(1, 24);
    description.add_shape(size);
    count *= size;
  }
  v1::TensorName& name = *description.mutable_name();
  name.set_model("grammar/net");
  // Its own, so that what it stores has no history.
  name.set_tensor(absl::StrCat("tensor ", seed_, " ", tensor_count_++));
  tensor.plan.unit = tensor.takes_codes() ? 1 : tensor.element_bytes;
  tensor.plan.end = tensor.takes_codes() ? count : count * tensor.element_bytes;
  SetSource(&tensor);
  if (method == Method::kQuantize && tensor.has_fixed_encoding()) {
    tensor.As<v1::QuantizeHeader>()->set_store(Chance(10));
  }
  // Eight elements lie on whole bytes of any codes.
  const int64_t step =
      tensor.takes_codes() ? tensor.plan.unit : 8 * tensor.element_bytes;
  if (tensor.has_range() && tensor.plan.end > 2 * step && Chance(25)) {
    const int64_t steps = tensor.plan.end / step;
    const int64_t begin = Between(0, steps - 1);
    tensor.plan.begin = begin * step;
    tensor.plan.end = Between(begin + 1, steps) * step;
    tensor.range()->set_begin_bytes(tensor.plan.begin);
    tensor.range()->set_end_bytes(tensor.plan.end);
  }
  return tensor;
}

std::string Generator::MakeData(const Tensor& tensor, int64_t bytes) {
  std::string data(static_cast<size_t>(bytes), '\0');
  if (tensor.takes_codes()) {
    for (char& byte : data) byte = static_cast<char>(random_() % 0x70);
    return data;
  }
  // Exponents near 1 and a few bits behind, in the upper bytes of an element.
  const auto type = const_cast<Tensor&>(tensor).description()->element_type();
  for (int64_t at = 0; at + tensor.element_bytes <= bytes;
       at += tensor.element_bytes) {
    const size_t top = static_cast<size_t>(at + tensor.element_bytes) - 1;
    const auto sign = static_cast<char>(random_() % 2 << 7);
    data[top] = static_cast<char>(
        sign | (type == v1::ELEMENT_TYPE_FLOAT16 ? 0x3C : 0x3F));
    data[top - 1] = static_cast<char>(
        random_() % 0x40 | (type == v1::ELEMENT_TYPE_FLOAT64 ? 0xF0 : 0x80));
  }
  return data;
}

// --- Changes of headers ----------------------------------------------------

std::vector<HeaderChange> Generator::Changes() {
  using T = Tensor;
  std::vector<HeaderChange> changes;
  const auto any = [](T&) { return true; };
  const auto add = [&](const std::string& name, std::function<bool(T&)> applies,
                       std::function<void(T&, Random&)> apply,
                       const Answer& answer) {
    changes.push_back({name, std::move(applies), std::move(apply), answer});
  };
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

  // The tensor's description.
  for (const int type : {0, 5, -1, 1 << 30}) {
    add(
        absl::StrCat("element type ", type), any,
        [type](T& t, Random&) {
          t.description()->set_element_type(static_cast<v1::ElementType>(type));
        },
        Invalid("ELEMENT_TYPE_UNKNOWN", "header.tensor.element_type"));
  }
  add(
      "no description", any, [](T& t, Random&) { t.description()->Clear(); },
      Invalid("ELEMENT_TYPE_UNKNOWN", "header.tensor.element_type"));
  const int64_t two_32 = int64_t{1} << 32;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, -2},
                                            {-1},
                                            {kMin},
                                            {kMax},
                                            {two_32, two_32},
                                            {4, two_32, two_32},
                                            {kMax, kMax, 0},
                                            std::vector<int64_t>(17, 1),
                                            std::vector<int64_t>(5000, 1)}) {
    add(
        absl::StrCat("shape of ", shape.size(), " dimensions, ", shape[0]), any,
        [shape](T& t, Random&) {
          t.description()->mutable_shape()->Assign(shape.begin(), shape.end());
        },
        Invalid("SHAPE_INVALID", "header.tensor.shape"));
  }
  for (const int64_t count : {kTensorBytes / 2 + 1, int64_t{1} << 56}) {
    add(absl::StrCat("tensor of ", count), any,
        [count](T& t, Random&) {
          t.description()->mutable_shape()->Assign(&count, &count + 1);
        },
        {"RESOURCE_EXHAUSTED/TENSOR_TOO_LARGE", "header.tensor.shape"});
  }
  const auto bad_name = [&](const std::string& field, const std::string& text) {
    add(
        absl::StrCat("bad ", field, " ", absl::CHexEscape(text.substr(0, 20))),
        any,
        [field, text](T& t, Random&) {
          v1::TensorName* const name = t.description()->mutable_name();
          name->GetReflection()->SetString(
              name, name->GetDescriptor()->FindFieldByName(field), text);
        },
        Invalid("NAME_INVALID", "header.tensor.name." + field));
  };
  for (const char* field : {"model", "revision"}) {
    bad_name(field, "../x");
    bad_name(field, "/etc");
    bad_name(field, "a b");
    bad_name(field, "caf\xc3\xa9");
    bad_name(field, std::string("a\0b", 3));
    bad_name(field, std::string(257, 'n'));
  }
  bad_name("tensor", std::string(1025, 't'));
  bad_name("tensor", "a\nb");
  bad_name("tensor", "a\xc2\x85");
  add(
      "text that is not UTF-8", any,
      [](T& t, Random&) {
        t.description()->mutable_name()->set_tensor("\xff\xfe");
      },
      Invalid("HEADER_INVALID"));

  // An inline encoding.
  using E = v1::Encoding;
  const auto encoded = [](T& t) { return t.source == T::Source::kEncoding; };
  const auto integers = [](T& t) {
    return t.source == T::Source::kEncoding && t.integer_codes;
  };
  // Of one scale, so that it may be any other format's.
  const auto one_scale = [](T& t) {
    return t.source == T::Source::kEncoding &&
           t.encoding()->block_size().empty();
  };
  const auto bad_encoding = [&](const std::string& name,
                                std::function<bool(T&)> applies,
                                std::function<void(E&)> change,
                                const std::string& reason,
                                const std::string& field) {
    add(
        "encoding: " + name, std::move(applies),
        [change = std::move(change)](T& t, Random&) { change(*t.encoding()); },
        Invalid(reason, "@encoding." + field));
  };
  for (const float scale : {0.0f, -0.5f, kNan, kInfinity, 1e-40f}) {
    bad_encoding(
        absl::StrCat("scale ", scale), encoded,
        [scale](E& e) { e.set_scale(0, scale); }, "SCALE_INVALID", "scale");
  }
  bad_encoding(
      "no scale", encoded, [](E& e) { e.clear_scale(); }, "SCALE_COUNT",
      "scale");
  bad_encoding(
      "a scale too many", encoded, [](E& e) { e.add_scale(1); }, "SCALE_COUNT",
      "scale");
  bad_encoding(
      "a zero point too many", integers,
      [](E& e) { e.mutable_zero_point()->Resize(e.scale_size() + 1, 0); },
      "SCALE_COUNT", "zero_point");
  bad_encoding(
      "zero point out of range", integers,
      [](E& e) { e.mutable_zero_point()->Resize(e.scale_size(), 70000); },
      "ZERO_POINT_RANGE", "zero_point");
  bad_encoding(
      "qmin is qmax", integers,
      [](E& e) {
        e.set_qmin(1);
        e.set_qmax(1);
      },
      "CODE_RANGE_INVALID", "qmin");
  bad_encoding(
      "qmax of 2^30", integers, [](E& e) { e.set_qmax(1 << 30); },
      "CODE_RANGE_INVALID", "qmax");
  for (const int format : {0, 1, 1000, -8}) {
    bad_encoding(
        absl::StrCat("format ", format), encoded,
        [format](E& e) { e.set_format(static_cast<v1::NumberFormat>(format)); },
        "FORMAT_UNKNOWN", "format");
  }
  bad_encoding(
      "scale type 7", encoded,
      [](E& e) { e.set_scale_type(static_cast<v1::ScaleType>(7)); },
      "ENUM_UNKNOWN", "scale_type");
  bad_encoding(
      "scale that is no bfloat16", encoded,
      [](E& e) {
        e.set_scale_type(v1::SCALE_TYPE_BFLOAT16);
        e.set_scale(0, 0.1f);
      },
      "SCALE_INVALID", "scale");
  bad_encoding(
      "scale codes", encoded, [](E& e) { e.set_scale_code("x"); },
      "SCALE_TYPE_INVALID", "scale_code");
  bad_encoding(
      "codebook", encoded,
      [](E& e) {
        e.add_codebook(0);
        e.add_codebook(1);
      },
      "CODEBOOK_INVALID", "codebook");
  bad_encoding(
      "blocks of another rank", encoded,
      [](E& e) {
        for (int i = 0; i < 5; ++i) e.add_block_size(0);
      },
      "BLOCK_SIZE_INVALID", "block_size");
  bad_encoding(
      "negative blocks",
      [](T& t) {
        return t.source == T::Source::kEncoding &&
               !t.encoding()->block_size().empty();
      },
      [](E& e) { e.set_block_size(0, -1); }, "BLOCK_SIZE_INVALID",
      "block_size");
  bad_encoding(
      "scale type of another format", one_scale,
      [](E& e) {
        e.set_format(v1::NUMBER_FORMAT_MXFP4_E2M1);
        e.set_scale_type(v1::SCALE_TYPE_FLOAT32);
      },
      "SCALE_TYPE_INVALID", "scale_type");
  bad_encoding(
      "no scale codes", one_scale,
      [](E& e) {
        e.set_format(v1::NUMBER_FORMAT_MXFP4_E2M1);
        e.clear_scale();
      },
      "SCALE_COUNT", "scale_code");
  bad_encoding(
      "outer scale 0", one_scale,
      [](E& e) {
        e.set_format(v1::NUMBER_FORMAT_NVFP4);
        e.clear_scale();
        e.set_scale_code("x");
        e.add_outer_scale(0);
      },
      "SCALE_INVALID", "outer_scale");
  bad_encoding(
      "codebook of one entry", one_scale,
      [](E& e) {
        e.set_format(v1::NUMBER_FORMAT_CODEBOOK4);
        e.add_codebook(1);
      },
      "CODEBOOK_INVALID", "codebook");

  // Where the encoding comes from.
  const auto missing_source = [](T& t, Random&) {
    Message* const parent = t.source_parent();
    const auto* const oneof =
        parent->GetDescriptor()->FindOneofByName("encoding_source");
    parent->GetReflection()->ClearOneof(parent, oneof);
  };
  add(
      "no source",
      [](T& t) {
        return t.source != T::Source::kNone &&
               (t.method == Method::kQuantize || t.takes_codes());
      },
      missing_source, Invalid("ENCODING_MISSING", "header"));
  add(
      "no source",
      [](T& t) {
        return t.source != T::Source::kNone && t.method == Method::kEvaluate;
      },
      missing_source, Invalid("ENCODING_MISSING", "header.candidates[0]"));
  const auto referring = [](T& t) { return t.source == T::Source::kReference; };
  const auto bad_reference =
      [&](const std::string& name,
          std::function<void(v1::EncodingReference&)> change,
          const std::string& verdict, const std::string& field) {
        add("reference: " + name, referring,
            [change = std::move(change)](T& t, Random&) {
              change(*t.reference());
            },
            {verdict, "@reference" + field});
      };
  const std::string not_found = "NOT_FOUND/ENCODING_NOT_FOUND";
  bad_reference(
      "unknown tensor", [](auto& r) { r.mutable_name()->set_tensor("none"); },
      not_found, ".name");
  bad_reference(
      "unknown model", [](auto& r) { r.mutable_name()->set_model("nobody"); },
      not_found, ".name");
  bad_reference(
      "another etag", [](auto& r) { r.set_etag("0-0"); },
      "FAILED_PRECONDITION/ETAG_MISMATCH", ".etag");
  bad_reference(
      "long etag", [](auto& r) { r.set_etag(std::string(5000, 'e')); },
      "FAILED_PRECONDITION/ETAG_MISMATCH", ".etag");
  bad_reference(
      "out of the folder",
      [](auto& r) { r.mutable_name()->set_model("../acme"); },
      "INVALID_ARGUMENT/NAME_INVALID", ".name.model");
  bad_reference(
      "what does not fit",
      [](auto& r) { r.mutable_name()->set_tensor("rank five"); },
      "INVALID_ARGUMENT/BLOCK_SIZE_INVALID", "");

  // A spec.
  using S = v1::EncodingSpec;
  const auto specified = [](T& t) { return t.source == T::Source::kSpec; };
  const auto bad_spec =
      [&](const std::string& name, std::function<void(S&)> change,
          const std::string& reason, const std::string& field) {
        add(
            "spec: " + name, specified,
            [change = std::move(change)](T& t, Random&) { change(*t.spec()); },
            Invalid(reason, "@spec." + field));
      };
  bad_spec(
      "no format", [](S& s) { s.clear_format(); }, "FORMAT_UNKNOWN", "format");
  bad_spec(
      "symmetry 6", [](S& s) { s.set_symmetry(static_cast<v1::Symmetry>(6)); },
      "ENUM_UNKNOWN", "symmetry");
  bad_spec(
      "method 9",
      [](S& s) { s.set_method(static_cast<v1::CalibrationMethod>(9)); },
      "ENUM_UNKNOWN", "method");
  bad_spec(
      "scale type -1",
      [](S& s) { s.set_scale_type(static_cast<v1::ScaleType>(-1)); },
      "ENUM_UNKNOWN", "scale_type");
  for (const double tail : {1.0, -0.1, static_cast<double>(kNan)}) {
    bad_spec(
        absl::StrCat("tail fraction ", tail),
        [tail](S& s) {
          s.set_method(v1::CALIBRATION_METHOD_PERCENTILE);
          s.set_tail_fraction(tail);
        },
        "METHOD_INVALID", "tail_fraction");
  }
  for (const uint32_t steps : {uint32_t{1}, ~uint32_t{0}}) {
    bad_spec(
        absl::StrCat(steps, " search steps"),
        [steps](S& s) {
          s.set_method(v1::CALIBRATION_METHOD_MSE);
          s.set_search_steps(steps);
        },
        "METHOD_INVALID", "search_steps");
  }
  bad_spec(
      "2^32 - 1 entropy bins",
      [](S& s) {
        s.set_method(v1::CALIBRATION_METHOD_ENTROPY);
        s.set_entropy_bins(~uint32_t{0});
      },
      "METHOD_INVALID", "entropy_bins");
  for (const double gamma : {0.0, static_cast<double>(kInfinity)}) {
    bad_spec(
        absl::StrCat("gamma ", gamma),
        [gamma](S& s) {
          s.set_method(v1::CALIBRATION_METHOD_SQNR);
          s.set_gamma(gamma);
        },
        "METHOD_INVALID", "gamma");
  }
  bad_spec(
      "range of nothing",
      [](S& s) { s.set_method(v1::CALIBRATION_METHOD_FIXED_RANGE); },
      "METHOD_INVALID", "method");
  bad_spec(
      "best of itself",
      [](S& s) {
        s.set_method(v1::CALIBRATION_METHOD_BEST_OF);
        s.add_methods(v1::CALIBRATION_METHOD_BEST_OF);
      },
      "METHOD_INVALID", "methods");
  bad_spec(
      "methods without best-of",
      [](S& s) { s.add_methods(v1::CALIBRATION_METHOD_MSE); }, "METHOD_INVALID",
      "methods");
  bad_spec(
      "asymmetric floats",
      [](S& s) {
        s.set_format(v1::NUMBER_FORMAT_FLOAT8_E5M2);
        s.set_symmetry(v1::SYMMETRY_ASYMMETRIC);
      },
      "SYMMETRY_INVALID", "symmetry");
  bad_spec(
      "zero left out", [](S& s) { s.set_exclude_zero(true); },
      "SYMMETRY_INVALID", "exclude_zero");
  bad_spec(
      "symmetric unsigned codes",
      [](S& s) {
        s.set_format(v1::NUMBER_FORMAT_UINT8);
        s.set_symmetry(v1::SYMMETRY_FULL_RANGE);
      },
      "SYMMETRY_INVALID", "symmetry");
  bad_spec(
      "scale rule without E8M0",
      [](S& s) { s.set_mx_scale_rule(v1::MX_SCALE_RULE_CEIL); },
      "SCALE_TYPE_INVALID", "mx_scale_rule");
  bad_spec(
      "outer blocks", [](S& s) { s.add_outer_block_size(0); },
      "SCALE_TYPE_INVALID", "outer_block_size");
  bad_spec(
      "no codebook", [](S& s) { s.set_format(v1::NUMBER_FORMAT_CODEBOOK2); },
      "CODEBOOK_INVALID", "codebook");
  // Below rank 2 a tensor has one scale, whatever the axis.
  add(
      "spec: axis beyond the rank",
      [](T& t) { return t.source == T::Source::kSpec && t.rank() >= 2; },
      [](T& t, Random&) {
        t.spec()->clear_block_size();
        t.spec()->mutable_granularity()->set_axis(20);
      },
      Invalid("BLOCK_SIZE_INVALID", "@spec.granularity"));
  bad_spec(
      "two granularities",
      [](S& s) {
        s.add_block_size(0);
        s.mutable_granularity()->set_group_size(4);
      },
      "BLOCK_SIZE_INVALID", "granularity");
  bad_spec(
      "blocks of another rank",
      [](S& s) {
        for (int i = 0; i < 5; ++i) s.add_block_size(0);
      },
      "BLOCK_SIZE_INVALID", "block_size");
  const auto names_nothing = [](T& t, Random&) {
    t.description()->clear_name();
  };
  add(
      "nameless result",
      [](T& t) {
        return t.method == Method::kCalibrate &&
               (t.contributes || t.source == T::Source::kSpec);
      },
      names_nothing, Invalid("NAME_INVALID", "header.tensor.name.model"));

  // A contribution.
  using C = v1::Contribution;
  const auto bad_contribution =
      [&](const std::string& name, std::function<void(C&)> change,
          const std::string& reason, const std::string& field) {
        add(
            "contribution: " + name, [](T& t) { return t.contributes; },
            [change = std::move(change)](T& t, Random&) {
              change(*t.contribution());
            },
            Invalid(reason, "header.contribution." + field));
      };
  const std::string invalid = "CONTRIBUTION_INVALID";
  bad_contribution(
      "no source", [](C& c) { c.clear_source(); }, invalid, "source");
  bad_contribution(
      "bad source", [](C& c) { c.set_source("../x"); }, invalid, "source");
  for (const uint64_t sequence : {uint64_t{0}, ~uint64_t{0}}) {
    bad_contribution(
        absl::StrCat("sequence ", sequence),
        [sequence](C& c) { c.set_sequence(sequence); }, invalid, "sequence");
  }
  for (const uint32_t bits : {uint32_t{1}, uint32_t{11}, ~uint32_t{0}}) {
    bad_contribution(
        absl::StrCat(bits, " mantissa bits"),
        [bits](C& c) { c.set_mantissa_bits(bits); }, invalid, "mantissa_bits");
  }
  for (const double constant : {0.0, 1.5, static_cast<double>(kNan)}) {
    bad_contribution(
        absl::StrCat("averaging constant ", constant),
        [constant](C& c) { c.set_averaging_constant(constant); }, invalid,
        "averaging_constant");
  }
  bad_contribution(
      "blocks of another rank",
      [](C& c) {
        for (int i = 0; i < 5; ++i) c.add_block_size(0);
      },
      "BLOCK_SIZE_INVALID", "block_size");
  bad_contribution(
      "two granularities",
      [](C& c) {
        c.add_block_size(0);
        c.mutable_granularity();
      },
      "BLOCK_SIZE_INVALID", "granularity");

  // Ranges.
  const auto ranged = [](T& t) { return t.has_range(); };
  const auto bad_range = [&](const std::string& name,
                             std::function<bool(T&)> applies,
                             std::function<void(T&, v1::ByteRange&)> change) {
    add(
        "range: " + name, std::move(applies),
        [change = std::move(change)](T& t, Random&) { change(t, *t.range()); },
        Invalid("RANGE_INVALID", "header.range"));
  };
  bad_range("empty", ranged, [](T&, v1::ByteRange& r) {
    r.set_begin_bytes(0);
    r.set_end_bytes(0);
  });
  bad_range("reversed", ranged, [](T&, v1::ByteRange& r) {
    r.set_begin_bytes(16);
    r.set_end_bytes(8);
  });
  bad_range("beyond the end", ranged, [](T&, v1::ByteRange& r) {
    r.set_begin_bytes(0);
    r.set_end_bytes(kTensorBytes);
  });
  bad_range("at the top", ranged, [](T&, v1::ByteRange& r) {
    r.set_begin_bytes(~uint64_t{0} - 7);
    r.set_end_bytes(~uint64_t{0});
  });
  bad_range(
      "within an element",
      [](T& t) { return t.has_range() && t.plan.unit > 1; },
      [](T& t, v1::ByteRange& r) {
        r.set_begin_bytes(1);
        r.set_end_bytes(t.plan.end);
      });
  bad_range(
      "with a spec",
      [](T& t) {
        return t.method == Method::kQuantize && t.source == T::Source::kSpec;
      },
      [](T&, v1::ByteRange& r) { r.set_end_bytes(8); });

  // What only one of the calls has.
  const auto quantizes = [](T& t) { return t.method == Method::kQuantize; };
  for (const int policy : {4, -1}) {
    add(
        absl::StrCat("NaN policy ", policy), quantizes,
        [policy](T& t, Random&) {
          t.As<v1::QuantizeHeader>()->set_nan_policy(
              static_cast<v1::NanPolicy>(policy));
        },
        Invalid("ENUM_UNKNOWN", "header.nan_policy"));
  }
  add(
      "storing without a name",
      [](T& t) {
        return t.method == Method::kQuantize &&
               (t.source == T::Source::kEncoding ||
                t.source == T::Source::kSpec);
      },
      [](T& t, Random&) {
        t.description()->clear_name();
        t.As<v1::QuantizeHeader>()->set_store(true);
      },
      Invalid("NAME_INVALID", "header.tensor.name.model"));
  add(
      "NaN where it is refused", quantizes,
      [](T& t, Random& random) {
        t.As<v1::QuantizeHeader>()->set_nan_policy(v1::NAN_POLICY_REJECT);
        const int64_t elements =
            static_cast<int64_t>(t.data.size()) / t.element_bytes;
        const size_t at = static_cast<size_t>(
            static_cast<int64_t>(random() % static_cast<uint64_t>(elements)) *
            t.element_bytes);
        t.data.replace(at, static_cast<size_t>(t.element_bytes),
                       static_cast<size_t>(t.element_bytes), '\xff');
      },
      Invalid("NON_FINITE_REJECTED"));
  changes.back().late = true;
  add(
      "output that nobody shares",
      [](T& t) { return t.method == Method::kQuantize || t.takes_codes(); },
      [](T& t, Random&) {
        v1::SharedSpan* const span =
            t.Sub<v1::SharedSpan>(t.header.get(), "output");
        span->set_region_id("0123456789abcdef");
        span->set_size_bytes(1 << 20);
      },
      {"NOT_FOUND/REGION_NOT_FOUND", "header.output.region_id"});
  const auto evaluates = [](T& t) {
    return t.method == Method::kEvaluate && t.source != T::Source::kNone;
  };
  add(
      "no candidates", evaluates,
      [](T& t, Random&) { t.As<v1::EvaluateHeader>()->clear_candidates(); },
      Invalid("CANDIDATES_INVALID", "header.candidates"));
  add(
      "65 candidates", evaluates,
      [](T& t, Random&) {
        auto& header = *t.As<v1::EvaluateHeader>();
        while (header.candidates_size() < 65) {
          *header.add_candidates() = header.candidates(0);
        }
      },
      Invalid("CANDIDATES_INVALID", "header.candidates"));
  add(
      "comparison with candidates", evaluates,
      [](T& t, Random&) { t.As<v1::EvaluateHeader>()->set_comparison(true); },
      Invalid("CANDIDATES_INVALID", "header.candidates"));
  add(
      "more scales than the limit",
      [](T& t) { return t.source == T::Source::kSpec; },
      [](T& t, Random&) {
        const int64_t count = kScaleCount + 1;
        t.description()->mutable_shape()->Assign(&count, &count + 1);
        t.spec()->clear_block_size();
        t.spec()->add_block_size(1);
      },
      {"RESOURCE_EXHAUSTED/SCALE_COUNT_LIMIT", "@spec.block_size"});
  return changes;
}

void Generator::ChangeHeader(Tensor* tensor) {
  for (;;) {
    const HeaderChange& change = changes_[random_() % changes_.size()];
    if (!change.applies(*tensor)) continue;
    change.apply(*tensor, random_);
    Answer answer = change.answer;
    answer.field = absl::StrReplaceAll(answer.field, {{"@", tensor->prefix()}});
    (change.late ? tensor->plan.completion : tensor->plan.opening) = answer;
    tensor->changes.push_back(change.name);
    return;
  }
}

// --- Changes of chunks and of bytes ----------------------------------------

std::vector<Piece> Generator::Cut(const Tensor& tensor) {
  std::vector<Piece> pieces(1);
  pieces[0].header = tensor.plan.header;
  const auto unit = static_cast<size_t>(tensor.plan.unit);
  const size_t most_units = static_cast<size_t>(kChunkBytes) / unit;
  bool first = Chance(60);
  for (size_t at = 0; at < tensor.data.size();) {
    const size_t left = (tensor.data.size() - at) / unit;
    // Seldom more than a few.
    size_t units = std::min({left, most_units, 1 + random_() % (left + 1)});
    if (Chance(50)) units = std::min(left, most_units);
    if (!first) pieces.emplace_back();
    first = false;
    pieces.back().offset = static_cast<uint64_t>(tensor.plan.begin) + at;
    pieces.back().data = tensor.data.substr(at, units * unit);
    at += units * unit;
  }
  return pieces;
}

void Generator::ChangePieces(const Tensor& tensor, std::vector<Piece>* pieces,
                             std::vector<std::string>* changes) {
  const size_t at = random_() % pieces->size();
  Piece& piece = (*pieces)[at];
  const auto here = pieces->begin() + static_cast<std::ptrdiff_t>(at);
  const auto unit = static_cast<uint64_t>(tensor.plan.unit);
  const auto did = [&](const std::string& what) {
    changes->push_back(absl::StrCat(what, " (message ", at, ")"));
  };
  v1::SharedSpan span;
  span.set_region_id("0123456789abcdef");
  span.set_size_bytes(16);
  // What is wrong with a header and what is wrong with a span beside it would
  // compete.
  switch (random_() % (tensor.plan.opening.served() ? 15 : 13)) {
    case 0:
      piece.offset += unit;
      return did("gap");
    case 1:
      piece.offset -= unit;
      return did("overlap");
    case 2:
      piece.offset = random_();
      return did("offset at random");
    case 3:
      pieces->erase(here);
      return did("left out");
    case 4:
      pieces->insert(here, Piece(piece));
      return did("twice");
    case 5:
      if (at + 1 < pieces->size()) std::swap(piece, (*pieces)[at + 1]);
      return did("swapped with the next");
    case 6:
      piece.data += std::string(unit, '\0');
      return did("too long");
    case 7:
      piece.data += 'x';
      return did("a byte more");
    case 8:
      if (!piece.data.empty()) piece.data.pop_back();
      return did("a byte less");
    case 9:
      piece.data.resize(static_cast<size_t>(kChunkBytes) + unit);
      return did("too large");
    case 10:
      pieces->resize(at);
      return did("ends before");
    case 11:
      pieces->insert(here, Piece());
      return did("an empty message before");
    case 12: {
      Piece stray;
      stray.offset = static_cast<uint64_t>(tensor.plan.end);
      stray.data = std::string(unit, 's');
      pieces->push_back(stray);
      return did("data behind the end");
    }
    case 13:
      if (Chance(50)) piece.data.clear();
      piece.more += BytesField(4, span.SerializeAsString());
      return did("shared memory that is none");
    default:
      piece.more += BytesField(4, "");
      piece.data.clear();
      return did("an empty span of shared memory");
  }
}

void Generator::ChangeBytes(std::vector<std::string>* messages,
                            std::vector<std::string>* changes) {
  const size_t at = random_() % messages->size();
  std::string& message = (*messages)[at];
  const auto did = [&](const std::string& what) {
    changes->push_back(absl::StrCat(what, " (message ", at, ")"));
  };
  const absl::optional<Envelope> before = Parse(message);
  Envelope fields = before.value_or(Envelope());
  const std::string header =
      fields.has_header ? BytesField(1, fields.header) : "";
  const std::string data =
      fields.data.empty() ? "" : BytesField(3, fields.data);
  const std::string offset = VarintField(2, fields.offset);
  const std::string fixed(8, '\x01');
  switch (random_() % 20) {
    case 0:
      message.resize(random_() % (message.size() + 1));
      return did("truncated");
    case 1:
      message += "\x98\x06\x07\xa2\x06\x02hi";
      return did("unknown fields");
    case 2:
      message += std::string(1, '\0');
      return did("field number 0");
    case 3:
      message += Tag(9, 6 + static_cast<int>(random_() % 2));
      return did("wire type that is none");
    case 4:
      message += Tag(9, 3) + VarintField(1, 1);
      return did("group without end");
    case 5:
      message += Tag(9, 4);
      return did("end of no group");
    case 6:
      message += Tag(2, 0) + std::string(10, '\xff');
      return did("varint of more than 64 bits");
    case 7:
      message += Tag(3, 2) + Varint(0x7FFFFFFF);
      return did("length of 2^31 - 1");
    case 8:
      message += Tag(3, 2) + Varint(uint64_t{1} << 40);
      return did("length of 2^40");
    case 9:
      message = header + Tag(2, 1) + fixed + data;
      return did("offset as fixed64");
    case 10:
      message = header + offset + Tag(3, 1) + fixed;
      return did("data as fixed64");
    case 11:
      message = VarintField(1, 7) + offset + data;
      return did("header as a number");
    case 12:
      message = header + VarintField(2, random_()) + offset + data;
      return did("offset twice, the last one right");
    case 13:
      message = header + offset + VarintField(2, random_()) + data;
      return did("offset twice, the last one wrong");
    case 14:
      message = header + offset + BytesField(3, "zz") + data;
      return did("data twice");
    case 15:
      message = data + offset + header;
      return did("fields backwards");
    case 16:
      message =
          header + Tag(2, 0) +
          Varint(fields.offset, fields.offset < (uint64_t{1} << 56) ? 2 : 0) +
          data;
      return did("varint with padding");
    case 17:
      message = header + BytesField(1, "") + offset + data;
      return did("header twice, the second empty");
    case 18: {
      const std::string cut =
          fields.header.substr(0, random_() % (fields.header.size() + 1));
      message = BytesField(1, cut) + offset + data;
      return did("header cut off");
    }
    default: {
      std::string noise(1 + random_() % 100, '\0');
      for (char& byte : noise) byte = static_cast<char>(random_());
      message = noise;
      return did("noise");
    }
  }
}

// A tensor that every server has to be able to serve, and its answer's data.
std::string Good(Method method) {
  const float values[] = {0.5f, -1, 100, kInfinity};
  std::string data(sizeof(values), '\0');
  std::memcpy(data.data(), values, sizeof(values));
  v1::TensorDescription tensor;
  tensor.set_element_type(v1::ELEMENT_TYPE_FLOAT32);
  tensor.add_shape(4);
  v1::Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  Piece piece;
  piece.data = data;
  switch (method) {
    case Method::kCalibrate: {
      v1::CalibrateHeader header;
      *header.mutable_tensor() = tensor;
      piece.header = header.SerializeAsString();
      break;
    }
    case Method::kQuantize: {
      v1::QuantizeHeader header;
      *header.mutable_tensor() = tensor;
      *header.mutable_encoding() = encoding;
      piece.header = header.SerializeAsString();
      break;
    }
    case Method::kDequantize: {
      v1::DequantizeHeader header;
      *header.mutable_tensor() = tensor;
      *header.mutable_encoding() = encoding;
      piece.header = header.SerializeAsString();
      piece.data = std::string("\x01\xfe\x7f\x7f", 4);
      break;
    }
    case Method::kEvaluate: {
      v1::EvaluateHeader header;
      *header.mutable_tensor() = tensor;
      *header.add_candidates()->mutable_encoding() = encoding;
      piece.header = header.SerializeAsString();
      break;
    }
  }
  return piece.Bytes();
}

std::string GoodAnswer(Method method) {
  if (method == Method::kQuantize) return std::string("\x01\xfe\x7f\x7f", 4);
  if (method != Method::kDequantize) return "";
  const float values[] = {0.5f, -1, 63.5f, 63.5f};
  std::string data(sizeof(values), '\0');
  std::memcpy(data.data(), values, sizeof(values));
  return data;
}

bool Generator::TryMake(Stream* stream) {
  std::map<std::string, Plan> plans;
  std::vector<std::string> changes;
  for (int64_t n = Between(1, 4); n > 0; --n) {
    Tensor tensor = MakeTensor(stream->method);
    tensor.data = MakeData(tensor, tensor.plan.end - tensor.plan.begin);
    const bool change_header = Chance(45);
    if (change_header) ChangeHeader(&tensor);
    tensor.plan.header = tensor.header->SerializeAsString();
    plans.emplace(tensor.plan.header, tensor.plan);
    std::vector<Piece> pieces = Cut(tensor);
    // A header that is refused for its content may come with anything; data
    // that are would compete with what is wrong with their chunks.
    if (tensor.plan.completion.served() && Chance(35)) {
      ChangePieces(tensor, &pieces, &tensor.changes);
    }
    std::vector<std::string> messages;
    for (const Piece& piece : pieces) messages.push_back(piece.Bytes());
    if (!messages.empty() && tensor.plan.completion.served() && Chance(25)) {
      ChangeBytes(&messages, &tensor.changes);
    }
    changes.push_back(
        absl::StrCat("[", absl::StrJoin(tensor.changes, "; "), "]"));
    stream->messages.insert(stream->messages.end(), messages.begin(),
                            messages.end());
  }
  // Where a tensor fails by its data, how far they came would matter.
  const bool may_end = std::all_of(
      plans.begin(), plans.end(),
      [](const auto& entry) { return entry.second.completion.served(); });
  const int64_t ending = may_end ? Between(0, 99) : 99;
  if (ending < 15) {
    stream->end = Stream::End::kHalfCloses;
    stream->messages.resize(random_() % (stream->messages.size() + 1));
    changes.push_back("half-closes");
  } else if (ending < 27) {
    stream->end = Stream::End::kCancels;
    stream->messages.resize(random_() % (stream->messages.size() + 1));
    changes.push_back("cancels");
  } else if (ending < 32) {
    stream->end = Stream::End::kCuts;
    stream->messages.resize(random_() % (stream->messages.size() + 1));
    changes.push_back("cuts the connection");
  }
  Model model(HeaderPrototype(stream->method), plans);
  absl::optional<Expectation> expected = model.Expect(stream->messages);
  if (!expected.has_value()) return false;
  stream->expected = *std::move(expected);
  if (stream->expected.open_at_end && stream->expected.status == kServed &&
      stream->end == Stream::End::kHalfCloses) {
    stream->expected.answers.push_back(Invalid("TENSOR_INCOMPLETE"));
  }
  stream->description =
      absl::StrCat(kMethodNames[static_cast<int>(stream->method)], " ",
                   absl::StrJoin(changes, " "));
  return true;
}

// --- The test --------------------------------------------------------------

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

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

const uint64_t kStreams = Count("QUANTD_MALFORMED_STREAMS", 200);
const uint64_t kSeed = Count("QUANTD_MALFORMED_SEED", 1);

// One server for all streams; the parameter is the number of the stream.
class MalformedStreamsTest : public ::testing::TestWithParam<uint64_t> {
 protected:
  // What lasts as long as the suite.
  struct Suite {
    TemporaryDirectory directory;
    std::unique_ptr<ServerProcess> server;
    std::shared_ptr<grpc::Channel> channel;
    // What the calls say that they answer.
    std::string contract;
    // How often tensors and streams ended how.
    std::map<std::string, int> endings;
    uint64_t run_count = 0;
    // After a quarter of the streams.
    int64_t resident_bytes = 0;
  };

  static void SetUpTestSuite() {
    // protobuf logs what it refuses.
    google::protobuf::SetLogHandler(nullptr);
    // What is freed shows as freed under AddressSanitizer too.
    const char* const before = std::getenv("ASAN_OPTIONS");
    setenv("ASAN_OPTIONS",
           absl::StrCat(before == nullptr ? "" : before,
                        before == nullptr ? "" : ":", "quarantine_size_mb=4")
               .c_str(),
           1);
    suite_ = new Suite();
    suite_->server = std::make_unique<ServerProcess>(
        QuantdBinary(), suite_->directory.File("encodings.db"),
        std::vector<std::string>{
            "--drain-delay", "0s", "--chunk-bytes", absl::StrCat(kChunkBytes),
            "--tensor-bytes", absl::StrCat(kTensorBytes), "--message-bytes",
            "1MiB", "--cache-bytes", "256KiB", "--threads", "2",
            // However slow the machine is.
            "--queue-delay", "1h"});
    suite_->channel = suite_->server->NewChannel();
    suite_->contract = ReadFile(absl::StrCat(
        TestDataFolder(), "/../../proto/quantd/v1/quantization_service.proto"));
    Put("any", {});
    Put("rank five", {0, 0, 0, 0, 0});
  }

  static void TearDownTestSuite() {
    ExpectIdle();
    const int64_t grown_bytes = ResidentBytes() - suite_->resident_bytes;
    for (const auto& [verdict, times] : suite_->endings) {
      std::printf("%6d %s\n", times, verdict.c_str());
    }
    // Of a few streams neither says anything.
    if (suite_->run_count == kStreams && kStreams >= 100) {
      std::printf("resident after a quarter: %lld KiB, then %lld KiB more\n",
                  static_cast<long long>(suite_->resident_bytes >> 10),
                  static_cast<long long>(grown_bytes >> 10));
      EXPECT_LT(grown_bytes, kMostGrownBytes);
      EXPECT_GT(suite_->endings.size(), 20u);
    }
    EXPECT_EQ(suite_->server->Terminate(), 0);
    delete suite_;
    suite_ = nullptr;
  }

  static void Put(const std::string& tensor,
                  const std::vector<int64_t>& block_size) {
    v1::PutEncodingRequest request;
    request.mutable_name()->set_model("acme");
    request.mutable_name()->set_tensor(tensor);
    request.mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
    request.mutable_encoding()->add_scale(0.5f);
    request.mutable_encoding()->mutable_block_size()->Assign(block_size.begin(),
                                                             block_size.end());
    grpc::ClientContext context;
    v1::PutEncodingResponse response;
    const grpc::Status status = v1::EncodingService::NewStub(suite_->channel)
                                    ->PutEncoding(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }

  // What comes up to the end of the stream: the answers, and the data of the
  // last one.
  static std::vector<Answer> ReadAnswers(RawStream& stream, std::string* data) {
    std::vector<Answer> answers;
    std::string bytes;
    while (stream.Read(&bytes)) {
      // Header, data, summary and error have the same numbers in all four.
      v1::QuantizeResponse response;
      EXPECT_TRUE(response.ParseFromString(bytes));
      if (response.has_header()) data->clear();
      *data += response.data();
      if (response.has_summary()) answers.push_back({});
      if (response.has_error()) {
        const v1::TensorError& error = response.error();
        EXPECT_FALSE(error.message().empty());
        answers.push_back(
            {CodeAndReason(error.code(), error.reason()), error.field()});
        data->clear();
      }
    }
    return answers;
  }

  static void Run(const Generator::Stream& c) {
    using End = Generator::Stream::End;
    std::unique_ptr<CuttableChannel> cuttable;
    if (c.end == End::kCuts) {
      cuttable = std::make_unique<CuttableChannel>(suite_->server->address());
    }
    const bool goes_on = c.end == End::kGoesOn && c.expected.status == kServed;
    std::vector<Answer> expected = c.expected.answers;
    RawStream stream(
        cuttable == nullptr ? suite_->channel : cuttable->channel(),
        kMethodNames[static_cast<int>(c.method)]);
    for (const std::string& message : c.messages) stream.Write(message);
    if (goes_on) {
      stream.Write(Good(c.method));
      if (c.expected.open_at_end) {
        expected.push_back(Invalid("TENSOR_INCOMPLETE"));
      }
      expected.push_back({});
    }
    if (c.end == End::kCancels) {
      stream.Cancel();
    } else if (c.end == End::kCuts) {
      cuttable->Cut();
    } else {
      stream.WritesDone();
    }
    std::string data;
    std::vector<Answer> answers = ReadAnswers(stream, &data);
    const grpc::Status status = stream.Finish();
    if (c.end == End::kCancels || c.end == End::kCuts) {
      // No more than was due by then.
      ASSERT_LE(answers.size(), expected.size());
      expected.resize(answers.size());
      EXPECT_EQ(answers, expected);
      EXPECT_FALSE(status.ok());
      return;
    }
    EXPECT_EQ(answers, expected);
    EXPECT_EQ(Verdict(status), c.expected.status) << status.error_message();
    if (goes_on) {
      EXPECT_EQ(data, GoodAnswer(c.method));
    }
  }

  // A good tensor on a stream of its own is served, to the byte.
  static void ExpectServing(Method method) {
    RawStream stream(suite_->channel, kMethodNames[static_cast<int>(method)]);
    stream.Write(Good(method));
    stream.WritesDone();
    std::string data;
    EXPECT_EQ(ReadAnswers(stream, &data), std::vector<Answer>(1));
    EXPECT_EQ(data, GoodAnswer(method));
    const grpc::Status status = stream.Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
  }

  static double Scrape(const std::string& series) {
    const std::string response =
        HttpGet(suite_->server->metrics_address(), "/metrics");
    for (const absl::string_view line : absl::StrSplit(response, '\n')) {
      double value = 0;
      if (absl::StartsWith(line, absl::StrCat(series, " ")) &&
          absl::SimpleAtod(line.substr(series.size() + 1), &value)) {
        return value;
      }
    }
    ADD_FAILURE() << series << " is not there";
    return kNan;
  }
  static void ExpectIdle() {
    for (const char* gauge : {"quantd_active_streams", "quantd_active_tensors",
                              "quantd_memory_budget_used_bytes"}) {
      EXPECT_TRUE(PollUntil(absl::Minutes(2), [&] {
        return Scrape(gauge) == 0;
      })) << gauge;
    }
  }

  // Resident memory of the server.
  static int64_t ResidentBytes() {
    const std::string status =
        ReadFile(absl::StrCat("/proc/", suite_->server->pid(), "/status"));
    int64_t kib = 0;
    for (absl::string_view line : absl::StrSplit(status, '\n')) {
      if (absl::ConsumePrefix(&line, "VmRSS:")) {
        EXPECT_TRUE(absl::SimpleAtoi(absl::StripSuffix(line, " kB"), &kib));
      }
    }
    return kib << 10;
  }

  static inline Suite* suite_ = nullptr;
};

TEST_P(MalformedStreamsTest, EndAsTheModelSaysAndHarmNobodyElse) {
  const uint64_t n = GetParam();
  // Each by itself, so that one can be made again without the others.
  const Generator::Stream stream = Generator(kSeed * 1'000'003 + n).Make();
  SCOPED_TRACE(
      absl::StrCat("stream of seed ", kSeed, ": ", stream.description));
  Run(stream);
  ExpectServing(static_cast<Method>(n % 4));
  std::vector<std::string> verdicts = {stream.expected.status};
  for (const Answer& answer : stream.expected.answers) {
    verdicts.push_back(answer.verdict);
  }
  for (const std::string& verdict : verdicts) {
    ++suite_->endings[verdict];
    const std::string reason = verdict.substr(verdict.find('/') + 1);
    EXPECT_TRUE(verdict == kServed ||
                absl::StrContains(suite_->contract, reason))
        << reason << " is not documented";
  }
  ++suite_->run_count;
  if (n + 1 == kStreams / 4) {
    ExpectIdle();
    suite_->resident_bytes = ResidentBytes();
  }
  if (HasFailure()) {
    for (const std::string& message : stream.messages) {
      std::printf("%s\n", absl::BytesToHexString(message).c_str());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Random, MalformedStreamsTest,
                         ::testing::Range<uint64_t>(0, kStreams),
                         [](const ::testing::TestParamInfo<uint64_t>& info) {
                           return absl::StrCat("Stream", info.param);
                         });

}  // namespace
}  // namespace quantd::testing::malformed_streams_test
