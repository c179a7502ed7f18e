"""What the tests that pytest runs share."""

import os
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


@pytest.fixture(scope="module")
def server(request):
    """A live quantd, and a store of its own, for all tests of a file."""
    with live_server.LiveServer(request.config.getoption("--quantd")) as live:
        yield live


@pytest.fixture(scope="module")
def client(server):  # pylint: disable=redefined-outer-name
    with quantd.Client(server.address) as live:
        yield live
