#include "server/wire/glob.h"

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

constexpr size_t kWordBits = 64;
constexpr size_t kMaxWords = Glob::kMaxBytes / kWordBits + 1;
constexpr uint8_t kStars = 0;
constexpr uint8_t kAny = 1;

}  // namespace

absl::StatusOr<Glob> Glob::Create(absl::string_view pattern) {
  if (pattern.empty() || pattern.size() > kMaxBytes) {
    return core::PatternInvalidError(absl::StrCat(
        "pattern has ", pattern.size(), " bytes, expected 1 to ", kMaxBytes));
  }
  Glob glob;
  // Neither a star nor a question mark has a row: there is one for all others.
  uint8_t last_row = kAny;
  glob.row_of_byte_.fill(kAny);
  for (const char c : pattern) {
    if (c == '*') continue;
    ++glob.final_state_;
    uint8_t& row = glob.row_of_byte_[static_cast<uint8_t>(c)];
    if (c != '?' && row == kAny) row = ++last_row;
  }
  glob.words_ = glob.final_state_ / kWordBits + 1;
  glob.rows_.resize((last_row + size_t{1}) * glob.words_);
  size_t state = 0;
  const auto add = [&glob, &state](size_t row) {
    glob.rows_[row * glob.words_ + state / kWordBits] |= uint64_t{1}
                                                         << (state % kWordBits);
  };
  for (const char c : pattern) {
    if (c == '*') {
      add(kStars);
      continue;
    }
    if (c == '?') {
      for (size_t any = kAny; any <= last_row; ++any) add(any);
    } else {
      add(glob.row_of_byte_[static_cast<uint8_t>(c)]);
    }
    ++state;
  }
  return glob;
}

bool Glob::Matches(absl::string_view name) const {
  if (name.size() < final_state_) return false;
  uint64_t states[kMaxWords] = {1};
  const uint64_t* const stars = Row(kStars);
  for (const char c : name) {
    const uint64_t* const on = Row(row_of_byte_[static_cast<uint8_t>(c)]);
    uint64_t carry = 0;
    uint64_t left = 0;
    for (size_t i = 0; i < words_; ++i) {
      const uint64_t moved = states[i] & on[i];
      states[i] = (states[i] & stars[i]) | (moved << 1) | carry;
      carry = moved >> (kWordBits - 1);
      left |= states[i];
    }
    if (left == 0) return false;
  }
  return (states[final_state_ / kWordBits] >> (final_state_ % kWordBits) & 1) !=
         0;
}

int64_t Glob::memory_bytes() const {
  return static_cast<int64_t>(sizeof(Glob) + rows_.size() * sizeof(uint64_t));
}

}  // namespace quantd::server
