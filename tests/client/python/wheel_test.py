#!/usr/bin/python3
"""The wheel: what is in it, what it asks for, and that it is the same again."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

import package

MAKE = os.path.join(package.PACKAGE, "make_wheel")
with open(os.path.join(package.PACKAGE, "src/quantd/__init__.py"),
          encoding="utf-8") as source:
    VERSION = re.search(r'^__version__ = "(.*)"$', source.read(), re.M).group(1)

try:
    import setuptools  # pylint: disable=unused-import
    import wheel  # pylint: disable=unused-import
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)


def make(folder, *arguments, **environment):
    return subprocess.run(
        [sys.executable, MAKE, folder, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False)


class WheelTest(unittest.TestCase):

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def test_ItIsForAnyPythonAndHasEverything(self):
        before = sorted(os.listdir(package.PACKAGE))
        made = make(self.folder)
        self.assertEqual(made.returncode, 0, made.stdout)
        path = made.stdout.strip()
        self.assertEqual(os.path.basename(path),
                         f"quantd-{VERSION}-py3-none-any.whl")
        self.assertEqual(sorted(os.listdir(package.PACKAGE)), before)
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            metadata = archive.read(
                f"quantd-{VERSION}.dist-info/METADATA").decode()
            archive.extractall(os.path.join(self.folder, "installed"))
        for name in ("quantd/py.typed", "quantd/report.html",
                     "quantd/gguf_grids.txt",
                     "quantd/v1/tensor_pb2.py", "quantd/v1/tensor_pb2.pyi",
                     "quantd/v1/encoding_service_pb2_grpc.py"):
            self.assertIn(name, names)
        self.assertFalse([name for name in names if name.endswith(".so")])
        self.assertIn("Requires-Python: >=3.9\n", metadata)
        for requirement in ("grpcio>=", "numpy>=", "protobuf>="):
            self.assertRegex(metadata,
                             fr"Requires-Dist: {requirement[:-2]} ?\(?>=")
        # It is what is imported, and has nothing of this checkout.
        where = subprocess.run(
            [sys.executable, "-c", "import quantd.aio, quantd.report; "
             "print(quantd.__file__, quantd.__version__)"],
            env={**os.environ,
                 "PYTHONPATH": os.path.join(self.folder, "installed")},
            cwd=self.folder, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.split()
        self.assertEqual(where, [os.path.join(
            self.folder, "installed/quantd/__init__.py"), VERSION])

        # Made again it is the same, and another one is not replaced.
        again = make(self.folder)
        self.assertEqual((again.returncode, again.stdout), (0, path + "\n"))
        with open(path, "wb") as file:
            file.write(b"mine")
        refused = make(self.folder)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("is there already and differs", refused.stdout)
        with open(path, "rb") as file:
            self.assertEqual(file.read(), b"mine")

    def test_ItMayHaveTheEngine(self):
        engine = os.path.join(self.folder, "engine")
        with open(engine, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\necho quantctl {VERSION}\n")
        os.chmod(engine, 0o755)
        made = make(self.folder, engine)
        self.assertEqual(made.returncode, 0, made.stdout)
        path = made.stdout.strip()
        self.assertRegex(os.path.basename(path),
                         rf"^quantd-{VERSION}-py3-none-linux_\w+\.whl$")
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo("quantd/bin/quantctl")
            self.assertEqual(info.external_attr >> 16 & 0o777, 0o755)
            archive.extractall(os.path.join(self.folder, "installed"))
        installed = os.path.join(self.folder, "installed/quantd/bin/quantctl")
        os.chmod(installed, 0o755)
        found = subprocess.run(
            [sys.executable, "-c",
             "from quantd import _engine; print(_engine._find())"],
            env={"PYTHONPATH": os.path.join(self.folder, "installed"),
                 "PATH": ""},
            cwd=self.folder, stdout=subprocess.PIPE, text=True, check=True)
        self.assertEqual(found.stdout.strip(), installed)

    def test_StubsOfNewerCompilersAskForANewerRuntime(self):
        for version, protobuf in (("3.21.12", "4.21"), ("25.1", "4.21"),
                                  ("29.0", "5.29"), ("31.1", "6.31")):
            tools = os.path.join(self.folder, version)
            os.mkdir(tools)
            for name in ("protoc", "grpc_python_plugin"):
                path = os.path.join(tools, name)
                with open(path, "w", encoding="utf-8") as file:
                    file.write(f"#!/bin/sh\necho libprotoc {version}\n")
                os.chmod(path, 0o755)
            found = subprocess.run(
                [sys.executable, "-c",
                 "import runpy; print(*runpy.run_path('generate')"
                 "['requirements']())"], cwd=package.PACKAGE,
                env={**os.environ, "PATH": tools, "PYTHONDONTWRITEBYTECODE":
                     "1"},
                stdout=subprocess.PIPE, text=True, check=True).stdout.split()
            self.assertEqual(found, ["grpcio>=1.51", "numpy>=1.21",
                                     f"protobuf>={protobuf}"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
