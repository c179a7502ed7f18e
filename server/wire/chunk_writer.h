// Messages down: {1: header, 2: offset, 3: data, 4: summary, 5: error,
// 6: scales}.

#ifndef QUANTD_SERVER_WIRE_CHUNK_WRITER_H_
#define QUANTD_SERVER_WIRE_CHUNK_WRITER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "google/protobuf/message_lite.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"

namespace quantd::server {

// Builds the answers of one stream. What belongs to one tensor and was not
// taken yet is gathered into as few messages as it fits; a large header goes
// without data. `data` is written by the kernel straight into the slice that
// goes out. Not thread-safe.
class ChunkWriter {
 public:
  // The header of the tensor's answer.
  void SetHeader(const google::protobuf::MessageLite& header);

  // Room for `size` bytes of data at `offset_bytes`; to be filled before the
  // next call of this object. Never null for size > 0.
  uint8_t* AddData(int64_t offset_bytes, int64_t size);

  // Scales: before the data that are added next, in the same message as those
  // if no other scales follow.
  void AddScales(const google::protobuf::MessageLite& scales);

  // Ends the tensor's answer.
  void SetSummary(const google::protobuf::MessageLite& summary);
  // Ends the tensor's answer; what was not taken yet of it is dropped.
  void SetError(const absl::Status& status);

  // The finished messages, in order; the gathered one among them.
  std::vector<grpc::ByteBuffer> Take();

 private:
  // Closes the message that is being gathered.
  void Flush();

  std::vector<grpc::ByteBuffer> finished_;
  // The message being gathered: fields before data, data with the envelope in
  // front, fields after data.
  std::string header_;
  std::string scales_;
  bool has_data_ = false;
  grpc::Slice data_;
  std::string trailer_;
  // Messages in finished_ that belong to earlier tensors.
  size_t closed_ = 0;
};

}  // namespace quantd::server

#endif  // QUANTD_SERVER_WIRE_CHUNK_WRITER_H_
