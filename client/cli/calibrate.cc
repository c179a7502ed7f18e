#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/cli/command_line.h"
#include "client/cli/commands.h"
#include "client/cli/message_json.h"
#include "client/cli/progress.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "client/cli/tensor_loop.h"
#include "client/cli/tensor_notes.h"
#include "client/cli/tensor_options.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/cpp/tensor.h"
#include "client/files/safetensors.h"
#include "client/jobs/revision_name.h"
#include "client/jobs/selection.h"
#include "client/jobs/spec_options.h"
#include "client/jobs/tensor_filter.h"
#include "client/models/gram_steps.h"
#include "client/models/plain_input.h"
#include "client/models/spec_syntax.h"
#include "client/models/tensor_input.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

struct CalibrateOptions {
  std::string input;
  jobs::RevisionName name;
  jobs::SpecOptions spec;
  jobs::TensorFilter filter;
  // Granularity of a contribution's statistics; a block size stands in its
  // place.
  std::string granularity = "default";
  std::string block_size;
  bool store = false;
  // Source of a contribution; empty for none.
  std::string source;
  uint64_t sequence = 0;
  uint32_t mantissa_bits = 0;
  std::optional<double> averaging_constant;
  bool force_statistics = false;
  bool gram = false;
  bool moments = false;
  std::optional<int> feature_axis;

  // Contributions stand for themselves unless a spec was asked for.
  bool HasSpec() const {
    return store && (source.empty() || !spec.specs.empty());
  }
};

v1::Contribution MakeContribution(const CalibrateOptions& options,
                                  const Granularity& granularity) {
  v1::Contribution contribution;
  contribution.set_source(options.source);
  contribution.set_sequence(options.sequence);
  contribution.set_mantissa_bits(options.mantissa_bits);
  if (options.averaging_constant.has_value()) {
    contribution.set_averaging_constant(*options.averaging_constant);
  }
  SetGranularity(granularity, &contribution);
  return contribution;
}

// Sets what --gram, --moments and --feature-axis mean for a tensor.
void AddFeatures(const CalibrateOptions& options,
                 const files::FileTensor& tensor,
                 v1::Contribution* contribution) {
  if (!options.gram && !options.moments) return;
  v1::FeatureStatistics* const features = contribution->mutable_features();
  features->set_gram(options.gram);
  features->set_moments(options.moments);
  if (options.feature_axis.has_value()) {
    features->set_axis(*options.feature_axis);
  }
  // The server says what is wrong with a tensor without elements.
  if (!options.gram || tensor.shape.empty() || tensor.data.empty()) return;
  const std::vector<int> steps = GramSteps(tensor);
  features->mutable_step_exponent()->Add(steps.begin(), steps.end());
}

// The counts of a contribution, in JSON.
Json ContributionJson(const v1::ContributionResult& counted) {
  Json json = {{"sequence", counted.sequence()},
               {"duplicate", counted.duplicate()}};
  if (counted.has_gram()) {
    const v1::GramResult& gram = counted.gram();
    json["gram"] = {{"rows", gram.rows()},
                    {"left_out_rows", gram.left_out_rows()},
                    {"clipped_count", gram.clipped_count()},
                    {"part_size", gram.part_size()}};
  }
  if (counted.has_moments()) {
    const v1::MomentsResult& moments = counted.moments();
    json["moments"] = {{"feature_count", moments.feature_count()},
                       {"count", moments.count()},
                       {"left_out_count", moments.left_out()}};
  }
  return json;
}

// Notes, in words, of what a contribution left out of the features, or did to
// them.
void AddFeatureNotes(const files::FileTensor& tensor,
                     const v1::ContributionResult& counted,
                     std::vector<std::string>* notes) {
  const auto note = [&](uint64_t count, absl::string_view what) {
    if (count == 0) return;
    notes->push_back(absl::StrCat("quantctl: tensor ", tensor.name, ": ",
                                  CountText(count), " ", what));
  };
  const v1::GramResult& gram = counted.gram();
  note(gram.left_out_rows(),
       "rows are left out of the Gram matrix: an element is not finite");
  note(gram.clipped_count(),
       "elements are limited to 2^20 steps in the Gram matrix: they are more "
       "than 256 times as large as the first inputs; delete the statistics and "
       "begin with the largest");
  if (gram.part_size() > 0) {
    const auto features = static_cast<uint64_t>(tensor.shape.back());
    const uint64_t parts = (features + gram.part_size() - 1) / gram.part_size();
    note(parts > 1 ? parts : 0,
         absl::StrCat("parts of ", CountText(gram.part_size()),
                      " features make up the Gram matrix; features of two "
                      "parts count as uncorrelated"));
  }
  note(counted.moments().left_out(),
       "elements are left out of the moments: they are not finite");
}

// Approximate size in the store of the statistics of one block of `block`
// elements: a histogram of n elements that form a bell takes 10 n bytes, or 250
// (log2 n - 4) from 64 elements on.
uint64_t HistogramBytes(int64_t block) {
  const auto size = static_cast<double>(block);
  return static_cast<uint64_t>(block < 64 ? 10 * size
                                          : 250 * (std::log2(size) - 4));
}

// Fails if the statistics in blocks would take more than the tensors and more
// than a server should hold of what lies in a file.
absl::Status CheckStatisticsSize(
    const std::vector<const files::FileTensor*>& tensors,
    const Granularity& granularity) {
  constexpr uint64_t kHarmlessBytes = uint64_t{16} << 20;
  if (granularity.kind != Granularity::Kind::kGroup &&
      granularity.kind != Granularity::Kind::kBlockSize) {
    return absl::OkStatus();
  }
  uint64_t data_bytes = 0;
  uint64_t statistics_bytes = 0;
  for (const files::FileTensor* const tensor : tensors) {
    const absl::StatusOr<std::vector<int64_t>> block_size =
        BlockSizeOf(granularity, tensor->shape);
    // The server says what is wrong with it.
    if (!block_size.ok()) continue;
    const absl::StatusOr<std::vector<int64_t>> scale_shape =
        ScaleShape(tensor->shape, *block_size);
    const absl::StatusOr<int64_t> elements = ElementCount(tensor->shape);
    if (!scale_shape.ok() || !elements.ok() || *elements == 0) continue;
    const int64_t blocks = ElementCount(*scale_shape).value_or(1);
    data_bytes += tensor->data.size();
    statistics_bytes +=
        static_cast<uint64_t>(blocks) *
        HistogramBytes(std::max<int64_t>(1, *elements / blocks));
  }
  if (statistics_bytes <= std::max(data_bytes, kHarmlessBytes)) {
    return absl::OkStatus();
  }
  return ArgumentInvalidError(absl::StrCat(
      "statistics in such small blocks would take about ",
      BytesText(statistics_bytes), ", more than the ", BytesText(data_bytes),
      " of the tensors; measure weights in their file with quantctl sweep FILE "
      "or quantctl evaluate FILE, keep statistics per tensor or per channel, "
      "or give --force-statistics"));
}

void RunCalibrate(const CalibrateOptions& options, Session* session) {
  const bool has_spec = options.HasSpec();
  const bool contributes = !options.source.empty();
  const absl::StatusOr<SpecSet> specs = options.spec.ParseSet();
  if (!specs.ok()) return session->FailUsage(specs.status());
  const absl::StatusOr<Granularity> granularity =
      options.block_size.empty() ? ParseGranularity(options.granularity)
                                 : ParseBlockSize(options.block_size);
  if (!granularity.ok()) return session->FailUsage(granularity.status());
  const absl::StatusOr<TensorInput> input = TensorInput::Open(options.input);
  if (!input.ok()) return session->Fail(input.status());
  const absl::Status plain = CheckPlain(*input, options.input);
  if (!plain.ok()) return session->Fail(plain);
  ReportUnread(*input, options.filter, session);
  const absl::Status selects =
      jobs::SelectTensors({&*input}, options.filter, &*specs).status();
  if (!selects.ok()) return session->FailUsage(selects);
  // Patterns of specs say what has encodings, not what is counted. A source
  // that has seen no elements of a tensor is counted, too.
  const absl::StatusOr<std::vector<const files::FileTensor*>> taken =
      contributes ? jobs::SelectTensors({&*input}, options.filter, nullptr)
                  : SelectMeasurable(*input, options.filter, &*specs, session);
  if (!taken.ok()) return session->FailUsage(taken.status());
  if (contributes && !options.force_statistics) {
    const absl::Status small = CheckStatisticsSize(*taken, *granularity);
    if (!small.ok()) return session->FailUsage(small);
  }
  const absl::StatusOr<std::unique_ptr<Client>> client = session->Connect();
  if (!client.ok()) return session->FailUsage(client.status());
  const auto spec_of = [&](const files::FileTensor& tensor) {
    return has_spec ? specs->For(tensor.name) : nullptr;
  };

  Json list = Json::array();
  Table table;
  table.AddColumn("TENSOR", Table::Align::kLeft);
  table.AddColumn("SHAPE", Table::Align::kLeft);
  table.AddColumn("MIN", Table::Align::kRight);
  table.AddColumn("MAX", Table::Align::kRight);
  table.AddColumn("ZEROS", Table::Align::kRight);
  table.AddColumn("NAN", Table::Align::kRight);
  table.AddColumn("INF", Table::Align::kRight);
  if (contributes) {
    table.AddColumn("SEQUENCE", Table::Align::kRight);
    table.AddColumn("COUNTED", Table::Align::kLeft);
  }
  if (options.gram) table.AddColumn("GRAM ROWS", Table::Align::kRight);
  if (options.moments) table.AddColumn("FEATURES", Table::Align::kRight);
  if (has_spec) {
    table.AddColumn("SCALES", Table::Align::kRight);
    table.AddColumn("ETAG", Table::Align::kLeft);
  }
  std::vector<TensorError> errors;
  std::vector<std::string> notes;
  const auto fail = [&](const files::FileTensor& tensor,
                        const absl::Status& status) {
    session->Note(kServerError);
    errors.push_back({tensor.name, status});
    list.push_back({{"name", tensor.name},
                    {"shape", tensor.shape},
                    {"error", ErrorJson(status)}});
    table.AddRow({tensor.name, ShapeText(tensor.shape), "failed"});
  };
  std::vector<const files::FileTensor*> selected;
  uint64_t total_bytes = 0;
  for (const files::FileTensor* const one : *taken) {
    const files::FileTensor& tensor = *one;
    if (const SpecTemplate* const spec = spec_of(tensor); spec != nullptr) {
      const absl::Status status = spec->SpecOf(tensor.shape).status();
      if (!status.ok()) {
        fail(tensor, status);
        continue;
      }
    }
    selected.push_back(&tensor);
    total_bytes += tensor.data.size();
  }
  absl::Status fatal;
  {
    Progress progress(total_bytes, !session->quiet);
    const std::unique_ptr<CalibrateStream> stream = (*client)->OpenCalibrate();
    ForEachTensor(
        stream.get(), selected,
        [&](const files::FileTensor& tensor) {
          CalibrateJob job;
          const bool is_kept = has_spec || contributes;
          job.tensor =
              MakeTensor(tensor, is_kept ? options.name.NameOf(tensor.name)
                                         : TensorName());
          if (const SpecTemplate* const spec = spec_of(tensor);
              spec != nullptr) {
            job.spec = *spec->SpecOf(tensor.shape);
          }
          if (contributes) {
            job.contribution = MakeContribution(options, *granularity);
            AddFeatures(options, tensor, &*job.contribution);
          }
          return job;
        },
        [&](const files::FileTensor& tensor,
            const absl::StatusOr<CalibrateResult>& result) {
          progress.Add(tensor.data.size(), tensor.name);
          if (!result.ok()) {
            if (ExitCodeOf(result.status()) == kUnreachable) {
              fatal = result.status();
            }
            fail(tensor, result.status());
            return fatal.ok();
          }
          const v1::TensorStatistics& statistics = result->statistics();
          Json json = {{"name", tensor.name},
                       {"shape", tensor.shape},
                       {"statistics", StatisticsJson(statistics)}};
          std::vector<std::string> row = {
              tensor.name,
              ShapeText(tensor.shape),
              NumberText(statistics.min()),
              NumberText(statistics.max()),
              CountText(statistics.zero_count()),
              CountText(statistics.nan_count()),
              CountText(statistics.positive_infinity_count() +
                        statistics.negative_infinity_count())};
          if (contributes) {
            const v1::ContributionResult& counted = result->contribution();
            json["contribution"] = ContributionJson(counted);
            row.push_back(CountText(counted.sequence()));
            row.push_back(counted.duplicate() ? "before" : "now");
            if (options.gram) row.push_back(CountText(counted.gram().rows()));
            if (options.moments) {
              row.push_back(CountText(counted.moments().feature_count()));
            }
            AddFeatureNotes(tensor, counted, &notes);
          }
          if (result->has_prediction()) {
            json["prediction"] = PredictionJson(result->prediction());
          }
          if (result->has_stored_encoding()) {
            const v1::StoredEncoding& stored = result->stored_encoding();
            const int scale_count = stored.encoding().scale_size();
            json["format"] = FormatName(stored.encoding().format());
            json["scale_count"] = scale_count;
            json["etag"] = stored.etag();
            json["generation"] = stored.generation();
            row.push_back(CountText(static_cast<uint64_t>(scale_count)));
            row.push_back(stored.etag());
          }
          list.push_back(std::move(json));
          table.AddRow(std::move(row));
          return true;
        });
  }
  if (!fatal.ok()) {
    // Not the tensor's but everybody's error.
    session->exit_code = kSuccess;
    return session->Fail(fatal);
  }
  if (session->json) {
    return session->PrintJson({{"input", options.input},
                               {"model", options.name.model},
                               {"revision", options.name.revision},
                               {"retries", session->retries()},
                               {"tensors", list}});
  }
  session->Print(table.Render(StdoutHasStyle()));
  PrintNotes(notes, session);
  PrintTensorErrors(errors, session);
}

}  // namespace

void AddCalibrateCommand(Command* quantctl, Session* session) {
  Command* const command = quantctl->AddCommand(
      "calibrate",
      "Compute the encodings of a file's tensors, or add to the statistics "
      "that encodings are computed from later, and keep them on the server");
  const auto options = std::make_shared<CalibrateOptions>();
  AddInputArgument(command, &options->input);
  AddRevisionOptions(command, /*required=*/false, &options->name);
  AddSpecOptions(command, &options->spec);
  AddFilterOptions(command, &options->filter);
  const Option* const store = command->AddFlag(
      "--store,!--no-store", &options->store,
      "Keep the encodings (the default with --model); without a model under "
      "the file's name without extension. --no-store only shows the "
      "statistics");
  Option* const source = command->AddOption(
      "--source", &options->source, "NAME",
      "Add the tensors to the statistics that the server keeps, as this "
      "source, e.g. rank-3; encodings are computed only if there is a --spec "
      "too");
  Option* const sequence =
      command
          ->AddOption("--sequence", &options->sequence, "N",
                      "Number of this contribution of the source, from 1 on; "
                      "one that is not larger than the last is not counted "
                      "again")
          ->Needs(source);
  source->Needs(sequence);
  Option* const granularity =
      command
          ->AddOption("--granularity", &options->granularity, "GRANULARITY",
                      "Granularity of the statistics: per-tensor, "
                      "per-channel[:AXIS] or group:N")
          ->Suggest(GranularityNames())
          ->ShowDefault()
          ->Needs(source);
  command
      ->AddOption("--block-size", &options->block_size, "N,N,...",
                  "The same as a number for each dimension, 0 for the whole of "
                  "it")
      ->Excludes(granularity)
      ->Needs(source);
  command
      ->AddOption("--mantissa-bits", &options->mantissa_bits, "N",
                  "Precision of the statistics, 2 to 10; default 7 per "
                  "tensor, 5 up to 256 scales, otherwise 3")
      ->Needs(source);
  command
      ->AddOption("--averaging-constant", &options->averaging_constant,
                  "WEIGHT",
                  "Weight of a contribution in the moving average; default "
                  "0.01")
      ->Needs(source);
  command
      ->AddFlag("--gram", &options->gram,
                "Keep the Gram matrix of the tensors' rows too, for "
                "quantctl quantize --rounding compensated and quantctl "
                "evaluate --inputs: the last dimension has the inputs of "
                "a layer. It takes about 4 n^2 bytes for n of them")
      ->Needs(source);
  command
      ->AddFlag("--moments", &options->moments,
                "Keep count, sum and sum of squares of each feature too, "
                "for specs with importance and for importance matrices of "
                "llama.cpp")
      ->Needs(source);
  command->AddOption("--feature-axis", &options->feature_axis, "AXIS",
                     "Dimension that has the features of --moments; negative "
                     "ones count from the end; default -1, the last. A Gram "
                     "matrix takes the last one only");
  command->AddFlag("--force-statistics", &options->force_statistics,
                   "Add to statistics also where they would take more than the "
                   "tensors and more than 16 MiB");
  command->AddExample(
      "quantctl calibrate activations.safetensors --model acme/net \\\n"
      "  --source rank-0 --sequence 1",
      "add to the statistics of a model");
  command->AddExample(
      "quantctl calibrate model.safetensors --model acme/net \\\n"
      "  --spec int8:per-channel",
      "compute encodings at once and keep them");
  command->AddExample(
      "quantctl calibrate inputs.safetensors --model acme/net --gram \\\n"
      "  --moments --source rank-0 --sequence 1",
      "the inputs of layers, for quantctl quantize --rounding compensated");
  command->AddNote(
      "Statistics keep a histogram for each scale, and are for activations. Of "
      "a float32 matrix of 4,096 columns they take less than a hundredth of "
      "it per tensor, an eighth of it per channel, and 1.5 to 3 times as much "
      "as it with group:128 to group:16; of bfloat16 twice that. Weights lie "
      "in a file: quantctl sweep FILE measures them there in one pass and "
      "stores nothing.");
  command->OnRun([options, session, store] {
    if (options->feature_axis.has_value() && !options->gram &&
        !options->moments) {
      return session->FailUsage(ArgumentInvalidError(
          "expected --moments or --gram with --feature-axis"));
    }
    if (!store->IsGiven()) options->store = !options->name.model.empty();
    // Files of many people have the same name.
    if (options->name.model.empty() &&
        (!store->IsGiven() || !options->source.empty())) {
      return session->FailUsage(ArgumentInvalidError(
          options->source.empty()
              ? "expected --model, to keep the encodings under, --store, to "
                "keep them under the file's name, or --no-store"
              : "expected --model, to keep the statistics under"));
    }
    if (options->name.model.empty()) {
      options->name.model = FileStem(options->input);
    }
    RunCalibrate(*options, session);
  });
}

}  // namespace quantd::cli
