"""Every metric that quantd exports is seen moving in a scrape, after what it
says it counts.

  metrics_table_test.py --quantd BINARY [unittest arguments]

TABLE names them all, and deploy/prometheus/README.md does with their types: a
metric that is exported and is not there fails the test, and so does one there
that is not exported. Where promtool is installed the names, types and help texts
have to pass its check too.
"""

import argparse
import contextlib
import hashlib
import itertools
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                "../../client/python"))
import package  # pylint: disable=unused-import,wrong-import-position
# pylint: disable=wrong-import-order,wrong-import-position
import grpc
import numpy as np

import certificates
import live_server
import quantd
from quantd.v1 import encoding_pb2 as en
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import encoding_service_pb2_grpc as es_grpc
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import quantization_service_pb2_grpc as qs_grpc
from quantd.v1 import shared_memory_pb2 as sm
from quantd.v1 import tensor_pb2 as te

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options, unittest_arguments = arguments.parse_known_args()

MAX_SERIES = 3000
GRPC_CODES = 17
TIMEOUT_S = live_server.PATIENCE_S


class Scrape:
    """What /metrics showed at one moment."""

    def __init__(self, server):
        url = f"http://{server.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            self.text = response.read().decode()
        self.types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", self.text, re.M))
        self.samples = {}
        for line in self.text.splitlines():
            if not line.startswith("#"):
                series, value = line.rsplit(" ", 1)
                self.samples[series] = float(value)

    def sum(self, name, labels):
        """Over the series of that name that have these labels."""
        return sum(
            value for series, value in self.samples.items()
            if re.match(name + r"(\{|$)", series) and all(
                f'{key}="{label}"' in series for key, label in labels.items()))


# What moves a metric: functions of a Bench, which are context managers where
# what they do lasts while the metric is looked at.


class Bench:
    """A server, and what the acts below need of it: "plain"; "guarded", with
    certificates, and a socket that asks for tokens; "full" with one tensor; or
    "hurried"."""

    KINDS = ("plain", "guarded", "full", "hurried")

    def __init__(self, folder, kind):
        self.folder = folder
        self.kind = kind
        flags = {"plain": [], "guarded": self.guard,
                 "full": ["--tensor-count", "1"],
                 "hurried": ["--idle-timeout", "500ms", "--stream-age",
                             "1s"]}[kind]
        if callable(flags):
            flags = flags()
        self.server = live_server.LiveServer(
            options.quantd, folder=folder,
            flags=["--listen", f"unix:{folder}/socket", "--shared-memory",
                   "--drain-delay", "0", "--tensor-bytes", "64MiB",
                   "--memory-budget-bytes", "32MiB",
                   "--memory-wait", "10ms", "--statistics-limit", "16KiB",
                   "--shared-regions", "4", "--tensor-rank", "4",
                   "--cache-bytes", "64KiB", "--cache-max-age", "1h",
                   "--retention-interval", "1s", *flags])
        self.address = (f"unix:{folder}/socket" if kind == "guarded"
                        else self.server.address)
        self.client = self.new_client()
        self.channel = grpc.insecure_channel(self.address)
        self.streams = qs_grpc.QuantizationServiceStub(self.channel)
        self.encodings = es_grpc.EncodingServiceStub(self.channel)

    def new_client(self):
        return quantd.Client(self.address, timeout=TIMEOUT_S, max_retries=0)

    def path(self, file):
        return os.path.join(self.folder, file)

    def guard(self):
        self.write_access_file()
        self.write_certificate()
        return ["--access-file", self.path("access"), "--tls-certificate",
                self.path("server.crt"), "--tls-key", self.path("server.key")]

    def write_access_file(self, more=""):
        lines = [
            f"{scope} sha256:{hashlib.sha256(scope.encode()).hexdigest()} "
            f"{scope} ours/\n" for scope in ("read", "calibrate")]
        self.replace("access", "".join(lines) + more)

    def write_certificate(self):
        certificates.Authority("authority").issue("localhost").write(
            self.folder, "server")

    def replace(self, file, text):
        certificates.replace(self.path(file), text.encode())

    def put_as(self, token, tensor):
        self.encodings.PutEncoding(es.PutEncodingRequest(
            name=tensor, encoding=en.Encoding(format=en.NUMBER_FORMAT_INT8,
                                              scale=[0.5])),
            timeout=TIMEOUT_S,
            metadata=[("authorization", "Bearer " + token)] if token else [])

    def denied(self, token, model):
        """Tries to store something, and may not."""
        try:
            self.put_as(token, te.TensorName(model=model, tensor="t"))
        except grpc.RpcError as error:
            assert error.code() in (grpc.StatusCode.UNAUTHENTICATED,
                                    grpc.StatusCode.PERMISSION_DENIED), error
            return
        raise AssertionError("expected not to be let in")

    def wait_for_open_tensor(self):
        deadline = time.monotonic() + TIMEOUT_S
        while Scrape(self.server).sum("quantd_active_tensors", {}) == 0:
            assert time.monotonic() < deadline

    def end_streams(self):
        """Those that the client keeps for its next tensors."""
        self.client.close()
        self.client = self.new_client()

    def close(self):
        self.client.close()
        self.channel.close()
        self.server.stop()

    @contextlib.contextmanager
    def fresh_client(self):
        """Whose streams end with it."""
        with quantd.Client(self.address, timeout=TIMEOUT_S) as client:
            yield client

    def fails(self, reason, call):
        try:
            call()
        except quantd.QuantdError as error:
            assert error.reason == reason, error
            return
        raise AssertionError(f"expected {reason}")


UNIT = quantd.Encoding("int8", [1.0])


def floats(count):
    return np.linspace(-1, 1, count, dtype=np.float32)


def name(tensor):
    return quantd.TensorName("metrics/net", tensor)


def quantize(bench):
    with bench.fresh_client() as client:
        client.quantize(floats(1000), "int8")


def dequantize(bench):
    with bench.fresh_client() as client:
        client.dequantize(np.zeros(1000, np.int8), UNIT)


def evaluate(bench):
    with bench.fresh_client() as client:
        client.evaluate(floats(1000), ["int8", "int4"])


def calibrate(bench):
    with bench.fresh_client() as client:
        client.calibrate(floats(1000), name("calibrated"), "int8")


def quantize_wrongly(bench):
    bench.fails("ENCODING_NOT_FOUND", lambda: bench.client.quantize(
        floats(10), quantd.EncodingReference(name("nothing"))))


def quantize_strange_numbers(bench):
    bench.client.quantize(
        np.array([1, 500, -500, np.inf, -np.inf, np.nan], np.float32), UNIT)


def put(bench):
    bench.client.put_encoding(name("put"), UNIT)


def get_twice(bench):
    put(bench)
    for _ in range(2):
        bench.client.get_encoding(name("put"))


def get_what_is_not_there(bench):
    bench.fails("ENCODING_NOT_FOUND",
                lambda: bench.client.get_encoding(name("nothing")))


def put_and_delete(bench):
    put(bench)
    bench.client.delete_encoding(name("put"))


def change_revisions(bench):
    bench.client.put_encoding(
        quantd.TensorName("metrics/net", "put", "draft"),
        quantd.Encoding("int8", [0.5]))
    bench.client.publish_revision("metrics/net", "draft", "published")
    bench.client.delete_revision("metrics/net", "published")
    bench.client.put_encoding(quantd.TensorName("metrics/gone", "put"),
                              quantd.Encoding("int8", [0.5]))
    bench.client.delete_model("metrics/gone")


def write_and_read(bench):
    with grpc.insecure_channel(bench.server.address) as channel:
        stub = es_grpc.EncodingServiceStub(channel)
        tensor = name("chunked").to_proto()
        stub.WriteEncoding(iter([es.WriteEncodingRequest(
            name=tensor, encoding=en.Encoding(
                format=en.NUMBER_FORMAT_INT8, scales_in_chunks=True),
            scales=en.ScaleChunk(scale=bytes([0, 0, 0, 63])))]))
        list(stub.ReadEncoding(es.ReadEncodingRequest(name=tensor)))


def put_and_delete_many_large_ones(bench):
    put_many_large_ones(bench)
    for n in range(40):
        bench.client.delete_encoding(name(f"large-{n}"))


def put_many_large_ones(bench):
    for n in range(40):
        bench.client.put_encoding(
            name(f"large-{n}"),
            quantd.Encoding("int8", [0.5] * 400, block_size=[1]))


def list_everything(bench):
    list(bench.client.list_models())
    list(bench.client.list_revisions("metrics/net"))
    list(bench.client.list_encodings("metrics/net"))


def contribute(bench, tensor="contributed"):
    bench.client.calibrate(
        floats(100), name(tensor),
        contribution=quantd.Contribution("rank-0", time.time_ns()))


def contribute_twice(bench):
    for _ in range(2):
        bench.client.calibrate(
            floats(100), name("contributed twice"),
            contribution=quantd.Contribution("rank-0", 1))


def look_at_statistics(bench):
    contribute(bench)
    bench.client.get_statistics(name("contributed"))
    list(bench.client.list_statistics("metrics/net"))
    list(bench.client.compute_encodings("metrics/net", "int8"))
    bench.client.sweep("metrics/net", ["int8", "int4"])
    bench.client.delete_statistics(name("contributed"))


def choose_mixture(bench):
    bench.client.choose_mixture(
        {"t": [quantd.MixtureOption(0, 100, 0.1)]}, min_sqnr_db=[3])


def interchange(bench):
    with contextlib.suppress(grpc.RpcError):
        list(bench.encodings.ExportEncodings(es.ExportEncodingsRequest(),
                                             timeout=TIMEOUT_S))
    with contextlib.suppress(grpc.RpcError):
        bench.encodings.ImportEncodings(iter([es.ImportEncodingsRequest()]),
                                        timeout=TIMEOUT_S)


def ask_what_answers(bench):
    bench.encodings.GetServerInfo(es.GetServerInfoRequest(),
                                  timeout=TIMEOUT_S)


def ready(bench):
    with urllib.request.urlopen(
            f"http://{bench.server.metrics_address}/readyz") as response:
        response.read()


def damage_the_store(bench):
    """An encoding that is not what was stored, read after a restart."""
    bench.client.put_encoding(name("damaged"), UNIT)
    bench.close()
    path = os.path.join(bench.folder, "store.db")
    with contextlib.closing(sqlite3.connect(path)) as database:
        tables = [row[0] for row in database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table'")]
        table = next(t for t in tables if t.startswith("encoding"))
        blobs = [row[1] for row in database.execute(
            f"PRAGMA table_info({table})") if row[2] == "BLOB"]
        database.execute(f"UPDATE {table} SET {blobs[-1]} = X'FFFF' "
                         "WHERE tensor = 'damaged'")
        database.commit()
    bench.__init__(bench.folder, bench.kind)
    bench.fails("STORE_CORRUPT",
                lambda: bench.client.get_encoding(name("damaged")))


@contextlib.contextmanager
def refuse_writes(bench):
    """The database fails all that is inserted; then it is mended."""
    with contextlib.closing(
            sqlite3.connect(os.path.join(bench.folder, "store.db"))) as store:
        table = next(row[0] for row in store.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table'")
            if row[0].startswith("encoding"))
        store.execute(f"CREATE TRIGGER full BEFORE INSERT ON {table} "
                      "BEGIN SELECT RAISE(ABORT, 'full'); END")
        store.commit()
        bench.fails("STORE_UNAVAILABLE",
                    lambda: bench.client.put_encoding(name("unwritable"), UNIT))
        yield
        store.execute("DROP TRIGGER full")
        store.commit()
    bench.client.put_encoding(name("writable"), UNIT)


@contextlib.contextmanager
def drain(bench):
    """The server is told to stop while it has a tensor; another follows."""
    with open_tensor(bench, patient=False):
        bench.wait_for_open_tensor()
        bench.server.process.terminate()
        yield
    bench.server.process.wait(TIMEOUT_S)
    bench.close()
    bench.__init__(bench.folder, bench.kind)


@contextlib.contextmanager
def open_tensor(bench, patient=True):
    """The first half of a tensor that has to be held until it is complete;
    where the server is not `patient`, it ends the stream."""
    closing = threading.Event()

    def messages():
        header = qs.QuantizeHeader(tensor=te.TensorDescription(
            element_type=te.ELEMENT_TYPE_FLOAT32, shape=[1 << 19]))
        header.spec.format = 8
        yield qs.QuantizeRequest(header=header, data=bytes(1 << 20))
        closing.wait()
        yield qs.QuantizeRequest(offset=1 << 20, data=bytes(1 << 20))

    call = bench.streams.Quantize(messages(), timeout=TIMEOUT_S)
    try:
        yield
    finally:
        closing.set()
        with (contextlib.nullcontext() if patient
              else contextlib.suppress(grpc.RpcError)):
            for response in call:
                assert not response.HasField("error"), response


@contextlib.contextmanager
def share_memory(bench):
    with quantd.Client(f"unix:{bench.folder}/socket", shared_memory=True,
                       timeout=TIMEOUT_S, max_retries=0) as client:
        array = client.empty_shared(1 << 18, np.float32)
        yield array


def ask_for_too_many_regions(bench):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.connect(f"{bench.folder}/socket.memory")
        reasons = []
        for _ in range(6):
            control.send(sm.RegionRequest(size_bytes=4096).SerializeToString())
            packet, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
            for descriptor in descriptors:
                os.close(descriptor)
            reasons.append(sm.RegionReply.FromString(packet).error.reason)
        assert reasons[-1] == "REGION_LIMIT", reasons


def ask_for_too_much(reason, call):
    return lambda bench: bench.fails(reason, lambda: call(bench))


def refused(bench, reason, shape, data=b"", block_size=None):
    header = qs.QuantizeHeader(tensor=te.TensorDescription(
        element_type=te.ELEMENT_TYPE_FLOAT32, shape=shape))
    if block_size is None:
        header.encoding.format = en.NUMBER_FORMAT_INT8
        header.encoding.scale.append(1)
    else:
        header.spec.format = en.NUMBER_FORMAT_INT8
        header.spec.block_size.append(block_size)
    for response in bench.streams.Quantize(
            iter([qs.QuantizeRequest(header=header, data=data)]),
            timeout=TIMEOUT_S):
        if response.HasField("error"):
            assert response.error.reason == reason, response
            return
    raise AssertionError(f"expected {reason}")


def tensor_too_large(bench):
    refused(bench, "TENSOR_TOO_LARGE", [1 << 40])


def too_many_scales(bench):
    refused(bench, "SCALE_COUNT_LIMIT", [(1 << 20) + 1], block_size=1)


def too_many_dimensions(bench):
    refused(bench, "RANK_LIMIT", [1] * 5)


def chunk_too_large(bench):
    refused(bench, "CHUNK_TOO_LARGE", [2 << 20], bytes(5 << 20))


def too_many_tensors(bench):
    with open_tensor(bench, patient=False):
        bench.wait_for_open_tensor()
        # What takes no time is let in anyhow.
        refused(bench, "OVERLOADED", [1 << 16], bytes(1 << 18))


@contextlib.contextmanager
def work_in_the_background(bench):
    """More than the workers have done when they are looked at."""
    done = threading.Event()
    array = floats(1 << 20)

    def work():
        with bench.fresh_client() as client:
            while not done.is_set():
                client.evaluate(array, ["int8:mse", "int4:mse"])

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        done.set()
        for worker in workers:
            worker.join()


@contextlib.contextmanager
def idle_stream(bench):
    """A stream on which nothing comes, and no tensor is open."""
    closing = threading.Event()

    def messages():
        closing.wait()
        yield from ()

    call = bench.streams.Quantize(messages(), timeout=TIMEOUT_S)
    try:
        yield
    finally:
        closing.set()
        with contextlib.suppress(grpc.RpcError):
            list(call)


past_the_budget = ask_for_too_much(
    "MEMORY_BUDGET",
    lambda bench: bench.client.quantize(floats(10 << 20), "int8"))
statistics_too_large = ask_for_too_much(
    "STATISTICS_TOO_LARGE",
    lambda bench: bench.client.calibrate(
        np.random.default_rng(1).standard_normal(100_000).astype(np.float32),
        name("much"), contribution=quantd.Contribution("rank-0", 1)))


def break_the_certificate(bench):
    bench.replace("server.crt", "nonsense")


def use_up_the_quota(bench):
    deadline = time.monotonic() + TIMEOUT_S
    for tensor in itertools.count():
        try:
            bench.put_as("calibrate", te.TensorName(
                model="ours/net", tensor=str(tensor)))
        except grpc.RpcError as error:
            assert "QUOTA_EXCEEDED" in error.details(), error
            return
        assert time.monotonic() < deadline


def limit_revisions_and_rows(bench):
    for revision in ("1", "2"):
        bench.put_as("calibrate", te.TensorName(
            model="ours/ci", revision=revision, tensor="t"))
    bench.write_access_file("retain models:ours/ci/ revisions=1\n"
                            "retain models:ours/ revisions=1\n"
                            "quota models:ours/ rows=3\n")


def nothing(_):
    pass


class Row:
    """A series that `act` moves: up where it counts, anyhow where it is a
    gauge. With `level`, it is up while `act` lasts and 0 before and after. With
    `still`, it says what hardly changes, or begins anew with the server that
    `act` starts: it is above 0. On a Bench of that kind."""

    def __init__(self, metric, act, sample=None, *, level=False, still=False,
                 kind="plain", **labels):
        self.metric = metric
        self.act = act
        self.sample = sample or metric
        self.level = level
        self.still = still
        self.kind = kind
        self.labels = labels


def histogram(metric, act, **labels):
    return [Row(metric, act, metric + "_" + part, **labels)
            for part in ("count", "bucket")]


def rows_of_calls():
    moved_by = {
        "Calibrate": calibrate, "Quantize": quantize, "Dequantize": dequantize,
        "Evaluate": evaluate, "ListEncodings": list_everything,
        "GetEncoding": get_twice, "PutEncoding": put,
        "ReadEncoding": write_and_read, "WriteEncoding": write_and_read,
        "PublishRevision": change_revisions,
        "DeleteRevision": change_revisions, "DeleteModel": change_revisions,
        "DeleteEncoding": put_and_delete, "ListModels": list_everything,
        "ListRevisions": list_everything,
        "ComputeEncodings": look_at_statistics, "Sweep": look_at_statistics,
        "ChooseMixture": choose_mixture,
        "GetStatistics": look_at_statistics,
        "ListStatistics": look_at_statistics,
        "DeleteStatistics": look_at_statistics,
        "ExportEncodings": interchange, "ImportEncodings": interchange,
        "GetServerInfo": ask_what_answers}
    methods = {method for file in (qs, es)
               for service in file.DESCRIPTOR.services_by_name.values()
               for method in service.methods_by_name}
    assert moved_by.keys() == methods, moved_by.keys() ^ methods
    rows = []
    for method, act in moved_by.items():
        rows += [Row("grpc_server_started_total", act, grpc_method=method),
                 Row("grpc_server_handled_total", act, grpc_method=method)]
        rows += histogram("grpc_server_handling_seconds", act,
                          grpc_method=method)
    return rows


TABLE = [
    *rows_of_calls(),
    *histogram("quantd_tensor_seconds", calibrate, rpc="Calibrate",
               result="ok"),
    *histogram("quantd_tensor_seconds", quantize, rpc="Quantize", result="ok"),
    *histogram("quantd_tensor_seconds", quantize_wrongly, rpc="Quantize",
               result="error"),
    *histogram("quantd_tensor_seconds", dequantize, rpc="Dequantize",
               result="ok"),
    *histogram("quantd_tensor_seconds", evaluate, rpc="Evaluate", result="ok"),
    Row("quantd_tensor_errors_total", quantize_wrongly, rpc="Quantize",
        grpc_code="NotFound"),
    Row("quantd_payload_bytes_total", quantize, direction="in"),
    Row("quantd_payload_bytes_total", quantize, direction="out"),
    Row("quantd_elements_total", quantize, rpc="Quantize", format="int8"),
    Row("quantd_elements_total", dequantize, rpc="Dequantize", format="int8"),
    Row("quantd_elements_total", evaluate, rpc="Evaluate", format="int4"),
    Row("quantd_elements_total", calibrate, rpc="Calibrate", format="none"),
    Row("quantd_non_finite_elements_total", quantize_strange_numbers),
    Row("quantd_clipped_elements_total", quantize_strange_numbers),
    Row("quantd_active_streams", open_tensor, level=True),
    Row("quantd_active_tensors", open_tensor, level=True),
    Row("quantd_active_tensors_limit", nothing, still=True),
    Row("quantd_connections", open_tensor, still=True),
    Row("quantd_connections_limit", nothing, still=True),
    Row("quantd_memory_budget_used_bytes", open_tensor, level=True),
    Row("quantd_memory_budget_bytes", nothing, still=True),
    Row("quantd_shared_memory_regions", share_memory, level=True),
    Row("quantd_shared_memory_bytes", share_memory, level=True),
    Row("quantd_cache_hits_total", get_twice),
    Row("quantd_cache_misses_total", get_what_is_not_there),
    Row("quantd_cache_entries", put_and_delete),
    Row("quantd_cache_resident_bytes", put_many_large_ones),
    Row("quantd_cache_evictions_total", put_many_large_ones),
    *histogram("quantd_store_seconds", get_what_is_not_there, operation="get"),
    *histogram("quantd_store_seconds", put, operation="put"),
    *histogram("quantd_store_seconds", put_and_delete, operation="delete"),
    *histogram("quantd_store_seconds", list_everything, operation="list"),
    *histogram("quantd_store_seconds", ready, operation="ping"),
    *histogram("quantd_store_seconds", contribute, operation="contribute"),
    *histogram("quantd_store_seconds", look_at_statistics,
               operation="get_statistics"),
    *histogram("quantd_store_seconds", look_at_statistics,
               operation="list_statistics"),
    *histogram("quantd_store_seconds", look_at_statistics,
               operation="delete_statistics"),
    Row("quantd_store_write_failed", refuse_writes, level=True),
    Row("quantd_store_errors_total", damage_the_store, still=True,
        operation="get"),
    Row("quantd_calibration_merges_total", contribute, result="counted"),
    Row("quantd_calibration_merges_total", contribute_twice,
        result="duplicate"),
    Row("quantd_limit_rejections_total", tensor_too_large,
        reason="TENSOR_TOO_LARGE"),
    Row("quantd_limit_rejections_total", too_many_dimensions,
        reason="RANK_LIMIT"),
    Row("quantd_limit_rejections_total", chunk_too_large,
        reason="CHUNK_TOO_LARGE"),
    Row("quantd_limit_rejections_total", too_many_tensors, kind="full",
        reason="OVERLOADED"),
    Row("quantd_limit_rejections_total",
        lambda b: open_tensor(b, patient=False), kind="hurried",
        reason="STREAM_IDLE"),
    Row("quantd_limit_rejections_total", idle_stream, kind="hurried",
        reason="STREAM_AGE"),
    Row("quantd_queue_delay_seconds", work_in_the_background),
    Row("quantd_limit_rejections_total", too_many_scales,
        reason="SCALE_COUNT_LIMIT"),
    Row("quantd_limit_rejections_total", past_the_budget,
        reason="MEMORY_BUDGET"),
    Row("quantd_limit_rejections_total", statistics_too_large,
        reason="STATISTICS_TOO_LARGE"),
    Row("quantd_limit_rejections_total", ask_for_too_many_regions,
        reason="REGION_LIMIT"),
    Row("quantd_access_denied_total", lambda b: b.denied("", "ours/net"),
        kind="guarded", reason="TOKEN_MISSING"),
    Row("quantd_access_denied_total", lambda b: b.denied("wrong", "ours/net"),
        kind="guarded", reason="TOKEN_INVALID"),
    Row("quantd_access_denied_total", lambda b: b.denied("read", "ours/net"),
        kind="guarded", reason="SCOPE_MISSING"),
    Row("quantd_access_denied_total",
        lambda b: b.denied("calibrate", "theirs/net"), kind="guarded",
        reason="MODEL_DENIED"),
    Row("quantd_tls_certificate_expiry_timestamp_seconds", nothing, still=True,
        kind="guarded"),
    Row("quantd_reloads_total", Bench.write_certificate, kind="guarded",
        file="certificate", result="ok"),
    Row("quantd_reloads_total", break_the_certificate, kind="guarded",
        file="certificate", result="error"),
    Row("quantd_reloads_total", lambda b: b.write_access_file("nonsense\n"),
        kind="guarded", file="access", result="error"),
    Row("quantd_reload_successful", limit_revisions_and_rows, kind="guarded",
        file="access"),
    Row("quantd_reloads_total", nothing, kind="guarded", still=True,
        file="access", result="ok"),
    Row("quantd_store_bytes", put, still=True),
    Row("quantd_store_rows", put, still=True),
    Row("quantd_store_size_bytes", put, still=True),
    Row("quantd_store_free_bytes", put_and_delete_many_large_ones, still=True),
    Row("quantd_retention_deleted_revisions_total", nothing, kind="guarded",
        still=True),
    Row("quantd_limit_rejections_total", use_up_the_quota, kind="guarded",
        reason="QUOTA_EXCEEDED"),
    Row("quantd_quota_used_ratio", nothing, kind="guarded", still=True),
    Row("quantd_draining", drain, still=True),
    Row("quantd_build_info", nothing, still=True),
    Row("process_cpu_seconds_total", quantize),
    Row("process_resident_memory_bytes", nothing, still=True),
    Row("process_virtual_memory_bytes", nothing, still=True),
    Row("process_open_fds", open_tensor, still=True),
    Row("process_max_fds", nothing, still=True),
    Row("process_start_time_seconds", nothing, still=True),
]


def documented_types():
    """Metrics and their types, as deploy/prometheus/README.md has them."""
    path = os.path.join(live_server.ROOT, "deploy/prometheus/README.md")
    with open(path, encoding="utf-8") as file:
        return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", file.read(), re.M))


class MetricsTableTest(unittest.TestCase):

    def setUp(self):
        self.bench = self.new_bench("plain")

    def new_bench(self, kind):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        bench = Bench(folder.name, kind)
        self.addCleanup(bench.close)
        return bench

    def scrape(self):
        return Scrape(self.bench.server)

    def expect_move(self, row):
        if row.level:
            self.bench.end_streams()
            self.expect(row, lambda scrape: scrape.sum(
                row.sample, row.labels) == 0)
        before = self.scrape().sum(row.sample, row.labels)
        with row.act(self.bench) or contextlib.nullcontext():
            self.expect(row, lambda scrape: self.has_moved(row, scrape, before))
        if row.level:
            self.expect(row, lambda scrape: scrape.sum(
                row.sample, row.labels) == 0)

    @staticmethod
    def has_moved(row, scrape, before):
        now = scrape.sum(row.sample, row.labels)
        if row.still:
            return now > 0
        if scrape.types[row.metric] == "gauge":
            return now != before
        return now > before

    def expect(self, row, condition):
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            scrape = self.scrape()
            self.assertIn(row.metric, scrape.types)
            if condition(scrape):
                return
            # What takes no time that can be measured is done again.
            if row.metric == "process_cpu_seconds_total":
                row.act(self.bench)
            self.assertLess(time.monotonic(), deadline,
                            f"{row.sample} {row.labels}: "
                            f"{scrape.sum(row.sample, row.labels)}")
            time.sleep(0.02)

    def test_EveryMetricMovesAndIsInTheTable(self):
        exported = {}
        for kind in Bench.KINDS:
            self.bench = self.new_bench(kind)
            for row in TABLE:
                if row.kind == kind:
                    with self.subTest(row.sample, **row.labels):
                        self.expect_move(row)
                    exported.update(self.scrape().types)
        self.assertEqual(sorted(exported), sorted({r.metric for r in TABLE}))
        self.assertEqual(documented_types(), exported)

    def test_SeriesAreFewHoweverMuchIsAskedFor(self):
        acts = {row.act for row in TABLE if row.kind == "plain"}
        for act in sorted(acts - {damage_the_store, drain},
                          key=lambda act: act.__name__):
            lasting = act(self.bench)
            with lasting or contextlib.nullcontext():
                pass
        for number_format in quantd.tensor.FORMATS:
            codebook = ([-1.0, 0.0, 1.0] if number_format.startswith("codebook")
                        else [])
            spec = quantd.EncodingSpec(number_format, codebook=codebook)
            codes = self.bench.client.quantize(floats(128), spec)
            self.bench.client.dequantize(codes)
            self.bench.client.evaluate(floats(128), [spec])
        self.fail_every_call()
        scrape = self.scrape()
        # As many as there would be, had every call ended with every code.
        calls = len([s for s in scrape.samples
                     if s.startswith("grpc_server_started_total")])
        handled = len([s for s in scrape.samples
                       if s.startswith("grpc_server_handled_total")])
        series = len(scrape.samples) - handled + calls * GRPC_CODES
        formats = {label for series in scrape.samples for label in re.findall(
            r'quantd_elements_total\{.*format="([^"]*)"', series)}
        print(f"{len(scrape.samples)} series, at most {series}; "
              f"{len(formats)} formats")
        self.assertGreater(len(formats), 40)
        self.assertLessEqual(series, MAX_SERIES)

    def fail_every_call(self):
        """Every method with garbage, past its deadline, and cancelled."""
        for service in (qs.DESCRIPTOR.services_by_name["QuantizationService"],
                        es.DESCRIPTOR.services_by_name["EncodingService"]):
            for method in service.methods:
                call = self.bench.channel.stream_stream(
                    f"/{service.full_name}/{method.name}")
                for messages, timeout in (([b"\xff"], TIMEOUT_S), ([], 1e-6),
                                          ([b""], TIMEOUT_S)):
                    with contextlib.suppress(grpc.RpcError):
                        list(call(iter(messages), timeout=timeout))
                running = call(iter([]), timeout=TIMEOUT_S)
                running.cancel()

    @unittest.skipUnless(shutil.which("promtool"), "promtool is not installed")
    def test_PromtoolFindsNothing(self):
        for row in TABLE:
            if row.act in (quantize, put, contribute, quantize_wrongly):
                row.act(self.bench)
        # With all that a guarded one adds.
        self.check_with_promtool()
        self.bench = self.new_bench("guarded")
        self.check_with_promtool()

    def check_with_promtool(self):
        checked = subprocess.run(["promtool", "check", "metrics"],
                                 input=self.scrape().text, text=True,
                                 capture_output=True, check=False)
        self.assertEqual((checked.returncode, checked.stdout + checked.stderr),
                         (0, ""))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + unittest_arguments)
