"""A page about a model's statistics and what quantizing it would cost.

    import quantd.report

    with quantd.Client("127.0.0.1:8430") as client:
        quantd.report.write("report.html", client, "acme/net",
                            specs=["int8:per-channel", "int4:group:32"])

or  python3 -m quantd.report --model acme/net -o report.html

One HTML file with everything in it, plots included: it opens without a network.
Drawn by plotly.js, which comes with the plotly package.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import json
import math
import os
import sys
import tempfile
from typing import Any, Callable, Iterable, Optional, Sequence, Union

import numpy as np

from quantd import errors, results
from quantd._values import limits
from quantd.client import Client
from quantd.encoding import Encoding, EncodingSpec
from quantd.tensor import Array

SPECS = ("int8:per-channel", "int8:mse", "int4:mse")
# Told apart by people who see few colours, too.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00",
           "#333333", "#8c6d31")
_DASHES = ("solid", "dash", "dot", "dashdot")
_BINS = 120
_TAIL = 0.001
# Longer names lose their middle on the axes.
_MOST_NAME_LENGTH = 26
_ROW_PIXELS = 28

SpecLike = Union[EncodingSpec, str]


@dataclasses.dataclass(frozen=True, eq=False)
class TensorReport:
    """One tensor. low, high: between which all but a thousandth of the elements
    lie; edges, counts: a histogram of linear bins; predictions, clips, sizes:
    by spec, None where that failed."""

    name: str
    statistics: results.TensorStatistics
    source_count: int
    low: float
    high: float
    edges: Array
    counts: Array
    predictions: tuple[Optional[results.Prediction], ...]
    clips: tuple[Optional[tuple[float, float]], ...]
    scale_counts: tuple[int, ...]

    @property
    def kind(self) -> str:
        """"weights", "activations" or "others", by name."""
        last = self.name.rpartition(".")[2]
        if last in ("weight", "bias") or last.startswith("weight"):
            return "weights"
        parts = self.name.split(".")
        if "input" in parts[-2:] or "output" in parts[-2:]:
            return "activations"
        return "others"


@dataclasses.dataclass(frozen=True, eq=False)
class ModelReport:
    """What a page is made of. mixtures: one spec for each tensor, within
    growing sizes."""

    model: str
    revision: str
    labels: tuple[str, ...]
    tensors: tuple[TensorReport, ...]
    totals: tuple[results.SweepTotal, ...]
    mixtures: tuple[results.SweepMixture, ...]


def collect(client: Client, model: str, *, revision: str = "",
            specs: Sequence[SpecLike] = SPECS, patterns: Iterable[str] = (),
            mixture_count: int = 8,
            progress: Optional[Callable[[int, int], object]] = None
            ) -> ModelReport:
    """Asks a server for what it knows of a model.

    specs: 1 to 64 candidates.
    patterns: globs over names of tensors; default all.
    mixture_count: how many sizes to choose a spec for each tensor for.
    progress: called with how many tensors are read, and of how many.

    Raises: QuantdError, STATISTICS_NOT_FOUND where there are none.
    """
    specs, patterns = list(specs), list(patterns)
    sweep = client.sweep(model, specs, revision=revision, patterns=patterns)
    encodings: list[dict[str, Encoding]] = []
    for spec in specs:
        encodings.append({})
        overrides = [(pattern, spec) for pattern in patterns]
        for answer in client.compute_encodings(
                model, None if overrides else spec, revision=revision,
                overrides=overrides, dry_run=True):
            stored = answer.stored_encoding
            if stored is not None and stored.encoding is not None:
                encodings[-1][answer.name.tensor] = stored.encoding
    tensors = []
    for n, swept in enumerate(sweep.tensors):
        if swept.error is None:
            tensors.append(_tensor(client, swept, encodings))
        if progress is not None:
            progress(n + 1, len(sweep.tensors))
    sizes = [total.size_bytes for total in sweep.totals
             if not total.failed_count]
    mixtures = []
    if len(sizes) > 1 and mixture_count > 0:
        for size in np.linspace(min(sizes), max(sizes), mixture_count):
            mixture = client.sweep(
                model, specs, revision=revision, patterns=patterns,
                max_size_bytes=int(size)).mixture
            if mixture is not None and mixture.target_met:
                mixtures.append(mixture)
    return ModelReport(model, revision or "main",
                       tuple(_label(spec) for spec in specs), tuple(tensors),
                       sweep.totals, tuple(mixtures))


def write(path: str, client: Client, model: str, *, revision: str = "",
          specs: Sequence[SpecLike] = SPECS, patterns: Iterable[str] = (),
          mixture_count: int = 8) -> None:
    """collect() and render() into a file, which is whole or not there.

    Raises: QuantdError; OSError; ImportError without plotly.
    """
    page = render(collect(client, model, revision=revision, specs=specs,
                          patterns=patterns, mixture_count=mixture_count))
    folder = os.path.dirname(os.path.abspath(path))
    with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8",
                                     suffix=".html", delete=False) as file:
        try:
            file.write(page)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def histogram(state: Any, bins: int = _BINS) -> tuple[Array, Array]:
    """Edges [bins + 1] and counts [bins] of linear bins over all elements of a
    StatisticsState of proto/. A bin of the state that lies in several is shared
    out evenly."""
    ends, counts = _bins_of(state)
    low, high = state.statistics.min, state.statistics.max
    if not counts.size or not low < high:
        edges = np.linspace(low - 0.5, low + 0.5, bins + 1)
        return edges, np.histogram([low], edges)[0] * counts.sum()
    edges = np.linspace(low, high, bins + 1)
    return edges, np.diff(_below(edges, ends, counts))


def quantile(state: Any, fraction: float) -> float:
    """Below which that fraction of the elements lies, as near as the bins of
    the state tell."""
    ends, counts = _bins_of(state)
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
            encodings: Sequence[dict[str, Encoding]]) -> TensorReport:
    stored = client.get_statistics(swept.name, with_state=True)
    edges, counts = histogram(stored.state)
    predictions = {candidate.spec_index: candidate.prediction
                   for candidate in swept.candidates}
    found = [by_name.get(swept.name.tensor) for by_name in encodings]
    return TensorReport(
        swept.name.tensor, stored.statistics, len(stored.sources),
        quantile(stored.state, _TAIL / 2), quantile(stored.state,
                                                    1 - _TAIL / 2),
        edges, counts,
        tuple(predictions.get(i) for i in range(len(encodings))),
        tuple(None if encoding is None else limits(encoding)
              for encoding in found),
        tuple(0 if encoding is None else encoding.scale.size
              for encoding in found))


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


def _short(name: str) -> str:
    if len(name) > _MOST_NAME_LENGTH:
        kept = _MOST_NAME_LENGTH - 1
        name = name[:kept // 3] + "…" + name[-(kept - kept // 3):]
    return html.escape(name)


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            break
        size_bytes /= 1024
    else:
        unit = "GiB"
    return f"{size_bytes:,.0f} {unit}" if unit == "B" else (
        f"{size_bytes:,.1f} {unit}")


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title, "standoff": 8}, "automargin": True,
            "gridcolor": "#e8e8e8", "zerolinecolor": "#999", **more}


def _names_axis(tensors: Sequence[TensorReport]) -> dict[str, Any]:
    """The first tensor at the top."""
    return {"automargin": True, "tickvals": list(range(len(tensors))),
            "ticktext": [_short(tensor.name) for tensor in tensors],
            "range": [len(tensors) - 0.4, -0.6], "gridcolor": "#e8e8e8",
            "ticks": "outside", "ticklen": 6, "tickcolor": "#fff",
            "zeroline": False}


def _rows_height(count: int) -> int:
    return 90 + _ROW_PIXELS * count


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]


def _sqnr_plot(report: ModelReport) -> dict[str, Any]:
    traces = []
    for i, label in enumerate(report.labels):
        # Beside one another, so that none hides another.
        shift = 0.5 * ((i + 0.5) / len(report.labels) - 0.5)
        rows = [(y + shift, tensor, tensor.predictions[i])
                for y, tensor in enumerate(report.tensors)]
        shown = [(y, tensor, prediction) for y, tensor, prediction in rows
                 if prediction is not None and
                 math.isfinite(prediction.sqnr_db)]
        traces.append({
            "type": "scatter", "mode": "markers", "name": html.escape(label),
            "x": [prediction.sqnr_db for _, _, prediction in shown],
            "y": [y for y, _, _ in shown],
            "error_x": {
                "type": "data", "symmetric": False, "thickness": 1, "width": 3,
                "array": [prediction.sqnr_db_high - prediction.sqnr_db
                          for _, _, prediction in shown],
                "arrayminus": [prediction.sqnr_db - prediction.sqnr_db_low
                               for _, _, prediction in shown]},
            "text": [html.escape(tensor.name) for _, tensor, _ in shown],
            "hovertemplate": "%{text}<br>%{x:.2f} dB",
            "marker": {"color": _color(i), "size": 9,
                       "symbol": i // len(_COLORS) % 4}})
    return {"data": traces, "height": _rows_height(len(report.tensors)),
            "layout": {"xaxis": _axis("expected SQNR, dB"),
                       "yaxis": _names_axis(report.tensors)}}


def _ranges_plot(tensors: Sequence[TensorReport]) -> dict[str, Any]:
    def bars(name: str, low: Sequence[float], high: Sequence[float],
             color: str, width: float) -> dict[str, Any]:
        return {"type": "bar", "orientation": "h", "name": name,
                "y": list(range(len(tensors))), "base": list(low),
                "x": [b - a for a, b in zip(low, high)], "width": width,
                "marker": {"color": color},
                "customdata": [[html.escape(tensor.name), f"{a:.4g}",
                                f"{b:.4g}"] for tensor, a, b in zip(
                                    tensors, low, high)],
                "hovertemplate": "%{customdata[0]}<br>%{customdata[1]} to "
                                 "%{customdata[2]}"}

    return {
        "data": [
            bars("smallest to largest",
                 [tensor.statistics.min for tensor in tensors],
                 [tensor.statistics.max for tensor in tensors], "#a6cee3",
                 0.65),
            bars("all but 0.1 %", [tensor.low for tensor in tensors],
                 [tensor.high for tensor in tensors], "#1f78b4", 0.35)],
        "height": _rows_height(len(tensors)),
        "layout": {"barmode": "overlay",
                   "xaxis": _axis("value of an element", zeroline=True),
                   "yaxis": _names_axis(tensors)}}


def _ranking(report: ModelReport) -> tuple[int, list[tuple[float,
                                                           TensorReport]]]:
    """The spec of the fewest bytes, and the noise that it makes of each
    tensor's signal, most first."""
    index = min(report.totals, key=lambda total: (
        total.failed_count, total.size_bytes)).spec_index
    noise = []
    for tensor in report.tensors:
        prediction = tensor.predictions[index]
        if prediction is not None and math.isfinite(prediction.sqnr_db):
            noise.append((10 ** (-prediction.sqnr_db / 10), tensor))
    noise.sort(key=lambda item: -item[0])
    return index, noise


def _sensitivity_plot(report: ModelReport) -> dict[str, Any]:
    index, noise = _ranking(report)
    return {
        "data": [{
            "type": "bar", "orientation": "h", "width": 0.65,
            "x": [100 * ratio for ratio, _ in noise],
            "y": list(range(len(noise))),
            "text": [html.escape(tensor.name) for _, tensor in noise],
            "textposition": "none",
            "hovertemplate": "%{text}<br>%{x:.3g} % of the signal's power",
            "marker": {"color": _color(index)}}],
        "height": _rows_height(len(noise)),
        "layout": {"xaxis": _axis("noise, % of the signal's power", nticks=6,
                                  rangemode="tozero"),
                   "yaxis": _names_axis([tensor for _, tensor in noise])}}


def _mean_sqnr(noise_to_signal_sum: float, count: int) -> float:
    if noise_to_signal_sum <= 0 or not count:
        return math.inf
    return -10 * math.log10(noise_to_signal_sum / count)


def _size_plot(report: ModelReport) -> dict[str, Any]:
    count = len(report.tensors)
    unit, divisor = "KiB", 1 << 10
    if max(total.size_bytes for total in report.totals) >= 8 << 20:
        unit, divisor = "MiB", 1 << 20
    traces: list[dict[str, Any]] = [{
        "type": "scatter", "mode": "lines+markers", "name": "mixture",
        "x": [mixture.size_bytes / divisor for mixture in report.mixtures],
        "y": [_mean_sqnr(mixture.noise_to_signal_sum, count)
              for mixture in report.mixtures],
        "line": {"color": "#999", "dash": "dot"},
        "marker": {"color": "#777", "size": 6, "symbol": "diamond"},
        "hovertemplate": "a spec for each tensor<br>%{x:,.1f} " + unit +
                         ", %{y:.2f} dB"}]
    for total in report.totals:
        if total.failed_count:
            continue
        i = total.spec_index
        traces.append({
            "type": "scatter", "mode": "markers",
            "name": html.escape(report.labels[i]),
            "x": [total.size_bytes / divisor],
            "y": [_mean_sqnr(total.noise_to_signal_sum, count)],
            "marker": {"color": _color(i), "size": 13},
            "hovertemplate": html.escape(report.labels[i]) +
                             "<br>%{x:,.1f} " + unit + ", %{y:.2f} dB"})
    return {"data": traces, "height": 380,
            "layout": {"xaxis": _axis(f"codes and scales, {unit}",
                                      rangemode="tozero"),
                       "yaxis": _axis("SQNR, dB")}}


def _histogram_plot(report: ModelReport, tensor: TensorReport
                    ) -> dict[str, Any]:
    centers = (tensor.edges[1:] + tensor.edges[:-1]) / 2
    counts = np.where(tensor.counts > 0, tensor.counts, np.nan)
    is_shown = np.isfinite(counts)
    most = float(np.nanmax(counts)) if is_shown.any() else 1.0
    least = 0.5
    ends = [tensor.edges[0], tensor.edges[-1]]
    ends += [end for clip in tensor.clips if clip is not None for end in clip]
    margin = 0.03 * (max(ends) - min(ends))
    traces: list[dict[str, Any]] = [{
        "type": "bar", "x": centers[is_shown], "y": counts[is_shown],
        "width": float(tensor.edges[1] - tensor.edges[0]),
        "marker": {"color": "#c8c8c8", "line": {"width": 0}},
        "hovertemplate": "%{x:.4g}: %{y:,.0f} elements<extra></extra>"}]
    for i, clip in enumerate(tensor.clips):
        if clip is None:
            continue
        many = f", outermost of {tensor.scale_counts[i]:,} scales" if (
            tensor.scale_counts[i] > 1) else ""
        traces.append({
            "type": "scatter", "mode": "lines",
            "x": [clip[0], clip[0], None, clip[1], clip[1]],
            "y": [least, 2 * most, None, least, 2 * most],
            "line": {"color": _color(i), "width": 2.5,
                     "dash": _DASHES[i % len(_DASHES)]},
            "hovertemplate": html.escape(report.labels[i]) +
                             "<br>clips at %{x:.4g}" + many +
                             "<extra></extra>"})
    return {"data": traces, "height": 260, "layout": {
        "bargap": 0, "margin": {"l": 10, "r": 14, "t": 8, "b": 10},
        "xaxis": _axis("value of an element", nticks=7,
                       range=[min(ends) - margin, max(ends) + margin]),
        "yaxis": _axis("elements", type="log", exponentformat="power",
                       dtick=max(1, math.ceil(math.log10(2 * most / least) /
                                              5)),
                       range=[math.log10(least), math.log10(2 * most)])}}


_STYLE = """
:root { font: 16px/1.5 system-ui, "Segoe UI", Roboto, sans-serif;
  color: #1a1a1a; background: #fff; }
body { max-width: 1120px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0;
  overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .2rem; }
h3 { font-size: .95rem; margin: 0; overflow-wrap: anywhere; }
p { margin: .2rem 0 .6rem; color: #444; max-width: 46rem; }
.facts { display: flex; flex-wrap: wrap; gap: 4px 24px; color: #444; }
.facts b { color: #1a1a1a; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: 4px clamp(6px, 1.2vw, 14px) 4px 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #e4e4e4; }
th:first-child, td:first-child, td.name { text-align: left; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: .85rem;
  margin: .2rem 0 .4rem; }
.legend i { display: inline-block; width: 22px; margin-right: 6px;
  vertical-align: middle; border-top: 4px solid; }
.grid { display: grid; gap: 20px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
.grid small { color: #555; }
.plot { width: 100%; }
"""

# Few plots are drawn at once, many when they come into view.
_SCRIPT = """
const plots = JSON.parse(document.getElementById("plots").textContent);
const base = {font: {size: 12, family: "system-ui, sans-serif"},
  margin: {l: 10, r: 14, t: 8, b: 10}, showlegend: false,
  paper_bgcolor: "#fff", plot_bgcolor: "#fff",
  hoverlabel: {align: "left", namelength: 0}};
const config = {responsive: true, displaylogo: false, displayModeBar: false};
function draw(div) {
  const plot = plots[div.id];
  Plotly.newPlot(div, plot.data, {...base, height: plot.height,
    ...plot.layout}, config);
}
const divs = [...document.querySelectorAll(".plot")];
for (const div of divs) div.style.height = plots[div.id].height + "px";
if (divs.length <= 40) {
  divs.forEach(draw);
} else {
  const observer = new IntersectionObserver(entries => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      observer.unobserve(entry.target);
      draw(entry.target);
    }
  }, {rootMargin: "600px"});
  divs.forEach(div => observer.observe(div));
}
"""


def _legend(report: ModelReport, with_dashes: bool = False) -> str:
    css = {"solid": "solid", "dash": "dashed", "dot": "dotted",
           "dashdot": "dashed"}
    chips = []
    for i, label in enumerate(report.labels):
        style = css[_DASHES[i % len(_DASHES)]] if with_dashes else "solid"
        chips.append(f'<span><i style="border-top-color:{_color(i)};'
                     f'border-top-style:{style}"></i>{html.escape(label)}'
                     '</span>')
    return f'<div class="legend">{"".join(chips)}</div>'


def _table(report: ModelReport) -> str:
    rows = []
    count = len(report.tensors)
    for total in report.totals:
        label = html.escape(report.labels[total.spec_index])
        mean = _mean_sqnr(total.noise_to_signal_sum, count)
        worst = f"{total.min_sqnr_db:.1f}" if math.isfinite(
            total.min_sqnr_db) else "∞"
        failed = (f" ({total.failed_count} failed)" if total.failed_count
                  else "")
        rows.append(
            f"<tr><td>{label}{failed}</td>"
            f"<td>{_size(total.size_bytes)}</td>"
            f"<td>{f'{mean:.1f}' if math.isfinite(mean) else '∞'}</td>"
            f"<td>{worst}</td><td class=name>"
            f"{html.escape(total.min_sqnr_tensor)}</td></tr>")
    return ('<div class="table"><table><tr><th>candidate</th><th>size</th>'
            '<th>SQNR, dB</th><th>worst, dB</th><th style="text-align:left">of'
            f'</th></tr>{"".join(rows)}</table></div>')


def render(report: ModelReport) -> str:
    """The page. Raises: ImportError without plotly."""
    # Large, and only needed here.
    # pylint: disable-next=import-outside-toplevel
    from plotly.offline import get_plotlyjs

    plots: dict[str, Any] = {}
    body = []

    def section(title: str, text: str, plot: dict[str, Any],
                legend: str = "") -> None:
        name = f"plot-{len(plots)}"
        plots[name] = plot
        body.append(f"<h2>{title}</h2><p>{text}</p>{legend}"
                    f'<div class="plot" id="{name}"></div>')

    legend = _legend(report)
    if report.tensors:
        section("SQNR of each tensor",
                "Signal to quantization noise that the statistics predict, "
                "the more the better. Whiskers hold for certain.",
                _sqnr_plot(report), legend)
        if report.totals:
            index, _ = _ranking(report)
            section("Sensitivity",
                    "Which tensors lose most under the smallest candidate, "
                    f"<b>{html.escape(report.labels[index])}</b>: give more "
                    "bits to those at the top.", _sensitivity_plot(report))
            section("Size against quality",
                    "SQNR here is that of the mean noise over all tensors. "
                    "The dotted line gives each tensor the candidate that "
                    "leaves the least noise within the size.",
                    _size_plot(report), legend)
        for kind in ("weights", "activations", "others"):
            tensors = [tensor for tensor in report.tensors
                       if tensor.kind == kind]
            if tensors:
                section(f"Ranges of {kind}",
                        "Pale from the smallest to the largest element, dark "
                        "without the outermost 0.1 %.", _ranges_plot(tensors))
        body.append(
            "<h2>Histograms</h2><p>How many elements have a value; lines are "
            "where each candidate clips, of many scales the outermost. The "
            "axis of counts is logarithmic.</p>" +
            _legend(report, with_dashes=True) + '<div class="grid">')
        for tensor in report.tensors:
            name = f"plot-{len(plots)}"
            plots[name] = _histogram_plot(report, tensor)
            statistics = tensor.statistics
            body.append(
                f"<div><h3>{html.escape(tensor.name)}</h3><small>"
                f"{statistics.count:,} elements, {statistics.min:.4g} to "
                f"{statistics.max:.4g}, {statistics.zero_count:,} zero</small>"
                f'<div class="plot" id="{name}"></div></div>')
        body.append("</div>")

    elements = sum(tensor.statistics.count for tensor in report.tensors)
    title = f"{html.escape(report.model)}, {html.escape(report.revision)}"
    data = json.dumps(_plain(plots), allow_nan=False, separators=(",", ":"))
    # Nothing in a script may look like its end.
    data = data.replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>quantd: {title}</title>
<style>{_STYLE}</style></head><body>
<h1>{title}</h1>
<div class="facts"><span><b>{len(report.tensors):,}</b> tensors</span>
<span><b>{elements:,}</b> elements seen</span>
<span><b>{len(report.labels)}</b> candidates</span></div>
<h2>Candidates</h2>
<p>Predicted from stored statistics, without the data.</p>
{_table(report)}
{"".join(body)}
<script type="application/json" id="plots">{data}</script>
<script>{get_plotlyjs().replace("</script", "<" + chr(92) + "/script")}</script>
<script>{_SCRIPT}</script>
</body></html>
"""


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
    parser.add_argument("-o", "--output", required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        with Client(options.server) as client:
            write(options.output, client, options.model,
                  revision=options.revision, specs=options.spec or SPECS,
                  patterns=options.include)
    except errors.QuantdError as error:
        print(f"quantd.report: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"quantd.report: {error} (on Debian python3-plotly)",
              file=sys.stderr)
        return 1
    except OSError as error:
        print(f"quantd.report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
