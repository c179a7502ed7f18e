#include "server/guard/access_list.h"

#include <openssl/sha.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

constexpr uint8_t kAllScopes = 15;
constexpr absl::string_view kCertificate = "certificate:";

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

// What a credential of the file is kept under; empty if it is none.
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

absl::Status AtLine(int line, absl::string_view expected) {
  return core::ConfigInvalidError(
      absl::StrCat("access file, line ", line, ": expected ", expected));
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file) {
    return core::ConfigInvalidError(
        absl::StrCat("cannot read the access file \"", path, "\""));
  }
  return text;
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
  return absl::StartsWith(model, model_prefix_);
}

absl::Status Principal::Check(Scope scope) const {
  if ((scopes_ & static_cast<uint8_t>(scope)) != 0) return absl::OkStatus();
  for (const ScopeName& known : kScopes) {
    if (known.scope == scope) return core::ScopeMissingError(known.name);
  }
  return core::ScopeMissingError("");
}

absl::Status Principal::CheckTime(absl::Time now) const {
  return now < expires_ ? absl::OkStatus() : core::TokenInvalidError();
}

absl::StatusOr<std::shared_ptr<const AccessList>> AccessList::Parse(
    absl::string_view text) {
  auto list = std::make_shared<AccessList>();
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = line.substr(0, line.find('#'));
    const std::vector<absl::string_view> fields =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (fields.empty()) continue;
    if (fields.size() < 4 || fields.size() > 5) {
      return AtLine(number, "NAME CREDENTIAL SCOPES MODELS [EXPIRES]");
    }
    auto principal = std::make_shared<Principal>();
    principal->name_ = std::string(fields[0]);
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
    if (fields[3] != "*") principal->model_prefix_ = std::string(fields[3]);
    if (fields.size() == 5 && !absl::ParseTime(absl::RFC3339_full, fields[4],
                                               &principal->expires_, nullptr)) {
      return AtLine(number,
                    "a time such as 2027-01-31T00:00:00Z as the fifth field");
    }
    if (!list->principals_.emplace(key, std::move(principal)).second) {
      return AtLine(number, "a credential that no other line has");
    }
  }
  return list;
}

absl::StatusOr<std::shared_ptr<const Principal>> AccessList::Find(
    absl::string_view token, absl::Span<const std::string> certificate_names,
    absl::Time now) const {
  if (token.empty() && certificate_names.empty()) {
    return core::TokenMissingError();
  }
  // A token says more than the connection that it came on.
  std::vector<std::string> keys;
  if (!token.empty()) {
    keys.push_back(Digest(token));
  } else {
    for (const std::string& name : certificate_names) {
      keys.push_back(absl::StrCat(kCertificate, name));
    }
  }
  for (const std::string& key : keys) {
    const auto found = principals_.find(key);
    if (found == principals_.end()) continue;
    if (absl::Status s = found->second->CheckTime(now); !s.ok()) return s;
    return found->second;
  }
  return core::TokenInvalidError();
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
  absl::StatusOr<std::string> text = ReadFile(path_);
  absl::MutexLock lock(&mutex_);
  // A file that is not there any more is a change to nothing.
  const std::string seen = text.ok() ? *text : "";
  if (list_ != nullptr && seen == text_) return false;
  text_ = seen;
  if (!text.ok()) return text.status();
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
