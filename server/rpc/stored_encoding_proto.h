// Messages that describe a stored encoding.

#ifndef QUANTD_SERVER_RPC_STORED_ENCODING_PROTO_H_
#define QUANTD_SERVER_RPC_STORED_ENCODING_PROTO_H_

#include "absl/time/time.h"
#include "google/protobuf/timestamp.pb.h"
#include "quantd/v1/encoding.pb.h"
#include "server/store/encoding_store.h"
#include "server/wire/encoding_key.h"

namespace quantd::server {

google::protobuf::Timestamp ToTimestamp(absl::Time time);

// Fills in the message about a stored encoding.
void StoredEncodingToProto(const EncodingKey& key, const StoredEncoding& stored,
                           bool with_encoding, v1::StoredEncoding* proto);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_STORED_ENCODING_PROTO_H_
