"""What deploy/README.md names is there.

  readme_test.py --quantd BINARY --quantctl BINARY [unittest arguments]
"""

import argparse
import os
import re
import subprocess
import sys
import unittest

import configuration

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()

DEPLOY = os.path.join(configuration.ROOT, "deploy")


class ReadmeTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with open(os.path.join(DEPLOY, "README.md"), encoding="utf-8") as file:
            cls.text = file.read()
        cls.quantd = configuration.Quantd(options.quantd)
        cls.blocks = re.findall(r"^```bash\n(.*?)^```$", cls.text,
                                re.M | re.S)
        # Code in running text.
        cls.words = re.findall(r"`([^`\n]+)`",
                               re.sub(r"^```.*?^```$", "", cls.text,
                                      flags=re.M | re.S))

    def test_FlagsAndVariablesAreThoseOfQuantd(self):
        flags = {flag for word in self.words
                 for flag in re.findall(r"^--([a-z-]+)$", word)
                 } - {"config"}
        self.assertGreater(len(flags), 5)
        self.assertLessEqual(flags, self.quantd.flags)
        variables = set(re.findall(r"\bQUANTD_[A-Z_]+", self.text))
        self.assertTrue(variables)
        self.assertLessEqual(variables, self.quantd.variables)

    def test_DefaultsAreThoseOfQuantd(self):
        effective = self.quantd.effective({"HOME": "/root"})
        rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", self.text, re.M)
        checked = 0
        for names, values in rows:
            names = re.findall(r"--([a-z-]+)`", names)
            values = values.split(", ")
            for name, value in zip(names, values):
                if re.match(r"\d", value):
                    self.assertEqual(str(effective[name]),
                                     value.replace(" ", ""), name)
                    checked += 1
        self.assertGreaterEqual(checked, 5)

    def test_FilesAreThere(self):
        named = set(re.findall(r"(?<![\w/.])deploy/[\w./-]+[\w]", self.text))
        named |= {"deploy/" + word for word in self.words if re.match(
            r"(systemd|compose|kubernetes|nginx|examples)[/.]", word)}
        self.assertGreater(len(named), 10)
        for path in sorted(named):
            # What the reader makes.
            if path.startswith(("deploy/secrets",
                                "deploy/kubernetes/overlays/mine")):
                continue
            self.assertTrue(os.path.exists(
                os.path.join(configuration.ROOT, path)), path)

    def test_MetricsAreThoseOfQuantd(self):
        with open(os.path.join(configuration.ROOT, "server/metrics/metrics.cc"),
                  encoding="utf-8") as file:
            source = file.read()
        names = set(re.findall(r"\bquantd_[a-z_]+_[a-z]+", self.text))
        self.assertTrue(names)
        for name in names:
            self.assertIn(f'"{name}"', source)

    def test_CommandsAreOnes(self):
        for block in self.blocks:
            subprocess.run(["bash", "-n"], input=block, check=True, text=True)
        commands = re.findall(r"\bquantctl((?: --[a-z-]+ \S+)*) ([a-z]+)((?: "
                              r"--[a-z-]+)*)", "\n".join(
                                  self.blocks).replace("\\\n", " "))
        self.assertTrue(commands)
        for flags, command, more in commands:
            if command == "build":
                continue
            listed = subprocess.run(
                [options.quantctl, command, "--help"], check=True, text=True,
                capture_output=True).stdout + subprocess.run(
                    [options.quantctl, "--help"], check=True, text=True,
                    capture_output=True).stdout
            for flag in re.findall(r"--[a-z-]+", flags + more):
                self.assertIn(flag, listed)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
