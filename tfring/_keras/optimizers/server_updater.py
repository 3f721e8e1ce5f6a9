"""On a worker: gradients go to servers in place of the optimizer's update, and new weights come back.

```
forward    Embedding ─► the batch's ids ─► (1) pull rows ─► table's rows ─► lookup
backward   gradients, weighed by rows ─► (2) push to the servers that hold each shard ─► (3) values come back
after      the loop over batches ─► (4) pull all, so that evaluation, callbacks and files see full weights
```

A worker keeps full weights: (3) renews those that are sent in full, (1) a large table's rows before they are read. The
slots of its optimizer live on the servers, and are renewed when a file is written.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfring import _tf, partition, step
from tfring._keras import configuration, resume
from tfring._keras.metrics import metrics_of
from tfring._keras.optimizers.updater import Updater, assign, read
from tfring._keras.seam import seam
from tfring._keras.sharding import mark_of, server_shards
from tfring._keras.sharding.shards import is_element_wise
from tfring.cross_device_ops import values_of
from tfring.data import fingerprint
from tfring.data.plan import plan_of
from tfring.errors import ConfigurationError
from tfring.ring.collectives import LocalCollectives
from tfring.runtime import ring_of
from tfring.servers import messages
from tfring.servers.client import Client
from tfring.servers.shard_plan import SPLIT_BYTES, Span, plan

_Policy = tf.data.experimental.AutoShardPolicy
ROWS_BYTES = 1 << 16  # a table of at least this size is pulled by rows
_WRITES = re.compile("Assign|ResourceScatter|VariableShape")  # operations on a variable that do not read its value


class ServerUpdater(Updater):
    """Updates the weights of a strategy's models in place of their optimizers on this worker.

    Args:
      client: The connections with the servers.
      is_star: Whether workers exchange nothing with each other, and each proceeds by itself.
    """

    def __init__(self, client: Client, is_star: bool) -> None:
        self.client = client
        self.is_star = is_star
        self.statistics = Statistics()
        self.failure: BaseException | None = None  # why the last request failed: TensorFlow keeps only the text
        self._drawn: tuple[int, list[int]] = 0, []  # number of the first batch not compared yet; digests from it on
        self._claims: str | None = None  # the epoch whose batches are claimed, while one is trained; "" to skip it
        self._groups: dict[int, _Group] = {}  # by the identity of the optimizer
        self._placed: dict[int, _Placed] = {}  # by the identity of a variable, of any optimizer
        self._seen: dict[int, str] = {}  # by the same: digests of those whose values here equal those on the servers
        # For each graph, by the identity of a variable: the names of operations that read pulled rows.
        self._lookups: weakref.WeakKeyDictionary[Any, dict[int, set[str]]] = weakref.WeakKeyDictionary()
        self._assigned: dict[int, Any] = {}  # TensorFlow's variables that the program has assigned outside of a step
        self._loops = 0  # the number of the next meeting, or epoch of claims
        self._position = {"fit": 0, "epoch": 0, "pass": -1}  # calls of `fit`; Keras' epoch, and its number in the call
        self._is_behind = client.is_back  # until it has pulled the servers' values for its first step
        self._lock = threading.RLock()

    # -- an update, called when a step is traced ---------------------------------------------------------------------

    def bytes_sent(self) -> int:
        return self.client.bytes_sent()

    def seconds_waited(self) -> None:  # `Statistics` counts the time waited for servers
        return None

    def apply(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], active: Any, apply: Callable
    ) -> None:
        """Pushes gradients and assigns the reply, in a graph or eagerly, in the cross-replica context."""
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        group = self._group_of(optimizer, [g for g, _ in pairs], [v for _, v in pairs])
        inputs = [tf.cast(self._num_rows(), tf.float64), _learning_rate(optimizer)]
        gradients = _sum_duplicate_ids(group.inputs(pairs))
        gradients = _clipped(optimizer, gradients) if self.is_star else gradients
        for gradient, variable in zip(gradients, group.variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                inputs += [tf.cast(gradient.values, variable.dtype), gradient.indices]
            else:
                inputs.append(tf.cast(gradient, variable.dtype))
        pulled = [v for v, by_rows in zip(group.variables, group.by_rows, strict=True) if not by_rows]
        types = [tf.int64, *(tf.as_dtype(str(v.dtype)) for v in pulled)]
        push = self._noting_failures(group.push)
        results = tf.numpy_function(push, inputs, types, stateful=True, name="push_and_pull")
        results = results if isinstance(results, (list, tuple)) else [results]
        iterations, *values = results
        for variable, value in zip(pulled, values, strict=True):
            value.set_shape(variable.shape)
            assign(variable, value)
        counter = optimizer._iterations  # counts gradients; `iterations` counts updates if gradients accumulate
        assign(counter, tf.cast(iterations, str(counter.dtype)))

    def _noting_failures(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, changed to note its exception in `failure`."""

        def noting(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except BaseException as error:
                self.failure = error
                raise

        return noting

    def _num_rows(self) -> Any:
        """Returns the weight of this worker's gradient, its number of rows; below 0 if weighed already or unknown."""
        rows = getattr(step.current(), "num_rows", None)
        return -1 if rows is None or not self.is_star else rows

    def _group_of(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> _Group:
        found = self._groups.get(id(optimizer))
        if found is not None:
            if [id(v) for v in found.variables] != [id(v) for v in variables]:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} {optimizer.name!r} has gradients of variables that had none in its "
                    f"first step: {[v.path for v in variables]}. Compile the model again after `trainable` has changed."
                )
            for table, is_by_rows in zip(found.variables, found.by_rows, strict=True):
                if is_by_rows and not self._is_read_by_rows(table):
                    raise _reads_more_than_first(table)
            return found
        for variable in variables:
            _check_variable(variable)
        sparse = [isinstance(g, tf.IndexedSlices) for g in gradients]
        by_rows = [is_sparse and self._is_read_by_rows(v) for is_sparse, v in zip(sparse, variables, strict=True)]
        found = self._groups[id(optimizer)] = _Group(self, len(self._groups), optimizer, variables, sparse, by_rows)
        return found

    def should_retrace(self) -> bool:
        """Returns True if the step that is being traced reads more of a table, after its update, than a batch's rows.

        The step has to be traced again: from now on such a table is pulled in full.

        Raises:
          ConfigurationError: If another step has run that reads only the rows of a batch.
        """
        found = False
        for key, group in [*self._groups.items()]:
            tables = zip(group.variables, group.by_rows, strict=True)
            more = [is_by_rows and self._is_read_beyond_rows(table) for table, is_by_rows in tables]
            if any(more):
                if group.is_created:
                    raise _reads_more_than_first(group.variables[more.index(True)])
                self._groups[key] = group.pulling_in_full(more)
                found = True
        return found

    def on_assign(self, variable: Any) -> None:
        if self._groups:
            self._assigned[id(variable)] = variable

    def was_assigned(self, variable: Any) -> bool:
        """Returns whether the program has assigned a Keras variable since the last push of its optimizer."""
        return id(variable.value) in self._assigned

    def place(self, optimizer: Any, variables: Sequence[Any]) -> list[_Placed]:
        """Returns the places of variables on the servers. Those that another optimizer updates stay where they are.

        Raises:
          ConfigurationError: If a variable is in shards and this optimizer computes with full weights.
        """
        # Optimizers and constraints that compute with full weights get full weights.
        can_split = {id(v): is_element_wise(optimizer) and v.constraint is None for v in variables}
        new = [v for v in variables if id(v) not in self._placed]
        sizes = [tf.as_dtype(str(v.dtype)).size for v in new]
        splits = [can_split[id(v)] for v in new]
        spans = plan([v.shape for v in new], sizes, splits, self.client.num_servers, SPLIT_BYTES)
        for n, variable in enumerate(new):
            number = len(self._placed)
            mine = [span for span in spans if span.variable == n]
            self._placed[id(variable)] = _Placed(variable, number, mine)
        placed = [self._placed[id(v)] for v in variables]
        for each in placed:
            if not can_split[id(each.variable)] and not all(span.is_full for span in each.spans):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} {optimizer.name!r} needs full weights, but servers hold "
                    f"{each.variable.path!r} in shards, because another optimizer began to train it. Train first with "
                    "the optimizer that needs full weights."
                )
        return placed

    def find_unplaced(self, variables: Sequence[Any]) -> list[int]:
        """Returns the numbers of the variables that servers do not hold yet."""
        held_by = {id(v) for group in self._groups.values() if group.is_created for v in group.variables}
        return [n for n, variable in enumerate(variables) if id(variable) not in held_by]

    # -- rows of tables ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around_lookup(self, variable: Any, ids: Any) -> Iterator[Any]:
        """Pulls the rows that a lookup reads, yields their ids, and notes the operations that read them."""
        before = set(_operations_on(variable))
        can = _is_table(variable) and isinstance(ids, tf.Tensor) and ids.dtype.is_integer
        if can:
            if partition.is_noted():
                ids = partition.expect(ids, "ids of gradients", "the ids of a lookup")
            with partition.own():
                self._pull_before(variable, ids)
        yield ids
        if can and not tf.executing_eagerly():
            of_graph = self._lookups.setdefault(tf.compat.v1.get_default_graph(), {})
            of_graph.setdefault(id(variable), set()).update(set(_operations_on(variable)) - before)

    def _is_read_by_rows(self, variable: Any) -> bool:
        """Returns whether, in the graph of the step, a table is read only by lookups that pull its rows."""
        return bool(_reads_of(variable)) and not self._is_read_beyond_rows(variable)

    def _is_read_beyond_rows(self, variable: Any) -> bool:
        lookups = self._lookups.get(tf.compat.v1.get_default_graph(), {}).get(id(variable), set())
        return not _reads_of(variable) <= lookups

    def _pull_before(self, variable: Any, ids: tf.Tensor) -> None:
        """Pulls the rows of a table that a lookup is about to read."""
        key = id(variable)

        def pull(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            with self._lock:
                created = [g for g in self._groups.values() if g.is_created]
                found = ((g, n) for g in created for n, v in enumerate(g.variables) if v is variable and g.by_rows[n])
                group, number = next(found, (None, 0))
                if group is None or key in self._seen or self.was_assigned(variable):
                    nothing = np.zeros([0, *variable.shape[1:]], str(variable.dtype))
                    return np.zeros([0], np.int64), nothing
                return group.pull_rows(number, ids)

        ids = tf.cast(tf.reshape(ids, [-1]), tf.int64)
        types = [tf.int64, str(variable.dtype)]
        found, rows = tf.numpy_function(self._noting_failures(pull), [ids], types, stateful=True, name="pull_rows")
        found.set_shape([None])
        rows.set_shape([None, *variable.shape[1:]])
        for component in values_of(variable.value):
            component.scatter_update(tf.IndexedSlices(rows, found))

    # -- around loops and files --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around_pass(self, epoch_iterator: Any, loop: Any, inside: Any) -> Iterator[None]:
        """Begins and ends a pass over batches on the servers; see `Updater.around_pass`."""
        is_training = loop is not None and loop.kind == "train"
        if is_training:
            self._begin_training()
        if is_training and self.is_star:
            if epoch_iterator.steps_per_epoch:
                raise ConfigurationError(
                    f"steps_per_epoch={epoch_iterator.steps_per_epoch} cuts an epoch of workers that share the batches "
                    "of the data: each batch is used once per epoch, by any worker. Leave it out, and use "
                    "`dataset.take`."
                )
            epoch_iterator._num_batches = None  # this worker's number of batches is known at the end
            epoch_iterator._interrupted_warning = lambda: None
        with self._naming_failures(), inside:
            yield
        if is_training:
            self._end_training(loop.model)

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """Raises the exception of a failed request in place of TensorFlow's error."""
        self.failure = None
        try:
            yield
        except tf.errors.OpError:
            if self.failure is None:
                raise
            raise self.failure from None

    def _begin_training(self) -> None:
        """Sends the weights that the program has assigned since the last loop to the servers."""
        with self._lock:
            if self.client.is_back:
                raise ConfigurationError(
                    "`fit` was given a keras.callbacks.CallbackList, with which no worker can be restarted. Pass a "
                    "list of callbacks."
                )
            changed = [g for g in self._groups.values() if g.is_created and g.send_changes()]
            self.client.known["position"] = {**self._position, "number": self._loops}
            if self.is_star and not self._is_behind:
                self._begin_updates()
            changed = self.meet("begin", [np.array([len(changed)])])[0][0] > 0
            self._assigned.clear()
            for group in self._groups.values() if changed else ():
                group.pull()
            self._claims = f"epoch {self._next_number()}" if self.is_star else None
            self.statistics = Statistics()

    def _begin_updates(self) -> None:
        self.client.known["is_training"] = True
        position = {"position": self.client.known["position"]}
        self.client.ask_all("begin", [position] * self.client.num_servers)

    def _next_number(self) -> int:
        self._loops += 1
        return self._loops - 1

    # -- a process that replaces one that was lost -------------------------------------------------------------------

    def _begin_fit(self, model: Any) -> None:
        """Counts a call of `fit`. A restarted process resumes in the current epoch, and is waited for."""
        with self._lock:
            self._position = {"fit": self._position["fit"] + 1, "epoch": 0, "pass": -1}
            if not self.client.is_back:
                return
            head = {"fit": self._position["fit"]}
            told, sums = self.client.ask_all("return", [head] * self.client.num_servers)[0]
            self.client.is_back = False
            position = told["position"]
            self._is_behind = position is not None
            if position is None:
                return
            self._loops = position.pop("number")
            self._position = {**position, "pass": position["pass"] - 1}
            model._initial_epoch = position["epoch"]
            self._claims = ""
            resume.skip_passes(position["pass"])
            self._claims = None
            rate = told["learning_rates"].get("0")  # as callbacks have set it
            if rate is not None:
                model.optimizer.learning_rate = rate
            if sums:
                self._take_moving(model, sums)

    def _begin_epoch(self, model: Any, epoch: int) -> None:
        if model._initial_epoch == epoch and self._is_behind:
            model._initial_epoch = None  # it was for this call of `fit`
        self._position.update({"epoch": epoch, "pass": self._position["pass"] + 1})

    def before_first_step(self, is_traced: bool) -> None:
        """Pulls the servers' values for the first step of a restarted process."""
        if not self._is_behind:
            return
        if not is_traced:
            raise ConfigurationError(
                "A model compiled with run_eagerly=True has no steps that a restarted worker could join. Leave "
                "run_eagerly out."
            )
        with self._lock:
            self._begin_updates()
            for group in self._groups.values():
                group.create()
                group.pull()
            self._is_behind = False

    def _end_training(self, model: Any) -> None:
        """Pulls the servers' values, before callbacks see the end of the loop."""
        with self._lock:
            epoch, self._claims = self._claims, None
            self.client.known["is_training"] = False
            if self.is_star:
                for group in self._groups.values():
                    group.create()  # for a worker without a batch; if it is worker 0, others wait for its values
                    group.send_assigned()
                head, digests = self._take_drawn_digests(epoch)
                others = self.client.num_servers - 1
                self.client.ask_all("end", [head, *[{}] * others], [digests, *[()] * others])
                self._aggregate(model)
                self._seen.clear()  # others may have pushed even if this worker has not
            self.renew()

    def _aggregate(self, model: Any) -> None:
        """Aggregates metrics of all workers' rows, the mean of moving statistics by rows, and all statistics."""
        metrics, moving = _state_of(model)
        rows = self.statistics.rows
        arrays = [np.array([rows, float(model.stop_training)]), self.statistics.array]
        # In float64: rows times a float16 soon becomes infinite.
        arrays += [*map(_read_wide, metrics), *(_read_wide(v) * rows for v in moving)]
        sums = self.meet("end", arrays)
        self.statistics.array = sums[1]
        model.stop_training = bool(sums[0][1])  # a callback of any worker has stopped it
        for variable, value in zip(metrics, sums[2:], strict=False):
            assign(variable, value.astype(str(variable.dtype)))
        self._take_moving(model, sums)

    def _take_moving(self, model: Any, sums: list[np.ndarray]) -> None:
        """Assigns moving statistics, their mean by rows, from the result of the meeting at the end of an epoch."""
        metrics, moving = _state_of(model)
        rows = sums[0][0]
        for variable, value in zip(moving, sums[2 + len(metrics) :] if rows else (), strict=False):
            assign(variable, (value / rows).astype(str(variable.dtype)))

    def claimed(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the batches that this worker trains on. If `is_star`, server 0 assigns each worker different ones."""
        if not self.is_star:
            return dataset
        wanted: dict[str, int] = {}  # the batch that this worker has claimed but not reached, by epoch
        has_own_rows = dataset.options().experimental_distribute.auto_shard_policy == _Policy.OFF
        if not has_own_rows and _tf.leaves_order_open(dataset):
            raise ConfigurationError(
                "A dataset with deterministic=False in `map` or `batch` gives each worker a different order. With "
                "asynchronous updates or backup workers, all workers must draw the same batches in the same order, and "
                "one of them trains on each batch. Leave it out. (docs/parameter_servers.md)"
            )
        left_out = plan_of(dataset).depends_on_randomness

        def claim(number: int, digest: int) -> bool:
            epoch = self._claims
            if epoch is None:
                return True
            if not epoch:
                return False
            if number == 0:
                self._drawn = 0, []
            self._drawn[1].append(digest)
            if epoch not in wanted:
                wanted.clear()
                wanted[epoch] = self._claim(epoch)
            if number < wanted[epoch]:
                return False
            del wanted[epoch]
            return True

        def keep(number: tf.Tensor, *batch: Any) -> tf.Tensor:
            digest = tf.constant(0, tf.int64) if has_own_rows else fingerprint.of_batch(batch, left_out)
            mine = tf.numpy_function(self._noting_failures(claim), [number, digest], tf.bool, stateful=True)
            mine.set_shape([])
            return mine

        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # a batch is claimed when it is requested
        options.deterministic = True
        spec = dataset.element_spec
        mine = dataset.enumerate().filter(keep)
        mine = mine.map(lambda _, *batch: batch if isinstance(spec, tuple) and len(batch) == len(spec) else batch[0])
        return mine.with_options(options)

    def _claim(self, epoch: str) -> int:
        with self._lock:
            head, digests = self._take_drawn_digests(epoch)
            batch = int(self.client.ask(0, "claim", head, digests)[0]["batch"])
            self.client.known["claimed"] = [epoch, batch]
            return batch

    def _take_drawn_digests(self, epoch: str | None) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Returns the digests of an epoch's batches drawn since the last call, which server 0 compares over workers."""
        first, digests = self._drawn
        self._drawn = first + len(digests), []
        return {"epoch": epoch, "first": first}, [np.array(digests, np.int64)]

    def callbacks(self, callbacks: list) -> list:
        """Returns the callbacks of `fit`. If `is_star`, one before them adds staleness and waiting to an epoch's logs.

        One after them then stops training on all workers if a callback of any worker has stopped it.

        Raises:
          ConfigurationError: If a callback restarts all workers at one step: here each proceeds by itself.
        """
        import keras

        if not self.is_star:
            return callbacks
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.BackupAndRestore) or type(callback).__name__ == "Backup":
                raise ConfigurationError(
                    f"{type(callback).__name__} does not work with asynchronous updates or backup workers, which do "
                    "not restart at the same step. Use ModelCheckpoint, and `model.load_weights` before `fit`."
                )
        updater = self

        class Epochs(keras.callbacks.Callback):
            def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
                updater._begin_fit(self.model)

            def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
                updater._begin_epoch(self.model, epoch)

            def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
                if logs is not None:
                    logs.update(updater.statistics.logs())

        class StopTogether(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
                # The callbacks of a restarted worker have seen fewer epochs.
                stops = updater.meet("stop", [np.array([float(self.model.stop_training)])])
                self.model.stop_training = bool(stops[0][0])

        return [Epochs(), *callbacks, StopTogether()]

    def renew(self, with_slots: bool = False) -> None:
        """Pulls full weights into this worker's variables, and the optimizer's slots if `with_slots`."""
        with self._lock:
            for group in self._groups.values():
                if group.is_created:
                    if not group.is_fresh():
                        group.pull()
                    if with_slots:
                        group.pull_slots()

    def before_saving(self, model: Any, keep: bool = True) -> None:
        if keep:
            self.renew(with_slots=True)

    def meet(self, name: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Waits for all remaining workers and returns the sums of their arrays."""
        name = f"{name}/{self._next_number()}"
        results = self.client.ask(0, "meet", {"name": name}, arrays)[1]
        self.client.known.update(meeting=name, results=results)
        return results


class Statistics:
    """Staleness and waiting of the gradients of an epoch; those of all workers once they have met at its end.

    Attributes:
      array: Array of float64: counts of each staleness, the last one for all that are larger; counts of waits by
        `WAITS`; the number of waits, their sum in seconds, and the number of dropped gradients.
      rows: Number of this worker's rows in the epoch; its steps if the rows are unknown.
    """

    STALENESS = 32
    WAITS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, float("inf"))  # seconds: upper bounds

    def __init__(self) -> None:
        self.array = np.zeros(self.STALENESS + len(self.WAITS) + 3)
        self.rows = 0.0

    def note(self, staleness: int, seconds: float, dropped: bool, rows: float) -> None:
        """Counts a gradient."""
        self.array[min(staleness, self.STALENESS - 1)] += 1
        self.array[self.STALENESS + next(i for i, bound in enumerate(self.WAITS) if seconds <= bound)] += 1
        self.array[-3:] += 1, seconds, dropped
        self.rows += rows if rows >= 0 else 1

    def histograms(self) -> dict[str, dict]:
        """Returns the numbers of gradients by staleness, and by the upper bound of their wait in seconds."""
        staleness = {n: int(count) for n, count in enumerate(self.array[: self.STALENESS]) if count}
        waits = zip(self.WAITS, self.array[self.STALENESS : -3], strict=True)
        return {"staleness": staleness, "waited_seconds": {bound: int(count) for bound, count in waits if count}}

    def logs(self) -> dict[str, float]:
        """Returns the values for the logs of an epoch."""
        number, seconds, dropped = self.array[-3:]
        staleness = self.histograms()["staleness"]
        mean = sum(n * count for n, count in staleness.items()) / max(1.0, number)
        return {
            "staleness": mean,
            "max_staleness": float(max(staleness, default=0)),
            "waited_seconds": float(seconds / max(1.0, number)),
            "dropped_gradients": float(dropped),
        }


class _Placed(NamedTuple):
    """A weight on the servers. It has one place there, for all optimizers that update it."""

    variable: Any
    number: int
    spans: list[Span]


class _Group:
    """One optimizer, its variables, and the places of their shards."""

    def __init__(
        self,
        updater: ServerUpdater,
        number: int,
        optimizer: Any,
        variables: Sequence[Any],
        are_sparse: Sequence[bool],
        by_rows: Sequence[bool],
    ) -> None:
        self._updater = updater
        self._client = updater.client
        self._number = number
        self._optimizer = optimizer
        self.variables = variables
        self._are_sparse = are_sparse
        self.by_rows = by_rows
        placed = updater.place(optimizer, variables)
        self._spans = [span._replace(variable=n) for n, each in enumerate(placed) for span in each.spans]
        self._of_server: list[list[Span]] = [
            [p for p in self._spans if p.server == s] for s in range(self._client.num_servers)
        ]
        with tf.init_scope():  # a configuration holds numbers
            self._description = server_shards.describe(
                optimizer,
                variables,
                [each.number for each in placed],
                are_sparse,
                by_rows,
                self._spans,
                clips_norms=not updater.is_star,
            )
        self._indices = {each.number: n for n, each in enumerate(placed)}
        self._slots: list[list[tuple[int, Any, Span | None]]] = []  # for each server: (number, local slot, part)
        self.is_created = False
        self._seen_slots: list[str] | None = None  # digests of slots that equal the servers'; None after a push

    def pulling_in_full(self, chosen: Sequence[bool]) -> _Group:
        """Returns this group, which servers do not hold yet, with chosen tables pulled in full."""
        by_rows = [before and not is_chosen for before, is_chosen in zip(self.by_rows, chosen, strict=True)]
        return _Group(self._updater, self._number, self._optimizer, self.variables, self._are_sparse, by_rows)

    def is_fresh(self) -> bool:
        """Returns whether this worker's full weights equal those of the servers."""
        return all(id(variable) in self._updater._seen for variable in self.variables)

    def inputs(self, pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Returns gradients of the same kind, sparse or dense, as in the first step."""
        gradients = []
        for (gradient, variable), is_sparse in zip(pairs, self._are_sparse, strict=True):
            if is_sparse and not isinstance(gradient, tf.IndexedSlices):
                gradient = tf.IndexedSlices(gradient, tf.range(variable.shape[0], dtype=tf.int64))
            gradients.append(gradient if is_sparse else tf.convert_to_tensor(gradient))
        return gradients

    # -- in a step ---------------------------------------------------------------------------------------------------

    def push(self, rows: float, learning_rate: float, *inputs: np.ndarray) -> tuple:
        """Sends the gradients to all servers and returns the reply in full arrays. Runs in Python in each step."""
        with self._updater._lock:
            self.create()
            self.send_assigned()
            self._forget_seen()
            head: dict[str, Any] = {"group": self._number}
            if rows >= 0:
                head["weight"] = float(rows)
            if np.isfinite(learning_rate):
                head["learning_rate"] = float(learning_rate)
            replies = self._client.ask_all("push", [head] * self._client.num_servers, self._cut(inputs))
            told = [reply for reply, _ in replies]
            self._updater.statistics.note(
                max(reply["staleness"] for reply in told),
                max(reply["waited"] for reply in told),
                any(reply["factor"] == 0 for reply in told),
                float(rows),
            )
            if any("norms" in reply for reply, _ in replies):
                norms = [0.0] * len(self.variables)
                for spans, (reply, _) in zip(self._of_server, replies, strict=True):
                    for span, norm in zip(spans, reply.get("norms", []), strict=True):
                        norms[span.variable] += norm
                head = {**head, "norms": norms}
                replies = self._client.ask_all("commit", [head] * self._client.num_servers)
            values = self._joined(replies, lambda variable: not self.by_rows[variable])
            return np.int64(replies[0][0]["iterations"]), *values

    def _cut(self, inputs: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Returns the arrays that go to each server."""
        inputs = list(inputs)
        of_variable = [(inputs.pop(0), inputs.pop(0) if is_sparse else None) for is_sparse in self._are_sparse]
        result = []
        for spans in self._of_server:
            arrays = []
            for span in spans:
                values, ids = of_variable[span.variable]
                if ids is None:
                    arrays.append(values if span.is_full else values[span.begin : span.end])
                elif span.is_full:
                    arrays += [values, ids]
                else:
                    mine = (ids >= span.begin) & (ids < span.end)
                    arrays += [values[mine], ids[mine] - span.begin]
            result.append(arrays)
        return result

    def _joined(
        self, replies: Sequence[tuple[Any, list[np.ndarray]]], is_wanted: Callable[[int], bool]
    ) -> list[np.ndarray]:
        """Returns the full values of the wanted variables, from the shards that servers sent."""
        parts: dict[int, list[np.ndarray]] = {}
        for spans, (_, arrays) in zip(self._of_server, replies, strict=True):
            wanted = [p for p in spans if is_wanted(p.variable)]
            for span, array in zip(wanted, arrays, strict=True):
                parts.setdefault(span.variable, []).append(array)
        numbers = [n for n in range(len(self.variables)) if is_wanted(n)]
        return [parts[n][0] if len(parts[n]) == 1 else np.concatenate(parts[n]) for n in numbers]

    def pull_rows(self, number: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids that have rows, each once, and their rows."""
        variable = self.variables[number]
        ids = np.unique(ids)
        ids = ids[(ids >= 0) & (ids < variable.shape[0])]
        asked = []
        for span in (p for p in self._spans if p.variable == number):
            asked.append((span.server, ids[(ids >= span.begin) & (ids < span.end)] - span.begin))
        head = {"group": self._number, "variables": [number]}
        if len(asked) == 1:
            [(server, its)] = asked
            return ids, self._client.ask(server, "rows", head, [its])[1][0]
        replies = self._client.ask_all("rows", [head] * len(asked), [[its] for _, its in asked])
        return ids, np.concatenate([arrays[0] for _, arrays in replies])

    # -- values and slots --------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Makes the servers create the shards and the optimizer, once. All workers get worker 0's values."""
        if self.is_created:
            return
        is_first = self._client.rank == 0 and not self._updater._is_behind
        replies = self._send_values(self._updater.find_unplaced(self.variables) if is_first else None)
        self._slots = self._match([reply["slots"] for reply, _ in replies])
        if is_first and int(read(self._optimizer._iterations)) > 0:  # restored from a file
            self._send_slots(self._optimizer.variables)
        self.is_created = True

    def _send_values(self, numbers: list[int] | None) -> list[tuple[dict[str, Any], list[np.ndarray]]]:
        """Makes the servers create what they lack, and sends values of some variables, none if `numbers` is None."""
        head: dict[str, Any] = {"group": self._number, "description": self._description}
        arrays: list[list[np.ndarray]] = [[] for _ in self._of_server]
        if numbers is not None:
            head["values"] = numbers
            values = {n: read(self.variables[n]).numpy() for n in numbers}
            for spans, its in zip(self._of_server, arrays, strict=True):
                shards = [(values[p.variable], p) for p in spans if p.variable in values]
                its += [v if p.is_full else v[p.begin : p.end] for v, p in shards]
        return self._client.ask_all("create", [head] * self._client.num_servers, arrays)

    def _send_slots(self, chosen: Sequence[Any]) -> None:
        heads, arrays = [], []
        wanted = {id(slot) for slot in chosen}
        for slots in ([entry for entry in its if id(entry[1]) in wanted] for its in self._slots):
            heads.append({
                "group": self._number, "description": self._description, "slots": [number for number, _, _ in slots]
            })
            values = [(read(slot).numpy(), span) for _, slot, span in slots]
            arrays.append([v if span is None or span.is_full else v[span.begin : span.end] for v, span in values])
        self._client.ask_all("create", heads, arrays)

    def _match(self, described: Sequence[dict[str, Any]]) -> list[list[tuple[int, Any, Span | None]]]:
        """Finds this worker's optimizer variable for each variable of the servers' optimizers.

        Slots of a weight, and variables of no weight, come in the order in which the optimizer's class makes them.
        """
        every = self._optimizer.variables
        of_weight = {n: [s for s in every if mark_of(s).weight is v] for n, v in enumerate(self.variables)}
        of_none = [slot for slot in every if mark_of(slot).weight is None]
        rate = getattr(self._optimizer, "_learning_rate", None)  # sent with each gradient
        found = []
        for spans, described_by in zip(self._of_server, described, strict=True):
            span_of = {p.variable: p for p in spans}
            unused: dict[int | None, Iterator[Any]] = {n: iter(of_weight[n]) for n in span_of}
            unused[None] = iter(of_none)
            slots = []
            for number, path in enumerate(described_by["paths"]):
                _, token, rest = path.partition(server_shards.TOKEN)
                weight = self._indices[int("".join(itertools.takewhile(str.isdigit, rest)))] if token else None
                slot = next(unused[weight], None)
                if slot is None:
                    raise self._slots_differ(path)
                if slot is not rate:
                    slots.append((number, slot, None if weight is None else span_of[weight]))
            left = next((slot for its in unused.values() for slot in its), None)
            if left is not None and spans:
                raise self._slots_differ(left.path)
            found.append(slots)
        return found

    def _slots_differ(self, path: str) -> ConfigurationError:
        return ConfigurationError(
            f"The optimizers of a server and a worker have different variables: only one of them has {path!r} of "
            f"{type(self._optimizer).__name__}. A custom class must make its variables for each weight with "
            "`add_optimizer_variables` or `add_variable_from_reference`."
        )

    def pull(self) -> None:
        """Pulls full weights from the servers, but keeps those that the program has assigned.

        These have to be equal on all workers: worker 0 sends its own to the servers first.
        """
        if self._client.rank == 0:
            self.send_assigned()
        replies = self._client.ask_all("pull", [{"group": self._number}] * self._client.num_servers)
        values = self._joined(replies, lambda _: True)
        for variable, value in zip(self.variables, values, strict=True):
            if not self._updater.was_assigned(variable):
                assign(variable, value)
        self._note_seen()

    def pull_slots(self) -> None:
        """Pulls the optimizer's variables from the servers; see `pull`."""
        if self._client.rank == 0:
            self.send_assigned()
        replies = self._client.ask_all("slots", [{"group": self._number}] * self._client.num_servers)
        parts: dict[int, tuple[Any, list[np.ndarray]]] = {}
        for slots, (_, arrays) in zip(self._slots, replies, strict=True):
            for number, slot, span in slots:
                values = parts.setdefault(id(slot), (slot, []))[1]
                if not values or (span is not None and not span.is_full):
                    values.append(arrays[number])
        for slot, values in parts.values():
            if not self._updater.was_assigned(slot):
                assign(slot, values[0] if len(values) == 1 else np.concatenate(values))
        self._note_seen()

    def send_changes(self) -> bool:
        """Sends variables changed since the last `pull` as `send_assigned` does; returns whether there were any."""
        seen = self._updater._seen
        changed = [v for v in self.variables if id(v) in seen and seen[id(v)] != _digest(v)]
        if self._seen_slots is not None:
            slots = self._slots_held()
            changed += [v for v, old in zip(slots, self._seen_slots, strict=True) if _digest(v) != old]
        for variable in changed:
            self._updater.on_assign(variable.value)
        return self.send_assigned()

    def send_assigned(self) -> bool:
        """Sends to the servers, from worker 0, what the program has assigned; returns whether there was anything."""
        updater = self._updater
        weights = [n for n, v in enumerate(self.variables) if updater.was_assigned(v)]
        slots = [slot for slot in self._slots_held() if updater.was_assigned(slot)]
        if self._client.rank == 0 and weights:
            self._send_values(weights)
        if self._client.rank == 0 and slots:
            self._send_slots(slots)
        for variable in (*(self.variables[n] for n in weights), *slots):
            del updater._assigned[id(variable.value)]
        return bool(weights or slots)

    def _note_seen(self) -> None:
        """Notes the values that this worker has from the servers, to find what the program assigns later."""
        self._updater._seen.update((id(v), _digest(v)) for v in self.variables)
        self._seen_slots = [*map(_digest, self._slots_held())]

    def _forget_seen(self) -> None:
        for variable in self.variables:
            self._updater._seen.pop(id(variable), None)
        self._seen_slots = None

    def _slots_held(self) -> list[Any]:
        """Returns the optimizer's variables without the learning rate, which is sent with each gradient."""
        rate = getattr(self._optimizer, "_learning_rate", None)
        return [v for v in self._optimizer.variables if v is not rate]


def _sum_duplicate_ids(gradients: Sequence[Any]) -> list:
    """Sums the rows of each id of IndexedSlices."""
    sparse = [i for i, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
    gradients = list(gradients)
    if sparse:
        values = [gradients[i].values for i in sparse]
        ids = [tf.cast(gradients[i].indices, tf.int64) for i in sparse]
        pairs, _ = LocalCollectives().sum_rows(values, ids, name="gradients of tables")
        for i, (summed, each) in zip(sparse, pairs, strict=True):
            gradients[i] = tf.IndexedSlices(summed, each)
    return gradients


def _clipped(optimizer: Any, gradients: Sequence[Any]) -> Sequence[Any]:
    """Clips a worker's own gradients by norms, as Keras does. IndexedSlices have each id once."""
    bound = optimizer.clipnorm or optimizer.global_clipnorm
    if not bound:
        return gradients
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    norms = [tf.norm(v) for v in values]
    if optimizer.global_clipnorm:
        norms = [tf.linalg.global_norm(values)] * len(values)
    scaled = [v * (bound / tf.maximum(n, bound)) for v, n in zip(values, norms, strict=True)]
    pairs = zip(gradients, scaled, strict=True)
    return [tf.IndexedSlices(v, g.indices) if isinstance(g, tf.IndexedSlices) else v for g, v in pairs]


def _is_table(variable: Any) -> bool:
    """Returns whether a variable is large enough to be pulled by rows."""
    return int(np.prod(variable.shape)) * tf.as_dtype(str(variable.dtype)).size >= ROWS_BYTES


def _operations_on(variable: Any) -> dict[str, str]:
    """Returns the kinds, by name, of operations on a variable in the graph being traced. Eagerly none are known."""
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not hasattr(graph, "capture"):
        return {}
    return {each.name: each.type for each in graph.capture(values_of(variable.value)[0].handle).consumers()}


def _reads_of(variable: Any) -> set[str]:
    return {name for name, kind in _operations_on(variable).items() if not _WRITES.match(kind)}


def _reads_more_than_first(table: Any) -> ConfigurationError:
    return ConfigurationError(
        f"This step reads all rows of table {table.path!r}, but the step that was traced first read only the rows of "
        "its batch. Compile the model again before another step."
    )


def _state_of(model: Any) -> tuple[list, list]:
    """Returns the variables of a model's metrics, and its moving statistics."""
    metrics = [v for m in metrics_of(model) for v in m.variables if str(v.dtype) in messages.DTYPES]
    of_metrics = {id(v) for v in metrics}
    moving = [v for v in model.non_trainable_variables if "float" in str(v.dtype) and id(v) not in of_metrics]
    return metrics, moving


def _digest(variable: Any) -> str:
    return configuration.digest(read(variable).numpy())


def _read_wide(variable: Any) -> np.ndarray:
    value = read(variable).numpy()
    return value.astype(np.float64) if "float" in str(variable.dtype) else value


def _learning_rate(optimizer: Any) -> tf.Tensor:
    """Returns the learning rate that the worker's optimizer holds; NaN if a schedule computes it on the servers."""
    import keras

    rate = getattr(optimizer, "_learning_rate", None)
    return tf.cast(rate.value if isinstance(rate, keras.Variable) else float("nan"), tf.float64)


def _check_variable(variable: Any) -> None:
    if mark_of(variable).sharding or mark_of(variable).update:
        raise ConfigurationError(
            f"{variable.path!r} belongs to a layer that shards it over workers, but servers hold full weights. Use "
            "keras.layers.Embedding, Dense or MultiHeadAttention instead, or use RingStrategy."
        )
    if getattr(variable, "overwrite_with_gradient", False) or str(variable.dtype) not in messages.DTYPES:
        raise ConfigurationError(
            f"{variable.path!r} has dtype {variable.dtype}, but servers hold float variables that an optimizer updates."
        )


def updater_of(variable: Any) -> Updater | None:
    """Returns the Updater of a Keras variable, which replaces an optimizer on this worker; None if there is none."""
    ring = ring_of(getattr(getattr(variable, "value", None), "distribute_strategy", None))
    return None if ring is None else ring.updater


def install() -> None:
    import keras

    @seam(keras.layers.Embedding, "call")
    def call(original: Callable[..., Any], self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        table = self._embeddings
        updater = updater_of(table)
        if updater is None or getattr(self, "lora_enabled", False) or getattr(self, "quantization_mode", None):
            return original(self, inputs, *args, **kwargs)
        with updater.around_lookup(table, inputs) as inputs:
            return original(self, inputs, *args, **kwargs)
