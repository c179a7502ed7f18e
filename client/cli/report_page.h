// The page of a report without its data; see its head.

#ifndef QUANTD_CLIENT_CLI_REPORT_PAGE_H_
#define QUANTD_CLIENT_CLI_REPORT_PAGE_H_

namespace quantd::cli {

// client/python/src/quantd/report.html.
extern const char kReportPage[];

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_REPORT_PAGE_H_
