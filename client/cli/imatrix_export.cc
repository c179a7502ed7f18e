#include "client/cli/imatrix_export.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cli/interchange.h"
#include "client/cli/output_options.h"
#include "client/cli/printable.h"
#include "client/cli/progress.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cli/tensor_notes.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/imatrix.h"
#include "client/jobs/output.h"
#include "client/jobs/revision_name.h"
#include "client/jobs/selection.h"
#include "client/jobs/stored_inputs.h"
#include "client/models/llama_names.h"
#include "client/models/spec_syntax.h"
#include "client/models/text.h"
#include "client/models/tie_groups.h"
#include "nlohmann/json.hpp"
#include "quantd/v1/encoding_service.pb.h"
#include "quantd/v1/statistics.pb.h"

namespace quantd::cli {
namespace {

constexpr absl::string_view kInput = ".input";

// An exact sum that is at least 0, rounded to the nearest float64.
double SumOf(const v1::ExactSums& sums, size_t index) {
  const size_t width = sums.width();
  if ((index + 1) * width > sums.integers().size()) return 0;
  const auto* const bytes =
      reinterpret_cast<const uint8_t*>(sums.integers().data()) + index * width;
  size_t end = width;
  while (end > 0 && bytes[end - 1] == 0) --end;
  // The highest 8 bytes, and whether there is more below.
  const size_t begin = end > sizeof(uint64_t) ? end - sizeof(uint64_t) : 0;
  uint64_t high = 0;
  for (size_t i = end; i > begin; --i) high = high << 8 | bytes[i - 1];
  const bool has_more =
      std::any_of(bytes, bytes + begin, [](uint8_t byte) { return byte != 0; });
  if (has_more) high |= 1;
  return std::ldexp(static_cast<double>(high),
                    sums.exponent() + 8 * static_cast<int>(begin));
}

// Weights of which no other has stored inputs take those of one that they are
// fused with.
std::vector<std::string> WeightsOf(const std::string& module,
                                   const std::set<std::string>& inputs) {
  std::vector<std::string> weights = {absl::StrCat(module, ".weight")};
  for (const std::string& text : DefaultTies()) {
    const std::optional<std::string> label =
        TiePattern::Parse(text)->LabelOf(weights[0]);
    if (!label.has_value()) continue;
    const size_t begin = label->find('{');
    const size_t end = label->find('}', begin);
    if (begin == std::string::npos || end == std::string::npos) break;
    for (const absl::string_view choice : absl::StrSplit(
             absl::string_view(*label).substr(begin + 1, end - begin - 1),
             ',')) {
      std::string weight =
          absl::StrCat(label->substr(0, begin), choice, label->substr(end + 1));
      const std::string own =
          absl::StrCat(absl::StripSuffix(weight, ".weight"), kInput);
      if (own == absl::StrCat(module, kInput)) continue;
      // Each has its own, or it is not clear whose to take.
      if (inputs.count(own) > 0) return {weights[0]};
      weights.push_back(std::move(weight));
    }
    break;
  }
  return weights;
}

// One run of `quantctl export --format imatrix`. Not thread-safe.
class ImatrixExport {
 public:
  ImatrixExport(const jobs::RevisionName& name,
                const std::vector<std::string>& include, Client* client,
                Session* session)
      : name_(name), include_(include), client_(*client), session_(*session) {}

  // Errors: of the client and of files.
  absl::Status Collect(const std::string& inputs_map) {
    const absl::StatusOr<std::map<std::string, std::string>> map =
        jobs::ReadInputsMap(inputs_map);
    if (!map.ok()) return map.status();
    const absl::StatusOr<std::vector<v1::StatisticsEntry>> entries =
        client_.ListStatistics(name_.model, name_.revision);
    if (!entries.ok()) return entries.status();
    std::set<std::string> stored;
    for (const v1::StatisticsEntry& entry : *entries) {
      stored.insert(entry.tensor());
    }
    std::map<std::string, std::vector<std::string>> weights;
    for (const auto& [weight, inputs] : *map) {
      if (stored.count(inputs) > 0) {
        weights[inputs].push_back(weight);
      } else {
        LeaveOut(weight, absl::StrCat("no statistics of its inputs, ", inputs));
      }
    }
    Progress progress(Progress::Unit::kTensors, !session_.quiet);
    uint64_t done = 0;
    for (const std::string& tensor : stored) {
      progress.Set(++done, stored.size(), tensor);
      if (!Includes(tensor)) continue;
      absl::string_view module = tensor;
      std::vector<std::string> own = weights[tensor];
      if (own.empty() && absl::ConsumeSuffix(&module, kInput)) {
        own = WeightsOf(std::string(module), stored);
      }
      absl::Status status = Add(tensor, own);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  const files::Imatrix& imatrix() const { return imatrix_; }
  const std::vector<v1::InterchangeLoss>& losses() const { return losses_; }

 private:
  bool Includes(const std::string& tensor) const {
    return include_.empty() || MatchesAny(include_, tensor);
  }

  void LeaveOut(const std::string& tensor, absl::string_view why) {
    v1::InterchangeLoss& loss = losses_.emplace_back();
    loss.set_tensor(tensor);
    loss.set_what(std::string(why));
    loss.set_left_out(true);
  }

  // Errors: those that end the run.
  absl::Status Add(const std::string& tensor,
                   const std::vector<std::string>& weights) {
    const absl::StatusOr<v1::GetStatisticsResponse> stored =
        client_.GetStatistics(name_.NameOf(tensor), /*with_state=*/false,
                              /*per_tensor=*/true, /*with_moments=*/true);
    if (!stored.ok()) return stored.status();
    if (!stored->has_moments()) {
      // Statistics of outputs and the like are not for this file.
      if (!weights.empty()) {
        LeaveOut(tensor,
                 "no moments are stored; quantctl calibrate --moments and "
                 "quantd.FeatureStatistics(moments=True) keep them");
      }
      return absl::OkStatus();
    }
    const v1::FeatureMoments& moments = stored->moments();
    if (weights.empty()) {
      LeaveOut(tensor,
               "expected MODULE.input, or a weight that --inputs-map names");
      return absl::OkStatus();
    }
    if (static_cast<int>(moments.axis()) + 1 != stored->state().shape_size()) {
      LeaveOut(tensor, absl::StrCat("its moments are along dimension ",
                                    moments.axis(), ", not along the last"));
      return absl::OkStatus();
    }
    files::InputSquares squares;
    squares.columns = moments.count_size();
    const uint64_t most =
        *std::max_element(moments.count().begin(), moments.count().end());
    squares.counts = {static_cast<float>(most)};
    for (int i = 0; i < moments.count_size(); ++i) {
      const double count = static_cast<double>(moments.count(i));
      const double sum = SumOf(moments.square_sum(), static_cast<size_t>(i));
      // All columns get the same count: the mean is what counts.
      squares.sums.push_back(static_cast<float>(
          count > 0 ? sum * (static_cast<double>(most) / count) : 0));
    }
    for (const std::string& weight : weights) {
      const std::string llama = LlamaName(weight);
      imatrix_[llama.empty() ? weight : llama] = squares;
    }
    return absl::OkStatus();
  }

  const jobs::RevisionName& name_;
  const std::vector<std::string>& include_;
  Client& client_;
  Session& session_;
  files::Imatrix imatrix_;
  std::vector<v1::InterchangeLoss> losses_;
};

}  // namespace

void ExportImatrix(const jobs::RevisionName& name,
                   const std::vector<std::string>& include,
                   const std::string& inputs_map,
                   const jobs::OutputOptions& output, Session* session) {
  absl::Status status = CheckOutputFile(output, {inputs_map}, ".gguf", session);
  if (!status.ok()) return FailEarly(status, session);
  const std::unique_ptr<Client> client = session->ConnectOrFail();
  if (client == nullptr) return;
  status = jobs::CheckStoredPatterns(
      "--include", include, jobs::Stored::kStatistics, name, client.get());
  if (!status.ok()) return FailEarly(status, session);
  ImatrixExport job(name, include, client.get(), session);
  status = job.Collect(inputs_map);
  if (!status.ok()) return session->Fail(status);
  if (AnyLeftOut(job.losses())) session->Note(kServerError);
  const size_t count = job.imatrix().size();
  if (count == 0) {
    PrintLosses(job.losses(), *session);
    session->Note(kServerError);
    return session->PrintError(
        absl::StrCat("quantctl: no moments of inputs are stored; ", output.path,
                     " is not written"));
  }
  const absl::StatusOr<uint64_t> size_bytes =
      files::WriteImatrix(output.path, output.if_exists(), job.imatrix());
  if (!size_bytes.ok()) return session->Fail(size_bytes.status());
  if (session->stdout_is_data) return PrintLosses(job.losses(), *session);
  if (session->json) {
    return session->PrintJson({{"model", name.model},
                               {"revision", name.revision},
                               {"format", kImatrix},
                               {"output", output.path},
                               {"bytes", *size_bytes},
                               {"weight_count", count},
                               {"losses", LossesJson(job.losses())}});
  }
  PrintLosses(job.losses(), *session);
  session->Print(absl::StrCat(CountText(count), " weights, ",
                              BytesText(*size_bytes), ", written to ",
                              Printable(output.path), "\n"));
}

}  // namespace quantd::cli
