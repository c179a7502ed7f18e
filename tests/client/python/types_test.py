"""mypy --strict on the package as it is installed, and on code that uses it."""

import os
import re
import shutil
import subprocess

import pytest

import package

MYPY = shutil.which("mypy")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.skipif(MYPY is None, reason="without mypy")
@pytest.mark.parametrize("what", ["package", "users"])
def test_TypesAreAsStrictAsTheyCanBe(tmp_path, cache, what):
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
    arguments = ["-p", "quantd"]
    if what == "users":
        blocks = []
        for name in ("README.md", "client/python/README.md"):
            with open(os.path.join(package.ROOT, name),
                      encoding="utf-8") as file:
                blocks += re.findall(r"^```python\n(.*?)^```", file.read(),
                                     re.M | re.S)
        arguments = []
        for n, block in enumerate(blocks):
            if "import quantd\n" in block or "import quantd." in block:
                path = tmp_path / f"snippet{n}.py"
                path.write_text(block, encoding="utf-8")
                arguments.append(str(path))
        assert arguments
    result = subprocess.run(
        [MYPY, "--config-file", str(config), "--cache-dir", str(cache),
         *arguments],
        cwd=package.FOLDER, env={**os.environ, "MYPYPATH": package.FOLDER},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False)
    assert result.returncode == 0, result.stdout
