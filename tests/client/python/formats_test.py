"""Which formats have a way out to files that other programs read: the table in
client/cli/README.md says what quantctl does."""

import os
import re

import numpy as np
import pytest

import package
import quantd
from quantd.tensor import FORMATS, format_info

README = os.path.join(package.ROOT, "client/cli/README.md")
TABLE = "## Formats that other programs read"
COLUMNS = ("compressed-tensors", "GGUF", "ONNX", "AIMET")
# What an encoding can be in besides its default.
GRANULARITIES = ("", ":per-channel", ":group:32:scale=float16")
REALS = np.random.default_rng(0).standard_normal((64, 256), np.float32)


def specs_of(name):
    """In all granularities that are to be tried."""
    if name.startswith("codebook"):
        entries = np.linspace(-1, 1, 1 << format_info(name).bits)
        return [f"{name}:entries={','.join(map(str, entries))}"]
    blocks = format_info(name).comes_in_blocks
    return [name + rest for rest in (GRANULARITIES[:1] if blocks else
                                     GRANULARITIES)]


def message(*fields):
    """Protobuf, of numbers of fields and their values."""
    def varint(value):
        more = value >> 7
        return bytes([value & 127 | (128 if more else 0)]) + (
            varint(more) if more else b"")

    found = b""
    for number, value in fields:
        if isinstance(value, int):
            found += varint(number << 3) + varint(value)
        else:
            value = value.encode() if isinstance(value, str) else value
            found += varint(number << 3 | 2) + varint(len(value)) + value
    return found


def onnx_model(names):
    """x times a weight of each name."""
    def value(name, columns):
        shape = message((1, message((1, 8))), (1, message((1, columns))))
        return message((1, name), (2, message((1, message((1, 1),
                                                          (2, shape))))))

    graph = [(2, "formats"), (11, value("x", 64))]
    for name in names:
        graph += [(1, message((1, "x"), (1, name), (2, name + ".y"),
                              (4, "MatMul"))),
                  (5, message((1, 64), (1, 256), (2, 1), (8, name),
                              (9, REALS.tobytes()))),
                  (12, value(name + ".y", 256))]
    return message((1, 8), (7, message(*graph)), (8, message((2, 17))))


@pytest.fixture(name="ways", scope="module")
def fixture_ways(quantctl, client, tmp_path_factory):
    """The columns of each format."""
    folder = tmp_path_factory.mktemp("formats")
    ways = {name: set() for name in FORMATS}
    plain = folder / "plain.safetensors"
    quantd.save(plain, {name + ".weight": REALS for name in ways})
    one = folder / "one.safetensors"
    quantd.save(one, {"a.weight": REALS})
    onnx = folder / "model.onnx"
    onnx.write_bytes(onnx_model([name + ".weight" for name in ways]))
    for i in range(len(GRANULARITIES)):
        specs = {name: specs_of(name)[i] for name in ways
                 if i < len(specs_of(name))}
        model = f"formats/{i}"
        for name, spec in specs.items():
            client.calibrate(REALS, quantd.TensorName(model, name + ".weight"),
                             quantd.EncodingSpec.parse(spec))
        done = quantctl("quantize", plain, "-o", folder / f"compressed{i}",
                        "--layout", "compressed-tensors", "--keep-going",
                        "--no-store", "--json", *(
                            word for name, spec in specs.items()
                            for word in ("--spec", f"{name}.weight={spec}")),
                        code=1)
        for tensor in done["tensors"]:
            if tensor["result"] == "quantized":
                ways[tensor["name"][:-len(".weight")]].add(COLUMNS[0])
        for name, spec in specs.items():
            try:
                quantctl("quantize", one, "-o", folder / "one.gguf", "--force",
                         "--no-store", "--spec", spec)
            except AssertionError:
                continue
            ways[name].add(COLUMNS[1])
        for column, flags in (
                (COLUMNS[2], ("--onnx", onnx, "-o", folder / f"{i}.onnx")),
                (COLUMNS[3], ("--format", "aimet-2.1.0", "-o",
                              folder / f"{i}.encodings"))):
            done = quantctl("export", "--model", model, *flags, "--json",
                            code=1)
            lost = {loss["tensor"] for loss in done["losses"]
                    if loss["left_out"]}
            for name in specs:
                if name + ".weight" not in lost:
                    ways[name].add(column)
    return ways


def rows_of(text):
    """The cells of the tables in a part of a README, without their heads."""
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in text.splitlines()
            if line.startswith("| `")]


def test_TheTableSaysWhoReadsAFormat(ways):
    with open(README, encoding="utf-8") as file:
        part = re.search(f"^{TABLE}\n(.*?)(?=^## |\\Z)", file.read(),
                         re.M | re.S).group(1)
    told = {}
    for names, *cells in rows_of(part):
        for name in re.findall("`([a-z0-9_]+)`", names):
            assert name not in told, name
            told[name] = ({column for column, cell in zip(COLUMNS, cells)
                           if cell == "yes"} if len(cells) > 1 else set())
    lines = {}
    for name, columns in ways.items():
        lines.setdefault(tuple("yes" if column in columns else ""
                               for column in COLUMNS), []).append(f"`{name}`")
    found = "\n".join(f"| {', '.join(names)} | {' | '.join(cells)} |"
                      for cells, names in lines.items())
    assert told == ways, found


def test_EveryOtherFormatSaysWhyItStays(ways):
    with open(README, encoding="utf-8") as file:
        part = re.search(f"^{TABLE}\n(.*?)(?=^## |\\Z)", file.read(),
                         re.M | re.S).group(1)
    reasons = {}
    for cells in rows_of(part):
        if len(cells) == 2:
            for name in re.findall("`([a-z0-9_]+)`", cells[0]):
                reasons[name] = cells[1]
    assert reasons.keys() == {name for name, columns in ways.items()
                              if not columns}
    assert all(len(reason.split()) > 3 for reason in reasons.values())
