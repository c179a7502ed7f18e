"""Files of encodings that go out and come in, with a live quantd: those of
quantctl, and what is told of what they cannot hold."""

import asyncio
import json
import os

import numpy as np
import pytest

import quantd
import quantd.aio
from quantd import interchange
from quantd.v1 import encoding_service_pb2 as es

FORMATS = [interchange.format_name(value)
           for name, value in es.InterchangeFormat.items()
           if not name.endswith("_UNSPECIFIED")]
SHAPES = {"fc.weight": (8, 64), "fc.input": (4, 64),
          "conv.weight": (3, 2, 5, 5)}
SPECS = {"fc.weight": "int4:group:32:asymmetric", "fc.input": "uint8",
         "conv.weight": "int8:per-channel"}


def raised(call, *arguments, **keywords):
    with pytest.raises(quantd.QuantdError) as caught:
        call(*arguments, **keywords)
    return caught.value


def store(client, model, specs=SPECS, shapes=SHAPES):
    rng = np.random.default_rng(1)
    list(client.quantize_many(
        [quantd.QuantizeJob(rng.standard_normal(shapes[name], np.float32),
                            spec, name) for name, spec in specs.items()],
        model=model, store=True))


def encodings(client, model, revision=""):
    return {entry.name.tensor: client.get_encoding(entry.name).encoding
            for entry in client.list_encodings(model, revision)}


@pytest.fixture(name="model", scope="module")
def fixture_model(client):
    store(client, "i/net")
    return "i/net"


def test_TheFormatsAreThoseOfQuantctl(quantctl):
    said = quantctl("help", "export")
    assert [name for name in FORMATS if name not in said] == []
    assert {"json", "aimet-0.6.1", "aimet-1.0.0", "aimet-2.0.0", "onnx-qdq",
            "compressed-tensors"} <= set(FORMATS)


@pytest.mark.parametrize("format_name", FORMATS)
def test_AFileIsThatOfQuantctl(tmp_path, client, quantctl, model, format_name):
    done = client.export(model, format_name)
    # It ends with 1 where something is left out.
    quantctl("export", "--model", model, "--format", format_name, "-o",
             tmp_path / "a.json", code=int(bool(done.left_out)))
    want = (tmp_path / "a.json").read_bytes()
    assert (done.format, done.data) == (format_name, want)
    assert done.size_bytes == len(want)
    assert done.encoding_count + len(done.left_out) == 3
    at_path = client.export(model, format_name, tmp_path / "b.json")
    assert (tmp_path / "b.json").read_bytes() == want
    assert (at_path.data, at_path.size_bytes) == (b"", len(want))
    assert list(at_path.losses) == list(done.losses)

    async def elsewhere():
        async with quantd.aio.Client(client.target) as other:
            return await other.export(model, format_name)

    assert asyncio.run(elsewhere()) == done


def test_WhatIsLeftOutIsTold(client, model, tmp_path):
    done = client.export(model, "aimet-0.6.1")
    assert done.left_out == ["fc.weight"]
    (loss,) = [loss for loss in done.losses if loss.left_out]
    assert loss.tensor == "fc.weight" and loss.what
    assert done.losses.to_dicts()[0]["tensor"] == done.losses[0].tensor
    error = raised(client.export, model, "aimet-0.6.1", tmp_path / "none.json",
                   patterns=["fc.w*"])
    assert error.reason == "EXPORT_EMPTY"
    assert f"fc.weight: {loss.what}" in error.message
    assert not os.listdir(tmp_path)


def test_PatternsChooseTensors(client, model):
    def names(**keywords):
        document = json.loads(client.export(model, **keywords).data)
        return {key: [entry["name"] for entry in document[key]]
                for key in ("param_encodings", "activation_encodings")}

    # AIMET 1.0.0 has lists.
    assert names(format="aimet-1.0.0", patterns=["conv*", "*.input"]) == {
        "param_encodings": ["conv.weight"],
        "activation_encodings": ["fc.input"]}
    assert names(format="AIMET_1_0_0", patterns=("*.input",),
                 parameter_patterns=["fc.*"]) == {
        "param_encodings": ["fc.input"], "activation_encodings": []}
    assert "it matches none of 3" in raised(
        client.export, model, "json", patterns=["nothing*"]).message


@pytest.mark.parametrize("format_name", ["json", "aimet-1.0.0", "aimet-2.0.0",
                                         "aimet-2.1.0", "onnx-qdq"])
def test_WhatWentOutComesIn(tmp_path, client, model, format_name):
    path = tmp_path / "net.json"
    quantd.save(tmp_path / "net.safetensors",
                {name: np.zeros(shape, np.float32)
                 for name, shape in SHAPES.items()})
    tensors = quantd.load(tmp_path / "net.safetensors")
    client.export(model, format_name, path)
    name = f"i/{format_name}"
    checked = client.import_(path, name, tensors=tensors, dry_run=True)
    assert (checked.encoding_count, checked.dry_run) == (3, True)
    assert not list(client.list_encodings(name))
    done = client.import_(path, name, tensors=tensors, revision="r")
    assert (done.format, done.encoding_count, done.dry_run) == (
        format_name, 3, False)
    assert done.loss_count == len(done.losses) and not done.left_out
    got, want = encodings(client, name, "r"), encodings(client, model)
    assert got.keys() == want.keys()
    for tensor, encoding in want.items():
        np.testing.assert_array_equal(got[tensor].scale.ravel(),
                                      encoding.scale.ravel())
    if format_name == "json":
        assert got == want

    async def elsewhere():
        async with quantd.aio.Client(client.target) as other:
            return await other.import_(path.read_bytes(), name + "/aio",
                                       format=format_name, tensors=tensors)

    assert asyncio.run(elsewhere()) == done
    assert encodings(client, name + "/aio") == got


def test_HintsSayWhatTheFileDoesNot(client):
    # Of the names one is a pattern that matches all, and counts for the axis
    # alone.
    store(client, "i/square", {"w": "int8:per-channel:1"}, {"w": (8, 8)})
    data = client.export("i/square", "aimet-1.0.0").data
    error = raised(client.import_, data, "i/copy", tensors={
        "w": np.zeros((8, 8))})
    assert error.reason == "AXIS_UNKNOWN"
    client.import_(data, "i/copy", hints=[quantd.TensorHint("*", axis=-1)],
                   tensors={"w": np.zeros((8, 8))})
    want = encodings(client, "i/square")["w"]
    assert encodings(client, "i/copy")["w"] == want
    client.import_(data, "i/copy-2", hints=[
        quantd.TensorHint("w", shape=(8, 8), block_size=(0, 1))])
    assert encodings(client, "i/copy-2")["w"] == want
    # More of them than one message takes; the last one counts.
    many = [quantd.TensorHint(f"x{n}", (n + 1,)) for n in range(2500)]
    client.import_(data, "i/copy-3", hints=[*many, quantd.TensorHint(
        "w", (8, 8), (0, 1))])
    assert encodings(client, "i/copy-3")["w"] == want


def test_AnImportTellsWhatItLeavesOut(client):
    entry = {"bw": 8, "dtype": "INT", "enc_type": "PER_TENSOR", "is_sym": True,
             "name": "a", "offset": [-128], "scale": [0.5], "unknown": 3}
    document = {"version": "1.0.0", "activation_encodings": [entry],
                "param_encodings": [
                    {**entry, "name": "b", "dtype": "FLOAT", "bw": 16}],
                "excluded_layers": [], "quantizer_args": {}}
    data = json.dumps(document).encode()
    done = client.import_(data, "i/left")
    assert done.left_out == ["b"] and done.encoding_count == 1
    assert done.loss_count == len(done.losses)
    assert list(encodings(client, "i/left")) == ["a"]


@pytest.mark.parametrize("as_path", [False, True])
def test_LargeEncodingsGoInPieces(tmp_path, client, as_path):
    """Scales beyond what a header has, in a file of many pieces."""
    shape = (700, 1024)
    store(client, "i/large", {"w": "int8:group:4:asymmetric:scale=float16",
                              "v": "nvfp4"}, {"w": shape, "v": shape})
    path = tmp_path / "large.json"
    done = client.export("i/large", "json", path)
    assert done.size_bytes == path.stat().st_size > 3 << 20
    source = path if as_path else path.read_bytes()
    imported = client.import_(source, f"i/large-{as_path}")
    assert (imported.encoding_count, imported.loss_count) == (2, 0)
    got, want = encodings(client, f"i/large-{as_path}"), encodings(
        client, "i/large")
    assert want["w"].scale_count == 179200
    assert got == want


def test_FilesAreReplacedOnlyOnRequest(tmp_path, client, model):
    path = tmp_path / "net.json"
    path.write_text("mine")
    assert raised(client.export, model, "json", path).reason == "FILE_EXISTS"
    assert path.read_text() == "mine"
    client.export(model, "json", str(path), overwrite=True)
    assert json.loads(path.read_bytes())["format"] == "quantd-encodings"
    assert raised(client.export, model, "json",
                  tmp_path / "no" / "net.json").reason == "FILE_UNWRITABLE"


def test_ErrorsAreThoseThatAreDocumented(tmp_path, client, model):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for reason, call in [
            ("ENCODING_NOT_FOUND", lambda: client.export("i/none", "json")),
            ("ENCODING_NOT_FOUND", lambda: client.export(
                "i/none", "json", patterns=["*"])),
            ("ARGUMENT_INVALID", lambda: client.export(model, "aimet")),
            ("ARGUMENT_INVALID", lambda: client.export(model, "json",
                                                       patterns="fc*")),
            ("ARGUMENT_INVALID", lambda: client.export(model, "json", 3)),
            ("ARGUMENT_INVALID", lambda: client.import_(3, "i/x")),
            ("ARGUMENT_INVALID", lambda: client.import_(b"", "i/x", hints=[3])),
            ("ARGUMENT_INVALID", lambda: client.import_(
                b"", "i/x", hints=[quantd.TensorHint("a", shape=("b",))])),
            ("ARGUMENT_INVALID", lambda: client.import_(
                b"", "i/x", tensors={"a": 3})),
            ("INTERCHANGE_INVALID", lambda: client.import_(b"", "i/x")),
            ("INTERCHANGE_INVALID", lambda: client.import_(b"{}]", "i/x")),
            ("FILE_UNREADABLE", lambda: client.import_(
                tmp_path / "none.json", "i/x")),
            ("FILE_UNSUPPORTED", lambda: client.import_(fifo, "i/x")),
            ("FILE_UNSUPPORTED", lambda: client.import_(tmp_path, "i/x"))]:
        assert raised(call).reason == reason
    sound = client.export(model, "json").data
    # The end of the file is not sound: nothing of it is stored.
    assert raised(client.import_, sound[:-2], "i/half").reason == (
        "INTERCHANGE_INVALID")
    assert not list(client.list_encodings("i/half"))


def test_AFileThatEndsInTheMidstIsAnErrorOfTheFile(tmp_path, client,
                                                   monkeypatch):
    path = tmp_path / "net.json"
    path.write_bytes(b" " * (3 << 20))

    def pieces(self):
        yield b"{"
        self.error = raised(client.import_, tmp_path / "gone", "i/x")
        raise OSError("of the disk")

    monkeypatch.setattr(interchange.ImportUpload, "_pieces", pieces)
    assert raised(client.import_, path, "i/x").reason == "FILE_UNREADABLE"
