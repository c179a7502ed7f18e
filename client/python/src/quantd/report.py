"""A page about a model's statistics and what quantizing it would cost.

    import quantd.report

    with quantd.Client("127.0.0.1:8430") as client:
        quantd.report.write("report.html", client, "acme/net",
                            specs=["int8:per-channel", "int4:group:32"])

or  python3 -m quantd.report --model acme/net -o report.html

One HTML file with everything in it, plots included: it opens without a network.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import errno
import importlib.resources
import json
import math
import os
import sys
import tempfile
from typing import Any, Callable, Iterable, Optional, Sequence, Union

import numpy as np

from quantd import __version__, errors, results
from quantd.client import Client
from quantd.encoding import EncodingSpec
from quantd.tensor import Array

SPECS = ("int8:per-channel", "int8:mse", "int4:mse")
_BINS = 120
_TAIL = 0.001
# With more tensors their histograms have half as many bins.
_MANY_TENSORS = 500

SpecLike = Union[EncodingSpec, str]


@dataclasses.dataclass(frozen=True, eq=False)
class TensorReport:
    """One tensor. element_count: of the tensor, where `statistics` has those
    that were seen; low, high: between which all but a thousandth of the
    elements lie; edges, counts: a histogram of linear bins; predictions,
    size_bytes: by spec, None where that failed."""

    name: str
    statistics: results.TensorStatistics
    source_count: int
    element_count: int
    low: float
    high: float
    edges: Array
    counts: Array
    predictions: tuple[Optional[results.Prediction], ...]
    size_bytes: tuple[Optional[int], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ModelReport:
    """Contents of a page. server: where the statistics are; date: when they
    were read, in UTC."""

    model: str
    revision: str
    server: str
    date: datetime.datetime
    labels: tuple[str, ...]
    tensors: tuple[TensorReport, ...]


def collect(client: Client, model: str, *, revision: str = "",
            specs: Sequence[SpecLike] = SPECS, patterns: Iterable[str] = (),
            progress: Optional[Callable[[int, int], object]] = None
            ) -> ModelReport:
    """Asks a server for what it knows of a model.

    specs: 1 to 64 candidates.
    patterns: globs over names of tensors; default all. One that matches none is
        an error.
    progress: called with how many tensors are read, and of how many.

    Raises: QuantdError, STATISTICS_NOT_FOUND where there are none.
    """
    specs, patterns = list(specs), list(patterns)
    sweep = client.sweep(model, specs, revision=revision, patterns=patterns)
    tensors = []
    for n, swept in enumerate(sweep.tensors):
        if swept.error is None:
            tensors.append(_tensor(
                client, swept, len(specs),
                _BINS // (2 if len(sweep.tensors) > _MANY_TENSORS else 1)))
        if progress is not None:
            progress(n + 1, len(sweep.tensors))
    return ModelReport(model, revision or "main", client.target,
                       datetime.datetime.now(datetime.timezone.utc),
                       tuple(_label(spec) for spec in specs), tuple(tensors))


def write(path: str, client: Client, model: str, *, revision: str = "",
          specs: Sequence[SpecLike] = SPECS, patterns: Iterable[str] = (),
          overwrite: bool = False) -> None:
    """collect() and render() into a file, which is whole or not there.

    overwrite: a file that is there already is replaced.

    Raises: QuantdError; FileExistsError unless `overwrite`; OSError.
    """
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(
            errno.EEXIST, "exists, and overwrite=True was not given", path)
    page = render(collect(client, model, revision=revision, specs=specs,
                          patterns=patterns))
    folder = os.path.dirname(os.path.abspath(path))
    with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8",
                                     suffix=".html", delete=False) as file:
        try:
            file.write(page)
            file.flush()
            os.chmod(file.name, 0o644)
            if overwrite:
                os.replace(file.name, path)
            else:
                _publish(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _publish(temporary_path: str, path: str) -> None:
    """Gives a file its name. Raises: FileExistsError where another one came to
    have that in the meantime."""
    try:
        os.link(temporary_path, path)
    except FileExistsError:
        raise
    except OSError:
        # Not every file system has links: there the name is taken first.
        with open(path, "x", encoding="utf-8"):
            pass
        os.replace(temporary_path, path)
    else:
        os.unlink(temporary_path)


def histogram(state: Any, bins: int = _BINS) -> tuple[Array, Array]:
    """Edges [bins + 1] and counts [bins] of linear bins over all elements of a
    StatisticsState of proto/. A bin of the state that lies in several is shared
    out evenly."""
    return _histogram(state, _bins_of(state), bins)


def _histogram(state: Any, found: tuple[Array, Array], bins: int
               ) -> tuple[Array, Array]:
    ends, counts = found
    low, high = state.statistics.min, state.statistics.max
    if not counts.size or not low < high:
        edges = np.linspace(low - 0.5, low + 0.5, bins + 1)
        return edges, np.histogram([low], edges)[0] * counts.sum()
    edges = np.linspace(low, high, bins + 1)
    return edges, np.diff(_below(edges, ends, counts))


def quantile(state: Any, fraction: float) -> float:
    """Below which that fraction of the elements lies, as near as the bins of
    the state tell."""
    return _quantile(state, _bins_of(state), fraction)


def _quantile(state: Any, found: tuple[Array, Array], fraction: float
              ) -> float:
    ends, counts = found
    if not counts.size:
        return 0.0
    wanted = fraction * counts.sum()
    i = min(int(np.searchsorted(np.cumsum(counts), wanted)), counts.size - 1)
    inside = (wanted - counts[:i].sum()) / counts[i]
    low, high = ends[i]
    return float(np.clip(low + inside * (high - low), state.statistics.min,
                         state.statistics.max))


def _bins_of(state: Any) -> tuple[Array, Array]:
    """First and last number [n, 2], and count [n] of the bins of all
    histograms together, in ascending order."""
    low_bits = 23 - state.mantissa_bits
    counts: dict[int, int] = {}
    for one in state.histograms:
        keys = np.cumsum(np.array(one.key_delta, np.int64)).tolist()
        for key, count in zip(keys, one.count):
            counts[key] = counts.get(key, 0) + count
    keys = np.array(sorted(counts), np.int64)
    firsts = np.stack([keys << low_bits, ((keys + 1) << low_bits) - 1], -1)
    # In the order of the numbers all bits of negatives are flipped, and the
    # sign of the others.
    is_negative = firsts < 1 << 31
    bits = np.where(is_negative, ~firsts, firsts ^ (1 << 31)) & 0xFFFFFFFF
    ends = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    largest = float(np.finfo(np.float32).max)
    ends = np.nan_to_num(ends, nan=largest, posinf=largest, neginf=-largest)
    return (np.clip(ends, state.statistics.min, state.statistics.max),
            np.array([counts[int(key)] for key in keys], np.float64))


def _below(values: Array, ends: Array, counts: Array) -> Array:
    """How many elements are below each value; at the last one, all."""
    below = np.zeros(len(values))
    for (low, high), count in zip(ends, counts):
        if high > low:
            below += count * np.clip((values - low) / (high - low), 0, 1)
        else:
            below += count * (values > low)
    below[-1] = counts.sum()
    return below


def _label(spec: SpecLike) -> str:
    if isinstance(spec, str):
        return spec
    words = [spec.format]
    if spec.method:
        words.append(spec.method)
    return ":".join(words)


def _tensor(client: Client, swept: results.SweepTensor,
            spec_count: int, bin_count: int) -> TensorReport:
    stored = client.get_statistics(swept.name, per_tensor=True)
    state = stored.state
    assert state is not None
    bins = _bins_of(state)
    edges, counts = _histogram(state, bins, bin_count)
    candidates = {candidate.spec_index: candidate
                  for candidate in swept.candidates if candidate.prediction}
    return TensorReport(
        swept.name.tensor, stored.statistics, len(stored.sources),
        element_count=math.prod(state.shape),
        low=_quantile(state, bins, _TAIL / 2),
        high=_quantile(state, bins, 1 - _TAIL / 2),
        edges=edges, counts=counts,
        predictions=tuple(
            candidates[i].prediction if i in candidates else None
            for i in range(spec_count)),
        size_bytes=tuple(candidates[i].size_bytes if i in candidates else None
                         for i in range(spec_count)))


# The page.


def _plain(value: Any) -> Any:
    """For JSON, which has no infinity and no numbers of numpy."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return _plain(value.item())
    return value


def _document(report: ModelReport) -> dict[str, Any]:
    """Document that report.html takes."""
    def candidates(tensor: TensorReport) -> list[Optional[dict[str, Any]]]:
        return [None if prediction is None else {
            "sqnr_db": prediction.sqnr_db,
            "sqnr_db_low": prediction.sqnr_db_low,
            "sqnr_db_high": prediction.sqnr_db_high,
            "size_bytes": size}
                for prediction, size in zip(tensor.predictions,
                                            tensor.size_bytes)]

    return {
        "model": report.model, "revision": report.revision,
        "date": report.date.strftime("%Y-%m-%d %H:%M UTC"),
        "version": f"quantd {__version__} for Python",
        "server": report.server, "input": None, "mixture": None,
        "candidates": report.labels,
        "tensors": [{
            "name": tensor.name, "count": tensor.statistics.count,
            "zero_count": tensor.statistics.zero_count,
            "elements": tensor.element_count,
            "min": tensor.statistics.min, "max": tensor.statistics.max,
            "low": tensor.low, "high": tensor.high,
            "edges": [tensor.edges[0], tensor.edges[-1]],
            "bins": tensor.counts, "candidates": candidates(tensor)}
                    for tensor in report.tensors]}


def render(report: ModelReport) -> str:
    """The page."""
    template = importlib.resources.files("quantd").joinpath(
        "report.html").read_text(encoding="utf-8")
    data = json.dumps(_plain(_document(report)), allow_nan=False,
                      separators=(",", ":"))
    # Nothing in a script may look like its end.
    begin, end = template.split("@DATA@")
    return "".join([begin, data.replace("<", "\\u003c"), end])


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m quantd.report",
        description="Writes a page about a model's statistics.")
    parser.add_argument("--server", default=os.environ.get(
        "QUANTD_SERVER", "127.0.0.1:8430"), metavar="ADDRESS")
    parser.add_argument("--model", required=True)
    parser.add_argument("--revision", default="")
    parser.add_argument("--spec", action="append", metavar="SPEC",
                        help=f"a candidate; default {' '.join(SPECS)}")
    parser.add_argument("--include", action="append", default=[],
                        metavar="GLOB", help="tensors; default all")
    parser.add_argument("--force", action="store_true",
                        help="replace the file if it is there already")
    parser.add_argument("-o", "--output", required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        with Client(options.server) as client:
            write(options.output, client, options.model,
                  revision=options.revision, specs=options.spec or SPECS,
                  patterns=options.include, overwrite=options.force)
    except errors.QuantdError as error:
        print(f"quantd.report: {error}", file=sys.stderr)
        return 1
    except FileExistsError:
        print(f"quantd.report: {options.output} exists; --force replaces it",
              file=sys.stderr)
        return 1
    except OSError as error:
        print(f"quantd.report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
