"""Statistics that take more than their tensors are refused, by the rule and in
the words of quantctl calibrate."""

import asyncio
import re

import numpy as np
import pytest

import quantd
import quantd.aio

# A rule that lets all pass, or nothing, agrees with none of these.
CASES = [({"a": (1024, 2048)}, "group:16", True),
         ({"a": (1024, 2048)}, "group:256", False),
         ({"a": (1024, 2048)}, "per-channel", False),
         # Harmless, however much more than the tensor.
         ({"a": (512, 512)}, "group:8", False),
         ({f"t{n}": (512, 1024) for n in range(4)}, "group:16", True),
         ({f"t{n}": (512, 1024) for n in range(2)}, "group:16", False),
         ({"a": (1024, 2048)}, "block=4,4", True),
         ({"a": (1024, 2048)}, "block=64,64", False)]
GRANULARITIES = {"per-channel": quantd.per_channel(),
                 "block=4,4": (4, 4), "block=64,64": (64, 64),
                 **{f"group:{size}": quantd.group(size)
                    for size in (8, 16, 256)}}


def message_of(call):
    """Of its ARGUMENT_INVALID; None where it does not fail."""
    try:
        call()
    except quantd.QuantdError as error:
        assert error.reason == "ARGUMENT_INVALID"
        assert error.field == "contribution"
        return error.message
    return None


@pytest.mark.parametrize("number", range(len(CASES)))
def test_WhatQuantctlRefusesIsRefused(tmp_path, client, quantctl, number):
    shapes, text, is_refused = CASES[number]
    tensors = {name: np.ones(shape, np.float16)
               for name, shape in shapes.items()}
    path = tmp_path / "x.safetensors"
    quantd.save(path, tensors)
    command = ["calibrate", path, "--model", f"acme/{number}", "--source", "b",
               "--sequence", 1, *(
                   ["--block-size", text[6:]] if "block" in text else
                   ["--granularity", text])]
    contribution = quantd.Contribution("a", 1, GRANULARITIES[text])

    def many():
        list(client.calibrate_many(tensors.items(), contribution=contribution,
                                   model=f"acme/{number}"))
    message = message_of(many)
    if not is_refused:
        assert message is None
        quantctl(*command)
        return
    told = quantctl(*command, code=2)
    figures = r"statistics in such small blocks would take about ([\d.]+ \w+), "
    figures += r"more than the ([\d.]+ \w+) of the tensors; measure weights in"
    assert re.search(figures, told)[0] == re.search(figures, message)[0]
    contribution = quantd.Contribution("a", 2, GRANULARITIES[text],
                                       force_statistics=True)
    many()


def test_EveryCallLooks(server, client):
    x = np.ones((1024, 2048), np.float32)
    keywords = {"name": quantd.TensorName("acme/all", "x"),
                "contribution": quantd.Contribution("a", 1, quantd.group(16))}
    assert message_of(lambda: client.calibrate(x, **keywords))
    assert message_of(lambda: client.calibrate_chunks(
        [x], shape=x.shape, **keywords))

    async def run(call):
        async with quantd.aio.Client(server.address) as other:
            await call(other)

    async def many(other):
        async for _ in other.calibrate_many(
                [("x", x)], contribution=keywords["contribution"],
                model="acme/all"):
            pass
    for call in (lambda other: other.calibrate(x, **keywords),
                 lambda other: other.calibrate_chunks([x], shape=x.shape,
                                                      **keywords), many):
        assert message_of(lambda c=call: asyncio.run(run(c)))
    assert list(client.list_statistics("acme/all")) == []


def test_ATensorThatComesAgainHasOneSetOfStatistics(client):
    # Together they would be too many.
    x = np.ones((256, 1024), np.float32)
    for answer in client.calibrate_many([
            quantd.CalibrateJob(x, "x", contribution=quantd.Contribution(
                "a", n + 1, quantd.group(16))) for n in range(10)],
                                        model="acme/again"):
        assert not answer.contribution.duplicate


def test_WhatDoesNotFitTheShapeIsLeftToTheServer(client):
    with pytest.raises(quantd.QuantdError) as caught:
        client.calibrate(np.ones((4, 4)), quantd.TensorName("acme/odd", "x"),
                         contribution=quantd.Contribution("a", 1, (1, 2, 3)))
    assert caught.value.field != "contribution"
