#include "client/cli/table.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/session.h"
#include "client/cpp/errors.h"
#include "client/files/errors.h"
#include "gtest/gtest.h"

namespace quantd::cli {
namespace {

TEST(TableTest, ColumnsAreAsWideAsTheirWidestCell) {
  Table table;
  table.AddColumn("NAME", Table::Align::kLeft);
  table.AddColumn("N", Table::Align::kRight);
  table.AddColumn("NOTE", Table::Align::kLeft);
  table.AddRow({"a", "100", "x"});
  table.AddRow({"größe", "5"});
  EXPECT_EQ(table.Render(false),
            "NAME     N  NOTE\n"
            "a      100  x\n"
            "größe    5\n");
  EXPECT_EQ(table.Render(true).substr(0, 4), "\x1b[1m");
}

TEST(TableTest, ALineWidensNoColumn) {
  Table table;
  table.AddColumn("NAME", Table::Align::kLeft);
  table.AddColumn("N", Table::Align::kRight);
  table.AddLine("longer than all columns");
  table.AddRow({"  a", "1"});
  EXPECT_EQ(table.Render(false),
            "NAME  N\n"
            "longer than all columns\n"
            "  a   1\n");
}

TEST(TableTest, ColumnsOfBytesHaveOneUnit) {
  const auto render = [](const std::vector<uint64_t>& sizes) {
    Table table;
    table.AddColumn("BEFORE", Table::Align::kBytes);
    table.AddColumn("AFTER", Table::Align::kBytes);
    for (const uint64_t size : sizes) {
      table.AddRow({BytesCell(size), BytesCell(size / 2)});
    }
    table.AddRow({"failed", ""});
    return table.Render(false);
  };
  EXPECT_EQ(render({4096, 0, 537'919'488}),
            "BEFORE KIB  AFTER KIB\n"
            "       4.0        2.0\n"
            "       0.0        0.0\n"
            " 525,312.0  262,656.0\n"
            "    failed\n");
  // Below a tenth of a KiB.
  EXPECT_EQ(render({204, 5000}),
            "BEFORE B  AFTER B\n"
            "     204      102\n"
            "   5,000    2,500\n"
            "  failed\n");
  EXPECT_EQ(render({0}),
            "BEFORE B  AFTER B\n"
            "       0        0\n"
            "  failed\n");
  EXPECT_EQ(render({UINT64_MAX}),
            "BEFORE EIB  AFTER EIB\n"
            "      16.0        8.0\n"
            "    failed\n");
}

TEST(TableTest, BytesHaveTheUnitThatKeepsThemShort) {
  EXPECT_EQ(BytesText(0), "0 B");
  EXPECT_EQ(BytesText(10239), "10,239 B");
  EXPECT_EQ(BytesText(10240), "10.0 KiB");
  EXPECT_EQ(BytesText(1024 * 1024 - 1), "1.0 MiB");
  EXPECT_EQ(BytesText(uint64_t{5} << 30), "5.0 GiB");
  EXPECT_EQ(BytesText(UINT64_MAX), "16.0 EiB");
}

TEST(TableTest, RowsSortByTheFirstCell) {
  Table table;
  table.AddColumn("N", Table::Align::kLeft);
  for (const char* const name : {"h.10", "h.1", "h.9"}) table.AddRow({name});
  table.SortRows();
  EXPECT_EQ(table.Render(false), "N\nh.1\nh.9\nh.10\n");
}

TEST(TableTest, TimesHaveTwoUnitsAtMost) {
  EXPECT_EQ(DurationText(0.2), "1 s");
  EXPECT_EQ(DurationText(59), "59 s");
  EXPECT_EQ(DurationText(200), "3 min 20 s");
  EXPECT_EQ(DurationText(7500), "2 h 5 min");
}

TEST(TableTest, NumbersAreShortAndNeverMisleading) {
  EXPECT_EQ(ShapeText({}), "[]");
  EXPECT_EQ(DecibelText(41.268), "41.27");
  EXPECT_EQ(DecibelText(INFINITY), "inf");
  EXPECT_EQ(NumberText(-INFINITY), "-inf");
  EXPECT_EQ(NumberText(NAN), "nan");
  EXPECT_EQ(NumberText(1.25e-9), "1.25e-09");
}

TEST(TableTest, NothingReachesTheTerminalUnescaped) {
  Table table;
  table.AddColumn("NAME", Table::Align::kLeft);
  table.AddColumn("NOTE", Table::Align::kLeft);
  table.AddRow({"a\x1b[2J", "x"});
  table.AddLine(
      "\xE2\x80\xAE"
      "b");
  EXPECT_EQ(table.Render(false),
            "NAME      NOTE\n"
            "a\\x1b[2J  x\n"
            "\\xe2\\x80\\xaeb\n");
}

TEST(SessionTest, ExitCodesTellWhoseErrorItIs) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), kSuccess);
  EXPECT_EQ(ExitCodeOf(absl::NotFoundError("ENCODING_NOT_FOUND: x")),
            kServerError);
  EXPECT_EQ(ExitCodeOf(absl::UnavailableError("STORE_UNAVAILABLE: x")),
            kServerError);
  EXPECT_EQ(ExitCodeOf(ServerUnreachableError("host:1", "refused")),
            kUnreachable);
  EXPECT_EQ(ExitCodeOf(files::FileMalformedError("f", "x")), kFileError);
}

}  // namespace
}  // namespace quantd::cli
