// The report of `quantctl quantize` on a run: a table or JSON, and notes.

#ifndef QUANTD_CLIENT_CLI_QUANTIZE_REPORT_H_
#define QUANTD_CLIENT_CLI_QUANTIZE_REPORT_H_

#include <string>

#include "absl/status/status.h"
#include "client/cli/session.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_plan.h"
#include "client/jobs/quantize_server.h"

namespace quantd::cli {

// Reports a run that came to its end; tensors may have failed. `server` is null
// where none was called.
void ReportRun(const jobs::QuantizeOptions& options,
               const jobs::QuantizePlan& plan,
               const jobs::QuantizeServer* server, Session* session);

// Reports a run that an error ended.
void ReportError(const absl::Status& error,
                 const jobs::QuantizeOptions& options,
                 const jobs::QuantizePlan& plan,
                 const jobs::QuantizeServer* server, Session* session);

// Reports an error that ended a run before it wrote anything.
void ReportRefused(const absl::Status& error,
                   const jobs::QuantizeOptions& options, Session* session);

// Says what there is of an output that is not complete, or not published. One
// line, also where there is nothing.
std::string UnfinishedText(const jobs::QuantizeOptions& options,
                           const jobs::QuantizePlan& plan,
                           const jobs::QuantizeServer* server);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_QUANTIZE_REPORT_H_
