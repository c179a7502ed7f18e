#include "client/cpp/client.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/answer_check.h"
#include "client/cpp/client_options.h"
#include "client/cpp/credentials.h"
#include "client/cpp/element_bytes.h"
#include "client/cpp/errors.h"
#include "client/cpp/probe.h"
#include "client/cpp/retry_policy.h"
#include "client/cpp/retrying_stream.h"
#include "client/cpp/scale_chunks.h"
#include "client/cpp/scale_feed.h"
#include "client/cpp/scales.h"
#include "client/cpp/shared_buffers.h"
#include "client/cpp/shared_memory.h"
#include "client/cpp/target.h"
#include "client/cpp/tensor.h"
#include "client/cpp/tensor_stream.h"
#include "grpc/grpc.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/channel_arguments.h"
#include "grpcpp/support/client_callback.h"
#include "grpcpp/support/slice.h"
#include "quantd/v1/encoding_service.grpc.pb.h"
#include "quantd/v1/encoding_service.pb.h"

namespace quantd {
namespace {

// A frame of HTTP/2 that the server may send: a whole answer of a chunk.
constexpr int kFrameBytes = 2 << 20;
constexpr int64_t kChunkUnitBytes = 64;
constexpr int64_t kMaxChunkBytes = 32 << 20;
// The most that a page may hold.
constexpr int kPageSize = 1000;

// In turn over the addresses that say SERVING for the whole server.
constexpr char kBalancingConfig[] =
    R"({"loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": ""}})";

constexpr char kQuantizeMethod[] = "/quantd.v1.QuantizationService/Quantize";
constexpr char kDequantizeMethod[] =
    "/quantd.v1.QuantizationService/Dequantize";
constexpr char kCalibrateMethod[] = "/quantd.v1.QuantizationService/Calibrate";
constexpr char kEvaluateMethod[] = "/quantd.v1.QuantizationService/Evaluate";
constexpr char kHealthMethod[] = "/grpc.health.v1.Health/Check";

std::chrono::system_clock::time_point Deadline(absl::Duration timeout) {
  return absl::ToChronoTime(absl::Now() + timeout);
}

// The time for a call that sends so many bytes: the timeout for every 16 MiB
// begun.
absl::Duration TimeoutFor(size_t size_bytes, const ClientOptions& options) {
  return (1 + static_cast<int64_t>(size_bytes >> 24)) * options.timeout;
}

template <typename Job, typename Stream>
auto One(std::unique_ptr<Stream> stream, const Job& job) {
  stream->SendLast(job);
  return stream->Receive();
}

// Calls `page(token, &next_token)` until there is no next page.
template <typename Page>
absl::Status ForAllPages(Page&& page) {
  std::string token;
  while (true) {
    std::string next;
    const absl::Status status = page(token, &next);
    if (!status.ok()) return status;
    if (next.empty()) return absl::OkStatus();
    // Otherwise a faulty server would keep the caller here for ever.
    if (next == token) {
      return ResponseMalformedError("a page whose next page is itself");
    }
    token = std::move(next);
  }
}

// The answer, if it is of that name.
// Errors: RESPONSE_MALFORMED.
absl::StatusOr<v1::StoredEncoding> StoredUnder(const TensorName& name,
                                               v1::StoredEncoding stored) {
  const absl::Status status = internal::CheckStoredName(name, stored.name());
  if (!status.ok()) return status;
  return stored;
}

// True when `stored` is what the service makes of `put`: that fills in what was
// left out, and counts the degenerate scales itself.
bool IsStoredFrom(const Encoding& put, const Encoding& stored) {
  Encoding whole = put;
  if (!put.has_qmin()) whole.set_qmin(stored.qmin());
  if (!put.has_qmax()) whole.set_qmax(stored.qmax());
  // The service answers many scales as codes alone.
  if (put.scale().empty() || !stored.scale_code().empty()) {
    *whole.mutable_scale() = stored.scale();
  }
  if (put.scale_shape().empty()) {
    *whole.mutable_scale_shape() = stored.scale_shape();
  }
  if (put.scale_type() == v1::SCALE_TYPE_UNSPECIFIED) {
    whole.set_scale_type(stored.scale_type());
  }
  if (put.real_zero_point_size() > 0) whole.set_zero_points_are_real(true);
  whole.set_degenerate_count(stored.degenerate_count());
  return whole.SerializeAsString() == stored.SerializeAsString();
}

// True if an encoding goes in chunks, as it may be too large for one message.
// The server is to refuse a format that is not known, and scales that are not
// there as they are stored.
bool IsLarge(const Encoding& encoding) {
  constexpr int64_t kMostScalesInMessage = 1 << 16;
  const bool has_codes = ScaleSizeBytes(ScaleTypeOf(encoding)) == 1;
  const int64_t count = has_codes
                            ? static_cast<int64_t>(encoding.scale_code().size())
                            : encoding.scale_size();
  return count > kMostScalesInMessage && GetFormatInfo(encoding.format()).ok();
}

template <typename Field, typename Item>
void AppendAll(Field* field, std::vector<Item>* items) {
  for (Item& item : *field) items->push_back(std::move(item));
}

// Reads the answers of one call, one ahead of the caller. Thread-safe.
template <typename Response>
class ResponseReader final : public grpc::ClientReadReactor<Response> {
 public:
  enum class Outcome { kResponse, kFinished, kTimeout };

  // Requires: the call was set up with this reactor.
  void Start() {
    // Otherwise the call may finish, and take no more reads, before the last
    // answer is passed on.
    this->AddHold();
    this->StartRead(&read_);
    this->StartCall();
  }

  // The next answer; or the call has finished, with its status; or neither
  // within `timeout`.
  Outcome Next(absl::Duration timeout, Response* response)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto is_ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return has_response_ || is_finished_;
    };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&is_ready), timeout)) {
      return Outcome::kTimeout;
    }
    if (!has_response_) return Outcome::kFinished;
    response->Swap(&read_);
    has_response_ = false;
    this->StartRead(&read_);
    return Outcome::kResponse;
  }

  // Waits for the call to finish; what still comes is dropped.
  grpc::Status Finish() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    drops_ = true;
    if (has_response_) {
      has_response_ = false;
      this->StartRead(&read_);
    }
    mutex_.Await(absl::Condition(&is_finished_));
    return status_;
  }

  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_) {
    if (!ok) {
      this->RemoveHold();
      return;
    }
    absl::MutexLock lock(&mutex_);
    if (drops_) {
      this->StartRead(&read_);
    } else {
      has_response_ = true;
    }
  }

  void OnDone(const grpc::Status& status) override ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    status_ = status;
    is_finished_ = true;
  }

 private:
  absl::Mutex mutex_;
  // gRPC's while a read is under way, which is while has_response_ is false.
  Response read_;
  bool has_response_ ABSL_GUARDED_BY(mutex_) = false;
  bool drops_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_finished_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

// Otherwise the end of the last client shuts gRPC down, which may wait 10 s for
// a poll of its own to end.
void KeepGrpcRunning() {
  static const bool is_kept = [] {
    grpc_init();
    return true;
  }();
  static_cast<void>(is_kept);
}

}  // namespace

struct Client::Connection {
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::EncodingService::Stub> stub;

  // One attempt; see Client::WriteEncoding.
  grpc::Status WriteEncoding(
      grpc::ClientContext* context, const TensorName& name,
      const Encoding& outline, absl::string_view if_match,
      absl::FunctionRef<bool(v1::ScaleChunk* chunk)> next,
      v1::WriteEncodingResponse* response) const {
    const std::unique_ptr<grpc::ClientWriter<v1::WriteEncodingRequest>> writer =
        stub->WriteEncoding(context, response);
    v1::WriteEncodingRequest message;
    *message.mutable_name() = name;
    *message.mutable_encoding() = outline;
    message.mutable_encoding()->set_scales_in_chunks(true);
    message.set_if_match(std::string(if_match));
    while (writer->Write(message)) {
      message.Clear();
      if (!next(message.mutable_scales())) break;
    }
    writer->WritesDone();
    return writer->Finish();
  }
};

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(ClientOptions options) {
  absl::StatusOr<std::string> target = ParseTarget(options.target);
  if (!target.ok()) return target.status();
  options.target = *std::move(target);
  if (options.chunk_bytes < kChunkUnitBytes ||
      options.chunk_bytes > kMaxChunkBytes) {
    return ArgumentInvalidError(
        absl::StrCat("expected chunks of ", kChunkUnitBytes, " to ",
                     kMaxChunkBytes, " bytes, got ", options.chunk_bytes));
  }
  if (options.timeout <= absl::ZeroDuration()) {
    return ArgumentInvalidError("expected a timeout above 0");
  }
  if (options.max_retries < 0) {
    return ArgumentInvalidError("expected retries of at least 0");
  }
  if (options.retry_for < absl::ZeroDuration()) {
    return ArgumentInvalidError("expected a time for retries of at least 0");
  }
  if (options.deadline <= absl::ZeroDuration()) {
    return ArgumentInvalidError("expected a deadline above 0");
  }
  if (options.part_bytes < options.chunk_bytes) {
    return ArgumentInvalidError(
        absl::StrCat("expected parts of at least a chunk, ",
                     options.chunk_bytes, " bytes, got ", options.part_bytes));
  }
  // A whole number of elements of every type.
  options.chunk_bytes -= options.chunk_bytes % kChunkUnitBytes;
  // The way that gRPC lists addresses.
  options.balance = options.balance || absl::StrContains(options.target, ',');
  std::vector<std::unique_ptr<internal::InterceptorFactory>> interceptors;
  if (!options.token_file.empty()) {
    if (!options.tls.has_value() && !internal::IsLocalTarget(options.target)) {
      return ArgumentInvalidError(absl::StrCat(
          "expected TLS for a token to leave the machine, got plaintext to \"",
          options.target, "\""));
    }
    absl::StatusOr<std::unique_ptr<internal::InterceptorFactory>> sender =
        internal::SendTokenOf(options.token_file);
    if (!sender.ok()) return sender.status();
    interceptors.push_back(*std::move(sender));
  }
  std::shared_ptr<grpc::ChannelCredentials> credentials =
      grpc::InsecureChannelCredentials();
  if (options.tls.has_value()) {
    absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> tls =
        internal::TlsCredentials(*options.tls);
    if (!tls.ok()) return tls.status();
    credentials = *std::move(tls);
  }
  KeepGrpcRunning();
  grpc::ChannelArguments arguments;
  // How large an encoding may be is the server's to say; gRPC's default would
  // stop at 4 MiB.
  arguments.SetMaxReceiveMessageSize(-1);
  // A connection per client: that is what several clients are for.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Retries are ours; gRPC's would buffer what it sends.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
  // By default a server that is back would be left alone for up to two minutes.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  // This one is the time to connect in.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);
  // A machine that is gone without a word.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  if (options.balance) arguments.SetServiceConfigJSON(kBalancingConfig);
  // Calls that stay on the machine, and tokens in them, go through no proxy.
  if (internal::IsLocalTarget(options.target)) {
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  }
  auto connection = std::make_unique<Connection>();
  connection->channel =
      interceptors.empty()
          ? grpc::CreateCustomChannel(options.target, credentials, arguments)
          : grpc::experimental::CreateCustomChannelWithInterceptors(
                options.target, credentials, arguments,
                std::move(interceptors));
  connection->stub = v1::EncodingService::NewStub(connection->channel);
  return std::unique_ptr<Client>(
      new Client(std::move(options), std::move(connection)));
}

Client::Client(ClientOptions options, std::unique_ptr<Connection> connection)
    : options_(std::move(options)),
      connection_(std::move(connection)),
      shared_buffers_(std::make_shared<internal::SharedBuffers>()) {}

Client::~Client() = default;

std::unique_ptr<QuantizeStream> Client::OpenQuantize() {
  return std::make_unique<QuantizeStream>(
      std::make_unique<internal::RetryingStream>(
          connection_->channel, kQuantizeMethod, options_, shared_buffers_));
}

std::unique_ptr<DequantizeStream> Client::OpenDequantize() {
  return std::make_unique<DequantizeStream>(
      std::make_unique<internal::RetryingStream>(
          connection_->channel, kDequantizeMethod, options_, shared_buffers_));
}

std::unique_ptr<CalibrateStream> Client::OpenCalibrate() {
  return std::make_unique<CalibrateStream>(
      std::make_unique<internal::RetryingStream>(
          connection_->channel, kCalibrateMethod, options_, shared_buffers_));
}

std::unique_ptr<EvaluateStream> Client::OpenEvaluate() {
  return std::make_unique<EvaluateStream>(
      std::make_unique<internal::RetryingStream>(
          connection_->channel, kEvaluateMethod, options_, shared_buffers_));
}

absl::StatusOr<std::unique_ptr<SharedBuffer>> Client::AllocateShared(
    uint64_t size_bytes) {
  return shared_buffers_->Allocate(options_, size_bytes);
}

absl::StatusOr<QuantizeResult> Client::Quantize(const QuantizeJob& job) {
  return One(OpenQuantize(), job);
}

absl::StatusOr<DequantizeResult> Client::Dequantize(const DequantizeJob& job) {
  return One(OpenDequantize(), job);
}

absl::StatusOr<CalibrateResult> Client::Calibrate(const CalibrateJob& job) {
  return One(OpenCalibrate(), job);
}

absl::StatusOr<EvaluateResult> Client::Evaluate(const EvaluateJob& job) {
  return One(OpenEvaluate(), job);
}

template <typename Attempt>
absl::Status Client::Retry(absl::Duration most, Attempt attempt,
                           bool* may_repeat) {
  absl::BitGen random;
  internal::RetryPolicy policy(options_, &random);
  const absl::Time deadline = absl::Now() + options_.deadline;
  for (internal::Retries retries;; retries.Add()) {
    grpc::ClientContext context;
    const absl::Duration timeout = std::min(most, deadline - absl::Now());
    context.set_deadline(Deadline(timeout));
    const absl::Status status =
        internal::StatusOf(attempt(&context), options_, timeout);
    if (!policy.Pause(status, &retries, deadline)) {
      return WithAttempts(retries.Explained(status), retries.count + 1);
    }
    // A server that is about to stop says so before it begins.
    if (may_repeat != nullptr && absl::IsUnavailable(status) &&
        ErrorReason(status) != "DRAINING") {
      *may_repeat = true;
    }
  }
}

template <typename Method, typename Request, typename Response>
absl::Status Client::Call(Method method, const Request& request,
                          Response* response, bool* may_repeat) {
  return Retry(
      options_.timeout,
      [&](grpc::ClientContext* context) {
        response->Clear();
        return (connection_->stub.get()->*method)(context, request, response);
      },
      may_repeat);
}

template <typename Method, typename Request, typename Response>
absl::Status Client::CallDelete(Method method, const Request& request,
                                Response* response) {
  bool may_repeat = false;
  const absl::Status status = Call(method, request, response, &may_repeat);
  if (may_repeat && absl::IsNotFound(status)) return absl::OkStatus();
  return status;
}

absl::StatusOr<std::vector<v1::StoredEncoding>> Client::ListEncodings(
    absl::string_view model, absl::string_view revision) {
  std::vector<v1::StoredEncoding> encodings;
  const absl::Status status =
      ForAllPages([&](const std::string& token, std::string* next) {
        v1::ListEncodingsRequest request;
        request.set_model(std::string(model));
        request.set_revision(std::string(revision));
        request.set_page_size(kPageSize);
        request.set_page_token(token);
        v1::ListEncodingsResponse response;
        const absl::Status page =
            Call(&v1::EncodingService::Stub::ListEncodings, request, &response);
        AppendAll(response.mutable_encodings(), &encodings);
        *next = response.next_page_token();
        return page;
      });
  if (!status.ok()) return status;
  return encodings;
}

namespace {

// Joins the answers of one ReadEncoding.
class EncodingPieces {
 public:
  explicit EncodingPieces(const TensorName& name) : name_(name) {}

  // Errors: RESPONSE_MALFORMED.
  absl::Status Add(const v1::ReadEncodingResponse& piece) {
    if (piece.has_stored_encoding() == has_stored_) {
      return ResponseMalformedError("expected the encoding first, and once");
    }
    if (!has_stored_) {
      has_stored_ = true;
      stored_ = piece.stored_encoding();
      const absl::Status status =
          internal::CheckStoredName(name_, stored_.name());
      if (!status.ok()) return status;
      if (!GetFormatInfo(stored_.encoding().format()).ok()) {
        return ResponseMalformedError("the encoding is of an unknown format");
      }
    }
    const Encoding& encoding = stored_.encoding();
    const v1::ScaleChunk& chunk = piece.scales();
    const auto scale_bytes =
        static_cast<size_t>(ScaleSizeBytes(ScaleTypeOf(encoding)));
    const absl::StatusOr<uint64_t> count =
        internal::CountOfChunk(encoding, chunk);
    if (!count.ok()) return count.status();
    if (*count > 0 && chunk.first() != scale_.size() / scale_bytes) {
      return ResponseMalformedError(
          absl::StrCat("scales from ", chunk.first(), " came, expected them ",
                       "from ", scale_.size() / scale_bytes));
    }
    scale_ += chunk.scale();
    outer_scale_ += chunk.outer_scale();
    const std::vector<int32_t> zero_point =
        internal::WidenZeroPoints(encoding, BytesOf(chunk.zero_point()));
    zero_point_.insert(zero_point_.end(), zero_point.begin(), zero_point.end());
    return absl::OkStatus();
  }

  // Errors: RESPONSE_MALFORMED.
  absl::StatusOr<v1::StoredEncoding> Join() {
    const Encoding& encoding = stored_.encoding();
    const auto count =
        static_cast<uint64_t>(scale_.size()) /
        static_cast<uint64_t>(ScaleSizeBytes(ScaleTypeOf(encoding)));
    if (!has_stored_ || count != stored_.scale_count()) {
      return ResponseMalformedError(absl::StrCat(
          "expected ", stored_.scale_count(), " scales, got ", count));
    }
    *stored_.mutable_encoding() = WithScales(
        encoding,
        {BytesOf(scale_), BytesOf(zero_point_), BytesOf(outer_scale_)});
    return std::move(stored_);
  }

 private:
  const TensorName& name_;
  v1::StoredEncoding stored_;
  bool has_stored_ = false;
  std::string scale_;
  std::vector<int32_t> zero_point_;
  std::string outer_scale_;
};

}  // namespace

absl::StatusOr<v1::StoredEncoding> Client::GetEncoding(const TensorName& name) {
  v1::GetEncodingRequest request;
  *request.mutable_name() = name;
  v1::GetEncodingResponse response;
  const absl::Status status =
      Call(&v1::EncodingService::Stub::GetEncoding, request, &response);
  if (ErrorReason(status) == "SCALE_COUNT_LIMIT") {
    EncodingPieces pieces(name);
    absl::Status broken;
    const absl::Status read =
        ReadEncoding(name, [&](const v1::ReadEncodingResponse& piece) {
          broken = pieces.Add(piece);
          return broken.ok();
        });
    if (!broken.ok()) return broken;
    if (!read.ok()) return read;
    return pieces.Join();
  }
  if (!status.ok()) return status;
  return StoredUnder(name, std::move(*response.mutable_stored_encoding()));
}

absl::StatusOr<v1::StoredEncoding> Client::PutEncoding(
    const TensorName& name, const Encoding& encoding,
    absl::string_view if_match) {
  v1::PutEncodingRequest request;
  v1::PutEncodingResponse response;
  bool may_repeat = false;
  absl::Status status;
  if (IsLarge(encoding)) {
    status = PutInChunks(name, encoding, if_match,
                         response.mutable_stored_encoding(), &may_repeat);
  } else {
    *request.mutable_name() = name;
    *request.mutable_encoding() = encoding;
    request.set_if_match(std::string(if_match));
    status = Call(&v1::EncodingService::Stub::PutEncoding, request, &response,
                  &may_repeat);
  }
  if (may_repeat && ErrorReason(status) == "ETAG_MISMATCH") {
    absl::StatusOr<v1::StoredEncoding> stored = GetEncoding(name);
    if (stored.ok() && IsStoredFrom(encoding, stored->encoding())) {
      stored->clear_encoding();
      return stored;
    }
  }
  if (!status.ok()) return status;
  return StoredUnder(name, std::move(*response.mutable_stored_encoding()));
}

absl::Status Client::PutInChunks(const TensorName& name,
                                 const Encoding& encoding,
                                 absl::string_view if_match,
                                 v1::StoredEncoding* stored, bool* may_repeat) {
  const ScaleBuffers scales = TakeScales(encoding);
  const Encoding outline =
      WithoutScales(encoding, scales.zero_point.size_bytes > 0);
  const auto scale_bytes =
      static_cast<uint64_t>(ScaleSizeBytes(ScaleTypeOf(encoding)));
  const uint64_t count = scales.scale.size_bytes / scale_bytes;
  if (scale_bytes == sizeof(uint16_t)) {
    const Encoding taken = WithScales(outline, scales.view());
    if (!std::equal(encoding.scale().begin(), encoding.scale().end(),
                    taken.scale().begin())) {
      return ArgumentInvalidError(
          "expected scales that are numbers of their scale type");
    }
  }
  if (scales.zero_point.size_bytes > 0 &&
      scales.zero_point.size_bytes != count * sizeof(int32_t)) {
    return ArgumentInvalidError(absl::StrCat(
        "expected ", count, " zero points, got ",
        encoding.zero_point_size() + encoding.real_zero_point_size()));
  }
  v1::WriteEncodingResponse response;
  const absl::Status status = Retry(
      TimeoutFor(scales.scale.size_bytes + scales.zero_point.size_bytes,
                 options_),
      [&](grpc::ClientContext* context) {
        internal::ScalePieces pieces(outline, scales.view());
        response.Clear();
        return connection_->WriteEncoding(
            context, name, outline, if_match,
            [&](v1::ScaleChunk* chunk) {
              std::optional<v1::ScaleChunk> next = pieces.Next(count);
              if (next.has_value()) chunk->Swap(&*next);
              return next.has_value();
            },
            &response);
      },
      may_repeat);
  stored->Swap(response.mutable_stored_encoding());
  return status;
}

absl::Status Client::DeleteEncoding(const TensorName& name,
                                    absl::string_view if_match) {
  v1::DeleteEncodingRequest request;
  *request.mutable_name() = name;
  request.set_if_match(std::string(if_match));
  v1::DeleteEncodingResponse response;
  return CallDelete(&v1::EncodingService::Stub::DeleteEncoding, request,
                    &response);
}

absl::StatusOr<std::vector<v1::Model>> Client::ListModels() {
  std::vector<v1::Model> models;
  const absl::Status status =
      ForAllPages([&](const std::string& token, std::string* next) {
        v1::ListModelsRequest request;
        request.set_page_size(kPageSize);
        request.set_page_token(token);
        v1::ListModelsResponse response;
        const absl::Status page =
            Call(&v1::EncodingService::Stub::ListModels, request, &response);
        AppendAll(response.mutable_models(), &models);
        *next = response.next_page_token();
        return page;
      });
  if (!status.ok()) return status;
  return models;
}

absl::StatusOr<std::vector<v1::Revision>> Client::ListRevisions(
    absl::string_view model) {
  std::vector<v1::Revision> revisions;
  const absl::Status status =
      ForAllPages([&](const std::string& token, std::string* next) {
        v1::ListRevisionsRequest request;
        request.set_model(std::string(model));
        request.set_page_size(kPageSize);
        request.set_page_token(token);
        v1::ListRevisionsResponse response;
        const absl::Status page =
            Call(&v1::EncodingService::Stub::ListRevisions, request, &response);
        AppendAll(response.mutable_revisions(), &revisions);
        *next = response.next_page_token();
        return page;
      });
  if (!status.ok()) return status;
  return revisions;
}

template <typename Response, typename Start>
absl::Status Client::ReadAll(
    Start start, absl::FunctionRef<bool(const Response&)> on_response) {
  using Reader = ResponseReader<Response>;
  absl::BitGen random;
  internal::RetryPolicy policy(options_, &random);
  const absl::Time deadline = absl::Now() + options_.deadline;
  bool has_answer = false;
  for (internal::Retries retries;; retries.Add()) {
    grpc::ClientContext context;
    if (deadline != absl::InfiniteFuture()) {
      context.set_deadline(absl::ToChronoTime(deadline));
    }
    Reader reader;
    start(connection_->stub->async(), &context, &reader);
    reader.Start();
    Response response;
    auto outcome = Reader::Outcome::kResponse;
    bool is_wanted = true;
    while (is_wanted) {
      outcome = reader.Next(options_.timeout, &response);
      if (outcome != Reader::Outcome::kResponse) break;
      has_answer = true;
      is_wanted = on_response(response);
    }
    if (outcome != Reader::Outcome::kFinished) context.TryCancel();
    const absl::Status status =
        internal::StatusOf(reader.Finish(), options_, options_.timeout);
    if (!is_wanted) return absl::OkStatus();
    if (outcome == Reader::Outcome::kTimeout) {
      return TimeoutError(options_.target, options_.timeout);
    }
    if (has_answer || !policy.Pause(status, &retries, deadline)) {
      return WithAttempts(retries.Explained(status), retries.count + 1);
    }
  }
}

absl::Status Client::ComputeEncodings(
    const v1::ComputeEncodingsRequest& request,
    absl::FunctionRef<bool(const v1::ComputeEncodingsResponse&)> on_tensor) {
  return ReadAll<v1::ComputeEncodingsResponse>(
      [&request](auto* stub, auto* context, auto* reader) {
        stub->ComputeEncodings(context, &request, reader);
      },
      on_tensor);
}

absl::StatusOr<std::vector<v1::ComputeEncodingsResponse>>
Client::ComputeEncodings(const v1::ComputeEncodingsRequest& request) {
  std::vector<v1::ComputeEncodingsResponse> all;
  const absl::Status status = ComputeEncodings(
      request, [&all](const v1::ComputeEncodingsResponse& response) {
        all.push_back(response);
        return true;
      });
  if (!status.ok()) return status;
  return all;
}

absl::Status Client::Sweep(
    const v1::SweepRequest& request,
    absl::FunctionRef<bool(const v1::SweepResponse&)> on_tensor) {
  return ReadAll<v1::SweepResponse>(
      [&request](auto* stub, auto* context, auto* reader) {
        stub->Sweep(context, &request, reader);
      },
      on_tensor);
}

absl::StatusOr<std::vector<v1::SweepResponse>> Client::Sweep(
    const v1::SweepRequest& request) {
  std::vector<v1::SweepResponse> all;
  const absl::Status status =
      Sweep(request, [&all](const v1::SweepResponse& response) {
        all.push_back(response);
        return true;
      });
  if (!status.ok()) return status;
  return all;
}

absl::StatusOr<v1::ChooseMixtureResponse> Client::ChooseMixture(
    const v1::ChooseMixtureRequest& request) {
  v1::ChooseMixtureResponse response;
  const absl::Status status =
      Call(&v1::EncodingService::Stub::ChooseMixture, request, &response);
  if (!status.ok()) return status;
  return response;
}

absl::Status Client::ReadEncoding(
    const TensorName& name,
    absl::FunctionRef<bool(const v1::ReadEncodingResponse&)> on_piece) {
  v1::ReadEncodingRequest request;
  *request.mutable_name() = name;
  return ReadAll<v1::ReadEncodingResponse>(
      [&request](auto* stub, auto* context, auto* reader) {
        stub->ReadEncoding(context, &request, reader);
      },
      on_piece);
}

absl::StatusOr<v1::StoredEncoding> Client::WriteEncoding(
    const TensorName& name, const Encoding& outline, absl::string_view if_match,
    absl::FunctionRef<bool(v1::ScaleChunk* chunk)> next) {
  const absl::Duration timeout = options_.deadline;
  grpc::ClientContext context;
  context.set_deadline(Deadline(timeout));
  v1::WriteEncodingResponse response;
  const absl::Status status =
      internal::StatusOf(connection_->WriteEncoding(&context, name, outline,
                                                    if_match, next, &response),
                         options_, timeout);
  if (!status.ok()) return status;
  return StoredUnder(name, std::move(*response.mutable_stored_encoding()));
}

absl::StatusOr<v1::PublishRevisionResponse> Client::PublishRevision(
    absl::string_view model, absl::string_view source,
    absl::string_view revision, bool keep_others) {
  v1::PublishRevisionRequest request;
  request.set_model(std::string(model));
  request.set_source_revision(std::string(source));
  request.set_revision(std::string(revision));
  request.set_keep_others(keep_others);
  v1::PublishRevisionResponse response;
  const absl::Status status =
      Call(&v1::EncodingService::Stub::PublishRevision, request, &response);
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::DeleteRevisionResponse> Client::DeleteRevision(
    absl::string_view model, absl::string_view revision) {
  v1::DeleteRevisionRequest request;
  request.set_model(std::string(model));
  request.set_revision(std::string(revision));
  v1::DeleteRevisionResponse response;
  const absl::Status status = CallDelete(
      &v1::EncodingService::Stub::DeleteRevision, request, &response);
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::DeleteModelResponse> Client::DeleteModel(
    absl::string_view model) {
  v1::DeleteModelRequest request;
  request.set_model(std::string(model));
  v1::DeleteModelResponse response;
  const absl::Status status =
      CallDelete(&v1::EncodingService::Stub::DeleteModel, request, &response);
  if (!status.ok()) return status;
  return response;
}

absl::Status Client::ExportEncodings(
    const v1::ExportEncodingsRequest& request,
    absl::FunctionRef<bool(const v1::ExportEncodingsResponse&)> on_piece) {
  return ReadAll<v1::ExportEncodingsResponse>(
      [&request](auto* stub, auto* context, auto* reader) {
        stub->ExportEncodings(context, &request, reader);
      },
      on_piece);
}

absl::StatusOr<v1::ImportEncodingsResponse> Client::ImportEncodings(
    v1::ImportEncodingsRequest request, absl::string_view data) {
  constexpr size_t kPieceBytes = size_t{1} << 20;
  constexpr int kHintsOfMessage = 1000;
  // Hints may be many: they are spread over the messages.
  google::protobuf::RepeatedPtrField<v1::TensorHint> hints;
  hints.Swap(request.mutable_hints());
  v1::ImportEncodingsResponse response;
  const absl::Status status = Retry(
      TimeoutFor(data.size(), options_), [&](grpc::ClientContext* context) {
        response.Clear();
        const std::unique_ptr<grpc::ClientWriter<v1::ImportEncodingsRequest>>
            writer = connection_->stub->ImportEncodings(context, &response);
        v1::ImportEncodingsRequest message = request;
        int hint = 0;
        size_t offset = 0;
        bool is_taken = true;
        do {
          const int last_hint = std::min(hint + kHintsOfMessage, hints.size());
          for (; hint < last_hint; ++hint) *message.add_hints() = hints[hint];
          const absl::string_view piece =
              data.substr(std::min(offset, data.size()), kPieceBytes);
          message.set_data(piece.data(), piece.size());
          offset += piece.size();
          is_taken = writer->Write(message);
          message.Clear();
        } while (is_taken && (offset < data.size() || hint < hints.size()));
        writer->WritesDone();
        return writer->Finish();
      });
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::GetStatisticsResponse> Client::GetStatistics(
    const TensorName& name, bool with_state, bool per_tensor,
    bool with_moments) {
  v1::GetStatisticsRequest request;
  *request.mutable_name() = name;
  request.set_with_state(with_state);
  request.set_per_tensor(per_tensor);
  request.set_with_moments(with_moments);
  v1::GetStatisticsResponse response;
  const absl::Status status =
      Call(&v1::EncodingService::Stub::GetStatistics, request, &response);
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<std::vector<v1::StatisticsEntry>> Client::ListStatistics(
    absl::string_view model, absl::string_view revision) {
  std::vector<v1::StatisticsEntry> entries;
  const absl::Status status =
      ForAllPages([&](const std::string& token, std::string* next) {
        v1::ListStatisticsRequest request;
        request.set_model(std::string(model));
        request.set_revision(std::string(revision));
        request.set_page_size(kPageSize);
        request.set_page_token(token);
        v1::ListStatisticsResponse response;
        const absl::Status page = Call(
            &v1::EncodingService::Stub::ListStatistics, request, &response);
        AppendAll(response.mutable_entries(), &entries);
        *next = response.next_page_token();
        return page;
      });
  if (!status.ok()) return status;
  return entries;
}

absl::Status Client::DeleteStatistics(const TensorName& name,
                                      absl::string_view source) {
  v1::DeleteStatisticsRequest request;
  *request.mutable_name() = name;
  request.set_source(std::string(source));
  v1::DeleteStatisticsResponse response;
  return CallDelete(&v1::EncodingService::Stub::DeleteStatistics, request,
                    &response);
}

absl::StatusOr<v1::GetServerInfoResponse> Client::GetServerInfo() {
  v1::GetServerInfoResponse response;
  const absl::Status status = Call(&v1::EncodingService::Stub::GetServerInfo,
                                   v1::GetServerInfoRequest(), &response);
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<Client::Health> Client::CheckHealth(absl::string_view service) {
  // grpc.health.v1.HealthCheckRequest {string service = 1}, and back
  // HealthCheckResponse {ServingStatus status = 1}: Debian ships no stub.
  if (service.size() > 127) {
    return ArgumentInvalidError("expected a service of at most 127 bytes");
  }
  std::string bytes;
  if (!service.empty()) {
    bytes.push_back(0x0A);
    bytes.push_back(static_cast<char>(service.size()));
    bytes.append(service.data(), service.size());
  }
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  grpc::Status call_status;
  grpc::ClientContext context;
  context.set_deadline(Deadline(options_.timeout));
  grpc::GenericStub stub(connection_->channel);
  absl::Notification done;
  stub.UnaryCall(&context, kHealthMethod, grpc::StubOptions(), &request,
                 &response, [&](grpc::Status status) {
                   call_status = std::move(status);
                   done.Notify();
                 });
  done.WaitForNotification();
  const absl::Status status =
      internal::StatusOf(call_status, options_, options_.timeout);
  if (absl::IsNotFound(status)) return Health::kUnknown;
  if (!status.ok()) return status;
  std::string answer;
  std::vector<grpc::Slice> slices;
  if (!response.Dump(&slices).ok()) {
    return ResponseMalformedError("the health status could not be read");
  }
  for (const grpc::Slice& piece : slices) {
    answer.append(reinterpret_cast<const char*>(piece.begin()), piece.size());
  }
  // The default, 0, is not on the wire.
  if (answer.empty()) return Health::kUnknown;
  if (answer.size() != 2 || answer[0] != 0x08) {
    return ResponseMalformedError("expected a health status");
  }
  switch (answer[1]) {
    case 1:
      return Health::kServing;
    case 2:
      return Health::kNotServing;
    default:
      return Health::kUnknown;
  }
}

}  // namespace quantd
