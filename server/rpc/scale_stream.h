// Scales that pass by beside their elements: up with reals or codes, down with
// codes.

#ifndef QUANTD_SERVER_RPC_SCALE_STREAM_H_
#define QUANTD_SERVER_RPC_SCALE_STREAM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/types/block_layout.h"
#include "core/types/encoding.h"
#include "core/types/scale_window.h"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/answer_bytes.h"
#include "server/rpc/rpc_environment.h"
#include "server/wire/chunk_writer.h"

namespace quantd::server {

// The layout of an encoding's outer scales; that of one scalar if it has none.
// Errors: those of core::OuterLayout.
absl::StatusOr<core::BlockLayout> OuterLayoutOf(
    const core::Encoding& encoding, const core::BlockLayout& layout);

// The scales of an encoding that come up in chunks: those that are needed are
// kept, and charged to the memory budget. Not thread-safe.
class IncomingScales {
 public:
  // Elements [begin, end) will come.
  // `keep_all`  nothing is let go, and all scales are needed in the end.
  // Errors: those of OuterLayoutOf.
  static absl::StatusOr<std::unique_ptr<IncomingScales>> Create(
      const RpcEnvironment& env, const core::Encoding& encoding,
      const core::BlockLayout& layout, bool has_zero_points, int64_t begin,
      int64_t end, bool keep_all);

  // Takes a ScaleChunk, also one in serialized parts that merge.
  // Errors: those of core::ScaleWindow, MESSAGE_MALFORMED if a part is no
  // message, MEMORY_BUDGET: nothing was taken.
  absl::Status Push(absl::Span<const std::string> parts);
  absl::Status Push(const v1::ScaleChunk& chunk);
  // Makes ready for elements [first, first + count): those before are done.
  // `keep`  scales from here on are kept.
  // Errors: SCALE_COUNT.
  absl::Status Advance(int64_t first, int64_t count, int64_t keep);
  // Moves the whole encoding out, after the last element, with keep_all.
  // Errors: SCALE_COUNT unless all scales came.
  absl::StatusOr<std::shared_ptr<const core::Encoding>> TakeWhole();

  const core::ScaleWindow& window() const { return window_; }

 private:
  IncomingScales(const RpcEnvironment& env, core::ScaleWindow window,
                 bool keep_all)
      : env_(env), window_(std::move(window)), keep_all_(keep_all) {}

  const RpcEnvironment& env_;
  core::ScaleWindow window_;
  const bool keep_all_;
  MemoryBudget::Lease lease_;
};

// The scales of an answer, in chunks. Not thread-safe.
class ScaleAnswer {
 public:
  // An answer with the scales of `encoding`, or of one with the same scale
  // type, beginning with the first of `needed`.
  // `outer_layout`  that of OuterLayoutOf.
  ScaleAnswer(const RpcEnvironment& env, core::BlockLayout outer_layout,
              const core::BlockLayout::ScaleRange& needed);

  // Sends the scales before `end` that were not sent yet: before what is added
  // to `out` next.
  // `encoding`     has them.
  // `first`        index of its first scale.
  // `first_outer`  and of its first outer scale.
  void SendUpTo(int64_t end, const core::Encoding& encoding, int64_t first,
                int64_t first_outer, ChunkWriter* out);
  // The first scale that was not sent yet.
  int64_t next() const { return next_; }

  void WriteSummary(v1::QuantizeSummary* summary) const;

 private:
  void Send(const v1::ScaleChunk& chunk, ChunkWriter* out);

  // Bytes of a message's scales, at most.
  const int64_t most_bytes_;
  const core::BlockLayout outer_layout_;
  int64_t next_;
  int64_t next_outer_ = 0;
  Checksum scale_checksum_;
  Checksum zero_point_checksum_;
  Checksum outer_scale_checksum_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_SCALE_STREAM_H_
