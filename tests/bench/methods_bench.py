#!/usr/bin/python3
"""What each way to choose scales and codes costs the language model of
tests/data/char-lm: bits per byte above those of float32.

  methods_bench.py --build DIR [--sequences N] [--calibration N]
      [--format SPEC ...] [--symmetry WORD] [--minutes N] [--json FILE]

All through a live service: the inputs of the layers are contributed from
--calibration sequences (there are 192), the weights of all layers but the
embedding are quantized and dequantized, and the model runs in numpy on
--sequences others (there are 128). A row is a format, a column a method:

  minmax, mse        scales from the weight alone
  importance         mse, with errors weighed by the inputs' mean squares
  compensated        each with ROUNDING_METHOD_COMPENSATED (GPTQ)

After --minutes it stops, and says which cells are missing.
"""

import argparse
import json
import os
import sys
import time

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../.."))
sys.path.insert(0, os.path.join(ROOT, "tests/client/python"))

# pylint: disable=wrong-import-position
import package  # pylint: disable=unused-import
import live_server
import numpy as np
import quantd
import runtime_rules as rules

DATA = os.path.join(ROOT, "tests/data/char-lm")
FORMATS = [f"int{bits}:group:{size}" for bits in (4, 3, 2)
           for size in (32, 128)] + ["nvfp4", "mxfp4_e2m1", "nf4:group:32"]
METHODS = {"minmax": "", "mse": ":mse", "importance": ":mse:importance"}
MODEL = "char-lm"
BATCH = 32


def contribute_inputs(client, weights, sequences):
    """The Gram matrices and moments of what the layers multiply."""
    modules = [name[:-len(".weight")] for name in weights
               if name.endswith("_proj.weight") or name == "head.weight"]
    steps = {}
    for sequence, batch in enumerate(np.array_split(
            sequences, -(-len(sequences) // BATCH)), 1):
        seen = {}

        def keep(module, x, seen=seen):
            seen[module] = x.reshape(-1, x.shape[-1])
            return x

        rules.language_model(weights, batch[:, :-1], keep)
        for module in modules:
            rows = seen[module]
            steps.setdefault(module, quantd.gram_steps(rows))
            client.calibrate(
                rows, quantd.TensorName(MODEL, module + ".input"),
                contribution=quantd.Contribution(
                    "bench", sequence, features=quantd.FeatureStatistics(
                        gram=True, moments=True,
                        step_exponent=steps[module])))
    return modules


def quantized(client, weights, modules, spec, is_compensated):
    """The weights, with those of the modules there and back."""
    found = dict(weights)
    for module in modules:
        name = quantd.TensorName(MODEL, module + ".weight")
        rounding = quantd.Rounding(module + ".input") if is_compensated else (
            None)
        found[name.tensor] = client.dequantize(client.quantize(
            weights[name.tensor], spec, name=name, rounding=rounding))
    return found


def spec_of(text, method, symmetry):
    """The symmetry goes with integers alone."""
    return text + (f":{symmetry}" if symmetry and text.startswith("int")
                   else "") + METHODS[method]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--build", required=True)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--calibration", type=int, default=192)
    parser.add_argument("--format", action="append", dest="formats")
    parser.add_argument("--symmetry", default="")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    weights = rules.read_tensors(DATA + "/model.safetensors")
    sequences = rules.read_tensors(DATA + "/bytes.safetensors")
    validation = sequences["validation"][:arguments.sequences]
    columns = [(method, is_compensated) for is_compensated in (False, True)
               for method in METHODS]
    rows = []
    missing = []

    def bits(of):
        return rules.bits_per_byte(of, validation, lambda _, x: x)

    plain = bits(weights)
    print(f"{len(validation)} sequences, calibrated with "
          f"{min(len(sequences['calibration']), arguments.calibration)}; float32 "
          f"has {plain:.4f} bits per byte")
    print("| | " + " | ".join(
        ("compensated, " if is_compensated else "") + method
        for method, is_compensated in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    server = os.path.join(arguments.build, "server/quantd")
    with live_server.LiveServer(server) as live, quantd.Client(
            live.address) as client:
        modules = contribute_inputs(
            client, weights, sequences["calibration"][:arguments.calibration])
        for text in arguments.formats or FORMATS:
            losses = []
            for method, is_compensated in columns:
                spec = spec_of(text, method, arguments.symmetry)
                if time.monotonic() > end:
                    missing.append(spec)
                    losses.append(None)
                    continue
                losses.append(bits(quantized(client, weights, modules, spec,
                                             is_compensated)) - plain)
            rows.append({"format": text, "losses": losses})
            print(f"| `{text}` | " + " | ".join(
                "" if loss is None else f"{loss:.4f}" for loss in losses)
                  + " |", flush=True)
    if missing:
        print(f"out of time: {len(missing)} cells are empty", file=sys.stderr)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"float32": plain, "columns": columns, "rows": rows},
                      file, indent=1)


if __name__ == "__main__":
    main()
