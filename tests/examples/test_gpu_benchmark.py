"""benchmarks/gpu: its checks with logical CPU devices, failures among them, and how TensorFlow gets to the machine."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import time
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks" / "gpu"
# What stands in for gpu_checks.py: the same, with checks of which two fail, one never ends and one ends its rank.
OTHER_CHECKS = f"""
import os, sys, time
sys.path.insert(0, {str(GPU)!r})
import gpu_checks as checks
from gpu_checks import Check, main

def differs():
    return checks.equal({{"weights": 1.0}})

def hangs():
    time.sleep(600)

def dies():
    if os.environ["TFRING_RANK"] == "1":
        os._exit(7)
    time.sleep(600)

checks.start = lambda replicas: None
checks.CHECKS[:] = [
    Check("before", "-n 2", 20, lambda: {{"rank": os.environ["TFRING_RANK"]}}),
    Check("differs", "-n 2", 20, differs),
    Check("hangs", "-n 2", 0.1, hangs),
    Check("dies", "-n 2", 60, dies),
    Check("behind", "-n 2", 20, lambda: checks.equal({{"weights": 1e-7, "bits": b""}})),
    Check("alone", "alone", 20, lambda: {{"world size": os.environ.get("TFRING_WORLD_SIZE")}}),
]
if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
"""


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(monkeypatch):
    """The module benchmarks/gpu/run.py."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load("gpu_run", GPU / "run.py")


def test_some_checks_on_logical_devices(tmp_path):
    """Of the whole, which takes minutes, these have a device, a ring and one process beside them."""
    only = "^(device|optimizer Adam|custom loop|where embeddings)$"
    command = [sys.executable, GPU / "run.py", "--only", only, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "4 ok"
    found = json.loads((tmp_path / "results.json").read_text())["checks"]
    figures = {each["name"]: each["figures"] for each in found}
    assert list(figures) == ["device", "optimizer Adam", "custom loop", "where embeddings"]
    assert 0 < figures["optimizer Adam"]["error"] < 1e-5 and 0 < figures["custom loop"]["error"] < 1e-5
    assert set(figures["where embeddings"]["ours"]) == {"TfringAllReduce", "TfringAllReduceRows"}


def test_a_check_that_fails_stops_no_other(run, monkeypatch, tmp_path):
    path = tmp_path / "other_checks.py"
    path.write_text(OTHER_CHECKS)
    monkeypatch.setattr(sys, "path", [str(GPU), *sys.path])
    other = load("other_checks", path)
    chosen, others = list(other.checks.CHECKS), sys.modules.pop("gpu_checks")
    assert others is other.checks
    monkeypatch.setattr(run, "checks", other)
    monkeypatch.setattr(run, "START_SECONDS", 5.0)
    found = {each["name"]: each for each in run.outcomes(chosen, time.monotonic() + 200)}
    assert list(found) == ["before", "differs", "hangs", "dies", "behind", "alone"]
    verdicts = {name: each["verdict"] for name, each in found.items()}
    assert verdicts == {**dict.fromkeys(found, "ok"), **dict.fromkeys(("differs", "hangs", "dies"), "FAILED")}
    assert found["before"]["figures"] == {"rank": "0"} and found["behind"]["figures"] == {"error": 1e-7}
    assert found["alone"]["figures"] == {"world size": None}
    assert "weights differ from one process by 1.0e+00, more than 1e-04" in found["differs"]["error"]
    assert "took longer than" in found["hangs"]["error"] and "ended with" in found["dies"]["error"]
    assert any("rank 1" in line for line in found["dies"]["log"])
    late = list(run.outcomes(chosen, time.monotonic() - 1))
    assert [each["verdict"] for each in late] == ["not run"] * 6


@pytest.mark.parametrize("size, most", [(1, 55), (54, 55), (55, 55), (56, 55), (1000, 55), (7, 3)])
def test_pieces(size, most):
    data = os.urandom(size)
    pieces = list(load("carry", GPU / "carry.py").cut(io.BytesIO(data), size, most))
    assert b"".join(piece.data for piece in pieces) == data
    assert len(pieces) == -(-size // most) and max(len(piece.data) for piece in pieces) <= most
    assert [piece.name for piece in pieces] == sorted(f"piece-{i:02}" for i in range(len(pieces)))
    assert all(piece.checksum == hashlib.sha256(piece.data).hexdigest() for piece in pieces)


def wheel(folder, name, files):
    """Writes a wheel of version 1."""
    info = f"{name}-1.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    sums = {at: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=") for at, data in files.items()}
    record = "".join(f"{at},sha256={sums[at].decode()},{len(data)}\n" for at, data in files.items())
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        for at, data in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(at, data)


def test_wheels_are_carried_and_installed(tmp_path):
    """A wheel of a few kB stands in for TensorFlow's, files for the libraries of CUDA 13 beneath python3's packages."""
    wheels, there, kept = tmp_path / "wheels", tmp_path / "checkout" / "benchmarks" / "gpu", tmp_path / "kept"
    wheels.mkdir()
    program = "__version__ = 'of the wheel'\nclass config:\n    list_physical_devices = staticmethod(lambda kind: [])\n"
    wheel(wheels, "tensorflow", {"tensorflow/__init__.py": program.encode(), "tensorflow/large": os.urandom(3 << 20)})
    wheel(wheels, "nvidia_cuda_runtime_cu12", {"nvidia/cuda_runtime/lib/libcudart.so.12": b"12"})
    command = [sys.executable, GPU / "carry.py", wheels, "--megabytes", "1", "--out", tmp_path / "pieces"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    pieces = sorted((tmp_path / "pieces").glob("piece-*"))
    assert len(pieces) == 4 and len(printed) == 5 and all(piece.stat().st_size <= 1 << 20 for piece in pieces)

    packages = tmp_path / "packages"
    for name in ("cu13/lib/libcublas.so.13", "cu13/lib/libcublasLt.so.13", "cudnn/lib/libcudnn.so.9"):
        (packages / "nvidia" / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / "nvidia" / name).write_text(name)
    there.mkdir(parents=True)
    (there / "assemble.sh").write_bytes((GPU / "assemble.sh").read_bytes())
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(packages)}

    def assemble(step, expected=0):
        command = ["bash", there / "assemble.sh", step, kept]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert (done.returncode == 0) == (expected == 0), done.stdout + done.stderr
        return done.stdout

    def copy(piece, data=None):
        (there / "pieces").mkdir(exist_ok=True)
        (there / "pieces" / piece.name).write_bytes(piece.read_bytes() if data is None else data)
        (there / "pieces" / "SHA256SUMS").write_bytes((tmp_path / "pieces" / "SHA256SUMS").read_bytes())

    copy(pieces[0], b"not what was sent")
    assemble("take", 1)
    for number, piece in enumerate(pieces, 1):
        copy(piece)
        assert f"{number} of 4 pieces" in assemble("take")
    hidden = (kept / pieces[2].name).rename(tmp_path / "hidden")
    assemble("install", 1)
    hidden.rename(kept / pieces[2].name)
    said = assemble("install")
    assert "TensorFlow of the wheel []" in said
    assert f"libcudart.so.12: {kept}/site/nvidia/cuda_runtime/lib/libcudart.so.12" in said
    assert "libcufft.so.11: none" in said
    links = {link.name: os.readlink(link) for link in (kept / "links").iterdir()}
    of_packages = packages / "nvidia" / "cu13" / "lib"
    assert links == {
        "libcublas.so.12": str(of_packages / "libcublas.so.13"),
        "libcublasLt.so.12": str(of_packages / "libcublasLt.so.13"),
    }
    folders = ":".join(
        map(str, (kept / "site/nvidia/cuda_runtime/lib", kept / "links", of_packages, packages / "nvidia/cudnn/lib"))
    )
    show = f". {kept}/environment; echo $LD_LIBRARY_PATH; echo $PYTHONPATH"
    environment.pop("LD_LIBRARY_PATH", None)
    shown = subprocess.run(["bash", "-c", show], capture_output=True, text=True, env=environment, timeout=20).stdout
    assert shown.split() == [folders, f"{kept}/site"]
