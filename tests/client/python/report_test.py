"""The report of a model, with a live quantd: its figures, and that headless
Chromium draws every plot of it without a network."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest

# pylint: disable=wrong-import-position
import numpy as np

import package
import live_server
import quantd
from quantd import report

sys.path.insert(0, os.path.join(package.ROOT, "deploy/examples"))
import digits

DATA = os.path.join(package.ROOT, "tests/data/digits-cnn")
MODEL = "digits/report"
# More than there are colors.
SPECS = ("int8", "int8:mse", "int4:mse", "uint4:percentile=0.999", "nf4",
         "int3", "int5", "int6", "int7")
ODD_NAME = 'a <b>&amp;"odd</b> name</script><!-- of more than is shown'
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module", autouse=True)
def model(client):
    """Statistics of the digits network: weights by group, activations."""
    for name, granularity in (("model", quantd.group(16)),
                              ("activations", None)):
        tensors = digits.load_safetensors(
            os.path.join(DATA, name + ".safetensors"))
        list(client.calibrate_many(
            [(key, array) for key, array in tensors.items()
             if not key.endswith("bias")], model=MODEL,
            contribution=quantd.Contribution("file", 1, granularity)))
    return MODEL


@pytest.fixture(scope="module")
def page(client, model, tmp_path_factory):  # pylint: disable=unused-argument
    """The file of its report, alone in a folder."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.write(str(path), client, MODEL, specs=SPECS)
    return path


def browse(path, folder, script="", style=""):
    """The page as it is once everything has run. `script` runs at its end."""
    with open(path, encoding="utf-8") as file:
        page = file.read()
    page = page.replace("</head>", f"<style>{style}</style></head>", 1)
    body, end = page.rsplit("</body>", 1)
    copy = os.path.join(folder, "copy.html")
    with open(copy, "w", encoding="utf-8") as file:
        file.write(f"{body}<script>{script}</script></body>{end}")
    return subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
         "--disable-background-networking", "--disable-dev-shm-usage",
         "--host-resolver-rules=MAP * ~NOTFOUND",
         f"--user-data-dir={folder}/chromium", "--window-size=1280,3000",
         "--virtual-time-budget=20000", "--dump-dom", f"file://{copy}"],
        env={**os.environ, "TMPDIR": str(folder), "HOME": str(folder)},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        timeout=live_server.PATIENCE_S, check=True).stdout.decode()


# Marks what was drawn, how far anything sticks out, how many different signs
# each legend has, and which tensor comes first once they are sorted by name.
MEASURE = """
window.addEventListener("load", () => setTimeout(() => {
  const plots = [...document.querySelectorAll(".plot")];
  const marks = plots.map(p => p.querySelectorAll(".mark").length);
  const labels = [...document.querySelectorAll(".plot text, .plot svg")].map(
    t => t.getBoundingClientRect()).filter(r => r.width);
  const table = [...document.querySelectorAll("table")].pop();
  table.querySelector("th button").click();
  const legends = [...document.querySelectorAll(".legend")];
  const root = document.documentElement.getBoundingClientRect();
  document.title = JSON.stringify({
    plots: plots.length, empty: marks.filter(n => !n).length,
    outside: labels.filter(
      r => r.left < root.left - 1 || r.right > root.right + 1).length,
    signs: legends.map(l => new Set(
      [...l.querySelectorAll("svg")].map(s => s.outerHTML)).size),
    first: table.querySelector("td").textContent});
}, 1000));
"""


def title_of(dom):
    """What a script left there."""
    return html.unescape(re.search(r"<title>(.*?)</title>", dom).group(1))


@pytest.mark.skipif(CHROMIUM is None, reason="without Chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_EveryPlotIsDrawnWithinThePage(page, tmp_path, width):
    dom = browse(page, tmp_path, MEASURE,
                 f"html {{ width: {width}px; }}")
    # Size, layers, SQNR, sensitivity, two of ranges, and a histogram of each
    # tensor.
    # The sizes are those of weights, which every candidate can have.
    assert title_of(dom) == (
        '{"plots":14,"empty":0,"outside":0,"signs":[9,9],'
        '"first":"conv1.input"}')
    for name in ("conv1.weight", "fc2.input"):
        assert f"<h3>{name}</h3>" in dom
    for kind in ("weights", "activations"):
        assert f">Ranges of {kind}</h2>" in dom
    assert ">Ranges of others</h2>" not in dom
    for spec in SPECS:
        assert spec in dom


@pytest.mark.skipif(CHROMIUM is None, reason="without Chromium")
def test_NamesAreTextAndNothingElse(client, tmp_path):
    path = tmp_path / "report.html"
    x = np.zeros((4, 4), np.float32)
    for name, array in ((ODD_NAME, x + 1), ("zero", x)):
        client.calibrate(array, quantd.TensorName("odd", name),
                         contribution=quantd.Contribution("a", 1))
    report.write(str(path), client, "odd", specs=["int8", "nf4"])
    dom = browse(path, tmp_path, MEASURE)
    assert '"plots":7,"empty":0' in title_of(dom)
    assert 'a &lt;b&gt;&amp;amp;"odd&lt;/b&gt; name&lt;/script&gt;' in dom


def test_ThePageHasEverythingInIt(client, page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://(?!www.w3.org/"
                         r"2000/svg)", text)
    assert len(text) < 200_000
    assert os.listdir(page.parent) == ["report.html"]
    with pytest.raises(quantd.QuantdError):
        report.write(str(page.parent / "none.html"), client, "nothing")
    with pytest.raises(quantd.QuantdError, match="cnov"):
        report.write(str(page.parent / "none.html"), client, MODEL,
                     patterns=["conv*", "cnov*"])
    assert os.listdir(page.parent) == ["report.html"]


def test_NoFileIsReplacedUnasked(client, tmp_path):
    path = tmp_path / "notes.html"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(FileExistsError):
        report.write(str(path), client, MODEL)
    # Nor one that comes while the report is made.
    other = tmp_path / "other.html"
    with mock.patch.object(report, "render", side_effect=lambda made: (
            other.write_text("mine", encoding="utf-8") and "page")):
        with pytest.raises(FileExistsError):
            report.write(str(other), client, MODEL)
    for kept in (path, other):
        assert kept.read_text(encoding="utf-8") == "mine"
    report.write(str(path), client, MODEL, overwrite=True)
    assert path.stat().st_size > 20000
    # On a file system without links.
    with mock.patch.object(os, "link", side_effect=PermissionError):
        with pytest.raises(FileExistsError):
            with mock.patch.object(os.path, "lexists", return_value=False):
                report.write(str(other), client, MODEL)
        assert other.read_text(encoding="utf-8") == "mine"
        other.unlink()
        report.write(str(other), client, MODEL)
    assert other.stat().st_size == path.stat().st_size
    assert sorted(os.listdir(tmp_path)) == ["notes.html", "other.html"]


@pytest.mark.skipif(CHROMIUM is None, reason="without Chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_AModelOfRealShapeIsReadable(client, tmp_path, width):
    """280 weights with names of layers; their labels keep what differs."""
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
             "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
             "mlp.down_proj"]
    rng = np.random.default_rng(1)
    names = [f"model.layers.{n}.{part}.weight" for n in range(40)
             for part in parts]
    if width == 1280:
        list(client.calibrate_many(
            [(name, rng.standard_normal((8, 32)).astype(np.float32))
             for name in names], model="big/net",
            contribution=quantd.Contribution("file", 1, quantd.group(16))))
    calls = []
    method = quantd.Client._read  # pylint: disable=protected-access
    with mock.patch.object(
            quantd.Client, "_read", autospec=True,
            side_effect=lambda self, call, request: calls.append(
                type(request).__name__) or method(self, call, request)):
        report.write(str(tmp_path / "report.html"), client, "big/net",
                     specs=["int8:per-channel", "int4:group:16"])
    # Once, whatever the number of specs.
    assert calls == ["SweepRequest"]
    dom = browse(tmp_path / "report.html", tmp_path, """
window.addEventListener("load", () => setTimeout(() => {
  const plots = [...document.querySelectorAll(".plot")];
  const labels = [...plots[2].querySelectorAll(".name")];
  const tips = [...plots[1].querySelectorAll(".mark[data-tip]")];
  const left = Math.min(...labels.map(
    label => label.getBoundingClientRect().left));
  document.title = JSON.stringify({labels: labels.map(
    label => [label.dataset.tip, label.textContent]), left,
    tips: tips.map(tip => tip.dataset.tip.split("\\n")[0]),
    modules: [...plots[1].querySelectorAll(".name")].map(
      name => name.dataset.tip),
    height: document.documentElement.scrollHeight,
    line: document.querySelector("polyline").getAttribute("points").split(
      " ").length});
}, 1000));
""", f"html {{ width: {width}px; }}")
    found = json.loads(title_of(dom))
    # A cell for each tensor, a row for each module.
    assert sorted(found["tips"]) == sorted(names)
    assert len(found["modules"]) == 7
    assert found["height"] < 16000
    # The worst, below one another.
    labels = [label for _, label in found["labels"]]
    assert len(set(labels)) == 40
    for name, label in found["labels"]:
        layer, _, part = name.split(".")[2:5]
        assert f"{layer}." in label and f".{part[:2]}" in label
    assert found["left"] >= 0
    # From all in the smaller one to all in the larger, tensor by tensor.
    assert found["line"] == 281


@pytest.mark.skipif(CHROMIUM is None, reason="without Chromium")
def test_LabelsAreShortAndEachIsAnother(page, tmp_path):
    dom = browse(page, tmp_path, """
const prefix = "transformer.h.0.";
const lists = [
  ["a.weight", "b.weight"],
  ["model.layers.0.self_attn.q_proj.weight",
   "model.layers.10.self_attn.q_proj.weight", "lm_head.weight"],
  ["x".repeat(50) + "1" + "y".repeat(50),
   "x".repeat(50) + "2" + "y".repeat(50)],
  [prefix + "a".repeat(60)], ["", "..", "a".repeat(40) + "."],
  Array.from({length: 50}, (_, i) => "z".repeat(30) + String(i) + "." +
    "w".repeat(30))];
document.title = JSON.stringify(lists.map(list => shortNames(list, 19)));
""")
    lists = json.loads(title_of(dom))
    assert lists[0] == ["a.weight", "b.weight"]
    assert [label.split(".", 2)[2] for label in lists[1][:2]] == [
        "0.self.q_proj…", "10.self.q_proj…"]
    for labels in lists:
        assert len(set(labels)) == len(labels)
        assert max(map(len, labels)) <= 19


@pytest.mark.skipif(CHROMIUM is None, reason="without Chromium")
def test_OnlyWhatIsStoredHasASize(client, tmp_path):
    for n in (1, 2):
        list(client.calibrate_many(
            [("conv1.input", np.ones((2, 8), np.float32)),
             ("logits", np.arange(16, dtype=np.float32))],
            model="flows", contribution=quantd.Contribution("rank-0", n)))
    report.write(str(tmp_path / "flows.html"), client, "flows")
    dom = browse(tmp_path / "flows.html", tmp_path)
    heads = re.findall(r'<button type="button">(.*?)</button>', dom)
    assert heads[:2] == ["candidate", "SQNR, dB"]
    assert ">Size against quality</h2>" not in dom


def test_HistogramsAndQuantilesAreThoseOfTheData(client):
    x = np.concatenate([np.random.default_rng(1).standard_normal(50000),
                        np.zeros(500), [-9, 12]]).astype(np.float32)
    name = quantd.TensorName("acme/histogram", "x")
    client.calibrate(x, name, contribution=quantd.Contribution("a", 1))
    state = client.get_statistics(name, with_state=True).state
    edges, counts = report.histogram(state, 40)
    assert (edges[0], edges[-1]) == (-9, 12)
    want = np.histogram(x, edges)[0]
    assert abs(counts.sum() - x.size) < 1e-6
    assert np.abs(counts - want).max() < 0.02 * x.size
    for fraction in (0.0005, 0.1, 0.9995):
        assert abs(report.quantile(state, fraction) - np.quantile(
            x, fraction)) < 0.02


def test_CollectsWhatTheServiceKnows(client):
    data = report.collect(client, MODEL, specs=SPECS, patterns=["fc2.*"])
    assert [tensor.name for tensor in data.tensors] == ["fc2.input",
                                                        "fc2.weight"]
    assert data.tensors[1].size_bytes[0] == 1284
    assert (data.server, data.revision) == (client.target, "main")


def test_TheCommandSaysWhatIsWrong(server, tmp_path, capsys):
    path = tmp_path / "out.html"
    arguments = ["--server", server.address, "-o", str(path), "--model"]
    assert report.main([*arguments, MODEL, "--spec", "int8"]) == 0
    assert path.stat().st_size > 20000
    assert report.main([*arguments, MODEL, "--spec", "int8"]) == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert report.main([*arguments, MODEL, "--spec", "int8", "--force"]) == 0
    path.unlink()
    assert report.main([*arguments, "nothing"]) == 1
    assert "STATISTICS_NOT_FOUND" in capsys.readouterr().err
