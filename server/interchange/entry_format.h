// One encoding as an entry of a file, in each of the formats that have entries.
// One file per format.

#ifndef QUANTD_SERVER_INTERCHANGE_ENTRY_FORMAT_H_
#define QUANTD_SERVER_INTERCHANGE_ENTRY_FORMAT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/parallel/stop_token.h"
#include "core/types/encoding.h"
#include "server/interchange/interchange.h"
#include "server/interchange/json_text.h"
#include "server/interchange/layout.h"

namespace quantd::server {

// Immutable, thread-safe.
class EntryFormat {
 public:
  virtual ~EntryFormat() = default;

  // Errors: INTERCHANGE_UNSUPPORTED: the format has no way to say it.
  virtual absl::Status Write(const std::string& tensor,
                             const core::Encoding& encoding,
                             Json* entry) const = 0;

  // Fills in all but the layout where the entry does not say it. `notes` gets
  // what was not taken over.
  // Errors: INTERCHANGE_INVALID, with the place; INTERCHANGE_UNSUPPORTED.
  virtual absl::Status Read(const Json& entry, const std::string& place,
                            PendingEncoding* pending,
                            std::vector<std::string>* notes) const = 0;
};

// All live as long as the process.
const EntryFormat& QuantdEntryFormat();
const EntryFormat& Aimet061EntryFormat();
const EntryFormat& Aimet100EntryFormat();
const EntryFormat& Aimet200EntryFormat();
const EntryFormat& Aimet210EntryFormat();
const EntryFormat& OnnxQdqEntryFormat();

// Appends `head` and the entry of an encoding, after it was read back, and
// tells the losses. Answers whether it is written, or else left out. Errors:
// CANCELLED.
absl::StatusOr<bool> WriteEntry(const EntryFormat& format,
                                const std::string& tensor,
                                const core::Encoding& encoding,
                                absl::string_view head, core::StopToken stop,
                                std::string* out,
                                std::vector<InterchangeLoss>* losses);

// The dimension whose every index has a scale while all others are whole, or -1
// where there is none or more than one. Dimensions of one scale count as whole.
int ChannelAxis(const core::Encoding& encoding);

// Zero points, as many as scales.
std::vector<int32_t> ZeroPoints(const core::Encoding& encoding);

// INTERCHANGE_UNSUPPORTED unless `encoding` is of an integer format that is not
// under outer scales; `target` names who wants it.
absl::Status CheckIsInteger(const core::Encoding& encoding,
                            absl::string_view target);

// INTERCHANGE_UNSUPPORTED if zero points are real.
absl::Status CheckZeroPointsAreCodes(const core::Encoding& encoding,
                                     absl::string_view target);

// True if the encoding is of integers under integer scales: LPBQ, and its like
// of other widths.
bool HasIntegerScales(const core::Encoding& encoding);

// True if the codes lie around zero, which others call symmetric. Unsigned
// integers do not, also where their zero point is 0.
bool IsSymmetric(const core::Encoding& encoding);

// Sets an integer format and what follows from it.
void SetIntegerFormat(int bits, bool is_signed, core::Encoding* encoding);

// Sets integers of so many bits whose scales are `codes` (each 0 to 255) under
// `outer`.
void SetLpbq(int bits, const std::vector<int64_t>& codes,
             std::vector<float> outer, core::Encoding* encoding);

// Marks zero points that lie outside the codes.
void MarkExcludedZero(core::Encoding* encoding);

// Leaves zero points out when they are all 0, and marks those that lie outside
// the codes.
void NormalizeZeroPoints(core::Encoding* encoding);

// Notes that scales were not float32, where there were any.
void NoteRounded(int64_t rounded, std::vector<std::string>* notes);

}  // namespace quantd::server

#endif  // QUANTD_SERVER_INTERCHANGE_ENTRY_FORMAT_H_
