#include "client/cpp/client.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/errors.h"
#include "client/cpp/tensor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/cpp/fake_service.h"
#include "tests/support/temporary_directory.h"
#include "xxhash.h"

namespace quantd {
namespace {

constexpr float kScale = 0.25f;

std::vector<float> Ramp(size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(i % 509) * 0.125f - 31.0f;
  }
  return values;
}

std::vector<uint8_t> ExpectedCodes(const std::vector<float>& values) {
  std::vector<uint8_t> codes(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    codes[i] = static_cast<uint8_t>(FakeQuantize(values[i], kScale));
  }
  return codes;
}

QuantizeJob MakeJob(const std::string& name, const std::vector<float>& values) {
  QuantizeJob job;
  job.tensor.name.set_tensor(name);
  job.tensor.shape = {static_cast<int64_t>(values.size())};
  job.tensor.data =
      absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(values.data()),
                          values.size() * sizeof(float));
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(kScale);
  job.source = encoding;
  return job;
}

std::vector<uint8_t> ToVector(absl::Span<const uint8_t> bytes) {
  return std::vector<uint8_t>(bytes.begin(), bytes.end());
}

class ClientTest : public ::testing::Test {
 protected:
  std::unique_ptr<Client> Connect(const std::string& target) {
    return std::move(Client::Connect(OptionsFor(target))).value();
  }

  static ClientOptions OptionsFor(const std::string& target) {
    ClientOptions options;
    options.target = target;
    options.timeout = absl::Minutes(2);
    options.chunk_bytes = 64 << 10;
    options.max_retries = 4;
    options.initial_backoff = absl::Milliseconds(1);
    options.max_backoff = absl::Milliseconds(10);
    return options;
  }

  // Sends tensors in parts of kPartBytes.
  std::unique_ptr<Client> ConnectWithParts() {
    ClientOptions options = OptionsFor(server_.target());
    options.part_bytes = kPartBytes;
    return std::move(Client::Connect(options)).value();
  }
  static constexpr int64_t kPartBytes = 256 << 10;

  FakeServer server_;
  std::unique_ptr<Client> client_ = Connect(server_.target());
};

TEST_F(ClientTest, QuantizesALargeTensorInChunks) {
  const std::vector<float> values = Ramp(5'000'011);
  const absl::StatusOr<QuantizeResult> result =
      client_->Quantize(MakeJob("w", values));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(ToVector(result->codes), ExpectedCodes(values));
  EXPECT_EQ(result->summary.count(), values.size());
  EXPECT_EQ(result->header.name().tensor(), "w");
}

TEST_F(ClientTest, WritesIntoTheCallersBufferAndNotBehindIt) {
  const std::vector<float> values = Ramp(100'000);
  std::vector<uint8_t> output(values.size() + 8, 0xAB);
  QuantizeJob job = MakeJob("w", values);
  job.output = absl::MakeSpan(output);
  const absl::StatusOr<QuantizeResult> result = client_->Quantize(job);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->codes.data(), output.data());
  EXPECT_EQ(result->codes.size(), values.size());
  EXPECT_EQ(ToVector(result->codes), ExpectedCodes(values));
  EXPECT_EQ(std::vector<uint8_t>(output.end() - 8, output.end()),
            std::vector<uint8_t>(8, 0xAB));
}

// Writes what a sink takes to a vector.
Sink SinkTo(std::vector<uint8_t>* bytes) {
  return [bytes](uint64_t offset_bytes, absl::Span<const uint8_t> piece) {
    // Pieces may come again, but there is never a hole.
    EXPECT_LE(offset_bytes, bytes->size());
    bytes->resize(offset_bytes);
    bytes->insert(bytes->end(), piece.begin(), piece.end());
    return absl::OkStatus();
  };
}

TEST_F(ClientTest, CodesAndScalesGoToSinks) {
  const std::vector<float> values = Ramp(500'000);
  const float scale = kScale;
  for (const bool is_broken : {false, true}) {
    if (is_broken) server_.faults().unavailable_streams = 2;
    std::vector<uint8_t> codes;
    std::vector<uint8_t> scales;
    QuantizeJob job = MakeJob("w", values);
    job.sink = SinkTo(&codes);
    job.scales_in_chunks = true;
    job.scale_sinks.scale = SinkTo(&scales);
    const absl::StatusOr<QuantizeResult> result = client_->Quantize(job);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(codes, ExpectedCodes(values));
    // This server has them in its header all the same.
    ASSERT_EQ(scales.size(), sizeof(scale));
    EXPECT_EQ(std::memcmp(scales.data(), &scale, sizeof(scale)), 0);
    EXPECT_TRUE(result->header.encoding().scale().empty());
    EXPECT_TRUE(result->codes.empty());
  }
}

TEST_F(ClientTest, AnErrorOfASinkFailsItsTensorOnly) {
  const std::vector<float> values = Ramp(500'000);
  const std::unique_ptr<QuantizeStream> stream = client_->OpenQuantize();
  for (const bool fails : {true, false}) {
    QuantizeJob job = MakeJob("w", values);
    job.sink = [fails](uint64_t offset_bytes, absl::Span<const uint8_t>) {
      return fails && offset_bytes > 0 ? absl::DataLossError("FULL: no room")
                                       : absl::OkStatus();
    };
    stream->Send(job);
  }
  EXPECT_EQ(ErrorReason(stream->Receive().status()), "FULL");
  EXPECT_TRUE(stream->Receive().ok());
}

// Lets the server send the scale beside the codes.
void SendScalesInChunks(uint64_t checksum, v1::QuantizeResponse* response) {
  if (response->has_header()) {
    Encoding* const encoding = response->mutable_header()->mutable_encoding();
    response->mutable_scales()->set_scale(encoding->scale().data(),
                                          sizeof(float));
    encoding->clear_scale();
    encoding->set_scales_in_chunks(true);
  }
  if (response->has_summary()) {
    response->mutable_summary()->set_scale_checksum_xxh3(checksum);
  }
}

TEST_F(ClientTest, TakesScalesInChunks) {
  const std::vector<float> values = Ramp(1000);
  const uint64_t checksum = XXH3_64bits(&kScale, sizeof(kScale));
  const auto quantize = [&] {
    QuantizeJob job = MakeJob("w", values);
    job.scales_in_chunks = true;
    return client_->Quantize(job);
  };
  server_.faults().change_answer.Set([=](v1::QuantizeResponse* response) {
    SendScalesInChunks(checksum, response);
  });
  const absl::StatusOr<QuantizeResult> result = quantize();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(ToVector(result->codes), ExpectedCodes(values));
  const Encoding whole =
      WithScales(result->header.encoding(), result->scales.view());
  ASSERT_EQ(whole.scale_size(), 1);
  EXPECT_EQ(whole.scale(0), kScale);

  server_.faults().change_answer.Set([=](v1::QuantizeResponse* response) {
    SendScalesInChunks(checksum + 1, response);
  });
  EXPECT_EQ(ErrorReason(quantize().status()), "CHECKSUM_MISMATCH");
  using Response = v1::QuantizeResponse;
  const std::vector<std::function<void(Response*)>> faults = {
      [](Response* response) { response->clear_scales(); },
      [](Response* response) {
        if (response->has_scales()) response->mutable_scales()->set_first(1);
      },
      [](Response* response) {
        if (response->has_scales()) {
          response->mutable_scales()->mutable_scale()->append("abcd");
        }
      },
      [](Response* response) {
        if (response->has_scales()) {
          response->mutable_scales()->set_zero_point("a");
        }
      },
      [](Response* response) {
        if (response->has_scales()) {
          response->mutable_scales()->set_scale("abc");
        }
      },
  };
  for (const auto& fault : faults) {
    server_.faults().change_answer.Set([=](Response* response) {
      SendScalesInChunks(checksum, response);
      fault(response);
    });
    EXPECT_EQ(ErrorReason(quantize().status()), "RESPONSE_MALFORMED");
  }
  server_.faults().change_answer.Set(nullptr);
}

TEST_F(ClientTest, ReportsAnOutputThatIsTooSmallAndGoesOn) {
  const std::vector<float> values = Ramp(100'000);
  std::vector<uint8_t> output(10);
  QuantizeJob job = MakeJob("w", values);
  job.output = absl::MakeSpan(output);
  const std::unique_ptr<QuantizeStream> stream = client_->OpenQuantize();
  stream->Send(job);
  stream->Send(MakeJob("v", values));
  EXPECT_EQ(ErrorReason(stream->Receive().status()), "OUTPUT_TOO_SMALL");
  const absl::StatusOr<QuantizeResult> next = stream->Receive();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(ToVector(next->codes), ExpectedCodes(values));
}

TEST_F(ClientTest, SendsManyTensorsOnOneStream) {
  const std::unique_ptr<QuantizeStream> stream = client_->OpenQuantize();
  std::vector<std::vector<float>> tensors;
  for (size_t i = 0; i < 500; ++i) tensors.push_back(Ramp(i * 37));
  for (size_t i = 0; i < tensors.size(); ++i) {
    stream->Send(MakeJob(absl::StrCat("t", i), tensors[i]));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const absl::StatusOr<QuantizeResult> result = stream->Receive();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->header.name().tensor(), absl::StrCat("t", i));
    EXPECT_EQ(ToVector(result->codes), ExpectedCodes(tensors[i]));
  }
  EXPECT_EQ(stream->pending_count(), 0);
}

TEST_F(ClientTest, OneFailedTensorLeavesItsNeighboursAlone) {
  const std::vector<float> values = Ramp(4'000'000);
  const std::unique_ptr<QuantizeStream> stream = client_->OpenQuantize();
  server_.faults().wait_after_bad = true;
  stream->Send(MakeJob("a", values));
  stream->Send(MakeJob("bad", values));
  stream->Send(MakeJob("c", values));
  EXPECT_TRUE(stream->Receive().ok());
  const absl::Status status = stream->Receive().status();
  server_.faults().bad_was_noticed.Notify();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_EQ(status.message(),
            "NAME_INVALID: this name is bad (header.tensor.name)");
  const absl::StatusOr<QuantizeResult> last = stream->Receive();
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_EQ(ToVector(last->codes), ExpectedCodes(values));
  EXPECT_LT(server_.faults().bytes_of_bad_tensors, 16'000'000)
      << "the rest of a failed tensor was sent all the same";
}

TEST_F(ClientTest, FailedTensorMayBeFreedAtOnce) {
  for (int i = 0; i < 50; ++i) {
    const std::unique_ptr<QuantizeStream> stream = client_->OpenQuantize();
    auto values = std::make_unique<std::vector<float>>(Ramp(1'000'000));
    stream->Send(MakeJob("bad", *values));
    EXPECT_FALSE(stream->Receive().ok());
    values.reset();
  }
}

TEST_F(ClientTest, StreamMayBeDroppedInTheMiddle) {
  for (int i = 0; i < 50; ++i) {
    const std::vector<float> values = Ramp(1'000'000);
    const std::unique_ptr<QuantizeStream> stream = client_->OpenQuantize();
    stream->Send(MakeJob("a", values));
    stream->Send(MakeJob("b", values));
  }
}

TEST_F(ClientTest, RefusesDataThatDoNotFitTheShapeWithoutSending) {
  const std::vector<float> values = Ramp(100);
  QuantizeJob job = MakeJob("w", values);
  job.tensor.shape = {101};
  const absl::Status status = client_->Quantize(job).status();
  EXPECT_EQ(status.message(),
            "ARGUMENT_INVALID: expected 404 bytes of data, got 400");
}

TEST_F(ClientTest, RefusesNamesThatAreNotUtf8) {
  const std::vector<float> values = Ramp(100);
  const std::unique_ptr<QuantizeStream> stream = client_->OpenQuantize();
  stream->Send(MakeJob("\xC0\x80", values));
  stream->Send(MakeJob("\xE2\x82\xAC", values));
  EXPECT_EQ(ErrorReason(stream->Receive().status()), "ARGUMENT_INVALID");
  EXPECT_TRUE(stream->Receive().ok());
}

TEST_F(ClientTest, DetectsDataThatChangedOnTheWay) {
  server_.faults().wrong_checksum = true;
  const std::vector<float> values = Ramp(1000);
  const absl::Status status = client_->Quantize(MakeJob("w", values)).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_EQ(ErrorReason(status), "CHECKSUM_MISMATCH");
}

TEST_F(ClientTest, RefusesMoreBytesThanWereAnnounced) {
  server_.faults().too_many_bytes = true;
  const std::vector<float> values = Ramp(1000);
  EXPECT_EQ(ErrorReason(client_->Quantize(MakeJob("w", values)).status()),
            "RESPONSE_MALFORMED");
}

// Changes one answer and tells the error, which must not be tried again.
template <typename Change>
std::string ErrorOf(FakeServer* server, Client* client, Change change) {
  server->faults().change_answer.Set(change);
  const absl::Status status =
      client->Quantize(MakeJob("w", Ramp(1000))).status();
  server->faults().change_answer.Set(nullptr);
  EXPECT_EQ(ErrorReason(status), "RESPONSE_MALFORMED") << status;
  return std::string(ErrorText(status));
}

TEST_F(ClientTest, TakesNoAnswerToAnotherQuestion) {
  using Answer = v1::QuantizeResponse;
  const auto error_of = [this](auto change) {
    return ErrorOf(&server_, client_.get(), change);
  };
  EXPECT_EQ(error_of([](Answer* answer) {
              answer->mutable_header()->mutable_name()->set_tensor("v");
            }),
            "expected tensor \"w\", got \"v\"");
  EXPECT_EQ(error_of([](Answer* answer) {
              answer->mutable_header()->set_shape(0, 999);
            }),
            "expected shape [1000], got [999]");
  EXPECT_EQ(error_of([](Answer* answer) {
              answer->mutable_header()->mutable_encoding()->set_format(
                  v1::NUMBER_FORMAT_UINT8);
            }),
            "expected format int8, got uint8");
  EXPECT_EQ(error_of([](Answer* answer) {
              Encoding* const encoding =
                  answer->mutable_header()->mutable_encoding();
              encoding->add_block_size(500);
              encoding->add_scale(kScale);
            }),
            "expected block size [], got [500]");
  EXPECT_EQ(error_of([](Answer* answer) {
              answer->mutable_header()->mutable_encoding()->add_scale(kScale);
            }),
            "expected scale of 1 entries, got 2");
  EXPECT_EQ(error_of([](Answer* answer) {
              answer->mutable_header()->clear_encoding();
            }),
            "expected an encoding, got none");
  EXPECT_EQ(error_of([](Answer* answer) {
              answer->mutable_header()->set_size_bytes(2000);
              answer->mutable_header()->mutable_range()->set_end_bytes(2000);
            }),
            "expected size_bytes 1000, got 2000");
  EXPECT_EQ(error_of([](Answer* answer) {
              answer->mutable_header()->mutable_range()->set_begin_bytes(8);
            }),
            "expected bytes [0, 1000), got [8, 1000)");
  EXPECT_EQ(error_of([](Answer* answer) { answer->set_offset(8); }),
            "expected data at byte 0, got 8");
}

TEST_F(ClientTest, TakesNoSummaryOfAnotherTensor) {
  const std::vector<float> values = Ramp(100);
  CalibrateJob job;
  job.tensor = MakeJob("w", values).tensor;
  server_.faults().change_summary.Set([](v1::CalibrateSummary* summary) {
    summary->mutable_name()->set_tensor("v");
  });
  EXPECT_EQ(client_->Calibrate(job).status().message(),
            "RESPONSE_MALFORMED: expected tensor \"w\", got \"v\"");
  server_.faults().change_summary.Set(nullptr);
  EXPECT_TRUE(client_->Calibrate(job).ok());
  job.spec.emplace().set_format(v1::NUMBER_FORMAT_INT8);
  EXPECT_EQ(client_->Calibrate(job).status().message(),
            "RESPONSE_MALFORMED: expected format int8, got "
            "unspecified");
}

TEST_F(ClientTest, TakesNoStoredEncodingOfAnotherName) {
  TensorName name;
  name.set_tensor("w");
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  server_.faults().change_stored.Set([](v1::StoredEncoding* stored) {
    stored->mutable_name()->set_revision("main");
  });
  EXPECT_TRUE(client_->PutEncoding(name, encoding, "").ok());
  EXPECT_TRUE(client_->GetEncoding(name).ok());
  server_.faults().change_stored.Set([](v1::StoredEncoding* stored) {
    stored->mutable_name()->set_model("other");
  });
  EXPECT_EQ(ErrorReason(client_->PutEncoding(name, encoding, "").status()),
            "RESPONSE_MALFORMED");
  EXPECT_EQ(client_->GetEncoding(name).status().message(),
            "RESPONSE_MALFORMED: expected tensor \"w\", got \"w\" of other");
}

TEST_F(ClientTest, SendsAgainAfterTheStreamBroke) {
  server_.faults().unavailable_streams = 3;
  const std::vector<float> values = Ramp(300'000);
  const std::unique_ptr<QuantizeStream> stream = client_->OpenQuantize();
  for (int i = 0; i < 3; ++i) stream->Send(MakeJob("w", values));
  for (int i = 0; i < 3; ++i) {
    const absl::StatusOr<QuantizeResult> result = stream->Receive();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(ToVector(result->codes), ExpectedCodes(values));
  }
}

TEST_F(ClientTest, GivesUpAfterTheLastRetry) {
  server_.faults().unavailable_streams = 5;
  const std::vector<float> values = Ramp(300'000);
  const absl::Status status = client_->Quantize(MakeJob("w", values)).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(ErrorReason(status), "DRAINING");
  EXPECT_EQ(server_.faults().unavailable_streams, 0);
  EXPECT_FALSE(IsServerUnreachable(status));
}

// Ten parts and a bit.
constexpr size_t kManyParts = 10 * (256 << 10) / sizeof(float) + 1000;

void ExpectWhole(const absl::StatusOr<QuantizeResult>& result,
                 const std::vector<float>& values, float scale = kScale) {
  ASSERT_TRUE(result.ok()) << result.status();
  std::vector<uint8_t> codes(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    codes[i] = static_cast<uint8_t>(FakeQuantize(values[i], scale));
  }
  EXPECT_EQ(ToVector(result->codes), codes);
  EXPECT_EQ(result->summary.count(), values.size());
  EXPECT_EQ(result->summary.checksum_xxh3(),
            XXH3_64bits(codes.data(), codes.size()));
  EXPECT_EQ(result->header.size_bytes(), codes.size());
  EXPECT_EQ(result->header.range().begin_bytes(), 0u);
  EXPECT_EQ(result->header.range().end_bytes(), codes.size());
}

TEST_F(ClientTest, GoesOnBehindTheLastPartThatWasAnswered) {
  const std::vector<float> values = Ramp(kManyParts);
  const int64_t bytes = static_cast<int64_t>(values.size() * sizeof(float));
  server_.faults().break_every_bytes = bytes * 9 / 10;
  server_.faults().breaks = 1;
  const absl::StatusOr<QuantizeResult> result =
      ConnectWithParts()->Quantize(MakeJob("w", values));
  ExpectWhole(result, values);
  // One for each part that was counted.
  EXPECT_EQ(result->summary.clipped_low_count(), 11u);
  EXPECT_EQ(result->header.encoding().scale(0), kScale);
  EXPECT_EQ(server_.faults().breaks, 0);
  EXPECT_LE(server_.faults().data_bytes, bytes + kPartBytes)
      << "more than one part was sent twice";
}

TEST_F(ClientTest, PartsThatGetThroughMakeRetriesStartAnew) {
  const std::vector<float> values = Ramp(kManyParts);
  // Each call takes one part to its end, and half of the next one.
  server_.faults().break_every_bytes = kPartBytes * 3 / 2;
  const std::unique_ptr<Client> client = ConnectWithParts();
  const std::unique_ptr<QuantizeStream> stream = client->OpenQuantize();
  for (int i = 0; i < 3; ++i) stream->Send(MakeJob("w", values));
  for (int i = 0; i < 3; ++i) ExpectWhole(stream->Receive(), values);
}

TEST_F(ClientTest, APartThatFailsEndsItsTensorOnly) {
  const std::vector<float> values = Ramp(kManyParts);
  for (const int64_t part : {0, 3, 10}) {
    server_.faults().bad_part = part * kPartBytes;
    const std::unique_ptr<Client> client = ConnectWithParts();
    const std::unique_ptr<QuantizeStream> stream = client->OpenQuantize();
    const std::vector<float> one = Ramp(100);
    stream->Send(MakeJob("a", values));
    EXPECT_EQ(ErrorReason(stream->Receive().status()), "NON_FINITE_REJECTED");
    server_.faults().bad_part = -1;
    stream->Send(MakeJob("b", values));
    stream->Send(MakeJob("c", one));
    ExpectWhole(stream->Receive(), values);
    ExpectWhole(stream->Receive(), one);
  }
}

TEST_F(ClientTest, TensorsBehindAFailedPartAreAnsweredAsTheirOwn) {
  const std::vector<float> values = Ramp(kManyParts);
  const std::vector<float> one = Ramp(100);
  server_.faults().bad_part = 2 * kPartBytes;
  const std::unique_ptr<Client> client = ConnectWithParts();
  const std::unique_ptr<QuantizeStream> stream = client->OpenQuantize();
  stream->Send(MakeJob("a", values));
  stream->Send(MakeJob("b", one));
  stream->SendLast(MakeJob("c", values));
  EXPECT_EQ(ErrorReason(stream->Receive().status()), "NON_FINITE_REJECTED");
  ExpectWhole(stream->Receive(), one);
  EXPECT_EQ(ErrorReason(stream->Receive().status()), "NON_FINITE_REJECTED");
}

TEST_F(ClientTest, OutputThatIsTooSmallEndsATensorInParts) {
  const std::vector<float> values = Ramp(kManyParts);
  std::vector<uint8_t> output(10);
  QuantizeJob job = MakeJob("w", values);
  job.output = absl::MakeSpan(output);
  const std::unique_ptr<Client> client = ConnectWithParts();
  const std::unique_ptr<QuantizeStream> stream = client->OpenQuantize();
  stream->Send(job);
  stream->Send(MakeJob("v", values));
  EXPECT_EQ(ErrorReason(stream->Receive().status()), "OUTPUT_TOO_SMALL");
  ExpectWhole(stream->Receive(), values);
}

TEST_F(ClientTest, APartMayBeAskedForAgain) {
  const std::vector<float> values = Ramp(kManyParts);
  server_.faults().retry_part = 4 * kPartBytes;
  const absl::StatusOr<QuantizeResult> result =
      ConnectWithParts()->Quantize(MakeJob("w", values));
  ExpectWhole(result, values);
  EXPECT_EQ(result->summary.clipped_low_count(), 11u);
  EXPECT_EQ(server_.faults().retry_part, -1);
}

TEST_F(ClientTest, StoresAnEncodingOnceForAllParts) {
  const std::vector<float> values = Ramp(kManyParts);
  server_.faults().break_every_bytes = kPartBytes * 5 / 2;
  QuantizeJob job = MakeJob("w", values);
  job.store = true;
  ExpectWhole(ConnectWithParts()->Quantize(job), values);
  EXPECT_EQ(server_.faults().stored, 1);
}

TEST_F(ClientTest, CompensatedRoundingTakesTheWholeTensor) {
  const std::vector<float> values = Ramp(kManyParts);
  QuantizeJob job = MakeJob("w", values);
  job.rounding.emplace().set_method(v1::ROUNDING_METHOD_COMPENSATED);
  ExpectWhole(ConnectWithParts()->Quantize(job), values);
  EXPECT_EQ(server_.faults().compensated, 1);
}

TEST_F(ClientTest, GoesOnWithTheEncodingThatItsReferenceHad) {
  const std::vector<float> values = Ramp(kManyParts);
  server_.faults().break_every_bytes = kPartBytes * 5;
  server_.faults().breaks = 1;
  QuantizeJob job = MakeJob("w", values);
  job.source = v1::EncodingReference();
  // Not asked for again after the break.
  ClientOptions options = OptionsFor(server_.target());
  options.part_bytes = kPartBytes;
  options.on_retry = [this](const Retry&) {
    server_.faults().reference_scale = 0.5f;
  };
  const auto client = std::move(Client::Connect(options)).value();
  const absl::StatusOr<QuantizeResult> result = client->Quantize(job);
  ExpectWhole(result, values);
  EXPECT_EQ(result->header.etag(), "0.25");
  EXPECT_EQ(server_.faults().reference_scale, 0.5f);
}

TEST_F(ClientTest, StartsAgainWhenTheReferenceIsReplacedInTheMiddle) {
  const std::vector<float> values = Ramp(kManyParts);
  server_.faults().replaced_part = 6 * kPartBytes;
  QuantizeJob job = MakeJob("w", values);
  job.source = v1::EncodingReference();
  job.omit_encoding = true;
  const absl::StatusOr<QuantizeResult> result =
      ConnectWithParts()->Quantize(job);
  ExpectWhole(result, values, 0.5f);
  EXPECT_EQ(result->header.etag(), "0.5");
  EXPECT_FALSE(result->header.has_encoding());
}

TEST_F(ClientTest, TellsOfRetriesAndOfTheLastError) {
  server_.faults().unavailable_streams = 3;
  ClientOptions options = OptionsFor(server_.target());
  options.max_retries = 2;
  std::vector<Retry> retries;
  options.on_retry = [&](const Retry& retry) { retries.push_back(retry); };
  const auto client = std::move(Client::Connect(options)).value();
  const std::vector<float> values = Ramp(1000);
  const absl::Status status = client->Quantize(MakeJob("w", values)).status();
  EXPECT_EQ(status.message(),
            "DRAINING: the server is about to stop (after 3 attempts)");
  ASSERT_EQ(retries.size(), 2u);
  EXPECT_EQ(ErrorReason(retries[0].status), "DRAINING");
  EXPECT_EQ(retries[0].number, 1);
  EXPECT_EQ(retries[1].number, 2);
  EXPECT_LE(retries[1].left, options.retry_for);
  EXPECT_GT(retries[1].pause, absl::ZeroDuration());
}

TEST_F(ClientTest, RetriesWhatAStatusWithRetryInfoAsksFor) {
  server_.faults().exhausted_unary = 2;
  EXPECT_TRUE(client_->ListEncodings("m", "").ok());
  server_.faults().exhausted_unary = 9;
  const absl::Status status = client_->ListEncodings("m", "").status();
  EXPECT_EQ(status.message(), "OVERLOADED: too much (after 5 attempts)");
  EXPECT_EQ(RetryAfter(status), absl::Milliseconds(1));
}

TEST_F(ClientTest, TimeEndsRetriesAndNotTheirNumber) {
  ClientOptions options = OptionsFor(server_.target());
  options.max_retries = ClientOptions().max_retries;
  const std::vector<float> values = Ramp(1000);
  // A server that takes more than the six retries of earlier versions.
  server_.faults().unavailable_streams = 20;
  EXPECT_TRUE(std::move(Client::Connect(options))
                  .value()
                  ->Quantize(MakeJob("w", values))
                  .ok());
  server_.faults().unavailable_streams = 1 << 20;
  options.retry_for = absl::Milliseconds(200);
  std::vector<absl::Duration> left;
  options.on_retry = [&](const Retry& retry) { left.push_back(retry.left); };
  const auto client = std::move(Client::Connect(options)).value();
  const absl::Time begin = absl::Now();
  const absl::Status status = client->Quantize(MakeJob("w", values)).status();
  EXPECT_EQ(ErrorReason(status), "DRAINING");
  EXPECT_GE(absl::Now() - begin, absl::Milliseconds(150));
  // Where the machine is slow the time may be over after one retry.
  ASSERT_FALSE(left.empty());
  EXPECT_EQ(left[0], options.retry_for);
  for (size_t i = 1; i < left.size(); ++i) EXPECT_LT(left[i], left[i - 1]);
  left.clear();
  options.retry_for = absl::ZeroDuration();
  EXPECT_FALSE(std::move(Client::Connect(options))
                   .value()
                   ->Quantize(MakeJob("w", values))
                   .ok());
  EXPECT_TRUE(left.empty());
}

TEST_F(ClientTest, ADeadlineCoversAllAttempts) {
  server_.faults().unavailable_streams = 1 << 20;
  ClientOptions options = OptionsFor(server_.target());
  options.max_retries = 1 << 20;
  options.deadline = absl::Milliseconds(200);
  int retries = 0;
  options.on_retry = [&retries](const Retry&) { ++retries; };
  const auto client = std::move(Client::Connect(options)).value();
  const std::vector<float> values = Ramp(1000);
  absl::Status status = client->Quantize(MakeJob("w", values)).status();
  EXPECT_THAT(std::string(ErrorReason(status)),
              ::testing::AnyOf("DRAINING", "TIMEOUT"));
  // Where the machine is slow the first attempt may take all the time.
  if (retries > 1) {
    EXPECT_THAT(std::string(status.message()),
                ::testing::HasSubstr("attempts"));
  }
  server_.faults().unavailable_streams = 0;
  server_.faults().silent = true;
  status = client->Quantize(MakeJob("w", values)).status();
  EXPECT_EQ(ErrorReason(status), "TIMEOUT");
}

TEST_F(ClientTest, BalancesOverTheAddressesThatAreHealthy) {
  FakeServer other;
  const std::unique_ptr<Client> client =
      Connect(absl::StrCat("ipv4:", server_.target(), ",", other.target()));
  const std::vector<float> values = Ramp(1000);
  const auto took_calls = [&](FakeServer& server) {
    const int64_t before = server.faults().data_bytes;
    for (int i = 0; i < 4; ++i) {
      ExpectWhole(client->Quantize(MakeJob("w", values)), values);
    }
    return server.faults().data_bytes > before;
  };
  const auto eventually = [&](FakeServer& server, bool expected) {
    const absl::Time deadline = absl::Now() + absl::Minutes(2);
    while (took_calls(server) != expected) {
      if (absl::Now() > deadline) return false;
    }
    return true;
  };
  EXPECT_TRUE(eventually(server_, true));
  EXPECT_TRUE(eventually(other, true));
  server_.SetServing(false);
  EXPECT_TRUE(eventually(server_, false));
  EXPECT_TRUE(took_calls(other));
  server_.SetServing(true);
  EXPECT_TRUE(eventually(server_, true));
}

TEST_F(ClientTest, SendsATensorAgainWhenTheServerAsksForIt) {
  server_.faults().retry_tensors = 2;
  const std::vector<float> values = Ramp(300'000);
  const std::unique_ptr<QuantizeStream> stream = client_->OpenQuantize();
  for (int i = 0; i < 3; ++i) {
    stream->Send(MakeJob(absl::StrCat("t", i), values));
  }
  for (int i = 0; i < 3; ++i) {
    const absl::StatusOr<QuantizeResult> result = stream->Receive();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->header.name().tensor(), absl::StrCat("t", i));
    EXPECT_EQ(ToVector(result->codes), ExpectedCodes(values));
  }
  server_.faults().retry_tensors = 2;
  EXPECT_TRUE(client_->Quantize(MakeJob("one", values)).ok());
}

TEST_F(ClientTest, SendsATensorAgainBehindTheEndOfItsCall) {
  const std::vector<float> values = Ramp(300'000);
  const std::unique_ptr<QuantizeStream> stream = client_->OpenQuantize();
  server_.faults().retry_tensors = 1;
  stream->Send(MakeJob("t0", values));
  stream->Send(MakeJob("t1", values));
  stream->SendLast(MakeJob("t2", values));
  for (int i = 0; i < 3; ++i) {
    const absl::StatusOr<QuantizeResult> result = stream->Receive();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->header.name().tensor(), absl::StrCat("t", i));
    EXPECT_EQ(ToVector(result->codes), ExpectedCodes(values));
  }
  EXPECT_EQ(server_.faults().data_bytes,
            static_cast<int64_t>(3 * values.size() * sizeof(float)))
      << "what was answered was sent again";
}

TEST_F(ClientTest, SaysThatTheServerIsUnreachable) {
  const std::string target = server_.target();
  server_.Stop();
  const std::vector<float> values = Ramp(1000);
  const absl::Status status = client_->Quantize(MakeJob("w", values)).status();
  EXPECT_TRUE(IsServerUnreachable(status)) << status;
  EXPECT_TRUE(
      IsServerUnreachable(Connect(target)->ListEncodings("m", "").status()));
}

TEST_F(ClientTest, FailsAllTensorsWhenTheServerGoesInTheMiddle) {
  const std::vector<float> values = Ramp(3'000'000);
  const std::unique_ptr<QuantizeStream> stream = client_->OpenQuantize();
  for (int i = 0; i < 8; ++i) stream->Send(MakeJob("w", values));
  EXPECT_TRUE(stream->Receive().ok());
  server_.Stop();
  int failed = 0;
  while (stream->pending_count() > 0) {
    if (!stream->Receive().ok()) ++failed;
  }
  EXPECT_GT(failed, 0);
}

TEST_F(ClientTest, PassesOverWhatOnlyTellsThatTheServerIsAtWork) {
  server_.faults().tells_progress = true;
  const std::vector<float> values = Ramp(1'000'000);
  ExpectWhole(client_->Quantize(MakeJob("w", values)), values);
}

TEST_F(ClientTest, EndsACallThatDoesNotGoOn) {
  server_.faults().silent = true;
  ClientOptions options = client_->options();
  options.timeout = absl::Milliseconds(100);
  const std::unique_ptr<Client> client = Client::Connect(options).value();
  const std::vector<float> values = Ramp(1000);
  const absl::Status status = client->Quantize(MakeJob("w", values)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_EQ(ErrorReason(status), "TIMEOUT");
}

TEST_F(ClientTest, AsksNoProxyForAServerOnThisMachine) {
  unsetenv("no_proxy");
  unsetenv("no_grpc_proxy");
  setenv("http_proxy", "http://127.0.0.1:1", /*overwrite=*/1);
  const std::unique_ptr<Client> client = Connect(server_.target());
  const std::vector<float> values = Ramp(1000);
  ExpectWhole(client->Quantize(MakeJob("w", values)), values);
  unsetenv("http_proxy");
}

TEST_F(ClientTest, WorksOverAUnixSocket) {
  const testing::TemporaryDirectory directory;
  const std::string socket =
      absl::StrCat("unix:", directory.File("quantd.sock"));
  FakeServer server(socket);
  const std::vector<float> values = Ramp(300'000);
  const absl::StatusOr<QuantizeResult> result =
      Connect(socket)->Quantize(MakeJob("w", values));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(ToVector(result->codes), ExpectedCodes(values));
}

TEST_F(ClientTest, CalibratesWithoutAnOutput) {
  const std::vector<float> values = Ramp(300'000);
  CalibrateJob job;
  job.tensor = MakeJob("w", values).tensor;
  const absl::StatusOr<CalibrateResult> result = client_->Calibrate(job);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->statistics().count(), values.size());
}

TEST_F(ClientTest, ReportsAnRpcThatTheServerDoesNotHave) {
  EvaluateJob job;
  const std::vector<float> values = Ramp(10);
  job.tensor = MakeJob("w", values).tensor;
  EXPECT_TRUE(absl::IsUnimplemented(client_->Evaluate(job).status()));
}

TEST_F(ClientTest, ListsAllPages) {
  server_.faults().unavailable_unary = 2;
  const absl::StatusOr<std::vector<v1::StoredEncoding>> encodings =
      client_->ListEncodings("m", "main");
  ASSERT_TRUE(encodings.ok()) << encodings.status();
  ASSERT_EQ(encodings->size(), 2500u);
  EXPECT_EQ(encodings->back().name().tensor(), "2499");
}

TEST_F(ClientTest, ComputesEncodingsTensorByTensor) {
  server_.faults().unavailable_unary = 2;
  v1::ComputeEncodingsRequest request;
  request.set_model("m");
  const auto all = client_->ComputeEncodings(request);
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), 3u);
  EXPECT_EQ(all->back().name().tensor(), "t2");
  EXPECT_EQ(all->back().name().model(), "m");
}

TEST_F(ClientTest, DoesNotRepeatWhatWasAnswered) {
  server_.faults().break_after_two = true;
  int count = 0;
  const absl::Status status = client_->ComputeEncodings(
      {}, [&count](const v1::ComputeEncodingsResponse&) {
        ++count;
        return true;
      });
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(ErrorReason(status), "DRAINING");
  EXPECT_EQ(count, 2);
}

TEST_F(ClientTest, StopsWhenTheCallerHasSeenEnough) {
  // The rest would not come by itself.
  server_.faults().silent = true;
  int count = 0;
  const absl::Status status = client_->ComputeEncodings(
      {},
      [&count](const v1::ComputeEncodingsResponse&) { return ++count < 2; });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(count, 2);
}

TEST_F(ClientTest, TimesOutWhenAnswersStopComing) {
  server_.faults().silent = true;
  ClientOptions options;
  options.target = server_.target();
  options.timeout = absl::Milliseconds(100);
  const auto client = std::move(Client::Connect(options)).value();
  int count = 0;
  const absl::Status status = client->ComputeEncodings(
      {}, [&count](const v1::ComputeEncodingsResponse&) {
        ++count;
        return true;
      });
  EXPECT_EQ(ErrorReason(status), "TIMEOUT") << status;
  EXPECT_LE(count, 2);
}

TEST_F(ClientTest, ReportsThatAStreamingCallFindsNoServer) {
  server_.Stop();
  EXPECT_TRUE(IsServerUnreachable(client_->Sweep({}).status()));
}

TEST_F(ClientTest, SweepsUpToTheSummary) {
  v1::SweepRequest request;
  request.add_specs();
  request.add_specs();
  const auto all = client_->Sweep(request);
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), 2u);
  EXPECT_EQ(all->back().summary().totals(0).size_bytes(), 2u);
}

TEST_F(ClientTest, ChoosesMixtures) {
  v1::ChooseMixtureRequest request;
  request.add_tensors()->set_tensor("t");
  request.add_targets();
  request.add_targets();
  server_.faults().unavailable_unary = 1;
  const auto response = client_->ChooseMixture(request);
  ASSERT_TRUE(response.ok()) << response.status();
  ASSERT_EQ(response->mixtures_size(), 2);
  EXPECT_EQ(response->mixtures(1).choices(0).tensor(), "t");
}

TEST_F(ClientTest, ManagesStatistics) {
  const auto entries = client_->ListStatistics("m", "main");
  ASSERT_TRUE(entries.ok()) << entries.status();
  ASSERT_EQ(entries->size(), 2500u);
  EXPECT_EQ(entries->back().tensor(), "2499");
  EXPECT_FALSE(client_->GetStatistics(TensorName(), false)->has_state());
  EXPECT_TRUE(client_->GetStatistics(TensorName(), true)->has_state());
  EXPECT_TRUE(client_->DeleteStatistics(TensorName(), "rank-1").ok());
  EXPECT_EQ(ErrorReason(client_->DeleteStatistics(TensorName(), "")),
            "STATISTICS_NOT_FOUND");
}

TEST_F(ClientTest, SendsContributions) {
  const std::vector<float> values = Ramp(10);
  CalibrateJob job;
  job.tensor = MakeJob("w", values).tensor;
  job.contribution.emplace().set_sequence(5);
  const absl::StatusOr<CalibrateResult> result = client_->Calibrate(job);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->contribution().sequence(), 5u);
}

CalibrateJob MakeContribution(const std::string& tensor,
                              const std::string& source, uint64_t sequence,
                              const std::vector<float>& values) {
  CalibrateJob job;
  job.tensor = MakeJob(tensor, values).tensor;
  job.contribution.emplace().set_source(source);
  job.contribution->set_sequence(sequence);
  return job;
}

TEST_F(ClientTest, ALaterContributionWaitsForOneThatIsSentAgain) {
  const std::vector<float> values = Ramp(1000);
  const std::unique_ptr<CalibrateStream> stream = client_->OpenCalibrate();
  server_.faults().retry_tensors = 1;
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
    stream->Send(MakeContribution("a", "rank-0", sequence, values));
    stream->Send(MakeContribution("b", "rank-0", sequence, values));
    stream->Send(MakeContribution("a", "rank-1", sequence, values));
  }
  stream->SendLast(MakeContribution("a", "rank-0", 4, values));
  for (int i = 0; i < 10; ++i) {
    const absl::StatusOr<CalibrateResult> result = stream->Receive();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_FALSE(result->contribution().duplicate()) << i;
    EXPECT_EQ(result->contribution().sequence(), i / 3 + 1) << i;
  }
}

TEST_F(ClientTest, ContributionsKeepTheirOrderWhenTheirCallBreaks) {
  const std::vector<float> values = Ramp(1000);
  const std::unique_ptr<CalibrateStream> stream = client_->OpenCalibrate();
  server_.faults().unavailable_streams = 3;
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
    stream->Send(MakeContribution("a", "rank-0", sequence, values));
    stream->Send(MakeContribution("b", "rank-0", sequence, values));
  }
  for (int i = 0; i < 6; ++i) {
    const absl::StatusOr<CalibrateResult> result = stream->Receive();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_FALSE(result->contribution().duplicate()) << i;
    EXPECT_EQ(result->contribution().sequence(), i / 2 + 1) << i;
  }
}

TEST_F(ClientTest, ContributionsGoOnBehindOneThatFailed) {
  const std::vector<float> values = Ramp(1000);
  server_.faults().retry_tensors = 5;
  const std::unique_ptr<CalibrateStream> stream = client_->OpenCalibrate();
  stream->Send(MakeContribution("a", "rank-0", 1, values));
  stream->Send(MakeContribution("a", "rank-0", 2, values));
  EXPECT_EQ(ErrorReason(stream->Receive().status()), "MEMORY_BUDGET");
  const absl::StatusOr<CalibrateResult> next = stream->Receive();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_FALSE(next->contribution().duplicate());
}

TEST_F(ClientTest, AReferenceHasTheElementsOfTheTensor) {
  const std::vector<float> values = Ramp(10);
  EvaluateJob job;
  job.tensor = MakeJob("w", values).tensor;
  job.reference = Reference{ElementType::kFloat16, job.tensor.data};
  EXPECT_EQ(ErrorReason(client_->Evaluate(job).status()), "ARGUMENT_INVALID");
  job.reference->data = job.tensor.data.subspan(0, 20);
  // The fake does not have the RPC, but it was asked.
  EXPECT_TRUE(absl::IsUnimplemented(client_->Evaluate(job).status()));
}

TEST_F(ClientTest, KeepsTheServersReason) {
  const absl::Status status = client_->GetEncoding(TensorName()).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_EQ(ErrorReason(status), "ENCODING_NOT_FOUND");
  EXPECT_EQ(ErrorText(status), "no such encoding");
}

TEST_F(ClientTest, TakesAnEncodingOfAnySize) {
  server_.faults().large_encoding_bytes = 70 << 20;
  TensorName name;
  name.set_tensor("large");
  const absl::StatusOr<v1::StoredEncoding> stored = client_->GetEncoding(name);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->encoding().scale_code().size(), size_t{70} << 20);
}

TEST_F(ClientTest, APutWhoseAnswerWasLostIsNotRefusedForItself) {
  TensorName name;
  name.set_tensor("w");
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  server_.faults().lost_answers = 1;
  const absl::StatusOr<v1::StoredEncoding> first =
      client_->PutEncoding(name, encoding, "absent");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->etag(), "1");
  EXPECT_FALSE(first->has_encoding());
  encoding.set_scale(0, 0.25f);
  server_.faults().lost_answers = 1;
  const absl::StatusOr<v1::StoredEncoding> second =
      client_->PutEncoding(name, encoding, first->etag());
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->etag(), "2");
}

TEST_F(ClientTest, PutsAnEncodingOfAnySizeInChunks) {
  TensorName name;
  name.set_tensor("w");
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  for (int i = 0; i < 1'000'000; ++i) {
    encoding.add_scale(static_cast<float>(i + 1));
  }
  const absl::StatusOr<v1::StoredEncoding> first =
      client_->PutEncoding(name, encoding, "absent");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(first->has_encoding());
  EXPECT_LT(server_.encodings().largest_message_bytes(), size_t{1} << 20);
  EXPECT_GT(server_.encodings().largest_message_bytes(), size_t{1} << 18);
  // Also when the answer is lost.
  server_.faults().lost_answers = 1;
  const absl::StatusOr<v1::StoredEncoding> second =
      client_->PutEncoding(name, encoding, first->etag());
  ASSERT_TRUE(second.ok()) << second.status();
  const absl::StatusOr<v1::StoredEncoding> stored = client_->GetEncoding(name);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->etag(), second->etag());
  EXPECT_TRUE(std::equal(encoding.scale().begin(), encoding.scale().end(),
                         stored->encoding().scale().begin(),
                         stored->encoding().scale().end()));
  EXPECT_EQ(
      ErrorReason(client_->PutEncoding(name, encoding, "absent").status()),
      "ETAG_MISMATCH");
}

TEST_F(ClientTest, APutOfRealZeroPointsSucceedsWhenItsAnswerIsLost) {
  TensorName name;
  name.set_tensor("w");
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  encoding.add_real_zero_point(3.5f);
  server_.faults().lost_answers = 1;
  const absl::Status status =
      client_->PutEncoding(name, encoding, "absent").status();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(ClientTest, ScalesOutsideTheirTypeAreNotPutInChunks) {
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.set_scale_type(v1::SCALE_TYPE_FLOAT16);
  encoding.mutable_scale()->Resize(100'000, 0.1f);
  EXPECT_EQ(
      ErrorReason(client_->PutEncoding(TensorName(), encoding, "").status()),
      "ARGUMENT_INVALID");
}

TEST_F(ClientTest, APutThatAnotherCameBeforeIsRefusedAlsoAfterARetry) {
  TensorName name;
  name.set_tensor("w");
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  ASSERT_TRUE(client_->PutEncoding(name, encoding, "").ok());
  EXPECT_EQ(
      ErrorReason(client_->PutEncoding(name, encoding, "absent").status()),
      "ETAG_MISMATCH")
      << "the very same, but not after a retry";
  ClientOptions options = OptionsFor(server_.target());
  options.on_retry = [&](const Retry&) {
    encoding.set_scale(0, 0.125f);
    EXPECT_TRUE(client_->PutEncoding(name, encoding, "").ok());
  };
  const auto client = std::move(Client::Connect(options)).value();
  Encoding mine = encoding;
  mine.set_scale(0, 0.25f);
  server_.faults().lost_answers = 1;
  const absl::Status status = client->PutEncoding(name, mine, "1").status();
  EXPECT_EQ(ErrorReason(status), "ETAG_MISMATCH") << status;
  EXPECT_EQ(client_->GetEncoding(name)->encoding().scale(0), 0.125f);
}

TEST_F(ClientTest, ADeleteWhoseAnswerWasLostFindsNothingLeft) {
  TensorName name;
  name.set_tensor("w");
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  ASSERT_TRUE(client_->PutEncoding(name, encoding, "").ok());
  server_.faults().lost_answers = 1;
  const absl::Status status = client_->DeleteEncoding(name, "1");
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(ErrorReason(client_->GetEncoding(name).status()),
            "ENCODING_NOT_FOUND");
  EXPECT_EQ(ErrorReason(client_->DeleteEncoding(name, "1")),
            "ENCODING_NOT_FOUND")
      << "not after a retry";
  server_.faults().lost_answers = 1;
  EXPECT_TRUE(client_->DeleteStatistics(TensorName(), "").ok());
}

TEST_F(ClientTest, WhatADrainingServerRefusedWasNotDone) {
  TensorName name;
  name.set_tensor("w");
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.5f);
  server_.faults().draining_changes = 1;
  EXPECT_EQ(ErrorReason(client_->DeleteEncoding(name, "")),
            "ENCODING_NOT_FOUND");
  server_.faults().draining_changes = 1;
  EXPECT_EQ(ErrorReason(client_->DeleteStatistics(name, "")),
            "STATISTICS_NOT_FOUND");
  ASSERT_TRUE(client_->PutEncoding(name, encoding, "").ok());
  server_.faults().draining_changes = 1;
  EXPECT_EQ(
      ErrorReason(client_->PutEncoding(name, encoding, "absent").status()),
      "ETAG_MISMATCH")
      << "another's, if it is the same";
}

TEST_F(ClientTest, AsksForTheHealth) {
  EXPECT_EQ(client_->CheckHealth("").value(), Client::Health::kServing);
  server_.SetServing(false);
  EXPECT_EQ(client_->CheckHealth("").value(), Client::Health::kNotServing);
  EXPECT_EQ(client_->CheckHealth("no.such.Service").value(),
            Client::Health::kUnknown);
  server_.Stop();
  EXPECT_TRUE(IsServerUnreachable(client_->CheckHealth("").status()));
}

TEST(ClientOptionsTest, RefusesWhatCanNotWork) {
  ClientOptions options;
  options.chunk_bytes = 63;
  EXPECT_FALSE(Client::Connect(options).ok());
  options = ClientOptions();
  options.target.clear();
  EXPECT_FALSE(Client::Connect(options).ok());
  options = ClientOptions();
  options.timeout = absl::ZeroDuration();
  EXPECT_FALSE(Client::Connect(options).ok());
  options = ClientOptions();
  options.deadline = absl::ZeroDuration();
  EXPECT_FALSE(Client::Connect(options).ok());
  options = ClientOptions();
  options.part_bytes = options.chunk_bytes - 1;
  EXPECT_FALSE(Client::Connect(options).ok());
}

}  // namespace
}  // namespace quantd
