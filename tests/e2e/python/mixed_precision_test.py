"""Calibrates the digits weights once and chooses a format for each tensor from
the statistics alone, as deploy/examples/mixed_precision.py shows it.

  mixed_precision_test.py --quantd BINARY --quantctl BINARY
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import unittest

import live_server

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()

DATA = os.path.join(live_server.ROOT, "tests/data/digits-cnn")
WEIGHTS = os.path.join(DATA, "model.safetensors")
EXAMPLE = os.path.join(live_server.ROOT, "deploy/examples/mixed_precision.py")

try:
    import numpy  # pylint: disable=unused-import
except ImportError:
    numpy = None


@unittest.skipIf(numpy is None, "without numpy")
class MixedPrecisionTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.server = live_server.LiveServer(options.quantd)
        cls.addClassCleanup(cls.server.stop)
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.environment = dict(os.environ, QUANTD_SERVER=cls.server.address)
        cls.report = json.loads(cls.run_program(
            [sys.executable, EXAMPLE, "--json", "--quantctl", options.quantctl,
             "--weights", WEIGHTS,
             "--test", os.path.join(DATA, "test.safetensors"),
             "--folder", folder.name]))

    @classmethod
    def run_program(cls, command):
        return subprocess.run(command, check=True, stdout=subprocess.PIPE,
                              encoding="utf-8", env=cls.environment).stdout

    def test_RanksEverySpecOfEveryTensor(self):
        sweep = self.report["sweep"]
        self.assertEqual(len(sweep["tensors"]), 4)
        for tensor in sweep["tensors"]:
            sqnr = [candidate["prediction"]["sqnr_db"]
                    for candidate in tensor["candidates"]]
            self.assertEqual(len(sqnr), 8)
            self.assertEqual(sqnr, sorted(sqnr, reverse=True))
        noise = [total["noise_to_signal_sum"] for total in sweep["totals"]]
        self.assertEqual(noise, sorted(noise))
        self.assertEqual([t["failed_count"] for t in sweep["totals"]], [0] * 8)

    def test_TheErrorMeasuredLiesWithinTheBoundsPredicted(self):
        for tensor in self.report["sweep"]["tensors"]:
            flags = [flag for candidate in tensor["candidates"]
                     for flag in ("--spec", candidate["spec"])]
            measured = json.loads(self.run_program(
                [options.quantctl, "evaluate", WEIGHTS, "--json",
                 "--include", tensor["name"], *flags]))["tensors"][0]
            for candidate, metrics in zip(tensor["candidates"],
                                          measured["candidates"]):
                # Searches see the bins only, and may choose another range than
                # on the data.
                if "mse" in candidate["spec"]:
                    continue
                with self.subTest(name=tensor["name"], spec=candidate["spec"]):
                    prediction = candidate["prediction"]
                    self.assertGreaterEqual(metrics["sqnr_db"],
                                            prediction["sqnr_db_low"] - 1e-6)
                    self.assertLessEqual(metrics["sqnr_db"],
                                         prediction["sqnr_db_high"] + 1e-6)

    def test_MixturesAreSmallerThanInt4InGroupsAndAsAccurate(self):
        baseline = self.report["baseline"]
        (noise,) = [total["noise_to_signal_sum"]
                    for total in self.report["sweep"]["totals"]
                    if total["spec"] == "int4:group:32"]
        for mixture in self.report["mixtures"]:
            self.assertTrue(mixture["target_met"])
            self.assertLess(mixture["size_bytes"], baseline["size_bytes"])
            # Two of 500 images are chance.
            self.assertGreaterEqual(mixture["right"], baseline["right"] - 2)
        # At four fifths of the bytes there is less than half of the noise.
        first = self.report["mixtures"][0]
        self.assertLess(first["size_bytes"], baseline["size_bytes"] * 0.81)
        self.assertLess(first["noise_to_signal_sum"], noise / 2)
        self.assertGreaterEqual(first["right"], self.report["float32_right"] - 1)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
