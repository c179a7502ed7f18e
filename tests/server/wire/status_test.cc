#include "server/wire/status.h"

#include <cstdint>
#include <map>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "core/errors.h"
#include "google/protobuf/unknown_field_set.h"
#include "gtest/gtest.h"

namespace quantd::server {
namespace {

using ::google::protobuf::UnknownField;
using ::google::protobuf::UnknownFieldSet;

// Calls `visit` with the fields of that number.
void ForEachField(const std::string& message, int number,
                  absl::FunctionRef<void(const UnknownField&)> visit) {
  UnknownFieldSet fields;
  EXPECT_TRUE(fields.ParseFromString(message));
  for (int i = 0; i < fields.field_count(); ++i) {
    if (fields.field(i).number() == number) visit(fields.field(i));
  }
}

// The last field of that number, "" or 0 if there is none.
std::string StringField(const std::string& message, int number) {
  std::string value;
  ForEachField(message, number, [&](const UnknownField& field) {
    EXPECT_EQ(field.type(), UnknownField::TYPE_LENGTH_DELIMITED);
    value = field.length_delimited();
  });
  return value;
}

uint64_t VarintField(const std::string& message, int number) {
  uint64_t value = 0;
  ForEachField(message, number, [&](const UnknownField& field) {
    EXPECT_EQ(field.type(), UnknownField::TYPE_VARINT);
    value = field.varint();
  });
  return value;
}

// A google.rpc.Status {1: code, 2: message, 3: repeated Any}.
struct RpcStatus {
  uint64_t code = 0;
  std::string message;
  // Any {1: type_url, 2: value}, by the last part of the type.
  std::map<std::string, std::string> details;
};

RpcStatus Decode(const std::string& bytes) {
  RpcStatus status;
  status.code = VarintField(bytes, 1);
  status.message = StringField(bytes, 2);
  ForEachField(bytes, 3, [&](const UnknownField& field) {
    const std::string& any = field.length_delimited();
    const std::string type = StringField(any, 1);
    const std::string prefix = "type.googleapis.com/google.rpc.";
    EXPECT_TRUE(absl::StartsWith(type, prefix)) << type;
    status.details[type.substr(prefix.size())] = StringField(any, 2);
  });
  return status;
}

TEST(ToGrpcStatusTest, OkIsOk) {
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
}

TEST(ToGrpcStatusTest, CarriesReasonAndDomain) {
  const absl::Status error = core::ChunkOffsetError(2048, 4096);
  const grpc::Status status = ToGrpcStatus(error);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), error.message());
  const RpcStatus details = Decode(status.error_details());
  EXPECT_EQ(details.code, 3u);
  EXPECT_EQ(details.message, error.message());
  ASSERT_EQ(details.details.size(), 1u);
  const std::string info = details.details.at("ErrorInfo");
  EXPECT_EQ(StringField(info, 1), "CHUNK_OFFSET");
  EXPECT_EQ(StringField(info, 2), "quantd");
}

TEST(ToGrpcStatusTest, CarriesTheFieldAtFault) {
  const absl::Status error = core::WithField(
      core::WithField(core::ShapeInvalidError("dimension 0 is -1"), "shape"),
      "header.tensor");
  const RpcStatus details = Decode(ToGrpcStatus(error).error_details());
  const std::string bad = details.details.at("BadRequest");
  const std::string violation = StringField(bad, 1);
  EXPECT_EQ(StringField(violation, 1), "header.tensor.shape");
  EXPECT_EQ(StringField(violation, 2), "dimension 0 is -1");
  EXPECT_EQ(details.details.count("RetryInfo"), 0u);
}

TEST(ToGrpcStatusTest, CarriesTheRetryDelay) {
  const absl::Status error =
      core::MemoryBudgetError(1 << 20, "wait", absl::Milliseconds(2250));
  const grpc::Status status = ToGrpcStatus(error);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  const RpcStatus details = Decode(status.error_details());
  const std::string retry = details.details.at("RetryInfo");
  // Duration {1: seconds, 2: nanos}.
  const std::string delay = StringField(retry, 1);
  EXPECT_EQ(VarintField(delay, 1), 2u);
  EXPECT_EQ(VarintField(delay, 2), 250000000u);
}

TEST(ToGrpcStatusTest, NoDelayIsNoRetryInfo) {
  const absl::Status error =
      core::MemoryBudgetError(1 << 20, "wait", absl::ZeroDuration());
  const RpcStatus details = Decode(ToGrpcStatus(error).error_details());
  EXPECT_EQ(details.details.count("RetryInfo"), 0u);
}

TEST(ToGrpcStatusTest, WhatIsNotFromTheCatalogueIsInternal) {
  const grpc::Status status = ToGrpcStatus(absl::NotFoundError("some thing"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(status.error_message(), "INTERNAL: some thing");
  const RpcStatus details = Decode(status.error_details());
  EXPECT_EQ(details.code, 13u);
  EXPECT_EQ(StringField(details.details.at("ErrorInfo"), 1), "INTERNAL");
}

TEST(ToGrpcStatusTest, KeepsWhatIsForTheLogToItself) {
  const absl::Status error = core::StoreUnavailableError(
      "cannot put an encoding", "password of user \"q\" at db1");
  const grpc::Status status = ToGrpcStatus(error);
  EXPECT_EQ(status.error_message(),
            "STORE_UNAVAILABLE: cannot put an encoding");
  EXPECT_EQ(status.error_details().find("db1"), std::string::npos);
  EXPECT_EQ(ToTensorError(error).SerializeAsString().find("db1"),
            std::string::npos);
}

// Trailers have room for 8 KiB on the client's side, percent-encoding and
// base64 included: a longer status is no status at all.
TEST(ToGrpcStatusTest, WhatTheClientSentDoesNotOverflowTheTrailers) {
  std::string long_etag;
  while (long_etag.size() < 100000) long_etag += "\xe6\xbc\xa2";
  const absl::Status error = core::WithField(
      core::EtagMismatchError(long_etag, "e1"), "header.reference.etag");
  const grpc::Status status = ToGrpcStatus(error);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_LT(
      status.error_message().size() * 3 + status.error_details().size() * 4 / 3,
      7000u);
  EXPECT_TRUE(absl::StartsWith(status.error_message(),
                               "ETAG_MISMATCH: the encoding has etag \"e1\""));
  // What is left of the message is still UTF-8: TensorError has to take it.
  const v1::TensorError tensor_error = ToTensorError(error);
  v1::TensorError parsed;
  EXPECT_TRUE(parsed.ParseFromString(tensor_error.SerializeAsString()));
  EXPECT_EQ(parsed.reason(), "ETAG_MISMATCH");
  EXPECT_EQ(parsed.field(), "header.reference.etag");
  EXPECT_LT(parsed.message().size(), 2000u);
}

TEST(ToTensorErrorTest, CarriesEverything) {
  const v1::TensorError error = ToTensorError(core::WithField(
      core::MemoryBudgetError(64, "wait", absl::Seconds(1)), "header.spec"));
  EXPECT_EQ(error.code(), 8);
  EXPECT_EQ(error.reason(), "MEMORY_BUDGET");
  EXPECT_EQ(error.message(), "the memory budget of 64 bytes is used up; wait");
  EXPECT_EQ(error.field(), "header.spec");
  EXPECT_EQ(error.retry_after_ms(), 1000u);
}

TEST(ToTensorErrorTest, WhatIsNotFromTheCatalogueIsInternal) {
  const v1::TensorError error = ToTensorError(absl::UnknownError("oops"));
  EXPECT_EQ(error.code(), 13);
  EXPECT_EQ(error.reason(), "INTERNAL");
  EXPECT_EQ(error.message(), "oops");
}

}  // namespace
}  // namespace quantd::server
