"""Rounding to codes and back within a model of torch, with gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Optional

import numpy as np
import torch

from quantd import _layout, errors
from quantd._torch_blocks import (LaidOut, keeping_types, plain_block_size,
                                  spread)
from quantd.encoding import Encoding
from quantd.tensor import Array, format_info

_LEARN = (None, "scale", "log2_scale", "range")
# Least scale: the smallest normal float32.
_LEAST_SCALE = 2.0 ** -126
# Bound of a zero point with exclude_zero.
_FARTHEST_ZERO_POINT = 1 << 22
# Scales that follow from others are not free.
_FREE_SCALE_TYPES = ("float32", "float16", "bfloat16")


class _Rounded(torch.autograd.Function):  # type: ignore[misc]
    """(clamp(round(x / scale) + zero_point, qmin, qmax) - zero_point) * scale,
    for tensors of one shape, and zero points that are whole. NaN is 0, if
    that is in the range."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor,
                zero_point: torch.Tensor, qmin: int, qmax: int,
                clips_first: bool) -> torch.Tensor:
        """clips_first: elements within half a code of the range's end, beyond
        it, count as clipped."""
        steps = x / scale
        rounded = torch.round(steps)
        is_nan = torch.isnan(x)
        code = torch.where(is_nan, zero_point, rounded + zero_point)
        compared = steps + zero_point if clips_first else code
        is_inside = (compared >= qmin) & (compared <= qmax) & ~is_nan
        clipped = code.clamp(qmin, qmax) - zero_point
        ctx.save_for_backward(
            scale, is_inside, torch.where(is_inside, rounded - steps, clipped)
            .masked_fill(is_nan, 0), is_nan)
        return clipped * scale

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Gradients of the straight-through estimator."""
        scale, is_inside, of_scale, is_nan = ctx.saved_tensors
        needs_x, needs_scale, needs_zero_point = ctx.needs_input_grad[:3]
        return (
            gradient * is_inside if needs_x else None,
            gradient * of_scale if needs_scale else None,
            (gradient * -scale).masked_fill(is_inside | is_nan, 0)
            if needs_zero_point else None, None, None, None)


class _RoundedWithin(torch.autograd.Function):  # type: ignore[misc]
    """round(x) within limits. Gradients pass but beyond the limits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, low: int, high: int
                ) -> torch.Tensor:
        """Ties to even."""
        rounded = torch.round(x)
        ctx.save_for_backward((rounded >= low) & (rounded <= high))
        return rounded.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Straight through."""
        (passes,) = ctx.saved_tensors
        return gradient * passes, None, None


class _Passed(torch.autograd.Function):  # type: ignore[misc]
    """A function of one element, whose gradient is a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor,
                function: Callable[[torch.Tensor], torch.Tensor],
                factor: float) -> torch.Tensor:
        """function(x)."""
        ctx.factor = factor
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Straight through, times the factor."""
        return gradient * ctx.factor, None, None


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _positive(scale: torch.Tensor) -> torch.Tensor:
    return scale.clamp(min=_LEAST_SCALE)


class FakeQuantize(LaidOut):
    """Quantizes and dequantizes, so that a model can be trained for its codes:

        x' = (clamp(round(x / s) + z, qmin, qmax) - z) * s

        fake = quantd.torch.FakeQuantize(encoding, learn="scale")
        torch.nn.utils.parametrize.register_parametrization(
            layer, "weight", fake)

    Takes a tensor of any shape that goes with the encoding, of float32,
    float16, bfloat16 or float64, and gives one of the same shape and type. The
    reals are those of the service with `self.encoding`, bit by bit; NaN is 0
    where the range has it. Gradients of x are those of the straight-through
    estimator: 1 for elements within the range, 0 for those that are clipped.

    encoding: of an integer format; per tensor, channel, group or block.
    learn: which parameters there are, of type torch.nn.Parameter and as many as
        the encoding has scales.
        None: none.
        "scale": `scale` (float32), with the gradients of LSQ (Esser 2020): for
            elements in the range round(x / s) - x / s, for others qmin - z or
            qmax - z. It is multiplied by 1 / sqrt(elements per scale * qmax)
            unless scale_gradient is False. An element is in the range by its
            x / s before that is rounded.
        "log2_scale": `log2_scale` (float64), the gradient of TQT (Jain 2020):
            that of s, times s * ln 2. With power_of_two, s is 2 to the next
            whole number above it.
        "range": `min` and `max` (float64), as AIMET has them: s = (max - min) /
            (qmax - qmin), z = qmin - round(min / s), straight through the
            rounding.
    learn_zero_point: whether z is learned, too: with "scale" `zero_point`
        (float32, in codes, rounded as it is used; LSQ+, Bhalgat 2020: -s for
        elements that are clipped), with "range" by its min. Default: where the
        encoding has zero points. Otherwise z is fixed. z stays within qmin and
        qmax, but for encodings with exclude_zero.

    Parameters keep their type in half() and the like. Scales that training
    pushes to zero or below count as the smallest normal float32. Scales of
    float16 and bfloat16 become float32 as they are learned. state_dict() has
    the format, the range of codes and the block size of the encoding, too:
    load_state_dict refuses a state with others.

    Raises: ARGUMENT_INVALID; forward() where a tensor and the encoding do not
    go together.
    """

    in_place_of_scripts = "take it out of the model, and keep its encoding"

    def __init__(self, encoding: Encoding, *, learn: Optional[str] = None,
                 learn_zero_point: Optional[bool] = None,
                 scale_gradient: bool = True, power_of_two: bool = False
                 ) -> None:
        super().__init__()
        _check(encoding, learn, learn_zero_point, power_of_two)
        self.learn = learn
        self.power_of_two = power_of_two
        self.scale_gradient = scale_gradient
        self.qmin, self.qmax = _limits(encoding)
        self._initial = encoding
        has_zero_points = bool(encoding.zero_point.any())
        self._learns_zero_point = learn in ("scale", "range") and (
            has_zero_points if learn_zero_point is None else learn_zero_point)
        scale = encoding.scale.copy()
        zero_point = (encoding.zero_point.reshape(scale.shape)
                      if has_zero_points else
                      np.zeros_like(scale)).astype(np.float32)
        if learn == "log2_scale":
            self.log2_scale = _parameter(np.log2(scale.astype(np.float64)))
        elif learn == "range":
            # In float64 the scale comes out as it went in.
            wide, zero = scale.astype(np.float64), zero_point.astype(np.float64)
            self.min = _parameter((self.qmin - zero) * wide)
            self.max = _parameter((self.qmax - zero) * wide)
        elif learn == "scale":
            self.scale = _parameter(scale)
        else:
            self.register_buffer("scale", torch.from_numpy(scale))
        if not self._learns_zero_point:
            self.register_buffer("zero_point", torch.from_numpy(zero_point))
        elif learn == "scale":
            self.zero_point = _parameter(zero_point)

    @property
    def encoding(self) -> Encoding:
        """With scales and zero points as they are now; the service takes it in
        put_encoding, quantize and so on.

        Raises: ARGUMENT_INVALID where load_state_dict has put scales in place
        of some that follow from codes, which no state has.
        """
        with torch.no_grad():
            scale, zero_point = (tensor.cpu().numpy()
                                 for tensor in self._scale_and_zero_point())
        if self.learn is None:
            initial = self._initial.zero_point
            if np.array_equal(scale, self._initial.scale) and np.array_equal(
                    zero_point.ravel(), initial.ravel() if initial.size
                    else np.zeros(scale.size)):
                return self._initial
        scale_type = self._initial.scale_type
        if self._initial.stored_scale_type not in _FREE_SCALE_TYPES:
            raise errors.argument_invalid(
                "the state is no longer that of the encoding, and scales of "
                f"{self._initial.stored_scale_type} can not take any value; "
                "make the module with the encoding that the state is of",
                "scale")
        return dataclasses.replace(
            self._initial, scale=scale.copy(),
            scale_type=scale_type and "float32",
            zero_point=zero_point.astype(np.int32) if zero_point.any() else
            np.empty(0, np.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if not x.is_floating_point():
            raise errors.argument_invalid(
                f"expected a tensor of floats, got {x.dtype}", "array")
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        scale, zero_point = self._scale_and_zero_point(x.numel())
        block_size = self._initial.block_size
        rounded: torch.Tensor = _Rounded.apply(
            x.to(dtype),
            spread(scale, block_size, x.shape).to(dtype).expand(x.shape),
            spread(zero_point, block_size, x.shape).to(dtype).expand(x.shape),
            self.qmin, self.qmax, self.learn == "scale")
        return rounded.to(x.dtype)

    def layout(self) -> dict[str, Any]:
        """Layout that is not learned."""
        initial = self._initial
        return {"format": initial.format,
                "block_size": plain_block_size(initial.block_size,
                                               initial.scale.shape),
                "qmin": int(self.qmin), "qmax": int(self.qmax),
                "exclude_zero": bool(initial.exclude_zero),
                "power_of_two": bool(self.power_of_two)}

    def extra_repr(self) -> str:
        """For print(model)."""
        scale = self._initial.scale
        return (f"{self._initial.format}, {scale.size} scales, "
                f"learn={self.learn!r}")

    def _scale_and_zero_point(self, count: int = 0
                              ) -> tuple[torch.Tensor, torch.Tensor]:
        """In float32, zero points whole. count: elements of the tensor, for the
        gradients."""
        if self.learn is None:
            return self.scale, self.zero_point
        zero_point: Any = None if self._learns_zero_point else self.zero_point
        if self.learn == "log2_scale":
            exponent = self.log2_scale
            if self.power_of_two:
                exponent = _Passed.apply(exponent, torch.ceil, 1.0)
            scale = torch.exp2(exponent)
        elif self.learn == "range":
            scale = (self.max - self.min) / (self.qmax - self.qmin)
            if zero_point is None:
                steps = self.min / _Passed.apply(scale, _positive, 1.0)
                zero_point = self.qmin - self._whole(steps, -1)
        else:
            factor = self._factor(count)
            scale = _Passed.apply(self.scale, _itself, factor)
            if zero_point is None:
                zero_point = self._whole(
                    _Passed.apply(self.zero_point, _itself, factor), 1)
        scale = _Passed.apply(scale.to(torch.float32), _positive, 1.0)
        return scale, zero_point.to(torch.float32)

    def _factor(self, count: int) -> float:
        """Factor of LSQ."""
        if not self.scale_gradient:
            return 1.0
        per_scale = max(count / self._initial.scale.size, 1.0)
        return 1 / math.sqrt(per_scale * max(self.qmax, 1))

    def _whole(self, steps: torch.Tensor, sign: int) -> Any:
        """steps are zero points with sign 1, and with -1 what they are less
        than qmin."""
        low, high = self.qmin, self.qmax
        if self._initial.exclude_zero:
            low, high = -_FARTHEST_ZERO_POINT, _FARTHEST_ZERO_POINT
        if sign < 0:
            low, high = self.qmin - high, self.qmin - low
        return _RoundedWithin.apply(steps, low, high)

    def _apply(self, fn: Callable[[Any], Any], *arguments: Any) -> Any:
        return super()._apply(keeping_types(fn, []), *arguments)


def _check(encoding: Encoding, learn: Optional[str],
           learn_zero_point: Optional[bool], power_of_two: bool) -> None:
    if not isinstance(encoding, Encoding) or (
            not format_info(encoding.format).is_integer):
        raise errors.argument_invalid(
            "expected an Encoding of an integer format, got "
            f"{getattr(encoding, 'format', encoding)!r}", "encoding")
    if encoding.zero_points_are_real:
        raise errors.argument_invalid(
            "expected zero points that are codes, got floats", "encoding")
    if learn not in _LEARN:
        raise errors.argument_invalid(f"expected one of {_LEARN}, got "
                                      f"{learn!r}", "learn")
    if learn is not None and (
            encoding.stored_scale_type not in _FREE_SCALE_TYPES):
        raise errors.argument_invalid(
            "expected scales that can take any value, got those of "
            f"{encoding.stored_scale_type}", "learn")
    if learn_zero_point and learn not in ("scale", "range"):
        raise errors.argument_invalid(
            "zero points are learned with \"scale\" and \"range\", got "
            f"{learn!r}", "learn_zero_point")
    if power_of_two and learn != "log2_scale":
        raise errors.argument_invalid(
            f"expected learn=\"log2_scale\", got {learn!r}", "power_of_two")


def _limits(encoding: Encoding) -> tuple[int, int]:
    """qmin and qmax, those of the format by default."""
    low, high = _layout.code_limits(encoding.format)
    return (low if encoding.qmin is None else encoding.qmin,
            high if encoding.qmax is None else encoding.qmax)


def _parameter(array: Array) -> Any:
    return torch.nn.Parameter(torch.from_numpy(np.ascontiguousarray(array)))
