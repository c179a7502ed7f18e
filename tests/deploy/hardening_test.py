#!/usr/bin/env python3
"""The binaries that are shipped are hardened: see QUANTD_HARDENING in
CMakeLists.txt. Reads them with readelf; skipped (77) without it."""

import argparse
import shutil
import subprocess
import sys
import unittest

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("--binary", action="append", required=True)
options, rest = arguments.parse_known_args()


def lines(flag, path, word):
    """What `readelf flag path` says of `word`."""
    said = subprocess.run(["readelf", "--wide", flag, path], check=True,
                          capture_output=True, text=True).stdout
    return [line for line in said.splitlines() if word in line]


class HardeningTest(unittest.TestCase):

    def test_symbols_are_bound_at_the_start_and_then_read_only(self):
        for path in options.binary:
            self.assertTrue(lines("--dynamic", path, "NOW"), path)
            self.assertTrue(lines("--program-headers", path, "GNU_RELRO"), path)

    def test_code_lies_at_any_address(self):
        for path in options.binary:
            self.assertTrue(lines("--dynamic", path, "PIE"), path)

    def test_stack_holds_no_code(self):
        for path in options.binary:
            stack, = lines("--program-headers", path, "GNU_STACK")
            self.assertNotIn("RWE", stack, path)

    def test_overflows_end_the_process(self):
        for path in options.binary:
            for guard in ("__stack_chk_fail", "printf_chk",
                          "__glibcxx_assert_fail"):
                self.assertTrue(lines("--dyn-syms", path, guard),
                                f"{path} has no {guard}")


if __name__ == "__main__":
    if shutil.which("readelf") is None:
        print("skipped: there is no readelf")
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *rest])
