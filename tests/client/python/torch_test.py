"""The hook on models of torch, with a live quantd: what it sends, that it
counts exactly once, and what a trained network keeps of its accuracy."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

# pylint: disable=wrong-import-position
import numpy as np

import live_server
import quantd
import quantd.torch
import torch.nn.utils.parametrizations
import torch.nn.utils.prune
import torch.utils.checkpoint
import training

RANKS = 4
TIMEOUT_S = 240

# Started before gRPC has threads: a fork that comes later may abort in gRPC.
pytestmark = pytest.mark.usefixtures("server")


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(inplace=True),
        torch.nn.Flatten(), torch.nn.Linear(72, 5))


def batches(count, size=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 1, 8, 8, generator=generator)
            for _ in range(count)]


def statistics(client, model, tensor):
    return client.get_statistics(quantd.TensorName(model, tensor),
                                 with_state=True)


def names(client, model):
    return [entry.tensor for entry in client.list_statistics(model)]


def test_TheHookCountsWhatGoesInAndNothingElse(client):
    model, data = small_model(), batches(5)
    want = [model(x) for x in data]
    seen = []
    linear = model[3]
    handle = linear.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].detach().numpy().copy()))
    with quantd.torch.calibrate(model, client, model_name="t/in",
                                source="rank-0") as calibration:
        for x, y in zip(data, want):
            assert torch.equal(model(x), y)
        calibration.is_enabled = False
        model(data[0])
        calibration.is_enabled = True
        calibration.flush()
        assert calibration.sequences == {"0.input": 5, "3.input": 5}
    handle.remove()
    model(data[0])
    assert names(client, "t/in") == ["0.input", "3.input"]
    stored = statistics(client, "t/in", "3.input")
    # Without the batch that was not to be counted.
    x = np.concatenate(seen[:5])
    client.calibrate(x, quantd.TensorName("t/want", "x"),
                     contribution=quantd.Contribution("a", 1))
    whole = statistics(client, "t/want", "x")
    assert stored.statistics == whole.statistics
    assert list(stored.state.histograms) == list(whole.state.histograms)
    assert not any(thread.name == "quantd-calibrate"
                   for thread in threading.enumerate())


class HeldClient:
    """Sends nothing until it is told to."""

    def __init__(self, client):
        self._client = client
        self.released = threading.Event()

    def get_statistics(self, *args):
        return self._client.get_statistics(*args)

    def calibrate_many(self, *args, **kwargs):
        self.released.wait(TIMEOUT_S)
        return self._client.calibrate_many(*args, **kwargs)


def test_ModulesAndTensorsCanBeChosen(client):
    model = small_model().to(torch.bfloat16)
    x = batches(1)[0].to(torch.bfloat16)
    held = HeldClient(client)
    with quantd.torch.calibrate(
            model, held, model_name="t/choose", source="s",
            modules=["1", "3"], record=("input", "output"),
            granularity=quantd.per_channel(1)):
        y = model(x)
        held.released.set()
    assert names(client, "t/choose") == [
        "1.input", "1.output", "3.input", "3.output"]
    # ReLU writes over its input; what went in was taken before.
    assert statistics(client, "t/choose", "1.input").statistics.min < 0
    stored = statistics(client, "t/choose", "3.output")
    assert len(stored.state.histograms) == 5
    assert stored.statistics.max == float(y.max())

    class Pair(torch.nn.Module):
        def forward(self, a, b):
            return a, b.long(), b

    pair = Pair()
    with quantd.torch.calibrate(
            pair, client, model_name="t/pair", source="s",
            modules=lambda name, module: module is pair,
            record=["input", "output"]):
        pair(torch.ones(3), torch.zeros(2))
    assert names(client, "t/pair") == ["input", "input.1", "output",
                                       "output.2"]
    for arguments in ({"modules": "nothing"}, {"record": "input"},
                      {"record": ()}, {"on_error": "?"}):
        with pytest.raises(quantd.QuantdError):
            quantd.torch.calibrate(model, client, model_name="t/bad",
                                   source="s", **arguments)


class Faked(torch.nn.Linear):
    """Rounds its weight as it runs."""

    def __init__(self):
        super().__init__(5, 5)
        self.fake = quantd.torch.FakeQuantize(quantd.Encoding("int8", [0.01]))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.fake(self.weight), self.bias)


class Flat(torch.nn.Module):
    """A parametrization that keeps a matrix in one dimension."""

    def forward(self, flat):
        return flat.reshape(5, 5)

    def right_inverse(self, weight):
        return weight.reshape(-1)


def test_LayersWhoseWeightsAreComputedAreCounted(client):
    layers = [torch.nn.Linear(5, 5) for _ in range(6)]
    parametrize = torch.nn.utils.parametrize
    parametrize.register_parametrization(
        layers[0], "weight",
        quantd.torch.FakeQuantize(quantd.Encoding("int8", [0.01])))
    torch.nn.utils.weight_norm(layers[1])
    torch.nn.utils.parametrizations.spectral_norm(layers[2])
    parametrize.register_parametrization(layers[3], "bias", torch.nn.Tanh())
    torch.nn.utils.prune.l1_unstructured(layers[4], "weight", 3)
    parametrize.register_parametrization(layers[5], "weight", Flat())
    # A parametrized weight of one dimension is still none.
    norm = torch.nn.LayerNorm(5)
    parametrize.register_parametrization(norm, "weight", torch.nn.Tanh())
    model = torch.nn.Sequential(*layers, Faked(), norm)
    before = {name: tensor.clone()
              for name, tensor in model.state_dict().items()}
    with quantd.torch.calibrate(model, client, model_name="t/computed",
                                source="s"):
        # To choose layers changes nothing: that of spectral_norm would.
        assert all(torch.equal(tensor, before[name])
                   for name, tensor in model.state_dict().items())
        model(torch.randn(3, 5))
    assert names(client, "t/computed") == [f"{n}.input" for n in range(7)]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_WhatIsComputedAgainInTheBackwardPassCountsOnce(client, use_reentrant):
    model, name = small_model(), f"t/checkpoint-{use_reentrant}"
    with quantd.torch.calibrate(model, client, model_name=name, source="s",
                                record=["input", "output"]) as block:
        for x in batches(3):
            y = torch.utils.checkpoint.checkpoint(
                model, x.requires_grad_(), use_reentrant=use_reentrant)
            (y.sum() + model(x).sum()).backward()
            assert model[0].weight.grad is not None
    assert block.sequences == dict.fromkeys(
        ["0.input", "0.output", "3.input", "3.output"], 6)


def test_InputsByKeywordAreThoseOfTheirPlace(client):
    class Mixed(torch.nn.Module):
        def forward(self, a, b=None, *, scale=None, **more):
            return a

    mixed, x = Mixed(), torch.ones(3)
    outer = torch.nn.ModuleDict({"mixed": mixed, "linear":
                                 torch.nn.Linear(3, 2)})
    with quantd.torch.calibrate(outer, client, model_name="t/keyword",
                                source="s", modules=["mixed", "linear"]
                                ) as block:
        outer["linear"](input=x)
        outer["linear"](x)
        mixed(b=2 * x, a=x)
        mixed(x, scale=3 * x, other=4 * x, text="no tensor")
    assert block.sequences == {
        "linear.input": 2, "mixed.input": 2, "mixed.input.1": 1,
        "mixed.input.scale": 1, "mixed.input.other": 1}
    stored = statistics(client, "t/keyword", "mixed.input.scale")
    assert stored.statistics.max == 3


def transformer():
    torch.manual_seed(2)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2).eval()


def test_TransformersRunTheirModulesWhileTheyAreObserved(client):
    model, x = transformer(), torch.randn(3, 5, 16)
    ran = []
    model.layers[1].linear2.register_forward_pre_hook(
        lambda *_: ran.append(1))

    def run():
        ran.clear()
        with torch.no_grad():
            model(x)
        return len(ran)

    before = run()
    with quantd.torch.calibrate(model, client, model_name="fast", source="a"
                                ) as block:
        with quantd.torch.calibrate(model.layers, client, source="a",
                                    model_name="inner"):
            assert run() == 1
        assert run() == 1
    assert run() == before
    names_of = [f"layers.{layer}.{name}" for layer in range(2) for name in (
        "self_attn.input", "self_attn.input.1", "self_attn.input.2",
        "linear1.input", "linear2.input")]
    assert block.sequences == dict.fromkeys(names_of, 2)
    with pytest.raises(ZeroDivisionError), quantd.torch.calibrate(
            model, client, model_name="broken", source="a"):
        raise ZeroDivisionError
    assert run() == before
    weights = quantd.torch.output_weights(model, x)
    assert sorted(weights) == [f"layers.{layer}.linear{n}.weight"
                               for layer in range(2) for n in (1, 2)]


def test_TheFastPathComesBackAfterTheLastBlock(client, monkeypatch):
    """As torch has it since 2.1, for the whole process."""
    class Setting:
        enabled = True

        def get_fastpath_enabled(self):
            return self.enabled

        def set_fastpath_enabled(self, value):
            self.enabled = value

    setting = Setting()
    monkeypatch.setattr(torch.backends, "mha", setting, raising=False)
    model = torch.nn.Linear(4, 4)
    for was in (True, False):
        setting.enabled = was
        first, second = (quantd.torch.calibrate(
            model, client, model_name=f"{name}-{was}", source="a")
            for name in "ab")
        first.__enter__()  # pylint: disable=unnecessary-dunder-call
        second.__enter__()  # pylint: disable=unnecessary-dunder-call
        model(torch.ones(2, 4))
        first.__exit__(None, None, None)
        assert not setting.enabled
        second.__exit__(None, None, None)
        assert setting.enabled == was


def test_ModulesThatDoNotRunAreNamed(client):
    model = transformer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quantd.torch.calibrate(model, client, model_name="unseen",
                                    source="a", modules=["*linear1", "*proj"]):
            with torch.no_grad():
                model.layers[0](torch.randn(3, 5, 16))
    (told,) = [str(warning.message) for warning in caught
               if "did not run" in str(warning.message)]
    assert told.endswith(": layers.0.self_attn.out_proj, "
                         "layers.1.self_attn.out_proj, layers.1.linear1")


def attend(query, key, value):
    """What torch has since 2.0, by its name."""
    if torch.overrides.has_torch_function((query, key, value)):
        return torch.overrides.handle_torch_function(
            attend, (query, key, value), query, key, value)
    return torch.softmax(query @ key.transpose(1, 2), -1) @ value


attend.__name__ = "scaled_dot_product_attention"
attend = getattr(torch.nn.functional, attend.__name__, attend)


class Attention(torch.nn.Module):
    """With products of all kinds, and a module that is called in between."""

    def __init__(self, inner=None):
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x):
        scores = x @ (x * 2).transpose(1, 2)
        x = torch.matmul(scores, other=x * 3)
        if self.inner is not None:
            x = self.inner(x)
        x = self.proj(x)
        x = torch.bmm(scores * 4, mat2=x * 5)
        x = torch.baddbmm(x, scores, (x * 6))
        return attend(x, x * 7, value=x * 8)


@pytest.mark.skipif(not hasattr(torch.overrides, "TorchFunctionMode"),
                    reason="torch is older than 1.13")
@pytest.mark.parametrize("where", ["server", "device"])
def test_ProductsThatFunctionsComputeAreCounted(client, where):
    torch.manual_seed(3)
    model = torch.nn.Sequential(Attention(Attention()), torch.nn.Linear(4, 4))
    data = [torch.rand(2, 3, 4) for _ in range(3)]
    with torch.no_grad(), quantd.torch.calibrate(
            model, client, model_name=f"functions-{where}", source="a",
            functions=True, record=("input", "output"), where=where) as block:
        block.is_enabled = False
        with pytest.raises(RuntimeError):
            model(torch.rand(2, 3, 5))
        block.is_enabled = True
        for x in data:
            model(x)
            # What is in no module.
            x @ x.transpose(1, 2)
    products = ("matmul_0.input", "matmul_0.input.1", "matmul_1.input",
                "matmul_1.input.1", "bmm_0.input", "bmm_0.input.1",
                "baddbmm_0.input", "baddbmm_0.input.1", "baddbmm_0.input.2",
                "scaled_dot_product_attention_0.input",
                "scaled_dot_product_attention_0.input.1",
                "scaled_dot_product_attention_0.input.2", "matmul_0.output",
                "matmul_1.output", "bmm_0.output", "baddbmm_0.output",
                "scaled_dot_product_attention_0.output", "proj.input",
                "proj.output")
    assert block.sequences == dict.fromkeys(
        [f"{prefix}.{name}" for prefix in ("0", "0.inner")
         for name in products] + ["1.input", "1.output"], 3)
    assert names(client, f"functions-{where}") == sorted(block.sequences)
    largest = torch.stack(data).max()
    found = statistics(client, f"functions-{where}", "0.matmul_1.input.1")
    assert found.statistics.max == pytest.approx(float(largest * 3))
    # Without being asked for there are none.
    with quantd.torch.calibrate(model, client, model_name="plain", source="a"
                                ) as block:
        model(data[0])
    assert sorted(block.sequences) == ["0.inner.proj.input", "0.proj.input",
                                       "1.input"]
    with pytest.raises(quantd.QuantdError, match="without functions"):
        quantd.torch.calibrate(model, client, model_name="no", source="a",
                               functions=True, features="gram")


def test_WhatIsRepeatedAfterARestartCountsOnce(client):
    model, data = small_model(), batches(8)

    def run(which, start):
        with quantd.torch.calibrate(model, client, model_name="t/again",
                                    source="rank-0", start=start) as block:
            for x in which:
                model(x)
            block.flush()
            return block.sequences

    def count():
        return statistics(client, "t/again", "0.input").statistics.count

    checkpoint = run(data[:3], 0)
    run(data[3:5], checkpoint)
    assert count() == 5 * 3 * 64
    # From the checkpoint on once more, and further.
    assert run(data[3:], checkpoint) == {"0.input": 8, "3.input": 8}
    assert count() == 8 * 3 * 64
    # What is new goes on after what the service has.
    assert run(data[:1], None)["0.input"] == 9
    assert count() == 9 * 3 * 64
    run(data, 0)
    assert count() == 9 * 3 * 64


def test_AServerThatComesBackLosesNothingAndCountsNothingTwice(request,
                                                               tmp_path):
    target = f"unix:{tmp_path}/socket"
    model, data = small_model(), batches(40)

    def start():
        return live_server.LiveServer(request.config.getoption("--quantd"),
                                      str(tmp_path), ["--listen", target])

    server = start()
    with quantd.Client(target, max_retries=10000, initial_backoff=0.01,
                       max_backoff=0.05) as client:
        with quantd.torch.calibrate(model, client, model_name="t/back",
                                    source="rank-0", start=0):
            for n, x in enumerate(data):
                if n in (10, 11, 25):
                    # With what it was just sent, acknowledged or not.
                    server.process.kill()
                    server.process.wait()
                    server = start()
                model(x)
        for name, size in (("0.input", 64), ("3.input", 72)):
            got = statistics(client, "t/back", name).statistics
            assert got.count == 40 * 3 * size
        client.close()
    server.stop()


# Kills itself after `kill` batches, the last of which it may have sent.
RANK = """
import os, signal, sys
sys.path.insert(0, {here!r})
import package, torch, quantd, quantd.torch
{definitions}
start, kill = int(sys.argv[2]), int(sys.argv[3])
model = small_model()
with quantd.Client(sys.argv[1]) as client, quantd.torch.calibrate(
        model, client, model_name="t/kill", source="rank-0",
        start=start) as block:
    for n, x in enumerate(batches(20)):
        if n < start:
            continue
        if n == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        model(x)
        if n % 5 == 4:
            block.flush()
            print(n + 1, flush=True)
"""


def test_ARankThatIsKilledGoesOnFromItsCheckpoint(server, client, tmp_path):
    # pylint: disable-next=import-outside-toplevel
    import inspect
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(
        here=os.path.dirname(os.path.realpath(__file__)),
        definitions=inspect.getsource(small_model) +
        inspect.getsource(batches)), encoding="utf-8")
    start = "0"
    for kill in ("8", "-1"):
        result = subprocess.run(
            [sys.executable, str(script), server.address, start, kill],
            stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
        start = (result.stdout.split() or [start])[-1]
        assert result.returncode == (0 if kill == "-1" else -signal.SIGKILL)
    assert start == "20"
    got = statistics(client, "t/kill", "0.input")
    assert got.statistics.count == 20 * 3 * 64
    assert [source.sequence for source in got.sources] == [20]


class Same(torch.nn.Module):
    """Does nothing that takes threads, which a forked process lacks."""

    def forward(self, x):
        return x


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_AForkedProcessDoesNotWaitForTheThreadThatSends(client, on_error):
    model, x = Same(), torch.ones(3)
    held = HeldClient(client)

    def in_child(block):
        """Whether a hook, flush() and the end of the block raise."""
        raised = []
        for call in (lambda: model(x), block.flush,
                     lambda: block.__exit__(None)):
            try:
                call()
            except quantd.QuantdError as error:
                assert error.reason == "PROCESS_FORKED"
                raised.append(True)
            else:
                raised.append(False)
        return raised

    block = quantd.torch.calibrate(
        model, held, model_name=f"t/fork-{on_error}", source="s",
        modules=lambda name, module: True, start=0, on_error=on_error,
        max_pending_bytes=1)
    with block:
        model(x)
        child = os.fork()
        if child == 0:
            # It ends in any case.
            signal.alarm(60)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                is_right = in_child(block) == [on_error == "raise"] * 3
            os._exit(0 if is_right else 1)
        status = os.waitpid(child, 0)[1]
        held.released.set()
        assert status == 0
    assert block.sequences == {"input": 1}
    assert statistics(client, f"t/fork-{on_error}",
                      "input").statistics.count == 3


def test_ErrorsAreRaisedOrAreWarnings(client, tmp_path):
    model, x = small_model(), batches(1)[0]
    client.calibrate(x, quantd.TensorName("t/bad", "0.input"),
                     contribution=quantd.Contribution(
                         "other", 1, granularity=quantd.per_channel(1)))
    with pytest.raises(quantd.QuantdError) as caught:
        with quantd.torch.calibrate(model, client, model_name="t/bad",
                                    source="rank-0"):
            model(x)
    assert caught.value.name.tensor == "0.input"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quantd.torch.calibrate(model, client, model_name="t/bad",
                                    source="rank-0", on_error="warn"):
            model(x)
    assert "0.input" in str(caught[0].message)
    with quantd.Client(f"unix:{tmp_path}/nobody", max_retries=0) as nobody:
        with pytest.raises(quantd.QuantdError):
            with quantd.torch.calibrate(model, nobody, model_name="t/bad",
                                        source="rank-0"):
                model(x)
    # What the model raises is what comes out.
    with pytest.raises(RuntimeError):
        with quantd.torch.calibrate(model, client, model_name="t/raise",
                                    source="rank-0"):
            model(torch.zeros(3))


def test_ABlockThatEndsWithAnExceptionWaitsForNoRetries(tmp_path):
    model, data = small_model(), batches(3)
    nobody = quantd.Client(f"unix:{tmp_path}/nobody", max_retries=3)
    released = threading.Event()
    with nobody, mock.patch.object(
            nobody._connection, "pause", autospec=True,
            side_effect=lambda *_, **__: released.wait(TIMEOUT_S)), (
                pytest.warns(RuntimeWarning, match="not answered: 6")):
        with pytest.raises(KeyError):
            with quantd.torch.calibrate(model, nobody, model_name="t/left",
                                        source="rank-0", start=0) as block:
                for x in data:
                    model(x)
                raise KeyError("of training")
        sender = block._thread
        assert sender.is_alive()
        # Nor does anything else wait for what was given up.
        block.flush()
        model(data[0])
        assert set(block.sequences.values()) == {3}
        released.set()
        sender.join(TIMEOUT_S)
        assert not sender.is_alive()


class SlowClient:
    """Takes 0.3 s of a clock for every try, which begins once `may_begin`."""

    def __init__(self, client, clock, may_begin):
        self._client = client
        self._clock = clock
        self._may_begin = may_begin
        self.tries = 0

    def calibrate_many(self, *args, **kwargs):
        self._may_begin.wait(TIMEOUT_S)
        self.tries += 1
        self._clock.monotonic.return_value += 0.3
        return self._client.calibrate_many(*args, **kwargs)


def test_AServerThatIsAwayIsAskedNoMoreWhileTrainingGoesOn(tmp_path):
    model, data = small_model(), batches(40)
    clock, waits = mock.Mock(), threading.Event()
    clock.monotonic.return_value = 1000.0
    await_room = quantd.torch.Calibration._await_room
    copies = []

    def noted(block, size):
        copies.append(size)
        if len(copies) == 2:
            waits.set()
        await_room(block, size)

    with quantd.Client(f"unix:{tmp_path}/nobody", retry_for=0) as nobody, (
            mock.patch.object(quantd.torch, "time", clock)), (
                mock.patch.object(quantd.torch.Calibration, "_await_room",
                                  noted)), (
                    warnings.catch_warnings(record=True)) as caught:
        warnings.simplefilter("always")
        slow = SlowClient(nobody, clock, waits)
        with quantd.torch.calibrate(model, slow, model_name="t/away",
                                    source="rank-0", start=0, on_error="warn",
                                    max_pending_bytes=1) as block:
            for x in data:
                model(x)
        # The first copy, and the one that waited meanwhile, of 80.
        assert slow.tries == 2
        assert set(block.sequences.values()) == {40}
    assert any("the server is away; for 3 s" in str(one.message)
               for one in caught)


class LateClient(HeldClient):
    """Takes the first that it is to send, and sends it when it is told to."""

    def __init__(self, client):
        super().__init__(client)
        self.taken = threading.Event()

    def calibrate_many(self, jobs, **kwargs):
        if self.taken.is_set():
            return self._client.calibrate_many(jobs, **kwargs)
        jobs = list(jobs)
        self.taken.set()
        return super().calibrate_many(jobs, **kwargs)


def test_ABlockWaitsForWhatOneThatFailedStillSends(client):
    model, data = small_model(), batches(2)
    late = LateClient(client)

    def block(modules, source="rank-0"):
        return quantd.torch.calibrate(model, late, model_name="t/next",
                                      source=source, modules=modules)

    with pytest.warns(RuntimeWarning, match="not answered: 1"):
        with pytest.raises(KeyError):
            with block(["0"]) as failed:
                model(data[0])
                assert late.taken.wait(TIMEOUT_S)
                raise KeyError("of training")
    sender = failed._thread

    def join():
        late.released.set()
        threading.Thread.join(sender)

    with mock.patch.object(sender, "join", join):
        # The numbers of other sources are not those of this one.
        with block(["0"], "rank-1"):
            pass
        assert not late.released.is_set()
        # Of those that go on the second does not wait for the first.
        with block(["0"]) as again, block(["3"]):
            model(data[1])
    late.released.set()
    sender.join(TIMEOUT_S)
    assert again.sequences == {"0.input": 2}
    for name, count in (("0.input", 2 * 3 * 64), ("3.input", 3 * 72)):
        assert statistics(client, "t/next", name).statistics.count == count
    # Nothing is kept of blocks that are over.
    assert not quantd.torch._sending & {failed, again}


def tensors_of(size):
    gc.collect()
    return sum(isinstance(found, torch.Tensor) and found.numel() == size
               for found in gc.get_objects())


@pytest.mark.parametrize("how", ["a closed client", "no server",
                                 "warnings that are errors"])
def test_WarningsAreAllThatStaysOfAServerThatIsGone(client, server, tmp_path,
                                                    how):
    """Training goes on, and neither hooks, threads nor tensors are left."""
    model, data = small_model(), batches(4, size=1777)
    gone = quantd.Client(
        f"unix:{tmp_path}/nobody" if how == "no server" else server.address,
        max_retries=0)
    hooks = [len(module._forward_pre_hooks) for module in model]
    before = tensors_of(1777 * 64)
    with warnings.catch_warnings(record=how != "warnings that are errors"
                                 ) as caught, gone:
        warnings.simplefilter("error" if caught is None else "always")
        with quantd.torch.calibrate(
                model, gone, model_name="t/gone", source="s",
                start=None if how == "no server" else 0,
                on_error="warn") as block:
            for n, x in enumerate(data):
                if n == 1:
                    gone.close()
                model(x)
        if caught is not None:
            # Without a server it is asked once, not at every layer.
            want = 1 if how == "no server" else 6
            assert want <= len(caught) <= (1 if want == 1 else 8)
    if how == "no server":
        assert not block.sequences
    else:
        assert block.sequences == {"0.input": 4, "3.input": 4}
    assert hooks == [len(module._forward_pre_hooks) for module in model]
    assert not any(thread.name == "quantd-calibrate"
                   for thread in threading.enumerate())
    del x
    # A thread of gRPC may have a request still that it was about to send.
    assert live_server.eventually(lambda: tensors_of(1777 * 64) == before)


def test_APatternWithoutAModuleIsAnError(client):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for modules in ("linear*", ["0", "[0]"]):
        with pytest.raises(quantd.QuantdError, match="it matches none"):
            with quantd.torch.calibrate(model, client, model_name="none",
                                        source="s", modules=modules):
                raise AssertionError("the block began")


def test_ResultsBecomeTensors(client):
    x = batches(1)[0]
    for dtype in (torch.float32, torch.float16, torch.bfloat16,
                  torch.float64):
        got = client.quantize(x.to(dtype), "int4")
        codes = quantd.torch.codes(got)
        assert (codes.dtype, codes.shape) == (torch.int8, x.shape)
        back = quantd.torch.dequantize(got)
        assert (back.dtype, back.shape) == (dtype, x.shape)
        want = (codes.double() * float(got.scale[0])).to(dtype)
        assert torch.allclose(back.double(), want.double(), rtol=1e-2)
    wide = quantd.torch.codes(client.quantize(x.abs(), "uint16"))
    assert (wide.dtype, int(wide.max())) == (torch.int32, 65535)


def right_of(weights, test, encodings=None):
    """How many of the test images, with inputs of layers quantized and
    dequantized as the encodings have it."""
    model = training.Digits()
    model.load_state_dict(weights)

    def fake_quantize(name):
        encoding = encodings[name + ".input"]
        scale, zero_point = float(encoding.scale[0]), (
            int(encoding.zero_point[0]) if encoding.zero_point.size else 0)
        return lambda _, inputs: (torch.fake_quantize_per_tensor_affine(
            inputs[0], scale, zero_point, 0, 255),)

    if encodings is not None:
        for name, layer in model.named_children():
            layer.register_forward_pre_hook(fake_quantize(name))
    with torch.no_grad():
        return int((model(test["images"]).argmax(1) == test["labels"]).sum())


@pytest.mark.skipif(not torch.distributed.is_available(),
                    reason="without torch.distributed")
def test_ATrainedNetworkKeepsItsAccuracy(server, client, tmp_path, capsys):
    """Four ranks train and calibrate; then uint8 activations with weights of
    int8, and of mostly int4, are within 0.5 and 1.5 points."""
    name = "digits/trained"
    command = [sys.executable, training.__file__, "--server", server.address,
               "--model", name, "--folder", str(tmp_path), "--ranks",
               str(RANKS)]
    ranks = [
        subprocess.Popen(
            live_server.with_parent(*command, "--rank", str(rank)))
        for rank in range(RANKS)]
    try:
        assert [rank.wait(TIMEOUT_S) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    stored = statistics(client, name, "fc1.input")
    assert [source.source for source in stored.sources] == [
        f"rank-{rank}" for rank in range(RANKS)]
    # 4 epochs of 256 images.
    assert stored.statistics.count == 4 * 256 * 1024

    weights = torch.load(tmp_path / "weights.pt")
    test = training.load("test.safetensors")
    count = len(test["labels"])
    exact = right_of(weights, test)
    assert exact >= 0.95 * count
    encodings = {
        answer.name.tensor: answer.stored_encoding.encoding for answer in
        client.compute_encodings(name, "uint8:mse")}
    assert len(encodings) == 4

    def with_specs(spec_of):
        """The weights there and back, and their bytes."""
        restored, size = dict(weights), 0
        for key in spec_of:
            got = client.quantize(weights[key], spec_of[key])
            restored[key] = quantd.torch.dequantize(got)
            size += got.codes.numel() * got.codes.element_size()
        return restored, size

    keys = [key for key in weights if key.endswith(".weight")]
    int8, int8_bytes = with_specs(dict.fromkeys(keys, "int8:per-channel"))
    int8_right = right_of(int8, test, encodings)

    # The least noise within 5 bits for each weight, scales included.
    list(client.calibrate_many(
        [(key, weights[key]) for key in keys], model=name, revision="weights",
        contribution=quantd.Contribution("file", 1,
                                         granularity=quantd.group(16))))
    specs = ["int8:per-channel", "int4:per-channel:mse", "int4:group:32"]
    elements = sum(weights[key].numel() for key in keys)
    mixture = client.sweep(name, specs, revision="weights",
                           max_size_bytes=elements * 5 // 8).mixture
    assert mixture.target_met
    mixed, mixed_bytes = with_specs({
        key: specs[index] for key, index in mixture.choices.items()})
    mixed_right = right_of(mixed, test, encodings)
    with capsys.disabled():
        print(f"\nfloat32 {exact}, uint8 x int8 {int8_right} "
              f"({int8_bytes:,} B), uint8 x int4 mixed {mixed_right} "
              f"({mixed_bytes:,} B) of {count}: {mixture.choices}")
    assert mixed_bytes < 0.65 * int8_bytes
    assert exact - int8_right <= 0.005 * count
    assert exact - mixed_right <= 0.015 * count


def test_LargeStatisticsHaveToBeForced(client):
    model = torch.nn.Sequential(torch.nn.Linear(1024, 2))
    batch = torch.ones(2048, 1024)

    def run(**keywords):
        with quantd.torch.calibrate(
                model, client, model_name="acme/forced", source="a",
                granularity=quantd.group(16), **keywords):
            model(batch)
    with pytest.raises(quantd.QuantdError) as caught:
        run()
    assert "force_statistics" in caught.value.message
    run(force_statistics=True)
    assert len(list(client.list_statistics("acme/forced"))) == 1
