"""Folders of compressed-tensors models, of one file and of shards, with a live
server.

  compressed_tensors_test.py --quantd BINARY --quantctl BINARY
"""

import argparse
import json
import os
import shutil
import struct
import sys
import unittest

from quantctl_case import QuantctlCase, read_safetensors, write_safetensors

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()


def single(x):
    """Rounded to float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def float_of(tensor):
    """The one number of a tensor of F32."""
    return struct.unpack("<f", tensor[2])[0]


class CompressedTensorsTest(QuantctlCase):
    quantd = options.quantd
    quantctl = options.quantctl

    # A matrix with ragged rows for packing, and one for blocks of 16 and 32.
    def weights(self):
        values = [((n * 2654435761) % 2001 - 1000) / 700
                  for n in range(6 * 64)]
        return {"a.weight": ("F32", [6, 37],
                             struct.pack("<222f", *values[:222])),
                "b.weight": ("F32", [6, 64], struct.pack("<384f", *values)),
                "norm": ("F32", [3], struct.pack("<3f", 1, 2, 3))}

    def test_EveryLayoutComesBackToTheBit(self):
        weights = self.weights()
        for layout, specs in (
                ("compressed-tensors", {
                    "int8:per-channel": ("int-quantized", ("", "_scale")),
                    "uint8:per-channel": ("int-quantized",
                                          ("", "_scale", "_zero_point")),
                    "int8:per-tensor": ("int-quantized", ("", "_scale")),
                    "int4:group:32": ("pack-quantized",
                                      ("_packed", "_scale", "_shape")),
                    "uint4:group:32:asymmetric": (
                        "pack-quantized",
                        ("_packed", "_scale", "_shape", "_zero_point")),
                    "int4:per-channel:asymmetric": ("pack-quantized", None),
                    "int3:per-channel": ("pack-quantized", None),
                    "uint5:per-channel": ("pack-quantized", None),
                    "int2:per-tensor": ("pack-quantized", None),
                    "float8_e4m3fn:per-channel": ("float-quantized",
                                                  ("", "_scale"))}),
                ("pack-quantized", {
                    "uint8:per-channel": ("pack-quantized",
                                          ("_packed", "_scale", "_shape",
                                           "_zero_point")),
                    "int8:group:32": ("pack-quantized", None)})):
            # A module of either shape for each spec.
            tensors, arguments_ = {"norm": weights["norm"]}, []
            for n, spec in enumerate(specs):
                # Groups of 32 do not divide 37 columns.
                tensors[f"m{n}.a.weight"] = weights[
                    "b.weight" if "group" in spec else "a.weight"]
                tensors[f"m{n}.b.weight"] = weights["b.weight"]
                arguments_ += ["--spec", f"m{n}.*={spec}"]
            write_safetensors(self.path("in"), tensors)
            folder = self.path(layout)
            self.run_quantctl("quantize", self.path("in"), "-o", folder,
                              *arguments_, "--layout", layout)
            self.run_quantctl("quantize", self.path("in"), "-o",
                              self.path("own"), *arguments_, "--force")
            with open(os.path.join(folder, "config.json"),
                      encoding="utf-8") as file:
                config = json.load(file)["quantization_config"]
            formats = {target: group["format"]
                       for group in config["config_groups"].values()
                       for target in group["targets"]}
            written, _ = read_safetensors(
                os.path.join(folder, "model.safetensors"))
            for n, (spec, (format_, parts)) in enumerate(specs.items()):
                with self.subTest(layout=layout, spec=spec):
                    self.assertEqual(formats[f"m{n}.a"], format_)
                    prefix = f"m{n}.a.weight"
                    if parts:
                        self.assertEqual(
                            sorted(name for name in written
                                   if name.startswith(prefix)),
                            sorted(prefix + part for part in parts))
            self.run_quantctl("dequantize", folder, "-o", self.path("theirs"),
                              "--force")
            self.run_quantctl("dequantize", self.path("own"), "-o",
                              self.path("ours"), "--force")
            theirs, _ = read_safetensors(self.path("theirs"))
            ours, _ = read_safetensors(self.path("ours"))
            self.assertEqual(theirs.keys(), tensors.keys())
            for name in tensors:
                self.assertEqual(theirs[name], ours[name], name)

    def test_BlocksOfFloatsComeBack(self):
        for spec, format_ in (("nvfp4", "nvfp4-pack-quantized"),
                              ("mxfp4_e2m1", "mxfp4-pack-quantized")):
            with self.subTest(spec=spec):
                write_safetensors(self.path("in"), {
                    name: tensor for name, tensor in self.weights().items()
                    if name != "a.weight"})
                folder = self.path(spec)
                told = self.run_quantctl(
                    "quantize", self.path("in"), "-o", folder, "--spec", spec,
                    "--layout", "compressed-tensors").stderr
                tensors, _ = read_safetensors(
                    os.path.join(folder, "model.safetensors"))
                self.assertEqual(tensors["b.weight_packed"][:2],
                                 ("U8", [6, 32]))
                self.assertEqual(
                    tensors["b.weight_scale"][:2],
                    ("F8_E4M3", [6, 4]) if spec == "nvfp4" else ("U8", [6, 2]))
                self.run_quantctl("quantize", self.path("in"), "-o",
                                  self.path("own"), "--spec", spec,
                                  "--force")
                read = self.run_quantctl("dequantize", folder, "-o",
                                         self.path("theirs"), "--force").stderr
                inexact = []
                if spec == "nvfp4":
                    # As compressed-tensors takes it, and as quantd does.
                    inexact = [
                        name for name in tensors
                        if name.endswith("_global_scale")
                        and any(single(k / float_of(tensors[name])) !=
                                single(k * single(1 / float_of(tensors[name])))
                                for k in range(8, 16))]
                    self.assertNotEqual(inexact, [])
                # It divides, as they do.
                self.assertNotIn("weight_global_scale", read)
                self.assertEqual(told.count("weight_global_scale"),
                                 min(1, len(inexact)))
                self.run_quantctl("dequantize", self.path("own"), "-o",
                                  self.path("ours"), "--force")
                theirs = read_safetensors(self.path("theirs"))[0]
                ours = read_safetensors(self.path("ours"))[0]
                # The inverse of nvfp4's outer scale is off by an ulp.
                for a, b in zip(
                        struct.unpack("<384f", theirs["b.weight"][2]),
                        struct.unpack("<384f", ours["b.weight"][2])):
                    self.assertAlmostEqual(a, b, delta=abs(b) * 3e-7)

    def test_WordsAreAsTheLayoutHasThem(self):
        # Rows of 3 codes of 4 bits under scale 1: -7 to 7 are exact.
        write_safetensors(self.path("in"), {
            "m.weight": ("F32", [2, 3],
                         struct.pack("<6f", -7, 0, 7, 1, 2, 3))})
        self.run_quantctl("quantize", self.path("in"), "-o",
                          self.path("words"), "--spec", "int4:fixed=-7,7",
                          "--layout", "compressed-tensors")
        tensors, _ = read_safetensors(
            os.path.join(self.path("words"), "model.safetensors"))
        self.assertEqual(struct.unpack("<2I", tensors["m.weight_packed"][2]),
                         (0xF81, 0xBA9))
        self.assertEqual(struct.unpack("<2q", tensors["m.weight_shape"][2]),
                         (2, 3))

    def test_ReadsAModelWrittenByHand(self):
        os.mkdir(self.path("model"))
        write_safetensors(self.path("model/model.safetensors"), {
            "l0.weight": ("I8", [2, 2], struct.pack("<4b", -128, 0, 1, 127)),
            "l0.weight_scale": ("BF16", [2, 1],
                                bytes.fromhex("803f" "0040")),
            "l1.weight_packed": ("I32", [1, 1], struct.pack("<I", 0xF80)),
            "l1.weight_scale": ("F32", [1, 1], struct.pack("<f", 0.5)),
            "l1.weight_shape": ("I64", [2], struct.pack("<2q", 1, 3)),
            "l1.weight_zero_point": ("I32", [1, 1], struct.pack("<I", 0x9)),
            "head": ("F32", [1], struct.pack("<f", 9))})
        config = {"model_type": "test", "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mixed-precision",
            "config_groups": {
                "group_0": {"targets": ["re:l0$"], "weights": {
                    "num_bits": 8, "type": "int", "symmetric": True,
                    "strategy": "channel"}},
                "group_1": {"targets": ["Linear"], "weights": {
                    "num_bits": 4, "type": "int", "symmetric": False,
                    "strategy": "group", "group_size": 32}}}}}
        self.write_json("model/config.json", config)
        self.run_quantctl("dequantize", self.path("model"), "-o",
                          self.path("out"))
        out, _ = read_safetensors(self.path("out"))
        self.assertEqual(out["l0.weight"][0], "BF16")
        self.assertEqual(out["l0.weight"][2].hex(), "00c30000" "0040" "7e43")
        # Codes -8, 0 and 7 with zero point 1.
        self.assertEqual(struct.unpack("<3f", out["l1.weight"][2]),
                         (-4.5, -0.5, 3.0))
        self.assertEqual(sorted(out), ["head", "l0.weight", "l1.weight"])
        report = self.json("import", self.path("model"), "--model", "by-hand")
        self.assertEqual((report["format"], report["encoding_count"]),
                         ("compressed-tensors", 2))
        encoding = self.encoding("by-hand", "l1.weight")
        self.assertEqual((encoding["format"], encoding["zero_point"],
                          encoding["block_size"]),
                         ("NUMBER_FORMAT_INT4", [1], ["1", "32"]))

        def refused(change, text):
            broken = json.loads(json.dumps(config))
            change(broken["quantization_config"])
            self.write_json("model/config.json", broken)
            result = self.run_quantctl("dequantize", self.path("model"), "-o",
                                       self.path("x"), code=4)
            self.assertIn(text, result.stderr)

        groups = "config_groups"
        refused(lambda c: c.update(quant_method="gptq"),
                "is quantized in a way that is not read")
        refused(lambda c: c.pop(groups), "no group of config.json targets it")
        refused(lambda c: c[groups]["group_1"]["weights"].update(num_bits=99),
                "num_bits is 99, expected 2 to 8")
        refused(lambda c: c[groups]["group_0"]["weights"].update(
            strategy="token"), "strategy \"token\"")
        refused(lambda c: c[groups]["group_0"]["weights"].update(
            strategy="tensor"), "weight_scale has 2 elements")
        refused(lambda c: c[groups]["group_0"]["weights"].update(type="float"),
                "expected a weight of F8_E4M3")

    def test_FoldersOfShardsAreTakenUpAgain(self):
        os.mkdir(self.path("model"))
        weights = self.weights()
        weights.pop("norm")
        shards = {"a.weight": "model-00001-of-00002.safetensors",
                  "b.weight": "model-00002-of-00002.safetensors"}
        for name, shard in shards.items():
            write_safetensors(self.path("model/" + shard),
                              {name: weights[name]}, {"format": "pt"})
        self.write_json("model/model.safetensors.index.json",
                        {"metadata": {}, "weight_map": shards})
        self.write_json("model/config.json", {"model_type": "test"})

        def quantize(*more, code=0):
            report = self.json(
                "quantize", self.path("model"), "-o", self.path("out"),
                "--spec", "int8:per-channel", *more, code=code)
            return {t["name"]: t["result"] for t in report.get("tensors", [])}

        # Nothing is begun where the second shard can't be read.
        second = self.path("model/" + shards["b.weight"])
        os.rename(second, second + ".away")
        quantize(code=4)
        self.assertFalse(os.path.exists(self.path("out")))
        # Nor is what went well lost where it can't be done.
        write_safetensors(second, {"b.weight": ("F32", [1] * 17, bytes(4))})
        quantize(code=1)
        self.assertEqual(os.listdir(self.path("out")), [shards["a.weight"]])
        os.rename(second + ".away", second)
        self.assertEqual(quantize(), {"a.weight": "kept",
                                      "b.weight": "quantized"})
        self.assertEqual(quantize(), {"a.weight": "kept", "b.weight": "kept"})
        with open(self.path("out/model.safetensors.index.json"),
                  encoding="utf-8") as file:
            index = json.load(file)
        self.assertEqual(index["weight_map"]["a.weight.scale"],
                         shards["a.weight"])
        # Something else is done anew, and so is what is asked to be.
        self.assertEqual(set(quantize("--restart").values()), {"quantized"})
        self.assertEqual(quantize("--exclude", "a*", code=4), {})
        self.assertEqual(quantize("--exclude", "a*", "--force"),
                         {"a.weight": "copied", "b.weight": "quantized"})
        self.assertEqual(set(quantize("--force").values()), {"quantized"})
        # So are encodings that are to be elsewhere, and errors to be measured.
        elsewhere = "dns:///" + self.server.address
        for more in (("--model", "m"), ("--evaluate",),
                     ("--model", "m", "--server", elsewhere), ()):
            self.assertEqual(set(quantize(*more).values()), {"quantized"})
            self.assertEqual(set(quantize(*more).values()), {"kept"})
        self.check_metrics_of_kept_shards()
        shutil.rmtree(self.path("out"))
        self.assertEqual(set(quantize("--layout",
                                      "compressed-tensors").values()),
                         {"quantized"})
        self.assertEqual(set(quantize("--layout",
                                      "compressed-tensors").values()),
                         {"kept"})
        with open(self.path("out/config.json"), encoding="utf-8") as file:
            config = json.load(file)
        self.assertEqual(config["model_type"], "test")
        (group,) = config["quantization_config"]["config_groups"].values()
        self.assertEqual(group["targets"], ["a", "b"])
        self.run_quantctl("dequantize", self.path("out"), "-o",
                          self.path("back"))
        self.assertEqual(sorted(read_safetensors(self.path("back"))[0]),
                         ["a.weight", "b.weight"])
        self.write_json("model/model.safetensors.index.json",
                        {"weight_map": {"a": "../../etc/passwd"}})
        quantize(code=4)

    def check_metrics_of_kept_shards(self):
        """Those of a shard are measured once, and again where they are lost."""
        def evaluate(*more):
            report = self.json(
                "quantize", self.path("model"), "-o", self.path("out"),
                "--spec", "int8:per-channel", "--evaluate", *more)
            names = ("sqnr_db", "max_absolute_error", "mean_squared_error")
            return ([t["result"] for t in report["tensors"]],
                    [[t[name] for name in names] for t in report["tensors"]])

        whole = evaluate("--restart")
        self.assertEqual(evaluate(), (["kept"] * 2, whole[1]))
        path = self.path("out/model-00001-of-00002.safetensors")
        with open(path, "rb") as file:
            data = file.read()
        self.assertIn(b"quantctl.tensors", data)
        for broken in (b"quantctl.t_nsors", b"quantctl.tensors\":\"?"):
            with open(path, "wb") as file:
                # The header keeps its length.
                begin = data.index(b"quantctl.tensors")
                file.write(data[:begin] + broken + data[begin + len(broken):])
            self.assertEqual(evaluate(), (["quantized", "kept"], whole[1]))

if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
