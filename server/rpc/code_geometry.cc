#include "server/rpc/code_geometry.h"

#include <algorithm>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "core/errors.h"

namespace quantd::server {

int64_t CodeGeometry::CodesIndex(int64_t offset_bytes) const {
  return std::min(element_count,
                  offset_bytes / granule_code_bytes * codes_per_granule);
}

absl::StatusOr<v1::ByteRange> CheckRange(const v1::ByteRange* range,
                                         int64_t size_bytes,
                                         int64_t granule_bytes) {
  v1::ByteRange checked;
  if (range == nullptr) {
    checked.set_end_bytes(size_bytes);
    return checked;
  }
  const auto aligned = [&](uint64_t bound) {
    return bound % granule_bytes == 0 ||
           bound == static_cast<uint64_t>(size_bytes);
  };
  if (range->begin_bytes() >= range->end_bytes() ||
      range->end_bytes() > static_cast<uint64_t>(size_bytes) ||
      range->begin_bytes() % granule_bytes != 0 ||
      !aligned(range->end_bytes())) {
    return core::RangeInvalidError(absl::StrCat(
        "range is [", range->begin_bytes(), ", ", range->end_bytes(),
        "), expected bounds in order, at most ", size_bytes,
        " and multiples of ", granule_bytes, " or the tensor's end"));
  }
  return *range;
}

}  // namespace quantd::server
