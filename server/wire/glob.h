// Patterns over tensor names.

#ifndef QUANTD_SERVER_WIRE_GLOB_H_
#define QUANTD_SERVER_WIRE_GLOB_H_

#include <bitset>
#include <cstddef>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace quantd::server {

// "*" stands for any bytes, "?" for one byte, everything else for itself.
// Immutable, thread-safe.
class Glob {
 public:
  static constexpr size_t kMaxBytes = 1024;

  // Errors: PATTERN_INVALID: empty, or longer than kMaxBytes.
  static absl::StatusOr<Glob> Create(absl::string_view pattern);

  // Takes time proportional to the name, whatever the pattern.
  bool Matches(absl::string_view name) const;

 private:
  // State i: the first i bytes and question marks of the pattern are matched.
  using States = std::bitset<kMaxBytes + 1>;

  Glob() = default;

  size_t final_state_ = 0;
  // States at which a star stands.
  States stars_;
  // States from which any byte, or a certain one, leads on.
  States any_;
  absl::flat_hash_map<char, States> bytes_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_GLOB_H_
