#include "server/rpc/stored_encoding_proto.h"

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"
#include "server/wire/encoding_proto.h"

namespace quantd::server {

google::protobuf::Timestamp ToTimestamp(absl::Time time) {
  // Range of a Timestamp: years 1 to 9999.
  constexpr absl::Time kFirst = absl::FromUnixSeconds(-62135596800);
  constexpr absl::Time kLast = absl::FromUnixSeconds(253402300799);
  const int64_t us =
      absl::ToUnixMicros(std::min(std::max(time, kFirst), kLast));
  constexpr int64_t kSecond = 1'000'000;
  const int64_t fraction = (us % kSecond + kSecond) % kSecond;
  google::protobuf::Timestamp timestamp;
  timestamp.set_seconds((us - fraction) / kSecond);
  timestamp.set_nanos(static_cast<int32_t>(fraction * 1000));
  return timestamp;
}

void StoredEncodingToProto(const EncodingKey& key, const StoredEncoding& stored,
                           bool with_encoding, v1::StoredEncoding* proto) {
  proto->mutable_name()->set_model(key.model);
  proto->mutable_name()->set_revision(key.revision);
  proto->mutable_name()->set_tensor(key.tensor);
  proto->set_etag(stored.etag);
  proto->set_generation(stored.generation);
  *proto->mutable_update_time() = ToTimestamp(stored.update_time);
  if (!stored.provenance.empty()) {
    // A checksum has said that it is what was written.
    proto->mutable_provenance()->ParseFromString(stored.provenance);
  }
  if (stored.encoding == nullptr) return;
  proto->set_format(static_cast<v1::NumberFormat>(stored.encoding->format));
  proto->set_scale_count(stored.encoding->scale.size());
  if (with_encoding) {
    EncodingToProto(*stored.encoding, proto->mutable_encoding());
  }
}

}  // namespace quantd::server
