"""On a worker: gradients go to servers in place of the optimizer's update, and new weights come back.

```
forward    Embedding ─► the batch's ids ─► (1) pull rows ─► table's rows ─► lookup
backward   gradients, weighed by rows ─► (2) push to the servers that hold each shard ─► (3) values come back
behind     the loop over batches ─► (4) pull all, so that evaluation, callbacks and files see full weights
```

A worker keeps full weights: (3) renews those that travel in full, (1) a large table's rows before they are read. Its
optimizer's slots are renewed when a file is written: they live on the servers.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfring import step
from tfring._keras import held, tables
from tfring._keras.seam import seam
from tfring._keras.sharding import axis_of, is_element_wise
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.recognition import ring_of
from tfring.ring.collectives import sum_duplicates
from tfring.servers import messages
from tfring.servers.client import Client
from tfring.servers.shard_plan import SPLIT_BYTES, Piece, plan

ROWS_BYTES = 1 << 16  # from how many bytes on a table is pulled by rows


class Updater:
    """What updates the weights of a strategy's models in place of their optimizers on this worker.

    Args:
      client: the connections with the servers.
      is_star: whether workers exchange nothing with each other, and each goes on by itself.
    """

    def __init__(self, client: Client, is_star: bool):
        self.client = client
        self.is_star = is_star
        self.staleness: dict[int, int] = {}
        self.waited: list[float] = []
        self.dropped = 0
        self._groups: dict[int, _Group] = {}  # by the identity of the optimizer
        self._tables: dict[int, bool] = {}  # by the identity of a variable: whether all its lookups pull rows
        self._loops = itertools.count()
        self._lock = threading.RLock()

    # -- an update, called where a step is traced --------------------------------------------------------------------

    def apply(self, optimizer, gradients, variables) -> None:
        """Pushes gradients and assigns what comes back; in a graph or eagerly, in the cross-replica context."""
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        group = self._group_of(optimizer, [g for g, _ in pairs], [v for _, v in pairs])
        inputs = [tf.cast(self._num_rows(), tf.float64), _learning_rate(optimizer)]
        for gradient, variable, is_sparse in zip(*group.inputs(pairs), strict=True):
            if is_sparse:
                values, ids = sum_duplicates(gradient.values, tf.cast(gradient.indices, tf.int64))
                inputs += [tf.cast(values, variable.dtype), ids]
            else:
                inputs.append(tf.cast(tf.convert_to_tensor(gradient), variable.dtype))
        pulled = [v for v, by_rows in zip(group.variables, group.by_rows, strict=True) if not by_rows]
        types = [tf.int64, *(tf.as_dtype(str(v.dtype)) for v in pulled)]
        results = tf.numpy_function(group.push, inputs, types, stateful=True, name="push_and_pull")
        results = results if isinstance(results, (list, tuple)) else [results]
        iterations, *values = results
        for variable, value in zip(pulled, values, strict=True):
            value.set_shape(variable.shape)
            _assign(variable, value)
        _assign(optimizer.iterations, tf.cast(iterations, str(optimizer.iterations.dtype)))

    def _num_rows(self):
        rows = getattr(step.current(), "num_rows", None)
        return -1 if rows is None else rows

    def _group_of(self, optimizer, gradients, variables) -> _Group:
        found = self._groups.get(id(optimizer))
        if found is not None:
            if [id(v) for v in found.variables] != [id(v) for v in variables]:
                raise ConfigurationError(
                    "Servers hold the variables that had gradients in an optimizer's first step. Received: others, of "
                    f"{type(optimizer).__name__} {optimizer.name!r}: {[v.path for v in variables]}. Compile the model "
                    "again after `trainable` has changed."
                )
            return found
        for variable in variables:
            _check_variable(variable)
        sparse = [isinstance(g, tf.IndexedSlices) for g in gradients]
        by_rows = [is_sparse and self._tables.get(id(v), False) for is_sparse, v in zip(sparse, variables, strict=True)]
        found = self._groups[id(optimizer)] = _Group(self, len(self._groups), optimizer, variables, sparse, by_rows)
        return found

    # -- rows of tables ----------------------------------------------------------------------------------------------

    def before_lookup(self, variable, ids) -> None:
        """Pulls the rows of a table that a lookup is about to read."""
        key = id(variable)
        is_large = int(np.prod(variable.shape)) * tf.as_dtype(str(variable.dtype)).size >= ROWS_BYTES
        can = is_large and isinstance(ids, tf.Tensor) and ids.dtype.is_integer
        self._tables[key] = can and self._tables.get(key, True)
        if not can:
            return

        def pull(ids):
            with self._lock:
                group, number = next(
                    ((g, n) for g in self._groups.values() for n, v in enumerate(g.variables) if v is variable),
                    (None, 0),
                )
                if group is None or not group.is_created or group.is_fresh or not group.by_rows[number]:
                    nothing = np.zeros([0, *variable.shape[1:]], str(variable.dtype))
                    return np.zeros([0], np.int64), nothing
                return group.pull_rows(number, ids)

        ids = tf.cast(tf.reshape(ids, [-1]), tf.int64)
        found, rows = tf.numpy_function(pull, [ids], [tf.int64, str(variable.dtype)], stateful=True, name="pull_rows")
        found.set_shape([None])
        rows.set_shape([None, *variable.shape[1:]])
        for component in values_of(variable.value):
            component.scatter_update(tf.IndexedSlices(rows, found))

    # -- around loops and files --------------------------------------------------------------------------------------

    def before_loop(self, is_training: bool) -> None:
        """Called before a loop over batches: weights that the program has assigned meanwhile go to the servers."""
        if is_training:
            with self._lock:
                changed = [g for g in self._groups.values() if g.is_created and g.send_changes()]
                changed = self.meet("begin", [np.array([len(changed)])])[0][0] > 0
                for group in self._groups.values() if changed else ():
                    group.pull()

    def after_loop(self, is_training: bool) -> None:
        """Called behind a loop over batches, before callbacks see its end."""
        if is_training:
            self.renew()

    def renew(self, with_slots: bool = False) -> None:
        """Pulls full weights into this worker's variables, and the optimizer's slots where asked."""
        with self._lock:
            for group in self._groups.values():
                if group.is_created:
                    if not group.is_fresh:
                        group.pull()
                    if with_slots:
                        group.pull_slots()

    def meet(self, name: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Waits for all workers that are left and returns the sums of what they have brought."""
        head = {"name": f"{name}/{next(self._loops)}"}
        return self.client.ask(0, "meet", head, arrays)[1]


class _Group:
    """One optimizer, its variables, and where their shards are."""

    def __init__(self, updater, number, optimizer, variables, are_sparse, by_rows):
        self._updater = updater
        self._client = updater.client
        self._number = number
        self._optimizer = optimizer
        self.variables = variables
        self._are_sparse = are_sparse
        self.by_rows = by_rows
        # What computes with whole weights gets them whole; so does a constraint.
        can_split = [is_element_wise(optimizer) and v.constraint is None for v in variables]
        sizes = [tf.as_dtype(str(v.dtype)).size for v in variables]
        self._pieces = plan([v.shape for v in variables], sizes, can_split, self._client.num_servers, SPLIT_BYTES)
        self._of_server: list[list[Piece]] = [
            [p for p in self._pieces if p.server == s] for s in range(self._client.num_servers)
        ]
        with tf.init_scope():  # a configuration holds numbers
            self._description = held.describe(optimizer, variables, are_sparse, by_rows, self._pieces)
        self._slots: list[list[tuple[int, Any, Piece | None]]] = []  # of each server: (number, local slot, piece)
        self.is_created = False
        self.is_fresh = False  # whether this worker's full weights are those of the servers
        self._seen: tuple[int, int] = (0, 0)

    def inputs(self, pairs):
        """Gradients, variables, and which travel as rows; a gradient has the kind of the first step's."""
        gradients = []
        for (gradient, variable), is_sparse in zip(pairs, self._are_sparse, strict=True):
            if is_sparse and not isinstance(gradient, tf.IndexedSlices):
                gradient = tf.IndexedSlices(gradient, tf.range(variable.shape[0], dtype=tf.int64))
            gradients.append(gradient)
        return gradients, self.variables, self._are_sparse

    # -- in a step ---------------------------------------------------------------------------------------------------

    def push(self, rows, learning_rate, *inputs):
        """Runs in Python in each step: the gradients to all servers, and what comes back, in full arrays."""
        with self._updater._lock:
            if not self.is_created:
                self._create()
            self.is_fresh = False
            head = {"group": self._number}
            if rows >= 0:
                head["weight"] = float(rows)
            if np.isfinite(learning_rate):
                head["learning_rate"] = float(learning_rate)
            replies = self._client.ask_all("push", [head] * self._client.num_servers, self._cut(inputs))
            self._note([reply for reply, _ in replies])
            if any("norms" in reply for reply, _ in replies):
                norms = [0.0] * len(self.variables)
                for pieces, (reply, _) in zip(self._of_server, replies, strict=True):
                    for piece, norm in zip(pieces, reply["norms"], strict=True):
                        norms[piece.variable] += norm
                head = {**head, "norms": norms}
                replies = self._client.ask_all("commit", [head] * self._client.num_servers)
            values = self._joined(replies, lambda variable: not self.by_rows[variable])
            return np.int64(replies[0][0]["iterations"]), *values

    def _cut(self, inputs) -> list[list[np.ndarray]]:
        """What of the gradients goes to each server."""
        inputs = list(inputs)
        of_variable = [(inputs.pop(0), inputs.pop(0) if is_sparse else None) for is_sparse in self._are_sparse]
        result = []
        for pieces in self._of_server:
            arrays = []
            for piece in pieces:
                values, ids = of_variable[piece.variable]
                if ids is None:
                    arrays.append(values if piece.is_full else values[piece.begin : piece.end])
                elif piece.is_full:
                    arrays += [values, ids]
                else:
                    mine = (ids >= piece.begin) & (ids < piece.end)
                    arrays += [values[mine], ids[mine] - piece.begin]
            result.append(arrays)
        return result

    def _joined(self, replies, is_wanted) -> list[np.ndarray]:
        """Full values of the variables that are wanted, from the shards that servers sent."""
        parts: dict[int, list[np.ndarray]] = {}
        for pieces, (_, arrays) in zip(self._of_server, replies, strict=True):
            wanted = [p for p in pieces if is_wanted(p.variable)]
            for piece, array in zip(wanted, arrays, strict=True):
                parts.setdefault(piece.variable, []).append(array)
        numbers = [n for n in range(len(self.variables)) if is_wanted(n)]
        return [parts[n][0] if len(parts[n]) == 1 else np.concatenate(parts[n]) for n in numbers]

    def _note(self, replies) -> None:
        updater = self._updater
        for reply in replies:
            updater.staleness[reply["staleness"]] = updater.staleness.get(reply["staleness"], 0) + 1
            updater.dropped += reply["factor"] == 0
        updater.waited.append(max(reply["waited"] for reply in replies))

    def pull_rows(self, number: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids, each once and as far as there are such rows, and their rows."""
        variable = self.variables[number]
        ids = np.unique(ids)
        ids = ids[(ids >= 0) & (ids < variable.shape[0])]
        asked = []
        for piece in (p for p in self._pieces if p.variable == number):
            asked.append((piece.server, ids[(ids >= piece.begin) & (ids < piece.end)] - piece.begin))
        head = {"group": self._number, "variables": [number]}
        if len(asked) == 1:
            [(server, its)] = asked
            return ids, self._client.ask(server, "rows", head, [its])[1][0]
        replies = self._client.ask_all("rows", [head] * len(asked), [[its] for _, its in asked])
        return ids, np.concatenate([arrays[0] for _, arrays in replies])

    # -- values and slots --------------------------------------------------------------------------------------------

    def _create(self) -> None:
        """Has the servers make the shards and the optimizer; worker 0's values are those of all."""
        head = {"group": self._number, "description": self._description}
        is_first = self._client.rank == 0
        arrays = [self._shards_of(s) if is_first else [] for s in range(self._client.num_servers)]
        heads = [{**head, "has_values": is_first}] * self._client.num_servers
        replies = self._client.ask_all("create", heads, arrays)
        self._slots = self._match([reply["slots"] for reply, _ in replies])
        if is_first and int(values_of(self._optimizer.iterations.value)[0].numpy()) > 0:  # restored from a file
            self._send_slots()
        self.is_created = True

    def _shards_of(self, server: int) -> list[np.ndarray]:
        values = [_read(self.variables[p.variable]) for p in self._of_server[server]]
        pieces = self._of_server[server]
        return [v if p.is_full else v[p.begin : p.end] for v, p in zip(values, pieces, strict=True)]

    def _send_slots(self) -> None:
        heads, arrays = [], []
        for slots in self._slots:
            heads.append({
                "group": self._number, "description": self._description, "slots": [number for number, _, _ in slots]
            })
            values = [(_read(slot), piece) for _, slot, piece in slots]
            arrays.append([v if piece is None or piece.is_full else v[piece.begin : piece.end] for v, piece in values])
        self._client.ask_all("create", heads, arrays)

    def _match(self, described) -> list[list[tuple[int, Any, Piece | None]]]:
        """Finds for each variable of the servers' optimizers the one of this worker's optimizer.

        Servers call a shard by the number of its variable; slots are called after their weight's path, or name. Where
        several of this worker's are called alike they stand in the order of weights.
        """
        unused: dict[str, list[Any]] = {}
        for slot in self._optimizer.variables:
            unused.setdefault(slot.path, []).append(slot)
        local: dict[tuple[int, str, int], Any] = {}
        found: list[list[tuple[int, Any, Piece | None]]] = [[] for _ in described]
        entries = []
        for server, described_by in enumerate(described):
            occurrences: dict[str, int] = {}
            for number, path in enumerate(described_by["paths"]):
                before, token, rest = path.partition(held.TOKEN)
                variable = int("".join(itertools.takewhile(str.isdigit, rest))) if token else -1
                occurrence = occurrences[path] = occurrences.get(path, -1) + 1
                entries.append((variable, occurrence, server, number, path, before, rest.lstrip("0123456789")))
        for variable, occurrence, server, number, path, before, after in sorted(entries):
            if path == f"{held.NAME}/learning_rate":
                continue  # goes with each gradient
            key = (variable, path, occurrence)
            if key not in local:
                before = f"{self._optimizer.name}/" if before.startswith(f"{held.NAME}/") else ""
                if variable < 0:
                    names = [before + path.removeprefix(f"{held.NAME}/")]
                else:
                    weight = self.variables[variable]
                    names = [before + name + after for name in (weight.path.replace("/", "_"), weight.name)]
                slot = next((unused[name].pop(0) for name in names if unused.get(name)), None)
                if slot is None:
                    raise ConfigurationError(
                        "A server's optimizer has the variables of a worker's. Received: "
                        f"{path!r} of {type(self._optimizer).__name__}, of which this worker has none of "
                        f"{names}. Its class makes its variables in another way than Keras' own."
                    )
                local[key] = slot
            piece = next((p for p in self._of_server[server] if p.variable == variable), None)
            found[server].append((number, local[key], piece))
        return found

    def pull(self) -> None:
        """Takes full weights from the servers."""
        heads = [{"group": self._number}] * self._client.num_servers
        values = self._joined(self._client.ask_all("pull", heads), lambda _: True)
        for variable, value in zip(self.variables, values, strict=True):
            _assign(variable, value)
        self.is_fresh = True
        self._seen = self._digests()

    def pull_slots(self) -> None:
        """Takes the optimizer's variables from the servers."""
        replies = self._client.ask_all("slots", [{"group": self._number}] * self._client.num_servers)
        parts: dict[int, tuple[Any, list[np.ndarray]]] = {}
        for slots, (_, arrays) in zip(self._slots, replies, strict=True):
            for number, slot, piece in slots:
                values = parts.setdefault(id(slot), (slot, []))[1]
                if not values or (piece is not None and not piece.is_full):
                    values.append(arrays[number])
        for slot, values in parts.values():
            _assign(slot, values[0] if len(values) == 1 else np.concatenate(values))
        self._seen = self._digests()

    def send_changes(self) -> bool:
        """Sends what was assigned since the last `pull` to the servers, and returns whether anything was."""
        if not self.is_fresh:
            return False
        now = self._digests()
        weights, slots = (one != other for one, other in zip(now, self._seen, strict=True))
        if self._client.rank == 0 and weights:
            heads = [{"group": self._number, "description": self._description, "has_values": True}]
            heads *= self._client.num_servers
            self._client.ask_all("create", heads, [self._shards_of(s) for s in range(self._client.num_servers)])
        if self._client.rank == 0 and slots:
            self._send_slots()
        return weights or slots

    def _digests(self) -> tuple[int, int]:
        """Of the weights, and of the optimizer's variables without the learning rate."""
        rate = getattr(self._optimizer, "_learning_rate", None)
        slots = [v for v in self._optimizer.variables if v is not rate]
        return _digest(self.variables), _digest(slots)


def _digest(variables) -> int:
    digest = 0
    for variable in variables:
        digest = zlib.adler32(np.ascontiguousarray(_read(variable)).reshape(-1).view(np.uint8).data, digest)
    return digest


def _read(variable) -> np.ndarray:
    return values_of(variable.value)[0].numpy()


def _assign(variable, value) -> None:
    for component in values_of(variable.value):
        component.assign(value)


def _learning_rate(optimizer):
    """The learning rate as the worker's optimizer holds it; NaN where a schedule computes it, on the servers."""
    import keras

    rate = getattr(optimizer, "_learning_rate", None)
    return tf.cast(rate.value if isinstance(rate, keras.Variable) else float("nan"), tf.float64)


def _check_variable(variable) -> None:
    if axis_of(variable) is not None or tables.update_of(variable):
        raise ConfigurationError(
            "Servers hold full weights of layers that are not sharded. Received: "
            f"{variable.path!r}, of a layer that shards it over workers. Use keras.layers.Embedding, Dense or "
            "MultiHeadAttention in its place, or RingStrategy."
        )
    if getattr(variable, "overwrite_with_gradient", False) or str(variable.dtype) not in messages.DTYPES:
        raise ConfigurationError(
            "Servers hold float variables that an optimizer updates. Received: "
            f"{variable.path!r}, dtype {variable.dtype}."
        )


def updater_of(variable) -> Updater | None:
    """Returns what updates a Keras variable in place of an optimizer on this worker; None where nothing does."""
    strategy = ring_of(getattr(getattr(variable, "value", None), "distribute_strategy", None))
    return None if strategy is None else strategy.updater


def install():
    import keras
    from keras.src.backend.tensorflow import trainer

    @seam(keras.layers.Embedding, "call")
    def call(original, self, inputs, *args, **kwargs):
        table = self._embeddings
        updater = updater_of(table)
        if updater is not None:
            is_plain = not getattr(self, "lora_enabled", False) and not getattr(self, "quantization_mode", None)
            updater.before_lookup(table, inputs if is_plain else None)
        return original(self, inputs, *args, **kwargs)

    @seam(trainer.TFEpochIterator, "catch_stop_iteration")
    @contextlib.contextmanager
    def catch_stop_iteration(original, self):
        strategy = ring_of(self._distribute_strategy)
        updater = None if strategy is None else strategy.updater
        if updater is None:
            with original(self):
                yield
            return
        loop = getattr(self, "_tfring_loop", None)
        is_training = loop is not None and loop.kind == "train"
        updater.before_loop(is_training)
        with original(self):
            yield
        updater.after_loop(is_training)
