"""Whole models from Python: the bytes are those of quantctl."""

import json
import os
import shutil
import subprocess
import threading
import warnings

import numpy as np
import pytest

import quantd
from quantd import _files


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
def test_ItIsAnErrorIfNothingIsQuantized(name, tmp_path, quantctl, client):
    told = "nothing is quantized: {} has all tensors as they were"
    (tmp_path / "model").mkdir()
    quantd.save(tmp_path / "model/model.safetensors",
                {"a": np.zeros((0, 4)), "v": np.ones(7)})
    source, by_quantctl, by_python = (tmp_path / part for part in (
        name, "a", "b"))
    said = quantctl("quantize", source, "-o", by_quantctl, "--no-store",
                    "--spec", "int8", code=1)
    assert told.format(by_quantctl) in said
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.quantize_model(source, by_python, "int8", client=client)
    assert caught.value.reason == "ARGUMENT_INVALID"
    assert told.format(by_python) in str(caught.value)
    assert by_python.exists()
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
def test_AnIndexKeepsWhatStaysTrue(tmp_path, folder, quantctl, client,
                                   metadata, others, kept, told):
    path = folder / _files.INDEX_NAME
    weight_map = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps(
        {"metadata": metadata, "weight_map": weight_map, **others}))
    said = quantctl("quantize", folder, "-o", tmp_path / "a", "--no-store",
                    "--spec", "int8")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantd.quantize_model(folder, tmp_path / "b", "int8", client=client)
    text = (tmp_path / "a" / path.name).read_text()
    assert text == (tmp_path / "b" / path.name).read_text()
    index = json.loads(text)
    assert index.keys() == {"metadata", "weight_map"}
    assert index["metadata"].get("total_parameters") == kept
    assert (index["metadata"]["total_size"] > 5 and
            len(index["metadata"]) == (1 if kept is None else 2))
    note = f"of {path} not kept: {told}"
    notes = [str(warning.message) for warning in caught
             if "not kept" in str(warning.message)]
    assert notes == ([f"quantd: {note}"] if told else [])
    assert (f"{note}\n" in said) == bool(told), said
    assert ("not kept" in said) == bool(told)


SPECS = {"*q_proj*": "int4:group:32:asymmetric", "*.1.*": "nvfp4",
         "*": "int8:per-channel:mse"}


@pytest.mark.parametrize("streams", [1, 3])
def test_AFolderIsThatOfQuantctl(tmp_path, folder, quantctl, client, streams):
    quantctl("quantize", folder, "-o", tmp_path / "a", "--no-store",
             *(word for item in SPECS.items()
               for word in ("--spec", "=".join(item))))
    done = quantd.quantize_model(folder, tmp_path / "b", SPECS, client=client,
                                 streams=streams)
    expected = contents(tmp_path / "a")
    assert contents(tmp_path / "b") == expected
    assert len(expected) == 4
    assert done.left_out == ("config.json", "tokenizer.json")
    assert {row["result"] for row in done.tensors.to_dicts()} == {
        "quantized", "copied"}
    assert sum(tensor.bytes_before for tensor in done.tensors) == sum(
        quantd.load(folder).info(name).size_bytes
        for name in quantd.load(folder))

    # Each goes on with what the other one did.
    for name in ("a", "b"):
        (tmp_path / name / _files.INDEX_NAME).unlink()
        (tmp_path / name / "model-00002-of-00003.safetensors").unlink()
    done = quantd.quantize_model(folder, tmp_path / "a", SPECS, client=client)
    assert contents(tmp_path / "a") == expected
    assert [tensor.result for tensor in done.tensors].count("kept") == 12
    out = quantctl("quantize", folder, "-o", tmp_path / "b", "--no-store",
                   *(word for item in SPECS.items()
                     for word in ("--spec", "=".join(item))))
    assert "2 of 3 shards kept" in out
    assert contents(tmp_path / "b") == expected


@pytest.mark.parametrize("specs", [
    "int8", "int2:group:32", "mxfp4_e2m1", "nvfp4:mse", "nf4",
    "int8:scale=float16:percentile=0.999", "lpbq",
    ["*a*=float8_e4m3fn", "uint8:asymmetric"], "int8:per-channel:1"])
def test_AFileIsThatOfQuantctl(tmp_path, quantctl, client, specs):
    rng = np.random.default_rng(1)
    source = tmp_path / "x.safetensors"
    quantd.save(source, {
        "a": rng.standard_normal((8, 64), np.float32), "i": np.arange(5),
        "b": rng.standard_normal((64, 64)).astype(np.float16),
        "c": rng.standard_normal((3, 5, 64)), "zero": np.zeros((4, 4)),
        "empty": np.zeros((0, 4), np.float32), "v": np.ones(7),
        "rows": np.zeros((8, 0), np.float32),
        "columns": np.zeros((0, 64), np.float32)})
    words = [specs] if isinstance(specs, str) else specs
    quantctl("quantize", source, "-o", tmp_path / "a.safetensors",
             "--no-store", "--keep-going",
             *(word for spec in words for word in ("--spec", spec)))
    done = quantd.quantize_model(
        source, tmp_path / "b.safetensors", specs, client=client,
        keep_going=True)
    results = {tensor.name: tensor.result for tensor in done.tensors}
    assert {results[name] for name in ("empty", "rows", "columns")} == {
        "copied"}
    assert (tmp_path / "b.safetensors").read_bytes() == (
        tmp_path / "a.safetensors").read_bytes()
    assert done.file_bytes == (tmp_path / "b.safetensors").stat().st_size


def test_ATensorThatFailsLeavesNothing(tmp_path, client, quantctl):
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
    quantctl("quantize", source, "-o", tmp_path / "z.safetensors", "--no-store",
             "--spec", "int8", "--nan-policy", "reject", "--keep-going", code=1)
    assert target.read_bytes() == (tmp_path / "z.safetensors").read_bytes()


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
    for names in ({"model": "acme/not"}, {"revision": "v2"}):
        for call in (quantd.quantize_model, quantd.join_model):
            assert raised(call, folder, tmp_path / "b", "int8", client=client,
                          **names) == "ARGUMENT_INVALID"
    assert not (tmp_path / "b").exists()
    assert list(client.list_encodings("a")) == []
    assert list(client.list_encodings("acme/not")) == []
    quantd.quantize_model(folder, tmp_path / "b", "int8", client=client,
                          model="acme/kept", store=True)
    assert len(list(client.list_encodings("acme/kept"))) == 12


def revisions_of(client, model):
    """Formats of all encodings, by revision."""
    return {revision.revision: {
        stored.name.tensor: client.get_encoding(stored.name).encoding.format
        for stored in client.list_encodings(model, revision.revision)}
            for revision in client.list_revisions(model)}


def test_AStoredRevisionChangesAtOnce(tmp_path, folder, client):
    def do(target, spec, **keywords):
        return quantd.quantize_model(
            folder, tmp_path / target, spec, client=client, model="acme/atomic",
            store=True, nan_policy="reject", **keywords)

    names = [name for name in quantd.load(folder)
             if not name.endswith("norm.weight")]
    do("old", "int8")
    old = {"main": dict.fromkeys(names, "int8")}
    assert revisions_of(client, "acme/atomic") == old

    # A run that breaks off in the last shard.
    shard = folder / "model-00003-of-00003.safetensors"
    good, bad = shard.read_bytes(), bytearray(shard.read_bytes())
    bad[-2:] = b"\xc0\x7f"
    shard.write_bytes(bad)
    stat = shard.stat()
    with pytest.raises(quantd.QuantdError):
        do("new", "int4")
    found = revisions_of(client, "acme/atomic")
    assert found.pop("main") == old["main"]
    (draft,) = found
    assert draft.startswith("main.draft-")
    assert 8 <= len(found[draft]) < 12

    # The next one goes on, with what is in the draft; with another file the
    # draft has another name.
    shard.write_bytes(good)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    seen = []
    do("new", "int4", progress=lambda done: seen.append(
        revisions_of(client, "acme/atomic")["main"]))
    assert seen and all(one == old["main"] for one in seen)
    new = {"main": dict.fromkeys(names, "int4")}
    assert revisions_of(client, "acme/atomic") == new

    # Where nothing is left to do the store is left alone.
    before = {name: client.get_encoding(quantd.TensorName(
        "acme/atomic", name)).encoding for name in names}
    client.put_encoding(quantd.TensorName("acme/atomic", names[0]),
                        quantd.Encoding("int8", scale=[1]))
    assert {tensor.result for tensor in do("new", "int4").tensors} == {"kept"}
    assert revisions_of(client, "acme/atomic") == {
        "main": {**new["main"], names[0]: "int8"}}
    # One shard again: the encodings of the others are those of their files.
    (tmp_path / "new/model-00002-of-00003.safetensors").unlink()
    do("new", "int4")
    assert revisions_of(client, "acme/atomic") == new
    assert before == {name: client.get_encoding(quantd.TensorName(
        "acme/atomic", name)).encoding for name in names}


def two_files(tmp_path, client, model):
    """Files of a matrix each; the store has these and another one as int8."""
    rng = np.random.default_rng(1)
    for name in "ab":
        quantd.save(tmp_path / f"{name}.safetensors",
                    {name: rng.standard_normal((8, 64), np.float32)})
    for name in "abc":
        client.put_encoding(quantd.TensorName(model, name),
                            quantd.Encoding("int8", scale=[1]))

    def do(name, spec, **keywords):
        return quantd.quantize_model(
            tmp_path / f"{name}.safetensors", tmp_path / f"{name}.out", spec,
            client=client, model=model, store=True, overwrite=True, **keywords)
    return do


def before_publishing(monkeypatch, do):
    """Does something once, when a run is about to publish."""
    publish = quantd.Client.publish_revision

    def patched(*arguments, **keywords):
        monkeypatch.setattr(quantd.Client, "publish_revision", publish)
        do()
        return publish(*arguments, **keywords)
    monkeypatch.setattr(quantd.Client, "publish_revision", patched)


def test_RunsAtOnceKeepTheEncodingsOfEachOther(tmp_path, client, monkeypatch):
    do = two_files(tmp_path, client, "acme/two")
    before_publishing(monkeypatch, lambda: do("b", "int2"))
    do("a", "int4")
    assert revisions_of(client, "acme/two") == {
        "main": {"a": "int4", "b": "int2", "c": "int8"}}


def test_AfterAFailureNothingStaleIsPublished(tmp_path, client, monkeypatch):
    do = two_files(tmp_path, client, "acme/stale")

    def fail():
        raise quantd.QuantdError(None, "OTHER", "not now")
    before_publishing(monkeypatch, fail)
    assert raised(do, "a", "int4") == "OTHER"
    assert revisions_of(client, "acme/stale")["main"]["a"] == "int8"
    do("b", "int2")
    do("a", "int4")
    assert revisions_of(client, "acme/stale") == {
        "main": {"a": "int4", "b": "int2", "c": "int8"}}


def test_WhoMayNotReadIsToldBeforeTheWork(tmp_path, folder, client,
                                          monkeypatch):
    def refuse(*_, **__):
        raise quantd.QuantdError(None, "SCOPE_MISSING", "read")
    monkeypatch.setattr(quantd.Client, "list_encodings", refuse)
    monkeypatch.setattr(quantd.Client, "quantize_many", None)
    for part in (None, (0, 2)):
        assert raised(quantd.quantize_model, folder, tmp_path / "out", "int8",
                      client=client, model="acme/refused", store=True,
                      part=part) == "SCOPE_MISSING"
    assert not (tmp_path / "out").exists()


def test_AJoinPublishesWhatTheDraftLacks(tmp_path, folder, client):
    def do(target, **keywords):
        quantd.quantize_model(folder, tmp_path / target, SPECS, client=client,
                              model="acme/lost", store=True, **keywords)

    def encodings():
        return {stored.name.tensor: client.get_encoding(stored.name).encoding
                for stored in client.list_encodings("acme/lost")}

    do("whole")
    expected = encodings()
    assert len(expected) == 12
    # Whole shards, after all of which the draft is lost, and more parts than
    # shards.
    for count, lost in ((3, 2), (7, 3)):
        client.delete_revision("acme/lost", "main")
        for part in range(count):
            do(f"out{count}", part=(part, count))
            if part == lost:
                (draft,) = revisions_of(client, "acme/lost")
                client.delete_revision("acme/lost", draft)
        quantd.join_model(folder, tmp_path / f"out{count}", SPECS,
                          client=client, model="acme/lost", store=True)
        assert encodings() == expected


def test_EqualRunsHaveTheirOwnDrafts(tmp_path, folder, client):
    def do(target):
        return quantd.quantize_model(
            folder, tmp_path / target, "int4", client=client,
            model="acme/equal", store=True, nan_policy="reject")

    shard = folder / "model-00003-of-00003.safetensors"
    good, bad = shard.read_bytes(), bytearray(shard.read_bytes())
    bad[-2:] = b"\xc0\x7f"
    stat = shard.stat()
    shard.write_bytes(bad)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(quantd.QuantdError):
        do("one")
    (draft,) = revisions_of(client, "acme/equal")
    shard.write_bytes(good)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    do("two")
    found = revisions_of(client, "acme/equal")
    assert set(found) == {"main", draft}
    do("one")
    assert revisions_of(client, "acme/equal") == {"main": found["main"]}


def test_OnlyAJoinPublishesParts(tmp_path, folder, client):
    keywords = {"client": client, "model": "acme/parts", "store": True,
                "revision": "r1"}
    for part in range(3):
        quantd.quantize_model(folder, tmp_path / "new", SPECS, part=(part, 3),
                              **keywords)
        (draft,) = revisions_of(client, "acme/parts")
        assert draft.startswith("r1.draft-")
    assert raised(quantd.join_model, folder, tmp_path / "new", SPECS,
                  model="acme/parts", store=True) == "ARGUMENT_INVALID"
    quantd.join_model(folder, tmp_path / "new", SPECS, **keywords)
    formats = {name: tensor.encoding.format for name, tensor
               in quantd.load(tmp_path / "new").items()
               if isinstance(tensor, quantd.QuantizedTensor)}
    assert revisions_of(client, "acme/parts") == {"r1": formats}
    # A model of other files has another draft.
    other = folder / "model-00003-of-00003.safetensors"
    os.utime(other, (1, 1))
    quantd.quantize_model(folder, tmp_path / "other", SPECS, part=(0, 3),
                          **keywords)
    (last,) = set(revisions_of(client, "acme/parts")) - {"r1"}
    assert last.startswith("r1.draft-") and last != draft
    client.delete_revision("acme/parts", last)
    # A file has a draft, too.
    quantd.quantize_model(folder / "model-00001-of-00003.safetensors",
                          tmp_path / "x.safetensors", "int8", **keywords)
    # What it does not have stays.
    own = [name for name in formats if name.startswith(("layers.0.",
                                                        "layers.1."))]
    assert 0 < len(own) < len(formats)
    assert revisions_of(client, "acme/parts") == {
        "r1": {**formats, **dict.fromkeys(own, "int8")}}


@pytest.mark.parametrize("joiner", ["python", "quantctl"])
def test_PartsOfQuantctlHaveTheSameDraft(tmp_path, folder, client, quantctl,
                                         joiner):
    keywords = {"client": client, "model": f"acme/{joiner}", "store": True}
    target = tmp_path / "new"
    command = ["quantize", folder, "-o", target, "--model", f"acme/{joiner}",
               *(word for item in SPECS.items()
                 for word in ("--spec", "=".join(item)))]
    quantd.quantize_model(folder, target, SPECS, part=(0, 2), **keywords)
    quantctl(*command, "--part", "1/2")
    (draft,) = revisions_of(client, f"acme/{joiner}")
    assert draft.startswith("main.draft-")
    if joiner == "python":
        quantd.join_model(folder, target, SPECS, **keywords)
    else:
        quantctl(*command, "--join")
    assert revisions_of(client, f"acme/{joiner}") == {"main": {
        name: tensor.encoding.format for name, tensor
        in quantd.load(target).items()
        if isinstance(tensor, quantd.QuantizedTensor)}}


@pytest.mark.parametrize("joiner", ["python", "quantctl"])
def test_AFlippedByteOfAPartIsNotJoined(tmp_path, folder, client, quantctl,
                                        joiner):
    def join(expected):
        if joiner == "quantctl":
            return quantctl("quantize", folder, "-o", target, *words(),
                            "--join", code=4 if expected else 0)
        if not expected:
            return quantd.join_model(folder, target, SPECS)
        with pytest.raises(quantd.QuantdError) as caught:
            quantd.join_model(folder, target, SPECS)
        return str(caught.value)

    # The first count shares out whole shards, the other one does not.
    for count in (3, 8):
        target = tmp_path / f"parts{count}"
        for part in range(count):
            if part % 2:
                quantctl("quantize", folder, "-o", target, *words(), "--part",
                         f"{part}/{count}")
            else:
                quantd.quantize_model(folder, target, SPECS, client=client,
                                      part=(part, count))
        for path in sorted(target.glob("*.safetensors*")):
            if path.name.endswith(".json"):
                continue
            data = bytearray(path.read_bytes())
            for at in (-1, 8 + int.from_bytes(data[:8], "little")):
                data[at] ^= 1
                path.write_bytes(data)
                said = join("refused")
                assert "FILE_MALFORMED" in said and str(path) in said
                data[at] ^= 1
            path.write_bytes(data)
        join("")


@pytest.mark.parametrize("doer", ["python", "quantctl"])
@pytest.mark.parametrize("count", [None, 8])
def test_AFlippedByteIsDoneAgain(tmp_path, folder, client, quantctl, doer,
                                 count):
    target = tmp_path / "new"

    def do():
        """What is said."""
        said = ""
        for part in range(count or 1):
            if doer == "quantctl":
                said += quantctl(
                    "quantize", folder, "-o", target, *words(),
                    *(["--part", f"{part}/{count}"] if count else []))
                continue
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                quantd.quantize_model(folder, target, SPECS, client=client,
                                      part=(part, count) if count else None)
            said += "".join(str(one.message) for one in told)
        return said

    do()
    expected = contents(target)
    path = sorted(target.glob("*.safetensors*"))[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said = do()
    assert said.count("data are not those that were written") == 1
    assert f"{path}: done again" in said
    assert contents(target) == expected
    assert "done again" not in do()


def test_AServerThatGoesAwayEndsTheRun(tmp_path, folder):
    with quantd.Client("127.0.0.1:1", retry_for=0) as nobody:
        assert raised(quantd.quantize_model, folder, tmp_path / "x", "int8",
                      client=nobody, keep_going=True) == "SERVER_UNREACHABLE"
    assert list((tmp_path / "x").iterdir()) == []


def words(specs=None):
    """Those of quantctl."""
    return ["--no-store", *(word for item in (specs or SPECS).items()
                            for word in ("--spec", "=".join(item)))]


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("doer", ["python", "quantctl", "both"])
def test_PartsMakeTheFolderOfOneRun(tmp_path, folder, client, quantctl, doer,
                                    count):
    one, target = tmp_path / "one", tmp_path / "parts"
    quantd.quantize_model(folder, one, SPECS, client=client)

    def do(part):
        if doer == "python" or doer == "both" and part % 2:
            return quantd.quantize_model(folder, target, SPECS, client=client,
                                         part=(part, count))
        return quantctl("quantize", folder, "-o", target, *words(), "--part",
                        f"{part}/{count}")
    for part in range(1, count):
        do(part)
    assert raised(quantd.join_model, folder, target, SPECS) == (
        "FILE_INCOMPLETE")
    # Any may be done again, also in parallel.
    threads = [threading.Thread(target=do, args=(part,))
               for part in ((0, 0, 1) if doer == "python" else (0, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if doer == "python":
        assert {tensor.result for tensor in do(1).tensors} <= {"kept"}
        joined = quantd.join_model(folder, target, SPECS)
        assert len(joined.tensors) == 18
    else:
        quantctl("quantize", folder, "-o", target, *words(), "--join")
    assert contents(target) == contents(one)
    # Parts and joins that come late change nothing.
    do(0)
    quantd.join_model(folder, target, SPECS)
    assert contents(target) == contents(one)


def test_PartsOfAFileMakeTheFileOfOneRun(tmp_path, folder, client, quantctl):
    source = folder / "model-00001-of-00003.safetensors"
    one, target = tmp_path / "one.safetensors", tmp_path / "x.safetensors"
    specs = {"*q_proj*": "int4:group:32", "*": "int8"}
    quantd.quantize_model(source, one, specs, client=client)
    quantd.quantize_model(source, target, specs, client=client, part=(0, 2))
    assert sorted(path.name for path in tmp_path.glob("x.*")) == [
        "x.safetensors.part-00000-of-00002"]
    quantctl("quantize", source, "-o", target, *words(specs), "--part", "1/2")
    assert raised(quantd.join_model, source, target, "int4") == (
        "FILE_INCOMPLETE")
    assert raised(quantd.quantize_model, source, target, "int4", client=client,
                  part=(0, 2)) == "FILE_EXISTS"
    quantd.join_model(source, target, specs)
    assert target.read_bytes() == one.read_bytes()
    assert not list(tmp_path.glob("x.*part*"))
    for part in ((2, 2), (-1, 2), (0, 0), "1", "a/b", 3):
        assert raised(quantd.quantize_model, source, target, specs,
                      client=client, part=part) == "ARGUMENT_INVALID"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["npy", "selected", "several"])
@pytest.mark.parametrize("joiner", ["python", "quantctl"])
def test_AFileThatFallsToOnePartIsJoinedToo(tmp_path, folder, client, quantctl,
                                            joiner, kind, count):
    """One part does all that is selected, of a file that is only there once it
    is joined."""
    source, specs = folder / "model-00001-of-00003.safetensors", {"*": "int8"}
    if kind == "npy":
        source = tmp_path / "w.npy"
        np.save(source, np.ones((32, 64), np.float32))
    elif kind == "selected":
        specs = {"layers.0.q_proj*": "int8"}
    one, target = tmp_path / "one.safetensors", tmp_path / "x.safetensors"
    model = f"acme/{joiner}-{kind}-{count}"
    keywords = {"client": client, "model": model, "store": True}
    quantd.quantize_model(source, one, specs, client=client)
    for part in range(count):
        quantd.quantize_model(source, target, specs, part=(part, count),
                              **keywords)
    assert not target.exists()
    if joiner == "python":
        quantd.join_model(source, target, specs, **keywords)
    else:
        quantctl("quantize", source, "-o", target, "--model", model, "--join",
                 *words(specs)[1:])
    assert target.read_bytes() == one.read_bytes()
    assert list(revisions_of(client, model)) == ["main"]


def test_ALargeFileIsThatOfQuantctlToo(tmp_path, client, quantctl):
    rng = np.random.default_rng(3)
    source = tmp_path / "x.safetensors"
    quantd.save(source, {
        f"w{n}": rng.standard_normal((2048, 2048), np.float32)
        for n in range(4)} | {"b": rng.standard_normal(1 << 20, np.float32)})
    specs = {"w0": "int8:group:32", "w1": "nvfp4", "w2": "uint8:asymmetric",
             "w3": "int4:group:32:asymmetric"}
    quantctl("quantize", source, "-o", tmp_path / "a.safetensors",
             *words(specs))
    quantd.quantize_model(source, tmp_path / "b.safetensors", specs,
                          client=client)
    assert (tmp_path / "a.safetensors").read_bytes() == (
        tmp_path / "b.safetensors").read_bytes()


def test_WhatIsNotFiniteIsWarnedOf(tmp_path, client, quantctl):
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
            f"quantd: tensor 'a' has 2 NaN and 1 infinities{more}"]
        assert told[0].filename == __file__
        assert f"tensor a has 2 NaN and 1 infinities{more}\n" in quantctl(
            "quantize", source, "-o", tmp_path / "z", "--spec", spec, "--force")


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
        f"quantd: tensor 'a.weight': {text}"]
    assert told[0].filename == __file__
    for name, flags in (("y.safetensors", ("--spec", spec)),
                        ("y.gguf", ("--spec", spec)),
                        ("own.gguf", ("--spec", "q8_0", "--no-store"))):
        assert f"quantctl: tensor a.weight: {text}\n" in quantctl(
            "quantize", source, "-o", tmp_path / name, *flags)
    # Of q6_K, those of two super-blocks.
    for kind, said in (("q8_0", text), ("q6_K", text.replace("23", "2"))):
        with pytest.warns(RuntimeWarning) as told:
            quantd.save(tmp_path / "z.gguf", {"a.weight": weight},
                        gguf_types={"a.weight": kind}, overwrite=True)
        assert [str(one.message) for one in told] == [
            f"quantd: tensor 'a.weight': {said}"]
        assert told[0].filename == __file__
    assert f"quantctl: tensor a.weight: {said}\n" in quantctl(
        "quantize", source, "-o", tmp_path / "6.gguf", "--spec", "q6_K",
        "--no-store")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantd.quantize_model(source, tmp_path / "w", "int8:group:32",
                              client=client)
        # Where all are the same, there is a minimum alone.
        for kind in ("q8_0", "q4_1", "q6_K"):
            quantd.save(tmp_path / "w.gguf", {"a": np.ones((4, 256)),
                                              "b": np.zeros((4, 256))},
                        gguf_types={"a": kind, "b": kind}, overwrite=True)
    assert "float16" not in quantctl("quantize", source, "-o", tmp_path / "v",
                                     "--spec", "int8:group:32")


def test_OneScaleInPlaceOfGroupsIsWarnedOf(tmp_path, client, quantctl):
    source = tmp_path / "x.safetensors"
    quantd.save(source, {"flat": np.arange(256, dtype=np.float32),
                         "w": np.ones((4, 64), np.float32),
                         "one": np.ones(1, np.float32)})
    for spec, more in (
            ("int4:group:64", "group of 64; {} of one dimension make such"),
            ("int8:per-channel", "channel, as it has one dimension")):
        text = "one scale for all of it, not one for each " + more
        with pytest.warns(RuntimeWarning) as told:
            quantd.quantize_model(source, tmp_path / "y", spec, client=client,
                                  min_rank=0, overwrite=True)
        assert [str(one.message) for one in told] == [
            "quantd: tensor 'flat': " + text.format("blocks")]
        assert told[0].filename == __file__
        text = text.replace("{} of one dimension make such",
                            "block=64 makes such of one dimension")
        for command in (("quantize", "-o", tmp_path / "z", "--force"),
                        ("evaluate",), ("sweep",)):
            budget = ("--min-sqnr", "1") if command[0] == "sweep" else ()
            said = quantctl(command[0], source, *command[1:], "--spec", spec,
                            "--all", *budget)
            assert f"quantctl: tensor flat: {text}\n" in said, command
            assert "tensor w:" not in said and "tensor one:" not in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantd.quantize_model(source, tmp_path / "y", {
            "flat": quantd.EncodingSpec("int4", quantd.blocks(64))},
                              client=client, min_rank=0, overwrite=True)


def test_NamesThatCodesWouldTakeAreFree(tmp_path, client, quantctl):
    source, target = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    quantd.save(source, {"a": np.ones((4, 4)), "a.zero_point": np.zeros(4),
                         "b": np.ones((4, 4))})
    assert raised(quantd.quantize_model, source, target, "int8",
                  client=client) == "ARGUMENT_INVALID"
    done = quantd.quantize_model(source, target, "int8", client=client,
                                 keep_going=True)
    assert {tensor.name: tensor.result for tensor in done.tensors} == {
        "a": "failed", "a.zero_point": "copied", "b": "quantized"}
    quantctl("quantize", source, "-o", tmp_path / "z.safetensors", "--spec",
             "int8", "--keep-going", code=1)
    assert target.read_bytes() == (tmp_path / "z.safetensors").read_bytes()


def test_ShardsOfAnotherModelDoNotStay(tmp_path, folder, client):
    target = tmp_path / "new"
    quantd.quantize_model(folder, target, "int8", client=client)
    stale = target / "model-00003-of-00003.safetensors"
    (target / "config.json").write_text(json.dumps(
        {"quantization_config": {"quant_method": "compressed-tensors"}}))
    (target / "mine.safetensors").write_bytes(
        (folder / stale.name).read_bytes())
    # A model with two of these shards.
    index = json.loads((folder / _files.INDEX_NAME).read_text())
    (folder / _files.INDEX_NAME).write_text(json.dumps({"weight_map": {
        tensor: name for tensor, name in index["weight_map"].items()
        if name != stale.name}}))
    seen = []

    def look(_):
        seen.append(sorted(os.listdir(target)))
    quantd.quantize_model(folder, target, "int4", client=client,
                          overwrite=True, progress=look)
    assert stale.name in seen[0]
    # Without the index, which would make a model of old and new shards.
    assert seen[-1] == ["mine.safetensors", "model-00001-of-00003.safetensors",
                        "model-00002-of-00003.safetensors"]
    assert sorted(os.listdir(target)) == sorted(
        [*seen[-1], _files.INDEX_NAME])


@pytest.mark.parametrize("name, is_single", [
    ("model.safetensors", False), ("model-00009-of-00009.safetensors", False),
    ("mine.safetensors", True)])
def test_WeightsOfOthersDoNotStayBesideAModel(tmp_path, folder, client, name,
                                              is_single):
    if is_single:
        for entry in list(folder.iterdir()):
            entry.unlink()
        quantd.save(folder / "model.safetensors",
                    {"a.weight": np.ones((4, 32), np.float32)})
    target = tmp_path / "new"
    target.mkdir()
    (target / name).write_bytes(b"mine")
    for overwrite in False, True:
        with pytest.raises(quantd.QuantdError) as caught:
            quantd.quantize_model(folder, target, "int8", client=client,
                                  overwrite=overwrite)
        assert caught.value.reason == "ARGUMENT_INVALID"
        assert name in str(caught.value)
        assert os.listdir(target) == [name]


def test_APartThatIsDoneElsewhereMeanwhileIsDone(tmp_path, folder, client,
                                                 monkeypatch):
    source = folder / "model-00001-of-00003.safetensors"
    target = tmp_path / "x.safetensors"
    finish = _files.SafetensorsWriter.finish

    def do(specs):
        return quantd.quantize_model(source, target, specs, client=client,
                                     part=(0, 2))

    def with_another(specs):
        def run(writer, *arguments):
            monkeypatch.setattr(_files.SafetensorsWriter, "finish", finish)
            do(specs)
            return finish(writer, *arguments)
        monkeypatch.setattr(_files.SafetensorsWriter, "finish", run)
    with_another("int8")
    do("int8")
    (part,) = tmp_path.glob("x.*")
    part.unlink()
    # One of another run is not the same.
    with_another("int4")
    assert raised(do, "int8") == "FILE_EXISTS"


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
def test_FusedTensorsShareAnOuterScale(tmp_path, fused, quantctl, client,
                                       spec):
    weights = quantd.load(fused)
    largest = {name.replace("_proj.weight", ""): np.abs(weights[name]).max()
               for name in weights}
    quantctl("quantize", fused, "-o", tmp_path / "a", "--no-store", "--spec",
             spec)
    found = outer_scales(tmp_path / "a")
    for layer in range(2):
        for fuses in ("qkv", ("up", "gate"), "o"):
            members = [f"layers.{layer}.{part}" for part in fuses]
            expected = np.float32(max(largest[name] for name in members)
                                  ) / np.float32(6 * 448)
            if len(members) > 1 or spec == "nvfp4":
                np.testing.assert_allclose(
                    [found[name] for name in members], expected, rtol=1e-6)
    # Python and parts write the same bytes, and go on with the others' work.
    expected = contents(tmp_path / "a")
    quantd.quantize_model(fused, tmp_path / "b", spec, client=client)
    assert contents(tmp_path / "b") == expected
    for number in range(5):
        quantctl("quantize", fused, "-o", tmp_path / "c", "--no-store",
                 "--spec", spec, "--part", f"{number}/5")
    quantd.join_model(fused, tmp_path / "c", spec)
    assert contents(tmp_path / "c") == expected
    # What another shard has now decides on this one's scales.
    again = quantd.quantize_model(fused, tmp_path / "a", spec, client=client)
    assert {row.result for row in again.tensors} == {"kept"}
    os.utime(fused / "model-00002-of-00003.safetensors", (1, 1))
    again = quantd.quantize_model(fused, tmp_path / "a", spec, client=client)
    assert {row.result for row in again.tensors} == {"quantized"}


def test_TiesAsTheyAreAsked(tmp_path, fused, quantctl, client):
    quantctl("quantize", fused, "-o", tmp_path / "a", "--no-store", "--spec",
             "nvfp4", "--no-ties")
    quantd.quantize_model(fused, tmp_path / "b", "nvfp4", client=client,
                          ties=False)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert len(set(outer_scales(tmp_path / "a").values())) == 12
    tie = "layers.*.{o,up}_proj.weight"
    quantctl("quantize", fused, "-o", tmp_path / "c", "--no-store", "--spec",
             "nvfp4", "--tie", tie)
    quantd.quantize_model(fused, tmp_path / "d", "nvfp4", client=client,
                          ties=[tie])
    assert contents(tmp_path / "c") == contents(tmp_path / "d")
    found = outer_scales(tmp_path / "c")
    assert len({value for name, value in found.items()
                if name.endswith((".o", ".up"))}) == 1
    assert found["layers.0.q"] == found["layers.0.v"] != found["layers.1.v"]


@pytest.mark.parametrize("ties, what", [
    (["{layer}.{q,k}_proj.weight"], "one spec for all"),
    (["{layer}.{a,b}.weight"], "two tensors or more"),
    (["{layer}.weight"], "{A,B,...} or *"), (["{a,b"], "braces"),
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
        request, tmp_path, client, small_server, limited):
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
        subprocess.run(
            [request.config.getoption("--quantctl"), "quantize", source,
             "-o", tmp_path / "b.safetensors", "--force", "--spec", spec,
             "--model", "large", "--server", small_server.address], check=True)
        for name in "ab":
            model = quantd.load(tmp_path / f"{name}.safetensors")
            scale = model["large"].encoding.scale
            np.testing.assert_allclose(scale, expected.encoding.scale,
                                       rtol=.01)
            if spec == "int8":
                np.testing.assert_array_equal(model["large"].codes,
                                              expected.codes)
        stored = limited.get_encoding(quantd.TensorName("large", "large"))
        np.testing.assert_array_equal(stored.encoding.scale, scale)


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
def test_ASourceThatIsCutShortIsAnError(tmp_path, client, monkeypatch, suffix):
    source, target = tmp_path / ("x" + suffix), tmp_path / "y.safetensors"
    weight = np.random.default_rng(3).standard_normal((64, 256), np.float32)
    read = _files.FileBytes.read

    def cut(self, tensor=""):
        os.truncate(source, 4096)
        return read(self, tensor)

    for call in (lambda: quantd.quantize_model(source, target, "int8",
                                               client=client, keep_going=True),
                 lambda: quantd.sweep_model(source, "int8", client=client)):
        quantd.save(source, {"a.weight": weight, "b.weight": weight},
                    overwrite=True)
        with monkeypatch.context() as patched:
            patched.setattr(_files.FileBytes, "read", cut)
            with pytest.raises(quantd.QuantdError) as caught:
                call()
        assert caught.value.reason == "FILE_CHANGED"
        assert str(source) in str(caught.value)
        assert ".weight'" in str(caught.value)
        assert not target.exists()
