#include "server/wire/glob.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"

namespace quantd::server {

absl::StatusOr<Glob> Glob::Create(absl::string_view pattern) {
  if (pattern.empty() || pattern.size() > kMaxBytes) {
    return core::PatternInvalidError(absl::StrCat(
        "pattern has ", pattern.size(), " bytes, expected 1 to ", kMaxBytes));
  }
  Glob glob;
  for (const char c : pattern) {
    if (c == '*') {
      glob.stars_.set(glob.final_state_);
      continue;
    }
    States& from = c == '?' ? glob.any_ : glob.bytes_[c];
    from.set(glob.final_state_++);
  }
  return glob;
}

bool Glob::Matches(absl::string_view name) const {
  States states;
  states.set(0);
  for (const char c : name) {
    States on = any_;
    if (const auto it = bytes_.find(c); it != bytes_.end()) on |= it->second;
    states = (states & stars_) | ((states & on) << 1);
    if (states.none()) return false;
  }
  return states.test(final_state_);
}

}  // namespace quantd::server
