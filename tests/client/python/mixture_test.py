"""Mixtures that are chosen by what reaches the end of a model lose less there
than those that are chosen by the noise of tensors."""

import os

import numpy as np
import pytest

import quantd
import rounding_test as networks
import runtime_rules as rules

torch = pytest.importorskip("torch")

# pylint: disable=wrong-import-position
import networks as modules_of
import quantd.torch

SPECS = ["int2:group:32:half-step", "int3:group:32:half-step",
         "int4:group:32:half-step", "int4:group:128:half-step",
         "int5:group:64", "int6:group:64", "int8:per-channel", "nvfp4"]
# Bits for each element.
BUDGETS = {"digits": (3.5, 4, 4.5, 4.75, 5, 5.5, 6, 6.5),
           "char-lm": (3.5, 4.25, 5, 6)}
# Decibels that no mixture may lose, and that they gain on average.
LEEWAY_DB = .3
GAIN_DB = {"digits": .4, "char-lm": 1.}
CALIBRATION = int(os.environ.get("QUANTD_MIXTURE_CALIBRATION", "8"))
SEQUENCES = int(os.environ.get("QUANTD_MIXTURE_SEQUENCES", "2"))


def digits():
    """Weights, inputs by module, the network and some of its inputs, and a
    function that tells the logits of images that were held back."""
    weights = rules.read_tensors(
        networks.DATA + "/digits-cnn/model.safetensors")
    seen = rules.read_tensors(
        networks.DATA + "/digits-cnn/activations.safetensors")
    test = rules.read_tensors(networks.DATA + "/digits-cnn/test.safetensors")
    inputs = networks.Inputs()
    for name, values in seen.items():
        inputs(name[:-len(".input")], values)
    images = test["images"][:SEQUENCES * 50]
    return weights, inputs, modules_of.Digits(weights), torch.from_numpy(
        seen["conv1.input"][:100].copy()), lambda own: rules.digits(
            own, images, lambda _, x: x)


def char_lm():
    weights = rules.read_tensors(networks.DATA + "/char-lm/model.safetensors")
    sequences = rules.read_tensors(
        networks.DATA + "/char-lm/bytes.safetensors")
    inputs = networks.Inputs()
    ids = sequences["calibration"][:CALIBRATION, :-1]
    rules.language_model(weights, ids, inputs)
    return (weights, inputs, modules_of.LanguageModel(weights),
            torch.from_numpy(ids[:4].astype(np.int64)),
            lambda own: rules.language_model(
                own, sequences["validation"][:SEQUENCES, :-1],
                lambda _, x: x))


@pytest.mark.parametrize("name", BUDGETS)
def test_less_reaches_the_logits(client, tmp_path, name):
    weights, inputs, model, batch, logits = (
        digits if name == "digits" else char_lm)()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = quantd.torch.output_weights(model, batch)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    layers = {module + ".weight": weights[module + ".weight"]
              for module in inputs.seen}
    assert set(layers) <= set(found)
    for module in inputs.seen:
        client.calibrate(
            inputs.rows(module, layers[module + ".weight"]),
            quantd.TensorName(name, module + ".input"),
            contribution=networks.contribution())
    path = str(tmp_path / "model.safetensors")
    quantd.save(path, layers)
    bits = BUDGETS[name]
    plain = logits(weights)
    sqnr = {}
    for objective in ("tensor", "output"):
        sweep = quantd.sweep_model(
            path, SPECS, client=client, max_bits_per_element=bits, min_rank=2,
            inputs=name, weights=found if objective == "output" else None,
            objective=objective)
        sqnr[objective] = []
        for budget, mixture in zip(bits, sweep.mixtures):
            assert mixture.size_bytes <= budget * sum(
                weight.size for weight in layers.values()) / 8 or (
                    not mixture.target_met)
            own = dict(weights)
            for tensor, spec in mixture.specs.items():
                own[tensor] = client.dequantize(client.quantize(
                    weights[tensor], spec))
            sqnr[objective].append(networks.sqnr_db(plain, logits(own)))
            print(f"{name}, {budget} bits by {objective}: "
                  f"{sqnr[objective][-1]:.2f} dB, {mixture.size_bytes} bytes, "
                  f"expected {-10 * np.log10(mixture.noise_to_signal_sum):.2f}")
    gain = np.subtract(sqnr["output"], sqnr["tensor"])
    assert (gain > -LEEWAY_DB).all(), gain
    assert gain.mean() > GAIN_DB[name], gain


def test_what_the_objective_needs_is_told(client, tmp_path):
    path = str(tmp_path / "model.safetensors")
    weight = np.random.default_rng(1).standard_normal((8, 32)).astype(
        np.float32)
    quantd.save(path, {"a.weight": weight, "b.weight": weight})
    for name in ("a.input", "b.input"):
        client.calibrate(weight, quantd.TensorName("needs", name),
                         contribution=networks.contribution())

    def reason(**options):
        with pytest.raises(quantd.QuantdError) as error:
            quantd.sweep_model(path, ["int8", "int4"], client=client,
                               max_bits_per_element=6,
                               **{"objective": "output", "inputs": "needs",
                                  "weights": {"a.weight": 1, "b.weight": 1},
                                  **options})
        assert error.value.reason == "ARGUMENT_INVALID"
        return error.value.message

    needs = "expected inputs and weights with objective 'output'"
    assert reason(weights=None) == needs
    assert reason(inputs=None) == needs
    assert "got 'logits'" in reason(objective="logits")
    assert reason(objective="tensor") == (
        "expected weights with objective 'output'")
    assert reason(weights={"a.weight": 1}) == (
        "b.weight has no weight, which weights needs; exclude it, and give it "
        "a spec of its own")
    assert "got -1 for b.weight" in reason(
        weights={"a.weight": 1, "b.weight": -1})
    assert "a.weight has no Gram matrix of its inputs" in reason(
        inputs=quantd.ModelRounding("needs", inputs={"a.weight": "none"}))
    assert "without damping" in reason(
        inputs=quantd.ModelRounding("needs", column_order="natural"))
    found = {}
    for light in ("a.weight", "b.weight"):
        heavy = {"a.weight": "b.weight", "b.weight": "a.weight"}[light]
        sweep = quantd.sweep_model(
            path, ["int8", "int4"], client=client, max_bits_per_element=7,
            min_sqnr_db=20, objective="output", inputs="needs",
            weights={light: 1e-3, heavy: 1})
        assert sweep.tensors[0].candidates[0].output_noise > 0
        least, mixture = sweep.mixtures
        assert mixture.specs == {light: "int4", heavy: "int8"}
        found[light] = least
    # Each tensor by itself: weights do not matter.
    assert found["a.weight"].specs == found["b.weight"].specs


def test_weights_are_measured():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
    batch = torch.randn(64, 16)
    found = quantd.torch.output_weights(model, batch)
    # The last layer's noise is that of the output, but for the bias.
    with torch.no_grad():
        signal = batch @ model[0].weight.T + model[0].bias
        last = signal @ model[1].weight.T
        assert found["1.weight"] == pytest.approx(
            float(last.square().sum() / (last + model[1].bias).square().sum()),
            rel=1e-3)
        model[1].weight *= 0
    assert quantd.torch.output_weights(model, batch)["0.weight"] == (
        pytest.approx(0, abs=1e-6))
    # One that has no part in it.
    model.add_module("unused", torch.nn.Linear(3, 3))
    model.forward = lambda x: model[1](model[0](x))
    assert "unused.weight" not in quantd.torch.output_weights(model, batch)
    with pytest.raises(quantd.QuantdError) as error:
        quantd.torch.output_weights(model, batch, outputs=lambda *_: None)
    assert error.value.reason == "ARGUMENT_INVALID"


def test_a_convolution_and_a_layer_that_comes_twice():
    torch.manual_seed(2)
    conv = torch.nn.Conv2d(3, 3, 3, padding=1)
    model = torch.nn.Sequential(conv, torch.nn.ReLU(), conv)
    found = quantd.torch.output_weights(
        model, (torch.randn(4, 3, 8, 8),), outputs=lambda own, batch:
        own(*batch))
    assert list(found) == ["0.weight"] and .1 < found["0.weight"] < 10
