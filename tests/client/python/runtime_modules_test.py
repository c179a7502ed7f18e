"""Which modules of a model vLLM finds quantized in a folder of compressed-tensors:
experts, fused layers, heads and what it builds without quantization."""

import json
import os
import re
import shutil

import numpy as np
import pytest

import quantd
import runtime_rules as rules
from runtime_folders import (EXPERTS, SCHEMES, check_config, write_attention,
                             write_experts, write_modules)


def read_folder(folder):
    """The configuration and the tensors of all shards."""
    config = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = {path: rules.read_tensors(folder / path)
              for path in set(index["weight_map"].values())}
    return config, {name: shards[path][name]
                    for name, path in index["weight_map"].items()}


def vllm_finds(name, targets):
    return [target for target in targets if (
        re.match(target[3:], name) if target.startswith("re:") else
        target == name)]


@pytest.mark.parametrize("scheme", [name for name in SCHEMES
                                    if name not in ("FP8", "NVFP4")])
def test_ExpertsInOneTensorAreMatrices(tmp_path, quantctl, scheme):
    results = {}
    for layout in ("apart", "rows", "columns"):
        source = write_experts(tmp_path / layout, layout)
        target = tmp_path / f"{layout}-out"
        said = quantctl("quantize", source, "-o", target, "--scheme", scheme,
                        "--no-store")
        assert ("one matrix for each expert" in said) == (layout != "apart")
        assert ("(3 experts, transposed)" in said) == (layout == "columns")
        # The router and what has no kernels for experts.
        assert "left as they are: model.layers.0.mlp.gate" in said
        assert ("no kernels" in said) == (
            scheme in ("MXFP8", "MXFP8A16", "W4A16_ASYM")), said
        results[layout] = read_folder(target)
    config, expected = results["apart"]
    targets = [target for group in config["quantization_config"][
        "config_groups"].values() for target in group["targets"]]
    # What vLLM looks a layer of experts up by, and did up to 0.11.0.
    assert {f"{EXPERTS}.0.{name}_proj" for name in ("gate", "up", "down")
            } < set(targets)
    for name in ("down", "gate", "up"):
        assert vllm_finds(f"re:.*{name}_proj.*", targets)
    assert not vllm_finds("model.layers.0.mlp.up_proj", targets)
    assert len(targets) == 10
    for layout in ("rows", "columns"):
        found_config, found = results[layout]
        assert found_config == config
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, name)
    if scheme == "NVFP4A16":
        # vLLM takes the maximum of an expert's gate and up for both.
        for n in range(3):
            scales = [expected[f"{EXPERTS}.{n}.{which}_proj."
                               "weight_global_scale"]
                      for which in ("gate", "up")]
            assert scales[0] == scales[1]


def test_AMixtureHasTheNamesOfExpertsInOneTensor(tmp_path, quantctl):
    source = write_experts(tmp_path / "rows", "rows")
    mixture = tmp_path / "mixture.txt"
    quantctl("sweep", source, "--spec", "int8", "--spec",
             "int4:group:32", "--max-bits-per-element", "8.5", "-o", mixture)
    names = [f"{EXPERTS}.gate_up_proj=", f"{EXPERTS}.down_proj="]
    specs = mixture.read_text()
    for name in names:
        assert name in specs
    mixture.write_text("".join(f"{name}int4:group:32\n" for name in names))
    quantctl("quantize", source, "-o", tmp_path / "out", "--layout",
             "compressed-tensors", "--no-store", "--spec", f"@{mixture}")
    _, tensors = read_folder(tmp_path / "out")
    for name, groups in (("gate", 12), ("up", 12), ("down", 4)):
        for n in range(3):
            scale = tensors[f"{EXPERTS}.{n}.{name}_proj.weight_scale"]
            assert scale.shape[1] == groups, name
    assert "model.layers.0.mlp.gate.weight" in tensors


@pytest.mark.parametrize("layout, flags", [
    ("apart", ("--spec", "*.down_proj.weight=int4:group:32")),
    ("rows", ("--spec", "*.2.down_proj.weight=int4:group:32")),
    ("apart", ("--exclude", "*.experts.1.*")),
    # The rows of down_proj have less columns than a group.
    ("columns", ("--spec", "*proj*=int4:group:192"))])
def test_ExpertsOfSeveralSchemesAreRefused(tmp_path, quantctl, layout, flags):
    command = ("quantize", write_experts(tmp_path / "plain", layout), "-o",
               tmp_path / "out", "--no-store", "--layout", "compressed-tensors",
               "--spec", "int8:per-channel", *flags)
    said = quantctl(*command, code=2)
    assert f"expected one scheme for all tensors of {EXPERTS}.*, got" in said
    assert not (tmp_path / "out").exists()
    quantctl(*command, "--no-ties")


@pytest.mark.parametrize("layout", ["apart", "rows"])
def test_AMixtureHasOneSpecForTheExpertsOfALayer(tmp_path, quantctl, client,
                                                 layout):
    source, mixture = write_experts(tmp_path / "plain", layout), tmp_path / "m"
    specs = ("int8:per-channel", "int4:group:32")
    sweep = ("sweep", source, *(word for spec in specs
                                for word in ("--spec", spec)),
             "--include", "*.experts.*", "--max-bits-per-element", "7")
    quantctl(*sweep, "-o", mixture)
    chosen = dict(line.split("=", 1)
                  for line in mixture.read_text().splitlines())
    assert len(chosen) == (9 if layout == "apart" else 2)
    assert set(chosen.values()) == {"int4:group:32"}
    here = quantd.sweep_model(source, specs, client=client,
                              include=["*.experts.*"], max_bits_per_element=7)
    assert here.mixtures[0].specs == chosen
    quantctl("quantize", source, "-o", tmp_path / "out", "--layout",
             "compressed-tensors", "--no-store", "--spec", f"@{mixture}")
    # Alone some of them had more bits.
    quantctl(*sweep, "--no-ties", "-o", mixture, "--force")
    assert "int8:per-channel" in mixture.read_text()
    here = quantd.sweep_model(source, specs, client=client, ties=False,
                              include=["*.experts.*"], max_bits_per_element=7)
    assert set(here.mixtures[0].specs.values()) == set(specs)


MIXTRAL = "model.layers.{}.block_sparse_moe.experts"


@pytest.mark.parametrize("names", [("w1", "w2", "w3"),
                                   ("up_proj", "down_proj")])
def test_ExpertsAreFoundUnderTheNamesThatVllmLooksUp(tmp_path, quantctl,
                                                     names):
    source = tmp_path / "plain"
    source.mkdir()
    rng = np.random.default_rng(3)
    layers = [MIXTRAL.format(layer) for layer in range(3)]
    tensors = {f"{layer}.{n}.{name}.weight": rng.standard_normal(
        (64, 64), np.float32) for layer in layers for n in (1, 2)
               for name in names}
    quantd.save(source / "model.safetensors", tensors)
    (source / "config.json").write_text("{}")
    out = tmp_path / "out"
    flags = ("--layout", "compressed-tensors", "--no-store", "--spec",
             "int8:per-channel")
    report = quantctl("quantize", source, "-o", out, *flags, "--spec",
                      "model.layers.0.*=int4:group:32", "--exclude",
                      "model.layers.2.*", "--json")
    (warning,) = [text for text in report["warnings"] if "0.11.0" in text]
    assert f"{layers[1]}.*, {layers[2]}.*" in warning
    config = json.loads((out / "config.json").read_text())[
        "quantization_config"]
    bits = {target: group["weights"]["num_bits"]
            for group in config["config_groups"].values()
            for target in group["targets"]}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        looked_up = [f"{layer}.0.{projection}" for layer in layers]
        assert [bits.get(name) for name in looked_up] == [4, 8, None]
        assert [name in config["ignore"] for name in looked_up] == [
            False, False, True]
    assert not vllm_finds("re:.*up_proj.*", bits)
    quantctl("dequantize", out, "-o", tmp_path / "floats")
    assert quantd.load(tmp_path / "floats").keys() == tensors.keys()
    assert set(quantd.load(out)) == tensors.keys()
    # Of one scheme there is nothing to tell.
    report = quantctl("quantize", source, "-o", tmp_path / "one", *flags,
                      "--json")
    assert not [text for text in report["warnings"] if "0.11.0" in text]
    quantctl("dequantize", tmp_path / "one", "-o", tmp_path / "of_one")
    assert set(quantd.load(tmp_path / "one")) == tensors.keys()


def test_PartsShareExpertsOut(tmp_path, quantctl):
    source = write_experts(tmp_path / "plain", "columns")
    flags = ("--scheme", "NVFP4A16", "--no-store")
    quantctl("quantize", source, "-o", tmp_path / "whole", *flags)
    for more in (*(("--part", f"{n}/3") for n in range(3)), ("--join",)):
        quantctl("quantize", source, "-o", tmp_path / "joined", *flags, *more)
    for name in os.listdir(tmp_path / "whole"):
        assert (tmp_path / "joined" / name).read_bytes() == (
            tmp_path / "whole" / name).read_bytes()
    # Nothing is left to do.
    quantctl("quantize", source, "-o", tmp_path / "whole", *flags)


def test_ExpertsWithBiasesAreRefused(tmp_path, quantctl):
    source = write_experts(tmp_path / "plain", "columns")
    quantd.save(source / "model-00001-of-00002.safetensors", {
        f"{EXPERTS}.gate_up_proj": np.ones((3, 384, 256), np.float32),
        f"{EXPERTS}.gate_up_proj_bias": np.ones((3, 256), np.float32)},
                overwrite=True)
    said = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                    "W4A16", "--no-store", code=1)
    assert "without biases" in said
    # A file of quantd has the tensor as it is.
    quantctl("quantize", source, "-o", tmp_path / "own", "--spec", "int8",
             "--no-store")


GRANITE = "model.layers.0.block_sparse_moe"


def write_granite(folder, model_type, names=("input_linear", "output_linear")):
    folder.mkdir()
    rng = np.random.default_rng(3)
    stacks = {"input_linear": rng.standard_normal((3, 256, 128), np.float32),
              "output_linear": rng.standard_normal((3, 128, 128), np.float32)}
    quantd.save(folder / "model.safetensors", {
        **{f"{GRANITE}.{name}.weight": stacks[name] for name in names},
        f"{GRANITE}.router.layer.weight": np.ones((3, 128), np.float32),
        **{f"model.layers.0.mamba.{name}_proj.weight": stacks[
            "output_linear"][0] for name in ("in", "out")}})
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return stacks


@pytest.mark.parametrize("model_type, names", [
    ("granitemoe", ("w1", "w3", "w2")),
    ("granitemoehybrid", ("gate_proj", "up_proj", "down_proj"))])
def test_ExpertsOfGraniteAreMatrices(tmp_path, quantctl, model_type, names):
    stacks = write_granite(tmp_path / "plain", model_type)
    said = quantctl("quantize", tmp_path / "plain", "-o", tmp_path / "out",
                    "--scheme", "FP8_DYNAMIC", "--no-store", "--ignore",
                    "*.router.*", "--ignore", "*.out_proj")
    assert "one matrix for each expert" in said
    tensors = rules.read_tensors(tmp_path / "out" / "model.safetensors")
    halves = [*np.split(stacks["input_linear"], 2, axis=1),
              stacks["output_linear"]]
    for name, weights in zip(names, halves):
        for n, weight in enumerate(weights):
            module = f"{GRANITE}.experts.{n}.{name}.weight"
            reals = rules.decode_e4m3(tensors[module]) * tensors[
                module + "_scale"]
            np.testing.assert_allclose(reals, weight, rtol=.07, atol=.01)
    config = check_config(tmp_path / "out")
    (group,) = config["config_groups"].values()
    looked_up = {f"{GRANITE}.experts.0.{name}_proj"
                 for name in ("gate", "up", "down")}
    assert looked_up < set(group["targets"])
    # vLLM has a mixer by this name.
    assert "model.layers.0.mixer.in_proj" in group["targets"]
    assert config["ignore"] == [
        f"{GRANITE}.router.layer", "model.layers.0.mamba.out_proj",
        "model.layers.0.mixer.out_proj"]
    quantctl("quantize", tmp_path / "plain", "-o", tmp_path / "without",
             "--scheme", "FP8_DYNAMIC", "--no-store", "--exclude",
             "*experts*")
    assert looked_up < set(check_config(tmp_path / "without")["ignore"])


def test_AStackOfExpertsIsNoMatrix(tmp_path, quantctl):
    write_granite(tmp_path / "plain", "granitemoe", ["input_linear"])
    command = ("quantize", tmp_path / "plain", "--scheme", "FP8_DYNAMIC",
               "--no-store")
    said = quantctl(*command, "-o", tmp_path / "out")
    assert (f"as no matrices MODULE.weight: {GRANITE}.input_linear.weight\n"
            in said)
    assert f"{GRANITE}.experts.0.up_proj" in check_config(tmp_path / "out")[
        "ignore"]
    for more in (("--spec", "*=float8_e4m3fn:per-channel"),
                 ("--include", "*input_linear*")):
        said = quantctl(*command, "-o", tmp_path / "named", *more, code=1)
        assert f"{GRANITE}.input_linear.weight" in said
        assert "matrices that are named MODULE.weight" in said


def write_mixture(folder, spec, arrays):
    path = folder / "mixture.txt"
    path.write_text("".join(f"{name}={spec}\n" for name in arrays))
    return f"@{path}"


@pytest.mark.parametrize("which", ["scheme", "spec", "mixture"])
def test_OnlyTheWeightsOfLinearsAreTaken(tmp_path, quantctl, which):
    source = tmp_path / "plain"
    source.mkdir()
    (source / "config.json").write_text("{}")
    matrix = np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32)
    others = {
        "visual.patch_embed.proj.weight": np.ones((8, 3, 2, 4, 4), np.float32),
        "layers.0.mixer.conv1d.weight": np.ones((64, 1, 4), np.float32),
        "layers.0.mixer.A_log": matrix, "pos_embed": matrix[None],
        "layers.0.mlp.experts.down_proj_bias": matrix}
    embeddings = {
        "visual.pos_embed.weight": matrix, "shared.weight": matrix,
        "encoder.0.attention.relative_attention_bias.weight": matrix,
        "token_embedding.weight": matrix}
    arrays = {"layers.0.mixer.in_proj.weight": matrix, **others, **embeddings}
    quantd.save(source / "model.safetensors", arrays)
    spec = "int8:per-channel"
    flags = ["--no-store", *{
        "scheme": ("--scheme", "W8A8"), "spec": ("--spec", spec),
        "mixture": ("--spec", write_mixture(tmp_path, spec, arrays))}[which]]
    if which != "scheme":
        flags += ["--layout", "compressed-tensors"]
    report = quantctl("quantize", source, "-o", tmp_path / "out", *flags,
                      "--json")
    assert report["quantized_count"] == 1
    assert sorted(report["no_linear"]) == sorted(others)
    assert sorted(report["ignored"]) == sorted(
        name.removesuffix(".weight") for name in embeddings)
    tensors = rules.read_tensors(tmp_path / "out" / "model.safetensors")
    for name, value in (others | embeddings).items():
        np.testing.assert_array_equal(tensors[name], value)
    # Somebody who names one gets it.
    for name in "conv1d.weight", "A_log":
        said = quantctl("quantize", source, "-o", tmp_path / name, "--spec",
                        f"*{name}=int4", *flags, code=1)
        assert name in said


@pytest.mark.parametrize("taken, flags, code", [
    ("layers.0.attn.k_proj.weight_zero_point", (), 1),
    ("layers.0.attn.k_proj.weight_shape", ("--layout", "pack-quantized"), 1),
    ("layers.0.attn.k_proj.input_scale", ("--activations", "static=int8"), 2),
    ("layers.0.attn.k_scale", ("--kv-cache", "float8_e4m3fn"), 2)])
def test_NamesThatAreTakenAreFoundBeforeAnythingIsWritten(
        tmp_path, quantctl, client, taken, flags, code):
    for module in ("q_proj", "k_proj", "v_proj"):
        client.calibrate(np.ones(8, np.float32), quantd.TensorName(
            "taken", f"layers.0.attn.{module}.output"), "float8_e4m3fn")
        client.calibrate(np.ones(8, np.float32), quantd.TensorName(
            "taken", f"layers.0.attn.{module}.input"), "int8")
    flags = ("--scheme", "W8A8", "--model", "taken", "--no-store", "--include",
             "*attn*_proj.weight", *flags)
    quantctl("quantize", write_attention(tmp_path / "free"), "-o",
             tmp_path / "out", *flags)
    written = {name: (tmp_path / "out" / name).read_bytes()
               for name in os.listdir(tmp_path / "out")}
    source = write_attention(tmp_path / "other", more=(taken,))
    said = quantctl("quantize", source, "-o", tmp_path / "out", *flags,
                    "--force", code=code)
    assert f'the file has a tensor "{taken}" of its own' in said
    assert written == {name: (tmp_path / "out" / name).read_bytes()
                       for name in os.listdir(tmp_path / "out")}


def test_HeadEmbeddingsAndRoutersStay(tmp_path, quantctl):
    source = tmp_path / "model"
    source.mkdir()
    rng = np.random.default_rng(1)
    kept = ["embed_out", "gpt_neox.embed_in", "lm_head",
            "model.decoder.embed_positions", "model.embed_tokens",
            "model.layers.0.mlp.router", "net.embed", "wpe", "wte"]
    taken = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"]
    quantd.save(source / "model.safetensors", {
        name + ".weight": rng.standard_normal((32, 64), np.float32)
        for name in kept + taken})
    (source / "config.json").write_text('{"model_type": "test"}')

    def targets(*flags):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        said = quantctl("quantize", source, "-o", tmp_path / "out", "--no-store",
                        "--scheme", "W8A8", *flags)
        config = check_config(tmp_path / "out")
        (group,) = config["config_groups"].values()
        assert sorted(group["targets"] + config["ignore"]) == sorted(
            kept + taken)
        return sorted(group["targets"]), said

    found, said = targets()
    assert found == sorted(taken)
    assert "left as they are: embed_out, gpt_neox.embed_in, lm_head, " in said
    found, said = targets("--ignore", "")
    assert found == sorted(kept + taken)
    assert "left as they are" not in said
    assert targets("--ignore", "*.gate*")[0] == sorted(
        name for name in kept + taken if ".gate" not in name)
    # Who names one takes it.
    assert targets("--spec", "lm_head*=int8:per-channel")[0] == sorted(
        ["lm_head", *taken])
    # No runtime has kernels for all that can be written.
    _, said = targets("--activations", "dynamic=mxfp4_e2m1")
    assert "no kernels" in said
    # A model of nothing but these would have no scheme.
    for flags in ("--exclude", "*mlp*"), ("--ignore", "*"):
        said = quantctl("quantize", source, "-o", tmp_path / "none",
                        "--no-store", "--scheme", "W8A8", *flags, code=2)
        assert "--ignore '' takes them" in said
        assert not (tmp_path / "none").exists()


def test_WhatVllmHasNoQuantizedLayersForStays(tmp_path, quantctl):
    kept = ["head", "proj_out", "model.layers.61.eh_proj", "text_model.head",
            "model.layers.61.shared_head.head", "model.mtp_linear_proj",
            "model.mtp_layers.0.input_proj",
            *(f"backbone.layers.0.mixer.{name}_proj"
              for name in ("in", "x", "dt", "out"))]
    # Mamba 2 has no x_proj, and others have their own.
    taken = ["backbone.layers.1.mixer.in_proj",
             "backbone.layers.1.mixer.out_proj", "blocks.0.attn.out_proj",
             "vision.input_proj", "blocks.0.proj_out"]
    source = write_modules(tmp_path / "model", dict.fromkeys(
        kept + taken, (32, 64)))
    flags = ("--scheme", "W8A8", "--no-store")
    report = quantctl("quantize", source, "-o", tmp_path / "out", *flags,
                      "--json")
    assert sorted(report["ignored"]) == sorted(kept)
    (group,) = check_config(tmp_path / "out")["config_groups"].values()
    assert sorted(group["targets"]) == sorted(taken)
    report = quantctl("quantize", source, "-o", tmp_path / "named", *flags,
                      "--json", "--spec", "*mixer.x_proj*=int8:per-channel")
    assert "backbone.layers.0.mixer.x_proj" not in report["ignored"]


LLAMA4_VISION = ["vision_model.patch_embedding.linear",
                 "vision_model.model.layers.0.self_attn.q_proj",
                 "vision_model.vision_adapter.mlp.fc1",
                 "multi_modal_projector.linear_1"]


@pytest.mark.parametrize("kept, taken", [
    (LLAMA4_VISION, ["language_model.model.layers.0.self_attn.q_proj"]),
    # Of other models vLLM quantizes modules of these names.
    ([], LLAMA4_VISION[1:3]),
    (["mlp1.1", "mlp1.3", "vision_model.encoder.layers.0.attn.qkv"],
     ["language_model.model.layers.0.mlp1_proj"]),
    (["model.audio_tower.conformer.0.attention.attn.q_proj",
      "model.embed_audio.embedding_projection"],
     ["model.language_model.layers.0.self_attn.q_proj"]),
    (["audio_tower.layers.0.fc1", "multi_modal_projector.linear"],
     ["language_model.model.layers.0.mlp.up_proj"]),
    (["model.vision_tower.encoder.layers.0.self_attn.q_proj.linear",
      "model.vision_tower.patch_embedder.input_proj"],
     ["model.vision_tower.encoder.layers.0.self_attn.q_proj",
      "model.layers.0.linear"]),
    # Of SigLIP, with sizes that are no multiples of 64.
    (["vision_tower.vision_model.encoder.layers.0.mlp.fc1",
      "vision_model.head.mlp.fc2"],
     ["vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
      "model.decoder.layers.0.fc1"]),
    # That of RWKV is no router.
    ([], ["blocks.0.attention.gate"]),
    (["model.multi_modal_projector.patch_merger.merging_layer",
      "model.multi_modal_projector.linear_1"],
     ["model.vision_tower.transformer.layers.0.attention.q_proj"]),
    # In Mistral's own files, and of DeepSeek-VL2.
    (["output", "patch_merger.merging_layer", "vision_language_adapter.w_in",
      "vision_encoder.transformer.layers.0.attention.wq"],
     ["layers.0.attention.wq"]),
    (["projector.layers.0", "vision.blocks.0.attn.qkv"],
     ["language.model.layers.0.self_attn.q_proj"]),
    (["model.layers.0.conv.in_proj", "model.layers.0.conv.out_proj"],
     ["model.layers.1.self_attn.out_proj", "model.layers.2.mixer.in_proj"]),
    (["model.layers.0.mlp.gate.wg"], ["model.layers.0.mlp.shared_mlp.up_proj"]),
    (["model.layers.0.attn.Wqkv", "model.layers.0.attn.Wo",
      "model.layers.0.mlp.Wi", "model.layers.0.mlp.Wo", "decoder",
      "head.dense"],
     # Of Nomic's BERT.
     ["encoder.layers.0.attn.Wqkv", "encoder.layers.0.mlp.fc11"]),
    # Heads.
    (["language_model.output", "transformer.output_layer",
      "model.transformer.ff_out", "score", "classifier.dense",
      "v_head.summary",
      "cls.predictions.transform.dense", "lm_head.dense", "bert.pooler.dense"],
     ["model.transformer.blocks.0.ff_out",
      "encoder.layer.0.attention.output.dense"]),
    (["model.emb", "model.query_embed"], ["blocks.0.attention.output"]),
    (["model.layers.0.self_attn.indexer.weights_proj",
      "model.layers.0.self_attn.indexer.wk"],
     ["model.layers.0.self_attn.indexer.wq_b"])])
def test_WhatVllmBuildsWithoutQuantizationStays(tmp_path, quantctl, kept,
                                                taken):
    source = write_modules(tmp_path / "model", dict.fromkeys(
        kept + taken, (32, 64)))
    report = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                      "W8A8", "--no-store", "--json")
    assert sorted(report["ignored"]) == sorted(kept)
    config = check_config(tmp_path / "out")
    assert sorted(config["ignore"]) == sorted(kept)
    (group,) = config["config_groups"].values()
    assert sorted(group["targets"]) == sorted(taken)


def test_HeadsAndEmbeddingsThatAreAskedForAreTold(tmp_path, quantctl):
    source = write_modules(tmp_path / "model", dict.fromkeys((
        "model.embed_tokens", "lm_head", "score",
        "model.layers.0.self_attn.o_proj"), (128, 128)))
    flags = ("--layout", "compressed-tensors", "--no-store", "--json",
             "--spec", "*o_proj*=int4:group:128")

    def warnings_of(*more):
        return quantctl("quantize", source, "-o", tmp_path / "out", "--force",
                        *flags, *more)["warnings"]

    embeddings = "vLLM has no quantized embeddings: model.embed_tokens.weight;"
    heads = ("vLLM before mid-2026 has no quantized heads, and later ones not "
             "for all schemes: lm_head.weight;")
    assert warnings_of() == []
    (told,) = warnings_of("--spec", "*embed_tokens*=int4:group:128")
    assert told.startswith(embeddings)
    (told,) = warnings_of("--spec", "lm_head*=int4:group:128")
    assert told.startswith(heads)
    assert warnings_of("--spec", "score*=int4:group:128") == []
    told = warnings_of("--ignore", "", "--spec", "int4:group:128")
    assert [text.split(";")[0] + ";" for text in told] == [heads, embeddings]


def test_WeightsOfConv1dStay(tmp_path, quantctl):
    conv1d = {"h.0.attn.c_attn": (64, 192), "h.0.attn.c_proj": (64, 64),
              "h.0.mlp.c_fc": (64, 256), "h.0.mlp.c_proj": (256, 64)}
    flags = ("--scheme", "W8A8", "--no-store")
    source = write_modules(tmp_path / "gpt2", {"wte": (96, 64), **conv1d})
    said = quantctl("quantize", source, "-o", tmp_path / "none", *flags, code=2)
    assert "expected modules to quantize" in said and "Conv1D" in said
    assert not (tmp_path / "none").exists()
    source = write_modules(tmp_path / "both", {
        "encoder.0.q_proj": (64, 64), **{"decoder." + name: shape
                                         for name, shape in conv1d.items()}})
    for more in (flags, ("--layout", "compressed-tensors", "--no-store")):
        out = tmp_path / more[0]
        report = quantctl("quantize", source, "-o", out, *more, "--json")
        assert report["conv1d"] == sorted(
            f"decoder.{name}.weight" for name in conv1d)
        (group,) = check_config(out)["config_groups"].values()
        assert group["targets"] == ["encoder.0.q_proj"]
    said = quantctl("quantize", source, "-o", tmp_path / "told", *flags)
    assert "left as they are: decoder.h.0.attn.c_attn.weight, " in said
    said = quantctl("quantize", source, "-o", tmp_path / "named", *flags,
                    "--include", "*c_fc*", code=1)
    assert "decoder.h.0.mlp.c_fc.weight" in said and "Conv1D" in said
    # Of others it lies [out, in].
    source = write_modules(tmp_path / "qwen", {
        name: shape[::-1] for name, shape in conv1d.items()})
    report = quantctl("quantize", source, "-o", tmp_path / "out", *flags,
                      "--json")
    assert report["quantized_count"] == 4 and not report["conv1d"]


def test_WhatFitsOrIsNotOfTorchIsTaken(tmp_path, quantctl):
    source = write_modules(tmp_path / "model", {
        "vision_model.encoder.layers.0.mlp.fc1": (128, 64),
        "attn.out_proj": (64, 64), "resampler.attn.out_proj": (64, 64)})
    tensors = dict(quantd.load(source / "model.safetensors"))
    quantd.save(source / "model.safetensors", {
        **tensors, "resampler.attn.in_proj_weight": np.ones(
            (192, 64), np.float32)}, overwrite=True)
    report = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                      "W8A8", "--no-store", "--json")
    assert report["ignored"] == ["resampler.attn.out_proj"]
    assert report["quantized_count"] == 2


@pytest.mark.parametrize("more, others", [
    ({"experts.0.up_proj": (64, 64), "experts.0.down_proj": (64, 64)},
     ["experts.0.down_proj", "experts.0.up_proj"]),
    ({"experts.gate_up_proj": (4, 128, 64), "experts.down_proj": (4, 64, 64)},
     [f"experts.{n}.{name}_proj" for n in range(4)
      for name in ("down", "gate", "up")]),
    # Without "experts", a stack of as many matrices.
    ({"up_proj": (4, 64, 64), "o_proj": (64, 64)}, ["o_proj"])])
def test_ARouterIsAGateBesideExperts(tmp_path, quantctl, more, others):
    source = write_modules(tmp_path / "model", {"mlp.gate": (4, 64), **{
        "mlp." + name: shape for name, shape in more.items()}})
    report = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                      "W8A8", "--no-store", "--json")
    assert report["ignored"] == ["mlp.gate"]
    quantized = [row["name"] for row in report["tensors"]
                 if row["result"] == "quantized"]
    assert sorted(quantized) == [f"mlp.{name}.weight" for name in others]


@pytest.mark.parametrize("shapes, flags, told", [
    ({"o_proj": (64, 128), "down": (128, 256)}, (), None),
    ({"o_proj": (96, 128), "down": (64, 128)}, (), "o_proj.weight"),
    ({"o_proj": (64, 192)}, ("--spec", "int4:group:64"), "o_proj.weight"),
    ({"o_proj": (64, 192)}, ("--spec", "int4:per-channel"), "o_proj.weight"),
    ({"o_proj": (64, 128)}, ("--spec", "int4:group:16"), "o_proj.weight"),
    ({"o_proj": (64, 128)}, ("--spec", "int4:group:64"), None),
    ({"o_proj": (64, 128)}, ("--spec", "int4:per-channel"), None),
    ({"o_proj": (96, 128)}, ("--scheme", "W8A16"), "o_proj.weight"),
    ({"o_proj": (96, 128)}, ("--scheme", "W4A16_ASYM"), "o_proj.weight"),
    ({"o_proj": (96, 128)}, ("--scheme", "W8A8"), None),
    ({"o_proj": (96, 128)}, ("--scheme", "FP8_DYNAMIC"), None),
    # Of fused matrices the sum counts.
    ({"q_proj": (64, 128), "k_proj": (32, 128), "v_proj": (32, 128)}, (), None),
    ({"gate_proj": (80, 128), "up_proj": (80, 128)}, (),
     "{gate,up}_proj.weight"),
    # Of floats, Marlin has two tiles.
    *(({"o_proj": shape}, flags, told)
      for flags in [("--spec", "float8_e4m3fn:per-channel"),
                    ("--scheme", "NVFP4A16"), ("--scheme", "MXFP4A16"),
                    ("--scheme", "MXFP8A16")]
      for shape, told in [((64, 128), None), ((128, 64), None),
                          ((64, 64), "o_proj.weight"),
                          ((96, 128), "o_proj.weight")]),
    ({"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64)},
     ("--scheme", "NVFP4A16"), None),
    # CUTLASS has one for groups of int4.
    ({"o_proj": (128, 256), "down": (256, 128)}, ("--scheme", "W4AFP8"), None),
    ({"o_proj": (64, 128)}, ("--scheme", "W4AFP8"), "o_proj.weight"),
    ({"q_proj": (64, 128), "k_proj": (32, 128), "v_proj": (32, 128)},
     ("--scheme", "W4AFP8"), None),
    # Machete alone has zero points of eight bits.
    ({"o_proj": (128, 128)}, ("--spec", "uint8:group:128", "--layout",
                              "pack-quantized"), "o_proj.weight"),
    ({"o_proj": (128, 128)}, ("--spec", "int8:group:128", "--layout",
                              "pack-quantized"), None),
    # Experts have other kernels too.
    ({"experts.0.up_proj": (96, 128), "experts.0.down_proj": (128, 128)}, (),
     None)])
def test_ShapesThatKernelsDoNotTakeAreTold(tmp_path, quantctl, shapes, flags,
                                           told):
    source = write_modules(tmp_path / "model", {
        "mlp." + name: shape for name, shape in shapes.items()})
    if "--spec" in flags and "--layout" not in flags:
        flags += ("--layout", "compressed-tensors")
    command = ("quantize", source, "-o", tmp_path / "out", "--no-store",
               *(flags or ("--scheme", "W4A16")))
    warnings = [text for text in quantctl(*command, "--json")["warnings"]
                if "vLLM's" in text]
    if told is None:
        assert not warnings
        return
    (warning,) = warnings
    assert f": mlp.{told}; --exclude" in warning
    for words, kernels in {"float8": "floats", "A16": "Marlin",
                           "W4AFP8": "float8 inputs",
                           "uint8": "Hopper"}.items():
        assert words not in "".join(flags[1:2]) or kernels in warning
    assert f"quantctl: warning: {warning}" in quantctl(*command)


@pytest.mark.parametrize("rows, label", [
    ((256, 128, 128, 256, 256), None), ((256, 64, 64, 256, 256), "attn"),
    ((256, 128, 128, 192, 192), "mlp"), ((256, 64, 128, 256, 256), "attn"),
    ((192, 128, 128, 256, 256), "attn"),
    # Only the last of fused matrices may end within a block.
    ((256, 128, 64, 256, 256), None), ((256, 128, 128, 256, 192), None)])
def test_FusedRowsThatAreNoWholeBlocksAreTold(tmp_path, quantctl, rows, label):
    names = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj",
             "mlp.up_proj")
    source = write_modules(tmp_path / "model", {
        "attn.o_proj": (192, 256),
        **{name: (count, 256) for name, count in zip(names, rows)}})
    said = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                    "FP8_BLOCK", "--no-store")
    assert ("no whole blocks" in said) == (label is not None), said
    if label:
        assert f"whole blocks: {label}.{{" in said


@pytest.mark.parametrize("shape, config, is_told", [
    # 16 heads of 16; 256, 64 and 64 rows.
    ((384, 128), {"num_key_value_heads": 4}, True),
    ((512, 128), {"num_key_value_heads": 8}, False),
    ((768, 128), {}, False), ((960, 128), {"head_dim": 20}, True),
    ((384, 128), {"num_key_value_heads": 4, "head_dim": None}, True),
    # Nobody knows which parts these are.
    ((320, 128), {}, False)])
def test_MatricesInOneWithoutWholeBlocksAreTold(tmp_path, quantctl, shape,
                                                config, is_told):
    source = write_modules(tmp_path / "model", {
        "attn.qkv_proj": shape, "mlp.gate_up_proj": (512, 128)})
    heads = {"num_attention_heads": 16, "head_dim": 16, "hidden_size": 256}
    (source / "config.json").write_text(json.dumps(
        {"text_config": {**heads, **config}}))
    warnings = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                        "FP8_BLOCK", "--no-store", "--json")["warnings"]
    assert len(warnings) == is_told
    assert not warnings or "whole blocks: attn.qkv_proj.weight; take" in (
        warnings[0])


def test_HalvesInOneWithoutWholeBlocksAreTold(tmp_path, quantctl):
    source = write_modules(tmp_path / "model", {
        "mlp.gate_up_proj": (384, 128), "mlp.down_proj": (128, 192)})
    said = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                    "FP8_BLOCK", "--no-store", "--exclude", "*.down_proj.*")
    assert "whole blocks: mlp.gate_up_proj.weight; take" in said


@pytest.mark.parametrize("model_dtype", ["BF16", "F16"])
@pytest.mark.parametrize("scheme", [name for name in SCHEMES
                                    if name not in ("FP8", "NVFP4")])
def test_ScalesThatRuntimesHoldInTheTypeOfTheModelAreWrittenSo(
        tmp_path, quantctl, scheme, model_dtype):
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((8, 256), np.float32)
    # So small that float16 has few numbers for the scale.
    weight[0] *= 2. ** -19
    if model_dtype == "BF16":
        halves = (weight.view(np.uint32) >> 16).astype(np.uint16)
        weight = (halves.astype(np.uint32) << 16).view(np.float32)
    else:
        halves = weight.astype(np.float16)
        weight = halves.astype(np.float32)
    with open(source / "model.safetensors", "wb") as file:
        header = json.dumps({name: {
            "dtype": dtype, "shape": [8, 256], "data_offsets": [begin, end]}
            for name, dtype, begin, end in (
                ("a.weight", model_dtype, 0, 4096),
                ("b.weight", "F32", 4096, 12288))}).encode()
        file.write(len(header).to_bytes(8, "little") + header +
                   halves.tobytes() + weight.tobytes())
    said = quantctl("quantize", source, "-o", tmp_path / "out", "--scheme",
                    scheme, "--no-store")
    with open(tmp_path / "out" / "model.safetensors", "rb") as file:
        data = file.read()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    dtype = header["a.weight_scale"]["dtype"]
    is_model_scale = scheme in ("W4A16", "W4A16_ASYM", "W8A16")
    assert (dtype == model_dtype) == is_model_scale
    assert ("a.weight: 2 scales are below 2^-20" in said) == (
        is_model_scale and model_dtype == "F16")
    assert "b.weight: 2 scales" not in said
    assert header["b.weight_scale"]["dtype"] == (
        "F32" if is_model_scale else dtype)
    if not is_model_scale:
        return

    def part(name, dtype):
        info = header[f"a.weight_{name}"]
        return np.frombuffer(data[start:][slice(*info["data_offsets"])],
                             dtype).reshape(info["shape"])

    # The codes are the nearest with the scales that are written.
    scale = part("scale", np.uint16)
    scale = ((scale.astype(np.uint32) << 16).view(np.float32)
             if model_dtype == "BF16" else
             scale.view(np.float16).astype(np.float32))
    bits = 8 if scheme == "W8A16" else 4
    codes = rules.unpack_words(part("packed", np.int32), bits, 256)
    zeros, half = np.zeros((8, 2)), 1 << bits - 1
    if scheme == "W4A16_ASYM":
        zeros = rules.unpack_words(np.ascontiguousarray(
            part("zero_point", np.int32).T), bits, 8).T
    zeros, scale = np.repeat(zeros, 128, 1), np.repeat(scale, 128, 1)
    exact = np.clip(np.round(weight / scale) + zeros, -half, half - 1)
    np.testing.assert_array_equal(codes, exact)
