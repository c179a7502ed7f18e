#include "client/jobs/quantize_parts.h"

#include <dirent.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cpp/errors.h"

namespace quantd::jobs {
namespace {

constexpr int64_t kMostParts = 100000;
// Whole shards are shared out if no part gets more than this many times the
// mean.
constexpr double kMostOfMean = 1.25;
constexpr absl::string_view kPartMark = ".part-";
constexpr absl::string_view kOf = "-of-";

uint64_t SelectedBytes(const Shard& shard) {
  uint64_t size = 0;
  for (const files::FileTensor* const tensor : shard.selected) {
    size += tensor->data.size();
  }
  return size;
}

// The part of each shard, the largest first to the part that has least.
std::vector<int64_t> PartsOfShards(const std::vector<uint64_t>& sizes,
                                   int64_t part_count, uint64_t* most) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&sizes](size_t a, size_t b) {
    return sizes[a] > sizes[b];
  });
  std::vector<uint64_t> loads(static_cast<size_t>(part_count), 0);
  std::vector<int64_t> parts(sizes.size());
  for (const size_t shard : order) {
    const auto least = std::min_element(loads.begin(), loads.end());
    *least += sizes[shard];
    parts[shard] = least - loads.begin();
  }
  *most = *std::max_element(loads.begin(), loads.end());
  return parts;
}

}  // namespace

absl::StatusOr<Part> ParsePart(absl::string_view text) {
  const std::vector<absl::string_view> numbers = absl::StrSplit(text, '/');
  Part part;
  if (numbers.size() == 2 && absl::SimpleAtoi(numbers[0], &part.index) &&
      absl::SimpleAtoi(numbers[1], &part.count) && part.index >= 0 &&
      part.count <= kMostParts && part.index < part.count) {
    return part;
  }
  return ArgumentInvalidError(
      absl::StrCat("expected a part I/N with I from 0 to N - 1, such as 0/8 "
                   "for the first of 8 parts, got \"",
                   text, "\""));
}

std::string PartText(const Part& part) {
  return absl::StrCat(part.index, "/", part.count);
}

std::vector<std::vector<Share>> ShareOut(
    const std::vector<std::unique_ptr<Shard>>& shards, int64_t part_count) {
  std::vector<uint64_t> sizes;
  uint64_t total = 0;
  for (const std::unique_ptr<Shard>& shard : shards) {
    sizes.push_back(SelectedBytes(*shard));
    total += sizes.back();
  }
  std::vector<std::vector<Share>> shares(shards.size());
  uint64_t most = 0;
  const std::vector<int64_t> parts = PartsOfShards(sizes, part_count, &most);
  const double mean =
      static_cast<double>(total) / static_cast<double>(part_count);
  if (static_cast<double>(most) <= kMostOfMean * mean || total == 0) {
    for (size_t i = 0; i < shards.size(); ++i) {
      shares[i].push_back({parts[i], shards[i]->selected});
    }
    return shares;
  }
  // A tensor belongs to the part in whose stretch of the bytes its middle is.
  uint64_t before = 0;
  int64_t part = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const files::FileTensor* const tensor : shards[i]->selected) {
      const double middle = static_cast<double>(before) +
                            static_cast<double>(tensor->data.size()) / 2;
      part =
          std::clamp(static_cast<int64_t>(middle / mean), part, part_count - 1);
      if (shares[i].empty() || shares[i].back().part != part) {
        shares[i].push_back({part, {}});
      }
      shares[i].back().tensors.push_back(tensor);
      before += tensor->data.size();
    }
    if (shares[i].empty()) shares[i].push_back({part, {}});
  }
  return shares;
}

std::string PartPath(const Shard& shard, const Part& part) {
  return absl::StrFormat("%s%s%05d%s%05d", shard.output_path, kPartMark,
                         part.index, kOf, part.count);
}

std::vector<Part> FindParts(const Shard& shard) {
  const std::string& path = shard.output_path;
  const size_t slash = path.rfind('/');
  const std::string folder =
      slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const std::string name =
      slash == std::string::npos ? path : path.substr(slash + 1);
  std::vector<Part> parts;
  DIR* const opened = opendir(folder.c_str());
  if (opened == nullptr) return parts;
  while (const dirent* const entry = readdir(opened)) {
    absl::string_view rest = entry->d_name;
    if (!absl::ConsumePrefix(&rest, absl::StrCat(name, kPartMark))) continue;
    const std::vector<absl::string_view> numbers = absl::StrSplit(rest, kOf);
    Part part;
    if (numbers.size() == 2 && absl::SimpleAtoi(numbers[0], &part.index) &&
        absl::SimpleAtoi(numbers[1], &part.count) && part.index >= 0 &&
        part.index < part.count && part.count <= kMostParts) {
      parts.push_back(part);
    }
  }
  closedir(opened);
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    return std::pair(a.count, a.index) < std::pair(b.count, b.index);
  });
  return parts;
}

}  // namespace quantd::jobs
