"""Compiles the ring on the way; everything else about the package stands in pyproject.toml."""

import pathlib
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError

ROOT = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT))

from tfring import _build, config  # noqa: E402

BUILD_NATIVE = config.read("TFRING_BUILD_NATIVE")


class BuildWithRing(build_py):
    """Puts the libraries beside their sources: in the build or, for an editable installation, in place."""

    def run(self):
        super().run()
        where = pathlib.Path(self.build_lib, "tfring", "ring", "native")
        if not BUILD_NATIVE:
            for left_over in where.glob("*.so"):  # of a build before
                left_over.unlink()
            return
        try:
            _build.build(_build.NATIVE if self.editable_mode else where)
        except _build.BuildError as error:
            raise ExecError(str(error)) from None

    def find_data_files(self, package, src_dir):
        # Libraries of an editable installation are not those of a wheel.
        return [path for path in super().find_data_files(package, src_dir) if not path.endswith(".so")]


class WithRing(Distribution):
    def has_ext_modules(self):
        return BUILD_NATIVE


class WheelForAnyPython(bdist_wheel):
    """The libraries know no Python: one wheel a platform serves every version."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if BUILD_NATIVE else (python, abi, platform)


setup(cmdclass={"build_py": BuildWithRing, "bdist_wheel": WheelForAnyPython}, distclass=WithRing)
