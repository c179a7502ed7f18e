#include "server/wire/names.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"

namespace quantd::server {
namespace {

constexpr size_t kMaxPathNameBytes = 256;
constexpr size_t kMaxTensorNameBytes = 1024;
// Enough of a bad name to recognise it by.
constexpr size_t kShownBytes = 64;

std::string QuotedStart(absl::string_view name) {
  return absl::StrCat("\"", absl::Utf8SafeCEscape(name.substr(0, kShownBytes)),
                      name.size() > kShownBytes ? "...\"" : "\"");
}

bool IsPathNameCharacter(char c) {
  return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '/' || c == '-';
}

// Length of the UTF-8 sequence at the front of `text`, 0 if it is not valid;
// overlong forms, surrogates and values above U+10FFFF are not.
size_t Utf8SequenceLength(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  if ((lead == 0xE0 && byte(1) < 0xA0) || (lead == 0xED && byte(1) > 0x9F) ||
      (lead == 0xF0 && byte(1) < 0x90) || (lead == 0xF4 && byte(1) > 0x8F)) {
    return 0;
  }
  return length;
}

}  // namespace

absl::Status CheckPathName(absl::string_view kind, absl::string_view name) {
  if (name.empty()) {
    return core::NameInvalidError(absl::StrCat(kind, " is empty"));
  }
  if (name.size() > kMaxPathNameBytes) {
    return core::NameInvalidError(absl::StrCat(kind, " has ", name.size(),
                                               " bytes, expected at most ",
                                               kMaxPathNameBytes));
  }
  bool valid =
      name.front() != '/' && name.find("..") == absl::string_view::npos;
  for (const char c : name) valid = valid && IsPathNameCharacter(c);
  if (!valid) {
    return core::NameInvalidError(
        absl::StrCat(kind, " is ", QuotedStart(name),
                     ", expected letters, digits, \".\", \"_\", \"/\" and "
                     "\"-\", no \"..\" and no leading \"/\""));
  }
  return absl::OkStatus();
}

absl::Status CheckTensorName(absl::string_view name) {
  if (name.empty()) return core::NameInvalidError("tensor is empty");
  if (name.size() > kMaxTensorNameBytes) {
    return core::NameInvalidError(absl::StrCat("tensor has ", name.size(),
                                               " bytes, expected at most ",
                                               kMaxTensorNameBytes));
  }
  for (absl::string_view rest = name; !rest.empty();) {
    const size_t length = Utf8SequenceLength(rest);
    const auto lead = static_cast<uint8_t>(rest[0]);
    // C0, DEL, and C1, which is U+0080 to U+009F.
    const bool control =
        lead < 0x20 || lead == 0x7F ||
        (lead == 0xC2 && length == 2 && static_cast<uint8_t>(rest[1]) < 0xA0);
    if (length == 0 || control) {
      return core::NameInvalidError(
          absl::StrCat("tensor is ", QuotedStart(name),
                       ", expected UTF-8 without control characters"));
    }
    rest.remove_prefix(length);
  }
  return absl::OkStatus();
}

std::string ShownName(absl::string_view name) {
  return CheckTensorName(name).ok() ? std::string(name)
                                    : absl::CHexEscape(name);
}

absl::StatusOr<EncodingKey> KeyFromProto(const v1::TensorName& name) {
  EncodingKey key{name.model(), name.revision(), name.tensor()};
  if (key.revision.empty()) key.revision = std::string(kDefaultRevision);
  if (absl::Status s = CheckPathName("model", key.model); !s.ok()) {
    return core::WithField(s, "model");
  }
  if (absl::Status s = CheckPathName("revision", key.revision); !s.ok()) {
    return core::WithField(s, "revision");
  }
  if (absl::Status s = CheckTensorName(key.tensor); !s.ok()) {
    return core::WithField(s, "tensor");
  }
  return key;
}

absl::Status CheckOptionalName(const v1::TensorName& name) {
  if (!name.model().empty()) {
    absl::Status s = CheckPathName("model", name.model());
    if (!s.ok()) return core::WithField(s, "model");
  }
  if (!name.revision().empty()) {
    absl::Status s = CheckPathName("revision", name.revision());
    if (!s.ok()) return core::WithField(s, "revision");
  }
  if (!name.tensor().empty()) {
    absl::Status s = CheckTensorName(name.tensor());
    if (!s.ok()) return core::WithField(s, "tensor");
  }
  return absl::OkStatus();
}

}  // namespace quantd::server
