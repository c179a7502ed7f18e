"""A stranger's client: stubs generated from proto/ alone, results from numpy.

  stub_client_test.py --quantd BINARY [unittest arguments]
"""

import argparse
import itertools
import sys
import tempfile
import time
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
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import encoding_service_pb2_grpc as es_grpc
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import quantization_service_pb2_grpc as qs_grpc
from quantd.v1 import tensor_pb2 as te

TIMEOUT_S = live_server.PATIENCE_S
ELEMENT_TYPES = {"float32": te.ELEMENT_TYPE_FLOAT32,
                 "float16": te.ELEMENT_TYPE_FLOAT16,
                 "float64": te.ELEMENT_TYPE_FLOAT64}


def data_of(shape, seed=1, dtype=np.float32):
    random = np.random.default_rng(seed)
    return random.standard_normal(shape).astype(dtype)


def description(array, tensor="t", model="acme/net", shape=None):
    return te.TensorDescription(
        name=te.TensorName(model=model, tensor=tensor),
        element_type=ELEMENT_TYPES[str(array.dtype)],
        shape=array.shape if shape is None else shape)


def messages(request_type, header, data, chunk_bytes=1 << 20):
    """A tensor as messages up: the header rides with the first chunk."""
    yield request_type(header=header, data=data[:chunk_bytes])
    for offset in range(chunk_bytes, len(data), chunk_bytes):
        yield request_type(offset=offset,
                           data=data[offset:offset + chunk_bytes])


def tensors_of(responses):
    """Groups responses into one (header, data, summary, error) a tensor.

    Messages that carry no header, summary or error leave those None.
    """
    header, data = None, bytearray()
    for response in responses:
        fields = {field.name for field, _ in response.ListFields()}
        if "header" in fields:
            header = response.header
        if "data" in fields:
            assert response.offset == len(data), "chunks are contiguous"
            data += response.data
        if "summary" in fields or "error" in fields:
            yield (header, bytes(data),
                   response.summary if "summary" in fields else None,
                   response.error if "error" in fields else None)
            header, data = None, bytearray()


def calibrate_strict(x, bits):
    """SYMMETRY_STRICT over the last axis of `x`: float32 scales."""
    absmax = np.abs(x.astype(np.float64)).max(axis=-1)
    scale = (absmax / (2 ** (bits - 1) - 1)).astype(np.float32)
    return np.where(absmax == 0, np.float32(1), scale)


def quantize(x, scale, zero_point, qmin, qmax):
    real = x.dtype if x.dtype == np.float64 else np.float32
    codes = np.rint(x.astype(real) / scale.astype(real)) + zero_point
    return np.clip(codes, qmin, qmax).astype(np.int32)


def pack_int4(codes):
    """Two codes a byte, low nibble first, an odd tail padded with zero."""
    nibbles = (codes.reshape(-1) & 0xF).astype(np.uint8)
    nibbles = np.append(nibbles, np.zeros(len(nibbles) % 2, np.uint8))
    return (nibbles[0::2] | nibbles[1::2] << 4).tobytes()


class StubClientTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.server = live_server.LiveServer(options.quantd)
        cls.addClassCleanup(cls.server.stop)
        cls.channel = grpc.insecure_channel(
            cls.server.address,
            options=[("grpc.enable_http_proxy", 0),
                     ("grpc.max_receive_message_length", 64 << 20)])
        cls.addClassCleanup(cls.channel.close)
        cls.quantization = qs_grpc.QuantizationServiceStub(cls.channel)
        cls.encodings = es_grpc.EncodingServiceStub(cls.channel)

    def call(self, rpc, *streams):
        return list(tensors_of(rpc(itertools.chain(*streams),
                                   timeout=TIMEOUT_S)))

    def one(self, rpc, stream):
        """The answer to the only tensor of a stream, which must not fail."""
        (answer,) = self.call(rpc, stream)
        self.assertIsNone(answer[3], answer[3])
        return answer[:3]

    def test_QuantizesPerChannelLikeNumpyWhateverTheChunking(self):
        x = data_of((64, 1000))
        spec = en.EncodingSpec(format=en.NUMBER_FORMAT_INT8, block_size=[1, 0])
        scale = calibrate_strict(x, 8)
        want = quantize(x, scale[:, None], 0, -127, 127).astype(np.int8)
        for chunk_bytes in (4, 4092, 65536, 1 << 20):
            with self.subTest(chunk_bytes=chunk_bytes):
                header, codes, summary = self.one(
                    self.quantization.Quantize,
                    messages(qs.QuantizeRequest,
                             qs.QuantizeHeader(tensor=description(x),
                                               spec=spec),
                             x.tobytes(), chunk_bytes))
                np.testing.assert_array_equal(
                    np.array(header.encoding.scale, np.float32), scale)
                self.assertEqual(codes, want.tobytes())
                self.assertEqual(header.size_bytes, want.size)
                self.assertEqual(list(header.shape), [64, 1000])
                self.assertEqual(summary.count, x.size)
                self.assertEqual(summary.checksum_xxh3,
                                 xxhash.xxh3_64_intdigest(codes))

    def test_QuantizesInt4InGroupsOf32LikeNumpyAndPacksLowNibbleFirst(self):
        x = data_of((33, 96), seed=2)
        groups = x.reshape(33, 3, 32)
        scale = calibrate_strict(groups, 4)
        want = quantize(groups, scale[..., None], 0, -7, 7)
        header, codes, _ = self.one(
            self.quantization.Quantize,
            messages(qs.QuantizeRequest,
                     qs.QuantizeHeader(
                         tensor=description(x),
                         spec=en.EncodingSpec(format=en.NUMBER_FORMAT_INT4,
                                              block_size=[1, 32])),
                     x.tobytes(), 1000))
        np.testing.assert_array_equal(
            np.array(header.encoding.scale, np.float32), scale.reshape(-1))
        self.assertEqual(codes, pack_int4(want))

    def test_QuantizesWithAnInlineEncodingAndCountsWhatIsClipped(self):
        x = np.array([0.5, 1.5, 2.5, -0.5, 1e9, -1e9, np.nan, np.inf, -np.inf],
                     np.float32)
        _, codes, summary = self.one(
            self.quantization.Quantize,
            messages(qs.QuantizeRequest,
                     qs.QuantizeHeader(
                         tensor=description(x),
                         encoding=en.Encoding(format=en.NUMBER_FORMAT_UINT8,
                                              scale=[1.0], zero_point=[3])),
                     x.tobytes()))
        self.assertEqual(list(codes), [3, 5, 5, 3, 255, 0, 3, 255, 0])
        self.assertEqual(
            (summary.clipped_low_count, summary.clipped_high_count,
             summary.nan_count, summary.positive_infinity_count,
             summary.negative_infinity_count), (2, 2, 1, 1, 1))

    def test_QuantizesFloat16AndFloat64LikeNumpy(self):
        for dtype in (np.float16, np.float64):
            with self.subTest(dtype=dtype):
                x = data_of((1000,), seed=3, dtype=dtype)
                scale = np.float32(0.0247)
                _, codes, _ = self.one(
                    self.quantization.Quantize,
                    messages(qs.QuantizeRequest,
                             qs.QuantizeHeader(
                                 tensor=description(x),
                                 encoding=en.Encoding(
                                     format=en.NUMBER_FORMAT_INT8,
                                     scale=[scale], zero_point=[3])),
                             x.tobytes(), 600))
                want = quantize(x, scale, 3, -128, 127).astype(np.int8)
                self.assertEqual(codes, want.tobytes())

    def test_QuantizesARangeOfATensorToTheSameBytes(self):
        x = data_of((40, 100), seed=4)
        encoding = en.Encoding(format=en.NUMBER_FORMAT_INT8, block_size=[1, 0],
                               scale=calibrate_strict(x, 8).tolist())

        def codes_of(begin, end):
            header = qs.QuantizeHeader(
                tensor=description(x), encoding=encoding,
                range=te.ByteRange(begin_bytes=begin, end_bytes=end))
            answer = self.quantization.Quantize(
                iter([qs.QuantizeRequest(header=header, offset=begin,
                                         data=x.tobytes()[begin:end])]),
                timeout=TIMEOUT_S)
            data = b""
            for response in answer:
                self.assertFalse(response.HasField("error"), response)
                if response.data:
                    self.assertEqual(response.offset, begin // 4 + len(data))
                data += response.data
            return data

        whole = codes_of(0, x.nbytes)
        self.assertEqual(len(whole), x.size)
        self.assertEqual(codes_of(0, 6404) + codes_of(6404, x.nbytes), whole)

    def test_DequantizesLikeNumpyWhateverTheChunking(self):
        random = np.random.default_rng(5)
        codes = random.integers(-128, 128, (16, 500)).astype(np.int8)
        scale = random.uniform(0.001, 2, 16).astype(np.float32)
        zero_point = random.integers(-100, 100, 16)
        want = (codes.astype(np.int32) - zero_point[:, None]).astype(
            np.float32) * scale[:, None]
        encoding = en.Encoding(format=en.NUMBER_FORMAT_INT8, block_size=[1, 0],
                               scale=scale.tolist(),
                               zero_point=zero_point.tolist())
        for chunk_bytes in (1, 333, 1 << 20):
            with self.subTest(chunk_bytes=chunk_bytes):
                header, reals, summary = self.one(
                    self.quantization.Dequantize,
                    messages(qs.DequantizeRequest,
                             qs.DequantizeHeader(tensor=description(want),
                                                 encoding=encoding),
                             codes.tobytes(), chunk_bytes))
                self.assertEqual(reals, want.tobytes())
                self.assertEqual(header.size_bytes, want.nbytes)
                self.assertEqual(summary.count, want.size)
                self.assertEqual(summary.checksum_xxh3,
                                 xxhash.xxh3_64_intdigest(reals))

    def test_CalibratesStoresAndQuantizesByReference(self):
        x = data_of((10, 77), seed=6)
        name = te.TensorName(model="acme/net", tensor="by-reference")
        _, _, summary = self.one(
            self.quantization.Calibrate,
            messages(qs.CalibrateRequest,
                     qs.CalibrateHeader(
                         tensor=description(x, "by-reference"),
                         spec=en.EncodingSpec(
                             format=en.NUMBER_FORMAT_UINT8)),
                     x.tobytes(), 100))
        self.assertEqual(summary.statistics.count, x.size)
        self.assertEqual(summary.statistics.min, float(x.min()))
        self.assertEqual(summary.statistics.max, float(x.max()))
        stored = self.encodings.GetEncoding(
            es.GetEncodingRequest(name=name), timeout=TIMEOUT_S)
        stored = stored.stored_encoding
        self.assertEqual(stored.etag, summary.stored_encoding.etag)

        low = min(float(x.min()), 0.0)
        scale = np.float32((max(float(x.max()), 0.0) - low) / 255)
        zero_point = int(np.clip(0 - np.rint(low / float(scale)), 0, 255))
        self.assertEqual(list(stored.encoding.scale), [scale])
        self.assertEqual(list(stored.encoding.zero_point), [zero_point])
        header, codes, _ = self.one(
            self.quantization.Quantize,
            messages(qs.QuantizeRequest,
                     qs.QuantizeHeader(
                         tensor=description(x, "by-reference"),
                         reference=en.EncodingReference(etag=stored.etag)),
                     x.tobytes()))
        self.assertEqual(header.etag, stored.etag)
        self.assertEqual(
            codes, quantize(x, scale, zero_point, 0, 255).astype(
                np.uint8).tobytes())

    def test_EvaluatesCandidatesSideBySideLikeNumpy(self):
        x = data_of((20, 64), seed=7)
        candidates = [
            qs.EvaluateCandidate(
                label="int8", spec=en.EncodingSpec(
                    format=en.NUMBER_FORMAT_INT8, block_size=[1, 0])),
            qs.EvaluateCandidate(
                label="int4", spec=en.EncodingSpec(
                    format=en.NUMBER_FORMAT_INT4, block_size=[1, 32]))]
        _, _, summary = self.one(
            self.quantization.Evaluate,
            messages(qs.EvaluateRequest,
                     qs.EvaluateHeader(tensor=description(x),
                                       candidates=candidates,
                                       per_scale_index=True),
                     x.tobytes(), 1024))
        self.assertEqual([c.label for c in summary.candidates],
                         ["int8", "int4"])
        for candidate, bits, group in zip(summary.candidates, (8, 4),
                                          (64, 32)):
            blocks = x.reshape(-1, group)
            scale = calibrate_strict(blocks, bits)[:, None]
            top = 2 ** (bits - 1) - 1
            back = quantize(blocks, scale, 0, -top, top).astype(
                np.float32) * scale
            error = back.astype(np.float64) - blocks.astype(np.float64)
            squared = (error ** 2).sum()
            signal = (blocks.astype(np.float64) ** 2).sum()
            overall = candidate.overall
            self.assertEqual(overall.count, x.size)
            self.assertAlmostEqual(overall.sum_squared_error / squared, 1, 9)
            self.assertAlmostEqual(overall.sqnr_db,
                                   10 * np.log10(signal / squared), 6)
            self.assertAlmostEqual(overall.max_absolute_error,
                                   np.abs(error).max(), 6)
            self.assertEqual(len(candidate.per_scale_index), len(blocks))
            self.assertAlmostEqual(
                sum(m.sum_squared_error
                    for m in candidate.per_scale_index) / squared, 1, 9)

    def test_AnErrorEndsItsTensorAndNotTheStream(self):
        x = data_of((8, 8), seed=8)
        encoding = en.Encoding(format=en.NUMBER_FORMAT_INT8, scale=[0.05])

        def tensor(name, **changes):
            header = qs.QuantizeHeader(
                tensor=description(x, name, shape=changes.get("shape")),
                encoding=changes.get("encoding", encoding))
            return messages(qs.QuantizeRequest, header, x.tobytes(), 64)

        answers = self.call(
            self.quantization.Quantize,
            tensor("first"),
            tensor("two scales for one",
                   encoding=en.Encoding(format=en.NUMBER_FORMAT_INT8,
                                        scale=[0.05, 0.05])),
            tensor("third"),
            tensor("half of it is missing", shape=[16, 8]),
            tensor("last"))
        errors = [error.reason if error else None
                  for _, _, _, error in answers]
        self.assertEqual(errors, [None, "SCALE_COUNT", None,
                                  "TENSOR_INCOMPLETE", None])
        want = quantize(x, np.float32(0.05), 0, -128, 127).astype(np.int8)
        for index in (0, 2, 4):
            self.assertEqual(answers[index][1], want.tobytes())
        for index in (1, 3):
            error = answers[index][3]
            self.assertEqual(error.code,
                             grpc.StatusCode.INVALID_ARGUMENT.value[0])
            self.assertNotEqual(error.message, "")

    def test_AGapBetweenChunksIsAChunkOffsetError(self):
        x = data_of((16,), seed=9)
        header = qs.QuantizeHeader(
            tensor=description(x),
            encoding=en.Encoding(format=en.NUMBER_FORMAT_INT8, scale=[0.05]))
        ((_, _, _, error),) = self.call(
            self.quantization.Quantize,
            [qs.QuantizeRequest(header=header, data=x.tobytes()[:16]),
             qs.QuantizeRequest(offset=20, data=x.tobytes()[20:])])
        self.assertEqual(error.reason, "CHUNK_OFFSET")

    def test_AChunkWithoutATensorEndsTheStream(self):
        with self.assertRaises(grpc.RpcError) as caught:
            list(self.quantization.Quantize(
                iter([qs.QuantizeRequest(data=b"1234")]), timeout=TIMEOUT_S))
        self.assertEqual(caught.exception.code(),
                         grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("HEADER_MISSING", caught.exception.details())
        details = dict(caught.exception.trailing_metadata())
        self.assertIn(b"HEADER_MISSING", details["grpc-status-details-bin"])

    def test_PutsGetsListsAndDeletesEncodings(self):
        model = "acme/put-get"
        names = [f"layer{i}" for i in range(5)]
        etags = {}
        for i, name in enumerate(names):
            put = self.encodings.PutEncoding(
                es.PutEncodingRequest(
                    name=te.TensorName(model=model, revision="v1",
                                       tensor=name),
                    encoding=en.Encoding(format=en.NUMBER_FORMAT_INT8,
                                         scale=[0.5 + i], zero_point=[i]),
                    if_match="absent"),
                timeout=TIMEOUT_S)
            etags[name] = put.stored_encoding.etag
        self.assertEqual(len(set(etags.values())), len(names))

        listed, token, pages = [], "", 0
        while True:
            page = self.encodings.ListEncodings(
                es.ListEncodingsRequest(model=model, revision="v1",
                                        page_size=2, page_token=token),
                timeout=TIMEOUT_S)
            listed += [stored.name.tensor for stored in page.encodings]
            pages += 1
            token = page.next_page_token
            if not token:
                break
        self.assertEqual(listed, names)
        self.assertEqual(pages, 3)
        self.assertIn(model, [m.model for m in self.encodings.ListModels(
            es.ListModelsRequest(), timeout=TIMEOUT_S).models])
        self.assertEqual(
            [r.revision for r in self.encodings.ListRevisions(
                es.ListRevisionsRequest(model=model),
                timeout=TIMEOUT_S).revisions], ["v1"])

        name = te.TensorName(model=model, revision="v1", tensor="layer3")
        got = self.encodings.GetEncoding(es.GetEncodingRequest(name=name),
                                         timeout=TIMEOUT_S).stored_encoding
        self.assertEqual(list(got.encoding.scale), [3.5])
        self.assertEqual(list(got.encoding.zero_point), [3])
        self.assertEqual(got.etag, etags["layer3"])

        with self.assertRaises(grpc.RpcError) as caught:
            self.encodings.DeleteEncoding(
                es.DeleteEncodingRequest(name=name, if_match="not this one"),
                timeout=TIMEOUT_S)
        self.assertEqual(caught.exception.code(),
                         grpc.StatusCode.FAILED_PRECONDITION)
        self.encodings.DeleteEncoding(
            es.DeleteEncodingRequest(name=name, if_match=got.etag),
            timeout=TIMEOUT_S)
        with self.assertRaises(grpc.RpcError) as caught:
            self.encodings.GetEncoding(es.GetEncodingRequest(name=name),
                                       timeout=TIMEOUT_S)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)
        self.assertIn("ENCODING_NOT_FOUND", caught.exception.details())

    def contribute(self, tensor, batches, source="rank-0", first=1, spec=None,
                   **contribution):
        """Sends batches as contributions on one stream; their summaries."""
        def headers():
            for sequence, x in enumerate(batches, first):
                header = qs.CalibrateHeader(
                    tensor=description(x, tensor, "acme/contribute"),
                    contribution=qs.Contribution(
                        source=source, sequence=sequence, **contribution))
                if spec is not None:
                    header.spec.CopyFrom(spec)
                yield messages(qs.CalibrateRequest, header, x.tobytes(), 4000)

        summaries = []
        for _, _, summary, error in self.call(self.quantization.Calibrate,
                                              *headers()):
            self.assertIsNone(error, error)
            summaries.append(summary)
        self.assertEqual(len(summaries), len(batches))
        return summaries

    def compute(self, tensor, spec, **request):
        """Encodings of the tensors that match, by name."""
        request = es.ComputeEncodingsRequest(model="acme/contribute",
                                             **request)
        request.overrides.add(pattern=tensor, spec=spec)
        answers = {}
        for answer in self.encodings.ComputeEncodings(request,
                                                      timeout=TIMEOUT_S):
            self.assertFalse(answer.HasField("error"), answer)
            answers[answer.name.tensor] = answer
        return answers

    def test_CountsEveryContributionExactlyOnce(self):
        batches = [data_of((4, 50), seed) for seed in range(10, 14)]
        first = self.contribute("once", batches[:2])
        self.assertEqual([(s.contribution.sequence, s.contribution.duplicate)
                          for s in first], [(1, False), (2, False)])
        again = self.contribute("once", batches[:3])
        self.assertEqual([(s.contribution.sequence, s.contribution.duplicate)
                          for s in again], [(2, True), (2, True), (3, False)])
        self.contribute("once", batches[3:], source="rank-1", first=7)

        x = np.concatenate(batches)
        name = te.TensorName(model="acme/contribute", tensor="once")
        got = self.encodings.GetStatistics(
            es.GetStatisticsRequest(name=name, with_state=True),
            timeout=TIMEOUT_S)
        self.assertEqual((got.statistics.count, got.statistics.min,
                          got.statistics.max),
                         (x.size, float(x.min()), float(x.max())))
        self.assertEqual([(s.source, s.sequence) for s in got.sources],
                         [("rank-0", 3), ("rank-1", 7)])
        self.assertEqual(list(got.state.shape), [4, 50])
        (histogram,) = got.state.histograms
        self.assertEqual(self.histogram_of(x.reshape(-1),
                                           got.state.mantissa_bits),
                         (list(np.cumsum(histogram.key_delta)),
                          list(histogram.count), list(histogram.low_sum)))

        listed = self.encodings.ListStatistics(
            es.ListStatisticsRequest(model="acme/contribute"),
            timeout=TIMEOUT_S)
        self.assertIn(("once", 2), [(e.tensor, e.source_count)
                                    for e in listed.entries])
        self.encodings.DeleteStatistics(
            es.DeleteStatisticsRequest(name=name), timeout=TIMEOUT_S)
        with self.assertRaises(grpc.RpcError) as caught:
            self.encodings.GetStatistics(es.GetStatisticsRequest(name=name),
                                         timeout=TIMEOUT_S)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)
        self.assertIn("STATISTICS_NOT_FOUND", caught.exception.details())

    @staticmethod
    def histogram_of(x, mantissa_bits):
        """Keys, counts and sums of low bits, as statistics.proto has them."""
        bits = (x + np.float32(0)).view(np.uint32)
        ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
        low_bits = 23 - mantissa_bits
        keys, index = np.unique(ordered >> low_bits, return_inverse=True)
        low = (bits & np.uint32((1 << low_bits) - 1)).astype(np.uint64)
        sums = np.zeros(len(keys), np.uint64)
        np.add.at(sums, index, low)
        return list(keys), list(np.bincount(index)), list(sums)

    def test_ComputesManyEncodingsFromOneCalibration(self):
        batches = [data_of((3000,), seed) for seed in range(20, 23)]
        self.contribute("many", batches)
        x = np.concatenate(batches)
        int8 = {"format": en.NUMBER_FORMAT_INT8}

        def encoding(dry_run=True, **spec):
            answers = self.compute("many", en.EncodingSpec(**spec),
                                   dry_run=dry_run)
            self.assertEqual(list(answers), ["many"])
            answer = answers["many"]
            self.assertEqual((answer.done_count, answer.total_count), (1, 1))
            return answer

        min_max = encoding(**int8).stored_encoding.encoding
        self.assertEqual(list(min_max.scale),
                         list(calibrate_strict(x[None, :], 8)))
        # numpy's percentile, within what bins of 7 bits can tell.
        percentile = encoding(method=en.CALIBRATION_METHOD_PERCENTILE,
                              tail_fraction=0.01, **int8)
        want = np.percentile(np.abs(x), 99) / 127
        got = percentile.stored_encoding.encoding.scale[0]
        self.assertAlmostEqual(got / want, 1, delta=0.0039)
        # The predicted error of each is that of numpy, and MSE has the least.
        errors = {}
        for method in (en.CALIBRATION_METHOD_MIN_MAX,
                       en.CALIBRATION_METHOD_PERCENTILE,
                       en.CALIBRATION_METHOD_ENTROPY,
                       en.CALIBRATION_METHOD_SQNR,
                       en.CALIBRATION_METHOD_MSE):
            answer = encoding(format=en.NUMBER_FORMAT_INT4, method=method)
            scale = np.float32(answer.stored_encoding.encoding.scale[0])
            back = quantize(x, scale, 0, -7, 7).astype(np.float32) * scale
            error = ((back.astype(np.float64) - x) ** 2).mean()
            prediction = answer.prediction
            self.assertEqual(prediction.count, x.size)
            self.assertLessEqual(prediction.mean_squared_error_low,
                                 error * (1 + 1e-9))
            self.assertGreaterEqual(prediction.mean_squared_error_high,
                                    error * (1 - 1e-9))
            self.assertAlmostEqual(prediction.mean_squared_error / error, 1,
                                   delta=0.01)
            errors[method] = error
        self.assertEqual(min(errors, key=errors.get),
                         en.CALIBRATION_METHOD_MSE)

        # What is not a dry run is stored.
        stored = encoding(dry_run=False, format=en.NUMBER_FORMAT_UINT4)
        name = te.TensorName(model="acme/contribute", tensor="many")
        got = self.encodings.GetEncoding(es.GetEncodingRequest(name=name),
                                         timeout=TIMEOUT_S).stored_encoding
        self.assertEqual(got.etag, stored.stored_encoding.etag)
        self.assertEqual(got.encoding, stored.stored_encoding.encoding)

    def test_SweepsSpecsOverTheTensorsOfARevision(self):
        for n, tensor in enumerate(("sweep.a", "sweep.b")):
            self.contribute(tensor, [data_of((2000,), 30 + n) * 10 ** n])
        specs = [en.EncodingSpec(format=en.NUMBER_FORMAT_INT4),
                 en.EncodingSpec(format=en.NUMBER_FORMAT_INT8),
                 en.EncodingSpec(format=en.NUMBER_FORMAT_INT4,
                                 method=en.CALIBRATION_METHOD_MSE)]
        *tensors, last = self.encodings.Sweep(
            es.SweepRequest(model="acme/contribute", specs=specs,
                            patterns=["sweep.*"], min_sqnr_db=25),
            timeout=TIMEOUT_S)
        self.assertEqual([t.name.tensor for t in tensors],
                         ["sweep.a", "sweep.b"])
        for tensor in tensors:
            self.assertEqual([c.spec_index for c in tensor.candidates],
                             [1, 2, 0])
            sqnr = [c.prediction.sqnr_db for c in tensor.candidates]
            self.assertEqual(sqnr, sorted(sqnr, reverse=True))
        self.assertEqual([t.spec_index for t in last.summary.totals],
                         [1, 2, 0])
        # 4 bits do not reach 25 dB.
        mixture = last.summary.mixture
        self.assertTrue(mixture.target_met)
        self.assertEqual([(c.tensor, c.spec_index) for c in mixture.choices],
                         [("sweep.a", 1), ("sweep.b", 1)])

    def test_ComparesTwoTensorsLikeNumpy(self):
        reference = data_of((30, 40), seed=41)
        test = reference + data_of((30, 40), seed=42) / 100
        pairs = np.stack([reference, test], axis=-1)
        _, _, summary = self.one(
            self.quantization.Evaluate,
            messages(qs.EvaluateRequest,
                     qs.EvaluateHeader(tensor=description(reference),
                                       comparison=True),
                     pairs.tobytes(), 1000))
        error = test.astype(np.float64) - reference
        signal = (reference.astype(np.float64) ** 2).sum()
        metrics = summary.comparison
        self.assertEqual(metrics.count, reference.size)
        self.assertAlmostEqual(
            metrics.sum_squared_error / (error ** 2).sum(), 1, 9)
        self.assertAlmostEqual(
            metrics.sqnr_db, 10 * np.log10(signal / (error ** 2).sum()), 6)
        self.assertEqual(metrics.max_absolute_error, np.abs(error).max())
        self.assertEqual((summary.statistics.min, summary.statistics.max),
                         (float(reference.min()), float(reference.max())))

    def test_HealthAnswersServing(self):
        # HealthCheckResponse{SERVING} is 08 01.
        # HealthCheckRequest is {1: service}.
        check = self.channel.unary_unary("/grpc.health.v1.Health/Check")
        for service in (b"", b"quantd.v1.QuantizationService",
                        b"quantd.v1.EncodingService"):
            request = b"\x0a" + bytes([len(service)]) + service
            self.assertEqual(check(request, timeout=TIMEOUT_S), b"\x08\x01",
                             service)

    def test_RefusesWhatIsCompressed(self):
        # 128 KiB that would become 128 MiB.
        zeros = bytes(128 << 20)
        channel = grpc.insecure_channel(self.server.address, options=[
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1)])
        self.addCleanup(channel.close)
        calls = [channel.unary_unary("/grpc.health.v1.Health/Check")]
        for method in ("QuantizationService/Quantize",
                       "EncodingService/PutEncoding",
                       "EncodingService/ImportEncodings"):
            stream = channel.stream_stream("/quantd.v1." + method)
            calls.append(lambda message, stream=stream, **more: list(
                stream(iter([message]), **more)))
        before = live_server.peak_memory_bytes(self.server.process.pid)
        for algorithm in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            for call in calls:
                with self.assertRaises(grpc.RpcError) as caught:
                    call(zeros, timeout=TIMEOUT_S, compression=algorithm)
                self.assertEqual(caught.exception.code(),
                                 grpc.StatusCode.UNIMPLEMENTED)
        pid = self.server.process.pid
        # Threads that work for the first time take much of ThreadSanitizer's.
        with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
            most = 96 << 20 if "libtsan" in maps.read() else 32 << 20
        self.assertLess(live_server.peak_memory_bytes(pid) - before, most)

    def test_ReflectionNamesBothServices(self):
        # ServerReflectionRequest{list_services: "*"}.
        info = self.channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        answer = b"".join(info(iter([b":\x01*"]), timeout=TIMEOUT_S))
        self.assertIn(b"quantd.v1.QuantizationService", answer)
        self.assertIn(b"quantd.v1.EncodingService", answer)

    def test_MetricsCountTheCalls(self):
        self.encodings.ListModels(es.ListModelsRequest(), timeout=TIMEOUT_S)
        # The server counts a call after its answer left.
        deadline = time.monotonic() + TIMEOUT_S
        while self.server.metric("grpc_server_handled_total",
                                 grpc_method="ListModels") == 0:
            self.assertLess(time.monotonic(), deadline, "nothing was counted")
            time.sleep(0.02)


class RestartTest(unittest.TestCase):

    def test_EncodingsOutliveTheServer(self):
        name = te.TensorName(model="m", tensor="t")
        with tempfile.TemporaryDirectory() as folder:
            etags = []
            for run in range(2):
                with live_server.LiveServer(options.quantd, folder) as server:
                    channel = grpc.insecure_channel(
                        server.address,
                        options=[("grpc.enable_http_proxy", 0)])
                    stub = es_grpc.EncodingServiceStub(channel)
                    if run == 0:
                        stub.PutEncoding(es.PutEncodingRequest(
                            name=name, encoding=en.Encoding(
                                format=en.NUMBER_FORMAT_INT4, scale=[0.25])),
                            timeout=TIMEOUT_S)
                    got = stub.GetEncoding(es.GetEncodingRequest(name=name),
                                           timeout=TIMEOUT_S).stored_encoding
                    self.assertEqual(list(got.encoding.scale), [0.25])
                    etags.append(got.etag)
                    channel.close()
            self.assertEqual(etags[0], etags[1])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
