// The calls whose encodings may be of any size. One file per RPC.

#ifndef QUANTD_SERVER_RPC_SCALE_RPCS_H_
#define QUANTD_SERVER_RPC_SCALE_RPCS_H_

#include "server/rpc/encoding_call.h"

namespace quantd::server {

// Each starts a call.
EncodingCall* StartReadEncoding(const CallArguments& arguments);
EncodingCall* StartWriteEncoding(const CallArguments& arguments);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_SCALE_RPCS_H_
