"""What tests of quantctl share: a live server, a folder, and safetensors."""

import json
import os
import re
import signal
import subprocess
import tempfile
import unittest

import live_server


def read_safetensors(path):
    """Returns {name: (dtype, shape, bytes)} and the metadata."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    metadata = header.pop("__metadata__", {})
    return {name: (info["dtype"], info["shape"],
                   data[slice(*info["data_offsets"])])
            for name, info in header.items()}, metadata


def write_safetensors(path, tensors, metadata=None):
    """Writes {name: (dtype, shape, bytes)}."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, shape, payload) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape,
                        "data_offsets": [len(data), len(data) + len(payload)]}
        data += payload
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)


def documented_fields():
    """What the manual says that documents of --json have."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)),
                        "../../../client/cli/README.md")
    with open(path, encoding="utf-8") as file:
        return set(re.findall(r"[`\"](\w+)[`\"]",
                              file.read().split("## Documents of --json")[1]))


def fields(document):
    """The names of all fields, but for those of protobuf JSON."""
    found = set()
    if isinstance(document, dict):
        for name, value in document.items():
            found.add(name)
            if name not in ("encodings", "state"):
                found |= fields(value)
    elif isinstance(document, list):
        for value in document:
            found |= fields(value)
    return found


class QuantctlCase(unittest.TestCase):
    """Has a server of its own, and a folder for each test. Subclasses name the
    programs in `quantd` and `quantctl`."""

    @classmethod
    def setUpClass(cls):
        # Shells have what runs in their background ignore it, and quantctl
        # would do so too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cls.server = live_server.LiveServer(cls.quantd,
                                            flags=["--drain-delay", "0"])
        cls.addClassCleanup(cls.server.stop)
        cls.environment = dict(os.environ, QUANTD_SERVER=cls.server.address)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def run_quantctl(self, *command, code=0, environment=None):
        result = subprocess.run(
            [self.quantctl, *command], check=False, encoding="utf-8",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment or self.environment)
        self.assertEqual(result.returncode, code,
                         result.stdout + result.stderr)
        return result

    def json(self, *command, code=0):
        document = json.loads(self.run_quantctl(*command, "--json",
                                                code=code).stdout)
        if "json_version" in document:
            self.assertEqual(fields(document) - documented_fields(), set(),
                             command)
        return document

    def encoding(self, model, tensor):
        """The stored one."""
        return self.json("encodings", "get", tensor, "--model",
                         model)["encoding"]

    def write_json(self, name, document):
        """The path of a file that has the document."""
        with open(self.path(name), "w", encoding="utf-8") as file:
            json.dump(document, file)
        return self.path(name)
