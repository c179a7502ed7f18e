"""ONNX models that ONNX's checker and ONNX Runtime take, with a live server.

  onnx_test.py --quantd BINARY --quantctl BINARY [--node-modules DIR]

What takes numpy or onnx, or onnxruntime-node in DIR, is skipped without it.
"""

import argparse
import os
import subprocess
import sys
import unittest
import warnings

import live_server
from quantctl_case import QuantctlCase, read_safetensors, write_safetensors

try:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    import onnx_run
except ImportError:
    onnx = None
try:
    import torch
except ImportError:
    torch = None

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
arguments.add_argument("--node-modules",
                       default=os.path.join(live_server.ROOT,
                                            "build/node"))
options, unittest_arguments = arguments.parse_known_args()

DATA = os.path.join(live_server.ROOT, "tests/data/digits-cnn")
WEIGHTS = os.path.join(DATA, "model.safetensors")
ACTIVATIONS = os.path.join(DATA, "activations.safetensors")
IMAGES = os.path.join(DATA, "test.safetensors")


@unittest.skipIf(onnx is None, "numpy or onnx is not installed")
class OnnxTest(QuantctlCase):
    quantd = options.quantd
    quantctl = options.quantctl

    ACTIVATION_NAMES = ("conv1.input", "conv2.input", "fc1.input", "fc2.input",
                        "logits_fp32")

    @staticmethod
    def arrays(path):
        tensors, _ = read_safetensors(path)
        dtypes = {"F32": np.float32, "I64": np.int64}
        return {name: np.frombuffer(data, dtypes[dtype]).reshape(shape)
                for name, (dtype, shape, data) in tensors.items()}

    def write_digits(self, path, opset):
        """The digits network as an ONNX model whose values are named as the
        tensors of the statistics are."""
        weights = self.arrays(WEIGHTS)
        node = helper.make_node
        graph = helper.make_graph(
            [node("Conv", ["conv1.input", "conv1.weight", "conv1.bias"],
                  ["conv1.out"], pads=[1, 1, 1, 1]),
             node("Relu", ["conv1.out"], ["conv2.input"]),
             node("Conv", ["conv2.input", "conv2.weight", "conv2.bias"],
                  ["conv2.out"], pads=[1, 1, 1, 1]),
             node("Relu", ["conv2.out"], ["pool.input"]),
             node("MaxPool", ["pool.input"], ["pool.out"],
                  kernel_shape=[2, 2], strides=[2, 2]),
             node("Flatten", ["pool.out"], ["fc1.input"]),
             node("Gemm", ["fc1.input", "fc1.weight", "fc1.bias"],
                  ["fc1.out"], transB=1),
             node("Relu", ["fc1.out"], ["fc2.input"]),
             node("Gemm", ["fc2.input", "fc2.weight", "fc2.bias"],
                  ["logits_fp32"], transB=1)],
            "digits",
            [helper.make_tensor_value_info(
                "conv1.input", TensorProto.FLOAT, ["n", 1, 8, 8])],
            [helper.make_tensor_value_info(
                "logits_fp32", TensorProto.FLOAT, ["n", 10])] +
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
             for name, shape in (("conv2.input", ["n", 32, 8, 8]),
                                 ("fc1.input", ["n", 1024]),
                                 ("fc2.input", ["n", 128]))],
            [numpy_helper.from_array(value, name)
             for name, value in weights.items()])
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", opset)])
        model.ir_version = 6
        onnx.save(model, path)

    def calibrate(self, model, *spec, file=WEIGHTS):
        self.run_quantctl("calibrate", file, "--model", model, *spec)

    def export(self, opset):
        self.write_digits(self.path("model.onnx"), opset)
        return self.json("export", "--model", "digits", "--onnx",
                         self.path("model.onnx"), "-o", self.path("qdq.onnx"),
                         "--force")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for file, spec in ((WEIGHTS, ("--spec", "int8:per-channel")),
                           (ACTIVATIONS, ("--all", "--spec", "uint8")),
                           (IMAGES, ("--all", "--include", "logits_fp32",
                                     "--spec", "uint8"))):
            subprocess.run(
                [options.quantctl, "calibrate", file, "--model", "digits",
                 *spec], check=True, env=cls.environment,
                stdout=subprocess.DEVNULL)

    def parameters(self, tensor):
        return self.parameters_of("digits", tensor)

    def parameters_of(self, model, tensor):
        encoding = self.encoding(model, tensor)
        scale = np.array(encoding["scale"], np.float32)
        zero = np.array(encoding.get("zero_point", [0] * len(scale)),
                        np.float32)
        return scale, zero

    def fake_quantize(self, x, tensor, low, high):
        scale, zero = self.parameters(tensor)
        shape = (-1,) + (1,) * (x.ndim - 1)
        scale, zero = scale.reshape(shape), zero.reshape(shape)
        codes = np.clip(np.rint(x / scale) + zero, low, high)
        return codes, ((codes - zero) * scale).astype(np.float32)

    def test_TheCheckerTakesTheModelAndItHasTheCodes(self):
        report = self.export(opset=12)
        self.assertEqual((report["weight_count"], report["activation_count"],
                          report["bias_count"]), (4, 5, 4))
        self.assertEqual((report["opset_before"], report["opset"]), (12, 13))
        self.assertEqual(report["losses"], [])
        model = onnx.load(self.path("qdq.onnx"))
        onnx.checker.check_model(model, full_check=True)
        initializers = {i.name: numpy_helper.to_array(i)
                        for i in model.graph.initializer}
        for tensor, weight in self.arrays(WEIGHTS).items():
            if tensor.endswith("weight"):
                self.assertNotIn(tensor, initializers)
                codes, _ = self.fake_quantize(weight, tensor, -127, 127)
                stored = initializers[tensor + "_quantized"]
                self.assertEqual(stored.dtype, np.int8)
                np.testing.assert_array_equal(stored, codes)
            else:
                layer = tensor.removesuffix(".bias")
                scale = (self.parameters(layer + ".weight")[0] *
                         self.parameters(layer + ".input")[0])
                np.testing.assert_array_equal(
                    initializers[tensor + "_scale"], scale)
                stored = initializers[tensor + "_quantized"]
                self.assertEqual(stored.dtype, np.int32)
                np.testing.assert_array_equal(stored, np.rint(
                    weight.astype(np.float64) / scale))
        kinds = [node.op_type for node in model.graph.node]
        self.assertEqual((kinds.count("QuantizeLinear"),
                          kinds.count("DequantizeLinear")), (5, 13))
        self.assertFalse([name for name in initializers
                          if name.endswith(".bias")])

    def run_model(self, values, level):
        """The outputs that ONNX Runtime computes of qdq.onnx."""
        if not onnx_run.has_runtime(options.node_modules):
            self.skipTest("no onnxruntime-node")
        return onnx_run.run_in_runtime(
            options.node_modules, self.path("qdq.onnx"), values, self.folder,
            level)

    def test_OnnxRuntimeComputesWhatWeDo(self):
        self.export(opset=13)
        images = self.arrays(IMAGES)["images"]
        weights = {name: (self.fake_quantize(value, name, -127, 127)[1]
                          if name.endswith("weight") else value)
                   for name, value in self.arrays(WEIGHTS).items()}
        sys.path.insert(0, os.path.join(live_server.ROOT, "deploy/examples"))
        import digits

        def seen(x, tensor):
            return self.fake_quantize(x, tensor, 0, 255)[1]

        def layer(name):
            scale = (self.parameters(name + ".weight")[0] *
                     self.parameters(name + ".input")[0])
            bias = np.rint(weights[name + ".bias"] / scale) * scale
            return weights[name + ".weight"], bias

        for level in onnx_run.exact_levels():
            results = self.run_model(images, level)
            # Each step from what ONNX Runtime had before it, so that codes
            # that sums in another order move do not add up.
            x = np.maximum(digits.conv3x3(seen(images, "conv1.input"),
                                          *layer("conv1")), 0)
            steps = {"conv2.input": x}
            x = np.maximum(digits.conv3x3(results["conv2.input"],
                                          *layer("conv2")), 0)
            steps["fc1.input"] = digits.max_pool_2(x).reshape(len(images), -1)
            for name, tensor, after in (("fc1", "fc1.input", "fc2.input"),
                                        ("fc2", "fc2.input", "logits_fp32")):
                weight, bias = layer(name)
                x = results[tensor] @ weight.T + bias
                steps[after] = np.maximum(x, 0) if name == "fc1" else x
            for tensor, ours in steps.items():
                scale, _ = self.parameters(tensor)
                ours = seen(ours, tensor)
                off = np.abs(results[tensor] - ours) / scale
                self.assertLessEqual(off.max(), 1.001, (tensor, level))
                self.assertLess((off > 0.5).mean(), 1e-3, (tensor, level))
            labels = self.arrays(IMAGES)["labels"]
            right = (results["logits_fp32"].argmax(1) == labels).mean()
            self.assertGreater(right, 0.965)

    def export_torch(self, module, inputs):
        """Writes model.onnx as torch does, and returns its graph."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(module, inputs, self.path("model.onnx"),
                              opset_version=13, input_names=["images"],
                              dynamic_axes={"images": {0: "n"}})

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_WhatTorchExportedIsFoundByItsModules(self):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.conv1 = torch.nn.Conv2d(1, 32, 3, padding=1)
                self.conv2 = torch.nn.Conv2d(32, 64, 3, padding=1)
                self.fc1 = torch.nn.Linear(1024, 128)
                self.fc2 = torch.nn.Linear(128, 10)

            def forward(self, x):
                x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
                x = torch.max_pool2d(x, 2).flatten(1)
                return self.fc2(torch.relu(self.fc1(x)))

        net = Net()
        net.load_state_dict({name: torch.from_numpy(value.copy())
                             for name, value in self.arrays(WEIGHTS).items()})
        self.export_torch(net.eval(), torch.zeros(2, 1, 8, 8))
        report = self.json("export", "--model", "digits", "--include", "*.*",
                           "--onnx", self.path("model.onnx"), "-o",
                           self.path("qdq.onnx"))
        self.assertEqual((report["weight_count"], report["activation_count"],
                          report["losses"], report["not_quantized"]),
                         (4, 4, [], []))
        onnx.checker.check_model(onnx.load(self.path("qdq.onnx")),
                                 full_check=True)
        text = self.run_quantctl(
            "export", "--model", "digits", "--include", "conv*", "--onnx",
            self.path("model.onnx"), "-o", self.path("some.onnx"),
            "--names").stdout
        places = {name["tensor"]: name["onnx"] for name in report["names"]}
        self.assertIn(f"conv2.input is {places['conv2.input']}, by its weight",
                      text)
        self.assertIn(f"not quantized: {places['fc2.input']}, input of", text)
        images = self.arrays(IMAGES)
        (logits,) = (value for value in self.run_model(
            images["images"], "all").values() if value.shape == (500, 10))
        right = int((logits.argmax(1) == images["labels"]).sum())
        self.assertGreaterEqual(right, 486)

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_AFoldedWeightGetsScalesOfItsOwn(self):
        torch.manual_seed(5)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
            torch.nn.Conv2d(8, 8, 3)).eval()
        net[1].weight.data = torch.linspace(0.1, 15, 8)
        net[1].running_var.data.fill_(0.9)
        self.export_torch(net, torch.zeros(2, 3, 9, 9))
        graph = onnx.load(self.path("model.onnx")).graph
        folded = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
        _, place, bias = graph.node[0].input
        x = torch.rand(4, 3, 9, 9)
        tensors = {"0.input": x, "0.weight": net[0].weight.detach(),
                   "3.weight": net[3].weight.detach()}
        write_safetensors(self.path("t"), {
            name: ("F32", list(value.shape), value.numpy().tobytes())
            for name, value in tensors.items()})

        def export(spec, **options):
            self.run_quantctl("calibrate", self.path("t"), "--model", "folded",
                              "--spec", "*.weight=" + spec, "--spec",
                              "*.input=uint8", "--force-statistics")
            return self.json("export", "--model", "folded", "--onnx",
                             self.path("model.onnx"), "-o",
                             self.path("qdq.onnx"), "--force", **options)

        report = export("int8:per-channel")
        ((told, text, left_out),) = [
            (loss["tensor"], loss["what"], loss["left_out"])
            for loss in report["losses"]]
        self.assertEqual((told, left_out), ("0.weight", False))
        self.assertRegex(text, "up to 15.8 times .* computed again")
        self.assertEqual((report["weight_count"], report["bias_count"]), (2, 1))
        initializers = {i.name: numpy_helper.to_array(i) for i in onnx.load(
            self.path("qdq.onnx")).graph.initializer}
        scale = np.abs(folded[place]).max((1, 2, 3)) / np.float32(127)
        np.testing.assert_array_equal(initializers[place + "_scale"], scale)
        np.testing.assert_array_equal(
            initializers[place + "_quantized"],
            np.rint(folded[place] / scale[:, None, None, None]))
        # The bias has the product of the new scale and that of the input.
        np.testing.assert_array_equal(
            initializers[bias + "_scale"],
            scale * self.parameters_of("folded", "0.input")[0])

        for spec in ("int8:per-channel:mse", "int8:percentile=99.9%"):
            report = export(spec, code=1)
            (loss,) = report["losses"]
            self.assertEqual((loss["tensor"], loss["left_out"]),
                             ("0.weight", True))
            self.assertIn("computed from another weight", loss["what"])
            self.assertEqual(report["weight_count"], 1)

    def test_EveryMethodFitsTheWeightThatItWasComputedFrom(self):
        self.write_digits(self.path("model.onnx"), 21)
        for spec in ("int8:per-channel:mse", "int8:percentile=99.9%",
                     "int8:entropy", "int4:group:32:mse", "uint8",
                     "int8:sqnr", "float8_e4m3fn:per-channel"):
            with self.subTest(spec=spec):
                self.calibrate("methods", "--spec", "fc*=" + spec)
                report = self.json("export", "--model", "methods", "--onnx",
                                   self.path("model.onnx"), "-o",
                                   self.path("qdq.onnx"), "--force",
                                   "--include", "fc*")
                self.assertEqual((report["weight_count"], report["losses"]),
                                 (2, []))

    @unittest.skipIf(torch is None, "torch is not installed")
    def test_FactorsThatTorchTransposedAreFound(self):
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Sequential(
            torch.nn.Linear(16, 24), torch.nn.ReLU(),
            torch.nn.Linear(24, 24, bias=False)))
        self.export_torch(net, torch.zeros(2, 5, 16))
        x = torch.randn(64, 5, 16)
        with torch.no_grad():
            hidden = torch.relu(net[0][0](x))
        tensors = {"0.0.input": x, "0.2.input": hidden,
                   "0.0.weight": net[0][0].weight.detach(),
                   "0.2.weight": net[0][2].weight.detach()}
        write_safetensors(self.path("t"), {
            name: ("F32", list(value.shape), value.numpy().tobytes())
            for name, value in tensors.items()})
        for spec in ("int8:per-channel", "int4:group:8"):
            self.run_quantctl("calibrate", self.path("t"), "--model", "seq",
                              "--spec", "*.weight=" + spec, "--spec",
                              "*.input=uint8", "--force-statistics")
            report = self.json("export", "--model", "seq", "--onnx",
                               self.path("model.onnx"), "-o",
                               self.path("qdq.onnx"), "--force")
            self.assertEqual((report["weight_count"],
                              report["activation_count"],
                              report["not_quantized"]), (2, 2, []))
            # With groups, its scales have no product with that of the input.
            self.assertEqual([loss["tensor"] for loss in report["losses"]],
                             ["0.0.bias"] if "group" in spec else [])
            places = {name["tensor"]: name for name in report["names"]}
            self.assertTrue(places["0.2.weight"]["transposed"])
            model = onnx.load(self.path("qdq.onnx"))
            initializers = {i.name: i for i in model.graph.initializer}
            for layer in ("0.0", "0.2"):
                name = places[layer + ".weight"]["onnx"]
                encoding = self.encoding("seq", layer + ".weight")
                shape = [int(n) for n in encoding["scale_shape"]]
                scale = np.array(encoding["scale"], np.float32).reshape(shape)
                weight = tensors[layer + ".weight"].numpy()
                spread = np.repeat(scale, weight.shape[1] // shape[1], axis=1)
                codes = np.rint(weight / spread).astype(np.int8).T
                stored = initializers[name + "_quantized"]
                self.assertEqual(list(stored.dims), list(codes.shape))
                raw = np.frombuffer(stored.raw_data, np.uint8)
                if "int4" in spec:
                    low = int(encoding["qmin"])
                    codes = np.clip(codes, low, 7)
                    raw = np.stack([raw & 15, raw >> 4], 1).ravel()
                    codes = codes.astype(np.uint8) & 15
                np.testing.assert_array_equal(
                    raw.view(codes.dtype).reshape(codes.shape), codes)
        # Where the graph tells nothing, the user does.
        self.export_torch(net, torch.zeros(2, 5, 16))
        model = onnx.load(self.path("model.onnx"))
        for node in model.graph.node:
            node.name = ""
        onnx.save(model, self.path("model.onnx"))
        report = self.json("export", "--model", "seq", "--onnx",
                           self.path("model.onnx"), "-o",
                           self.path("qdq.onnx"), "--force", "--include",
                           "0.2.*", "--map",
                           "0.2.input=" + places["0.2.input"]["onnx"],
                           "--map",
                           "0.2.weight=" + places["0.2.weight"]["onnx"])
        self.assertEqual((report["weight_count"], report["activation_count"]),
                         (1, 1))
        self.json("export", "--model", "seq", "--onnx",
                  self.path("model.onnx"), "-o", self.path("qdq.onnx"),
                  "--force", "--map", "0.2.input=absent", code=2)

    def test_BlocksAndFourBitsTakeNewerOperators(self):
        for spec, opset in (("fc*=int4:group:32", 21),
                            ("fc*=float8_e4m3fn", 19), ("fc*=int16", 21)):
            with self.subTest(spec=spec):
                self.calibrate("blocks", "--spec", spec)
                self.write_digits(self.path("model.onnx"), 17)
                report = self.json("export", "--model", "blocks", "--include",
                                   "fc*", "--onnx", self.path("model.onnx"),
                                   "-o", self.path("qdq.onnx"), "--force")
                self.assertEqual((report["weight_count"], report["opset"]),
                                 (2, opset))
                model = onnx.load(self.path("qdq.onnx"))
                (node,) = [n for n in model.graph.node
                           if n.output[0] == "fc1.weight"]
                attributes = {a.name: a.i for a in node.attribute}
                self.assertEqual(attributes, {"axis": 1, "block_size": 32}
                                 if "group" in spec else {})

    def restored(self, file, *spec):
        """A file's tensors as quantd's codes stand for them."""
        self.run_quantctl("quantize", file, "-o", self.path("codes"),
                          "--no-store", "--force", *spec)
        self.run_quantctl("dequantize", self.path("codes"), "-o",
                          self.path("back"), "--force")
        return self.arrays(self.path("back"))

    def test_ScalesThatAreCodesHaveTheirOwnOperator(self):
        rng = np.random.default_rng(4)
        weights = {"fc.weight": rng.standard_normal((24, 128), np.float32),
                   # The last block is a part of one.
                   "last.weight": rng.standard_normal((8, 24), np.float32)}
        write_safetensors(self.path("w"), {
            name: ("F32", list(value.shape), value.tobytes())
            for name, value in weights.items()})
        transposed = [
            helper.make_node("MatMul", ["x", "w"], ["h"], "/fc/MatMul"),
            helper.make_node("Gemm", ["h", "last.weight"], ["y"],
                             "/last/Gemm", transB=1)]
        for spec, opset, axis, block, scales, outer in (
                ("lpbq", 21, 1, 64, (24, 2), 24),
                ("nvfp4", 23, 1, 16, (24, 8), 1)):
            with self.subTest(spec=spec):
                self.save(transposed, [("x", TensorProto.FLOAT, [2, 128])],
                          [("y", TensorProto.FLOAT, [2, 8])],
                          [numpy_helper.from_array(
                              weights["fc.weight"].T.copy(), "w"),
                           numpy_helper.from_array(weights["last.weight"],
                                                   "last.weight")], opset=17)
                self.run_quantctl("calibrate", self.path("w"), "--model", spec,
                                  "--spec", spec)
                result = self.run_quantctl(
                    "export", "--model", spec, "--onnx",
                    self.path("model.onnx"), "-o", self.path("qdq.onnx"),
                    "--force")
                self.assertEqual("kernels for float4" in result.stderr,
                                 spec == "nvfp4")
                model = onnx.load(self.path("qdq.onnx"))
                self.assertEqual(model.opset_import[0].version, opset)
                values = onnx_run.run_in_numpy(
                    model, {"x": np.ones((2, 128), np.float32)})
                ours = self.restored(self.path("w"), "--spec", spec)
                # To the last bit.
                np.testing.assert_array_equal(values["w"],
                                              ours["fc.weight"].T)
                np.testing.assert_array_equal(values["last.weight"],
                                              ours["last.weight"])
                makers = {node.output[0]: node for node in model.graph.node}
                dequantize = makers["w"]
                attributes = {a.name: a.i for a in dequantize.attribute}
                # Rows are columns here.
                self.assertEqual(attributes, {"axis": 1 - axis,
                                              "block_size": block})
                inner = makers[dequantize.input[1]]
                self.assertEqual(inner.op_type, "DequantizeLinear")
                self.assertEqual(values[inner.input[0]].shape, scales[::-1])
                self.assertEqual(values[inner.input[1]].size, outer)
                self.assertEqual({a.name: a.i for a in inner.attribute},
                                 {"axis": 1} if outer > 1 else {})
                types = {i.name: i.data_type for i in model.graph.initializer}
                self.assertEqual(
                    (types[dequantize.input[0]], types[inner.input[0]]),
                    (22, 2) if spec == "lpbq" else (23, 17))
        # Activations have no such scales.
        self.run_quantctl("calibrate", ACTIVATIONS, "--all", "--model",
                          "double", "--include", "fc1.input", "--spec",
                          "nvfp4")
        self.write_digits(self.path("model.onnx"), 17)
        report, _ = self.put_into("double", code=1)
        self.assertIn("for weights alone", report["error"]["message"])

    def encode(self, model, *entries):
        """Stores encodings as of our own JSON."""
        path = self.write_json("encodings", {
            "format": "quantd-encodings", "version": 1,
            "encodings": list(entries)})
        self.run_quantctl("import", path, "--model", model)

    def save(self, nodes, inputs, outputs, initializers=(), opset=13, **more):
        """A model of values (name, element type, shape)."""
        model = helper.make_model(
            helper.make_graph(
                nodes, "test",
                [helper.make_tensor_value_info(*value) for value in inputs],
                [helper.make_tensor_value_info(*value) for value in outputs],
                initializers, value_info=more.get("values")),
            opset_imports=[helper.make_opsetid("", opset)],
            functions=more.get("functions"))
        model.ir_version = 8 if more.get("functions") else 6
        onnx.save(model, self.path("model.onnx"))

    def put_into(self, model, *more, code=0):
        """Returns the report and the model written."""
        report = self.json("export", "--model", model, "--onnx",
                           self.path("model.onnx"), "-o",
                           self.path("qdq.onnx"), "--force", *more,
                           code=code)
        return report, onnx.load(self.path("qdq.onnx")) if code == 0 else None

    def test_WeightsLieAsTheLayerTakesThem(self):
        self.encode("lie", {"name": "fc.weight", "format": "int8",
                            "scale": [1, 0.5], "block_size": [1, 0],
                            "scale_shape": [2, 1]})
        weight = np.array([[10, 20], [30, 41]], np.float32)
        codes = np.array([[10, 20], [60, 82]])
        turn = helper.make_node("Transpose", ["w"], ["t"])

        def permute(*dimensions):
            return helper.make_node("Transpose", ["w"], ["t"],
                                    perm=dimensions)

        def layer(kind, *inputs, **attributes):
            return helper.make_node(kind, inputs, ["y"], "/fc/" + kind,
                                    **attributes)

        for nodes, transposed in (
                ([layer("MatMul", "x", "w")], True),
                ([layer("MatMul", "w", "x")], False),
                ([turn, layer("MatMul", "x", "t")], False),
                ([permute(1, 0), layer("MatMul", "x", "t")], False),
                ([permute(0, 1), layer("MatMul", "x", "t")], True),
                ([permute(0, 1), layer("Gemm", "x", "t", transB=1)], False),
                ([turn, helper.make_node("Transpose", ["t"], ["u"]),
                  layer("MatMul", "x", "u")], True),
                ([turn, layer("MatMul", "t", "x")], True),
                ([layer("Gemm", "x", "w")], True),
                ([layer("Gemm", "x", "w", transB=1)], False),
                ([turn, layer("Gemm", "x", "t", transB=1)], True),
                ([layer("Gemm", "w", "x")], False),
                ([layer("Gemm", "w", "x", transA=1)], True)):
            self.save(nodes, [("x", TensorProto.FLOAT, [2, 2])],
                      [("y", TensorProto.FLOAT, [2, 2])],
                      [numpy_helper.from_array(
                          weight.T.copy() if transposed else weight, "w")])
            for more in ((), ("--map", "fc.weight=w")):
                with self.subTest(nodes=nodes, more=more):
                    report, model = self.put_into("lie", *more)
                    self.assertEqual(
                        [name["transposed"] for name in report["names"]],
                        [transposed])
                    (stored,) = (numpy_helper.to_array(i)
                                 for i in model.graph.initializer
                                 if i.name == "w_quantized")
                    self.assertEqual(stored.tolist(),
                                     (codes.T if transposed else
                                      codes).tolist())

    def test_FactorsOfAModuleAreItsInputs(self):
        self.encode("factors", *({"name": name, "format": "uint8",
                                  "scale": [0.5 + n]} for n, name in enumerate(
                                      ("attn.scores.input",
                                       "attn.scores.input.1", "attn.input",
                                       "attn.input.1"))))

        def node(kind, *inputs, name, **attributes):
            return helper.make_node(kind, inputs[:-1], [inputs[-1]], name,
                                    **attributes)

        inputs = [(name, TensorProto.FLOAT, [2, 2]) for name in ("q", "k", "v")]
        outputs = [("y", TensorProto.FLOAT, [2, 2])]
        scores = node("MatMul", "q", "t", "s", name="/attn/scores/MatMul")
        turned = node("Transpose", "k", "t", name="/attn/scores/Transpose")
        mixed = node("MatMul", "s", "v", "y", name="/attn/MatMul")
        self.save([turned, scores, mixed], inputs, outputs)
        report, _ = self.put_into("factors", code=1)
        self.assertEqual({name["tensor"]: name["onnx"]
                          for name in report["names"]},
                         {"attn.scores.input": "q", "attn.scores.input.1": "k"})
        # What is quantized in another form is quantized.
        self.assertEqual([entry["onnx"] for entry in report["not_quantized"]],
                         ["s", "v"])
        lost = {loss["tensor"]: loss["what"] for loss in report["losses"]}
        self.assertIn("has several of attn: k, q, v", lost["attn.input"])
        self.assertIn("nothing but multiply its two inputs",
                      lost["attn.input.1"])
        # A module that does more, and one that multiplies three.
        for more in (node("Relu", "s", "r", name="/attn/scores/Relu"),
                     node("MatMul", "s", "v", "r",
                          name="/attn/scores/MatMul_1")):
            self.save([turned, scores, more,
                       node("MatMul", "r", "v", "y", name="/attn/MatMul")],
                      inputs, outputs)
            report, _ = self.put_into("factors", "--include",
                                      "attn.scores.input.1", code=1)
            self.assertIn("nothing but multiply its two inputs",
                          report["error"]["message"])

    def test_AWeightThatTheServerRefusesSpoilsNoOther(self):
        self.encode("spoiled",
                    {"name": "a", "format": "int8", "scale": [0.5],
                     "block_size": [0, 0, 0]},
                    {"name": "b", "format": "int8", "scale": [0.5]})
        weights = [numpy_helper.from_array(np.ones((2, 2), np.float32), name)
                   for name in "ab"]
        self.save([helper.make_node("Add", ["a", "b"], ["y"])], [],
                  [("y", TensorProto.FLOAT, [2, 2])], weights)
        report, _ = self.put_into("spoiled", code=1)
        self.assertEqual(report["weight_count"], 1)
        self.assertEqual([(loss["tensor"], loss["left_out"])
                          for loss in report["losses"]], [("a", True)])

    def biases(self, name, *more, code=0):
        """The report, and what each initializer of the written model is."""
        report, model = self.put_into(name, *more, code=code)
        onnx.checker.check_model(model, full_check=True)
        return report, model, {i.name: numpy_helper.to_array(i)
                               for i in model.graph.initializer}

    def test_BiasesAreCodesOfTheProductsScale(self):
        channels = {"format": "int8", "block_size": [1, 0],
                    "scale_shape": [3, 1]}
        self.encode("bias", {"name": "x", "format": "uint8", "scale": [0.5],
                             "zero_point": [128]},
                    {"name": "fc.weight", "scale": [0.25, 0.5, 1], **channels},
                    {"name": "one.weight", "format": "int8", "scale": [0.25]})
        rng = np.random.default_rng(1)
        weight = rng.integers(-9, 9, (3, 4)).astype(np.float32) / 4
        bias = np.array([1.3, -2.2, 0.7], np.float32)
        x = rng.integers(-9, 9, (2, 4)).astype(np.float32) / 2
        turn = helper.make_node("Transpose", ["fc.weight"], ["t"],
                                perm=[1, 0])

        def layer(kind, *inputs, **attributes):
            return helper.make_node(kind, inputs, ["y"], "/fc/" + kind,
                                    **attributes)

        def product(factor):
            return helper.make_node("MatMul", ["x", factor], ["p"],
                                    "/fc/MatMul")

        def added(*inputs):
            return helper.make_node("Add", inputs, ["y"], "/fc/Add")

        for nodes, factor, per_channel in (
                ([layer("Gemm", "x", "fc.weight", "b", transB=1)], 1, True),
                ([layer("Gemm", "x", "fc.weight", "b", transB=1,
                        alpha=2.)], 2, True),
                ([turn, layer("Gemm", "x", "t", "b")], 1, True),
                ([turn, product("t"), added("b", "p")], 1, True),
                ([turn, product("t"), added("p", "b")], 1, True),
                ([helper.make_node("Transpose", ["one.weight"], ["t"]),
                  product("t"), added("p", "b")], 1, False)):
            with self.subTest(nodes=nodes):
                name = "fc.weight" if per_channel else "one.weight"
                self.save(nodes, [("x", TensorProto.FLOAT, [2, 4])],
                          [("y", TensorProto.FLOAT, [2, 3])],
                          [numpy_helper.from_array(weight, name),
                           numpy_helper.from_array(bias, "b")])
                report, model, arrays = self.biases("bias", "--include", "x",
                                                    "--include", name)
                self.assertEqual((report["bias_count"], report["losses"]),
                                 (1, []))
                scale = np.array([0.25, 0.5, 1] if per_channel else 0.25,
                                 np.float32) * np.float32(0.5 * factor)
                np.testing.assert_array_equal(arrays["b_scale"], scale)
                np.testing.assert_array_equal(arrays["b_zero_point"],
                                              np.zeros_like(scale, np.int32))
                codes = np.rint(bias / scale).astype(np.int32)
                np.testing.assert_array_equal(arrays["b_quantized"], codes)
                self.assertNotIn("b", arrays)
                self.assertEqual([i.name for i in model.graph.input], ["x"])
                # Weights and inputs are codes as they are.
                y = onnx_run.run_in_numpy(model, {"x": x})["y"]
                scale = np.array([0.25, 0.5, 1] if per_channel else [0.25],
                                 np.float32)[:, None]
                seen = np.rint(weight / scale) * scale
                np.testing.assert_allclose(
                    y, factor * x @ seen.T + bias, atol=0.5)
                # Nothing is rounded but the bias.
                np.testing.assert_allclose(
                    y, factor * x @ seen.T + codes * (
                        scale.ravel() * np.float32(0.5 * factor)), rtol=1e-6)
                report, _, arrays = self.biases("bias", "--float-biases",
                                                "--include", "x", "--include",
                                                name)
                self.assertEqual(report["bias_count"], 0)
                np.testing.assert_array_equal(arrays["b"], bias)

    def test_ScalesAreRaisedWhereABiasWouldFillInt32(self):
        self.encode("dead", {"name": "x", "format": "uint8", "scale": [0.5],
                             "zero_point": [128]},
                    {"name": "fc.weight", "format": "int8",
                     "scale": [1e-9, 0.25, 3e-9], "block_size": [1, 0],
                     "scale_shape": [3, 1]},
                    {"name": "one.weight", "format": "int8", "scale": [1e-9]})
        rng = np.random.default_rng(1)
        x = rng.integers(-9, 9, (2, 4)).astype(np.float32) / 2
        bias = np.array([3, -1.3, 0], np.float32)

        def layer(*inputs, **attributes):
            return [helper.make_node("Gemm", inputs, ["y"], "/fc/Gemm",
                                     **attributes)]

        product = [helper.make_node("MatMul", ["x", "W"], ["p"], "/fc/MatMul"),
                   helper.make_node("Add", ["p", "b"], ["y"], "/fc/Add")]
        for nodes, initializer, name in (
                (layer("x", "fc.weight", "b", transB=1), "fc.weight",
                 "fc.weight"),
                (product, "W", "fc.weight"),
                (layer("x", "one.weight", "b", transB=1), "one.weight",
                 "one.weight")):
            with self.subTest(nodes=nodes):
                is_single = name == "one.weight"
                scale = np.array([[1e-9]] if is_single else
                                 [[1e-9], [.25], [3e-9]], np.float32)
                weight = (rng.integers(-100, 100, (3, 4)) * scale).astype(
                    np.float32)
                turned = weight.T if initializer == "W" else weight
                self.save(nodes, [("x", TensorProto.FLOAT, [2, 4])],
                          [("y", TensorProto.FLOAT, [2, 3])],
                          [numpy_helper.from_array(
                              np.ascontiguousarray(turned), initializer),
                           numpy_helper.from_array(bias, "b")])
                report, model, arrays = self.biases("dead", "--include", "x",
                                                    "--include", name)
                # 3 / (1e-9 * 0.5) is 5.6 times 2^30.
                scale[0] *= 8
                np.testing.assert_array_equal(
                    arrays[initializer + "_scale"], scale.squeeze())
                codes = np.rint(weight / scale).astype(np.int8)
                np.testing.assert_array_equal(
                    arrays[initializer + "_quantized"],
                    codes.T if initializer == "W" else codes)
                self.assertEqual(report["bias_count"], 1)
                self.assertLess(np.abs(arrays["b_quantized"]).max(), 1 << 30)
                ((tensor, what),) = [(loss["tensor"], loss["what"])
                                     for loss in report["losses"]]
                self.assertEqual(tensor, name)
                self.assertIn(f"scale: 1 of {scale.size} are larger", what)
                y = onnx_run.run_in_numpy(model, {"x": x})["y"]
                np.testing.assert_allclose(y, x @ (codes * scale).T + bias,
                                           atol=0.5 * scale.max() + 1e-6)
                report, _, arrays = self.biases("dead", "--float-biases",
                                                "--include", "x", "--include",
                                                name)
                self.assertEqual(report["losses"], [])
                self.assertLess(arrays[initializer + "_scale"].min(), 2e-9)

    def test_WeightsThatAreNotFiniteAreTold(self):
        self.encode("nan", {"name": "a", "format": "int8", "scale": [0.5]},
                    {"name": "b", "format": "int8", "scale": [0.5]})
        plain = np.ones((20, 20), np.float32)
        odd = plain.copy()
        odd[0, :3] = np.nan, -np.inf, np.nan
        self.save([helper.make_node("Add", ["a", "b"], ["y"])], [],
                  [("y", TensorProto.FLOAT, [20, 20])],
                  [numpy_helper.from_array(odd, "a"),
                   numpy_helper.from_array(plain, "b")])
        report, _ = self.put_into("nan")
        self.assertEqual(
            [(loss["tensor"], loss["what"], loss["left_out"])
             for loss in report["losses"]],
            [("a", "has 2 NaN and 1 infinities", False)])

    def test_BiasesStayWhereCodesAreNot(self):
        self.encode("stay", {"name": "x", "format": "int8", "scale": [0.5]},
                    {"name": "w", "format": "int8", "scale": [0.5]},
                    {"name": "v", "format": "float8_e4m3fn", "scale": [1]},
                    {"name": "c", "format": "int8", "scale": [1, 2],
                     "block_size": [0, 1], "scale_shape": [1, 2]},
                    {"name": "g", "format": "int4", "scale": [1, 2, 3, 4],
                     "block_size": [1, 1], "scale_shape": [2, 2]})
        weights = {name: np.eye(2, dtype=np.float32) for name in "wvcg"}
        weights["b"] = np.array([1, 2], np.float32)
        weights["row"] = np.array([[1, 2]], np.float32)

        def layer(*inputs, **attributes):
            return helper.make_node("Gemm", inputs, ["y"], **attributes)

        scales = "no single scale for each output"
        shape = "not of one dimension with an element for each output"
        for node, included, told in (
                (layer("x", "w", "b"), "w", None),
                (layer("x", "w", "b"), "x", None),
                (layer("x", "v", "b"), "*", None),
                (layer("x", "g", "b"), "*", scales),
                # Its channels are those of the input.
                (layer("x", "c", "b", transB=1), "*", scales),
                (layer("x", "w", "row"), "*", shape),
                (layer("x", "w", "b", beta=2.), "*", "a beta that is not 1"),
                (layer("x", "w", "b", alpha=-1.), "*",
                 "an alpha that is not above 0"),
                (layer("w", "x", "b"), "*", None)):
            with self.subTest(node=node, included=included):
                self.save([node], [("x", TensorProto.FLOAT, [2, 2])],
                          [("y", TensorProto.FLOAT, [2, 2])],
                          [numpy_helper.from_array(weights[name], name)
                           for name in node.input if name != "x"])
                used = [name for name in node.input if name in "xwvcg"]
                report, model = self.put_into(
                    "stay", *(arg for name in (
                        used if included == "*" else included)
                              for arg in ("--include", name)))
                self.assertEqual(report["bias_count"], 0)
                self.assertIn(node.input[2],
                              [i.name for i in model.graph.initializer])
                self.assertEqual(
                    [(loss["tensor"], loss["left_out"])
                     for loss in report["losses"]],
                    [] if told is None else [(node.input[2], False)])
                for loss in report["losses"]:
                    self.assertIn("stays float32: ", loss["what"])
                    self.assertIn(told, loss["what"])

    def test_AFloatBiasBehindAQuantizedInputTakesRound(self):
        """ONNX Runtime's optimizer adds a Round there."""
        self.encode("round", *({"name": name, "format": "int8",
                                "scale": [0.5]} for name in "xwm"))
        shapes = {"w": [2, 2, 1, 1], "m": [2, 2], "b": [2]}
        four, two = [1, 2, 1, 1], [2, 2]

        def node(kind, *inputs, output="y"):
            return helper.make_node(kind, inputs, [output])

        product = node("MatMul", "x", "m", output="h")
        for nodes, size, more, opset in (
                ([node("Conv", "x", "w", "b")], four, [], 10),
                ([node("Conv", "x", "w", "b")], four, ["--float-biases"], 11),
                ([node("Conv", "x", "w", "b")], four, ["--include", "x"], 11),
                ([node("Conv", "x", "w", "b")], four, ["--include", "w"], 10),
                ([node("Conv", "x", "w")], four, ["--float-biases"], 10),
                ([node("ConvTranspose", "x", "w", "b")], four, [], 11),
                ([node("Gemm", "x", "m", "b")], two, [], 10),
                ([node("Gemm", "x", "m", "b")], two, ["--float-biases"], 11),
                ([product, node("Add", "h", "b")], two, [], 10),
                ([product, node("Add", "b", "h")], two, ["--float-biases"],
                 11),
                ([product, node("Add", "h", "x")], two, [], 10)):
            with self.subTest(nodes=nodes, more=more):
                self.save(nodes, [("x", TensorProto.FLOAT, size)],
                          [("y", TensorProto.FLOAT, size)],
                          [numpy_helper.from_array(
                              np.ones(shapes[name], np.float32), name)
                           for name in sorted({name for n in nodes
                                               for name in n.input} &
                                              set(shapes))], opset=9)
                if "--include" not in more:
                    more = [*more, "--include", "x", "--include",
                            nodes[0].input[1]]
                report, _ = self.put_into("round", *more)
                self.assertEqual(report["opset"], opset)

    def test_BiasesThatStayAreCounted(self):
        self.encode("count", {"name": "w", "format": "int4",
                              "scale": [1, 2, 3, 4], "block_size": [1, 1],
                              "scale_shape": [2, 2]},
                    {"name": "x", "format": "int8", "scale": [0.5, 0.25],
                     "block_size": [0, 1], "scale_shape": [1, 2]},
                    *({"name": f"h{i}", "format": "int8", "scale": [0.5]}
                      for i in range(2)))
        factors = ["x", "h0", "h1", "y"]
        factor = np.eye(2, dtype=np.float32)
        self.save([helper.make_node("Gemm", [factors[i], "w", f"b{i}"],
                                    [factors[i + 1]]) for i in range(3)],
                  [("x", TensorProto.FLOAT, [2, 2])],
                  [("y", TensorProto.FLOAT, [2, 2])],
                  [numpy_helper.from_array(factor, "w")] +
                  [numpy_helper.from_array(factor[0], f"b{i}")
                   for i in range(3)])
        report, _ = self.put_into("count")
        self.assertEqual(
            [(loss["tensor"], loss["what"]) for loss in report["losses"]],
            [("b0", "stays float32: the input of its layer has several "
              "scales"),
             ("b1", "stays float32, as do 1 other biases: the weight of its "
              "layer has no single scale for each output")])

    def test_ABiasOfTwoLayersHasTheScalesOfEach(self):
        self.encode("two", {"name": "x", "format": "int8", "scale": [0.5]},
                    {"name": "w1", "format": "int8", "scale": [0.5]},
                    {"name": "w2", "format": "int8", "scale": [0.125]})
        factor = np.eye(2, dtype=np.float32)
        bias = np.array([1, 2], np.float32)
        nodes = [helper.make_node("Gemm", ["x", w, "b"], [y], transB=1)
                 for w, y in (("w1", "y1"), ("w2", "y2"))]
        outputs = [(name, TensorProto.FLOAT, [2, 2]) for name in ("y1", "y2")]
        initializers = [numpy_helper.from_array(factor, "w1"),
                        numpy_helper.from_array(factor, "w2"),
                        numpy_helper.from_array(bias, "b")]
        inputs = [("x", TensorProto.FLOAT, [2, 2])]
        self.save(nodes, inputs, outputs, initializers)
        report, model, arrays = self.biases("two")
        self.assertEqual(report["bias_count"], 2)
        self.assertNotIn("b", arrays)
        self.assertEqual([arrays[name].tolist() for name in (
            "b_quantized", "b_quantized_1")], [[4, 8], [16, 32]])
        values = onnx_run.run_in_numpy(model, {"x": factor})
        for name in ("y1", "y2"):
            self.assertEqual(values[name].tolist(), (factor + bias).tolist())
        # What else takes it keeps it.
        self.save(nodes + [helper.make_node("Neg", ["b"], ["z"])], inputs,
                  outputs + [("z", TensorProto.FLOAT, [2])], initializers)
        _, _, arrays = self.biases("two")
        np.testing.assert_array_equal(arrays["b"], bias)

    def test_ABiasThatIsNotFiniteStays(self):
        self.encode("beyond", {"name": "x", "format": "int8",
                               "scale": [2.**-20]},
                    {"name": "w", "format": "int8", "scale": [2.**-10]})
        node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], "last",
                                transB=1)
        for value, told in ((0.99, None), (1., None), (1.01, "w"), (-2., "w"),
                            (1e9, "w"), (np.nan, "b"), (np.inf, "b")):
            with self.subTest(value=value):
                fits = bool(np.isfinite(value))
                self.save([node], [("x", TensorProto.FLOAT, [2, 2])],
                          [("y", TensorProto.FLOAT, [2, 2])],
                          [numpy_helper.from_array(
                              np.zeros((2, 2), np.float32), "w"),
                           numpy_helper.from_array(
                               np.array([0, value], np.float32), "b")])
                report, _, arrays = self.biases("beyond")
                self.assertEqual(report["bias_count"], int(fits))
                self.assertEqual("b" in arrays, not fits)
                self.assertEqual([(loss["tensor"], loss["left_out"])
                                  for loss in report["losses"]],
                                 [(told, False)] if told else [])
                if fits:
                    np.testing.assert_allclose(
                        arrays["b_quantized"][1] * float(arrays["b_scale"]),
                        value, rtol=1e-8)
                    self.assertLessEqual(arrays["b_quantized"].max(), 1 << 30)
                else:
                    self.assertIn("element 1, ", report["losses"][0]["what"])
                    self.assertIn("in last", report["losses"][0]["what"])

    def test_BiasesThatAreEqualDoNotMixLayers(self):
        names = ["fc1.input", "fc2.input", "fc1.output", "fc2.output"]
        self.encode("equal", *({"name": name, "format": "uint8",
                                "scale": [0.5 + n]}
                               for n, name in enumerate(names)))
        factor = np.ones((2, 2), np.float32)
        for told in (True, False):
            with self.subTest(told=told):
                def node(kind, inputs, output, name=""):
                    return helper.make_node(kind, inputs, [output],
                                            name if told else "")

                self.save(
                    [node("Identity", ["fc1.bias"], "fc2.bias", "Identity_1"),
                     node("MatMul", ["x", "w1"], "m1", "/fc1/MatMul"),
                     node("Add", ["m1", "fc1.bias"], "s1", "/fc1/Add"),
                     node("Relu", ["s1"], "r", "/Relu"),
                     node("MatMul", ["r", "w2"], "m2", "/fc2/MatMul"),
                     node("Add", ["m2", "fc2.bias"], "y", "/fc2/Add")],
                    [("x", TensorProto.FLOAT, [2, 2])],
                    [("y", TensorProto.FLOAT, [2, 2])],
                    [numpy_helper.from_array(factor, "w1"),
                     numpy_helper.from_array(factor, "w2"),
                     numpy_helper.from_array(factor[0], "fc1.bias")])
                report, _ = self.put_into("equal")
                self.assertEqual(report["losses"], [])
                self.assertEqual(
                    {name["tensor"]: name["onnx"]
                     for name in report["names"]},
                    dict(zip(names, ("x", "r", "s1", "y"))))
                self.assertEqual(report["activation_count"], 4)

    def test_HalfPrecisionStaysWhatItIs(self):
        int8 = {"format": "int8", "scale": [0.5]}
        self.encode("half", {"name": "x", **int8}, {"name": "y", **int8},
                    {"name": "w", "format": "int8", "scale": [0.25]})
        for type_, dtype, opset in (
                (TensorProto.FLOAT16, np.float16, 13),
                (TensorProto.BFLOAT16, None, 13)):
            with self.subTest(type=type_):
                values = np.array([[1, -2], [3.3, 0.1]], np.float32)
                raw = (values.astype(dtype) if dtype else
                       (values.view(np.uint32) >> 16).astype(np.uint16))
                self.save(
                    [helper.make_node("Mul", ["x", "w"], ["y"]),
                     helper.make_node("Add", ["y", "y"], ["z"])],
                    [("x", type_, [2, 2])],
                    [("z", type_, [2, 2]), ("y", type_, [2, 2])],
                    [helper.make_tensor("w", type_, [2, 2], raw.tobytes(),
                                        raw=True)], opset=opset)
                report, model = self.put_into("half")
                self.assertEqual((report["weight_count"],
                                  report["activation_count"]), (1, 2))
                # Types that do not agree are found here.
                onnx.checker.check_model(model, full_check=True)
                types = {value.name: value.type.tensor_type.elem_type
                         for value in onnx.shape_inference.infer_shapes(
                             model, strict_mode=True).graph.value_info}
                for node in model.graph.node:
                    if node.op_type == "QuantizeLinear":
                        self.assertEqual(types[node.input[0]],
                                         TensorProto.FLOAT)
                    if node.op_type == "Mul":
                        self.assertEqual([types[name] for name in node.input],
                                         [type_, type_])
                (codes,) = (numpy_helper.to_array(i)
                            for i in model.graph.initializer
                            if i.name == "w_quantized")
                self.assertEqual(codes.tolist(), [[4, -8], [13, 0]])

    def test_OnnxRuntimeComputesHalfPrecisionAsWeDo(self):
        self.encode("half-2", {"name": "x", "format": "int8", "scale": [0.5]},
                    {"name": "y", "format": "uint8", "scale": [0.25],
                     "zero_point": [128]},
                    {"name": "w", "format": "int8", "scale": [0.25]})
        w = np.array([[1, -2, 0.3]], np.float16)
        self.save([helper.make_node("Cast", ["in"], ["x"],
                                    to=TensorProto.FLOAT16),
                   helper.make_node("Mul", ["x", "w"], ["y"]),
                   helper.make_node("Cast", ["y"], ["out"],
                                    to=TensorProto.FLOAT)],
                  [("in", TensorProto.FLOAT, [3, 3])],
                  [("out", TensorProto.FLOAT, [3, 3])],
                  [numpy_helper.from_array(w, "w")],
                  values=[helper.make_tensor_value_info(
                      name, TensorProto.FLOAT16, [3, 3]) for name in "xy"])
        report, _ = self.put_into("half-2")
        self.assertEqual((report["weight_count"], report["activation_count"]),
                         (1, 2))
        x = np.array([[0.3, -0.8, 9.9], [70, -70, 4], [0, 1.26, -3.3]],
                     np.float32)

        def seen(values, scale, zero, low, high):
            codes = np.clip(np.rint(values.astype(np.float32) / scale) + zero,
                            low, high)
            return ((codes - zero) * np.float32(scale)).astype(np.float16)

        ours = seen(seen(x.astype(np.float16), 0.5, 0, -128, 127) *
                    seen(w, 0.25, 0, -128, 127), 0.25, 128, 0, 255)
        for level in ("disabled", "all"):
            np.testing.assert_array_equal(self.run_model(x, level)["out"],
                                          ours.astype(np.float32))

    def test_WhatTheTypeOfAnActivationIsIsNotGuessed(self):
        self.encode("types", {"name": "x", "format": "int8", "scale": [0.5]},
                    {"name": "h", "format": "int8", "scale": [0.5]},
                    {"name": "d", "format": "int8", "scale": [0.5]})
        nodes = [helper.make_node("Cast", ["x"], ["h"],
                                  to=TensorProto.FLOAT16),
                 helper.make_node("Cast", ["x"], ["d"],
                                  to=TensorProto.DOUBLE)]
        outputs = [("d", TensorProto.DOUBLE, [2])]
        self.save(nodes, [("x", TensorProto.FLOAT, [2])], outputs)
        report, _ = self.put_into("types", code=1)
        lost = {l["tensor"]: l["what"] for l in report["losses"]}
        self.assertIn("infer its shapes", lost["h"])
        self.assertIn("float32, float16 and bfloat16", lost["d"])
        self.assertEqual(report["activation_count"], 1)
        self.save(nodes, [("x", TensorProto.FLOAT, [2])], outputs,
                  values=[helper.make_tensor_value_info(
                      "h", TensorProto.FLOAT16, [2])])
        report, _ = self.put_into("types", code=1)
        self.assertEqual([l["tensor"] for l in report["losses"]], ["d"])
        # A channel of a dimension that the activation does not have.
        self.encode("rank", {"name": "x", "format": "int8", "scale": [1, 2],
                             "block_size": [1, 0], "scale_shape": [2, 1]})
        report, _ = self.put_into("rank", code=1)
        self.assertIn("has 1", report["error"]["message"])

    def test_FloatsOfEightBitsOverflowAsTheyAreTo(self):
        for no_saturation in (False, True):
            self.encode("fp8", {"name": "x", "format": "float8_e4m3fn",
                                "scale": [1], "no_saturation": no_saturation})
            self.save([helper.make_node("Relu", ["x"], ["y"])],
                      [("x", TensorProto.FLOAT, [2])],
                      [("y", TensorProto.FLOAT, [2])])
            report, model = self.put_into("fp8")
            self.assertEqual(report["opset"], 19)
            attributes = {
                node.op_type: {a.name: a.i for a in node.attribute}
                for node in model.graph.node}
            self.assertEqual(attributes["QuantizeLinear"],
                             {"saturate": 0} if no_saturation else {})
            self.assertEqual(attributes["DequantizeLinear"], {})

    def test_OldOperatorsAreNotTakenForNewOnes(self):
        self.encode("old", {"name": "x", "format": "int8", "scale": [0.5]})
        values = ([("x", TensorProto.FLOAT, [2, 3, 1, 1])],
                  [("y", TensorProto.FLOAT, [2, 3, 1, 1])])
        normalize = dict(inputs=["x", "s", "b", "m", "v"], outputs=["y"])
        three = [helper.make_tensor(n, TensorProto.FLOAT, [3], [1, 2, 3])
                 for n in "sbmv"]

        def refused(text):
            result = self.run_quantctl(
                "export", "--model", "old", "--onnx", self.path("model.onnx"),
                "-o", self.path("x"), code=4)
            self.assertIn(text, result.stderr)
            self.assertFalse(os.path.exists(self.path("x")))

        self.save([helper.make_node("Add", ["x", "x"], ["y"])], *values,
                  opset=6)
        refused("from before 7")
        self.save([helper.make_node("BatchNormalization", spatial=0,
                                    **normalize)], *values, three, opset=8)
        refused("BatchNormalization is another one from 9 on")
        self.save([helper.make_node("BatchNormalization", **normalize)],
                  *values, three, opset=8)
        _, model = self.put_into("old")
        onnx.checker.check_model(model, full_check=True)
        self.assertEqual(model.opset_import[0].version, 10)

    def test_FunctionsOfAModelGoWithIt(self):
        self.encode("functions", {"name": "x", "format": "int16",
                                  "scale": [0.5]})
        values = ([("x", TensorProto.FLOAT, [2])],
                  [("y", TensorProto.FLOAT, [2])])
        for op_type, taken in (("Relu", True), ("GroupNormalization", False)):
            function = helper.make_function(
                "own", "F", ["a"], ["b"],
                [helper.make_node(op_type, ["a"], ["b"])],
                [helper.make_opsetid("", 15)])
            self.save([helper.make_node("F", ["x"], ["y"], domain="own")],
                      *values, opset=15, functions=[function])
            if not taken:
                report, _ = self.put_into("functions", code=4)
                self.assertIn("GroupNormalization is another one",
                              report["error"]["message"])
                continue
            _, model = self.put_into("functions")
            self.assertEqual(model.opset_import[0].version, 21)
            self.assertEqual(model.functions[0].opset_import[0].version, 21)
            self.assertEqual(model.ir_version, 10)

    def test_ModelsThatAreNotSoundAreRefused(self):
        self.encode("sound", {"name": "w", "format": "int8", "scale": [0.5]})
        values = ([("x", TensorProto.FLOAT, [2])],
                  [("y", TensorProto.FLOAT, [2])])
        nodes = [helper.make_node("Add", ["x", "w"], ["y"])]

        def initializer(dims, raw, type_=TensorProto.FLOAT):
            tensor = TensorProto(name="w", data_type=type_, raw_data=raw)
            tensor.dims.extend(dims)
            return [tensor]

        for tensor in (initializer([2], b"1234"), initializer([-2], b""),
                       initializer([2], bytes(8), TensorProto.FLOAT16),
                       initializer([1 << 40, 1 << 40], bytes(8))):
            self.save(nodes, *values, tensor)
            report, _ = self.put_into("sound", code=4)
            self.assertEqual(report["error"]["reason"], "FILE_MALFORMED")
            self.assertIn("do not fit the dimensions",
                          report["error"]["message"])
        self.save(nodes, *values, initializer([2], bytes(8)))
        with open(self.path("model.onnx"), "rb") as file:
            whole = file.read()
        # An attribute whose length goes beyond its node, at the very end.
        broken = whole[:-1] + b"\x3a\x0a\x0a\x08\x2a\x7f" + bytes(4)
        for data in (b"", whole[:-1], whole[:40], broken, b"\x08\x07",
                     bytes(100)):
            with open(self.path("model.onnx"), "wb") as file:
                file.write(data)
            report, _ = self.put_into("sound", code=4)
            self.assertEqual(report["error"]["reason"], "FILE_MALFORMED")
        # One scale for each of three, for a weight of two.
        self.save(nodes, *values, initializer([2], bytes(8)))
        self.encode("sound", {"name": "w", "format": "int8",
                              "scale": [1, 2, 3], "block_size": [1],
                              "scale_shape": [3]})
        report, _ = self.put_into("sound", code=1)
        self.assertIn("3 scales, the weight of the model takes 2",
                      report["error"]["message"])

    def test_InitializersAreTensors(self):
        self.write_digits(self.path("model.onnx"), 13)
        model = onnx.load(self.path("model.onnx"))
        os.mkdir(self.path("beside"))
        onnx.save(model, self.path("beside/model.onnx"),
                  save_as_external_data=True, location="weights",
                  size_threshold=0)
        typed = onnx.load(self.path("model.onnx"))
        for tensor in typed.graph.initializer:
            values = numpy_helper.to_array(tensor).ravel().tolist()
            tensor.ClearField("raw_data")
            tensor.float_data.extend(values)
        onnx.save(typed, self.path("typed.onnx"))
        spec = ("--spec", "int8:per-channel", "--no-store")
        names = ("name", "shape", "dtype", "candidates")

        def measured(path):
            report = self.json("evaluate", path, "--spec", "int4:group:32")
            return sorted(([tensor[name] for name in names]
                           for tensor in report["tensors"]), key=str)

        def codes(path):
            tensors, metadata = read_safetensors(path)
            return tensors, {key: value for key, value in metadata.items()
                             if key.startswith("quantd.")}

        self.run_quantctl("quantize", WEIGHTS, "-o", self.path("plain"), *spec)
        for number, name in enumerate(("model.onnx", "beside/model.onnx",
                                       "typed.onnx")):
            with self.subTest(name=name):
                path = self.path(name)
                self.run_quantctl("quantize", path, "-o",
                                  self.path("out.safetensors"), "--force",
                                  *spec)
                self.assertEqual(codes(self.path("out.safetensors")),
                                 codes(self.path("plain")))
                self.assertEqual(measured(path), measured(WEIGHTS))
                self.run_quantctl("calibrate", path, "--model",
                                  f"onnx-{number}", "--spec",
                                  "int8:per-channel")
                self.assertEqual(self.encoding(f"onnx-{number}", "fc1.weight"),
                                 self.encoding("digits", "fc1.weight"))
        self.run_quantctl("dequantize", self.path("plain"), "-o",
                          self.path("back.safetensors"))
        report = self.json("evaluate", self.path("back.safetensors"),
                           "--reference", self.path("beside/model.onnx"))
        self.assertEqual(len(report["tensors"]), 4)
        self.run_quantctl("sweep", path, "--spec", "int8", "--spec", "nf4",
                          "--min-sqnr", "15", "-o", self.path("mixture.txt"))
        self.run_quantctl("report", path, "-o", self.path("page.html"))
        for name in ("model.onnx", "weights"):
            result = self.run_quantctl(
                "quantize", self.path("beside/model.onnx"), "-o",
                self.path("beside/" + name), "--force", *spec, code=2)
            self.assertIn("an output other than the input", result.stderr)

    def test_DataInOtherFilesAreTakenIn(self):
        self.export(opset=13)
        os.mkdir(self.path("beside"))
        beside = self.path("beside/model.onnx")
        onnx.save(onnx.load(self.path("model.onnx")), beside,
                  save_as_external_data=True, location="weights",
                  size_threshold=0)
        report = self.json("export", "--model", "digits", "--onnx", beside,
                           "-o", self.path("one.onnx"))
        self.assertEqual((report["weight_count"], report["bias_count"],
                          report["losses"]), (4, 4, []))
        with open(self.path("one.onnx"), "rb") as one, \
                open(self.path("qdq.onnx"), "rb") as other:
            self.assertEqual(one.read(), other.read())
        # The model's own files are never replaced, by whatever name.
        os.symlink("weights", self.path("beside/link"))
        os.link(self.path("beside/weights"), self.path("hard"))
        with open(self.path("beside/weights"), "rb") as file:
            weights = file.read()
        for name in ("beside/model.onnx", "beside/weights", "beside/link",
                     "hard"):
            with self.subTest(name=name):
                result = self.run_quantctl(
                    "export", "--model", "digits", "--onnx", beside, "--force",
                    "-o", self.path(name), code=2)
                self.assertIn("an output other than the input", result.stderr)
        with open(self.path("beside/weights"), "rb") as file:
            self.assertEqual(file.read(), weights)
        # What is not quantized comes along, too.
        self.run_quantctl("export", "--model", "digits", "--onnx", beside,
                          "-o", self.path("some.onnx"), "--include", "fc1.*")
        os.remove(self.path("beside/weights"))
        kept = {tensor.name: tensor for tensor in onnx.load(
            self.path("some.onnx")).graph.initializer}
        np.testing.assert_array_equal(
            numpy_helper.to_array(kept["conv1.weight"]),
            self.arrays(WEIGHTS)["conv1.weight"])
        result = self.run_quantctl("export", "--model", "digits", "--onnx",
                                   beside, "-o", self.path("none.onnx"),
                                   code=4)
        self.assertIn(self.path("beside/weights"), result.stderr)

    def test_DataOfBranchesInOtherFilesAreRefused(self):
        self.save_branches()
        self.encode("away", {"name": "c.weight", "format": "int8",
                             "scale": [0.5]})
        model = onnx.load(self.path("model.onnx"))
        tensor = next(attribute.g for attribute in
                      model.graph.node[2].attribute
                      if attribute.name == "else_branch").initializer[0]
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="away")
        tensor.ClearField("raw_data")
        with open(self.path("model.onnx"), "wb") as file:
            file.write(model.SerializeToString())
        result = self.run_quantctl("export", "--model", "away", "--onnx",
                                   self.path("model.onnx"), "-o",
                                   self.path("qdq.onnx"), code=4)
        self.assertIn('tensor "e.weight" has its data in another file',
                      result.stderr)
        self.assertIn("first make one file of the model", result.stderr)
        self.assertFalse(os.path.exists(self.path("qdq.onnx")))

    def test_NoDataInOtherFilesPassUnseen(self):
        def tensor(data_type=TensorProto.FLOAT):
            away = TensorProto(data_type=data_type, dims=[2])
            away.data_location = TensorProto.EXTERNAL
            away.external_data.add(key="location", value="away")
            return away

        def in_constant(model):
            node = helper.make_node("Constant", [], ["shape"], name="sizes")
            node.attribute.add(name="value", type=4).t.CopyFrom(
                tensor(TensorProto.INT64))
            model.graph.node.append(node)

        def in_list(model):
            attribute = model.graph.node[0].attribute.add(name="list", type=9)
            attribute.tensors.append(tensor())

        def in_indices(model):
            sparse = model.graph.sparse_initializer.add(dims=[8])
            sparse.values.CopyFrom(helper.make_tensor(
                "sparse", TensorProto.FLOAT, [2], [1, 2]))
            sparse.indices.CopyFrom(tensor(TensorProto.INT64))

        def in_function(model):
            node = helper.make_node("Constant", [], ["y"])
            node.attribute.add(name="value", type=4).t.CopyFrom(tensor())
            function = model.functions.add(name="f", domain="own")
            function.node.append(node)

        self.export(opset=13)
        away = self.path("away")
        with open(away, "wb") as file:
            file.write(bytes(16))
        constant = 'attribute "value" of the Constant node '
        for put, told in ((in_constant, constant + '"sizes"'),
                          (in_list, 'attribute "list" of the '),
                          (in_indices, 'tensor "sparse"'),
                          (in_function, constant + '"y"')):
            with self.subTest(put=put.__name__):
                model = onnx.load(self.path("model.onnx"))
                put(model)
                path = self.path("holder.onnx")
                with open(path, "wb") as file:
                    file.write(model.SerializeToString())
                call = ("export", "--model", "digits", "--onnx", path,
                        "--force", "-o")
                result = self.run_quantctl(*call, self.path("out.onnx"),
                                           code=4)
                self.assertIn(told, result.stderr)
                self.assertIn(" has its data in another file", result.stderr)
                result = self.run_quantctl(*call, away, code=2)
                self.assertIn("an output other than the input", result.stderr)

    def test_SpecsAreNoOutputs(self):
        specs = self.path("specs.txt")
        with open(specs, "w", encoding="utf-8") as file:
            file.write("int8\n")
        entries = self.path("entries")
        with open(entries, "w", encoding="utf-8") as file:
            file.write("-1 0 1 2")
        codebook = "codebook4:entries=" + entries
        for call in (
                ("quantize", WEIGHTS, "--spec", "@" + specs, "-o", specs),
                ("quantize", WEIGHTS, "--spec", codebook, "-o", entries),
                ("sweep", WEIGHTS, "--spec", codebook, "--min-sqnr", "9",
                 "-o", entries),
                ("report", WEIGHTS, "--spec", codebook, "-o", entries),
                ("report", "--model", "m", "--spec", codebook, "-o", entries)):
            with self.subTest(call=call):
                result = self.run_quantctl(*call, "--force", code=2)
                self.assertIn("an output other than the input", result.stderr)

    def test_ShapesTakeNoFilesOfData(self):
        self.write_digits(self.path("model.onnx"), 13)
        onnx.save(onnx.load(self.path("model.onnx")),
                  self.path("shapes.onnx"), save_as_external_data=True,
                  location="weights", size_threshold=0)
        os.remove(self.path("weights"))
        self.run_quantctl("export", "--model", "digits", "--format",
                          "aimet-0.6.1", "-o", self.path("aimet"))
        self.run_quantctl("import", self.path("aimet"), "--model", "shapes",
                          "--tensors", self.path("shapes.onnx"))
        self.assertEqual(
            self.encoding("shapes", "fc1.weight")["block_size"], ["1", "0"])
        # What reads data says which file is missing.
        result = self.run_quantctl("evaluate", self.path("shapes.onnx"),
                                   code=4)
        self.assertIn(self.path("weights"), result.stderr)

    def save_branches(self):
        """A model with a weight in a Constant and weights in an If."""
        weight = np.arange(64, dtype=np.float32).reshape(8, 8)

        def branch(name, constant):
            value = numpy_helper.from_array(weight, name)
            node = helper.make_node("MatMul", ["p", name], [name + ".out"])
            return helper.make_graph(
                [helper.make_node("Constant", [], [name], value=value),
                 node] if constant else [node], name,
                [], [helper.make_tensor_value_info(
                    name + ".out", TensorProto.FLOAT, [8, 8])],
                [] if constant else [value])

        self.save(
            [helper.make_node("Constant", [], ["c.weight"], "/c/Constant",
                              value=numpy_helper.from_array(weight)),
             helper.make_node("MatMul", ["x", "c.weight"], ["p"], "/c/MatMul"),
             helper.make_node("If", ["which"], ["y"], "choice",
                              then_branch=branch("t.weight", True),
                              else_branch=branch("e.weight", False))],
            [("x", TensorProto.FLOAT, [8, 8]), ("which", TensorProto.BOOL, [])],
            [("y", TensorProto.FLOAT, [8, 8])])
        return weight

    def test_ConstantsAreTensorsAndBranchesAreTold(self):
        weight = self.save_branches()
        command = ("quantize", self.path("model.onnx"), "-o",
                   self.path("out.safetensors"), "--no-store")
        result = self.run_quantctl(*command, code=1)
        for name in ("t.weight", "e.weight"):
            self.assertIn(f"tensor {name}: left out: it is in a graph within "
                          'the If node "choice"', result.stderr)
        self.assertIn("2 tensors are not read", result.stderr)
        self.assertFalse(os.path.exists(self.path("out.safetensors")))
        self.run_quantctl(*command, "--keep-going", code=1)
        self.run_quantctl("dequantize", self.path("out.safetensors"), "-o",
                          self.path("back.safetensors"))
        back = self.arrays(self.path("back.safetensors"))
        self.assertEqual(sorted(back), ["c.weight"])
        np.testing.assert_allclose(back["c.weight"], weight, atol=.3)
        for filter_, code in (((), 1), (("--include", "c.*"), 0),
                              (("--exclude", "[te].*"), 1),
                              (("--exclude", "?.weigh*", "--include", "c*"),
                               2)):
            with self.subTest(filter=filter_):
                self.run_quantctl("evaluate", self.path("model.onnx"),
                                  *filter_, code=code)

    def test_WeightsInBranchesStayAndAreTold(self):
        self.save_branches()
        weights = [{"name": name + ".weight", "format": "int8",
                    "scale": [0.5]} for name in "cte"]
        self.encode("branches-all", *weights)
        self.encode("branches", weights[0], weights[2])
        report = self.json("export", "--model", "branches", "--onnx",
                           self.path("model.onnx"), "-o",
                           self.path("qdq.onnx"), code=1)
        self.assertEqual(report["weight_count"], 1)
        self.assertEqual([(loss["tensor"], loss["left_out"])
                          for loss in report["losses"]],
                         [("e.weight", True), ("t.weight", False)])
        for loss in report["losses"]:
            self.assertIn('the If node "choice"', loss["what"])
        model = onnx.load(self.path("qdq.onnx"))
        onnx.checker.check_model(model, full_check=True)
        codes = {tensor.name: numpy_helper.to_array(tensor)
                 for tensor in model.graph.initializer}["c.weight_quantized"]
        self.assertEqual(codes.ravel().tolist(),
                         [min(2 * i, 127) for i in range(64)])
        report, _ = self.put_into("branches", "--include", "c.weight")
        self.assertEqual({loss["left_out"] for loss in report["losses"]},
                         {False})

    def test_DataFarInAnotherFileAreRead(self):
        values = np.arange(64, dtype=np.float32)
        offset = 5 << 30
        with open(self.path("data"), "wb") as file:
            # Nothing of it is on the disk but the end.
            file.seek(offset)
            file.write(values.tobytes())
        tensor = TensorProto(name="w", data_type=TensorProto.FLOAT,
                             data_location=TensorProto.EXTERNAL)
        tensor.dims.extend([8, 8])
        for key, value in (("location", "data"), ("offset", offset),
                           ("length", values.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self.save([helper.make_node("MatMul", ["x", "w"], ["y"])],
                  [("x", TensorProto.FLOAT, [8, 8])],
                  [("y", TensorProto.FLOAT, [8, 8])], [tensor])
        self.run_quantctl("quantize", self.path("model.onnx"), "-o",
                          self.path("q.safetensors"), "--no-store")
        self.run_quantctl("dequantize", self.path("q.safetensors"), "-o",
                          self.path("back.safetensors"))
        np.testing.assert_allclose(
            self.arrays(self.path("back.safetensors"))["w"].ravel(), values,
            atol=.3)

    def test_WhatIsQuantizedAlreadyIsRefused(self):
        self.export(opset=13)
        for command in (("quantize", "-o", self.path("x.safetensors")),
                        ("quantize", "-o", self.path("x.safetensors"),
                         "--requantize"), ("evaluate",), ("calibrate",
                                                          "--model", "x")):
            result = self.run_quantctl(command[0], self.path("qdq.onnx"),
                                       *command[1:], code=4)
            self.assertIn("the model takes it as codes", result.stderr)
            self.assertNotIn("quantctl dequantize", result.stderr)
        # Activations alone are no tensors.
        self.export_only("conv1.input")
        self.run_quantctl("evaluate", self.path("qdq.onnx"))

    def test_CodesUnderACastAreTold(self):
        codes = np.ones((4, 4), np.int8)
        self.save([helper.make_node("Cast", ["w"], ["f"], to=TensorProto.FLOAT),
                   helper.make_node("Mul", ["f", "s"], ["v"]),
                   helper.make_node("MatMul", ["x", "v"], ["h"]),
                   helper.make_node("MatMul", ["h", "u"], ["y"])],
                  [("x", TensorProto.FLOAT, [4, 4])],
                  [("y", TensorProto.FLOAT, [4, 4])],
                  [numpy_helper.from_array(codes, "w"),
                   numpy_helper.from_array(np.float32(.5), "s"),
                   numpy_helper.from_array(codes.astype(np.float32), "u")])
        for command in (("quantize", "-o", self.path("x.safetensors"),
                         "--no-store"), ("evaluate",),
                        ("calibrate", "--model", "cast")):
            result = self.run_quantctl(command[0], self.path("model.onnx"),
                                       *command[1:])
            self.assertEqual(result.stderr.count(
                "makes floats of the integers w by a Cast and a Mul with s"), 1)
        self.run_quantctl("export", "--model", "cast", "--onnx",
                          self.path("model.onnx"), "-o", self.path("qdq.onnx"))

    def export_only(self, tensor):
        self.run_quantctl("export", "--model", "digits", "--include", tensor,
                          "--onnx", self.path("model.onnx"), "-o",
                          self.path("qdq.onnx"), "--force")

    def test_WhatCannotBeDoneIsSaid(self):
        self.write_digits(self.path("model.onnx"), 12)
        model = onnx.load(self.path("model.onnx"))
        model.graph.node.append(helper.make_node(
            "Softmax", ["logits_fp32"], ["probabilities"]))
        onnx.save(model, self.path("softmax.onnx"))
        result = self.run_quantctl(
            "export", "--model", "digits", "--onnx", self.path("softmax.onnx"),
            "-o", self.path("x"), code=4)
        self.assertIn("Softmax is another one from 13 on", result.stderr)
        self.run_quantctl("export", "--model", "digits", "--onnx", WEIGHTS,
                          "-o", self.path("x"), code=4)
        self.calibrate("odd", "--spec", "int5")
        result = self.json("export", "--model", "odd", "--onnx",
                           self.path("model.onnx"), "-o", self.path("x"),
                           code=1)
        self.assertIn("no tensor of the model", result["error"]["message"])
        self.assertFalse(os.path.exists(self.path("x")))
        imported = self.json("export", "--model", "digits", "--format",
                             "aimet-0.6.1", "-o", self.path("aimet"))
        self.assertEqual(imported["encoding_count"], 9)
        self.json("import", self.path("aimet"), "--model", "digits-2",
                  "--tensors", self.path("model.onnx"))
        self.assertEqual(
            self.encoding("digits-2", "fc1.weight")["block_size"], ["1", "0"])

if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
