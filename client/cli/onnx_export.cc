#include "client/cli/onnx_export.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cli/interchange.h"
#include "client/cli/output_options.h"
#include "client/cli/printable.h"
#include "client/cli/table.h"
#include "client/cli/tensor_notes.h"
#include "client/cli/weight_fit.h"
#include "client/cpp/client.h"
#include "client/cpp/errors.h"
#include "client/files/dtype.h"
#include "client/files/onnx_model.h"
#include "client/files/onnx_modules.h"
#include "client/files/onnx_tensors.h"
#include "client/jobs/selection.h"
#include "client/models/spec_syntax.h"
#include "client/models/text.h"
#include "nlohmann/json.hpp"

namespace quantd::cli {
namespace {

absl::Status NotInOnnx(absl::string_view what) {
  return ArgumentInvalidError(absl::StrCat("ONNX has ", what));
}

// How so many scales of blocks lie, as ONNX says it. `shape` is null for
// activations, whose dimensions are not known, and sometimes their number,
// `rank`.
absl::Status SetLayout(const std::vector<int64_t>& block, int64_t count,
                       const std::vector<int64_t>* shape,
                       std::optional<int64_t> rank,
                       files::OnnxModel::Quantizer* quantizer) {
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
        return NotInOnnx("activations per tensor and per channel");
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
  // Codes of scales keep their dimensions: their own scales lie along those.
  if (split.size() == 1 && quantizer->scale_code.empty() &&
      (*scales)[split[0]] == (*shape)[split[0]]) {
    quantizer->axis = static_cast<int64_t>(split[0]);
    quantizer->scale_shape = {count};
    return absl::OkStatus();
  }
  size_t axis = shape->size();
  for (size_t d = 0; d < shape->size(); ++d) {
    if ((*scales)[d] == (*shape)[d]) continue;
    if (axis != shape->size()) {
      return NotInOnnx(
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

// The type of a format's codes, as ONNX calls it.
std::string CodeType(v1::NumberFormat format) {
  switch (format) {
    case v1::NUMBER_FORMAT_LPBQ:
      return "int4";
    case v1::NUMBER_FORMAT_NVFP4:
      return "float4_e2m1";
    default:
      return FormatName(format);
  }
}

// Scales that are codes of float8 or of integers under other scales.
absl::Status SetDoubleScales(const Encoding& encoding,
                             const std::vector<int64_t>& block,
                             const std::vector<int64_t>& shape,
                             files::OnnxModel::Quantizer* quantizer) {
  const std::string& codes = encoding.scale_code();
  quantizer->scale_code.assign(codes.begin(), codes.end());
  absl::Status status = SetLayout(block, static_cast<int64_t>(codes.size()),
                                  &shape, std::nullopt, quantizer);
  if (!status.ok()) return status;
  files::OnnxModel::Quantizer& outer = quantizer->of_scales.emplace_back();
  const bool is_integer = encoding.scale_type() == v1::SCALE_TYPE_INTEGER;
  outer.type = is_integer ? "uint8" : "float8_e4m3fn";
  outer.scale.assign(encoding.outer_scale().begin(),
                     encoding.outer_scale().end());
  if (is_integer) outer.zero_point.assign(outer.scale.size(), 0);
  // Blocks of scales.
  std::vector<int64_t> outer_block(encoding.outer_block_size().begin(),
                                   encoding.outer_block_size().end());
  for (size_t d = 0; d < outer_block.size() && d < block.size(); ++d) {
    outer_block[d] = block[d] == 0 ? 0 : outer_block[d] / block[d];
  }
  return SetLayout(outer_block, encoding.outer_scale_size(),
                   &quantizer->scale_shape, std::nullopt, &outer);
}

absl::StatusOr<files::OnnxModel::Quantizer> MakeQuantizer(
    const Encoding& encoding, const std::vector<int64_t>* shape,
    std::optional<int64_t> rank) {
  const absl::StatusOr<FormatInfo> format = GetFormatInfo(encoding.format());
  if (!format.ok()) return format.status();
  files::OnnxModel::Quantizer quantizer;
  quantizer.type = CodeType(encoding.format());
  if (!files::OnnxModel::HasType(quantizer.type)) {
    return NotInOnnx(absl::StrCat("no type for ", quantizer.type));
  }
  if (encoding.real_zero_point_size() > 0) {
    return NotInOnnx("no zero points between codes");
  }
  const std::vector<int64_t> block(encoding.block_size().begin(),
                                   encoding.block_size().end());
  if (encoding.outer_scale_size() > 0) {
    if (shape == nullptr) {
      return NotInOnnx("scales that are codes for weights alone");
    }
    const absl::Status status =
        SetDoubleScales(encoding, block, *shape, &quantizer);
    if (!status.ok()) return status;
    return quantizer;
  }
  quantizer.scale.assign(encoding.scale().begin(), encoding.scale().end());
  if (format->kind == CodeKind::kInteger) {
    quantizer.zero_point.assign(quantizer.scale.size(), 0);
    std::copy(encoding.zero_point().begin(), encoding.zero_point().end(),
              quantizer.zero_point.begin());
  }
  for (const int32_t zero_point : quantizer.zero_point) {
    if (zero_point < format->qmin || zero_point > format->qmax) {
      return NotInOnnx("no zero points outside of the codes");
    }
  }
  quantizer.saturates = !encoding.no_saturation();
  const absl::Status status =
      SetLayout(block, encoding.scale_size(), shape, rank, &quantizer);
  if (!status.ok()) return status;
  return quantizer;
}

bool SameQuantizer(const files::OnnxModel::Quantizer& a,
                   const files::OnnxModel::Quantizer& b) {
  return a.type == b.type && a.scale == b.scale &&
         a.zero_point == b.zero_point && a.scale_shape == b.scale_shape &&
         a.axis == b.axis && a.block_size == b.block_size &&
         a.saturates == b.saturates && a.scale_code == b.scale_code &&
         std::equal(a.of_scales.begin(), a.of_scales.end(), b.of_scales.begin(),
                    b.of_scales.end(), SameQuantizer);
}

// Elements of `bits` bits, packed from the lowest bits of a byte on, of a
// matrix of so many rows and columns, as those of its transpose.
std::vector<uint8_t> Transposed(absl::Span<const uint8_t> elements, size_t bits,
                                size_t rows, size_t columns) {
  std::vector<uint8_t> result(elements.size());
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < columns; ++c) {
      const size_t from = (r * columns + c) * bits;
      const size_t to = (c * rows + r) * bits;
      if (bits >= 8) {
        std::copy_n(&elements[from / 8], bits / 8, &result[to / 8]);
        continue;
      }
      const unsigned code = elements[from / 8] >> (from % 8);
      result[to / 8] = static_cast<uint8_t>(
          result[to / 8] | (code & ((1U << bits) - 1)) << (to % 8));
    }
  }
  return result;
}

template <typename T>
void Transpose(size_t rows, size_t columns, std::vector<T>* values) {
  if (values->empty()) return;
  std::vector<T> result(values->size());
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < columns; ++c) {
      result[c * rows + r] = (*values)[r * columns + c];
    }
  }
  *values = std::move(result);
}

// Makes the quantizer of a matrix that of its transpose.
void Transpose(files::OnnxModel::Quantizer* quantizer) {
  quantizer->axis = 1 - quantizer->axis;
  if (quantizer->scale_shape.size() != 2) return;
  const auto rows = static_cast<size_t>(quantizer->scale_shape[0]);
  const auto columns = static_cast<size_t>(quantizer->scale_shape[1]);
  Transpose(rows, columns, &quantizer->scale);
  Transpose(rows, columns, &quantizer->zero_point);
  Transpose(rows, columns, &quantizer->scale_code);
  for (files::OnnxModel::Quantizer& outer : quantizer->of_scales) {
    Transpose(&outer);
  }
  std::swap(quantizer->scale_shape[0], quantizer->scale_shape[1]);
}

// `shape` is as the encoding has it, `is_transposed` whether the model has the
// transpose.
absl::StatusOr<files::OnnxModel::Quantizer> MakeWeightQuantizer(
    const Encoding& encoding, const std::vector<int64_t>& shape,
    bool is_transposed) {
  absl::StatusOr<files::OnnxModel::Quantizer> quantizer =
      MakeQuantizer(encoding, &shape, std::nullopt);
  if (quantizer.ok() && is_transposed) Transpose(&*quantizer);
  return quantizer;
}

bool IsInteger(const files::OnnxModel::Quantizer& quantizer) {
  return absl::StrContains(quantizer.type, "int");
}

// How many bits a code of an integer has.
int BitsOf(const files::OnnxModel::Quantizer& quantizer) {
  int bits = 0;
  const size_t digits = quantizer.type.find("int") + 3;
  return absl::SimpleAtoi(absl::string_view(quantizer.type).substr(digits),
                          &bits)
             ? bits
             : 0;
}

// The elements of a bias of float32.
std::vector<float> BiasElements(absl::Span<const uint8_t> bias) {
  std::vector<float> elements(bias.size() / sizeof(float));
  std::memcpy(elements.data(), bias.data(), elements.size() * sizeof(float));
  return elements;
}

// How often a scale has to be doubled so that the code of an element is small:
// runtimes add the products of weights and inputs to it in int32.
int DoublingsFor(float element, double scale) {
  constexpr double kMostCode = 1 << 30;
  if (!std::isfinite(element) || !(scale > 0)) return 0;
  const double quotient =
      std::fabs(static_cast<double>(element)) / (scale * kMostCode);
  return quotient > 1 ? std::ilogb(quotient) + 1 : 0;
}

// With one scale or one for each element.
// Errors: OUT_OF_RANGE: one is no int32.
absl::StatusOr<std::vector<int32_t>> BiasCodes(absl::Span<const float> bias,
                                               absl::Span<const float> scales) {
  std::vector<int32_t> codes(bias.size());
  for (size_t i = 0; i < codes.size(); ++i) {
    const float value = bias[i];
    const float scale = scales[scales.size() == 1 ? 0 : i];
    const double code = std::nearbyint(static_cast<double>(value) / scale);
    if (!std::isnormal(scale) ||
        !(code >= std::numeric_limits<int32_t>::min() &&
          code <= std::numeric_limits<int32_t>::max())) {
      return absl::OutOfRangeError(absl::StrCat(
          "element ", i, ", ", value, ", is no int32 under the scale ", scale));
    }
    codes[i] = static_cast<int32_t>(code);
  }
  return codes;
}

// One run. Not thread-safe.
class Exporter {
 public:
  Exporter(const OnnxExport& job, Session* session)
      : job_(job), session_(*session) {}

  void Run() {
    absl::Status status = CheckFiles();
    if (!status.ok()) return FailEarly(status, &session_);
    absl::StatusOr<files::OnnxModel> model =
        files::OnnxModel::Open(job_.model_path);
    if (!model.ok()) return session_.Fail(model.status());
    client_ = session_.ConnectOrFail();
    if (client_ == nullptr) return;
    status = jobs::CheckStoredPatterns("--include", job_.include,
                                       jobs::Stored::kEncodings, job_.name,
                                       client_.get());
    if (!status.ok()) return FailEarly(status, &session_);
    const files::OnnxModules modules(*model);
    modules_ = &modules;
    status = ReadMap(*model);
    if (!status.ok()) return session_.FailUsage(status);
    status = QuantizeAll(&*model);
    if (status.ok() && !job_.keeps_biases) RaiseScales(*model);
    PlaceWeights(&*model);
    if (status.ok() && !job_.keeps_biases) QuantizeBiases(&*model);
    AddElsewhere();
    const int64_t opset = model->opset();
    if (status.ok())
      status = model->Write(job_.output.path, job_.output.if_exists());
    if (!status.ok()) return session_.Fail(status);
    if (AnyLeftOut(losses_)) session_.Note(kServerError);
    if (std::any_of(done_.begin(), done_.end(), [](const auto& entry) {
          return entry.second.quantizer.type == "float4_e2m1";
        })) {
      session_.PrintError(
          "quantctl: warning: the model takes a runtime with kernels for "
          "float4, and many have none: try it where it is to run");
    }
    WarnOfOptimizer(*model);
    if (session_.json) {
      return session_.PrintJson({{"input", job_.model_path},
                                 {"output", job_.output.path},
                                 {"weight_count", weight_count_},
                                 {"activation_count", activation_count_},
                                 {"bias_count", bias_count_},
                                 {"opset_before", opset},
                                 {"opset", model->opset()},
                                 {"names", NamesJson()},
                                 {"not_quantized", NotQuantizedJson()},
                                 {"losses", LossesJson(losses_)}});
    }
    PrintLosses(losses_, session_);
    if (job_.prints_names) PrintNames();
    session_.Print(absl::StrCat(
        CountText(weight_count_), " weights, ", CountText(activation_count_),
        " activations and ", CountText(bias_count_),
        " biases quantized, opset ", model->opset(), ", written to ",
        Printable(job_.output.path), "\n"));
  }

 private:
  using Place = files::OnnxModules::Place;

  // The quantizers that an initializer or an activation has got.
  struct Done {
    std::string tensor;
    // Follows from the stored encoding.
    files::OnnxModel::Quantizer stored;
    // Goes into the model.
    files::OnnxModel::Quantizer quantizer;
  };

  // A weight and its codes.
  struct QuantizedWeight {
    std::string tensor;
    // Shape in the encoding; the model may have the transpose.
    std::vector<int64_t> shape;
    bool is_transposed = false;
    Encoding encoding;
    std::vector<uint8_t> codes;
  };

  // Checks that the output is none of the model's files. Notes the weights that
  // are
  // not in the main graph: they stay as they are.
  absl::Status CheckFiles() {
    const absl::StatusOr<files::OnnxTensors> tensors = files::OnnxTensors::Open(
        job_.model_path, files::OnnxTensors::OtherFiles::kLeave);
    if (!tensors.ok()) return tensors.status();
    std::vector<std::string> inputs = tensors->data_paths();
    inputs.push_back(job_.model_path);
    const absl::Status status =
        CheckOutputFile(job_.output, inputs, ".onnx", &session_);
    if (!status.ok()) return status;
    for (const files::UnreadTensor& tensor : tensors->elsewhere()) {
      elsewhere_[tensor.name] = tensor.why;
    }
    return absl::OkStatus();
  }

  // Says which of them nobody asked for: those with encodings are told of
  // already.
  void AddElsewhere() {
    for (const auto& [name, why] : elsewhere_) {
      if (std::none_of(losses_.begin(), losses_.end(),
                       [&name = name](const v1::InterchangeLoss& loss) {
                         return loss.tensor() == name;
                       })) {
        AddLoss(name, absl::StrCat("stays as it is: ", why),
                /*left_out=*/false);
      }
    }
  }

  absl::Status QuantizeAll(files::OnnxModel* model) {
    const absl::StatusOr<std::vector<v1::StoredEncoding>> encodings =
        client_->ListEncodings(job_.name.model, job_.name.revision);
    if (!encodings.ok()) return encodings.status();
    for (const v1::StoredEncoding& entry : *encodings) {
      const std::string& tensor = entry.name().tensor();
      if (!job_.include.empty() && !MatchesAny(job_.include, tensor)) continue;
      const absl::Status status = QuantizeOne(tensor, model);
      if (status.ok()) continue;
      if (ExitCodeOf(status) == kUnreachable) return status;
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

  // Errors: those for which the tensor is left out; a server that can't be
  // reached ends the run.
  absl::Status QuantizeOne(const std::string& tensor, files::OnnxModel* model) {
    const absl::StatusOr<std::vector<Place>> places =
        FindPlaces(tensor, *model);
    if (!places.ok()) return places.status();
    for (const Place& place : *places) {
      absl::Status status = QuantizePlace(tensor, place, model);
      if (!status.ok()) return status;
      names_.push_back({tensor, place});
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<Place>> FindPlaces(
      const std::string& tensor, const files::OnnxModel& model) const {
    const auto mapped = map_.find(tensor);
    if (mapped != map_.end()) {
      Place place;
      place.name = mapped->second;
      if (model.FindWeight(place.name) != nullptr) {
        place = modules_->PlaceOfWeight(place.name);
      }
      place.how = "--map";
      return std::vector<Place>{place};
    }
    if (model.FindWeight(tensor) != nullptr ||
        model.FindActivation(tensor).has_value()) {
      return std::vector<Place>{{tensor, false, "its name"}};
    }
    const auto elsewhere = elsewhere_.find(tensor);
    if (elsewhere != elsewhere_.end()) {
      return ArgumentInvalidError(elsewhere->second);
    }
    absl::StatusOr<std::vector<Place>> places = modules_->Find(tensor);
    if (places.ok()) return places;
    return ArgumentInvalidError(places.status().message());
  }

  // True if the place has this encoding already from another tensor, with the
  // same parameters.
  // Errors: ARGUMENT_INVALID where the parameters are others.
  absl::StatusOr<bool> IsDone(const std::string& tensor, const Place& place,
                              const files::OnnxModel::Quantizer& quantizer) {
    const auto [done, is_new] =
        done_.insert({place.name, {tensor, quantizer, quantizer}});
    if (is_new) return false;
    if (SameQuantizer(done->second.stored, quantizer)) return true;
    return ArgumentInvalidError(
        absl::StrCat(place.name, " has the encoding of ", done->second.tensor,
                     ", which is another one"));
  }

  absl::Status QuantizePlace(const std::string& tensor, const Place& place,
                             files::OnnxModel* model) {
    const files::OnnxModel::Weight* const weight =
        model->FindWeight(place.name);
    const std::optional<files::OnnxModel::Activation> activation =
        model->FindActivation(place.name);
    if (weight == nullptr && !activation.has_value()) {
      return ArgumentInvalidError(
          absl::StrCat("the model has no tensor ", place.name));
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
      return NotInOnnx("quantized tensors of float32, float16 and bfloat16");
    }
    const absl::StatusOr<v1::StoredEncoding> stored =
        client_->GetEncoding(job_.name.NameOf(tensor));
    if (!stored.ok()) return stored.status();
    const Encoding& encoding = stored->encoding();
    if (weight != nullptr) {
      return QuantizeWeight(tensor, place, *weight, *stored);
    }
    absl::StatusOr<files::OnnxModel::Quantizer> quantizer =
        MakeQuantizer(encoding, nullptr, activation->rank);
    if (!quantizer.ok()) return quantizer.status();
    const absl::StatusOr<bool> is_done = IsDone(tensor, place, *quantizer);
    if (!is_done.ok()) return is_done.status();
    if (*is_done) return absl::OkStatus();
    const FormatInfo format = *GetFormatInfo(encoding.format());
    if (encoding.qmin() != format.qmin || encoding.qmax() != format.qmax) {
      AddLoss(tensor,
              absl::StrCat("qmin and qmax: codes are of ", format.qmin, " to ",
                           format.qmax),
              /*left_out=*/false);
    }
    model->QuantizeActivation(place.name, *quantizer);
    ++activation_count_;
    return absl::OkStatus();
  }

  absl::Status QuantizeWeight(const std::string& tensor, const Place& place,
                              const files::OnnxModel::Weight& weight,
                              const v1::StoredEncoding& stored) {
    QuantizedWeight quantized;
    quantized.tensor = tensor;
    quantized.is_transposed = place.is_transposed && weight.shape.size() == 2;
    quantized.shape = weight.shape;
    if (quantized.is_transposed) {
      std::swap(quantized.shape[0], quantized.shape[1]);
    }
    absl::StatusOr<files::OnnxModel::Quantizer> quantizer = MakeWeightQuantizer(
        stored.encoding(), quantized.shape, quantized.is_transposed);
    if (!quantizer.ok()) return quantizer.status();
    const absl::StatusOr<bool> is_done = IsDone(tensor, place, *quantizer);
    if (!is_done.ok()) return is_done.status();
    if (*is_done) return absl::OkStatus();
    std::vector<uint8_t> data;
    const absl::StatusOr<FittedWeight> fitted = QuantizeFitted(
        ElementsOf(quantized, weight, &data), stored, client_.get());
    if (!fitted.ok()) {
      done_.erase(place.name);
      return fitted.status();
    }
    if (!fitted->note.empty()) {
      AddLoss(tensor, fitted->note, /*left_out=*/false);
      quantizer = MakeWeightQuantizer(fitted->encoding, quantized.shape,
                                      quantized.is_transposed);
      if (!quantizer.ok()) return quantizer.status();
      done_.find(place.name)->second.quantizer = *quantizer;
    }
    quantized.encoding = fitted->encoding;
    quantized.codes = CodesIn(quantized, fitted->result);
    NoteNotFinite(tensor, fitted->result.summary);
    weights_.emplace(place.name, std::move(quantized));
    ++weight_count_;
    return absl::OkStatus();
  }

  // The weight as its encoding has it; `data` holds what is transposed.
  Tensor ElementsOf(const QuantizedWeight& quantized,
                    const files::OnnxModel::Weight& weight,
                    std::vector<uint8_t>* data) const {
    Tensor elements;
    elements.name = job_.name.NameOf(quantized.tensor);
    elements.element_type = *ElementTypeOf(*weight.dtype);
    elements.shape = quantized.shape;
    elements.data = weight.data;
    if (quantized.is_transposed) {
      const size_t bits = *weight.dtype == files::Dtype::kF32 ? 32 : 16;
      *data =
          Transposed(weight.data, bits, static_cast<size_t>(quantized.shape[1]),
                     static_cast<size_t>(quantized.shape[0]));
      elements.data = *data;
    }
    return elements;
  }

  // The codes in the order of the model.
  static std::vector<uint8_t> CodesIn(const QuantizedWeight& quantized,
                                      const QuantizeResult& result) {
    if (!quantized.is_transposed) {
      return {result.codes.begin(), result.codes.end()};
    }
    return Transposed(
        result.codes,
        static_cast<size_t>(
            GetFormatInfo(quantized.encoding.format())->storage_bits),
        static_cast<size_t>(quantized.shape[0]),
        static_cast<size_t>(quantized.shape[1]));
  }

  void PlaceWeights(files::OnnxModel* model) {
    for (auto& [name, weight] : weights_) {
      model->QuantizeWeight(name, done_.find(name)->second.quantizer,
                            weight.codes);
      weight.codes = {};
    }
  }

  // Raises scales of weights that are so small beside a bias that its codes
  // would leave no room for the products in int32, as those of a channel that
  // is always off. As ONNX Runtime's own tools do.
  void RaiseScales(const files::OnnxModel& model) {
    // Doublings of each scale, by weight.
    std::map<std::string, std::vector<int>> doublings;
    for (const files::OnnxModules::Bias& bias : modules_->Biases()) {
      const files::OnnxModel::Quantizer* weight = nullptr;
      const files::OnnxModel::Quantizer* input = nullptr;
      const auto quantized = weights_.find(bias.weight);
      if (!FindLayer(bias, &weight, &input) || quantized == weights_.end() ||
          !ReasonAgainst(bias, *weight, *input, model).empty()) {
        continue;
      }
      std::vector<int>& of_scales = doublings[bias.weight];
      of_scales.resize(weight->scale.size(), 0);
      const std::vector<float> elements =
          BiasElements(model.FindWeight(bias.name)->data);
      for (size_t i = 0; i < elements.size(); ++i) {
        const size_t s = weight->scale.size() == 1 ? 0 : i;
        of_scales[s] = std::max(
            of_scales[s],
            DoublingsFor(elements[i], static_cast<double>(weight->scale[s]) *
                                          static_cast<double>(input->scale[0]) *
                                          static_cast<double>(bias.factor)));
      }
    }
    for (const auto& [name, of_scales] : doublings) {
      if (std::any_of(of_scales.begin(), of_scales.end(),
                      [](int count) { return count > 0; })) {
        RaiseScales(name, of_scales, model);
      }
    }
  }

  void RaiseScales(const std::string& name, const std::vector<int>& doublings,
                   const files::OnnxModel& model) {
    QuantizedWeight& weight = weights_.find(name)->second;
    QuantizedWeight raised = weight;
    uint64_t count = 0;
    for (size_t i = 0; i < doublings.size(); ++i) {
      float& scale = raised.encoding.mutable_scale()->at(static_cast<int>(i));
      scale = std::ldexp(scale, doublings[i]);
      count += doublings[i] > 0 ? 1 : 0;
    }
    std::vector<uint8_t> data;
    QuantizeJob job;
    job.tensor = ElementsOf(raised, *model.FindWeight(name), &data);
    job.source = raised.encoding;
    const absl::StatusOr<QuantizeResult> result = client_->Quantize(job);
    const absl::StatusOr<files::OnnxModel::Quantizer> quantizer =
        MakeWeightQuantizer(raised.encoding, raised.shape,
                            raised.is_transposed);
    // Then the bias stays as it is.
    if (!result.ok() || !quantizer.ok()) return;
    raised.codes = CodesIn(raised, *result);
    weight = std::move(raised);
    done_.find(name)->second.quantizer = *quantizer;
    AddLoss(weight.tensor,
            absl::StrCat("scale: ", CountText(count), " of ",
                         CountText(doublings.size()),
                         " are larger, as the bias of the channel would not "
                         "fit in int32 otherwise"),
            /*left_out=*/false);
  }

  void NoteNotFinite(const std::string& tensor,
                     const v1::QuantizeSummary& summary) {
    const uint64_t infinity_count =
        summary.positive_infinity_count() + summary.negative_infinity_count();
    if (summary.nan_count() + infinity_count == 0) return;
    AddLoss(tensor, NotFiniteText(summary.nan_count(), infinity_count),
            /*left_out=*/false);
  }

  // What goes into a node as float32 from codes of integers; null for others.
  const Done* FindCodes(const std::string& value,
                        const files::OnnxModel& model) const {
    const auto done = done_.find(value);
    if (done == done_.end() || !IsInteger(done->second.quantizer)) {
      return nullptr;
    }
    const files::OnnxModel::Weight* const weight = model.FindWeight(value);
    const std::optional<files::Dtype> dtype =
        weight == nullptr ? model.FindActivation(value)->dtype : weight->dtype;
    return dtype == files::Dtype::kF32 ? &done->second : nullptr;
  }

  // True if the second factor of a product has one scale, or one for each
  // output of the product.
  static bool HasScalesOfOutputs(const files::OnnxModules::Product& product,
                                 const files::OnnxModel::Quantizer& quantizer,
                                 const files::OnnxModel& model) {
    if (quantizer.scale_shape.empty()) return true;
    if (quantizer.block_size != 0) return false;
    if (product.op_type == "Conv") return quantizer.axis == 0;
    const files::OnnxModel::Weight* const weight =
        model.FindWeight(product.second);
    const std::optional<int64_t> rank =
        weight == nullptr ? model.FindActivation(product.second)->rank
                          : static_cast<int64_t>(weight->shape.size());
    return rank.has_value() && quantizer.axis == *rank - 1;
  }

  // Tells what ONNX Runtime's optimizer makes integer operators of that do not
  // take it: float8 wherever activations are quantized, and what it takes for
  // the factors of such an operator. It leaves a product alone if a factor has
  // 16 bits, the second one 4 bits, or a Conv float outputs.
  void WarnOfOptimizer(const files::OnnxModel& model) {
    if (activation_count_ == 0) return;
    std::vector<std::string> float8;
    for (const auto& [value, done] : done_) {
      if (absl::StartsWith(done.quantizer.type, "float8_")) {
        float8.push_back(done.tensor);
      }
    }
    std::vector<std::string> input_bits;
    std::vector<std::string> weight_bits;
    std::vector<std::string> input_scales;
    std::vector<std::string> weight_scales;
    for (const files::OnnxModules::Product& product : modules_->Products()) {
      const Done* const input = FindCodes(product.first, model);
      const Done* const weight = FindCodes(product.second, model);
      if (input == nullptr || weight == nullptr) continue;
      const int bits = BitsOf(input->quantizer);
      const bool is_conv = product.op_type == "Conv";
      if (bits == 16 || (bits == 4 && !is_conv) ||
          BitsOf(weight->quantizer) == 16 || BitsOf(weight->quantizer) == 4 ||
          (is_conv && FindDone(product.outputs) == nullptr)) {
        continue;
      }
      if (bits < 8) input_bits.push_back(input->tensor);
      if (BitsOf(weight->quantizer) < 8) weight_bits.push_back(weight->tensor);
      // The bias of such a Conv stays float32, and with it the Conv.
      if (product.op_type == "Gemm" || (is_conv && product.has_bias)) continue;
      if (!input->quantizer.scale_shape.empty()) {
        input_scales.push_back(input->tensor);
      }
      if (!HasScalesOfOutputs(product, weight->quantizer, model)) {
        weight_scales.push_back(weight->tensor);
      }
    }
    Warn("float8 beside quantized activations", float8, "quantize to int8");
    Warn("inputs of less than 8 bits", input_bits, "quantize them to uint8");
    Warn("weights of 2 bits behind quantized inputs", weight_bits,
         "quantize them to int4 or int8");
    Warn("inputs with several scales", input_scales,
         "quantize them per tensor");
    Warn("weights without a single scale for each output", weight_scales,
         "quantize them with one: per-channel:1 for the weight of a MatMul, "
         "which is [in, out], per-channel for others");
  }

  void Warn(absl::string_view mistaken, std::vector<std::string> tensors,
            absl::string_view remedy) {
    if (tensors.empty()) return;
    std::sort(tensors.begin(), tensors.end());
    tensors.erase(std::unique(tensors.begin(), tensors.end()), tensors.end());
    session_.PrintError(absl::StrCat(
        "quantctl: warning: ONNX Runtime's optimizer mistakes ", mistaken, ": ",
        Printable(NamesText(std::move(tensors))),
        "; it does not load or run the model, or computes something else; "
        "disable its graph optimization (ORT_DISABLE_ALL), or ",
        remedy));
  }

  // The parameters that the first of these values has got; null where none has.
  const files::OnnxModel::Quantizer* FindDone(
      const std::vector<std::string>& values) const {
    for (const std::string& value : values) {
      const auto done = done_.find(value);
      if (done != done_.end()) return &done->second.quantizer;
    }
    return nullptr;
  }

  // True if the weight and the input of the layer become integers, and the bias
  // has no encoding of its own.
  bool FindLayer(const files::OnnxModules::Bias& bias,
                 const files::OnnxModel::Quantizer** weight,
                 const files::OnnxModel::Quantizer** input) const {
    *weight = FindDone({bias.weight});
    *input = FindDone(bias.activations);
    return *weight != nullptr && *input != nullptr &&
           !done_.contains(bias.name) && IsInteger(**weight) &&
           IsInteger(**input);
  }

  // Why such a bias stays as it is; empty if it need not.
  static std::string ReasonAgainst(const files::OnnxModules::Bias& bias,
                                   const files::OnnxModel::Quantizer& weight,
                                   const files::OnnxModel::Quantizer& input,
                                   const files::OnnxModel& model) {
    if (!bias.obstacle.empty()) return bias.obstacle;
    if (input.scale.size() != 1) {
      return "the input of its layer has several scales";
    }
    // The activation has the type that the layer computes with.
    const std::optional<files::OnnxModel::Activation> activation =
        model.FindActivation(bias.activations[0]);
    if (!activation.has_value() || activation->dtype != files::Dtype::kF32 ||
        model.FindWeight(bias.weight)->dtype != files::Dtype::kF32) {
      return "its layer does not compute in float32";
    }
    const bool is_per_channel =
        weight.scale_shape.size() == 1 && weight.axis == bias.axis;
    return weight.scale.size() == 1 || is_per_channel
               ? ""
               : "the weight of its layer has no single scale for each output";
  }

  // Quantizes biases as ONNX Runtime's own tools do: sums of products of codes
  // are in units of the product of the scales.
  void QuantizeBiases(files::OnnxModel* model) {
    // Biases that stay although weight and input are integers, by the reason.
    std::map<std::string, std::vector<std::string>> kept;
    for (const files::OnnxModules::Bias& bias : modules_->Biases()) {
      const files::OnnxModel::Quantizer* weight = nullptr;
      const files::OnnxModel::Quantizer* input = nullptr;
      if (!FindLayer(bias, &weight, &input)) continue;
      const std::string reason = ReasonAgainst(bias, *weight, *input, *model);
      if (!reason.empty()) {
        kept[reason].push_back(bias.name);
        continue;
      }
      const std::vector<float> elements =
          BiasElements(model->FindWeight(bias.name)->data);
      if (elements.empty()) continue;
      std::vector<float> scales = weight->scale;
      for (float& scale : scales) scale *= input->scale[0] * bias.factor;
      const absl::StatusOr<std::vector<int32_t>> codes =
          BiasCodes(elements, scales);
      if (!codes.ok()) {
        AddLoss(bias.name,
                absl::StrCat("stays float32: ", codes.status().message(),
                             " in ", bias.layer),
                /*left_out=*/false);
        continue;
      }
      model->QuantizeBias(bias.node, bias.input, scales, *codes);
      ++bias_count_;
    }
    for (const auto& [why, names] : kept) {
      AddLoss(names[0],
              names.size() == 1 ? absl::StrCat("stays float32: ", why)
                                : absl::StrCat("stays float32, as do ",
                                               CountText(names.size() - 1),
                                               " other biases: ", why),
              /*left_out=*/false);
    }
  }

  // "TORCH=ONNX", of which ONNX is in the model.
  absl::Status ReadMap(const files::OnnxModel& model) {
    for (const std::string& entry : job_.map) {
      const size_t equals = entry.find('=');
      if (equals == std::string::npos || equals == 0) {
        return ArgumentInvalidError(
            absl::StrCat("expected --map TORCH=ONNX, got \"", entry, "\""));
      }
      const std::string name = entry.substr(equals + 1);
      if (model.FindWeight(name) == nullptr &&
          !model.FindActivation(name).has_value()) {
        return ArgumentInvalidError(
            absl::StrCat("--map ", entry, ": the model has no such tensor"));
      }
      map_[entry.substr(0, equals)] = name;
    }
    return absl::OkStatus();
  }

  // Inputs of layers that nothing was found for.
  std::vector<files::OnnxModules::LayerInput> NotQuantized() const {
    std::vector<files::OnnxModules::LayerInput> rest;
    for (files::OnnxModules::LayerInput& input : modules_->LayerInputs()) {
      if (std::none_of(input.values.begin(), input.values.end(),
                       [this](const std::string& value) {
                         return done_.contains(value);
                       })) {
        rest.push_back(std::move(input));
      }
    }
    return rest;
  }

  void PrintNames() const {
    for (const auto& [tensor, place] : names_) {
      session_.Print(absl::StrCat(
          Printable(tensor), " is ", Printable(place.name),
          place.is_transposed ? ", transposed" : "", ", by ", place.how, "\n"));
    }
    for (const files::OnnxModules::LayerInput& input : NotQuantized()) {
      session_.Print(
          absl::StrCat("not quantized: ", Printable(input.activation),
                       ", input of ", Printable(input.layer), "\n"));
    }
  }

  Json NamesJson() const {
    Json list = Json::array();
    for (const auto& [tensor, place] : names_) {
      list.push_back({{"tensor", tensor},
                      {"onnx", place.name},
                      {"transposed", place.is_transposed},
                      {"how", place.how}});
    }
    return list;
  }

  Json NotQuantizedJson() const {
    Json list = Json::array();
    for (const files::OnnxModules::LayerInput& input : NotQuantized()) {
      list.push_back({{"onnx", input.activation}, {"layer", input.layer}});
    }
    return list;
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
  const files::OnnxModules* modules_ = nullptr;
  absl::flat_hash_map<std::string, std::string> map_;
  // Weights that are not in the main graph, and where they are.
  std::map<std::string, std::string> elsewhere_;
  absl::flat_hash_map<std::string, Done> done_;
  // Weights among those, by the initializer.
  std::map<std::string, QuantizedWeight> weights_;
  // Tensors that were found, and where.
  std::vector<std::pair<std::string, Place>> names_;
  uint64_t weight_count_ = 0;
  uint64_t activation_count_ = 0;
  uint64_t bias_count_ = 0;
};

}  // namespace

void ExportOnnx(const OnnxExport& job, Session* session) {
  Exporter(job, session).Run();
}

}  // namespace quantd::cli
