#include "server/interchange/interchange.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "server/interchange/compressed_tensors.h"
#include "server/interchange/entry_format.h"
#include "server/interchange/json_text.h"
#include "server/wire/names.h"

namespace quantd::server {
namespace {

constexpr char kQuantdFormatName[] = "quantd-encodings";
constexpr char kOnnxFormatName[] = "onnx-qdq";
constexpr int kDocumentVersion = 1;
// Keys of the encodings in AIMET 0.6.1 and 1.0.0; a file may lack one.
constexpr char kActivations[] = "activation_encodings";
constexpr char kParameters[] = "param_encodings";

// A document with one list of entries, with one entry a line.
class ListWriter final : public EncodingsWriter {
 public:
  // `head` is what stands before the list, without its closing brace.
  ListWriter(const EntryFormat& format, const Json& head)
      : head_(DumpJson(head)), format_(format) {}

  void Begin(int, std::string* out) override {
    head_.pop_back();
    absl::StrAppend(out, head_, ",\n\"encodings\":[");
  }

  absl::Status Add(int, const std::string& tensor,
                   const core::Encoding& encoding, core::StopToken stop,
                   std::string* out,
                   std::vector<InterchangeLoss>* losses) override {
    const absl::StatusOr<bool> is_written =
        WriteEntry(format_, tensor, encoding,
                   encoding_count_ == 0 ? "\n" : ",\n", stop, out, losses);
    if (!is_written.ok()) return is_written.status();
    if (*is_written) ++encoding_count_;
    return absl::OkStatus();
  }

  absl::Status Finish(core::StopToken, std::string* out) override {
    absl::StrAppend(out, "\n]}\n");
    return absl::OkStatus();
  }

 private:
  std::string head_;
  const EntryFormat& format_;
};

// The quantizer_args of AIMET 0.6.1 and 1.0.0, which describe all encodings:
// the largest bit widths, and the properties that any parameter has.
class QuantizerArguments {
 public:
  void Note(bool is_parameter, const core::Encoding& encoding) {
    int& bits = is_parameter ? parameter_bits_ : activation_bits_;
    bits = std::max(bits, core::FindFormat(encoding.format)->bits);
    if (!is_parameter) return;
    is_symmetric_ |= IsSymmetric(encoding);
    is_per_channel_ |= encoding.scale.size() > 1;
  }

  std::string Text() const {
    return DumpJson({{"activation_bitwidth", activation_bits_},
                     {"param_bitwidth", parameter_bits_},
                     {"dtype", "int"},
                     {"is_symmetric", is_symmetric_},
                     {"per_channel_quantization", is_per_channel_},
                     {"quant_scheme", "min_max"}});
  }

 private:
  int activation_bits_ = 8;
  int parameter_bits_ = 8;
  bool is_symmetric_ = false;
  bool is_per_channel_ = false;
};

// In 0.6.1 every scale is an object.
constexpr int64_t kMemoryPerScaleObject = 1400;

// AIMET 0.6.1 and 1.0.0: activations in one pass, parameters in the next.
class AimetWriter final : public EncodingsWriter {
 public:
  AimetWriter(const EntryFormat& format, absl::string_view version,
              bool is_by_name, ExportOptions options)
      : format_(format),
        version_(version),
        is_by_name_(is_by_name),
        options_(std::move(options)) {}

  int pass_count() const override { return 2; }

  void Begin(int pass, std::string* out) override {
    if (pass == 0) absl::StrAppend(out, "{\"version\":\"", version_, "\",\n");
    if (pass == 1) absl::StrAppend(out, "\n", Close(), ",\n");
    absl::StrAppend(
        out, pass == 0 ? "\"activation_encodings\":" : "\"param_encodings\":",
        is_by_name_ ? "{" : "[");
    is_first_ = true;
  }

  absl::Status Add(int pass, const std::string& tensor,
                   const core::Encoding& encoding, core::StopToken stop,
                   std::string* out,
                   std::vector<InterchangeLoss>* losses) override {
    if (options_.is_parameter(tensor, encoding) != (pass == 1)) {
      return absl::OkStatus();
    }
    const std::string head = absl::StrCat(
        is_first_ ? "\n" : ",\n",
        is_by_name_ ? absl::StrCat(DumpJson(Json(tensor)), ":") : "");
    const absl::StatusOr<bool> is_written =
        WriteEntry(format_, tensor, encoding, head, stop, out, losses);
    if (!is_written.ok()) return is_written.status();
    if (!*is_written) return absl::OkStatus();
    arguments_.Note(/*is_parameter=*/pass == 1, encoding);
    is_first_ = false;
    ++encoding_count_;
    return absl::OkStatus();
  }

  int64_t memory_per_scale() const override {
    return is_by_name_ ? kMemoryPerScaleObject : kMemoryPerScale;
  }

  absl::Status Finish(core::StopToken, std::string* out) override {
    absl::StrAppend(out, "\n", Close(),
                    ",\n\"quantizer_args\":", arguments_.Text(), "}\n");
    return absl::OkStatus();
  }

 private:
  absl::string_view Close() const { return is_by_name_ ? "}" : "]"; }

  const EntryFormat& format_;
  const std::string version_;
  const bool is_by_name_;
  const ExportOptions options_;
  bool is_first_ = true;
  QuantizerArguments arguments_;
};

// An input or output of a module: "MODULE.input", "MODULE.input.1".
struct ModuleTensor {
  std::string module;
  // 0 for inputs, 1 for outputs.
  size_t kind = 0;
  int64_t index = 0;
};

constexpr absl::string_view kModuleKinds[] = {"input", "output"};

std::string ModuleTensorName(const ModuleTensor& tensor) {
  std::string name =
      absl::StrCat(tensor.module, tensor.module.empty() ? "" : ".",
                   kModuleKinds[tensor.kind]);
  if (tensor.index != 0) absl::StrAppend(&name, ".", tensor.index);
  return name;
}

// Reads an index in digits as we write them: others would be further names of
// the same place.
bool ParseIndex(absl::string_view text, int64_t* index) {
  return absl::SimpleAtoi(text, index) && *index >= 0 &&
         absl::StrCat(*index) == text;
}

// False where it is none.
bool ParseModuleTensor(absl::string_view name, ModuleTensor* tensor) {
  const size_t dot = name.rfind('.');
  if (dot != absl::string_view::npos &&
      ParseIndex(name.substr(dot + 1), &tensor->index)) {
    if (tensor->index == 0) return false;
    name = name.substr(0, dot);
  }
  for (size_t kind = 0; kind < 2; ++kind) {
    absl::string_view module = name;
    if (!absl::ConsumeSuffix(&module, kModuleKinds[kind])) continue;
    if (!module.empty() && !absl::ConsumeSuffix(&module, ".")) continue;
    tensor->module = std::string(module);
    tensor->kind = kind;
    return true;
  }
  return false;
}

// AIMET's *_torch.encodings: parameters in one pass; activations in the next,
// kept until all of a module are there.
class AimetTorchWriter final : public EncodingsWriter {
 public:
  explicit AimetTorchWriter(ExportOptions options)
      : options_(std::move(options)) {}

  int pass_count() const override { return 2; }

  void Begin(int pass, std::string* out) override {
    absl::StrAppend(out, pass == 0
                             ? "{\"version\":\"0.6.1\",\n\"param_encodings\":{"
                             : "\n},\n\"activation_encodings\":{");
  }

  absl::Status Add(int pass, const std::string& tensor,
                   const core::Encoding& encoding, core::StopToken stop,
                   std::string* out,
                   std::vector<InterchangeLoss>* losses) override {
    const bool is_parameter = options_.is_parameter(tensor, encoding);
    if (is_parameter != (pass == 0)) return absl::OkStatus();
    ModuleTensor place;
    if (!is_parameter && !ParseModuleTensor(tensor, &place)) {
      losses->push_back({tensor,
                         "AIMET's torch files have inputs and outputs of "
                         "modules: MODULE.input, MODULE.output, with .1 and so "
                         "on for further ones",
                         true});
      return absl::OkStatus();
    }
    std::string text;
    const std::string head =
        is_parameter ? absl::StrCat(encoding_count_ == 0 ? "\n" : ",\n",
                                    DumpJson(Json(tensor)), ":")
                     : "";
    const absl::StatusOr<bool> is_written =
        WriteEntry(Aimet061EntryFormat(), tensor, encoding, head, stop,
                   is_parameter ? out : &text, losses);
    if (!is_written.ok()) return is_written.status();
    if (!*is_written) return absl::OkStatus();
    arguments_.Note(is_parameter, encoding);
    ++encoding_count_;
    if (is_parameter) return absl::OkStatus();
    // One scale is an object, several are a list of such.
    if (encoding.scale.size() == 1) text = text.substr(1, text.size() - 2);
    text.shrink_to_fit();
    memory_bytes_ +=
        kModuleBytes + static_cast<int64_t>(tensor.size() + text.capacity());
    modules_[place.module][place.kind][place.index] = std::move(text);
    return absl::OkStatus();
  }

  int64_t memory_per_scale() const override { return kMemoryPerScaleObject; }
  int64_t memory_bytes() const override { return memory_bytes_; }

  absl::Status Finish(core::StopToken stop, std::string* out) override {
    absl::string_view before_module = "\n";
    for (const auto& [module, kinds] : modules_) {
      if (stop.stopped()) return core::StoppedError();
      absl::StrAppend(out, before_module, DumpJson(Json(module)), ":{");
      before_module = ",\n";
      absl::string_view before_kind = "";
      for (size_t kind = 0; kind < 2; ++kind) {
        if (kinds[kind].empty()) continue;
        absl::StrAppend(out, before_kind, "\"", kModuleKinds[kind], "\":");
        before_kind = ",";
        absl::string_view before = "{";
        for (const auto& [index, text] : kinds[kind]) {
          absl::StrAppend(out, before, "\"", index, "\":", text);
          before = ",";
        }
        out->push_back('}');
      }
      out->push_back('}');
    }
    absl::StrAppend(out, "\n},\n\"quantizer_args\":", arguments_.Text(), "}\n");
    return absl::OkStatus();
  }

 private:
  // Memory of an activation beside its name and text, here and when written.
  static constexpr int64_t kModuleBytes = 500;

  using Kinds = std::array<std::map<int64_t, std::string>, 2>;

  const ExportOptions options_;
  std::map<std::string, Kinds> modules_;
  int64_t memory_bytes_ = 0;
  QuantizerArguments arguments_;
};

// A file, and what stands in it beside lists and objects.
struct Document {
  TextPieces text;
  Json head;
};

// Collects the entries of a document.
class Parser {
 public:
  Parser(ParsedEncodings* parsed, core::StopToken stop)
      : parsed_(parsed), stop_(stop) {}

  // `name` is that of the tensor where the entry does not have it.
  absl::Status Add(const EntryFormat& format, const Json& entry,
                   std::string place, const std::string* name) {
    if (stop_.stopped()) return core::StoppedError();
    PendingEncoding pending;
    pending.place = std::move(place);
    std::vector<std::string> notes;
    const absl::Status status =
        format.Read(entry, pending.place, &pending, &notes);
    if (name != nullptr) pending.tensor = *name;
    if (!status.ok()) return LeaveOut(pending.tensor, status);
    if (!names_.insert(pending.tensor).second) {
      return LeaveOut(
          pending.tensor,
          InvalidAt(pending.place,
                    absl::StrCat("tensor ", QuotedText(pending.tensor),
                                 " stands twice in the file")));
    }
    for (std::string& note : notes) {
      parsed_->losses.push_back({pending.tensor, std::move(note), false});
    }
    parsed_->encodings.push_back(std::move(pending));
    return absl::OkStatus();
  }

  absl::Status AddList(const EntryFormat& format, const Document& document,
                       absl::string_view key) {
    const auto list = document.head.find(std::string(key));
    if (list == document.head.end()) return absl::OkStatus();
    if (!list->is_array()) return InvalidAt(key, "expected a list");
    size_t index = 0;
    return ReadJsonEntries(document.text, key,
                           [&](const std::string& /*name*/, const Json& entry) {
                             return Add(format, entry,
                                        absl::StrCat(key, "[", index++, "]"),
                                        nullptr);
                           });
  }

  // `has_modules`: objects in it are modules of AIMET's torch files.
  absl::Status AddMap(const EntryFormat& format, const Document& document,
                      absl::string_view key, bool has_modules) {
    const auto map = document.head.find(std::string(key));
    if (map == document.head.end()) return absl::OkStatus();
    if (!map->is_object()) return InvalidAt(key, "expected an object");
    return ReadJsonEntries(document.text, key,
                           [&](const std::string& name, const Json& entry) {
                             const std::string place =
                                 absl::StrCat(key, "[", QuotedText(name), "]");
                             if (has_modules && entry.is_object())
                               return AddModule(format, entry, place, name);
                             return Add(format, entry, place, &name);
                           });
  }

 private:
  absl::Status AddModule(const EntryFormat& format, const Json& module,
                         const std::string& place, const std::string& name) {
    if (parsed_->format == InterchangeFormat::kAimet061) {
      parsed_->format = InterchangeFormat::kAimetTorch;
    }
    if (!name.empty()) {
      const absl::Status status = CheckTensorName(name);
      if (!status.ok()) {
        return LeaveOut(name, InvalidAt(place, core::ErrorText(status)));
      }
    }
    for (const auto& [key, tensors] : module.items()) {
      const auto kind =
          std::find(std::begin(kModuleKinds), std::end(kModuleKinds), key);
      const std::string kind_place = absl::StrCat(place, ".", QuotedText(key));
      if (kind == std::end(kModuleKinds) || !tensors.is_object()) {
        absl::Status status = LeaveOut(
            name,
            InvalidAt(kind_place, "expected an object called input or output"));
        if (!status.ok()) return status;
        continue;
      }
      for (const auto& [index, entry] : tensors.items()) {
        const std::string item_place =
            absl::StrCat(kind_place, "[", QuotedText(index), "]");
        ModuleTensor tensor;
        tensor.module = name;
        tensor.kind = static_cast<size_t>(kind - std::begin(kModuleKinds));
        absl::Status status;
        if (!ParseIndex(index, &tensor.index)) {
          status = LeaveOut(
              name, InvalidAt(item_place, "expected a number as the key"));
        } else {
          const std::string tensor_name = ModuleTensorName(tensor);
          status = Add(format, entry.is_object() ? Json::array({entry}) : entry,
                       item_place, &tensor_name);
        }
        if (!status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  // An entry, for that reason: as a loss, or as an error of the whole file.
  absl::Status LeaveOut(const std::string& tensor, absl::Status status) {
    const absl::string_view reason = core::ErrorReason(status);
    if (reason != "INTERCHANGE_UNSUPPORTED" &&
        !(parsed_->leaves_out_unsound && reason == "INTERCHANGE_INVALID")) {
      return status;
    }
    parsed_->losses.push_back(
        {tensor, std::string(core::ErrorText(status)), true});
    return absl::OkStatus();
  }

  ParsedEncodings* const parsed_;
  const core::StopToken stop_;
  absl::flat_hash_set<std::string> names_;
};

// "0.6.1" of a document; empty where it has none. Also a number, as some
// writers have it.
std::string VersionOf(const Json& document) {
  const auto version = document.find("version");
  if (version == document.end()) return "";
  return version->is_string() ? version->get<std::string>()
                              : DumpJson(*version);
}

bool IsAimet(InterchangeFormat format) {
  switch (format) {
    case InterchangeFormat::kAimet061:
    case InterchangeFormat::kAimet100:
    case InterchangeFormat::kAimet200:
    case InterchangeFormat::kAimet210:
    case InterchangeFormat::kAimetTorch:
      return true;
    case InterchangeFormat::kUnspecified:
    case InterchangeFormat::kJson:
    case InterchangeFormat::kOnnxQdq:
    case InterchangeFormat::kCompressedTensors:
      break;
  }
  return false;
}

// The format of an AIMET file: by its version, or else by the look of its
// entries.
InterchangeFormat AimetFormatOf(const Json& document) {
  const std::string version = VersionOf(document);
  if (absl::StartsWith(version, "0.")) return InterchangeFormat::kAimet061;
  if (absl::StartsWith(version, "1.")) return InterchangeFormat::kAimet100;
  if (absl::StartsWith(version, "2.0.")) return InterchangeFormat::kAimet200;
  if (absl::StartsWith(version, "2.")) return InterchangeFormat::kAimet210;
  for (const char* key : {kParameters, kActivations}) {
    const auto found = document.find(key);
    if (found == document.end()) continue;
    return found->is_array() ? InterchangeFormat::kAimet100
                             : InterchangeFormat::kAimet061;
  }
  return InterchangeFormat::kAimet210;
}

InterchangeFormat FormatOf(const Json& document) {
  const auto format = document.find("format");
  if (format != document.end() && format->is_string()) {
    if (*format == kQuantdFormatName) return InterchangeFormat::kJson;
    if (*format == kOnnxFormatName) return InterchangeFormat::kOnnxQdq;
  }
  if (document.contains("quantization_config") ||
      document.contains("config_groups")) {
    return InterchangeFormat::kCompressedTensors;
  }
  if (document.contains(kParameters) || document.contains(kActivations) ||
      document.contains("encodings")) {
    return AimetFormatOf(document);
  }
  return InterchangeFormat::kUnspecified;
}

absl::Status CheckOurVersion(const Json& document) {
  const std::string version = VersionOf(document);
  if (version == absl::StrCat(kDocumentVersion)) return absl::OkStatus();
  return core::InterchangeUnsupportedError(absl::StrCat(
      "version ", QuotedText(version), ", expected ", kDocumentVersion));
}

absl::Status CheckHasLists(const Json& document) {
  if (document.contains(kActivations) || document.contains(kParameters)) {
    return absl::OkStatus();
  }
  return core::InterchangeInvalidError(
      absl::StrCat("the file: expected ", kActivations, " or ", kParameters));
}

// Notes the excluded layers, which AIMET lists beside encodings, and which a
// store of them has no place for.
void NoteExcludedLayers(const Json& document, ParsedEncodings* parsed) {
  const auto layers = document.find("excluded_layers");
  if (layers == document.end() || layers->empty()) return;
  parsed->losses.push_back(
      {"", "excluded_layers: which layers are not to be quantized", false});
}

absl::Status ParseDocument(const Document& document, core::StopToken stop,
                           ParsedEncodings* parsed) {
  Parser parser(parsed, stop);
  const EntryFormat* format = nullptr;
  switch (parsed->format) {
    case InterchangeFormat::kJson:
    case InterchangeFormat::kOnnxQdq: {
      if (absl::Status s = CheckOurVersion(document.head); !s.ok()) return s;
      format = parsed->format == InterchangeFormat::kJson
                   ? &QuantdEntryFormat()
                   : &OnnxQdqEntryFormat();
      break;
    }
    case InterchangeFormat::kAimet061:
    case InterchangeFormat::kAimetTorch: {
      if (absl::Status s = CheckHasLists(document.head); !s.ok()) return s;
      NoteExcludedLayers(document.head, parsed);
      format = &Aimet061EntryFormat();
      absl::Status status =
          parser.AddMap(*format, document, kActivations, /*has_modules=*/true);
      if (!status.ok()) return status;
      return parser.AddMap(*format, document, kParameters,
                           /*has_modules=*/false);
    }
    case InterchangeFormat::kAimet100: {
      if (absl::Status s = CheckHasLists(document.head); !s.ok()) return s;
      NoteExcludedLayers(document.head, parsed);
      format = &Aimet100EntryFormat();
      absl::Status status = parser.AddList(*format, document, kActivations);
      if (!status.ok()) return status;
      return parser.AddList(*format, document, kParameters);
    }
    case InterchangeFormat::kAimet200:
      NoteExcludedLayers(document.head, parsed);
      format = &Aimet200EntryFormat();
      break;
    case InterchangeFormat::kAimet210:
      NoteExcludedLayers(document.head, parsed);
      format = &Aimet210EntryFormat();
      break;
    case InterchangeFormat::kCompressedTensors:
      return core::InterchangeUnsupportedError(
          "a compressed-tensors configuration has no scales: those are in the "
          "model's safetensors, and quantctl import takes both");
    case InterchangeFormat::kUnspecified:
      return core::InterchangeInvalidError(
          "the file: expected one of our own JSON, AIMET encodings or ONNX "
          "parameters");
  }
  if (!document.head.contains("encodings")) {
    return InvalidAt("encodings", "is missing, expected a list");
  }
  return parser.AddList(*format, document, "encodings");
}

}  // namespace

absl::StatusOr<std::unique_ptr<EncodingsWriter>> EncodingsWriter::Create(
    InterchangeFormat format, ExportOptions options) {
  switch (format) {
    case InterchangeFormat::kJson:
      return std::make_unique<ListWriter>(QuantdEntryFormat(),
                                          Json{{"format", kQuantdFormatName},
                                               {"version", kDocumentVersion},
                                               {"model", options.model},
                                               {"revision", options.revision}});
    case InterchangeFormat::kAimet061:
      return std::make_unique<AimetWriter>(Aimet061EntryFormat(), "0.6.1",
                                           /*is_by_name=*/true,
                                           std::move(options));
    case InterchangeFormat::kAimet100:
      return std::make_unique<AimetWriter>(Aimet100EntryFormat(), "1.0.0",
                                           /*is_by_name=*/false,
                                           std::move(options));
    case InterchangeFormat::kAimet200:
      return std::make_unique<ListWriter>(Aimet200EntryFormat(),
                                          Json{{"version", "2.0.0"}});
    case InterchangeFormat::kAimet210:
      return std::make_unique<ListWriter>(Aimet210EntryFormat(),
                                          Json{{"version", "2.1.0"}});
    case InterchangeFormat::kAimetTorch:
      return std::make_unique<AimetTorchWriter>(std::move(options));
    case InterchangeFormat::kOnnxQdq:
      return std::make_unique<ListWriter>(
          OnnxQdqEntryFormat(),
          Json{{"format", kOnnxFormatName}, {"version", kDocumentVersion}});
    case InterchangeFormat::kCompressedTensors:
      return NewCompressedTensorsWriter();
    case InterchangeFormat::kUnspecified:
      break;
  }
  return core::InterchangeUnsupportedError(
      absl::StrCat("no interchange format ", static_cast<int>(format)));
}

absl::Status ChargeParseMemory(
    TextPieces text, absl::FunctionRef<absl::Status(int64_t)> charge) {
  return ChargeJsonMemory(text, charge);
}

absl::StatusOr<ParsedEncodings> ParseEncodings(TextPieces text,
                                               InterchangeFormat format,
                                               core::StopToken stop) {
  const Document document{text, ReadJsonHead(text)};
  if (!document.head.is_object()) {
    return core::InterchangeInvalidError("the file: expected a JSON object");
  }
  ParsedEncodings parsed;
  parsed.format = format;
  if (format == InterchangeFormat::kUnspecified) {
    parsed.format = FormatOf(document.head);
  }
  parsed.leaves_out_unsound = IsAimet(parsed.format);
  absl::Status status = ParseDocument(document, stop, &parsed);
  if (!status.ok()) return status;
  return parsed;
}

}  // namespace quantd::server
