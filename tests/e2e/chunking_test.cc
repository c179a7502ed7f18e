// Results do not depend on where a tensor is cut into chunks, on the number of
// worker threads, or on the SIMD target.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/cpu.h"
#include "core/formats/number_format.h"
#include "core/types/element_type.h"
#include "core/types/float_convert.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "tests/support/case_name.h"
#include "tests/support/count.h"
#include "tests/support/sanitizers.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"
#include "xxhash.h"

namespace quantd::testing::chunking_test {
namespace {

using Shape = std::vector<int64_t>;

// An odd number of elements, so that the last byte of packed codes is partly
// filled; a last dimension that 32 does not divide; more than two leaves of
// the sums.
const Shape kSmallShape = {7, 11, 39};
// About 1.2 million elements: several messages of codes down, and enough for
// every kernel to spread over threads. A third of it for sanitizers.
const Shape kLargeShape = {17, kSanitized ? 71 : 211, 333};

enum class Granularity { kPerTensor, kAxis0, kLastAxis, kGroup32 };
constexpr int kGranularityCount = 4;

std::vector<int64_t> BlockSize(Granularity granularity) {
  switch (granularity) {
    case Granularity::kPerTensor:
      return {};
    case Granularity::kAxis0:
      return {1, 0, 0};
    case Granularity::kLastAxis:
      return {0, 0, 1};
    case Granularity::kGroup32:
      return {1, 1, 32};
  }
  return {};
}

struct Case {
  core::ElementType type;
  std::string format;
  Granularity granularity;

  std::string Name() const {
    static constexpr const char* kNames[] = {"per tensor", "axis 0",
                                             "last axis", "group 32"};
    return absl::StrCat(core::ElementTypeName(type), " to ", format, ", ",
                        kNames[static_cast<int>(granularity)]);
  }
  friend std::ostream& operator<<(std::ostream& os, const Case& c) {
    return os << c.Name();
  }
};

// Every pair of format and granularity, and of element type with each of both:
// a kernel is chosen by two of them at most, the wire's granules by element
// type and format.
std::vector<Case> AllCases() {
  constexpr std::array<core::ElementType, 4> kTypes = {
      core::ElementType::kFloat32, core::ElementType::kFloat16,
      core::ElementType::kBfloat16, core::ElementType::kFloat64};
  const std::vector<std::string> formats = {"int8", "uint8", "int4",  "uint2",
                                            "int5", "int12", "uint16"};
  std::vector<Case> cases;
  for (size_t f = 0; f < formats.size(); ++f) {
    for (int g = 0; g < kGranularityCount; ++g) {
      // A Latin square: all types for each format and each granularity.
      cases.push_back({kTypes[(f + 3 * g) % kTypes.size()], formats[f],
                       static_cast<Granularity>(g)});
    }
  }
  return cases;
}

// A tensor with every kind of value: magnitudes that differ by position, zeros
// of both signs, subnormals, NaN and infinities.
std::string TensorBytes(core::ElementType type, const Shape& shape) {
  int64_t count = 1;
  for (const int64_t dimension : shape) count *= dimension;
  std::mt19937_64 random(count);
  std::normal_distribution<double> normal;
  const std::array<double, 10> specials = {
      0.0,
      -0.0,
      std::numeric_limits<double>::quiet_NaN(),
      std::numeric_limits<double>::infinity(),
      -std::numeric_limits<double>::infinity(),
      type == core::ElementType::kFloat16 ? 0x1p-23 : 0x1p-130,
      type == core::ElementType::kFloat16 ? -0x1p-24 : -0x1p-131,
      type == core::ElementType::kFloat64 ? 0x1p-1060 : 0.5,
      1e-3,
      -4096.0};
  std::string bytes(count * core::ElementSizeBytes(type), '\0');
  uint8_t* out = reinterpret_cast<uint8_t*>(bytes.data());
  for (int64_t i = 0; i < count; ++i) {
    double value = normal(random) * (1 + i % shape.back());
    if (random() % 61 == 0) value = specials[random() % specials.size()];
    if (type == core::ElementType::kFloat64) {
      core::StoreElement<double>(type, value, out, i);
    } else {
      core::StoreElement<float>(type, static_cast<float>(value), out, i);
    }
  }
  return bytes;
}

// What one way of sending a tensor gave: an entry per RPC and source of the
// encoding, to the last bit. Codes and reals stand there by their checksum,
// which is compared with the bytes that came.
struct Transcript {
  std::map<std::string, std::string> entries;
};

template <typename Message>
std::string Serialize(const Message& message) {
  return message.SerializeAsString();
}

class Recorder {
 public:
  // Chunk sizes in elements; 0 sends the tensor in one message. Successive
  // calls take one after the other.
  // `data`  the tensor; must outlive the recorder.
  Recorder(TestServer* server, const Case& c, const Shape& shape,
           absl::string_view data, std::vector<int64_t> chunk_elements,
           size_t first_chunk)
      : server_(server),
        case_(c),
        chunk_elements_(std::move(chunk_elements)),
        next_chunk_(first_chunk),
        data_(data) {
    tensor_.mutable_name()->set_model("chunking/net");
    tensor_.mutable_name()->set_tensor(
        absl::StrCat(c.Name(), shape.front(), "x", shape.back()));
    tensor_.set_element_type(static_cast<v1::ElementType>(c.type));
    tensor_.mutable_shape()->Assign(shape.begin(), shape.end());
    spec_.set_format(static_cast<v1::NumberFormat>(
        core::FindFormatByName(c.format)->format));
    const std::vector<int64_t> block_size = BlockSize(c.granularity);
    spec_.mutable_block_size()->Assign(block_size.begin(), block_size.end());
    const bool is_signed = core::FindFormatByName(c.format)->is_signed;
    // Asymmetric and symmetric both, among the signed formats.
    if (!is_signed || c.granularity == Granularity::kAxis0) {
      spec_.set_symmetry(v1::SYMMETRY_ASYMMETRIC);
    }
  }

  Transcript Record() {
    RecordCalibrate();
    if (!::testing::Test::HasFailure()) RecordQuantize();
    if (!::testing::Test::HasFailure()) RecordDequantize();
    if (!::testing::Test::HasFailure()) RecordEvaluate();
    return std::move(transcript_);
  }

 private:
  v1::QuantizationService::Stub& stub() { return server_->quantization(); }

  int64_t NextChunk(int64_t element_bytes) {
    return chunk_elements_[next_chunk_++ % chunk_elements_.size()] *
           element_bytes;
  }
  int64_t NextChunk() { return NextChunk(core::ElementSizeBytes(case_.type)); }

  void RecordCalibrate() {
    v1::CalibrateHeader header;
    *header.mutable_tensor() = tensor_;
    *header.mutable_spec() = spec_;
    auto summary = Calibrate(stub(), header, data_, NextChunk());
    ASSERT_TRUE(summary.ok()) << summary.status();
    transcript_.entries["calibrate"] =
        Serialize(summary->statistics()) +
        Serialize(summary->stored_encoding().encoding());

    grpc::ClientContext context;
    v1::GetEncodingRequest request;
    *request.mutable_name() = tensor_.name();
    v1::GetEncodingResponse response;
    const grpc::Status status =
        server_->encodings().GetEncoding(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(Serialize(response.stored_encoding()),
              Serialize(summary->stored_encoding()));

    calibrated_ = summary->stored_encoding().encoding();
    // Tighter than what calibration found, so that elements are clipped.
    tight_ = summary->stored_encoding().encoding();
    for (float& scale : *tight_.mutable_scale()) {
      scale = std::max(scale * 0.7f, std::numeric_limits<float>::min());
    }
    tight_name_ = tensor_.name();
    tight_name_.set_tensor(tight_name_.tensor() + " tight");
    grpc::ClientContext put_context;
    v1::PutEncodingRequest put;
    *put.mutable_name() = tight_name_;
    *put.mutable_encoding() = tight_;
    v1::PutEncodingResponse put_response;
    const grpc::Status put_status =
        server_->encodings().PutEncoding(&put_context, put, &put_response);
    ASSERT_TRUE(put_status.ok()) << put_status.error_message();
  }

  void RecordQuantize() {
    v1::QuantizeHeader header;
    *header.mutable_tensor() = tensor_;
    *header.mutable_encoding() = tight_;
    codes_ = Add("quantize inline", header);
    *header.mutable_reference()->mutable_name() = tight_name_;
    EXPECT_EQ(codes_, Add("quantize by reference", header));
    *header.mutable_spec() = spec_;
    header.set_nan_policy(v1::NAN_POLICY_QMIN);
    const std::string by_spec = Add("quantize by spec", header);
    *header.mutable_encoding() = calibrated_;
    EXPECT_EQ(by_spec, Add("quantize with what the spec gives", header));
    // The headers too, and so the encodings.
    EXPECT_EQ(transcript_.entries["quantize by spec"],
              transcript_.entries["quantize with what the spec gives"]);
  }

  std::string Add(const std::string& entry, const v1::QuantizeHeader& header) {
    auto answer = Quantize(stub(), header, data_, NextChunk());
    EXPECT_TRUE(answer.ok()) << entry << ": " << answer.status();
    if (!answer.ok()) return "";
    EXPECT_EQ(answer->codes.size(), answer->header.size_bytes()) << entry;
    EXPECT_EQ(XXH3_64bits(answer->codes.data(), answer->codes.size()),
              answer->summary.checksum_xxh3())
        << entry;
    // Etags count puts.
    answer->header.clear_etag();
    transcript_.entries[entry] =
        Serialize(answer->header) + Serialize(answer->summary);
    return std::move(answer->codes);
  }

  void RecordDequantize() {
    v1::DequantizeHeader header;
    *header.mutable_tensor() = tensor_;
    *header.mutable_encoding() = tight_;
    Add("dequantize inline", header);
    *header.mutable_reference()->mutable_name() = tight_name_;
    Add("dequantize by reference", header);
    EXPECT_EQ(transcript_.entries["dequantize inline"],
              transcript_.entries["dequantize by reference"]);
  }

  void Add(const std::string& entry, const v1::DequantizeHeader& header) {
    const core::FormatInfo& format = *core::FindFormatByName(case_.format);
    // The smallest unit of codes is a byte, or two where a code has two.
    auto answer =
        Dequantize(stub(), header, codes_, NextChunk(format.SizeBytes(1)));
    ASSERT_TRUE(answer.ok()) << entry << ": " << answer.status();
    EXPECT_EQ(answer->reals.size(), answer->header.size_bytes()) << entry;
    EXPECT_EQ(XXH3_64bits(answer->reals.data(), answer->reals.size()),
              answer->summary.checksum_xxh3())
        << entry;
    answer->header.clear_etag();
    transcript_.entries[entry] =
        Serialize(answer->header) + Serialize(answer->summary);
  }

  void RecordEvaluate() {
    v1::EvaluateHeader header;
    *header.mutable_tensor() = tensor_;
    // As many as the server answers in one header.
    header.set_per_scale_index(tight_.scale_size() < 10000);
    *header.add_candidates()->mutable_encoding() = tight_;
    Add("evaluate inline", header);
    *header.add_candidates()->mutable_reference()->mutable_name() = tight_name_;
    *header.add_candidates()->mutable_spec() = spec_;
    Add("evaluate all sources", header);
  }

  void Add(const std::string& entry, const v1::EvaluateHeader& header) {
    auto summary = Evaluate(stub(), header, data_, NextChunk());
    ASSERT_TRUE(summary.ok()) << entry << ": " << summary.status();
    ASSERT_EQ(summary->candidates_size(), header.candidates_size());
    for (v1::CandidateMetrics& candidate : *summary->mutable_candidates()) {
      candidate.clear_etag();
    }
    if (header.candidates_size() > 1) {
      EXPECT_EQ(Serialize(summary->candidates(0)),
                Serialize(summary->candidates(1)))
          << "the same encoding inline and by reference";
    }
    transcript_.entries[entry] = Serialize(*summary);
  }

  TestServer* const server_;
  const Case case_;
  const std::vector<int64_t> chunk_elements_;
  size_t next_chunk_;
  const absl::string_view data_;
  v1::TensorDescription tensor_;
  v1::EncodingSpec spec_;
  v1::Encoding calibrated_;
  v1::Encoding tight_;
  v1::TensorName tight_name_;
  std::string codes_;
  Transcript transcript_;
};

void ExpectSame(const Transcript& expected, const Transcript& actual) {
  ASSERT_EQ(expected.entries.size(), actual.entries.size());
  for (const auto& [entry, bytes] : expected.entries) {
    const auto it = actual.entries.find(entry);
    ASSERT_NE(it, actual.entries.end()) << entry;
    // Not EXPECT_EQ: it would print both.
    EXPECT_TRUE(it->second == bytes) << entry << " differs";
  }
}

server::ServerOptions Options(int threads) {
  server::ServerOptions options;
  options.threads = threads;
  // So that "one message" holds the large tensor.
  options.limits.chunk_bytes = int64_t{16} << 20;
  // Small enough for a large tensor's codes to go down in several messages.
  options.limits.response_chunk_bytes = 300000;
  // Streams that come together are all served, however busy the machine is.
  options.limits.queue_delay = absl::Hours(1);
  return options;
}

class ChunkingTest : public ::testing::Test {
 protected:
  ~ChunkingTest() override { EXPECT_TRUE(core::SetSimdTarget("auto").ok()); }

  // Sends every `case_step`th case to servers on every SIMD target, and expects
  // what the scalar definitions on one thread give for the tensor in one
  // message. Two things rotate instead of being multiplied out: a case goes on
  // each target to the server of 1 or of 2 threads, in turn; and its calls take
  // one chunk size after another, starting elsewhere for every case and server.
  // So every chunk size meets every RPC, case, target and thread count.
  void CompareAll(const Shape& shape,
                  const std::vector<int64_t>& chunk_elements, int case_step) {
    const std::vector<Case> all_cases = AllCases();
    std::vector<Case> cases;
    std::map<core::ElementType, std::string> data;
    for (size_t i = 0; i < all_cases.size(); i += case_step) {
      cases.push_back(all_cases[i]);
      std::string& bytes = data[all_cases[i].type];
      if (bytes.empty()) bytes = TensorBytes(all_cases[i].type, shape);
    }
    std::vector<Transcript> expected;
    {
      ASSERT_TRUE(core::SetSimdTarget("scalar").ok());
      TestServer server(Options(1));
      for (const Case& c : cases) {
        SCOPED_TRACE(c.Name());
        expected.push_back(
            Recorder(&server, c, shape, data[c.type], {0}, 0).Record());
        ASSERT_FALSE(HasFailure());
      }
    }
    size_t rotation = 0;
    const std::vector<std::string> targets = core::AvailableSimdTargets();
    for (size_t t = 0; t < targets.size(); ++t) {
      for (const int threads : {1, 2}) {
        ASSERT_TRUE(core::SetSimdTarget(targets[t]).ok());
        TestServer server(Options(threads));
        ++rotation;
        for (size_t i = 0; i < cases.size(); ++i) {
          if ((t + threads + i) % 2 != 0) continue;
          SCOPED_TRACE(absl::StrCat(cases[i].Name(), " on ", targets[t], ", ",
                                    threads, " threads"));
          Recorder recorder(&server, cases[i], shape, data[cases[i].type],
                            chunk_elements, rotation + i);
          ExpectSame(expected[i], recorder.Record());
          ASSERT_FALSE(HasFailure());
        }
      }
    }
  }
};

int CaseStep() {
  return static_cast<int>(testing::Count("QUANTD_CHUNKING_STEP", 7));
}

TEST_F(ChunkingTest, SmallChunksGiveTheSameBytesOnEveryTargetAndThreadCount) {
  CompareAll(kSmallShape, {7, 0, 1, 1000, 0, 64, 0, 33, 2000},
             (kSanitized ? 3 : 1) * CaseStep());
}

TEST_F(ChunkingTest, LargeChunksGiveTheSameBytesOnEveryTargetAndThreadCount) {
  // 64 KiB of float64 and of float16.
  CompareAll(kLargeShape, {64 * 1024 / 8, 0, 64 * 1024 / 2},
             (kSanitized ? 8 : 4) * CaseStep() + 1);
}

// Bounds in elements of three parts that may stand alone: whole bytes of codes
// even for two bits.
std::array<int64_t, 4> Thirds(int64_t element_count) {
  return {0, element_count / 3 / 4 * 4, element_count / 3 * 2 / 4 * 4,
          element_count};
}

// One server for all cases.
class RangesTest : public ::testing::TestWithParam<Case> {
 protected:
  static void SetUpTestSuite() { server_ = new TestServer(Options(2)); }
  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }

  static inline TestServer* server_ = nullptr;
};

TEST_P(RangesTest, OnThreeStreamsJoinToTheSameBytes) {
  const Case& c = GetParam();
  const core::FormatInfo& format = *core::FindFormatByName(c.format);
  const int64_t element_bytes = core::ElementSizeBytes(c.type);
  const Shape shape = {17, 23, 333};
  const std::string data = TensorBytes(c.type, shape);
  const int64_t element_count = data.size() / element_bytes;
  const std::array<int64_t, 4> bounds = Thirds(element_count);

  v1::TensorDescription tensor;
  tensor.mutable_name()->set_model("chunking/net");
  tensor.mutable_name()->set_tensor(c.Name());
  tensor.set_element_type(static_cast<v1::ElementType>(c.type));
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  v1::QuantizeHeader whole;
  *whole.mutable_tensor() = tensor;
  whole.mutable_spec()->set_format(
      static_cast<v1::NumberFormat>(format.format));
  const std::vector<int64_t> block_size = BlockSize(c.granularity);
  whole.mutable_spec()->mutable_block_size()->Assign(block_size.begin(),
                                                     block_size.end());
  whole.set_store(true);
  const auto expected = Quantize(server_->quantization(), whole, data);
  ASSERT_TRUE(expected.ok()) << expected.status();
  v1::DequantizeHeader whole_back;
  *whole_back.mutable_tensor() = tensor;
  whole_back.mutable_reference();
  const auto expected_reals =
      Dequantize(server_->quantization(), whole_back, expected->codes);
  ASSERT_TRUE(expected_reals.ok()) << expected_reals.status();

  std::array<absl::StatusOr<QuantizeAnswer>, 3> codes;
  std::array<absl::StatusOr<DequantizeAnswer>, 3> reals;
  std::vector<std::thread> streams;
  for (int part = 0; part < 3; ++part) {
    streams.emplace_back([&, part] {
      v1::QuantizeHeader header;
      *header.mutable_tensor() = tensor;
      header.mutable_reference();
      const int64_t begin = bounds[part] * element_bytes;
      const int64_t end = bounds[part + 1] * element_bytes;
      header.mutable_range()->set_begin_bytes(begin);
      header.mutable_range()->set_end_bytes(end);
      codes[part] = Quantize(server_->quantization(), header,
                             absl::string_view(data).substr(begin, end - begin),
                             (part + 1) * 1000 * element_bytes);
      if (!codes[part].ok()) return;
      v1::DequantizeHeader back;
      *back.mutable_tensor() = tensor;
      back.mutable_reference();
      back.mutable_range()->set_begin_bytes(format.SizeBytes(bounds[part]));
      back.mutable_range()->set_end_bytes(format.SizeBytes(bounds[part + 1]));
      reals[part] = Dequantize(server_->quantization(), back,
                               codes[part]->codes, (part + 1) * 998);
    });
  }
  for (std::thread& stream : streams) stream.join();

  std::string joined_codes;
  std::string joined_reals;
  v1::QuantizeSummary sum;
  for (int part = 0; part < 3; ++part) {
    ASSERT_TRUE(codes[part].ok()) << codes[part].status();
    ASSERT_TRUE(reals[part].ok()) << reals[part].status();
    EXPECT_EQ(codes[part]->header.range().begin_bytes(), joined_codes.size());
    EXPECT_EQ(codes[part]->header.size_bytes(), expected->codes.size());
    EXPECT_EQ(reals[part]->header.range().begin_bytes(), joined_reals.size());
    EXPECT_EQ(reals[part]->summary.count(),
              static_cast<uint64_t>(bounds[part + 1] - bounds[part]));
    joined_codes += codes[part]->codes;
    joined_reals += reals[part]->reals;
    const v1::QuantizeSummary& summary = codes[part]->summary;
    sum.set_count(sum.count() + summary.count());
    sum.set_clipped_low_count(sum.clipped_low_count() +
                              summary.clipped_low_count());
    sum.set_clipped_high_count(sum.clipped_high_count() +
                               summary.clipped_high_count());
    sum.set_nan_count(sum.nan_count() + summary.nan_count());
    sum.set_positive_infinity_count(sum.positive_infinity_count() +
                                    summary.positive_infinity_count());
    sum.set_negative_infinity_count(sum.negative_infinity_count() +
                                    summary.negative_infinity_count());
  }
  EXPECT_TRUE(joined_codes == expected->codes);
  EXPECT_TRUE(joined_reals == expected_reals->reals);
  sum.set_checksum_xxh3(expected->summary.checksum_xxh3());
  EXPECT_EQ(Serialize(sum), Serialize(expected->summary));
}

std::vector<Case> RangesCases() {
  std::vector<Case> cases;
  const std::vector<Case> all_cases = AllCases();
  // Every fifth has all granularities, and codes that share bytes.
  for (size_t i = 0; i < all_cases.size(); i += kThreadSanitized ? 5 : 1) {
    cases.push_back(all_cases[i]);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(AllCases, RangesTest,
                         ::testing::ValuesIn(RangesCases()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return CaseName(info.param.Name());
                         });

// A client as protobuf and gRPC make it takes at most 4 MiB in a message.
TEST(MessageSizeTest, AnEncodingThatIsAnsweredFitsAMessage) {
  TestServer server;
  const auto stub = v1::QuantizationService::NewStub(grpc::CreateChannel(
      server.address(), grpc::InsecureChannelCredentials()));
  const auto quantize = [&](v1::ScaleType type, int count) -> std::string {
    v1::QuantizeHeader header;
    header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT16);
    header.mutable_tensor()->add_shape(count);
    v1::Encoding& encoding = *header.mutable_encoding();
    encoding.set_format(v1::NUMBER_FORMAT_INT8);
    encoding.set_scale_type(type);
    encoding.add_block_size(1);
    if (type == v1::SCALE_TYPE_FLOAT32) {
      encoding.mutable_scale()->Resize(count, 1);
    } else {
      encoding.set_scale_code(std::string(count, '\1'));
      encoding.mutable_outer_scale()->Resize(count, 1);
      encoding.add_outer_block_size(1);
      encoding.add_scale_shape(count);
    }
    const absl::StatusOr<QuantizeAnswer> answer =
        Quantize(*stub, header, std::string(size_t{2} * count, '\0'), 1 << 20);
    if (answer.ok()) return "";
    const std::string message(answer.status().message());
    return message.substr(0, message.find(':'));
  };
  constexpr int kMost = 4 << 20;
  constexpr int kFrame = 8 << 10;
  const struct {
    v1::ScaleType type;
    int bytes_per_scale;
  } cases[] = {{v1::SCALE_TYPE_FLOAT32, 4}, {v1::SCALE_TYPE_INTEGER, 9}};
  for (const auto& [type, bytes_per_scale] : cases) {
    SCOPED_TRACE(v1::ScaleType_Name(type));
    const int count = (kMost - kFrame) / bytes_per_scale;
    EXPECT_EQ(quantize(type, count), "");
    EXPECT_EQ(quantize(type, count + 1), "SCALE_COUNT_LIMIT");
  }
}

}  // namespace
}  // namespace quantd::testing::chunking_test
