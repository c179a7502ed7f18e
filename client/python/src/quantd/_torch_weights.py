"""How much of the noise of each layer reaches the end of a model."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Iterable, Mapping, Optional

import torch

from quantd import errors

# Small enough for the model to be linear in it, and above the rounding of
# bfloat16.
_NOISE = 2.0**-5
# torch before 2.0 hands no keywords to hooks.
_HOOKS_TAKE_KEYWORDS = "with_kwargs" in inspect.signature(
    torch.nn.Module.register_forward_hook).parameters


def run(model: torch.nn.Module, batch: Any) -> Any:
    """Output that a model makes of a batch: a tensor of arguments of their own,
    a tuple, or a mapping of keywords. Of several outputs the first, or
    `logits`."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    output = getattr(output, "logits", output)
    return output[0] if isinstance(output, (tuple, list)) else output


def output_weights(model: torch.nn.Module, batch: Any,
                   chosen: Iterable[tuple[str, torch.nn.Module]],
                   outputs: Optional[Callable[[torch.nn.Module, Any], Any]]
                   ) -> dict[str, float]:
    """See quantd.torch.output_weights. chosen: modules by name."""
    outputs = outputs or run
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    found = {}
    try:
        with torch.no_grad():
            plain = _checked(outputs(model, batch))
            for name, module in chosen:
                if not _can_probe(module):
                    continue
                probe = _Probe(module)
                with probe:
                    noisy = _checked(outputs(model, batch))
                at_layer = probe.noise_to_signal()
                if at_layer:
                    found[f"{name}.weight" if name else "weight"] = (
                        _ratio(_power(noisy - plain), _power(plain)) / at_layer)
    finally:
        for module in was_training:
            module.training = True
    return found


def _checked(output: Any) -> torch.Tensor:
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        raise errors.argument_invalid(
            "expected a tensor of floats at the end of the model, got "
            f"{type(output).__name__}; say what it is with `outputs`",
            "outputs")
    return output


def _power(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


def _ratio(noise: float, signal: float) -> float:
    if signal == 0:
        raise errors.argument_invalid("the model's output is all zero",
                                      "batch")
    return noise / signal


def _can_probe(module: torch.nn.Module) -> bool:
    """True if the module's weight can be replaced for a moment."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.is_floating_point()


class _Probe:
    """While it is entered, a layer has noise in its weight, and what that makes
    at the layer's output is measured. Other layers with the same weight keep
    it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._weight: Any = module._parameters["weight"]
        self._noise = 0.0
        self._signal = 0.0
        self._handle: Any = None

    def __enter__(self) -> _Probe:
        weight = self._weight
        # Noise of the same numbers on every device.
        noise = torch.randn(weight.shape, generator=torch.Generator(
            ).manual_seed(weight.numel()))
        scale = _NOISE * float(weight.double().square().mean())**.5
        noisy = weight + (noise * scale).to(weight.device, weight.dtype)
        self._module._parameters["weight"] = torch.nn.Parameter(
            noisy, requires_grad=False)
        keywords: dict[str, Any] = (
            {"with_kwargs": True} if _HOOKS_TAKE_KEYWORDS else {})
        self._handle = self._module.register_forward_hook(
            self._measure, **keywords)
        return self

    def __exit__(self, *unused: Any) -> None:
        self._handle.remove()
        self._module._parameters["weight"] = self._weight

    def _measure(self, module: torch.nn.Module, arguments: Any,
                 *keywords_and_output: Any) -> None:
        keywords = keywords_and_output[0] if len(keywords_and_output) > 1 else {}
        output = keywords_and_output[-1]
        noisy = module._parameters["weight"]
        module._parameters["weight"] = self._weight
        try:
            plain = module.forward(*arguments, **keywords)
            bias = module._parameters.get("bias")
            signal = plain
            if bias is not None:
                shape = [1] * plain.dim()
                shape[_channel_of(module, plain)] = -1
                signal = plain - bias.reshape(shape)
        finally:
            module._parameters["weight"] = noisy
        self._noise += _power(output - plain)
        self._signal += _power(signal)

    def noise_to_signal(self) -> float:
        """At the output of the layer, as OutputNoise counts it: without the
        bias. 0 where it has not run."""
        return self._noise / self._signal if self._signal else 0.0


def _channel_of(module: torch.nn.Module, output: torch.Tensor) -> int:
    """The dimension that the bias lies along."""
    if isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d,
                           torch.nn.Conv3d)):
        assert isinstance(module.weight, torch.Tensor)
        return int(output.dim() - module.weight.dim() + 1)
    return int(output.dim() - 1)
