#include "client/cpp/shared_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/types/span.h"
#include "client/cpp/shared_buffers.h"

namespace quantd {

SharedBuffer::SharedBuffer(int connection, std::string region_id,
                           absl::Span<uint8_t> bytes,
                           std::shared_ptr<internal::SharedBuffers> owner)
    : connection_(connection),
      region_id_(std::move(region_id)),
      bytes_(bytes),
      owner_(std::move(owner)) {
  owner_->Add(this);
}

SharedBuffer::~SharedBuffer() {
  owner_->Remove(this);
  munmap(bytes_.data(), bytes_.size());
  close(connection_);
}

}  // namespace quantd
