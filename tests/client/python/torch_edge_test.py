"""The hook that makes statistics on the model's device: what the service has in
the end is what it has of the data, however often a rank is killed, and little
goes up."""

import os
import signal
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

# pylint: disable=wrong-import-position
import quantd
import quantd.torch

HERE = os.path.dirname(os.path.realpath(__file__))


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(),
                               torch.nn.Linear(40, 8))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3 + n % 2, 24, generator=generator)
            for n in range(count)]


def stored(client, model, tensor):
    found = client.get_statistics(quantd.TensorName(model, tensor),
                                  with_state=True)
    return (found.statistics, found.state.SerializeToString(),
            [source.sequence for source in found.sources])


def calibrate(client, model_name, data, **options):
    model = small_model()
    with quantd.torch.calibrate(model, client, model_name=model_name,
                                source="rank-0", **options) as block:
        for x in data:
            model(x)
    return block


@pytest.mark.parametrize("every", (1, 4, 100))
def test_the_device_gives_what_the_server_makes(client, every):
    data = batches(10)
    name = f"device/{every}"
    calibrate(client, "device/server", data, start=0)
    block = calibrate(client, name, data, where="device", every=every)
    assert block.sequences == {"0.input": 10, "2.input": 10}
    for tensor in block.sequences:
        assert stored(client, name, tensor) == stored(client, "device/server",
                                                      tensor)
    # Goes on behind what is there.
    calibrate(client, name, data[:3], where="device", every=every)
    assert stored(client, name, "0.input")[2] == [13]


def test_repeated_batches_count_once(client):
    data = batches(10)
    calibrate(client, "again/server", data, start=0)
    # Other contributions than before, from 0 and from what was saved.
    calibrate(client, "again/device", data[:5], where="device", every=2,
              start=0)
    calibrate(client, "again/device", data[:8], where="device", every=3,
              start=0)
    calibrate(client, "again/device", data[4:], where="device", every=4,
              start={"0.input": 4, "2.input": 4})
    for tensor in ("0.input", "2.input"):
        assert stored(client, "again/device", tensor) == stored(
            client, "again/server", tensor)


KILLED = """
import os, signal, sys
sys.path.insert(0, {here!r})
import package, quantd, quantd.torch, torch_edge_test as test
model, kill = test.small_model(), int(sys.argv[2])
with quantd.Client(sys.argv[1]) as client, quantd.torch.calibrate(
        model, client, model_name="killed", source="rank-0", start=0,
        where="device", every=3) as block:
    for n, x in enumerate(test.batches(12)):
        if n == kill:
            block.flush() if kill % 2 else None
            os.kill(os.getpid(), signal.SIGKILL)
        model(x)
"""


def test_a_killed_rank_counts_once(server, client, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(KILLED.format(here=HERE))
    for kill in (7, 10, -1):
        result = subprocess.run([sys.executable, str(script), server.address,
                                 str(kill)], check=False, timeout=240)
        assert result.returncode == (0 if kill < 0 else -signal.SIGKILL)
    calibrate(client, "not-killed", batches(12), start=0)
    for tensor in ("0.input", "2.input"):
        assert stored(client, "killed", tensor) == stored(
            client, "not-killed", tensor)


def gram_codes(client, model, tensor):
    found = client.get_statistics(quantd.TensorName(model, tensor))
    torch.manual_seed(2)
    weight = torch.randn(8, found.gram.feature_count)
    codes = client.quantize(
        weight, "int4:per-channel", rounding=quantd.Rounding(tensor),
        name=quantd.TensorName(model, "weight")).codes.numpy().tobytes()
    return (found.statistics, found.gram.rows, found.gram.step_exponent, codes,
            [source.sequence for source in found.sources])


def test_gram_matrices_of_the_device(client):
    data = batches(11)
    calibrate(client, "gram/server", data, features="gram")
    block = calibrate(client, "gram/device", data, features="gram",
                      where="device", every=4)
    # The steps are there from the first batch on.
    again = calibrate(client, "gram/device2", data[:1], features="gram")
    assert again.sequences == {"0.input": 1, "2.input": 1}
    calibrate(client, "gram/device2", data, features="gram", where="device",
              every=100, start=0)
    for tensor in block.sequences:
        want = gram_codes(client, "gram/server", tensor)
        assert gram_codes(client, "gram/device", tensor) == want
        assert gram_codes(client, "gram/device2", tensor) == want


class CountingClient:
    """Counts the bytes that go up."""

    def __init__(self, client):
        self._client = client
        self.bytes_up = 0

    def __getattr__(self, name):
        return getattr(self._client, name)

    def calibrate_many(self, jobs, **options):
        def counted():
            for job in jobs:
                if isinstance(job.array, torch.Tensor):
                    self.bytes_up += (job.array.nelement() *
                                      job.array.element_size())
                else:
                    self.bytes_up += len(job.array.serialized())
                yield job
        return self._client.calibrate_many(counted(), **options)


def test_little_goes_up(client):
    """A hundredth at most of [2,048 x 1,024] x 32 in bfloat16; of it a
    sixteenth here, as far as the raw bytes go."""
    model = torch.nn.Linear(1024, 1)
    counting = CountingClient(client)
    with quantd.torch.calibrate(model, counting, model_name="little",
                                source="rank-0", where="device", every=32):
        for _ in range(32):
            model(torch.randn(128, 1024))
    raw = 32 * 2048 * 1024 * 2
    print(f"\n{counting.bytes_up} bytes up for {raw} of activations: "
          f"{counting.bytes_up / raw:.4%}")
    assert counting.bytes_up < .01 * raw / 16


def test_refuses_another_place(client):
    for options in (dict(where="gpu"), dict(where="device", every=0)):
        with pytest.raises(quantd.QuantdError) as error:
            quantd.torch.calibrate(small_model(), client, model_name="m",
                                   source="s", **options)
        assert error.value.reason == "ARGUMENT_INVALID"
