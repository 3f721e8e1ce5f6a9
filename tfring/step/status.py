"""Exchanges the status of ranks before each step, in one small collective on the control channel.

The number of rows differs between ranks, and data may end earlier on one of them, so no rank enters a step before all
have reported what they hold. The same message serves a rank that takes no step because its own callback has stopped
the loop, or because the epoch has had its steps: it matches the message of the others wherever they are (`loop.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfring.errors import MismatchError, Reason
from tfring.runtime import Ring

_BEGINS, _STOPS, _ENDS = range(3)  # a rank is about to begin a step, to leave the loop, to end its epoch
_HEAD = 6  # fingerprint, its negative, whether there is a batch, and a flag for each of the three above

_OWN_ROWS = (
    "If each rank has its own rows on purpose, set options.experimental_distribute.auto_shard_policy = "
    "tf.data.experimental.AutoShardPolicy.OFF. See docs/data.md."
)
_OTHER_BATCHES = (
    "The ranks drew different batches. Every rank runs the same program over the same rows, and tfring gives each its "
    "share of every batch.\nCauses:\n"
    "  * `dataset.shard` or `x[rank::n]`: remove it\n"
    "  * a shuffle, a split or a map without a seed: use `dataset.shuffle(n, seed=1)`, call "
    "`keras.utils.set_random_seed(1)` before the data is made, make unseeded datasets after the strategy\n"
    "  * random numbers of a PyDataset or a generator: draw them from `np.random.default_rng([seed, index])`\n"
    "  * a dataset that some ranks have iterated over before `fit`: do so on every rank, or on none\n"
    f"{_OWN_ROWS}"
)
_OTHER_LENGTHS = (
    "The ranks take different numbers of steps: one has ended its epoch while another begins a step. Use the same "
    "`steps_per_epoch`, `validation_steps` or `steps`, and the same data, on every rank."
)
_ENDED_EARLY = (
    "The data of one rank has ended while another still has rows. Every rank must run the same program over the same "
    "rows, and tfring gives each its share of every batch: pass all rows on every rank, without `x[rank::n]` or "
    f"`dataset.shard`. {_OWN_ROWS}"
)
OTHER_OUTPUTS = (
    "An output of `predict` that has no dimension of rows differs between replicas, as a statistic of the batch does: "
    "each replica sees only its share. Return a value for each row, or compute it from the rows that `predict` "
    "returns. See docs/data.md."
)
_STOPPED = 1  # among the reasons: a callback has stopped the loop on another rank
_SENTENCES = {
    _STOPPED: "A callback has stopped the loop on another rank.",
    Reason.ENDED_EARLY: _ENDED_EARLY,
    Reason.OTHER_BATCHES: _OTHER_BATCHES,
    Reason.OTHER_LENGTHS: _OTHER_LENGTHS,
    Reason.OTHER_OUTPUTS: OTHER_OUTPUTS,
}


class Status(NamedTuple):
    """The status that all ranks hold before a step. It is the same on all ranks, except for the shares.

    Attributes:
      has_batch: bool scalar, whether any rank has rows left.
      goes_on: bool scalar, whether the step is taken. If not, `why_not` raises the reason, except at the data's end.
      flags: Three int64 scalars, nonzero if any rank begins a step, stops, ends its epoch; None with one replica.
      is_same: bool scalar, whether all ranks drew the same batch; None with one replica.
      ended_early: bool scalar, whether a rank has no batch while others drew the shared rows; None with one replica.
      shares: float64 `[replicas_per_worker]`, each replica's rows divided by those of the global batch.
      rows: int64 `[num_replicas]`, the number of rows of each replica of all workers.
    """

    has_batch: tf.Tensor
    goes_on: tf.Tensor
    flags: list[tf.Tensor] | None
    is_same: tf.Tensor | None
    ended_early: tf.Tensor | None
    shares: tf.Tensor
    rows: tf.Tensor


def before_step(ring: Ring, rows: Any, has_batch: Any, fingerprint: Any = None) -> Status:
    """Tells the other ranks what this rank has drawn, in one collective.

    Args:
      ring: The workers.
      rows: A list of the number of rows of each replica of this worker, with None if that is not known.
      has_batch: Bool, whether this rank drew a batch.
      fingerprint: int64 scalar of the global batch; 0 without a batch; None, or always 0, if ranks have their own rows.
    """
    with tf.device("CPU:0"):  # the device of the input: on a GPU these few numbers would wait for the previous step
        rows = tf.stack([tf.cast(1 if r is None else r, tf.int64) for r in rows])
        has_batch = tf.convert_to_tensor(has_batch)
        if ring.is_alone:
            return Status(has_batch, has_batch, None, None, None, tf.ones([1], tf.float64), rows)
        fingerprint = tf.constant(0, tf.int64) if fingerprint is None else fingerprint
        head, everyones = _told(ring, tf.stack([fingerprint, -fingerprint]), has_batch, rows)
        largest, negative, drawn, *flags = tf.unstack(head)
        has_batch = drawn > 0
        is_same = largest == -negative  # both are 0 if the data has ended
        ended_early = (largest > 0) & (negative == 0)
        shares = tf.math.divide_no_nan(tf.cast(rows, tf.float64), tf.cast(tf.reduce_sum(everyones), tf.float64))
        goes_on = has_batch & is_same & (flags[_STOPS] + flags[_ENDS] == 0)
        return Status(has_batch, goes_on, flags, is_same, ended_early, shares, everyones)


def why_not(status: Status) -> list:
    """Returns operations that raise InvalidArgumentError if a step is not taken, except at the end of the data."""
    if status.flags is None:
        return []
    with tf.device("CPU:0"):
        return refuse({
            _STOPPED: status.flags[_STOPS] > 0,
            Reason.ENDED_EARLY: status.ended_early,
            Reason.OTHER_BATCHES: ~tf.convert_to_tensor(status.is_same),
            Reason.OTHER_LENGTHS: status.flags[_ENDS] > 0,
        })


def refuse(wrong: Mapping[int, Any]) -> list:
    """Returns operations that raise InvalidArgumentError if a reason holds, and record the reason for `named`.

    Args:
      wrong: A mapping from each reason to whether it holds. The first that holds is used.
    """
    with tf.device("CPU:0"):
        reasons = tf.constant([int(reason) for reason in wrong], tf.int64)
        holds = tf.stack([tf.convert_to_tensor(each) for each in wrong.values()])
        first, any_holds = tf.argmax(tf.cast(holds, tf.float32)), tf.reduce_any(holds)
        note = tf.where(any_holds, tf.gather(reasons, first), 0)
        noted = tf.raw_ops.AssignVariableOp(resource=_note(), value=note)
        with tf.control_dependencies([] if noted is None else [noted]):
            check = tf.debugging.Assert(~any_holds, [tf.gather([_SENTENCES[reason] for reason in wrong], first)])
    return [] if check is None else [check]


@functools.cache
def _note() -> tf.Tensor:
    """Returns the handle of a variable with the reason why the last step was refused, for Python; 0 for no reason."""
    with tf.init_scope(), tf.device("CPU:0"):
        note = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name="tfring/refused")
        tf.raw_ops.AssignVariableOp(resource=note, value=tf.constant(0, tf.int64))
    return note


def _take_refusal_reason() -> int:
    with tf.device("CPU:0"):
        reason = int(tf.raw_ops.ReadVariableOp(resource=_note(), dtype=tf.int64))
        tf.raw_ops.AssignVariableOp(resource=_note(), value=tf.constant(0, tf.int64))
    return reason


class StoppedElsewhere(Exception):
    """Raised if a callback has stopped the loop on another rank."""


class DifferentDataError(MismatchError, tf.errors.InvalidArgumentError):
    """Raised if ranks drew different batches or numbers of batches, or computed different values of a shared output."""

    __module__, __qualname__ = "tfring.errors", "MismatchError"  # the name in tracebacks, by which programs catch it

    def __init__(self, reason: Reason) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, _SENTENCES[reason])
        self.reason, self.rank, self.other, self.call = reason, None, None, ""


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Replaces the error of a check in a step with an error whose message is the sentence of its reason.

    Raises:
      MismatchError: If ranks do not agree; on every rank. The ring remains usable.
      StoppedElsewhere: If a callback has stopped the loop on another rank.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError:
        reason = _take_refusal_reason()
        if not reason:
            raise
    else:
        return
    if reason == _STOPPED:
        raise StoppedElsewhere
    raise DifferentDataError(Reason(reason))


def announce_loop_end(ring: Ring, stop: bool) -> tuple[bool, bool]:
    """Tells the other ranks that this rank has left Keras' loop over batches, in one eager collective.

    Args:
      ring: The workers.
      stop: Whether a callback of this rank has stopped the loop.

    Returns:
      A tuple `(stopped, drawn)`: whether any rank has stopped the loop, and whether others had drawn a batch for the
      step that they do not take.

    Raises:
      MismatchError: If others take a step and no rank has stopped the loop.
    """
    mine = [tf.int64.min, tf.int64.min, 0, 0, int(stop), int(not stop), *[0] * ring.num_replicas]
    flags = ring.world.largest(mine, name="status")[3:_HEAD]
    if flags[_BEGINS] and not flags[_STOPS]:
        raise MismatchError(_OTHER_LENGTHS, reason=Reason.OTHER_LENGTHS)
    return bool(flags[_STOPS]), bool(flags[_BEGINS])


def compare_passes(ring: Ring, num_batches: int, fingerprint: int) -> None:
    """Compares whole passes over data in one eager collective, for ranks that did not exchange each batch's status.

    Args:
      ring: The workers.
      num_batches: Number of batches that this rank drew.
      fingerprint: Fingerprint of all of them.

    Raises:
      MismatchError: On every rank, if ranks drew different batches or different numbers of batches.
    """
    mine = [num_batches, -num_batches, fingerprint, -fingerprint]
    most, least, one, other = ring.world.largest(mine, name="batches of predictions")
    if most != -least:
        raise DifferentDataError(Reason.ENDED_EARLY)
    if one != -other:
        raise DifferentDataError(Reason.OTHER_BATCHES)


def _told(ring: Ring, prints: Any, has_batch: Any, rows: Any) -> Any:
    """Returns the maximum of each number over all ranks, the head and the rows. This rank is about to begin a step."""
    before = ring.first_replica
    after = ring.num_replicas - before - rows.shape[0]
    flags = [1, 0, 0]  # for _BEGINS, _STOPS, _ENDS
    mine = tf.concat([prints, [tf.cast(has_batch, tf.int64)], flags, tf.pad(rows, [[before, after]])], 0)
    [everyone] = ring.world.all_reduce([mine], "max", name="status")
    return tf.split(everyone, [_HEAD, ring.num_replicas])
