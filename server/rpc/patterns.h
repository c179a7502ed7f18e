// The patterns of a request.

#ifndef QUANTD_SERVER_RPC_PATTERNS_H_
#define QUANTD_SERVER_RPC_PATTERNS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "server/guard/memory_budget.h"
#include "server/wire/glob.h"

namespace quantd::server {

// The most patterns of a request: to try a name with all of them takes 20 ms at
// most, and much less unless both are long and almost the same.
constexpr int kMaxPatterns = 1000;

// Globs, as far as the memory budget has room for them. Not thread-safe.
class PatternList {
 public:
  // `budget` must outlive the list.
  explicit PatternList(MemoryBudget* budget) : budget_(budget) {}

  // Errors: PATTERN_INVALID.
  static absl::Status CheckCount(int64_t count) {
    if (count <= kMaxPatterns) return absl::OkStatus();
    return core::PatternInvalidError(
        absl::StrCat(count, " patterns, expected at most ", kMaxPatterns));
  }

  // Errors: PATTERN_INVALID, MEMORY_BUDGET.
  absl::Status Add(absl::string_view pattern) {
    absl::Status status = CheckCount(static_cast<int64_t>(globs_.size()) + 1);
    if (!status.ok()) return status;
    absl::StatusOr<Glob> glob = Glob::Create(pattern);
    if (!glob.ok()) return glob.status();
    status = budget_->Grow(&lease_, lease_.bytes() + glob->memory_bytes(),
                           "try again when fewer calls are under way");
    if (!status.ok()) return status;
    globs_.push_back(*std::move(glob));
    return absl::OkStatus();
  }

  // Adds all of a request's `field`. Errors: those of Add, at that field.
  template <typename Patterns>
  absl::Status AddAll(const Patterns& patterns, absl::string_view field) {
    if (absl::Status s = CheckCount(patterns.size()); !s.ok()) {
      return core::WithField(s, field);
    }
    int index = 0;
    for (const std::string& pattern : patterns) {
      if (absl::Status s = Add(pattern); !s.ok()) {
        return core::WithField(s, absl::StrCat(field, "[", index, "]"));
      }
      ++index;
    }
    return absl::OkStatus();
  }

  const std::vector<Glob>& globs() const { return globs_; }
  bool empty() const { return globs_.empty(); }
  bool MatchesAny(absl::string_view name) const {
    return absl::c_any_of(
        globs_, [name](const Glob& glob) { return glob.Matches(name); });
  }

 private:
  MemoryBudget* const budget_;
  std::vector<Glob> globs_;
  MemoryBudget::Lease lease_;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_PATTERNS_H_
