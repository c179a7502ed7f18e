"""Runs what the READMEs tell people to paste, against a live server.

  readme_snippets_test.py --quantd BINARY --quantctl BINARY [--cxx BUILD_DIR]

With --cxx also builds and runs the C++ example, with the library of BUILD_DIR
installed and found by find_package(); where QUANTD_README_SUBDIRECTORY is set
also as a subdirectory, which compiles the library once more.
"""

import argparse
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import unittest

import grpc

import live_server
from live_server import run

README_ADDRESS = "127.0.0.1:8430"

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
arguments.add_argument("--cxx")
options, unittest_arguments = arguments.parse_known_args()

READMES = ("README.md", "proto/README.md", "client/README.md",
           "client/python/README.md")


def snippets(language, containing=""):
    """The fenced blocks of that language that contain a text."""
    found = []
    for name in READMES:
        with open(os.path.join(live_server.ROOT, name),
                  encoding="utf-8") as file:
            found += re.findall(rf"^```{language}\n(.*?)^```", file.read(),
                                re.M | re.S)
    return [block for block in found if containing in block]


def snippet(language, containing):
    """The one block."""
    (block,) = snippets(language, containing)
    return block


class ReadmeSnippetsTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.server = live_server.LiveServer(options.quantd)
        cls.addClassCleanup(cls.server.stop)

    def at_server(self, text):
        """The snippet with the address of the server under test."""
        self.assertEqual(text.count(README_ADDRESS), 1)
        return text.replace(README_ADDRESS, self.server.address)

    def test_ThePythonSnippetWorksAsPasted(self):
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(live_server.PROTO_DIR, os.path.join(folder, "proto"))
            run("bash", "-e", "-c", snippet("bash", "protoc"), cwd=folder)
            output = run(sys.executable, "-c",
                         self.at_server(snippet("python", "import grpc")),
                         cwd=folder)
        self.assertRegex(output, r"64 scales, largest error 0\.01\d+")

    def test_TheExchangeIsWhatGoesOverTheWire(self):
        up, down = (
            bytes.fromhex("".join(re.match(r" *((?:[0-9a-f]{2} {1,2})*"
                                           r"[0-9a-f]{2})(?:  |$)", line)[1]
                                  for line in block.splitlines()))
            for block in snippets("hex"))
        with grpc.insecure_channel(self.server.address) as channel:
            answers = list(channel.stream_stream(
                "/quantd.v1.QuantizationService/Quantize")(
                    iter([up]), timeout=live_server.PATIENCE_S))
        self.assertEqual([answer.hex(" ") for answer in answers],
                         [down.hex(" ")])

    @unittest.skipUnless(
        all(importlib.util.find_spec(name)
            for name in ("ensurepip", "numpy", "setuptools", "wheel")),
        "without what the Python package is built with")
    def test_ThePythonClientInstallsAndWorksAsPasted(self):
        environment = dict(
            os.environ, PATH=os.path.dirname(sys.executable) + ":"
            + os.environ["PATH"], PIP_DISABLE_PIP_VERSION_CHECK="1")
        with tempfile.TemporaryDirectory() as folder:
            # Building leaves files beside the sources.
            for name in ("proto", "client/python"):
                shutil.copytree(os.path.join(live_server.ROOT, name),
                                os.path.join(folder, name),
                                ignore=shutil.ignore_patterns("build"))
            run("bash", "-e", "-c", snippet("bash", "client/python"),
                cwd=folder, env=environment)
            elsewhere = os.path.join(folder, "elsewhere")
            os.makedirs(elsewhere)
            python = os.path.join(folder, "venv/bin/python")

            engine = os.path.realpath(options.quantctl)
            with_engine = dict(os.environ, PATH=os.path.dirname(engine) + ":"
                               + os.environ["PATH"])

            def run_python(containing, env=with_engine):
                return run(python, "-c",
                           self.at_server(snippet("python", containing)),
                           cwd=elsewhere, env=env)

            output = run_python("quantized.codes.dtype")
            self.assertRegex(output, r"int8 \(64, 1\) 0\.01")
            output = run_python("quantize_many")
            self.assertRegex(
                output, r"layer2.weight: int8 \(64, 288\), largest error 0\.01")
            self.assertRegex(output, r"int4:group:32: \d+\.\d dB")

            output = run_python("quantd.load")
            self.assertIn("a.weight (64, 288)", output)
            shutil.copy(os.path.join(live_server.ROOT,
                                     "tests/data/digits-cnn/model.safetensors"),
                        elsewhere)
            output = run_python("model.mixed")
            self.assertRegex(output, r"conv1.weight int8 1152 4\d\d")
            self.assertRegex(output, r"fc1.bias None 512 512")
            # A wheel may have the engine.
            wheels = os.path.join(folder, "wheels")
            run(os.path.join(folder, "client/python/make_wheel"), wheels,
                engine, env=environment)
            run(python, "-m", "pip", "install", "--no-deps",
                "--force-reinstall",
                os.path.join(wheels, *os.listdir(wheels)), env=environment)
            os.remove(os.path.join(elsewhere, "model.mixed.safetensors"))
            output = run_python("model.mixed", os.environ)
            self.assertRegex(output, r"conv1.weight int8 1152 4\d\d")
            output = run_python("max_bits_per_element=[4.5, 6]")
            self.assertRegex(
                output, r"\('max_bits_per_element', 6\) 9\d{4} \d+\.\d dB")
            self.assertTrue(os.path.exists(
                os.path.join(elsewhere, "model.6bit.safetensors")))

            output = run_python("client.import_")
            self.assertRegex(output, r"^1 \d+ \[\]\n")
            self.assertIn("1 encodings of aimet-1.0.0", output)

            if importlib.util.find_spec("torch"):
                # All in one process: importing torch takes a second.
                texts = [self.at_server(snippet("python", containing))
                         for containing in (
                             "quantd.torch.load_into",
                             "quantd.torch.quantize_",
                             "quantd.torch.output_weights",
                             "quantd.torch.FakeQuantize",
                             'model_name="acme/trained"', "acme/gram")]
                output = run(python, "-c", f"for text in {texts!r}:\n"
                             "    exec(text, {})", cwd=elsewhere,
                             env=with_engine)
                self.assertIn("('0.weight', '2.weight') torch.bfloat16",
                              output)
                self.assertRegex(output, r"0.weight int4 \d+\.\d dB\n"
                                 r"2.weight int8 \d+\.\d dB\n"
                                 r"largest change 0\.\d+\n")
                self.assertRegex(output, r"'0.weight': 'int\d")
                self.assertIn("Encoding('int4', scale=<float32 of (32, 1)>",
                              output)
                self.assertIn("{'0.input': 20, '2.input': 20}", output)
                self.assertRegex(output, r"2.input uint8 \d+\.\d dB expected")
                self.assertTrue(os.path.exists(
                    os.path.join(elsewhere, "report.html")))
                self.assertRegex(output, r"largest change \d+\.\d{3}\n$")
            output = run_python("acme/edge")
            self.assertRegex(output, r"1048576 \d+ bytes")
            output = run_python("acme/weighed")
            self.assertRegex(output, r"int3:group:32:mse: [\d.]+\n"
                             r"int3:group:32:mse:importance: [\d.]+")

            with live_server.LiveServer(
                    options.quantd, folder,
                    ["--listen", f"unix:{folder}/quantd.sock",
                     "--shared-memory"]):
                output = run(python, "-c", snippet("python", "empty_shared"),
                             cwd=folder,
                             env=dict(os.environ, HOME=folder))
        self.assertEqual(len(re.findall(r"^\[.*\] \[.*\]$", output, re.M)), 3)

    def test_TheQuantctlSnippetsWorkAsPasted(self):
        environment = dict(
            os.environ, QUANTD_SERVER=self.server.address,
            PATH=os.path.dirname(os.path.realpath(options.quantctl)) + ":"
            + os.environ["PATH"])
        with tempfile.TemporaryDirectory() as folder:
            for name in ("model.safetensors", "activations.safetensors"):
                os.symlink(os.path.join(live_server.ROOT,
                                        "tests/data/digits-cnn", name),
                           os.path.join(folder, name))
            plain = run("bash", "-e", "-c",
                        snippet("bash", "evaluate restored.safetensors"),
                        cwd=folder, env=environment)
            self.assertIn("SQNR DB", plain)
            self.assertIn("nf4", plain)
            once = run("bash", "-e", "-c",
                       snippet("bash", "quantctl encodings compute"),
                       cwd=folder, env=environment)
            self.assertRegex(once, r"conv2.input +int8 ")
            self.assertRegex(once, r"fc1.input +uint8 ")
            self.assertIn("written to net.encodings", once)
            mixed = run("bash", "-e", "-c", snippet("bash", "quantctl sweep"),
                        cwd=folder, env=environment)
            self.assertTrue(os.path.exists(os.path.join(folder,
                                                        "report.html")))
        self.assertRegex(mixed, r"fc2.weight +int8:per-channel")
        self.assertIn("written to mixed.safetensors", mixed)
        self.assertNotIn("failed", mixed)

    @unittest.skipUnless(options.cxx, "without --cxx")
    def test_TheCxxSnippetWorksWithTheInstalledLibrary(self):
        cmake, subdirectories = re.subn(
            "^add_subdirectory.*$", "find_package(quantd REQUIRED)",
            snippet("cmake", "quantd::client"), flags=re.M)
        self.assertEqual(subdirectories, 1)
        with tempfile.TemporaryDirectory() as folder:
            prefix = os.path.join(folder, "prefix")
            run("cmake", "--install", options.cxx, "--prefix", prefix)
            self.build_and_run_app(folder, cmake,
                                   f"-DCMAKE_PREFIX_PATH={prefix}")

    @unittest.skipUnless(
        options.cxx and os.environ.get("QUANTD_README_SUBDIRECTORY"),
        "without --cxx and QUANTD_README_SUBDIRECTORY")
    def test_TheCxxSnippetWorksAsPasted(self):
        cmake = snippet("cmake", "quantd::client")
        self.assertIn("path/to/quantd", cmake)
        folder = os.path.join(options.cxx, "readme")
        os.makedirs(folder, exist_ok=True)
        self.build_and_run_app(
            folder, cmake.replace("path/to/quantd", live_server.ROOT),
            "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")

    def build_and_run_app(self, folder, cmake, argument):
        cmake += ("add_executable(model model.cc)\n"
                  "target_link_libraries(model PRIVATE quantd::jobs)\n")
        for name, text in (
                ("CMakeLists.txt", cmake),
                ("app.cc", self.at_server(
                    snippet("cpp", "quantd::Client::Connect"))),
                ("model.cc", self.at_server(
                    snippet("cpp", "quantd::jobs::QuantizeModel")))):
            with open(os.path.join(folder, name), "w",
                      encoding="utf-8") as file:
                file.write(text)
        # Without optimization, which would take most of the time.
        run("cmake", "-S", ".", "-B", "build", "-G", "Ninja",
            "-DCMAKE_BUILD_TYPE=Debug", argument, cwd=folder)
        run("cmake", "--build", "build", "--target", "app", "model", cwd=folder)
        output = run("build/app", cwd=folder)
        self.assertRegex(output, r"\d+ bytes of codes")
        shutil.copy(os.path.join(live_server.ROOT,
                                 "tests/data/digits-cnn/model.safetensors"),
                    folder)
        output = run("build/model", cwd=folder)
        written = os.path.join(folder, "model.int4.safetensors")
        self.assertIn(f"\n{os.path.getsize(written)} bytes\n", output)
        by_quantctl = os.path.join(folder, "quantctl.safetensors")
        run(options.quantctl, "--server", self.server.address, "quantize",
            os.path.join(folder, "model.safetensors"), "-o", by_quantctl,
            "--spec", "int4:group:32")
        with open(written, "rb") as ours, open(by_quantctl, "rb") as theirs:
            self.assertEqual(ours.read(), theirs.read())


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
