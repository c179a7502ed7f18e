"""Adds the stubs of proto/ to the package when it is built."""

import os
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))


class BuildWithStubs(build_py):
    """Generates into what is built, not into the sources."""

    def run(self):
        super().run()
        folder = "src" if self.editable_mode else self.build_lib
        subprocess.run([sys.executable, os.path.join(HERE, "generate"),
                        os.path.abspath(folder)], check=True)


setup(cmdclass={"build_py": BuildWithStubs})
