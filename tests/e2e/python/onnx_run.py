"""Runs ONNX models: by ONNX Runtime for Node, and by numpy, operator for
operator. Nothing of quantd."""

import json
import os
import subprocess

import numpy as np

NODE_RUNNER = r"""
import { createRequire } from "node:module";
import { readFileSync, writeFileSync } from "node:fs";
const [modules, model, input, type, shape, output, level] =
    process.argv.slice(2);
const ort = createRequire(modules + "/x.js")("onnxruntime-node");
const session = await ort.InferenceSession.create(
    model, {graphOptimizationLevel: level, intraOpNumThreads: 1});
const bytes = readFileSync(input);
const buffer = bytes.buffer.slice(bytes.byteOffset,
                                  bytes.byteOffset + bytes.length);
const data = type == "int64" ? new BigInt64Array(buffer)
                             : new Float32Array(buffer);
const feeds = {[session.inputNames[0]]:
                   new ort.Tensor(type, data, JSON.parse(shape))};
const results = await session.run(feeds);
const all = {};
for (const [name, tensor] of Object.entries(results)) {
  all[name] = {dims: tensor.dims, data: Array.from(tensor.data)};
}
writeFileSync(output, JSON.stringify(all));
"""
TIMEOUT_S = 300


def has_runtime(modules):
    return os.path.isdir(os.path.join(modules,
                                      "node_modules/onnxruntime-node"))


def exact_levels():
    """Levels of optimization at which ONNX Runtime's sums are exact but for
    their order. With "all" it multiplies in integers; on x86 without VNNI the
    sums of two products saturate at 16 bits then, as its documentation says."""
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        return ("disabled", "all") if "vnni" in file.read() else ("disabled",)


def run_in_runtime(modules, model, values, folder, level="all"):
    """The outputs of a model of one input, float32 or int64."""
    def path(name):
        return os.path.join(folder, name)

    values.tofile(path("input"))
    with open(path("run.mjs"), "w", encoding="utf-8") as file:
        file.write(NODE_RUNNER)
    subprocess.run(
        ["node", path("run.mjs"), modules, model, path("input"),
         values.dtype.name, json.dumps(values.shape), path("results"), level],
        check=True, timeout=TIMEOUT_S)
    with open(path("results"), encoding="utf-8") as file:
        return {name: np.array(value["data"], np.float32).reshape(
            value["dims"]) for name, value in json.load(file).items()}


def _floats(layout, count):
    """The values of all codes of a float without infinities."""
    exponent_bits, mantissa_bits, bias, has_nan = layout
    codes = np.arange(count)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = codes & (1 << mantissa_bits) - 1
    value = np.where(
        exponent == 0, np.ldexp(mantissa / (1 << mantissa_bits), 1 - bias),
        np.ldexp(1 + mantissa / (1 << mantissa_bits), exponent - bias))
    if has_nan:
        value[codes & count // 2 - 1 == count // 2 - 1] = np.nan
    return np.where(codes & count // 2, -value, value).astype(np.float32)


_E4M3 = _floats((4, 3, 7, True), 256)
_E2M1 = _floats((2, 1, 1, False), 16)
# Those that numpy has, by the number of TensorProto.DataType.
_PLAIN = {1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16,
          6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16,
          11: np.float64}
_UINT4, _INT4, _FLOAT4 = 21, 22, 23
_FLOAT8 = 17


def array_of(tensor):
    """An initializer's values; floats that numpy lacks are float32."""
    shape = list(tensor.dims)
    kind = tensor.data_type
    if kind in _PLAIN and not tensor.HasField("raw_data"):
        values = next(field for field in (
            tensor.float_data, tensor.int32_data, tensor.int64_data,
            tensor.double_data, [0.] * int(np.prod(shape))) if field or
                      not np.prod(shape))
        return np.array(values, _PLAIN[kind]).reshape(shape)
    raw = np.frombuffer(tensor.raw_data, np.uint8)
    if kind in _PLAIN:
        return raw.view(_PLAIN[kind]).reshape(shape)
    if kind == _FLOAT8:
        return _E4M3[raw].reshape(shape)
    codes = np.stack([raw & 15, raw >> 4], -1).ravel()[:int(np.prod(shape))]
    codes = codes.reshape(shape)
    if kind == _FLOAT4:
        return _E2M1[codes]
    assert kind in (_UINT4, _INT4), kind
    return codes if kind == _UINT4 else ((codes ^ 8).astype(np.int8) - 8)


def _spread(scale, shape, axis, block):
    """Scales, or zero points, an element each."""
    if scale.size == 1:
        return scale.reshape([1] * len(shape))
    if not block:
        return scale.reshape([-1 if d == axis % len(shape) else 1
                              for d in range(len(shape))])
    return np.repeat(scale, block, axis).take(range(shape[axis]), axis)


def _quantize(x, scale, zero, axis=1, block_size=0, saturate=1):
    assert saturate
    limits = np.iinfo(zero.dtype)
    codes = np.rint(x / _spread(scale, x.shape, axis, block_size))
    codes += _spread(zero, x.shape, axis, block_size).astype(np.float32)
    return np.clip(codes, limits.min, limits.max).astype(zero.dtype)


def _dequantize(x, scale, zero=None, axis=1, block_size=0):
    """Codes of floats are their values here."""
    codes = x.astype(np.float64)
    if zero is not None:
        codes -= _spread(zero, x.shape, axis, block_size)
    assert scale.dtype == np.float32
    return (codes.astype(np.float32) *
            _spread(scale, x.shape, axis, block_size))


def _erf(x):
    """Within 1.5e-7, by Abramowitz and Stegun 7.1.26."""
    t = 1 / (1 + .3275911 * np.abs(x))
    series = (((((1.061405429 * t - 1.453152027) * t) + 1.421413741) * t -
               .284496736) * t + .254829592) * t
    return (np.sign(x) * (1 - series * np.exp(-x * x))).astype(x.dtype)


def _softmax(x, axis=-1):
    x = np.exp(x - x.max(axis, keepdims=True))
    return x / x.sum(axis, keepdims=True)


def _gemm(a, b, c=0., alpha=1., beta=1., transA=0, transB=0):
    return np.float32(alpha) * ((a.T if transA else a) @
                                (b.T if transB else b)) + np.float32(beta) * c


def _reshape(x, shape, allowzero=0):
    assert not allowzero
    return x.reshape([x.shape[d] if size == 0 else size
                      for d, size in enumerate(shape)])


def _slice(x, starts, ends, axes=None, steps=None):
    index = [slice(None)] * x.ndim
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for start, end, axis, step in zip(starts, ends, axes, steps):
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def _conv(x, weight, bias=0., pads=(0, 0, 0, 0), **unused):
    del unused
    padded = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]),
                        (pads[1], pads[3])))
    windows = np.lib.stride_tricks.sliding_window_view(
        padded, weight.shape[2:], axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, weight,
                     optimize=True) + np.reshape(bias, (-1, 1, 1))


def _layer_norm(x, weight, bias=0., axis=-1, epsilon=1e-5):
    axes = tuple(range(axis % x.ndim, x.ndim))
    x = x - x.mean(axes, keepdims=True)
    deviation = np.sqrt((x * x).mean(axes, keepdims=True) + np.float32(epsilon))
    return x / deviation * weight + bias


def _cast(x, to):
    return x.astype(_PLAIN[to])


_OPERATORS = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply,
    "Div": lambda a, b: a // b if a.dtype.kind == "i" else a / b,
    "Pow": lambda a, b: np.power(a, b).astype(a.dtype), "Sqrt": np.sqrt,
    "Erf": _erf, "MatMul": np.matmul, "Gemm": _gemm, "Conv": _conv,
    "LayerNormalization": _layer_norm,
    "Relu": lambda x: np.maximum(x, 0), "Identity": lambda x: x,
    "Gather": lambda x, at, axis=0: np.take(x, at, axis),
    "Reshape": _reshape, "Softmax": _softmax, "Cast": _cast,
    "Transpose": lambda x, perm=None: x.transpose(perm),
    "ReduceMean": lambda x, axes, keepdims=1: x.mean(
        tuple(axes), keepdims=bool(keepdims)),
    "Shape": lambda x: np.array(x.shape, np.int64),
    "Concat": lambda *parts, axis: np.concatenate(parts, axis),
    "Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(axes)),
    "Slice": _slice, "Flatten": lambda x, axis=1: x.reshape(
        int(np.prod(x.shape[:axis])), -1),
    "QuantizeLinear": _quantize, "DequantizeLinear": _dequantize}


def _value_of(attribute):
    """Of an int, a float, a tensor or ints."""
    return {1: lambda: attribute.f, 2: lambda: attribute.i,
            4: lambda: array_of(attribute.t),
            7: lambda: list(attribute.ints)}[attribute.type]()


def run_in_numpy(model, feeds, seen=None):
    """All values of a model, by their names. Nodes go on from what was `seen`
    elsewhere of a value in place of what was computed."""
    seen = seen or {}
    values = dict(feeds)
    for tensor in model.graph.initializer:
        values[tensor.name] = array_of(tensor)
    for node in model.graph.node:
        attributes = {attribute.name: _value_of(attribute)
                      for attribute in node.attribute}
        if node.op_type == "Constant":
            values[node.output[0]] = attributes["value"]
            continue
        inputs = [seen.get(name, values[name]) if name else None
                  for name in node.input]
        values[node.output[0]] = _OPERATORS[node.op_type](*inputs,
                                                          **attributes)
    return values
