#include "server/rpc/compensated_quantize.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/errors.h"
#include "core/evaluate/output_noise.h"
#include "core/parallel/thread_pool.h"
#include "core/quantize/compensated_rounding.h"
#include "core/quantize/compensation_factor.h"
#include "core/quantize/quantize.h"
#include "core/statistics/gram_state.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/code_geometry.h"
#include "server/rpc/code_producer.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/held_quantize.h"
#include "server/rpc/layer_inputs.h"
#include "server/rpc/tensor_accumulator.h"
#include "server/rpc/tensor_calibration.h"
#include "server/store/statistics_store.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr char kWayOutOfRounding[] =
    "send fewer tensors at once, or give the server more memory";
// Rows of a task of float32 elements; see core::QuantizeCompensated.
constexpr int64_t kRoundingTaskRows = 48;

// Widths of the parts of a Gram matrix.
std::vector<int64_t> PartWidths(int64_t columns, int64_t part_size) {
  std::vector<int64_t> widths;
  for (int64_t first = 0; first < columns; first += part_size) {
    widths.push_back(std::min(part_size, columns - first));
  }
  return widths;
}

// About how long one worker takes to factor the Gram matrix, to round, and to
// measure the output.
absl::Duration CompensationTime(int64_t rows, absl::Span<const int64_t> parts,
                                bool measure_output) {
  // Fused multiply-adds.
  constexpr double kPerSecond = 5e9;
  double products = 0;
  for (const int64_t width : parts) {
    const double n = static_cast<double>(width);
    products += n * n * static_cast<double>(rows) / (measure_output ? 1 : 2);
  }
  return core::CompensationFactor::Time(parts) +
         absl::Seconds(products / kPerSecond);
}

class CompensatedQuantizeJob final : public HeldQuantizeJob {
 public:
  // `spec`, `accumulator`  as of HeldQuantizeJob; without them, the encoding is
  // that of `source`.
  CompensatedQuantizeJob(const RpcEnvironment& env, QuantizeTask task,
                         CompensatedRounding rounding,
                         std::shared_ptr<const ResolvedSpec> spec,
                         std::unique_ptr<TensorAccumulator> accumulator,
                         absl::optional<EncodingSource> source,
                         absl::string_view source_field)
      : HeldQuantizeJob(env, std::move(task), std::move(spec),
                        std::move(accumulator)),
        options_(rounding.options),
        measure_output_(rounding.measure_output),
        source_(std::move(source)),
        source_field_(source_field),
        rows_(this->task().description.shape[0]),
        columns_(this->task().description.element_count / rows_),
        inputs_(std::move(rounding.inputs), std::move(rounding.statistics),
                columns_) {
    // The longest time that it can take: Resolve finds out how large the parts
    // are.
    SetSearchTime(core::GramState::PartSize(columns_));
    ReadFirst();
  }

  // Resolve tells what is wrong with the encoding or with the inputs before any
  // data come.
  StoreUse ResolveUse() const override { return StoreUse::kReadStatistics; }
  absl::Status Resolve(ChunkWriter* out) override {
    if (source_.has_value()) {
      absl::StatusOr<ResolvedEncoding> resolved =
          source_->Resolve(env(), task().description, task().transport());
      if (!resolved.ok()) {
        return core::WithField(resolved.status(), source_field_);
      }
      given_ = *std::move(resolved);
    }
    absl::Status status = HeldQuantizeJob::Resolve(out);
    if (!status.ok()) return status;
    geometry_ = QuantizeGeometry(
        task().description,
        *core::FindFormat(spec() != nullptr ? spec()->spec.format
                                            : given_.encoding->format));
    status = CheckOutput(task().output, geometry_.codes_size_bytes());
    if (!status.ok()) return status;
    // Without reading its sums.
    const absl::StatusOr<core::GramState::Parts> found = inputs_.Find();
    if (!found.ok()) {
      return core::WithField(found.status(), "header.rounding.inputs");
    }
    SetSearchTime(found->part_size);
    work_bytes_ = WorkBytes(found->part_size);
    return absl::OkStatus();
  }

  // The first bytes wait for all that rounding will need, so that nothing is
  // sent in vain.
  absl::Status Reserve(int64_t bytes) override {
    absl::Status status =
        env().budget->Grow(&work_lease_, work_bytes_, kWayOutOfRounding);
    return status.ok() ? HeldQuantizeJob::Reserve(bytes) : status;
  }

 protected:
  absl::Status Read() override {
    absl::StatusOr<core::GramState> gram =
        inputs_.Read(env().budget, &work_lease_, kWayOutOfRounding, stop());
    absl::Status status = gram.status();
    if (status.ok()) {
      gram_ = *std::move(gram);
      // Another may have come in place of the one that Resolve found.
      status = env().budget->Grow(&work_lease_, WorkBytes(gram_->part_size()),
                                  kWayOutOfRounding);
    }
    return core::WithField(status, "header.rounding.inputs");
  }

  bool EncodeIsLong() const override { return true; }

  absl::StatusOr<ResolvedEncoding> Encode() override {
    absl::StatusOr<ResolvedEncoding> resolved =
        spec() != nullptr ? Calibrate(env().helper_pool) : std::move(given_);
    if (!resolved.ok()) return resolved;
    absl::Status status = Round(*resolved);
    if (!status.ok()) return status;
    // Clients may be slow to read what is left.
    work_bytes_ = geometry_.codes_size_bytes();
    work_lease_.Release();
    env().budget->Count(&work_lease_, work_bytes_);
    return resolved;
  }

  absl::Status Answer(int64_t offset_bytes, absl::Span<const uint8_t> block,
                      CodeProducer* out) override {
    const int64_t begin = geometry_.CodesOffsetOfReal(offset_bytes);
    const int64_t end = geometry_.CodesOffsetOfReal(
        offset_bytes + static_cast<int64_t>(block.size()));
    out->Take(offset_bytes, absl::MakeConstSpan(codes_).subspan(
                                static_cast<size_t>(begin),
                                static_cast<size_t>(end - begin)));
    out->Take(counts_);
    if (measure_output_) out->Take(output_noise_);
    return absl::OkStatus();
  }

 private:
  void SetSearchTime(int64_t part_size) {
    search_time_ = CompensationTime(rows_, PartWidths(columns_, part_size),
                                    measure_output_);
    if (spec() != nullptr) search_time_ += ElementSearchTime(*spec());
  }

  int64_t RowBytes() const { return columns_ * geometry_.real_bytes; }

  // Rows that are rounded in one call.
  int64_t BandRows() const {
    const int64_t threads = env().pool->thread_count();
    // Rows whose codes fill whole bytes.
    const int64_t granule_rows =
        geometry_.codes_per_granule /
        std::gcd(columns_, geometry_.codes_per_granule);
    const int64_t rows = (threads * kRoundingTaskRows + granule_rows - 1) /
                         granule_rows * granule_rows;
    return std::min(rows, rows_);
  }

  // The most that reading a Gram matrix in such parts, its factor and rounding
  // hold at once, beside the tensor.
  int64_t WorkBytes(int64_t part_size) const {
    constexpr int64_t kSumBytes = sizeof(int64_t);
    const std::vector<int64_t> widths = PartWidths(columns_, part_size);
    int64_t pairs = 0;
    for (const int64_t width : widths) pairs += width * width;
    const int64_t dense_bytes = pairs * static_cast<int64_t>(sizeof(double));
    const int64_t gram_bytes =
        core::GramState::MemoryBytes(columns_, part_size);
    const int64_t factor_bytes = core::CompensationFactor::MemoryBytes(widths);
    const int64_t reading = (pairs + columns_) / 2 * kSumBytes + gram_bytes;
    const int64_t factoring =
        dense_bytes +
        std::max(gram_bytes,
                 factor_bytes +
                     columns_ * core::CompensationFactor::kCreateColumnBytes);
    const int64_t rounding =
        factor_bytes + geometry_.codes_size_bytes() + BandRows() * RowBytes() +
        env().pool->thread_count() *
            core::CompensatedTaskBytes(columns_, widths[0]);
    const int64_t measuring =
        measure_output_
            ? gram_bytes + core::OutputGram::MemoryBytes(columns_, part_size) +
                  BandRows() * RowBytes() +
                  env().pool->thread_count() * core::OutputTaskBytes(columns_)
            : 0;
    return std::max({reading, measuring, factoring, rounding});
  }

  // Errors: those of core::CompensationFactor and core::QuantizeCompensated.
  absl::Status Round(const ResolvedEncoding& resolved) {
    const auto input_rows = static_cast<double>(gram_->rows());
    output_noise_.set_source(v1::OUTPUT_NOISE_SOURCE_GRAM);
    output_noise_.set_clipped_input_count(
        static_cast<uint64_t>(gram_->clipped()));
    const absl::StatusOr<double> signal = OutputSignal();
    if (!signal.ok()) return signal.status();
    const absl::StatusOr<core::CompensationFactor> factor = Factor();
    if (!factor.ok()) {
      return core::WithField(factor.status(), "header.rounding");
    }
    codes_.resize(static_cast<size_t>(geometry_.codes_size_bytes()));
    std::vector<double> errors(static_cast<size_t>(BandRows()));
    double noise = 0;
    const auto round = [&](int64_t row, int64_t rows, const uint8_t* reals) {
      absl::Status status = core::QuantizeCompensated(
          *factor, *resolved.encoding, *resolved.layout,
          task().description.element_type, task().nan_policy, row, rows, reals,
          codes_.data() + geometry_.CodesOffset(row * columns_), errors.data(),
          &counts_, env().helper_pool, stop());
      // One after the other: the same sum for any bands.
      for (int64_t i = 0; i < rows; ++i) noise += errors[i];
      return status;
    };
    absl::Status status = buffer().ForEachBand(RowBytes(), BandRows(), round);
    if (!status.ok()) return status;
    const bool has_finite =
        counts_.nan + counts_.positive_infinity + counts_.negative_infinity <
        counts_.total;
    output_noise_.set_noise_to_signal(
        has_finite
            ? core::NoiseToSignal(std::max(noise, 0.0) / input_rows, *signal)
            : std::numeric_limits<double>::quiet_NaN());
    return absl::OkStatus();
  }

  // The power of the layer's output; 0 unless it is measured.
  absl::StatusOr<double> OutputSignal() {
    if (!measure_output_) return 0;
    const absl::StatusOr<core::OutputGram> gram =
        core::OutputGram::Create(*gram_, env().helper_pool, stop());
    if (!gram.ok()) return gram.status();
    core::OutputPower power;
    const auto add = [&](int64_t row, int64_t rows, const uint8_t* reals) {
      return core::AddOutputPower(*gram, task().description.element_type, rows,
                                  reals, nullptr, &power, env().helper_pool,
                                  stop());
    };
    absl::Status status = buffer().ForEachBand(RowBytes(), BandRows(), add);
    if (!status.ok()) return status;
    return power.exact;
  }

  // Factor of the Gram matrix, which goes.
  absl::StatusOr<core::CompensationFactor> Factor() {
    std::vector<std::vector<double>> parts;
    std::vector<core::GramBlock> blocks;
    for (int64_t part = 0; part < gram_->part_count(); ++part) {
      parts.push_back(gram_->Dense(part));
      blocks.push_back({gram_->PartWidth(part), absl::MakeSpan(parts.back())});
    }
    gram_.reset();
    return core::CompensationFactor::Create(columns_, blocks, options_,
                                            env().helper_pool, stop());
  }

  const core::CompensationOptions options_;
  const bool measure_output_;
  const absl::optional<EncodingSource> source_;
  const absl::string_view source_field_;
  const int64_t rows_;
  const int64_t columns_;
  const LayerGram inputs_;
  // Encoding of `source_`.
  ResolvedEncoding given_;
  CodeGeometry geometry_;
  // Memory of all but the tensor, from its first bytes on.
  int64_t work_bytes_ = 0;
  MemoryBudget::Lease work_lease_;
  absl::optional<core::GramState> gram_;
  std::vector<uint8_t> codes_;
  core::QuantizeCounts counts_;
  v1::OutputNoise output_noise_;
};

}  // namespace

absl::StatusOr<absl::optional<CompensatedRounding>> CheckRounding(
    const v1::Rounding& proto, const v1::TensorName& tensor,
    const Caller& caller) {
  if (!v1::RoundingMethod_IsValid(proto.method())) {
    return core::WithField(
        core::EnumUnknownError("RoundingMethod", proto.method()), "method");
  }
  if (!v1::ColumnOrder_IsValid(proto.column_order())) {
    return core::WithField(
        core::EnumUnknownError("ColumnOrder", proto.column_order()),
        "column_order");
  }
  if (proto.method() != v1::ROUNDING_METHOD_COMPENSATED) {
    if (proto.has_inputs() || proto.has_damping() || proto.measure_output() ||
        proto.column_order() != v1::COLUMN_ORDER_UNSPECIFIED) {
      return core::WithField(
          core::MethodInvalidError("inputs, damping, column_order or "
                                   "measure_output without "
                                   "ROUNDING_METHOD_COMPENSATED"),
          "method");
    }
    return absl::optional<CompensatedRounding>();
  }
  CompensatedRounding rounding;
  absl::StatusOr<EncodingKey> key =
      KeyFromProto(WithDefaults(proto.inputs(), tensor));
  if (!key.ok()) return core::WithField(key.status(), "inputs");
  rounding.inputs = *std::move(key);
  rounding.statistics = caller.statistics;
  if (proto.has_damping()) {
    // A larger one leaves nothing of the matrix.
    constexpr double kMostDamping = 1e6;
    if (!(proto.damping() >= 0 && proto.damping() <= kMostDamping)) {
      return core::WithField(core::MethodInvalidError(absl::StrCat(
                                 "damping is ", proto.damping(),
                                 ", expected 0 to ", kMostDamping)),
                             "damping");
    }
    rounding.options.damping = proto.damping();
  }
  rounding.options.order = proto.column_order() == v1::COLUMN_ORDER_NATURAL
                               ? core::ColumnOrder::kNatural
                               : core::ColumnOrder::kFallingDiagonal;
  rounding.measure_output = proto.measure_output();
  return absl::optional<CompensatedRounding>(std::move(rounding));
}

absl::StatusOr<std::unique_ptr<TensorJob>> MakeCompensatedQuantizeJob(
    const RpcEnvironment& env, QuantizeTask task, CompensatedRounding rounding,
    std::shared_ptr<const ResolvedSpec> spec,
    absl::optional<EncodingSource> source, absl::string_view source_field) {
  if (task.description.element_count == 0 || task.description.shape.empty()) {
    return core::WithField(
        core::ShapeInvalidError("expected at least one row of one element"),
        "header.tensor.shape");
  }
  absl::StatusOr<std::unique_ptr<TensorAccumulator>> accumulator =
      MakeHeldAccumulator(env, task.description.element_type, spec.get());
  if (!accumulator.ok()) return accumulator.status();
  return std::make_unique<CompensatedQuantizeJob>(
      env, std::move(task), std::move(rounding), std::move(spec),
      *std::move(accumulator), std::move(source), source_field);
}

}  // namespace quantd::server
