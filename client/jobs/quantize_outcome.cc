#include "client/jobs/quantize_outcome.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/files/errors.h"
#include "client/files/json.h"
#include "client/files/safetensors.h"
#include "nlohmann/json.hpp"
#include "quantd/v1/quantization_service.pb.h"

namespace quantd::jobs {
namespace {

// A message of a record, if it has one; false where that is not sound.
template <typename Message>
bool ParseField(const files::Json& record, const char* key,
                std::optional<Message>* message) {
  const auto field = record.find(key);
  if (field == record.end()) return true;
  std::string bytes;
  return field->is_string() &&
         absl::Base64Unescape(field->get<std::string>(), &bytes) &&
         message->emplace().ParseFromString(bytes);
}

}  // namespace

std::string MetadataOf(const files::SafetensorsReader& file, const char* key) {
  const auto found = file.metadata().find(key);
  return found == file.metadata().end() ? "" : found->second;
}

std::string ChecksumText(uint64_t checksum) {
  return absl::StrCat(absl::Hex(checksum, absl::kZeroPad16));
}

absl::Status CheckData(const files::SafetensorsReader& file,
                       const std::string& path) {
  const std::string expected = MetadataOf(file, kChecksumKey);
  const std::string got = ChecksumText(file.DataChecksum());
  if (got == expected) return absl::OkStatus();
  return files::FileMalformedError(
      path, absl::StrCat("the XXH3 of its data is ", got, ", and was ",
                         expected.empty() ? "not kept" : expected,
                         " when it was written; run its part again"));
}

files::Json RecordOf(const Outcome& outcome) {
  files::Json record = {{"format", outcome.format},
                        {"bytes", outcome.output_bytes},
                        {"clipped_low", outcome.clipped_low_count},
                        {"clipped_high", outcome.clipped_high_count},
                        {"nan", outcome.nan_count},
                        {"infinity", outcome.infinity_count},
                        {"coarse_scales", outcome.coarse_scale_count},
                        {"mantissa_bits", outcome.mantissa_bits}};
  if (outcome.is_compensated) record["rounding"] = "compensated";
  if (outcome.output_noise.has_value()) {
    record["output_noise"] =
        absl::Base64Escape(outcome.output_noise->SerializeAsString());
  }
  if (outcome.metrics.has_value()) {
    record["metrics"] =
        absl::Base64Escape(outcome.metrics->SerializeAsString());
  }
  return record;
}

std::optional<Outcome> ParseRecord(const files::Json& record) {
  if (!record.is_object()) return std::nullopt;
  Outcome outcome;
  outcome.is_quantized = true;
  const auto format = record.find("format");
  if (format == record.end() || !format->is_string()) return std::nullopt;
  outcome.format = format->get<std::string>();
  const std::pair<const char*, uint64_t*> counts[] = {
      {"bytes", &outcome.output_bytes},
      {"clipped_low", &outcome.clipped_low_count},
      {"clipped_high", &outcome.clipped_high_count},
      {"nan", &outcome.nan_count},
      {"infinity", &outcome.infinity_count},
      {"coarse_scales", &outcome.coarse_scale_count},
      {"mantissa_bits", &outcome.mantissa_bits}};
  for (const auto& [key, count] : counts) {
    const auto found = record.find(key);
    if (found == record.end() || !found->is_number_unsigned()) {
      return std::nullopt;
    }
    *count = found->get<uint64_t>();
  }
  outcome.is_compensated = record.contains("rounding");
  if (!ParseField(record, "output_noise", &outcome.output_noise) ||
      !ParseField(record, "metrics", &outcome.metrics)) {
    return std::nullopt;
  }
  return outcome;
}

std::optional<ModuleRecords> ReadModules(const files::SafetensorsReader& file) {
  ModuleRecords records;
  records.modules = files::ParseJson(MetadataOf(file, kModulesKey));
  if (!records.modules.is_object() ||
      !absl::SimpleAtoi(MetadataOf(file, kRoundedKey),
                        &records.rounded_count)) {
    return std::nullopt;
  }
  return records;
}

}  // namespace quantd::jobs
