"""Moments of features, and searches that weigh errors by them."""

import struct

import numpy as np
import pytest

import quantd
from quantd import imatrix


def moments(source="job", sequence=1, **features):
    return quantd.Contribution(source, sequence,
                               features=quantd.FeatureStatistics(
                                   moments=True, **features))


def reason_of(call):
    with pytest.raises(quantd.QuantdError) as error:
        call()
    return error.value.reason


@pytest.fixture(scope="module")
def layer(client):
    """A weight, its inputs and their mean squares; the moments are stored."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((24, 96)).astype(np.float32)
    inputs = (rng.standard_normal((500, 96)) *
              np.exp(rng.standard_normal(96) * 1.5)).astype(np.float32)
    result = client.calibrate(inputs, quantd.TensorName("layer", "fc.input"),
                              contribution=moments())
    assert result.contribution.moments == quantd.MomentsResult(
        96, inputs.size, 0)
    return weight, inputs, np.square(inputs.astype(np.float64)).mean(0)


def test_moments_are_exact_whatever_the_order(client, layer):
    _, inputs, mean_squares = layer
    name = quantd.TensorName("ranks", "fc.input")
    parts = np.split(inputs, [10, 333, 334])
    for rank in (2, 0, 3, 1):
        for sequence, part in enumerate(np.array_split(parts[rank], 2), 1):
            if not part.size:
                continue
            for _ in range(2):  # counted once
                client.calibrate(part, name,
                                 contribution=moments(f"rank-{rank}", sequence))
    merged = client.get_statistics(name, with_moments=True).moments
    whole = client.get_statistics(quantd.TensorName("layer", "fc.input"),
                                  with_moments=True).moments
    assert merged.state.SerializeToString(
        deterministic=True) == whole.state.SerializeToString(deterministic=True)
    assert merged.axis == 1
    assert set(merged.count) == {500} and set(merged.left_out) == {0}
    np.testing.assert_allclose(np.divide(merged.square_sum, 500), mean_squares,
                               rtol=1e-12)
    np.testing.assert_allclose(merged.sum, inputs.astype(np.float64).sum(0),
                               atol=1e-9)
    assert client.get_statistics(name).moments is None


def test_moments_along_another_axis(client):
    rng = np.random.default_rng(2)
    images = rng.standard_normal((4, 3, 5, 5)).astype(np.float32)
    images[0, 1, 2, 3] = np.nan
    name = quantd.TensorName("axis", "conv.input")
    result = client.calibrate(images, name, contribution=moments(axis=1))
    assert result.contribution.moments == quantd.MomentsResult(3, 299, 1)
    found = client.get_statistics(name, with_moments=True).moments
    assert found.axis == 1 and found.left_out == (0, 1, 0)
    np.testing.assert_allclose(
        found.square_sum,
        np.nansum(np.square(images.astype(np.float64)), axis=(0, 2, 3)),
        rtol=1e-12)
    for more, reason in ((dict(axis=2), "STATISTICS_MISMATCH"),
                         (dict(axis=4), "CONTRIBUTION_INVALID"),
                         (dict(axis=1, gram=True), "CONTRIBUTION_INVALID")):
        assert reason_of(lambda more=more: client.calibrate(
            images, name, contribution=moments("other", 1, **more))) == reason
    assert reason_of(lambda: client.calibrate(
        images[:, :2], name,
        contribution=moments("other", 1, axis=1))) == "STATISTICS_MISMATCH"
    assert reason_of(lambda: client.calibrate(
        np.zeros((1, (1 << 16) + 1), np.float32), quantd.TensorName("axis", "x"),
        contribution=moments())) == "CONTRIBUTION_INVALID"


def weighted_error(client, weight, quantized, weights):
    error = client.dequantize(quantized).astype(np.float64) - weight
    return (np.square(error) * weights).sum()


@pytest.mark.parametrize("spec", [
    "int4:group:32:mse", "int3:per-channel:mse", "nvfp4:mse",
    "mxfp4_e2m1:mse", "int4:group:8:asymmetric:mse"])
def test_weighs_errors(client, layer, spec):
    weight, _, mean_squares = layer
    name = quantd.TensorName("layer", "fc.weight")

    def quantize(text):
        return client.quantize(weight, text, name=name)

    named = quantize(spec + ":importance")
    assert named.codes.tobytes() == quantize(
        spec + ":importance=fc.input").codes.tobytes()
    # Only ratios count.
    given = quantize(quantd.EncodingSpec(**{
        **vars(quantd.EncodingSpec.parse(spec)),
        "importance": quantd.Importance(weight=mean_squares * 1024)}))
    assert given.codes.tobytes() == named.codes.tobytes()
    plain = quantize(spec)
    assert weighted_error(client, weight, named, mean_squares) < (
        weighted_error(client, weight, plain, mean_squares))
    evaluated = client.evaluate(weight, [spec, spec + ":importance"], name=name)
    errors = [np.square(client.dequantize(quantized).astype(np.float64) -
                        weight).sum() for quantized in (plain, named)]
    np.testing.assert_allclose(
        [metrics.overall.sum_squared_error for metrics in evaluated], errors,
        rtol=1e-4)


def test_long_rows_and_rounding_take_importance(client):
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((3, 6000)).astype(np.float32)
    weights = np.exp(rng.standard_normal(6000) * 2)
    spec = quantd.EncodingSpec(
        "int3", quantd.per_channel(), method="mse",
        importance=quantd.Importance(weight=weights))
    assert weighted_error(client, weight, client.quantize(weight, spec),
                          weights) < weighted_error(
        client, weight, client.quantize(weight, "int3:per-channel:mse"),
        weights)
    # Those of a Gram matrix serve as well, and beside compensated rounding.
    inputs = rng.standard_normal((64, 16)).astype(np.float32) * np.arange(1, 17)
    client.calibrate(inputs.astype(np.float32),
                     quantd.TensorName("gram", "fc.input"),
                     contribution=quantd.Contribution(
                         "job", 1, features=quantd.FeatureStatistics()))
    name = quantd.TensorName("gram", "fc.weight")
    small = rng.standard_normal((8, 16)).astype(np.float32)
    by_gram = client.quantize(small, "int3:per-channel:mse:importance",
                              name=name)
    by_weight = client.quantize(
        small, quantd.EncodingSpec(
            "int3", quantd.per_channel(), method="mse",
            importance=quantd.Importance(
                weight=np.square(inputs.astype(np.float64)).mean(0))))
    assert by_gram.codes.tobytes() == by_weight.codes.tobytes()
    rounded = client.quantize(small, "int3:per-channel:mse:importance",
                              name=name, rounding=quantd.Rounding("fc.input"))
    np.testing.assert_array_equal(rounded.encoding.scale,
                                  by_gram.encoding.scale)


def test_a_convolution_takes_the_moments_of_its_unfolded_inputs(client):
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((16, 4, 3, 3)).astype(np.float32)
    rows = (rng.standard_normal((500, 36)) *
            np.exp(rng.standard_normal(36) * 1.5)).astype(np.float32)
    mean_squares = np.square(rows.astype(np.float64)).mean(0)
    spec = "int3:per-channel:mse"
    plain = client.quantize(weight, spec)
    by_weight = client.quantize(weight, quantd.EncodingSpec(
        "int3", quantd.per_channel(), method="mse",
        importance=quantd.Importance(weight=mean_squares)))
    assert weighted_error(client, weight, by_weight,
                          mean_squares.reshape(4, 3, 3)) < weighted_error(
        client, weight, plain, mean_squares.reshape(4, 3, 3))
    for features in (dict(moments=True), dict(gram=True)):
        model = "conv-" + next(iter(features))
        client.calibrate(
            rows, quantd.TensorName(model, "conv.input"),
            contribution=quantd.Contribution(
                "job", 1, features=quantd.FeatureStatistics(
                    **{"gram": False, **features})))
        name = quantd.TensorName(model, "conv.weight")
        named = client.quantize(weight, spec + ":importance", name=name)
        assert named.codes.tobytes() == by_weight.codes.tobytes()
        # Slices of it have their part of the weights.
        for axis, begin, end in ((0, 4, 12), (1, 1, 3)):
            where = [slice(None)] * 4
            where[axis] = slice(begin, end)
            offset = [0] * 4
            offset[axis] = begin
            blocks = quantd.blocks(1, 1, 3, 3)
            text = quantd.EncodingSpec(
                "int3", blocks, method="mse", importance=quantd.Importance())
            whole = client.quantize(weight, text, name=name)
            part = client.quantize(
                np.ascontiguousarray(weight[tuple(where)]), text, name=name,
                slice_of=quantd.Slice(weight.shape, tuple(offset)))
            np.testing.assert_array_equal(part.encoding.scale,
                                          whole.encoding.scale[tuple(where)])
    # Neither of a row nor of its last dimension.
    with pytest.raises(quantd.QuantdError, match="expected 3, .* or 36, "):
        client.quantize(weight, quantd.EncodingSpec(
            "int3", quantd.per_channel(), method="mse",
            importance=quantd.Importance(weight=[1] * 9)))


def test_a_row_has_at_most_65536_weights(client):
    """Of a Gram matrix as of a request."""
    shape, row = (1, 6, 10923), 65538
    weight = np.ones(shape, np.float32)
    name = quantd.TensorName("long", "conv.weight")
    client.calibrate(
        np.ones((1, row), np.float32), quantd.TensorName("long", "conv.input"),
        contribution=quantd.Contribution(
            "job", 1, features=quantd.FeatureStatistics(max_part=128)))
    for importance in (quantd.Importance(), quantd.Importance(weight=[1] * row)):
        spec = quantd.EncodingSpec("int4", quantd.group(32), method="mse",
                                   importance=importance)
        for call in (
                lambda spec=spec: client.quantize(weight, spec, name=name),
                lambda spec=spec: client.evaluate(weight, [spec], name=name)):
            with pytest.raises(quantd.QuantdError,
                               match="of 65538 weights, .* at most 65536"
                               ) as caught:
                call()
            assert caught.value.reason == "METHOD_INVALID"


def test_weights_of_zero_count_alike(client, layer):
    weight, _, _ = layer
    none = quantd.EncodingSpec("int4", quantd.group(32), method="mse",
                               importance=quantd.Importance(weight=[0] * 96))
    assert client.quantize(weight, none).codes.tobytes() == client.quantize(
        weight, "int4:group:32:mse").codes.tobytes()


def test_what_does_not_fit_is_told(client, layer):
    weight, inputs, _ = layer
    name = quantd.TensorName("layer", "fc.weight")
    client.calibrate(inputs, quantd.TensorName("layer", "plain.input"),
                     contribution=quantd.Contribution("job", 1))

    def reason(importance, text="int4:group:32:mse", tensor=name, array=weight):
        spec = quantd.EncodingSpec(**{**vars(quantd.EncodingSpec.parse(text)),
                                      "importance": importance})
        found = {reason_of(lambda: client.quantize(array, spec, name=tensor)),
                 reason_of(lambda: client.evaluate(array, [spec],
                                                   name=tensor))}
        assert len(found) == 1
        return found.pop()

    importance = quantd.Importance
    assert reason(importance("nothing.input")) == "STATISTICS_NOT_FOUND"
    assert reason(importance("plain.input")) == "METHOD_INVALID"
    assert reason(importance("fc.input", axis=0)) == "METHOD_INVALID"
    assert reason(importance(axis=2)) == "METHOD_INVALID"
    assert reason(importance(weight=[1] * 95)) == "METHOD_INVALID"
    assert reason(importance(weight=[-1.] * 96)) == "METHOD_INVALID"
    assert reason(importance(weight=[np.nan] * 96)) == "METHOD_INVALID"
    assert reason(importance("fc.input", weight=[1] * 96)) == "METHOD_INVALID"
    assert reason(importance(),
                  tensor=quantd.TensorName("layer", "fc")) == "METHOD_INVALID"
    for text in ("int4:group:32", "int4:group:32:percentile",
                 "int4:group:32:entropy"):
        assert reason(importance(), text) == "METHOD_INVALID"
    assert reason(importance(weight=[1] * 1024), "int4:mse",
                  array=np.ones((128, 1024), np.float32)) == "METHOD_INVALID"
    text = "int4:mse:importance=fc.input"
    for call in (
            lambda: client.calibrate(inputs, name, text),
            lambda: client.calibrate(inputs, name, text,
                                     contribution=moments()),
            lambda: list(client.compute_encodings("layer", text))):
        assert reason_of(call) == "METHOD_INVALID"


def test_spec_text():
    spec = quantd.EncodingSpec.parse(
        "int4:mse:importance=a%3Ab%2525:importance-axis=1")
    assert spec.importance == quantd.Importance("a:b%25", axis=1)
    assert quantd.EncodingSpec.parse(
        "int4:importance").importance == quantd.Importance()
    for text in ("int4:importance:importance=a", "int4:importance-axis=x"):
        assert reason_of(
            lambda text=text: quantd.EncodingSpec.parse(text)
        ) == "ARGUMENT_INVALID"


@pytest.mark.parametrize("name", ["imatrix.gguf", "imatrix.dat"])
def test_imatrix_goes_out_and_in(client, layer, tmp_path, name):
    weight, _, mean_squares = layer
    entries = {
        "blk.0.ffn_up.weight": imatrix.InputSquares(
            (mean_squares * 500)[None].astype(np.float32),
            np.array([500], np.float32))}
    path = str(tmp_path / name)
    imatrix.save(path, entries, datasets=["wiki"], chunk_count=3)
    assert reason_of(lambda: imatrix.save(path, entries)) == "FILE_EXISTS"
    found = imatrix.load(path)
    assert list(found) == list(entries)
    np.testing.assert_allclose(found["blk.0.ffn_up.weight"].mean(),
                               mean_squares, rtol=1e-6)
    spec = quantd.EncodingSpec(
        "int4", quantd.group(32), method="mse",
        importance=found["blk.0.ffn_up.weight"].importance())
    assert client.quantize(weight, spec).codes.tobytes() == client.quantize(
        weight, "int4:group:32:mse:importance",
        name=quantd.TensorName("layer", "fc.weight")).codes.tobytes()


def test_imatrix_of_experts_in_gguf(tmp_path):
    sums = np.arange(12, dtype=np.float32).reshape(3, 4)
    counts = np.array([2, 0, 4], np.float32)
    path = str(tmp_path / "imatrix.gguf")
    imatrix.save(path, {"experts": imatrix.InputSquares(sums, counts)})
    found = imatrix.load(path)["experts"]
    np.testing.assert_array_equal(found.sums, sums)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_array_equal(found.mean(1), np.ones(4))
    np.testing.assert_array_equal(found.mean(2), sums[2] / 4)


def test_imatrix_as_older_versions_wrote_it(tmp_path):
    path = tmp_path / "imatrix.dat"
    good = (struct.pack("<ii", 1, 4) + b"fc.w" + struct.pack("<ii2f", 8, 2, 16,
                                                            4))
    path.write_bytes(good)  # without the trailer
    np.testing.assert_array_equal(imatrix.load(str(path))["fc.w"].mean(),
                                  [2, .5])
    bad = [good[:n] for n in range(len(good))] + [
        good.replace(struct.pack("<f", 4), struct.pack("<f", np.nan)),
        good.replace(struct.pack("<f", 4), struct.pack("<f", -4)),
        struct.pack("<ii", 1, -4) + good[8:],
        struct.pack("<ii", 2**31 - 1, 2**31 - 1)]
    for data in bad:
        path.write_bytes(data)
        assert reason_of(lambda: imatrix.load(str(path))) == "FILE_MALFORMED"
    assert reason_of(
        lambda: imatrix.load(str(tmp_path / "none.dat"))) == "FILE_UNREADABLE"
