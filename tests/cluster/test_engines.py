"""Real engines start ranks that find each other: MPI from the package index, SLURM, hosts in network namespaces.

What an engine needs and this machine lacks is said where its tests are skipped; `tests/cluster/engines/install.sh`
installs it.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from engines import namespaces, packages

from tfring.cluster import detection, for_hosts, torchrun

ENGINES = pathlib.Path(__file__).parent / "engines"
REPORT = str(ENGINES / "report.py")
SECONDS = 60
ENVIRON = {
    name: value
    for name, value in os.environ.items()
    if name not in {variable for source in detection.SOURCES for variable in source.variables}
} | {"TFRING_CONNECT_TIMEOUT_SECONDS": "30"}


def report_of(*commands, environs=({},)):
    """Returns the report of rank 0; every command ends with 0 and in time, or their output is shown."""
    __tracebackhide__ = True
    processes = [
        subprocess.Popen(command, env={**ENVIRON, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command, environ in zip(commands, environs, strict=True)
    ]
    outputs, late = [], False
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=SECONDS))
        except subprocess.TimeoutExpired:
            late = True
            process.terminate()  # engines pass it on to their processes
            outputs.append(process.communicate())
    codes = [process.returncode for process in processes]
    shown = "\n".join(f"----- {i}: exit code {codes[i]}\n{out}{err}" for i, (out, err) in enumerate(outputs))
    assert not late and not any(codes), f"{'not in time; ' if late else ''}{codes}\n{shown}"
    lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith("{")]
    assert len(lines) == 1, shown
    return json.loads(lines[0])


def ip_hosts(facts):
    return [address.rpartition(":")[0] for address in facts["addresses"]]


def mpirun(package, *options):
    try:
        folder = packages.engine(package)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{package} is not to be had from the package index: {error.stderr[-300:]}")
    return [str(folder / "mpirun"), *options, sys.executable, REPORT]


OPEN_MPI = ("openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "3")


@pytest.mark.parametrize(
    ("engine", "source"), [(OPEN_MPI, "Open MPI"), (("mpich", "-n", "3"), "MPICH or Intel MPI")]
)
def test_mpirun(engine, source):
    facts = report_of(mpirun(*engine))
    assert (facts["source"], facts["world_size"], facts["num_nodes"]) == (source, 3, 1)
    assert facts["local_rank"] == [0, 1, 2]
    assert set(ip_hosts(facts)) == {"127.0.0.1"}


@pytest.mark.parametrize("engine", [OPEN_MPI, ("mpich", "-n", "3")])
def test_doctor_under_mpirun(engine):
    facts = report_of([*mpirun(*engine)[:-1], "-m", "tfring.launch.cli", "doctor", "--json"])
    assert facts["verdict"] == "Ready: 3 workers on 1 host can train."


def test_two_jobs_of_mpich_at_once_do_not_mix():
    """MPICH gives a job no name: the process that started the ranks tells jobs apart."""
    script = " & ".join([" ".join(mpirun("mpich", "-n", "2"))] * 2)
    done = subprocess.run(
        ["bash", "-c", f"{script} & wait -n; wait -n"], env=ENVIRON, capture_output=True, text=True, timeout=SECONDS
    )
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(facts) == 2, done
    assert not {*facts[0]["addresses"]} & {*facts[1]["addresses"]}


def test_torchrun_style():
    port = _free_port()
    environs = [{"RANK": str(r), "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": port} for r in range(3)]
    facts = report_of(*[[sys.executable, REPORT]] * 3, environs=environs)
    assert (facts["source"], facts["world_size"]) == (torchrun.SOURCE, 3)
    assert facts["addresses"][0].endswith(f":{port}")


@pytest.fixture(scope="module")
def two_hosts():
    problem = namespaces.why_not()
    if problem:
        pytest.skip(f"no two hosts: {problem}")
    with namespaces.hosts(2) as hosts:
        yield hosts


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_torchrun_style_over_two_hosts(two_hosts, family):
    """Ranks 0 and 2 on one host, 1 and 3 on the other; within a range of ports."""
    master = getattr(two_hosts[0], family)
    environs = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "MASTER_ADDR": master,
            "MASTER_PORT": "20105",
            "TFRING_PORT_RANGE": "20100-20110",
        }
        for rank in range(4)
    ]
    commands = [two_hosts[rank % 2].command(sys.executable, REPORT) for rank in range(4)]
    facts = report_of(*commands, environs=environs)
    assert (facts["num_nodes"], facts["local_rank"], facts["local_world_size"]) == (2, [0, 0, 1, 1], [2] * 4)
    theirs = [getattr(two_hosts[rank % 2], family) for rank in range(4)]
    assert [host.strip("[]") for host in ip_hosts(facts)] == theirs
    assert all(20100 <= int(address.rpartition(":")[2]) <= 20110 for address in facts["addresses"])


def test_kubernetes_variables_over_two_hosts(two_hosts):
    environs = [
        {"JOB_COMPLETION_INDEX": str(i), "TFRING_NUM_WORKERS": "2", "TFRING_RENDEZVOUS": "host1"} for i in range(2)
    ]
    facts = report_of(*[host.command(sys.executable, REPORT) for host in two_hosts], environs=environs)
    assert (facts["source"], facts["num_nodes"]) == ("Kubernetes Indexed Job", 2)
    assert facts["addresses"][0] == "192.0.2.1:20000"


def test_tf_config_over_two_hosts(two_hosts):
    environs = [{"TF_CONFIG": text} for text in for_hosts(["host1", "host2"], port=20200)]
    facts = report_of(*[host.command(sys.executable, REPORT) for host in two_hosts], environs=environs)
    assert (facts["source"], facts["addresses"]) == ("TF_CONFIG", ["host1:20200", "host2:20200"])


def test_slurm(tmp_path):
    """A task of srun is a rank; the script itself is alone; `tfring launch` takes its tasks, mpirun what it is told."""
    missing = [tool for tool in ("slurmctld", "slurmd", "munged", "srun") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} missing: run {ENGINES / 'install.sh'}" if missing else "it is started as root"
        pytest.skip(f"no SLURM: {why}")
    python = sys.executable
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH -n 3 -o {tmp_path}/output\nset -e\n"
        f"{python} -c 'from tfring.cluster import detect; print(detect().source)'\n"
        f"srun {python} {REPORT}\n"
        f"{python} -m tfring.launch {REPORT}\n"
        f"{' '.join(mpirun('mpich', '-n', '2'))}\n"
        f"srun {python} -m tfring.launch.cli doctor | tail -n 1\n"
        f"{python} -m tfring.launch.cli doctor | tail -n 1\n"
    )
    examples = sorted((ENGINES.parents[2] / "examples" / "slurm").glob("*.sh"))
    assert examples
    tries = "".join(f"sbatch --test-only {example} || exit 1; " for example in examples)
    done = subprocess.run(
        [ENGINES / "slurm.sh", "bash", "-c", f"{tries}sbatch --wait {script}; cat {tmp_path}/output"],
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
    )
    lines = done.stdout.splitlines()
    assert "no cluster configured" in lines, done
    facts = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(fact["source"], fact["world_size"]) for fact in facts] == [
        ("SLURM", 3),
        ("tfring launch", 3),
        ("MPICH or Intel MPI", 2),
    ], done
    assert lines.count("Ready: 3 workers on 1 host can train.") == 2, done


def test_kubernetes_manifests():
    """Validates by the schema of Kubernetes' own API."""
    try:
        tool = packages.engine("kubernetes-validate") / "kubernetes-validate"
    except subprocess.CalledProcessError as error:
        pytest.skip(f"kubernetes-validate is not to be had from the package index: {error.stderr[-300:]}")
    manifests = sorted((ENGINES.parents[2] / "examples" / "kubernetes").glob("*.yaml"))
    assert manifests
    done = subprocess.run([tool, "--strict", *manifests], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr


def _free_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])
