// Files that carry encodings: our own JSON and those of other projects.
//
// Nothing that a format cannot hold is lost in silence: a writer reads back
// what it wrote, and tells where that differs from what it was given.

#ifndef QUANTD_SERVER_INTERCHANGE_INTERCHANGE_H_
#define QUANTD_SERVER_INTERCHANGE_INTERCHANGE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/parallel/stop_token.h"
#include "core/types/encoding.h"
#include "server/interchange/json_text.h"
#include "server/interchange/layout.h"

namespace quantd::server {

// The values are those of quantd.v1.InterchangeFormat.
enum class InterchangeFormat : int {
  kUnspecified = 0,
  kJson = 1,
  kAimet061 = 2,
  kAimet100 = 3,
  kAimet200 = 4,
  kOnnxQdq = 5,
  kCompressedTensors = 6,
  kAimet210 = 7,
  kAimetTorch = 8,
};

// Something that did not get over.
struct InterchangeLoss {
  std::string tensor;
  // For people: the field and what became of it, or why there is nothing.
  std::string what;
  // The tensor has no encoding on the other side.
  bool left_out = false;
};

struct ExportOptions {
  // For formats that say where encodings come from.
  std::string model;
  std::string revision;
  // For formats that keep parameters and activations apart.
  std::function<bool(absl::string_view tensor, const core::Encoding& encoding)>
      is_parameter;
};

// Writes a file piece by piece. The encodings are added once in every pass, in
// the same order. Not thread-safe.
class EncodingsWriter {
 public:
  // Errors: INTERCHANGE_UNSUPPORTED for a format that is none.
  static absl::StatusOr<std::unique_ptr<EncodingsWriter>> Create(
      InterchangeFormat format, ExportOptions options);

  virtual ~EncodingsWriter() = default;

  virtual int pass_count() const { return 1; }
  // Appends to `out`.
  virtual void Begin(int pass, std::string* out) = 0;
  // Appends the encoding, or leaves it out. Losses of a tensor are reported in
  // one of the passes.
  // Errors: CANCELLED; then the file is of no use.
  virtual absl::Status Add(int pass, const std::string& tensor,
                           const core::Encoding& encoding, core::StopToken stop,
                           std::string* out,
                           std::vector<InterchangeLoss>* losses) = 0;
  // Appends the rest: no more than memory_bytes() and some KiB.
  // Errors: CANCELLED.
  virtual absl::Status Finish(core::StopToken stop, std::string* out) = 0;

  // Bounds in bytes, beside the encoding and `out`: what Add takes for each
  // scale while it is at it, and what stays of all that were added.
  virtual int64_t memory_per_scale() const { return kMemoryPerScale; }
  virtual int64_t memory_bytes() const { return 0; }

  // Encodings that the file has so far.
  int64_t encoding_count() const { return encoding_count_; }

 protected:
  // A number in a tree, and read back several times over.
  static constexpr int64_t kMemoryPerScale = 150;

  int64_t encoding_count_ = 0;
};

// Computes an upper bound on the memory that ParseEncodings takes beside the
// file itself. Calls `charge` with the bound in bytes: repeatedly for what it
// has read so far, and at the end for the whole file. Holds at most what it has
// charged, and about a MiB. Errors: INTERCHANGE_INVALID (not JSON, nested too
// deeply, or a key twice in one object), which names the place; those of
// `charge`, at once.
absl::Status ChargeParseMemory(TextPieces text,
                               absl::FunctionRef<absl::Status(int64_t)> charge);

struct ParsedEncodings {
  InterchangeFormat format = InterchangeFormat::kUnspecified;
  // Each valid once its layout is resolved; no tensor twice.
  std::vector<PendingEncoding> encodings;
  std::vector<InterchangeLoss> losses;
  // True for formats of other projects: an entry that is not sound, or whose
  // layout does not fit, is left out and is one of the losses. In a file of our
  // own format such an entry is an error.
  bool leaves_out_unsound = false;
};

// Reads a file that ChargeParseMemory took, one entry after the other;
// kUnspecified tells the format from the file.
// Errors: INTERCHANGE_INVALID, which names the place; INTERCHANGE_UNSUPPORTED
// (a version, or a format that has no scales); CANCELLED.
absl::StatusOr<ParsedEncodings> ParseEncodings(
    TextPieces text, InterchangeFormat format,
    core::StopToken stop = core::StopToken());

}  // namespace quantd::server

#endif  // QUANTD_SERVER_INTERCHANGE_INTERCHANGE_H_
