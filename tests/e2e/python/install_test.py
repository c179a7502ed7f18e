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
    "include/quantd/quantd/v1/quantization_service.grpc.pb.h",
)


class InstallTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.prefix = os.path.join(folder.name, "prefix")
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
        """Those that <quantd/client.h> includes are all there are, and none of
        them includes gRPC or a service's stubs."""
        root = os.path.join(self.prefix, "include/quantd")
        seen, left = set(), ["quantd/client.h"]
        while left:
            header = left.pop()
            if header in seen:
                continue
            seen.add(header)
            with open(os.path.join(root, header), encoding="utf-8") as file:
                includes = re.findall(r'^#include [<"](.*)[>"]', file.read(),
                                      re.M)
            for include in includes:
                self.assertNotRegex(include, r"grpc", header)
            left += [include for include in includes
                     if include.startswith("client/")]
        self.assertEqual(sorted(os.listdir(os.path.join(root, "client/cpp"))),
                         sorted(os.path.basename(header) for header in seen
                                if header.startswith("client/")))

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
