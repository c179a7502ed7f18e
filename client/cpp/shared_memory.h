// Memory that the client shares with a server on the same machine.

#ifndef QUANTD_CLIENT_CPP_SHARED_MEMORY_H_
#define QUANTD_CLIENT_CPP_SHARED_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/types/span.h"

namespace quantd {

namespace internal {
class SharedBuffers;
}  // namespace internal

// Memory of Client::AllocateShared, all zero at first. It has to be kept until
// every tensor in it has its result; what is written into it, or read of an
// output, before that is undefined. Fresh pages cost more than quantizing does:
// use it for many tensors. Thread-safe.
class SharedBuffer {
 public:
  // Gives the memory back, on both sides.
  ~SharedBuffer();
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;

  // At least as large as asked for; starts at a page.
  absl::Span<uint8_t> bytes() const { return bytes_; }

 private:
  friend class internal::SharedBuffers;
  SharedBuffer(int connection, std::string region_id, absl::Span<uint8_t> bytes,
               std::shared_ptr<internal::SharedBuffers> owner);

  // Its end is the region's.
  const int connection_;
  const std::string region_id_;
  const absl::Span<uint8_t> bytes_;
  const std::shared_ptr<internal::SharedBuffers> owner_;
};

}  // namespace quantd

#endif  // QUANTD_CLIENT_CPP_SHARED_MEMORY_H_
