#include "server/rpc/unexpected.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "server/quantd_server.h"
#include "server/store/encoding_store.h"
#include "tests/support/tensor_streams.h"
#include "tests/support/test_server.h"

namespace quantd::server {
namespace {

using ::testing::HasSubstr;

TEST(GuardedTest, AnswersWhatTheBodyAnswers) {
  EXPECT_TRUE(Guarded("Quantize", [] { return absl::OkStatus(); }).ok());
  EXPECT_EQ(Guarded("Quantize", [] { return core::DrainingError(); }),
            core::DrainingError());
}

TEST(GuardedTest, GivesEveryThrowAnIdOfItsOwn) {
  const auto thrower = []() -> absl::Status {
    throw std::runtime_error("secret");
  };
  const absl::Status one = Guarded("Quantize", thrower);
  EXPECT_EQ(core::ErrorReason(one), "INTERNAL");
  EXPECT_TRUE(absl::IsInternal(one));
  EXPECT_THAT(std::string(one.message()), HasSubstr("request id"));
  EXPECT_EQ(one.message().find("secret"), absl::string_view::npos);
  EXPECT_NE(one, Guarded("Quantize", thrower));
  EXPECT_EQ(
      core::ErrorReason(Guarded("Quantize", []() -> absl::Status { throw 7; })),
      "INTERNAL");
}

class ThrowingStore : public EncodingStore {
 public:
  absl::StatusOr<StoredEncoding> Read(
      const EncodingKey&, absl::FunctionRef<absl::Status(int64_t)>) override {
    Throw();
  }
  absl::StatusOr<StoredEncoding> Put(const EncodingKey&,
                                     std::shared_ptr<const core::Encoding>,
                                     const Precondition&) override {
    Throw();
  }
  absl::Status Delete(const EncodingKey&, const Precondition&) override {
    Throw();
  }
  absl::StatusOr<std::unique_ptr<EncodingReader>> OpenReader(
      const EncodingKey& key) override {
    Throw();
  }
  absl::StatusOr<std::unique_ptr<EncodingWriter>> OpenWriter(
      const EncodingKey& key, std::shared_ptr<const core::Encoding> outline,
      bool has_zero_points, const Precondition& precondition) override {
    Throw();
  }
  absl::StatusOr<PublishedRevision> PublishRevision(absl::string_view model,
                                                    absl::string_view source,
                                                    absl::string_view target,
                                                    bool keep_others) override {
    Throw();
  }
  absl::StatusOr<DeletedRows> DeleteRevision(
      absl::string_view model, absl::string_view revision) override {
    Throw();
  }
  absl::StatusOr<DeletedRows> DeleteModel(absl::string_view model) override {
    Throw();
  }
  absl::StatusOr<std::vector<EncodingListEntry>> ListEncodings(
      absl::string_view, absl::string_view, absl::string_view, int) override {
    Throw();
  }
  absl::StatusOr<std::vector<ModelListEntry>> ListModels(const NameRange&,
                                                         int) override {
    Throw();
  }
  absl::StatusOr<std::vector<RevisionListEntry>> ListRevisions(
      absl::string_view, absl::string_view, int) override {
    Throw();
  }
  absl::Status Ping() override { return absl::OkStatus(); }

 private:
  [[noreturn]] static void Throw() { throw std::runtime_error("the store"); }
};

TEST(UnexpectedTest, WhatAHandlerThrowsEndsItsCallAndNotTheServer) {
  ThrowingStore store;
  testing::TestServer server(ServerOptions(), &store, /*statistics=*/nullptr);
  for (int round = 0; round < 3; ++round) {
    // A unary call.
    {
      grpc::ClientContext context;
      v1::ListModelsResponse response;
      const grpc::Status status = server.encodings().ListModels(
          &context, v1::ListModelsRequest(), &response);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
      EXPECT_THAT(status.error_message(), HasSubstr("INTERNAL: "));
      EXPECT_THAT(status.error_message(), HasSubstr("request id"));
    }
    // One that answers message by message.
    {
      grpc::ClientContext context;
      v1::ExportEncodingsRequest request;
      request.set_model("m");
      request.set_format(v1::INTERCHANGE_FORMAT_JSON);
      v1::ExportEncodingsResponse response;
      const auto reader = server.encodings().ExportEncodings(&context, request);
      EXPECT_FALSE(reader->Read(&response));
      EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::INTERNAL);
    }
    // A stream of tensors.
    v1::QuantizeHeader header;
    header.mutable_tensor()->mutable_name()->set_model("m");
    header.mutable_tensor()->mutable_name()->set_tensor("t");
    header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    header.mutable_tensor()->add_shape(4);
    header.mutable_reference();
    const absl::Status status =
        testing::Quantize(server.quantization(), header, std::string(16, '\0'))
            .status();
    EXPECT_TRUE(absl::IsInternal(status)) << status;
  }
}

}  // namespace
}  // namespace quantd::server
