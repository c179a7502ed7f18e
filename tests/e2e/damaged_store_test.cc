// Rows that are damaged under a server: lists tell of them in their place, the
// others are there, and the server lives.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "grpcpp/grpcpp.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "tests/support/paths.h"
#include "tests/support/server_process.h"
#include "tests/support/sqlite_file.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/tensor_streams.h"

namespace quantd::testing::damaged_store_test {
namespace {

constexpr char kModel[] = "net";

class DamagedStoreTest : public ::testing::Test {
 protected:
  DamagedStoreTest() {
    for (const char* tensor : {"a", "b", "c"}) Put(tensor);
  }

  void Put(const std::string& tensor, int scale_count = 1) {
    v1::PutEncodingRequest request;
    request.mutable_name()->set_model(kModel);
    request.mutable_name()->set_tensor(tensor);
    v1::Encoding& encoding = *request.mutable_encoding();
    encoding.set_format(v1::NUMBER_FORMAT_INT8);
    if (scale_count > 1) encoding.add_block_size(1);
    for (int i = 0; i < scale_count; ++i) encoding.add_scale(0.5f);
    encoding.set_qmin(-127);
    encoding.set_qmax(127);
    grpc::ClientContext context;
    v1::PutEncodingResponse response;
    const grpc::Status status =
        encodings_->PutEncoding(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }

  void Contribute(const std::string& model, const std::string& tensor) {
    v1::CalibrateHeader header;
    header.mutable_tensor()->mutable_name()->set_model(model);
    header.mutable_tensor()->mutable_name()->set_tensor(tensor);
    header.mutable_tensor()->set_element_type(v1::ELEMENT_TYPE_FLOAT32);
    header.mutable_tensor()->add_shape(2);
    header.mutable_contribution()->set_source("rank-0");
    header.mutable_contribution()->set_sequence(1);
    const auto stub = v1::QuantizationService::NewStub(server_.NewChannel());
    const auto summary = Calibrate(*stub, header, ToBytes<float>({1, 2}));
    ASSERT_TRUE(summary.ok()) << summary.status();
  }

  // Page by page.
  std::vector<v1::StoredEncoding> List(int page_size) {
    std::vector<v1::StoredEncoding> all;
    v1::ListEncodingsRequest request;
    request.set_model(kModel);
    request.set_page_size(page_size);
    for (int page = 0; page < 10; ++page) {
      grpc::ClientContext context;
      v1::ListEncodingsResponse response;
      const grpc::Status status =
          encodings_->ListEncodings(&context, request, &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
      all.insert(all.end(), response.encodings().begin(),
                 response.encodings().end());
      if (response.next_page_token().empty()) break;
      request.set_page_token(response.next_page_token());
    }
    return all;
  }

  // What --check-store prints; its exit code to `code`.
  std::string CheckStore(int* code) const {
    const std::string command =
        absl::StrCat(QuantdBinary(), " --check-store --store sqlite:", store_);
    std::FILE* const pipe = popen(command.c_str(), "r");
    std::string text;
    std::array<char, 4096> buffer;
    size_t size;
    while ((size = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0) {
      text.append(buffer.data(), size);
    }
    const int status = pclose(pipe);
    *code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return text;
  }

  const TemporaryDirectory directory_;
  const std::string store_ = directory_.File("store.db");
  ServerProcess server_{QuantdBinary(), store_, {"--drain-delay", "0s"}};
  std::unique_ptr<v1::EncodingService::Stub> encodings_ =
      v1::EncodingService::NewStub(server_.NewChannel());
};

TEST_F(DamagedStoreTest, ListsTellADamagedRowInItsPlace) {
  int code = -1;
  EXPECT_EQ(CheckStore(&code),
            "3 encodings and 0 statistics, 0 places damaged\n");
  EXPECT_EQ(code, 0);
  for (const char* change : {
           // Beyond the years that a Timestamp has.
           "update_time_us = 9223372036854775807",
           "update_time_us = -9223372036854775807",
           "format = 77",
           "scale_count = -1",
           // Still the second, but no name.
           "tensor = CAST(x'62ff' AS TEXT)",
           "tensor = CAST(x'6201' AS TEXT)",
       }) {
    ExecuteSql(store_, absl::StrCat("UPDATE encodings SET ", change,
                                    " WHERE tensor = 'b'"));
    for (const int page_size : {1, 2, 100}) {
      const std::vector<v1::StoredEncoding> list = List(page_size);
      ASSERT_EQ(list.size(), 3u) << change << ", pages of " << page_size;
      EXPECT_FALSE(list[0].has_error());
      EXPECT_EQ(list[0].name().tensor(), "a");
      EXPECT_EQ(list[1].error().reason(), "STORE_CORRUPT") << change;
      EXPECT_TRUE(absl::StartsWith(list[1].name().tensor(), "b"));
      EXPECT_FALSE(list[1].has_update_time());
      EXPECT_FALSE(list[2].has_error());
      EXPECT_EQ(list[2].name().tensor(), "c");
    }
    const std::string text = CheckStore(&code);
    EXPECT_EQ(code, 1) << change;
    EXPECT_TRUE(absl::StrContains(text, "damaged: ")) << text;
    EXPECT_TRUE(absl::StrContains(text, "for tensor \"b")) << text;
    ExecuteSql(store_,
               "DELETE FROM encodings WHERE tensor > 'a' AND tensor < 'c'");
    Put("b");
  }
  EXPECT_EQ(server_.Terminate(), 0);
}

TEST_F(DamagedStoreTest, AStoreWithADamagedPageIsServed) {
  // More would lie in pieces.
  Put("b", 4000);
  EXPECT_EQ(server_.Terminate(), 0);
  ExecuteSql(store_, "PRAGMA journal_mode = DELETE; VACUUM");
  {
    // A page in the middle of the scales.
    std::fstream file(store_, std::ios::in | std::ios::out | std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    const absl::string_view scale("\0\0\0\x3f", 4);
    std::string run;
    for (int i = 0; i < 1000; ++i) absl::StrAppend(&run, scale);
    const size_t found = bytes.find(run);
    ASSERT_NE(found, std::string::npos);
    const size_t page = found / 4096 * 4096;
    file.seekp(static_cast<std::streamoff>(page));
    file << std::string(4096, '\xff');
  }
  ServerProcess server(QuantdBinary(), store_, {"--drain-delay", "0s"});
  encodings_ = v1::EncodingService::NewStub(server.NewChannel());
  EXPECT_EQ(List(100).size(), 3u);
  for (const char* tensor : {"a", "b", "c"}) {
    grpc::ClientContext context;
    v1::GetEncodingRequest request;
    request.mutable_name()->set_model(kModel);
    request.mutable_name()->set_tensor(tensor);
    v1::GetEncodingResponse got;
    const grpc::Status status =
        encodings_->GetEncoding(&context, request, &got);
    EXPECT_EQ(status.ok(), tensor[0] != 'b') << tensor;
  }
  int code = -1;
  const std::string text = CheckStore(&code);
  EXPECT_EQ(code, 1);
  EXPECT_TRUE(absl::StrContains(text, "for tensor \"b\"")) << text;
  EXPECT_TRUE(absl::StrContains(text, "3 encodings")) << text;
  EXPECT_EQ(server.Terminate(), 0);
}

TEST_F(DamagedStoreTest, ListsOfStatisticsTellADamagedRowInItsPlace) {
  for (const char* tensor : {"x", "y"}) Contribute(kModel, tensor);
  ExecuteSql(store_,
             "UPDATE statistics SET update_time_us = 9223372036854775807 "
             "WHERE tensor = 'x'");
  grpc::ClientContext context;
  v1::ListStatisticsRequest request;
  request.set_model(kModel);
  v1::ListStatisticsResponse response;
  const grpc::Status status =
      encodings_->ListStatistics(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.entries_size(), 2);
  EXPECT_EQ(response.entries(0).error().reason(), "STORE_CORRUPT");
  EXPECT_TRUE(
      absl::StrContains(response.entries(0).error().message(), "\"rank-0\""));
  EXPECT_FALSE(response.entries(1).has_error());
  EXPECT_EQ(response.entries(1).source_count(), 1u);
  EXPECT_EQ(server_.Terminate(), 0);
}

TEST_F(DamagedStoreTest, ModelsThatHaveOnlyStatisticsAreListed) {
  Contribute("activations", "x");
  ExecuteSql(store_,
             "UPDATE row_sets SET model = CAST(x'6eff' AS TEXT) "
             "WHERE model = 'net'");
  grpc::ClientContext context;
  v1::ListModelsResponse response;
  const grpc::Status status =
      encodings_->ListModels(&context, v1::ListModelsRequest(), &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.models_size(), 2);
  EXPECT_EQ(response.models(0).model(), "activations");
  EXPECT_EQ(response.models(0).revision_count(), 1u);
  EXPECT_EQ(response.models(0).encoding_count(), 0u);
  EXPECT_EQ(response.models(0).statistics_count(), 1u);
  EXPECT_EQ(response.models(1).model(), "n\\xff");
  EXPECT_EQ(response.models(1).error().reason(), "STORE_CORRUPT");
  EXPECT_EQ(server_.Terminate(), 0);
}

}  // namespace
}  // namespace quantd::testing::damaged_store_test
