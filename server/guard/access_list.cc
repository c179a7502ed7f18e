#include "server/guard/access_list.h"

#include <openssl/sha.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "server/guard/size_text.h"
#include "server/guard/text_file.h"

namespace quantd::server {
namespace {

constexpr uint8_t kAllScopes = 15;
constexpr absl::string_view kModelCharacters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._/-";
constexpr absl::string_view kCertificate = "certificate:";
constexpr absl::string_view kModels = "models:";
constexpr absl::string_view kPrincipal = "principal:";

// The least age of a retention rule; a shorter one is rather a slip than meant.
constexpr absl::Duration kLeastAge = absl::Hours(1);

struct ScopeName {
  absl::string_view name;
  Scope scope;
};
constexpr ScopeName kScopes[] = {{"read", Scope::kRead},
                                 {"quantize", Scope::kQuantize},
                                 {"calibrate", Scope::kCalibrate},
                                 {"admin", Scope::kAdmin}};

std::string Digest(absl::string_view token) {
  std::string digest(SHA256_DIGEST_LENGTH, '\0');
  SHA256(reinterpret_cast<const uint8_t*>(token.data()), token.size(),
         reinterpret_cast<uint8_t*>(&digest[0]));
  return digest;
}

// Key that a credential of the file is kept under; empty if the text is no
// credential.
std::string KeyOf(absl::string_view credential) {
  if (absl::StartsWith(credential, kCertificate) &&
      credential.size() > kCertificate.size()) {
    return std::string(credential);
  }
  if (!absl::ConsumePrefix(&credential, "sha256:") ||
      credential.size() != 2 * SHA256_DIGEST_LENGTH) {
    return "";
  }
  for (const char digit : credential) {
    if (!absl::ascii_isxdigit(static_cast<unsigned char>(digit))) return "";
  }
  return absl::HexStringToBytes(credential);
}

// 0 where one is unknown.
uint8_t ParseScopes(absl::string_view text) {
  uint8_t scopes = 0;
  for (const absl::string_view name : absl::StrSplit(text, ',')) {
    uint8_t scope = 0;
    for (const ScopeName& known : kScopes) {
      if (name == known.name) scope = static_cast<uint8_t>(known.scope);
    }
    if (scope == 0) return 0;
    scopes |= scope;
  }
  return scopes;
}

bool IsModelPattern(absl::string_view text) {
  return text == "*" ||
         (text[0] != '/' && !absl::StrContains(text, "..") &&
          text.find_first_not_of(kModelCharacters) == absl::string_view::npos);
}

// The stores count no longer prefixes: a name of 255 bytes has room for 127,
// each of which takes more than a small row.
constexpr int kMaxQuotaSlashes = 8;

// "models:*" or "models:PREFIX/".
bool IsModelScope(absl::string_view text) {
  return absl::ConsumePrefix(&text, kModels) && !text.empty() &&
         (text == "*" || (text.back() == '/' && IsModelPattern(text)));
}

absl::Status AtLine(int line, absl::string_view expected) {
  return core::ConfigInvalidError(
      absl::StrCat("--access-file: line ", line, ": expected ", expected));
}

}  // namespace

std::shared_ptr<const Principal> Principal::Unrestricted() {
  static const auto* const kUnrestricted = [] {
    auto principal = std::make_shared<Principal>();
    principal->scopes_ = kAllScopes;
    return new std::shared_ptr<const Principal>(std::move(principal));
  }();
  return *kUnrestricted;
}

bool Principal::MaySee(absl::string_view model) const {
  return models_.empty() || model == models_ ||
         (models_.back() == '/' && absl::StartsWith(model, models_));
}

std::string Principal::BeforeModels() const {
  if (models_.empty()) return "";
  // Above every name that begins with the character before the last one.
  constexpr char kAboveNames = '\x7f';
  std::string before = models_;
  --before.back();
  before += kAboveNames;
  return before;
}

std::string Principal::AfterModels() const {
  if (models_.empty()) return "";
  std::string after = models_;
  if (after.back() == '/') {
    ++after.back();
  } else {
    // Below every character of names.
    after += '\x01';
  }
  return after;
}

absl::Status Principal::Check(Scope scope) const {
  if ((scopes_ & static_cast<uint8_t>(scope)) != 0) return absl::OkStatus();
  for (const ScopeName& known : kScopes) {
    if (known.scope == scope) return core::ScopeMissingError(known.name);
  }
  return core::ScopeMissingError("");
}

absl::Status Principal::CheckWrite(absl::string_view model) const {
  if (absl::Status s = Check(Scope::kCalibrate); !s.ok()) return s;
  return MaySee(model) ? absl::OkStatus() : core::ModelDeniedError(model);
}

absl::Status Principal::CheckTime(absl::Time now) const {
  return now < expires_ ? absl::OkStatus() : core::TokenInvalidError();
}

WriteAccount Principal::AccountFor(absl::string_view model) const {
  WriteAccount account;
  account.principal = name_;
  if (quotas_ == nullptr) return account;
  for (const Quota& quota : *quotas_) {
    absl::string_view name = quota.scope;
    const bool counts = absl::ConsumePrefix(&name, kPrincipal)
                            ? name == name_
                            : ScopeHolds(quota.scope, model);
    if (counts) account.quotas.push_back(quota);
  }
  return account;
}

bool ScopeHolds(absl::string_view scope, absl::string_view model) {
  return absl::ConsumePrefix(&scope, kModels) &&
         (scope == "*" || absl::StartsWith(model, scope));
}

absl::Status AccessList::ParseRule(int line,
                                   absl::Span<const absl::string_view> fields) {
  const bool is_quota = fields[0] == "quota";
  const absl::string_view scope = fields[1];
  absl::string_view name = scope;
  const bool is_principal =
      is_quota && absl::ConsumePrefix(&name, kPrincipal) && !name.empty();
  if (!is_principal && !IsModelScope(scope)) {
    return AtLine(line, is_quota ? "principal:NAME, models:PREFIX/ or models:* "
                                   "as the second field of a quota"
                                 : "models:PREFIX/ or models:* as the second "
                                   "field of what is retained");
  }
  if (is_quota && absl::c_count(scope, '/') > kMaxQuotaSlashes) {
    return AtLine(line, absl::StrCat("at most ", kMaxQuotaSlashes,
                                     " slashes in the prefix of a quota"));
  }
  const std::string expected =
      is_quota ? "bytes=SIZE, rows=COUNT or both, each once, such as "
                 "bytes=10GiB rows=100000"
               : "revisions=COUNT, age=DURATION or both, each once, such as "
                 "revisions=20 age=720h";
  Quota quota;
  quota.scope = std::string(scope);
  RetentionRule rule;
  rule.scope = std::string(scope);
  absl::flat_hash_set<absl::string_view> seen;
  for (const absl::string_view field : fields.subspan(2)) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(field, absl::MaxSplits('=', 1));
    const auto& [key, value] = parts;
    bool ok = seen.insert(key).second;
    if (is_quota && key == "bytes") {
      ok = ok && ParseSize(value, &quota.max_bytes);
    } else if (is_quota && key == "rows") {
      ok =
          ok && absl::SimpleAtoi(value, &quota.max_rows) && quota.max_rows >= 0;
    } else if (!is_quota && key == "revisions") {
      int64_t count = 0;
      // Keeping none is not retaining.
      ok = ok && absl::SimpleAtoi(value, &count) && count >= 1;
      rule.revisions = count;
    } else if (!is_quota && key == "age") {
      absl::Duration age;
      ok = ok && absl::ParseDuration(value, &age) && age >= kLeastAge;
      rule.age = age;
    } else {
      ok = false;
    }
    if (!ok) return AtLine(line, expected);
  }
  if (seen.empty()) return AtLine(line, expected);
  const auto is_known = [&](const auto& other) { return other.scope == scope; };
  if (is_quota ? absl::c_any_of(*quotas_, is_known)
               : absl::c_any_of(retention_, is_known)) {
    return AtLine(line, "one such line for each scope");
  }
  if (is_quota) {
    quotas_->push_back(std::move(quota));
  } else {
    retention_.push_back(std::move(rule));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const AccessList>> AccessList::Parse(
    absl::string_view text) {
  auto list = std::make_shared<AccessList>();
  absl::flat_hash_set<std::string> names;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = line.substr(0, line.find('#'));
    const std::vector<absl::string_view> fields =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (fields.empty()) continue;
    // Somebody may be called quota: a credential follows then.
    if ((fields[0] == "quota" || fields[0] == "retain") &&
        (fields.size() < 2 || KeyOf(fields[1]).empty())) {
      absl::Status status = fields.size() < 2
                                ? AtLine(number, "a scope after the first word")
                                : list->ParseRule(number, fields);
      if (!status.ok()) return status;
      continue;
    }
    if (fields.size() < 4 || fields.size() > 5) {
      return AtLine(number, "NAME CREDENTIAL SCOPES MODELS [EXPIRES]");
    }
    auto principal = std::make_shared<Principal>();
    principal->name_ = std::string(fields[0]);
    principal->quotas_ = list->quotas_;
    names.insert(principal->name_);
    const std::string key = KeyOf(fields[1]);
    if (key.empty()) {
      return AtLine(number,
                    "sha256: with 64 hexadecimal digits, or certificate: "
                    "with a name, as the second field");
    }
    principal->scopes_ = ParseScopes(fields[2]);
    if (principal->scopes_ == 0) {
      return AtLine(number,
                    "some of read, quantize, calibrate and admin, separated "
                    "by commas, as the third field");
    }
    if (!IsModelPattern(fields[3])) {
      return AtLine(number,
                    "*, a prefix of models that ends in /, or the name of a "
                    "model, as the fourth field");
    }
    if (fields[3] != "*") principal->models_ = std::string(fields[3]);
    if (fields.size() == 5 && !absl::ParseTime(absl::RFC3339_full, fields[4],
                                               &principal->expires_, nullptr)) {
      return AtLine(number,
                    "a time such as 2027-01-31T00:00:00Z as the fifth field");
    }
    if (!list->principals_.emplace(key, std::move(principal)).second) {
      return AtLine(number, "a credential that no other line has");
    }
  }
  for (const Quota& quota : *list->quotas_) {
    absl::string_view name = quota.scope;
    if (absl::ConsumePrefix(&name, kPrincipal) && !names.contains(name)) {
      return core::ConfigInvalidError(
          absl::StrCat("--access-file: expected a credential of \"", name,
                       "\", which has a quota"));
    }
  }
  absl::c_sort(*list->quotas_, [](const Quota& a, const Quota& b) {
    return a.scope < b.scope;
  });
  return list;
}

Credential::Credential(absl::string_view token,
                       std::vector<std::string> certificate_names)
    : token_digest(token.empty() ? "" : Digest(token)),
      certificate_names(std::move(certificate_names)) {}

absl::StatusOr<std::shared_ptr<const Principal>> AccessList::Find(
    const Credential& credential, absl::Time now) const {
  if (credential.token_digest.empty() && credential.certificate_names.empty()) {
    return core::TokenMissingError();
  }
  auto found = principals_.end();
  if (!credential.token_digest.empty()) {
    found = principals_.find(credential.token_digest);
  } else {
    for (const std::string& name : credential.certificate_names) {
      found = principals_.find(absl::StrCat(kCertificate, name));
      if (found != principals_.end()) break;
    }
  }
  if (found == principals_.end()) return core::TokenInvalidError();
  if (absl::Status s = found->second->CheckTime(now); !s.ok()) return s;
  return found->second;
}

absl::StatusOr<std::unique_ptr<AccessFile>> AccessFile::Open(
    const std::string& path) {
  std::unique_ptr<AccessFile> file(new AccessFile(path));
  if (absl::Status s = file->Reload().status(); !s.ok()) return s;
  return file;
}

std::shared_ptr<const AccessList> AccessFile::list() const {
  absl::MutexLock lock(&mutex_);
  return list_;
}

absl::StatusOr<bool> AccessFile::Reload() {
  const absl::optional<std::string> text = ReadTextFile(path_);
  absl::MutexLock lock(&mutex_);
  if (list_ != nullptr && text == text_) return false;
  text_ = text;
  if (!text.has_value()) {
    return core::ConfigInvalidError(
        absl::StrCat("--access-file: expected a file that can be read, got \"",
                     path_, "\""));
  }
  if (!absl::EndsWith(*text, "\n")) {
    return core::ConfigInvalidError(
        "--access-file: expected a file that ends with the end of a line, as "
        "one does that was written to its end");
  }
  absl::StatusOr<std::shared_ptr<const AccessList>> list =
      AccessList::Parse(*text);
  if (!list.ok()) return list.status();
  list_ = *std::move(list);
  return true;
}

absl::string_view BearerToken(absl::string_view authorization) {
  constexpr absl::string_view kScheme = "bearer ";
  if (!absl::StartsWithIgnoreCase(authorization, kScheme)) return "";
  return absl::StripAsciiWhitespace(authorization.substr(kScheme.size()));
}

}  // namespace quantd::server
