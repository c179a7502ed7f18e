"""Results as rows, for a notebook or a data frame."""

from __future__ import annotations

import dataclasses
import datetime
import html
from typing import Any, ClassVar, Iterable, Mapping, Sequence, TypeVar

import numpy as np

from quantd import errors
from quantd.tensor import TensorName

T = TypeVar("T")

# Most rows of a table in a notebook.
_MOST_ROWS = 100
_PLAIN = (bool, int, float, str, datetime.datetime)


class Tabular:
    """A dataclass whose fields make rows."""

    # Fields whose own fields come without their name in front.
    _INLINE: ClassVar[tuple[str, ...]] = ()

    def to_dicts(self) -> list[dict[str, Any]]:
        """Rows of plain values, such as pandas.DataFrame takes: numbers and
        text of the fields, those within others with the field's name in front;
        of a name model, revision and tensor. Arrays and lists are left out."""
        return [self._row()]

    def _row(self) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, TensorName):
                row.update(model=value.model,
                           revision=value.revision or "main",
                           tensor=value.tensor)
            elif isinstance(value, Tabular):
                prefix = "" if field.name in self._INLINE else field.name + "_"
                row.update((prefix + key, item)
                           for key, item in value._row().items()
                           if prefix + key not in row)
            elif isinstance(value, errors.QuantdError):
                row[field.name] = str(value)
            elif value is None or isinstance(value, _PLAIN):
                row[field.name] = value
        return row

    def _repr_html_(self) -> str:
        return to_html(self.to_dicts())


class ResultList(list[T]):
    """A list of results, of any call: quantd.ResultList(client.list_encodings(
    "acme/net")) shows a table in a notebook."""

    def __init__(self, results: Iterable[T] = ()) -> None:
        super().__init__(results)

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows of all; an error in the place of a result is one, too."""
        rows: list[dict[str, Any]] = []
        for result in self:
            if isinstance(result, Tabular):
                rows += result.to_dicts()
            elif isinstance(result, errors.QuantdError):
                rows.append({"tensor": result.name.tensor if result.name else
                             "", "error": str(result)})
            else:
                rows.append({"value": result})
        return rows

    def _repr_html_(self) -> str:
        return to_html(self.to_dicts())


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (float, np.floating)):
        return f"{value:.6g}"
    return html.escape(str(value))


def to_html(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table. Columns in which no row has anything are left out."""
    columns = list(dict.fromkeys(
        key for row in rows for key, value in row.items()
        if value is not None and value != ""))
    lines = ["<table><thead><tr>",
             *(f"<th>{html.escape(column)}</th>" for column in columns),
             "</tr></thead><tbody>"]
    for row in rows[:_MOST_ROWS]:
        lines.append("<tr>" + "".join(
            f"<td>{_text(row.get(column))}</td>" for column in columns)
                     + "</tr>")
    lines.append("</tbody></table>")
    if len(rows) > _MOST_ROWS:
        lines.append(f"<p>{_MOST_ROWS:,} of {len(rows):,} rows</p>")
    return "".join(lines)
