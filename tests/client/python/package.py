"""Makes client/python importable as `quantd` without touching the checkout, and
a live server to try it on. Exits with 77, skipped, without grpcio or numpy."""

import atexit
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

# Processes that a test starts share its copy.
_folder = os.environ.get("QUANTD_TEST_PACKAGE")
if _folder is None:
    _folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, _folder)
    shutil.copytree(os.path.join(PACKAGE, "src/quantd"),
                    os.path.join(_folder, "quantd"),
                    ignore=shutil.ignore_patterns("v1", "__pycache__"))
    subprocess.run([sys.executable, os.path.join(PACKAGE, "generate"), _folder],
                   check=True)
    os.environ["QUANTD_TEST_PACKAGE"] = _folder
FOLDER = _folder
sys.path.insert(0, _folder)
