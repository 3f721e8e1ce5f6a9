"""`tfring launch` gives each worker of a host a GPU of its own: what CUDA_VISIBLE_DEVICES is in real workers."""

from __future__ import annotations

import subprocess

import pytest
from test_launch import LAUNCH, TIMEOUT, launch, plain_environment

__all__ = ["launch", "plain_environment"]  # fixtures

SHOW = "print('sees', os.environ.get('CUDA_VISIBLE_DEVICES'), rank, flush=True)"
GROWTH = "print('grows', os.environ.get('TF_FORCE_GPU_ALLOW_GROWTH'), flush=True)"


def seen(done):
    """What each rank sees, by rank."""
    lines = [line.split("sees ")[1].split() for line in done.stdout.splitlines() if "sees " in line]
    return [text for text, _ in sorted(lines, key=lambda line: int(line[1]))]


@pytest.mark.parametrize(
    "visible, num_workers, expected",
    [
        ("0,1", 2, ["0", "1"]),
        ("3, GPU-8f1c,5", 2, ["3", "GPU-8f1c"]),
        ("-1", 2, ["-1", "-1"]),
        ("none", 2, ["none", "none"]),
        ("0,-1,1", 1, ["0"]),
    ],
)
def test_each_worker_has_one_gpu(launch, monkeypatch, visible, num_workers, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    done = launch(num_workers, SHOW)
    assert seen(done) == expected
    assert "GPU" not in done.stderr


def test_more_workers_than_gpus_are_warned(launch, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    done = launch(3, SHOW)
    assert seen(done) == ["0,1"] * 3
    assert done.stderr.count("tfring launch: 3 workers on a host with 2 GPUs: each worker sees all GPUs") == 1
    assert launch(3, GROWTH).stdout.count("grows true") == 3  # or the first would take all memory
    assert launch(2, GROWTH).stdout.count("grows None") == 2
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    assert launch(3, GROWTH).stdout.count("grows false") == 3
    monkeypatch.setenv("TFRING_GPUS", "all")
    done = launch(3, SHOW)
    assert seen(done) == ["0,1"] * 3 and "GPU" not in done.stderr
    assert seen(launch(1, SHOW)) == ["0,1"]


def test_servers_have_none(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    script = tmp_path / "show.py"
    script.write_text("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('TFRING_SERVER'))")
    command = [*LAUNCH, "-n", "1", "--servers", "1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
    assert sorted(done.stdout.splitlines()) == ["0 None", "[server 0] -1 0"], done.stderr


def test_gpus_that_nvidia_smi_lists(launch, monkeypatch, tmp_path):
    """A program of that name stands in for the driver's, in the driver's format."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n[ \"$1\" = -L ] || exit 9\necho 'GPU 0: NVIDIA A100 (UUID: GPU-1)'\n"
        "echo '  MIG 1g.5gb Device 0: (UUID: MIG-2)'\necho 'GPU 1: NVIDIA A100 (UUID: GPU-3)'\n"
    )
    program.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert seen(launch(2, SHOW)) == ["None", "None"]  # this machine has no driver
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    assert seen(launch(2, SHOW)) == ["0", "1"]
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert seen(launch(2, SHOW)) == ["None", "None"]
