"""A store of large encodings: its memory, its messages, its errors, its file.

QUANTD_STORE_TENSORS and QUANTD_STORE_SCALES set how many tensors there are, and
how many scales each has; the whole size of the promise is 1000 and 131072.
"""

import argparse
import os
import random
import struct
import sys
import tempfile
import time
import unittest

import grpc
import live_server

STUBS = tempfile.TemporaryDirectory()
live_server.generate_stubs(STUBS.name)
# pylint: disable=wrong-import-order,wrong-import-position
from quantd.v1 import encoding_pb2 as en
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import encoding_service_pb2_grpc as es_grpc
from quantd.v1 import tensor_pb2 as te

TENSORS = int(os.environ.get("QUANTD_STORE_TENSORS", "12"))
SCALES = int(os.environ.get("QUANTD_STORE_SCALES", "131072"))
CHUNK = 65536
MODEL = "large/net"
MIB = 1 << 20


def scales_of(tensor):
    """Floats of 2^-7 to 2^-5, as bytes."""
    data = bytearray(random.Random(tensor).randbytes(4 * SCALES))
    data[3::4] = b"\x3c" * SCALES
    return bytes(data)


def name_of(tensor, revision):
    return te.TensorName(model=MODEL, revision=revision,
                         tensor=f"layers.{tensor:04}.weight")


def messages_of(tensor, revision):
    data = scales_of(tensor)
    encoding = en.Encoding(format=en.NUMBER_FORMAT_INT8, block_size=[1, 32],
                           scale_shape=[SCALES // 128, 128],
                           scales_in_chunks=True)
    request = es.WriteEncodingRequest(name=name_of(tensor, revision),
                                      encoding=encoding)
    for first in range(0, SCALES, CHUNK):
        request.scales.first = first
        request.scales.scale = data[4 * first:4 * (first + CHUNK)]
        yield request
        request = es.WriteEncodingRequest()


def tell(what, start):
    print(f"{what}: {time.monotonic() - start:.1f} s", file=sys.stderr)


class LargeStoreTest(unittest.TestCase):

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.server = self.start()

    def start(self):
        # What is deleted is freed every second instead of every 15.
        server = live_server.LiveServer(
            options.quantd, self.folder,
            ("--drain-delay=0", "--retention-interval=1s"))
        channel = grpc.insecure_channel(server.address)
        self.stub = es_grpc.EncodingServiceStub(channel)
        self.addCleanup(lambda: server.process.poll() is None and server.stop())
        self.addCleanup(channel.close)
        return server

    def refused(self, *words, call):
        """That a call ends with a text of these words."""
        with self.assertRaises(grpc.RpcError) as caught:
            call()
        text = caught.exception.details()
        for word in words:
            self.assertIn(word, text)

    def file_bytes(self):
        return sum(os.path.getsize(os.path.join(self.folder, file))
                   for file in os.listdir(self.folder)
                   if file.startswith("store.db"))

    def test_put_list_export_publish_delete(self):
        self.stub.PutEncoding(es.PutEncodingRequest(
            name=te.TensorName(model="small/net", tensor="a"),
            encoding=en.Encoding(format=en.NUMBER_FORMAT_INT8, scale=[0.5])))
        before = self.file_bytes()
        start = time.monotonic()
        for tensor in range(TENSORS):
            self.stub.WriteEncoding(messages_of(tensor, "draft"))
        tell("put", start)
        start = time.monotonic()
        published = self.stub.PublishRevision(es.PublishRevisionRequest(
            model=MODEL, source_revision="draft"))
        tell("publish", start)
        self.assertEqual(published.encoding_count, TENSORS)
        start = time.monotonic()
        token, listed = "", 0
        while True:
            page = self.stub.ListEncodings(es.ListEncodingsRequest(
                model=MODEL, page_size=1000, page_token=token))
            listed += sum(entry.scale_count == SCALES
                          for entry in page.encodings)
            token = page.next_page_token
            if not token:
                break
        tell("list", start)
        self.assertEqual(listed, TENSORS)

        for tensor in {0, TENSORS - 1}:
            answers = list(self.stub.ReadEncoding(es.ReadEncodingRequest(
                name=name_of(tensor, ""))))
            self.assertEqual(b"".join(answer.scales.scale
                                      for answer in answers),
                             scales_of(tensor))
            self.assertLess(max(answer.ByteSize() for answer in answers),
                            1.01 * MIB)

        start = time.monotonic()
        text_bytes, largest, count = 0, 0, 0
        for answer in self.stub.ExportEncodings(es.ExportEncodingsRequest(
                model=MODEL, format=es.INTERCHANGE_FORMAT_JSON)):
            text_bytes += len(answer.data)
            largest = max(largest, answer.ByteSize())
            count = answer.encoding_count
        tell("export", start)
        self.assertEqual(count, TENSORS)
        self.assertGreater(text_bytes, 4 * TENSORS * SCALES)
        self.assertLess(largest, 1.01 * MIB)

        full = self.file_bytes()
        self.assertGreater(full, 4 * TENSORS * SCALES)
        start = time.monotonic()
        deleted = self.stub.DeleteRevision(es.DeleteRevisionRequest(
            model=MODEL, revision="main"))
        tell("delete", start)
        self.assertEqual(deleted.encoding_count, TENSORS)
        self.assertTrue(
            live_server.eventually(lambda: self.file_bytes() <= 1.1 * before),
            f"{self.file_bytes()} bytes, {before} before")
        tell("until the file is small again", start)
        memory = live_server.peak_memory_bytes(self.server.process.pid)
        print(f"file {before} bytes, {full} bytes, {self.file_bytes()} bytes; "
              f"server {memory / MIB:.0f} MiB", file=sys.stderr)
        # Sanitizers take memory of their own.
        if "QUANTD_STORE_TENSORS" in os.environ:
            self.assertLess(memory, 256 * MIB)

    def write(self, *chunks, if_match="", **fields):
        """Writes 6 scales of int8, or what the fields say, in chunks."""
        fields = {"format": en.NUMBER_FORMAT_INT8, "block_size": [1, 4],
                  "scale_shape": [3, 2], "scales_in_chunks": True, **fields}
        requests = [es.WriteEncodingRequest(
            name=name_of(0, ""), encoding=en.Encoding(**fields),
            if_match=if_match)]
        requests += [es.WriteEncodingRequest(scales=chunk) for chunk in chunks]
        return self.stub.WriteEncoding(iter(requests)).stored_encoding

    def test_what_does_not_fit_is_refused_and_nothing_is_stored(self):
        def floats(first, *values, **fields):
            return en.ScaleChunk(first=first, scale=struct.pack(
                f"<{len(values)}f", *values), **fields)

        kept = self.write(floats(0, 1, 2, 3), floats(3, 4, 5, 6))
        six = floats(0, 1, 2, 3, 4, 5, 6)
        codes = {"format": en.NUMBER_FORMAT_NVFP4, "block_size": [1, 16]}
        outer = struct.pack("<f", 0.5)
        nan = float("nan")
        for words, chunks, fields in (
                # A gap, an overlap, and a first one that is not the first.
                (("SCALE_COUNT", "4", "3"),
                 (floats(0, 1, 2, 3), floats(4, 5, 6)), {}),
                (("SCALE_COUNT", "2", "3"),
                 (floats(0, 1, 2, 3), floats(2, 4, 5, 6)), {}),
                (("SCALE_COUNT", "1"), (floats(1, 2, 3, 4, 5, 6),), {}),
                # Too few, none, too many.
                (("SCALE_COUNT", "6", "5"), (floats(0, 1, 2, 3, 4, 5),), {}),
                (("SCALE_COUNT", "6", "0"), (), {}),
                (("SCALE_COUNT", "6", "7"), (six, floats(6, 7)), {}),
                # Bytes that are no whole scales, or other zero points.
                (("SCALE_COUNT", "23 bytes", "multiple of 4"),
                 (en.ScaleChunk(scale=six.scale[:23]),), {}),
                (("SCALE_COUNT", "zero_point", "5 bytes", "6"),
                 (en.ScaleChunk(scale=six.scale, zero_point=bytes(5)),),
                 {"chunks_have_zero_points": True}),
                (("SCALE_COUNT", "zero_point", "6 bytes", "0"),
                 (en.ScaleChunk(scale=six.scale, zero_point=bytes(6)),), {}),
                # Scales are named by where they are in the encoding.
                (("SCALE_INVALID", "4"),
                 (floats(0, 1, 2, 3), floats(3, 4, nan, 6)), {}),
                (("ZERO_POINT_RANGE", "5"),
                 (floats(0, 1, 2, 3, zero_point=bytes(3)),
                  floats(3, 4, 5, 6, zero_point=b"\0\0\x80")),
                 {"chunks_have_zero_points": True, "qmin": -127}),
                (("SCALE_INVALID", "5"),
                 (en.ScaleChunk(scale=b"\x38" * 3, outer_scale=outer),
                  en.ScaleChunk(first=3, scale=b"\x38\x38\xff")), codes),
                # Outer scales: late, too many, with scales that have none.
                (("SCALE_COUNT", "outer"), (en.ScaleChunk(scale=b"\x38" * 6),),
                 codes),
                (("SCALE_COUNT", "1", "2"),
                 (en.ScaleChunk(scale=b"\x38" * 6, outer_scale=2 * outer),),
                 codes),
                (("SCALE_COUNT", "outer"),
                 (floats(0, 1, 2, 3, 4, 5, 6, outer_scale=outer),), {}),
                # The encoding itself.
                (("BLOCK_SIZE_INVALID", "3", "whole dimension"), (six,),
                 {"block_size": [0, 4]}),
                (("SCALE_COUNT", "in chunks"), (six,), {"scale": [1]}),
                (("FORMAT_UNKNOWN",), (six,), {"format": 0}),
                (("ZERO_POINT_RANGE",),
                 (en.ScaleChunk(scale=six.scale, zero_point=bytes(6)),),
                 {"format": en.NUMBER_FORMAT_FLOAT8_E4M3FN,
                  "chunks_have_zero_points": True}),
                (("ETAG_MISMATCH",), (six,), {"if_match": "absent"}),
                (("ETAG_MISMATCH",), (six,), {"if_match": "1-1"})):
            with self.subTest(words=words):
                self.refused(*words, call=lambda chunks=chunks, fields=fields:
                             self.write(*chunks, **fields))
        for requests in ([], [es.WriteEncodingRequest(scales=six)],
                         [es.WriteEncodingRequest(name=name_of(0, ""),
                                                  scales=six)]):
            self.refused(call=lambda requests=requests:
                         self.stub.WriteEncoding(iter(requests)))
        (answer,) = self.stub.ReadEncoding(es.ReadEncodingRequest(
            name=name_of(0, "")))
        self.assertEqual((answer.stored_encoding.etag, answer.scales.scale),
                         (kept.etag, six.scale))
        replaced = self.write(six, if_match=kept.etag)
        self.assertEqual(replaced.scale_count, 6)
        self.assertNotEqual(replaced.etag, kept.etag)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quantd", required=True)
    options, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
