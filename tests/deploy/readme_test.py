"""What deploy/README.md names is there, and its certificates work.

  readme_test.py --quantd BINARY --quantctl BINARY [unittest arguments]
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

sys.path.insert(0, os.path.join(configuration.ROOT, "tests/e2e/python"))
import live_server  # pylint: disable=wrong-import-position

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

    @unittest.skipUnless(shutil.which("openssl"), "without openssl")
    def test_CertificatesWorkAsPasted(self):
        make, = (block for block in self.blocks if "openssl req" in block)
        call, = (block for block in self.blocks
                 if "--tls-certificate trainer.crt" in block)
        environment = dict(os.environ, PATH=os.path.dirname(
            os.path.realpath(options.quantctl)) + ":" + os.environ["PATH"])

        def run(command):
            return subprocess.run(
                ["bash", "-e", "-c", command], cwd=folder, env=environment,
                check=False, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT)

        with tempfile.TemporaryDirectory() as folder:
            made = run(make)
            self.assertEqual(made.returncode, 0, made.stdout)
            server = live_server.LiveServer(options.quantd, folder, [
                f"--{flag}={folder}/{name}" for flag, name in (
                    ("tls-certificate", "tls.crt"), ("tls-key", "tls.key"),
                    ("tls-client-ca", "ca.crt"),
                    ("access-file", "access.txt"))])
            try:
                self.assertEqual(call.count("localhost:8430"), 1)
                port = server.address.rpartition(":")[2]
                called = run(call.replace(":8430", f":{port}"))
            finally:
                server.stop()
        self.assertEqual((called.returncode, called.stdout),
                         (0, "no models\n"))

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
