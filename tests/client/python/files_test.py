"""Files of tensors: what quantctl writes is read, and what is written is read
by quantctl."""

import dataclasses
import json
import os
import random
import struct
import subprocess
import tracemalloc

import numpy as np
import pytest

import quantd
import quantctl_case
from quantd import _files

SPECS = ["int8", "int8:per-channel", "int4:group:32:asymmetric", "uint8",
         "int2:group:16", "int3", "int16:per-channel", "uint16:asymmetric",
         "int8:scale=float16", "int8:per-channel:scale=bfloat16",
         "float8_e4m3fn", "float8_e5m2:per-channel", "float6_e3m2",
         "float4_e2m1", "mxfp4_e2m1", "mxfp8_e4m3", "mxint8", "nvfp4", "nf4",
         "lpbq", "codebook4:entries=" + ",".join(map(str, range(-8, 8))),
         "float8_e4m3fn:no-saturation", "int8:block=8,8", "int32:per-channel",
         "uint4:per-channel:real-zero-point",
         "int8:power-of-two"]


@pytest.fixture(name="weight", scope="module")
def fixture_weight():
    return np.random.default_rng(3).standard_normal((24, 64), np.float32)


def raised(call, *arguments, **keywords):
    with pytest.raises(quantd.QuantdError) as caught:
        call(*arguments, **keywords)
    return caught.value.reason


@pytest.mark.parametrize("spec", SPECS)
def test_WhatQuantctlWritesIsReadAndWrittenWithTheSameBytes(
        tmp_path, quantctl, client, weight, spec):
    plain, written, again = (tmp_path / name for name in (
        "plain.safetensors", "q.safetensors", "again.safetensors"))
    quantd.save(plain, {"a.weight": weight, "a.bias": weight[0]})
    quantctl("quantize", plain, "-o", written, "--no-store", "--spec", spec)

    file = quantd.load(written)
    tensor = file["a.weight"]
    of_client = client.quantize(weight, spec, name="a.weight")
    assert list(file) == ["a.weight", "a.bias"] or (
        list(file) == ["a.bias", "a.weight"])
    assert tensor.codes.tobytes() == of_client.codes.tobytes()
    assert tensor.shape == of_client.shape
    assert tensor.element_type == "float32"
    np.testing.assert_array_equal(tensor.scale.ravel(),
                                  of_client.scale.ravel())
    np.testing.assert_array_equal(tensor.dequantize(), of_client.dequantize())
    np.testing.assert_array_equal(tensor.dequantize(client=client),
                                  of_client.dequantize())
    np.testing.assert_array_equal(file["a.bias"], weight[0])
    info = file.info("a.weight")
    assert info.format == of_client.encoding.format
    assert info.shape == (24, 64)

    for source in (file, {"a.bias": weight[0], "a.weight": of_client}):
        quantd.save(again, source if source is file else {
            name: source[name] for name in file}, overwrite=True)
        assert again.read_bytes() == written.read_bytes()
    restored = tmp_path / "restored.safetensors"
    quantctl("dequantize", again, "-o", restored)
    np.testing.assert_array_equal(quantd.load(restored)["a.weight"],
                                  of_client.dequantize())


def test_ScalesHaveTheTypeThatTheyAreStoredIn(client, weight):
    for spec, dtype in (("int8:scale=float16", np.float16),
                        ("int8:scale=bfloat16", np.uint16), ("nvfp4", np.uint8),
                        ("int8", np.float32), ("mxint8", np.uint8)):
        assert client.quantize(weight, spec).encoding.stored_scale.dtype == (
            dtype), spec


@pytest.mark.parametrize("layout", ["compressed-tensors", "pack-quantized"])
def test_CompressedTensorsAreRead(tmp_path, quantctl, client, weight, layout):
    tensors = {f"m{n}.weight": weight + n for n in range(7)}
    plain = tmp_path / "plain.safetensors"
    quantd.save(plain, tensors)
    specs = dict(zip(tensors, [
        "int8:per-channel", "int4:group:32", "int4:group:16:asymmetric",
        "float8_e4m3fn", "nvfp4", "mxfp4_e2m1", "uint4:per-channel"]))
    quantctl("quantize", plain, "-o", tmp_path / "model", "--layout", layout,
             "--no-store", *(word for item in specs.items()
                             for word in ("--spec", "=".join(item))))
    restored = tmp_path / "restored.safetensors"
    quantctl("dequantize", tmp_path / "model", "-o", restored)
    expected = quantd.load(restored)
    file = quantd.load(tmp_path / "model")
    assert sorted(file) == sorted(tensors)
    for name in tensors:
        tensor = file[name]
        assert isinstance(tensor, quantd.QuantizedTensor)
        assert file.info(name).shape == tensor.shape == (24, 64)
        np.testing.assert_array_equal(tensor.dequantize(), expected[name])


def test_ScalesOfACacheGoWithTheCodes(tmp_path, weight):
    codes = np.clip(np.round(weight * 30), -127, 127).astype(np.int8)
    tensors = {"a.norm": weight[0], "a.k_scale": np.float32([0.25])}
    for name in ("a.k_proj", "a.v_proj", "b.v_proj", "b.o_proj"):
        tensors[f"{name}.weight"] = codes
        tensors[f"{name}.weight_scale"] = np.float32([[1 / 30]])
    tensors.update({f"{name}_scale": np.float32([0.5])
                    for name in ("a.v", "b.v", "c.k", "b.o")})
    quantd.save(tmp_path / _files.SINGLE_NAME, tensors)
    weights = {"num_bits": 8, "type": "int", "strategy": "tensor"}
    config = {"quant_method": "compressed-tensors", "config_groups": {
        "g": {"targets": ["Linear"], "weights": weights}}}

    def loaded(**more):
        (tmp_path / "config.json").write_text(json.dumps(
            {"quantization_config": {**config, **more}}))
        return quantd.load(tmp_path)
    codes_and_norm = {"a.norm", "a.k_proj.weight", "a.v_proj.weight",
                      "b.v_proj.weight", "b.o_proj.weight"}
    file = loaded(kv_cache_scheme={"num_bits": 8, "type": "float"})
    # Those that no projection has, or that no cache has, are what they are.
    assert set(file) == {*codes_and_norm, "c.k_scale", "b.o_scale"}
    assert file.info("a.k_proj.weight").size_bytes == codes.size + 4 + 4
    assert file.info("b.o_proj.weight").size_bytes == codes.size + 4
    np.testing.assert_array_equal(file["a.k_proj.weight"].codes, codes)
    for more in ({}, {"kv_cache_scheme": None}):
        assert set(loaded(**more)) == codes_and_norm | {
            "a.k_scale", "a.v_scale", "b.v_scale", "c.k_scale", "b.o_scale"}


def test_WhatATensorIsIsSaidWithoutReadingIt(tmp_path, client, weight,
                                             monkeypatch):
    path = tmp_path / "x.safetensors"
    quantized = client.quantize(weight, "int4:group:8:scale=bfloat16")
    quantd.save(path, {"a": quantized, "b": weight})
    file = quantd.load(path)

    def read(_):
        raise AssertionError("data were read")
    monkeypatch.setattr(_files.FileTensor, "bytes", read)
    info = file.info("a")
    assert (info.shape, info.format, info.dtype) == ((24, 64), "int4", "U8")
    assert info.size_bytes == 24 * 64 // 2 + 24 * 8 * 2
    assert file.info("b").shape == (24, 64)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_PackedCodesTakeTheMemoryOfCodes(tmp_path, bits):
    rows, columns = 256, 65536
    words = np.random.default_rng(bits).integers(
        -2**31, 2**31, (rows, columns * bits // 32)).astype(np.int32)
    quantd.save(tmp_path / _files.SINGLE_NAME, {
        "m.weight_packed": words, "m.weight_scale": np.ones(
            (rows, 1), np.float32), "m.weight_shape": np.array([rows, columns])})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {
        "quant_method": "compressed-tensors", "config_groups": {"g": {
            "targets": ["Linear"], "weights": {
                "num_bits": bits, "type": "int", "strategy": "channel"}}}}}))
    file = quantd.load(tmp_path)
    tracemalloc.start()
    tensor = file["m.weight"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The words are read, and unpacked.
    assert peak < 2.1 * words.nbytes + (1 << 20)
    values = (words.view(np.uint32)[..., None] >> np.arange(
        0, 32, bits, dtype=np.uint32)) & ((1 << bits) - 1)
    np.testing.assert_array_equal(
        tensor.dequantize(),
        values.reshape(rows, columns).astype(np.float32) - (1 << bits - 1))


def test_TargetsSayWhichModulesAreMeant(tmp_path, quantctl, weight):
    plain, model = tmp_path / "plain.safetensors", tmp_path / "model"
    quantd.save(plain, {"a.weight": weight, "b.weight": weight})
    quantctl("quantize", plain, "-o", model, "--layout", "compressed-tensors",
             "--spec", "int8:per-channel")
    config = model / "config.json"
    document = json.loads(config.read_text())
    (group,) = document["quantization_config"]["config_groups"].values()

    def target(*targets):
        group["targets"] = list(targets)
        config.write_text(json.dumps(document))
    for targets in (["a", "b"], ["re:[ab]$"], ["Linear"], ["re:a", "b"]):
        target(*targets)
        assert set(quantd.load(model)) == {"a.weight", "b.weight"}, targets
    # A module that none targets has scales all the same.
    for targets in (["a"], ["re:a"], ["re:.a"], [], ["Other"]):
        target(*targets)
        assert raised(quantd.load, model) == "FILE_MALFORMED", targets
    target("re:[")
    assert raised(quantd.load, model) == "FILE_UNSUPPORTED"
    # The order of groups where there are none.
    target("Linear")
    (path,) = model.glob("*.safetensors")
    tensors, metadata = quantctl_case.read_safetensors(path)
    tensors["a.weight_g_idx"] = ("I32", [64], bytes(256))
    quantctl_case.write_safetensors(path, tensors, metadata)
    assert raised(quantd.load(model).__getitem__, "a.weight") == (
        "FILE_MALFORMED")


def test_TargetsByNameComeFirstAndThoseByClassLast(tmp_path, quantctl, weight):
    plain, model = tmp_path / "plain.safetensors", tmp_path / "model"
    quantd.save(plain, {"a.weight": weight, "b.down_proj.weight": weight})
    quantctl("quantize", plain, "-o", model, "--layout", "compressed-tensors",
             "--spec", "int8:per-channel")
    found = quantd.load(model)
    expected = {name: found[name].dequantize() for name in found}
    config = model / "config.json"
    document = json.loads(config.read_text())
    section = document["quantization_config"]
    (group,) = section["config_groups"].values()
    # What these say does not fit the tensors.
    wrong = {**group, "weights": {**group["weights"], "strategy": "group",
                                  "group_size": 16}}
    for groups in (
            [{**wrong, "targets": ["Linear"]},
             {**group, "targets": ["a", "re:.*down_proj"]}],
            [{**wrong, "targets": ["Linear", "re:.*"]},
             {**group, "targets": ["a", "b.down_proj"]}]):
        section["config_groups"] = {
            f"group_{i}": own for i, own in enumerate(groups)}
        config.write_text(json.dumps(document))
        found = quantd.load(model)
        for name, reals in expected.items():
            assert np.array_equal(found[name].dequantize(), reals), name
        out = tmp_path / "out.safetensors"
        quantctl("dequantize", model, "-o", out, "--force")
        assert set(quantd.load(out)) == set(expected)


def write_gguf(path, tensors):
    """Of (name, number of the type, bytes), each of [4, 64]."""
    def text(word):
        return struct.pack("<Q", len(word)) + word
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2)
    header += text(b"general.name") + struct.pack("<I", 8) + text(b"x")
    header += text(b"list") + struct.pack("<IIQ", 9, 4, 2) + bytes(8)
    data = b""
    for name, number, payload in tensors:
        header += text(name) + struct.pack("<IQQIQ", 2, 64, 4, number,
                                           len(data))
        data += payload + bytes(-len(payload) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + data)


def test_GgufIsReadAsQuantctlReadsIt(tmp_path, quantctl):
    rng = np.random.default_rng(5)
    q8 = b"".join(np.float16(scale).tobytes() + rng.bytes(32)
                  for scale in rng.random(8))
    q4 = b"".join(np.float16(scale).tobytes() + rng.bytes(16)
                  for scale in rng.random(8))
    plain = rng.random((4, 64)).astype(np.float32)
    tensors = [(b"a", 8, q8), (b"b", 2, q4), (b"c", 0, plain.tobytes())]
    path, copy = tmp_path / "x.gguf", tmp_path / "copy.safetensors"
    write_gguf(path, tensors)
    file = quantd.load(path)
    assert list(file) == ["a", "b", "c"]
    np.testing.assert_array_equal(file["c"], plain)
    quantd.save(copy, file)
    for source in (path, copy):
        quantctl("quantize", source, "-o", f"{source}.q.safetensors",
                 "--requantize", "--no-store", "--spec", "int16:group:32")
    assert (tmp_path / "x.gguf.q.safetensors").read_bytes() == (
        tmp_path / "copy.safetensors.q.safetensors").read_bytes()

    write_gguf(path, [*tensors, (b"d", 4, b"")])
    assert quantd.load(path).unread == ["d"]
    assert list(quantd.load(path)) == ["a", "b", "c"]
    path.write_bytes(path.read_bytes()[:-80])
    assert raised(quantd.load, path) == "FILE_MALFORMED"


def test_ShardsAreOneFile(tmp_path, weight):
    quantd.save(tmp_path / "x-1.safetensors", {"a": weight})
    quantd.save(tmp_path / "x-2.safetensors", {"b": weight + 1})
    (tmp_path / _files.INDEX_NAME).write_text(json.dumps(
        {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}))
    file = quantd.load(tmp_path)
    assert list(file) == ["a", "b"]
    np.testing.assert_array_equal(file["b"], weight + 1)
    (tmp_path / _files.INDEX_NAME).write_text(json.dumps(
        {"weight_map": {"a": "x-1.safetensors", "c": "x-2.safetensors"}}))
    assert raised(quantd.load, tmp_path) == "FILE_MALFORMED"
    quantd.save(tmp_path / "x-2.safetensors", {"a": weight, "c": weight},
                overwrite=True)
    assert raised(quantd.load, tmp_path) == "FILE_MALFORMED"


def test_NpyIsReadAndWritten(tmp_path, weight):
    path = tmp_path / "w.npy"
    quantd.save(path, {"any": weight})
    np.testing.assert_array_equal(np.load(path), weight)
    np.testing.assert_array_equal(quantd.load(path)["w"], weight)
    for dtype in (np.float16, np.float64, np.int64, np.bool_):
        quantd.save(path, {"any": weight.astype(dtype)}, overwrite=True)
        assert quantd.load(path)["w"].dtype == dtype
    assert raised(quantd.save, tmp_path / "x.npy", {}) == "ARGUMENT_INVALID"
    # Else the elements would be those from some bytes behind the first on.
    path.write_bytes(path.read_bytes() + b"more")
    assert raised(quantd.load, path) == "FILE_MALFORMED"


@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".gguf"])
def test_ErrorsOfSavingNameTheTensor(tmp_path, client, weight, suffix):
    path = tmp_path / ("x" + suffix)
    for bad in (np.array(["text"]), np.array([object()])):
        with pytest.raises(quantd.QuantdError) as caught:
            quantd.save(path, {"some.weight": bad})
        assert caught.value.reason == "ARGUMENT_INVALID"
        assert "'some.weight'" in str(caught.value)
    if suffix == ".safetensors":
        quantized = client.quantize(weight, "int8")
        for bad in (dataclasses.replace(quantized, encoding=None),
                    dataclasses.replace(quantized, shape=(1, 2))):
            with pytest.raises(quantd.QuantdError) as caught:
                quantd.save(path, {"a": weight, "some.weight": bad})
            assert caught.value.name.tensor == "some.weight"
    assert not path.exists()


@pytest.mark.parametrize("as_torch", [False, True])
@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".gguf"])
@pytest.mark.parametrize("change", ["cut", "rewritten", "replaced"])
def test_AFileThatChangesIsAnErrorAndNoSignal(tmp_path, client, weight, suffix,
                                              as_torch, change):
    if as_torch:
        pytest.importorskip("torch")
    path = tmp_path / ("x" + suffix)
    tensors = {"x": weight}
    if suffix == ".safetensors":
        tensors["codes"] = client.quantize(weight, "int8")
    quantd.save(path, tensors)
    before = os.stat(path)
    file = quantd.load(path, as_torch=as_torch)
    if change == "cut":
        os.truncate(path, 130)
    elif change == "rewritten":
        with open(path, "r+b") as other:
            other.seek(-4, os.SEEK_END)
            other.write(b"abcd")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    else:
        quantd.save(path, {"x": weight + 1}, overwrite=True)
        np.testing.assert_array_equal(np.asarray(file["x"]), weight)
        return
    for name in file:
        with pytest.raises(quantd.QuantdError) as caught:
            print(file[name])
        assert caught.value.reason == "FILE_CHANGED"
        assert str(path) in str(caught.value)
        assert f"tensor '{name}" in str(caught.value)


def test_BitsOfAFileAreSavedAsWhatTheyWere(tmp_path, client):
    path, again = tmp_path / "x.safetensors", tmp_path / "again.safetensors"
    bits = np.arange(0x3F80, 0x3F8C, dtype=np.uint16).reshape(3, 4)
    quantd.save(path, {"w": bits, "u": bits},
                element_types={"w": "bfloat16", "u": "uint16"})
    tensors, metadata = quantctl_case.read_safetensors(path)
    tensors["p"] = ("F8_E8M0", [12], bytes(range(12)))
    quantctl_case.write_safetensors(path, tensors, metadata)
    file = quantd.load(path)
    assert file["w"].dtype == np.uint16
    quantd.save(again, {
        **file, "rows": file["w"][1:], "copy": file["w"].T.copy()})
    saved = quantd.load(again)
    assert {name: saved.info(name).dtype for name in saved} == {
        "w": "BF16", "u": "U16", "p": "F8_E8M0", "rows": "BF16",
        "copy": "BF16"}
    for name in file:
        assert np.array_equal(saved[name], file[name]), name
    assert np.array_equal(saved["copy"], bits.T)
    assert raised(quantd.save, tmp_path / "x.npy", {"w": file["w"]}) == (
        "FILE_UNSUPPORTED")
    assert raised(quantd.save, tmp_path / "x.npy", {"p": file["p"]}) == (
        "FILE_UNSUPPORTED")
    assert raised(quantd.save, tmp_path / "x.npy", {"w": bits},
                  element_types={"w": "bfloat16"}) == "FILE_UNSUPPORTED"
    # What numpy makes of them does not tell any more what it is.
    for lost in (np.stack([file["w"]] * 2), file["w"].view(np.uint16),
                 file["w"].astype(np.uint16), bits):
        for name in ("lost.safetensors", "lost.npy", "lost.gguf"):
            with pytest.raises(quantd.QuantdError, match="bfloat16") as caught:
                quantd.save(tmp_path / name, {"w": lost})
            assert caught.value.reason == "ARGUMENT_INVALID"
            assert caught.value.field == "element_types"
            assert not (tmp_path / name).exists()
        quantd.save(again, {"w": lost}, element_types={"w": "bfloat16"},
                    overwrite=True)
        assert quantd.load(again).info("w").dtype == "BF16"
    for lost in (np.stack([file["p"]] * 2), file["p"].view(np.uint8),
                 np.concatenate([np.zeros(3, np.uint8), file["p"][:3]])):
        for name in ("lost.safetensors", "lost.npy", "lost.gguf"):
            with pytest.raises(quantd.QuantdError, match="float8") as caught:
                quantd.save(tmp_path / name, {"p": lost})
            assert caught.value.reason == "ARGUMENT_INVALID"
            assert caught.value.field == "element_types"
            assert not (tmp_path / name).exists()
        for given, dtype in [("float8_e8m0fnu", "F8_E8M0"),
                             ("float8_e4m3fn", "F8_E4M3"),
                             ("float8_e5m2", "F8_E5M2"), ("uint8", "U8")]:
            quantd.save(again, {"p": lost}, element_types={"p": given},
                        overwrite=True)
            assert quantctl_case.read_safetensors(again)[0]["p"] == (
                dtype, list(lost.shape), lost.tobytes())
    quantd.save(again, {"p": file["p"] > 3}, overwrite=True)
    assert quantd.load(again).info("p").dtype == "BOOL"
    for name, given in (("p", "uint8"), ("u", "bfloat16")):
        assert raised(quantd.save, again, {name: file[name]}, overwrite=True,
                      element_types={name: given}) == "ARGUMENT_INVALID"
    for name in ("none.safetensors", "none.npy", "none.gguf"):
        with pytest.raises(quantd.QuantdError, match="names a, b .el"):
            quantd.save(tmp_path / name, {"w": file["w"]}, element_types={
                "a": "uint16", "w": "bfloat16", "b": "bfloat16"})
        assert not (tmp_path / name).exists()
    assert client.quantize(file["w"], "int8").element_type == "bfloat16"
    assert raised(client.quantize, file["u"], "int8") == "ARGUMENT_INVALID"


def test_TorchComesBackAsTorch(tmp_path, client):
    torch = pytest.importorskip("torch")
    path = tmp_path / "t.safetensors"
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    quantized = client.quantize(tensor, "int8")
    quantd.save(path, {"t": tensor, "q": quantized,
                       "s": torch.tensor(3, dtype=torch.int64)})
    file = quantd.load(path, as_torch=True)
    assert file["t"].dtype == torch.bfloat16
    assert torch.equal(file["t"], tensor)
    assert file["s"].shape == () and int(file["s"]) == 3
    assert torch.equal(file["q"].codes, quantized.codes)
    assert torch.equal(file["q"].dequantize(), quantized.dequantize())
    assert quantd.load(path)["t"].dtype == np.uint16
    assert quantd.load(path).info("t").dtype == "BF16"
    # Never as integers that save() would take for such.
    quantd.save(path, {"x": np.arange(6, dtype=np.uint8)}, overwrite=True,
                element_types={"x": "float8_e8m0fnu"})
    file = quantd.load(path, as_torch=True)
    if hasattr(torch, "float8_e8m0fnu"):
        assert file["x"].dtype == torch.float8_e8m0fnu
        assert raised(client.quantize, file["x"], "int8") == "ARGUMENT_INVALID"
        again = tmp_path / "again.safetensors"
        quantd.save(again, {"x": file["x"]})
        assert again.read_bytes() == path.read_bytes()
    else:
        assert raised(lambda: file["x"]) == "ARGUMENT_INVALID"
    text = b'{"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}   '
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"12")
    file = quantd.load(path, as_torch=True)
    assert raised(lambda: file["x"]) == "FILE_UNSUPPORTED"
    # Data that do not begin where torch can take them.
    text = b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    text += b" " * (-len(text) % 4 + 1)
    path.write_bytes(len(text).to_bytes(8, "little") + text +
                     np.float32([1, 2]).tobytes())
    x = quantd.load(path, as_torch=True)["x"]
    assert x.tolist() == [1, 2] and x.data_ptr() % 4 == 0


def test_ArraysAreOfTheFileAndNotToBeWritten(tmp_path, client, weight):
    path = tmp_path / "x.safetensors"
    quantd.save(path, {"a": weight, "q": client.quantize(weight, "int8")})
    file = quantd.load(path)
    for array in (file["a"], file["q"].codes):
        assert not array.flags.owndata
        with pytest.raises(ValueError):
            array[0, 0] = 1
    assert raised(quantd.save, tmp_path / "y.safetensors", {"a": weight},
                  metadata={"quantd.a": "{}"}) == "ARGUMENT_INVALID"
    assert raised(quantd.save, tmp_path / "m.safetensors", {"a": weight},
                  metadata={"a": 1}) == "ARGUMENT_INVALID"
    assert not (tmp_path / "m.safetensors").exists()


def test_NothingIsReplacedUnlessAsked(tmp_path, weight):
    path = tmp_path / "x.safetensors"
    quantd.save(path, {"a": weight})
    before = path.read_bytes()
    assert raised(quantd.save, path, {"b": weight}) == "FILE_EXISTS"
    assert path.read_bytes() == before
    quantd.save(path, {"b": weight}, overwrite=True)
    assert list(quantd.load(path)) == ["b"]

    def breaks():
        yield "a", weight
        raise OSError("away")
    with pytest.raises(OSError):
        quantd.save(path, breaks(), overwrite=True)
    assert list(quantd.load(path)) == ["b"]
    assert os.listdir(tmp_path) == ["x.safetensors"]
    assert raised(quantd.save, tmp_path / "no" / "x.safetensors",
                  {"a": weight}) == "FILE_UNWRITABLE"
    assert raised(quantd.save, tmp_path / "y.safetensors",
                  [("a", weight), ("a", weight)]) == "FILE_MALFORMED"


def assert_late_files_stay(path):
    """One that comes while another is written."""
    with _files.AtomicFile(str(path), overwrite=False) as file:
        file.write(b"x")
        path.write_bytes(b"mine")
        assert raised(file.commit) == "FILE_EXISTS"
    assert path.read_bytes() == b"mine"
    with _files.AtomicFile(str(path), overwrite=True) as file:
        file.write(b"x")
        file.commit()
    assert path.read_bytes() == b"x"


def test_AFileThatComesMeanwhileStays(tmp_path):
    assert_late_files_stay(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]


def test_WithoutUnnamedFilesItIsTheSame(tmp_path, weight, monkeypatch):
    opened = os.open

    def refuse(path, flags, *rest, **keywords):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "not supported")
        return opened(path, flags, *rest, **keywords)
    monkeypatch.setattr(os, "open", refuse)
    path = tmp_path / "x.safetensors"
    quantd.save(path, {"a": weight})
    assert raised(quantd.save, path, {"a": weight}) == "FILE_EXISTS"
    quantd.save(path, {"b": weight}, overwrite=True)
    assert_late_files_stay(tmp_path / "y")
    assert sorted(os.listdir(tmp_path)) == ["x.safetensors", "y"]


EMPTY = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


def test_DamagedFilesAreNamed(tmp_path, weight):
    path = tmp_path / "x.safetensors"
    quantd.save(path, {"a": weight, "b": weight})
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for what, damaged in {
            "empty": b"", "cut": whole[:-1], "longer": whole + b"x",
            "no length": whole[:7],
            "a long header": (1 << 62).to_bytes(8, "little") + whole[8:],
            "no JSON": whole[:8] + b"[" * length + whole[8 + length:],
            "a name twice": whole[:8] + (
                b'{"e":%s,"e":%s}' % (EMPTY, EMPTY)).ljust(length),
            "overlap": whole.replace(b"[0,", b"[8,", 1),
            "a shape": whole.replace(b"[24,64]", b"[24,-4]", 1)}.items():
        path.write_bytes(damaged)
        assert raised(quantd.load, path) == "FILE_MALFORMED", what
    path.write_bytes(whole.replace(b'"F32"', b'"F99"', 1))
    assert raised(quantd.load, path) == "FILE_UNSUPPORTED"
    assert raised(quantd.load, tmp_path / "none") == "FILE_UNREADABLE"


def test_DamagedQuantizedTensorsAreNamed(tmp_path, client, weight):
    path = tmp_path / "x.safetensors"
    quantd.save(path, {"a": client.quantize(weight, "nvfp4")})
    tensors, metadata = quantctl_case.read_safetensors(path)
    record = json.loads(metadata["quantd.a"])
    for change in ({"version": 2}, {"format": "int99"}, {"shape": [24]},
                   {"shape": "x"}, {"block_size": [1, 0]}, {"qmin": "a"},
                   {"scale_type": "x"}, {"element_type": "int8"},
                   {"outer_block_size": [24, 1]}, {"exclude_zero": 1}):
        quantctl_case.write_safetensors(
            path, tensors, {"quantd.a": json.dumps({**record, **change})})
        file = quantd.load(path)
        assert raised(file.__getitem__, "a") == "FILE_MALFORMED", change
    for missing in tensors:
        rest = {name: tensor for name, tensor in tensors.items()
                if name != missing}
        quantctl_case.write_safetensors(path, rest, metadata)
        if "a" in (file := quantd.load(path)):
            assert raised(file.__getitem__, "a") == "FILE_MALFORMED", missing


def write_raw(path, tensors):
    """tensors: dtype, shape and bytes by name."""
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [
            len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_TypesThatNobodyQuantizesAreCopied(tmp_path, quantctl, client, weight):
    source = tmp_path / "x.safetensors"
    others = {"c": ("C64", [2, 2], bytes(range(32))),
              "f4": ("F4", [2, 6], bytes(range(6))),
              "f6": ("F6_E2M3", [4, 2], bytes(range(6))),
              "f6b": ("F6_E3M2", [4], bytes(range(3)))}
    write_raw(source, {"w": ("F32", [24, 64], weight.tobytes()), **others})
    quantctl("quantize", source, "-o", tmp_path / "a.safetensors",
             "--no-store", "--spec", "int8")
    quantd.quantize_model(source, tmp_path / "b.safetensors", "int8",
                          client=client)
    assert (tmp_path / "b.safetensors").read_bytes() == (
        tmp_path / "a.safetensors").read_bytes()
    file = quantd.load(tmp_path / "a.safetensors")
    for name, (_, _, values) in others.items():
        assert file[name].tobytes() == values
        # The shape of those below a byte is that of the bytes.
        if name != "c":
            assert raised(quantd.save, tmp_path / "d.safetensors",
                          {name: file[name]}) == "ARGUMENT_INVALID"
    assert file["c"].dtype == np.complex64

    write_raw(source, {"new": ("F5_E2M2", [8], bytes(5))})
    assert raised(quantd.load, source) == "FILE_UNSUPPORTED"
    said = quantctl("quantize", source, "-o", tmp_path / "c.safetensors",
                    "--no-store", "--spec", "int8", code=4)
    assert 'FILE_UNSUPPORTED' in said and '"F5_E2M2"' in said
    write_raw(source, {"odd": ("F4", [3], bytes(2))})
    assert raised(quantd.load, source) == "FILE_MALFORMED"


def test_ALargeFileIsNotReadIntoMemory(tmp_path):
    path = tmp_path / "large.safetensors"
    size = 1 << 30
    text = json.dumps({"a": {"dtype": "F32", "shape": [size // 4],
                             "data_offsets": [0, size]}}).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    program = ("import resource, quantd, sys\n"
               "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
               "print(quantd.load(sys.argv[1])['a'][-1])\n"
               "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - "
               "before)\n")
    out = subprocess.run(
        ["/usr/bin/python3", "-c", program, path], check=True, text=True,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.environ[
            "QUANTD_TEST_PACKAGE"]}).stdout.split()
    assert out[0] == "0.0" and int(out[1]) < 64 << 10, out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".gguf"])
def test_OfDamagedFilesOnlyErrorsOfTheClientCome(tmp_path, suffix):
    rng = random.Random(5)
    path = tmp_path / ("x" + suffix)
    weight = {"w.weight": np.ones((4, 256), np.float32)}
    quantd.save(path, weight)
    if suffix == ".gguf":
        quantd.quantize_model(path, tmp_path / "q.gguf", "q4_K")
        path = tmp_path / "q.gguf"
    whole = path.read_bytes()
    refused = 0
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(min(len(damaged), 300))
            damaged[at:at + rng.choice((0, 1, 8))] = rng.choice((
                b"", rng.randbytes(1), b"\xff" * 8, bytes(8),
                (1 << 62).to_bytes(8, "little"),
                bytes(rng.choices(b'[](){}:",0123456789L', k=5))))
        path.write_bytes(damaged)
        try:
            loaded = quantd.load(path)
            assert all(loaded[name] is not None for name in loaded)
        except quantd.QuantdError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize("extension", [
    "npz", "onnx", "pt", "PTH", "bin", "h5", "pkl", "json", "html", "csv",
    "zip"])
def test_NoNameOfAnotherFormatIsWritten(extension, quantctl, client, tmp_path):
    weight = {"a.weight": np.ones((4, 32), np.float32)}
    source, out = tmp_path / "x.safetensors", tmp_path / f"x.{extension}"
    quantd.save(source, weight)
    os.mkdir(tmp_path / "model")
    quantd.save(tmp_path / "model/model.safetensors", weight)
    told = "expected a name that ends with .safetensors, got "
    assert told in quantctl("quantize", source, "-o", out, "--spec", "int8",
                            code=2)
    for call, arguments in ((quantd.save, (out, weight)),
                            (quantd.quantize_model, (source, out, "int8"))):
        with pytest.raises(quantd.QuantdError, match=told) as caught:
            call(*arguments, **({} if call is quantd.save else
                                {"client": client}))
        assert caught.value.reason == "ARGUMENT_INVALID"
    quantctl("quantize", tmp_path / "model", "-o", out, "--spec", "int8",
             code=2)
    assert raised(quantd.quantize_model, tmp_path / "model", out, "int8",
                  client=client) == "ARGUMENT_INVALID"
    assert not out.exists()


def test_TextIsUnicode(tmp_path):
    weight = np.ones((4, 32), np.float32)
    path = tmp_path / "x.safetensors"
    for suffix in ".safetensors", ".gguf":
        assert raised(quantd.save, tmp_path / ("x" + suffix),
                      {"a\ud800": weight}) == "ARGUMENT_INVALID"
    for metadata in {"a\udc00": "b"}, {"a": "\ud800"}:
        assert raised(quantd.save, path, {"a": weight},
                      metadata=metadata) == "ARGUMENT_INVALID"
    assert not list(tmp_path.iterdir())
    for text in ('{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
                 '{"__metadata__":{"a":"\\udc00"}}'):
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
        assert raised(quantd.load, path) == "FILE_MALFORMED"


@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".gguf"])
@pytest.mark.parametrize("content, told", [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n",
     "got a pointer of git-lfs; `git lfs pull` gets the file"),
    (b"<!DOCTYPE html>\n<html><body>404</body></html>",
     "got text that begins with "), (b"404: Not Found", "got text that begins with ")])
def test_WhatIsNoFileOfTensorsIsToldAsWhatItIs(suffix, content, told, quantctl,
                                               tmp_path):
    path = tmp_path / ("x" + suffix)
    path.write_bytes(content)
    said = quantctl("quantize", path, "-o", tmp_path / "out.safetensors",
                    "--spec", "int8", code=4)
    assert "FILE_MALFORMED" in said and told in said
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.load(path)
    assert caught.value.reason == "FILE_MALFORMED"
    assert told in str(caught.value)


def test_WhatIsNotReadIsToldAsQuantctlTellsIt(quantctl, tmp_path):
    rows = np.ones((4, 32), np.float32)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(rows))
    np.save(tmp_path / "big.npy", rows.astype(">f4"))
    np.save(tmp_path / "fields.npy", np.zeros(3, [("a", "<f4"), ("bc", "<i4")]))
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    for name, text in (
            ("spaces.safetensors", '  {"a":{"dtype":"F32","shape":[],'
             '"data_offsets":[0,4]}}'),
            ("strides.safetensors", '{"a":{"dtype":"F32","shape":[1],'
             '"data_offsets":[0,4],"strides":[1]}}')):
        (tmp_path / name).write_bytes(len(text).to_bytes(8, "little") +
                                      text.encode() + bytes(4))
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "object.npy").write_bytes(b"\x80\x04K\x01.")
    (tmp_path / "big.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "big") +
                                        bytes(16))
    (tmp_path / "old.gguf").write_bytes(b"GGUF" + (1).to_bytes(4, "little") +
                                        bytes(16))
    for name, reason, told in (
            ("fortran.npy", "FILE_UNSUPPORTED",
             "expected C order, got fortran_order; save "
             "numpy.ascontiguousarray(array)"),
            ("big.npy", "FILE_UNSUPPORTED", "1 to 8 bytes, got "),
            ("fields.npy", "FILE_UNSUPPORTED",
             "1 to 8 bytes, got fields \"[('a', '<f4'), ('bc', '<i4')]\""),
            ("objects.npy", "FILE_UNSUPPORTED", "1 to 8 bytes, got type '|O'"),
            ("spaces.safetensors", "FILE_MALFORMED",
             "expected a header that begins with {"),
            ("strides.safetensors", "FILE_MALFORMED", "strides"),
            ("empty.npy", "FILE_MALFORMED", "empty.npy: "),
            ("object.npy", "FILE_MALFORMED",
             "expected a file that begins with \\x93NUMPY"),
            ("big.gguf", "FILE_UNSUPPORTED",
             "expected a little-endian file, got a big-endian one"),
            ("old.gguf", "FILE_UNSUPPORTED", "expected version 2 or 3, got 1")):
        said = quantctl("evaluate", tmp_path / name, "--spec", "int8", code=4)
        assert reason in said and told in said
        with pytest.raises(quantd.QuantdError) as caught:
            quantd.load(tmp_path / name)
        assert caught.value.reason == reason and told in str(caught.value)
        assert "pickle" not in str(caught.value)


@pytest.mark.parametrize("names, told", [
    (["unet/diffusion_pytorch_model.safetensors", "vae/x.npy",
      "vae/deep/y.npy", ".cache/z.safetensors"],
     "got 2 other files of tensors, such as "
     "unet/diffusion_pytorch_model.safetensors; to take one, give the file "
     "itself"),
    (["adapter_config.json", "adapter_model.safetensors"],
     "got 1 other files of tensors, such as adapter_model.safetensors; to "),
    (["pytorch_model.bin"], "got no .safetensors, .npy, .gguf")])
def test_AFolderThatIsNoModelIsToldByWhatIsThere(names, told, quantctl,
                                                 tmp_path):
    folder = tmp_path / "model"
    for name in names:
        os.makedirs((folder / name).parent, exist_ok=True)
        (folder / name).write_bytes(b"")
    said = quantctl("quantize", folder, "-o", tmp_path / "out", "--spec",
                    "int8", code=4)
    assert "FILE_MALFORMED" in said and told in said
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.load(folder)
    assert caught.value.reason == "FILE_MALFORMED"
    assert told in str(caught.value)


def test_ShardsWithoutAnIndexAreNoModel(quantctl, tmp_path):
    """Nobody knows whether they are all, and of one model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in (1, 2):
        quantd.save(folder / f"model-0000{number}-of-00002.safetensors",
                    {f"{number}.weight": np.ones((4, 32), np.float32)})
    told = ("expected model.safetensors, or model.safetensors.index.json, "
            "which tells the files of a model, got 2 other files of tensors, "
            "such as model-00001-of-00002.safetensors")
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.load(folder)
    assert caught.value.reason == "FILE_MALFORMED"
    assert told in str(caught.value)
    for command in ("dequantize", "quantize --no-store --spec int8",
                    "evaluate --spec int8"):
        name, *flags = command.split()
        more = () if name == "evaluate" else ("-o", tmp_path / "out")
        said = quantctl(name, folder, *flags, *more, code=4)
        assert "FILE_MALFORMED" in said and told in said
    assert not (tmp_path / "out").exists()
