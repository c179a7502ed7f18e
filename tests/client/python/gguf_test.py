"""GGUF: what quantctl and quantd.load read is what ggml makes of the same
blocks, bit for bit. ggml is the library of the npm package @node-llama-cpp/linux-x64,
which tests/run installs in build/node; what takes it is skipped without."""

import ctypes
import json
import os
import re
import struct
import subprocess
import warnings

import numpy as np
import pytest

import ggml_encoders
import package
import quantd
import requantizing
from quantd import _files, _gguf, imatrix

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
    word = word.encode(errors="surrogateescape")
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
    tensors = [("half.weight", 1, (2, 32),
                rng.standard_normal((2, 32)).astype("<f2")),
               ("blk.0.weight", 12, (6, 512), finite_blocks(12, 12)),
               ("norm.weight", 0, (64,), rng.standard_normal(64).astype("<f4")),
               ("blk.1.weight", 14, (4, 256), finite_blocks(14, 4)),
               ("positions", 28, (5,), rng.standard_normal(5)),
               ("blk.2.weight", 8, (8, 96), finite_blocks(8, 24))]
    write_gguf(path, [(name, number, shape, data.tobytes())
                      for name, number, shape, data in tensors])


def test_BlocksAreQuantizedOnlyWhenAskedTo(quantctl, tmp_path):
    path, restored = tmp_path / "x.gguf", tmp_path / "floats.safetensors"
    write_mixed(path)
    refused = requantizing.check_file(path, tmp_path, quantctl)
    assert '"blk.0.weight" is quantized already, to q4_K' in refused
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
    said = quantctl("dequantize", path, "-o", restored, "--keep-going", code=1)
    assert "tensor old: left out: its type is none" in said
    assert re.search(r"^old +\[2,32\] +- +left out", said, re.MULTILINE)
    assert list(quantd.load(restored)) == ["new"]
    assert quantd.load(path).unread == ["old"]
    said = quantctl("dequantize", path, "-o", restored, "--keep-going",
                    "--force", "--json", code=1)
    assert "tensor old: left out" in said
    old, new = json.loads(said[said.index("{"):said.rindex("}") + 1])["tensors"]
    assert (old["name"], old["dtype"], old["from"]) == ("old", None, "left out")
    assert (new["name"], new["dtype"], new["from"]) == ("new", "F32", "q4_0")

    # A .npy would be left without its only tensor.
    write_gguf(path, [("old", 4, (2, 32), bytes(40))])
    single = tmp_path / "x.npy"
    said = quantctl("dequantize", path, "-o", single, "--keep-going", code=4)
    assert '"old" is of GGUF type 4' in said and "--keep-going" not in said
    assert not single.exists()


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


def test_TensorsThatOverlapAreRefused(quantctl, tmp_path):
    path, restored = tmp_path / "x.gguf", tmp_path / "x.safetensors"
    blocks = finite_blocks(2, 40).tobytes()  # 720 bytes
    names = [f"w{n}" for n in range(1000)]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(names), 0)
    for n, name in enumerate(names):
        header += text(name) + struct.pack("<IQQIQ", 2, 64, 20, 2, n % 2 * 704)
    path.write_bytes(header + bytes(-len(header) % 32) + 2 * blocks)
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.load(path)
    assert caught.value.reason == "FILE_MALFORMED"
    assert "overlap" in str(caught.value)
    assert "overlap" in quantctl("dequantize", path, "-o", restored, code=4)
    assert not restored.exists()
    # Those without elements, and one behind the other.
    tensors = [("e", 0, (0, 4), b""), ("a", 2, (20, 64), blocks),
               ("f", 0, (0,), b""), ("b", 2, (20, 64), blocks)]
    write_gguf(path, tensors)
    assert list(quantd.load(path)) == ["e", "a", "f", "b"]


def test_TheAlignmentIsAPowerOfTwo(quantctl, tmp_path):
    path, restored = tmp_path / "x.gguf", tmp_path / "x.safetensors"
    weight = np.ones((2, 3), np.float32)

    def write(*alignments):
        write_gguf(path, [("w", 0, weight.shape, weight.tobytes())],
                   [("general.alignment", 4, struct.pack("<I", alignment))
                    for alignment in alignments],
                   min(1 << 20, max(alignments) or 1))
    for alignment in (8, 64, 1 << 20):
        write(alignment)
        np.testing.assert_array_equal(quantd.load(path)["w"], weight)
        quantctl("dequantize", path, "-o", restored, "--force")
    for alignments in ((0,), (4,), (24,), (1 << 21,), (1 << 31,), (64, 64)):
        write(*alignments)
        with pytest.raises(quantd.QuantdError) as caught:
            quantd.load(path)
        assert caught.value.reason == "FILE_MALFORMED"
        assert "general.alignment" in str(caught.value)
        assert "general.alignment" in quantctl(
            "dequantize", path, "-o", restored, "--force", code=4)


def test_NamesThatAreNotUtf8AreReplaced(quantctl, tmp_path):
    path, target = tmp_path / "x.gguf", tmp_path / "llm"
    weight = np.ones((4, 64), np.float32)
    write_gguf(path, [("\udcff\udcfe.weight", 0, (4, 64), weight.tobytes())])
    quantctl("quantize", path, "-o", target, "--no-store", "--layout",
             "compressed-tensors", "--spec", "int4:group:32")
    (name,) = quantd.load(target)
    assert name == "\ufffd\ufffd.weight"
    np.testing.assert_allclose(
        np.asarray(quantd.load(target)[name].dequantize()), weight, 0.1)


# Names of tensors, and what becomes of them.
WRITTEN = {"q8.weight": ("int8:group:32:scale=float16", "q8_0"),
           "q50.weight": ("int5:group:32:scale=float16", "q5_0"),
           "q51.weight": ("uint5:group:32:scale=float16", "q5_1"),
           "q40.weight": ("int4:group:32:scale=float16:mse", "q4_0"),
           "q41.weight": ("uint4:group:32:scale=float16", "q4_1"),
           "q41.exact": ("uint4:group:32:scale=float16:power-of-two", "q4_1"),
           "mx.weight": ("mxfp4_e2m1", "mxfp4")}
PAIRS = [("general.architecture", 8, text("llama")),
         ("general.alignment", 4, struct.pack("<I", 64)),
         ("general.file_type", 4, struct.pack("<I", 1)),
         ("llama.rope.freq_base", 6, struct.pack("<f", 1e4)),
         ("tokenizer.ggml.tokens", 9,
          struct.pack("<IQ", 8, 2) + text("<s>") + text("\u2581a"))]
# Of a model in one file; they are not written.
SPLIT = [("split.no", 2, struct.pack("<H", 0)),
         ("split.count", 2, struct.pack("<H", 1)),
         ("split.tensors.count", 5, struct.pack("<i", 99))]


def write_plain(path):
    rng = np.random.default_rng(4)
    weights = {name: (0, rng.standard_normal((6, 96)).astype("<f4"))
               for name in WRITTEN}
    others = {"norm.weight": (0, rng.standard_normal(64).astype("<f4")),
              "half.weight": (1, rng.standard_normal((3, 5)).astype("<f2")),
              "ids": (26, np.arange(7, dtype="<i4")),
              "double": (28, rng.standard_normal((1, 2, 3, 4)))}
    tensors = {**weights, **others}
    write_gguf(path, [(name, number, data.shape, data.tobytes())
                      for name, (number, data) in tensors.items()],
               PAIRS + SPLIT, alignment=64)
    return others


def test_AFileOfSeveralIsNoModel(client, quantctl, tmp_path):
    path, out = tmp_path / "m-00002-of-00003.gguf", tmp_path / "x.safetensors"
    rows = np.ones((4, 32), "<f4")
    write_gguf(path, [("w", 0, rows.shape, rows.tobytes())], [
        ("split.no", 2, struct.pack("<H", 1)),
        ("split.count", 2, struct.pack("<H", 3)),
        ("general.name", 8, text("big"))])
    for command in (("dequantize", path, "-o", out), ("sweep", path, "--spec",
                                                      "int8"),
                    ("quantize", path, "-o", out, "--no-store", "--spec",
                     "int8"), ("evaluate", path, "--spec", "int8"),
                    ("calibrate", path, "--model", "m"),
                    ("import", path, "--model", "m")):
        said = quantctl(*command, code=4)
        assert "got file 2 of 3" in said, command
    assert not out.exists()
    for call in (lambda: quantd.load(path), lambda: quantd.quantize_model(
            path, out, "int8", client=client)):
        with pytest.raises(quantd.QuantdError) as caught:
            call()
        assert caught.value.reason == "FILE_UNSUPPORTED"
        assert "got file 2 of 3" in str(caught.value)
    # Its metadata are those of the model.
    quantd.save(tmp_path / "y.gguf", {"w": rows}, gguf_metadata=path)
    assert b"general.name" in dict(
        _files.open_gguf(str(tmp_path / "y.gguf")).pairs)


def test_AKeyMayNotOccurTwice(quantctl, tmp_path):
    path = tmp_path / "x.gguf"
    write_gguf(path, [], [("a", 4, bytes(4)), ("a", 4, bytes(4))])
    assert "occurs twice" in quantctl("dequantize", path, "-o",
                                      tmp_path / "x.safetensors", code=4)
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.load(path)
    assert caught.value.reason == "FILE_MALFORMED"


def specs():
    return [word for name, (spec, _) in WRITTEN.items()
            for word in ("--spec", f"{name}={spec}")]


class GgufParameters(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]


def ggml_reads(ggml, path):
    """The tensors of a file, (type's name, bytes), and its keys; by ggml."""
    for name in ("gguf_init_from_file", "ggml_get_tensor", "ggml_get_data"):
        getattr(ggml, name).restype = ctypes.c_void_p
    for name in ("gguf_get_tensor_name", "gguf_get_key"):
        getattr(ggml, name).restype = ctypes.c_char_p
    for name in ("gguf_get_n_tensors", "gguf_get_n_kv"):
        getattr(ggml, name).restype = ctypes.c_int64
    ggml.ggml_nbytes.restype = ctypes.c_size_t
    context = ctypes.c_void_p()
    file = ctypes.c_void_p(ggml.gguf_init_from_file(
        str(path).encode(),
        GgufParameters(False, ctypes.addressof(context))))
    assert file.value, "ggml does not read the file"
    tensors = {}
    for n in range(ggml.gguf_get_n_tensors(file)):
        name = ggml.gguf_get_tensor_name(file, ctypes.c_int64(n))
        tensor = ctypes.c_void_p(ggml.ggml_get_tensor(context, name))
        kind = ggml.ggml_type_name(ggml.gguf_get_tensor_type(
            file, ctypes.c_int64(n))).decode()
        tensors[name.decode()] = kind, ctypes.string_at(
            ggml.ggml_get_data(tensor), ggml.ggml_nbytes(tensor))
    keys = [ggml.gguf_get_key(file, ctypes.c_int64(n)).decode()
            for n in range(ggml.gguf_get_n_kv(file))]
    found = ggml.gguf_find_key(file, b"general.file_type")
    file_type = ggml.gguf_get_val_u32(file, ctypes.c_int64(found))
    ggml.gguf_free(file)
    ggml.ggml_free(context)
    return tensors, keys, file_type


def test_WhatIsWrittenGgmlReadsToTheSameFloats(ggml, quantctl, tmp_path):
    source, path = tmp_path / "x.gguf", tmp_path / "q.gguf"
    restored, through = tmp_path / "r.safetensors", tmp_path / "t.safetensors"
    others = write_plain(source)
    said = quantctl("quantize", source, "-o", path, "--no-store", *specs())
    assert "2 tensors have minima" in said
    quantctl("dequantize", path, "-o", restored)
    of_quantctl, of_python = quantd.load(restored), quantd.load(path)
    # What quantd's own layout comes to.
    quantctl("quantize", source, "-o", through, "--no-store", *specs())
    encoded = quantd.load(through)

    tensors, keys, file_type = ggml_reads(ggml, path)
    assert keys == ["general.quantization_version", "general.file_type",
                    "general.architecture", "general.alignment",
                    "llama.rope.freq_base", "tokenizer.ggml.tokens"]
    assert file_type in (2, 3, 7, 8, 9, 38)
    assert set(tensors) == set(WRITTEN) | set(others)
    for name, (number, data) in others.items():
        assert tensors[name] == (_gguf.TYPES[number].name, data.tobytes())
    numbers = {kind.name: number for number, kind in _gguf.TYPES.items()}
    for name, (_, kind) in WRITTEN.items():
        found, data = tensors[name]
        assert found == kind
        blocks = np.frombuffer(data, np.uint8).reshape(
            -1, _gguf.TYPES[numbers[kind]].block_bytes)
        expected = ggml_decodes(ggml, numbers[kind], blocks)
        for reals in (of_quantctl[name], of_python[name]):
            np.testing.assert_array_equal(bits(reals), bits(expected))
        own = encoded[name].dequantize().ravel()
        if name in ("q41.weight", "q51.weight"):
            scale = np.repeat(encoded[name].scale.ravel(), 32)
            assert 0 < (abs(own - expected) / scale).max() < 0.01
        else:
            np.testing.assert_array_equal(own, expected)


def test_MetadataComeFromTheInputOrFromAFile(quantctl, tmp_path):
    source, path = tmp_path / "x.gguf", tmp_path / "q.gguf"
    write_plain(source)
    plain = tmp_path / "x.safetensors"
    quantctl("dequantize", source, "-o", plain)
    spec = "--no-store", "--spec", "int8:group:32:scale=float16"
    quantctl("quantize", source, "-o", path, *spec, "--exclude", "h*",
             "--exclude", "d*")
    of_input = path.read_bytes()
    own = [text("general.quantization_version") + struct.pack("<II", 4, 2),
           text("general.file_type") + struct.pack("<II", 4, 7)]
    kept = [text(key) + struct.pack("<I", kind) + value
            for key, kind, value in PAIRS if key != "general.file_type"]
    assert of_input[24:].startswith(b"".join(own + kept))
    assert of_input[16:24] == struct.pack("<Q", 6)

    arguments = ("quantize", plain, "-o", path, "--force", *spec, "--exclude",
                 "h*", "--exclude", "d*")
    assert "gets no metadata" in quantctl(*arguments)
    assert path.read_bytes()[16:].startswith(
        struct.pack("<Q", 2) + b"".join(own))
    assert "gets no metadata" not in quantctl(*arguments, "--metadata", source)
    assert path.read_bytes()[24:].startswith(b"".join(own + kept))
    said = quantctl("quantize", plain, "-o", tmp_path / "x.q.safetensors",
                    "--metadata", source, code=2)
    assert "with a .gguf file as the output" in said


def test_WhatGgufCannotHoldIsRefusedBeforeAnythingIsComputed(
        quantctl, tmp_path):
    source, path = tmp_path / "x.safetensors", tmp_path / "q.gguf"
    quantd.save(source, {"a.weight": np.ones((4, 64), np.float32),
                         "odd.weight": np.ones((4, 33), np.float32),
                         "mask": np.ones(4, np.uint8),
                         "n" * 64: np.ones(4, np.float32)})
    fits = "--spec", "a*=int4:group:32:scale=float16"

    def refused(*arguments, code=1):
        # A server that is not there would be asked for a minute.
        said = quantctl("--server", "127.0.0.1:1", "quantize", source, "-o",
                        path, *arguments, code=code)
        assert not path.exists()
        return said

    said = refused("--spec", "a*=int4:group:32", code=2)
    assert 'a type in GGUF for "a.weight"' in said
    assert "int4:group:32:scale=float16 (q4_0)" in said
    assert "which do not divide" in refused("--spec",
                                            "odd*=int4:group:32:scale=float16")
    said = refused(*fits)
    assert "no type for U8" in said and "at most 63 bytes" in said
    for option in ("--keep-going", "--join"):
        assert option in refused(*fits, option, code=2)


def test_BlocksThatAreNotQuantizedStayAsTheyAre(quantctl, tmp_path):
    source, path = tmp_path / "x.gguf", tmp_path / "q.gguf"
    write_mixed(source)
    quantctl("quantize", source, "-o", path, "--no-store", "--requantize",
             "--spec", "blk.0*=int4:group:32:scale=float16")
    before, after = (_files.open_file(str(file)).tensors
                     for file in (source, path))
    assert list(before) == list(after)
    for name, tensor in before.items():
        same = (after[name].data.read() == tensor.data.read()).all()
        assert same == (name != "blk.0.weight"), name


K_QUANTS = {"q4_K": 12, "q5_K": 13, "q6_K": 14}
# Those that quantctl and quantd.save make without a server.
MADE = {"q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, **K_QUANTS}
# A server that is not there would be asked for a minute.
NOWHERE = "--server", "127.0.0.1:1"


def ggml_quantizes(ggml, number, weights, importance=None):
    """What ggml makes of rows of float32, decoded. importance: of columns."""
    kind = _gguf.TYPES[number]
    blocks = np.zeros((weights.size // kind.block_elements, kind.block_bytes),
                      np.uint8)
    pointers = (array.ctypes.data_as(ctypes.c_void_p)
                for array in (weights, blocks))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    assert ggml.ggml_quantize_chunk(
        number, *pointers, ctypes.c_int64(0), ctypes.c_int64(len(weights)),
        ctypes.c_int64(weights.shape[1]), None if importance is None else
        importance.ctypes.data_as(ctypes.c_void_p)) == blocks.nbytes
    return ggml_decodes(ggml, number, blocks).reshape(weights.shape)


def sqnr_db(weights, restored):
    weights = weights.astype(float)
    return 10 * np.log10(np.sum(weights ** 2) /
                         np.sum((weights - restored) ** 2))


def weights_of_k_quants():
    """Numbers of a normal distribution, and the weights of a network, in rows
    of whole blocks."""
    rng = np.random.default_rng(7)
    weights = {"normal": rng.standard_normal((64, 1024)).astype(np.float32)}
    network = quantd.load(os.path.join(
        package.ROOT, "tests/data/char-lm/model.safetensors"))
    for name in network:
        tensor = np.asarray(network[name])
        if tensor.ndim == 2:
            weights[name] = np.ascontiguousarray(tensor.reshape(-1, 256))
    assert len(weights) == 22
    return weights


def unusual_weights():
    rng = np.random.default_rng(8)
    normal = rng.standard_normal((16, 1024))
    sparse = rng.random(normal.shape) < 0.1
    weights = {"heavy": rng.standard_t(3, normal.shape), "sparse": sparse,
               "ternary": sparse * np.sign(normal), "two": sparse * 0.37,
               "pair": np.where(sparse, 0.27, -0.1),
               "constant": np.full(normal.shape, 0.3),
               "asymmetric": np.abs(normal) + 1, "exponential": np.exp(normal),
               "below": -10 - normal, "tiny": normal * 2.0 ** -22}
    return {name: weight.astype(np.float32) for name, weight in weights.items()}


@pytest.mark.parametrize("kind", MADE)
def test_BlocksLoseNoMoreThanThoseOfGgml(ggml, quantctl, tmp_path, kind):
    source, path = tmp_path / "x.safetensors", tmp_path / "q.gguf"
    restored = tmp_path / "r.safetensors"
    weights = {**weights_of_k_quants(), **unusual_weights()}
    quantd.save(source, weights)
    quantctl(*NOWHERE, "quantize", source, "-o", path, "--spec", kind,
             "--include", "*")
    quantctl("dequantize", path, "-o", restored)
    tensors, _, file_type = ggml_reads(ggml, path)
    assert file_type == {"q4_0": 2, "q4_1": 3, "q5_0": 8, "q5_1": 9, "q8_0": 7,
                         "q4_K": 14, "q5_K": 16, "q6_K": 18}[kind]
    of_quantctl, of_python = quantd.load(restored), quantd.load(path)
    number = MADE[kind]
    for name, weight in weights.items():
        found, data = tensors[name]
        assert found == kind
        reals = ggml_decodes(ggml, number, np.frombuffer(
            data, np.uint8).reshape(-1, _gguf.TYPES[number].block_bytes))
        reals = reals.reshape(weight.shape)
        for own in (of_quantctl[name], of_python[name]):
            np.testing.assert_array_equal(bits(own), bits(reals))
        if name in ("sparse", "ternary"):
            np.testing.assert_array_equal(reals, weight)
            continue
        of_ggml = sqnr_db(weight, ggml_quantizes(ggml, number, weight))
        slack = 0.05 if kind in K_QUANTS else 1e-6
        assert sqnr_db(weight, reals) >= of_ggml - slack, name


def test_KQuantsNeedNoServer(quantctl, tmp_path):
    source, path = tmp_path / "x.gguf", tmp_path / "q.gguf"
    weights = {name: np.random.default_rng(n).standard_normal((4, 512))
               for n, name in enumerate(("a.weight", "b.weight", "c.weight"))}
    norm = np.ones(64, np.float32)
    write_gguf(source, [(name, 0, weight.shape,
                         weight.astype("<f4").tobytes())
                        for name, weight in weights.items()] + [
                            ("norm.weight", 0, (64,), norm.tobytes())], PAIRS,
               alignment=64)
    said = quantctl(*NOWHERE, "quantize", source, "-o", path, "--evaluate",
                    "--spec", "a*=q6_K", "--spec", "b*=q5_k", "--spec", "q4_K")
    assert "3 of 4 tensors to q4_K, q5_K, q6_K" in said
    said = quantctl(*NOWHERE, "--json", "quantize", source, "-o", path,
                    "--force", "--evaluate", "--spec", "a*=q6_K", "--spec",
                    "b*=q5_k", "--spec", "q4_K")
    rows = {row["name"]: row for row in json.loads(said)["tensors"]}
    tensors = _files.open_file(str(path)).tensors
    restored = quantd.load(path)
    for name, kind in (("a.weight", "q6_K"), ("b.weight", "q5_K"),
                       ("c.weight", "q4_K")):
        size = _gguf.TYPES[K_QUANTS[kind]].block_bytes * 8
        row = rows[name]
        assert (row["result"], row["format"]) == ("quantized", kind)
        assert row["bytes_after"] == size == tensors[name].data.nbytes
        weight = weights[name].astype(np.float32)
        assert row["sqnr_db"] == pytest.approx(
            sqnr_db(weight, restored[name]), 1e-9)
    assert rows["norm.weight"]["result"] == "copied"
    np.testing.assert_array_equal(restored["norm.weight"], norm)
    # The metadata of the input, all but what says how it was quantized.
    kept = [text(key) + struct.pack("<I", kind) + value
            for key, kind, value in PAIRS if key != "general.file_type"]
    assert b"".join(kept) in path.read_bytes()


@pytest.mark.parametrize("spec", ["q4_K", "int8:group:32:scale=float16"])
def test_WhatLlamaCppLeavesStaysUnlessItIsNamed(quantctl, tmp_path, spec):
    source, path = tmp_path / "x.gguf", tmp_path / "q.gguf"
    kept = dict.fromkeys((
        "position_embd.weight", "token_types.weight", "v.position_embd.weight",
        "blk.0.ffn_gate_inp.weight", "blk.0.attn_q_norm.weight",
        "blk.0.ffn_up_exps.bias", "blk.0.ssm_a", "blk.0.ssm_conv1d.weight",
        "blk.0.shortconv.conv.weight", "blk.0.attn_rel_b.weight",
        "blk.0.time_mix_first.weight", "blk.0.time_mix_decay_w1.weight",
        "blk.0.time_mix_w1.weight", "blk.0.time_mix_v2.weight",
        "blk.0.time_mix_a0.weight", "blk.0.time_mix_g2.weight",
        "blk.0.time_mix_lerp_fused.weight", "altup_proj.weight",
        "blk.0.laurel_l.weight", "per_layer_model_proj.weight",
        "blk.0.indexer.k_proj.weight", "v.patch_embd.weight",
        "v.sam.neck.0.weight"), (4, 256))
    # Vectors of ggml, which does not count leading dimensions of 1.
    kept.update({"blk.0.time_mix_lerp_w.weight": (1, 1, 1024),
                 "blk.0.ffn_gate_inp_shexp.weight": (1, 1024)})
    taken = dict.fromkeys(("blk.0.ffn_gate.weight", "output.weight",
                           "token_embd.weight", "blk.0.time_mix_key.weight"),
                          (4, 256))
    data = np.full(1024, .1, "<f4").tobytes()
    write_gguf(source, [(name, 0, shape, data)
                        for name, shape in {**kept, **taken}.items()], PAIRS,
               alignment=64)
    quantize = ("quantize", source, "-o", path, "--force", "--no-store",
                "--spec", spec)
    said = quantctl(*quantize)
    assert "4 of 29 tensors" in said
    assert "left as they are: position_embd.weight, token_types.weight, " in (
        said)
    assert "and 15 more; a --spec for them takes them" in said
    assert {name for name, tensor in
            _files.open_file(str(path)).tensors.items()
            if tensor.data.nbytes == 4096} == set(kept)
    said = quantctl(*quantize, "--spec", f"*ffn_gate_inp.*={spec}")
    assert "5 of 29 tensors" in said
    assert "29 of 29 tensors" in quantctl(*quantize, "--include", "*")


def measured_by(document, name):
    """What a sweep or an evaluation says of a tensor, by the specs."""
    (row,) = [row for row in document["tensors"] if row["name"] == name]
    return {candidate.get("spec", candidate.get("label")): candidate
            for candidate in row["candidates"]}


def test_KQuantsAreMeasuredBesideOtherSpecs(quantctl, tmp_path):
    source, path = tmp_path / "x.safetensors", tmp_path / "q.gguf"
    rng = np.random.default_rng(5)
    weights = {"a.weight": rng.standard_normal((8, 512)),
               "b.weight": rng.standard_t(4, (16, 256)),
               "c.weight": rng.standard_normal((8, 256))}
    weights = {name: weight.astype(np.float32)
               for name, weight in weights.items()}
    quantd.save(source, weights)
    names = ("q4_K", "int8:group:32:scale=float16", "Q6_k", "q5_0")
    specs = [word for name in names for word in ("--spec", name)]
    mixture = tmp_path / "mixture.txt"
    swept = json.loads(quantctl(
        "sweep", source, *specs, "--max-bits-per-element", "5.2", "-o", mixture,
        "--json"))
    evaluated = json.loads(quantctl("evaluate", source, *specs, "--json",
                                    "--distribution"))
    for name, weight in weights.items():
        of_sweep = measured_by(swept, name)
        of_evaluate = measured_by(evaluated, name)
        assert list(of_evaluate) == list(names)
        for spec in names:
            quantctl("quantize", source, "-o", path, "--force", "--no-store",
                     "--include", name, "--spec", spec)
            expected = sqnr_db(weight, quantd.load(path)[name])
            assert of_sweep[spec]["sqnr_db"] == pytest.approx(expected, 1e-6)
            found = of_evaluate[spec]
            assert found["sqnr_db"] == pytest.approx(expected, 1e-6)
            assert found["cosine_similarity"] == pytest.approx(1, abs=.01)
            assert found["kl_divergence"] >= 0
            assert found["max_absolute_error"] == pytest.approx(
                of_sweep[spec]["max_absolute_error"], 1e-6)
            assert of_sweep[spec]["size_bytes"] == (
                _files.open_file(str(path)).tensors[name].data.nbytes)
    # What is chosen is what `quantize` takes, and as large as was said.
    assert "=q4_K\n" in mixture.read_text()
    quantctl("quantize", source, "-o", path, "--force", "--no-store", "--spec",
             f"@{mixture}")
    size = sum(tensor.data.nbytes for tensor in
               _files.open_file(str(path)).tensors.values())
    (chosen,) = swept["mixtures"]
    assert len({choice["spec"] for choice in chosen["choices"]}) > 1
    assert size == chosen["size_bytes"]
    assert 8 * size <= 5.2 * sum(weight.size for weight in weights.values())


def test_WhatKQuantsCannotHoldIsNotMeasured(quantctl, tmp_path):
    source = tmp_path / "x.safetensors"
    rng = np.random.default_rng(6)
    weights = {"a": rng.standard_normal((8, 40)),
               "b": rng.standard_normal((2, 256))}
    weights["b"][1, 3] = np.inf
    quantd.save(source, {name: weight.astype(np.float32)
                         for name, weight in weights.items()})
    for command in ("sweep", "evaluate"):
        said = quantctl(command, source, "--spec", "q4_K", "--spec", "int8",
                        "--include", "*", code=1)
        assert "a multiple of 32 elements for q4_K, got 40" in said
        assert "element 259 is inf" in said
    document = json.loads(quantctl("sweep", source, "--spec", "q4_K", "--spec",
                                   "int8", "--include", "*", "--json", code=1))
    for name in weights:
        found = measured_by(document, name)
        assert "error" in found["q4_K"] and found["int8"]["size_bytes"] > 0


def test_ASweepLeavesOutWhatGgufHasAsItIs(quantctl, tmp_path):
    source, mixture = tmp_path / "x.safetensors", tmp_path / "mixture.txt"
    rng = np.random.default_rng(6)
    ignored = {"blk.0.ssm_conv1d.weight": (256, 4), "blk.0.ssm_a": (1, 256),
               "blk.0.odd.weight": (256, 40)}
    taken = {"blk.0.a.weight": (8, 256), "blk.0.b.weight": (8, 96)}
    quantd.save(source, {name: rng.standard_normal(shape, np.float32)
                         for name, shape in {**ignored, **taken}.items()})
    sweep = ("sweep", source, "--spec", "q4_K", "--spec", "q8_0",
             "--max-bits-per-element", "8.5")
    said = quantctl(*sweep, "-o", mixture)
    assert ("left out, as quantize -o OUT.gguf leaves them as they are: "
            f"{', '.join(ignored)}; --include takes them") in said
    assert {line.split("=")[0] for line in mixture.read_text().splitlines()
            } == set(taken)
    document = json.loads(quantctl(*sweep, "--json", "--quiet"))
    assert sorted(document["ignored"]) == sorted(ignored)
    path = tmp_path / "q.gguf"
    quantctl(*NOWHERE, "quantize", source, "-o", path, "--spec", f"@{mixture}")
    (chosen,) = document["mixtures"]
    tensors = _files.open_file(str(path)).tensors
    assert sum(tensors[name].data.nbytes for name in taken) == (
        chosen["size_bytes"])
    # Other outputs have them.
    assert "left out" not in quantctl("sweep", source, "--spec", "int8")
    assert "expected tensors that quantize -o OUT.gguf quantizes" in quantctl(
        *sweep, "--exclude", "*.?.weight", code=2)
    assert "a multiple of 32 elements" in quantctl(
        *sweep, "--include", "*odd*", code=1)
    told = ("blk.0.b.weight: rows of 96 elements have no whole blocks of q4_K: "
            "q5_0 in its place")
    assert told in said


def test_AnEvaluationLeavesOutRowsWithoutBlocks(quantctl, tmp_path):
    source = tmp_path / "x.safetensors"
    rng = np.random.default_rng(6)
    quantd.save(source, {name: rng.standard_normal(shape, np.float32)
                         for name, shape in {
                             "a.weight": (8, 256), "b.weight": (8, 96),
                             "c.weight": (256, 40)}.items()})
    evaluate = ("evaluate", source, "--spec", "q4_K", "--spec", "int8")
    said = quantctl(*evaluate)
    assert ("b.weight: rows of 96 elements have no whole blocks of q4_K: q5_0 "
            "in its place") in said
    assert ("c.weight: rows of 40 elements have no whole blocks of q4_K: left "
            "out") in said
    document = json.loads(quantctl(*evaluate, "--json", "--quiet"))
    assert document["left_out"] == ["c.weight"]
    assert [row["name"] for row in document["tensors"]] == ["a.weight",
                                                            "b.weight"]
    # Who names one is told that it cannot be.
    assert "a multiple of 32 elements" in quantctl(
        *evaluate, "--include", "?.weight", code=1)
    assert "rows have whole blocks, got none among 1, such as c.weight" in (
        quantctl(*evaluate, "--exclude", "a*", "--exclude", "b*", code=2))
    assert json.loads(quantctl("evaluate", source, "--spec", "int8", "--json")
                      )["left_out"] == []


def test_RowsWithoutWholeBlocksBecomeWhatLlamaCppTakes(quantctl, tmp_path):
    source, path = tmp_path / "x.safetensors", tmp_path / "q.gguf"
    rng = np.random.default_rng(3)
    quantd.save(source, {
        f"{name}.weight": rng.standard_normal((8, columns)).astype(np.float32)
        for name, columns in (("a4", 256), ("b4", 96), ("b5", 160), ("b6", 32),
                              ("c4", 40))})
    specs = ("--spec", "?5.*=q5_K", "--spec", "?6.*=q6_K", "--spec", "?4.*=q4_K")
    # Somebody asked for c4.
    said = quantctl(*NOWHERE, "quantize", source, "-o", path, *specs, code=1)
    for name, columns, other in (("b4", 96, "q5_0 in its place"),
                                 ("b5", 160, "q5_1 in its place"),
                                 ("b6", 32, "q8_0 in its place"),
                                 ("c4", 40, "copied")):
        assert (f"tensor {name}.weight: rows of {columns} elements have no whole "
                f"blocks of q{name[1]}_K: {other}") in said
    assert "tensor a4.weight:" not in said
    said = quantctl("quantize", source, "-o", tmp_path / "quiet.gguf",
                    "--quiet", *specs, code=1)
    assert "tensor c4.weight: " in said and "b4" not in said
    assert "1 tensors that were asked for are copied" in said
    # Nobody names it: llama.cpp copies it, too.
    said = quantctl("quantize", source, "-o", tmp_path / "all.gguf",
                    "--quiet", "--spec", "q4_K")
    assert "c4" not in said
    sizes = {"a4.weight": 144 * 8, "b4.weight": 22 * 24, "b5.weight": 24 * 40,
             "b6.weight": 34 * 8, "c4.weight": 4 * 320}
    tensors = _files.open_file(str(path)).tensors
    assert {name: tensor.data.nbytes
            for name, tensor in tensors.items()} == sizes
    # The blocks of those types, as if they had been asked for.
    other = tmp_path / "other.gguf"
    quantctl(*NOWHERE, "quantize", source, "-o", other, "--spec", "b4*=q5_0",
             "--spec", "b5*=q5_1", "--spec", "b6*=q8_0")
    found = _files.open_file(str(other)).tensors
    for name in ("b4.weight", "b5.weight", "b6.weight"):
        np.testing.assert_array_equal(found[name].data.read(),
                                      tensors[name].data.read())


def test_SpecsOfTheServerStayThose(client, quantctl, tmp_path):
    source, path = tmp_path / "x.safetensors", tmp_path / "q.gguf"
    weight = np.random.default_rng(2).standard_normal((8, 256), np.float32)
    quantd.save(source, {"w.weight": weight})
    restored = {}
    for spec in ("int4:group:32:scale=float16", "q4_0"):
        quantctl("quantize", source, "-o", path, "--force", "--no-store",
                 "--spec", spec)
        restored[spec] = quantd.load(path)["w.weight"]
    of_server, own = restored.values()
    np.testing.assert_array_equal(of_server, client.quantize(
        weight, "int4:group:32:scale=float16").dequantize())
    assert sqnr_db(weight, own) > sqnr_db(weight, of_server) + 1


@pytest.mark.parametrize("flags", [(), ("--quiet",), ("--json",)])
def test_AFileOfCopiesAloneIsNoSuccess(quantctl, tmp_path, flags):
    source, path = tmp_path / "x.safetensors", tmp_path / "q.gguf"
    quantd.save(source, {"c.weight": np.ones((8, 40), np.float32)})
    said = quantctl("quantize", source, "-o", path, "--spec", "q4_K", *flags,
                    code=1)
    assert "nothing is quantized" in said
    np.testing.assert_array_equal(quantd.load(path)["c.weight"], 1)


def test_KQuantsAreRefusedWhereTheyHaveNoPlace(quantctl, tmp_path):
    source, path = tmp_path / "x.safetensors", tmp_path / "q.gguf"
    weight = np.ones((2, 256), np.float32)
    quantd.save(source, {"w.weight": weight})

    def refused(*arguments, code=2, output=path):
        said = quantctl(*NOWHERE, "quantize", source, "-o", output, *arguments,
                        code=code)
        assert not output.exists()
        return said

    assert "a .gguf file as the output, which alone has q4_K" in refused(
        "--spec", "q4_K", output=tmp_path / "q.safetensors")
    for kind in ("q5_K", "q4_0"):
        assert f"--no-store with {kind}" in refused("--spec", kind, "--model",
                                                    "m")
    assert "q6_K alone" in refused("--spec", "q6_K:mse")
    for arguments in (("calibrate", source, "--model", "m"),
                      ("report", source, "-o", tmp_path / "x.html"),
                      ("sweep", "--model", "m")):
        assert "got q4_K, which quantize -o OUT.gguf, sweep FILE" in quantctl(
            *NOWHERE, *arguments, "--spec", "q4_K", code=2)
    weight[1, 3] = np.nan
    quantd.save(source, {"w.weight": weight}, overwrite=True)
    for kind in MADE:
        assert "element 259 is nan" in refused("--spec", kind, code=1)


def test_PythonWritesWhatQuantctlWrites(client, quantctl, tmp_path):
    source, of_quantctl = tmp_path / "x.gguf", tmp_path / "c.gguf"
    of_python = tmp_path / "p.gguf"
    write_plain(source)
    quantctl("quantize", source, "-o", of_quantctl, "--no-store", *specs())
    plain = quantd.load(source)
    tensors = {name: client.quantize(plain[name], WRITTEN[name][0])
               if name in WRITTEN else plain[name] for name in plain}
    size = quantd.save(of_python, tensors, gguf_metadata=source)
    assert of_python.read_bytes() == of_quantctl.read_bytes()
    assert size == of_python.stat().st_size
    # Metadata of no model, and bfloat16.
    brains = np.arange(64, dtype=np.uint16).reshape(2, 32) << 7
    quantd.save(of_python, iter([("b", brains)]), overwrite=True,
                element_types={"b": "bfloat16"})
    file = quantd.load(of_python)
    assert file.info("b").dtype == "BF16"
    np.testing.assert_array_equal(file["b"], brains)


def test_PythonRefusesWhatGgufCannotHold(client, tmp_path):
    path = tmp_path / "x.gguf"
    weight = np.random.default_rng(1).standard_normal((4, 64), np.float32)

    def refused(tensors, reason, **arguments):
        with pytest.raises(quantd.QuantdError) as caught:
            quantd.save(arguments.pop("path", path), tensors, **arguments)
        assert caught.value.reason == reason
        assert not path.exists()
        return str(caught.value)

    for spec in ("int8:group:32", "int4:group:16:scale=float16",
                 "int8:group:32:asymmetric:scale=float16"):
        said = refused({"w": client.quantize(weight, spec)}, "ARGUMENT_INVALID")
        assert "zero points" in said if "asymmetric" in spec else (
            "int4:group:32:scale=float16 (q4_0)" in said)
    assert "no type for U8" in refused({"w": np.ones(4, np.uint8)},
                                       "FILE_UNSUPPORTED")
    refused({"n" * 64: weight}, "FILE_UNSUPPORTED")
    refused({"w": np.ones((0, 4), np.float32)}, "FILE_UNSUPPORTED")
    refused([("w", weight), ("w", weight)], "FILE_MALFORMED")
    refused({"w": weight}, "ARGUMENT_INVALID", metadata={"a": "b"})
    refused({"w": weight}, "ARGUMENT_INVALID", gguf_metadata=path,
            path=tmp_path / "x.safetensors")
    refused({"w": weight}, "FILE_UNREADABLE", gguf_metadata=tmp_path / "no")


def test_PythonSaysOfItsFilesWhatIsTrueOfThem(client, tmp_path):
    source, path = tmp_path / "s.gguf", tmp_path / "x.gguf"
    write_gguf(source, [], [
        ("split.no", 2, b"\1\0"), ("general.file_type", 4, b"\1\0\0\0"),
        ("split.count", 2, b"\2\0"), ("split.tensors.count", 5, bytes(4)),
        ("splits", 4, bytes(4))])
    rows = np.random.default_rng(1).standard_normal((4, 256), np.float32)

    def pairs_of(tensors, **arguments):
        quantd.save(path, tensors, overwrite=True, gguf_metadata=source,
                    **arguments)
        pairs = dict(_files.open_gguf(str(path)).pairs)
        assert sorted(pairs) == [b"general.file_type",
                                 b"general.quantization_version", b"splits"]
        return bytes(pairs[b"general.file_type"])[-4]

    # Without blocks it stays.
    assert pairs_of({"w": rows}) == 1
    half = client.quantize(rows, "int8:group:32:scale=float16")
    small = client.quantize(rows[:3], "int4:group:32:scale=float16")
    assert pairs_of({"a": small, "b": half}) == 7


def edges():
    """Blocks where searches have little to choose from, a name each."""
    rng = np.random.default_rng(11)
    normal = rng.standard_normal((2, 256)).astype(np.float32)
    sizes = np.repeat(np.float32(2) ** (-4 * np.arange(16)), 16)
    return {"zeros": np.zeros((2, 256)), "ones": np.ones((2, 256)),
            "minus": np.full((2, 256), -0.3), "above": np.abs(normal) + 1,
            "below": -np.abs(normal) - 1, "sizes": normal * sizes,
            "large": normal * np.float32(2 ** 16),
            "small": normal * np.float32(2 ** -16),
            "tiny": normal * np.float32(2 ** -26),
            "subnormal": normal * np.float32(2 ** -130),
            "sparse": normal * (rng.random((2, 256)) < 0.05),
            "whole": np.rint(normal * 4)}


@pytest.mark.parametrize("kind", MADE)
def test_BlocksAreThoseOfNumpy(tmp_path, kind):
    source, path = tmp_path / "x.safetensors", tmp_path / "q.gguf"
    weights = {name: weight.astype(np.float32)
               for name, weight in edges().items()}
    weights.update(unusual_weights())
    # q4_1 and q5_1 have minima in float16.
    weights["large"] *= np.float32(2.0 ** -5 if kind[-1] == "1" else 1)
    weights["normal"] = weights_of_k_quants()["normal"]
    weights = {f"{name}.weight": weight for name, weight in weights.items()}
    quantd.save(source, {**weights, "norm": np.ones(3, np.float32)})
    # Some columns count more, and some nothing.
    rng = np.random.default_rng(12)
    importance = {name: imatrix.InputSquares(
        (np.exp(3 * rng.standard_normal((2, weight.shape[1]))) *
         (rng.random(weight.shape[1]) < 0.9)).astype(np.float32),
        np.array([3, 0], np.float32)) for name, weight in weights.items()}
    del importance["normal.weight"]
    for squares in None, importance:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = quantd.quantize_model(source, path, kind, overwrite=True,
                                         importance=squares)
        assert {tensor.name for tensor in done.tensors
                if tensor.importance} == set(squares or ())
        found = _files.open_file(str(path)).tensors
        for name, weight in weights.items():
            shares = (squares[name].mean_squares()
                      if squares and name in squares else ())
            np.testing.assert_array_equal(
                found[name].data.read(),
                ggml_encoders.encode(weight, kind, shares).reshape(-1), name)


@pytest.mark.parametrize("kind", MADE)
def test_WeighedBlocksLoseNoMoreThanThoseOfGgml(ggml, quantctl, tmp_path, kind):
    """By the error that an importance matrix weighs."""
    source, path = tmp_path / "x.safetensors", tmp_path / "q.gguf"
    rng = np.random.default_rng(11)
    for name, weight in {**weights_of_k_quants(),
                         "heavy": unusual_weights()["heavy"]}.items():
        squares = np.exp(2 * rng.standard_normal(weight.shape[1])).astype(
            np.float32)
        imatrix.save(tmp_path / "imatrix.gguf", {"w.weight": imatrix.InputSquares(
            squares[None], np.ones(1, np.float32))}, overwrite=True)
        quantd.save(source, {"w.weight": weight}, overwrite=True)
        quantctl(*NOWHERE, "quantize", source, "-o", path, "--force", "--spec",
                 kind, "--importance", tmp_path / "imatrix.gguf")
        noise = [(np.square(restored.astype(float) - weight) * squares).sum()
                 for restored in (quantd.load(path)["w.weight"], ggml_quantizes(
                     ggml, MADE[kind], weight, squares))]
        assert noise[0] <= 1.01 * noise[1], name
