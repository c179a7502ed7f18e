#!/usr/bin/python3
"""Runs the digits network with the weights of safetensors files, in numpy.

  digits.py --test TEST.safetensors LABEL=WEIGHTS.safetensors...

Prints the share of test images that each set of weights classifies rightly.
The set labelled float32 is also held against the logits that come with the
test images. Architecture (also in the model's __metadata__): conv1 3x3 pad 1
(1 to 32), relu, conv2 3x3 pad 1 (32 to 64), relu, maxpool 2, flatten, fc1 (1024
to 128), relu, fc2 (128 to 10).
"""

import argparse
import json
import sys

import numpy as np

DTYPES = {"F32": np.float32, "I64": np.int64}
# Float32 sums in another order than the one the logits were made with.
LOGIT_TOLERANCE = 1e-3


def load_safetensors(path):
    """Returns {name: array} of a safetensors file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        tensors[name] = np.frombuffer(
            data[begin:end], DTYPES[info["dtype"]]).reshape(info["shape"])
    return tensors


def conv3x3(x, weight, bias):
    """[n,in,h,w] * [out,in,3,3] + [out] to [n,out,h,w], padded with zeros."""
    height, width = x.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(
        padded, (3, 3), axis=(2, 3))
    # One matrix product: [n*h*w, in*9] by [in*9, out].
    columns = windows.transpose(0, 2, 3, 1, 4, 5).reshape(
        len(x) * height * width, -1)
    out = columns @ weight.reshape(len(weight), -1).T + bias
    return out.reshape(len(x), height, width, -1).transpose(0, 3, 1, 2)


def max_pool_2(x):
    n, channels, height, width = x.shape
    return x.reshape(n, channels, height // 2, 2, width // 2, 2).max((3, 5))


def logits_of(weights, images):
    """[n,1,8,8] to [n,10]."""
    def layer(name):
        return weights[name + ".weight"], weights[name + ".bias"]

    def dense(x, name):
        weight, bias = layer(name)
        return x @ weight.T + bias

    x = np.maximum(conv3x3(images, *layer("conv1")), 0)
    x = np.maximum(conv3x3(x, *layer("conv2")), 0)
    x = max_pool_2(x).reshape(len(images), -1)
    x = np.maximum(dense(x, "fc1"), 0)
    return dense(x, "fc2")


def count_right(weights, test):
    """How many of the test images the weights classify rightly."""
    logits = logits_of(weights, test["images"])
    return int((logits.argmax(1) == test["labels"]).sum())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--test", required=True, metavar="FILE")
    parser.add_argument("weights", nargs="+", metavar="LABEL=FILE")
    options = parser.parse_args()

    test = load_safetensors(options.test)
    for argument in options.weights:
        label, path = argument.split("=", 1)
        logits = logits_of(load_safetensors(path), test["images"])
        right = int((logits.argmax(1) == test["labels"]).sum())
        count = len(test["labels"])
        print(f"{label:<24} {right / count:7.1%}   ({right} of {count})")
        if label == "float32":
            difference = np.abs(logits - test["logits_fp32"]).max()
            if difference > LOGIT_TOLERANCE:
                sys.exit(f"float32 logits are off by {difference}")


if __name__ == "__main__":
    main()
