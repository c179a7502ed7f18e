#include "server/rpc/answer_bytes.h"

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"

#if defined(__x86_64__)
// The same functions, for the widest vectors that the machine has.
#include "xxh_x86dispatch.h"
#endif

namespace quantd::server {

Checksum::Checksum() : state_(XXH3_createState()) {
  XXH3_64bits_reset(state_.get());
}

void Checksum::Update(absl::Span<const uint8_t> data) {
  XXH3_64bits_update(state_.get(), data.data(), data.size());
}

uint64_t Checksum::Digest() const { return XXH3_64bits_digest(state_.get()); }

absl::Status CheckOutput(const absl::optional<SharedBytes>& output,
                         int64_t size_bytes) {
  if (!output.has_value() ||
      static_cast<int64_t>(output->bytes.size()) >= size_bytes) {
    return absl::OkStatus();
  }
  return core::WithField(core::RegionInvalidError(absl::StrCat(
                             "output has ", output->bytes.size(),
                             " bytes, expected at least ", size_bytes)),
                         "header.output");
}

absl::Status CheckApart(const absl::optional<SharedBytes>& output,
                        const std::shared_ptr<const Region>& region,
                        absl::Span<const uint8_t> shared) {
  if (!output.has_value() || output->region != region ||
      shared.data() + shared.size() <= output->bytes.data() ||
      output->bytes.data() + output->bytes.size() <= shared.data()) {
    return absl::OkStatus();
  }
  return core::WithField(
      core::RegionInvalidError("the tensor and its output overlap; expected "
                               "spans without a byte in common"),
      "shared");
}

void AnswerBytes::Begin(int64_t offset_bytes, int64_t size_bytes,
                        ChunkWriter* out) {
  quantum_ =
      output_.has_value()
          ? output_->bytes.subspan(offset_bytes - begin_bytes_, size_bytes)
          : absl::MakeSpan(out->AddData(offset_bytes, size_bytes), size_bytes);
  quantum_begin_bytes_ = offset_bytes;
  hashed_bytes_ = 0;
}

void AnswerBytes::Made(int64_t offset_bytes) {
  const int64_t made_bytes = offset_bytes - quantum_begin_bytes_;
  checksum_.Update(quantum_.subspan(hashed_bytes_, made_bytes - hashed_bytes_));
  hashed_bytes_ = made_bytes;
}

void AnswerBytes::End(Metrics* metrics) {
  Made(quantum_begin_bytes_ + static_cast<int64_t>(quantum_.size()));
  metrics->PayloadOut(static_cast<int64_t>(quantum_.size()));
}

}  // namespace quantd::server
