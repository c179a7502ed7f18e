#include "server/rpc/tensor_buffer.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/errors.h"

namespace quantd::server {

TensorBuffer::TensorBuffer(const RpcEnvironment& env, int64_t total_bytes,
                           int64_t beside_bytes)
    : env_(env), total_bytes_(total_bytes), beside_bytes_(beside_bytes) {}

absl::Status TensorBuffer::Reserve(int64_t bytes) {
  constexpr absl::string_view kWayOut =
      "calibrate the tensor first, then name its encoding; where its blocks "
      "are too small for that, take min-max or larger blocks";
  // Before most of it was sent for nothing, and sent again.
  if (total_bytes_ > env_.budget->total_bytes() - beside_bytes_) {
    return core::MemoryBudgetError(env_.budget->total_bytes(), kWayOut,
                                   absl::ZeroDuration());
  }
  const int64_t blocks = (size_bytes_ + bytes + kBlockBytes - 1) / kBlockBytes;
  return env_.budget->Grow(
      &lease_, std::min(blocks * kBlockBytes, total_bytes_), kWayOut);
}

void TensorBuffer::Append(absl::Span<const uint8_t> data) {
  while (!data.empty()) {
    const int64_t in_block = size_bytes_ % kBlockBytes;
    if (in_block == 0) {
      blocks_.emplace_back(
          new uint8_t[std::min(kBlockBytes, total_bytes_ - size_bytes_)]);
    }
    const int64_t taken =
        std::min(kBlockBytes - in_block, static_cast<int64_t>(data.size()));
    std::memcpy(blocks_.back().get() + in_block, data.data(), taken);
    size_bytes_ += taken;
    data.remove_prefix(taken);
  }
}

absl::Span<const uint8_t> TensorBuffer::block(int64_t index) const {
  const int64_t begin = index * kBlockBytes;
  return {blocks_[index].get(),
          static_cast<size_t>(std::min(kBlockBytes, size_bytes_ - begin))};
}

void TensorBuffer::Copy(int64_t offset, absl::Span<uint8_t> out) const {
  while (!out.empty()) {
    const absl::Span<const uint8_t> from =
        block(offset / kBlockBytes)
            .subspan(static_cast<size_t>(offset % kBlockBytes), out.size());
    std::copy(from.begin(), from.end(), out.begin());
    offset += static_cast<int64_t>(from.size());
    out.remove_prefix(from.size());
  }
}

absl::Status TensorBuffer::ForEachBand(
    int64_t row_bytes, int64_t band_rows,
    absl::FunctionRef<absl::Status(int64_t row, int64_t rows,
                                   const uint8_t* reals)>
        body) const {
  const int64_t row_count = size_bytes_ / row_bytes;
  std::vector<uint8_t> band(static_cast<size_t>(band_rows * row_bytes));
  for (int64_t row = 0; row < row_count; row += band_rows) {
    const int64_t rows = std::min(band_rows, row_count - row);
    Copy(row * row_bytes,
         absl::MakeSpan(band).first(static_cast<size_t>(rows * row_bytes)));
    absl::Status status = body(row, rows, band.data());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

core::HeldTensor TensorBuffer::Held(const core::BlockLayout& layout,
                                    core::ElementType type) const {
  std::vector<const uint8_t*> pieces;
  pieces.reserve(blocks_.size());
  for (const std::unique_ptr<uint8_t[]>& block : blocks_) {
    pieces.push_back(block.get());
  }
  return core::HeldTensor(layout, type,
                          kBlockBytes / core::ElementSizeBytes(type),
                          std::move(pieces));
}

}  // namespace quantd::server
