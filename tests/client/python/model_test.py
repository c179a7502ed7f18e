"""Whole models from Python, which are the work of quantctl."""

import dataclasses
import json
import math
import os
import shutil
import signal
import threading
import warnings

import grpc
import numpy as np
import pytest

import quantd
from quantd import _engine, _files


def save_bfloat16(path, tensors, **keywords):
    """Matrices as bfloat16, all else as it is."""
    quantd.save(path, {name: (array.view(np.uint32) >> 16).astype(np.uint16)
                       if array.ndim > 1 else array
                       for name, array in tensors.items()},
                element_types={name: "bfloat16" for name, array
                               in tensors.items() if array.ndim > 1},
                **keywords)


@pytest.fixture(name="folder")
def fixture_folder(tmp_path):
    """A model of three shards, with a tokenizer."""
    rng = np.random.default_rng(7)
    folder = tmp_path / "llm"
    folder.mkdir()
    weight_map = {}
    for shard in range(3):
        tensors = {}
        for layer in range(2):
            prefix = f"layers.{2 * shard + layer}"
            for name in ("q_proj", "down_proj"):
                tensors[f"{prefix}.{name}.weight"] = rng.standard_normal(
                    (48, 96), np.float32)
            tensors[f"{prefix}.norm.weight"] = rng.standard_normal(
                96, np.float32)
        name = f"model-{shard + 1:05}-of-00003.safetensors"
        save_bfloat16(folder / name, tensors, metadata={"format": "pt"})
        weight_map.update({tensor: name for tensor in tensors})
    (folder / _files.INDEX_NAME).write_text(
        json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def raised(call, *arguments, **keywords):
    with pytest.raises(quantd.QuantdError) as caught:
        call(*arguments, **keywords)
    return caught.value.reason


@pytest.mark.parametrize("name", ["model", "model/model.safetensors"])
def test_ItIsAnErrorIfNothingIsQuantized(name, tmp_path, client):
    (tmp_path / "model").mkdir()
    quantd.save(tmp_path / "model/model.safetensors",
                {"a": np.zeros((0, 4)), "v": np.ones(7)})
    source, target = tmp_path / name, tmp_path / "b"
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.quantize_model(source, target, "int8", client=client)
    assert caught.value.reason == "ARGUMENT_INVALID"
    assert (f"nothing is quantized: {target} has all tensors as they were"
            in str(caught.value))
    assert target.exists()
    # What is left as it is unless somebody names it is told.
    quantd.save(tmp_path / "head", {"w": np.ones((64, 256), np.float32)})
    with pytest.raises(quantd.QuantdError, match="unless specs name them: w"):
        quantd.quantize_model(tmp_path / "head", tmp_path / "x.gguf", "q4_0")
    # A part alone may have nothing to do.
    quantd.quantize_model(source, tmp_path / "c", "int8", client=client,
                          part="0/2")


@pytest.mark.parametrize("metadata, others, kept, told", [
    ({"total_size": 5, "total_parameters": 1 << 63}, {}, 1 << 63, ""),
    ({"total_parameters": True}, {}, None, "metadata.total_parameters"),
    ({"total_parameters": 1 << 64}, {}, None, "metadata.total_parameters"),
    ({"by": 1., "total_parameters": 9}, {"\u00e9": 1, "a": {}}, 9,
     "a, metadata.by, \u00e9"),
    ("text", {}, None, "metadata")])
def test_AnIndexKeepsWhatStaysTrue(tmp_path, folder, client, metadata, others,
                                   kept, told):
    path = folder / _files.INDEX_NAME
    weight_map = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps(
        {"metadata": metadata, "weight_map": weight_map, **others}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantd.quantize_model(folder, tmp_path / "b", "int8", client=client)
    index = json.loads((tmp_path / "b" / path.name).read_text())
    assert index.keys() == {"metadata", "weight_map"}
    assert index["metadata"].get("total_parameters") == kept
    assert (index["metadata"]["total_size"] > 5 and
            len(index["metadata"]) == (1 if kept is None else 2))
    assert [str(warning.message) for warning in caught] == (
        [f"quantd: of {path} not kept: {told}"] if told else [])


SPECS = {"*q_proj*": "int4:group:32:asymmetric", "*.1.*": "nvfp4",
         "*": "int8:per-channel:mse"}
WORDS = ["--no-store", *(word for item in SPECS.items()
                         for word in ("--spec", "=".join(item)))]


def test_AFolderIsThatOfQuantctl(tmp_path, folder, quantctl, client):
    quantctl("quantize", folder, "-o", tmp_path / "a", *WORDS)
    shown = []
    done = quantd.quantize_model(folder, tmp_path / "b", SPECS, client=client,
                                 progress=shown.append)
    expected = contents(tmp_path / "a")
    assert contents(tmp_path / "b") == expected
    assert len(expected) == 4
    assert done.left_out == ("config.json", "tokenizer.json")
    assert {row["result"] for row in done.tensors.to_dicts()} == {
        "quantized", "copied"}
    assert [tensor.bytes_before for tensor in done.tensors] == [
        quantd.load(folder).info(tensor.name).size_bytes
        for tensor in done.tensors]
    assert done.file_bytes == sum(
        len(data) for name, data in expected.items() if name != _files.INDEX_NAME)
    assert sum(shown) == sum(tensor.bytes_before for tensor in done.tensors
                             if tensor.result == "quantized")

    (tmp_path / "a/model-00002-of-00003.safetensors").unlink()
    done = quantd.quantize_model(folder, tmp_path / "a", SPECS, client=client)
    assert contents(tmp_path / "a") == expected
    assert [tensor.result for tensor in done.tensors].count("kept") == 12


def test_ASpecSaysAllToQuantctl(tmp_path, client):
    """Specs as objects make what the words for them make, or the client
    itself, where there are none."""
    rng = np.random.default_rng(1)
    source = tmp_path / "x.safetensors"
    weight = rng.standard_normal((8, 64), np.float32)
    quantd.save(source, {"w": weight})
    parse = quantd.EncodingSpec.parse
    specs = [parse(text) for text in (
        "int8", "int2:group:32", "mxfp4_e2m1:rule=even", "nvfp4:mse", "nf4",
        "int8:scale=float16:percentile=0.999", "lpbq", "uint8:asymmetric",
        "int8:per-channel:1", "int8:per-channel:-1", "int4:group:4:0",
        "int8:block=2,0", "nvfp4:per-tensor", "uint4:real-zero-point",
        "float8_e4m3fn:no-saturation", "int8:best-of=minmax,mse",
        "int4:fixed=-1,2", "uint8:percentile:tail=upper")]
    specs += [
        quantd.EncodingSpec("int8", quantd.blocks(4, 0), method="fixed",
                            range=([-1, -2], [1, 2])),
        quantd.EncodingSpec("int4", quantd.group(16), method="mse",
                            importance=quantd.Importance(weight=range(64))),
        quantd.EncodingSpec("codebook4", quantd.group(32),
                            codebook=np.linspace(-1, 1, 16).tolist())]
    for number, spec in enumerate(specs):
        quantd.quantize_model(source, tmp_path / f"{number}.safetensors",
                              {"w": spec}, client=client)
        made = quantd.load(tmp_path / f"{number}.safetensors")["w"]
        expected = client.quantize(weight, spec)
        np.testing.assert_array_equal(made.codes, expected.codes, str(spec))
        assert made.encoding == dataclasses.replace(
            expected.encoding, degenerate_count=0), spec
    # More than a command line may have.
    many = {f"w{number}": dataclasses.replace(
        specs[-2], importance=quantd.Importance(weight=rng.random(64)))
            for number in range(2000)}
    quantd.save(tmp_path / "many", dict.fromkeys(many, weight))
    quantd.quantize_model(tmp_path / "many", tmp_path / "out", many,
                          client=client)
    made = quantd.load(tmp_path / "out")
    for name in ("w0", "w1999"):
        np.testing.assert_array_equal(
            made[name].codes, client.quantize(weight, many[name]).codes)
    # Patterns may have any characters.
    names = ["int8", "int8:a", " a", "a=b", "@a", "{a", "a\nb", "-a", "a?"]
    quantd.save(tmp_path / "names", dict.fromkeys([*names, "b"], weight))
    quantd.quantize_model(tmp_path / "names", tmp_path / "out",
                          dict.fromkeys(names, "int2"), client=client,
                          overwrite=True)
    assert {name for name, tensor in quantd.load(tmp_path / "out").items()
            if isinstance(tensor, quantd.QuantizedTensor)} == set(names)


def test_ASchemeMakesAModelForRuntimes(tmp_path, folder, client):
    quantd.quantize_model(folder, tmp_path / "a", scheme="W8A8", client=client,
                          ignore=["*.1.down_proj"])
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == (
        "compressed-tensors")
    assert (tmp_path / "a/tokenizer.json").exists()
    for part in range(2):
        quantd.quantize_model(folder, tmp_path / "b", scheme="W8A8",
                              client=client, ignore=["*.1.down_proj"],
                              part=(part, 2))
    quantd.join_model(folder, tmp_path / "b", scheme="W8A8",
                      ignore=["*.1.down_proj"])
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_PartsMakeTheFolderOfOneRun(tmp_path, folder, client, quantctl):
    one, target = tmp_path / "one", tmp_path / "parts"
    quantd.quantize_model(folder, one, SPECS, client=client)

    def do(part):
        return quantd.quantize_model(folder, target, SPECS, client=client,
                                     part=(part, 3))
    do(1)
    quantctl("quantize", folder, "-o", target, *WORDS, "--part", "2/3")
    assert raised(quantd.join_model, folder, target, SPECS) == (
        "FILE_INCOMPLETE")
    # Any may be done again, also in parallel.
    threads = [threading.Thread(target=do, args=(part,)) for part in (0, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {tensor.result for tensor in do(1).tensors} <= {"kept"}
    assert len(quantd.join_model(folder, target, SPECS).tensors) == 18
    assert contents(target) == contents(one)
    for part in ((2, 2), (-1, 2), (0, 0), "1", "a/b"):
        assert raised(quantd.quantize_model, folder, target, SPECS,
                      client=client, part=part) == "ARGUMENT_INVALID"


def test_AFlippedByteIsNotJoinedAndDoneAgain(tmp_path, folder, client):
    # The first count shares out whole shards, the other one does not.
    for count in (3, 8):
        target = tmp_path / f"parts{count}"

        def do(target=target, count=count):
            for part in range(count):
                quantd.quantize_model(folder, target, SPECS, client=client,
                                      part=(part, count))
        do()
        expected = contents(target)
        for path in sorted(target.glob("*.safetensors*")):
            data = bytearray(path.read_bytes())
            for at in (-1, 8 + int.from_bytes(data[:8], "little")):
                data[at] ^= 1
                path.write_bytes(data)
                with pytest.raises(quantd.QuantdError) as caught:
                    quantd.join_model(folder, target, SPECS)
                assert caught.value.reason == "FILE_MALFORMED"
                assert str(path) in str(caught.value)
                data[at] ^= 1
            path.write_bytes(data)
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.warns(RuntimeWarning) as told:
            do()
        assert [str(one.message) for one in told] == [
            f"quantd: {path}: done again, as its data are not those that were "
            "written"]
        assert path.read_bytes() == expected[path.name]
        quantd.join_model(folder, target, SPECS)


def test_ATensorThatFailsLeavesNothing(tmp_path, client):
    source, target = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    weight = np.ones((4, 4), np.float32)
    bad = weight.copy()
    bad[1, 1] = np.nan
    quantd.save(source, {"a": weight, "bad": bad})
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.quantize_model(source, target, "int8", client=client,
                              nan_policy="reject")
    assert caught.value.name.tensor == "bad"
    assert "keep_going" in str(caught.value)
    assert os.listdir(tmp_path) == ["x.safetensors"]
    done = quantd.quantize_model(source, target, "int8", client=client,
                                 nan_policy="reject", keep_going=True)
    assert [tensor.result for tensor in done.tensors] == ["quantized",
                                                          "failed"]
    np.testing.assert_array_equal(quantd.load(target)["bad"], bad)


def test_WhatIsWrongIsSaidBeforeAnythingIsSent(tmp_path, folder):
    with quantd.Client("127.0.0.1:1", retry_for=0) as nobody:
        def fails(specs="int8", source=folder, target=tmp_path / "new",
                  **keywords):
            return raised(quantd.quantize_model, source, target, specs,
                          client=nobody, **keywords)
        for specs in ("int99", {"nothing*": "int8"}, {"*": "x"}, [], {},
                      {"*": "int8", "*q_proj*": "int4"}, ["int8", "int4"],
                      3):
            assert fails(specs) == "ARGUMENT_INVALID", specs
        assert fails(include=["nothing"]) == "ARGUMENT_INVALID"
        assert fails(target=folder) == "ARGUMENT_INVALID"
        assert fails(min_rank=3) == "ARGUMENT_INVALID"
        assert fails("int8:block=1,2,3") == "ARGUMENT_INVALID"
        assert fails(nan_policy="x") == "ARGUMENT_INVALID"
        assert fails(streams=0) == "ARGUMENT_INVALID"
        assert fails(source=tmp_path / "none") == "FILE_UNREADABLE"
        assert not (tmp_path / "new").exists()
        assert fails() == "SERVER_UNREACHABLE"


def test_OtherFilesAreNotReplacedUnlessAsked(tmp_path, folder, client):
    target = tmp_path / "new"
    quantd.quantize_model(folder, target, "int8", client=client)
    before = contents(target)
    assert raised(quantd.quantize_model, folder, target, "int4",
                  client=client) == "FILE_EXISTS"
    assert contents(target) == before
    # What is quantized is not quantized again.
    assert raised(quantd.quantize_model, target, tmp_path / "twice", "int4",
                  client=client) == "FILE_UNSUPPORTED"
    quantd.quantize_model(folder, target, "int4", client=client,
                          overwrite=True)
    assert contents(target) != before
    shutil.rmtree(target)
    target.mkdir()
    (target / "model-00002-of-00003.safetensors").write_text("mine")
    assert raised(quantd.quantize_model, folder, target, "int8",
                  client=client) == "FILE_EXISTS"


def test_EncodingsAreStoredOnlyWhenAsked(tmp_path, folder, client):
    quantd.quantize_model(folder, tmp_path / "a", "int8", client=client)
    assert raised(quantd.quantize_model, folder, tmp_path / "b", "int8",
                  client=client, revision="v2") == "ARGUMENT_INVALID"
    assert not (tmp_path / "b").exists()
    assert list(client.list_encodings("a")) == []
    quantd.quantize_model(folder, tmp_path / "b", "int8", client=client,
                          model="acme/not", store=False)
    assert list(client.list_encodings("acme/not")) == []
    for model, keywords in (("acme/kept", {"model": "acme/kept"}),
                            ("llm", {"store": True})):
        target = tmp_path / f"of-{model[:3]}"
        for part in range(2):
            quantd.quantize_model(folder, target, "int8", client=client,
                                  part=(part, 2), **keywords)
        assert [revision.revision.partition("-")[0] for revision
                in client.list_revisions(model)] == ["main.draft"]
        assert raised(quantd.join_model, folder, target, "int8",
                      **keywords) == "ARGUMENT_INVALID"
        quantd.join_model(folder, target, "int8", client=client, **keywords)
        assert len(list(client.list_encodings(model))) == 12


def test_AServerThatGoesAwayEndsTheRun(tmp_path, folder):
    with quantd.Client("127.0.0.1:1", retry_for=0) as nobody:
        assert raised(quantd.quantize_model, folder, tmp_path / "x", "int8",
                      client=nobody, keep_going=True) == "SERVER_UNREACHABLE"
    assert not (tmp_path / "x").exists()


def test_WhatIsNotFiniteIsWarnedOf(tmp_path, client):
    source = tmp_path / "x.safetensors"
    weight = np.ones((4, 32), np.float32)
    weight[1, :2] = np.nan
    weight[2, 3] = -np.inf
    quantd.save(source, {"a": weight, "b": np.ones((4, 32), np.float32)})
    for spec, more in (("int8", ""), (
            "mxfp8_e4m3", ": all elements of their blocks become NaN")):
        with pytest.warns(RuntimeWarning) as told:
            quantd.quantize_model(source, tmp_path / "y", spec, client=client,
                                  overwrite=True)
        assert [str(one.message) for one in told] == [
            f"quantd: tensor a has 2 NaN and 1 infinities{more}"]
        assert told[0].filename == __file__


def test_ScalesThatFloat16HasFewNumbersForAreWarnedOf(tmp_path, client,
                                                      quantctl):
    source = tmp_path / "x.safetensors"
    weight = np.random.default_rng(1).standard_normal((4, 256), np.float32)
    weight *= np.float32(2e-8)
    weight[0] = 0
    weight[1, :32] = 1
    quantd.save(source, {"a.weight": weight})
    text = ("23 scales are below 2^-20, where float16 has few numbers: their "
            "elements lose much")
    spec = "int8:group:32:scale=float16"
    with pytest.warns(RuntimeWarning) as told:
        quantd.quantize_model(source, tmp_path / "y", spec, client=client)
    assert [str(one.message) for one in told] == [
        f"quantd: tensor a.weight: {text}"]
    assert told[0].filename == __file__
    for name, flags in (("y.gguf", ("--spec", spec)),
                        ("own.gguf", ("--spec", "q8_0", "--no-store"))):
        assert f"quantctl: tensor a.weight: {text}\n" in quantctl(
            "quantize", source, "-o", tmp_path / name, *flags)
    # Of q6_K, those of two super-blocks.
    for kind, count in (("q8_0", 23), ("q6_K", 2)):
        with pytest.warns(RuntimeWarning) as told:
            done = quantd.quantize_model(source, tmp_path / "z.gguf", kind,
                                         overwrite=True)
        assert f"{count} scales are below 2^-20" in "".join(
            str(one.message) for one in told)
        assert done.tensors[0].coarse_scale_count == count
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantd.quantize_model(source, tmp_path / "w", "int8:group:32",
                              client=client)
    # Where all are the same, there is a minimum alone.
    quantd.save(tmp_path / "same", {"a.weight": np.ones((4, 256)),
                                    "b.weight": np.zeros((4, 256))})
    for kind in ("q8_0", "q4_1", "q6_K"):
        done = quantd.quantize_model(tmp_path / "same", tmp_path / "w.gguf",
                                     kind, overwrite=True, min_rank=0)
        assert {tensor.coarse_scale_count for tensor in done.tensors} == {0}


def test_OneScaleInPlaceOfGroupsIsWarnedOf(tmp_path, client, quantctl):
    source = tmp_path / "x.safetensors"
    quantd.save(source, {"flat": np.arange(256, dtype=np.float32),
                         "w": np.ones((4, 64), np.float32),
                         "one": np.ones(1, np.float32)})
    for spec, more in (
            ("int4:group:64",
             "group of 64; block=64 makes such of one dimension"),
            ("int8:per-channel", "channel, as it has one dimension")):
        text = ("tensor flat: one scale for all of it, not one for each " +
                more)
        with pytest.warns(RuntimeWarning) as told:
            quantd.quantize_model(source, tmp_path / "y", spec, client=client,
                                  min_rank=0, overwrite=True)
        assert [str(one.message) for one in told] == ["quantd: " + text]
        assert told[0].filename == __file__
        for command in (("evaluate",), ("sweep", "--min-sqnr", "1")):
            said = quantctl(command[0], source, *command[1:], "--spec", spec,
                            "--all")
            assert f"quantctl: {text}\n" in said, command
            assert "tensor w:" not in said and "tensor one:" not in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantd.quantize_model(source, tmp_path / "y", {
            "flat": quantd.EncodingSpec("int4", quantd.blocks(64))},
                              client=client, min_rank=0, overwrite=True)


@pytest.fixture(name="fused")
def fixture_fused(tmp_path):
    """A model whose fused tensors lie in different shards."""
    rng = np.random.default_rng(8)
    folder = tmp_path / "fused"
    folder.mkdir()
    weight_map = {}
    for number, names in enumerate((("q", "up"), ("k", "gate"), ("v", "o"))):
        name = f"model-{number + 1:05}-of-00003.safetensors"
        tensors = {f"layers.{layer}.{part}_proj.weight": rng.normal(
            0, 0.01 * 2**number, (32, 64)).astype(np.float32)
            for layer in range(2) for part in names}
        quantd.save(folder / name, tensors)
        weight_map.update({tensor: name for tensor in tensors})
    (folder / _files.INDEX_NAME).write_text(
        json.dumps({"weight_map": weight_map}))
    return folder


def outer_scales(path):
    stored = quantd.load(path)
    return {name.replace("_proj.weight", ""):
            float(stored[name].encoding.outer_scale[0]) for name in stored}


@pytest.mark.parametrize("spec", ["nvfp4", "nvfp4:mse"])
def test_FusedTensorsShareAnOuterScale(tmp_path, fused, client, spec):
    weights = quantd.load(fused)
    largest = {name.replace("_proj.weight", ""): np.abs(weights[name]).max()
               for name in weights}
    quantd.quantize_model(fused, tmp_path / "a", spec, client=client)
    found = outer_scales(tmp_path / "a")
    for layer in range(2):
        for fuses in ("qkv", ("up", "gate"), "o"):
            members = [f"layers.{layer}.{part}" for part in fuses]
            expected = np.float32(max(largest[name] for name in members)
                                  ) / np.float32(6 * 448)
            if len(members) > 1 or spec == "nvfp4":
                np.testing.assert_allclose(
                    [found[name] for name in members], expected, rtol=1e-6)
    # Parts make the same bytes.
    for number in range(5):
        quantd.quantize_model(fused, tmp_path / "c", spec, client=client,
                              part=(number, 5))
    quantd.join_model(fused, tmp_path / "c", spec)
    assert contents(tmp_path / "c") == contents(tmp_path / "a")
    # What another shard has now decides on this one's scales.
    again = quantd.quantize_model(fused, tmp_path / "a", spec, client=client)
    assert {row.result for row in again.tensors} == {"kept"}
    os.utime(fused / "model-00002-of-00003.safetensors", (1, 1))
    again = quantd.quantize_model(fused, tmp_path / "a", spec, client=client)
    assert {row.result for row in again.tensors} == {"quantized"}


def test_TiesAsTheyAreAsked(tmp_path, fused, client):
    quantd.quantize_model(fused, tmp_path / "a", "nvfp4", client=client,
                          ties=False)
    assert len(set(outer_scales(tmp_path / "a").values())) == 12
    quantd.quantize_model(fused, tmp_path / "c", "nvfp4", client=client,
                          ties=["layers.*.{o,up}_proj.weight"])
    found = outer_scales(tmp_path / "c")
    assert len({value for name, value in found.items()
                if name.endswith((".o", ".up"))}) == 1
    assert found["layers.0.q"] == found["layers.0.v"] != found["layers.1.v"]


@pytest.mark.parametrize("ties, what", [
    (["{layer}.{q,k}_proj.weight"], "one spec for all"),
    (["{layer}.{a,b}.weight"], "two tensors or more"),
    (["{layer}.weight"], "{A,B,...} or *"), (["{a,b"], "expected }"),
    ("{layer}.{q,k}_proj.weight", "list of patterns")])
def test_TiesThatCannotBe(tmp_path, fused, client, ties, what):
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.quantize_model(fused, tmp_path / "x", {
            "*k_proj*": "int8", "*": "nvfp4"}, client=client, ties=ties)
    assert caught.value.reason == "ARGUMENT_INVALID"
    assert what in caught.value.message
    assert not (tmp_path / "x").exists()
    # Where nobody asked, they are not tied.
    quantd.quantize_model(fused, tmp_path / "x", {
        "*k_proj*": "int8", "*": "nvfp4"}, client=client)


def test_ATensorThatTheServerCannotHoldIsCalibratedFirst(
        tmp_path, client, small_server, limited):
    source = tmp_path / "x.safetensors"
    weight = np.random.default_rng(0).standard_normal((4096, 2304), np.float32)
    quantd.save(source, {"large": weight, "small": weight[:64]})
    with pytest.raises(quantd.QuantdError) as caught:
        limited.quantize(weight, "int8")
    assert caught.value.reason == "MEMORY_BUDGET"
    assert "is too small" in str(caught.value)
    assert caught.value.retry_after is None
    # Nobody may write to what has no name.
    calibrated = limited.calibrate(weight, spec="int8")
    assert calibrated.encoding == client.quantize(weight, "int8").encoding
    assert calibrated.stored_encoding.etag == ""
    assert not list(limited.list_models())
    for spec in ("int8", "uint8:percentile=99.9%", "int4:mse"):
        expected = client.quantize(weight, spec)
        before = small_server.metric("quantd_payload_bytes_total",
                                     direction="in")
        quantd.quantize_model(source, tmp_path / "a.safetensors", spec,
                              client=limited, store=True, model="large",
                              overwrite=True)
        sent = small_server.metric("quantd_payload_bytes_total",
                                   direction="in") - before
        # The whole goes up twice, and not much of it before.
        assert sent < 2.5 * weight.nbytes
        model = quantd.load(tmp_path / "a.safetensors")
        scale = model["large"].encoding.scale
        np.testing.assert_allclose(scale, expected.encoding.scale, rtol=.01)
        if spec == "int8":
            np.testing.assert_array_equal(model["large"].codes,
                                          expected.codes)
        stored = limited.get_encoding(quantd.TensorName("large", "large"))
        np.testing.assert_array_equal(stored.encoding.scale, scale)


@pytest.fixture(name="engine")
def fixture_engine(tmp_path, monkeypatch):
    """Puts a script in the place of quantctl."""
    def put(script):
        path = tmp_path / f"engine-{len(list(tmp_path.iterdir()))}"
        path.write_text(f"""#!/bin/sh
if [ "$1" = --version ]; then echo "quantctl {quantd.__version__}"; exit; fi
progress=$(tr '\\0' '\\n' < "$2" | sed -n s/--progress-fd=//p)
{script}
""")
        path.chmod(0o755)
        monkeypatch.setenv("QUANTD_QUANTCTL", str(path))
    return put


def test_TheEngineGetsWhatTheClientWasGiven(engine, tmp_path, monkeypatch):
    words = tmp_path / "words"
    engine(f"""tr '\\0' '\\n' < "$2" > {words}
env | grep -c ^QUANTD_ >> {words}
echo '{{"tensors": [], "written": true, "file_bytes": 0}}'""")
    monkeypatch.setenv("QUANTD_TLS_CA", "/nowhere")
    monkeypatch.chdir(tmp_path)
    for name in ("ca", "token"):
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(grpc, "ssl_channel_credentials",
                        lambda *_: grpc.local_channel_credentials())
    with quantd.Client("other:1", credentials=quantd.tls_credentials("ca"),
                       token_file="token", balance=True, timeout=math.inf,
                       max_retries=2.7, retry_for=7) as made:
        monkeypatch.chdir("/")
        quantd.quantize_model(tmp_path / "x", "-", client=made, part="0/2",
                              ignore=[], nan_policy="zero_point", streams=3)
    got = words.read_text().split("\n")
    assert "0" == got[-2]
    for flag in ("--server=other:1", "--tls", f"--tls-ca={tmp_path}/ca",
                 f"--token-file={tmp_path}/token", "--balance",
                 "--timeout=1000000000.000000000", "--retries=2",
                 "--retry-for=7.000000000", "--output=./-", "--ignore=",
                 "--part=0/2", "--nan-policy=zero-point", "--streams=3",
                 str(tmp_path / "x")):
        assert flag in got, flag
    assert not any(word.startswith(("--store", "--no-store", "--spec"))
                   for word in got)
    made.close()
    assert raised(quantd.quantize_model, "x", "y", "int8",
                  client=made) == "CLIENT_CLOSED"
    with quantd.Client("other:1",
                       credentials=grpc.local_channel_credentials()) as made:
        assert raised(quantd.quantize_model, "x", "y", "int8",
                      client=made) == "ARGUMENT_INVALID"


def test_WhatIsNoArgumentIsRefused(tmp_path, client):
    quantd.save(tmp_path / "x", {"w": np.ones((4, 32), np.float32)})
    for keywords in ({"part": 3}, {"part": (1, 2, 3)}, {"ties": None},
                     {"importance": "imatrix.gguf"}, {"importance": {}},
                     {"include": ["a\0b"]}, {"include": [""]},
                     {"specs": ""}, {"target": ""}, {"source": ""},
                     {"rounding": "x"}, {"inputs": "x"},
                     {"include": ["x" * 200_000]}):
        given = {"source": tmp_path / "x", "target": tmp_path / "y",
                 "specs": "int8", **keywords}
        assert raised(quantd.quantize_model, client=client, **given) == (
            "ARGUMENT_INVALID"), keywords
    assert os.listdir(tmp_path) == ["x"]


def test_AForkMeanwhileDoesNotHoldTheCall(engine, tmp_path, client):
    """A process that has the pipe of the progress and lives on."""
    engine("""sleep 20 & echo $! > "$0.pid"
echo '{"tensors": [], "written": true, "file_bytes": 0}'""")
    quantd.quantize_model(tmp_path / "x", tmp_path / "y", client=client,
                          part="0/2")
    (path,) = tmp_path.glob("*.pid")
    pid = int(path.read_text())
    os.kill(pid, 0)
    os.kill(pid, signal.SIGTERM)


@pytest.mark.parametrize("script, code, reason, message", [
    ("echo 'quantctl: FILE_CHANGED: x.gguf: tensor a: cut' >&2; exit 4",
     "ABORTED", "FILE_CHANGED", "x.gguf: tensor a: cut"),
    ("echo '--rounding: a is not in {b}' >&2; exit 2", "INVALID_ARGUMENT",
     "ARGUMENT_INVALID", "rounding: a is not in {b}"),
    ("kill -9 $$", "CANCELLED", "ENGINE_ENDED", "was ended by Killed"),
    ("echo oh >&2; exit 7", "INTERNAL", "ENGINE_ENDED", "exit code 7: oh"),
    ("""echo '{"error": {"code": "NOT_FOUND", "reason": "FILE_UNREADABLE",
        "message": "x: see --force and a--force"}}'; exit 4""",
     "NOT_FOUND", "FILE_UNREADABLE", "x: see overwrite=True and a--force")])
def test_AnEngineThatEndsIsAnError(engine, tmp_path, client, script, code,
                                   reason, message):
    engine(script)
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.quantize_model(tmp_path / "x", tmp_path / "y", "int8",
                              client=client)
    assert (caught.value.code.name, caught.value.reason) == (code, reason)
    assert caught.value.message.endswith(message), caught.value.message


def test_AnInterruptEndsTheEngineFirst(engine, tmp_path, client):
    ended = tmp_path / "ended"
    engine(f"""trap '' INT
trap 'echo yes > {ended}; kill $sleeper; exit 130' TERM
echo '{{"done_bytes":1,"total_bytes":2}}' > /dev/fd/$progress
sleep 60 & sleeper=$!
wait""")

    def interrupt(_):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        quantd.quantize_model(tmp_path / "x", tmp_path / "y", "int8",
                              client=client, progress=interrupt)
    assert ended.read_text() == "yes\n"


def test_AnEngineThatDoesNotEndIsKilled(engine, tmp_path, client, monkeypatch):
    monkeypatch.setattr(_engine, "_STOP_S", .1)
    pid = tmp_path / "pid"
    engine(f"""trap '' INT TERM
echo $$ > {pid}
echo '{{"done_bytes":1,"total_bytes":2}}' > /dev/fd/$progress
exec sleep 60""")

    def interrupt(_):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        quantd.quantize_model(tmp_path / "x", tmp_path / "y", "int8",
                              client=client, progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_WithoutTheEngineItIsSaidWhatIsMissing(tmp_path, client, monkeypatch):
    other = tmp_path / "quantctl"
    other.write_text("#!/bin/sh\necho quantctl 0.0.1\n")
    other.chmod(0o755)
    for path, told in (("/nowhere", "No such file"), (other, "0.0.1")):
        monkeypatch.setenv("QUANTD_QUANTCTL", str(path))
        with pytest.raises(quantd.QuantdError, match=told) as caught:
            quantd.quantize_model(tmp_path / "x", tmp_path / "y", "int8",
                                  client=client)
        assert caught.value.reason == "ENGINE_MISSING"
    monkeypatch.delenv("QUANTD_QUANTCTL")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert raised(quantd.quantize_model, tmp_path / "x", tmp_path / "y", "int8",
                  client=client) == "ENGINE_MISSING"
    assert not (tmp_path / "y").exists()
