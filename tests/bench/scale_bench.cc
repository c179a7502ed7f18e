// How quantd takes many encodings and many tensors: the parts that
// scale_bench.py puts together. Every command prints one JSON object.
//
//   scale_bench fill --store FILE --first A --last B
//       encodings [A, B) straight into a store that no server has open
//   scale_bench touch --target ADDRESS --first A --last B --streams N
//       quantizes 1 KiB by each of them, so that the server's cache has them
//   scale_bench put --target ADDRESS --first A --last B --streams N
//       puts them, durably, N calls at a time
//   scale_bench lookup --target ADDRESS=COUNT ... --rounds R --calls N
//       latencies of lookups among COUNT encodings, target after target
//   scale_bench list --target ADDRESS --first A
//       lists the model that has encoding A
//   scale_bench contribute --target ADDRESS --first A --last B --streams N
//       calibrates that many tensors of 1 KiB, each into statistics of its own
//
// Encoding i belongs to model "scale/<i / per_model>".

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "core/formats/number_format.h"
#include "core/types/encoding.h"
#include "server/store/sql_encoding_store.h"
#include "server/store/sqlite_database.h"

namespace quantd::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::json;

constexpr int64_t kElements = 256;
// Tensors on a stream at once.
constexpr int64_t kInFlight = 64;

struct Options {
  std::vector<std::string> targets;
  std::string store;
  int64_t first = 0;
  int64_t last = 0;
  int64_t per_model = 1000;
  int streams = 4;
  int rounds = 9;
  int calls = 500;
};

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

TensorName NameOf(const Options& options, int64_t index) {
  TensorName name;
  name.set_model(absl::StrCat("scale/", index / options.per_model));
  name.set_tensor(
      absl::StrCat("layers.", index % options.per_model, ".weight"));
  return name;
}

[[noreturn]] void Fail(const absl::Status& status) {
  std::cerr << status << "\n";
  std::exit(1);
}

template <typename T>
T Value(absl::StatusOr<T> result) {
  if (!result.ok()) Fail(result.status());
  return *std::move(result);
}

std::unique_ptr<Client> Connect(const std::string& target) {
  ClientOptions options;
  options.target = target;
  return Value(Client::Connect(options));
}

// What all tensors of a bench have.
const std::vector<float>& Elements() {
  static const auto& elements = *new std::vector<float>(kElements, 0.25f);
  return elements;
}

Tensor TensorOf(const TensorName& name) {
  Tensor tensor;
  tensor.name = name;
  tensor.shape = {kElements};
  tensor.data = {reinterpret_cast<const uint8_t*>(Elements().data()),
                 kElements * sizeof(float)};
  return tensor;
}

// Calls body(client, first, last) for equal parts of the indices, each on a
// thread and a connection of its own.
template <typename Body>
Json OnThreads(const Options& options, Body body) {
  const int64_t count = options.last - options.first;
  const Clock::time_point begin = Clock::now();
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < options.streams; ++t) {
    threads.emplace_back([&options, &body, count, t] {
      const std::unique_ptr<Client> client = Connect(options.targets[0]);
      body(client.get(), options.first + count * t / options.streams,
           options.first + count * (t + 1) / options.streams);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds = SecondsSince(begin);
  return {{"seconds", seconds},
          {"per_second", static_cast<double>(count) / seconds}};
}

Json Fill(const Options& options) {
  server::SqlEncodingStore store(
      Value(server::SqliteDatabase::Open(options.store)));
  const core::FormatInfo& format = *core::FindFormatByName("int8");
  core::Encoding encoding;
  encoding.format = format.format;
  encoding.scale = {0.0247f};
  encoding.qmin = format.qmin;
  encoding.qmax = format.qmax;
  const auto shared = std::make_shared<const core::Encoding>(encoding);
  const Clock::time_point begin = Clock::now();
  for (int64_t i = options.first; i < options.last; ++i) {
    const TensorName name = NameOf(options, i);
    Value(store.Put({name.model(), "main", name.tensor()}, shared, {}));
  }
  return {{"seconds", SecondsSince(begin)}};
}

// Keeps kInFlight tensors on the stream; `make_job(index)` makes them.
template <typename Stream, typename MakeJob>
void Bulk(int64_t first, int64_t last, std::unique_ptr<Stream> stream,
          MakeJob make_job) {
  int64_t sent = first;
  for (int64_t received = first; received < last; ++received) {
    for (; sent < last && sent < received + kInFlight; ++sent) {
      stream->Send(make_job(sent));
    }
    Value(stream->Receive());
  }
}

QuantizeJob QuantizeByReference(const TensorName& name) {
  QuantizeJob job;
  job.tensor = TensorOf(name);
  job.source = v1::EncodingReference();
  job.omit_encoding = true;
  return job;
}

Json Touch(const Options& options) {
  return OnThreads(options, [&](Client* client, int64_t first, int64_t last) {
    Bulk(first, last, client->OpenQuantize(), [&options](int64_t index) {
      return QuantizeByReference(NameOf(options, index));
    });
  });
}

Json Put(const Options& options) {
  Encoding encoding;
  encoding.set_format(v1::NUMBER_FORMAT_INT8);
  encoding.add_scale(0.0247f);
  encoding.set_qmin(-128);
  encoding.set_qmax(127);
  return OnThreads(options, [&](Client* client, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      Value(client->PutEncoding(NameOf(options, i), encoding, ""));
    }
  });
}

Json Contribute(const Options& options) {
  return OnThreads(options, [&](Client* client, int64_t first, int64_t last) {
    Bulk(first, last, client->OpenCalibrate(), [&options](int64_t index) {
      CalibrateJob job;
      job.tensor = TensorOf(NameOf(options, index));
      job.contribution.emplace();
      job.contribution->set_source("bench");
      job.contribution->set_sequence(1);
      return job;
    });
  });
}

Json List(const Options& options) {
  const std::unique_ptr<Client> client = Connect(options.targets[0]);
  const std::string model = NameOf(options, options.first).model();
  const Clock::time_point begin = Clock::now();
  const size_t count = Value(client->ListEncodings(model, "")).size();
  return {{"seconds", SecondsSince(begin)}, {"entries", count}};
}

// Nearest rank, in microseconds. Sorts.
double Percentile(std::vector<double>* seconds, double share) {
  std::sort(seconds->begin(), seconds->end());
  const auto rank = static_cast<size_t>(
      share * static_cast<double>(seconds->size() - 1) + 0.5);
  return (*seconds)[rank] * 1e6;
}

// A server with `count` encodings.
struct LookupTarget {
  int64_t count = 0;
  std::unique_ptr<Client> client;
  std::unique_ptr<QuantizeStream> stream;
};

Json Lookup(const Options& options) {
  std::vector<LookupTarget> targets;
  Json answer = Json::array();
  for (const std::string& text : options.targets) {
    const size_t split = text.rfind('=');
    LookupTarget& target = targets.emplace_back();
    target.count = std::stoll(text.substr(split + 1));
    target.client = Connect(text.substr(0, split));
    target.stream = target.client->OpenQuantize();
    answer.push_back({{"count", target.count},
                      {"get_p50_us", Json::array()},
                      {"get_p99_us", Json::array()},
                      {"quantize_p50_us", Json::array()},
                      {"quantize_p99_us", Json::array()}});
  }
  std::mt19937_64 random(7);
  const auto measure = [&](Json* rows, const std::string& what,
                           const LookupTarget& target, auto look_up) {
    std::vector<double> latencies;
    for (int i = 0; i < options.calls; ++i) {
      const TensorName name = NameOf(
          options,
          static_cast<int64_t>(random() % static_cast<uint64_t>(target.count)));
      const Clock::time_point begin = Clock::now();
      look_up(name);
      latencies.push_back(SecondsSince(begin));
    }
    (*rows)[what + "_p50_us"].push_back(Percentile(&latencies, 0.5));
    (*rows)[what + "_p99_us"].push_back(Percentile(&latencies, 0.99));
  };
  for (int round = 0; round < options.rounds; ++round) {
    for (size_t t = 0; t < targets.size(); ++t) {
      LookupTarget& target = targets[t];
      measure(&answer[t], "get", target, [&target](const TensorName& name) {
        Value(target.client->GetEncoding(name));
      });
      measure(&answer[t], "quantize", target,
              [&target](const TensorName& name) {
                target.stream->Send(QuantizeByReference(name));
                Value(target.stream->Receive());
              });
    }
  }
  return answer;
}

}  // namespace

int Run(int argc, char** argv) {
  Options options;
  CLI::App app("Many encodings and tensors");
  app.require_subcommand(1);
  const std::vector<std::pair<std::string, Json (*)(const Options&)>>
      kCommands = {{"fill", &Fill}, {"touch", &Touch},
                   {"put", &Put},   {"lookup", &Lookup},
                   {"list", &List}, {"contribute", &Contribute}};
  Json answer;
  for (const auto& [name, run] : kCommands) {
    CLI::App* const command = app.add_subcommand(name);
    command->add_option("--target", options.targets);
    command->add_option("--store", options.store);
    command->add_option("--first", options.first);
    command->add_option("--last", options.last);
    command->add_option("--per-model", options.per_model)
        ->check(CLI::PositiveNumber);
    command->add_option("--streams", options.streams)
        ->check(CLI::Range(1, 256));
    command->add_option("--rounds", options.rounds)->check(CLI::PositiveNumber);
    command->add_option("--calls", options.calls)->check(CLI::PositiveNumber);
    command->callback([&answer, &options, run = run, name = name] {
      if (name != "fill" && options.targets.empty()) {
        throw CLI::RequiredError("--target");
      }
      answer = run(options);
    });
  }
  CLI11_PARSE(app, argc, argv);
  std::cout << answer << std::endl;
  return 0;
}

}  // namespace quantd::bench

int main(int argc, char** argv) { return quantd::bench::Run(argc, argv); }
