"""Adds the stubs of proto/ to the package when it is built, and says what they
need."""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))
GENERATE = os.path.join(HERE, "generate")


def requirements():
    """Of the stubs that `generate` makes here."""
    loader = importlib.machinery.SourceFileLoader("generate", GENERATE)
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("generate", loader))
    # Nothing is to be left beside the script.
    sys.dont_write_bytecode = True
    loader.exec_module(module)
    return module.requirements()


class BuildWithStubs(build_py):
    """Generates into what is built, not into the sources."""

    def run(self):
        super().run()
        folder = "src" if self.editable_mode else self.build_lib
        subprocess.run([sys.executable, GENERATE, os.path.abspath(folder)],
                       check=True)


setup(cmdclass={"build_py": BuildWithStubs}, install_requires=requirements())
