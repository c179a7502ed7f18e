"""The report of a model, with a live quantd: its figures, and that headless
Chromium draws every plot of it without a network."""

import os
import re
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("plotly")

# pylint: disable=wrong-import-position
import numpy as np

import package
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
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120,
        check=True).stdout.decode()


# Marks what was drawn, how far anything sticks out, how many different signs
# each legend has, and which tensor comes first once they are sorted by name.
MEASURE = """
window.addEventListener("load", () => setTimeout(() => {
  const plots = [...document.querySelectorAll(".js-plotly-plot")];
  const traces = plots.map(
    p => p.querySelectorAll(".trace, .traces, .point").length);
  const labels = [...document.querySelectorAll(
    ".plot text, .plot .main-svg")].map(
    t => t.getBoundingClientRect()).filter(r => r.width);
  const table = [...document.querySelectorAll("table")].pop();
  table.querySelector("th button").click();
  const legends = [...document.querySelectorAll(".legend")];
  const root = document.documentElement.getBoundingClientRect();
  document.title = JSON.stringify({
    plots: plots.length, empty: traces.filter(n => !n).length,
    outside: labels.filter(
      r => r.left < root.left - 1 || r.right > root.right + 1).length,
    signs: legends.map(l => new Set(
      [...l.querySelectorAll("svg")].map(s => s.outerHTML)).size),
    first: table.querySelector("td").textContent});
}, 3000));
"""


@pytest.mark.skipif(CHROMIUM is None, reason="without Chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_EveryPlotIsDrawnWithinThePage(page, tmp_path, width):
    dom = browse(page, tmp_path, MEASURE,
                 f"html {{ width: {width}px; }}")
    title = re.search(r"<title>(.*?)</title>", dom).group(1)
    # SQNR, sensitivity, size, two of ranges, and a histogram of each tensor.
    # nf4 fails where there are no groups, so that it has no size in all.
    assert title == ('{"plots":13,"empty":0,"outside":0,"signs":[9,8,9],'
                     '"first":"conv1.input"}')
    for name in ("conv1.weight", "fc2.input"):
        assert f"<h3>{name}</h3>" in dom
    for kind in ("weights", "activations"):
        assert f"<h2>Ranges of {kind}</h2>" in dom
    assert "<h2>Ranges of others</h2>" not in dom
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
    assert '"plots":6' in re.search(r"<title>(.*?)</title>", dom).group(1)
    assert 'a &lt;b&gt;&amp;amp;"odd&lt;/b&gt; name&lt;/script&gt;' in dom


def test_ThePageHasEverythingInIt(client, page):
    text = page.read_text(encoding="utf-8")
    # What plotly.js itself could load are maps, which are not used.
    head = text.split("plotly.js v", 1)[0]
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", head)
    assert os.listdir(page.parent) == ["report.html"]
    with pytest.raises(quantd.QuantdError):
        report.write(str(page.parent / "none.html"), client, "nothing")
    assert os.listdir(page.parent) == ["report.html"]


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


def test_ClipsAreWhereTheEncodingsEnd(client):
    data = report.collect(client, MODEL, specs=SPECS, patterns=["fc2.*"])
    assert [tensor.name for tensor in data.tensors] == ["fc2.input",
                                                        "fc2.weight"]
    activations = data.tensors[0]
    most = activations.statistics.max
    np.testing.assert_allclose(activations.clips[0], [-most, most], rtol=1e-6)
    low, high = activations.clips[3]
    assert abs(low) < 0.1 and activations.low < high < most
    assert data.tensors[1].scale_counts[4] > 1
    sizes = [mixture.size_bytes for mixture in data.mixtures]
    assert sizes == sorted(sizes) and len(sizes) > 3


def test_MixturesEndAtTheLeastNoise(client):
    data = report.collect(client, MODEL)
    least = min(total.noise_to_signal_sum for total in data.totals
                if not total.failed_count)
    assert data.mixtures[-1].noise_to_signal_sum < least


def test_TheCommandSaysWhatIsWrong(server, tmp_path, capsys):
    path = tmp_path / "out.html"
    arguments = ["--server", server.address, "-o", str(path), "--model"]
    assert report.main([*arguments, MODEL, "--spec", "int8"]) == 0
    assert path.stat().st_size > 1 << 20
    assert report.main([*arguments, "nothing"]) == 1
    assert "STATISTICS_NOT_FOUND" in capsys.readouterr().err
