#include "client/cpp/utf8.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace quantd::internal {

bool IsValidUtf8(absl::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    const uint8_t lead = static_cast<uint8_t>(text[i++]);
    if (lead < 0x80) continue;
    int following;
    uint8_t least = 0x80;
    uint8_t most = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF) {
      following = 1;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      following = 2;
      if (lead == 0xE0) least = 0xA0;
      if (lead == 0xED) most = 0x9F;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      following = 3;
      if (lead == 0xF0) least = 0x90;
      if (lead == 0xF4) most = 0x8F;
    } else {
      return false;
    }
    for (; following > 0; --following) {
      if (i == text.size()) return false;
      const uint8_t byte = static_cast<uint8_t>(text[i++]);
      if (byte < least || byte > most) return false;
      least = 0x80;
      most = 0xBF;
    }
  }
  return true;
}

}  // namespace quantd::internal
