"""Shares of a host's CPUs."""

import os
import subprocess
import sys

import pytest

from tfring.cpus import available_cpus, share_of_cores, thread_variables
from tfring.errors import ConfigurationError


@pytest.mark.parametrize(
    ("workers", "cpus", "intra", "inter"),
    [(1, 8, 8, 8), (2, 8, 4, 4), (3, 8, 2, 2), (4, 2, 1, 2), (8, 4, 1, 2)],
)
def test_shares(workers, cpus, intra, inter):
    assert thread_variables(workers, cpus, {}) == {
        "TF_NUM_INTRAOP_THREADS": str(intra),
        "TF_NUM_INTEROP_THREADS": str(inter),
        "OMP_NUM_THREADS": str(intra),
    }


def test_what_the_user_has_set_stays():
    assert thread_variables(2, 8, {"OMP_NUM_THREADS": "7"}).keys() == {
        "TF_NUM_INTRAOP_THREADS",
        "TF_NUM_INTEROP_THREADS",
    }


def test_affinity_mask():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/job\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            64,
        ),
        ({"proc/self/cgroup": "nonsense\n"}, 64),
    ],
)
def test_cgroup_quota(tmp_path, monkeypatch, files, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cpus(tmp_path) == cpus


@pytest.mark.parametrize(
    ("cores", "shares"),
    [  # (socket, core) of each CPU -> the CPUs of each worker
        ([(0, 0), (0, 1), (0, 2), (0, 3)], [{0, 1}, {2, 3}]),
        ([(0, 0), (0, 1), (0, 0), (0, 1)], [{0, 2}, {1, 3}]),  # two hardware threads a core
        ([(0, 0), (1, 0), (0, 1), (1, 1)], [{0, 2}, {1, 3}]),  # neighbors in number, not in socket
        ([(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)], [{0, 1}, {2, 3, 4}]),
        ([(0, 7), (0, 3), (0, 5)], [{1}, {2}, {0}]),
        ([], [{0, 1}, {2, 3}]),  # of which the kernel says nothing
    ],
)
def test_shares_of_cores(tmp_path, monkeypatch, cores, shares):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(cores) or 4)))
    for cpu, (socket, core) in enumerate(cores):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/physical_package_id").write_text(f"{socket}\n")
        (tmp_path / f"cpu{cpu}/topology/core_id").write_text(f"{core}\n")
    assert [share_of_cores(number, len(shares), tmp_path) for number in range(len(shares))] == shares
    with pytest.raises(ConfigurationError, match=r"(?s)9 workers on .* cannot be bound to its [2345] cores"):
        share_of_cores(0, 9, tmp_path)


SHOW = "import os\nprint(sorted(os.sched_getaffinity(0)), os.environ['TF_NUM_INTRAOP_THREADS'])\n"


@pytest.mark.parametrize("where", [("-n", "2"), ("--hosts", "localhost:2")])
@pytest.mark.parametrize("binds", [True, False])
def test_workers_are_bound_where_that_is_asked_for(tmp_path, where, binds):
    each = [{min(share_of_cores(number, 2))} for number in range(2)]  # a CPU of either core
    both = set().union(*each)
    (tmp_path / "show.py").write_text(SHOW)
    options = ["--bind", "cores"] if binds else []
    done = subprocess.run(
        [sys.executable, "-m", "tfring.launch", *where, *options, tmp_path / "show.py"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60,
        preexec_fn=lambda: os.sched_setaffinity(0, both),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = sorted(line.removeprefix("[1] ") for line in done.stdout.splitlines())
    assert shown == sorted(f"{sorted(share)} 1" for share in (each if binds else [both, both]))


@pytest.mark.parametrize("where", ["-n", "--hosts"])
def test_more_workers_than_cores(tmp_path, where):
    (tmp_path / "show.py").write_text(SHOW)
    number = len(os.sched_getaffinity(0)) + 1
    workers = f"{number}" if where == "-n" else f"localhost:{number}"
    done = subprocess.run(
        [sys.executable, "-m", "tfring.launch", where, workers, "--bind", "cores", tmp_path / "show.py"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip
    assert done.returncode == 71 and done.stdout == "", done
    assert f"{number} workers on " in done.stderr and "cannot be bound" in done.stderr
