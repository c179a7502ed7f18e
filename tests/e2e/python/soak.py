"""A server under clients of every kind, which crash: its memory, threads and
file descriptors stay what they are, and nothing is left when they are gone.

  soak.py --quantd BINARY [--seconds N] [--seed N] [--nice N]

Clients are processes. Some work, with every call there is, some cancel what
they began, send garbage, do not read, or work in shared memory; most are killed
(SIGKILL) at a random moment, and others take their places. Lasts 4 seconds by
default, or longer until each place has done something; --seconds 1200 is the
full run. Prints a line through the second half of each figure.
"""

import argparse
import mmap
import os
import random
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                "../../client/python"))
import package  # pylint: disable=unused-import,wrong-import-position
# pylint: disable=wrong-import-order,wrong-import-position
import grpc
import numpy as np

import live_server
import quantd
from live_server import PATIENCE_S, eventually
from quantd.v1 import encoding_pb2 as en
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import tensor_pb2 as te

# Only the children make channels: what gRPC starts does not outlive a fork.

SPECS = ["int8", "int4:group:32", "uint8:percentile=0.999", "int8:per-channel",
         "float8_e4m3fn", "mxfp4_e2m1", "int8:mse", "nf4"]
SERVICE = "/quantd.v1.QuantizationService/"
METHODS = ["Calibrate", "Quantize", "Dequantize", "Evaluate"]
# So many names that the cache and the store come to an end of growing soon.
NAMES = 24
SAMPLE_S = 0.25
# What a client may be told that does its work as it should.
EXPECTED_REASONS = {"MEMORY_BUDGET", "OVERLOADED", "ENCODING_NOT_FOUND",
                    "ETAG_MISMATCH", "STATISTICS_NOT_FOUND",
                    "STATISTICS_MISMATCH", "GRANULARITY_TOO_FINE",
                    "REGION_LIMIT", "BLOCK_SIZE_INVALID", "SCALE_COUNT",
                    # It may hardly get the processor for a while.
                    "STREAM_IDLE"}


# --- Clients ---------------------------------------------------------------


def array_of(rng, most=1 << 18):
    rows = 1 << rng.randrange(0, 7)
    columns = max(1, int(most ** rng.random()) // rows)
    return np.random.default_rng(rng.randrange(1 << 30)).standard_normal(
        (rows, columns)).astype(np.float32)


def name_of(rng, kind):
    return quantd.TensorName("soak/net", f"{kind}-{rng.randrange(NAMES)}",
                             f"r{rng.randrange(2)}")


def work(rng, places, did):
    """A client of all four streams."""
    with quantd.Client(places["tcp"], timeout=PATIENCE_S) as client:
        while True:
            try:
                array = array_of(rng)
                what = rng.randrange(6)
                if what == 0:
                    client.calibrate(
                        array.reshape(-1), name_of(rng, "statistics"),
                        contribution=quantd.Contribution(
                            f"rank-{rng.randrange(4)}", time.time_ns()))
                elif what == 1:
                    client.evaluate(array, rng.sample(SPECS, 2))
                elif what == 2:
                    client.compare(array, array + np.float32(0.01))
                elif what == 3:
                    list(client.quantize_many(
                        [(f"many-{n}", array) for n in range(10)], "int8",
                        model="soak/net", store=True, min_rank=0))
                else:
                    codes = client.quantize(
                        array, rng.choice(SPECS), name=name_of(rng, "encoding"),
                        store=rng.random() < 0.5)
                    client.dequantize(codes)
            except quantd.QuantdError as error:
                if error.reason not in EXPECTED_REASONS:
                    raise
            did()
            time.sleep(rng.random() * 0.02)


def keep(rng, places, did):
    """A client of the stored encodings and statistics."""
    with quantd.Client(places["tcp"], timeout=PATIENCE_S) as client:
        while True:
            name = name_of(rng, "encoding")
            calls = [
                lambda: client.put_encoding(name, quantd.Encoding("int8",
                                                                  [0.5])),
                lambda: client.get_encoding(name),
                lambda: client.delete_encoding(name),
                lambda: list(client.list_encodings("soak/net", "r0")),
                lambda: list(client.list_models()),
                lambda: list(client.list_revisions("soak/net")),
                lambda: list(client.compute_encodings("soak/net", "int8",
                                                      revision="r1")),
                lambda: client.sweep("soak/net", ["int8", "int4"],
                                     revision="r0"),
                lambda: list(client.list_statistics("soak/net", "r0")),
                lambda: client.get_statistics(name_of(rng, "statistics"),
                                              with_state=rng.random() < 0.5),
                lambda: client.delete_statistics(name_of(rng, "statistics")),
            ]
            try:
                rng.choice(calls)()
            except quantd.QuantdError as error:
                if error.reason not in EXPECTED_REASONS:
                    raise
            did()
            time.sleep(rng.random() * 0.02)


def share(rng, places, did):
    """A client that works in shared memory."""
    with quantd.Client(places["unix"], timeout=PATIENCE_S,
                       shared_memory=True) as client:
        while True:
            size = 1 << rng.randrange(12, 20)
            try:
                array = client.empty_shared(size, np.float32)
                codes = client.empty_shared(size, np.int8)
                array[:] = 0.5
                for _ in range(rng.randrange(1, 10)):
                    client.quantize(array, quantd.Encoding("int8", [0.01]),
                                    out=codes)
                    did()
            except quantd.QuantdError as error:
                if error.reason not in EXPECTED_REASONS:
                    raise
            time.sleep(rng.random() * 0.05)


def requests_of(rng, size_bytes, chunk_bytes):
    """Messages of Quantize, serialized: a tensor with an encoding or a spec."""
    header = qs.QuantizeHeader(tensor=te.TensorDescription(
        element_type=te.ELEMENT_TYPE_FLOAT32, shape=[size_bytes // 4]))
    if rng.random() < 0.5:
        header.spec.format = en.NUMBER_FORMAT_INT8
        header.spec.method = rng.choice([en.CALIBRATION_METHOD_MSE,
                                         en.CALIBRATION_METHOD_MIN_MAX])
    else:
        header.encoding.format = en.NUMBER_FORMAT_INT8
        header.encoding.scale.append(0.01)
    data = np.random.default_rng(1).standard_normal(
        chunk_bytes // 4).astype(np.float32).tobytes()
    for offset in range(0, size_bytes, chunk_bytes):
        yield qs.QuantizeRequest(
            header=header if offset == 0 else None, offset=offset,
            data=data[:size_bytes - offset]).SerializeToString()


def cancel(rng, places, did):
    """A client that leaves its calls in the middle, or is too late."""
    with grpc.insecure_channel(places["tcp"]) as channel:
        quantize = channel.stream_stream(SERVICE + "Quantize")
        while True:
            call = quantize(
                requests_of(rng, rng.randrange(1, 64) << 16, 1 << 18),
                timeout=rng.choice([0.005, 0.02, 0.1, 30]))
            leave = time.monotonic() + rng.random() * 0.2
            try:
                for _ in call:
                    if time.monotonic() > leave:
                        call.cancel()
            except grpc.RpcError:
                pass
            did()


def garble(rng, places, did):
    """Sends what is no message, and what is not even gRPC."""
    host, port = places["tcp"].rsplit(":", 1)
    while True:
        with grpc.insecure_channel(places["tcp"]) as channel:
            for _ in range(20):
                call = channel.stream_stream(SERVICE + rng.choice(METHODS))
                good = list(requests_of(rng, 1 << 12, 1 << 10))
                for i, message in enumerate(good):
                    if rng.random() < 0.3:
                        message = bytearray(message)
                        message[rng.randrange(len(message))] ^= (
                            1 << rng.randrange(8))
                        good[i] = bytes(message)
                if rng.random() < 0.3:
                    good.insert(rng.randrange(len(good)),
                                rng.randbytes(rng.randrange(100)))
                try:
                    list(call(iter(good), timeout=30))
                except grpc.RpcError:
                    pass
                did()
        with socket.create_connection((host, int(port)), PATIENCE_S) as plain:
            try:
                if rng.random() < 0.5:
                    plain.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                    plain.send(struct.pack(">I", 0)[1:] + b"\x04\x00"
                               + bytes(4))
                plain.send(rng.randbytes(rng.randrange(1, 2000)))
            except OSError:
                pass
        time.sleep(rng.random() * 0.1)


def stall(rng, places, did):
    """Asks for much and reads none of it."""
    header = qs.DequantizeHeader(tensor=te.TensorDescription(
        element_type=te.ELEMENT_TYPE_FLOAT64, shape=[16 << 20]))
    header.encoding.format = en.NUMBER_FORMAT_INT8
    header.encoding.scale.append(0.01)
    with grpc.insecure_channel(places["tcp"]) as channel:
        dequantize = channel.stream_stream(SERVICE + "Dequantize")
        while True:
            calls = [
                dequantize((qs.DequantizeRequest(
                    header=header if offset == 0 else None, offset=offset,
                    data=bytes(1 << 18)).SerializeToString()
                            for offset in range(0, 16 << 20, 1 << 18)),
                           timeout=60)
                for _ in range(rng.randrange(1, 5))]
            time.sleep(rng.random() * 4)
            for call in calls:
                call.cancel()
                did()


CLIENTS = [work, work, work, keep, share, cancel, garble, stall]


# --- The driver ------------------------------------------------------------


class Crowd:
    """Clients, each in its place, replaced as they end."""

    def __init__(self, places, rng, folder):
        self._places = places
        self._rng = rng
        self._folder = folder
        # Written by the children: how much each place has done.
        self._done = mmap.mmap(-1, 8 * len(CLIENTS))
        self._pids = {}
        self._ends = {}
        self.killed = 0
        self.ended = 0

    def tend(self):
        """Starts who is missing, and kills whose time has come."""
        for place in range(len(CLIENTS)):
            pid = self._pids.get(place)
            if pid is None:
                self._start(place)
            elif os.waitpid(pid, os.WNOHANG)[0] != 0:
                del self._pids[place]
                self.ended += 1
            elif time.monotonic() > self._ends[place]:
                self._kill(place)

    def done(self):
        return {f"{kind.__name__} {place}":
                struct.unpack_from("q", self._done, 8 * place)[0]
                for place, kind in enumerate(CLIENTS)}

    def errors(self):
        texts = []
        for entry in sorted(os.listdir(self._folder)):
            with open(os.path.join(self._folder, entry),
                      encoding="utf-8") as file:
                texts.append(file.read())
        return texts

    def close(self):
        for place in list(self._pids):
            self._kill(place)

    def _kill(self, place):
        pid = self._pids.pop(place)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.killed += 1

    def _start(self, place):
        seed = self._rng.randrange(1 << 60)
        self._ends[place] = time.monotonic() + 1 + self._rng.expovariate(1 / 6)
        pid = os.fork()
        if pid != 0:
            self._pids[place] = pid
            return
        try:
            live_server.die_with_parent()
            rng = random.Random(seed)
            # One in four ends by itself, in order, before it is killed.
            if rng.random() < 0.25:
                signal.signal(signal.SIGALRM, lambda *unused: sys.exit(0))
                signal.setitimer(signal.ITIMER_REAL, 0.5 + 2 * rng.random())

            def did():
                struct.pack_into(
                    "q", self._done, 8 * place,
                    struct.unpack_from("q", self._done, 8 * place)[0] + 1)

            CLIENTS[place](rng, self._places, did)
        except SystemExit:
            pass
        except BaseException:  # pylint: disable=broad-except
            with open(os.path.join(self._folder, str(os.getpid())), "w",
                      encoding="utf-8") as file:
                file.write(CLIENTS[place].__name__ + ": "
                           + traceback.format_exc())
        finally:
            os._exit(0)


def figures(pid):
    """Resident KiB, threads and open files of a process."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        status = dict(line.split(":", 1) for line in file if ":" in line)
    return (int(status["VmRSS"].split()[0]), int(status["Threads"]),
            len(os.listdir(f"/proc/{pid}/fd")))


class Line:
    """A line through the second half of samples."""

    def __init__(self, times, values):
        half = len(times) // 2
        times = np.array(times[half:])
        self.values = np.array(values[half:], np.float64)
        self.slope, self.start = np.polyfit(times - times[0], self.values, 1)
        self.drift = self.slope * (times[-1] - times[0])

    def text(self, unit):
        return (f"{self.start:.0f} {unit} at half time, drift "
                f"{self.drift:+.1f} {unit} by the end "
                f"({self.slope * 60:+.2f} {unit} a minute), "
                f"from {self.values.min():.0f} to {self.values.max():.0f}")


GAUGES = ["quantd_active_streams", "quantd_active_tensors",
          "quantd_memory_budget_used_bytes", "quantd_shared_memory_regions",
          "quantd_shared_memory_bytes"]


def run(options, server, folder):
    """Lets the crowd at the server; what went wrong."""
    pid = server.process.pid
    rng = random.Random(options.seed)
    idle = figures(pid)
    crowd = Crowd({"tcp": server.address, "unix": server.addresses[1]}, rng,
                  folder)
    times, samples = [], []
    begin = time.monotonic()
    report = begin + 60
    try:
        while True:
            now = time.monotonic()
            late = now - begin - options.seconds
            # Who has done nothing by then is told of below.
            if late > PATIENCE_S or late > 0 and all(crowd.done().values()):
                break
            crowd.tend()
            times.append(now)
            samples.append(figures(pid))
            if now > report:
                report += 60
                print(f"{now - begin:5.0f} s: {samples[-1][0]} KiB, "
                      f"{samples[-1][1]} threads, {samples[-1][2]} files",
                      flush=True)
            time.sleep(SAMPLE_S)
    finally:
        crowd.close()
    problems = crowd.errors()
    left = [gauge for gauge in GAUGES
            if not eventually(lambda g=gauge: server.metric(g) == 0)]
    problems += [f"{gauge} is {server.metric(gauge)} without clients"
                 for gauge in left]
    # Files of clients that are gone, and threads of theirs.
    if not eventually(lambda: figures(pid)[2] <= idle[2] + 4):
        problems.append(f"{figures(pid)[2]} files are open without clients, "
                        f"{idle[2]} were before them")
    with urllib.request.urlopen(
            f"http://{server.metrics_address}/readyz",
            timeout=PATIENCE_S) as response:
        if response.status != 200:
            problems.append("not ready in the end")

    resident, threads, files = (Line(times, column)
                                for column in zip(*samples))
    done = crowd.done()
    print("done: " + ", ".join(f"{kind} {n}" for kind, n in done.items()))
    print(f"{crowd.killed} clients killed, {crowd.ended} ended")
    print("resident: " + resident.text("KiB"))
    print("threads: " + threads.text(""))
    print("files: " + files.text(""))
    print("without clients: %d KiB, %d threads, %d files; before them: "
          "%d KiB, %d threads, %d files" % (*figures(pid), *idle))
    problems += [f"{kind} did nothing" for kind, n in done.items() if n == 0]
    # What a short run begins with is still there in its second half.
    long_run = options.seconds >= 300
    if long_run and resident.drift > max(8 << 10, 0.03 * resident.start):
        problems.append(f"resident memory grows by {resident.drift:.0f} KiB")
    if long_run and threads.drift > 2:
        problems.append(f"threads grow by {threads.drift:.1f}")
    if long_run and files.drift > 10:
        problems.append(f"open files grow by {files.drift:.1f}")
    if threads.values.max() > 64:
        problems.append(f"{threads.values.max():.0f} threads")
    return problems


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--quantd", required=True)
    arguments.add_argument("--seconds", type=float, default=4)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--nice", type=int, default=0)
    options = arguments.parse_args()
    os.nice(options.nice)
    with tempfile.TemporaryDirectory() as folder:
        errors = os.path.join(folder, "errors")
        sockets = os.path.join(folder, "sockets")
        os.mkdir(errors)
        os.mkdir(sockets)
        with live_server.LiveServer(
                options.quantd,
                flags=["--listen", f"unix:{sockets}/quantd", "--shared-memory",
                       "--memory-budget-bytes", "256MiB", "--cache-bytes",
                       "8MiB", "--idle-timeout", "3s", "--drain-delay", "0"]
        ) as server:
            problems = run(options, server, errors)
    for problem in problems:
        print("FAILED: " + problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
