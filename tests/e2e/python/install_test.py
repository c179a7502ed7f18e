"""What `cmake --install` leaves behind serves those who have nothing else: a
program is built with find_package(quantd) and used with the installed server.

  install_test.py --build BUILD_DIR
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import unittest

import live_server
from live_server import run

arguments = argparse.ArgumentParser()
arguments.add_argument("--build", required=True)
options, unittest_arguments = arguments.parse_known_args()

CONSUMER = os.path.join(live_server.ROOT, "tests/e2e/consumer")
INSTALLED = (
    "bin/quantd", "bin/quantctl", "lib/systemd/system/quantd.service",
    "share/man/man1/quantctl.1", "share/zsh/site-functions/_quantctl",
    "share/bash-completion/completions/quantctl",
    "share/fish/vendor_completions.d/quantctl.fish",
    "share/quantd/proto/quantd/v1/quantization_service.proto",
    "include/quantd/quantd/client.h", "include/quantd/quantd/files.h",
    "include/quantd/quantd/models.h",
    "include/quantd/quantd/v1/quantization_service.pb.h",
)


class InstallTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.prefix = os.path.join(folder.name, "prefix")
        cls.headers_root = os.path.join(cls.prefix, "include/quantd")
        cls.built = os.path.join(folder.name, "build")
        run("cmake", "--install", options.build, "--prefix", cls.prefix)

    def test_EverythingHasItsPlace(self):
        for path in INSTALLED:
            with self.subTest(path=path):
                self.assertGreater(
                    os.path.getsize(os.path.join(self.prefix, path)), 100)
        # Nothing of the tree that it was built in is left.
        targets = subprocess.run(
            ["grep", "-rlF", live_server.ROOT, self.prefix, "--include=*.cmake",
             "--include=*.pc"], check=False, encoding="utf-8",
            stdout=subprocess.PIPE).stdout
        self.assertEqual(targets, "")

    def test_HeadersShowNothingOfGrpc(self):
        """Not by an include, nor by a name."""
        for header in self.headers():
            with open(os.path.join(self.headers_root, header),
                      encoding="utf-8") as file:
                code = re.sub(r"//.*", "", file.read())
            self.assertNotRegex(code, r"(?i)grpc", header)

    def test_HeadersAreThoseThatProgramsInclude(self):
        """What is installed is <quantd/client.h>, files.h, jobs.h and models.h
        and what they include. Of what is generated that is messages alone."""
        seen = set()
        left = [f"quantd/{name}.h" for name in (
            "client", "files", "jobs", "models")]
        installed = self.headers()
        while left:
            header = left.pop()
            if header in seen or header not in installed:
                continue
            seen.add(header)
            with open(os.path.join(self.headers_root, header),
                      encoding="utf-8") as file:
                left += re.findall(r'^#include [<"](.*)[>"]', file.read(), re.M)
        self.assertEqual(sorted(installed), sorted(seen))
        generated = {header for header in seen if header.endswith(".pb.h")}
        self.assertEqual(generated, {
            f"quantd/v1/{os.path.splitext(name)[0]}.pb.h" for name in
            os.listdir(os.path.join(live_server.ROOT, "proto/quantd/v1"))})

    def headers(self):
        """Of all that is installed, below headers_root."""
        return {os.path.relpath(os.path.join(folder, name), self.headers_root)
                for folder, _, names in os.walk(self.headers_root)
                for name in names}

    def test_PkgConfigKnowsTheClient(self):
        flags = run("pkg-config", "--cflags", "--libs", "quantd", env=dict(
            os.environ,
            PKG_CONFIG_PATH=os.path.join(self.prefix, "lib/pkgconfig")))
        self.assertIn("-lquantd_client -lquantd_proto", flags)
        folders = [os.path.realpath(flag[2:]) for flag in flags.split()
                   if flag.startswith("-I")]
        self.assertIn(os.path.join(os.path.realpath(self.prefix),
                                   "include/quantd"), folders)

    def test_AProgramOutsideIsBuiltAndQuantizes(self):
        run("cmake", "-S", CONSUMER, "-B", self.built, "-G", "Ninja",
            f"-DCMAKE_PREFIX_PATH={self.prefix}")
        run("cmake", "--build", self.built)
        server = live_server.LiveServer(os.path.join(self.prefix,
                                                     "bin/quantd"))
        self.addCleanup(server.stop)
        codes = run(os.path.join(self.built, "consumer"), server.address)
        self.assertEqual(codes.split(), ["-127", "0", "32", "127"])
        # The files alone, without a server.
        path = os.path.join(self.built, "w.safetensors")
        self.assertEqual(run(os.path.join(self.built, "files_consumer"), path),
                         "w 3\n")
        self.models_are_those_of_quantctl(server.address)

    def models_are_those_of_quantctl(self, address):
        weights = os.path.join(live_server.ROOT,
                               "tests/data/digits-cnn/model.safetensors")
        quantized = os.path.join(self.built, "quantized.safetensors")
        specs = ("int8:per-channel", "int4:group:32")

        def quantctl(*command):
            return json.loads(run(os.path.join(self.prefix, "bin/quantctl"),
                                  "--server", address, "--json", *command))

        written = quantctl("quantize", weights, "-o", quantized,
                           "--spec", "int8:per-channel")
        lines = run(os.path.join(self.built, "models_consumer"), address,
                    weights, quantized).splitlines()
        swept = quantctl(
            "sweep", weights, "--max-bits-per-element", "6",
            *(word for spec in specs for word in ("--spec", spec)))
        want = []
        for tensor in swept["tensors"]:
            by_index = sorted(tensor["candidates"],
                              key=lambda one: one["spec_index"])
            want.append(" ".join([tensor["name"], *(
                f"{one['size_bytes']} {one['sqnr_db']:.6g}"
                for one in by_index)]))
        want += [f"{one['tensor']}={one['spec_index']}"
                 for one in swept["mixtures"][0]["choices"]]
        # Of plain files, in the order of names, as their metadata are.
        want += sorted(
            f"{one['name']}: int8 {math.prod(one['shape'])} {one['shape'][0]}"
            for one in written["tensors"] if one["result"] == "quantized")
        self.assertEqual(lines, want)
        self.assertGreater(len(lines), 6)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
