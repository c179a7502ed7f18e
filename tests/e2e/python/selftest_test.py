"""quantctl selftest: every SIMD target of this machine gives the results that it
expects, and it sees a server that differs in one bit.

  selftest_test.py --quantd BINARY --quantctl BINARY
"""

import argparse
import json
import os
import struct
import sys
import tempfile
import unittest

import grpc
import xxhash

import live_server
from quantctl_case import QuantctlCase, documented_fields, fields
from relay import Relay

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()

stub_folder = tempfile.TemporaryDirectory()
live_server.generate_stubs(stub_folder.name)
# pylint: disable=wrong-import-position
from quantd.v1 import encoding_pb2 as en
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import quantization_service_pb2 as qs

HASHES = os.path.join(live_server.ROOT, "client/cli/selftest_hashes.txt")


def flip(data):
    """The same with another lowest bit at its front."""
    return bytes([data[0] ^ 1]) + data[1:]


def next_up(value):
    """The next double."""
    bits = struct.unpack("<q", struct.pack("<d", value))[0]
    return struct.unpack("<d", struct.pack("<q", bits + 1))[0]


class Once:
    """Changes the first answer that `applies` is true of."""

    def __init__(self, response, applies, change):
        self.done = False
        self._response, self._applies = response, applies
        self._change = change

    def __call__(self, message):
        response = self._response.FromString(message)
        if self.done or not self._applies(response):
            return message
        self.done = True
        self._change(response)
        return response.SerializeToString()


def change_code(response):
    response.data = flip(response.data)
    response.summary.checksum_xxh3 = xxhash.xxh3_64_intdigest(response.data)


def change_scale(response):
    scale = response.header.encoding.scale
    scale[0] = float(struct.unpack("<f", struct.pack(
        "<i", struct.unpack("<i", struct.pack("<f", scale[0]))[0] + 1))[0])


def change_metric(response):
    overall = response.summary.candidates[0].overall
    overall.cosine_similarity = next_up(overall.cosine_similarity)


class SelftestTest(QuantctlCase):
    quantd = options.quantd
    quantctl = options.quantctl

    def selftest(self, address, code=0):
        return json.loads(self.run_quantctl(
            "--server", address, "--json", "selftest", code=code).stdout)

    def test_EveryTargetGivesTheSameResults(self):
        targets = self.selftest(
            self.server.address)["available_simd_targets"]
        self.assertEqual(targets[-1], "scalar")
        for target in targets:
            with self.subTest(target=target), live_server.LiveServer(
                    self.quantd, flags=["--simd", target]) as server:
                document = self.selftest(server.address)
                self.assertEqual(document["simd_target"], target)
                self.assertEqual(document["available_simd_targets"], targets)
                self.assertEqual(document["differences"], [])
                self.assertGreater(document["result_count"], 1500)
                self.assertLessEqual(fields(document), documented_fields())

    def test_TellsWhatAnswers(self):
        text = self.run_quantctl("selftest").stdout
        version = self.run_quantctl("--version").stdout.split()[1]
        self.assertRegex(
            text, rf"^server   {self.server.address}\nversion  {version}\n"
            r"CPU      (x86-64|aarch64)\b.*\nSIMD     \w+, of .*scalar\n"
            r"results  all [\d,]+ equal\n$")

    def test_HashesAreThoseOfTheTable(self):
        with open(HASHES, encoding="utf-8") as file:
            self.assertEqual(self.run_quantctl("selftest", "--hashes").stdout,
                             file.read())
        self.run_quantctl("--json", "selftest", "--hashes", code=2)

    def test_OneBitIsSeen(self):
        plants = [
            ("Quantize", Once(
                qs.QuantizeResponse,
                lambda r: r.HasField("summary") and r.data and
                r.header.encoding.format == en.NUMBER_FORMAT_UINT8,
                change_code), "uint8 float32", ["codes", "reals"]),
            ("Quantize", Once(
                qs.QuantizeResponse,
                lambda r: r.header.encoding.format == en.NUMBER_FORMAT_INT8,
                change_scale), "int8 float32", ["encoding", "reals",
                                                "metrics"]),
            ("Dequantize", Once(
                qs.DequantizeResponse,
                lambda r: r.HasField("summary") and r.data, change_code),
             None, ["reals"]),
            ("Evaluate", Once(
                qs.EvaluateResponse,
                lambda r: 0 < r.summary.candidates[0].overall.cosine_similarity
                < 1, change_metric), None, ["metrics"])]
        for rpc, plant, name, results in plants:
            with self.subTest(rpc=rpc, results=results), Relay(
                    self.server.address) as relay:
                relay.change[rpc] = plant
                document = self.selftest(relay.address, code=1)
                self.assertTrue(plant.done)
                self.assertEqual(document["difference_count"], len(results))
                (difference,) = document["differences"]
                self.assertEqual(difference["results"], results)
                if name is not None:
                    self.assertEqual(difference["case"], name)
                plant.done = False
                result = self.run_quantctl("--server", relay.address,
                                           "selftest", code=1)
                self.assertIn(
                    f"differs  {difference['case']}: {', '.join(results)}\n",
                    result.stdout)
                self.assertNotIn("equal", result.stdout)
                self.assertRegex(result.stderr, r"^quantctl: \d of [\d,]+ "
                                 "results are not those of quantd ")

    def test_ServersThatDoNotTellWhatTheyAreAreComparedAllTheSame(self):
        with Relay(self.server.address) as relay:
            relay.before["GetServerInfo"] = lambda context: context.abort(
                grpc.StatusCode.UNIMPLEMENTED, "")
            document = self.selftest(relay.address)
        self.assertEqual(document["version"], "unknown")
        self.assertEqual(document["differences"], [])

    def test_AServerThatIsNotThereIsNoSuccess(self):
        self.run_quantctl("--server", "127.0.0.1:1", "--retry-for", "0",
                          "selftest", code=3)

    def test_GetServerInfoMatchesTheMetrics(self):
        with grpc.insecure_channel(self.server.address) as channel:
            info = channel.unary_unary(
                "/quantd.v1.EncodingService/GetServerInfo",
                es.GetServerInfoRequest.SerializeToString,
                es.GetServerInfoResponse.FromString)(
                    es.GetServerInfoRequest(), timeout=60)
        self.assertEqual(self.server.metric(
            "quantd_build_info", version=info.version,
            simd=info.simd_target), 1)
        self.assertEqual(info.available_simd_targets[0], info.simd_target)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments])
