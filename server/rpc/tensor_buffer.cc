#include "server/rpc/tensor_buffer.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace quantd::server {

TensorBuffer::TensorBuffer(const RpcEnvironment& env, int64_t total_bytes)
    : env_(env), total_bytes_(total_bytes) {}

absl::Status TensorBuffer::Append(absl::Span<const uint8_t> data) {
  while (!data.empty()) {
    const int64_t in_block = size_bytes_ % kBlockBytes;
    if (in_block == 0) {
      const int64_t block_bytes =
          std::min(kBlockBytes, total_bytes_ - size_bytes_);
      absl::Status status = env_.budget->Grow(
          &lease_, lease_.bytes() + block_bytes, env_.limits.memory_wait,
          "Calibrate the tensor first, then name its encoding by reference");
      if (!status.ok()) {
        env_.metrics->LimitRejected("MEMORY_BUDGET");
        return status;
      }
      blocks_.emplace_back(new uint8_t[block_bytes]);
    }
    const int64_t taken =
        std::min(kBlockBytes - in_block, static_cast<int64_t>(data.size()));
    std::memcpy(blocks_.back().get() + in_block, data.data(), taken);
    size_bytes_ += taken;
    data.remove_prefix(taken);
  }
  return absl::OkStatus();
}

absl::Span<const uint8_t> TensorBuffer::block(int64_t index) const {
  const int64_t begin = index * kBlockBytes;
  return {blocks_[index].get(),
          static_cast<size_t>(std::min(kBlockBytes, size_bytes_ - begin))};
}

}  // namespace quantd::server
