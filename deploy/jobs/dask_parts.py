#!/usr/bin/python3
"""Quantizes a model in parts on the workers of Dask, and joins them:

  dask_parts.py SRC DST SPEC [--server ADDRESS] [--scheduler ADDRESS] [--parts N]

SPEC as of quantctl, several of them in one argument with spaces between. Without
a scheduler, four workers on this machine. Workers need quantctl, in the wheel of
quantd or in PATH.
"""

import argparse

from dask.distributed import Client, LocalCluster

import quantd


def quantize(part: int, count: int, source: str, target: str,
             specs: list[str], server: str) -> int:
    """On a worker; says how many tensors are done."""
    with quantd.Client(server) as client:
        return len(quantd.quantize_model(source, target, specs, client=client,
                                         part=(part, count)).tensors)


def main() -> None:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("source", "target", "specs"):
        parser.add_argument(name)
    parser.add_argument("--server", default="127.0.0.1:8430")
    parser.add_argument("--scheduler")
    parser.add_argument("--parts", type=int, default=8)
    options = parser.parse_args()
    specs = options.specs.split()
    cluster = options.scheduler or LocalCluster(
        n_workers=4, threads_per_worker=1, dashboard_address=None)
    with Client(cluster) as dask:
        done = dask.gather(dask.map(
            quantize, range(options.parts), count=options.parts,
            source=options.source, target=options.target, specs=specs,
            server=options.server, retries=2, pure=False))
    model = quantd.join_model(options.source, options.target, specs)
    print(f"{sum(done)} tensors in {options.parts} parts, "
          f"{model.file_bytes} bytes in {model.path}")


if __name__ == "__main__":
    main()
