"""What the Python package does without a server: specs, encodings, arrays, and
messages by hand."""

import dataclasses
import random
import unittest
from unittest import mock

import package  # pylint: disable=unused-import
# pylint: disable=wrong-import-order
import numpy as np

import quantd
from quantd import _arrays, _scales, _values, _wire
from quantd.tensor import ELEMENT_DTYPES, FORMATS
from quantd.v1 import encoding_pb2 as en
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import shared_memory_pb2 as sm


class WireTest(unittest.TestCase):

    def test_RequestsAreThoseOfProtobuf(self):
        generator = random.Random(1)
        for n in range(300):
            header = qs.QuantizeHeader(store=True, omit_encoding=n % 2 == 1)
            header.tensor.shape.extend([n] * generator.randrange(200))
            data = generator.randbytes(generator.choice([0, 1, 127, 128,
                                                         20000]))
            offset = generator.choice([0, 1, 127, 128, 1 << 35, (1 << 64) - 1])
            span = sm.SharedSpan(region_id=data[:16], offset_bytes=n)
            want = qs.QuantizeRequest(offset=offset, data=data)
            has_header, has_span = n % 3 > 0, n % 5 > 0
            if has_header:
                want.header.CopyFrom(header)
            if has_span:
                want.shared.CopyFrom(span)
            got = _wire.request(
                header.SerializeToString() if has_header else None, offset,
                memoryview(data),
                span.SerializeToString() if has_span else b"")
            if has_span and not span.ByteSize():
                want.ClearField("shared")
            self.assertEqual(got, want.SerializeToString())

    def test_ResponsesAreReadAsProtobufDoes(self):
        generator = random.Random(2)
        for n in range(300):
            want = qs.QuantizeResponse(
                offset=generator.choice([0, 300, generator.getrandbits(64)]),
                data=generator.randbytes(generator.choice(
                    [0, 5, generator.randrange(30000)])))
            if n % 2:
                want.header.size_bytes = n
            if n % 3:
                want.summary.checksum_xxh3 = generator.getrandbits(64)
            if n % 5 == 0:
                want.error.reason = "R"
            got = _wire.Response(want.SerializeToString())
            self.assertEqual((got.offset, bytes(got.data)),
                             (want.offset, want.data))
            for field in ("header", "summary", "error"):
                view = getattr(got, field)
                self.assertEqual(view is not None, want.HasField(field))
                if view is not None:
                    self.assertEqual(
                        bytes(view),
                        getattr(want, field).SerializeToString())

    def test_BytesThatAreNotProtobufAreAnError(self):
        generator = random.Random(3)
        whole = qs.QuantizeResponse(data=b"1234", offset=300)
        whole.summary.count = 5
        message = whole.SerializeToString()
        for message in [message[:cut] for cut in range(len(message))] + [
                generator.randbytes(generator.randrange(30))
                for _ in range(3000)]:
            try:
                _wire.Response(message)
            except _wire.MalformedError:
                pass
        for message in (b"\x10", b"\x1a\x05abc", b"\x0b", b"\x08\x01",
                        b"\x10" + b"\xff" * 11):
            with self.assertRaises(_wire.MalformedError):
                _wire.Response(message)


class SpecTest(unittest.TestCase):

    def test_WordsMeanWhatTheFieldsSay(self):
        for word, fields in {
                "int8": {},
                "int8:per-channel": {"granularity": {"axis": 0}},
                "int8:per-channel:-1": {"granularity": {"axis": -1}},
                "int4:group:32:asymmetric": {
                    "granularity": {"axis": -1, "group_size": 32},
                    "symmetry": en.SYMMETRY_ASYMMETRIC},
                "uint8:percentile=0.999": {
                    "method": en.CALIBRATION_METHOD_PERCENTILE,
                    "tail_fraction": 0.001},
                "int8:mse=64:strict:power-of-two": {
                    "method": en.CALIBRATION_METHOD_MSE, "search_steps": 64,
                    "symmetry": en.SYMMETRY_STRICT,
                    "power_of_two_scale": True},
                "int8:fixed=-1,2": {
                    "method": en.CALIBRATION_METHOD_FIXED_RANGE,
                    "range_min": -1, "range_max": 2},
                "int8:best-of:mse,entropy": {
                    "method": en.CALIBRATION_METHOD_BEST_OF,
                    "methods": [en.CALIBRATION_METHOD_MSE,
                                en.CALIBRATION_METHOD_ENTROPY]},
                "mxfp4_e2m1:rule=even": {
                    "mx_scale_rule": en.MX_SCALE_RULE_EVEN},
                "nf4:scale=float16": {"scale_type": en.SCALE_TYPE_FLOAT16},
                "lpbq:aimet": {"symmetry": en.SYMMETRY_AIMET},
                "int8:mse:mantissa-bits=9": {
                    "method": en.CALIBRATION_METHOD_MSE, "mantissa_bits": 9},
                "int8:block=1,0,32": {"block_size": [1, 0, 32]},
                "uint8:percentile:tail=upper": {
                    "method": en.CALIBRATION_METHOD_PERCENTILE,
                    "tail": en.TAIL_UPPER},
                "int8:entropy:steps=9:bins=4096": {
                    "method": en.CALIBRATION_METHOD_ENTROPY, "search_steps": 9,
                    "entropy_bins": 4096},
                "codebook2:entries=-1,-0.25,0.25,1": {
                    "codebook": [-1, -0.25, 0.25, 1]},
                "uint8:real-zero-point": {"real_zero_point": True},
                "float8_e5m2:no-saturation": {"no_saturation": True}}.items():
            with self.subTest(word=word):
                got = quantd.EncodingSpec.parse(word).to_proto()
                want = en.EncodingSpec(
                    format=en.NumberFormat.Value(
                        "NUMBER_FORMAT_" + word.split(":")[0].upper()),
                    **fields)
                self.assertEqual(got, want)

    def test_WordsThatAreNoSpecAreRefused(self):
        for word in ("", "int1", "int8:", "int8:nothing", "int8:group",
                     "int8:group:0", "int8:group:x", "int8:mse:entropy",
                     "int8:per-tensor:per-channel", "int8:fixed=1",
                     "int8:minmax=3", "int8:scale=x", "int8:best-of=x",
                     "int8:mse:mantissa-bits=x", "int8:block=",
                     "int8:tail=left", "int8:bins=few",
                     "codebook2:entries=/no/file"):
            with self.subTest(word=word), self.assertRaises(
                    quantd.QuantdError) as caught:
                quantd.EncodingSpec.parse(word)
            self.assertEqual(caught.exception.reason, "ARGUMENT_INVALID")

    def test_PerTensorOfABlockFormatNeedsARank(self):
        spec = quantd.EncodingSpec.parse("mxint8:per-tensor")
        self.assertEqual(list(spec.to_proto(3).block_size), [0, 0, 0])
        with self.assertRaises(quantd.QuantdError):
            spec.to_proto()
        self.assertEqual(
            list(quantd.EncodingSpec("int8", (1, 0)).to_proto().block_size),
            [1, 0])

    def test_EveryFormatHasTheSizeThatItsBitsTake(self):
        for name in FORMATS:
            info = quantd.format_info(name)
            per_byte = {2: 4, 4: 2}.get(info.bits, 1)
            wide = 4 if info.bits > 16 else 2 if info.bits > 8 else 1
            self.assertEqual(info.size_bytes(9), -(-9 // per_byte) * wide, name)
        self.assertEqual(quantd.format_info("int12").dtype, np.int16)
        self.assertEqual(quantd.format_info("uint9").dtype, np.uint16)
        self.assertEqual(quantd.format_info("mxint8").dtype, np.int8)
        self.assertEqual(quantd.format_info("float8_e5m2").dtype, np.uint8)

    def test_EveryCodeHasAValue(self):
        codebook = np.array([-1, 1], np.float32)
        for name in FORMATS:
            info = quantd.format_info(name)
            values = _values.table(name, codebook)
            with self.subTest(format=name):
                self.assertEqual(values is None, info.is_integer)
                if name.startswith("codebook"):
                    np.testing.assert_array_equal(values, codebook)
                elif values is not None:
                    self.assertEqual(values.shape, (1 << info.bits,))
        # Not taken for integers.
        unknown = en.NumberFormatInfo(
            kind=en.CODE_KIND_FLOAT)
        with mock.patch.object(
                _scales, "format_options", return_value=unknown
        ), self.assertRaises(quantd.QuantdError) as caught:
            _values.dequantize(
                np.zeros(3, np.uint8), quantd.Encoding("float8_e5m2", [0.5]),
                (3,), "float32")
        self.assertEqual(caught.exception.reason, "ARGUMENT_INVALID")

    def test_PackedCodesComeApartLowestBitsFirst(self):
        packed = np.array([0x8F, 0x07], np.uint8)
        np.testing.assert_array_equal(quantd.unpack(packed, "int4", 3),
                                      np.array([-1, -8, 7], np.int8))
        np.testing.assert_array_equal(quantd.unpack(packed, "uint4", 4),
                                      [15, 8, 7, 0])
        np.testing.assert_array_equal(quantd.unpack(packed, "int2", 5),
                                      [-1, -1, 0, -2, -1])


class EncodingTest(unittest.TestCase):

    def test_ComesBackFromItsMessageAsItWas(self):
        encoding = quantd.Encoding(
            "uint4", scale=np.array([[0.5], [0.25]], np.float32),
            zero_point=[[3], [4]], block_size=(1, 0), qmin=1, qmax=14,
            scale_shape=(2, 1))
        again = quantd.Encoding.from_proto(encoding.to_proto())
        self.assertEqual(again, encoding)
        self.assertEqual(again.scale.shape, (2, 1))
        self.assertNotEqual(again, dataclasses.replace(encoding, qmin=0))
        self.assertNotEqual(again, dataclasses.replace(encoding, scale=[1, 2]))

    def test_ScalesThatFollowFromCodesAreLeftToTheServer(self):
        encoding = quantd.Encoding(
            "mxint8", scale=[1.0, float("nan")],
            scale_code=np.array([127, 255], np.uint8))
        self.assertEqual(len(encoding.to_proto().scale), 0)
        self.assertEqual(encoding.to_proto().scale_code, b"\x7f\xff")
        # NaN is equal to itself here.
        self.assertEqual(encoding, quantd.Encoding(
            "mxint8", scale=[1.0, float("nan")], scale_code=[127, 255]))

    def test_FloatsAreZeroPointsBetweenCodes(self):
        encoding = quantd.Encoding("int2", [2, 4], [-0.5, 1])
        self.assertTrue(encoding.zero_points_are_real)
        message = encoding.to_proto()
        self.assertEqual((list(message.zero_point),
                          list(message.real_zero_point)), ([], [-0.5, 1]))
        self.assertEqual(quantd.Encoding.from_proto(message), encoding)
        self.assertFalse(
            quantd.Encoding("int2", [2], [1]).zero_points_are_real)
        self.assertFalse(quantd.Encoding("int2", [2]).has_zero_points)

    def test_WholeFloatsAreZeroPointsOnCodes(self):
        for given in ([1.0, -2.0], np.zeros(2), np.float32([0, 1])):
            zero_point = quantd.Encoding("int2", [2, 4], given).zero_point
            self.assertEqual(zero_point.dtype, np.int32)
            np.testing.assert_array_equal(zero_point, given)
        # Where they are said to be real they stay so.
        encoding = quantd.Encoding("int2", [2, 4], [1, 0], real_zero_point=True)
        message = encoding.to_proto()
        self.assertEqual(list(message.real_zero_point), [1, 0])
        again = quantd.Encoding.from_proto(message)
        self.assertEqual(again, encoding)
        self.assertTrue(again.with_scales(scale=[1, 2]).zero_points_are_real)
        for wrong, is_real in (([np.inf], None), ([1e10], None),
                               ([0.5], False)):
            with self.assertRaises(quantd.QuantdError):
                quantd.Encoding("int2", [2], wrong, real_zero_point=is_real)

    def test_FieldsOfTheWrongTypeAreRefused(self):
        for fields in ({"scale": "x"}, {"zero_point": [0.5j]},
                       {"scale": [1j]}, {"scale_code": [256]},
                       {"zero_point": [1 << 40]}):
            with self.subTest(fields=fields), self.assertRaises(
                    quantd.QuantdError):
                quantd.Encoding("int8", **fields)
        for fields in ({"qmin": "x"}, {"block_size": (1.5,)},
                       {"format": "int99"}):
            with self.subTest(fields=fields), self.assertRaises(
                    quantd.QuantdError):
                quantd.Encoding(**{"format": "int8", **fields}).to_proto()


class ArraysTest(unittest.TestCase):

    def test_ContiguousArraysAreNotCopied(self):
        for name, dtype in ELEMENT_DTYPES.items():
            x = np.zeros((3, 5), dtype)
            reals = _arrays.reals(x, name)
            self.assertTrue(np.shares_memory(reals.data, x))
            self.assertEqual((reals.shape, reals.element_type), ((3, 5), name))

    def test_AnyLayoutGivesTheElementsInOrder(self):
        x = np.arange(24, dtype=np.float32).reshape(4, 6)
        for array in (x.T, x[:, ::2], x[::-1], x.astype(">f4"), x[1:3, 2:],
                      np.asfortranarray(x), np.float32(3), x[:0], x[:, :0]):
            reals = _arrays.reals(array)
            self.assertEqual(reals.shape, np.shape(array))
            self.assertEqual(reals.data.tobytes(),
                             np.asarray(array, "<f4").tobytes())

    def test_OtherElementsAreRefused(self):
        for array, element_type in (
                (np.zeros(3, np.int32), None), (np.zeros(3, complex), None),
                (np.zeros(3, np.uint16), None), (["a"], None),
                ([[1.0], [1.0, 2.0]], None), (object(), None),
                (np.zeros(3, np.float32), "float16"),
                (np.zeros(3, np.float32), "bfloat16")):
            with self.subTest(array=array), self.assertRaises(
                    quantd.QuantdError) as caught:
                _arrays.reals(array, element_type)
            self.assertEqual(caught.exception.reason, "ARGUMENT_INVALID")

    def test_OutputsMustBeContiguousAndWritable(self):
        fixed = np.zeros(4, np.uint8)
        fixed.flags.writeable = False
        for out in ([1, 2], np.zeros((4, 4), np.uint8)[:, 1], fixed):
            with self.assertRaises(quantd.QuantdError):
                _arrays.output(out)

    def test_TensorsOfTorchShareTheirMemory(self):
        try:
            import torch  # pylint: disable=import-outside-toplevel
        except ImportError:
            self.skipTest("without torch")
        x = torch.arange(12.0).reshape(3, 4).requires_grad_()
        reals = _arrays.reals(x)
        self.assertEqual(reals.data.ctypes.data, x.data_ptr())
        half = torch.arange(12.0).reshape(3, 4).to(torch.bfloat16)
        reals = _arrays.reals(half)
        self.assertEqual(reals.data.ctypes.data, half.data_ptr())
        self.assertEqual(reals.element_type, "bfloat16")
        bits = np.arange(12, dtype=np.float32).view(np.uint32) >> 16
        np.testing.assert_array_equal(reals.data.view(np.uint16), bits)
        self.assertEqual(_arrays.reals(half.T).data.view(np.uint16).tolist(),
                         bits.reshape(3, 4).T.ravel().tolist())
        out = torch.zeros(12, dtype=torch.uint8)
        _arrays.output(out)[:] = 7
        self.assertEqual(out.sum(), 84)


if __name__ == "__main__":
    unittest.main(verbosity=2)
