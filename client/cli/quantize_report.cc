#include "client/cli/quantize_report.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/cli/input_options.h"
#include "client/cli/printable.h"
#include "client/cli/table.h"
#include "client/cli/tensor_notes.h"
#include "client/cli/tie_options.h"
#include "client/cpp/errors.h"
#include "client/files/safetensors.h"
#include "client/jobs/draft_revision.h"
#include "client/jobs/importance.h"
#include "client/jobs/quantize_options.h"
#include "client/jobs/quantize_outcome.h"
#include "client/jobs/quantize_parts.h"
#include "client/jobs/quantize_plan.h"
#include "client/jobs/quantize_server.h"
#include "client/jobs/stored_inputs.h"
#include "client/models/fused_experts.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

// Totals of all tensors.
struct Totals {
  size_t tensor_count = 0;
  uint64_t before = 0;
  uint64_t after = 0;
  uint64_t quantized_count = 0;
  uint64_t kept_count = 0;
  uint64_t clipped_count = 0;
  bool has_output_noise = false;
  uint64_t nan_count = 0;
  uint64_t infinity_count = 0;
  std::set<std::string> formats;
  std::vector<TensorError> errors;
  // Failed tensors that the output has as they were.
  uint64_t copied_count = 0;
};

// Totals of all shards.
struct ShardTotals {
  uint64_t kept = 0;
  uint64_t written = 0;
  uint64_t file_bytes = 0;
  int64_t rounded_count = 0;
};

ShardTotals CountShards(const jobs::QuantizePlan& plan) {
  ShardTotals totals;
  for (const std::unique_ptr<jobs::Shard>& shard : plan.shards) {
    totals.kept += shard->is_kept ? 1 : 0;
    totals.written += shard->is_written ? 1 : 0;
    totals.file_bytes += shard->file_bytes;
    totals.rounded_count += shard->rounded_count;
  }
  return totals;
}

Totals CountTensors(const jobs::QuantizePlan& plan) {
  Totals totals;
  for (const std::unique_ptr<jobs::Shard>& shard : plan.shards) {
    for (const files::FileTensor& tensor : shard->input.tensors()) {
      if (!plan.IsInScope(tensor)) continue;
      const jobs::Outcome& outcome = plan.outcomes.at(tensor.name);
      ++totals.tensor_count;
      totals.before += tensor.data.size();
      if (!outcome.status.ok()) {
        totals.errors.push_back({tensor.name, outcome.status});
        totals.copied_count += outcome.is_quantized ? 0 : 1;
      }
      totals.clipped_count +=
          outcome.clipped_low_count + outcome.clipped_high_count;
      totals.has_output_noise |= outcome.output_noise.has_value();
      totals.nan_count += outcome.nan_count;
      totals.infinity_count += outcome.infinity_count;
      if (!shard->is_written) continue;
      totals.after += outcome.output_bytes;
      totals.kept_count += shard->is_kept ? 1 : 0;
      if (!outcome.is_quantized) continue;
      ++totals.quantized_count;
      totals.formats.insert(outcome.format);
    }
  }
  return totals;
}

std::string ResultText(const jobs::Shard& shard, const jobs::Outcome& outcome) {
  if (!shard.is_written) return outcome.status.ok() ? "not written" : "failed";
  if (!outcome.status.ok() && !outcome.is_quantized) return "failed, copied";
  return absl::StrCat(outcome.is_quantized ? outcome.format : "copied",
                      outcome.is_compensated ? ", compensated" : "",
                      shard.is_kept ? ", kept" : "");
}

Json OutcomeJson(const jobs::Shard& shard, const files::FileTensor& tensor,
                 const jobs::Outcome& outcome, const jobs::QuantizePlan& plan) {
  const char* const result = shard.is_kept          ? "kept"
                             : !outcome.status.ok() ? "failed"
                             : !shard.is_written    ? "not written"
                             : outcome.is_quantized ? "quantized"
                                                    : "copied";
  Json json = {{"name", tensor.name},
               {"shape", tensor.shape},
               {"dtype", std::string(DtypeName(tensor.dtype))},
               {"result", result},
               {"bytes_before", tensor.data.size()},
               {"bytes_after", shard.is_written ? outcome.output_bytes : 0}};
  if (outcome.is_quantized) {
    json["format"] = outcome.format;
    json["rounding"] = outcome.is_compensated ? "compensated" : "nearest";
    json["importance"] = plan.IsWeighed(tensor);
    json["mantissa_bits"] = outcome.mantissa_bits;
    json["clipped_low_count"] = outcome.clipped_low_count;
    json["clipped_high_count"] = outcome.clipped_high_count;
    json["nan_count"] = outcome.nan_count;
    json["infinity_count"] = outcome.infinity_count;
    json["coarse_scale_count"] = outcome.coarse_scale_count;
  }
  if (outcome.output_noise.has_value()) {
    json["output_noise"] = OutputNoiseJson(*outcome.output_noise);
  }
  if (outcome.metrics.has_value()) {
    json["sqnr_db"] = outcome.metrics->sqnr_db();
    json["max_absolute_error"] = outcome.metrics->max_absolute_error();
    json["mean_squared_error"] = outcome.metrics->mean_squared_error();
  }
  if (!outcome.status.ok()) json["error"] = ErrorJson(outcome.status);
  return json;
}

// Says what to do where the server refused to store.
void PrintRefused(const jobs::QuantizeOptions& options,
                  const std::vector<absl::Status>& statuses,
                  const Session& session) {
  const bool is_refused = std::any_of(
      statuses.begin(), statuses.end(), [](const absl::Status& status) {
        const absl::string_view reason = ErrorReason(status);
        return reason == "SCOPE_MISSING" || reason == "MODEL_DENIED";
      });
  if (options.store && is_refused) {
    session.PrintError(
        "quantctl: --no-store quantizes without keeping the encodings on "
        "the server");
  }
}

// The text on an output that is complete, but whose encodings are not
// published.
std::string UnpublishedText(const jobs::QuantizeOptions& options,
                            const jobs::QuantizePlan& plan,
                            const jobs::DraftRevision& draft) {
  const std::string how =
      plan.is_folder    ? "the same command publishes them"
      : plan.is_lacking ? "the same command with --force does so"
                        : absl::StrCat(
                              "to publish them: quantctl revisions publish "
                              "--keep-others ",
                              options.name.model, " ", draft.revision(), " ",
                              options.name.revision);
  return absl::StrCat("quantctl: ", options.output.path,
                      " is written, but its encodings are not published; ",
                      how);
}

// The report of one run, as it is now. Not thread-safe.
class RunReport {
 public:
  RunReport(const jobs::QuantizeOptions& options,
            const jobs::QuantizePlan& plan, const jobs::QuantizeServer* server,
            Session* session)
      : options_(options),
        plan_(plan),
        server_(server),
        session_(*session),
        totals_(CountTensors(plan)),
        shard_totals_(CountShards(plan)) {}

  void PrintRun() {
    if (!totals_.errors.empty()) session_.Note(kServerError);
    if (session_.json) {
      PrintJson();
    } else {
      session_.Print(TableText());
      if (plan_.is_complete) session_.Print(SummaryText());
    }
    PrintNotFinite();
    PrintCoarseScales();
    PrintClippedInputs();
    PrintLeftOut();
    PrintNearest();
    PrintUnweighted();
    if (plan_.is_complete) {
      PrintModel();
      PrintTies();
      PrintRounded();
    }
    if (!totals_.errors.empty()) PrintFailed();
  }

  void PrintError(const absl::Status& error) {
    ReportRefused(error, options_, &session_);
    PrintUnfinished();
  }

 private:
  void PrintJson() const {
    Json list = Json::array();
    for (const std::unique_ptr<jobs::Shard>& shard : plan_.shards) {
      for (const files::FileTensor& tensor : shard->input.tensors()) {
        if (!plan_.IsInScope(tensor)) continue;
        list.push_back(
            OutcomeJson(*shard, tensor, plan_.outcomes.at(tensor.name), plan_));
      }
    }
    session_.PrintJson({{"input", options_.input},
                        {"output", options_.output.path},
                        {"written", plan_.is_complete},
                        {"formats", totals_.formats},
                        {"bytes_before", totals_.before},
                        {"bytes_after", totals_.after},
                        {"file_bytes", shard_totals_.file_bytes},
                        {"quantized_count", totals_.quantized_count},
                        {"kept_count", totals_.kept_count},
                        {"failed_count", totals_.errors.size()},
                        {"rounded_count", shard_totals_.rounded_count},
                        {"experts", ExpertsJson()},
                        {"ties", TiesJson()},
                        {"ignored", plan_.ignored},
                        {"no_linear", plan_.no_linear},
                        {"conv1d", plan_.conv1d},
                        {"warnings", Warnings()},
                        {"retries", session_.retries()},
                        {"tensors", list}});
  }

  Json ExpertsJson() const {
    Json list = Json::array();
    for (const FusedExperts& experts : plan_.experts) {
      list.push_back({{"name", experts.name},
                      {"expert_count", experts.expert_count},
                      {"transposed", experts.is_transposed}});
    }
    return list;
  }

  Json TiesJson() const {
    Json ties = Json::array();
    for (const TieGroup& group : plan_.ties) {
      Json names = Json::array();
      for (const files::FileTensor* const tensor : group.tensors) {
        names.push_back(tensor->name);
      }
      ties.push_back({{"label", group.label}, {"tied_tensors", names}});
    }
    return ties;
  }

  bool HasClipped() const { return totals_.clipped_count > 0; }
  bool HasNotFinite() const {
    return totals_.nan_count + totals_.infinity_count > 0;
  }

  std::string TableText() const {
    Table table;
    table.AddColumn("TENSOR", Table::Align::kLeft);
    table.AddColumn("SHAPE", Table::Align::kLeft);
    table.AddColumn("DTYPE", Table::Align::kLeft);
    table.AddColumn("RESULT", Table::Align::kLeft);
    table.AddColumn("BEFORE", Table::Align::kBytes);
    table.AddColumn("AFTER", Table::Align::kBytes);
    if (options_.evaluate) {
      table.AddColumn("SQNR DB", Table::Align::kRight);
      table.AddColumn("MAX ERROR", Table::Align::kRight);
    }
    if (totals_.has_output_noise) {
      table.AddColumn("OUTPUT DB", Table::Align::kRight);
    }
    if (HasClipped()) table.AddColumn("CLIPPED", Table::Align::kRight);
    if (HasNotFinite()) {
      table.AddColumn("NAN", Table::Align::kRight);
      table.AddColumn("INF", Table::Align::kRight);
    }
    for (const std::unique_ptr<jobs::Shard>& shard : plan_.shards) {
      for (const files::FileTensor& tensor : shard->input.tensors()) {
        if (plan_.IsInScope(tensor)) table.AddRow(RowOf(*shard, tensor));
      }
    }
    return table.Render(StdoutHasStyle());
  }

  std::vector<std::string> RowOf(const jobs::Shard& shard,
                                 const files::FileTensor& tensor) const {
    const jobs::Outcome& outcome = plan_.outcomes.at(tensor.name);
    std::vector<std::string> row = {
        tensor.name,
        ShapeText(tensor.shape),
        std::string(DtypeName(tensor.dtype)),
        ResultText(shard, outcome),
        BytesCell(tensor.data.size()),
        shard.is_written ? BytesCell(outcome.output_bytes) : ""};
    if (options_.evaluate) {
      const auto& metrics = outcome.metrics;
      row.push_back(metrics.has_value() ? DecibelText(metrics->sqnr_db()) : "");
      row.push_back(!metrics.has_value() ? ""
                    : metrics->count() == 0
                        ? kNotMeasured
                        : NumberText(metrics->max_absolute_error()));
    }
    if (totals_.has_output_noise) {
      row.push_back(outcome.output_noise.has_value()
                        ? DecibelText(jobs::OutputSqnrDb(*outcome.output_noise))
                        : "");
    }
    const auto add_count = [&](uint64_t count) {
      row.push_back(outcome.is_quantized ? CountText(count) : "");
    };
    if (HasClipped()) {
      add_count(outcome.clipped_low_count + outcome.clipped_high_count);
    }
    if (HasNotFinite()) {
      add_count(outcome.nan_count);
      add_count(outcome.infinity_count);
    }
    return row;
  }

  std::string SummaryText() const {
    return absl::StrCat(
        CountText(totals_.quantized_count), " of ",
        CountText(totals_.tensor_count), " tensors to ",
        totals_.formats.empty() ? "codes"
                                : absl::StrJoin(totals_.formats, ", "),
        ", ", BytesText(totals_.before), " to ", BytesText(totals_.after),
        plan_.part.has_value()
            ? absl::StrCat(", part ", jobs::PartText(*plan_.part))
            : "",
        ", written to ", Printable(options_.output.path),
        shard_totals_.kept == 0
            ? ""
            : absl::StrCat("; ", CountText(shard_totals_.kept), " of ",
                           CountText(plan_.shards.size()),
                           " shards kept from an earlier run"),
        plan_.part.has_value() ? "; with all parts done, the same command with "
                                 "--join in place of --part completes it"
                               : "",
        "\n");
  }

  // Says what becomes of the other elements too.
  static absl::string_view LostBlocksText(const jobs::Outcome& outcome) {
    return absl::StartsWith(outcome.format, "mx")
               ? ": all elements of their blocks become NaN"
               : "";
  }

  void PrintNotFinite() {
    std::vector<std::string> notes;
    for (const std::unique_ptr<jobs::Shard>& shard : plan_.shards) {
      for (const files::FileTensor& tensor : shard->input.tensors()) {
        const jobs::Outcome& outcome = plan_.outcomes.at(tensor.name);
        if (outcome.nan_count + outcome.infinity_count == 0) continue;
        notes.push_back(absl::StrCat(
            "quantctl: tensor ", tensor.name, " ",
            NotFiniteText(outcome.nan_count, outcome.infinity_count),
            LostBlocksText(outcome)));
      }
    }
    PrintNotes(notes, &session_);
  }

  void PrintCoarseScales() {
    std::vector<std::string> notes;
    for (const std::unique_ptr<jobs::Shard>& shard : plan_.shards) {
      for (const files::FileTensor& tensor : shard->input.tensors()) {
        const jobs::Outcome& outcome = plan_.outcomes.at(tensor.name);
        if (outcome.coarse_scale_count == 0) continue;
        notes.push_back(absl::StrCat(
            "quantctl: tensor ", tensor.name, ": ",
            CountText(outcome.coarse_scale_count),
            " scales are below 2^-20, where float16 has few numbers: their "
            "elements lose much"));
      }
    }
    PrintNotes(notes, &session_);
  }

  // The inputs that compensated rounding was done for are not quite those that
  // were seen.
  void PrintClippedInputs() {
    std::vector<std::string> notes;
    for (const std::unique_ptr<jobs::Shard>& shard : plan_.shards) {
      for (const files::FileTensor& tensor : shard->input.tensors()) {
        const jobs::Outcome& outcome = plan_.outcomes.at(tensor.name);
        if (!outcome.output_noise.has_value()) continue;
        const std::string text =
            jobs::ClippedInputsText(tensor.name, *outcome.output_noise);
        if (!text.empty()) notes.push_back(text);
      }
    }
    PrintNotes(notes, &session_);
  }

  // Tensors that are copied in place of what was asked for. The exit code says
  // so where somebody named them, or where nothing else was quantized.
  void PrintLeftOut() {
    if (!session_.quiet) PrintNotes(plan_.notes, &session_);
    PrintNotes(plan_.left_out_notes, &session_);
    if (!plan_.left_out_notes.empty()) {
      session_.Note(kServerError);
      session_.PrintError(
          absl::StrCat("quantctl: ", CountText(plan_.left_out_notes.size()),
                       " tensors that were asked for are copied"));
    }
    if (plan_.is_complete && !plan_.part.has_value() &&
        totals_.quantized_count == 0) {
      session_.Note(kServerError);
      session_.PrintError(
          absl::StrCat("quantctl: nothing is quantized: ", options_.output.path,
                       " has all tensors as they were"));
    }
  }

  // Tensors that no inputs were found for.
  void PrintNearest() const {
    if (!plan_.nearest.empty()) {
      session_.PrintError(
          absl::StrCat("quantctl: rounded to the nearest, as no Gram matrix of "
                       "their inputs is stored: ",
                       NamesText(plan_.nearest)));
    }
    if (!plan_.named_nearest.empty()) {
      session_.Note(kServerError);
      session_.PrintError(absl::StrCat(
          "quantctl: asked for, but rounded to the nearest, as no Gram matrix "
          "of "
          "their inputs is stored: ",
          NamesText(plan_.named_nearest), "; see --inputs-map and --exclude"));
    }
  }

  // Tensors whose errors nothing weighs, although that was asked for.
  void PrintUnweighted() const {
    const jobs::FoundImportance& found = plan_.importance;
    if (!found.missing.empty()) {
      session_.PrintError(absl::StrCat(
          "quantctl: ", jobs::MissingImportanceText(
                            "quantized", options_.importance, found.missing)));
    }
    if (!found.untaken.empty()) {
      session_.PrintError(absl::StrCat(
          "quantctl: ",
          jobs::UntakenImportanceText("quantized", found.untaken)));
    }
    if (!plan_.named_unweighted.empty()) {
      session_.Note(kServerError);
      session_.PrintError(absl::StrCat(
          "quantctl: asked for, but ",
          jobs::MissingImportanceText("quantized", options_.importance,
                                      plan_.named_unweighted),
          "; see --exclude"));
    }
  }

  // Prints what the user may not expect of a compressed-tensors model.
  void PrintModel() const {
    if (!plan_.ignored.empty() && !options_.has_ignore && !session_.quiet) {
      session_.PrintError(
          absl::StrCat("quantctl: left as they are: ", NamesText(plan_.ignored),
                       options_.IsGguf() ? "; a --spec for them takes them"
                                         : "; see --ignore"));
    }
    if (!plan_.no_linear.empty() && !session_.quiet) {
      session_.PrintError(absl::StrCat(
          "quantctl: left as they are, as no matrices MODULE.weight: ",
          NamesText(plan_.no_linear)));
    }
    if (!plan_.conv1d.empty() && !session_.quiet) {
      session_.PrintError(
          absl::StrCat("quantctl: left as they are: ", NamesText(plan_.conv1d),
                       "; ", jobs::kConv1dText));
    }
    if (!plan_.experts.empty() && !session_.quiet) {
      const FusedExperts& first = plan_.experts[0];
      const size_t count = plan_.experts.size();
      session_.PrintError(absl::StrCat(
          "quantctl: written as one matrix for each expert, as vLLM reads "
          "them: ",
          first.name, " (", first.expert_count, " experts",
          first.is_transposed ? ", transposed" : "", ")",
          count > 1
              ? absl::StrCat(" and ", CountText(count - 1), " more tensors")
              : ""));
    }
    for (const std::string& warning : Warnings()) {
      session_.PrintError(absl::StrCat("quantctl: warning: ", warning));
    }
  }

  // Warnings of what vLLM makes of a compressed-tensors model.
  std::vector<std::string> Warnings() const {
    std::vector<std::string> warnings;
    if (!plan_.ragged.empty()) {
      warnings.push_back(absl::StrCat(
          "vLLM does not load fused matrices whose rows, but for the last "
          "one's, are no whole blocks: ",
          NamesText(plan_.ragged), "; take --scheme FP8_DYNAMIC"));
    }
    for (const auto& [text, names] : plan_.beyond_limits) {
      warnings.push_back(absl::StrCat(text, ": ", NamesText(names),
                                      "; --exclude leaves them as they are"));
    }
    if (!plan_.unlike_experts.empty()) {
      warnings.push_back(absl::StrCat(
          "vLLM up to 0.11.0 takes one scheme for the experts of all layers; "
          "not that of the first layer have ",
          NamesText(plan_.unlike_experts)));
    }
    if (plan_.no_kernels_count > 0) {
      warnings.push_back(absl::StrCat(
          "vLLM has no kernels for the weights and inputs of ",
          CountText(plan_.no_kernels_count), " modules",
          plan_.packable_count == 0
              ? "; see --scheme for what it has"
              : absl::StrCat(
                    "; with --layout pack-quantized it has them for ",
                    CountText(plan_.packable_count),
                    ", and with --activations dynamic where all weights are "
                    "int8:per-channel")));
    }
    return warnings;
  }

  void PrintTies() const {
    if (plan_.ties.empty() || session_.quiet) return;
    const size_t count = plan_.ties.size();
    session_.PrintError(absl::StrCat(
        "quantctl: tensors that share an outer scale: ", plan_.ties[0].label,
        count > 1 ? absl::StrCat(" and ", CountText(count - 1), " more groups")
                  : "",
        options_.ties.no_defaults ? "" : "; see --tie and --no-ties"));
  }

  // The output is not quite what was measured.
  void PrintRounded() const {
    if (shard_totals_.rounded_count == 0) return;
    const std::string count =
        CountText(static_cast<uint64_t>(shard_totals_.rounded_count));
    if (options_.IsGguf()) {
      session_.PrintError(absl::StrCat(
          "quantctl: ", count,
          " tensors have minima, which are float16 in GGUF and were rounded: "
          "reals may differ from quantd's by 1% of a scale"));
    } else {
      session_.PrintError(absl::StrCat(
          "quantctl: ", count,
          " of the nvfp4 tensors: readers divide by weight_global_scale, the "
          "inverse of the outer scale, and get reals that may differ from "
          "quantd's in the last bit"));
    }
  }

  void PrintFailed() {
    if (!session_.json) PrintTensorErrors(totals_.errors, &session_);
    const std::string failed =
        absl::StrCat(CountText(totals_.errors.size()), " of ",
                     CountText(totals_.tensor_count), " tensors failed");
    if (plan_.is_complete) {
      session_.PrintError(absl::StrCat(
          "quantctl: ", failed, "; ", options_.output.path, " has ",
          CountText(totals_.copied_count), " of them as they were"));
      return;
    }
    std::vector<absl::Status> statuses;
    for (const TensorError& error : totals_.errors) {
      statuses.push_back(error.status);
    }
    PrintRefused(options_, statuses, session_);
    PrintUnfinished();
    session_.PrintError(absl::StrCat(
        "quantctl: ", failed, ", so ", options_.output.path,
        plan_.is_folder ? " is not complete" : " is not written",
        options_.IsGguf() ? ""
                          : "; --keep-going leaves such tensors as they are"));
  }

  // Prints what there is of an output that is not complete, or not published.
  void PrintUnfinished() const {
    const jobs::DraftRevision* const draft =
        server_ == nullptr ? nullptr : server_->draft();
    if (draft != nullptr && plan_.is_complete) {
      return session_.PrintError(UnpublishedText(options_, plan_, *draft));
    }
    if (draft != nullptr && server_->stored_count() > 0) {
      session_.PrintError(absl::StrCat(
          "quantctl: the server has the new encodings of ",
          CountText(server_->stored_count()), " tensors in revision ",
          draft->revision(), " of model \"", options_.name.model,
          "\"; revision ", options_.name.revision, " is as it was",
          options_.output.IsStandardOutput()
              ? absl::StrCat("; `quantctl revisions delete ",
                             options_.name.model, " ", draft->revision(),
                             "` deletes them")
              : ""));
    }
    if (plan_.is_folder && shard_totals_.written > 0) {
      session_.PrintError(UnfinishedText(options_, plan_, server_));
    }
  }

  const jobs::QuantizeOptions& options_;
  const jobs::QuantizePlan& plan_;
  // Null where none was called.
  const jobs::QuantizeServer* const server_;
  Session& session_;
  const Totals totals_;
  const ShardTotals shard_totals_;
};

}  // namespace

void ReportRun(const jobs::QuantizeOptions& options,
               const jobs::QuantizePlan& plan,
               const jobs::QuantizeServer* server, Session* session) {
  RunReport(options, plan, server, session).PrintRun();
}

void ReportError(const absl::Status& error,
                 const jobs::QuantizeOptions& options,
                 const jobs::QuantizePlan& plan,
                 const jobs::QuantizeServer* server, Session* session) {
  RunReport(options, plan, server, session).PrintError(error);
}

void ReportRefused(const absl::Status& error,
                   const jobs::QuantizeOptions& options, Session* session) {
  PrintRefused(options, {error}, *session);
  session->Fail(error);
}

std::string UnfinishedText(const jobs::QuantizeOptions& options,
                           const jobs::QuantizePlan& plan,
                           const jobs::QuantizeServer* server) {
  const uint64_t written = CountShards(plan).written;
  if (plan.is_folder) {
    return absl::StrCat("quantctl: ", options.output.path, " has ",
                        CountText(written), " of ",
                        CountText(plan.shards.size()),
                        " shards; the same command goes on from there");
  }
  const bool is_written = written == 1 && !plan.part.has_value();
  if (is_written && server != nullptr && server->draft() != nullptr &&
      !plan.is_published) {
    return UnpublishedText(options, plan, *server->draft());
  }
  return absl::StrCat("quantctl: stopped; ", options.output.path,
                      is_written ? " is written" : " is not written");
}

}  // namespace quantd::cli
