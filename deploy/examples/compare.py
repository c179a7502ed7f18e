#!/usr/bin/python3
"""Shows reports of `quantctl quantize --evaluate --json` side by side.

  compare.py LABEL=REPORT.json...
"""

import json
import sys


def number(value, pattern):
    """JSON has no infinity: an error of zero gives null decibels."""
    return "inf" if value is None else format(value, pattern)


def main():
    reports = []
    for argument in sys.argv[1:]:
        label, path = argument.split("=", 1)
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
        reports.append((label, {t["name"]: t for t in report["tensors"]}))

    rows = [["tensor", "shape", "KiB"] + ["KiB", "SQNR dB", "max err"] *
            len(reports)]
    for name, first in reports[0][1].items():
        if first["result"] != "quantized":
            continue
        row = [name, "x".join(map(str, first["shape"])),
               f"{first['bytes_before'] / 1024:.1f}"]
        for _, tensors in reports:
            tensor = tensors[name]
            row += [f"{tensor['bytes_after'] / 1024:.1f}",
                    number(tensor["sqnr_db"], ".2f"),
                    number(tensor["max_absolute_error"], ".5f")]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows)]
    # Above the columns of each report its label.
    title = " " * (sum(widths[:3]) + 4)
    for i, (label, _) in enumerate(reports):
        title += "  " + label.rjust(sum(widths[3 + 3 * i:6 + 3 * i]) + 4)
    print(title)
    for row in rows:
        cells = [cell.ljust(width) if i < 2 else cell.rjust(width)
                 for i, (cell, width) in enumerate(zip(row, widths))]
        print("  ".join(cells))


if __name__ == "__main__":
    main()
