#include "server/rpc/compensated_quantize.h"

#include <algorithm>
#include <cstdint>
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
#include "core/parallel/thread_pool.h"
#include "core/quantize/compensated_rounding.h"
#include "core/quantize/compensation_factor.h"
#include "core/quantize/quantize.h"
#include "core/statistics/gram_state.h"
#include "core/statistics/held_tensor.h"
#include "quantd/v1/quantization_service.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/buffered_quantize.h"
#include "server/rpc/code_geometry.h"
#include "server/rpc/code_producer.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/layer_inputs.h"
#include "server/rpc/tensor_accumulator.h"
#include "server/rpc/tensor_buffer.h"
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

// About how long one worker takes to factor the Gram matrix and to round.
absl::Duration CompensationTime(int64_t rows, absl::Span<const int64_t> parts) {
  // Fused multiply-adds.
  constexpr double kPerSecond = 5e9;
  double products = 0;
  for (const int64_t width : parts) {
    const double n = static_cast<double>(width);
    products += n * n * (n / 3 + static_cast<double>(rows) / 2);
  }
  return absl::Seconds(products / kPerSecond);
}

class CompensatedQuantizeJob final : public BufferedQuantizeJob {
 public:
  // `accumulator`  with `spec` only.
  CompensatedQuantizeJob(const RpcEnvironment& env, QuantizeTask task,
                         CompensatedRounding rounding,
                         std::shared_ptr<const ResolvedSpec> spec,
                         std::unique_ptr<TensorAccumulator> accumulator,
                         absl::optional<EncodingSource> source,
                         absl::string_view source_field)
      : BufferedQuantizeJob(
            env, task,
            task.description.element_count *
                core::ElementSizeBytes(task.description.element_type)),
        rounding_(std::move(rounding)),
        spec_(std::move(spec)),
        accumulator_(std::move(accumulator)),
        source_(std::move(source)),
        source_field_(source_field),
        rows_(task.description.shape[0]),
        columns_(task.description.element_count / rows_) {
    frame_.granule_bytes = frame_.unit_bytes;
    frame_.quantum_bytes = accumulator_ != nullptr
                               ? QuantumBytes(env, *accumulator_)
                               : env.limits.chunk_bytes;
    // As long as it can take: Resolve finds out how large the parts are.
    SetSearchTime(core::GramState::PartSize(columns_));
    ReadFirst();
  }

  // What is wrong with the encoding or with the inputs is told before any data
  // come.
  bool ResolveWaits() const override { return true; }
  absl::Status Resolve(ChunkWriter* out) override {
    if (source_.has_value()) {
      absl::StatusOr<ResolvedEncoding> resolved =
          source_->Resolve(env(), task().description.shape, task().transport());
      if (!resolved.ok()) {
        return core::WithField(resolved.status(), source_field_);
      }
      given_ = *std::move(resolved);
    }
    if (spec_ != nullptr && spec_->importance != nullptr) {
      absl::Status status = spec_->importance->Read(env(), stop());
      if (!status.ok()) {
        return core::WithField(status, "header.spec.importance");
      }
    }
    geometry_ = QuantizeGeometry(
        task().description,
        *core::FindFormat(spec_ != nullptr ? spec_->spec.format
                                           : given_.encoding->format));
    absl::Status status =
        CheckOutput(task().output, geometry_.codes_size_bytes());
    if (!status.ok()) return status;
    return core::WithField(ResolveGram(), "header.rounding.inputs");
  }

  // The first bytes wait for all that rounding will need, so that nothing is
  // sent in vain.
  absl::Status Reserve(int64_t bytes) override {
    absl::Status status =
        env().budget->Grow(&work_lease_, work_bytes_, kWayOutOfRounding);
    if (!status.ok()) return status;
    if (accumulator_ != nullptr) {
      if (absl::Status s = accumulator_->Reserve(); !s.ok()) return s;
    }
    return buffer().Reserve(bytes);
  }

  absl::Status Feed(int64_t offset_bytes,
                    absl::Span<const uint8_t> data) override {
    if (accumulator_ != nullptr) accumulator_->Update(offset_bytes, data);
    buffer().Append(data);
    return absl::OkStatus();
  }

 protected:
  absl::Status Read() override {
    absl::StatusOr<absl::optional<core::GramState>> gram =
        rounding_.statistics->ReadGram(rounding_.inputs, [this](int64_t bytes) {
          return stop().stopped() ? core::StoppedError()
                                  : env().budget->Grow(&work_lease_, bytes,
                                                       kWayOutOfRounding);
        });
    absl::Status status = gram.status();
    if (status.ok() && !gram->has_value()) status = NoGramError();
    if (status.ok()) {
      gram_ = *std::move(gram);
      status = CheckGram(gram_->feature_count(), gram_->rows());
    }
    // Another may have come in place of the one that Resolve found.
    if (status.ok()) {
      status = env().budget->Grow(&work_lease_, WorkBytes(gram_->part_size()),
                                  kWayOutOfRounding);
    }
    return core::WithField(status, "header.rounding.inputs");
  }

  bool EncodeIsLong() const override { return true; }

  absl::StatusOr<ResolvedEncoding> Encode() override {
    absl::StatusOr<ResolvedEncoding> resolved = FindEncoding();
    if (!resolved.ok()) return resolved;
    absl::Status status = Round(*resolved);
    if (!status.ok()) return status;
    // Clients may be slow to read what is left.
    work_bytes_ = geometry_.codes_size_bytes();
    work_lease_.Release();
    env().budget->Count(&work_lease_, work_bytes_);
    return resolved;
  }

  int64_t RealsOffset(int64_t block) const override {
    return block * TensorBuffer::kBlockBytes;
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
    return absl::OkStatus();
  }

 private:
  // Without reading its sums.
  // Errors: GRAM_INVALID, of the store.
  absl::Status ResolveGram() {
    const absl::StatusOr<core::GramState::Parts> found =
        FindGram(rounding_.statistics.get(), rounding_.inputs);
    if (!found.ok()) return found.status();
    absl::Status status =
        CheckGram(static_cast<int64_t>(found->exponents.size()), found->rows);
    if (!status.ok()) return status;
    SetSearchTime(found->part_size);
    work_bytes_ = WorkBytes(found->part_size);
    return absl::OkStatus();
  }

  void SetSearchTime(int64_t part_size) {
    search_time_ = CompensationTime(rows_, PartWidths(columns_, part_size));
    if (spec_ == nullptr) return;
    search_time_ += ElementSearchTime(*spec_);
  }

  // Errors: GRAM_INVALID.
  absl::Status CheckGram(int64_t feature_count, int64_t rows) const {
    if (rows == 0) {
      return core::GramInvalidError(
          "a Gram matrix of no rows, expected at least one without NaN and "
          "infinities");
    }
    if (feature_count != columns_) {
      return core::GramInvalidError(absl::StrCat(
          "a Gram matrix of ", feature_count, " features, expected ", columns_,
          ", one for each element of a row of the tensor"));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<ResolvedEncoding> FindEncoding() {
    if (spec_ == nullptr) return std::move(given_);
    const core::HeldTensor held =
        buffer().Held(*spec_->layout, task().description.element_type);
    absl::StatusOr<CalibratedEncoding> calibrated =
        CalibrateTensor(env(), *spec_, accumulator_->statistics(), {},
                        env().helper_pool, stop(), &held);
    if (!calibrated.ok()) return calibrated.status();
    SetMantissaBits(calibrated->mantissa_bits);
    return std::move(calibrated->resolved);
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
    // What finding the factor holds for each column.
    constexpr int64_t kColumnBytes = 1200;
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
        std::max(gram_bytes, factor_bytes + columns_ * kColumnBytes);
    const int64_t rounding =
        factor_bytes + geometry_.codes_size_bytes() + BandRows() * RowBytes() +
        env().pool->thread_count() *
            core::CompensatedTaskBytes(columns_, widths[0]);
    return std::max({reading, factoring, rounding});
  }

  // Errors: those of core::CompensationFactor and core::QuantizeCompensated.
  absl::Status Round(const ResolvedEncoding& resolved) {
    const absl::StatusOr<core::CompensationFactor> factor = Factor();
    if (!factor.ok()) {
      return core::WithField(factor.status(), "header.rounding");
    }
    const int64_t band_rows = BandRows();
    const int64_t row_bytes = RowBytes();
    codes_.resize(static_cast<size_t>(geometry_.codes_size_bytes()));
    std::vector<uint8_t> band(static_cast<size_t>(band_rows * row_bytes));
    for (int64_t row = 0; row < rows_; row += band_rows) {
      const int64_t rows = std::min(band_rows, rows_ - row);
      const absl::Span<uint8_t> reals =
          absl::MakeSpan(band).first(static_cast<size_t>(rows * row_bytes));
      buffer().Copy(row * row_bytes, reals);
      absl::Status status = core::QuantizeCompensated(
          *factor, *resolved.encoding, *resolved.layout,
          task().description.element_type, task().nan_policy, row, rows,
          reals.data(), codes_.data() + geometry_.CodesOffset(row * columns_),
          &counts_, env().helper_pool, stop());
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Of the Gram matrix, which goes.
  absl::StatusOr<core::CompensationFactor> Factor() {
    std::vector<std::vector<double>> parts;
    std::vector<core::GramBlock> blocks;
    for (int64_t part = 0; part < gram_->part_count(); ++part) {
      parts.push_back(gram_->Dense(part));
      blocks.push_back({gram_->PartWidth(part), absl::MakeSpan(parts.back())});
    }
    gram_.reset();
    return core::CompensationFactor::Create(columns_, blocks, rounding_.options,
                                            env().helper_pool, stop());
  }

  const CompensatedRounding rounding_;
  const std::shared_ptr<const ResolvedSpec> spec_;
  const std::unique_ptr<TensorAccumulator> accumulator_;
  const absl::optional<EncodingSource> source_;
  const absl::string_view source_field_;
  const int64_t rows_;
  const int64_t columns_;
  // Of `source_`.
  ResolvedEncoding given_;
  CodeGeometry geometry_;
  // Of all but the tensor, from its first bytes on.
  int64_t work_bytes_ = 0;
  MemoryBudget::Lease work_lease_;
  absl::optional<core::GramState> gram_;
  std::vector<uint8_t> codes_;
  core::QuantizeCounts counts_;
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
    if (proto.has_inputs() || proto.has_damping() ||
        proto.column_order() != v1::COLUMN_ORDER_UNSPECIFIED) {
      return core::WithField(
          core::MethodInvalidError("inputs, damping or column_order without "
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
  std::unique_ptr<TensorAccumulator> accumulator;
  if (spec != nullptr) {
    absl::StatusOr<std::unique_ptr<TensorAccumulator>> created =
        TensorAccumulator::Create(env, task.description.element_type,
                                  spec->layout, MantissaBitsWhereHeld(*spec),
                                  SearchBytes(env, *spec));
    if (!created.ok()) return created.status();
    accumulator = *std::move(created);
  }
  return std::make_unique<CompensatedQuantizeJob>(
      env, std::move(task), std::move(rounding), std::move(spec),
      std::move(accumulator), std::move(source), source_field);
}

}  // namespace quantd::server
