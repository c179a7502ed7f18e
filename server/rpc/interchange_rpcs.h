// The calls that write and read files of encodings. One file per RPC.

#ifndef QUANTD_SERVER_RPC_INTERCHANGE_RPCS_H_
#define QUANTD_SERVER_RPC_INTERCHANGE_RPCS_H_

#include "server/rpc/encoding_call.h"

namespace quantd::server {

// Each starts a call.
EncodingCall* StartExportEncodings(const CallArguments& arguments);
EncodingCall* StartImportEncodings(const CallArguments& arguments);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_INTERCHANGE_RPCS_H_
