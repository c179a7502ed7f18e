"""ONNX models that torch exported, from the hook that calibrates to the outputs
of the quantized model: those of numpy's arithmetic with the same parameters."""

import os
import warnings

import numpy as np
import pytest

import package
import quantd
import runtime_rules as rules

onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")

# pylint: disable=wrong-import-position
import networks
import onnx_run
import quantd.torch

DATA = os.path.join(package.ROOT, "tests/data/char-lm")
MODEL = os.path.join(DATA, "model.safetensors")
# ONNX Runtime for Node.
RUNTIME = os.path.join(package.ROOT, "build/node")
# Largest version of the file format that it reads: that of opset 19 and 20.
RUNTIME_IR_VERSION = 9
SEQUENCES = int(os.environ.get("QUANTD_ONNX_SEQUENCES", "2"))


@pytest.fixture(name="weights", scope="module")
def fixture_weights():
    return rules.read_tensors(MODEL)


@pytest.fixture(name="sequences", scope="module")
def fixture_sequences():
    tensors = rules.read_tensors(os.path.join(DATA, "bytes.safetensors"))
    return (tensors["calibration"][:8],
            tensors["validation"][:SEQUENCES])


@pytest.fixture(name="network", scope="module")
def fixture_network(weights, sequences, client):
    """Calibrated by the hook as model "lm"."""
    network = networks.LanguageModel(weights).eval()
    chosen = (torch.nn.Linear, networks.Product)
    with torch.no_grad(), quantd.torch.calibrate(
            network, client, model_name="lm", source="here",
            modules=lambda _, module: isinstance(module, chosen),
            record=("input", "output")):
        network(torch.from_numpy(sequences[0][:, :-1].astype(np.int64)))
    return network


def export_torch(module, inputs, path, opset):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, inputs, path, opset_version=opset,
                          input_names=["ids"], output_names=["logits"])


class Arithmetic:
    """Quantizing and dequantizing in numpy, by the encodings of a model."""

    def __init__(self, client, model):
        self._client = client
        self._model = model

    def encoding(self, tensor):
        return self._client.get_encoding(
            quantd.TensorName(self._model, tensor)).encoding

    def __call__(self, tensor, x):
        encoding = self.encoding(tensor)
        scale = encoding.scale
        zero = encoding.zero_point if encoding.zero_point.size else 0
        codes = np.clip(np.rint(x / scale) + zero, encoding.qmin,
                        encoding.qmax)
        return ((codes - zero) * scale).astype(np.float32)


@pytest.mark.parametrize("opset", [13, 17])
def test_ALanguageModelOfTorchRunsQuantized(
        tmp_path, quantctl, client, weights, sequences, network, opset):
    ids = sequences[1][:, :-1].astype(np.int64)
    export_torch(network, torch.from_numpy(ids), tmp_path / "lm.onnx", opset)
    quantctl("calibrate", MODEL, "--model", "lm", "--include", "*_proj.weight",
             "--include", "head.weight", "--spec", "int8:per-channel")
    quantctl("encodings", "compute", "--model", "lm", "--spec",
             "*.input*=uint8", "--spec", "head.output=uint8")
    report = quantctl("export", "--model", "lm", "--onnx",
                      tmp_path / "lm.onnx", "-o", tmp_path / "lm.qdq.onnx",
                      "--json")
    assert report["losses"] == report["not_quantized"] == []
    # Six matrices in each of three layers, and the head. Its input and output;
    # in each layer what q, k and v take, o, up and down, and four factors.
    assert report["weight_count"] == 3 * 6 + 1
    assert report["activation_count"] == 3 * (1 + 3 + 4) + 2
    tensors = {entry["tensor"] for entry in report["names"]}
    assert {"layers.2.attention.scores.input",
            "layers.2.attention.scores.input.1"} <= tensors

    arithmetic = Arithmetic(client, "lm")
    seen = dict(weights)
    for name in weights:
        if name.endswith("_proj.weight") or name == "head.weight":
            seen[name] = arithmetic(name, weights[name])
    ours = rules.language_model(
        seen, ids, lambda module, x: arithmetic(module + ".input", x),
        lambda module, a, b: (arithmetic(module + ".input", a),
                              arithmetic(module + ".input.1", b)))
    ours = arithmetic("head.output", ours)
    plain = rules.language_model(weights, ids, lambda _, x: x)
    step = arithmetic.encoding("head.output").scale.ravel()[0]
    with torch.no_grad():
        np.testing.assert_allclose(network(torch.from_numpy(ids)).numpy(),
                                   plain, atol=1e-4)
    model = onnx.load(tmp_path / "lm.qdq.onnx")
    found = onnx_run.run_in_numpy(model, {"ids": ids})["logits"]
    off = np.abs(found - ours) / step
    print(f"graph in numpy: largest difference {off.max():.2f} codes, in "
          f"{(off > .5).mean():.1e} of the logits; quantizing makes "
          f"{np.abs(ours - plain).max() / step:.2f}")
    assert off.max() <= 1.001
    assert (off > .5).mean() < 1e-3
    if onnx_run.has_runtime(RUNTIME):
        compare_with_runtime(model, ids, ours, step, tmp_path)


def compare_with_runtime(model, ids, logits, step, folder):
    """Each activation from what ONNX Runtime had before it, so that codes that
    sums in another order move do not add up."""
    scales = {tensor.name: onnx_run.array_of(tensor)
              for tensor in model.graph.initializer}
    activations = {node.output[0]: scales[node.input[1]]
                   for node in model.graph.node
                   if node.op_type == "DequantizeLinear" and
                   node.input[0] not in scales}
    assert len(activations) == 26
    plain_outputs = {output.name for output in model.graph.output}
    for name in activations:
        if name not in plain_outputs:
            model.graph.output.append(onnx.helper.make_tensor_value_info(
                name, onnx.TensorProto.FLOAT, None))
    onnx.save(model, folder / "steps.onnx")
    for level in onnx_run.exact_levels():
        seen = onnx_run.run_in_runtime(RUNTIME, folder / "steps.onnx", ids,
                                       folder, level)
        ours = onnx_run.run_in_numpy(model, {"ids": ids}, seen)
        most = 0
        for name, scale in activations.items():
            off = np.abs(seen[name] - ours[name]) / scale
            assert off.max() <= 1.001, (name, level)
            most = max(most, (off > .5).mean())
        off = np.abs(seen["logits"] - logits) / step
        print(f"ONNX Runtime, {level}: at most {most:.1e} of an activation's "
              f"codes differ, all by one; {(off > .5).mean():.1e} of the "
              f"logits in the end, by {off.max():.0f} at most")
        assert most < 1e-3


def export_two(tmp_path, quantctl, client, model, network, x, specs):
    """Exports two layers with a ReLU between them, each quantized by the specs
    of its input and its weight. Returns the input of the model, its output and
    what quantctl said."""
    with torch.no_grad():
        values = {"0.input": x, "2.input": network[:2](x)}
        plain = network(x).numpy()
    activations, weights = specs
    for name, value in values.items():
        if activations is not None:
            client.calibrate(value, quantd.TensorName(model, name),
                             activations)
    for name in "02":
        client.calibrate(network[int(name)].weight.detach(),
                         quantd.TensorName(model, f"{name}.weight"), weights)
    export_torch(network, x, tmp_path / "net.onnx", 13)
    return plain, quantctl("export", "--model", model, "--onnx",
                           tmp_path / "net.onnx", "-o", tmp_path / "qdq.onnx")


def check_runs(tmp_path, x, plain, level):
    path = tmp_path / "qdq.onnx"
    if (onnx_run.has_runtime(RUNTIME) and
            onnx.load(path).ir_version <= RUNTIME_IR_VERSION):
        found = onnx_run.run_in_runtime(RUNTIME, path, x.numpy(), tmp_path,
                                        level)["logits"]
        assert np.abs(found - plain).max() < .1 * np.abs(plain).max()


@pytest.mark.parametrize("activations, weights, warns", [
    ("float8_e4m3fn", "int8:per-channel", True),
    ("float8_e4m3fn", "float8_e4m3fn", True),
    ("int8", "float8_e4m3fn", True), (None, "float8_e4m3fn", False),
    ("int8", "int8:per-channel", False)])
def test_Float8RunsWithoutTheOptimizerThatMistakesIt(
        tmp_path, quantctl, client, activations, weights, warns):
    """Alone or beside integers in one node."""
    torch.manual_seed(1)
    network = torch.nn.Sequential(
        torch.nn.Linear(16, 24, bias=False), torch.nn.ReLU(),
        torch.nn.Linear(24, 8, bias=False)).eval()
    x = torch.randn(1, 5, 16)
    plain, said = export_two(
        tmp_path, quantctl, client,
        f"{activations}-{weights}".replace(":", "-"), network, x,
        (activations, weights))
    assert ("ORT_DISABLE_ALL" in said) == warns
    check_runs(tmp_path, x, plain, "disabled" if warns else "all")


@pytest.mark.parametrize("kind, activations, weights, mistaken", [
    ("linear", "uint8", "int8:per-channel:1", "a single scale for each"),
    ("linear", "uint8", "int8:group:8", "a single scale for each"),
    ("linear", "uint8:per-channel:2", "int8", "inputs with several scales"),
    ("linear", "uint8", "int2", "weights of 2 bits"),
    ("linear", "uint4", "int8", None),
    ("linear", "uint8", "int4:per-channel:1", None),
    ("linear", "int16", "int8:per-channel:1", None),
    ("linear", "uint16:per-channel:2", "int8", None),
    ("linear", None, "int8:per-channel:1", None),
    ("conv", "uint8", "int8:per-channel", None),
    ("conv", "uint8", "int8:per-channel:1", "a single scale for each"),
    ("conv", "uint8:per-channel:1", "int8", "inputs with several scales"),
    ("conv", "uint8", "int2", "weights of 2 bits"),
    ("conv", "uint4", "int8", "inputs of less than 8 bits"),
    ("biased conv", "uint4", "int8", "inputs of less than 8 bits"),
    ("biased conv", "uint8:per-channel:1", "int8", None),
    ("biased conv", "uint8", "int8:per-channel:1", None)])
def test_CodesThatTheOptimizerMistakesAreTold(
        tmp_path, quantctl, client, kind, activations, weights, mistaken):
    torch.manual_seed(1)
    if kind == "linear":
        layers = [torch.nn.Linear(16, 24, bias=False),
                  torch.nn.Linear(24, 8, bias=False)]
        x = torch.randn(1, 5, 16)
    else:
        layers = [torch.nn.Conv2d(4, 8, 3, bias=kind != "conv"),
                  torch.nn.Conv2d(8, 4, 3, bias=kind != "conv")]
        x = torch.randn(1, 4, 8, 8)
    network = torch.nn.Sequential(layers[0], torch.nn.ReLU(),
                                  layers[1]).eval()
    plain, said = export_two(
        tmp_path, quantctl, client,
        f"{kind}-{activations}-{weights}".replace(":", "-").replace(" ", "-"),
        network, x, (activations, weights))
    warnings_ = [line for line in said.splitlines() if "ORT_" in line]
    assert len(warnings_) == (mistaken is not None), said
    if mistaken is not None:
        assert mistaken in warnings_[0]
    # Two bits are far from the plain network at any level.
    if weights != "int2" and activations != "uint4":
        check_runs(tmp_path, x, plain,
                   "all" if mistaken is None else "disabled")
