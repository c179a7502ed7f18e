"""What quantctl does with a live server: files of every format and back,
contributions, encodings computed from them, tables and exit codes.

  quantctl_test.py --quantd BINARY --quantctl BINARY
"""

import argparse
import base64
import itertools
import json
import math
import os
import random
import re
import shlex
import struct
import subprocess
import sys
import unittest

import live_server
from quantctl_case import QuantctlCase, read_safetensors, write_safetensors

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()

DATA = os.path.join(live_server.ROOT, "tests/data/digits-cnn")
WEIGHTS = os.path.join(DATA, "model.safetensors")
ACTIVATIONS = os.path.join(DATA, "activations.safetensors")

# The dtype of the codes, where they have one of their own.
FORMATS = {
    "int2": "U8", "int3": "I8", "int4": "U8", "int8": "I8", "int12": "I16",
    "uint2": "U8", "uint5": "U8", "uint8": "U8", "uint16": "U16",
    "int32": "I32",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "U8", "float8_e5m2fnuz": "U8", "float6_e2m3": "U8",
    "float6_e3m2": "U8", "float4_e2m1": "U8", "mxfp8_e4m3": "F8_E4M3",
    "mxfp8_e5m2": "F8_E5M2", "mxfp6_e2m3": "U8", "mxfp6_e3m2": "U8",
    "mxfp4_e2m1": "U8", "mxint8": "I8", "nvfp4": "U8", "nf4": "U8",
    "codebook2": "U8", "codebook4": "U8", "codebook8": "U8", "lpbq": "U8",
}
CODEBOOK = "-1,-0.25,0.25,1"


class QuantctlTest(QuantctlCase):
    quantd = options.quantd
    quantctl = options.quantctl

    def test_EveryFormatGoesToAFileAndBack(self):
        # 37 columns, so that the last blocks are ragged and a byte is padded.
        values = [random.Random(0).gauss(0, 1) for _ in range(5 * 37)]
        tensor = ("F32", [5, 37], struct.pack(f"<{5 * 37}f", *values))
        write_safetensors(self.path("in"), {"w": tensor})
        for name, dtype in FORMATS.items():
            for scale_type in ("default", "float16", "bfloat16"):
                if scale_type != "default" and name not in (
                        "uint8", "float8_e5m2", "nf4"):
                    continue
                spec = f"{name}:scale={scale_type}"
                if name.startswith("codebook"):
                    spec += ":entries=" + CODEBOOK
                with self.subTest(spec):
                    report = self.json(
                        "quantize", self.path("in"), "-o", self.path("codes"),
                        "--model", "formats", "--spec", spec, "--evaluate",
                        "--force")
                    (row,) = report["tensors"]
                    codes, _ = read_safetensors(self.path("codes"))
                    self.assertEqual(codes["w"][0], dtype)
                    self.assertEqual(
                        row["bytes_after"],
                        sum(len(payload) for _, _, payload in codes.values()))
                    self.run_quantctl("dequantize", self.path("codes"), "-o",
                                      self.path("out"), "--force")
                    out, metadata = read_safetensors(self.path("out"))
                    self.assertEqual(out["w"][:2], tensor[:2])
                    self.assertEqual((len(out), metadata), (1, {}))
                    # The same error, measured by the server from the tensor
                    # and from the pairs, and here from the files.
                    (compared,) = self.json(
                        "evaluate", self.path("out"), "--reference",
                        self.path("in"))["tensors"]
                    comparison = compared["comparison"]
                    self.assertEqual(comparison["sqnr_db"], row["sqnr_db"])
                    restored = struct.unpack(f"<{5 * 37}f", out["w"][2])
                    squared = sum((a - b) ** 2 for a, b in zip(
                        struct.unpack(f"<{5 * 37}f", tensor[2]), restored))
                    self.assertAlmostEqual(
                        comparison["mean_squared_error"] * len(values),
                        squared, delta=1e-6 * squared)

    def test_ZeroPointsBetweenCodesAreKeptOrRefused(self):
        spec = "uint8:group:32:asymmetric:real-zero-point"
        self.json("quantize", WEIGHTS, "-o", self.path("real"), "--model",
                  "real", "--spec", spec, "--include", "fc1*", "--force")
        tensors, _ = read_safetensors(self.path("real"))
        self.assertEqual(tensors["fc1.weight.zero_point"][0], "F32")
        for options in (["--layout", "compressed-tensors"], ["--scheme",
                                                             "W8A16"]):
            self.json("quantize", WEIGHTS, "-o", self.path("other"),
                      *options, "--spec", spec, "--include", "fc1*", "--force",
                      code=2 if options[0] == "--scheme" else 1)

    def test_PatternsGiveTensorsSpecsOfTheirOwn(self):
        report = self.json(
            "quantize", WEIGHTS, "-o", self.path("out"), "--model", "patterns",
            "--spec", "conv*=int8:per-channel", "--spec", "fc2*=nf4",
            "--spec", "int4:group:32")
        self.assertEqual(
            {row["name"]: row["format"] for row in report["tensors"]
             if row["result"] == "quantized"},
            {"conv1.weight": "int8", "conv2.weight": "int8",
             "fc1.weight": "int4", "fc2.weight": "nf4"})
        self.assertEqual(sorted(report["formats"]), ["int4", "int8", "nf4"])

    def test_ProgressGoesToAFileDescriptor(self):
        weights = read_safetensors(WEIGHTS)[0]
        total = sum(len(data) for name, (_, _, data) in weights.items()
                    if name.endswith("weight"))
        for command in (("quantize", "-o", self.path("out"), "--no-store"),
                        ("sweep",), ("evaluate",)):
            with open(self.path("steps"), "w+b") as file:
                subprocess.run(
                    [self.quantctl, "--progress-fd", str(file.fileno()),
                     "--quiet", *command, "--spec", "int8", WEIGHTS],
                    pass_fds=[file.fileno()], env=self.environment, check=True)
                file.seek(0)
                steps = [json.loads(line) for line in file]
            done = [step["done_bytes"] for step in steps]
            self.assertEqual(done, sorted(done), command)
            self.assertEqual({step["total_bytes"] for step in steps}, {total})
            self.assertEqual(done[-1], total)
            self.assertEqual({step["tensor"] for step in steps} - {""},
                             {name for name in weights
                              if name.endswith("weight")})
        # One that cannot be written to takes nothing away.
        self.run_quantctl("--progress-fd", "99", "sweep", WEIGHTS, "--spec",
                          "int8")

    def test_WordsComeFromAFileToo(self):
        for words, code in ((["sweep", WEIGHTS, "--spec", "int8", "--json"], 0),
                            (["sweep", WEIGHTS, "--spec=", "int8"], 2)):
            with open(self.path("words"), "wb") as file:
                file.write(b"".join(word.encode() + b"\0" for word in words))
            self.assertEqual(
                self.run_quantctl("--arguments", self.path("words"),
                                  code=code).stdout,
                self.run_quantctl(*words, code=code).stdout)
        with open(self.path("words"), "ab") as file:
            file.write(b"--json")
        said = self.run_quantctl("--arguments", self.path("words"), code=2)
        self.assertIn("each end with a NUL", said.stderr)

    def test_AContributionCountsOnce(self):
        def calibrate(sequence):
            report = self.json(
                "calibrate", ACTIVATIONS, "--model", "once", "--all",
                "--include", "fc2.input", "--source", "rank-1", "--sequence",
                str(sequence))
            (tensor,) = report["tensors"]
            self.assertNotIn("etag", tensor)
            return tensor["contribution"]

        self.assertEqual(calibrate(7), {"sequence": 7, "duplicate": False})
        self.assertEqual(calibrate(7), {"sequence": 7, "duplicate": True})
        self.assertEqual(calibrate(3), {"sequence": 7, "duplicate": True})
        names = ("--model", "once")
        got = self.json("statistics", "get", "fc2.input", *names)
        self.assertEqual(got["statistics"]["count"], 256 * 128)
        self.assertEqual([(s["source"], s["sequence"]) for s in got["sources"]],
                         [("rank-1", 7)])
        self.assertEqual(calibrate(8), {"sequence": 8, "duplicate": False})
        state = self.json("statistics", "get", "fc2.input", *names, "--state")
        self.assertEqual(state["statistics"]["count"], 2 * 256 * 128)
        self.assertEqual(len(state["state"]["histograms"]), 1)
        (entry,) = self.json("statistics", "list", *names)["statistics"]
        self.assertEqual((entry["tensor"], entry["source_count"]),
                         ("fc2.input", 1))
        self.run_quantctl("statistics", "delete", "fc2.input", *names)
        self.run_quantctl("statistics", "get", "fc2.input", *names, code=1)
        self.assertEqual(
            self.json("statistics", "list", *names)["statistics"], [])

    def test_EncodingsComeFromStatisticsAsFromTheData(self):
        names = ("--model", "compute")
        self.run_quantctl("calibrate", WEIGHTS, *names, "--source", "a",
                          "--sequence", "1", "--granularity", "per-channel")
        # A model that has statistics alone is one too.
        (model,) = [model for model in self.json("models")["models"]
                    if model["model"] == "compute"]
        self.assertEqual((model["revision_count"], model["encoding_count"],
                          model["statistics_count"]), (1, 0, 4))
        (revision,) = self.json("models", "compute")["revisions"]
        self.assertEqual((revision["encoding_count"],
                          revision["statistics_count"]), (0, 4))
        dry = self.json("encodings", "compute", *names, "--dry-run",
                        "--spec", "int8:per-channel")
        self.assertEqual([t["scale_count"] for t in dry["tensors"]],
                         [32, 64, 128, 10])
        self.assertNotIn("etag", dry["tensors"][0])
        self.assertEqual(self.json("encodings", "list", *names)["encodings"],
                         [])
        computed = self.json("encodings", "compute", *names, "--spec",
                             "conv*=int8:per-channel", "--spec", "fc1*=uint8")
        self.assertEqual([t["name"] for t in computed["tensors"]],
                         ["conv1.weight", "conv2.weight", "fc1.weight"])
        stored = self.json("encodings", "get", "conv2.weight", *names)
        self.run_quantctl("calibrate", WEIGHTS, "--model", "data", "--spec",
                          "int8:per-channel")
        data = self.json("encodings", "get", "conv2.weight", "--model", "data")
        self.assertEqual(stored["encoding"], data["encoding"])
        failed = self.json("encodings", "compute", *names, "--spec",
                           "int4:group:32", code=1)
        self.assertIn("error", failed["tensors"][0])

    def test_EncodingsOfAnySizeArePrinted(self):
        # More scales than one answer of GetEncoding may have.
        count = 1_100_000
        weights = self.path("large.safetensors")
        payload = b"".join((i % 251 + 1).to_bytes(2, "little") + b"\0?"
                           for i in range(count))
        write_safetensors(weights, {"w": ("F32", [count, 1], payload)})
        for spec, field in (("int8:per-channel", "scale"),
                            ("uint8:per-channel:asymmetric", "scale"),
                            ("mxfp4_e2m1", "scale_code")):
            with self.subTest(spec=spec):
                self.run_quantctl("quantize", weights, "-o",
                                  self.path("out.safetensors"), "--force",
                                  "--spec", spec, "--model", "large")
                stored = self.json("encodings", "get", "w", "--model", "large")
                found = stored["encoding"][field]
                if field == "scale_code":
                    found = base64.b64decode(found)
                else:
                    self.assertNotEqual(found[0], found[1])
                    self.assertEqual(found[0], found[251])
                self.assertEqual(len(found), count)
                self.assertNotIn("scales_in_chunks", stored["encoding"])

    def test_EncodingsOfAnySizeArePut(self):
        def written():
            return self.server.metric("grpc_server_handled_total",
                                      grpc_method="WriteEncoding",
                                      grpc_code="OK")

        count = 1_000_000
        before = written()
        path = self.path("large.json")
        for name, fields in (
                ("float", {"format": "NUMBER_FORMAT_INT8",
                           "scale": [1 + i % 1000 for i in range(count)]}),
                ("half", {"format": "NUMBER_FORMAT_UINT8",
                          "scale_type": "SCALE_TYPE_FLOAT16",
                          "scale": [1 + i % 1000 for i in range(count)],
                          "zero_point": [i % 251 for i in range(count)]}),
                ("codes", {"format": "NUMBER_FORMAT_MXFP4_E2M1",
                           "scale_code": base64.b64encode(
                               bytes(100 + i % 50
                                     for i in range(count))).decode()})):
            with self.subTest(name=name):
                group = 32 if name == "codes" else 0
                with open(path, "w", encoding="utf-8") as file:
                    json.dump({"block_size": [1, group],
                               "scale_shape": [count, 1], **fields}, file)
                command = ("encodings", "put", name, "--model", "put", "-f",
                           path)
                put = self.json(*command, "--if-match", "absent")
                self.assertEqual(put["scale_count"], str(count))
                stored = self.json("encodings", "get", name, "--model", "put")
                self.assertEqual(stored["etag"], put["etag"])
                # A service may answer scales beside their codes.
                for field in {"scale", "scale_code", "zero_point"} & set(
                        fields):
                    # What assertEqual says of a difference takes minutes.
                    self.assertTrue(stored["encoding"].get(field) ==
                                    fields.get(field), field)
                self.run_quantctl(*command, "--if-match", "absent", code=1)
        self.assertEqual(written() - before, 3)

    def test_SweepsRankAndMix(self):
        names = ("--model", "sweep")
        self.run_quantctl("calibrate", WEIGHTS, *names, "--source", "a",
                          "--sequence", "1", "--granularity", "group:32")
        specs = ("--spec", "int8:per-channel", "--spec", "int4:group:32",
                 "--spec", "int4:per-channel")
        text = self.run_quantctl("sweep", *names, *specs, "--min-sqnr", "25",
                                 "-o", self.path("mixture")).stdout
        tables = text.split("\n\n")
        self.assertEqual(tables[0].splitlines()[0].split(),
                         ["TENSOR,", "SPEC", "SQNR", "DB", "AT", "LEAST",
                          "SIZE", "KIB"])
        # A line for each tensor and spec, and one for its name.
        self.assertEqual(len(tables[0].splitlines()), 1 + 4 * (1 + 3))
        self.assertEqual(len(tables[1].splitlines()), 1 + 3 * 2)
        # The last line ends with a path.
        self.assertLessEqual(max(map(len, text.splitlines()[:-1])), 80)
        with open(self.path("mixture"), encoding="utf-8") as file:
            mixture = file.read().splitlines()
        self.assertEqual(mixture, [
            "conv1.weight=int8:per-channel", "conv2.weight=int8:per-channel",
            "fc1.weight=int8:per-channel", "fc2.weight=int8:per-channel"])
        report = self.json("sweep", *names, *specs, "--pattern", "fc*",
                           "--max-bits-per-element", "6")
        self.assertEqual([t["name"] for t in report["tensors"]],
                         ["fc1.weight", "fc2.weight"])
        elements = 128 * 1024 + 10 * 128
        self.assertLessEqual(report["mixture"]["size_bytes"], elements * 6 / 8)
        self.assertTrue(report["mixture"]["target_met"])
        # A pattern of ties may have a member that is not asked for.
        alone = self.json("sweep", *names, "--spec", "int8", "--spec", "int4",
                          "--pattern", "fc1*", "--tie", "{l}{1,2}.weight",
                          "--max-bits-per-element", "6")
        self.assertEqual(
            [c["tensor"] for c in alone["mixture"]["choices"]], ["fc1.weight"])
        too_small = self.json("sweep", *names, *specs, "--max-bytes", "100",
                              code=1)
        self.assertFalse(too_small["mixture"]["target_met"])

    def test_SweepsAFileForSeveralBudgets(self):
        specs = ["int8:per-channel", "int4:group:32", "nf4", "int3:mse"]
        flags = [flag for spec in specs for flag in ("--spec", spec)]
        swept = self.json(
            "sweep", WEIGHTS, *flags, "--max-bits-per-element", "5",
            "--max-bits-per-element", "6", "-o",
            self.path("mixture-{}.txt"))
        measured = {tensor["name"]: tensor["candidates"] for tensor in
                    self.json("evaluate", WEIGHTS, *flags)["tensors"]}
        self.assertEqual([tensor["name"] for tensor in swept["tensors"]],
                         list(measured))
        options = []
        for tensor in swept["tensors"]:
            ranked = [candidate["noise_to_signal"]
                      for candidate in tensor["candidates"]]
            self.assertEqual(ranked, sorted(ranked))
            for candidate in tensor["candidates"]:
                index = candidate["spec_index"]
                self.assertEqual(candidate["sqnr_db"],
                                 measured[tensor["name"]][index]["sqnr_db"])
                self.assertAlmostEqual(
                    -10 * math.log10(candidate["noise_to_signal"]),
                    candidate["sqnr_db"])
            options.append([(candidate["size_bytes"],
                             candidate["noise_to_signal"])
                            for candidate in tensor["candidates"]])
        elements = sum(math.prod(tensor["shape"])
                       for tensor in swept["tensors"])
        for mixture, bits in zip(swept["mixtures"], (5, 6)):
            fitting = [sum(noise for _, noise in choice)
                       for choice in itertools.product(*options)
                       if sum(size for size, _ in choice) <= elements * bits / 8]
            self.assertAlmostEqual(mixture["noise_to_signal_sum"] /
                                   min(fitting), 1, places=9)
            self.assertEqual(mixture["target"],
                             f"at most {bits} bits per element")
            self.assertTrue(mixture["written"])
            # What it says is what quantize writes.
            path = self.path(f"mixture-{bits}.txt")
            self.assertEqual(mixture["output"], path)
            quantized = self.json(
                "quantize", WEIGHTS, "-o", self.path(f"{bits}.safetensors"),
                "--spec", "@" + path)
            self.assertEqual(quantized["bytes_after"] - sum(
                tensor["bytes_after"] for tensor in quantized["tensors"]
                if tensor["result"] == "copied"), mixture["size_bytes"])
        self.assertEqual(self.json("statistics", "list", "--model",
                                   "model")["statistics"], [])

    def test_AFileSweepSaysWhatItCannotDo(self):
        error = self.run_quantctl(
            "sweep", WEIGHTS, "--spec", "int8", "--max-bytes", "1", "-o",
            self.path("mixture.txt"), code=1).stderr
        self.assertIn("no choice meets the target", error)
        self.assertIn("mixture.txt is not written", error)
        self.assertFalse(os.path.exists(self.path("mixture.txt")))
        # A spec that fails on a tensor leaves the others alone.
        failed = self.json("sweep", WEIGHTS, "--spec", "int8", "--spec",
                           "int4:block=1,0", "--max-bits-per-element", "8.1",
                           code=1)
        for tensor in failed["tensors"]:
            by_index = {candidate["spec_index"]: candidate
                        for candidate in tensor["candidates"]}
            self.assertIn("sqnr_db", by_index[0])
            self.assertEqual("error" in by_index[1],
                             tensor["name"].startswith("conv"))
        for command, words in (
                ((WEIGHTS, "--model", "m"), "got both"),
                ((), "got neither"),
                (("--model", "m", "--all"), "expected --pattern"),
                ((WEIGHTS, "--pattern", "*"), "expected --include"),
                (("--model", "m", "--min-sqnr", "1", "--min-sqnr", "2"),
                 "expected one budget"),
                ((WEIGHTS, "-o", self.path("x")), "with -o"),
                ((WEIGHTS, "-o", self.path("x"), "--min-sqnr", "1",
                  "--min-sqnr", "2"), "expected {} in -o"),
                ((WEIGHTS, "-o", self.path("x{}"), "--min-sqnr", "1",
                  "--min-sqnr", "1.0"), "expected different budgets"),
                ((WEIGHTS, "--include", "nothing"), '"nothing"')):
            with self.subTest(command=command):
                self.assertIn(words, self.run_quantctl(
                    "sweep", *command, "--spec", "int8", code=2).stderr)

    def test_StatisticsLargerThanTheirTensorAreRefused(self):
        weights = self.path("weights.safetensors")
        write_safetensors(weights, {"w": (
            "BF16", [1024, 2048], bytes(2 * 1024 * 2048))})
        command = ("calibrate", weights, "--model", "large", "--source", "a",
                   "--sequence", "1", "--granularity")
        error = self.run_quantctl(*command, "group:16", code=2).stderr
        self.assertIn("about 20.0 MiB, more than the 4.0 MiB", error)
        self.assertIn("quantctl sweep FILE", error)
        self.run_quantctl(*command, "group:16", "--force-statistics")
        self.run_quantctl("calibrate", weights, "--model", "small",
                          "--source", "a", "--sequence", "1",
                          "--granularity", "per-channel")

    def test_DistributionsAreAnsweredWhenAskedFor(self):
        plain = self.json("evaluate", WEIGHTS, "--spec", "int4")
        self.assertNotIn("kl_divergence", plain["tensors"][0]["candidates"][0])
        for tensor in self.json("evaluate", WEIGHTS, "--spec", "int4",
                                "--distribution")["tensors"]:
            metrics = tensor["candidates"][0]
            histogram = metrics["error_histogram"]
            self.assertEqual(histogram["zero_count"] + sum(histogram["count"]),
                             metrics["count"])
            self.assertEqual(
                histogram["first_exponent"] + len(histogram["count"]) - 1,
                math.floor(math.log2(metrics["max_absolute_error"])))
            self.assertGreater(metrics["kl_divergence"], 0)

    def test_AReferenceMustHaveTheTensors(self):
        write_safetensors(self.path("other"),
                          {"conv1.weight": ("F32", [1, 2], bytes(8))})
        report = self.json("evaluate", WEIGHTS, "--reference",
                           self.path("other"), code=1)
        self.assertEqual(len(report["tensors"]), 4)
        for tensor in report["tensors"]:
            self.assertEqual(tensor["error"]["reason"], "ARGUMENT_INVALID")

    def test_GgufFilesAreReadAndTheirBlocksImported(self):
        half = struct.Struct("<e").pack
        random.seed(5)
        blocks_q4 = [(half(scale), bytes(random.randrange(256)
                                         for _ in range(16)))
                     for scale in (0.5, -0.25, 0.0, 1.0)]
        blocks_q8 = [(half(0.125), bytes(random.randrange(256)
                                         for _ in range(32)))
                     for _ in range(2)]
        blocks_q5 = [(half(scale), bytes(random.randrange(256)
                                         for _ in range(20)))
                     for scale in (0.5, -0.25)]
        # Name, extents with the innermost first, type, data.
        tensors = [
            ("q5", (64,), 6, b"".join(a + b for a, b in blocks_q5)),
            ("q4", (64, 2), 2, b"".join(a + b for a, b in blocks_q4)),
            ("q8", (32, 2), 8, b"".join(a + b for a, b in blocks_q8)),
            ("plain", (3, 2), 1, b"".join(half(i) for i in range(6))),
            ("other", (256,), 14, bytes(210)),
            ("old", (32,), 4, bytes(32)),
        ]

        def string(text):
            return struct.pack("<Q", len(text)) + text.encode()

        header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0)
        data = b""
        for name, extents, number, payload in tensors:
            header += string(name) + struct.pack(
                f"<I{len(extents)}QIQ", len(extents), *extents, number,
                len(data))
            data += payload + bytes(-len(payload) % 32)
        path = self.path("model.gguf")
        with open(path, "wb") as file:
            file.write(header + bytes(-len(header) % 32) + data)

        # What cannot be read is left out and said.
        imported = self.json("import", path, "--model", "gguf", code=1)
        self.assertEqual(imported["encoding_count"], 3)
        self.assertEqual([(loss["tensor"], loss["left_out"])
                          for loss in imported["losses"]],
                         [("q5", False), ("q4", False), ("other", True),
                          ("old", True)])
        # The encodings give the numbers of the file back.
        evaluated = self.json(
            "evaluate", path, "--model", "gguf", "--spec", "stored",
            "--include", "q*", "--all")
        self.assertEqual(len(evaluated["tensors"]), 3)
        for tensor in evaluated["tensors"]:
            (candidate,) = tensor["candidates"]
            self.assertEqual(candidate["mean_squared_error"], 0,
                             tensor["name"])
        result = self.run_quantctl("evaluate", path, "--all", "--spec", "int8",
                                   code=1)
        self.assertIn("tensor old: left out: its type", result.stderr)
        # Plain tensors are copied, blocks are quantized like others.
        quantize = ("quantize", path, "-o", self.path("out"), "--exclude",
                    "plain", "--requantize")
        refused = self.run_quantctl(*quantize, code=1)
        self.assertIn("--keep-going leaves them out", refused.stderr)
        self.assertFalse(os.path.exists(self.path("out")))
        self.run_quantctl(*quantize, "--keep-going", code=1)
        written, _ = read_safetensors(self.path("out"))
        self.assertEqual(written["plain"], ("F16", [2, 3], tensors[3][3]))
        self.assertEqual(written["q4"][:2], ("I8", [2, 64]))
        with open(path, "r+b") as file:
            file.truncate(100)
        self.run_quantctl("calibrate", path, "--model", "gguf", code=4)

    def test_AReportHasTheStatisticsOfEveryTensor(self):
        self.run_quantctl("calibrate", ACTIVATIONS, "--model", "page",
                          "--source", "s", "--sequence", "1", "--all")
        self.run_quantctl("calibrate", WEIGHTS, "--model", "page", "--source",
                          "s", "--sequence", "1", "--granularity", "group:16")
        self.run_quantctl("report", "--model", "page", "-o",
                          self.path("page.html"))
        with open(self.path("page.html"), encoding="utf-8") as file:
            page = file.read()
        (document,) = re.findall(
            r'<script type="application/json" id="report">(.*?)</script>',
            page, re.S)
        report = json.loads(document)
        self.assertEqual(report["candidates"],
                         ["int8:per-channel", "int8:mse", "int4:mse"])
        self.assertRegex(report["version"], r"^quantctl \d")
        self.assertRegex(report["date"], r"^20\d\d-\d\d-\d\d \d\d:\d\d UTC$")
        self.assertEqual(report["server"], self.server.address)
        swept = {tensor["name"]: tensor for tensor in self.json(
            "sweep", "--model", "page", "--spec", "int8:per-channel", "--spec",
            "int8:mse", "--spec", "int4:mse", code=1)["tensors"]}
        self.assertGreater(len(report["tensors"]), 2)
        for tensor in report["tensors"]:
            with self.subTest(tensor=tensor["name"]):
                self.assertEqual(len(tensor["bins"]), 120)
                self.assertAlmostEqual(sum(tensor["bins"]) / tensor["count"],
                                       1, places=4)
                first, last = tensor["edges"]
                self.assertEqual((first, last),
                                 (tensor["min"], tensor["max"]))
                self.assertLessEqual(first, tensor["low"])
                self.assertLess(tensor["low"], tensor["high"])
                self.assertLessEqual(tensor["high"], last)
                *_, coarse = tensor["candidates"]
                fine = tensor["candidates"][1]
                self.assertGreater(fine["sqnr_db"], coarse["sqnr_db"])
                self.assertEqual(
                    {json.dumps(candidate["size_bytes"])
                     for candidate in swept[tensor["name"]]["candidates"]
                     if "size_bytes" in candidate},
                    {json.dumps(candidate["size_bytes"])
                     for candidate in tensor["candidates"] if candidate})
                self.assertGreaterEqual(tensor["count"], tensor["elements"])
        self.assertIsNone(report["mixture"])
        self.run_quantctl("report", WEIGHTS, "-o", self.path("file.html"),
                          "--spec", "int8:per-channel", "--spec", "nf4")
        with open(self.path("file.html"), encoding="utf-8") as file:
            measured = json.loads(re.findall(
                r'<script type="application/json" id="report">(.*?)</script>',
                file.read(), re.S)[0])
        self.assertEqual(measured["input"], WEIGHTS)
        swept = self.json("sweep", WEIGHTS, "--spec", "int8:per-channel",
                          "--spec", "nf4", "--max-bits-per-element", "5")
        self.assertEqual(measured["mixture"]["choices"],
                         [choice["spec_index"] for choice in
                          swept["mixtures"][0]["choices"]])
        sweep, apply = measured["mixture"]["commands"]
        self.run_quantctl(*shlex.split(sweep.replace(
            "mixture.txt", self.path("mixture.txt")))[1:])
        self.run_quantctl(*shlex.split(apply.replace(
            "mixture.txt", self.path("mixture.txt")).replace(
                "-o quantized", "-o " + self.path("out.safetensors")))[1:])
        error = self.run_quantctl(
            "report", "--model", "page", "-o", self.path("x"), "--pattern",
            "conv*", "--pattern", "cnov*", code=2)
        self.assertIn('"cnov*"', error.stderr)
        self.run_quantctl("report", "--model", "absent", "-o",
                          self.path("x"), code=1)
        self.assertFalse(os.path.exists(self.path("x")))

    def test_CommandLinesThatMakeNoSenseAreRefused(self):
        for command in (
                ("quantize", WEIGHTS, "-o", self.path("x"), "--spec", "int99"),
                ("quantize", WEIGHTS, "-o", self.path("x"), "--spec", "int8",
                 "--spec", "int4"),
                ("quantize", WEIGHTS, "-o", self.path("x"), "--spec",
                 "int8:fixed=1"),
                ("calibrate", WEIGHTS, "--granularity", "per-channel"),
                ("calibrate", WEIGHTS, "--block-size", "1,0"),
                ("calibrate", WEIGHTS, "--source", "a"),
                ("calibrate", WEIGHTS, "--sequence", "1"),
                ("sweep", "--model", "m"),
                ("sweep", "--model", "m", "--spec", "int8", "--min-sqnr", "1",
                 "--max-bytes", "1"),
                ("sweep", "--model", "m", "--spec", "nf4:per-tensor"),
                ("evaluate", WEIGHTS, "--spec", "int8:mse:mse")):
            with self.subTest(command=command):
                self.run_quantctl(*command, code=2)
        self.assertFalse(os.path.exists(self.path("x")))
        for command, words in (
                (("quantise", WEIGHTS), "did you mean quantize?"),
                (("encodings", "lsit"), "did you mean list?"),
                (("encodings",), "a command is required"),
                (("models", "--timeout", "0"),
                 "expected a number above 0, got 0")):
            with self.subTest(command=command):
                self.assertIn(words,
                              self.run_quantctl(*command, code=2).stderr)
        nowhere = dict(self.environment, QUANTD_SERVER="127.0.0.1:1")
        self.run_quantctl("sweep", "--model", "m", "--spec", "int8",
                          "--retry-for", "0", code=3, environment=nowhere)
        self.run_quantctl("sweep", "--model", "absent", "--spec", "int8",
                          code=1)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
