#include "server/interchange/interchange.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "server/interchange/compressed_tensors.h"
#include "server/interchange/entry_format.h"
#include "server/interchange/json_text.h"

namespace quantd::server {
namespace {

constexpr char kQuantdFormatName[] = "quantd-encodings";
constexpr char kOnnxFormatName[] = "onnx-qdq";
constexpr int kVersion = 1;

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
    Note(pass, encoding);
    is_first_ = false;
    ++encoding_count_;
    return absl::OkStatus();
  }

  // In 0.6.1 every scale is an object.
  int64_t memory_per_scale() const override {
    return is_by_name_ ? kMemoryPerScaleObject : kMemoryPerScale;
  }

  absl::Status Finish(core::StopToken, std::string* out) override {
    const Json arguments = {{"activation_bitwidth", bits_[0]},
                            {"param_bitwidth", bits_[1]},
                            {"dtype", "int"},
                            {"is_symmetric", is_symmetric_},
                            {"per_channel_quantization", is_per_channel_},
                            {"quant_scheme", "min_max"}};
    absl::StrAppend(out, "\n", Close(),
                    ",\n\"quantizer_args\":", DumpJson(arguments), "}\n");
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kMemoryPerScaleObject = 1400;

  absl::string_view Close() const { return is_by_name_ ? "}" : "]"; }

  // What quantizer_args say of all: the widest, and what any parameter has.
  void Note(int pass, const core::Encoding& encoding) {
    const int bits = core::FindFormat(encoding.format)->bits;
    bits_[pass] = std::max(bits_[pass], bits);
    if (pass == 0) return;
    is_symmetric_ |= IsSymmetric(encoding);
    is_per_channel_ |= encoding.scale.size() > 1;
  }

  const EntryFormat& format_;
  const std::string version_;
  const bool is_by_name_;
  const ExportOptions options_;
  bool is_first_ = true;
  int bits_[2] = {8, 8};
  bool is_symmetric_ = false;
  bool is_per_channel_ = false;
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
    if (core::ErrorReason(status) == "INTERCHANGE_UNSUPPORTED") {
      parsed_->losses.push_back(
          {pending.tensor, std::string(core::ErrorText(status)), true});
      return absl::OkStatus();
    }
    if (!status.ok()) return status;
    if (!names_.insert(pending.tensor).second) {
      return InvalidAt(pending.place,
                       absl::StrCat("tensor ", QuotedText(pending.tensor),
                                    " stands twice in the file"));
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

  absl::Status AddMap(const EntryFormat& format, const Document& document,
                      absl::string_view key) {
    const auto map = document.head.find(std::string(key));
    if (map == document.head.end()) return absl::OkStatus();
    if (!map->is_object()) return InvalidAt(key, "expected an object");
    return ReadJsonEntries(
        document.text, key, [&](const std::string& name, const Json& entry) {
          return Add(format, entry,
                     absl::StrCat(key, "[", QuotedText(name), "]"), &name);
        });
  }

 private:
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

// Of AIMET: what the version says, or else what the entries look like.
InterchangeFormat AimetFormatOf(const Json& document) {
  const std::string version = VersionOf(document);
  if (absl::StartsWith(version, "0.")) return InterchangeFormat::kAimet061;
  if (absl::StartsWith(version, "1.")) return InterchangeFormat::kAimet100;
  if (absl::StartsWith(version, "2.")) return InterchangeFormat::kAimet200;
  for (const char* key : {"param_encodings", "activation_encodings"}) {
    const auto found = document.find(key);
    if (found == document.end()) continue;
    return found->is_array() ? InterchangeFormat::kAimet100
                             : InterchangeFormat::kAimet061;
  }
  return InterchangeFormat::kAimet200;
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
  if (document.contains("param_encodings") ||
      document.contains("activation_encodings") ||
      document.contains("encodings")) {
    return AimetFormatOf(document);
  }
  return InterchangeFormat::kUnspecified;
}

absl::Status CheckOurVersion(const Json& document) {
  const std::string version = VersionOf(document);
  if (version == absl::StrCat(kVersion)) return absl::OkStatus();
  return core::InterchangeUnsupportedError(
      absl::StrCat("version ", QuotedText(version), ", expected ", kVersion));
}

// What AIMET says beside encodings, and a store of them has no place for.
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
    case InterchangeFormat::kAimet061: {
      NoteExcludedLayers(document.head, parsed);
      format = &Aimet061EntryFormat();
      absl::Status status =
          parser.AddMap(*format, document, "activation_encodings");
      if (!status.ok()) return status;
      return parser.AddMap(*format, document, "param_encodings");
    }
    case InterchangeFormat::kAimet100: {
      NoteExcludedLayers(document.head, parsed);
      format = &Aimet100EntryFormat();
      absl::Status status =
          parser.AddList(*format, document, "activation_encodings");
      if (!status.ok()) return status;
      return parser.AddList(*format, document, "param_encodings");
    }
    case InterchangeFormat::kAimet200:
      NoteExcludedLayers(document.head, parsed);
      format = &Aimet200EntryFormat();
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
                                               {"version", kVersion},
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
    case InterchangeFormat::kOnnxQdq:
      return std::make_unique<ListWriter>(
          OnnxQdqEntryFormat(),
          Json{{"format", kOnnxFormatName}, {"version", kVersion}});
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
  absl::Status status = ParseDocument(document, stop, &parsed);
  if (!status.ok()) return status;
  return parsed;
}

}  // namespace quantd::server
