"""What the tests that pytest runs share."""

import json
import os
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

# pylint: disable=wrong-import-position
import package  # pylint: disable=unused-import
import live_server
import quantd


def pytest_addoption(parser):
    parser.addoption("--quantd", required=True)
    parser.addoption("--quantctl")


def pytest_configure(config):
    quantctl = config.getoption("--quantctl")
    if quantctl:
        os.environ["QUANTD_QUANTCTL"] = os.path.abspath(quantctl)


@pytest.fixture(scope="module")
def server(request):
    """A live quantd, and a store of its own, for all tests of a file."""
    with live_server.LiveServer(request.config.getoption("--quantd"),
                                flags=["--drain-delay", "0"]) as live:
        yield live


@pytest.fixture(scope="module")
def quantctl(request, server):  # pylint: disable=redefined-outer-name
    """Runs it against that server; its output, or the document of --json."""
    def run(*command, code=0):
        result = subprocess.run(
            [request.config.getoption("--quantctl"), *map(str, command)],
            env={**os.environ, "QUANTD_SERVER": server.address},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            check=False)
        assert result.returncode == code, result.stdout + result.stderr
        return (json.loads(result.stdout) if "--json" in command else
                result.stdout + result.stderr)
    return run


@pytest.fixture
def small_server(request):
    """One that can hold no large tensor, and lets none wait."""
    with live_server.LiveServer(
            request.config.getoption("--quantd"),
            flags=["--memory-budget-bytes", "32MiB", "--memory-wait",
                   "0s"]) as live:
        yield live


@pytest.fixture
def limited(small_server):  # pylint: disable=redefined-outer-name
    """A client of that one, which tries once."""
    with quantd.Client(small_server.address, retry_for=0) as live:
        yield live


@pytest.fixture(scope="module")
def client(server):  # pylint: disable=redefined-outer-name
    with quantd.Client(server.address) as live:
        yield live
