// Patterns over tensor names.

#ifndef QUANTD_SERVER_WIRE_GLOB_H_
#define QUANTD_SERVER_WIRE_GLOB_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

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

  // Takes time proportional to the name, whatever the pattern: some 20 us at
  // most.
  bool Matches(absl::string_view name) const;

  // Memory of the glob: at most some 34 times the pattern.
  int64_t memory_bytes() const;

 private:
  Glob() = default;

  const uint64_t* Row(int index) const { return &rows_[index * words_]; }

  // State i: the first i bytes and question marks of the pattern are matched.
  // Sets of states are bits of so many words.
  size_t words_ = 0;
  size_t final_state_ = 0;
  // [1 + rows][words] states at which a star stands; then, per row, those from
  // which a byte leads on.
  std::vector<uint64_t> rows_;
  // The row of each byte; that of all which only question marks match is 1.
  std::array<uint8_t, 256> row_of_byte_ = {};
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_GLOB_H_
