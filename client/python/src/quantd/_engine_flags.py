"""Options of quantctl that say what arguments of calls on whole models say."""

from __future__ import annotations

import json
import re
from typing import Any, Mapping, Optional

from quantd import errors
from quantd._engine import Texts
from quantd._model_importance import InputsLike, as_inputs
from quantd._model_rounding import ModelRounding
from quantd._specs import SpecsLike, template_of
from quantd._ties import TiesLike
from quantd.encoding import EncodingSpec

# Longer specs go to a file.
_MOST_ARGUMENT_BYTES = 64 << 10


def spec_flags(specs: Optional[SpecsLike], texts: Texts) -> list[str]:
    """Options for specs. Raises: ARGUMENT_INVALID."""
    if specs is None:
        return []
    if isinstance(specs, Mapping):
        for pattern in specs:
            if not isinstance(pattern, str) or re.search(
                    "^[@{]|[=\n]", pattern):
                raise errors.argument_invalid(
                    "expected patterns without '=' and line breaks, and no '@' "
                    f"or '{{' in front, got {pattern!r}; '?' stands for any "
                    "character", "specs")
        told = [f"{pattern}={_text_of(spec)}"
                for pattern, spec in specs.items()]
    elif isinstance(specs, (str, EncodingSpec)):
        told = [_text_of(specs)]
    elif isinstance(specs, (list, tuple)):
        told = [_text_of(spec) for spec in specs]
    else:
        raise errors.argument_invalid(
            f"expected specs, got {type(specs).__name__}", "specs")
    if not told:
        raise errors.argument_invalid("expected a spec, got none", "specs")
    if sum(map(len, told)) > _MOST_ARGUMENT_BYTES:
        told = ["@" + texts.add("\n".join(told).encode())]
    return [f"--spec={text}" for text in told]


def _text_of(spec: Any) -> str:
    return spec if isinstance(spec, str) else template_of(spec).text()


def tie_flags(ties: TiesLike) -> list[str]:
    """Options for ties. Raises: ARGUMENT_INVALID."""
    if isinstance(ties, bool):
        return [] if ties else ["--no-ties"]
    if isinstance(ties, str):
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
            "expected the inputs of rounding, or none", "inputs")
    flags = []
    for model, revision, names in places[:1]:
        flags.append(f"--inputs={model}@{revision or 'main'}")
        if names is not None:
            path = texts.add(json.dumps(dict(names)).encode())
            flags.append(f"--inputs-map={path}")
    if rounding is not None:
        flags.append("--rounding=compensated")
        if rounding.damping is not None:
            flags.append(f"--damping={rounding.damping!r}")
        if rounding.column_order is not None:
            flags.append(f"--column-order={rounding.column_order}")
    return flags
