"""mypy --strict on the package as it is installed, and on code that uses it."""

import os
import re
import shutil
import subprocess

import pytest

import package

MYPY = shutil.which("mypy")


@pytest.mark.skipif(MYPY is None, reason="without mypy")
def test_TypesAreAsStrictAsTheyCanBe(tmp_path):
    # The stubs of protoc are its own business.
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\nstrict = True\n"
        "[mypy-quantd.v1.*]\nignore_errors = True\n"
        "[mypy-google.protobuf.*,grpc.*,tqdm.*,xxhash.*]\n"
        "ignore_missing_imports = True\n"
        # Minutes of other people's code.
        "[mypy-torch.*,numpy.ma.*]\nfollow_imports = skip\n",
        encoding="utf-8")
    blocks = []
    for name in ("README.md", "client/python/README.md"):
        with open(os.path.join(package.ROOT, name), encoding="utf-8") as file:
            blocks += re.findall(r"^```python\n(.*?)^```", file.read(),
                                 re.M | re.S)
    users = []
    for n, block in enumerate(blocks):
        if "import quantd\n" in block or "import quantd." in block:
            users.append(str(tmp_path / f"snippet{n}.py"))
            with open(users[-1], "w", encoding="utf-8") as file:
                file.write(block)
    assert users
    result = subprocess.run(
        [MYPY, "--config-file", str(config), "--cache-dir", os.devnull,
         "quantd", *users],
        cwd=package.FOLDER,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False)
    assert result.returncode == 0, result.stdout
