// Stored moments of inputs as an importance matrix of llama.cpp.

#ifndef QUANTD_CLIENT_CLI_IMATRIX_EXPORT_H_
#define QUANTD_CLIENT_CLI_IMATRIX_EXPORT_H_

#include <string>
#include <vector>

#include "client/cli/session.h"
#include "client/jobs/output.h"
#include "client/jobs/revision_name.h"

namespace quantd::cli {

// The format's name for --format.
constexpr char kImatrix[] = "imatrix";

// Writes imatrix.gguf: an entry for each weight whose inputs have moments along
// their last dimension, under llama.cpp's name if there is one. Says which
// inputs are left out.
// `include`     patterns of stored tensors; empty for all.
// `inputs_map`  file of --inputs-map, or empty.
void ExportImatrix(const jobs::RevisionName& name,
                   const std::vector<std::string>& include,
                   const std::string& inputs_map,
                   const jobs::OutputOptions& output, Session* session);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_IMATRIX_EXPORT_H_
