#include "client/files/safetensors_header.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/files/dtype.h"
#include "client/files/errors.h"
#include "nlohmann/json.hpp"

namespace quantd::files {
namespace {

constexpr size_t kHeaderAlignmentBytes = 8;

}  // namespace

absl::StatusOr<std::string> SafetensorsHeader(
    const std::string& path, const std::vector<SafetensorsEntry>& entries,
    const std::map<std::string, std::string>& metadata, uint64_t room_bytes) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  // ordered_json looks a key up linearly; items are appended instead, which
  // the writers have made unique.
  auto& items = header.get_ref<nlohmann::ordered_json::object_t&>();
  if (!metadata.empty()) items.emplace_back(kSafetensorsMetadataKey, metadata);
  uint64_t offset = 0;
  for (const SafetensorsEntry& entry : entries) {
    const std::string dtype(DtypeName(entry.dtype));
    items.emplace_back(
        entry.name, nlohmann::ordered_json{
                        {"dtype", dtype},
                        {"shape", entry.shape},
                        {"data_offsets", {offset, offset + entry.size_bytes}}});
    offset += entry.size_bytes;
  }
  // Names that are not UTF-8 must not throw.
  std::string text =
      header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  size_t size = std::max<size_t>(
      text.size(),
      room_bytes - std::min<uint64_t>(room_bytes, kSafetensorsLengthBytes));
  size += (kHeaderAlignmentBytes - size % kHeaderAlignmentBytes) %
          kHeaderAlignmentBytes;
  if (text.size() <= kMaxSafetensorsHeaderBytes)
    size = std::min(size, kMaxSafetensorsHeaderBytes);
  text.append(size - text.size(), ' ');
  if (text.size() > kMaxSafetensorsHeaderBytes) {
    return FileMalformedError(
        path,
        absl::StrCat("the header would take ", text.size(),
                     " bytes, the format allows ", kMaxSafetensorsHeaderBytes));
  }
  std::string length(kSafetensorsLengthBytes, '\0');
  for (size_t i = 0; i < kSafetensorsLengthBytes; ++i) {
    length[i] = static_cast<char>(text.size() >> (8 * i));
  }
  return absl::StrCat(length, text);
}

}  // namespace quantd::files
