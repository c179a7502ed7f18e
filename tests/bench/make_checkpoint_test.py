#!/usr/bin/python3
"""The checkpoints that benchmarks use: whole, repeatable, shaped like weights.

Skipped without numpy.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
try:
    import numpy as np
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)
# pylint: disable=wrong-import-position
import make_checkpoint

TINY = make_checkpoint.SIZES["tiny"]


def load_shard(path):
    """Returns {name: float32 array}; the data must fill the file exactly."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    del header["__metadata__"]
    tensors, end = {}, 0
    for name, info in header.items():
        assert info["dtype"] == "BF16" and info["data_offsets"][0] == end
        end = info["data_offsets"][1]
        bits = np.frombuffer(data[info["data_offsets"][0]:end], np.uint16)
        tensors[name] = (bits.astype(np.uint32) << 16).view(
            np.float32).reshape(info["shape"])
    assert end == len(data)
    return tensors


def load(folder):
    tensors = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            tensors.update(load_shard(os.path.join(folder, name)))
    return tensors


class MakeCheckpointTest(unittest.TestCase):

    def setUp(self):
        own = tempfile.TemporaryDirectory()
        self.addCleanup(own.cleanup)
        self.folder = own.name

    def make(self, name, **arguments):
        folder = os.path.join(self.folder, name)
        make_checkpoint.make_checkpoint(folder, TINY, **arguments)
        return folder

    def test_index_and_config_describe_the_shards(self):
        folder = self.make("model", shard_bytes=300_000)
        with open(os.path.join(folder, "model.safetensors.index.json"),
                  encoding="utf-8") as file:
            index = json.load(file)
        with open(os.path.join(folder, "config.json"),
                  encoding="utf-8") as file:
            config = json.load(file)
        self.assertGreater(len(set(index["weight_map"].values())), 2)
        found = {}
        for shard in set(index["weight_map"].values()):
            tensors = load_shard(os.path.join(folder, shard))
            found.update({name: shard for name in tensors})
        self.assertEqual(found, index["weight_map"])
        # bfloat16 takes half of float32.
        self.assertEqual(
            2 * index["metadata"]["total_size"],
            sum(tensor.nbytes for tensor in load(folder).values()))
        self.assertEqual(config["num_hidden_layers"], TINY.layers)
        self.assertEqual(
            load(folder)["model.layers.1.mlp.down_proj.weight"].shape,
            (config["hidden_size"], config["intermediate_size"]))

    def test_a_tensor_depends_on_its_name_and_the_seed_alone(self):
        one = load(self.make("one"))
        other = load(self.make("other", shard_bytes=300_000, layers=3))
        for name, tensor in one.items():
            np.testing.assert_array_equal(tensor, other[name])
        names = [name for name in one if name.endswith("gate_proj.weight")]
        self.assertFalse(np.array_equal(one[names[0]], one[names[1]]))
        seeded = load(self.make("seeded", seed=1))
        self.assertFalse(np.array_equal(one[names[0]], seeded[names[0]]))

    def test_the_numbers_look_like_weights(self):
        weight = load(self.make("model"))["model.layers.0.mlp.up_proj.weight"]
        self.assertTrue(np.isfinite(weight).all())
        columns = weight.std(axis=0)
        outliers = columns > 5 * np.median(columns)
        self.assertEqual(outliers.sum(), 1)
        ordinary = weight[:, ~outliers]
        rows = ordinary.std(axis=1)
        self.assertGreater(rows.max(), 1.5 * rows.min())
        ordinary = ordinary / rows[:, None]
        # 3 for a normal distribution.
        self.assertGreater((ordinary**4).mean(), 4)

    def test_no_stretch_of_numbers_comes_twice_in_a_tensor(self):
        shapes = make_checkpoint.Shapes(1024, 4096, 1, 8, 8)
        folder = os.path.join(self.folder, "model")
        make_checkpoint.make_checkpoint(folder, shapes, embeddings=False)
        weight = load(folder)["model.layers.0.mlp.up_proj.weight"]
        # A scale keeps the signs.
        signs = np.packbits(weight > 0, axis=1)
        self.assertEqual(len(np.unique(signs, axis=0)), len(signs))

    def test_bytes_are_filled_with_layers(self):
        for embeddings in (True, False):
            with self.subTest(embeddings=embeddings):
                folder = self.make(f"model-{embeddings}", size_bytes=3 << 20,
                                   embeddings=embeddings)
                size = os.path.getsize(
                    os.path.join(folder, "model.safetensors"))
                self.assertLess(size, 3 << 20)
                layer = make_checkpoint.sum_bytes(
                    make_checkpoint.layer_tensors(TINY, 0))
                self.assertGreater(size, (3 << 20) - layer)
                self.assertEqual(
                    embeddings, "lm_head.weight" in load(folder))

    def test_sizes_are_those_of_the_models(self):
        # Billions of parameters, as the models' own pages give them.
        for name, parameters in (("1B", 1.24), ("8B", 8.03), ("70B", 70.6),
                                 ("405B", 405.9)):
            shapes = make_checkpoint.SIZES[name]
            size = make_checkpoint.sum_bytes(make_checkpoint.model_tensors(
                shapes, shapes.layers, embeddings=True))
            self.assertAlmostEqual(size / 2e9, parameters,
                                   delta=parameters / 200)

    def test_command_keeps_what_is_there(self):
        command = [sys.executable, make_checkpoint.__file__,
                   os.path.join(self.folder, "model"), "--size", "tiny",
                   "--bytes", "2MiB"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        again = subprocess.run(command, check=False, capture_output=True,
                               encoding="utf-8")
        self.assertEqual(again.returncode, 1)
        self.assertIn("is not empty", again.stderr)


if __name__ == "__main__":
    unittest.main()
