"""What the Python end-to-end tests share: generated stubs and a live quantd."""

import ctypes
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../../.."))
PROTO_DIR = os.path.join(ROOT, "proto")
# Only what hangs takes so long, however busy the machine is and however slow a
# sanitizer makes a program. Shorter than the silence that ends a test.
PATIENCE_S = 240
PR_SET_PDEATHSIG = 1

# gRPC would take a hand in every fork of a process that has channels open, and
# now and then wait for ever there; servers that are forked off need none of it.
# It looks at this when the first channel is made.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def die_with_parent():
    """For a forked child: a test that is killed leaves no server behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def with_parent(*command):
    """The same for a command. No code of this process runs in the child, as
    that of a preexec_fn would: gRPC has threads here."""
    return ["setpriv", "--pdeathsig", "KILL", *command]


def generate_stubs(folder):
    """Generates Python stubs from proto/ alone into `folder`, importable."""
    protos = sorted(
        os.path.relpath(os.path.join(base, name), PROTO_DIR)
        for base, _, names in os.walk(PROTO_DIR)
        for name in names if name.endswith(".proto"))
    subprocess.run(
        ["protoc", f"--proto_path={PROTO_DIR}", f"--python_out={folder}",
         f"--grpc_python_out={folder}",
         "--plugin=protoc-gen-grpc_python=" + which("grpc_python_plugin")]
        + protos, check=True)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()


def eventually(condition, seconds=PATIENCE_S):
    """Whether the condition holds in the end."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def which(program):
    for folder in os.environ["PATH"].split(os.pathsep):
        path = os.path.join(folder, program)
        if os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(program)


def run(*command, **keywords):
    """What a command prints; AssertionError with that when it fails."""
    result = subprocess.run(command, check=False, encoding="utf-8",
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            **keywords)
    if result.returncode != 0:
        raise AssertionError(f"{command} ended with {result.returncode}:\n"
                             f"{result.stdout[-8000:]}")
    return result.stdout


def peak_memory_bytes(pid):
    """The most that a process has held so far."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", file.read())[1])


class LiveServer:
    """A quantd on free loopback ports, with a store of its own or the URL of
    another; a context manager.

    Stopping it checks that it drained and exited with 0.
    """

    def __init__(self, binary, folder=None, flags=(), store=None,
                 listen="127.0.0.1:0"):
        self._own = tempfile.TemporaryDirectory() if folder is None else None
        self.folder = folder or self._own.name
        ready = os.path.join(self.folder, "ready.json")
        if os.path.exists(ready):
            os.remove(ready)
        self._is_stopping = False
        self._log_path = os.path.join(self.folder, "quantd.log")
        with open(self._log_path, "ab") as log:
            self.process = subprocess.Popen(
                with_parent(
                    binary, "--listen", listen, "--metrics-listen",
                    "127.0.0.1:0", "--store",
                    store or "sqlite:" + os.path.join(self.folder, "store.db"),
                    "--ready-file", ready, *flags),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while not os.path.exists(ready):
            if self.process.poll() is not None:
                raise RuntimeError("quantd ended at start:\n" + self.log())
            if time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError("quantd did not get ready:\n" + self.log())
            time.sleep(0.01)
        with open(ready, encoding="utf-8") as file:
            state = json.load(file)
        self.addresses = state["grpc"]
        self.address = self.addresses[0]
        self.metrics_address = state["metrics"]

    def log(self):
        with open(self._log_path, encoding="utf-8", errors="replace") as file:
            return file.read()

    def metric(self, name, **labels):
        """The sum of the samples of that name that have these labels."""
        url = f"http://{self.metrics_address}/metrics"
        total = 0.0
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            for line in response.read().decode().splitlines():
                if re.match(name + r"[{ ]", line) and all(
                        f'{key}="{value}"' in line
                        for key, value in labels.items()):
                    total += float(line.rsplit(" ", 1)[1])
        return total

    def begin_stop(self):
        """Tells it to stop; stop() waits for that. A second signal would end it
        at once."""
        if not self._is_stopping:
            self._is_stopping = True
            self.process.terminate()

    def stop(self):
        self.begin_stop()
        try:
            code = self.process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError("quantd did not stop:\n" + self.log())
        log = self.log()
        if self._own is not None:
            self._own.cleanup()
        if code != 0:
            raise RuntimeError(f"quantd ended with {code}:\n{log}")

    def kill(self):
        """Ends it without a warning."""
        self.process.kill()
        self.process.wait()
        if self._own is not None:
            self._own.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.stop()
