#include "server/store/moments_pieces.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "core/errors.h"
#include "core/statistics/feature_moments.h"
#include "core/statistics/statistics_state.h"
#include "quantd/v1/statistics.pb.h"
#include "server/wire/statistics_proto.h"

namespace quantd::server {
namespace {

constexpr absl::string_view kCannotAddMoments = "cannot contribute moments";

absl::Status CorruptMoments(const SourceVersion& version,
                            absl::string_view what) {
  return SourceCorruptError(version.key, version.source, what);
}

// Errors: STORE_CORRUPT.
absl::StatusOr<v1::FeatureMoments> ParseMoments(const SourceVersion& version,
                                                uint64_t checksum,
                                                absl::string_view bytes) {
  if (checksum != PieceChecksum(version, kMomentsPiece, bytes)) {
    return CorruptMoments(version, "fail their checksum");
  }
  v1::FeatureMoments message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return CorruptMoments(version, "do not decode");
  }
  return message;
}

}  // namespace

int64_t MergeMomentsBytes(int64_t feature_count) {
  constexpr int64_t kCopies = 2;
  constexpr int64_t kMessageBytesPerFeature = 512;
  return kCopies * core::FeatureMoments::MemoryBytes(feature_count) +
         kMessageBytesPerFeature * feature_count;
}

absl::StatusOr<core::AxisMoments> ReadMomentsPiece(
    const SourceVersion& version, uint64_t checksum, absl::string_view bytes,
    absl::FunctionRef<absl::Status(int64_t memory_bytes)> proceed) {
  const absl::StatusOr<v1::FeatureMoments> message =
      ParseMoments(version, checksum, bytes);
  if (!message.ok()) return message.status();
  absl::Status status = proceed(MergeMomentsBytes(message->count_size()));
  if (!status.ok()) return status;
  absl::StatusOr<core::AxisMoments> moments = MomentsFromProto(*message);
  if (!moments.ok()) {
    return CorruptMoments(
        version, absl::StrCat("are invalid: ", moments.status().message()));
  }
  return moments;
}

absl::Status CheckMomentsPiece(const SourceVersion& version, uint64_t checksum,
                               absl::string_view bytes,
                               const core::AxisMoments& part) {
  const absl::StatusOr<v1::FeatureMoments> message =
      ParseMoments(version, checksum, bytes);
  if (!message.ok()) return message.status();
  return core::CheckMomentsMergeable(message->axis(), message->count_size(),
                                     part);
}

absl::StatusOr<WrittenMoments> WriteMoments(
    SqlConnection* connection, const absl::optional<SourceVersion>& before,
    const SourceVersion& now, const core::AxisMoments* part) {
  WrittenMoments written;
  std::string bytes;
  if (before.has_value()) {
    const std::unique_ptr<SqlStatement> row =
        SelectPiece(connection, *before, kMomentsPiece);
    absl::StatusOr<bool> found = row->Step(kCannotAddMoments);
    if (!found.ok()) return found.status();
    if (*found) {
      const auto checksum = static_cast<uint64_t>(row->Int(0));
      bytes = std::string(row->Bytes(1));
      if (checksum != PieceChecksum(*before, kMomentsPiece, bytes)) {
        return CorruptMoments(*before, "fail their checksum");
      }
      written.checksum_before = checksum;
    }
  }
  if (!written.checksum_before.has_value() && part == nullptr) return written;
  if (part != nullptr) {
    v1::FeatureMoments message;
    if (!written.checksum_before.has_value()) {
      MomentsToProto(*part, &message);
    } else {
      absl::Status status =
          CheckMomentsPiece(*before, *written.checksum_before, bytes, *part);
      if (!status.ok()) return status;
      // Memory for the moments is charged already.
      absl::StatusOr<core::AxisMoments> whole =
          ReadMomentsPiece(*before, *written.checksum_before, bytes,
                           [](int64_t /*memory*/) { return absl::OkStatus(); });
      if (!whole.ok()) return whole.status();
      status = core::MergeMoments(*part, &*whole);
      if (!status.ok()) return status;
      MomentsToProto(*whole, &message);
    }
    bytes = message.SerializeAsString();
  }
  absl::StatusOr<uint64_t> checksum =
      WritePiece(connection, now, kMomentsPiece, bytes);
  if (!checksum.ok()) return checksum.status();
  written.checksum = *checksum;
  written.size_bytes = static_cast<int64_t>(bytes.size());
  return written;
}

}  // namespace quantd::server
