"""Options of quantctl that say what arguments of calls on whole models say."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Iterable, Mapping, Optional, Sequence, Union

from google.protobuf import json_format

from quantd import errors, imatrix
from quantd._engine import Texts
from quantd._input_squares import InputSquares
from quantd._model_importance import InputsLike, as_inputs
from quantd._model_rounding import ModelRounding
from quantd._ties import TiesLike
from quantd.encoding import EncodingSpec, as_granularity

# A spec of all, "PATTERN=SPEC" or "@FILE" with such lines as of quantctl sweep,
# several of them, or specs by pattern.
SpecsLike = Union[EncodingSpec, str, Sequence[str],
                  Mapping[str, Union[EncodingSpec, str]]]


def spec_flags(specs: Optional[SpecsLike]) -> list[str]:
    """Options for specs. Raises: ARGUMENT_INVALID."""
    if specs is None:
        return []
    if isinstance(specs, Mapping):
        told = [json.dumps({"pattern": pattern, **_spec_fields(spec)})
                for pattern, spec in specs.items()]
    elif isinstance(specs, (str, EncodingSpec)):
        told = [spec_text(specs)]
    elif isinstance(specs, (list, tuple)):
        told = [spec_text(spec) for spec in specs]
    else:
        raise errors.argument_invalid(
            f"expected specs, got {type(specs).__name__}", "specs")
    if not told:
        raise errors.argument_invalid("expected a spec, got none", "specs")
    return [f"--spec={text}" for text in told]


def spec_text(spec: Any) -> str:
    """A spec as quantctl takes it. Raises: ARGUMENT_INVALID."""
    return spec if isinstance(spec, str) else json.dumps(_spec_fields(spec))


def _spec_fields(spec: Any) -> dict[str, Any]:
    """A spec as JSON. Raises: ARGUMENT_INVALID."""
    if isinstance(spec, str):
        return {"spec": spec}
    if not isinstance(spec, EncodingSpec):
        raise errors.argument_invalid(
            f"expected a spec, got {type(spec).__name__}", "specs")
    granularity = as_granularity(spec.granularity)
    kind = granularity.kind.replace("_", "-")
    if kind == "group":
        kind = f"group:{granularity.group_size}:{granularity.axis}"
    elif kind == "per-channel":
        kind = f"per-channel:{granularity.axis}"
    elif kind == "blocks":
        kind = "block=" + ",".join(map(str, granularity.block_size))
    message = dataclasses.replace(spec, granularity=None).to_proto()
    return {"spec": json_format.MessageToDict(message), "granularity": kind}


def tie_flags(ties: TiesLike) -> list[str]:
    """Options for ties. Raises: ARGUMENT_INVALID."""
    if isinstance(ties, bool):
        return [] if ties else ["--no-ties"]
    if isinstance(ties, str) or not isinstance(ties, Iterable):
        raise errors.argument_invalid(
            f"expected True, False or a list of patterns, got {ties!r}", "ties")
    return [f"--tie={pattern}" for pattern in ties]


def input_flags(rounding: Optional[ModelRounding], inputs: InputsLike,
                texts: Texts) -> list[str]:
    """Options for rounding, and for the place of stored inputs. Raises:
    ARGUMENT_INVALID."""
    if rounding is not None and not isinstance(rounding, ModelRounding):
        raise errors.argument_invalid(
            f"expected a ModelRounding, got {type(rounding).__name__}",
            "rounding")
    given = as_inputs(inputs)
    places = [(place.model, place.revision, place.inputs)
              for place in (rounding, given) if place is not None]
    if places[1:] and places[0] != places[1]:
        raise errors.argument_invalid(
            "expected inputs without rounding, which says where they are",
            "inputs")
    flags = []
    for model, revision, names in places[:1]:
        flags.append(f"--inputs={model}@{revision or 'main'}")
        if names is not None:
            path = texts.add(json.dumps(dict(names)).encode(),
                             "ModelRounding.inputs")
            flags.append(f"--inputs-map={path}")
    if rounding is not None:
        flags.append("--rounding=compensated")
        if rounding.damping is not None:
            flags.append(f"--damping={rounding.damping!r}")
        if rounding.column_order is not None:
            flags.append(f"--column-order={rounding.column_order}")
    return flags


def importance_flags(importance: Optional[Mapping[str, InputSquares]],
                     texts: Texts) -> list[str]:
    """Options for an importance matrix. Raises: ARGUMENT_INVALID."""
    if importance is None:
        return []
    if not isinstance(importance, Mapping) or not importance:
        raise errors.argument_invalid(
            f"expected what imatrix.load() gives, got {importance!r:.80}",
            "importance")
    path = texts.add(imatrix.to_bytes(importance), "importance")
    return [f"--importance={path}"]


def part_text(part: Union[tuple[int, int], str, None]) -> str:
    """A part as quantctl takes it. Raises: ARGUMENT_INVALID."""
    if part is None or isinstance(part, str):
        return part or ""
    try:
        index, count = part
        return f"{int(index)}/{int(count)}"
    except (TypeError, ValueError) as error:
        raise errors.argument_invalid(
            f"expected a part (i, n) or 'i/n', got {part!r}", "part") from error
