// Memory of a page of a list.

#ifndef QUANTD_SERVER_RPC_PAGE_BYTES_H_
#define QUANTD_SERVER_RPC_PAGE_BYTES_H_

#include <cstdint>
#include <vector>

namespace quantd::server {

// In bytes, as the store gives it. `name(entry)` is all of an entry that may be
// long.
template <typename Entry, typename Name>
int64_t PageBytes(const std::vector<Entry>& page, Name name) {
  // An etag, and what the allocator adds.
  constexpr int64_t kMore = 64;
  int64_t bytes = 0;
  for (const Entry& entry : page) {
    bytes += static_cast<int64_t>(sizeof(Entry) + name(entry).size()) + kMore;
  }
  return bytes;
}

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_PAGE_BYTES_H_
