"""Checks that arrays, settings and models are the same on every rank; otherwise all ranks report what differs.

It applies to `fit`, `evaluate` and `predict`. A program's first data are often unseeded random numbers or a random
split: then each rank has different rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import xxhash

from tfring._keras import calls, configuration
from tfring.data import fingerprint
from tfring.data.distribute import is_sliced
from tfring.data.plan import plan_of
from tfring.data.records import Records
from tfring.errors import MismatchError
from tfring.runtime import Ring

_ARGUMENTS = ("x", "y", "sample_weight", "validation_data")
_SETTINGS = (
    *("epochs", "initial_epoch", "batch_size", "steps_per_epoch", "shuffle", "class_weight", "steps"),
    *("validation_split", "validation_steps", "validation_batch_size", "validation_freq"),
)
_WHOLE_BYTES = 4 << 30  # of a larger array only this number of bytes is compared, evenly spread
_BLOCK_BYTES = 4096

_DATA = (
    "All ranks must pass the same data; each trains on its share.",
    "Pass all rows on every rank: tfring slices them (no `x[rank::n]`). If they are drawn at random, make them the "
    "same: call `keras.utils.set_random_seed(1)` before random numbers are drawn, give `train_test_split` a "
    "`random_state`, or read the data from a file. For a dataset of a rank's own rows, set AutoShardPolicy.OFF. "
    "(docs/data.md)",
)
_PROGRAM = (
    "All ranks must train the same model in the same way.",
    "Pass the same arguments on every rank, draw random numbers after `keras.utils.set_random_seed(1)`, and sort the "
    "elements of sets, `sorted(set(...))`: their order differs between processes, unless all have the same "
    "PYTHONHASHSEED, which `tfring launch` sets. (docs/data.md)",
)


def check_call(
    ring: Ring, model: Any, name: str, given: dict[str, Any], numbers: Sequence[int]
) -> list[int]:
    """Compares the arguments of `fit`, `evaluate` or `predict` over all ranks, in one small collective.

    Args:
      ring: The workers of the model.
      model: The Keras model.
      name: Name of the method.
      given: All its arguments by name.
      numbers: Integers that state what this rank needs from the others in this call.

    Returns:
      The largest of each number over all ranks.

    Raises:
      MismatchError: If ranks differ. Every rank raises it, and the ring stays usable.
    """
    if ring.cluster.world_size == 1 or (_is_independent(ring) and name != "fit"):
        return list(numbers)
    arguments = {a: given[a] for a in _ARGUMENTS if given.get(a) is not None}
    settings = {s: configuration.item(given[s]) for s in _SETTINGS if s in given}
    if name != "predict":
        settings.update(configuration.of_compile(model))
        if ring.updater is not None:
            settings.update((name, configuration.item(value)) for name, value in ring.updater.settings().items())
    return check_equal(ring, f"model.{name}", arguments, settings, numbers)


def check_model(ring: Ring, model: Any, caller: str, graph: Any = None) -> None:
    """Compares models and their compile settings over all ranks, once before the first step, in one collective.

    Args:
      ring: The workers.
      model: The Keras model, built.
      caller: Name of the function that trains it, for the message.
      graph: The graph of the step. Its constants are compared. None if there is no graph.

    Raises:
      MismatchError: If ranks differ. Every rank raises it, and the ring stays usable.
    """
    if ring.cluster.world_size == 1 or _is_independent(ring):  # servers compare what workers train
        return
    items = {**configuration.of_compile(model), **configuration.of_model(model)}
    if graph is not None and ring.mesh.pipeline == 1:  # stages have their own graphs
        items.update(configuration.of_graph(graph))
    check_equal(ring, caller, {}, items)


def check_equal(
    ring: Ring, caller: str, arguments: dict, settings: dict, numbers: Sequence[int] = ()
) -> list[int]:
    """Compares arguments over all ranks, in one small collective if they are equal.

    Args:
      ring: The workers.
      caller: Name of the function that received them, for the message.
      arguments: The arguments by name. Arrays, tensors and data frames, in any structure, are compared by shape, dtype
        and values; datasets by the tables and constants of their functions; everything else by type.
      settings: Items by name, as `configuration` describes them.
      numbers: Integers to send in the same collective.

    Returns:
      The largest of each number over all ranks.

    Raises:
      MismatchError: If ranks differ. Every rank raises it, and the ring stays usable.
    """
    control = ring.peers
    mine: dict[str, list] = {calls.CALL: [calls.described(caller), caller]}
    mine.update(part for name, value in arguments.items() for part in _described(name, value))
    mine.update((name, [*item, True]) for name, item in settings.items())
    digest = configuration.number({name: item[1] for name, item in sorted(mine.items())})
    highest, lowest, *agreed = control.largest([digest, -digest, *numbers], name="arguments")
    if highest == -lowest:
        return agreed
    text = json.dumps(mine).encode()
    lengths = control.all_gather(tf.constant([len(text)], tf.int64), name="lengths of arguments").numpy()
    texts = control.all_gather(tf.constant(np.frombuffer(text, np.uint8)), name="arguments").numpy().tobytes()
    ends = np.cumsum(lengths)
    ranks = [json.loads(texts[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
    # From here on every rank has the same information, and raises.

    def of(rank: int, name: str) -> list:
        return ranks[rank].get(name, ["nothing", None])

    names = dict.fromkeys(name for items in ranks for name in items)
    name, other = next((n, r) for n in names for r in range(1, len(ranks)) if of(r, n)[1] != of(0, n)[1])
    if name == calls.CALL:
        raise calls.disagreement(of(0, name)[0], other, of(other, name)[0])
    rule, advice = _PROGRAM if of(0, name)[2:] or of(other, name)[2:] else _DATA
    first, second = of(0, name)[0], of(other, name)[0]
    if first == second:
        second = "the same beginning, but other values after it,"
    raise MismatchError(
        f"{caller}: `{name}` is not the same on every rank: {first} on rank 0, {second} on rank {other}. "
        f"{rule} {advice}"
    )


def _is_independent(ring: Ring) -> bool:
    """Returns whether this worker trains, evaluates and predicts by itself, as with asynchronous updates."""
    return ring.updater is not None and ring.updater.is_star


def _described(name: str, value: Any) -> Iterator[tuple[str, list]]:
    """Yields `(name, [text, digest])` for each array in a structure."""
    if isinstance(value, dict):
        for key in value:
            yield from _described(f"{name}[{key!r}]", value[key])
    elif isinstance(value, (list, tuple)) and any(_is_array(v) or isinstance(v, (dict, list, tuple)) for v in value):
        for number, item in enumerate(value):
            yield from _described(f"{name}[{number}]", item)
    elif value is not None and _is_array(value):
        yield name, _compared(value)
    elif value is not None:
        yield name, [f"a {type(value).__name__}"] * 2
        if isinstance(value, tf.data.Dataset):
            policy = value.options().experimental_distribute.auto_shard_policy
            own_rows = policy == tf.data.experimental.AutoShardPolicy.OFF
            for what, item in configuration.of_dataset(value, with_constants=not own_rows).items():
                yield f"{what} of {name}", [*item, True]
            if is_sliced(value):
                yield from _slices(name, value)


def _compared(value: Any) -> list[str]:
    """Returns a description of an array, and the string that is compared."""
    arrays = [np.asarray(part) for part in _dense_parts(value)]
    first = ", ".join(str(v) for v in arrays[0].ravel()[:3])
    text = f"{type(value).__name__} of shape {tuple(value.shape)}, {arrays[0].dtype}, beginning with {first}"
    return [text, text + "".join(map(_digest, arrays))]


def _slices(name: str, dataset: tf.data.Dataset) -> Iterator[tuple[str, list]]:
    """Yields the same as `_described` for the arrays that a dataset slices, or the files of its records.

    They are compared once, as they never change.
    """
    plan = plan_of(dataset)

    def compared() -> dict[str, list[str]]:
        items: dict[str, list[str]] = {}
        for number, array in enumerate(plan.arrays):
            if isinstance(array, Records):
                items.update((f"file {i} of", file) for i, file in enumerate(array.files, len(items)))
            else:
                items[f"array {number} of"] = _compared_slices(array)
        return items

    for what, item in plan.kept("compared", compared).items():
        yield f"{what} {name}", item


def _compared_slices(array: tf.Tensor) -> list[str]:
    """Returns the same as `_compared`; strings are compared as in `fingerprint`: paths by their last two names."""
    if array.dtype != tf.string:
        return _compared(array)
    text = f"strings of shape {tuple(array.shape)}"
    return [text, f"{text} {int(fingerprint.of_batch(array))}"]


def _is_array(value: Any) -> bool:
    return (hasattr(value, "shape") and hasattr(value, "dtype")) or hasattr(value, "iloc")


def _dense_parts(value: Any) -> list:
    if isinstance(value, tf.__internal__.CompositeTensor):
        return tf.nest.flatten(value, expand_composites=True)
    if hasattr(value, "tocoo"):  # a SciPy sparse array
        sparse = value.tocoo()
        return [sparse.data, sparse.row, sparse.col]
    return [value]


def _digest(array: np.ndarray) -> str:
    if array.dtype.hasobject or array.nbytes <= _WHOLE_BYTES or not array.flags.c_contiguous:
        return configuration.digest(array)
    result = xxhash.xxh3_64()
    flat = array.reshape(-1).view(np.uint8)
    blocks = _WHOLE_BYTES // _BLOCK_BYTES
    for begin in np.linspace(0, flat.size - _BLOCK_BYTES, blocks, dtype=np.int64):
        result.update(flat[begin : begin + _BLOCK_BYTES].data)
    return result.hexdigest()
