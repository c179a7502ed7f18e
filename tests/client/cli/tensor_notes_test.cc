#include "client/cli/tensor_notes.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/cli/session.h"
#include "client/cpp/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace quantd::cli {
namespace {

using ::testing::HasSubstr;

TEST(TensorNotesTest, PrintsTenErrorsAndHowManyMore) {
  Session session;
  std::vector<TensorError> errors;
  std::vector<std::string> notes;
  for (int i = 0; i < 12; ++i) {
    errors.push_back({absl::StrCat("t", i), absl::InternalError("X: y")});
    notes.push_back(absl::StrCat("note ", i));
  }
  ::testing::internal::CaptureStderr();
  PrintTensorErrors(errors, &session);
  std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("quantctl: tensor t9: X: y\n"
                              "quantctl: and 2 tensors more failed"));
  ::testing::internal::CaptureStderr();
  PrintNotes(notes, &session);
  text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("note 9\nquantctl: and 2 tensors more;"));
  errors.resize(10);
  ::testing::internal::CaptureStderr();
  PrintTensorErrors(errors, &session);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::Not(HasSubstr("more")));
}

TEST(TensorNotesTest, AnErrorOfTheCommandLineIsOneOfUsage) {
  Session session;
  ::testing::internal::CaptureStderr();
  FailEarly(ArgumentInvalidError("x"), &session);
  EXPECT_EQ(session.exit_code, kUsageError);
  Session other;
  FailEarly(absl::NotFoundError("ENCODING_NOT_FOUND: x"), &other);
  EXPECT_EQ(other.exit_code, kServerError);
  ::testing::internal::GetCapturedStderr();
}

}  // namespace
}  // namespace quantd::cli
