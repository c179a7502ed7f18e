#include "server/interchange/entry_format.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/formats/scale_type.h"

namespace quantd::server {
namespace {

absl::string_view FormatName(core::NumberFormat format) {
  const core::FormatInfo* const info = core::FindFormat(format);
  return info == nullptr ? "?" : info->name;
}

bool IsInteger(core::NumberFormat format) {
  const core::FormatInfo* const info = core::FindFormat(format);
  return info != nullptr && info->kind == core::CodeKind::kInteger;
}

// True if both are the same number, zeros by their sign; NaN is one.
bool SameNumber(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b && std::signbit(a) == std::signbit(b);
}

// Blocks of the same elements; block sizes of dimensions with one scale may
// differ.
bool SameBlocks(const core::Encoding& a, const core::Encoding& b) {
  if (a.block_size == b.block_size) return true;
  const size_t rank = std::max(a.block_size.size(), b.block_size.size());
  for (size_t d = 0; d < rank; ++d) {
    const bool whole_a = IsWhole(a, d);
    if (whole_a != IsWhole(b, d)) return false;
    if (!whole_a && a.block_size[d] != b.block_size[d]) return false;
  }
  // Without entries the rank is open, and per tensor.
  return a.block_size.empty() || b.block_size.empty() ||
         a.block_size.size() == b.block_size.size();
}

// Lists, in words, the parts of `before` that are not in `after`.
std::vector<std::string> Differences(const core::Encoding& before,
                                     const core::Encoding& after) {
  std::vector<std::string> differences;
  // How far codes moved: another type of integer for the same reals.
  int64_t shift = 0;
  if (before.format != after.format) {
    differences.push_back(absl::StrCat("format: ", FormatName(before.format),
                                       " becomes ", FormatName(after.format)));
    if (IsInteger(before.format) && IsInteger(after.format)) {
      shift = int64_t{core::FindFormat(after.format)->qmin} -
              core::FindFormat(before.format)->qmin;
      differences.back() +=
          absl::StrCat(", codes and zero points move by ", shift);
    }
  }
  if (!SameBlocks(before, after)) differences.push_back("block_size");
  int64_t changed = 0;
  for (size_t i = 0; i < before.scale.size(); ++i) {
    changed +=
        i >= after.scale.size() || !SameNumber(before.scale[i], after.scale[i]);
  }
  if (changed != 0 || before.scale.size() != after.scale.size()) {
    differences.push_back(
        absl::StrCat("scale: ", changed, " of ", before.scale.size()));
  }
  changed = 0;
  const size_t count = std::min(before.scale.size(), after.scale.size());
  for (size_t i = 0; i < count; ++i) {
    const auto index = static_cast<int64_t>(i);
    changed += core::ZeroPointAt(before, index) + static_cast<double>(shift) !=
               core::ZeroPointAt(after, index);
  }
  if (changed != 0) {
    differences.push_back(
        absl::StrCat("zero_point: ", changed, " of ", before.scale.size()));
  }
  if (before.zero_points_are_real && !after.zero_points_are_real) {
    differences.push_back("zero_point: all are codes, and come back as such");
  }
  const auto range = [&](absl::string_view name, int32_t a, int32_t b) {
    if (a + shift == b) return;
    differences.push_back(absl::StrCat(name, ": ", a + shift, " becomes ", b));
  };
  range("qmin", before.qmin, after.qmin);
  range("qmax", before.qmax, after.qmax);
  if (before.exclude_zero && !after.exclude_zero) {
    differences.push_back("exclude_zero");
  }
  if (before.scale_type != after.scale_type) {
    differences.push_back("scale_type: scales are kept as numbers");
  }
  if (before.outer_scale != after.outer_scale &&
      before.scale_type == after.scale_type) {
    differences.push_back("outer_scale");
  }
  if (before.codebook != after.codebook) differences.push_back("codebook");
  if (before.no_saturation != after.no_saturation) {
    differences.push_back("no_saturation");
  }
  if (before.degenerate_count != after.degenerate_count) {
    differences.push_back(
        absl::StrCat("degenerate_count: ", before.degenerate_count));
  }
  return differences;
}

// Makes the entry, reads it back and tells what of the encoding that has not.
// Errors: why it is left out; CANCELLED.
absl::Status MakeEntry(const EntryFormat& format, const std::string& tensor,
                       const core::Encoding& encoding, core::StopToken stop,
                       Json* entry, std::vector<InterchangeLoss>* losses) {
  absl::Status status = format.Write(tensor, encoding, entry);
  if (!status.ok()) return status;
  if (stop.stopped()) return core::StoppedError();
  PendingEncoding back;
  // Comparing tells all that they would.
  std::vector<std::string> notes;
  status = format.Read(*entry, "entry", &back, &notes);
  if (!status.ok()) return status;
  if (back.open != PendingEncoding::Open::kNothing) {
    losses->push_back({tensor,
                       back.axis.has_value()
                           ? "block_size: only the axis; importing takes the "
                             "tensor's shape"
                           : "block_size: importing takes the tensor's shape",
                       false});
  }
  if (stop.stopped()) return core::StoppedError();
  status = ResolveLayout(HintOf(encoding, back.open), &back);
  if (!status.ok()) return status;
  for (std::string& note : Differences(encoding, back.encoding)) {
    losses->push_back({tensor, std::move(note), false});
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<bool> WriteEntry(const EntryFormat& format,
                                const std::string& tensor,
                                const core::Encoding& encoding,
                                absl::string_view head, core::StopToken stop,
                                std::string* out,
                                std::vector<InterchangeLoss>* losses) {
  Json entry;
  absl::Status status =
      MakeEntry(format, tensor, encoding, stop, &entry, losses);
  if (stop.stopped()) return core::StoppedError();
  if (!status.ok()) {
    losses->push_back({tensor, std::string(core::ErrorText(status)), true});
    return false;
  }
  out->append(head.data(), head.size());
  status = AppendJson(entry, stop, out);
  if (!status.ok()) return status;
  return true;
}

int ChannelAxis(const core::Encoding& encoding) {
  int axis = -1;
  for (size_t d = 0; d < encoding.block_size.size(); ++d) {
    if (IsWhole(encoding, d)) continue;
    if (encoding.block_size[d] != 1 || axis >= 0) return -1;
    axis = static_cast<int>(d);
  }
  return axis;
}

std::vector<int32_t> ZeroPoints(const core::Encoding& encoding) {
  return encoding.zero_point.empty()
             ? std::vector<int32_t>(encoding.scale.size(), 0)
             : encoding.zero_point;
}

bool HasIntegerScales(const core::Encoding& encoding) {
  return encoding.scale_type == core::ScaleType::kInteger &&
         IsInteger(encoding.format) &&
         core::FindFormat(encoding.format)->step_exponent == 0;
}

bool IsSymmetric(const core::Encoding& encoding) {
  const core::FormatInfo& info = *core::FindFormat(encoding.format);
  return !core::HasZeroPoints(encoding) &&
         (info.kind != core::CodeKind::kInteger || info.is_signed);
}

absl::Status CheckIsInteger(const core::Encoding& encoding,
                            absl::string_view target) {
  const core::FormatInfo& info = *core::FindFormat(encoding.format);
  if (IsInteger(encoding.format) && !core::HasOuterScales(info.scale_type) &&
      !core::HasOuterScales(encoding.scale_type) && info.step_exponent == 0) {
    return absl::OkStatus();
  }
  return core::InterchangeUnsupportedError(
      absl::StrCat(target, " has nothing for ", FormatName(encoding.format)));
}

absl::Status CheckZeroPointsAreCodes(const core::Encoding& encoding,
                                     absl::string_view target) {
  if (!encoding.zero_points_are_real) return absl::OkStatus();
  return core::InterchangeUnsupportedError(
      absl::StrCat(target, " has no zero points between codes"));
}

void MarkExcludedZero(core::Encoding* encoding) {
  const core::FormatInfo& info = *core::FindFormat(encoding->format);
  const auto is_outside = [&info](auto zero_point) {
    return zero_point < info.qmin || zero_point > info.qmax;
  };
  encoding->exclude_zero =
      absl::c_any_of(encoding->zero_point, is_outside) ||
      absl::c_any_of(encoding->real_zero_point, is_outside);
}

void SetIntegerFormat(int bits, bool is_signed, core::Encoding* encoding) {
  const core::FormatInfo& info = core::IntegerFormat(bits, is_signed);
  encoding->format = info.format;
  encoding->qmin = info.qmin;
  encoding->qmax = info.qmax;
}

void SetLpbq(int bits, const std::vector<int64_t>& codes,
             std::vector<float> outer, core::Encoding* encoding) {
  const core::FormatInfo& lpbq = *core::FindFormatByName("lpbq");
  const core::FormatInfo& info =
      bits == lpbq.bits ? lpbq : core::IntegerFormat(bits, /*is_signed=*/true);
  encoding->format = info.format;
  encoding->qmin = info.qmin;
  encoding->qmax = info.qmax;
  encoding->scale_type = core::ScaleType::kInteger;
  encoding->scale_code.assign(codes.begin(), codes.end());
  encoding->outer_scale = std::move(outer);
}

void NormalizeZeroPoints(core::Encoding* encoding) {
  if (absl::c_all_of(encoding->zero_point, [](int32_t z) { return z == 0; })) {
    encoding->zero_point.clear();
  }
  MarkExcludedZero(encoding);
}

void NoteRounded(int64_t rounded, std::vector<std::string>* notes) {
  if (rounded == 0) return;
  notes->push_back(
      absl::StrCat("scale: ", rounded, " rounded to the nearest float32"));
}

}  // namespace quantd::server
