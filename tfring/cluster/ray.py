"""Ray Train: a worker of a trainer that sets no variables, such as `DataParallelTrainer`.

Trainers that set variables need nothing here: Ray's TensorflowTrainer writes TF_CONFIG, its TorchTrainer the variables
of torchrun. Actors and tasks of Ray itself have no rank; use `tfring.cluster.listen` there (examples/ray_actors.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tfring.cluster.unresolved import UnresolvedCluster

SOURCE = "Ray Train"
VARIABLES = ()


def read(environ: Mapping[str, str]) -> UnresolvedCluster | None:
    """Returns the place of this worker of Ray Train; None if Ray Train is not imported or does not train here."""
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
        job = str(context.get_experiment_name())
    except (RuntimeError, AttributeError):  # not in a worker
        return None
    if not isinstance(rank, int) or not isinstance(world_size, int) or world_size <= 1:
        return None
    return UnresolvedCluster(rank, world_size, SOURCE, job, host="", share=_from_rank_0)


def _from_rank_0(text: str) -> str:
    from ray.train import collective

    return collective.broadcast_from_rank_zero(text)
