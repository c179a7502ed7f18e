#include "client/jobs/quantize_model.h"

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client_options.h"
#include "client/files/dtype.h"
#include "client/files/gguf.h"
#include "client/files/safetensors.h"
#include "client/jobs/job_events.h"
#include "client/jobs/quantize_options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/onnx_bytes.h"
#include "tests/support/temporary_directory.h"

namespace quantd::jobs {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Result = ModelTensor::Result;

// A file with a weight of whole blocks and a bias, and nobody at the address of
// the server: blocks of GGUF are made without it.
class QuantizeModelTest : public ::testing::Test {
 protected:
  QuantizeModelTest() {
    options_.input = directory_.File("m.safetensors");
    auto writer = files::SafetensorsWriter::Create(options_.input,
                                                   files::IfExists::kRefuse);
    const std::vector<uint8_t> zeros(4 * 256 * sizeof(float));
    EXPECT_TRUE(
        writer->Add("a.weight", files::Dtype::kF32, {4, 256}, zeros).ok());
    EXPECT_TRUE(writer
                    ->Add("a.bias", files::Dtype::kF32, {4},
                          absl::MakeConstSpan(zeros).first(4 * sizeof(float)))
                    .ok());
    EXPECT_TRUE(writer->Finish().ok());
    options_.output.path = directory_.File("m.gguf");
    options_.spec.specs = {"q4_K"};
    client_.target = "unix:" + directory_.File("nobody");
    client_.retry_for = absl::ZeroDuration();
    events_.on_note = [this](absl::string_view text) {
      notes_.emplace_back(text);
    };
    events_.on_progress = [this](uint64_t done, uint64_t total,
                                 absl::string_view tensor) {
      progress_.emplace_back(tensor, done);
      EXPECT_EQ(total, 4 * 256 * sizeof(float));
    };
  }

  absl::StatusOr<QuantizedModel> Run(int streams = 2) {
    return QuantizeModel(options_, client_, events_, streams);
  }
  std::string Error(int streams = 2) {
    return Run(streams).status().ToString();
  }

  const testing::TemporaryDirectory directory_;
  QuantizeOptions options_;
  ClientOptions client_;
  JobEvents events_;
  std::vector<std::string> notes_;
  std::vector<std::pair<std::string, uint64_t>> progress_;
};

TEST_F(QuantizeModelTest, WritesTheFileAndTellsOfEveryTensor) {
  const absl::StatusOr<QuantizedModel> model = Run();
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_EQ(model->tensors.size(), 2U);
  const ModelTensor& weight = model->tensors[0];
  EXPECT_EQ(weight.name, "a.weight");
  EXPECT_THAT(weight.shape, ElementsAre(4, 256));
  EXPECT_EQ(weight.dtype, "F32");
  EXPECT_EQ(weight.result, Result::kQuantized);
  EXPECT_EQ(weight.format, "q4_K");
  EXPECT_EQ(weight.bytes_before, 4096U);
  EXPECT_EQ(weight.bytes_after, 4 * 144U);
  EXPECT_EQ(model->tensors[1].result, Result::kCopied);
  EXPECT_EQ(model->tensors[1].format, "");
  EXPECT_EQ(model->file_bytes,
            std::filesystem::file_size(options_.output.path));
  const auto written = files::GgufReader::Open(options_.output.path);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(written->tensors().size(), 2U);
  EXPECT_THAT(progress_,
              ElementsAre(std::make_pair(std::string(), 0U),
                          std::make_pair(std::string("a.weight"), 4096U)));
  EXPECT_THAT(notes_, ElementsAre(HasSubstr("gets no metadata of a model")));
}

TEST_F(QuantizeModelTest, WhatIsWrongIsSaidBeforeAnythingIsWritten) {
  const QuantizeOptions good = options_;
  const auto expect = [&](absl::string_view text, int streams = 2) {
    EXPECT_THAT(Error(streams), HasSubstr(std::string(text)));
    EXPECT_FALSE(std::filesystem::exists(good.output.path)) << text;
    options_ = good;
  };
  options_.layout = "tar";
  expect("one of quantd, compressed-tensors, pack-quantized as the layout");
  options_.nan_policy = "keep";
  expect("reject as the NaN policy, got \"keep\"");
  options_.rounding.method = "up";
  expect("as the rounding");
  options_.rounding.column_order = "up";
  expect("as the column order");
  options_.scheme = "W3A3";
  expect("expected a scheme of vLLM, such as W4A16, got \"W3A3\"");
  options_.output.path = "";
  expect("expected an output, got none");
  options_.spec.specs = {"int99"};
  expect("ARGUMENT_INVALID");
  options_.spec.specs = {"@none"};
  expect("FILE_UNREADABLE");
  options_.part = "2/2";
  expect("ARGUMENT_INVALID");
  options_.input = directory_.File("none.safetensors");
  expect("FILE_UNREADABLE");
  options_.output.path = directory_.File("m2.safetensors");
  options_.spec.specs = {"int8"};
  expect("expected 1 to 64 streams, got 0", 0);
  options_.output.path = directory_.File("m2.safetensors");
  options_.spec.specs = {"int8"};
  expect("SERVER_UNREACHABLE");
  EXPECT_FALSE(std::filesystem::exists(directory_.File("m2.safetensors")));
}

TEST_F(QuantizeModelTest, ItIsAnErrorIfNothingIsQuantized) {
  options_.filter.include = {"a.bias"};
  options_.filter.all = true;
  EXPECT_THAT(Error(), HasSubstr("nothing is quantized"));
  EXPECT_TRUE(std::filesystem::exists(options_.output.path));
}

TEST_F(QuantizeModelTest, TensorsThatAreNotReadAreTold) {
  options_.input = directory_.Write(
      "m.onnx",
      testing::OnnxModelOf(absl::StrCat(
          testing::OnnxInitializer("text", 8, {1}, testing::BytesField(6, "x")),
          testing::OnnxInitializer(
              "w", 1, {4, 256},
              testing::BytesField(9, std::string(4096, '\0'))))));
  std::vector<std::string> unread;
  events_.on_unread = [&](const files::UnreadTensor& tensor) {
    unread.push_back(tensor.name);
  };
  EXPECT_THAT(Error(), HasSubstr("1 tensors are not read"));
  EXPECT_THAT(unread, ElementsAre("text"));
}

TEST_F(QuantizeModelTest, NotesTellOfWhatWasAskedForAndDidNotHappen) {
  options_.filter.all = true;
  options_.spec.specs = {"q4_K", "a.bias=q4_K"};
  const absl::StatusOr<QuantizedModel> model = Run();
  ASSERT_TRUE(model.ok()) << model.status();
  ASSERT_EQ(model->notes.size(), 2U);
  for (const QuantizeNote& note : model->notes) {
    EXPECT_EQ(note.kind, QuantizeNote::Kind::kFailure);
  }
  EXPECT_THAT(model->notes[0].lines, ElementsAre(HasSubstr("tensor a.bias: ")));
  EXPECT_THAT(model->notes[1].lines,
              ElementsAre("1 tensors that were asked for are copied"));
}

TEST_F(QuantizeModelTest, ACallerMayStopIt) {
  events_.is_stopped = [] { return true; };
  EXPECT_THAT(Error(), HasSubstr("CANCELLED"));
  EXPECT_FALSE(std::filesystem::exists(options_.output.path));
}

}  // namespace
}  // namespace quantd::jobs
