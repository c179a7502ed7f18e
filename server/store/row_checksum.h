// A checksum over what a row holds.

#ifndef QUANTD_SERVER_STORE_ROW_CHECKSUM_H_
#define QUANTD_SERVER_STORE_ROW_CHECKSUM_H_

#include <xxhash.h>

#include <cstdint>
#include <initializer_list>
#include <memory>

#include "absl/strings/string_view.h"

namespace quantd::server {

// XXH3-64 of pieces; their sizes are hashed with them, so that no two run
// together. Not thread-safe.
class RowChecksum {
 public:
  RowChecksum() : state_(XXH3_createState(), &XXH3_freeState) {
    XXH3_64bits_reset(state_.get());
  }

  void Add(absl::string_view piece) {
    const uint64_t size = piece.size();
    XXH3_64bits_update(state_.get(), &size, sizeof(size));
    XXH3_64bits_update(state_.get(), piece.data(), piece.size());
  }
  // Checksum of what was added so far.
  uint64_t Get() const { return XXH3_64bits_digest(state_.get()); }

  static uint64_t Of(std::initializer_list<absl::string_view> pieces) {
    RowChecksum checksum;
    for (const absl::string_view piece : pieces) checksum.Add(piece);
    return checksum.Get();
  }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_STORE_ROW_CHECKSUM_H_
