"""Makes client/python importable as `quantd` without touching the checkout, and
a live server to try it on. Exits with 77, skipped, without grpcio or numpy.

  package.py FOLDER    compiles a copy of it into an empty folder
"""

import atexit
import compileall
import os
import shutil
import subprocess
import sys
import tempfile

try:
    import grpc  # pylint: disable=unused-import
    import numpy  # pylint: disable=unused-import
    from google import protobuf  # pylint: disable=unused-import
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "../../.."))
PACKAGE = os.path.join(ROOT, "client/python")

sys.path.insert(0, os.path.join(ROOT, "tests/e2e/python"))


def make(folder):
    """Copies the package there, and generates its stubs."""
    shutil.copytree(os.path.join(PACKAGE, "src/quantd"),
                    os.path.join(folder, "quantd"),
                    ignore=shutil.ignore_patterns("v1", "__pycache__"))
    subprocess.run([sys.executable, os.path.join(PACKAGE, "generate"), folder],
                   check=True)


if __name__ == "__main__":
    make(sys.argv[1])
    sys.exit(not compileall.compile_dir(sys.argv[1], quiet=1))

# All tests of a run, and the processes that they start, share a copy.
FOLDER = os.environ.get("QUANTD_TEST_PACKAGE")
if FOLDER is None:
    FOLDER = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, FOLDER)
    make(FOLDER)
    os.environ["QUANTD_TEST_PACKAGE"] = FOLDER
sys.path.insert(0, FOLDER)
