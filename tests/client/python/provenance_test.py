"""What made a stored encoding: the service says it, whatever a request says."""

import dataclasses
import json

import numpy as np
import pytest

import quantd
from quantd.v1 import encoding_pb2


def name(tensor, revision="main"):
    return quantd.TensorName("made", tensor, revision)


def made(client, tensor, revision="main"):
    stored = client.get_encoding(name(tensor, revision))
    assert stored.provenance.quantd_version == quantd.__version__
    return stored.provenance


@pytest.fixture(scope="module")
def array():
    return np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)


def test_elements_tell_the_spec(client, array):
    spec = quantd.EncodingSpec.parse("int4:group:32:mse:half-step")
    result = client.calibrate(array, name("calibrated"), spec="uint8:mse")
    for provenance in (result.stored_encoding.provenance,
                       made(client, "calibrated")):
        assert provenance.origin == "elements"
        assert provenance.prediction == result.prediction
        assert provenance.prediction is not None
        assert provenance.statistics_digest_xxh3 == 0
    # In one message, and with scales that come beside the codes.
    for chunks, tensor in ((False, "quantized"), (True, "in-chunks")):
        if chunks:
            list(client.quantize_chunks([array], spec, shape=array.shape,
                                        name=name(tensor), store=True))
        else:
            client.quantize(array, spec, name=name(tensor), store=True)
        provenance = made(client, tensor)
        assert provenance.origin == "elements"
        assert provenance.spec == spec.to_proto(2)
        assert provenance.prediction is None


def test_long_lists_are_left_out(client, array):
    weights = np.arange(64) + 1.
    spec = dataclasses.replace(
        quantd.EncodingSpec.parse("int4:group:32:mse"),
        importance=quantd.Importance(weight=weights.tolist(), axis=1))
    client.quantize(array, spec, name=name("weighed"), store=True)
    told = made(client, "weighed").spec
    assert told.HasField("importance") and not told.importance.weight
    assert told.importance.axis == 1
    client.calibrate(array, name("ranges"), quantd.EncodingSpec(
        "int8", quantd.per_channel(0), method="fixed",
        range=([-1.] * 16, [1.] * 16)))
    told = made(client, "ranges").spec
    assert told.method == encoding_pb2.CALIBRATION_METHOD_FIXED_RANGE
    assert not told.scale_range_min and not told.scale_range_max
    codebook = quantd.EncodingSpec("codebook2", codebook=[-1, -.25, .25, 1])
    client.quantize(array, codebook, name=name("codebook"), store=True)
    assert not made(client, "codebook").spec.codebook


def test_statistics_tell_their_digest(client, array):
    parts = np.split(array, 4)

    def contribute(tensor, order, sources):
        for sequence, part in enumerate(order, 1):
            client.calibrate(parts[part], name(tensor),
                             contribution=quantd.Contribution(
                                 f"rank-{part % sources}", sequence))
        return client.get_statistics(name(tensor)).state_digest_xxh3

    digest = contribute("a.input", range(4), 1)
    # The same data, however they came; and other data.
    assert contribute("b.input", (2, 0, 3, 1), 4) == digest
    assert contribute("c.input", range(3), 1) != digest
    computed = client.compute_encodings("made", "uint8:percentile=0.99",
                                        overrides=[("a*", "uint4:mse")])
    for one in computed:
        provenance = made(client, one.name.tensor)
        assert one.stored_encoding.provenance == provenance
        assert provenance.origin == "statistics"
        assert provenance.prediction == one.prediction
        is_a = one.name.tensor == "a.input"
        assert provenance.spec.method == (
            encoding_pb2.CALIBRATION_METHOD_MSE if is_a
            else encoding_pb2.CALIBRATION_METHOD_PERCENTILE)
        if one.name.tensor != "c.input":
            assert provenance.statistics_digest_xxh3 == digest
    # Sent again, they count once.
    assert contribute("a.input", range(4), 1) == digest
    # A contribution later the encoding is of other statistics, and says so.
    client.calibrate(array, name("a.input"), contribution=quantd.Contribution(
        "late", 1))
    later = client.get_statistics(name("a.input"), with_state=True)
    assert later.state_digest_xxh3 != digest
    assert made(client, "a.input").statistics_digest_xxh3 == digest
    # Contributed and computed at once.
    client.calibrate(array, name("a.input"), spec="uint8",
                     contribution=quantd.Contribution("late", 2))
    provenance = made(client, "a.input")
    assert provenance.origin == "statistics"
    assert provenance.statistics_digest_xxh3 == client.get_statistics(
        name("a.input")).state_digest_xxh3


def test_the_digest_is_that_of_the_state(client, array):
    xxhash = pytest.importorskip("xxhash")
    client.calibrate(array, name("digest"), contribution=quantd.Contribution(
        "s", 1, granularity=quantd.per_channel(0)))
    stored = client.get_statistics(name("digest"), with_state=True)
    assert stored.state_digest_xxh3 == xxhash.xxh3_64_intdigest(
        stored.state.SerializeToString(deterministic=True))


def test_what_clients_put_is_theirs(client, array, tmp_path):
    encoding = client.quantize(array, "int8:per-channel").encoding
    client.put_encoding(name("put"), encoding)
    assert made(client, "put").origin == "client"
    # Given with the tensor, in one message and in chunks.
    client.quantize(array, encoding, name=name("given"), store=True)
    assert made(client, "given").origin == "client"
    large = client.quantize(np.ones((300_000, 2), np.float32),
                            "int8:per-channel").encoding
    client.put_encoding(name("large"), large)
    assert made(client, "large").origin == "client"
    # A file may be of anybody, also that of quantd itself.
    exported = client.export("made", "json", patterns=["put"])
    assert b"provenance" not in exported.data
    client.import_(exported.data, "made", revision="imported")
    provenance = made(client, "put", "imported")
    assert (provenance.origin, provenance.interchange_format) == (
        "import", "INTERCHANGE_FORMAT_JSON")
    assert provenance.spec is None
    del tmp_path


def test_no_request_says_it(client, array):
    """Nor does the field that the store keeps it in."""
    encoding = client.quantize(array, "int8").encoding
    message = encoding.to_proto()
    forged = encoding_pb2.EncodingProvenance(
        origin=encoding_pb2.ENCODING_ORIGIN_STATISTICS,
        quantd_version="9.9.9").SerializeToString()
    # Field 1000, length-delimited.
    message.MergeFromString(b"\xc2\x3e" + bytes([len(forged)]) + forged)
    forged_encoding = quantd.Encoding.from_proto(message)
    original = type(forged_encoding).to_proto
    try:
        type(forged_encoding).to_proto = lambda self: message
        client.put_encoding(name("forged"), forged_encoding)
    finally:
        type(forged_encoding).to_proto = original
    provenance = made(client, "forged")
    assert provenance.origin == "client"


def test_publishing_keeps_it_and_lists_leave_it_out(client, array):
    client.calibrate(array, name("x", "draft"), spec="uint8")
    client.publish_revision("made", "draft", "release")
    assert made(client, "x", "release").origin == "elements"
    (listed,) = client.list_encodings("made", "release")
    assert listed.provenance is None


def test_quantctl_shows_it(client, array, quantctl, tmp_path):
    file = tmp_path / "a.safetensors"
    quantd.save(file, {"w": array, "v": array})
    quantctl("quantize", file, "-o", tmp_path / "q.safetensors", "--spec",
             "w=int4:group:32:mse", "--spec", "v=int8", "--model", "made/cli")
    client.calibrate(array, quantd.TensorName("made/cli", "s"),
                     contribution=quantd.Contribution("s", 1))
    quantctl("encodings", "compute", "--model", "made/cli", "--spec",
             "uint8:percentile=0.99")
    got = quantctl("encodings", "get", "--model", "made/cli", "w")
    document = json.loads(got)
    assert document["provenance"]["origin"] == "ENCODING_ORIGIN_ELEMENTS"
    assert document["provenance"]["spec"]["method"] == "CALIBRATION_METHOD_MSE"
    # What `get` prints is put as the client's, whatever it says.
    (tmp_path / "w.json").write_text(got)
    quantctl("encodings", "put", "--model", "made/cli", "p", "-f",
             tmp_path / "w.json")
    quantctl("export", "--model", "made/cli", "-o", tmp_path / "e.json")
    quantctl("import", tmp_path / "e.json", "--model", "made/cli-2")
    rows = {}
    for model in ("made/cli", "made/cli-2"):
        table = quantctl("encodings", "list", "--model", model)
        lines = table.splitlines()
        column = lines[0].index("METHOD")
        end = lines[0].index("UPDATED")
        for line in lines[1:]:
            rows[model, line.split()[0]] = line[column:end].strip()
    assert rows["made/cli", "w"] == "mse"
    assert rows["made/cli", "v"] == "minmax"
    assert rows["made/cli", "s"] == "percentile, statistics"
    assert rows["made/cli", "p"] == "put by a client"
    assert rows["made/cli-2", "w"] == "imported from json"
