"""A ring of Ray actors: each listens, hears where the others do, and runs a script as one worker of them.

    python examples/ray_actors.py -n 2 examples/movielens.py --epochs 2

Ray's own TensorflowTrainer and TorchTrainer need none of this: tfring reads the variables they set.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import ray

from tfring.cluster import Cluster, launch_variables, listen


@ray.remote(num_cpus=1)
class Worker:
    """One process of the ring, on whichever node Ray puts it."""

    def listen(self) -> str:
        self.address, self.listen_fd = listen()
        return self.address

    def run(self, command: list[str], addresses: list[str], rank: int, folder: str) -> int:
        cluster = Cluster.from_hosts(addresses, rank, listen_fd=self.listen_fd)
        variables = {**os.environ, **launch_variables.write(cluster)}
        return subprocess.run(command, cwd=folder, env=variables, pass_fds=[self.listen_fd]).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-n", type=int, default=2, help="number of workers (default 2)")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="with its arguments")
    arguments = parser.parse_args()
    ray.init()
    workers = [Worker.remote() for _ in range(arguments.n)]
    addresses = ray.get([worker.listen.remote() for worker in workers])
    command = [sys.executable, *arguments.script]
    runs = [worker.run.remote(command, addresses, rank, os.getcwd()) for rank, worker in enumerate(workers)]
    return max(ray.get(runs))


if __name__ == "__main__":
    sys.exit(main())
