"""Gram matrices of a layer's inputs, and rounding that makes up for its own
errors: what it does to the outputs of two networks."""

import functools
import os

import numpy as np
import pytest

import quantd
import runtime_rules as rules

DATA = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../data")
# Enough to tell the losses apart; there are 128.
SEQUENCES = int(os.environ.get("QUANTD_ROUNDING_SEQUENCES", "2"))
# Of those to calibrate with; there are 192.
CALIBRATION = int(os.environ.get("QUANTD_ROUNDING_CALIBRATION", "16"))
# What fewer may cost.
LEEWAY = 1 if SEQUENCES == 128 and CALIBRATION == 192 else 1.5


def contribution(source="job", sequence=1, **features):
    return quantd.Contribution(
        source, sequence, features=quantd.FeatureStatistics(**features))


class Inputs:
    """Takes part in a network, and keeps the inputs of its layers."""

    def __init__(self):
        self.seen = {}

    def __call__(self, module, x):
        self.seen.setdefault(module, []).append(x)
        return x

    def rows(self, module, weight):
        """[rows, elements of a row of the weight]"""
        x = np.concatenate(self.seen[module])
        if weight.ndim == 2:
            return x.reshape(-1, x.shape[-1])
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(
            padded, (3, 3), axis=(2, 3))
        return np.ascontiguousarray(
            windows.transpose(0, 2, 3, 1, 4, 5)).reshape(-1, weight[0].size)


def restored(client, model, weights, modules, spec, is_compensated):
    """Weights with those of the modules quantized and dequantized."""
    result = dict(weights)
    for module in modules:
        name = module + ".weight"
        quantized = client.quantize(
            weights[name], spec, name=quantd.TensorName(model, name),
            rounding=quantd.Rounding(module + ".input")
            if is_compensated else None)
        result[name] = client.dequantize(quantized)
    return result


def sqnr_db(values, restored_values):
    error = (restored_values - values).astype(np.float64)
    return 10 * np.log10((values.astype(np.float64)**2).sum() /
                         (error**2).sum())


@pytest.fixture(scope="module")
def digits(client):
    weights = rules.read_tensors(DATA + "/digits-cnn/model.safetensors")
    seen = rules.read_tensors(DATA + "/digits-cnn/activations.safetensors")
    modules = [name[:-len(".input")] for name in seen]
    inputs = Inputs()
    for module in modules:
        inputs(module, seen[module + ".input"])
        rows = inputs.rows(module, weights[module + ".weight"])
        client.calibrate(rows, quantd.TensorName("digits", module + ".input"),
                         contribution=contribution())
    return weights, modules


@pytest.mark.parametrize("spec,least_db,least_right", [
    ("int4:per-channel", 36, 486), ("int3:per-channel", 28, 486),
    ("int2:per-channel", 0, 485)])
def test_digits(client, digits, spec, least_db, least_right):
    weights, modules = digits
    test = rules.read_tensors(DATA + "/digits-cnn/test.safetensors")
    found = {}
    for is_compensated in (False, True):
        logits = rules.digits(
            restored(client, "digits", weights, modules, spec, is_compensated),
            test["images"], lambda _, x: x)
        found[is_compensated] = (
            sqnr_db(test["logits_fp32"], logits),
            int((logits.argmax(1) == test["labels"]).sum()))
    print(f"{spec}: {found[False][0]:.1f} dB, {found[False][1]} right; "
          f"compensated {found[True][0]:.1f} dB, {found[True][1]} right")
    assert found[True][0] >= least_db
    assert found[True][1] >= least_right


@pytest.fixture(scope="module")
def strict(client, digits):
    """The digits' weights with ranges that clip nothing."""
    weights, modules = digits
    return restored(client, "digits", weights, modules, "int3:per-channel",
                    True)


@pytest.mark.parametrize("option", ["half-step", "mse", "half-step:mse"])
def test_convolutions_need_their_largest_elements(client, digits, strict,
                                                  option):
    """With ranges that clip them the output loses what rounding wins."""
    weights, modules = digits
    test = rules.read_tensors(DATA + "/digits-cnn/test.safetensors")
    linear = [module for module in modules if not module.startswith("conv")]

    def compensated_db(searched):
        found = restored(client, "digits", {**strict, **{
            module + ".weight": weights[module + ".weight"]
            for module in searched}}, searched,
                         "int3:per-channel:" + option, True)
        logits = rules.digits(found, test["images"], lambda _, x: x)
        return sqnr_db(test["logits_fp32"], logits)

    all_db, linear_db, strict_db = map(compensated_db, (modules, linear, ()))
    print(f"{option}: {all_db:.1f} dB, of linear layers {linear_db:.1f} dB, "
          f"of none {strict_db:.1f} dB")
    assert all_db < strict_db - 3
    assert linear_db > strict_db


@pytest.fixture(scope="module")
def language_model(client):
    weights = rules.read_tensors(DATA + "/char-lm/model.safetensors")
    sequences = rules.read_tensors(DATA + "/char-lm/bytes.safetensors")
    modules = [name[:-len(".weight")] for name in weights
               if name.endswith("_proj.weight") or name == "head.weight"]
    inputs = Inputs()
    for batch in np.array_split(sequences["calibration"][:CALIBRATION],
                                -(-CALIBRATION // 32)):
        rules.language_model(weights, batch[:, :-1], inputs)
    for module in modules:
        client.calibrate(inputs.rows(module, weights[module + ".weight"]),
                         quantd.TensorName("char-lm", module + ".input"),
                         contribution=contribution())
    weighed = sequences["validation"][:SEQUENCES]
    plain = rules.bits_per_byte(weights, weighed, lambda _, x: x)

    @functools.cache
    def loss(spec, is_compensated=False):
        """Bits per byte that quantizing adds."""
        return rules.bits_per_byte(
            restored(client, "char-lm", weights, modules, spec,
                     is_compensated), weighed, lambda _, x: x) - plain

    return plain, loss


@pytest.mark.parametrize("spec,most", [
    ("int4:group:128", .30), ("int3:group:32", .40), ("int2:group:32", .70)])
def test_language_model(language_model, spec, most):
    plain, loss = language_model
    nearest = loss(spec + ":mse")
    # The better of the two scales for so few bits.
    compensated = loss(spec + (":mse" if spec.startswith("int2") else ""), True)
    print(f"{spec}: bits per byte over {plain:.4f}: mse {nearest:.4f}, "
          f"compensated {compensated:.4f}, {compensated / nearest:.2f} of it")
    assert compensated <= LEEWAY * most * nearest


@pytest.mark.parametrize("spec", [
    f"int{bits}:group:{size}" for bits in (4, 3, 2) for size in (32, 128)])
def test_importance_costs_little(language_model, spec):
    plain, loss = language_model
    by_tensor = loss(spec + ":mse")
    by_output = loss(spec + ":mse:importance")
    print(f"{spec}: bits per byte over {plain:.4f}: mse {by_tensor:.4f}, "
          f"with importance {by_output:.4f}, {by_output / by_tensor:.2f} of it")
    assert by_output <= 1.05 * LEEWAY * by_tensor


def test_sources_order_and_chunks_do_not_matter(client):
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((960, 96)) @ rng.standard_normal((96, 96))
            ).astype(np.float32)
    weight = rng.standard_normal((48, 96)).astype(np.float32)
    steps = quantd.gram_steps(rows)

    def codes(model):
        return client.quantize(
            weight, "int3:group:32", name=quantd.TensorName(model, "w"),
            rounding=quantd.Rounding("x", damping=.02)).codes.tobytes()

    client.calibrate(rows, quantd.TensorName("one", "x"),
                     contribution=contribution(step_exponent=steps))
    parts = np.split(rows, [100, 357, 358])
    for rank in (2, 0, 3, 1):
        for sequence, part in enumerate(np.array_split(parts[rank], 2), 1):
            if not part.size:
                continue
            for _ in range(2):  # counted once
                result = client.calibrate(
                    part, quantd.TensorName("ranks", "x"),
                    contribution=contribution(f"rank-{rank}", sequence,
                                              step_exponent=steps))
                assert result.contribution.gram.rows == len(part)
    assert codes("one") == codes("ranks")
    nearest = client.quantize(weight, "int3:group:32")
    assert codes("one") != nearest.codes.tobytes()


def test_an_encoding_may_be_given(client, digits):
    weights, _ = digits
    weight = weights["fc2.weight"]
    rounding = quantd.Rounding(quantd.TensorName("digits", "fc2.input"))
    by_spec = client.quantize(weight, "int4:per-channel", rounding=rounding)
    given = client.quantize(weight, by_spec.encoding, rounding=rounding)
    assert given.codes.tobytes() == by_spec.codes.tobytes()
    name = quantd.TensorName("digits", "fc2.weight")
    client.put_encoding(name, by_spec.encoding)
    stored = client.quantize(weight, quantd.EncodingReference(name),
                             rounding=rounding)
    assert stored.codes.tobytes() == by_spec.codes.tobytes()


def test_what_is_not_there_is_told(client):
    weight = np.ones((4, 8), np.float32)
    name = quantd.TensorName("errors", "w")

    def reason(inputs, array=weight, **fields):
        with pytest.raises(quantd.QuantdError) as error:
            client.quantize(array, "int4:per-channel", name=name,
                            rounding=quantd.Rounding(inputs, **fields))
        return error.value.reason

    assert reason("none") == "STATISTICS_NOT_FOUND"
    client.calibrate(weight, quantd.TensorName("errors", "plain"),
                     contribution=quantd.Contribution("job", 1))
    assert reason("plain") == "GRAM_INVALID"
    client.calibrate(np.full((2, 8), np.nan, np.float32),
                     quantd.TensorName("errors", "no-rows"),
                     contribution=contribution())
    assert reason("no-rows") == "GRAM_INVALID"
    client.calibrate(np.eye(6, dtype=np.float32),
                     quantd.TensorName("errors", "narrow"),
                     contribution=contribution())
    assert reason("narrow") == "GRAM_INVALID"
    assert reason("narrow", damping=-1.) == "METHOD_INVALID"
    assert reason("narrow", np.float32(1)) == "SHAPE_INVALID"
    assert reason("") == "NAME_INVALID"
    assert reason("narrow", column_order="up") == "ARGUMENT_INVALID"


def test_clipped_and_left_out_rows_are_told(client):
    rows = np.ones((5, 3), np.float32)
    rows[1, 2] = np.nan
    rows[3, 0] = 1e6
    steps = quantd.gram_steps(np.ones((1, 3), np.float32))
    name = quantd.TensorName("clipped", "x")
    result = client.calibrate(rows, name, contribution=contribution(
        step_exponent=steps))
    assert result.contribution.gram == quantd.GramResult(4, 1, 1, 3)
    gram = client.get_statistics(name).gram
    assert (gram.feature_count, gram.part_size, gram.part_count) == (3, 3, 1)
    assert (gram.rows, gram.left_out_rows, gram.clipped_count) == (4, 1, 1)
    (entry,) = client.list_statistics("clipped")
    assert 6 * 8 < gram.size_bytes == entry.gram_size_bytes < entry.size_bytes
    # Steps are needed once, and as many as features.
    client.calibrate(rows, name, contribution=contribution(
        sequence=2, step_exponent=()))
    for bad, reason in ((dict(step_exponent=np.zeros(1)),
                         "CONTRIBUTION_INVALID"),
                        (dict(step_exponent=[999] * 3),
                         "CONTRIBUTION_INVALID"),
                        (dict(max_part=100), "CONTRIBUTION_INVALID")):
        with pytest.raises(quantd.QuantdError) as error:
            client.calibrate(rows, name, contribution=contribution(
                sequence=3, **bad))
        assert error.value.reason == reason
    with pytest.raises(quantd.QuantdError) as error:
        client.calibrate(rows[:, :2], name, contribution=contribution(
            sequence=3))
    assert error.value.reason == "STATISTICS_MISMATCH"
    with pytest.raises(quantd.QuantdError) as error:
        client.calibrate(rows, quantd.TensorName("clipped", "new"),
                         contribution=contribution(step_exponent=()))
    assert error.value.reason == "CONTRIBUTION_INVALID"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("damping", [None, 10.])
def test_the_noise_at_the_output_is_told(client, dtype, damping):
    rng = np.random.default_rng(5)
    # Correlated, and of powers that differ.
    x = (rng.standard_normal((300, 40)) @ rng.standard_normal((40, 70)) *
         np.exp(rng.standard_normal(70))).astype(np.float32)
    x[7, 3] = np.nan
    weight = rng.standard_normal((50, 70)).astype(dtype)
    name = quantd.TensorName("told", "x")
    client.calibrate(x, name, contribution=contribution(
        "job" + str(damping) + dtype.__name__))
    rows = np.delete(x, 7, axis=0).astype(np.float64)

    def noise(quantized):
        error = client.dequantize(quantized) - weight
        return (((rows @ error.T)**2).sum() / ((rows @ weight.T)**2).sum())

    rounding = quantd.Rounding(name, damping)
    compensated = client.quantize(weight, "int3:per-channel",
                                  rounding=rounding)
    told = compensated.summary.output_noise
    assert told.noise_to_signal == pytest.approx(noise(compensated), rel=2e-3)
    assert (told.source, told.clipped_input_count) == ("gram", 0)
    # What evaluate tells of the nearest codes is the same measure.
    nearest, = client.evaluate(weight, ["int3:per-channel"], inputs=name)
    assert nearest.output_noise.noise_to_signal == pytest.approx(
        noise(client.quantize(weight, "int3:per-channel")), rel=2e-3)
    if damping is None:
        assert told.noise_to_signal < .6 * nearest.output_noise.noise_to_signal
    plain = client.quantize(weight, "int3:per-channel", rounding=quantd.Rounding(
        name, damping, measure_output=False))
    assert plain.codes.tobytes() == compensated.codes.tobytes()
    assert plain.summary.output_noise is None


def test_inputs_that_the_steps_limited_are_told(client):
    rng = np.random.default_rng(6)
    x = rng.standard_normal((64, 16)).astype(np.float32)
    name = quantd.TensorName("limited", "x")
    client.calibrate(x, name, contribution=contribution())
    x[:3, 5] = 1e4
    client.calibrate(x, name, contribution=contribution(sequence=2))
    weight = rng.standard_normal((8, 16)).astype(np.float32)
    rounded = client.quantize(weight, "int4:per-channel",
                              rounding=quantd.Rounding(name))
    assert rounded.summary.output_noise.clipped_input_count == 3
    measured, = client.evaluate(weight, ["int4:per-channel"], inputs=name)
    assert measured.output_noise.clipped_input_count == 3


def test_inputs_may_become_larger(client):
    """The first batch sets the steps of the Gram matrix."""
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((600, 64)) @ rng.standard_normal((64, 64))).astype(
        np.float32)
    x[300:, 5] *= 100
    weight = rng.standard_normal((32, 64)).astype(np.float32)
    name = quantd.TensorName("larger", "x")
    for sequence, batch in enumerate((x[:300], x[300:]), 1):
        result = client.calibrate(batch, name, contribution=contribution(
            sequence=sequence))
        assert result.contribution.gram.clipped_count == 0

    def noise(quantized):
        error = (client.dequantize(quantized) - weight).astype(np.float64)
        return ((x @ error.T)**2).sum() / (
            (x @ weight.T.astype(np.float64))**2).sum()

    rounded = client.quantize(weight, "int4:per-channel",
                              rounding=quantd.Rounding(name))
    assert rounded.summary.output_noise.noise_to_signal == pytest.approx(
        noise(rounded), rel=2e-3)
    nearest, = client.evaluate(weight, ["int4:per-channel"], inputs=name)
    assert nearest.output_noise.noise_to_signal == pytest.approx(
        noise(client.quantize(weight, "int4:per-channel")), rel=2e-3)


@pytest.mark.parametrize("power", [-133, 120])
def test_inputs_may_be_tiny_or_huge(client, power):
    """Those of 2^-133 are below the least normal number of float32."""
    rng = np.random.default_rng(8)
    x = (rng.standard_normal((400, 48)) @ rng.standard_normal((48, 48))).astype(
        np.float32)
    weight = rng.standard_normal((16, 48)).astype(np.float32)
    codes = []
    for number, rows in enumerate((x, np.ldexp(x, power))):
        name = quantd.TensorName(f"size-{power}", f"x-{number}")
        client.calibrate(rows, name, contribution=contribution())
        codes.append(client.quantize(
            weight, "int4:per-channel",
            rounding=quantd.Rounding(name)).codes.tobytes())
    assert codes[0] == codes[1]


def test_sums_of_squares_that_overflow_are_refused(client):
    ones = np.ones((2**22 + 2048, 1), np.float32)
    with pytest.raises(quantd.QuantdError, match="more than 2.62 steps") as error:
        client.calibrate(ones, quantd.TensorName("overflow", "x"),
                         contribution=contribution(step_exponent=[-20]))
    assert error.value.reason == "STATISTICS_MISMATCH"


def test_the_noise_of_nothing_is_not_a_number(client):
    name = quantd.TensorName("nothing", "x")
    client.calibrate(np.eye(4, dtype=np.float32), name,
                     contribution=contribution())
    rounded = client.quantize(np.full((2, 4), np.nan, np.float32),
                              quantd.Encoding("int8", [1.]),
                              rounding=quantd.Rounding(name))
    noise = rounded.summary.output_noise
    assert np.isnan(noise.noise_to_signal) and np.isnan(noise.sqnr_db)
