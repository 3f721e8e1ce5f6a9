"""MovieLens with two workers under every engine this machine has, and a table of the figures.

    python tests/cluster/engines/movielens.py                       8 epochs on everything, as in the README
    python tests/cluster/engines/movielens.py --epochs 2 --max-ratings 20000

As root, after `install.sh`; what cannot run here is a line of the table that says why. Ends with 1 where figures differ
by more than 1e-3 (curves of both epochs and ratings included), a ring has not two workers, or an engine fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "cluster"), str(ROOT / "examples")]
import compare_workers  # noqa: E402
from engines import namespaces, packages, sshd  # noqa: E402

from tfring.cluster import detection, for_hosts  # noqa: E402

EXAMPLE = str(ROOT / "examples" / "movielens.py")
SECONDS = 900
TOLERANCE = 1e-3


def main() -> int:
    arguments = sys.argv[1:]
    rows, reference, failed = [], None, False
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for name, make in ENGINES.items():
            file = pathlib.Path(folder) / "figures.json"
            file.unlink(missing_ok=True)
            program = [EXAMPLE, *arguments, "--output-dir", folder, "--json", str(file)]
            started = time.monotonic()
            try:
                commands, environs = make(program, stack)
            except (RuntimeError, subprocess.CalledProcessError) as problem:
                rows.append((name, "", "", "", "", f"not run: {getattr(problem, 'stderr', '') or problem}"))
                continue
            problem = run(commands, environs)
            if problem is None and file.exists():
                figures = json.loads(file.read_text())
                reference = reference or figures
                difference = compare_workers.largest_difference([reference, figures])
                failed |= difference > TOLERANCE or figures["workers"] != (1 if make is alone else 2)
                metrics, took = figures["metrics"], f"{time.monotonic() - started:.0f} s"
                shown = (f"{metrics['rmse']:.4f}", f"{metrics['ndcg_at_10']:.4f}", f"{difference:.0e}")
                rows.append((name, str(figures["workers"]), *shown, took))
            else:
                failed = True
                rows.append((name, "", "", "", "", f"FAILED: {problem or 'no figures'}"))
            print(*rows[-1], file=sys.stderr, flush=True)
    print("| engine | workers | RMSE | NDCG@10 | differs by | |\n|---|---:|---:|---:|---:|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return int(failed)


def run(commands, environs):
    """Runs them side by side; what went wrong, or None."""
    ours = {variable for source in detection.SOURCES for variable in source.variables}
    plain = {name: text for name, text in os.environ.items() if name not in ours}
    plain |= {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
    with tempfile.TemporaryFile("w+") as output:
        processes = [
            subprocess.Popen(command, env=plain | environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
            for command, environ in zip(commands, environs, strict=True)
        ]
        deadline = time.monotonic() + SECONDS
        try:
            codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            codes = ["not in time"]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if any(codes):
            output.seek(0)
            print(output.read()[-5000:], file=sys.stderr)
            return codes
    return None


def alone(program, stack):
    return [[sys.executable, *program]], [{}]


def launch(program, stack):
    return [[sys.executable, "-m", "tfring.launch", "-n", "2", *program]], [{}]


def ssh(program, stack):
    if sshd.why_not():
        raise RuntimeError(sshd.why_not())
    hosts = stack.enter_context(namespaces.hosts(2))
    config = stack.enter_context(sshd.running(hosts))
    where = ["--hosts", "host1:1,host2:1", "--ssh-config", str(config)]
    return [hosts[0].command(sys.executable, "-m", "tfring.launch", *where, *program)], [{}]


def tf_config(program, stack):
    texts = for_hosts([f"localhost:{port}" for port in free_ports(2)])
    return [[sys.executable, *program]] * 2, [{"TF_CONFIG": text} for text in texts]


def torchrun(program, stack):
    if shutil.which("torchrun") is None:
        raise RuntimeError("no torchrun on PATH (pip install torch)")
    return [[shutil.which("torchrun"), "--no-python", "--nproc-per-node", "2", sys.executable, *program]], [{}]


def torchrun_style(program, stack):
    (port,) = free_ports(1)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return [[sys.executable, *program]] * 2, [{**shared, "RANK": str(rank)} for rank in range(2)]


def open_mpi(program, stack):
    mpirun = str(packages.engine("openmpi") / "mpirun")
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    return [[mpirun, *options, sys.executable, *program]], [{}]


def mpich(program, stack):
    return [[str(packages.engine("mpich") / "mpirun"), "-n", "2", sys.executable, *program]], [{}]


def slurm(program, stack):
    if shutil.which("slurmctld") is None or os.geteuid() != 0:
        raise RuntimeError("no SLURM (tests/cluster/engines/install.sh, as root)")
    return [[str(ROOT / "tests/cluster/engines/slurm.sh"), "srun", "-n", "2", sys.executable, *program]], [{}]


def ray(program, stack):
    return [[ray_python(), str(ROOT / "examples" / "ray_actors.py"), "-n", "2", *program]], [{}]


def ray_train(program, stack):
    return [[ray_python(), str(ROOT / "tests/cluster/engines/ray_train.py"), *program]], [{}]


def ray_python():
    return str(packages.engine("ray[train]", with_this_environment=True) / "python")


def free_ports(n):
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(n)]


ENGINES = {
    "one process": alone,
    "tfring launch": launch,
    "ssh to two namespaces": ssh,
    "TF_CONFIG": tf_config,
    "torchrun-style variables": torchrun_style,
    "torchrun": torchrun,
    "mpirun of Open MPI": open_mpi,
    "mpirun of MPICH": mpich,
    "srun": slurm,
    "Ray actors": ray,
    "Ray Train": ray_train,
}

if __name__ == "__main__":
    sys.exit(main())
