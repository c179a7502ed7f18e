"""The unit of systemd: it is one, it shuts in, and it agrees with quantd.

  systemd_test.py --quantd BINARY [unittest arguments]
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import configuration

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

UNIT = os.path.join(configuration.ROOT, "deploy/systemd/quantd.service")
README = os.path.join(configuration.ROOT, "deploy/README.md")
# In tenths, of 10; a service without any protection has about 9.6.
MAX_EXPOSURE = 15


class SystemdTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with open(UNIT, encoding="utf-8") as file:
            cls.text = file.read()
        cls.settings = dict(re.findall(r"^(\w+)=(.*)$", cls.text, re.M))
        cls.quantd = configuration.Quantd(options.quantd)

    def analyze(self, *command, more=""):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "quantd.service")
            with open(path, "w", encoding="utf-8") as file:
                # The program has to be there.
                file.write(self.text.replace("/usr/bin/quantd",
                                             os.path.realpath(
                                                 options.quantd)) + more)
            done = subprocess.run(
                ["systemd-analyze", *command, path], check=False, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def test_TheUnitIsValid(self):
        self.assertEqual(self.analyze("verify", "--man=no"), "")

    def test_TheServiceIsShutIn(self):
        self.analyze("security", "--offline=true", "--no-pager",
                     f"--threshold={MAX_EXPOSURE}")

    def test_ItAgreesWithQuantd(self):
        command, *flags = self.settings["ExecStart"].split()
        self.assertEqual((command, flags), ("/usr/bin/quantd", []))
        environment = dict([self.settings["Environment"].split("=", 1)])
        effective = self.quantd.effective(environment)
        self.assertLessEqual(set(environment), self.quantd.variables)
        self.assertEqual(
            os.path.dirname(effective["store"].removeprefix("sqlite:")),
            "/var/lib/" + self.settings["StateDirectory"])
        configuration.check_memory(self, effective,
                                   self.settings["MemoryMax"])
        self.assertGreater(int(self.settings["TimeoutStopSec"]),
                           configuration.drain_s(effective))

    def test_WhatTheReadmeAddsForOtherMachinesIsValid(self):
        with open(README, encoding="utf-8") as file:
            more = re.search(r"^```\n(\[Service\]\n.*?)^```$", file.read(),
                             re.M | re.S).group(1)
        self.assertEqual(self.analyze("verify", "--man=no", more="\n" + more),
                         "")
        credentials = dict(re.findall(r"^LoadCredential=(.*):(.*)$", more,
                                      re.M))
        environment = dict(item.split("=", 1) for item in re.findall(
            r"^Environment=(.*)$", self.text + more, re.M))
        self.assertLessEqual(set(environment), self.quantd.variables)
        for text in environment.values():
            if text.startswith("%d/"):
                self.assertIn(text.removeprefix("%d/"), credentials)
        effective = self.quantd.effective(environment)
        self.assertEqual(effective["tls-client-auth"], "auto")
        self.assertFalse(effective["insecure-listen"])


if __name__ == "__main__":
    if not shutil.which("systemd-analyze"):
        print("skipped: there is no systemd-analyze")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
