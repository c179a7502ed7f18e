// Entries of AIMET encodings 0.6.1 and 1.0.0. Both count codes from 0 whatever
// the type is: offset = -(zero point - smallest code).

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/errors.h"
#include "core/formats/number_format.h"
#include "core/types/encoding.h"
#include "server/interchange/entry_format.h"
#include "server/interchange/json_text.h"

namespace quantd::server {
namespace {

// The width that the scales of LPBQ decompress to at least.
constexpr int kLpbqDecompressedBits = 8;
constexpr int kLeastBits = 2;
constexpr int kMostBits = 16;
// The width that biases may have besides.
constexpr int kWideBits = core::kWideIntegerBits;
constexpr int kMostAimetBits = 64;
constexpr int64_t kMaxAimetBlock = int64_t{1} << 53;

// Integers as AIMET has them.
struct AimetIntegers {
  int bits = 0;
  bool is_symmetric = false;
  std::vector<float> scale;
  std::vector<int64_t> offset;
  // In place of those, where zero points lie between codes.
  std::vector<double> real_offset;
  // The reals of the smallest and the largest code, or nothing.
  std::vector<double> min;
  std::vector<double> max;
};

// Sets min and max to the reals of codes `low` and `high`, in float32 as AIMET
// computes them.
void SetRange(const core::Encoding& encoding, int32_t low, int32_t high,
              AimetIntegers* integers) {
  integers->min.clear();
  integers->max.clear();
  for (size_t i = 0; i < encoding.scale.size(); ++i) {
    const float scale = encoding.scale[i];
    const double zero_point =
        core::ZeroPointAt(encoding, static_cast<int64_t>(i));
    integers->min.push_back(static_cast<float>(low - zero_point) * scale);
    integers->max.push_back(static_cast<float>(high - zero_point) * scale);
  }
}

// The code that stands for `real`, or nothing where it is not one.
bool CodeOf(double real, float scale, double zero_point, int64_t* code) {
  // Scales may have been rounded to float32.
  constexpr double kTolerance = 0.02;
  const double exact = real / static_cast<double>(scale) + zero_point;
  if (!(std::fabs(exact) < 1e10)) return false;
  const double nearest = std::rint(exact);
  *code = static_cast<int64_t>(nearest);
  return std::fabs(exact - nearest) < kTolerance;
}

// Takes the code range from the reals of its ends.
void SetCodeRange(const AimetIntegers& integers, core::Encoding* encoding,
                  std::vector<std::string>* notes) {
  const size_t count = integers.scale.size();
  if (integers.min.size() != count || integers.max.size() != count) return;
  const core::FormatInfo& info = *core::FindFormat(encoding->format);
  int64_t qmin = 0;
  int64_t qmax = 0;
  for (size_t i = 0; i < count; ++i) {
    int64_t low = 0;
    int64_t high = 0;
    const double zero_point =
        core::ZeroPointAt(*encoding, static_cast<int64_t>(i));
    const bool is_on_grid =
        CodeOf(integers.min[i], integers.scale[i], zero_point, &low) &&
        CodeOf(integers.max[i], integers.scale[i], zero_point, &high);
    if (!is_on_grid || low < info.qmin || high > info.qmax || low >= high ||
        (i > 0 && (low != qmin || high != qmax))) {
      notes->push_back(
          "min and max: not those of codes under scale and offset; the codes "
          "are all of the type");
      return;
    }
    qmin = low;
    qmax = high;
  }
  encoding->qmin = static_cast<int32_t>(qmin);
  encoding->qmax = static_cast<int32_t>(qmax);
}

absl::Status FromAimet(const AimetIntegers& integers, const std::string& place,
                       core::Encoding* encoding,
                       std::vector<std::string>* notes) {
  const size_t offset_count =
      std::max(integers.offset.size(), integers.real_offset.size());
  if (offset_count != integers.scale.size()) {
    return InvalidAt(place, absl::StrCat(offset_count, " offsets for ",
                                         integers.scale.size(), " scales"));
  }
  const int64_t half = int64_t{1} << (integers.bits - 1);
  const auto all = [&integers](int64_t offset) {
    return !integers.offset.empty() &&
           std::all_of(integers.offset.begin(), integers.offset.end(),
                       [offset](int64_t o) { return o == offset; });
  };
  encoding->scale = integers.scale;
  if (!integers.real_offset.empty() && integers.bits == kWideBits) {
    return core::InterchangeUnsupportedError(
        absl::StrCat(place, ": an integer of ", kWideBits,
                     " bits with a zero point between codes, expected "
                     "symmetric codes"));
  }
  if (!integers.real_offset.empty()) {
    SetIntegerFormat(integers.bits, integers.is_symmetric, encoding);
    encoding->zero_points_are_real = true;
    int64_t rounded = 0;
    for (const double offset : integers.real_offset) {
      const double exact = encoding->qmin - offset;
      const auto zero_point = static_cast<float>(exact);
      if (double{zero_point} != exact) ++rounded;
      encoding->real_zero_point.push_back(zero_point);
    }
    if (rounded > 0) {
      notes->push_back(
          absl::StrCat("offset: ", rounded, " rounded to the nearest float32"));
    }
    MarkExcludedZero(encoding);
  } else if (integers.is_symmetric && (all(-half) || all(1 - half))) {
    SetIntegerFormat(integers.bits, /*is_signed=*/true, encoding);
    // One code less below: the codes are symmetric too.
    if (all(1 - half)) encoding->qmin = static_cast<int32_t>(1 - half);
  } else if (integers.bits == kWideBits) {
    return core::InterchangeUnsupportedError(
        absl::StrCat(place, ": an integer of ", kWideBits,
                     " bits with a zero point, expected symmetric codes"));
  } else {
    SetIntegerFormat(integers.bits, /*is_signed=*/false, encoding);
    for (size_t i = 0; i < integers.offset.size(); ++i) {
      encoding->zero_point.push_back(static_cast<int32_t>(-integers.offset[i]));
    }
    NormalizeZeroPoints(encoding);
  }
  SetCodeRange(integers, encoding, notes);
  return absl::OkStatus();
}

// Requires: CheckIsInteger.
AimetIntegers ToAimet(const core::Encoding& encoding) {
  const core::FormatInfo& info = *core::FindFormat(encoding.format);
  AimetIntegers integers;
  integers.bits = info.bits;
  integers.scale = encoding.scale;
  if (encoding.zero_points_are_real) {
    for (const float zero_point : encoding.real_zero_point) {
      integers.real_offset.push_back(info.qmin - double{zero_point});
    }
    integers.is_symmetric = info.is_signed;
    return integers;
  }
  bool has_zero_point = false;
  for (const int32_t zero_point : ZeroPoints(encoding)) {
    has_zero_point |= zero_point != 0;
    integers.offset.push_back(int64_t{info.qmin} - zero_point);
  }
  integers.is_symmetric = info.is_signed && !has_zero_point;
  return integers;
}

absl::Status NotQuantized(const std::string& place, int64_t bits) {
  return core::InterchangeUnsupportedError(absl::StrCat(
      place, ": a float of ", bits, " bits without scale, nothing to keep"));
}

absl::Status NoSuchWidth(const std::string& place, int bits) {
  return core::InterchangeUnsupportedError(
      absl::StrCat(place, ": an integer of ", bits, " bits, expected 2 to ",
                   kMostBits, " or ", kWideBits));
}

bool IsWidth(int bits) {
  return (bits >= kLeastBits && bits <= kMostBits) || bits == kWideBits;
}

// The lowest offset that is looked at: that of symmetric codes is far below
// those of zero points with 32 bits.
int64_t LowestOffset(int bits) {
  return std::min(-int64_t{core::kMaxZeroPoint}, -(int64_t{1} << (bits - 1)));
}

class Aimet061Format final : public EntryFormat {
 public:
  absl::Status Write(const std::string& tensor, const core::Encoding& encoding,
                     Json* entry) const override {
    absl::Status status = CheckIsInteger(encoding, "AIMET 0.6.1");
    status.Update(CheckZeroPointsAreCodes(encoding, "AIMET 0.6.1"));
    if (!status.ok()) return status;
    if (encoding.scale.size() > 1 && ChannelAxis(encoding) < 0) {
      return core::InterchangeUnsupportedError(
          "AIMET 0.6.1 has scales per tensor and per channel, none per block");
    }
    AimetIntegers integers = ToAimet(encoding);
    // AIMET takes the scale from these: (max - min) / (2^bitwidth - 1). Of
    // narrower codes it would be another one.
    const core::FormatInfo& info = *core::FindFormat(encoding.format);
    SetRange(encoding, info.qmin, info.qmax, &integers);
    *entry = Json::array();
    for (size_t i = 0; i < integers.scale.size(); ++i) {
      entry->push_back(
          {{"bitwidth", integers.bits},
           {"dtype", "int"},
           {"is_symmetric", integers.is_symmetric ? "True" : "False"},
           {"min", integers.min[i]},
           {"max", integers.max[i]},
           {"scale", integers.scale[i]},
           {"offset", integers.offset[i]}});
    }
    return absl::OkStatus();
  }

  absl::Status Read(const Json& entry, const std::string& place,
                    PendingEncoding* pending,
                    std::vector<std::string>* notes) const override {
    if (!entry.is_array() || entry.empty()) {
      return InvalidAt(place, "expected a list of at least one encoding");
    }
    AimetIntegers integers;
    int64_t rounded = 0;
    int64_t range_count = 0;
    for (size_t i = 0; i < entry.size(); ++i) {
      const std::string item_place = absl::StrCat(place, "[", i, "]");
      ObjectReader item(entry[i], item_place);
      const std::string dtype =
          item.Has("dtype") ? item.String("dtype") : "int";
      if (dtype != "int" && dtype != "float") {
        item.Fail("dtype", absl::StrCat("expected int or float, got ",
                                        QuotedText(dtype)));
      }
      const bool is_float = dtype == "float";
      const auto bits =
          static_cast<int>(item.Integer("bitwidth", 1, kMostAimetBits));
      if (!item.status().ok()) return item.status();
      if (is_float) return NotQuantized(item_place, bits);
      if (!IsWidth(bits)) return NoSuchWidth(item_place, bits);
      const bool is_symmetric =
          item.Has("is_symmetric") && item.Boolean("is_symmetric");
      if (i > 0 &&
          (bits != integers.bits || is_symmetric != integers.is_symmetric)) {
        return InvalidAt(item_place,
                         "another bitwidth or symmetry than the first");
      }
      integers.bits = bits;
      integers.is_symmetric = is_symmetric;
      const std::vector<float> scale = item.Floats("scale", &rounded);
      integers.offset.push_back(
          item.Integer("offset", LowestOffset(bits), core::kMaxZeroPoint));
      if (item.Has("min") && item.Has("max")) {
        const std::vector<double> min = item.Numbers("min");
        const std::vector<double> max = item.Numbers("max");
        if (min.size() == 1 && max.size() == 1) {
          integers.min.push_back(min[0]);
          integers.max.push_back(max[0]);
          ++range_count;
        }
      }
      if (scale.size() != 1) item.Fail("scale", "expected one number");
      if (!item.status().ok()) return item.status();
      integers.scale.push_back(scale[0]);
    }
    if (range_count != static_cast<int64_t>(integers.scale.size())) {
      integers.min.clear();
      integers.max.clear();
    }
    if (integers.scale.size() > 1) {
      pending->open = PendingEncoding::Open::kChannels;
    }
    NoteRounded(rounded, notes);
    return FromAimet(integers, place, &pending->encoding, notes);
  }
};

class Aimet100Format final : public EntryFormat {
 public:
  absl::Status Write(const std::string& tensor, const core::Encoding& encoding,
                     Json* entry) const override {
    if (HasIntegerScales(encoding)) return WriteLpbq(tensor, encoding, entry);
    absl::Status status = CheckIsInteger(encoding, "AIMET 1.0.0");
    if (!status.ok()) return status;
    AimetIntegers integers = ToAimet(encoding);
    const std::vector<double> shift = TakeShift(&integers);
    *entry = {{"name", tensor},          {"dtype", "INT"},
              {"bw", integers.bits},     {"is_sym", integers.is_symmetric},
              {"scale", integers.scale}, {"offset", integers.offset}};
    if (!shift.empty()) (*entry)["zero_point_shift"] = shift;
    const core::FormatInfo& info = *core::FindFormat(encoding.format);
    if (encoding.qmin != info.qmin || encoding.qmax != info.qmax) {
      SetRange(encoding, encoding.qmin, encoding.qmax, &integers);
      (*entry)["min"] = integers.min;
      (*entry)["max"] = integers.max;
    }
    if (encoding.scale.size() == 1) {
      (*entry)["enc_type"] = "PER_TENSOR";
    } else if (ChannelAxis(encoding) >= 0) {
      (*entry)["enc_type"] = "PER_CHANNEL";
    } else {
      size_t channel = 0;
      size_t block = 0;
      status = FindBlocks(encoding, &channel, &block);
      if (!status.ok()) return status;
      (*entry)["enc_type"] = "PER_BLOCK";
      (*entry)["block_size"] = encoding.block_size[block];
      for (const char* key :
           {"scale", "offset", "zero_point_shift", "min", "max"}) {
        if (entry->contains(key)) {
          (*entry)[key] =
              ChannelsFirst((*entry)[key], encoding, channel, block);
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status Read(const Json& entry, const std::string& place,
                    PendingEncoding* pending,
                    std::vector<std::string>* notes) const override {
    ObjectReader reader(entry, place);
    pending->tensor = reader.String("name");
    const std::string dtype = reader.String("dtype");
    const bool is_float = dtype == "FLOAT";
    const auto bits = static_cast<int>(reader.Integer("bw", 1, kMostAimetBits));
    if (!reader.status().ok()) return reader.status();
    if (is_float) return NotQuantized(place, bits);
    if (!IsWidth(bits)) return NoSuchWidth(place, bits);
    if (dtype != "INT") {
      reader.Fail("dtype", absl::StrCat("expected INT or FLOAT, got ",
                                        QuotedText(dtype)));
      return reader.status();
    }
    const std::string type = reader.String("enc_type");
    if (type == "LPBQ") return ReadLpbq(&reader, bits, pending, notes);
    if (type == "VECTOR") {
      return core::InterchangeUnsupportedError(
          absl::StrCat(place, ": no vector quantization"));
    }
    AimetIntegers integers;
    int64_t rounded = 0;
    integers.bits = bits;
    integers.is_symmetric = reader.Has("is_sym") && reader.Boolean("is_sym");
    integers.scale = reader.Floats("scale", &rounded);
    ReadOffsets(&reader, &integers);
    if (reader.Has("min") && reader.Has("max")) {
      integers.min = reader.Numbers("min");
      integers.max = reader.Numbers("max");
    }
    if (type == "PER_CHANNEL") {
      pending->open = PendingEncoding::Open::kChannels;
    } else if (type == "PER_BLOCK") {
      pending->open = PendingEncoding::Open::kChannelBlocks;
      pending->block = reader.Integer("block_size", 1, kMaxAimetBlock);
    } else if (type != "PER_TENSOR") {
      reader.Fail("enc_type", absl::StrCat("expected PER_TENSOR, PER_CHANNEL, "
                                           "PER_BLOCK, LPBQ or VECTOR, got ",
                                           QuotedText(type)));
    } else if (integers.scale.size() != 1) {
      reader.Fail("scale", absl::StrCat(integers.scale.size(),
                                        " scales, expected 1 per tensor"));
    }
    if (!reader.status().ok()) return reader.status();
    NoteRounded(rounded, notes);
    return FromAimet(integers, place, &pending->encoding, notes);
  }

 private:
  // Rounds real offsets down to `offset`, and returns what they are above that:
  // 0 to 1, as just below an integer it rounds to 1. Empty if none is real.
  static std::vector<double> TakeShift(AimetIntegers* integers) {
    std::vector<double> shift;
    for (const double offset : integers->real_offset) {
      const double whole = std::floor(offset);
      integers->offset.push_back(static_cast<int64_t>(whole));
      shift.push_back(offset - whole);
    }
    integers->real_offset.clear();
    return shift;
  }

  // Offsets, and the shift that comes on top. Where one of the sums is between
  // codes, all are real.
  static void ReadOffsets(ObjectReader* reader, AimetIntegers* integers) {
    std::vector<double> offset = reader->Numbers("offset");
    std::vector<double> shift = {0};
    if (reader->Has("zero_point_shift")) {
      shift = reader->Numbers("zero_point_shift");
    }
    if (!reader->status().ok()) return;
    if (shift.size() != 1 && shift.size() != offset.size()) {
      return reader->Fail("zero_point_shift",
                          absl::StrCat(shift.size(), " numbers for ",
                                       offset.size(), " offsets"));
    }
    bool is_real = false;
    for (size_t i = 0; i < offset.size(); ++i) {
      offset[i] += shift[shift.size() == 1 ? 0 : i];
      const auto lowest = static_cast<double>(LowestOffset(integers->bits));
      if (!(offset[i] >= lowest && offset[i] <= core::kMaxZeroPoint)) {
        return reader->Fail(
            absl::StrCat("offset[", i, "]"),
            absl::StrCat("expected a number of ", LowestOffset(integers->bits),
                         " to ", core::kMaxZeroPoint, ", got ", offset[i]));
      }
      is_real |= offset[i] != std::trunc(offset[i]);
    }
    if (is_real) {
      integers->real_offset = std::move(offset);
    } else {
      integers->offset.assign(offset.begin(), offset.end());
    }
  }

  // The one dimension of channels and the one of blocks.
  static absl::Status FindBlocks(const core::Encoding& encoding,
                                 size_t* channel, size_t* block) {
    std::vector<size_t> split;
    for (size_t d = 0; d < encoding.block_size.size(); ++d) {
      if (!IsWhole(encoding, d)) split.push_back(d);
    }
    // A single channel, or a single block in each: dimensions of one scale are
    // as good, as long as they are told apart.
    for (size_t d = 0; d < encoding.block_size.size() && split.size() == 1;
         ++d) {
      if (d == split[0] || encoding.block_size[d] == 0) continue;
      split.insert(d < split[0] ? split.begin() : split.end(), d);
      break;
    }
    if (split.size() == 2) {
      if (encoding.block_size[split[0]] != 1) std::swap(split[0], split[1]);
      if (encoding.block_size[split[0]] == 1) {
        *channel = split[0];
        *block = split[1];
        if (*channel < *block || !encoding.scale_shape.empty()) {
          return absl::OkStatus();
        }
      }
    }
    return core::InterchangeUnsupportedError(
        "AIMET 1.0.0 has blocks along one dimension of each channel, with all "
        "other dimensions whole");
  }

  // Values of scales in the order [channels, blocks].
  static Json ChannelsFirst(const Json& values, const core::Encoding& encoding,
                            size_t channel, size_t block) {
    if (channel < block) return values;
    const auto channels = static_cast<size_t>(encoding.scale_shape[channel]);
    const auto blocks = static_cast<size_t>(encoding.scale_shape[block]);
    Json result = Json::array();
    for (size_t c = 0; c < channels; ++c) {
      for (size_t b = 0; b < blocks; ++b) {
        result.push_back(values[b * channels + c]);
      }
    }
    return result;
  }

  static absl::Status WriteLpbq(const std::string& tensor,
                                const core::Encoding& encoding, Json* entry) {
    size_t channel = 0;
    size_t block = 0;
    absl::Status status = FindBlocks(encoding, &channel, &block);
    if (!status.ok()) return status;
    std::vector<int64_t> outer(encoding.block_size.size(), 0);
    outer[channel] = 1;
    const auto channels = encoding.outer_scale.size();
    if (encoding.outer_block_size != outer && channels != 1) {
      return core::InterchangeUnsupportedError(
          "AIMET 1.0.0 has one float scale per channel over the integer "
          "scales of LPBQ");
    }
    const int largest = *std::max_element(encoding.scale_code.begin(),
                                          encoding.scale_code.end());
    const core::FormatInfo& info = *core::FindFormat(encoding.format);
    if (!info.is_signed) {
      return core::InterchangeUnsupportedError(
          "AIMET 1.0.0 has LPBQ of signed integers");
    }
    int bits = std::max(kLpbqDecompressedBits, info.bits);
    while (largest > 1 << (bits - info.bits)) ++bits;
    *entry = {
        {"name", tensor},
        {"dtype", "INT"},
        {"enc_type", "LPBQ"},
        {"bw", bits},
        {"compressed_bw", info.bits},
        {"is_sym", true},
        {"block_size", encoding.block_size[block]},
        {"scale", encoding.outer_scale},
        {"offset", std::vector<int64_t>(channels, -(int64_t{1} << (bits - 1)))},
        {"per_block_int_scale",
         ChannelsFirst(encoding.scale_code, encoding, channel, block)}};
    return absl::OkStatus();
  }

  static absl::Status ReadLpbq(ObjectReader* reader, int bits,
                               PendingEncoding* pending,
                               std::vector<std::string>* notes) {
    if (reader->Has("zero_point_shift")) {
      for (const double shift : reader->Numbers("zero_point_shift")) {
        if (shift != 0) {
          return core::InterchangeUnsupportedError(
              absl::StrCat(reader->PlaceOf("zero_point_shift"),
                           ": a zero point between codes, expected 0"));
        }
      }
    }
    int64_t rounded = 0;
    const auto compressed =
        static_cast<int>(reader->Integer("compressed_bw", 2, kMostBits));
    const std::vector<int64_t> codes =
        reader->Integers("per_block_int_scale", 1, core::kMaxIntegerScale);
    std::vector<float> outer = reader->Floats("scale", &rounded);
    const std::vector<int64_t> offsets =
        reader->Integers("offset", -core::kMaxZeroPoint, core::kMaxZeroPoint);
    pending->open = PendingEncoding::Open::kChannelBlocks;
    pending->block = reader->Integer("block_size", 1, kMaxAimetBlock);
    if (!reader->status().ok()) return reader->status();
    for (const int64_t offset : offsets) {
      if (offset != -(int64_t{1} << (bits - 1))) {
        reader->Fail("offset", "expected that of symmetric codes");
        return reader->status();
      }
    }
    NoteRounded(rounded, notes);
    SetLpbq(compressed, codes, std::move(outer), &pending->encoding);
    return absl::OkStatus();
  }
};

}  // namespace

const EntryFormat& Aimet061EntryFormat() {
  static const Aimet061Format& format = *new Aimet061Format;
  return format;
}

const EntryFormat& Aimet100EntryFormat() {
  static const Aimet100Format& format = *new Aimet100Format;
  return format;
}

}  // namespace quantd::server
