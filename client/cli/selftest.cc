#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/selftest_cases.h"
#include "client/cli/session.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/models/spec_syntax.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"
#include "quantd/v1/encoding.pb.h"
#include "quantd/v1/encoding_service.pb.h"
#include "quantd/v1/quantization_service.pb.h"
#include "xxhash.h"

namespace quantd::cli {
namespace {

// Results of which there is a hash for each case, in the order of the table.
constexpr const char* kResults[] = {"encoding", "codes", "reals", "metrics"};
using Hashes = std::array<std::string, std::size(kResults)>;

// Tensors that are sent before the result of the first one is awaited.
constexpr size_t kAhead = 16;
// Differences that are printed; --json has all.
constexpr size_t kPrinted = 20;

// The bytes of numbers, in order. All NaN are one: which they are differs
// between processors.
class Digest {
 public:
  void Add(double value) {
    if (std::isnan(value)) value = std::numeric_limits<double>::quiet_NaN();
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void Add(uint64_t value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void Add(absl::Span<const uint8_t> bytes) {
    bytes_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  template <typename Numbers>
  void AddAll(const Numbers& numbers) {
    Add(static_cast<uint64_t>(numbers.size()));
    for (const auto number : numbers) Add(static_cast<double>(number));
  }
  std::string Text() const {
    return absl::StrFormat("%016x", XXH3_64bits(bytes_.data(), bytes_.size()));
  }

 private:
  std::string bytes_;
};

std::string EncodingHash(const QuantizeResult& result) {
  const v1::Encoding& encoding = result.header.encoding();
  Digest digest;
  digest.AddAll(encoding.scale());
  digest.AddAll(encoding.zero_point());
  digest.AddAll(encoding.real_zero_point());
  digest.AddAll(encoding.outer_scale());
  for (const char code : encoding.scale_code()) {
    digest.Add(uint64_t{static_cast<uint8_t>(code)});
  }
  digest.AddAll(std::array<int64_t, 3>{
      encoding.qmin(), encoding.qmax(),
      static_cast<int64_t>(encoding.degenerate_count())});
  return digest.Text();
}

std::string CodesHash(const QuantizeResult& result) {
  const v1::QuantizeSummary& summary = result.summary;
  Digest digest;
  digest.Add(result.codes);
  digest.AddAll(std::array<uint64_t, 6>{
      summary.count(), summary.clipped_low_count(),
      summary.clipped_high_count(), summary.nan_count(),
      summary.positive_infinity_count(), summary.negative_infinity_count()});
  return digest.Text();
}

// The bits of NaN differ between processors: one stands for all.
std::string RealsHash(ElementType type, absl::Span<const uint8_t> elements) {
  const auto size = static_cast<size_t>(ElementSizeBytes(type));
  // In a NaN the exponent is all ones and some bit behind it is not 0.
  const uint64_t infinity = type == ElementType::kFloat64   ? 0x7FFull << 52
                            : type == ElementType::kFloat32 ? 0xFFull << 23
                            : type == ElementType::kFloat16 ? 0x1Full << 10
                                                            : 0xFFull << 7;
  const uint64_t sign = uint64_t{1} << (8 * size - 1);
  Digest digest;
  for (size_t i = 0; i + size <= elements.size(); i += size) {
    uint64_t bits = 0;
    for (size_t k = size; k-- > 0;) bits = bits << 8 | elements[i + k];
    if ((bits & ~sign) > infinity) bits = infinity + 1;
    digest.Add(bits);
  }
  return digest.Text();
}

void AddMetrics(const v1::ErrorMetrics& metrics, Digest* digest) {
  digest->AddAll(std::array<uint64_t, 5>{
      metrics.count(), metrics.non_finite_count(), metrics.clipped_low_count(),
      metrics.clipped_high_count(), metrics.zero_flushed_count()});
  digest->AddAll(std::array<double, 9>{
      metrics.sum_squared_error(), metrics.mean_squared_error(),
      metrics.mean_absolute_error(), metrics.max_absolute_error(),
      metrics.mean_relative_error(), metrics.max_relative_error(),
      metrics.sqnr_db(), metrics.cosine_similarity(), metrics.kl_divergence()});
  digest->Add(metrics.error_histogram().zero_count());
  digest->Add(double{1} * metrics.error_histogram().first_exponent());
  digest->AddAll(metrics.error_histogram().count());
}

std::string MetricsHash(const v1::EvaluateSummary& summary) {
  const v1::TensorStatistics& statistics = summary.statistics();
  Digest digest;
  digest.AddAll(std::array<double, 2>{statistics.min(), statistics.max()});
  digest.AddAll(std::array<uint64_t, 5>{
      statistics.count(), statistics.nan_count(),
      statistics.positive_infinity_count(),
      statistics.negative_infinity_count(), statistics.zero_count()});
  for (const v1::CandidateMetrics& candidate : summary.candidates()) {
    AddMetrics(candidate.overall(), &digest);
    for (const v1::ErrorMetrics& metrics : candidate.per_scale_index()) {
      AddMetrics(metrics, &digest);
    }
  }
  return digest.Text();
}

// Sends `count` jobs that make(i) makes and gives their results to take(i), a
// few jobs ahead.
template <typename Stream, typename Make, typename Take>
absl::Status RunAll(size_t count, std::unique_ptr<Stream> stream, Make make,
                    Take take) {
  size_t sent = 0;
  for (size_t i = 0; i < count; ++i) {
    for (; sent < count && sent < i + kAhead; ++sent) stream->Send(make(sent));
    auto result = stream->Receive();
    if (!result.ok()) return result.status();
    take(i, *std::move(result));
  }
  return absl::OkStatus();
}

// Hashes of what the server makes of all cases. Keeps all codes: some MB.
absl::StatusOr<std::vector<Hashes>> Compute(
    const std::vector<SelftestCase>& cases, Client* client) {
  std::map<std::pair<SelftestData, ElementType>, std::vector<uint8_t>> inputs;
  std::vector<Tensor> tensors;
  std::vector<EncodingSpec> specs;
  for (const SelftestCase& c : cases) {
    std::vector<uint8_t>& elements = inputs[{c.data, c.type}];
    if (elements.empty()) elements = SelftestElements(c.data, c.type);
    Tensor tensor;
    tensor.element_type = c.type;
    tensor.shape = SelftestShape(c.data);
    tensor.data = elements;
    const absl::StatusOr<SpecTemplate> spec = ParseSpec(c.spec);
    if (!spec.ok()) return spec.status();
    absl::StatusOr<EncodingSpec> resolved = spec->SpecOf(tensor.shape);
    if (!resolved.ok()) return resolved.status();
    tensors.push_back(std::move(tensor));
    specs.push_back(*std::move(resolved));
  }
  std::vector<Hashes> hashes(cases.size());
  std::vector<QuantizeResult> quantized(cases.size());
  absl::Status status = RunAll(
      cases.size(), client->OpenQuantize(),
      [&](size_t i) {
        QuantizeJob job;
        job.tensor = tensors[i];
        job.source = specs[i];
        job.nan_policy = cases[i].nan_policy;
        return job;
      },
      [&](size_t i, QuantizeResult result) {
        hashes[i][0] = EncodingHash(result);
        hashes[i][1] = CodesHash(result);
        quantized[i] = std::move(result);
      });
  if (!status.ok()) return status;
  status = RunAll(
      cases.size(), client->OpenDequantize(),
      [&](size_t i) {
        DequantizeJob job;
        job.tensor = tensors[i];
        job.tensor.data = quantized[i].codes;
        job.source = quantized[i].header.encoding();
        return job;
      },
      [&](size_t i, const DequantizeResult& result) {
        hashes[i][2] = RealsHash(cases[i].type, result.elements);
      });
  if (!status.ok()) return status;
  status = RunAll(
      cases.size(), client->OpenEvaluate(),
      [&](size_t i) {
        EvaluateJob job;
        job.tensor = tensors[i];
        job.candidates.push_back({quantized[i].header.encoding(), ""});
        job.per_scale_index = true;
        job.with_distribution = true;
        return job;
      },
      [&](size_t i, const EvaluateResult& result) {
        hashes[i][3] = MetricsHash(result);
      });
  if (!status.ok()) return status;
  return hashes;
}

// The results of a case that are not what they have to be.
struct Difference {
  std::string name;
  std::vector<std::string> results;
};

std::vector<Difference> Compare(const std::vector<SelftestCase>& cases,
                                const std::vector<Hashes>& hashes) {
  absl::flat_hash_map<absl::string_view, std::vector<absl::string_view>> wanted;
  for (const absl::string_view line :
       absl::StrSplit(kSelftestHashes, '\n', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(line, absl::MaxSplits(": ", 1));
    wanted[parts.first] = absl::StrSplit(parts.second, ' ');
  }
  std::vector<Difference> differences;
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::vector<absl::string_view>& want = wanted[cases[i].name];
    Difference difference{cases[i].name, {}};
    for (size_t k = 0; k < hashes[i].size(); ++k) {
      if (k >= want.size() || want[k] != hashes[i][k]) {
        difference.results.emplace_back(kResults[k]);
      }
    }
    if (!difference.results.empty()) {
      differences.push_back(std::move(difference));
    }
  }
  return differences;
}

void Report(const v1::GetServerInfoResponse& info, size_t count,
            const std::vector<Difference>& differences, Session* session) {
  size_t different = 0;
  for (const Difference& difference : differences) {
    different += difference.results.size();
  }
  if (different > 0) session->Note(kServerError);
  const std::string version =
      info.version().empty() ? "unknown" : info.version();
  if (session->json) {
    Json list = Json::array();
    for (const Difference& difference : differences) {
      list.push_back(
          {{"case", difference.name}, {"results", difference.results}});
    }
    session->PrintJson(
        {{"server", session->server},
         {"version", version},
         {"cpu", info.cpu()},
         {"simd_target", info.simd_target()},
         {"available_simd_targets",
          std::vector<std::string>(info.available_simd_targets().begin(),
                                   info.available_simd_targets().end())},
         {"client_version", QUANTD_VERSION},
         {"result_count", count},
         {"difference_count", different},
         {"differences", list}});
    return;
  }
  std::string text =
      absl::StrFormat("server   %s\nversion  %s\n", session->server, version);
  if (!info.cpu().empty()) {
    absl::StrAppendFormat(&text, "CPU      %s\nSIMD     %s, of %s\n",
                          info.cpu(), info.simd_target(),
                          absl::StrJoin(info.available_simd_targets(), ", "));
  }
  for (size_t i = 0; i < differences.size() && i < kPrinted; ++i) {
    absl::StrAppendFormat(&text, "differs  %s: %s\n", differences[i].name,
                          absl::StrJoin(differences[i].results, ", "));
  }
  if (differences.size() > kPrinted) {
    absl::StrAppendFormat(&text, "         and %d more\n",
                          differences.size() - kPrinted);
  }
  if (different == 0) {
    absl::StrAppendFormat(&text, "results  all %s equal\n", CountText(count));
  }
  session->Print(text);
  if (different > 0) {
    session->PrintError(absl::StrFormat(
        "quantctl: %s of %s results are not those of quantd %s",
        CountText(different), CountText(count), QUANTD_VERSION));
  }
}

void Run(bool print_hashes, Session* session) {
  if (print_hashes && session->json) {
    return session->FailUsage(
        ArgumentInvalidError("expected either --hashes or --json"));
  }
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  absl::StatusOr<v1::GetServerInfoResponse> info = client->GetServerInfo();
  if (absl::IsUnimplemented(info.status())) {
    // An older server. It computes all the same.
    info = v1::GetServerInfoResponse();
  }
  if (!info.ok()) return session->Fail(info.status());
  const std::vector<SelftestCase> cases = SelftestCases();
  const absl::StatusOr<std::vector<Hashes>> hashes =
      Compute(cases, client.get());
  if (!hashes.ok()) return session->Fail(hashes.status());
  if (print_hashes) {
    std::string text;
    for (size_t i = 0; i < cases.size(); ++i) {
      absl::StrAppend(&text, cases[i].name, ": ",
                      absl::StrJoin((*hashes)[i], " "), "\n");
    }
    return session->Print(text);
  }
  Report(*info, cases.size() * std::size(kResults), Compare(cases, *hashes),
         session);
}

}  // namespace

void AddSelftestCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "selftest",
      "Compare results of the server with those of every other; exit code 0 "
      "only if all are equal");
  const auto print_hashes = std::make_shared<bool>(false);
  command->AddFlag("--hashes", print_hashes.get(),
                   "Compare nothing; print the hashes of the results, a line "
                   "for each case");
  command->AddExample("quantctl selftest");
  command->AddExample("quantctl selftest --server gpu-7:8430 --json");
  command->OnRun([print_hashes, session] { Run(*print_hashes, session); });
}

}  // namespace quantd::cli
