#!/usr/bin/python3
"""Calibration: torch's HistogramObserver and numpy.percentile beside quantd.

  calibration.py --quantd BINARY [--elements N] [--mantissa-bits M]
                 [--json FILE]

tests/bench/run --only calibration builds and installs what it takes first.

All see the same batches. Errors are those of quantizing all elements with the
scale and zero point that each found, computed in float64 by numpy, the same way
for all. quantd sees every batch once, as a contribution over gRPC, and computes
all methods and formats from the statistics; the others take a pass each. Times
are wall clock, "observe" for the batches and "compute" for the answer; memory
is what the peak is above the start, that of quantd's process for all its rows.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time

import grpc
import numpy as np
import torch
from torch.ao.quantization import HistogramObserver

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.join(HERE, "../../..")
sys.path.insert(0, os.path.join(ROOT, "tests/e2e/python"))
sys.path.insert(0, os.path.join(ROOT, "deploy/examples"))
# pylint: disable=wrong-import-position
import digits
import live_server

stub_folder = tempfile.TemporaryDirectory()
live_server.generate_stubs(stub_folder.name)
from quantd.v1 import encoding_pb2 as en
from quantd.v1 import encoding_service_pb2 as es
from quantd.v1 import encoding_service_pb2_grpc as es_grpc
from quantd.v1 import quantization_service_pb2 as qs
from quantd.v1 import quantization_service_pb2_grpc as qs_grpc
from quantd.v1 import tensor_pb2 as te

BATCHES = 8
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 600
# The part of the elements that the percentile methods cut off.
TAIL_FRACTION = 0.001
# The observer's histogram grows with the range of later batches.
PEER_MEMORY_BYTES = 8 << 30
MODEL = "bench/peers"


class Grid:
    """Codes of an affine format, and who calibrates for it how."""

    def __init__(self, name, qmin, qmax, spec, torch_types, methods):
        self.name = name
        self.qmin = qmin
        self.qmax = qmax
        self.spec = spec
        # (dtype, qscheme) of the observer, by name.
        self.torch_types = torch_types
        self.methods = methods


GRIDS = [
    # The observer's default.
    Grid("uint8 asymmetric", 0, 255,
         {"format": en.NUMBER_FORMAT_UINT8,
          "symmetry": en.SYMMETRY_ASYMMETRIC},
         ("quint8", "per_tensor_affine"),
         ("mse", "sqnr", "entropy", "percentile")),
    # Its symmetric scheme: absmax / 127.5, codes from -128.
    Grid("int8 half step", -128, 127,
         {"format": en.NUMBER_FORMAT_INT8, "symmetry": en.SYMMETRY_HALF_STEP},
         ("qint8", "per_tensor_symmetric"), ("mse", "sqnr", "entropy")),
    Grid("int8 strict", -127, 127,
         {"format": en.NUMBER_FORMAT_INT8, "symmetry": en.SYMMETRY_STRICT},
         None, ("mse", "sqnr", "entropy", "percentile")),
]

METHODS = {
    "mse": {"method": en.CALIBRATION_METHOD_MSE},
    "sqnr": {"method": en.CALIBRATION_METHOD_SQNR},
    "entropy": {"method": en.CALIBRATION_METHOD_ENTROPY},
    "percentile": {"method": en.CALIBRATION_METHOD_PERCENTILE,
                   "tail_fraction": TAIL_FRACTION},
}


def synthetic(elements):
    """Returns {name: [batch, ...]}, float32."""
    random = np.random.default_rng(2026)
    per_batch = elements // BATCHES

    def batches(draw):
        return [draw(per_batch).astype(np.float32) for _ in range(BATCHES)]

    spiky = batches(lambda n: random.laplace(0, 0.1, n))
    spiky[BATCHES // 2][17] = 50
    return {
        "normal": batches(random.standard_normal),
        "student-t(2)": batches(lambda n: random.standard_t(2, n)),
        "log-normal": batches(lambda n: random.lognormal(0, 1, n)),
        "relu": batches(lambda n: np.maximum(random.standard_normal(n), 0)),
        "spiky, one outlier": spiky,
    }


def activations():
    tensors = digits.load_safetensors(
        os.path.join(ROOT, "tests/data/digits-cnn/activations.safetensors"))
    # Copies: torch warns of arrays that may not be written to.
    return {f"digits {name}": [part.copy() for part in
                               np.split(tensor.reshape(-1), BATCHES)]
            for name, tensor in tensors.items()}


def squared_error(x, scale, zero_point, grid):
    """Mean of (x' - x)^2 in float64."""
    x = x.astype(np.float64)
    codes = np.clip(np.rint(x / scale) + zero_point, grid.qmin, grid.qmax)
    return float(np.mean(((codes - zero_point) * scale - x) ** 2))


def memory_of(pid, key):
    """VmRSS or VmHWM of a process in bytes."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) << 10
    return 0


def start_peak(pid):
    """Forgets the peak so far; returns what the process has now."""
    with open(f"/proc/{pid}/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return memory_of(pid, "VmRSS")


def in_child(function, *arguments):
    """Runs it in a process of its own: (result or None, peak in bytes)."""

    def run(pipe):
        resource.setrlimit(resource.RLIMIT_AS,
                           (PEER_MEMORY_BYTES, PEER_MEMORY_BYTES))
        start = start_peak("self")
        try:
            result = function(*arguments)
        except (MemoryError, RuntimeError) as error:
            print(f"{function.__name__} failed: {error}", file=sys.stderr)
            result = None
        pipe.send((result, memory_of("self", "VmHWM") - start))

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run, args=(sender,))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return None, 0
    finally:
        child.join()


def observe_with_torch(batches, torch_types):
    dtype, scheme = (getattr(torch, name) for name in torch_types)
    observer = HistogramObserver(dtype=dtype, qscheme=scheme)
    begin = time.perf_counter()
    for batch in batches:
        observer(torch.from_numpy(batch))
    middle = time.perf_counter()
    scale, zero_point = observer.calculate_qparams()
    return (float(scale), int(zero_point), middle - begin,
            time.perf_counter() - middle)


def percentile_with_numpy(batches, grid):
    begin = time.perf_counter()
    x = np.concatenate(batches)
    tail = 100 * TAIL_FRACTION
    if grid.qmin < 0:
        absmax = np.percentile(np.abs(x), 100 - tail)
        scale, zero_point = float(absmax) / grid.qmax, 0
    else:
        low, high = np.percentile(x, [tail / 2, 100 - tail / 2])
        low, high = min(float(low), 0.0), max(float(high), 0.0)
        scale = (high - low) / (grid.qmax - grid.qmin)
        zero_point = int(np.clip(grid.qmin - np.rint(low / scale), grid.qmin,
                                 grid.qmax))
    return (float(np.float32(scale)), zero_point, 0.0,
            time.perf_counter() - begin)


class Quantd:
    """A live server and the calls that the table takes."""

    def __init__(self, server, mantissa_bits):
        self.pid = server.process.pid
        self._mantissa_bits = mantissa_bits
        channel = grpc.insecure_channel(
            server.address, options=[("grpc.enable_http_proxy", 0)])
        self._quantization = qs_grpc.QuantizationServiceStub(channel)
        self._encodings = es_grpc.EncodingServiceStub(channel)

    def contribute(self, tensor, batches):
        """Returns the seconds it took."""
        def messages():
            for sequence, batch in enumerate(batches, 1):
                data = batch.tobytes()
                header = qs.CalibrateHeader(
                    tensor=te.TensorDescription(
                        name=te.TensorName(model=MODEL, tensor=tensor),
                        element_type=te.ELEMENT_TYPE_FLOAT32,
                        shape=batch.shape),
                    contribution=qs.Contribution(
                        source="bench", sequence=sequence,
                        mantissa_bits=self._mantissa_bits))
                yield qs.CalibrateRequest(header=header,
                                          data=data[:CHUNK_BYTES])
                for offset in range(CHUNK_BYTES, len(data), CHUNK_BYTES):
                    yield qs.CalibrateRequest(
                        offset=offset,
                        data=data[offset:offset + CHUNK_BYTES])

        begin = time.perf_counter()
        answers = list(self._quantization.Calibrate(messages(),
                                                    timeout=TIMEOUT_S))
        seconds = time.perf_counter() - begin
        for answer in answers:
            if answer.HasField("error"):
                raise RuntimeError(f"{tensor}: {answer.error}")
        if len(answers) != len(batches):
            raise RuntimeError(f"{tensor}: {len(answers)} answers")
        return seconds

    def compute(self, tensor, spec):
        """Returns (scale, zero point, seconds)."""
        request = es.ComputeEncodingsRequest(model=MODEL, dry_run=True)
        request.overrides.add(pattern=tensor, spec=spec)
        begin = time.perf_counter()
        answers = list(self._encodings.ComputeEncodings(request,
                                                        timeout=TIMEOUT_S))
        seconds = time.perf_counter() - begin
        (answer,) = answers
        if answer.HasField("error"):
            raise RuntimeError(f"{tensor}: {answer.error}")
        encoding = answer.stored_encoding.encoding
        return (encoding.scale[0],
                encoding.zero_point[0] if encoding.zero_point else 0, seconds)


def measure(name, index, batches, quantd):
    """Yields the rows of one data set."""
    x = np.concatenate(batches)

    def row(grid, who, scale, zero_point, observe_s, compute_s, peak):
        return {"data": name, "grid": grid.name, "method": who,
                "scale": scale, "zero_point": zero_point,
                "mse": squared_error(x, scale, zero_point, grid),
                "observe_s": observe_s, "compute_s": compute_s,
                "peak_bytes": peak}

    tensor = f"data-{index}"
    start = start_peak(quantd.pid)
    observe_s = quantd.contribute(tensor, batches)
    for grid in GRIDS:
        peers = []
        if grid.torch_types:
            peers.append(("torch HistogramObserver", observe_with_torch,
                          grid.torch_types))
        if "percentile" in grid.methods:
            peers.append(("numpy.percentile", percentile_with_numpy, grid))
        for who, function, argument in peers:
            result, peak = in_child(function, batches, argument)
            if result is not None:
                yield row(grid, who, *result, peak)
        for method in grid.methods:
            spec = en.EncodingSpec(**grid.spec, **METHODS[method])
            scale, zero_point, compute_s = quantd.compute(tensor, spec)
            yield row(grid, "quantd " + method, scale, zero_point, observe_s,
                      compute_s, memory_of(quantd.pid, "VmHWM") - start)


def compare(rows):
    """Returns [(data, grid, ours, theirs, our error over theirs)]."""
    errors = {(r["data"], r["grid"], r["method"]): r["mse"] for r in rows}
    pairs = [("quantd mse", "torch HistogramObserver"),
             ("quantd mse", "numpy.percentile"),
             ("quantd percentile", "numpy.percentile")]
    return [(data, grid, ours, theirs, errors[data, grid, ours] / error)
            for (data, grid, theirs), error in errors.items()
            for ours, peer in pairs
            if peer == theirs and (data, grid, ours) in errors]


def print_row(r):
    print(f"{r['data']:<20} {r['grid']:<17} {r['method']:<24} "
          f"{r['mse']:<12.5g} {r['scale']:<11.5g} {r['zero_point']:>4} "
          f"{r['observe_s'] * 1e3:>9.1f} {r['compute_s'] * 1e3:>9.1f} "
          f"{r['peak_bytes'] / 2**20:>8.1f}", flush=True)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--quantd", required=True)
    arguments.add_argument("--elements", type=int, default=1 << 21,
                           help="of each synthetic data set")
    arguments.add_argument("--mantissa-bits", type=int, default=0,
                           help="of the histograms; 0 for quantd's default")
    arguments.add_argument("--json", help="where to write the rows")
    options = arguments.parse_args()

    rows = []
    print(f"{'data':<20} {'codes':<17} {'method':<24} {'mse':<12} "
          f"{'scale':<11} {'zero':>4} {'observe':>9} {'compute':>9} "
          f"{'peak':>8}")
    # Flushed: a child would print it once more.
    print(f"{'':<92} {'ms':>9} {'ms':>9} {'MiB':>8}", flush=True)
    with contextlib.ExitStack() as stack:
        quantd = Quantd(stack.enter_context(
            live_server.LiveServer(options.quantd)), options.mantissa_bits)
        data = {**synthetic(options.elements), **activations()}
        for index, (name, batches) in enumerate(data.items()):
            for measured in measure(name, index, batches, quantd):
                rows.append(measured)
                print_row(measured)
    comparisons = compare(rows)
    print("\nerror of quantd over that of its peer:")
    for data_name, grid, ours, theirs, ratio in comparisons:
        print(f"{data_name:<20} {grid:<17} {ours:<18} over {theirs:<24} "
              f"{ratio:.4f}")
    worse = [ratio for *_, ratio in comparisons if ratio > 1]
    print(f"{len(comparisons)} comparisons, {len(worse)} above 1, largest "
          f"{max(ratio for *_, ratio in comparisons):.6f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"rows": rows,
                       "comparisons": [
                           dict(zip(("data", "grid", "ours", "theirs",
                                     "ratio"), c)) for c in comparisons]},
                      file, indent=1)


if __name__ == "__main__":
    main()
