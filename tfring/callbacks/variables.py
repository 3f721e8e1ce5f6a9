"""The variables of a model taken from all ranks to rank 0, and given back to as many ranks or to others.

Weights and optimizer state are the same on every replica and taken once; slots of which each rank has a piece are
gathered. What differs is taken from every replica: the state of metrics, gradients that each worker has accumulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfring import blocks, equality
from tfring._keras import slots
from tfring._keras.callbacks import all_variables
from tfring._keras.sharding import axis_of, count, cut_of, held_of, whole_shape
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError


def variables_of(model) -> list[keras.Variable]:
    """All there are, in the order in which the program made them: those of metrics come last."""
    variables = [*all_variables(model), *(v for o in _optimizers_of(model) for v in o.variables)]
    each_once = {id(v): v for v in [*variables, *metrics_variables_of(model)]}.values()
    return [v for v in each_once if v.value.dtype != tf.string]


def metrics_variables_of(model) -> list[keras.Variable]:
    """Those that Keras resets when an epoch begins."""
    return [variable for metric in model.metrics for variable in metric.variables]


def _optimizers_of(model) -> list[keras.optimizers.Optimizer]:
    """Also those that a `train_step` of its own uses, and those in a LossScaleOptimizer."""
    found = [o for o in vars(model).values() if isinstance(o, keras.optimizers.Optimizer)]
    return found + [o.inner_optimizer for o in found if isinstance(o, keras.optimizers.LossScaleOptimizer)]


def _accumulators_of(model) -> set[int]:
    return {id(v) for o in _optimizers_of(model) for v in getattr(o, "_accumulated_gradients", [])}


def _is_read_as_sum(variable: keras.Variable) -> bool:
    """As the state of metrics is: of all replicas together, or their mean."""
    return variable.value.synchronization == tf.VariableSynchronization.ON_READ


class Taken(NamedTuple):
    """What variables hold, on all ranks.

    Attributes:
      descriptions: of each variable.
      arrays: of each, on rank 0; None for what is in `pieces`. One that replicas differ in, or would by nature, has
        one dimension more, with an entry a replica of all ranks.
      pieces: what this rank has of variables, by their numbers, where each rank keeps its own.
    """

    descriptions: list[dict[str, Any]]
    arrays: list[np.ndarray | None]
    pieces: dict[int, np.ndarray]


def take(strategy, model, variables: Sequence[keras.Variable], apart: bool = False) -> Taken:
    """What the variables hold; all ranks call it. `apart`: whether ranks keep what they have pieces of."""
    replicas = [values_of(v.value) for v in variables]
    digests = [tf.stack([equality.digest(tf.convert_to_tensor(value)) for value in values]) for values in replicas]
    control = strategy.extended.world
    num_replicas = [len(values) for values in replicas]
    everyone = control.all_gather(tf.concat(digests, 0), name="digests of a backup").numpy()
    everyone = everyone.reshape(strategy.cluster.world_size, -1)
    taken = Taken([], [], {})
    of_each = _accumulators_of(model) | {id(v) for v in variables if _is_read_as_sum(v)}
    ends = np.cumsum(num_replicas)
    for number, (variable, values, end) in enumerate(zip(variables, replicas, ends, strict=True)):
        digest = everyone[:, end - len(values) : end]
        is_cut = cut_of(variable) is not None
        differs = not is_cut and (id(variable) in of_each or bool((digest != digest[0, 0]).any()))
        description = {
            "path": variable.path,
            "dtype": variable.value.dtype.name,
            "shape": list(whole_shape(variable)),
            "of_each_replica": differs,
        }
        array = None
        if is_cut and apart:
            description["pieces"] = _describe_pieces(strategy, variable)
            if any(rank == strategy.cluster.rank for rank, _ in description["pieces"]["of"]):
                taken.pieces[number] = _bits(np.atleast_1d(held_of(variable).numpy()))
        elif is_cut:
            array = _bits(slots.whole(variable, keep=strategy.cluster.is_chief))
        else:
            array = _bits(np.stack([value.numpy() for value in values]) if differs else values[0].numpy())
            if differs:
                array = gather(strategy, array, "variable of a backup")
        taken.descriptions.append(description)
        if strategy.cluster.is_chief:
            taken.arrays.append(array)
    return taken


def _describe_pieces(strategy, variable) -> dict[str, Any]:
    """Who has what of a variable; of ranks that have the same piece the first."""
    cut, axis = cut_of(variable), axis_of(variable)
    assert cut is not None
    first: dict[int, int] = {}  # rank, by its place along the axis
    for rank in range(strategy.cluster.world_size):
        first.setdefault(strategy.mesh.coordinate(axis, rank), rank)
    size = cut.lined_up[cut.dimension]
    of = [
        [rank, [list(part.indices(size)) for part in cut.slices(place)]]
        for place, rank in first.items()
        if count(cut, place)
    ]
    return {"lined_up": list(cut.lined_up), "dimension": cut.dimension, "of": of}


def give(strategy, model, variables, descriptions, arrays: list[np.ndarray] | None, cluster_then: dict) -> None:
    """Assigns what was taken.

    Args:
      strategy: the RingStrategy.
      model: whose optimizers say which variables accumulate gradients.
      variables: as many as there are descriptions, in the same order.
      descriptions: of `take`, on every rank.
      arrays: of `take`, on rank 0.
      cluster_then: `num_workers` and `replicas_per_worker` when they were taken.
    """
    rank = strategy.cluster.rank
    replicas_per_worker = len(strategy.extended.worker_devices)
    same_cluster = cluster_then == describe_cluster(strategy)
    accumulators = _accumulators_of(model)
    for number, (variable, description) in enumerate(zip(variables, descriptions, strict=True)):
        dtype = tf.as_dtype(description["dtype"]).as_numpy_dtype
        shape = tuple(description["shape"])
        if description["of_each_replica"]:
            shape = (cluster_then["num_workers"] * cluster_then["replicas_per_worker"], *shape)
        array = None if arrays is None else arrays[number].view(dtype).reshape(shape)
        replicas, cut = values_of(variable.value), cut_of(variable)
        if cut is not None:
            if array is not None and description["of_each_replica"]:  # accumulated where one process had all rows
                array = array.sum(0, dtype=array.dtype)
            values = [scatter(strategy, array, variable, dtype)] * len(replicas)
        else:
            whole = broadcast(strategy, array, shape, dtype)
            if not description["of_each_replica"]:
                values = [whole] * len(replicas)
            elif same_cluster:
                values = list(whole[rank * replicas_per_worker :][: len(replicas)])
            else:
                is_accumulator = id(variable) in accumulators
                if is_accumulator:  # the replicas of a worker hold the same
                    whole = whole[:: cluster_then["replicas_per_worker"]]
                values = _spread(whole, variable, rank, len(replicas), is_accumulator)
        for replica, value in zip(replicas, values, strict=True):
            replica.assign(value)


def _spread(array, variable, rank, num_replicas, is_accumulator):
    """Values for other replicas than those that held `array`, which mean the same together."""
    if is_accumulator or variable.value.aggregation == tf.VariableAggregation.SUM:
        total = array.sum(0, dtype=array.dtype)
        zeros = np.zeros_like(total)
        first = total if rank == 0 else zeros
        return [first] * num_replicas if is_accumulator else [first, *[zeros] * (num_replicas - 1)]
    if variable.value.aggregation == tf.VariableAggregation.MEAN:
        return [array.mean(0, dtype=array.dtype)] * num_replicas
    return [array[0]] * num_replicas


def check_fit(variables, descriptions) -> None:
    """Raises ConfigurationError where the descriptions are not those of these variables."""
    then = [(d["dtype"], tuple(d["shape"])) for d in descriptions]
    now = [(v.value.dtype.name, whole_shape(v)) for v in variables]
    if then == now:
        return
    pairs = zip(then, now, strict=False)
    number = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(then), len(now)))
    saved = f"{descriptions[number]['path']} {then[number]}" if number < len(then) else "no more"
    has = f"{variables[number].path} {now[number]}" if number < len(now) else "no more"
    raise ConfigurationError(
        "A backup restores the model, optimizer and metrics that it was made of, and a folder serves one `fit`. "
        f"Received: a backup of {len(then)} variables for a model with {len(now)}; the first that differs: {saved} in "
        f"the backup, {has} in the model. Use another folder, or remove this one to train from the start."
    )


def describe_cluster(strategy) -> dict[str, int]:
    return {
        "num_workers": strategy.cluster.world_size,
        "replicas_per_worker": len(strategy.extended.worker_devices),
    }


# -- bytes: the ring does not carry every dtype ------------------------------------------------------------------------


def gather(strategy, array: np.ndarray, name: str) -> np.ndarray:
    """Concatenates arrays of one dtype along dimension 0, by rank."""
    everyone = strategy.extended.world.all_gather(tf.constant(_octets(array)), name=name).numpy()
    return everyone.view(array.dtype).reshape(-1, *array.shape[1:])


def gather_bytes(strategy, data: bytes) -> list[bytes]:
    """Every rank's bytes, by rank."""
    control = strategy.extended.world
    lengths = control.all_gather(tf.constant([len(data)], tf.int64), name="lengths of a backup").numpy()
    joined = control.all_gather(tf.constant(np.frombuffer(data, np.uint8)), name="state of a backup").numpy().tobytes()
    ends = np.cumsum(lengths)
    return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def broadcast(strategy, array: np.ndarray | None, shape: tuple[int, ...], dtype) -> np.ndarray:
    """Rank 0's array, on every rank."""
    dtype = np.dtype(dtype)
    if array is None:
        array = np.empty(shape, dtype)
    [received] = strategy.extended.world.broadcast([tf.constant(_octets(array))], name="variable of a backup")
    return received.numpy().view(dtype).reshape(shape)


def scatter(strategy, array: np.ndarray | None, variable, dtype) -> np.ndarray:
    """Of rank 0's array each rank its piece, as of a variable that holds one."""
    dtype, cut = np.dtype(dtype), cut_of(variable)
    assert cut is not None
    ranks = [strategy.mesh.coordinate(axis_of(variable), rank) for rank in range(strategy.cluster.world_size)]
    counts = [count(cut, rank) for rank in ranks]
    inner = tuple(np.delete(cut.lined_up, cut.dimension))
    mine = np.empty((counts[strategy.cluster.rank], *inner), dtype)
    lined_up = None if array is None else np.moveaxis(array.reshape(cut.lined_up), cut.dimension, 0)
    step = blocks.rows_of_a_block(mine, len(ranks))
    for begin in range(0, max(counts), step):
        octets, sizes = np.empty(0, np.uint8), None
        if lined_up is not None:
            everyones = [[lined_up[rows] for rows in cut.slices(rank)] for rank in ranks]
            parts = [_octets(blocks.read_rows(begin, step, pieces)) for pieces in everyones]
            octets, sizes = np.concatenate(parts), tf.constant([part.size for part in parts], tf.int64)
        received = strategy.extended.world.scatter(tf.constant(octets), sizes, name="variable of a backup")
        mine[begin : begin + step] = received.numpy().view(dtype).reshape(-1, *inner)
    return np.moveaxis(mine, 0, cut.dimension).reshape(cut.shape_of(ranks[strategy.cluster.rank]))


def broadcast_bytes(strategy, data: bytes) -> bytes:
    """Rank 0's bytes, on every rank."""
    [length] = strategy.extended.world.broadcast([tf.constant([len(data)], tf.int64)], name="length of a backup")
    if not strategy.cluster.is_chief:
        data = bytes(int(length[0]))
    [received] = strategy.extended.world.broadcast(
        [tf.constant(np.frombuffer(data, np.uint8))], name="state of a backup"
    )
    return received.numpy().tobytes()


def _octets(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _bits(array: np.ndarray) -> np.ndarray:
    """As it is, or as whole numbers of its size where a `.npy` file does not know the dtype (bfloat16)."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")
