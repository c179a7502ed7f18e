#include "client/cli/onnx_export.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cli/interchange.h"
#include "client/cli/printable.h"
#include "client/cli/selection.h"
#include "client/cli/table.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/dtype.h"
#include "client/files/onnx_model.h"
#include "client/models/spec_syntax.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

absl::Status NotHeld(absl::string_view what) {
  return ArgumentInvalidError(absl::StrCat("ONNX has ", what));
}

// How the scales lie, as ONNX says it. `shape` is null for activations, whose
// dimensions are not known, and sometimes their number, `rank`.
absl::Status SetLayout(const Encoding& encoding,
                       const std::vector<int64_t>* shape,
                       std::optional<int64_t> rank,
                       files::OnnxModel::Quantizer* quantizer) {
  const std::vector<int64_t> block(encoding.block_size().begin(),
                                   encoding.block_size().end());
  const int64_t count = encoding.scale_size();
  if (count == 1) return absl::OkStatus();
  if (shape == nullptr) {
    if (rank.has_value() && *rank != static_cast<int64_t>(block.size())) {
      return ArgumentInvalidError(
          absl::StrCat("the encoding is of ", block.size(),
                       " dimensions, the activation of the model has ", *rank));
    }
    size_t axis = block.size();
    for (size_t d = 0; d < block.size(); ++d) {
      if (block[d] == 0) continue;
      if (block[d] != 1 || axis != block.size()) {
        return NotHeld("activations per tensor and per channel");
      }
      axis = d;
    }
    quantizer->axis = static_cast<int64_t>(axis);
    quantizer->scale_shape = {count};
    return absl::OkStatus();
  }
  const absl::StatusOr<std::vector<int64_t>> scales = ScaleShape(*shape, block);
  if (!scales.ok()) return scales.status();
  const absl::StatusOr<int64_t> expected = ElementCount(*scales);
  if (!expected.ok() || *expected != count) {
    return ArgumentInvalidError(absl::StrCat(
        "the encoding has ", count, " scales, the weight of the model takes ",
        expected.value_or(0)));
  }
  std::vector<size_t> split;
  for (size_t d = 0; d < shape->size(); ++d) {
    if ((*scales)[d] != 1) split.push_back(d);
  }
  if (split.size() == 1 && (*scales)[split[0]] == (*shape)[split[0]]) {
    quantizer->axis = static_cast<int64_t>(split[0]);
    quantizer->scale_shape = {count};
    return absl::OkStatus();
  }
  size_t axis = shape->size();
  for (size_t d = 0; d < shape->size(); ++d) {
    if ((*scales)[d] == (*shape)[d]) continue;
    if (axis != shape->size()) {
      return NotHeld(
          "blocks along one dimension, with a scale for every index "
          "of the others");
    }
    axis = d;
  }
  // A scale for every element.
  if (axis == shape->size()) axis = shape->size() - 1;
  quantizer->axis = static_cast<int64_t>(axis);
  quantizer->block_size = block[axis] == 0 ? (*shape)[axis] : block[axis];
  quantizer->scale_shape = *scales;
  return absl::OkStatus();
}

absl::StatusOr<files::OnnxModel::Quantizer> MakeQuantizer(
    const Encoding& encoding, const std::vector<int64_t>* shape,
    std::optional<int64_t> rank) {
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  if (!format.ok()) return format.status();
  files::OnnxModel::Quantizer quantizer;
  quantizer.type = FormatName(encoding.format());
  if (!files::OnnxModel::HasType(quantizer.type)) {
    return NotHeld(absl::StrCat("no type for ", quantizer.type));
  }
  quantizer.scale.assign(encoding.scale().begin(), encoding.scale().end());
  if (format->kind == CodeKind::kInteger) {
    quantizer.zero_point.assign(quantizer.scale.size(), 0);
    std::copy(encoding.zero_point().begin(), encoding.zero_point().end(),
              quantizer.zero_point.begin());
  }
  for (const int32_t zero_point : quantizer.zero_point) {
    if (zero_point < format->qmin || zero_point > format->qmax) {
      return NotHeld("no zero points outside of the codes");
    }
  }
  quantizer.saturates = !encoding.no_saturation();
  const absl::Status status = SetLayout(encoding, shape, rank, &quantizer);
  if (!status.ok()) return status;
  return quantizer;
}

// One run. Not thread-safe.
class Exporter {
 public:
  Exporter(const OnnxExport& job, Session* session)
      : job_(job), session_(*session) {}

  void Run() {
    absl::StatusOr<files::OnnxModel> model =
        files::OnnxModel::Open(job_.model_path);
    if (!model.ok()) return session_.Fail(model.status());
    client_ = session_.ConnectOrFail();
    if (client_ == nullptr) return;
    absl::Status status =
        CheckStoredPatterns("--include", job_.include, Stored::kEncodings,
                            job_.name, client_.get());
    if (!status.ok()) return FailEarly(status, &session_);
    status = QuantizeAll(&*model);
    const int64_t opset = model->opset();
    if (status.ok())
      status = model->Write(job_.output.path, job_.output.if_exists());
    if (!status.ok()) return session_.Fail(status);
    if (AnyLeftOut(losses_)) session_.Note(kServerError);
    if (session_.json) {
      return session_.PrintJson({{"input", job_.model_path},
                                 {"output", job_.output.path},
                                 {"weight_count", weight_count_},
                                 {"activation_count", activation_count_},
                                 {"opset_before", opset},
                                 {"opset", model->opset()},
                                 {"losses", LossesJson(losses_)}});
    }
    PrintLosses(losses_, session_);
    session_.Print(absl::StrCat(
        CountText(weight_count_), " weights and ", CountText(activation_count_),
        " activations quantized, opset ", model->opset(), ", written to ",
        Printable(job_.output.path), "\n"));
  }

 private:
  absl::Status QuantizeAll(files::OnnxModel* model) {
    const absl::StatusOr<std::vector<v1::StoredEncoding>> encodings =
        client_->ListEncodings(job_.name.model, job_.name.revision);
    if (!encodings.ok()) return encodings.status();
    for (const v1::StoredEncoding& entry : *encodings) {
      const std::string& tensor = entry.name().tensor();
      if (!job_.include.empty() &&
          std::none_of(job_.include.begin(), job_.include.end(),
                       [&tensor](const std::string& pattern) {
                         return MatchesGlob(pattern, tensor);
                       })) {
        continue;
      }
      const absl::Status status = QuantizeOne(tensor, model);
      if (ErrorReason(status) != "ARGUMENT_INVALID") {
        if (!status.ok()) return status;
        continue;
      }
      AddLoss(tensor, ErrorText(status), /*left_out=*/true);
    }
    if (weight_count_ + activation_count_ == 0) {
      return ArgumentInvalidError(absl::StrCat(
          "no tensor of the model has an encoding that ONNX can hold",
          losses_.empty() ? ""
                          : absl::StrCat("; \"", losses_[0].tensor(),
                                         "\": ", losses_[0].what())));
    }
    return absl::OkStatus();
  }

  // Errors: ARGUMENT_INVALID for a tensor that is left out; others end the run.
  absl::Status QuantizeOne(const std::string& tensor, files::OnnxModel* model) {
    const files::OnnxModel::Weight* const weight = model->FindWeight(tensor);
    const std::optional<files::OnnxModel::Activation> activation =
        model->FindActivation(tensor);
    if (weight == nullptr && !activation.has_value()) {
      return ArgumentInvalidError("the model has no such tensor");
    }
    const std::optional<files::Dtype> dtype =
        weight == nullptr ? activation->dtype : weight->dtype;
    if (!dtype.has_value() && weight == nullptr && !activation->has_type) {
      return ArgumentInvalidError(
          "the model does not tell its type; infer its shapes first, as "
          "onnx.shape_inference does");
    }
    if (dtype != files::Dtype::kF32 && dtype != files::Dtype::kF16 &&
        dtype != files::Dtype::kBF16) {
      return NotHeld("quantized tensors of float32, float16 and bfloat16");
    }
    const absl::StatusOr<v1::StoredEncoding> stored =
        client_->GetEncoding(job_.name.NameOf(tensor));
    if (!stored.ok()) return stored.status();
    const Encoding& encoding = stored->encoding();
    absl::StatusOr<files::OnnxModel::Quantizer> quantizer =
        weight == nullptr
            ? MakeQuantizer(encoding, nullptr, activation->rank)
            : MakeQuantizer(encoding, &weight->shape, std::nullopt);
    if (!quantizer.ok()) return quantizer.status();
    if (weight == nullptr) {
      const FormatInfo format = *GetFormatInfo(encoding.format());
      if (encoding.qmin() != format.qmin || encoding.qmax() != format.qmax) {
        AddLoss(tensor,
                absl::StrCat("qmin and qmax: codes are of ", format.qmin,
                             " to ", format.qmax),
                /*left_out=*/false);
      }
      model->QuantizeActivation(tensor, *quantizer);
      ++activation_count_;
      return absl::OkStatus();
    }
    if (weight->data.empty() && ElementCount(weight->shape).value_or(1) != 0) {
      return ArgumentInvalidError("only weights that are in the model itself");
    }
    QuantizeJob job;
    job.tensor.name = job_.name.NameOf(tensor);
    job.tensor.element_type = *ElementTypeOf(*dtype);
    job.tensor.shape = weight->shape;
    job.tensor.data = weight->data;
    job.source = encoding;
    const absl::StatusOr<QuantizeResult> result = client_->Quantize(job);
    if (!result.ok()) return result.status();
    model->QuantizeWeight(tensor, *quantizer, result->codes);
    ++weight_count_;
    return absl::OkStatus();
  }

  void AddLoss(const std::string& tensor, absl::string_view what,
               bool left_out) {
    v1::InterchangeLoss& loss = losses_.emplace_back();
    loss.set_tensor(tensor);
    loss.set_what(std::string(what));
    loss.set_left_out(left_out);
  }

  const OnnxExport& job_;
  Session& session_;
  std::unique_ptr<Client> client_;
  std::vector<v1::InterchangeLoss> losses_;
  uint64_t weight_count_ = 0;
  uint64_t activation_count_ = 0;
};

}  // namespace

void ExportOnnx(const OnnxExport& job, Session* session) {
  Exporter(job, session).Run();
}

}  // namespace quantd::cli
