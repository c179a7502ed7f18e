#include "client/cli/sweep_output.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/printable.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/files/atomic_file.h"
#include "client/models/model_sweep.h"
#include "client/models/spec_syntax.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double SqnrDb(const MeasuredCandidate& candidate) {
  return candidate.noise_to_signal == kInfinity ? -kInfinity
                                                : candidate.metrics.sqnr_db();
}

}  // namespace

SweptSpecs::SweptSpecs(std::vector<std::string> specs)
    : texts_(std::move(specs)) {}

const std::string& SweptSpecs::Text(uint32_t index) const {
  static const std::string& unknown = *new std::string("unknown");
  return index < texts_.size() ? texts_[index] : unknown;
}

Json SweptSpecs::TotalsJson(const std::vector<v1::SweepTotal>& totals) const {
  Json list = Json::array();
  for (const v1::SweepTotal& total : totals) {
    list.push_back({{"spec_index", total.spec_index()},
                    {"spec", Text(total.spec_index())},
                    {"size_bytes", total.size_bytes()},
                    {"min_sqnr_db", total.min_sqnr_db()},
                    {"min_sqnr_tensor", total.min_sqnr_tensor()},
                    {"noise_to_signal_sum", total.noise_to_signal_sum()},
                    {"failed_count", total.failed_count()}});
  }
  return list;
}

std::string SweptSpecs::TotalsText(
    const std::vector<v1::SweepTotal>& totals) const {
  if (totals.empty()) return "";
  Table table;
  table.AddColumn("SPEC", Table::Align::kLeft);
  table.AddColumn("SIZE", Table::Align::kBytes);
  table.AddColumn("SUM N/S", Table::Align::kRight);
  table.AddColumn("FAILED", Table::Align::kRight);
  table.AddColumn("LOWEST DB", Table::Align::kRight);
  for (const v1::SweepTotal& total : totals) {
    table.AddRow({Text(total.spec_index()), BytesCell(total.size_bytes()),
                  NumberText(total.noise_to_signal_sum()),
                  CountText(total.failed_count()),
                  DecibelText(total.min_sqnr_db())});
    if (!total.min_sqnr_tensor().empty()) {
      table.AddLine(absl::StrCat("  lowest in ", total.min_sqnr_tensor()));
    }
  }
  return table.Render(StdoutHasStyle());
}

Json SweptSpecs::MixtureJson(const v1::SweepMixture& mixture,
                             bool is_written) const {
  Json choices = Json::array();
  for (const auto& choice : mixture.choices()) {
    choices.push_back({{"tensor", choice.tensor()},
                       {"spec_index", choice.spec_index()},
                       {"spec", Text(choice.spec_index())}});
  }
  return {{"choices", std::move(choices)},
          {"size_bytes", mixture.size_bytes()},
          {"min_sqnr_db", mixture.min_sqnr_db()},
          {"noise_to_signal_sum", mixture.noise_to_signal_sum()},
          {"target_met", mixture.target_met()},
          {"written", is_written}};
}

std::string SweptSpecs::MixtureText(const v1::SweepMixture& mixture,
                                    const std::string& written_to) const {
  Table table;
  table.AddColumn("TENSOR", Table::Align::kLeft);
  table.AddColumn("SPEC", Table::Align::kLeft);
  for (const auto& choice : mixture.choices()) {
    table.AddRow({choice.tensor(), Text(choice.spec_index())});
  }
  return absl::StrCat(
      table.Render(StdoutHasStyle()), BytesText(mixture.size_bytes()),
      ", lowest ", DecibelText(mixture.min_sqnr_db()),
      " dB, sum of noise/signal ", NumberText(mixture.noise_to_signal_sum()),
      written_to.empty() ? ""
                         : absl::StrCat(", written to ", Printable(written_to)),
      "\n");
}

absl::Status SweptSpecs::WriteMixture(const v1::SweepMixture& mixture,
                                      const std::string& path,
                                      files::IfExists if_exists) const {
  for (const auto& choice : mixture.choices()) {
    absl::Status status = CheckNameForSpecFile(choice.tensor());
    if (!status.ok()) return status;
  }
  absl::StatusOr<files::AtomicFile> file =
      files::AtomicFile::Create(path, if_exists);
  if (!file.ok()) return file.status();
  std::string text;
  for (const auto& choice : mixture.choices()) {
    absl::StrAppend(&text, choice.tensor(), "=", Text(choice.spec_index()),
                    "\n");
  }
  const absl::Status status = file->Append(text);
  return status.ok() ? file->Commit() : status;
}

std::vector<v1::SweepTotal> TotalsOf(const std::vector<MeasuredTensor>& tensors,
                                     size_t spec_count) {
  std::vector<v1::SweepTotal> totals(spec_count);
  for (size_t i = 0; i < spec_count; ++i) {
    v1::SweepTotal& total = totals[i];
    total.set_spec_index(static_cast<uint32_t>(i));
    total.set_min_sqnr_db(std::numeric_limits<double>::quiet_NaN());
    for (const MeasuredTensor& tensor : tensors) {
      const MeasuredCandidate& candidate = tensor.candidates[i];
      if (!candidate.status.ok()) {
        total.set_failed_count(total.failed_count() + 1);
        continue;
      }
      total.set_size_bytes(total.size_bytes() + candidate.size_bytes);
      total.set_noise_to_signal_sum(total.noise_to_signal_sum() +
                                    candidate.noise_to_signal);
      const double sqnr_db = SqnrDb(candidate);
      // Without finite elements.
      if (std::isnan(sqnr_db)) continue;
      if (total.min_sqnr_tensor().empty() || sqnr_db < total.min_sqnr_db()) {
        total.set_min_sqnr_db(sqnr_db);
        total.set_min_sqnr_tensor(tensor.tensor->name);
      }
    }
  }
  absl::c_stable_sort(
      totals, [](const v1::SweepTotal& a, const v1::SweepTotal& b) {
        const bool failed_a = a.failed_count() > 0;
        const bool failed_b = b.failed_count() > 0;
        if (failed_a != failed_b) return failed_b;
        return a.noise_to_signal_sum() < b.noise_to_signal_sum();
      });
  return totals;
}

std::string ReasonForNoMixture(const v1::SweepMixture& mixture,
                               uint64_t tensor_count) {
  const auto choice_count = static_cast<uint64_t>(mixture.choices_size());
  if (choice_count < tensor_count) {
    return absl::StrCat("there is a choice for ", CountText(choice_count),
                        " of ", CountText(tensor_count), " tensors");
  }
  if (mixture.target_met()) return "";
  return absl::StrCat("no choice meets the target; the nearest has ",
                      BytesText(mixture.size_bytes()), " and a lowest SQNR of ",
                      DecibelText(mixture.min_sqnr_db()), " dB");
}

}  // namespace quantd::cli
