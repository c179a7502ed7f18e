"""The Python client with a live quantd, and with a server that misbehaves.

  client_test.py --quantd BINARY --quantctl BINARY
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import unittest
from unittest import mock

import package  # pylint: disable=unused-import
# pylint: disable=wrong-import-order
import grpc
import numpy as np

import live_server
import quantd
import quantd.aio
from quantd import client as client_module
from quantd import _arrays, _exchange, _requests, _stream
from quantd.tensor import FORMATS
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import encoding_pb2
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import tensor_pb2 as te

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()


def data_of(*shape, seed=1, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def strict_scale(x, qmax):
    """SYMMETRY_STRICT over all but the first axis."""
    absmax = np.abs(x.astype(np.float64)).reshape(len(x), -1).max(axis=1)
    return (absmax / qmax).astype(np.float32)


def read_safetensors(path):
    """{name: bytes}."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    header.pop("__metadata__", None)
    return {name: data[slice(*info["data_offsets"])]
            for name, info in header.items()}


class ClientTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.server = live_server.LiveServer(options.quantd)
        cls.addClassCleanup(cls.server.stop)
        cls.client = quantd.Client(cls.server.address)
        cls.addClassCleanup(cls.client.close)

    def assert_fails(self, reason, call, *args, **kwargs):
        with self.assertRaises(quantd.QuantdError) as caught:
            call(*args, **kwargs)
        self.assertEqual(caught.exception.reason, reason)
        return caught.exception

    def test_QuantizesLikeNumpyWhateverTheChunking(self):
        x = data_of(64, 1000)
        x[3, 5], x[4, 6] = np.nan, np.inf
        finite = np.where(np.isfinite(x), x, 0)
        scale = strict_scale(finite, 127)
        with np.errstate(invalid="ignore"):
            codes = np.clip(np.rint(x / scale[:, None]), -127, 127)
        want = np.where(np.isnan(x), 0, codes).astype(np.int8)
        for chunk_bytes in (64, 4100, 1 << 20):
            with self.subTest(chunk_bytes=chunk_bytes), quantd.Client(
                    self.server.address, chunk_bytes=chunk_bytes) as client:
                got = client.quantize(x, "int8:per-channel")
                np.testing.assert_array_equal(got.codes, want)
                np.testing.assert_array_equal(got.encoding.scale,
                                              scale[:, None])
                self.assertEqual(got.codes.dtype, np.int8)
                self.assertEqual(
                    (got.summary.count, got.summary.nan_count,
                     got.summary.positive_infinity_count), (64000, 1, 1))
                np.testing.assert_array_equal(
                    client.dequantize(got), want * scale[:, None])

    def test_EveryFormatHasTheBytesOfQuantctl(self):
        # 37 columns, so that the last blocks are ragged and a byte is padded.
        x = data_of(5, 37)
        codebook = (-1, -0.25, 0.25, 1)
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(folder, "w.npy")
            np.save(source, x)
            for name in FORMATS:
                if name.startswith(("int", "uint")) and name[-1] not in "2458":
                    continue
                with self.subTest(format=name):
                    target = os.path.join(folder, "codes")
                    entries = (":entries=" + ",".join(map(str, codebook))
                               if "codebook" in name else "")
                    subprocess.run(
                        [options.quantctl, "quantize", source, "-o", target, "--force",
                         "--spec", name + entries,
                         "--server", self.server.address],
                        check=True, stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE)
                    got = self.client.quantize(x, quantd.EncodingSpec(
                        name, codebook=codebook if "codebook" in name else ()))
                    self.assertIn(got.codes.tobytes(),
                                  read_safetensors(target).values())
                    info = quantd.format_info(name)
                    self.assertEqual(got.codes.nbytes,
                                     info.size_bytes(x.size))
                    self.assertEqual(any(got.encoding.block_size),
                                     info.comes_in_blocks)
                    self.assertEqual(got.unpacked().shape, x.shape)
                    # Inline, the encoding gives the same bytes again.
                    again = self.client.quantize(x, got.encoding)
                    np.testing.assert_array_equal(again.codes, got.codes)
                    self.assertEqual(again.encoding, got.encoding)
                    error = self.client.compare(
                        x, self.client.dequantize(got))
                    (measured,) = self.client.evaluate(x, [got.encoding])
                    self.assertEqual(error.sqnr_db, measured.overall.sqnr_db)

    def test_ZeroPointsMayLieBetweenCodes(self):
        # AIMET's grid of int2: -3, -1, 1 and 3.
        grid = quantd.Encoding("int2", [2], [-0.5])
        self.assertTrue(grid.zero_points_are_real)
        name = quantd.TensorName("acme/real", "grid")
        self.client.put_encoding(name, grid)
        stored = self.client.get_encoding(name).encoding
        np.testing.assert_array_equal(stored.zero_point.ravel(), [-0.5])
        self.assertEqual(stored.zero_point.dtype, np.float32)
        x = np.float32([-9, -3, -2.25, -1, -0.25, 0.25, 1, 3, 9])
        got = self.client.quantize(x, quantd.EncodingReference(name))
        np.testing.assert_array_equal(got.unpacked(),
                                      [-2, -2, -2, -1, -1, 0, 0, 1, 1])
        back = [-3, -3, -3, -1, -1, 1, 1, 3, 3]
        np.testing.assert_array_equal(self.client.dequantize(got), back)
        np.testing.assert_array_equal(got.dequantize(), back)
        self.assertEqual((got.summary.clipped_low_count,
                          got.summary.clipped_high_count), (1, 1))
        (measured,) = self.client.evaluate(x, [grid])
        self.assertAlmostEqual(measured.overall.sum_squared_error,
                               float(((back - x) ** 2).sum()))
        # Both ends of the range are met, channel by channel.
        x = data_of(8, 300)
        for word in ("uint8", "int4", "uint2", "int16"):
            got = self.client.quantize(
                x, word + ":per-channel:asymmetric:real-zero-point")
            back = self.client.dequantize(got)
            for row, restored in zip(x, back):
                for end in (row.argmin(), row.argmax()):
                    self.assertAlmostEqual(restored[end], row[end], delta=2e-6)
            np.testing.assert_array_equal(got.dequantize(), back)
        error = self.assert_fails("METHOD_INVALID", self.client.quantize, x,
                                  "uint8:mse:real-zero-point")
        self.assertIn("real_zero_point", error.message)
        self.assert_fails("SYMMETRY_INVALID", self.client.quantize, x,
                          "int8:strict:real-zero-point")
        self.assert_fails("ZERO_POINT_RANGE", self.client.quantize, x,
                          quantd.Encoding("int2", [2], [-2.5]))

    def test_EachScaleMayHaveARangeOfItsOwn(self):
        x = data_of(3, 50)
        low, high = [-1, -2, 0], [1, 6, 0.5]
        got = self.client.quantize(x, quantd.EncodingSpec(
            "uint8", quantd.per_channel(), method="fixed", range=(low, high)))
        np.testing.assert_allclose(got.encoding.scale.ravel(),
                                   np.subtract(high, low) / 255, rtol=1e-6)
        np.testing.assert_array_equal(got.encoding.zero_point.ravel(),
                                      [127, 64, 0])
        error = self.assert_fails(
            "METHOD_INVALID", self.client.quantize, x, quantd.EncodingSpec(
                "uint8", quantd.per_channel(), method="fixed",
                range=(low[:2], high[:2])))
        self.assertIn("expected 3, one for each scale", error.message)

    def test_BiasesAreInt32(self):
        bias = np.float32([0.5, -1.25, 3e-5, 100])
        scale = np.float32([1e-6, 2e-6, 1e-7, 1e-8])
        encoding = quantd.Encoding("int32", scale, block_size=(1,))
        got = self.client.quantize(bias, encoding)
        self.assertEqual(got.codes.dtype, np.int32)
        want = np.clip(np.rint(bias / scale).astype(np.float64), -2**31,
                       2**31 - 1)
        np.testing.assert_array_equal(got.codes, want)
        self.assertEqual(got.summary.clipped_high_count, 1)
        back = self.client.dequantize(got)
        np.testing.assert_array_equal(
            back, got.codes.astype(np.float32) * scale)
        np.testing.assert_array_equal(got.dequantize(), back)
        # From a plain array of codes as well.
        np.testing.assert_array_equal(
            self.client.dequantize(got.codes, encoding), back)
        self.assert_fails("ZERO_POINT_RANGE", self.client.quantize, bias,
                          quantd.Encoding("int32", [1e-6], [1]))

    def test_ReferencesToInt32MayLeaveItOut(self):
        encoding = quantd.Encoding("int32", [0.5])
        name = quantd.TensorName("acme/int32", "bias")
        self.client.put_encoding(name, encoding)
        for count in (3, 1 << 20):
            bias = np.resize(np.float32([0.5, 1, 1e5]), count)
            got = self.client.quantize(bias, quantd.EncodingReference(), name=name,
                                       omit_encoding=True)
            self.assertEqual(got.encoding, None)
            np.testing.assert_array_equal(
                got.codes.reshape(-1).view(np.int32), bias * 2)

    def test_Int32OfTorchIsNotTakenForUint16(self):
        try:
            import torch  # pylint: disable=import-outside-toplevel
        except ImportError:
            self.skipTest("without torch")
        encoding = quantd.Encoding("int32", [0.5])
        name = quantd.TensorName("acme/int32", "torch")
        self.client.put_encoding(name, encoding)
        reference = quantd.EncodingReference(name)
        codes = torch.tensor([1, 2, 65535], dtype=torch.int32)
        want = [0.5, 1, 32767.5]

        def in_chunks(source):
            return np.concatenate(list(self.client.dequantize_chunks(
                [codes[:2], codes[2:]], source, shape=(3,))))

        self.assertEqual(in_chunks(encoding).tolist(), want)
        for act in (lambda: in_chunks(reference),
                    lambda: self.client.dequantize(codes, reference)):
            error = self.assert_fails("ARGUMENT_INVALID", act)
            self.assertIn("does not say which", error.message)
        # Beyond 16 bits there is nothing to choose from.
        self.assertEqual(self.client.dequantize(codes + 1, reference).tolist(),
                         [1, 1.5, 32768])
        for spec, size in ((encoding, 12), ("uint16:asymmetric", 6)):
            got = self.client.quantize(torch.tensor(want), spec,
                                       omit_encoding=True)
            self.assertEqual(got.codes.dtype, torch.int32)
            self.assertIn(f"{size} bytes", repr(got))
            self.assertEqual(got.to_dicts()[0]["codes_bytes"], size)
            if spec is encoding:
                # The result knows what it is of.
                self.assertEqual(
                    self.client.dequantize(got, reference).tolist(), want)
        big = self.client.quantize(torch.tensor([1e5]), encoding,
                                   omit_encoding=True)
        self.assertIn("4 bytes", repr(big))

    def test_EveryElementTypeGoesThereAndBack(self):
        for name in ("float32", "float16", "float64", "bfloat16"):
            with self.subTest(element_type=name):
                if name == "bfloat16":
                    x = (data_of(9, 50).view(np.uint32) >> 16).astype(np.uint16)
                    real = (x.astype(np.uint32) << 16).view(np.float32)
                else:
                    x = real = data_of(9, 50, dtype=name)
                got = self.client.quantize(x, "int8:per-channel",
                                           element_type=name)
                self.assertEqual(got.element_type, name)
                wide = np.float64 if name == "float64" else np.float32
                scale = strict_scale(real, 127)[:, None].astype(wide)
                want = np.rint(real.astype(wide) / scale)
                np.testing.assert_array_equal(got.codes, want)
                back = self.client.dequantize(got)
                self.assertEqual((back.dtype, back.shape), (x.dtype, x.shape))
                if name == "float64":
                    np.testing.assert_array_equal(back, want * scale)

    def test_ViewsScalarsAndEmptyArraysKeepTheirShape(self):
        x = data_of(8, 6)
        for array in (x.T, x[::2, 1:4], np.float32(0.5), x[:0], x[:, :0],
                      x[None, :, None, :]):
            got = self.client.quantize(array, "int8")
            self.assertEqual(got.codes.shape, np.shape(array))
            self.assertEqual(self.client.dequantize(got).shape,
                             np.shape(array))
            np.testing.assert_array_equal(
                got.codes, np.rint(np.asarray(array) /
                                   got.encoding.scale.ravel()[0]))

    def test_OutputsAreWrittenInPlace(self):
        x = data_of(100, 1000)
        codes, reals = np.zeros_like(x, np.int8), np.zeros_like(x)
        got = self.client.quantize(x, "int8", out=codes)
        self.assertTrue(np.shares_memory(got.codes, codes))
        np.testing.assert_array_equal(codes,
                                      self.client.quantize(x, "int8").codes)
        back = self.client.dequantize(got, out=reals)
        self.assertTrue(np.shares_memory(back, reals))
        np.testing.assert_array_equal(reals, self.client.dequantize(got))
        # Known before anything is sent, and only after the header.
        self.assertEqual(self.assert_fails(
            "ARGUMENT_INVALID", self.client.quantize, x, "int8",
            out=codes[1:]).field, "out")
        self.client.quantize(x, "int8", store=True,
                             name=quantd.TensorName("m", "out"))
        self.assertEqual(self.assert_fails(
            "ARGUMENT_INVALID", self.client.quantize, x,
            quantd.EncodingReference(quantd.TensorName("m", "out")),
            out=codes[1:]).field, "out")

    def test_LargeTensorsGoInPartsWithTheSameResult(self):
        x = data_of(70, 1001)
        x[5, 7], x[60, 8], x[65, 9] = np.nan, np.inf, 100
        name = quantd.TensorName("acme/parts", "t")
        for spec in ("int8:per-channel", "int4:group:16", "uint16", "nf4"):
            want = self.client.quantize(x, spec, name=name, store=True)
            reference = quantd.EncodingReference(name)
            reals = self.client.dequantize(want)
            with mock.patch.object(_exchange, "_PART_BYTES", 10000):
                for source in (want.encoding, reference):
                    with self.subTest(spec=spec, source=type(source)):
                        before = self.server.metric(
                            "quantd_tensor_seconds_count")
                        out = np.empty_like(want.codes)
                        for chunk_bytes in (3200, 1 << 20):
                            with quantd.Client(
                                    self.server.address,
                                    chunk_bytes=chunk_bytes) as client:
                                got = client.quantize(x, source, out=out)
                                self.assertTrue(
                                    np.shares_memory(got.codes, out))
                                np.testing.assert_array_equal(got.codes,
                                                              want.codes)
                                self.assertEqual(got.summary, want.summary)
                                self.assertEqual(got.encoding, want.encoding)
                                np.testing.assert_array_equal(
                                    client.dequantize(got), reals)
                        # Large headers make large parts.
                        if spec == "uint16":
                            self.assertGreater(self.server.metric(
                                "quantd_tensor_seconds_count"), before + 50)
                again = quantd.TensorName("acme/parts", "again")
                stored = self.client.quantize(x, want.encoding, name=again,
                                              store=True)
                self.assertEqual(stored.etag,
                                 self.client.get_encoding(again).etag)
                self.assert_fails("ARGUMENT_INVALID", self.client.quantize, x,
                                  reference, out=np.empty(3, np.int8))
                self.assert_fails("NON_FINITE_REJECTED", self.client.quantize,
                                  x, want.encoding, nan_policy="reject")

    def test_TensorsOfTorchAreTensors(self):
        try:
            import torch  # pylint: disable=import-outside-toplevel
        except ImportError:
            self.skipTest("without torch")
        for dtype, spec, of_codes in (
                (torch.bfloat16, "int8:per-channel", torch.int8),
                (torch.bfloat16, "int4:group:32", torch.uint8),
                (torch.float32, "int12", torch.int16),
                (torch.float16, "uint16:asymmetric", torch.int32),
                (torch.float64, "float8_e4m3fn", torch.uint8)):
            with self.subTest(dtype=dtype, spec=spec):
                x = torch.from_numpy(data_of(10, 70)).to(dtype)
                array, element_type = _arrays.to_numpy(x)
                want = self.client.quantize(array, spec,
                                            element_type=element_type)
                got = self.client.quantize(x, spec)
                self.assertEqual(got.codes.dtype, of_codes)
                np.testing.assert_array_equal(got.codes.numpy(), want.codes)
                np.testing.assert_array_equal(got.unpacked().numpy(),
                                              want.unpacked())
                restored = self.client.dequantize(want)
                for back in (
                        self.client.dequantize(got), got.dequantize(),
                        next(self.client.dequantize_many([got])),
                        self.client.dequantize(
                            got.codes, got.encoding, shape=x.shape,
                            element_type=got.element_type),
                        self.client.dequantize(got,
                                               out=torch.empty_like(x))):
                    self.assertEqual((back.dtype, back.shape),
                                     (dtype, x.shape))
                    np.testing.assert_array_equal(_arrays.to_numpy(back)[0],
                                                  restored)
                self.assertIn(f"{got.to_dicts()[0]['codes_bytes']:,} bytes",
                              repr(got))
        for shape in ((), (0, 4)):
            got = self.client.quantize(torch.ones(shape), "int8")
            self.assertEqual(
                {got.codes.shape, got.unpacked().shape, got.dequantize().shape,
                 self.client.dequantize(got).shape}, {torch.Size(shape)})
        out = torch.empty(10, 70, dtype=torch.int8)
        x = torch.from_numpy(data_of(10, 70))
        codes = self.client.quantize(x, "int8", out=out).codes
        self.assertEqual(codes.data_ptr(), out.data_ptr())
        # What reads no tensor of torch is not given one.
        self.assertIsInstance(
            self.client.dequantize(self.client.quantize(x.numpy(), "int8")),
            np.ndarray)
        with self.assertRaises(quantd.QuantdError):
            self.client.dequantize(torch.full((3,), -1, dtype=torch.int32),
                                   quantd.Encoding("uint16", [1.0]))

    def test_AStateDictNeedsNoSorting(self):
        try:
            import torch  # pylint: disable=import-outside-toplevel
        except ImportError:
            self.skipTest("without torch")
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4),
            torch.nn.Linear(4, 2).to(torch.bfloat16))
        state = {**model.state_dict(), "0._extra_state": None,
                 "mask": torch.ones(2, 2, dtype=torch.bool)}
        weights = ["0.weight", "2.weight"]
        got = list(self.client.quantize_many(state.items(), "int8"))
        self.assertEqual([tensor.name.tensor for tensor in got], weights)
        for tensor in got:
            back = tensor.dequantize()
            self.assertEqual(back.dtype, state[tensor.name.tensor].dtype)
        # Told to, it takes all, and what is no tensor of reals is an error.
        got = list(self.client.quantize_many(
            state.items(), "int8", min_rank=0, on_error="return"))
        self.assertEqual([str(tensor.name.tensor) for tensor in got],
                         list(state))
        wrong = [str(error) for error in got if isinstance(error, Exception)]
        self.assertEqual(len(wrong), 3)
        for name, text in zip(("1.num_batches_tracked", "0._extra_state",
                               "mask"), wrong):
            self.assertIn(f"tensor '{name}': expected", text)
        for dtype in (np.uint16, complex, np.longdouble):
            with self.subTest(dtype=dtype):
                # Not left out: it was meant to be quantized.
                error = self.assert_fails(
                    "ARGUMENT_INVALID", lambda dtype=dtype: list(
                        self.client.quantize_many(
                            [("w", np.ones((2, 2), dtype))], "int8")))
                self.assertIn("tensor 'w'", str(error))
        error = self.assert_fails(
            "ARGUMENT_INVALID", lambda: list(self.client.quantize_many(
                [("b", data_of(3)), ("n", np.arange(4))], "int8")))
        self.assertIn("none of 2 is one; min_rank=0", str(error))

    def test_SpecsByPatternAreForWhatTheyMatchAlone(self):
        weights = {f"layers.{n}.{name}": data_of(*shape, seed=n)
                   for n in range(3) for name, shape in (
                       ("q_proj.weight", (4, 64)), ("norm.weight", (64,)),
                       ("embed.weight", (9, 64)))}
        got = list(self.client.quantize_many(weights.items(), {
            "layers.0.*proj.weight": "int8", "*_proj.weight": "int4:group:32"
        }, model="acme/patterns", store=True))
        self.assertEqual(
            [(tensor.name.tensor, tensor.encoding.format) for tensor in got],
            [("layers.0.q_proj.weight", "int8"),
             ("layers.1.q_proj.weight", "int4"),
             ("layers.2.q_proj.weight", "int4")])
        jobs = [quantd.QuantizeJob(weights["layers.0.norm.weight"],
                                   name="norm"),
                quantd.QuantizeJob(weights["layers.0.norm.weight"], "int8",
                                   name="other")]
        self.assertEqual(
            [tensor.encoding.format for tensor in self.client.quantize_many(
                jobs, {"no?m": "int4"})], ["int4", "int8"])
        # Before anything is sent, and before anybody asks for a result.
        for source, items in (
                ({"*proj.weight": "int8", "*.bias": "int4"}, weights.items()),
                ({"*norm.weight": "int8"}, weights.items()),
                ({"*weight": "int8", "*proj.weight": "int4"}, weights.items()),
                ({"no*": "int4", "other": "int8"}, jobs),
                ({"*proj.weight": "int8x"}, weights.items()),
                ({"*": "int8"}, iter(weights.items())),
                ({3: "int8"}, weights.items()), ({"": "int8"}, list(weights)),
                ({"*": "int8"}, [])):
            with self.subTest(source=source):
                self.assert_fails(
                    "ARGUMENT_INVALID", self.client.quantize_many, items,
                    source, model="acme/nothing", store=True)
        self.assertEqual(list(self.client.list_encodings("acme/nothing")), [])
        list(self.client.calibrate_many(
            weights.items(), model="acme/patterns",
            contribution=quantd.Contribution("file", 1)))
        for call in (
                lambda patterns: self.client.sweep(
                    "acme/patterns", ["int8"], patterns=patterns),
                lambda patterns: list(self.client.compute_encodings(
                    "acme/patterns",
                    overrides=[(pattern, "int8") for pattern in patterns]))):
            call(["*norm*", "*.2.*"])
            error = self.assert_fails("ARGUMENT_INVALID", call,
                                      ["*norm*", "*.3.*"])
            self.assertIn("'*.3.*'", str(error))
        # Patterns of overrides take; those of a sweep select.
        self.client.sweep("acme/patterns", ["int8"],
                          patterns=["*norm*", "*.0.norm*"])
        error = self.assert_fails(
            "ARGUMENT_INVALID", list, self.client.compute_encodings(
                "acme/patterns",
                overrides=[("*norm*", "int8"), ("*.0.norm*", "int4")]))
        self.assertIn("earlier patterns take all 1", str(error))

    def test_ResultsAreRowsOfTables(self):
        x = data_of(8, 64)
        metrics = self.client.evaluate(x, ["int8", "int4"])
        rows = metrics.to_dicts()
        self.assertEqual([row["label"] for row in rows], ["int8", "int4"])
        self.assertEqual(rows[0]["sqnr_db"], metrics[0].overall.sqnr_db)
        page = metrics._repr_html_()
        self.assertEqual((page.count("<tr>"), page.count("<th>label")), (3, 1))
        name = quantd.TensorName("acme/rows", "a<b>")
        self.client.calibrate(x, name, contribution=quantd.Contribution("a", 1))
        swept = self.client.sweep("acme/rows", ["int8", "int4"])
        self.assertEqual(
            [(row["tensor"], row["spec_index"], row["size_bytes"])
             for row in swept.to_dicts()],
            [("a<b>", 0, 516), ("a<b>", 1, 260)])
        self.assertEqual(swept._repr_html_().count("<tr>"), 3)
        tensor = self.client.quantize(x, "int4:group:32", name=name)
        row, = tensor.to_dicts()
        self.assertEqual((row["tensor"], row["format"], row["scale_count"],
                          row["summary_count"]), ("a<b>", "int4", 16, 512))
        listed = quantd.ResultList(
            self.client.compute_encodings("acme/rows", "int8"))
        self.assertIn("<td>a&lt;b&gt;</td>", listed._repr_html_())
        self.assertEqual(listed.to_dicts()[0]["stored_encoding_format"],
                         "int8")
        many = quantd.ResultList([tensor] * 250)
        self.assertIn("100 of 250 rows", many._repr_html_())
        self.assertEqual(quantd.ResultList().to_dicts(), [])
        # No array of objects, in silence.
        for thing in (tensor, tensor.encoding):
            with self.assertRaisesRegex(TypeError, "is no array: take"):
                np.asarray(thing)
        self.assert_fails("ARGUMENT_INVALID", self.client.quantize, tensor,
                          "int8")

    def test_ManyTensorsComeInOrderWithAnErrorInTheMiddle(self):
        x = [data_of(n + 1, 40, seed=n) for n in range(30)]
        tensors = [(f"t{n}", array) for n, array in enumerate(x)]
        # One fails here and one at the server.
        tensors[11] = ("t11", x[11].astype(np.int32))
        tensors[17] = quantd.QuantizeJob(
            x[17], quantd.EncodingReference(), name="t17")
        got = list(self.client.quantize_many(
            tensors, "int8:per-channel", model="acme/many", store=True,
            min_rank=0, on_error="return"))
        for n, result in enumerate(got):
            self.assertEqual(result.name.tensor, f"t{n}")
            if n in (11, 17):
                self.assertIsInstance(result, quantd.QuantdError)
                self.assertIn(f": tensor 't{n}': ", str(result))
                self.assertEqual(result.reason, "ARGUMENT_INVALID" if n == 11
                                 else "ENCODING_NOT_FOUND")
                continue
            np.testing.assert_array_equal(
                result.codes, self.client.quantize(
                    x[n], "int8:per-channel").codes)
        self.assertEqual(
            len(list(self.client.list_encodings("acme/many"))), 28)
        whole = [result for result in got if not isinstance(result,
                                                            Exception)]
        for tensor, back in zip(whole, self.client.dequantize_many(whole)):
            np.testing.assert_array_equal(back, self.client.dequantize(tensor))

        results = self.client.quantize_many(tensors, "int8", min_rank=0)
        for _ in range(11):
            next(results)
        with self.assertRaises(quantd.QuantdError):
            next(results)
        self.assertEqual(list(results), [])

    def test_ManyTensorsAreTakenOnlyAsFarAheadAsThereIsRoom(self):
        taken, received, ahead, threads = 0, 0, 0, set()

        def tensors():
            nonlocal taken
            for n in range(40):
                taken += 1
                threads.add(threading.get_ident())
                yield f"t{n}", data_of(1000, seed=n)

        with mock.patch.object(client_module, "_WINDOW_BYTES", 10000):
            for _ in self.client.quantize_many(tensors(), "int8", min_rank=1):
                received += 1
                ahead = max(ahead, taken - received)
        self.assertEqual((taken, received), (40, 40))
        self.assertLessEqual(ahead, 3)
        self.assertEqual(threads, {threading.get_ident()})

    def test_ManyTensorsCanBeLeftHalfway(self):
        results = self.client.quantize_many(
            ((f"t{n}", data_of(1, 50000)) for n in range(100)), "int8")
        next(results)
        results.close()

        def broken():
            yield "a", data_of(5)
            raise KeyError("of the caller")

        with self.assertRaises(KeyError):
            list(self.client.quantize_many(broken(), "int8"))
        self.assertEqual(self.client.quantize(data_of(3), "int8").codes.size,
                         3)

    def test_ThreadsShareAClient(self):
        x = [data_of(300, 100, seed=n) for n in range(8)]
        want = [self.client.quantize(array, "uint8").codes for array in x]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for n, got in enumerate(pool.map(
                    lambda n: self.client.quantize(x[n % 8], "uint8"),
                    range(64))):
                np.testing.assert_array_equal(got.codes, want[n % 8])

    def test_ErrorsSayWhatAndWhere(self):
        x = data_of(4, 4)
        error = self.assert_fails("BLOCK_SIZE_INVALID", self.client.quantize,
                                  x, quantd.EncodingSpec("int8", (1, 0, 0)))
        self.assertEqual(error.code, grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("block_size", error.field)
        self.assertIn(error.field, str(error))
        x[1, 2] = np.nan
        self.assert_fails("NON_FINITE_REJECTED", self.client.quantize, x,
                          "int8", nan_policy="reject")
        error = self.assert_fails("NAME_INVALID", self.client.get_encoding,
                                  quantd.TensorName("../m", "t"))
        self.assertEqual(error.field, "name.model")
        for call in (lambda: self.client.quantize(x, "int99"),
                     lambda: self.client.quantize(x, 8),
                     lambda: self.client.quantize(x, "int8", name=3),
                     lambda: self.client.quantize(x, "int8", name="\ud800"),
                     lambda: self.client.quantize(x, "int8", nan_policy="?"),
                     lambda: self.client.dequantize(x, quantd.Encoding("int8")),
                     lambda: self.client.dequantize(
                         np.zeros(3, np.int8), quantd.Encoding("int8"),
                         shape=(4,)),
                     lambda: self.client.dequantize(np.zeros(3, np.int8)),
                     lambda: self.client.evaluate(x, ["int8"], labels=["a",
                                                                       "b"]),
                     lambda: self.client.compare(x, x[1:]),
                     lambda: self.client.quantize_many([], on_error="?"),
                     lambda: self.client.empty_shared(3),
                     lambda: self.client.sweep("m", ["int8"], min_sqnr_db=1,
                                               max_size_bytes=1),
                     lambda: quantd.Client(""),
                     lambda: quantd.Client(timeout=0),
                     lambda: quantd.Client(chunk_bytes=63),
                     lambda: quantd.Client(max_retries=-1),
                     lambda: quantd.Client(shared_memory=True)):
            self.assert_fails("ARGUMENT_INVALID", call)

    def test_EncodingsArePutListedReplacedAndDeleted(self):
        name = quantd.TensorName("acme/put", "t", "v2")
        put = self.client.put_encoding(
            name, quantd.Encoding("uint4", scale=[0.5], zero_point=[7]),
            if_match="absent")
        self.assert_fails("ETAG_MISMATCH", self.client.put_encoding, name,
                          quantd.Encoding("int4", scale=[1]),
                          if_match="absent")
        got = self.client.get_encoding(name)
        self.assertEqual((got.name, got.etag, got.format),
                         (name, put.etag, "uint4"))
        self.assertEqual(got.encoding.scale.tolist(), [0.5])
        self.assertEqual(got.encoding.zero_point.tolist(), [7])
        self.assertIsNotNone(got.update_time.tzinfo)
        (listed,) = self.client.list_encodings("acme/put", "v2")
        self.assertEqual((listed.name, listed.etag, listed.encoding,
                          listed.scale_count), (name, put.etag, None, 1))
        self.assertIn("acme/put",
                      [model.model for model in self.client.list_models()])
        self.assertEqual([(revision.revision, revision.encoding_count)
                          for revision in
                          self.client.list_revisions("acme/put")], [("v2", 1)])
        x = data_of(20)
        reference = quantd.EncodingReference(name, got.etag)
        by_name = self.client.quantize(x, reference)
        self.assertEqual(by_name.etag, put.etag)
        np.testing.assert_array_equal(
            by_name.codes, self.client.quantize(x, got.encoding).codes)
        np.testing.assert_array_equal(
            self.client.dequantize(by_name.codes, reference, shape=(20,)),
            self.client.dequantize(by_name))
        bare = self.client.quantize(x, reference, omit_encoding=True)
        self.assertIsNone(bare.encoding)
        self.assertEqual(bare.codes.tobytes(), by_name.codes.tobytes())
        self.client.delete_encoding(name, if_match=put.etag)
        self.assert_fails("ENCODING_NOT_FOUND", self.client.get_encoding, name)

    def test_EncodingsOfAnySizeArePutAndGot(self):
        name = quantd.TensorName("acme/large", "t")
        # One more than goes in a header, and more than GetEncoding answers.
        for rows in (257, 5000):
            x = data_of(rows, 512)
            for text in ("int8:group:2", "uint8:group:2:asymmetric",
                         "int8:group:2:scale=bfloat16", "nvfp4",
                         "mxfp4_e2m1"):
                with self.subTest(rows=rows, spec=text):
                    encoding = self.client.quantize(
                        x, quantd.EncodingSpec.parse(text)).encoding
                    put = self.client.put_encoding(name, encoding)
                    got = self.client.get_encoding(name)
                    self.assertEqual(got.etag, put.etag)
                    self.assertEqual(got.encoding, encoding)
        scale = np.ones(70000, np.float32)
        scale[69999] = np.nan
        self.assert_fails("SCALE_INVALID", self.client.put_encoding, name,
                          quantd.Encoding("int8", scale, block_size=(1,)))
        scale[69999] = 1 + 2**-20
        for wrong in (quantd.Encoding("int8", scale, block_size=(1,),
                                      scale_type="bfloat16"),
                      quantd.Encoding("int8", scale, block_size=(1,),
                                      zero_point=np.full(70000, 300,
                                                         np.int32)),
                      quantd.Encoding("int8", scale, block_size=(1,),
                                      zero_point=np.zeros(3, np.int32))):
            self.assert_fails("ARGUMENT_INVALID", self.client.put_encoding,
                              name, wrong)
        self.assertEqual(self.client.get_encoding(name).etag, put.etag)
        # What was refused, or stored without an answer, is sent anew.
        encoding = quantd.Encoding("int8", scale, block_size=(1,))
        for losing in (self.draining, self.losing_answers):
            with losing():
                put = self.client.put_encoding(name, encoding,
                                               if_match=put.etag)
            self.assertEqual(self.client.get_encoding(name).etag, put.etag)

    @contextlib.contextmanager
    def first_attempt(self, act, reason):
        """That of the next call is act(call), and ends as UNAVAILABLE."""
        attempt = self.client._attempt  # pylint: disable=protected-access

        def fail(*args):
            self.client._attempt = attempt
            act(lambda: attempt(*args))
            raise quantd.QuantdError(grpc.StatusCode.UNAVAILABLE, reason, "")

        with mock.patch.object(self.client, "_attempt", fail), (
                mock.patch.object(_stream.Options, "pause",
                                  lambda *unused: 0)):
            yield

    def losing_answers(self, then=lambda: None):
        """The next call is done without an answer, then comes `then`."""
        return self.first_attempt(lambda call: (call(), then()),
                                  "STORE_UNAVAILABLE")

    def draining(self):
        """The next call is refused once, and not done."""
        return self.first_attempt(lambda call: None, "DRAINING")

    def test_APutWhoseAnswerWasLostIsNotRefusedForItself(self):
        x = data_of(8, 64)
        codebook = (-1, -0.25, 0.25, 1)
        for n, name in enumerate(FORMATS):
            with self.subTest(format=name):
                encoding = self.client.quantize(x, quantd.EncodingSpec(
                    name, codebook=codebook if "codebook" in name else ()
                )).encoding
                tensor = quantd.TensorName("acme/lost", f"t{n}")
                with self.losing_answers():
                    put = self.client.put_encoding(tensor, encoding,
                                                   if_match="absent")
                self.assertEqual(
                    (put.etag, put.encoding),
                    (self.client.get_encoding(tensor).etag, None))
        # What the service fills in is no other encoding.
        with self.losing_answers():
            again = self.client.put_encoding(
                tensor, quantd.Encoding("int8", [0.5, 1], block_size=(4, 0)),
                if_match=put.etag)
        self.assertNotEqual(again.etag, put.etag)

    def test_APutThatAnotherCameBeforeIsRefusedAlsoAfterARetry(self):
        name = quantd.TensorName("acme/lost", "other")
        mine, other = quantd.Encoding("int8", [1]), quantd.Encoding("int8", [2])
        put = self.client.put_encoding
        for then in (lambda: put(name, other),
                     lambda: self.client.delete_encoding(name)):
            etag = put(name, other).etag
            with self.losing_answers(then):
                self.assert_fails("ETAG_MISMATCH", put, name, mine,
                                  if_match=etag)
        # The very same, but not one's own.
        put(name, mine)
        self.assert_fails("ETAG_MISMATCH", put, name, mine, if_match="absent")
        with self.draining():
            self.assert_fails("ETAG_MISMATCH", put, name, mine,
                              if_match="absent")

    def test_ADeleteWhoseAnswerWasLostFindsNothingLeft(self):
        name = quantd.TensorName("acme/lost", "deleted")
        x = data_of(30)
        for make, delete, reason in (
                (lambda: self.client.put_encoding(
                    name, quantd.Encoding("int8", [1])),
                 self.client.delete_encoding, "ENCODING_NOT_FOUND"),
                (lambda: self.client.calibrate(
                    x, name, contribution=quantd.Contribution("a", 1)),
                 self.client.delete_statistics, "STATISTICS_NOT_FOUND")):
            make()
            with self.losing_answers():
                delete(name)
            self.assert_fails(reason, delete, name)
            with self.draining():
                self.assert_fails(reason, delete, name)

    def test_EncodingsOfMoreThanAMillionScalesComeBack(self):
        name = quantd.TensorName("acme/large", "t")
        encoding = self.client.quantize(
            data_of(1100000, 1), "int8:per-channel", name=name,
            store=True).encoding
        self.assertEqual(encoding.scale.size, 1100000)
        self.assertGreater(encoding.scale.nbytes, 4 << 20)
        np.testing.assert_array_equal(
            self.client.get_encoding(name).encoding.scale, encoding.scale)

    def test_PagesFollowOneAnother(self):
        with mock.patch.object(_requests, "PAGE_SIZE", 2):
            for n in range(5):
                self.client.put_encoding(
                    quantd.TensorName("acme/pages", f"t{n}"),
                    quantd.Encoding("int8", scale=[1]))
            self.assertEqual(
                [stored.name.tensor for stored in
                 self.client.list_encodings("acme/pages")],
                ["t0", "t1", "t2", "t3", "t4"])

    def test_CalibratesAndStores(self):
        x = data_of(40, 30)
        name = quantd.TensorName("acme/calibrate", "t")
        got = self.client.calibrate(x, name, "int8:per-channel")
        self.assertEqual((got.statistics.count, got.statistics.min,
                          got.statistics.max),
                         (x.size, float(x.min()), float(x.max())))
        np.testing.assert_array_equal(got.encoding.scale.ravel(),
                                      strict_scale(x, 127))
        self.assertEqual(self.client.get_encoding(name).etag,
                         got.stored_encoding.etag)
        self.assertIsNone(got.contribution)
        only = self.client.calibrate(x)
        self.assertIsNone(only.stored_encoding)
        with self.assertRaises(quantd.QuantdError):
            print(only.encoding)

    def test_ContributionsCountOnceAndGiveManyEncodings(self):
        batches = [data_of(3000, seed=seed) for seed in range(3)]
        model = "acme/contribute"
        name = quantd.TensorName(model, "a")
        for sequence, batch in enumerate(batches, 1):
            for is_again in (False, True):
                got = self.client.calibrate(
                    batch, name,
                    contribution=quantd.Contribution("rank-0", sequence))
                self.assertEqual((got.contribution.sequence,
                                  got.contribution.duplicate),
                                 (sequence, is_again))
        list(self.client.calibrate_many(
            [("b", 10 * batches[0])], model=model,
            contribution=quantd.Contribution("rank-0", 1)))

        x = np.concatenate(batches)
        stored = self.client.get_statistics(name, with_state=True)
        self.assertEqual(stored.statistics.count, x.size)
        self.assertEqual([(source.source, source.sequence)
                          for source in stored.sources], [("rank-0", 3)])
        self.assertEqual(sum(stored.state.histograms[0].count), x.size)
        self.assertEqual([entry.tensor for entry in
                          self.client.list_statistics(model)], ["a", "b"])

        dry = {answer.name.tensor: answer for answer in
               self.client.compute_encodings(model, "int8", dry_run=True)}
        self.assertEqual(dry["a"].stored_encoding.encoding.scale[0],
                         strict_scale(x[None], 127)[0])
        self.assertEqual(dry["a"].total_count, 2)
        self.assertGreater(dry["a"].prediction.sqnr_db, 30)
        self.assertEqual(list(self.client.list_encodings(model)), [])
        answers = list(self.client.compute_encodings(
            model, overrides=[("b*", "uint4:mse"), ("*", "int8")]))
        self.assertEqual([answer.stored_encoding.format
                          for answer in answers], ["int8", "uint4"])
        self.assertEqual(len(list(self.client.list_encodings(model))), 2)

        sweep = self.client.sweep(model, ["int4", "int8"], min_sqnr_db=25)
        self.assertEqual([tensor.name.tensor for tensor in sweep.tensors],
                         ["a", "b"])
        self.assertEqual([candidate.spec_index for candidate in
                          sweep.tensors[0].candidates], [1, 0])
        self.assertEqual([total.spec_index for total in sweep.totals], [1, 0])
        self.assertEqual(sweep.mixture.choices, {"a": 1, "b": 1})
        self.assertTrue(sweep.mixture.target_met)
        self.assertIsNone(self.client.sweep(model, ["int8"]).mixture)
        self.assert_fails("STATISTICS_NOT_FOUND", self.client.sweep, "acme/no",
                          ["int8"])

        chosen = self.client.choose_mixture(
            {"a": [quantd.MixtureOption(0, 100, 0.1),
                   quantd.MixtureOption(3, 200, 0.001)]},
            min_sqnr_db=[9, 20], max_size_bytes=[150])
        self.assertEqual([mixture.choices for mixture in chosen],
                         [{"a": 0}, {"a": 3}, {"a": 0}])
        self.assertEqual(chosen[2].size_bytes, 100)
        self.assert_fails("TARGET_INVALID", self.client.choose_mixture,
                          {"a": [quantd.MixtureOption(0, 1, 1)]})

        self.client.delete_statistics(name)
        self.assert_fails("STATISTICS_NOT_FOUND", self.client.get_statistics,
                          name)

    def test_EvaluatesLikeNumpy(self):
        x = data_of(30, 40)
        int8, nf4 = self.client.evaluate(
            x, ["int8:per-channel", "nf4"], per_scale_index=True,
            with_distribution=True)
        scale = strict_scale(x, 127)[:, None]
        error = (np.rint(x / scale).astype(np.float32) * scale).astype(
            np.float64) - x
        self.assertEqual((int8.label, nf4.label), ("int8:per-channel", "nf4"))
        self.assertAlmostEqual(
            int8.overall.sum_squared_error / (error ** 2).sum(), 1, 9)
        self.assertEqual(len(int8.per_scale_index), 30)
        self.assertGreater(int8.overall.sqnr_db, nf4.overall.sqnr_db)
        self.assertEqual(int8.overall.error_histogram.zero_count +
                         int8.overall.error_histogram.count.sum(), x.size)
        (plain,) = self.client.evaluate(x, [int8.encoding], labels=["mine"])
        self.assertEqual(plain.overall.sum_squared_error,
                         int8.overall.sum_squared_error)
        self.assertIsNone(plain.overall.kl_divergence)
        self.assertEqual(plain.label, "mine")

    def test_MeasuresWhatIsAskedFor(self):
        x = data_of(30, 40)
        x[3, 5] = np.inf
        specs = ["int4:per-channel", "nf4", "float8_e4m3fn"]
        every = self.client.evaluate(x, specs, per_scale_index=True)
        compared = self.client.compare(x, x + 1)
        names = ("zero_flushed_count", "sum_squared_error",
                 "mean_squared_error", "mean_absolute_error",
                 "max_absolute_error", "mean_relative_error",
                 "max_relative_error", "sqnr_db", "cosine_similarity")
        noise = ("sqnr_db", "max_absolute_error", "mean_squared_error",
                 "sum_squared_error")
        for asked in (*((name,) for name in names), noise, names):
            with self.subTest(asked):
                some = self.client.evaluate(x, specs, per_scale_index=True,
                                            metrics=asked)
                pairs = [(got.overall, want.overall)
                         for got, want in zip(some, every)]
                pairs += [pair for got, want in zip(some, every)
                          for pair in zip(got.per_scale_index,
                                          want.per_scale_index)]
                pairs.append((self.client.compare(x, x + 1, metrics=asked),
                              compared))
                for got, want in pairs:
                    for name in ("count", "non_finite_count",
                                 "clipped_low_count", "clipped_high_count",
                                 *asked):
                        self.assertEqual(getattr(got, name),
                                         getattr(want, name), name)
                    for name in set(names) - set(asked):
                        left_out = getattr(got, name)
                        if name == "zero_flushed_count":
                            self.assertIsNone(left_out)
                        else:
                            self.assertTrue(math.isnan(left_out), name)
                        self.assertNotIn(name, got.to_dicts()[0])
        (chunked,) = self.client.evaluate_chunks(
            [x], "nf4", shape=x.shape, metrics="sqnr_db")
        self.assertEqual(chunked.overall.sqnr_db, every[1].overall.sqnr_db)
        self.assert_fails("ARGUMENT_INVALID",
                          lambda: self.client.evaluate(x, "int8",
                                                       metrics=["sqnr"]))

    def test_HealthIsThatOfTheServer(self):
        self.assertEqual(self.client.health(), "SERVING")
        self.assertEqual(self.client.health("quantd.v1.EncodingService"),
                         "SERVING")
        self.assertEqual(self.client.health("nothing"), "SERVICE_UNKNOWN")

    def test_AClosedClientSaysSo(self):
        with quantd.Client(self.server.address) as client:
            client.quantize(data_of(3), "int8")
        for call in (lambda: client.quantize(data_of(3), "int8"), client.health,
                     lambda: list(client.list_models()),
                     lambda: list(client.compute_encodings("m", "int8"))):
            self.assert_fails("CLIENT_CLOSED", call)
        client.close()

    def test_StreamsEndWithTheirClient(self):
        # Leaves the thread that calls of the main thread go over.
        self.client.health()
        before = threading.active_count()
        client = quantd.Client(self.server.address)
        client.quantize(data_of(3), "int8")
        threads = [thread for thread in threading.enumerate()
                   if thread.name == "quantd-stream"]
        client.close()
        for thread in threads[-1:]:
            thread.join(live_server.PATIENCE_S)
            self.assertFalse(thread.is_alive())
        self.assertLessEqual(threading.active_count(), before + 2)


class RestartTest(unittest.TestCase):

    def test_TensorsAreSentAgainToAServerThatComesBack(self):
        x = data_of(1000, 300)
        retrying = threading.Event()
        pauses = []

        def pause(options_, retries, error):
            """More of them than any fixed number was before."""
            pauses.append((options_, error))
            retries.add()
            if len(pauses) == 30:
                retrying.set()
            return 0.02

        with tempfile.TemporaryDirectory() as folder:
            target = "unix:" + os.path.join(folder, "socket")

            def server():
                return live_server.LiveServer(options.quantd, folder,
                                              ["--listen", target])

            with mock.patch.object(_stream.Options, "pause", pause), (
                    quantd.Client(target, max_backoff=0.1)) as client, (
                    concurrent.futures.ThreadPoolExecutor(2)) as pool:
                first = server()
                want = client.quantize(x, "int8")
                first.process.kill()
                first.process.wait()
                self.assertFalse(retrying.is_set())
                tensor = pool.submit(client.quantize, x, "int8")
                names = pool.submit(lambda: list(client.list_models()))
                self.assertTrue(retrying.wait(live_server.PATIENCE_S))
                self.assertFalse(tensor.done())
                with server():
                    np.testing.assert_array_equal(
                        tensor.result(live_server.PATIENCE_S).codes, want.codes)
                    self.assertEqual(names.result(live_server.PATIENCE_S), [])
                    client.close()

    def test_WithoutAServerTheErrorNamesIt(self):
        with tempfile.TemporaryDirectory() as folder:
            target = "unix:" + os.path.join(folder, "nobody")
            with quantd.Client(target, max_retries=1,
                               initial_backoff=0.001) as client:
                for call in (lambda: client.quantize(data_of(3), "int8"),
                             lambda: list(client.list_models()),
                             lambda: client.sweep("m", ["int8"])):
                    with self.assertRaises(quantd.QuantdError) as caught:
                        call()
                    self.assertEqual(caught.exception.reason,
                                     "SERVER_UNREACHABLE")
                    self.assertIn("nobody", str(caught.exception))


class FakeServer(grpc.GenericRpcHandler):
    """Answers Quantize, or the RPC of those requests, with what `script` yields
    for (call number, requests), and counts the calls."""

    def __init__(self, script, request=qs.QuantizeRequest):
        self._script = script
        self._request = request
        self.call_count = 0
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((self,))
        self.address = "127.0.0.1:%d" % self._server.add_insecure_port(
            "127.0.0.1:0")
        self._server.start()

    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(
            self._run, self._request.FromString,
            lambda message: message if isinstance(message, bytes) else
            message.SerializeToString())

    def _run(self, requests, context):
        self.call_count += 1
        yield from self._script(self.call_count, requests, context)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self._server.stop(0).wait()


def answer(data=b"\1\2\3", size=3, checksum=None, count=3):
    """What Quantize says of a tensor of int8."""
    # pylint: disable=import-outside-toplevel
    response = qs.QuantizeResponse(data=data)
    response.header.size_bytes = size
    response.header.shape.append(count)
    response.header.encoding.format = 8
    response.header.encoding.scale.append(1)
    response.summary.count = 3
    if checksum is None:
        try:
            import xxhash
            checksum = xxhash.xxh3_64_intdigest(data)
        except ImportError:
            checksum = 0
    response.summary.checksum_xxh3 = checksum
    return response


class MisbehavingServerTest(unittest.TestCase):

    def quantize(self, script, count=3, **client_options):
        """The error or the codes, and how many calls it took."""
        client_options.setdefault("initial_backoff", 0.001)
        with FakeServer(script) as server, quantd.Client(
                server.address, **client_options) as client:
            try:
                got = client.quantize(np.ones(count, np.float32), "int8")
            except quantd.QuantdError as error:
                return error, server.call_count
            return got.codes.tolist(), server.call_count

    def assert_reason(self, reason, script, **client_options):
        error, _ = self.quantize(script, **client_options)
        self.assertIsInstance(error, quantd.QuantdError)
        self.assertEqual(error.reason, reason, error)
        return error

    def test_BalancingCallsNoAddressThatIsNotHealthy(self):
        class Unhealthy(FakeServer):
            def service(self, details):
                if details.method == "/grpc.health.v1.Health/Watch":
                    return grpc.unary_stream_rpc_method_handler(self._watch)
                return super().service(details)

            def _watch(self, request, context):
                ended = threading.Event()
                context.add_callback(ended.set)
                yield b"\x08\x02"  # NOT_SERVING
                ended.wait()

        def script(call, requests, context):
            next(requests)
            yield answer()

        def quantize(address, balance):
            with quantd.Client(address, max_retries=0,
                               balance=balance) as client:
                client.quantize(np.ones(3, np.float32), "int8")

        async def quantize_async(address, balance):
            async with quantd.aio.Client(address, max_retries=0,
                                         balance=balance) as client:
                await client.quantize(np.ones(3, np.float32), "int8")

        for call in (quantize, lambda *args: asyncio.run(
                quantize_async(*args))):
            with Unhealthy(script) as server:
                call(server.address, False)
                self.assertEqual(server.call_count, 1)
                with self.assertRaises(quantd.QuantdError) as caught:
                    call(server.address, True)
                self.assertEqual(caught.exception.code,
                                 grpc.StatusCode.UNAVAILABLE)
                self.assertEqual(server.call_count, 1)

    def test_AnswersToSomethingElseAreErrors(self):
        def name(header):
            header.name.tensor = "other"

        def shape(*sizes):
            def change(header):
                header.shape[:] = sizes
            return change

        def encoding(**fields):
            def change(header):
                message = encoding_pb2.Encoding(
                    **{"format": 8, "scale": [1], **fields})
                header.encoding.CopyFrom(message)
            return change

        def no_encoding(header):
            header.ClearField("encoding")

        def bytes_range(header):
            header.range.begin_bytes, header.range.end_bytes = 1, 4

        for change, expected in {
                name: "expected tensor ('', '', ''), got ('', '', 'other')",
                shape(2): "expected shape [3], got [2]",
                shape(-3): "expected shape [3], got [-3]",
                shape(3, 1): "expected shape [3], got [3, 1]",
                no_encoding: "expected an encoding, got none",
                bytes_range: "expected bytes (0, 3), got (1, 4)",
                encoding(format=16): "expected format int8, got int16",
                encoding(format=28): "expected format int8, got uint8",
                encoding(format=999): "expected format int8, got a format 999",
                encoding(scale=[]): "expected scales: 1, got 0",
                encoding(scale=[1, 1]): "expected scales: 1, got 2",
                encoding(zero_point=[1, 1]): "expected zero points: 1, got 2",
                encoding(block_size=[-1]): "at least 0, got [-1]",
                encoding(block_size=[0, 1 << 62]): "block size of 1 entries",
                encoding(block_size=[2]): "expected scales: 2, got 1",
                encoding(scale_code=b"1"): "expected scale codes: 0, got 1",
                encoding(scale_type=4): "expected scale codes: 1, got 0",
                encoding(scale_type=5, scale_code=b"1"):
                    "expected outer scales: 1, got 0",
                encoding(codebook=[0, 1]): "expected a codebook of 0 to 0",
        }.items():
            with self.subTest(expected):
                response = answer()
                change(response.header)

                def script(call, requests, context, response=response):
                    next(requests)
                    yield response

                error = self.assert_reason("RESPONSE_MALFORMED", script)
                self.assertIn(expected, str(error))
                with FakeServer(script) as server, quantd.Client(
                        server.address) as client:
                    with self.assertRaises(quantd.QuantdError) as caught:
                        list(client.quantize_chunks(
                            [np.ones(3, np.float32)], "int8", shape=[3]))
                self.assertEqual(caught.exception.reason, "RESPONSE_MALFORMED")

    def test_TheUnsignedFormatMayComeWhereItWasAskedFor(self):
        response = answer()
        response.header.encoding.format = 28

        def script(call, requests, context):
            next(requests)
            yield response

        with FakeServer(script) as server, quantd.Client(
                server.address) as client:
            spec = quantd.EncodingSpec("int8", unsigned_if_non_negative=True)
            got = client.quantize(np.ones(3, np.float32), spec)
        self.assertEqual(got.encoding.format, "uint8")

    def test_ErrorsAreSafeForATerminal(self):
        error = quantd.QuantdError(
            grpc.StatusCode.INTERNAL, "X",
            "\x1b[31m\x9b2J\u202e\u2066gr\u00f6\u00dfe\n\x7f")
        self.assertEqual(
            str(error), "X: \\x1b[31m\\x9b2J\\u202e\\u2066gr\u00f6\u00dfe\\n\\x7f")

    def test_AnswersThatBreakTheProtocolAreErrors(self):
        def then(*responses):
            def script(call, requests, context):
                next(requests)
                yield from responses
            return script

        no_header = answer()
        no_header.ClearField("header")
        gap = answer()
        gap.offset = 1
        twice = answer()
        twice.ClearField("summary")
        for name, script in {
                "bytes": then(b"\xff"),
                "a header that is none": then(b"\x0a\x01\xff"),
                "a number for data": then(b"\x18\x01"),
                "no header": then(no_header),
                "two headers": then(twice, answer()),
                "a gap": then(gap),
                "too much data": then(answer(size=2)),
                "too little data": then(answer(size=4)),
                "codes that are too few": then(answer(b"12", size=2)),
                "too large": then(answer(size=1 << 50)),
                "an answer too many": then(answer(), answer(), answer()),
                "the end": then(),
                "the end within": then(twice)}.items():
            with self.subTest(name=name):
                if name == "an answer too many":
                    # It belongs to nobody: the tensor has its result.
                    self.assertEqual(self.quantize(script)[0], [1, 2, 3])
                    continue
                self.assert_reason("RESPONSE_MALFORMED", script)

    def test_AWrongChecksumIsNotedWhereItCanBe(self):
        try:
            # pylint: disable-next=import-outside-toplevel,unused-import
            import xxhash
        except ImportError:
            self.skipTest("without xxhash")

        def script(call, requests, context):
            next(requests)
            yield answer(checksum=1)

        error = self.assert_reason("CHECKSUM_MISMATCH", script)
        self.assertEqual(error.code, grpc.StatusCode.DATA_LOSS)

    def test_ACallThatBreaksWithinATensorIsMadeAgain(self):
        sent = []

        def script(call, requests, context):
            sent.append(0)
            for request in requests:
                sent[-1] += len(request.data)
                if call < 3 and request.offset >= 128:
                    yield qs.QuantizeResponse(header=answer(
                        b"", size=100, count=100).header, data=b"\7" * 10)
                    context.abort(grpc.StatusCode.UNAVAILABLE,
                                  "DRAINING: about to stop")
                if sent[-1] == 400:
                    yield answer(b"\1" * 100, size=100, count=100)

        codes, calls = self.quantize(script, count=100, chunk_bytes=64)
        self.assertEqual((codes, calls), ([1] * 100, 3))
        self.assertEqual(sent[2], 400)
        error, calls = self.quantize(
            lambda call, requests, context: context.abort(
                grpc.StatusCode.UNAVAILABLE, "DRAINING: about to stop") or (),
            max_retries=2)
        self.assertEqual((error.reason, calls), ("DRAINING", 3))

    def test_ACallThatBreaksGoesOnBehindThePartsThatWereAnswered(self):
        begins, omits = [], []

        def script(call, requests, context):
            for request in requests:
                if not request.HasField("header"):
                    continue
                begin = request.header.range.begin_bytes // 4
                end = request.header.range.end_bytes // 4
                begins.append((call, begin))
                omits.append(request.header.omit_encoding == (begin > 0))
                response = answer(bytes([begin]) * (end - begin), 100,
                                  count=100)
                response.offset = begin
                response.header.range.begin_bytes = begin
                response.header.range.end_bytes = end
                if (call, begin) == (1, 32):
                    # In the middle of the third.
                    response.ClearField("summary")
                    response.data = b"\7"
                    yield response
                    context.abort(grpc.StatusCode.UNAVAILABLE, "DRAINING: now")
                yield response

        with mock.patch.multiple(_exchange, _PART_BYTES=64,
                                 _PART_BYTES_PER_HEADER_BYTE=0):
            with FakeServer(script) as server, quantd.Client(
                    server.address, initial_backoff=0.001) as client:
                got = client.quantize(np.ones(100, np.float32),
                                      quantd.Encoding("int8", [1.0]))
        self.assertEqual(got.codes.tolist(),
                         [n // 16 * 16 for n in range(100)])
        self.assertEqual(got.summary.count, 7 * 3)
        first = [begin for call, begin in begins if call == 1]
        self.assertEqual(first[:3], [0, 16, 32])
        self.assertEqual([begin for call, begin in begins if call == 2],
                         [32, 48, 64, 80, 96])
        self.assertTrue(all(omits))

    def quantize_in_parts(self, script, source):
        """100 elements in parts of 16 or more."""
        with mock.patch.multiple(_exchange, _PART_BYTES=64), (
                FakeServer(script)) as server, quantd.Client(
                    server.address, initial_backoff=0.001) as client:
            return client.quantize(np.ones(100, np.float32), source,
                                   name="t", store=True)

    @staticmethod
    def part_answer(header, size=100):
        """The codes of a part are the number of its first element."""
        begin, end = header.range.begin_bytes // 4, header.range.end_bytes // 4
        response = answer(bytes([begin]) * (end - begin), size, count=100)
        response.header.name.tensor = "t"
        response.offset = begin
        response.header.range.begin_bytes = begin
        response.header.range.end_bytes = end
        return response

    def test_APartThatIsTurnedAwayIsJoinedLater(self):
        for late in (0, 16, 96):
            turned_away, begins = [], []

            def script(call, requests, context, late=late, begins=begins,
                       turned_away=turned_away):
                for request in requests:
                    begin = request.header.range.begin_bytes // 4
                    begins.append((begin, request.header.store,
                                   request.header.omit_encoding))
                    if begin != late or turned_away:
                        yield self.part_answer(request.header)
                        continue
                    turned_away.append(begin)
                    yield qs.QuantizeResponse(error=te.TensorError(
                        code=8, reason="OVERLOADED", message="full",
                        retry_after_ms=1))

            with mock.patch.object(_exchange, "_PART_BYTES_PER_HEADER_BYTE",
                                   0), self.subTest(late=late):
                got = self.quantize_in_parts(script,
                                             quantd.Encoding("int8", [1.0]))
                self.assertEqual(got.codes.tolist(),
                                 [n // 16 * 16 for n in range(100)])
                self.assertEqual(
                    sorted(begins),
                    sorted((begin, begin == 0, begin > 0)
                           for begin in (*range(0, 100, 16), late)))

    def test_PartsOfDifferentWholesAreMalformed(self):
        def script(call, requests, context):
            seen = 0
            for request in requests:
                seen += 1
                if seen == 1:
                    yield qs.QuantizeResponse(error=te.TensorError(
                        code=8, reason="OVERLOADED", message="full",
                        retry_after_ms=1))
                    continue
                begin = request.header.range.begin_bytes
                yield self.part_answer(request.header, 100 if begin else 96)

        with mock.patch.object(_exchange, "_PART_BYTES_PER_HEADER_BYTE", 0):
            with self.assertRaises(quantd.QuantdError) as caught:
                self.quantize_in_parts(script, quantd.Encoding("int8", [1.0]))
        self.assertEqual(caught.exception.reason, "RESPONSE_MALFORMED")

    def test_AReferenceToALargeEncodingMakesLargeParts(self):
        begins = []

        def script(call, requests, context):
            for request in requests:
                begins.append(request.header.range.begin_bytes // 4)
                response = self.part_answer(request.header)
                if not request.header.omit_encoding:
                    response.header.encoding.block_size.append(1)
                    response.header.encoding.scale[:] = [1.0] * 100
                yield response

        with mock.patch.object(_exchange, "_PART_BYTES_PER_HEADER_BYTE", 1):
            got = self.quantize_in_parts(script, quantd.EncodingReference(
                quantd.TensorName("m", "t")))
        self.assertEqual(begins, [0, 16])
        self.assertEqual(got.codes.tolist(), [0] * 16 + [16] * 84)

    def test_PartsShareTheirHeader(self):
        exchange = _requests.quantize(_requests.QuantizeJob(
            np.ones(1000, np.float32), quantd.Encoding("int8", [1.0] * 1000),
            "t", store=True))
        parts = exchange.parts(64)
        self.assertEqual(len(parts), 63)
        self.assertEqual({id(part.header) for part in parts},
                         {id(exchange.header)})
        for n, part in enumerate(parts):
            sent = qs.QuantizeRequest.FromString(
                next(part.messages(64))).header
            self.assertEqual((sent.store, sent.omit_encoding),
                             (n == 0, n > 0))
            self.assertEqual((sent.range.begin_bytes, sent.range.end_bytes),
                             (64 * n, min(64 * n + 64, 4000)))
            sent.ClearField("range")
            sent.omit_encoding, sent.store = False, True
            self.assertEqual(sent, exchange.header)

    def test_ALaterContributionWaitsForOneThatIsSentAgain(self):
        for revisions in (("", "main"), ("main", "")):
            sequences = []

            def script(call, requests, context, sequences=sequences):
                for request in requests:
                    sequences.append(request.header.contribution.sequence)
                    response = qs.CalibrateResponse()
                    if len(sequences) == 1:
                        response.error.CopyFrom(te.TensorError(
                            code=8, reason="OVERLOADED", message="full",
                            retry_after_ms=1))
                    else:
                        response.summary.name.CopyFrom(
                            request.header.tensor.name)
                        response.summary.statistics.count = 3
                    yield response

            with FakeServer(script, qs.CalibrateRequest) as server, (
                    quantd.Client(server.address,
                                  initial_backoff=0.001)) as client:
                jobs = [quantd.CalibrateJob(
                    np.ones(3, np.float32),
                    quantd.TensorName("m", "t", revision),
                    contribution=quantd.Contribution("a", n + 1))
                        for n, revision in enumerate(revisions)]
                self.assertEqual(len(list(client.calibrate_many(jobs))), 2)
            self.assertEqual(sequences, [1, 1, 2])

    def test_OtherStatusesAreNotRetried(self):
        error, calls = self.quantize(
            lambda call, requests, context: context.abort(
                grpc.StatusCode.PERMISSION_DENIED, "DENIED: no") or ())
        self.assertEqual((error.code, error.reason, error.message, calls),
                         (grpc.StatusCode.PERMISSION_DENIED, "DENIED", "no",
                          1))

    def test_ATensorThatShouldComeLaterDoes(self):
        times = []

        def script(call, requests, context):
            for _ in requests:
                times.append(call)
                yield answer() if len(times) > 2 else qs.QuantizeResponse(
                    error=te.TensorError(code=8, reason="MEMORY_BUDGET",
                                         message="full", retry_after_ms=1))

        self.assertEqual(self.quantize(script), ([1, 2, 3], 1))
        self.assertEqual(times, [1, 1, 1])
        times[:] = []
        error = self.assert_reason("MEMORY_BUDGET", script, max_retries=1)
        self.assertEqual((len(times), error.retry_after), (2, 0.001))

    def test_AServerThatDoesNotGoOnIsLeft(self):
        released = threading.Event()

        def script(call, requests, context):
            context.add_callback(released.set)
            released.wait(live_server.PATIENCE_S)
            yield from ()

        error = self.assert_reason("TIMEOUT", script, timeout=0.2)
        self.assertEqual(error.code, grpc.StatusCode.DEADLINE_EXCEEDED)
        self.assertTrue(released.wait(live_server.PATIENCE_S))

    def test_WhatMovesIsNotLate(self):
        # The client's clock, which stands still but where the script moves it.
        clock = mock.Mock()
        clock.monotonic.return_value = 0.0

        class Restless(_stream._apart.Condition):
            """Has its users look at the clock again and again."""

            def wait(self, timeout=None):
                return super().wait(0.01)

        accepted = threading.Semaphore(0)
        accept = _stream.StreamCall._accept

        def accept_and_tell(call, message):
            accept(call, message)
            accepted.release()

        def script(call, requests, context):
            next(requests)
            self.assertIn(("quantd-progress", "1"),
                          context.invocation_metadata())
            yield qs.QuantizeResponse(header=answer(b"", size=3).header)
            # Data, and what only tells that the server is at work.
            for message in (qs.QuantizeResponse(data=b"\1"),
                            qs.QuantizeResponse(), qs.QuantizeResponse(),
                            qs.QuantizeResponse(offset=1, data=b"\2\3")):
                accepted.acquire()
                # Longer than the timeout altogether.
                clock.monotonic.return_value += 36.0
                looks = clock.monotonic.call_count
                live_server.eventually(
                    lambda: clock.monotonic.call_count > looks + 1)
                yield message
            yield qs.QuantizeResponse(summary=answer().summary)

        with mock.patch.object(_stream, "time", clock), mock.patch.object(
                _stream._apart, "Condition", Restless), mock.patch.object(
                    _stream.StreamCall, "_accept", accept_and_tell):
            self.assertEqual(self.quantize(script, timeout=60)[0], [1, 2, 3])

    def test_DetailsOfAStatusAreRead(self):
        # google.rpc.Status with BadRequest{field: "a.b"} and
        # RetryInfo{0.5 s}, whose stubs are not everywhere.
        def any_of(name, value):
            url = b"type.googleapis.com/google.rpc." + name
            body = (b"\x0a" + bytes([len(url)]) + url +
                    b"\x12" + bytes([len(value)]) + value)
            return b"\x1a" + bytes([len(body)]) + body

        details = (any_of(b"BadRequest", b"\x0a\x05\x0a\x03a.b") +
                   any_of(b"RetryInfo", b"\x0a\x06\x10\x80\xca\xb5\xee\x01"))
        for value in (details, details[:-1], b"\xff", b""):
            def script(call, requests, context, value=value):
                context.set_trailing_metadata(
                    (("grpc-status-details-bin", value),))
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "BAD: so")
                yield

            error = self.assert_reason("BAD", script)
            if value == details:
                self.assertEqual((error.field, error.retry_after),
                                 ("a.b", 0.5))

    def test_NoThreadEndsWithAnException(self):
        log = []
        with mock.patch("threading.excepthook", log.append):
            self.assert_reason(
                "RESPONSE_MALFORMED",
                lambda call, requests, context: iter([b"\xff"]))
        self.assertEqual(log, [])


class PagesTest(unittest.TestCase):

    def test_APageThatLeadsToItselfIsAnError(self):
        with quantd.Client("127.0.0.1:1") as client:
            with mock.patch.object(
                    client, "_call", lambda *unused:
                    es.ListModelsResponse(next_page_token="again")):
                with self.assertRaises(quantd.QuantdError) as caught:
                    list(client.list_models())
        self.assertEqual(caught.exception.reason, "RESPONSE_MALFORMED")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
