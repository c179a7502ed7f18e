// Tables and numbers for people.

#ifndef QUANTD_CLIENT_CLI_TABLE_H_
#define QUANTD_CLIENT_CLI_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quantd::cli {

// Columns of text, as wide as their widest cell. Makes all text Printable. Not
// thread-safe.
class Table {
 public:
  // kBytes: to the right; cells are BytesCell, and all such columns of a table
  // have one unit, which their titles tell.
  enum class Align { kLeft, kRight, kBytes };

  void AddColumn(absl::string_view title, Align align);
  // A cell per column; missing ones are empty.
  void AddRow(std::vector<std::string> cells);
  // A row of one text, which is as wide as it is and widens no column.
  void AddLine(absl::string_view text);
  // Puts the rows in the natural order of the first cell.
  void SortRows();
  bool empty() const { return rows_.empty(); }

  // The title row, with `bold` emphasised for a terminal, and the rows; no
  // trailing spaces. Widths are counted in code points.
  std::string Render(bool bold) const;

 private:
  struct Column {
    std::string title;
    Align align;
  };

  bool IsLine(const std::vector<std::string>& row) const {
    return row.size() < columns_.size();
  }
  // This table with its bytes in one unit.
  Table InOneUnit() const;

  std::vector<Column> columns_;
  // A row of one cell is a line.
  std::vector<std::vector<std::string>> rows_;
};

// For a column of bytes.
std::string BytesCell(uint64_t bytes);

// True when stdout is a terminal that wants escapes: not with NO_COLOR set to
// anything but the empty string, nor with TERM=dumb.
bool StdoutHasStyle();

// "9,999 B" below 10 KiB, otherwise "1.2 MiB".
std::string BytesText(uint64_t bytes);

// "[64,3,3,3]".
std::string ShapeText(absl::Span<const int64_t> shape);

// Significant digits for an error or a range: "0.00123", "1.2e-09", "inf".
std::string NumberText(double value);

// "45 s", "3 min 20 s", "2 h 5 min".
std::string DurationText(double seconds);

// In place of an error over no elements.
constexpr char kNotMeasured[] = "n/a";

// Two decimals for decibels: "41.27", "inf"; kNotMeasured for NaN.
std::string DecibelText(double value);

}  // namespace quantd::cli

#endif  // QUANTD_CLIENT_CLI_TABLE_H_
