// Limits on what a client may ask for.

#ifndef QUANTD_SERVER_GUARD_LIMITS_H_
#define QUANTD_SERVER_GUARD_LIMITS_H_

#include <cstdint>

#include "absl/time/time.h"

namespace quantd::server {

// Every limit is a flag; see config.cc.
struct Limits {
  // One gRPC message, headers with inline encodings among them.
  int64_t message_bytes = int64_t{32} << 20;
  // `data` of one message.
  int64_t chunk_bytes = int64_t{4} << 20;
  // One whole tensor.
  int64_t tensor_bytes = int64_t{1} << 40;
  // Dimensions of a tensor.
  int64_t tensor_rank = 16;
  // Candidates of one Evaluate times the scale indices that it answers; at
  // about 100 bytes each, an answer stays below gRPC's 4 MiB.
  int64_t metrics_count = int64_t{1} << 14;
  // The stored statistics of one source of one tensor.
  int64_t statistics_bytes = int64_t{64} << 20;
  // Features that a new Gram matrix sees together; a multiple of
  // core::GramState::kPartUnit.
  int64_t gram_features = 8192;
  // Everything that requests make the server hold.
  int64_t memory_budget_bytes = int64_t{1} << 30;
  // How long a tensor waits for room in the memory budget.
  absl::Duration memory_wait = absl::Milliseconds(200);
  // Between two signs that a tensor is worked on, for clients that ask for
  // them.
  absl::Duration progress_interval = absl::Seconds(10);
  // `data` of one response message.
  int64_t response_chunk_bytes = int64_t{1} << 20;
  // Tensors that are open at once.
  int64_t tensor_count = 4096;
  // How long the tensors of a burst wait for others; see admission.h.
  absl::Duration queue_delay = absl::Milliseconds(100);
  // Clients that hold shared memory, and regions of each.
  int64_t shared_connections = 256;
  int64_t shared_regions = 64;
  // A stream that makes no progress for this long is ended.
  absl::Duration idle_timeout = absl::Seconds(30);
  // A stream this old is ended between two tensors; at twice the age, at once.
  absl::Duration stream_age = absl::Hours(1);
  // Connections at once, and those of one address.
  int64_t connections = 4096;
  int64_t address_connections = 2048;
  // Calls that are open at once, streams among them.
  int64_t calls = int64_t{16} << 10;
  // Streams and calls of one connection at once.
  int64_t connection_streams = 256;
  // A connection without any call for this long is closed.
  absl::Duration connection_idle = absl::Minutes(15);
  // A connection this old takes no new calls; infinite for any age.
  absl::Duration connection_age = absl::InfiniteDuration();
  // All headers of one call.
  int64_t metadata_bytes = int64_t{8} << 10;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_GUARD_LIMITS_H_
