#!/usr/bin/python3
"""Quantizing a checkpoint, file to file, beside cp and torch.

  model_bench.py --build DIR [--quick] [--bytes 4GiB] [--json FILE]
  model_bench.py --build DIR --matrix 16384x53248 [--json FILE]

DIR is where quantd and quantctl were built. The checkpoint has the shapes of
Llama 3 (make_checkpoint.py) and --bytes of bfloat16; 1GiB by default. For the
search of ranges it is a quarter of that. Input and output are in memory
(/dev/shm) and all is warm; the sides take turns, and a ratio is the median of
the rounds' ratios. The sides are

  cp        the input copied to another folder
  quantctl  quantctl quantize with a quantd on the same machine, from its start
            to its end; CPU time is that of both, and given for each
  torch     peers/torch_quantize.py, without the time to import torch; for the
            search with 20 ranges, where quantd tries more

Rows are as those of service_bench.py: wall time beside cp and torch, CPU time
beside torch, and the server's peak memory.

With --matrix, a file of that one tensor is quantized, restored, compared with
the original, and measured with Evaluate, with several specs and a new server
with default flags for each; rows are the server's peak memory. 16384x53248 is
the largest matrix of Llama 405B, 1664 MiB; that takes 4.5 GiB of memory.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import make_checkpoint
import service_bench

HERE = os.path.dirname(os.path.realpath(__file__))
MEMORY_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None
TORCH_RANGES = 20
# Among them those with the most scales, and one that needs an outer scale.
MATRIX_SPECS = ("int4:group:32", "int4:group:128:mse", "nvfp4", "mxfp4_e2m1",
                "int8:per-channel")
# More shards than one, as models of real size have.
SHARDS = 4
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds_of(pid):
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        # The name of the program comes in brackets and may have spaces.
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def folder_bytes(folder):
    return sum(os.path.getsize(os.path.join(folder, name))
               for name in os.listdir(folder))


class Bench:
    """The sides, each from the folder `source` to a folder of its own."""

    def __init__(self, build, server, folder):
        self._quantctl = os.path.join(build, "client/cli/quantctl")
        self._server = server
        self._target = os.path.join(folder, "target")

    def _run(self, command):
        """Wall time, CPU time, and what was written, which is removed."""
        with tempfile.TemporaryFile() as output:
            begin = time.monotonic()
            with subprocess.Popen(command, stdin=subprocess.DEVNULL,
                                  stdout=output, stderr=output) as process:
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            seconds = time.monotonic() - begin
            output.seek(0)
            text = output.read().decode()
        if process.returncode != 0:
            raise RuntimeError(f"{command} ended with {process.returncode}:\n"
                               f"{text[-4000:]}")
        size = folder_bytes(self._target)
        shutil.rmtree(self._target)
        return text, {"seconds": seconds, "output_bytes": size,
                      "cpu_seconds": usage.ru_utime + usage.ru_stime}

    def copy(self, source):
        return self._run(["cp", "-r", source, self._target])[1]

    def quantctl(self, source, spec):
        begin = cpu_seconds_of(self._server.process.pid)
        result = self._run([
            self._quantctl, "--server", self._server.address, "--quiet",
            "quantize", source, "-o", self._target, "--spec", spec])[1]
        server = cpu_seconds_of(self._server.process.pid) - begin
        return {**result, "client_cpu_seconds": result["cpu_seconds"],
                "server_cpu_seconds": server,
                "cpu_seconds": result["cpu_seconds"] + server}

    def torch(self, source, ranges):
        text, result = self._run([
            "/usr/bin/python3", os.path.join(HERE, "peers/torch_quantize.py"),
            source, self._target, "--ranges", str(ranges)])
        return {**result, **json.loads(text)}


def log_side(side, result, input_bytes):
    parts = "" if "server_cpu_seconds" not in result else (
        f" ({result['client_cpu_seconds']:.2f} of the client, "
        f"{result['server_cpu_seconds']:.2f} of the server)")
    print(f"  {side:9s} {result['seconds']:8.2f} s, "
          f"{input_bytes / result['seconds'] / 1e6:7.0f} MB/s, CPU "
          f"{result['cpu_seconds']:.2f} s{parts}, "
          f"{result['output_bytes'] >> 20} MiB written",
          file=sys.stderr, flush=True)


def spec_rows(bench, source, spec, ranges, rounds, goals):
    """Rows of one spec; `goals` by what it is beside."""
    sides = {"cp": lambda: bench.copy(source),
             "quantctl": lambda: bench.quantctl(source, spec),
             "torch": lambda: bench.torch(source, ranges)}
    input_bytes = folder_bytes(source)
    print(f"{spec}, {input_bytes >> 20} MiB", file=sys.stderr, flush=True)
    # The first round warms up, but for sides that take many times as long as
    # what that would save.
    bench.copy(source)
    if not ranges:
        sides["quantctl"]()
    results = {side: [] for side in sides}
    for _ in range(rounds):
        for side, measure in sides.items():
            results[side].append(measure())
            log_side(side, results[side][-1], input_bytes)
    # Both have to have done the same.
    written = [results[side][0]["output_bytes"]
               for side in ("quantctl", "torch")]
    if max(written) > 1.15 * min(written):
        raise RuntimeError(f"quantctl wrote {written[0]} bytes and torch "
                           f"{written[1]}")

    def of(side, key):
        return [result[key] for result in results[side]]

    torch = f"torch, {ranges} ranges" if ranges else "torch"
    return [
        service_bench.row(f"{spec} / cp", "s", of("quantctl", "seconds"),
                          of("cp", "seconds"), goals.get("cp"), at_most=True),
        service_bench.row(f"{spec} / {torch}", "s", of("quantctl", "seconds"),
                          of("torch", "seconds"), goals.get("torch"),
                          at_most=True),
        service_bench.row(f"{spec}, CPU / {torch}", "s",
                          of("quantctl", "cpu_seconds"),
                          of("torch", "cpu_seconds"), None, at_most=True),
        service_bench.row(f"{spec}, CPU of the server / of the client", "s",
                          of("quantctl", "server_cpu_seconds"),
                          of("quantctl", "client_cpu_seconds"), None),
    ]


def run(build, size_bytes, rounds):
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as folder:
        sources = {}
        for name, part in (("whole", size_bytes), ("search", size_bytes // 4)):
            shape = "8B" if part >= 1 << 30 else "1B"
            sources[name] = os.path.join(folder, name)
            make_checkpoint.make_checkpoint(
                sources[name], make_checkpoint.SIZES[shape], size_bytes=part,
                embeddings=False, shard_bytes=part // SHARDS)
        with service_bench.Quantd(build, folder) as server:
            bench = Bench(build, server, folder)
            rows = spec_rows(bench, sources["whole"], "int4:group:128", 0,
                             rounds, {"cp": 2.0, "torch": 0.2})
            shutil.rmtree(sources["whole"])
            rows += spec_rows(bench, sources["search"], "int4:group:128:mse",
                              TORCH_RANGES, max(rounds // 2, 1),
                              {"torch": 0.1})
            rows.append(service_bench.row(
                "server memory, peak / goal", "MiB", [server.peak_mib()],
                [service_bench.SERVER_MEMORY_GOAL_MIB], 1.0, at_most=True))
    return rows


def matrix_row(build, folder, source, spec):
    """The server's peak memory; RuntimeError when a command fails."""
    codes = os.path.join(folder, "codes.safetensors")
    restored = os.path.join(folder, "restored.safetensors")
    with tempfile.TemporaryDirectory() as store, \
            service_bench.Quantd(build, store) as server:
        for command in (["quantize", source, "-o", codes, "--spec", spec],
                        ["dequantize", codes, "-o", restored],
                        ["evaluate", restored, "--reference", source],
                        ["evaluate", source, "--spec", spec]):
            begin = time.monotonic()
            result = subprocess.run(
                [os.path.join(build, "client/cli/quantctl"), "--server",
                 server.address, *command], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                check=False)
            print(f"  {spec}, {command[0]}: {time.monotonic() - begin:.1f} s, "
                  f"server at {server.peak_mib():.0f} MiB", file=sys.stderr,
                  flush=True)
            if result.returncode != 0:
                raise RuntimeError(f"{spec}: {result.stdout[-2000:]}")
        for path in (codes, restored):
            os.remove(path)
        return service_bench.row(
            f"{spec}, server memory / goal", "MiB", [server.peak_mib()],
            [service_bench.SERVER_MEMORY_GOAL_MIB], 1.0, at_most=True)


def run_matrix(build, shape):
    rows = []
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as folder:
        source = os.path.join(folder, "matrix.safetensors")
        make_checkpoint.write_shard(
            source, [make_checkpoint.Tensor("mlp.down_proj.weight", shape)],
            make_checkpoint.Weights(seed=0))
        for spec in MATRIX_SPECS:
            own = os.path.join(folder, "own")
            os.mkdir(own)
            try:
                rows.append(matrix_row(build, own, source, spec))
            except RuntimeError as error:
                # The others are worth their figures.
                print(error, file=sys.stderr, flush=True)
            shutil.rmtree(own)
    return rows


def parse_shape(text):
    rows, separator, columns = text.partition("x")
    if not (separator and rows.isdecimal() and columns.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}; expected ROWSxCOLUMNS")
    return int(rows), int(columns)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true",
                        help="256 MiB and fewer rounds")
    parser.add_argument("--bytes", type=make_checkpoint.parse_bytes,
                        help="size of the checkpoint; takes 2.3 times that of "
                             "memory")
    parser.add_argument("--matrix", type=parse_shape, metavar="ROWSxCOLUMNS",
                        help="measure the server's memory with one matrix "
                             "instead")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.matrix:
        rows = run_matrix(arguments.build, arguments.matrix)
    else:
        rows = run(arguments.build, arguments.bytes or
                   (256 << 20 if arguments.quick else 1 << 30),
                   2 if arguments.quick else 5)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
            file.write("\n")
    for row in rows:
        service_bench.print_row(row)


if __name__ == "__main__":
    main()
