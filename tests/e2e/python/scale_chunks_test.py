"""Scales that ride in chunks beside codes, up and down, come to the same bytes
as those of headers.

  scale_chunks_test.py --quantd BINARY [unittest arguments]
"""

import argparse
import sys
import tempfile
import unittest

import grpc
import numpy as np
import xxhash

import live_server

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

stub_folder = tempfile.TemporaryDirectory()
live_server.generate_stubs(stub_folder.name)
# pylint: disable=wrong-import-position
from quantd.v1 import encoding_pb2 as en
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import quantization_service_pb2_grpc as qs_grpc
from quantd.v1 import tensor_pb2 as te

SHAPE = (64, 288)
# Of a message down.
SCALE_BYTES = 1 << 10
STORED = {en.SCALE_TYPE_FLOAT32: np.float32, en.SCALE_TYPE_FLOAT16: np.float16}


def spec(name, block_size=(), **fields):
    return en.EncodingSpec(format=en.NumberFormat.Value(f"NUMBER_FORMAT_{name}"),
                           block_size=block_size, **fields)


# Formats by granularities: groups, channels of either axis, blocks of rows, one
# scale for each element, for the tensor.
SPECS = [
    spec("INT4", [1, 32]), spec("INT8", [1, 0]), spec("UINT4", [1, 32]),
    spec("NVFP4"), spec("MXFP4_E2M1"), spec("LPBQ"), spec("INT8", [0, 1]),
    spec("INT8", [16, 16]), spec("NF4", [1, 48]), spec("INT4", [1, 1]),
    spec("INT4", [1, 32], method=en.CALIBRATION_METHOD_MSE),
    spec("INT8", [1, 40], scale_type=en.SCALE_TYPE_FLOAT16),
    spec("UINT16", [1, 0], exclude_zero=True,
         symmetry=en.SYMMETRY_ASYMMETRIC),
    spec("INT8"),
]

# Whose scales depend on their own block alone, and whose blocks end with 16
# rows.
LOCAL_SPECS = [one for one in SPECS
               if one.block_size and list(one.block_size) != [0, 1]] + [
    spec("MXFP4_E2M1"), spec("MXFP8_E4M3"), spec("INT8", [2, 48]),
    spec("UINT4", [4, 0], symmetry=en.SYMMETRY_ASYMMETRIC),
    spec("NF4", [8, 100]), spec("INT4", [1, 40]),
    spec("UINT4", [1, 32], method=en.CALIBRATION_METHOD_MSE, search_steps=9,
         symmetry=en.SYMMETRY_ASYMMETRIC),
    spec("INT4", [1, 32], method=en.CALIBRATION_METHOD_SQNR),
    spec("INT4", [2, 32], method=en.CALIBRATION_METHOD_PERCENTILE,
         tail_fraction=0.05),
    spec("INT4", [1, 96], method=en.CALIBRATION_METHOD_ENTROPY,
         search_steps=9),
    spec("INT4", [1, 32], method=en.CALIBRATION_METHOD_FIXED_RANGE,
         range_min=-1, range_max=1),
    spec("INT4", [1, 32], method=en.CALIBRATION_METHOD_BEST_OF,
         methods=[en.CALIBRATION_METHOD_MIN_MAX, en.CALIBRATION_METHOD_MSE]),
]


class Answer:
    """What came down for one tensor."""

    def __init__(self, responses):
        self.header = self.summary = None
        self.data = b""
        self.chunks = []
        self.error = ""
        for response in responses:
            self.error += response.error.reason
            if hasattr(response, "data"):
                self.data += response.data
                if response.HasField("header"):
                    self.header = response.header
            if hasattr(response, "scales") and response.HasField("scales"):
                self.chunks.append(response.scales)
            if response.HasField("summary"):
                self.summary = response.summary

    def joined(self, field):
        return b"".join(getattr(chunk, field) for chunk in self.chunks)


def stored_scales(encoding):
    if encoding.scale_code:
        return encoding.scale_code
    return np.array(encoding.scale, STORED[encoding.scale_type]).tobytes()


class ScaleChunksTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = live_server.LiveServer(
            options.quantd, flags=["--response-chunk-bytes", f"{SCALE_BYTES}"])
        cls.addClassCleanup(cls.server.stop)
        cls.channel = grpc.insecure_channel(cls.server.address)
        cls.addClassCleanup(cls.channel.close)
        cls.stub = qs_grpc.QuantizationServiceStub(cls.channel)
        cls.array = np.random.default_rng(1).standard_normal(
            SHAPE, np.float32)
        cls.tensor = te.TensorDescription(
            element_type=te.ELEMENT_TYPE_FLOAT32, shape=SHAPE)

    def send(self, call, request_type, header, data, chunk_bytes, scales=(),
             first=0):
        """`scales`  ride with the first messages, one each.
        `first`   offset of the data in the tensor."""
        def messages():
            for index, offset in enumerate(range(0, len(data), chunk_bytes)):
                message = request_type(
                    offset=first + offset,
                    data=data[offset:offset + chunk_bytes])
                if index == 0:
                    message.header.CopyFrom(header)
                if index < len(scales):
                    if isinstance(scales[index], list):
                        message.scales.extend(scales[index])
                    else:
                        message.scales.CopyFrom(scales[index])
                yield message
        return Answer(call(messages(), timeout=live_server.PATIENCE_S))

    def quantize(self, chunk_bytes=1 << 20, scales=(), **fields):
        return self.send(
            self.stub.Quantize, qs.QuantizeRequest,
            qs.QuantizeHeader(tensor=self.tensor, **fields),
            self.array.tobytes(), chunk_bytes, scales)

    def dequantize(self, codes, encoding, chunk_bytes=1 << 20, scales=()):
        return self.send(
            self.stub.Dequantize, qs.DequantizeRequest,
            qs.DequantizeHeader(tensor=self.tensor, encoding=encoding), codes,
            chunk_bytes, scales)

    def whole(self, answer):
        """All scales of an answer in one chunk."""
        return en.ScaleChunk(scale=answer.joined("scale"),
                             zero_point=answer.joined("zero_point"),
                             outer_scale=answer.joined("outer_scale"))

    def test_chunks_have_the_scales_of_headers(self):
        for number, one in enumerate(SPECS):
            want = self.quantize(spec=one)
            encoding = want.header.encoding
            for chunk_bytes in (1 << 20, 4096, 3464):
                with self.subTest(spec=number, chunk_bytes=chunk_bytes):
                    got = self.quantize(chunk_bytes, spec=one,
                                        scales_in_chunks=True)
                    self.assertEqual(got.error, "")
                    self.assertEqual(got.data, want.data)
                    self.assertEqual(got.joined("scale"),
                                     stored_scales(encoding))
                    self.assertEqual(
                        got.joined("outer_scale"),
                        np.array(encoding.outer_scale, np.float32).tobytes())
                    self.assertEqual(
                        bool(encoding.zero_point),
                        got.header.encoding.chunks_have_zero_points)
                    self.assertTrue(got.header.encoding.scales_in_chunks)
                    self.assertFalse(got.header.encoding.scale)
                    self.assertEqual(got.header.encoding.scale_shape,
                                     encoding.scale_shape)
                    summary = got.summary
                    self.assertEqual(summary.degenerate_count,
                                     encoding.degenerate_count)
                    for field, checksum in (
                            ("scale", summary.scale_checksum_xxh3),
                            ("zero_point", summary.zero_point_checksum_xxh3),
                            ("outer_scale",
                             summary.outer_scale_checksum_xxh3)):
                        self.assertEqual(
                            xxhash.xxh3_64_intdigest(got.joined(field)),
                            checksum, field)
                    for chunk in got.chunks:
                        self.assertLessEqual(
                            len(chunk.scale) + len(chunk.zero_point)
                            + len(chunk.outer_scale), SCALE_BYTES)

    def test_scales_come_up_beside_elements(self):
        for number, one in enumerate(SPECS):
            down = self.quantize(spec=one, scales_in_chunks=True)
            encoding = down.header.encoding
            scales = [self.whole(down)]
            want = self.quantize(spec=one)
            reals = self.dequantize(want.data, want.header.encoding).data
            for chunk_bytes in (1 << 20, 4096):
                with self.subTest(spec=number, chunk_bytes=chunk_bytes):
                    up = self.quantize(chunk_bytes, scales,
                                       encoding=encoding,
                                       scales_in_chunks=True)
                    self.assertEqual(up.error, "")
                    self.assertEqual(up.data, want.data)
                    for field in ("scale", "zero_point", "outer_scale"):
                        self.assertEqual(up.joined(field), down.joined(field))
                    back = self.dequantize(want.data, encoding, chunk_bytes,
                                           scales)
                    self.assertEqual(back.error, "")
                    self.assertEqual(back.data, reals)
                    self.assertFalse(back.header.encoding.scale)
                    self.assertEqual(
                        self.evaluate(encoding, chunk_bytes, scales[0]),
                        self.evaluate(want.header.encoding, chunk_bytes))

    def evaluate(self, encoding, chunk_bytes, scales=None):
        header = qs.EvaluateHeader(
            tensor=self.tensor,
            candidates=[qs.EvaluateCandidate(encoding=encoding)])
        beside = [] if scales is None else [
            [qs.CandidateScales(candidate=0, scales=scales)]]
        answer = self.send(self.stub.Evaluate, qs.EvaluateRequest, header,
                           self.array.tobytes(), chunk_bytes, beside)
        self.assertEqual(answer.error, "")
        return answer.summary.candidates[0].SerializeToString()

    def test_local_specs_of_ranges_are_those_of_the_tensor(self):
        row = SHAPE[1] * 4
        for number, one in enumerate(LOCAL_SPECS):
            want = self.quantize(spec=one)
            self.assertEqual(want.error, "")
            scale = stored_scales(want.header.encoding)
            joined = [b"", b""]
            # Of 16, 32 and 16 rows, in messages that end within a block.
            for begin, end in ((0, 16), (16, 48), (48, 64)):
                with self.subTest(spec=number, rows=(begin, end)):
                    got = self.send(
                        self.stub.Quantize, qs.QuantizeRequest,
                        qs.QuantizeHeader(
                            tensor=self.tensor, spec=one,
                            scales_in_chunks=True,
                            range=te.ByteRange(begin_bytes=begin * row,
                                               end_bytes=end * row)),
                        self.array[begin:end].tobytes(), 3464,
                        first=begin * row)
                    self.assertEqual(got.error, "")
                    size = len(scale) // SHAPE[0]
                    if list(one.block_size)[:1] in ([1], []):
                        self.assertEqual(got.joined("scale"),
                                         scale[begin * size:end * size])
                    joined[0] += got.data
                    joined[1] += got.joined("scale")
            with self.subTest(spec=number):
                self.assertEqual(joined, [want.data, scale])

    def test_a_range_ends_with_a_band(self):
        row = SHAPE[1] * 4
        for one, end in ((spec("INT8", [16, 16]), 8 * row),
                         (spec("INT4", [1, 32]), row - 4),
                         (spec("NVFP4"), 16 * row)):
            answer = self.send(
                self.stub.Quantize, qs.QuantizeRequest,
                qs.QuantizeHeader(tensor=self.tensor, spec=one,
                                  scales_in_chunks=True,
                                  range=te.ByteRange(end_bytes=end)),
                self.array.tobytes()[:end], 1 << 20)
            self.assertEqual(answer.error, "RANGE_INVALID")

    def test_codes_without_an_encoding_are_the_same(self):
        for number, one in enumerate(SPECS + LOCAL_SPECS):
            want = self.quantize(spec=one)
            for chunk_bytes in (1 << 20, 3464):
                with self.subTest(spec=number, chunk_bytes=chunk_bytes):
                    got = self.quantize(chunk_bytes, spec=one,
                                        omit_encoding=True)
                    self.assertEqual(got.error, "")
                    self.assertEqual(got.data, want.data)
                    self.assertFalse(got.chunks)
                    self.assertEqual(got.summary.clipped_low_count,
                                     want.summary.clipped_low_count)

    def outer_specs(self):
        """Specs with outer scales, and the maxima of their outer blocks."""
        magnitude = np.abs(self.array)
        return [(spec("NVFP4"), magnitude.max().reshape(1)),
                (spec("LPBQ"), magnitude.max(axis=1)),
                (spec("NVFP4", outer_block_size=[32, 0]),
                 magnitude.reshape(2, -1).max(axis=1))]

    def test_outer_maxima_come_to_the_bytes_of_a_held_tensor(self):
        for number, (one, maximum) in enumerate(self.outer_specs()):
            want = self.quantize(spec=one)
            encoding = want.header.encoding
            for chunk_bytes in (1 << 20, 4096, 3464):
                with self.subTest(spec=number, chunk_bytes=chunk_bytes):
                    got = self.quantize(chunk_bytes, spec=one,
                                        scales_in_chunks=True,
                                        outer_maximum=maximum)
                    self.assertEqual(got.error, "")
                    self.assertEqual(got.data, want.data)
                    self.assertEqual(got.joined("scale"),
                                     stored_scales(encoding))
                    self.assertEqual(
                        got.joined("outer_scale"),
                        np.array(encoding.outer_scale, np.float32).tobytes())
            with self.subTest(spec=number):
                self.assertEqual(
                    self.evaluate_specs([one], outer_maximum=maximum),
                    self.evaluate_specs([one]))
                # Without chunks, too.
                got = self.quantize(spec=one, outer_maximum=maximum)
                self.assertEqual(got.data, want.data)
                self.assertEqual(list(got.header.encoding.outer_scale),
                                 list(encoding.outer_scale))

    def test_outer_maxima_are_checked(self):
        for number, (one, maximum) in enumerate(self.outer_specs()):
            too_small = maximum.copy()
            too_small[-1] = np.nextafter(too_small[-1], np.float32(0))
            for wrong in (too_small, np.append(maximum, 1), -maximum,
                          maximum * np.nan):
                for in_chunks in (True, False):
                    with self.subTest(spec=number, maximum=wrong[-1],
                                      in_chunks=in_chunks):
                        answer = self.quantize(
                            4096, spec=one, scales_in_chunks=in_chunks,
                            outer_maximum=wrong)
                        self.assertEqual(answer.error, "OUTER_MAXIMUM")
        answer = self.quantize(spec=SPECS[0], outer_maximum=[9])
        self.assertEqual(answer.error, "OUTER_MAXIMUM")

    def evaluate_specs(self, specs, chunk_bytes=1 << 20, omit_encodings=False,
                       **fields):
        """What each comes to, without the encodings; for one alone also per
        scale index."""
        answer = self.send(
            self.stub.Evaluate, qs.EvaluateRequest,
            qs.EvaluateHeader(
                tensor=self.tensor, omit_encodings=omit_encodings,
                per_scale_index=len(specs) == 1, with_distribution=True,
                candidates=[qs.EvaluateCandidate(spec=one, **fields)
                            for one in specs]),
            self.array.tobytes(), chunk_bytes)
        self.assertEqual(answer.error, "")
        results = list(answer.summary.candidates)
        for result in results:
            self.assertEqual(result.HasField("encoding"), not omit_encodings)
            result.ClearField("encoding")
        return [str(result) for result in results]

    def test_specs_measure_the_same_as_elements_arrive(self):
        specs = [one for one in SPECS + LOCAL_SPECS
                 if list(one.block_size) != [1, 1]]
        for some in [specs] + [[one] for one in specs]:
            want = self.evaluate_specs(some)
            for chunk_bytes in (1 << 20, 3464):
                got = self.evaluate_specs(some, chunk_bytes,
                                          omit_encodings=True)
                for one, got_of_one, want_of_one in zip(some, got, want):
                    with self.subTest(spec=str(one), chunk_bytes=chunk_bytes,
                                      count=len(some)):
                        self.assertEqual(got_of_one, want_of_one)

    def test_scales_come_no_later_than_their_elements(self):
        down = self.quantize(spec=SPECS[0], scales_in_chunks=True)
        scale = down.joined("scale")
        # 8 messages of 8 rows, of 9 scales a row.
        step = 72 * 4
        scales = [en.ScaleChunk(first=72 * k,
                                scale=scale[step * k:step * (k + 1)])
                  for k in range(8)]
        chunk_bytes = self.array.nbytes // 8
        encoding = down.header.encoding
        self.assertEqual(
            self.quantize(chunk_bytes, scales, encoding=encoding).data,
            down.data)
        late = [en.ScaleChunk()] + scales
        self.assertEqual(
            self.quantize(chunk_bytes, late, encoding=encoding).error,
            "SCALE_COUNT")

    def test_scales_are_checked_as_they_come(self):
        encoding = en.Encoding(format=en.NUMBER_FORMAT_INT4,
                               block_size=[1, 32], scales_in_chunks=True)
        ones = np.ones(64 * 9, np.float32)
        bad = ones.copy()
        bad[5] = np.nan
        for error, fields in (
                ("SCALE_COUNT", {}),
                ("SCALE_COUNT", {"scale": ones[:-1].tobytes()}),
                ("SCALE_COUNT", {"scale": ones.tobytes() + bytes(4)}),
                ("SCALE_COUNT", {"scale": b"abc"}),
                ("SCALE_COUNT", {"first": 3, "scale": ones.tobytes()}),
                ("SCALE_COUNT", {"scale": ones.tobytes(),
                                 "zero_point": b"1"}),
                ("SCALE_COUNT", {"scale": ones.tobytes(),
                                 "outer_scale": ones[:1].tobytes()}),
                ("SCALE_INVALID", {"scale": bad.tobytes()})):
            with self.subTest(fields=sorted(fields)):
                answer = self.quantize(scales=[en.ScaleChunk(**fields)],
                                       encoding=encoding)
                self.assertEqual(answer.error, error)
        encoding.format = en.NUMBER_FORMAT_UINT4
        encoding.chunks_have_zero_points = True
        answer = self.quantize(
            scales=[en.ScaleChunk(scale=ones.tobytes(),
                                  zero_point=b"\x10" * ones.size)],
            encoding=encoding)
        self.assertEqual(answer.error, "ZERO_POINT_RANGE")
        answer = self.quantize(scales=[en.ScaleChunk()], spec=SPECS[0])
        self.assertEqual(answer.error, "SCALE_COUNT")

    def test_an_encoding_is_stored_when_its_scales_are_there(self):
        name = te.TensorName(model="acme/net", tensor="stored")
        tensor = te.TensorDescription(name=name,
                                      element_type=te.ELEMENT_TYPE_FLOAT32,
                                      shape=SHAPE)
        down = self.quantize(spec=SPECS[0], scales_in_chunks=True)
        stored = self.send(
            self.stub.Quantize, qs.QuantizeRequest,
            qs.QuantizeHeader(tensor=tensor, encoding=down.header.encoding,
                              store=True),
            self.array.tobytes(), 4096, [self.whole(down)])
        self.assertEqual(stored.error, "")
        self.assertNotEqual(stored.summary.etag, "")
        # Rows 3 to 40, by reference.
        row = SHAPE[1] * 4
        part = self.send(
            self.stub.Quantize, qs.QuantizeRequest,
            qs.QuantizeHeader(tensor=tensor, scales_in_chunks=True,
                              reference=en.EncodingReference(
                                  etag=stored.summary.etag),
                              range=te.ByteRange(begin_bytes=3 * row,
                                                 end_bytes=40 * row)),
            self.array.tobytes()[3 * row:40 * row], 1 << 20, first=3 * row)
        self.assertEqual(part.error, "")
        self.assertEqual(part.data, down.data[3 * 144:40 * 144])
        self.assertEqual(part.chunks[0].first, 3 * 9)
        self.assertEqual(part.joined("scale"),
                         down.joined("scale")[3 * 36:40 * 36])

    def test_references_are_of_any_size_where_they_are_not_answered(self):
        server = live_server.LiveServer(options.quantd,
                                        flags=["--chunk-bytes", "1KiB"])
        self.addCleanup(server.stop)
        channel = grpc.insecure_channel(server.address)
        self.addCleanup(channel.close)
        stub = qs_grpc.QuantizationServiceStub(channel)
        tensor = te.TensorDescription(
            name=te.TensorName(model="acme/net", tensor="large"),
            element_type=te.ELEMENT_TYPE_FLOAT32, shape=SHAPE)
        reals = self.array.tobytes()
        want = self.quantize(spec=SPECS[0])

        def quantize(**fields):
            return self.send(stub.Quantize, qs.QuantizeRequest,
                             qs.QuantizeHeader(tensor=tensor, **fields), reals,
                             1024)

        stored = quantize(spec=SPECS[0], scales_in_chunks=True, store=True)
        self.assertEqual(stored.error, "")
        reference = en.EncodingReference(etag=stored.summary.etag)
        for fields in ({"scales_in_chunks": True}, {"omit_encoding": True}):
            got = quantize(reference=reference, **fields)
            self.assertEqual(got.error, "")
            self.assertEqual(got.data, want.data)
        self.assertEqual(quantize(reference=reference).error,
                         "SCALE_COUNT_LIMIT")
        for omit in (True, False):
            back = self.send(
                stub.Dequantize, qs.DequantizeRequest,
                qs.DequantizeHeader(tensor=tensor, reference=reference,
                                    omit_encoding=omit), want.data, 1024)
            self.assertEqual(back.error, "" if omit else "SCALE_COUNT_LIMIT")
        measured = self.send(
            stub.Evaluate, qs.EvaluateRequest,
            qs.EvaluateHeader(tensor=tensor, candidates=[
                qs.EvaluateCandidate(reference=reference)]), reals, 1024)
        self.assertEqual(measured.error, "")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
