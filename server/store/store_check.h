// Reading all of a store for what is damaged.

#ifndef QUANTD_SERVER_STORE_STORE_CHECK_H_
#define QUANTD_SERVER_STORE_STORE_CHECK_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/store/sql_database.h"

namespace quantd::server {

// How much was read, and how many places were told.
struct StoreCheck {
  int64_t encodings = 0;
  // One per tensor and source.
  int64_t statistics = 0;
  int64_t damaged = 0;
};

// Reads every row whole, compares the counts of rows with the rows, and has the
// database look after its own file where it can. Others may go on using the
// store.
// `tell`  takes a line, without its end, for each place that is damaged.
// Errors: STORE_UNAVAILABLE.
absl::StatusOr<StoreCheck> CheckStore(
    std::shared_ptr<SqlDatabase> database,
    absl::FunctionRef<void(absl::string_view line)> tell);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_STORE_CHECK_H_
