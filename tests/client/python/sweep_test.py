"""Specs measured on the files of a model."""

import json
import math
import subprocess

import numpy as np
import pytest

import quantd
from quantd import _files

SPECS = ["int8:per-channel", "int4:group:32:mse", "nvfp4", "lpbq",
         "int4:group:128"]


@pytest.fixture(name="folder")
def fixture_folder(tmp_path):
    """Two shards; one tensor that not all specs fit, one that is not finite,
    one whose outer maxima are found here, and one without a first pass."""
    rng = np.random.default_rng(5)
    folder = tmp_path / "llm"
    folder.mkdir()
    odd = rng.standard_normal((3, 5, 7)).astype(np.float16)
    broken = rng.standard_normal((64, 128), np.float32)
    broken[3, :5] = [np.nan, np.inf, -np.inf, np.nan, 1e30]
    shards = [{"a.weight": rng.standard_normal((64, 256), np.float32),
               "large.weight": rng.standard_normal((2048, 2176), np.float32),
               "a.bias": np.ones(64, np.float32)},
              {"b.weight": rng.standard_normal((32, 64)), "odd": odd,
               "broken": broken, "zero": np.zeros((4, 64), np.float32),
               "count": np.arange(6).reshape(2, 3)}]
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05}-of-00002.safetensors"
        quantd.save(folder / name, shard)
        weight_map.update(dict.fromkeys(shard, name))
    (folder / _files.INDEX_NAME).write_text(
        json.dumps({"weight_map": weight_map}))
    return folder


def measured_here(sweep):
    return {tensor.name: [
        [item.spec, item.error.reason] if item.error else
        [item.spec, item.metrics, item.size_bytes, item.noise_to_signal]
        for item in tensor.candidates] for tensor in sweep.tensors}


def test_TheFiguresAreThoseOfEvaluate(folder, client):
    specs = [*SPECS, "int8:block=1,64", "mxfp6_e3m2"]
    sweep = quantd.sweep_model(folder, specs, client=client,
                               min_sqnr_db=(15, 60))
    weights = quantd.load(folder)
    assert {tensor.name for tensor in sweep.tensors} == {
        "large.weight", "a.weight", "b.weight", "broken", "zero", "odd"}
    for tensor in sweep.tensors:
        assert (tensor.shape, tensor.dtype) == (
            weights[tensor.name].shape, weights.info(tensor.name).dtype)
        good = [item for item in tensor.candidates if item.error is None]
        # A block of two dimensions fits no tensor of three.
        assert [item.spec for item in tensor.candidates if item.error] == (
            ["int8:block=1,64"] if tensor.name == "odd" else [])
        noise = [item.noise_to_signal for item in good]
        assert noise == sorted(noise)
        evaluated = client.evaluate(weights[tensor.name],
                                    [item.spec for item in good])
        for item, expected in zip(good, evaluated, strict=True):
            assert item.size_bytes == expected.size_bytes
            for field in ("count", "non_finite_count", "clipped_low_count",
                          "clipped_high_count", "sum_squared_error",
                          "mean_squared_error", "max_absolute_error",
                          "sqnr_db"):
                np.testing.assert_equal(getattr(item.metrics, field),
                                        getattr(expected.overall, field))
            assert math.isnan(item.metrics.cosine_similarity)
            if tensor.name != "broken":
                assert item.noise_to_signal == pytest.approx(
                    10 ** (-expected.overall.sqnr_db / 10))
    (perfect,) = {item.metrics.sqnr_db for tensor in sweep.tensors
                  if tensor.name == "zero" for item in tensor.candidates}
    assert perfect == math.inf
    assert [total.failed_count for total in sweep.totals] == [0] * 6 + [1]
    for total in sweep.totals:
        found = {tensor.name: item for tensor in sweep.tensors
                 for item in tensor.candidates
                 if item.spec_index == total.spec_index and not item.error}
        assert total.size_bytes == sum(
            item.size_bytes for item in found.values())
        assert total.noise_to_signal_sum == pytest.approx(math.fsum(
            item.noise_to_signal for item in found.values()))
        lowest = found[total.min_sqnr_tensor]
        assert total.min_sqnr_db == (
            -math.inf if lowest.noise_to_signal == math.inf else
            lowest.metrics.sqnr_db)
    assert [item.target_met for item in sweep.mixtures] == [True, False]


def test_AMixtureIsWhatQuantizeModelTakes(tmp_path, folder, client, quantctl):
    budgets = {"max_bits_per_element": [6, 4.4], "max_size_bytes": 5 << 20}
    sweep = quantd.sweep_model(folder, SPECS, client=client,
                               exclude=["broken"], **budgets)
    assert [mixture.budget for mixture in sweep.mixtures] == [
        ("max_size_bytes", 5 << 20), ("max_bits_per_element", 6),
        ("max_bits_per_element", 4.4)]
    assert all(mixture.target_met for mixture in sweep.mixtures)
    # There is something to choose.
    assert len({tuple(mixture.specs.values())
                for mixture in sweep.mixtures}) == 3
    quantctl("sweep", folder, "--exclude", "broken",
             *(word for spec in SPECS for word in ("--spec", spec)),
             "--max-bits-per-element", 6, "-o", tmp_path / "mixture.txt")
    mixture = sweep.mixtures[1]
    assert dict(line.split("=", 1) for line in (
        tmp_path / "mixture.txt").read_text().splitlines()) == mixture.specs
    done = quantd.quantize_model(folder, tmp_path / "new", mixture.specs,
                                 client=client)
    assert sum(tensor.bytes_after for tensor in done.tensors
               if tensor.result == "quantized") == mixture.size_bytes
    assert {tensor.name for tensor in done.tensors
            if tensor.result == "quantized"} == set(mixture.specs)


def test_TensorsThatRuntimesFuseAreTied(tmp_path, client):
    source = tmp_path / "x.safetensors"
    rng = np.random.default_rng(8)
    weights = {f"{layer}.{which}_proj.weight": rng.standard_normal(
        (32, 256), np.float32) * size for layer in "ab"
        for which, size in zip("qkvo", (1, 2, 9, 1))}
    quantd.save(source, weights)
    specs = ["nvfp4", "int8:per-channel", "int4:group:32"]
    for keywords in ({}, {"ties": False},
                     {"ties": ["{layer}.{o,q}_proj.weight"]}):
        sweep = quantd.sweep_model(source, specs, client=client,
                                   max_bits_per_element=5.6,
                                   min_sqnr_db=22, **keywords)
        sqnr = {(tensor.name, item.spec): item.metrics.sqnr_db
                for tensor in sweep.tensors for item in tensor.candidates}
        for item in sweep.mixtures:
            assert item.target_met
            assert item.specs.keys() == weights.keys()
            assert item.min_sqnr_db == min(map(sqnr.get, item.specs.items()))
            if keywords.get("ties", True):
                for layer in "ab":
                    members = "oq" if "ties" in keywords else "qkv"
                    assert len({item.specs[f"{layer}.{which}_proj.weight"]
                                for which in members}) == 1
    alone = quantd.sweep_model(source, "nvfp4", client=client, ties=False)
    tied = quantd.sweep_model(source, "nvfp4", client=client)
    assert measured_here(alone)["a.o_proj.weight"] == (
        measured_here(tied)["a.o_proj.weight"])
    assert measured_here(alone)["a.q_proj.weight"] != (
        measured_here(tied)["a.q_proj.weight"])
    for ties in (["{x}.{a,b}.weight"], "q"):
        with pytest.raises(quantd.QuantdError) as caught:
            quantd.sweep_model(source, "int8", client=client, ties=ties)
        assert caught.value.reason == "ARGUMENT_INVALID"


def test_SpecsAreTextOrObjects(folder, client):
    one = quantd.sweep_model(folder, "int4:group:64:mse", client=client)
    other = quantd.sweep_model(folder, [quantd.EncodingSpec(
        "int4", granularity=quantd.group(64), method="mse")], client=client)
    assert [item.candidates[0].noise_to_signal for item in one.tensors] == [
        item.candidates[0].noise_to_signal for item in other.tensors]
    assert len(one.to_dicts()) == 6
    assert one.to_dicts()[0]["sqnr_db"] > 15
    assert "int4:group:64:mse" in one._repr_html_()


def test_WhatIsWrongIsSaidFirst(tmp_path, folder, client):
    def fails(specs="int8", source=folder, **keywords):
        with pytest.raises(quantd.QuantdError) as caught:
            quantd.sweep_model(source, specs, client=client, **keywords)
        return caught.value.reason
    for specs in ("int99", [], ["int8", 3]):
        assert fails(specs) == "ARGUMENT_INVALID", specs
    assert fails(include=["nothing"]) == "ARGUMENT_INVALID"
    assert fails(source=tmp_path / "none") == "FILE_UNREADABLE"
    quantd.quantize_model(folder, tmp_path / "new", "int8", client=client,
                          exclude=["broken"])
    assert fails(source=tmp_path / "new") == "FILE_UNSUPPORTED"
    with quantd.Client("127.0.0.1:1", retry_for=0) as nobody:
        with pytest.raises(quantd.QuantdError) as caught:
            quantd.sweep_model(folder, "int8", client=nobody)
    assert caught.value.reason == "SERVER_UNREACHABLE"


def test_OneSpecThatFailsLeavesTheOthers(tmp_path, client):
    source = tmp_path / "x.safetensors"
    rng = np.random.default_rng(1)
    quantd.save(source, {"a": rng.standard_normal((4, 6)),
                         "b": rng.standard_normal((4, 6, 2))})
    sweep = quantd.sweep_model(source, ["int8", "int4:block=2,3"],
                               client=client, max_bits_per_element=8)
    a, b = sweep.tensors
    assert [item.error for item in a.candidates] == [None, None]
    assert [item.spec for item in b.candidates] == ["int8", "int4:block=2,3"]
    assert b.candidates[1].error.name.tensor == "b"
    assert [total.failed_count for total in sweep.totals] == [0, 1]
    # A choice is there where one spec is.
    assert sweep.mixtures[0].specs["b"] == "int8"
    # A budget is for those that have one.
    sweep = quantd.sweep_model(source, ["int4:block=2,3", "int8:block=2,3"],
                               client=client, max_bits_per_element=10)
    assert sweep.mixtures[0].specs == {"a": "int4:block=2,3"}
    sweep = quantd.sweep_model(source, "int8:block=1", client=client,
                               max_bits_per_element=10)
    assert not sweep.mixtures[0].specs and not sweep.mixtures[0].target_met
    # What the server refuses, and not the client.
    sweep = quantd.sweep_model(source, ["codebook4", "int8", "lpbq"],
                               client=client)
    for tensor in sweep.tensors:
        assert [(item.spec, item.error and item.error.reason)
                for item in tensor.candidates] == [
            ("int8", None), ("lpbq", None), ("codebook4", "CODEBOOK_INVALID")]


def test_WithoutFiniteElementsThereIsNoError(tmp_path, client, quantctl):
    source = tmp_path / "x.safetensors"
    weight = np.random.default_rng(1).standard_normal((4, 64), np.float32)
    quantd.save(source, {"a": weight, "n": np.full_like(weight, np.nan)})
    specs = ["int8", "int4:group:32"]
    sweep = quantd.sweep_model(source, specs, client=client,
                               max_bits_per_element=7)
    for item in sweep.tensors[1].candidates:
        assert (item.metrics.count, item.noise_to_signal) == (0, 0)
        assert math.isnan(item.metrics.sqnr_db)
    assert [total.min_sqnr_tensor for total in sweep.totals] == ["a", "a"]
    assert set(sweep.mixtures[0].specs) == {"a", "n"}
    nothing = quantd.sweep_model(source, specs, client=client, include=["n"])
    assert all(math.isnan(total.min_sqnr_db) for total in nothing.totals)
    words = [word for spec in specs for word in ("--spec", spec)]
    for command in (("sweep", "--max-bits-per-element", 7), ("evaluate",)):
        document = quantctl(command[0], source, *words, *command[1:], "--json")
        for item in document["tensors"][1]["candidates"]:
            assert (item["sqnr_db"], item["count"]) == (None, 0)
        said = quantctl(command[0], source, *words, *command[1:])
        assert said.count("n/a") == 4 and "inf" not in said.replace(
            "not finite", "")
        assert "tensor n: 256 elements are not finite" in said
    said = quantctl("report", source, *words, "-o", tmp_path / "x.html")
    assert "tensor n: 256 elements are not finite" in said
    assert '"unmeasured":true' in (tmp_path / "x.html").read_text()
    said = quantctl("quantize", source, "-o", tmp_path / "y.safetensors",
                    "--evaluate")
    assert said.count("n/a") == 2


def test_TensorsWithoutElementsAreLeftOut(tmp_path, client, quantctl):
    source = tmp_path / "x.safetensors"
    weight = np.random.default_rng(1).standard_normal((4, 64), np.float32)
    quantd.save(source, {"a": weight, "none": np.empty((0, 64), np.float32),
                         "b": np.empty((4, 0), np.float32)})
    with pytest.warns(RuntimeWarning) as told:
        sweep = quantd.sweep_model(source, ["int8", "nvfp4"], client=client,
                                   max_bits_per_element=9)
    assert [str(one.message) for one in told] == [
        "quantd: left out, as they have no elements: none, b"]
    assert told[0].filename == __file__
    assert sweep.mixtures[0].target_met
    assert [tensor.name for tensor in sweep.tensors] == ["a"]
    for command in (("sweep", "--max-bits-per-element", 9, "-o",
                     tmp_path / "mixture.txt"),
                    ("evaluate",), ("calibrate", "--no-store"),
                    ("report", "-o", tmp_path / "x.html")):
        said = quantctl(command[0], source, "--spec", "int8:per-channel",
                        *command[1:])
        assert "left out, as they have no elements: none, b\n" in said
    assert (tmp_path / "mixture.txt").read_text() == (
        "a=int8:per-channel\n")
    # Whoever has seen nothing of a tensor is a source all the same.
    counted = quantctl("calibrate", source, "--model", "none", "--source", "s",
                       "--sequence", 1, "--json")
    assert [tensor["contribution"]["sequence"]
            for tensor in counted["tensors"]] == [1, 1, 1]
    with pytest.raises(quantd.QuantdError) as caught, pytest.warns():
        quantd.sweep_model(source, "int8", client=client, exclude=["a"])
    assert caught.value.reason == "ARGUMENT_INVALID"
    assert "expected tensors with elements" in quantctl(
        "evaluate", source, "--exclude", "a", code=2)


def test_ATensorThatTheServerCannotHoldIsCalibratedFirst(
        request, tmp_path, client, small_server, limited):
    source = tmp_path / "x.safetensors"
    weight = np.random.default_rng(0).standard_normal((4096, 2304), np.float32)
    quantd.save(source, {"large": weight, "small": weight[:64]})
    specs = ["int8", "uint8:percentile=99.9%", "nvfp4"]

    def sqnr(sweep):
        return {(tensor.name, item.spec): item.metrics and item.metrics.sqnr_db
                for tensor in sweep.tensors for item in tensor.candidates}

    expected = sqnr(quantd.sweep_model(source, specs, client=client))
    with pytest.raises(quantd.QuantdError) as caught:
        limited.evaluate(weight, "int8")
    assert caught.value.reason == "MEMORY_BUDGET"
    assert sqnr(quantd.sweep_model(source, specs, client=limited)) == (
        pytest.approx(expected, abs=.1))
    printed = json.loads(subprocess.run(
        [request.config.getoption("--quantctl"), "evaluate", source, "--json",
         "--server", small_server.address,
         *(word for spec in specs for word in ("--spec", spec))],
        check=True, stdout=subprocess.PIPE).stdout)
    assert {(tensor["name"], item["label"]): item["sqnr_db"]
            for tensor in printed["tensors"]
            for item in tensor["candidates"]} == (
                pytest.approx(expected, abs=.1))


def test_DataGoUpOnceToAServerThatHoldsNone(tmp_path, small_server, limited):
    source = tmp_path / "x.safetensors"
    weight = np.random.default_rng(0).standard_normal((4096, 2304), np.float32)
    quantd.save(source, {"a": weight})
    before = small_server.metric("quantd_payload_bytes_total",
                                 direction="in")
    sweep = quantd.sweep_model(source, SPECS, client=limited)
    sent = small_server.metric("quantd_payload_bytes_total",
                               direction="in")
    assert [item.error for item in sweep.tensors[0].candidates] == (
        [None] * len(SPECS))
    assert sent - before == weight.nbytes
    # With their encodings they would not fit.
    with pytest.raises(quantd.QuantdError) as caught:
        limited.evaluate(weight, "nvfp4:mse")
    assert caught.value.reason == "MEMORY_BUDGET"


def test_WhatDoesNotFitByItselfIsNotTriedAgain(limited):
    # Less than the budget, but not beside the scales.
    weight = np.random.default_rng(0).standard_normal((3600, 2048), np.float32)
    assert weight.nbytes < 32 << 20
    for call in (limited.quantize, limited.evaluate):
        with pytest.raises(quantd.QuantdError) as caught:
            call(weight, "nvfp4:mse")
        assert caught.value.reason == "MEMORY_BUDGET"
        assert caught.value.retry_after is None
        assert "is too small" in str(caught.value)
    assert "take min-max or larger blocks" in str(caught.value)


@pytest.mark.parametrize("name", ["a=b", "a*", "a\nb", "int8"])
def test_NamesThatNoMixtureCanHaveAreRefused(name, tmp_path, client, quantctl):
    path, output = tmp_path / "x.safetensors", tmp_path / "mixture.txt"
    quantd.save(path, {name: np.ones((4, 64), np.float32),
                       "ab": np.ones((4, 64), np.float32)})
    words = ("sweep", path, "--spec", "int8", "--min-sqnr", 10)
    said = quantctl(*words, "-o", output, code=2)
    assert "ARGUMENT_INVALID" in said
    assert f"tensor {json.dumps(name)} cannot be in a file of specs" in said
    assert not output.exists()
    quantctl(*words)
    # Names are patterns there, and nothing else.
    if "*" not in name:
        sweep = quantd.sweep_model(path, "int8", client=client, min_sqnr_db=10)
        assert set(sweep.mixtures[0].specs) == {name, "ab"}
        return
    quantd.sweep_model(path, "int8", client=client)
    with pytest.raises(quantd.QuantdError) as caught:
        quantd.sweep_model(path, "int8", client=client, min_sqnr_db=10)
    assert caught.value.reason == "ARGUMENT_INVALID"
    assert repr(name) in str(caught.value)


def test_NamesOfAMixtureMayHaveOtherLineBreaks(tmp_path, client, quantctl):
    path, mixture = tmp_path / "x.safetensors", tmp_path / "mixture.txt"
    name = "a\u2028b\x85"
    quantd.save(path, {name: np.ones((4, 64), np.float32)})
    quantctl("sweep", path, "--spec", "int8", "--min-sqnr", 10, "-o", mixture)
    quantctl("quantize", path, "-o", tmp_path / "a", "--no-store", "--spec",
             f"@{mixture}")
    done = quantd.quantize_model(path, tmp_path / "b", f"@{mixture}",
                                 client=client, store=False)
    assert [tensor.name for tensor in done.tensors
            if tensor.result == "quantized"] == [name]
