"""Building and loading the libraries: what happens where something is missing."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import tfring
from tfring import _build
from tfring.errors import NativeLibraryError
from tfring.ring import library


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(_build.BuildError) as caught:
        _build.compiler()
    for words in ("apt install g++", "dnf install gcc-c++", "TFRING_BUILD_NATIVE=0", 'communication="tensorflow"'):
        assert words in str(caught.value)


def test_a_compiler_that_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(_build.BuildError, match="could not be compiled"):
        _build.build(tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_library(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "CORE", tmp_path / "libtfring_core.so")
    library.core.cache_clear()
    try:
        with pytest.raises(NativeLibraryError, match="The compiled ring is missing"):
            library.core()
        (tmp_path / "libtfring_core.so").write_bytes(b"no library")
        with pytest.raises(NativeLibraryError, match="cannot be loaded"):
            library.core()
    finally:
        library.core.cache_clear()


def test_a_checkout_without_libraries_uses_those_of_the_installed_package(tmp_path):
    package = pathlib.Path(tfring.__file__).parent
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    shutil.copytree(package, checkout / "tfring", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(package, site / "tfring", ignore=shutil.ignore_patterns("__pycache__"))
    about = site / f"tfring-{tfring.__version__}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tfring\nVersion: {tfring.__version__}\n")
    code = "import tfring.ring.library as l; l.core(); print(l.__file__, l.CORE, l.OPS.exists())"
    command = [sys.executable, "-S", "-c", code]  # without the package that is installed here
    environ = {**os.environ, "PYTHONPATH": str(site)}
    run = {"cwd": checkout, "env": environ, "capture_output": True, "text": True, "timeout": 60}
    source, core, has_ops = subprocess.run(command, check=True, **run).stdout.split()
    assert source.startswith(str(checkout)) and core.startswith(str(site)) and has_ops == "True"
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tfring\nVersion: 0.0.1\n")
    failed = subprocess.run(command, **run)
    assert failed.returncode == 1 and "The compiled ring is missing" in failed.stderr, failed.stderr


def test_the_libraries_ask_for_no_libstdcxx():
    for path in (library.CORE, library.OPS):
        assert b"libstdc++.so" not in path.read_bytes() and b"libgcc_s.so" not in path.read_bytes()


def test_numpy_collectives_import_no_tensorflow(tmp_path):
    code = (
        "import sys\n"
        "from tfring import Cluster, Communicator\n"
        "assert Communicator.connect(Cluster.alone()).all_reduce([1.0, 2.0]).tolist() == [1.0, 2.0]\n"
        "assert 'tensorflow' not in sys.modules and 'keras' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
