// Options that say which tensors share a scale.

#ifndef QUANTD_CLIENT_CLI_TIE_OPTIONS_H_
#define QUANTD_CLIENT_CLI_TIE_OPTIONS_H_

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/cli/session.h"
#include "client/cpp/client.h"
#include "client/cpp/tensor.h"
#include "client/jobs/file_ties.h"
#include "client/jobs/revision_name.h"
#include "client/models/tie_groups.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "quantd/v1/encoding_service.pb.h"

namespace quantd::cli {

// Adds --tie and --no-ties.
// `what`  begins the help of --tie: which tensors share what.
void AddTieOptions(Command* command, absl::string_view what,
                   jobs::TieFlags* flags);

// Adds the groups among the tensors of a revision that have statistics to the
// ties of a request, and returns them; see FindNamedTies. Asks for the names
// only where `specs`, all that `spec_of` may return, make it matter. Who may
// not list names gets no groups by the defaults.
// Errors: ARGUMENT_INVALID, those of the client.
absl::StatusOr<std::vector<NamedTies>> AddStoredTies(
    const jobs::TieFlags& flags, const std::vector<EncodingSpec>& specs,
    const jobs::RevisionName& name, Client* client,
    absl::FunctionRef<const EncodingSpec*(const std::string& name)> spec_of,
    google::protobuf::RepeatedPtrField<v1::TiedTensors>* ties);

// Says which groups there are.
void PrintTies(const std::vector<NamedTies>& ties, const Session& session);
Json TiesJson(const std::vector<NamedTies>& ties);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_TIE_OPTIONS_H_
