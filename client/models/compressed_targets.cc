#include "client/models/compressed_targets.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/files/errors.h"
#include "nlohmann/json.hpp"
#include "re2/re2.h"

namespace quantd {
namespace {

// Limits of the regular expressions among the targets of one file, which
// anybody may have written: with these a file takes seconds at most.
constexpr int kMaxPatterns = 256;
constexpr size_t kMaxPatternBytes = 1024;
constexpr int64_t kMaxPatternMemoryBytes = 1 << 20;

constexpr absl::string_view kRegexPrefix = "re:";

// How precise a target is, the most precise first.
enum class TargetKind { kName, kPattern, kClass };

TargetKind TargetKindOf(absl::string_view target) {
  if (absl::StartsWith(target, kRegexPrefix)) return TargetKind::kPattern;
  return target == "Linear" || target == "Conv2d" || target == "Conv1d"
             ? TargetKind::kClass
             : TargetKind::kName;
}

// Says which modules have the arguments of which group: the first with the most
// precise target of one. Not thread-safe.
class TargetMatcher {
 public:
  // `path` of the configuration, for errors. Of `schemes` the keys are the
  // modules.
  TargetMatcher(std::string path, CompressedSchemes* schemes)
      : path_(std::move(path)),
        schemes_(*schemes),
        left_count_(schemes->size()) {}

  // Reads the groups until every module has one.
  // Errors: FILE_UNSUPPORTED for a regular expression that is not RE2's or too
  // large.
  absl::Status Match(const files::Json& config) {
    const auto groups = config.find("config_groups");
    if (groups == config.end() || !groups->is_object()) return absl::OkStatus();
    for (const TargetKind kind :
         {TargetKind::kName, TargetKind::kPattern, TargetKind::kClass}) {
      const absl::Status status = MatchAll(*groups, kind);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  // The targets of one kind, in their order.
  absl::Status MatchAll(const files::Json& groups, TargetKind kind) {
    for (const files::Json& group : groups) {
      if (!group.is_object()) continue;
      const auto targets = group.find("targets");
      const auto weights = group.find("weights");
      if (targets == group.end() || !targets->is_array() ||
          weights == group.end() || !weights->is_object()) {
        continue;
      }
      for (const files::Json& target : *targets) {
        if (left_count_ == 0) return absl::OkStatus();
        if (!target.is_string()) continue;
        const std::string& text = target.get_ref<const std::string&>();
        if (TargetKindOf(text) != kind) continue;
        absl::Status status = MatchOne(text, kind, &*weights);
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  absl::Status MatchOne(const std::string& target, TargetKind kind,
                        const files::Json* weights) {
    if (kind == TargetKind::kPattern) {
      return MatchPattern(absl::string_view(target).substr(kRegexPrefix.size()),
                          weights);
    }
    // Class names stand for all modules: the file does not say what class one
    // is.
    if (kind == TargetKind::kClass) {
      for (auto& [module, scheme] : schemes_) Give(weights, &scheme);
      return absl::OkStatus();
    }
    const auto found = schemes_.find(target);
    if (found != schemes_.end()) Give(weights, &found->second);
    return absl::OkStatus();
  }

  // Matches like Python's re.match: from the beginning of the name on, not to
  // its end.
  absl::Status MatchPattern(absl::string_view pattern,
                            const files::Json* weights) {
    if (pattern.size() > kMaxPatternBytes) {
      return files::FileUnsupportedError(
          path_, absl::StrCat("a target of ", pattern.size(),
                              " bytes, expected regular expressions of at "
                              "most ",
                              kMaxPatternBytes));
    }
    if (++pattern_count_ > kMaxPatterns) {
      return files::FileUnsupportedError(
          path_, absl::StrCat("more than ", kMaxPatterns,
                              " regular expressions among the targets; name "
                              "the modules themselves"));
    }
    RE2::Options options;
    options.set_max_mem(kMaxPatternMemoryBytes);
    options.set_log_errors(false);
    const RE2 regex(re2::StringPiece(pattern.data(), pattern.size()), options);
    if (!regex.ok()) {
      return files::FileUnsupportedError(
          path_, absl::StrCat("the target \"re:", pattern,
                              "\" is not a regular expression of RE2, which "
                              "has no look-around and no back references: ",
                              regex.error()));
    }
    for (auto& [module, scheme] : schemes_) {
      if (scheme == nullptr &&
          regex.Match(module, 0, module.size(), RE2::ANCHOR_START,
                      /*submatch=*/nullptr, /*nsubmatch=*/0)) {
        Give(weights, &scheme);
      }
    }
    return absl::OkStatus();
  }

  void Give(const files::Json* weights, const files::Json** scheme) {
    if (*scheme != nullptr) return;
    *scheme = weights;
    --left_count_;
  }

  const std::string path_;
  CompressedSchemes& schemes_;
  size_t left_count_;
  int pattern_count_ = 0;
};

}  // namespace

absl::Status MatchTargets(const files::Json& config, const std::string& path,
                          CompressedSchemes* schemes) {
  return TargetMatcher(path, schemes).Match(config);
}

}  // namespace quantd
