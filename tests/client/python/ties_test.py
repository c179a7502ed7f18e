"""Tensors that share a scale, by stored statistics: quantctl and the client
find the same groups, and the server gives what their data give."""

import asyncio

import numpy as np
import pytest

import quantd
import quantd.aio

NAMES = [f"l.{n}.{which}_proj.weight" for n in range(2) for which in "qkvo"]


@pytest.fixture(name="arrays", scope="module")
def fixture_arrays(quantctl, tmp_path_factory):
    """Of model "ties", whose statistics are those of groups of 16."""
    rng = np.random.default_rng(7)
    arrays = {name: rng.standard_normal((8, 64), np.float32) * np.float32(
        4.**number) for number, name in enumerate(NAMES)}
    path = tmp_path_factory.mktemp("ties") / "x.safetensors"
    quantd.save(path, arrays)
    quantctl("calibrate", path, "--model", "ties", "--source", "a",
             "--sequence", "1", "--granularity", "group:16",
             "--force-statistics")
    return arrays


def outer_scales(client):
    return {name: client.get_encoding(quantd.TensorName(
        "ties", name)).encoding.outer_scale.item() for name in NAMES}


def test_FusedTensorsShareTheirOuterScale(server, quantctl, client, arrays):
    said = quantctl("encodings", "compute", "--model", "ties", "--spec",
                    "nvfp4", "--json")
    assert [group["tied_tensors"] for group in said["ties"]] == [
        [name for name in sorted(NAMES) if name.startswith(f"l.{n}.") and
         "o_proj" not in name] for n in range(2)]
    for name in NAMES:
        tied = [other for other in NAMES if other[:4] == name[:4] and
                "o_proj" not in other] if "o_proj" not in name else [name]
        maximum = max(np.abs(arrays[other]).max() for other in tied)
        (quantized,) = client.quantize_many([quantd.QuantizeJob(
            arrays[name], "nvfp4", outer_maximum=[float(maximum)])])
        expected = quantized.encoding
        found = client.get_encoding(quantd.TensorName("ties", name)).encoding
        assert np.array_equal(found.outer_scale, expected.outer_scale)
        assert np.array_equal(found.scale_code, expected.scale_code)
    by_ties = outer_scales(client)
    assert len(set(by_ties.values())) == 4
    # The clients find the same groups.
    async def compute():
        async with quantd.aio.Client(server.address) as other:
            return [answer async for answer in other.compute_encodings(
                "ties", "nvfp4", dry_run=True)]

    for answers in (client.compute_encodings("ties", "nvfp4", dry_run=True),
                    asyncio.run(compute())):
        assert by_ties == {
            answer.name.tensor:
            answer.stored_encoding.encoding.outer_scale.item()
            for answer in answers}
    quantctl("encodings", "compute", "--model", "ties", "--spec", "nvfp4",
             "--no-ties")
    assert len(set(outer_scales(client).values())) == 8
    assert list(client.compute_encodings("ties", "nvfp4", ties=False))
    assert len(set(outer_scales(client).values())) == 8
    # A pattern comes before the defaults.
    quantctl("encodings", "compute", "--model", "ties", "--spec", "nvfp4",
             "--tie", "*_proj.weight")
    assert len(set(outer_scales(client).values())) == 1
    quantctl("encodings", "compute", "--model", "ties", "--spec",
             "int8:group:16")


def test_ASweepPredictsThem(quantctl, client, arrays):
    del arrays
    predictions = {}
    for ties in (True, False):
        sweep = client.sweep("ties", ["int8:group:16", "nvfp4"], ties=ties)
        found = quantctl("sweep", "--model", "ties", "--spec", "int8:group:16",
                         "--spec", "nvfp4", "--json",
                         *(() if ties else ("--no-ties",)))
        assert len(found["ties"]) == (2 if ties else 0)
        predictions[ties] = {}
        for tensor, other in zip(sweep.tensors, found["tensors"]):
            assert tensor.name.tensor == other["name"]
            for one, same in zip(tensor.candidates, other["candidates"]):
                assert one.spec_index == same["spec_index"]
                assert one.prediction.sqnr_db == pytest.approx(
                    same["prediction"]["sqnr_db"])
                predictions[ties][other["name"], one.spec_index] = (
                    one.prediction.sqnr_db)
    # Scales of 8 bits hardly have a float of a 16th of the largest.
    assert predictions[True]["l.0.q_proj.weight", 1] < (
        predictions[False]["l.0.q_proj.weight", 1])
    for key in predictions[True]:
        if key[1] == 0 or "o_proj" in key[0] or "v_proj" in key[0]:
            assert predictions[True][key] == predictions[False][key]


def test_AMixtureGivesFusedTensorsOneSpec(server, quantctl, client, arrays):
    del arrays
    specs = ["int8:group:16", "int4:group:16", "nvfp4"]
    swept = client.sweep("ties", specs)
    sqnr_db = sorted(candidate.prediction.sqnr_db for tensor in swept.tensors
                     for candidate in tensor.candidates
                     if candidate.spec_index == 1)
    # Some tensors reach that with 4 bits, and those that they are fused with
    # do not.
    targets = [{"min_sqnr_db": sqnr_db[n]} for n in range(1, len(sqnr_db))]
    targets += [{"max_size_bytes": size} for size in (2800, 3500, 4200)]

    async def sweep(ties, target):
        async with quantd.aio.Client(server.address) as other:
            return await other.sweep("ties", specs, ties=ties, **target)

    apart = 0
    for target in targets:
        ((key, value),) = target.items()
        flags = ("sweep", "--model", "ties", "--json", *(
            word for spec in specs for word in ("--spec", spec)), {
                "min_sqnr_db": "--min-sqnr",
                "max_size_bytes": "--max-bytes"}[key], repr(value))
        for ties in (True, False):
            found = quantctl(*flags, *(() if ties else ("--no-ties",)))
            mixtures = [client.sweep("ties", specs, ties=ties, **target
                                     ).mixture,
                        asyncio.run(sweep(ties, target)).mixture]
            for mixture in mixtures:
                assert mixture.choices == {
                    choice["tensor"]: choice["spec_index"]
                    for choice in found["mixture"]["choices"]}
                assert mixture.size_bytes == found["mixture"]["size_bytes"]
                assert mixture.target_met == found["mixture"]["target_met"]
                assert mixture.min_sqnr_db == pytest.approx(
                    found["mixture"]["min_sqnr_db"])
            fused = [{mixture.choices[f"l.{n}.{which}_proj.weight"]
                      for which in "qkv"} for n in range(2)]
            if ties:
                assert [len(group) for group in fused] == [1, 1]
            else:
                apart += max(map(len, fused)) > 1
    # Without ties they would have got several.
    assert apart > 0


def test_APatternGivesOneEncodingWithoutOuterScales(quantctl, client, arrays):
    del arrays
    pattern = "{layer}.{q,k}_proj.weight"

    def encodings():
        return {name: client.get_encoding(quantd.TensorName(
            "ties", name)).encoding.to_proto().SerializeToString(
                deterministic=True) for name in NAMES}

    quantctl("encodings", "compute", "--model", "ties", "--spec",
             "int8:group:16")
    apart = encodings()
    assert len(set(apart.values())) == 8
    said = quantctl("encodings", "compute", "--model", "ties", "--spec",
                    "int8:group:16", "--tie", pattern, "--json")
    assert [group["label"] for group in said["ties"]] == [
        "l.0.{q,k}_proj.weight", "l.1.{q,k}_proj.weight"]
    tied = encodings()
    for name in NAMES:
        if "q_proj" in name:
            assert tied[name] == tied[name.replace("q_proj", "k_proj")]
        elif "k_proj" not in name:
            assert tied[name] == apart[name]
    assert list(client.compute_encodings("ties", "int8:group:16"))
    assert encodings() == apart
    assert list(client.compute_encodings("ties", "int8:group:16",
                                         ties=[pattern]))
    assert encodings() == tied


def test_TiesThatCannotBe(quantctl, client, arrays):
    del arrays
    for flags, what in (
            (("--spec", "nvfp4", "--tie", "{x}.{a,b}"), "two tensors or more"),
            (("--spec", "nvfp4", "--spec", "*.k_proj*=int8:group:16", "--tie",
              "{x}.{q,k}_proj.weight"), "one spec for all")):
        assert what in quantctl("encodings", "compute", "--model", "ties",
                                *flags, code=2)
    # Those of the defaults are not tied then.
    said = quantctl("encodings", "compute", "--model", "ties", "--spec",
                    "nvfp4", "--spec", "*.k_proj*=int8:group:16", "--dry-run",
                    "--json")
    assert said["ties"] == []
    for ties, what in ((["{x}.{a,b}"], "two tensors or more"),
                       (["{x}.{q,k}_proj.weight"], "one spec for all")):
        with pytest.raises(quantd.QuantdError, match=what) as caught:
            list(client.compute_encodings(
                "ties", "nvfp4", overrides=[("*.k_proj*", "int8:group:16")],
                ties=ties))
        assert caught.value.reason == "ARGUMENT_INVALID"
    with pytest.raises(quantd.QuantdError) as caught:
        client.sweep("ties", ["nvfp4"], ties=["{x}.{a,b}"])
    assert caught.value.reason == "ARGUMENT_INVALID"
