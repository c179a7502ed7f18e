#include "server/interchange/layout.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/errors.h"
#include "core/types/block_layout.h"
#include "server/interchange/json_text.h"

namespace quantd::server {
namespace {

// The dimension of the channels and, with blocks, that of the blocks.
struct Axes {
  size_t channel;
  size_t block;
};

int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

absl::Status AxisUnknown(const PendingEncoding& pending,
                         absl::string_view what) {
  return core::AxisUnknownError(absl::StrCat(pending.place, ": ", what));
}

int64_t ScaleCount(const core::Encoding& encoding) {
  return static_cast<int64_t>(
      std::max({encoding.scale.size(), encoding.scale_code.size()}));
}

// All that the shape allows.
std::vector<Axes> AxesOfShape(const std::vector<int64_t>& shape,
                              const PendingEncoding& pending) {
  const bool has_blocks = pending.open == PendingEncoding::Open::kChannelBlocks;
  const int64_t count = ScaleCount(pending.encoding);
  const auto outer_count =
      static_cast<int64_t>(pending.encoding.outer_scale.size());
  std::vector<Axes> found;
  for (size_t c = 0; c < shape.size(); ++c) {
    if (!has_blocks) {
      if (shape[c] == count) found.push_back({c, c});
      continue;
    }
    if (outer_count != 0 && shape[c] != outer_count) continue;
    for (size_t b = 0; b < shape.size(); ++b) {
      if (b == c || shape[c] <= 0 || count % shape[c] != 0) continue;
      if (CeilDivide(shape[b], pending.block) == count / shape[c]) {
        found.push_back({c, b});
      }
    }
  }
  return found;
}

// All axes that a block size allows.
std::vector<Axes> AxesOfBlockSize(const std::vector<int64_t>& block_size,
                                  const PendingEncoding& pending) {
  std::vector<size_t> split;
  for (size_t d = 0; d < block_size.size(); ++d) {
    if (block_size[d] != 0) split.push_back(d);
  }
  if (pending.open == PendingEncoding::Open::kChannels) {
    if (split.size() != 1 || block_size[split[0]] != 1) return {};
    return {{split[0], split[0]}};
  }
  if (split.size() != 2) return {};
  std::vector<Axes> found;
  for (const auto& [c, b] :
       {std::pair(split[0], split[1]), std::pair(split[1], split[0])}) {
    if (block_size[c] == 1 && block_size[b] == pending.block) {
      found.push_back({c, b});
    }
  }
  return found;
}

// Scales of [channels, blocks] in the order of the tensor, whose channels come
// after its blocks.
template <typename T>
void Transpose(int64_t channels, std::vector<T>* values) {
  const auto rows = static_cast<size_t>(channels);
  if (values->empty() || rows == 0) return;
  const size_t columns = values->size() / rows;
  std::vector<T> result(values->size());
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < columns; ++c) {
      result[c * rows + r] = (*values)[r * columns + c];
    }
  }
  *values = std::move(result);
}

absl::Status CheckHint(const LayoutHint& hint, const PendingEncoding& pending) {
  const size_t rank =
      hint.shape_known ? hint.shape.size() : hint.block_size.size();
  if (rank > core::kMaxRank) {
    return InvalidAt(
        pending.place,
        absl::StrCat(rank, " dimensions, expected at most ", core::kMaxRank));
  }
  if (hint.shape_known && !hint.block_size.empty() &&
      hint.shape.size() != hint.block_size.size()) {
    return InvalidAt(
        pending.place,
        absl::StrCat("a block size of ", hint.block_size.size(),
                     " entries for a shape of ", hint.shape.size()));
  }
  return absl::OkStatus();
}

absl::Status FillIn(const LayoutHint& hint, PendingEncoding* pending) {
  core::Encoding& encoding = pending->encoding;
  const bool has_blocks =
      pending->open == PendingEncoding::Open::kChannelBlocks;
  const int64_t count = ScaleCount(encoding);
  // No shape would help.
  if (count == 0) return InvalidAt(pending->place, "has no scales");
  if (absl::Status s = CheckHint(hint, *pending); !s.ok()) return s;
  if (!hint.shape_known && hint.block_size.empty()) {
    return AxisUnknown(
        *pending,
        absl::StrCat(
            count, " scales, and the file does not say along which ",
            pending->axis.has_value() ? "of how many dimensions" : "dimension",
            "; give the tensor's shape or block size"));
  }
  const size_t rank =
      hint.shape_known ? hint.shape.size() : hint.block_size.size();
  std::vector<Axes> axes;
  if (hint.shape_known) {
    axes = AxesOfShape(hint.shape, *pending);
    if (axes.empty()) {
      return InvalidAt(
          pending->place,
          absl::StrCat(count, " scales do not fit a tensor of shape [",
                       absl::StrJoin(hint.shape, ","), "]"));
    }
  }
  const auto keep = [&axes](auto fits) {
    axes.erase(std::remove_if(axes.begin(), axes.end(),
                              [&](const Axes& a) { return !fits(a); }),
               axes.end());
  };
  if (!hint.block_size.empty()) {
    const std::vector<Axes> given = AxesOfBlockSize(hint.block_size, *pending);
    if (!hint.shape_known) axes = given;
    keep([&given](const Axes& a) {
      return std::any_of(given.begin(), given.end(), [&a](const Axes& g) {
        return g.channel == a.channel && g.block == a.block;
      });
    });
    if (axes.empty()) {
      return InvalidAt(
          pending->place,
          absl::StrCat(count, " scales do not fit a block size of ", "[",
                       absl::StrJoin(hint.block_size, ","), "]"));
    }
  }
  for (const absl::optional<int64_t>& axis : {pending->axis, hint.axis}) {
    if (!axis.has_value()) continue;
    const auto signed_rank = static_cast<int64_t>(rank);
    const int64_t from_start = *axis < 0 ? *axis + signed_rank : *axis;
    keep([from_start](const Axes& a) {
      return static_cast<int64_t>(a.channel) == from_start;
    });
    if (axes.empty()) {
      return InvalidAt(pending->place,
                       absl::StrCat(count, " scales do not fit axis ", *axis,
                                    " of ", rank, " dimensions"));
    }
    // The file's word is enough.
    break;
  }
  if (axes.size() > 1) {
    std::vector<size_t> channels;
    for (const Axes& a : axes) channels.push_back(a.channel);
    return AxisUnknown(
        *pending,
        absl::StrCat(count, " scales fit axis ",
                     absl::StrJoin(channels, " and axis "), "; give the axis"));
  }

  const Axes& found = axes[0];
  encoding.block_size.assign(rank, 0);
  encoding.block_size[found.channel] = 1;
  encoding.scale_shape.assign(rank, 1);
  if (!has_blocks) {
    encoding.scale_shape[found.channel] = count;
    return absl::OkStatus();
  }
  encoding.block_size[found.block] = pending->block;
  int64_t channels = static_cast<int64_t>(encoding.outer_scale.size());
  if (hint.shape_known) channels = hint.shape[found.channel];
  if (channels == 0) {
    encoding.scale_shape.clear();
    if (found.channel > found.block) {
      return AxisUnknown(*pending,
                         "the channels come after the blocks; give the "
                         "tensor's shape");
    }
    return absl::OkStatus();
  }
  if (count % channels != 0) {
    return InvalidAt(
        pending->place,
        absl::StrCat(count, " scales in blocks of ", channels, " channels"));
  }
  encoding.scale_shape[found.channel] = channels;
  encoding.scale_shape[found.block] = count / channels;
  if (!encoding.outer_scale.empty()) {
    encoding.outer_block_size.assign(rank, 0);
    encoding.outer_block_size[found.channel] = 1;
  }
  if (found.channel > found.block) {
    Transpose(channels, &encoding.scale);
    Transpose(channels, &encoding.zero_point);
    Transpose(channels, &encoding.real_zero_point);
    Transpose(channels, &encoding.scale_code);
  }
  return absl::OkStatus();
}

// The block size with dimensions of one scale as the reader would have them:
// whole, but for the two that blocks of channels need.
std::vector<int64_t> ReaderBlockSize(const core::Encoding& encoding,
                                     PendingEncoding::Open open) {
  std::vector<int64_t> block_size = encoding.block_size;
  const auto rank = static_cast<int>(block_size.size());
  int missing = 0;
  if (open == PendingEncoding::Open::kChannelBlocks) {
    missing = 2;
    for (int d = 0; d < rank; ++d) missing -= IsWhole(encoding, d) ? 0 : 1;
  }
  for (int d = 0; d < rank; ++d) {
    if (!IsWhole(encoding, d) || block_size[d] == 0) continue;
    if (missing > 0) {
      --missing;
    } else {
      block_size[d] = 0;
    }
  }
  return block_size;
}

}  // namespace

bool IsWhole(const core::Encoding& encoding, size_t d) {
  return d >= encoding.block_size.size() || encoding.block_size[d] == 0 ||
         (d < encoding.scale_shape.size() && encoding.scale_shape[d] == 1);
}

LayoutHint HintOf(const core::Encoding& encoding, PendingEncoding::Open open) {
  LayoutHint hint;
  hint.block_size = ReaderBlockSize(encoding, open);
  if (encoding.scale_shape.empty()) return hint;
  // Any shape with these scales: the order of blocks depends on no more.
  hint.shape_known = true;
  hint.shape.assign(encoding.scale_shape.begin(), encoding.scale_shape.end());
  for (size_t d = 0; d < hint.block_size.size(); ++d) {
    if (hint.block_size[d] <= 1) continue;
    // Larger than any tensor: the block size has to do.
    constexpr int64_t kMostElements = int64_t{1} << 56;
    if (hint.shape[d] > kMostElements / hint.block_size[d]) {
      hint.shape_known = false;
      hint.shape.clear();
      return hint;
    }
    hint.shape[d] *= hint.block_size[d];
  }
  // Per tensor there may be no block size.
  if (hint.block_size.empty()) hint.block_size.assign(hint.shape.size(), 0);
  return hint;
}

absl::Status ResolveLayout(const LayoutHint& hint, PendingEncoding* pending) {
  if (pending->open != PendingEncoding::Open::kNothing) {
    if (absl::Status s = FillIn(hint, pending); !s.ok()) return s;
    pending->open = PendingEncoding::Open::kNothing;
  }
  absl::Status status = core::DeriveScales(&pending->encoding);
  if (status.ok()) status = core::ValidateEncoding(pending->encoding);
  if (status.ok()) return status;
  const std::string field = core::ErrorField(status);
  return InvalidAt(pending->place,
                   absl::StrCat(field.empty() ? "" : absl::StrCat(field, ": "),
                                core::ErrorText(status)));
}

}  // namespace quantd::server
