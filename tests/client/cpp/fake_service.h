// A naive QuantizationService for tests of the client: ordinary synchronous
// protobuf, int8 per tensor, and faults on demand.

#ifndef QUANTD_TESTS_CLIENT_CPP_FAKE_SERVICE_H_
#define QUANTD_TESTS_CLIENT_CPP_FAKE_SERVICE_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "grpcpp/server_context.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/quantization_service.grpc.pb.h"
#include "xxhash.h"

namespace quantd {

// q = clamp(rint(x / scale), -128, 127): what the fake computes.
inline int8_t FakeQuantize(float x, float scale) {
  return static_cast<int8_t>(
      std::clamp(std::nearbyint(x / scale), -128.0f, 127.0f));
}

// google.rpc.Status with a RetryInfo of a millisecond.
inline std::string RetryDetails() {
  const std::string delay("\x0A\x04\x10\xC0\x84\x3D", 6);
  const std::string type = "type.googleapis.com/google.rpc.RetryInfo";
  const auto bytes = [](char tag, const std::string& value) {
    return absl::StrCat(std::string(1, tag),
                        std::string(1, static_cast<char>(value.size())), value);
  };
  return bytes(0x1A, absl::StrCat(bytes(0x0A, type), bytes(0x12, delay)));
}

// A change of every message of a kind. Thread-safe: a test takes it back while
// the server may still be about to make it.
template <typename Message>
class Change {
 public:
  void Set(std::function<void(Message*)> change) {
    absl::MutexLock lock(&mutex_);
    change_ = std::move(change);
  }
  void Make(Message* message) const {
    absl::MutexLock lock(&mutex_);
    if (change_) change_(message);
  }

 private:
  mutable absl::Mutex mutex_;
  std::function<void(Message*)> change_ ABSL_GUARDED_BY(mutex_);
};

// Faults are set before the client calls and counted down by the calls.
struct Faults {
  // Streams that end with UNAVAILABLE after their first message.
  std::atomic<int> unavailable_streams{0};
  // Tensors that ask to come again in a millisecond.
  std::atomic<int> retry_tensors{0};
  // Unary calls that fail with UNAVAILABLE.
  std::atomic<int> unavailable_unary{0};
  // Puts and deletes that are done, but answered by UNAVAILABLE.
  std::atomic<int> lost_answers{0};
  // Puts and deletes that are refused with DRAINING, and not done.
  std::atomic<int> draining_changes{0};
  // Size of an encoding that GetEncoding answers for a tensor called "large".
  std::atomic<int64_t> large_encoding_bytes{0};
  // Breaks streams with UNAVAILABLE whenever so many more bytes came; 0: never.
  std::atomic<int64_t> break_every_bytes{0};
  // How many of those breaks are left.
  std::atomic<int> breaks{1 << 30};
  // Bytes of tensors that came, and headers with `store`.
  std::atomic<int64_t> data_bytes{0};
  std::atomic<int> stored{0};
  // Headers that ask for compensated rounding.
  std::atomic<int> compensated{0};
  // The part that begins there fails, or asks once to come again; -1: none.
  std::atomic<int64_t> bad_part{-1};
  std::atomic<int64_t> retry_part{-1};
  // A part that begins there finds another encoding under its reference, from
  // then on; -1: none.
  std::atomic<int64_t> replaced_part{-1};
  // The scale under every reference; its etag is its number.
  std::atomic<float> reference_scale{0.25f};
  // Unary calls that fail with RESOURCE_EXHAUSTED and ask to come again.
  std::atomic<int> exhausted_unary{0};
  // Send a wrong checksum.
  std::atomic<bool> wrong_checksum{false};
  // Changes what is answered, for a server that answers something else.
  Change<v1::QuantizeResponse> change_answer;
  Change<v1::CalibrateSummary> change_summary;
  Change<v1::StoredEncoding> change_stored;
  // Send bytes that no header announced.
  std::atomic<bool> too_many_bytes{false};
  // Break computing encodings after two tensors.
  std::atomic<bool> break_after_two{false};
  // Tell before every answer that the server is at work.
  std::atomic<bool> tells_progress{false};
  // Never answer, or nothing after two tensors.
  std::atomic<bool> silent{false};
  // Bytes that were read of tensors called "bad*", which fail at once.
  std::atomic<int64_t> bytes_of_bad_tensors{0};
  // Read a tensor called "bad*" slowly until it was noticed.
  std::atomic<bool> wait_after_bad{false};
  absl::Notification bad_was_noticed;
};

class FakeQuantizationService final : public v1::QuantizationService::Service {
 public:
  explicit FakeQuantizationService(Faults* faults) : faults_(*faults) {}

  grpc::Status Quantize(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::QuantizeResponse, v1::QuantizeRequest>*
          stream) override {
    v1::QuantizeRequest request;
    v1::QuantizeHeader header;
    uint64_t received = 0;
    uint64_t end = 0;
    float scale = 1;
    bool is_open = false;
    XXH3_state_t* const hash = XXH3_createState();
    const std::unique_ptr<XXH3_state_t, void (*)(XXH3_state_t*)> owner(
        hash, [](XXH3_state_t* state) { XXH3_freeState(state); });
    while (stream->Read(&request)) {
      if (faults_.silent) {
        while (!context->IsCancelled()) absl::SleepFor(absl::Milliseconds(1));
        return grpc::Status::CANCELLED;
      }
      if (faults_.unavailable_streams-- > 0) {
        return grpc::Status(grpc::StatusCode::UNAVAILABLE,
                            "DRAINING: the server is about to stop");
      }
      v1::QuantizeResponse response;
      if (faults_.tells_progress) stream->Write(response);
      if (request.has_header()) {
        header = request.header();
        uint64_t size =
            header.tensor().element_type() == v1::ELEMENT_TYPE_FLOAT32 ? 4 : 0;
        for (const int64_t d : header.tensor().shape()) size *= d;
        received = header.range().begin_bytes();
        end = header.has_range() ? header.range().end_bytes() : size;
        const auto begin = static_cast<int64_t>(received);
        is_open = true;
        XXH3_64bits_reset(hash);
        faults_.stored += header.store() ? 1 : 0;
        faults_.compensated +=
            header.rounding().method() == v1::ROUNDING_METHOD_COMPENSATED ? 1
                                                                          : 0;
        if (header.has_reference() && faults_.replaced_part == begin) {
          faults_.replaced_part = -1;
          faults_.reference_scale = 0.5f;
        }
        scale = header.has_reference() ? faults_.reference_scale.load()
                                       : header.encoding().scale(0);
        int64_t retried = begin;
        if (faults_.bad_part == begin) {
          response.mutable_error()->set_code(3);
          response.mutable_error()->set_reason("NON_FINITE_REJECTED");
          response.mutable_error()->set_message("this part is bad");
        } else if (faults_.retry_tensors-- > 0 ||
                   faults_.retry_part.compare_exchange_strong(retried, -1)) {
          response.mutable_error()->set_code(8);
          response.mutable_error()->set_reason("MEMORY_BUDGET");
          response.mutable_error()->set_message("no memory now");
          response.mutable_error()->set_retry_after_ms(1);
        } else if (absl::StartsWith(header.tensor().name().tensor(), "bad")) {
          response.mutable_error()->set_code(3);
          response.mutable_error()->set_reason("NAME_INVALID");
          response.mutable_error()->set_message("this name is bad");
          response.mutable_error()->set_field("header.tensor.name");
        }
        if (response.has_error()) {
          is_open = false;
          stream->Write(response);
        } else {
          auto* const answer = response.mutable_header();
          *answer->mutable_name() = header.tensor().name();
          *answer->mutable_shape() = header.tensor().shape();
          if (!header.omit_encoding()) {
            *answer->mutable_encoding() = header.encoding();
            answer->mutable_encoding()->set_format(v1::NUMBER_FORMAT_INT8);
            answer->mutable_encoding()->clear_scale();
            answer->mutable_encoding()->add_scale(scale);
          }
          if (header.has_reference()) answer->set_etag(absl::StrCat(scale));
          answer->set_size_bytes(size / 4);
          answer->mutable_range()->set_begin_bytes(received / 4);
          answer->mutable_range()->set_end_bytes(end / 4);
        }
      }
      if (!is_open) {
        faults_.bytes_of_bad_tensors += request.data().size();
        // Not for ever: the client gives no tensor back to its caller in the
        // middle of a message.
        if (faults_.wait_after_bad) {
          faults_.bad_was_noticed.WaitForNotificationWithTimeout(
              absl::Milliseconds(100));
        }
        continue;
      }
      if (request.offset() != received) {
        return grpc::Status(grpc::StatusCode::INTERNAL,
                            absl::StrCat("TEST: offset ", request.offset(),
                                         ", expected ", received));
      }
      const std::string& data = request.data();
      const int64_t before = faults_.data_bytes.fetch_add(data.size());
      const int64_t every = faults_.break_every_bytes;
      if (every > 0 &&
          before / every !=
              (before + static_cast<int64_t>(data.size())) / every &&
          faults_.breaks-- > 0) {
        return grpc::Status(grpc::StatusCode::UNAVAILABLE,
                            "DRAINING: the server is about to stop");
      }
      std::string codes(data.size() / 4, '\0');
      for (size_t i = 0; i < codes.size(); ++i) {
        float x;
        std::memcpy(&x, data.data() + 4 * i, 4);
        codes[i] = static_cast<char>(FakeQuantize(x, scale));
      }
      XXH3_64bits_update(hash, codes.data(), codes.size());
      response.set_offset(received / 4);
      if (faults_.too_many_bytes) codes.push_back('x');
      response.set_data(codes);
      received += data.size();
      if (received == end) {
        response.mutable_summary()->set_count(
            (end - header.range().begin_bytes()) / 4);
        response.mutable_summary()->set_clipped_low_count(1);
        response.mutable_summary()->set_checksum_xxh3(
            XXH3_64bits_digest(hash) + (faults_.wrong_checksum ? 1 : 0));
        is_open = false;
      }
      faults_.change_answer.Make(&response);
      stream->Write(response);
    }
    return grpc::Status::OK;
  }

  grpc::Status Calibrate(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::CalibrateResponse, v1::CalibrateRequest>*
          stream) override {
    v1::CalibrateRequest request;
    v1::CalibrateResponse response;
    v1::CalibrateHeader header;
    uint64_t size = 0;
    uint64_t received = 0;
    bool is_open = false;
    while (stream->Read(&request)) {
      if (faults_.unavailable_streams-- > 0) {
        return grpc::Status(grpc::StatusCode::UNAVAILABLE,
                            "DRAINING: the server is about to stop");
      }
      if (request.has_header()) {
        response.Clear();
        is_open = true;
        size = 4;
        for (const int64_t d : request.header().tensor().shape()) size *= d;
        received = 0;
        if (faults_.retry_tensors-- > 0) {
          is_open = false;
          response.mutable_error()->set_code(8);
          response.mutable_error()->set_reason("MEMORY_BUDGET");
          response.mutable_error()->set_message("no memory now");
          response.mutable_error()->set_retry_after_ms(1);
          stream->Write(response);
        }
        header = request.header();
      }
      if (!is_open) continue;
      received += request.data().size();
      if (received < size) continue;
      *response.mutable_summary()->mutable_name() = header.tensor().name();
      response.mutable_summary()->mutable_statistics()->set_count(size / 4);
      if (header.has_contribution()) {
        Contribute(header, response.mutable_summary()->mutable_contribution());
      }
      faults_.change_summary.Make(response.mutable_summary());
      stream->Write(response);
      is_open = false;
    }
    return grpc::Status::OK;
  }

 private:
  // Counts only what is later than what was counted, as the service does.
  void Contribute(const v1::CalibrateHeader& header,
                  v1::ContributionResult* result) {
    const absl::MutexLock lock(&mutex_);
    uint64_t& last = sequences_[absl::StrCat(
        header.tensor().name().tensor(), "/", header.contribution().source())];
    result->set_duplicate(header.contribution().sequence() <= last);
    last = std::max(last, header.contribution().sequence());
    result->set_sequence(last);
  }

  Faults& faults_;
  absl::Mutex mutex_;
  // The last one of every tensor and source.
  std::map<std::string, uint64_t> sequences_ ABSL_GUARDED_BY(mutex_);
};

class FakeEncodingService final : public v1::EncodingService::Service {
 public:
  explicit FakeEncodingService(Faults* faults) : faults_(*faults) {}

  // 2,500 encodings in pages of at most 1,000.
  grpc::Status ListEncodings(grpc::ServerContext*,
                             const v1::ListEncodingsRequest* request,
                             v1::ListEncodingsResponse* response) override {
    if (faults_.exhausted_unary-- > 0) {
      return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED,
                          "OVERLOADED: too much", RetryDetails());
    }
    if (faults_.unavailable_unary-- > 0) {
      return grpc::Status(grpc::StatusCode::UNAVAILABLE,
                          "STORE_UNAVAILABLE: the store is away");
    }
    int first = 0;
    if (!request->page_token().empty())
      first = std::stoi(request->page_token());
    const int last =
        std::min(2500, first + std::min(1000, request->page_size()));
    for (int i = first; i < last; ++i) {
      response->add_encodings()->mutable_name()->set_tensor(absl::StrCat(i));
    }
    if (last < 2500) response->set_next_page_token(absl::StrCat(last));
    return grpc::Status::OK;
  }

  // Three tensors; the last message of a sweep is its summary.
  grpc::Status ComputeEncodings(
      grpc::ServerContext* context, const v1::ComputeEncodingsRequest* request,
      grpc::ServerWriter<v1::ComputeEncodingsResponse>* writer) override {
    if (faults_.unavailable_unary-- > 0) {
      return grpc::Status(grpc::StatusCode::UNAVAILABLE,
                          "STORE_UNAVAILABLE: the store is away");
    }
    for (int i = 0; i < 3; ++i) {
      v1::ComputeEncodingsResponse response;
      response.mutable_name()->set_tensor(absl::StrCat("t", i));
      response.mutable_name()->set_model(request->model());
      response.set_done_count(i + 1);
      response.set_total_count(3);
      writer->Write(response);
      if (i == 1 && faults_.break_after_two) {
        return grpc::Status(grpc::StatusCode::UNAVAILABLE,
                            "DRAINING: the server is about to stop");
      }
      while (i == 1 && faults_.silent && !context->IsCancelled()) {
        absl::SleepFor(absl::Milliseconds(1));
      }
    }
    return grpc::Status::OK;
  }

  grpc::Status Sweep(grpc::ServerContext*, const v1::SweepRequest* request,
                     grpc::ServerWriter<v1::SweepResponse>* writer) override {
    v1::SweepResponse response;
    response.mutable_name()->set_tensor("t");
    writer->Write(response);
    response.Clear();
    response.mutable_summary()->add_totals()->set_size_bytes(
        request->specs_size());
    writer->Write(response);
    return grpc::Status::OK;
  }

  // A mixture for each target, of the first options.
  grpc::Status ChooseMixture(grpc::ServerContext*,
                             const v1::ChooseMixtureRequest* request,
                             v1::ChooseMixtureResponse* response) override {
    if (faults_.unavailable_unary-- > 0) {
      return grpc::Status(grpc::StatusCode::UNAVAILABLE,
                          "DRAINING: the server is about to stop");
    }
    for (int i = 0; i < request->targets_size(); ++i) {
      v1::SweepMixture* const mixture = response->add_mixtures();
      for (const v1::MixtureTensor& tensor : request->tensors()) {
        mixture->add_choices()->set_tensor(tensor.tensor());
      }
    }
    return grpc::Status::OK;
  }

  grpc::Status GetStatistics(grpc::ServerContext*,
                             const v1::GetStatisticsRequest* request,
                             v1::GetStatisticsResponse* response) override {
    response->mutable_statistics()->set_count(7);
    if (request->with_state()) response->mutable_state()->set_version(1);
    return grpc::Status::OK;
  }

  // 2,500 entries in pages of at most 1,000.
  grpc::Status ListStatistics(grpc::ServerContext*,
                              const v1::ListStatisticsRequest* request,
                              v1::ListStatisticsResponse* response) override {
    const int first =
        request->page_token().empty() ? 0 : std::stoi(request->page_token());
    const int last =
        std::min(2500, first + std::min(1000, request->page_size()));
    for (int i = first; i < last; ++i) {
      response->add_entries()->set_tensor(absl::StrCat(i));
    }
    if (last < 2500) response->set_next_page_token(absl::StrCat(last));
    return grpc::Status::OK;
  }

  grpc::Status DeleteStatistics(grpc::ServerContext*,
                                const v1::DeleteStatisticsRequest* request,
                                v1::DeleteStatisticsResponse*) override {
    if (faults_.draining_changes-- > 0) return Draining();
    if (faults_.lost_answers-- > 0) {
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "Socket closed");
    }
    return request->source() == "rank-1"
               ? grpc::Status::OK
               : grpc::Status(grpc::StatusCode::NOT_FOUND,
                              "STATISTICS_NOT_FOUND: no such statistics");
  }

  grpc::Status GetEncoding(grpc::ServerContext*,
                           const v1::GetEncodingRequest* request,
                           v1::GetEncodingResponse* response) override {
    if (request->name().tensor() == "large") {
      *response->mutable_stored_encoding()->mutable_name() = request->name();
      response->mutable_stored_encoding()->mutable_encoding()->set_scale_code(
          std::string(static_cast<size_t>(faults_.large_encoding_bytes), 'x'));
      return grpc::Status::OK;
    }
    const absl::MutexLock lock(&mutex_);
    const auto found = encodings_.find(request->name().tensor());
    if (found == encodings_.end()) return NotFound();
    *response->mutable_stored_encoding() = found->second;
    faults_.change_stored.Make(response->mutable_stored_encoding());
    return grpc::Status::OK;
  }

  // Fills in the limits of the codes and the kind of zero points, as the
  // service does.
  grpc::Status PutEncoding(grpc::ServerContext*,
                           const v1::PutEncodingRequest* request,
                           v1::PutEncodingResponse* response) override {
    if (faults_.draining_changes-- > 0) return Draining();
    const absl::MutexLock lock(&mutex_);
    const std::string& tensor = request->name().tensor();
    const auto found = encodings_.find(tensor);
    const std::string etag =
        found == encodings_.end() ? "absent" : found->second.etag();
    if (!request->if_match().empty() && request->if_match() != etag) {
      return Mismatch(request->if_match(), etag);
    }
    v1::StoredEncoding& stored = encodings_[tensor];
    *stored.mutable_name() = request->name();
    *stored.mutable_encoding() = request->encoding();
    stored.mutable_encoding()->set_qmin(-128);
    stored.mutable_encoding()->set_qmax(127);
    if (request->encoding().real_zero_point_size() > 0) {
      stored.mutable_encoding()->set_zero_points_are_real(true);
    }
    stored.set_etag(absl::StrCat(++generation_));
    *response->mutable_stored_encoding() = stored;
    response->mutable_stored_encoding()->clear_encoding();
    faults_.change_stored.Make(response->mutable_stored_encoding());
    return Answered();
  }

  // Joins the scales, which are float32.
  grpc::Status WriteEncoding(
      grpc::ServerContext* context,
      grpc::ServerReader<v1::WriteEncodingRequest>* reader,
      v1::WriteEncodingResponse* response) override {
    v1::WriteEncodingRequest message;
    v1::PutEncodingRequest whole;
    std::string scales;
    while (reader->Read(&message)) {
      largest_message_bytes_ =
          std::max<size_t>(largest_message_bytes_, message.ByteSizeLong());
      if (message.has_name()) {
        *whole.mutable_name() = message.name();
        *whole.mutable_encoding() = message.encoding();
        whole.set_if_match(message.if_match());
      }
      scales += message.scales().scale();
    }
    Encoding* const encoding = whole.mutable_encoding();
    encoding->clear_scales_in_chunks();
    encoding->mutable_scale()->Resize(
        static_cast<int>(scales.size() / sizeof(float)), 0);
    std::memcpy(encoding->mutable_scale()->mutable_data(), scales.data(),
                scales.size());
    v1::PutEncodingResponse answer;
    const grpc::Status status = PutEncoding(context, &whole, &answer);
    response->mutable_stored_encoding()->Swap(answer.mutable_stored_encoding());
    return status;
  }

  size_t largest_message_bytes() const { return largest_message_bytes_; }

  grpc::Status DeleteEncoding(grpc::ServerContext*,
                              const v1::DeleteEncodingRequest* request,
                              v1::DeleteEncodingResponse*) override {
    if (faults_.draining_changes-- > 0) return Draining();
    const absl::MutexLock lock(&mutex_);
    const auto found = encodings_.find(request->name().tensor());
    if (found == encodings_.end()) return NotFound();
    if (!request->if_match().empty() &&
        request->if_match() != found->second.etag()) {
      return Mismatch(request->if_match(), found->second.etag());
    }
    encodings_.erase(found);
    return Answered();
  }

 private:
  static grpc::Status Draining() {
    return grpc::Status(grpc::StatusCode::UNAVAILABLE,
                        "DRAINING: the server is about to stop");
  }
  static grpc::Status NotFound() {
    return grpc::Status(grpc::StatusCode::NOT_FOUND,
                        "ENCODING_NOT_FOUND: no such encoding");
  }
  static grpc::Status Mismatch(const std::string& expected,
                               const std::string& got) {
    return grpc::Status(
        grpc::StatusCode::FAILED_PRECONDITION,
        absl::StrCat("ETAG_MISMATCH: expected ", expected, ", got ", got));
  }
  // Of what was done.
  grpc::Status Answered() {
    return faults_.lost_answers-- > 0
               ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "Socket closed")
               : grpc::Status::OK;
  }

  Faults& faults_;
  std::atomic<size_t> largest_message_bytes_{0};
  absl::Mutex mutex_;
  std::map<std::string, v1::StoredEncoding> encodings_ ABSL_GUARDED_BY(mutex_);
  int generation_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Listens on loopback until it is destroyed.
class FakeServer {
 public:
  // `address` may name a unix socket; by default a free port is taken.
  explicit FakeServer(const std::string& address = "127.0.0.1:0") {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
    builder.SetMaxReceiveMessageSize(16 << 20);
    // What a client may send ahead would grow with the speed of the machine.
    builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    builder.RegisterService(&quantization_);
    builder.RegisterService(&encodings_);
    server_ = builder.BuildAndStart();
    target_ = absl::StartsWith(address, "unix:")
                  ? address
                  : absl::StrCat("127.0.0.1:", port);
  }

  const std::string& target() const { return target_; }
  Faults& faults() { return faults_; }
  const FakeEncodingService& encodings() const { return encodings_; }
  void SetServing(bool serving) {
    server_->GetHealthCheckService()->SetServingStatus(serving);
  }
  // Breaks all calls.
  void Stop() { server_->Shutdown(std::chrono::system_clock::now()); }

 private:
  Faults faults_;
  FakeQuantizationService quantization_{&faults_};
  FakeEncodingService encodings_{&faults_};
  std::unique_ptr<grpc::Server> server_;
  std::string target_;
};

}  // namespace quantd

#endif  // QUANTD_TESTS_CLIENT_CPP_FAKE_SERVICE_H_
