// The RPCs: a row for each, and what the proto says of them.

#ifndef QUANTD_SERVER_WIRE_RPCS_H_
#define QUANTD_SERVER_WIRE_RPCS_H_

#include <cstdint>
#include <iterator>

namespace quantd::server {

// The values are the places in kRpcs.
enum class Rpc : int {
  kCalibrate,
  kQuantize,
  kDequantize,
  kEvaluate,
  kListEncodings,
  kGetEncoding,
  kPutEncoding,
  kReadEncoding,
  kWriteEncoding,
  kDeleteEncoding,
  kListModels,
  kListRevisions,
  kPublishRevision,
  kDeleteRevision,
  kDeleteModel,
  kComputeEncodings,
  kSweep,
  kChooseMixture,
  kGetStatistics,
  kListStatistics,
  kDeleteStatistics,
  kExportEncodings,
  kImportEncodings,
  kGetServerInfo,
};

// The kind of content that a request has, and so how much memory one may take.
enum class RequestSize {
  kTensors,   // chunks, which TensorStream reads
  kNames,     // some names
  kPatterns,  // a thousand patterns, some with specs
  kScales,    // as many scales, hints or options as a message has room for
};

struct RpcRow {
  Rpc rpc;
  // The service's name for the RPC.
  const char* method;
  RequestSize size;
};

// RPCs that handle tensors come first, and have metrics of their own.
inline constexpr RpcRow kRpcs[] = {
    {Rpc::kCalibrate, "Calibrate", RequestSize::kTensors},
    {Rpc::kQuantize, "Quantize", RequestSize::kTensors},
    {Rpc::kDequantize, "Dequantize", RequestSize::kTensors},
    {Rpc::kEvaluate, "Evaluate", RequestSize::kTensors},
    {Rpc::kListEncodings, "ListEncodings", RequestSize::kNames},
    {Rpc::kGetEncoding, "GetEncoding", RequestSize::kNames},
    {Rpc::kPutEncoding, "PutEncoding", RequestSize::kScales},
    {Rpc::kReadEncoding, "ReadEncoding", RequestSize::kNames},
    {Rpc::kWriteEncoding, "WriteEncoding", RequestSize::kScales},
    {Rpc::kDeleteEncoding, "DeleteEncoding", RequestSize::kNames},
    {Rpc::kListModels, "ListModels", RequestSize::kNames},
    {Rpc::kListRevisions, "ListRevisions", RequestSize::kNames},
    {Rpc::kPublishRevision, "PublishRevision", RequestSize::kNames},
    {Rpc::kDeleteRevision, "DeleteRevision", RequestSize::kNames},
    {Rpc::kDeleteModel, "DeleteModel", RequestSize::kNames},
    {Rpc::kComputeEncodings, "ComputeEncodings", RequestSize::kPatterns},
    {Rpc::kSweep, "Sweep", RequestSize::kPatterns},
    {Rpc::kChooseMixture, "ChooseMixture", RequestSize::kScales},
    {Rpc::kGetStatistics, "GetStatistics", RequestSize::kNames},
    {Rpc::kListStatistics, "ListStatistics", RequestSize::kNames},
    {Rpc::kDeleteStatistics, "DeleteStatistics", RequestSize::kNames},
    {Rpc::kExportEncodings, "ExportEncodings", RequestSize::kPatterns},
    {Rpc::kImportEncodings, "ImportEncodings", RequestSize::kScales},
    {Rpc::kGetServerInfo, "GetServerInfo", RequestSize::kNames},
};

inline constexpr int kRpcCount = static_cast<int>(std::size(kRpcs));

constexpr int CountTensorRpcs() {
  int count = 0;
  while (count < kRpcCount && kRpcs[count].size == RequestSize::kTensors) {
    ++count;
  }
  return count;
}
inline constexpr int kTensorRpcCount = CountTensorRpcs();

constexpr bool RpcsAreInOrder() {
  for (int i = 0; i < kRpcCount; ++i) {
    const bool is_tensor = kRpcs[i].size == RequestSize::kTensors;
    if (kRpcs[i].rpc != static_cast<Rpc>(i) ||
        is_tensor != (i < kTensorRpcCount)) {
      return false;
    }
  }
  return true;
}
static_assert(RpcsAreInOrder(), "kRpcs is not in the order of Rpc");

constexpr RequestSize RequestSizeOf(Rpc rpc) {
  return kRpcs[static_cast<int>(rpc)].size;
}

// A right that a caller may have; see quantd.v1.Scope.
enum class Scope : uint8_t {
  kRead = 1,
  kQuantize = 2,
  kCalibrate = 4,
  kAdmin = 8,
};

// The one that a call of the RPC needs, by the option of its method.
Scope ScopeOf(Rpc rpc);

// Names of an RPC in the labels of metrics: its type is "unary",
// "server_stream", "client_stream" or "bidi_stream", its service
// "quantd.v1.EncodingService".
struct RpcName {
  const char* type;
  const char* service;
  const char* method;
};
const RpcName& RpcNameOf(Rpc rpc);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_RPCS_H_
