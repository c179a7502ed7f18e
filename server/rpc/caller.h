// Who makes a call.

#ifndef QUANTD_SERVER_RPC_CALLER_H_
#define QUANTD_SERVER_RPC_CALLER_H_

#include <memory>

#include "server/guard/access_list.h"
#include "server/shared_memory/region_registry.h"

namespace quantd::server {

struct Caller {
  // Never null.
  std::shared_ptr<const Principal> principal = Principal::Unrestricted();
  // To what the caller may name in shared memory.
  SharedMemoryAccess shared_memory;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_RPC_CALLER_H_
