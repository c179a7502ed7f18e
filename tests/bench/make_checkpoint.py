#!/usr/bin/python3
"""Writes a checkpoint of random weights with the shapes of a Llama model.

  make_checkpoint.py FOLDER --size 8B [--layers N] [--bytes 4GiB] ...

FOLDER gets what Hugging Face saves: shards of bfloat16 with an index, or one
model.safetensors, and config.json. The numbers look like weights: tails heavier
than normal (Student's t with 5 degrees of freedom), rows of different scale,
and some input channels 8 to 32 times as large as others.

A tensor depends on its name, its shape and --seed alone: not on the number of
layers or the size of shards. Random numbers are not drawn for every element,
which would take minutes: 4 Mi of them are drawn once, and every part of a tensor
takes a stretch of them from another place, times the scales of its rows and
columns. No more than that is held in memory, however large the tensors are.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import time
from typing import BinaryIO, Iterator

import numpy as np

# Random numbers drawn, and the most that are written at once: small enough to
# stay in the processor's cache.
DRAWN = 4 << 20
AT_ONCE = 1 << 16
TAIL_DEGREES = 5
# Of the columns that are outlier channels; every matrix has at least one.
OUTLIER_SHARE = 1 / 256
OUTLIER_LEAST, OUTLIER_MOST = 8.0, 32.0
ROW_SPREAD = 0.3
BFLOAT16_BYTES = 2
UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
         "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What Llama's config.json calls hidden_size, intermediate_size, ..."""
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 128256
    tied: bool = False

    @property
    def head(self) -> int:
        return self.hidden // self.heads


SIZES = {
    # For tests: 350 KB a layer.
    "tiny": Shapes(128, 352, 2, 4, 2, vocabulary=512),
    "1B": Shapes(2048, 8192, 16, 32, 8, tied=True),
    "8B": Shapes(4096, 14336, 32, 32, 8),
    "70B": Shapes(8192, 28672, 80, 64, 8),
    "405B": Shapes(16384, 53248, 126, 128, 8),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * BFLOAT16_BYTES


def layer_tensors(shapes: Shapes, layer: int) -> list[Tensor]:
    prefix = f"model.layers.{layer}."
    kv = shapes.kv_heads * shapes.head
    return [Tensor(prefix + name, shape) for name, shape in (
        ("input_layernorm.weight", (shapes.hidden,)),
        ("self_attn.q_proj.weight", (shapes.hidden, shapes.hidden)),
        ("self_attn.k_proj.weight", (kv, shapes.hidden)),
        ("self_attn.v_proj.weight", (kv, shapes.hidden)),
        ("self_attn.o_proj.weight", (shapes.hidden, shapes.hidden)),
        ("post_attention_layernorm.weight", (shapes.hidden,)),
        ("mlp.gate_proj.weight", (shapes.intermediate, shapes.hidden)),
        ("mlp.up_proj.weight", (shapes.intermediate, shapes.hidden)),
        ("mlp.down_proj.weight", (shapes.hidden, shapes.intermediate)),
    )]


def model_tensors(shapes: Shapes, layers: int,
                  embeddings: bool) -> list[Tensor]:
    table = (shapes.vocabulary, shapes.hidden)
    tensors = []
    if embeddings:
        tensors.append(Tensor("model.embed_tokens.weight", table))
    for layer in range(layers):
        tensors += layer_tensors(shapes, layer)
    tensors.append(Tensor("model.norm.weight", (shapes.hidden,)))
    if embeddings and not shapes.tied:
        tensors.append(Tensor("lm_head.weight", table))
    return tensors


def sum_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.size_bytes for tensor in tensors)


def layers_that_fit(shapes: Shapes, size_bytes: int, embeddings: bool) -> int:
    """At least one."""
    rest = size_bytes - sum_bytes(model_tensors(shapes, 0, embeddings))
    return max(rest // sum_bytes(layer_tensors(shapes, 0)), 1)


def shards_of(tensors: list[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """In order; a shard is larger only if it has a single tensor."""
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and (sum_bytes(shards[-1]) + tensor.size_bytes
                           > shard_bytes):
            shards.append([])
        shards[-1].append(tensor)
    return shards


class Weights:
    """The numbers of the tensors."""

    def __init__(self, seed: int):
        self._seed = seed
        # RandomState draws the same numbers with every version of numpy.
        drawn = np.random.RandomState(seed & 0xffffffff).standard_t(
            TAIL_DEGREES, DRAWN).astype(np.float32)
        # A stretch may begin anywhere.
        self._drawn = np.concatenate([drawn, drawn[:AT_ONCE]])

    def parts(self, tensor: Tensor) -> Iterator[np.ndarray]:
        """bfloat16, as uint16, in row-major order."""
        key = hashlib.sha256(
            f"{self._seed} {tensor.name} {tensor.shape}".encode()).digest()
        random = np.random.RandomState(int.from_bytes(key[:4], "little"))
        if len(tensor.shape) == 1:
            yield to_bfloat16(
                (1 + 0.1 * random.standard_normal(tensor.shape)
                 ).astype(np.float32))
            return
        rows, columns = tensor.shape
        # As layers are initialized, for a sum of `columns` products.
        row_scales = (np.exp(ROW_SPREAD * random.standard_normal(rows))
                      / np.sqrt(columns)).astype(np.float32)
        column_scales = np.ones(columns, np.float32)
        outliers = random.choice(
            columns, max(1, round(columns * OUTLIER_SHARE)), replace=False)
        column_scales[outliers] = random.uniform(
            OUTLIER_LEAST, OUTLIER_MOST, len(outliers))
        rows_at_once = max(AT_ONCE // columns, 1)
        for row in range(0, rows, rows_at_once):
            scales = row_scales[row:row + rows_at_once, None]
            for column in range(0, columns, AT_ONCE):
                width = min(AT_ONCE, columns - column)
                begin = random.randint(DRAWN)
                stretch = self._drawn[begin:begin + len(scales) * width]
                part = stretch.reshape(len(scales), width) * column_scales[
                    column:column + width]
                part *= scales
                yield to_bfloat16(part)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounds to the nearest, halves away from zero; overwrites its input."""
    bits = values.reshape(-1).view(np.uint32)
    bits += 0x8000
    return bits.view(np.uint16)[1::2].copy()


def write_shard(path: str, tensors: list[Tensor], weights: Weights) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": "BF16", "shape": tensor.shape,
            "data_offsets": [offset, offset + tensor.size_bytes]}
        offset += tensor.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    # Nobody takes a part of a shard for a whole one.
    with open(path + ".part", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            write_tensor(file, tensor, weights)
    os.rename(path + ".part", path)


def write_tensor(file: BinaryIO, tensor: Tensor, weights: Weights) -> None:
    for part in weights.parts(tensor):
        file.write(part.data)


def write_json(path: str, document: dict[str, object]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=2)
        file.write("\n")


def config(shapes: Shapes, layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": shapes.head,
        "hidden_act": "silu",
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.intermediate,
        "max_position_embeddings": 131072,
        "model_type": "llama",
        "num_attention_heads": shapes.heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": shapes.kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": shapes.tied,
        "torch_dtype": "bfloat16",
        "vocab_size": shapes.vocabulary,
    }


def make_checkpoint(folder: str, shapes: Shapes, *, layers: int | None = None,
                    size_bytes: int | None = None, embeddings: bool = True,
                    shard_bytes: int = 5 * 10**9, seed: int = 0) -> int:
    """Returns the bytes of the tensors. `folder` must be new or empty.

    `size_bytes` takes as many layers as fit, and at least one.
    """
    if layers is None:
        layers = (shapes.layers if size_bytes is None else
                  layers_that_fit(shapes, size_bytes, embeddings))
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        raise FileExistsError(f"{folder} is not empty")
    tensors = model_tensors(shapes, layers, embeddings)
    shards = shards_of(tensors, shard_bytes)
    weights = Weights(seed)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = (f"model-{number:05}-of-{len(shards):05}.safetensors"
                if len(shards) > 1 else "model.safetensors")
        write_shard(os.path.join(folder, name), shard, weights)
        weight_map.update({tensor.name: name for tensor in shard})
    write_json(os.path.join(folder, "config.json"), config(shapes, layers))
    if len(shards) > 1:
        write_json(os.path.join(folder, "model.safetensors.index.json"), {
            "metadata": {"total_size": sum_bytes(tensors)},
            "weight_map": dict(sorted(weight_map.items()))})
    return sum_bytes(tensors)


def parse_bytes(text: str) -> int:
    digits = text.rstrip("BGKMi")
    unit = text[len(digits):]
    if not digits.isdecimal() or unit not in UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected bytes such as 4GiB or 5GB")
    return int(digits) * UNITS[unit]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", help="must be new or empty")
    parser.add_argument("--size", choices=SIZES, required=True,
                        help="shapes of the Llama 3 model of that size")
    layers = parser.add_mutually_exclusive_group()
    layers.add_argument("--layers", type=int, metavar="N",
                        help="default: as many as that model has")
    layers.add_argument("--bytes", type=parse_bytes, metavar="SIZE",
                        help="as many layers as fit, such as 4GiB; at least 1")
    parser.add_argument("--no-embeddings", action="store_true",
                        help="without embed_tokens and lm_head")
    parser.add_argument("--shard-bytes", type=parse_bytes, default=5 * 10**9,
                        metavar="SIZE", help="default: 5GB")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    arguments = parser.parse_args()
    begin = time.monotonic()
    try:
        size = make_checkpoint(
            arguments.folder, SIZES[arguments.size], layers=arguments.layers,
            size_bytes=arguments.bytes, embeddings=not arguments.no_embeddings,
            shard_bytes=arguments.shard_bytes, seed=arguments.seed)
    except OSError as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - begin
    print(f"{size / 2**20:.0f} MiB of weights in {seconds:.1f} s "
          f"({size / seconds / 1e6:.0f} MB/s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
