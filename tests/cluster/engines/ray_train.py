"""Two workers of Ray Train's DataParallelTrainer, which sets no variables, run a script with its arguments.

python tests/cluster/engines/ray_train.py examples/movielens.py --epochs 2
"""

import os
import sys

import ray
from ray.train import ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def worker(given):
    import runpy

    os.chdir(given["folder"])
    os.environ.update(given["environ"])
    # As `python script.py` would have it: Ray adds the folder where it was started.
    others = [path for path in sys.path if path not in ("", given["folder"])]
    sys.path[:] = [os.path.dirname(given["argv"][0]), *others]
    sys.argv = given["argv"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    environ = {name: text for name, text in os.environ.items() if name.startswith(("TF_", "KERAS_", "TFRING_"))}
    given = {"folder": os.getcwd(), "environ": environ, "argv": sys.argv[1:]}
    DataParallelTrainer(
        worker, train_loop_config=given, scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    ).fit()
