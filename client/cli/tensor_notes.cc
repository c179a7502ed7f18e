#include "client/cli/tensor_notes.h"

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/session.h"
#include "client/cpp/errors.h"
#include "client/files/safetensors.h"
#include "client/jobs/selection.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"
#include "client/models/text.h"

namespace quantd::cli {
namespace {

constexpr size_t kMostLines = 10;

}  // namespace

void PrintNotes(const std::vector<std::string>& notes, Session* session) {
  for (size_t i = 0; i < notes.size() && i < kMostLines; ++i) {
    session->PrintError(notes[i]);
  }
  if (notes.size() > kMostLines) {
    session->PrintError(absl::StrCat("quantctl: and ",
                                     CountText(notes.size() - kMostLines),
                                     " tensors more; --json has them all"));
  }
}

void PrintTensorErrors(const std::vector<TensorError>& errors,
                       Session* session) {
  for (size_t i = 0; i < errors.size() && i < kMostLines; ++i) {
    session->PrintError(absl::StrCat("quantctl: tensor ", errors[i].tensor,
                                     ": ", errors[i].status.message()));
  }
  if (errors.size() > kMostLines) {
    session->PrintError(
        absl::StrCat("quantctl: and ", CountText(errors.size() - kMostLines),
                     " tensors more failed; --json has them all"));
  }
}

void FailEarly(const absl::Status& status, Session* session) {
  if (ErrorReason(status) == "ARGUMENT_INVALID") {
    session->FailUsage(status);
  } else {
    session->Fail(status);
  }
}

void ReportUnread(const files::UnreadTensor& tensor, Session* session) {
  session->Note(kServerError);
  session->PrintError(absl::StrCat("quantctl: tensor ", tensor.name,
                                   ": left out: ", tensor.why));
}

void ReportUnread(const TensorInput& input, const jobs::TensorFilter& filter,
                  Session* session) {
  for (const files::UnreadTensor& tensor : input.unread()) {
    if (filter.TakesName(tensor.name)) ReportUnread(tensor, session);
  }
  const std::string codes = jobs::CastCodesText(input);
  if (!codes.empty()) session->PrintError(absl::StrCat("quantctl: ", codes));
}

absl::StatusOr<std::vector<const files::FileTensor*>> SelectMeasurable(
    const TensorInput& input, const jobs::TensorFilter& filter,
    const SpecSet* specs, Session* session) {
  std::vector<std::string> left_out;
  absl::StatusOr<std::vector<const files::FileTensor*>> taken =
      jobs::SelectMeasurable(input, filter, specs, &left_out);
  if (taken.ok() && !left_out.empty()) {
    session->PrintError(
        absl::StrCat("quantctl: left out, as they have no elements: ",
                     NamesText(std::move(left_out))));
  }
  return taken;
}

}  // namespace quantd::cli
