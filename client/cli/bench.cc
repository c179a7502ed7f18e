#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cli/tensor_options.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/jobs/spec_options.h"
#include "client/models/model_sweep.h"
#include "client/models/spec_syntax.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

constexpr int64_t kRowElements = 4096;

struct BenchOptions {
  std::string operation = "quantize";
  int streams = 1;
  int connections = 1;
  int in_flight = 1;
  int candidates = 1;
  std::string metrics = "all";
  bool shared_memory = false;
  int64_t chunk_bytes = 1 << 20;
  int64_t tensor_bytes = 16 << 20;
  double duration_seconds = 5;
  double warmup_seconds = 0.5;
  int64_t server_pid = 0;
  jobs::SpecOptions spec;
};

// User and system time of this process in seconds.
double ClientCpuSeconds() {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const struct timeval& time) {
    return static_cast<double>(time.tv_sec) +
           static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// User and system time of a process from /proc/PID/stat; negative when it can
// not be read. Fields 14 and 15, counted behind the name in parentheses, which
// may itself have spaces.
double ProcessCpuSeconds(int64_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  if (!std::getline(file, text)) return -1;
  const size_t paren = text.rfind(')');
  if (paren == std::string::npos) return -1;
  const std::vector<absl::string_view> fields = absl::StrSplit(
      absl::string_view(text).substr(paren + 1), ' ', absl::SkipEmpty());
  int64_t user = 0;
  int64_t system = 0;
  if (fields.size() < 13 || !absl::SimpleAtoi(fields[11], &user) ||
      !absl::SimpleAtoi(fields[12], &system)) {
    return -1;
  }
  return static_cast<double>(user + system) /
         static_cast<double>(sysconf(_SC_CLK_TCK));
}

// The tensor that all streams send, and the encoding for it.
struct Load {
  std::vector<float> elements;
  std::vector<int64_t> shape;
  Encoding encoding;
  // Codes that Dequantize sends.
  std::vector<uint8_t> codes;
  EncodingSpec spec;

  Tensor Reals() const {
    Tensor tensor;
    tensor.shape = shape;
    tensor.data =
        absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(elements.data()),
                            elements.size() * sizeof(float));
    return tensor;
  }
  Tensor Codes() const {
    Tensor tensor = Reals();
    tensor.data = codes;
    return tensor;
  }
};

// Latencies and errors of the streams. Thread-safe.
class Measurements {
 public:
  void AddLatencies(const std::vector<double>& seconds) {
    absl::MutexLock lock(&mutex_);
    latencies_.insert(latencies_.end(), seconds.begin(), seconds.end());
  }
  void Fail(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (status_.ok()) status_ = status;
  }
  absl::Status status() const {
    absl::MutexLock lock(&mutex_);
    return status_;
  }
  std::vector<double> SortedLatencies() const {
    absl::MutexLock lock(&mutex_);
    std::vector<double> sorted = latencies_;
    std::sort(sorted.begin(), sorted.end());
    return sorted;
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<double> latencies_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

enum class Phase { kWarmup, kMeasure, kStop };

// Keeps `in_flight` tensors on one stream until told to stop. Latency is from
// Send to Receive.
template <typename Stream, typename Job>
void Drive(std::unique_ptr<Stream> stream, std::vector<Job> jobs,
           const std::atomic<Phase>& phase, Measurements* measurements) {
  std::vector<absl::Time> starts(jobs.size());
  std::vector<double> latencies;
  for (size_t i = 0; i < jobs.size(); ++i) {
    starts[i] = absl::Now();
    stream->Send(jobs[i]);
  }
  for (size_t slot = 0; phase != Phase::kStop;
       slot = (slot + 1) % jobs.size()) {
    const absl::Status status = stream->Receive().status();
    if (!status.ok()) {
      measurements->Fail(status);
      return;
    }
    if (phase == Phase::kMeasure) {
      latencies.push_back(absl::ToDoubleSeconds(absl::Now() - starts[slot]));
    }
    starts[slot] = absl::Now();
    stream->Send(jobs[slot]);
  }
  measurements->AddLatencies(latencies);
}

// Memory of the tensors of one stream: of this process, or shared with the
// server. Not thread-safe.
class StreamMemory {
 public:
  // Null `client`: not shared. It must outlive the object.
  explicit StreamMemory(Client* client) : client_(client) {}

  absl::StatusOr<absl::Span<uint8_t>> Allocate(size_t size_bytes) {
    if (client_ == nullptr) {
      own_.emplace_back(size_bytes);
      return absl::MakeSpan(own_.back());
    }
    absl::StatusOr<std::unique_ptr<SharedBuffer>> buffer =
        client_->AllocateShared(size_bytes);
    if (!buffer.ok()) return buffer.status();
    shared_.push_back(*std::move(buffer));
    return shared_.back()->bytes().subspan(0, size_bytes);
  }

  // `data`, or where memory is shared a copy.
  absl::StatusOr<absl::Span<const uint8_t>> Place(
      absl::Span<const uint8_t> data) {
    if (client_ == nullptr) return data;
    const absl::StatusOr<absl::Span<uint8_t>> copy = Allocate(data.size());
    if (!copy.ok()) return copy.status();
    std::copy(data.begin(), data.end(), copy->begin());
    return *copy;
  }

 private:
  Client* const client_;
  std::vector<std::vector<uint8_t>> own_;
  std::vector<std::unique_ptr<SharedBuffer>> shared_;
};

// Jobs on `data` whose outputs are as large as `output_bytes` says, reused from
// tensor to tensor: fresh pages cost more than the kernels.
template <typename Job>
absl::Status SetUp(absl::Span<const uint8_t> data, size_t output_bytes,
                   StreamMemory* memory, std::vector<Job>* jobs) {
  const absl::StatusOr<absl::Span<const uint8_t>> placed = memory->Place(data);
  if (!placed.ok()) return placed.status();
  for (Job& job : *jobs) {
    job.tensor.data = *placed;
    if constexpr (std::is_same_v<Job, QuantizeJob> ||
                  std::is_same_v<Job, DequantizeJob>) {
      const absl::StatusOr<absl::Span<uint8_t>> output =
          memory->Allocate(output_bytes);
      if (!output.ok()) return output.status();
      job.output = *output;
    }
  }
  return absl::OkStatus();
}

// The encoding with a range that is narrower by 1/16 for each of `steps`, as in
// a search for the best one; the same where scales cannot be any number.
Encoding Narrowed(Encoding encoding, int steps) {
  if (encoding.scale_type() <= v1::SCALE_TYPE_FLOAT32) {
    for (float& scale : *encoding.mutable_scale()) {
      scale *= std::pow(1.0f - 1.0f / 16, static_cast<float>(steps));
    }
  }
  return encoding;
}

void DriveOperation(const BenchOptions& options, const Load& load,
                    Client* client, const std::atomic<Phase>& phase,
                    Measurements* measurements) {
  const size_t count = static_cast<size_t>(options.in_flight);
  StreamMemory memory(options.shared_memory ? client : nullptr);
  const auto drive = [&](auto stream, auto jobs, size_t output_bytes) {
    const absl::Status status =
        SetUp(jobs[0].tensor.data, output_bytes, &memory, &jobs);
    if (!status.ok()) return measurements->Fail(status);
    Drive(std::move(stream), std::move(jobs), phase, measurements);
  };
  if (options.operation == "quantize") {
    std::vector<QuantizeJob> jobs(count);
    for (QuantizeJob& job : jobs) {
      job.tensor = load.Reals();
      job.source = load.encoding;
      job.omit_encoding = true;
    }
    drive(client->OpenQuantize(), std::move(jobs), load.codes.size());
  } else if (options.operation == "dequantize") {
    std::vector<DequantizeJob> jobs(count);
    for (DequantizeJob& job : jobs) {
      job.tensor = load.Codes();
      job.source = load.encoding;
      job.omit_encoding = true;
    }
    drive(client->OpenDequantize(), std::move(jobs),
          load.elements.size() * sizeof(float));
  } else if (options.operation == "calibrate") {
    std::vector<CalibrateJob> jobs(count);
    for (CalibrateJob& job : jobs) job.tensor = load.Reals();
    drive(client->OpenCalibrate(), std::move(jobs), 0);
  } else {
    std::vector<EvaluateJob> jobs(count);
    for (EvaluateJob& job : jobs) {
      job.tensor = load.Reals();
      if (options.metrics == "sweep") job.metrics = SweepMetrics();
      for (int i = 0; i < options.candidates; ++i) {
        job.candidates.push_back({Narrowed(load.encoding, i), ""});
      }
    }
    drive(client->OpenEvaluate(), std::move(jobs), 0);
  }
}

// Normal data in rows of 4,096, quantized once by the server for the encoding
// and the codes.
absl::StatusOr<Load> MakeLoad(const BenchOptions& options,
                              const SpecTemplate& spec, Client* client) {
  Load load;
  const int64_t count = std::max<int64_t>(1, options.tensor_bytes / 4);
  load.shape = count % kRowElements == 0
                   ? std::vector<int64_t>{count / kRowElements, kRowElements}
                   : std::vector<int64_t>{1, count};
  absl::StatusOr<EncodingSpec> encoding_spec = spec.SpecOf(load.shape);
  if (!encoding_spec.ok()) return encoding_spec.status();
  load.spec = *std::move(encoding_spec);
  load.elements.resize(static_cast<size_t>(count));
  absl::BitGen random;
  for (float& element : load.elements) {
    element = absl::Gaussian<float>(random, 0.0f, 1.0f);
  }
  QuantizeJob job;
  job.tensor = load.Reals();
  job.source = load.spec;
  const absl::StatusOr<QuantizeResult> result = client->Quantize(job);
  if (!result.ok()) return result.status();
  load.encoding = result->header.encoding();
  load.codes.assign(result->codes.begin(), result->codes.end());
  return load;
}

// Nearest rank. `sorted` must not be empty.
double Percentile(const std::vector<double>& sorted, double share) {
  const size_t rank = static_cast<size_t>(
      std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::clamp<size_t>(rank, 1, sorted.size()) - 1];
}

struct Window {
  absl::Time time = absl::Now();
  double client_cpu = ClientCpuSeconds();
  double server_cpu = -1;

  explicit Window(int64_t server_pid)
      : server_cpu(server_pid > 0 ? ProcessCpuSeconds(server_pid) : -1) {}
};

void ReportBench(const BenchOptions& options, const Window& begin,
                 const Window& end, const std::vector<double>& latencies,
                 Session* session) {
  const double seconds = absl::ToDoubleSeconds(end.time - begin.time);
  const double tensor_bytes =
      static_cast<double>(std::max<int64_t>(1, options.tensor_bytes / 4)) * 4;
  const double gigabytes =
      tensor_bytes * static_cast<double>(latencies.size()) * 1e-9;
  const double client_cpu = (end.client_cpu - begin.client_cpu) / gigabytes;
  const bool has_server = begin.server_cpu >= 0 && end.server_cpu >= 0;
  const double server_cpu = (end.server_cpu - begin.server_cpu) / gigabytes;
  const double p50 = Percentile(latencies, 0.5) * 1e3;
  const double p90 = Percentile(latencies, 0.9) * 1e3;
  const double p99 = Percentile(latencies, 0.99) * 1e3;
  Json json = {
      {"operation", options.operation},
      {"server", session->server},
      {"streams", options.streams},
      {"connections", options.connections},
      {"in_flight", options.in_flight},
      {"candidates", options.candidates},
      {"metrics", options.metrics},
      {"shared_memory", options.shared_memory},
      {"chunk_bytes", options.chunk_bytes},
      {"tensor_bytes", static_cast<int64_t>(tensor_bytes)},
      {"spec",
       options.spec.specs.empty() ? jobs::kDefaultSpec : options.spec.specs[0]},
      {"seconds", seconds},
      {"tensor_count", latencies.size()},
      {"gigabytes_per_second", gigabytes / seconds},
      {"tensors_per_second", static_cast<double>(latencies.size()) / seconds},
      {"latency_p50_ms", p50},
      {"latency_p90_ms", p90},
      {"latency_p99_ms", p99},
      {"client_cpu_seconds_per_gigabyte", client_cpu}};
  if (has_server) json["server_cpu_seconds_per_gigabyte"] = server_cpu;
  if (session->json) return session->PrintJson(json);
  std::string text = absl::StrFormat(
      "%s, %d streams over %d connections, tensors of %s in chunks of %s\n"
      "throughput  %.3f GB/s of float32, %.1f tensors/s\n"
      "latency     p50 %.3f ms, p90 %.3f ms, p99 %.3f ms\n"
      "client CPU  %.3f s/GB\n",
      options.operation, options.streams, options.connections,
      BytesText(static_cast<uint64_t>(tensor_bytes)),
      BytesText(static_cast<uint64_t>(options.chunk_bytes)),
      gigabytes / seconds, static_cast<double>(latencies.size()) / seconds, p50,
      p90, p99, client_cpu);
  if (has_server) {
    absl::StrAppendFormat(&text, "server CPU  %.3f s/GB\n", server_cpu);
  }
  session->Print(text);
}

// Waits, or less long when a stream has failed.
void Wait(double seconds, const Measurements& measurements) {
  const absl::Time end = absl::Now() + absl::Seconds(seconds);
  while (absl::Now() < end && measurements.status().ok()) {
    absl::SleepFor(std::min(absl::Milliseconds(50), end - absl::Now()));
  }
}

void RunBench(const BenchOptions& options, Session* session) {
  const absl::StatusOr<SpecSet> specs = options.spec.ParseSet();
  if (!specs.ok()) return session->FailUsage(specs.status());
  if (!specs->overrides.empty()) {
    return session->FailUsage(
        ArgumentInvalidError("expected a --spec without a pattern"));
  }
  const SpecTemplate* const spec = &specs->base;
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < options.connections; ++i) {
    absl::StatusOr<std::unique_ptr<Client>> client =
        session->Connect(options.chunk_bytes, options.shared_memory);
    if (!client.ok()) return session->FailUsage(client.status());
    clients.push_back(*std::move(client));
  }
  const absl::StatusOr<Load> load = MakeLoad(options, *spec, clients[0].get());
  if (!load.ok()) return session->Fail(load.status());

  std::atomic<Phase> phase{Phase::kWarmup};
  Measurements measurements;
  std::vector<std::thread> threads;
  for (int i = 0; i < options.streams; ++i) {
    Client* const client =
        clients[static_cast<size_t>(i % options.connections)].get();
    threads.emplace_back([&options, &load, &phase, &measurements, client] {
      DriveOperation(options, *load, client, phase, &measurements);
    });
  }
  Wait(options.warmup_seconds, measurements);
  const Window begin(options.server_pid);
  phase = Phase::kMeasure;
  Wait(options.duration_seconds, measurements);
  phase = Phase::kStop;
  const Window end(options.server_pid);
  for (std::thread& thread : threads) thread.join();
  if (!measurements.status().ok()) {
    return session->Fail(measurements.status());
  }
  const std::vector<double> latencies = measurements.SortedLatencies();
  if (latencies.empty()) {
    return session->FailUsage(ArgumentInvalidError(
        "expected a --duration in which at least one tensor is done"));
  }
  ReportBench(options, begin, end, latencies, session);
}

}  // namespace

void AddBenchCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "bench", "Measure a live server with tensors of normal data");
  const auto options = std::make_shared<BenchOptions>();
  command->AddOption("--op", &options->operation, "", "What to measure")
      ->OneOf({"quantize", "dequantize", "calibrate", "evaluate"})
      ->ShowDefault();
  command->AddOption("--streams", &options->streams, "N", "Parallel streams")
      ->Between(1, 1024)
      ->ShowDefault();
  command
      ->AddOption("--connections", &options->connections, "N",
                  "Connections that the streams share")
      ->Between(1, 256)
      ->ShowDefault();
  command
      ->AddOption("--in-flight", &options->in_flight, "N",
                  "Tensors on a stream at once; above 1 the latency includes "
                  "waiting for those before")
      ->Between(1, 1024)
      ->ShowDefault();
  command
      ->AddOption("--candidates", &options->candidates, "N",
                  "Encodings that evaluate measures at once")
      ->Between(1, 64)
      ->ShowDefault();
  command
      ->AddOption("--metrics", &options->metrics, "",
                  "What evaluate answers of each, all or as little as sweep "
                  "needs")
      ->OneOf({"all", "sweep"})
      ->ShowDefault();
  command->AddFlag("--shared-memory", &options->shared_memory,
                   "Keep tensors in memory shared with the server, on a unix "
                   "socket");
  command
      ->AddOption("--chunk-bytes", &options->chunk_bytes, "BYTES",
                  "Payload of a message, such as 256KiB")
      ->Bytes()
      ->Between(64, int64_t{32} << 20)
      ->ShowDefault();
  command
      ->AddOption("--tensor-bytes", &options->tensor_bytes, "BYTES",
                  "Size of a tensor as float32, such as 16MiB")
      ->Bytes()
      ->Between(4, int64_t{1} << 33)
      ->ShowDefault();
  command
      ->AddOption("--duration", &options->duration_seconds, "SECONDS",
                  "Length of the measurement, such as 5 or 5s")
      ->Seconds()
      ->Positive()
      ->ShowDefault();
  command
      ->AddOption("--warmup", &options->warmup_seconds, "SECONDS",
                  "Time before the measurement, such as 500ms")
      ->Seconds()
      ->NotNegative()
      ->ShowDefault();
  command
      ->AddOption("--server-pid", &options->server_pid, "PID",
                  "Process of the server, to measure its CPU time")
      ->Positive();
  AddSpecOptions(command, &options->spec);
  command->AddExample("quantctl bench --op quantize --spec int8:per-channel");
  command->OnRun([options, session] { RunBench(*options, session); });
}

}  // namespace quantd::cli
