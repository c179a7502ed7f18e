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
#include "core/calibrate/search_time.h"
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
#include "server/rpc/tensor_accumulator.h"
#include "server/rpc/tensor_buffer.h"
#include "server/rpc/tensor_calibration.h"
#include "server/store/statistics_store.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr char kWayOut[] =
    "send fewer tensors at once, or give the server more memory";
// Rows of a task of float32 elements; see core::QuantizeCompensated.
constexpr int64_t kTaskRows = 48;

// About how long one worker takes to factor the Gram matrix and to round.
absl::Duration CompensationTime(int64_t rows, int64_t columns) {
  // Fused multiply-adds.
  constexpr double kPerSecond = 5e9;
  const double n = static_cast<double>(columns);
  return absl::Seconds(n * n * (n / 3 + static_cast<double>(rows) / 2) /
                       kPerSecond);
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
    search_time_ = CompensationTime(rows_, columns_);
    if (spec_ != nullptr) {
      search_time_ += core::SearchTime(
          spec_->spec, spec_->layout->scale_count(),
          this->task().description.element_count, /*at_hand=*/true);
    }
    ReadFirst();
  }

  absl::Status Reserve(int64_t bytes) override {
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
    if (source_.has_value()) {
      absl::StatusOr<ResolvedEncoding> resolved =
          source_->Resolve(env(), task().description.shape, task().transport());
      if (!resolved.ok()) {
        return core::WithField(resolved.status(), source_field_);
      }
      given_ = *std::move(resolved);
    }
    absl::StatusOr<absl::optional<core::GramState>> gram =
        rounding_.statistics->ReadGram(rounding_.inputs, [this](int64_t bytes) {
          return stop().stopped()
                     ? core::StoppedError()
                     : env().budget->Grow(&gram_lease_, bytes, kWayOut);
        });
    absl::Status status = gram.status();
    if (status.ok()) {
      gram_ = *std::move(gram);
      status = CheckGram();
    }
    // Without the sums that it was read into.
    gram_lease_.Release();
    if (status.ok()) env().budget->Count(&gram_lease_, gram_->memory_bytes());
    return core::WithField(status, "header.rounding.inputs");
  }

  bool EncodeIsLong() const override { return true; }

  absl::StatusOr<ResolvedEncoding> Encode() override {
    absl::StatusOr<ResolvedEncoding> resolved = FindEncoding();
    if (!resolved.ok()) return resolved;
    absl::Status status = Round(*resolved);
    if (!status.ok()) return status;
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
  // Errors: GRAM_INVALID.
  absl::Status CheckGram() const {
    if (!gram_.has_value()) {
      return core::GramInvalidError(
          "the statistics have no Gram matrix, expected contributions with "
          "features.gram");
    }
    if (gram_->rows() == 0) {
      return core::GramInvalidError(
          "a Gram matrix of no rows, expected at least one without NaN and "
          "infinities");
    }
    if (gram_->feature_count() != columns_) {
      return core::GramInvalidError(absl::StrCat(
          "a Gram matrix of ", gram_->feature_count(), " features, expected ",
          columns_, ", one for each element of a row of the tensor"));
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

  // Errors: those of core::CompensationFactor and core::QuantizeCompensated,
  // MEMORY_BUDGET.
  absl::Status Round(const ResolvedEncoding& resolved) {
    MemoryBudget::Lease factor_lease;
    const absl::StatusOr<core::CompensationFactor> factor =
        Factor(&factor_lease);
    if (!factor.ok()) {
      return core::WithField(factor.status(), "header.rounding");
    }
    geometry_ = QuantizeGeometry(task().description,
                                 *core::FindFormat(resolved.encoding->format));
    absl::Status status =
        CheckOutput(task().output, geometry_.codes_size_bytes());
    if (!status.ok()) return status;
    const int64_t threads = env().pool->thread_count();
    // Rows whose codes fill whole bytes.
    const int64_t granule_rows =
        geometry_.codes_per_granule /
        std::gcd(columns_, geometry_.codes_per_granule);
    const int64_t band_rows =
        (threads * kTaskRows + granule_rows - 1) / granule_rows * granule_rows;
    const int64_t row_bytes = columns_ * geometry_.real_bytes;
    const int64_t band_bytes = std::min(band_rows, rows_) * row_bytes;
    status = env().budget->Grow(&codes_lease_, geometry_.codes_size_bytes(),
                                kWayOut);
    if (!status.ok()) return status;
    const absl::StatusOr<MemoryBudget::Lease> work_lease =
        env().budget->Acquire(
            band_bytes + threads * core::CompensatedTaskBytes(*factor),
            kWayOut);
    if (!work_lease.ok()) return work_lease.status();
    codes_.resize(static_cast<size_t>(geometry_.codes_size_bytes()));
    std::vector<uint8_t> band(static_cast<size_t>(band_bytes));
    for (int64_t row = 0; row < rows_; row += band_rows) {
      const int64_t rows = std::min(band_rows, rows_ - row);
      const absl::Span<uint8_t> reals =
          absl::MakeSpan(band).first(static_cast<size_t>(rows * row_bytes));
      buffer().Copy(row * row_bytes, reals);
      status = core::QuantizeCompensated(
          *factor, *resolved.encoding, *resolved.layout,
          task().description.element_type, task().nan_policy, row, rows,
          reals.data(), codes_.data() + geometry_.CodesOffset(row * columns_),
          &counts_, env().helper_pool, stop());
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Of the Gram matrix, which goes.
  // `lease`  of the factor.
  absl::StatusOr<core::CompensationFactor> Factor(MemoryBudget::Lease* lease) {
    std::vector<int64_t> widths;
    int64_t bytes = 0;
    for (int64_t part = 0; part < gram_->part_count(); ++part) {
      const int64_t width = gram_->PartWidth(part);
      widths.push_back(width);
      bytes += width * width * static_cast<int64_t>(sizeof(double));
    }
    const absl::StatusOr<MemoryBudget::Lease> dense_lease =
        env().budget->Acquire(bytes, kWayOut);
    if (!dense_lease.ok()) return dense_lease.status();
    std::vector<std::vector<double>> parts;
    std::vector<core::GramBlock> blocks;
    for (int64_t part = 0; part < gram_->part_count(); ++part) {
      parts.push_back(gram_->Dense(part));
      blocks.push_back({widths[part], absl::MakeSpan(parts.back())});
    }
    gram_.reset();
    gram_lease_.Release();
    // What finding the factor holds for each column.
    constexpr int64_t kColumnBytes = 1200;
    absl::Status status = env().budget->Grow(
        lease,
        core::CompensationFactor::MemoryBytes(widths) + columns_ * kColumnBytes,
        kWayOut);
    if (!status.ok()) return status;
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
  absl::optional<core::GramState> gram_;
  MemoryBudget::Lease gram_lease_;
  MemoryBudget::Lease codes_lease_;
  CodeGeometry geometry_;
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
  v1::TensorName inputs = proto.inputs();
  if (inputs.model().empty()) inputs.set_model(tensor.model());
  if (inputs.revision().empty()) inputs.set_revision(tensor.revision());
  absl::StatusOr<EncodingKey> key = KeyFromProto(inputs);
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
