// Files of encodings on the command line.

#ifndef QUANTD_CLIENT_CLI_INTERCHANGE_H_
#define QUANTD_CLIENT_CLI_INTERCHANGE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cli/session.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "quantd/v1/encoding_service.pb.h"

namespace quantd::cli {

// "json", "aimet-2.1.0", "aimet-torch" and so on, and back; "auto" is
// INTERCHANGE_FORMAT_UNSPECIFIED.
std::string InterchangeFormatName(v1::InterchangeFormat format);
// Errors: ARGUMENT_INVALID.
absl::StatusOr<v1::InterchangeFormat> ParseInterchangeFormat(
    absl::string_view name);
std::vector<std::string> InterchangeFormatNames();

// Losses as JSON, and as lines on stderr.
Json LossesJson(const std::vector<v1::InterchangeLoss>& losses);
void PrintLosses(const std::vector<v1::InterchangeLoss>& losses,
                 const Session& session);
bool AnyLeftOut(const std::vector<v1::InterchangeLoss>& losses);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_INTERCHANGE_H_
