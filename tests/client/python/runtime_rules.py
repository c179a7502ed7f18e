"""How vLLM runs a compressed-tensors folder, in numpy: which scales it reads,
which it fuses, and what becomes of the inputs of a layer. Nothing of quantd."""

import json
import os

import numpy as np

DTYPES = {"F32": np.float32, "F16": np.float16, "U8": np.uint8, "I8": np.int8,
          "I32": np.int32, "I64": np.int64, "F8_E4M3": np.uint8}
# Layers that are one matrix product at run time.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def read_tensors(path):
    with open(path, "rb") as file:
        data = file.read()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: np.frombuffer(
        data[start:][slice(*info["data_offsets"])],
        DTYPES[info["dtype"]]).reshape(info["shape"])
        for name, info in header.items()}


def round_float(x, mantissa_bits, smallest_exponent, largest):
    """The nearest float of so many bits, ties to even; those above go to the
    largest."""
    x = np.asarray(x, np.float32)
    _, exponent = np.frexp(x)
    # As integers times the last place: np.round takes ties to even.
    place = np.ldexp(np.float32(1), np.maximum(
        exponent - 1, smallest_exponent) - mantissa_bits).astype(np.float32)
    return np.clip(np.round(x / place) * place, -largest, largest).astype(
        np.float32)


def e4m3(x):
    return round_float(x, 3, -6, 448)


def e2m1(x):
    return round_float(x, 1, 0, 6)


def decode_e4m3(codes):
    codes = codes.astype(np.int32)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6),
                     np.ldexp(1 + mantissa / 8, exponent - 7))
    return np.where(codes & 128, -value, value).astype(np.float32)


def decode_e2m1(packed):
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(
        packed.shape[0], -1)
    table = np.array([0, .5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return np.where(codes & 8, -1, 1).astype(np.float32) * table[codes & 7]


def unpack_words(words, bits, columns):
    values = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    values = values[:, :columns * bits].reshape(len(words), columns, bits)
    return (values * (1 << np.arange(bits))).sum(-1) - (1 << bits - 1)


def spread(scale, shape, block):
    """Scales of blocks, an element each."""
    for axis, size in enumerate(block):
        scale = np.repeat(scale, size or shape[axis], axis)
    return scale[tuple(slice(size) for size in shape)]


def largest(x, group=None):
    """Of each token, or of each group of it."""
    if group is None:
        return np.abs(x).max(-1, keepdims=True)
    blocks = np.abs(x).reshape(*x.shape[:-1], -1, group).max(-1)
    return np.repeat(blocks, group, -1)


def e8m0_for(maximum, largest_exponent):
    """OCP MX: the exponent of the maximum less that of the largest number."""
    _, exponent = np.frexp(maximum)
    return np.ldexp(np.float32(1), exponent - 1 - largest_exponent)


def quantize_inputs(x, arguments, scale=None, zero_point=None,
                    global_scale=None):
    """What the kernel multiplies in the place of x."""
    if arguments is None:
        return x
    x = x.astype(np.float32)
    bits, kind = arguments["num_bits"], arguments["type"]
    strategy = arguments["strategy"]
    if kind == "int":
        half = 1 << bits - 1
        if arguments["dynamic"]:
            scale, zero_point = largest(x) / np.float32(half - 1), None
            scale = np.maximum(scale, np.float32(1e-30))
        shift = 0 if zero_point is None else zero_point.astype(np.float32)
        codes = np.clip(np.round(x / scale) + shift, -half, half - 1)
        return ((codes - shift) * scale).astype(np.float32)
    group = arguments.get("group_size")
    if strategy == "tensor_group":
        block = e4m3(largest(x, group) / 6 * global_scale)
        step = np.maximum(block / global_scale, np.float32(1e-30))
        return e2m1(x / step) * step
    if arguments.get("scale_dtype") == "torch.uint8":
        small = bits == 4
        step = np.maximum(e8m0_for(largest(x, group), 2 if small else 8),
                          np.float32(2**-126))
        return (e2m1 if small else e4m3)(x / step) * step
    if arguments["dynamic"]:
        scale = np.maximum(largest(x, group) / np.float32(448),
                           np.float32(1e-30))
    return e4m3(x / scale) * scale


class Folder:
    """A model as vLLM loads it."""

    def __init__(self, path, fuses=True):
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            self.config = json.load(file)["quantization_config"]
        self.tensors = read_tensors(os.path.join(path, "model.safetensors"))
        self._groups = {target: group
                        for group in self.config["config_groups"].values()
                        for target in group["targets"]}
        self._fuses = fuses
        self.weights = {name: tensor for name, tensor in self.tensors.items()
                        if name.rpartition(".")[0] not in self._groups or
                        name.endswith(".bias")}
        for module in self._groups:
            self.weights[module + ".weight"] = self._weight(module)

    def _part(self, module, suffix):
        return self.tensors.get(f"{module}.{suffix}")

    def _members(self, module):
        """The layers that are fused with one, and itself."""
        prefix, _, name = module.rpartition(".")
        for names in FUSED:
            if self._fuses and name in names:
                return [f"{prefix}.{other}" for other in names
                        if f"{prefix}.{other}" in self._groups]
        return [module]

    def _fused(self, module, suffix):
        """The largest that the fused layers have."""
        return np.max([self._part(member, suffix)
                       for member in self._members(module)])

    def _weight(self, module):
        group = self._groups[module]
        arguments, layout = group["weights"], group["format"]
        scale = self._part(module, "weight_scale")
        zero = self._part(module, "weight_zero_point")
        assert arguments["symmetric"] == (zero is None)
        assert not arguments["dynamic"]
        if layout in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
            codes = decode_e2m1(self._part(module, "weight_packed"))
        elif layout == "pack-quantized":
            shape = self._part(module, "weight_shape")
            codes = unpack_words(self._part(module, "weight_packed"),
                                 arguments["num_bits"], shape[1])
        elif layout in ("float-quantized", "mxfp8-quantized"):
            codes = decode_e4m3(self._part(module, "weight"))
        else:
            assert layout == "int-quantized"
            codes = self._part(module, "weight")
        if layout == "nvfp4-pack-quantized":
            scale = decode_e4m3(scale) / self._fused(
                module, "weight_global_scale")
        elif scale.dtype == np.uint8:
            scale = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
        strategy = arguments["strategy"]
        if strategy == "tensor":
            # One scale for the fused matrix: all is rounded again to it.
            fused = self._fused(module, "weight_scale")
            reals = codes.astype(np.float32) * scale.reshape(())
            if len(self._members(module)) > 1 and layout == "float-quantized":
                reals = e4m3(reals / fused) * fused
            return reals.astype(np.float32)
        block = {"channel": [1] + [0] * (codes.ndim - 1),
                 "group": [1, arguments.get("group_size")],
                 "tensor_group": [1, arguments.get("group_size")],
                 "block": arguments.get("block_structure")}[strategy]
        if zero is not None:
            assert layout == "pack-quantized"
            # Along the rows.
            zeros = unpack_words(np.ascontiguousarray(zero.T),
                                 arguments["num_bits"], len(codes)).T
            codes = codes - spread(zeros, codes.shape, block)
        return (codes * spread(scale, codes.shape, block)).astype(np.float32)

    def inputs(self, module, x):
        """What the layer multiplies in the place of its inputs."""
        group = self._groups.get(module)
        arguments = group and group["input_activations"]
        if not arguments:
            return x
        scales = {}
        if arguments["dynamic"] == "local":
            # Stored inverted, as those of weights.
            scales["global_scale"] = self._fused(module, "input_global_scale")
        elif not arguments["dynamic"]:
            scales["scale"] = self._fused(module, "input_scale")
            if not arguments["symmetric"]:
                scales["zero_point"] = self._part(module, "input_zero_point")
        return quantize_inputs(x, arguments, **scales)


def layer_norm(x, weight, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean)**2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * weight + bias


def erf(x):
    """Within 1.5e-7, by Abramowitz and Stegun 7.1.26."""
    t = 1 / (1 + .3275911 * np.abs(x))
    series = (((((1.061405429 * t - 1.453152027) * t) + 1.421413741) * t -
               .284496736) * t + .254829592) * t
    return np.sign(x) * (1 - series * np.exp(-x * x))


def language_model(weights, ids, inputs, factors=lambda _, a, b: (a, b)):
    """[batch, time] bytes to logits; `inputs(module, x)` is what a linear layer
    multiplies in the place of x, `factors(module, a, b)` what the products of
    attention take in the place of theirs."""
    def linear(module, x):
        return inputs(module, x) @ weights[module + ".weight"].T

    batch, time = ids.shape
    x = weights["embed.weight"][ids] + weights["positions.weight"][:time]
    width, heads = x.shape[-1], 4
    mask = np.triu(np.full((time, time), -1e9, np.float32), 1)
    for layer in range(3):
        prefix = f"layers.{layer}."
        norm = layer_norm(x, weights[prefix + "attention_norm.weight"],
                          weights[prefix + "attention_norm.bias"])
        q, k, v = (linear(f"{prefix}attention.{name}_proj", norm).reshape(
            batch, time, heads, -1).transpose(0, 2, 1, 3) for name in "qkv")
        q, k = factors(prefix + "attention.scores", q,
                       k.transpose(0, 1, 3, 2))
        scores = q @ k / np.sqrt(width // heads) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        scores, v = factors(prefix + "attention.mix", scores, v)
        x = x + linear(prefix + "attention.o_proj", (scores @ v).transpose(
            0, 2, 1, 3).reshape(batch, time, width))
        norm = layer_norm(x, weights[prefix + "mlp_norm.weight"],
                          weights[prefix + "mlp_norm.bias"])
        up = linear(prefix + "mlp.up_proj", norm)
        x = x + linear(prefix + "mlp.down_proj", (
            up * .5 * (1 + erf(up / np.sqrt(2)))).astype(np.float32))
    return linear("head", layer_norm(x, weights["norm.weight"],
                                     weights["norm.bias"]))


def bits_per_byte(weights, sequences, inputs):
    total = 0.
    for batch in np.array_split(sequences, -(-len(sequences) // 32)):
        logits = language_model(weights, batch[:, :-1], inputs).astype(
            np.float64)
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        total -= np.take_along_axis(
            logits, batch[:, 1:, None].astype(np.int64), -1).sum()
    return total / sequences[:, 1:].size / np.log(2)


def digits(weights, images, inputs):
    """The classifier of tests/data/digits-cnn."""
    def conv(module, x):
        padded = np.pad(inputs(module, x), ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(
            padded, (3, 3), axis=(2, 3))
        return np.einsum("nchwij,ocij->nohw", windows,
                         weights[module + ".weight"], optimize=True) + (
                             weights[module + ".bias"][:, None, None])

    def linear(module, x):
        return inputs(module, x) @ weights[module + ".weight"].T + (
            weights[module + ".bias"])

    x = np.maximum(conv("conv1", images), 0)
    x = np.maximum(conv("conv2", x), 0)
    x = x.reshape(len(x), 64, 4, 2, 4, 2).max((3, 5)).reshape(len(x), -1)
    return linear("fc2", np.maximum(linear("fc1", x), 0))
