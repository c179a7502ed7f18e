#include "server/rpc/output_meter.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "core/dequantize/dequantize.h"
#include "core/errors.h"
#include "core/evaluate/output_noise.h"
#include "core/formats/number_format.h"
#include "core/parallel/stop_token.h"
#include "core/quantize/quantize.h"
#include "core/statistics/gram_state.h"
#include "core/types/element_type.h"
#include "quantd/v1/tensor.pb.h"
#include "server/guard/memory_budget.h"
#include "server/rpc/caller.h"
#include "server/rpc/encoding_source.h"
#include "server/rpc/layer_inputs.h"
#include "server/rpc/rpc_environment.h"
#include "server/rpc/tensor_buffer.h"
#include "server/rpc/tensor_header.h"
#include "server/store/encoding_store.h"
#include "server/store/statistics_store.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr char kWayOutOfMeter[] =
    "send fewer tensors at once, or give the server more memory";
// Rows of a task; see core::AddOutputPower. Whole bytes of any format.
constexpr int64_t kMeterTaskRows = 48;

}  // namespace

absl::StatusOr<std::unique_ptr<OutputMeter>> OutputMeter::Create(
    const RpcEnvironment& env, const Caller& caller,
    const v1::TensorName& inputs, const v1::TensorName& tensor,
    const TensorDescription& description) {
  absl::StatusOr<EncodingKey> key = KeyFromProto(WithDefaults(inputs, tensor));
  if (!key.ok()) return key.status();
  if (description.element_count == 0 || description.shape.empty()) {
    return core::ShapeInvalidError(
        "the tensor has no row, expected at least one of one element");
  }
  return absl::WrapUnique(
      new OutputMeter(env, *std::move(key), caller.statistics, description));
}

OutputMeter::OutputMeter(const RpcEnvironment& env, EncodingKey inputs,
                         std::shared_ptr<StatisticsStore> statistics,
                         const TensorDescription& description)
    : env_(env),
      type_(description.element_type),
      rows_(description.shape[0]),
      columns_(description.element_count / rows_),
      inputs_(std::move(inputs), std::move(statistics), columns_),
      part_size_(core::GramState::PartSize(columns_)) {}

absl::Duration OutputMeter::Time(int64_t candidates) const {
  // Fused multiply-adds.
  constexpr double kPerSecond = 1e10;
  // And of the weight itself.
  const auto passes = static_cast<double>(candidates + 1);
  return absl::Seconds(passes * static_cast<double>(rows_) *
                       static_cast<double>(columns_) *
                       static_cast<double>(part_size_) / 2 / kPerSecond);
}

int64_t OutputMeter::threads() const { return env_.pool->thread_count(); }

int64_t OutputMeter::band_rows() const {
  return std::min(threads() * kMeterTaskRows, rows_);
}

int64_t OutputMeter::WorkBytes(int64_t part_size) const {
  // A row and its codes and what they are restored to; see also AddOutputPower.
  constexpr int64_t kMostCodeBytes = 4;
  const int64_t row_bytes =
      columns_ * (core::ElementSizeBytes(type_) + kMostCodeBytes +
                  core::ElementSizeBytes(core::ArithmeticType(type_))) +
      static_cast<int64_t>(sizeof(core::OutputPower));
  return core::GramState::MemoryBytes(columns_, part_size) +
         core::OutputGram::MemoryBytes(columns_, part_size) +
         band_rows() * row_bytes + threads() * core::OutputTaskBytes(columns_);
}

absl::Status OutputMeter::Find() {
  const absl::StatusOr<core::GramState::Parts> found = inputs_.Find();
  if (!found.ok()) return found.status();
  part_size_ = found->part_size;
  return absl::OkStatus();
}

absl::Status OutputMeter::Reserve() {
  return env_.budget->Grow(&lease_, WorkBytes(part_size_), kWayOutOfMeter);
}

absl::Status OutputMeter::Read(core::StopToken stop) {
  absl::StatusOr<core::GramState> gram =
      inputs_.Read(env_.budget, &lease_, kWayOutOfMeter, stop);
  if (!gram.ok()) return gram.status();
  // Another may have come in place of the one that was found.
  part_size_ = gram->part_size();
  if (absl::Status s = Reserve(); !s.ok()) return s;
  gram_ = *std::move(gram);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> OutputMeter::Measure(
    const TensorBuffer& tensor,
    absl::Span<const ResolvedEncoding* const> encodings,
    core::StopToken stop) const {
  const absl::StatusOr<core::OutputGram> gram =
      core::OutputGram::Create(*gram_, env_.helper_pool, stop);
  if (!gram.ok()) return gram.status();
  const core::ElementType arithmetic_type = core::ArithmeticType(type_);
  const int64_t real_bytes = core::ElementSizeBytes(type_);
  const int64_t band_elements = band_rows() * columns_;
  constexpr int64_t kMostCodeBytes = 4;
  std::vector<uint8_t> codes(band_elements * kMostCodeBytes);
  std::vector<uint8_t> restored(band_elements *
                                core::ElementSizeBytes(arithmetic_type));
  core::OutputPower signal;
  std::vector<core::OutputPower> noise(encodings.size());
  const auto measure = [&](int64_t row, int64_t rows, const uint8_t* real) {
    const int64_t first = row * columns_;
    const int64_t count = rows * columns_;
    absl::Status status = core::AddOutputPower(
        *gram, type_, rows, real, nullptr, &signal, env_.helper_pool, stop);
    for (size_t i = 0; i < encodings.size() && status.ok(); ++i) {
      const core::Encoding& encoding = *encodings[i]->encoding;
      const core::BlockLayout& layout = *encodings[i]->layout;
      core::QuantizeCounts counts;
      status = core::Quantize(encoding, layout, type_,
                              core::NanPolicy::kDefault, first, count, real,
                              codes.data(), &counts, env_.helper_pool);
      if (!status.ok()) return status;
      core::Dequantize(encoding, layout, arithmetic_type, first, count,
                       codes.data(), restored.data(), env_.helper_pool);
      status = core::AddOutputPower(*gram, type_, rows, real, restored.data(),
                                    &noise[i], env_.helper_pool, stop);
    }
    return status;
  };
  absl::Status status =
      tensor.ForEachBand(columns_ * real_bytes, band_rows(), measure);
  if (!status.ok()) return status;
  std::vector<double> noise_to_signal;
  noise_to_signal.reserve(noise.size());
  for (const core::OutputPower& power : noise) {
    noise_to_signal.push_back(core::NoiseToSignal(power.exact, signal.exact));
  }
  return noise_to_signal;
}

}  // namespace quantd::server
