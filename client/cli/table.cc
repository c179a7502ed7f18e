#include "client/cli/table.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "client/cli/printable.h"
#include "client/models/text.h"

namespace quantd::cli {
namespace {

constexpr absl::string_view kGap = "  ";
constexpr const char* kUnits[] = {"B",   "KiB", "MiB", "GiB",
                                  "TiB", "PiB", "EiB"};

size_t Width(absl::string_view text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(),
      [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

}  // namespace

void Table::AddColumn(absl::string_view title, Align align) {
  columns_.push_back({Printable(title), align});
}

void Table::AddRow(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  for (std::string& cell : cells) cell = Printable(cell);
  rows_.push_back(std::move(cells));
}

void Table::AddLine(absl::string_view text) {
  rows_.push_back({Printable(text)});
}

void Table::SortRows() {
  std::stable_sort(
      rows_.begin(), rows_.end(),
      [](const auto& a, const auto& b) { return NaturalLess(a[0], b[0]); });
}

Table Table::InOneUnit() const {
  Table table = *this;
  // From columns of bytes: all titles, and all cells with a size.
  std::vector<std::string*> titles;
  std::vector<std::pair<std::string*, uint64_t>> sizes;
  uint64_t smallest = UINT64_MAX;
  for (size_t c = 0; c < columns_.size(); ++c) {
    if (columns_[c].align != Align::kBytes) continue;
    titles.push_back(&table.columns_[c].title);
    for (auto& row : table.rows_) {
      uint64_t bytes = 0;
      if (c >= row.size() || !absl::SimpleAtoi(row[c], &bytes)) continue;
      sizes.emplace_back(&row[c], bytes);
      if (bytes > 0) smallest = std::min(smallest, bytes);
    }
  }
  // The largest unit of which the smallest size is a tenth or more.
  size_t unit = 0;
  double unit_bytes = 1;
  while (smallest != UINT64_MAX && unit + 1 < std::size(kUnits) &&
         static_cast<double>(smallest) >= 0.1 * 1024 * unit_bytes) {
    unit_bytes *= 1024;
    ++unit;
  }
  for (std::string* const title : titles) {
    absl::StrAppend(title, " ", absl::AsciiStrToUpper(kUnits[unit]));
  }
  for (const auto& [cell, bytes] : sizes) {
    const auto tenths = static_cast<uint64_t>(
        std::llround(static_cast<double>(bytes) * 10 / unit_bytes));
    *cell = unit == 0 ? CountText(bytes)
                      : absl::StrCat(CountText(tenths / 10), ".", tenths % 10);
  }
  return table;
}

std::string Table::Render(bool bold) const {
  const Table table = InOneUnit();
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t width = Width(table.columns_[c].title);
    for (const auto& row : table.rows_) {
      if (!IsLine(row)) width = std::max(width, Width(row[c]));
    }
    widths.push_back(width);
  }
  const auto line = [&](auto&& cell) {
    std::string text;
    for (size_t c = 0; c < columns_.size(); ++c) {
      const absl::string_view content = cell(c);
      const std::string space(widths[c] - Width(content), ' ');
      if (c > 0) absl::StrAppend(&text, kGap);
      if (columns_[c].align == Align::kLeft) {
        absl::StrAppend(&text, content, space);
      } else {
        absl::StrAppend(&text, space, content);
      }
    }
    while (!text.empty() && text.back() == ' ') text.pop_back();
    return text;
  };
  std::string text = line([&table](size_t c) -> absl::string_view {
    return table.columns_[c].title;
  });
  if (bold) text = absl::StrCat("\x1b[1m", text, "\x1b[0m");
  text.push_back('\n');
  for (const auto& row : table.rows_) {
    absl::StrAppend(
        &text,
        IsLine(row) ? row[0] : line([&row](size_t c) -> absl::string_view {
          return row[c];
        }),
        "\n");
  }
  return text;
}

std::string DurationText(double seconds) {
  const int64_t whole = static_cast<int64_t>(std::ceil(seconds));
  if (whole < 60) return absl::StrCat(whole, " s");
  if (whole < 3600) return absl::StrCat(whole / 60, " min ", whole % 60, " s");
  return absl::StrCat(whole / 3600, " h ", whole % 3600 / 60, " min");
}

bool StdoutHasStyle() {
  const char* const no_color = std::getenv("NO_COLOR");
  if (no_color != nullptr && no_color[0] != '\0') return false;
  const char* const term = std::getenv("TERM");
  if (term == nullptr || absl::string_view(term) == "dumb") return false;
  return isatty(STDOUT_FILENO) == 1;
}

std::string BytesCell(uint64_t bytes) { return absl::StrCat(bytes); }

std::string BytesText(uint64_t bytes) {
  if (bytes < 10 * 1024) return absl::StrCat(CountText(bytes), " B");
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 1;
  // 1023.95 would be written as 1024.0.
  while (value >= 1023.95 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ","), "]");
}

std::string NumberText(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return absl::StrFormat("%.4g", value);
}

std::string DecibelText(double value) {
  if (std::isnan(value)) return kNotMeasured;
  if (std::isinf(value)) return NumberText(value);
  return absl::StrFormat("%.2f", value);
}

}  // namespace quantd::cli
