"""Runs what client/*/README.md tells users of other languages to paste.

  languages_test.py --quantd BINARY --language go|java|node
                    [--node FOLDER]

FOLDER of --node has node_modules with the npm packages. Exits with 77,
skipped, where a language or its gRPC is not installed. Takes no network.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile

import live_server

ADDRESS = "127.0.0.1:8430"
# The step of int8 for magnitudes up to 1, halved: 1 / 254.
EXPECTED = "64 scales, largest error 0.0039\n"
NEEDED = {
    "go": ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc",
           "/usr/share/gocode/src/google.golang.org/grpc"),
    "java": ("javac", "java", "protoc", "grpc_java_plugin",
             "/usr/share/java/grpc-netty.jar"),
    "node": ("node",),
}

arguments = argparse.ArgumentParser()
arguments.add_argument("--quantd", required=True)
arguments.add_argument("--language", required=True, choices=sorted(NEEDED))
arguments.add_argument("--node")
options = arguments.parse_args()

needed = NEEDED[options.language]
if options.language == "node":
    needed += (os.path.join(options.node, "node_modules/@grpc/grpc-js"),)
for name in needed:
    if not (os.path.exists(name) if "/" in name else shutil.which(name)):
        print(f"skipped: {name} is not installed")
        sys.exit(77)


def bash(script, folder, **environment):
    """Runs it and returns what it prints."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, check=True,
        env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True,
        timeout=500).stdout


def block(text, language):
    """The one fenced block of that language."""
    found, = re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    return found


def commands(text):
    """What it says to run, in inline code that may be cut by a line's end."""
    return [re.sub(r"\s+", " ", one) for one in re.findall(r"`([^`]+)`", text)]


with open(os.path.join(live_server.ROOT, "client", options.language,
                       "README.md"), encoding="utf-8") as file:
    page = file.read()
inline = commands(re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S))
with tempfile.TemporaryDirectory() as folder, \
        live_server.LiveServer(options.quantd) as server:
    os.symlink(live_server.PROTO_DIR, os.path.join(folder, "proto"))

    def save(name, program):
        """Writes the program, for the server that is tested."""
        assert name in inline, name
        assert program.count(ADDRESS) == 1
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(program.replace(ADDRESS, server.address))

    def said(beginning):
        """The command of the page that begins so."""
        one, = [text for text in inline if text.startswith(beginning)]
        return one

    if options.language == "node":
        # In place of npm install.
        os.symlink(os.path.join(os.path.abspath(options.node), "node_modules"),
                   os.path.join(folder, "node_modules"))
        save("quantize.mjs", block(page, "js"))
        output = bash(said("node "), folder)
    elif options.language == "go":
        bash(block(page, "bash"), folder)
        save("quantize.go", block(page, "go"))
        output = bash(said("GO111MODULE="), folder)
    else:
        # These programs end before the second compiler has paid for itself.
        output = bash("\n".join((
            block(page, "bash"),
            f"cat > java/Quantize.java << 'E'\n"
            f"{block(page, 'java').replace(ADDRESS, server.address)}E",
            said("javac "), said("java Quantize"))), folder,
            JAVA_TOOL_OPTIONS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    if output != EXPECTED:
        sys.exit(f"expected {EXPECTED!r}, got {output!r}")
print(output, end="")
