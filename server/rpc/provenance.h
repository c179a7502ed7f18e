// Provenance of stored encodings: how each was made.

#ifndef QUANTD_SERVER_RPC_PROVENANCE_H_
#define QUANTD_SERVER_RPC_PROVENANCE_H_

#include <string>

#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/encoding_service.pb.h"
#include "server/rpc/rpc_environment.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"

namespace quantd::server {

// A spec without lists of numbers, which may be long.
v1::EncodingSpec ToldSpec(const v1::EncodingSpec& spec);

// A put of an encoding that the service computed from elements.
// `prediction`  null where there is none.
Precondition MadeOfElements(const RpcEnvironment& env,
                            const v1::EncodingSpec& spec,
                            const v1::Prediction* prediction = nullptr);
// A put of an encoding that the service computed from stored statistics. Takes
// time for all their bins.
Precondition MadeOfStatistics(const RpcEnvironment& env,
                              const v1::EncodingSpec& spec,
                              const StoredStatistics& statistics,
                              const v1::Prediction* prediction);
// A put of what a client sent.
Precondition MadeByClient(const RpcEnvironment& env, std::string if_match = "");
// A put of what a file has.
Precondition MadeOfFile(const RpcEnvironment& env,
                        v1::InterchangeFormat format);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_PROVENANCE_H_
