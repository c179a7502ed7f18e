"""Builds the Go client of tests/e2e/go and lets it call a live quantd.

  go_client_test.py --quantd BINARY

gRPC for Go comes as source and takes a while to compile; Go's cache keeps it for
the next time. Exits with 77, skipped, without Go, its generators or gRPC. Takes
no network.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile

import live_server

# Where Debian keeps the sources of libraries.
GOCODE = "/usr/share/gocode"
SOURCE = os.path.join(live_server.ROOT, "tests/e2e/go")

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
options = arguments.parse_args()

for program in ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"):
    if not shutil.which(program):
        print(f"skipped: {program} is not installed")
        sys.exit(77)
if not os.path.isdir(os.path.join(GOCODE, "src/google.golang.org/grpc")):
    print("skipped: gRPC for Go is not installed")
    sys.exit(77)

with tempfile.TemporaryDirectory() as folder:
    source = os.path.join(folder, "src/quantd_client")
    shutil.copytree(SOURCE, source)
    protos = sorted(
        "quantd/v1/" + name
        for name in os.listdir(os.path.join(live_server.PROTO_DIR, "quantd/v1"))
        if name.endswith(".proto"))
    subprocess.run(
        ["protoc", f"--proto_path={live_server.PROTO_DIR}",
         f"--go_out={folder}/src", f"--go-grpc_out={folder}/src", *protos],
        check=True)
    environment = {
        **os.environ, "GO111MODULE": "off", "GOPATH": f"{folder}:{GOCODE}"}
    client = os.path.join(folder, "client")
    # Separately, so that no deadline of a call runs while it compiles.
    subprocess.run(["go", "test", "-c", "-vet=off", "-o", client, "."], cwd=source,
                   env=environment, check=True)
    with live_server.LiveServer(options.quantd) as server:
        subprocess.run(
            [client, "-test.v"], check=True,
            env={**environment, "QUANTD_ADDRESS": server.address})
