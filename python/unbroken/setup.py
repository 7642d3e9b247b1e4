"""Names wheels that hold C libraries for their platform; all else is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import Distribution, setup

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

LIBRARY = Path(__file__).resolve().parent / "unbroken" / "libunbroken_coll.so"


class PlatformWheel(bdist_wheel):
    """`py3-none-manylinux_2_35_x86_64`, say: any Python 3, since the libraries are no extension
    modules, on the platform that packaging/wheel.sh has found them to need."""

    def get_tag(self):
        return "py3", "none", os.environ.get("WHEEL_PLATFORM") or super().get_tag()[2]


class PlatformDistribution(Distribution):
    """Goes where packages lie that differ between machines."""

    def has_ext_modules(self):
        return True


if LIBRARY.exists():
    setup(cmdclass={"bdist_wheel": PlatformWheel}, distclass=PlatformDistribution)
else:
    setup()
