"""What quantd and its image take, and the notations that files of deploy/ use
for it."""

import os
import re
import subprocess
import tempfile
import tomllib
from types import SimpleNamespace

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../.."))
# What quantd takes beside its memory budget and its cache.
MEMORY_BESIDE_BYTES = 256 << 20
# For clients to hear of it, streams to be told, and connections to end.
END_S = 7
# What PostgreSQL 15 has without settings, less those kept for superusers.
POSTGRESQL_CONNECTIONS = 100 - 3

_UNITS_S = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_UNITS_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30,
                "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30,
                "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
                "M": 1 << 20}


def seconds(text):
    """Of "500ms", "30s" or "1h"."""
    number, unit = re.fullmatch(r"([0-9.]+)([a-z]+)", text).groups()
    return float(number) * _UNITS_S[unit]


def size_bytes(text):
    """Of sizes as quantd ("1GiB"), Kubernetes ("1Gi"), compose ("1g") and
    systemd ("1M") write them."""
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]*)", str(text)).groups()
    return int(number) * _UNITS_BYTES[unit]


def variable(flag):
    """The environment variable of a flag without dashes in front."""
    return "QUANTD_" + flag.upper().replace("-", "_")


class Quantd:
    """The binary, asked for what it takes."""

    def __init__(self, binary):
        self._binary = binary
        listed = subprocess.run([binary, "--help"], check=True, text=True,
                                capture_output=True).stdout
        self.flags = set(re.findall(r"^  (?:-h,)?--([a-z-]+)", listed, re.M))
        self.variables = {variable(flag) for flag in self.flags}

    def effective(self, environment, arguments=(), files=None):
        """The configuration that these make; raises ValueError where quantd
        refuses them.

        files: {path: content} of those that arguments name.
        """
        with tempfile.TemporaryDirectory() as folder:
            replaced = list(arguments)
            for path, content in (files or {}).items():
                own = os.path.join(folder, os.path.basename(path))
                with open(own, "w", encoding="utf-8") as file:
                    file.write(content)
                replaced = [text.replace(path, own) for text in replaced]
            done = subprocess.run(
                [self._binary, *replaced, "--print-config"], check=False,
                text=True, env=environment, capture_output=True)
        if done.returncode != 0:
            raise ValueError(done.stderr)
        return tomllib.loads(done.stdout)


def image():
    """What the Dockerfile says of its last stage: environment, user, volumes,
    ports."""
    with open(os.path.join(ROOT, "Dockerfile"), encoding="utf-8") as file:
        text = file.read().replace("\\\n", " ")
    stage = text[text.rindex("\nFROM "):]

    def arguments(word):
        return [item for line in re.findall(rf"^{word} +(.*)$", stage, re.M)
                for item in line.split()]

    return SimpleNamespace(
        environment=dict(item.split("=", 1) for item in arguments("ENV")),
        user=arguments("USER")[0], volumes=set(arguments("VOLUME")),
        ports={int(port) for port in arguments("EXPOSE")})


def port(address):
    """The number in "host:port"; None of a unix socket."""
    return (None if address.startswith("unix:")
            else int(address.rsplit(":", 1)[1]))


def check_memory(test, effective, limit):
    """That a limit has room for what a configuration allows."""
    test.assertGreaterEqual(
        size_bytes(limit),
        size_bytes(effective["memory-budget-bytes"])
        + size_bytes(effective["cache-bytes"]) + MEMORY_BESIDE_BYTES)


def drain_s(effective):
    """How long quantd may take to end after SIGTERM."""
    return (seconds(effective["drain-delay"])
            + seconds(effective["drain-grace"]) + END_S)
