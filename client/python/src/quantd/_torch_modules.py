"""Modules of torch with codes in place of weights."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, Callable, Iterator, Mapping, Optional

import torch

from quantd import _arrays, _globs, _scales, errors
from quantd._input_squares import InputSquares
from quantd._model_importance import (InputsLike, ModelImportance,
                                      needs_source, source_of)
from quantd._model_rounding import ModelRounding, StoredInputs
from quantd._requests import QuantizeJob, Rounding, Sources
from quantd._tables import ResultList, Tabular
from quantd._torch_blocks import (LaidOut, keeping_types, plain_block_size,
                                  spread)
from quantd._values import (coarse_scale_count, infinities_text,
                            warn_of_coarse_scales, warn_of_not_finite)
from quantd.client import Client
from quantd.encoding import EncodingReference, EncodingSpec, Source
from quantd.results import QuantizedTensor, QuantizeSummary

# Elements that are compared at a time.
_PIECE = 1 << 20


class QuantizedWeight(LaidOut):
    """A weight as codes; a call gives its reals, with the bits that the service
    answers.

    codes: one per element, in the shape of the weight: int8, uint8, int16, or
        int32 for those of int32 and unsigned ones of more than 8 bits.
    scale: float32, one per block. zero_point: int32, or float32 where they lie
        between codes; as many, or None.
    values: float32, what each code of a float format or a codebook stands for,
        or None.

    These are buffers: state_dict() has them and to(device) moves them. It has
    the format and the block size, too: load_state_dict takes the state of a
    module with the same ones, and refuses others. half(), to(dtype) and the
    like change the type of the reals alone.
    """

    in_place_of_scripts = "torch.jit.trace(model, inputs) does"

    def __init__(self, quantized: QuantizedTensor, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        encoding = quantized.encoding
        assert encoding is not None
        self.format = encoding.format
        self.block_size = encoding.block_size
        codes = quantized.unpacked()
        if not _arrays.is_torch(codes):
            codes = _arrays.to_torch(codes)
        zero_point, values = encoding.zero_point, _scales.table(
            encoding.format, encoding.codebook)
        for name, tensor in {
                "codes": codes, "scale": torch.from_numpy(
                    encoding.scale.copy()),
                "zero_point": torch.from_numpy(zero_point.copy())
                if zero_point.any() and values is None else None,
                "values": None if values is None else torch.from_numpy(
                    values.copy())}.items():
            self.register_buffer(
                name, None if tensor is None else tensor.to(device))
        # Has the type of the reals, which half() and the like change.
        self.register_buffer("_real", torch.empty(0, dtype=dtype,
                                                  device=device),
                             persistent=False)

    def forward(self) -> torch.Tensor:
        """The reals, in the shape of `codes`."""
        shape, real = self.codes.shape, self._real.dtype
        dtype = torch.float64 if real == torch.float64 else torch.float32
        if self.values is not None:
            reals = self.values[self.codes.long()].to(dtype)
        elif self.zero_point is not None and (
                self.zero_point.is_floating_point()):
            reals = self.codes.to(dtype) - spread(
                self.zero_point, self.block_size, shape).to(dtype)
        elif self.zero_point is not None:
            reals = (self.codes.to(torch.int32) - spread(
                self.zero_point, self.block_size, shape)).to(dtype)
        else:
            reals = self.codes.to(dtype)
        return (reals * spread(self.scale, self.block_size, shape).to(dtype)
                ).to(real)

    def layout(self) -> dict[str, Any]:
        """Layout of the codes."""
        return {"format": self.format, "block_size": plain_block_size(
            self.block_size, self.scale.shape)}

    def extra_repr(self) -> str:
        """For print(model)."""
        return (f"{self.format}, {tuple(self.codes.shape)}, "
                f"{self.scale.numel()} scales")

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str,
                              *arguments: Any) -> None:
        codes = state.get(prefix + "codes")
        if codes is None or codes.dtype == self.codes.dtype:
            super()._load_from_state_dict(state, prefix, *arguments)
        else:
            # In the module's type they would wrap around.
            faults = arguments[-1]
            faults.append(f"{prefix}codes: expected {self.codes.dtype} of "
                          f"{self.format}, got {codes.dtype}")

    def _apply(self, fn: Callable[[Any], Any], *arguments: Any) -> Any:
        return super()._apply(keeping_types(fn, [self._real]), *arguments)


class _Quantized:
    """Before the class of a module: its weight is computed when it is asked
    for, and cannot be assigned."""

    quantized_weight: QuantizedWeight

    @property
    def weight(self) -> torch.Tensor:
        """The reals that the codes stand for."""
        return self.quantized_weight()


class QuantizedLinear(_Quantized, torch.nn.Linear):  # type: ignore[misc]
    """A Linear with codes in `quantized_weight`."""


class QuantizedConv1d(_Quantized, torch.nn.Conv1d):  # type: ignore[misc]
    """A Conv1d with codes in `quantized_weight`."""


class QuantizedConv2d(_Quantized, torch.nn.Conv2d):  # type: ignore[misc]
    """A Conv2d with codes in `quantized_weight`."""


class QuantizedConv3d(_Quantized, torch.nn.Conv3d):  # type: ignore[misc]
    """A Conv3d with codes in `quantized_weight`."""


class QuantizedEmbedding(_Quantized,
                         torch.nn.Embedding):  # type: ignore[misc]
    """An Embedding with codes in `quantized_weight`."""


# Other classes may use their weights in ways of their own.
_CLASSES: dict[Any, Any] = {
    torch.nn.Linear: QuantizedLinear,
    # The Linear of MultiheadAttention.
    torch.nn.modules.linear.NonDynamicallyQuantizableLinear: QuantizedLinear,
    torch.nn.Conv1d: QuantizedConv1d, torch.nn.Conv2d: QuantizedConv2d,
    torch.nn.Conv3d: QuantizedConv3d, torch.nn.Embedding: QuantizedEmbedding}


@dataclasses.dataclass(frozen=True)
class ReplacedWeight(Tabular):
    """One weight that codes stand for now.

    name: of the weight, e.g. "fc1.weight"; names: all that share it.
    module: the class that it was a weight of, e.g. "Linear".
    bytes_before: of the weight; bytes_after: of the buffers, with a byte or
        more for each code, also for those that files pack.
    sqnr_db: 10 log10(sum x^2 / sum (x' - x)^2) over finite elements; inf
        without any error, nan without any of them.
    rounding: "compensated" for the output of its layer, or "nearest".
    nan_count, infinity_count: elements that most codes do not stand for.
    overflow_count: finite elements that became infinite: their codes are
        infinity, or stand for more than the type of the weight has.
    importance: whether it weighed the errors in the search for scales.
    """

    name: str
    names: tuple[str, ...]
    module: str
    format: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    sqnr_db: float
    rounding: str
    nan_count: int
    infinity_count: int
    overflow_count: int
    importance: bool = False


@dataclasses.dataclass(frozen=True)
class ReplacedWeights:
    """Report of what quantize_ did.

    replaced: in the order of the model.
    left_out: why, by name, of all other parameters with floats and two
        dimensions or more.
    """

    replaced: ResultList[ReplacedWeight]
    left_out: Mapping[str, str]

    def _repr_html_(self) -> str:
        return self.replaced._repr_html_()


@dataclasses.dataclass
class _Weight:
    """A parameter, all of its names, and the modules that have it as their
    weight."""

    parameter: torch.Tensor
    names: list[str]
    modules: list[torch.nn.Module]
    # Not the weight of a module of _CLASSES, at least once.
    why_not: str = ""
    name: str = ""
    source: Optional[Source] = None


def quantize_(model: torch.nn.Module, specs: Sources, *, client: Client,
              model_name: str = "", revision: str = "", store: bool = False,
              nan_policy: Optional[str] = None,
              rounding: Optional[ModelRounding] = None,
              inputs: InputsLike = None,
              importance: Optional[Mapping[str, InputSquares]] = None
              ) -> ReplacedWeights:
    """Puts codes in place of the weights of each Linear, Conv1d, Conv2d, Conv3d
    and Embedding, in place:

        done = quantd.torch.quantize_(model, "int4:group:32", client=client)
        print(done.replaced.to_dicts(), done.left_out)

    Such a module becomes one of a class like QuantizedLinear, which is a Linear
    still. Its `weight` is computed from codes and scales whenever the module
    runs, on any device, and equals quantd.torch.dequantize bit by bit; its
    `quantized_weight` has the codes. Hooks, biases and references to the module
    stay. What shares a weight goes on sharing it. An optimizer that was made
    before keeps the old weight, and no longer changes the model.

    specs: a spec, or by pattern over names of weights, such as
        {"*head*": "int8", "*.weight": "int4:group:32"}; see
        Client.quantize_many. Of a weight with several names the first one that
        a pattern matches counts. Encodings and references work, too.
    model_name, revision, store: of the names at the service, see
        Client.quantize_many; of use with store, references without a name and
        importance alone.
    rounding: weights whose inputs have a Gram matrix are rounded for the output
        of their layer, the others to the nearest code: `rounding` of
        ReplacedWeight says which.
    inputs, importance: see quantize_model(); `importance` of ReplacedWeight
        says which weights have some. By default specs with importance take the
        inputs of `rounding`, or of model_name.

    If a tensor fails, the model stays as it was. Weights with NaN or infinities
    are warned of; nan_policy="reject" refuses NaN.

    Raises: ARGUMENT_INVALID for patterns that match no such weight, and where
    there is none; those of Client.quantize.
    """
    if isinstance(model, (torch.nn.DataParallel,
                          torch.nn.parallel.DistributedDataParallel)):
        model = model.module
    weights = list(_weights(model))
    left_out = {name: weight.why_not for weight in weights
                for name in weight.names[:1] if weight.why_not}
    chosen = _choose([weight for weight in weights if not weight.why_not],
                     specs, left_out)
    roundings: list[Optional[Rounding]] = [None] * len(chosen)
    if rounding is not None:
        stored = StoredInputs(rounding, client)
        roundings = [stored.of(weight.name) for weight in chosen]
        stored.check_any(any(roundings))
    own = _specs_of(chosen)
    weighed = _weigh(chosen, own, ModelImportance(importance, source_of(
        inputs, rounding, model_name, revision,
        any(map(needs_source, own.values())),
        store or any(isinstance(weight.source, EncodingReference) and
                     weight.source.name is None for weight in chosen))), client)
    found = list(client.quantize_many(
        [QuantizeJob(weight.parameter, weight.source, weight.name,
                     rounding=how)
         for weight, how in zip(chosen, roundings)], model=model_name,
        revision=revision, store=store, nan_policy=nan_policy))
    made = [QuantizedWeight(quantized, weight.parameter.dtype,
                            weight.parameter.device)
            for weight, quantized in zip(chosen, found)]
    replaced: ResultList[ReplacedWeight] = ResultList(
        dataclasses.replace(
            _report(weight, module, how is not None, quantized.summary),
            importance=weight.name in weighed)
        for weight, module, how, quantized in zip(chosen, made, roundings,
                                                  found))
    for row, weight, quantized in zip(replaced, chosen, found):
        warn_of_not_finite(row.name, row.format, row.nan_count,
                           row.infinity_count, 2)
        assert quantized.encoding is not None
        warn_of_coarse_scales(row.name, coarse_scale_count(quantized.encoding),
                              2)
        if row.overflow_count:
            warnings.warn(
                f"quantd: tensor {row.name!r}: " + infinities_text(
                    row.overflow_count,
                    str(weight.parameter.dtype).partition(".")[2]),
                RuntimeWarning, stacklevel=2)
    for weight, module in zip(chosen, made):
        for owner in weight.modules:
            del owner._parameters["weight"]
            owner.__class__ = _CLASSES[type(owner)]
            owner.add_module("quantized_weight", module)
    return ReplacedWeights(replaced, left_out)


def _weights(model: torch.nn.Module) -> Iterator[_Weight]:
    """The parameters that could be codes, in the order of the model."""
    found: dict[int, _Weight] = {}
    seen = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point() or (
                    parameter.dim() < 2):
                continue
            weight = found.setdefault(id(parameter), _Weight(parameter, [], []))
            weight.names.append(f"{prefix}.{key}" if prefix else key)
            if (id(module), key) in seen:
                continue
            seen.add((id(module), key))
            if key == "weight" and type(module) in _CLASSES:
                weight.modules.append(module)
            elif not weight.why_not:
                weight.why_not = (
                    f"{weight.names[-1]} is of a {type(module).__name__}")
    yield from found.values()


def _choose(weights: list[_Weight], specs: Sources, left_out: dict[str, str]
            ) -> list[_Weight]:
    """Weights that the specs are for, with name and source."""
    what = "a weight of a Linear, Conv1d, Conv2d, Conv3d or Embedding"
    if not weights:
        raise errors.argument_invalid(f"expected {what} in the model, got none",
                                      "model")
    patterns: dict[str, Any] = {"*": specs}
    if isinstance(specs, Mapping):
        patterns = dict(specs)
    _globs.check_each_takes(
        patterns, [name for weight in weights for name in weight.names], what,
        "specs")
    for weight in weights:
        weight.name, weight.source = next(
            ((name, patterns[pattern]) for name in weight.names
             for pattern in patterns if _globs.matches(pattern, name)),
            ("", None))
        if not weight.name:
            left_out[weight.names[0]] = "no pattern matches it"
    return [weight for weight in weights if weight.name]


def _specs_of(weights: list[_Weight]) -> dict[str, EncodingSpec]:
    """By name, where the source is no encoding."""
    specs = {}
    for weight in weights:
        spec = weight.source
        if isinstance(spec, str):
            spec = EncodingSpec.parse(spec)
        if isinstance(spec, EncodingSpec):
            specs[weight.name] = spec
    return specs


def _weigh(weights: list[_Weight], specs: Mapping[str, EncodingSpec],
           importance: ModelImportance, client: Client) -> set[str]:
    """Gives specs their importance; the names of those that have some then."""
    importance.find([(weight.name, tuple(weight.parameter.shape))
                     for weight in weights if weight.name in specs],
                    lambda name: [specs[name]], client)
    weighed = set()
    for weight in weights:
        if weight.name not in specs:
            continue
        weight.source = spec = importance.apply(weight.name,
                                                specs[weight.name])
        if spec.importance is not None:
            weighed.add(weight.name)
    return weighed


def _report(weight: _Weight, module: QuantizedWeight, is_compensated: bool,
            summary: QuantizeSummary) -> ReplacedWeight:
    parameter = weight.parameter
    sqnr_db, overflow_count = _errors(parameter, module())
    return ReplacedWeight(
        weight.name, tuple(weight.names), type(weight.modules[0]).__name__,
        module.format, tuple(parameter.shape), _size(parameter),
        sum(map(_size, module.buffers())), sqnr_db,
        "compensated" if is_compensated else "nearest", summary.nan_count,
        summary.positive_infinity_count + summary.negative_infinity_count,
        overflow_count)


def _size(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _errors(reference: torch.Tensor, test: torch.Tensor
            ) -> tuple[float, int]:
    """The SQNR, and how many finite elements became infinite."""
    signal = noise = 0.0
    count = overflow_count = 0
    for x, y in zip(reference.detach().reshape(-1).split(_PIECE),
                    test.reshape(-1).split(_PIECE)):
        x, y = x.cpu().double(), y.cpu().double()
        is_finite = x.isfinite() & y.isfinite()
        overflow_count += int((x.isfinite() & y.isinf()).sum())
        x, y = x[is_finite], y[is_finite]
        count += x.numel()
        signal += float(x.square().sum())
        noise += float((y - x).square().sum())
    sqnr_db = (math.nan if not count else math.inf if noise == 0 else
               -math.inf if signal == 0 else 10 * math.log10(signal / noise))
    return sqnr_db, overflow_count
