"""Arrays handed to `fit`, `evaluate` and `predict` are the same on every rank, or every rank says what differs.

A program's first data are often random numbers without a seed, or a random split: each rank has other rows then.
"""

from __future__ import annotations

import hashlib
import inspect
import json

import numpy as np
import tensorflow as tf

from tfring._keras.seam import ring_of_model, seam
from tfring.errors import MismatchError

_ARGUMENTS = ("x", "y", "sample_weight", "validation_data")
_WHOLE_BYTES = 64 << 20  # larger arrays are compared by as many bytes of them, evenly spread
_BLOCK_BYTES = 4096


def install():
    from keras.src.backend.tensorflow import trainer

    cls = trainer.TensorFlowTrainer
    for name in ("fit", "evaluate", "predict"):
        seam(cls, name)(_checked(name, inspect.signature(getattr(cls, name))))


def _checked(name, signature):
    def replacement(original, self, *args, **kwargs):
        strategy = ring_of_model(self)
        if strategy is not None and strategy.cluster.world_size > 1 and not kwargs.get("_use_cached_eval_dataset"):
            given = signature.bind(self, *args, **kwargs).arguments
            check_equal(strategy, f"model.{name}", {a: given[a] for a in _ARGUMENTS if given.get(a) is not None})
        return original(self, *args, **kwargs)

    return replacement


def check_equal(strategy, caller: str, arguments: dict) -> None:
    """Compares arguments over all ranks, in one small collective where they are equal.

    Args:
      strategy: a RingStrategy.
      caller: what they were handed to, for the message.
      arguments: by name; arrays, tensors and data frames in any structure are compared by shape, dtype and values,
        all else by its type.

    Raises:
      MismatchError: on every rank. The ring may be used on.
    """
    control = strategy.extended.world
    mine = dict(part for name, value in arguments.items() for part in _described(name, value))
    text = json.dumps(mine, sort_keys=True).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
    [bounds] = control.all_reduce([tf.constant([digest, -digest], tf.int64)], "max", name="arguments")
    if int(bounds[0]) == -int(bounds[1]):
        return
    lengths = control.all_gather(tf.constant([len(text)], tf.int64), name="lengths of arguments").numpy()
    texts = control.all_gather(tf.constant(np.frombuffer(text, np.uint8)), name="arguments").numpy().tobytes()
    ends = np.cumsum(lengths)
    ranks = [json.loads(texts[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
    # From here on every rank knows the same, and raises.
    name = next(n for n in [*mine, *(n for of in ranks for n in of)] if len({str(of.get(n)) for of in ranks}) > 1)
    other = next(r for r, of in enumerate(ranks) if of.get(name) != ranks[0].get(name))
    raise MismatchError(
        f"{caller}: `{name}` is not the same on every rank; each rank trains on its share of one and the same data. "
        f"Received: {_text(ranks[0].get(name))} on rank 0, {_text(ranks[other].get(name))} on rank {other}. "
        "Hand all rows to every rank, for tfring cuts them (no `x[rank::n]`). Where they are drawn, make them the "
        "same: call `keras.utils.set_random_seed(1)` before random numbers are drawn, "
        "give `train_test_split` a `random_state`, or read the data from a file. (docs/data.md)"
    )


def _described(name, value):
    """`(name, [text, digest])` of each array in a structure."""
    if isinstance(value, dict):
        for key in value:
            yield from _described(f"{name}[{key!r}]", value[key])
    elif isinstance(value, (list, tuple)) and any(_is_array(v) or isinstance(v, (dict, list, tuple)) for v in value):
        for number, item in enumerate(value):
            yield from _described(f"{name}[{number}]", item)
    elif value is not None and _is_array(value):
        arrays = [np.asarray(part) for part in _dense_parts(value)]
        first = ", ".join(str(v) for v in arrays[0].ravel()[:3])
        text = f"{type(value).__name__} of shape {tuple(value.shape)}, {arrays[0].dtype}, beginning with {first}"
        yield name, [text, "".join(map(_digest, arrays))]
    elif value is not None:
        yield name, [f"a {type(value).__name__}", ""]


def _is_array(value):
    return (hasattr(value, "shape") and hasattr(value, "dtype")) or hasattr(value, "iloc")


def _dense_parts(value):
    if isinstance(value, tf.__internal__.CompositeTensor):
        return tf.nest.flatten(value, expand_composites=True)
    if hasattr(value, "tocoo"):  # of SciPy
        sparse = value.tocoo()
        return [sparse.data, sparse.row, sparse.col]
    return [value]


def _digest(array) -> str:
    digest = hashlib.blake2b(digest_size=8)
    if array.dtype.hasobject:
        digest.update(repr(array.tolist()).encode())
    elif array.nbytes <= _WHOLE_BYTES or not array.flags.c_contiguous:
        # By octets: the buffers of dtypes that are not NumPy's own, such as bfloat16, are not to be cast.
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    else:
        flat = array.reshape(-1).view(np.uint8)
        blocks = _WHOLE_BYTES // _BLOCK_BYTES
        for begin in np.linspace(0, flat.size - _BLOCK_BYTES, blocks, dtype=np.int64):
            digest.update(flat[begin : begin + _BLOCK_BYTES])
    return digest.hexdigest()


def _text(description):
    return "nothing" if description is None else description[0]
