// Shared memory as a client that knows only the protocol gets it.

#ifndef QUANTD_TESTS_SUPPORT_SHARED_REGION_H_
#define QUANTD_TESTS_SUPPORT_SHARED_REGION_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "quantd/v1/shared_memory.pb.h"

namespace quantd::testing {

// A region, mapped. Not thread-safe.
class SharedRegion {
 public:
  // Takes over `file`.
  SharedRegion(std::string id, uint64_t size_bytes, int file);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  const std::string& id() const { return id_; }
  int file() const { return file_; }
  absl::Span<uint8_t> bytes() const { return bytes_; }
  // Names [offset, offset + size).
  v1::SharedSpan Span(uint64_t offset_bytes, uint64_t size_bytes) const;

 private:
  const std::string id_;
  const int file_;
  absl::Span<uint8_t> bytes_;
};

// A connection to the control socket. Not thread-safe.
class ControlConnection {
 public:
  // Of the server at "unix:PATH". Aborts the test program if it does not
  // listen.
  explicit ControlConnection(const std::string& address);
  ~ControlConnection();
  ControlConnection(const ControlConnection&) = delete;
  ControlConnection& operator=(const ControlConnection&) = delete;

  // One packet, of any bytes. False when the server has closed.
  bool Send(const std::string& packet);
  // The next reply, and in `file` its descriptor or -1; none when the server
  // has closed.
  absl::optional<v1::RegionReply> Receive(int* file);
  // Null where there is an error, which `reply`, if any, tells.
  std::unique_ptr<SharedRegion> Allocate(uint64_t size_bytes,
                                         v1::RegionReply* reply = nullptr);
  void Close();

 private:
  int socket_ = -1;
};

}  // namespace quantd::testing

#endif  // QUANTD_TESTS_SUPPORT_SHARED_REGION_H_
