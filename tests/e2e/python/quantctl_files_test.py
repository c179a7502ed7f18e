"""What quantctl does to a user's files: it keeps what is there, writes all or
nothing, and says what it did. One model has the names and the number of tensors
of a language model, in shards.

  quantctl_files_test.py --quantd BINARY --quantctl BINARY
"""

import argparse
import hashlib
import json
import math
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import live_server
from quantctl_case import QuantctlCase, read_safetensors, write_safetensors
from relay import Relay

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--quantctl", required=True)
options, unittest_arguments = arguments.parse_known_args()

WEIGHTS = os.path.join(live_server.ROOT,
                       "tests/data/digits-cnn/model.safetensors")
# quantd takes 16 dimensions.
TOO_MANY_DIMENSIONS = [1] * 16 + [8]
NOWHERE = "127.0.0.1:1"
USAGE, UNREACHABLE, FILE_ERROR = 2, 3, 4


def floats(*values):
    return struct.pack(f"<{len(values)}f", *values)


def normal(count, seed=0):
    generator = random.Random(seed)
    return floats(*(generator.gauss(0, 0.02) for _ in range(count)))


def to_bfloat16(data):
    return b"".join(data[i + 2:i + 4] for i in range(0, len(data), 4))


def write_model(folder, layers=42, shards=6, config=None):
    """A folder in shards of bfloat16 matrices and vectors, 7 for each layer."""
    os.mkdir(folder)
    shapes = {"model.embed_tokens.weight": [64, 16]}
    for n in range(layers):
        prefix = f"model.layers.{n}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}self_attn.{name}.weight"] = [16, 16]
        shapes[f"{prefix}mlp.up_proj.weight"] = [33, 16]
        shapes[f"{prefix}mlp.down_proj.weight"] = [16, 33]
        shapes[f"{prefix}input_layernorm.weight"] = [16]
    shapes["model.norm.weight"] = [16]
    shapes["lm_head.weight"] = [64, 16]
    names = list(shapes)
    each = -(-len(names) // shards)
    weight_map = {}
    for k in range(shards):
        shard = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        tensors = {}
        for name in names[k * each:(k + 1) * each]:
            data = normal(math.prod(shapes[name]), name)
            tensors[name] = ("BF16", shapes[name], to_bfloat16(data))
            weight_map[name] = shard
        write_safetensors(os.path.join(folder, shard), tensors,
                          {"format": "pt"})
    with open(os.path.join(folder, "model.safetensors.index.json"), "w",
              encoding="utf-8") as file:
        json.dump({"metadata": {}, "weight_map": weight_map}, file)
    if config is not None:
        with open(os.path.join(folder, "config.json"), "w",
                  encoding="utf-8") as file:
            json.dump(config, file)
    return shapes


class FilesCase(QuantctlCase):
    quantd = options.quantd
    quantctl = options.quantctl

    def setUp(self):
        super().setUp()
        self.input = self.path("in.safetensors")
        with open(WEIGHTS, "rb") as file:
            self.write("in.safetensors", file.read())

    def write(self, name, data):
        with open(self.path(name), "wb") as file:
            file.write(data)
        return self.path(name)

    def digests(self, name):
        """Of a file, or of all files of a folder."""
        path = self.path(name)
        if os.path.isdir(path):
            return {entry: self.digests(os.path.join(path, entry))
                    for entry in sorted(os.listdir(path))}
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()

    def refused(self, *command, code, words=(), server=None):
        """Runs a command that must fail; nothing on disk may change."""
        before = self.digests("")
        result = self.run_quantctl(
            *command, code=code, environment=dict(
                self.environment, QUANTD_SERVER=server or self.server.address))
        self.assertEqual(self.digests(""), before, command)
        for word in words:
            self.assertIn(word, result.stderr)
        return result

    def refused_unsent(self, *command, **keywords):
        """The same, without a server to send anything to."""
        return self.refused(*command, server=NOWHERE, **keywords)


class WhatIsThereTest(FilesCase):

    def test_NothingReplacesTheInput(self):
        os.link(self.input, self.path("hard.safetensors"))
        os.symlink("in.safetensors", self.path("soft.safetensors"))
        for name in ("in.safetensors", "hard.safetensors", "soft.safetensors",
                     "./in.safetensors"):
            for force in ((), ("--force",)):
                with self.subTest(name=name, force=force):
                    self.refused_unsent(
                        "quantize", self.input, "-o", self.path(name), *force,
                        code=USAGE, words=["other than the input"])
        self.run_quantctl("quantize", self.input, "-o", self.path("q"))
        self.refused_unsent("dequantize", self.path("q"), "-o", self.path("q"),
                            "--force", code=USAGE)
        write_model(self.path("model"), layers=1, shards=2, config={})
        self.refused_unsent("quantize", self.path("model"), "-o",
                            self.path("model"), "--force", code=USAGE)
        self.refused_unsent("quantize", self.path("model"), "-o",
                            self.path("model/"), code=USAGE)
        shard = self.path("model/model-00001-of-00002.safetensors")
        self.refused_unsent("quantize", shard, "-o", self.path("model"),
                            "--layout", "compressed-tensors", "--force",
                            code=USAGE, words=["that of the input"])

    def test_NothingIsReplacedWithoutForce(self):
        names = ("--model", "once")
        self.run_quantctl("calibrate", self.input, *names, "--source", "a",
                          "--sequence", "1", "--spec", "int8")
        write_safetensors(self.path("one"), {"w": ("F32", [2, 2],
                                                   floats(1, 2, 3, 4))})
        self.run_quantctl("quantize", self.path("one"), "-o",
                          self.path("one.q"))
        self.run_quantctl("quantize", self.input, "-o", self.path("q"))
        for command in (
                ("quantize", self.input, "-o", self.path("a.safetensors")),
                ("dequantize", self.path("q"), "-o", self.path("b")),
                ("dequantize", self.path("one.q"), "-o", self.path("c.npy")),
                ("sweep", *names, "--spec", "int8", "--min-sqnr", "1", "-o",
                 self.path("d.txt")),
                ("export", *names, "-o", self.path("e.json")),
                ("report", *names, "-o", self.path("f.html"))):
            output = command[command.index("-o") + 1]
            with self.subTest(command=command):
                self.write(output, b"mine")
                self.refused_unsent(
                    *command, code=FILE_ERROR,
                    words=["FILE_EXISTS: " + output, "--force replaces it"])
                self.run_quantctl(*command, "--force")
                with open(output, "rb") as file:
                    self.assertNotEqual(file.read(), b"mine")
                os.remove(output)
                self.run_quantctl(*command)
                self.assertGreater(os.path.getsize(output), 4)

    def test_AFolderOfSomethingElseIsNotReplaced(self):
        write_model(self.path("model"), layers=1, shards=2, config={})
        quantize = ("quantize", self.path("model"), "-o", self.path("out"))
        self.run_quantctl(*quantize, "--spec", "int8")
        self.refused_unsent(*quantize, "--spec", "int4", code=FILE_ERROR,
                            words=["model-00001-of-00002.safetensors is there"])
        self.run_quantctl(*quantize, "--spec", "int4", "--force")
        # The same command on another model of the same names.
        write_model(self.path("other"), layers=1, shards=2, config={})
        self.refused_unsent("quantize", self.path("other"), "-o",
                            self.path("out"), "--spec", "int4",
                            code=FILE_ERROR)
        # Files in a folder that this command would write, and others.
        shard = self.path("model/model-00001-of-00002.safetensors")
        for name, code, more in (
                ("config.json", FILE_ERROR, ("--layout", "pack-quantized")),
                ("config.json", 0, ()),
                ("model.safetensors.index.json", FILE_ERROR, ()),
                ("model-00002-of-00002.safetensors", FILE_ERROR, ()),
                ("tokenizer.json", 0, ())):
            with self.subTest(name=name, more=more):
                folder = self.path(f"{name}.{len(more)}")
                os.mkdir(folder)
                self.write(os.path.join(folder, name), b"mine")
                command = ("quantize", self.path("model"), "-o", folder, *more)
                if code == 0:
                    self.run_quantctl(*command)
                else:
                    self.refused_unsent(*command, code=code, words=[name])
        os.mkdir(self.path("indexed"))
        self.write("indexed/model.safetensors.index.json", b"{}")
        self.refused_unsent("quantize", shard, "-o", self.path("indexed"),
                            "--layout", "pack-quantized", "--force",
                            code=USAGE, words=["model in one file"])
        self.refused_unsent("quantize", self.path("model"), "-o", self.input,
                            "--force", code=FILE_ERROR)

    def test_WhoseFolderItIsIsSaid(self):
        write_model(self.path("model"), layers=1, shards=2)
        quantize = ("quantize", self.path("model"), "-o", self.path("out/"))
        self.run_quantctl(*quantize, "--spec", "int8")
        for more in (("--spec", "int4"), ("--exclude", "*head*"),
                     ("--layout", "compressed-tensors")):
            with self.subTest(more=more):
                result = self.refused_unsent(
                    *quantize, *more, code=FILE_ERROR,
                    words=["made from another input or with other options "
                           "(--spec, --include, --exclude", "-o",
                           "--force replaces it",
                           self.path("out/model-00001-of-00002")])
                self.assertNotIn("//", result.stderr)
        # Not of quantctl.
        os.mkdir(self.path("mine"))
        self.write("mine/model-00001-of-00002.safetensors", b"mine")
        result = self.refused_unsent(
            "quantize", self.path("model"), "-o", self.path("mine"),
            code=FILE_ERROR, words=["is there already"])
        self.assertNotIn("other options", result.stderr)

    def test_AnotherLayoutLeavesNothingOfTheOneBefore(self):
        write_model(self.path("model"), layers=1, shards=2,
                    config={"model_type": "test"})
        write_model(self.path("more"), layers=1, shards=3)
        force = ("-o", self.path("out"), "--force")
        self.run_quantctl("quantize", self.path("more"), *force, "--layout",
                          "compressed-tensors", "--spec", "*proj.weight=int4")
        self.write("out/mine.safetensors", b"mine")
        self.write("out/notes.txt", b"mine")
        self.run_quantctl("quantize", self.path("model"), *force, "--spec",
                          "int8:per-channel")
        self.assertEqual(sorted(os.listdir(self.path("out"))), [
            "mine.safetensors", "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors", "model.safetensors.index.json",
            "notes.txt"])
        self.run_quantctl("dequantize", self.path("out"), "-o", self.path("r"))
        # One that is not of quantctl stays.
        self.write_json("out/config.json", {"model_type": "mine"})
        before = self.digests("out")["config.json"]
        self.run_quantctl("quantize", self.path("model"), *force, "--spec",
                          "int4")
        self.assertEqual(self.digests("out")["config.json"], before)

    def test_WeightsOfOthersDoNotStayBesideAModel(self):
        write_model(self.path("model"), layers=1, shards=2, config={})
        write_model(self.path("single"), layers=1, shards=1, config={})
        os.rename(self.path("single/model-00001-of-00001.safetensors"),
                  self.path("single/model.safetensors"))
        os.unlink(self.path("single/model.safetensors.index.json"))
        compressed = ("--layout", "compressed-tensors")
        for name, source, more in (
                ("model.safetensors", "model", ()),
                ("model-00003-of-00003.safetensors", "model", compressed),
                ("mine.safetensors", "single", compressed),
                ("mine.safetensors", "single", (*compressed, "--force"))):
            with self.subTest(name=name, more=more):
                folder = self.path(f"{name}.{source}.{len(more)}")
                os.mkdir(folder)
                self.write(os.path.join(folder, name), b"mine")
                self.refused_unsent(
                    "quantize", self.path(source), "-o", folder, *more,
                    code=USAGE, words=["weights of others", name])
        # Those of quantctl go with --force.
        single = ("quantize", self.path("single"), "-o", self.path("out"),
                  *compressed)
        self.run_quantctl(*single)
        os.unlink(self.path("out/config.json"))
        shards = ("quantize", self.path("model"), "-o", self.path("out"))
        self.refused_unsent(*shards, code=FILE_ERROR,
                            words=["out/model.safetensors is there"])
        self.run_quantctl(*shards, "--force")
        self.assertNotIn("model.safetensors", os.listdir(self.path("out")))

    def test_AHalfNewFolderIsNoModel(self):
        write_model(self.path("model"), layers=4, shards=3,
                    config={"model_type": "test"})
        quantize = ("quantize", self.path("model"), "-o", self.path("out"),
                    "--layout", "pack-quantized", "--no-ties")
        self.run_quantctl(*quantize, "--spec", "int4:group:16", "--include",
                          "*q_proj.weight")
        shard = self.path("model/model-00002-of-00003.safetensors")
        good, metadata = read_safetensors(shard)
        name = next(name for name in good if "q_proj" in name)
        write_safetensors(shard, {**good, name: (
            "BF16", TOO_MANY_DIMENSIONS, bytes(16))}, metadata)
        # Where nothing is replaced, all stays.
        before = self.digests("out")
        # A tensor that is no matrix fails only where a pattern names it.
        spec = ("--spec", "*_proj.weight=int8:per-channel")
        force = (*quantize, *spec, "--force")
        self.run_quantctl(*force, "--deadline", "1", code=UNREACHABLE,
                          environment=dict(os.environ, QUANTD_SERVER=NOWHERE))
        self.assertEqual(self.digests("out"), before)
        self.run_quantctl(*force, code=1)
        self.assertEqual(
            sorted(os.listdir(self.path("out"))),
            [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)])
        write_safetensors(shard, good, metadata)
        self.assertIn("1 of 3 shards kept", self.run_quantctl(*force).stdout)
        self.run_quantctl("quantize", self.path("model"), "-o",
                          self.path("whole"), "--layout", "pack-quantized",
                          "--no-ties", *spec)
        self.assertEqual(self.digests("out"), self.digests("whole"))

    def test_NamesSayWhatIsWritten(self):
        self.run_quantctl("quantize", self.input, "-o", self.path("q"))
        for command in (("quantize", self.input),
                        ("dequantize", self.path("q"))):
            for name in ("x.npz", "x.onnx", "x.json", "x.pt"):
                self.refused_unsent(*command, "-o", self.path(name),
                                    code=USAGE, words=[".safetensors"])
        for name in ("x.gguf", "x.GGUF"):
            self.refused_unsent("dequantize", self.path("q"), "-o",
                                self.path(name), code=USAGE,
                                words=[".safetensors"])
            self.refused_unsent("quantize", self.input, "-o", self.path(name),
                                code=USAGE, words=["a type in GGUF"])
        self.refused_unsent("quantize", self.input, "-o", self.path("x.npy"),
                            code=USAGE)
        # One array is all that .npy holds: the biases would be lost.
        self.refused("dequantize", self.path("q"), "-o", self.path("x.npy"),
                     code=FILE_ERROR, words=["the file has 8"])
        self.refused_unsent("export", "--model", "m", "-o",
                            self.path("x.onnx"), code=USAGE)
        write_model(self.path("model"), layers=1, shards=2)
        self.refused_unsent("quantize", self.path("model"), "-o",
                            self.path("x.safetensors"), code=USAGE,
                            words=["name of a folder"])
        self.refused_unsent("quantize", self.path("model"), "-o", "-",
                            code=USAGE)
        # A folder is no output where a file is.
        for command in (("dequantize", self.path("q")),
                        ("quantize", self.input)):
            for name in ("absent/", "model", "model/"):
                result = self.refused_unsent(
                    *command, "-o", self.path(name), code=USAGE,
                    words=["expected the name of a file", "got a folder",
                           self.path(name.rstrip("/")) + "/FILE.safetensors"])
                self.assertNotIn("No such file", result.stderr)

    def test_AMinusIsStandardOutput(self):
        def output_of(*command):
            result = subprocess.run([self.quantctl, *command], check=True,
                                    stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE,
                                    env=self.environment)
            return result.stdout, result.stderr

        self.run_quantctl("quantize", self.input, "-o", self.path("q"))
        self.run_quantctl("dequantize", self.path("q"), "-o", self.path("r"))
        names = ("--model", "stdout")
        self.run_quantctl("calibrate", self.input, *names, "--source", "a",
                          "--sequence", "1", "--spec", "int8")
        sweep = ("sweep", *names, "--spec", "int8", "--min-sqnr", "1")
        self.run_quantctl(*sweep, "-o", self.path("s"))
        self.run_quantctl("export", *names, "-o", self.path("e"))
        for command, name in ((("quantize", self.input), "q"),
                              (("dequantize", self.path("q")), "r"),
                              (sweep, "s"), (("export", *names), "e")):
            with open(self.path(name), "rb") as file:
                expected = file.read()
            with self.subTest(command=command):
                data, said = output_of(*command, "-o", "-")
                self.assertEqual(data, expected)
                if name != "e":
                    self.assertIn(b"TENSOR", said)
                data, said = output_of(*command, "-o", "-", "--json")
                self.assertEqual(data, expected)
                if name != "e":
                    json.loads(said)
        self.assertFalse(os.path.exists("-"))

    def test_OutputThatGoesNowhereIsAnError(self):
        for command in (("man",), ("completion", "bash"), ("models",),
                        ("models", "--json"),
                        ("quantize", self.input, "-o", "-")):
            with self.subTest(command=command), open("/dev/full", "w",
                                                     encoding="ascii") as full:
                result = subprocess.run(
                    [self.quantctl, *command], check=False, stdout=full,
                    stderr=subprocess.PIPE, env=self.environment)
                self.assertEqual(result.returncode, FILE_ERROR)
                self.assertIn(b"FILE_UNWRITABLE", result.stderr)
        for command in (("report", "--model", "m"),
                        ("sweep", "--model", "m", "--spec", "int8",
                         "--min-sqnr", "1")):
            self.refused_unsent(*command, "-o", self.path("absent/x"),
                                code=FILE_ERROR, words=["FILE_UNWRITABLE"])

    def stopped(self, *command, by=signal.SIGINT):
        """What a command says that a signal stops while it waits for its first
        answer."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            process = subprocess.Popen(
                [self.quantctl, "--server",
                 f"127.0.0.1:{listener.getsockname()[1]}", *command],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                encoding="utf-8")
            connection, _ = listener.accept()
            process.send_signal(by)
            _, said = process.communicate()
            connection.close()
        self.assertEqual(process.returncode, -by)
        return said

    def test_AnInterruptSaysWhatIsThere(self):
        write_model(self.path("model"), layers=4, shards=3)
        shard = self.path("model/model-00002-of-00003.safetensors")
        good, metadata = read_safetensors(shard)
        name = next(name for name in good if "q_proj" in name)
        write_safetensors(shard, {**good, name: (
            "BF16", TOO_MANY_DIMENSIONS, bytes(16))}, metadata)
        quantize = ("quantize", self.path("model"), "-o", self.path("out/"))
        result = self.run_quantctl(*quantize, code=1)
        there = (f"quantctl: {self.path('out/')} has 1 of 3 shards; the same "
                 "command goes on from there")
        self.assertIn(there, result.stderr)
        write_safetensors(shard, good, metadata)
        for by in (signal.SIGINT, signal.SIGTERM):
            self.assertEqual(self.stopped(*quantize, by=by), there + "\n")
        self.assertIn("is not written", self.stopped(
            "quantize", self.input, "-o", self.path("q")))
        self.assertIn("1 of 3 shards kept", self.run_quantctl(*quantize).stdout)

    def test_AnInterruptLeavesNothingBehind(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            process = subprocess.Popen(
                [self.quantctl, "--server",
                 f"127.0.0.1:{listener.getsockname()[1]}", "export", "--model",
                 "m", "-o", self.path("out.json")])
            # It calls with the file open, and waits for an answer.
            connection, _ = listener.accept()
            before = os.listdir(self.folder)
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(), -signal.SIGINT)
            connection.close()
        self.assertEqual(before, ["in.safetensors"])
        self.assertEqual(os.listdir(self.folder), ["in.safetensors"])


class AllOrNothingTest(FilesCase):

    def one_bad_tensor(self):
        write_safetensors(self.path("bad"), {
            "a.weight": ("F32", [4, 8], normal(32)),
            "bad.weight": ("F32", TOO_MANY_DIMENSIONS, normal(8)),
            "c.weight": ("F32", [4, 8], normal(32))})
        return self.path("bad")

    def test_AFileIsWrittenWholeOrNotAtAll(self):
        good = self.write("good", b"of an earlier run")
        for command, words in (
                ((self.input, "--model", "../x"),
                 ["NAME_INVALID", 'model is "../x"']),
                ((self.one_bad_tensor(),),
                 ["bad.weight", "1 of 3 tensors failed, so",
                  "--keep-going"])):
            result = self.refused("quantize", *command, "-o", good, "--force",
                                  code=1, words=words)
            self.assertNotIn("written to", result.stdout)
            self.refused("quantize", *command, "-o", self.path("new"), code=1)
        self.refused("quantize", self.input, "-o", good, "--force",
                     "--retry-for", "0", server=NOWHERE, code=UNREACHABLE)
        self.refused("quantize", self.path("absent"), "-o", good, "--force",
                     code=FILE_ERROR)
        report = json.loads(self.refused(
            "quantize", self.path("bad"), "-o", good, "--force", "--json",
            code=1).stdout)
        self.assertFalse(report["written"])
        self.assertEqual([t["result"] for t in report["tensors"]],
                         ["not written", "failed", "not written"])

    def test_ARunThatKeepsGoingSaysSoAtTheEnd(self):
        result = self.run_quantctl("quantize", self.one_bad_tensor(), "-o",
                                   self.path("out"), "--keep-going", code=1)
        self.assertEqual(
            result.stderr.splitlines()[-1],
            f"quantctl: 1 of 3 tensors failed; {self.path('out')} has 1 of "
            "them as they were")
        written, _ = read_safetensors(self.path("out"))
        self.assertEqual(written["a.weight"][0], "I8")
        self.assertEqual(written["bad.weight"][:2],
                         ("F32", TOO_MANY_DIMENSIONS))

    def test_ATensorThatCannotBeDoneIsFoundBeforeAnythingIsSent(self):
        self.refused_unsent("quantize", self.input, "-o", self.path("out"),
                            "--spec", "int8:block=1,0", code=1,
                            words=["conv1.weight", "2 of 8 tensors failed"])
        write_safetensors(self.path("taken"), {
            "w": ("F32", [2, 2], floats(1, 2, 3, 4)),
            "w.zero_point": ("F32", [1], floats(1))})
        self.refused_unsent("quantize", self.path("taken"), "-o",
                            self.path("out"), code=1, words=["w.zero_point"])

    def test_OfManyErrorsTheFirstAreShown(self):
        write_safetensors(self.path("many"), {
            f"t{n}": ("F32", TOO_MANY_DIMENSIONS, normal(8))
            for n in range(30)})
        result = self.refused("quantize", self.path("many"), "-o",
                              self.path("out"), code=1,
                              words=["and 20 tensors more failed"])
        self.assertEqual(result.stderr.count("RANK_LIMIT")
                         + result.stderr.count("SHAPE_INVALID"), 10)

    def test_OfManyErrorsOfAModelTheFirstAreShown(self):
        write_safetensors(self.path("many"), {
            f"t{n}": ("F32", [2, 8], normal(16)) for n in range(30)})
        names = ("--model", "many-errors")
        self.run_quantctl("calibrate", self.path("many"), *names, "--source",
                          "a", "--sequence", "1")
        for command in (("sweep",), ("encodings", "compute")):
            result = self.run_quantctl(*command, *names, "--spec",
                                       "int8:group:4", code=1)
            self.assertIn("and 20 tensors more failed", result.stderr)
            self.assertEqual(len(result.stderr.splitlines()), 11)
        self.assertIn("SUM N/S", self.run_quantctl(
            "sweep", *names, "--spec", "int8").stdout)
        self.assertIn("added up over all tensors", " ".join(
            self.run_quantctl("help", "sweep").stdout.split()))

    def test_DequantizeWritesAllOrNothing(self):
        self.run_quantctl("quantize", self.input, "-o", self.path("q"))
        tensors, metadata = read_safetensors(self.path("q"))
        name = "conv1.weight.scale"
        tensors[name] = (*tensors[name][:2], floats(math.nan))
        write_safetensors(self.path("q"), tensors, metadata)
        good = self.write("good", b"of an earlier run")
        self.refused("dequantize", self.path("q"), "-o", good, "--force",
                     code=1, words=["conv1.weight", "1 of 4 tensors failed"])
        result = self.run_quantctl("dequantize", self.path("q"), "-o", good,
                                   "--force", "--keep-going", code=1)
        self.assertIn("1 of 4 tensors failed; ", result.stderr)
        self.assertEqual(len(read_safetensors(good)[0]), 7)

    def test_ASweepRefusesANameThatAFileOfSpecsCannotHave(self):
        path = self.path("named")
        write_safetensors(
            path, {"a=b.weight": ("F32", [2, 2], floats(1, 2, 3, 4))}, {})
        names = ("--model", "named")
        self.run_quantctl("calibrate", path, *names, "--source", "a",
                          "--sequence", "1")
        mixture = self.path("named.txt")
        self.refused("sweep", *names, "--spec", "int8", "--min-sqnr", "1", "-o",
                     mixture, code=USAGE, words=["a=b.weight"])
        self.assertFalse(os.path.exists(mixture))

    def test_ASweepWritesOnlyWhatMeetsTheTarget(self):
        names = ("--model", "unmet")
        self.run_quantctl("calibrate", self.input, *names, "--source", "a",
                          "--sequence", "1")
        sweep = ("sweep", *names, "--spec", "int8", "--spec", "int4")
        mixture = self.write("mixture.txt", b"of an earlier run")
        for target in (("--min-sqnr", "90"), ("--max-bytes", "100"),
                       ("--max-bits-per-element", "2")):
            self.refused(*sweep, *target, "-o", mixture, "--force", code=1,
                         words=["no choice meets the target",
                                "mixture.txt is not written"])
        report = json.loads(self.refused(*sweep, "--min-sqnr", "90", "--json",
                                         code=1).stdout)
        self.assertFalse(report["mixture"]["target_met"])
        self.refused(*sweep, "--pattern", "typo*", "--min-sqnr", "1", "-o",
                     mixture, "--force", code=USAGE, words=["typo*"])
        self.refused_unsent(*sweep, "-o", mixture, "--force", code=USAGE,
                            words=["--min-sqnr"])
        self.run_quantctl(*sweep, "--min-sqnr", "10", "-o", mixture, "--force")
        with open(mixture, encoding="utf-8") as file:
            self.assertEqual(len(file.read().splitlines()), 4)

    def test_AMixtureHasOneSpecForWhatRuntimesFuse(self):
        names = ("--model", "fused")
        easy, hard = floats(*(1, -1) * 512), normal(1024)
        prefix = "model.layers.0."
        groups = {
            "self_attn.q_proj": easy, "self_attn.k_proj": hard,
            "self_attn.v_proj": hard, "self_attn.o_proj": easy,
            "mlp.experts.0.down_proj": easy, "mlp.experts.1.up_proj": hard}
        write_safetensors(self.path("fused"), {
            f"{prefix}{name}.weight": ("F32", [32, 32], data)
            for name, data in groups.items()})
        self.run_quantctl("calibrate", self.path("fused"), *names, "--source",
                          "a", "--sequence", "1")

        def chosen(*flags):
            report = json.loads(self.run_quantctl(
                "sweep", *names, "--spec", "int8", "--spec", "int4", *flags,
                "--json").stdout)
            self.assertTrue(report["mixture"]["target_met"])
            return {choice["tensor"][len(prefix):-len(".weight")]:
                    choice["spec"] for choice in report["mixture"]["choices"]}

        apart = {name: "int4" if data == easy else "int8"
                 for name, data in groups.items()}
        self.assertEqual(chosen("--min-sqnr", "30", "--no-ties"), apart)
        # o_proj is alone.
        fused = {**dict.fromkeys(groups, "int8"), "self_attn.o_proj": "int4"}
        self.assertEqual(chosen("--min-sqnr", "30"), fused)
        most = str(1024 * 6 * 8 // 10)
        for budget in (("--max-bytes", most), ("--max-bits-per-element", "7")):
            found = chosen(*budget)
            for group in ("self_attn.q self_attn.k self_attn.v",
                          "mlp.experts.0.down mlp.experts.1.up"):
                self.assertEqual(len({found[f"{name}_proj"]
                                      for name in group.split()}), 1, budget)

    def test_AnExportOfNothingIsNotWritten(self):
        self.run_quantctl("quantize", self.input, "-o", self.path("q"),
                          "--model", "exported")
        self.refused("export", "--model", "exported", "--include", "typo*",
                     "-o", self.path("e.json"), code=USAGE, words=["typo*"])


class QuantizedInputTest(FilesCase):

    def test_WhatIsQuantizedIsNotQuantizedAgain(self):
        write_model(self.path("model"), layers=1, shards=2,
                    config={"model_type": "test"})
        self.run_quantctl("quantize", self.input, "-o", self.path("ours"))
        self.run_quantctl("quantize", self.path("model"), "-o",
                          self.path("folder"))
        self.run_quantctl("quantize", self.path("model"), "-o",
                          self.path("packed"), "--layout", "pack-quantized")
        write_safetensors(self.path("theirs"), {
            "l.weight_packed": ("I32", [1, 1], bytes(4)),
            "l.weight_scale": ("BF16", [1, 1], bytes(2))})
        write_safetensors(self.path("fp8"), {
            "l.weight": ("F8_E4M3", [2, 2], bytes(4)),
            "l.weight_scale_inv": ("F32", [1, 1], bytes(4))})
        os.mkdir(self.path("gptq"))
        write_safetensors(self.path("gptq/model.safetensors"),
                          {"l.scales": ("F16", [1, 1], bytes(2))})
        self.write_json("gptq/config.json", {
            "quantization_config": {"quant_method": "gptq"}})
        shard = "packed/model-00001-of-00002.safetensors"
        for name, words in (("ours", "quantctl dequantize"),
                            ("folder", "quantctl dequantize"),
                            ("packed", "quantctl dequantize"),
                            (shard, "quantctl dequantize"),
                            ("theirs", "does not read such codes"),
                            ("fp8", "F8_E4M3"), ("gptq", "\"gptq\"")):
            for command in (("quantize", "-o", self.path("out")),
                            ("calibrate", "--model", "twice"),
                            ("calibrate", "--model", "twice", "--source", "a",
                             "--sequence", "1"),
                            ("evaluate", "--spec", "int8"),
                            ("evaluate", "--reference", self.input)):
                # What is read compares as the floats that it stands for.
                if name in ("packed", shard, "fp8") and (
                        "--reference" in command):
                    continue
                with self.subTest(name=name, command=command[0]):
                    self.refused_unsent(
                        command[0], self.path(name), *command[1:],
                        code=FILE_ERROR,
                        words=["FILE_UNSUPPORTED", "quantized already", words])

    def test_WhatWasDequantizedMayBeQuantized(self):
        self.run_quantctl("quantize", self.input, "-o", self.path("q"))
        self.run_quantctl("dequantize", self.path("q"), "-o", self.path("r"))
        self.run_quantctl("quantize", self.path("r"), "-o", self.path("again"))
        self.assertEqual(read_safetensors(self.path("again"))[0],
                         read_safetensors(self.path("q"))[0])


class PatternsTest(FilesCase):

    def test_APatternWithoutAMatchEndsTheRunBeforeAnythingIsSent(self):
        empty = self.write("empty.txt", b"\n")
        for flags, words in (
                (("--spec", "typo*=int4"), "--spec \"typo*\""),
                (("--spec", "conv*=int4", "--spec", "typo*=int4"), "typo*"),
                (("--spec", "typo*=int4", "--spec", "int8"), "typo*"),
                (("--include", "typo*"), "--include \"typo*\""),
                (("--include", "conv*", "--include", "typo*"), "typo*"),
                (("--exclude", "typo*"), "--exclude \"typo*\""),
                # Vectors are left out, and --all would take them.
                (("--include", "*.bias"), "got 4, none of them of floats with "
                                          "at least 2 dimensions; --all"),
                (("--spec", "*.bias=int8"), "--all takes floats of any rank"),
                (("--spec", "conv*=int8", "--exclude", "conv*"), "conv*"),
                (("--include", "conv*", "--exclude", "conv*"), "got none"),
                (("--min-rank", "7"), "at least 7 dimensions, got none"),
                # What an earlier pattern takes is not there for a later one.
                (("--spec", "*.weight=int4", "--spec", "conv*=int8"),
                 "--spec \"conv*\", got none: earlier patterns take all 2"),
                (("--spec", "conv1*=int4", "--spec", "conv2*=int4", "--spec",
                  "conv?.weight=int8"), "take all 2 that it matches"),
                (("--spec", "conv*=int4", "--spec", "conv*=int4"),
                 "put the narrower one first"),
                (("--spec", "@" + empty), "got none")):
            for command in (("quantize", "-o", self.path("out")),
                            ("calibrate", "--model", "patterns"),
                            ("calibrate", "--model", "patterns", "--source",
                             "a", "--sequence", "1"), ("evaluate",)):
                if command[0] == "evaluate" and "--spec" in flags:
                    continue
                with self.subTest(flags=flags, command=command[0]):
                    self.refused_unsent(command[0], self.input, *command[1:],
                                        *flags, code=USAGE, words=[words])

    def test_TextComesFromRegularFilesOfABoundedSize(self):
        apart = tempfile.TemporaryDirectory()
        self.addCleanup(apart.cleanup)
        fifo, large = (os.path.join(apart.name, name)
                       for name in ("fifo", "large"))
        os.mkfifo(fifo)
        with open(large, "wb") as file:
            file.truncate((16 << 20) + 1)
        regular = "expected a regular file"
        for path, words in (("/dev/zero", regular), (fifo, regular),
                            (self.folder, regular),
                            (large, "expected at most 16777216 bytes")):
            for option in ("--spec=@" + path,
                           "--spec=codebook4:entries=" + path):
                with self.subTest(option=option):
                    self.refused_unsent("calibrate", self.input, "--model=m",
                                        option, code=USAGE, words=[words])
        for command in (("import",), ("encodings", "put", "w", "-f")):
            with self.subTest(command=command):
                self.assertIn(regular, self.run_quantctl(
                    *command, "/dev/zero", "--model", "m",
                    code=FILE_ERROR).stderr)

    def test_WithPatternsOnlyWhatTheyMatchIsQuantized(self):
        shapes = write_model(self.path("model"))
        self.assertGreater(len(shapes), 290)
        report = self.json("quantize", self.path("model"), "-o",
                           self.path("out"), "--spec",
                           "*proj.weight=int4:group:16")
        for tensor in report["tensors"]:
            self.assertEqual(
                tensor["result"],
                "quantized" if "proj" in tensor["name"] else "copied",
                tensor["name"])
        # With a spec for all others those too.
        report = self.json("quantize", self.input, "-o", self.path("q"),
                           "--spec", "conv*=int4", "--spec", "int8")
        self.assertEqual(sorted(report["formats"]), ["int4", "int8"])

    def test_PatternsOfWhatIsStoredMustMatchToo(self):
        names = ("--model", "stored-patterns")
        self.run_quantctl("calibrate", self.input, *names, "--source", "a",
                          "--sequence", "1", "--spec", "int8")
        out = self.path("out")
        before = self.json("encodings", "list", *names)
        self.assertEqual(len(before["encodings"]), 4)
        for command, flag in (
                (("sweep", "--spec", "int8", "--min-sqnr", "1", "-o", out),
                 "--pattern"),
                (("report", "-o", out), "--pattern"),
                (("export", "-o", out), "--include"),
                (("encodings", "compute"), "--spec")):
            spec = "=int8" if flag == "--spec" else ""
            with self.subTest(command=command):
                self.refused(*command, *names, flag, "conv*" + spec, flag,
                             "typo*" + spec, code=USAGE,
                             words=[f"{flag} \"typo*\", got none among 4"])
        self.refused("encodings", "compute", *names, "--spec", "conv*=int8:mse",
                     "--spec", "conv1*=uint8", code=USAGE,
                     words=["--spec \"conv1*\", got none: earlier patterns "
                            "take all 1"])
        self.assertEqual(self.json("encodings", "list", *names), before)
        self.run_quantctl("encodings", "compute", *names, "--spec",
                          "conv1*=uint8", "--spec", "conv*=int8:mse")
        # Patterns that select may overlap.
        self.run_quantctl("export", *names, "-o", out, "--include", "conv*",
                          "--include", "conv1*")

    def test_CalibrateKeepsEncodingsOfWhatPatternsMatch(self):
        self.run_quantctl("calibrate", self.input, "--model", "matched",
                          "--spec", "conv*=int8:per-channel")
        encodings = self.json("encodings", "list", "--model",
                              "matched")["encodings"]
        self.assertEqual([stored["name"]["tensor"] for stored in encodings],
                         ["conv1.weight", "conv2.weight"])
        # A contribution is of all tensors that are taken.
        report = self.json("calibrate", self.input, "--model", "counted",
                           "--source", "a", "--sequence", "1", "--spec",
                           "conv*=int8")
        self.assertEqual(["etag" in t for t in report["tensors"]],
                         [True, True, False, False])
        self.assertEqual(
            len(self.json("statistics", "list", "--model",
                          "counted")["statistics"]), 4)


class WhatIsToldTest(FilesCase):

    def test_WhatIsNotFiniteIsSaid(self):
        write_safetensors(self.path("odd"), {
            "a": ("F32", [2, 4], floats(1, math.nan, 3, math.inf, -math.inf,
                                        2, 1, 0)),
            "b": ("F32", [2, 2], floats(1, 2, 3, 4))})
        result = self.run_quantctl("quantize", self.path("odd"), "-o",
                                   self.path("out"))
        head, row, *_ = result.stdout.splitlines()
        self.assertEqual(head.split()[-2:], ["NAN", "INF"])
        self.assertEqual(row.split()[-2:], ["1", "2"])
        self.assertIn("tensor a has 1 NaN and 2 infinities", result.stderr)
        self.assertNotIn("tensor b", result.stderr)
        result = self.run_quantctl("quantize", self.path("odd"), "-o",
                                   self.path("strict"), "--nan-policy",
                                   "reject", code=1)
        self.assertIn("NON_FINITE_REJECTED", result.stderr)
        self.assertFalse(os.path.exists(self.path("strict")))
        result = self.run_quantctl("quantize", self.path("odd"), "-o",
                                   self.path("b"), "--quiet", "--include", "b")
        self.assertEqual(result.stderr, "")
        result = self.run_quantctl("evaluate", self.path("odd"))
        self.assertIn("tensor a: 3 elements are not finite", result.stderr)

    def test_WhatIsClippedIsSaid(self):
        result = self.run_quantctl("quantize", self.input, "-o",
                                   self.path("out"), "--spec",
                                   "int8:percentile=0.9")
        self.assertIn("CLIPPED", result.stdout.splitlines()[0])

    def test_AFolderThatGoesOnTellsAllOfIt(self):
        shapes = write_model(self.path("model"))
        shard = self.path("model/model-00003-of-00006.safetensors")
        good, metadata = read_safetensors(shard)
        name = next(name for name in good if "q_proj" in name)
        write_safetensors(shard, {**good, name: (
            "BF16", TOO_MANY_DIMENSIONS, bytes(16))}, metadata)
        quantize = ("quantize", self.path("model"), "-o", self.path("out"),
                    "--spec", "int8:per-channel")
        result = self.run_quantctl(*quantize, code=1)
        self.assertIn(f"tensor {name}: ", result.stderr)
        self.assertIn(" has 2 of 6 shards; ", result.stderr)
        self.assertIn("1 of 297 tensors failed", result.stderr)
        self.assertEqual(
            sorted(os.listdir(self.path("out"))),
            [f"model-{n:05}-of-00006.safetensors" for n in (1, 2)])

        # Those that keep going are not kept by the next run.
        result = self.run_quantctl(*quantize, "--keep-going", code=1)
        self.assertIn("2 of 6 shards kept", result.stdout)
        self.assertEqual(len(os.listdir(self.path("out"))), 7)
        self.run_quantctl(*quantize, code=1)
        self.assertEqual(len(os.listdir(self.path("out"))), 7)

        write_safetensors(shard, good, metadata)
        text = self.run_quantctl(*quantize).stdout
        self.assertIn("; 5 of 6 shards kept from an earlier run", text)
        self.assertIn("int8, kept", text)
        self.run_quantctl("quantize", self.path("model"), "-o",
                          self.path("whole"), "--spec", "int8:per-channel")
        self.assertEqual(self.digests("out"), self.digests("whole"))
        whole = self.json(*quantize, "--restart")
        kept = self.json(*quantize)
        self.assertEqual(kept["kept_count"], len(shapes))
        for key in ("bytes_before", "bytes_after", "file_bytes", "formats",
                    "quantized_count"):
            self.assertEqual(kept[key], whole[key], key)
        for one, other in zip(kept["tensors"], whole["tensors"]):
            self.assertEqual(one | {"result": ""}, other | {"result": ""})
        codes = sum(
            len(payload)
            for entry in os.listdir(self.path("out"))
            if entry.endswith(".safetensors")
            for _, _, payload in
            read_safetensors(self.path("out/" + entry))[0].values())
        self.assertEqual(kept["bytes_after"], codes)

    def test_AModelWithoutAServerLeavesNoFolder(self):
        write_model(self.path("model"), layers=1, shards=2)
        self.refused("quantize", self.path("model"), "-o", self.path("out"),
                     "--retry-for", "0", server=NOWHERE, code=UNREACHABLE)


class ModelFolderTest(FilesCase):
    """Folders that others load: of compressed-tensors."""

    def test_WhatIsLeftAsItIsIsIgnored(self):
        write_model(self.path("model"), layers=11, shards=3)
        quantize = ("quantize", self.path("model"), "-o", self.path("out"),
                    "--layout", "compressed-tensors", "--spec",
                    "int8:per-channel")

        def ignored():
            with open(self.path("out/config.json"), encoding="utf-8") as file:
                config = json.load(file)["quantization_config"]
            targets = [module for group in config["config_groups"].values()
                       for module in group["targets"]]
            self.assertFalse(set(targets) & set(config["ignore"]))
            self.assertEqual(len(targets) + len(config["ignore"]), 11 * 6 + 2)
            return config["ignore"]

        self.run_quantctl(*quantize, "--exclude", "*head*", "--exclude",
                          "*.up_proj.*")
        expected = ["lm_head", "model.embed_tokens"] + [
            f"model.layers.{n}.mlp.up_proj" for n in range(11)]
        self.assertEqual(ignored(), expected)
        # Shards of an earlier run are in it too.
        self.run_quantctl(*quantize, "--exclude", "*head*", "--exclude",
                          "*.up_proj.*")
        self.assertEqual(ignored(), expected)
        self.run_quantctl(*quantize, "--force", "--ignore", "")
        self.assertEqual(ignored(), [])
        # A mixture lists all tensors; a command asks for one.
        self.run_quantctl("sweep", self.path("model"), "--spec",
                          "int8:per-channel", "--spec", "int8",
                          "--min-sqnr", "1", "-o", self.path("mixture"))
        with open(self.path("mixture"), encoding="utf-8") as file:
            self.assertIn("\nlm_head.weight=", "\n" + file.read())
        mixed = ("--spec", "@" + self.path("mixture"), "--force")
        self.run_quantctl(*quantize[:-2], *mixed)
        self.assertEqual(ignored(), ["lm_head", "model.embed_tokens"])
        self.run_quantctl(*quantize[:-1], "lm_head.weight=int8:per-channel",
                          *mixed)
        self.assertEqual(ignored(), ["model.embed_tokens"])

    def test_GroupsDivideTheColumns(self):
        write_safetensors(self.path("model"), {
            "a.weight": ("F32", [2, 2048], bytes(4 * 2 * 2048)),
            "b.weight": ("F32", [2, 100], bytes(4 * 2 * 100))})
        for layout in ("compressed-tensors", "pack-quantized"):
            self.refused_unsent(
                "quantize", self.path("model"), "-o", self.path("out"),
                "--layout", layout, "--spec", "int4:group:100", code=1,
                words=["tensor a.weight: ", "2048 columns", "groups of 100",
                       "--exclude", "1 of 2 tensors failed"])
        self.run_quantctl("quantize", self.path("model"), "-o",
                          self.path("out"), "--layout", "compressed-tensors",
                          "--spec", "a*=int4:group:128", "--spec",
                          "int4:group:100")
        # quantctl itself reads ragged groups.
        self.run_quantctl("quantize", self.path("model"), "-o",
                          self.path("own"), "--spec", "int4:group:100")

    def test_AModelIsDequantizedToAFolder(self):
        config = {"model_type": "test", "torch_dtype": "bfloat16",
                  "vocab_size": 1 << 70}
        write_model(self.path("model"), layers=2, shards=2, config=config)
        self.write("model/tokenizer.json", b"{}")
        self.write("model/.hidden", b"")
        for name, flags in (("packed", ("--scheme", "W4A16")),
                            ("own", ("--spec", "int8"))):
            self.run_quantctl("quantize", self.path("model"), "-o",
                              self.path(name), "--no-store", *flags)
            self.write(name + "/quantize_config.json", b"{}")
        self.run_quantctl("dequantize", self.path("packed"), "-o",
                          self.path("file"))
        command = ("dequantize", self.path("packed"), "-o",
                   self.path("restored/"))
        self.run_quantctl(*command)
        self.assertEqual(sorted(os.listdir(self.path("restored"))),
                         ["config.json", "model.safetensors", "tokenizer.json"])
        self.assertEqual(self.digests("restored/model.safetensors"),
                         self.digests("file"))
        with open(self.path("restored/config.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file), config)
        # It is a model like another.
        self.run_quantctl("quantize", self.path("restored"), "-o",
                          self.path("again"), "--no-store", "--scheme", "W8A16")
        self.refused(*command, code=FILE_ERROR, words=["FILE_EXISTS"])
        self.run_quantctl(*command, "--force")
        # Without a config.json, as of quantd's own layout.
        said = self.run_quantctl("dequantize", self.path("own"), "-o",
                                 self.path("plain/")).stderr
        self.assertIn("not copied: quantize_config.json", said)
        self.assertEqual(os.listdir(self.path("plain")), ["model.safetensors"])
        os.mkdir(self.path("mine"))
        self.write("mine/model-00001-of-00002.safetensors", b"mine")
        self.refused_unsent("dequantize", self.path("packed"), "-o",
                            self.path("mine/"), code=USAGE,
                            words=["weights of others"])
        self.refused_unsent("dequantize", self.path("file"), "-o",
                            self.path("new/"), code=USAGE,
                            words=["expected the name of a file"])
        self.refused_unsent("dequantize", self.path("packed"), "-o",
                            self.path("packed/"), code=USAGE,
                            words=["another folder"])
        self.write("own/config.json", b"{")
        self.refused_unsent("dequantize", self.path("own"), "-o",
                            self.path("new/"), code=FILE_ERROR,
                            words=["FILE_MALFORMED"])

    def test_WhatGoesWithTheTensorsIsCopied(self):
        write_model(self.path("model"), layers=1, shards=2,
                    config={"model_type": "test"})
        beside = ("tokenizer.json", "generation_config.json", "merges.txt",
                  "tokenizer.model", "chat_template.jinja", "README.md",
                  "modeling_test.py", "preprocessor")
        for name in (*beside, "pytorch_model.bin",
                     "pytorch_model.bin.index.json"):
            self.write("model/" + name, name.encode())
        os.mkdir(self.path("model/original"))
        for name in ("1_Pooling/config.json", "2_Dense/config.json",
                     "2_Dense/model.safetensors", "chat_templates/tools.jinja",
                     "onnx/config.json", "onnx/model.onnx", "nested/a/b.json",
                     "nested/a/c/d.py", "nested/" + "deep/" * 10 + "e.py",
                     "weights/a/b/model.bin", "weights/c.json"):
            os.makedirs(os.path.dirname(self.path("model/" + name)),
                        exist_ok=True)
            self.write("model/" + name, name.encode())
        os.symlink("../../1_Pooling", self.path("model/nested/a/link"))
        self.write("model/modules.json", json.dumps([
            {"idx": 0, "name": "0", "path": "", "type": "Transformer"},
            *({"path": name} for name in ("1_Pooling", "2_Dense", "..")),
            "other", {"path": 5}]).encode())
        layout = ("--layout", "compressed-tensors")
        quantize = ("quantize", self.path("model"), "-o", self.path("out"),
                    *layout)
        os.mkdir(self.path("out"))
        self.write("out/merges.txt", b"mine")
        result = self.run_quantctl(*quantize)
        self.assertIn(
            f"quantctl: of {self.path('model')} not copied: merges.txt, "
            f"nested/a/link, nested/{'/'.join(['deep'] * 9)}, onnx, original, "
            "pytorch_model.bin, pytorch_model.bin.index.json, weights\n",
            result.stderr)
        self.assertEqual(
            sorted(os.path.relpath(os.path.join(folder, name),
                                   self.path("out/nested"))
                   for folder, _, names in os.walk(self.path("out/nested"))
                   for name in names), ["a/b.json", "a/c/d.py"])
        for name in ("a/b.json", "a/c/d.py"):
            with open(self.path("out/nested/" + name), "rb") as file:
                self.assertEqual(file.read(), f"nested/{name}".encode())
        written, source = self.digests("out"), self.digests("model/")
        for name in beside:
            self.assertEqual(written[name] == source[name],
                             name != "merges.txt")
        copied = "1_Pooling", "2_Dense", "chat_templates", "modules.json"
        for name in copied:
            self.assertEqual(written[name], source[name])
        self.assertEqual(len(written), len(beside) + len(copied) + 5)
        self.write("out/1_Pooling/config.json", b"mine")
        self.assertIn("not copied: 1_Pooling/config.json, merges.txt, ",
                      self.run_quantctl(*quantize).stderr)
        result = self.run_quantctl(*quantize, "--force")
        self.assertNotIn("merges.txt", result.stderr)
        self.assertEqual(self.digests("out")["merges.txt"],
                         source["merges.txt"])
        # Elsewhere they are named.
        result = self.run_quantctl("quantize", self.path("model"), "-o",
                                   self.path("own"))
        self.assertIn("not copied: 1_Pooling, 2_Dense, README.md, "
                      "chat_template.jinja, chat_templates, config.json, ",
                      result.stderr)
        self.assertEqual(len(os.listdir(self.path("own"))), 3)
        result = self.run_quantctl("quantize", self.path("model"), "-o",
                                   self.path("quiet"), "--quiet")
        self.assertEqual(result.stderr, "")


class StoringTest(FilesCase):

    def models(self):
        return {model["model"] for model in self.json("models")["models"]}

    def test_EncodingsAreKeptWhenAskedFor(self):
        before = self.models()
        odd = self.path("a name with blanks.safetensors")
        os.rename(self.input, odd)
        self.run_quantctl("quantize", odd, "-o", self.path("1"))
        self.run_quantctl("quantize", odd, "-o", self.path("2"), "--model",
                          "not-kept", "--no-store")
        self.run_quantctl("evaluate", odd)
        self.run_quantctl("calibrate", odd, "--no-store")
        self.assertEqual(self.models(), before)
        self.run_quantctl("quantize", odd, "-o", self.path("3"), "--model",
                          "kept")
        stem = self.path("of-the-stem.safetensors")
        os.rename(odd, stem)
        self.run_quantctl("quantize", stem, "-o", self.path("4"), "--store")
        self.assertEqual(self.models() - before, {"kept", "of-the-stem"})
        # To calibrate is to keep.
        for flags in ((), ("--source", "a", "--sequence", "1"),
                      ("--source", "a", "--sequence", "1", "--store")):
            self.refused_unsent("calibrate", stem, *flags, code=USAGE,
                                words=["expected --model"])
        self.refused_unsent("evaluate", stem, "--spec", "stored",
                            code=USAGE, words=["--model"])

    def test_ANewStoreIsLogged(self):
        path = self.path("folder/store.db")
        for is_new in (True, False):
            with live_server.LiveServer(self.quantd,
                                        store="sqlite:" + path) as server:
                lines = [line for line in server.log().splitlines()
                         if "created a new store" in line]
                self.assertEqual([path in line for line in lines],
                                 [True] * is_new)

    def test_ATokenThatMayQuantizeCanDoSo(self):
        token = "secret-of-a-test"
        access = self.write("access.txt", (
            f"someone sha256:{hashlib.sha256(token.encode()).hexdigest()} "
            "quantize *\n").encode())
        os.chmod(access, 0o600)
        token_file = self.write("token", token.encode())
        os.chmod(token_file, 0o600)
        with live_server.LiveServer(
                self.quantd, flags=["--access-file", access]) as server:
            def quantize(*flags, code):
                return self.run_quantctl(
                    "--server", server.address, "--token-file", token_file,
                    "quantize", self.input, "-o", self.path("out"), *flags,
                    code=code)

            refused = quantize("--model", "m", code=1)
            self.assertIn("SCOPE_MISSING", refused.stderr)
            self.assertIn("--no-store quantizes without", refused.stderr)
            self.assertFalse(os.path.exists(self.path("out")))
            quantize("--model", "m", "--no-store", code=0)
            quantize("--force", code=0)

    def test_ARunThatFailsSaysWhatIsKept(self):
        write_safetensors(self.path("bad"), {
            "a.weight": ("F32", [4, 8], normal(32)),
            "bad.weight": ("F32", TOO_MANY_DIMENSIONS, normal(8))})
        self.refused("quantize", self.path("bad"), "-o", self.path("out"),
                     "--model", "half", code=1,
                     words=["the new encodings of 1 tensors in revision "
                            "main.draft-", "revision main is as it was"])

    def test_WhatFailsOnStandardOutputLeavesNoDraft(self):
        bad = self.path("bad")
        write_safetensors(bad, {
            "a.weight": ("F32", [4, 8], normal(32)),
            "bad.weight": ("F32", TOO_MANY_DIMENSIONS, normal(8))})
        command = [self.quantctl, "quantize", "-o", "-", "--model", "piped"]

        def revisions():
            result = subprocess.run(
                [self.quantctl, "models", "piped", "--json"], check=False,
                stdout=subprocess.PIPE, env=self.environment)
            return [entry["revision"] for entry in
                    json.loads(result.stdout).get("revisions", [])]

        with self.subTest("a tensor that fails"):
            result = subprocess.run([*command, bad], check=False,
                                    stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE,
                                    env=self.environment, encoding="utf-8")
            self.assertEqual((result.returncode, result.stdout), (1, ""))
            self.assertNotIn("draft", result.stderr)
            self.assertEqual(revisions(), [])
        with self.subTest("a full disk"), open("/dev/full", "w",
                                               encoding="ascii") as full:
            result = subprocess.run([*command, self.input], check=False,
                                    stdout=full, stderr=subprocess.PIPE,
                                    env=self.environment)
            self.assertEqual(result.returncode, FILE_ERROR)
            self.assertEqual(revisions(), [])
        for by in (signal.SIGINT, signal.SIGTERM):
            with self.subTest("a user who stops it", by=by):
                # More than a pipe holds: it waits for its reader.
                write_safetensors(self.path("many"), {
                    f"{i}.weight": ("F32", [64, 1024], bytes(64 * 1024 * 4))
                    for i in range(64)})
                with subprocess.Popen(
                        [*command, self.path("many")], stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL, env=self.environment) as run:
                    deadline = time.monotonic() + 60
                    while not revisions():
                        self.assertLess(time.monotonic(), deadline)
                        time.sleep(.01)
                    run.send_signal(by)
                    run.communicate()
                self.assertEqual(run.returncode, -by)
                self.assertEqual(revisions(), [])
        with self.subTest("a reader that is gone"):
            read_end, write_end = os.pipe()
            os.close(read_end)
            result = subprocess.run([*command, self.input], check=False,
                                    stdout=write_end, stderr=subprocess.PIPE,
                                    env=self.environment, encoding="utf-8")
            os.close(write_end)
            self.assertEqual(result.returncode, FILE_ERROR)
            self.assertIn("FILE_UNWRITABLE", result.stderr)
            self.assertEqual(revisions(), [])
        subprocess.run([*command, self.input], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                       env=self.environment)
        self.assertEqual(revisions(), ["main"])


class ChangedInputTest(FilesCase):

    def changed_when(self, rpc, change, *command):
        """What quantctl prints when the input is changed as such a call
        comes; the output must not be there."""
        path, output = self.path("x.safetensors"), self.path("out.safetensors")
        write_safetensors(path, {
            f"{name}.weight": ("F32", [2304, 4096], bytes(4 * 2304 * 4096))
            for name in "ab"})
        with Relay(self.server.address) as relay:
            relay.before[rpc] = lambda context: change(path)
            result = subprocess.run(
                [self.quantctl, "--server", relay.address, *command, path,
                 *(("-o", output) if command[0] == "quantize" else ())],
                check=False, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=self.environment, encoding="utf-8",
                timeout=live_server.PATIENCE_S)
        self.assertEqual(result.returncode, FILE_ERROR, result.stderr)
        self.assertFalse(os.path.exists(output))
        self.assertEqual(result.stderr.count("FILE_CHANGED"), 1)
        self.assertIn(path, result.stderr)
        self.assertNotIn("UNREACHABLE", result.stderr)
        return result.stderr

    def test_AFileThatIsCutShortIsOneErrorOfATensor(self):
        for spec in ("int8", "nvfp4", "int4:group:32"):
            with self.subTest(spec=spec):
                said = self.changed_when(
                    "Quantize", lambda path: os.truncate(path, 4096),
                    "quantize", "--no-store", "--spec", spec)
                self.assertRegex(said, r': tensor "[ab]\.weight": the file')

    def test_AFileThatIsRewrittenInItsPlaceIsAnError(self):
        def rewrite(path):
            with open(path, "r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"abcd")

        self.changed_when("Quantize", rewrite, "quantize", "--no-store",
                          "--spec", "int8")
        self.changed_when("Evaluate", rewrite, "evaluate", "--spec", "int8")
        self.changed_when("Calibrate", rewrite, "calibrate", "--no-store")


class TypesTest(FilesCase):

    VALUES = [1.5, -2.25, 0.03125, 8, 0, -8, 1, 2]

    def write_type(self, name, dtype):
        pack = {"F32": "f", "F64": "d", "F16": "e"}
        data = (to_bfloat16(floats(*self.VALUES)) if dtype == "BF16" else
                struct.pack(f"<8{pack[dtype]}", *self.VALUES))
        write_safetensors(self.path(name), {"w.weight": (dtype, [2, 4], data)})
        return self.path(name)

    def test_FilesOfDifferentTypesAreCompared(self):
        paths = {dtype: self.write_type("as" + dtype, dtype)
                 for dtype in ("F32", "F64", "F16", "BF16")}
        for dtype, path in paths.items():
            for other, reference in paths.items():
                with self.subTest(dtype=dtype, reference=other):
                    (tensor,) = self.json("evaluate", path, "--reference",
                                          reference)["tensors"]
                    self.assertEqual(
                        tensor["comparison"]["max_absolute_error"], 0)
                    self.assertEqual(tensor["comparison"]["count"], 8)
        # The error is that of the element that differs.
        write_safetensors(self.path("off"), {"w.weight": (
            "F64", [2, 4], struct.pack("<8d", *self.VALUES[:-1], 2.5))})
        (tensor,) = self.json("evaluate", self.path("off"), "--reference",
                              paths["BF16"])["tensors"]
        self.assertEqual(tensor["comparison"]["max_absolute_error"], 0.5)
        write_safetensors(self.path("integers"), {
            "w.weight": ("I32", [2, 4], bytes(32))})
        failed = self.json("evaluate", paths["F32"], "--reference",
                           self.path("integers"), code=1)
        self.assertIn("I32", failed["tensors"][0]["error"]["message"])

    def test_DequantizeRestoresTheType(self):
        for dtype in ("F32", "F64", "F16", "BF16"):
            path = self.write_type("in." + dtype, dtype)
            for layout, spec in (("quantd", "int8"),
                                 ("compressed-tensors", "int8:per-channel"),
                                 ("pack-quantized", "int4:group:4"),
                                 ("compressed-tensors", "float8_e4m3fn")):
                with self.subTest(dtype=dtype, layout=layout, spec=spec):
                    quantized = self.path(f"{layout}.{spec}.{dtype}")
                    restored = quantized + ".restored"
                    self.run_quantctl("quantize", path, "-o", quantized,
                                      "--spec", spec, "--layout", layout)
                    self.run_quantctl("dequantize", quantized, "-o", restored)
                    tensors, metadata = read_safetensors(restored)
                    self.assertEqual(tensors["w.weight"][:2], (dtype, [2, 4]))
                    self.assertEqual(
                        [key for key in metadata if "quantctl" in key], [])

    def test_InfinitiesOfATypeThatIsTooNarrowAreTold(self):
        most = struct.pack("<8e", *[65504] * 8)
        write_safetensors(self.path("in"), {
            "w.weight": ("F16", [2, 4], most),
            "v.weight": ("F16", [2, 4], struct.pack("<8e", *self.VALUES))})
        # The scale is 1024: 64 steps are more than float16 has.
        self.run_quantctl("quantize", self.path("in"), "-o", self.path("q"),
                          "--spec", "int8:power-of-two")
        told = ("tensor w.weight: 8 elements are infinite: their codes are "
                "infinity, or beyond F16, which has at most 65504 in magnitude")
        result = self.run_quantctl("dequantize", self.path("q"), "-o",
                                   self.path("out"))
        self.assertIn(told, result.stderr)
        self.assertNotIn("v.weight", result.stderr)
        self.assertEqual(read_safetensors(self.path("out"))[0]["w.weight"][2],
                         struct.pack("<8e", *[math.inf] * 8))
        document = self.json("dequantize", self.path("q"), "-o",
                             self.path("out"), "--force")
        self.assertEqual({tensor["name"]: tensor["infinity_count"]
                          for tensor in document["tensors"]},
                         {"w.weight": 8, "v.weight": 0})
        # What is decoded without a server: 448 * 2^120.
        write_safetensors(self.path("fp8"), {
            "l.weight": ("F8_E4M3", [1, 4], b"\x7e\x00\x7e\x38"),
            "l.weight_scale": ("F32", [1], floats(2.**120))})
        result = self.run_quantctl("dequantize", self.path("fp8"), "-o",
                                   self.path("reals"))
        self.assertIn("tensor l.weight: 2 elements are infinite: their codes "
                      "are infinity, or beyond F32, which has at most "
                      "3.40282e+38 in magnitude", result.stderr)

    def test_AModelOfOthersHasTheTypeOfItsConfiguration(self):
        os.mkdir(self.path("model"))
        write_safetensors(self.path("model/model.safetensors"), {
            "l.weight": ("I8", [1, 2], bytes([1, 2])),
            "l.weight_scale": ("F32", [1], floats(0.5))})
        for key in ("torch_dtype", "dtype"):
            self.write_json("model/config.json", {
                key: "bfloat16", "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {
                        "targets": ["Linear"], "weights": {
                            "num_bits": 8, "type": "int", "symmetric": True,
                            "strategy": "tensor"}}}}})
            self.run_quantctl("dequantize", self.path("model"), "-o",
                              self.path(key))
            self.assertEqual(read_safetensors(self.path(key))[0]["l.weight"],
                             ("BF16", [1, 2], to_bfloat16(floats(0.5, 1))))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *unittest_arguments], verbosity=2)
