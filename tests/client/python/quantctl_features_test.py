"""Gram matrices, moments and importance of features through quantctl: it does
what the Python client does, and prints what the service answers."""

import dataclasses
import json
import os
import subprocess

import numpy as np
import pytest

import live_server
import quantd
from quantd import imatrix

DATA = os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../data")
WEIGHTS = os.path.join(DATA, "digits-cnn/model.safetensors")
ACTIVATIONS = os.path.join(DATA, "digits-cnn/activations.safetensors")


def state_of(client, model, tensor):
    """What is stored of the features of a tensor."""
    stored = client.get_statistics(quantd.TensorName(model, tensor),
                                   with_moments=True)
    moments = stored.moments and stored.moments.state.SerializeToString(
        deterministic=True)
    return stored.gram, moments, stored.moments and stored.moments.axis


def contributed(quantctl, file, model, *flags, code=0):
    return {tensor["name"]: tensor for tensor in quantctl(
        "calibrate", file, "--model", model, "--source", "job", "--sequence",
        "1", "--json", *flags, code=code)["tensors"]}


@pytest.mark.parametrize("element_type", ["float32", "float16", "bfloat16",
                                          "float64"])
def test_a_file_is_worth_the_arrays(tmp_path, quantctl, client, element_type):
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((50, 3, 40)) * np.exp(
        2 * rng.standard_normal(40))
    inputs[:, :, 7] = 0
    inputs[:, :, 13] *= 1e-40
    inputs[3, 1, 2] = np.inf
    inputs[5, 0, 39] = np.nan
    if element_type == "float64":
        inputs[9, 2, 11] = 1e300
    if element_type == "bfloat16":
        array = (inputs.astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16)
    else:
        array = inputs.astype(element_type)
    file = tmp_path / "inputs.safetensors"
    quantd.save(file, {"fc.input": array},
                element_types={"fc.input": element_type}
                if element_type == "bfloat16" else None)
    model = "file-" + element_type
    found = contributed(quantctl, file, model, "--gram", "--moments")
    features = quantd.FeatureStatistics(gram=True, moments=True)
    expected = client.calibrate(
        array, quantd.TensorName("array-" + element_type, "fc.input"),
        contribution=quantd.Contribution("job", 1, features=features),
        element_type=element_type).contribution
    assert state_of(client, model, "fc.input") == state_of(
        client, "array-" + element_type, "fc.input")
    assert found["fc.input"]["contribution"] == {
        "sequence": 1, "duplicate": False,
        "gram": {"rows": expected.gram.rows,
                 "left_out_rows": expected.gram.left_out_rows,
                 "clipped_count": expected.gram.clipped_count,
                 "part_size": 40},
        "moments": {"feature_count": 40, "count": expected.moments.count,
                    "left_out_count": expected.moments.left_out}}
    # A huge number is clipped.
    assert expected.gram.left_out_rows == 2
    # Again: counted once, and said.
    again = contributed(quantctl, file, model, "--gram", "--moments")
    assert again["fc.input"]["contribution"]["duplicate"]
    said = quantctl("calibrate", file, "--model", model + "-2", "--source", "s",
                    "--sequence", "1", "--gram", "--moments")
    assert f"{expected.gram.left_out_rows} rows are left out" in said
    assert "2 elements are left out of the moments" in said


def test_moments_along_another_axis(tmp_path, quantctl, client):
    images = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    file = tmp_path / "images.safetensors"
    quantd.save(file, {"conv.input": images})
    found = contributed(quantctl, file, "axis-file", "--moments",
                        "--feature-axis", "1")["conv.input"]
    assert found["contribution"]["moments"]["feature_count"] == 3
    assert "gram" not in found["contribution"]
    client.calibrate(
        images, quantd.TensorName("axis-array", "conv.input"),
        contribution=quantd.Contribution(
            "job", 1, features=quantd.FeatureStatistics(moments=True, axis=1)))
    assert state_of(client, "axis-file", "conv.input") == state_of(
        client, "axis-array", "conv.input")
    # A Gram matrix has the last dimension alone.
    failed = contributed(quantctl, file, "axis-no", "--gram", "--feature-axis",
                         "1", code=1)["conv.input"]
    assert failed["error"]["reason"] == "CONTRIBUTION_INVALID"
    for flags in (("--gram",), ("--feature-axis", "1", "--source", "s",
                                "--sequence", "1")):
        said = quantctl("calibrate", file, "--model", "axis-no", *flags, code=2)
        assert flags[0] in said


@pytest.fixture(name="digits", scope="module")
def fixture_digits(quantctl, client):
    """The inputs of the linear layers as model "features/digits"."""
    del client
    contributed(quantctl, ACTIVATIONS, "features/digits", "--include", "fc*",
                "--gram", "--moments")
    return quantd.load(WEIGHTS)


def test_the_error_at_the_output_is_the_services(quantctl, client, digits):
    specs = ["int4:per-channel", "int3:group:32:half-step:mse"]
    flags = ["evaluate", WEIGHTS, "--inputs", "features/digits"]
    for spec in specs:
        flags += ["--spec", spec]
    document = quantctl(*flags, "--json")
    tensors = {tensor["name"]: tensor["candidates"]
               for tensor in document["tensors"]}
    for name in ("fc1.weight", "fc2.weight"):
        expected = client.evaluate(
            digits[name], specs, inputs=quantd.TensorName(
                "features/digits", name.replace("weight", "input")))
        for found, metrics in zip(tensors[name], expected):
            noise = metrics.output_noise.noise_to_signal
            assert found["output_noise"] == {
                "noise_to_signal": noise, "source": "gram",
                "clipped_input_count": 0,
                "sqnr_db": pytest.approx(-10 * np.log10(noise))}
            assert found["sqnr_db"] == metrics.overall.sqnr_db
            # It is not that of the tensor.
            assert abs(found["output_noise"]["sqnr_db"] -
                       found["sqnr_db"]) > .1
    assert all("output_noise" not in candidate
               for candidate in tensors["conv1.weight"])
    table = quantctl(*flags)
    (row,) = [line for line in table.splitlines()
              if line.startswith("fc1.weight")]
    for found in tensors["fc1.weight"]:
        assert f"{found['output_noise']['sqnr_db']:.2f}" in row
    assert "is stored: conv1.weight, conv2.weight" in table
    # Without inputs nothing changes.
    assert "OUTPUT DB" in table
    assert "OUTPUT DB" not in quantctl("evaluate", WEIGHTS, "--spec", "int4")


def test_without_finite_elements_there_is_no_error_at_the_output(
        tmp_path, quantctl, digits):
    source = tmp_path / "x.safetensors"
    quantd.save(source, {
        "fc1.weight": np.full_like(digits["fc1.weight"], np.nan)})
    flags = "evaluate", source, "--inputs", "features/digits"
    ((found,),) = [tensor["candidates"] for tensor in quantctl(
        *flags, "--json")["tensors"]]
    assert found["output_noise"] == {"noise_to_signal": None, "sqnr_db": None,
                                     "source": "gram",
                                     "clipped_input_count": 0}
    # At the weight, at the output, and the largest.
    assert quantctl(*flags).count("n/a") == 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("policy", [(), ("--nan-policy", "zero-point"),
                                    ("--nan-policy", "qmin")])
def test_what_is_not_finite_takes_its_block_of_mx_along(tmp_path, quantctl,
                                                        value, policy):
    source, path = tmp_path / "x.safetensors", tmp_path / "q.safetensors"
    weight = np.ones((2, 64), np.float32)
    weight[1, 40] = value
    quantd.save(source, {"w": weight})
    for spec in "mxfp8_e4m3", "mxint8", "int8:group:32":
        said = quantctl("quantize", source, "-o", path, "--force", "--spec",
                        spec, *policy)
        is_mx = spec.startswith("mx")
        assert " infinities" in said
        assert ("all elements of their blocks become NaN" in said) == is_mx
        restored = quantd.load(path)["w"].dequantize()
        assert np.isnan(restored[1, 32:]).all() == is_mx
        assert np.isfinite(restored).sum() == (96 if is_mx else 128)
    said = quantctl("quantize", source, "-o", tmp_path / "none.safetensors",
                    "--spec", "mxfp8_e4m3", "--nan-policy", "reject", code=1)
    assert "NON_FINITE_REJECTED" in said


def test_inputs_that_are_not_there_are_told(tmp_path, quantctl, digits):
    del digits
    flags = ("evaluate", WEIGHTS, "--spec", "int4")
    assert "got none for the tensors" in quantctl(
        *flags, "--inputs", "features/none", code=2)
    assert "without the error at the output" in quantctl(
        *flags, "--inputs", "features/digits@main", "--include", "fc1*",
        "--include", "conv1*", code=1)
    assert "--inputs" in quantctl(*flags, "--inputs-map", "x.json", code=2)
    assert "--inputs" in quantctl(
        "evaluate", WEIGHTS, "--reference", WEIGHTS, "--inputs",
        "features/digits", code=2)
    # The map says where they are; the wrong ones are the server's error.
    (tmp_path / "map.json").write_text(json.dumps(
        {"fc1.weight": "fc2.input", "fc2.weight": "fc2.input"}))
    document = quantctl(*flags, "--inputs", "features/digits", "--inputs-map",
                        tmp_path / "map.json", "--include", "fc*", "--json",
                        code=1)
    found = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert found["fc1.weight"]["error"]["reason"] == "GRAM_INVALID"
    assert "output_noise" in found["fc2.weight"]["candidates"][0]


def test_a_gram_matrix_of_many_features_has_parts(tmp_path, request, quantctl):
    """As the operator bounds them."""
    del quantctl
    inputs = np.random.default_rng(5).standard_normal((20, 300)).astype(
        np.float32)
    file = tmp_path / "inputs.safetensors"
    quantd.save(file, {"fc.input": inputs})
    name = quantd.TensorName("parts", "fc.input")
    with live_server.LiveServer(
            request.config.getoption("--quantd"),
            flags=("--gram-features", "128")) as live:
        environment = {**os.environ, "QUANTD_SERVER": live.address}
        run = [request.config.getoption("--quantctl"), "calibrate", str(file),
               "--model", "parts", "--source", "s", "--sequence", "1",
               "--gram"]
        said = subprocess.run(
            run, env=environment, capture_output=True, text=True, check=True)
        assert "3 parts of 128 features" in said.stdout + said.stderr
        with quantd.Client(live.address) as client:
            gram = client.get_statistics(name).gram
            assert (gram.part_size, gram.part_count) == (128, 3)
            with pytest.raises(quantd.QuantdError,
                               match="at most 128.*--gram-features"):
                client.calibrate(
                    inputs, quantd.TensorName("parts", "other.input"),
                    contribution=quantd.Contribution(
                        "s", 1, features=quantd.FeatureStatistics(
                            gram=True, max_part=256)))
            # What an operator allows no more stays as it is.
            result = client.calibrate(
                inputs, name, contribution=quantd.Contribution(
                    "s", 2, features=quantd.FeatureStatistics(gram=True)))
            assert result.contribution.gram.part_size == 128


@pytest.fixture(name="layer", scope="module")
def fixture_layer():
    """A weight under llama.cpp's name, and how much its columns count."""
    rng = np.random.default_rng(11)
    weight = rng.standard_normal((24, 64)).astype(np.float32)
    squares = imatrix.InputSquares(
        np.exp(3 * rng.standard_normal((1, 64))).astype(np.float32) * 40,
        np.array([40], np.float32))
    return weight, squares


@pytest.mark.parametrize("suffix", [".gguf", ".dat"])
def test_a_file_of_llama_cpp_weighs_errors(tmp_path, quantctl, client, layer,
                                           suffix):
    weight, squares = layer
    importance = tmp_path / ("imatrix" + suffix)
    imatrix.save(importance, {"blk.0.attn_q.weight": squares,
                              "blk.7.ffn_up.weight": squares})
    # Also by the name that transformers has for it.
    for name in ("blk.0.attn_q.weight",
                 "model.layers.0.self_attn.q_proj.weight"):
        model = tmp_path / "model.safetensors"
        quantd.save(model, {name: weight, "other.weight": weight},
                    overwrite=True)
        spec = "int3:group:32:mse"
        flags = ("quantize", model, "-o", tmp_path / "out.safetensors",
                 "--force", "--spec", spec)
        report = quantctl(*flags, "--importance", importance, "--json")
        assert {tensor["name"]: tensor["importance"]
                for tensor in report["tensors"]} == {
                    name: True, "other.weight": False}
        found = quantd.load(tmp_path / "out.safetensors")
        entry = imatrix.load(str(importance))["blk.0.attn_q.weight"]
        expected = client.quantize(weight, dataclasses.replace(
            quantd.EncodingSpec.parse(spec), importance=entry.importance()))
        plain = client.quantize(weight, spec)
        np.testing.assert_array_equal(found[name].encoding.scale,
                                      expected.encoding.scale)
        assert found[name].codes.tobytes() == expected.codes.tobytes()
        np.testing.assert_array_equal(found["other.weight"].encoding.scale,
                                      plain.encoding.scale)
        assert not np.array_equal(expected.encoding.scale,
                                  plain.encoding.scale)
        said = quantctl(*flags, "--importance", importance)
        assert "does not have them: other.weight" in said
    # Asked for by name.
    said = quantctl(*flags, "--importance", importance, "--include", "*",
                    code=1)
    assert "asked for, but quantized without importance" in said
    # Blocks of GGUF that the server makes.
    quantctl("quantize", model, "-o", tmp_path / "q4_0.gguf", "--spec",
             "int4:group:32:scale=float16:mse", "--importance", importance)
    assert quantd.load(tmp_path / "q4_0.gguf")[name].shape == weight.shape


def weighed_error(weight, restored, weights):
    return (np.square(np.asarray(restored, np.float64) - weight) *
            weights).sum()


def test_a_file_of_llama_cpp_weighs_blocks_of_ggml(tmp_path, quantctl):
    """The K-quants that quantctl makes itself; no server is there."""
    rng = np.random.default_rng(17)
    weight = rng.standard_normal((16, 512)).astype(np.float32)
    squares = np.exp(2 * rng.standard_normal((1, 512))).astype(np.float32)
    importance = tmp_path / "imatrix.gguf"
    imatrix.save(importance, {"blk.0.ffn_up.weight": imatrix.InputSquares(
        squares * 7, np.array([7], np.float32))})
    name = "model.layers.0.mlp.up_proj.weight"
    model = tmp_path / "model.safetensors"
    quantd.save(model, {name: weight, "other.weight": weight})
    for spec in ("q4_K", "q5_K", "q6_K", "q4_0", "q4_1", "q5_0", "q5_1",
                 "q8_0"):
        found = []
        for flags in ((), ("--importance", importance)):
            report = quantctl(
                "quantize", model, "-o", tmp_path / "out.gguf", "--force",
                "--spec", spec, "--json", "--evaluate", "--server",
                "unix:/nowhere", *flags)
            assert {tensor["name"]: tensor["importance"]
                    for tensor in report["tensors"]} == {
                        name: bool(flags), "other.weight": False}
            found.append(dict(quantd.load(tmp_path / "out.gguf")))
        plain, weighed = found
        assert weighed_error(weight, weighed[name], squares) < (
            .95 * weighed_error(weight, plain[name], squares)), spec
        np.testing.assert_array_equal(weighed["other.weight"],
                                      plain["other.weight"])
        # As the commands that measure have it.
        (tensor,) = [tensor for tensor in report["tensors"]
                     if tensor["name"] == name]
        for command in ("sweep", "evaluate"):
            (measured,) = [one for one in quantctl(
                command, model, "--spec", spec, "--spec", "int8",
                "--importance", importance, "--json")["tensors"]
                           if one["name"] == name]
            candidate = next(one for one in measured["candidates"]
                             if one.get("label", one.get("spec")) == spec)
            assert candidate["sqnr_db"] == pytest.approx(tensor["sqnr_db"])


@pytest.fixture(name="network", scope="module")
def fixture_network(client, tmp_path_factory):
    """Weights of a convolution, of fused layers and of one without inputs; the
    inputs have moments, or a Gram matrix, as model "net"."""
    rng = np.random.default_rng(23)
    shapes = {"conv.weight": (16, 4, 3, 3), "a.q_proj.weight": (24, 64),
              "a.k_proj.weight": (24, 64), "fc.weight": (32, 64),
              "embed.weight": (40, 64), "plain.weight": (8, 64)}
    weights = {name: rng.standard_normal(shape).astype(np.float32)
               for name, shape in shapes.items()}
    for inputs, features in (("conv.input", 36), ("a.q_proj.input", 64),
                             ("elsewhere", 64), ("plain.input", 64)):
        kept = {"conv.input": dict(gram=True), "plain.input": None}.get(
            inputs, dict(moments=True))
        client.calibrate(
            (rng.standard_normal((200, features)) *
             np.exp(1.5 * rng.standard_normal(features))).astype(np.float32),
            quantd.TensorName("net", inputs, "calibrated"),
            contribution=quantd.Contribution(
                "job", 1, features=kept and quantd.FeatureStatistics(**kept)))
    folder = tmp_path_factory.mktemp("network")
    quantd.save(folder / "model.safetensors", weights)
    (folder / "map.json").write_text(json.dumps({"fc.weight": "elsewhere"}))
    return folder, weights


INPUTS = {"conv.weight": "conv.input", "a.q_proj.weight": "a.q_proj.input",
          "a.k_proj.weight": "a.q_proj.input", "fc.weight": "elsewhere"}


def weighed_by_name(client, weights, spec):
    """What the service makes of each weight, where it is told of its inputs."""
    spec = quantd.EncodingSpec.parse(spec)
    return {name: client.quantize(weight, dataclasses.replace(
        spec, importance=name in INPUTS and quantd.Importance(
            quantd.TensorName("net", INPUTS[name], "calibrated")) or None))
            for name, weight in weights.items()}


@pytest.mark.parametrize("where", [
    ("--inputs", "net@calibrated"),
    ("--inputs", "net@calibrated", "--model", "published"),
    ("--model", "net", "--revision", "calibrated", "--no-store"),
    ("--model", "net", "--revision", "calibrated")])
def test_stored_moments_weigh_a_whole_model(tmp_path, quantctl, client, network,
                                            where):
    folder, weights = network
    spec = "int3:per-channel:mse"
    out = tmp_path / "out.safetensors"
    flags = ("quantize", folder / "model.safetensors", "-o", out, "--spec",
             spec + ":importance", "--inputs-map", folder / "map.json", *where)
    report = quantctl(*flags, "--json")
    assert {tensor["name"]: tensor["importance"]
            for tensor in report["tensors"]} == {
                name: name in INPUTS for name in weights}
    found = quantd.load(out)
    for name, expected in weighed_by_name(client, weights, spec).items():
        assert found[name].codes.tobytes() == expected.codes.tobytes(), name
        if "--model" in where and "--no-store" not in where:
            stored = client.get_encoding(quantd.TensorName(
                where[where.index("--model") + 1], name,
                "calibrated" if "--revision" in where else "main"))
            np.testing.assert_array_equal(stored.encoding.scale,
                                          expected.encoding.scale)
    said = quantctl(*flags, "--force")
    assert ("quantized without importance, as no moments or Gram matrix of "
            "their inputs are stored: embed.weight, plain.weight") in said
    # Asked for by name.
    quantctl(*flags, "--force", "--spec", "embed*=int4:mse", code=0)
    said = quantctl(*flags, "--force", "--include", "*", code=1)
    assert "asked for, but quantized without importance" in said


def test_stored_moments_weigh_what_is_measured(quantctl, client, network):
    folder, weights = network
    specs = ["int3:per-channel:mse", "int3:per-channel:mse:importance", "int8"]
    expected = {name: [client.evaluate(weights[name], [candidate.encoding])[0]
                       .overall.sqnr_db for candidate in (
                           client.quantize(weights[name], specs[0]), quantized)]
                for name, quantized in weighed_by_name(
                    client, weights, specs[0]).items()}
    flags = [folder / "model.safetensors", "--inputs", "net@calibrated",
             "--inputs-map", folder / "map.json"]
    for spec in specs:
        flags += ["--spec", spec]
    for command in ("sweep", "evaluate"):
        for tensor in quantctl(command, *flags, "--json")["tensors"]:
            found = {one.get("label", one.get("spec")): one["sqnr_db"]
                     for one in tensor["candidates"]}
            assert [found[spec] for spec in specs[:2]] == pytest.approx(
                expected[tensor["name"]]), (command, tensor["name"])
            assert (expected[tensor["name"]][0] == expected[tensor["name"]][1]
                    ) == (tensor["name"] not in INPUTS)
        said = quantctl(command, *flags)
        assert "measured without importance" in said
        assert "embed.weight, plain.weight" in said
        said = quantctl(command, *flags, "--include", "e*", "--include", "fc*",
                        code=1)
        assert "embed.weight" in said
    # Moments alone do not tell the error at the output.
    said = quantctl("evaluate", *flags, "--include", "fc*")
    assert "without the error at the output of the layer" in said
    # evaluate also takes them from --model.
    document = quantctl("evaluate", folder / "model.safetensors", "--model",
                        "net", "--revision", "calibrated", "--include",
                        "a.k_proj*", "--spec", specs[1], "--json")
    assert document["tensors"][0]["candidates"][0]["sqnr_db"] == (
        pytest.approx(expected["a.k_proj.weight"][1]))


def test_importance_without_its_inputs_is_refused(tmp_path, quantctl, network):
    folder, _ = network
    model = folder / "model.safetensors"
    spec = ("--spec", "int4:mse:importance")
    out = ("-o", tmp_path / "out.safetensors")
    said = quantctl("quantize", model, *out, *spec, code=2)
    assert "expected --inputs, or --model" in said
    assert "expected --inputs" in quantctl("sweep", model, *spec, code=2)
    assert "expected --inputs" in quantctl("evaluate", model, *spec, code=2)
    for command in (("quantize", model, *out), ("sweep", model),
                    ("evaluate", model)):
        assert "got none for the tensors" in quantctl(
            *command, *spec, "--inputs", "net", code=2)
    # They are for nothing else.
    assert "a spec with importance" in quantctl(
        "quantize", model, *out, "--spec", "int4:mse", "--inputs", "net",
        code=2)
    assert "expected Gram matrices" in quantctl(
        "sweep", model, "--spec", "int4:mse", "--inputs", "net", code=2)
    assert "expected --inputs with" in quantctl(
        "sweep", model, "--spec", "int4:mse", "--output-weights", model,
        code=2)
    assert "with a file" in quantctl(
        "sweep", "--model", "net", "--spec", "int4", "--inputs", "net", code=2)
    assert "without importance in a report" in quantctl(
        "report", model, "-o", tmp_path / "report.html", *spec, code=2)
    # Of one tensor, by name.
    quantctl("quantize", model, *out, "--inputs", "net@calibrated", "--include",
             "fc.weight", "--spec", "int4:per-channel:mse:importance=elsewhere")


@pytest.mark.parametrize("store", [False, True])
def test_python_weighs_a_model_as_quantctl_does(tmp_path, quantctl, client,
                                                network, store):
    folder, weights = network
    spec = "int3:per-channel:mse:importance"
    inputs = quantd.ModelRounding("net", "calibrated",
                                  inputs={"fc.weight": "elsewhere"})
    (tmp_path / "in").mkdir()
    quantd.save(tmp_path / "in" / "model.safetensors", weights)
    quantctl("quantize", tmp_path / "in", "-o", tmp_path / "a", "--spec", spec,
             "--inputs", "net@calibrated", "--inputs-map", folder / "map.json")
    stored = dict(store=store, model="stored") if store else {}
    done = quantd.quantize_model(str(tmp_path / "in"), str(tmp_path / "b"),
                                 spec, client=client, inputs=inputs, **stored)
    assert {tensor.name: tensor.importance for tensor in done.tensors} == {
        name: name in INPUTS for name in weights}
    made = [quantd.load(tmp_path / name / "model.safetensors")
            for name in "ab"]
    for name in weights:
        assert made[0][name].codes.tobytes() == made[1][name].codes.tobytes()
    if store:
        assert client.get_encoding(quantd.TensorName(
            "stored", "fc.weight")).encoding.scale.tobytes() == made[1][
                "fc.weight"].encoding.scale.tobytes()
    # What the model of the encodings has serves by default.
    alone = quantd.quantize_model(
        folder / "model.safetensors", tmp_path / "alone.safetensors", spec,
        client=client, model="net", revision="calibrated", store=store)
    assert {tensor.name for tensor in alone.tensors if tensor.importance} == (
        INPUTS.keys() - {"fc.weight"})
    sweep = quantd.sweep_model(
        folder / "model.safetensors", [spec, "int8"], client=client,
        inputs=inputs)
    for tensor in sweep.tensors:
        (candidate,) = [one for one in tensor.candidates if one.spec == spec]
        assert candidate.importance == (tensor.name in INPUTS)
        assert candidate.metrics.sqnr_db == pytest.approx(client.evaluate(
            weights[tensor.name],
            [made[0][tensor.name].encoding])[0].overall.sqnr_db)


def test_python_takes_a_file_of_llama_cpp_as_quantctl_does(tmp_path, quantctl,
                                                           client, layer):
    weight, squares = layer
    name = "model.layers.0.self_attn.q_proj.weight"
    experts = imatrix.InputSquares(np.exp(np.random.default_rng(3).normal(
        size=(3, 64))).astype(np.float32), np.array([3, 0, 9], np.float32))
    imatrix.save(tmp_path / "imatrix.gguf", {
        "blk.0.attn_q.weight": squares, "experts.weight": experts})
    (tmp_path / "in").mkdir()
    quantd.save(tmp_path / "in" / "model.safetensors", {
        name: weight, "experts.weight": weight, "other.weight": weight,
        "head.weight": weight})
    specs = ["head*=int8", "int3:group:32:mse"]
    quantctl("quantize", tmp_path / "in", "-o", tmp_path / "a", "--importance",
             tmp_path / "imatrix.gguf",
             *(word for spec in specs for word in ("--spec", spec)))
    loaded = imatrix.load(str(tmp_path / "imatrix.gguf"))
    done = quantd.quantize_model(str(tmp_path / "in"), str(tmp_path / "b"),
                                 specs, client=client, importance=loaded)
    assert {tensor.name for tensor in done.tensors if tensor.importance} == {
        name, "experts.weight"}
    assert (tmp_path / "a/model.safetensors").read_bytes() == (
        tmp_path / "b/model.safetensors").read_bytes()
    sweep = quantd.sweep_model(str(tmp_path / "in"), specs[1], client=client,
                               importance=loaded)
    assert {tensor.name for tensor in sweep.tensors
            if tensor.candidates[0].importance} == {name, "experts.weight"}

    def reason(spec, entries, **arguments):
        with pytest.raises(quantd.QuantdError) as error:
            quantd.quantize_model(
                str(tmp_path / "in"), str(tmp_path / "c"), spec, client=client,
                importance=entries, **arguments)
        return error.value.message

    narrow = imatrix.InputSquares(np.ones((1, 32), np.float32),
                                  np.ones(1, np.float32))
    assert "64 columns" in reason("int4:mse", {name: narrow})
    assert "none of them" in reason("int4:mse", {"a.weight": squares})
    assert "mse, sqnr or best-of" in reason("int4", loaded)
    assert "got both" in reason("int4:mse:importance", loaded, inputs="net")
    assert "expected inputs" in reason("int4:mse:importance", None)
    assert "got none" in reason("int4:mse:importance", None, inputs="no/net")
    for entries in (None, loaded):
        assert "a spec with importance" in reason(
            "int4:mse", entries, inputs="net")
    assert "without damping" in reason(
        "int4:mse:importance", None,
        inputs=quantd.ModelRounding("net", damping=.5))
    with pytest.raises(quantd.QuantdError, match="spec with importance"):
        quantd.join_model(str(tmp_path / "in"), str(tmp_path / "c"), "int4",
                          inputs="net")


def test_modules_are_weighed_too(client):
    torch = pytest.importorskip("torch")
    import quantd.torch  # pylint: disable=import-outside-toplevel
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Embedding(10, 16), torch.nn.Linear(16, 8))
    weight = model[1].weight.detach().numpy().copy()
    rows = (np.random.default_rng(1).standard_normal((100, 16)) *
            np.exp(np.arange(16) / 3)).astype(np.float32)
    client.calibrate(rows, quantd.TensorName("module", "1.input"),
                     contribution=quantd.Contribution(
                         "job", 1, features=quantd.FeatureStatistics(
                             moments=True)))
    spec = "int3:per-channel:mse:importance"
    with pytest.raises(quantd.QuantdError, match="spec with importance"):
        quantd.torch.quantize_(model, "int3:mse", client=client,
                               inputs="module")
    assert isinstance(model[1].weight, torch.nn.Parameter)
    done = quantd.torch.quantize_(model, spec, client=client, inputs="module")
    assert {one.name: one.importance for one in done.replaced} == {
        "0.weight": False, "1.weight": True}
    expected = client.quantize(weight, spec, name=quantd.TensorName(
        "module", "1.weight"))
    np.testing.assert_array_equal(model[1].quantized_weight.scale.numpy(),
                                  expected.encoding.scale)


def test_a_model_without_weights_needs_no_importance(client, tmp_path):
    source, target = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    quantd.save(source, {"fc.weight": np.ones((0, 64), np.float32)})
    with pytest.raises(quantd.QuantdError, match="nothing is quantized"):
        quantd.quantize_model(
            source, target, "int4:group:32:mse", client=client,
            importance={"fc.weight": imatrix.InputSquares(
                np.ones((1, 64), np.float32), np.ones(1, np.float32))})
    assert quantd.load(target)["fc.weight"].shape == (0, 64)


def test_a_run_goes_on_only_with_the_same_moments(tmp_path, quantctl, client,
                                                  network):
    _, weights = network
    rows = np.random.default_rng(29).standard_normal((50, 64)).astype(
        np.float32)

    def contribute(sequence):
        client.calibrate(rows, quantd.TensorName("resumed", "fc.input"),
                         contribution=quantd.Contribution(
                             "job", sequence, features=quantd.FeatureStatistics(
                                 moments=True)))

    contribute(1)
    (tmp_path / "in").mkdir()
    quantd.save(tmp_path / "in" / "model.safetensors",
                {"fc.weight": weights["fc.weight"]})
    flags = ("quantize", tmp_path / "in", "-o", tmp_path / "out", "--inputs",
             "resumed", "--spec", "int4:per-channel:mse:importance", "--json")
    assert quantctl(*flags)["quantized_count"] == 1
    again = quantctl(*flags)
    assert again["kept_count"] == 1 and again["tensors"][0]["importance"]
    contribute(2)
    assert quantctl(*flags)["kept_count"] == 0


def test_importance_that_does_not_fit_is_refused(tmp_path, quantctl, layer):
    weight, squares = layer
    model = tmp_path / "model.safetensors"
    quantd.save(model, {"a.weight": weight})
    file = tmp_path / "imatrix.gguf"

    def refused(entries, *flags, spec="int4:group:32:mse", code=2,
                out="out.safetensors"):
        imatrix.save(file, entries, overwrite=True)
        said = quantctl("quantize", model, "-o", tmp_path / out, "--spec", spec,
                        "--importance", file, *flags, code=code)
        assert not (tmp_path / out).exists()
        return said

    narrow = imatrix.InputSquares(np.ones((1, 32), np.float32),
                                  np.ones(1, np.float32))
    assert "64 columns of a.weight, got that of 32" in refused(
        {"a.weight": narrow})
    assert "got none of them" in refused({"b.weight": squares})
    own = {"a.weight": squares}
    assert "mse, sqnr or best-of in the spec of a.weight" in refused(
        own, spec="int4:group:32")
    assert "got both" in refused(own, spec="int4:group:32:mse:importance")
    # What is no importance matrix.
    for content, reason in ((b"", "FILE_MALFORMED"),
                            (b"\1\0\0\0\2\0\0\0a", "FILE_MALFORMED"),
                            (model.read_bytes(), "FILE_MALFORMED")):
        file.write_bytes(content)
        said = quantctl("quantize", model, "-o", tmp_path / "out.safetensors",
                        "--spec", "int4:mse", "--importance", file, code=4)
        assert reason in said
    # It is an input: it is not replaced by the output.
    imatrix.save(file, own, overwrite=True)
    quantctl("quantize", model, "-o", file, "--force", "--spec", "int4:mse",
             "--importance", file, code=2)
    assert imatrix.load(str(file)).keys() == {"a.weight"}


def test_moments_become_a_file_of_llama_cpp(tmp_path, quantctl, client):
    rng = np.random.default_rng(13)
    names = {"model.layers.3.self_attn.q_proj": 48,
             "model.layers.3.mlp.down_proj": 80, "lm_head": 48, "odd": 16}
    inputs = {}
    for module, columns in names.items():
        rows = (rng.standard_normal((300, columns)) * np.exp(
            4 * rng.standard_normal(columns))).astype(np.float32)
        inputs[module] = rows
        for rank, part in enumerate(np.array_split(rows, 3)):
            client.calibrate(
                part, quantd.TensorName("to-llama", module + ".input"),
                contribution=quantd.Contribution(
                    f"rank-{rank}", 1,
                    features=quantd.FeatureStatistics(moments=True)))
    out = tmp_path / "imatrix.gguf"
    flags = ("export", "--model", "to-llama", "--format", "imatrix", "-o", out)
    document = quantctl(*flags, "--json")
    assert document["weight_count"] == 6 and document["losses"] == []
    assert document["bytes"] == out.stat().st_size
    found = imatrix.load(str(out))
    # Fused weights share their inputs; llama.cpp has names for the others.
    owners = {"blk.3.attn_q.weight": "model.layers.3.self_attn.q_proj",
              "blk.3.attn_k.weight": "model.layers.3.self_attn.q_proj",
              "blk.3.attn_v.weight": "model.layers.3.self_attn.q_proj",
              "blk.3.ffn_down.weight": "model.layers.3.mlp.down_proj",
              "output.weight": "lm_head", "odd.weight": "odd"}
    assert found.keys() == owners.keys()
    for weight, module in owners.items():
        squares = np.square(inputs[module].astype(np.float64))
        assert found[weight].counts.tolist() == [300]
        np.testing.assert_allclose(found[weight].sums[0], squares.sum(0),
                                   rtol=2**-23)
    # The same content as Python writes of it.
    imatrix.save(tmp_path / "python.gguf", found)
    again = imatrix.load(str(tmp_path / "python.gguf"))
    assert all((again[name].sums == entry.sums).all()
               for name, entry in found.items())
    assert (tmp_path / "python.gguf").read_bytes() == out.read_bytes()
    # Onto the model's weights again.
    weight = rng.standard_normal((8, 48)).astype(np.float32)
    quantd.save(tmp_path / "model.safetensors",
                {"model.layers.3.self_attn.v_proj.weight": weight})
    report = quantctl("quantize", tmp_path / "model.safetensors", "-o",
                      tmp_path / "out.safetensors", "--spec", "int4:mse",
                      "--importance", out, "--json")
    assert report["tensors"][0]["importance"]
    # Others' names by a map.
    (tmp_path / "map.json").write_text(json.dumps(
        {"head.weight": "lm_head.input", "gone.weight": "gone.input"}))
    document = quantctl(*flags, "--force", "--inputs-map", tmp_path / "map.json",
                        "--include", "lm_head*", "--json", code=1)
    assert imatrix.load(str(out)).keys() == {"head.weight"}
    assert document["losses"] == [{
        "tensor": "gone.weight", "left_out": True,
        "what": "no statistics of its inputs, gone.input"}]


def test_what_has_no_moments_is_told(tmp_path, quantctl, client):
    out = tmp_path / "imatrix.gguf"
    flags = ("export", "--model", "no-moments", "--format", "imatrix", "-o",
             out)
    ones = np.ones((4, 6, 8), np.float32)

    def contribute(tensor, **features):
        client.calibrate(ones, quantd.TensorName("no-moments", tensor),
                         contribution=quantd.Contribution(
                             "s", 1, features=quantd.FeatureStatistics(
                                 **features) if features else None))

    contribute("a.input")
    contribute("a.output")
    said = quantctl(*flags, code=1)
    assert "a.input: left out: no moments" in said and "a.output" not in said
    assert "is not written" in said and not out.exists()
    contribute("b.input", moments=True, axis=1)
    contribute("c.input", moments=True)
    said = quantctl(*flags, code=1)
    assert "b.input: left out: its moments are along dimension 1" in said
    assert imatrix.load(str(out)).keys() == {"c.weight"}
    assert "--inputs-map with --format imatrix" in quantctl(
        "export", "--model", "no-moments", "--inputs-map", "x", code=2)
