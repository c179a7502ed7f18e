"""The error at a layer's output: it is the one that inputs that were held back
measure."""

import os

import numpy as np
import pytest

import quantd
import rounding_test as networks
import runtime_rules as rules

DATA = networks.DATA
SPECS = ["int8:per-channel", "int4:per-channel", "int4:group:32:half-step",
         "int3:per-channel:mse", "nf4:group:32", "nvfp4"]
# Sequences for both parts; there are 192.
CALIBRATION = int(os.environ.get("QUANTD_NOISE_CALIBRATION", "12"))


@pytest.fixture(scope="module")
def digits(client):
    """Half of the calibration's images are held back."""
    return split(client, "noise-digits", *digits_inputs())


def digits_inputs():
    weights = rules.read_tensors(DATA + "/digits-cnn/model.safetensors")
    seen = rules.read_tensors(DATA + "/digits-cnn/activations.safetensors")
    inputs = networks.Inputs()
    for name, values in seen.items():
        inputs(name[:-len(".input")], values)
    rows = {module: inputs.rows(module, weights[module + ".weight"])
            for module in inputs.seen}
    return weights, rows


@pytest.fixture(scope="module")
def language_model(client):
    return split(client, "noise-char-lm", *language_inputs())


def language_inputs():
    weights = rules.read_tensors(DATA + "/char-lm/model.safetensors")
    sequences = rules.read_tensors(DATA + "/char-lm/bytes.safetensors")
    inputs = networks.Inputs()
    for batch in np.array_split(sequences["calibration"][:CALIBRATION],
                                -(-CALIBRATION // 32)):
        rules.language_model(weights, batch[:, :-1], inputs)
    modules = [name[:-len(".weight")] for name in weights
               if name.endswith("_proj.weight") or name == "head.weight"]
    return weights, {module: inputs.rows(module, weights[module + ".weight"])
                     for module in modules}


def split(client, model, weights, rows):
    """Weights, inputs held back, and the evaluations with the others."""
    held_back = {}
    evaluations = {}
    for module, inputs in rows.items():
        # Batches by turns, so that both parts are of the same kind.
        batches = np.array_split(inputs, 16)
        client.calibrate(np.concatenate(batches[::2]),
                         quantd.TensorName(model, module + ".input"),
                         contribution=networks.contribution())
        held_back[module] = np.concatenate(batches[1::2]).astype(np.float64)
        name = module + ".weight"
        evaluations[module] = client.evaluate(
            weights[name], SPECS, name=quantd.TensorName(model, name),
            inputs=module + ".input")
    return weights, held_back, evaluations


def measured(weight, restored, inputs):
    flat = weight.reshape(len(weight), -1).astype(np.float64)
    error = restored.reshape(len(weight), -1).astype(np.float64) - flat
    return ((inputs @ error.T)**2).sum() / ((inputs @ flat.T)**2).sum()


@pytest.mark.parametrize("network", ["digits", "language_model"])
def test_the_noise_is_that_of_inputs_held_back(client, network, request):
    weights, held_back, evaluations = request.getfixturevalue(network)
    for index, spec in enumerate(SPECS):
        sums = np.zeros(2)
        for module, evaluation in evaluations.items():
            noise = evaluation[index].output_noise
            assert noise.source == "gram"
            weight = weights[module + ".weight"]
            restored = client.dequantize(client.quantize(weight, spec))
            sums += (noise.noise_to_signal,
                     measured(weight, restored, held_back[module]))
        print(f"{network}, {spec}: {sums[0]:.4g} expected, {sums[1]:.4g} "
              f"measured, {sums[0] / sums[1]:.3f} of it")
        assert abs(sums[0] / sums[1] - 1) < .05


def test_what_is_not_there_is_told(client):
    weight = np.ones((4, 8), np.float32)
    name = quantd.TensorName("noise-errors", "w")

    def reason(inputs, array=weight):
        with pytest.raises(quantd.QuantdError) as error:
            client.evaluate(array, ["int4:per-channel"], name=name,
                            inputs=inputs)
        return error.value.reason

    assert reason("none") == "STATISTICS_NOT_FOUND"
    client.calibrate(weight, quantd.TensorName("noise-errors", "plain"),
                     contribution=quantd.Contribution("job", 1))
    assert reason("plain") == "GRAM_INVALID"
    client.calibrate(np.full((2, 8), np.nan, np.float32),
                     quantd.TensorName("noise-errors", "no-rows"),
                     contribution=networks.contribution())
    assert reason("no-rows") == "GRAM_INVALID"
    client.calibrate(np.eye(6, dtype=np.float32),
                     quantd.TensorName("noise-errors", "narrow"),
                     contribution=networks.contribution())
    assert reason("narrow") == "GRAM_INVALID"
    assert reason("narrow", np.float32(1)) == "SHAPE_INVALID"
    assert reason("") == "NAME_INVALID"


def test_any_candidate_and_chunks_give_the_same(client, digits):
    weights, _, evaluations = digits
    weight = weights["fc2.weight"]
    inputs = quantd.TensorName("noise-digits", "fc2.input")
    name = quantd.TensorName("noise-digits", "fc2.stored")
    encoding = client.quantize(weight, SPECS[1]).encoding
    client.put_encoding(name, encoding)
    candidates = [SPECS[1], encoding, quantd.EncodingReference(name)]
    expected = evaluations["fc2"][1].output_noise
    for omitted in (False, True):
        for metrics in client.evaluate(weight, candidates, inputs=inputs,
                                       encodings=not omitted):
            assert metrics.output_noise == expected
    for metrics in client.evaluate_chunks(
            np.array_split(weight.reshape(-1), 7), candidates,
            shape=weight.shape, inputs=inputs):
        assert metrics.output_noise == expected
    assert client.evaluate(weight, candidates)[0].output_noise is None
