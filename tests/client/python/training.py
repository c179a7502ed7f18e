#!/usr/bin/python3
"""One rank of training the digits network, with the hook on it.

  training.py --server ADDRESS --model NAME --rank N --ranks N --folder FOLDER
    [--epochs N]

Goes on from the weights of tests/data/digits-cnn with its 256 training images
and noise on them; labels are what those weights say. Ranks average their
gradients. The first one leaves FOLDER/weights.pt.
"""

import argparse
import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, HERE)

# pylint: disable=wrong-import-position
import package
import torch

import quantd
import quantd.torch

sys.path.insert(0, os.path.join(package.ROOT, "deploy/examples"))
import digits

DATA = os.path.join(package.ROOT, "tests/data/digits-cnn")
BATCH = 16


class Digits(torch.nn.Module):
    """The network of deploy/examples/digits.py."""

    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = torch.nn.Linear(1024, 128)
        self.fc2 = torch.nn.Linear(128, 10)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu_(self.conv2(x))
        x = torch.nn.functional.max_pool2d(x, 2).flatten(1)
        return self.fc2(torch.relu_(self.fc1(x)))


def load(name):
    """{name: tensor} of a file of the data."""
    return {key: torch.from_numpy(array.copy()) for key, array in
            digits.load_safetensors(os.path.join(DATA, name)).items()}


def pretrained():
    model = Digits()
    model.load_state_dict(load("model.safetensors"))
    return model


def main():
    parser = argparse.ArgumentParser()
    for name in ("server", "model", "folder"):
        parser.add_argument(f"--{name}", required=True)
    for name, value in (("rank", 0), ("ranks", 1), ("epochs", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.rank)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{options.folder}/ranks",
        rank=options.rank, world_size=options.ranks)
    images = load("activations.safetensors")["conv1.input"]
    with torch.no_grad():
        labels = pretrained()(images).argmax(1)
    images = images[options.rank::options.ranks]
    labels = labels[options.rank::options.ranks]
    model = torch.nn.parallel.DistributedDataParallel(pretrained())
    optimizer = torch.optim.SGD(model.parameters(), 0.002, momentum=0.9)
    with quantd.Client(options.server) as client, quantd.torch.calibrate(
            model, client, model_name=options.model,
            source=f"rank-{options.rank}", start=0):
        for _ in range(options.epochs):
            for batch in torch.randperm(len(images)).split(BATCH):
                x = images[batch]
                x = (x + 0.05 * torch.randn_like(x)).clamp(0, 1)
                loss = torch.nn.functional.cross_entropy(model(x),
                                                         labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    if options.rank == 0:
        torch.save(model.module.state_dict(),
                   os.path.join(options.folder, "weights.pt"))


if __name__ == "__main__":
    main()
