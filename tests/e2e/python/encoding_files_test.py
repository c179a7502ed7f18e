"""Files of encodings of other projects, out and in, with a live server.

  encoding_files_test.py --quantd BINARY --quantctl BINARY
"""

import argparse
import json
import os
import sys
import tempfile
import unittest

import grpc

import live_server
from quantctl_case import QuantctlCase

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()

WEIGHTS = os.path.join(live_server.ROOT,
                       "tests/data/digits-cnn/model.safetensors")


class EncodingFilesTest(QuantctlCase):
    quantd = options.quantd
    quantctl = options.quantctl

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        stubs = tempfile.TemporaryDirectory()
        cls.addClassCleanup(stubs.cleanup)
        live_server.generate_stubs(stubs.name)

    def calibrate(self, model, *spec):
        self.run_quantctl("calibrate", WEIGHTS, "--model", model, *spec)

    def test_EveryFormatComesBackToTheBit(self):
        self.calibrate("out", "--spec", "conv*=int8:per-channel", "--spec",
                       "fc1*=int4:group:32", "--spec", "fc2*=uint8")
        tensors = ("conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight")
        for format_, shapes in (
                ("json", False), ("aimet-1.0.0", True), ("aimet-2.0.0", True),
                ("onnx-qdq", True)):
            with self.subTest(format=format_):
                report = self.json("export", "--model", "out", "--format",
                                   format_, "-o", self.path("file"), "--force")
                self.assertEqual(report["encoding_count"], 4)
                self.assertFalse(any(l["left_out"] for l in report["losses"]))
                back = "back-" + format_
                where = ("--tensors", WEIGHTS, "--axis", "0") if shapes else ()
                imported = self.json("import", self.path("file"), "--model",
                                     back, *where)
                self.assertEqual((imported["format"],
                                  imported["encoding_count"]), (format_, 4))
                lost = {(l["tensor"], l["what"].split(":")[0])
                        for l in report["losses"]}
                for tensor in tensors:
                    before = self.encoding("out", tensor)
                    after = self.encoding(back, tensor)
                    for key in before.keys() | after.keys():
                        if before.get(key) == after.get(key):
                            continue
                        # Of per-tensor encodings only the rank may be open.
                        if before["scale"] == after["scale"] and \
                                len(before["scale"]) == 1 and \
                                key in ("block_size", "scale_shape"):
                            continue
                        self.assertIn((tensor, key), lost, (before, after))

    def test_WhatAFormatCannotHoldIsLeftOutAndTold(self):
        self.calibrate("mixed", "--spec", "conv*=int8:per-channel", "--spec",
                       "fc1*=nf4", "--spec", "fc2*=int4:group:32")
        report = self.json("export", "--model", "mixed", "--format",
                           "aimet-0.6.1", "-o", self.path("file"), code=1)
        self.assertEqual({l["tensor"] for l in report["losses"]
                          if l["left_out"]}, {"fc1.weight", "fc2.weight"})
        with open(self.path("file"), encoding="utf-8") as file:
            document = json.load(file)
        self.assertEqual(document["activation_encodings"], {})
        self.assertEqual(sorted(document["param_encodings"]),
                         ["conv1.weight", "conv2.weight"])
        entry = document["param_encodings"]["conv1.weight"][0]
        self.assertEqual((entry["bitwidth"], entry["is_symmetric"],
                          entry["offset"]), (8, "True", -128))
        self.run_quantctl("export", "--model", "nowhere", code=1)
        # Nothing at all, not even the beginning of a document.
        failed = self.run_quantctl("export", "--model", "mixed", "--format",
                                   "aimet-0.6.1", "--include", "fc*", "-o",
                                   "-", code=1)
        self.assertIn("no encoding is left", failed.stderr)
        self.assertEqual(failed.stdout, "")
        text = self.run_quantctl("export", "--model", "mixed").stdout
        self.assertEqual(len(json.loads(text)["encodings"]), 4)

    def test_AnOpenAxisComesFromWhatIsKnown(self):
        self.calibrate("axis", "--spec", "int8:per-channel")
        self.run_quantctl("export", "--model", "axis", "--format",
                          "aimet-0.6.1", "-o", self.path("file"))
        command = ("import", self.path("file"), "--model")
        failed = self.run_quantctl(*command, "axis-2", code=1)
        self.assertIn("AXIS_UNKNOWN: param_encodings[\"conv1.weight\"]",
                      failed.stderr)
        self.assertIn("--tensors", failed.stderr)
        self.assertEqual(self.json("encodings", "list", "--model",
                                   "axis-2")["encodings"], [])
        # What is stored under the names tells it.
        self.run_quantctl(*command, "axis")
        self.run_quantctl(*command, "axis-2", "--tensors", WEIGHTS)
        self.run_quantctl(*command, "axis-3", "--block-size",
                          "conv*=1,0,0,0", "--block-size", "1,0")
        for model in ("axis", "axis-2", "axis-3"):
            self.assertEqual(self.encoding(model, "conv1.weight")["block_size"],
                             ["1", "0", "0", "0"])
        dry = self.json(*command, "axis-4", "--tensors", WEIGHTS, "--dry-run")
        self.assertEqual(dry["encoding_count"], 4)
        self.run_quantctl("encodings", "get", "conv1.weight", "--model",
                          "axis-4", code=1)

    def test_BlocksOfStoredEncodingsTellTheLayoutOfAFile(self):
        # Blocks come before their channels here.
        self.calibrate("rows", "--spec", "int4:block=32,1", "--include", "fc*")
        for format in ("aimet-1.0.0", "aimet-2.0.0", "onnx-qdq"):
            self.run_quantctl("export", "--model", "rows", "--format", format,
                              "-o", self.path("file"),
                              "--force")
            before = self.encoding("rows", "fc1.weight")
            self.run_quantctl("import", self.path("file"), "--model", "rows")
            after = self.encoding("rows", "fc1.weight")
            for key in ("scale", "block_size", "scale_shape"):
                self.assertEqual(after[key], before[key], (format, key))

    def test_AFileThatIsNotSoundStoresNothing(self):
        good = {"name": "good", "format": "int8", "scale": [1]}
        for bad, place in (
                ({"name": "bad", "format": "int8", "scale": [0]},
                 "encodings[1]: scale"),
                ({"name": "", "format": "int8", "scale": [1]},
                 "encodings[1]: "),
                ({"name": "bad", "format": "int9x", "scale": [1]},
                 "encodings[1].format"), (7, "encodings[1]")):
            path = self.write_json("bad", {
                "format": "quantd-encodings", "version": 1,
                "encodings": [good, bad]})
            result = self.json("import", path, "--model", "bad", code=1)
            self.assertEqual(result["error"]["reason"], "INTERCHANGE_INVALID")
            self.assertIn(place, result["error"]["message"])
        self.assertEqual(self.json("encodings", "list", "--model",
                                   "bad")["encodings"], [])

    def test_OneBadEntryOfAimetIsLeftOutAndTold(self):
        path = self.write_json("aimet", {"version": "2.1.0", "encodings": [
            {"name": "bias", "output_dtype": "uint32", "y_scale": [0.01, 0.02],
             "axis": 0},
            {"name": "odd", "output_dtype": "int2", "y_scale": 0.5,
             "y_zero_point": -2.5},
            {"name": "", "output_dtype": "int8", "y_scale": 1},
            {"name": "tiny", "output_dtype": "int8", "y_scale": 0},
            {"name": "conv1.weight", "output_dtype": "int8",
             "y_scale": [1, 2, 3], "axis": 0},
            {"name": "w", "output_dtype": "float4e2m1", "axis": 1,
             "block_size": 16, "y_scale": {
                 "x": [[0.5, 1.0], [2.0, 1.5]], "x_scale": 0.0009,
                 "input_dtype": "float8e4m3fn"}}]})
        report = self.json("import", path, "--model", "aimet", "--tensors",
                           WEIGHTS, code=1)
        self.assertEqual((report["format"], report["encoding_count"],
                          report["loss_count"]), ("aimet-2.1.0", 1, 5))
        self.assertEqual([(loss["tensor"], loss["left_out"])
                          for loss in report["losses"]],
                         [(name, True) for name in
                          ("bias", "odd", "", "tiny", "conv1.weight")])
        self.assertEqual(self.encoding("aimet", "w")["format"],
                         "NUMBER_FORMAT_NVFP4")
        self.run_quantctl("export", "--model", "aimet", "--format",
                          "aimet-2.1.0", "-o", self.path("again"))
        with open(path, encoding="utf-8") as before, \
                open(self.path("again"), encoding="utf-8") as after:
            self.assertEqual(json.load(after)["encodings"],
                             json.load(before)["encodings"][-1:])

    def test_LossesThatAreTooManyAreCounted(self):
        """It is no success only where a tensor may be left out."""
        rounded = [{"bitwidth": 8, "scale": 0.1, "offset": -8}]
        bad = [{"bitwidth": 32, "scale": 1, "offset": 0}]
        for entry, others, code, what in (
                (rounded, {}, 0, "none of these tensors"),
                (rounded, {"bad": bad}, 1, "none of these tensors"),
                (bad, {"good": rounded}, 1, "tensors of these may be")):
            entries = {f"{n:01000}": entry for n in range(1500)}
            path = self.write_json("aimet", {
                "version": "0.6.1", "param_encodings": {**entries, **others}})
            arguments = ("import", path, "--model", "many", "--dry-run")
            done = self.run_quantctl(*arguments, code=code)
            count = 1500 if entry is rounded else 1
            self.assertIn(f"{count:,} encodings of aimet-0.6.1 would",
                          done.stdout)
            self.assertIn(f"more losses are not told; {what}", done.stderr)
            report = self.json(*arguments, code=code)
            self.assertEqual(report["loss_count"], 1500 + len(others))
            self.assertLess(len(report["losses"]), 1500)

    def test_GeneratedClientsSendAndTakeFilesInPieces(self):
        from quantd.v1 import encoding_service_pb2 as es
        from quantd.v1 import encoding_service_pb2_grpc as es_grpc
        channel = grpc.insecure_channel(self.server.address)
        self.addCleanup(channel.close)
        encodings = es_grpc.EncodingServiceStub(channel)
        count = 3000
        document = json.dumps({
            "format": "quantd-encodings", "version": 1, "encodings": [
                {"name": f"t{n:04}", "format": "uint8",
                 "scale": [0.1 + n / 7], "zero_point": [n % 256]}
                for n in range(count)]}).encode()

        def requests(piece_bytes=1000):
            yield es.ImportEncodingsRequest(model="pieces")
            for offset in range(0, len(document), piece_bytes):
                yield es.ImportEncodingsRequest(
                    data=document[offset:offset + piece_bytes])

        answer = encodings.ImportEncodings(requests(),
                                           timeout=live_server.PATIENCE_S)
        self.assertEqual(answer.encoding_count, count)
        self.assertEqual(answer.format, es.INTERCHANGE_FORMAT_JSON)
        # Decimal numbers are not float32: each says so.
        self.assertEqual(answer.loss_count, count)
        for format_ in (es.INTERCHANGE_FORMAT_JSON,
                        es.INTERCHANGE_FORMAT_AIMET_0_6_1):
            data, last = b"", None
            for response in encodings.ExportEncodings(
                    es.ExportEncodingsRequest(
                        model="pieces", format=format_,
                        patterns=["t1*", "t2*"]),
                    timeout=live_server.PATIENCE_S):
                data += response.data
                last = response
                self.assertLessEqual(len(response.data), 1 << 20)
            self.assertEqual(last.encoding_count, 2000)
            json.loads(data)
        for request, code in (
                (es.ExportEncodingsRequest(model="pieces"), "UNIMPLEMENTED"),
                (es.ExportEncodingsRequest(model="pieces", format=99),
                 "INVALID_ARGUMENT"),
                (es.ExportEncodingsRequest(
                    model="pieces", format=1, patterns=[""]),
                 "INVALID_ARGUMENT"),
                (es.ExportEncodingsRequest(model="absent", format=1),
                 "NOT_FOUND")):
            with self.assertRaises(grpc.RpcError) as caught:
                list(encodings.ExportEncodings(
                    request, timeout=live_server.PATIENCE_S))
            self.assertEqual(caught.exception.code().name, code)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
