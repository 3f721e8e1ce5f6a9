"""Collects the variables of a model from all ranks on rank 0, and restores them on any number of ranks.

Weights and optimizer state are the same on every replica and collected once; slots that are sharded over ranks are
gathered. Values that differ are collected from every replica: the state of metrics, gradients that each worker has
accumulated. A replica may be several workers (`Mesh`), which hold equal values or shards: it has one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfring import blocks, equality
from tfring._keras.callbacks import all_variables
from tfring._keras.optimizers import optimizers_of
from tfring._keras.optimizers.local_steps import norms_of
from tfring._keras.sharding import full_shape, gradient_is_complete, large, mark_of, sharding_of, slots
from tfring.cluster.mesh import Coordinates, Mesh
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.runtime import Ring


def variables_of(model: Any) -> list[keras.Variable]:
    """Returns all variables in the order in which the program made them; those of metrics come last."""
    found = [*all_variables(model), *norms_of(model), *metrics_variables_of(model)]
    each_once = {id(v): v for v in found}.values()
    return [v for v in each_once if v.value.dtype != tf.string]


def metrics_variables_of(model: Any) -> list[keras.Variable]:
    """Returns the variables that Keras resets when an epoch begins."""
    return [variable for metric in model.metrics for variable in metric.variables]


def describe_optimizers(model: Any) -> list[list[int | None] | None]:
    """Returns, for each optimizer, the numbers of the model's variables that it was built for, or None."""
    numbers = {id(v): number for number, v in enumerate(model.variables)}
    found: list[list[int | None] | None] = []
    for optimizer in optimizers_of(model):
        built_for = [numbers.get(id(v)) for v in optimizer._trainable_variables] if optimizer.built else [None]
        found.append(None if None in built_for else built_for)
    return found


def build_optimizers(ring: Ring, model: Any, descriptions: Sequence[list[int] | None]) -> None:
    """Makes the slots of optimizers that were built when they were described, as their first update would."""
    variables = model.variables
    for optimizer, numbers in zip(optimizers_of(model), descriptions, strict=False):
        if not optimizer.built and numbers is not None and max(numbers, default=-1) < len(variables):
            with ring.scope():
                optimizer.build([variables[number] for number in numbers])


def _accumulators_of(model: Any) -> set[int]:
    return {id(v) for o in optimizers_of(model) for v in getattr(o, "_accumulated_gradients", [])}


def _is_read_as_sum(variable: keras.Variable) -> bool:
    """Returns whether a variable is read as the sum or mean of all replicas, as the state of metrics is."""
    return variable.value.synchronization == tf.VariableSynchronization.ON_READ


class Taken(NamedTuple):
    """The values of variables on all ranks.

    Attributes:
      descriptions: A dict for each variable.
      arrays: An array for each variable, on rank 0; None for a variable in `shards`. If the value differs between
        replicas, or may by its nature, the array has an additional first dimension, with an entry for each replica of
        the data axis.
      shards: This rank's shards of variables, by their numbers, if each rank keeps its own. They are views of the
        variables, to be written before these change.
    """

    descriptions: list[dict[str, Any]]
    arrays: list[np.ndarray | None]
    shards: dict[int, np.ndarray]


def take(ring: Ring, model: Any, variables: Sequence[keras.Variable], apart: bool = False) -> Taken:
    """Reads the values of variables. All ranks call it. `apart`: Whether ranks keep their own shards."""
    if ring.updater is not None:
        ring.updater.before_saving(model)
    replicas = [values_of(v.value) for v in variables]
    digests = [tf.stack([equality.digest(large.read(value)) for value in values]) for values in replicas]
    control = ring.world
    num_replicas = [len(values) for values in replicas]
    everyone = control.all_gather(tf.concat(digests, 0), name="digests of a backup").numpy()
    everyone = everyone.reshape(ring.cluster.world_size, -1)
    here = ring.mesh.coordinates(ring.cluster.rank)
    taken = Taken([], [], {})
    accumulators = _accumulators_of(model)
    ends = np.cumsum(num_replicas)
    for number, (variable, values, end) in enumerate(zip(variables, replicas, ends, strict=True)):
        digest = everyone[:, end - len(values) : end]
        is_sharded = sharding_of(variable) is not None
        if id(variable) in accumulators:
            differs = not gradient_is_complete(variable)
        else:
            differs = not is_sharded and (_is_read_as_sum(variable) or bool((digest != digest[0, 0]).any()))
        description = {
            "path": variable.path,
            "dtype": variable.value.dtype.name,
            "shape": list(full_shape(variable)),
            "of_each_replica": differs,
        }
        array = None
        if is_sharded and apart:
            description["pieces"] = _describe_shards(ring, variable, differs)
            if any(rank == ring.cluster.rank for rank, *_ in description["pieces"]["of"]):
                taken.shards[number] = bits(np.atleast_1d(large.view(variable)))
        elif is_sharded:
            array = bits(slots.gather_full(variable, keep=ring.cluster.is_chief, of_each_replica=differs))
        else:
            array = bits(np.stack([value.numpy() for value in values]) if differs else values[0].numpy())
            if differs:  # it comes from one of the ranks of a replica, one that computes with it
                sends = (here.pipeline, here.model) == (mark_of(variable).stage, 0)
                array = gather(ring, array if sends else array[:0], "variable of a backup")
        taken.descriptions.append(description)
        if ring.cluster.is_chief:
            taken.arrays.append(array)
    return taken


def _describe_shards(ring: Ring, variable: keras.Variable, of_each_replica: bool) -> dict[str, Any]:
    """Describes the shards of a variable. If several ranks have the same shard, only the first is listed."""
    sharding = sharding_of(variable)
    assert sharding is not None
    first: dict[tuple[int, int], int] = {}  # rank, by its replica and its coordinate along the axis
    for rank in range(ring.cluster.world_size):
        replica = ring.mesh.coordinate("data", rank) if of_each_replica else 0
        first.setdefault((replica, ring.mesh.coordinate(sharding.axis, rank)), rank)
    of = [
        [rank, [[part.start, part.stop, part.step] for part in sharding.parts[place]], replica]
        for (replica, place), rank in first.items()
        if sharding.count(place)
    ]
    return {"lined_up": list(sharding.lined_up), "dimension": sharding.dimension, "of": of}


def give(
    ring: Ring,
    model: Any,
    variables: Sequence[keras.Variable],
    descriptions: Sequence[dict[str, Any]],
    arrays: list[np.ndarray] | None,
    saved_cluster: dict,
) -> None:
    """Assigns the values that `take` returned.

    Args:
      ring: The workers.
      model: The model. Its optimizers say which variables accumulate gradients.
      variables: One variable for each description, in the same order.
      descriptions: The descriptions from `take`, on every rank.
      arrays: The arrays from `take`, on rank 0.
      saved_cluster: `mesh` and `replicas_per_worker` when `take` was called.
    """
    data_then, per_worker_then = saved_cluster["mesh"]["data"], saved_cluster["replicas_per_worker"]
    accumulators = _accumulators_of(model)
    for number, (variable, description) in enumerate(zip(variables, descriptions, strict=True)):
        dtype = tf.as_dtype(description["dtype"]).as_numpy_dtype
        of_each = description["of_each_replica"]
        count_then = data_then * per_worker_then if of_each else 1
        entries = None
        if arrays is not None:
            entries = arrays[number].view(dtype).reshape(count_then, *description["shape"])
        if id(variable) in accumulators:
            step = per_worker_then if of_each else 1  # the replicas of a worker hold the same
            entries = None if entries is None else entries[::step]
            _give_accumulated(ring, variable, entries, count_then // step, dtype)
        elif sharding_of(variable) is not None:
            scatter(ring, None if entries is None else entries[:1], variable, dtype, lambda _: 0)
        else:
            shape = (count_then, *description["shape"])
            _give_whole(ring, variable, broadcast(ring, entries, shape, dtype), of_each, saved_cluster)


def _give_whole(
    ring: Ring, variable: keras.Variable, entries: np.ndarray, of_each: bool, saved_cluster: dict[str, Any]
) -> None:
    """Assigns a replicated variable the value of each replica, or the one value of all."""
    replicas = values_of(variable.value)
    data = ring.mesh.coordinate("data", ring.cluster.rank)
    same_replicas = (saved_cluster["mesh"]["data"], saved_cluster["replicas_per_worker"]) == (
        ring.mesh.size_along("data"),
        len(ring.devices),
    )
    if not of_each:
        values = [entries[0]] * len(replicas)
    elif same_replicas:
        values = list(entries[data * len(ring.devices) :][: len(replicas)])
    else:
        values = _spread(entries, variable, data == 0, len(replicas))
    for replica, value in zip(replicas, values, strict=True):
        replica.assign(value)


def _spread(entries: np.ndarray, variable: keras.Variable, is_first: bool, num_replicas: int) -> list[np.ndarray]:
    """Returns values for replicas other than those that held `entries`; together they mean the same."""
    if variable.value.aggregation == tf.VariableAggregation.SUM:
        total = entries.sum(0, dtype=entries.dtype)
        zeros = np.zeros_like(total)
        return [total if is_first else zeros, *[zeros] * (num_replicas - 1)]
    if variable.value.aggregation == tf.VariableAggregation.MEAN:
        return [entries.mean(0, dtype=entries.dtype)] * num_replicas
    return [entries[0]] * num_replicas


def _give_accumulated(
    ring: Ring, variable: keras.Variable, entries: Any, num_entries: int, dtype: Any
) -> None:
    """Assigns gradients that were accumulated by each replica, or are complete.

    Args:
      ring: The workers.
      variable: The accumulator. Each replica has its own gradients, unless its shards are of the whole batch's.
      entries: The accumulated gradients, on rank 0. The optimizer sums them when it uses them.
      num_entries: Number of entries.
      dtype: The dtype of the entries.
    """
    mesh, rank = ring.mesh, ring.cluster.rank
    data = mesh.coordinate("data", rank)
    are_as_then = num_entries == mesh.size_along("data") and not gradient_is_complete(variable)
    if not are_as_then and num_entries > 1:
        entries = None if entries is None else [_total(entries)]
        num_entries = 1

    def entry_of(replica: int) -> int | None:
        """Returns the number of the entry that a replica gets; None if others have them all."""
        if are_as_then:
            return replica
        return 0 if replica == 0 or gradient_is_complete(variable) else None

    if sharding_of(variable) is not None:
        scatter(ring, entries, variable, dtype, entry_of)
        return
    stacked = None if entries is None else np.asarray(entries)
    everyones = broadcast(ring, stacked, (num_entries, *full_shape(variable)), dtype)
    entry = entry_of(data)
    value = np.zeros_like(everyones[0]) if entry is None else everyones[entry]
    for replica in values_of(variable.value):
        replica.assign(value)


def _total(entries: np.ndarray) -> np.ndarray:
    total = blocks.allocate(entries.shape[1:], entries.dtype)
    total[...] = entries[0]
    for entry in entries[1:]:
        total += entry
    return total


def check_descriptions(variables: Sequence[keras.Variable], descriptions: Sequence[dict[str, Any]]) -> None:
    """Raises ConfigurationError if the descriptions are not those of these variables."""
    then = [(d["dtype"], tuple(d["shape"])) for d in descriptions]
    now = [(v.value.dtype.name, full_shape(v)) for v in variables]
    if then == now:
        return
    pairs = zip(then, now, strict=False)
    number = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(then), len(now)))
    saved = f"{descriptions[number]['path']} {then[number]}" if number < len(then) else "missing"
    has = f"{variables[number].path} {now[number]}" if number < len(now) else "missing"
    counts = f"it has {len(then)} variables, but the model has {len(now)}. The" if len(then) != len(now) else "the"
    raise ConfigurationError(
        f"The backup is of another model: {counts} first variable that differs is {saved} in the backup and {has} in "
        "the model. Use another folder, or remove this one to train from the start."
    )


def describe_cluster(ring: Ring) -> dict[str, Any]:
    """Returns the number of workers, the replicas per worker, and the mesh."""
    return {
        "num_workers": ring.cluster.world_size,
        "replicas_per_worker": len(ring.devices),
        "mesh": {axis: ring.mesh.size_along(axis) for axis in ("data", "model", "pipeline")},
    }


def find_saved_rank(ring: Ring, saved_cluster: dict[str, Any]) -> int:
    """Returns the rank whose random states to restore: this one on the same mesh, otherwise one of its rows, or 0."""
    mesh, rank = Mesh(**saved_cluster["mesh"]), ring.cluster.rank
    if saved_cluster["mesh"] == describe_cluster(ring)["mesh"]:
        return rank
    here = ring.mesh.coordinates(rank)
    return mesh.rank(Coordinates(0, here.data, 0)) if here.data < mesh.size_along("data") else 0


# -- bytes: the ring does not carry every dtype ------------------------------------------------------------------------


def gather(ring: Ring, array: np.ndarray, name: str) -> np.ndarray:
    """Concatenates arrays of one dtype along dimension 0, by rank."""
    everyone = ring.world.all_gather(tf.constant(_octets(array)), name=name).numpy()
    return everyone.view(array.dtype).reshape(-1, *array.shape[1:])


def gather_bytes(ring: Ring, data: bytes) -> list[bytes]:
    """Returns the bytes of every rank, by rank."""
    control = ring.world
    lengths = control.all_gather(tf.constant([len(data)], tf.int64), name="lengths of a backup").numpy()
    joined = control.all_gather(tf.constant(np.frombuffer(data, np.uint8)), name="state of a backup").numpy().tobytes()
    ends = np.cumsum(lengths)
    return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def broadcast(ring: Ring, array: np.ndarray | None, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns rank 0's array on every rank."""
    dtype = np.dtype(dtype)
    if array is None:
        array = np.empty(shape, dtype)
    [received] = ring.world.broadcast([tf.constant(_octets(array))], name="variable of a backup")
    return received.numpy().view(dtype).reshape(shape)


def scatter(
    ring: Ring, entries: Any, variable: keras.Variable, dtype: Any, entry_of: Callable[[int], int | None]
) -> None:
    """Sends each rank its shard of one of rank 0's arrays. The rank writes it into its variable a block at a time.

    Args:
      ring: The workers.
      entries: The arrays, on rank 0.
      variable: A Keras variable that holds a shard.
      dtype: The dtype of the arrays.
      entry_of: Maps a replica to the number of the array whose shards its ranks get; None if they get zeros.
    """
    dtype, sharding = np.dtype(dtype), sharding_of(variable)
    assert sharding is not None
    mesh, everyone = ring.mesh, range(ring.cluster.world_size)
    places = [mesh.coordinate(sharding.axis, rank) for rank in everyone]
    chosen = [entry_of(mesh.coordinate("data", rank)) for rank in everyone]
    inner = tuple(np.delete(sharding.lined_up, sharding.dimension))
    lined_up = [
        np.moveaxis(entry.reshape(sharding.lined_up), sharding.dimension, 0)
        for entry in (() if entries is None else entries)
    ]
    nothing = np.empty((0, *inner), dtype)
    counts = [*map(sharding.count, places)]
    mine, shape = counts[ring.cluster.rank], sharding.shape_of(places[ring.cluster.rank])
    step = blocks.rows_of_a_block(nothing, len(places))
    for begin in range(0, max(counts), step):
        octets, sizes = np.empty(0, np.uint8), None
        if entries is not None:
            everyones = [
                [nothing] if entry is None else [lined_up[entry][rows] for rows in sharding.slices(place)]
                for entry, place in zip(chosen, places, strict=True)
            ]
            parts = [_octets(blocks.read_rows(begin, step, arrays)) for arrays in everyones]
            octets, sizes = np.concatenate(parts), tf.constant([part.size for part in parts], tf.int64)
        received = ring.world.scatter(tf.constant(octets), sizes, name="variable of a backup")
        rows = received.numpy().view(dtype).reshape(-1, *inner)
        num_rows = min(step, mine - begin)
        if num_rows <= 0:
            continue
        block = np.moveaxis(rows if len(rows) else np.zeros((num_rows, *inner), dtype), 0, sharding.dimension)
        for replica in values_of(variable.value):
            if num_rows == mine:
                replica.assign(block.reshape(shape))
            else:
                large.write_block(replica, begin, block, sharding.dimension)


def broadcast_bytes(ring: Ring, data: bytes) -> bytes:
    """Sends rank 0's bytes to every rank."""
    [length] = ring.world.broadcast([tf.constant([len(data)], tf.int64)], name="length of a backup")
    if not ring.cluster.is_chief:
        data = bytes(int(length[0]))
    [received] = ring.world.broadcast(
        [tf.constant(np.frombuffer(data, np.uint8))], name="state of a backup"
    )
    return received.numpy().tobytes()


def _octets(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def bits(array: np.ndarray) -> np.ndarray:
    """Returns the array itself, or integers of the same size if `.npy` files do not support its dtype (bfloat16)."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")
