// Sends the tensors of a file over one stream, a few ahead of their results.

#ifndef QUANTD_CLIENT_CLI_TENSOR_LOOP_H_
#define QUANTD_CLIENT_CLI_TENSOR_LOOP_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/files/safetensors.h"

namespace quantd::cli {

// Tensors ahead of their results, in bytes and in number: enough to keep the
// connection busy, little enough to bound the results that wait.
constexpr uint64_t kMostBytesAhead = uint64_t{64} << 20;
constexpr size_t kMostTensorsAhead = 256;

// For each tensor in order: stream->Send(make_job(tensor)), and once it is
// answered on_result(tensor, result), which returns false to stop.
template <typename Stream, typename MakeJob, typename OnResult>
void ForEachTensor(Stream* stream,
                   const std::vector<const files::FileTensor*>& tensors,
                   MakeJob&& make_job, OnResult&& on_result) {
  size_t sent = 0;
  uint64_t ahead_bytes = 0;
  for (size_t received = 0; received < tensors.size(); ++received) {
    while (sent < tensors.size() &&
           (sent == received ||
            (sent - received < kMostTensorsAhead &&
             ahead_bytes + tensors[sent]->data.size() <= kMostBytesAhead))) {
      ahead_bytes += tensors[sent]->data.size();
      stream->Send(make_job(*tensors[sent]));
      ++sent;
    }
    ahead_bytes -= tensors[received]->data.size();
    if (!on_result(*tensors[received], stream->Receive())) return;
  }
}

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_TENSOR_LOOP_H_
