"""GGUF: what quantctl and quantd.load read is what ggml makes of the same
blocks, bit for bit. ggml is the library of the npm package @node-llama-cpp/linux-x64,
which tests/run installs in build/node; what takes it is skipped without."""

import ctypes
import os
import struct
import subprocess

import numpy as np
import pytest

import package
import quantd
from quantd import _gguf

LIBRARY = os.path.join(package.ROOT, "build/node/node_modules",
                       "@node-llama-cpp/linux-x64/bins/linux-x64",
                       "libggml-base.so")
BLOCKS = 1000
# Where blocks have float16 scales, if not at their beginning.
HALVES = {"q4_1": (0, 2), "q5_1": (0, 2), "q8_1": (0, 2), "q2_K": (80, 82),
          "q3_K": (108,), "q4_K": (0, 2), "q5_K": (0, 2), "q6_K": (208,),
          "tq1_0": (52,), "tq2_0": (64,), "q8_K": (), "iq1_m": (), "mxfp4": (),
          "nvfp4": ()}
# 0, -0, the smallest and largest subnormal, 1, the largest, infinities, NaN.
SPECIAL = (0x0000, 0x8000, 0x0001, 0x83FF, 0x3C00, 0x7BFF, 0x7C00, 0xFC00,
           0x7E00, 0xFE01, 0x7D23)
BLOCK_TYPES = {number: kind for number, kind in _gguf.TYPES.items()
               if kind.decode_blocks is not None}


@pytest.fixture(name="ggml", scope="module")
def fixture_ggml():
    if not os.path.exists(LIBRARY):
        pytest.skip(f"there is no {LIBRARY}; tests/run installs it")
    library = ctypes.CDLL(LIBRARY)
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_blck_size.restype = ctypes.c_int64
    return library


@pytest.fixture(name="quantctl", scope="module")
def fixture_quantctl(request, server):
    def run(*command, code=0):
        result = subprocess.run(
            [request.config.getoption("--quantctl"), *map(str, command)],
            env={**os.environ, "QUANTD_SERVER": server.address},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False)
        assert result.returncode == code, result.stdout
        return result.stdout
    return run


def text(word):
    word = word.encode()
    return struct.pack("<Q", len(word)) + word


def write_gguf(path, tensors, pairs=(), alignment=32):
    """tensors: of (name, number of the type, shape, bytes); pairs: of (key,
    number of the type, bytes)."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    header += b"".join(text(key) + struct.pack("<I", kind) + value
                       for key, kind, value in pairs)
    data = b""
    for name, number, shape, payload in tensors:
        header += text(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, len(data))
        data += payload + bytes(-len(payload) % alignment)
    path.write_bytes(header + bytes(-len(header) % alignment) + data)


def random_blocks(number, count=BLOCKS):
    """Any bits, and the special scales in some blocks."""
    kind = _gguf.TYPES[number]
    blocks = np.random.default_rng(number).integers(
        0, 256, (count, kind.block_bytes), np.uint8)
    blocks[0], blocks[1] = 0, 255
    for n, half in enumerate(SPECIAL):
        for offset in HALVES.get(kind.name, (0,)):
            blocks[2 + n, offset:offset + 2] = np.frombuffer(
                struct.pack("<H", half), np.uint8)
        if kind.name == "iq1_m":
            for digit in range(4):
                blocks[2 + n, 49 + 2 * digit] = (half >> 4 * digit & 15) << 4
    if kind.name in ("mxfp4", "nvfp4"):
        blocks[:256, 0] = np.arange(256)
    return blocks


def finite_blocks(number, count, seed=1):
    """Blocks whose scales are float16 between 0.001 and 0.01."""
    kind = _gguf.TYPES[number]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, kind.block_bytes), np.uint8)
    for offset in HALVES.get(kind.name, (0,)):
        blocks[:, offset:offset + 2] = rng.uniform(0.001, 0.01, count).astype(
            "<f2").view(np.uint8).reshape(-1, 2)
    return blocks


def ggml_decodes(ggml, number, blocks):
    kind = _gguf.TYPES[number]
    reals = np.full(len(blocks) * kind.block_elements, 7, np.float32)
    getattr(ggml, f"dequantize_row_{kind.name}")(
        np.ascontiguousarray(blocks).ctypes.data_as(ctypes.c_void_p),
        reals.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(reals.size))
    return reals


def bits(reals):
    """All NaN are alike: the compiler chooses which of two comes through."""
    found = np.asarray(reals, np.float32).ravel().copy()
    found[np.isnan(found)] = np.nan
    return found.view(np.uint32)


def test_EveryTypeOfGgmlIsKnown(ggml):
    for number in range(43):
        name = ggml.ggml_type_name(number).decode()
        size = ggml.ggml_type_size(number)
        if size == 0:  # No type any more.
            assert number not in _gguf.TYPES
            continue
        kind = _gguf.TYPES[number]
        assert (kind.name, kind.block_elements, kind.block_bytes) == (
            name, ggml.ggml_blck_size(number), size)
        # q8_1 is for activations: ggml cannot decode it.
        assert (kind.decode_blocks is not None) == (
            name == "q8_1" or hasattr(ggml, f"dequantize_row_{name}"))


def test_BlocksDecodeToTheBitsOfGgml(ggml, quantctl, tmp_path):
    tensors = {}
    for number, kind in BLOCK_TYPES.items():
        if kind.name != "q8_1":
            tensors[kind.name] = number, random_blocks(number)
    path, restored = tmp_path / "x.gguf", tmp_path / "x.safetensors"
    write_gguf(path, [
        (name, number, (10, BLOCKS // 10 * BLOCK_TYPES[number].block_elements),
         blocks.tobytes()) for name, (number, blocks) in tensors.items()])
    quantctl("dequantize", path, "-o", restored)
    of_quantctl, of_python = quantd.load(restored), quantd.load(path)
    assert len(of_quantctl) == len(of_python) == len(tensors) == 26
    for name, (number, blocks) in tensors.items():
        expected = bits(ggml_decodes(ggml, number, blocks))
        for found in (of_quantctl[name], of_python[name]):
            assert found.dtype == np.float32
            assert found.shape == (
                10, BLOCKS // 10 * BLOCK_TYPES[number].block_elements)
            np.testing.assert_array_equal(bits(found), expected, name)


def test_PlainTypesComeThrough(quantctl, tmp_path):
    path, restored = tmp_path / "x.gguf", tmp_path / "x.safetensors"
    plain = [(kind.name, number, (3, 4), np.random.default_rng(number).bytes(
        12 * kind.block_bytes)) for number, kind in _gguf.TYPES.items()
             if kind.decode_blocks is None]
    assert len(plain) == 8
    write_gguf(path, plain)
    quantctl("dequantize", path, "-o", restored)
    for file in (quantd.load(path), quantd.load(restored)):
        for name, number, shape, payload in plain:
            assert file.info(name).dtype == _gguf.TYPES[number].dtype
            assert file[name].shape == shape
            assert file[name].tobytes() == payload


def test_Q8_1IsReadWithoutItsSum(quantctl, tmp_path):
    blocks = finite_blocks(9, 4)
    path, restored = tmp_path / "x.gguf", tmp_path / "x.npy"
    write_gguf(path, [("w", 9, (4, 32), blocks.tobytes())])
    quantctl("dequantize", path, "-o", restored)
    expected = blocks[:, 4:].view(np.int8) * blocks[:, :2].copy().view(
        "<f2").astype(np.float32)
    np.testing.assert_array_equal(np.load(restored), expected)
    np.testing.assert_array_equal(quantd.load(path)["w"], expected)


# Of types that are wide and narrow in memory, in an order that is not that of
# safetensors.
def write_mixed(path):
    rng = np.random.default_rng(2)
    tensors = [("norm.bias", 1, (64,), rng.standard_normal(64).astype("<f2")),
               ("blk.0.weight", 12, (6, 512), finite_blocks(12, 12)),
               ("norm.weight", 0, (64,), rng.standard_normal(64).astype("<f4")),
               ("blk.1.weight", 14, (4, 256), finite_blocks(14, 4)),
               ("positions", 28, (5,), rng.standard_normal(5)),
               ("blk.2.weight", 8, (8, 96), finite_blocks(8, 24))]
    write_gguf(path, [(name, number, shape, data.tobytes())
                      for name, number, shape, data in tensors])


def test_BlocksAreQuantizedOnlyWhenAskedTo(client, quantctl, tmp_path):
    path, restored = tmp_path / "x.gguf", tmp_path / "x.safetensors"
    twice, once = tmp_path / "twice.safetensors", tmp_path / "once.safetensors"
    write_mixed(path)
    spec = "--spec", "int8:group:32", "--no-store"
    refused = quantctl("quantize", path, "-o", once, *spec, code=4)
    assert '"blk.0.weight" is quantized already, to q4_K' in refused
    assert "--requantize" in refused
    assert not once.exists()

    quantctl("dequantize", path, "-o", restored)
    quantctl("quantize", restored, "-o", twice, *spec)
    quantctl("quantize", path, "-o", once, "--requantize", *spec)
    assert once.read_bytes() == twice.read_bytes()
    of_python = tmp_path / "python.safetensors"
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.quantize_model(path, of_python, "int8:group:32", client=client)
    assert caught.value.reason == "FILE_UNSUPPORTED"
    assert "requantize=True" in str(caught.value)
    quantd.quantize_model(path, of_python, "int8:group:32", client=client,
                          requantize=True)
    assert of_python.read_bytes() == once.read_bytes()
    # A file is its own reference, before and after.
    for file, reference in ((path, restored), (restored, path)):
        assert "inf" in quantctl("evaluate", file, "--reference", reference)


def test_AnUnknownTypeIsLeftOutOnlyWhenAskedTo(quantctl, tmp_path):
    path, restored = tmp_path / "x.gguf", tmp_path / "x.safetensors"
    write_gguf(path, [("old", 4, (2, 32), bytes(40)),
                      ("new", 2, (2, 32), finite_blocks(2, 2).tobytes())])
    said = quantctl("dequantize", path, "-o", restored, code=4)
    assert '"old" is of GGUF type 4' in said and "--keep-going" in said
    assert not restored.exists()
    quantctl("dequantize", path, "-o", restored, "--keep-going")
    assert list(quantd.load(restored)) == ["new"]
    assert quantd.load(path).unread == ["old"]


def test_PartsOfBlocksAreRefused(quantctl, tmp_path):
    path = tmp_path / "x.gguf"
    for number, kind in BLOCK_TYPES.items():
        half = kind.block_elements // 2
        write_gguf(path, [("w", number, (2, half), bytes(kind.block_bytes))])
        with pytest.raises(quantd.QuantdError) as caught:
            quantd.load(path)
        assert caught.value.reason == "FILE_MALFORMED"
        assert f"blocks of {kind.block_elements}" in str(caught.value)
    said = quantctl("dequantize", path, "-o", tmp_path / "x.npy", code=4)
    assert "blocks of" in said
    # Without elements, and yet too large.
    write_gguf(path, [("w", 8, (0, 1 << 62), b"")])
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.load(path)
    assert "63 bits" in str(caught.value)
    assert "63 bits" in quantctl("dequantize", path, "-o", tmp_path / "x.npy",
                                 code=4)
