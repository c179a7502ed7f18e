// The client of quantd: quantize, dequantize, calibrate and evaluate tensors,
// and manage the encodings that the service keeps.

#ifndef QUANTD_CLIENT_CPP_CLIENT_H_
#define QUANTD_CLIENT_CPP_CLIENT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cpp/client_options.h"
#include "client/cpp/shared_memory.h"
#include "client/cpp/tensor_stream.h"
#include "quantd/v1/encoding_service.pb.h"

namespace quantd {

// A connection to one server. Errors are "REASON: text" with the canonical
// code: those of the server as proto/ lists them, those of the client as
// errors.h does. Retries by itself, see ClientOptions.
//
// Thread-safe; a stream that it opens is not. Streams and shared memory may
// outlive the client.
class Client {
 public:
  // Does not wait for the server: the first call finds out.
  // Errors: ARGUMENT_INVALID.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(ClientOptions options);
  ~Client();

  // One tensor on a stream of its own.
  absl::StatusOr<QuantizeResult> Quantize(const QuantizeJob& job);
  absl::StatusOr<DequantizeResult> Dequantize(const DequantizeJob& job);
  absl::StatusOr<CalibrateResult> Calibrate(const CalibrateJob& job);
  absl::StatusOr<EvaluateResult> Evaluate(const EvaluateJob& job);

  // Memory shared with the server. A tensor whose data are in it goes by name
  // and is not copied, whatever its size; so does an output in it. Data begin
  // at a multiple of 8 bytes in it, or go over the stream as those elsewhere.
  // It does not outlive its server: what names it then is REGION_NOT_FOUND, and
  // needs a new one. Shared outputs are not checked against the checksum.
  // Errors: ARGUMENT_INVALID without options().shared_memory,
  // SHARED_MEMORY_UNAVAILABLE, TIMEOUT, MEMORY_BUDGET, REGION_LIMIT.
  absl::StatusOr<std::unique_ptr<SharedBuffer>> AllocateShared(
      uint64_t size_bytes);

  // Many tensors on one open stream.
  std::unique_ptr<QuantizeStream> OpenQuantize();
  std::unique_ptr<DequantizeStream> OpenDequantize();
  std::unique_ptr<CalibrateStream> OpenCalibrate();
  std::unique_ptr<EvaluateStream> OpenEvaluate();

  // All encodings of a revision, in order of tensor, without scales. Empty
  // `revision` is "main".
  absl::StatusOr<std::vector<v1::StoredEncoding>> ListEncodings(
      absl::string_view model, absl::string_view revision);
  // Reads an encoding of any size. Large encodings with E8M0, E4M3 or INTEGER
  // scales come without `scale`, which follows from scale_code and outer_scale.
  absl::StatusOr<v1::StoredEncoding> GetEncoding(const TensorName& name);
  // Stores an encoding of any size. With many E8M0, E4M3 or INTEGER scales only
  // scale_code and outer_scale count. `if_match` is empty for any, "absent", or
  // the etag to replace. When the answer was lost and the retry finds another
  // etag, the encoding is read again: if it is this one, that is a success,
  // whoever put it.
  absl::StatusOr<v1::StoredEncoding> PutEncoding(const TensorName& name,
                                                 const Encoding& encoding,
                                                 absl::string_view if_match);
  // When the answer was lost and the retry finds nothing, that is a success. If
  // it finds another etag, an encoding was put since; whether the one to delete
  // went before, nobody can tell, and ETAG_MISMATCH stays.
  absl::Status DeleteEncoding(const TensorName& name,
                              absl::string_view if_match);
  // In order of name.
  absl::StatusOr<std::vector<v1::Model>> ListModels();
  absl::StatusOr<std::vector<v1::Revision>> ListRevisions(
      absl::string_view model);

  // Reads one encoding of any size: calls `on_piece` for every answer, which
  // returns false to stop. Not retried once an answer came.
  absl::Status ReadEncoding(
      const TensorName& name,
      absl::FunctionRef<bool(const v1::ReadEncodingResponse&)> on_piece);
  // Writes one encoding of any size, whose scales come in chunks. `next` makes
  // the next chunk and answers false when there is none; as it can't begin
  // anew, this is not retried. The time for the call is the deadline of the
  // options.
  absl::StatusOr<v1::StoredEncoding> WriteEncoding(
      const TensorName& name, const Encoding& outline,
      absl::string_view if_match,
      absl::FunctionRef<bool(v1::ScaleChunk* chunk)> next);

  // Makes the encodings of `source` those of `revision`, all at once. Empty
  // `revision` is "main". With `keep_others`, it keeps its encodings of tensors
  // that `source` does not have; otherwise they are deleted. When the answer
  // was lost, the retry finds that and answers REVISION_NOT_FOUND.
  absl::StatusOr<v1::PublishRevisionResponse> PublishRevision(
      absl::string_view model, absl::string_view source,
      absl::string_view revision, bool keep_others = false);
  // Deletes encodings and statistics, all at once. If the answer is lost, this
  // is as with DeleteEncoding, and the counts are 0.
  absl::StatusOr<v1::DeleteRevisionResponse> DeleteRevision(
      absl::string_view model, absl::string_view revision);
  absl::StatusOr<v1::DeleteModelResponse> DeleteModel(absl::string_view model);

  // Computes encodings from stored statistics and stores them. Calls
  // `on_tensor` for every answer, which returns false to cancel the rest.
  // The answer of a tensor that failed has an error. Not retried once an answer
  // came.
  absl::Status ComputeEncodings(
      const v1::ComputeEncodingsRequest& request,
      absl::FunctionRef<bool(const v1::ComputeEncodingsResponse&)> on_tensor);
  // All answers.
  absl::StatusOr<std::vector<v1::ComputeEncodingsResponse>> ComputeEncodings(
      const v1::ComputeEncodingsRequest& request);

  // Predicts the error of many specs from stored statistics; as
  // ComputeEncodings. The last answer has the summary.
  absl::Status Sweep(
      const v1::SweepRequest& request,
      absl::FunctionRef<bool(const v1::SweepResponse&)> on_tensor);
  absl::StatusOr<std::vector<v1::SweepResponse>> Sweep(
      const v1::SweepRequest& request);

  // Chooses one spec for each tensor from measured errors, for each target.
  absl::StatusOr<v1::ChooseMixtureResponse> ChooseMixture(
      const v1::ChooseMixtureRequest& request);

  // Writes encodings as a file of an interchange format. Calls `on_piece` for
  // every answer, whose data follow one another; it returns false to stop. Not
  // retried once an answer came.
  absl::Status ExportEncodings(
      const v1::ExportEncodingsRequest& request,
      absl::FunctionRef<bool(const v1::ExportEncodingsResponse&)> on_piece);
  // Reads encodings from the file `data`; `request` has all the rest. The time
  // for the call grows with the file: the timeout for every 16 MiB begun.
  absl::StatusOr<v1::ImportEncodingsResponse> ImportEncodings(
      v1::ImportEncodingsRequest request, absl::string_view data);

  // `with_state` asks for the histograms as well, `per_tensor` for one over all
  // scale indices in their place, `with_moments` for the moments of features.
  absl::StatusOr<v1::GetStatisticsResponse> GetStatistics(
      const TensorName& name, bool with_state, bool per_tensor = false,
      bool with_moments = false);
  // In order of tensor. Empty `revision` is "main".
  absl::StatusOr<std::vector<v1::StatisticsEntry>> ListStatistics(
      absl::string_view model, absl::string_view revision);
  // Empty `source` deletes those of all sources. A lost answer as with
  // DeleteEncoding.
  absl::Status DeleteStatistics(const TensorName& name,
                                absl::string_view source);

  // The program and the machine that answer. UNIMPLEMENTED by older servers.
  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo();

  // Health of a service in grpc.health.v1; kUnknown is also a service that does
  // not exist.
  enum class Health { kUnknown, kServing, kNotServing };
  // Empty `service` asks for the whole server. Not retried.
  absl::StatusOr<Health> CheckHealth(absl::string_view service);

  const ClientOptions& options() const { return options_; }

 private:
  // The client's part of gRPC, which this header keeps to itself.
  struct Connection;

  Client(ClientOptions options, std::unique_ptr<Connection> connection);

  // Calls attempt(context), which takes at most `most`, until it is answered.
  // `may_repeat` becomes true when the server may have done it already in an
  // attempt before the last.
  template <typename Attempt>
  absl::Status Retry(absl::Duration most, Attempt attempt,
                     bool* may_repeat = nullptr);
  // Retry with method(context, request, response) as the attempt.
  template <typename Method, typename Request, typename Response>
  absl::Status Call(Method method, const Request& request, Response* response,
                    bool* may_repeat = nullptr);
  // Call of a method that deletes: what a repeated attempt does not find counts
  // as deleted.
  template <typename Method, typename Request, typename Response>
  absl::Status CallDelete(Method method, const Request& request,
                          Response* response);

  // PutEncoding of one whose scales are too many for a message.
  absl::Status PutInChunks(const TensorName& name, const Encoding& encoding,
                           absl::string_view if_match,
                           v1::StoredEncoding* stored, bool* may_repeat);

  // Calls start(async stub, context, reader) and passes on what comes.
  template <typename Response, typename Start>
  absl::Status ReadAll(Start start,
                       absl::FunctionRef<bool(const Response&)> on_response);

  const ClientOptions options_;
  const std::unique_ptr<Connection> connection_;
  const std::shared_ptr<internal::SharedBuffers> shared_buffers_;
};

}  // namespace quantd

#endif  // QUANTD_CLIENT_CPP_CLIENT_H_
